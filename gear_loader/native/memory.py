"""Moves of bytes between raw addresses, and atomic operations on them: what the compiled loops (numba) are made of.

The arguments are raw addresses, which the callers have checked.
"""

from __future__ import annotations

import platform
from typing import Any

from llvmlite import ir
from numba import int64, njit, types
from numba.core import cgutils
from numba.extending import intrinsic


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
    value_type = ir.IntType(8 * size) if size <= 16 else ir.VectorType(ir.IntType(64), size // 8)

    @intrinsic  # type: ignore[untyped-decorator]
    def copy(_context: Any, _target: Any, _source: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kind = value_type.as_pointer()
            value = builder.load(builder.inttoptr(args[1], kind), align=1)
            builder.store(value, builder.inttoptr(args[0], kind), align=1)

        return types.void(types.int64, types.int64), codegen

    return copy


copy_1, copy_2, copy_4, copy_8, copy_16, copy_32, copy_64 = map(_copy_of, (1, 2, 4, 8, 16, 32, 64))


@intrinsic  # type: ignore[untyped-decorator]
def prefetch(_context: Any, address: Any) -> Any:
    """Fetch the line of an address, int64 or uint64, into the cache, if it is a valid one. Does not wait."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [cgutils.voidptr_t, number, number, number])
        function = cgutils.get_or_insert_function(builder.module, kind, "llvm.prefetch.p0i8")
        place = builder.inttoptr(args[0], cgutils.voidptr_t)
        builder.call(function, [place, number(0), number(3), number(1)])

    return types.void(address), codegen


@intrinsic  # type: ignore[untyped-decorator]
def fill(_context: Any, _target: Any, _value: Any, _count: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        target, value, count = args
        byte = builder.trunc(value, cgutils.int8_t)
        memset = builder.module.declare_intrinsic("llvm.memset", (cgutils.voidptr_t, cgutils.intp_t))
        builder.call(memset, (builder.inttoptr(target, cgutils.voidptr_t), byte, count, cgutils.false_bit))

    return types.void(types.int64, types.int64, types.int64), codegen


@intrinsic  # type: ignore[untyped-decorator]
def differ(_context: Any, _one: Any, _other: Any, _count: Any) -> Any:
    """Whether two places in memory hold different bytes, by the C library's `memcmp`."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        one, other, count = args
        kind = ir.FunctionType(ir.IntType(32), [cgutils.voidptr_t, cgutils.voidptr_t, cgutils.intp_t])
        function = cgutils.get_or_insert_function(builder.module, kind, "memcmp")
        places = [builder.inttoptr(place, cgutils.voidptr_t) for place in (one, other)]
        return builder.icmp_signed("!=", builder.call(function, [*places, count]), ir.IntType(32)(0))

    return types.boolean(types.int64, types.int64, types.int64), codegen


def _difference_of(size: int) -> Any:
    """A function that says whether two addresses hold so many different bytes."""
    kind = ir.IntType(8 * size).as_pointer()

    @intrinsic  # type: ignore[untyped-decorator]
    def compare(_context: Any, _one: Any, _other: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            one, other = (builder.load(builder.inttoptr(place, kind), align=1) for place in args)
            return builder.icmp_unsigned("!=", one, other)

        return types.boolean(types.int64, types.int64), codegen

    return compare


_differ_4, _differ_8, _differ_16 = map(_difference_of, (4, 8, 16))


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


_BYTES_AHEAD = 1 << 11
"""How far ahead a long copy requests what it reads: the processor's own prefetching ends at each page. Past the caches,
rows of 42 KB in huge pages take 0.86 to 0.88 of the time on a Xeon with 480 MiB of L3; others 0.95 on an EPYC, where a
kilobyte ahead takes 1.02 to 1.03."""


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def copy_ahead(target, source, count) -> None:  # type: ignore[no-untyped-def]
    """`copy_bytes` of many bytes."""
    done = int64(0)
    while done + 64 <= count:
        prefetch(source + min(done + _BYTES_AHEAD, count - 1))
        copy_64(target + done, source + done)
        done += 64
    copy_bytes(target + done, source + done, count - done)


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def copy_past_caches(target, source, count) -> None:  # type: ignore[no-untyped-def]
    """`copy_bytes` of which all whole lines are written past the caches; the caller calls `order_stores` at its end."""
    done = min(-target % 64, count)
    copy_bytes(target, source, done)
    while done + 64 <= count:
        prefetch(source + min(done + _BYTES_AHEAD, count - 1))  # one loop: it is compiled into many others
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
            copy_4(target + i * apart, source + i * every)
    elif size == 8:
        for i in range(count):
            copy_8(target + i * apart, source + i * every)
    elif size == 16:
        for i in range(count):
            copy_16(target + i * apart, source + i * every)
    elif size == 1:
        for i in range(count):
            copy_1(target + i * apart, source + i * every)
    elif size < 4:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_2(to, of)
            copy_1(to + size - 1, of + size - 1)
    elif size < 8:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_4(to, of)
            copy_4(to + size - 4, of + size - 4)
    elif size < 16:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_8(to, of)
            copy_8(to + size - 8, of + size - 8)
    elif size <= 32:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_16(to, of)
            copy_16(to + size - 16, of + size - 16)
    elif size <= 64:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_32(to, of)
            copy_32(to + size - 32, of + size - 32)
    elif size <= 128:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            copy_64(to, of)
            copy_64(to + size - 64, of + size - 64)
    else:
        for i in range(count):
            to, of = target + i * apart, source + i * every
            for done in range(0, size - 64, 64):
                copy_64(to + done, of + done)
            copy_64(to + size - 64, of + size - 64)


@njit(inline="always")
def differ_step(one, other, size):  # type: ignore[no-untyped-def]
    """`differ` of one step: of the usual sizes without a call."""
    if size == 16:
        return _differ_16(one, other)
    if size == 4:
        return _differ_4(one, other)
    if size == 8:
        return _differ_8(one, other)
    return differ(one, other, size)


@njit(forceinline=True, no_cpython_wrapper=True, no_cfunc_wrapper=True)  # type: ignore[untyped-decorator]
def copy_step(target, source, size) -> None:  # type: ignore[no-untyped-def]
    """Copy one step: of the usual sizes without a call, by moves that overlap where it is no power of two."""
    if size == 4:
        copy_4(target, source)
    elif size == 8:
        copy_8(target, source)
    elif size == 16:
        copy_16(target, source)
    elif size == 1:
        copy_1(target, source)
    elif 16 < size <= 32:
        copy_16(target, source)
        copy_16(target + size - 16, source + size - 16)
    elif 32 < size <= 64:
        copy_32(target, source)
        copy_32(target + size - 32, source + size - 32)
    elif 64 < size <= 128:
        copy_64(target, source)
        copy_64(target + size - 64, source + size - 64)
    else:
        copy_bytes(target, source, size)
