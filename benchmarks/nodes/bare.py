"""The yardsticks of ``multi-server``: exchanges of the same bytes over the same carrier, and nothing else.

    python -m benchmarks.nodes.bare CARRIER HOST

is the side that sends: it prints where it listens as one JSON line, and ends with its input. It answers a request for
n bytes with the first n bytes of a memory that never changes: no table, no gather, no check.

======  =====================================================================================================
socket  blocking sockets, a thread a connection; each request (as long as ours, up to 4 KiB) takes one ``sendall``
ucx     tagged messages on plain endpoints of ucxx (the layer below its asyncio one), the worker driven in turns
        of progress and sleep, because a thread that never sleeps would take a core from the other side here
nixl    a read of one contiguous piece, its lists prepared beforehand; the owner looks as often as ours does
======  =====================================================================================================
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import importlib
import importlib.util
import itertools
import json
import os
import select
import socket
import struct
import sys
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

CARRIERS = ("socket", "ucx", "nixl")
MEMORY_BYTES = 1 << 26
"""Of the sender: no request is larger, nor, with nixl, all that one peer has under way."""

Piece = tuple[int, int]
"""Bytes of an answer, and bytes of its request."""
Pieces = Sequence[Sequence[Piece]]
"""Of each peer, what is asked for."""
Place = tuple[Piece, np.ndarray[Any, Any]]
"""A piece, and where it goes to."""
Work = Callable[..., object]

_REQUEST = struct.Struct("<QI")
_LONGEST_REQUEST = 1 << 12  # more would have to be sent while answers are received
_GREETING = struct.Struct("<IQ")
_LOOKS = 100
_BUSY, _IDLE, _STAY = 2e-5, 5e-3, 1.0  # seconds, as `gear_loader.transport.nixl_server` has them
_SPIN, _PAUSE = 3e-4, 5e-5  # and `nixl_reader`


def missing(carrier: str) -> str | None:
    """Why a carrier cannot be measured here; None if it can."""
    if carrier == "ucx" and importlib.util.find_spec("ucxx") is None:
        return "ucxx is not installed: pip install '.[ucx]'"
    if carrier == "nixl":
        from gear_loader.transport.nixl_agent import installed

        if installed() is None:
            return "NIXL is not installed: pip install '.[nixl]'"
    return None


@functools.cache
def memory() -> np.ndarray[Any, Any]:
    """What is sent, uint8, the same in all processes."""
    return np.random.default_rng(7).integers(0, 256, MEMORY_BYTES, dtype=np.uint8)


def open_bare(carrier: str, addresses: Sequence[tuple[str, int]]) -> Bare:
    kinds: dict[str, type[Bare]] = {"socket": SocketBare, "ucx": UcxBare, "nixl": NixlBare}
    return kinds[carrier](addresses)


@dataclasses.dataclass(eq=False)
class Asked:
    """A piece that is under way from a sender; handle: what its carrier knows of it."""

    peer: int
    handle: Any


class Bare(abc.ABC):
    """The side that asks.

    addresses: of the senders. wall: uint8 [k], what has been received last from each of them, piece after piece.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self.loopback = all(host == "127.0.0.1" for host, _ in addresses)
        self.sockets = [socket.create_connection((host, port), timeout=60) for host, port in addresses]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(None)
        self.wall = [np.empty(0, dtype=np.uint8) for _ in addresses]

    def exchange(
        self, pieces: Pieces, *, in_flight: int | None = None, meanwhile: Work = lambda: None
    ) -> None:
        """Ask every sender for its pieces, so many at a time or all at once, and receive them."""
        under_way: list[Asked] = []
        left = [self._placed(peer, sizes, in_flight) for peer, sizes in enumerate(pieces)]
        for peer, waiting in enumerate(left):
            some = [waiting[:]] if in_flight is None else [[one] for one in waiting[:in_flight]]
            del waiting[:in_flight]
            for places in filter(None, some):
                under_way += self.ask(peer, places)
        meanwhile()
        while under_way:
            for one in self.arrived(under_way):
                under_way.remove(one)
                if left[one.peer]:
                    under_way += self.ask(one.peer, [left[one.peer].pop(0)])

    def check(self, pieces: Pieces) -> None:
        """Raise `Incorrect` unless the right bytes arrive."""
        from benchmarks.harness import Incorrect  # with torch, which a sender does without

        for room in self.wall:
            room[:] = 0
        self.exchange(pieces)
        for peer, sizes in enumerate(pieces):
            at = 0
            for number, (size, _) in enumerate(sizes):
                first = at if self.runs_on else 0
                if not np.array_equal(self.wall[peer][at : at + size], memory()[first : first + size]):
                    raise Incorrect(f"piece {number} of {size:,} bytes from sender {peer} differs")
                at += size

    runs_on = False
    """Whether the second piece comes from behind the first one."""

    def _placed(self, peer: int, sizes: Sequence[Piece], in_flight: int | None) -> list[Place]:
        """Each piece with its place in the wall: one after another, or in turn in as many places."""
        each, ends = max((size for size, _ in sizes), default=0), itertools.accumulate(n for n, _ in sizes)
        lasts = list(ends)
        if in_flight is not None:
            lasts = [number % in_flight * each + size for number, (size, _) in enumerate(sizes)]
        if max(lasts, default=0) > len(self.wall[peer]):
            self.wall[peer] = np.zeros(max(lasts), dtype=np.uint8)
            self.moved(peer)
        return [(one, self.wall[peer][end - one[0] : end]) for end, one in zip(lasts, sizes, strict=True)]

    def moved(self, peer: int) -> None:  # noqa: B027 - most carriers remember nothing
        """The memory for a peer is another one."""

    @abc.abstractmethod
    def ask(self, peer: int, places: Sequence[Place]) -> list[Asked]:
        """Request pieces of a sender."""

    @abc.abstractmethod
    def arrived(self, under_way: Sequence[Asked]) -> list[Asked]:
        """Those that have come; after a while maybe none."""

    def close(self) -> None:
        for each in self.sockets:
            each.close()


