"""Packed and converted batches for a GPU: end to end on a stand-in for CUDA, with the kernels interpreted."""

from __future__ import annotations

import contextlib
import functools
import itertools
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from cuda_common import OnCpu, played_on_cpu
from dataset_common import on_host, snapshot
from options_common import nested, nested_table
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.collection.packed_cuda import PackedCuda

played = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
SCHEMA = {
    "token": gear.Column(torch.int32),
    "pixels": gear.Column(torch.uint8, (3, 5)),
    "wide": gear.Column(torch.float32, (64,)),
    "flag": gear.Column(torch.bool),
    "reward": gear.Column(torch.float64, (2,), per="trajectory"),
}
LENGTHS = (63, 1, 12, 200, 3, 20, 33, 7, 90, 4, 16, 6)
DEVICE = torch.device("cuda", 1)


@pytest.fixture
def on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    yield from played_on_cpu(monkeypatch)


LATE = {
    "token": SCHEMA["token"],
    "wide": SCHEMA["wide"],
    "reward": SCHEMA["reward"],
    "flag": SCHEMA["flag"],
    "advantage": gear.Column(torch.float32, (3,), late=True),
    "score": gear.Column(torch.float16, per="trajectory", late=True),
}


def made_tiered(path: Path, *, packed: bool, again: bool = True) -> gear.Table:
    """A table with late columns, filled in all but two trajectories. Some lie on disk; with `again` one of them is in
    memory again, because its columns were filled there, else nothing was read from disk."""
    disk = gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest")
    sizes = {"max_steps": 1000, "max_trajectories": 20, "block_steps": 16, "max_blocks": 200}
    table = gear.Table.create(LATE, **nested_table({**sizes, "packed": packed, "disk": disk}))
    for number, length in enumerate(LENGTHS):
        random = np.random.default_rng(number)
        table.add(
            {
                "token": random.integers(0, 1000, length, dtype=np.int32),
                "wide": random.random((length, 64), dtype=np.float32),
                "flag": random.random(length) < 0.5,
                "reward": random.random(2),
            },
            priority=number % 4 + 0.5,
        )

    def fill(numbers: list[int]) -> None:
        lengths = [LENGTHS[number] for number in numbers]
        advantage = [
            np.full((n, 3), number, dtype=np.float32) for number, n in zip(numbers, lengths, strict=True)
        ]
        generations = table._engine.index.arrays.generation[numbers]
        table.fill(
            numbers, generation=generations, advantage=advantage, score=np.array(numbers, dtype=np.float16)
        )

    fill([0, 1, 3, 4, 5, 6, 7, 8])
    table.save(path)
    assert spill(table, [0, 2, 3, 5, 7, 9, 10]) == 7
    fill([2, 11] if again else [11])
    assert spill(table, [2]) == 0  # it is not on disk with what was filled
    return table


def made_table(*, packed: bool) -> gear.Table:
    table = gear.Table.create(
        SCHEMA, max_steps=1000, max_trajectories=20, block_steps=32, memory=gear.Memory(packed=packed)
    )
    for number, length in enumerate(LENGTHS):
        generator = torch.Generator().manual_seed(number)
        rows = {
            name: torch.randint(
                0, 2 if name == "flag" else 250, (length, *column.shape), generator=generator
            ).to(column.dtype)
            for name, column in SCHEMA.items()
            if name != "reward"
        }
        table.add({**rows, "reward": torch.rand(2, generator=generator).double()})
    return table


def batches(table: gear.Table, device: Any, **options: Any) -> list[Any]:
    given = {"batch_size": 4, "windows": gear.Whole(), "layout": "packed", "seed": 3, "batches_per_epoch": 4}
    data = gear.ReplayDataset(table, **nested({"device": device, **given, **options}))
    return [plain(batch) for batch in data]


def plain(batch: Any) -> dict[str, Any]:
    flat = {
        name: value.values() if getattr(value, "is_nested", False) else value for name, value in batch.items()
    }
    longest = flat.pop("max_seqlen", None)
    return {**snapshot(on_host(flat)), "max_seqlen": torch.tensor(-1 if longest is None else longest)}


