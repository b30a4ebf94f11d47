"""Filling a table from a source: all trajectories or none."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.derived import Filtered, Renamed
from gear_loader.sources.episodes import (
    Columns,
    Episode,
    EpisodeReader,
    check_count,
    describe,
    requested,
    select,
)
from gear_loader.sources.fitting import check_fit, fitted, fitted_episodes
from gear_loader.sources.hdf5 import read_hdf5
from gear_loader.sources.iterables import IterableReader
from gear_loader.sources.minari import read_minari
from gear_loader.sources.time_steps import how_to_cut, is_frame
from gear_loader.storage.block_sizes import resolved_block_steps, resolved_packing
from gear_loader.storage.incoming import checked_priorities, with_final
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.operations.extents import FIRST, GRAIN, HEADER
from gear_loader.storage.payload import needed_bytes
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.ragged_input import with_records
from gear_loader.storage.schema import Column, Schema, as_mapping
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count, flag
from gear_loader.utils.paths import local_path
from gear_loader.utils.progress import progress_bar

LOAD_BYTES = 256 * 2**20
"""Bytes added to the table at once, but at least one trajectory."""


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
    filter: Callable[[Mapping[str, Any]], bool] | None = None,
    payload: int | str | None = None,
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
        filter: takes the episodes for which it returns True: a function of an `Episode`, with the columns as the table
            names them. Files are then read twice, to know the size of the table.
        payload: bytes for values of any length in the table made here, an int or a text such as ``"4GiB"``. By default
            as many as they take; files are then read twice, unless they tell it.
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
    if filter is not None and not callable(filter):
        raise SourceError(f"filter= is {shown(filter)}; expected a function of an episode, or None.")
    if payload is not None:
        byte_count("payload", payload)
    checked_priorities(priority, 1)
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
    if download and (not isinstance(source, (str, Named)) or _is_hdf5(source)):
        given = repr(source) if isinstance(source, str) else describe(source)
        raise SourceError(
            f"download=True was given with {given}; expected the id of a Minari data set: nothing else is fetched."
        )
    added = None if table is None else table.schema.added
    reader = _open(source, options, max_trajectories, added, download, finals=wanted, once=once)
    if filter is not None:
        reader = Filtered(reader, filter, max_trajectories, progress)
    lengths = reader.lengths[:max_trajectories]
    if table is not None:
        check_fit(reader, lengths, table)
        return _fill(table, reader, lengths, priority, progress)
    table = _table_for(reader, lengths, final, block_steps, payload, name, progress)
    try:
        return _fill(table, reader, lengths, priority, progress)
    except BaseException:
        table.close()
        if name is not None:
            table.unlink()
        raise


def _table_for(
    reader: EpisodeReader,
    lengths: np.ndarray,
    final: bool,
    block_steps: int | Literal["auto"],
    payload: int | str | None,
    name: str | None,
    progress: bool,
) -> Table:
    """A table of exactly the size of a reader's first episodes, of these lengths."""
    steps, count = int(lengths.sum()), len(lengths)
    finals = reader.finals if final else frozenset()
    schema = Schema(
        {n: dataclasses.replace(c, final=True) if n in finals else c for n, c in reader.schema.items()}
    )
    if schema.ragged and payload is None:
        payload = _payload_of(reader, schema, lengths, progress)
    packed = resolved_packing(schema, "auto")
    in_blocks: int = resolved_block_steps(
        schema, block_steps, None, max_steps=steps, max_trajectories=count, packed=packed
    )
    blocks = Table.required_blocks(lengths + bool(finals), in_blocks)
    return Table.create(
        schema,
        max_steps=steps,
        max_trajectories=count,
        memory=Memory(max_blocks=blocks, packed=packed, payload=payload),
        block_steps=in_blocks,
        name=name,
    )


def _payload_of(reader: EpisodeReader, schema: Schema, lengths: np.ndarray, progress: bool) -> int:
    """Bytes that the values of any length of a reader's first episodes take in a table."""
    if reader.payload is not None:
        return FIRST + reader.payload + len(lengths) * (HEADER + GRAIN * len(schema.ragged))
    columns = {name: column for name, column in schema.items() if column.ragged is not None}
    taken = FIRST
    with progress_bar("Measuring", int(lengths.sum()), unit="steps", enabled=progress) as (advance, _):
        for number, episode in enumerate(_advancing(iter(reader), lengths, advance)):
            where = f"{reader.source}, episode {number}{{}}: column "
            values = {n: fitted(episode[n], c, f"{where}{n!r}", finite=False) for n, c in columns.items()}
            with _in_source(reader, number):
                taken += needed_bytes(with_records(schema, [values])[1]) - FIRST
    return taken


