"""Random graphs, and neighbour sampling in plain Python by its definition."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gear_loader.graph import Graph
from gear_loader.graph.sampler import key_of
from gear_loader.utils.arrays import Array

_MASK = (1 << 32) - 1


def random_graph(num_nodes: int, num_edges: int, seed: int, *, skew: float = 0.0) -> Graph:
    """Edges with uniform targets, and sources in proportion to (rank + 1) ** -skew."""
    random = np.random.default_rng(seed)
    weights = np.arange(1, num_nodes + 1) ** -skew
    sources = random.choice(num_nodes, size=num_edges, p=weights / weights.sum())
    return Graph.from_edge_index(
        np.stack([sources, random.integers(0, num_nodes, num_edges)]), num_nodes=num_nodes
    )


def neighbours(graph: Graph, node: int) -> list[int]:
    """The neighbours of a node."""
    first, end = graph.indptr[node : node + 2].tolist()
    return [int(other) for other in graph.indices[first:end].tolist()]


def uniform(key: int, step: int, node: int, level: int) -> float:
    """A 53-bit uniform of Philox-4x32-10, in Python's integers."""
    k0, k1 = key & _MASK, key >> 32 & _MASK
    words = [node & _MASK, level // 2, step & _MASK, step >> 32 & _MASK]
    for _ in range(10):
        a, b = 0xD2511F53 * words[0], 0xCD9E8D57 * words[2]
        words = [(b >> 32) ^ words[1] ^ k0, b & _MASK, (a >> 32) ^ words[3] ^ k1, a & _MASK]
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    high, low = words[2 * (level % 2)], words[2 * (level % 2) + 1]
    return ((high >> 5) * 2.0**26 + (low >> 6)) * 2.0**-53


def drawn(graph: Graph, node: int, fanout: int, key: int, step: int) -> list[int]:
    """The neighbours that a node gets, by Floyd's algorithm."""
    found = neighbours(graph, node)
    if fanout < 0 or len(found) <= fanout:
        return found
    chosen: list[int] = []
    for i in range(fanout):
        last = len(found) - fanout + i
        place = min(int(uniform(key, step, node, i) * (last + 1)), last)
        chosen.append(last if place in chosen else place)
    return [found[place] for place in chosen]


def sampled(
    graph: Graph, seeds: Sequence[int], fanouts: Sequence[int], seed: int, step: int
) -> tuple[list[int], Array]:
    """Nodes, and edges [2, e], of the sampled neighbourhood."""
    nodes, begin = list(seeds), 0
    edges: list[tuple[int, int]] = []
    for fanout in fanouts:
        frontier, start = nodes[begin:], begin
        begin = len(nodes)
        for i, node in enumerate(frontier):
            for other in drawn(graph, node, fanout, key_of(seed), step):
                if other not in nodes:
                    nodes.append(other)
                edges.append((nodes.index(other), start + i))
    return nodes, np.array(edges, dtype=np.int64).reshape(-1, 2).T
