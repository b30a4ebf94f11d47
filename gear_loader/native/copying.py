"""The compiled loops of the CPU path (numba): copying between blocks and rows at memory speed.

The arguments are raw addresses, which the callers have checked. The loops release the GIL, so that several threads can
copy at once.
"""

from __future__ import annotations

import platform
from typing import Any

import numpy as np
from llvmlite import ir
from numba import carray, int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic

from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_EDGE,
    PAD_HEAD,
    PAD_TAIL,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
    WIDTH,
)
from gear_loader.native.compile import compiled
from gear_loader.utils.arrays import Array

__all__ = [
    "ASLEEP",
    "ROWS",
    "SPINS",
    "STATE",
    "STREAM_BYTES",
    "VECTOR_ACTIVE",
    "VECTOR_BLOCKS",
    "VECTOR_BLOCK_STEPS",
    "VECTOR_COLUMNS",
    "VECTOR_COUNT",
    "VECTOR_COUNTED",
    "VECTOR_DONE",
    "VECTOR_END",
    "VECTOR_HEAD",
    "VECTOR_LOOKS",
    "VECTOR_NEXT",
    "VECTOR_WIDTH",
    "append",
    "append_rows",
    "copy_apart",
    "copy_bytes",
    "copy_past_caches",
    "copy_row",
    "copy_rows",
    "extent_of",
    "fill",
    "finish",
    "gather",
    "gather_batch",
    "look",
    "look_up",
    "order_stores",
    "place",
    "post",
    "put_steps",
    "resolve",
    "scatter",
    "serve",
]


# The mailbox of a thread pool (`gear_loader.native.threads`), int64:
#
#     TICKET        job number << 32 | number of its chunks << 16 | next free chunk
#     DONE          chunks finished
#     BAD           sum of the results of `gather` for the job's chunks
#     SPINS         polls of an idle member before it sleeps
#     ROWS, ...     the job: valid for a thread that has taken a chunk, until all chunks are finished
#     STATE + i     member i: AWAKE or ASLEEP
#
# The ticket itself shows whether a chunk is left, so no thread takes one while the next job is being written.
_CHUNK_BITS = 16
_CHUNK_MASK = (1 << _CHUNK_BITS) - 1

# Places in the mailbox, 64 bytes apart where several threads write.
_TICKET, DONE, _JOB, SPINS, _BAD, STATE = 0, 8, 16, 27, 28, 32
(
    ROWS,
    _COLUMNS,
    _NUM_COLUMNS,
    _SLOTS,
    _ANCHORS,
    _EXTENT,
    _NUM_SLOTS,
    _IDS,
    _NUM_IDS,
    _STEPS,
    _PLACES,  # address of the rows of the batch that are filled, or 0
) = range(_JOB, _JOB + 11)
_AWAKE, ASLEEP = 0, 1

STREAM_BYTES = 1 << 18
"""Smallest copy in bytes that bypasses the caches, because new data are not read soon. Copies of 420 KB to 42 MB take
0.66 to 0.92 of memcpy's time on a Xeon with 105 MiB L3."""

STREAM_BATCH_BYTES = 1 << 22
"""Bytes of a batch from which on its rows are written past the caches: by the time that the batch is read, others have
been gathered. Whole trajectories of 42 KB, 256 and 1,024 a batch, take 0.8 of the time on an EPYC with 32 MiB of L3,
also where the batch is read at once."""


_AHEAD = 32
"""Rows of single steps whose places are fetched into the cache before they are copied."""
_SINGLE_BYTES = 1 << 12
"""Largest single steps that are: larger ones are copied at the speed of memory anyhow."""

assert (BASE, STRIDE, STEP_BYTES, OUT, LENGTH, OFFSET, PAD, MASK) == (0, 1, 2, 3, 4, 5, 6, 7)
assert (BLOCKS, FINAL, STEP_STRIDE, WIDTH) == (9, 10, 11, 12)
assert (PAD_HEAD, PAD_TAIL, PAD_EDGE) == (1, 2, 3)


@intrinsic  # type: ignore[untyped-decorator]
def copy_bytes(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, source, count = args
        pointer = cgutils.voidptr_t
        cgutils.raw_memcpy(
            builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), count, 1
        )

    return types.void(types.int64, types.int64, types.int64), codegen


