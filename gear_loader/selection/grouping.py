"""Groups of trajectories that are drawn together: the answers to one prompt."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Callable
from typing import Literal, TypeVar

import numpy as np
import torch

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.table import Table
from gear_loader.storage.table_rules import check_seconds
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, one_of

GroupPriority = Literal["max", "mean"]
_Found = TypeVar("_Found")
_LOOK_SECONDS = 1.0
"""Most seconds between two looks for incomplete groups that are too old."""
_INTEGERS = (torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)


@dataclasses.dataclass(frozen=True)
class Groups:
    """Trajectories that are drawn together: ``groups=gear.Groups("prompt", 8)`` for the answers to one prompt.

    Trajectories with the same value of a column are a group; only complete groups are drawn, and whole: their members
    are rows one after another, in order of addition. The sampler chooses groups, and `batch_size` is a multiple of
    `size`. With `Steps` a batch may end inside a group; the next one begins with the rest. A value that more
    trajectories have is an error. Over `Shards` with ``Ranks("local")``: of this rank's table; over several tables of
    servers (`RemoteShards`): of any of them. A group lies in one table.

    Attributes:
        column: name of an integer column per trajectory.
        size: trajectories of a complete group.
        priority: of a group: the ``"max"`` of its members', or the ``"mean"`` of them to the power of alpha.
        varies: name of a column per trajectory; groups whose members all have the same value are left out, and counted
            by `ReplayDataset.stats`. With rewards: groups that give no advantage. None for no such.
        max_age: seconds after which the trajectories of an incomplete group are removed from the table, counted from
            the last one that was added. None for no limit.

    Raises:
        SchemaError: an invalid value.
    """

    column: str
    size: int
    priority: GroupPriority = "max"
    varies: str | None = None
    max_age: float | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "size", at_least("size", self.size))
        one_of("priority", self.priority, ("max", "mean"))
        if self.max_age is not None:
            object.__setattr__(self, "max_age", check_seconds("max_age", self.max_age))

    def check_columns(self, schema: Schema) -> None:
        """Raise SchemaError unless a table with these columns has such groups."""
        fits = (
            isinstance(self.column, str)
            and self.column in schema.per_trajectory
            and schema[self.column].dtype in _INTEGERS
        )
        if not fits or schema[self.column].shape != () or schema[self.column].late:
            raise SchemaError(
                f"The column of the groups is {shown(self.column)}; expected the name of an integer column with "
                f"per='trajectory', shape () and without late; the table has {dict(schema.per_trajectory)}."
            )
        if self.varies is not None and not (
            isinstance(self.varies, str) and self.varies in schema.per_trajectory
        ):
            raise SchemaError(
                f"varies is {shown(self.varies)}; expected the name of a column with per='trajectory': "
                f"{list(schema.per_trajectory)}."
            )


@dataclasses.dataclass(frozen=True)
class CompleteGroups:
    """The complete groups among some trajectories, in order of their last members.

    Attributes:
        version: of the index.
        slots, lengths, generations: int64 [G, size], members in order of commitment.
        leaders: the first members, for samplers.
        constant: number of complete groups that were left out, because their members do not vary.
        incomplete: int64 [m], positions of the trajectories that are in no complete group.
    """

    version: int
    slots: Array
    lengths: Array
    generations: Array
    leaders: Snapshot
    constant: int
    incomplete: Array

    def __len__(self) -> int:
        return len(self.slots)

    @property
    def num_steps(self) -> int:
        """Steps of all members."""
        return int(self.lengths.sum())


class TrajectoryValues:
    """Values of columns per trajectory, as needed to form groups. Each is read from disk at most once."""

    def __init__(self, table: Table) -> None:
        self.table = table
        # With a disk tier: column -> generation whose value is known, int64 [T], and the values, uint8 [T, bytes].
        self._known: dict[str, tuple[Array, Array]] = {}

    def read(self, name: str, slots: Array, generations: Array) -> torch.Tensor:
        """Values of a column, ``[n, *shape]``, of distinct trajectories, int64 [n], under a read ticket.

        Raises:
            LostRowsError: trajectories cannot be read from disk.
        """
        column = self.table.schema[name]
        if not (self.table._engine.has_tier or self.table._engine.device):
            data = self._in_memory(name, self.table._engine.index.arrays.extent[slots, 1])
        else:
            if name not in self._known:
                count = self.table._engine.index.arrays.num_slots
                self._known[name] = (
                    np.full(count, -1, dtype=np.int64),
                    np.zeros((count, column.step_bytes), dtype=np.uint8),
                )
            known, kept = self._known[name]
            new = known[slots] != generations
            if new.any():
                kept[slots[new]] = self._anywhere(name, slots[new], generations[new])
                known[slots[new]] = generations[new]
            data = kept[slots]
        return torch.from_numpy(data.reshape(-1)).view(column.dtype).reshape(len(slots), *column.shape)

    def _in_memory(self, name: str, places: Array) -> Array:
        """Values, uint8 [n, step_bytes], of trajectories by their places in the block tables, int64 [n]."""
        blocks = self.table._engine.index.arrays.ids_at(places)
        return np.ascontiguousarray(self.table._engine.region.column(name)[blocks, 0])

    def _anywhere(self, name: str, slots: Array, generations: Array) -> Array:
        """Values, uint8 [n, step_bytes], of trajectories in memory, on a GPU, and of those on disk only."""
        extent = self.table._engine.index.arrays.extent
        found: Array = np.empty((len(slots), self.table.schema[name].step_bytes), dtype=np.uint8)
        while True:
            places = extent[slots, 1]
            inside = (places >= 0) & (self.table._engine.device is None)
            if inside.any():
                found[inside] = self._in_memory(name, places[inside]).reshape(-1, found.shape[1])
            if (extent[slots[inside], 1] == places[inside]).all():
                break  # else some of them were moved to disk meanwhile
        if not inside.all():
            outside = np.flatnonzero(~inside)
            one = np.ones_like(outside)
            read: Array = np.empty((len(outside), found.shape[1]), dtype=np.uint8)
            out = read.reshape(-1), np.arange(len(outside)) * found.shape[1]
            self.table._engine.tier_reader().read(
                slots[outside], generations[outside], 0 * one, one, {name: out}
            )
            found[outside] = read
        return found


def form_groups(values_of: TrajectoryValues, view: Snapshot, grouping: Groups) -> CompleteGroups:
    """The complete groups among the trajectories of a snapshot, under a read ticket.

    Raises:
        SchemaError: more trajectories than `size` have the same value.
        LostRowsError: trajectories cannot be read from disk.
    """
    size = grouping.size
    values = values_of.read(grouping.column, view.slots, view.generations).numpy()
    names, counts = np.unique(values, return_counts=True)
    if len(counts) and counts.max() > size:
        worst = int(counts.argmax())
        raise SchemaError(
            f"{counts[worst]} trajectories have {grouping.column!r} {names[worst]}; expected at most {size}. "
            "Give each group a number of its own, also if a prompt comes again."
        )
    order = np.argsort(values, kind="stable")  # by group, members in order of commitment
    starts = np.cumsum(counts) - counts
    complete = counts == size
    members = order[starts[complete][:, None] + np.arange(size)]
    incomplete = order[np.repeat(~complete, counts)]
    constant = 0
    if grouping.varies is not None and len(members):
        named = view.take(members.reshape(-1))
        found = values_of.read(grouping.varies, named.slots, named.generations)
        found = found.reshape(len(members), size, -1)
        varies = (found != found[:, :1]).flatten(1).any(1).numpy()
        constant = int((~varies).sum())
        members = members[varies]
    members = members[np.argsort(members[:, -1], kind="stable")]
    return CompleteGroups(
        view.version,
        view.slots[members],
        view.lengths[members],
        view.generations[members],
        view.take(members[:, 0]),
        constant,
        incomplete,
    )


def expired_members(
    values_of: TrajectoryValues, everything: Snapshot, grouping: Groups, max_age: float
) -> Array:
    """Slots, int64 [n], of the trajectories of incomplete groups whose newest is older than `max_age` seconds.

    Args:
        source: of the table.
        everything: all trajectories of the table, under a read ticket. What is not filled is a member too.

    Raises:
        LostRowsError: trajectories cannot be read from disk.
    """
    alone = dataclasses.replace(grouping, varies=None)
    named = everything.take(form_groups(values_of, everything, alone).incomplete)
    slots = named.slots
    values = values_of.read(grouping.column, slots, named.generations).numpy()
    _, which = np.unique(values, return_inverse=True)
    ages = values_of.table._engine.reader().ages(slots, named.sequences)[1] / 1e9
    youngest = np.full(len(slots), np.inf)
    np.minimum.at(youngest, which, ages)
    expired: Array = slots[youngest[which] > max_age]
    return expired


@dataclasses.dataclass
class GroupCounts:
    """CompleteGroups as of the last draw, and trajectories removed so far; see `ReplayDataset.stats`."""

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
                self._table._engine.remove_lost(error)
                view = view.take(~np.isin(view.slots, error.slots))

    def _under_ticket(self, call: Callable[[Snapshot], _Found]) -> _Found:
        """The result of a call with all trajectories under a read ticket; see `_readable`."""
        ticket = Ticket()

        def section() -> _Found:
            return self._readable(self._table._engine.reader().begin_snapshot(0, ticket)[1], call)

        return ticket.during(section)

    def expire(self) -> None:
        """Remove the trajectories of incomplete groups to which none was added for `max_age` seconds."""
        limit, now = self._grouping.max_age, time.monotonic()
        if limit is None or now - self._looked < min(_LOOK_SECONDS, limit):
            return
        self._looked = now
        slots = self._under_ticket(lambda left: expired_members(self._values, left, self._grouping, limit))
        if len(slots):
            try:
                self._table.remove(slots)
                self.counts.expired += len(slots)
            except StaleIndexError:  # one was removed meanwhile: look again at the next draw
                self._looked = -np.inf

    def look(self, view_of: Callable[[Snapshot], Snapshot]) -> CompleteGroups:
        """The groups that can be drawn now, of the trajectories of a snapshot that `view_of` returns.

        Removes trajectories that cannot be read from disk.
        """
        self.expire()
        return self._under_ticket(lambda snapshot: self.form(view_of(snapshot)))
