"""A batch that anything refers to does not change; the memory of others is used again."""

from __future__ import annotations

import gc
import itertools
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import copies, equal, make_table, same_batches
from options_common import nested

import gear_loader as gear
from gear_loader.collection import prefetch as prefetching
from gear_loader.collection import references
from gear_loader.collection.references import BatchReferences
from gear_loader.errors import SchemaError

WINDOWS = {"reward": gear.Window(5, -2), "next": gear.Window(1, 1, column="reward", squeeze=True)}
WEIGHT = torch.ones(3, requires_grad=True)

HOLDERS: dict[str, Callable[[torch.Tensor], Any]] = {
    "tensor": lambda value: value,
    "slice": lambda value: value[1:, 0],
    "view of a view": lambda value: value.view(-1)[3:].unsqueeze(0),
    "numpy": lambda value: value.numpy()[2:].reshape(-1),
    "memoryview": lambda value: memoryview(value.numpy()),
    "dlpack": lambda value: np.from_dlpack(value),
    "tensor of an array": lambda value: torch.from_numpy(value.numpy()[1:]),
    "storage": lambda value: value.untyped_storage(),
    "data": lambda value: value.data,
    "saved by autograd": lambda value: value * WEIGHT,
    "leaf of a graph": lambda value: value.requires_grad_().sum(),
    "parameter": torch.nn.Parameter,
}


@pytest.mark.parametrize("holder", HOLDERS)
def test_each_kind_of_reference_is_counted(holder: str) -> None:
    names = torch.zeros(2, 4, dtype=torch.int64)
    own = {
        "value": torch.zeros(4, 3),
        "index": names[0],
        "anchor": names[1],
        "mask": {"value": torch.ones(4)},
    }
    array = own["value"].numpy()  # the buffers' own references do not count
    found = BatchReferences(own)
    assert len(found._storages) == 3
    for _ in range(2):
        batch = found.aliases()
        assert found.held
        kept = HOLDERS[holder](batch["value"])
        del batch
        assert found.held
        kept = None
        assert not found.held
        assert kept is None
    part = found.aliases()["mask"]
    assert found.held
    del part
    assert not found.held
    assert array.base is not None


def test_a_reference_that_was_there_at_the_beginning_may_go() -> None:
    """As a profiler's list of all objects: when it is gone, the buffers are used again."""
    own = {"value": torch.zeros(4, 3), "other": torch.zeros(4)}
    passing = own["value"].untyped_storage(), own["value"][1:]
    found = BatchReferences(own)
    batch = found.aliases()
    assert found.held
    del passing
    assert found.held  # by the batch
    del batch["value"]
    assert found.held
    del batch
    assert not found.held
    batch = found.aliases()
    assert found.held
    del batch
    assert not found.held


def test_memory_that_another_process_was_sent_is_not_used_again() -> None:
    own = {"value": torch.zeros(4, 3)}
    found = BatchReferences(own)
    found.aliases()["value"].share_memory_()
    assert found.held


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    told = {
        "batch_size": 4,
        "windows": WINDOWS,
        "device": "cpu",
        "seed": 3,
        "batches_per_epoch": 15,
        **options,
    }
    return gear.ReplayDataset(table, **nested(told))


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("keep", [1, 2])
def test_kept_batches_never_change(table: gear.Table, prefetch: int, keep: int) -> None:
    """Over epochs, of which one is broken off, and single batches, one of them smaller."""
    options = {"prefetch": prefetch, "keep": keep}
    fresh, data = dataset(table, copy=True, **options), dataset(table, **options)

    def run(data: gear.ReplayDataset) -> list[Any]:
        found = [*data, *itertools.islice(data, 3), *data]
        return found + [data.sample() for _ in range(12)] + [data.sample(3) for _ in range(3)]

    same_batches(run(fresh), run(data))


def test_memory_that_nothing_refers_to_is_used_again(table: gear.Table) -> None:
    for prefetch, keep in ((0, 1), (0, 2), (2, 2)):
        data = dataset(table, prefetch=prefetch, keep=keep)
        batches = itertools.chain(data, data, itertools.islice(data, 4), data)
        assert len({batch["reward"].data_ptr() for batch in batches}) <= prefetch + keep + 1
        held = [batch["mask"] for batch in data]
        (pool,) = data._buffers.pools.values()
        looked_after = prefetch + keep + prefetching._MOST_HELD + 1
        assert len(pool.free) + len(pool.delivered) <= looked_after  # the rest belongs to `held` alone
        del held
        gc.collect()
        assert len({batch["reward"].data_ptr() for batch in [*data, *data]}) > 15
        assert len(pool.free) + len(pool.delivered) <= looked_after


def test_what_is_done_to_a_tensor_does_not_reach_the_next_batch(table: gear.Table) -> None:
    data, expected = dataset(table, prefetch=0), copies(dataset(table))
    for batch, other in zip(data, expected, strict=True):
        assert equal(batch, other)
        assert not batch["reward"].requires_grad
        batch["reward"].requires_grad_().sum().backward()
        batch["next"].unsqueeze_(0).zero_()
        batch["index"].resize_(1)


def test_without_the_count_memory_is_recycled_whatever_refers_to_it(table: gear.Table) -> None:
    data = dataset(table, copy=False)
    batches = list(data)
    assert len({batch["reward"].data_ptr() for batch in batches}) <= 5
    assert len({id(batch["reward"]) for batch in batches}) <= 5  # nothing is made for a batch
    with pytest.raises(SchemaError, match="copy is 1; expected None"):
        dataset(table, copy=1)


def test_where_references_cannot_be_counted_each_batch_has_memory_of_its_own(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(references, "_use_count", None)
    same_batches(copies(dataset(table)), list(dataset(table)))
