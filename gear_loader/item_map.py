"""Which leaf of a priority tree belongs to which step of which trajectory.

Where an item is a trajectory, its leaf is its slot. Where an item is a step, its leaf is the place where the step is
stored: block * block_steps + step within the block; so a trajectory that comes or goes changes whole blocks of leaves.

The map holds what was true at the last look at the table, not what the table's index says now: when a slot has
been used again in between, it still knows which blocks the trajectory had that is gone.
"""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.index import Changes
from gear_loader.kernels.sum_tree import GONE
from gear_loader.slots import Array, ranges

__all__ = ["ItemMap", "Leaves"]

_GONE = np.float32(GONE)


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Leaves to set.

    Attributes:
        items: int64 [n], each once.
        priorities: float32 [n]: `GONE` where there is no item (any more); `UNSET` where it was added without one.
        slots: int64 [m]: slots of which the map knows another trajectory now, or none.
        added: bool [m]: whether it knows one.
    """

    items: Array
    priorities: Array
    slots: Array
    added: Array


class ItemMap:
    """Follows a table's changes.

    Args:
        steps: whether an item is a step; else it is a trajectory.
        num_slots, num_blocks, block_steps: the table's sizes.

    Attributes:
        capacity: leaves that a tree needs.
        next_sequence: trajectories with lower sequence numbers are known.
        owner, number: where an item is a step: int32 [num_blocks], the slot that a block belongs to (-1 for none) and
            which of its blocks it is.
    """

    def __init__(self, *, steps: bool, num_slots: int, num_blocks: int, block_steps: int) -> None:
        self.steps = steps
        self.block_steps = block_steps
        self.capacity = num_blocks * block_steps if steps else num_slots
        self.position = -1
        self.next_sequence = 0
        if steps:
            self.owner: Array = np.full(num_blocks, -1, dtype=np.int32)
            self.number: Array = np.zeros(num_blocks, dtype=np.int32)
            self._first: Array = np.full(num_slots, -1, dtype=np.int32)  # a slot's first block
            self._next: Array = np.full(num_blocks, -1, dtype=np.int32)  # the block that comes after a block

    def follow(self, changes: Changes, chosen: Array, extent: Array, block_ids: Array) -> Leaves:
        """Take changes in.

        Args:
            changes: since `position`.
            chosen: bool [n]: whether the trajectory in a slot that changed counts, if there is one.
            extent, block_ids: the index's, which the caller's ticket keeps for the slots that are ready.
        """
        fresh = changes.ready & (changes.sequences >= self.next_sequence)
        gone = ~changes.ready | fresh  # whatever was there before
        added = fresh & chosen
        self.position, self.next_sequence = changes.position, changes.next_sequence
        if not self.steps:
            items = changes.slots[gone]
            return Leaves(items, np.where(added, changes.priorities, _GONE)[gone], items, added[gone])
        freed = self._release(changes.slots[gone])
        slots, priorities = changes.slots[added], changes.priorities[added]
        taken, values = self._take(slots, priorities, extent, block_ids)
        freed = np.setdiff1d(freed, taken)
        blocks = np.concatenate((freed, taken))
        items = (blocks[:, None] * self.block_steps + np.arange(self.block_steps)).reshape(-1)
        nothing = np.full(len(freed) * self.block_steps, _GONE)
        values = np.concatenate((nothing, values.reshape(-1)))
        return Leaves(items, values, changes.slots[gone], added[gone])

    def _release(self, slots: Array) -> Array:
        blocks = []
        slots = slots[self._first[slots] >= 0]
        for block in self._first[slots].tolist():
            while block >= 0:
                blocks.append(block)
                block = int(self._next[block])
        self._first[slots] = -1
        freed = np.array(blocks, dtype=np.int64)
        self.owner[freed] = -1
        return freed

    def _take(self, slots: Array, priorities: Array, extent: Array, block_ids: Array) -> tuple[Array, Array]:
        lengths, starts = extent[slots, 0], extent[slots, 1]
        counts = -(-lengths // self.block_steps)
        ends = np.cumsum(counts)
        which = np.repeat(np.arange(len(slots)), counts)
        number = ranges(np.zeros_like(counts), counts)
        blocks = block_ids[ranges(starts, counts)].astype(np.int64)
        self.owner[blocks] = slots[which]
        self.number[blocks] = number
        self._next[blocks[:-1]] = blocks[1:]
        self._next[blocks[ends - 1]] = -1
        self._first[slots] = blocks[ends - counts]
        inside = number[:, None] * self.block_steps + np.arange(self.block_steps) < lengths[which, None]
        return blocks, np.where(inside, priorities[which, None], _GONE)

    def locate(self, items: Array) -> tuple[Array, Array]:
        """Slots of items, and the steps within them (0 where an item is a trajectory)."""
        if not self.steps:
            return items, np.zeros_like(items)
        blocks, inside = np.divmod(items, self.block_steps)
        steps = self.number[blocks].astype(np.int64) * self.block_steps + inside
        return self.owner[blocks].astype(np.int64), steps

    def items(self, slots: Array, steps: Array, extent: Array, block_ids: Array) -> Array:
        """Items of steps (int64 [n]) of slots that are live; -1 where the map knows of no such step."""
        if not self.steps:
            return slots
        lengths, starts = extent[slots, 0], extent[slots, 1]
        inside = (steps >= 0) & (steps < lengths)
        number = np.where(inside, steps // self.block_steps, 0)
        blocks = block_ids[starts + number].astype(np.int64)
        known = inside & (self.owner[blocks] == slots) & (self.number[blocks] == number)
        return np.where(known, blocks * self.block_steps + steps % self.block_steps, -1)

    def all_items(self, slots: Array, extent: Array, block_ids: Array) -> Array:
        """Items of all of these slots, one slot after another."""
        if not self.steps:
            return slots
        lengths = extent[slots, 0]
        steps = ranges(np.zeros_like(lengths), lengths)
        return self.items(np.repeat(slots, lengths), steps, extent, block_ids)
