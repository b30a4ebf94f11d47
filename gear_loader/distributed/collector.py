"""Collects batches from several shards: rows of this node from their regions, rows of others over a transport."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.collection.collector import Buffers, Collector, copy_batch
from gear_loader.collection.n_step import NStep
from gear_loader.collection.plans import Plans, plans_of
from gear_loader.collection.tier_rows import TierRows
from gear_loader.collection.windows import Whole, mask_of
from gear_loader.distributed.remote import Part, RemoteShard, Staging
from gear_loader.distributed.row_cache import RowCache
from gear_loader.distributed.shards import Shards
from gear_loader.errors import (
    HandshakeError,
    PeerTimeoutError,
    StaleIndexError,
    TableEmptyError,
    TransportError,
)
from gear_loader.kernels.plan import PLACE_OUT, PlacePlan
from gear_loader.native import gathering, threads
from gear_loader.native.row_cache import ABSENT
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Window
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.utils.arrays import Array
from gear_loader.utils.streams import current_stream

__all__ = ["ROW_KEYS", "ReadTickets", "ShardBuffers", "ShardCollector", "ShardRows", "awaited"]

ROW_KEYS = ("index", "anchor", "generation", "shard")
"""Keys of a batch that identify its rows."""
_TURNS = 8  # attempts to draw spare rows
_PAUSE = 0.05  # seconds before a lost request is repeated


class ReadTickets(dict[int, Ticket]):
    """Shard -> read ticket, of the shards of this node whose rows a batch reads."""

    def end(self) -> None:
        """Release all of them; idempotent. Takes no lock."""
        for ticket in self.values():
            ticket.end()


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
        tickets: read tickets that the collector takes.
        rates: expected draws of each row in a batch of this rank, float64 [n]; None if they are not known.
    """

    shards: Array
    records: Array
    weigh: Callable[[Array], Array] | None
    spare: Callable[[int, int], tuple[Array, int]] | None
    keys: Array | None = None
    tickets: ReadTickets = dataclasses.field(default_factory=ReadTickets)
    rates: Array | None = None

    def __len__(self) -> int:
        return len(self.shards)


@dataclasses.dataclass
class ShardBuffers(Buffers):
    """The tensors of one batch, and the plans that fill them from each shard.

    Attributes:
        shard_plans: shard of this node -> plans, made on first use.
        place: plan that places rows of other nodes, made on first use.
    """

    shard_plans: dict[int, Plans] = dataclasses.field(default_factory=dict)
    place: PlacePlan | None = None


class _Cached(NamedTuple):
    """Rows of a batch in the cache.

    Attributes:
        entries: entry of each row, or ABSENT, int64 [n]. keys: their keys, int64 [n, KEY]. rates: as in `ShardRows`.
    """

    entries: Array
    keys: Array
    rates: Array | None


