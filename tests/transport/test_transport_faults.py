"""What goes wrong between processes: servers killed, stopped, slow; requesters killed; parents gone."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cli_common import run
from table_common import named, numbers_of, rows
from transport_common import PATIENCE, SECRET, check_fetch, generations_of, poisoned, serving, six, spec_of
from typer.testing import CliRunner
from waiting_common import go_on, stop_process, wait_until

import gear_loader as gear
from gear_loader.cli import app
from gear_loader.errors import HandshakeError, PeerTimeoutError, TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.schema import Window
from gear_loader.transport import Peer, ServerProcess, start_server
from gear_loader.transport import process as process_module
from gear_loader.transport.channel import is_loopback
from gear_loader.transport.connection import Connection
from gear_loader.transport.handshake import read_secret
from gear_loader.transport.loop import event_loop, within
from gear_loader.transport.loop_link import LoopLink
from gear_loader.transport.request import Request
from gear_loader.transport.store_message import Rows
from gear_loader.transport.wire import Kind, pack_text

pytestmark = pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
FORK = multiprocessing.get_context("fork")
ROOT = Path(__file__).resolve().parents[2]
BIG = {"value": Window(4096)}  # of short trajectories: mostly padding
MANY = 2000  # rows of it: a reply of 100 MB


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with six() as made:
        yield made


@pytest.fixture(scope="module")
def processes() -> Iterator[list[ServerProcess]]:
    made: list[ServerProcess] = []
    yield made
    for server in made:
        server.stop()


@pytest.fixture
def process(table: gear.Table, processes: list[ServerProcess]) -> ServerProcess:
    """The server of all tests, started again after a test that ended it."""
    if not processes or not processes[-1].alive():
        processes.append(start_server([str(table.name)], secret=SECRET))
    return processes[-1]


def peer_of(address: Any, timeout: float = PATIENCE) -> Peer:
    return Peer(address, secret=SECRET, timeout=timeout, name="node b")


def ask_much(peer: Peer, table: gear.Table) -> tuple[Any, np.ndarray[Any, Any]]:
    """Ask for a reply that takes a while."""
    spec = spec_of(table, BIG)
    zeros, out = np.zeros(MANY, dtype=np.int64), poisoned(spec, MANY)
    return peer.fetch(spec, zeros, zeros, generations_of(table, zeros), out=out), out


def test_a_server_killed_in_the_middle_of_a_reply_and_restarted_elsewhere(
    table: gear.Table, process: ServerProcess, processes: list[ServerProcess]
) -> None:
    address = [process.addresses["socket"]]
    peer, spec = peer_of(lambda: address[0]), spec_of(table)
    check_fetch(peer, table, spec, [3, 1], [1, 2])
    future, out = ask_much(peer, table)
    wait_until(lambda: bool((out[: 1 << 20] != 0xA5).any()))  # it has begun to come
    os.kill(process.pid, signal.SIGKILL)
    with pytest.raises(TransportError) as found:
        future.result(PATIENCE)
    for part in ("node b", address[0], "2,000 rows", str(table.name), "lost", "the next request reconnects"):
        assert part in str(found.value)
    wait_until(lambda: not process.alive())

    def restart() -> None:
        processes.append(start_server([str(table.name)], secret=SECRET))
        address[0] = processes[-1].addresses["socket"]

    thread = threading.Thread(target=restart)
    thread.start()
    try:  # the next request waits until the server is there again
        check_fetch(peer, table, spec, [3, 1], [1, 2])
    finally:
        thread.join(PATIENCE)
        peer.close()


@pytest.mark.long
def test_a_stopped_server_is_given_up_at_the_deadline(table: gear.Table, process: ServerProcess) -> None:
    peer, spec = peer_of(process.addresses["socket"], timeout=1.0), spec_of(table)
    check_fetch(peer, table, spec, [3, 1], [1, 2])
    row = np.array([3]), np.array([1]), generations_of(table, [3])
    stop_process(process.pid)
    try:
        first = peer.fetch(spec, *row, out=poisoned(spec, 1))
        second = peer.metadata("a", "b")
        said = r"node b .* 1 rows .* did not answer within 1 s\. Its server may"
        with pytest.raises(PeerTimeoutError, match=said):
            first.result(PATIENCE)
        with pytest.raises(TransportError, match=r"connection was closed|did not answer"):
            second.result(PATIENCE)
        said = r"waited for 1 s: it (could not be reached|did not answer)"
        with pytest.raises(PeerTimeoutError, match=said):
            peer.fetch(spec, *row, out=poisoned(spec, 1)).result(PATIENCE)
    finally:
        go_on(process.pid)
    patient = peer_of(process.addresses["socket"])
    for each in (patient, peer):
        check_fetch(each, table, spec, [3, 1], [1, 2])
        each.close()


@pytest.mark.parametrize("turns", range(6))
def test_a_cancellation_is_not_lost_when_the_result_comes_at_the_same_time(turns: int) -> None:
    """`asyncio.wait_for` of Python 3.11 loses it after some of these turns of the loop."""

    async def work() -> bool:
        result: asyncio.Future[int] = asyncio.get_running_loop().create_future()
        waiting = asyncio.ensure_future(within(PATIENCE, result))
        await asyncio.sleep(0)
        result.set_result(5)
        for _ in range(turns):
            await asyncio.sleep(0)
        asked = waiting.cancel()
        await asyncio.wait((waiting,))
        return waiting.cancelled() == asked

    assert asyncio.run(work())


def test_a_connection_is_closed_at_each_turn_of_the_loop_while_it_is_made(table: gear.Table) -> None:
    async def connect(address: str, turns: int) -> bool:
        """Ask for something, and close after so many turns of the loop; whether there was a connection then."""
        link = LoopLink("node b", address, SECRET, PATIENCE, asyncio.get_running_loop())
        request: Request[bytes] = Request(
            kind=Kind.METADATA,
            small=pack_text("table") + pack_text(str(table.name)),
            answer=Kind.DESCRIBED,
            finish=bytes,
            what=lambda: "a report",
            seconds=PATIENCE,
        )
        link.submit(request)
        for _ in range(turns):
            await asyncio.sleep(0)
        connected = link._conversation is not None
        await link.close()
        assert link._task is None or link._task.done(), f"closed after {turns} turns, it goes on"
        assert request.has_ended
        return connected

    with serving(str(table.name)) as server:
        turns = 0
        while not event_loop().run(connect(server.address, turns), PATIENCE):
            turns += 1
        assert turns > 5
        wait_until(lambda: not server.server._tasks, "the server's connections to end")


def test_a_slow_server(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its answers come after the deadline, and must not be taken for those of later requests."""
    real, slow = Connection._gather, threading.Event()

    async def gather(self: Any, opened: Any, row: Any) -> Any:
        import asyncio

        while slow.is_set():
            await asyncio.sleep(0.01)
        return await real(self, opened, row)

    monkeypatch.setattr(Connection, "_gather", gather)
    monkeypatch.setattr(Connection, "_gather_now", lambda *_: None)
    with serving(str(table.name)) as server:
        peer, spec = server.peer(timeout=2.0), spec_of(table)
        check_fetch(peer, table, spec, [3, 1], [1, 2])
        slow.set()
        row = np.array([3]), np.array([1]), generations_of(table, [3])
        out = poisoned(spec, 1)
        with pytest.raises(PeerTimeoutError, match=r"did not answer within 2 s"):
            peer.fetch(spec, *row, out=out).result(PATIENCE)
        slow.clear()
        check_fetch(peer, table, spec, [4, 2], [1, 2])
        assert (out == 0xA5).all()


