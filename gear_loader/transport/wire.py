"""The protocol of requests and replies: what each message holds, and how it is read without trusting it.

A message is a header of 64 bytes, then a *small* part and a *bulk* part if their sizes are not zero; each is sent by
itself over the channel. All integers are little-endian::

    header   magic  b"GEARWIRE"  8    the first 16 bytes are the same in every version,
             version        u16  2    and the first message of either side has 64 bytes,
             kind           u16  2    so that versions which differ can name each other
             zero           u32  4
             request        u64  8    an answer has the number of its request; 0 during the handshake
             small bytes    u32  4
             zero           u32  4
             bulk bytes     u64  8
             zero               20
             crc32          u32  4    of the 60 bytes before

    text     u16 bytes, UTF-8

    HELLO, CHALLENGE   small: library text, carrier text, nonce 32      requester, server
    PROOF              small: HMAC 32                                   requester
    WELCOME            small: HMAC 32, limits u64 x 4                   server
    REFUSE             small: text; the sender closes                   either
    OPEN               small: number u32, a `WindowSpec` as JSON        requester; a number used again is replaced
    OPENED             small: number u32                                server
    FETCH              small: number u32, n u32, slots, anchors, generations, each int64 [n]
    REPLY              bulk: pieces and status, as `WindowSpec` lays them out
    STORE              small: n u32, zero u32, lengths int64 [n], ids int64 [n], priorities float32 [n],
                       table text, schema as JSON
                       bulk: column after column, each from a multiple of 128 bytes on: the steps of one trajectory
                       after another
    STORED             small: slots int64 [n]
    METADATA           small: name text, table text
    DESCRIBED          bulk: bytes
    ERROR              small: `CODES` u16, text; the connection stays
    BYE                the requester closes
    BUSY               small: text; the server takes no more connections now, and closes   server

HELLO, CHALLENGE, PROOF, WELCOME come first, in this order. Then the requester may send any number of requests without
waiting; answers need not come in order. No pickle, and no size that is not checked before memory is taken for it.
"""

from __future__ import annotations

import dataclasses
import enum
import json
import struct
import zlib
from typing import NamedTuple

import numpy as np

from gear_loader import errors
from gear_loader.errors import GearError, HandshakeError, TransportError
from gear_loader.storage.schema import Schema
from gear_loader.transport.channel import Bytes, Channel, as_bytes
from gear_loader.transport.spec import MAX_SPEC_BYTES, read_schema, round_up
from gear_loader.utils.arrays import Array

__all__ = [
    "CODES",
    "HEADER",
    "MAX_TEXT",
    "NONCE",
    "VERSION",
    "Fields",
    "Header",
    "Kind",
    "Limits",
    "ProtocolError",
    "Store",
    "VersionError",
    "check",
    "failure",
    "pack_error",
    "pack_text",
    "printable",
    "read_error",
    "receive_small",
    "send",
]


VERSION = 1
HEADER = 64
NONCE = 32
MAX_TEXT = 4096
"""Most bytes of a text."""
_MAGIC = b"GEARWIRE"
_LAYOUT = struct.Struct("<8sHHIQIIQ20sI")
_ZEROS = bytes(20)
assert _LAYOUT.size == HEADER


class ProtocolError(TransportError):
    """The other side sent what is no message, or none that may come now. The connection is of no more use."""


class VersionError(ProtocolError):
    """The other side speaks another version of the protocol."""


class Kind(enum.IntEnum):
    """What a message is."""

    HELLO = 1
    CHALLENGE = 2
    PROOF = 3
    WELCOME = 4
    REFUSE = 5
    OPEN = 6
    OPENED = 7
    FETCH = 8
    REPLY = 9
    STORE = 10
    STORED = 11
    METADATA = 12
    DESCRIBED = 13
    ERROR = 14
    BYE = 15
    BUSY = 16