def same(one: Any, other: Any) -> None:
    assert one.keys() == other.keys()
    for name, value in other.items():
        if isinstance(value, dict) and name != "sample_info":
            same(one[name], value)
        elif isinstance(value, dict):  # times differ, and numbers of draws
            assert all(torch.equal(one[name][part], value[part]) for part in ("age", "probability"))
            assert (one[name]["times_sampled"] >= value["times_sampled"]).all()
        else:
            assert torch.equal(one[name], value), name


CONVERTED = {
    "token": gear.Whole(),
    "long": gear.Whole("token", torch.int64),
    "pixels": gear.Whole(dtype=torch.bfloat16, scale=1 / 255),
    "half": gear.Whole("pixels", torch.float16, 1 / 255),
    "reward": gear.Window(1, dtype=torch.float32, scale=0.5),
}


PADDED = {
    "pixels": gear.Window(3, -1, dtype=torch.float32, scale=1 / 255),
    "token": gear.Window(2),
    "flag": gear.Window(2, pad="head", dtype=torch.float32),
    "reward": gear.Window(1, dtype=torch.bfloat16),
}
CASES: dict[str, tuple[bool, dict[str, Any]]] = {
    "priorities": (True, {"sample_info": True, "sampler": gear.Prioritized()}),
    "budget": (False, {"batch_size": None, "max_steps": 300, "lookahead": 2, "prefetch": 0}),
    "jagged": (False, {"windows": gear.Window(9, -4), "layout": "jagged", "copy": True}),
    "converted": (True, {"windows": CONVERTED}),
    "padded": (True, {"windows": PADDED, "layout": "padded"}),
}


TIERED: dict[str, dict[str, Any]] = {
    "priorities": {"sample_info": True, "sampler": gear.Prioritized()},
    "budget": {"batch_size": None, "max_steps": 300, "lookahead": 2, "too_long": "truncate"},
    "jagged": {"windows": gear.Window(9, -4), "layout": "jagged", "copy": True},
    "padded": {"windows": gear.Whole(), "layout": "padded"},
    "converted": {
        "windows": {
            "token": gear.Whole(),
            "long": gear.Whole("token", torch.int64),
            "advantage": gear.Whole(dtype=torch.bfloat16, scale=0.5),
            "half": gear.Whole("advantage", torch.float16),
            "score": gear.Window(1, dtype=torch.float32),
            "reward": None,
        }
    },
    "first blocks": {"windows": {"token": gear.Window(3, -1), "score": None}, "anchor": "last"},
}


@played
def test_rows_that_cannot_be_read_leave_the_batch(on_cpu: OnCpu, tmp_path: Path) -> None:
    """They are removed, and the batch is drawn again, or made without them."""
    for name, more in (("rows", {}), ("steps", {"batch_size": None, "max_steps": 300})):
        with made_tiered(tmp_path / name, packed=True, again=False) as table:
            for file in (tmp_path / name / "segments").glob("*/wide.npy"):
                flip(file, os.path.getsize(file) - 1)
            options = {"sampler": gear.Uniform(replacement=False), "batches_per_epoch": None, **more}
            found = batches(table, DEVICE, **options)
            indices = torch.cat([batch["index"] for batch in found]).tolist()
            assert {1, 4, 6, 8, 11} == set(indices)
            assert table.stats().num_lost > 0
            for batch in found:
                for begin, end, row in zip(
                    batch["cu_seqlens"], batch["cu_seqlens"][1:], batch["index"].tolist(), strict=False
                ):
                    assert torch.equal(batch["wide"][begin:end], table[row]["wide"])


