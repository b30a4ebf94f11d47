"""The leaves of a priority tree in host memory: of items one by one, or of groups of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.kernels.sum_tree import GONE, LOWEST_LEAF, UNSET
from gear_loader.native.priority_updates import known_items
from gear_loader.selection.grouping import CompleteGroups, GroupFormer, Groups
from gear_loader.selection.item_map import ItemMap, Leaves
from gear_loader.selection.samplers import PrioritySampler
from gear_loader.selection.tree import PriorityTree
from gear_loader.selection.weights import (
    LARGEST_LEAF,
    SHARE,
    first_leaves,
    may_leave_range,
    out_of_range,
    scaled,
)
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array

Change = Callable[[Callable[[], object]], None]
"""Calls a function completely or not at all."""
Freshen = Callable[[Array, Array], Array]
"""Leaves of items (int64 [n], float32 [n]) for the versions that their policies are behind, float32 [n]."""


class HostLeaves:
    """Leaves of a table's items, which know no table.

    Args:
        items: the items, of which the map knows where they are. sampler: weighs their priorities, and draws.
        change: makes changes of all leaves whole.

    Attributes:
        tree: what is drawn from.
        maximum: largest priority so far, at least 1. num_stale: stale rows that updates have skipped.
    """

    def __init__(self, items: ItemMap, sampler: PrioritySampler, change: Change) -> None:
        self._items, self._sampler, self._change = items, sampler, change
        self.tree = PriorityTree(items.capacity, extremes=sampler.keeps_extremes)
        self.maximum = 1.0
        self.num_stale = 0
        self.may_leave_range = may_leave_range(sampler)

    def set(self, leaves: Leaves, freshen: Freshen | None) -> None:
        """Set the leaves of items that came, went, or got other priorities in the table."""
        self.maximum = max(self.maximum, leaves.maximum)
        if len(leaves.whole):
            values = self._first(leaves.whole_priorities)
            self.tree.fill(leaves.whole, self._items.inside, self._items.block_steps, values)
        values = self._first(leaves.priorities)
        if freshen is not None:
            kept = leaves.priorities != GONE
            values[kept] = freshen(leaves.items[kept], values[kept])
        self.put(leaves.items, values)

    def _first(self, given: Array) -> Array:
        """Leaves of priorities of `Leaves`, float32 [n]."""
        priorities = np.where(given == UNSET, np.float32(self.maximum), given)
        removed = given == GONE
        priorities[removed] = 0
        leaves = first_leaves(self._sampler, priorities)
        leaves[removed] = 0
        return leaves

    def update(self, items: Array, priorities: Array, leaves: Array, freshen: Freshen | None) -> None:
        """Set leaves (float32 [n], overwritten) of items (int64 [n], -1 for a stale row) that got new priorities."""
        count, largest = known_items(items, priorities, leaves)
        self.num_stale += len(items) - count
        self.maximum = max(self.maximum, largest)
        items, leaves = items[:count], leaves[:count]
        self.put(items, leaves if freshen is None else freshen(items, leaves))

    def put(self, items: Array, leaves: Array) -> None:
        """Set leaves (float32 [n]) of items (int64 [n]); of duplicates the last one counts."""
        if len(items) > self._items.capacity // 8:
            self.write(items, leaves)
        else:
            self.tree.update(items, leaves)

    def scale(self, factor: float) -> None:
        """Multiply all leaves."""
        self.tree.leaves[:] = scaled(self.tree.leaves, factor)
        self.tree.build()

    def read(self, items: Array) -> Array:
        """Leaves of items (int64 [n]), float32 [n]; 0 for the item -1."""
        leaves: Array = np.where(items >= 0, self.tree.leaves[items], np.float32(0))
        return leaves

    def write(self, items: Array, leaves: Array) -> None:
        """`put` for many items: all nodes are computed anew."""

        def write() -> None:
            self.tree.leaves[items] = leaves
            self.tree.build()

        self._change(write)

    def restore(self, maximum: float, num_stale: int) -> None:
        """Set the counters."""
        self.maximum, self.num_stale = maximum, num_stale

    def every(self, step: int) -> Array:
        """Every `step`-th leaf, float32 [n]."""
        leaves: Array = self.tree.leaves[::step].copy()
        return leaves

    def draw(self, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        """Draw items by the sampler, int64 [count], and their leaves, float32 [count].

        Raises:
            PriorityError: too few have a positive leaf; leaves clipped to float32's range have more than `SHARE` of
                the probability.
        """
        if self.may_leave_range:
            self._check_range()
        return self._sampler.draw(self.tree, count, key=key, step=step)

    def _check_range(self) -> None:
        total, leaves = self.tree.total, self.tree.leaves
        if LOWEST_LEAF < total <= len(leaves) * LOWEST_LEAF / SHARE:
            if np.count_nonzero(leaves == LOWEST_LEAF) * LOWEST_LEAF > total * SHARE:
                raise out_of_range(self._sampler)
        elif total > LARGEST_LEAF * (1 + SHARE) and (leaves == LARGEST_LEAF).any():
            raise out_of_range(self._sampler)

    @property
    def is_empty(self) -> bool:
        """Whether there is no item, whatever its priority."""
        return not (self._items.sequence_of >= 0).any()

    def form(self, known: Callable[[], Snapshot]) -> None:
        """Prepare the tree for a draw; `known`: the trajectories that the map has followed."""

    def rows(self, items: Array) -> tuple[Array, Array]:
        """Slots and steps of the rows of items, int64 [m] each."""
        return self._items.locate(items)


class GroupLeaves(HostLeaves):
    """Leaves of groups. That of a group is at its first member; those of all members are kept aside.

    Args:
        former, grouping: form the groups.
    """

    def __init__(
        self, items: ItemMap, sampler: Any, change: Change, *, former: GroupFormer, grouping: Groups
    ) -> None:
        super().__init__(items, sampler, change)
        self._former, self._grouping = former, grouping
        self._members: Array = np.zeros(items.capacity, dtype=np.float32)  # leaf of each trajectory
        self._groups: CompleteGroups | None = None  # those that the tree holds
        self._number: Array = np.zeros(items.capacity, dtype=np.int64)  # of the group of a first member

    def put(self, items: Array, leaves: Array) -> None:
        self._groups = None  # first: after an interruption they are formed again
        self._members[items] = leaves

    write = put

    def scale(self, factor: float) -> None:
        self.put(np.arange(len(self._members)), scaled(self._members, factor))

    def read(self, items: Array) -> Array:
        leaves: Array = np.where(items >= 0, self._members[items], np.float32(0))
        return leaves

    def form(self, known: Callable[[], Snapshot]) -> None:
        """See `HostLeaves.form`: form the groups of the known trajectories, whose leaves the tree then holds."""
        if self._groups is None:
            view = known()
            groups = self._former.form(view.take(self._items.has(view.slots)))
            leaves, leaders = self._members[groups.slots], groups.leaders.slots
            self.tree.leaves[:] = 0
            self.tree.leaves[leaders] = (
                leaves.max(1) if self._grouping.priority == "max" else leaves.mean(1, dtype=np.float32)
            )
            self.tree.build()
            self._number[leaders] = np.arange(len(groups))
            self._groups = groups

    @property
    def is_empty(self) -> bool:
        return self._groups is None or len(self._groups) == 0

    def rows(self, items: Array) -> tuple[Array, Array]:
        """See `HostLeaves.rows`: of all members of the groups."""
        assert self._groups is not None
        slots: Array = self._groups.slots[self._number[items]].reshape(-1)
        return slots, np.zeros_like(slots)
