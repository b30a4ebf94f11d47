"""TLS for the carrier "socket", by the standard library's ssl: contexts of both sides, and an encrypted channel.

The server shows a certificate; clients prove themselves by the shared secret, as without TLS.
"""

from __future__ import annotations

import errno
import os
import socket
import ssl
from collections.abc import Callable

from gear_loader.errors import HandshakeError, TransportError
from gear_loader.transport.channel import Bytes, as_bytes
from gear_loader.transport.socket import SocketCarrier, SocketChannel
from gear_loader.transport.wire import MAGIC, Header, Kind, pack_text
from gear_loader.utils.paths import local_path

_RECORD = 1 << 14  # bytes of a TLS record
_MOST = 1 << 20  # bytes of one call
_PLAIN = "This server uses TLS: connect with gears:// in place of gear://."


def server_context(cert_file: str | os.PathLike[str], key_file: str | os.PathLike[str]) -> ssl.SSLContext:
    """The context of a server.

    Args:
        cert_file: its certificate as PEM, followed by those of intermediate authorities. key_file: its private key.

    Raises:
        TransportError: a file cannot be read, or the key is not that of the certificate.
    """
    cert_file = local_path(cert_file, TransportError, "The certificate")
    key_file = local_path(key_file, TransportError, "The key")
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    try:
        context.load_cert_chain(cert_file, key_file, password=_no_password)
    except (OSError, ValueError) as error:
        raise TransportError(
            f"The certificate {cert_file} and the key {key_file} cannot be used ({error}); "
            "expected PEM files of a certificate and its private key, which has no password."
        ) from None
    return context


def _no_password() -> str:
    raise ValueError("the key has a password")


def client_context(ca_file: str | os.PathLike[str] | None) -> ssl.SSLContext:
    """The context of a client.

    Args:
        ca_file: PEM file of the authorities that the server's certificate is accepted from, or of that certificate
            itself if it is self-signed; None for the system's authorities.

    Raises:
        TransportError: the file cannot be read, or holds no certificate.
    """
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    if ca_file is None:
        context.load_default_certs()
        return context
    ca_file = local_path(ca_file, TransportError, "The ca_file")
    try:
        context.load_verify_locations(cafile=ca_file)
    except OSError as error:
        raise TransportError(
            f"The file {ca_file} cannot be used as ca_file ({error}); expected certificates as PEM."
        ) from None
    return context


class TlsChannel(SocketChannel):
    """A connected socket whose data are encrypted. The TLS handshake comes with the first send or receive.

    Args:
        connection: the socket. context: of this side.
        host: of a client: the name or address of the server, which its certificate must have; None for a server.
    """

    _calls_back = False  # the library may hold bytes of which the event loop knows nothing

    def __init__(self, connection: socket.socket, context: ssl.SSLContext, host: str | None) -> None:
        super().__init__(connection)
        self._context = context
        self._host = host
        self._ready = self._refused = False

    async def begin(self) -> None:
        """The TLS handshake.

        Raises:
            HandshakeError: the other side does not speak TLS, or its certificate is not accepted. ConnectionError: the
                connection is closed.
        """
        if self._ready:
            return
        if self._refused:
            raise _lost("The TLS handshake has failed.")
        try:
            await self._shake_hands()
        except HandshakeError:
            self._refused = True
            raise

    async def _shake_hands(self) -> None:
        if self._host is None:
            await self._refuse_plain()
        tls = self._socket = self._context.wrap_socket(
            self._live(),
            server_side=self._host is None,
            server_hostname=self._host,
            do_handshake_on_connect=False,
        )
        while not self._ready:
            try:
                tls.do_handshake()
                self._ready = True
            except ssl.SSLWantReadError:
                await self._wait_to_read()
            except ssl.SSLWantWriteError:
                await self._wait_to_write()
            except (ssl.SSLEOFError, ssl.SSLZeroReturnError):
                raise _lost("The connection was closed during the TLS handshake.") from None
            except ssl.SSLError as error:
                raise self._refusal(error) from None

    def _refusal(self, error: ssl.SSLError) -> HandshakeError:
        if isinstance(error, ssl.SSLCertVerificationError):
            return HandshakeError(
                f"The certificate of {self._host} was not accepted: {error.verify_message.rstrip('.')}. Give ca_file "
                "the certificate of the authority that signed it, or itself if it is self-signed; and the certificate "
                "the server's name or address as subjectAltName."
            )
        why = error.reason or str(error)
        if self._host is None:
            return HandshakeError(f"The TLS handshake failed: {why}.")
        return HandshakeError(
            f"The TLS handshake with {self._host} failed: {why}. If the server has no certificate, connect with "
            "gear:// in place of gears://."
        )

    async def _refuse_plain(self) -> None:
        """Tell a requester that does not encrypt why it is refused."""
        while True:
            try:
                first = self._live().recv(len(MAGIC), socket.MSG_PEEK)
                break
            except (BlockingIOError, InterruptedError):
                await self._wait_to_read()
        if first and MAGIC.startswith(first):
            text = pack_text(_PLAIN)
            self._live().send(Header(Kind.REFUSE, 0, len(text), 0).pack() + text)  # into an empty buffer
            raise HandshakeError("The requester does not use TLS.")

    def sender(self, *parts: Bytes) -> Callable[[], list[memoryview]]:
        return lambda: [as_bytes(part) for part in parts]  # TLS is not sent and received by two threads

    async def send(self, *parts: Bytes) -> None:
        await self.begin()
        await super().send(*parts)

    async def recv_into(self, buffer: Bytes) -> None:
        await self.begin()
        await super().recv_into(buffer)

    def _send_some(self, views: list[memoryview]) -> int:
        count = size = 0
        while count < len(views) and size < _RECORD:
            size += len(views[count])
            count += 1
        part = b"".join(views[:count]) if size <= 2 * _RECORD else views[0][:_MOST]
        try:
            return self._live().send(part)
        except ssl.SSLWantWriteError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise _lost(f"TLS: {error.reason}") from None

    def _receive_some(self, view: memoryview) -> int:
        try:
            return self._live().recv_into(view)
        except ssl.SSLWantReadError:
            raise BlockingIOError from None
        except ssl.SSLError as error:
            raise _lost(f"TLS: {error.reason}") from None


class TlsCarrier(SocketCarrier):
    """TCP sockets with TLS, in place of the carrier "socket"."""

    def __init__(self, context: ssl.SSLContext) -> None:
        self._context = context

    async def _channel(self, connection: socket.socket, host: str | None) -> SocketChannel:
        channel = TlsChannel(connection, self._context, host)
        if host is not None:
            try:
                await channel.begin()
            except BaseException:
                await channel.close()
                raise
        return channel


def _lost(why: str) -> ConnectionError:
    return ConnectionResetError(errno.ECONNRESET, why)
