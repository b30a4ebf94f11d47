"""Rows of several shards: of this node from their tables, of others over a transport or out of the cache."""

from __future__ import annotations

import dataclasses
import functools
import time
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gear_loader.collection.movers import GoneRowsError, RowMover
from gear_loader.collection.tree_rows import Origins, Tree, tree_of
from gear_loader.collection.windows import ROW_KEYS
from gear_loader.distributed.rank_samplers import with_origins
from gear_loader.distributed.records import ORIGINS
from gear_loader.distributed.remote import RemoteShard, RowRequest
from gear_loader.distributed.row_cache import RowCache
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.shard_values import ShardValues
from gear_loader.errors import StaleIndexError, TableEmptyError, TransportError
from gear_loader.native.row_cache import ABSENT
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

_TURNS = 8  # attempts to draw spare rows


class ReadTickets(dict[int, Ticket]):
    """Shard -> read ticket, of the shards of this node whose rows a batch reads."""

    def end(self) -> None:
        """Release all of them; idempotent. Takes no lock."""
        for ticket in self.values():
            ticket.end()


def spans_of(records: Array, offset: int, length: int) -> Array:
    """First step and number of steps of the rows' windows that exist, int64 [2, n].

    Args:
        records: row records with the lengths of their trajectories. offset, length: of the windows.
    """
    steps = records["steps"]
    low = np.clip(records["step"] + offset, 0, steps)
    high = np.maximum(np.minimum(records["step"] + offset + length, steps), low)
    return np.stack((low, high - low))


