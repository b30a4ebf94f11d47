"""Blocks of leaves for trajectories of which some lie on disk only, and so have no blocks in the table's memory."""

from __future__ import annotations

import heapq

import numpy as np

from gear_loader.storage.index_arrays import ranges
from gear_loader.utils.arrays import Array


class LeafBlocks:
    """Gives trajectories numbers of blocks, which they keep until they are removed.

    Each gets the lowest ones that are free, so those that are free depend only on those that are taken.

    Args:
        num_slots: slots of the table. num_blocks: number of blocks. block_steps: steps of a block.

    Attributes:
        extent: int64 [num_slots, 3]: steps of the slot's trajectory, its first entry in `block_ids`, and its final
            steps; as in the table's index, but at the moment of the last change that was followed.
        block_ids: int32 [2 * num_blocks]: the trajectories' blocks, one after another.
    """

    def __init__(self, num_slots: int, num_blocks: int, block_steps: int) -> None:
        self.num_blocks = num_blocks
        self._block_steps = block_steps
        self.extent: Array = np.zeros((num_slots, 3), dtype=np.int64)
        self.block_ids: Array = np.full(2 * num_blocks, -1, dtype=np.int32)
        self._held: Array = np.zeros(num_slots, dtype=np.int64)  # blocks of a slot
        self._room: Array = np.zeros(num_slots, dtype=np.int64)  # entries of `block_ids` reserved for them
        self.clear()

    def clear(self) -> None:
        """Take all blocks from all trajectories."""
        self._held[:] = self._room[:] = 0
        self._head = 0  # first entry of `block_ids` that is not reserved
        self._next = 0  # lowest block of those that nobody has had
        self._freed: list[int] = []  # heap of the free blocks below

    @property
    def slots(self) -> Array:
        """Slots of the trajectories that have blocks, int64 [n], ascending."""
        return np.flatnonzero(self._held)

    def count(self, slots: Array) -> Array:
        """Number of blocks that trajectories need for their steps, int64 [n]."""
        needed: Array = -(-self.extent[slots, 0] // self._block_steps)
        return needed

    def take(self, slots: Array) -> None:
        """Give blocks to trajectories in slots (int64 [n]) that have none, in this order."""
        self._put(slots, self._lowest(int(self.count(slots).sum())))

    def lengthen(self, slot: int) -> None:
        """Give a trajectory the blocks for steps that it has got since."""
        held = int(self._held[slot])
        more = int(self.count(np.array([slot]))[0]) - held
        if more <= 0:
            return
        if held + more > self._room[slot]:
            # Twice as many, so that its entries are seldom copied.
            start = self._reserve(held + more)
            room = min(2 * (held + more), len(self.block_ids) - start)
            before = int(self.extent[slot, 1])  # `_reserve` may have moved it
            self.block_ids[start : start + held] = self.block_ids[before : before + held]
            self.extent[slot, 1], self._room[slot], self._head = start, room, start + room
        start = int(self.extent[slot, 1]) + held
        self.block_ids[start : start + more] = self._lowest(more)
        self._held[slot] += more

    def free(self, slots: Array) -> None:
        """Take the blocks of trajectories in slots (int64 [n]); those without blocks are left out."""
        slots = slots[self._held[slots] > 0]
        blocks = self.block_ids[ranges(self.extent[slots, 1], self._held[slots])].tolist()
        self._held[slots] = self._room[slots] = 0
        if 8 * len(blocks) > len(self._freed):
            self._freed.extend(blocks)
            heapq.heapify(self._freed)
        else:
            for block in blocks:
                heapq.heappush(self._freed, block)
        if 0 < self._next == len(self._freed):
            self.clear()

    def blocks_of(self, slots: Array, counts: Array) -> Array:
        """The first blocks of trajectories, int32 [sum of counts]; -1 for those that they do not have.

        Args:
            slots, counts: int64 [n], trajectories, and how many blocks of each.
        """
        number = ranges(np.zeros_like(counts), counts)
        has = number < np.repeat(self._held[slots], counts)
        entries = np.repeat(self.extent[slots, 1], counts) + number
        blocks: Array = np.where(has, self.block_ids[np.where(has, entries, 0)], np.int32(-1))
        return blocks

    def restore(self, slots: Array, blocks: Array, others: Array) -> None:
        """Give all trajectories blocks again, some of them those that they had.

        Args:
            slots: int64 [n], trajectories. blocks: int32, their blocks one after another, distinct.
            others: int64 [m], all other trajectories, in the order in which they get the lowest blocks that are left.
        """
        self.clear()
        free = np.ones(self.num_blocks, dtype=bool)
        free[blocks] = False
        self._next = int(blocks.max(initial=-1)) + 1
        self._freed = np.flatnonzero(free[: self._next]).tolist()  # sorted, and so a heap
        self._put(slots, blocks)
        self.take(others)

    def _lowest(self, count: int) -> Array:
        """The lowest free blocks, int32 [count], which are no longer free."""
        again = min(count, len(self._freed))
        if 8 * again > len(self._freed):
            self._freed.sort()
            taken = self._freed[:again]
            del self._freed[:again]  # what is left is sorted, and so a heap
        else:
            taken = [heapq.heappop(self._freed) for _ in range(again)]
        following = self._next + count - again
        assert following <= self.num_blocks, "more steps than the table holds"
        blocks = np.concatenate(
            (np.array(taken, dtype=np.int32), np.arange(self._next, following, dtype=np.int32))
        )
        self._next = following
        return blocks

    def _put(self, slots: Array, blocks: Array) -> None:
        """Give blocks (int32, one after another) to trajectories in slots (int64 [n]) that have none."""
        counts = self.count(slots)
        start = self._reserve(len(blocks))
        self.block_ids[start : start + len(blocks)] = blocks
        self.extent[slots, 1] = start + np.cumsum(counts) - counts
        self._held[slots] = self._room[slots] = counts
        self._head = start + len(blocks)

    def _reserve(self, count: int) -> int:
        """First of `count` free entries of `block_ids`; if too few follow, all trajectories' are moved together."""
        if self._head + count > len(self.block_ids):
            slots = self.slots
            held = self._held[slots]
            self._head = int(held.sum())
            self.block_ids[: self._head] = self.block_ids[ranges(self.extent[slots, 1], held)]
            self.extent[slots, 1] = np.cumsum(held) - held
            self._room[slots] = held
        return self._head
