"""The exchange of a batch: moves row records from the ranks that own the rows to the ranks that train on them."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.distributed.failures import attempt
from gear_loader.distributed.node_routes import cut
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.records import SUMMARY, UPDATE, as_bytes, message_bytes
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.slices import Slices, by_node, contiguous, whole
from gear_loader.distributed.update_routing import UpdateRouter
from gear_loader.native.exchange_loops import copy_ranges
from gear_loader.utils.arrays import Array


@dataclasses.dataclass(repr=False, eq=False)
class BatchExchange:
    """Exchanges one batch's row records, priority updates and shard summaries between ranks.

    Args:
        exchange: collective channel private to this selection.
        samplers: shard samplers of this rank; they define the type of the records.
        updates: router of priority updates, which are sent along with the records.
        whole: whether every rank gets the records of all rows, and not only of its slice.
        prefer_local: whether slices have rows of their own node as far as possible.

    Attributes:
        summaries: last summary of each shard, `SUMMARY` [S]; None before the first exchange and after a failed one.
            Every exchange makes a new array.
        unreachable: bool [S]: shards that some rank cannot reach.
        slices: of the batch that is drawn; see `deal`.
    """

    shards: ShardTables
    exchange: SingleProcess
    samplers: Samplers
    updates: UpdateRouter
    whole: bool = False
    prefer_local: bool = False

    def __post_init__(self) -> None:
        self.dtype = self.samplers.dtype
        size = self.exchange.size
        self._leads: Array = np.array(self.shards.leads, dtype=np.int64)
        self._num_owned = np.bincount(self._leads, minlength=size)  # shards for which a rank answers
        self._own: Array = np.flatnonzero(self._leads == self.exchange.rank)
        self._order: Array = np.argsort(np.argsort(self._leads, kind="stable"), kind="stable")
        # The rank of each slice that draws, and those of later stages, with their data coordinates.
        ranks = [rank for rank, place in enumerate(self.shards.places) if place.stage == 0]
        self._rank_of: Array = np.array(sorted(ranks, key=lambda rank: self.shards.places[rank].data))
        self._later = [(rank, place.data) for rank, place in enumerate(self.shards.places) if place.stage]
        self.summaries: Array | None = None
        self.unreachable: Array = np.zeros(self.shards.num_shards, dtype=bool)
        self.slices: Slices = contiguous(0, self.shards.num_slices)

    # ---------------------------------------------------------------- slices and shards

    def no_records(self) -> Array:
        """Return an empty array of records."""
        return np.empty(0, dtype=self.dtype)

    def deal(self, assignment: Array) -> None:
        """Decide which slice gets which rows of a batch, by the shard of each, int64 [n]; the same on all ranks."""
        count, slices = len(assignment), self.shards.num_slices
        if self.whole:
            self.slices = whole(count, slices)
        elif self.prefer_local and slices > 1:
            self.slices = by_node(self.shards.nodes[assignment], self.shards.nodes)
        else:
            self.slices = contiguous(count, slices)

    @property
    def own_rows(self) -> Array:
        """Rows of the batch of this rank's slice, int64 [m], ascending."""
        return self.slices.of(self.shards.place.data)

    def share_arrays(self, own: list[Array]) -> list[Array]:
        """Share one array of each of this rank's shards; return one array of each shard of all ranks."""
        if self.exchange.size == 1:
            return own
        arrays = self.exchange.share_array(own[0] if own else np.empty(0, dtype=np.int64))
        return [arrays[rank] for rank in self.shards.leads]

    # ---------------------------------------------------------------- shard summaries

    def summarize(self, draws: int) -> Array:
        """Apply the updates that were sent before draw number `draws`; return the summaries of this rank's shards."""
        self.updates.apply(draws)
        return self.samplers.summarize()

    def known_summaries(self) -> Array:
        """Return the summaries for the next draw, `SUMMARY` [S]; exchange them if they are not known."""
        if self.summaries is None:
            summaries, failure = attempt(
                lambda: self.summarize(self.updates.draws - 1), np.empty(0, dtype=SUMMARY)
            )
            none: Array = np.zeros(self.exchange.size, dtype=np.int64)
            self._exchange(0, self.no_records(), none, none, summaries, failure)
        assert self.summaries is not None
        return self.summaries

    def masses(self) -> Array:
        """Return the mass of each shard in the next draw, float64 [S]: 0 for shards that some rank cannot reach.

        If that leaves no mass, the draw is made from all shards: each rank then reads the rows that it can reach, and
        draws the other rows from its own shard.
        """
        assert self.summaries is not None
        masses = self.summaries["mass"]
        reached = np.where(self.unreachable, 0.0, masses)
        return reached if reached.sum() > 0 else masses.copy()

    # ---------------------------------------------------------------- exchanges

    def _exchange(
        self,
        count: int,
        records: Array,
        sent: Array,
        wanted: Array,
        summaries: Array,
        failure: Exception | None,
    ) -> Array:
        """Send a message to each rank; return the records received, those of one rank after another.

        Args:
            count: rows of the batch, all slices together.
            records: those for one rank after another. sent: int64 [W], how many for each, also if they failed.
            wanted: int64 [W], how many come from each rank.
            summaries: summaries of this rank's shards.
            failure: error that kept this rank from making records and summaries.
        """
        num_shards, record, unit = self.shards.num_shards, self.dtype, self.dtype.itemsize
        capacity = self.updates.outbox.capacity(count // self.shards.num_slices)
        outs: Array = message_bytes(num_shards, len(self._own), sent, record, capacity)
        ins: Array = message_bytes(num_shards, self._num_owned, wanted, record, capacity)
        data: Array = np.zeros(outs.sum(), dtype=np.uint8)
        updates, starts = np.empty(0, dtype=UPDATE), np.cumsum(outs) - outs
        if failure is None:
            updates, counts = self.updates.outbox.take(capacity)
            updates["draw"] = self.updates.draws
            numbers = np.stack((np.full_like(counts, self.updates.outbox.longest), counts), axis=1)
            unreachable = np.isin(np.arange(num_shards), self.shards.lost())
            same = np.concatenate((np.packbits(unreachable), as_bytes(summaries)))
            _put(data, starts, as_bytes(numbers), np.full_like(outs, 16))
            copy_ranges(data, starts + 16, same, np.zeros_like(outs), np.full_like(outs, len(same)))
            _put(data, starts + 16 + len(same), as_bytes(records), sent * unit)
            _put(data, starts + 16 + len(same) + sent * unit, as_bytes(updates), counts * UPDATE.itemsize)
        try:
            received = self.exchange.all_to_all(data, outs, ins, failure)
        except BaseException:
            self.summaries = None  # the next draw begins with an exchange of summaries
            self.updates.outbox.put_back(updates)
            raise
        return self._received(received, ins, wanted)

    def _received(self, data: Array, sizes: Array, wanted: Array) -> Array:
        """Take over the summaries and updates of all ranks' messages; return the records."""
        num_shards, starts, unit = self.shards.num_shards, np.cumsum(sizes) - sizes, self.dtype.itemsize
        numbers = cut(data, starts, np.full_like(sizes, 16)).view(np.int64).reshape(-1, 2)
        bits, at = -(-num_shards // 8), starts + 16
        unreachable = cut(data, at, np.full_like(sizes, bits)).reshape(len(sizes), bits)
        at = at + bits
        told = self._num_owned * SUMMARY.itemsize
        summaries, at = cut(data, at, told).view(SUMMARY), at + told
        records, at = cut(data, at, wanted * unit).view(self.dtype), at + wanted * unit
        updates = cut(data, at, numbers[:, 1] * UPDATE.itemsize).view(UPDATE)
        self.summaries = summaries[self._order]
        whole: Array = np.bitwise_or.reduce(unreachable, axis=0)
        self.unreachable = np.unpackbits(whole)[:num_shards].astype(bool)
        if len(updates):
            self.updates.received.append(updates)
        if pending := int(numbers[:, 0].max()):
            self._send_pending(pending)
        return records

    def _send_pending(self, most: int) -> None:
        """Send the updates that did not fit: the draw from which updates count does not depend on their number.

        Args:
            most: the most updates that any rank has for one other rank.
        """
        updates, counts = self.updates.outbox.take(most)
        updates["draw"] = self.updates.draws
        sizes: Array = np.full(len(counts), most * UPDATE.itemsize, dtype=np.int64)
        parts: Array = np.zeros(most * len(counts), dtype=UPDATE)
        parts["shard"] = -1
        _put(parts.view(np.uint8), np.cumsum(sizes) - sizes, as_bytes(updates), counts * UPDATE.itemsize)
        received = self.exchange.all_to_all(parts.view(np.uint8), sizes, sizes).view(UPDATE)
        self.updates.received.append(received[received["shard"] >= 0])

    def send_rows(
        self,
        assignment: Array,
        own: dict[int, tuple[Array, Array]],
        summaries: Array,
        failure: Exception | None,
    ) -> tuple[Array, Array, float]:
        """Send each rank the records of its rows, as `deal` has decided.

        Args:
            assignment: int64 [n]: shard of each row of the batch; -1 for rows that are not sent.
            own: shard -> rows and their records, of this rank's shards.
            summaries: summaries of this rank's shards.
            failure: error that kept this rank from making records and summaries.

        Returns:
            The rows whose records this rank received, int64 [m] ascending; the records [m]; and the smallest leaf
            among the rows of all ranks.
        """
        size, place = self.exchange.size, self.shards.place
        rows, targets = self._sent_rows(assignment)
        sent, records = np.bincount(targets, minlength=size), self.no_records()
        if failure is None and own:
            numbers = np.concatenate([numbers for numbers, _ in own.values()])
            order = np.argsort(numbers, kind="stable")
            made = np.concatenate([records for _, records in own.values()])
            records = made[order[np.searchsorted(numbers[order], rows)]]
        mine = np.flatnonzero(assignment == place.data) if place.stage else self.own_rows
        mine = mine[assignment[mine] >= 0]
        sources = self._leads[assignment[mine]]
        received = self._exchange(
            len(assignment), records, sent, np.bincount(sources, minlength=size), summaries, failure
        )
        # Each rank sends them in the order of the batch.
        found = np.empty_like(received)
        found[np.argsort(sources, kind="stable")] = received
        assert self.summaries is not None
        return mine, found, float(self.summaries["batch_least"].min())

    def _sent_rows(self, assignment: Array) -> tuple[Array, Array]:
        """Rows of this rank's shards that it sends, and to which rank, int64 [m] each: for one rank after another."""
        is_own = np.isin(assignment, self._own)
        if self.whole:
            rows = np.flatnonzero(is_own)
            size = self.exchange.size
            return np.tile(rows, size), np.repeat(np.arange(size), len(rows))
        entries = np.flatnonzero(is_own[self.slices.rows])
        rows, targets = self.slices.rows[entries], self._rank_of[self.slices.number[entries]]
        parts, ranks = [rows], [targets]
        for rank, data in self._later:  # all rows of its own shard: the rank looks them up for its stage
            if data in self._own:
                parts.append(np.flatnonzero(assignment == data))
                ranks.append(np.full(len(parts[-1]), rank))
        rows, targets = np.concatenate(parts), np.concatenate(ranks)
        order = np.argsort(targets, kind="stable")
        return rows[order], targets[order]

    def share_candidates(
        self,
        count: int,
        own: list[Array],
        first: Array,
        end: Array,
        summaries: Array,
        failure: Exception | None,
    ) -> dict[int, Array]:
        """Share candidates of all shards with all ranks.

        Args:
            own: candidates of each of this rank's shards.
            first, end: int64 [S]: range of each shard's candidates to share.
            summaries: summaries of this rank's shards.
            failure: error that kept this rank from making candidates and summaries.

        Returns:
            shard -> candidates, padded to the range's size with empty records.
        """
        sizes, world = end - first, self.exchange.size
        parts = [
            _padded(records[first[shard] : end[shard]], int(sizes[shard]))
            for shard, records in zip(self.shards.own, own, strict=failure is None)
        ]
        records = np.tile(np.concatenate([self.no_records(), *parts]), world)
        sent = np.full(world, sizes[self._own].sum())
        wanted = np.bincount(self._leads, weights=sizes, minlength=world).astype(np.int64)
        received = self._exchange(count, records, sent, wanted, summaries, failure)
        shards = np.argsort(self._leads, kind="stable")
        return dict(zip(shards.tolist(), np.split(received, np.cumsum(sizes[shards])[:-1]), strict=True))


def _put(data: Array, starts: Array, parts: Array, sizes: Array) -> None:
    """Write parts that lie one after another, of so many bytes each, to these places."""
    copy_ranges(data, starts, parts, np.cumsum(sizes) - sizes, sizes)


def _padded(records: Array, size: int) -> Array:
    """Append empty records, with the id -1, up to a size."""
    padding: Array = np.zeros(size - len(records), dtype=records.dtype)
    padding["id"] = -1
    return np.concatenate((records, padding))