@dataclasses.dataclass
class ShardRows:
    """This rank's rows of a batch, drawn from all shards.

    Attributes:
        shards: shard of each row, int64 [n].
        records: row records of the owners, [n]; see `gear_loader.distributed.records`.
        weigh: function from leaves, float64 [n], to importance weights, float32 [n]; None if batches carry none.
        spare: function that draws spare rows: takes their number and the number of the attempt, returns their records
            and their shard. None if missing rows are an error.
        keys: slots and generations of the rows in stage 0, by which batches identify them; `SLOT_KEY` [n]. None in
            stage 0.
        tickets: read tickets that `ShardSource` takes.
        rates: expected draws of each row in a batch of this rank, float64 [n]; None if they are not known.
        spans: of a packed batch, int64 [2, n], first step and number of steps of each row; window: offset and length of
            its windows.
        known: importance weights, float32 [n], that are known already.
        max_steps: most steps of the batch, if it has a number of steps: then rows that are gone are left out. Else 0.
        gone, lost_steps: rows that were left out, and their steps.
        parts_of: int64 [n], numbers of the rows of a batch that these are parts of; None if they are the batch's own.
    """

    counts = numbers = None  # no ``sample_info``

    shards: Array
    records: Array
    weigh: Callable[[Array], Array] | None
    spare: Callable[[int, int], tuple[Array, int]] | None
    keys: Array | None = None
    tickets: ReadTickets = dataclasses.field(default_factory=ReadTickets)
    rates: Array | None = None
    spans: Array | None = None
    window: tuple[int, int] = (0, 0)
    known: Array | None = None
    max_steps: int = 0
    gone: int = 0
    lost_steps: int = 0
    parts_of: Array | None = None

    def __len__(self) -> int:
        return len(self.shards)

    def _column(self, name: str) -> Array:
        return np.ascontiguousarray(self.records[name])

    @property
    def slots(self) -> Array:
        """Int64 [n]."""
        return self._column("slot")

    @property
    def anchors(self) -> Array:
        """Int64 [n]."""
        return self._column("step")

    @property
    def generations(self) -> Array:
        """Int64 [n]."""
        return self._column("generation")

    @property
    def names(self) -> tuple[Array, Array, Array, Array]:
        """What identifies the rows in a batch."""
        keys = self.records if self.keys is None else self.keys
        return keys["slot"], self.records["step"], keys["generation"], self.shards

    @property
    def weights(self) -> Array | None:
        """Importance weights, float32 [n]; None if batches carry none."""
        if self.known is not None or self.weigh is None:
            return self.known
        return self.weigh(self.records["leaf"])

    def measure(self, offset: int, length: int) -> None:
        """Set the spans of a packed batch, unless they are known."""
        self.window = offset, length
        if self.spans is None:
            self.spans = spans_of(self.records, offset, length)

    def take(self, which: Array) -> ShardRows:
        """The rows of a mask, bool [n], with tickets of their own."""
        parts = {name: getattr(self, name) for name in ("keys", "rates", "known")}
        chosen: dict[str, Any] = {name: None if part is None else part[which] for name, part in parts.items()}
        spans = None if self.spans is None else self.spans[:, which]
        records = self.records[which]
        return dataclasses.replace(
            self, shards=self.shards[which], records=records, spans=spans, tickets=ReadTickets(), **chosen
        )

    def moved(self, which: Array, anchors: Array) -> ShardRows:
        """As `SelectedRows.moved`: parts of these rows, under the same tickets."""
        records = self.records[which].copy()
        records["step"] = anchors
        return ShardRows(self.shards[which], records, None, None, tickets=self.tickets, parts_of=which)

    # ---------------------------------------------------------------- rows that are gone

    def without(self, which: Array, source: ShardSource) -> Array:
        """Leave out rows that are gone if the batch has a number of steps, else replace them by spare rows.

        Returns:
            New number of each row, int64 [n]; -1 for those that are gone.

        Raises:
            StaleIndexError: there are no spare rows. TableEmptyError: these were gone each time, too.
            GoneRowsError: the rows are parts of others.
        """
        if self.parts_of is not None:
            raise GoneRowsError(np.unique(self.parts_of[which]))
        numbers = np.arange(len(self))
        numbers[which] = -1
        kept = numbers >= 0
        if not self.max_steps:
            self._replace(which, source)
            return numbers
        assert self.spans is not None
        none = not kept.any()
        self.gone += len(which)
        self.lost_steps += int(self.spans[1, which].sum())
        if none:  # all ranks have as many batches, so this one has a row
            kept[0] = True
        rest = self.take(kept)
        self.shards, self.records, self.spans, self.known = rest.shards, rest.records, rest.spans, rest.known
        if none:
            self._replace(np.array([0]), source)
            return numbers
        return np.where(kept, np.cumsum(kept) - 1, -1)

    def _replace(self, which: Array, source: ShardSource) -> None:
        if self.spare is None:
            raise StaleIndexError(
                f"{len(which)} rows of a batch were removed, or evicted, before they could be read. Stages of a "
                "pipeline must get the same rows, so they were not replaced. Make the tables larger, or remove "
                "trajectories between batches only."
            )
        left = which
        for turn in range(_TURNS):
            records, shard = self.spare(len(left), turn)
            for name in records.dtype.names or ():
                self.records[name][left] = records[name]
            self.shards[left] = shard
            alive = source.present(self, shard, left)
            self.records[left] = with_origins(source.table_of(shard), self.records[left])
            if self.spans is not None:
                extent = source.table_of(shard)._engine.reader().index_arrays()[0]
                self.records["steps"][left] = extent[self.records["slot"][left], 0]
                self.spans[:, left] = spans_of(self.records[left], *self.window)
                alive &= (self.spans[1, left] <= self.max_steps) | (self.max_steps == 0)
            left = left[~alive]
            if len(left) == 0:
                return
        longer = ", or had more steps than max_steps" if self.max_steps else ""
        raise TableEmptyError(
            f"{len(left)} rows were drawn {_TURNS} times, and were evicted each time before they could be read{longer}."
            " The table is replaced faster than it is read: make it larger."
        )


