"""Which leaf of a priority tree belongs to which step of which trajectory.

Where an item is a trajectory, its leaf is its slot. Where an item is a step, its leaf is the place where the step is
stored: block * block_steps + step within the block; so a trajectory that comes or goes changes whole blocks of leaves.

Trajectories that were cut from one stream share blocks, and so leaves: a step that two of them have is one item, and
belongs to the one that came last. When that is gone it belongs to the other again, with the priority that it has.

The map holds what was true at the last look at the table, not what the table's index says now: when a slot has
been used again in between, it still knows which blocks the trajectory had that is gone.
"""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from gear_loader.kernels.sum_tree import GONE
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.reader import Changes
from gear_loader.utils.arrays import Array

__all__ = ["ItemMap", "Leaves"]

_GONE = np.float32(GONE)
_STREAM_PLACES, _STREAMS = 1 << 32, 1 << 31  # places of a stream; streams until their numbers start again


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Leaves to set.

    Attributes:
        items: int64 [n], each once.
        priorities: float32 [n]: `GONE` where there is no item (any more); `UNSET` where it was added without one.
        slots: int64 [m]: slots of which the map knows another trajectory now, or none.
        added: bool [m]: whether it knows one.
        blocks: where an item is a step: int64 [k]: blocks whose `owner` or `number` changed.
    """

    items: Array
    priorities: Array
    slots: Array
    added: Array
    blocks: Array


class _Share(NamedTuple):
    """A trajectory that has a block beside its owner: as which of its blocks, and how many steps of it."""

    slot: int
    number: int
    steps: int


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
        place: where an item is a step: int64 [num_blocks]: where in its stream of steps a block lies, -1 for a block
            that no trajectory has. Each stream has a range of 2**32 places.
        start, length: where an item is a step: int64 [num_slots], int32 [num_slots]: the place of a trajectory's first
            block, and its steps. Block number n of the trajectory is the one whose place is ``start + n``, whichever
            trajectories share it: that lets a kernel, which has no `_others`, tell whether a trajectory has a block.
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
            self.place: Array = np.full(num_blocks, -1, dtype=np.int64)
            self.start: Array = np.zeros(num_slots, dtype=np.int64)
            self.length: Array = np.zeros(num_slots, dtype=np.int32)
            self._streams = 0  # so many ranges of places have been given out
            self._first: Array = np.full(num_slots, -1, dtype=np.int32)  # a slot's first block
            self._count: Array = np.zeros(num_slots, dtype=np.int32)  # and how many it has
            self._next: Array = np.full(num_blocks, -1, dtype=np.int32)  # the block that comes after a block
            self._others: dict[int, list[_Share]] = {}  # who else has a block, beside its owner

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
            none = np.empty(0, dtype=np.int64)
            return Leaves(items, np.where(added, changes.priorities, _GONE)[gone], items, added[gone], none)
        blocks, kept = self._release(changes.slots[gone])
        pieces = [(self._all(blocks), np.full(len(blocks) * self.block_steps, _GONE))]
        for block, steps in kept:  # what the last owner had behind the steps that the other one has
            items = np.arange(block * self.block_steps + steps, (block + 1) * self.block_steps)
            pieces.append((items, np.full(len(items), _GONE)))
        order = np.flatnonzero(added)
        order = order[np.argsort(changes.sequences[order], kind="stable")]
        slots, priorities = changes.slots[order], changes.priorities[order]
        changed = [blocks, np.array([block for block, _ in kept], dtype=np.int64)]
        for part in self._apart(slots, extent, block_ids):
            taken, *piece = self._take(slots[part], priorities[part], extent, block_ids)
            changed.append(taken)
            pieces.append((piece[0], piece[1]))
        items = np.concatenate([piece[0] for piece in pieces])
        values = np.concatenate([piece[1] for piece in pieces])
        # Of what is freed and taken at once, what was written last counts.
        items, last = np.unique(items[::-1], return_index=True)
        return Leaves(
            items, values[::-1][last], changes.slots[gone], added[gone], np.unique(np.concatenate(changed))
        )

    def _all(self, blocks: Array) -> Array:
        """All items of some blocks."""
        items: Array = (blocks[:, None] * self.block_steps + np.arange(self.block_steps)).reshape(-1)
        return items

    def _apart(self, slots: Array, extent: Array, block_ids: Array) -> list[slice]:
        """Parts of `slots` to take one after another, so that no two in a part share blocks."""
        if len(slots) == 0:
            return []
        counts = -(-extent[slots, 0] // self.block_steps)
        blocks = block_ids[ranges(extent[slots, 1], counts)]
        if len(np.unique(blocks)) == len(blocks):
            return [slice(None)]
        return [slice(i, i + 1) for i in range(len(slots))]

    def _release(self, slots: Array) -> tuple[Array, list[tuple[int, int]]]:
        """Forget trajectories: blocks that nobody has now; those that another one has, and how many of its steps."""
        freed, kept = [], []
        for slot in slots[self._first[slots] >= 0].tolist():
            block = int(self._first[slot])
            for _ in range(int(self._count[slot])):
                following = int(self._next[block])
                others = self._others.get(block, [])
                if self.owner[block] != slot:
                    others[:] = [share for share in others if share.slot != slot]
                elif others:
                    share = others.pop()
                    self.owner[block], self.number[block] = share.slot, share.number
                    kept.append((block, share.steps))
                else:
                    self.owner[block] = self.place[block] = -1
                    freed.append(block)
                if not others:
                    self._others.pop(block, None)
                block = following
            self._first[slot] = -1
        return np.array(freed, dtype=np.int64), [(b, steps) for b, steps in kept if self.owner[b] >= 0]

    def _take(
        self, slots: Array, priorities: Array, extent: Array, block_ids: Array
    ) -> tuple[Array, Array, Array]:
        """Take in trajectories, no two of which share blocks: their blocks, and the items that are new with values."""
        lengths, starts = extent[slots, 0], extent[slots, 1]
        counts = -(-lengths // self.block_steps)
        ends = np.cumsum(counts)
        which = np.repeat(np.arange(len(slots)), counts)
        number = ranges(np.zeros_like(counts), counts)
        blocks = block_ids[ranges(starts, counts)].astype(np.int64)
        known = np.zeros(len(blocks), dtype=np.int64)  # steps of a block that another trajectory has already
        start = (self._streams + np.arange(len(slots))) % _STREAMS * _STREAM_PLACES
        self._streams += len(slots)
        for place in np.flatnonzero(self.owner[blocks] >= 0).tolist():
            block = int(blocks[place])
            owner, at = int(self.owner[block]), int(self.number[block])
            known[place] = min(self.block_steps, int(extent[owner, 0]) - at * self.block_steps)
            self._others.setdefault(block, []).append(_Share(owner, at, int(known[place])))
            start[which[place]] = self.place[block] - number[place]  # a later part of the same stream
        self.owner[blocks] = slots[which]
        self.number[blocks] = number
        self.place[blocks] = start[which] + number
        self.start[slots], self.length[slots] = start, lengths
        self._next[blocks[:-1]] = blocks[1:]
        self._first[slots] = blocks[ends - counts]
        self._count[slots] = counts
        step = np.arange(self.block_steps)
        inside = number[:, None] * self.block_steps + step < lengths[which, None]
        values = np.where(inside, priorities[which, None], _GONE)
        new = step >= known[:, None]
        return blocks, (blocks[:, None] * self.block_steps + step)[new], values[new]

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
        if self._others:
            for row in np.flatnonzero(inside & ~known).tolist():
                shares = self._others.get(int(blocks[row]), [])
                known[row] = any((s.slot, s.number) == (slots[row], number[row]) for s in shares)
        return np.where(known, blocks * self.block_steps + steps % self.block_steps, -1)

    def all_items(self, slots: Array, extent: Array, block_ids: Array) -> Array:
        """Items of all of these slots, one slot after another."""
        if not self.steps:
            return slots
        lengths = extent[slots, 0]
        steps = ranges(np.zeros_like(lengths), lengths)
        return self.items(np.repeat(slots, lengths), steps, extent, block_ids)
