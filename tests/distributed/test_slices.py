"""Which rank trains on which rows: slices that follow one another, and those that prefer rows of their own node."""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from distributed_common import check_batch, filled, new_priorities, on_two_nodes, run_ranks, trajectory
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested
from test_global_selection import COUNTS, SAMPLERS, WINDOWS, alone
from torch.distributed.device_mesh import init_device_mesh

import gear_loader as gear
from gear_loader.distributed import Placement, Shards, node_routes
from gear_loader.distributed.slices import by_node, contiguous
from gear_loader.errors import SchemaError
from gear_loader.native.exchange_loops import find_above

DRAWN = ("uniform pass", "fifo pass", "prioritized", "prioritized distinct", "top")
BATCHES, ROWS = 6, 32


@given(st.lists(st.integers(0, 4), max_size=60), st.lists(st.integers(0, 4), min_size=1, max_size=12))
def test_rows_go_to_their_own_node_as_far_as_slices_have_room(nodes: list[int], slices: list[int]) -> None:
    rows, places = np.array(nodes, dtype=np.int64), np.array(slices, dtype=np.int64)
    found, expected = by_node(rows, places), contiguous(len(rows), len(places))
    parts = [found.of(number) for number in range(len(places))]
    assert [len(part) for part in parts] == expected.sizes.tolist()
    assert all((np.diff(part) > 0).all() for part in parts)
    if len(rows) < len(places):
        return
    assert sorted(np.concatenate(parts).tolist()) == list(range(len(rows)))
    for node in range(5):
        inside = [row for part, place in zip(parts, places, strict=True) if place == node for row in part]
        assert (rows[inside] == node).sum() == min(len(inside), (rows == node).sum())
    assert np.array_equal(found.number[np.argsort(found.rows)], owners(parts, len(rows)))


def owners(parts: list[Any], count: int) -> Any:
    found = np.empty(count, dtype=np.int64)
    for number, part in enumerate(parts):
        found[part] = number
    return found


@given(
    st.lists(st.sampled_from([0.0, 1e-300, 0.1, 1.0, 3.0, 1e300]), min_size=1, max_size=40),
    st.lists(st.floats(0, 1, exclude_max=True), max_size=40),
)
def test_shards_are_found_as_by_a_search(masses: list[float], shares: list[float]) -> None:
    ends = np.cumsum([*masses, 1.0])
    values = np.concatenate((np.array(shares) * ends[-1], ends[ends < ends[-1]]))
    found = np.empty(len(values), dtype=np.int64)
    last = len(ends) - 1
    find_above(ends, values, last, np.empty(4 * len(ends), dtype=np.int64), found)
    assert np.array_equal(found, np.minimum(np.searchsorted(ends, values, side="right"), last))


def dataset(shards: Shards, sampler: str, rows: int, *, local: bool, **options: Any) -> gear.ReplayDataset:
    given = {"windows": WINDOWS, "batches_per_epoch": BATCHES, "seed": 5, "copy": True, "prefetch": 0}
    given |= {"batch_size": rows, "sampler": SAMPLERS[sampler], "ranks": gear.Ranks(prefer_local=local)}
    return gear.ReplayDataset(shards, **nested({**given, **options}))


def drawn(batches: Any, data: gear.ReplayDataset, first: int = 0) -> list[dict[str, Any]]:
    found = []
    for number, batch in enumerate(batches, first):
        check_batch(batch, WINDOWS)
        names = ("index", "anchor", "shard", "act", "priority_weight")
        found.append({name: batch[name].numpy().copy() for name in names if name in batch})
        if data.sampler.by_priority:
            data.update_priority(batch, new_priorities(batch, number))
    return found


