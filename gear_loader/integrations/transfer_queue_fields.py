"""Fields of samples as bytes: what `transfer_queue_rows.Rows` stores, and what is made of it again.

The values of a field are scalars, tensors ``[n, *rest]`` of any n, tensors of any shapes, or other objects, in
msgpack's format with a few more types. Nothing is pickled.
"""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np
import torch
from torch.nested._internal.nested_tensor import NestedTensor  # the public function takes four times as long

from gear_loader.errors import SchemaError
from gear_loader.storage.ragged import msgpack
from gear_loader.utils.arrays import Array, shown

SCALAR, ROWS, SHAPED, OBJECT = "scalar", "rows", "shaped", "object"
_TENSOR, _ARRAY, _NUMBER, _TUPLE, _INT = range(1, 6)  # extension types of msgpack


class SampleField(NamedTuple):
    """What the values of a field are.

    Attributes:
        name: of the field. kind: one of the above. dtype: name of torch's, or "".
        rest: shape of a row, of `ROWS`; of `SHAPED` the number of dimensions.
    """

    name: str
    kind: str
    dtype: str = ""
    rest: tuple[int, ...] = ()

    @property
    def item(self) -> int:
        """Bytes of an element; 1 of objects."""
        return dtype_of(self.dtype).itemsize if self.kind in (SCALAR, ROWS) else 1


class FieldValues(NamedTuple):
    """The values of a field of n samples.

    Attributes:
        field: what they are. addresses, sizes: int64 [n], of the bytes of each. hold: owner of that memory.
    """

    field: SampleField
    addresses: Array
    sizes: Array
    hold: object