@dataclasses.dataclass
class ShardTreeRows(ShardRows):
    """The segments of a batch of ``layout="tree"``, see `Tree`; parts of its rows."""

    tree: Tree | None = None

    @classmethod
    def of(cls, rows: ShardRows) -> ShardTreeRows:
        """Split rows, which are measured."""
        assert rows.spans is not None
        own, roots, steps, slots, generations = (rows.records[name].astype(np.int64) for name in ORIGINS)
        count = int(rows.shards.max(initial=0)) + 1  # so that names of different shards differ
        own, slots = own * count + rows.shards, slots * count + rows.shards
        roots = np.where(roots < 0, -1, roots * count + rows.shards)
        tree = tree_of(rows.spans, Origins(own, roots, steps, slots, generations))
        which, weights = tree.which, rows.weights
        return cls(
            rows.shards[which],
            rows.records[which],
            None,
            None,
            tickets=rows.tickets,
            spans=np.ascontiguousarray(tree.spans),
            known=None if weights is None else weights[which],
            parts_of=which,
            tree=tree,
        )

    @property
    def names(self) -> tuple[Array, ...]:  # type: ignore[override]
        """What identifies the rows, and what they begin with."""
        assert self.tree is not None
        return *super().names, self.tree.parents, self.tree.prefix_steps, self.tree.groups