def test_several_carriers_must_not_share_a_port(table: gear.Table) -> None:
    for arguments, message in (
        ({"carriers": ("socket", "ucx"), "port": 5555}, "Port 5555 was received for 2 transports"),
        (
            {"carriers": ("pigeon",)},
            r"Transports \['pigeon'\] were received; expected some of \['socket', 'ucx'\]",
        ),
        ({"carriers": ()}, r"Transports \[\] were received"),
        ({"carriers": ("socket", "socket")}, "each once"),
    ):
        with pytest.raises(TransportError, match=message):
            start_server([str(table.name)], secret=SECRET, **arguments)  # type: ignore[arg-type]
    with pytest.raises(TransportError, match="expected at least one name"):
        start_server("abc", secret=SECRET)
    with pytest.raises(HandshakeError, match="expected at least 16 bytes"):
        start_server([str(table.name)], secret=b"")


def test_a_server_that_ends_before_it_is_ready(monkeypatch: pytest.MonkeyPatch) -> None:
    def command(*words: str) -> list[str]:
        return [sys.executable, "-S", "-c", "raise SystemExit(3)", *words]

    monkeypatch.setattr(process_module, "child_command", command)
    with pytest.raises(TransportError, match="The server of a ended with exit code 3 before it was ready"):
        start_server(["a"], secret=SECRET)