def _copy_of(size: int) -> Any:
    """A function that copies so many bytes from one address to another."""

    @intrinsic  # type: ignore[untyped-decorator]
    def copy(_context: Any, _target: Any, _source: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kind = ir.IntType(8 * size).as_pointer()
            value = builder.load(builder.inttoptr(args[1], kind), align=1)
            builder.store(value, builder.inttoptr(args[0], kind), align=1)

        return types.void(types.int64, types.int64), codegen

    return copy


_copy_1, _copy_2, _copy_4, _copy_8, _copy_16 = map(_copy_of, (1, 2, 4, 8, 16))


@intrinsic  # type: ignore[untyped-decorator]
def _fetch(_context: Any, _address: Any) -> Any:
    """Fetch the line of an address into the cache, if it is a valid one. Does not wait."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [place, number(0), number(3), number(1)])

    return types.void(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fill(_context: Any, _target: Any, _value: Any, _count: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, value, count = args
        byte = builder.trunc(value, cgutils.int8_t)
        memset = builder.module.declare_intrinsic("llvm.memset", (cgutils.voidptr_t, cgutils.intp_t))
        builder.call(memset, (builder.inttoptr(target, cgutils.voidptr_t), byte, count, cgutils.false_bit))

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _differ(_context: Any, _one: Any, _other: Any, _count: Any) -> Any:
    """Whether two places in memory hold different bytes, by the C library's `memcmp`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        one, other, count = args
        kind = ir.FunctionType(ir.IntType(32), [cgutils.voidptr_t, cgutils.voidptr_t, cgutils.intp_t])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        places = [builder.inttoptr(place, cgutils.voidptr_t) for place in (one, other)]
        return builder.icmp_signed("!=", builder.call(function, [*places, count]), ir.IntType(32)(0))

    return types.boolean(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _stream_line(_context: Any, _target: Any, _source: Any) -> Any:
    """Copy 64 bytes to an address aligned to 64 with non-temporal stores, which do not read the line first."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        line = ir.VectorType(ir.IntType(64), 8).as_pointer()
        value = builder.load(builder.inttoptr(args[1], line), align=1)
        store = builder.store(value, builder.inttoptr(args[0], line), align=64)
        store.set_metadata("nontemporal", builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)]))

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def order_stores(_context: Any) -> Any:
    """Make earlier stores, including non-temporal ones, visible before later stores."""

    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst")

    return types.void(), codegen


def _word(builder: Any, address: Any) -> Any:
    return builder.inttoptr(address, ir.IntType(64).as_pointer())


@intrinsic  # type: ignore[untyped-decorator]
def atomic_load(_context: Any, _address: Any) -> Any:
    """Load the int64 at an address."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

    return types.int64(types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_store(_context: Any, _address: Any, _value: Any) -> Any:
    """Store an int64 at an address."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)

    return types.void(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_add(_context: Any, _address: Any, _value: Any) -> Any:
    """Add to the int64 at an address; return its old value."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

    return types.int64(types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def atomic_cas(_context: Any, _address: Any, _expected: Any, _value: Any) -> Any:
    """Replace the int64 at an address if it has the expected value; return its old value."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
        return builder.extract_value(pair, 0)

    return types.int64(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pause(_context: Any) -> Any:
    """Hint to the processor that this is a spin loop."""

    def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
        if platform.machine() in ("x86_64", "AMD64"):
            kind = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, kind, "llvm.x86.sse2.pause"), [])
        elif platform.machine() == "aarch64":
            kind = ir.FunctionType(ir.VoidType(), [ir.IntType(32)])
            function = cgutils.get_or_insert_function(builder.module, kind, "llvm.aarch64.hint")
            builder.call(function, [ir.Constant(ir.IntType(32), 1)])

    return types.void(), codegen


@intrinsic  # type: ignore[untyped-decorator]
def pointer(_context: Any, _address: Any) -> Any:
    """Convert an address to a pointer for `numba.carray`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        return builder.inttoptr(args[0], cgutils.voidptr_t)

    return types.voidptr(types.int64), codegen


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_past_caches(target, source, count) -> None:  # type: ignore[no-untyped-def]
    """`copy_bytes` of which all whole lines are written past the caches; the caller calls `order_stores` at its end."""
    done = min(-target % 64, count)
    copy_bytes(target, source, done)
    while done + 64 <= count:
        _stream_line(target + done, source + done)
        done += 64
    copy_bytes(target + done, source + done, count - done)


@njit  # type: ignore[untyped-decorator]
def copy_apart(target, apart, source, every, count, size) -> None:  # type: ignore[no-untyped-def]
    """Copy `count` steps of `size` bytes, `every` bytes from one to the next at the source and `apart` at the target.

    The size is looked at once, and the copies are moves of constant size: two that overlap where it is no power of two.
    """
    if size == 4:
        for i in range(count):
            _copy_4(target + i * apart, source + i * every)
    elif size == 8:
        for i in range(count):
            _copy_8(target + i * apart, source + i * every)
    elif size == 16:
        for i in range(count):
            _copy_16(target + i * apart, source + i * every)
    elif size == 1:
        for i in range(count):
            _copy_1(target + i * apart, source + i * every)
    elif size < 4:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            _copy_2(to, of)
            _copy_1(to + size - 1, of + size - 1)
    elif size < 8:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            _copy_4(to, of)
            _copy_4(to + size - 4, of + size - 4)
    elif size < 16:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            _copy_8(to, of)
            _copy_8(to + size - 8, of + size - 8)
    elif size <= 32:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            _copy_16(to, of)
            _copy_16(to + size - 16, of + size - 16)
    elif size <= 48:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            _copy_16(to, of)
            _copy_16(to + 16, of + 16)
            _copy_16(to + size - 16, of + size - 16)
    else:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            for done in range(0, size - 16, 16):
                _copy_16(to + done, of + done)
            _copy_16(to + size - 16, of + size - 16)


@compiled
def scatter(columns, block_steps, ids, addresses, lengths) -> None:  # type: ignore[no-untyped-def]
    """Copy trajectories into their blocks.

    Args:
        columns: int64 [C, 4], address of the column's first step, bytes from block to block, bytes of a step, bytes
            from step to step. If the second is negative, a trajectory has one value, which goes to its first block.
        block_steps: steps of a block.
        ids: int32 [blocks], blocks of the trajectories, one trajectory after another.
        addresses: int64 [n, C], address of the contiguous steps of each trajectory in each column.
        lengths: int64 [n], in steps.
    """
    first, total = 0, 0
    for i in range(len(lengths)):
        total += lengths[i]
    streams = total * columns[:, 2].sum() >= STREAM_BYTES
    for i in range(len(lengths)):
        blocks = (lengths[i] + block_steps - 1) // block_steps
        for c in range(columns.shape[0]):
            base, stride, step_bytes, every = columns[c, 0], columns[c, 1], columns[c, 2], columns[c, 3]
            if stride < 0:
                copy_bytes(base - int64(ids[first]) * stride, addresses[i, c], step_bytes)
                continue
            if every != step_bytes:
                continue
            block_bytes = block_steps * step_bytes
            for j in range(blocks):
                count = min(block_steps, lengths[i] - j * block_steps) * step_bytes
                target = base + int64(ids[first + j]) * stride
                source = addresses[i, c] + j * block_bytes
                if streams:
                    copy_past_caches(target, source, count)
                else:
                    copy_bytes(target, source, count)
        # Block by block, so that the lines of the records are written while they are in the cache.
        for j in range(blocks):
            count = min(block_steps, lengths[i] - j * block_steps)
            for c in range(columns.shape[0]):
                stride, step_bytes, every = columns[c, 1], columns[c, 2], columns[c, 3]
                if every != step_bytes:
                    target = columns[c, 0] + int64(ids[first + j]) * stride
                    source = addresses[i, c] + j * block_steps * step_bytes
                    copy_apart(target, every, source, step_bytes, count, step_bytes)
        first += blocks
    if streams:
        order_stores()


@compiled
def append(columns, block_steps, ids, first, addresses, count) -> None:  # type: ignore[no-untyped-def]
    """Copy steps into blocks of one trajectory, from step `first` on.

    Args:
        columns: int64 [C, 4], address of the column's first step, bytes from block to block, bytes of a step, bytes
            from step to step.
        block_steps: steps of a block.
        ids: int32 [blocks], blocks of the trajectory.
        first: first step to write.
        addresses: int64 [C], address of the contiguous steps of each column.
        count: number of steps.
    """
    for c in range(columns.shape[0]):
        base, stride, step_bytes, every = columns[c, 0], columns[c, 1], columns[c, 2], columns[c, 3]
        done = 0
        while done < count:
            block = (first + done) // block_steps
            inside = first + done - block * block_steps
            steps = min(block_steps - inside, count - done)
            target = base + int64(ids[block]) * stride + inside * every
            source = addresses[c] + done * step_bytes
            if every == step_bytes:
                copy_bytes(target, source, steps * step_bytes)
            else:
                copy_apart(target, every, source, step_bytes, steps, step_bytes)
            done += steps


@compiled
def copy_rows(address, low, high, first, ends, places, ids, column, into) -> None:  # type: ignore[no-untyped-def]
    """Copy bytes of a file that holds trajectories one after another (gaps allowed) to or from their blocks.

    Args:
        address: of the buffer that holds bytes `low` to `high` - 1 of the file's rows.
        first, ends: int64 [n], ascending: first row of each trajectory, and the row after its last.
        places: int64 [n], where each trajectory's blocks begin in `ids`; -1 for one that is left out.
        ids: int32, blocks.
        column: int64 [5]: address of the column's first step, bytes from block to block, bytes of a step, bytes from
            step to step, steps of a block.
        into: copy into the blocks; else out of them.
    """
    base, stride, size, every, block_steps = column[0], column[1], column[2], column[3], column[4]
    i = np.searchsorted(ends, low // size, side="right")
    while i < len(first) and first[i] * size < high:
        start, stop = max(low, first[i] * size), min(high, ends[i] * size)
        while places[i] >= 0 and start < stop:
            step = start // size - first[i]
            part = start - (first[i] + step) * size  # bytes of this step that precede `start`
            block = step // block_steps
            limit = min(stop, (first[i] + (block + 1) * block_steps) * size)
            here = base + int64(ids[places[i] + block]) * stride + (step - block * block_steps) * every + part
            there = address + start - low
            if every == size:
                count = limit - start
            elif part > 0 or limit - start < size:
                count = min(size - part, limit - start)
            else:
                count = (limit - start) // size * size
                if into:
                    copy_apart(here, every, there, size, count // size, size)
                else:
                    copy_apart(there, size, here, every, count // size, size)
                start += count
                continue
            if into:
                copy_bytes(here, there, count)
            else:
                copy_bytes(there, here, count)
            start += count
        i += 1


# Request to `append_rows`, int64: this head, the columns as for `append` [C, 4], the address of the rows of each column
# [C], and the places [n, VECTOR_WIDTH].
VECTOR_COUNT, VECTOR_COLUMNS, VECTOR_BLOCK_STEPS, VECTOR_ACTIVE, VECTOR_DONE, VECTOR_LOOKS, VECTOR_HEAD = (
    range(7)
)
# Places of an environment: address of the blocks of its trajectory, int32; its next step; end of the steps that may be
# written; the step up to which its writer has counted.
VECTOR_BLOCKS, VECTOR_NEXT, VECTOR_END, VECTOR_COUNTED, VECTOR_WIDTH = range(5)


@njit(inline="always")  # type: ignore[untyped-decorator]
def copy_row(columns, block, inside, addresses, row) -> None:  # type: ignore[no-untyped-def]
    """Copy one step of each column into a block.

    Args:
        columns: int64 [C, 4], as for `append`. block, inside: the block, and the step within it.
        addresses: int64 [C], address of contiguous steps of each column. row: which of them.
    """
    for c in range(columns.shape[0]):
        step_bytes = columns[c, 2]
        target = columns[c, 0] + block * columns[c, 1] + inside * columns[c, 3]
        copy_bytes(target, addresses[c] + row * step_bytes, step_bytes)


@compiled
def append_rows(request):  # type: ignore[no-untyped-def]
    """Copy one row for each of n environments to the next step of its trajectory.

    Args:
        request: int64, as described above: number of environments and of columns; steps of a block; addresses of the
            masks `active` and `done`, bool [n], or 0 (all are active, none is done); whether the writers look at the
            ends of their blocks; columns, rows and places.

    Returns:
        Number of environments that are done, or have reached an end that is looked at; -1, having written nothing, if
        an active one had reached it before.
    """
    count, width, block_steps = request[VECTOR_COUNT], request[VECTOR_COLUMNS], request[VECTOR_BLOCK_STEPS]
    rows = VECTOR_HEAD + 4 * width
    columns = request[VECTOR_HEAD:rows].reshape((width, 4))
    places = request[rows + width : rows + width + count * VECTOR_WIDTH].reshape((count, VECTOR_WIDTH))
    every, none = request[VECTOR_ACTIVE] == 0, request[VECTOR_DONE] == 0
    looks = request[VECTOR_LOOKS] != 0
    # An unused mask is never read: any valid address will do.
    spare = request.ctypes.data
    active = carray(pointer(spare if every else request[VECTOR_ACTIVE]), (count,), np.uint8)
    done = carray(pointer(spare if none else request[VECTOR_DONE]), (count,), np.uint8)
    for i in range(count):
        if (every or active[i] != 0) and places[i, VECTOR_NEXT] >= places[i, VECTOR_END]:
            return -1
    due = 0
    for i in range(count):
        if not every and active[i] == 0:
            continue
        step = places[i, VECTOR_NEXT]
        block = step // block_steps
        inside = step - block * block_steps
        number = int64(carray(pointer(places[i, VECTOR_BLOCKS]), (block + 1,), np.int32)[block])
        copy_row(columns, number, inside, request[rows : rows + width], i)
        places[i, VECTOR_NEXT] = step + 1
        due += (not none and done[i] != 0) or (looks and step + 1 == places[i, VECTOR_END])
    return due


@compiled
def put_steps(  # type: ignore[no-untyped-def]
    columns, block_steps, blocks, open_steps, sources, ahead, ended, places, row
) -> int:
    """Copy one step of each of E open trajectories into its blocks.

    Args:
        columns: int64 [C, 4], as for `append`.
        block_steps: steps of a block.
        blocks: int32 [E, W], blocks of each trajectory.
        open_steps: int64 [E, 3], slot, steps so far and capacity in steps of each trajectory; steps are counted up.
        sources: int64 [C], address of the E contiguous steps of each column.
        ahead: address of E contiguous steps of column 0 that belong to the step after, or 0. They are written there,
            and the next step's value must be the same.
        ended: bool [E], whether the step is the trajectory's last.
        places: int32 [N, E, 2], output: row `row` gets slot and step of each trajectory.

    Returns:
        Number of trajectories that have ended or are full now; or -1 - e, having done nothing, if the step of
        trajectory e does not begin with the value that was written ahead.
    """
    more = 1 if ahead != 0 else 0
    if ahead != 0:
        base, stride, step_bytes, every = columns[0, 0], columns[0, 1], columns[0, 2], columns[0, 3]
        for e in range(len(open_steps)):
            step = open_steps[e, 1]
            if step > 0:
                known = base + int64(blocks[e, step // block_steps]) * stride + step % block_steps * every
                if _differ(known, sources[0] + e * step_bytes, step_bytes):
                    return -1 - e
    waiting = 0
    for e in range(len(open_steps)):
        step = open_steps[e, 1]
        block, inside = int64(blocks[e, step // block_steps]), step % block_steps
        for c in range(len(columns)):
            base, stride, step_bytes, every = columns[c, 0], columns[c, 1], columns[c, 2], columns[c, 3]
            copy_bytes(base + block * stride + inside * every, sources[c] + e * step_bytes, step_bytes)
        if ahead != 0:
            base, stride, step_bytes, every = columns[0, 0], columns[0, 1], columns[0, 2], columns[0, 3]
            block, inside = int64(blocks[e, (step + 1) // block_steps]), (step + 1) % block_steps
            copy_bytes(base + block * stride + inside * every, ahead + e * step_bytes, step_bytes)
        places[row, e, 0], places[row, e, 1] = open_steps[e, 0], step
        open_steps[e, 1] = step + 1
        waiting += ended[e] or step + 1 + more >= open_steps[e, 2]
    return waiting


@compiled
def look_up(places, rows, members, slots, steps) -> None:  # type: ignore[no-untyped-def]
    """Slots and steps (int64 [n], outputs) at entries (rows, members) (int64 [n] each) of `put_steps`'s places."""
    for i in range(len(rows)):
        slots[i], steps[i] = places[rows[i], members[i], 0], places[rows[i], members[i], 1]


@njit(inline="always")
def _window(begin, length, steps, pad):  # type: ignore[no-untyped-def]
    """First existing step of a window, number of existing steps, and padding before them."""
    low = min(max(begin, 0), steps)
    count = max(min(begin + length, steps), low) - low
    if pad == PAD_HEAD:
        return low, count, length - count
    if pad == PAD_TAIL:
        return low, count, 0
    return low, count, low - begin if count > 0 else length


# Inlined: as a function call, it costs benchmark W2 a fifth of its speed.
@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_steps(  # type: ignore[no-untyped-def]
    target, base, stride, step_bytes, every, blocks, low, count, block_ids, row, block_steps, streams
) -> bool:
    """Copy steps `low` to `low + count - 1` of a trajectory out of its blocks of one column.

    Args:
        every: bytes from step to step in a block. streams: write past the caches.

    Returns:
        False if its block table has an invalid place or block; then some steps may have been copied.
    """
    step, end = low, low + count
    while step < end:
        block = step // block_steps
        inside = step - block * block_steps
        take = min(block_steps - inside, end - step)
        place = row + block
        if place < 0 or place >= len(block_ids):
            return False
        number = int64(block_ids[place])
        if number < 0 or number >= blocks:
            return False
        source = base + number * stride + inside * every
        size = take * step_bytes
        if every != step_bytes:
            copy_apart(target, step_bytes, source, every, take, step_bytes)
        elif streams and size >= 1024:
            copy_past_caches(target, source, size)
        else:
            copy_bytes(target, source, size)
        target += size
        step += take
    return True


@njit  # type: ignore[untyped-decorator]
def _fill_edges(  # type: ignore[no-untyped-def]
    begin, head, tail, base, stride, step_bytes, every, blocks, near, block_ids, row, block_steps, length
) -> bool:
    """Fill the padding of a window at `begin`, whose steps are copied, with the steps next to it.

    Args:
        near: if no step of the window exists, the one next to it.

    Returns:
        False as `_copy_steps`.
    """
    if head == length:
        if not _copy_steps(
            begin, base, stride, step_bytes, every, blocks, near, 1, block_ids, row, block_steps, False
        ):
            return False
        head, tail = 0, length - 1
    for i in range(head):
        copy_bytes(begin + i * step_bytes, begin + head * step_bytes, step_bytes)
    for i in range(length - tail, length):
        copy_bytes(begin + i * step_bytes, begin + (length - tail - 1) * step_bytes, step_bytes)
    return True


@njit(inline="always")  # type: ignore[untyped-decorator]
def _copy_step(target, source, size) -> None:  # type: ignore[no-untyped-def]
    """Copy one step: of the usual sizes without a call."""
    if size == 4:
        _copy_4(target, source)
    elif size == 8:
        _copy_8(target, source)
    elif size == 16:
        _copy_16(target, source)
    elif size == 1:
        _copy_1(target, source)
    else:
        copy_bytes(target, source, size)


@njit(inline="always")
def extent_of(extent, slot):  # type: ignore[no-untyped-def]
    """Length, place of the block table, and final steps of a trajectory, which may grow meanwhile.

    The place is read last: a trajectory that grows gets its new place first. A new length with the old place would lead
    to the next entry there, which is another trajectory's.
    """
    address = extent.ctypes.data + 24 * slot
    steps, more = atomic_load(address), atomic_load(address + 16)
    return steps, atomic_load(address + 8), more


@njit(inline="always")
def _step_address(  # type: ignore[no-untyped-def]
    columns, c, anchor, block, inside, steps, row, more, block_ids, block_steps
):
    """Address of the step that a window of one step shows, and whether it exists; 0 for one of zeros, -1 if the block
    table is invalid.

    Args:
        anchor, block, inside: the anchor, its block and its step within the block.
        steps, row, more: of the trajectory, as in `extent`.
    """
    step = anchor + columns[c, OFFSET]
    end = steps + more * columns[c, FINAL]
    exists = 0 <= step < end
    if not exists:
        if columns[c, PAD] != PAD_EDGE or end <= 0:
            return int64(0), False
        step = min(max(step, 0), end - 1)
    apart = step - anchor
    inside += apart
    if apart < -block_steps or apart > block_steps:
        block = step // block_steps
        inside = step - block * block_steps
    elif inside >= block_steps:
        block, inside = block + 1, inside - block_steps
    elif inside < 0:
        block, inside = block - 1, inside + block_steps
    place = row + block
    if place < 0 or place >= len(block_ids):
        return int64(-1), False
    number = int64(block_ids[place])
    if number < 0 or number >= columns[c, BLOCKS]:
        return int64(-1), False
    return columns[c, BASE] + number * columns[c, STRIDE] + inside * columns[c, STEP_STRIDE], exists


@njit
def _beside(columns):  # type: ignore[no-untyped-def]
    """An earlier column of the same record and window, in whose line the step of each column lies; or -1."""
    found = np.full(columns.shape[0], -1, dtype=np.int64)
    for c in range(columns.shape[0]):
        for d in range(c):
            same = abs(columns[c, BASE] - columns[d, BASE]) < columns[c, STEP_STRIDE]
            for field in (STRIDE, STEP_STRIDE, OFFSET, PAD, FINAL):
                same = same and columns[c, field] == columns[d, field]
            if same:
                found[c] = d
                break
    return found


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gather_single(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    """`_gather_rows` of windows of one step each.

    The places of some rows are found first and fetched into the cache, all at the same time, then they are copied.
    """
    bad, width = 0, columns.shape[0]
    places = np.empty((_AHEAD, width), dtype=np.int64)
    there = np.empty((_AHEAD, width), dtype=np.uint8)
    beside = _beside(columns)
    for begin in range(first, last, _AHEAD):
        count = min(_AHEAD, last - begin)
        for i in range(count):
            slot, anchor = slots[begin + i], anchors[begin + i]
            if slot >= 0 and slot < len(extent):
                steps, row, more = extent_of(extent, slot)
            else:
                steps, row, more, bad = int64(0), int64(0), int64(0), bad + 1
            block = anchor // block_steps
            inside = anchor - block * block_steps
            for c in range(width):
                before = beside[c]
                if before >= 0 and places[i, before] != 0:
                    places[i, c] = places[i, before] + columns[c, BASE] - columns[before, BASE]
                    there[i, c] = there[i, before]
                    continue
                place, exists = _step_address(
                    columns, c, anchor, block, inside, steps, row, more, block_ids, block_steps
                )
                if place < 0:
                    place, bad = int64(0), bad + 1
                _fetch(place)  # which may be any address
                places[i, c], there[i, c] = place, exists
        for i in range(count):
            target = rows[begin + i] if chosen else begin + i
            for c in range(width):
                step_bytes = columns[c, STEP_BYTES]
                out = columns[c, OUT] + target * step_bytes
                if places[i, c] != 0:
                    _copy_step(out, places[i, c], step_bytes)
                else:
                    fill(out, 0, step_bytes)
                if columns[c, MASK] != 0:
                    fill(columns[c, MASK] + target, int64(there[i, c]), 1)
    return bad


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gather_rows(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
) -> int:
    bad = 0
    if columns[:, LENGTH].max() == 1 and columns[:, STEP_BYTES].max() <= _SINGLE_BYTES:
        bad += _gather_single(
            columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen
        )
        return int64(bad)  # type: ignore[no-any-return]
    streams = len(slots) * (columns[:, LENGTH] * columns[:, STEP_BYTES]).sum() >= STREAM_BATCH_BYTES
    for b in range(first, last):
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        else:
            steps, row, more, bad = int64(0), int64(0), int64(0), bad + 1
        target = rows[b] if chosen else b
        for c in range(columns.shape[0]):
            step_bytes, length = columns[c, STEP_BYTES], columns[c, LENGTH]
            end = steps + more * columns[c, FINAL]
            low, count, head = _window(anchors[b] + columns[c, OFFSET], length, end, columns[c, PAD])
            begin = columns[c, OUT] + target * length * step_bytes
            out = begin
            if head > 0:
                fill(out, 0, head * step_bytes)
            out += head * step_bytes
            base, stride, blocks = columns[c, BASE], columns[c, STRIDE], columns[c, BLOCKS]
            every = columns[c, STEP_STRIDE]
            if not _copy_steps(
                out, base, stride, step_bytes, every, blocks, low, count, block_ids, row, block_steps, streams
            ):
                fill(begin, 0, length * step_bytes)
                bad += 1
            tail = length - head - count
            if tail > 0:
                fill(out + count * step_bytes, 0, tail * step_bytes)
            if columns[c, PAD] == PAD_EDGE and count < length and end > 0:
                near = min(low, end - 1)
                if not _fill_edges(
                    begin,
                    head,
                    tail,
                    base,
                    stride,
                    step_bytes,
                    every,
                    blocks,
                    near,
                    block_ids,
                    row,
                    block_steps,
                    length,
                ):
                    bad += 1
            mask = columns[c, MASK]
            if mask != 0:
                mask += target * length
                fill(mask, 0, head)
                fill(mask + head, 1, count)
                fill(mask + head + count, 0, tail)
    if streams:
        order_stores()
    return bad


@compiled
def gather(  # type: ignore[no-untyped-def]
    columns, slots, anchors, extent, block_ids, block_steps, first, last, rows=None
):
    """Fill rows of a batch from entries `first` to `last - 1`: steps, padding and masks of every column.

    Args:
        columns: int64 [C, WIDTH], one row a column, as defined in `gear_loader.kernels.plan`.
        slots, anchors: int64 [n]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        rows: int64 [n], entry b fills row ``rows[b]`` of the batch; None: row b.

    Returns:
        Number of invalid slots, block tables and blocks, 0 unless the index is corrupt. Their windows are zeros.
    """
    # An unused argument is an array of the right type.
    if rows is None:
        bad = _gather_rows(columns, slots, anchors, extent, block_ids, block_steps, first, last, slots, False)
    else:
        bad = _gather_rows(columns, slots, anchors, extent, block_ids, block_steps, first, last, rows, True)
    return int64(bad)


@compiled
def gather_batch(  # type: ignore[no-untyped-def]
    columns, slots, anchors, generations, extent, block_ids, block_steps, names
):
    """`gather` all n entries; write their slots, anchors and generations to `names`, int64 [3, at least n]."""
    for b in range(len(slots)):
        names[0, b], names[1, b], names[2, b] = slots[b], anchors[b], generations[b]
    bad = _gather_rows(columns, slots, anchors, extent, block_ids, block_steps, 0, len(slots), slots, False)
    return int64(bad)


@compiled
def place(pieces, rows) -> None:  # type: ignore[no-untyped-def]
    """Copy contiguous rows to rows of a batch.

    Args:
        pieces: int64 [P, 3], address of the rows, address of row 0 of the output, bytes of a row.
        rows: int64 [n], output row of row b of each piece.
    """
    for p in range(pieces.shape[0]):
        source, out, row_bytes = pieces[p, 0], pieces[p, 1], pieces[p, 2]
        for b in range(len(rows)):
            copy_bytes(out + rows[b] * row_bytes, source + b * row_bytes, row_bytes)


@compiled
def resolve(  # type: ignore[no-untyped-def]
    slots, anchors, extent, block_ids, block_steps, first, last, out_extent, out_ids, num_blocks, once=False
) -> int:
    """Copy the index entries of a batch's windows, so that a GPU does not read the index.

    Args:
        slots, anchors: int64 [B]. extent: int64 [T, 3]. block_ids: int32 [H]. block_steps: int.
        first, last: first and last step of all windows, relative to the anchor.
        out_extent: int64 [B, 3], output: length in steps; position in `out_ids` of the trajectory's first block,
            negative if that block is before the windows, which alone are copied; number of final steps.
        out_ids: int32 [B, K], output: blocks of the windows.
        num_blocks: number of blocks of the table.
        once: whether the last of the K blocks is the trajectory's first, which has the values per trajectory; the
            windows then touch at most K - 1.

    Returns:
        Number of invalid slots, block tables and blocks, 0 unless the index is corrupt. Their blocks are 0.
    """
    width, bad = out_ids.shape[1], 0
    for b in range(len(slots)):
        steps, row, more = int64(1), int64(-1), int64(0)
        if slots[b] >= 0 and slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        low = min(max(anchors[b] + first, 0), steps + more - 1) // block_steps
        high = min(max(anchors[b] + last, 0), steps + more - 1) // block_steps
        out_extent[b, 0] = steps
        out_extent[b, 2] = more
        out_extent[b, 1] = b * width - low
        for i in range(min(high - low + 1, width)):
            place = row + low + i
            number = block_ids[place] if place >= 0 and place < len(block_ids) else -1
            if number < 0 or number >= num_blocks:
                number, bad = 0, bad + 1
            out_ids[b, i] = number
        if once:
            number = block_ids[row] if row >= 0 and row < len(block_ids) else -1
            if number < 0 or number >= num_blocks:
                number, bad = 0, bad + 1
            out_ids[b, width - 1] = number
    return bad


# The loops of the thread pool, see `gear_loader.native.threads`.


@compiled
def _work(mailbox: Array, base: int) -> bool:
    """Process chunks of the current job until all are taken; return whether any was left."""
    found = False
    while True:
        ticket = atomic_load(base + 8 * _TICKET)
        chunk, chunks = ticket & _CHUNK_MASK, ticket >> _CHUNK_BITS & _CHUNK_MASK
        if chunk >= chunks:
            return found
        if atomic_cas(base + 8 * _TICKET, ticket, ticket + 1) != ticket:
            continue
        found = True
        rows = mailbox[ROWS]
        columns = carray(pointer(mailbox[_COLUMNS]), (mailbox[_NUM_COLUMNS], WIDTH), np.int64)
        slots = carray(pointer(mailbox[_SLOTS]), (rows,), np.int64)
        anchors = carray(pointer(mailbox[_ANCHORS]), (rows,), np.int64)
        extent = carray(pointer(mailbox[_EXTENT]), (mailbox[_NUM_SLOTS], 3), np.int64)
        ids = carray(pointer(mailbox[_IDS]), (mailbox[_NUM_IDS],), np.int32)
        steps = mailbox[_STEPS]
        first, last = rows * chunk // chunks, rows * (chunk + 1) // chunks
        if mailbox[_PLACES] != 0:
            places = carray(pointer(mailbox[_PLACES]), (rows,), np.int64)
            bad = gather(columns, slots, anchors, extent, ids, steps, first, last, places)
        else:
            bad = gather(columns, slots, anchors, extent, ids, steps, first, last, None)
        if bad:
            atomic_add(base + 8 * _BAD, bad)
        atomic_add(base + 8 * DONE, 1)


@compiled
def serve(mailbox: Array, base: int, member: int) -> None:
    """Process jobs as a member until it is idle for SPINS polls and marked asleep."""
    state = base + 8 * (STATE + member)
    idle = 0
    while True:
        if _work(mailbox, base):
            idle = 0
        idle += 1
        pause()
        if idle > atomic_load(base + 8 * SPINS):
            before = atomic_load(base + 8 * _TICKET)
            atomic_store(state, ASLEEP)
            # A job posted before the mark was visible does not wake this member, so check once more.
            if atomic_load(base + 8 * _TICKET) == before or atomic_cas(state, ASLEEP, _AWAKE) != ASLEEP:
                return
            idle = 0


@compiled
def look(base: int, spins: int) -> int:
    """Poll for work `spins` times, as `serve` does, without taking any; for timing."""
    found = 0
    for _ in range(spins):
        ticket = atomic_load(base + 8 * _TICKET)
        found += (ticket & _CHUNK_MASK) < (ticket >> _CHUNK_BITS & _CHUNK_MASK)
        pause()
    return found


@compiled
def post(base: int, members: int, chunks: int) -> int:
    """Publish the job in the mailbox; return a bit mask of the members to wake."""
    atomic_store(base + 8 * DONE, 0)
    atomic_store(base + 8 * _BAD, 0)
    number = (atomic_load(base + 8 * _TICKET) >> 2 * _CHUNK_BITS) + 1
    atomic_store(base + 8 * _TICKET, (number << _CHUNK_BITS | chunks) << _CHUNK_BITS)
    asleep = 0
    for member in range(members):
        if atomic_cas(base + 8 * (STATE + member), ASLEEP, _AWAKE) == ASLEEP:
            asleep |= 1 << member
    return asleep


@compiled
def finish(mailbox, base, chunks):  # type: ignore[no-untyped-def]
    """Process chunks as the caller, then wait for the chunks of the members; return the sum of `gather`'s results."""
    _work(mailbox, base)
    while atomic_load(base + 8 * DONE) < chunks:
        pause()
    return atomic_load(base + 8 * _BAD)
