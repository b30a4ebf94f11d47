"""The server's side of one connection: reads requests in order and answers them.

All carriers are served by `Connection.run`, a task of the event loop. Where a carrier reads ahead, and a message has
arrived as a whole, the event loop's call that has received it answers it at once, unless that has to wait for
something or takes long. Everything else is received by the task, and what takes long is done in threads.
"""

from __future__ import annotations

import asyncio
import logging
import struct
from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.errors import GearError, LockTimeoutError, TransportError
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.access import refusal
from gear_loader.transport.change_messages import MOST_PART, Part
from gear_loader.transport.channel import Channel
from gear_loader.transport.handlers import HANDLERS, Handler, Reply, store_one
from gear_loader.transport.learner_calls import LearnerCalls
from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.transport.queries import Query, open_query
from gear_loader.transport.resources import OpenParts, Resources, Threads, aligned
from gear_loader.transport.socket import AHEAD
from gear_loader.transport.spec import KINDS, read_spec
from gear_loader.transport.store_message import OneStore, Store
from gear_loader.transport.table_cache import AttachedTable
from gear_loader.transport.wire import HEADER, Header, Kind, ProtocolError, check, pack_error, pack_header
from gear_loader.utils.arrays import Array

_IN_LOOP = 1 << 18  # largest reply that is gathered in the event loop; a hand-over to a thread takes longer
_IN_LOOP_ALONE = 1 << 21  # the same while no other connection asks for many rows, which would have to wait
# Largest bulk part that is stored in the event loop while no other is received or stored.
_STORED_ALONE = 1 << 23
_IN_A_ROW = 8  # requests that are answered until other connections take their turn
_AT_A_TIME = 2  # requests of one connection that are executed in threads
_LEAD = ALIGNMENT  # bytes before a reply in its buffer; the last ones are for its header
_FETCH = struct.Struct("<II")
_NOTHING: Array = np.empty(0, dtype=np.uint8)
_log = logging.getLogger("gear_loader.transport")