def _request(piece: Piece) -> bytes:
    size, length = piece
    extra = max(0, min(length, _LONGEST_REQUEST) - _REQUEST.size)
    return _REQUEST.pack(size, extra) + bytes(extra)


def _exactly(connection: socket.socket, count: int) -> bytearray:
    data = bytearray(count)
    view = memoryview(data)
    while view:
        got = connection.recv_into(view, len(view), socket.MSG_WAITALL)
        if got == 0:
            raise ConnectionResetError("the other side has gone")
        view = view[got:]
    return data


def _greet(connection: socket.socket, address: bytes, number: int) -> None:
    connection.sendall(_GREETING.pack(len(address), number) + address)


def _greeting(connection: socket.socket) -> tuple[bytes, int]:
    length, number = _GREETING.unpack(_exactly(connection, _GREETING.size))
    return bytes(_exactly(connection, length)), number


class SocketBare(Bare):
    """Blocking sockets; with several senders, whichever has something."""

    def ask(self, peer: int, places: Sequence[Place]) -> list[Asked]:
        self.sockets[peer].sendall(b"".join(_request(piece) for piece, _ in places))
        return [Asked(peer, memoryview(room)) for _, room in places]

    def arrived(self, under_way: Sequence[Asked]) -> list[Asked]:
        heads: dict[socket.socket, Asked] = {}
        for one in under_way:
            heads.setdefault(self.sockets[one.peer], one)  # answers come in the order of the requests
        alone = len(heads) == 1
        for connection in list(heads) if alone else select.select(list(heads), (), ())[0]:
            one = heads[connection]
            got = connection.recv_into(one.handle, len(one.handle), socket.MSG_WAITALL if alone else 0)
            if got == 0:
                raise ConnectionResetError("the other side has gone")
            one.handle = one.handle[got:]
        return [one for one in heads.values() if not one.handle]


def _answer_socket(connection: socket.socket) -> None:
    data = memory().data
    while True:
        size, extra = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
        if extra:
            _exactly(connection, extra)
        connection.sendall(data[:size])


