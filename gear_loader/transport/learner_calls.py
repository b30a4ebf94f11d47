"""The server's side of a learner's connection: a thread of its own receives calls, executes them, and answers."""

from __future__ import annotations

import asyncio
import collections
import contextlib
import json
import socket
import struct
from typing import TYPE_CHECKING, NamedTuple

import numpy as np

from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Channel
from gear_loader.transport.handlers import Reply
from gear_loader.transport.learner_pipe import LoopPipe, Pipe
from gear_loader.transport.resources import Resources
from gear_loader.transport.wire import HEADER, Header, Kind, ProtocolError, check, pack_header
from gear_loader.utils.arrays import Array
from gear_loader.utils.background import background_thread
from gear_loader.utils.provided import provided

if TYPE_CHECKING:
    from gear_loader.transport.learner import Learner

MOST_CALLS = 64
"""Most calls of a learner without an answer."""
_IDLE = 1.0  # seconds of a call of the socket, after which the thread looks whether it is still needed
_CALL = struct.Struct("<QQII")
_NOTHING: Array = np.empty(0, dtype=np.uint8)


class _Received(NamedTuple):
    """A call as it was received: its number, or 0; whether the learner maps files; its JSON, and the tensors' bytes."""

    number: int
    maps: bool
    text: bytes
    data: Array


