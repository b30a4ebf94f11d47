"""Ragged columns: what their values are (`Values`), and values of rows as they are delivered (`Ragged`).

A table stores a record a value, int64 [2], as a fixed column: where the value begins in the table's payload memory, in
bytes, and its rows. What gathers columns gathers records; `gear_loader.storage.payload` follows them.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.codecs import Coded
from gear_loader.storage.dtypes import ITEM_BYTES, torch_dtypes
from gear_loader.utils.arrays import Array
from gear_loader.utils.lazy_torch import torch

RECORD_DTYPE, RECORD_SHAPE = "int64", (2,)
Kind = Literal["array", "str", "bytes", "object", "coded"]
TEXTS: dict[Any, Kind] = {str: "str", bytes: "bytes", object: "object"}


@functools.cache
def msgpack() -> Any:
    """The package msgpack.

    Raises:
        SchemaError: it is not installed.
    """
    try:
        import msgpack
    except ImportError:
        raise SchemaError(
            "A column of Python objects needs the package msgpack, which is not installed. Install it: "
            "pip install '.[objects]' (in a clone of Gear Loader)"
        ) from None
    return msgpack


@dataclasses.dataclass(frozen=True)
class Values:
    """The values of a ragged column: ``[n, *shape]`` of any n.

    Attributes:
        dtype_name: of an element. shape: of a row.
        kind: ``"array"``; others are uint8 [n], and Python's objects at both ends: ``"str"`` in UTF-8, ``"bytes"``, and
            ``"object"`` in msgpack's format; ``"coded"`` are the bytes of encoded values.
        coded: of these, what they are decoded to.
    """

    dtype_name: str
    shape: tuple[int, ...] = ()
    kind: Kind = "array"
    coded: Coded | None = None

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of an element."""
        return torch_dtypes()[self.dtype_name]

    @property
    def row_bytes(self) -> int:
        """Bytes of a row."""
        return math.prod(self.shape) * ITEM_BYTES[self.dtype_name]

    def __repr__(self) -> str:
        if self.coded is not None:
            return repr(self.coded)
        if self.kind != "array":
            return self.kind
        return f"dtype=torch.{self.dtype_name}, shape={(None, *self.shape)!r}"


class Ragged:
    """Values of uneven length, one after another; moves between devices as a tensor does.

    Attributes:
        values: ``[total, *shape]``, the rows of all values.
        offsets: int64 ``[n + 1]``; value i is ``values[offsets[i]:offsets[i + 1]]``.
        shape: how the n values are arranged: ``(B, L)`` for windows of L steps, else ``(n,)``; in the order of rows.

    Raises:
        SchemaError: offsets that do not begin with 0, ascend and end with the number of rows. On a GPU it is not looked
            at, so that nothing waits.
    """

    __slots__ = ("offsets", "shape", "values")

    def __init__(
        self, values: torch.Tensor, offsets: torch.Tensor, shape: tuple[int, ...] | None = None
    ) -> None:
        fits = offsets.ndim == 1 and len(offsets) > 0 and offsets.dtype == torch.int64 and values.ndim > 0
        if fits and offsets.device.type == "cpu":
            fits = int(offsets[0]) == 0 and int(offsets[-1]) == len(values)
            fits = fits and bool((offsets[1:] >= offsets[:-1]).all())
        shape = (len(offsets) - 1,) if shape is None else tuple(shape)
        if not fits or math.prod(shape) != len(offsets) - 1:
            raise SchemaError(
                f"values {list(values.shape)}, offsets {offsets.dtype} {list(offsets.shape)} and shape {list(shape)} "
                "were received; expected offsets int64 [n + 1] that begin with 0, ascend and end with the number of "
                "values' rows, and a shape of n values."
            )
        self.values, self.offsets, self.shape = values, offsets, shape

    @classmethod
    def _of(cls, values: Any, offsets: Any, shape: Any) -> Ragged:
        """Without a check."""
        made = cls.__new__(cls)
        made.values, made.offsets, made.shape = values, offsets, shape
        return made

    @property
    def lengths(self) -> torch.Tensor:
        """Rows of each value, int64, of the shape `shape`. Does not wait for a GPU."""
        return self.offsets.diff().view(self.shape)

    @property
    def device(self) -> torch.device:
        """The device of the values."""
        return self.values.device

    def __len__(self) -> int:
        return self.shape[0]

    def __getitem__(self, place: int | tuple[int, ...]) -> torch.Tensor:
        """One value, a view ``[n, *shape]``. Waits for a GPU that has the offsets."""
        number = int(np.ravel_multi_index(_indices(place, self.shape), self.shape))
        begin, end = self.offsets[number : number + 2].tolist()
        return self.values[begin:end]

    def nested(self) -> torch.Tensor:
        """The values as a `torch.nested` tensor of layout `torch.jagged`, ``[n, j, *shape]``: a view."""
        return torch.nested.nested_tensor_from_jagged(self.values, self.offsets)

    def padded(self, length: int | None = None, value: float = 0) -> torch.Tensor:
        """A copy ``[*shape, length, ...]``, whose rows behind each value are `value`.

        Args:
            length: by default the rows of the longest value, for which a GPU is waited for; longer ones are cut.
        """
        lengths = self.offsets.diff()
        most = int(lengths.max()) if length is None and len(lengths) else length or 0
        inside = torch.arange(most, device=self.device)
        mask = inside < lengths[:, None]
        padded = self.values.new_full((len(lengths), most, *self.values.shape[1:]), value)
        places = (self.offsets[:-1, None] + inside)[mask]
        padded[mask] = self.values[places]
        return padded.view(*self.shape, most, *self.values.shape[1:])

    def tolist(self) -> list[Any]:
        """The values as views, in lists as deep as `shape` has dimensions. Waits for a GPU that has the offsets."""
        return arranged(list(self.values.split(self.offsets.diff().tolist())), self.shape)

    def to(self, *args: Any, **options: Any) -> Ragged:
        """On another device, as `torch.Tensor.to`; a dtype is that of the values."""
        values = self.values.to(*args, **options)
        offsets = self.offsets.to(values.device, non_blocking=bool(options.get("non_blocking", False)))
        return self._of(values, offsets, self.shape)

    def pin_memory(self) -> Ragged:
        """A copy in pinned memory."""
        return self._of(self.values.pin_memory(), self.offsets.pin_memory(), self.shape)

    def __repr__(self) -> str:
        dtype = str(self.values.dtype).removeprefix("torch.")
        rows = (
            f"{len(self.values):,} rows {list(self.values.shape[1:])}" if self.values.ndim > 1 else "elements"
        )
        count = "" if self.values.ndim > 1 else f"{len(self.values):,} "
        return f"<Ragged {list(self.shape)} of {count}{rows} of {dtype} on {self.device}>"


