"""Rows appended to blocks of a table: the kernel and its torch twin against a plain account of streams."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from gather_common import Memory, host_memory, pinned_memory

from gear_loader.kernels import reference
from gear_loader.kernels.append import append
from gear_loader.kernels.append_plan import AppendColumn, AppendPlan

Append = Callable[..., None]
RUNS = [
    pytest.param(
        append,
        marks=pytest.mark.skipif(torch.cuda.is_available(), reason="it is compiled here"),
        id="kernel",
    ),
    pytest.param(reference.append, id="twin"),
]
LANES = 2


class Blocks:
    """Environments whose trajectories get any blocks, in order, and what must lie in these."""

    def __init__(self, n: int, sizes: list[int], block_steps: int, longest: int, device: str) -> None:
        memory: Memory = host_memory if device == "cpu" else pinned_memory
        width = -(-longest // block_steps)
        self.n, self.sizes, self.block_steps, self.device = n, sizes, block_steps, device
        self.random = np.random.default_rng((n, *sizes, block_steps))
        count, columns = n * LANES * width + 2, []
        for size in sizes:
            stride = -(-size * block_steps // 128) * 128
            image, target = memory(n * stride).view(n, stride), memory(count * stride).view(count, stride)
            row_bytes = -(-size // 16) * 16
            rows = torch.zeros(n, 2, row_bytes, dtype=torch.uint8, device=device)
            columns.append(AppendColumn(rows, image.to(device), target.fill_(0xEE), size))
        self.plan = AppendPlan(columns, block_steps, LANES)
        places = self.random.permutation(count)[: n * LANES * width].astype(np.int32)
        self.blocks = memory(4 * n * LANES * width).view(torch.int32).view(n * LANES, width)
        self.blocks.copy_(torch.from_numpy(places.reshape(n * LANES, width)))
        self.ends = memory(n)
        self.open: list[list[list[np.ndarray]]] = [[] for _ in range(n)]
        self.lane = [0] * n

    def row(self, which: int) -> list[np.ndarray]:
        """Other values in the plan's rows of all environments; returns them, [n, step bytes] a column."""
        made = [self.random.integers(0, 256, (self.n, size), dtype=np.uint8) for size in self.sizes]
        for column, values in zip(self.plan.columns, made, strict=True):
            column.rows[:, which, : values.shape[1]] = torch.from_numpy(values).to(self.device)
        return made

    def step(self, run: Append, done: np.ndarray | None, final: bool, **options: int) -> None:
        """Append, and check `ends` and the trajectories that have ended."""
        self.ends.fill_(7)
        if done is not None:
            rows, last = self.row(0), self.row(1)
            for env in range(self.n):
                self.open[env].append([values[env] for values in rows])
        mask = None if done is None else torch.from_numpy(done).to(self.device)
        run(self.plan, mask, self.ends, self.blocks, final=final, **options)
        if self.device != "cpu":
            torch.cuda.synchronize()
        expected = [bool(steps) for steps in self.open] if done is None else done.tolist()
        assert self.ends.tolist() == [int(each) for each in expected]
        for env in np.flatnonzero(expected).tolist():
            steps = self.open[env] + ([[each[env] for each in last]] if final and done is not None else [])
            for c, column in enumerate(self.plan.columns):
                for t, values in enumerate(steps):
                    block = int(self.blocks[env * LANES + self.lane[env], t // self.block_steps])
                    begin = t % self.block_steps * self.sizes[c]
                    found = column.target[block, begin : begin + self.sizes[c]]
                    np.testing.assert_array_equal(found.numpy(), values[c], err_msg=f"{env} {c} {t}")
            self.open[env], self.lane[env] = [], (self.lane[env] + 1) % LANES
        state = [[len(steps), lane] for steps, lane in zip(self.open, self.lane, strict=True)]
        assert self.plan.state.tolist() == state


def check(
    run: Append, sizes: list[int], block_steps: int, final: bool, device: str = "cpu", **options: int
) -> None:
    blocks = Blocks(3, sizes, block_steps, 12, device)
    for _ in range(10):
        lengths = np.array([len(steps) for steps in blocks.open])
        done = (blocks.random.random(3) < 0.3) | (lengths >= 10)
        blocks.step(run, done, final, **options)
    blocks.step(run, None, False, **options)
    blocks.step(run, None, False, **options)  # nothing is open


CASES = [
    ([33], 4, True),
    ([128, 1], 3, False),
    ([44, 200], 1, True),
    ([16, 1500], 5, True),
    ([2100], 2, False),
]


@pytest.mark.parametrize("run", RUNS)
@pytest.mark.parametrize("case", CASES)
def test_trajectories_that_end_lie_in_their_blocks(run: Append, case: tuple[list[int], int, bool]) -> None:
    check(run, *case)
    check(run, *case, programs=2)


def test_each_line_is_written_once() -> None:
    """Also where rows end inside of lines: what is not full is written later, or when the trajectory ends."""
    blocks = Blocks(1, [40], 16, 32, "cpu")
    nobody = np.zeros(1, dtype=bool)
    written = 0
    for step in range(1, 20):
        before = blocks.plan.columns[0].target.clone()
        blocks.plan.columns[0].image.fill_(step)  # what is copied once more would differ
        blocks.step(append, nobody, False)
        changed = (blocks.plan.columns[0].target != before).view(-1, 128).any(1).sum()
        written += int(changed)
        assert written == step * 40 // 128 if step < 16 else written == 5 + (step - 16) * 40 // 128


def test_what_does_not_fit() -> None:
    plan = Blocks(3, [8], 4, 8, "cpu").plan
    rows, image, target, size = plan.columns[0]
    ends, blocks = torch.zeros(3, dtype=torch.uint8), torch.zeros(6, 2, dtype=torch.int32)
    done = torch.zeros(3, dtype=torch.bool)
    for arguments, expected in (
        ((done[:2], ends, blocks), r"done is torch.bool \[2\]; expected .*\[3\]"),
        ((done.byte(), ends, blocks), "done is torch.uint8"),
        ((done, ends.bool(), blocks), "ends is torch.bool"),
        ((done, ends, blocks[:3]), r"blocks is torch.int32 \[3, 2\]; expected .*\[6, W\]"),
    ):
        with pytest.raises(TypeError, match=expected):
            append(plan, *arguments)
    with pytest.raises(ValueError, match="programs is 0"):
        append(plan, done, ends, blocks, programs=0)
    for column, expected in (
        ((rows, image, target, 17), "step_bytes is 17; expected 1 to 16"),
        ((rows, image[:, :64].contiguous(), target[:, :64].contiguous(), size), "multiples of 128"),
        ((rows[:, :1], image, target, size), r"rows is torch.uint8 \[3, 1, 16\]; expected"),
        ((rows, image[:2], target, size), "differ in batch size|image is"),
    ):
        with pytest.raises((TypeError, ValueError), match=expected):
            AppendPlan([AppendColumn(*column)], 4, LANES)


@pytest.mark.gpu
@pytest.mark.parametrize("case", CASES)
def test_on_a_gpu(case: tuple[list[int], int, bool]) -> None:
    check(append, *case, device="cuda")
