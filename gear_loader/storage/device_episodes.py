"""Streams of a device cut where a mask on the device says: trajectories end there, and the host learns it later."""

from __future__ import annotations

import collections
from collections.abc import Callable, Sequence

import numpy as np
import torch

from gear_loader.errors import SchemaError, TableFullError
from gear_loader.kernels import append
from gear_loader.kernels.append_plan import AppendColumn, AppendPlan
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_HELD, LANE_STEPS
from gear_loader.storage.appender import Given
from gear_loader.storage.block_sink import BlockSink
from gear_loader.storage.device_chunks import Rows, check_room
from gear_loader.storage.device_images import StepImage, StreamOrder, copy_step, follow_writes, homes
from gear_loader.utils.arrays import Array
from gear_loader.utils.streams import current_stream

AHEAD = 3
"""Trajectories of each environment that have blocks: the one that is written, and those that may follow before the host
knows that it has ended. So many steps can be on their way."""

MOST = AHEAD
"""Most steps that are on their way."""


class _Step:
    """A step of all environments that is on its way.

    Attributes:
        number: steps appended up to it. ends: bool [n], in pinned memory, of this step until it is known.
        priorities: of what ends with it, float32 [n], or None. final: whether that gets final steps.
        arrived: an event after its copies. due: lanes that it commits, int64 [m]; None before its ends are known.
        blocks: what its kernel reads.
    """

    def __init__(
        self, number: int, ends: Array, priorities: Array | None, final: bool, blocks: torch.Tensor
    ) -> None:
        self.number, self.ends, self.priorities, self.final, self.blocks = (
            number, ends, priorities, final, blocks,
        )  # fmt: skip
        self.arrived = torch.cuda.Event()
        self.due: Array | None = None


