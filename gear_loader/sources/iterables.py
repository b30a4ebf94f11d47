"""Episodes of an iterable."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    column_of,
    describe,
    is_finite_role,
    listing,
    plan_dtype,
    refuse_objects,
    requested,
    select,
)
from gear_loader.sources.fitting import final_of, fitted
from gear_loader.sources.time_steps import how_to_cut, is_frame, is_hugging_face, refuse_steps
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.ragged_input import copied_ragged
from gear_loader.storage.schema import Column, as_mapping, copied, keeps
from gear_loader.utils.arrays import unreadable

_Values = np.ndarray | torch.Tensor
_SOURCE = "The source"


class IterableReader(EpisodeReader):
    """Episodes of an iterable, which is read to its end and checked in the constructor; or, if `lazy`, while they are
    iterated over, once: then `lengths` is empty, and `schema`, which is needed, tells the columns."""

    def __init__(
        self,
        episodes: Iterable[Any],
        most: int | None,
        schema: Mapping[str, Column] | None,
        finals: Collection[str] | None,
        once: frozenset[str],
        *,
        lazy: bool = False,
        columns: Columns,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self.lazy, self._most = lazy, most
        self._options = schema, finals, columns, keep_float64, allow_nonfinite
        if schema is not None:
            once = frozenset(name for name, column in schema.items() if column.trajectory)
        self._planned: dict[str, Column] = {}
        checked = self._checked(episodes, once)
        if lazy:
            super().__init__(_SOURCE, np.empty(0), schema or {})
            self._episodes: Iterable[Episode] = self._streamed(checked)
            return
        found = list(checked)
        if not found:
            raise SourceError(f"{_SOURCE} has no episodes; expected at least one.")
        lengths, planned = [length for _, length in found], self._planned
        flat = schema is None and not any(c.shape for c in planned.values() if not c.trajectory)
        if flat and is_hugging_face(episodes) and len(lengths) > 1 and len(set(lengths)) == 1:
            raise SourceError(
                f"Each of {len(lengths):,} rows of {describe(episodes)} has {lengths[0]} numbers in "
                f"{listing(planned)}: they look like time steps, not like episodes. {how_to_cut(episodes)}"
            )
        self._episodes = [episode for episode, _ in found]
        super().__init__(_SOURCE, np.array(lengths), planned, found[0][0].final)

    def _streamed(self, checked: Iterator[tuple[Episode, int]]) -> Iterator[Episode]:
        empty = True
        for episode, _ in checked:
            if episode.keys() != self.schema.keys():
                raise SourceError(
                    f"{_SOURCE} gives the columns {list(episode)}; the table has {list(self.schema)}. Name the table's "
                    "columns: columns={name in the table: name in the source}."
                )
            empty = False
            yield episode
        if empty:
            raise SourceError(f"{_SOURCE} has no episodes; expected at least one.")

    def _checked(self, episodes: Iterable[Any], once: frozenset[str]) -> Iterator[tuple[Episode, int]]:
        """The episodes, and their numbers of steps."""
        schema, finals, columns, keep_float64, allow_nonfinite = self._options
        source, planned, kept = _SOURCE, self._planned, keeps(episodes)
        chosen: dict[str, str] = {}
        for number, item in enumerate(
            _watched(itertools.islice(episodes, self._most), source, added=self.lazy)
        ):
            where = f"{source}, episode {number}"
            episode = as_mapping(item)
            if not isinstance(episode, Mapping) or not episode:
                rows = f" {how_to_cut(item if is_frame(item) else episodes)}"
                raise SourceError(
                    f"{where} is {describe(episode)}; expected a mapping of columns to arrays [T, ...].{rows}"
                )
            if not chosen:
                chosen = select(requested(columns, list(episode)), list(episode), f"{where},")
                if schema is None:
                    objects = {role: _object(episode[role]) for role in chosen.values()}
                    refuse_objects(
                        where,
                        {role: what for role, what in objects.items() if what},
                        chosen,
                        "numbers, flags, text or bytes [T, ...]",
                    )
                    once |= {name for name, role in chosen.items() if isinstance(episode[role], (str, bytes))}
                _check_once(once, chosen, where, named=schema is None)
                if schema is None:
                    refuse_steps(episodes, item, episode, chosen, once, where)
            arrays: dict[str, Any] = {}
            for name, role in chosen.items():
                if role not in episode:
                    raise SourceError(
                        f"{where} has no column {role!r}; it has {list(episode)}. Expected the columns of the first."
                    )
                values, place = episode[role], f"{where}: column {role!r}"
                column = planned.get(name) if schema is None else schema.get(name)
                if column is None:
                    column = _of_any_length(values, once=name in once)
                if column is None or column.ragged is None:
                    values = _array(values, place, once=name in once)
                if not kept or type(episode) not in (dict, Episode):
                    values = copied_ragged(values)
                if column is None:
                    column = _plan(values, role, place, keep_float64, once=name in once)
                planned[name] = column
                finite = is_finite_role(role, allow_nonfinite)
                arrays[name] = fitted(values, column, f"{where}{{}}: column {role!r}", finite=finite)
            steps = {name: _count(values) for name, values in arrays.items() if name not in once}
            if len(set(steps.values())) != 1 or 0 in steps.values():
                hint = " Name those that an episode has once: per_trajectory=." if schema is None else ""
                raise SourceError(
                    f"{where} has columns of {steps} steps; expected as many in each, at least one.{hint}"
                )
            last = {}
            for name in steps if finals is None else [name for name in steps if name in finals]:
                value = _last(episode, chosen[name], steps[name], where)
                if value is not None:
                    target = planned[name] if schema is None else schema[name]
                    what = f"{where}: the value after the last step of column {chosen[name]!r}"
                    last[name] = copied(fitted(value, target, what, finite=False)[0])
            yield Episode(arrays, last), next(iter(steps.values()))

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)


def _last(episode: Mapping[str, Any], role: str, steps: int, where: str) -> _Values | None:
    """The value after the last of an episode's steps, ``[1, *shape]``; None if the episode does not tell it."""
    own = final_of(episode)
    if role in own:
        return _array(own[role], f"{where}: the value after the last step of column {role!r}", once=True)[
            None
        ]
    following = next((name for name in (f"next_{role}", f"next.{role}") if name in episode), None)
    if following is None:
        return None
    values = _array(episode[following], f"{where}: column {following!r}")
    if len(values) != steps:
        raise SourceError(
            f"{where} has {len(values)} steps of column {following!r} and {steps} of {role!r}; expected as many."
        )
    return values[-1:]


