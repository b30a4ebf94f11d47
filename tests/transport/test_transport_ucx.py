"""The carrier "ucx": messages between processes, ends of every kind, what is open to whom; ucx-py by a stand-in."""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import multiprocessing
import os
import signal
import subprocess
import sys
import time
import types
import warnings
from collections.abc import Awaitable, Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from ucx_common import LOOPBACK, listening
from waiting_common import SLOWER, go_on

from gear_loader.errors import HandshakeError, TransportError
from gear_loader.transport import ucx_library
from gear_loader.transport.channel import Channel, carrier
from gear_loader.transport.ucx import UcxCarrier

UCXX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="ucxx is not installed")
CONTEXT = multiprocessing.get_context("forkserver")
BIG = 3 << 20
ECHO, MUCH, KILL, STOP, LONG, SHORT, FORK = range(7)  # requests to the other process


def payload(size: int, seed: int) -> np.ndarray[Any, Any]:
    return np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8)


async def _answer(channel: Channel) -> None:
    request = np.zeros(16, dtype=np.uint8)
    with contextlib.suppress(ConnectionError):
        await channel.secured()  # type: ignore[attr-defined]
        while True:
            await channel.recv_into(request)
            what, seed = int(request[0]), int(request[1])
            if what == ECHO:
                await channel.send(request)
            elif what == MUCH:
                part = payload(BIG, seed)
                part.setflags(write=False)
                await channel.send(np.empty(0, dtype=np.uint8), part, memoryview(request), part[:100])
            elif what in (LONG, SHORT):
                await channel.send(payload(200 if what == LONG else 50, seed))
            elif what == FORK:
                await channel.send(np.frombuffer(_error_in_a_fork().ljust(1000), dtype=np.uint8))
            elif what in (KILL, STOP):
                os.kill(os.getpid(), signal.SIGKILL if what == KILL else signal.SIGSTOP)


def _error_in_a_fork() -> bytes:
    """The error of using UCX in a forked child of this process, whose event loop has used it."""
    read, write = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            ucx_library.library_in_loop(ucx_library.Ucxx, loopback=True)
        except TransportError as error:
            os.write(write, str(error).encode())
        finally:
            os._exit(0)
    os.close(write)
    with os.fdopen(read, "rb") as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said


def _server(pipe: Any) -> None:
    warnings.filterwarnings("ignore", ".*use of fork.*may lead to deadlocks", DeprecationWarning)
    os.environ["UCX_WARN_UNUSED_ENV_VARS"] = "n"

    async def main() -> None:
        async def serve(channel: Channel) -> None:
            await _answer(channel)
            await channel.close()

        listener = await UcxCarrier().listen("127.0.0.1", 0, serve)
        pipe.send(listener.address)
        await asyncio.get_running_loop().run_in_executor(None, pipe.poll, None)
        await listener.close()

    asyncio.run(main())


class Server:
    """A process that answers requests of `_answer`."""

    def __init__(self) -> None:
        self.pipe, theirs = CONTEXT.Pipe()
        self.process = CONTEXT.Process(target=_server, args=(theirs,))
        self.process.start()
        theirs.close()
        assert self.pipe.poll(60)
        self.address: str = self.pipe.recv()

    def end(self) -> None:
        with contextlib.suppress(OSError):
            self.pipe.close()
        if self.process.exitcode is None:
            go_on(self.process.pid or 0)
            self.process.join(10)
        if self.process.exitcode is None:
            self.process.kill()
            self.process.join()


@pytest.fixture(scope="module")
def servers() -> Iterator[list[Server]]:
    made: list[Server] = []
    yield made
    for each in made:
        each.end()


@pytest.fixture
def server(servers: list[Server]) -> Server:
    """The server of all tests, started again after a test that killed it."""
    if not servers or servers[-1].process.exitcode is not None:
        servers.append(Server())
    return servers[-1]


def run(work: Callable[[], Awaitable[None]]) -> None:
    async def main() -> None:
        await asyncio.wait_for(work(), 30)

    asyncio.run(main())


async def connected(server: Server) -> Any:
    channel = await UcxCarrier().connect(server.address)
    await channel.secured()
    return channel


async def nothing_comes(channel: Channel, buffer: np.ndarray[Any, Any], seconds: float = 0.2) -> None:
    with pytest.raises(asyncio.TimeoutError):
        await asyncio.wait_for(channel.recv_into(buffer), seconds)


def asking(what: int, seed: int = 0) -> np.ndarray[Any, Any]:
    request = np.zeros(16, dtype=np.uint8)
    request[:2] = what, seed
    return request


