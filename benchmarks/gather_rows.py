"""Random rows for queues of launches: of the workloads, and of one column in rows of one size."""

from __future__ import annotations

import dataclasses
from typing import Any
from unittest import mock

import torch

import gear_loader as gear
from benchmarks.engine import Engine, Launch
from benchmarks.harness import Incorrect
from benchmarks.workloads import Data, expect
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.collection.plans import plans_of
from gear_loader.kernels import gather as kernel

STEP_WORDS = {"step128": 32, "step64": 16, "step44": 11}
"""Columns of the table that is swept over: words of a step."""


class QueueRows:
    """Rows for a queue of launches, which write to two batches by turns, by two plans.

    index: the table's on the device. slots, anchors: int64 [launches, batch] on the device. bytes: of a batch. whole:
    whether each row of a column lies in one piece in the table, and all its steps exist.
    """

    whole = True

    def __init__(
        self, engine: Engine, table: gear.Table, windows: Any, batch: int, row_bytes: int, launches: int
    ) -> None:
        self.table, self.windows, self.bytes = table, windows, batch * row_bytes
        collector = collector_for(TableSource(table), windows, batch_size=batch, device=engine.device)
        if engine.device.type == "cuda" and not collector.zero_copy:
            raise Incorrect("the table could not be pinned (see the notice): there is no kernel to measure")
        self.buffers = [collector.buffers() for _ in range(2)]
        self.plans = [plans_of(table, each.outputs, {}).steps for each in self.buffers]
        extent, block_ids = (
            torch.from_numpy(array).to(engine.device) for array in table._engine.reader().index_arrays()
        )
        self.index = extent, block_ids.reshape(-1)
        self.slots = torch.empty(launches, batch, dtype=torch.int64, device=engine.device)
        self.anchors = torch.empty_like(self.slots)

    def refresh(self) -> None:
        """New random rows for every launch."""
        raise NotImplementedError

    def check(self, i: int) -> None:
        """Compare what launch `i` has just written with what it should have."""
        raise NotImplementedError


class WorkloadRows(QueueRows):
    """Random rows of a workload: their slots and anchors on the device."""

    def __init__(self, engine: Engine, data: Data, table: gear.Table, batch: int, launches: int) -> None:
        workload = data.workload
        windows = dict.fromkeys(workload.schema, workload.window)
        super().__init__(engine, table, windows, batch, workload.row_bytes, launches)
        self._data, self._batch = data, batch
        self._indices = torch.from_numpy(table.indices())
        self._rows = [data.draw(batch) for _ in range(launches)]
        self.whole = workload.anchor == "first" and table._engine.region.layout.block_steps >= workload.steps

    def refresh(self) -> None:
        self._rows = [self._data.draw(self._batch) for _ in self._rows]
        positions = torch.stack([rows.positions for rows in self._rows])
        self.slots.copy_(self._indices[positions])
        self.anchors.copy_(torch.stack([rows.anchors for rows in self._rows]))

    def check(self, i: int) -> None:
        expect(self.buffers[i % 2].batch, self._data.expected(self._rows[i]))


@dataclasses.dataclass(frozen=True)
class RowKind:
    """Rows of one size: windows of `length` steps of a column, starting at multiples of `stride` steps."""

    column: str
    length: int
    stride: int
    step_bytes: int

    @property
    def bytes(self) -> int:
        return self.length * self.step_bytes

    @property
    def aligned(self) -> bool:
        """Whether they start on lines of 128 bytes."""
        return self.stride * self.step_bytes % 128 == 0


def sweep_table(steps: int, trajectories: int) -> gear.Table:
    """A table in which every word of a column holds its own number; a trajectory lies in one piece."""
    table = gear.Table.create(
        {name: gear.Column(torch.int32, (words,)) for name, words in STEP_WORDS.items()},
        max_steps=steps * trajectories,
        max_trajectories=trajectories,
        block_steps=steps,
        memory=gear.Memory(max_blocks=trajectories, packed=False),
    )
    for first in range(0, trajectories, chunk := max(1, trajectories // 32)):
        count = min(chunk, trajectories - first)
        stacked = {
            name: torch.arange(first * steps * words, (first + count) * steps * words, dtype=torch.int32)
            for name, words in STEP_WORDS.items()
        }
        shaped = {name: values.view(count, steps, -1) for name, values in stacked.items()}
        table.extend(shaped, lengths=[steps] * count)
    return table


class SweepRows(QueueRows):
    """Random rows of one kind, drawn on the device; the table is what `sweep_table` made of these sizes."""

    def __init__(
        self,
        engine: Engine,
        table: gear.Table,
        kind: RowKind,
        batch: int,
        launches: int,
        sizes: tuple[int, int],
    ) -> None:
        super().__init__(engine, table, {kind.column: gear.Window(kind.length)}, batch, kind.bytes, launches)
        self._kind, (self._steps, self._trajectories) = kind, sizes
        self._indices = torch.from_numpy(table.indices()).to(engine.device)
        self._positions = torch.empty_like(self.slots)

    def refresh(self) -> None:
        kind = self._kind
        self._positions.random_(0, self._trajectories)
        self.slots.copy_(self._indices[self._positions])
        self.anchors.random_(0, (self._steps - kind.length) // kind.stride + 1).mul_(kind.stride)

    def check(self, i: int) -> None:
        kind, words = self._kind, STEP_WORDS[self._kind.column]
        batch = self.buffers[i % 2].batch
        device = batch["mask"].device
        first = ((self._positions[i] * self._steps + self.anchors[i]) * words).to(torch.int32)
        inside = torch.arange(kind.length * words, dtype=torch.int32, device=device)
        found = batch[kind.column].view(len(first), -1)
        for start in range(0, len(first), 64):  # in parts, so that the check needs little memory
            part = slice(start, start + 64)
            if not torch.equal(found[part], first[part, None] + inside):
                raise Incorrect(f"rows {start} to {start + 63} differ from the table")
        if not bool(batch["mask"].all()):
            raise Incorrect("the mask is False where the steps exist")


def launch(rows: QueueRows, i: int, programs: int | None, shared: int | None = None) -> Launch:
    """The gather kernel on batch `i` of the queue; without `programs` with the launcher's choice of them.

    With `shared` as it is launched on a GPU whose blocks have so many bytes of shared memory.
    """
    plan, slots, anchors = rows.plans[i % 2], rows.slots[i], rows.anchors[i]

    def queue() -> None:
        known = (lambda *_: shared) if shared else kernel.shared_memory
        with mock.patch.object(kernel, "shared_memory", known):
            kernel.gather(plan, slots, anchors, *rows.index, programs=programs)

    return queue
