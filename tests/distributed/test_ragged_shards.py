"""Ragged columns over shards: batches are those of one process, bit for bit, wherever the values lie."""

from __future__ import annotations

import functools
import importlib.util
import itertools
import os
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import on_two_nodes, run_ranks
from tier_common import move, spill, tier_at

import gear_loader as gear
from gear_loader.distributed import Placement, Shards
from gear_loader.distributed import remote as remote_module
from gear_loader.errors import CodecError, SchemaError
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
NO_UCX = pytest.mark.skipif(importlib.util.find_spec("ucxx") is None, reason="UCX is not installed")
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


def make(name: str | None, shard: int, folder: Path | None = None) -> gear.Table:
    """The table of a shard; with a folder, two of three trajectories lie there only, on a disk tier."""
    sizes = {"max_steps": 2000, "max_trajectories": 100, "block_steps": 8}
    memory = gear.Memory(payload="4MiB", max_blocks=250 if folder else None)
    table = gear.Table.create(
        SCHEMA, name=name, memory=memory, **sizes, **tier_at(folder and folder / str(shard))
    )
    for i in range(COUNTS[shard]):
        table.add(trajectory(100 * shard + i), priority=i % 5 + 0.5)
    if folder:
        table.save(folder / str(shard))
        assert spill(table, np.flatnonzero(np.arange(COUNTS[shard]) % 3)) > 2
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
    mask = batch.get("mask")
    mask = mask["step"] if isinstance(mask, dict) else mask
    mask = torch.ones(len(steps), dtype=torch.bool) if packed else mask.reshape(-1)
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
    "timed": {
        "windows": dict.fromkeys(SCHEMA, gear.Window(at=[-2, 0, 1, 30], timestamps="step", tolerance=0))
        | {name: None for name in SCHEMA if SCHEMA[name].trajectory},
        "sampler": gear.Uniform(unit="step"),
    },
    "weighted": {"windows": gear.Window(3, -2, every=2), "sampler": gear.Prioritized(unit="step")},
}


