"""Rendezvous of ranks: barriers in torch.distributed's store, and the process group of an exchange."""

from __future__ import annotations

import datetime
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

import torch.distributed as dist

from gear_loader.distributed.liveness import Liveness, SilentStoreError, back_off
from gear_loader.utils.background import background_thread

if TYPE_CHECKING:
    from gear_loader.distributed.failure_search import FailureSearch

__all__ = ["StoreBarrier", "new_gloo_group"]

_SLICE = 0.5  # seconds between two checks of the other ranks while the group is made


class StoreBarrier:
    """Barriers of some ranks in torch.distributed's store, where missing ranks can be named; gloo cannot name them.

    Args:
        liveness: access to the store.
        prefix: prefix of the store's keys.
        rank: this rank's number in the exchange.
        ranks: numbers of all ranks in the default process group.
    """

    def __init__(self, liveness: Liveness, prefix: str, rank: int, ranks: Sequence[int]) -> None:
        self._liveness = liveness
        self._prefix = prefix
        self._rank = rank
        self._ranks = ranks

    def arrive(self, name: str, *, named: bool) -> None:
        """Write to the store that this rank has arrived.

        Args:
            name: name of the barrier.
            named: whether each rank writes a key of its own, for `missing`.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        store, key = self._liveness.store, f"{self._prefix}/{name}"

        def write() -> None:
            if named:
                store.set(f"{key}/{self._rank}", "1")
            if store.add(key, 1) == len(self._ranks):
                store.set(f"{key}/all", "1")

        self._liveness.ask(write)

    def complete(self, name: str) -> bool:
        """Return whether all ranks have arrived.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        return self._liveness.read(f"{self._prefix}/{name}/all") is not None

    def wait(self, name: str, search: FailureSearch, *, named: bool) -> None:
        """Arrive, and wait until all ranks have arrived.

        Args:
            name: name of the barrier.
            search: finds the rank that is missing.
            named: as for `arrive`.

        Raises:
            RankError: a rank has failed, or is missing at the deadline.
        """
        turn = 0
        with search.blaming():
            _unless_silent(lambda: self.arrive(name, named=named))
            while not _unless_silent(lambda: self.complete(name)):
                search.check()
                back_off(turn)
                turn += 1

    def missing(self, name: str) -> list[int]:
        """Return the ranks that have not arrived, by their numbers in the default process group.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        keys = [f"{self._prefix}/{name}/{rank}" for rank in range(len(self._ranks))]
        return [rank for rank, key in zip(self._ranks, keys, strict=True) if self._liveness.read(key) is None]

    def delete(self, name: str) -> None:
        """Delete the keys of a barrier that all ranks have left.

        Raises:
            RuntimeError: the store has failed, or does not answer.
        """
        store, keys = self._liveness.store, [f"{self._prefix}/{name}{end}" for end in ("", "/all")]
        self._liveness.ask(lambda: [store.delete_key(key) for key in keys])


def new_gloo_group(ranks: Sequence[int], timeout: float, search: FailureSearch) -> Any:
    """Make a gloo process group, in a thread of its own: torch and gloo have deadlines of their own.

    Args:
        ranks: numbers of the ranks in the default process group.
        timeout: seconds that a call of the exchange waits.
        search: finds the rank that is missing.

    Raises:
        RankError: a rank has failed, or is missing at the deadline.
    """
    made: list[Any] = []

    def make() -> None:
        try:
            made.append(
                dist.new_group(
                    list(ranks),
                    backend="gloo",
                    timeout=datetime.timedelta(
                        seconds=2 * timeout + 10
                    ),  # later than the exchange's deadline
                    use_local_synchronization=len(ranks) < dist.get_world_size(),
                )
            )
        except Exception as error:
            made.append(error)

    thread = background_thread(make, "gear-loader-rendezvous")
    thread.start()
    while not made:
        thread.join(_SLICE)
        if not made:
            search.check()
    if isinstance(made[0], Exception):
        raise search.after(made[0])
    return made[0]


def _unless_silent(call: Callable[[], Any]) -> Any:
    """Call a function that uses the store; return None if the store does not answer."""
    try:
        return call()
    except SilentStoreError:
        return None
