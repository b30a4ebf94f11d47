"""The workloads: their data as flat arrays and as a table, random rows of them, and what a batch of those must hold."""

from __future__ import annotations

import dataclasses
import mmap
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Incorrect

Empty = Callable[[tuple[int, ...], torch.dtype], torch.Tensor]
_ARENA_ALIGNMENT = 128


@dataclasses.dataclass(frozen=True)
class Workload:
    """Trajectories of even length, and the windows of them that a batch takes, the same for all columns.

    columns: name -> shape of a step, float32. anchor: ``"first"``: the window is the whole trajectory; ``"uniform"``:
    it ends at a random step.
    """

    name: str
    columns: tuple[tuple[str, tuple[int, ...]], ...]
    trajectories: int
    steps: int
    window: gear.Window
    anchor: Literal["first", "uniform"]

    @property
    def schema(self) -> dict[str, gear.Column]:
        return {name: gear.Column(torch.float32, shape) for name, shape in self.columns}

    @property
    def row_bytes(self) -> int:
        """Bytes that a row of a batch has in all columns together."""
        return self.window.length * sum(column.step_bytes for column in self.schema.values())

    @property
    def table_bytes(self) -> int:
        """Bytes of all steps of all trajectories."""
        return self.trajectories * self.steps * sum(column.step_bytes for column in self.schema.values())

    def of(self, trajectories: int) -> Workload:
        """The same with another number of trajectories."""
        return dataclasses.replace(self, trajectories=trajectories)


W1 = Workload(
    name="W1",
    columns=(("observation", (96,)), ("action", (8,)), ("reward", ())),
    trajectories=20_000,
    steps=100,
    window=gear.Window(length=100),
    anchor="first",
)
"""Whole trajectories: 42,000 B each, 0.84 GB in all."""

W2 = Workload(
    name="W2",
    columns=(("observation", (17,)), ("action", (6,)), ("reward", ())),
    trajectories=20_000,
    steps=100,
    window=gear.Window(length=20, offset=-19),
    anchor="uniform",
)
"""Windows of 20 steps that end at any of 2 million steps: 1,920 B each, 19 of 100 with padding; 0.19 GB in all."""


STEPS = dataclasses.replace(W2, name="single steps", window=gear.Window(length=1))
"""Any of the 2 million steps of W2: 96 B each."""

NAMED = {workload.name: workload for workload in (W1, W2, STEPS)}


@dataclasses.dataclass(frozen=True)
class Rows:
    """Which rows a batch has: int64 [B] numbers of trajectories and anchor steps."""

    positions: torch.Tensor
    anchors: torch.Tensor


