"""Neighbour sampling against its definition: every sampler, every draw, and how often subsets occur."""

from __future__ import annotations

import concurrent.futures
import itertools
from typing import Any

import numpy as np
import pytest
import torch
from graph_common import drawn, neighbours, random_graph, sampled

from gear_loader.errors import RegionError, SchemaError, UnknownNodeError
from gear_loader.graph import DeviceSampler, Graph, NeighborSampler, Subgraph, csr
from gear_loader.graph.sampler import key_of


def twin(graph: Graph, fanouts: list[int], seed: int) -> DeviceSampler:
    return DeviceSampler(graph, fanouts, seed=seed, device="cpu")


def alone(graph: Graph, fanouts: list[int], seed: int) -> NeighborSampler:
    return NeighborSampler(graph, fanouts, seed=seed)


def together(graph: Graph, fanouts: list[int], seed: int) -> NeighborSampler:
    return NeighborSampler(graph, fanouts, seed=seed, threads=3)


ALL = pytest.mark.parametrize("make", [alone, together, twin])


@ALL
@pytest.mark.parametrize("fanouts", [[3], [4, 2], [1, 2, 3], [40, 40]])
def test_equals_the_definition(make: Any, fanouts: list[int]) -> None:
    random = np.random.default_rng(1)
    for case, (nodes, edges) in enumerate([(1, 0), (1, 5), (30, 60), (200, 2000)]):
        graph = random_graph(nodes, edges, case, skew=case / 2)
        sampler = make(graph, fanouts, case)
        for step in (0, 1, 2**40 + 3, -1):
            seeds = random.permutation(nodes)[: random.integers(1, 9)]
            found = sampler.sample(seeds, step=step)
            expected, expected_edges = sampled(graph, seeds.tolist(), fanouts, case, step)
            assert found.n_id.tolist() == expected
            assert np.array_equal(found.edge_index.numpy(), expected_edges)
            assert found.batch_size == len(seeds) == found.num_sampled_nodes[0]
            assert sum(found.num_sampled_nodes) == len(expected)
            assert sum(found.num_sampled_edges) == expected_edges.shape[1]
            assert len(found.num_sampled_nodes) == len(fanouts) + 1 == len(found.num_sampled_edges) + 1


def test_all_neighbours() -> None:
    graph = random_graph(50, 400, 3)
    found = [make(graph, [-1, -1], 0).sample([7, 3], step=5) for make in (alone, together)]
    expected, edges = sampled(graph, [7, 3], [-1, -1], 0, 5)
    for each in found:
        assert each.n_id.tolist() == expected
        assert np.array_equal(each.edge_index.numpy(), edges)


def test_large_hops_are_shared_by_threads() -> None:
    graph = random_graph(5000, 60_000, 5, skew=0.5)
    seeds = np.random.default_rng(0).permutation(5000)[:2000]
    one, three = (make(graph, [10, 5], 9).sample(seeds, step=4) for make in (alone, together))
    assert torch.equal(one.n_id, three.n_id)
    assert torch.equal(one.edge_index, three.edge_index)
    assert one.num_sampled_nodes == three.num_sampled_nodes


def test_threads_may_share_a_sampler() -> None:
    graph = random_graph(3000, 40_000, 6)
    sampler = NeighborSampler(graph, [6, 4], seed=2)

    def work(number: int) -> Subgraph:
        return sampler.sample(np.arange(number, number + 40), step=number)

    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(work, range(60)))
    for number, each in enumerate(found):
        again = work(number)
        assert torch.equal(each.n_id, again.n_id)
        assert torch.equal(each.edge_index, again.edge_index)


def test_each_subset_is_equally_likely() -> None:
    """20 subsets of 3 out of 6, drawn 20,000 times: chi-square of 19 degrees stays below its 99.99th percentile, 54."""
    graph = Graph.from_edge_index(np.array([range(1, 7), [0] * 6]), num_nodes=7)
    sampler = NeighborSampler(graph, [3], seed=11)
    counts = dict.fromkeys(itertools.combinations(range(1, 7), 3), 0)
    for step in range(20_000):
        counts[tuple(sorted(sampler.sample([0], step=step).n_id[1:].tolist()))] += 1
    observed = np.array(list(counts.values()))
    assert len(observed) == 20
    assert ((observed - 1000.0) ** 2 / 1000).sum() < 54


def test_with_equal_fanouts_other_seeds_change_nothing() -> None:
    graph = random_graph(300, 4000, 8)
    sampler = NeighborSampler(graph, [5, 5], seed=1)

    def received(found: Subgraph, seed: int) -> dict[int, list[int]]:
        """The neighbours of the seed, and those of each of these."""
        ids, (sources, targets) = found.n_id.tolist(), found.edge_index.tolist()
        of: dict[int, list[int]] = {}
        for source, target in zip(sources, targets, strict=True):
            of.setdefault(ids[target], []).append(ids[source])
        return {node: of.get(node, []) for node in [seed, *of.get(seed, [])]}

    single = received(sampler.sample([17]), 17)
    assert single == received(sampler.sample([*range(20), 250]), 17)
    assert single[17] == drawn(graph, 17, 5, key_of(1), 0)


@ALL
def test_nodes_without_neighbours(make: Any) -> None:
    graph = Graph.from_edge_index(np.array([[0], [1]]), num_nodes=4)
    found = make(graph, [2, 2], 0).sample([3, 0])
    assert found.n_id.tolist() == [3, 0]
    assert found.edge_index.shape == (2, 0)
    assert found.num_sampled_nodes == [2, 0, 0]
    empty = make(graph, [2], 0).sample(torch.empty(0, dtype=torch.int64))
    assert (empty.batch_size, empty.edge_index.shape) == (0, (2, 0))


