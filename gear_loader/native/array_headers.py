"""Whether numpy arrays have the dtypes and shapes expected, and where their elements are, asked by one compiled loop.

In Python each property of an array takes a call of 30 to 80 ns. The loop reads the fields of numpy's `PyArrayObject`
(https://numpy.org/doc/stable/reference/c-api/types-and-structures.html), which `_are_known` compares with what Python
says of an array.
"""

from __future__ import annotations

import ctypes
import functools
import operator
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
from numba import carray, int64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import pointer
from gear_loader.utils.arrays import DATA, Array

# Words of an array from its type on; what is expected of one: dtype, number of dimensions, and these.
_TYPE, _ELEMENTS, _DIMENSIONS, _SHAPE, _STRIDES, _BASE, _DTYPE, _FLAGS, _WORDS = range(9)
_C_CONTIGUOUS = 1


class ArrayHeaders:
    """Finds the elements of arrays, one of each name, of exactly these dtypes and shapes.

    Args:
        names, dtypes, shapes: of the arrays; a dtype of None is no array's.
        found: int64 [C, 2], of which the first column is an output: the address of each one's elements.
    """

    def __init__(
        self,
        names: list[str],
        dtypes: list[np.dtype[Any] | None],
        shapes: list[tuple[int, ...]],
        found: Array,
    ) -> None:
        width = 2 + max(map(len, shapes), default=0)
        rows = [[id(dtype), len(shape), *shape] for dtype, shape in zip(dtypes, shapes, strict=True)]
        self._kept = dtypes
        self._objects = np.zeros(len(names), dtype=np.int64)
        self._expected = np.array([row + [0] * (width - len(row)) for row in rows], dtype=np.int64)
        self._found = found[:, 0]
        self._pack = struct.Struct(f"={len(names)}q").pack_into
        # One name would give no tuple.
        self._take = operator.itemgetter(*names) if len(names) > 1 else lambda rows: (rows[names[0]],)
        self._usable = _are_known() and None not in dtypes and len(names) > 0

    def read(self, rows: Any) -> bool:
        """Find the elements; return False if anything is otherwise, or `rows` is no dict.

        Args:
            rows: name -> anything.
        """
        if not self._usable or type(rows) is not dict or len(rows) != len(self._objects):
            return False
        try:
            values = self._take(rows)
        except KeyError:
            return False
        self._pack(self._objects.data, 0, *map(id, values))
        return bool(_read(self._objects, _ARRAY, DATA, self._expected, self._found, self._found))


def describe_arrays(values: Sequence[Any], dtype: np.dtype[Any], shape: tuple[int, ...]) -> Array | None:
    """Where the elements of C-contiguous arrays are, and how long they are.

    Args:
        values: anything. dtype, shape: of all of them; the first extent of -1 is any of at least 1.

    Returns:
        Address and first extent of each, int64 [n, 2]; the latter is 1 where `shape` says it. None if one is otherwise.
    """
    if not _are_known():
        return None
    objects = np.fromiter(map(id, values), np.int64, len(values))
    expected, found = np.array([[id(dtype), len(shape), *shape]]), np.ones((len(values), 2), dtype=np.int64)
    return found if _read(objects, _ARRAY, DATA, expected, found[:, 0], found[:, 1]) else None


_ARRAY = id(np.ndarray)


@compiled
def _read(objects, kind, data, expected, found, lengths):  # type: ignore[no-untyped-def]
    for c in range(len(objects)):
        row = min(c, len(expected) - 1)
        words = carray(pointer(objects[c] + data - 8), (_WORDS,), np.int64)
        if words[_TYPE] != kind or words[_DTYPE] != expected[row, 0]:
            return False
        if words[_DIMENSIONS] & 0xFFFFFFFF != expected[row, 1] or words[_FLAGS] & _C_CONTIGUOUS == 0:
            return False
        shape = carray(pointer(words[_SHAPE]), (expected[row, 1],), np.int64)
        for d in range(len(shape)):
            if d == 0 and expected[row, 2] == -1 and shape[0] > 0:
                lengths[c] = shape[0]
            elif shape[d] != expected[row, 2 + d]:
                return False
        found[c] = int64(words[_ELEMENTS])
    return True


@functools.cache
def _are_known() -> bool:
    """Whether this interpreter's and numpy's objects are as `_read` expects them."""
    array = np.zeros((3, 5, 2), dtype=np.float32)
    other = array[:, :4]
    for each in (array, other):
        words = (ctypes.c_int64 * _WORDS).from_address(id(each) + DATA - 8)
        shape = (ctypes.c_int64 * each.ndim).from_address(words[_SHAPE])
        strides = (ctypes.c_int64 * each.ndim).from_address(words[_STRIDES])
        if (words[_TYPE], words[_ELEMENTS], words[_DTYPE]) != (_ARRAY, each.ctypes.data, id(each.dtype)):
            return False
        if (
            words[_DIMENSIONS] & 0xFFFFFFFF != 3
            or tuple(shape) != each.shape
            or tuple(strides) != each.strides
        ):
            return False
        if bool(words[_FLAGS] & _C_CONTIGUOUS) != each.flags.c_contiguous:
            return False
    return True
