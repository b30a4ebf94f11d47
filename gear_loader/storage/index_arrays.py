"""The arrays of a table's index, with checks of values that are read without the lock."""

from __future__ import annotations

import types
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import CorruptTableError, StaleIndexError
from gear_loader.storage.counters import NUM_READY, NUM_TOUCHED
from gear_loader.storage.operations.entry_points import COMPILED, PLAIN
from gear_loader.storage.operations.view import View, places_of
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array


class IndexArrays:
    """Views of a region's index arrays, and the operations on them. Takes no lock.

    Attributes:
        name: name of the table, or None.
        view: the arrays as a `View`, for operations in Python.
        operations: the operations, compiled or in Python. ops: the same, with IndexError as CorruptTableError.
        where: first argument of the operations.
        stores_at_once: whether `operations.store` may be used.
        tier: the `Tier` below the memory, or None. moves: as of `Layout`.
        host_blocks, writable_blocks: blocks of the host part, and those that writers get, which follow.
        copied_blocks: first blocks of a prefix that are copied, as they have the values of columns per trajectory.
        edit_unit: bit of `filled` that is set while a trajectory
            is edited, above those of the late columns; the bits above it count the edits. 0 without mutable columns.
    """

    def __init__(self, region: Region) -> None:
        layout = region.layout
        self.name = region.name
        self.rules = layout.rules
        self.tier = layout.tier
        self.moves = layout.moves
        self.block_steps = layout.block_steps
        self.max_steps = layout.max_steps
        self.num_slots = layout.max_trajectories
        self.num_blocks = layout.num_blocks
        self.host_blocks, self.writable_blocks = layout.host_blocks, layout.writable_blocks
        self.half_size = layout.half
        self.block_bytes = layout.block_bytes
        self.counters: Array = region.array("counters")
        self.readers: Array = region.array("readers")
        self.extent: Array = region.array("extent")
        self.generation: Array = region.array("generation")
        self.sequence: Array = region.array("sequence")
        self.ident: Array = region.array("ident")
        self.epoch: Array = region.array("epoch")
        self.owner: Array = region.array("owner")
        self.stream: Array = region.array("stream")
        self.created: Array = region.array("created")
        self.revised: Array = region.array("revised")
        self.filled: Array = region.array("filled")
        self.prefix: Array = region.array("prefix")
        self.moved: Array = region.array("moved")
        self.priority: Array = region.array("priority")
        self.sampled: Array = region.array("sampled")
        self.state: Array = region.array("state")
        self.links: Array = region.array("links")
        self.block_ids: Array = region.array("block_ids").reshape(-1)
        self.free_slots: Array = region.array("free_slots")
        self.retired: Array = region.array("retired")
        self.touched: Array = region.array("touched")
        self.free_blocks: Array = region.array("free_blocks")
        self.uses: Array = region.array("uses")
        self.lowest: Array = region.array("lowest")
        self.parked: Array = region.array("parked")
        self.stored: Array = region.array("stored")
        self.tier_priority: Array = region.array("tier_priority")
        self.kept_versions: Array = region.array("versions")
        self.tier_counts: Array = region.array("tier_counts")
        self.copied_blocks = 1 if layout.schema.per_trajectory else 0
        self.edit_unit = 1 << len(layout.schema.late) if layout.schema.mutable else 0
        self.group = layout.group
        rules = layout.rules
        self._versions: tuple[Array, np.dtype[Any]] | None = None
        if rules.version is not None:
            self._versions = region.column(rules.version), np.dtype(layout.schema[rules.version].dtype_name)
        self.operate(compiled=True)

    def operate(self, *, compiled: bool) -> None:
        """Select the compiled or the Python operations, on the current array attributes."""
        self.view = View(*(getattr(self, name) for name in View._fields))
        self.operations: Any = COMPILED if compiled else PLAIN
        self.ops: Any = types.SimpleNamespace(
            **{name: _checked(operation, self.name) for name, operation in vars(self.operations).items()}
        )
        self.stores_at_once = compiled and self.rules.rate_limiter is None
        self.where: Any = places_of(self.view) if compiled else self.view

    def blocks_of(self, lengths: Any) -> Any:
        """Number of blocks of trajectories with these lengths."""
        return -(-lengths // self.block_steps)

    def live_rows(self, slots: Array, generations: Array, *, strict: bool, what: str) -> Array:
        """Whether each row's trajectory is in the table, bool [n]. The caller holds the lock.

        Args:
            slots, generations: int64 [n], the rows; a negative generation is not compared.
            strict: whether a stale row is an error.
            what: the rows and a verb, for the error: "rows are of".

        Raises:
            StaleIndexError: with `strict`, a row is stale.
        """
        inside = (slots >= 0) & (slots < self.num_slots)
        at = np.where(inside, slots, 0)
        live: Array = inside & (self.state[at] == READY)
        live &= (generations < 0) | (self.generation[at] == generations)
        stale = np.flatnonzero(~live)
        if strict and len(stale):
            raise StaleIndexError(
                f"{len(stale)} of {len(slots)} {what} removed trajectories; the first is row {stale[0]}, index "
                f"{slots[stale[0]]}. Nothing was changed; stale='ignore' skips them."
            )
        return live

    def blocks_at(self, slots: Any) -> Any:
        """Number of blocks of the slots' steps and final steps; 0 for those that lie on disk only."""
        extent = self.extent[slots]
        blocks = self.blocks_of(extent[..., 0] + extent[..., 2])
        return blocks if self.tier is None else np.where(extent[..., 1] < 0, 0, blocks)

    def levels(self, places: Array) -> Array:
        """Where trajectories lie, int8 [n]: 0 on disk only, 1 in blocks that writers get, 2 in those of the host part.

        Args:
            places: int64 [n], of their block tables. The caller holds the lock or a read ticket, or looks again under
                them.
        """
        found = (places >= 0).astype(np.int8)
        if self.host_blocks:
            inside = np.flatnonzero(found)
            found[inside] += self.ids_at(places[inside]) < self.host_blocks
        return found

    def versions(self, slots: Array) -> Array:
        """Versions of the policy of trajectories, int64 [n], of a table with such a column.

        Args:
            slots: int64 [n]. The caller holds the lock or a read ticket.
        """
        assert self._versions is not None
        places = self.extent[slots, 1]
        if self.tier is None:
            return self._versions_at(places)
        found: Array = self.kept_versions[slots]
        inside = places >= 0
        found[inside] = self._versions_at(places[inside])
        return found

    def _versions_at(self, places: Array) -> Array:
        """Versions of trajectories in memory by their places in the block tables, int64 [n]."""
        assert self._versions is not None
        column, dtype = self._versions
        values = np.ascontiguousarray(column[self.ids_at(places), 0])
        found: Array = values.reshape(-1).view(dtype).astype(np.int64)
        return found

    def keep_versions(self, slots: Array) -> None:
        """Keep the versions of trajectories (int64 [n]) in memory, before their blocks are taken. Under the lock."""
        if len(self.kept_versions):
            self.kept_versions[slots] = self.versions(slots)

    def touched_since(self, since: int) -> Array | None:
        """Distinct slots committed, retired or revised since a position (`NUM_TOUCHED` then), int64 [n].

        Returns:
            None if the ring of changes has overflowed since, or the position is negative. The caller holds the lock.
        """
        position = int(self.counters[NUM_TOUCHED])
        count = position - since
        if since < 0 or not 0 <= count <= self.num_slots:
            return None
        if count == 0:
            return np.empty(0, dtype=np.int64)
        slots = np.unique(self.touched[np.arange(since, position) % self.num_slots]).astype(np.int64)
        if slots[0] < 0 or slots[-1] >= self.num_slots:
            raise self.corrupt(
                f"slots {slots[0]} to {slots[-1]} were touched, expected 0 to {self.num_slots - 1}"
            )
        return slots

    def num_ready(self) -> int:
        """Number of live trajectories. Takes no lock."""
        count = int(self.counters[NUM_READY])
        if not 0 <= count <= self.num_slots:
            raise self.corrupt(f"it counts {count} trajectories, expected 0 to {self.num_slots}")
        return count

    def row(self, slot: int, extent: Sequence[int] | None = None) -> Array:
        """The block ids of a slot, int32 [blocks] (a copy). The caller holds the lock or a read ticket.

        Args:
            extent: its row of `extent` when it was in memory; by default the present one.
        """
        length, start, final = self.extent[slot].tolist() if extent is None else extent
        blocks = self.blocks_of(length + final)
        if not (
            0 < length <= self.max_steps and 0 <= final <= 1 and 0 <= start <= len(self.block_ids) - blocks
        ):
            raise self.corrupt(f"slot {slot} has {length} steps and its block table at {start}")
        return self.ids_at(np.arange(start, start + blocks))

    def ids_at(self, places: Array) -> Array:
        """Block ids, int32 [n], at `places` in `block_ids`, int64 [n]. The caller holds the lock or a read ticket."""
        if len(places) and not 0 <= places.min() <= places.max() < len(self.block_ids):
            raise self.corrupt(f"block tables have the places {places.min()} to {places.max()}")
        ids: Array = self.block_ids[places]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise self.corrupt(f"block tables hold the blocks {ids.min()} to {ids.max()}")
        return ids

    def corrupt(self, what: str) -> CorruptTableError:
        """The error for an index with the invalid value that `what` describes."""
        return _corrupt(self.name, what)


def _corrupt(name: str | None, what: str) -> CorruptTableError:
    known = "The private table" if name is None else f"Table {name!r}"
    remedy = "Create it again" if name is None else f"Remove it (`gear-loader rm {name}`)"
    return CorruptTableError(
        f"{known} has a corrupt index: {what}. Another process may have written into its memory. {remedy}; "
        "Table.load restores the last checkpoint."
    )


def _checked(operation: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """Wrap an operation to raise CorruptTableError instead of IndexError."""

    def call(*given: Any) -> Any:
        try:
            return operation(*given)
        except IndexError as error:
            raise _corrupt(name, str(error)) from error

    return call


def ranges(starts: Array, counts: Array) -> Array:
    """Concatenate the ranges ``starts[i]`` to ``starts[i] + counts[i] - 1``; all int64 [n]."""
    before = np.cumsum(counts) - counts
    places: Array = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return places
