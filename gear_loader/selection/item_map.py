"""Maps trajectories and steps to the leaves of a priority tree.

If an item is a trajectory, its leaf is its slot. If an item is a step, its leaf is the step's storage location, block *
block_steps + step within the block; so adding or removing a trajectory changes whole blocks of leaves.

Trajectories cut from one stream share blocks, and so leaves: a shared step is one item, owned by the trajectory added
last. When the owner is removed, another sharer owns the item, which keeps its priority.

In a table with a disk tier, a trajectory has no blocks while it lies on disk only, and other ones when it comes back.
There the map itself gives it blocks of leaves (`leaf_blocks`), which it keeps until it is removed and does not share.

The map reflects the table's last followed change, not its current index: it still knows the blocks of a removed
trajectory whose slot has been reused.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from gear_loader.kernels.sum_tree import GONE, UNSET
from gear_loader.native import item_map as native
from gear_loader.native.priority_updates import step_items
from gear_loader.selection.complete import CompleteAnchors
from gear_loader.selection.leaf_blocks import LeafBlocks
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.reader import Changes
from gear_loader.utils.arrays import Array

_GONE = np.float32(GONE)
_STREAM_PLACES, _STREAMS = 1 << 32, 1 << 31  # places of a stream; streams until their numbers wrap around


@dataclasses.dataclass(frozen=True)
class Leaves:
    """Leaves to set.

    Attributes:
        items: int64 [n], distinct; set after `whole`.
        priorities: float32 [n]: `GONE` for a removed item, `UNSET` for an item added without a priority.
        whole: int64 [w], distinct: if an item is a step, blocks of which all leaves are set; 0 outside
            `ItemMap.inside`.
        whole_priorities: float32 [w]: one for each of them, as `priorities`.
        slots: int64 [m]: slots whose trajectory changed or was removed.
        added: bool [m]: whether the slot has a trajectory now.
        blocks: int64 [k]: if an item is a step, blocks whose `owner` or `number` changed.
    """

    items: Array
    priorities: Array
    whole: Array
    whole_priorities: Array
    slots: Array
    added: Array
    blocks: Array

    @property
    def maximum(self) -> float:
        """The largest priority, or 0."""
        return max(float(part.max(initial=0)) for part in (self.priorities, self.whole_priorities))

    def each(self, of: ItemMap) -> tuple[Array, Array]:
        """Items and priorities, one by one, in the order in which they are set; those of whole blocks first."""
        if not len(self.whole):
            return self.items, self.priorities
        items, values, _ = of.steps_of(self.whole, self.whole_priorities)
        return (
            np.concatenate((items.reshape(-1), self.items)),
            np.concatenate((values.reshape(-1), self.priorities)),
        )


class _Share(NamedTuple):
    """A trajectory that shares a block with its owner: its slot, its number of the block, and `ItemMap.inside`."""

    slot: int
    number: int
    first: int
    end: int


class ItemMap:
    """Item map that follows a table's changes.

    Args:
        steps: whether an item is a step; else it is a trajectory.
        num_slots, num_blocks, block_steps: the table's sizes.
        tier: whether trajectories move; `num_blocks` then has room for what lies on disk, too.
        complete: the steps that can be drawn, if not all; the others have no item. A stride above 1 must be at least
            `block_steps`.

    Attributes:
        capacity: leaves of the tree.
        position: position of the last followed change; -1 at first.
        next_sequence: trajectories with lower sequence numbers are known.
        sequence_of: int64 [num_slots]: sequence number of the slot's trajectory, -1 without one that can be drawn.
        own: the blocks of leaves, if an item is a step, and not those of the table; else None.

    If an item is a step, also:
        owner: int32 [num_blocks]: slot that owns the block; -1 for a free block.
        number: int32 [num_blocks]: number of the block within its owner's trajectory.
        place: int64 [num_blocks]: place of the block in its stream of steps; -1 for a free block. Each stream has a
            range of 2**32 places.
        start: int64 [num_slots]: place of the trajectory's first block. Its block number n has the place
            ``start + n``, also if shared, so kernels need no `_others` to test whether a trajectory has a block.
        length: int32 [num_slots]: end of the steps that can be drawn.
        inside: int32 [num_blocks, 2]: first step of the block that can be drawn, as one of its owner, and the step
            after the last one.
    """

    def __init__(
        self,
        *,
        steps: bool,
        num_slots: int,
        num_blocks: int,
        block_steps: int,
        tier: bool = False,
        complete: CompleteAnchors | None = None,
    ) -> None:
        self.steps = steps
        self.own = LeafBlocks(num_slots, num_blocks, block_steps) if steps and tier else None
        self._complete = complete
        self._first_step, self._stride = (0, 1) if complete is None else (complete.first, complete.stride)
        self.block_steps = block_steps
        self.capacity = num_blocks * block_steps if steps else num_slots
        self.position = -1
        self.next_sequence = 0
        self.sequence_of: Array = np.full(num_slots, -1, dtype=np.int64)
        if steps:
            self.owner: Array = np.full(num_blocks, -1, dtype=np.int32)
            self.number: Array = np.zeros(num_blocks, dtype=np.int32)
            self.place: Array = np.full(num_blocks, -1, dtype=np.int64)
            self.start: Array = np.zeros(num_slots, dtype=np.int64)
            self.length: Array = np.zeros(num_slots, dtype=np.int32)
            self.inside: Array = np.zeros((num_blocks, 2), dtype=np.int32)
            self._streams = 0  # ranges of places allocated so far
            self._first: Array = np.full(num_slots, -1, dtype=np.int32)  # first block of a slot
            self._count: Array = np.zeros(num_slots, dtype=np.int32)  # number of blocks of a slot
            self._next: Array = np.full(num_blocks, -1, dtype=np.int32)  # next block of the trajectory
            self._lists = self._first, self._count, self._next
            self._others: dict[int, list[_Share]] = {}  # sharers of a block, without its owner

    def follow(self, changes: Changes, chosen: Array, extent: Array, block_ids: Array) -> Leaves:
        """Apply changes of the table.

        Args:
            changes: changes since `position`, of n slots.
            chosen: bool [n]: whether the slot's trajectory, if any, belongs to the subset.
            extent: int64 [num_slots, 2], of the table's index; the caller's read ticket protects the ready slots.
            block_ids: int32, block tables of the index.

        Returns:
            The leaves to set.
        """
        fresh = changes.ready & (changes.sequences >= self.next_sequence)
        stale = ~changes.ready | fresh  # slots whose known trajectory was removed
        grown = changes.ready & ~fresh & chosen  # perhaps: with the same sequence number as before
        present = self.has(changes.slots)
        fresh |= grown & ~present  # had no step that could be drawn
        grown &= present
        stale |= fresh
        added = fresh & chosen
        self.position, self.next_sequence = changes.position, changes.next_sequence
        slots, sequences = changes.slots[stale], np.where(added, changes.sequences, -1)[stale]
        if not self.steps:
            empty = np.empty(0, dtype=np.int64)
            self.sequence_of[slots] = sequences
            again = grown & changes.revised  # another priority, of the same trajectory
            new = np.where(added | again, changes.priorities, _GONE)
            items, none = changes.slots[stale | again], np.empty(0, dtype=np.float32)
            return Leaves(items, new[stale | again], empty, none, slots, added[stale], empty)
        extent, block_ids = self._blocks(extent, block_ids)
        if self.own is not None:
            assert changes.extents is not None
            ready = changes.slots[changes.ready]
            extent[ready, 0], extent[ready, 2] = changes.extents[changes.ready][:, [0, 2]].T
        self.sequence_of[slots] = sequences
        known = grown
        if known.any():
            grown = known & (self._ends(changes.slots, extent) != self.length[changes.slots])
        freed, kept = self._remove(changes.slots[stale])
        if self.own is not None:
            self.own.free(changes.slots[stale])
        pieces: list[Sequence[Array]] = []
        step = np.arange(self.block_steps)
        for block, before in kept:  # steps that only one of the last owner and the new one has
            old, new = (
                (step >= first) & (step < end) for first, end in (before, self.inside[block].tolist())
            )
            items = block * self.block_steps + step[old != new]
            pieces.append((items, np.where(new, np.float32(UNSET), _GONE)[old != new]))
        for place in np.flatnonzero(grown).tolist():
            slot = int(changes.slots[place])
            items = self._grow(slot, extent, block_ids)
            pieces.append((items, np.full(len(items), changes.priorities[place], dtype=np.float32)))
        if (whole := known & changes.steps_revised).any():
            slots = changes.slots[whole]
            lengths = self.length[slots].astype(np.int64)
            items = self.all_items(slots, lengths, extent, block_ids)
            values = np.repeat(changes.priorities[whole], lengths)
            pieces.append((items[items >= 0], values[items >= 0]))
        order = np.flatnonzero(added)
        order = order[np.argsort(changes.sequences[order], kind="stable")]
        slots, priorities = changes.slots[order], changes.priorities[order]
        if self.own is not None:
            self.own.take(slots)
        blocks, values, shared = self._add(slots, priorities, extent, block_ids)
        pieces += [piece for _, *piece in shared]
        if len(freed):
            # A block that another trajectory has grown into, too: its other steps had leaves.
            gone = np.setdiff1d(freed, blocks) if pieces else freed[self.owner[freed] < 0]
            blocks, values = (
                np.concatenate(parts) for parts in ((blocks, gone), (values, np.full(len(gone), _GONE)))
            )
        changed = blocks
        items, others = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.float32)
        if pieces:
            items = np.concatenate([piece[0] for piece in pieces])
            items, last = np.unique(items[::-1], return_index=True)  # the last value of an item counts
            others = np.concatenate([piece[1] for piece in pieces])[::-1][last]
            passed = [np.array([block for block, _ in kept], dtype=np.int64), *(part for part, *_ in shared)]
            changed = np.unique(np.concatenate((blocks, *passed, items // self.block_steps)))
        return Leaves(
            items,
            others,
            blocks,
            values,
            changes.slots[stale | grown],
            (added | grown)[stale | grown],
            changed,
        )

    def has(self, slots: Array) -> Array:
        """Whether the map has the trajectories in slots (int64 [n]), bool [n]."""
        present: Array = self.sequence_of[slots] >= 0
        return present

    def _blocks(self, extent: Array, block_ids: Array) -> tuple[Array, Array]:
        """Where the blocks of leaves are found: in these arrays of the table's index, or those of `own`."""
        return (extent, block_ids) if self.own is None else (self.own.extent, self.own.block_ids)

    def rearrange(self, slots: Array, blocks: Array, others: Array) -> None:
        """Give all trajectories blocks of leaves again, see `LeafBlocks.restore`. The caller then sets all leaves."""
        assert self.own is not None
        self._remove(self.own.slots)
        self.own.restore(slots, blocks, others)
        given = np.concatenate((slots, others))
        self._add(given, np.zeros(len(given), dtype=np.float32), self.own.extent, self.own.block_ids)

    def _remove(self, slots: Array) -> tuple[Array, list[tuple[int, tuple[int, int]]]]:
        """Remove trajectories; returns the freed blocks, and those that another one owns now with `inside` before."""
        slots = slots[self._first[slots] >= 0]
        if not self._others:
            emptied: Array = np.empty(int(self._count[slots].sum()), dtype=np.int64)
            native.remove(slots, self._lists, self.owner, self.place, emptied)
            return emptied, []
        freed: list[int] = []
        kept: dict[int, tuple[int, int]] = {}
        for slot in slots.tolist():
            block = int(self._first[slot])
            for _ in range(int(self._count[slot])):
                following = int(self._next[block])
                others = self._others.get(block, [])
                if self.owner[block] != slot:
                    others[:] = [share for share in others if share.slot != slot]
                elif others:
                    share = others.pop()
                    first, end = self.inside[block].tolist()
                    kept.setdefault(block, (first, end))
                    self.owner[block], self.number[block] = share.slot, share.number
                    self.inside[block] = share.first, share.end
                else:
                    self.owner[block] = self.place[block] = -1
                    freed.append(block)
                if not others:
                    self._others.pop(block, None)
                block = following
            self._first[slot] = -1
        return np.array(freed, dtype=np.int64), [
            (b, before) for b, before in kept.items() if self.owner[b] >= 0
        ]

    def _ends(self, slots: Array, extent: Array) -> Array:
        """End of the steps that can be drawn of trajectories, int64 [n]."""
        if self._complete is None:
            ends: Array = extent[slots, 0]
            return ends
        counts = self._complete.counts(extent[slots, 0], extent[slots, 2])
        return self._first_step + np.where(counts > 0, (counts - 1) * self._stride + 1, 0)

    def _grow(self, slot: int, extent: Array, block_ids: Array) -> Array:
        """Add the steps that a known trajectory has got since; returns their items. No other shares its blocks."""
        if self.own is not None:
            self.own.lengthen(slot)
        length, start, _ = extent[slot].tolist()
        count, had = -(-length // self.block_steps), int(self._count[slot])
        blocks = block_ids[start : start + count].astype(np.int64)
        before, end = int(self.length[slot]), int(self._ends(np.array([slot]), extent)[0])
        number = np.arange(count)
        self.owner[blocks[had:]] = slot
        self.number[blocks[had:]] = number[had:]
        self.place[blocks[had:]] = self.start[slot] + number[had:]
        self._next[blocks[:-1]] = blocks[1:]
        self._count[slot] = count
        self._set_inside(slot, blocks, number, end)
        steps = np.arange(before, end)
        steps = steps[(steps - self._first_step) % self._stride == 0]
        items: Array = blocks[steps // self.block_steps] * self.block_steps + steps % self.block_steps
        return items

    def _add(
        self, slots: Array, priorities: Array, extent: Array, block_ids: Array
    ) -> tuple[Array, Array, list[tuple[Array, Array, Array]]]:
        """Add trajectories in order.

        Returns:
            Blocks of those that share none with earlier ones, and their priorities; what `_share` returns of others.
        """
        complete = self._complete
        anchors = (0, -1, -1, 1, 1) if complete is None else dataclasses.astuple(complete)
        known = self.length, self.owner, self.number, self.inside, self.place
        lengths = extent[slots, 0]
        size = int((-(-lengths // self.block_steps)).sum())
        blocks, values = np.empty(size, dtype=np.int64), np.empty(size, dtype=np.float32)
        shared: list[tuple[Array, Array, Array]] = []
        begin = filled = 0
        while begin < len(slots):
            added, more = native.add(
                slots[begin:],
                lengths[begin:],
                priorities[begin:],
                extent,
                block_ids,
                self.block_steps,
                anchors,
                (self._streams, _STREAMS, _STREAM_PLACES),
                self.start,
                self._lists,
                known,
                blocks[filled:],
                values[filled:],
            )
            if added == native.INVALID:
                raise IndexError("a trajectory has blocks that do not exist")
            begin, filled, self._streams = begin + added, filled + more, self._streams + added
            if begin < len(slots):
                shared.append(self._share(int(slots[begin]), priorities[begin], extent, block_ids))
                begin += 1
        return blocks[:filled], values[:filled], shared

    def _share(
        self, slot: int, priority: np.float32, extent: Array, block_ids: Array
    ) -> tuple[Array, Array, Array]:
        """Add a trajectory that shares blocks; returns these, the items whose leaves are set, and their priorities."""
        length, begin, _ = extent[slot].tolist()
        count = -(-length // self.block_steps)
        number = np.arange(count)
        blocks = block_ids[begin : begin + count].astype(np.int64)
        end = int(self._ends(np.array([slot]), extent)[0])
        before = np.zeros((count, 2), dtype=np.int64)  # `inside` for the previous owner
        start = self._streams % _STREAMS * _STREAM_PLACES
        self._streams += 1
        for place in np.flatnonzero(self.owner[blocks] >= 0).tolist():
            block = int(blocks[place])
            before[place] = self.inside[block]
            share = _Share(int(self.owner[block]), int(self.number[block]), *self.inside[block].tolist())
            self._others.setdefault(block, []).append(share)
            start = int(self.place[block]) - place  # a later part of the same stream
        self.owner[blocks], self.number[blocks], self.place[blocks] = slot, number, start + number
        self.start[slot] = start
        self._next[blocks[:-1]] = blocks[1:]
        self._first[slot], self._count[slot] = blocks[0], count
        self._set_inside(slot, blocks, number, end)
        items, values, inside = self.steps_of(blocks, np.full(count, priority, dtype=np.float32))
        step = np.arange(self.block_steps)
        new = ~(inside & (step >= before[:, :1]) & (step < before[:, 1:]))
        return blocks, items[new], values[new]

    def _set_inside(self, slot: int, blocks: Array, number: Array, end: int) -> None:
        """Set which steps of a trajectory's blocks (int64 [n], with their numbers) can be drawn: those before `end`."""
        places, stride = number * self.block_steps, self._stride
        bounds = np.repeat([[self._first_step, end]], len(blocks), axis=0)
        if stride > 1:  # a block has one anchor at most
            bounds[:, 0] += np.maximum(places - self._first_step + stride - 1, 0) // stride * stride
            bounds[:, 1] = np.minimum(end, bounds[:, 0] + 1)
        bounds = np.clip(bounds - places[:, None], 0, self.block_steps)
        self.inside[blocks] = np.maximum(bounds, bounds[:, :1])
        self.length[slot] = end

    def steps_of(self, blocks: Array, priorities: Array) -> tuple[Array, Array, Array]:
        """The steps of whole blocks (int64 [n]) and their priorities, one a block (float32 [n]).

        Returns:
            Items and priorities, int64 and float32 [n, block_steps], `GONE` where no step can be drawn; and where one
            can, bool.
        """
        step, bounds = np.arange(self.block_steps), self.inside[blocks]
        inside = (step >= bounds[:, :1]) & (step < bounds[:, 1:])
        values = np.where(inside, priorities[:, None], _GONE)
        return blocks[:, None] * self.block_steps + step, values, inside

    def locate(self, items: Array) -> tuple[Array, Array]:
        """Slots and steps of items, int64 [n] each; the step is 0 if an item is a trajectory."""
        if not self.steps:
            return items, np.zeros_like(items)
        blocks, inside = np.divmod(items, self.block_steps)
        steps = self.number[blocks].astype(np.int64) * self.block_steps + inside
        return self.owner[blocks].astype(np.int64), steps

    def items(self, slots: Array, steps: Array, extent: Array, block_ids: Array) -> Array:
        """Items of steps (int64 [n]) of live slots (int64 [n]); -1 for a slot or step unknown to the map.

        The index may change meanwhile, and a slot be another trajectory's: a block counts only if the map knows it.
        """
        if not self.steps:
            return slots
        extent, block_ids = self._blocks(extent, block_ids)
        items: Array = np.empty(len(slots), dtype=np.int64)
        known = (self.length, self.owner, self.number, self.inside)
        sizes = self.block_steps, self._first_step, bool(self._others)
        if step_items(slots, steps, extent, block_ids, *sizes, *known, items):
            for row in np.flatnonzero(items < -1).tolist():
                items[row] = self._shared_item(-2 - int(items[row]), int(slots[row]), int(steps[row]))
        return items

    def _shared_item(self, block: int, slot: int, step: int) -> int:
        """Item of a trajectory's step in a block that another one owns; -1 if the trajectory does not share it."""
        number, at = divmod(step, self.block_steps)
        first, end = self.inside[block].tolist()
        shares = any((share.slot, share.number) == (slot, number) for share in self._others.get(block, ()))
        return block * self.block_steps + at if shares and first <= at < end else -1

    def all_items(self, slots: Array, lengths: Array, extent: Array, block_ids: Array) -> Array:
        """Items of trajectories in slots (int64 [n]) of so many steps (int64 [n]), concatenated."""
        if not self.steps:
            return slots
        steps = ranges(np.zeros_like(lengths), lengths)
        return self.items(np.repeat(slots, lengths), steps, extent, block_ids)
