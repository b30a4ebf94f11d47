"""Rendezvous of ranks: barriers in torch.distributed's store, and the process group of an exchange."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import datetime
import os
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gear_loader.distributed.liveness import Liveness, SilentStoreError, back_off
from gear_loader.utils.background import background_thread

if TYPE_CHECKING:
    from gear_loader.distributed.failure_search import FailureSearch

_SLICE = 0.5  # seconds between two checks of the other ranks while the group is made
# Seconds after the exchange's deadline at which gloo gives up too: until then a process cannot end.
_LATER = 2.0


@dataclasses.dataclass(frozen=True)
class StoreBarrier:
    """Barriers of some ranks in torch.distributed's store, where missing ranks can be named; gloo cannot name them.

    Args:
        prefix: prefix of the store's keys.
        rank: this rank's number in the exchange.
        ranks: numbers of all ranks in the default process group.
    """

    liveness: Liveness
    prefix: str
    rank: int
    ranks: Sequence[int]

    def arrive(self, name: str, *, named: bool, doing: str = "") -> str:
        """Write to the store that this rank has arrived, unless the first one does something else.

        Args:
            named: whether each rank writes a key of its own, for `missing`.

        Returns:
            Number and `doing` of the first rank that has arrived.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        store, key = self.liveness.store, f"{self.prefix}/{name}"

        def write() -> str:
            mine = f"{self.ranks[self.rank]} {doing}"
            first = mine if not doing else store.compare_set(f"{key}/doing", "", mine).decode()
            if _doing(first) != doing:
                return first  # it has not arrived: the others find out while they wait
            if named:
                store.set(f"{key}/{self.rank}", "1")
            if store.add(key, 1) == len(self.ranks):
                store.set(f"{key}/all", "1")
            return first

        first: str = self.liveness.ask(write)
        return first

    def complete(self, name: str) -> bool:
        """Return whether all ranks have arrived.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        return self.liveness.read(f"{self.prefix}/{name}/all") is not None

    def wait(self, name: str, search: FailureSearch, *, named: bool, doing: str = "") -> None:
        """Arrive, and wait until all ranks have arrived.

        Args:
            search: finds the rank that is missing.
            named, doing: as for `arrive`.

        Raises:
            RankError: a rank has failed, does something else, or is missing at the deadline.
        """
        turn = 0
        with search.blaming():
            first = _unless_silent(lambda: self.arrive(name, named=named, doing=doing))
            if first is not None and _doing(first) != doing:
                raise search.differs(doing, f"rank {first}")
            while not _unless_silent(lambda: self.complete(name)):
                search.check()
                back_off(turn)
                turn += 1

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not arrived, by their numbers in the default process group.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        keys = [f"{self.prefix}/{name}/{rank}" for rank in range(len(self.ranks))]
        return [rank for rank, key in zip(self.ranks, keys, strict=True) if self.liveness.read(key) is None]

    def delete(self, name: str) -> None:
        """Delete the keys of a barrier that all ranks have left.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        store, keys = self.liveness.store, [f"{self.prefix}/{name}{end}" for end in ("", "/all", "/doing")]
        self.liveness.ask(lambda: [store.delete_key(key) for key in keys])


class GlooGroup:
    """A gloo process group: a connection to each rank, two files and three threads, until it is closed.

    torch's list of groups refers to it: it is not closed when nothing else does.

    Args:
        ranks: numbers of the ranks in the default process group.
        timeout: seconds that a call of the exchange waits.
        search: finds the rank that is missing.
        own: a store for this group alone, and this rank; torch then knows no such group, and need not have made as many
            groups on all ranks. None: a group of torch.

    Attributes:
        group: torch's process group; None when it is closed.
        work: torch's `Work` of the last collective. Without it gloo's thread would be the last to refer to the tensors,
            a moment later, and wait for the GIL to free them: a process that ends just then aborts.

    Raises:
        RankError: a rank has failed, or is missing at the deadline.
    """

    def __init__(
        self, ranks: Sequence[int], timeout: float, search: FailureSearch, own: tuple[Any, int] | None = None
    ) -> None:
        _close_stuck()
        self.work: Any = None
        self._process, self._listed = os.getpid(), own is None
        made: list[Any] = []
        later = datetime.timedelta(seconds=timeout + _LATER)

        def new() -> Any:
            if own is None:
                local = len(ranks) < dist.get_world_size()
                return dist.new_group(
                    list(ranks), backend="gloo", timeout=later, use_local_synchronization=local
                )
            if len(ranks) == 1:
                return ()
            store = dist.distributed_c10d.PrefixStore("/".join(map(str, ranks)), own[0])
            return dist.ProcessGroupGloo(store, ranks.index(own[1]), len(ranks), later)

        def make() -> None:
            try:
                made.append(new())
            except Exception as error:
                made.append(error)

        # In a thread of its own: torch and gloo have deadlines of their own.
        thread = background_thread(make, "gear-loader-rendezvous")
        thread.start()
        while not made:
            thread.join(_SLICE)
            if not made:
                search.check()
        if isinstance(made[0], Exception):
            raise search.after(made[0])
        self.group: Any = made[0]

    def close(self) -> None:
        """Close the connections, and end the threads. Idempotent; the garbage collector may call it.

        Destroying a group waits for its collectives. So one with a collective that other ranks keep from ending stays
        open until that has ended, and the next group is made or closed.
        """
        _close_stuck()
        if self.group is not None and not self._close():
            _stuck.append(self)

    def _close(self) -> bool:
        """Close the group unless a collective runs; return whether it is closed."""
        if self._process != os.getpid():
            return False  # a forked child, without the group's threads
        if self.work is not None and not self.work.is_completed():
            return False
        group, self.group = self.group, None
        if self._listed and group is not None and dist.is_initialized():
            with contextlib.suppress(Exception):
                dist.destroy_process_group(group)
        del group  # waits for gloo's thread, which may still refer to the tensors of `work`
        self.work = None
        return True


_stuck: collections.deque[GlooGroup] = collections.deque()  # closed, but for a collective that has not ended


def _close_stuck() -> None:
    with contextlib.suppress(IndexError):  # another thread does the same
        for _ in range(len(_stuck)):
            group = _stuck.popleft()
            if not group._close():
                _stuck.append(group)


def _doing(first: str) -> str:
    """Return what the first rank does, from the result of `StoreBarrier.arrive`."""
    return first.partition(" ")[2]


def _unless_silent(call: Callable[[], Any]) -> Any:
    """Call a function that uses the store; return None if the store does not answer."""
    try:
        return call()
    except SilentStoreError:
        return None