_KINDS = {int(kind): kind for kind in Kind}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Most that a server takes. The first four it tells a requester, who can then say so before it sends.

    Attributes:
        rows: rows or trajectories of a request.
        reply_bytes: bytes of a reply. Two buffers of this size are the most that a connection takes.
        store_bytes: bytes of the trajectories of one request to store them.
        specs: what a connection may have opened at a time.
        connections: that have proven themselves, at a time; one more is told that the server is busy.
        unproven: connections that have not, at a time: for one more the oldest of them is closed.
        handshake: seconds until a connection must have proven itself.
        patience: seconds until a message that has begun must have come, and an answer must have been taken.
    """

    rows: int = 1 << 16
    reply_bytes: int = 1 << 28
    store_bytes: int = 1 << 28
    specs: int = 64
    connections: int = 256
    unproven: int = 256
    handshake: float = 5.0
    patience: float = 60.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            whole = field.name in ("handshake", "patience")
            if isinstance(value, bool) or not isinstance(value, (int, float) if whole else int):
                raise ValueError(f"{field.name} is {value!r}; expected a number.")
            if not 0 < value < (1e9 if whole else 1 << 40 if "bytes" in field.name else 1 << 24):
                raise ValueError(f"{field.name} is {value!r}; expected a positive number that is not absurd.")

    def pack(self) -> bytes:
        """What WELCOME tells."""
        return struct.pack("<4Q", self.rows, self.reply_bytes, self.store_bytes, self.specs)


class Header(NamedTuple):
    """The header of a message."""

    kind: Kind
    request: int
    small: int
    bulk: int

    @classmethod
    def parse(cls, data: Bytes) -> Header:
        """The header in 64 bytes that anybody may have sent.

        Raises:
            VersionError: of another version. ProtocolError: it is none.
        """
        magic, version, kind, zero, request, small, zero2, bulk, zeros, crc = _LAYOUT.unpack(as_bytes(data))
        if magic != _MAGIC:
            raise ProtocolError(f"A message begins with {magic!r}; expected {_MAGIC!r}. Is that Gear Loader?")
        if version != VERSION:
            raise VersionError(f"protocol version {version}; this side speaks version {VERSION}")
        if zlib.crc32(as_bytes(data)[: HEADER - 4]) != crc:
            raise ProtocolError(
                f"A message's header has the checksum {crc:#010x}, which is not that of its bytes."
            )
        if kind not in _KINDS:
            raise ProtocolError(f"A message is of kind {kind}; expected 1 to {len(_KINDS)}.")
        if zero or zero2 or zeros != _ZEROS:
            raise ProtocolError("A message's header has something in its unused fields; expected zeros.")
        return cls(_KINDS[kind], request, small, bulk)

    def pack(self, *, version: int = VERSION) -> bytes:
        """As 64 bytes."""
        head = _LAYOUT.pack(_MAGIC, version, self.kind, 0, self.request, self.small, 0, self.bulk, _ZEROS, 0)[
            :-4
        ]
        return head + zlib.crc32(head).to_bytes(4, "little")


def check(header: Header, allowed: dict[Kind, tuple[int, int]], when: str) -> None:
    """Check that a message may come now, and its sizes.

    Args:
        allowed: kind -> most bytes of the small and of the bulk part.
        when: how an error calls it.

    Raises:
        ProtocolError: it may not.
    """
    most = allowed.get(header.kind)
    if most is None:
        expected = ", ".join(kind.name for kind in allowed)
        raise ProtocolError(f"A message {header.kind.name} came {when}; expected {expected}.")
    for part, size, limit in zip(("small", "bulk"), header[2:], most, strict=True):
        if size > limit:
            raise ProtocolError(
                f"The {part} part of a message {header.kind.name} has {size:,} bytes; at most {limit:,} are taken."
            )


async def send(channel: Channel, kind: Kind, request: int, small: Bytes | bytes = b"", *bulk: Bytes) -> None:
    """Send a message; `bulk` is one part at most."""
    first, *rest = [as_bytes(part) for part in (small, *bulk)]
    head = Header(kind, request, len(first), sum(map(len, rest))).pack()
    await channel.send(*(part for part in (memoryview(head), first, *rest) if len(part)))


async def receive_small(
    channel: Channel, allowed: dict[Kind, tuple[int, int]], when: str
) -> tuple[Header, memoryview]:
    """Receive a message without a bulk part.

    Raises:
        ProtocolError: as `check`. ConnectionError: as `Channel.recv_into`.
    """
    head = bytearray(HEADER)
    await channel.recv_into(memoryview(head))
    header = Header.parse(memoryview(head))
    check(header, allowed, when)
    small = memoryview(bytearray(header.small))
    if header.small:
        await channel.recv_into(small)
    return header, small


# ---------------------------------------------------------------- fields


class Fields:
    """Reads the fields of a small part one after another.

    Args:
        what: how errors call the message.

    Every method raises ProtocolError if there is not so much left, or it is no such field.
    """

    def __init__(self, data: Bytes, what: str) -> None:
        self._data = as_bytes(data)
        self._at = 0
        self._what = what

    def raw(self, count: int, name: str) -> memoryview:
        """So many bytes."""
        left = len(self._data) - self._at
        if count > left:
            raise ProtocolError(
                f"{name} of a message {self._what} takes {count:,} bytes; {left:,} are left of it."
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int, name: str) -> int:
        """An unsigned integer of so many bytes."""
        return int.from_bytes(self.raw(size, name), "little")

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        """A text of at most so many bytes."""
        size = self.number(2, f"The length of {name}")
        if size > most:
            raise ProtocolError(
                f"{name} of a message {self._what} has {size:,} bytes; expected at most {most:,}."
            )
        try:
            return str(self.raw(size, name), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{name} of a message {self._what} is no UTF-8 ({error.reason}).") from None

    def array(self, count: int, dtype: str, name: str) -> Array:
        """A view of so many numbers."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.raw(count * kind.itemsize, name), dtype=kind)

    def rest(self) -> memoryview:
        """All that is left."""
        return self.raw(len(self._data) - self._at, "The rest")

    def end(self) -> None:
        """Check that nothing is left."""
        left = len(self._data) - self._at
        if left:
            raise ProtocolError(f"A message {self._what} has {left:,} bytes too many.")


