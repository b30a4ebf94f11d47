"""Ragged values of batches on a GPU are those of batches on the CPU, whatever runs when."""

from __future__ import annotations

import gc
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import on_host
from streams.cuda import Cuda
from streams.machine import Policy
from torchvision_common import substitute_torchvision

import gear_loader as gear

pytest.importorskip("zstandard", reason="needs zstandard: pip install '.[codecs]'")
pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = torch.device("cuda", 1)
PACKED = {"windows": gear.Whole(), "layout": "packed"}
TREE = {"windows": gear.Whole(), "layout": "tree"}
PADDED = {"windows": gear.Window(2), "sampler": gear.Prioritized()}


def filled() -> gear.Table:
    random = np.random.default_rng(0)
    columns = {
        "x": gear.Column(torch.int32, (None, 2)),
        "text": gear.Column(str),
        "y": gear.Column(torch.float32),
        "coded": gear.Column(torch.float32, (3,), codec="zstd"),
    }
    sizes = {"max_steps": 200, "max_trajectories": 20, "block_steps": 4}
    table = gear.Table.create(columns, memory=gear.Memory(payload="64KiB"), **sizes)
    for length in range(1, 12):
        values = [random.integers(0, 9, (n, 2), dtype=np.int32) for n in random.integers(0, 20, length)]
        table.add(
            {
                "x": values,
                "text": ["z" * len(each) for each in values],
                "y": np.zeros(length, np.float32),
                "coded": random.random((length, 3), dtype=np.float32),
            }
        )
    return table


def grouped() -> gear.Table:
    """Trajectories that begin with others, and have values in common with them."""
    random = np.random.default_rng(1)
    columns = {
        "x": gear.Column(torch.int32, (None, 2), per="group"),
        "text": gear.Column(str, per="group"),
        "coded": gear.Column(torch.float32, (3,), codec="zstd", per="group"),
        "y": gear.Column(torch.float32),
    }
    sizes = {"max_steps": 400, "max_trajectories": 30, "block_steps": 4}
    table = gear.Table.create(columns, memory=gear.Memory(payload="64KiB", prefixes=True), **sizes)
    steps = lambda n: {"y": random.random(n, dtype=np.float32)}  # noqa: E731
    for group in range(4):
        values = {"x": random.integers(0, 9, (9 * group, 2), dtype=np.int32), "text": "z" * group}
        values["coded"] = random.random(3, dtype=np.float32)
        first = table.add({**steps(12 + group), **values})
        table.extend([steps(n) for n in (1, 4, 9)], prefix=first, prefix_steps=3 + 2 * group)
    return table


def kept(batch: dict[str, Any]) -> dict[str, Any]:
    """Copies, which the GPU makes when nothing refers to the batch any longer."""
    return torch.utils._pytree.tree_map_only(torch.Tensor, torch.clone, dict(batch))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    ("options", "policy", "copy"),
    [
        *[(PADDED, "random", None), (PADDED, "latest", True), (PACKED, "random", True)],
        *[(PACKED, "latest", None), (TREE, "random", None), (TREE, "latest", True)],
    ],
)
def test_batches_are_those_of_the_cpu(options: dict[str, Any], policy: Policy, copy: bool | None) -> None:
    def batches(device: Any) -> list[dict[str, Any]]:
        table = grouped() if options is TREE else filled()
        ahead = gear.Prefetch(2, copy=copy)
        dataset = gear.ReplayDataset(table, batch_size=6, device=device, prefetch=ahead, **options)
        found = [kept(dataset.sample()) for _ in range(2)]
        found += [kept(batch) for batch, _ in zip(dataset, range(4), strict=False)]
        found = [on_host(batch) for batch in found]
        del dataset
        gc.collect()  # the iteration has ended
        table.close()
        return found

    expected, cuda = batches("cpu"), Cuda(3, policy)
    with cuda.installed():
        found = batches(DEVICE)
        cuda.threads.finish()
        gc.collect()
    cuda.check()
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert one["text"] == other["text"]
        for part in ("values", "offsets"):
            mine = getattr(one["x"], part)
            torch.testing.assert_close(mine, getattr(other["x"], part), rtol=0, atol=0)
        for name in {*one} - {"x", "text", "max_seqlen"}:
            torch.testing.assert_close(one[name], other[name], rtol=0, atol=0)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_jpegs_are_decoded_where_they_are_wanted(layout: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    asked, cuda = substitute_torchvision(monkeypatch), Cuda(3, "random")
    column, random = gear.Column(torch.uint8, (16, 24, 3), codec="jpeg"), np.random.default_rng(0)
    windows: Any = gear.Window(2) if layout == "padded" else gear.Whole()
    given: dict[str, Any] = {"windows": windows, "layout": layout, "batch_size": 4}

    def batches(device: Any) -> list[dict[str, Any]]:
        dataset = gear.ReplayDataset(table, device=device, **given)
        found = [kept(dataset.sample()), *(kept(batch) for batch, _ in zip(dataset, range(3), strict=False))]
        assert all(batch["image"].device.type == torch.device(device.device).type for batch in found)
        return [on_host(batch) for batch in found]

    with cuda.installed():
        memory = gear.Memory(payload="256KiB")
        with gear.Table.create({"image": column}, max_steps=60, max_trajectories=9, memory=memory) as table:
            for length in range(1, 7):
                table.add({"image": random.integers(0, 256, (length, 16, 24, 3), dtype=np.uint8)})
            expected, before = batches(gear.Gpu("cpu", decode=True)), len(asked)
            found = batches(gear.Gpu(DEVICE, decode=True))
            cuda.threads.finish()
            gc.collect()
    cuda.check()
    assert before == 0 < len(asked)
    for one, other in zip(found, expected, strict=True):
        torch.testing.assert_close(one["image"], other["image"], rtol=0, atol=0)


@pytest.mark.parametrize("policy", ["random", "latest"])
def test_values_stay_until_the_gpu_has_read_them(policy: Policy) -> None:
    """Trajectories are evicted, and others take their memory, as soon as batches have been asked for."""

    def rows(number: int) -> dict[str, Any]:
        values = [np.full((20 + number % 7 * step, 2), number, dtype=np.int32) for step in range(4)]
        return {"x": values, "y": np.full(4, number, dtype=np.float32)}

    cuda = Cuda(5, policy)
    with cuda.installed():
        columns = {"x": gear.Column(torch.int32, (None, 2)), "y": gear.Column(torch.float32)}
        sizes = {"max_steps": 80, "max_trajectories": 20, "block_steps": 4, "on_full": "evict_oldest"}
        with gear.Table.create(columns, memory=gear.Memory(payload="20KiB"), **sizes) as table:
            for number in range(20):
                table.add(rows(number))
            dataset = gear.ReplayDataset(table, batch_size=3, device=DEVICE, batches_per_epoch=20, **PACKED)
            batches, found = iter(dataset), []
            for number in range(20, 140, 10):
                found.append(kept(dataset.sample() if number % 3 else next(batches)))
                for more in range(number, number + 10):
                    table.add(rows(more))
            assert {each.zero_copy for each in dataset._buffers.collectors} == {True}
            found = [on_host(batch) for batch in found]
            del dataset, batches
            gc.collect()
            cuda.threads.finish()
        gc.collect()
    cuda.check()
    for batch in found:
        owner = batch["y"].repeat_interleave(batch["x"].lengths)
        assert torch.equal(batch["x"].values, owner.int()[:, None].expand(-1, 2))
