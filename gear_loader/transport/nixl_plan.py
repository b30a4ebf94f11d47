"""Transfer lists for the windows of a batch in an owner's region, computed in one compiled pass over the rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.kernels.plan import PAD_EDGE, PAD_HEAD, PAD_KEEP, PAD_TAIL
from gear_loader.native.compile import compiled, inlined
from gear_loader.storage.schema import Schema
from gear_loader.transport.nixl_agent import Description
from gear_loader.transport.spec import Piece, WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["Reads", "Rows", "check_schema", "pieces_of", "reads_of"]

_PADS = {"keep": PAD_KEEP, "head": PAD_HEAD, "tail": PAD_TAIL, "edge": PAD_EDGE}
assert (PAD_HEAD, PAD_TAIL, PAD_EDGE) == (
    1,
    2,
    3,
)  # constants of the compiled function, which is cached on disk

OFFSET, STRIDE, STEP_BYTES, OUT, LENGTH, FIRST, PAD, FINAL, ONCE = range(9)
"""One row a column, int64: offset in the region, bytes from block to block, bytes of a step; offset in the reply;
steps, offset and padding of the window; whether it reads final steps; whether it is a column per trajectory, whose
value is in the last block of the row. Of a mask the first three are 0, 0, 1."""


@inlined
def add_transfer(remote, local, count, source, where, many):  # type: ignore[no-untyped-def]
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
    columns, anchors, extent, ids, block_steps, num_blocks, base, out, out_base, remote, local
) -> int:
    """Write padding and masks into `out`, and the transfers into `remote` and `local`.

    Returns:
        The number of transfers; or -1 - b if row b has an invalid block.
    """
    count = 0
    width = ids.shape[1]
    for c in range(columns.shape[0]):
        stride, size = columns[c, STRIDE], columns[c, STEP_BYTES]
        length, pad = columns[c, LENGTH], columns[c, PAD]
        for b in range(len(anchors)):
            if columns[c, ONCE]:
                number = np.int64(ids[b, width - 1])
                if number < 0 or number >= num_blocks:
                    return -1 - b
                source = base + columns[c, OFFSET] + number * stride
                count = add_transfer(
                    remote, local, count, source, out_base + columns[c, OUT] + b * size, size
                )
                continue
            steps = extent[b, 0] + extent[b, 2] * columns[c, FINAL]
            first = extent[b, 1] - b * width  # the place of block 0 in row b of `ids`
            begin = anchors[b] + columns[c, FIRST]
            low = min(max(begin, 0), steps)
            real = max(min(begin + length, steps), low) - low
            head = 0
            if pad == PAD_HEAD:
                head = length - real
            elif pad != PAD_TAIL:
                head = low - begin if real > 0 else length
            target = columns[c, OUT] + b * length * size
            out[target : target + head * size] = 0
            target += head * size
            out[target + real * size : target + (length - head) * size] = 0
            if stride == 0:
                out[target : target + real] = 1
                continue
            at, end = low, low + real
            if pad == PAD_EDGE:  # each step of the padding is a transfer of its own
                at, end, target = begin, begin + length, target - head * size
            while at < end:
                step = min(max(at, 0), steps - 1)
                block = step // block_steps
                inside = step - block * block_steps
                take = min(block_steps - inside, end - at, steps - step) if at == step else 1
                place = first + block
                if place < 0 or place >= width or ids[b, place] < 0 or ids[b, place] >= num_blocks:
                    return -1 - b
                source = base + columns[c, OFFSET] + np.int64(ids[b, place]) * stride + inside * size
                count = add_transfer(remote, local, count, source, out_base + target, take * size)
                target += take * size
                at += take
    return count


class Rows:
    """The rows of one fetch, copied, so that the caller can reuse its arrays.

    Args:
        slots, anchors, generations: int64 [n].
        extent: int64 [n, 3]: length in steps, the position in `block_ids` where the trajectory's block table would
            begin (it has the blocks of the windows only), and the number of final steps, as
            `gear_loader.native.gathering.resolve` writes them.
        block_ids: int32 [n, K], the windows' blocks; the last of K is the trajectory's first where columns per
            trajectory are read.

    Raises:
        SchemaError: other shapes or dtypes.
    """

    def __init__(
        self, slots: Array, anchors: Array, generations: Array, extent: Array, block_ids: Array
    ) -> None:
        count = len(slots)
        given = {"slots": slots, "anchors": anchors, "generations": generations, "extent": extent}
        for name, array in given.items():
            shape = (count, 3) if name == "extent" else (count,)
            if array.dtype != np.int64 or array.shape != shape:
                raise SchemaError(
                    f"{name} is {array.dtype} {list(array.shape)}; expected int64 {list(shape)}."
                )
        if block_ids.dtype != np.int32 or block_ids.ndim != 2 or len(block_ids) != count:
            raise SchemaError(
                f"block_ids is {block_ids.dtype} {list(block_ids.shape)}; expected int32 [{count}, K]."
            )
        self.slots, self.anchors, self.generations = slots.copy(), anchors.copy(), generations.copy()
        self.extent, self.block_ids = extent.copy(), block_ids.copy()

    def __len__(self) -> int:
        return len(self.slots)


@dataclasses.dataclass
class Reads:
    """The windows of a fetch as `_walk` reads them.

    Attributes:
        columns: int64 [C, 9], columns that lie by themselves, and masks; read into the reply.
        records: int64 [R, 9], windows of whole records, which are read into memory of `record_bytes`.
        splits: of each column in a record: its piece of the reply, its row of `records`, and its offset in a record.
    """

    columns: Array
    records: Array
    record_bytes: int
    splits: list[tuple[Piece, int, int]]

    def split(self, memory: Array, out: Array, count: int) -> None:
        """Copy the columns out of the records that were read.

        Args:
            memory: uint8, the records. out: uint8, the reply. count: its rows.
        """
        for piece, number, inside in self.splits:
            begin, length, size = self.records[number, [OUT, LENGTH, STEP_BYTES]].tolist()
            records = memory[begin : begin + count * length * size].reshape(count, length, size)
            rows = out[piece.offset : piece.offset + count * piece.row_bytes].reshape(count, length, -1)
            rows[:] = records[:, :, inside : inside + rows.shape[2]]


def check_schema(table: str, schema: Schema, described: Description) -> None:
    """Check that a table has the columns that its reader expects.

    Raises:
        TransportError: the owner has other columns.
    """
    if schema.to_json() != described.schema.to_json():
        raise TransportError(
            f"Table {table!r} has the columns {described.schema.to_json()} at its owner; expected {schema.to_json()}."
        )


def reads_of(spec: WindowSpec, described: Description, count: int) -> Reads:
    """What a fetch of `count` rows reads.

    Raises:
        TransportError: the owner has other columns than the reader expects.
    """
    check_schema(spec.table, spec.schema, described)
    places = dict(zip(described.schema, described.columns, strict=True))
    table, splits = [], []
    records: dict[tuple[int, ...], int] = {}  # without the place in memory -> number
    end, ends = 0, []
    for piece in spec.pieces(count):
        window = spec.windows[piece.name]
        column, place = spec.schema[spec.sources[piece.name]], places[spec.sources[piece.name]]
        span = window.length, window.offset, _PADS[window.pad]
        kind = int(column.final), int(column.trajectory)
        if piece.kind != "column":
            table.append((0, 0, 1, piece.offset, *span, *kind))
        elif place.is_packed:
            key = (place.base, place.block_stride, place.step_stride, *span, *kind)
            if key not in records:
                records[key] = len(records)
                ends.append(end)
                end += count * window.length * place.step_stride
            splits.append((piece, records[key], place.inside))
        else:
            table.append((place.offset, place.block_stride, place.step_bytes, piece.offset, *span, *kind))
    listed = [(*key[:3], begin, *key[3:]) for key, begin in zip(records, ends, strict=True)]
    columns, read = (np.array(part, dtype=np.int64).reshape(-1, ONCE + 1) for part in (table, listed))
    return Reads(columns, read, end, splits)


def pieces_of(
    spec: WindowSpec, described: Description, rows: Rows, columns: Array, out: Array
) -> tuple[Array, Array]:
    """Compute the transfers of a fetch, and write padding and masks.

    Args:
        spec: the windows. described: the owner's memory. rows: of the fetch.
        columns: from `reads_of`, for as many rows. out: uint8, the memory in which they lie.

    Returns:
        Remote and local sides of the transfers, each int64 [p, 5]: address, bytes, 0, bytes, 1. Remote addresses are
        always inside the table's columns.

    Raises:
        TransportError: an invalid slot, length or block.
    """
    numbers, count = described.numbers, len(rows)
    slots, lengths, finals = rows.slots, rows.extent[:, 0], rows.extent[:, 2]
    wrong = (slots < 0) | (slots >= numbers["num_slots"])
    wrong |= (lengths < 1) | (lengths > numbers["max_steps"])
    wrong |= (finals < 0) | (finals > 1) | (np.abs(rows.anchors) >= 2**40)
    if wrong.any():
        raise _wrong(spec, rows, int(np.argmax(wrong)), numbers)
    block_steps = numbers["block_steps"]
    of_steps = columns[columns[:, STRIDE] > 0]
    longest = np.minimum(of_steps[:, LENGTH], numbers["max_steps"] + 1)
    padded = of_steps[of_steps[:, PAD] == PAD_EDGE, LENGTH].sum()
    most = count * int(((longest - 1) // block_steps + 2).sum() + padded)
    remote, local = np.empty((most, 5), dtype=np.int64), np.empty((most, 5), dtype=np.int64)
    found = int(
        _walk(
            columns,
            rows.anchors,
            rows.extent,
            rows.block_ids,
            block_steps,
            numbers["num_blocks"],
            numbers["base"],
            out,
            out.ctypes.data,
            remote,
            local,
        )
    )
    if found < 0:
        raise _wrong(spec, rows, -1 - found, numbers)
    return remote[:found], local[:found]


def _wrong(spec: WindowSpec, rows: Rows, row: int, numbers: dict[str, int]) -> TransportError:
    return TransportError(
        f"Row {row} of {len(rows)} of table {spec.table!r} has slot {rows.slots[row]}, anchor {rows.anchors[row]}, "
        f"extent {rows.extent[row].tolist()} and blocks {rows.block_ids[row].tolist()}; expected slots below "
        f"{numbers['num_slots']:,}, lengths of 1 to {numbers['max_steps']:,} and blocks below "
        f"{numbers['num_blocks']:,} for every step of its windows. Nothing was read."
    )
