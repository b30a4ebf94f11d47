"""Ragged values of a table: checked, stored in its payload memory, and read by their records."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.native.ragged_copies import measure_values, read_values, write_values
from gear_loader.storage.dtypes import NUMPY_DTYPES
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.extents import (
    CURSOR,
    FIRST,
    GENERATION,
    GRAIN,
    HEADER,
    NEXT,
    SIZE,
    SLOT,
    extent_size,
)
from gear_loader.storage.ragged import Ragged, Values, texts
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Column, Schema, as_mapping, copied, settled
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array, data_address, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor, torch

assert (HEADER, SIZE, NEXT) == (32, 0, 3)  # compiled into `gear_loader.native.ragged_copies`


class Payload(NamedTuple):
    """Ragged values of trajectories to store.

    Attributes:
        runs: int64 [R, 3], as `operations.extents.take_payload` takes them.
        sizes, rows, addresses: int64 [V], of each value: bytes, rows, and where it is.
        records: of each run, int64 [values, 2], which the steps to store refer to.
        hold: owners of that memory.
    """

    runs: Array
    sizes: Array
    rows: Array
    addresses: Array
    records: Sequence[Array]
    hold: object

    @property
    def needed(self) -> int:
        """Bytes that the values take in one gap for each trajectory."""
        runs = self.runs
        ends = np.concatenate(([0], np.cumsum(self.sizes)))
        each = ends[runs[:, 2]] - ends[runs[:, 1]]
        return int((-(-each // GRAIN) * GRAIN).sum()) + HEADER * len(np.unique(runs[:, 0])) + FIRST

    def write(self, heap: Array, offsets: Array) -> bool:
        """Copy the values to their places, int64 [V], and complete the records; False if the memory is corrupt."""
        if not write_values(heap.ctypes.data, heap.nbytes, self.addresses, offsets, self.sizes):
            return False
        rows = np.where(offsets < 0, -self.rows, self.rows)
        for (_, begin, end), records in zip(self.runs.tolist(), self.records, strict=True):
            records[:, 0], records[:, 1] = abs(offsets[begin:end]), rows[begin:end]
        return True


def with_records(schema: Schema, trajectories: Sequence[Any]) -> tuple[list[Any], Payload]:
    """Trajectories with records in place of ragged values, for `Payload.write` to complete.

    Raises:
        SchemaError: values that do not fit; the message names the first trajectory.
    """
    parts = _Parts()
    given = []
    for number, trajectory in enumerate(trajectories):
        rows = as_mapping(trajectory)
        if isinstance(rows, Mapping):  # other values are an error of `Schema.validate`
            rows = dict(settled(rows))
            for name in schema.ragged:
                if name in rows:
                    rows[name] = parts.add(
                        number, schema[name], rows[name], f"Column {name!r} of trajectory {number}"
                    )
        given.append(rows)
    return given, parts.joined()


class _Parts:
    """Makes a `Payload` of columns of trajectories."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, int]] = []
        self._parts: list[tuple[Array, Array, Array]] = []
        self._records: list[Array] = []
        self._holds: list[object] = []
        self._count = 0

    def add(self, number: int, column: Column, given: Any, what: str) -> Array:
        """Take the values of one trajectory; return their records, zeros yet."""
        values, once = column.ragged, column.trajectory
        assert values is not None
        rows, addresses, hold = _located(values, [given] if once else given, what, once)
        first, self._count = self._count, self._count + len(rows)
        self._runs.append((number, first, self._count))
        self._parts.append((rows * values.row_bytes, rows, addresses))
        self._records.append(np.zeros((len(rows), 2), dtype=np.int64))
        self._holds.append(hold)
        return self._records[-1][0] if once else self._records[-1]

    def joined(self) -> Payload:
        """What was taken."""
        none: Array = np.empty(0, dtype=np.int64)
        sizes, rows, addresses = (
            np.concatenate(part) for part in zip((none,) * 3, *self._parts, strict=True)
        )
        runs: Array = np.array(self._runs, dtype=np.int64).reshape(-1, 3)
        return Payload(runs, sizes, rows, addresses, self._records, self._holds)


