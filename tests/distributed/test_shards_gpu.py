"""Batches over several shards on a GPU are those of the CPU, wherever the rows come from."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from distributed_common import check_batch, filled
from test_shard_collector import PlayedPeer

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed.remote import RemoteShard

pytestmark = pytest.mark.gpu
WINDOWS = gear.Window(5, -2)
COUNTS = [20, 15, 10]


def batches(
    device: str, selector: gear.selectors.Selector, prefetch: int, remote: tuple[int, ...]
) -> list[Any]:
    tables = [filled(f"gear-gpu-{device}-{shard}", shard, COUNTS) for shard in range(3)]
    shards = Shards(tables)
    for shard in remote:
        shards._sources[shard] = RemoteShard(PlayedPeer(tables[shard], set()), "played", tables[0].schema)
    data = gear.ReplayDataset(
        shards,
        batch_size=24,
        windows=WINDOWS,
        selector=selector,
        device=device,
        prefetch=prefetch,
        batches_per_epoch=8,
    )
    found = []
    for number, batch in enumerate(data):
        found.append({key: value.cpu().clone() for key, value in batch.items()})
        if not isinstance(selector, gear.Uniform):
            names = found[-1]["index"] * 7 + found[-1]["shard"] * 5 + found[-1]["anchor"]
            data.update_priority(batch, ((names + number) % 11 + 0.25).to(device))
    for table in tables:
        table.unlink()
    return found


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("remote", [(), (1,), (0, 2)])
@pytest.mark.parametrize("selector", [gear.Uniform(), gear.Prioritized(), gear.TopK()], ids=repr)
def test_a_gpu_gets_the_batches_of_the_cpu(
    selector: gear.selectors.Selector, prefetch: int, remote: tuple[int, ...]
) -> None:
    expected = batches("cpu", selector, prefetch, ())
    for mine, other in zip(batches("cuda", selector, prefetch, remote), expected, strict=True):
        check_batch(mine, WINDOWS)
        for key in other:
            assert torch.equal(mine[key], other[key]), key


def test_without_pinned_regions_batches_are_put_together_on_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = batches("cpu", gear.Prioritized(), 2, ())
    monkeypatch.setattr(Shards, "pin", lambda _: False)
    for mine, other in zip(batches("cuda", gear.Prioritized(), 2, (1,)), expected, strict=True):
        for key in other:
            assert torch.equal(mine[key], other[key]), key