class _Worker:
    """A UCX worker that is driven by hand. loopback: keep its sockets to the loopback device."""

    def __init__(self, loopback: bool) -> None:
        from gear_loader.transport.ucx_library import quiet_environment

        with quiet_environment():
            self.api = importlib.import_module("ucxx._lib.libucxx")
            self._array = importlib.import_module("ucxx._lib.arr").Array
            types = importlib.import_module("ucxx.types")
            self._tag, self._full = types.Tag, types.TagMaskFull
            options = {"POSIX_ERROR_HANDLING": "y", **({"NET_DEVICES": "lo"} if loopback else {})}
            options = {key: value for key, value in options.items() if f"UCX_{key}" not in os.environ}
            self._context = self.api.UCXContext(options)
            self.worker = self.api.UCXWorker(
                self._context, enable_delayed_submission=False, enable_python_future=False
            )
        self.worker.init_blocking_progress_mode()
        self._poll = select.poll()
        self._poll.register(self.worker.epoll_file_descriptor, select.POLLIN)
        self._looks, self._nap = _LOOKS, _BUSY

    @property
    def address(self) -> bytes:
        return memoryview(self.worker.address).tobytes()

    def endpoint(self, address: bytes) -> Any:
        remote = self.api.UCXAddress.create_from_buffer(address)
        return self.api.UCXEndpoint.create_from_worker_address(self.worker, remote, True)

    def send(self, endpoint: Any, data: Any, tag: int) -> Any:
        return endpoint.tag_send(self._array(data), self._tag(tag))

    def receive(self, endpoint: Any, data: Any, tag: int) -> Any:
        return endpoint.tag_recv(self._array(data), self._tag(tag), self._full)

    def drive(self) -> None:
        """Let UCX go on; sleep where there has been nothing to do for a while."""
        if self.worker.progress_once():
            self._looks, self._nap = _LOOKS, _BUSY
        elif self._looks:
            self._looks -= 1
            os.sched_yield()
        elif self.worker.arm():
            self._poll.poll()
            self._looks = _LOOKS
        else:  # it waits for another side that does not look between two exchanges
            time.sleep(self._nap)
            self._nap = min(2 * self._nap, _IDLE)