class Connection:
    """An authenticated connection.

    Replies to FETCH use two buffers in turn: while one is sent, the next reply is gathered into the other.

    Attributes:
        receiving_since: `loop.time` when receiving the rest of a message began; None between messages.
        sending_since: `loop.time` when sending a message began; None between messages.
    """

    def __init__(self, channel: Channel, resources: Resources) -> None:
        self._channel = channel
        self._resources = resources
        self._limits = limits = resources.limits
        self._loop = asyncio.get_running_loop()
        self._queries: dict[int, Query | GearError] = {}
        self._head = memoryview(bytearray(HEADER))
        self._small: Array = np.empty(1 << 12, dtype=np.uint8)
        self._staging = [aligned(0), aligned(0)]  # a header before each reply
        self._turn = 0
        self._sending = asyncio.Lock()
        self._reply: asyncio.Task[None] | None = None  # a large reply that is being sent
        self._reply_turn = 0  # index of its buffer
        self._tasks: set[asyncio.Task[None]] = set()  # requests that are executed in threads
        self._parts = OpenParts(limits, resources.open_parts)
        self._rest: list[memoryview] | None = None  # of an answer that `_answer_some` has sent a part of
        self.receiving_since: float | None = None
        self.sending_since: float | None = None
        quick: dict[Kind, Callable[[Header, memoryview], memoryview | bytes | None]] = {
            **{kind: self._handle_ahead for kind, handler in HANDLERS.items() if handler.at_once},
            Kind.FETCH: self._fetch_ahead,
            Kind.STORE: self._store_ahead,
        }
        self._quick = {kind: call for kind, call in quick.items() if refusal(resources.allow, kind) is None}
        self._own: dict[Kind, Callable[[Header, Array], Any]] = {
            Kind.OPEN: self._open,
            Kind.FETCH: self._fetch,
            Kind.PART: self._keep_part,
            Kind.METADATA: self._describe,
            Kind.LEARN: self._learn,
        }
        bulk = dict.fromkeys((Kind.STORE, Kind.FILL, Kind.SET), limits.store_bytes) | {Kind.PART: MOST_PART}
        kinds = [messages.MESSAGES[kind] for kind in sorted((*HANDLERS, *self._own))]
        self._allowed = {each.kind: (each.most(limits), bulk.get(each.kind, 0)) for each in kinds}
        self._allowed[Kind.FETCH] = (
            messages.FETCH.most() + 8 * max(kind.FIELDS for kind in KINDS) * limits.rows,
            0,
        )
        self._allowed[Kind.BYE] = 0, 0

    async def run(self) -> None:
        """Serve until the requester sends BYE.

        Raises:
            ProtocolError: the requester violated the protocol. ConnectionError: the connection is closed.
        """
        try:
            while await self._serve_one():
                pass
            if self._reply is not None:
                await self._reply
            if self._tasks:
                await asyncio.wait(self._tasks)
        finally:
            await self._clean_up()

    async def _clean_up(self) -> None:
        tasks = [*self._tasks, *([self._reply] if self._reply is not None else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._parts.clear()
        self._queries.clear()
        self._staging.clear()

    def release(self) -> None:
        """Detach tables whose names were removed or replaced, and forget open trajectories that do not go on."""
        self._parts.expire()
        for opened in self._queries.values():
            if not isinstance(opened, GearError):
                opened.release()

    def is_stalled(self, now: float) -> bool:
        """Whether a message has been in transfer for longer than `Limits.patience`."""
        since = [each for each in (self.receiving_since, self.sending_since) if each is not None]
        return bool(since) and now - min(since) > self._limits.patience

    @property
    def is_sending(self) -> bool:
        """Whether a message is partly sent, so that no other message can follow."""
        return self.sending_since is not None

    # ---------------------------------------------------------------- one request

    async def _serve_one(self) -> bool:
        await self._channel.fill(self._answer_some)
        rest, self._rest = self._rest, None
        if rest is not None:
            await self._send_parts(*rest)
            await asyncio.sleep(0)  # others take their turn
            return True
        header, small = await self._receive()
        if header.kind is Kind.BYE:
            return False
        if header.kind in HANDLERS:
            await self._execute(header, HANDLERS[header.kind], small)
            return True
        return await self._own[header.kind](header, small) is not False

    async def _receive(self) -> tuple[Header, Array]:
        """Receive the header and the small part of the next message, and check what it may be."""
        await self._channel.recv_into(self._head)
        header = Header.parse(self._head)
        check(header, self._allowed, "after the handshake")
        why = refusal(self._resources.allow, header.kind)
        if why is not None:
            await self._send(header.request, Reply(Kind.ERROR, pack_error(TransportError(why))))
            raise ProtocolError(why)
        self.receiving_since = self._loop.time()
        small = self._small_buffer(header.small)
        if header.small:
            await self._channel.recv_into(small)
        self.receiving_since = None
        return header, small

    async def _execute(self, header: Header, handler: Handler, small: Array) -> None:
        """Receive the bulk part of a request, execute it, and answer."""
        message = handler.parse(small, header.bulk, self._limits)
        while handler.overlaps and len(self._tasks) >= _AT_A_TIME:
            await asyncio.wait(self._tasks, return_when=asyncio.FIRST_COMPLETED)
        data = await self._receive_bulk(header.bulk) if header.bulk else _NOTHING
        is_alone = header.bulk > 0 and self._resources.budget.held == header.bulk
        if isinstance(message, Store) and message.parts:
            parts = self._parts.take(int(message.ids[0]))
        elif handler.at_once and header.small + header.bulk <= (
            _STORED_ALONE if is_alone else handler.at_once
        ):
            reply = self._at_once(handler, message, data[: header.bulk])
            if reply is not None:
                self._give_bulk(header.bulk, data)
                await self._send(header.request, reply)
                return

        def work() -> Reply:
            given = message, data[: header.bulk]
            if isinstance(message, Store) and message.parts:
                given = message.joined(parts, data[: header.bulk])
            return handler.answer(self._resources.tables, *given, False)

        task = self._start(header, work, handler.what, message.table, changes=handler.changes)
        task.add_done_callback(lambda _: self._give_bulk(header.bulk, data))
        if not handler.overlaps:
            await asyncio.wait((task,))

    def _at_once(self, handler: Handler, message: Any, data: Array) -> Reply | None:
        """Execute a request in the event loop, which takes less time than in a thread; None if that has to do it."""
        try:
            return handler.answer(self._resources.tables, message, data, True)
        except Exception:  # it has to wait, or the thread meets the error too, and answers
            return None

    def _start(
        self, header: Header, work: Callable[[], Reply], what: str, table: str, *, changes: bool
    ) -> asyncio.Task[None]:
        """Begin to execute a request in a thread of its table, and to answer it."""

        async def execute() -> None:
            try:
                reply = await self._resources.threads(table, changes=changes).run(work)
            except Exception as error:
                await self._fail(header.request, error, f"{what} {table!r}")
                return
            await self._send(header.request, reply)

        task = asyncio.ensure_future(execute())
        self._tasks.add(task)
        task.add_done_callback(self._ended)
        return task

    def _ended(self, task: asyncio.Task[None]) -> None:
        self._tasks.discard(task)
        if not task.cancelled():
            task.exception()  # the connection is closed, and `run` ends, too

    # ---------------------------------------------------------------- messages that have arrived

    def _answer_some(self) -> bool:
        """Answer what was received ahead, in the event loop's call that has received it; whether to wait for more."""
        channel = self._channel
        for _ in range(_IN_A_ROW):
            ahead = channel.ahead()
            got = len(ahead)
            if not got:
                return True
            if got < HEADER:
                return self._waits_for_rest()
            header = Header.parse(ahead[:HEADER])
            size = HEADER + header.small + header.bulk
            quick = self._quick.get(header.kind)
            small, bulk = self._allowed[header.kind] if quick else (0, 0)
            if not quick or size > AHEAD or header.small > small or header.bulk > bulk or self._is_busy:
                return False
            if size > got:
                return self._waits_for_rest()
            self.receiving_since = None
            answer = quick(header, ahead[HEADER:size])
            if answer is None:
                return False
            channel.skip(size)
            rest = channel.send_some(answer)
            if rest:
                self._rest = rest
                return False
        self._rest = []
        return False

    def _waits_for_rest(self) -> bool:
        if self.receiving_since is None:
            self.receiving_since = self._loop.time()
        return True

    @property
    def _is_busy(self) -> bool:
        """Whether a request is being answered, so that no other may be answered before."""
        return bool(self._tasks) or not (self._reply is None or self._reply.done())

    def _fetch_ahead(self, header: Header, message: memoryview) -> memoryview | None:
        """The answer to a FETCH; None if it has to be waited for, or is an error."""
        small = self._small_buffer(header.small)
        small.data[:] = message
        try:
            out = self._gather_now(*self._asked(small))
        except GearError:
            return None
        if out is None:
            return None
        size = len(out)
        answer = self._staging[self._turn].data[_LEAD - HEADER : _LEAD + size]
        answer[:HEADER] = pack_header(Kind.REPLY, header.request, 0, size)
        return answer

    def _store_ahead(self, header: Header, message: memoryview) -> bytes | None:
        """The answer to a STORE; None if it has to be waited for, or is an error."""
        found = OneStore.parse(message[: header.small], header.bulk)
        if found is None:
            return self._handle_ahead(header, message)
        data: Array = np.frombuffer(message, np.uint8, header.bulk, header.small)
        try:
            stored = store_one(self._resources.tables, *found[:2], data, found[2])
        except Exception:  # it has to wait, or the thread meets the error too, and answers
            return None
        return pack_header(Kind.STORED, header.request, len(stored), 0) + stored

    def _handle_ahead(self, header: Header, message: memoryview) -> bytes | None:
        """The answer to another request; None if it has to be waited for, or is an error."""
        handler = HANDLERS[header.kind]
        if len(message) > handler.at_once:
            return None
        data = np.frombuffer(message, np.uint8, header.bulk, header.small) if header.bulk else _NOTHING
        try:
            asked = handler.parse(message[: header.small], header.bulk, self._limits)
        except ProtocolError:  # the connection's task meets it, too
            return None
        if isinstance(asked, Store) and asked.parts:
            return None
        reply = self._at_once(handler, asked, data)
        if reply is None:
            return None
        kind, answer, _ = reply  # these have no bulk part
        return pack_header(kind, header.request, len(answer), 0) + answer

    # ---------------------------------------------------------------- sending and receiving

    async def _fail(self, request: int, error: Exception, what: str) -> None:
        """Send an error to the requester; log it if it is internal."""
        if not isinstance(error, (GearError, OSError)):
            _log.error("%s failed: %s", what, error, exc_info=error)
        await self._send(request, Reply(Kind.ERROR, pack_error(error)))

    async def _send(self, request: int, reply: Reply) -> None:
        await self._send_parts(*_parts(request, reply))

    async def _send_parts(self, *parts: memoryview | Array, threads: Threads | None = None) -> None:
        """Send a message, or what is left of one; with `threads` as much of it there as goes without a long wait."""
        if parts:
            async with self._sending:
                self.sending_since = self._loop.time()
                if threads is not None:
                    parts = tuple(await threads.run(self._channel.sender(*parts)))
                await self._channel.send(*parts)
                self.sending_since = None

    def _small_buffer(self, size: int) -> Array:
        """Buffer for the small part of a message; the next message reuses it."""
        if size > len(self._small):
            self._small = np.empty(1 << (size - 1).bit_length(), dtype=np.uint8)
        return self._small[:size]

    async def _receive_bulk(self, size: int, *, kept: bool = False) -> Array:
        """Receive a bulk part when the budget has room for it; `_give_bulk` gives it back.

        Args:
            size: its bytes. kept: whether the memory is kept after the request.

        Returns:
            uint8 [size or more]; it belongs to the server's spare memory unless it is kept.
        """
        await self._resources.budget.take(size)  # the server waits for itself, not for the requester
        try:
            self.receiving_since = self._loop.time()
            data = aligned(size) if kept else self._resources.spare_memory.take(size)
            if size:
                await self._channel.recv_into(data[:size])
        except BaseException:
            self._resources.budget.give(size)
            raise
        self.receiving_since = None
        return data

    def _give_bulk(self, size: int, data: Array) -> None:
        """Give the memory of a bulk part back, which nothing refers to any longer."""
        if size:
            self._resources.budget.give(size)
            self._resources.spare_memory.give(data)

    async def _keep_part(self, header: Header, small: Array) -> None:
        part = Part.parse(small, header.bulk)
        data = await self._receive_bulk(header.bulk, kept=True)
        self._resources.budget.give(header.bulk)
        if self._parts.fits(part, header.bulk):
            self._parts.add(part, data)

    async def _describe(self, header: Header, small: Array) -> None:
        asked = messages.METADATA.parse(small)

        def describe() -> Reply:
            call = self._resources.metadata.get(asked.name)
            if call is None:
                raise TransportError(
                    f"This server has no metadata called {asked.name[:40]!r}; it has "
                    f"{', '.join(sorted(self._resources.metadata)) or 'nothing'}. Start it with that carrier."
                )
            return Reply(Kind.DESCRIBED, bulk=np.frombuffer(call(asked.table), np.uint8))

        what = f"metadata {asked.name[:40]!r} of"
        await asyncio.wait((self._start(header, describe, what, asked.table, changes=False),))

    # ---------------------------------------------------------------- learners

    async def _learn(self, header: Header, small: Array) -> bool:
        """Serve a learner, whose connection nothing else uses from then on; whether another request may follow."""
        calls = LearnerCalls(self._channel, self._resources)
        try:
            reply = await calls.open(small)
        except ProtocolError:
            raise
        except Exception as error:
            await self._fail(header.request, error, "a learner")
            return True
        await self._send(header.request, reply)
        await calls.serve()
        return False

    # ---------------------------------------------------------------- rows

    async def _open(self, header: Header, small: Array) -> None:
        opening = messages.OPEN.parse(small)
        number: int = opening.number
        if number >= self._limits.specs:
            raise ProtocolError(
                f"number of a message OPEN is {number}; expected less than {self._limits.specs}."
            )
        try:
            spec = read_spec(bytes(opening.spec))
            threads = self._resources.threads(spec.table, changes=False)
            self._queries[number] = await threads.run(lambda: open_query(spec, self._resources.tables))
            reply = Reply(Kind.OPENED, messages.OPENED.pack(number=number))
        except (GearError, OSError) as error:
            self._queries[number] = error if isinstance(error, GearError) else TransportError(str(error))
            reply = Reply(Kind.ERROR, pack_error(error))
        await self._earlier_reply()
        await self._send(header.request, reply)

    async def _fetch(self, header: Header, small: Array) -> None:
        try:
            opened, rows = self._asked(small)
            is_free = self._reply is None or self._reply.done()
            out = self._gather_now(opened, rows) if is_free else None
            is_quick = out is not None
            if out is None:
                out = await self._gather(opened, rows)
        except ProtocolError:
            raise
        except Exception as error:
            await self._earlier_reply()
            await self._fail(header.request, error, "a fetch")
            return
        await self._earlier_reply()
        parts = _parts(header.request, Reply(Kind.REPLY, bulk=out))
        if is_quick or len(out) <= _IN_LOOP:
            await self._send_parts(*parts)
            return
        sending = self._send_parts(*parts, threads=self._resources.gatherers)
        self._reply, self._reply_turn = asyncio.ensure_future(sending), self._turn

    def _asked(self, small: Array) -> tuple[Query, Array]:
        """The query of a FETCH, and its rows, int64 [FIELDS, n].

        Raises:
            ProtocolError: an invalid message. GearError: the query was refused.
        """
        if len(small) < _FETCH.size:
            raise ProtocolError(f"A message FETCH has {len(small)} bytes; expected at least {_FETCH.size}.")
        number, n = _FETCH.unpack_from(small.data)
        opened = self._queries.get(number)
        if isinstance(opened, Query) and n <= self._limits.rows:
            fields = opened.spec.FIELDS
            if len(small) == _FETCH.size + 8 * fields * n:
                return opened, np.ndarray((fields, n), np.int64, small.data, _FETCH.size)
        # A spec that was refused may have been of any kind.
        asked = (opened.spec,) if isinstance(opened, Query) else KINDS
        widths = [each.FIELDS for each in asked]
        if n > self._limits.rows or len(small) not in [_FETCH.size + 8 * width * n for width in widths]:
            raise ProtocolError(
                f"A message FETCH of {len(small):,} bytes has n {n:,}; expected at most {self._limits.rows:,}, and "
                f"{_FETCH.size} + {8 * widths[0]} n bytes."
            )
        if opened is None:
            raise ProtocolError(f"A message FETCH asks for the spec {number}, which was not opened.")
        assert isinstance(opened, GearError)
        raise opened

    async def _earlier_reply(self) -> None:
        """Wait until the reply before has been sent: requesters receive them in the order of their requests."""
        if self._reply is not None:
            await self._reply

    def _gather_now(self, opened: Query, rows: Array) -> Array | None:
        """Gather a reply in the event loop, while none is being sent; None if it is large, or would have to wait."""
        attached = opened.attached
        if attached is None or attached.is_dirty:
            return None
        size = opened.reply_bytes(rows)
        if size > _IN_LOOP_ALONE or size > self._limits.reply_bytes:
            return None
        if size > _IN_LOOP and not self._resources.is_alone(self, self._loop.time()):
            return None
        out = self._buffer(size)
        try:
            opened.read(attached, rows, out, at_once=True)
        except LockTimeoutError:
            return None
        return out

    async def _gather(self, opened: Query, rows: Array) -> Array:
        """Gather a reply in threads."""
        size = opened.reply_bytes(rows)
        if size > self._limits.reply_bytes:
            raise TransportError(
                f"{rows.shape[1]:,} rows make a reply of {size:,} bytes; this server sends at most "
                f"{self._limits.reply_bytes:,} at a time. Ask for fewer rows."
            )
        if self._reply is not None and self._reply_turn != self._turn:
            await self._reply
        out = self._buffer(size)
        waiters = self._resources.threads(opened.spec.table, changes=False)
        table = opened.attached
        if table is None:
            table = await waiters.run(opened.table)
        attached: AttachedTable = table
        if not attached.is_dirty:
            try:
                await self._resources.gatherers.run(lambda: opened.read(attached, rows, out, at_once=True))
                return out
            except LockTimeoutError:
                pass
        await waiters.run(lambda: opened.read(attached, rows, out, at_once=False))
        return out

    def _buffer(self, size: int) -> Array:
        """The next buffer for a reply."""
        self._turn = 1 - self._turn
        buffer = self._staging[self._turn]
        if _LEAD + size > len(buffer):
            buffer = self._staging[self._turn] = aligned(
                _LEAD + min(1 << (size - 1).bit_length(), self._limits.reply_bytes)
            )
        return buffer[_LEAD : _LEAD + size]


def _parts(request: int, reply: Reply) -> list[memoryview | Array]:
    """The parts of a message that are not empty."""
    kind, small, bulk = reply
    size = 0 if bulk is None else bulk.nbytes
    parts: list[memoryview | Array] = [memoryview(pack_header(kind, request, len(small), size))]
    if small:
        parts.append(memoryview(small))
    if bulk is not None and size:
        parts.append(bulk)
    return parts
