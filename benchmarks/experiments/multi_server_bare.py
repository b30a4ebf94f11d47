"""The yardsticks of ``multi-server``: exchanges of the same bytes over the same carrier, and nothing else.

    python -m benchmarks.experiments.multi_server_bare CARRIER HOST

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
import functools
import importlib
import importlib.util
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
Targets = list[list[Any]]
Work = Callable[[], object]

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


class Bare(abc.ABC):
    """The side that asks.

    addresses: of the senders. wall: uint8 [k], what has been received last from each of them, piece after piece.
    """

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        self.sockets = [socket.create_connection((host, port), timeout=60) for host, port in addresses]
        for each in self.sockets:
            each.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            each.settimeout(None)
        self.wall = [np.empty(0, dtype=np.uint8) for _ in addresses]

    def exchange(
        self, pieces: Pieces, *, in_flight: int | None = None, meanwhile: Work = lambda: None
    ) -> None:
        """Ask every sender for its pieces, and receive them."""
        targets = [self._targets(peer, sizes, in_flight) for peer, sizes in enumerate(pieces)]
        self._exchange(pieces, targets, in_flight or max(map(len, pieces), default=0), meanwhile)

    def check(self, pieces: Pieces) -> None:
        """Raise `Incorrect` unless the right bytes arrive."""
        from benchmarks.harness import Incorrect  # with torch, which a sender does without

        expected = memory()
        for room in self.wall:
            room[:] = 0
        self.exchange(pieces)
        for peer, sizes in enumerate(pieces):
            at = 0
            for number, (size, _) in enumerate(sizes):
                first = at if self.runs_on else 0
                if not np.array_equal(self.wall[peer][at : at + size], expected[first : first + size]):
                    raise Incorrect(f"piece {number} of {size:,} bytes from sender {peer} differs")
                at += size

    runs_on = False
    """Whether the second piece comes from behind the first one."""

    def _targets(self, peer: int, sizes: Sequence[Piece], in_flight: int | None) -> list[Any]:
        ends = np.cumsum([size for size, _ in sizes]).tolist()
        if in_flight is not None and sizes:  # in turn into as many places
            each = max(size for size, _ in sizes)
            ends = [(number % in_flight) * each + size for number, (size, _) in enumerate(sizes)]
        if max(ends, default=0) > len(self.wall[peer]):
            self.wall[peer] = np.zeros(max(ends), dtype=np.uint8)
            self.forget(peer)
        return [self.wall[peer][end - size : end] for end, (size, _) in zip(ends, sizes, strict=True)]

    def forget(self, peer: int) -> None:  # noqa: B027 - most carriers remember nothing
        """The memory for a peer is another one."""

    @abc.abstractmethod
    def _exchange(self, pieces: Pieces, targets: Targets, in_flight: int, meanwhile: Work) -> None: ...

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

    def _exchange(self, pieces: Pieces, targets: Targets, in_flight: int, meanwhile: Work) -> None:
        for connection, sizes in zip(self.sockets, pieces, strict=True):
            connection.sendall(b"".join(map(_request, sizes[:in_flight])))
        meanwhile()
        waiting = [[memoryview(part) for part in parts] for parts in targets]
        done = [0] * len(pieces)
        poll = select.poll()
        by_fd = {}
        for peer, connection in enumerate(self.sockets):
            if pieces[peer]:
                by_fd[connection.fileno()] = peer
                poll.register(connection, select.POLLIN)
        alone = len(by_fd) == 1
        while by_fd:
            for fd in list(by_fd) if alone else [fd for fd, _ in poll.poll()]:
                peer = by_fd[fd]
                connection, number = self.sockets[peer], done[peer]
                view = waiting[peer][number]
                got = connection.recv_into(view, len(view), socket.MSG_WAITALL if alone else 0)
                if got == 0:
                    raise ConnectionResetError("the other side has gone")
                waiting[peer][number] = view[got:]
                if got < len(view):
                    continue
                done[peer] += 1
                if number + in_flight < len(pieces[peer]):
                    connection.sendall(_request(pieces[peer][number + in_flight]))
                elif done[peer] == len(pieces[peer]):
                    poll.unregister(connection)
                    del by_fd[fd]


def _serve_sockets(listening: socket.socket) -> None:
    data = memory().data

    def answer(connection: socket.socket) -> None:
        with contextlib.suppress(OSError), connection:
            while True:
                size, extra = _REQUEST.unpack(_exactly(connection, _REQUEST.size))
                if extra:
                    _exactly(connection, extra)
                connection.sendall(data[:size])

    while True:
        threading.Thread(target=answer, args=(_accepted(listening),), daemon=True).start()


def _accepted(listening: socket.socket) -> socket.socket:
    connection, _ = listening.accept()
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return connection


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
        self.poll = select.poll()
        self.poll.register(self.worker.epoll_file_descriptor, select.POLLIN)
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

    def drive(self, anything: bool) -> None:
        """Let UCX go on; sleep where there has been nothing to do for a while."""
        if self.worker.progress_once() or anything:
            self._looks, self._nap = _LOOKS, _BUSY
        elif self._looks:
            self._looks -= 1
            os.sched_yield()
        elif self.worker.arm():
            self.poll.poll()
            self._looks = _LOOKS
        else:  # it waits for another side that does not look between two exchanges
            time.sleep(self._nap)
            self._nap = min(2 * self._nap, _IDLE)


class UcxBare(Bare):
    """Tagged messages."""

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        super().__init__(addresses)
        self._ucx = _Worker(all(host == "127.0.0.1" for host, _ in addresses))
        # Tags are matched over all endpoints of a worker: each side chooses what is sent to it.
        self._ends = []
        for answers, connection in enumerate(self.sockets):
            _greet(connection, self._ucx.address, answers)
            address, requests = _greeting(connection)
            self._ends.append((self._ucx.endpoint(address), requests, answers))

    def _exchange(self, pieces: Pieces, targets: Targets, in_flight: int, meanwhile: Work) -> None:
        ucx, kept, open_ = self._ucx, [], []
        left = [list(zip(sizes, parts, strict=True)) for sizes, parts in zip(pieces, targets, strict=True)]

        def ask(peer: int) -> None:
            endpoint, requests, answers = self._ends[peer]
            piece, part = left[peer].pop(0)
            open_.append((peer, ucx.receive(endpoint, part, answers)))
            request = np.frombuffer(_request(piece), dtype=np.uint8)
            kept.append((ucx.send(endpoint, request, requests), request))

        for peer in range(len(left)):
            while left[peer] and sum(1 for other, _ in open_ if other == peer) < in_flight:
                ask(peer)
        meanwhile()
        while open_:
            done = [entry for entry in open_ if entry[1].completed]
            for entry in done:
                entry[1].check_error()
                open_.remove(entry)
                if left[entry[0]]:
                    ask(entry[0])
            if open_:
                ucx.drive(bool(done))
        while not all(request.completed for request, _ in kept):
            ucx.drive(False)

    def close(self) -> None:
        for endpoint, _, _ in self._ends:
            endpoint.close_blocking(period=10**8, max_attempts=1)
        super().close()


def _serve_ucx(listening: socket.socket) -> None:
    ucx = _Worker(listening.getsockname()[0] == "127.0.0.1")
    data = memory()
    clients: list[tuple[Any, int, int, Any, Any]] = []
    sends: list[Any] = []
    kept: list[socket.socket] = []
    ucx.poll.register(listening, select.POLLIN)
    listening.setblocking(False)
    while True:
        anything = False
        for number, (endpoint, requests, answers, request, room) in enumerate(clients):
            if not request.completed:
                continue
            anything = True
            try:
                request.check_error()
            except Exception:  # the client has gone
                endpoint.close_blocking(period=10**8, max_attempts=1)
                del clients[number]
                break
            size, _ = _REQUEST.unpack_from(room)
            sends.append(ucx.send(endpoint, data[:size], answers))
            clients[number] = (endpoint, requests, answers, ucx.receive(endpoint, room, requests), room)
        sends = [each for each in sends if not each.completed]
        with contextlib.suppress(BlockingIOError):
            connection = _accepted(listening)
            connection.setblocking(True)
            address, answers = _greeting(connection)
            endpoint = ucx.endpoint(address)
            requests, room = len(kept), np.empty(_LONGEST_REQUEST, dtype=np.uint8)
            clients.append((endpoint, requests, answers, ucx.receive(endpoint, room, requests), room))
            _greet(connection, ucx.address, requests)
            kept.append(connection)
            anything = True
        ucx.drive(anything)


class NixlBare(Bare):
    """Reads of contiguous memory."""

    runs_on = True

    def __init__(self, addresses: Sequence[tuple[str, int]]) -> None:
        from gear_loader.transport.nixl_agent import new_agent, register

        super().__init__(addresses)
        self._register = register
        self._agent = new_agent(f"bare-{os.getpid()}", loopback=all(h == "127.0.0.1" for h, _ in addresses))
        self._owners = []
        for connection in self.sockets:
            described, base = _greeting(connection)
            name = self._agent.add_remote_agent(described)
            self._owners.append((name.decode() if isinstance(name, bytes) else name, base))
        self._registered: dict[int, Any] = {}
        self._handles: dict[tuple[int, int, int], Any] = {}

    def forget(self, peer: int) -> None:
        self._handles = {key: value for key, value in self._handles.items() if key[0] != peer}
        if peer in self._registered:
            self._agent.deregister_memory(self._registered.pop(peer))
        room = self.wall[peer]
        self._registered[peer] = self._register(self._agent, room.ctypes.data, room.nbytes)

    def _exchange(self, pieces: Pieces, targets: Targets, in_flight: int, meanwhile: Work) -> None:
        # All that comes from one owner is one read, unless some are asked for at a time.
        left: list[tuple[int, int, int]] = []
        for peer, parts in enumerate(targets):
            at = [part.ctypes.data - self.wall[peer].ctypes.data for part in parts]
            if len(parts) <= in_flight and parts:
                left.append((peer, at[0], sum(part.nbytes for part in parts)))
            else:
                left += [(peer, first, part.nbytes) for first, part in zip(at, parts, strict=True)]
        open_ = []
        for peer in range(len(targets)):
            mine = [entry for entry in left if entry[0] == peer][:in_flight]
            for entry in mine:
                left.remove(entry)
                open_.append((entry, self._post(*entry)))
        meanwhile()
        since = time.monotonic()
        while open_:
            for entry, handle in list(open_):
                state = self._agent.check_xfer_state(handle)
                if state == "ERR":
                    raise ConnectionResetError("the read failed")
                if state == "DONE":
                    open_.remove((entry, handle))
                    following = next((other for other in left if other[0] == entry[0]), None)
                    if following is not None:
                        left.remove(following)
                        open_.append((following, self._post(*following)))
                        since = time.monotonic()
            if open_:
                time.sleep(0 if time.monotonic() - since < _SPIN else _PAUSE)

    def _post(self, peer: int, first: int, size: int) -> Any:
        key = (peer, first, size)
        if key not in self._handles:
            owner, base = self._owners[peer]
            ends = (("NIXL_INIT_AGENT", self.wall[peer].ctypes.data), (owner, base))
            lists = [
                self._agent.prep_xfer_dlist(
                    n, np.array([[b + first, size, 0, size, 1]], dtype=np.uint64), "DRAM"
                )
                for n, b in ends
            ]
            place = np.zeros(1, dtype=np.int32)
            made = self._agent.make_prepped_xfer("READ", lists[0], place, lists[1], place)
            self._handles[key] = (made, lists)
        handle = self._handles[key][0]
        self._agent.transfer(handle, b"r")
        return handle


def _serve_nixl(listening: socket.socket) -> None:
    from gear_loader.transport.nixl_agent import new_agent, register

    data = memory()
    agent = new_agent(f"bare-{os.getpid()}", loopback=listening.getsockname()[0] == "127.0.0.1")
    register(agent, data.ctypes.data, data.nbytes)
    kept: list[socket.socket] = []
    busy = 0.0
    listening.setblocking(False)
    while True:
        with contextlib.suppress(BlockingIOError):
            connection = _accepted(listening)
            connection.setblocking(True)
            _greet(connection, agent.get_agent_metadata(), data.ctypes.data)
            kept.append(connection)
        now = time.monotonic()
        if agent.get_new_notifs():
            busy = now
        time.sleep(_BUSY if now - busy < _STAY else _IDLE)


def _main(carrier: str, host: str) -> None:
    answers = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)  # what libraries print must not come into the answer
    listening = socket.create_server((host, 0), backlog=64)
    serve = {"socket": _serve_sockets, "ucx": _serve_ucx, "nixl": _serve_nixl}[carrier]
    threading.Thread(target=serve, args=(listening,), daemon=True).start()
    answers.write(json.dumps({"address": listening.getsockname()[:2]}) + "\n")
    answers.flush()
    sys.stdin.read()
    os._exit(0)  # threads of UCX do not end by themselves


if __name__ == "__main__":
    _main(sys.argv[1], sys.argv[2])
