"""What the tests of the transport share: a server in this process, raw connections to it, what a reply must hold."""

from __future__ import annotations

import asyncio
import contextlib
import os
import socket
import struct
import subprocess
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from table_common import bits, named, rows

import gear_loader as gear
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.storage.schema import Window
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.transport import Limits, Peer, Server, WindowSpec
from gear_loader.transport.channel import Address
from gear_loader.transport.handshake import introduce
from gear_loader.transport.loop import event_loop
from gear_loader.transport.spec import PackedSpec
from gear_loader.transport.wire import HEADER, NONCE, Header, Kind, pack_text

SECRET = b"the secret of the tests"
PATIENCE = 60.0  # seconds for what takes milliseconds
WINDOWS = {
    "number": Window(3),
    "step": Window(5, offset=-2, pad="head"),
    "length": Window(3),
    "value": Window(5, offset=-2, pad="head"),
    "check": Window(4, offset=1, pad="tail"),
}
"""Of the columns of `table_common.COLUMNS`."""
HELLO = pack_text("socket") + pack_text("socket") + bytes(NONCE)
"""The small part of a correct first message."""


class Proxy:
    """Forwards connections to a server, keeps what was sent, can drop answers, and cut all connections.

    A context manager, which closes it.
    """

    def __init__(self, address: str) -> None:
        parts = Address.parse(address)
        self._server = parts.host, parts.port
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.address = f"socket://127.0.0.1:{self._listener.getsockname()[1]}"
        self.swallow = threading.Event()
        """Drop the next answer of the server, and its connection."""
        self.flows = threading.Event()
        """While it is not set nothing is forwarded, and no connection closed: a link that is down."""
        self.flows.set()
        self.heard = bytearray()
        """All bytes, in both directions."""
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._start(self._accept)

    def _start(self, work: Callable[..., None], *arguments: Any) -> None:
        self._threads.append(threading.Thread(target=work, args=arguments, daemon=True))
        self._threads[-1].start()

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                client, _ = self._listener.accept()
                self._ends.append(client)
                server = socket.create_connection(self._server)
                self._ends.append(server)
                self._start(self._forward, client, server, False)
                self._start(self._forward, server, client, True)

    def _forward(self, source: socket.socket, target: socket.socket, answers: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                self.flows.wait()
                self.heard += data
                if answers and self.swallow.is_set():
                    self.swallow.clear()
                    break
                target.sendall(data)
        for end in (source, target):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def cut(self) -> None:
        """Cut all connections."""
        for end in list(self._ends):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)

    def __enter__(self) -> Proxy:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        self.flows.set()
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._threads[0].join()
        self.cut()
        for thread in self._threads:
            thread.join()
        for each in (self._listener, *self._ends):
            each.close()


class Serving:
    """A server in this process's loop."""

    def __init__(
        self,
        *tables: str,
        limits: Limits | None = None,
        secret: bytes = SECRET,
        port: int = 0,
        **options: Any,
    ) -> None:
        self.loop = event_loop()
        self.secret = secret
        self.server = Server(tables, secret, limits=limits, **options)
        self.address: str = self.loop.run(self.server.listen("socket", port=port), PATIENCE)
        self.peers: list[Peer] = []

    def peer(self, **options: Any) -> Peer:
        """A peer that is closed with the server."""
        given = {"secret": self.secret, "timeout": PATIENCE, "name": "node b", **options}
        self.peers.append(Peer(given.pop("address", self.address), **given))
        return self.peers[-1]

    def close(self) -> None:
        for peer in self.peers:
            peer.close()
        self.loop.run(self.server.close(), PATIENCE)

    def raw(self) -> Raw:
        """A plain connection that has proven nothing."""
        return Raw(self.address)

    def proven(self) -> Raw:
        """A plain connection after the handshake."""
        raw = Raw(self.address)
        raw.introduce(self.secret)
        return raw


