"""Messages of selection's exchange: their bytes, and the outbox of priority updates."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_loader.distributed.records import SUMMARY, UPDATE
from gear_loader.utils.arrays import Array

__all__ = ["Message", "Outbox", "as_bytes"]

_BASE_CAPACITY = 32  # updates that a message holds for any batch size


def as_bytes(values: Array) -> Array:
    """View an array as its bytes, uint8 [n]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class Outbox:
    """Queues of priority updates, one for each rank that owns their shards.

    Args:
        leads: rank that answers for each shard.
        size: number of ranks.
    """

    def __init__(self, leads: Sequence[int], size: int) -> None:
        self._leads: Array = np.array(leads, dtype=np.int64)
        self._num_owners = len(set(leads))
        self._queues: list[list[Array]] = [[] for _ in range(size)]
        self._order = 1

    def put(self, updates: Array) -> None:
        """Queue updates, `UPDATE` [n], and number the call."""
        updates["order"] = self._order
        self._order += 1
        owners = self._leads[updates["shard"]]
        for rank in np.unique(owners).tolist():
            self._queues[rank].append(updates[owners == rank])

    def put_back(self, taken: Sequence[Array]) -> None:
        """Queue again, at the front, the updates that `take` returned."""
        for rank, updates in enumerate(taken):
            self._queues[rank].insert(0, updates)

    @property
    def longest(self) -> int:
        """Length of the longest queue."""
        return max(sum(len(part) for part in parts) for parts in self._queues)

    def capacity(self, batch_size: int) -> int:
        """Return the number of updates that every message of a batch holds; the same number on all ranks.

        Further updates are sent in an exchange of their own.
        """
        return _BASE_CAPACITY + 2 * -(-batch_size // self._num_owners)

    def take(self, limit: int) -> list[Array]:
        """Dequeue up to `limit` updates for each rank, the oldest first."""
        taken = []
        for rank, parts in enumerate(self._queues):
            queue = np.concatenate(parts) if parts else np.empty(0, dtype=UPDATE)
            taken.append(queue[:limit])
            self._queues[rank] = [queue[limit:]] if len(queue) > limit else []
        return taken


@dataclasses.dataclass
class Message:
    """The content of one message from a rank to another.

    Attributes:
        pending: number of updates that did not fit, the most for any one rank.
        unreachable: bool [S]: shards that the sender cannot reach.
        summaries: `SUMMARY` [k] of the sender's shards.
        records: row records of the sender's shards.
        updates: `UPDATE` [n], at most as many as the agreed capacity.
    """

    pending: int
    unreachable: Array
    summaries: Array
    records: Array
    updates: Array

    def pack(self, capacity: int) -> Array:
        """Return the message's bytes, as many as `size_of` says."""
        numbers: Array = np.array([self.pending, len(self.updates)], dtype=np.int64)
        padding = np.zeros((capacity - len(self.updates)) * UPDATE.itemsize, dtype=np.uint8)
        pieces = (numbers, np.packbits(self.unreachable), self.summaries, self.records, self.updates)
        return np.concatenate([*(as_bytes(piece) for piece in pieces), padding])

    @staticmethod
    def size_of(shards: int, own: int, rows: int, record: Any, capacity: int) -> int:
        """Return the size of a message in bytes.

        Args:
            shards: number of all shards.
            own: number of the sender's shards.
            rows: number of records.
            record: type of the records.
            capacity: number of updates that the message holds.
        """
        sizes = (own * SUMMARY.itemsize, rows * int(record.itemsize), capacity * UPDATE.itemsize)
        return 16 + -(-shards // 8) + sum(sizes)

    @classmethod
    def unpack(cls, data: Array, shards: int, own: int, rows: int, record: Any) -> Message:
        """Read a message's bytes; the inverse of `pack`. For the arguments see `size_of`."""
        pending, count = data[:16].view(np.int64).tolist()
        at = 16 + -(-shards // 8)
        unreachable = np.unpackbits(data[16:at])[:shards].astype(bool)
        sizes = [own * SUMMARY.itemsize, rows * record.itemsize, count * UPDATE.itemsize]
        parts = []
        for size, dtype in zip(sizes, (SUMMARY, record, UPDATE), strict=True):
            parts.append(data[at : at + size].copy().view(dtype))
            at += size
        return cls(pending, unreachable, *parts)
