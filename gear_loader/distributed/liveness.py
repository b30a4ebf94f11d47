"""Which ranks of the job are alive, and how far they are: told through torch.distributed's store."""

from __future__ import annotations

import dataclasses
import json
import os
import threading
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch.distributed as dist

from gear_loader.distributed.topology import this_node

__all__ = ["BEAT", "Beat", "Liveness", "SilentStoreError", "default_store", "pause"]

BEAT = 1.0  # seconds between two heartbeats of a rank
_PROCESS, _BEAT = "gear_loader/process", "gear_loader/beat"
_PATIENCE, _CONNECTING = (
    5.0,
    30.0,
)  # seconds that an answer of the store, and a connection to it, are waited for
_SILENT_STORE = "torch.distributed's store, which rank 0 usually holds, does not answer."
_ENDED, _STOPPED = "ZXx", "Tt"  # states in /proc/<pid>/stat


class SilentStoreError(RuntimeError):
    """torch.distributed's store does not answer."""


@dataclasses.dataclass(frozen=True)
class Beat:
    """The last heartbeat of a rank.

    Attributes:
        count: beats so far.
        positions: exchange -> how many calls of it the rank has begun, and the kind of the last one.
    """

    count: int
    positions: dict[str, Any]


class Liveness:
    """This process's heartbeat, and what is known of the processes of other ranks.

    Each rank leaves its host, process id and start time in the store, and a thread of it writes a heartbeat every
    second. So a process that ended is known at once to ranks that see its process id, and one that ended, or was
    stopped, on another machine by its heartbeats; a rank that waits for others, in whichever call, is not taken for one
    of these.

    Args:
        store: of the default process group.
        rank: of this process, in the default process group; so are all ranks here.

    Attributes:
        store: a connection of its own to the same store.
        positions: exchange -> `Exchange.position` of this rank: told with the heartbeats.
        failed: whether an exchange of this process has given up: then nothing is waited for at the end.
    """

    _current: Liveness | None = None

    def __init__(self, store: Any, rank: int) -> None:
        self._given = store
        self._owner = os.getpid()
        self.store = store
        self.rank = rank
        self.positions: dict[str, Any] = {}
        self.failed = False
        self._node = this_node()
        self._processes: dict[int, tuple[int, int]] = {}  # of this node
        self._listed = 0
        self._stuck: threading.Thread | None = None
        self._over = threading.Event()
        self.ask(self._register, seconds=_CONNECTING)
        self._thread = threading.Thread(target=self._beats, name="gear-loader-heartbeat", daemon=True)
        self._thread.start()

    def _register(self) -> None:
        if hasattr(self.store, "clone"):  # a connection of its own: calls of the other one may block for long
            self.store = self.store.clone()
        # The processes of a node have a list of their own, so that nobody reads the notes of all ranks.
        mine = (self.rank, os.getpid(), _process(os.getpid())[1])
        place = self.store.add(f"{_PROCESS}/{self._node}", 1)
        self.store.set(f"{_PROCESS}/{self._node}/{place}", json.dumps(mine))
        self._beat(0)

    @classmethod
    def of_job(cls) -> Liveness | None:
        """That of this process's default process group; None if the group has no store.

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

    # ---------------------------------------------------------------- heartbeats

    def _beats(self) -> None:
        count = 0
        while not self._over.wait(BEAT):
            count += 1
            try:
                self._beat(count)
            except Exception:  # the store has gone, with the rank that holds it
                return

    def _beat(self, count: int) -> None:
        self.store.set(f"{_BEAT}/{self.rank}", json.dumps([count, dict(self.positions)]))

    def beats(self, ranks: Sequence[int]) -> dict[int, Beat]:
        """The last heartbeats of some ranks: of those that have had one.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> dict[int, Beat]:
            keys = [f"{_BEAT}/{rank}" for rank in ranks]
            if self.store.has_extended_api() and self.store.check(keys):
                told = self.store.multi_get(keys)
            else:
                told = [self.store.get(key) if self.store.check([key]) else None for key in keys]
            return {
                rank: Beat(*json.loads(text))
                for rank, text in zip(ranks, told, strict=True)
                if text is not None
            }

        found: dict[int, Beat] = self.ask(read)
        return found

    # ---------------------------------------------------------------- processes

    def learn(self) -> None:
        """Look up the processes of this node's ranks that are not known yet.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> None:
            key = f"{_PROCESS}/{self._node}"
            for place in range(self._listed + 1, self.store.add(key, 0) + 1):
                if not self.store.check([f"{key}/{place}"]):
                    return  # about to be written
                rank, pid, started = json.loads(self.store.get(f"{key}/{place}"))
                self._processes[rank] = (pid, started)
                self._listed = place

        self.ask(read)

    def ended(self, ranks: Sequence[int]) -> list[int]:
        """Those whose process has ended, as far as their process ids can be seen from here."""
        return [rank for rank in ranks if self._state(rank) == ""]

    def stopped(self, ranks: Sequence[int]) -> list[int]:
        """Those whose process is stopped, as far as their process ids can be seen from here."""
        return [rank for rank in ranks if self._state(rank) in tuple(_STOPPED)]

    def _state(self, rank: int) -> str | None:
        """The state of a rank's process, "" if it has ended; None if it is not known."""
        known = self._processes.get(rank)
        if known is None:
            return None
        pid, started = known
        state, found = _process(pid)
        return "" if found != started or state in tuple(_ENDED) else state

    # ---------------------------------------------------------------- the store

    def ask(self, call: Callable[[], Any], *, seconds: float = _PATIENCE) -> Any:
        """Call something that asks the store, for a few seconds at most: its host may be stopped.

        Raises:
            SilentStoreError: it does not answer; the call may still end, in its thread.
            RuntimeError: as the call.
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

        thread = threading.Thread(target=work, name="gear-loader-store", daemon=True)
        thread.start()
        thread.join(seconds)
        if failure:
            raise failure[0]
        if not answer:
            self._stuck = thread
            raise SilentStoreError(_SILENT_STORE)
        return answer[0]

    def read(self, key: str) -> str | None:
        """What the store has under a key, if there is something.

        Raises:
            RuntimeError: the store does not answer.
        """

        def read() -> str | None:
            return self.store.get(key).decode() if self.store.check([key]) else None

        found: str | None = self.ask(read)
        return found

    def write(self, key: str, value: str) -> None:
        """Let the store have a value under a key.

        Raises:
            RuntimeError: the store does not answer.
        """
        self.ask(lambda: self.store.set(key, value))


def _process(pid: int) -> tuple[str, int]:
    """The state of a process and when it began, in ticks since the machine's start; ("", -1) if there is none."""
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return "", -1
    return fields[0].decode(), int(fields[19])


def default_store() -> Any:
    """The store of the default process group, which torch has no public name for; None if it has none."""
    get = getattr(dist.distributed_c10d, "_get_default_store", None)
    return None if get is None else get()


def pause(turn: int) -> None:
    """Sleep between two looks at the store: shortly at first."""
    time.sleep(min(0.001 * 1.5**turn, 0.1))
