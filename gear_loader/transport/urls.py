"""Addresses of tables on servers: ``gear://<host>:<port>/<table>``, or ``gears://`` with TLS."""

from __future__ import annotations

import urllib.parse
from typing import NamedTuple

from gear_loader.errors import TransportError
from gear_loader.transport.channel import Address
from gear_loader.utils.arrays import shown

_SCHEMES = {"gear": "socket", "gear+ucx": "ucx", "gears": "socket"}
_TLS = "gears"
_URL = "expected gear://<host>:<port>/<table>, such as gear://10.0.0.1:5555/replay"


class Place(NamedTuple):
    """A table on a server: the server's address, for `Peer`; the table's name; whether connections use TLS."""

    address: str
    table: str
    tls: bool


def url_of(address: str, table: str, *, tls: bool = False) -> str:
    """The address of a table on a server with the address `address`, such as ``socket://127.0.0.1:5555``."""
    parts = urllib.parse.urlsplit(address)
    scheme = _TLS if tls else next(name for name, carrier in _SCHEMES.items() if carrier == parts.scheme)
    query = f"?{parts.query}" if parts.query else ""
    return f"{scheme}://{parts.netloc}/{urllib.parse.quote(table, safe='')}{query}"


def split_url(url: str) -> Place:
    """The table of ``gear://<host>:<port>/<table>``.

    Raises:
        TransportError: invalid.
    """
    if not isinstance(url, str) or len(url) > 1024:
        raise TransportError(f"Address {shown(url)} was received; {_URL}.")
    parts = urllib.parse.urlsplit(url)
    table = urllib.parse.unquote(parts.path.removeprefix("/"))
    carrier = _SCHEMES.get(parts.scheme)
    if carrier is None or not table or "/" in table or parts.fragment:
        raise TransportError(f"Address {url!r} was received; {_URL}.")
    address = f"{carrier}://{parts.netloc}" + (f"?{parts.query}" if parts.query else "")
    try:
        Address.parse(address)
    except TransportError as error:
        raise TransportError(f"Address {url!r} was received ({error}); {_URL}.") from None
    return Place(address, table, parts.scheme == _TLS)
