"""Rows of n trajectories, appended with the values that follow them by one compiled call."""

from __future__ import annotations

import math
import threading
import time
from typing import Any

import numpy as np

from gear_loader.errors import GearError
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_STEPS
from gear_loader.storage.appender import here
from gear_loader.storage.operations.appending import (
    AHEAD_AT,
    AHEAD_AT_ONCE,
    AHEAD_COLUMNS,
    AHEAD_CUT,
    AHEAD_END,
    AHEAD_FIRST,
    AHEAD_HEAD,
    AHEAD_LANES,
    AHEAD_ONCE,
    AHEAD_OVERLAP,
    AHEAD_PID,
    AHEAD_PUBLISHES,
    AHEAD_REWARD,
    AHEAD_ROWS,
    AHEAD_START,
    AHEAD_STATE,
    NEVER,
    parts_of,
)
from gear_loader.storage.operations.view import DONE, UNREADY
from gear_loader.storage.states import READY, WRITING
from gear_loader.utils.arrays import Array, data_address


class GrowingRows:
    """Appends rows of all lanes of a sink; see `appending.append_lanes`. The caller has checked them.

    Attributes:
        names: of the columns that rows have. finals: those with final steps.
        hidden: whether trajectories become visible when they end: if the sink is a `BlockSink`, not a `GrowingSink`.
        sources, following: int64 [C, 3]: address of each column's rows, and of the values after them (of those with
            final steps), bytes from lane to lane, and from row to row.
        kinds: int64 [K, n]: kinds of the rows. over, out: int64 [n], as there.
        left: whether an error has left rows that are not appended.
        unpublished: whether rows have been appended since the last `publish`.
        priorities: float32 [n], of trajectories that begin. once_sources: int64 [O, 2], as there.

    Args:
        sink: through which nothing else is added. length: K.
        cut: steps at which a trajectory ends, or -1.
        reward: column of rewards.
        first: column, bool, that tells which rows are the first of an episode; it is none of `names`, but the last one
            of the schema. overlap: steps that trajectories of an episode, which `cut` has made, have in common.
    """

    def __init__(
        self,
        sink: Any,
        *,
        length: int = 1,
        cut: int = -1,
        reward: str | None = None,
        first: str | None = None,
        overlap: int = 0,
    ) -> None:
        schema, n = sink.schema.steps, len(sink.lanes)
        columns, once = sink._columns, sink._once_columns
        self.names = [name for name in schema if name != first]
        self.hidden = not sink.grows
        self.finals = [name for name, column in schema.items() if column.final]
        parts = parts_of(n, len(columns), length, len(once), overlap)
        sizes = [math.prod(shape) for shape in parts.values()]
        self._request: Array = np.zeros(AHEAD_HEAD + sum(sizes), dtype=np.int64)
        views, begin = {}, AHEAD_HEAD
        for (name, shape), size in zip(parts.items(), sizes, strict=True):
            views[name] = self._request[begin : begin + size].reshape(shape)
            begin += size
        self._sink, self._table, self._index, self._lanes, self._n = (
            sink,
            sink.table,
            sink.index,
            sink.lanes,
            n,
        )
        self._evict = int(sink.table.policy[0])
        self.sources, self.following = views["sources"], views["following"]
        self.kinds, self.over, self.out = (views[name] for name in ("kinds", "over", "out"))
        self.priorities = views["priorities"].view(np.float32)[:n]
        self.once_sources = views["once_sources"]
        self.priorities[:], self.out[:] = UNSET, -1
        views["columns"][:], views["once"][:] = columns, once
        self._before = {name: np.zeros((n, schema[name].step_bytes), np.uint8) for name in self.finals}
        for c, name in enumerate(self.names):
            if name in self._before:
                views["finals"][c] = 1
                views["before"][c] = data_address(self._before[name]), schema[name].step_bytes
        request = self._request
        request[[AHEAD_LANES, AHEAD_COLUMNS, AHEAD_ROWS, AHEAD_ONCE]] = n, len(columns), length, len(once)
        request[[AHEAD_CUT, AHEAD_AT_ONCE]] = NEVER if cut < 0 else cut, not self.hidden
        request[AHEAD_REWARD] = 0 if reward is None else self.names.index(reward)
        request[[AHEAD_STATE, AHEAD_FIRST, AHEAD_OVERLAP]] = WRITING if self.hidden else READY, -1, overlap
        self._firsts = np.array([False, True])  # 0 and 1, as `append_lanes` wants them
        if first is not None:
            request[AHEAD_FIRST] = place = list(schema).index(first)
            self.sources[place, 0] = data_address(self._firsts)
        request[[AHEAD_PID, AHEAD_START]] = self._index.readers.here()
        self.left, self.unpublished, self._count = False, False, 0
        self._pid = here.pid
        self._limited = self._index.arrays.rules.rate_limiter is not None
        self._waits_at_once = not self._limited and self._index.admission.max_age is None

    @classmethod
    def of(cls, writer: Any, **options: Any) -> GrowingRows:
        """Those of a `VectorWriter`, which appends nothing else."""
        writer._moves = True
        return cls(writer._sink, **options)

    @property
    def at_once(self) -> bool:
        """Whether each row is visible when `append` returns, or when its trajectory ends if it is hidden until then;
        else with a later one, or when `publish` returns."""
        return self.hidden or bool(self._request[AHEAD_AT_ONCE])

    @at_once.setter
    def at_once(self, value: bool) -> None:
        self._request[AHEAD_AT_ONCE] = value and not self.hidden

    def append(self, count: int = 1) -> None:
        """Append the first `count` rows of each lane; those that an error has left are dropped.

        Raises:
            As `VectorWriter.append`; `left` tells whether rows are not appended.
        """
        if self.left:
            self.drop()
        if count != self._count:
            self._request[AHEAD_END], self._count = count * self._n, count
        self.left = self.unpublished = True
        self.resume()

    def resume(self) -> None:
        """Append the rows that an error has left; raises as `append`."""
        table, index = self._table, self._index
        if table._index is None or here.pid != self._pid:
            table.check_open()
            raise GearError(
                f"{self._sink.name} is written by another process; {self._sink.remedy} in each process."
            )
        if self._waits_at_once:
            operation = index.arrays.ops.append_lanes
            given = index.arrays.where, self._lanes, self._request, time.monotonic_ns(), self._evict
            if index.recovery.lock.run(operation, *given) == DONE:
                self.left = False
                return
        self._wait()
        self.left = False

    def drop(self) -> None:
        """Forget the rows that an error has left."""
        self._request[AHEAD_AT], self.left = 0, False

    def publish(self) -> None:
        """Make all rows visible; raises as `append`."""
        try:
            self._request[AHEAD_PUBLISHES] = 1
            self.append()
            self.unpublished = False
        finally:
            self._request[AHEAD_PUBLISHES] = 0
            self.drop()

    def _wait(self) -> None:
        """Go on with what has to wait, or to be let in, row by row."""
        sink, index, lanes, request = self._sink, self._index, self._lanes, self._request
        ops, where = index.arrays.ops, index.arrays.where
        evict, wait = sink.table.policy
        sink._thread = threading.get_ident()
        first, end = int(request[AHEAD_AT]), int(request[AHEAD_END])

        def append(chosen: Array, at: Array) -> int:
            request[AHEAD_AT], request[AHEAD_END] = first + at[0], first + len(chosen)
            answer: int = UNREADY
            try:
                answer = ops.append_lanes(where, lanes, request, time.monotonic_ns(), int(evict))
            finally:
                at[0] = len(chosen) if answer == DONE else request[AHEAD_AT] - first
                request[AHEAD_END] = end
            return answer

        def missing(lane: int) -> tuple[int, int, int]:
            steps = int(lanes[lane, LANE_STEPS])
            more = 1 + (int(request[AHEAD_OVERLAP]) if steps == request[AHEAD_CUT] else 0)
            return int(steps in (0, request[AHEAD_CUT])), -(-(more + 1) // sink._block_steps), more

        chosen = np.arange(first, end) % self._n
        index.change_lanes(
            lanes, chosen, append, needed=missing, evict=evict, wait=wait, inserts=self._limited
        )
