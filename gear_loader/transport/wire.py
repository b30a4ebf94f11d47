"""The wire protocol: headers, kinds and fields of messages, read from an untrusted source.

A message is a header of 64 bytes, followed by a *small* part and a *bulk* part if their sizes are not zero; each is a
separate message of the channel. All integers are little-endian::

    header   magic  b"GEARWIRE"  8    the first 16 bytes are the same in every version,
             version        u16  2    and the first message of either side has 64 bytes,
             kind           u16  2    so that different versions can name each other
             zero           u32  4
             request        u64  8    an answer has the number of its request; 0 during the handshake
             small bytes    u32  4
             zero           u32  4
             bulk bytes     u64  8
             zero               20
             crc32          u32  4    of the 60 bytes before

The module `wire_messages` declares their small parts. ERROR has `CODES` u16 and a text, and leaves the connection open;
REFUSE, whose sender closes, and BUSY, of a server that has no free connection, have a text. BYE: the requester closes.

HELLO, CHALLENGE, PROOF and WELCOME come first, in this order. Then the requester may send any number of requests
without waiting; answers may arrive in any order, but those to FETCH and OPEN come in the order of these requests. There
is no pickle; sizes are checked before memory is allocated.
"""

from __future__ import annotations

import dataclasses
import enum
import struct
import zlib
from typing import NamedTuple

import numpy as np

from gear_loader import errors
from gear_loader.errors import GearError, HandshakeError, TransportError
from gear_loader.transport.channel import Bytes, Channel, as_bytes
from gear_loader.utils.arrays import Array

VERSION = 8
HEADER = 64
NONCE = 32
MAX_TEXT = 4096
"""Most bytes of a text."""
MAGIC = b"GEARWIRE"
"""The first bytes of every message."""
_LAYOUT = struct.Struct("<8sHHIQIIQ20sI")
_SUMMED = struct.Struct("<8sHHIQIIQ20s")  # all but the checksum
_ZEROS = bytes(20)
assert _LAYOUT.size == HEADER == _SUMMED.size + 4


class ProtocolError(TransportError):
    """The other side sent an invalid or unexpected message. The connection cannot be used any more."""


class PartsMissingError(TransportError):
    """A STORE refers to PART messages that the server does not have; the whole trajectory must be sent."""


class VersionError(ProtocolError):
    """The other side uses another version of the protocol."""


class Kind(enum.IntEnum):
    """Kinds of messages."""

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
    UPDATE = 17
    UPDATED = 18
    PART = 19
    FILL = 20
    FILLED = 21
    UNFILLED = 22
    ADVANCE = 23
    ADVANCED = 24
    SET = 25
    WRITTEN = 26
    LEARN = 27
    LEARNING = 28
    CALL = 29
    ANSWER = 30


_KINDS = {int(kind): kind for kind in Kind}


@dataclasses.dataclass(frozen=True)
class Limits:
    """Limits of a server. The first four are sent to requesters, which check their requests before sending.

    Attributes:
        rows: most rows or trajectories of a request.
        reply_bytes: most bytes of a reply. A connection uses at most two buffers of this size.
        store_bytes: most bytes of the trajectories in one STORE request.
        specs: most specs that a connection can have open.
        connections: most authenticated connections; further ones receive BUSY.
        unproven: most connections before authentication; a further one waits until the oldest is authenticated, or has
            had several times as long as handshakes take and is closed.
        handshake: seconds for the handshake.
        patience: seconds for the transfer of one message, in either direction.
        open_bytes, open_trajectories: most bytes and trajectories of PART messages that a connection has open.
        open_seconds: seconds after its last part that an open trajectory is forgotten; its client sends it again.
        all_open_bytes: most bytes of the PART messages that all connections have open.
        total_bytes: most bytes of the STORE requests of all connections that are being received or stored. Further ones
            wait for their turn.
        learners: most learners at a time that draw here.
        learner_bytes: most bytes of the batches that are kept for a learner until they have arrived; draws wait then.
        learner_seconds: seconds that a learner whose connection is lost is remembered.
    """

    rows: int = 1 << 16
    reply_bytes: int = 1 << 28
    store_bytes: int = 1 << 28
    specs: int = 64
    connections: int = 4096
    unproven: int = 256
    handshake: float = 5.0
    patience: float = 60.0
    open_bytes: int = 1 << 26
    open_trajectories: int = 1 << 12
    open_seconds: float = 60.0
    all_open_bytes: int = 1 << 30
    total_bytes: int = 1 << 30
    learners: int = 1024
    learner_bytes: int = 1 << 30
    learner_seconds: float = 120.0

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            seconds = field.name in ("handshake", "learner_seconds", "open_seconds", "patience")
            if isinstance(value, bool) or not isinstance(value, (int, float) if seconds else int):
                raise ValueError(f"{field.name} is {value!r}; expected a number.")
            if not 0 < value < (1e9 if seconds else 1 << 40 if "bytes" in field.name else 1 << 24):
                raise ValueError(
                    f"{field.name} is {value!r}; expected a positive number within reasonable bounds."
                )


