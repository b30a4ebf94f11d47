"""What many tensors are, asked by one compiled loop through the table of C functions that DLPack defines for types.

In Python each property of a tensor takes a call of 40 to 80 ns; DLPack's function tells place, dtype, shape and strides
in 40 ns. PyTorch 2.13 has the table; one without it is asked in Python (`gear_loader.storage.quick_check`).
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from llvmlite import ir
from numba import carray, types
from numba.core import cgutils
from numba.extending import intrinsic

from gear_loader.native.compile import compiled
from gear_loader.native.memory import pointer
from gear_loader.utils.arrays import Array

_MAJOR = 1  # version of the table
_FUNCTION = (
    5  # of the table's words: DLTensorFromPyObjectNoSync, after versions, an older table and three functions
)
# DLTensor, in words of 8 bytes
_DATA, _DEVICE, _KIND, _SHAPE, _STRIDES, _OFFSET = range(6)
_CPU = 1
_INT, _UINT, _FLOAT, _BFLOAT, _BOOL = 0, 1, 2, 4, 6
_CODES = {
    torch.bool: _BOOL,
    torch.uint8: _UINT,
    torch.int8: _INT,
    torch.int16: _INT,
    torch.int32: _INT,
    torch.int64: _INT,
    torch.float16: _FLOAT,
    torch.bfloat16: _BFLOAT,
    torch.float32: _FLOAT,
    torch.float64: _FLOAT,
}


@functools.cache
def _function() -> int:
    """Address of PyTorch's function; 0 if it has none of this version."""
    table = getattr(torch.Tensor, "__dlpack_c_exchange_api__", None)
    if table is None:
        return 0
    prototype = ctypes.PYFUNCTYPE(ctypes.c_void_p, ctypes.py_object, ctypes.c_char_p)
    try:
        address = prototype(("PyCapsule_GetPointer", ctypes.pythonapi))(table, b"dlpack_exchange_api")
    except ValueError:
        return 0
    words = (ctypes.c_uint64 * (_FUNCTION + 1)).from_address(address)
    return int(words[_FUNCTION]) if words[0] & 0xFFFFFFFF == _MAJOR else 0


def can_describe() -> bool:
    """Whether PyTorch has the table."""
    return _function() != 0


def describe(
    tensors: Sequence[torch.Tensor], dtype: torch.dtype, shape: tuple[int, ...], *, once: bool
) -> Array | None:
    """Check tensors: on the CPU, contiguous, not empty, of a dtype, of shape ``[T, *shape]`` or, with `once`, `shape`.

    Only where `can_describe`.

    Args:
        tensors: of exactly this type, strided.

    Returns:
        Address and T of each, int64 [n, 2]; T is 1 with `once`. None if one is otherwise.
    """
    objects = np.fromiter(map(id, tensors), np.int64, len(tensors))
    kind = _CODES[dtype] | 8 * dtype.itemsize << 8 | 1 << 16
    found = np.empty((len(tensors), 2), dtype=np.int64)
    inner = np.array(shape, dtype=np.int64)
    return found if _describe(objects, _function(), kind, inner, once, found) else None


@intrinsic  # type: ignore[untyped-decorator]
def _ask(_context: Any, _function: Any, _tensor: Any, _answer: Any) -> Any:
    """Whether the function has described a tensor; if not, its exception is dropped. With the GIL."""

    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        number = ir.IntType(32)
        kind = ir.FunctionType(number, [cgutils.voidptr_t, cgutils.voidptr_t])
        function = builder.inttoptr(args[0], kind.as_pointer())
        tensor, answer = (builder.inttoptr(place, cgutils.voidptr_t) for place in args[1:])
        done = builder.icmp_signed("==", builder.call(function, [tensor, answer]), number(0))
        with builder.if_then(builder.not_(done), likely=False):
            clear = ir.FunctionType(ir.VoidType(), [])
            builder.call(cgutils.get_or_insert_function(builder.module, clear, "PyErr_Clear"), [])
        return done

    return types.boolean(types.int64, types.int64, types.int64), codegen


@functools.partial(compiled, nogil=False)
def _describe(objects: Any, function: Any, kind: Any, shape: Any, once: Any, found: Any) -> Any:
    answer = np.empty(6, dtype=np.int64)
    inner = len(shape)
    for i in range(len(objects)):
        if not _ask(function, objects[i], answer.ctypes.data):
            return False
        dims = inner if once else inner + 1
        if answer[_DEVICE] & 0xFFFFFFFF != _CPU or answer[_OFFSET] != 0 or answer[_DATA] == 0:
            return False
        if answer[_KIND] & 0xFFFFFFFF != dims or answer[_KIND] >> 32 != kind:
            return False
        sizes = carray(pointer(answer[_SHAPE]), (dims,), np.int64)
        strides = carray(pointer(answer[_STRIDES]), (dims,), np.int64)
        stride, steps = 1, 1
        for d in range(dims):
            back = dims - 1 - d
            size = sizes[back]
            if d < inner and size != shape[inner - 1 - d]:
                return False
            if size != 1 and strides[back] != stride:
                return False
            stride *= size
            if d == inner:
                steps = size
        if stride == 0:
            return False
        found[i, 0] = answer[_DATA]
        found[i, 1] = steps
    return True
