"""What a `Peer` may be asked besides rows and stores, as objects; `wire_messages` declares how they lie in bytes."""

from __future__ import annotations

import dataclasses
import functools
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, TypeVar

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.edit_values import Edits
from gear_loader.storage.late_values import LateValues
from gear_loader.storage.ragged_input import StepValues
from gear_loader.storage.schema import Schema
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Bytes
from gear_loader.transport.message_schema import laid_out, read_schema, shown
from gear_loader.transport.ragged_rows import copied_values, taken
from gear_loader.transport.wire import Limits, ProtocolError
from gear_loader.transport.wire_messages import WireMessage
from gear_loader.utils.arrays import Array

MOST_PART = 1 << 22
"""Most bytes of the bulk part of PART."""

_T = TypeVar("_T")


class _Declared:
    """A message whose fields are those of its declaration."""

    message: ClassVar[WireMessage]

    def pack(self) -> bytes:
        """The small part."""
        return self.message.pack(**vars(self))

    @classmethod
    def parse(cls, small: Bytes, bulk: int = 0, limits: Limits | None = None) -> Any:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        return cls(**vars(cls.message.parse(small, limits)))


class Question(_Declared, Generic[_T]):
    """A message to a server and what its answer means.

    Attributes:
        table: name of the table. answer: declaration of the answer; None for DESCRIBED, which has a bulk part only.
        rows: number of rows that it names.
    """

    answer: ClassVar[WireMessage | None] = None
    rows = 0
    table: str

    def what(self) -> str:
        """What is asked for, in errors."""
        raise NotImplementedError

    def finish(self, received: memoryview) -> _T:
        """The result, of the answer's small part, or bulk part."""
        raise NotImplementedError

    def repeated(self) -> Question[_T]:
        """The question where it may have been executed before."""
        return self


class _RowChange(Question[int]):
    """A change of rows; the answer is the number of those of removed trajectories, which were skipped."""

    slots: Array

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.slots)

    def finish(self, received: memoryview) -> int:
        stale: int = messages.UPDATED.parse(received).stale
        return stale


@dataclasses.dataclass(frozen=True)
class Update(_RowChange):
    """Priorities of trajectories in a table.

    Attributes:
        table: name of the table.
        slots: int64 [n]. generations: int64 [n]; None for any. priorities: float32 [n].
        strict: whether a row of a removed trajectory is an error.
    """

    message, answer = messages.UPDATE, messages.UPDATED

    table: str
    slots: Array
    generations: Array | None
    priorities: Array
    strict: bool

    def what(self) -> str:
        return f"{self.rows:,} priorities to be set in table {self.table!r}"


@dataclasses.dataclass(frozen=True)
class Part(_Declared):
    """Steps of a trajectory that is committed later.

    Attributes:
        id: of the trajectory, made up by the client. number: of the part in the trajectory, from 0 on.
        rows: number of steps.
    """

    id: int
    number: int
    rows: int

    message = messages.PART

    @classmethod
    def parse(cls, small: Bytes, bulk: int = 0, limits: Limits | None = None) -> Part:
        part: Part = super().parse(small)
        if not 1 <= part.rows <= bulk:
            raise ProtocolError(
                f"A message PART has {part.rows:,} rows in {bulk:,} bytes; expected at least one row, and one byte for "
                "each."
            )
        return part


