"""Packed batches over shards: those of one process, bit for bit, wherever the rows lie; budgets and balance."""

from __future__ import annotations

import itertools
import os
import signal
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import SCHEMA, new_priorities, on_two_nodes, run_ranks, trajectory
from hypothesis import given, settings
from hypothesis import strategies as st
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.distributed import Shards
from gear_loader.distributed import remote as remote_module
from gear_loader.distributed.dealing import costs_of
from gear_loader.errors import SchemaError
from gear_loader.transport import nixl_agent

COUNTS = (30, 8, 22)
STEPS = 3000
ONCE = gear.Uniform(replacement=False)
WHOLE = {"obs": gear.Whole(), "act": gear.Whole(), "flag": gear.Whole(dtype=torch.float32), "task": None}
PART = {"act": gear.Window(9, -4), "task": None, "obs": gear.Window(9, -4)}
STEPPED = gear.Prioritized(unit="step", normalize="table")
CASES: dict[str, dict[str, Any]] = {
    "whole": {"windows": WHOLE, "sampler": ONCE},
    "weighted": {"windows": WHOLE, "sampler": gear.Prioritized(), "batches_per_epoch": 8},
    "newest": {"windows": WHOLE, "sampler": gear.Lifo(), "batches_per_epoch": 3},
    "steps": {"windows": PART, "sampler": STEPPED, "batches_per_epoch": 8},
}
BUDGETS: dict[str, dict[str, Any]] = {
    "once": {"sampler": ONCE, "lookahead": 4, "max_steps": 150},
    "short": {"sampler": ONCE, "max_steps": 40, "too_long": "truncate"},
    "skipped": {"sampler": gear.Fifo(replacement=False), "max_steps": 100, "too_long": "skip"},
    "weighted": {"sampler": gear.Prioritized(normalize="table"), "max_steps": 120, "batches_per_epoch": 6},
}
MICRO = 2
NO_NIXL = pytest.mark.skipif(nixl_agent.installed() is None, reason="NIXL is not installed")
TRANSPORTS = ["socket", pytest.param("nixl", marks=[NO_NIXL, pytest.mark.long])]
Kept = dict[str, Any]


def make(name: str | None, shard: int, **options: Any) -> gear.Table:
    options = {"max_steps": STEPS, "max_trajectories": 100, "block_steps": 8} | options
    table = gear.Table.create(SCHEMA, **nested_table({"name": name, **options}))
    for i in range(COUNTS[shard]):
        number = 100 * shard + i
        table.add(trajectory(number, number * 37 % 90 + 1), priority=number % 5 + 0.5)
    return table


def check(batch: Kept, offset: int | None = None, length: int = 0) -> Kept:
    """Check the contents of a batch; return a copy of it."""
    starts = batch["cu_seqlens"].tolist()
    assert batch["max_seqlen"] == max(np.diff(starts))
    for b, (begin, end) in enumerate(itertools.pairwise(starts)):
        number, part = int(batch["task"][b, 0]), slice(begin, end)
        steps, low = batch["position"][part], 0
        if offset is not None:
            low = max(int(batch["anchor"][b]) + offset, 0)
            assert end - begin <= length
        assert steps.tolist() == list(range(low, low + end - begin))
        expected = trajectory(number, low + end - begin)
        assert batch["act"][part].tolist() == expected["act"][low:].tolist()
        np.testing.assert_array_equal(batch["obs"][part], expected["obs"][low:])
        if "flag" in batch:
            np.testing.assert_array_equal(batch["flag"][part], expected["flag"][low:].astype(np.float32))
    return {name: value if isinstance(value, int) else value.numpy().copy() for name, value in batch.items()}


def dataset(shards: Shards, **options: Any) -> gear.ReplayDataset:
    given = {"windows": WHOLE, "layout": "packed", "device": "cpu", "seed": 7}
    return gear.ReplayDataset(shards, **nested({**given, **options}))


