"""The server's side of one connection: reads requests in order and answers them."""

from __future__ import annotations

import asyncio
import contextlib
import struct
import threading
from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from gear_loader.errors import GearError, LockTimeoutError, TransportError
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.access import refusal
from gear_loader.transport.change_messages import Advance, Advanced, Fill, Part, Unfilled, Update
from gear_loader.transport.channel import Channel, as_bytes
from gear_loader.transport.open_packed import OpenPacked
from gear_loader.transport.open_query import OpenQuery
from gear_loader.transport.part_message import MOST_PART, OpenParts
from gear_loader.transport.socket import AHEAD, AHEAD_LENT
from gear_loader.transport.spare_memory import aligned
from gear_loader.transport.spec import PackedSpec, WindowSpec, read_spec
from gear_loader.transport.store_message import OneStore, Store
from gear_loader.transport.wire import HEADER, Header, Kind, Limits, ProtocolError, check, pack_error
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.transport.server import Server, Threads

__all__ = ["SCRATCH", "Connection"]

_T = TypeVar("_T")


_IN_LOOP = 1 << 21  # largest reply that is gathered in the event loop; a hand-over to a thread takes longer
_STORED_IN_LOOP = 1 << 20  # largest bulk part that is stored in the event loop, as replies are gathered
_STORED_ALONE = 1 << 23  # the same while no other bulk part is received or stored, which would have to wait
_STORED_AHEAD = 1 << 18  # largest bulk part of a message that is received and stored in one go
SCRATCH = _STORED_AHEAD + AHEAD
"""Bytes of the largest message with such a part: what comes before it is received ahead."""
_LOOKS = 4  # at a message that has not arrived as a whole, until the connection's task receives it in pieces
_OVERLAPPED = 1 << 18  # smallest reply that is sent while the next one is gathered
_IN_A_ROW = 8  # requests that are answered until other connections take their turn
_THREADS = 32  # connections of a server that are served in threads
_STORES = 2  # concurrent stores of one connection
_FETCH = struct.Struct("<II")


