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
from distributed_common import check_batch, filled, run_ranks
from test_global_selection import COUNTS, WINDOWS, alone, kept, new_priorities

import gear_loader as gear
from gear_loader.distributed import Shards

ROWS, BATCHES = 24, 5
SELECTORS = (gear.Prioritized(), gear.Uniform(unit="step"), gear.TopK())
INSTALLED = {"socket": True, "ucx": "ucxx", "nixl": "nixl_cu12"}


def carriers() -> list[Any]:
    found = []
    for name, module in INSTALLED.items():
        missing = module is not True and not importlib.util.find_spec(module)
        marks = [pytest.mark.skip(f"no {module}")] if missing else []
        found.append(pytest.param(name, marks=marks + [pytest.mark.long] * (name != "socket")))
    return found


def far_shards(rank: int, **options: Any) -> Shards:
    table = filled(f"gear-far-{os.getppid()}-{rank}", rank, COUNTS)
    try:
        return Shards(table, node=f"node-{rank}", **{"timeout": 20, **options})
    except BaseException:
        table.unlink()
        raise


def dataset(shards: Shards, selector: gear.selectors.Selector, **options: Any) -> gear.ReplayDataset:
    options = {"windows": WINDOWS, "seed": 9, "copy": True, "batches_per_epoch": BATCHES} | options
    return gear.ReplayDataset(shards, batch_size=ROWS // shards.num_slices, selector=selector, **options)


def draw(shards: Shards) -> list[dict[str, Any]]:
    found = []
    for selector in SELECTORS:
        data = dataset(shards, selector)
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            found.append(kept(batch))
            if not isinstance(selector, gear.Uniform):
                data.update_priority(batch, new_priorities(batch, number))
    return found


def far_rank(rank: int, world: int, transport: str) -> list[dict[str, Any]]:
    with far_shards(rank, transport=transport) as shards:
        assert shards.remote
        found = draw(shards)
        shards.exchange.barrier()  # nobody closes while others still read
        shards.table.unlink()
        return found


@pytest.mark.parametrize("transport", carriers())
def test_batches_are_the_same_over_every_carrier(transport: str) -> None:
    ranks = run_ranks(2, far_rank, transport)
    for number, expected in enumerate(draw(alone(COUNTS[:2]))):
        for key, values in expected.items():
            together = np.concatenate([rank[number][key] for rank in ranks])
            np.testing.assert_array_equal(together, values, err_msg=f"batch {number}, {key}")


# ---------------------------------------------------------------- faults


def killed_server_rank(rank: int, world: int, parent: int) -> list[Any]:
    """The server of node 1 is killed: its first rank starts another one elsewhere, which the others find."""
    with far_shards(rank, transport="socket", timeout=30) as shards:  # a busy machine starts a server slowly
        data = dataset(shards, gear.Uniform(), batches_per_epoch=20, prefetch=0)
        addresses = []
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            if rank == 1 and number == 5:
                addresses.append(shards._servers.address)
                os.kill(shards._servers.process.pid, signal.SIGKILL)
        if rank == 1:
            addresses.append(shards._servers.address)
        shards.exchange.barrier()
        shards.table.unlink()
        return addresses


def test_a_server_that_was_killed_is_started_again_and_found() -> None:
    answers = run_ranks(2, killed_server_rank, os.getpid())
    assert len(answers[1]) == 2
    assert answers[1][0] != answers[1][1]


def stopped_server_rank(rank: int, world: int, policy: str) -> Any:
    with far_shards(rank, transport="socket", timeout=12, on_failure=policy) as shards:
        data = dataset(shards, gear.Prioritized(), batches_per_epoch=10**6, prefetch=0)
        seen, message, counts = [], "", (0, 0)
        try:
            for number, batch in enumerate(data):
                check_batch(batch, WINDOWS)
                seen.append(sorted(set(batch["shard"].tolist())))
                if rank == 1 and number == 2:
                    os.kill(shards._servers.process.pid, signal.SIGSTOP)
                    stopped = number
                if rank == 1 and number == 8:
                    os.kill(shards._servers.process.pid, signal.SIGCONT)
                if number >= 8:
                    time.sleep(0.1)
                    back = shards.exchange.share({"back": seen[-1] == [0, 1]})[0]["back"]
                    if back or number > 150:
                        break
            counts = (data.num_lost, len(seen))
        except gear.errors.GearError as error:
            message = f"{type(error).__name__}: {error}"
            if rank == 1:
                os.kill(shards._servers.process.pid, signal.SIGCONT)
        if rank == 1:
            assert stopped == 2
        if policy == "redraw":
            shards.exchange.barrier()
        shards.table.unlink()
        return seen, message, counts


@pytest.mark.long
def test_a_server_that_is_stopped_is_an_error_that_names_it() -> None:
    (seen, message, _), (_, other, _) = run_ranks(2, stopped_server_rank, "raise")
    assert len(seen) in (2, 3)  # rank 0 may still have read the batch at which rank 1 stops its server
    assert message.startswith("PeerTimeoutError: node node-1 (rank 1)")
    assert "rows" in message
    # Rank 0 has failed after the exchange, so rank 1 waits for it at the next one, or for its store.
    assert other.startswith("RankError: Rank 0")


def test_rows_of_a_node_that_is_lost_are_drawn_elsewhere_until_it_is_back() -> None:
    (seen, message, (lost, count)), (own, other, _) = run_ranks(2, stopped_server_rank, "redraw")
    assert (message, other) == ("", "")
    assert lost > 0
    assert [0] in seen[2:4]  # the batch whose rows were waited for in vain
    assert all(some == [0] for some in seen[4:8] + own[5:8])  # then nobody draws from that shard
    assert seen[-1] == [0, 1]
    assert count < 150


def cut_off_rank(rank: int, world: int) -> tuple[list[list[int]], int]:
    """From the third batch on no server answers."""
    with far_shards(rank, transport="socket", timeout=6, on_failure="redraw") as shards:
        data = dataset(shards, gear.Prioritized(), batches_per_epoch=12, prefetch=0)
        seen = []
        for number, batch in enumerate(data):
            check_batch(batch, WINDOWS)
            seen.append(sorted(set(batch["shard"].tolist())))
            if number == 2:
                shards.exchange.barrier()
                os.kill(shards._servers.process.pid, signal.SIGSTOP)
                shards.exchange.barrier()
        os.kill(shards._servers.process.pid, signal.SIGCONT)
        shards.exchange.barrier()
        shards.table.unlink()
        return seen, data.num_lost


@pytest.mark.long
def test_nodes_that_all_cannot_reach_each_other_draw_each_from_its_own_shard() -> None:
    for rank, (seen, lost) in enumerate(run_ranks(2, cut_off_rank)):
        assert [0, 1] in seen[:3]
        assert seen[3:] == [[rank]] * 9
        assert lost > 0


# ---------------------------------------------------------------- by hand


def by_hand_rank(rank: int, world: int, folder: str) -> int:
    from gear_loader.transport.process import start_server

    secret = b"a secret of the right length 123"
    table = filled(f"gear-hand-{os.getppid()}-{rank}", rank, COUNTS)
    server = start_server([table.name], secret=secret)
    Path(folder, f"address-{rank}").write_text(server.addresses["socket"])
    torch.distributed.barrier()
    servers = {f"node-{r}": Path(folder, f"address-{r}").read_text() for r in range(world)}
    with Shards(
        table, node=f"node-{rank}", transport="socket", servers=servers, secret=secret, timeout=20
    ) as shards:
        assert shards._servers.process is None
        rows = sum(len(batch["index"]) for batch in dataset(shards, gear.Uniform()))
        shards.exchange.barrier()
    server.stop()
    table.unlink()
    return rows


@pytest.mark.long
def test_servers_that_were_started_by_hand(tmp_path: Path) -> None:
    assert run_ranks(2, by_hand_rank, str(tmp_path)) == [ROWS // 2 * BATCHES] * 2
    with pytest.raises(gear.errors.SchemaError, match="servers were given without their secret"):
        Shards(filled(None, 0, [1]), servers={"a": "socket://127.0.0.1:1"})
    with pytest.raises(gear.errors.HandshakeError, match="5 bytes was received; expected at least 16 bytes"):
        Shards(filled(None, 0, [1]), secret=b"short")
