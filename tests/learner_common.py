"""What the tests of learners share: a filled table, its server's client, options of datasets, and raw messages."""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterable, Iterator
from typing import Any

import pytest
import torch
from table_common import fresh_name
from transport_common import SECRET, Raw, serving

import gear_loader as gear
from gear_loader.transport import wire_messages as messages
from gear_loader.transport.urls import url_of
from gear_loader.transport.wire import Kind

COLUMNS = {
    "obs": gear.Column(torch.float32, (3,), final=True),
    "reward": gear.Column(torch.float32),
    "done": gear.Column(torch.bool),
    "half": gear.Column(torch.bfloat16),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "score": gear.Column(torch.float32, per="trajectory", late=True),
}
READ = ["obs", "reward", "done", "half", "prompt"]
N_STEP = gear.NStep("reward", n=3, gamma=0.9, done="done", next="obs")
STEPWISE = gear.Prioritized(unit="step")


@contextlib.contextmanager
def filled(count: int = 24, **options: Any) -> Iterator[gear.Table]:
    """A named table with trajectories of uneven lengths, in groups of four; half of them have a score."""
    given = {"max_steps": 2000, "max_trajectories": 100, "name": fresh_name(), "block_steps": 4, **options}
    with gear.Table.create(COLUMNS, **given) as table:
        try:
            for number in range(count):
                add(table, number)
            table.fill(table.indices()[: count // 2], score=torch.arange(count // 2).float())
            yield table
        finally:
            table.unlink()


def add(table: Any, number: int) -> None:
    steps = 2 + number * 7 % 13
    values = torch.arange(steps).float() + 100 * number
    rows = {
        "obs": values[:, None].repeat(1, 3),
        "reward": values,
        "done": torch.arange(steps) == steps - 1,
        "half": values.bfloat16(),
        "prompt": torch.tensor(number // 4),
    }
    table.add(rows, priority=1.0 + number, final={"obs": torch.full((3,), -1.0)} if number % 2 else None)


@contextlib.contextmanager
def connected(table: gear.Table, timeout: float = 20, **options: Any) -> Iterator[Any]:
    """A client of a server of a table."""
    with (
        serving(str(table.name), **options) as server,
        gear.connect(url_of(server.address, str(table.name)), secret=SECRET, timeout=timeout) as remote,
    ):
        yield remote


@contextlib.contextmanager
def pair(**options: Any) -> Iterator[tuple[gear.Table, gear.Table, Any]]:
    """Two equal tables, and a client of the second."""
    with filled(**options) as local, filled(**options) as served, connected(served) as remote:
        yield local, served, remote


def dataset(table: Any, **options: Any) -> gear.ReplayDataset:
    given = {"batch_size": 8, "windows": gear.Window(3, -1), "columns": READ, "device": "cpu", **options}
    if isinstance(given["windows"], dict) and "columns" not in options:
        del given["columns"]
    return gear.ReplayDataset(table, **given)


def assert_equal(mine: Any, theirs: Any) -> None:
    assert type(mine) is type(theirs)
    if isinstance(mine, dict):
        assert list(mine) == list(theirs)
        for key in mine:
            assert_equal(mine[key], theirs[key])
    elif isinstance(mine, torch.Tensor) and not mine.is_nested:
        assert mine.dtype == theirs.dtype
        assert torch.equal(mine, theirs)
    elif isinstance(mine, torch.Tensor):
        assert torch.equal(mine.values(), theirs.values())
        assert torch.equal(mine.offsets(), theirs.offsets())
    elif isinstance(mine, gear.Ragged):
        assert mine.shape == theirs.shape
        assert torch.equal(mine.values, theirs.values)
        assert torch.equal(mine.offsets, theirs.offsets)
    else:
        assert mine == theirs


CASES: dict[str, dict[str, Any]] = {
    "windows": {},
    "single steps": {"windows": {"obs": gear.Window(1, squeeze=True), "target": N_STEP, "prompt": None}},
    "converted": {"windows": {"now": gear.Window(2, column="reward", dtype=torch.bfloat16, scale=0.5)}},
    "chosen steps": {"windows": {"obs": gear.Window(at=[-3, 0, 2]), "reward": gear.Window(2, every=3)}},
    "last anchors": {"draws": gear.Draws(anchor="last", sample_info=False), "output": "nested"},
    "sequences": {"draws": gear.Draws(stride=2, drop_last=True)},
    "a pass": {"sampler": gear.Uniform(replacement=False), "draws": gear.Draws(complete=True)},
    "packed": {"windows": gear.Whole(), "layout": "packed"},
    "with final steps": {"windows": gear.Whole(final=True), "layout": "packed"},
    "padded": {"windows": gear.Whole(), "transform": lambda batch: {**batch, "more": batch["reward"] + 1}},
    "jagged": {"windows": gear.Whole(), "layout": "jagged"},
    "tree": {"windows": gear.Whole(), "layout": "tree"},
    "steps": {"batch_size": gear.Steps(40, lookahead=2), "windows": gear.Whole(), "layout": "packed"},
    "groups": {"groups": gear.Groups("prompt", 4), "windows": gear.Whole(), "layout": "packed"},
    "late": {"windows": {"obs": gear.Window(2), "score": None}, "sampler": gear.Lifo(replacement=False)},
    "by priority": {"sampler": gear.Prioritized(), "batches_per_epoch": 7, "prefetch": 3},
    "steps by priority": {"sampler": STEPWISE, "batches_per_epoch": 7, "prefetch": 0},
    "the best": {"sampler": gear.TopK(), "batches_per_epoch": 3},
    "ranks": {"ranks": gear.Ranks(rank=1, world_size=2), "batches_per_epoch": 5},
}


SHORT = {
    "windows",
    "padded",
    "by priority",
    "a class of its own",
    "no iteration",
    "a jump",
    "steps by priority",
}


def some(cases: Iterable[str]) -> list[Any]:
    """The cases, of which most are for make test-all."""
    return [pytest.param(case, marks=() if case in SHORT else pytest.mark.long) for case in cases]


def learn(raw: Raw, table: str, options: Any, identity: bytes = bytes(16), wait: int = 1000) -> None:
    small = messages.LEARN.pack(
        identity=identity, first=1, wait=wait, table=table, options=json.dumps(options).encode()
    )
    raw.send(Kind.LEARN, small)


def call(raw: Raw, number: int, text: bytes, bulk: bytes = b"", received: int = 0) -> None:
    raw.send(Kind.CALL, struct.pack("<QQII", number, received, 0, 0) + text, bulk, request=number)


PLAIN = {"batch_size": 2, "windows": {"map": {"obs": {"of": "Window", "fields": {"length": 1}}}}}
