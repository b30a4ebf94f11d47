"""What a `Peer` may be asked besides rows and stores, as objects; `wire_messages` declares how they lie in bytes."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from typing import Any, ClassVar, Generic, NamedTuple, TypeVar

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.late_values import LateValues
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.schema import Schema
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Bytes
from gear_loader.transport.message_schema import read_schema, round_up, shown
from gear_loader.transport.wire import Limits, ProtocolError
from gear_loader.transport.wire_messages import WireMessage
from gear_loader.utils.arrays import Array

__all__ = ["MOST_PART", "Advance", "Advanced", "Fill", "Metadata", "Part", "Question", "Unfilled", "Update"]

MOST_PART = 1 << 22
"""Most bytes of the bulk part of PART."""

_T = TypeVar("_T")


class _Declared:
    """A message whose fields are those of its declaration."""

    message: ClassVar[WireMessage]

    def pack(self) -> bytes:
        """The small part."""
        return self.message.pack(**vars(self))


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

    def finish(self, received: memoryview) -> int:
        stale: int = messages.UPDATED.parse(received).stale
        return stale


@dataclasses.dataclass(frozen=True)
class Update(_RowChange):
    """Priorities of trajectories in a table.

    Attributes:
        table: name of the table. updates: its steps are not sent.
        strict: whether a row of a removed trajectory is an error.
    """

    message, answer = messages.UPDATE, messages.UPDATED

    table: str
    updates: PriorityUpdates
    strict: bool

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.updates.slots)

    def what(self) -> str:
        return f"{self.rows:,} priorities to be set in table {self.table!r}"

    def pack(self) -> bytes:
        updates = self.updates
        return messages.UPDATE.pack(
            n=len(updates.slots),
            known=updates.generations is not None,
            strict=self.strict,
            slots=updates.slots,
            generations=updates.generations,
            priorities=updates.priorities,
            table=self.table,
        )

    @classmethod
    def parse(cls, small: Bytes, limits: Limits) -> Update:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        found = messages.UPDATE.parse(small, limits)
        steps = np.zeros(found.n, dtype=np.int64)
        updates = PriorityUpdates(found.slots, steps, found.generations, found.priorities)
        return cls(found.table, updates, found.strict)


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
    def parse(cls, small: Bytes, bulk: int) -> Part:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field.
        """
        part = cls(**vars(messages.PART.parse(small)))
        if not 1 <= part.rows <= bulk:
            raise ProtocolError(
                f"A message PART has {part.rows:,} rows in {bulk:,} bytes; expected at least one row, and one byte for "
                "each."
            )
        return part


@dataclasses.dataclass(frozen=True)
class Fill(_RowChange):
    """Values of late columns of trajectories in a table.

    Attributes:
        table: name of the table. schema: its columns. names: of the filled ones.
        slots, generations, lengths: int64 [n]; the steps of each trajectory, 1 if no column has steps.
        identity: of the request, the same each time that it is sent.
        strict: whether a row of a removed trajectory is an error. again: whether it may have been executed before.
    """

    message, answer = messages.FILL, messages.FILLED

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

    @property
    def rows(self) -> int:  # type: ignore[override]
        return len(self.slots)

    def what(self) -> str:
        return f"{self.rows:,} rows ({self.bulk_bytes:,} bytes) to be filled in table {self.table!r}"

    def repeated(self) -> Fill:
        return dataclasses.replace(self, again=True)

    def pack(self) -> bytes:
        described = json.dumps([self.schema.to_json(), list(self.names)], separators=(",", ":")).encode()
        known = {name: getattr(self, name) for name in messages.FILL.fields.keys() & vars(self).keys()}
        return messages.FILL.pack(
            n=len(self.slots), strict=self.strict, again=self.again, described=described, **known
        )

    @classmethod
    def parse(cls, small: Bytes, bulk: int, limits: Limits) -> Fill:
        """Parse and validate the small part of a message from an untrusted source.

        Args:
            bulk: bytes of the bulk part. limits: of the server.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        found = messages.FILL.parse(small, limits)
        n, lengths = found.n, found.lengths
        if n and (lengths.min() < 1 or lengths.max() > limits.store_bytes):
            raise ProtocolError(
                f"lengths of a message FILL has a number outside of 1 to {limits.store_bytes:,}."
            )
        try:
            rows, names = json.loads(str(found.described, "utf-8"))
            schema = read_schema(rows)
        except (ValueError, TypeError, RecursionError):
            raise ProtocolError("schema and names of a message FILL are not JSON.") from None
        except TransportError as error:
            raise ProtocolError(f"schema of a message FILL: {error}") from None
        known = isinstance(names, list) and all(isinstance(name, str) for name in names)
        if not known or not names or len(set(names)) != len(names) or not set(names) <= set(schema.late):
            raise ProtocolError(
                f"names of a message FILL is {shown(names)}; expected different late columns of its schema."
            )
        rows_of = found.slots, found.generations, lengths
        fill = cls(found.table, schema, tuple(names), *rows_of, found.identity, found.strict, found.again)
        if fill.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message FILL has {bulk:,} bytes; expected {fill.bulk_bytes:,} for {n:,} "
                f"trajectories of {int(lengths.sum()):,} steps."
            )
        return fill


@dataclasses.dataclass(frozen=True)
class Unfilled(Question[Array]):
    """Which trajectories of a table wait for late columns.

    Attributes:
        table: name of the table. names: of late columns; none for all.
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

    def pack(self) -> bytes:
        return messages.UNFILLED.pack(n=len(self.names), **vars(self))

    @classmethod
    def parse(cls, small: Bytes) -> Unfilled:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        found = messages.UNFILLED.parse(small)
        return cls(found.table, found.names)


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
        return Advanced.parse(received)

    def repeated(self) -> Advance:
        return dataclasses.replace(self, again=self.memory > 0)

    @classmethod
    def parse(cls, small: Bytes) -> Advance:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        return cls(**vars(messages.ADVANCE.parse(small)))


class Advanced(NamedTuple):
    """The answer to `Advance`.

    Attributes:
        version: of the policy. memory: number of the server's memory of requests, which ends with its process.
        done: whether the request has made the version.
    """

    version: int
    memory: int
    done: bool

    def pack(self) -> bytes:
        return messages.ADVANCED.pack(**self._asdict())

    @classmethod
    def parse(cls, small: Bytes) -> Advanced:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        return cls(**vars(messages.ADVANCED.parse(small)))


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
