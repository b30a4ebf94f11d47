"""Liveness of the ranks: heartbeats and processes, shared through torch.distributed's store."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from gear_loader.distributed.topology import this_node
from gear_loader.utils.background import background_thread
from gear_loader.utils.mutex import Event

BEAT = 1.0  # seconds between two heartbeats of a rank
CLOSED = "closed"  # kind of the last call of an exchange that a rank has closed
_MOST_CLOSED = 16  # closed exchanges of which heartbeats tell: those of ranks that still wait
_PROCESS, _BEAT, _FAILURE = "gear_loader/process", "gear_loader/beat", "gear_loader/failure"
_ANSWER, _CONNECT = (
    5.0,
    30.0,
)  # seconds after which an answer of the store, and a connection to it, have failed
_SILENT_STORE = "torch.distributed's store, which rank 0 usually holds, does not answer."
_ENDED, _STOPPED = "ZXx", "Tt"  # states in /proc/<pid>/stat


class SilentStoreError(RuntimeError):
    """torch.distributed's store does not answer."""


class Liveness:
    """This process's heartbeat, and the state of the processes of other ranks.

    Each rank writes its host, process id and start time to the store, and a thread of it writes a heartbeat every
    second. So ranks on the same machine know at once that a process has ended; that a process on another machine has
    ended, or is stopped, follows from its missing heartbeats. A rank that waits for others has heartbeats all the same.
    The thread also reads which failure a rank has found: a rank that is busy meanwhile learns of it although the store
    ends, with the rank that holds it.

    Ranks are numbered as in the default process group.

    Args:
        store: store of the default process group.

    Attributes:
        store: a connection of its own to the same store.
        positions: key of an exchange -> `Exchange.position` of this rank, sent with the heartbeats.
        failed: whether an exchange of this process has failed: then closing does not wait for other ranks.
        failure: key of an exchange and the note of its failure, the last that a rank has told of; None without.
    """

    _current: Liveness | None = None

    def __init__(self, store: Any, rank: int) -> None:
        self._given = store
        self._owner = os.getpid()
        self.store = store
        self.rank = rank
        self.positions: dict[str, Any] = {}
        self.failed = False
        self.failure: tuple[str, str] | None = None
        self._node = this_node()
        self._processes: dict[int, tuple[int, int]] = {}  # of this node
        self._stuck: threading.Thread | None = None
        self._over = Event()
        self.ask(self._register, seconds=_CONNECT)
        self._thread = background_thread(self._beats, "gear-loader-heartbeat", stop=self.stop)
        self._thread.start()

    def _register(self) -> None:
        if hasattr(self.store, "clone"):  # calls of the shared connection may block for long
            self.store = self.store.clone()
        # Each node has a list of its processes, so that a rank does not read the entries of all ranks.
        # One call of the store writes an entry: a rank that is killed meanwhile has it or not.
        own = (self.rank, os.getpid(), _process(os.getpid())[1])
        self.store.append(f"{_PROCESS}/{self._node}", json.dumps(own) + "\n")
        self._beat(0)

    @classmethod
    def of_job(cls) -> Liveness | None:
        """Return the liveness of this process's default process group; None if the group has no store.

        Raises:
            RuntimeError: the store does not answer.
        """
        store = default_store()
        current = cls._current
        if current is not None and (current._given is not store or current._owner != os.getpid()):
            current.stop()
            current = None
        if current is None and store is not None:
            current = cls(store, dist.get_rank())
        cls._current = current
        return current

    def stop(self) -> None:
        """End the heartbeat."""
        self._over.set()

    def mark_closed(self, key: str) -> None:
        """Let the heartbeats tell that this rank has closed an exchange. The garbage collector may call it."""
        number = self.positions.pop(key, (0,))[0]
        self.positions[key] = (number, CLOSED, "has closed it")
        closed = [key for key, position in list(self.positions.items()) if position[1] == CLOSED]
        for old in closed[:-_MOST_CLOSED]:
            self.positions.pop(old, None)

    # ---------------------------------------------------------------- heartbeats

    def _beats(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
                if self.store.check([_FAILURE]):
                    self.failure = tuple(json.loads(self.store.get(_FAILURE)))
            except Exception:  # the store has ended, with the rank that holds it
                return

    def tell_failure(self, key: str, note: str) -> None:
        """Let all ranks know the note of an exchange's failure, also those that do not wait in it now.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.failure = (key, note)
        self.write(_FAILURE, json.dumps(self.failure))

    def _beat(self, count: int) -> None:
        self.store.set(f"{_BEAT}/{self.rank}", json.dumps([count, dict(self.positions)]))

    def beats(self, ranks: Sequence[int]) -> dict[int, tuple[int, dict[str, Any]]]:
        """Number of the last heartbeat, and `positions`, of each of some ranks that has had one.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> dict[int, tuple[int, dict[str, Any]]]:
            keys = [f"{_BEAT}/{rank}" for rank in ranks]
            if self.store.has_extended_api() and self.store.check(keys):
                texts = self.store.multi_get(keys)
            else:
                texts = [self.store.get(key) if self.store.check([key]) else None for key in keys]
            known = zip(ranks, texts, strict=True)
            return {rank: tuple(json.loads(text)) for rank, text in known if text is not None}

        found: dict[int, tuple[int, dict[str, Any]]] = self.ask(read)
        return found

    # ---------------------------------------------------------------- processes

    def learn(self) -> None:
        """Read the list of this node's processes.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> None:
            for entry in self.store.get(f"{_PROCESS}/{self._node}").splitlines():
                rank, pid, started = json.loads(entry)
                self._processes[rank] = (pid, started)

        self.ask(read)

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose process has ended, among those whose process ids this process sees."""
        return [rank for rank in ranks if self._state(rank) == ""]

    def stopped(self, ranks: Sequence[int]) -> list[int]:
        """Return the ranks whose process is stopped, among those whose process ids this process sees."""
        return [rank for rank in ranks if self._state(rank) in tuple(_STOPPED)]

    def _state(self, rank: int) -> str | None:
        """Return the state of a rank's process, "" if it has ended; None if the process is unknown."""
        known = self._processes.get(rank)
        if known is None:
            return None
        pid, started = known
        state, found = _process(pid)
        return "" if found != started or state in tuple(_ENDED) else state

    # ---------------------------------------------------------------- the store

    def ask(self, call: Callable[[], Any], *, seconds: float = _ANSWER) -> Any:
        """Call a function that uses the store, in a thread: the store's host may be stopped.

        Raises:
            SilentStoreError: the store does not answer; the call may still end, in its thread.
            RuntimeError: the call has failed.
        """
        if self._stuck is not None and self._stuck.is_alive():
            raise SilentStoreError(_SILENT_STORE)
        answer: list[Any] = []
        failure: list[BaseException] = []

        def work() -> None:
            try:
                answer.append(call())
            except BaseException as error:
                failure.append(error)

        thread = background_thread(work, "gear-loader-store")
        thread.start()
        thread.join(seconds)
        if failure:
            raise failure[0]
        if not answer:
            self._stuck = thread
            raise SilentStoreError(_SILENT_STORE)
        return answer[0]

    def read(self, key: str) -> str | None:
        """Return the store's value under a key, or None.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> str | None:
            return self.store.get(key).decode() if self.store.check([key]) else None

        found: str | None = self.ask(read)
        return found

    def read_all(self, keys: Sequence[str]) -> list[str]:
        """Return the store's values under keys that are there.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> list[str]:
            many = self.store.multi_get(keys) if self.store.has_extended_api() else map(self.store.get, keys)
            return [value.decode() for value in many]

        found: list[str] = self.ask(read)
        return found

    def write(self, key: str, value: str) -> None:
        """Write a value under a key of the store.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.ask(lambda: self.store.set(key, value))


def _process(pid: int) -> tuple[str, int]:
    """Return the state of a process, and its start in ticks since boot; ("", -1) for a missing process."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", -1
    return fields[0].decode(), int(fields[19])


def default_store() -> Any:
    """Return the store of the default process group, for which torch has no public name; None if it has no store."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def back_off(turn: int) -> None:
    """Sleep between two reads of the store: longer with each turn, up to 0.1 s."""
    time.sleep(min(0.001 * 1.5 ** min(turn, 12), 0.1))