class Episodes:
    """Cuts the streams of n environments on a GPU where they end; the table's memory is pinned.

    A kernel writes each step into the blocks of its environment's trajectory, and reports which have ended; they are
    committed, step by step and in the order of environments, by a later call.

    Attributes:
        committed: number of trajectories committed so far.
    """

    chunk_steps = None

    def __init__(self, make_sink: Callable[[int], BlockSink], n: int, device: torch.device) -> None:
        self._sink = sink = make_sink(n * AHEAD)
        table, schema = sink.table, sink.schema
        self._num, self._device = n, device
        self._finals = int(any(column.final for column in schema.steps.values()))
        held = min(AHEAD + self._finals, table.longest)
        check_room(table, n, AHEAD, held, "device=", "take fewer environments")
        region = table.region
        columns = []
        # Of each column, where its row goes, and the values after it.
        self._places: list[tuple[str, torch.Tensor, torch.Tensor]] = []
        for names in homes(region, schema.steps):
            rows = StepImage(region, names, n, 2, device, apart=True)
            image = StepImage(region, names, n, 1, device)
            size = region.layout.columns[names[0]].step_stride
            columns.append(AppendColumn(rows.blocks, image.blocks[:, 0], rows.target(), size))
            self._places += [(name, steps[:, 0, 0], steps[:, 1, 0]) for name, steps in rows.columns.items()]
        self._plan = AppendPlan(columns, region.layout.block_steps, AHEAD)
        self._memory = [self._plan.state, self._plan.device_table]
        self._memory += [part for each in columns for part in (each.rows, each.image)]
        self._order = StreamOrder(device)
        self._blocks = torch.empty((n * AHEAD, 0), dtype=torch.int32, device="cpu", pin_memory=True)
        self._ends = torch.zeros((AHEAD, n), dtype=torch.uint8, device="cpu", pin_memory=True)
        self._steps: collections.deque[_Step] = collections.deque()
        self._turn = 0
        self._given = Given(n * AHEAD)
        self._ending = np.ones(n * AHEAD, dtype=bool)
        self._known = 0  # steps of which the ends are known
        self._until = 0  # steps that there is room for in any case
        # Steps before each environment's trajectory, as far as it is known.
        self._begun = np.zeros(n, dtype=np.int64)
        self._lane = np.arange(n) * AHEAD
        self.committed = 0

    @property
    def num_steps(self) -> int:
        """Steps that are on their way."""
        return len(self._steps)

    # ---------------------------------------------------------------- appending

    def put(
        self, steps: Sequence[Rows], done: torch.Tensor | None, last: Rows | None, priorities: Array | None
    ) -> None:
        """Append a checked step, on the current stream."""
        (rows,) = steps
        number = self._known + len(self._steps) + 1
        if number > self._until:
            self._make_room()
        self._order.follow(self._memory)
        for name, place, after in self._places:
            copy_step(place, rows[name])
            if last is not None and name in last:
                copy_step(after, last[name])
        if done is None:
            done = torch.zeros(self._num, dtype=torch.bool, device=self._device)
        self._launch(_Step(number, self._report(), priorities, last is not None, self._blocks), done)

    def _report(self) -> Array:
        """Pinned memory for the ends of a step: that of one that is known."""
        self._turn = (self._turn + 1) % AHEAD
        ends: Array = self._ends[self._turn].numpy()
        return ends

    def _launch(self, step: _Step, done: torch.Tensor | None) -> None:
        done = None if done is None else done.contiguous()
        follow_writes(self._sink.table.region, current_stream(self._device))
        append.append(self._plan, done, self._ends[self._turn], self._blocks, final=step.final)
        step.arrived.record(current_stream(self._device))
        self._steps.append(step)

    def _make_room(self) -> None:
        """Let every lane have room for the next step, whatever ends with those that are on their way."""
        try:
            self._reserve()
        except (SchemaError, TableFullError):
            if not self._steps:
                raise
            while self._steps:  # trajectories may have ended that seem too long, or fill the table
                self._know(self._steps[0])
            self._reserve()

    def _reserve(self) -> None:
        sink, lanes, current = self._sink, self._sink.lanes, self._lane
        needed = len(self._steps) + 1 + self._finals
        lanes[current, LANE_STEPS] = self._known - self._begun
        short = current[lanes[current, LANE_HELD] - lanes[current, LANE_STEPS] < needed]
        # Those that follow have seen at most as many steps when they are known as are on their way now.
        empty = np.flatnonzero(lanes[:, LANE_HELD] == 0)
        for chosen, count in ((short, needed), (empty, min(AHEAD + self._finals, sink.most))):
            if len(chosen):
                try:
                    sink.take_blocks(chosen, count)
                finally:  # some lanes may have got theirs before an error
                    self._show(chosen)
        room = lanes[current, LANE_HELD] - lanes[current, LANE_STEPS] - self._finals
        self._until = self._known + int(room.min())

    def _show(self, chosen: Array) -> None:
        """Let the device see the blocks of lanes, int64 [m]."""
        blocks = self._sink.blocks
        if blocks.shape[1] > self._blocks.shape[1]:
            wider = torch.zeros(blocks.shape, dtype=torch.int32, device="cpu", pin_memory=True)
            wider[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = wider
        first = self._sink.table.region.layout.host_blocks  # number of the first block on the device
        self._blocks.numpy()[chosen, : blocks.shape[1]] = blocks[chosen] - first

    # ---------------------------------------------------------------- committing

    def take(self) -> None:
        """Commit what has ended with steps that have arrived, in order. Waits where no step more can be on its way."""
        while self._steps and (len(self._steps) == MOST or _arrived(self._steps[0])):
            self._know(self._steps[0])

    def _know(self, step: _Step) -> None:
        """Wait for the first step that is on its way, and commit what has ended with it."""
        lanes, given = self._sink.lanes, self._given
        if step.due is None:
            _wait_for(step)
            envs = np.flatnonzero(step.ends)
            due = self._lane[envs]
            lanes[due, LANE_STEPS] = step.number - self._begun[envs]
            given.priorities[due] = UNSET if step.priorities is None else step.priorities[envs]
            self._begun[envs] = step.number
            self._lane[envs] += 1
            self._lane[envs[self._lane[envs] % AHEAD == 0]] -= AHEAD
            self._known = step.number
            step.due = due
            if len(due):
                self._until = 0
        given.last = {} if step.final else None
        left = step.due[lanes[step.due, LANE_STEPS] > 0]
        try:
            self._sink.commit_blocks(left, self._ending, given)
        finally:
            self.committed += len(left) - int(np.count_nonzero(lanes[left, LANE_STEPS]))
        self._steps.popleft()

    def finish(self) -> None:
        """Commit all steps. Waits for the GPU."""
        while self._steps:
            self._know(self._steps[0])
        if (self._begun < self._known).any():
            self._order.follow(self._memory)
            self._launch(_Step(self._known, self._report(), None, False, self._blocks), None)
            self._know(self._steps[0])

    def wait(self) -> None:
        """Wait for the copies that are queued."""
        for step in self._steps:
            _wait_for(step)

    def discard(self) -> None:
        """Wait, and give back what is not committed."""
        self.wait()
        self._steps.clear()
        self._sink.abort(np.arange(len(self._sink.lanes)))


def _arrived(step: _Step) -> bool:
    """Whether a step's bytes and ends are in the host's memory. Does not wait."""
    return bool(step.arrived.query())


def _wait_for(step: _Step) -> None:
    if not _arrived(step):
        step.arrived.synchronize()
