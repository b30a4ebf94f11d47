"""The compiled loops of the CPU path (numba): copying between blocks and rows at memory speed.

Raw addresses in, bytes moved; the callers have checked everything. They release the GIL, so that several
threads copy at once. Where numba cannot be imported, `AVAILABLE` is False and the torch twins do the work.
"""

from __future__ import annotations

import platform
from typing import Any

from gear_loader.kernels.plan import (
    BASE,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    PAD_HEAD,
    PAD_KEEP,
    STEP_BYTES,
    STRIDE,
    WIDTH,
)
from gear_loader.notice import notice

__all__ = ["AVAILABLE", "WIDTH", "gather", "require", "resolve", "scatter"]

try:
    from llvmlite import ir
    from numba import int64, njit, types
    from numba.core import cgutils
    from numba.extending import intrinsic

    AVAILABLE = True
    REASON = ""
except ImportError as error:  # pragma: no cover - depends on the environment
    AVAILABLE = False
    REASON = str(error)


def require() -> bool:
    """Whether the compiled loops are there; if not, say so once."""
    if not AVAILABLE:
        notice(
            "numba",
            f"numba cannot be imported ({REASON}): the CPU path runs on plain torch, which is slower.",
        )
    return AVAILABLE


if AVAILABLE:

    @intrinsic  # type: ignore[untyped-decorator]
    def _copy(_context: Any, _target: Any, _source: Any, _count: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            target, source, count = args
            pointer = cgutils.voidptr_t
            cgutils.raw_memcpy(
                builder, builder.inttoptr(target, pointer), builder.inttoptr(source, pointer), count, 1
            )

        return types.void(types.int64, types.int64, types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def _fill(_context: Any, _target: Any, _value: Any, _count: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            target, value, count = args
            byte = builder.trunc(value, cgutils.int8_t)
            memset = builder.module.declare_intrinsic("llvm.memset", (cgutils.voidptr_t, cgutils.intp_t))
            builder.call(
                memset, (builder.inttoptr(target, cgutils.voidptr_t), byte, count, cgutils.false_bit)
            )

        return types.void(types.int64, types.int64, types.int64), codegen

    def _word(builder: Any, address: Any) -> Any:
        return builder.inttoptr(address, ir.IntType(64).as_pointer())

    @intrinsic  # type: ignore[untyped-decorator]
    def atomic_load(_context: Any, _address: Any) -> Any:
        """The int64 at an address."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.load_atomic(_word(builder, args[0]), "seq_cst", 8)

        return types.int64(types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def atomic_store(_context: Any, _address: Any, _value: Any) -> Any:
        """Write the int64 at an address."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            builder.store_atomic(args[1], _word(builder, args[0]), "seq_cst", 8)

        return types.void(types.int64, types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def atomic_add(_context: Any, _address: Any, _value: Any) -> Any:
        """Add to the int64 at an address; what it was before."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.atomic_rmw("add", _word(builder, args[0]), args[1], "seq_cst")

        return types.int64(types.int64, types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def atomic_cas(_context: Any, _address: Any, _expected: Any, _value: Any) -> Any:
        """Replace the int64 at an address if it is as expected; what it was before."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            pair = builder.cmpxchg(_word(builder, args[0]), args[1], args[2], "seq_cst", "seq_cst")
            return builder.extract_value(pair, 0)

        return types.int64(types.int64, types.int64, types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def pause(_context: Any) -> Any:
        """Tell the processor that this is a waiting loop."""

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
        """An address as the pointer that `numba.carray` takes."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            return builder.inttoptr(args[0], cgutils.voidptr_t)

        return types.voidptr(types.int64), codegen

    _LINE = 64
    _STREAM_BYTES = 1024  # smaller pieces are not worth the alignment

    @intrinsic  # type: ignore[untyped-decorator]
    def _stream_lines(_context: Any, _target: Any, _source: Any) -> Any:
        """Copy 256 bytes to an address that is a multiple of 64, past the caches."""

        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            line = ir.VectorType(ir.IntType(64), _LINE // 8)
            target, source = (builder.inttoptr(address, line.as_pointer()) for address in args)
            hint = builder.module.add_metadata([ir.Constant(ir.IntType(32), 1)])
            places = [ir.Constant(ir.IntType(64), i) for i in range(4)]
            values = [builder.load(builder.gep(source, [place]), align=1) for place in places]
            for place, value in zip(places, values, strict=True):
                store = builder.store(value, builder.gep(target, [place]), align=_LINE)
                store.set_metadata("nontemporal", hint)

        return types.void(types.int64, types.int64), codegen

    @intrinsic  # type: ignore[untyped-decorator]
    def _fence(_context: Any) -> Any:
        """Make streamed stores visible to other threads before anything that follows."""

        def codegen(_context: Any, builder: Any, _signature: Any, _args: Any) -> Any:
            builder.fence("seq_cst")

        return types.void(), codegen

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _copy_streamed(target, source, count) -> None:  # type: ignore[no-untyped-def]
        head = min(-target % _LINE, count)
        if head:
            _copy(target, source, head)
        body = (count - head) // (4 * _LINE)
        for i in range(body):
            _stream_lines(target + head + i * 4 * _LINE, source + head + i * 4 * _LINE)
        done = head + body * 4 * _LINE
        if done < count:
            _copy(target + done, source + done, count - done)

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def scatter(  # type: ignore[no-untyped-def]
        base, stride, step_bytes, block_steps, ids, source, length
    ) -> None:
        """Copy a trajectory's steps into its blocks of one column.

        Args:
            base: address of the column. stride: bytes from block to block. step_bytes: bytes of a step.
            block_steps: steps of a block. ids: the trajectory's blocks, int32 [blocks].
            source: address of the steps, contiguous. length: number of steps.
        """
        block_bytes = block_steps * step_bytes
        for i in range(len(ids)):
            steps = min(block_steps, length - i * block_steps)
            _copy(base + int64(ids[i]) * stride, source + i * block_bytes, steps * step_bytes)

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _window(begin, length, steps, pad):  # type: ignore[no-untyped-def]
        """First step of a window that exists, number of steps that do, and the padding before them."""
        low = min(max(begin, 0), steps)
        count = max(min(begin + length, steps), low) - low
        if pad == PAD_HEAD:
            return low, count, length - count
        if pad == PAD_KEEP:
            return low, count, low - begin if count > 0 else length
        return low, count, 0

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def _copy_steps(  # type: ignore[no-untyped-def]
        target, base, stride, step_bytes, low, count, block_ids, row, block_steps, stream
    ) -> None:
        """Copy steps `low` to `low + count - 1` of a trajectory out of its blocks of one column."""
        step, end = low, low + count
        while step < end:
            block = step // block_steps
            inside = step - block * block_steps
            take = min(block_steps - inside, end - step)
            source = base + int64(block_ids[row + block]) * stride + inside * step_bytes
            if stream and take * step_bytes >= _STREAM_BYTES:
                _copy_streamed(target, source, take * step_bytes)
            else:
                _copy(target, source, take * step_bytes)
            target += take * step_bytes
            step += take

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def gather(  # type: ignore[no-untyped-def]
        columns, slots, anchors, extent, block_ids, block_steps, first, last, stream=False
    ) -> None:
        """Fill rows `first` to `last - 1` of a batch: steps, padding and masks of every column.

        Args:
            columns: int64 [C, WIDTH], one row a column, as `gear_loader.kernels.plan` lays it out.
            slots, anchors: int64 [B]. extent: int64 [T, 2]. block_ids: int32 [H]. block_steps: int.
            stream: write large pieces past the caches: faster where the batch does not fit into them.
        """
        for b in range(first, last):
            steps, row = extent[slots[b], 0], extent[slots[b], 1]
            for c in range(columns.shape[0]):
                step_bytes, length = columns[c, STEP_BYTES], columns[c, LENGTH]
                low, count, head = _window(anchors[b] + columns[c, OFFSET], length, steps, columns[c, PAD])
                out = columns[c, OUT] + b * length * step_bytes
                if head > 0:
                    _fill(out, 0, head * step_bytes)
                out += head * step_bytes
                base, stride = columns[c, BASE], columns[c, STRIDE]
                _copy_steps(out, base, stride, step_bytes, low, count, block_ids, row, block_steps, stream)
                tail = length - head - count
                if tail > 0:
                    _fill(out + count * step_bytes, 0, tail * step_bytes)
                mask = columns[c, MASK]
                if mask != 0:
                    mask += b * length
                    _fill(mask, 0, head)
                    _fill(mask + head, 1, count)
                    _fill(mask + head + count, 0, tail)
        if stream:
            _fence()

    @njit(nogil=True, cache=True)  # type: ignore[untyped-decorator]
    def resolve(  # type: ignore[no-untyped-def]
        slots, anchors, extent, block_ids, block_steps, first, last, out_extent, out_ids
    ) -> None:
        """Copy what the windows of a batch need of the index, so that a GPU need not look it up itself.

        Args:
            slots, anchors: int64 [B]. extent: int64 [T, 2]. block_ids: int32 [H]. block_steps: int.
            first, last: the steps before and after the anchor that any column's window covers.
            out_extent: int64 [B, 2], row b: length in steps, and the place in `out_ids` where the block table of the
                trajectory would start; it holds the blocks of the windows only, so this may be negative.
            out_ids: int32 [B, K], the windows' blocks.
        """
        width = out_ids.shape[1]
        for b in range(len(slots)):
            steps = extent[slots[b], 0]
            row = extent[slots[b], 1]
            low = min(max(anchors[b] + first, 0), steps - 1) // block_steps
            high = min(max(anchors[b] + last, 0), steps - 1) // block_steps
            out_extent[b, 0] = steps
            out_extent[b, 1] = b * width - low
            for i in range(high - low + 1):
                out_ids[b, i] = block_ids[row + low + i]

else:  # pragma: no cover - depends on the environment
    scatter = gather = resolve = None
