"""Copies of rows of a table, one after another, as the files of a segment hold them."""

from __future__ import annotations

import functools
from collections.abc import Mapping

import numpy as np

from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.trajectory_records import rows_of
from gear_loader.errors import StaleIndexError
from gear_loader.native.saving_loops import CORRUPT, LOST, ON_DISK, copy_out
from gear_loader.storage.disk import LostRowsError, TierReader
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.index import Index
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_AT_ONCE = 1 << 19
"""Bytes of mutable columns that are copied under the lock at once, unless one trajectory has more."""


class TrajectoryRows:
    """Copies rows of trajectories out of a table.

    Args:
        index: of the table. schema: its columns. places: their places, see `Region.column_place`; the caller
            keeps the region mapped.
        slots, records: int64 [n] and [n], the trajectories whose rows are wanted, oldest first.
        under_ticket: whether the caller holds the ticket of the trajectories. Otherwise they may be evicted before they
            are copied; zeros come in their place.
        reader: of trajectories that lie on disk only; None if there are none.
        on_device: whether it reads all, from the memory of a GPU.

    Attributes:
        first, ends: int64 [n], first row of each trajectory, and the row after its last.
        filled: int64 [n], see `gear_loader.storage.filled_bits`: what mutable columns had when they were staged.
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        places: Mapping[str, Array],
        slots: Array,
        records: Array,
        *,
        under_ticket: bool,
        reader: TierReader | None = None,
        on_device: bool = False,
    ) -> None:
        self.slots = slots
        self.ends = np.cumsum(rows_of(records))
        self.first = self.ends - rows_of(records)
        self._sequences = np.ascontiguousarray(records["sequence"])
        self._states = np.zeros(len(slots), dtype=np.uint8)
        self._index, self._schema, self._places, self._under_ticket = index, schema, places, under_ticket
        self._reader, self._on_device = reader, on_device
        self.filled = records["filled"].copy()
        self._staged: dict[str, Array] = {}
        # Of each column the number of trajectories that are not in `_staged`, the first ones.
        self._unstaged = dict.fromkeys(schema, len(slots))

    @property
    def lost(self) -> Array:
        """Whether each trajectory had been evicted before it was copied, bool [n]."""
        lost: Array = self._states == LOST
        return lost

    def bounds(self, name: str) -> tuple[Array, Array]:
        """First row of each trajectory in a column's file, and the row after its last; int64 [n] each."""
        if not self._schema[name].trajectory:
            return self.first, self.ends
        place = np.arange(len(self.ends))
        return place, place + 1

    def stage(self, most_bytes: int, arena: Arena, *, held: bool) -> None:
        """Copy the newest trajectories into memory, at once; and mutable columns of all, each trajectory at one moment.

        Args:
            most_bytes: of the copies of the newest. arena: the memory of all.
            held: whether the caller holds the ticket of the trajectories, so that none is lost.
        """
        self._unstaged = dict.fromkeys(self._schema, self._newest(most_bytes))
        self._unstaged.update(dict.fromkeys(self._schema.mutable, 0))
        bounds = {}
        for name, unstaged in self._unstaged.items():
            first, ends = self.bounds(name)
            bounds[name] = (int(first[unstaged]), int(ends[-1])) if unstaged < len(first) else (0, 0)
        taken = arena.take(
            [(high - low) * int(self._places[name][2]) for name, (low, high) in bounds.items()]
        )
        self._staged = dict(zip(bounds, taken, strict=True))
        if self._schema.mutable:  # first: what is filled by then is there when it is copied
            self._stage_mutable()
        self._under_ticket = held
        for name, (low, high) in bounds.items():
            if high > low and name not in self._schema.mutable:
                self._copy(name, self._staged[name], low, high)
        self._under_ticket = False

    def _stage_mutable(self) -> None:
        """Copy the mutable columns, some trajectories at a time under the lock, so that none is edited meanwhile."""
        size = sum(int(self._places[name][2]) for name in self._schema.mutable)
        low = 0
        while low < len(self.slots):
            most = int(self.first[low]) + _AT_ONCE // size
            high = max(low + 1, int(np.searchsorted(self.ends, most, side="right")))
            for name, spilled in self._index.recovery.locked(functools.partial(self._mutable, low, high)):
                # They were last edited before they were written there, which is done by the caller alone.
                begin, end = int(self.first[low]), int(self.ends[high - 1])
                self._read(name, self._staged_rows(name, begin, end), begin, end, spilled)
            low = high

    def _mutable(self, low: int, high: int) -> list[tuple[str, Array]]:
        """Copy mutable columns of trajectories `low` to `high` - 1 that are in memory; the caller holds the lock.

        Returns:
            Names of columns, and positions of the trajectories that lie on disk only, int64 [m] each.
        """
        self.filled[low:high] = filled_bits(self._index.arrays, self.slots[low:high])
        begin, end, left = int(self.first[low]), int(self.ends[high - 1]), []
        for name in self._schema.mutable:
            spilled = self._copy_blocks(name, self._staged_rows(name, begin, end), begin, end)
            if len(spilled):
                left.append((name, spilled))
        return left

    def _staged_rows(self, name: str, begin: int, end: int) -> Array:
        """Where rows of a column all of which is staged are, uint8 [bytes]."""
        size = int(self._places[name][2])
        return self._staged[name][begin * size : end * size]

    def _newest(self, most_bytes: int) -> int:
        """Position of the first of the newest trajectories that have so many bytes."""
        sizes = (self.ends - self.first) * self._schema.step_bytes + self._schema.trajectory_bytes
        return len(sizes) - int(np.searchsorted(np.cumsum(sizes[::-1]), most_bytes, side="right"))

    def has_lost(self, most_bytes: int) -> bool:
        """Whether one of the newest trajectories, which have so many bytes, is lost."""
        return bool(self.lost[self._newest(most_bytes) :].any())

    def piece(self, name: str, buffer: Array, begin: int, end: int) -> Array:
        """Rows `begin` to `end` - 1 of a column, uint8 [bytes]: copied into a buffer, or where all have been staged."""
        size = int(self._places[name][2])
        first, ends = self.bounds(name)
        unstaged = self._unstaged[name]
        split = int(first[unstaged]) if unstaged < len(first) else int(ends[-1])
        if split == 0:
            return self._staged[name][begin * size : end * size]
        middle = min(max(begin, split), end)
        copied = (middle - begin) * size
        if middle > begin:
            self._copy(name, buffer[:copied], begin, middle)
        if end > middle:
            buffer[copied:] = self._staged[name][(middle - split) * size : (end - split) * size]
        return buffer

    def _copy(self, name: str, buffer: Array, begin: int, end: int) -> None:
        """Copy rows of trajectories, and zeros in the place of those that are lost."""
        # Blocks that go to others when their trajectory is moved to disk are not recognised without a ticket.
        ticket = Ticket()
        try:
            if self._reader is not None and not self._under_ticket:
                self._index.reader.begin_read(ticket)
            elsewhere = self._copy_blocks(name, buffer, begin, end)
            if len(elsewhere):
                self._read(name, buffer, begin, end, elsewhere)
            ticket.end()
        finally:
            ticket.end()  # idempotent; a signal handler may raise between `begin_read` and the call above

    def _copy_blocks(self, name: str, buffer: Array, begin: int, end: int) -> Array:
        """`_copy` what is in host memory; return the positions of the other trajectories, int64 [m]."""
        arrays, column = self._index.arrays, self._places[name]
        first, ends = self.bounds(name)
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(first, end, side="left"))
        if self._on_device:
            return np.arange(low, high)
        size = int(column[2])
        copy_out(
            buffer.ctypes.data,
            begin * size,
            end * size,
            first,
            ends,
            self.slots,
            self._sequences,
            self._under_ticket,
            column,
            arrays.state,
            arrays.sequence,
            arrays.extent,
            arrays.block_ids,
            arrays.counters,
            arrays.num_blocks,
            self._states,
        )
        states = self._states[low:high]
        if (states == CORRUPT).any():
            slot = self.slots[low + int(np.argmax(states == CORRUPT))]
            raise arrays.corrupt(f"the block table of slot {slot} is invalid")
        return np.flatnonzero(states == ON_DISK) + low

    def _read(self, name: str, buffer: Array, begin: int, end: int, which: Array) -> None:
        """Read rows of trajectories on disk only, or on a GPU, for those of `_copy`; of damaged ones come zeros.

        Args:
            which: int64 [n], positions of the trajectories.
        """
        assert self._reader is not None
        first, ends = self.bounds(name)
        arrays, slots = self._index.arrays, self.slots[which]
        generations = arrays.generation[slots]  # before the check, so that they are those of the trajectories
        gone = arrays.sequence[slots] != self._sequences[which]
        if self._on_device and not self._under_ticket:  # else evicted ones keep their blocks
            gone |= arrays.state[slots] != READY
        size, once = int(self._places[name][2]), self._schema[name].trajectory
        low, high = np.maximum(first[which], begin), np.minimum(ends[which], end)
        offset = np.zeros(len(which), dtype=np.int64) if once else low - first[which]
        while True:
            for i in np.flatnonzero(gone).tolist():
                buffer[(low[i] - begin) * size : (high[i] - begin) * size] = 0
            self._states[which[gone]] = LOST
            which, slots, generations, low, high, offset = (
                part[~gone] for part in (which, slots, generations, low, high, offset)
            )
            if not len(which):
                return
            try:
                self._reader.read(
                    slots, generations, offset, high - low, {name: (buffer, (low - begin) * size)}
                )
                return
            except LostRowsError as error:
                gone = np.isin(slots, error.slots)
            except StaleIndexError:
                gone = arrays.generation[slots] != generations
