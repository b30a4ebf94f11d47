"""What PTX's instructions without memory compute, on arrays over threads."""

from __future__ import annotations

import ctypes
import ctypes.util
from collections.abc import Callable
from typing import Any

import numpy as np

Array = np.ndarray[Any, Any]
Operation = Callable[..., Array]

TYPES = {
    **{
        f"{kind}{bits}": np.dtype(f"{code}{bits // 8}")
        for kind, code in (("b", "u"), ("u", "u"), ("s", "i"))
        for bits in (8, 16, 32, 64)
    },
    "f16": np.dtype(np.float16),
    "f32": np.dtype(np.float32),
    "f64": np.dtype(np.float64),
    "pred": np.dtype(np.bool_),
}
"""PTX's types that the kernels use."""

_libm = ctypes.CDLL(ctypes.util.find_library("m"))
_libm.fma.restype, _libm.fma.argtypes = ctypes.c_double, [ctypes.c_double] * 3
_fma = np.frompyfunc(_libm.fma, 3, 1)

_COMPARE: dict[str, Operation] = {
    "eq": np.equal,
    "ne": np.not_equal,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
}
_ORDER = {name: _COMPARE[name[:-1]] for name in ("equ", "neu", "ltu", "leu", "gtu", "geu")}


def constant(operand: str) -> int:
    """The bits of a number in the text: decimal, hexadecimal, or a floating-point number's bits."""
    if operand[:2] in ("0f", "0d", "0F", "0D"):
        return int(operand[2:], 16)
    return int(operand.rstrip("U"), 0)


def operation(parts: tuple[str, ...]) -> tuple[Operation, list[str], str]:
    """A function of arrays for an instruction, the types of its inputs, and that of its output.

    Raises:
        KeyError, ValueError: an instruction, or a form of it, that is not known.
    """
    name, kind = parts[0], parts[-1]
    dtype = TYPES[kind]
    flags = set(parts[1:-1])
    if name == "cvt":
        return _conversion(parts)
    if name == "setp":
        (order,) = flags
        return _comparison(order), [kind, kind], "pred"
    if name == "selp":
        return (lambda x, y, p: np.where(p, x, y)), [kind, kind, "pred"], kind
    if kind == "pred":
        logic = {"and": np.logical_and, "or": np.logical_or, "xor": np.logical_xor, "not": np.logical_not}[
            name
        ]
        return logic, [kind] * (1 if name == "not" else 2), kind
    if name in ("shl", "shr"):
        return _shift(name, dtype), [kind, "u32"], kind
    if name == "bfe":
        _only(flags, kind in ("u32", "s32"))
        return (_extract if kind == "u32" else _extract_signed), [kind, "u32", "u32"], kind
    if name == "prmt":
        _only(flags, kind == "b32")
        return _permute, ["u32", "u32", "u32"], kind
    if name in ("mul", "mad") and dtype.kind != "f":
        return _multiplication(name, parts[1], kind)
    if "relu" in flags:  # and not below zero
        _only(flags - {"relu"}, name in ("min", "max") and kind == "s32")
        whole = _plain(name, dtype, False)
        return (lambda x, y: np.maximum(whole(x, y), 0)), [kind] * 2, kind
    # Rounding to nearest, without contraction, is what numpy does; denormals count, but for .ftz.
    allowed = {"rn", "approx", "ftz"} if dtype.kind == "f" else set()
    _only(flags - allowed, True)
    count = 1 if name in ("not", "neg", "abs", "rcp") else 3 if name == "fma" else 2
    return _plain(name, dtype, "ftz" in flags), [kind] * count, kind


def _only(rest: set[str], known: bool) -> None:
    if rest or not known:
        raise ValueError(f"unknown form {sorted(rest)}")


def _plain(name: str, dtype: np.dtype[Any], flush: bool) -> Operation:
    if dtype.kind == "f":
        table: dict[str, Operation] = {
            "add": np.add,
            "sub": np.subtract,
            "mul": np.multiply,
            "div": np.divide,
            "neg": np.negative,
            "abs": np.abs,
            "min": np.fmin,
            "max": np.fmax,
            "fma": lambda x, y, z: _fma(x, y, z).astype(np.float64),
            "rcp": _reciprocal,
        }
        if name == "fma" and dtype != np.float64:
            raise ValueError("fma of float32")
        found = table[name]
        if not flush or name == "rcp":
            return found
        tiny = np.finfo(dtype).tiny
        return lambda *inputs: found(
            *(np.where(np.abs(x) < tiny, np.copysign(dtype.type(0), x), x) for x in inputs)
        )
    table = {
        "add": np.add,
        "sub": np.subtract,
        "min": np.minimum,
        "max": np.maximum,
        "and": np.bitwise_and,
        "or": np.bitwise_or,
        "xor": np.bitwise_xor,
        "not": np.bitwise_not,
        "neg": np.negative,
        "abs": np.abs,
        "div": lambda x, y: _division(x, y)[0],
        "rem": lambda x, y: _division(x, y)[1],
    }
    return table[name]


def _reciprocal(x: Array) -> Array:
    """The approximation of float64: the upper half of its bits."""
    return ((1.0 / x).view(np.uint64) & np.uint64(0xFFFFFFFF00000000)).view(np.float64)


