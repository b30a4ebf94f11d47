"""What a one-sided fetch reads out of an owner's memory: lists of transfers, for windows and for spans of steps.

The blocks of windows come with their rows. Those of spans are read from the owner first, as a few `Intervals`.
"""

from __future__ import annotations

import abc
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_loader.collection.plans import PADS
from gear_loader.errors import SchemaError, TransportError
from gear_loader.kernels.plan import PAD_EDGE, PAD_HEAD, PAD_TAIL
from gear_loader.native.compile import compiled, inlined
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.layout import ColumnLayout
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.spec import PackedSpec, WindowSpec
from gear_loader.utils.arrays import Array

_Target = tuple[str | None, int, int, Array, tuple[int, int, int, int, int]]

_WORTH = 256  # bytes that cost as much as another transfer; gaps of up to this size are read, too
_NO_WINDOW = -1

assert (PAD_HEAD, PAD_TAIL, PAD_EDGE) == (
    1,
    2,
    3,
)  # constants of the compiled function, which is cached on disk

OFFSET, STRIDE, STEP_BYTES, OUT, ONCE, LENGTH, FIRST, PAD, FINAL = range(9)
"""One row a column, int64: offset in the region, bytes from block to block, bytes of a step; offset in the reply;
whether it is a column per trajectory, whose value is in the trajectory's first block; steps of the window, `_NO_WINDOW`
for spans, its offset and padding, and whether it reads final steps. Of a mask the first three are 0, 0, 1."""


