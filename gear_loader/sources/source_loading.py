"""Filling a table from a source: all trajectories or none."""

from __future__ import annotations

import dataclasses
import itertools
import os
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import SourceError
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    check_count,
    column_of,
    converted,
    describe,
    is_finite_role,
    listing,
    plan_dtype,
    refuse_objects,
    requested,
    select,
)
from gear_loader.sources.hdf5 import read_hdf5
from gear_loader.sources.minari import read_minari
from gear_loader.sources.time_steps import how_to_cut, is_frame, is_hugging_face, refuse_steps
from gear_loader.storage.block_sizes import resolved_block_steps, resolved_packing
from gear_loader.storage.incoming import checked_priorities, with_final
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column, Schema, as_mapping, copied, keeps
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown, unreadable
from gear_loader.utils.checks import flag
from gear_loader.utils.paths import local_path
from gear_loader.utils.progress import progress_bar

LOAD_BYTES = 256 * 2**20
"""Bytes added to the table at once, but at least one trajectory."""

_Values = np.ndarray | torch.Tensor


def load(
    source: Any,
    table: Table | None = None,
    *,
    columns: Columns = None,
    max_trajectories: int | None = None,
    block_steps: int | Literal["auto"] = 64,
    name: str | None = None,
    priority: float = 1.0,
    final: bool = False,
    per_trajectory: Collection[str] = (),
    keep_float64: bool = False,
    allow_nonfinite: bool = False,
    download: bool = False,
    progress: bool = True,
) -> Table:
    """Fill a table with all trajectories of a source, or with none if an error occurs.

    Without a table, one of exactly the source's size is made: its lengths are counted first, so that no block
    is left over. With a table, the trajectories are added to it, with values brought to its columns' dtypes
    where nothing is lost by it but precision of floating-point numbers.

    A table whose columns have ``Column(final=True)`` gets the values after the last step too, if the source has them
    for all of these columns: `Episode.final`, which the readers and `collect` give for observations, or in episodes of
    your own the last row of ``next_<column>`` or ``next.<column>``.

    What an episode has once, as its goal, its task or its return, is a number or an array ``[*shape]`` in it, for
    columns with ``Column(per="trajectory")`` in the table, or those named in `per_trajectory`.

    Readers and files are read piece by piece (256 MiB), never as a whole. If one fails halfway, what had been
    added of it is removed again; a table made here is closed and its name removed. Batches drawn from a table
    in the meantime may have seen those trajectories. A table that evicts gets a file of more than one piece
    only after the whole of it has been read once, because what was evicted cannot be brought back. An iterable
    is read to its end first and added in one piece.

    Args:
        source: the path of a D4RL-style file (ending in .hdf5 or .h5, see `read_hdf5`); a Minari data set, its
            id or its directory (see `read_minari`); a reader that one of these two returned, with options of
            its own; or an iterable of episodes, each ``{column: array [T, *shape]}``, as `collect` returns them, or a
            TensorDict. Rows that are time steps (of a DataFrame, of most data sets of Hugging Face) are refused as far
            as they can be told: cut them at the episodes, ``load([rows[start:end] for start, end in bounds])``.
        table: the table to add to; None makes one.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes the
            table's columns, or without a table the source's standard ones (all of an iterable's).
        max_trajectories: take at most so many, the first ones.
        block_steps: steps of a block, for the table made here; ``"auto"`` takes those that waste least at the mean
            length of the episodes. See `gear_loader.Table.create`.
        name: the name of the table made here, under which other processes attach; None makes a private one.
        priority: of every trajectory.
        final: give ``final=True`` to the columns whose values after the last step the source has, in the table made
            here.
        per_trajectory: the columns of the table made here of which each episode of an iterable has one value.
        keep_float64: keep float64 columns in the table made here instead of making them float32.
        allow_nonfinite: take NaN and infinite rewards, which otherwise are an error.
        download: fetch the Minari data set of this id if it is not on this machine.
        progress: show a progress bar where standard error is a terminal.

    Returns:
        The table.

    Raises:
        SourceError: the source is damaged, empty or does not fit; the message names the episode, the column
            and the step. The table is as before.
        TableFullError: the table has no room and does not evict. The table is as before.
        SchemaError: options that the table refuses.
        ImportError: a package that the source needs is not installed.

    Example:
        >>> table = load([{"reward": np.array([1.0, 0.5])}, {"reward": np.array([2.0])}], progress=False)
        >>> len(table), table.num_steps, table[0]["reward"]
        (2, 3, tensor([1.0000, 0.5000]))
    """
    if table is not None and not isinstance(table, Table):
        raise SourceError(f"table is {shown(table)}; expected a gear_loader.Table, or None.")
    if table is not None and name is not None:
        raise SourceError(
            f"name={name!r} was given with a table; expected one of the two: a table keeps its name."
        )
    once = _once_names(per_trajectory, table)
    options: dict[str, Any] = {
        "columns": columns,
        "keep_float64": flag("keep_float64", keep_float64),
        "allow_nonfinite": flag("allow_nonfinite", allow_nonfinite),
    }
    for option, value in (("final", final), ("download", download), ("progress", progress)):
        flag(option, value)
    check_count("max_trajectories", max_trajectories)
    if not isinstance(block_steps, str):
        check_count("block_steps", block_steps)
    if table is not None and columns is None:
        options["columns"] = list(table.schema.added)
    if table is not None:  # else what the table can hold would be rounded on the way
        options["keep_float64"] |= any(column.dtype == torch.float64 for column in table.schema.values())
    wanted: list[str] | None = None if final else []
    if table is not None:
        wanted = list(table.schema.finals or ())
    if download and (not isinstance(source, str) or _is_hdf5(source)):
        given = repr(source) if isinstance(source, str) else describe(source)
        raise SourceError(
            f"download=True was given with {given}; expected the id of a Minari data set: nothing else is fetched."
        )
    added = None if table is None else table.schema.added
    reader = _open(source, options, max_trajectories, added, download, finals=wanted, once=once)
    lengths = reader.lengths[:max_trajectories]
    if table is not None:
        _check_fit(reader, lengths, table)
        return _fill(table, reader, lengths, priority, progress)
    steps, count = int(lengths.sum()), len(lengths)
    finals = reader.finals if final else frozenset()
    schema = Schema(
        {n: dataclasses.replace(c, final=True) if n in finals else c for n, c in reader.schema.items()}
    )
    packed = resolved_packing(schema, "auto")
    in_blocks: int = resolved_block_steps(
        schema, block_steps, None, max_steps=steps, max_trajectories=count, packed=packed
    )
    table = Table.create(
        schema,
        max_steps=steps,
        max_trajectories=count,
        memory=Memory(max_blocks=Table.required_blocks(lengths + bool(finals), in_blocks), packed=packed),
        block_steps=in_blocks,
        name=name,
    )
    try:
        return _fill(table, reader, lengths, priority, progress)
    except BaseException:
        table.close()
        if name is not None:
            table.unlink()
        raise