async def much(channel: Channel, seed: int) -> None:
    """Ask for four messages and compare them."""
    await channel.send(asking(MUCH, seed))
    big, echo, head = np.full(BIG, 255, np.uint8), bytearray(16), np.zeros((10, 10), dtype=np.uint8)
    await channel.recv_into(np.empty(0, dtype=np.uint8))
    await channel.recv_into(big)
    await channel.recv_into(memoryview(echo))
    await channel.recv_into(head)
    assert (big == payload(BIG, seed)).all()
    assert bytes(echo) == asking(MUCH, seed).tobytes()
    assert (head.reshape(-1) == big[:100]).all()


async def once(server: Server, seed: int) -> None:
    channel = await connected(server)
    await much(channel, seed)
    await channel.close()


@UCXX
def test_messages_of_every_kind_and_two_channels_at_once(server: Server) -> None:
    async def work() -> None:
        first, second = await connected(server), await connected(server)
        assert first.library == f"ucxx-{sys.modules['ucxx'].__version__}"
        for seed in range(3):
            await asyncio.gather(much(first, seed), much(second, 100 + seed))
        await first.close()
        await first.close()
        await much(second, 7)
        with pytest.raises(ConnectionError, match=r"The connection was closed\."):
            await first.send(asking(ECHO))
        await second.close()

    run(work)
    found = listening(server.process.pid)
    verbs = os.environ.get("UCX_TLS", "").startswith("rc")  # as tests/rdma has it
    assert len(found) == (1 if verbs else 2)  # the carrier's; and UCX's, over TCP
    assert set(found) <= LOOPBACK


@UCXX
def test_messages_of_another_size_are_never_taken_and_waiting_takes_no_processor_time(server: Server) -> None:
    async def work() -> None:
        for what in (LONG, SHORT):
            channel = await connected(server)
            await channel.send(asking(what))
            buffer = np.zeros(100, np.uint8)
            before = time.process_time()
            await nothing_comes(channel, buffer, 0.5 * SLOWER)
            assert time.process_time() - before < 0.25 * SLOWER  # asking again and again takes twice as much
            assert not buffer.any()
            await channel.close()

    run(work)


@UCXX
def test_a_stopped_peer_a_cancelled_call_and_closing(server: Server) -> None:
    async def work() -> None:
        channel, other, third = await connected(server), await connected(server), await connected(server)
        receive = asyncio.ensure_future(third.recv_into(np.zeros(16, np.uint8)))
        await asyncio.sleep(0.05)
        await third.close()  # cuts what is in progress
        with pytest.raises(ConnectionError, match=r"closed"):
            await receive
        await channel.send(asking(STOP))
        buffer = np.zeros(16, np.uint8)
        await nothing_comes(channel, buffer)
        with pytest.raises(ConnectionError, match=r"A receive was cancelled\."):
            await channel.recv_into(buffer)
        with pytest.raises(asyncio.TimeoutError):  # more than what is sent without the other side
            await asyncio.wait_for(other.send(payload(64 << 20, 1)), 0.2)
        with pytest.raises(ConnectionError, match=r"A send was cancelled\."):
            await other.send(buffer)
        await asyncio.gather(channel.close(), other.close())
        go_on(server.process.pid or 0)
        await asyncio.sleep(0.1)
        assert not buffer.any()
        await once(server, 9)

    run(work)


@UCXX
def test_other_protocols_sizes_and_libraries_are_refused(server: Server) -> None:
    async def work() -> None:
        host, port = "127.0.0.1", int(server.address.partition("?")[0].rpartition(":")[2])
        for hello in (
            b"GET / HTTP/1.0\r\n\r\n",
            b"GEARUCX1\xff\xff\xff\xff\xff\xff",
            b"GEARUCX1\x0d\x00\x04\x00\x00\x00ucx-py-0.45.0" + bytes(12),
        ):
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(hello)
            await asyncio.wait_for(reader.read(), 5)  # it closes
            writer.close()
        channel = await UcxCarrier().connect(server.address)  # not secured
        before = r"A message of 65,537 bytes before .* expected at most 65,536"
        with pytest.raises(ConnectionError, match=before):
            await channel.send(np.zeros(65_537, np.uint8))
        await channel.close()
        with pytest.raises(HandshakeError, match=r"is served by ucx-py-0\.45\.0, and this side has ucxx-"):
            await UcxCarrier().connect("ucx://127.0.0.1:1?library=ucx-py-0.45.0")
        with pytest.raises(TransportError, match="expected one that begins with ucx://"):
            await UcxCarrier().connect("socket://127.0.0.1:1")
        await once(server, 3)

    run(work)


