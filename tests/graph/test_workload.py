"""Sampled size and access probability: the formulas by hand, and what sampling does."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from graph_common import neighbours, random_graph

from gear_loader.errors import SchemaError
from gear_loader.graph import Graph, NeighborSampler, access_probability, sampled_size
from gear_loader.utils.arrays import Array

# 1 and 2 send to 0; 2 and 3 send to 1; 3 has a loop.
SMALL = Graph.from_edge_index(np.array([[1, 2, 2, 3, 3], [0, 0, 1, 1, 3]]), num_nodes=5)


def naive_sizes(graph: Graph, fanouts: list[int]) -> Array:
    found = np.ones(graph.num_nodes)
    for fanout in reversed(fanouts):
        rows = [neighbours(graph, node) for node in range(graph.num_nodes)]
        taken = [len(row) if fanout < 0 else min(len(row), fanout) for row in rows]
        found = np.array(
            [1 + t / max(len(r), 1) * sum(found[u] for u in r) for r, t in zip(rows, taken, strict=True)]
        )
    return found


def naive_accesses(graph: Graph, fanouts: list[int], requests: Array) -> Array:
    found = requests
    for fanout in fanouts:
        missed = 1 - found
        for u in range(graph.num_nodes):
            row = neighbours(graph, u)
            for v in row:
                missed[v] *= 1 - found[u] * (1 if fanout < 0 else min(1, fanout / len(row)))
        found = 1 - missed
    return found


def test_by_hand() -> None:
    assert sampled_size(SMALL, [1]).tolist() == [2, 2, 1, 2, 1]
    assert sampled_size(SMALL, [2, 1]).tolist() == [1 + 2 + 1, 1 + 1 + 2, 1, 3, 1]
    requests = np.array([0.5, 0, 0, 0, 0])
    assert access_probability(SMALL, [1], requests).tolist() == [0.5, 0.25, 0.25, 0, 0]
    second = access_probability(SMALL, [1, -1], requests)
    assert second.tolist() == [0.5, 1 - 0.75 * 0.5, 1 - 0.75 * 0.5 * 0.75, 0.25, 0]
    second = access_probability(SMALL, [1, -1], requests, drawing="new")
    assert second.tolist() == [0.5, 0.25, 1 - 0.75 * 0.75, 0.25, 0]


@pytest.mark.parametrize("fanouts", [[2], [3, 2], [-1, 4, 1]])
def test_equal_the_formulas(fanouts: list[int]) -> None:
    graph = random_graph(60, 500, 1, skew=0.6)
    requests = np.random.default_rng(0).random(60) / 10
    np.testing.assert_allclose(sampled_size(graph, fanouts), naive_sizes(graph, fanouts), rtol=1e-12)
    np.testing.assert_allclose(
        access_probability(graph, fanouts, requests), naive_accesses(graph, fanouts, requests), rtol=1e-12
    )
    uniform = np.full(60, 1 / 60)
    assert np.array_equal(
        access_probability(graph, fanouts), access_probability(graph, fanouts, torch.from_numpy(uniform))
    )


def tree_size(graph: Graph, node: int, fanouts: list[int], random: np.random.Generator) -> int:
    """Nodes of one sampled tree, in which a node that is found twice counts twice."""
    if not fanouts:
        return 1
    found = neighbours(graph, node)
    taken = random.choice(found, size=min(len(found), fanouts[0]), replace=False) if found else []
    return 1 + sum(tree_size(graph, int(other), fanouts[1:], random) for other in taken)


@pytest.mark.parametrize("skew", [0.0, 0.8])
def test_sizes_are_those_of_sampled_trees(skew: float) -> None:
    graph = random_graph(400, 3000, 2, skew=skew)
    random, expected = np.random.default_rng(1), sampled_size(graph, [4, 3])
    nodes = random.integers(0, 400, 4000)
    found = [tree_size(graph, int(node), [4, 3], random) for node in nodes]
    # Standard error about 0.4%.
    assert np.mean(found) == pytest.approx(expected[nodes].mean(), rel=0.02)


def layered(graph: Graph, seeds: Array, fanouts: list[int], random: np.random.Generator) -> Array:
    """Nodes of a batch in which all nodes that were found so far draw neighbours in each hop."""
    indptr, indices = graph.indptr.numpy(), graph.indices.numpy()
    found = seeds
    for fanout in fanouts:
        degree = indptr[found + 1] - indptr[found]
        edge = np.arange(degree.sum()) - np.repeat(np.cumsum(degree) - degree, degree)
        row = np.repeat(np.arange(len(found)), degree)
        order = np.lexsort((random.random(len(row)), row))
        drawn = (indptr[found][row] + edge)[order[edge < fanout]]
        found = np.unique(np.concatenate((found, indices[drawn])))
    return found


@pytest.mark.parametrize(
    ("skewed", "drawing"),
    mostly_long(list(itertools.product([False, True], ["all", "new"])), (False, "new"), (True, "all")),
)
def test_probabilities_are_those_of_sampled_batches(skewed: bool, drawing: Any) -> None:
    """Batches of seeds that are drawn independently, on random graphs without hubs: within 2% in sum, and in parts.

    If all nodes draw again, a neighbour that the same node has drawn before is counted twice: so more of them there.
    """
    size, fanouts, batches = 4000, [3, 2], 4000
    graph = random_graph(size, 240_000 if drawing == "all" else 24_000, 3)
    requests = np.full(size, 0.002)
    if skewed:
        requests = np.minimum(0.4 / np.arange(1, size + 1), 0.05)
        requests = requests[np.random.default_rng(2).permutation(size)]
    expected = access_probability(graph, fanouts, requests, drawing=drawing)
    sampler, random = NeighborSampler(graph, fanouts, seed=4), np.random.default_rng(5)
    counts = np.zeros(size)
    for step in range(batches):
        seeds = np.flatnonzero(random.random(size) < requests)
        if drawing == "new":
            counts[sampler.sample(seeds, step=step).n_id.numpy()] += 1
        else:
            counts[layered(graph, seeds, fanouts, random)] += 1
    found = counts / batches
    assert found.sum() == pytest.approx(expected.sum(), rel=0.02)
    order = np.argsort(-expected)
    for part in (order[: size // 10], order[: size // 2]):
        assert found[part].sum() == pytest.approx(expected[part].sum(), rel=0.02)


@pytest.mark.parametrize(
    ("requests", "message"),
    [
        (np.full(4, 0.1), r"^requests is float64 \[4\]; expected floats \[5\]"),
        (np.zeros(5, dtype=np.int64), r"^requests is int64 \[5\]"),
        (np.array([0, 0.5, 1.5, 0, 0]), r"^requests\[2\] is 1.5; expected a probability, from 0 to 1\.$"),
        (np.array([0, np.nan, 0, 0, 0]), r"^requests\[1\] is nan"),
    ],
)
def test_invalid_requests(requests: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        access_probability(SMALL, [1], requests)


def test_invalid_drawing() -> None:
    with pytest.raises(SchemaError, match=r"^drawing is 'none'; expected 'all' or 'new'\.$"):
        access_probability(SMALL, [1], drawing="none")  # type: ignore[arg-type]
