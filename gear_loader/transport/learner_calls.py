"""The server's side of a learner's connection: a thread executes its calls, the event loop sends the answers."""

from __future__ import annotations

import asyncio
import collections
import json
import logging
import queue
import threading
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from gear_loader.errors import GearError, TransportError
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.channel import Bytes
from gear_loader.transport.handlers import Reply
from gear_loader.transport.resources import Resources
from gear_loader.transport.wire import Kind, ProtocolError, pack_error, pack_header
from gear_loader.utils.arrays import Array
from gear_loader.utils.provided import provided

if TYPE_CHECKING:
    from gear_loader.transport.learner import Learner, LearnerAnswer

MOST_CALLS = 64
"""Most calls of a learner without an answer."""
_JOINED = 1 << 16  # most bytes of answers that are sent as one piece
_LOOK = 1.0  # seconds between the looks of a thread that waits for room
_log = logging.getLogger("gear_loader.transport")


class LearnerCalls:
    """The calls of one connection, and their answers.

    Args:
        resources: of the server. send: sends messages, whose parts it is given, in order.
        lost: ends the connection.
    """

    def __init__(
        self,
        resources: Resources,
        send: Callable[..., Awaitable[None]],
        lost: Callable[[], Awaitable[None]],
    ) -> None:
        self._resources = resources
        self._send, self._lost = send, lost
        self._loop = asyncio.get_running_loop()
        self._learner: Learner | None = None
        self._inbox: queue.SimpleQueue[tuple[int, bytes, Array, int] | None] = queue.SimpleQueue()
        self._waiting = 0  # calls in the inbox
        self._received = 0
        self._arrived = threading.Event()  # set when an answer has arrived
        self._outbox: collections.deque[LearnerAnswer] = collections.deque()
        self._awake = False  # whether `_send_some` is to run
        self._sender: asyncio.Task[None] | None = None
        self._ended = False

    async def open(self, small: Array) -> Reply:
        """Answer LEARN.

        Raises:
            GearError: the options are invalid for the table, or it is not served.
        """
        asked = messages.LEARN.parse(small)
        if self._learner is not None:
            raise ProtocolError("A message LEARN came again on the same connection.")
        resources, limits = self._resources, self._resources.limits

        def begin() -> bytes:
            # Attached through the cache, so that all learners share one mapping.
            table = resources.tables.open(asked.table).table
            try:
                options = json.loads(bytes(asked.options))
            except ValueError as error:
                raise ProtocolError(f"The options of a message LEARN are no JSON ({error}).") from None

            def make() -> Learner:
                made: Learner = provided("Learner")(
                    table,
                    options,
                    allow=resources.allow,
                    most_bytes=limits.learner_bytes,
                    wait=asked.wait / 1e3,
                )
                made.begin(max(1, asked.first))
                return made

            self._learner, known = resources.learners.take(bytes(asked.identity), self, make)
            described = json.dumps(self._learner.described()).encode()
            return messages.LEARNING.pack(known=known, described=described)

        reply = Reply(Kind.LEARNING, await resources.threads(asked.table, changes=False).run(begin))
        self._received = max(0, asked.first - 1)
        threading.Thread(target=self._work, name="gear-loader-learner", daemon=True).start()
        return reply

    def add(self, small: Array, data: Array, bulk: int) -> None:
        """Take a CALL.

        Raises:
            ProtocolError: invalid, or too many at a time.
        """
        asked = messages.CALL.parse(small)
        if self._learner is None:
            raise ProtocolError("A message CALL came before LEARN.")
        if self._waiting >= MOST_CALLS:
            raise ProtocolError(f"More than {MOST_CALLS} calls of a learner wait for their answers.")
        self._waiting += 1
        if asked.received > self._received:
            self._received = asked.received
            self._arrived.set()
        self._inbox.put((asked.number, bytes(asked.call), data[:bulk], bulk))

    # ---------------------------------------------------------------- the thread

    def _work(self) -> None:
        learner = self._learner
        assert learner is not None
        try:
            while (taken := self._inbox.get()) is not None:
                number, text, data, bulk = taken
                if not self._room(learner):
                    return
                answer = learner.execute(self, learner.read(number, self._received, text, data))
                self._soon(self._executed, bulk)
                if answer is None:
                    break
                self._outbox.append(answer)
                if not self._awake:
                    self._awake = True
                    self._soon(self._wake)
        except ProtocolError as error:
            _log.warning("closed a learner: %s", error)
        except Exception as error:  # of this learner; others go on
            _log.error("A call of a learner failed: %s", error, exc_info=error)
        self._soon(self._end)

    def _room(self, learner: Learner) -> bool:
        """Wait until the learner has received enough of what is kept for it; whether the connection goes on."""
        most = self._resources.limits.learner_bytes
        while learner.kept_bytes and learner.kept_bytes + learner.largest > most:
            self._arrived.wait(_LOOK)
            self._arrived.clear()
            learner.forget(self._received)
            if self._ended:
                return False
        return not self._ended

    def _soon(self, call: Callable[..., object], *given: object) -> None:
        try:
            self._loop.call_soon_threadsafe(call, *given)
        except RuntimeError:
            self._ended = True  # the loop has ended

    def _executed(self, bulk: int) -> None:
        self._waiting -= 1
        if bulk:
            self._resources.budget.give(bulk)

    # ---------------------------------------------------------------- sending

    def _wake(self) -> None:
        self._awake = False
        if self._outbox and (self._sender is None or self._sender.done()) and not self._ended:
            self._sender = asyncio.ensure_future(self._send_some())

    async def _send_some(self) -> None:
        """Send the answers there are."""
        while self._outbox:
            parts: list[Bytes | bytes] = []
            size = 0
            while self._outbox and size < _JOINED:
                answer = self._outbox.popleft()
                size += answer.size + len(answer.small)
                head = pack_header(answer.kind, answer.number, len(answer.small), answer.size)
                parts += [head, answer.small, *answer.parts]
            if size <= _JOINED:
                await self._send(b"".join(parts))  # type: ignore[arg-type]
            else:
                await self._send(*parts, threads=self._resources.gatherers)

    def _end(self) -> None:
        if not self._ended:
            self._ended = True
            asyncio.ensure_future(self._lost())

    async def close(self, *, bye: bool) -> None:
        """The connection has ended; with `bye` the learner does not come again."""
        self._ended = True
        self._inbox.put(None)
        self._arrived.set()
        if self._sender is not None:
            self._sender.cancel()
            await asyncio.gather(self._sender, return_exceptions=True)
        learner = self._learner
        if learner is None:
            return
        self._resources.learners.left(learner, self)
        if bye:
            ended = learner
            await self._resources.gatherers.run(lambda: self._resources.learners.end(ended, None))


def error_reply(error: Exception) -> Reply:
    """ERROR of a LEARN that was refused."""
    return Reply(
        Kind.ERROR, pack_error(error if isinstance(error, GearError) else TransportError(str(error)))
    )