class ShardCollector(Collector):
    """Gathers rows of any shard into buffers.

    Args:
        shards: the sharded table.
        windows, batch_size, device, programs, weighs: as for `Collector`.

    Attributes:
        num_gone: rows that were replaced because their trajectory was gone before it was read.
        num_lost: rows that were replaced because their shard could not be reached.
    """

    _gathers_inline = False

    def __init__(
        self,
        shards: Shards,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        batch_size: int,
        device: torch.device,
        programs: int | None = None,
        weighs: bool = False,
    ) -> None:
        super().__init__(
            shards.table, windows, batch_size=batch_size, device=device, programs=programs, weighs=weighs
        )
        self.shards = shards
        self.zero_copy = self.awaits_pinning = False
        self.waits = shards.exchange.size > 1
        self.num_gone = 0
        self.num_lost = 0
        self._staging = Staging(pinned=device.type == "cuda")
        self._cache: RowCache | None = None
        if shards.cache is not None and shards.remote:
            self._cache = RowCache(shards.cache, [piece.row_bytes for piece in self._pieces()])
        self._tiers: dict[int, TierRows] = {}

    @property
    def regions(self) -> list[Region]:
        """See `Collector.regions`."""
        return [table_here(self.shards, shard)._engine.region for shard in self.shards.local_shards()]

    def buffers(self, *, shared: bool = False) -> ShardBuffers:
        """See `Collector.buffers`."""
        made = super().buffers(shared=shared)
        assert isinstance(made, ShardBuffers)
        return made

    def _buffers(self, device: torch.device, *, shared: bool = False, pinned: bool = False) -> ShardBuffers:
        made = super()._buffers(device, shared=shared, pinned=pinned)
        made.batch["shard"] = torch.empty(
            self.batch_size, dtype=torch.int64, device=device, pin_memory=pinned
        )
        return ShardBuffers(made.batch, made.plans, made.outputs, made.staging, computed=made.computed)

    # ---------------------------------------------------------------- collecting

    def gather(self, buffers: Buffers, rows: ShardRows) -> None:
        """Fill the first rows of `buffers`; see `Collector.gather`.

        Takes a read ticket for each shard of this node that is read, into `rows.tickets`; the caller releases them.

        Raises:
            TransportError: a shard of another node did not answer, and `on_failure` is "raise".
            StaleIndexError, TableEmptyError: rows were gone, and there are no spare rows.
        """
        assert isinstance(buffers, ShardBuffers)
        with self._filling(buffers):
            self._gather_all(buffers, rows)

    @contextlib.contextmanager
    def _filling(self, buffers: ShardBuffers) -> Iterator[None]:
        """Surround all writes into the buffers."""
        gpu = buffers.gpu
        if gpu is None:
            yield
            return
        # The GPU cannot read the regions: the batch is collected in pinned memory, and copied.
        gpu.filled.synchronize()
        yield
        assert gpu.staging is not None
        current_stream(self.device).wait_event(gpu.released)
        copy_batch(buffers.batch, gpu.staging.batch)
        gpu.filled.record()

    def _gather_all(self, buffers: ShardBuffers, rows: ShardRows) -> None:
        tickets = rows.tickets
        if buffers.gpu is not None and isinstance(buffers.gpu.staging, ShardBuffers):
            buffers = buffers.gpu.staging
        parts: list[tuple[int, Part]] = []
        local, missing = [], []
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        cached = self._find_cached(rows)
        for shard, which in self._by_shard(rows, np.flatnonzero(cached.entries < 0)):
            source = self.shards.source(shard)
            if not isinstance(source, RemoteShard):
                local.append(which)
            elif shard in lost:  # no request until the shard is tried again
                self.num_lost += len(which)
                missing.append(which)
            else:
                started = source.start(self.windows, which, rows.records[which], self._staging)
                parts += [(shard, part) for part in started]
        # Rows of this node and of the cache, while those of other nodes are on their way.
        if len(hits := np.flatnonzero(cached.entries >= 0)):
            self._place_cached(buffers, hits, cached.entries[hits])
        self._gather_or_replace(buffers, rows, self._read_or_replace(rows, _concatenated(local), tickets))
        left = _concatenated([*missing, self._place(buffers, parts, cached)])
        if len(left):
            self._gather_or_replace(buffers, rows, self._replace(rows, left, tickets))
        self._write_keys(buffers, rows)
        buffers.compute(len(rows))

    def _gather_or_replace(self, buffers: ShardBuffers, rows: ShardRows, which: Array) -> None:
        """Gather rows of this node's shards, and replace those that cannot be read from disk."""
        while len(which):
            which = self._gather_local(buffers, rows, which)
            if len(which):
                self.num_gone += len(which)
                self._replace(rows, which, rows.tickets)

    def _read_or_replace(self, rows: ShardRows, which: Array, tickets: ReadTickets) -> Array:
        """Take read tickets for rows of this node's shards, and replace rows that are gone; return `which`."""
        gone = [
            shard_rows[~present(self.shards, shard, rows.records[shard_rows], tickets)]
            for shard, shard_rows in self._by_shard(rows, which)
        ]
        if gone and len(missing := np.concatenate(gone)):
            self.num_gone += len(missing)
            self._replace(rows, missing, tickets)
        return which

    def _replace(self, rows: ShardRows, which: Array, tickets: ReadTickets) -> Array:
        """Replace rows that cannot be read by spare rows of this rank's shard; return `which`, int64 [n]."""
        if rows.spare is None:
            raise StaleIndexError(
                f"{len(which)} rows of a batch were removed, or evicted, before they could be read. Stages of a "
                "pipeline must get the same rows, so they were not replaced. Make the tables larger, or remove "
                "trajectories between batches only."
            )
        left = which
        for turn in range(_TURNS):
            records, shard = rows.spare(len(left), turn)
            for name in records.dtype.names or ():
                rows.records[name][left] = records[name]
            rows.shards[left] = shard
            left = left[~present(self.shards, shard, rows.records[left], tickets)]
            if len(left) == 0:
                return which
        raise TableEmptyError(
            f"{len(left)} rows were drawn {_TURNS} times, and were evicted each time before they could be read. The "
            "table is replaced faster than it is read: make it larger."
        )

    # ---------------------------------------------------------------- rows of this node

    @staticmethod
    def _by_shard(rows: ShardRows, which: Array) -> Iterator[tuple[int, Array]]:
        """Yield each shard of some rows, and its rows."""
        for shard in np.unique(rows.shards[which]).tolist():
            yield shard, which[rows.shards[which] == shard]

    def _gather_local(self, buffers: ShardBuffers, rows: ShardRows, which: Array) -> Array:
        """Gather rows of this node's shards; return those that cannot be read from disk, int64 [n]."""
        lost: list[Array] = []
        for shard, shard_rows in self._by_shard(rows, which):
            table, plan = table_here(self.shards, shard), self._plans(buffers, shard).steps
            if table._engine.has_tier:
                sources = [output.column for output in buffers.outputs]
                gather = functools.partial(self._tier_of(shard).gather, plan.table.numpy(), sources)
                lost.append(self._unless_lost(shard, rows, shard_rows, gather)[1])
                continue
            records = rows.records[shard_rows]
            slots, anchors = (np.ascontiguousarray(records[name]) for name in ("slot", "step"))
            extent, block_ids = table._engine.reader().index_arrays()
            bad = threads.gather(
                plan.table.numpy(),
                slots,
                anchors,
                extent,
                block_ids,
                plan.block_steps,
                self._row_bytes,
                rows=shard_rows,
            )
            table._engine.reader().check_gathered(bad)
        return _concatenated(lost)

    def _tier_of(self, shard: int) -> TierRows:
        """What gathers rows of a shard with a disk tier."""
        if shard not in self._tiers:
            self._tiers[shard] = TierRows(table_here(self.shards, shard), self.reach, self._row_bytes)
        return self._tiers[shard]

    def _unless_lost(
        self, shard: int, rows: ShardRows, which: Array, read: Callable[[Array, Array, Array, Array], object]
    ) -> tuple[Array, Array]:
        """Read rows of a shard, without those that cannot be read from disk, which are removed from its table.

        Args:
            which: int64 [n], rows of the batch. read: takes slots, anchors, generations and rows of the batch.

        Returns:
            Rows that were read, and the others, int64 each.
        """
        lost: list[Array] = []
        while len(which):
            records = rows.records[which]
            slots, anchors, generations = (
                np.ascontiguousarray(records[name]) for name in ("slot", "step", "generation")
            )
            try:
                read(slots, anchors, generations, which)
                break
            except LostRowsError as error:
                table_here(self.shards, shard)._engine.remove_lost(error)
                bad = np.isin(records["slot"], error.slots)
                lost.append(which[bad])
                which = which[~bad]
        return which, _concatenated(lost)

    def _plans(self, buffers: ShardBuffers, shard: int) -> Plans:
        """The plans of a shard of this node; packing and blocks of tables may differ."""
        if shard not in buffers.shard_plans:
            buffers.shard_plans[shard] = plans_of(
                table_here(self.shards, shard), buffers.outputs, buffers.staging
            )
            buffers.references = None  # the plan refers to the batch's memory
        return buffers.shard_plans[shard]

    # ---------------------------------------------------------------- rows of other nodes

    def _find_cached(self, rows: ShardRows) -> _Cached:
        """Find the rows of other nodes that the cache has."""
        entries: Array = np.full(len(rows), ABSENT, dtype=np.int64)
        if self._cache is None:
            return _Cached(entries, entries, None)
        keys = RowCache.keys_of(rows.shards, rows.records)
        far = np.flatnonzero(~np.isin(rows.shards, self.shards.local_shards()))
        entries[far] = self._cache.find(keys[far], None if rows.rates is None else rows.rates[far])
        return _Cached(entries, keys, rows.rates)

    def _place_cached(self, buffers: ShardBuffers, which: Array, entries: Array) -> None:
        """Copy entries of the cache to rows of the batch."""
        assert self._cache is not None
        outs = self._place_plan(buffers).table[:, PLACE_OUT].numpy()
        self._cache.load(entries, outs, which)

    def _keep(self, part: Part, status: Array, cached: _Cached) -> None:
        """Keep rows of a part in the cache."""
        if self._cache is None:
            return
        served = np.flatnonzero(status == 0)
        which = part.rows[served]
        first = part.memory.data_ptr()
        sources = np.array([first + piece.offset for piece in self._pieces(len(part.rows))], dtype=np.int64)
        rates = None if cached.rates is None else cached.rates[which]
        self._cache.keep(cached.keys[which], rates, sources, served)

    def _place(self, buffers: ShardBuffers, parts: list[tuple[int, Part]], cached: _Cached) -> Array:
        """Place the parts that arrive in time into the batch; return the rows of missing ones, int64 [n]."""
        missing = []
        failure: TransportError | None = None
        end = time.monotonic() + self.shards.rows_timeout
        for shard, part in parts:
            try:
                part, status = awaited(part, end)
            except TransportError as error:
                failure = failure or error
                self.shards.mark_lost(shard, error)
                missing.append(part.rows)
                self.num_lost += len(part.rows)
                continue
            gone = np.flatnonzero(status)
            self._keep(part, status, cached)
            self._place_part(buffers, part.memory, part.rows)
            if len(gone):
                self.num_gone += len(gone)
                missing.append(part.rows[gone])
        if failure is not None and self.shards.on_failure == "raise":
            raise failure
        return _concatenated(missing)

    def _place_part(self, buffers: ShardBuffers, memory: torch.Tensor, rows: Array) -> None:
        """Place staging memory into rows of the batch, and give it back."""
        plan = self._place_plan(buffers)
        gathering.place(plan.pieces(memory, len(rows)).numpy(), rows)
        self._staging.give(memory)

    def _place_plan(self, buffers: ShardBuffers) -> PlacePlan:
        """Return the plan that places the pieces of a part, which are in the order of `WindowSpec.pieces`."""
        if buffers.place is None:
            pieces = self._pieces()
            # As they are stored, where values are converted or returns computed from them.
            stored = dict(zip(self.windows, buffers.outputs, strict=True))
            keys = {name: mask_of(self.table.schema, name, window) for name, window in self.windows.items()}
            masks = {keys[name]: each.mask for name, each in stored.items() if each.mask is not None}
            outs = [
                stored[piece.name].out if piece.kind == "column" else masks[keys[piece.name]]
                for piece in pieces
            ]
            buffers.place = PlacePlan([out.view(self.batch_size, -1).view(torch.uint8) for out in outs])
            buffers.references = None
        return buffers.place

    def _pieces(self, count: int = 1) -> tuple[Piece, ...]:
        return self._spec.pieces(count)

    @functools.cached_property
    def _spec(self) -> WindowSpec:
        """The layout of rows of other nodes, whatever their table."""
        return WindowSpec("", self.table.schema, self.windows)

    # ---------------------------------------------------------------- keys

    def _write_keys(self, buffers: ShardBuffers, rows: ShardRows) -> None:
        self._fill_keys(buffers.batch, buffers.batch.get("priority_weight"), rows)

    @staticmethod
    def _fill_keys(
        tensors: Mapping[str, torch.Tensor], weights: torch.Tensor | None, rows: ShardRows
    ) -> None:
        """Write the keys of the rows, and their importance weights, into tensors on the host."""
        count, records = len(rows), rows.records
        keys = records if rows.keys is None else rows.keys
        for key, values in zip(
            ROW_KEYS, (keys["slot"], records["step"], keys["generation"], rows.shards), strict=True
        ):
            tensors[key].numpy()[:count] = values
        if rows.weigh is not None and weights is not None:
            weights.numpy()[:count] = rows.weigh(records["leaf"])


def _concatenated(parts: list[Array]) -> Array:
    """Concatenate lists of row numbers."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def table_here(shards: Shards, shard: int) -> Table:
    """The table of a shard of this node."""
    table = shards.source(shard).table
    assert table is not None
    return table


def present(shards: Shards, shard: int, records: Array, tickets: ReadTickets) -> Array:
    """Take a read ticket for a shard of this node; return which of its rows are present, bool [n]."""
    reader = table_here(shards, shard)._engine.reader()
    if shard not in tickets:
        tickets[shard] = Ticket()
        reader.begin_read(tickets[shard])
    state, generation, _ = reader.slot_states()
    slots = records["slot"]
    alive: Array = (state[slots] == READY) & (generation[slots] == records["generation"])
    return alive


def awaited(part: Any, end: float) -> tuple[Any, Array]:
    """Wait for a part; return it and the status of its rows. Repeat the request after a lost connection: the server
    may have been restarted.

    Args:
        part: the part.
        end: deadline of repeated requests, by `time.monotonic`.
    """
    while True:
        try:
            return part, part.future.result()
        except (PeerTimeoutError, HandshakeError):
            raise
        except TransportError:
            if time.monotonic() > end:
                raise
            time.sleep(_PAUSE)
            part = part.again()