@contextlib.contextmanager
def serving(*tables: str, **options: Any) -> Iterator[Serving]:
    """A server of these tables that is closed at the end."""
    server = Serving(*tables, **options)
    try:
        yield server
    finally:
        server.close()


class Raw:
    """A plain socket that speaks, or does not speak, the protocol."""

    def __init__(self, address: str) -> None:
        parts = Address.parse(address)
        self.socket = socket.create_connection((parts.host, parts.port), timeout=PATIENCE)

    def introduce(self, secret: bytes) -> None:
        """The handshake, by a coroutine of its own loop on the same socket."""
        from gear_loader.transport.socket import SocketChannel

        async def work() -> None:
            channel = SocketChannel(self.socket)
            await introduce(channel, secret, Address("socket", "127.0.0.1", 1), peer="the server")
            asyncio.get_running_loop().remove_reader(self.socket)

        asyncio.run(work())
        self.socket.settimeout(PATIENCE)

    def send(self, kind: Kind, small: bytes = b"", bulk: bytes = b"", request: int = 1) -> None:
        self.socket.sendall(Header(kind, request, len(small), len(bulk)).pack() + small + bulk)

    def receive(self) -> tuple[Header, bytes, bytes]:
        header = Header.parse(memoryview(self._exactly(HEADER)))
        return header, self._exactly(header.small), self._exactly(header.bulk)

    def text(self) -> str:
        """What the server says when it refuses; then it has closed."""
        header, small, _ = self.receive()
        assert header.kind is Kind.REFUSE
        assert self.is_closed()
        return small[2:].decode()

    def error(self) -> str:
        """What the server answers to a request that it cannot serve."""
        header, small, _ = self.receive()
        assert header.kind is Kind.ERROR
        return small[4:].decode()

    def is_closed(self) -> bool:
        """Whether the other side closes, waiting for it."""
        try:
            return self.socket.recv(1) == b""
        except ConnectionResetError:
            return True

    def _exactly(self, count: int) -> bytes:
        data = b""
        while len(data) < count:
            part = self.socket.recv(count - len(data))
            assert part, "the server closed"
            data += part
        return data

    def close(self) -> None:
        self.socket.close()

    def __enter__(self) -> Raw:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def message(kind: int, small: bytes = b"", bulk: bytes = b"", **wrong: int) -> bytes:
    """A whole message, of which the header may tell wrong sizes."""
    sizes = {"small": len(small), "bulk": len(bulk), **wrong}
    return Header(kind, 1, sizes["small"], sizes["bulk"]).pack() + small + bulk  # type: ignore[arg-type]


@contextlib.contextmanager
def six() -> Iterator[gear.Table]:
    """A named table with six trajectories."""
    with named() as table:
        table.extend([rows(i, 5 + i) for i in range(6)])
        yield table


def spec_of(table: gear.Table, windows: Mapping[str, Window] | None = None) -> WindowSpec:
    return WindowSpec(str(table.name), table.schema, dict(windows or WINDOWS))


def open_message(spec: WindowSpec | PackedSpec, number: int = 0) -> bytes:
    """The small part of OPEN."""
    return number.to_bytes(4, "little") + spec.to_bytes()


def fetch_message(rows: Any, number: int = 0, n: int | None = None) -> bytes:
    """The small part of FETCH; rows: int64 [3, n], or [4, n] of spans."""
    rows = np.asarray(rows, dtype=np.int64)
    rows = rows.reshape(rows.shape[0] if rows.ndim == 2 else 3, -1)
    return struct.pack("<II", number, rows.shape[1] if n is None else n) + rows.tobytes()


def poisoned(spec: WindowSpec, n: int) -> np.ndarray[Any, Any]:
    """Memory for a reply, not filled yet."""
    return np.full(spec.reply_bytes(n), 0xA5, dtype=np.uint8)


