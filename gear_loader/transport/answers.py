"""Receiving what a server answers."""

from __future__ import annotations

from typing import Any

from gear_loader.errors import TransportError
from gear_loader.transport.channel import Channel
from gear_loader.transport.request import Request
from gear_loader.transport.wire import (
    MAX_TEXT,
    Fields,
    Header,
    Kind,
    ProtocolError,
    failure,
    printable,
    read_error,
)

__all__ = ["MOST_ERROR", "receive_answer", "receive_part", "receive_refusal", "refusal", "wrong_size"]

MOST_ERROR = 4 + MAX_TEXT
"""Most bytes of an ERROR or REFUSE message."""
_MOST_DESCRIBED = 1 << 26


async def receive_part(channel: Channel, header: Header, most: int, bulk: int = 0) -> memoryview:
    """Receive the small part of a message, of at most `most` bytes; its bulk part must have `bulk` bytes.

    Raises:
        ProtocolError: it has other sizes.
    """
    if header.small > most or header.bulk != bulk:
        raise wrong_size(header, most, bulk)
    small = memoryview(bytearray(header.small))
    if header.small:
        await channel.recv_into(small)
    return small


def wrong_size(header: Header, most: int, bulk: int) -> ProtocolError:
    """The error for an answer whose small part has more than `most` bytes, or whose bulk part not `bulk`."""
    return ProtocolError(
        f"A message {header.kind.name} has parts of {header.small:,} and {header.bulk:,} bytes; expected at "
        f"most {most:,}, and {bulk:,}."
    )


async def receive_refusal(channel: Channel, header: Header) -> TransportError:
    """Receive the rest of a REFUSE message: why the server closes the connection."""
    return refusal(await receive_part(channel, header, MOST_ERROR))


def refusal(small: memoryview) -> TransportError:
    """The error of a REFUSE message: why the server closes the connection."""
    text = Fields(small, Kind.REFUSE.name).text("The text")
    return TransportError(f"the server closed the connection: {printable(text, MAX_TEXT)}")


async def receive_answer(
    channel: Channel, header: Header, request: Request[Any], peer: str
) -> tuple[TransportError | None, memoryview]:
    """Receive the rest of an answer, whose bulk part goes into `Request.out`.

    Args:
        peer: name of the server in errors.

    Returns:
        The error that the server reports, or None; and the received part for `Request.end`.

    Raises:
        ProtocolError: it is no answer to this request.
    """
    if header.kind is Kind.ERROR:
        small = await receive_part(channel, header, MOST_ERROR)
        return failure(read_error(small), f"{peer} was asked for {request.what}"), small
    if header.kind is not request.answer:
        raise ProtocolError(
            f"A message {header.kind.name} came; expected {request.answer and request.answer.name} or ERROR."
        )
    if request.answer is Kind.DESCRIBED:
        return None, await _described(channel, header)
    out = request.out
    received = await receive_part(channel, header, request.small_bytes, 0 if out is None else len(out))
    if out is not None and len(out):
        await channel.recv_into(out)
    return None, received


async def _described(channel: Channel, header: Header) -> memoryview:
    if header.small or header.bulk > _MOST_DESCRIBED:
        raise ProtocolError(
            f"A message DESCRIBED has {header.bulk:,} bytes; expected at most {_MOST_DESCRIBED:,}."
        )
    received = memoryview(bytearray(header.bulk))
    if header.bulk:
        await channel.recv_into(received)
    return received