def draw(shards: Shards, name: str, world: int, **more: Any) -> list[Kept]:
    data = dataset(shards, batch_size=12 // world, **CASES[name], **more)
    found = []
    for number, batch in enumerate(data):
        found.append(check(batch, *(() if name != "steps" else (-4, 9))))
        if isinstance(data.sampler, gear.Prioritized):
            data.update_priority(batch, new_priorities(batch, number))
    return found


def planned(shards: Shards, name: str, world: int, **more: Any) -> list[Kept]:
    options = {**BUDGETS[name], "micro_batches": MICRO * 3 // world, **more}
    if "batches_per_epoch" in options:
        options["batches_per_epoch"] = 3 * options["batches_per_epoch"] // world
    return [check(batch) for batch in dataset(shards, **options)]


def rank_of(
    rank: int, world: int, work: Callable[[Shards, int, int], Any], transport: str = "socket", **options: Any
) -> Any:
    table = make(f"gear-packed-{os.getppid()}-{rank}", rank, **options)
    return on_two_nodes(table, rank, world, work, transport)


def alone() -> Shards:
    return Shards([make(None, shard) for shard in range(3)])


# ---------------------------------------------------------------- the same as in one process


def draw_all(shards: Shards, rank: int, world: int) -> dict[str, Any]:
    remote_module.PART_BYTES = 700  # rows in several parts, and cut
    found: dict[str, Any] = {name: draw(shards, name, world) for name in CASES}
    found["balanced"] = draw(shards, "whole", world, balance="steps", drop_last=True)
    found["squares"] = draw(shards, "weighted", world, balance="squares")
    found["budgets"] = {name: planned(shards, name, world) for name in BUDGETS}
    found["ahead"] = {name: planned(shards, name, world, prefetch=0) for name in BUDGETS}
    found["local"] = sum(len(b["index"]) for b in dataset(shards, scope="local", batch_size=4, sampler=ONCE))
    local = dataset(shards, scope="local", max_steps=100, batches_per_epoch=5)
    found["local budget"] = [int(check(batch)["cu_seqlens"][-1]) for batch in local]
    with pytest.raises(SchemaError, match="scope='local'; expected batches_per_epoch"):
        next(iter(dataset(shards, scope="local", max_steps=100)))
    with pytest.raises(SchemaError, match=r"The trajectory of index \d+ in shard \d has \d+ steps, more"):
        list(dataset(shards, max_steps=60, sampler=ONCE))
    found["moved"] = {name: moved(shards, name) for name in BUDGETS} if world > 1 else {}
    found["resumed"] = [resumed(shards, name, stop) for name in BUDGETS for stop in (1, 2, 5)]
    if world > 1:
        found["killed"] = killed_server(shards, rank)
    return found


def resumed(shards: Shards, name: str, stop: int) -> bool:
    """Whether an epoch that stops after some batches goes on as it would have, in another dataset."""
    options = {**BUDGETS[name], "micro_batches": MICRO}
    data = dataset(shards, **options)
    iterator = iter(data)
    for _ in range(stop):
        next(iterator)
    state = data.state_dict()
    expected = [check(batch) for batch in iterator]
    again = dataset(shards, **options)
    again.load_state_dict(state)
    return same(expected, [check(batch) for batch in again])


def moved(shards: Shards, name: str) -> tuple[list[dict[str, Any]], list[Kept]]:
    """The states in the middle of a step and after it, and the batches that follow."""
    data = dataset(shards, **BUDGETS[name], micro_batches=MICRO)
    states, iterator = [], iter(data)
    for _ in range(MICRO):
        next(iterator)
        states.append(data.state_dict())
    return states, [check(batch) for batch in iterator]


def same(one: list[Kept], other: list[Kept]) -> bool:
    return len(one) == len(other) and all(
        a.keys() == b.keys() and all(np.array_equal(a[name], b[name]) for name in a)
        for a, b in zip(one, other, strict=True)
    )


def killed_server(shards: Shards, rank: int) -> int:
    """The server of the third rank's node is killed in the middle of an epoch, and replaced."""
    rows = 0
    for number, batch in enumerate(dataset(shards, batch_size=6, batches_per_epoch=12, prefetch=0)):
        rows += len(check(batch)["index"])
        if rank == 2 and number == 4:
            os.kill(shards._servers.process.pid, signal.SIGKILL)
    return rows


def rows_of(batch: Kept) -> list[dict[str, bytes]]:
    """The rows of a batch one by one, as bytes."""
    found = []
    for b, (begin, end) in enumerate(itertools.pairwise(batch["cu_seqlens"].tolist())):
        names = [name for name in batch if name not in ("cu_seqlens", "max_seqlen")]
        steps = batch["cu_seqlens"][-1]
        found.append(
            {
                name: batch[name][begin:end].tobytes()
                if name in ("obs", "act", "flag", "position")
                else batch[name][b].tobytes()
                for name in names
            }
        )
        assert len(batch["act"]) == steps
    return found


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_ranks_get_the_batches_of_one_process(transport: str) -> None:
    ranks = run_ranks(3, rank_of, draw_all, transport)
    with alone() as shards:
        whole = draw_all(shards, 0, 1)
    for name in CASES:
        for number, expected in enumerate(whole[name]):
            parts = [row for found in ranks for row in rows_of(found[name][number])]
            assert parts == rows_of(expected), (name, number)
        assert {len(found[name]) for found in ranks} == {len(whole[name])}
    order = repr
    for name, kind in (("balanced", "whole"), ("squares", "weighted")):
        # Of every batch the same rows, dealt: as many to each rank, of about as many steps.
        for number, expected in enumerate(whole[name]):
            parts = [rows_of(found[name][number]) for found in ranks]
            assert [len(part) for part in parts] == [4, 4, 4]
            assert sorted(itertools.chain(*parts), key=order) == sorted(rows_of(expected), key=order)
        if kind == "whole":
            spread = [spreads([found[part][:4] for found in ranks]) for part in (name, kind)]
            assert spread[0] < spread[1] / 2
    for name in BUDGETS:
        # The micro-batches of one process, each of a rank; as many on all of them.
        counts = {len(found["budgets"][name]) for found in ranks}
        assert len(counts) == 1
        parts = [rows_of(batch) for found in ranks for batch in found["budgets"][name]]
        expected = [rows_of(batch) for batch in whole["budgets"][name]]
        rows = list(itertools.chain(*parts))
        for row in itertools.chain(*expected):
            rows.remove(row)  # and raises, if it is missing
        assert len(rows) < 3, name  # of single rows, with which all have as many batches
        step, full = 3 * MICRO, len(expected) // (3 * MICRO) * 3 * MICRO
        for first in range(0, full, step):
            each = [found["budgets"][name][first // 3 : first // 3 + MICRO] for found in ranks]
            mine = sorted((rows_of(batch) for part in each for batch in part), key=order)
            assert mine == sorted(expected[first : first + step], key=order), name
        for found in ranks:
            assert same(found["budgets"][name], found["ahead"][name])
            assert all(
                batch["cu_seqlens"][-1] <= BUDGETS[name]["max_steps"] for batch in found["budgets"][name]
            )
    numbers = {int(n) for found in ranks for b in found["budgets"]["once"] for n in b["task"][:, 0]}
    assert numbers == {100 * shard + i for shard in range(3) for i in range(COUNTS[shard])}
    for found in (*ranks, whole):
        assert all(found["resumed"])
        assert all(0 < steps <= 100 for steps in found["local budget"])
    goes_on_alone(ranks)
    assert [found["local"] for found in ranks] == [30, 32, 30]  # ranks of small shards begin anew
    assert [found["killed"] for found in ranks] == [72, 72, 72]


def goes_on_alone(ranks: list[dict[str, Any]]) -> None:
    """One process goes on with the states of three ranks."""
    for name, options in BUDGETS.items():
        (middle, after), _ = ranks[0]["moved"][name]
        if "batches_per_epoch" in options:
            options = {**options, "batches_per_epoch": 3 * options["batches_per_epoch"]}
        one = dataset(alone(), **options, micro_batches=3 * MICRO)
        with pytest.raises(
            SchemaError, match=r"after 1 batches of each rank, with other options .*'ranks': \(3, 1\)"
        ):
            one.load_state_dict(middle)
        one.load_state_dict(after)
        parts = [batch for found in ranks for batch in found["moved"][name][1]]
        rows = [row for batch in parts for row in rows_of(batch)]
        most = len(parts) if "batches_per_epoch" in options else None
        for batch in itertools.islice(one, most):
            for row in rows_of(check(batch)):
                rows.remove(row)  # and raises, if it is missing
        assert len(rows) < 3, name  # as above


def spreads(ranks: list[list[Kept]]) -> float:
    """Mean difference of the ranks' steps of a batch, as a share of their mean."""
    steps = np.array([[batch["cu_seqlens"][-1] for batch in part] for part in ranks], dtype=np.float64)
    return float(((steps.max(0) - steps.min(0)) / steps.mean(0)).mean())


# ---------------------------------------------------------------- beside writers and evictions


def churned(shards: Shards, rank: int, world: int) -> dict[str, Any]:
    """Each rank's table is replaced again and again, while all draw from all."""
    stop = threading.Event()

    def write() -> None:
        number = 100_000 * (rank + 1)
        while not stop.is_set():
            shards.table.add(trajectory(number % 7000, number * 37 % 90 + 1))
            number += 1
            time.sleep(0.002)

    writer = threading.Thread(target=write)
    writer.start()
    try:
        data = dataset(shards, max_steps=300, lookahead=4, micro_batches=2, batches_per_epoch=60)
        batches = [len(check(batch)["index"]) for batch in data]
        sized = dataset(shards, batch_size=5, batches_per_epoch=60)
        rows = [len(check(batch)["index"]) for batch in sized]
        shards.exchange.barrier()
    finally:
        stop.set()
        writer.join()
    return {"batches": batches, "rows": rows, "gone": data.stats()["gone"] + sized.num_gone}


def evicting(rank: int, world: int, transport: str) -> Any:
    return rank_of(rank, world, churned, transport, max_steps=900, on_full="evict_oldest")


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_are_whole_beside_writers_that_evict(transport: str) -> None:
    ranks = run_ranks(3, evicting, transport)
    for found in ranks:
        assert len(found["batches"]) == 60
        assert min(found["batches"]) > 0
        assert found["rows"] == [5] * 60
    assert sum(found["gone"] for found in ranks) > 0


# ---------------------------------------------------------------- a node that does not come back


def lost_rank(rank: int, world: int, transport: str, folder: str) -> tuple[list[list[int]], int, int]:
    """The server of rank 1 is killed, and not started again: shards of each batch, lost rows, rows left out."""
    came = Path(folder) / "came"  # rank 0 has had rows of rank 1
    table = make(f"gear-packed-{os.getppid()}-{rank}", rank)
    options: dict[str, Any] = {"timeout": 12, "on_failure": "redraw", "node": f"node-{rank}"}
    try:
        with Shards(table, transport=transport, **options) as shards:  # type: ignore[arg-type]
            servers, seen = shards._servers, []
            options = {"max_steps": 200, "lookahead": 4, "batches_per_epoch": 20, "prefetch": 0}
            data = dataset(shards, **options)
            for number, batch in enumerate(data):
                check(batch)
                seen.append(sorted(set(batch["shard"].tolist())))
                if rank == 0 and 1 in seen[-1]:
                    came.touch()
                if rank == 1 and number == 2:
                    end = time.monotonic() + 60
                    while not came.exists() and time.monotonic() < end:
                        time.sleep(0.01)
                    servers._start = lambda _: 1 / 0
                    os.kill(servers.process.pid, signal.SIGKILL)
            shards.exchange.barrier()
            return seen, data.num_lost, data.stats()["gone"]
    finally:
        table.unlink()


@pytest.mark.long
@pytest.mark.parametrize("transport", TRANSPORTS)
def test_rows_of_a_node_that_is_lost_are_left_out(transport: str, tmp_path: Path) -> None:
    (seen, lost, gone), (own, other, _) = run_ranks(2, lost_rank, transport, str(tmp_path))
    assert [len(seen), len(own)] == [20, 20]
    assert any(1 in shards for shards in seen)
    assert seen[-5:] == [[0]] * 5
    assert 0 < lost <= gone
    assert other == 0  # node 0 answers all the time


# ---------------------------------------------------------------- one process


@settings(deadline=None)
@given(
    lengths=st.lists(st.lists(st.integers(1, 40), max_size=25), min_size=1, max_size=4).filter(any),
    more=st.integers(0, 80),
    lookahead=st.integers(0, 6),
    micro=st.integers(1, 4),
    stop=st.integers(0, 6),
    prefetch=st.integers(0, 2),
)
def test_every_trajectory_once_in_one_process(
    lengths: list[list[int]], more: int, lookahead: int, micro: int, stop: int, prefetch: int
) -> None:
    schema = {"token": gear.Column(torch.int32), "number": gear.Column(torch.int64, per="trajectory")}
    tables = [gear.Table.create(schema, max_steps=1100, max_trajectories=30, block_steps=4) for _ in lengths]
    expected = []
    for shard, (table, part) in enumerate(zip(tables, lengths, strict=True)):
        for length in part:
            number = len(expected)
            table.add({"token": np.arange(length, dtype=np.int32), "number": np.int64(number)})
            expected.append((shard, length))
    most = max(length for _, length in expected) + more
    with Shards(tables) as shards:
        options: dict[str, Any] = {
            "windows": gear.Whole(), "sampler": ONCE, "max_steps": most, "lookahead": lookahead,
            "micro_batches": micro, "prefetch": prefetch,
        }  # fmt: skip
        data, found = dataset(shards, **options), []
        states = []
        for batch in data:
            states.append(data.state_dict())
            starts = batch["cu_seqlens"].tolist()
            assert starts[-1] <= most
            for b, (begin, end) in enumerate(itertools.pairwise(starts)):
                number = int(batch["number"][b])
                assert (int(batch["shard"][b]), end - begin) == expected[number]
                assert batch["token"][begin:end].tolist() == list(range(end - begin))
            found.append(batch["number"].tolist())
        assert sorted(itertools.chain(*found)) == list(range(len(expected)))
        if stop < len(found):
            again = dataset(shards, **options)
            again.load_state_dict(states[stop])
            assert [batch["number"].tolist() for batch in again] == found[stop + 1 :]


@pytest.mark.parametrize("kind", ["steps", "squares"])
def test_ranks_are_equal_to_three_percent(kind: Any) -> None:
    """Micro-batches of log-normal lengths, dealt to 4 ranks."""
    rng = np.random.default_rng(3)
    schema = {"token": gear.Column(torch.int8)}
    lengths = np.clip(rng.lognormal(np.log(600), 0.8, 1500), 100, 8000).astype(int)
    tables = [
        gear.Table.create(
            schema, max_steps=2_000_000, max_trajectories=1000, memory=gear.Memory(packed=False)
        )
        for _ in range(2)
    ]
    for i, length in enumerate(lengths.tolist()):
        tables[i % 2].add({"token": np.zeros(length, dtype=np.int8)})
    ranks, micro = 4, 12
    with Shards(tables) as shards:
        data = dataset(
            shards, windows=gear.Whole(), sampler=ONCE, max_steps=16_384, lookahead=16,
            micro_batches=ranks * micro, balance=kind,
        )  # fmt: skip
        costs = [costs_of(np.diff(batch["cu_seqlens"].numpy()), kind).sum() for batch in data]
        assert data.batch_fill is not None
        assert data.batch_fill > 0.9
    step = np.array(costs[: ranks * micro])
    sums = step[gear.balance(step, ranks)].sum(1)
    assert sums.max() <= 1.03 * sums.min()


def test_what_is_refused() -> None:
    with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=4) as table, Shards([table]) as shards:
        for source, options, message in (
            (table, {"batch_size": 2, "balance": "steps"}, "expected balance and micro_batches with Shards"),
            (shards, {"batch_size": 2, "balance": "tokens"}, "balance is 'tokens'"),
            (
                shards,
                {"batch_size": 2, "micro_batches": 2},
                "with a batch_size in rows; expected batch_size=Steps",
            ),
            (shards, {"max_steps": 20, "micro_batches": 0}, "micro_batches"),
            (shards, {"max_steps": 20, "micro_batches": 2, "scope": "local"}, "scope='global'"),
        ):
            with pytest.raises(SchemaError, match=message):
                dataset(source, **options)  # type: ignore[arg-type]


# ---------------------------------------------------------------- disks of other nodes


def tiered_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    """Half of the trajectories of each node lie on its disk only."""
    path = f"{folder}/{rank}"

    def work(shards: Shards, rank: int, world: int) -> dict[str, Any]:
        remote_module.PART_BYTES = 700
        table = shards.table
        table.save(path)
        slots = table.indices()[::2]
        assert table._engine.index.spill(slots, table._engine.index.arrays.generation[slots].copy()) == len(
            slots
        )
        shards.exchange.barrier()
        found: dict[str, Any] = {name: draw(shards, name, world) for name in CASES}
        found["budget"] = planned(shards, "once", world)
        shards.exchange.barrier()
        assert table._engine.num_spilled == len(slots)
        return found

    disk = gear.Disk(path, sync_seconds=1e6, size="1GiB", keep="newest")
    return rank_of(rank, world, work, max_blocks=600, disk=disk)


@pytest.mark.long
def test_servers_read_their_disks(tmp_path: Path) -> None:
    ranks = run_ranks(3, tiered_rank, str(tmp_path))
    with alone() as shards:
        for name in CASES:
            for number, expected in enumerate(draw(shards, name, 1)):
                parts = [row for found in ranks for row in rows_of(found[name][number])]
                assert parts == rows_of(expected), (name, number)
        whole = planned(shards, "once", 1)
    drawn = {int(n) for found in ranks for batch in found["budget"] for n in batch["task"][:, 0]}
    assert drawn == {int(n) for batch in whole for n in batch["task"][:, 0]}
