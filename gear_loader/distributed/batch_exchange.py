"""How a batch's rows, and what goes with them, get from the ranks that own them to those that train on them."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gear_loader.distributed.exchange import SingleProcess
from gear_loader.distributed.messages import Message, as_bytes
from gear_loader.distributed.records import UPDATE, record_dtype, slice_rows
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.updates import Updates
from gear_loader.utils.arrays import Array

__all__ = ["BatchExchange"]


class BatchExchange:
    """The exchanges of one selection.

    Args:
        shards: all of them.
        exchange: of this selection alone.
        updates: that go along.
        blocks: of a record; see `record_dtype`.

    Attributes:
        dtype: of records.
        published: what each shard has offered last, `PUBLISHED` [S]; None if that is not known any more.
        lost: bool [S]: shards that some rank cannot reach.
    """

    def __init__(self, shards: Shards, exchange: SingleProcess, updates: Updates, blocks: int) -> None:
        self.shards = shards
        self.exchange = exchange
        self.updates = updates
        self.dtype = record_dtype(blocks)
        self._owned: list[list[int]] = [[] for _ in range(exchange.size)]
        for shard, lead in enumerate(shards.leads):
            self._owned[lead].append(shard)
        self._order: Array = np.argsort([shard for owned in self._owned for shard in owned], kind="stable")
        self.published: Array | None = None
        self.lost: Array = np.zeros(shards.num_shards, dtype=bool)

    def of_all(self, own: list[Array]) -> list[Array]:
        """An array of each own shard, made known to all: one of each shard."""
        if self.exchange.size == 1:
            return own
        everyone = self.exchange.share_array(own[0] if own else np.empty(0, dtype=np.int64))
        return [everyone[rank] for rank in self.shards.leads]

    @property
    def none(self) -> Array:
        return np.empty(0, dtype=self.dtype)

    def slice_of(self, count: int, data: int | None = None) -> Array:
        data = self.shards.place.data if data is None else data
        return slice_rows(count, self.shards.num_slices, data)

    def shards_of(self, rank: int) -> list[int]:
        """The shards for which a rank answers."""
        return self._owned[rank]

    def swap(
        self,
        count: int,
        told: Callable[[int, int], int],
        records_for: Callable[[int], Array],
        offers: Array,
        failure: Exception | None,
    ) -> list[Message]:
        """One exchange: what each rank has sent this one.

        Args:
            count: rows of the batch, all slices together.
            told: how many records of a shard a rank is told of (rank, shard): all ranks know that.
            records_for: what this rank tells another one.
            offers: of this rank's shards.
            failure: why it can do neither.
        """
        num_shards, me = self.shards.num_shards, self.exchange.rank
        owned = self._owned
        room = self.updates.outbox.room(count // self.shards.num_slices)

        def size(source: int, target: int) -> tuple[int, int]:
            rows = sum(told(target, shard) for shard in owned[source])
            return rows, Message.size_of(num_shards, len(owned[source]), rows, self.dtype, room)

        ins = [size(rank, me) for rank in range(len(owned))]
        updates: list[Array] = []
        if failure is None:
            updates, waiting = self.updates.outbox.take(room), self.updates.outbox.waiting
            lost = np.isin(np.arange(num_shards), self.shards.lost())
            parts = []
            for rank, some in enumerate(updates):
                some["when"] = self.updates.clock
                parts.append(Message(waiting, lost, offers, records_for(rank), some).pack(room))
        else:
            parts = [np.zeros(size(me, rank)[1], dtype=np.uint8) for rank in range(len(owned))]
        try:
            answers = self.exchange.swap(parts, [bytes_in for _, bytes_in in ins], failure)
        except BaseException:
            self.published = None  # looked at anew, should there be a next time
            self.updates.outbox.put_back(updates)
            raise
        letters = [
            Message.unpack(answer, num_shards, len(shards), rows, self.dtype)
            for answer, shards, (rows, _) in zip(answers, owned, ins, strict=True)
        ]
        self.published = np.concatenate([letter.published for letter in letters])[self._order]
        self.lost = np.logical_or.reduce([letter.lost for letter in letters])
        self.updates.received += [letter.updates for letter in letters if len(letter.updates)]
        most = max(letter.waiting for letter in letters)
        if most:
            self._swap_rest(most)
        return letters

    def _swap_rest(self, most: int) -> None:
        """Send the updates for which the letters had no room: when they count does not depend on how many there are.

        Args:
            most: that any rank has for one other.
        """
        parts: list[Array] = []
        for some in self.updates.outbox.take(most):
            part: Array = np.zeros(most, dtype=UPDATE)
            part["shard"], some["when"] = -1, self.updates.clock
            part[: len(some)] = some
            parts.append(as_bytes(part))
        for answer in self.exchange.swap(parts, [most * UPDATE.itemsize] * self.exchange.size):
            updates = answer.copy().view(UPDATE)
            self.updates.received.append(updates[updates["shard"] >= 0])

    def deal(
        self,
        fallen: Array,
        found: dict[int, tuple[Array, Array]],
        offers: Array,
        failure: Exception | None,
    ) -> tuple[Array, Array, float]:
        """Tell each rank of its rows; which rows this one was told of, their records, and the least leaf of all.

        Args:
            fallen: int64 [n]: the shard of each row. found: shard -> rows and records, of this rank's shards.
        """

        def wanted(rank: int, shard: int) -> Array:
            place = self.shards.places[rank]
            if place.stage:  # all of its own shard: it looks them up for its stage
                return np.flatnonzero(fallen == shard) if place.data == shard else fallen[:0]
            rows = self.slice_of(len(fallen), place.data)
            mine: Array = rows[fallen[rows] == shard]
            return mine

        def records_for(rank: int) -> Array:
            parts = [
                records[np.searchsorted(rows, wanted(rank, shard))]
                for shard, (rows, records) in found.items()
            ]
            return np.concatenate(parts) if parts else self.none

        letters = self.swap(
            len(fallen), lambda rank, shard: len(wanted(rank, shard)), records_for, offers, failure
        )
        me = self.exchange.rank
        rows = np.concatenate(
            [wanted(me, shard) for rank in range(len(letters)) for shard in self.shards_of(rank)]
        )
        records = np.concatenate([letter.records for letter in letters])
        order = np.argsort(rows, kind="stable")
        assert self.published is not None
        return rows[order], records[order], float(self.published["batch_least"].min())

    def bring(
        self,
        count: int,
        own: list[Array],
        sent: Array,
        asked: Array,
        offers: Array,
        failure: Exception | None,
    ) -> dict[int, Array]:
        """Candidates number `sent` to `asked` - 1 of each shard, made known to all."""
        sizes = asked - sent

        def records_for(_: int) -> Array:
            parts = [
                _padded(records[sent[shard] : asked[shard]], int(sizes[shard]))
                for shard, records in zip(self.shards.own, own, strict=True)
            ]
            return np.concatenate(parts) if parts else self.none

        letters = self.swap(count, lambda _, shard: int(sizes[shard]), records_for, offers, failure)
        found: dict[int, Array] = {}
        for rank, letter in enumerate(letters):
            shards = self.shards_of(rank)
            ends = np.cumsum([sizes[shard] for shard in shards])[:-1]
            found.update(zip(shards, np.split(letter.records, ends), strict=False))
        return found


def _padded(records: Array, size: int) -> Array:
    """Records, and as many empty ones as are missing."""
    padding: Array = np.zeros(size - len(records), dtype=records.dtype)
    padding["id"] = -1
    return np.concatenate((records, padding))