class ShardSource:
    """The rows of all shards: a `RowSource`.

    Attributes:
        num_gone: rows that were replaced, or left out, because their trajectory was gone before it was read.
        num_lost: rows whose shard could not be reached.
    """

    keys = (*ROW_KEYS, "shard")
    only = None

    def __init__(self, shards: ShardTables) -> None:
        self.shards = shards
        self.waits = shards.exchange.size > 1
        self.num_gone = self.num_lost = 0
        self._cache: RowCache | None = None
        self.values = ShardValues(shards.source, shards.mark_lost)

    def another(self) -> ShardSource:
        """A source of the same rows for other windows: a cache has rows of one kind."""
        return ShardSource(self.shards)

    @property
    def computes(self) -> bool:
        """Whether n-step returns of all rows are computed where the rows are: by the servers of other nodes, too."""
        return not self.shards.remote or self.shards.transport != "nixl"

    @property
    def tables(self) -> list[Table]:
        here = [self.table_of(shard) for shard in self.shards.local_shards()]
        own = self.shards.table
        return [own, *(table for table in here if table is not own)]

    def table_of(self, shard: int) -> Table:
        """The table of a shard of this node."""
        table = self.shards.source(shard)
        assert isinstance(table, Table)
        return table

    def present(self, rows: ShardRows, shard: int, which: Array) -> Array:
        """Take a read ticket for a shard of this node; return which of its rows are present, bool [m]."""
        reader, records = self.table_of(shard)._engine.reader(), rows.records[which]
        if shard not in rows.tickets:
            rows.tickets[shard] = Ticket()
            reader.begin_read(rows.tickets[shard])
        state, generation, _ = reader.slot_states()
        slots = records["slot"]
        alive: Array = (state[slots] == READY) & (generation[slots] == records["generation"])
        return alive

    # ---------------------------------------------------------------- reading

    def read(self, mover: RowMover, buffers: Any, rows: ShardRows) -> None:
        """Fill buffers with rows of all shards.

        Takes a read ticket for each shard of this node that is read, into `rows.tickets`; the caller releases them.
        Rows of this node are moved while those of others are on their way. Rows that are gone are replaced or left out,
        see `ShardRows.without`.

        Raises:
            TransportError: a shard of another node did not answer, and `on_failure` is "raise".
            StaleIndexError, TableEmptyError: rows were gone, and there are no spare rows.
            SchemaError: a packed batch would have 2**31 steps or more.
        """
        tree = mover.layout.packed and mover.layout.tree
        while True:
            try:
                if tree:
                    self._read_tree(mover, buffers, rows)
                else:
                    self._read_rows(mover, buffers, rows)
            except GoneRowsError as error:
                if not tree:
                    raise
                rows.without(error.rows, self)
                continue
            if not mover.ragged:
                return
            # The rows of this node keep their tickets; those of others may leave before their values are read.
            timeout, strict = self.shards.rows_timeout, self.shards.on_failure == "raise"
            given = mover, buffers.rows(len(rows)), rows, buffers.leaders if tree else None
            try:
                buffers.ragged, gone = self.values.read(*given, timeout=timeout, strict=strict)
            except MovedRowsError:  # what was on disk has been written anew meanwhile
                continue
            if not len(gone):
                return
            self.num_gone += len(gone)
            rows.without(gone, self)

    def _read_tree(self, mover: RowMover, buffers: Any, rows: ShardRows) -> None:
        """`_read_rows` of a batch in which shared steps lie once.

        Raises:
            GoneRowsError: some rows were gone.
        """
        rows.measure(mover.layout.offset, mover.layout.length)
        parts = ShardTreeRows.of(rows)
        assert parts.tree is not None
        buffers.segments, buffers.leaders = len(parts) - len(rows), parts.tree.leaders
        self._read_rows(mover, buffers, parts)

    def _read_rows(self, mover: RowMover, buffers: Any, rows: ShardRows) -> None:
        """`read`, of ragged columns their records."""
        packed = mover.layout.packed
        if packed:
            rows.measure(mover.layout.offset, mover.layout.length)
        entries, keep = self._cached(mover, rows)
        here, requests, gone = self._asked(mover, rows, np.flatnonzero(entries == ABSENT))
        numbers = np.arange(len(rows))  # of each row that was asked for, in the batch
        # Places of packed rows depend on those before them, so they are known when it is known which rows there are.
        unread = _none()
        if not packed or not len(gone):
            mover.begin(buffers, rows)
            if self._cache is not None and len(hits := np.flatnonzero(entries != ABSENT)):
                mover.load(buffers, functools.partial(self._cache.load, entries[hits]), hits)
            unread = self._copy(mover, buffers, rows, here)
        arrived = list[Any]()
        place = arrived.append if packed else lambda part: mover.place(buffers, part, numbers)
        gone = np.unique(np.concatenate((gone, unread, self._received(requests, place, keep))))
        while len(gone):
            now = rows.without(gone, self)
            numbers = np.where(numbers >= 0, now[numbers], -1)
            if packed:
                mover.begin(buffers, rows)
            gone = self._copy(mover, buffers, rows, self._local(rows) if packed else gone)
        for part in arrived:
            mover.place(buffers, part, numbers)
        mover.finish(buffers, rows)

    def _by_shard(self, rows: ShardRows, which: Array) -> Iterator[tuple[int, Array]]:
        """Yield each shard of some rows, and the numbers of its rows."""
        shards = rows.shards[which]
        for shard in np.unique(shards).tolist():
            yield shard, which[shards == shard]

    def _local(self, rows: ShardRows) -> Array:
        """Numbers of the rows of this node, int64 [m]."""
        return np.flatnonzero(np.isin(rows.shards, self.shards.local_shards()))

    def _asked(self, mover: RowMover, rows: ShardRows, which: Array) -> tuple[Array, list[Any], Array]:
        """Request rows of other nodes; find those of this node.

        Returns:
            Rows of this node that are present, int64 [m]; (shard, request) of others; rows that are gone, int64 [m].
        """
        here, gone, requests, layout = [_none()], [_none()], list[Any](), mover.layout
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        for shard, part in self._by_shard(rows, which):
            source = self.shards.source(shard)
            if not isinstance(source, RemoteShard):
                here.append(part)
            elif shard in lost:  # no request until the shard is tried again
                self.num_lost += len(part)
                gone.append(part)
            else:
                asked, memory = (part, rows.records[part]), mover.staging
                if layout.packed:
                    assert rows.spans is not None
                    columns = [*layout.columns_read[0], *layout.columns_read[1]]
                    made = source.start_spans(columns, *asked, rows.spans[:, part], memory)
                else:
                    moved = rows.parts_of is not None
                    made = source.start(layout.windows, *asked, memory, layout.returns, moved=moved)
                requests += [(shard, request) for request in made]
        present = [_none()]
        for shard, part in self._by_shard(rows, np.concatenate(here)):
            alive = self.present(rows, shard, part)
            self.num_gone += int((~alive).sum())
            present.append(part[alive])
            gone.append(part[~alive])
        return np.concatenate(present), requests, np.concatenate(gone)

    def _copy(self, mover: RowMover, buffers: Any, rows: ShardRows, which: Array) -> Array:
        """Move rows of this node; return those that cannot be read from disk, int64 [m], which their tables lose."""
        lost = [_none()]
        for shard, part in self._by_shard(rows, which):
            while len(part):
                try:
                    self._copy_whole(mover, buffers, self.table_of(shard), rows, part)
                    break
                except LostRowsError as error:
                    self.table_of(shard)._engine.remove_lost(error)
                    bad = np.isin(rows.records["slot"][part], error.slots)
                    lost.append(part[bad])
                    part = part[~bad]
        mover.flush(buffers)
        unread: Array = np.concatenate(lost)
        self.num_gone += len(unread)
        return unread

    @staticmethod
    def _copy_whole(mover: RowMover, buffers: Any, table: Table, rows: ShardRows, which: Array) -> None:
        """Move rows of a table of this node, which others may overwrite meanwhile."""
        slots = rows.records["slot"][which] if table.schema.mutable else which
        table._engine.reader().read_whole(slots, lambda: mover.copy(buffers, table, rows, which))

    def _received(
        self, requests: list[tuple[int, RowRequest]], place: Callable[[Any], None], keep: Callable[..., None]
    ) -> Array:
        """Wait for requested rows, and place those that arrive in time; return the others, int64 [m]."""
        missing = [_none()]
        failure: TransportError | None = None
        end = time.monotonic() + self.shards.rows_timeout
        for shard, request in requests:
            try:
                part, status = request.wait(end)
            except TransportError as error:
                failure = failure or error
                self.shards.mark_lost(shard, error)
                missing.append(request.part.rows)
                self.num_lost += len(np.unique(request.part.rows))
                continue
            gone = np.unique(part.rows[status != 0])
            self.num_gone += len(gone)
            missing.append(gone)
            keep(part, status)
            place(part)
        if failure is not None and self.shards.on_failure == "raise":
            raise failure
        return np.concatenate(missing)

    # ---------------------------------------------------------------- the cache

    def _cached(self, mover: RowMover, rows: ShardRows) -> tuple[Array, Callable[[Any, Array], None]]:
        """Find the rows of other nodes that the cache has.

        Those of windows that read mutable columns are never kept: nobody tells a cache that they were overwritten.

        Returns:
            Entry of each row, or ABSENT, int64 [n]; and a function that keeps rows of a part, by their status.
        """
        entries: Array = np.full(len(rows), ABSENT, dtype=np.int64)
        budget, sizes = self.shards.cache, None if mover.layout.packed else mover.layout.piece_bytes()
        changing = self.shards.table.schema.mutable
        if changing and sizes is not None and not set(changing).isdisjoint(mover.layout.sources):
            sizes = None
        if budget is None or sizes is None or not self.shards.remote:
            return entries, lambda part, status: None
        cache = self._cache = self._cache or RowCache(budget, sizes)
        keys, rates = RowCache.keys_of(rows.shards, rows.records), rows.rates
        far = np.setdiff1d(np.arange(len(rows)), self._local(rows), assume_unique=True)
        entries[far] = cache.find(keys[far], None if rates is None else rates[far])

        def keep(part: Any, status: Array) -> None:
            served = np.flatnonzero(status == 0)
            which, count = part.rows[served], len(part.rows)
            ends = np.cumsum([-(-count * size // 128) * 128 for size in sizes])
            sources = part.memory.data_ptr() + np.concatenate(([0], ends[:-1]))
            cache.keep(keys[which], None if rates is None else rates[which], sources, served)

        return entries, keep


def _none() -> Array:
    """No rows."""
    return np.empty(0, dtype=np.int64)