def _located(values: Values, given: Any, what: str, once: bool) -> tuple[Array, Array, object]:
    """Rows and addresses of the values of a column of a trajectory, int64 [T] each, and what holds this memory."""
    if values.kind != "array":
        return _located_text(values.kind, given, what, once)
    if is_tensor(given) and given.is_nested and given.layout is torch.jagged:
        nested: Any = given.detach().contiguous()
        given = Ragged(nested.values(), nested.offsets())
    if isinstance(given, Ragged):
        given = Ragged(given.values, given.offsets.cpu())  # which checks offsets that were on a GPU
        data, address = _array(values, given.values, what)
        offsets = given.offsets.numpy()
        return np.diff(offsets), address + offsets[:-1] * values.row_bytes, data
    if not isinstance(given, (list, tuple)):
        raise SchemaError(
            f"{what} is {shown(given)}; expected a list of arrays [{', '.join(map(str, ('n', *values.shape)))}], one "
            "for each step, or a gear_loader.Ragged."
        )
    found = [_array(values, each, what if once else f"{what}, step {i},") for i, each in enumerate(given)]
    rows = np.array([len(array) for array, _ in found], dtype=np.int64)
    return rows, np.array([address for _, address in found], dtype=np.int64), found


def _located_text(kind: str, given: Any, what: str, once: bool) -> tuple[Array, Array, object]:
    kinds: Any = str if kind == "str" else (bytes, bytearray, memoryview)
    items = given if isinstance(given, (list, tuple)) else None
    wrong = (
        None
        if items is None
        else next((i for i, item in enumerate(items) if not isinstance(item, kinds)), None)
    )
    if items is None or wrong is not None:
        found = shown(given if items is None or wrong is None else items[wrong])
        expected = f"{'a' if once else 'a list of'} {kind}{'' if once else ', one for each step'}"
        raise SchemaError(f"{what} is {found}; expected {expected}.")
    try:
        pieces = [item.encode() if kind == "str" else bytes(item) for item in items]
    except UnicodeEncodeError as error:
        raise SchemaError(
            f"{what} has {shown(error.object)}; expected text that UTF-8 can encode, without surrogates."
        ) from None
    rows: Array = np.array([len(piece) for piece in pieces], dtype=np.int64)
    data: Array = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    return rows, data.ctypes.data + np.cumsum(rows) - rows, data


def _array(values: Values, given: Any, what: str) -> tuple[Any, int]:
    """Contiguous memory of the host of ``[n, *shape]``, an array or a tensor, and its address."""
    dtype = NUMPY_DTYPES.get(values.dtype_name)
    array = type(given) is np.ndarray
    kind = unreadable(given) if is_tensor(given) else None if array else type(given).__name__
    fits = kind is None and given.ndim == 1 + len(values.shape) and tuple(given.shape[1:]) == values.shape
    fits = fits and (given.dtype == dtype and dtype is not None if array else given.dtype == values.dtype)
    if not fits:
        found = f"a {kind}" if kind is not None else f"{given.dtype} {list(given.shape)}"
        raise SchemaError(
            f"{what} is {found}; expected a numpy array or a torch tensor of torch.{values.dtype_name} and shape "
            f"[{', '.join(map(str, ('n', *values.shape)))}]."
        )
    if array:
        given = np.ascontiguousarray(given)
        return given, data_address(given) if len(given) else 0
    given = given.detach().resolve_neg().cpu().contiguous()
    return given, given.data_ptr()


def copied_ragged(value: Any) -> Any:
    """As `schema.copied`, of a `Ragged` too."""
    if isinstance(value, Ragged):
        return Ragged(value.values.clone(), value.offsets.clone(), value.shape)
    return copied(value)


