"""The features of an RLDS data set as ``features.json`` describes them, and their values in records."""

from __future__ import annotations

import dataclasses
import math
import zlib
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, SourceError
from gear_loader.sources.episodes import column_of, plan_dtype
from gear_loader.sources.tfrecord import Feature
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import shown
from gear_loader.utils.lazy_torch import torch

_DEPTH = 16
_TEXT_DTYPES = ("string", "object", "str", "str_")


@dataclasses.dataclass(frozen=True)
class StoredFeature:
    """A feature that becomes a column.

    Attributes:
        key: in the records. name: of the column. step: whether each step has a value. kind: ``"number"``, ``"str"``,
            ``"bytes"``, ``"image"``, or the reason why no column holds it. dtype: of a number. shape: of a value, None
            for an extent that varies. varies: whether it is a list of such values, of any length. encoding: ``"none"``,
            ``"bytes"`` or ``"zlib"`` of a number; ``"jpeg"`` or ``"png"`` of an image.
    """

    key: str
    name: str
    step: bool
    kind: str
    dtype: str = ""
    shape: tuple[int | None, ...] = ()
    varies: bool = False
    encoding: str = "none"


def stored_features(
    node: Any, source: str, key: str = "", name: str = "", step: bool = False, depth: int = 0
) -> Iterator[StoredFeature]:
    """The leaves of a feature as ``features.json`` describes it."""
    if not isinstance(node, dict) or depth > _DEPTH:
        raise SourceError(
            f"{source}: feature {name!r} is {shown(node)} in features.json; expected a mapping."
        )
    if "featuresDict" in node:
        inner = node["featuresDict"].get("features", {}) if isinstance(node["featuresDict"], dict) else None
        if not isinstance(inner, dict):
            raise SourceError(f"{source}: feature {name!r} has no features in features.json.")
        for each, feature in inner.items():
            where = f"{key}/{each}" if key else each
            if not key and each == "steps" and isinstance(feature, dict) and "sequence" in feature:
                yield from stored_features(_inner(feature), source, where, "", True, depth + 1)
            else:
                yield from stored_features(
                    feature, source, where, f"{name}.{each}" if name else each, step, depth + 1
                )
    else:
        yield _leaf(node, key, name or key, step)


def _inner(node: Any) -> Any:
    return node["sequence"].get("feature") if isinstance(node["sequence"], dict) else None


def _leaf(node: Mapping[str, Any], key: str, name: str, step: bool) -> StoredFeature:
    varies = False
    if "sequence" in node and isinstance(_inner(node), dict):
        node, varies = _inner(node), True
    leaf = StoredFeature(key, name, step, "a feature that no column holds", varies=varies)
    if "text" in node:
        leaf = dataclasses.replace(leaf, kind="str")
    elif "classLabel" in node:
        leaf = dataclasses.replace(leaf, kind="number", dtype="int64")
    elif "boundingBox" in node:
        leaf = dataclasses.replace(leaf, kind="number", dtype="float32", shape=(4,))
    elif "tensor" in node or "image" in node:
        inner = node.get("tensor", node.get("image"))
        inner = inner if isinstance(inner, dict) else {}
        shape, dtype = _shape(inner.get("shape")), str(inner.get("dtype", "uint8"))
        if shape is None:
            return leaf
        if "image" in node:
            plain = dtype == "uint8" and len(shape) == 3
            encoding = str(inner.get("encodingFormat") or "")
            leaf = dataclasses.replace(
                leaf, kind="image" if plain else "bytes", shape=shape if plain else (), encoding=encoding
            )
        elif dtype in _TEXT_DTYPES:
            leaf = dataclasses.replace(leaf, kind="bytes" if not shape else "a tensor of strings")
        else:
            encoding = str(inner.get("encoding", "none")).lower()
            leaf = dataclasses.replace(leaf, kind="number", dtype=dtype, shape=shape, encoding=encoding)
            if None in shape and (step or varies or shape.index(None) or shape.count(None) > 1):
                leaf = dataclasses.replace(leaf, kind=f"a tensor of shape {list(shape)}")
            elif None in shape:  # of an episode: a list of any length
                leaf = dataclasses.replace(leaf, shape=shape[1:], varies=True)
            elif 0 in shape:
                leaf = dataclasses.replace(leaf, kind=f"a tensor of shape {list(shape)}")
    if leaf.varies and (leaf.kind in ("str", "bytes", "image") or leaf.encoding != "none"):
        leaf = dataclasses.replace(leaf, kind="a list of strings, images or encoded tensors")
    return leaf


