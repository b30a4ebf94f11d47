"""An all-to-all by way of the ranks of a node: the same bytes as from each to each, and few messages between nodes."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from distributed_common import run_ranks

from gear_loader.distributed import node_routes
from gear_loader.distributed.node_routes import NodeRoutes
from gear_loader.distributed.rank_exchange import Exchange
from gear_loader.errors import RankError

Array = np.ndarray[Any, Any]


def exchanged(nodes: Sequence[str], sizes: Array) -> tuple[list[Array], list[Array], Array]:
    """What ranks, threads here, are to get and what they get; and how many messages of bytes, and empty ones, they sent
    each other, int64 [2, W, W]. They also share what they have for rank 0."""
    world, random = len(nodes), np.random.default_rng(4)
    parts = [[random.integers(255, size=n, dtype=np.uint8) for n in row] for row in sizes]
    sent: dict[tuple[int, int, int], Array] = {}
    counts = np.zeros((2, world, world), dtype=np.int64)
    barrier = threading.Barrier(world, timeout=30)
    found: list[Any] = [None] * world
    counted, shared = list[Array](), list[int]()

    def run(rank: int) -> None:
        routes, calls = NodeRoutes(rank, nodes), iter(range(20))

        def group(members: Array) -> Callable[[Array, Array, Array], Array]:
            def all_to_all(data: Array, outs: Array, ins: Array) -> Array:
                call, ends = next(calls), np.cumsum(outs)
                assert len(data) == ends[-1]
                for member, end, count in zip(members.tolist(), ends, outs, strict=True):
                    sent[call, rank, member] = data[end - count : end].copy()
                    counts[int(count == 0), rank, member] += member != rank
                barrier.wait()
                came = [sent[call, member, rank] for member in members.tolist()]
                assert [len(each) for each in came] == ins.tolist()
                return np.concatenate(came)

            return all_to_all

        mine = np.concatenate(parts[rank])
        near, far = group(routes.near), group(routes.far)
        found[rank] = routes.exchange(mine, sizes[rank].copy(), sizes[:, rank].copy(), near, far)
        if rank == 0:
            counted.append(counts.copy())
        barrier.wait()
        for one, part in zip(routes.gather(parts[rank][0], near, far), parts, strict=True):
            np.testing.assert_array_equal(one, part[0])
        shared.append(rank)

    threads = [threading.Thread(target=run, args=(rank,)) for rank in range(world)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(shared) == list(range(world))
    return [np.concatenate([row[rank] for row in parts]) for rank in range(world)], found, counted[0]


@pytest.mark.parametrize(("num_nodes", "size"), [(2, 2), (3, 2), (5, 2), (2, 4), (7, 3), (3, 1), (1, 3)])
@pytest.mark.parametrize("shuffled", [False, True])
def test_each_rank_gets_what_all_others_sent_it(num_nodes: int, size: int, shuffled: bool) -> None:
    nodes = [f"node {rank // size}" for rank in range(num_nodes * size)]
    random = np.random.default_rng(num_nodes)
    if shuffled:
        random.shuffle(nodes)
    world = len(nodes)
    expected, found, (full, empty) = exchanged(nodes, random.integers(0, 9, (world, world)) + 1)
    for mine, one in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, mine)
    away = np.array(nodes)[:, None] != np.array(nodes)
    assert full[away].sum() == num_nodes * (num_nodes - 1)  # one for each pair of nodes, each way
    assert empty[away].sum() <= num_nodes * (num_nodes - 1)
    assert (full + empty).sum(axis=1).max() <= NodeRoutes(0, nodes).most_messages


def test_ranks_may_have_nothing_for_others() -> None:
    sizes = np.zeros((6, 6), dtype=np.int64)
    sizes[1, 4] = 3
    expected, found, _ = exchanged(list("aabbcc"), sizes)
    for mine, one in zip(expected, found, strict=True):
        np.testing.assert_array_equal(one, mine)


def test_nodes_are_routed_through_where_that_saves_messages() -> None:
    def of(num_nodes: int, size: int) -> NodeRoutes | None:
        return NodeRoutes.of(3, [str(rank // size) for rank in range(num_nodes * size)])

    for num_nodes, size in ((1, 8), (2, 8), (64, 1), (4, 8)):
        assert of(num_nodes, size) is None
    for num_nodes, size, most in ((8, 8, 22), (32, 8, 28), (128, 8, 52)):
        routes = of(num_nodes, size)
        assert routes is not None
        assert routes.most_messages == most
    assert (
        NodeRoutes.of(0, ["a"] * 9 + [str(rank // 8) for rank in range(128)]) is None
    )  # nodes of other sizes


def failing_rank(rank: int, world: int, then: str, folder: str) -> str:
    """Rank 1 ends, or does not call, after an exchange of all."""
    node_routes._FEWER = 0
    exchange = Exchange(range(world), timeout=8, node="ab"[rank // 2])
    assert exchange.routes is not None
    assert [part.tolist() for part in exchange.share_array(np.arange(rank))] == [
        [*range(n)] for n in range(world)
    ]
    sizes = np.full(world, 5, dtype=np.int64)
    data = np.full(5 * world, rank, dtype=np.uint8)
    assert exchange.all_to_all(data, sizes, sizes).tolist() == np.repeat(np.arange(world), 5).tolist()
    if rank == 1 and then == "ends":
        os._exit(1)
    if rank == 1:
        while len(os.listdir(folder)) < world - 1:
            time.sleep(0.05)
        return ""
    with pytest.raises(RankError) as failed:
        exchange.all_to_all(data, sizes, sizes)
    Path(folder, f"failed-{rank}").touch()
    return str(failed.value)


@pytest.mark.long
@pytest.mark.parametrize("then", ["ends", "stays away"])
def test_a_rank_that_fails_is_named_on_all_nodes(then: str, tmp_path: Path) -> None:
    dies = (1,) if then == "ends" else ()
    found = run_ranks(4, failing_rank, then, str(tmp_path), dies=dies)
    for rank in (0, 2, 3):
        assert found[rank].startswith("Rank 1 did not send its part of a batch"), found[rank]
        assert ("process has ended" if then == "ends" else "has not drawn as many batches") in found[rank]
