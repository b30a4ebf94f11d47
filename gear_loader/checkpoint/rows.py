"""Copies of rows of a table, one after another, as the files of a segment hold them."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.trajectory_records import rows_of
from gear_loader.errors import StaleIndexError
from gear_loader.native.saving_loops import CORRUPT, LOST, ON_DISK, copy_out
from gear_loader.storage.disk import LostRowsError, TierReader
from gear_loader.storage.index import Index
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array


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
        self._staged: dict[str, Array] = {}
        self._unstaged = len(slots)  # trajectories that are not in `_staged`, the first ones

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
        """Copy the newest trajectories into memory, at once.

        Args:
            most_bytes: of the copies. arena: their memory.
            held: whether the caller holds the ticket of the trajectories, so that none is lost.
        """
        self._unstaged = self._newest(most_bytes)
        bounds = {}
        for name in self._schema:
            first, ends = self.bounds(name)
            some = self._unstaged < len(first)
            bounds[name] = (int(first[self._unstaged]), int(ends[-1])) if some else (0, 0)
        taken = arena.take(
            [(high - low) * int(self._places[name][2]) for name, (low, high) in bounds.items()]
        )
        self._staged = dict(zip(bounds, taken, strict=True))
        self._under_ticket = held
        for name, (low, high) in bounds.items():
            if high > low:
                self._copy(name, self._staged[name], low, high)
        self._under_ticket = False

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
        split = int(first[self._unstaged]) if self._unstaged < len(first) else int(ends[-1])
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
        if self._reader is None or self._under_ticket:
            self._copy_blocks(name, buffer, begin, end)
            return
        # Blocks that go to others when their trajectory is moved to disk are not recognised without a ticket.
        ticket = Ticket()
        try:
            self._index.reader.begin_read(ticket)
            self._copy_blocks(name, buffer, begin, end)
            ticket.end()
        finally:
            ticket.end()  # idempotent; a signal handler may raise between `begin_read` and the call above

    def _copy_blocks(self, name: str, buffer: Array, begin: int, end: int) -> None:
        arrays, column = self._index.arrays, self._places[name]
        first, ends = self.bounds(name)
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(first, end, side="left"))
        if self._on_device:
            self._read(name, buffer, begin, end, np.arange(low, high))
            return
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
        spilled = np.flatnonzero(states == ON_DISK) + low
        if len(spilled):
            self._read(name, buffer, begin, end, spilled)

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