def test_where_the_secret_is_and_where_a_server_listens(process: ServerProcess) -> None:
    """On no command line, and on loopback alone."""
    for name in ("cmdline", "environ"):
        assert SECRET not in Path(f"/proc/{process.pid}/{name}").read_bytes()
    port = int(process.addresses["socket"].rpartition(":")[2])
    lines = Path("/proc/net/tcp").read_text().splitlines()
    assert [line.split()[1] for line in lines if f":{port:04X} " in line and " 0A " in line] == [
        f"0100007F:{port:04X}"
    ]
    hosts = {"127.0.0.1": True, "::1": True, "localhost": True, "0.0.0.0": False, "10.0.0.1": False}
    assert {host: is_loopback(host) for host in hosts} == hosts
    assert not is_loopback("host")


@pytest.mark.long
def test_stopping_ends_a_server_that_stands_still(process: ServerProcess) -> None:
    stop_process(process.pid)
    process.stop()
    process.stop()
    assert not process.alive()
    assert not Path(f"/proc/{process.pid}").exists()


def _start_and_wait(name: str, pipe: Any) -> None:
    server = start_server([name], secret=SECRET)
    pipe.send(server.pid)
    pipe.recv()  # it is killed here


def test_it_ends_with_its_parent(table: gear.Table) -> None:
    pipe, theirs = FORK.Pipe()
    parent = FORK.Process(target=_start_and_wait, args=(str(table.name), theirs), daemon=True)
    parent.start()
    theirs.close()
    assert pipe.poll(PATIENCE)
    pid = pipe.recv()
    assert Path(f"/proc/{pid}").exists()
    parent.kill()
    parent.join(PATIENCE)
    wait_until(lambda: not Path(f"/proc/{pid}/exe").exists())


COMMANDS: list[tuple[str, str]] = [
    ("serve a --listen 5555", "expected HOST:PORT"),
    ("serve a --listen a:99999", "expected HOST:PORT"),
    ("serve a --metrics x", "--metrics 127.0.0.1:x was received; expected HOST:PORT"),
    ("serve a --metrics :9400", "--metrics :9400 was received; expected HOST:PORT"),
    ("serve a --transport socket --transport ucx --listen 127.0.0.1:5", "one port"),
    ("serve a", "GEAR_LOADER_SECRET holds no secret"),
    ("serve a --secret-file /nowhere", "No such file"),
    ("serve a --secret-file /dev/null", "/dev/null holds no secret"),
    ("serve", "Missing argument"),
]


