"""The server as a separate process: the main function of `gear-loader serve`, and starting and stopping it."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import logging
import os
import resource
import select
import signal
import ssl
import struct
import subprocess
import sys
import time
import weakref
from collections.abc import Sequence

from gear_loader.errors import GearError, HandshakeError, TransportError
from gear_loader.storage.prometheus import prometheus_text
from gear_loader.storage.stats import TableStats
from gear_loader.transport.access import Allow, check_allow
from gear_loader.transport.channel import CARRIERS, TRANSPORTS, is_loopback, load
from gear_loader.transport.child_process import child_command
from gear_loader.transport.handshake import check_secret
from gear_loader.transport.loop import within
from gear_loader.transport.metrics_page import MetricsPage
from gear_loader.transport.server import Server
from gear_loader.transport.tls import server_context
from gear_loader.transport.urls import url_of

START_TIMEOUT = 120.0  # seconds; the first start on a machine compiles native code
_STOP = 5.0  # seconds between SIGTERM and SIGKILL
_LOOK = 1.0  # seconds between checks for the parent
_CLOSE = 0.5  # seconds to close connections
_ATTACH = 1.0  # seconds that the start waits for tables; a locked table is attached later
_MOST_SECRET = 1 << 16
_SIZE = struct.Struct("<I")

TlsFiles = tuple[str | os.PathLike[str], str | os.PathLike[str]]
"""Paths of a certificate and of its private key."""


# ---------------------------------------------------------------- in the server's process


def read_parent(fd: int) -> bytes:
    """Read the secret from the parent's pipe: its size (u32) and its bytes.

    Raises:
        HandshakeError: the pipe was closed, or has other contents.
    """
    data = b""
    size = -1
    while size < 0 or len(data) < size:
        wanted = _SIZE.size - len(data) if size < 0 else size - len(data)
        part = os.read(fd, wanted)
        if not part:
            raise HandshakeError("The parent closed the pipe before it sent the secret.")
        data += part
        if size < 0 and len(data) == _SIZE.size:
            (size,), data = _SIZE.unpack(data), b""
            if not 0 < size <= _MOST_SECRET:
                raise HandshakeError(
                    f"The parent announced a secret of {size:,} bytes; expected 1 to {_MOST_SECRET}."
                )
    return data


def run_server(
    tables: Sequence[str],
    listens: Sequence[tuple[str, str, int]],
    secret: bytes,
    *,
    parent: int | None = None,
    one_sided: bool = False,
    allow: Allow = "all",
    tls: TlsFiles | None = None,
    metrics: tuple[str, int] | None = None,
) -> None:
    """Serve until SIGTERM, SIGINT or the end of the parent; then end the process. Does not return.

    When it is ready, it prints one line: a JSON object with ``addresses`` (by carrier) and ``pid``, and with `metrics`
    their URL as ``metrics``.

    Args:
        tables: names of the tables. listens: carrier, host and port of each listener.
        parent: descriptor of a pipe that the parent closes at its end, or None.
        one_sided: allow one-sided NIXL reads of the tables' memory. allow: as for `Server`.
        tls: files of the certificate and of its key, to encrypt all connections; None not to.
        metrics: host and port of a page for Prometheus, which everybody may read; None for no page.

    Raises:
        TransportError: a carrier cannot be used here, or invalid options. OSError: it cannot listen at an address.
    """
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="gear-loader serve: %(message)s")
    if all(is_loopback(host) for _, host, _ in listens) and any(name == "ucx" for name, _, _ in listens):
        os.environ.setdefault("UCX_NET_DEVICES", "lo")
    if one_sided and check_allow(allow) == "write":
        raise TransportError(
            "allow is 'write', but one-sided reads were asked for too; expected one of them."
        )
    context = _context(tls, [name for name, _, _ in listens], one_sided=one_sided)
    _raise_open_files()
    server = Server(tables, secret, allow=allow, tls=context)
    asyncio.run(_serve(server, tables, listens, parent, one_sided, metrics, tls is not None))


def _context(tls: TlsFiles | None, carriers: Sequence[str], *, one_sided: bool) -> ssl.SSLContext | None:
    """The context of a server with these files.

    Raises:
        TransportError: the files cannot be used, or something else would not be encrypted.
    """
    if tls is None:
        return None
    if one_sided or any(name != "socket" for name in carriers):
        more = " and one-sided reads" if one_sided else ""
        raise TransportError(
            f"TLS was asked for with the transports {list(carriers)}{more}; expected 'socket' alone, since "
            "nothing else is encrypted."
        )
    return server_context(*tls)


def _raise_open_files() -> None:
    """Let this process open as many files as the system allows it: a connection takes one."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


