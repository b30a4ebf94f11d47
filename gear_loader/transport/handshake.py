"""The first messages of a connection: each side proves that it knows the secret, without telling it.

HMAC-SHA256 over both sides' nonces, libraries and the carrier, with a word for the role: an answer recorded from one
connection, or given back to who sent it, proves nothing. The requester proves itself first; until then it learns
version, library and carrier of the server, and no more. After the handshake nothing is encrypted and nothing signed:
the secret keeps others from being served, not from listening on the wire.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from collections.abc import Callable

from gear_loader.errors import HandshakeError
from gear_loader.transport.channel import Address, Channel, family
from gear_loader.transport.wire import (
    MAX_TEXT,
    NONCE,
    VERSION,
    Fields,
    Kind,
    Limits,
    ProtocolError,
    VersionError,
    pack_text,
    printable,
    receive_small,
    send,
)

__all__ = ["MIN_SECRET", "answer", "check_library", "check_secret", "introduce", "read_secret", "refuse"]

MIN_SECRET = 16
"""Fewest bytes of a secret: as many as can be chosen by chance and not be guessed."""
_MOST_SECRET = 1 << 16

_MOST_NAME = 64  # bytes of a library's or a carrier's name
_INTRODUCTION = (2 + _MOST_NAME) * 2 + NONCE
_PROOF = 32
_WELCOME = _PROOF + 32
_WHEN = "during the handshake"


def check_secret(secret: bytes) -> bytes:
    """The secret, if it can be one.

    Raises:
        HandshakeError: it has fewer than `MIN_SECRET` bytes, or is not of type bytes.
    """
    if not isinstance(secret, bytes) or len(secret) < MIN_SECRET:
        size = f" and {len(secret)} bytes" if isinstance(secret, bytes) else ""
        raise HandshakeError(
            f"A secret of type {type(secret).__name__}{size} was received; expected at least {MIN_SECRET} "
            "bytes, such as secrets.token_bytes(32), the same on both sides."
        )
    return secret


def read_secret(path: str) -> bytes:
    """The secret that a file holds, without white space around it.

    Raises:
        HandshakeError: users other than its owner may write or read the file, it belongs to another user, or
            `check_secret` refuses what it holds.
        OSError: the file cannot be read.
    """
    with open(path, "rb") as file:
        info = os.fstat(file.fileno())
        secret = file.read(_MOST_SECRET).strip()
    if not stat.S_ISCHR(info.st_mode):  # of a terminal, what is typed counts
        others = [
            what
            for what, bits in (("write", stat.S_IWGRP | stat.S_IWOTH), ("read", stat.S_IROTH))
            if info.st_mode & bits
        ]
        if others:
            raise HandshakeError(
                f"Other users may {' and '.join(others)} the secret file {path} (mode "
                f"{stat.S_IMODE(info.st_mode):04o}), so that what it holds is no secret. Write a new secret, and keep "
                f"it to its owner: chmod 600 {path}."
            )
        if info.st_uid not in (os.geteuid(), 0):
            raise HandshakeError(
                f"The secret file {path} belongs to user {info.st_uid}; expected user {os.geteuid()}, who reads it, or "
                "root. Give a file of your own."
            )
    if not secret:
        raise HandshakeError(
            f"{path} holds no secret; expected a file with one, such as `openssl rand -hex 32` prints, and the same on "
            "all nodes."
        )
    return check_secret(secret)


def check_library(ours: str, theirs: str, *, peer: str) -> None:
    """Check that two libraries talk to each other.

    Raises:
        HandshakeError: they do not; the message names both.
    """
    if family(ours) != family(theirs):
        raise HandshakeError(
            f"{peer} uses {printable(theirs)}, this side {ours}: the two do not talk to each other. Install the same "
            "library on both sides, or use the carrier 'socket'."
        )


def _introduction(channel: Channel, carrier: str, nonce: bytes) -> bytes:
    return pack_text(channel.library, _MOST_NAME) + pack_text(carrier, _MOST_NAME) + nonce


def _read_introduction(small: memoryview, kind: Kind) -> tuple[str, str, bytes]:
    fields = Fields(small, kind.name)
    library, carrier = fields.text("library", _MOST_NAME), fields.text("carrier", _MOST_NAME)
    nonce = bytes(fields.raw(NONCE, "nonce"))
    fields.end()
    return library, carrier, nonce


def _prove(secret: bytes, role: bytes, requester: bytes, server: bytes) -> bytes:
    transcript = struct.pack("<HII", VERSION, len(requester), len(server)) + requester + server
    return hmac.digest(secret, b"gear-loader " + role + b"\0" + transcript, "sha256")


async def refuse(channel: Channel, text: str, request: int = 0) -> None:
    """Say why nothing is served any more; the caller closes. Who is gone does not hear it."""
    try:
        await send(channel, Kind.REFUSE, request, pack_text(text))
    except ConnectionError:
        return


async def introduce(channel: Channel, secret: bytes, address: Address, *, peer: str) -> Limits:
    """The requester's side.

    Args:
        address: where it connected to. peer: how errors call the server.

    Returns:
        What the server takes; of the fields that it does not tell, the defaults.

    Raises:
        HandshakeError: either side refuses; the message says why and names both.
        ConnectionError: the connection is gone, or the server takes no more of them now: worth another attempt.
    """
    nonce = secrets.token_bytes(NONCE)
    ours = _introduction(channel, address.carrier, nonce)
    try:
        await send(channel, Kind.HELLO, 0, ours)
        _, small = await _expect(channel, Kind.CHALLENGE, _INTRODUCTION, peer)
        theirs = bytes(small)
        library, carrier, other = _read_introduction(small, Kind.CHALLENGE)
        check_library(channel.library, library, peer=peer)
        if carrier != address.carrier or other == nonce:
            raise HandshakeError(
                f"{peer} answers for the carrier {printable(carrier)!r}; expected {address.carrier!r} and a nonce of "
                "its own."
            )
        await send(channel, Kind.PROOF, 0, _prove(secret, b"requester", ours, theirs))
        _, small = await _expect(channel, Kind.WELCOME, _WELCOME, peer)
        fields = Fields(small, Kind.WELCOME.name)
        proof = fields.raw(_PROOF, "proof")
        rows, reply, store, specs = struct.unpack("<4Q", fields.raw(32, "limits"))
        fields.end()
    except VersionError as error:
        raise HandshakeError(
            f"{peer} speaks {error}. Use the same version of Gear Loader on both sides."
        ) from None
    except ProtocolError as error:
        raise HandshakeError(f"{peer} does not speak this protocol: {error}") from None
    if not hmac.compare_digest(proof, _prove(secret, b"server", ours, theirs)):
        raise HandshakeError(
            f"{peer} does not know the secret. Give the same one to both sides; nothing was sent to it."
        )
    try:
        limits = Limits(rows, reply, store, specs)
    except ValueError as error:
        raise HandshakeError(f"{peer} told limits that make no sense: {error}") from None
    await channel.secured()
    return limits


async def _expect(channel: Channel, kind: Kind, most: int, peer: str) -> tuple[Kind, memoryview]:
    text = (2 + MAX_TEXT, 0)
    header, small = await receive_small(channel, {kind: (most, 0), Kind.REFUSE: text, Kind.BUSY: text}, _WHEN)
    if header.kind is Kind.REFUSE:
        why = Fields(small, Kind.REFUSE.name).text("The text")
        raise HandshakeError(f"{peer} refused the connection: {printable(why, MAX_TEXT)}")
    if header.kind is Kind.BUSY:
        why = Fields(small, Kind.BUSY.name).text("The text")
        raise ConnectionRefusedError(f"the server is busy: {printable(why, MAX_TEXT)}")
    return header.kind, small


async def answer(
    channel: Channel, secret: bytes, carrier: str, limits: Limits, admit: Callable[[], str] = lambda: ""
) -> None:
    """The server's side; the caller has a deadline.

    Args:
        admit: called when the requester has proven itself. Returns why it cannot be served now, or "".

    Raises:
        HandshakeError: the requester was refused, and told so if it could be.
        ConnectionError: the connection is gone, or `admit` has not admitted it, and it was told so.
    """
    try:
        _, small = await receive_small(channel, {Kind.HELLO: (_INTRODUCTION, 0)}, _WHEN)
        theirs = bytes(small)
        library, wanted, other = _read_introduction(small, Kind.HELLO)
        check_library(channel.library, library, peer="The requester")
        if wanted != carrier:
            raise HandshakeError(
                f"The requester asked for the carrier {printable(wanted)!r}; this is {carrier!r}."
            )
        ours = _introduction(channel, carrier, secrets.token_bytes(NONCE))
        assert ours[-NONCE:] != other
        await send(channel, Kind.CHALLENGE, 0, ours)
        _, small = await receive_small(channel, {Kind.PROOF: (_PROOF, 0)}, _WHEN)
        if not hmac.compare_digest(small, _prove(secret, b"requester", theirs, ours)):
            raise HandshakeError("The secrets differ. Give the same one to both sides.")
    except VersionError as error:
        why = HandshakeError(
            f"The requester speaks {error}. Use the same version of Gear Loader on both sides."
        )
    except ProtocolError as error:
        why = HandshakeError(str(error))
    except HandshakeError as error:
        why = error
    else:
        busy = admit()
        if busy:
            await send(channel, Kind.BUSY, 0, pack_text(busy))
            raise ConnectionRefusedError(busy)
        await send(channel, Kind.WELCOME, 0, _prove(secret, b"server", theirs, ours) + limits.pack())
        await channel.secured()
        return
    await refuse(channel, str(why))
    raise why