def _watched(episodes: Iterable[Any], source: str, *, added: bool) -> Iterator[Any]:
    number = 0
    try:
        for episode in episodes:
            yield episode
            number += 1
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(
            f"{source} raised {type(error).__name__} at episode {number}: {error}."
            f"{'' if added else ' Nothing was added.'}"
        ) from error


def _object(values: Any) -> str:
    """What a column is that holds objects other than text; "" for any other."""
    if not isinstance(values, np.ndarray) or values.dtype.kind != "O":
        return ""
    return "" if _text_of(values.ravel().tolist()) else "an array of objects"


def _text_of(values: Any) -> type[str] | type[bytes] | None:
    """What all values of a list are; None of others."""
    for kind in (str, bytes):
        if values and all(isinstance(value, kind) for value in values):
            return kind
    return None


def _of_any_length(values: Any, *, once: bool) -> Column | None:
    """The column of text, bytes or arrays of uneven length; None of others."""
    per: Any = "trajectory" if once else "step"
    if once and isinstance(values, (str, bytes)):
        return Column(str if isinstance(values, str) else bytes, per=per)
    if isinstance(values, Ragged):
        return Column(values.values.dtype, (None, *values.values.shape[1:]), per=per)
    if isinstance(values, np.ndarray):
        if values.ndim != 1 or values.dtype.kind not in "USO":
            return None
        values = values.tolist()
    kind = _text_of(values) if isinstance(values, (list, tuple)) else None
    if kind is not None and not once:
        return Column(kind)
    if once or not isinstance(values, (list, tuple)) or len(set(map(_shape, values))) < 2:
        return None
    shapes = set(map(_shape, values))
    if None in shapes or any(shape == () for shape in shapes) or len({shape[1:] for shape in shapes}) > 1:  # type: ignore[index]
        return None
    first = torch.as_tensor(values[0], device="cpu")
    return column_of(first.dtype, (None, *first.shape[1:]), "Values of any length")


def _shape(value: Any) -> tuple[int, ...] | None:
    return tuple(value.shape) if isinstance(value, (np.ndarray, torch.Tensor)) else None


def _count(values: Any) -> int:
    """Steps of a column."""
    return len(values) if hasattr(values, "__len__") else 0


def _check_once(once: Collection[str], chosen: Collection[str], where: str, *, named: bool) -> None:
    """Raise SourceError if columns that an episode has once are not there, or there is no other.

    Args:
        once: as `per_trajectory` names them (`named`), or as the table has them. chosen: the columns to be taken.
        where: the episode in errors.
    """
    unknown = [name for name in once if name not in chosen]
    if named and unknown:
        raise SourceError(
            f"per_trajectory= names {listing(sorted(unknown))}; expected some of the columns taken from {where}: "
            f"{listing(chosen)}."
        )
    if all(name in once for name in chosen):
        raise SourceError(
            f"{where}: all columns, {listing(chosen)}, are per trajectory; expected at least one with a value for each "
            "step."
        )


def _array(values: Any, where: str, *, once: bool = False) -> _Values:
    if not isinstance(values, (np.ndarray, torch.Tensor)):
        try:
            values = np.asarray(values)
        except Exception as error:  # uneven lengths, or whatever its own __array__ raises
            raise SourceError(
                f"{where} is {describe(values)}; expected {_expected(once)}: {error}"
            ) from error
    kind = unreadable(values) if isinstance(values, torch.Tensor) else None
    if isinstance(values, np.ma.MaskedArray):
        kind = "masked array"
    if kind is not None:
        raise SourceError(f"{where} is a {kind}; expected an array or a strided tensor with its data.")
    if values.ndim == 0 and not once:
        raise SourceError(
            f"{where} is {describe(values)}; expected an array [T, ...]. What an episode has once is a column per "
            "trajectory: per_trajectory=, or per='trajectory' in the table."
        )
    if isinstance(values, torch.Tensor):
        tensor = values.detach().resolve_conj().resolve_neg().cpu()
        if tensor.dtype == torch.bfloat16:
            return tensor
        try:
            return tensor.numpy()
        except (TypeError, RuntimeError):  # numpy lacks the dtype
            raise SourceError(f"{where} is {describe(values)}; expected a dtype of a column.") from None
    return np.asarray(values)


def _expected(once: bool) -> str:
    return "a number or an array" if once else "an array [T, ...]"


def _plan(values: _Values, role: str, where: str, keep_float64: bool, *, once: bool) -> Column:
    if isinstance(values, torch.Tensor):
        dtype = values.dtype
    else:
        dtype = plan_dtype(role, values.dtype, where, keep_float64=keep_float64)
    column = column_of(dtype, tuple(values.shape if once else values.shape[1:]), where)
    return dataclasses.replace(column, per="trajectory") if once else column
