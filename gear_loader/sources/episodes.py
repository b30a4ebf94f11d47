"""Common parts of all sources: episodes, their standard columns, and conversion to a column's dtype.

An episode is a mapping of column names to arrays ``[T, *shape]``, one entry a step. The standard columns:

| column | dtype | at step t |
|---|---|---|
| `observation` | as the source has it | what the policy saw before it acted |
| `action` | as the source has it | what it then did |
| `reward` | float32 (float64 with `keep_float64`, where it is one) | what it got for that |
| `terminated` | bool | the episode ended there by itself |
| `truncated` | bool | the episode was cut off there |
| `next_observation` | as the source has it | what it saw afterwards; only on request |

The last `next_observation` is in `Episode.final` without a request, where the source has it.

A nested observation or action becomes one column for each leaf, with the keys (or positions) joined by
dots: ``{"image": ..., "pose": {"position": ...}}`` gives `observation.image` and
`observation.pose.position`, a tuple `observation.0`, `observation.1` and so on.
"""

from __future__ import annotations

import abc
import dataclasses
import difflib
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError, SourceError
from gear_loader.storage.dtypes import ITEM_BYTES, NUMPY_DTYPES, dtype_names, torch_dtypes
from gear_loader.storage.schema import Column, as_mapping
from gear_loader.utils.arrays import shown, unreadable
from gear_loader.utils.checks import at_least


class Episode(dict[str, Any]):
    """One episode: column name -> array ``[T, *shape]``, or ``[*shape]`` of what it has once (a column per trajectory);
    of values of any length a list.

    Attributes:
        final: values after the last step, column name -> array ``[*shape]``: the observation that follows the last
            action, without which a truncated episode has no last target. Empty if the source does not have it.
            `load` stores it where the table's columns have ``Column(final=True)``; so does
            ``table.add(episode, final=episode.final)``, while `Table.extend` takes no final values.
    """

    def __init__(
        self, columns: Mapping[str, Any] | None = None, final: Mapping[str, np.ndarray] | None = None
    ) -> None:
        super().__init__(columns or {})
        self.final: dict[str, np.ndarray] = dict(final or {})


Columns = Iterable[str] | Mapping[str, str] | None
"""Which columns to take: names, or {name in the table: name in the source}, or None for the standard ones."""

STANDARD = ("observation", "action", "reward", "terminated", "truncated")
"""The columns that every source gives by default."""

# Dtypes that numpy has and a table does not have, and the next wider dtype that holds their values.
_WIDENED = {np.dtype(np.uint16): torch.int32, np.dtype(np.uint32): torch.int64}
_FROM_NUMPY = {dtype: torch_dtypes()[name] for name, dtype in NUMPY_DTYPES.items()}


