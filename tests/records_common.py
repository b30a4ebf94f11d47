"""Records in memory and the columns that they are split into, for tests of the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gather_common import Guarded, choose

from gear_loader.kernels.split_plan import SplitColumn, SplitPlan

Part = tuple[int, int, int, int]
"""Bytes before a column in a record, its bytes, its first step and its steps."""
CARTPOLE: list[Part] = [(0, 16, 0, 7), (16, 8, 0, 7), (24, 4, 1, 5), (28, 1, 0, 7), (0, 16, 2, 1)]
HOPPER: list[Part] = [(0, 44, 0, 20), (44, 12, 0, 20), (56, 4, 19, 1), (60, 4, 0, 20)]


class Records:
    """Random records, poisoned outputs between guard bytes, and what they should hold."""

    def __init__(
        self,
        record_bytes: int,
        steps: int,
        parts: Sequence[Part],
        batch: int,
        count: int,
        *,
        chosen: bool = False,
        shift: int = 0,
        device: str = "cpu",
    ) -> None:
        values = np.random.default_rng(count).integers(0, 256, (batch, steps, record_bytes), dtype=np.uint8)
        records = torch.from_numpy(values).to(device)
        self.rows = choose(count, batch) if chosen else None
        these = np.arange(count) if self.rows is None else self.rows.numpy()
        self.guarded, columns = [], []
        for inside, size, first, length in parts:
            output = Guarded((batch, length, size), shift=shift, device=device)
            output.expected[these] = values[these, first : first + length, inside : inside + size]
            columns.append(SplitColumn(records, output.out, first, inside))
            self.guarded.append(output)
        self.plan, self.count = SplitPlan(columns), count

    def run(self, function: Callable[..., Any], programs: int | None = None) -> None:
        rows = None if self.rows is None else self.rows.to(self.plan.device)
        function(self.plan, self.count, rows=rows, programs=programs)
        for output in self.guarded:
            output.check()
