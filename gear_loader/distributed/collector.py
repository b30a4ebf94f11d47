"""Batches out of several shards: rows of this node straight from their regions, rows of others over a transport."""

from __future__ import annotations

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.collector import Batch, Buffers, Collector, copy_batch
from gear_loader.distributed.remote import Part, RemoteShard, Staging
from gear_loader.distributed.shards import Shards
from gear_loader.errors import (
    HandshakeError,
    PeerTimeoutError,
    StaleIndexError,
    TableEmptyError,
    TransportError,
)
from gear_loader.kernels import reference
from gear_loader.kernels.plan import GatherPlan, PlacePlan
from gear_loader.native import copying, threads
from gear_loader.native.sum_tree import READY
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table, Ticket
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["NAMES", "ReadTickets", "ShardBuffers", "ShardCollector", "ShardRows"]

NAMES = ("index", "anchor", "generation", "shard")
"""Keys of a batch that tell what its rows are."""
_TURNS = 8
_PAUSE = 0.05  # seconds before what was lost is asked for again


class ReadTickets(dict[int, Ticket]):
    """Shard -> read ticket: those under which the rows of one batch are read."""

    def end(self) -> None:
        """Release all of them; idempotent. Takes no lock."""
        for ticket in self.values():
            ticket.end()


@dataclasses.dataclass
class ShardRows:
    """Rows of a batch, drawn from all shards.

    Attributes:
        shards: int64 [n]: which shard each is of.
        records: [n], as its owner described it; see `gear_loader.distributed.records`.
        weigh: importance weights, float32 [n], of leaves, float64 [n]; None if batches carry none.
        spare: records of so many other rows of this rank's own shard, and its number; the second argument tells how
            often it has been asked. None if there is none to be had here.
        names: what batches call the rows, where that is not as `records` do: "slot" and "generation", [n].
        tickets: those that the collector takes.
    """

    shards: Array
    records: Array
    weigh: Callable[[Array], Array] | None
    spare: Callable[[int, int], tuple[Array, int]] | None
    names: Array | None = None
    tickets: ReadTickets = dataclasses.field(default_factory=ReadTickets)

    def __len__(self) -> int:
        return len(self.shards)


@dataclasses.dataclass
class ShardBuffers(Buffers):
    """The tensors of one batch, and how to fill them from each shard.

    Attributes:
        plans: shard of this node -> plan, as they come up.
        place: how rows of other nodes are put in their places, if any came.
    """

    plans: dict[int, GatherPlan] = dataclasses.field(default_factory=dict)
    place: PlacePlan | None = None