def _indices(place: int | tuple[int, ...], shape: tuple[int, ...]) -> tuple[int, ...]:
    given = place if isinstance(place, tuple) else (place,)
    fits = len(given) == len(shape)
    indices = tuple(int(i) + size if i < 0 else int(i) for i, size in zip(given, shape, strict=False))
    if not fits or not all(0 <= i < size for i, size in zip(indices, shape, strict=True)):
        raise IndexError(f"Value {place} was asked for; expected {len(shape)} indices inside {list(shape)}.")
    return indices


def arranged(values: list[Any], shape: tuple[int, ...]) -> list[Any]:
    """Values in lists as deep as `shape` has dimensions."""
    for size in reversed(shape[1:]):
        values = [values[i : i + size] for i in range(0, len(values), size)]
    return values


def texts(memory: Array, offsets: Array, kind: str, shape: tuple[int, ...]) -> list[Any]:
    """Values of text, uint8 [total], as Python's objects, in lists as deep as `shape` has dimensions.

    Raises:
        ValueError: a value is not of its format.
    """
    whole = memory.tobytes()
    bounds = offsets.tolist()
    pieces: Iterable[Any] = (whole[begin:end] for begin, end in itertools.pairwise(bounds))
    decode: Callable[[bytes], Any] = bytes.decode if kind == "str" else bytes
    if kind == "object":
        unpack = functools.partial(msgpack().unpackb, strict_map_key=False)
        decode = lambda piece: unpack(piece) if piece else None  # noqa: E731
    return arranged([decode(piece) for piece in pieces], shape)


def check_fixed(columns: Any, what: str) -> None:
    """Raise SchemaError if some columns of a schema are ragged, where they are not supported.

    Args:
        columns: name -> `Column`. what: that cannot have them, with its verb: "Table.serve() takes".
    """
    found = [name for name, column in columns.items() if column.ragged is not None]
    if found:
        raise SchemaError(
            f"The columns {found} are ragged; {what} columns of a fixed shape only. Leave them out, or give them a "
            "fixed shape and a column of lengths."
        )


def size_of(values: Any, *, other: int = 64) -> int:
    """Bytes of the values of a column or of a batch, about; `other`: of what is neither text nor an array."""
    if isinstance(values, (str, bytes)):  # torch takes longest to tell what is its own
        return len(values)
    if isinstance(values, Mapping):
        return sum(size_of(each, other=other) for each in values.values())
    if isinstance(values, (list, tuple)):
        return sum(size_of(each, other=other) for each in values)
    if isinstance(values, (np.ndarray, torch.Tensor)):
        return int(values.nbytes)
    return int(values.values.nbytes + values.offsets.nbytes) if isinstance(values, Ragged) else other