class Intervals:
    """Intervals of memory, and the transfers that read them; they may overlap.

    Args:
        base: address at the owner from which they are counted.
        starts, sizes: int64 [n], bytes; multiples of the item size of `dtype`.
        dtype: of the values, of at most 8 bytes each.

    Attributes:
        nbytes: bytes of the local memory that a read fills.
    """

    def __init__(self, base: int, starts: Array, sizes: Array, dtype: Any) -> None:
        self._base, self._dtype = base, np.dtype(dtype)
        self._counts = sizes // self._dtype.itemsize
        order = np.argsort(starts, kind="stable")
        order = order[sizes[order] > 0]
        begins, ends = starts[order], np.maximum.accumulate((starts + sizes)[order])
        gap = _WORTH
        if len(order) and ends[-1] - begins[0] <= _WORTH * len(order):
            gap = int(ends[-1] - begins[0])  # one transfer from the first to the last
        first = np.ones(len(order), dtype=np.bool_)
        first[1:] = begins[1:] > ends[:-1] + gap
        heads = np.flatnonzero(first)
        self._firsts = begins[heads]
        self._lengths = ends[np.append(heads[1:], len(order))[: len(heads)] - 1] - self._firsts
        padded = -(-self._lengths // 8) * 8
        self._offsets = np.cumsum(padded) - padded
        self.nbytes = int(padded.sum())
        group = np.cumsum(first) - 1
        self._places = np.zeros_like(starts)
        self._places[order] = self._offsets[group] + begins - self._firsts[group]

    def transfers(self, memory: Array) -> tuple[Array, Array]:
        """Remote and local sides of the transfers into `memory`, uint8 [nbytes or more]; int64 [p, 5] each."""
        sides = self._base + self._firsts, memory.ctypes.data + self._offsets
        one, zero = np.ones_like(self._lengths), np.zeros_like(self._lengths)
        remote, local = (np.stack((each, self._lengths, zero, self._lengths, one), 1) for each in sides)
        return remote, local

    def values(self, memory: Array) -> Array:
        """A copy of the values that were read into `memory`, one interval after another."""
        size = self._dtype.itemsize
        read: Array = memory[: self.nbytes].view(self._dtype)
        found: Array = read[ranges(self._places // size, self._counts)]
        return found


@inlined
def _add_transfer(remote, local, count, source, where, many):  # type: ignore[no-untyped-def]
    """Append a transfer of so many bytes to both lists of `count`, or to its predecessor if it goes on there.

    Returns:
        The number of transfers.
    """
    if (
        count > 0
        and remote[count - 1, 0] + remote[count - 1, 1] == source
        and local[count - 1, 0] + local[count - 1, 1] == where
    ):
        for each in (remote, local):
            each[count - 1, 1] += many
            each[count - 1, 3] += many
        return count
    remote[count, 0], local[count, 0] = source, where
    for each in (remote, local):
        each[count, 1], each[count, 2], each[count, 3], each[count, 4] = many, 0, many, 1
    return count + 1


@compiled
def _walk(  # type: ignore[no-untyped-def]
    columns,
    which,
    spans,
    extent,
    ids,
    bounds,
    heads,
    block_steps,
    num_blocks,
    base,
    out,
    out_base,
    remote,
    local,
) -> int:
    """Write padding and masks into `out`, and the transfers of some rows into `remote` and `local`.

    Args:
        columns: int64 [C, 9]. which: int64 [m], the rows.
        spans: int64 [3, n]: of a row first step, steps, and place in the reply; with windows only the anchor.
        extent: int64 [n, 3]: steps (of windows), place in `ids` where the row's blocks begin if it had all of them,
            final steps. ids: int32 [I]; row b has those from ``bounds[b]`` to ``bounds[b + 1]``, int64 [n + 1].
        heads: int64 [n], place of the trajectory's first block, where columns per trajectory are read.
        base: address of the region. out_base: address of `out`.

    Returns:
        The number of transfers; or -1 - b if row b has an invalid block.
    """
    transfers = 0
    for c in range(columns.shape[0]):
        stride, size = columns[c, STRIDE], columns[c, STEP_BYTES]
        length, pad = columns[c, LENGTH], columns[c, PAD]
        for b in which:
            at, count, place, steps, first = spans[0, b], spans[1, b], spans[2, b], extent[b, 0], extent[b, 1]
            if columns[c, ONCE]:
                at, count, place, steps, first = np.int64(0), np.int64(1), np.int64(b), np.int64(1), heads[b]
            elif length != _NO_WINDOW:
                steps += extent[b, 2] * columns[c, FINAL]
                begin = at + columns[c, FIRST]
                at = min(max(begin, 0), steps)
                count = max(min(begin + length, steps), at) - at
                head = np.int64(0)
                if pad == PAD_HEAD:
                    head = length - count
                elif pad != PAD_TAIL:
                    head = at - begin if count > 0 else length
                place = b * length + head
                zeros = columns[c, OUT] + (place - head) * size
                out[zeros : zeros + head * size] = 0
                out[zeros + (head + count) * size : zeros + length * size] = 0
                if stride == 0:
                    out[zeros + head : zeros + head + count] = 1
                    continue
                if pad == PAD_EDGE:  # each step of the padding is a transfer of its own
                    at, count, place = begin, length, b * length
            end, target = at + count, columns[c, OUT] + place * size
            while at < end:
                step = min(max(at, 0), steps - 1) if length != _NO_WINDOW else at
                block = step // block_steps
                inside = step - block * block_steps
                take = np.int64(1)
                if at == step:
                    take = min(block_steps - inside, end - at)
                    if length != _NO_WINDOW:
                        take = min(take, steps - step)
                number = first + block
                if (
                    number < bounds[b]
                    or number >= bounds[b + 1]
                    or ids[number] < 0
                    or ids[number] >= num_blocks
                ):
                    return -1 - b  # type: ignore[no-any-return]
                source = base + columns[c, OFFSET] + np.int64(ids[number]) * stride + inside * size
                transfers = _add_transfer(remote, local, transfers, source, out_base + target, take * size)
                target += take * size
                at += take
    return transfers


class Rows:
    """The rows of one fetch, copied, so that the caller can reuse its arrays.

    Args:
        given: int64 [FIELDS, n], as `Spec.checked` returns them.

    Attributes:
        slots, generations: int64 [n]. spans: int64 [3, n], as `_walk` takes them.
        extent, block_ids: of windows, as for `NixlPeer.fetch`; else None.
    """

    def __init__(self, given: Array, extent: Array | None = None, block_ids: Array | None = None) -> None:
        n = given.shape[1]
        for name, array, dtype, shape in (
            ("extent", extent, np.int64, (n, 3)),
            ("block_ids", block_ids, np.int32, (n, None)),
        ):
            if array is not None and (
                array.dtype != dtype or array.ndim != 2 or shape not in (array.shape, (len(array), None))
            ):
                expected = f"{np.dtype(dtype).name} [{n}, {shape[1] or 'K'}]"
                raise SchemaError(f"{name} is {array.dtype} {list(array.shape)}; expected {expected}.")
        self.slots, self.generations = given[0], given[2]
        self.extent, self.block_ids = (None if each is None else each.copy() for each in (extent, block_ids))
        self.spans: Array = np.zeros((3, n), dtype=np.int64)
        self.spans[: len(given) - 2] = given[1::2]
        self.spans[2] = np.cumsum(self.spans[1]) - self.spans[1]

    def __len__(self) -> int:
        return len(self.slots)


class Reads(abc.ABC):
    """What a fetch reads, and where it goes.

    Args:
        spec: of the reply. described: the owner's memory. rows: of the fetch.

    Attributes:
        record_bytes: memory for the records of a packed table, out of which `split` copies the columns.

    Raises:
        TransportError: the owner has other columns, or an invalid slot or row; nothing was read.
    """

    _blocks: Array
    """Of spans: the number of blocks of each row, int64 [n]."""

    def __init__(self, spec: WindowSpec | PackedSpec, described: Description, rows: Rows) -> None:
        if spec.schema.to_json() != described.schema.to_json():
            raise TransportError(
                f"Table {spec.table!r} has the columns {described.schema.to_json()} at its owner; expected "
                f"{spec.schema.to_json()}."
            )
        self._table, self._described, self._rows = spec.table, described, rows
        self._check(self._wrong())
        self._targets = list(self._targets_of(spec))
        places = dict(zip(described.schema, described.columns, strict=True))
        table: list[tuple[int, ...]] = []
        # Place, strides and window of a record -> offset in its memory.
        records: dict[tuple[int, ...], int] = {}
        self._splits: list[tuple[int, int, int, ColumnLayout]] = []
        self.record_bytes = 0
        for column, offset, _, repeats, window in self._targets:
            place = None if column is None else places[column]
            if place is None:
                table.append((0, 0, 1, offset, *window))
            elif not place.is_packed:
                table.append((place.offset, place.block_stride, place.step_bytes, offset, *window))
            else:
                key, count = (place.base, place.block_stride, place.step_stride, *window), int(repeats.sum())
                if key not in records:
                    records[key] = self.record_bytes
                    self.record_bytes += count * place.step_stride
                self._splits.append((records[key], offset, count, place))
        listed = [(*key[:3], begin, *key[3:]) for key, begin in records.items()]
        self._columns, self._records = (
            np.array(part, dtype=np.int64).reshape(-1, FINAL + 1) for part in (table, listed)
        )

    @abc.abstractmethod
    def _targets_of(self, spec: Any) -> Iterator[_Target]:
        """The pieces of the reply: column, or None for a mask; offset; bytes of a value; how many values each row has,
        int64 [n]; the last five fields of `_walk`'s columns."""

    @abc.abstractmethod
    def _wrong(self) -> Array:
        """Which rows no table has, bool [n]."""

    @abc.abstractmethod
    def _shown(self, row: int) -> str:
        """A row, and what was expected, for errors."""

    def _check(self, wrong: Array) -> None:
        if wrong.any():
            row = int(np.argmax(wrong))
            numbers = self._described.numbers
            raise TransportError(
                f"Row {row} of {len(self._rows)} of table {self._table!r} has slot {self._rows.slots[row]}, "
                f"{self._shown(row)} within {numbers['max_steps']:,} steps, slots below {numbers['num_slots']:,} and "
                f"blocks below {numbers['num_blocks']:,}. Nothing was read."
            )

    def _outside(self) -> Array:
        slots = self._rows.slots
        found: Array = (slots < 0) | (slots >= self._described.numbers["num_slots"])
        return found

    def _transfers(
        self, which: Array, extent: Array, ids: Array, bounds: Array, heads: Array, out: Array, records: Array
    ) -> tuple[Array, Array]:
        """Transfers of the steps of rows, int64 [m], and padding and masks; arguments as for `_walk`.

        Args:
            out: uint8, the reply. records: uint8 [record_bytes].

        Returns:
            Remote and local sides, each int64 [p, 5]: address, bytes, 0, bytes, 1. Remote addresses are always inside
            the table's columns.

        Raises:
            TransportError: an invalid block.
        """
        numbers, sides = self._described.numbers, []
        steps = numbers["block_steps"]
        for columns, memory in ((self._columns, out), (self._records, records)):
            most = 0
            for _, stride, _, _, once, length, _, pad, _ in columns.tolist():
                if once:
                    most += len(which)
                elif length == _NO_WINDOW:
                    most += int(self._blocks[which].sum())
                elif stride:
                    blocks = (min(length, numbers["max_steps"] + 1) - 1) // steps + 2
                    most += len(which) * (blocks + length * (pad == PAD_EDGE))
            remote, local = np.empty((most, 5), dtype=np.int64), np.empty((most, 5), dtype=np.int64)
            count = _walk(
                *(columns, which, self._rows.spans, extent, ids, bounds, heads),
                *(steps, numbers["num_blocks"], numbers["base"], memory, memory.ctypes.data, remote, local),
            )
            if count < 0:
                self._check(np.arange(len(self._rows)) == -1 - count)
            sides.append((remote[:count], local[:count]))
        remotes, locals_ = zip(*sides, strict=True)
        return np.concatenate(remotes), np.concatenate(locals_)

    def split(self, records: Array, out: Array) -> None:
        """Copy the columns out of the records that were read."""
        for begin, offset, count, place in self._splits:
            read = records[begin : begin + count * place.step_stride].reshape(count, place.step_stride)
            steps = out[offset : offset + count * place.step_bytes].reshape(count, place.step_bytes)
            steps[:] = read[:, place.inside : place.inside + place.step_bytes]

    def clear(self, gone: Array, out: Array) -> None:
        """Fill the bytes of rows, bool [n], with zeros."""
        for _, offset, size, repeats, _ in self._targets:
            which = np.repeat(gone, repeats)
            out[offset : offset + len(which) * size].reshape(len(which), size)[which] = 0


class WindowReads(Reads):
    """Windows, whose rows bring their blocks along."""

    def _targets_of(self, spec: WindowSpec) -> Iterator[_Target]:
        for piece in spec.pieces(len(self._rows)):
            window, source = spec.windows[piece.name], spec.sources[piece.name]
            column = spec.schema[source]
            repeats = np.full(len(self._rows), window.length)
            own = int(column.trajectory), window.length, window.offset, PADS[window.pad], int(column.final)
            is_mask = piece.kind == "mask"
            size = 1 if is_mask else column.step_bytes
            yield None if is_mask else source, piece.offset, size, repeats, own

    def _wrong(self) -> Array:
        extent = self._rows.extent
        assert extent is not None
        lengths, finals = extent[:, 0], extent[:, 2]
        wrong = self._outside() | (lengths < 1) | (lengths > self._described.numbers["max_steps"])
        wrong |= (finals < 0) | (finals > 1) | (np.abs(self._rows.spans[0]) >= 2**40)
        return wrong

    def _shown(self, row: int) -> str:
        rows = self._rows
        assert rows.extent is not None
        assert rows.block_ids is not None
        return (
            f"anchor {rows.spans[0, row]}, extent {rows.extent[row].tolist()} and blocks "
            f"{rows.block_ids[row].tolist()}; expected a block of every step of its windows, lengths of 1 or more"
        )

    def pieces(self, out: Array, records: Array) -> tuple[Array, Array]:
        """Transfers of all rows; see `_transfers`."""
        rows, ids, extent = np.arange(len(self._rows)), self._rows.block_ids, self._rows.extent
        assert ids is not None
        assert extent is not None
        bounds = np.arange(len(ids) + 1) * ids.shape[1]
        return self._transfers(rows, extent, ids.reshape(-1), bounds, bounds[1:] - 1, out, records)


class SpanReads(Reads):
    """Spans, whose block tables are read from the owner, too."""

    def __init__(self, spec: PackedSpec, described: Description, rows: Rows) -> None:
        super().__init__(spec, described, rows)
        firsts, counts, _ = rows.spans
        block_steps = described.numbers["block_steps"]
        self._first_blocks = firsts // block_steps
        blocks = (firsts + counts - 1) // block_steps - self._first_blocks + 1
        self._blocks = np.where(counts > 0, blocks, 0)
        self._heads = int(self._columns[:, ONCE].any())
        self._widths = self._blocks + self._heads
        self._bounds: Array = np.append(0, np.cumsum(self._widths))

    def _targets_of(self, spec: PackedSpec) -> Iterator[_Target]:
        ones, counts = np.ones(len(self._rows), dtype=np.int64), self._rows.spans[1]
        for span in spec.spans(len(self._rows), int(counts.sum())):
            own = int(span.once), _NO_WINDOW, 0, 0, 0
            repeats = ones if span.once else counts
            yield spec.columns[span.name], span.offset, span.step_bytes, repeats, own

    def _wrong(self) -> Array:
        (firsts, counts, _), most = self._rows.spans, self._described.numbers["max_steps"]
        wrong: Array = self._outside() | (firsts < 0) | (counts < 0) | (firsts > most) | (counts > most)
        return wrong

    def _shown(self, row: int) -> str:
        first, count, _ = self._rows.spans[:, row].tolist()
        return f"{count} steps from step {first} on; expected spans"

    # ---------------------------------------------------------------- the owner's index

    def extents(self) -> Intervals:
        """Where the extents of the rows lie: int64 [3] each."""
        numbers, slots = self._described.numbers, self._rows.slots
        return Intervals(
            numbers["base"] + numbers["extent"], 24 * slots, np.full(len(slots), 24, np.int64), np.int64
        )

    def lacking(self, extents: Array) -> Array:
        """Which rows have a trajectory without their steps, by extents int64 [n, 3]; bool [n]."""
        found: Array = extents[:, 0] < self._rows.spans[0] + self._rows.spans[1]
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
        found: Array = np.full(self._bounds[-1], -1, dtype=np.int32)
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

    def pieces(self, ids: Array, which: Array, out: Array, records: Array) -> tuple[Array, Array]:
        """Transfers of rows; see `_transfers`.

        Args:
            ids: result of `listed`. which: bool [n], rows whose ids are `valid`.
        """
        extent = np.zeros((len(which), 3), dtype=np.int64)
        extent[:, 1] = self._bounds[:-1] + self._heads - self._first_blocks
        bounds = self._bounds
        return self._transfers(np.flatnonzero(which), extent, ids, bounds, bounds[:-1], out, records)