def pack_text(text: str, most: int = MAX_TEXT) -> bytes:
    """A text, cut if it is longer."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > most:
        data = data[: most - 3].decode("utf-8", "ignore").encode() + b"..."
    return len(data).to_bytes(2, "little") + data


def printable(text: str, most: int = 500) -> str:
    """A text that somebody else sent, as it can be shown: on one line, without control characters."""
    return "".join(letter if letter.isprintable() else "?" for letter in text[:most])


# ---------------------------------------------------------------- errors

CODES: tuple[type[GearError], ...] = (
    errors.TransportError,
    errors.HandshakeError,
    errors.SchemaError,
    errors.RegionError,
    errors.TableFullError,
    errors.LockTimeoutError,
    errors.RateLimitError,
    errors.StaleIndexError,
    errors.TableClosedError,
    errors.PriorityError,
)
"""The class of an error that a server tells of, by its code. New ones are added at the end."""


def pack_error(error: BaseException) -> bytes:
    """The small part of ERROR."""
    codes = [i for i, kind in enumerate(CODES) if type(error) is kind]
    text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
    return (codes[0] if codes else 0).to_bytes(2, "little") + pack_text(text)


def read_error(small: Bytes) -> GearError:
    """The error that a server told of: of its class here, with its text.

    Raises:
        ProtocolError: it is none.
    """
    fields = Fields(small, "ERROR")
    code, text = fields.number(2, "The code"), fields.text("The text")
    fields.end()
    if code >= len(CODES):
        code = 0
    return CODES[code](printable(text, MAX_TEXT))


def failure(error: GearError, what: str) -> TransportError:
    """The transport's error that a requester raises for one that the server told of; that one is its cause."""
    kind = HandshakeError if isinstance(error, HandshakeError) else TransportError
    made = kind(f"{what}: {error}")
    made.__cause__ = error
    return made


# ---------------------------------------------------------------- storing


@dataclasses.dataclass(frozen=True)
class Store:
    """The small part of STORE.

    Attributes:
        lengths, ids: int64 [n]. priorities: float32 [n].
    """

    table: str
    schema: Schema
    lengths: Array
    ids: Array
    priorities: Array

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Where each column's steps begin in the bulk part, and how many bytes they have."""
        places, at, steps = [], 0, int(self.lengths.sum())
        for column in self.schema.values():
            size = steps * column.step_bytes
            places.append((at, size))
            at += round_up(size)
        return places

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the bulk part."""
        at, size = self.columns[-1]
        return at + round_up(size)

    def pack(self) -> bytes:
        """As bytes."""
        return b"".join(
            (
                struct.pack("<II", len(self.lengths), 0),
                self.lengths.astype("<i8").tobytes(),
                self.ids.astype("<i8").tobytes(),
                self.priorities.astype("<f4").tobytes(),
                pack_text(self.table),
                json.dumps(self.schema.to_json(), separators=(",", ":")).encode(),
            )
        )

    @classmethod
    def most(cls, limits: Limits) -> int:
        """Most bytes that it has."""
        return 8 + 20 * limits.rows + 2 + MAX_TEXT + MAX_SPEC_BYTES

    @classmethod
    def parse(cls, small: Bytes, bulk: int, limits: Limits) -> Store:
        """Of bytes that anybody may have sent, before a bulk part of so many bytes.

        Raises:
            ProtocolError: a field that cannot be; the message names it.
        """
        fields = Fields(small, "STORE")
        n = fields.number(4, "n")
        if n > limits.rows:
            raise ProtocolError(
                f"n of a message STORE is {n:,}; at most {limits.rows:,} trajectories are taken."
            )
        if fields.number(4, "The field after n"):
            raise ProtocolError("The field after n of a message STORE is not zero.")
        lengths, ids = fields.array(n, "<i8", "lengths"), fields.array(n, "<i8", "ids")
        priorities = fields.array(n, "<f4", "priorities")
        if n and (lengths.min() < 1 or lengths.max() > bulk):
            raise ProtocolError(
                f"lengths of a message STORE has something outside of 1 to {bulk:,}, the bytes of all."
            )
        table = fields.text("table", 128)
        try:
            schema = read_schema(json.loads(str(fields.rest(), "utf-8")))
        except (ValueError, RecursionError):
            raise ProtocolError("schema of a message STORE is no JSON.") from None
        store = cls(table, schema, lengths, ids, priorities)
        needed = float(lengths.sum(dtype=np.float64)) * schema.step_bytes  # int64 could overflow
        if needed > bulk or store.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message STORE has {bulk:,} bytes, which is not what {n:,} trajectories of "
                f"{needed:,.0f} bytes take."
            )
        return store