class ShardCollector(Collector):
    """Gathers rows of any shard into buffers.

    Args:
        shards: all of them.
        windows, batch_size, device, programs, weighs: as for `Collector`.
    """

    def __init__(
        self,
        shards: Shards,
        windows: Mapping[str, Window],
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
        self.zero_copy = False
        self.waits = shards.exchange.size > 1
        self.num_gone = 0
        """Rows that were drawn once more, because their trajectory was gone before it could be read."""
        self.num_lost = 0
        """Rows that were drawn once more, because their shard could not be reached."""
        self._staging = Staging(pinned=device.type == "cuda")

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
        return ShardBuffers(made.batch, made.plan)

    # ---------------------------------------------------------------- collecting

    def gather(self, buffers: Buffers, rows: ShardRows) -> None:
        """Fill the first rows of `buffers`; see `Collector.gather`.

        Takes `rows.tickets`, one for each shard of this node that is read; the caller releases them.

        Raises:
            TransportError: a shard of another node did not answer, and rows are not to be drawn once more.
            StaleIndexError, TableEmptyError: rows were gone, and no others can be had.
        """
        assert isinstance(buffers, ShardBuffers)
        with self._filling(buffers):
            self._gather_all(buffers, rows)

    @contextlib.contextmanager
    def _filling(self, buffers: ShardBuffers) -> Iterator[None]:
        """Around everything that writes into the buffers."""
        gpu = buffers.gpu
        if gpu is None:
            yield
            return
        # The GPU cannot read the regions: the batch is put together in pinned memory, and copied.
        gpu.filled.synchronize()
        yield
        assert gpu.staging is not None
        torch.cuda.current_stream().wait_event(gpu.released)
        copy_batch(buffers.batch, gpu.staging.batch)
        gpu.filled.record()

    def _gather_all(self, buffers: ShardBuffers, rows: ShardRows) -> None:
        tickets = rows.tickets
        if buffers.gpu is not None and isinstance(buffers.gpu.staging, ShardBuffers):
            buffers = buffers.gpu.staging
        parts: list[tuple[int, Part]] = []
        near, missing = [], []
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        for shard, which in self._by_shard(rows, np.arange(len(rows))):
            source = self.shards.source(shard)
            if not isinstance(source, RemoteShard):
                near.append(which)
            elif shard in lost:  # not waited for again so soon
                self.num_lost += len(which)
                missing.append(which)
            else:
                started = source.start(self.windows, which, rows.records[which], self._staging)
                parts += [(shard, part) for part in started]
        # Rows of this node, while the others are under way.
        self._gather_near(buffers, rows, self._alive(rows, _joined(near), tickets))
        left = _joined([*missing, self._place(buffers, parts)])
        if len(left):
            self._gather_near(buffers, rows, self._instead(rows, left, tickets))
        self._write_names(buffers, rows)

    def _alive(self, rows: ShardRows, which: Array, tickets: ReadTickets) -> Array:
        """Take tickets for rows of this node's shards; those that are gone get others in their place."""
        gone = [
            mine[~self._check(shard, rows.records[mine], tickets)]
            for shard, mine in self._by_shard(rows, which)
        ]
        if gone and len(missing := np.concatenate(gone)):
            self.num_gone += len(missing)
            self._instead(rows, missing, tickets)
        return which

    def _check(self, shard: int, records: Array, tickets: ReadTickets) -> Array:
        """Whether rows of a shard of this node are there: bool [n]. They stay until the ticket is given back."""
        table = self._table(shard)
        if shard not in tickets:
            tickets[shard] = Ticket()
            table.begin_read(tickets[shard])
        state, generation, _ = table.slot_states()
        slots = records["slot"]
        alive: Array = (state[slots] == READY) & (generation[slots] == records["generation"])
        return alive

    def _table(self, shard: int) -> Table:
        table = self.shards.source(shard).table
        assert table is not None
        return table

    def _instead(self, rows: ShardRows, which: Array, tickets: ReadTickets) -> Array:
        """Rows of this rank's own shard in place of some that cannot be had; which they are, int64 [n]."""
        if rows.spare is None:
            raise StaleIndexError(
                f"{len(which)} rows of a batch were removed, or evicted, before they could be read. Stages of a "
                "pipeline must get the same rows, so none were drawn instead. Give the tables more room, or remove "
                "trajectories between batches only."
            )
        left = which
        for turn in range(_TURNS):
            records, shard = rows.spare(len(left), turn)
            for name in records.dtype.names or ():
                rows.records[name][left] = records[name]
            rows.shards[left] = shard
            left = left[~self._check(shard, rows.records[left], tickets)]
            if len(left) == 0:
                return which
        raise TableEmptyError(
            f"{len(left)} rows were drawn {_TURNS} times, and were evicted each time before they could be read. The "
            "table is replaced faster than it is read: make it larger."
        )

    # ---------------------------------------------------------------- rows of this node

    @staticmethod
    def _by_shard(rows: ShardRows, which: Array) -> Iterator[tuple[int, Array]]:
        """Each shard that some rows are of, and those rows."""
        for shard in np.unique(rows.shards[which]).tolist():
            yield shard, which[rows.shards[which] == shard]

    def _gather_near(self, buffers: ShardBuffers, rows: ShardRows, which: Array) -> None:
        for shard, mine in self._by_shard(rows, which):
            records = rows.records[mine]
            table, plan = self._table(shard), self._plan(buffers, shard)
            slots, anchors = (np.ascontiguousarray(records[name]) for name in ("slot", "step"))
            extent, block_ids = table.index_arrays()
            if copying.require():
                bad = threads.gather(
                    plan.table.numpy(),
                    slots,
                    anchors,
                    extent,
                    block_ids,
                    plan.block_steps,
                    self._row_bytes,
                    rows=mine,
                )
                table.check_gathered(bad)
            else:
                reference.gather(
                    plan,
                    *(torch.from_numpy(part) for part in (slots, anchors, extent, block_ids)),
                    rows=torch.from_numpy(mine),
                )

    def _plan(self, buffers: ShardBuffers, shard: int) -> GatherPlan:
        plan = buffers.plans.get(shard)
        if plan is None:
            region = self._table(shard).region
            sources = [torch.from_numpy(region.column(name)) for name in self.windows]
            plan = buffers.plans[shard] = buffers.plan.of_source(sources, region.layout.block_steps)
        return plan

    # ---------------------------------------------------------------- rows of other nodes

    def _place(self, buffers: ShardBuffers, parts: list[tuple[int, Part]]) -> Array:
        """Put what has arrived into its rows; those that did not come: int64 [n]."""
        missing = []
        failure: TransportError | None = None
        end = time.monotonic() + self.shards.rows_timeout
        for shard, part in parts:
            try:
                part, status = _arrived(part, end)
            except TransportError as error:
                failure = failure or error
                self.shards.lose(shard, error)
                missing.append(part.rows)
                self.num_lost += len(part.rows)
                continue
            gone = np.flatnonzero(status)
            self._place_part(buffers, part)
            if len(gone):
                self.num_gone += len(gone)
                missing.append(part.rows[gone])
        if failure is not None and self.shards.on_failure == "raise":
            raise failure
        return _joined(missing)

    def _place_part(self, buffers: ShardBuffers, part: Part) -> None:
        """Put a part in its place, and see to it that its memory is given back."""
        plan = self._place_plan(buffers)
        if copying.require():
            copying.place(plan.pieces(part.memory, len(part.rows)).numpy(), part.rows)
        else:
            reference.place(plan, part.memory, torch.from_numpy(part.rows))
        self._staging.give(part.memory)

    def _place_plan(self, buffers: ShardBuffers) -> PlacePlan:
        """Where the pieces of a part go; they lie in it as `PlacePlan` has them."""
        if buffers.place is None:
            pieces = self._pieces()
            outs = [self._out(buffers.batch, piece.name, piece.kind) for piece in pieces]
            buffers.place = PlacePlan([out.view(self.batch_size, -1).view(torch.uint8) for out in outs])
        return buffers.place

    def _pieces(self) -> tuple[Piece, ...]:
        return WindowSpec("", self.table.schema, self.windows).pieces(1)

    @staticmethod
    def _out(batch: Batch, name: str, kind: str) -> torch.Tensor:
        mask: Any = batch["mask"]
        if kind == "column":
            tensor: torch.Tensor = batch[name]
        else:
            tensor = mask[name] if isinstance(mask, dict) else mask
        return tensor

    # ---------------------------------------------------------------- names

    def _write_names(self, buffers: ShardBuffers, rows: ShardRows) -> None:
        self._fill_names(buffers.batch, buffers.batch.get("priority_weight"), rows)

    @staticmethod
    def _fill_names(names: Mapping[str, torch.Tensor], weights: torch.Tensor | None, rows: ShardRows) -> None:
        """Write what the rows are, and what they weigh, into tensors on the host."""
        count, records = len(rows), rows.records
        called = records if rows.names is None else rows.names
        for key, values in zip(
            NAMES, (called["slot"], records["step"], called["generation"], rows.shards), strict=True
        ):
            names[key].numpy()[:count] = values
        if rows.weigh is not None and weights is not None:
            weights.numpy()[:count] = rows.weigh(records["leaf"])


def _joined(parts: list[Array]) -> Array:
    """Row numbers, one list of them after another."""
    return np.concatenate([np.empty(0, dtype=np.int64), *parts])


def _arrived(part: Part, end: float) -> tuple[Part, Array]:
    """A part that has arrived, and its status. Where a connection was lost it is asked for again: the server may have
    been started anew.

    Args:
        end: by `time.monotonic`, until when.
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