@dataclasses.dataclass(frozen=True)
class _ColumnChange(_RowChange):
    """Values of columns, executed once though the request is sent again.

    Attributes:
        table: name of the table. schema: its columns. names: of the changed ones.
    """

    table: str
    schema: Schema
    names: tuple[str, ...]

    @property
    def _laid_out(self) -> tuple[list[tuple[int, int]], int]:
        """Offset in the bulk part, and bytes, of each part; bytes of all."""
        raise NotImplementedError

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the bulk part."""
        return self._laid_out[1]

    def repeated(self) -> _ColumnChange:
        return dataclasses.replace(self, again=True)  # type: ignore[call-arg]  # which each of them has

    def pack(self) -> bytes:
        described = json.dumps([self.schema.to_json(), list(self.names)], separators=(",", ":")).encode()
        return self.message.pack(described=described, **vars(self))


@dataclasses.dataclass(frozen=True)
class Fill(_ColumnChange):
    """Values of write-once columns of trajectories in a table.

    Attributes:
        table: name of the table. schema: its columns. names: of the filled ones.
        slots, generations, lengths: int64 [n]; the steps of each trajectory, 1 if no column has steps.
        identity: of the request, the same each time that it is sent.
        strict: whether a row of a removed trajectory is an error. again: whether it may have been executed before.
        payload: bytes of ragged values, behind the columns in the bulk part.
    """

    message, answer = messages.FILL, messages.FILLED

    slots: Array
    generations: Array
    lengths: Array
    identity: int
    strict: bool
    again: bool = False
    payload: int = 0

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset in the bulk part, and bytes, of each column."""
        return self._laid_out[0]

    @functools.cached_property
    def _laid_out(self) -> tuple[list[tuple[int, int]], int]:
        steps = int(self.lengths.sum())
        sizes = [self.schema.column_bytes(name, steps, len(self.slots)) for name in self.names]
        places, size = laid_out(sizes)
        return places, size + self.payload

    def bulk(self, values: Sequence[LateValues]) -> Array:
        """The bulk part, uint8."""
        data = np.zeros(self.bulk_bytes, dtype=np.uint8)
        end = self.bulk_bytes - self.payload
        for (at, size), each in zip(self.columns, values, strict=True):
            if each.ragged is None:
                data[at : at + size] = each.data.reshape(-1)
                continue
            sizes, rows, addresses = each.ragged.parts[:, 0]
            data[at : at + size].view("<i8")[1::2] = rows
            begin, end = end, end + int(sizes.sum())
            data[begin:end] = copied_values(addresses, sizes)
        return data

    def values(self, data: Array) -> dict[str, Any]:
        """The values of each column, as `fill_columns` takes them, of the bulk part.

        Raises:
            TransportError, SchemaError: ragged values, as of `ragged_rows.taken`.
        """
        found: dict[str, Any] = self._ragged(data)
        ends = np.cumsum(self.lengths).tolist()
        for name, (at, size) in zip(self.names, self.columns, strict=True):
            if name in found:
                continue
            column = self.schema[name]
            values = column.values_of(data[at : at + size].reshape(-1, column.step_bytes))
            begins = [0, *ends[:-1]]
            found[name] = (
                values if column.trajectory else [values[a:b] for a, b in zip(begins, ends, strict=True)]
            )
        return found

    def _ragged(self, data: Array) -> dict[str, LateValues]:
        columns = {name: self.schema[name] for name in self.names if name in self.schema.ragged}
        ones, made = np.ones(len(self.slots), dtype=np.int64), {}
        counts = [ones if column.trajectory else self.lengths for column in columns.values()]
        places = dict(zip(self.names, self.columns, strict=True))
        records = [data[places[name][0] :][: places[name][1]] for name in columns]
        size = self.bulk_bytes
        found = taken(columns, records, counts, data[size - self.payload : size])
        for (name, column), count, parts in zip(columns.items(), counts, found, strict=True):
            empty: Array = np.zeros((1, parts.shape[1], 2), dtype=np.int64)
            values = StepValues(parts[:, None], empty, False, data)
            made[name] = LateValues(name, column, empty[0].view(np.uint8), count, values)
        return made

    def what(self) -> str:
        return f"{self.rows:,} rows ({self.bulk_bytes:,} bytes) to be filled in table {self.table!r}"

    @classmethod
    def parse(cls, small: Bytes, bulk: int = 0, limits: Limits | None = None) -> Fill:
        found, limits = messages.FILL.parse(small, limits), limits or Limits()
        n, lengths = len(found.slots), found.lengths
        if n and (lengths.min() < 1 or lengths.max() > limits.store_bytes):
            raise ProtocolError(
                f"lengths of a message FILL has a number outside of 1 to {limits.store_bytes:,}."
            )
        schema, names = _read_described("FILL", found.described, "late")
        rows_of = found.slots, found.generations, lengths
        fill = cls(found.table, schema, names, *rows_of, found.identity, found.strict, found.again)
        if not schema.ragged.keys().isdisjoint(names):
            fill = dataclasses.replace(fill, payload=max(0, bulk - fill.bulk_bytes))
        if fill.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message FILL has {bulk:,} bytes; expected {fill.bulk_bytes:,} for {n:,} "
                f"trajectories of {int(lengths.sum()):,} steps."
            )
        return fill


