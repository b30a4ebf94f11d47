"""Record types of selection's exchange, slices of a batch, and messages with their outbox of priority updates."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np

from gear_loader.collection.tree_rows import Origins
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


ORIGINS = tuple(f"tree_{name}" for name in Origins._fields)
"""Fields of a record that are `Origins`."""


@functools.cache
def record_dtype(blocks: int, *, extents: bool = False, tree: bool = False) -> np.dtype[np.void]:
    """Return the type of a row record: a row of a batch as its owner describes it.

    Args:
        blocks: most blocks that a window touches, where rows are read one-sidedly; else 0.
        extents: whether records tell the extents of their trajectories without blocks, too: a cache and packed batches
            need them.
        tree: whether records tell what their trajectories have in common with others of their table; `ORIGINS`.
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
    if tree:
        fields += [(name, "<i8") for name in ORIGINS]
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


# ---------------------------------------------------------------- messages

_BASE_CAPACITY = 32  # updates that a message holds for any batch size


def as_bytes(values: Array) -> Array:
    """View an array as its bytes, uint8 [n]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class Outbox:
    """Priority updates that wait to be sent to the ranks that own their shards.

    Args:
        leads: rank that answers for each shard. size: number of ranks.
    """

    def __init__(self, leads: Sequence[int], size: int) -> None:
        self._leads: Array = np.array(leads, dtype=np.int64)
        self._num_owners = len(set(leads))
        self._size = size
        self._queue: list[Array] = []
        self._order = 1

    def put(self, updates: Array) -> None:
        """Queue updates, `UPDATE` [n], and number the call."""
        updates["order"] = self._order
        self._order += 1
        self._queue.append(updates)

    def put_back(self, taken: Array) -> None:
        """Queue again, at the front, the updates that `take` returned."""
        self._queue.insert(0, taken)

    def _owners(self) -> Array:
        """Ranks of all queued updates, which are made one array."""
        self._queue = [np.concatenate([np.empty(0, dtype=UPDATE), *self._queue])]
        owners: Array = self._leads[self._queue[0]["shard"]]
        return owners

    @property
    def longest(self) -> int:
        """The most updates for one rank."""
        return int(np.bincount(self._owners(), minlength=self._size).max())

    def capacity(self, batch_size: int) -> int:
        """Return the number of updates that every message of a batch holds; the same number on all ranks.

        Further updates are sent in an exchange of their own.
        """
        return _BASE_CAPACITY + 2 * -(-batch_size // self._num_owners)

    def take(self, limit: int) -> tuple[Array, Array]:
        """Dequeue up to `limit` updates for each rank, the oldest first.

        Returns:
            `UPDATE` [n], those for one rank after another, and how many for each, int64 [W].
        """
        owners, queued = self._owners(), self._queue[0]
        order = np.argsort(owners, kind="stable")
        counts = np.bincount(owners, minlength=self._size)
        number = np.arange(len(order)) - (np.cumsum(counts) - counts)[owners[order]]
        taken = order[number < limit]
        self._queue = [np.delete(queued, taken)]
        return queued[taken], np.minimum(counts, limit)


def message_bytes(shards: int, own: Any, rows: Any, record: np.dtype[Any], capacity: int) -> Any:
    """Bytes of a message from a rank to another.

    It has the most updates that did not fit for any rank and the number of its own, int64 each; a bit for each shard,
    whether the sender cannot reach it; the sender's summaries; records; and updates, with room for the agreed capacity.

    Args:
        shards: number of all shards. own: number of the sender's. rows: of records; an int, or int64 [W] of each rank.
        capacity: number of updates that the message holds.
    """
    return 16 + -(-shards // 8) + own * SUMMARY.itemsize + rows * record.itemsize + capacity * UPDATE.itemsize
