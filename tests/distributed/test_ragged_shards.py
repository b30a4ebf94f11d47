"""Ragged columns over shards: batches are those of one process, bit for bit, wherever the values lie."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import run_ranks

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed import remote as remote_module
from gear_loader.errors import SchemaError
from gear_loader.transport import nixl_agent

COUNTS = (14, 5, 11)
SCHEMA = {
    "step": gear.Column(torch.int64),
    "tokens": gear.Column(torch.int32, (None,)),
    "points": gear.Column(torch.float32, (None, 3)),
    "text": gear.Column(str),
    "blob": gear.Column(bytes),
    "meta": gear.Column(object),
    "packed": gear.Column(torch.int16, (5,), codec="zstd"),
    "uneven": gear.Column(torch.uint8, (None, 2), codec="lz4"),
    "prompt": gear.Column(torch.int64, (None,), per="trajectory"),
    "task": gear.Column(str, per="trajectory"),
}
RAGGED = [name for name in SCHEMA if name != "step"]
NO_NIXL = pytest.mark.skipif(nixl_agent.installed() is None, reason="NIXL is not installed")


def value(name: str, number: int, step: int) -> Any:
    """The value of a step of trajectory `number`, which tells both."""
    chance = np.random.default_rng([number, step, RAGGED.index(name)])
    rows = int(chance.integers(0, 40)) * int(chance.integers(0, 4) > 0)
    if name == "tokens":
        return chance.integers(0, 1 << 20, rows).astype(np.int32)
    if name == "points":
        return chance.random((rows, 3)).astype(np.float32)
    if name in ("text", "task"):
        return f"{number}/{step} " + "é" * rows
    if name == "blob":
        return chance.bytes(rows * 30)
    if name == "meta":
        return None if not rows else {"number": number, "steps": [step] * rows, "of": {"text": "ö"}}
    if name == "packed":
        return chance.integers(0, 99, 5).astype(np.int16)
    if name == "uneven":
        return chance.integers(0, 9, (rows, 2)).astype(np.uint8)
    return chance.integers(0, 1 << 40, 7 * rows)


def trajectory(number: int) -> dict[str, Any]:
    length = number * 37 % 19 + 1
    steps: dict[str, Any] = {"step": number * 1000 + np.arange(length)}
    for name in RAGGED:
        once = SCHEMA[name].trajectory
        values = value(name, number, 0) if once else [value(name, number, i) for i in range(length)]
        steps[name] = np.stack(values) if name == "packed" else values
    return steps


def make(name: str | None, shard: int) -> gear.Table:
    sizes = {"max_steps": 2000, "max_trajectories": 100, "block_steps": 8}
    table = gear.Table.create(SCHEMA, name=name, memory=gear.Memory(payload="4MiB"), **sizes)
    for i in range(COUNTS[shard]):
        table.add(trajectory(100 * shard + i), priority=i % 5 + 0.5)
    return table


def plain(found: Any) -> Any:
    """A value as numpy's or Python's."""
    return found.numpy() if isinstance(found, torch.Tensor) else found


def listed(batch: dict[str, Any], name: str) -> list[Any]:
    """Each value of a window, in the order of a flat list."""
    found = batch[name]
    depth = len(found.shape) if isinstance(found, gear.Ragged) else 0
    found = found.tolist() if depth else list(found)
    if depth == 2 or (not depth and found and isinstance(found[0], list)):
        found = list(itertools.chain(*found))
    if name == "packed" and found and found[0].ndim == 2:
        found = list(itertools.chain(*found))
    return [plain(each) for each in found]


def equal(one: Any, other: Any) -> bool:
    return np.array_equal(one, other) if isinstance(one, np.ndarray) else bool(one == other)


def check(batch: dict[str, Any]) -> dict[str, Any]:
    """Check that every value is that of its row and step; return what can be compared."""
    steps, kept = batch["step"].reshape(-1).tolist(), {"step": batch["step"].numpy().copy()}
    packed = "cu_seqlens" in batch
    rows = batch["step"][batch["cu_seqlens"][:-1].long()] if packed else batch["step"].amax(dim=1)
    mask = torch.ones(len(steps), dtype=torch.bool) if packed else batch["mask"].reshape(-1)
    for name in RAGGED:
        found = listed(batch, name)
        once = SCHEMA[name].trajectory
        names = [(each // 1000, 0) for each in rows.tolist()] if once else [divmod(s, 1000) for s in steps]
        assert len(found) == len(names), name
        for place, (each, (number, step)) in enumerate(zip(found, names, strict=True)):
            if once or mask[place]:
                expected = value(name, number, step)
                assert equal(each, expected), (name, number, step, each, expected)
            else:
                assert each is None or not np.any(each), name
        kept[name] = found
    return kept


CASES: dict[str, dict[str, Any]] = {
    "packed": {
        "windows": dict.fromkeys(RAGGED) | {n: gear.Whole() for n in SCHEMA if not SCHEMA[n].trajectory},
        "layout": "packed",
    },
    "padded": {"windows": gear.Window(4, -2)},
    "weighted": {"windows": gear.Window(3, -2, every=2), "sampler": gear.Prioritized(unit="step")},
}


def draw(shards: Shards, name: str, world: int, count: int = 5, **more: Any) -> list[dict[str, Any]]:
    options = {"device": "cpu", "seed": 3, "batch_size": 12 // world, "batches_per_epoch": count}
    return [check(batch) for batch in gear.ReplayDataset(shards, **options, **CASES[name], **more)]


def rank_of(rank: int, world: int, work: Callable[[Shards, int, int], Any], transport: str) -> Any:
    table = make(f"gear-ragged-{os.getppid()}-{rank}", rank)
    try:  # the first two on one node, the third on another
        shards = Shards(table, timeout=60, transport=transport, node=f"node-{rank // 2}")
        try:
            found = work(shards, rank, world)
            shards.exchange.barrier()
        finally:
            shards.close()
        return found
    finally:
        table.unlink()


def draw_all(shards: Shards, rank: int, world: int) -> dict[str, Any]:
    remote_module.PART_BYTES = 700  # values in several requests, and cut
    found: dict[str, Any] = {name: draw(shards, name, world) for name in CASES}
    found["cached"] = draw(shards, "padded", world)
    if world > 1:
        draw(shards, "padded", world, sampler=gear.Uniform(replacement=False))
        data = gear.ReplayDataset(shards, batch_size=4, **CASES["padded"], device="cpu")
        with pytest.raises(SchemaError, match="are ragged; rebalance takes columns of a fixed shape only"):
            data.rebalance()
    return found


@pytest.mark.long
@pytest.mark.parametrize("transport", ["socket", pytest.param("nixl", marks=NO_NIXL)])
def test_ranks_get_the_batches_of_one_process(transport: str) -> None:
    ranks = run_ranks(3, rank_of, draw_all, transport)
    with Shards([make(None, shard) for shard in range(3)]) as shards:
        whole = draw_all(shards, 0, 1)
    for name in CASES:
        for number, expected in enumerate(whole[name]):
            for key in SCHEMA:
                parts = list(itertools.chain(*(found[name][number][key] for found in ranks)))
                assert len(parts) == len(expected[key])
                assert all(equal(a, b) for a, b in zip(parts, expected[key], strict=True)), (name, key)


def test_two_shards_of_one_process_have_the_values_of_their_rows() -> None:
    with Shards([make(None, shard) for shard in (0, 1)]) as shards:
        for name in CASES:
            assert len(draw(shards, name, 1, count=3)) == 3