def dtype_of(name: str) -> torch.dtype:
    """The dtype of torch that has this name."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise SchemaError(f"A stored field has the dtype {name!r}, which this torch does not know.")
    return found


def described(fields: Sequence[SampleField]) -> tuple[int, bytes]:
    """A number for a set of fields, the same in every process, and the text that `read_description` takes."""
    text: bytes = msgpack().packb([list(field) for field in fields])
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little") >> 1, text


def read_description(text: bytes) -> tuple[SampleField, ...]:
    """The fields of a text of `described`."""
    return tuple(
        SampleField(name, kind, dtype, tuple(rest)) for name, kind, dtype, rest in msgpack().unpackb(text)
    )


def values_of(name: str, given: Any) -> FieldValues:
    """The bytes of the values of one field.

    Args:
        given: a tensor ``[n, *shape]``, also a nested one; or a sequence of n tensors or objects. Waits for a GPU that
            holds them.

    Raises:
        SchemaError: an object that cannot be stored.
    """
    if isinstance(given, torch.Tensor):
        if not given.is_nested:
            return _dense(name, given)
        nested: Any = given
        if given.layout is torch.jagged and nested.lengths() is None and nested._ragged_idx == 1:
            return _jagged(name, nested)
        given = given.unbind()
    elif not isinstance(given, (list, tuple, np.ndarray)):
        given = given.tolist() if hasattr(given, "tolist") else [*given]
    tensors = [each for each in given if isinstance(each, torch.Tensor)]
    if tensors and len(tensors) == len(given) and len({each.dtype for each in tensors}) == 1:
        return _tensors(name, [_plain(each) for each in tensors])
    return _pieces(SampleField(name, OBJECT), [packed(each, name) for each in given])


def _plain(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().resolve_conj().resolve_neg().cpu().contiguous()


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _dense(name: str, tensor: torch.Tensor) -> FieldValues:
    tensor = _plain(tensor)
    count, rest = len(tensor), tuple(tensor.shape[2:])
    size = tensor[0].nbytes if count else 0
    if tensor.ndim > 1 and not torch.Size(rest).numel():  # rows without bytes, which cannot be counted
        return _tensors(name, list(tensor))
    field = SampleField(name, ROWS if tensor.ndim > 1 else SCALAR, _name(tensor.dtype), rest)
    addresses = tensor.data_ptr() + np.arange(count, dtype=np.int64) * size
    return FieldValues(field, addresses, np.full(count, size, dtype=np.int64), tensor)


def _jagged(name: str, tensor: Any) -> FieldValues:
    values, offsets = _plain(tensor.values()), tensor.offsets().cpu().numpy()
    rest = tuple(values.shape[1:])
    size = torch.Size(rest).numel() * values.element_size()
    if not size:
        return _tensors(name, [values[i:j] for i, j in itertools.pairwise(offsets)])
    field = SampleField(name, ROWS, _name(values.dtype), rest)
    return FieldValues(field, values.data_ptr() + offsets[:-1] * size, np.diff(offsets) * size, values)


def _tensors(name: str, tensors: list[torch.Tensor]) -> FieldValues:
    first = tensors[0]
    shapes = {tuple(each.shape[1:]) for each in tensors}
    ranks = {each.ndim for each in tensors}
    if len(ranks) > 1:
        return _pieces(SampleField(name, OBJECT), [packed(each, name) for each in tensors])
    if len(shapes) > 1 or (first.ndim and not first[:0].numel() and not torch.Size(first.shape[1:]).numel()):
        field = SampleField(name, SHAPED, _name(first.dtype), (first.ndim,))
        heads = [np.array(each.shape, dtype=np.int64).tobytes() for each in tensors]
        return _pieces(field, [a + _bytes(b) for a, b in zip(heads, tensors, strict=True)])
    field = SampleField(name, ROWS, _name(first.dtype), next(iter(shapes)))
    if not first.ndim:
        field = SampleField(name, SCALAR, _name(first.dtype))
    addresses: Array = np.array([each.data_ptr() for each in tensors], dtype=np.int64)
    return FieldValues(field, addresses, np.array([each.nbytes for each in tensors], dtype=np.int64), tensors)


def _pieces(field: SampleField, pieces: Sequence[bytes]) -> FieldValues:
    sizes: Array = np.array([len(piece) for piece in pieces], dtype=np.int64)
    data: Array = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    return FieldValues(field, data.ctypes.data + np.cumsum(sizes) - sizes, sizes, data)


def _bytes(tensor: torch.Tensor) -> bytes:
    return tensor.reshape(-1).view(torch.uint8).numpy().tobytes()


# ---------------------------------------------------------------- objects


def packed(item: Any, what: str) -> bytes:
    """An object in msgpack's format, with tensors, numpy arrays and numbers, tuples and large integers.

    Raises:
        SchemaError: of another type.
    """

    def more(value: Any) -> Any:
        kind = msgpack().ExtType
        if isinstance(value, torch.Tensor):
            value = _plain(value)
            return kind(_TENSOR, pack([_name(value.dtype), list(value.shape), _bytes(value)]))
        if isinstance(value, (np.ndarray, np.generic)) and not value.dtype.hasobject:
            head = [value.dtype.str, list(value.shape), value.tobytes()]
            return kind(_ARRAY if isinstance(value, np.ndarray) else _NUMBER, pack(head))
        if isinstance(value, np.ndarray):
            return kind(_ARRAY, pack(["O", list(value.shape), value.reshape(-1).tolist()]))
        if isinstance(value, tuple):
            return kind(_TUPLE, pack(list(value)))
        if type(value) is int:
            return kind(_INT, str(value).encode())
        raise TypeError(f"a {type(value).__name__}")

    def pack(value: Any) -> bytes:
        found: bytes = msgpack().packb(value, default=more, strict_types=True)
        return found

    try:
        return pack(item)
    except (TypeError, ValueError, OverflowError, RecursionError) as error:
        raise SchemaError(
            f"Field {what!r} has {shown(item)}, which holds {error}; expected tensors, numpy arrays and numbers, None, "
            "bool, int, float, str, bytes, and lists, tuples and dicts of these: objects are not pickled. Convert it, "
            "an image to an array or to the bytes of a PNG, for example."
        ) from None


def unpacked(data: Any) -> Any:
    """The object of `packed`."""
    return msgpack().unpackb(data, ext_hook=_more, strict_map_key=False)


def _more(code: int, data: bytes) -> Any:
    if code == _INT:
        return int(data)
    found = unpacked(data)
    if code == _TUPLE:
        return tuple(found)
    name, shape, content = found
    if code == _TENSOR:
        if not content:
            return _nothing(name, shape)
        return torch.frombuffer(bytearray(content), dtype=torch.uint8).view(dtype_of(name)).reshape(shape)
    if name == "O":
        array: Array = np.empty(len(content), dtype=object)
        array[:] = content
        return array.reshape(shape)
    array = np.frombuffer(content, dtype=np.dtype(name)).reshape(shape).copy()
    return array if code == _ARRAY else array[()]


def _nothing(name: str, shape: Sequence[int]) -> torch.Tensor:
    return torch.empty(tuple(shape), dtype=dtype_of(name), device="cpu")


# ---------------------------------------------------------------- reading


class Jagged:
    """Makes the tensors of one read. Those with the same lengths share their offsets, so that operations take them
    together."""

    def __init__(self) -> None:
        self._places: Array | None = None
        self._offsets = torch.empty(0, dtype=torch.int64, device="cpu")

    def joined(self, field: SampleField, data: torch.Tensor, offsets: Array) -> torch.Tensor:
        """The values of `SCALAR` or `ROWS` of n samples, one after another: ``[n]``, or a jagged ``[n, j, *rest]``.

        Args:
            data: uint8, aligned to the dtype's size from ``offsets[0]`` on. offsets: int64 [n + 1].
        """
        memory = data[int(offsets[0]) : int(offsets[-1])].view(dtype_of(field.dtype))
        if field.kind == SCALAR:
            return memory
        places = (offsets - offsets[0]) // (torch.Size(field.rest).numel() * field.item)
        if self._places is None or not np.array_equal(places, self._places):
            self._places, self._offsets = places, torch.from_numpy(places)
        made: torch.Tensor = NestedTensor(
            memory.view(-1, *field.rest) if field.rest else memory, self._offsets
        )
        return made


def value_of(field: SampleField, data: torch.Tensor) -> Any:
    """One value; data: uint8 [bytes]."""
    if field.kind == OBJECT:
        return unpacked(data.numpy())
    dtype = dtype_of(field.dtype)
    if field.kind == SHAPED:
        head = 8 * field.rest[0]
        shape = data[:head].numpy().view(np.int64).tolist()
        return data[head:].clone().view(dtype).reshape(shape)
    memory = data.clone().view(dtype)
    return memory.reshape(()) if field.kind == SCALAR else memory.view(-1, *field.rest)
