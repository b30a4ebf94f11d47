"""What a call has been given is the caller's again when it returns: its arrays may be changed at once."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested
from table_common import fresh_name
from transport_common import SECRET, serving

import gear_loader as gear
from gear_loader.distributed import Shards

COLUMNS = {
    "x": gear.Column(torch.float32, (4,), final=True),
    "goal": gear.Column(torch.float32, (2,), per="trajectory"),
}
LATE = {
    "late": gear.Column(torch.float32, (3,), late=True),
    "score": gear.Column(torch.float32, (2,), per="trajectory", late=True),
}
COUNT, STEPS = 30, 3


class Caller:
    """One set of arrays, which all calls are given."""

    def __init__(self) -> None:
        self.x, self.steps = np.zeros(4, np.float32), np.zeros((STEPS, 4), np.float32)
        self.goal, self.final = np.zeros(2, np.float32), np.zeros(4, np.float32)
        self.goals, self.rows, self.finals = (np.zeros((2, n), np.float32) for n in (2, 4, 4))
        self.stacked, self.lengths = np.zeros((2, STEPS, 4), np.float32), np.full(2, STEPS)
        self.index, self.priority = np.zeros(2, np.int64), np.zeros(2, np.float64)
        self.late, self.score = np.zeros((2, STEPS, 3), np.float32), np.zeros((2, 2), np.float32)

    def fill(self, *numbers: int) -> None:
        """Describe one trajectory, or two, in all arrays."""
        first = numbers[0]
        for each in (self.x, self.steps, self.goal, self.final, self.late, self.score):
            each[...] = first
        for each in (self.goals, self.rows, self.finals, self.stacked):
            each[...] = np.reshape([first, numbers[-1]], (2, *[1] * (each.ndim - 1)))
        self.lengths[:] = STEPS

    def spoil(self) -> None:
        for each in vars(self).values():
            each[...] = -1


Case = Callable[[Any, Caller, int], None]


def add(table: Any, a: Caller, k: int) -> None:
    table.add({"x": a.steps, "goal": a.goal}, final={"x": a.final})


def extend_list(table: Any, a: Caller, k: int) -> None:
    table.extend([{"x": a.steps, "goal": a.goal}])


def extend_stacked(table: Any, a: Caller, k: int) -> None:
    a.fill(k, k)
    table.extend({"x": a.stacked, "goal": a.goals}, lengths=a.lengths)


def extend_iterator(table: Any, a: Caller, k: int) -> None:
    def refilled() -> Iterator[dict[str, Any]]:
        for number in (k, k + COUNT):
            a.fill(number)
            yield {"x": a.steps, "goal": a.goal}

    table.extend(refilled())


def write(table: Any, a: Caller, k: int, *, given: bool = True, **options: Any) -> None:
    writer = table.writer(**options)
    if not given:
        writer.trajectory = {"goal": a.goal}
    for _ in range(STEPS):
        a.fill(k)
        writer.append(x=a.x)
        a.spoil()
    a.fill(k)
    once = {"trajectory": {"goal": a.goal}} if given else {}
    writer.commit(final={"x": a.final} if given else None, **once)


def write_vector(table: Any, a: Caller, k: int, **options: Any) -> None:
    writer = table.writers(2, **options)
    writer.trajectory = {"goal": a.goals}
    for step in range(STEPS):
        a.fill(k, k + COUNT)
        writer.append(x=a.rows, done=np.full(2, step == STEPS - 1), final={"x": a.finals})
        a.spoil()


def each_step(table: gear.Table, a: Caller, k: int) -> None:
    writer = table.writer(commit_every_step=True)
    writer.trajectory = {"goal": a.goal}
    for _ in range(STEPS):
        a.fill(k)
        writer.append(x=a.x)
        a.spoil()
    writer.commit()


ADDING: dict[str, Case] = {
    "add": add,
    "extend_list": extend_list,
    "extend_stacked": extend_stacked,
    "extend_iterator": extend_iterator,
    "writer": write,
    "writer_attribute": lambda *given: write(*given, given=False),
    "writer_chunks": lambda *given: write(*given, given=False, chunk_steps=2),
    "writers": write_vector,
    "writers_chunks": lambda *given: write_vector(*given, chunk_steps=2, overlap_steps=1),
}
EACH_STEP, WAITS = {"writer_each_step": each_step}, {"writer_waits": lambda *given: write(*given, wait=True)}
CASES: list[tuple[str, str, Case]] = [
    (kind, name, case)
    for kind, more in {"local": EACH_STEP, "remote": WAITS}.items()
    for name, case in {**ADDING, **more}.items()
]


@contextlib.contextmanager
def opened(kind: str, columns: dict[str, gear.Column], path: Path) -> Iterator[tuple[gear.Table, Any]]:
    """A table, and what the calls go to: itself, or a connection to its server."""
    sizes: dict[str, Any] = {"max_steps": 1000, "max_trajectories": 300, "block_steps": 4}
    sizes |= {"disk": gear.Disk(path / "tier")} if kind == "disk" else {}
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(gear.Table.create(columns, **sizes, name=(name := fresh_name())))
        stack.callback(table.unlink)
        target: Any = table
        if kind == "remote":
            address = stack.enter_context(serving(name)).address.replace("socket", "gear")
            target = stack.enter_context(gear.connect(f"{address}/{name}", secret=SECRET))
        yield table, target


def is_all(values: torch.Tensor, number: float) -> bool:
    return bool((values == number).all())


@pytest.mark.parametrize(("kind", "name", "case"), CASES, ids=[f"{kind}-{name}" for kind, name, _ in CASES])
def test_calls_that_add(kind: str, name: str, case: Case, tmp_path: Path) -> None:
    with opened(kind, COLUMNS, tmp_path) as (table, target):
        arrays = Caller()
        for k in range(COUNT):
            arrays.fill(k)
            case(target, arrays, k)
            arrays.spoil()
        if kind == "remote":
            target.flush()
        assert len(table) >= COUNT
        for i in table.indices().tolist():
            row, final = table[i], table.final(i)
            number = float(row["goal"][0])
            assert number >= 0
            assert is_all(row["x"], number)
            assert is_all(row["goal"], number)
            assert final is None or is_all(final["x"], number)


@pytest.mark.parametrize("kind", ["local", "disk", "remote"])
def test_calls_that_update(kind: str, tmp_path: Path) -> None:
    with opened(kind, {**COLUMNS, **LATE}, tmp_path) as (table, target):
        arrays = Caller()
        goal = np.zeros(2, np.float32)
        indices = table.extend([{"x": np.zeros((STEPS, 4), np.float32), "goal": goal}] * COUNT)
        for k in range(0, COUNT, 2):
            arrays.fill(k)
            arrays.index[:], arrays.priority[:] = indices[k : k + 2], k + 1
            target.update_priority(arrays.index, arrays.priority)
            arrays.priority[:] = -1
            target.fill(arrays.index, late=list(arrays.late), score=arrays.score)
            arrays.spoil()
        for k, i in enumerate(indices.tolist()):
            assert is_all(table[i]["late"], k - k % 2)
            assert is_all(table[i]["score"], k - k % 2)
        assert table._engine.region.array("priority")[indices].tolist() == [
            1 + k - k % 2 for k in range(COUNT)
        ]


@pytest.mark.parametrize("shards", [False, True])
def test_updates_of_a_dataset_that_prefetches(shards: bool) -> None:
    """They wait for the prefetch thread, and with `Shards` for the next exchange."""
    arrays = Caller()
    with gear.Table.create(COLUMNS, max_steps=100, max_trajectories=10) as table:
        indices = table.extend([{"x": np.zeros((1, 4), np.float32), "goal": np.zeros(2, np.float32)}] * 2)
        source: Any = Shards([table]) if shards else table
        options: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(1), "batches_per_epoch": 40}
        data = gear.ReplayDataset(
            source, **nested({"sampler": gear.Prioritized(), "prefetch": 4, "copy": True, **options})
        )
        for number, batch in enumerate(data):
            assert number < 10 or is_all(batch["index"], float(indices[1]))
            arrays.index[:], arrays.priority[:] = indices, [0, 1]
            data.update_priority(arrays.index, arrays.priority)
            arrays.spoil()
