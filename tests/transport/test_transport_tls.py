"""TLS of the carrier "socket": what is sent is encrypted, and only to a server with the right certificate."""

from __future__ import annotations

import contextlib
import shutil
import socket
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
from table_common import fresh_name, named, rows
from transport_common import SECRET, Proxy, Raw, certificate, serving

import gear_loader as gear
from gear_loader.errors import HandshakeError, TransportError
from gear_loader.transport import start_server
from gear_loader.transport.tls import server_context

COLUMNS = {"text": gear.Column(torch.uint8, (1000,))}
MARK = b"not to be read by others"
pytestmark = pytest.mark.skipif(shutil.which("openssl") is None, reason="the command openssl is needed")


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return certificate(tmp_path_factory.mktemp("tls"), "right", "IP:127.0.0.1,DNS:localhost")


@contextlib.contextmanager
def texts() -> Iterator[gear.Table]:
    """A table of `COLUMNS`."""
    sizes = {"max_steps": 4000, "max_trajectories": 40}
    with gear.Table.create(COLUMNS, name=fresh_name(), **sizes) as table:
        yield table
        table.unlink()


def marked(steps: int) -> dict[str, np.ndarray]:
    """A trajectory in which each step holds `MARK`."""
    row = np.frombuffer(MARK.ljust(1000, b"."), dtype=np.uint8)
    return {"text": np.tile(row, (steps, 1))}


def test_what_is_added_is_encrypted(files: tuple[Path, Path]) -> None:
    """Small and large trajectories, streamed ones, and commits that are waited for."""
    with texts() as table, serving(str(table.name), tls=server_context(*files)) as server:
        with Proxy(server.address) as wire:
            url = f"{wire.address.replace('socket', 'gears')}/{table.name}"
            with gear.connect(url, secret=SECRET, ca_file=files[0], timeout=30.0) as remote:
                for steps in (1, 3, 1500):
                    remote.add(marked(steps))
                for waits in (False, True):
                    writer = remote.writer(wait=waits)
                    for steps in (2, 700):
                        for row in marked(steps)["text"]:
                            writer.append(text=row)
                        writer.commit()
        assert [len(table[int(i)]["text"]) for i in table.indices()] == [1, 3, 1500, 2, 700, 2, 700]
        for index in table.indices():
            values = table[int(index)]["text"].numpy()
            assert np.array_equal(values, marked(len(values))["text"])
        assert len(wire.heard) > 2_900_000
        assert MARK not in wire.heard
        assert str(table.name).encode() not in wire.heard


def test_without_a_certificate_it_is_not(files: tuple[Path, Path]) -> None:
    """The test above would notice."""
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(texts())
        server = stack.enter_context(serving(str(table.name)))
        wire = stack.enter_context(Proxy(server.address))
        remote = stack.enter_context(
            gear.connect(f"{wire.address.replace('socket', 'gear')}/{table.name}", secret=SECRET)
        )
        remote.add(marked(1))
        assert MARK in wire.heard


def test_a_wrong_certificate_is_refused(files: tuple[Path, Path], tmp_path: Path) -> None:
    other = certificate(tmp_path, "other", "DNS:elsewhere.example")
    with named() as table, serving(str(table.name), tls=server_context(*files)) as server:
        url = server.address.replace("socket", "gears") + f"/{table.name}"
        for ca_file in (None, other[0]):
            with pytest.raises(
                HandshakeError, match=r"certificate of 127.0.0.1 was not accepted: self.signed"
            ):
                gear.connect(url, secret=SECRET, ca_file=ca_file, timeout=20.0)
        with pytest.raises(HandshakeError, match="secret"):
            gear.connect(url, secret=b"another secret of 16", ca_file=files[0], timeout=20.0)
        with gear.connect(url.replace("127.0.0.1", "localhost"), secret=SECRET, ca_file=files[0]) as remote:
            remote.add(rows(1, 3))
        assert len(table) == 1
    with named() as table, serving(str(table.name), tls=server_context(*other)) as server:
        url = server.address.replace("socket", "gears") + f"/{table.name}"
        with pytest.raises(HandshakeError, match="not accepted: IP address mismatch"):
            gear.connect(url, secret=SECRET, ca_file=other[0], timeout=20.0)


def test_one_side_alone_does_not_encrypt(files: tuple[Path, Path]) -> None:
    """Both combinations are told at once."""
    with named() as table, serving(str(table.name), tls=server_context(*files)) as server:
        url = server.address.replace("socket", "gear") + f"/{table.name}"
        with pytest.raises(HandshakeError, match="This server uses TLS: connect with gears://"):
            gear.connect(url, secret=SECRET, timeout=20.0)
    with named() as table, serving(str(table.name)) as server:
        url = server.address.replace("socket", "gears") + f"/{table.name}"
        with pytest.raises(
            HandshakeError, match=r"TLS handshake with 127.0.0.1 failed.*connect with gear://"
        ):
            gear.connect(url, secret=SECRET, ca_file=files[0], timeout=20.0)


def test_noise_at_the_port_harms_nobody(files: tuple[Path, Path]) -> None:
    with named() as table, serving(str(table.name), tls=server_context(*files)) as server:
        url = server.address.replace("socket", "gears") + f"/{table.name}"
        for noise in (
            b"",
            b"G",
            b"GEARWIRE",
            b"GET / HTTP/1.1\r\n\r\n",
            b"\x16\x03\x01\x02\x00" + bytes(600),
        ):
            with Raw(server.address) as raw:
                raw.socket.sendall(noise)
                raw.socket.shutdown(socket.SHUT_WR)
                with contextlib.suppress(ConnectionResetError):
                    while raw.socket.recv(1 << 12):
                        pass
        with gear.connect(url, secret=SECRET, ca_file=files[0]) as remote:
            remote.add(rows(1, 3))
        assert len(table) == 1


def test_options_that_cannot_be(files: tuple[Path, Path], tmp_path: Path) -> None:
    cert, key = files
    other = certificate(tmp_path, "other", "DNS:elsewhere.example")
    (tmp_path / "empty").touch()
    with named() as table:
        name = str(table.name)
        for wrong, message in (
            ((cert, other[1]), "cannot be used"),
            ((tmp_path / "missing", key), "cannot be used"),
            ((key, key), "cannot be used"),
            (cert, "expected the files"),
        ):
            with pytest.raises(TransportError, match=message):
                table.serve(tls=wrong)  # type: ignore[arg-type]
        with pytest.raises(TransportError, match=r"TLS was asked for with the transports \['ucx'\]"):
            table.serve(tls=files, transport="ucx")
        with pytest.raises(TransportError, match="and one-sided reads"):
            start_server([name], secret=SECRET, one_sided=True, tls=files)
    with pytest.raises(TransportError, match="cannot be used as ca_file"):
        gear.connect("gears://127.0.0.1:1/x", secret=SECRET, ca_file=tmp_path / "empty")
    for url in ("gear://127.0.0.1:1/x", "ray://x"):
        with pytest.raises(HandshakeError, match="ca_file was given with"):
            gear.connect(url, secret=None if url[0] == "r" else SECRET, ca_file=cert)
