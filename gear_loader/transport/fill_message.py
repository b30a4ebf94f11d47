"""The messages FILL and UNFILLED: values of late columns of trajectories in a table."""

from __future__ import annotations

import dataclasses
import json
import struct
from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_loader.storage.late_values import LateValues
from gear_loader.storage.schema import Schema
from gear_loader.transport.channel import Bytes
from gear_loader.transport.message_schema import MAX_COLUMNS, MAX_SPEC_BYTES, read_schema, round_up, shown
from gear_loader.transport.wire import MAX_TEXT, Fields, Limits, ProtocolError, pack_text
from gear_loader.utils.arrays import Array

__all__ = ["Fill", "Unfilled"]

_STRICT, _AGAIN = 1, 2  # flags
_MOST_NAME = 128


@dataclasses.dataclass(frozen=True)
class Fill:
    """The small part of FILL.

    Attributes:
        table: name of the table. schema: its columns. names: of the filled ones.
        slots, generations, lengths: int64 [n]; the steps of each trajectory, 1 if no column has steps.
        identity: of the request, the same each time that it is sent.
        strict: whether a row of a removed trajectory is an error. again: whether it may have been executed before.
    """

    table: str
    schema: Schema
    names: tuple[str, ...]
    slots: Array
    generations: Array
    lengths: Array
    identity: int
    strict: bool
    again: bool = False

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset in the bulk part, and bytes, of each column."""
        places, at, steps = [], 0, int(self.lengths.sum())
        for name in self.names:
            column = self.schema[name]
            size = column.step_bytes * (len(self.slots) if column.trajectory else steps)
            places.append((at, size))
            at += round_up(size)
        return places

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the bulk part."""
        at, size = self.columns[-1]
        return at + round_up(size)

    def bulk(self, values: Sequence[LateValues]) -> Array:
        """The bulk part, uint8."""
        data = np.zeros(self.bulk_bytes, dtype=np.uint8)
        for (at, size), each in zip(self.columns, values, strict=True):
            data[at : at + size] = each.data.reshape(-1)
        return data

    def values(self, data: Array) -> dict[str, Any]:
        """The values of each column, as `fill_columns` takes them, of the bulk part."""
        found: dict[str, Any] = {}
        ends = np.cumsum(self.lengths).tolist()
        for name, (at, size) in zip(self.names, self.columns, strict=True):
            column = self.schema[name]
            values = column.values_of(data[at : at + size].reshape(-1, column.step_bytes))
            begins = [0, *ends[:-1]]
            found[name] = (
                values if column.trajectory else [values[a:b] for a, b in zip(begins, ends, strict=True)]
            )
        return found

    def pack(self) -> bytes:
        """Serialize."""
        described = [self.schema.to_json(), list(self.names)]
        return b"".join(
            (
                struct.pack(
                    "<IIQ", len(self.slots), self.strict * _STRICT | self.again * _AGAIN, self.identity
                ),
                *(part.astype("<i8").tobytes() for part in (self.slots, self.generations, self.lengths)),
                pack_text(self.table, _MOST_NAME),
                json.dumps(described, separators=(",", ":")).encode(),
            )
        )

    @classmethod
    def most(cls, limits: Limits) -> int:
        """Largest size of the small part."""
        return 16 + 24 * limits.rows + 2 + _MOST_NAME + MAX_SPEC_BYTES

    @classmethod
    def parse(cls, small: Bytes, bulk: int, limits: Limits) -> Fill:
        """Parse and validate the small part of a message from an untrusted source.

        Args:
            bulk: bytes of the bulk part. limits: of the server.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, "FILL")
        n, flags, identity = fields.number(4, "n"), fields.number(4, "flags"), fields.number(8, "id")
        if n > limits.rows or flags > _STRICT | _AGAIN:
            raise ProtocolError(
                f"A message FILL has n {n:,} and flags {flags}; expected at most {limits.rows:,} and "
                f"{_STRICT | _AGAIN}."
            )
        slots, generations, lengths = (
            fields.array(n, "<i8", name).astype(np.int64) for name in ("slots", "generations", "lengths")
        )
        if n and (lengths.min() < 1 or lengths.max() > limits.store_bytes):
            raise ProtocolError(
                f"lengths of a message FILL has a number outside of 1 to {limits.store_bytes:,}."
            )
        table = fields.text("table", _MOST_NAME)
        try:
            rows, names = json.loads(str(fields.rest(), "utf-8"))
            schema = read_schema(rows)
        except (ValueError, TypeError, RecursionError):
            raise ProtocolError("schema and names of a message FILL are not JSON.") from None
        known = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not known or not names or len(set(names)) != len(names) or not set(names) <= set(schema.late):
            raise ProtocolError(
                f"names of a message FILL is {shown(names)}; expected different late columns of its schema."
            )
        fill = cls(
            table,
            schema,
            tuple(names),
            slots,
            generations,
            lengths,
            identity,
            bool(flags & _STRICT),
            bool(flags & _AGAIN),
        )
        if fill.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message FILL has {bulk:,} bytes; expected {fill.bulk_bytes:,} for {n:,} "
                f"trajectories of {int(lengths.sum()):,} steps."
            )
        return fill


@dataclasses.dataclass(frozen=True)
class Unfilled:
    """The small part of UNFILLED.

    Attributes:
        table: name of the table. names: of late columns; none for all.
    """

    table: str
    names: tuple[str, ...]

    def pack(self) -> bytes:
        """Serialize."""
        names = b"".join(pack_text(name) for name in self.names)
        return struct.pack("<I", len(self.names)) + pack_text(self.table, _MOST_NAME) + names

    @classmethod
    def most(cls) -> int:
        """Largest size of the message."""
        return 4 + 2 + _MOST_NAME + 64 * (2 + MAX_TEXT)

    @classmethod
    def parse(cls, small: Bytes) -> Unfilled:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, "UNFILLED")
        n, table = fields.number(4, "n"), fields.text("table", _MOST_NAME)
        if n > MAX_COLUMNS:
            raise ProtocolError(f"A message UNFILLED has n {n:,}; expected at most {MAX_COLUMNS:,}.")
        names = tuple(fields.text("a name") for _ in range(n))
        fields.end()
        return cls(table, names)