class LearnerCalls:
    """The calls of one connection, which nothing else uses from LEARN on.

    Args:
        channel: the connection. resources: of the server.
    """

    def __init__(self, channel: Channel, resources: Resources) -> None:
        self._channel = channel
        self._resources = resources
        self._loop = asyncio.get_running_loop()
        self._learner: Learner | None = None
        self._received = 0
        self._released: list[int] = []  # numbers of answers to whose files the learner refers no more
        self._ended = False
        self._pipe: Pipe | None = None
        limits = resources.limits
        self._allowed = {
            Kind.CALL: (messages.CALL.most(limits), limits.store_bytes),
            Kind.BYE: (0, 0),
        }
        self._read: collections.deque[_Received] = collections.deque()  # calls that wait

    async def open(self, small: Array) -> Reply:
        """Answer LEARN.

        Raises:
            GearError: the options are invalid for the table, or it is not served.
        """
        asked = messages.LEARN.parse(small)
        resources, limits = self._resources, self._resources.limits

        def begin() -> bytes:
            # Attached through the cache, so that all learners share one mapping.
            table = resources.tables.open(asked.table).table
            try:
                options = json.loads(bytes(asked.options))
            except (ValueError, RecursionError) as error:
                raise ProtocolError(f"The options of a message LEARN are no JSON ({error}).") from None

            files = resources.files if self._channel.is_local else None

            def make() -> Learner:
                made: Learner = provided("Learner")(
                    table,
                    options,
                    resources.learners.epochs(provided("SharedEpochs")),
                    allow=resources.allow,
                    most_bytes=limits.learner_bytes,
                    wait=asked.wait / 1e3,
                    files=files,
                )
                made.begin(max(1, asked.first))
                return made

            self._learner, known = resources.learners.take(bytes(asked.identity), self, make)
            described = self._learner.described() | {"files": None if files is None else files.describe()}
            return messages.LEARNING.pack(known=known, described=json.dumps(described).encode())

        reply = Reply(Kind.LEARNING, await resources.threads(asked.table, changes=False).run(begin))
        self._received = max(0, asked.first - 1)
        return reply

    async def serve(self) -> None:
        """Execute calls until the learner says goodbye.

        Raises:
            ProtocolError: the learner violated the protocol. ConnectionError: the connection is closed.
        """
        found = self._channel.detached()
        if found is None:
            self._pipe = LoopPipe(self._channel, self._loop)
        else:
            self._pipe = Pipe(found[0], _IDLE, self._look, found[1])
        done = self._loop.create_future()

        def finish(error: BaseException | None) -> None:
            if not done.done():
                done.set_result(None) if error is None else done.set_exception(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                self._work()
            except Exception as wrong:
                error = wrong
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(finish, error)

        background_thread(work, "gear-loader-learner", stop=self._end).start()
        bye = False
        try:
            await done
            bye = True
        finally:
            self._close(bye=bye)

    def _end(self) -> None:
        """Let the thread end."""
        self._ended = True
        if isinstance(self._pipe, Pipe) and not isinstance(self._pipe, LoopPipe):
            _shut(self._pipe.connection)

    def _close(self, *, bye: bool) -> None:
        self._end()
        learner = self._learner
        if learner is None:
            return
        self._resources.learners.left(learner, self)
        if bye:
            background_thread(self._resources.learners.end, "gear-loader-learner", args=(learner,)).start()

    # ---------------------------------------------------------------- the thread

    def _look(self) -> None:
        if self._ended:
            raise ConnectionAbortedError("The connection was closed on this side.")

    def _work(self) -> None:
        learner, pipe = self._learner, self._pipe
        assert learner is not None
        assert pipe is not None
        try:
            while True:
                call = self._read.popleft() if self._read else self._next(pipe)
                if call is None:
                    return
                if not call.number:
                    self._forget(learner)
                    continue
                while self._is_full(learner):
                    more = self._next(pipe)  # which may say that answers have arrived
                    if more is None:
                        return
                    if more.number:
                        self._read.append(more)
                    size = sum(len(each.data) for each in self._read)
                    if len(self._read) > MOST_CALLS or size > self._resources.limits.store_bytes:
                        raise ProtocolError(
                            f"{len(self._read)} calls of a learner with {size:,} bytes wait for their answers; at "
                            f"most {MOST_CALLS} are taken."
                        )
                asked = learner.read(*call)
                answer = learner.execute(self, asked, pipe.has_ended)
                if answer is None:
                    raise ConnectionAbortedError("The learner has left, or goes on over another connection.")
                head = pack_header(answer.kind, answer.number, len(answer.small), answer.size)
                pipe.send([head + answer.small, *answer.parts])
        except OSError:
            if not self._said_goodbye(pipe):
                raise
        finally:
            pipe.close()

    def _said_goodbye(self, pipe: Pipe) -> bool:
        """Whether a learner that sends no more has said goodbye, behind its last calls."""
        with contextlib.suppress(OSError):
            while pipe.has_ended():
                if self._next(pipe) is None:
                    return True
        return False

    def _is_full(self, learner: Learner) -> bool:
        """Whether the learner has to receive some of what is kept for it before there is more."""
        self._forget(learner)
        return learner.is_full

    def _forget(self, learner: Learner) -> None:
        learner.forget(self._received, self._released)
        self._released.clear()

    def _next(self, pipe: Pipe) -> _Received | None:
        """Receive a call; None if the learner says goodbye."""
        head = memoryview(bytearray(HEADER))
        pipe.receive(head)
        header = Header.parse(head)
        check(header, self._allowed, "from a learner")
        if header.kind is Kind.BYE:
            return None
        small = memoryview(bytearray(header.small))
        pipe.receive(small)
        if len(small) < _CALL.size:
            raise ProtocolError(f"A message CALL has {len(small)} bytes; expected at least {_CALL.size}.")
        number, received, flags, count = _CALL.unpack_from(small)
        begin = _CALL.size + 8 * count
        if count > self._resources.limits.rows or begin > len(small):
            raise ProtocolError(f"A message CALL of {len(small):,} bytes names {count:,} answers.")
        self._released.extend(np.frombuffer(small, "<u8", count, _CALL.size).tolist())
        if received > self._received:
            self._received = received
        data = np.empty(header.bulk, dtype=np.uint8) if header.bulk else _NOTHING
        pipe.receive(data.data)
        return _Received(number, bool(flags & 1), bytes(small[begin:]), data)


def _shut(connection: socket.socket) -> None:
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)  # the thread that waits gets an error
