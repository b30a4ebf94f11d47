"""Trees of values in messages: JSON, beside which the bytes of their tensors lie.

A tensor is ``{"t": [dtype, shape, offset]}``, a mapping ``{"d": {...}}``, a `Batch` ``{"b": {...}}``, and a `Ragged`
``{"r": [values, offsets, shape]}``. ``"m"`` is a mapping of other keys, ``"s"``, ``"x"`` and ``"y"`` are lists of text
and of bytes, and bytes: two tensors. Other lists, numbers, text, booleans and None are themselves. Tensors begin at
multiples of 128 bytes. One in a file that both sides map (`mapped_batches`) is
``{"f": [dtype, shape, offset, place]}``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.errors import SchemaError
from gear_loader.storage.dtypes import dtype_names, torch_dtypes
from gear_loader.storage.ragged import Ragged
from gear_loader.transport.mapped_batches import MappedMemory
from gear_loader.transport.message_schema import padding, round_up
from gear_loader.transport.wire import ProtocolError
from gear_loader.utils.arrays import Array

View = Callable[[Any], Array]
"""Returns the bytes of a file at a place."""
MOST_TREE = 1 << 20
"""Most bytes of the JSON of a tree."""
_MOST_DEPTH = 16
_JOINED = 1 << 16  # most bytes of tensors that are copied into one piece: fewer calls take less


class PackedTree:
    """A tree as bytes.

    Args:
        files: of tensors that the other side maps, or None.

    Attributes:
        text: its JSON. parts: bytes of the tensors and of the padding between them. size: bytes of all parts.
        mapped: bytes of the tensors that the other side maps.
    """

    def __init__(self, tree: Any, files: MappedMemory | None = None) -> None:
        self.parts: list[Any] = []
        self.size = self.mapped = 0
        self._files = files
        self._places: dict[
            int, tuple[Any, dict[str, Any]]
        ] = {}  # a tensor that is in the tree twice is sent once
        self.text = json.dumps(self._node(tree), separators=(",", ":")).encode()
        if len(self.text) > MOST_TREE:
            raise SchemaError(
                f"A message with {len(self.text):,} bytes of JSON was to be sent; expected at most {MOST_TREE:,}."
            )
        if self.size <= _JOINED and len(self.parts) > 1:
            self.parts = [b"".join(self.parts)]

    def _node(self, value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return self._tensor(value)
        if isinstance(value, Mapping):
            if not all(isinstance(key, str) for key in value):
                return {"m": [[self._node(key), self._node(each)] for key, each in value.items()]}
            kind = "b" if isinstance(value, Batch) else "d"
            return {kind: {key: self._node(each) for key, each in value.items()}}
        if isinstance(value, Ragged):
            return {"r": [self._tensor(value.values), self._tensor(value.offsets), list(value.shape)]}
        if isinstance(value, np.ndarray):
            return self._tensor(torch.from_numpy(np.ascontiguousarray(value)))
        if isinstance(value, bytes):
            return {"y": self._texts([value])}
        if isinstance(value, list) and value and all(isinstance(each, (str, bytes)) for each in value):
            kinds = set(map(type, value))
            if kinds == {str}:
                return {"s": self._texts([each.encode("utf-8", "surrogatepass") for each in value])}
            if kinds == {bytes}:
                return {"x": self._texts(value)}
        if isinstance(value, (list, tuple)):
            return [self._node(each) for each in value]
        if isinstance(value, np.generic):
            return value.item()
        if value is None or isinstance(value, (bool, int, float, str)):
            return value
        raise SchemaError(
            f"A value of type {type(value).__name__} was to be sent; expected tensors, numbers and text."
        )

    def _texts(self, values: list[bytes]) -> list[Any]:
        """Bytes of values one after another, and where each ends."""
        data = np.frombuffer(bytearray(b"".join(values)), dtype=np.uint8)
        ends = np.cumsum([len(each) for each in values])
        return [self._tensor(torch.from_numpy(data)), self._tensor(torch.from_numpy(ends))]

    def _tensor(self, tensor: torch.Tensor) -> dict[str, Any]:
        known = self._places.get(id(tensor))
        if known is not None:
            return known[1]
        flat = tensor.detach().cpu().contiguous()
        size = flat.numel() * flat.element_size()
        kind = [dtype_names()[tensor.dtype], list(tensor.shape)]
        place = None if self._files is None or not size else self._files.place(flat)
        if place is not None:
            self.mapped += size
            found: dict[str, Any] = {"f": [*kind, place[1], place[0]]}
            self._places[id(tensor)] = tensor, found
            return found
        node = {"t": [*kind, self.size]}
        self._places[id(tensor)] = tensor, node
        if size:
            self.parts.append(flat.reshape(-1).view(torch.uint8).numpy().data)
            if more := padding(size):
                self.parts.append(more)
            self.size += round_up(size)
        return node


class TreeWriter:
    """Packs trees, of which most are batches of the same tensors; not thread-safe."""

    def __init__(self) -> None:
        self._known: tuple[Any, bytes, list[bytes], int] = ((), b"", [], 0)

    def pack(self, tree: Any, files: MappedMemory | None = None) -> PackedTree:
        """The tree as bytes; its tensors are not to change before they are sent, and those in `files` before the other
        side has ended with them."""
        if files is not None:
            return PackedTree(tree, files)
        if type(tree) is not Batch:
            return PackedTree(tree)
        try:
            kinds = [(key, value.dtype, value.shape) for key, value in tree.items()]
        except AttributeError:  # not of tensors alone
            return PackedTree(tree)
        known, text, gaps, size = self._known
        if kinds != known:
            made = PackedTree(tree)
            if all(map(_is_plain, tree.values())) and len(set(map(id, tree.values()))) == len(tree):
                gaps = [padding(value.nbytes) for value in tree.values()]
                self._known = kinds, made.text, gaps, made.size
            return made
        packed = PackedTree.__new__(PackedTree)
        packed.text, packed.size, packed.mapped = text, size, 0
        parts: list[Any] = []
        for value, gap in zip(tree.values(), gaps, strict=True):
            if not _is_plain(value):
                return PackedTree(tree)
            parts.append(value.numpy())
            parts.append(gap)
        packed.parts = [b"".join(parts)] if size <= _JOINED else [part for part in parts if len(part)]
        return packed


def _is_plain(value: torch.Tensor) -> bool:
    """Whether numpy has the tensor's memory as it is."""
    return (
        value.dtype is not torch.bfloat16 and value.is_contiguous() and value.ndim > 0 and not value.is_cuda
    )


