"""Packed batches over shards for a GPU: those of the CPU, wherever their rows lie; the kernels are interpreted."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from cuda_common import OnCpu, played_on_cpu
from distributed_common import SCHEMA, new_priorities, trajectory
from options_common import nested, nested_table
from played_peer import PlayedPeer
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed import remote as remote_module
from gear_loader.distributed.remote import RemoteShard

played = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
COUNTS = (10, 6, 8)
BLOCK_STEPS = (8, 16, 4)
WHOLE = {
    "obs": gear.Whole(),
    "half": gear.Whole("obs", torch.bfloat16, 1 / 3),
    "again": gear.Whole("obs"),
    "act": gear.Whole(),
    "flag": gear.Whole(dtype=torch.float32),
    "task": gear.Window(1, dtype=torch.float64),
    "task_again": gear.Window(1, column="task"),
}
PART = {"act": gear.Window(9, -4), "flag": gear.Window(9, -4)}
ONCE = gear.Uniform(replacement=False)
CASES: dict[str, dict[str, Any]] = {
    "whole": {"windows": WHOLE, "sampler": ONCE, "batch_size": 8},
    "weighted": {"windows": WHOLE, "sampler": gear.Prioritized(), "batch_size": 6, "batches_per_epoch": 3},
    "steps": {
        "windows": PART,
        "sampler": gear.Prioritized(unit="step", normalize="table"),
        "batch_size": 9,
        "batches_per_epoch": 3,
    },
    "budget": {"windows": WHOLE, "sampler": ONCE, "max_steps": 150, "lookahead": 2, "micro_batches": 2},
    "local": {
        "windows": WHOLE,
        "sampler": gear.Prioritized(),
        "batch_size": 4,
        "batches_per_epoch": 3,
        "scope": "local",
    },
}


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    yield from played_on_cpu(monkeypatch)


def made(shard: int, path: Path | None = None) -> gear.Table:
    """A shard's table, packed or not; with a path, two in three trajectories lie on disk."""
    options: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 40, "block_steps": BLOCK_STEPS[shard]}
    if path is not None:
        disk = gear.Disk(path / str(shard), sync_seconds=NEVER, size="1GiB", keep="newest")
        options |= {"max_blocks": 300, "disk": disk}
    table = gear.Table.create(SCHEMA, **nested_table({"packed": shard != 1, **options}))
    for i in range(COUNTS[shard]):
        number = 100 * shard + i
        table.add(trajectory(number, number * 37 % 60 + 1), priority=number % 5 + 0.5)
    if path is not None:
        table.save(path / str(shard))
        assert spill(table, [i for i in range(COUNTS[shard]) if i % 3])
    return table


def shards_of(tables: list[gear.Table], remote: tuple[int, ...] = (), gone: set[int] | None = None) -> Shards:
    """Shards of one process, some of which seem to be on other nodes."""
    shards = Shards(tables)
    for shard in remote:
        peer: Any = PlayedPeer(tables[shard], gone or set())
        shards._sources[shard] = RemoteShard(peer, "played", tables[0].schema)
    shards.remote = bool(remote)
    return shards


def drawn(shards: Shards, device: Any, **options: Any) -> list[dict[str, Any]]:
    data = gear.ReplayDataset(shards, **nested({"layout": "packed", "device": device, "seed": 7, **options}))
    found = []
    for number, batch in enumerate(data):
        found.append(
            {name: value if isinstance(value, int) else value.cpu().clone() for name, value in batch.items()}
        )
        if isinstance(data.sampler, gear.Prioritized):
            named = {
                "shard": torch.zeros(1, dtype=torch.int64),
                **found[-1],
            }  # of one shard there are no numbers
            data.update_priority(batch, new_priorities(named, number).to(device))
    return found


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    assert len(found) == len(expected) > 1
    for one, other in zip(found, expected, strict=True):
        assert list(one) == list(other)
        for name, value in other.items():
            assert torch.equal(one[name], value) if isinstance(value, torch.Tensor) else one[name] == value


def check_rows(batch: dict[str, Any]) -> list[int]:
    """Check the contents of a batch of whole trajectories; return their numbers."""
    starts, numbers = batch["cu_seqlens"].tolist(), batch["task_again"][:, 0].tolist()
    for begin, end, number in zip(starts, starts[1:], numbers, strict=False):
        rows = trajectory(number, number * 37 % 60 + 1)
        assert batch["position"][begin:end].tolist() == list(range(end - begin))
        np.testing.assert_array_equal(batch["act"][begin:end], rows["act"])
        np.testing.assert_array_equal(batch["obs"][begin:end], rows["obs"])
        np.testing.assert_array_equal(batch["again"][begin:end], rows["obs"])
        np.testing.assert_array_equal(batch["flag"][begin:end], rows["flag"].astype(np.float32))
    return numbers


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_batches_on_a_gpu_are_those_of_the_cpu(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PART_BYTES", 700)
    check_places(name, torch.device("cuda", 0), tmp_path, 2)


def check_places(name: str, device: torch.device, path: Path, prefetch: int) -> None:
    """Compare batches on a GPU with those of the CPU, wherever the rows lie."""
    plain = [made(shard) for shard in range(3)]
    expected = drawn(shards_of(plain), "cpu", prefetch=prefetch, **CASES[name])
    for tiers, remote in (((), ()), ((0, 1), (2,)), ((), (1, 2)), ((2,), (0,))):
        if name == "steps":  # tables with a disk tier refuse its sampler
            tiers = ()
        tables = [made(shard, path / f"{remote}" if shard in tiers else None) for shard in range(3)]
        found = drawn(shards_of(tables, remote), device, prefetch=prefetch, **CASES[name])
        same(found, expected)
        for table in tables:
            table.close()
    for table in plain:
        table.close()


@played
@pytest.mark.parametrize("device", ["cpu", "cuda:1"])
@pytest.mark.parametrize("sizes", [{"batch_size": 8}, {"max_steps": 150}], ids=["rows", "steps"])
def test_rows_that_are_gone_or_lost_are_replaced_or_left_out(
    on_cpu: OnCpu, device: str, sizes: dict[str, Any], tmp_path: Path
) -> None:
    """Rows of another node that are gone, and those of this one whose file is damaged, which leave its table."""
    tables = [made(0), made(1, tmp_path), made(2)]
    file = next((tmp_path / "1" / "segments").iterdir()) / "act.npy"
    flip(file, os.path.getsize(file) - 1)
    shards = shards_of(tables, (2,), {3, 5})
    batches = drawn(shards, device, windows=WHOLE, sampler=ONCE, prefetch=0, **sizes)
    numbers = [number for batch in batches for number in check_rows(batch)]
    lost = [100 + i for i in range(COUNTS[1]) if i % 3]
    assert not {203, 205, *lost} & set(numbers)
    assert tables[1].stats().num_lost == len(lost)
    assert len(tables[0]) == COUNTS[0]
    for table in tables:
        table.close()
    if "batch_size" in sizes:
        assert [len(batch["index"]) for batch in batches] == [8, 8, 8]
    else:
        assert len(numbers) == sum(COUNTS) - 2 - len(lost)
