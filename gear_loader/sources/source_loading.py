"""Filling tables from a source: all trajectories or none, or in the background."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.derived import Decoded, Filtered, Labelled, Part
from gear_loader.sources.episodes import Columns, EpisodeReader
from gear_loader.sources.fetch_orders import Passes, PriorityOrder, part_of
from gear_loader.sources.filling import Filling
from gear_loader.sources.fitting import check_fit
from gear_loader.sources.iterables import IterableReader
from gear_loader.sources.load_request import LoadRequest, Target
from gear_loader.sources.made_tables import Sizes, made_table
from gear_loader.sources.priority_record import PriorityRecord
from gear_loader.sources.refresh_options import Refresh
from gear_loader.sources.refreshing import PAUSE, Refreshing, holds_all, together, update_of
from gear_loader.storage.background_loading import Loading
from gear_loader.storage.operations.extents import FIRST, GRAIN, HEADER
from gear_loader.storage.table import Table

LOAD_BYTES = 256 * 2**20
"""Bytes added to the table at once, but at least one trajectory."""
BACKGROUND_BYTES, FIRST_BYTES = 16 * 2**20, 256 * 2**10
"""The same in the background, and of the first piece there: batches can be drawn when it is added."""


def load(
    source: Any,
    table: Table | Sequence[Table] | Any | None = None,
    *,
    columns: Columns = None,
    max_trajectories: int | None = None,
    block_steps: int | Literal["auto"] | None = None,
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
        table: the table to add to; None makes one. Several tables of the same columns, as a list: their episodes are
            dealt one after another, the first one to the first table. `gear_loader.distributed.Shards`: as a list of
            their tables, or with several ranks, each of which calls this, as this rank's table with `shard`.
        columns: names of the columns to take, or {name in the table: name in the source}. None takes the
            table's columns, or without a table the source's standard ones (all of an iterable's).
        max_trajectories: take at most so many, the first ones.
        block_steps: steps of a block, for the table made here; ``"auto"`` takes those that waste least at the mean
            length of the episodes. None: 64, and for shorter episodes as ``"auto"``. See `gear_loader.Table.create`.
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
        wait: whether to return when all is loaded, or with `refresh` when the table is full. If False, a thread fills
            the table while it can be drawn from: `Table.loading`. Another one, of low priority, reads a piece ahead.
            Then it is not all or none: after an error, which ``table.loading.wait()`` raises, the table keeps what was
            added. The thread that reads also runs a generator, for a table that is given, unless `filter`, `resume`,
            `max_bytes`, `shard` or `refresh` need its end.
        resume: the table was given the first trajectories of this source before, and nothing else, by a load in the
            background that ended, or was killed; those that are missing are added. Such a table has a name, was saved,
            or is recovered from its disk. Several tables: the same ones, in the same order.
        payload: bytes for values of any length in the table made here, an int or a text such as ``"4GiB"``. By default
            as many as they take; files are then read twice, unless they tell it.
        download: fetch the Minari data set of this id if it is not on this machine.
        progress: show a progress bar where standard error is a terminal.
        refresh: True, or a `Refresh` with options: a thread goes on fetching trajectories that the table cannot hold at
            once, in random order, over several epochs; each takes the place of another one. For a table that evicts, or
            waits for room; or for one made here, of `max_bytes`, that evicts the oldest. If the table can hold all,
            they are loaded once, unless they are fetched by priority. Several tables share each epoch.
        shard: (number, count): take one of so many parts of the source, of equal numbers of trajectories, as the
            process of a rank for its own table: ``(rank, world_size)``. With `refresh` another part in each epoch.

    Returns:
        The table; the first one of several.

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
    target = Target.of(table, shard)
    request = LoadRequest(
        columns=columns,
        max_trajectories=max_trajectories,
        block_steps=block_steps,
        name=name,
        priority=priority,
        final=final,
        per_trajectory=per_trajectory,
        keep_float64=keep_float64,
        allow_nonfinite=allow_nonfinite,
        filter=filter,
        decode=decode,
        statistics=statistics,
        max_bytes=max_bytes,
        wait=wait,
        resume=resume,
        payload=payload,
        download=download,
        progress=progress,
        refresh=refresh,
    )
    request.check_target(target)
    request.check_source(source)
    reader = request.opening(target).open(source)
    if isinstance(reader, IterableReader) and reader.lazy:
        _begin(Filling(target.tables, reader, None, priority, progress, statistics))
        return target.tables[0]
    if filter is not None:
        reader = Filtered(reader, filter, max_trajectories, progress)
    if decode:
        reader = Decoded(reader)
    if request.renewal is not None and request.renewal.own_columns:
        reader = Labelled(reader, request.renewal.own_columns)
    return _Load.of(reader, target, request).into_tables()


@dataclasses.dataclass(frozen=True)
class _Load:
    """What is loaded into which tables.

    Attributes:
        reader, lengths: of which all first episodes with these lengths, int64 [n], are loaded.
        refresh: how; None: once. share: the share of the episodes that a table which is made has room for.
        piece: bytes added at once; None: all.
    """

    reader: EpisodeReader
    lengths: np.ndarray
    target: Target
    request: LoadRequest
    refresh: Refresh | None
    share: float
    piece: int | None

    @classmethod
    def of(cls, reader: EpisodeReader, target: Target, request: LoadRequest) -> _Load:
        """Find out what of a reader is loaded.

        Raises:
            SourceError: it has too few episodes, or too large ones.
        """
        # Episodes in memory are added at once, so that they become visible at the same moment.
        piece = None if isinstance(reader, IterableReader) else LOAD_BYTES
        lengths = reader.lengths[: request.max_trajectories]
        first, last = part_of(len(lengths), *target.part)
        if last - first < max(1, len(target.tables)):
            given = f"shard={target.part!r} was" if last == first else f"{len(target.tables)} tables were"
            raise SourceError(
                f"{given} given, and {reader.source} has {len(lengths):,} episodes; expected more."
            )
        refresh, share, most = request.renewal, 1.0, request.most_bytes
        # Draws by priority go on where a table can hold all, too: its rows are drawn uniformly.
        passes = refresh is not None and refresh.sampler is None
        sizes = Sizes(reader, lengths, request.progress)
        if refresh is not None and not target.tables:
            assert most is not None
            share = sizes.share(most, request.payload)
            if share * len(lengths) / (last - first) >= 1.0:
                refresh, share = (None, 1.0) if passes else (refresh, (last - first) / len(lengths))
        elif passes and _hold_all(target.tables, reader, lengths, request.resume):
            refresh = None
        if refresh is None and target.part != (0, 1):
            reader = Part(reader, first, last)
            lengths = reader.lengths
        if request.renewal is None and most is not None:
            lengths = Sizes(reader, lengths, request.progress).within(most)
        return cls(reader, lengths, target, request, refresh, share, piece)

    def into_tables(self) -> Table:
        """Load it; returns the first table."""
        tables, request = self.target.tables, self.request
        if not tables:
            evicts = self.refresh is not None
            tables = (made_table(self.reader, self.lengths, request, self.share, evicts=evicts),)
        else:
            for table in tables:
                check_fit(self.reader, self.lengths, table)
        try:
            if self.refresh is not None:
                self._refresh(tables, self.refresh)
            else:
                self._fill(tables)
            return tables[0]
        except BaseException:
            if not self.target.tables:
                tables[0].close()
                if request.name is not None:
                    tables[0].unlink()
            raise

    def _fill(self, tables: Sequence[Table]) -> None:
        request = self.request
        fill = Filling(
            tables,
            self.reader,
            self.lengths,
            request.priority,
            request.progress,
            request.statistics,
            piece=self.piece,
        )
        if request.resume:
            fill.resume()
        if request.wait:
            fill.all_or_none()
        else:
            _begin(fill)

    def _refresh(self, tables: Sequence[Table], refresh: Refresh) -> None:
        """Refresh each table with its own part of the episodes."""
        (part, parts), total, request = self.target.part, len(self.lengths), self.request
        record = None
        if refresh.sampler is not None:
            record = PriorityRecord(total, refresh.record, resume=request.resume)
        try:
            refreshing = []
            for number, table in enumerate(tables):
                place = part * len(tables) + number, parts * len(tables)
                order: Passes | PriorityOrder = Passes(self.reader.starts, total, refresh.seed, *place)
                if record is not None:
                    order = PriorityOrder(record, total, refresh, *place)
                bar, pause = request.progress and len(tables) == 1, PAUSE / len(tables)
                refreshing.append(
                    Refreshing(table, self.reader, self.lengths, order, refresh, request.priority, bar, pause)
                )
            given = [each.given() if request.resume else 0 for each in refreshing]
        except BaseException:
            if record is not None:
                record.close()
            raise
        _begin_refresh(refreshing, given, record, request.wait)


def _hold_all(tables: Sequence[Table], reader: EpisodeReader, lengths: np.ndarray, resume: bool) -> bool:
    """Whether tables that are empty, or hold some of these episodes, can hold all, as far as it is known."""
    for number, table in enumerate(tables):
        schema, own = table.schema, lengths[number :: len(tables)]
        payload = reader.payload
        if payload is not None:
            payload = FIRST + payload + len(own) * (HEADER + GRAIN * len(schema.ragged))
        if (len(table) and not resume) or not holds_all(table, own, payload):
            return False
    return True


def _begin(fill: Filling) -> None:
    """Start the thread that fills tables."""
    fill.piece, fill.first_piece, fill.ahead = BACKGROUND_BYTES, min(FIRST_BYTES, BACKGROUND_BYTES), True
    count, steps = (None, None) if fill.lengths is None else (len(fill.lengths), int(fill.lengths.sum()))
    pieces = (fill.added for _ in fill.pieces())
    loading = Loading(fill.reader.source, count, steps, pieces, num_loaded=fill.added)
    for table in fill.tables:
        table._engine.loading = loading


def _begin_refresh(
    refreshing: list[Refreshing], given: list[int], record: PriorityRecord | None, wait: bool
) -> None:
    """Start the thread that refreshes tables, which were given so many episodes before; wait until they are full."""
    first, full = refreshing[0], [threading.Event() for _ in refreshing]
    for each, event in zip(refreshing, full, strict=True):
        each.when_full = event.set
    count = sum(len(each.order) for each in refreshing)
    loading = Loading(
        first.reader.source,
        count,
        int(first.lengths.sum()) * count // len(first.lengths),
        together(refreshing, given, record),
        num_loaded=sum(given),
        epochs=first.refresh.epochs,
        update_priority=None if first.refresh.sampler is None else update_of(refreshing),
    )
    for each in refreshing:
        each.table._engine.loading = loading
    try:
        while wait and not all(event.wait(0.01) for event in full) and not loading.done:
            pass
    except BaseException:  # an interrupt
        loading.cancel()
        raise
    if loading.done:
        loading.wait()
