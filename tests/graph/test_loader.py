"""Epochs of subgraphs."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from graph_common import random_graph
from streams.cuda import Cuda

import gear_loader as gear
from gear_loader.errors import SchemaError, UnknownNodeError
from gear_loader.graph import NeighborLoader, NeighborSampler

GRAPH = random_graph(100, 900, 0)


def test_an_epoch_has_every_seed_once() -> None:
    loader = NeighborLoader(GRAPH, [3, 2], batch_size=32)
    assert len(loader) == 4
    batches = list(loader)
    assert [batch.batch_size for batch in batches] == [32, 32, 32, 4]
    assert torch.cat([batch.n_id[: batch.batch_size] for batch in batches]).tolist() == list(range(100))
    assert repr(loader).startswith(
        "NeighborLoader(Graph(100 nodes, 900 edges), [3, 2], 100 seeds in 4 batches of 32"
    )


@pytest.mark.parametrize("prefetch", [0, 1, 3])
def test_batches_are_functions_of_seed_epoch_and_number(prefetch: int) -> None:
    seeds = torch.tensor([9, 70, 3, 4, 55, 21, 0])
    loader = NeighborLoader(GRAPH, [3], batch_size=3, seeds=seeds, shuffle=True, seed=5, prefetch=prefetch)
    epochs = [list(loader) for _ in range(2)]
    assert loader.epoch == 2
    orders = [torch.cat([batch.n_id[: batch.batch_size] for batch in batches]).tolist() for batches in epochs]
    assert orders[0] != orders[1]
    assert sorted(orders[0]) == sorted(orders[1]) == sorted(seeds.tolist())
    for epoch, batches in enumerate(epochs):
        for number, batch in enumerate(batches):
            again = loader.batch(epoch, number)
            assert torch.equal(batch.n_id, again.n_id)
            assert torch.equal(batch.edge_index, again.edge_index)


def test_epochs_draw_other_neighbours() -> None:
    loader = NeighborLoader(GRAPH, [2], batch_size=100)
    one, other = next(iter(loader)), next(iter(loader))
    assert not torch.equal(one.edge_index, other.edge_index) or not torch.equal(one.n_id, other.n_id)
    assert torch.equal(one.n_id, NeighborSampler(GRAPH, [2]).sample(np.arange(100), step=0).n_id)


def test_features_of_the_nodes() -> None:
    x = torch.arange(200.0).view(100, 2)
    with gear.Table.create(
        {"x": gear.Column(torch.float32, (2,))}, max_steps=100, max_trajectories=1
    ) as table:
        table.add({"x": x})
        for batch in NeighborLoader(
            GRAPH, [3, 2], batch_size=40, features=gear.Features(table, "x"), drop_last=True
        ):
            assert batch.batch_size == 40
            assert torch.equal(batch.x, x[batch.n_id])


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
@pytest.mark.parametrize("policy", ["latest", "random"])
def test_batches_on_the_device_of_the_features(policy: Any) -> None:
    x = torch.arange(200.0).view(100, 2)
    schema = {"x": gear.Column(torch.float32, (2,))}
    with Cuda(policy=policy).installed() as cuda:
        with gear.Table.create(schema, max_steps=100, max_trajectories=1) as table:
            table.add({"x": x})
            features = gear.Features(table, "x", device="cuda:1")
            features.place(np.ones(100), device_bytes=30 * features.row_bytes)
            for batch in NeighborLoader(GRAPH, [3, 2], batch_size=40, features=features, prefetch=0):
                assert {batch.x.device, batch.n_id.device, batch.edge_index.device} == {
                    torch.device("cuda:1")
                }
                assert torch.equal(batch.x.cpu(), x[batch.n_id.cpu()])
                assert int(batch.edge_index.cpu().max()) < len(batch.n_id)
        cuda.check()


def test_a_loop_that_is_left() -> None:
    loader = NeighborLoader(GRAPH, [3], batch_size=10, prefetch=2)
    for _ in loader:
        break
    assert len(list(loader)) == 10


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"seeds": [1, 2, 1]}, SchemaError, "^seeds has node 1 more than once"),
        ({"seeds": [1, 100]}, UnknownNodeError, "^seeds has node 100, which the graph does not have"),
        ({"batch_size": 0}, SchemaError, "^batch_size is 0; expected an integer of at least 1"),
        ({"prefetch": -1}, SchemaError, "^prefetch is -1; expected an integer of at least 0"),
        (
            {"features": np.zeros((100, 2))},
            SchemaError,
            "^features is a ndarray; expected a gear_loader.Features",
        ),
    ],
)
def test_invalid_options(options: dict[str, Any], error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=message):
        NeighborLoader(GRAPH, [2], **{"batch_size": 4, **options})