class TreeReader:
    """Reads trees, whose JSON is mostly that of an earlier one; not thread-safe."""

    def __init__(self) -> None:
        self._known: dict[bytes, Any] = {}

    def read(self, text: bytes, memory: Array, view: View | None = None) -> Any:
        """The tree, whose tensors lie in `memory`, uint8 [n], contiguous; others in what `view` returns for a place.

        Raises:
            ProtocolError: invalid, or a tensor beyond the memory.
            ConnectionError: as `view` raises it.
        """
        node = self._known.get(text)
        if node is None:
            try:
                node = json.loads(text)
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"A tree of values is no JSON ({error}).") from None
            if len(self._known) >= 64:
                self._known.clear()
            self._known[text] = node
        return read_tree(node, memory, view)


def read_tree(node: Any, memory: Array, view: View | None = None) -> Any:
    """The tree of parsed JSON from an untrusted source; see `TreeReader.read`."""
    return _read(node, memory, view, 0)


def _read(node: Any, memory: Array, view: View | None, depth: int) -> Any:
    if not isinstance(node, (dict, list)):
        return node
    if depth > _MOST_DEPTH:
        raise ProtocolError(f"A tree of values is deeper than {_MOST_DEPTH}.")
    if isinstance(node, list):
        return [_read(each, memory, view, depth + 1) for each in node]
    try:
        ((kind, value),) = node.items()
        if kind in ("b", "d"):
            found = {key: _read(each, memory, view, depth + 1) for key, each in value.items()}
            return Batch(found) if kind == "b" else found
        if kind == "t":
            return _tensor(memory, *value)
        if kind == "f" and view is not None:
            name, shape, offset, place = value
            return _tensor(view(place), name, shape, offset)
        if kind == "m":
            return {
                _read(key, memory, view, depth + 1): _read(each, memory, view, depth + 1)
                for key, each in value
            }
        if kind in ("s", "x", "y"):
            data, ends = (_tensor(memory, *part["t"]).numpy() for part in value)
            begins = [0, *ends[:-1].tolist()]
            texts: list[Any] = [data[i:j].tobytes() for i, j in zip(begins, ends.tolist(), strict=True)]
            if kind == "s":
                return [str(each, "utf-8", "surrogatepass") for each in texts]
            return texts if kind == "x" else texts[0]
        if kind == "r":
            values, offsets, shape = value
            return Ragged(_tensor(memory, *values["t"]), _tensor(memory, *offsets["t"]), tuple(shape))
    except ConnectionError:
        raise
    except (ValueError, TypeError, LookupError, AttributeError, RuntimeError, OSError) as error:
        raise ProtocolError(f"A tree of values is invalid ({type(error).__name__}: {error}).") from None
    raise ProtocolError(f"A tree of values has {str(kind)[:20]!r}; expected one of 'bdfmrstxy'.")


def _tensor(memory: Array, name: str, shape: list[int], offset: int) -> torch.Tensor:
    dtype, count = torch_dtypes()[name], math.prod(shape)
    if min(shape, default=0) < 0 or offset < 0 or offset + count * dtype.itemsize > len(memory):
        raise ValueError(f"{name} {shape} at {offset:,} of {len(memory):,} bytes")
    if not count:
        return torch.empty(shape, dtype=dtype, device="cpu")
    # A storage of its own for each: `torch.save` refuses tensors of different dtypes in one.
    return torch.frombuffer(memory, dtype=dtype, count=count, offset=offset).view(shape)
