"""Record types of selection's exchange, slices of a batch, and messages with their outbox of priority updates."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array

SUMMARY = np.dtype(
    [
        ("mass", "<f8"),  # mass of the next draw: sum of the leaves, or number of items
        ("least", "<f8"),  # smallest positive leaf of the shard, where importance weights need it
        ("batch_least", "<f8"),  # smallest leaf among the shard's rows in the batch of this exchange
        ("emptied", "<i8"),  # 1: the shard is empty, and its rows of this batch are drawn from other shards
    ]
)
"""Shard summary: sent with each exchange, about the batch of the exchange and the next draw."""

UPDATE = np.dtype(
    [
        ("shard", "<i8"),
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),  # -1: any generation
        ("draw", "<i8"),  # number of draws after which the update counts
        ("priority", "<f4"),
        ("order", "<i4"),  # number of the call on its rank: over all ranks the last call counts
    ]
)
"""Priority update of a row that another rank owns."""


SLOT_KEY = np.dtype([("slot", "<i8"), ("generation", "<i8")])
"""Key of a trajectory in batches: its slot and generation in the table of stage 0, which draws."""


MOVE = np.dtype(
    [
        ("id", "<i8"),
        ("length", "<i8"),
        ("old_shard", "<i8"),
        ("old_slot", "<i8"),
        ("old_generation", "<i8"),
        ("new_shard", "<i8"),
        ("new_slot", "<i8"),
        ("new_generation", "<i8"),
    ]
)
"""Migration of one trajectory to another shard: its old and new slot in stage 0."""


@functools.cache
def record_dtype(blocks: int, *, extents: bool = False) -> np.dtype[np.void]:
    """Return the type of a row record: a row of a batch as its owner describes it.

    Args:
        blocks: most blocks that a window touches, where rows are read one-sidedly; else 0.
        extents: whether records tell the extents of their trajectories without blocks, too: a cache and packed batches
            need them.
    """
    fields: list[tuple[str, str] | tuple[str, str, tuple[int, ...]]] = [
        ("slot", "<i8"),
        ("step", "<i8"),
        ("generation", "<i8"),
        ("id", "<i8"),
        ("leaf", "<f8"),
        ("time", "<f8"),  # of candidates: simulated time of the draw, by which shards are merged
    ]
    if blocks or extents:
        fields += [("steps", "<i8"), ("final", "<i8")]
    if blocks:
        fields += [("low", "<i8"), ("blocks", "<i4", (blocks + blocks % 2,))]
    return np.dtype(fields)


def max_window_blocks(reach: Reach, block_steps: Iterable[int]) -> int:
    """Return the most blocks that a row's windows need in any shard.

    Args:
        reach: of the windows; with `once`, one more block is the trajectory's first.
        block_steps: steps of a block in each shard.
    """
    first, last, once = reach
    return max((last - first) // steps + 2 + once for steps in block_steps)


def slice_rows(count: int, slices: int, number: int) -> Array:
    """Return the rows of a batch that belong to one slice, int64 [m].

    Slices differ by one row at most. If there are fewer rows than slices, some rows belong to several.
    """
    if count < slices:
        return np.array([number % count], dtype=np.int64) if count else np.empty(0, dtype=np.int64)
    size, more = divmod(count, slices)
    first = number * size + min(number, more)
    return np.arange(first, first + size + (number < more))


# ---------------------------------------------------------------- messages

_BASE_CAPACITY = 32  # updates that a message holds for any batch size


def as_bytes(values: Array) -> Array:
    """View an array as its bytes, uint8 [n]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class Outbox:
    """Queues of priority updates, one for each rank that owns their shards.

    Args:
        leads: rank that answers for each shard.
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
            own: number of the sender's shards.
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