class Connection:
    """An authenticated connection.

    Replies use two buffers in turn: while one is sent, the next reply is gathered into the other.

    Attributes:
        receiving_since: `loop.time` when receiving the rest of a message began; None between messages.
        sending_since: `loop.time` when sending a message began; None between messages.
    """

    def __init__(self, channel: Channel, server: Server) -> None:
        self._channel = channel
        self._server = server
        self._limits: Limits = server.limits
        self._loop = asyncio.get_running_loop()
        self._queries: dict[int, OpenQuery | OpenPacked | GearError] = {}
        self._head = memoryview(bytearray(HEADER))
        self._small = np.empty(1 << 12, dtype=np.uint8)
        self._staging = [aligned(0), aligned(0)]
        self._turn = 0
        self._in_thread = False
        self._answered = 0  # requests, without waiting for the next one
        self._sending = asyncio.Lock()
        self._reply: asyncio.Task[None] | None = None  # a large reply that is being sent
        self._reply_turn = 0  # index of its buffer
        self._stores: set[asyncio.Task[None]] = set()
        self._parts = OpenParts(self._limits, server.open_parts)
        self._rest: list[memoryview] | None = None  # of an answer that `_answer_at_once` has sent a part of
        self._kept: tuple[Header, Array, Array] | None = None  # a STORE that `_store_ahead` has taken
        self._waits_for_rest = (
            False  # whether `_answer_ahead` has seen a part of a message, and is to look again
        )
        self._looks = 0  # at such a message, until now
        self.receiving_since: float | None = None
        self.sending_since: float | None = None
        limits = self._limits
        self._allowed = {
            Kind.OPEN: (messages.OPEN.most(), 0),
            Kind.FETCH: (messages.FETCH.most() + 8 * PackedSpec.FIELDS * limits.rows, 0),
            Kind.STORE: (messages.STORE.most(limits), limits.store_bytes),
            Kind.METADATA: (messages.METADATA.most(), 0),
            Kind.UPDATE: (messages.UPDATE.most(limits), 0),
            Kind.FILL: (messages.FILL.most(limits), limits.store_bytes),
            Kind.UNFILLED: (messages.UNFILLED.most(), 0),
            Kind.ADVANCE: (messages.ADVANCE.most(), 0),
            Kind.PART: (messages.PART.most(), MOST_PART),
            Kind.BYE: (0, 0),
        }

    async def run(self) -> None:
        """Serve until the requester sends BYE.

        Raises:
            ProtocolError: the requester violated the protocol. ConnectionError: the connection is closed.
        """
        try:
            while await self._serve_one():
                if self._in_thread and not self._is_busy:
                    await self._serve_in_thread()
            if self._reply is not None:
                await self._reply
            if self._stores:
                await asyncio.wait(self._stores)
        finally:
            if self._in_thread:
                self._server.reading_threads -= 1
            await self._clean_up()

    async def _clean_up(self) -> None:
        tasks = [*self._stores, *([self._reply] if self._reply is not None else [])]
        for task in tasks:
            task.cancel()
        if self._kept is not None:
            header, _, data = self._kept
            self._give_bulk(header.bulk, data)
            self._kept = None
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
        channel = self._channel
        await channel.fill(None if self._in_thread else self._answer_at_once)
        rest, self._rest = self._rest, None
        if rest is None and self._kept is None:
            rest = self._answer_ahead()
        if self._kept is not None:
            self._go_on_storing(*self._kept)
            return True
        if rest is not None:
            await self._finish(rest)
            return True
        await channel.recv_into(self._head)
        header = Header.parse(self._head)
        check(header, self._allowed, "after the handshake")
        why = refusal(self._server.allow, header.kind)
        if why is not None:
            await self._send(Kind.ERROR, header.request, pack_error(TransportError(why)))
            raise ProtocolError(why)
        self.receiving_since = self._loop.time()
        small = self._small_buffer(header.small)
        if header.small:
            await channel.recv_into(small)
        if header.kind is Kind.FETCH:
            self.receiving_since = None
            await self._fetch(header.request, small)
        elif header.kind is Kind.STORE:
            await self._begin_store(header, small)
        elif header.kind is Kind.PART:
            await self._keep_part(header, small)
        elif header.kind is Kind.FILL:
            await self._fill(header, small)
        else:
            self.receiving_since = None
            if header.kind is Kind.BYE:
                return False
            if header.kind is Kind.OPEN:
                await self._open(header.request, small)
            elif header.kind is Kind.UPDATE:
                await self._update(header.request, small)
            elif header.kind is Kind.UNFILLED:
                await self._list_unfilled(header.request, small)
            elif header.kind is Kind.ADVANCE:
                await self._advance(header.request, small)
            else:
                await self._describe(header.request, small)
        return True

    def _answer_at_once(self) -> bool:
        """Answer what was received ahead, in the event loop's call that has received it; whether to wait for more."""
        for _ in range(_IN_A_ROW):
            rest = self._answer_ahead()
            if rest is None:
                return self._waits_for_rest
            if rest:
                self._rest = rest
                return False
            if not len(self._channel.ahead()):
                return True
        return False

    def _answer_ahead(self, *, waits: bool = False) -> list[memoryview] | None:
        """Answer a FETCH or STORE that has been received as a whole, in one go; return what is left of the answer.

        None, having done nothing, for other messages, and where something has to be waited for or reported.

        Args:
            waits: whether to wait for the table's lock; then only FETCH is answered.
        """
        self._waits_for_rest = False
        ahead = self._channel.ahead()
        # Nothing else may be sending, or wait for it: a part of the answer may be left, which has to come next.
        if len(ahead) < HEADER + _FETCH.size or self._is_busy:
            return None
        header = Header.parse(ahead[:HEADER])
        end = HEADER + header.small
        if header.kind is Kind.STORE and not waits:
            return self._store_ahead(header, ahead)
        if header.kind is not Kind.FETCH or header.bulk or header.small < _FETCH.size or len(ahead) < end:
            return None
        number, n = _FETCH.unpack_from(ahead, HEADER)
        opened = self._queries.get(number)
        if header.small != _FETCH.size + 24 * n or n > self._limits.rows or not isinstance(opened, OpenQuery):
            return None
        attached, size = opened.attached, opened.spec.reply_bytes(n)
        most = min(_IN_LOOP if self._in_thread else _OVERLAPPED, self._limits.reply_bytes)
        if attached is None or attached.is_dirty or size > most:
            return None
        if refusal(self._server.allow, header.kind) is not None:
            return None
        small = self._small_buffer(header.small)
        small.data[:] = ahead[HEADER:end]
        out = self._next_buffer(size)
        try:
            opened.read(attached, small[_FETCH.size :].view(np.int64).reshape(3, n), out, at_once=not waits)
        except GearError:  # the lock is held, or the answer is an error
            return None
        self._channel.skip(end)
        return self._channel.send_some(memoryview(Header(Kind.REPLY, header.request, 0, size).pack()), out)

    # ---------------------------------------------------------------- in a thread

    @property
    def _is_busy(self) -> bool:
        """Whether an answer is still to be sent."""
        return bool(self._stores) or not (self._reply is None or self._reply.done())

    def _begin_thread(self) -> None:
        """Answer small requests in a thread from now on, which takes less time than the event loop, if there is one."""
        if self._channel.can_lend and not self._in_thread and self._server.reading_threads < _THREADS:
            self._server.reading_threads += 1
            self._in_thread = True

    def _end_thread(self) -> None:
        if self._in_thread:
            self._server.reading_threads -= 1
            self._in_thread = False

    async def _serve_in_thread(self) -> None:
        """Let a thread answer requests until there is one that the event loop has to answer."""
        done = self._loop.create_future()

        def end(error: BaseException | None) -> None:
            if error is None:
                done.set_result(None)
            else:
                done.set_exception(error)

        def work() -> None:
            error: BaseException | None = None
            try:
                self._answer_in_thread()
            except BaseException as wrong:
                error = wrong
            with contextlib.suppress(RuntimeError):  # the loop has ended
                self._loop.call_soon_threadsafe(end, error)

        async with self._channel.lend():
            threading.Thread(target=work, name="gear-loader-rows", daemon=True).start()
            try:
                await asyncio.shield(done)
            except asyncio.CancelledError:
                self._channel.interrupt()  # the thread then comes back
                await asyncio.wait([done])
                done.exception()
                raise

    def _answer_in_thread(self) -> None:
        while True:
            rest = self._answer_ahead(waits=True)
            if rest is None:
                if self._is_partial:
                    if self.receiving_since is None and len(self._channel.ahead()):
                        self.receiving_since = self._loop.time()
                    if self._channel.receive_more():
                        continue
                self.receiving_since = None
                return
            self.receiving_since = None
            if rest:
                self.sending_since = self._loop.time()
                while rest:
                    self._channel.wait_to_send()
                    rest = self._channel.send_some(*rest)
                self.sending_since = None

    @property
    def _is_partial(self) -> bool:
        """Whether a FETCH, or the header of a message, has not been received as a whole."""
        ahead = self._channel.ahead()
        if len(ahead) < HEADER:
            return True
        header = Header.parse(ahead[:HEADER])
        return header.kind is Kind.FETCH and len(ahead) < HEADER + header.small

    async def _finish(self, rest: list[memoryview]) -> None:
        """Send what is left of an answer."""
        if rest:
            async with self._sending:
                self.sending_since = self._loop.time()
                await self._channel.send(*rest)
                self.sending_since = None
        await self._take_turns()

    async def _take_turns(self) -> None:
        """Let other connections take their turn after some answers in a row."""
        self._answered += 1
        if self._answered % _IN_A_ROW == 0:
            await asyncio.sleep(0)

    def _small_buffer(self, size: int) -> Array:
        """Buffer for the small part of a message; the next message reuses it."""
        if size > len(self._small):
            self._small = np.empty(1 << (size - 1).bit_length(), dtype=np.uint8)
        return self._small[:size]

    async def _open(self, request: int, small: Array) -> None:
        opening = messages.OPEN.parse(small)
        number: int = opening.number
        if number >= self._limits.specs:
            raise ProtocolError(
                f"number of a message OPEN is {number}; expected less than {self._limits.specs}."
            )
        try:
            spec = read_spec(bytes(opening.spec))
            tables = self._server.tables

            def attach() -> OpenQuery | OpenPacked:
                return OpenPacked(spec, tables) if isinstance(spec, PackedSpec) else OpenQuery(spec, tables)

            opened = await self._server.waiters(spec.table).run(attach)
        except (GearError, OSError) as error:
            self._queries[number] = error if isinstance(error, GearError) else TransportError(str(error))
            await self._earlier_reply()
            await self._send(Kind.ERROR, request, pack_error(error))
            return
        self._queries[number] = opened
        self._begin_thread()
        await self._earlier_reply()
        await self._send(Kind.OPENED, request, messages.OPENED.pack(number=number))

    async def _describe(self, request: int, small: Array) -> None:
        asked = messages.METADATA.parse(small)
        name, table = asked.name, asked.table
        call = self._server.metadata.get(name)
        try:
            threads = self._server.waiters(table)
            if call is None:
                raise TransportError(
                    f"This server has no metadata called {name[:40]!r}; it has "
                    f"{', '.join(sorted(self._server.metadata)) or 'nothing'}. Start it with that carrier."
                )
            found = call
            answer = await threads.run(lambda: found(table))
        except Exception as error:
            await self._fail(request, error, f"metadata {name[:40]!r} of {table!r}")
            return
        await self._send(Kind.DESCRIBED, request, b"", memoryview(answer))

    async def _update(self, request: int, small: Array) -> None:
        update = Update.parse(small, self._limits)
        server = self._server

        def work() -> int:
            return server.tables.get(update.table).revise(update)

        stale = await self._run(server.writers, update.table, work, request, "setting priorities in")
        if stale is not None:
            await self._send(Kind.UPDATED, request, messages.UPDATED.pack(stale=stale))

    async def _fill(self, header: Header, small: Array) -> None:
        fill = Fill.parse(small.copy(), header.bulk, self._limits)
        data = await self._receive_bulk(header.bulk)
        server = self._server

        def work() -> int:
            return server.tables.get(fill.table).fill(fill, data[: header.bulk])

        try:
            stale = await self._run(server.writers, fill.table, work, header.request, "filling columns of")
        finally:
            self._give_bulk(header.bulk, data)
        if stale is not None:
            await self._send(Kind.FILLED, header.request, messages.FILLED.pack(stale=stale))

    async def _list_unfilled(self, request: int, small: Array) -> None:
        asked = Unfilled.parse(small)
        server = self._server

        def look() -> Array:
            return np.stack(server.tables.get(asked.table).table.unfilled(*asked.names)).astype("<i8")

        found = await self._run(server.waiters, asked.table, look, request, "unfilled trajectories of")
        if found is not None:
            await self._send(Kind.DESCRIBED, request, b"", found)

    async def _advance(self, request: int, small: Array) -> None:
        advance = Advance.parse(small)
        server = self._server

        def work() -> Advanced:
            return server.tables.get(advance.table).advance(advance)

        advanced = await self._run(server.writers, advance.table, work, request, "advancing the version of")
        if advanced is not None:
            await self._send(Kind.ADVANCED, request, advanced.pack())

    async def _run(
        self, threads: Callable[[str], Threads], table: str, work: Callable[[], _T], request: int, what: str
    ) -> _T | None:
        """The result of a call in one of the table's threads; None if it failed, and the requester was told."""
        try:
            return await threads(table).run(work)
        except Exception as error:
            await self._fail(request, error, f"{what} {table!r}")
            return None

    async def _fail(self, request: int, error: Exception, what: str) -> None:
        """Send an error to the requester; log it if it is internal."""
        if not isinstance(error, (GearError, OSError)):
            self._server.log.error("%s failed: %s", what, error, exc_info=error)
        await self._send(Kind.ERROR, request, pack_error(error))

    async def _send(
        self, kind: Kind, request: int, small: bytes, bulk: memoryview | Array | None = None
    ) -> None:
        size = 0 if bulk is None else bulk.nbytes
        parts = [memoryview(Header(kind, request, len(small), size).pack())]
        if small:
            parts.append(memoryview(small))
        async with self._sending:
            self.sending_since = self._loop.time()
            if bulk is not None and size:
                await self._channel.send(*parts, bulk)
            else:
                await self._channel.send(*parts)
            self.sending_since = None

    # ---------------------------------------------------------------- fetching

    async def _fetch(self, request: int, small: Array) -> None:
        if len(small) < _FETCH.size:
            raise ProtocolError(f"A message FETCH has {len(small)} bytes; expected at least {_FETCH.size}.")
        number, n = _FETCH.unpack_from(as_bytes(small))
        opened = self._queries.get(number)
        # A spec that was refused may have been of either kind.
        widths = [WindowSpec.FIELDS, PackedSpec.FIELDS]
        if opened is not None and not isinstance(opened, GearError):
            widths = [opened.spec.FIELDS]
        if n > self._limits.rows or len(small) not in [_FETCH.size + 8 * width * n for width in widths]:
            raise ProtocolError(
                f"A message FETCH of {len(small):,} bytes has n {n:,}; expected at most {self._limits.rows:,}, and "
                f"{_FETCH.size} + {8 * widths[0]} n bytes."
            )
        if opened is None:
            raise ProtocolError(f"A message FETCH asks for the spec {number}, which was not opened.")
        try:
            if isinstance(opened, GearError):
                raise opened
            rows = small[_FETCH.size :].view(np.int64).reshape(opened.spec.FIELDS, n)
            out = await self._gather(opened, rows)
        except Exception as error:
            await self._earlier_reply()
            await self._fail(request, error, "a fetch")
            return
        await self._earlier_reply()
        if len(out) > _IN_LOOP or HEADER + len(small) > AHEAD_LENT:
            self._end_thread()
        if len(out) <= _OVERLAPPED:
            await self._send(Kind.REPLY, request, b"", out)
            return
        self._reply, self._reply_turn = (
            asyncio.ensure_future(self._send(Kind.REPLY, request, b"", out)),
            self._turn,
        )

    async def _earlier_reply(self) -> None:
        """Wait until the reply before has been sent: requesters receive them in the order of their requests."""
        if self._reply is not None:
            await self._reply

    async def _gather(self, opened: OpenQuery | OpenPacked, rows: Array) -> Array:
        """Gather a reply into the next buffer and return it."""
        size = opened.reply_bytes(rows)
        if size > self._limits.reply_bytes:
            raise TransportError(
                f"{rows.shape[1]:,} rows make a reply of {size:,} bytes; this server sends at most "
                f"{self._limits.reply_bytes:,} at a time. Ask for fewer rows."
            )
        out = await self._buffer(size)
        waiters = self._server.waiters(opened.spec.table)
        attached = opened.table() if opened.is_attached else await waiters.run(opened.table)

        def read(*, at_once: bool) -> None:
            opened.read(attached, rows, out, at_once=at_once)

        if not attached.is_dirty:
            try:
                if size <= _IN_LOOP:
                    read(at_once=True)
                else:
                    await self._server.gatherers.run(lambda: read(at_once=True))
                return out
            except LockTimeoutError:
                pass
        await waiters.run(lambda: read(at_once=False))
        return out

    async def _buffer(self, size: int) -> Array:
        self._turn = 1 - self._turn
        if self._reply is not None and self._turn == self._reply_turn:
            await self._reply
        return self._this_buffer(size)

    def _next_buffer(self, size: int) -> Array:
        """As `_buffer`, while no reply is being sent."""
        self._turn = 1 - self._turn
        return self._this_buffer(size)

    def _this_buffer(self, size: int) -> Array:
        buffer = self._staging[self._turn]
        if size > len(buffer):
            buffer = self._staging[self._turn] = aligned(
                min(1 << (size - 1).bit_length(), self._limits.reply_bytes)
            )
        return buffer[:size]

    # ---------------------------------------------------------------- storing

    async def _keep_part(self, header: Header, small: Array) -> None:
        part = Part.parse(small, header.bulk)
        data = await self._receive_bulk(header.bulk, kept=True)
        self._server.budget.give(header.bulk)
        if self._parts.fits(part, header.bulk):
            self._parts.add(part, data)

    async def _receive_bulk(self, size: int, *, kept: bool = False) -> Array:
        """Receive a bulk part when the budget has room for it; the caller gives `size` bytes back.

        Args:
            size: its bytes. kept: whether the memory is kept after the request.

        Returns:
            uint8 [size or more]; it belongs to the server's spare memory unless it is kept.
        """
        self.receiving_since = None  # the server waits for itself, not for the requester
        await self._server.budget.take(size)
        try:
            self.receiving_since = self._loop.time()
            data = aligned(size) if kept else self._server.spare_memory.take(size)
            if size:
                await self._channel.recv_into(data[:size])
        except BaseException:
            self._server.budget.give(size)
            raise
        self.receiving_since = None
        return data

    async def _begin_store(self, header: Header, small: Array) -> None:
        request = Store.parse(small.copy(), header.bulk, self._limits)
        self._looks = 0
        self.receiving_since = None  # the server waits for itself, not for the requester
        while len(self._stores) >= _STORES:
            await asyncio.wait(self._stores, return_when=asyncio.FIRST_COMPLETED)
        data = await self._receive_bulk(header.bulk)
        is_alone = self._server.budget.held == header.bulk
        most = _STORED_ALONE if is_alone else _STORED_IN_LOOP
        if header.bulk <= most and not request.parts:
            slots = self._store_at_once(request, data[: header.bulk])
            if slots is not None:
                self._give_bulk(header.bulk, data)
                await self._send(Kind.STORED, header.request, slots.astype("<i8").tobytes())
                await self._take_turns()
                return
        parts = self._parts.take(int(request.ids[0])) if request.parts else []
        self._store_in_thread(header, request, parts, data)

    def _store_in_thread(
        self, header: Header, request: Store, parts: list[tuple[int, Array]], data: Array
    ) -> None:
        """Store in a thread of the table, then give the memory of the bulk part back."""
        task = asyncio.ensure_future(self._store(header.request, request, parts, data[: header.bulk]))
        self._stores.add(task)
        task.add_done_callback(self._stored)
        task.add_done_callback(lambda _: self._give_bulk(header.bulk, data))

    def _give_bulk(self, size: int, data: Array) -> None:
        """Give the memory of a bulk part back, which nothing refers to any longer."""
        self._server.budget.give(size)
        self._server.spare_memory.give(data)

    def _store_ahead(self, header: Header, ahead: memoryview) -> list[memoryview] | None:
        """`_answer_ahead` for a STORE of one trajectory."""
        small, bulk = header.small, header.bulk
        size = HEADER + small + bulk
        if HEADER + small > len(ahead) or bulk > min(_STORED_AHEAD, self._limits.store_bytes):
            return None
        if refusal(self._server.allow, Kind.STORE) is not None:
            return None
        found = OneStore.parse(ahead[HEADER : HEADER + small], bulk)
        attached = None if found is None else self._server.tables.attached(found[0].table)
        if found is None or attached is None or attached.is_dirty:
            return None
        message = self._whole(size, bulk)
        if message is None:
            return None
        kind, one, offsets = found
        data: Array = np.frombuffer(message, np.uint8, bulk, HEADER + small)
        try:
            slot = attached.store_one(kind, one, data, offsets)
        except Exception:  # the thread meets it too, and answers
            slot = None
        if size > len(ahead):  # it was taken
            if slot is None:
                self._keep(header, message)
                return None
            self._server.budget.give(bulk)
        elif slot is None:
            return None
        else:
            self._channel.skip(size)
        answer = Header(Kind.STORED, header.request, 8, 0).pack() + slot.to_bytes(8, "little", signed=True)
        return self._channel.send_some(memoryview(answer))

    def _whole(self, size: int, bulk: int) -> memoryview | None:
        """A message of `size` bytes, if all have arrived; takes its bulk part from the budget unless it is ahead."""
        if size <= len(self._channel.ahead()):
            return self._channel.arrived(size, self._server.scratch)
        if not self._server.budget.take_now(bulk):
            return None
        message = None
        try:
            message = self._channel.arrived(size, self._server.scratch)
        finally:
            if message is None:
                self._server.budget.give(bulk)
        if message is None and self._looks < _LOOKS:
            self._looks += 1
            self._waits_for_rest = True
            if self.receiving_since is None:
                self.receiving_since = self._loop.time()
        elif message is not None:
            self._looks, self.receiving_since = 0, None
        return message

    def _keep(self, header: Header, message: memoryview) -> None:
        """Keep a STORE that was taken, and has to wait, for `_go_on_storing`."""
        end = HEADER + header.small
        data = self._server.spare_memory.take(header.bulk)
        data.data[: header.bulk] = message[end:]
        self._kept = header, np.frombuffer(bytes(message[HEADER:end]), np.uint8), data

    def _go_on_storing(self, header: Header, small: Array, data: Array) -> None:
        """Store what `_store_ahead` has kept."""
        request = Store.parse(small, header.bulk, self._limits)
        self._kept = None
        self._store_in_thread(header, request, [], data)

    def _store_at_once(self, request: Store, data: Array) -> Array | None:
        """Store in the event loop, which takes less time than a hand-over to a thread; None if that has to do it."""
        attached = self._server.tables.attached(request.table)
        if attached is None:
            return None
        try:
            return attached.store_at_once(request, data)
        except Exception:  # the thread meets it too, and answers
            return None

    def _stored(self, task: asyncio.Task[None]) -> None:
        self._stores.discard(task)
        if not task.cancelled():
            task.exception()  # the connection is closed, and `run` ends, too

    async def _store(self, request: int, store: Store, parts: list[tuple[int, Array]], data: Array) -> None:
        server = self._server

        def work() -> Array:
            whole = store.joined(parts, data) if store.parts else (store, data)
            return server.tables.get(store.table).store(*whole)

        try:
            slots = await server.writers(store.table).run(work)
        except Exception as error:
            await self._fail(request, error, f"storing into {store.table!r}")
            return
        await self._send(Kind.STORED, request, slots.astype("<i8").tobytes())
