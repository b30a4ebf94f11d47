"""Transfer lists for spans of steps in an owner's region, whose block tables are read from the owner, too."""

from __future__ import annotations

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.native.compile import compiled
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.nixl_intervals import Intervals
from gear_loader.transport.nixl_plan import add_transfer, check_schema
from gear_loader.transport.spec import PackedSpec
from gear_loader.utils.arrays import Array

__all__ = ["SpanReads", "SpanRows"]

OFFSET, STRIDE, STEP_BYTES, OUT, ONCE = range(5)
"""One row a column, int64: offset in the region, bytes from block to block, bytes of a step; offset in the reply;
whether it is a column per trajectory, whose value is in the trajectory's first block."""


@compiled
def _walk(  # type: ignore[no-untyped-def]
    columns, which, firsts, counts, starts, ids, places, heads, block_steps, base, out_base, remote, local
) -> int:
    """Write the transfers of some rows into `remote` and `local`; return their number.

    Args:
        which: int64 [m], the rows. firsts, counts, starts: int64 [n], first step, steps, and place in the reply.
        ids: int32, valid block ids: those of row b begin at ``places[b]``, int64 [n]; with `heads` (0 or 1) the first
            of them is the trajectory's first block, and the blocks of the steps follow.
    """
    count = 0
    for c in range(columns.shape[0]):
        stride, size = columns[c, STRIDE], columns[c, STEP_BYTES]
        for b in which:
            step, end = firsts[b], firsts[b] + counts[b]
            target = columns[c, OUT] + starts[b] * size
            place = places[b] + heads
            if columns[c, ONCE]:
                step, end = np.int64(0), np.int64(1)
                target, place = columns[c, OUT] + b * size, places[b]
            while step < end:
                inside = step % block_steps
                take = min(block_steps - inside, end - step)
                source = base + columns[c, OFFSET] + np.int64(ids[place]) * stride + inside * size
                count = add_transfer(remote, local, count, source, out_base + target, take * size)
                target += take * size
                step += take
                place += 1
    return count


class SpanRows:
    """The spans of one fetch, copied, so that the caller can reuse its arrays.

    Args:
        slots, firsts, generations, counts: int64 [n]: trajectory, first step, generation, number of steps.

    Attributes:
        starts: place of each one's first step in the reply, int64 [n]. total: steps together.

    Raises:
        SchemaError: other shapes or dtypes.
    """

    def __init__(self, slots: Array, firsts: Array, generations: Array, counts: Array) -> None:
        given = {"slots": slots, "firsts": firsts, "generations": generations, "counts": counts}
        for name, array in given.items():
            if array.dtype != np.int64 or array.shape != (len(slots),):
                raise SchemaError(
                    f"{name} is {array.dtype} {list(array.shape)}; expected int64 [{len(slots)}]."
                )
        self.slots, self.firsts, self.generations = slots.copy(), firsts.copy(), generations.copy()
        self.counts = counts.copy()
        self.starts: Array = np.cumsum(counts) - counts
        self.total = int(counts.sum())

    def __len__(self) -> int:
        return len(self.slots)