@UCXX
def test_a_fork_is_refused_and_a_killed_peer_is_noticed(server: Server) -> None:
    said = np.zeros(1000, np.uint8)

    async def work() -> None:
        channel = await connected(server)
        await channel.send(asking(FORK))
        await channel.recv_into(said)
        await channel.send(asking(KILL))
        with pytest.raises(ConnectionError, match=r"closed the connection\.|UCX failed to receive: "):
            await channel.recv_into(np.zeros(16, np.uint8))
        with pytest.raises(ConnectionError):
            await channel.send(asking(ECHO))
        await channel.close()
        await asyncio.get_running_loop().run_in_executor(None, server.process.join)
        with pytest.raises(OSError, match=r"\d"):
            await UcxCarrier().connect(server.address)

    run(work)
    assert b"is a fork; it cannot be used here. Start processes by spawning" in said.tobytes()


def test_without_a_library_the_error_names_the_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    with pytest.raises(TransportError, match=r"neither ucxx nor ucp .* pip install '\.\[ucx\]'"):
        carrier("ucx")


ABORT = """
import asyncio, sys
import numpy as np
from test_transport_ucx import BIG, STOP, Server, asking
from gear_loader.errors import TransportError
from gear_loader.transport.ucx import UcxCarrier

async def work(address):
    channel = await UcxCarrier().connect(address)
    await channel.secured()
    await channel.send(asking(STOP, 0))
    sending = asyncio.ensure_future(channel.send(np.zeros(BIG, dtype=np.uint8)))
    await asyncio.sleep(0.5)  # no answer comes: it is still under way
    sending.cancel()
    await asyncio.gather(sending, return_exceptions=True)
    await channel.close()
    print("closed")

if __name__ == "__main__":
    server = None
    try:
        server = Server()
        asyncio.run(asyncio.wait_for(work(server.address), 30))
    except (AssertionError, EOFError, TransportError) as error:
        print(type(error).__name__, error)
    finally:
        if server is not None:
            server.end()
"""
BOTH = """
import asyncio, sys
from gear_loader.errors import TransportError
from gear_loader.transport.ucx_library import Ucxx, library_in_loop

async def work(loopback):
    try:
        library_in_loop(Ucxx, loopback=loopback)
    except TransportError as error:
        print(error)

for step in sys.argv[1].split(","):
    if step == "nixl":
        from gear_loader.transport.nixl_agent import new_agent
        agent = new_agent("agent", loopback=True)
    elif step == "load":
        Ucxx.title()
    else:
        asyncio.run(work(step == "loopback"))
    print(step, flush=True)
"""


def run_with(program: str, folder: Path, *words: str, **environment: str) -> str:
    """What a program prints that runs in a process of its own with these variables; it has to end in peace."""
    path = folder / "program.py"  # a file: it is loaded again by the processes that it spawns
    path.write_text(program)
    here = Path(__file__).parent
    found = subprocess.run(
        [sys.executable, str(path), *words],
        env={**os.environ, **environment, "PYTHONPATH": f"{here}:{here.parent}:{here.parents[1]}"},
        capture_output=True,
        text=True,
        timeout=200,
    )
    assert found.returncode == 0, (found.returncode, found.stdout, found.stderr[-2000:])
    return found.stdout


@UCXX
@pytest.mark.long
def test_closing_while_a_message_to_a_stopped_peer_is_under_way(tmp_path: Path) -> None:
    """Without a registration cache, UCX before 1.22 ends the process here; it is not started without one."""
    assert run_with(ABORT, tmp_path, UCX_RCACHE_ENABLE="n") == "closed\n"


@UCXX
@pytest.mark.long
@pytest.mark.parametrize("variable", ["UCX_MEM_EVENTS=n", "UCX_MEM_MMAP_HOOK_MODE=none"])
def test_without_memory_hooks_ucx_does_not_start(tmp_path: Path, variable: str) -> None:
    name, _, value = variable.partition("=")
    said = run_with(BOTH, tmp_path, "loopback", **{name: value})
    if ucx_library.Ucxx.ucx_version() >= ucx_library._SOUND:
        assert said == "loopback\n"
    else:
        for part in ("UCX cannot start", "not started without its registration cache", name, "='socket'"):
            assert part in said


@UCXX
@pytest.mark.long
@pytest.mark.skipif(importlib.util.find_spec("nixl_cu12") is None, reason="NIXL is not installed")
@pytest.mark.parametrize(
    "steps", ["nixl,loopback,all", "load,nixl,loopback,all", "loopback,nixl,loopback,all,nixl,all"]
)
def test_ucx_starts_in_a_process_with_nixl(tmp_path: Path, steps: str) -> None:
    assert run_with(BOTH, tmp_path, steps).split() == steps.split(",")