async def _serve(
    server: Server,
    tables: Sequence[str],
    listens: Sequence[tuple[str, str, int]],
    parent: int | None,
    one_sided: bool,
    metrics: tuple[str, int] | None,
    tls: bool,
) -> None:
    loop = asyncio.get_running_loop()
    over = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, over.set)
    if parent is not None:
        os.set_blocking(parent, False)
        loop.add_reader(parent, _parent_is_gone, parent, over)
    if one_sided:
        loopback = all(is_loopback(host) for _, host, _ in listens)
        owners = {name: load(entry.owner) for name, entry in TRANSPORTS.items() if entry.owner}
        server.resources.metadata |= {
            name: kind(tables, loopback=loopback).metadata for name, kind in owners.items()
        }
    addresses = {name: await server.listen(name, host, port) for name, host, port in listens}
    attaching = [asyncio.ensure_future(_attach(server, name)) for name in dict.fromkeys(tables)]
    await asyncio.wait(attaching, timeout=_ATTACH)
    ready = {"addresses": addresses, "pid": os.getpid()}
    if metrics is not None:
        ready["metrics"] = MetricsPage(lambda: prometheus_text(_stats(server, tables)), *metrics).url
    gc.freeze()  # else a full collection looks at all that torch and numba have loaded: all clients wait for 300 ms
    print(json.dumps(ready), flush=True)
    urls = [url_of(address, name, tls=tls) for address in addresses.values() for name in tables]
    server.log.info("serving %s at %s", ", ".join(tables), ", ".join(urls))
    ancestor = os.getppid()
    while parent is None or os.getppid() == ancestor:  # a forked child of the parent may keep the pipe open
        with contextlib.suppress(asyncio.TimeoutError):
            await within(_LOOK, over.wait())
            break
    await asyncio.wait([asyncio.ensure_future(server.close())], timeout=_CLOSE)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # waiting threads would block a normal exit; other processes repair their unfinished changes


def _stats(server: Server, tables: Sequence[str]) -> dict[str, TableStats | None]:
    """The statistics of each table; None of one that is gone, or whose lock is held for long."""
    found: dict[str, TableStats | None] = {}
    for name in dict.fromkeys(tables):
        try:
            found[name] = server.resources.tables.open(name).table.stats()
        except (GearError, OSError) as error:
            server.log.info("table %r has no metrics: %s", name, error)
            found[name] = None
    return found


async def _attach(server: Server, name: str) -> None:
    """Attach a table before the first request for it."""
    try:
        resources = server.resources
        await resources.threads(name, changes=False).run(lambda: resources.tables.open(name))
    except OSError as error:
        server.log.info("table %r will be attached by the first request: %s", name, error)


def _parent_is_gone(fd: int, over: asyncio.Event) -> None:
    try:
        if os.read(fd, 4096):
            return
    except BlockingIOError:
        return
    except OSError:
        pass
    asyncio.get_running_loop().remove_reader(fd)
    over.set()


# ---------------------------------------------------------------- in the program that starts it


class ServerProcess:
    """A server started by `start_server`. It ends with `stop`, with its parent, or when this object is deleted.

    Attributes:
        addresses: carrier -> address, for `Peer`.
        pid: process id.
    """

    def __init__(self, process: subprocess.Popen[bytes], pipe: int, addresses: dict[str, str]) -> None:
        self.addresses = addresses
        self.pid = process.pid
        self._process = process
        self._stop = weakref.finalize(self, _stop, process, pipe, os.getpid())

    def alive(self) -> bool:
        """Whether the process is running."""
        return self._process.poll() is None

    def stop(self) -> None:
        """Stop the process and wait for its end; idempotent."""
        self._stop()

    def __enter__(self) -> ServerProcess:
        return self

    def __exit__(self, *_: object) -> None:
        self.stop()


