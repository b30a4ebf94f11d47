"""Batches of requests: who gets what, deadlines, overload, clients that are gone."""

from __future__ import annotations

import pickle
import threading
from typing import Any

import numpy as np
import pytest
import torch

from gear_loader.errors import GearError, OverloadError, SchemaError, UnknownNodeError
from gear_loader.graph.requests import RequestBatcher
from gear_loader.utils.arrays import Array

WAIT = 60.0


class Model:
    """Returns each node's square; waits for `go` before the first batch."""

    def __init__(self) -> None:
        self.batches: list[list[int]] = []
        self.began, self.go = threading.Event(), threading.Event()
        self.go.set()
        self.error: Exception | None = None

    def __call__(self, nodes: Array) -> torch.Tensor:
        self.batches.append(nodes.tolist())
        self.began.set()
        assert self.go.wait(WAIT)
        if self.error is not None:
            raise self.error
        return torch.from_numpy(nodes * nodes)[:, None]


@pytest.fixture
def model() -> Model:
    return Model()


def blocked(model: Model, batcher: RequestBatcher) -> Any:
    """A request that is being served until `model.go` is set."""
    model.go.clear()
    first = batcher.submit([0])
    assert model.began.wait(WAIT)
    return first


def test_requests_that_wait_are_served_together(model: Model) -> None:
    with RequestBatcher(model, 100, max_batch=8, max_wait=0) as batcher:
        first = blocked(model, batcher)
        futures = [batcher.submit(nodes) for nodes in ([5, 3, 5], [3], [7, 1, 2, 9], [8])]
        model.go.set()
        assert first.result(WAIT).tolist() == [[0]]
        assert [f.result(WAIT).flatten().tolist() for f in futures] == [
            [25, 9, 25],
            [9],
            [49, 1, 4, 81],
            [64],
        ]
    # The last one would be the ninth node.
    assert model.batches == [[0], [1, 2, 3, 5, 7, 9], [8]]
    stats = batcher.stats
    assert (stats.accepted, stats.served, stats.batches, stats.nodes) == (5, 5, 3, 8)


def test_a_full_batch_does_not_wait_for_its_deadline(model: Model) -> None:
    with RequestBatcher(model, 100, max_batch=4, max_wait=1e6) as batcher:
        futures = [batcher.submit([node, node + 1]) for node in (0, 10)]
        assert [f.result(WAIT)[0, 0].item() for f in futures] == [0, 100]
    assert model.batches == [[0, 1, 10, 11]]


def test_a_request_is_served_at_its_deadline(model: Model) -> None:
    with RequestBatcher(model, 100, max_batch=4, max_wait=0.01) as batcher:
        assert batcher.submit([3]).result(WAIT).tolist() == [[9]]


def test_overload(model: Model) -> None:
    with RequestBatcher(model, 100, max_batch=4, max_wait=0, max_waiting=2) as batcher:
        first = blocked(model, batcher)
        waiting = [batcher.submit([node]) for node in (1, 2)]
        with pytest.raises(
            OverloadError, match=r"^2 requests wait, which is the limit \(max_waiting\)"
        ) as caught:
            batcher.submit([3])
        assert caught.value.retry_after > 0
        assert pickle.loads(pickle.dumps(caught.value)).retry_after == caught.value.retry_after
        model.go.set()
        assert [f.result(WAIT).item() for f in (first, *waiting)] == [0, 1, 4]
        assert batcher.submit([3]).result(WAIT).item() == 9
    assert (batcher.stats.accepted, batcher.stats.refused, batcher.stats.served) == (4, 1, 4)


@pytest.mark.parametrize("max_batch", [256, 1])  # of one: all clients of a batch are gone
def test_a_client_that_is_gone(model: Model, max_batch: int) -> None:
    with RequestBatcher(model, 100, max_batch=max_batch, max_wait=0) as batcher:
        blocked(model, batcher)
        gone, stays = batcher.submit([5]), batcher.submit([6])
        assert gone.cancel()
        model.go.set()
        assert stays.result(WAIT).item() == 36
    assert model.batches == [[0], [6]]
    assert (batcher.stats.cancelled, batcher.stats.served) == (1, 2)


def test_an_error_reaches_those_it_concerns(model: Model) -> None:
    with RequestBatcher(model, 100, max_wait=0) as batcher:
        model.error = ValueError("broken")
        with pytest.raises(ValueError, match=r"^broken$"):
            batcher.submit([1]).result(WAIT)
        model.error = None
        assert batcher.submit([2]).result(WAIT).item() == 4
    assert (batcher.stats.failed, batcher.stats.served) == (1, 1)


def test_too_few_rows() -> None:
    with (
        RequestBatcher(lambda nodes: torch.zeros(1), 100, max_wait=0) as batcher,
        pytest.raises(SchemaError, match=r"^serve returned 1 rows for 2 nodes; expected as many"),
    ):
        batcher.submit([1, 2]).result(WAIT)


def test_wrong_requests_do_not_wait(model: Model) -> None:
    with RequestBatcher(model, 100, max_batch=3) as batcher:
        with pytest.raises(
            UnknownNodeError, match=r"^nodes has node 100, which the graph does not have; expected 0 to 99"
        ):
            batcher.submit([1, 100])
        for nodes in ([], [1, 2, 3, 4]):
            with pytest.raises(SchemaError, match=rf"^A request has {len(nodes)} nodes; expected 1 to 3\.$"):
                batcher.submit(nodes)
    with pytest.raises(GearError, match=r"^A request came after RequestBatcher.close"):
        batcher.submit([1])
    assert batcher.stats.accepted == 0
    with pytest.raises(SchemaError, match=r"^max_wait is -1"):
        RequestBatcher(model, 100, max_wait=-1)


def test_close_serves_what_waits(model: Model) -> None:
    batcher = RequestBatcher(model, 100, max_batch=2, max_wait=1e6)
    futures = [batcher.submit([node]) for node in np.arange(1)]
    batcher.close()
    assert [f.result(WAIT).item() for f in futures] == [0]
    batcher.close()
