"""Shards on other nodes: the same batches over each carrier, and what happens when a node's server does not answer."""

from __future__ import annotations

import importlib.util
import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import check_batch, filled, new_priorities, run_ranks, same_rows, trajectory
from options_common import nested
from played_peer import PlayedPeer
from test_global_selection import COUNTS, WINDOWS, alone, kept
from waiting_common import go_on, stop_process

import gear_loader as gear
from gear_loader.distributed import Placement, Shards, shard_tables
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.shard_source import ShardSource

ROWS, BATCHES = 24, 5
SAMPLERS = (gear.Prioritized(), gear.Uniform(unit="step"), gear.TopK())
CONVERTED = {
    "act": gear.Window(5, -2),
    "obs": gear.Window(5, -2, dtype=torch.float16, scale=1 / 3),
    "flag": gear.Window(3, dtype=torch.float32, scale=1 / 255),
}
SECRET = "a secret of the right length 123"


def carriers() -> list[Any]:
    found = ["socket"]
    for name, module in (("ucx", "ucxx"), ("nixl", "nixl_cu12")):
        missing = importlib.util.find_spec(module) is None
        marks = [pytest.mark.long, pytest.mark.skipif(missing, reason=f"no {module}")]
        found.append(pytest.param(name, marks=marks))
    return found


def far_shards(rank: int, **options: Any) -> Shards:
    table = filled(f"gear-far-{os.getppid()}-{rank}", rank, COUNTS)
    try:
        return Shards(table, node=f"node-{rank}", **{"timeout": 30, **options})
    except BaseException:
        table.unlink()
        raise