@ALL
def test_wrong_seeds_leave_the_sampler_as_it_was(make: Any) -> None:
    graph = random_graph(40, 300, 2)
    sampler = make(graph, [3, 3], 0)
    before = sampler.sample([4, 5])
    with pytest.raises(
        UnknownNodeError, match=r"^seeds has nodes -1, 40, which the graph does not have; expected 0 to 39\.$"
    ):
        sampler.sample([3, 40, -1, 4])
    with pytest.raises(SchemaError, match=r"^seeds has node 9 more than once; expected distinct nodes"):
        sampler.sample([1, 9, 2, 9])
    for wrong in ([0.5], [[1, 2]], ["a"]):
        with pytest.raises(SchemaError, match=r"^seeds is .*; expected node ids, integers \[n\]\.$"):
            sampler.sample(wrong)
    after = sampler.sample([4, 5])
    assert torch.equal(before.n_id, after.n_id)
    assert torch.equal(before.edge_index, after.edge_index)


@pytest.mark.parametrize("fanouts", [[], [0], [-2], [1025], [2.5], 3, [True]])
def test_invalid_fanouts(fanouts: Any) -> None:
    with pytest.raises(SchemaError, match=r"^fanouts is "):
        NeighborSampler(random_graph(4, 8, 0), fanouts)


def test_an_interrupted_sample_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    graph = random_graph(50, 400, 1)
    sampler, concatenate = twin(graph, [3, 3], 1), torch.cat

    def interrupted(*_: Any) -> torch.Tensor:
        raise KeyboardInterrupt

    monkeypatch.setattr(torch, "cat", interrupted)
    with pytest.raises(KeyboardInterrupt):
        sampler.sample([1, 2])
    monkeypatch.setattr(torch, "cat", concatenate)
    found, expected = sampler.sample([3, 4]), twin(graph, [3, 3], 1).sample([3, 4])
    assert torch.equal(found.n_id, expected.n_id)
    assert torch.equal(found.edge_index, expected.edge_index)


def test_a_device_takes_fanouts_up_to_128() -> None:
    with pytest.raises(SchemaError, match=r"^fanouts is \[-1\]; expected 1 to 128"):
        DeviceSampler(random_graph(4, 8, 0), [-1], device="cpu")


# ---------------------------------------------------------------- the graph


def test_edges_are_kept_in_order() -> None:
    edges = np.array([[3, 0, 1, 0, 3], [1, 2, 1, 2, 1]])
    graph = Graph.from_edge_index(torch.from_numpy(edges.astype(np.int32)), num_nodes=5)
    assert graph.indptr.tolist() == [0, 0, 3, 5, 5, 5]
    assert graph.indices.tolist() == [3, 1, 3, 0, 0]
    assert neighbours(graph, 1) == [3, 1, 3]
    assert graph.degrees().tolist() == [0, 3, 2, 0, 0]
    assert graph.out_degrees().tolist() == [2, 1, 0, 2, 0]
    assert repr(graph) == "Graph(5 nodes, 5 edges)"
    assert Graph.from_edge_index(edges).num_nodes == 4
    assert Graph.from_edge_index(np.empty((2, 0), dtype=np.int64)).num_nodes == 0


@pytest.mark.parametrize(
    ("edges", "message"),
    [
        (np.zeros((3, 2), dtype=np.int64), r"^edge_index is int64 \[3, 2\]; expected integers \[2, E\]\.$"),
        (np.zeros((2, 2)), "^edge_index is float64"),
        (np.array([[0, 1], [2, 4]]), "^Edge 1 is from 1 to 4; expected nodes from 0 to 3.$"),
        (np.array([[0, -1], [2, 3]]), "^Edge 1 is from -1 to 3; expected nodes from 0 to 3.$"),
    ],
)
def test_invalid_edges(edges: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Graph.from_edge_index(edges, num_nodes=4)


@pytest.mark.parametrize(
    ("indptr", "indices", "message"),
    [
        ([0, 2, 1], [0, 1], "ascend"),
        ([0, 1], [0, 0], "ascend"),
        ([1, 2], [0, 0], "ascend"),
        ([], [], "ascend"),
        ([0, 1], [1], "^indices has nodes from 1 to 1; expected 0 to 0"),
    ],
)
def test_invalid_rows(indptr: list[int], indices: list[int], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        Graph(torch.tensor(indptr, dtype=torch.int64), torch.tensor(indices, dtype=torch.int32))


def test_rows_of_another_dtype() -> None:
    with pytest.raises(
        SchemaError, match=r"^indices is torch.int64 \[0\] on cpu; expected contiguous torch.int32"
    ):
        Graph(torch.zeros(1, dtype=torch.int64), torch.zeros(0, dtype=torch.int64))


def test_shared_memory() -> None:
    graph = random_graph(10, 40, 0).share_memory_()
    assert graph.indptr.is_shared()
    assert graph.indices.is_shared()
    NeighborSampler(graph, [2]).sample([1])


def test_a_graph_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    edges = np.zeros((2, 1000), dtype=np.int32)
    monkeypatch.setattr("gear_loader.graph.csr.available_bytes", lambda: 20_000)
    Graph.from_edge_index(edges.astype(np.int64), num_nodes=900)
    with pytest.raises(
        RegionError, match=r"^A graph of 900 nodes and 1,000 edges takes 0\.0 GiB to make, and 0\.0 GiB"
    ):
        Graph.from_edge_index(edges, num_nodes=900)
    monkeypatch.undo()
    if csr.available_bytes() is not None and csr.available_bytes() < 29 << 30:
        with pytest.raises(RegionError, match=r"of 2,000,000,000 nodes and 1,000 edges takes 29\.8 GiB"):
            Graph.from_edge_index(edges, num_nodes=2_000_000_000)
