"""The message STORE: trajectories to be added to a table, as checked bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
import struct
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.ragged_input import Common
from gear_loader.storage.schema import Schema
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Bytes, as_bytes
from gear_loader.transport.message_schema import laid_out, padding, read_schema
from gear_loader.transport.ragged_rows import ValueBytes, with_values
from gear_loader.transport.wire import Fields, Limits, PartsMissingError, ProtocolError, pack_text
from gear_loader.utils.arrays import Array

_FINALS = 1  # flag
_REMEMBERED_BYTES = 1 << 13  # of a schema that is remembered
# Of one trajectory: n, flags, its length, id and priority, its final steps if bit 0 of the flags is set, and wait.
_ONE, _ONE_FINAL = struct.Struct("<IIqqfI"), struct.Struct("<IIqqfqI")


def _schema_of(text: bytes) -> Schema:
    """The schema of a message from an untrusted source."""
    return read_schema(json.loads(str(text, "utf-8")))


_known_schema = functools.lru_cache(maxsize=64)(_schema_of)


class Rows(NamedTuple):
    """A checked trajectory.

    Attributes:
        length: number of rows. pieces: its steps, column name -> uint8 [rows, step_bytes] for consecutive ones.
        once: column per trajectory -> uint8 [1, step_bytes].
        values: of ragged columns, whose records the others hold.
    """

    length: int
    pieces: Sequence[Mapping[str, Array]]
    once: Mapping[str, Array]
    values: ValueBytes = MappingProxyType({})

    @classmethod
    def of(cls, schema: Schema, trajectory: Mapping[str, Any], what: str) -> Rows:
        """A trajectory without ragged columns as bytes, after its checks; `what` names it in errors."""
        length, arrays = schema.validate(trajectory, what=what)
        return cls(length, [arrays], arrays)

    @classmethod
    def listed(cls, schema: Schema, trajectories: Sequence[Any], common: Common | None = None) -> list[Rows]:
        """Trajectories as bytes, after their checks; ragged values are copied. `common`: as of `with_records`."""
        values: Sequence[ValueBytes] = [{}] * len(trajectories)
        if schema.ragged:
            trajectories, values = with_values(schema, trajectories, common)
        found = [cls.of(schema, each, f"trajectory {i}") for i, each in enumerate(trajectories)]
        return [rows._replace(values=each) for rows, each in zip(found, values, strict=True)]

    @property
    def value_bytes(self) -> int:
        """Bytes of the ragged values."""
        return sum(piece.nbytes for pieces in self.values.values() for piece in pieces)


class Stacked(NamedTuple):
    """Checked trajectories of stacked arrays; trajectory i is the first ``lengths[i]`` steps of row i.

    Attributes:
        lengths: int64 [n]. columns: column name -> uint8 [n, T, step_bytes], or [n, 1, step_bytes] of columns per
            trajectory; contiguous.
    """

    lengths: Array
    columns: Mapping[str, Array]

    def part(self, low: int, high: int) -> Stacked:
        """Trajectories `low` to `high`."""
        return Stacked(self.lengths[low:high], {name: each[low:high] for name, each in self.columns.items()})

    def steps(self, name: str) -> Array:
        """The steps of a column, one trajectory after another, uint8 [steps, step_bytes]: a view if all are as long."""
        values = self.columns[name]
        if (self.lengths == values.shape[1]).all():
            return values.reshape(-1, values.shape[2])
        return values[np.arange(values.shape[1]) < self.lengths[:, None]]


@dataclasses.dataclass(frozen=True)
class Store:
    """The small part of STORE.

    Attributes:
        table: name of the table. schema: its columns.
        lengths: int64 [n], rows of each trajectory. ids: int64 [n], global ids or -1. priorities: float32 [n].
        finals: int64 [n], 1 if the last row is the final step, else 0.
        again: whether the request may have been executed before; then its ids are those of the first time.
        parts, before: number of PART messages that have brought the first rows of the only trajectory, and of these
            rows; 0 without any.
        wait: milliseconds that the server may wait for free space or the rate limiter.
        payload: bytes of ragged values, behind the columns in the bulk part.
        prefixes, prefix_steps, prefix_generations: int64 [n], as of STORE; None if nothing begins with steps of others.
    """

    table: str
    schema: Schema
    lengths: Array
    ids: Array
    priorities: Array
    finals: Array
    again: bool = False
    parts: int = 0
    before: int = 0
    wait: int = 0
    payload: int = 0
    prefixes: Array | None = None
    prefix_steps: Array | None = None
    prefix_generations: Array | None = None

    @functools.cached_property
    def has_finals(self) -> bool:
        """Whether the last row of a trajectory is its final step."""
        return bool(self.finals.any())

    @functools.cached_property
    def _laid_out(self) -> tuple[list[tuple[int, int]], int]:
        one = len(self.lengths) == 1  # the commonest case, and numpy takes microseconds a call
        steps = int(self.lengths[0] if one else self.lengths.sum()) - self.before
        return laid_out(self.schema.column_bytes(name, steps, len(self.lengths)) for name in self.schema)

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset in the bulk part, and bytes, of each column."""
        return self._laid_out[0]

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the bulk part."""
        return self._laid_out[1] + self.payload

    def pack(self) -> bytes:
        """Serialize."""
        fields = {
            **vars(self),
            "schema": self.schema.json_bytes,
            "finals": self.finals if self.has_finals else None,
            "parts": self.parts or None,
            "before": self.before if self.parts else None,
        }
        return messages.STORE.pack(**fields)

    @classmethod
    def parse(cls, small: Bytes, bulk: int, limits: Limits) -> Store:
        """Parse and validate the small part of a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        found = messages.STORE.parse(small, limits)
        lengths, has_parts = found.lengths, found.parts is not None
        n = len(lengths)
        if has_parts and n != 1:
            raise ProtocolError(f"A message STORE of {n:,} trajectories has parts; expected one trajectory.")
        finals = np.zeros(n, dtype=np.int64) if found.finals is None else found.finals
        parts, before = found.parts or 0, found.before or 0
        if bool(parts) != bool(before) or bool(parts) != has_parts or before > limits.store_bytes:
            raise ProtocolError(
                f"A message STORE has {before:,} rows in {parts:,} parts; expected rows in each part."
            )
        if n == 1:
            least = most = total = int(lengths[0])
        else:
            least, most = (int(lengths.min()), int(lengths.max())) if n else (1, 1)
            total = lengths.sum(dtype=np.float64)  # not in int64, which could overflow
        if n and (least < max(before, 1) or most > before + bulk):
            raise ProtocolError(
                f"lengths of a message STORE has a number outside of {max(before, 1):,} to {before + bulk:,}, the "
                "bytes of the bulk part and the rows before it."
            )
        if n and (finals.min() < 0 or (finals >= np.minimum(lengths, 2)).any()):
            raise ProtocolError(
                "finals of a message STORE has a number other than 0 and 1, or a trajectory has no other row."
            )
        try:
            text = bytes(found.schema)
            schema = (_known_schema if len(text) <= _REMEMBERED_BYTES else _schema_of)(text)
        except (ValueError, RecursionError):
            raise ProtocolError("schema of a message STORE is not JSON.") from None
        except TransportError as error:
            raise ProtocolError(f"schema of a message STORE: {error}") from None
        rows = lengths, found.ids, found.priorities, finals
        begins = found.prefixes, found.prefix_steps, found.prefix_generations
        store = cls(found.table, schema, *rows, found.again, parts, before, found.wait, 0, *begins)
        if float(before) * schema.step_bytes > limits.store_bytes - bulk:
            raise ProtocolError(
                f"The trajectory of a message STORE has {before:,} rows in parts and {bulk:,} bytes; at most "
                f"{limits.store_bytes:,} bytes are taken."
            )
        needed = (float(total) - before) * schema.step_bytes + n * schema.trajectory_bytes
        if schema.ragged and has_parts:
            raise ProtocolError("A message STORE of ragged columns has parts; expected the whole trajectory.")
        if schema.ragged and needed <= bulk:
            store = dataclasses.replace(store, payload=max(0, bulk - store.bulk_bytes))
        if needed > bulk or store.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message STORE has {bulk:,} bytes, which is not what {n:,} trajectories of "
                f"{needed:,.0f} bytes take."
            )
        return store

    def joined(self, parts: list[tuple[int, Array]], data: Array) -> tuple[Store, Array]:
        """The request, and its bulk part, as if it had come without PART messages.

        Args:
            parts: rows and bulk part of each PART message. data: uint8, the bulk part of STORE.

        Raises:
            PartsMissingError: they are not those that the request names.
        """
        places = [step_places(self.schema, rows) for rows, _ in parts]
        held = len(parts) == self.parts and sum(rows for rows, _ in parts) == self.before
        if not held or any(len(part) != size for (_, part), (_, size) in zip(parts, places, strict=True)):
            raise PartsMissingError(
                f"The server does not have {self.parts:,} parts with {self.before:,} steps of this trajectory. Send it "
                "as a whole."
            )
        whole = dataclasses.replace(self, parts=0, before=0)
        out = np.zeros(whole.bulk_bytes, dtype=np.uint8)
        for name, (to, _), (at, size) in zip(self.schema, whole.columns, self.columns, strict=True):
            for (_, part), (offsets, _) in zip(parts, places, strict=True):
                begin, count = offsets.get(name, (0, 0))
                out[to : to + count] = part[begin : begin + count]
                to += count
            out[to : to + size] = data[at : at + size]
        return whole, out


