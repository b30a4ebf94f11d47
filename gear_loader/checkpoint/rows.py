"""Copies of rows of a table, one after another, as the files of a segment hold them."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping

import numpy as np

from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.shared_places import SharedPlaces, group_columns
from gear_loader.checkpoint.trajectory_records import rows_of
from gear_loader.errors import StaleIndexError
from gear_loader.native.saving_loops import CORRUPT, LOST, ON_DISK, copy_out
from gear_loader.storage.disk import LostRowsError, TierReader
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.disk_records import rows_of as value_rows_of
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.index import Index
from gear_loader.storage.payload import PayloadReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_AT_ONCE = 1 << 19
"""Bytes of mutable columns that are copied under the lock at once, unless one trajectory has more."""
_NOWHERE = 1 << 62
"""The place of values in a record that stands for those of a trajectory that is lost: behind any memory."""


class TrajectoryRows:
    """Copies rows of trajectories out of a table.

    Args:
        index: of the table. schema: its columns. places: their places, see `Region.column_place`; the caller
            keeps the region mapped.
        slots, records: int64 [n] and [n], the trajectories whose rows are wanted, oldest first.
        under_ticket: whether the caller holds the ticket of the trajectories. Otherwise they may be evicted before they
            are copied; zeros come in their place.
        payload: reads ragged values; None without ragged columns.
        reader: of trajectories that lie on disk only; None if there are none.
        on_device: whether it reads all, from the memory of a GPU.
        shared: where trajectories have what they share; None in a table that shares nothing.

    Attributes:
        first, ends: int64 [n], first row of each trajectory, and the row after its last.
        shared: as given.
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
        payload: PayloadReader | None = None,
        reader: TierReader | None = None,
        on_device: bool = False,
        shared: SharedPlaces | None = None,
    ) -> None:
        self.slots, self.shared = slots, shared
        self._before = np.zeros(len(slots), dtype=np.int64) if shared is None else shared.begin_rows
        self._groups = () if shared is None else group_columns(schema)
        rows = rows_of(records) - self._before
        self.ends = np.cumsum(rows)
        self.first = self.ends - rows
        self._sequences = np.ascontiguousarray(records["sequence"])
        self._states = np.zeros(len(slots), dtype=np.uint8)
        self._index, self._schema, self._places, self._under_ticket = index, schema, places, under_ticket
        self._reader, self._on_device, self._payload = reader, on_device, payload
        self.filled = records["filled"].copy()
        self._staged: dict[str, Array] = {}
        # Of each column the number of trajectories that are not in `_staged`, the first ones.
        self._unstaged = dict.fromkeys(schema, len(slots))
        # Of ragged columns: the row behind the values of each trajectory, int64 [n], of those whose records have been
        # numbered; values that were staged, and the number of trajectories whose are not; bytes of staged ones.
        self._value_ends = {name: np.zeros(len(slots), dtype=np.int64) for name in schema.ragged}
        self._staged_values: dict[str, Array] = {}
        self._valueless = len(slots)
        self._value_bytes: Array = np.zeros(len(slots), dtype=np.int64)

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

    def _steps_before(self, name: str) -> Array:
        """Steps of each trajectory before those in a column's file, int64 [n]."""
        return np.zeros_like(self._before) if self._schema[name].trajectory else self._before

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
            "rows", [(high - low) * int(self._places[name][2]) for name, (low, high) in bounds.items()]
        )
        self._staged = dict(zip(bounds, taken, strict=True))
        if self._schema.mutable:  # first: what is filled by then is there when it is copied
            self._stage_mutable()
        self._under_ticket = held
        for name, (low, high) in bounds.items():
            if high > low and name not in self._schema.mutable:
                self._copy(name, self._staged[name], low, high)
        if self._schema.ragged:
            self._stage_values(most_bytes, arena)
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
        sizes = sizes + self._value_bytes
        return len(sizes) - int(np.searchsorted(np.cumsum(sizes[::-1]), most_bytes, side="right"))

    def has_lost(self, most_bytes: int) -> bool:
        """Whether one of the newest trajectories, which have so many bytes, is lost."""
        return bool(self.lost[self._newest(most_bytes) :].any())

    def piece(self, name: str, buffer: Array, begin: int, end: int) -> Array:
        """Rows `begin` to `end` - 1 of a column, uint8 [bytes]: copied into a buffer, or where all have been staged.

        Pieces of a ragged column follow one another: its records say which of all values those of a row are.
        """
        if name not in self._value_ends:
            return self._rows(name, buffer, begin, end)
        rows = self._rows(name, np.empty_like(buffer), begin, end)
        self._number(name, rows, buffer, begin, end)
        return buffer

    def _rows(self, name: str, buffer: Array, begin: int, end: int) -> Array:
        """`piece`, with records as they are."""
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

        def copy() -> None:
            elsewhere = self._copy_blocks(name, buffer, begin, end)
            if len(elsewhere):
                self._read(name, buffer, begin, end, elsewhere)

        self._with_ticket(copy)
        if name in self._value_ends and name in self._schema.late:
            first, ends = self.bounds(name)
            low = int(np.searchsorted(ends, begin, side="right"))
            high = int(np.searchsorted(first, end, side="left"))
            lacks = self.filled[low:high] & self._schema.late_bits([name]) == 0
            counts = np.minimum(ends[low:high], end) - np.maximum(first[low:high], begin)
            buffer.reshape(end - begin, -1)[np.repeat(lacks, counts)] = 0  # their records name nothing
        if name in self._groups and self.shared is not None:
            buffer.reshape(end - begin, -1)[~self.shared.brings[begin:end]] = 0

    def _with_ticket(self, copy: Callable[[], None]) -> None:
        """Call a function that copies from blocks.

        Blocks that go to others when their trajectory is moved to disk are not recognised without a ticket.
        """
        ticket = Ticket()
        try:
            if self._reader is not None and not self._under_ticket:
                self._index.reader.begin_read(ticket)
            copy()
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
            self._steps_before(name),
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
        offset = np.zeros(len(which), dtype=np.int64) if once else low - first[which] + self._before[which]
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

    # ---------------------------------------------------------------- ragged values

    def value_rows(self, name: str) -> int:
        """Rows of the values of a ragged column whose pieces have been taken."""
        return int(self._value_ends[name][-1])

    def piece_of_values(self, name: str, buffer: Array, begin: int, end: int) -> Array:
        """Rows `begin` to `end` - 1 of the values of such a column, uint8 [bytes]; see `piece`."""
        size, ends = self._schema.ragged[name].row_bytes, self._value_ends[name]
        split = int(ends[self._valueless - 1]) if self._valueless else 0
        middle = min(max(begin, split), end)
        if middle > begin:
            self._copy_values(name, buffer[: (middle - begin) * size], ends, begin, middle)
        if end > middle:
            staged = self._staged_values[name][(middle - split) * size : (end - split) * size]
            if middle == begin:
                return staged
            buffer[(middle - begin) * size :] = staged
        return buffer

    def _number(self, name: str, rows: Array, buffer: Array, begin: int, end: int) -> None:
        """Make records of the values in memory those of the values in the file."""
        counts, last = self._counted(name, rows), self.bounds(name)[1]
        ends = self._value_ends[name]
        low, high = np.searchsorted(last, (begin, end), side="right").tolist()
        # A trajectory that goes on from the piece before has noted there where that one ended.
        before = 0 if begin == 0 else int(ends[low])
        following = np.cumsum(counts) + before
        records = buffer.view(np.int64).reshape(-1, 2)
        records[:, 0], records[:, 1] = following - counts, counts
        ends[low:high] = following[last[low:high] - begin - 1]
        ends[high : high + 1] = following[-1]

    def _counted(self, name: str, rows: Array) -> Array:
        """Rows of the values of records, int64 [n]."""
        records = rows.view(np.int64).reshape(-1, 2)
        counts = value_rows_of(records)
        assert self._payload is not None
        inside, most = records[:, 0] >= 0, self._payload.most_rows(self._schema.ragged[name])
        if counts.min() < 0 or (counts[inside] > most).any():
            raise self._index.arrays.corrupt(f"a record of column {name!r} is invalid")
        return counts

    def _stage_values(self, most_bytes: int, arena: Arena) -> None:
        """Copy values of the newest trajectories whose records have been staged into memory."""
        low = min(self._unstaged[name] for name in self._value_ends)
        if low == len(self.slots):
            return
        ends = {}
        for name, values in self._schema.ragged.items():
            first = self.bounds(name)[0][low:]
            totals = np.add.reduceat(self._counted(name, self._staged[name]), first - first[0])
            self._value_bytes[low:] += totals * values.row_bytes
            ends[name] = np.concatenate((np.zeros(low, dtype=np.int64), np.cumsum(totals)))
        self._valueless = start = max(low, self._newest(most_bytes))
        spans = {name: (int(rows[start - 1]) if start else 0, int(rows[-1])) for name, rows in ends.items()}
        sizes = {name: self._schema.ragged[name].row_bytes for name in spans}
        memory = arena.take("values", [(high - low) * sizes[name] for name, (low, high) in spans.items()])
        self._staged_values = dict(zip(spans, memory, strict=True))
        for name, (begin, end) in spans.items():
            if end > begin:
                self._copy_values(name, self._staged_values[name], ends[name], begin, end)

    def _copy_values(self, name: str, out: Array, ends: Array, begin: int, end: int) -> None:
        """Copy rows of the values of trajectories, and zeros in the place of those that are lost.

        Args:
            out: uint8 [bytes]. ends: int64 [n], row behind the values of each trajectory.
        """
        size, payload = self._schema.ragged[name].row_bytes, self._payload
        assert payload is not None
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(ends, end, side="left")) + 1
        before = int(ends[low - 1]) if low else 0
        first, last = self.bounds(name)
        base = int(first[low])
        records: Array = np.empty((int(last[high - 1]) - base) * 16, dtype=np.uint8)

        def copy() -> None:
            while True:
                rows = self._rows(name, records, base, int(last[high - 1])).view(np.int64).reshape(-1, 2)
                lost = np.flatnonzero(self._states[low:high] == LOST) + low
                if len(lost):
                    rows = rows.copy()
                    for i in lost.tolist():  # their records may be zeros now
                        rows[first[i] - base : last[i] - base] = 0
                        rows[first[i] - base] = _NOWHERE, ends[i] - (ends[i - 1] if i else 0)
                try:
                    values = self._schema.ragged[name]
                    bad = payload.copy(values, rows, begin - before, end - begin, out)
                except LostRowsError as error:
                    which = np.isin(self.slots[low:high], error.slots)
                    self._states[low:high][which] = LOST
                    continue
                except MovedRowsError:
                    continue
                except StaleIndexError:  # of those on disk, whatever ticket is held
                    away = np.logical_or.reduceat(rows[:, 0] < 0, first[low:high] - base)
                    others = self._index.arrays.sequence[self.slots[low:high]] != self._sequences[low:high]
                    self._states[low:high][away & others] = LOST
                    continue
                self._note_lost(low, high)
                gone = np.flatnonzero(self._states[low:high] == LOST) + low
                if bad <= len(lost):
                    break
                if len(gone) == len(lost):
                    raise self._index.arrays.corrupt(f"values of column {name!r} lie outside of their memory")
            for i in gone.tolist():
                start = max(begin, int(ends[i - 1]) if i else 0) - begin
                out[max(0, start) * size : max(0, min(end, int(ends[i])) - begin) * size] = 0

        self._with_ticket(copy)

    def _note_lost(self, low: int, high: int) -> None:
        """Note which of some trajectories have been evicted, unless a ticket keeps their values."""
        if not self._under_ticket:
            arrays, slots = self._index.arrays, self.slots[low:high]
            gone = (arrays.state[slots] != READY) | (arrays.sequence[slots] != self._sequences[low:high])
            self._states[low:high][gone] = LOST
