"""What a reader requests from a table on another node, and the byte layout of a reply: windows or spans of steps, and
ragged values."""

from __future__ import annotations

import abc
import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, ClassVar, Literal, NamedTuple

import numpy as np

from gear_loader.collection.n_step import ReturnWindows
from gear_loader.collection.windows import in_schema_order, piece_rows, source_of
from gear_loader.errors import SchemaError, TransportError
from gear_loader.storage.schema import Schema, Window
from gear_loader.transport.message_schema import (
    MAX_COLUMNS,
    MAX_ROW_BYTES,
    MAX_SPEC_BYTES,
    kind_of,
    laid_out,
    read_schema,
    round_up,
    shape_of,
    shown,
)
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import check_gamma

MOST_TABLE_NAME = 128
"""Most characters of a table's name, as `gear_loader.storage.shared_memory` has it."""
_MOST_STEP = 1 << 40


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


class Span(NamedTuple):
    """One column of a packed reply: the bytes of its values, contiguous.

    Attributes:
        name: of the values in the batch. offset: bytes from the start of the reply, a multiple of 128.
        step_bytes: bytes of a value. once: whether it has one value for each row; else one for each step.
    """

    name: str
    offset: int
    step_bytes: int
    once: bool


class Spec(abc.ABC):
    """A request for rows of a table. A reply has data, then `status`, uint8 [n]: SERVED or GONE.

    A row is GONE if its slot had no live trajectory of its generation when the read began; its bytes are zeros.

    Attributes:
        table: name of the table on its node. schema: the columns that the reader expects.
    """

    SERVED, GONE = 0, 1
    NAMES: ClassVar[tuple[str, ...]]
    """Of the numbers by which a FETCH names a row."""
    FIELDS: ClassVar[int]
    """How many these are."""
    KEY: ClassVar[str]
    """Of the entries in the JSON of a spec."""
    FORMS: ClassVar[str]
    """Of an entry, for errors."""
    table: str
    schema: Schema

    @abc.abstractmethod
    def _entries(self) -> list[list[Any]]:
        """The names and what is read for them, as JSON."""

    def _more(self) -> dict[str, Any]:
        """Other fields, as JSON."""
        return {}

    @staticmethod
    def _read_more(fields: Mapping[str, Any]) -> dict[str, Any]:
        """Arguments beside the entries, of the fields of a spec. Raises TypeError."""
        return {}

    @staticmethod
    @abc.abstractmethod
    def _entry(values: list[Any]) -> Any:
        """What is read for a name, of the values after it. Raises SchemaError, TypeError or IndexError."""

    @abc.abstractmethod
    def data_bytes(self, n: int, total: int = 0) -> int:
        """Bytes of the data of n rows, a multiple of 128; offset of the status.

        Args:
            total: steps of all rows, where these are spans.
        """

    def reply_bytes(self, n: int, total: int = 0) -> int:
        """Bytes of a reply: data and status, rounded up to a multiple of 128."""
        return self.data_bytes(n, total) + round_up(n)

    def checked(self, given: Sequence[Array], out: Array) -> tuple[Array, int, int]:
        """Check the arguments of a fetch, of which the caller may reuse `given`.

        Args:
            given: int64 [n] each, as `NAMES` says. out: buffer of the reply.

        Returns:
            The rows, int64 [FIELDS, n], contiguous; where the status begins, and the bytes of the reply.

        Raises:
            SchemaError: other dtypes or sizes.
        """
        n = len(given[0])
        for name, values in zip(self.NAMES, given, strict=True):
            if not isinstance(values, np.ndarray) or values.dtype != np.int64 or values.shape != (n,):
                raise SchemaError(f"{name} is {shape_of(values)}; expected int64 [{n}].")
        rows = np.array(given)
        sizes = n, int(rows[3].sum()) if self.FIELDS > 3 else 0
        status, size = self.data_bytes(*sizes), self.reply_bytes(*sizes)
        is_array = isinstance(out, np.ndarray)
        if not is_array or out.dtype != np.uint8 or out.ndim != 1 or not out.flags.c_contiguous:
            raise SchemaError(f"out is {shape_of(out)}; expected contiguous uint8 [{size} or more].")
        if len(out) < size or not out.flags.writeable:
            raise SchemaError(
                f"out has {len(out):,} bytes{'' if out.flags.writeable else ' that cannot be written'}; expected "
                f"{size:,} writable ones for {n:,} rows."
            )
        return rows, status, size

    def to_bytes(self) -> bytes:
        """Serialize as JSON."""
        fields = {
            "table": self.table,
            "columns": self.schema.to_json(),
            self.KEY: self._entries(),
            **self._more(),
        }
        return json.dumps(fields, separators=(",", ":")).encode()