class One(NamedTuple):
    """What a STORE of one trajectory says of it.

    Attributes:
        rows: its rows, with the final step. final: 1 if the last row is that, else 0. priority: -1 for none.
        id: global id or -1. wait: milliseconds that the server may wait.
    """

    rows: int
    final: int
    priority: float
    id: int
    wait: int


class OneStore:
    """STORE of one trajectory of a table, as a whole and for the first time: what all such messages have in common.

    It is the commonest message; `Store` reads and writes it too, and all others.
    """

    def __init__(self, table: str, schema: Schema) -> None:
        self.table = table
        self.schema = schema
        self._tail = pack_text(table) + schema.json_bytes
        self._columns = [(name, column.step_bytes, column.trajectory) for name, column in schema.items()]
        self._places: tuple[int, tuple[list[int], int]] = 0, ([], 0)  # of the latest number of rows

    def pack(
        self, one: One, pieces: Sequence[Mapping[str, Array]], once: Mapping[str, Array]
    ) -> tuple[bytes, list[Bytes | bytes], int]:
        """Serialize.

        Args:
            one: what is said of the trajectory. pieces, once: its rows, as of `Rows`.

        Returns:
            The small part; the bulk part in pieces, and its bytes.
        """
        rows, final, priority, identity, wait = one
        head = (
            _ONE_FINAL.pack(1, _FINALS, rows, identity, priority, final, wait)
            if final
            else _ONE.pack(1, 0, rows, identity, priority, wait)
        )
        parts: list[Bytes | bytes] = []
        total = 0
        for name, step_bytes, trajectory in self._columns:
            if trajectory:
                parts.append(once[name])
                size = step_bytes
            else:
                parts += [piece[name] for piece in pieces]
                size = step_bytes * rows
            if zeros := padding(size):
                parts.append(zeros)
            total += size + len(zeros)
        return head + self._tail, parts, total

    def store(self, one: One) -> Store:
        """The same message as a `Store`."""
        lengths, ids, finals = (np.array([number]) for number in (one.rows, one.id, one.final))
        priorities = np.array([one.priority], dtype=np.float32)
        return Store(self.table, self.schema, lengths, ids, priorities, finals, wait=one.wait)

    def places(self, rows: int) -> tuple[list[int], int]:
        """Offset of each column in the bulk part of a trajectory of so many rows, and its bytes."""
        known, found = self._places  # read once: other threads may replace it
        if known == rows:
            return found
        places, total = laid_out(size if once else size * rows for _, size, once in self._columns)
        found = [at for at, _ in places], total
        self._places = rows, found
        return found

    @classmethod
    def parse(cls, small: memoryview, bulk: int) -> tuple[OneStore, One, list[int]] | None:
        """Parse and validate the small part of a STORE from an untrusted source.

        Returns:
            What it says, and the offset of each column in the bulk part; None if it is not such a message, or not
            valid, which `Store.parse` tells.
        """
        if len(small) < _ONE_FINAL.size:
            return None
        n, flags, rows, identity, priority, wait = _ONE.unpack_from(small)
        final, size = 0, _ONE.size
        if flags == _FINALS:
            *_, final, wait = _ONE_FINAL.unpack_from(small)
            size = _ONE_FINAL.size
        elif flags:
            return None
        if n != 1 or not 1 <= rows <= bulk or not 0 <= final < min(rows, 2):
            return None
        try:
            known = _known_table(bytes(small[size:]))
        except (ValueError, RecursionError, TransportError):
            return None
        offsets, total = known.places(rows)
        fits = total == bulk and not known.schema.ragged
        return (known, One(rows, final, priority, identity, wait), offsets) if fits else None