def dataset(shards: Shards, sampler: gear.samplers.Sampler, **options: Any) -> gear.ReplayDataset:
    options = {"windows": WINDOWS, "seed": 9, "copy": True, "batches_per_epoch": BATCHES} | options
    return gear.ReplayDataset(
        shards, **nested({"batch_size": ROWS // shards.num_slices, "sampler": sampler, **options})
    )


def draw(shards: Shards) -> list[dict[str, Any]]:
    found = []
    for sampler in SAMPLERS:
        data = dataset(shards, sampler)
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            found.append(kept(batch))
            if not isinstance(sampler, gear.Uniform):
                data.update_priority(batch, new_priorities(batch, number))
    for batch in dataset(shards, gear.Uniform(unit="step"), windows=CONVERTED):
        found.append({name: batch[name].numpy().copy() for name in ("index", *CONVERTED)})
    return found


def far_rank(rank: int, world: int, transport: str) -> dict[str, Any]:
    shards = far_shards(rank, transport=transport, timeout=90)  # a busy machine starts a server slowly
    assert shards.remote
    found: dict[str, Any] = {"batches": draw(shards)}
    shards.exchange.barrier()  # none closes while others still read
    if transport == "socket":
        found |= placing(shards, rank)
        found["addresses"] = killed_server(shards, rank)
        found["rows"], began = leaving(shards, rank), time.monotonic()
        shards.close()
        found["closed"] = (began, time.monotonic())
    else:
        shards.close()
    shards.table.unlink()
    return found


def placing(shards: Shards, rank: int) -> dict[str, Any]:
    """Each rank places on its node and on the other."""
    table, barrier, first = shards.table, shards.exchange.barrier, 1000 * (rank + 1)

    def numbers() -> list[int]:
        return sorted(int(table[index]["act"][0]) // 1000 for index in table.indices().tolist())

    placement = Placement(shards)
    where = [placement.add(trajectory(first, 3))[0]]
    where += placement.extend([trajectory(first + i, 2 + i) for i in range(1, 12)], priority=2.0)[0].tolist()
    barrier()
    found = {"where": where, "placed": numbers()[COUNTS[rank] :], "ids": table.ids(table.indices())}
    barrier()
    if rank == 0:  # the other shard has more room, and less priority
        found["space"] = Placement(shards, "free_space").add(trajectory(9000, 3), priority=2.0)[0]
        more = [trajectory(9001 + i, 3) for i in range(9)]
        found["mass"] = Placement(shards, "priority_mass").extend(more, priority=0.1)[0].tolist()
    barrier()
    if rank == 1:
        with pytest.raises(gear.errors.TableFullError) as error:
            placement.extend([trajectory(9500 + i, 1) for i in range(120)])
        found["full"] = str(error.value)
    barrier()
    found["left"] = [number for number in numbers() if number >= 9500]
    barrier()
    return found


def killed_server(shards: Shards, rank: int) -> list[str]:
    """The server of node 1 is killed: its first rank starts another one elsewhere, which the others find."""
    addresses = [shards._servers.address]
    for number, batch in enumerate(dataset(shards, gear.Uniform(), batches_per_epoch=20, prefetch=0)):
        check_batch(batch, WINDOWS)
        if rank == 1 and number == 5:
            os.kill(shards._servers.process.pid, signal.SIGKILL)
    shards.exchange.barrier()
    return [*addresses, shards._servers.address]


def leaving(shards: Shards, rank: int) -> tuple[int, int]:
    """Rank 0 is through first, and leaves; for rank 1, which reads rows of its node, the last batch comes late."""
    data = dataset(shards, gear.Uniform(), batches_per_epoch=4, prefetch=0)
    read = ShardSource.read

    def late(self: Any, *args: Any) -> Any:
        time.sleep(0.2 * rank)
        return read(self, *args)

    ShardSource.read = late  # type: ignore[method-assign]
    rows = sum(len(batch["index"]) for batch in data)
    time.sleep(0.5 * rank)
    return rows, data.num_lost


@pytest.mark.parametrize("transport", carriers())
def test_batches_are_the_same_over_every_carrier_and_a_killed_server_is_replaced(transport: str) -> None:
    ranks = run_ranks(2, far_rank, transport)
    same_rows([rank["batches"] for rank in ranks], draw(alone(COUNTS[:2])), transport)
    if transport == "socket":
        both = [found["placed"] for found in ranks]
        assert [len(each) for each in both] == [12, 12]
        assert sorted((*both[0], *both[1])) == [1000 * rank + i for rank in (1, 2) for i in range(12)]
        assert len(np.unique(np.concatenate([found["ids"] for found in ranks]))) == sum(COUNTS[:2]) + 24
        assert (ranks[0]["space"], ranks[0]["mass"]) == (1, [1] * 9)
        assert "Shard 0, stage 0 (table 'gear-far-" in ranks[1]["full"]
        assert "on node node-0" in ranks[1]["full"]
        for rank, found in enumerate(ranks):
            assert found["where"] == [rank, 1 - rank] * 6
            assert found["left"] == []
            before, after = found["addresses"]
            assert (before == after) is (rank == 0)
            assert found["rows"] == (ROWS // 2 * 4, 0)
            assert found["closed"][1] >= ranks[1]["closed"][0], "the first to leave waits for the others"


def stopped_server_rank(rank: int, world: int) -> tuple[list[list[int]], int]:
    shard_tables._RETRY = 3.0  # seconds until a lost shard is tried again
    with far_shards(rank, transport="socket", timeout=6, on_failure="redraw") as shards:
        data = dataset(shards, gear.Prioritized(), batches_per_epoch=10**6, prefetch=0)
        seen = []
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            seen.append(sorted(set(batch["shard"].tolist())))
            if rank == 1 and number in (2, 8):
                (stop_process if number == 2 else go_on)(shards._servers.process.pid)
            if number >= 8:
                time.sleep(0.1)
                back = shards.exchange.share({"back": seen[-1] == [0, 1]})[0]["back"]
                if back or number > 150:
                    break
        shards.exchange.barrier()
        shards.table.unlink()
        return seen, data.num_lost


@pytest.mark.long
def test_rows_of_a_node_that_is_lost_are_drawn_elsewhere_until_it_is_back() -> None:
    (seen, lost), (own, _) = run_ranks(2, stopped_server_rank)
    assert lost > 0
    assert [0] in seen[2:4]  # the batch whose rows did not come
    assert all(some == [0] for some in seen[4:8] + own[5:8])  # then no rank draws from that shard
    assert seen[-1] == [0, 1]
    assert len(seen) < 150


def failing_rank(rank: int, world: int) -> tuple[int, str]:
    """Rank 1 stops its server after the third batch; how many batches came, and the error."""
    with far_shards(rank, transport="socket", timeout=12) as shards:
        seen, message = 0, ""
        try:
            for batch in dataset(shards, gear.Prioritized(), batches_per_epoch=10**6, prefetch=0):
                check_batch(batch, WINDOWS)
                if rank == 1 and seen == 2:
                    stop_process(shards._servers.process.pid)
                seen += 1
        except gear.errors.GearError as error:
            message = f"{type(error).__name__}: {error}"
        if rank == 1:
            go_on(shards._servers.process.pid)
        shards.table.unlink()
        return seen, message


@pytest.mark.long
def test_a_server_that_is_stopped_is_an_error_that_names_it() -> None:
    (count, message), (_, other) = run_ranks(2, failing_rank)
    assert count in (2, 3)  # rank 0 may still have read the batch at which rank 1 stops its server
    assert message.startswith("PeerTimeoutError: node node-1 (rank 1)")
    assert "rows" in message
    assert other.startswith("RankError: Rank 0")  # which has failed after the exchange of this batch


def cut_off_rank(rank: int, world: int) -> tuple[list[list[int]], int]:
    """From the fourth batch on no server answers."""
    with far_shards(rank, transport="socket", timeout=6, on_failure="redraw") as shards:
        seen, pid = [], shards._servers.process.pid
        data = dataset(shards, gear.Prioritized(), batches_per_epoch=12, prefetch=0)
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            seen.append(sorted(set(batch["shard"].tolist())))
            if number == 2:
                shards.exchange.barrier()
                stop_process(pid)
                shards.exchange.barrier()
        go_on(pid)
        shards.exchange.barrier()
        shards.table.unlink()
        return seen, data.num_lost


@pytest.mark.long
def test_nodes_that_all_cannot_reach_each_other_draw_each_from_its_own_shard() -> None:
    for rank, (seen, lost) in enumerate(run_ranks(2, cut_off_rank)):
        assert [0, 1] in seen[:3]
        assert seen[3:] == [[rank]] * 9
        assert lost > 0


def by_hand_rank(rank: int, world: int, folder: str) -> int:
    from gear_loader.transport.process import start_server

    secret = SECRET.encode()
    table = filled(f"gear-hand-{os.getppid()}-{rank}", rank, COUNTS)
    server = start_server([table.name], secret=secret)
    Path(folder, f"address-{rank}").write_text(server.addresses["socket"])
    torch.distributed.barrier()
    servers = {f"node-{r}": Path(folder, f"address-{r}").read_text() for r in range(world)}
    options: dict[str, Any] = {"transport": "socket", "servers": servers, "secret": secret, "timeout": 20}
    with Shards(table, node=f"node-{rank}", **options) as shards:
        assert shards._servers.process is None
        rows = sum(len(batch["index"]) for batch in dataset(shards, gear.Uniform()))
        shards.exchange.barrier()
    server.stop()
    table.unlink()
    return rows


@pytest.mark.long
def test_servers_that_were_started_by_hand(tmp_path: Path) -> None:
    assert run_ranks(2, by_hand_rank, str(tmp_path)) == [ROWS // 2 * BATCHES] * 2


def test_servers_and_secrets_are_checked() -> None:
    with pytest.raises(gear.errors.SchemaError, match="servers were given without their secret"):
        Shards(filled(None, 0, [1]), servers={"a": "socket://127.0.0.1:1"})
    with pytest.raises(gear.errors.HandshakeError, match="5 bytes was received; expected at least 16 bytes"):
        Shards(filled(None, 0, [1]), secret=b"short")


# ---------------------------------------------------------------- n-step returns

RETURNS: dict[str, Any] = {
    "obs": gear.Window(1, squeeze=True),
    "target": gear.NStep("reward", 5, 0.9, "terminated", next="obs"),
    "more": gear.NStep("half", 2, 0.5, "terminated", next=("flag", "obs")),
    "flag": gear.Window(3, -1),
    "task": None,
}


def rewarded(name: str | None, shard: int) -> gear.Table:
    """Episodes that terminate, or are truncated, with final steps or without."""
    columns = {
        "obs": gear.Column(torch.uint8, (600,), final=True),
        "reward": gear.Column(torch.float32),
        "half": gear.Column(torch.bfloat16, (1,)),
        "terminated": gear.Column(torch.bool),
        "flag": gear.Column(torch.int16, (2,)),
        "task": gear.Column(torch.int64, per="trajectory"),
    }
    table = gear.Table.create(columns, max_steps=400, max_trajectories=40, block_steps=8, name=name)
    random = np.random.default_rng(shard)
    for number in range(30):
        length = int(random.integers(1, 14))
        obs = random.integers(0, 255, (length + 1, 600)).astype(np.uint8)
        steps = {
            "obs": obs[:-1],
            "reward": random.random(length).astype(np.float32),
            "half": torch.from_numpy(random.random((length, 1))).bfloat16(),
            "terminated": np.arange(length) == (length - 1 if number % 2 else -1),
            "flag": random.integers(0, 99, (length, 2)).astype(np.int16),
            "task": np.int64(100 * shard + number),
        }
        table.add(
            steps,
            priority=1e5 if number == 5 else 1.0 + number % 7,
            final={"obs": obs[-1]} if number % 3 else None,
        )
    return table


def flat(batch: Any) -> list[Any]:
    """All values of a batch, in order."""
    parts = [flat(each) if isinstance(each, dict) else [each.clone()] for _, each in sorted(batch.items())]
    return [value for part in parts for value in part]


def returned(shards: Shards, prefetch: int = 2) -> list[Any]:
    data = gear.ReplayDataset(
        shards,
        batch_size=12 // shards.num_slices,
        windows=RETURNS,
        sampler=gear.Prioritized(unit="step"),
        seed=3,
        batches_per_epoch=6,
        device="cpu",
        prefetch=prefetch,
    )
    return [flat(batch) for batch in data]


def returns_rank(rank: int, world: int, transport: str) -> dict[str, Any]:
    table, found = rewarded(f"gear-returns-{os.getppid()}-{rank}", rank), dict[str, Any]()
    real, asked = RemoteShard._ask, [0]

    def ask(shard: Any, peer: Any, spec: Any, given: Any, size: int, *more: Any) -> Any:
        asked[0] += size
        return real(shard, peer, spec, given, size, *more)

    RemoteShard._ask = ask  # type: ignore[method-assign]
    try:
        for cache in (None, "1MiB"):
            with Shards(table, node=f"node-{rank}", transport=transport, timeout=90, cache=cache) as shards:
                assert shards.remote
                asked[0] = 0
                found[f"cache {cache}"] = returned(shards), asked[0]
                if cache:
                    assert shards.cache_stats().num_hits > 0
                else:
                    with (
                        pytest.MonkeyPatch.context() as patch
                    ):  # all steps are sent, and the returns computed here
                        patch.setattr(ShardSource, "computes", False)
                        asked[0] = 0
                        found["windows"] = returned(shards), asked[0]
                shards.exchange.barrier()
    finally:
        table.unlink()
    return found


@pytest.mark.long
@pytest.mark.parametrize("transport", carriers())
def test_owners_of_rows_compute_their_returns(transport: str) -> None:
    """Batches are those of one process; a return takes the observation at its bootstrap step, and not all before."""
    with rewarded(None, 0) as first, rewarded(None, 1) as second:
        expected = returned(Shards([first, second]))
    for rank, found in enumerate(run_ranks(2, returns_rank, transport)):
        for name, (batches, _) in found.items():
            for mine, whole in zip(batches, expected, strict=True):
                for got, value in zip(mine, whole, strict=True):
                    assert torch.equal(got, value[6 * rank : 6 * rank + 6]), name
        few, all_steps = found["cache None"][1], found["windows"][1]
        # Of 600 bytes: 3 observations, before 1 + 6 + 3; padding to 128 bytes a piece comes on top.
        assert few < 0.45 * all_steps if transport != "nixl" else few == all_steps


@pytest.mark.parametrize("cache", [None, "1MiB"])
def test_owners_compute_returns(cache: str | None) -> None:
    with rewarded(None, 0) as first, rewarded(None, 1) as second:
        expected = returned(Shards([first, second]), 0)
        shards = Shards([first, second], cache=cache)
        shards.remote = True
        peer: Any = PlayedPeer(second, set())
        shards._sources[1] = RemoteShard(peer, "played", first.schema)
        for mine, whole in zip(returned(shards, 0), expected, strict=True):
            for got, value in zip(mine, whole, strict=True):
                assert torch.equal(got, value)
        assert cache is None or shards.cache_stats().num_hits > 0