class StandIn(types.ModuleType):
    """Not ucx-py: queues in this process behind the signatures of its documentation."""

    def __init__(self) -> None:
        super().__init__("ucp")
        self.__version__ = "0.45.0"
        self.inits: list[dict[str, Any]] = []
        self.mailboxes: dict[int, asyncio.Queue[bytes]] = {}

    def init(
        self,
        options: dict[str, str] | None = None,
        env_takes_precedence: bool = False,
        blocking_progress_mode: bool | None = None,
    ) -> None:
        if self.inits:
            raise RuntimeError("UCX is already initiated.")
        self.inits.append(
            {"options": options, "env": env_takes_precedence, "blocking": blocking_progress_mode}
        )

    def get_ucx_version(self) -> tuple[int, int, int]:
        return 1, 18, 0

    def get_worker_address(self) -> bytes:
        return b"stand-in"

    def get_ucx_address_from_buffer(self, buffer: bytes) -> bytes:
        return buffer

    async def create_endpoint_from_worker_address(
        self, address: bytes, endpoint_error_handling: bool = True
    ) -> Any:
        assert address == b"stand-in"
        assert endpoint_error_handling
        return _StandInEndpoint(self.mailboxes)


class _StandInEndpoint:
    def __init__(self, mailboxes: dict[int, asyncio.Queue[bytes]]) -> None:
        self.mailboxes = mailboxes
        self.receiving: set[asyncio.Future[bytes]] = set()

    async def send(self, buffer: Any, tag: int | None = None, force_tag: bool = False) -> None:
        assert force_tag
        assert tag is not None
        self.mailboxes.setdefault(tag, asyncio.Queue()).put_nowait(memoryview(buffer).tobytes())

    async def recv(self, buffer: Any, tag: int | None = None, force_tag: bool = False) -> None:
        assert force_tag
        assert tag is not None
        get = asyncio.ensure_future(self.mailboxes.setdefault(tag, asyncio.Queue()).get())
        self.receiving.add(get)
        try:
            data = await get
        except asyncio.CancelledError:
            raise RuntimeError("Request canceled") from None
        if len(data) != memoryview(buffer).nbytes:
            raise RuntimeError(f"length mismatch: {len(data)} (got)")
        memoryview(buffer).cast("B")[:] = data

    def abort(self) -> None:
        for get in self.receiving:
            get.cancel()


@pytest.fixture
def stand_in(monkeypatch: pytest.MonkeyPatch) -> StandIn:
    made = StandIn()
    monkeypatch.setitem(sys.modules, "ucp", made)
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object() if name == "ucp" else None)
    monkeypatch.setattr(ucx_library.UcxPy, "_started_with", None)
    monkeypatch.delenv("UCX_NET_DEVICES", raising=False)
    return made


def test_ucx_py_is_used_where_it_alone_is_installed(stand_in: StandIn) -> None:
    async def work() -> None:
        ours = carrier("ucx")
        assert ours.library == "ucx-py-0.45.0"
        ended = asyncio.Event()

        async def serve(channel: Channel) -> None:
            with contextlib.suppress(ConnectionError):
                await channel.secured()  # type: ignore[attr-defined]
                request = np.zeros(16, np.uint8)
                await channel.recv_into(request)
                await channel.send(request, request[:4])
                await channel.recv_into(request)
            ended.set()

        listener = await ours.listen("127.0.0.1", 0, serve)
        assert listener.address.endswith("?library=ucx-py-0.45.0")
        channel: Any = await ours.connect(listener.address)
        await channel.secured()
        await channel.send(asking(ECHO, 3))
        whole, head = np.zeros(16, np.uint8), np.zeros(4, np.uint8)
        await channel.recv_into(whole)
        await channel.recv_into(head)
        assert whole[1] == head[1] == 3
        await nothing_comes(channel, whole, 0.05)
        await channel.close()
        await ended.wait()
        await listener.close()

    run(work)
    options = {"POSIX_ERROR_HANDLING": "y", "NET_DEVICES": "lo", "RCACHE_ENABLE": "y"}
    assert stand_in.inits == [{"options": options, "env": False, "blocking": True}]


def test_ucx_py_has_one_context(stand_in: StandIn) -> None:
    async def work() -> None:
        ucx_library.library_in_loop(ucx_library.UcxPy, loopback=True)
        with pytest.raises(TransportError, match="in this process with the loopback device only, and others"):
            ucx_library.library_in_loop(ucx_library.UcxPy, loopback=False)

    run(work)
    assert len(stand_in.inits) == 1