class SpanReads:
    """What a fetch of spans reads, and where it goes.

    Args:
        spec: the columns. described: the owner's memory. rows: of the fetch.

    Attributes:
        record_bytes: memory for the records of a packed table, out of which `split` copies the columns.

    Raises:
        TransportError: the owner has other columns, or an invalid slot or span; nothing was read.
    """

    def __init__(self, spec: PackedSpec, described: Description, rows: SpanRows) -> None:
        check_schema(spec.table, spec.schema, described)
        self._spec, self._described, self._rows = spec, described, rows
        self._check()
        block_steps = described.numbers["block_steps"]
        self._first_blocks = rows.firsts // block_steps
        blocks = (rows.firsts + rows.counts - 1) // block_steps - self._first_blocks + 1
        self._blocks = np.where(rows.counts > 0, blocks, 0)
        places = dict(zip(described.schema, described.columns, strict=True))
        table, self._splits = [], []
        records: dict[tuple[int, int, int], int] = {}  # place and strides of a record -> offset in its memory
        self.record_bytes = 0
        for span in spec.spans(len(rows), rows.total):
            place = places[spec.columns[span.name]]
            if not place.is_packed:
                table.append(
                    (place.offset, place.block_stride, place.step_bytes, span.offset, int(span.once))
                )
                continue
            key = place.base, place.block_stride, place.step_stride
            if key not in records:
                records[key] = self.record_bytes
                self.record_bytes += rows.total * place.step_stride
            self._splits.append((span, records[key], place))
        listed = [(*key, begin, 0) for key, begin in records.items()]
        self._columns, self._records = (
            np.array(part, dtype=np.int64).reshape(-1, ONCE + 1) for part in (table, listed)
        )
        self._heads = int(self._columns[:, ONCE].any())
        self._widths = self._blocks + self._heads
        self._places: Array = np.cumsum(self._widths) - self._widths

    def _check(self) -> None:
        rows, numbers = self._rows, self._described.numbers
        most = numbers["max_steps"]
        wrong = (rows.slots < 0) | (rows.slots >= numbers["num_slots"])
        wrong |= (rows.firsts < 0) | (rows.counts < 0) | (rows.firsts > most) | (rows.counts > most)
        if wrong.any():
            row = int(np.argmax(wrong))
            raise TransportError(
                f"Row {row} of {len(rows)} of table {self._spec.table!r} has slot {rows.slots[row]} and "
                f"{rows.counts[row]} steps from step {rows.firsts[row]} on; expected slots below "
                f"{numbers['num_slots']:,} and spans within {most:,} steps. Nothing was read."
            )

    # ---------------------------------------------------------------- the owner's index

    def extents(self) -> Intervals:
        """Where the extents of the rows lie: int64 [3] each."""
        numbers, slots = self._described.numbers, self._rows.slots
        return Intervals(
            numbers["base"] + numbers["extent"], 24 * slots, np.full(len(slots), 24, np.int64), np.int64
        )

    def lacking(self, extents: Array) -> Array:
        """Which rows have a trajectory without their steps, by extents int64 [n, 3]; bool [n]."""
        found: Array = extents[:, 0] < self._rows.firsts + self._rows.counts
        return found

    def block_ids(self, extents: Array, which: Array) -> tuple[Intervals, Array]:
        """Where the block ids of rows lie.

        Args:
            extents: int64 [n, 3]. which: bool [n], the rows that are to be read.

        Returns:
            The intervals, and which rows have theirs there, bool [n]: the others have no valid block table.
        """
        numbers = self._described.numbers
        begins, entries = extents[:, 1], 2 * numbers["half"]
        last = np.maximum(self._first_blocks + self._blocks, self._heads)
        there = which & (begins >= 0) & (begins <= entries) & (begins + last <= entries)
        rows = np.flatnonzero(there)
        # A row's own blocks, after its first block if that is needed.
        starts, sizes = begins[rows] + self._first_blocks[rows], self._blocks[rows]
        if self._heads:
            starts = np.stack((begins[rows], starts), 1).reshape(-1)
            sizes = np.stack((np.ones_like(sizes), sizes), 1).reshape(-1)
        return Intervals(numbers["base"] + numbers["block_ids"], 4 * starts, 4 * sizes, np.int32), there

    def listed(self, ids: Array, there: Array) -> Array:
        """Block ids by row, int32, -1 for rows without; from the ids of the rows `there`, in order."""
        found: Array = np.full(int(self._widths.sum()), -1, dtype=np.int32)
        found[np.repeat(there, self._widths)] = ids
        return found

    def valid(self, ids: Array) -> Array:
        """Which rows have block ids of the table only, bool [n], by the result of `listed`."""
        wrong = (ids < 0) | (ids >= self._described.numbers["num_blocks"])
        rows = np.repeat(np.arange(len(self._rows)), self._widths)
        found: Array = np.bincount(rows[wrong], minlength=len(self._rows)) == 0
        return found

    def differ(self, one: Array, other: Array, which: Array) -> bool:
        """Whether the block ids of some of the rows, bool [n], differ between two results of `listed`."""
        return bool((one != other)[np.repeat(which, self._widths)].any())

    # ---------------------------------------------------------------- steps

    def pieces(self, ids: Array, which: Array, out: Array, records: Array) -> tuple[Array, Array]:
        """Transfers of the steps of rows.

        Args:
            ids: result of `listed`. which: bool [n], rows whose ids are `valid`.
            out: uint8, the reply. records: uint8 [record_bytes].

        Returns:
            Remote and local sides, int64 [p, 5] each. Remote addresses are always inside the table's columns.
        """
        rows, numbers, places = self._rows, self._described.numbers, np.flatnonzero(which)
        sides = []
        for columns, memory in ((self._columns, out), (self._records, records)):
            once = int(columns[:, ONCE].sum())
            most = (len(columns) - once) * int(self._blocks[places].sum()) + once * len(places)
            remote, local = np.empty((most, 5), dtype=np.int64), np.empty((most, 5), dtype=np.int64)
            count = _walk(
                columns,
                places,
                rows.firsts,
                rows.counts,
                rows.starts,
                ids,
                self._places,
                self._heads,
                numbers["block_steps"],
                numbers["base"],
                memory.ctypes.data,
                remote,
                local,
            )
            sides.append((remote[:count], local[:count]))
        remotes, locals_ = zip(*sides, strict=True)
        return np.concatenate(remotes), np.concatenate(locals_)

    def split(self, records: Array, out: Array) -> None:
        """Copy the columns out of the records that were read."""
        total = self._rows.total
        for span, begin, place in self._splits:
            read = records[begin : begin + total * place.step_stride].reshape(total, place.step_stride)
            steps = out[span.offset : span.offset + total * span.step_bytes].reshape(total, span.step_bytes)
            steps[:] = read[:, place.inside : place.inside + span.step_bytes]

    def clear(self, gone: Array, out: Array) -> None:
        """Fill the bytes of rows, bool [n], with zeros."""
        rows = self._rows
        steps = np.repeat(gone, rows.counts)
        for span in self._spec.spans(len(rows), rows.total):
            which = gone if span.once else steps
            end = span.offset + len(which) * span.step_bytes
            out[span.offset : end].reshape(len(which), span.step_bytes)[which] = 0
