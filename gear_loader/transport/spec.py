"""The windows that a reader requests from a table on another node, and the byte layout of a reply."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from gear_loader.collection.windows import in_schema_order, mask_of, source_of
from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.schema import Schema, Window
from gear_loader.transport.message_schema import (
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    MAX_SPEC_BYTES,
    kind_of,
    read_schema,
    round_up,
    shown,
)

__all__ = ["MOST_TABLE_NAME", "Piece", "WindowSpec", "read_json"]

MOST_TABLE_NAME = 128
"""Most characters of a table's name, as `gear_loader.storage.shared_memory` has it."""


@dataclasses.dataclass(frozen=True)
class Piece:
    """Windows of one column, or one mask, for n rows: uint8 [n, row_bytes], contiguous.

    Attributes:
        name: of the window; for a mask, of the first one with its span. kind: "column" or "mask".
        offset: bytes from the start of the reply, a multiple of 128. row_bytes: bytes of one row.
    """

    name: str
    kind: Literal["column", "mask"]
    offset: int
    row_bytes: int


class WindowSpec:
    """Windows of a table's columns.

    The data of a reply that serves n rows::

        column, column, ..., mask, mask, ...,  each uint8 [n, row_bytes], from a multiple of 128 bytes on
        status                                 uint8 [n]: SERVED or GONE, from `data_bytes(n)` on

    Columns are in the order of the schema; there is one mask for each distinct `mask_of`, in the order of the columns.
    Columns per trajectory have no mask, and the window that `gear_loader.collection.windows` gives them.
    Padding is placed and filled as `Window.pad` says; masks are bool [n, length]. A row is GONE if its slot had no live
    trajectory of its generation when the read began; its bytes are zeros.

    Args:
        table: name of the table on its node.
        schema: the columns that the reader expects.
        windows: name -> window, at least one; `Window.squeeze` is ignored.

    Attributes:
        table, schema: as given. windows: in the order of the schema. sources: name -> the column that it reads.
        row_bytes: bytes of a row over all pieces.

    Raises:
        SchemaError: no windows, a window of an unknown column, or rows of 2**40 or more bytes.
    """

    SERVED, GONE = 0, 1
    FIELDS = 3
    """Numbers by which a FETCH names a row: slot, anchor, generation."""

    def __init__(self, table: str, schema: Schema, windows: Mapping[str, Window]) -> None:
        sources = {name: source_of(name, window) for name, window in windows.items()}
        unknown = [name for name in sources.values() if name not in schema]
        if not windows or unknown:
            raise SchemaError(
                f"Windows of {list(sources.values())} were asked for; expected at least one of the columns "
                f"{list(schema)}."
            )
        self.table = table
        self.schema = schema
        self.windows = in_schema_order(schema, windows)
        self.sources = {name: sources[name] for name in self.windows}
        owners: dict[tuple[int, int, str, bool], str] = {}
        for name, window in self.windows.items():
            if not schema[self.sources[name]].trajectory:
                owners.setdefault(mask_of(schema, name, window), name)
        self._rows: list[tuple[str, Literal["column", "mask"], int]] = [
            (name, "column", schema[sources[name]].step_bytes * window.length)
            for name, window in self.windows.items()
        ]
        self._rows += [(name, "mask", length) for (length, *_), name in owners.items()]
        self.row_bytes = sum(size for _, _, size in self._rows)
        self._sizes = (0, 0)
        if self.row_bytes >= MAX_ROW_BYTES:
            raise SchemaError(
                f"Windows of {self.row_bytes:,} bytes a row; expected less than {MAX_ROW_BYTES:,}."
            )

    def __repr__(self) -> str:
        return f"WindowSpec({self.table!r}, {self.windows!r})"

    def pieces(self, n: int) -> tuple[Piece, ...]:
        """Layout of the data of n rows: columns in order, then masks."""
        pieces, offset = [], 0
        for name, kind, size in self._rows:
            pieces.append(Piece(name, kind, offset, size))
            offset += round_up(n * size)
        return tuple(pieces)

    def data_bytes(self, n: int) -> int:
        """Bytes of the pieces of n rows, a multiple of 128; offset of the status."""
        sizes = self._sizes  # read once: other threads may replace it
        if sizes[0] != n:
            sizes = self._sizes = n, sum(round_up(n * size) for _, _, size in self._rows)
        return sizes[1]

    def reply_bytes(self, n: int) -> int:
        """Bytes of a reply with n rows: data and status, rounded up to a multiple of 128."""
        return self.data_bytes(n) + round_up(n)

    # ---------------------------------------------------------------- on the wire

    def to_bytes(self) -> bytes:
        """Serialize as JSON."""
        fields = {
            "table": self.table,
            "columns": self.schema.to_json(),
            "windows": [
                [name, *each.span, *([] if each.column is None else [each.column])]
                for name, each in self.windows.items()
            ],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WindowSpec:
        """Parse and validate a spec from an untrusted source.

        Raises:
            TransportError: invalid spec; the message names the field.
        """
        fields = read_json(data)
        if not isinstance(fields, dict) or set(fields) != {"table", "columns", "windows"}:
            raise TransportError(f"A spec has {kind_of(fields)}; expected table, columns and windows.")
        table = fields["table"]
        if not isinstance(table, str) or not 1 <= len(table) <= MOST_TABLE_NAME:
            raise TransportError(f"A spec has {shown(table)} as table; expected the name of one.")
        schema = read_schema(fields["columns"])
        rows = fields["windows"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
            raise TransportError(
                f"A spec has {kind_of(rows)} as windows; expected a list of 1 to {MAX_COLUMNS:,}."
            )
        windows: dict[str, Window] = {}
        for i, row in enumerate(rows):
            named = isinstance(row, list) and len(row) in (4, 5) and isinstance(row[0], str)
            if not named or row[0] in windows:
                raise TransportError(
                    f"A spec has {shown(row)} as windows[{i}]; expected [name, length, offset, pad] or "
                    "[name, length, offset, pad, column], each name once."
                )
            try:
                windows[row[0]] = Window(*row[1:])
            except (SchemaError, TypeError) as error:
                raise TransportError(f"windows[{i}] of a spec: {shown(str(error))}") from None
        try:
            return cls(table, schema, windows)
        except SchemaError as error:
            raise TransportError(f"A spec's windows: {shown(str(error))}") from None


def read_json(data: bytes) -> Any:
    """Parse the JSON of a spec from an untrusted source.

    Raises:
        TransportError: it is too long, or no JSON.
    """
    if len(data) > MAX_SPEC_BYTES:
        raise TransportError(f"A spec has {len(data):,} bytes; expected at most {MAX_SPEC_BYTES:,}.")
    try:
        return json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TransportError(f"A spec is not JSON ({shown(str(error))}); expected an object.") from None