class PayloadReader:
    """Reads ragged values of a table by their records, under a read ticket.

    Args:
        region: of the table. check: raises CorruptTableError if so many records are invalid.
    """

    def __init__(self, region: Region, check: Callable[[int], None]) -> None:
        heap = region.payload()
        self._hold, self._base, self._end, self._check = heap, heap.ctypes.data, heap.nbytes, check

    def read(self, values: Values, records: Array, shape: tuple[int, ...], *, pinned: bool = False) -> Any:
        """Values of ``records``, int64 ``[n, 2]``: a `Ragged` of n values of this shape, or lists of text.

        Args:
            pinned: into pinned memory, except text.

        Raises:
            CorruptTableError: a record names no memory of the table.
        """
        pinned = pinned and values.kind == "array"
        records, row_bytes = np.ascontiguousarray(records), values.row_bytes
        offsets = torch.empty(len(records) + 1, dtype=torch.int64, device="cpu", pin_memory=pinned)
        places = offsets.numpy()
        self._check(int(measure_values(records, row_bytes, FIRST, self._end, places)))
        memory = torch.empty(
            (int(places[-1]), *values.shape), dtype=values.dtype, device="cpu", pin_memory=pinned
        )
        self._check(int(read_values(self._base, self._end, records, row_bytes, memory.data_ptr())))
        if values.kind != "array":
            try:
                return texts(memory.numpy(), places, values.kind, shape)
            except UnicodeDecodeError:
                self._check(1)
                raise
        return Ragged._of(memory, offsets, shape)


def check_payload(region: Region, index: IndexArrays) -> None:
    """Check the extents of ragged values, and that those of live trajectories hold their values; under the lock.

    Raises:
        AssertionError: the message says where.
    """
    try:
        _check_payload(region, index)
    except IndexError as error:
        raise AssertionError("an extent of ragged values, or a record of one, is invalid") from error


def _check_payload(region: Region, index: IndexArrays) -> None:
    heap = region.payload()
    if not len(heap) or not heap[CURSOR]:
        return
    at, found = FIRST, []
    while at < heap.nbytes:
        size = extent_size(heap, at)
        found.append((at, at + size, *heap[at // 8 + SLOT : at // 8 + GENERATION + 1].tolist()))
        at += size
    extents: Array = np.array(found, dtype=np.int64)
    assert at == heap.nbytes, "the extents end beyond their memory"
    assert heap[CURSOR] in (*extents[:, 0].tolist(), at), "the cursor is no beginning of an extent"
    schema = region.layout.schema
    for slot in np.flatnonzero(index.state == READY).tolist():
        length, blocks = int(index.extent[slot, 0]), index.row(slot)
        for name, values in schema.ragged.items():
            records = np.ascontiguousarray(region.column(name)[blocks]).reshape(-1, 16).view(np.int64)
            records = records[: 1 if schema[name].trajectory else length]
            each = (_parts_of(heap, place, rows, values.row_bytes) for place, rows in records.tolist())
            parts = list(itertools.chain.from_iterable(each))
            begins, sizes = np.array(parts, dtype=np.int64).reshape(-1, 2).T
            which = np.searchsorted(extents[:, 0], begins, side="right") - 1
            inside = (begins >= extents[which, 0] + HEADER) & (begins + sizes <= extents[which, 1])
            own = (extents[which, 2] == slot) & (extents[which, 3] == index.generation[slot])
            assert (inside & own).all(), f"values of column {name!r} of slot {slot} lie in memory of others"


def _parts_of(heap: Array, place: int, rows: int, row_bytes: int) -> Iterator[tuple[int, int]]:
    """First byte and bytes of each part of a value."""
    left = abs(rows) * row_bytes
    if rows > 0:
        yield place, left
    while rows < 0 and left > 0:
        part = min(left, extent_size(heap, place) - HEADER)
        yield place + HEADER, part
        left, place = left - part, int(heap[place // 8 + NEXT])