@functools.lru_cache(maxsize=64)
def _known_table(tail: bytes) -> OneStore:
    """The table and the schema of a message from an untrusted source."""
    fields = Fields(memoryview(tail), "STORE")
    return OneStore(fields.text("table", 128), _known_schema(bytes(fields.rest())))


def step_places(schema: Schema, rows: int) -> tuple[dict[str, tuple[int, int]], int]:
    """The bulk part of a PART message: offset and bytes of each column that has steps, and bytes of all."""
    places, size = laid_out(column.step_bytes * rows for column in schema.steps.values())
    return dict(zip(schema.steps, places, strict=True)), size


def bulk_parts(request: Store, rows: Sequence[Rows] | Stacked) -> list[Bytes | bytes]:
    """The bulk part of a STORE in pieces: the memory of the trajectories where possible, and zeros behind the columns.

    Args:
        request: the small part. rows: its trajectories; of one with `Store.parts`, all pieces.
    """
    parts: list[Bytes | bytes] = []
    for (name, column), (_, size) in zip(request.schema.items(), request.columns, strict=True):
        if isinstance(rows, Stacked):
            parts.append(rows.columns[name] if column.trajectory else rows.steps(name))
        elif column.trajectory:
            parts += [each.once[name] for each in rows]
        else:
            parts += [piece[name] for each in rows for piece in each.pieces[request.parts :]]
        if zeros := padding(size):
            parts.append(zeros)
    if not isinstance(rows, Stacked):
        parts += [
            piece
            for name in request.schema.ragged
            for each in rows
            for piece in each.values.get(name, ())
            if len(piece)
        ]
    return parts


def contiguous(parts: Sequence[Bytes | bytes], size: int) -> Array:
    """The bytes of all pieces, one after another in new memory, uint8 [size]."""
    data, at = np.empty(size, dtype=np.uint8), 0
    for part in parts:
        view = as_bytes(part)
        data.data[at : at + len(view)] = view
        at += len(view)
    return data
