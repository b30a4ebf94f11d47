"""The exchange of a batch: moves row records from the ranks that own the rows to the ranks that train on them."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import numpy as np

from gear_loader.distributed.failures import attempt
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.records import SUMMARY, UPDATE, Message, as_bytes, slice_rows
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.update_routing import UpdateRouter
from gear_loader.utils.arrays import Array


@dataclasses.dataclass(repr=False, eq=False)
class BatchExchange:
    """Exchanges one batch's row records, priority updates and shard summaries between ranks.

    Args:
        exchange: collective channel private to this selection.
        samplers: shard samplers of this rank; they define the type of the records.
        updates: router of priority updates, which are sent along with the records.
        whole: whether every rank gets the records of all rows, and not only of its slice.

    Attributes:
        summaries: last summary of each shard, `SUMMARY` [S]; None before the first exchange and after a failed one.
            Every exchange makes a new array.
        unreachable: bool [S]: shards that some rank cannot reach.
    """

    shards: ShardTables
    exchange: SingleProcess
    samplers: Samplers
    updates: UpdateRouter
    whole: bool = False

    def __post_init__(self) -> None:
        self.dtype = self.samplers.dtype
        self._owned: list[list[int]] = [[] for _ in range(self.exchange.size)]
        for shard, lead in enumerate(self.shards.leads):
            self._owned[lead].append(shard)
        self._order: Array = np.argsort([shard for owned in self._owned for shard in owned], kind="stable")
        self.summaries: Array | None = None
        self.unreachable: Array = np.zeros(self.shards.num_shards, dtype=bool)

    # ---------------------------------------------------------------- slices and shards

    def no_records(self) -> Array:
        """Return an empty array of records."""
        return np.empty(0, dtype=self.dtype)

    def slice_of(self, count: int, data: int | None = None) -> Array:
        """Return the rows of a batch whose records a slice gets, int64 [m]: its own, or with `whole` all of them.

        Args:
            data: data coordinate of the slice; by default this rank's.
        """
        if self.whole:
            return np.arange(count)
        data = self.shards.place.data if data is None else data
        return slice_rows(count, self.shards.num_slices, data)

    def shards_of(self, rank: int) -> list[int]:
        """Return the shards for which a rank answers."""
        return self._owned[rank]

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
            self.exchange_messages(0, lambda *_: 0, lambda _: self.no_records(), summaries, failure)
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

    def exchange_messages(
        self,
        count: int,
        num_records: Callable[[int, int], int],
        records_for: Callable[[int], Array],
        summaries: Array,
        failure: Exception | None,
    ) -> list[Message]:
        """Send a message to each rank; return the messages received, in the order of ranks.

        Args:
            count: rows of the batch, all slices together.
            num_records: number of records of a shard that a rank receives, by rank and shard; known to all ranks.
            records_for: records that this rank sends to a rank.
            summaries: summaries of this rank's shards.
            failure: error that kept this rank from making records and summaries.
        """
        num_shards, me = self.shards.num_shards, self.exchange.rank
        owned = self._owned
        capacity = self.updates.outbox.capacity(count // self.shards.num_slices)

        def size(source: int, target: int) -> tuple[int, int]:
            rows = sum(num_records(target, shard) for shard in owned[source])
            return rows, Message.size_of(num_shards, len(owned[source]), rows, self.dtype, capacity)

        incoming = [size(rank, me) for rank in range(len(owned))]
        updates: list[Array] = []
        if failure is None:
            updates, pending = self.updates.outbox.take(capacity), self.updates.outbox.longest
            unreachable = np.isin(np.arange(num_shards), self.shards.lost())
            parts = []
            for rank, queue in enumerate(updates):
                queue["draw"] = self.updates.draws
                parts.append(
                    Message(pending, unreachable, summaries, records_for(rank), queue).pack(capacity)
                )
        else:
            parts = [np.zeros(size(me, rank)[1], dtype=np.uint8) for rank in range(len(owned))]
        try:
            answers = self.exchange.all_to_all(parts, [size_in for _, size_in in incoming], failure)
        except BaseException:
            self.summaries = None  # the next draw begins with an exchange of summaries
            self.updates.outbox.put_back(updates)
            raise
        messages = [
            Message.unpack(answer, num_shards, len(shards), rows, self.dtype)
            for answer, shards, (rows, _) in zip(answers, owned, incoming, strict=True)
        ]
        self._receive(messages)
        return messages

    def _receive(self, messages: list[Message]) -> None:
        """Take over the summaries and updates of all ranks' messages."""
        self.summaries = np.concatenate([message.summaries for message in messages])[self._order]
        self.unreachable = np.logical_or.reduce([message.unreachable for message in messages])
        self.updates.received += [message.updates for message in messages if len(message.updates)]
        pending = max(message.pending for message in messages)
        if pending:
            self._send_pending(pending)

    def _send_pending(self, most: int) -> None:
        """Send the updates that did not fit: the draw from which updates count does not depend on their number.

        Args:
            most: the most updates that any rank has for one other rank.
        """
        parts: list[Array] = []
        for queue in self.updates.outbox.take(most):
            part: Array = np.zeros(most, dtype=UPDATE)
            part["shard"], queue["draw"] = -1, self.updates.draws
            part[: len(queue)] = queue
            parts.append(as_bytes(part))
        for answer in self.exchange.all_to_all(parts, [most * UPDATE.itemsize] * self.exchange.size):
            updates = answer.copy().view(UPDATE)
            self.updates.received.append(updates[updates["shard"] >= 0])

    def send_rows(
        self,
        assignment: Array,
        own: dict[int, tuple[Array, Array]],
        summaries: Array,
        failure: Exception | None,
    ) -> tuple[Array, Array, float]:
        """Send each rank the records of its rows.

        Args:
            assignment: int64 [n]: shard of each row of the batch; -1 for rows that are not sent.
            own: shard -> rows and their records, of this rank's shards.
            summaries: summaries of this rank's shards.
            failure: error that kept this rank from making records and summaries.

        Returns:
            The rows whose records this rank received, int64 [m] ascending; the records [m]; and the smallest leaf
            among the rows of all ranks.
        """

        def rows_for(rank: int, shard: int) -> Array:
            place = self.shards.places[rank]
            if place.stage:  # all rows of its own shard: the rank looks them up for its stage
                return np.flatnonzero(assignment == shard) if place.data == shard else assignment[:0]
            rows = self.slice_of(len(assignment), place.data)
            assigned: Array = rows[assignment[rows] == shard]
            return assigned

        def records_for(rank: int) -> Array:
            parts = [
                records[np.searchsorted(rows, rows_for(rank, shard))]
                for shard, (rows, records) in own.items()
            ]
            return np.concatenate(parts) if parts else self.no_records()

        messages = self.exchange_messages(
            len(assignment),
            lambda rank, shard: len(rows_for(rank, shard)),
            records_for,
            summaries,
            failure,
        )
        me = self.exchange.rank
        rows = np.concatenate(
            [rows_for(me, shard) for rank in range(len(messages)) for shard in self.shards_of(rank)]
        )
        records = np.concatenate([message.records for message in messages])
        order = np.argsort(rows, kind="stable")
        assert self.summaries is not None
        return rows[order], records[order], float(self.summaries["batch_least"].min())

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
        sizes = end - first

        def records_for(_: int) -> Array:
            parts = [
                _padded(records[first[shard] : end[shard]], int(sizes[shard]))
                for shard, records in zip(self.shards.own, own, strict=True)
            ]
            return np.concatenate(parts) if parts else self.no_records()

        messages = self.exchange_messages(
            count, lambda _, shard: int(sizes[shard]), records_for, summaries, failure
        )
        found: dict[int, Array] = {}
        for rank, message in enumerate(messages):
            shards = self.shards_of(rank)
            ends = np.cumsum([sizes[shard] for shard in shards])[:-1]
            found.update(zip(shards, np.split(message.records, ends), strict=False))
        return found


def _padded(records: Array, size: int) -> Array:
    """Append empty records, with the id -1, up to a size."""
    padding: Array = np.zeros(size - len(records), dtype=records.dtype)
    padding["id"] = -1
    return np.concatenate((records, padding))
