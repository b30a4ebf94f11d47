"""The columns of which a reader requests spans of steps, one after another, from a table on another node."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.schema import Schema
from gear_loader.transport.message_schema import MAX_COLUMNS, kind_of, read_schema, round_up, shown
from gear_loader.transport.spec import MOST_TABLE_NAME, WindowSpec, read_json
from gear_loader.utils.arrays import Array

__all__ = ["PackedSpec", "Span", "read_spec"]

_MOST_STEP = 1 << 40


class Span(NamedTuple):
    """One column of a reply: the bytes of its values, contiguous.

    Attributes:
        name: of the values in the batch. offset: bytes from the start of the reply, a multiple of 128.
        step_bytes: bytes of a value. once: whether it has one value for each row; else one for each step.
    """

    name: str
    offset: int
    step_bytes: int
    once: bool


class PackedSpec:
    """Columns of spans of steps.

    The data of a reply that serves n rows of `total` steps together::

        column, column, ...,  each uint8 [total, step_bytes], of a column per trajectory uint8 [n, step_bytes], from a
                              multiple of 128 bytes on
        status                uint8 [n]: SERVED or GONE, from `data_bytes` on

    A row is GONE if its slot had no live trajectory of its generation, or none with its steps, when the read began; its
    bytes are zeros.

    Args:
        table: name of the table on its node.
        schema: the columns that the reader expects.
        columns: name in the batch -> column, at least one of them with steps.

    Attributes:
        table, schema, columns: as given.
        step_bytes: bytes of one step in all columns. row_bytes: bytes of one row in columns per trajectory.

    Raises:
        SchemaError: an unknown column, or none with steps.
    """

    SERVED, GONE = WindowSpec.SERVED, WindowSpec.GONE
    FIELDS = 4
    """Numbers by which a FETCH names a row: slot, first step, generation, number of steps."""

    def __init__(self, table: str, schema: Schema, columns: Mapping[str, str]) -> None:
        unknown = [column for column in columns.values() if column not in schema]
        steps = [
            name for name, column in columns.items() if column in schema and not schema[column].trajectory
        ]
        if unknown or not steps:
            raise SchemaError(
                f"Spans of the columns {list(columns.values())} were asked for; expected some of {list(schema)}, at "
                "least one of them with steps."
            )
        self.table, self.schema, self.columns = table, schema, dict(columns)
        self._sizes = [
            (name, schema[column].step_bytes, schema[column].trajectory) for name, column in columns.items()
        ]
        self.step_bytes = sum(size for _, size, once in self._sizes if not once)
        self.row_bytes = sum(size for _, size, once in self._sizes if once)

    def __repr__(self) -> str:
        return f"PackedSpec({self.table!r}, {self.columns!r})"

    def spans(self, n: int, total: int) -> list[Span]:
        """Where the columns of a reply of n rows and `total` steps lie."""
        found, offset = [], 0
        for name, size, once in self._sizes:
            found.append(Span(name, offset, size, once))
            offset += round_up((n if once else total) * size)
        return found

    def data_bytes(self, n: int, total: int) -> int:
        """Bytes of the columns of n rows and `total` steps, a multiple of 128; offset of the status."""
        return sum(round_up((n if once else total) * size) for _, size, once in self._sizes)

    def reply_bytes(self, n: int, total: int) -> int:
        """Bytes of a reply: data and status, rounded up to a multiple of 128."""
        return self.data_bytes(n, total) + round_up(n)

    # ---------------------------------------------------------------- on the wire

    def to_bytes(self) -> bytes:
        """Serialize as JSON."""
        fields = {
            "table": self.table,
            "columns": self.schema.to_json(),
            "packed": [[name, column] for name, column in self.columns.items()],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_fields(cls, fields: Mapping[str, Any]) -> PackedSpec:
        """Validate the parsed JSON of an untrusted source.

        Raises:
            TransportError: invalid spec; the message names the field.
        """
        if set(fields) != {"table", "columns", "packed"}:
            raise TransportError(f"A spec has {kind_of(fields)}; expected table, columns and packed.")
        table = fields["table"]
        if not isinstance(table, str) or not 1 <= len(table) <= MOST_TABLE_NAME:
            raise TransportError(f"A spec has {shown(table)} as table; expected the name of one.")
        schema, rows = read_schema(fields["columns"]), fields["packed"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
            raise TransportError(
                f"A spec has {kind_of(rows)} as packed; expected a list of 1 to {MAX_COLUMNS:,}."
            )
        columns: dict[str, str] = {}
        for i, row in enumerate(rows):
            fits = isinstance(row, list) and len(row) == 2 and all(isinstance(part, str) for part in row)
            if not fits or row[0] in columns:
                raise TransportError(
                    f"A spec has {shown(row)} as packed[{i}]; expected [name, column], each name once."
                )
            columns[row[0]] = row[1]
        try:
            return cls(table, schema, columns)
        except SchemaError as error:
            raise TransportError(f"A spec's columns: {shown(str(error))}") from None

    def check_rows(self, firsts: Array, counts: Array) -> int:
        """Check the spans of a FETCH from an untrusted source, int64 [n] each; return their steps together.

        Raises:
            TransportError: a number out of bounds.
        """
        for name, values in (("first steps", firsts), ("numbers of steps", counts)):
            if len(values) and (values.min() < 0 or values.max() > _MOST_STEP):
                bad = int(np.flatnonzero((values < 0) | (values > _MOST_STEP))[0])
                raise TransportError(
                    f"The {name} have {values[bad]} at place {bad}; expected a number from 0 to 2**40."
                )
        return int(counts.sum())


def read_spec(data: bytes) -> WindowSpec | PackedSpec:
    """Parse and validate a spec from an untrusted source.

    Raises:
        TransportError: invalid spec; the message names the field.
    """
    fields = read_json(data)
    if isinstance(fields, dict) and "packed" in fields:
        return PackedSpec.from_fields(fields)
    return WindowSpec.from_bytes(data)
