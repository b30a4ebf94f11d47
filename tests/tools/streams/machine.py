"""Streams of deferred operations, run in any order that CUDA allows, and the order that their memory needs."""

from __future__ import annotations

import collections
import dataclasses
import itertools
import os
import random
import threading
import weakref
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any, Literal, NamedTuple

import torch

from .memory import Span

Policy = Literal["random", "latest", "eager"]
FAIR = 10
"""Operations after which a stream of weight 0 has its turn, although a thread queues more on others without end."""


@dataclasses.dataclass(eq=False)
class Operation:
    """One piece of work of a stream.

    Attributes:
        number: place in its stream, from 1 on.
        label: what it does, for messages.
        call: does it.
        after: operations of other streams that come first.
        clock: stream -> number of its last operation that is known to come before.
    """

    stream: Stream
    number: int
    label: str
    call: Callable[[], object] | None
    after: list[Operation]
    clock: dict[int, int]
    done: bool = False

    def comes_after(self, other: Operation) -> bool:
        return self.clock.get(other.stream.cuda_stream, 0) >= other.number


class Captured(NamedTuple):
    """An operation of a graph: what it does, by the addresses that it was recorded with.

    Attributes:
        named: memory that its arguments name, whether or not `call` touches it.
        arguments: kernels with their grids, and all values and addresses, to compare. thread: which queued it.
    """

    label: str
    call: Callable[[], object] | None
    reads: list[Span]
    writes: list[Span]
    named: list[Span]
    arguments: object
    thread: int


@dataclasses.dataclass(eq=False)
class Capture:
    """A capture that goes on.

    Attributes:
        thread: which began it. mode: of it. allocations: of its thread before it.
        by_torch: whether the allocator knows of it, as of one by `torch.cuda.graph`.
        operations: what it has captured. broken: what ended it.
    """

    thread: int
    mode: int
    allocations: int = 0
    by_torch: bool = False
    operations: list[Captured] = dataclasses.field(default_factory=list)
    broken: str = ""


class Stream:
    """A queue of operations, which run in its order. While it has a `capture`, they go there instead."""

    def __init__(self, machine: Machine, device: int, priority: int = 0) -> None:
        self.machine, self.device, self.priority = machine, device, priority
        self.cuda_stream = len(machine.streams) + 1
        self.queue: collections.deque[Operation] = collections.deque()
        self.clock: dict[int, int] = {}
        self.count = 0
        self.weight = machine.random.choice([0.0, 0.05, 0.3, 1.0])
        self.last: Operation | None = None
        self.capture: Capture | None = None
        machine.streams.append(self)

    @property
    def captured(self) -> list[Captured] | None:
        """What it has captured so far; None if it does not capture."""
        return None if self.capture is None else self.capture.operations

    def wait_event(self, event: Event) -> None:
        self.machine.on_call("wait_event")
        if event.marker is not None:
            captures = self.capture, event.capture
            if any(captures):
                what = "a dependency between captured work and work that is not"
                self.machine.refuse("wait_event", what, *captures)
            self.machine.enqueue(self, "wait", None, after=[event.marker])

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def record_event(self, event: Event | None = None) -> Event:
        event = Event(self.machine) if event is None else event
        event.record(self)
        return event

    def synchronize(self) -> None:
        self.machine.on_call("stream.synchronize")
        self.machine.refuse("stream.synchronize", "the stream is capturing", self.capture)
        if self.last is not None:
            self.machine.await_operation(self.last)

    def query(self) -> bool:
        self.machine.on_call("stream.query")
        self.machine.refuse("stream.query", "the stream is capturing", self.capture)
        return self.last is None or self.last.done


_numbers = itertools.count(1 << 20)
_events: weakref.WeakValueDictionary[int, Event] = weakref.WeakValueDictionary()


def event_of(handle: int) -> Event:
    """The event with a handle, which its first record gives it."""
    return _events[handle]


class Event:
    """Marks a place in a stream.

    Attributes:
        capture: that it was last recorded in; the host cannot ask for it then, nor other streams wait, until it is
            recorded again.
    """

    def __init__(self, machine: Machine, *, blocking: bool = False) -> None:
        self.machine = machine
        self.marker: Operation | None = None
        self.capture: Capture | None = None
        self.cuda_event = 0

    def record(self, stream: Stream | None = None) -> None:
        self.machine.on_call("record")
        stream = self.machine.current_stream() if stream is None else stream
        if not self.cuda_event:
            self.cuda_event = next(_numbers)
            _events[self.cuda_event] = self
        self.capture = stream.capture
        self.marker = self.machine.enqueue(stream, "event", None)

    def synchronize(self) -> None:
        self.machine.on_call("event.synchronize")
        self.machine.refuse("event.synchronize", "the event was last recorded in a capture", self.capture)
        if self.marker is not None:
            self.machine.await_operation(self.marker)

    def query(self) -> bool:
        self.machine.on_call("event.query")
        self.machine.refuse("event.query", "the event was last recorded in a capture", self.capture)
        if self.marker is None or self.marker.done:
            self.machine.host_knows(self.marker)
            return True
        return False

    def wait(self, stream: Stream | None = None) -> None:
        (self.machine.current_stream() if stream is None else stream).wait_event(self)


