"""Streams of a device whose steps are copied to the host, and appended there; trajectories end where a mask says."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from gear_loader.errors import GearError
from gear_loader.storage.appender import too_long
from gear_loader.storage.block_sink import BlockSink
from gear_loader.storage.device_chunks import Rows
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.utils.arrays import Array
from gear_loader.utils.streams import current_stream

AHEAD = 3
"""Most steps that are on their way."""


class _Copied(NamedTuple):
    """A step on its way to the host: its values, and an event after their copies, None on the CPU.

    `left`: bool [n], environments whose row is not appended yet.
    """

    rows: Rows
    done: torch.Tensor | None
    last: Rows | None
    priorities: Array | None
    left: Array
    arrived: torch.cuda.Event | None


class CopiedEpisodes:
    """As `Episodes`, where memory cannot be pinned, and on the CPU: steps are copied to the host and appended there."""

    chunk_steps = None

    def __init__(self, make_sink: Callable[[int], BlockSink], n: int, device: torch.device) -> None:
        sink = make_sink(n)
        self._writer = VectorWriter(sink)
        self._finals = int(any(column.final for column in sink.schema.steps.values()))
        self._num, self._device, self._longest = n, device, sink.longest
        self._steps: collections.deque[_Copied] = collections.deque()
        self.committed = 0

    @property
    def num_steps(self) -> int:
        """Steps that are on their way."""
        return len(self._steps)

    def put(
        self, steps: Sequence[Rows], done: torch.Tensor | None, last: Rows | None, priorities: Array | None
    ) -> None:
        """Copy a checked step, on the current stream."""
        (rows,) = steps
        for wait in (True, False):
            longest = int(self._writer.num_steps.max()) + len(self._steps) + 1 + self._finals
            if longest <= self._longest:
                break
            if not (wait and self._steps):
                raise too_long(longest, self._longest)
            while self._steps:
                self._know()

        def copied(given: Rows) -> dict[str, torch.Tensor]:
            return {name: value.to("cpu", copy=True, non_blocking=True) for name, value in given.items()}

        mask = {} if done is None else copied({"done": done})
        after = None if last is None else copied(last)
        arrived = torch.cuda.Event() if self._device.type == "cuda" else None
        left = np.ones(self._num, dtype=bool)
        step = _Copied(copied(rows), mask.get("done"), after, priorities, left, arrived)
        if arrived is not None:
            arrived.record(current_stream(self._device))
        self._steps.append(step)

    def take(self) -> None:
        """Append and commit steps that have arrived, in order. Waits where many are on their way."""
        while self._steps:
            arrived = self._steps[0].arrived
            if arrived is not None and len(self._steps) < AHEAD and not arrived.query():
                return
            self._know()

    def _know(self) -> None:
        """Wait for the first step that is on its way, append it, and commit what has ended with it."""
        step, writer = self._steps[0], self._writer
        if step.arrived is not None and not step.arrived.query():
            step.arrived.synchronize()
        done = np.zeros(self._num, dtype=bool) if step.done is None else step.done.numpy()
        try:
            out = writer.append(
                step.rows, done=done, active=step.left, priority=step.priorities, final=step.last
            )
        except GearError:
            self.committed += int(np.count_nonzero(writer.appended & done & step.left))
            step.left[writer.appended] = False
            raise
        self.committed += int(np.count_nonzero(out >= 0))
        self._steps.popleft()

    def finish(self) -> None:
        """Commit all steps. Waits for the GPU."""
        while self._steps:
            self._know()
        before = int(np.count_nonzero(self._writer.num_steps))
        try:
            self._writer.commit()
        finally:
            self.committed += before - int(np.count_nonzero(self._writer.num_steps))

    def wait(self) -> None:
        """Nothing: the table's memory is written by the host alone."""

    def discard(self) -> None:
        """Give back what is not committed."""
        self._steps.clear()
        self._writer.close()