def _once_names(names: Any, table: Table | None) -> frozenset[str]:
    """Check `per_trajectory`: the names that it holds."""
    plain = isinstance(names, (Sequence, Set)) and not isinstance(names, str)
    if not plain or not all(isinstance(name, str) for name in names):
        raise SourceError(f"per_trajectory= is {shown(names)}; expected a list of names of columns.")
    if len(names) and table is not None:
        raise SourceError(
            f"per_trajectory={list(names)!r} was given with a table; expected one of the two: a table's columns tell "
            "it, by Column(per='trajectory')."
        )
    return frozenset(names)


def _is_hdf5(path: Any) -> bool:
    return isinstance(path, str) and path.lower().endswith((".hdf5", ".h5"))


def _open(
    source: Any,
    options: dict[str, Any],
    most: int | None,
    schema: Mapping[str, Column] | None,
    download: bool,
    *,
    finals: Collection[str] | None,
    once: frozenset[str],
) -> EpisodeReader:
    listed = not isinstance(source, (EpisodeReader, str, os.PathLike)) and not _is_minari(source)
    if once and not listed:
        raise SourceError(
            f"per_trajectory={sorted(once)!r} was given with {describe(source)}; expected an iterable of episodes: "
            "files have a value for each step."
        )
    if isinstance(source, EpisodeReader):
        if options["columns"] is None:
            return source
        return _Renamed(source, select(requested(options["columns"], ()), list(source.schema), source.source))
    if isinstance(source, (str, os.PathLike)):
        path = local_path(source, SourceError)
        if _is_hdf5(path):
            return read_hdf5(path, **options)
        return read_minari(source, **options, download=download)
    if _is_minari(source):
        return read_minari(source, **options)
    if (
        isinstance(as_mapping(source), Mapping)
        or not isinstance(source, Iterable)
        or getattr(source, "ndim", 1) == 0
    ):
        raise SourceError(
            f"{describe(source)} was received; expected a path, a Minari data set, a reader or an iterable of "
            f"episodes. A single episode goes into a list: load([episode]). {how_to_cut(source)}"
        )
    if is_frame(source):
        raise SourceError(f"{describe(source)} was received, whose rows are time steps. {how_to_cut(source)}")
    return _IterableReader(source, most, schema, finals, once, **options)