def _shape(node: Any) -> tuple[int | None, ...] | None:
    """The shape of a tensor: None for an extent that varies; None if it is not valid."""
    dimensions = node.get("dimensions", []) if isinstance(node, dict) else []
    try:
        extents = [int(each) for each in dimensions]
    except (TypeError, ValueError):
        return None
    return tuple(None if extent < 0 else extent for extent in extents)


def known_shape(leaf: StoredFeature) -> tuple[int, ...]:
    return tuple(extent for extent in leaf.shape if extent is not None)


def feature_column(leaf: StoredFeature, found: str, what: str, keep_float64: bool) -> Column:
    if leaf.kind in ("str", "bytes"):
        return Column(str if leaf.kind == "str" else bytes)
    if leaf.kind == "image":
        try:
            return Column(torch.uint8, leaf.shape, codec=found or leaf.encoding)
        except SchemaError:  # other channels, or another format
            return Column(bytes)
    try:
        given = np.dtype(leaf.dtype)
    except TypeError:
        raise SourceError(f"{what} has the dtype {leaf.dtype!r}; expected one of numpy's numbers.") from None
    dtype = plan_dtype(leaf.name, given, what, keep_float64=keep_float64)
    shape = (None, *leaf.shape) if leaf.varies else leaf.shape
    return column_of(dtype, shape, what)


# ---------------------------------------------------------------- values


def count_steps(found: Mapping[str, Feature], leaf: StoredFeature) -> int:
    """Steps of an episode, by a feature whose number of values tells it."""
    count = found[leaf.key].length()
    each = 1 if leaf.kind != "number" or leaf.encoding != "none" else math.prod(known_shape(leaf))
    if count % each:
        raise ValueError(f"{leaf.key!r} has {count:,} numbers; expected a multiple of {each}")
    return count // each


def most_value_bytes(found: Mapping[str, Feature], leaf: StoredFeature) -> int:
    """Bytes that the values of any length of a feature take at most."""
    if leaf.kind != "number":
        return len(found[leaf.key].data) if leaf.key in found else 0
    if not leaf.varies:
        return 0
    feature = found.get(leaf.key) or found.get(f"{leaf.key}/ragged_flat_values")
    return 0 if feature is None else len(feature.data) * (2 if feature.kind == "float" else 8)


def read_texts(found: Mapping[str, Feature], leaf: StoredFeature, steps: int) -> list[Any]:
    blobs = found[leaf.key].blobs()
    if len(blobs) != steps:
        raise ValueError(f"it has {len(blobs)} values; expected {steps}")
    if leaf.kind == "str":
        return [str(blob, "utf-8") for blob in blobs]
    return [bytes(blob) for blob in blobs]


def read_numbers(found: Mapping[str, Feature], leaf: StoredFeature, steps: int) -> tuple[np.ndarray, Any]:
    """The numbers of a feature: [steps, *shape]; or of lists, one after another, and the length of each list."""
    shape = known_shape(leaf)
    size = math.prod(shape)
    if leaf.encoding != "none":
        blobs = found[leaf.key].blobs()
        if len(blobs) != steps:
            raise ValueError(f"it has {len(blobs)} values; expected {steps}")
        width = size * np.dtype(leaf.dtype).itemsize
        pieces = [_raw(blob, leaf.encoding, width) for blob in blobs]
        return np.frombuffer(b"".join(pieces), dtype=leaf.dtype).reshape(steps, *shape), None
    if leaf.varies and leaf.step:
        rows = found[f"{leaf.key}/ragged_row_lengths_0"].numbers()
        values = found[f"{leaf.key}/ragged_flat_values"].numbers()
        if len(rows) != steps or (rows < 0).any() or int(rows.sum()) * size != len(values):
            raise ValueError(f"it has {len(values):,} numbers in {len(rows)} lists; expected {steps} lists")
        return values.reshape(-1, *shape), rows
    values = found[leaf.key].numbers()
    if leaf.varies:  # one list of an episode
        if len(values) % size:
            raise ValueError(f"it has {len(values):,} numbers; expected a multiple of {size}")
        return values.reshape(-1, *shape), np.array([len(values) // size])
    if len(values) != steps * size:
        raise ValueError(f"it has {len(values):,} numbers; expected {steps} times {list(shape)}")
    return values.reshape(steps, *shape), None


def _raw(blob: memoryview, encoding: str, width: int) -> bytes:
    """The bytes of an encoded tensor, `width` of them."""
    data = bytes(blob)
    if encoding == "zlib":
        data = zlib.decompressobj().decompress(data, width + 1)
    if len(data) != width:
        raise ValueError(f"a tensor has {len(data):,} bytes or more; expected {width:,}")
    return data
