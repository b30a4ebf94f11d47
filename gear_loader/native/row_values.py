"""One row of each of n environments, looked at by one compiled call: arrays, tensors and numbers as they come.

In Python each property of an array takes a call of 30 to 80 ns, and a copy into a row 300 ns. The loop reads the fields
of numpy's arrays, as `array_headers` does, and of Python's and numpy's numbers, which `_places` looks for; of tensors
it asks DLPack's function, as `tensors` does.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from gear_loader.native.array_headers import (
    _C_CONTIGUOUS,
    _DIMENSIONS,
    _DTYPE,
    _ELEMENTS,
    _FLAGS,
    _SHAPE,
    _are_known,
)
from gear_loader.native.compile import compiled, entry_of
from gear_loader.native.memory import copy_bytes, pointer
from gear_loader.native.tensors import _CODES, _ask, _function
from gear_loader.utils.arrays import DATA, Array, address_of, data_address

ENVS, SINGLE, TENSORS = 1, 2, 4
"""Result of `RowReader.read`: values have a dimension for environments, or none; some are tensors."""
_ALIGNED = 0x100
_DATA_WORD, _DEVICE, _KIND, _SIZES, _STRIDES, _OFFSET = range(6)  # DLTensor
_OTHER, _BOOL, _FLOAT, _INT32, _INT64 = range(5)
_CLASSES = {
    np.dtype(np.bool_): _BOOL,
    np.dtype(np.float32): _FLOAT,
    np.dtype(np.int32): _INT32,
    np.dtype(np.int64): _INT64,
}
_SMALLEST, _LARGEST = -5, 256  # integers of which Python keeps one object each
_LARGEST_FLOAT = float(np.finfo(np.float32).max)

# Head of the state of `_read_row`, int64: number of values, of environments; columns of each; address of the kinds of
# the rows [n], what is or-ed into them without and with a dimension for environments, and what if the trajectory ends;
# addresses of objects and types, DLPack's function, and where an array's fields and a tuple's items are.
(
    _COUNT,
    _ENVS,
    _WIDTH,
    _KINDS,
    _KIND_SINGLE,
    _KIND_ENVS,
    _KIND_ENDS,
    _ARRAY,
    _TENSOR,
    _ASK,
    _DOUBLE,
    _DATA_AT,
    _ITEMS_AT,
    _ZERO,
    _SPACING,
    _TRUE,
    _FALSE,
    _NUMPY_TRUE,
    _NUMPY_FALSE,
    _TYPE_FLOAT,
    _TYPE_FLOAT64,
    _TYPE_FLOAT32,
    _TYPE_INT64,
    _TYPE_INT32,
    _HEAD,
) = range(25)
_SCRATCH = 8  # words at its end
# Of a value: address of its dtype, its class, its kind for DLPack, bytes in all, dimensions with that for environments,
# address of memory for it, where the address at which it is found goes (0: it is copied into that memory), its extents.
_ITEM_DTYPE, _ITEM_CLASS, _ITEM_KIND, _ITEM_BYTES, _ITEM_DIMS, _ITEM_MEMORY, _ITEM_FOUND, _ITEM_SHAPE = range(
    8
)


class RowReader:
    """Finds the values of one row, or converts them: float64 to float32, and numbers.

    Args:
        rows: memory [n, *shape] of each value; the last two are bool [n], whether a trajectory terminates and whether
            it is truncated. found: int64 [1] for each, where the address of its elements goes, which may be that of
            its memory; None: they are copied into the memory.
        kinds: int64 [n], output: of each environment `single` or `envs`, plus `ends` where its trajectory ends.
    """

    def __init__(
        self,
        rows: Sequence[Array],
        found: Sequence[Array | None],
        kinds: Array,
        *,
        single: int,
        envs: int,
        ends: int,
    ) -> None:
        n, width = len(kinds), _ITEM_SHAPE + max(array.ndim for array in rows)
        places = _places()
        self._kept = list(rows), list(found), kinds
        items = _HEAD + len(rows) * width
        self._state: Array = np.zeros(items + _SCRATCH, dtype=np.int64)
        head = [len(rows), n, width, data_address(kinds), single, envs, ends, *(places or ())]
        self._state[: len(head)] = head
        for item, array, into in zip(self._state[_HEAD:items].reshape(-1, width), rows, found, strict=True):
            dtype = array.dtype
            tensor = (
                _CODES.get(torch.from_numpy(np.empty(0, dtype)).dtype, -1) if dtype.kind in "biuf" else -1
            )
            item[:_ITEM_SHAPE] = (
                *(
                    id(dtype),
                    _CLASSES.get(dtype, _OTHER),
                    -1 if tensor < 0 else tensor | 8 * dtype.itemsize << 8 | 1 << 16,
                ),
                *(array.nbytes, array.ndim, data_address(array), 0 if into is None else data_address(into)),
            )
            item[_ITEM_SHAPE : _ITEM_SHAPE + array.ndim] = array.shape
        self._call: Any = None if places is None else _read_row

    def read(self, values: tuple[Any, ...]) -> int:
        """Find all values, or none.

        Returns:
            ENVS, SINGLE, and TENSORS; 0 if a value is of another type, dtype or shape, or has to be looked at.
        """
        call = self._call
        if call is None:
            return 0
        answer = call(id(values), self._state)
        if call is _read_row:
            self._call = entry_of(_read_row)
        if answer & TENSORS and not all(map(_is_plain, values)):
            return 0
        return int(answer)


def _is_plain(value: Any) -> bool:
    """Whether a tensor's storage holds its elements as they are; DLPack does not tell."""
    return type(value) is not torch.Tensor or not (value.is_neg() or address_of(value) == 0)