class WindowSpec(Spec):
    """Windows of a table's columns.

    The data of a reply that serves n rows::

        column, column, ..., mask, mask, ...,  each uint8 [n, row_bytes], from a multiple of 128 bytes on
        status                                 uint8 [n]: SERVED or GONE, from `data_bytes(n)` on

    Columns are in the order of the schema; there is one mask for each distinct `mask_of`, in the order of the columns.
    Columns per trajectory have no mask, and the window that `gear_loader.collection.windows` gives them.
    Padding is placed and filled as `Window.pad` says; masks are bool [n, length].

    Windows of `returns` come as what an n-step return is made of: that of the rewards as the return, float32 [n], that
    of the ends as the discount, float32 [n], those of ``next`` at the bootstrap step; then, behind the masks, whether
    there is a return, bool [n], and its bootstrap step, int64 [n].

    Args:
        table: name of the table on its node.
        schema: the columns that the reader expects.
        windows: name -> window, at least one; `Window.squeeze` is ignored.
        returns: n-step returns of some of them.

    Attributes:
        table, schema, returns: as given. windows: in the order of the schema. sources: name -> the column that it
            reads.
        row_bytes: bytes of a row over all pieces.

    Raises:
        SchemaError: no windows, a window of an unknown column, returns of windows that they cannot have, or rows of
            2**40 or more bytes.
    """

    NAMES, FIELDS = ("slots", "anchors", "generations"), 3
    KEY, FORMS = "windows", "[name, length, offset, pad] or [name, length, offset, pad, column]"

    def __init__(
        self,
        table: str,
        schema: Schema,
        windows: Mapping[str, Window],
        returns: Sequence[ReturnWindows] = (),
    ) -> None:
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
        self.returns = tuple(returns)
        self._check_returns()
        self._rows = piece_rows(schema, self.windows, self.returns)
        self.row_bytes = sum(size for _, _, size in self._rows)
        self._sizes = (0, 0)
        if self.row_bytes >= MAX_ROW_BYTES:
            raise SchemaError(
                f"Windows of {self.row_bytes:,} bytes a row; expected less than {MAX_ROW_BYTES:,}."
            )

    def _check_returns(self) -> None:
        names = [name for each in self.returns for name in each.names]
        fits = len({*names}) == len(names) and {*names} <= {*self.windows}
        for each in self.returns if fits else ():
            check_gamma(each.gamma)
            reward, *others = (self.windows[name] for name in each.names)
            fits = fits and all(window.offset == 0 for window in (reward, *others))
            fits = fits and [window.length for window in others] == [reward.length] + [1] * len(each.next)
            columns = [self.schema[self.sources[name]] for name in each.names]
            fits = fits and not any(column.trajectory for column in columns)
            fits = fits and all(column.shape in ((), (1,)) for column in columns[:2])
        if not fits:
            raise SchemaError(
                f"Returns {self.returns} were asked for; expected windows of rewards and ends of one length, and of "
                "one step of the others, each from the anchor on and in one return."
            )

    def __repr__(self) -> str:
        return f"WindowSpec({self.table!r}, {self.windows!r}{f', {self.returns!r}' if self.returns else ''})"

    def pieces(self, n: int) -> tuple[Piece, ...]:
        """Layout of the data of n rows: columns in order, then masks."""
        places, _ = laid_out(n * size for _, _, size in self._rows)
        rows = zip(self._rows, places, strict=True)
        return tuple(Piece(name, kind, offset, size) for (name, kind, size), (offset, _) in rows)

    def data_bytes(self, n: int, total: int = 0) -> int:
        sizes = self._sizes  # read once: other threads may replace it
        if sizes[0] != n:
            sizes = self._sizes = n, sum(round_up(n * size) for _, _, size in self._rows)
        return sizes[1]

    def _entries(self) -> list[list[Any]]:
        return [
            [name, *each.span, *([] if each.column is None else [each.column])]
            for name, each in self.windows.items()
        ]

    def _more(self) -> dict[str, Any]:
        return {"returns": [list(each) for each in self.returns]} if self.returns else {}

    @staticmethod
    def _entry(values: list[Any]) -> Window:
        if len(values) not in (3, 4):
            raise IndexError
        return Window(*values)

    @staticmethod
    def _read_more(fields: Mapping[str, Any]) -> dict[str, Any]:
        found, rows = [], fields.get("returns", [])
        if not isinstance(rows, list) or len(rows) > MAX_COLUMNS:
            raise TypeError(f"returns has {kind_of(rows)}; expected a list")
        for row in rows:
            given: list[Any] = row if isinstance(row, list) and len(row) == 4 else [None] * 4
            reward, done, gamma, names = given
            strings = isinstance(names, list) and all(
                isinstance(name, str) for name in (reward, done, *names)
            )
            if not strings or isinstance(gamma, bool) or not isinstance(gamma, (int, float)):
                raise TypeError(f"returns has {shown(row)}; expected [reward, done, gamma, [name, ...]]")
            found.append(ReturnWindows(reward, done, gamma, tuple(names)))
        return {"returns": found}


