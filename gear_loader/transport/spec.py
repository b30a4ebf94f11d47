"""What a reader wants of another node's table, and how the bytes of a reply lie."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from typing import Any, Literal

from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.schema import DTYPES, Schema, Window

__all__ = ["ALIGNMENT", "MAX_COLUMNS", "MAX_SPEC_BYTES", "Piece", "WindowSpec", "read_schema", "round_up"]

ALIGNMENT = 128
"""Pieces begin at multiples of it: whole lines for a GPU that reads them."""
MAX_SPEC_BYTES = 1 << 20
"""Most bytes of a spec as JSON."""
MAX_COLUMNS = 4096
_MAX_NAME = 1024  # bytes of a column's name
_MAX_DIMENSIONS = 32
_MAX_ROW_BYTES = 1 << 40
_MAX_TABLE_NAME = 128  # as `gear_loader.storage.shared_memory` has it


def round_up(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


@dataclasses.dataclass(frozen=True)
class Piece:
    """One column's windows, or one mask, of n rows: uint8 [n, row_bytes], contiguous.

    Attributes:
        name: the column; of a mask, the first column that has this window.
        offset: bytes from the start of the reply's data, a multiple of 128.
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

    Columns stand in the schema's order; there is one mask for each distinct window, in the order in which the columns
    have them. Steps that do not exist are zeros, as `Window.pad` says where; masks are bool [n, length]. A row is gone
    if there was no live trajectory of its generation at its slot when the read began: its bytes are zeros.

    Args:
        table: name of the table on its node.
        schema: what the reader takes the table's columns to be.
        windows: column -> window, at least one.

    Attributes:
        table, schema: as given. windows: in the schema's order.
        row_bytes: bytes of a row of all pieces together.

    Raises:
        SchemaError: no windows, a window of no column, or rows of 2**40 bytes and more.
    """

    SERVED, GONE = 0, 1

    def __init__(self, table: str, schema: Schema, windows: Mapping[str, Window]) -> None:
        unknown = [name for name in windows if name not in schema]
        if not windows or unknown:
            raise SchemaError(
                f"Windows of {list(windows)} were asked for; expected at least one of the columns {list(schema)}."
            )
        self.table = table
        self.schema = schema
        self.windows = {name: windows[name] for name in schema if name in windows}
        owners: dict[Window, str] = {}
        for name, window in self.windows.items():
            owners.setdefault(window, name)
        self._rows: list[tuple[str, Literal["column", "mask"], int]] = [
            (name, "column", schema[name].step_bytes * window.length) for name, window in self.windows.items()
        ]
        self._rows += [(name, "mask", window.length) for window, name in owners.items()]
        self.row_bytes = sum(size for _, _, size in self._rows)
        self._sizes = (0, 0)
        if self.row_bytes >= _MAX_ROW_BYTES:
            raise SchemaError(
                f"Windows of {self.row_bytes:,} bytes a row; expected less than {_MAX_ROW_BYTES:,}."
            )

    def __repr__(self) -> str:
        return f"WindowSpec({self.table!r}, {self.windows!r})"

    def pieces(self, n: int) -> tuple[Piece, ...]:
        """How the data of n rows lie: columns in order, then masks."""
        pieces, offset = [], 0
        for name, kind, size in self._rows:
            pieces.append(Piece(name, kind, offset, size))
            offset += round_up(n * size)
        return tuple(pieces)

    def data_bytes(self, n: int) -> int:
        """Room that the pieces of n rows need, a multiple of 128; the status begins there."""
        sizes = self._sizes  # once: other threads may ask for other numbers of rows
        if sizes[0] != n:
            sizes = self._sizes = n, sum(round_up(n * size) for _, _, size in self._rows)
        return sizes[1]

    def reply_bytes(self, n: int) -> int:
        """`data_bytes(n)` and the status of n rows, rounded up to a multiple of 128."""
        return self.data_bytes(n) + round_up(n)

    # ---------------------------------------------------------------- on the wire

    def to_bytes(self) -> bytes:
        """As JSON."""
        fields = {
            "table": self.table,
            "columns": self.schema.to_json(),
            "windows": [[name, each.length, each.offset, each.pad] for name, each in self.windows.items()],
        }
        return json.dumps(fields, separators=(",", ":")).encode()

    @classmethod
    def from_bytes(cls, data: bytes) -> WindowSpec:
        """The inverse of `to_bytes`, of bytes that anybody may have sent.

        Raises:
            TransportError: it is no spec; the message names the field.
        """
        fields = _read_json(data)
        if not isinstance(fields, dict) or set(fields) != {"table", "columns", "windows"}:
            raise TransportError(f"A spec has {_kind(fields)}; expected table, columns and windows.")
        table = fields["table"]
        if not isinstance(table, str) or not 1 <= len(table) <= _MAX_TABLE_NAME:
            raise TransportError(f"A spec has {_shown(table)} as table; expected the name of one.")
        schema = read_schema(fields["columns"])
        rows = fields["windows"]
        if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
            raise TransportError(
                f"A spec has {_kind(rows)} as windows; expected a list of 1 to {MAX_COLUMNS:,}."
            )
        windows: dict[str, Window] = {}
        for i, row in enumerate(rows):
            if not isinstance(row, list) or len(row) != 4 or not isinstance(row[0], str) or row[0] in windows:
                raise TransportError(
                    f"A spec has {_shown(row)} as windows[{i}]; expected [column, length, offset, pad] once a column."
                )
            try:
                windows[row[0]] = Window(row[1], row[2], row[3])
            except (SchemaError, TypeError) as error:
                raise TransportError(f"windows[{i}] of a spec: {_shown(str(error))}") from None
        try:
            return cls(table, schema, windows)
        except SchemaError as error:
            raise TransportError(f"A spec's windows: {_shown(str(error))}") from None


def read_schema(rows: Any) -> Schema:
    """The schema that `Schema.to_json` made, of JSON that anybody may have sent.

    Raises:
        TransportError: it is none; the message names the field.
    """
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
        raise TransportError(
            f"A schema has {_kind(rows)} as columns; expected a list of 1 to {MAX_COLUMNS:,}."
        )
    names = set()
    for i, row in enumerate(rows):
        if not isinstance(row, list) or len(row) != 3:
            raise TransportError(
                f"A schema has {_shown(row)} as columns[{i}]; expected [name, dtype, shape]."
            )
        name, dtype, shape = row
        if not isinstance(name, str) or not name or len(name) > _MAX_NAME or name in names:
            raise TransportError(
                f"A schema has {_shown(name)} as name of columns[{i}]; expected each name once."
            )
        if not isinstance(dtype, str) or dtype not in DTYPES:
            raise TransportError(
                f"A schema has {_shown(dtype)} as dtype of columns[{i}]; expected one of {', '.join(DTYPES)}."
            )
        size = 1
        whole = isinstance(shape, list) and len(shape) <= _MAX_DIMENSIONS
        for extent in shape if whole else ():
            whole = whole and type(extent) is int and 1 <= extent < _MAX_ROW_BYTES
            size = size * extent if whole else 0
        if not whole or size >= _MAX_ROW_BYTES:
            raise TransportError(
                f"A schema has {_shown(shape)} as shape of columns[{i}]; expected at most {_MAX_DIMENSIONS} positive "
                "integers."
            )
        names.add(name)
    try:
        return Schema.from_json(rows)
    except SchemaError as error:
        raise TransportError(f"A schema's columns: {_shown(str(error))}") from None


def _read_json(data: bytes) -> Any:
    if len(data) > MAX_SPEC_BYTES:
        raise TransportError(f"A spec has {len(data):,} bytes; expected at most {MAX_SPEC_BYTES:,}.")
    try:
        return json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TransportError(f"A spec is no JSON ({_shown(str(error))}); expected an object.") from None


def _kind(value: Any) -> str:
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return _shown(value)


def _shown(value: Any) -> str:
    text = value if isinstance(value, str) else repr(value)
    text = ascii(text)[1:-1] if not text.isprintable() or not text.isascii() else text
    return text if len(text) <= 200 else text[:197] + "..."