@functools.cache
def _places() -> tuple[int, ...] | None:
    """Of the head of a state, what this interpreter tells; None if its objects are not as `_read_row` expects them."""
    spacing = id(1) - id(0)
    if any(id(number) != id(0) + spacing * number for number in range(_SMALLEST, _LARGEST + 1)):
        return None
    pair = (object(), object())
    items = [
        at
        for at in (24, 32)
        if [_word(id(pair) + at), _word(id(pair) + at + 8)] == [id(each) for each in pair]
    ]
    if not items or not _are_known():
        return None
    for number, kind in (
        (1.5, ctypes.c_double),
        (np.float64(2.5), ctypes.c_double),
        (np.float32(3.5), ctypes.c_float),
    ):
        if kind.from_address(id(number) + 16).value != number:
            return None
    for whole, size in ((np.int64(-(1 << 40)), ctypes.c_int64), (np.int32(-77), ctypes.c_int32)):
        if size.from_address(id(whole) + 16).value != whole:
            return None
    for each in (1.5, np.float32(1), np.zeros(1)):
        if _word(id(each) + 8) != id(type(each)):
            return None
    return (
        *(id(np.ndarray), id(torch.Tensor), _function(), id(np.dtype(np.float64)), DATA, items[0]),
        *(id(0), spacing, id(True), id(False), id(np.True_), id(np.False_)),
        *(id(float), id(np.float64), id(np.float32), id(np.int64), id(np.int32)),
    )


def _word(address: int) -> int:
    return ctypes.c_int64.from_address(address).value