def test_the_command_is_checked(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("GEAR_LOADER_SECRET", raising=False)
    monkeypatch.setenv("COLUMNS", "200")
    for words, message in COMMANDS:
        result = CliRunner().invoke(app, words.split())
        assert result.exit_code in (1, 2)
        assert message in result.output
    assert "serve" in run("--help")[1]
    monkeypatch.setenv("GEAR_LOADER_SECRET", SECRET.decode())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        place = f"127.0.0.1:{listening.getsockname()[1]}"
        result = CliRunner().invoke(app, ["serve", str(table.name), "--listen", place])
    assert result.exit_code == 1
    assert "in use" in result.output


def serve_with(path: Path) -> str:
    """What `gear-loader serve` says of a secret file that it refuses."""
    result = CliRunner().invoke(app, ["serve", "a", "--secret-file", str(path)])
    assert result.exit_code == 1
    return " ".join(result.output.split())


def test_a_secret_is_as_long_for_serve_as_for_those_who_ask(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = tmp_path / "secret"
    path.touch(0o600)
    for secret in (b"x", b"x" * 15 + b"\n"):
        path.write_bytes(secret)
        size = len(secret.strip())
        assert f"and {size} bytes was received; expected at least 16 bytes" in serve_with(path)
        with pytest.raises(HandshakeError, match=f"and {size} bytes was received; expected at least 16"):
            Peer("socket://a:1", secret=secret.strip(), timeout=1, name="b")
        monkeypatch.setenv("GEAR_LOADER_SECRET", secret.decode())
        result = CliRunner().invoke(app, ["serve", "a"])
        assert result.exit_code == 1
        assert "expected at least 16 bytes" in result.output
    path.write_bytes(b"x" * 16)
    assert read_secret(str(path)) == b"x" * 16


def test_a_secret_file_is_for_its_owner_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "secret"
    path.write_bytes(SECRET)
    for mode, what in ((0o602, "write"), (0o620, "write"), (0o604, "read"), (0o666, "write and read")):
        path.chmod(mode)
        said = serve_with(path)
        assert f"Other users may {what} the secret file {path} (mode 0{mode:o})" in said
        assert f"chmod 600 {path}" in said
        assert SECRET.decode() not in said
    for mode in (0o400, 0o600, 0o640):
        path.chmod(mode)
        assert read_secret(str(path)) == SECRET
    path.chmod(0o600)
    monkeypatch.setattr(os, "geteuid", lambda: 12345)
    if os.getuid() != 0:
        assert f"belongs to user {os.getuid()}; expected user 12345" in serve_with(path)
    else:
        os.chown(path, 23456, -1)
        assert "belongs to user 23456; expected user 12345" in serve_with(path)


@pytest.mark.long
def test_a_server_started_by_hand_ends_at_once_with_a_store_that_waits(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_bytes(SECRET + b"\n")
    secret.chmod(0o600)
    with named(max_steps=10, max_trajectories=2, on_full="wait") as full:
        full.add(rows(0, 10))
        command = [sys.executable, "-m", "gear_loader", "serve", str(full.name), "--secret-file", str(secret)]
        with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, cwd=ROOT) as server:
            assert server.stdout is not None
            assert server.stderr is not None
            line = json.loads(server.stdout.readline())
            assert line["pid"] == server.pid
            peer = peer_of(line["addresses"]["socket"])
            one = np.array([UNSET], dtype=np.float32), np.array([-1])
            future = peer.store(str(full.name), full.schema, [Rows.of(full.schema, rows(1, 5), "one")], *one)
            check_fetch(peer, full, spec_of(full), [0], [1])
            server.send_signal(signal.SIGTERM)
            assert server.wait(PATIENCE / 2) == 0  # the store would wait for longer
            assert f"gear-loader serve: serving {full.name} at" in server.stderr.read().decode()
        with pytest.raises(
            TransportError, match=r"1 trajectories .* to be stored .* and then the connection was lost"
        ):
            future.result(PATIENCE)
        peer.close()
        full.remove(0)
        full.add(rows(2, 10))
        assert numbers_of(full) == [2]
        full.check_valid()