def _stop(process: subprocess.Popen[bytes], pipe: int, owner: int) -> None:
    os.close(pipe)
    if os.getpid() != owner:  # a forked child must not stop the server of its parent
        process.returncode = 0
        return
    if process.poll() is None:
        process.terminate()
        with contextlib.suppress(ProcessLookupError):
            process.send_signal(signal.SIGCONT)  # a stopped process handles SIGTERM only after SIGCONT
    try:
        process.wait(_STOP)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()
    if process.stdout is not None:
        process.stdout.close()


def start_server(
    tables: Sequence[str],
    carriers: Sequence[str] = ("socket",),
    host: str = "127.0.0.1",
    port: int = 0,
    *,
    secret: bytes,
    one_sided: bool = False,
    allow: Allow = "all",
    tls: TlsFiles | None = None,
    timeout: float = START_TIMEOUT,
) -> ServerProcess:
    """Start a server of tables of this machine, in a process that ends with this one.

    Args:
        tables: names of the tables.
        carriers: any of "socket" and "ucx".
        host: address to listen at. By default only this machine can connect.
        port: port number (with one carrier only), or 0 for a free port.
        secret: shared secret of the requesters; passed through a pipe.
        one_sided: allow one-sided NIXL reads of the tables' memory. allow: as for `Server`.
        tls: as for `run_server`.
        timeout: seconds until the server must be ready.

    Raises:
        TransportError: invalid arguments, or the server did not start.
    """
    check_secret(secret)
    check_allow(allow)
    unknown = [name for name in carriers if name not in CARRIERS]
    if unknown or not carriers or len(set(carriers)) != len(carriers):
        raise TransportError(
            f"Transports {list(carriers)} were received; expected some of {sorted(CARRIERS)}, each once."
        )
    if port and len(carriers) > 1:
        raise TransportError(
            f"Port {port} was received for {len(carriers)} transports; expected one transport, or port 0."
        )
    if isinstance(tables, str) or not tables:
        raise TransportError(f"Tables {tables!r} were received; expected at least one name.")
    _context(tls, carriers, one_sided=one_sided)
    ours, theirs = os.pipe()[::-1]
    shown = f"[{host}]" if ":" in host else host
    command = child_command("serve", "--parent", str(theirs))
    for name in carriers:
        command += ["--transport", name]
    command += ["--listen", f"{shown}:{port}", "--allow", allow, *(["--one-sided"] if one_sided else [])]
    if tls is not None:
        command += ["--tls-cert", os.fspath(tls[0]), "--tls-key", os.fspath(tls[1])]
    command += ["--", *tables]
    process = None
    try:
        process = subprocess.Popen(
            command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, pass_fds=(theirs,)
        )
        os.close(theirs)
        theirs = -1
        _write(ours, _SIZE.pack(len(secret)) + secret)
        addresses = _addresses(process, tables, timeout)
    except BaseException:
        if theirs >= 0:
            os.close(theirs)
        if process is None:
            os.close(ours)
        else:
            _stop(process, ours, os.getpid())
        raise
    return ServerProcess(process, ours, addresses)


def _write(fd: int, data: bytes) -> None:
    # If the server has ended already, reading its line reports that; its standard error has the reason.
    with contextlib.suppress(BrokenPipeError):
        while data:
            data = data[os.write(fd, data) :]


def _addresses(process: subprocess.Popen[bytes], tables: Sequence[str], timeout: float) -> dict[str, str]:
    """Wait for the line that the server prints when it is ready; returns the addresses."""
    assert process.stdout is not None
    deadline = time.monotonic() + timeout
    fd, line = process.stdout.fileno(), b""
    while not line.endswith(b"\n"):
        ready, _, _ = select.select([fd], [], [], max(0.0, deadline - time.monotonic()))
        if not ready:
            raise TransportError(
                f"The server of {', '.join(tables)} (pid {process.pid}) was not ready within {timeout:g} s."
            )
        part = os.read(fd, 1 << 16)
        if not part:
            code = process.wait()
            raise TransportError(
                f"The server of {', '.join(tables)} ended with exit code {code} before it was ready; what it wrote to "
                "standard error says why."
            )
        line += part
    try:
        addresses: dict[str, str] = json.loads(line)["addresses"]
    except (ValueError, KeyError, TypeError):
        raise TransportError(
            f"The server of {', '.join(tables)} printed {line[:200]!r}; expected its addresses."
        ) from None
    return addresses