def _division(x: Array, y: Array) -> tuple[Array, Array]:
    """Quotient towards zero, and remainder; of a division by zero, which has no result, anything."""
    y = np.where(y == 0, y.dtype.type(1), y)
    rest = np.fmod(x, y)
    return ((x - rest) // y).astype(x.dtype), rest


def _comparison(order: str) -> Operation:
    if order == "num":
        return lambda x, y: ~(np.isnan(x) | np.isnan(y))
    if order == "nan":
        return lambda x, y: np.isnan(x) | np.isnan(y)
    if order in _ORDER:
        compare = _ORDER[order]
        return lambda x, y: compare(x, y) | np.isnan(x) | np.isnan(y)
    if order == "ne":  # false where a number is missing, unlike numpy's
        return lambda x, y: (x != y) & ((x == x) & (y == y))
    return _COMPARE[order]


def _shift(name: str, dtype: np.dtype[Any]) -> Operation:
    bits = 8 * dtype.itemsize

    def shift(x: Array, count: Array) -> Array:
        within = np.minimum(count, bits - 1).astype(dtype)
        if name == "shr":
            found = x >> within
            return found if dtype.kind == "i" else np.where(count >= bits, dtype.type(0), found)
        return np.where(count >= bits, dtype.type(0), x << within)

    return shift


def _extract(x: Array, first: Array, count: Array) -> Array:
    wide = x.astype(np.uint64) >> np.minimum(first & np.uint32(255), 63).astype(np.uint64)
    mask = (np.uint64(1) << np.minimum(count & np.uint32(255), 63).astype(np.uint64)) - np.uint64(1)
    return (wide & mask).astype(np.uint32)


def _extract_signed(x: Array, first: Array, count: Array) -> Array:
    """The field's highest bit, or that of the word where the field goes beyond it, fills what is above."""
    first, count = (np.minimum(each & np.uint32(255), 32).astype(np.int64) for each in (first, count))
    length = np.minimum(first + count, 32) - first
    above = np.where(length > 0, 64 - length, 0)
    field = (x.astype(np.int64) >> first) << above >> above
    beyond = np.where(count > 0, x.astype(np.int64) >> 31, 0)
    return np.where(length > 0, field, beyond).astype(np.int32)


def _permute(x: Array, y: Array, choice: Array) -> Array:
    """Four of eight bytes, in any order."""
    sources = np.stack([x, y], axis=1).view(np.uint8).astype(np.uint32)
    found = np.zeros(len(x), dtype=np.uint32)
    for i in range(4):
        nibble = (choice >> np.uint32(4 * i)) & np.uint32(15)
        byte = np.take_along_axis(sources, (nibble & 7)[:, None].astype(np.int64), axis=1)[:, 0]
        byte = np.where(nibble & 8, np.where(byte & 128, np.uint32(255), np.uint32(0)), byte)
        found |= byte << np.uint32(8 * i)
    return found


def _high(x: Array, y: Array) -> Array:
    """The upper 64 bits of products of 64 bits."""
    half, low = np.uint64(32), np.uint64(0xFFFFFFFF)
    (x_high, x_low), (y_high, y_low) = ((each >> half, each & low) for each in (x, y))
    middle = x_high * y_low + (x_low * y_low >> half)
    other = x_low * y_high + (middle & low)
    return x_high * y_high + (middle >> half) + (other >> half)


def _multiplication(name: str, mode: str, kind: str) -> tuple[Operation, list[str], str]:
    bits, code = int(kind[1:]), kind[0]
    if mode == "lo":
        result, inner = kind, TYPES[kind]
    elif mode == "wide" and bits == 32:
        result, inner = f"{code}64", TYPES[f"{code}64"]
    elif mode == "hi" and kind == "u32" and name == "mul":
        high = np.uint64(32)
        return (lambda x, y: ((x.astype(np.uint64) * y) >> high).astype(np.uint32)), [kind, kind], kind
    elif mode == "hi" and kind == "u64" and name == "mul":
        return _high, [kind, kind], kind
    else:
        raise ValueError(f"unknown form {mode}")
    if name == "mul":
        return (lambda x, y: x.astype(inner) * y.astype(inner)), [kind, kind], result
    return (lambda x, y, z: x.astype(inner) * y.astype(inner) + z), [kind, kind, result], result


def _conversion(parts: tuple[str, ...]) -> tuple[Operation, list[str], str]:
    to, source = parts[-2], parts[-1]
    if to == "f16x2":  # two at once, the first in the upper half
        _only(set(parts[1:-2]) - {"rn"}, source == "f32")
        halves: Operation = lambda x: x.astype(np.float16).view(np.uint16).astype(np.uint32)  # noqa: E731
        return (lambda x, y: halves(x) << np.uint32(16) | halves(y)), ["f32", "f32"], "u32"
    flags, target = set(parts[1:-2]), TYPES[to]
    if TYPES[source].kind == "f" and target.kind != "f":
        _only(flags - {"rzi"}, flags == {"rzi"} and to in ("s32", "s64"))
        limits = np.iinfo(target)

        def truncated(x: Array) -> Array:
            inside = np.abs(x) < -float(limits.min)
            found = np.trunc(np.where(inside, x, 0)).astype(target)
            outside = np.where(x > 0, limits.max, np.where(x < 0, limits.min, 0))
            return np.where(inside, found, outside).astype(target)

        return truncated, [source], to
    _only(flags - {"rn"}, True)
    return (lambda x: x.astype(target)), [source], to


def shuffles(mode: str) -> Operation:
    """A function of lane, operand and clamp: the lane that is read from."""

    def source(lane: Array, operand: Array, clamp: Array) -> Array:
        segment, limit = (clamp >> 8) & 31, clamp & 31
        last, first = (lane & segment) | (limit & ~segment), lane & segment
        if mode == "bfly":
            other = lane ^ operand
            inside = other <= last
        elif mode == "up":
            other = lane - operand
            inside = other >= last
        elif mode == "idx":
            other = first | (operand & ~segment & 31)
            inside = other <= last
        else:
            raise ValueError(f"unknown mode {mode}")
        return np.where(inside, other, lane)

    if mode not in ("bfly", "up", "idx"):
        raise ValueError(f"unknown mode {mode}")
    return source