class UcxBare(Bare):
    """Tagged messages. Tags are matched over all endpoints of a worker: answers have the number of their sender."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        super().__init__(addresses)
        self._ucx, self._ends, self._sent = _Worker(self.loopback), [], []
        for number, connection in enumerate(self.sockets):
            _greet(connection, self._ucx.address, number)
            self._ends.append(self._ucx.endpoint(_greeting(connection)[0]))

    def ask(self, peer: int, places: Sequence[Place]) -> list[Asked]:
        found, end = [], self._ends[peer]
        for piece, room in places:
            found.append(Asked(peer, self._ucx.receive(end, room, peer)))
            request = np.frombuffer(_request(piece), dtype=np.uint8)
            self._sent.append((self._ucx.send(end, request, 0), request))
        return found

    def arrived(self, under_way: Sequence[Asked]) -> list[Asked]:
        self._sent = [(sent, kept) for sent, kept in self._sent if not sent.completed]
        done = [one for one in under_way if one.handle.completed]
        for one in done:
            one.handle.check_error()
        if not done:
            self._ucx.drive()
        return done

    def close(self) -> None:
        for endpoint in self._ends:
            endpoint.close_blocking(period=10**8, max_attempts=1)
        super().close()


def _answer_ucx(connection: socket.socket) -> None:
    """With a worker of its own."""
    ucx, data, room = (
        _Worker(connection.getsockname()[0] == "127.0.0.1"),
        memory(),
        np.empty(_LONGEST_REQUEST, dtype=np.uint8),
    )
    address, answers = _greeting(connection)
    endpoint, sends = ucx.endpoint(address), []
    _greet(connection, ucx.address, 0)
    while True:
        request = ucx.receive(endpoint, room, 0)
        while not request.completed:
            ucx.drive()
        request.check_error()
        size, _ = _REQUEST.unpack_from(room)
        sends = [each for each in sends if not each.completed]
        sends.append(ucx.send(endpoint, data[:size], answers))


class NixlBare(Bare):
    """Reads of contiguous memory: all that comes from one owner is one read, unless so many are asked for at a time."""

    runs_on = True

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        from gear_loader.transport.nixl_agent import new_agent, register

        super().__init__(addresses)
        self._register = register
        self._agent = new_agent(f"bare-{os.getpid()}", loopback=self.loopback)
        self._owners = []
        for connection in self.sockets:
            described, base = _greeting(connection)
            name = self._agent.add_remote_agent(described)
            self._owners.append((name.decode() if isinstance(name, bytes) else name, base))
        self._registered: dict[int, Any] = {}
        self._handles: dict[tuple[int, int, int], Any] = {}
        self._since = 0.0

    def moved(self, peer: int) -> None:
        self._handles = {key: value for key, value in self._handles.items() if key[0] != peer}
        if peer in self._registered:
            self._agent.deregister_memory(self._registered.pop(peer))
        room = self.wall[peer]
        self._registered[peer] = self._register(self._agent, room.ctypes.data, room.nbytes)

    def ask(self, peer: int, places: Sequence[Place]) -> list[Asked]:
        self._since, wall = time.monotonic(), self.wall[peer].ctypes.data
        first, size = places[0][1].ctypes.data - wall, sum(room.nbytes for _, room in places)
        key = (peer, first, size)
        if key not in self._handles:
            owner, base = self._owners[peer]
            lists = [
                self._agent.prep_xfer_dlist(
                    name, np.array([[at + first, size, 0, size, 1]], np.uint64), "DRAM"
                )
                for name, at in (("NIXL_INIT_AGENT", wall), (owner, base))
            ]
            one = np.zeros(1, dtype=np.int32)
            made = self._agent.make_prepped_xfer("READ", lists[0], one, lists[1], one)
            self._handles[key] = (made, lists)
        handle = self._handles[key][0]
        self._agent.transfer(handle, b"r")
        return [Asked(peer, handle)]

    def arrived(self, under_way: Sequence[Asked]) -> list[Asked]:
        states = [(one, self._agent.check_xfer_state(one.handle)) for one in under_way]
        if any(state == "ERR" for _, state in states):
            raise ConnectionResetError("the read failed")
        done = [one for one, state in states if state == "DONE"]
        if not done:
            time.sleep(0 if time.monotonic() - self._since < _SPIN else _PAUSE)
        return done


def _answer_nixl(host: str) -> Work:
    from gear_loader.transport.nixl_agent import new_agent, register

    agent, data = new_agent(f"bare-{os.getpid()}", loopback=host == "127.0.0.1"), memory()
    register(agent, data.ctypes.data, data.nbytes)
    described = agent.get_agent_metadata()

    def look() -> None:
        busy = 0.0
        while True:
            now = time.monotonic()
            if agent.get_new_notifs():
                busy = now
            time.sleep(_BUSY if now - busy < _STAY else _IDLE)

    def answer(connection: socket.socket) -> None:
        _greet(connection, described, data.ctypes.data)
        connection.recv(1)  # until the other side has gone

    threading.Thread(target=look, daemon=True).start()
    return answer


_SERVE: dict[str, Callable[[str], Work]] = {
    "socket": lambda host: _answer_socket,
    "ucx": lambda host: _answer_ucx,
    "nixl": _answer_nixl,
}


def _serve(listening: socket.socket, answer: Work) -> None:
    """A thread for each connection."""

    def run(connection: socket.socket) -> None:
        with contextlib.suppress(Exception), connection:  # the client has gone
            answer(connection)

    while True:
        connection, _ = listening.accept()
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        threading.Thread(target=run, args=(connection,), daemon=True).start()


def _main(carrier: str, host: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come into the answer
    listening = socket.create_server((host, 0), backlog=64)
    threading.Thread(target=_serve, args=(listening, _SERVE[carrier](host)), daemon=True).start()
    answers.write(json.dumps({"address": listening.getsockname()[:2]}) + "\n")
    answers.flush()
    sys.stdin.read()
    os._exit(0)  # threads of UCX do not end by themselves


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