def local_rank(rank: int, world: int) -> dict[str, Any]:
    table = filled(f"gear-test-{os.getppid()}-{rank}", rank, COUNTS)

    def work(shards: Shards, rank: int, world: int) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name in DRAWN:
            data = dataset(shards, name, ROWS // world, local=True)
            found[name] = drawn(data, data)
        # A state is resumed by the batches that followed it, on each rank.
        options: dict[str, Any] = {"prefetch": 2, "batches_per_epoch": 2 * BATCHES}
        data = dataset(shards, "prioritized", ROWS // world, local=True, **options)
        iterator = iter(data)
        found["first"] = drawn((next(iterator) for _ in range(BATCHES)), data)
        state = data.state_dict()
        after = drawn(iterator, data, BATCHES)
        again = dataset(shards, "prioritized", ROWS // world, local=True, **options)
        again.load_state_dict(state)
        found["resumed"] = after, drawn(iter(again), again, BATCHES)
        # With one message a pair of nodes, which so few ranks would not use.
        node_routes._FEWER = 0
        data = dataset(shards, "prioritized", ROWS // world, local=True, **options)
        assert data._origin._exchange.routes is not None
        iterator = iter(data)
        before = drawn((next(iterator) for _ in range(BATCHES)), data)
        again = dataset(shards, "prioritized", ROWS // world, local=True, **options)
        again.load_state_dict(data.state_dict(full=False))
        found["through nodes"] = before, drawn(iterator, data, BATCHES), drawn(iter(again), again, BATCHES)
        return found

    return on_two_nodes(table, rank, world, work)


def in_order(batch: dict[str, Any]) -> dict[str, Any]:
    order = np.lexsort((batch["anchor"], batch["index"], batch["shard"]))
    return {name: values[order] for name, values in batch.items()}


@pytest.mark.parametrize("name", DRAWN)
def test_nodes_get_their_own_rows_of_the_batch_of_one_process(ranks: list[dict[str, Any]], name: str) -> None:
    whole = dataset(alone(COUNTS), name, ROWS, local=False)
    near = far = 0
    for number, expected in enumerate(drawn(whole, whole)):
        parts = [rank[name][number] for rank in ranks]
        sizes = [len(part["index"]) for part in parts]
        assert sizes == contiguous(len(expected["index"]), 4).sizes.tolist()
        together = {key: np.concatenate([part[key] for part in parts]) for key in expected}
        for key, values in in_order(expected).items():
            np.testing.assert_array_equal(in_order(together)[key], values, err_msg=f"batch {number}, {key}")
        for node in (0, 1):
            here = sum((part["shard"] // 2 == node).sum() for part in parts[2 * node : 2 * node + 2])
            room = sum(sizes[2 * node : 2 * node + 2])
            assert here == min(room, (expected["shard"] // 2 == node).sum())
            near, far = near + here, far + room - here
    assert near > far


def test_ranks_resume_with_the_rows_of_their_own_node(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        after, again = rank["resumed"]
        assert len(after) == len(again) == BATCHES
        for one, other in zip(after, again, strict=True):
            for key in one:
                np.testing.assert_array_equal(other[key], one[key], err_msg=key)


def test_a_message_for_each_pair_of_nodes_makes_the_same_batches(ranks: list[dict[str, Any]]) -> None:
    for rank in ranks:
        before, after, again = rank["through nodes"]
        for one, other in zip(
            [*rank["first"], *rank["resumed"][0], *after], [*before, *after, *again], strict=True
        ):
            assert one.keys() == other.keys()
            for key in one:
                np.testing.assert_array_equal(other[key], one[key], err_msg=key)


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(4, local_rank)


def staged_rank(rank: int, world: int) -> list[Any]:
    node_routes._FEWER = 0  # all calls of the ranks go by way of nodes
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("data", "pipeline"))
    data_place, stage = divmod(rank, 2)
    table = gear.Table.create(
        {"act": gear.Column(torch.int64)},
        name=f"gear-test-{os.getppid()}-{rank}",
        max_steps=4000,
        max_trajectories=90,
    )
    options: dict[str, Any] = {
        "mesh": mesh,
        "transport": "socket",
        "timeout": 30,
        "node": f"node-{data_place}",
    }
    try:
        with Shards(table, **options) as shards:
            placement = Placement(shards, "local", stages={"act": [0, 1]})
            for turn in range(world):
                if rank == turn and stage == 0:
                    for number in range(100 * rank, 100 * rank + 6 + 20 * data_place):
                        placement.add({"act": trajectory(number, 9)["act"]}, 1.0)
                dist.barrier()
            data = gear.ReplayDataset(
                shards,
                batch_size=12,
                windows=gear.Window(3),
                prefetch=0,
                sampler=gear.Prioritized(),
                ranks=gear.Ranks(prefer_local=True),
            )
            found = []
            for _ in range(4):
                batch = data.sample()
                found.append({name: batch[name].clone() for name in ("act", "shard", "index", "anchor")})
            dist.barrier()
            return found
    finally:
        table.unlink()


def test_all_stages_of_a_pipeline_get_the_same_rows() -> None:
    ranks = run_ranks(4, staged_rank)
    for first, second in (ranks[:2], ranks[2:]):
        for one, other in zip(first, second, strict=True):
            for key in one:
                assert one[key].tolist() == other[key].tolist()
    shards = [np.concatenate([batch["shard"].numpy() for batch in ranks[place]]) for place in (0, 2)]
    assert (shards[1] == 1).all()  # most of a batch lies there, and so all of that slice
    assert (shards[0] == 1).any()


def test_options_that_distribute_rows_by_work_are_refused_beside_it() -> None:
    refused: list[Callable[[], Any]] = [
        lambda: gear.Ranks(prefer_local=1),  # type: ignore[arg-type]
        lambda: dataset(alone([3]), "uniform", 4, local=True, ranks=gear.Ranks("local", prefer_local=True)),
        lambda: gear.ReplayDataset(
            alone([3]),
            batch_size=gear.Steps(8),
            windows=WINDOWS,
            layout="packed",
            ranks=gear.Ranks(prefer_local=True),
        ),
    ]
    for act in refused:
        with pytest.raises(SchemaError, match="prefer_local"):
            act()
