"""Rows of a table's trajectories, one after another, as the files of a segment hold them."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gear_loader.checkpoint.files import Arena
from gear_loader.checkpoint.snapshot import Snapshot
from gear_loader.errors import StaleIndexError
from gear_loader.native.copying import copy_rows
from gear_loader.storage.disk import LostRowsError, TierReader
from gear_loader.storage.index import Index
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Schema
from gear_loader.utils.arrays import Array

__all__ = ["TrajectoryRows"]


class TrajectoryRows:
    """Copies rows of trajectories out of a table.

    Args:
        index: of the table. schema: its columns. places: their places, see `column_places`.
        trajectories: those whose rows are wanted.
        under_ticket: whether the caller holds the ticket of `trajectories`. Otherwise trajectories may be evicted
            before they are copied; zeros come in their place.
        reader: of trajectories that lie on disk only; None if there are none.

    Attributes:
        first, ends: int64 [n], first row of each trajectory, and the row after its last.
        lost: bool [n], whether each trajectory had been evicted before it was copied.
    """

    def __init__(
        self,
        index: Index,
        schema: Schema,
        places: Mapping[str, Array],
        trajectories: Snapshot,
        *,
        under_ticket: bool,
        reader: TierReader | None = None,
    ) -> None:
        self.trajectories = trajectories
        self.ends = np.cumsum(trajectories.rows)
        self.first = self.ends - trajectories.rows
        self.lost = np.zeros(len(self.ends), dtype=bool)
        self._index, self._schema, self._places, self._under_ticket = index, schema, places, under_ticket
        self._reader = reader
        self._staged: dict[str, Array] = {}
        self._unstaged = len(self.ends)  # trajectories that are not in `_staged`, the first ones

    def bounds(self, name: str) -> tuple[Array, Array]:
        """First row of each trajectory in a column's file, and the row after its last; int64 [n] each."""
        if not self._schema[name].trajectory:
            return self.first, self.ends
        place = np.arange(len(self.ends))
        return place, place + 1

    def stage(self, most_bytes: int, arena: Arena) -> None:
        """Copy the newest trajectories into memory. The caller holds the ticket of the trajectories meanwhile.

        Args:
            most_bytes: of the copies. arena: their memory.
        """
        sizes = self.trajectories.rows * self._schema.step_bytes + self._schema.trajectory_bytes
        self._unstaged = len(sizes) - int(np.searchsorted(np.cumsum(sizes[::-1]), most_bytes, side="right"))
        bounds = {}
        for name in self._schema:
            first, ends = self.bounds(name)
            some = self._unstaged < len(first)
            bounds[name] = (int(first[self._unstaged]), int(ends[-1])) if some else (0, 0)
        taken = arena.take(
            [(high - low) * int(self._places[name][2]) for name, (low, high) in bounds.items()]
        )
        for (name, (low, high)), memory in zip(bounds.items(), taken, strict=True):
            self._staged[name] = memory
            if high > low:
                self._copy(name, memory, low, high, held=True)

    def ready(self, name: str) -> Array | None:
        """All rows of a column, uint8, if all trajectories have been staged; else None."""
        return self._staged.get(name) if self._unstaged == 0 else None

    def filler(self, name: str) -> Callable[[Array, int, int], None]:
        """Return a function that copies rows `begin` to `end` - 1 of a column into a buffer uint8 [bytes]."""
        size = int(self._places[name][2])
        first, ends = self.bounds(name)
        split = int(first[self._unstaged]) if self._unstaged < len(first) else int(ends[-1])

        def fill(buffer: Array, begin: int, end: int) -> None:
            middle = min(max(begin, split), end)
            copied = (middle - begin) * size
            if middle > begin:
                self._copy_live(name, buffer[:copied], begin, middle)
            if end > middle:
                staged = self._staged[name]
                buffer[copied:] = staged[(middle - split) * size : (end - split) * size]

        return fill

    def _copy_live(self, name: str, buffer: Array, begin: int, end: int) -> None:
        if self._under_ticket:
            self._copy(name, buffer, begin, end, held=True)
            return
        ticket = Ticket()
        try:
            self._index.reader.begin_read(ticket)
            self._copy(name, buffer, begin, end, held=False)
            ticket.end()
        finally:
            ticket.end()  # idempotent; a signal handler may raise between `begin_read` and the call above

    def _copy(self, name: str, buffer: Array, begin: int, end: int, *, held: bool) -> None:
        """Copy rows of trajectories, and zeros in the place of those that are lost; under a ticket.

        Args:
            held: whether it is that of the trajectories, so that none can be lost.
        """
        arrays, column = self._index.arrays, self._places[name]
        first, ends = self.bounds(name)
        size = int(column[2])
        low = int(np.searchsorted(ends, begin, side="right"))
        high = int(np.searchsorted(first, end, side="left"))
        here = self.trajectories.take(np.arange(low, high))
        generations = arrays.generation[
            here.slots
        ]  # before the check, so that they are those of the trajectories
        live = np.ones(high - low, dtype=bool) if held else here.live(self._index)
        if not live.all():
            self.lost[low:high] |= ~live
            buffer[:] = 0
        starts = arrays.extent[here.slots, 1]
        spilled = np.flatnonzero(live & (starts < 0)) + low
        if len(spilled):
            live &= starts >= 0
            self._read(name, buffer, begin, end, spilled, generations[spilled - low])
        blocks = np.where(live, arrays.blocks_of(ends[low:high] - first[low:high]), 0)
        places = np.cumsum(blocks) - blocks
        moved = np.repeat(starts - places, blocks)
        ids = arrays.ids_at(moved + np.arange(len(moved)))
        copy_rows(
            buffer.ctypes.data,
            begin * size,
            end * size,
            first[low:high],
            ends[low:high],
            np.where(live, places, -1),
            ids,
            column,
            False,
        )

    def _read(self, name: str, buffer: Array, begin: int, end: int, which: Array, generations: Array) -> None:
        """Read rows of trajectories that lie on disk only, for those of `_copy`; of damaged ones come zeros.

        Args:
            which, generations: int64 [n], positions in `trajectories`, and their generations.
        """
        assert self._reader is not None
        first, ends = self.bounds(name)
        size, once = int(self._places[name][2]), self._schema[name].trajectory
        low, high = np.maximum(first[which], begin), np.minimum(ends[which], end)
        offset = np.zeros(len(which), dtype=np.int64) if once else low - first[which]
        slots = self.trajectories.slots[which]
        while len(which):
            out = {name: (buffer, (low - begin) * size)}
            try:
                self._reader.read(slots, generations, offset, high - low, out)
                return
            except LostRowsError as error:
                bad = np.isin(slots, error.slots)
            except StaleIndexError:
                bad = self._index.arrays.generation[slots] != generations
            for i in np.flatnonzero(bad).tolist():
                buffer[(low[i] - begin) * size : (high[i] - begin) * size] = 0
            self.lost[which[bad]] = True
            which, slots, generations, low, high, offset = (
                part[~bad] for part in (which, slots, generations, low, high, offset)
            )
