"""Drawing neighbours: the kernel and its torch twin against the definition."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch
from cases import kernel_and_twin, mostly_long
from graph_common import drawn, random_graph

from gear_loader.graph import DeviceSampler, NeighborSampler
from gear_loader.kernels import neighbors, neighbors_reference

Draw = Callable[..., None]

ALL = kernel_and_twin(neighbors.draw, neighbors_reference.draw, "draw")
_POISON = -77


@ALL
@pytest.mark.parametrize("fanout", mostly_long([1, 2, 7, 8, 9, 32, 33], 1, 7, 9))
def test_equals_the_definition(draw: Draw, fanout: int) -> None:
    graph = random_graph(60, 900, fanout, skew=0.7)
    key, step = 0x1234567_89ABCDEF, (fanout << 33) + 5
    nodes = torch.from_numpy(np.random.default_rng(fanout).integers(0, 60, 75))
    random = torch.tensor([key, step])
    memory = torch.full((77, fanout), _POISON)
    draw(graph.indptr, graph.indices, nodes, random, memory[1:76])
    for row, node in zip(memory[1:76].tolist(), nodes.tolist(), strict=True):
        expected = drawn(graph, node, fanout, key, step)
        assert row == expected + [-1] * (fanout - len(expected))
    assert (memory[[0, 76]] == _POISON).all()


def test_a_sampler_that_launches_the_kernel() -> None:
    if torch.cuda.is_available():
        pytest.skip("it is compiled here")
    graph = random_graph(100, 1500, 4)
    one = DeviceSampler(graph, [5, 3], seed=3, device="cpu", draw=neighbors.draw).sample([8, 1, 60], step=2)
    other = NeighborSampler(graph, [5, 3], seed=3).sample([8, 1, 60], step=2)
    assert torch.equal(one.n_id, other.n_id)
    assert torch.equal(one.edge_index, other.edge_index)


@ALL
def test_no_nodes_and_no_edges(draw: Draw) -> None:
    graph = random_graph(3, 0, 0)
    out = torch.full((2, 4), _POISON)
    draw(graph.indptr, graph.indices, torch.tensor([0, 2]), torch.tensor([1, 2]), out)
    assert (out == -1).all()
    draw(graph.indptr, graph.indices, torch.tensor([], dtype=torch.int64), torch.tensor([1, 2]), out[:0])


@ALL
def test_invalid_arguments(draw: Draw) -> None:
    graph = random_graph(4, 9, 0)
    nodes, random, out = torch.tensor([1, 2]), torch.tensor([1, 2]), torch.full((2, 3), _POISON)
    with pytest.raises(TypeError, match=r"^indices is torch.int64 \[9\]; expected contiguous torch.int32"):
        draw(graph.indptr, graph.indices.long(), nodes, random, out)
    with pytest.raises(ValueError, match=r"^neighbors is \[1, 3\] and random \[2\]; expected \[2, l\]"):
        draw(graph.indptr, graph.indices, nodes, random, out[:1])
    assert (out == _POISON).all()


def test_the_largest_fanout() -> None:
    graph = random_graph(4, 9, 0)
    with pytest.raises(ValueError, match=r"^neighbors is \[1, 129\]; expected a fan-out of at most 128\.$"):
        neighbors.draw(
            graph.indptr, graph.indices, torch.tensor([0]), torch.tensor([1, 2]), torch.empty(1, 129).long()
        )
