"""Schemas in messages, and how their data are aligned."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.schema import Schema

ALIGNMENT = 128
"""Bytes to which pieces are aligned: a cache line of a GPU."""
MAX_SPEC_BYTES = 1 << 20
"""Most bytes of a spec, or of a schema, as JSON."""
MAX_COLUMNS = 4096
MAX_ROW_BYTES = 1 << 40
_MAX_NAME = 1024  # characters of a column's name
_PADDING = [bytes(-count % ALIGNMENT) for count in range(ALIGNMENT)]


def round_up(count: int) -> int:
    """The next multiple of `ALIGNMENT`."""
    return -(-count // ALIGNMENT) * ALIGNMENT


def laid_out(sizes: Iterable[int]) -> tuple[list[tuple[int, int]], int]:
    """Offset and bytes of pieces of these sizes, each from a multiple of `ALIGNMENT` on; and the bytes of all."""
    places, at = [], 0
    for size in sizes:
        places.append((at, size))
        at += round_up(size)
    return places, at


def padding(count: int) -> bytes:
    """The zeros behind a piece of so many bytes."""
    return _PADDING[count % ALIGNMENT]


def read_schema(rows: Any) -> Schema:
    """Validate the JSON of a schema from an untrusted source.

    Raises:
        TransportError: invalid schema; the message names the column.
    """
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
        raise TransportError(
            f"A schema has {kind_of(rows)} as columns; expected a list of 1 to {MAX_COLUMNS:,}."
        )
    try:
        schema = Schema.from_json(rows)
    except SchemaError as error:
        raise TransportError(f"A schema's columns: {shown(str(error))}") from None
    for name, column in schema.items():
        if len(name) > _MAX_NAME or column.step_bytes >= MAX_ROW_BYTES:
            raise TransportError(
                f"A schema has the column {shown(name)} with {column.step_bytes:,} bytes a step; expected a name of "
                f"at most {_MAX_NAME:,} characters and less than {MAX_ROW_BYTES:,} bytes."
            )
    return schema


def shape_of(values: object) -> str:
    """Dtype and shape of an array, or the type of another value, for errors."""
    if isinstance(values, np.ndarray):
        return f"{values.dtype} {list(values.shape)}"
    return f"a {type(values).__name__}"


def kind_of(value: Any) -> str:
    """A value from an untrusted source in an error: its type and size, or itself."""
    if isinstance(value, (list, dict)):
        return f"a {type(value).__name__} of {len(value)}"
    return shown(value)


def shown(value: Any) -> str:
    """A value from an untrusted source in an error: printable, and not too long."""
    text = value if isinstance(value, str) else repr(value)
    text = ascii(text)[1:-1] if not text.isprintable() or not text.isascii() else text
    return text if len(text) <= 200 else text[:197] + "..."