class Data:
    """A workload's values as flat arrays in one range of memory.

    The range asks for huge pages, as a table does, so that plain torch on the flat arrays is at no disadvantage. arena:
    float32, all of it; as large as the table's columns (and a few rows of zeros). flat: name -> float32 ``[trajectories
    * steps, *shape]``, views of the arena: random values. ringed: the same with rows of zeros around it, as many before
    and after as a window may reach out.
    """

    def __init__(self, workload: Workload, *, seed: int = 0) -> None:
        self.workload = workload
        self.generator = torch.Generator().manual_seed(seed)
        self.margin = workload.window.length
        steps = workload.trajectories * workload.steps
        sizes = {
            name: -(-(steps + 2 * self.margin) * column.step_bytes // _ARENA_ALIGNMENT) * _ARENA_ALIGNMENT
            for name, column in workload.schema.items()
        }
        memory = mmap.mmap(-1, sum(sizes.values()), flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        memory.madvise(mmap.MADV_HUGEPAGE)
        self.arena = torch.from_numpy(np.frombuffer(memory, dtype=np.float32))
        self.flat: dict[str, torch.Tensor] = {}
        self.ringed: dict[str, torch.Tensor] = {}
        offset = 0
        for name, column in workload.schema.items():
            count = (steps + 2 * self.margin) * column.step_bytes // 4
            rows = self.arena[offset : offset + count].view(steps + 2 * self.margin, *column.shape)
            rows[self.margin : self.margin + steps].uniform_(-1, 1, generator=self.generator)
            self.ringed[name], self.flat[name] = rows, rows[self.margin : self.margin + steps]
            offset += sizes[name] // 4

    @property
    def stacked(self) -> dict[str, torch.Tensor]:
        """name -> float32 ``[trajectories, steps, *shape]``, views of `flat`."""
        workload = self.workload
        return {n: v.view(workload.trajectories, workload.steps, *v.shape[1:]) for n, v in self.flat.items()}

    def table(
        self,
        block_steps: int,
        *,
        packed: bool | str = "auto",
        name: str | None = None,
        device: torch.device | None = None,
        here: float = 1.0,
        **options: Any,
    ) -> gear.Table:
        """A table of these trajectories, in their order, without spare room; private unless it gets a name.

        Args:
            packed: as for `Table.create`; False where the gather kernel is launched by itself, without the split of
                records. device: in whose memory the blocks lie; with `here` that share of them, and the others in host
                memory below. options: of `Table.extend`.
        """
        workload = self.workload
        lengths = np.full(workload.trajectories, workload.steps)
        blocks = gear.Table.required_blocks(lengths, block_steps)
        most = blocks if here == 1.0 else max(1, int(blocks * here))
        table = gear.Table.create(
            workload.schema,
            max_steps=workload.trajectories * workload.steps,
            max_trajectories=workload.trajectories,
            block_steps=block_steps,
            name=name,
            device=device,
            memory=gear.Memory(max_blocks=most, packed=packed),
            host=None if here == 1.0 else 2 * workload.table_bytes,
        )
        each = workload.trajectories if here == 1.0 else max(1, workload.trajectories * most // blocks // 8)
        for low in range(0, workload.trajectories, each):
            part = slice(low, low + each)
            stacked = {name: values[part] for name, values in self.stacked.items()}
            table.extend(stacked, lengths=lengths[part], **options)
        return table

    def draw(self, batch: int) -> Rows:
        workload, generator = self.workload, self.generator
        positions = torch.randint(workload.trajectories, (batch,), generator=generator)
        if workload.anchor == "first":
            return Rows(positions, torch.zeros(batch, dtype=torch.int64))
        return Rows(positions, torch.randint(workload.steps, (batch,), generator=generator))

    def expected(self, rows: Rows) -> dict[str, torch.Tensor]:
        """What a batch of these rows holds, the plain way: every column ``[B, L, *shape]``, and the mask."""
        workload, window = self.workload, self.workload.window
        steps = rows.anchors[:, None] + window.offset + torch.arange(window.length)  # [B, L]
        mask = (steps >= 0) & (steps < workload.steps)
        steps = steps.clamp(0, workload.steps - 1)
        batch = {name: values[rows.positions[:, None], steps] for name, values in self.stacked.items()}
        for values in batch.values():
            values[~mask] = 0
        return {**batch, "mask": mask}


def expect(actual: Mapping[str, Any], expected: Mapping[str, torch.Tensor]) -> None:
    """Compare a batch with what it must hold, to the byte."""
    for name, values in expected.items():
        found = actual[name].cpu()
        if found.shape != values.shape:
            raise Incorrect(f"{name} has shape {list(found.shape)}; expected {list(values.shape)}")
        if not torch.equal(found, values):
            wrong = int((found != values).reshape(len(values), -1).any(1).sum())
            raise Incorrect(f"{name} differs from the expected values in {wrong} of {len(values)} rows")


def poison(batch: Mapping[str, Any]) -> None:
    """Overwrite a batch, so that a row which is not written is found out."""
    for values in batch.values():
        if isinstance(values, dict):
            poison(values)
        elif values.dtype == torch.bool:
            values.random_(0, 2)
        else:
            values.fill_(float("nan") if values.is_floating_point() else -1)


class Plain:
    """Batches of flat arrays by plain torch, into buffers that are kept: name -> ``[B, L, *shape]``, and ``mask``."""

    def __init__(self, data: Data, batch: int, empty: Empty | None = None) -> None:
        workload, length = data.workload, data.workload.window.length
        made = empty or (lambda shape, dtype: torch.empty(shape, dtype=dtype))
        self.batch = {name: made((batch, length, *shape), torch.float32) for name, shape in workload.columns}
        self.batch["mask"] = made((batch, length), torch.bool)

    def gather(self, rows: Rows) -> None:
        raise NotImplementedError


class PlainTrajectories(Plain):
    """Whole trajectories: one `index_select` a column."""

    def __init__(self, data: Data, batch: int, empty: Empty | None = None) -> None:
        super().__init__(data, batch, empty)
        assert data.workload.anchor == "first"
        self.batch["mask"].fill_(True)
        self._pairs = [
            (values.view(data.workload.trajectories, -1), self.batch[name].view(batch, -1))
            for name, values in data.flat.items()
        ]

    def gather(self, rows: Rows) -> None:
        for source, out in self._pairs:
            torch.index_select(source, 0, rows.positions, out=out)


class PlainWindows(Plain):
    """Windows that end at their anchor, and so never pass their trajectory's end.

    way: ``"zero row"``: one `index_select` of all steps a column; steps that do not exist take a row of zeros.
    ``"strided"``: one `index_select` of whole windows a column, out of an overlapping view that has a row a step; then
    steps that do not exist are zeroed.
    """

    def __init__(
        self,
        data: Data,
        batch: int,
        way: Literal["zero row", "strided"],
        empty: Empty | None = None,
    ) -> None:
        super().__init__(data, batch, empty)
        window = data.workload.window
        assert data.workload.anchor == "uniform"
        assert window.offset + window.length == 1
        self._way = way
        self._steps, self._margin = data.workload.steps, data.margin
        self._offsets = torch.arange(window.offset, window.offset + window.length)
        self._index = torch.empty(batch, window.length, dtype=torch.int64)
        self._zero = torch.tensor(0)  # a row of the margin
        self._columns = []
        for name, values in data.ringed.items():
            source, out = values.view(len(values), -1), self.batch[name].view(batch * window.length, -1)
            rows, width = source.shape
            windows = source.as_strided((rows - window.length, window.length * width), (width, 1))
            self._columns.append((source, out, windows, out.view(batch, -1)))

    def gather(self, rows: Rows) -> None:
        mask = self.batch["mask"]
        torch.ge(torch.add(rows.anchors[:, None], self._offsets, out=self._index), 0, out=mask)
        # As rows of the arrays.
        anchors = torch.add(rows.anchors, rows.positions, alpha=self._steps).add_(self._margin)
        if self._way == "strided":
            begin = anchors.add_(self._offsets[0])
            absent = mask.logical_not().view(-1).nonzero().view(-1)
            for _, out, windows, whole in self._columns:
                torch.index_select(windows, 0, begin, out=whole)
                out.index_fill_(0, absent, 0)
            return
        index = torch.add(anchors[:, None], self._offsets, out=self._index)
        index = torch.where(mask, index, self._zero)
        for source, out, _, _ in self._columns:
            torch.index_select(source, 0, index.view(-1), out=out)
