"""The messages ADVANCE and ADVANCED: the version of the policy in a table."""

from __future__ import annotations

import dataclasses
import struct
from typing import NamedTuple

from gear_loader.transport.channel import Bytes
from gear_loader.transport.wire import Fields, Kind, ProtocolError, pack_text

__all__ = ["Advance", "Advanced"]

_AGAIN = 1  # flag
_MOST_NAME = 128
_MOST_VERSION = 1 << 62


@dataclasses.dataclass(frozen=True)
class Advance:
    """The small part of ADVANCE.

    Attributes:
        table: name of the table. expected: its version, from which it is raised by one.
        memory: of the server that told the version, as in its answer; 0 to be told, and change nothing.
        identity: of the request, the same each time that it is sent. again: whether it may have been executed before.
    """

    table: str
    expected: int
    memory: int
    identity: int
    again: bool = False

    def pack(self) -> bytes:
        """Serialize."""
        numbers = struct.pack("<QQQI", self.expected, self.memory, self.identity, self.again * _AGAIN)
        return numbers + pack_text(self.table, _MOST_NAME)

    @classmethod
    def most(cls) -> int:
        """Largest size of the message."""
        return 28 + 2 + _MOST_NAME

    @classmethod
    def parse(cls, small: Bytes) -> Advance:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, Kind.ADVANCE.name)
        expected, memory, identity = (fields.number(8, name) for name in ("version", "memory", "id"))
        flags = fields.number(4, "flags")
        if expected >= _MOST_VERSION or flags > _AGAIN:
            raise ProtocolError(
                f"A message ADVANCE has version {expected:,} and flags {flags}; expected less than "
                f"{_MOST_VERSION:,}, and at most {_AGAIN}."
            )
        table = fields.text("table", _MOST_NAME)
        fields.end()
        return cls(table, expected, memory, identity, bool(flags & _AGAIN))


class Advanced(NamedTuple):
    """The small part of ADVANCED.

    Attributes:
        version: of the policy. memory: number of the server's memory of requests, which ends with its process.
        done: whether the request has made the version.
    """

    version: int
    memory: int
    done: bool

    def pack(self) -> bytes:
        """Serialize."""
        return struct.pack("<QQI", *self)

    @classmethod
    def parse(cls, small: Bytes) -> Advanced:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, Kind.ADVANCED.name)
        version, memory, done = (
            fields.number(8, "version"),
            fields.number(8, "memory"),
            fields.number(4, "done"),
        )
        fields.end()
        if version > _MOST_VERSION or done > 1:
            raise ProtocolError(
                f"A message ADVANCED has version {version:,} and done {done}; expected at most {_MOST_VERSION:,}, and "
                "0 or 1."
            )
        return cls(version, memory, bool(done))