@functools.partial(compiled, nogil=False)
def _read_row(values: Any, state: Any) -> Any:
    n, width, forms, tensors = state[_ENVS], state[_WIDTH], ENVS | SINGLE, 0
    objects = carray(pointer(values + state[_ITEMS_AT]), (state[_COUNT],), np.int64)
    scratch = len(state) - _SCRATCH
    flags, answer = state[scratch : scratch + 2], state[scratch + 2 :]
    for j in range(len(objects)):
        item = state[_HEAD + j * width : _HEAD + (j + 1) * width]
        memory, kind = item[_ITEM_MEMORY], item[_ITEM_CLASS]
        place, double = memory, False
        type_of = carray(pointer(objects[j] + 8), (1,), np.int64)[0]
        dims = -1
        if type_of == state[_ARRAY]:
            words = carray(pointer(objects[j] + state[_DATA_AT] - 8), (9,), np.int64)
            dims, double = words[_DIMENSIONS] & 0xFFFFFFFF, words[_DTYPE] == state[_DOUBLE] and kind == _FLOAT
            if words[_FLAGS] & _C_CONTIGUOUS == 0 or words[_FLAGS] & _ALIGNED == 0:
                return 0
            if words[_DTYPE] != item[_ITEM_DTYPE] and not double:
                return 0
            place, sizes = words[_ELEMENTS], carray(pointer(words[_SHAPE]), (dims,), np.int64)
        elif type_of == state[_TENSOR] and state[_ASK] != 0:
            if not _ask(state[_ASK], objects[j], answer.ctypes.data):
                return 0
            dims = answer[_KIND] & 0xFFFFFFFF
            if answer[_DEVICE] & 0xFFFFFFFF != 1 or answer[_OFFSET] != 0 or answer[_DATA_WORD] == 0:
                return 0
            double = answer[_KIND] >> 32 == 2 | 64 << 8 | 1 << 16 and kind == _FLOAT
            if answer[_KIND] >> 32 != item[_ITEM_KIND] and not double:
                return 0
            place, sizes, tensors = (
                answer[_DATA_WORD],
                carray(pointer(answer[_SIZES]), (dims,), np.int64),
                TENSORS,
            )
            strides, stride = carray(pointer(answer[_STRIDES]), (dims,), np.int64), 1
            for back in range(dims):
                d = dims - 1 - back
                if sizes[d] != 1 and strides[d] != stride:
                    return 0
                stride *= sizes[d]
        else:
            if n != 1 or item[_ITEM_DIMS] != 1 or not _put_number(objects[j], type_of, kind, memory, state):
                return 0
            sizes = item[:0]
            dims = 0
        without = item[_ITEM_DIMS] - dims
        if without != 0 and (without != 1 or n != 1):
            return 0
        for d in range(dims):
            if sizes[d] != item[_ITEM_SHAPE + without + d]:
                return 0
        if j < len(objects) - 2:
            forms &= SINGLE if without else ENVS
        if double:
            count = item[_ITEM_BYTES] // 4
            wide, narrow = (
                carray(pointer(place), (count,), np.float64),
                carray(pointer(memory), (count,), np.float32),
            )
            bad = False
            for e in range(count):
                size = abs(wide[e])
                bad |= (size > _LARGEST_FLOAT) & (size != np.inf)
                narrow[e] = wide[e]
            if bad:
                return 0
            place = memory
        if item[_ITEM_FOUND] != 0:
            carray(pointer(item[_ITEM_FOUND]), (1,), np.int64)[0] = place
        elif place != memory:
            copy_bytes(memory, place, item[_ITEM_BYTES])
        if j >= len(objects) - 2:
            flags[j - len(objects) + 2] = place
    if forms == 0:
        return 0
    kinds = carray(pointer(state[_KINDS]), (n,), np.int64)
    terminated, truncated = (
        carray(pointer(flags[0]), (n,), np.uint8),
        carray(pointer(flags[1]), (n,), np.uint8),
    )
    kind = state[_KIND_SINGLE] if forms & SINGLE else state[_KIND_ENVS]
    for i in range(n):
        kinds[i] = kind + (state[_KIND_ENDS] if terminated[i] | truncated[i] else 0)
    return forms | tensors


@njit
def _put_number(address, type_of, kind, memory, state):  # type: ignore[no-untyped-def]
    """Write a number into memory of its class; return False if it is of another one, or does not fit."""
    at = pointer(address + 16)
    small = address - state[_ZERO]
    is_small = (
        _SMALLEST * state[_SPACING] <= small <= _LARGEST * state[_SPACING] and small % state[_SPACING] == 0
    )
    if kind == _BOOL:
        true = address == state[_TRUE] or address == state[_NUMPY_TRUE]
        if not true and address != state[_FALSE] and address != state[_NUMPY_FALSE]:
            return False
        carray(pointer(memory), (1,), np.uint8)[0] = true
    elif kind == _FLOAT:
        into = carray(pointer(memory), (1,), np.float32)
        if type_of == state[_TYPE_FLOAT] or type_of == state[_TYPE_FLOAT64]:
            number = carray(at, (1,), np.float64)[0]
            if abs(number) > _LARGEST_FLOAT and not np.isinf(number):
                return False
            into[0] = number
        elif type_of == state[_TYPE_FLOAT32]:
            into[0] = carray(at, (1,), np.float32)[0]
        elif is_small:
            into[0] = small // state[_SPACING]
        else:
            return False
    elif kind in (_INT32, _INT64):
        if type_of == state[_TYPE_INT64]:
            whole = carray(at, (1,), np.int64)[0]
        elif type_of == state[_TYPE_INT32]:
            whole = np.int64(carray(at, (1,), np.int32)[0])
        elif is_small:
            whole = small // state[_SPACING]
        else:
            return False
        if kind == _INT64:
            carray(pointer(memory), (1,), np.int64)[0] = whole
        elif -(1 << 31) <= whole < 1 << 31:
            carray(pointer(memory), (1,), np.int32)[0] = whole
        else:
            return False
    else:
        return False
    return True