@contextlib.contextmanager
def _in_source(reader: EpisodeReader, first: int) -> Iterator[None]:
    """Turn what a table refuses of the episodes from `first` on into a SourceError."""
    try:
        yield
    except SchemaError as error:
        raise SourceError(f"{reader.source}, counted from episode {first}: {error}") from error


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


@dataclasses.dataclass(frozen=True)
class Named:
    """A source that an opener makes of a name.

    Attributes:
        opener: returns a reader, or an iterable of episodes. name: its argument. options: of the opener alone.
        shared: options of `load` that the opener takes too.
    """

    opener: Callable[..., Any]
    name: str
    options: Mapping[str, Any]
    shared: frozenset[str]


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
    if isinstance(source, Named):
        known = {**options, "max_trajectories": most, "download": download}
        shared = {name: known[name] for name in known if name in source.shared}
        source = source.opener(source.name, **source.options, **shared)
        if "columns" in shared:
            options = {**options, "columns": None}
    listed = not isinstance(source, (EpisodeReader, str, os.PathLike)) and not _is_minari(source)
    if once and not listed:
        raise SourceError(
            f"per_trajectory={sorted(once)!r} was given with {describe(source)}; expected an iterable of episodes: "
            "files have a value for each step."
        )
    if isinstance(source, EpisodeReader):
        if options["columns"] is None:
            return source
        return Renamed(source, select(requested(options["columns"], ()), list(source.schema), source.source))
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
    return IterableReader(source, most, schema, finals, once, **options)


def _is_minari(source: Any) -> bool:
    return hasattr(source, "storage") and hasattr(source, "iterate_episodes")


def _fill(table: Table, reader: EpisodeReader, lengths: np.ndarray, priority: float, progress: bool) -> Table:
    # Episodes in memory are added at once, so that they become visible at the same moment.
    most = None if isinstance(reader, IterableReader) else LOAD_BYTES
    total = int(lengths.sum())
    evicts = table.on_full in ("evict_oldest", "evict_lowest_priority")
    if most is not None and evicts and not _is_one_piece(table, total, most):
        with progress_bar("Checking", total, unit="steps", enabled=progress) as (advance, _):
            for episode, length in zip(fitted_episodes(reader, table), lengths, strict=False):
                del episode
                advance(int(length))
    added: list[np.ndarray] = []
    try:
        with progress_bar("Loading", total, unit="steps", enabled=progress) as (advance, _):
            episodes = _advancing(fitted_episodes(reader, table), lengths, advance)
            first = 0
            for piece in _pieces(episodes, most):
                with _in_source(reader, first):
                    added.append(_add(table, piece, priority))
                first += len(piece)
    except BaseException:
        if added:
            # Skip trajectories that a later piece evicted. A reused index belongs to this load, too.
            mine = np.unique(np.concatenate(added))
            table.remove(mine[np.isin(mine, table.indices())])
        raise
    return table


def _is_one_piece(table: Table, steps: int, most: int) -> bool:
    """Whether so many steps are known to be added at once."""
    step_bytes = sum(column.step_bytes for column in table.schema.values())
    return not table.schema.ragged and steps * step_bytes <= most


def _add(table: Table, episodes: list[Episode], priority: float) -> np.ndarray:
    """`Table.extend`, with the final values of episodes that have them."""
    finals = np.array([bool(episode.final) for episode in episodes], dtype=np.int64)
    if not finals.any():
        return table.extend(list(map(dict, episodes)), priority=priority)
    schema = table.schema.added
    rows = [with_final(schema, each, each.final) if each.final else dict(each) for each in episodes]
    return table._engine.store(rows, checked_priorities(priority, len(rows)), finals=finals)


def _pieces(episodes: Iterable[Episode], most: int | None) -> Iterator[list[Episode]]:
    """Episodes in pieces of at most `most` bytes, but at least one episode; None: all at once."""
    piece: list[Episode] = []
    taken = 0
    for episode in episodes:
        size = 0 if most is None else sum(map(_size, episode.values()))
        if piece and most is not None and taken + size > most:
            yield piece
            piece, taken = [], 0
        piece.append(episode)
        taken += size
        del episode
    if piece:
        yield piece


def _size(values: Any) -> int:
    """Bytes of the values of a column, about."""
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return int(values.nbytes)
    if isinstance(values, Ragged):
        return int(values.values.nbytes + values.offsets.nbytes)
    if isinstance(values, (list, tuple)):
        return sum(map(_size, values))
    return len(values) if isinstance(values, (str, bytes)) else 64


def _advancing(episodes: Iterator[Any], lengths: np.ndarray, advance: Any) -> Iterator[Any]:
    for episode, length in zip(episodes, lengths.tolist(), strict=False):
        advance(length)
        yield episode