class Machine:
    """All streams of a process.

    Args:
        seed: decides what runs when.
        policy: ``"random"``: any order, with streams that starve for long; ``"latest"``: nothing before somebody waits
            for it, or threads have taken turns for long; ``"eager"``: everything at once.

    Attributes:
        failures: what went wrong inside operations, and accesses whose order nothing guarantees.
        counts: calls, launches and copies by name.
        host_waits: waits of the host for work that was not done.
        checks_order: whether unordered accesses are failures.
        quiet: whether calls are neither counted nor give others a turn.
    """

    def __init__(self, seed: int, policy: Policy) -> None:
        self.random = random.Random(seed)
        self.policy = policy
        self.streams: list[Stream] = []
        self.failures: list[str] = []
        self.counts: collections.Counter[str] = collections.Counter()
        self.host_waits = 0
        self._steps = 0
        self.checks_order = True
        self.quiet = False
        self.wait_for: Callable[..., None] | None = None  # of the threads, see `Threads.wait`
        self.maybe_switch: Callable[[], None] = lambda: None
        self.check_call: Callable[[str], None] = lambda name: None
        self.turn_of: Callable[[Span], int] = lambda span: 0  # of the memory, see `Block`
        self.current_stream: Callable[[], Stream] = lambda: self.streams[0]
        self._process = os.getpid()
        self.host: Callable[[], Hashable] = threading.get_ident  # the calling thread
        self._hosts: dict[Hashable, dict[int, int]] = collections.defaultdict(dict)  # what each has seen done
        self._accesses: dict[int, list[tuple[Operation, Span, bool]]] = collections.defaultdict(list)

    # ---------------------------------------------------------------- queueing

    def on_call(self, name: str) -> None:
        """Called first in every call of the host: others may run in the meantime."""
        if os.getpid() != self._process:
            raise RuntimeError("Cannot re-initialize CUDA in forked subprocess.")
        if self.quiet:
            return
        self.counts[name] += 1
        self.check_call(name)
        self.maybe_switch()
        if self.policy == "random":
            while self.random.random() < 0.5 and self.step(starving=False):
                pass

    def enqueue(
        self,
        stream: Stream,
        label: str,
        call: Callable[[], object] | None,
        *,
        reads: Iterable[Span] = (),
        writes: Iterable[Span] = (),
        after: Iterable[Operation] = (),
        captured: bool = True,
        named: Iterable[Span] = (),
        arguments: object = None,
    ) -> Operation:
        """Queue an operation, or let a stream that captures record it, unless that is the allocator's.

        Never runs other threads, so that the garbage collector may call it.

        Args:
            named, arguments: see `Captured`.
        """
        if stream.capture is not None and captured:
            me, spans = threading.get_ident(), (list(reads), list(writes), list(named))
            stream.capture.operations.append(Captured(label, call, *spans, arguments, me))
            if me != stream.capture.thread:
                self.fail(
                    f"{label} of thread {threading.current_thread().name} entered the capture of stream "
                    f"{stream.cuda_stream} by another one"
                )
            return Operation(stream, 0, label, None, [], {}, done=True)
        stream.count += 1
        clock = stream.clock
        for other in (self.host_clock, *(operation.clock for operation in after)):
            if other:
                clock = {key: max(clock.get(key, 0), other.get(key, 0)) for key in {**clock, **other}}
        clock = {**clock, stream.cuda_stream: stream.count}
        operation = Operation(stream, stream.count, label, call, list(after), clock)
        stream.clock = clock
        stream.last = operation
        for spans, write in ((reads, False), (writes, True)):
            for span in spans:
                self._order(operation, span, write)
        stream.queue.append(operation)
        if self.policy == "eager":
            self._run_until(operation)
        return operation

    def replay(self, stream: Stream, operations: Iterable[Captured]) -> None:
        """Queue what was recorded, as it was: with the memory that it had then."""
        for each in operations:
            if self.checks_order:
                self.check_held(each, f"the replay of {each.label}")
            self.counts[each.label] += 1
            more: dict[str, Any] = {"named": each.named, "arguments": each.arguments}
            self.enqueue(stream, each.label, each.call, reads=each.reads, writes=each.writes, **more)

    def check_held(self, operation: Captured, what: str) -> None:
        """Fail if memory of recorded work has been given back since."""
        for span in (*operation.reads, *operation.writes, *operation.named):
            if self.turn_of(span) != span.turn:
                self.fail(f"{what} uses {span.first:#x}, which was given back since it was recorded")
                return

    def refuse(self, name: str, why: str, *captures: Capture | None) -> None:
        """What CUDA allows in no mode: it ends these captures, if there are any, and is an error."""
        found = [each for each in captures if each is not None]
        for each in found:
            each.broken = each.broken or f"{name}: {why}"
        if found:
            self.fail(f"CUDA refuses {name}: {why}")
            raise RuntimeError(f"CUDA error: operation not permitted when stream is capturing: {name}: {why}")

    def _order(self, operation: Operation, span: Span, write: bool) -> None:
        """Note an access, and fail if nothing orders it with an earlier one."""
        if span.block is None or not self.checks_order:
            return
        left = []
        for other in self._accesses[span.block]:
            known, past, wrote = other
            overlaps = past.first < span.end and span.first < past.end
            ordered = operation.comes_after(known)
            if overlaps and (write or wrote) and not ordered:
                self.fail(
                    f"{operation.label} on stream {operation.stream.cuda_stream} "
                    f"{'writes' if write else 'reads'} what {known.label} on stream {known.stream.cuda_stream} "
                    f"{'writes' if wrote else 'reads'}, and nothing orders them"
                )
            covered = span.first <= past.first and past.end <= span.end
            if not (ordered and covered and (write or not wrote)):
                left.append(other)
        left.append((operation, span, write))
        self._accesses[span.block] = left

    def fail(self, message: str) -> None:
        self.failures.append(message)

    # ---------------------------------------------------------------- running

    def _ready(self) -> Iterator[Stream]:
        for stream in self.streams:
            if stream.queue and all(other.done for other in stream.queue[0].after):
                yield stream

    def step(self, *, starving: bool = True) -> bool:
        """Run one operation; return False if there is none. Streams of weight 0 run only if `starving`."""
        ready = list(self._ready())
        favoured = [stream for stream in ready if stream.weight]
        self._steps += starving
        if favoured and not (starving and self._steps % FAIR == 0):
            self._run(*self.random.choices(favoured, [stream.weight for stream in favoured]))
        elif starving and ready:
            self._run(self.random.choice(ready))
        return bool(favoured or (starving and ready))

    def _run(self, stream: Stream) -> None:
        operation = stream.queue.popleft()
        if operation.call is not None:
            try:
                # Work is done on host memory: without modes, a default device among them, which every call would pass.
                with torch._C.DisableTorchFunction(), torch.inference_mode(False), torch.no_grad():
                    operation.call()
            except Exception as error:
                self.fail(f"{operation.label} failed: {type(error).__name__}: {error}")
        operation.call = None  # which a graph may keep
        operation.after.clear()
        operation.done = True

    def _needed(self, operation: Operation) -> bool:
        """Run one operation that comes before this one, or it itself; as few as possible."""
        while True:
            head = operation.stream.queue[0]
            waiting = [other for other in head.after if not other.done]
            if not waiting:
                self._run(head.stream)
                return True
            operation = self.random.choice(waiting)

    def _run_until(self, operation: Operation) -> None:
        while not operation.done:
            self._needed(operation)

    def await_operation(self, operation: Operation) -> None:
        """Wait, as a host thread."""
        self.host_waits += not operation.done

        def work() -> bool:
            if self.policy == "latest" or self.random.random() < 0.5:
                return self._needed(operation)
            return self.step()

        if self.wait_for is None:
            self._run_until(operation)
        else:
            self.wait_for(lambda: operation.done, work)
        self.host_knows(operation)

    def host_knows(self, operation: Operation | None) -> None:
        """What this thread queues from here on comes after an operation that it has seen done."""
        if operation is not None:
            self.learn(operation.clock)

    @property
    def host_clock(self) -> dict[int, int]:
        """What the calling thread has seen done, or was told of by a thread that has."""
        return self._hosts[self.host()]

    def learn(self, clock: dict[int, int]) -> None:
        """The calling thread hears from another one."""
        mine = self.host_clock
        for key, value in clock.items():
            mine[key] = max(mine.get(key, 0), value)

    def synchronize(self, device: int) -> None:
        self.on_call("synchronize")
        streams = [stream for stream in self.streams if stream.device == device]
        captures = [stream.capture for stream in streams]
        self.refuse("synchronize", "a stream of the device is capturing", *captures)
        self.random.shuffle(streams)
        for stream in streams:
            if stream.last is not None:
                self.await_operation(stream.last)