@played
@pytest.mark.parametrize("packed", [False, True])
def test_rows_that_are_moved_to_disk_while_they_are_listed(
    on_cpu: OnCpu, packed: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    moved = 0
    with made_tiered(tmp_path, packed=packed) as table:
        expected = batches(table, "cpu", batch_size=40, batches_per_epoch=2)
        list_, sources = PackedCuda._listed, list[int]()

        def list_later(self: Any, *args: Any) -> Any:
            nonlocal moved
            moved += spill(table, [1, 4, 6, 8])
            sources.append(len(args[-1]))
            return list_(self, *args)

        monkeypatch.setattr(PackedCuda, "_listed", list_later)
        for one, two in zip(
            batches(table, DEVICE, batch_size=40, batches_per_epoch=2), expected, strict=True
        ):
            same(one, two)
        assert moved
        assert len(sources) == 3  # the first batch was listed once more
        assert sources[1] < sources[0]


@played
@pytest.mark.parametrize("failing", [2, 5, 8])
def test_memory_that_could_not_grow_is_as_it_was(
    on_cpu: OnCpu, monkeypatch: pytest.MonkeyPatch, failing: int
) -> None:
    """Interrupted when an allocation has returned; the plans after it are for the tensors after it."""
    allocate, calls = torch.empty, itertools.count()

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        made = allocate(*shape, **options)
        if next(calls) == failing:
            raise KeyboardInterrupt
        return made

    with made_table(packed=True) as table:
        options: dict[str, Any] = {"batch_size": 2, "windows": CONVERTED, "layout": "packed", "prefetch": 0}
        data = [
            gear.ReplayDataset(table, **nested({"device": device, "sampler": gear.Fifo(), **options}))
            for device in (DEVICE, "cpu")
        ]
        for which, times in (([1, 2], 4), ([3, 4], 1), ([9, 11], 3)):  # of 13 steps, of 203, and of 10
            monkeypatch.setattr(torch, "empty", empty if times == 1 else allocate)
            held: list[Any] = []  # so that all buffers are used
            for each in data:
                each.subset = functools.partial(np.isin, test_elements=which)
                with contextlib.suppress(KeyboardInterrupt):
                    held.append([each.sample() for _ in range(times)])
        assert next(calls) > failing
        for one, other in zip(*held, strict=True):
            same(plain(one), plain(other))


@played
def test_memory_that_grows_for_rows_on_disk_is_filled_from_memory_after_them(
    on_cpu: OnCpu, tmp_path: Path
) -> None:
    """What gathers records is made anew for the new memory, also if the first batch in it has none."""
    with made_tiered(tmp_path, packed=True) as table:
        data = [
            gear.ReplayDataset(
                table, batch_size=2, windows=gear.Whole(), layout="packed", device=device, sampler=gear.Fifo(),
                prefetch=0,
            )
            for device in (DEVICE, "cpu")
        ]  # fmt: skip
        for which in ([1, 6], [0, 3], [6, 8]):  # in memory, on disk, in memory
            for each in data:
                each.subset = functools.partial(np.isin, test_elements=which)
            for _ in range(3):  # in each of the buffers
                one, other = (plain(each.sample()) for each in data)
                same(one, other)


@played
def test_jagged_batches_share_their_memory(on_cpu: OnCpu) -> None:
    with made_table(packed=True) as table:
        data = gear.ReplayDataset(table, batch_size=3, windows=gear.Whole(), layout="jagged", device=DEVICE)
        batch = next(iter(data))
        assert batch["wide"].is_nested
        assert batch["wide"].shape[0] == 3
        assert batch["wide"].offsets().data_ptr() == batch["cu_seqlens"].data_ptr()


@pytest.mark.gpu
@pytest.mark.parametrize("name", CASES)
def test_batches_on_a_gpu_are_those_of_the_cpu(name: str) -> None:
    packed, options = CASES[name]
    with made_table(packed=packed) as table:
        expected = batches(table, "cpu", **options)
        found = batches(table, "cuda", **{**options, "batches_per_epoch": 4})
        assert len(found) == 4
        for one, two in zip(found, expected, strict=True):
            if "priority_weight" in two:  # the host draws packed batches on both
                assert torch.allclose(one.pop("priority_weight"), two.pop("priority_weight"))
            same(one, two)


@pytest.mark.gpu
@pytest.mark.parametrize("name", TIERED)
@pytest.mark.parametrize("packed", [False, True])
def test_batches_of_a_disk_tier_on_a_gpu_are_those_of_the_cpu(
    name: str, packed: bool, tmp_path: Path
) -> None:
    with made_tiered(tmp_path, packed=packed) as table:
        expected = batches(table, "cpu", **TIERED[name])
        found = batches(table, "cuda", **TIERED[name])
        assert len(found) == len(expected) == 4
        for one, two in zip(found, expected, strict=True):
            same(one, two)
