"""The handshake of a connection: each side proves knowledge of the shared secret without sending it.

The proof is an HMAC-SHA256 over the nonces and libraries of both sides, the carrier, and the role of the prover, so
a recorded or reflected proof is invalid. The requester proves itself first; before that it learns only the version,
library and carrier of the server. Later messages are neither encrypted nor signed without TLS (see `tls`): the secret
protects against unauthorized requests, not against eavesdropping.
"""

from __future__ import annotations

import hmac
import os
import secrets
import stat
import struct
from collections.abc import Callable

from gear_loader.errors import HandshakeError
from gear_loader.transport import wire_messages as messages
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
from gear_loader.utils.paths import local_path

MIN_SECRET = 16
"""Fewest bytes of a secret."""
_MOST_SECRET = 1 << 16

_WHEN = "during the handshake"


def check_secret(secret: bytes) -> bytes:
    """Check a secret and return it.

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


def read_secret(path: str | os.PathLike[str]) -> bytes:
    """Read a secret from a file, without surrounding white space.

    Raises:
        HandshakeError: the path is not local, other users may write or read the file, it belongs to another user, or
            the secret is invalid.
        OSError: the file cannot be read.
    """
    with open(local_path(path, HandshakeError, "The secret file"), "rb") as file:
        info = os.fstat(file.fileno())
        secret = file.read(_MOST_SECRET).strip()
    if not stat.S_ISCHR(info.st_mode):  # a terminal is readable only while the secret is typed
        others = [
            what
            for what, bits in (("write", stat.S_IWGRP | stat.S_IWOTH), ("read", stat.S_IROTH))
            if info.st_mode & bits
        ]
        if others:
            raise HandshakeError(
                f"Other users may {' and '.join(others)} the secret file {path} (mode "
                f"{stat.S_IMODE(info.st_mode):04o}), so the secret is not safe. Write a new secret and restrict "
                f"the file to its owner: chmod 600 {path}."
            )
        if info.st_uid not in (os.geteuid(), 0):
            raise HandshakeError(
                f"The secret file {path} belongs to user {info.st_uid}; expected user {os.geteuid()} of this process, "
                "or root. Give a file of your own."
            )
    if not secret:
        raise HandshakeError(
            f"{path} holds no secret; expected a file with one, such as `openssl rand -hex 32` prints, and the same on "
            "all nodes."
        )
    return check_secret(secret)


def check_library(ours: str, theirs: str, *, peer: str) -> None:
    """Check that two libraries are compatible.

    Raises:
        HandshakeError: they are not; the message names both.
    """
    if family(ours) != family(theirs):
        raise HandshakeError(
            f"{peer} uses {printable(theirs)}, this side {ours}: the two are not compatible. Install the same "
            "library on both sides, or use the carrier 'socket'."
        )


def _introduction(channel: Channel, carrier: str, nonce: bytes) -> bytes:
    return messages.HELLO.pack(library=channel.library, carrier=carrier, nonce=nonce)


def _prove(secret: bytes, role: bytes, requester: bytes, server: bytes) -> bytes:
    transcript = struct.pack("<HII", VERSION, len(requester), len(server)) + requester + server
    return hmac.digest(secret, b"gear-loader " + role + b"\0" + transcript, "sha256")


async def refuse(channel: Channel, text: str, request: int = 0) -> None:
    """Send the reason of a refusal; the caller closes the connection."""
    try:
        await send(channel, Kind.REFUSE, request, pack_text(text))
    except ConnectionError:
        return


async def introduce(channel: Channel, secret: bytes, address: Address, *, peer: str) -> Limits:
    """The requester's side of the handshake.

    Returns:
        The server's limits; fields that it does not send have default values.

    Raises:
        HandshakeError: one side refused the other; the message has the reason.
        ConnectionError: the connection is closed, or the server is busy. Another attempt may succeed.
    """
    nonce = secrets.token_bytes(NONCE)
    ours = _introduction(channel, address.carrier, nonce)
    try:
        await send(channel, Kind.HELLO, 0, ours)
        _, small = await _expect(channel, Kind.CHALLENGE, messages.HELLO.most(), peer)
        theirs = bytes(small)
        found = messages.CHALLENGE.parse(small)
        check_library(channel.library, found.library, peer=peer)
        if found.carrier != address.carrier or found.nonce == nonce:
            raise HandshakeError(
                f"{peer} answers for the carrier {printable(found.carrier)!r}; expected {address.carrier!r} and a "
                "nonce of its own."
            )
        await send(channel, Kind.PROOF, 0, _prove(secret, b"requester", ours, theirs))
        _, small = await _expect(channel, Kind.WELCOME, messages.WELCOME.most(), peer)
        sent = vars(messages.WELCOME.parse(small))
        proof = sent.pop("proof")
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
        limits = Limits(**sent)
    except ValueError as error:
        raise HandshakeError(f"{peer} sent invalid limits: {error}") from None
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
    """The server's side of the handshake; the caller enforces a deadline.

    Args:
        carrier: name of the carrier. limits: sent to the requester.
        admit: called after the requester's proof; returns why it cannot be served now, or "".

    Raises:
        HandshakeError: the requester was refused; the reason was sent to it.
        ConnectionError: the connection is closed, or `admit` returned a reason, which was sent.
    """
    try:
        _, small = await receive_small(channel, {Kind.HELLO: (messages.HELLO.most(), 0)}, _WHEN)
        theirs = bytes(small)
        found = messages.HELLO.parse(small)
        check_library(channel.library, found.library, peer="The requester")
        if found.carrier != carrier:
            raise HandshakeError(
                f"The requester asked for the carrier {printable(found.carrier)!r}; this is {carrier!r}."
            )
        ours = _introduction(channel, carrier, secrets.token_bytes(NONCE))
        assert ours[-NONCE:] != found.nonce
        await send(channel, Kind.CHALLENGE, 0, ours)
        _, small = await receive_small(channel, {Kind.PROOF: (messages.PROOF.most(), 0)}, _WHEN)
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
        told = {name: getattr(limits, name) for name in messages.WELCOME.fields if name != "proof"}
        welcome = messages.WELCOME.pack(proof=_prove(secret, b"server", theirs, ours), **told)
        await send(channel, Kind.WELCOME, 0, welcome)
        await channel.secured()
        return
    await refuse(channel, str(why))
    raise why