class EpisodeReader(abc.ABC):
    """Episodes of a data set on disk: lengths and columns are known beforehand, iteration can be repeated.

    Attributes:
        source: name of the data set in errors.
        lengths: steps of each episode, int64 [n], read-only.
        schema: the columns of every episode, as `gear_loader.Table.create` takes them.
        finals: the columns of `Episode.final`.
        payload: bytes that all values of any length take together, if that is known, or an upper bound; else None, and
            `load` reads them once more to make a table of that size.
        starts: numbers of episodes, int64 [m], ascending from 0, at which `between` can begin without reading what is
            before: where files begin, or each one. By default 0 alone.

    Columns may be of any that a table has. Values of any length, ``Column(str)``, ``Column(bytes)``, a shape that
    begins with None, or a codec, are given as `gear_loader.Table.add` takes them: a list with a value for each step, or
    one value of a column per trajectory. Encoded images are bytes as the file has them; they are not decoded.
    """

    def __init__(
        self,
        source: str,
        lengths: np.ndarray,
        schema: Mapping[str, Column],
        finals: Iterable[str] = (),
        payload: int | None = None,
    ) -> None:
        self.source = source
        self.payload = payload
        self.finals = frozenset(finals)
        self.lengths = np.asarray(lengths, dtype=np.int64)
        self.lengths.flags.writeable = False
        self.schema = dict(schema)
        self.starts = np.zeros(1, dtype=np.int64)

    def __len__(self) -> int:
        return len(self.lengths)

    @property
    def num_steps(self) -> int:
        """Steps of all episodes together."""
        return int(self.lengths.sum())

    @abc.abstractmethod
    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order.

        Raises:
            SourceError: the data are damaged; the message names the episode, the column and the step.
        """

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """Read the episodes `first` to `last` - 1; as iteration. By default what is before them is read too.

        Of a reader with several `starts` several threads may read at once.
        """
        return itertools.islice(iter(self), first, last)

    def __repr__(self) -> str:
        return f"<{self.source}: {len(self)} episodes, {self.num_steps} steps, columns {list(self.schema)}>"


def chunk_starts(ends: np.ndarray, rows: int) -> np.ndarray:
    """`EpisodeReader.starts` of steps one after another, in chunks of so many that are read as a whole.

    Args:
        ends: step after the last one of each episode, int64 [n].
    """
    starts = np.concatenate([[0], ends[:-1]]) // max(rows, 1)
    return np.flatnonzero(np.diff(starts, prepend=-1))


def infer_schema(episodes: Any) -> dict[str, Column]:
    """The columns that a table needs for these episodes.

    Args:
        episodes: a reader, a sequence of episodes (the first one decides), or one episode: a mapping of
            column names to numpy arrays or torch tensors ``[T, *shape]``.

    Returns:
        Column name -> `gear_loader.Column`, as `gear_loader.Table.create` takes it.

    Raises:
        SourceError: no episode, an iterator (looking at its first episode would consume it), something that
            is not an array of at least one dimension, or a dtype that columns do not support.

    Example:
        >>> infer_schema([{"reward": np.zeros(7, np.float32)}])
        {'reward': Column(dtype=torch.float32, shape=())}
    """
    if isinstance(episodes, EpisodeReader):
        return dict(episodes.schema)
    episodes = as_mapping(episodes)
    if isinstance(episodes, Mapping):
        return _schema_of(episodes, "the episode")
    if not isinstance(episodes, Sequence) or isinstance(episodes, (str, bytes)):
        raise SourceError(
            f"A {type(episodes).__name__} was received; expected a sequence of episodes or one episode. Looking "
            "at an iterator's first episode would consume it: pass list(episodes), or the first episode alone."
        )
    if not episodes:
        raise SourceError("No episodes were received; expected at least one, to take the columns from.")
    return _schema_of(episodes[0], "episode 0")


def _schema_of(episode: Any, where: str) -> dict[str, Column]:
    episode = as_mapping(episode)
    if not isinstance(episode, Mapping) or not episode:
        raise SourceError(
            f"{where} is {shown(episode)}; expected a mapping of column names to arrays [T, ...]."
        )
    schema = {}
    for name, values in episode.items():
        nested = isinstance(values, torch.Tensor) and values.is_nested
        if nested or not isinstance(values, (np.ndarray, torch.Tensor)) or values.ndim == 0:
            raise SourceError(
                f"Column {name!r} of {where} is {describe(values)}; expected a numpy array or torch tensor [T, ...]."
            )
        dtype = values.dtype if isinstance(values, torch.Tensor) else _FROM_NUMPY.get(values.dtype)
        if dtype is None or dtype not in dtype_names():
            raise SourceError(
                f"Column {name!r} of {where} has dtype {values.dtype}; expected one of {', '.join(ITEM_BYTES)}. "
                "Convert it first."
            )
        schema[name] = column_of(dtype, tuple(values.shape[1:]), f"Column {name!r} of {where}")
    return schema


def column_of(dtype: torch.dtype, shape: tuple[int | None, ...], what: str) -> Column:
    """Create a column.

    Args:
        what: the data in errors.

    Raises:
        SourceError: no table can have such a column.
    """
    try:
        return Column(dtype, shape)
    except SchemaError as error:
        raise SourceError(f"{what} cannot become a column of a table: {error}") from error


def describe(values: Any) -> str:
    """Type, and of an array dtype and shape, of a value; for error messages."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        kind = unreadable(values) if isinstance(values, torch.Tensor) else None
        return f"a {kind}" if kind else f"an array of {values.dtype} and shape {list(values.shape)}"
    return f"an object of type {type(values).__name__}"


