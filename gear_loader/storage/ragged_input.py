"""Checks of ragged values that are to be stored. Loads neither torch nor compiled loops, as clients do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.decoding import encoded
from gear_loader.storage.dtypes import NUMPY_DTYPES
from gear_loader.storage.ragged import Ragged, Values, msgpack
from gear_loader.storage.schema import Column, Schema, as_mapping, copied, settled
from gear_loader.utils.arrays import Array, data_address, shown, unreadable
from gear_loader.utils.lazy_torch import is_tensor, torch


class Payload(NamedTuple):
    """Ragged values of trajectories to store.

    Attributes:
        runs: int64 [R, 3], as `operations.extents.take_payload` takes them.
        sizes, rows, addresses: int64 [V], of each value: bytes, rows, and where it is.
        records: of each run, int64 [values, 2], which the steps to store refer to; or of all, int64 [V, 2].
        hold: owners of that memory.
    """

    runs: Array
    sizes: Array
    rows: Array
    addresses: Array
    records: Sequence[Array] | Array
    hold: object


def joined_payloads(first: Payload | None, more: Sequence[tuple[int, Payload]]) -> Payload | None:
    """Ragged values of trajectories, with one more run for some of them, by their number."""
    if not more or first is None:
        return first if not more else joined_payloads(more[0][1], more[1:])
    parts = [first, *(each for _, each in more)]
    begins = np.cumsum([0, *(len(each.sizes) for each in parts)])
    runs = np.concatenate(
        [each.runs + np.array([0, at, at]) for each, at in zip(parts, begins[:-1], strict=True)]
    )
    order = np.argsort(runs[:, 0], kind="stable")
    records = [part for each in parts for part in each.records]
    sizes, rows, addresses = (
        np.concatenate(each) for each in zip(*(each[1:4] for each in parts), strict=True)
    )
    held = [each.hold for each in parts]
    return Payload(runs[order], sizes, rows, addresses, [records[i] for i in order.tolist()], held)


Common = Callable[[int], Sequence[Mapping[str, Array]]]
"""Returns for so many trajectories the records of values that they have in common with others: column -> int64 [2]."""


def with_records(
    schema: Schema, trajectories: Sequence[Any], common: Common | None = None
) -> tuple[list[Any], Payload]:
    """Trajectories with records in place of ragged values, for `payload.write_payload` to complete.

    Args:
        common: of values that trajectories do not give.

    Raises:
        SchemaError: values that do not fit; the message names the first trajectory.
    """
    parts = _Parts()
    given = []
    known: Any = {} if common is None else dict(enumerate(common(len(trajectories))))
    for number, trajectory in enumerate(trajectories):
        rows = as_mapping(trajectory, schema.objects)
        if isinstance(rows, Mapping):  # other values are an error of `Schema.validate`
            rows = dict(settled(rows))
            if taken := [name for name in known.get(number, ()) if name in rows]:
                raise SchemaError(
                    f"Trajectory {number} has the columns {taken}, which are per group, and a prefix, whose values "
                    "it has in common; leave them out."
                )
            for name in schema.ragged:
                if name in rows:
                    rows[name] = parts.add(
                        number, schema[name], rows[name], f"Column {name!r} of trajectory {number}"
                    )
            rows.update(known.get(number, {}))
        given.append(rows)
    return given, parts.joined()


class StepValues(NamedTuple):
    """Ragged values of steps that a writer appends, or that trajectories have once, of C columns.

    Attributes:
        parts: int64 [3, C, V]: `sizes`, `rows` and `addresses` as of a `Payload`. records: int64 [C, V, 2].
        by_lane: whether value i is that of lane i; else they are steps of one lane. hold: owners of the memory.
    """

    parts: Array
    records: Array
    by_lane: bool
    hold: object

    def runs(self, lanes: Array, steps: slice | Array) -> tuple[Array, Array]:
        """`Payload.runs` and `sizes` of values of lanes, int64 [m], or of steps of the only one."""
        sizes = self.parts[0][:, lanes if self.by_lane else steps]
        count = 1 if self.by_lane else sizes.shape[1]
        runs: Array = np.empty((len(lanes) * len(sizes), 3), dtype=np.int64)
        runs[:, 0] = np.repeat(lanes, len(sizes))
        runs[:, 1] = np.arange(len(runs)) * count
        runs[:, 2] = runs[:, 1] + count
        return runs, (sizes.T if self.by_lane else sizes).reshape(-1)

    def placed(self, lanes: Array, steps: slice | Array, offsets: Array) -> tuple[Array, Array]:
        """Complete the records of values that got these places, as `runs` has them; return sizes and addresses."""
        places, width = lanes if self.by_lane else steps, len(self.records)
        sizes, rows, addresses = self.parts[:, :, places]
        offsets = offsets.reshape(-1, width).T if self.by_lane else offsets.reshape(width, -1)
        self.records[:, places, 0] = abs(offsets)
        self.records[:, places, 1] = np.where(offsets < 0, -rows, rows)
        if self.by_lane:
            sizes, addresses = sizes.T, addresses.T
        return sizes.reshape(-1), addresses.reshape(-1)


def with_step_records(
    columns: Mapping[str, Column], rows: Any, what: str, *, by_lane: bool
) -> tuple[Any, StepValues | None]:
    """Rows with records in place of ragged values, to be completed.

    Args:
        columns: of which some may be ragged. rows: column name -> values; of ragged ones as for `Table.add`.
        what: name of the rows in errors. by_lane: as of `StepValues`.

    Raises:
        SchemaError: ragged values that do not fit.
    """
    ragged = {name: column.ragged for name, column in columns.items() if column.ragged is not None}
    rows = as_mapping(rows, [name for name, values in ragged.items() if values.kind == "object"])
    if not isinstance(rows, Mapping):
        return rows, None  # an error of `Schema.validate`
    rows, hold, given = dict(settled(rows)), [], []
    for name, values in ragged.items():
        if name in rows:
            count, addresses, held = _located(values, rows[name], f"Column {name!r} of {what}", False)
            given.append((name, count * values.row_bytes, count, addresses))
            hold.append(held)
    most = max((len(count) for _, _, count, _ in given), default=0)
    parts: Array = np.empty((3, len(given), most), dtype=np.int64)
    records: Array = np.zeros((len(given), most, 2), dtype=np.int64)
    for c, (name, *found) in enumerate(given):
        rows[name] = records[c, : len(found[1])]  # uneven lengths are an error of `Schema.validate`, too
        for part, each in zip(parts, found, strict=True):
            part[c, : len(each)] = each
    return rows, StepValues(parts, records, by_lane, hold) if given else None


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
        rows, addresses, hold = _located(values, [given] if once else given, what, once, whole=True)
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


def _located(
    values: Values, given: Any, what: str, once: bool, *, whole: bool = False
) -> tuple[Array, Array, object]:
    """Rows and addresses of the values of a column, int64 [T] each, and what holds this memory.

    Args:
        once: whether it has one value per trajectory. whole: whether the values are all steps of one trajectory.
    """
    if values.coded is not None:
        return _joined(encoded(values.coded, given[0] if once else given, what, once=once, whole=whole))
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


def _packed_objects(given: Any, what: str, once: bool) -> list[bytes]:
    """Objects in msgpack's format; those that it has not are refused, and so are others of which it would make them."""
    if not isinstance(given, (list, tuple)):
        raise SchemaError(f"{what} is {shown(given)}; expected a list of objects, one for each step.")
    pack, found = msgpack().Packer(strict_types=True).pack, []
    for i, item in enumerate(given):
        try:
            found.append(pack(item))
        except (TypeError, ValueError, OverflowError, RecursionError) as error:
            raise SchemaError(
                f"{what}{'' if once else f', step {i},'} is {shown(item)}, which msgpack does not store ({error}); "
                "expected None, bool, int, float, str, bytes, and lists and dicts of these."
            ) from None
    return found


def _located_text(kind: str, given: Any, what: str, once: bool) -> tuple[Array, Array, object]:
    if kind == "object":
        return _joined(_packed_objects(given, what, once))
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
    return _joined(pieces)


def _joined(pieces: Sequence[bytes]) -> tuple[Array, Array, object]:
    rows: Array = np.array([len(piece) for piece in pieces], dtype=np.int64)
    data: Array = np.frombuffer(b"".join(pieces), dtype=np.uint8)
    return rows, rows.cumsum() - rows + data_address(data), data


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