def expected(
    table: gear.Table,
    windows: Mapping[str, Window],
    slots: Any,
    anchors: Any,
    generations: Any,
    gone: Any = (),
) -> tuple[dict[str, bytes], list[int]]:
    """The bytes of each piece as a collector gathers them, zeros for rows that are gone; and the status."""
    slots, anchors, generations = (np.asarray(each, dtype=np.int64) for each in (slots, anchors, generations))
    n = len(slots)
    windows = {name: windows[name] for name in table.schema if name in windows}
    collector = collector_for(TableSource(table), windows, batch_size=max(n, 1), device=torch.device("cpu"))
    buffers = collector.buffers()
    there = [i for i in range(n) if i not in set(gone)]
    safe, batch = slots.copy(), {}
    if there:
        safe[list(gone)] = slots[there[0]]
        collector.gather(buffers, SelectedRows(safe, anchors, generations))
        batch = buffers.rows(n)
    found = {}
    masks: dict[Window, str] = {}
    for name, window in windows.items():
        masks.setdefault(window, name)
        values = (
            batch[name] if there else torch.zeros(n, window.length * table.schema[name].step_bytes).byte()
        )
        values[list(gone)] = 0
        found[f"column {name}"] = bits(values)
    for window, name in masks.items():
        mask = torch.zeros(n, window.length).bool()
        if there:
            mask = batch["mask"] if len(masks) == 1 else batch["mask"][name]
        mask[list(gone)] = False
        found[f"mask {name}"] = bits(mask)
    return found, [int(i in set(gone)) for i in range(n)]


def pieces_of(spec: WindowSpec, out: np.ndarray[Any, Any], n: int) -> dict[str, bytes]:
    """The bytes of each piece of a reply; fails where what lies between them is not zero."""
    found, end = {}, 0
    for piece in spec.pieces(n):
        assert piece.offset % 128 == 0
        assert not out[end : piece.offset].any()
        end = piece.offset + n * piece.row_bytes
        found[f"{piece.kind} {piece.name}"] = out[piece.offset : end].tobytes()
    assert not out[end : spec.data_bytes(n)].any()
    assert not out[spec.data_bytes(n) + n : spec.reply_bytes(n)].any()
    return found


def generations_of(table: gear.Table, slots: Any) -> np.ndarray[Any, Any]:
    """Of the trajectories that are there now, int64 [n]."""
    return table._engine.reader().slot_states()[1][np.asarray(slots, dtype=np.int64)].copy()


def check_fetch(
    peer: Peer,
    table: gear.Table,
    spec: WindowSpec,
    slots: Any,
    anchors: Any,
    gone: Any = (),
    *,
    here: bool = False,
) -> None:
    """Fetch and compare every byte."""
    slots, anchors = np.asarray(slots, dtype=np.int64), np.asarray(anchors, dtype=np.int64)
    inside = np.clip(slots, 0, len(table._engine.reader().slot_states()[1]) - 1)
    generations = generations_of(table, inside)
    out = poisoned(spec, len(slots))
    status = peer.fetch(spec, slots, anchors, generations, out=out, here=here).result(PATIENCE)
    wanted, states = expected(table, spec.windows, slots, anchors, generations, gone)
    assert status.tolist() == states
    assert pieces_of(spec, out, len(slots)) == wanted


def certificate(folder: Path, name: str, host: str) -> tuple[Path, Path]:
    """A self-signed certificate for a host, and its key."""
    cert, key = folder / f"{name}.crt", folder / f"{name}.key"
    kind = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-noenc", "-days", "2"]
    names = ["-subj", "/CN=tests", "-addext", f"subjectAltName={host}"]
    command = ["openssl", "req", "-x509", *kind, *names, "-out", str(cert), "-keyout", str(key)]
    subprocess.run(command, check=True, capture_output=True, timeout=60)
    return cert, key


def open_files() -> int:
    """Descriptors of this process."""
    return len(os.listdir("/proc/self/fd"))
