"""`Table.serve`: a server process of one table, and the address that clients connect to."""

from __future__ import annotations

import secrets

from gear_loader.errors import PrivateTableError, TransportError
from gear_loader.storage.table import Table
from gear_loader.transport.access import Allow, check_allow
from gear_loader.transport.process import ServerProcess, TlsFiles, start_server
from gear_loader.transport.urls import url_of

__all__ = ["TableServer", "serve"]


class TableServer:
    """A server process of one table, started by `Table.serve`; it ends with `stop`, or with this process.

    Attributes:
        url: for `gear_loader.connect`, such as ``gear://127.0.0.1:40001/replay``; ``gears://...`` with TLS.
        secret: what clients must prove, at least 16 bytes.
        pid: process id of the server.
    """

    def __init__(self, table: str, process: ServerProcess, carrier: str, secret: bytes, *, tls: bool) -> None:
        self.url = url_of(process.addresses[carrier], table, tls=tls)
        self.secret = secret
        self.pid = process.pid
        self._process = process

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.alive()

    def stop(self) -> None:
        """Stop the process and wait for its end; idempotent. What was stored stays in the table."""
        self._process.stop()

    def __enter__(self) -> TableServer:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()

    def __repr__(self) -> str:
        return f"TableServer({self.url!r}, pid={self.pid}, {'running' if self.alive() else 'ended'})"


def serve(
    table: Table,
    *,
    host: str,
    port: int,
    carrier: str,
    secret: bytes | None,
    allow: Allow,
    tls: TlsFiles | None,
) -> TableServer:
    """Start a server of a table. See `Table.serve`."""
    if table.name is None:
        raise PrivateTableError(
            "serve() was called on a private table, which no other process can attach to. Create it with a name, "
            "Table.create(..., name='replay')."
        )
    known = secrets.token_hex(32).encode() if secret is None else secret
    if tls is not None and (not isinstance(tls, (tuple, list)) or len(tls) != 2):
        raise TransportError(
            f"tls is {tls!r}; expected the files of the certificate and its key, (cert, key)."
        )
    process = start_server(
        [table.name], [carrier], host, port, secret=known, allow=check_allow(allow), tls=tls
    )
    return TableServer(table.name, process, carrier, known, tls=tls is not None)
