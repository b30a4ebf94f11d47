"""The client's side of a learner: calls that a server executes in order and once, and answers received into batches.

Calls are sent by the thread that makes them. Answers are received by the thread that asks for them; those of large
batches by a thread that reads ahead. A lost connection is made again: calls without an answer are sent again, and the
server answers those that it had executed as it had.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import logging
import os
import secrets
import socket
import struct
import sys
import threading
import time
from typing import Any

import numpy as np
import torch

from gear_loader.errors import GearError, HandshakeError, PeerTimeoutError, TransportError
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.client import Peer
from gear_loader.transport.learner_pipe import AHEAD, Pipe
from gear_loader.transport.mapped_batches import MappedAnswers
from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.transport.resources import aligned
from gear_loader.transport.trees import PackedTree, TreeReader
from gear_loader.transport.wire import (
    HEADER,
    MAX_TEXT,
    Fields,
    Header,
    Kind,
    ProtocolError,
    pack_header,
    printable,
    read_error,
)
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.background import background_thread
from gear_loader.utils.notices import notice

_MOST_UNANSWERED = 32  # calls; a server takes twice as many
_SMALL = 1 << 14  # bytes of an answer whose memory is not kept
_MOST_KEPT = 64  # buffers
_PAUSE = 0.05  # seconds between attempts to connect
_ATTEMPT = 5.0  # most seconds of one
_LOOK = 1.0  # seconds between the looks of an idle thread at whether it is still needed
_MOST_ANSWER, _MOST_SMALL = 1 << 40, messages.ANSWER.most()
_CALL = struct.Struct("<QQII")
_PLAIN = {name: json.dumps([name, {}, None]).encode() for name in ("next", "rows", "state")}
_log = logging.getLogger("gear_loader")
Place = tuple[int, int, int]
"""Epoch and step of the next batch, and the batches of iterations before."""


class _Rejected(Exception):
    """The server has refused the learner."""

    def __init__(self, error: GearError) -> None:
        self.error = error


@dataclasses.dataclass
class _Sent:
    """A call without an answer. place: of the iteration when it is answered. wanted: whether somebody asks for it.
    told: whether the next call raises its error, as nobody asks. ended: answers to whose files nothing refers."""

    number: int
    text: bytes
    tensors: list[Any]
    size: int
    place: Place | None
    wanted: bool
    told: bool
    ended: list[int] = dataclasses.field(default_factory=list)


class BatchMemory:
    """Buffers of answers, which are used again when nothing refers to their tensors. Thread-safe.

    Args:
        pinned: whether a GPU copies from them.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        # Each with the events after which GPUs have copied from it, on one stream or several.
        self._kept: list[tuple[Array, tuple[Any, ...]]] = []
        self._guard = threading.Lock()

    def take(self, size: int) -> Array:
        """Memory of `size` bytes, uint8, aligned to 128 bytes."""
        if size <= _SMALL and not self._pinned:
            return aligned(size)
        with self._guard:
            return self._taken(size, size + ALIGNMENT)

    def _taken(self, size: int, room: int) -> Array:
        for i in reversed(range(len(self._kept))):  # the latest: a cache is more likely to hold it
            owner, copies = self._kept[i]
            # Tensors refer to their array, and that to the one which owns the memory, as do entry, name and call.
            unused = room <= len(owner) <= 4 * room and sys.getrefcount(owner) <= 3
            if unused and all(each.query() for each in copies):
                del self._kept[i]
                self._kept.append((owner, ()))
                return _within(owner, size)
        room = -(-room // 4096) * 4096
        made: Array = torch.empty(room, dtype=torch.uint8, device="cpu", pin_memory=self._pinned).numpy()
        self._kept = [each for each in self._kept if sys.getrefcount(each[0]) > 2][-_MOST_KEPT:]
        self._kept.append((made, ()))
        return _within(made, size)

    def copied(self, event: Any) -> None:
        """A GPU copies from all memory that was taken, until `event`."""
        with self._guard:
            self._kept = [
                (owner, (*(each for each in copies if not each.query()), event))
                for owner, copies in self._kept
            ]


def _within(owner: Array, size: int) -> Array:
    """An aligned part of memory."""
    start = -data_address(owner) % ALIGNMENT
    return owner[start : start + size]


class LearnerLink:
    """A learner's connection; its owner calls it from one thread at a time.

    Args:
        peer: the server. table: name of the table. options: of the dataset, as JSON, or None.
        timeout: seconds without progress after which a call ends.
        ahead: whether a thread reads large answers ahead. pinned: whether a GPU copies from the memory of answers.
        maps: whether batches may lie in memory of a server of this machine, which is mapped.

    Attributes:
        described: what the server says of the dataset. largest: bytes of the largest batch of iterations so far.

    Raises:
        GearError: the server refused the learner, or does not answer.
    """

    def __init__(
        self,
        peer: Peer,
        table: str,
        options: Any,
        timeout: float,
        *,
        ahead: bool = False,
        pinned: bool = False,
        maps: bool = False,
    ) -> None:
        self._peer, self._table, self._options = peer, table, options
        self._maps, self.largest = maps, 0
        self._files: MappedAnswers | None = None
        self._timeout = timeout
        self._ahead = ahead
        self._pid = os.getpid()
        self._identity = secrets.token_bytes(16)
        self._number = self._received = 0
        self._unsaid = False  # whether tensors have arrived since the last message
        self._place: Place | None = None
        self._pending: collections.deque[_Sent] = collections.deque()
        self._answers: dict[int, Any] = {}
        self._failure: GearError | None = None  # of a call that nobody asks for
        self._pipe: Pipe | None = None
        self._known = False  # whether a server has served it
        self._closed = False
        self._changed = threading.Condition()
        self._reader: threading.Thread | None = None
        self._read_error: Exception | None = None
        self._trees = TreeReader()
        self.memory = BatchMemory(pinned=pinned)
        self.described: Any = None
        self._until_done(lambda: self._pipe is not None)

    # ---------------------------------------------------------------- calls

    def submit(
        self,
        name: str,
        options: dict[str, Any],
        values: Any = None,
        *,
        place: Place | None = None,
        wanted: bool = True,
    ) -> int:
        """Make a call; returns its number.

        Args:
            name, options, values: what is called with what; `values` is a tree of tensors.
            place: of the iteration after it. wanted: whether `result` is asked for; otherwise the next call raises its
                error.
        """
        self._check()
        if len(self._pending) >= _MOST_UNANSWERED:
            oldest = self._pending[0].number
            self._until_done(lambda: self._received >= oldest)
        number = self._number = self._number + 1
        if values is None:
            text, size, tensors = (
                json.dumps([name, options, None]).encode() if options else _PLAIN[name],
                0,
                [],
            )
        else:
            tree = PackedTree(values)
            text, size, tensors = (
                json.dumps([name, options, json.loads(tree.text)]).encode(),
                tree.size,
                tree.parts,
            )
        sent = _Sent(number, text, tensors, size, place, wanted, not wanted)
        with self._changed:
            self._pending.append(sent)
            self._changed.notify_all()
        if self._pipe is not None:
            try:
                self._send(self._pipe, sent)
            except OSError:
                self._lose()  # it is sent again by who asks for the result
            except BaseException:
                self._lose()
                raise
        return number

    def _send(self, pipe: Pipe, sent: _Sent) -> None:
        """Send a call, also again."""
        files, self._unsaid = self._files, False
        if files is not None and sent.number:
            sent.ended += files.ended(self._received)
        head = _CALL.pack(sent.number, self._received, files is not None, len(sent.ended))
        small = head + np.array(sent.ended, dtype="<u8").tobytes() + sent.text
        pipe.send([pack_header(Kind.CALL, sent.number, len(small), sent.size) + small, *sent.tensors])

    @property
    def _must_say(self) -> bool:
        return self._unsaid and bool(self._pending) and self._pipe is not None

    def _acknowledge(self) -> None:
        """Say what has arrived, if no call has: a server that keeps as much as it may waits for that."""
        if self._must_say and self._pipe is not None:
            self._send(self._pipe, _Sent(0, b"", [], 0, None, wanted=False, told=False))

    def result(self, number: int) -> Any:
        """The answer of a call that is wanted: a tree.

        Raises:
            GearError: the call's error, or the server did not answer.
        """
        self._check()
        try:
            self._until_done(lambda: number in self._answers)
        except BaseException:
            self.drop((number,))
            raise
        found = self._answers.pop(number)
        if isinstance(found, GearError):
            raise found
        return found

    def call(self, name: str, options: dict[str, Any], values: Any = None) -> Any:
        """Make a call and wait for its answer."""
        return self.result(self.submit(name, options, values))

    def drop(self, numbers: Any) -> None:
        """Nobody asks for the answers of these calls any more."""
        unwanted = set(numbers)
        with self._changed:
            for each in self._pending:
                each.wanted = each.wanted and each.number not in unwanted
            for number in unwanted:
                self._answers.pop(number, None)

    def _check(self) -> None:
        if self._closed or self._pid != os.getpid():
            raise TransportError(
                f"A dataset over {self._peer.name} was used after its end, or in a forked child: make another one."
            )
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure

    # ---------------------------------------------------------------- receiving

    def _until_done(self, done: Any) -> None:
        """Receive answers until `done()`; reconnect where the connection is lost."""
        deadline = time.monotonic() + self._timeout
        while not done():
            try:
                self._acknowledge()
                if not self._read_ahead(done):
                    error, self._read_error = self._read_error, None
                    if error is not None:
                        raise error
                    self._connected()
                    if not done():
                        self._receive()
            except _Rejected as refused:
                raise refused.error from None
            except (TimeoutError, PeerTimeoutError):
                self._lose()
                raise PeerTimeoutError(
                    f"{self._peer.name} was asked for batches of table {self._table!r} and did not answer within "
                    f"{self._timeout:g} s. Its server may be stopped or overloaded, or the network cut; raise the "
                    "timeout of connect() if it is only slow. The next call goes on where this one ended."
                ) from None
            except (HandshakeError, ProtocolError):
                self._lose()
                raise
            except OSError as error:
                self._lose()
                if time.monotonic() > deadline:
                    raise PeerTimeoutError(
                        f"{self._peer.name} cannot be reached since {self._timeout:g} s ({error}). Start its server "
                        "again at the same address; the next call goes on where this one ended."
                    ) from None
                time.sleep(_PAUSE)
            except BaseException:
                self._lose()  # an answer may be received in part
                raise

    def _read_ahead(self, done: Any) -> bool:
        """Wait for the thread that reads ahead until there is something to do; False if there is none."""
        with self._changed:
            while self._reader is not None:
                if done() or self._must_say:
                    return True
                if not self._changed.wait(self._timeout):
                    raise TimeoutError
        return False

    def _receive(self) -> None:
        """Receive one answer, in the calling thread."""
        pipe = self._connected()
        size = self._take(*self._message(pipe))
        if size >= AHEAD and self._ahead and self._reader is None and not self._closed:
            reader = background_thread(self._work, "gear-loader-learner", args=(pipe,), stop=self.close)
            self._reader = reader
            reader.start()

    def _work(self, pipe: Pipe) -> None:
        """Main function of the thread that reads ahead, until the connection ends."""
        try:
            while self._pipe is pipe:
                with self._changed:
                    if not self._pending:
                        self._changed.wait(_LOOK)
                        continue
                message = self._message(pipe)
                with self._changed:
                    self._take(*message)
                    self._changed.notify_all()
        except Exception as error:  # the next call meets it, or reconnects
            self._read_error = error
        finally:
            with self._changed:
                self._reader = None
                self._changed.notify_all()

    def _message(self, pipe: Pipe) -> tuple[Header, memoryview, Array]:
        head = memoryview(bytearray(HEADER))
        pipe.receive(head)
        header = Header.parse(head)
        if header.small > _MOST_SMALL or header.bulk > _MOST_ANSWER:
            raise ProtocolError(
                f"A message {header.kind.name} has {header.small:,} and {header.bulk:,} bytes."
            )
        small = memoryview(bytearray(header.small))
        pipe.receive(small)
        memory = self.memory.take(header.bulk)
        pipe.receive(memory.data)
        return header, small, memory

    def _take(self, header: Header, small: memoryview, memory: Array) -> int:
        """Take an answer; returns its bytes."""
        if header.kind is Kind.REFUSE:
            text = Fields(small, Kind.REFUSE.name).text("The text")
            raise TransportError(f"{self._peer.name} closed the connection: {printable(text, MAX_TEXT)}")
        if header.kind not in (Kind.ANSWER, Kind.ERROR) or not self._pending:
            raise ProtocolError(f"A message {header.kind.name} came; expected ANSWER or ERROR to a call.")
        sent = self._pending[0]
        if header.request != sent.number:
            raise ProtocolError(f"Call {header.request:,} was answered; expected {sent.number:,}.")
        sizes, files = [header.bulk], self._files

        def view(place: Any) -> Array:
            assert files is not None
            sizes.append(len(found := files.view(sent.number, place)))
            return found

        if header.kind is Kind.ERROR:
            answer: Any = read_error(small)
        else:
            answer = self._trees.read(bytes(small), memory, None if files is None else view)
        self.largest = max(self.largest, sum(sizes) if sent.place is not None else 0)
        self._pending.popleft()
        self._received = sent.number
        self._unsaid = self._unsaid or sum(sizes) > 0
        if sent.place is not None and header.kind is Kind.ANSWER:
            self._place = sent.place
        if sent.wanted:
            self._answers[sent.number] = answer
        elif sent.told and isinstance(answer, GearError):
            self._failure = answer
        return header.bulk

    # ---------------------------------------------------------------- the connection

    def _connected(self) -> Pipe:
        """The connection; of a new one if necessary, on which what has no answer is sent again."""
        if self._pipe is not None:
            return self._pipe
        connection = self._peer.dial(time.monotonic() + min(_ATTEMPT, self._timeout))
        try:
            pipe = Pipe(connection, self._timeout, _give_up)
            known = self._introduced(pipe)
            for sent in self._pending:
                self._send(pipe, sent)
        except BaseException:
            connection.close()
            raise
        if self._known and not known:
            _log.warning(
                "%s was started again: draws from table %r go on at their position, by the table's priorities",
                self._peer.name,
                self._table,
            )
        self._known, self._pipe = True, pipe
        return pipe

    def _introduced(self, pipe: Pipe) -> bool:
        """Say which learner this is; whether the server knew it."""
        first = self._pending[0].number if self._pending else self._number + 1
        options = {"dataset": self._options, "at": self._place}
        small = messages.LEARN.pack(
            identity=self._identity,
            first=first,
            wait=int(min(self._timeout * 0.75, 1e6) * 1e3),
            table=self._table,
            options=json.dumps(options).encode(),
        )
        pipe.send([pack_header(Kind.LEARN, 0, len(small), 0) + small])
        header, received, _ = self._message(pipe)
        if header.kind is Kind.REFUSE:
            text = Fields(received, Kind.REFUSE.name).text("The text")
            raise _Rejected(TransportError(f"{self._peer.name}: {printable(text, MAX_TEXT)}"))
        if header.kind is Kind.ERROR:
            raise _Rejected(read_error(received))
        if header.kind is not Kind.LEARNING:
            raise ProtocolError(f"A message {header.kind.name} came; expected LEARNING.")
        found = messages.LEARNING.parse(received)
        try:
            self.described = json.loads(bytes(found.described))
        except ValueError as error:
            raise ProtocolError(f"A message LEARNING is no JSON ({error}).") from None
        self._map(self.described.get("files") if self._maps and pipe.is_local else None)
        return bool(found.known)

    def _map(self, told: Any) -> None:
        """Map the memory of a server of this machine, if it has any."""
        if told is None:
            self._files = None
        elif self._files is None or self._files.told != told:
            try:
                self._files = MappedAnswers(told)
            except OSError as error:
                self._files = None
                notice(
                    "mapped batches",
                    f"{self._peer.name} is on this machine, but its batches come through the network, which is slower: "
                    f"{error}",
                )

    def _lose(self) -> None:
        """Give up the connection."""
        found, self._pipe = self._pipe, None
        if found is not None:
            with contextlib.suppress(OSError):
                found.connection.shutdown(socket.SHUT_RDWR)  # the thread that waits gets an error
        reader = self._reader
        if reader is not None and reader is not threading.current_thread():
            reader.join(self._timeout)
        if found is not None:
            found.close()

    def close(self) -> None:
        """Say goodbye; idempotent."""
        if self._closed or self._pid != os.getpid():
            return
        self._closed = True
        if self._pipe is not None:
            with contextlib.suppress(OSError):
                self._pipe.connection.settimeout(_LOOK)
                self._pipe.send([Header(Kind.BYE, 0, 0, 0).pack()])
                if self._pending:
                    self._pipe.drain(_LOOK, self._reader)
        self._lose()
        self._answers.clear()


def _give_up() -> None:
    raise TimeoutError
