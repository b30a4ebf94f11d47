"""Selection of whole groups of trajectories, from a snapshot or by priority."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.selection.base import Selection, SelectionContext
from gear_loader.selection.grouping import (
    CompleteGroups,
    Groups,
    TrajectoryValues,
    expired_members,
    form_groups,
)
from gear_loader.selection.prioritized import ANCHORS, LEAVES, DrawnItems, PrioritizedSelection, scaled
from gear_loader.selection.selectors import Draw, SnapshotSelector, TopK, anchors, replacements
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.reader import Snapshot
from gear_loader.storage.readers import Ticket
from gear_loader.storage.rows import CudaRows, SelectedRows
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["GroupCounts", "GroupFormer", "GroupSelection", "PrioritizedGroupSelection"]

_Found = TypeVar("_Found")
_LOOK_SECONDS = 1.0
"""Most seconds between two looks for incomplete groups that are too old."""


@dataclasses.dataclass
class GroupCounts:
    """Groups as of the last draw, and trajectories removed so far; see `ReplayDataset.stats`."""

    complete: int = 0
    incomplete: int = 0
    constant: int = 0
    expired: int = 0

    def to_dict(self) -> dict[str, int]:
        """The numbers by name."""
        return dataclasses.asdict(self)


class GroupFormer:
    """Forms the groups of a table's snapshots, and removes incomplete ones that are too old.

    Attributes:
        counts: of the last snapshot.
    """

    def __init__(self, table: Table, grouping: Groups) -> None:
        self._table, self._grouping = table, grouping
        self._values = TrajectoryValues(table)
        self._known: tuple[Snapshot, CompleteGroups] | None = None
        self._looked = -np.inf
        self.counts = GroupCounts()

    def form(self, view: Snapshot) -> CompleteGroups:
        """The groups among the trajectories of a snapshot that can be drawn, under a read ticket."""
        if self._known is None or self._known[0] is not view:
            groups = self._readable(view, lambda left: form_groups(self._values, left, self._grouping))
            self._known = view, groups
            self.counts.complete, self.counts.constant = len(groups), groups.constant
            self.counts.incomplete = len(groups.incomplete)
        return self._known[1]

    def _readable(self, view: Snapshot, call: Callable[[Snapshot], _Found]) -> _Found:
        """The result of a call with a snapshot, without the trajectories that it cannot read: those are removed."""
        while True:
            try:
                return call(view)
            except LostRowsError as error:
                self._table.remove_lost(error)
                view = view.take(~np.isin(view.slots, error.slots))

    def expire(self) -> None:
        """Remove the trajectories of incomplete groups to which none was added for `max_age` seconds."""
        limit, now = self._grouping.max_age, time.monotonic()
        if limit is None or now - self._looked < min(_LOOK_SECONDS, limit):
            return
        self._looked = now
        ticket = Ticket()
        try:
            _, everything = self._table.reader().begin_snapshot(0, ticket)
            slots = self._readable(
                everything, lambda left: expired_members(self._values, left, self._grouping, limit)
            )
            ticket.end()
        finally:
            ticket.end()  # again: an exception may arrive anywhere
        if len(slots):
            try:
                self._table.remove(slots)
                self.counts.expired += len(slots)
            except StaleIndexError:  # one was removed meanwhile: look again at the next draw
                self._looked = -np.inf


def look_at_groups(selection: Selection, former: GroupFormer) -> CompleteGroups:
    """The groups that can be drawn now. Removes trajectories that cannot be read from disk."""
    former.expire()
    ticket = Ticket()
    try:
        _, snapshot = selection.context.table.reader().begin_snapshot(0, ticket)
        groups = former.form(selection.view(snapshot))
        ticket.end()
        return groups
    finally:
        ticket.end()  # again: an exception may arrive anywhere


class GroupSelection(Selection):
    """Draws whole groups from a snapshot. Items are groups, and a row is a member."""

    def __init__(self, context: SelectionContext) -> None:
        super().__init__(context)
        assert context.grouping is not None
        self.former = GroupFormer(context.table, context.grouping)

    def look(self) -> CompleteGroups:
        """See `Selection.look`."""
        return look_at_groups(self, self.former)

    def draw(self, draw: Draw, ticket: Ticket, frozen: CompleteGroups | None = None) -> SelectedRows:
        """See `Selection.draw`; `draw` counts groups."""
        return self.when_drawable(lambda: self._draw(draw, ticket, frozen), ticket)

    def _draw(self, draw: Draw, ticket: Ticket, frozen: CompleteGroups | None) -> SelectedRows:
        context, selector = self.context, self.context.selector
        assert isinstance(selector, SnapshotSelector)
        assert context.grouping is not None
        rows = draw.count * context.grouping.size
        self.former.expire()
        _, snapshot = context.table.reader().begin_snapshot(context.samples(rows), ticket)
        present = self.former.form(self.view(snapshot))
        groups = present if frozen is None else frozen
        if len(groups) == 0 or len(present) == 0:
            raise context.empty()
        chosen, _ = selector.select(groups.leaders, draw)
        slots, lengths, generations = (
            part[chosen] for part in (groups.slots, groups.lengths, groups.generations)
        )
        if groups.version != present.version:
            state, generation, _ = context.table.reader().slot_states()
            stale = ((state[slots] != READY) | (generation[slots] != generations)).any(1)
            others = replacements("trajectory", present.leaders, draw)[0][stale]
            slots[stale], lengths[stale] = present.slots[others], present.lengths[others]
            generations[stale] = present.generations[others]
        names = slots.reshape(-1), generations.reshape(-1)
        steps = anchors(context.anchor, lengths.reshape(-1), dataclasses.replace(draw, count=rows))
        times = self.count_samples(*names, lambda which, turn: False)
        return self.rows(names[0], steps, names[1], times, 1 / len(groups))


class PrioritizedGroupSelection(PrioritizedSelection):
    """Draws whole groups by priority. The leaf of a group is at its first member; those of all members are kept aside.

    Args:
        context, history: as for `PrioritizedSelection`.
    """

    def __init__(self, context: SelectionContext, *, history: int) -> None:
        super().__init__(context, history=history)
        assert context.grouping is not None
        self._grouping = context.grouping
        self.former = GroupFormer(context.table, context.grouping)
        self._members: Array = np.zeros(self._map.capacity, dtype=np.float32)  # leaf of each trajectory
        self._groups: CompleteGroups | None = None  # those that the tree holds
        self._number: Array = np.zeros(self._map.capacity, dtype=np.int64)  # of the group of a first member
        self._draws_compiled = False

    def look(self) -> CompleteGroups:
        """See `Selection.look`."""
        return look_at_groups(self, self.former)

    def draw(self, draw: Draw, ticket: Ticket, frozen: Any = None) -> SelectedRows | CudaRows:
        """See `Selection.draw`; `draw` counts groups."""
        self.former.expire()
        return super().draw(draw, ticket, frozen)

    def _num_rows(self, draw: Draw) -> int:
        return draw.count * self._grouping.size

    def _put(self, items: Array, leaves: Array) -> None:
        self._groups = None  # first: after an interruption they are formed again
        self._members[items] = leaves

    def _scale(self, factor: float) -> None:
        self._put(np.arange(len(self._members)), scaled(self._members, factor))

    def _read(self, items: Array) -> Array:
        leaves: Array = self._members[items]
        return leaves

    def _write(self, items: Array, leaves: Array) -> None:
        self._put(items, leaves)

    def _form(self) -> CompleteGroups:
        """The groups of the trajectories that the map knows, whose leaves the tree then holds."""
        if self._groups is None:
            view = self._known()
            groups = self.former.form(view.take(self._map.has(view.slots)))
            leaves, leaders = self._members[groups.slots], groups.leaders.slots
            self._tree.leaves[:] = 0
            self._tree.leaves[leaders] = (
                leaves.max(1) if self._grouping.priority == "max" else leaves.mean(1, dtype=np.float32)
            )
            self._tree.build()
            self._number[leaders] = np.arange(len(groups))
            self._groups = groups
        return self._groups

    def _draw(self, draw: Draw, streams: tuple[int, int] = (LEAVES, ANCHORS)) -> DrawnItems:
        groups, size = self._form(), self._grouping.size
        if len(groups) == 0:
            raise self.context.empty()
        items, leaves = self._draw_items(draw, streams[0])
        chosen = self._number[items]
        slots, generations = groups.slots[chosen].reshape(-1), groups.generations[chosen].reshape(-1)
        leaves = None if leaves is None else np.repeat(leaves, size)
        likely = None if leaves is None or not self.context.informs else leaves / self._tree.total
        steps = self._anchors(slots, dataclasses.replace(draw, count=len(slots)), streams[1])
        return DrawnItems(slots[:0], slots, steps, generations, None, leaves, likely)

    def _likely(self, rows: DrawnItems) -> Array | float:
        if rows.likely is not None or isinstance(self.context.selector, TopK):
            return super()._likely(rows)
        self._form()  # drawn before a restart: the current probability
        leaders = rows.slots.reshape(-1, self._grouping.size)[:, 0]
        return np.repeat(self._tree.leaves[leaders] / self._tree.total, self._grouping.size)
