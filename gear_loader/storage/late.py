"""Columns that are filled after their trajectory was added; see `Table.fill`.

The bytes are written first, then the trajectory's bit of the column is set: see `gear_loader.storage.filled_bits`.
"""

from __future__ import annotations

import ctypes
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import FilledError, SchemaError, TableFullError
from gear_loader.native.copying import copy_rows
from gear_loader.storage.counters import NUM_TOUCHED, VERSION
from gear_loader.storage.disk_records import rows_of
from gear_loader.storage.engine import Engine
from gear_loader.storage.filled_bits import filled_bits, set_filled
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.late_values import LateValues, check_late, checked_fill
from gear_loader.storage.operations.view import begin_change, end_change
from gear_loader.storage.payload import check_payload_fits, write_steps
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.readers import Ticket
from gear_loader.storage.recalling import Recall
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

_NO_GENERATION = 1 << 62
_ONE: Array = np.zeros(1, dtype=np.int64)
_SMALL = 1 << 17
"""Bytes up to which values are copied under the lock: it takes less time than a read ticket."""


def unfilled(engine: Engine, columns: Sequence[str]) -> tuple[Array, Array]:
    """See `Table.unfilled`."""
    names = list(columns) or list(engine.schema.late)
    check_late(engine.schema, names)
    snapshot = engine.reader().snapshot()
    wanted = engine.schema.late_bits(names)
    missing = (filled_bits(engine.index.arrays, snapshot.slots) & wanted) != wanted
    return snapshot.slots[missing], snapshot.generations[missing]


def fill_columns(
    engine: Engine,
    index: Any,
    generation: Any,
    columns: Mapping[str, Any],
    *,
    strict: bool,
    again: bool = False,
) -> int:
    """See `Table.fill`.

    Args:
        again: whether the call may have been executed before: rows that have these very values are done.
    """
    slots, generations, values = checked_fill(engine.schema, index, generation, columns)
    bits = engine.schema.late_bits(columns)
    if not len(slots):
        return 0
    request = _FillCall(engine, slots, generations, values, bits, strict, again)
    return engine.region.fill_lock.run(request.run)


@dataclasses.dataclass(frozen=True)
class _Located:
    """Rows to fill, under a read ticket.

    Attributes:
        rows: int64 [m], of the request. slots, generations: int64 [m], of their trajectories.
        blocks: column -> block ids, int32 [k], of one row after another.
    """

    rows: Array
    slots: Array
    generations: Array
    blocks: dict[str, Array]