@dataclasses.dataclass(frozen=True)
class Overwrite(_ColumnChange):
    """Values of mutable columns of trajectories in a table.

    Attributes:
        table: name of the table. schema: its columns. names: of the overwritten ones.
        slots, anchors, generations: int64 [n], the rows. lengths: int64 [m], steps of each row in each column.
        masked: whether a mask tells which steps are written.
        identity: of the request, the same each time that it is sent.
        strict: whether a row of a removed trajectory is an error. again: whether it may have been executed before.
    """

    message, answer = messages.SET, messages.WRITTEN

    slots: Array
    anchors: Array
    generations: Array
    lengths: Array
    masked: bool
    identity: int
    strict: bool
    again: bool = False

    @functools.cached_property
    def _laid_out(self) -> tuple[list[tuple[int, int]], int]:
        steps = [int(count) * self.rows for count in self.lengths]
        sizes = [count * self.schema[name].step_bytes for count, name in zip(steps, self.names, strict=True)]
        return laid_out([*sizes, *steps[: self.masked]])

    def bulk(self, edits: Edits) -> Array:
        """The bulk part, uint8."""
        data = np.zeros(self.bulk_bytes, dtype=np.uint8)
        parts = [*(each.data for each in edits.values), *(() if edits.mask is None else (edits.mask,))]
        for (at, size), each in zip(self._laid_out[0], parts, strict=True):
            data[at : at + size] = each.reshape(-1)
        return data

    def values(self, data: Array) -> tuple[Array | None, dict[str, Any]]:
        """Mask and values of each column, as `set_columns` takes them, of the bulk part."""
        places, found = self._laid_out[0], {}
        for name, length, (at, size) in zip(self.names, self.lengths.tolist(), places, strict=False):
            column = self.schema[name]
            values = column.values_of(data[at : at + size].reshape(-1, column.step_bytes))
            found[name] = values.reshape((self.rows, length, *column.shape))
        at, size = places[-1]
        mask = data[at : at + size].reshape(self.rows, -1) != 0 if self.masked else None
        return mask, found

    def what(self) -> str:
        return f"{self.rows:,} rows ({self.bulk_bytes:,} bytes) to be overwritten in table {self.table!r}"

    @classmethod
    def parse(cls, small: Bytes, bulk: int = 0, limits: Limits | None = None) -> Overwrite:
        found, limits = messages.SET.parse(small, limits), limits or Limits()
        lengths = found.lengths
        schema, names = _read_described("SET", found.described, "mutable")
        fits = len(lengths) == len(names) and lengths.min() >= 1 and lengths.max() <= limits.store_bytes
        if not fits or (found.masked and (lengths != lengths[0]).any()):
            raise ProtocolError(
                f"lengths of a message SET are {shown(lengths.tolist())} for {len(names)} columns; expected numbers of "
                f"1 to {limits.store_bytes:,}, with a mask the same."
            )
        rows = found.slots, found.anchors, found.generations
        made = cls(
            found.table,
            schema,
            names,
            *rows,
            lengths,
            found.masked,
            found.identity,
            found.strict,
            found.again,
        )
        if made.bulk_bytes != bulk or not made.rows:
            raise ProtocolError(
                f"The bulk part of a message SET has {bulk:,} bytes; expected {made.bulk_bytes:,} for {made.rows:,} "
                "rows, and a row."
            )
        return made


def _read_described(what: str, described: Any, kind: str) -> tuple[Schema, tuple[str, ...]]:
    """Parse schema and names of a message `what`, those of "late" or "mutable" columns."""
    try:
        rows, names = json.loads(str(described, "utf-8"))
        schema = read_schema(rows)
    except (ValueError, TypeError, RecursionError):
        raise ProtocolError(f"schema and names of a message {what} are not JSON.") from None
    except TransportError as error:
        raise ProtocolError(f"schema of a message {what}: {error}") from None
    known = isinstance(names, list) and all(isinstance(name, str) for name in names)
    if (
        not known
        or not names
        or len(set(names)) != len(names)
        or not set(names) <= set(getattr(schema, kind))
    ):
        raise ProtocolError(
            f"names of a message {what} is {shown(names)}; expected different {kind} columns of its schema."
        )
    return schema, tuple(names)


@dataclasses.dataclass(frozen=True)
class Unfilled(Question[Array]):
    """Which trajectories of a table wait for write-once columns.

    Attributes:
        table: name of the table. names: of write-once columns; none for all.
    """

    message = messages.UNFILLED

    table: str
    names: tuple[str, ...]

    def what(self) -> str:
        return f"unfilled trajectories of table {self.table!r}"

    def finish(self, received: memoryview) -> Array:
        """Slots and generations, int64 [2, m]."""
        if len(received) % 16:
            raise ProtocolError(f"The answer to UNFILLED has {len(received):,} bytes; expected int64 [2, m].")
        return np.frombuffer(received, dtype="<i8").astype(np.int64).reshape(2, -1)


@dataclasses.dataclass(frozen=True)
class Advance(Question["Advanced"]):
    """The next version of the policy in a table.

    Attributes:
        table: name of the table. version: its version, from which it is raised by one.
        memory: of the server that told the version, as in its answer; 0 to be told, and change nothing.
        identity: of the request, the same each time that it is sent. again: whether it may have been executed before.
    """

    message, answer = messages.ADVANCE, messages.ADVANCED

    table: str
    version: int
    memory: int
    identity: int
    again: bool = False

    def what(self) -> str:
        return f"the next version of the policy in table {self.table!r}"

    def finish(self, received: memoryview) -> Advanced:
        found: Advanced = Advanced.parse(received)
        return found

    def repeated(self) -> Advance:
        return dataclasses.replace(self, again=self.memory > 0)


@dataclasses.dataclass(frozen=True)
class Advanced(_Declared):
    """The answer to `Advance`.

    Attributes:
        version: of the policy. memory: number of the server's memory of requests, which ends with its process.
        done: whether the request has made the version.
    """

    message = messages.ADVANCED

    version: int
    memory: int
    done: bool


@dataclasses.dataclass(frozen=True)
class Metadata(Question[bytes]):
    """Metadata of a table.

    Attributes:
        name: of the metadata; see `Server.metadata`. table: name of the table.
    """

    message = messages.METADATA

    name: str
    table: str

    def what(self) -> str:
        return f"{self.name!r} of table {self.table!r}"

    def finish(self, received: memoryview) -> bytes:
        return bytes(received)
