"""Groups and mixtures beside writers that evict, and beside processes that are killed."""

from __future__ import annotations

import itertools
import multiprocessing
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from cases import amounts
from options_common import nested
from table_common import bury, fresh_name

import gear_loader as gear
from gear_loader.errors import FilledError, StaleIndexError

COLUMNS = {
    "token": gear.Column(torch.int32),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "member": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.float64, per="trajectory", late=True),
}
SIZE = 3
WINDOWS = {"token": gear.Whole(), "prompt": None, "member": None, "reward": None}
ONCE = gear.Uniform(replacement=False)
KEYS = 10_000  # groups of a writer
LENGTHS = pytest.mark.parametrize("batches", amounts(40, 300, 3000))


def tokens(prompt: int, member: int) -> torch.Tensor:
    length = 1 + (prompt * 7 + member * 3) % 9
    return ((prompt * SIZE + member) * 16 + torch.arange(length)).int()


def reward(prompt: Any, member: Any) -> Any:
    return prompt * 0.5 + member


def _write(name: str, key: int) -> None:
    with gear.Table.attach(name) as table:
        for count in range(KEYS):
            for member in range(SIZE):
                prompt = key * KEYS + count
                priority = 1.0 + count % 5
                steps = {"token": tokens(prompt, member), "prompt": prompt, "member": member}
                table.add(steps, priority=priority)
            time.sleep(0.002)


def _fill(name: str) -> None:
    with gear.Table.attach(name) as table:
        while True:
            for index, generation in zip(*table.unfilled("reward"), strict=True):
                try:
                    row = table[int(index)]
                    value = reward(float(row["prompt"]), float(row["member"]))
                    table.fill(int(index), generation=int(generation), reward=value)
                except (StaleIndexError, FilledError):
                    continue


class Processes:
    """Writers and fillers of one table, each of which can be killed and replaced."""

    def __init__(self, name: str, key: int) -> None:
        self._name, self._key = name, key
        self._context = multiprocessing.get_context("forkserver")
        self.writer, self.filler = self._new_writer(), self._new(_fill)

    def _new(self, work: Any, *more: int) -> Any:
        process = self._context.Process(target=work, args=(self._name, *more), daemon=True)
        process.start()
        return process

    def _new_writer(self) -> Any:
        self._key += 2  # a number of a group does not come again
        return self._new(_write, self._key)

    def replace(self) -> None:
        self.kill()
        self.writer, self.filler = self._new_writer(), self._new(_fill)

    def kill(self) -> None:
        for process in (self.writer, self.filler):
            process.kill()
            process.join()


@contextmanager
def storm(key: int, **options: Any) -> Iterator[tuple[gear.Table, Processes]]:
    sizes: dict[str, Any] = {"max_steps": 300, "max_trajectories": 30, "block_steps": 4, "timeout": 60.0}
    name = fresh_name()
    with gear.Table.create(COLUMNS, name=name, on_full="evict_oldest", **sizes, **options) as table:
        processes = Processes(name, key)
        try:
            yield table, processes
        finally:
            processes.kill()
            table.unlink()


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"windows": WINDOWS, "layout": "packed", "device": "cpu", "seed": 3}
    return gear.ReplayDataset(table, **nested({**given, **options}))


def check_rows(batch: Any) -> list[tuple[int, int]]:
    """Every row has the values of one trajectory; return prompt and member of each."""
    starts, names = batch["cu_seqlens"].tolist(), torch.stack((batch["prompt"], batch["member"]), 1).tolist()
    for (begin, end), (prompt, member) in zip(itertools.pairwise(starts), names, strict=True):
        assert torch.equal(batch["token"][begin:end], tokens(prompt, member))
    assert torch.equal(batch["reward"], reward(batch["prompt"].double(), batch["member"].double()))
    return [(prompt, member) for prompt, member in names]


def check_groups(batches: Any) -> list[int]:
    """Rows are whole groups, members side by side; return the prompts."""
    names = [name for batch in batches for name in check_rows(batch)]
    prompts = [prompt for prompt, _ in names[::SIZE]]
    assert names == [(prompt, member) for prompt in prompts for member in range(SIZE)]
    return prompts


@LENGTHS
@pytest.mark.parametrize(
    "options",
    [
        {"batch_size": 2 * SIZE},
        {"batch_size": 2 * SIZE, "sampler": gear.Prioritized()},
        {"max_steps": 60, "lookahead": 2},
    ],
    ids=["uniform", "prioritized", "budget"],
)
def test_groups_beside_writers_evictions_and_kills(options: dict[str, Any], batches: int) -> None:
    with storm(0) as (table, processes):
        grouped: dict[str, Any] = {"group": "prompt", "group_size": SIZE}
        data = dataset(table, **options, **grouped, batches_per_epoch=batches)
        for number, batch in enumerate(data):
            if "max_steps" in options:  # members that are removed while they wait are left out
                check_rows(batch)
            else:
                check_groups([batch])
            if data.draws_by_priority:
                data.update_priority(batch, batch["member"] + 0.5)
            if number % max(batches // 3, 20) == 10:
                processes.replace()
        processes.kill()
        bury(table)
        table.check_valid()
        rows = [table[index] for index in table.indices()]
        present = [int(row["prompt"]) for row in rows if "reward" in row]
        complete = sorted(prompt for prompt in set(present) if present.count(prompt) == SIZE)
        assert len(rows) > SIZE
        if complete:
            sizes = {"max_steps": 60} if "max_steps" in options else {"batch_size": SIZE}
            assert sorted(check_groups(dataset(table, sampler=ONCE, **sizes, **grouped))) == complete