@dataclasses.dataclass
class _FillCall:
    """One call of `fill_columns`, which holds the lock of those who fill.

    Large values are copied without the lock of the index, under a read ticket: nobody reads the bytes of a column that
    is not filled, no other call fills it, and blocks of trajectories that are removed meanwhile are not reused.

    Trajectories that lie on disk only are brought back into memory.
    """

    engine: Engine
    slots: Array
    generations: Array
    values: list[LateValues]
    bits: int
    strict: bool
    again: bool
    done: int = 0  # rows that are filled

    def run(self) -> int:
        """Fill the rows; return the number of stale ones."""
        recall = Recall(self.engine)
        if any(each.ragged is not None for each in self.values):
            self._place()
        size = sum(each.data.size for each in self.values)
        left = np.arange(len(self.slots))
        while True:
            before, ticket = self.done, Ticket()
            left = ticket.during(functools.partial(self._attempt, ticket, size, left))
            if not len(left):
                return len(self.slots) - self.done
            if self.done > before:
                recall.progressed()
            if not recall.bring(self.slots[left]):
                raise TableFullError(
                    f"Timed out after {recall.timeout:g} s: {len(left)} of {len(self.slots)} trajectories of a fill "
                    f"lie on disk only, and there is no room to bring one into memory; {self.done} were filled. Fill "
                    "the others again (`Table.unfilled` lists them), or make the memory of the table larger "
                    "(max_blocks)."
                )

    def _place(self) -> None:
        """Store ragged values, whose records are filled in then. Rows are of the trajectories that are live now.

        If one leaves before it is filled, the values leave with it; if this process dies, they are a part of what their
        trajectory takes.
        """
        index, arrays = self.engine.index, self.engine.index.arrays
        found = [(each, each.ragged) for each in self.values if each.ragged is not None]
        heap, (evict, wait) = self.engine.region.payload(), self.engine.policy

        def live() -> Array:
            live = arrays.live_rows(self.slots, self.generations, strict=self.strict, what="rows are of")
            self._check(rows := np.flatnonzero(live))
            if self.again:  # values of those that are filled are there
                rows = rows[(filled_bits(arrays, self.slots[rows]) & self.bits) != self.bits]
            self.generations[rows] = arrays.generation[self.slots[rows]]
            self.generations[~live] = _NO_GENERATION
            return rows

        while True:
            rows = index.recovery.locked(live)
            if not len(rows):
                return
            slots, generations = self.slots[rows], self.generations[rows]
            runs, sizes, parts = [np.empty((0, 3), dtype=np.int64)], [np.empty(0, dtype=np.int64)], []
            total = 0
            for each, values in found:
                counts, ends = each.lengths[rows], np.cumsum(each.lengths)[rows]
                firsts = np.cumsum(counts) - counts
                at = np.repeat(ends - counts - firsts, counts) + np.arange(counts.sum())
                runs.append(np.stack((np.arange(len(rows)), total + firsts, total + firsts + counts), axis=1))
                sizes.append(values.parts[0, 0, at])
                parts.append((values, at, slice(total, total + len(at))))
                total += len(at)

            def is_there() -> int:
                same = (arrays.state[slots] == READY) & (arrays.generation[slots] == generations)  # noqa: B023
                return 0 if same.all() else -1

            def write(offsets: Array) -> None:
                for values, at, place in parts:  # noqa: B023
                    if not write_steps(values, _ONE, at, heap, offsets[place]):
                        raise arrays.corrupt("a ragged value has a part outside of its memory")

            joined = np.concatenate(sizes)
            payload = Payload(np.concatenate(runs), joined, joined, joined, (), None)
            check_payload_fits(payload, heap.nbytes)
            offsets = index.place_payload(
                heap, payload, slots, generations, evict=evict, wait=wait, check=is_there, then=write
            )
            if len(offsets) == len(joined):
                return

    def _attempt(self, ticket: Ticket, size: int, left: Array) -> Array:
        """Fill those of the rows `left` (int64 [n]) that are in memory, under a read ticket; return those still left.

        Args:
            size: bytes of all values.
        """
        index = self.engine.index
        located, left = index.recovery.locked(functools.partial(self._locate, ticket, left))
        if len(located.rows):
            if size > _SMALL:
                self._copy(located)
            finish = functools.partial(self._finish, located, copies=size <= _SMALL)
            left = np.concatenate((index.recovery.locked(finish), left))
        return left

    def _locate(self, ticket: Ticket, left: Array) -> tuple[_Located, Array]:
        """Check the rows, or raise; the caller holds the lock.

        Args:
            left: int64 [n], those that are not filled.

        Returns:
            Those in memory, readable until the ticket ends, and those that lie on disk only, int64 [m].
        """
        arrays = self.engine.index.arrays
        strict = self.strict and not self.done
        slots, generations = self.slots[left], self.generations[left]
        rows = left[arrays.live_rows(slots, generations, strict=strict, what="rows are of")]
        if not self.done:
            self._check(rows)
        inside = arrays.extent[self.slots[rows], 1] >= 0
        outside, rows = rows[~inside], rows[inside]
        if self.again:
            chosen = self.slots[rows]
            done = (filled_bits(arrays, chosen) & self.bits) == self.bits
            done[done] = self._have(rows[done], chosen[done])
            self.done, rows = self.done + int(done.sum()), rows[~done]
            _check_unfilled(self.engine.schema, arrays, self.slots[rows], self.bits)
        chosen = self.slots[rows]
        ticket.begin(self.engine.index.readers)
        return _Located(rows, chosen, arrays.generation[chosen], self._blocks(rows, chosen)), outside

    def _check(self, rows: Array) -> None:
        """Raise unless live trajectories can be filled; the caller holds the lock."""
        arrays, chosen = self.engine.index.arrays, self.slots[rows]
        _check_distinct(chosen)
        for each in self.values:
            if each.column.trajectory:
                continue
            wrong = np.flatnonzero(each.lengths[rows] != arrays.extent[chosen, 0])
            if len(wrong):
                row, slot = rows[wrong[0]], chosen[wrong[0]]
                raise SchemaError(
                    f"Column {each.name!r} has {each.lengths[row]:,} steps for row {row}; expected "
                    f"{arrays.extent[slot, 0]:,}, as the trajectory of index {slot} has. Nothing was changed."
                )
        if not self.again:
            _check_unfilled(self.engine.schema, arrays, chosen, self.bits)

    def _blocks(self, rows: Array, slots: Array) -> dict[str, Array]:
        """Column -> block ids of the rows, int32 [k]; the caller holds the lock."""
        arrays, found = self.engine.index.arrays, {}
        for each in self.values:
            counts = self._counts(each, rows)
            places = np.cumsum(counts) - counts
            starts = np.repeat(arrays.extent[slots, 1] - places, counts)
            found[each.name] = arrays.ids_at(starts + np.arange(len(starts)))
        return found

    def _counts(self, values: LateValues, rows: Array) -> Array:
        """Blocks of each row in a column, int64 [m]."""
        if values.column.trajectory:
            return np.ones(len(rows), dtype=np.int64)
        counts: Array = -(-values.lengths[rows] // self.engine.region.layout.block_steps)
        return counts

    def _have(self, rows: Array, slots: Array) -> Array:
        """Whether trajectories have the values of these rows, bool [m]; the caller holds the lock."""
        same, blocks = np.ones(len(rows), dtype=bool), self._blocks(rows, slots)
        for each in self.values:
            ends, counts = np.cumsum(each.lengths), self._counts(each, rows)
            column, block_ends = self.engine.region.column(each.name), np.cumsum(counts)
            for i, row in enumerate(rows.tolist()):
                if not same[i]:
                    continue
                ids = blocks[each.name][block_ends[i] - counts[i] : block_ends[i]]
                length = int(each.lengths[row])
                stored = column[ids[:, None], 0] if each.column.trajectory else column[ids]
                stored = stored.reshape(-1, each.data.shape[-1])[:length]
                part = slice(int(ends[row]) - length, int(ends[row]))
                same[i] = (
                    np.array_equal(stored, each.data[part])
                    if each.ragged is None
                    else self._have_values(each, stored, part)
                )
        return same

    def _have_values(self, values: LateValues, stored: Array, part: slice) -> bool:
        """Whether records, uint8 [k, 16], are of the ragged values `part`."""
        assert values.ragged is not None
        assert values.column.ragged is not None
        records = np.ascontiguousarray(stored).view(np.int64)
        sizes, rows, addresses = values.ragged.parts[:, 0, part]
        if not np.array_equal(rows_of(records), rows):
            return False
        found: Array = np.empty(int(sizes.sum()), dtype=np.uint8)
        self.engine.payload.copy(values.column.ragged, records, 0, int(rows.sum()), found)
        ends = np.cumsum(sizes).tolist()
        return all(
            found[end - size : end].tobytes() == ctypes.string_at(address, size)
            for end, size, address in zip(ends, sizes.tolist(), addresses.tolist(), strict=True)
        )

    def _copy(self, located: _Located) -> None:
        """Copy the values into the blocks of the rows."""
        rows = located.rows
        for each in self.values:
            column = self.engine.region.column_place(each.name)
            ends = np.cumsum(each.lengths)
            first, counts = (ends - each.lengths)[rows], self._counts(each, rows)
            data = np.ascontiguousarray(each.data)
            places, ids = np.cumsum(counts) - counts, located.blocks[each.name]
            copy_rows(data.ctypes.data, 0, data.size, first, ends[rows], first[:0], places, ids, column, True)

    def _finish(self, located: _Located, *, copies: bool) -> Array:
        """Set the bits of the rows that are still where they were; the caller holds the lock.

        Args:
            copies: whether to copy the values first, where the rows are.

        Returns:
            Rows that were moved meanwhile, int64 [m].
        """
        arrays = self.engine.index.arrays
        strict = self.strict and not self.done
        live = arrays.live_rows(located.slots, located.generations, strict=strict, what="rows are of")
        inside = live & (arrays.extent[located.slots, 1] >= 0)
        if not copies:
            inside[inside] = self._are_in(located, inside)
        moved: Array = located.rows[live & ~inside]
        rows, chosen = located.rows[inside], located.slots[inside]
        if copies:
            self._copy(_Located(rows, chosen, located.generations[inside], self._blocks(rows, chosen)))
        if not len(chosen):
            return moved
        begin_change(arrays.view)
        set_filled(arrays, chosen, self.bits)
        first = int(arrays.counters[NUM_TOUCHED])
        arrays.touched[np.arange(first, first + len(chosen)) % arrays.num_slots] = chosen
        arrays.counters[NUM_TOUCHED] = first + len(chosen)
        arrays.counters[VERSION] += 1
        end_change(arrays.view)
        self.done += len(chosen)
        return moved

    def _are_in(self, located: _Located, chosen: Array) -> Array:
        """Whether rows that are in memory have the blocks that their values were copied to, bool [m].

        Args:
            chosen: bool [n], these rows of those that were located. The caller holds the lock.
        """
        rows = located.rows[chosen]
        now, same = self._blocks(rows, located.slots[chosen]), np.ones(len(rows), dtype=bool)
        for each in self.values:
            counts = self._counts(each, rows)
            kept = np.repeat(chosen, self._counts(each, located.rows))
            equal = now[each.name] == located.blocks[each.name][kept]
            if len(rows):
                same &= np.logical_and.reduceat(equal, np.cumsum(counts) - counts)
        return same


def _check_unfilled(schema: Schema, arrays: IndexArrays, slots: Array, bits: int) -> None:
    found = filled_bits(arrays, slots) & bits
    if found.any():
        row = int(np.flatnonzero(found)[0])
        names = [name for i, name in enumerate(schema.late) if found[row] >> i & 1]
        raise FilledError(
            f"The trajectory of index {slots[row]} has {names} already; a write-once column is filled once. Nothing "
            "was changed."
        )


def _check_distinct(slots: Array) -> None:
    different, first = np.unique(slots, return_index=True)
    if len(different) != len(slots):
        row = int(np.setdiff1d(np.arange(len(slots)), first)[0])
        raise FilledError(
            f"Index {slots[row]} was given twice; a write-once column is filled once. Nothing was changed."
        )