def _is_minari(source: Any) -> bool:
    return hasattr(source, "storage") and hasattr(source, "iterate_episodes")


class _Renamed(EpisodeReader):
    """Selects and renames columns of another reader."""

    def __init__(self, reader: EpisodeReader, chosen: dict[str, str]) -> None:
        super().__init__(
            reader.source,
            reader.lengths,
            {name: reader.schema[c] for name, c in chosen.items()},
            [name for name, c in chosen.items() if c in reader.finals],
        )
        self._reader, self._chosen = reader, chosen

    def __iter__(self) -> Iterator[Episode]:
        for episode in self._reader:
            final = _final(episode)
            yield Episode(
                {name: episode[column] for name, column in self._chosen.items()},
                {name: final[column] for name, column in self._chosen.items() if column in final},
            )


def _final(episode: Any) -> Mapping[str, Any]:
    return episode.final if isinstance(episode, Episode) else {}


class _IterableReader(EpisodeReader):
    """Episodes of an iterable, which is read to its end and checked in the constructor."""

    def __init__(
        self,
        episodes: Iterable[Any],
        most: int | None,
        schema: Mapping[str, Column] | None,
        finals: Collection[str] | None,
        once: frozenset[str],
        *,
        columns: Columns,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        source = "The source"
        if schema is not None:
            once = frozenset(name for name, column in schema.items() if column.trajectory)
        self._episodes: list[Episode] = []
        lengths: list[int] = []
        chosen: dict[str, str] = {}
        planned: dict[str, Column] = {}
        kept = keeps(episodes)
        for number, item in enumerate(_watched(itertools.islice(episodes, most), source)):
            where = f"{source}, episode {number}"
            episode = as_mapping(item)
            if not isinstance(episode, Mapping) or not episode:
                rows = f" {how_to_cut(item if is_frame(item) else episodes)}"
                raise SourceError(
                    f"{where} is {describe(episode)}; expected a mapping of columns to arrays [T, ...].{rows}"
                )
            if not chosen:
                chosen = select(requested(columns, list(episode)), list(episode), f"{where},")
                objects = {role: _object(episode[role]) for role in chosen.values() if _object(episode[role])}
                refuse_objects(where, objects, chosen, "numbers or flags [T, ...]")
                _check_once(once, chosen, where, named=schema is None)
                if schema is None:
                    refuse_steps(episodes, item, episode, chosen, once, where)
            arrays: dict[str, Any] = {}
            for name, role in chosen.items():
                if role not in episode:
                    raise SourceError(
                        f"{where} has no column {role!r}; it has {list(episode)}. Expected the columns of the first."
                    )
                values = _array(episode[role], f"{where}: column {role!r}", once=name in once)
                if not kept or type(episode) not in (dict, Episode):
                    values = copied(values)
                if name not in planned:
                    planned[name] = _plan(
                        values, role, f"{where}: column {role!r}", keep_float64, once=name in once
                    )
                target = planned[name] if schema is None else schema.get(name, planned[name])
                finite = is_finite_role(role, allow_nonfinite)
                arrays[name] = _fitted(values, target, f"{where}{{}}: column {role!r}", finite=finite)
            steps = {name: len(values) for name, values in arrays.items() if name not in once}
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
                    last[name] = copied(_fitted(value, target, what, finite=False)[0])
            self._episodes.append(Episode(arrays, last))
            lengths.append(next(iter(steps.values())))
        if not lengths:
            raise SourceError(f"{source} has no episodes; expected at least one.")
        flat = schema is None and not any(planned[name].shape for name in planned if name not in once)
        if flat and is_hugging_face(episodes) and len(lengths) > 1 and len(set(lengths)) == 1:
            raise SourceError(
                f"Each of {len(lengths):,} rows of {describe(episodes)} has {lengths[0]} numbers in "
                f"{listing(chosen.values())}: they look like time steps, not like episodes. {how_to_cut(episodes)}"
            )
        if schema is not None:
            planned = {name: schema.get(name, column) for name, column in planned.items()}
        super().__init__(source, np.array(lengths), planned, self._episodes[0].final)

    def __iter__(self) -> Iterator[Episode]:
        return iter(self._episodes)


def _last(episode: Mapping[str, Any], role: str, steps: int, where: str) -> _Values | None:
    """The value after the last of an episode's steps, ``[1, *shape]``; None if the episode does not tell it."""
    own = _final(episode)
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


def _watched(episodes: Iterable[Any], source: str) -> Iterator[Any]:
    number = 0
    try:
        for episode in episodes:
            yield episode
            number += 1
    except SourceError:
        raise
    except Exception as error:
        raise SourceError(
            f"{source} raised {type(error).__name__} at episode {number}: {error}. Nothing was added."
        ) from error


def _object(values: Any) -> str:
    """What a column is that holds text or other objects; "" for any other."""
    if isinstance(values, str):
        return "text"
    first = values[0] if isinstance(values, (list, tuple)) and values else None
    if isinstance(first, str) or (isinstance(values, np.ndarray) and values.dtype.kind in "US"):
        return "text"
    return "an array of objects" if isinstance(values, np.ndarray) and values.dtype.kind == "O" else ""


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


def _fitted(values: _Values, column: Column, where: str, *, finite: bool) -> _Values:
    """Convert one column of an episode to the shape and dtype of a table's column.

    Args:
        values: ``[T, *shape]``, or ``[*shape]`` of a column per trajectory.
        where: place in errors; its `{}` is replaced by the step. finite: whether NaN and infinity are refused.
    """
    if column.trajectory:
        if tuple(values.shape) != column.shape:
            raise SourceError(
                f"{where.replace('{}', '')} has shape {list(values.shape)}; expected one value of shape "
                f"{list(column.shape)}, as the column is per trajectory."
            )
        by_step = dataclasses.replace(column, per="step")
        return _fitted(values[None], by_step, where.replace("{}", ""), finite=finite).reshape(column.shape)
    if tuple(values.shape[1:]) != column.shape:
        expected = "".join(f", {extent}" for extent in column.shape)
        raise SourceError(
            f"{where.replace('{}', '')} has shape {list(values.shape)}; expected [T{expected}]."
        )
    if isinstance(values, torch.Tensor):  # bfloat16, which numpy does not have
        if values.dtype == column.dtype and not finite:
            return values
        values = values.float().numpy()

    def place(step: int | None) -> str:
        return where.replace("{}", "" if step is None else f", step {step}")

    array = converted(values, column.dtype, place, finite=finite)
    return (
        torch.from_numpy(np.ascontiguousarray(array)).to(column.dtype)
        if column.dtype == torch.bfloat16
        else array
    )


def _check_fit(reader: EpisodeReader, lengths: np.ndarray, table: Table) -> None:
    missing = [name for name in table.schema.added if name not in reader.schema]
    extra = [name for name in reader.schema if name not in table.schema.added]
    if missing or extra:
        raise SourceError(
            f"{reader.source} gives the columns {list(reader.schema)}; the table has {list(table.schema.added)}. Name "
            "the table's columns: columns={name in the table: name in the source}."
        )
    for name, column in table.schema.added.items():
        if reader.schema[name].trajectory != column.trajectory:
            one, other = ("once", "for each step") if column.trajectory else ("for each step", "once")
            raise SourceError(
                f"{reader.source}: column {name!r} has a value {other}; the table expects one {one}. Give the table a "
                f"column with per={reader.schema[name].per!r}."
            )
        if reader.schema[name].shape != column.shape:
            raise SourceError(
                f"{reader.source}: column {name!r} has steps of shape {list(reader.schema[name].shape)}; the table "
                f"expects {list(column.shape)}."
            )
    layout = table._engine.region.layout
    longest = min(layout.max_steps, layout.num_blocks * layout.block_steps)
    number = int(lengths.argmax())
    if lengths[number] > longest:
        raise SourceError(
            f"{reader.source}, episode {number} has {lengths[number]} steps; the table holds at most {longest}. "
            "Create it with a larger max_steps, or let load() make one."
        )


def _fill(table: Table, reader: EpisodeReader, lengths: np.ndarray, priority: float, progress: bool) -> Table:
    step_bytes = sum(column.step_bytes for column in table.schema.values())
    # Episodes in memory are added at once, so that they become visible at the same moment.
    in_memory = isinstance(reader, _IterableReader)
    pieces = [len(lengths)] if in_memory else _pieces(lengths, max(1, LOAD_BYTES // step_bytes))
    total = int(lengths.sum())
    if len(pieces) > 1 and table.on_full in ("evict_oldest", "evict_lowest_priority"):
        with progress_bar("Checking", total, unit="steps", enabled=progress) as (advance, _):
            for episode, length in zip(_fitted_episodes(reader, table), lengths, strict=False):
                del episode
                advance(int(length))
    added: list[np.ndarray] = []
    try:
        with progress_bar("Loading", total, unit="steps", enabled=progress) as (advance, _):
            episodes = _advancing(_fitted_episodes(reader, table), lengths, advance)
            for count in pieces:
                added.append(_add(table, list(itertools.islice(episodes, count)), priority))
    except BaseException:
        if added:
            # Skip trajectories that a later piece evicted. A reused index belongs to this load, too.
            mine = np.unique(np.concatenate(added))
            table.remove(mine[np.isin(mine, table.indices())])
        raise
    return table


def _add(table: Table, episodes: list[Episode], priority: float) -> np.ndarray:
    """`Table.extend`, with the final values of episodes that have them."""
    finals = np.array([bool(episode.final) for episode in episodes], dtype=np.int64)
    if not finals.any():
        return table.extend(list(map(dict, episodes)), priority=priority)
    schema = table.schema.added
    rows = [with_final(schema, each, each.final) if each.final else dict(each) for each in episodes]
    return table._engine.store(rows, checked_priorities(priority, len(rows)), finals=finals)


def _pieces(lengths: np.ndarray, most_steps: int) -> list[int]:
    """Numbers of trajectories in pieces of at most `most_steps` steps, but at least one trajectory."""
    ends = np.cumsum(lengths)
    counts, first = [], 0
    while first < len(ends):
        before = int(ends[first - 1]) if first else 0
        last = max(first + 1, int(np.searchsorted(ends, before + most_steps, side="right")))
        counts.append(last - first)
        first = last
    return counts


def _fitted_episodes(reader: EpisodeReader, table: Table) -> Iterator[Episode]:
    finals: Mapping[str, Column] = table.schema.finals or {}
    for number, episode in enumerate(reader):
        where = f"{reader.source}, episode {number}{{}}: column "
        values: dict[str, Any] = {
            name: _fitted(episode[name], column, f"{where}{name!r}", finite=False)
            for name, column in table.schema.added.items()
        }
        final = _final(episode)
        last: dict[str, Any] = {}
        if finals and all(name in final for name in finals):
            last = {
                name: _fitted(
                    final[name][None], column, f"{where}{name!r} after the last step", finite=False
                )[0]
                for name, column in finals.items()
            }
        yield Episode(values, last)


def _advancing(episodes: Iterator[Any], lengths: np.ndarray, advance: Any) -> Iterator[Any]:
    for episode, length in zip(episodes, lengths.tolist(), strict=False):
        advance(length)
        yield episode
