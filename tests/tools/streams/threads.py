"""Threads of which one runs at a time, and which hand over where a seed says so."""

from __future__ import annotations

import collections
import contextlib
import queue
import random
import sys
import threading
import traceback
import types
from collections.abc import Callable
from typing import Any

from gear_loader.utils.mutex import holds_any

WAIT = 180.0
"""Seconds after which a thread that should have been given its turn has failed."""


FAIR = 200
"""Turns after which a device works although threads can run: a real one does not stand still while they only look."""
MOST = 20_000
"""Turns without work of a device after which threads run in circles; a whole run of a dataset has hundreds."""


class Deadlock(AssertionError):
    """Every thread waits, or all only give their turns to each other, and no stream has work left."""


class LostTurn(AssertionError):
    """A thread ran, or was to run, whose turn it was not."""


class _Ended(BaseException):
    """Ends a thread when the run is over."""


class _Member:
    """One thread; `blocked` is what it waits for."""

    def __init__(self, name: str) -> None:
        self.name = name
        self.turn = threading.Semaphore(0)
        self.blocked: Callable[[], bool] | None = None
        self.ended = False
        self.identity = 0
        self.thread: threading.Thread | None = None
        self.told: Any = None

    @property
    def can_run(self) -> bool:
        return not self.ended and (self.blocked is None or self.blocked())