class PackedSpec(Spec):
    """Columns of spans of steps.

    The data of a reply that serves n rows of `total` steps together::

        column, column, ...,  each uint8 [total, step_bytes], of a column per trajectory uint8 [n, step_bytes], from a
                              multiple of 128 bytes on
        status                uint8 [n]: SERVED or GONE, from `data_bytes` on

    A row is GONE, too, if its trajectory has not all of its steps.

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

    NAMES, FIELDS = ("slots", "firsts", "generations", "counts"), 4
    KEY, FORMS = "packed", "[name, column]"

    def __init__(self, table: str, schema: Schema, columns: Mapping[str, str]) -> None:
        known = [schema[column] for column in columns.values() if column in schema]
        if len(known) < len(columns) or all(column.trajectory for column in known):
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
        places, _ = laid_out((n if once else total) * size for _, size, once in self._sizes)
        columns = zip(self._sizes, places, strict=True)
        return [Span(name, offset, size, once) for (name, size, once), (offset, _) in columns]

    def data_bytes(self, n: int, total: int = 0) -> int:
        return sum(round_up((n if once else total) * size) for _, size, once in self._sizes)

    def _entries(self) -> list[list[Any]]:
        return [[name, column] for name, column in self.columns.items()]

    @staticmethod
    def _entry(values: list[Any]) -> str:
        if len(values) != 1 or not isinstance(values[0], str):
            raise IndexError
        return values[0]


class ValueSpec(Spec):
    """Values of a ragged column, by the records that windows or spans of it have brought before.

    The data of a reply that serves n values, of which it has `total` rows together::

        values   uint8 [total, row_bytes], one after another
        status   uint8 [n]: SERVED or GONE, from `data_bytes` on

    A row of a request names a trajectory, and rows of a value: its record, the first row, and their number. Only the
    first and the last value of a request may be parts. What a record names is checked to be ragged values of the table,
    and the trajectory to be there; not that it is its record. Those of a table with a disk tier, and those of frames of
    video in windows, name the step in the trajectory, wherever its values lie when they are asked for
    (`gear_loader.storage.disk_records.by_step`).

    Args:
        table: name of the table on its node. schema: the columns that the reader expects.
        columns: the column, alone: name -> anything.

    Attributes:
        table, schema, column: as given. values: what its values are.

    Raises:
        SchemaError: not one ragged column.
    """

    NAMES, FIELDS = ("slots", "firsts", "generations", "counts", "places", "sizes"), 6
    KEY, FORMS = "values", "[column]"

    def __init__(self, table: str, schema: Schema, columns: Mapping[str, Any]) -> None:
        if len(columns) != 1 or not set(columns) <= set(schema.ragged):
            raise SchemaError(
                f"Values of the columns {list(columns)} were asked for; expected one of the ragged ones, "
                f"{list(schema.ragged)}."
            )
        self.table, self.schema, (self.column,) = table, schema, columns
        self.values = schema.ragged[self.column]

    def __repr__(self) -> str:
        return f"ValueSpec({self.table!r}, {self.column!r})"

    def data_bytes(self, n: int, total: int = 0) -> int:
        return round_up(total * self.values.row_bytes)

    def _entries(self) -> list[list[Any]]:
        return [[self.column]]

    @staticmethod
    def _entry(values: list[Any]) -> None:
        if values:
            raise IndexError


def check_spans(firsts: Array, counts: Array) -> int:
    """Check the spans of a FETCH from an untrusted source, int64 [n] each; return their steps, or rows, together.

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


