"""Columns of Arrow as columns of a table: which they become, and their values.

================================================== =====================================================================
a field of                                         is a column of
================================================== =====================================================================
numbers, flags                                     the same dtype, as `plan_dtype`; nulls of floats are NaN
times, dates, durations                            int64 or int32, in the field's unit
strings, bytes                                     ``str``, ``bytes``
lists of numbers, as deep as they are              shape ``[*shape]``, if all have the same; ``(None, *shape)``, if the
                                                   outermost differ in length
structs                                            one for each field, joined by dots
images of Hugging Face                             a codec, if all are jpeg, png or webp of one number of channels; the
                                                   bytes are not decoded
anything else                                      ``object``: what `to_pylist` gives
================================================== =====================================================================
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.episodes import column_of, converted, is_finite_role, plan_dtype
from gear_loader.storage.codecs import CHANNELS, Codec, Coded, image_codec
from gear_loader.storage.coders import coder_of
from gear_loader.storage.dtypes import ITEM_BYTES
from gear_loader.storage.ragged import msgpack
from gear_loader.storage.schema import Column

_DEPTH = 16  # most nested structs
_PURPOSE = "Reading a table of Arrow"

Place = Callable[[int | None], str]
"""Begins an error about a row of a batch, or about all of them."""


@dataclasses.dataclass
class ArrowField:
    """A field that becomes a column.

    Attributes:
        name: of the field, with dots. path: indices of the fields that lead to it. type: its Arrow type.
        kind: ``"number"``, ``"list"`` of numbers, ``"str"``, ``"bytes"``, ``"image"`` or ``"object"``.
        depth: of lists around a number. item: the type in them.
    """

    name: str
    path: tuple[int, ...]
    type: Any
    kind: str
    depth: int = 0
    item: Any = None
    scan: Scan = dataclasses.field(init=False)

    def __post_init__(self) -> None:
        self.scan = Scan(self)


def features_of(schema: Any) -> Any:
    """What Hugging Face writes of columns into the metadata of an Arrow schema; {} if it is not there."""
    try:
        return json.loads((schema.metadata or {})[b"huggingface"])["info"]["features"]
    except (ValueError, TypeError, LookupError):
        return {}


def leaves_of(schema: Any, features: Any) -> dict[str, ArrowField]:
    """The columns of an Arrow schema, by name; `features`: as `features_of` returns them."""
    found: dict[str, ArrowField] = {}
    for leaf in _walk(list(schema), features, "", (), 0):
        found.setdefault(leaf.name, leaf)  # of fields with one name the first
    return found


def _walk(
    fields: list[Any], features: Any, prefix: str, path: tuple[int, ...], depth: int
) -> Iterator[ArrowField]:
    pa = require("pyarrow", _PURPOSE)
    for i, field in enumerate(fields):
        name, feature = (
            f"{prefix}{field.name}",
            features.get(field.name) if isinstance(features, dict) else None,
        )
        kind = storage(field.type)
        image = isinstance(feature, dict) and feature.get("_type") == "Image"
        if pa.types.is_struct(kind):
            names = [kind.field(j).name for j in range(kind.num_fields)]
            if image and "bytes" in names:
                yield ArrowField(name, (*path, i), kind, "image")
            elif depth < _DEPTH and kind.num_fields:
                inner = [kind.field(j) for j in range(kind.num_fields)]
                yield from _walk(inner, feature, f"{name}.", (*path, i), depth + 1)
            else:
                yield ArrowField(name, (*path, i), kind, "object")
        else:
            yield leaf_of(name, (*path, i), kind)


def leaf_of(name: str, path: tuple[int, ...], kind: Any) -> ArrowField:
    """The column of a type that is no struct."""
    types = require("pyarrow", _PURPOSE).types
    if types.is_dictionary(kind):
        return leaf_of(name, path, kind.value_type)
    if types.is_string(kind) or types.is_large_string(kind) or _is(types, "is_string_view", kind):
        return ArrowField(name, path, kind, "str")
    if types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind):
        return ArrowField(name, path, kind, "bytes")
    depth, item = 0, kind
    while is_list(item):
        depth, item = depth + 1, storage(item.value_type)
    tests = (types.is_integer, types.is_floating, types.is_boolean, types.is_temporal)
    if any(test(item) for test in tests) and not _is(types, "is_interval", item):
        return ArrowField(name, path, kind, "list" if depth else "number", depth, item)
    return ArrowField(name, path, kind, "object")


def _is(types: Any, name: str, kind: Any) -> bool:
    """A test of types that older versions do not have."""
    return bool(getattr(types, name, lambda kind: False)(kind))


def is_list(kind: Any) -> bool:
    """Whether it is a type of lists."""
    types = require("pyarrow", _PURPOSE).types
    return bool(types.is_list(kind) or types.is_large_list(kind) or types.is_fixed_size_list(kind))


def storage(kind: Any) -> Any:
    """The type under an extension type; of tensors of one shape lists of lists."""
    if not hasattr(kind, "storage_type"):
        return kind
    under = storage(kind.storage_type)
    shape = _tensor_shape(kind)
    if shape is None:
        return under
    pa, item = require("pyarrow", _PURPOSE), under.value_type
    for extent in reversed(shape):
        item = pa.list_(item, extent)
    return item


def _tensor_shape(kind: Any) -> tuple[int, ...] | None:
    """The shape of an extension type of tensors in flat lists: pyarrow's ``fixed_shape_tensor``, and that of Ray Data.
    None of others, such as those of Hugging Face, which are lists of lists."""
    shape = getattr(kind, "shape", None)
    order = list(getattr(kind, "permutation", None) or ())
    plain = isinstance(shape, (list, tuple)) and len(shape) > 0 and order == sorted(order)
    flat = is_list(kind.storage_type) and not is_list(storage(kind.storage_type.value_type))
    return tuple(shape or ()) if plain and flat else None


def leaf_array(array: Any, leaf: ArrowField) -> Any:
    """The Arrow array of a column, of that of the outermost field."""
    array = stored_array(array)
    for i in leaf.path[1:]:
        array = stored_array(array.flatten()[i])
    return array


def stored_array(array: Any) -> Any:
    """The array under an extension type or a dictionary of numbers. Others stay, however often an entry is repeated."""
    types = require("pyarrow", _PURPOSE).types
    if hasattr(array.type, "storage_type"):
        shape, array = _tensor_shape(array.type), stored_array(array.storage)
        if shape is None or array.null_count:
            return array
        array = array.flatten()
        for extent in reversed(shape):
            array = require("pyarrow", _PURPOSE).FixedSizeListArray.from_arrays(array, extent)
        return array
    numbers = types.is_dictionary(array.type) and types.is_primitive(array.type.value_type)
    return array.dictionary_decode() if numbers else array


def inner_of(array: Any, place: Place) -> tuple[Any, np.ndarray]:
    """The items of an array of lists, one after another, and the length of each, int64 [n]."""
    if array.null_count:
        row = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise SourceError(f"{place(row)} is null; expected a list.")
    if hasattr(array.type, "list_size"):
        return array.flatten(), np.full(len(array), array.type.list_size, dtype=np.int64)
    offsets = array.offsets.to_numpy().astype(np.int64)
    return array.values.slice(int(offsets[0]), int(offsets[-1] - offsets[0])), np.diff(offsets)


class Scan:
    """What all rows of a column have in common, seen once before they are read."""

    def __init__(self, leaf: ArrowField) -> None:
        self._leaf = leaf
        self._bytes = 0  # of text and encoded images
        self._items, self._lists = 0, 0
        self._lengths: list[set[int]] = [set() for _ in range(leaf.depth)]
        self._formats: set[str] = set()
        self._sizes: set[tuple[int, ...]] = set()

    @property
    def needed(self) -> bool:
        """Whether the type does not tell all."""
        return self._leaf.kind not in ("number", "list") or self.fixed_shape() is None

    def fixed_shape(self) -> tuple[int, ...] | None:
        """The shape of a number in lists of fixed lengths; None of others."""
        shape, kind = [], self._leaf.type
        for _ in range(self._leaf.depth):
            if not hasattr(kind, "list_size"):
                return None
            shape.append(int(kind.list_size))
            kind = storage(kind.value_type)
        return tuple(shape)

    def see(self, array: Any, place: Place) -> None:
        """Look at the rows of a batch."""
        if self._leaf.kind == "list":
            for level in self._lengths:
                self._lists += len(array)
                array, lengths = inner_of(array, place)
                array = stored_array(array)
                if len(level) < 2:
                    level.update(np.unique(lengths).tolist())
            self._items += len(array)
        elif self._leaf.kind == "str":
            self._bytes += _text_bytes(array)
        elif self._leaf.kind == "object":
            pack = msgpack().Packer().pack
            for row, value in enumerate(array.to_pylist()):
                try:
                    self._bytes += len(pack(value))
                except (TypeError, ValueError, OverflowError) as error:
                    raise SourceError(
                        f"{place(row)} is of the type {self._leaf.type}, which no column holds ({error}); leave it out "
                        "with columns=[...]."
                    ) from error
        else:
            self._see_bytes(array, place)

    def _see_bytes(self, array: Any, place: Place) -> None:
        array = bytes_of(array, self._leaf, place)
        self._bytes += _text_bytes(array)
        if self._leaf.kind != "image" or "" in self._formats:
            return
        for value in getattr(array, "dictionary", array):
            # pyarrow's are of signed bytes, which simplejpeg refuses.
            blob = memoryview(value.as_buffer()).cast("B")
            name = image_codec(blob)
            self._formats.add(name)
            size = _image_size(name, blob) if name else None
            if size is None:
                self._formats.add("")
                return
            self._sizes.add(size)

    def payload(self, column: Column) -> int:
        """Bytes that the values of all rows take in a column of any length, or more."""
        if self._leaf.kind != "list" or column.ragged is None:
            return self._bytes
        if column.ragged.kind == "object":  # msgpack: 9 bytes a number, 5 the length of a list
            return 9 * self._items + 5 * self._lists
        return self._items * ITEM_BYTES[column.ragged.dtype_name]

    def column(self, what: str, *, keep_float64: bool) -> Column:
        """The column of a table for these rows; `what`: the data in errors."""
        leaf = self._leaf
        if leaf.kind in ("str", "bytes", "object"):
            return Column({"str": str, "bytes": bytes, "object": object}[leaf.kind])
        if leaf.kind == "image":
            channels = {size[2] for size in self._sizes}
            name = next(iter(self._formats)) if len(self._formats) == 1 else ""
            # Decoders of jpeg and webp give gray and opaque images the channels of the others.
            if not name or not channels or (len(channels) > 1 and name == "png"):
                return Column(bytes)
            sizes = {size[:2] for size in self._sizes}
            extents = next(iter(sizes)) if len(sizes) == 1 else (None, None)
            return Column(torch.uint8, (*extents, max(channels)), codec=name)
        dtype = plan_dtype(leaf.name, _numpy_dtype(leaf.item), what, keep_float64=keep_float64)
        shape = self.fixed_shape()
        if shape is None:
            inner = [next(iter(level), 1) if len(level) < 2 else None for level in self._lengths]
            if any(extent in (None, 0) for extent in inner[1:]):
                return Column(object)
            first = inner[0] or None  # empty lists are values of length 0
            return column_of(dtype, (first, *inner[1:]), what)
        if 0 in shape:
            raise SourceError(f"{what} has values of shape {list(shape)}; expected one number at least.")
        return column_of(dtype, shape, what)


def _numpy_dtype(kind: Any) -> Any:
    types = require("pyarrow", _PURPOSE).types
    return (
        np.dtype(f"i{kind.bit_width // 8}") if types.is_temporal(kind) else np.dtype(kind.to_pandas_dtype())
    )


def _text_bytes(array: Any) -> int:
    pa, pc = require("pyarrow", _PURPOSE), require("pyarrow.compute", _PURPOSE)
    if not len(array):
        return 0
    if pa.types.is_dictionary(array.type):
        each = pc.cast(pc.binary_length(array.dictionary), pa.int64())
        return int(pc.sum(pc.take(each, array.indices)).as_py() or 0)
    if pa.types.is_fixed_size_binary(array.type):
        return int(array.type.byte_width) * len(array)
    return int(pc.sum(pc.cast(pc.binary_length(array), pa.int64())).as_py() or 0)


def _listed(array: Any) -> list[Any]:
    """Text or bytes; the same object for each entry of a dictionary."""
    if not hasattr(array, "dictionary"):
        found: list[Any] = array.to_pylist()
        return found
    entries = array.dictionary.to_pylist()
    return [entries[i] for i in array.indices.to_pylist()]


def _image_size(name: str, blob: memoryview) -> tuple[int, ...] | None:
    """Height, width and channels of an encoded image; None if its codec does not read it as it is."""
    for channels in CHANNELS[name]:
        try:
            coded = Coded(Codec.of(name), "uint8", (None, None, channels))
            size = coder_of(coded).shape(blob)
            coded.check_shape(size)
            return size
        except (ValueError, SchemaError, OSError, SyntaxError):
            continue
    return None


def bytes_of(array: Any, leaf: ArrowField, place: Place) -> Any:
    """The array of bytes of a column of bytes or images.

    Raises:
        SourceError: a value is null.
    """
    if leaf.kind == "image":
        paths = array
        array = stored_array(array.flatten()[array.type.get_field_index("bytes")])
        if array.null_count:
            row = int(np.flatnonzero(np.asarray(array.is_null()))[0])
            given = paths[row].as_py() or {}
            raise SourceError(
                f"{place(row)} has no bytes, but the path {given.get('path')!r}; expected images in the data set. Open "
                "it with hf:, or embed them with datasets.table.embed_table_storage."
            )
    refuse_nulls(array, place)
    return array


def refuse_nulls(array: Any, place: Place) -> None:
    """Raise SourceError if a value is null."""
    if array.null_count:
        row = int(np.flatnonzero(np.asarray(array.is_null()))[0])
        raise SourceError(
            f"{place(row)} is null, which no column of {array.type} holds; leave it out, or fill it."
        )


def values_of(array: Any, leaf: ArrowField, column: Column, place: Place, *, allow_nonfinite: bool) -> Any:
    """The rows of a batch as an `Episode` has them: an array ``[rows, *shape]``, or a list."""
    if leaf.kind == "object" or (column.ragged is not None and column.ragged.kind == "object"):
        return array.to_pylist()
    if leaf.kind == "str":
        refuse_nulls(array, place)
        try:
            return _listed(array)
        except UnicodeDecodeError as error:
            raise SourceError(f"{place(None)} is no valid UTF-8: {error}.") from error
    if leaf.kind in ("bytes", "image"):
        return _listed(bytes_of(array, leaf, place))
    owner: np.ndarray | None = None  # the row of each number
    lengths: np.ndarray | None = None
    shape = () if leaf.kind == "number" else _shape_of(column)
    for level in range(leaf.depth):
        array, count = inner_of(array, place)
        array = stored_array(array)
        wanted = shape[level] if level < len(shape) else None
        if level == 0:
            lengths = count
        if wanted is not None and len(count) and bool((count != wanted).any()):
            row = int(np.flatnonzero(count != wanted)[0])
            row = row if owner is None else int(owner[row])
            raise SourceError(
                f"{place(row)} has a list of {count[count != wanted][0]}; expected {wanted}, as in others."
            )
        owner = np.repeat(np.arange(len(count)) if owner is None else owner, count)

    def at(item: int | None) -> str:
        return place(item if item is None or owner is None else int(owner[item]))

    numbers = _numbers(array, leaf.item, at)
    dtype = column.dtype if column.ragged is None else column.ragged.dtype
    numbers = converted(numbers, dtype, at, finite=is_finite_role(leaf.name, allow_nonfinite))
    if leaf.kind == "number":
        return numbers
    assert lengths is not None
    if None not in shape:
        return numbers.reshape(len(lengths), *shape)
    ends = np.cumsum(lengths)
    return np.split(numbers.reshape(-1, *shape[1:]), ends[:-1]) if len(ends) else []


def _shape_of(column: Column) -> tuple[int | None, ...]:
    if column.ragged is None:
        return column.shape
    return (None, *column.ragged.shape)


def _numbers(array: Any, kind: Any, place: Place) -> np.ndarray:
    pa = require("pyarrow", _PURPOSE)
    if pa.types.is_temporal(kind):
        array = array.view(pa.int64() if kind.bit_width == 64 else pa.int32())
    if array.null_count and not pa.types.is_floating(kind):
        refuse_nulls(array, place)
    values: np.ndarray = array.to_numpy(zero_copy_only=False)
    return values
