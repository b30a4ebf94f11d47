"""What carries messages: a connected pair of channels, and the carriers that connect them."""

from __future__ import annotations

import abc
import dataclasses
import importlib
import re
import urllib.parse
from collections.abc import Awaitable, Callable
from typing import Any

import numpy as np

from gear_loader.errors import TransportError

__all__ = ["CARRIERS", "Address", "Bytes", "Carrier", "Channel", "Listener", "as_bytes", "carrier", "family"]

Bytes = memoryview | np.ndarray[Any, Any]
"""Contiguous memory. Of an array all elements' bytes are meant, whatever its dtype."""


def as_bytes(part: Bytes | bytes | bytearray) -> memoryview:
    """The bytes of contiguous memory."""
    view = memoryview(part)  # type: ignore[arg-type]
    return view if view.format == "B" and view.ndim == 1 else view.cast("B")


CARRIERS: dict[str, tuple[str, str, str]] = {
    "socket": ("gear_loader.transport.socket", "SocketCarrier", ""),
    "ucx": (
        "gear_loader.transport.ucx",
        "UcxCarrier",
        "pip install '.[ucx]' (in a clone of Gear Loader)",
    ),
}
"""Name of a carrier: its module, its class, and what installs it."""

_ADDRESS = "expected <carrier>://<host>:<port>, such as socket://127.0.0.1:5555"
_LIBRARY = re.compile(r"[A-Za-z0-9][A-Za-z0-9._+-]{0,63}")


class Channel(abc.ABC):
    """One end of a connected pair. All of it runs in the thread of the event loop.

    One coroutine at a time may send and one may receive.

    Attributes:
        library: what moves the bytes, with its version: "socket", "ucxx-0.52.0", "ucx-py-0.45.0". The handshake names
            it to the other side.
        peer: the other side as a log line calls it, such as "127.0.0.1:40322"; empty if that is not known.
    """

    library: str
    peer: str = ""

    @abc.abstractmethod
    async def send(self, *parts: Bytes) -> None:
        """Send messages, in order. The other side receives each part by one `recv_into` of the same size.

        The memory may be written again when this returns. No part is empty.

        Raises:
            ConnectionError: the connection is gone.
        """

    async def secured(self) -> None:  # noqa: B027 - most carriers have nothing to do
        """Both sides have proven themselves; both call this once, before anything larger than a handshake is sent.

        Raises:
            HandshakeError, ConnectionError: the carrier cannot go on.
        """

    @abc.abstractmethod
    async def recv_into(self, buffer: Bytes) -> None:
        """Fill the buffer, which is writable and not empty, with the next message.

        Raises:
            ConnectionError: the connection is gone; how much of the buffer was written is not known.
        """

    async def linger(  # noqa: B027 - for carriers that lose what was sent last
        self, seconds: float, most: float = float("inf")
    ) -> None:
        """Before `close`: give the other side so long to receive what was sent last.

        What it sends meanwhile is thrown away, until it has sent `most` bytes.
        """

    @abc.abstractmethod
    async def close(self) -> None:
        """Close; idempotent. Whoever is sending or receiving gets a ConnectionError.

        When this returns, nothing is written into buffers of `recv_into` any more.
        """


class Listener(abc.ABC):
    """A carrier that accepts connections.

    Attributes:
        address: where, as `Carrier.connect` takes it.
    """

    address: str

    @abc.abstractmethod
    async def close(self) -> None:
        """Accept no more connections; idempotent. Those that there are stay."""


class Carrier(abc.ABC):
    """A way to connect. Making one loads its library; everything else runs in the event loop.

    Attributes:
        name: as in addresses and in `CARRIERS`.
        library: as of its channels.
    """

    name: str
    library: str

    @abc.abstractmethod
    async def connect(self, address: str) -> Channel:
        """Connect; the caller has a deadline and cancels.

        Raises:
            OSError: nobody listens there, or it cannot be reached.
            TransportError: `address` is none of this carrier's.
        """

    @abc.abstractmethod
    async def listen(self, host: str, port: int, serve: Callable[[Channel], Awaitable[None]]) -> Listener:
        """Accept connections, each served by a task of its own; `serve` closes the channel and raises nothing.

        Args:
            host: an address or a name of this machine. port: 0 for any that is free.

        Raises:
            OSError: it cannot listen there.
        """


@dataclasses.dataclass(frozen=True)
class Address:
    """An address in its parts. `library` is empty unless the address names one."""

    carrier: str
    host: str
    port: int
    library: str = ""

    @classmethod
    def parse(cls, text: str) -> Address:
        """The parts of ``<carrier>://<host>:<port>[?library=<library>]``; an IPv6 host stands in brackets.

        Raises:
            TransportError: it is no such address.
        """
        if not isinstance(text, str) or len(text) > 1024:
            raise TransportError(f"Address {str(text)[:100]!r} was received; {_ADDRESS}.")
        try:
            parts = urllib.parse.urlsplit(text)
            port, host = parts.port, parts.hostname
            query = urllib.parse.parse_qs(
                parts.query, keep_blank_values=True, strict_parsing=bool(parts.query)
            )
        except ValueError as error:
            raise TransportError(f"Address {text!r} was received ({error}); {_ADDRESS}.") from None
        plain = parts.path in ("", "/") and not parts.fragment and "@" not in parts.netloc
        libraries = query.pop("library", [""])
        if not host or not port or not plain or query or len(libraries) != 1:
            raise TransportError(f"Address {text!r} was received; {_ADDRESS}.")
        if libraries[0] and not _LIBRARY.fullmatch(libraries[0]):
            raise TransportError(
                f"Address {text!r} was received; expected a library with its version, such as ucxx-0.52.0."
            )
        return cls(parts.scheme, host, port, libraries[0])

    def __str__(self) -> str:
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{self.carrier}://{host}:{self.port}" + (f"?library={self.library}" if self.library else "")


def family(library: str) -> str:
    """A library without its version: those of one family talk to each other. "ucx-py-0.45.0" -> "ucx-py"."""
    return re.sub(r"-[0-9].*", "", library)


def carrier(name: str) -> Carrier:
    """The carrier called `name`.

    Raises:
        TransportError: there is none of that name, or what it needs is not installed.
    """
    if name not in CARRIERS:
        raise TransportError(f"Carrier {name!r} was received; expected one of {', '.join(sorted(CARRIERS))}.")
    module, kind, remedy = CARRIERS[name]
    try:
        made: Carrier = getattr(importlib.import_module(module), kind)()
    except ImportError as error:
        raise TransportError(
            f"The carrier {name!r} cannot be used here ({error}). Install what it needs: {remedy or 'see the error'}; "
            "or choose another: `gear-loader doctor` shows which there are."
        ) from error
    return made