class Header(NamedTuple):
    """The header of a message."""

    kind: Kind
    request: int
    small: int
    bulk: int

    @classmethod
    def parse(cls, data: Bytes) -> Header:
        """Parse and validate 64 bytes from an untrusted source.

        Raises:
            VersionError: another protocol version. ProtocolError: invalid header.
        """
        view = as_bytes(data)
        magic, version, kind, zero, request, small, zero2, bulk, zeros, crc = _LAYOUT.unpack(view)
        if magic != MAGIC:
            raise ProtocolError(f"A message begins with {magic!r}; expected {MAGIC!r}. Is that Gear Loader?")
        if version != VERSION:
            raise VersionError(f"protocol version {version}; this side speaks version {VERSION}")
        if zlib.crc32(view[: HEADER - 4]) != crc:
            raise ProtocolError(
                f"A message's header has the checksum {crc:#010x}, which does not match its bytes."
            )
        if kind not in _KINDS:
            raise ProtocolError(f"A message is of kind {kind}; expected 1 to {len(_KINDS)}.")
        if zero or zero2 or zeros != _ZEROS:
            raise ProtocolError("A message's header has nonzero unused fields.")
        # In less time than by the constructor.
        return tuple.__new__(cls, (_KINDS[kind], request, small, bulk))

    def pack(self, *, version: int = VERSION) -> bytes:
        """Serialize to 64 bytes."""
        return pack_header(*self, version)


def pack_header(kind: Kind, request: int, small: int, bulk: int, version: int = VERSION) -> bytes:
    """Serialize a header to 64 bytes."""
    head = _SUMMED.pack(MAGIC, version, kind, 0, request, small, 0, bulk, _ZEROS)
    return head + zlib.crc32(head).to_bytes(4, "little")


def check(header: Header, allowed: dict[Kind, tuple[int, int]], when: str) -> None:
    """Check that a message is allowed in the current state, and its sizes.

    Args:
        allowed: kind -> most bytes of the small and of the bulk part.
        header: header of the message.
        when: description of the state for errors, such as "during the handshake".

    Raises:
        ProtocolError: the message is not allowed or too large.
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
    """Send a message with at most one bulk part."""
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
    """Reads the fields of a small part in order. Every method raises ProtocolError for a missing or invalid field.

    Args:
        data: the small part. what: kind of the message, for errors.
    """

    def __init__(self, data: Bytes, what: str) -> None:
        self._data = as_bytes(data)
        self._at = 0
        self.what = what

    def raw(self, count: int, name: str) -> memoryview:
        """Read `count` bytes."""
        left = len(self._data) - self._at
        if count > left:
            raise ProtocolError(
                f"{name} of a message {self.what} takes {count:,} bytes; {left:,} are left of it."
            )
        self._at += count
        return self._data[self._at - count : self._at]

    def number(self, size: int, name: str) -> int:
        """Read an unsigned integer of `size` bytes."""
        return int.from_bytes(self.raw(size, name), "little")

    def text(self, name: str, most: int = MAX_TEXT) -> str:
        """Read a text of at most `most` bytes."""
        size = self.number(2, f"The length of {name}")
        if size > most:
            raise ProtocolError(
                f"{name} of a message {self.what} has {size:,} bytes; expected at most {most:,}."
            )
        try:
            return str(self.raw(size, name), "utf-8")
        except UnicodeDecodeError as error:
            raise ProtocolError(f"{name} of a message {self.what} is not UTF-8 ({error.reason}).") from None

    def array(self, count: int, dtype: str, name: str) -> Array:
        """Read `count` numbers, as a view."""
        kind = np.dtype(dtype)
        return np.frombuffer(self.raw(count * kind.itemsize, name), dtype=kind)

    def rest(self) -> memoryview:
        """Read all remaining bytes."""
        return self.raw(len(self._data) - self._at, "The rest")

    def end(self) -> None:
        """Check that no bytes remain."""
        left = len(self._data) - self._at
        if left:
            raise ProtocolError(f"A message {self.what} has {left:,} bytes too many.")


def pack_text(text: str, most: int = MAX_TEXT) -> bytes:
    """Serialize a text; a longer one is cut after `most` bytes."""
    data = text.encode("utf-8", "backslashreplace")
    if len(data) > most:
        data = data[: most - 3].decode("utf-8", "ignore").encode() + b"..."
    return len(data).to_bytes(2, "little") + data


def printable(text: str, most: int = 500) -> str:
    """A received text made safe for output: on one line, without control characters."""
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
    PartsMissingError,
    errors.FilledError,
    errors.TableEmptyError,
    errors.CheckpointError,
)
"""Classes of errors that a server reports, by code. New ones are appended."""


def pack_error(error: BaseException) -> bytes:
    """The small part of ERROR."""
    codes = [i for i, kind in enumerate(CODES) if type(error) is kind]
    text = str(error) if isinstance(error, GearError) else f"{type(error).__name__}: {error}"
    return (codes[0] if codes else 0).to_bytes(2, "little") + pack_text(text)


def read_error(small: Bytes) -> GearError:
    """Parse an ERROR message into an exception of the same class and text.

    Raises:
        ProtocolError: invalid message.
    """
    fields = Fields(small, "ERROR")
    code, text = fields.number(2, "The code"), fields.text("The text")
    fields.end()
    if code >= len(CODES):
        code = 0
    return CODES[code](printable(text, MAX_TEXT))


def failure(error: GearError, what: str) -> TransportError:
    """The exception that a requester raises for a server's error, which becomes its cause."""
    kind = HandshakeError if isinstance(error, HandshakeError) else TransportError
    made = kind(f"{what}: {error}")
    made.__cause__ = error
    return made
