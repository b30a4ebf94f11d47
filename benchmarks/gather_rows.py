"""Random rows of the workloads for queues of launches."""

from __future__ import annotations

from typing import Any

import torch

import gear_loader as gear
from benchmarks.engine import Engine, Launch
from benchmarks.harness import Incorrect
from benchmarks.workloads import Data, expect
from gear_loader.collection.collector import TableSource, collector_for
from gear_loader.collection.plans import plans_of
from gear_loader.kernels import gather as kernel


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


def launch(rows: QueueRows, i: int, programs: int | None) -> Launch:
    """The gather kernel on batch `i` of the queue; without `programs` with the launcher's choice of them."""
    plan, slots, anchors = rows.plans[i % 2], rows.slots[i], rows.anchors[i]
    return lambda: kernel.gather(plan, slots, anchors, *rows.index, programs=programs)
