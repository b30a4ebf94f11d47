"""Records in memory and the columns that they are split into, for tests of the split."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gather_common import GUARD, POISON, choose

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
        self.guarded, self.expected, columns = [], [], []
        for inside, size, first, length in parts:
            total = batch * length * size
            whole = torch.full((GUARD + shift + total + GUARD,), POISON, dtype=torch.uint8, device=device)
            own = slice(GUARD + shift, GUARD + shift + total)
            columns.append(SplitColumn(records, whole[own].view(batch, length, size), first, inside))
            expected = whole.cpu().numpy().copy()
            part = values[these, first : first + length, inside : inside + size]
            expected[own].reshape(batch, length, size)[these] = part
            self.guarded.append(whole)
            self.expected.append(expected)
        self.plan, self.count = SplitPlan(columns), count

    def run(self, function: Callable[..., Any], programs: int | None = None) -> None:
        rows = None if self.rows is None else self.rows.to(self.plan.device)
        function(self.plan, self.count, rows=rows, programs=programs)
        for part, expected in zip(self.guarded, self.expected, strict=True):
            different = np.flatnonzero(part.cpu().numpy() != expected)
            assert len(different) == 0, f"{len(different)} bytes differ, the first at {different[0] - GUARD}"
