"""Makes a repeated STORE harmless: a client sends it again when the answer did not arrive."""

from __future__ import annotations

import collections
import threading
from collections.abc import Callable
from concurrent.futures import Future

import numpy as np

from gear_loader.errors import LockTimeoutError
from gear_loader.utils.arrays import Array

_REMEMBERED = 1 << 14  # requests; a client repeats its latest one only
_WAIT = 60.0  # seconds for the first execution to end


class StoredOnce:
    """Executes each store of one table once. Requests are known by the id of their first trajectory; thread-safe.

    A request that this process has executed is answered from memory, also when its trajectories were evicted since. If
    an earlier process may have executed it, the table is searched for its ids: a store is all or nothing, so one of
    them proves it.
    """

    def __init__(self, find: Callable[[Array], Array]) -> None:
        self._find = find
        self._guard = threading.Lock()
        self._running: dict[int, Future[Array]] = {}
        self._done: collections.OrderedDict[int, Array | int] = collections.OrderedDict()

    def may_wait(self, ids: Array, *, again: bool) -> bool:
        """Whether `run` may wait for the lock, or for another execution."""
        with self._guard:
            return again or int(ids[0]) in self._running

    def run_at_once(self, identity: int, store: Callable[[], int | None]) -> int | None:
        """`run` of one trajectory that was not sent before, by a `store` that does not wait.

        Args:
            identity: its id. store: returns its slot, or None if it has stored nothing.

        Returns:
            The slot; None, having stored nothing, if `run` has to be used.

        Raises:
            Any error of `store`.
        """
        with self._guard:  # held meanwhile, for less time than it takes to let others know
            if identity in self._running:
                return None
            slot = store()
            if slot is not None:
                self._remember(identity, slot)
            return slot

    def _remember(self, key: int, slots: Array | int) -> None:
        self._done[key] = slots
        while len(self._done) > _REMEMBERED:
            self._done.popitem(last=False)

    def run(self, ids: Array, store: Callable[[], Array], *, again: bool) -> Array:
        """Store trajectories, unless a request with the same ids has stored them.

        Args:
            ids: int64 [n], the same each time that the request is sent. store: stores them; returns their slots.
            again: whether the request may have been executed before.

        Returns:
            Their slots when they were stored, int64 [n]; -1 for those that were evicted since, if an earlier process
            stored them.

        Raises:
            LockTimeoutError: the first execution has not ended after a minute. Any error of `store`.
        """
        key = int(ids[0])
        future: Future[Array] = Future()
        with self._guard:
            if again and key in self._done:
                return np.atleast_1d(self._done[key])
            first = self._running.get(key)
            if first is None:
                self._running[key] = future
        if first is not None:
            return self._result_of(first)
        try:
            slots = self._find(ids) if again else ids[:0]
            slots = slots if (slots >= 0).any() else np.asarray(store())
        except BaseException as error:
            with self._guard:
                del self._running[key]
            future.set_exception(error)
            raise
        with self._guard:
            del self._running[key]
            self._remember(key, slots)
        future.set_result(slots)
        return slots

    def _result_of(self, first: Future[Array]) -> Array:
        try:
            return first.result(_WAIT)
        except TimeoutError:
            raise LockTimeoutError(
                f"The request was sent again, and its first execution has not ended after {_WAIT:g} s: the table is "
                "locked or full. Try again later."
            ) from None