def draw(shards: Shards, name: str, world: int, count: int = 5, **more: Any) -> list[dict[str, Any]]:
    options = {"device": "cpu", "seed": 3, "batch_size": 12 // world, "batches_per_epoch": count}
    return [check(batch) for batch in gear.ReplayDataset(shards, **options, **CASES[name], **more)]


def rank_of(
    rank: int,
    world: int,
    work: Callable[[Shards, int, int], Any],
    transport: str,
    folder: Path | None = None,
) -> Any:
    table = make(f"gear-ragged-{os.getppid()}-{rank}", rank, folder)
    return on_two_nodes(table, rank, world, work, transport)


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
@pytest.mark.parametrize(
    ("transport", "tiered"),
    [
        ("socket", False),
        ("socket", True),
        pytest.param("ucx", False, marks=NO_UCX),
        pytest.param("ucx", True, marks=NO_UCX),
        pytest.param("nixl", False, marks=NO_NIXL),
    ],
)
def test_ranks_get_the_batches_of_one_process(transport: str, tiered: bool, tmp_path: Path) -> None:
    ranks = run_ranks(3, rank_of, draw_all, transport, tmp_path if tiered else None)
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


# ---------------------------------------------------------------- rows that leave, servers that die


@pytest.mark.parametrize("size", [8, None])
def test_a_damaged_value_of_shards_is_named(size: int | None) -> None:
    coders = [pytest.importorskip(name) for name in ("simplejpeg",)]
    column = gear.Column(torch.uint8, (size, size, 3), codec="jpeg")
    blob = coders[0].encode_jpeg(np.random.default_rng(0).integers(0, 255, (8, 8, 3), np.uint8), 95)
    tables = [
        gear.Table.create(
            {"image": column}, max_steps=4, max_trajectories=4, memory=gear.Memory(payload=4096)
        )
        for _ in range(2)
    ]
    for table in tables:
        table.extend([{"image": [blob]}] * 2)
    assert tables[1].remove(0) is not None
    slot = tables[1].add({"image": [blob[:-60]]})
    with Shards(tables) as shards:
        dataset = gear.ReplayDataset(shards, batch_size=64, windows=gear.Window(1), device="cpu", prefetch=0)
        with pytest.raises(CodecError, match=f"^Column 'image' of trajectory {slot} of shard 1 is damaged"):
            dataset.sample()
    for table in tables:
        table.close()


def replace(table: gear.Table, shard: int, ends: threading.Event) -> None:
    random = np.random.default_rng(shard)
    for number in itertools.count(COUNTS[shard]):
        if ends.wait(0.002):
            return
        table.add(trajectory(100 * shard + number % 90))
        move(table, random)


def storm(shards: Shards, rank: int, world: int) -> int:
    """Trajectories are evicted all the time, also between the two requests for a row and its values."""
    ends = threading.Event()
    writer = threading.Thread(target=replace, args=(shards.table, rank, ends))
    writer.start()
    gone = 0
    try:
        for name in ("padded", "packed", "timed"):
            options = {"device": "cpu", "batch_size": 24, "batches_per_epoch": 30, **CASES[name]}
            data = gear.ReplayDataset(shards, **options)
            for number, batch in enumerate(data):
                check(batch)
                if rank == 1 and number == 10:
                    os.kill(shards._servers.process.pid, signal.SIGKILL)
            gone += data.num_gone
        shards.exchange.barrier()
    finally:
        ends.set()
        writer.join()
    return gone


def far_rank(rank: int, world: int, work: Callable[[Shards, int, int], Any], folder: Path | None) -> Any:
    table = gear.Table.create(
        SCHEMA,
        name=f"gear-ragged-storm-{os.getppid()}-{rank}",
        memory=gear.Memory(payload="128KiB", max_blocks=60 if folder else None),
        max_steps=400,
        max_trajectories=20,
        on_full="evict_oldest",
        block_steps=4,
        **tier_at(folder and folder / str(rank)),
    )
    for i in range(COUNTS[rank]):
        table.add(trajectory(100 * rank + i))
    try:
        with Shards(table, timeout=200, transport="socket", node=f"node-{rank}") as shards:
            return work(shards, rank, world)
    finally:
        table.unlink()


@pytest.mark.long
@pytest.mark.parametrize("tiered", [False, True])
def test_values_are_those_of_their_rows_while_trajectories_leave_and_a_server_is_killed(
    tmp_path: Path, tiered: bool
) -> None:
    """With a disk tier, others move to disk and back meanwhile."""
    assert sum(run_ranks(2, far_rank, storm, tmp_path if tiered else None)) > 0


# ---------------------------------------------------------------- what goes over the network

IMAGES, GROUP = (2, 48, 48, 3), 8
SHARED = {
    "token": gear.Column(torch.int64),
    "images": gear.Column(torch.uint8, (None, *IMAGES[1:]), per="group"),
    "hint": gear.Column(torch.uint8, (None,)),
}
HINTS = (700, 900, 30)
"""Bytes of the hints of two steps that a group has in common, and of a third."""


def grouped(rank: int, world: int, folder: Path | None) -> tuple[int, int, int]:
    """Rows and groups of another node in a batch of whole groups, and the bytes of values that were requested.

    Args:
        folder: of disk tiers, where half of the trajectories lie only.
    """
    table = gear.Table.create(
        SHARED,
        name=f"gear-ragged-groups-{os.getppid()}-{rank}",
        memory=gear.Memory(payload="4MiB", max_blocks=200 if folder else None, prefixes=True),
        max_steps=4000,
        max_trajectories=100,
        **tier_at(folder and folder / str(rank)),
    )
    for number in range(10 * rank, 10 * rank + 4):
        hints = [np.full(size, number + step, np.uint8) for step, size in enumerate(HINTS)]
        steps = {"token": np.full(3, number), "hint": hints}
        first = table.add({**steps, "images": np.full(IMAGES, number, np.uint8)})
        steps = {name: values[2:] for name, values in steps.items()}
        table.extend([steps] * (GROUP - 1), prefix=first, prefix_steps=2)
    if folder:
        table.save(folder / str(rank))
        assert spill(table, table.indices()[::2]) > 0
    try:
        with Shards(table, timeout=60, transport="socket", node=f"node-{rank}") as shards:
            windows = {"token": gear.Whole(), "hint": gear.Whole(), "images": None}
            options = {"windows": windows, "layout": "packed", "device": "cpu", "batch_size": 4 * GROUP}
            data = gear.ReplayDataset(shards, sampler=gear.Fifo(replacement=False), **options)
            (batch,) = list(data)
            numbers = batch["token"][batch["cu_seqlens"][:-1].long()]
            for number, each in zip(numbers.tolist(), batch["images"].tolist(), strict=True):
                assert tuple(each.shape) == IMAGES
                assert each.unique().tolist() == [number]
            for at, each in enumerate(batch["hint"].tolist()):
                assert each.tolist() == [numbers[at // 3] + at % 3] * HINTS[at % 3]
            far = batch["shard"] != rank
            (source,) = (each.source for each in data._buffers.collectors)
            shards.exchange.barrier()
            return int(far.sum()), len(numbers[far].unique()), source.values.num_bytes
    finally:
        table.unlink()


@pytest.mark.long
@pytest.mark.parametrize("tiered", [False, True])
def test_values_that_rows_have_in_common_are_sent_once(tiered: bool, tmp_path: Path) -> None:
    found = run_ranks(2, grouped, tmp_path if tiered else None)
    once = int(np.prod(IMAGES)) + sum(HINTS[:2])
    assert all(count == groups * once + rows * HINTS[2] for rows, groups, count in found)
    rows, groups, _ = (sum(part) for part in zip(*found, strict=True))
    assert rows >= 6 * groups > 0


def placed(shards: Shards, rank: int, world: int, folder: str) -> int:
    """Trajectories that ranks add to any shard, also with an iterator; and a checkpoint of all of them."""
    placement = Placement(shards, "round_robin")
    for i in range(4):
        placement.add(trajectory(500 + 10 * rank + i))
    placement.extend(trajectory(550 + 10 * rank + i) for i in range(4))
    shards.exchange.barrier()
    for name in CASES:
        draw(shards, name, world)
    gear.distributed.save(shards, folder)
    return len(shards.table)


@pytest.mark.long
def test_trajectories_that_other_nodes_store_and_a_checkpoint_on_fewer_ranks(tmp_path: Path) -> None:
    counts = run_ranks(3, rank_of, functools.partial(placed, folder=str(tmp_path / "kept")), "socket")
    assert sum(counts) == sum(COUNTS) + 24
    assert all(count > before for count, before in zip(counts, COUNTS, strict=True))
    with gear.distributed.load(str(tmp_path / "kept")) as table, Shards(table) as shards:
        assert len(table) == sum(counts)
        for name in CASES:
            draw(shards, name, 1)