AnySpec = WindowSpec | PackedSpec | ValueSpec
KINDS: tuple[type[WindowSpec] | type[PackedSpec] | type[ValueSpec], ...] = (WindowSpec, PackedSpec, ValueSpec)


def read_spec(data: bytes) -> AnySpec:
    """Parse and validate a spec from an untrusted source.

    Raises:
        TransportError: invalid spec; the message names the field.
    """
    if len(data) > MAX_SPEC_BYTES:
        raise TransportError(f"A spec has {len(data):,} bytes; expected at most {MAX_SPEC_BYTES:,}.")
    try:
        fields = json.loads(bytes(data).decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise TransportError(f"A spec is not JSON ({shown(str(error))}); expected an object.") from None
    names = set(fields) - {"returns"} if isinstance(fields, dict) else set()
    kinds = [kind for kind in KINDS if names == {"table", "columns", kind.KEY}]
    if not kinds:
        raise TransportError(
            f"A spec has {kind_of(fields)}; expected table, columns and windows, or packed or values in place of "
            "windows."
        )
    (kind,), table = kinds, fields["table"]
    if not isinstance(table, str) or not 1 <= len(table) <= MOST_TABLE_NAME:
        raise TransportError(f"A spec has {shown(table)} as table; expected the name of one.")
    schema, rows = read_schema(fields["columns"]), fields[kind.KEY]
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_COLUMNS:
        raise TransportError(
            f"A spec has {kind_of(rows)} as {kind.KEY}; expected a list of 1 to {MAX_COLUMNS:,}."
        )
    entries: dict[str, Any] = {}
    for i, row in enumerate(rows):
        try:
            if not isinstance(row, list) or not isinstance(row[0], str) or row[0] in entries:
                raise IndexError
            entries[row[0]] = kind._entry(row[1:])
        except IndexError:
            raise TransportError(
                f"A spec has {shown(row)} as {kind.KEY}[{i}]; expected {kind.FORMS}, each name once."
            ) from None
        except (SchemaError, TypeError) as error:
            raise TransportError(f"{kind.KEY}[{i}] of a spec: {shown(str(error))}") from None
    try:
        return kind(table, schema, entries, **kind._read_more(fields))
    except (SchemaError, TypeError) as error:
        raise TransportError(f"A spec's {kind.KEY}: {shown(str(error))}") from None
