"""`serve` and `Table.serve`: a server process of tables, and the addresses that clients connect to."""

from __future__ import annotations

import os
import secrets
from collections.abc import Sequence

from gear_loader.errors import PrivateTableError, TransportError
from gear_loader.storage.table import Table
from gear_loader.transport.access import Allow, check_allow
from gear_loader.transport.channel import CARRIERS
from gear_loader.transport.handshake import check_secret
from gear_loader.transport.process import ServerProcess, TlsFiles, start_server
from gear_loader.transport.urls import url_of
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import one_of


class TableServer:
    """A server process of tables, started by `serve` or `Table.serve`; it ends with `stop`, or with this process.

    Attributes:
        url: of the first table, for `gear_loader.connect`, such as ``gear://127.0.0.1:40001/replay``; ``gears://...``
            with TLS. urls: of each table by its name.
        secret: what clients must prove, at least 16 bytes.
        pid: process id of the server.
    """

    def __init__(
        self, tables: Sequence[str], process: ServerProcess, carrier: str, secret: bytes, *, tls: bool
    ) -> None:
        address = process.addresses[carrier]
        self.urls = {name: url_of(address, name, tls=tls) for name in tables}
        self.url = self.urls[tables[0]]
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
        more = f" and {len(self.urls) - 1} more" if len(self.urls) > 1 else ""
        return f"TableServer({self.url!r}{more}, pid={self.pid}, {'running' if self.alive() else 'ended'})"


def serve(
    tables: Table | Sequence[Table],
    *,
    host: str = "127.0.0.1",
    port: int = 0,
    transport: str = "socket",
    secret: bytes | None = None,
    allow: Allow = "write",
    tls: TlsFiles | None = None,
) -> TableServer:
    """Start one server process of several tables, for `gear_loader.connect` from other processes and machines.

    The clients of all tables prove the same secret and may do the same. A server that is started again at the same
    port, with the same secret, goes on: clients reconnect, and nothing is stored twice.

    Args:
        tables: named tables of this machine, each once; or one.
        host, port, transport, secret, allow, tls: as for `Table.serve`.

    Returns:
        The `gear_loader.transport.TableServer`: its `urls` and `secret` are what `gear_loader.connect` takes.

    Raises:
        PrivateTableError: a table has no name. TransportError: the server did not start, or invalid arguments.
        HandshakeError: an invalid secret.
    """
    names = _names([tables] if isinstance(tables, Table) else tables)
    known = secrets.token_hex(32).encode() if secret is None else check_secret(secret)
    one_of("transport", transport, CARRIERS, error=TransportError)
    if not isinstance(host, str) or not host:
        raise TransportError(f"host is {shown(host)}; expected a name or an address, as a string.")
    if isinstance(port, bool) or not isinstance(port, int) or not 0 <= port < 1 << 16:
        raise TransportError(
            f"port is {shown(port)}; expected an integer from 0, for any free one, to 65535."
        )
    pair = isinstance(tls, (tuple, list)) and len(tls) == 2
    if tls is not None and not (pair and all(isinstance(path, (str, os.PathLike)) for path in tls)):
        raise TransportError(
            f"tls is {shown(tls)}; expected the files of the certificate and its key, (cert, key)."
        )
    process = start_server(names, [transport], host, port, secret=known, allow=check_allow(allow), tls=tls)
    return TableServer(names, process, transport, known, tls=tls is not None)


def _names(tables: Sequence[Table]) -> list[str]:
    """Names of tables to serve, checked."""
    if not isinstance(tables, (tuple, list)) or not tables:
        raise TransportError(f"Tables {tables!r} were received; expected a table, or a list of them.")
    names: list[str] = []
    for table in tables:
        if not isinstance(table, Table):
            raise TransportError(f"{table!r} is among the tables to serve; expected a gear_loader.Table.")
        table._engine.check_open()
        if table.name is None:
            raise PrivateTableError(
                "serve() was called on a private table, which no other process can attach to. Create it with a name, "
                "Table.create(..., name='replay')."
            )
        if table.name in names:
            raise TransportError(f"Table {table.name!r} was given twice; expected each table once.")
        names.append(table.name)
    return names