def plan_dtype(role: str, dtype: Any, what: str, *, keep_float64: bool) -> torch.dtype:
    """The dtype of the column that holds the source's values of `dtype`.

    Rewards become float32 and the two flags bool. Everything else keeps its dtype, except for uint16 and
    uint32, which no column has: they become int32 and int64. float64 becomes float32 throughout, unless
    `keep_float64`.

    Args:
        role: the column's name in the source.
        dtype: a numpy dtype, of either byte order.
        what: the data in errors.

    Raises:
        SourceError: a dtype that no column holds, such as strings.
    """
    dtype = np.dtype(dtype)
    if dtype.kind in "biuf":
        dtype = dtype.newbyteorder("=")
        if role == "reward":
            return torch.float64 if keep_float64 and dtype == np.float64 else torch.float32
        if role in ("terminated", "truncated"):
            return torch.bool
        if dtype == np.float64 and not keep_float64:
            return torch.float32
        planned = _WIDENED.get(dtype) or _FROM_NUMPY.get(dtype)
        if planned is not None:
            return planned
    kind = {"U": " (text)", "S": " (text)", "O": " (text or other objects)"}.get(dtype.kind, "")
    raise SourceError(
        f"{what} has dtype {dtype}{kind}; expected one of {', '.join(ITEM_BYTES)}. Leave it out with columns=[...], or "
        "convert the data first."
    )


def refuse_objects(where: str, unfit: Mapping[str, str], chosen: Mapping[str, str], expected: str) -> None:
    """Raise SourceError if a source has columns of text or other objects, which no table holds.

    Args:
        where: the source in errors.
        unfit: column in the source -> what it is, as the end of a sentence.
        chosen: {name in the table: name in the source}, with the unfit ones.
        expected: what a column may be.
    """
    if not unfit:
        return
    rest = {name: role for name, role in chosen.items() if role not in unfit}
    listed = list(rest) if all(name == role for name, role in rest.items()) else rest
    found = ", ".join(f"column {role!r} is {what}" for role, what in unfit.items())
    remedy = (
        f"Leave {'it' if len(unfit) == 1 else 'them'} out with columns={listed!r}, or turn"
        if rest
        else "Turn"
    )
    raise SourceError(
        f"{where}: {found}; expected {expected}. {remedy} the values into arrays of numbers first."
    )


@dataclasses.dataclass(eq=False)  # an exception stays hashable
class MisfitError(Exception):
    """A value that the column cannot hold.

    Attributes:
        problem: the problem, as the end of a sentence that begins with the place.
        step: first affected step, counted from the start of the array, or None for all steps.
    """

    problem: str
    step: int | None = None


def convert(values: np.ndarray, dtype: torch.dtype, *, finite: bool = False) -> np.ndarray:
    """Bring values [T, ...] to a column's dtype, without losing any of them silently.

    Args:
        values: numbers or flags.
        dtype: what the column holds; bfloat16, which numpy does not have, stays float32 here.
        finite: refuse NaN and infinity, too.

    Returns:
        The same array where nothing had to be done, else a new one.

    Raises:
        MisfitError: a number outside the dtype's range, a flag that is neither 0 nor 1, floating-point values for an
            integer column, values that are not numbers, or (with `finite`) a value that is not finite.
    """
    target = NUMPY_DTYPES.get(dtype_names()[dtype], np.dtype(np.float32))
    kinds = (values.dtype.kind, target.kind)
    if kinds[0] not in "biuf" or (kinds[0] == "f" and kinds[1] in "iu"):
        raise MisfitError(f"holds values of {values.dtype} where {target} is expected")
    if finite and kinds[0] == "f":
        _refuse(~np.isfinite(values), values, "which is not a finite number")
    if values.dtype == target:
        return values
    if kinds[1] == "b":
        _refuse((values != 0) & (values != 1), values, "which is not a flag: expected 0 or 1")
        return values.astype(target)
    if kinds[1] == "f":
        with np.errstate(over="ignore"):  # the next check finds overflows and their step
            result = values.astype(target)
        if values.dtype.itemsize > target.itemsize:
            _refuse(np.isinf(result) & np.isfinite(values), values, f"which {target} cannot hold")
        return result
    if kinds[0] != "b" and not np.can_cast(values.dtype, target):
        limits = np.iinfo(target)
        _refuse((values < limits.min) | (values > limits.max), values, f"which {target} cannot hold")
    return values.astype(target)


