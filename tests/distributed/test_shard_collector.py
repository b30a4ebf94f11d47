"""The GPU's way of collecting rows of several shards: interpreted, with the network played, and on a GPU."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from cuda_common import FakeEvent
from distributed_common import check_batch, filled, new_priorities
from played_peer import PlayedPeer

import gear_loader as gear
from gear_loader.collection import buffers as buffers_module
from gear_loader.collection.collector import collector_for
from gear_loader.collection.windows import windows_of
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.shard_sampler import records_of
from gear_loader.distributed.shard_source import ShardRows, ShardSource
from gear_loader.distributed.shards import Shards
from gear_loader.errors import PeerTimeoutError, StaleIndexError
from gear_loader.storage.operations.view import READING

INTERPRETED = pytest.mark.skipif(torch.cuda.is_available(), reason="the kernels are compiled here")
WINDOWS = gear.Window(5, -2)
COUNTS = [20, 15, 10]


def made(device: bool, shards: Shards, batch_size: int) -> tuple[Any, Any]:
    windows, cpu = windows_of(shards.table.schema, WINDOWS, None), torch.device("cpu")
    options: dict[str, Any] = {"batch_size": batch_size, "device": cpu, "weighs": True, "zero_copy": device}
    collector = collector_for(ShardSource(shards), windows, **options)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(buffers_module.torch.cuda, "Event", lambda **_: FakeEvent())
        return collector, collector.buffers()


def some_rows(shards: Shards, count: int, seed: int) -> ShardRows:
    random = np.random.default_rng(seed)
    numbers = random.integers(0, 3, count)
    records = np.concatenate(
        [records_of(shards.own[n], np.array([random.integers(COUNTS[n])]), np.zeros(1)) for n in numbers]
    )
    lengths = [
        shards.own[n]._engine.reader().index_arrays()[0][slot, 0]
        for n, slot in zip(numbers, records["slot"], strict=True)
    ]
    records["step"] = [random.integers(length) for length in lengths]
    records["leaf"] = random.random(count)

    def spare(wanted: int, turn: int) -> tuple[Any, int]:
        return records_of(shards.own[0], np.arange(wanted) % COUNTS[0], np.zeros(wanted), 0.25), 0

    return ShardRows(numbers, records, lambda leaves: leaves.astype(np.float32), spare)


@pytest.fixture
def fake_stream(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    waited: list[Any] = []
    stream = type("Stream", (), {"wait_event": lambda self, event: waited.append(event)})()
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: stream)
    return waited


@INTERPRETED
@pytest.mark.parametrize(("device", "remote"), [(False, (1,)), (True, ()), (True, (1, 2))])
def test_rows_go_to_their_places(device: bool, remote: tuple[int, ...], fake_stream: list[Any]) -> None:
    shards = Shards([filled(None, shard, COUNTS) for shard in range(3)])
    peers = {shard: PlayedPeer(shards.own[shard], {3, 4}) for shard in remote}
    for shard, peer in peers.items():
        shards._sources[shard] = RemoteShard(peer, "played", shards.table.schema)
    collector, buffers = made(device, shards, 24)
    for count in (24, 7, 24):
        rows = some_rows(shards, count, count)
        before = rows.shards.copy(), rows.records.copy()
        collector.gather(buffers, rows)
        batch = buffers.rows(count)
        check_batch(batch, WINDOWS)
        gone = np.isin(before[0], remote) & np.isin(before[1]["slot"], [3, 4])
        numbers = batch["act"].max(dim=1).values.numpy() // 1000
        wanted = np.where(gone, rows.records["slot"], before[1]["slot"] + 100 * before[0])
        np.testing.assert_array_equal(numbers, wanted)
        np.testing.assert_array_equal(batch["shard"].numpy(), np.where(gone, 0, before[0]))
        np.testing.assert_array_equal(batch["index"].numpy(), rows.records["slot"])
        weights = np.where(gone, 0.25, before[1]["leaf"]).astype(np.float32)
        np.testing.assert_array_equal(batch["priority_weight"].numpy(), weights)
        assert sorted(rows.tickets) == sorted(set(rows.shards) - set(remote))
        rows.tickets.end()
    assert (collector.source.num_gone > 0) == bool(remote)
    assert all(peer.asked for peer in peers.values())
    if device:
        assert buffers.gpu.filled.calls == ["synchronize", "record"] * 3
        assert fake_stream == [buffers.gpu.released] * 3


@INTERPRETED
@pytest.mark.parametrize("device", [False, True])
def test_a_node_that_does_not_answer(
    device: bool, fake_stream: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(
        "gear_loader.distributed.shard_tables._RETRY", 3600.0
    )  # on a busy machine a gather takes seconds
    shards = Shards([filled(None, shard, COUNTS) for shard in range(3)])
    error = PeerTimeoutError("node b did not answer")
    shards._sources[2] = RemoteShard(PlayedPeer(shards.own[2], set(), error), "played", shards.table.schema)
    collector, buffers = made(device, shards, 24)
    rows = some_rows(shards, 24, 1)
    with pytest.raises(PeerTimeoutError, match="node b did not answer"):
        collector.gather(buffers, rows)
    rows.tickets.end()
    if device:  # what was queued until then is waited for before its memory is used again
        assert buffers.gpu.filled.calls[-1] == "record"
    for table in shards.own.values():
        assert not table._engine.index.arrays.readers[:, READING].any()
    shards.on_failure = "redraw"
    rows = some_rows(shards, 24, 1)
    lost = int((rows.shards == 2).sum())
    collector.source.num_lost = 0
    collector.gather(buffers, rows)
    rows.tickets.end()
    check_batch(buffers.rows(24), WINDOWS)
    assert collector.source.num_lost == lost > 0
    assert set(buffers.batch["shard"].tolist()) == {0, 1}
    assert shards.lost() == [2]


def test_stages_of_a_pipeline_draw_nothing_instead() -> None:
    shards = Shards([filled(None, shard, COUNTS) for shard in range(3)])
    collector, buffers = made(False, shards, 24)
    rows = some_rows(shards, 24, 1)
    rows.spare = None
    shards.own[1].remove(int(rows.records["slot"][rows.shards == 1][0]))
    with pytest.raises(StaleIndexError, match="Stages of a pipeline must get the same rows"):
        collector.gather(buffers, rows)


def batches(
    device: str, sampler: gear.samplers.Sampler, prefetch: int, remote: tuple[int, ...] = ()
) -> list[Any]:
    tables = [filled(f"gear-gpu-{device}-{shard}", shard, COUNTS) for shard in range(3)]
    shards = Shards(tables)
    for shard in remote:
        shards._sources[shard] = RemoteShard(PlayedPeer(tables[shard], set()), "played", tables[0].schema)
    options: dict[str, Any] = {"device": device, "prefetch": prefetch, "batches_per_epoch": 8}
    data = gear.ReplayDataset(shards, batch_size=24, windows=WINDOWS, sampler=sampler, **options)
    found = []
    for number, batch in enumerate(data):
        found.append({key: value.cpu().clone() for key, value in batch.items()})
        if not isinstance(sampler, gear.Uniform):
            data.update_priority(batch, new_priorities(found[-1], number).to(device))
    for table in tables:
        table.unlink()
    return found


@pytest.mark.gpu
@pytest.mark.parametrize(
    ("sampler", "prefetch", "remote", "pins"),
    [
        (gear.Uniform(), 0, (0, 2), True),
        (gear.Prioritized(), 2, (1,), True),
        (gear.TopK(), 2, (), True),
        (gear.Prioritized(), 0, (), True),
        (gear.Prioritized(), 2, (1,), False),  # without pinned regions batches are put together on the host
    ],
)
def test_a_gpu_gets_the_batches_of_the_cpu(
    sampler: Any, prefetch: int, remote: tuple[int, ...], pins: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    expected = batches("cpu", sampler, prefetch)
    if not pins:
        monkeypatch.setattr(Shards, "pin", lambda *_: False)
    for mine, other in zip(batches("cuda", sampler, prefetch, remote), expected, strict=True):
        check_batch(mine, WINDOWS)
        for key in other:
            assert torch.equal(mine[key], other[key]), key


def test_returns_of_rows_of_other_nodes() -> None:
    schema = {"reward": gear.Column(torch.float32), "done": gear.Column(torch.bool)}
    tables = [gear.Table.create(schema, max_steps=90, max_trajectories=10) for _ in range(2)]
    for number, table in enumerate(tables):
        for _ in range(10):
            table.add({"reward": torch.full((9,), number + 1.0), "done": torch.zeros(9, dtype=torch.bool)})
    shards = Shards(tables)
    shards.remote = True
    peer: Any = PlayedPeer(tables[1], set())
    shards._sources[1] = RemoteShard(peer, "played", tables[0].schema)
    windows = {"reward": gear.Window(1), "value": gear.NStep("reward", 3, 0.5, "done")}
    data = gear.ReplayDataset(shards, windows=windows, batch_size=24, device="cpu", batches_per_epoch=3)
    for batch in data:
        steps = (8 - batch["anchor"]).clamp(max=3)  # the last reward leads to no step from which to go on
        assert torch.equal(batch["value"]["return"], (batch["shard"] + 1) * 2 * (1 - 0.5**steps))
        assert torch.equal(batch["reward"][:, 0], batch["shard"] + 1.0)
