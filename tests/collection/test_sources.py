"""The sources of the package: a table of this machine, and the disk below one."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
from options_common import nested_table
from source_conformance import SCHEMA, SourceConformance, trajectory

import gear_loader as gear

SIZES: dict[str, Any] = {"max_steps": 4000, "max_trajectories": 100}


class TestTable(SourceConformance):
    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        table = stack.enter_context(gear.Table.create(SCHEMA, **nested_table({**SIZES, "block_steps": 6})))
        return table, np.array([table.add(each) for each in trajectories])


class TestTableBelowWhichIsADisk(SourceConformance):
    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        """Some of the trajectories lie in memory, others on disk only."""
        disk = gear.Disk(self.path / "table", sync_seconds=0.01, size="1MiB", keep="newest")
        memory = gear.Memory(max_blocks=30)
        table = stack.enter_context(
            gear.Table.create(
                SCHEMA,
                **nested_table({**SIZES, "block_steps": 8, "memory": memory, "disk": disk, "timeout": 30}),
            )
        )
        slots = np.array([table.add(each) for each in trajectories])
        while not table._engine.num_spilled:
            table.add(trajectory(99, 30))
        return table, slots