def _refuse(bad: np.ndarray, values: np.ndarray, why: str) -> None:
    if bad.any():
        first = tuple(int(i) for i in np.argwhere(bad)[0])
        raise MisfitError(f"holds {values[first].item()!r}, {why}", first[0])


def converted(
    values: np.ndarray, dtype: torch.dtype, place: Callable[[int | None], str], *, finite: bool = False
) -> np.ndarray:
    """`convert`, but raise SourceError; `place`: the beginning of its text, for the affected step."""
    try:
        return convert(values, dtype, finite=finite)
    except MisfitError as misfit:
        remedy = f" {FINITE_REMEDY}" if finite else ""
        raise SourceError(f"{place(misfit.step)} {misfit.problem}.{remedy}") from None


def is_finite_role(role: str, allow_nonfinite: bool) -> bool:
    """Whether NaN and infinity are refused in this column, as in rewards by default."""
    return role == "reward" and not allow_nonfinite


FINITE_REMEDY = (
    "Repair or leave out the episode, or pass allow_nonfinite=True to take such rewards as they are."
)


def check_count(option: str, value: Any) -> None:
    """Refuse an option that is neither None nor a whole number of at least 1.

    Raises:
        SourceError: it is something else.
    """
    if value is not None:
        at_least(option, value, otherwise=", or None", error=SourceError)


def requested(columns: Columns, default: Sequence[str]) -> dict[str, str]:
    """Check the `columns` option of a source: {name in the table: name in the source}, in the order given.

    Raises:
        SourceError: it holds no names, or the same one twice.
    """
    if columns is None:
        columns = default
    if isinstance(columns, str):
        raise SourceError(
            f"columns={columns!r} is one string; expected a list of names: columns=[{columns!r}]."
        )
    if not isinstance(columns, (Mapping, Sequence, set, frozenset)) or isinstance(
        columns, (bytes, bytearray)
    ):
        raise SourceError(f"columns= is {shown(columns)}; expected a list of names, or a mapping of them.")
    pairs = list(columns.items()) if isinstance(columns, Mapping) else [(name, name) for name in columns]
    names: dict[str, str] = {}
    for name, wish in pairs:
        if not isinstance(name, str) or not isinstance(wish, str):
            raise SourceError(f"columns= holds {shown((name, wish))}; expected names of columns, as strings.")
        if name in names:
            raise SourceError(f"columns= names {name!r} twice; expected each column once.")
        names[name] = wish
    if not names:
        raise SourceError("columns= is empty; expected at least one column.")
    return names


def select(wanted: Mapping[str, str], available: Sequence[str], source: str) -> dict[str, str]:
    """Find the wanted columns among those a source has.

    A name that stands for several columns, such as `observation` for `observation.image` and
    `observation.pose`, selects all of them.

    Args:
        wanted: as `requested` returns it.
        available: what the source has.
        source: name of the source in errors.

    Returns:
        {name in the table: name in the source}.

    Raises:
        SourceError: the source does not have one of them, or two would get the same name.
    """
    chosen: dict[str, str] = {}
    for name, wish in wanted.items():
        parts = [wish] if wish in available else [a for a in available if a.startswith(f"{wish}.")]
        if not parts:
            close = difflib.get_close_matches(wish, available, n=1)
            hint = f" Did you mean {close[0]!r}?" if close else ""
            raise SourceError(f"{source} has no column {wish!r}; it has {listing(available)}.{hint}")
        for part in parts:
            target = name + part[len(wish) :]
            if target in chosen:
                raise SourceError(
                    f"Two columns of {source} would both be called {target!r}; rename one with columns=."
                )
            chosen[target] = part
    return chosen


def listing(names: Iterable[str], most: int = 20) -> str:
    """Names for an error message, at most `most` of them."""
    names = list(names)
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(map(repr, names[:most])) + more if names else "nothing"