class Threads:
    """Runs the threads that code under test starts, one at a time.

    What breaks that, and threads that run in circles, are errors with the stacks of all threads.

    Args:
        chooser: chooses who is next.
        work: does a piece of other work (of a GPU) while threads wait; returns False if there is none.

    Attributes:
        failures: exceptions that ended threads.
        tell, hear: what a thread passes to another one when it hands something over.
        frequency: how often a call lets another thread run.
        patience: how often a thread that waits lets others run, instead of the work that it waits for.
    """

    def __init__(self, chooser: random.Random, work: Callable[[], bool]) -> None:
        self._chooser, self._work = chooser, work
        self._current = _Member("main")
        self._current.identity = threading.get_ident()
        self._members = [self._current]
        self._ending = False
        self._broken: AssertionError | None = None
        self._idle = 0  # turns since the last work of a device
        self._turns: collections.deque[str] = collections.deque(maxlen=50)
        self.failures: list[BaseException] = []
        self.tell: Callable[[], Any] = lambda: None
        self.hear: Callable[[Any], None] = lambda told: None
        self.frequency = 0.2
        self.patience = 0.7

    def start(self, target: Callable[..., object], args: tuple[Any, ...] = (), name: str = "") -> _Member:
        """Start a thread; it runs when it is chosen."""
        member = _Member(name)
        told = self.tell()

        def run() -> None:
            member.identity = threading.get_ident()
            try:
                self._await_turn(member)
                if not self._ending:
                    self.hear(told)
                    target(*args)
                member.told = self.tell()
            except _Ended:
                pass
            except BaseException as error:
                self.failures.append(error)
            member.ended = True
            if self._broken is not None:
                following = self._members[:1]
            else:
                following = self._others() or [each for each in self._members if not each.ended]
            if self._current is member:
                self._give_turn(self._chooser.choice(following))

        self._members.append(member)
        member.thread = threading.Thread(target=run, name=name, daemon=True)
        member.thread.start()
        return member

    def _await_turn(self, member: _Member) -> None:
        if not member.turn.acquire(timeout=WAIT):
            raise self._error(LostTurn, f"{member.name} was not given its turn in {WAIT:g} s")

    def _error(self, kind: type[AssertionError], message: str) -> AssertionError:
        """An error that ends the run, with the last turns and the stacks of all threads."""
        if self._broken is not None:
            return type(self._broken)(*self._broken.args)
        lines, frames = [message, "the last turns: " + ", ".join(self._turns)], sys._current_frames()
        for each in self._members:
            if each.identity in frames and not each.ended:
                state = "can run" if each.can_run else "waits"
                lines.append(f"{each.name} {state}:")
                lines += traceback.format_stack(frames[each.identity], limit=12)
        self._broken = kind("\n".join(lines))
        return self._broken

    def _others(self) -> list[_Member]:
        return [each for each in self._members if each is not self._current and each.can_run]

    @property
    def is_managed(self) -> bool:
        return threading.get_ident() == self._current.identity

    @property
    def current(self) -> object:
        """The thread whose turn it is."""
        return self._current

    def _give_turn(self, other: _Member) -> None:
        self._current = other
        self._turns.append(other.name)
        other.turn.release()

    def _hand_to(self, other: _Member) -> None:
        me = self._current
        if not self.is_managed:
            caller = threading.current_thread().name
            raise self._error(LostTurn, f"{caller} gives {other.name} the turn of {me.name}")
        if other is me or other.ended:
            raise self._error(LostTurn, f"{me.name} gives its turn to {other.name}, which runs or has ended")
        self._idle += 1
        if self._idle % FAIR == 0:
            self._works(self._work)
        if self._idle >= MOST:
            raise self._error(Deadlock, f"in {MOST} turns no thread that waits could go on")
        self._give_turn(other)
        self._await_turn(me)
        if me is not self._members[0] and (self._ending or self._broken is not None):
            raise _Ended
        if self._broken is not None:
            raise self._error(type(self._broken), "")

    def _works(self, work: Callable[[], bool]) -> bool:
        done = work()
        if done:
            self._idle = 0
        return done

    def maybe_switch(self) -> None:
        """Perhaps let another thread run; not while this one holds a lock for which the other could wait."""
        if self.is_managed and not holds_any() and self._chooser.random() < self.frequency:
            self.switch()

    def switch(self) -> bool:
        """Let another thread run; return whether there was one."""
        others = self._others()
        if others:
            self._hand_to(self._chooser.choice(others))
        return bool(others)

    def wait(self, condition: Callable[[], bool], work: Callable[[], bool] | None = None) -> None:
        """Wait for a condition, while others run.

        Args:
            condition: what other threads, or `work`, make true.
            work: does a piece of what brings the condition about; by default any.
        """
        me = self._current
        while not condition():
            me.blocked = condition
            try:
                others = [] if holds_any() else self._others()
                patience = 0.5 if me is self._members[0] else self.patience
                if others and self._chooser.random() < patience:
                    self._hand_to(self._chooser.choice(others))
                elif not self._works(work or self._work):
                    if not others:
                        raise self._error(
                            Deadlock, f"{me.name} waits, as all others do, and nothing is left to do"
                        )
                    self._hand_to(self._chooser.choice(others))
            finally:
                me.blocked = None

    def finish(self) -> None:
        """Let threads run until all of them wait, and end them."""
        while self._broken is None and (self.switch() or self._works(self._work)):
            pass
        self._ending = True
        for member in self._members[1:]:
            if not member.ended:
                member.blocked = None
                self._give_turn(member)
                if self._broken is None:
                    self._await_turn(self._members[0])
        self._current = self._members[0]
        for member in self._members:  # other tests look for threads that were left
            if member.thread is not None:
                member.thread.join(WAIT if self._broken is None else 1.0)

    # ---------------------------------------------------------------- what modules use instead of theirs

    @property
    def threading(self) -> Any:
        """In the place of the module `threading`."""
        threads = self

        class Thread:
            def __init__(
                self, target: Any, args: tuple[Any, ...] = (), name: str = "", daemon: bool = True
            ) -> None:
                self._arguments = target, args, name
                self._member: _Member | None = None

            def start(self) -> None:
                self._member = threads.start(*self._arguments)

            def is_alive(self) -> bool:
                return self._member is not None and not self._member.ended

            def join(self, timeout: float | None = None) -> None:
                threads.wait(lambda: not self.is_alive())
                if self._member is not None and self._member.told is not None:
                    threads.hear(self._member.told)

        class Event:
            def __init__(self) -> None:
                self._set = False

            def set(self) -> None:
                self._set, self._told = True, threads.tell()

            def wait(self, timeout: float | None = None) -> bool:
                threads.wait(lambda: self._set)
                threads.hear(self._told)
                return True

        # One thread runs at a time, and keeps its turn while it has a lock.
        class Lock(contextlib.nullcontext[None]):
            def _is_owned(self) -> bool:
                return False

        return types.SimpleNamespace(
            Thread=Thread,
            Event=Event,
            Lock=Lock,
            RLock=Lock,
            current_thread=threading.current_thread,
            get_ident=threading.get_ident,
        )

    @property
    def ticking_event(self) -> Any:
        """In the place of an `Event` of which a thread waits only for some time: others run meanwhile."""
        threads = self

        class Event:
            def __init__(self) -> None:
                self._told: Any = None

            def set(self) -> None:
                self._told = threads.tell()

            def is_set(self) -> bool:
                if self._told is not None:
                    threads.hear(self._told)
                return self._told is not None

            def wait(self, timeout: float) -> bool:
                if self._told is None:
                    threads.switch() or threads._works(threads._work)
                return self.is_set()

        return Event

    @property
    def queue(self) -> Any:
        """In the place of the module `queue`."""
        threads = self

        class SimpleQueue:
            def __init__(self) -> None:
                self._items: collections.deque[Any] = collections.deque()

            def __class_getitem__(cls, _: Any) -> Any:
                return cls

            def put(self, item: Any) -> None:
                self._items.append((item, threads.tell()))

            def get(self, timeout: float | None = None) -> Any:
                threads.wait(lambda: bool(self._items))
                item, told = self._items.popleft()
                threads.hear(told)
                return item

            def empty(self) -> bool:
                return not self._items

        return types.SimpleNamespace(SimpleQueue=SimpleQueue, Empty=queue.Empty)

    @property
    def time(self) -> Any:
        """In the place of the module `time`: sleeping lets others run, and it alone takes time."""
        import time

        now = [time.monotonic()]

        def sleep(seconds: float) -> None:
            now[0] += min(seconds, 1e-3)
            self.switch() or self._works(self._work)

        return types.SimpleNamespace(
            sleep=sleep,
            monotonic=lambda: now[0],
            monotonic_ns=lambda: int(now[0] * 1e9),
            time=time.time,
        )
