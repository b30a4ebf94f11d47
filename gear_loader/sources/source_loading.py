"""Filling a table from a source: all trajectories or none."""

from __future__ import annotations

import dataclasses
import os
import threading
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.derived import Decoded, Filtered, Following, Part, Renamed
from gear_loader.sources.episodes import (
    Columns,
    EpisodeReader,
    check_count,
    describe,
    requested,
    select,
)
from gear_loader.sources.filling import Filling, advancing, first_missing, in_source
from gear_loader.sources.fitting import check_fit, fitted
from gear_loader.sources.hdf5 import read_hdf5
from gear_loader.sources.iterables import IterableReader
from gear_loader.sources.minari import read_minari
from gear_loader.sources.refreshing import Passes, Refresh, Refreshing, holds_all, part_of
from gear_loader.sources.time_steps import how_to_cut, is_frame
from gear_loader.storage.background_loading import Loading
from gear_loader.storage.block_sizes import resolved_block_steps, resolved_packing
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.operations.extents import FIRST, GRAIN, HEADER
from gear_loader.storage.payload import needed_bytes
from gear_loader.storage.ragged_input import with_records
from gear_loader.storage.schema import Column, Schema, as_mapping
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import byte_count, flag
from gear_loader.utils.progress import progress_bar

LOAD_BYTES = 256 * 2**20
"""Bytes added to the table at once, but at least one trajectory."""
BACKGROUND_BYTES = 16 * 2**20
"""The same in the background."""


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
    decode: bool = False,
    statistics: bool = False,
    max_bytes: int | str | None = None,
    wait: bool = True,
    resume: bool = False,
    payload: int | str | None = None,
    download: bool = False,
    progress: bool = True,
    refresh: Refresh | bool = False,
    shard: tuple[int, int] | None = None,
) -> Table:
    """Fill a table with all trajectories of a source, or with none if an error occurs.

    Without a table, one of exactly the source's size is made: its lengths are counted first, so that no block
    is left over. With a table, the trajectories are added to it, with values brought to its columns' dtypes
    where nothing is lost by it but precision of floating-point numbers.

    A table whose columns have ``Column(final=True)`` gets the values after the last step too, if the source has them
    for all of these columns: `Episode.final`, which the readers and `collect` give for observations, or in episodes of
    your own the last row of ``next_<column>`` or ``next.<column>``. So does `final`, of other readers too, without
    columns of any length; these columns are then left out.

    What an episode has once, as its goal, its task or its return, is a number or an array ``[*shape]`` in it, for
    columns with ``Column(per="trajectory")`` in the table, or those named in `per_trajectory`.

    Readers and files are read piece by piece (256 MiB), never as a whole. If one fails halfway, what had been
    added of it is removed again; a table made here is closed and its name removed. Batches drawn from a table
    in the meantime may have seen those trajectories. A table that evicts gets a file of more than one piece
    only after the whole of it has been read once, because what was evicted cannot be brought back. An iterable
    is read to its end first and added in one piece, but for generators with ``wait=False``.

    Args:
        source: a reader, as ``gear_loader.sources.read_...`` return them, with options of its own; the path or
            address of a D4RL-style file (ending in .hdf5 or .h5, see `read_hdf5`); a Minari data set, its id, its
            directory or the address of that (see `read_minari`); or
            an iterable of episodes, each ``{column: array [T, *shape]}``, as `collect` returns them,
            or a TensorDict: a list, a generator, a data set of torch whose items are episodes. Text, bytes and lists of
            arrays of uneven lengths become columns of any length. Rows that are time steps (of a DataFrame, of most
            data sets of Hugging Face) are refused as far as they can be told: `read_rows` cuts them.
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
        decode: whether to store images and frames of video decoded, uint8 ``[h, w, c]``, of one size in each column: it
            takes more memory, and batches need no decoding.
        statistics: whether to gather statistics of what is added: `Table.statistics`, saved with the table.
        max_bytes: take the first trajectories that take so many bytes at most, an int or a text such as ``"8GiB"``,
            without the ends of blocks and the index. With `refresh` the table made here has room for so many.
        wait: whether to return when all is loaded, or with `refresh` when the table is full. If False, a thread of low
            priority fills the table while it can be drawn from: `Table.loading`. Then it is not all or none: after an
            error, which ``table.loading.wait()`` raises, the table keeps what was added. The thread also runs a
            generator, for a table that is given, unless `filter`, `resume`, `max_bytes`, `shard` or `refresh` need its
            end.
        resume: the table was given the first trajectories of this source before, and nothing else, by a load in the
            background that ended, or was killed; those that are missing are added. Such a table has a name, was saved,
            or is recovered from its disk.
        payload: bytes for values of any length in the table made here, an int or a text such as ``"4GiB"``. By default
            as many as they take; files are then read twice, unless they tell it.
        download: fetch the Minari data set of this id if it is not on this machine.
        progress: show a progress bar where standard error is a terminal.
        refresh: True, or a `Refresh` with options: a thread goes on fetching trajectories that the table cannot hold at
            once, in random order, over several epochs; each takes the place of another one. For a table that evicts, or
            waits for room; or for one made here, of `max_bytes`, that evicts the oldest. If the table can hold all,
            they are loaded once.
        shard: (number, count): take one of so many parts of the source, of equal numbers of trajectories, as the
            process of a rank for its own table: ``(rank, world_size)``. With `refresh` another part in each epoch.

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
    flags = {"final": final, "download": download, "progress": progress, "statistics": statistics}
    flags |= {"wait": wait, "resume": resume, "decode": decode}
    renewal = Refresh() if refresh is True else refresh or None
    _check_refresh(renewal, table, max_bytes, statistics)
    place = _checked_shard(shard)
    for option, value in flags.items():
        flag(option, value)
    if filter is not None and not callable(filter):
        raise SourceError(f"filter= is {shown(filter)}; expected a function of an episode, or None.")
    if payload is not None:
        byte_count("payload", payload)
    checked_priorities(priority, 1)
    if resume and table is None:
        raise SourceError("resume=True was given without a table; expected the one that was being filled.")
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
    ended = wait or table is None or filter or decode or resume or max_bytes is not None or shard or renewal
    reader = _open(
        source, options, max_trajectories, added, download, finals=wanted, once=once, lazy=not ended
    )
    if isinstance(reader, IterableReader) and reader.lazy:
        assert table is not None
        _begin(Filling(table, reader, None, priority, progress, statistics))
        return table
    if filter is not None:
        reader = Filtered(reader, filter, max_trajectories, progress)
    if decode:
        reader = Decoded(reader)
    # Episodes in memory are added at once, so that they become visible at the same moment.
    piece = None if isinstance(reader, IterableReader) else LOAD_BYTES
    lengths = reader.lengths[:max_trajectories]
    first, last = part_of(len(lengths), *place)
    if first == last:
        raise SourceError(
            f"shard={shard!r} was given, and {reader.source} has {len(lengths):,} episodes; expected more."
        )
    most = None if max_bytes is None else byte_count("max_bytes", max_bytes)
    share = 1.0
    if renewal is not None and table is None:
        assert most is not None
        share = _share_of(most, payload, reader, lengths, progress) * len(lengths) / (last - first)
    if renewal is not None and (
        share >= 1.0 if table is None else _holds_all(table, reader, lengths, resume)
    ):
        renewal = None
    if renewal is None and place != (0, 1):
        reader = Part(reader, first, last)
        lengths = reader.lengths
    if renewal is None and most is not None and share == 1.0:
        lengths = _within(most, reader, lengths, progress)
    made = table is None
    if table is None:
        share = share * (last - first) / len(lengths) if renewal is not None else 1.0
        table = _table_for(reader, lengths, final, block_steps, payload, name, progress, share=share)
    else:
        check_fit(reader, lengths, table)
    try:
        if renewal is not None:
            passes = Passes(reader.starts, len(lengths), renewal.seed, *place)
            _begin_refresh(
                Refreshing(table, reader, lengths, passes, renewal, priority, progress), resume, wait
            )
            return table
        fill = Filling(table, reader, lengths, priority, progress, statistics, piece=piece)
        if resume:
            fill.first = first_missing(table, reader.source, lengths)
        if wait:
            return fill.all_or_none()
        _begin(fill)
        return table
    except BaseException:
        if made:
            table.close()
            if name is not None:
                table.unlink()
        raise


def _check_refresh(refresh: Any, table: Table | None, max_bytes: Any, statistics: bool) -> None:
    """Refuse options that do not go with `refresh`, which may be None."""
    if refresh is None:
        return
    if not isinstance(refresh, Refresh):
        raise SourceError(
            f"refresh is {shown(refresh)}; expected True, False, or a gear_loader.sources.Refresh."
        )
    if statistics:
        raise SourceError(
            "statistics=True was given with refresh=; expected one of them: no table holds all at once."
        )
    if table is None and max_bytes is None:
        raise SourceError(
            "refresh= was given without a table or max_bytes=; expected one of them: a table of the source's size "
            "holds all at once."
        )
    if table is not None and max_bytes is not None:
        raise SourceError(
            "max_bytes= was given with refresh= and a table; expected one of the two: it has limits."
        )
    if table is not None and table.loading is not None and not table.loading.done:
        raise SourceError(
            f"refresh= was given with a table that is being loaded, {table.loading!r}; cancel() that first."
        )
    if table is not None and table.on_full == "error":
        raise SourceError(
            "refresh= was given with a table of on_full='error'; expected 'evict_oldest', 'evict_lowest_priority', or "
            "'wait' with limits=gear.Limits(max_times_sampled=)."
        )


def _checked_shard(shard: Any) -> tuple[int, int]:
    """Check `shard`."""
    if shard is None:
        return 0, 1
    plain = isinstance(shard, tuple) and len(shard) == 2
    if not (plain and all(isinstance(each, int) for each in shard) and 0 <= shard[0] < shard[1]):
        raise SourceError(f"shard is {shown(shard)}; expected (number, count), as (rank, world_size).")
    return int(shard[0]), int(shard[1])


def _holds_all(table: Table, reader: EpisodeReader, lengths: np.ndarray, resume: bool) -> bool:
    """Whether a table that is empty, or holds some of these episodes, can hold all, as far as it is known."""
    schema, payload = table.schema, reader.payload
    if payload is not None:
        payload = FIRST + payload + len(lengths) * (HEADER + GRAIN * len(schema.ragged))
    return (resume or not len(table)) and holds_all(table, lengths, payload)


def _begin(fill: Filling) -> None:
    """Start the thread that fills a table."""
    fill.piece = BACKGROUND_BYTES
    count, steps = (None, None) if fill.lengths is None else (len(fill.lengths), int(fill.lengths.sum()))
    pieces = (fill.added for _ in fill.pieces())
    fill.table._engine.loading = Loading(fill.reader.source, count, steps, pieces, num_loaded=fill.first)


def _begin_refresh(refreshing: Refreshing, resume: bool, wait: bool) -> None:
    """Start the thread that refreshes a table; wait until it is full."""
    table, reader, passes = refreshing.table, refreshing.reader, refreshing.passes
    given = first_missing(table, reader.source, refreshing.lengths, passes.numbers) if resume else 0
    full = threading.Event()
    refreshing.when_full = full.set
    steps = int(refreshing.lengths.sum()) * len(passes) // passes.count
    loading = Loading(
        reader.source,
        len(passes),
        steps,
        refreshing.pieces(given),
        num_loaded=given,
        epochs=refreshing.refresh.epochs,
    )
    table._engine.loading = loading
    try:
        while wait and not full.wait(0.01) and not loading.done:
            pass
    except BaseException:  # an interrupt
        loading.cancel()
        raise
    if loading.done:
        loading.wait()


def _table_for(
    reader: EpisodeReader,
    lengths: np.ndarray,
    final: bool,
    block_steps: int | Literal["auto"],
    payload: int | str | None,
    name: str | None,
    progress: bool,
    *,
    share: float = 1.0,
) -> Table:
    """A table of exactly the size of a reader's first episodes, of these lengths; or of a share of it, which evicts."""
    count = len(lengths)
    steps = max(int(lengths.sum() * share), int(lengths.max()))
    finals = reader.finals if final else frozenset()
    columns = {n: dataclasses.replace(c, final=True) if n in finals else c for n, c in reader.schema.items()}
    try:
        schema = Schema(columns)
    except SchemaError as error:  # such as a name with control characters
        raise SourceError(f"{reader.source}: {error}") from error
    if schema.ragged and payload is None:
        payload = int(
            _payload_of(reader, schema, lengths, progress) * max(share, 2 * lengths.max() / lengths.sum())
        )
    packed = resolved_packing(schema, "auto")
    in_blocks: int = resolved_block_steps(
        schema, block_steps, None, max_steps=steps, max_trajectories=count, packed=packed
    )
    blocks = Table.required_blocks(lengths + bool(finals), in_blocks)
    blocks = max(int(blocks * share), -(-(int(lengths.max()) + bool(finals)) // in_blocks))
    return Table.create(
        schema,
        max_steps=steps,
        max_trajectories=count,
        memory=Memory(max_blocks=blocks, packed=packed, payload=payload),
        block_steps=in_blocks,
        name=name,
        on_full="error" if share == 1.0 else "evict_oldest",
    )


def _payload_of(reader: EpisodeReader, schema: Schema, lengths: np.ndarray, progress: bool) -> int:
    """Bytes that the values of any length of a reader's first episodes take in a table."""
    told = len(lengths) == len(reader)  # what the first ones of them take it does not tell
    return FIRST + int(_payloads(reader, schema, lengths, progress, told=told).sum())


def _payloads(
    reader: EpisodeReader,
    schema: Schema,
    lengths: np.ndarray,
    progress: bool,
    *,
    told: bool = True,
    fixed: np.ndarray | None = None,
    most: int | None = None,
) -> np.ndarray:
    """As `_payload_of`, of each episode, int64 [n]; in proportion to their steps if the reader has `told` it.

    Args:
        most: bytes of the first episodes after which the others are not measured. fixed: what each takes besides.
    """
    columns = {name: column for name, column in schema.items() if column.ragged is not None}
    if (told and reader.payload is not None) or not columns:
        share = -(-(reader.payload or 0) * lengths // max(reader.num_steps, 1))
        return np.asarray(share + bool(columns) * (HEADER + GRAIN * len(columns)))
    taken = np.zeros(len(lengths), dtype=np.int64)
    with progress_bar("Measuring", int(lengths.sum()), unit="steps", enabled=progress) as (advance, _):
        for number, episode in enumerate(advancing(iter(reader), lengths, advance)):
            where = f"{reader.source}, episode {number}{{}}: column "
            values = {n: fitted(episode[n], c, f"{where}{n!r}", finite=False) for n, c in columns.items()}
            with in_source(reader, number):
                taken[number] = needed_bytes(with_records(schema, [values])[1]) - FIRST
            if most is not None and fixed is not None:
                most -= int(fixed[number] + taken[number])
                if most < 0:
                    break
    return taken


def _within(most: int, reader: EpisodeReader, lengths: np.ndarray, progress: bool) -> np.ndarray:
    """The lengths of the first episodes that take so many bytes at most."""
    taken = _bytes_of(reader, lengths, progress)
    if reader.payload is not None and taken.sum() > most:  # how they share what the reader tells is not known
        taken = _bytes_of(reader, lengths, progress, told=False, most=most)
    count = int(np.searchsorted(np.cumsum(taken), most, side="right"))
    if not count:
        raise SourceError(
            f"max_bytes={most:,} was given, and the first episode of {reader.source} takes {taken[0]:,}; expected room "
            "for one at least."
        )
    return lengths[:count]


def _bytes_of(
    reader: EpisodeReader, lengths: np.ndarray, progress: bool, *, told: bool = True, most: int | None = None
) -> np.ndarray:
    """Bytes that each of a reader's first episodes takes, int64 [n]; as `_payloads`."""
    schema = Schema(reader.schema)
    fixed = lengths * schema.step_bytes + schema.trajectory_bytes
    values = _payloads(reader, schema, lengths, progress, told=told, fixed=fixed, most=most)
    return np.asarray(fixed + values)


def _share_of(
    most: int, payload: int | str | None, reader: EpisodeReader, lengths: np.ndarray, progress: bool
) -> float:
    """The share of a reader's first episodes that so many bytes hold, `payload` among them."""
    if payload is None:
        taken = _bytes_of(reader, lengths, progress)
    else:
        taken, most = lengths * Schema(reader.schema).step_bytes, most - byte_count("payload", payload)
    if most < 2 * taken.max() and most < taken.sum():
        raise SourceError(
            f"max_bytes= leaves {most:,} bytes for the steps, and the longest episode of {reader.source} takes "
            f"{int(taken.max()):,}; expected room for two at least."
        )
    return most / float(taken.sum())


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
    lazy: bool,
) -> EpisodeReader:
    if isinstance(source, Named):
        own = once if schema is None else {name for name, column in schema.items() if column.trajectory}
        known = {**options, "max_trajectories": most, "download": download, "per_trajectory": sorted(own)}
        shared = {name: known[name] for name in known if name in source.shared}
        once = frozenset() if "per_trajectory" in shared else once
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
        reader = Following(source) if finals is None and not source.finals else source
        if options["columns"] is None:
            return reader
        return Renamed(reader, select(requested(options["columns"], ()), list(reader.schema), reader.source))
    if isinstance(source, (str, os.PathLike)):
        if _is_hdf5(os.fspath(source)):
            return read_hdf5(source, **options)
        return read_minari(source, **options, download=download)
    if _is_minari(source):
        return read_minari(source, **options)
    if hasattr(source, "__getitem__") and hasattr(source, "__len__") and not isinstance(source, Iterable):
        source = map(source.__getitem__, range(len(source)))  # a map-style data set of torch
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
    lazy = lazy and isinstance(source, Iterator)
    return IterableReader(source, most, schema, finals, once, lazy=lazy, **options)


def _is_minari(source: Any) -> bool:
    return hasattr(source, "storage") and hasattr(source, "iterate_episodes")
