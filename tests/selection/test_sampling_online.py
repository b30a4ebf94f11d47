"""Drawing from a table that others write: rate limiters, counted samples, `sample_info`, shared blocks."""

from __future__ import annotations

import collections
import contextlib
import threading
import time
from collections.abc import Iterable, Iterator
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested, nested_table
from table_common import COLUMNS, rows

import gear_loader as gear
from gear_loader.errors import PriorityError, RateLimitError, SchemaError, TableEmptyError
from gear_loader.storage.counters import NUM_SAMPLED
from gear_loader.utils.waiting import Backoff

SIZES: dict[str, Any] = {"max_steps": 400, "max_trajectories": 60, "block_steps": 4}
WINDOW = gear.Window(length=3, offset=-1)


def table_of(count: int = 0, **options: Any) -> gear.Table:
    """A table of `count` trajectories of 2 to 6 steps; trajectory i has the number and priority i + 1."""
    table = gear.Table.create(COLUMNS, **nested_table({**SIZES, **options}))
    for i in range(count):
        table.add(rows(i + 1, 2 + i % 5), priority=i + 1)
    return table


def dataset_of(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table, **nested({"batch_size": 4, "windows": WINDOW, "device": "cpu", "prefetch": 0, **options})
    )


def numbers_in(batch: dict[str, Any]) -> list[int]:
    """The trajectory numbers of a batch's rows: what stands at their anchors."""
    return batch["number"][:, 1].tolist()


SAMPLERS = [
    gear.Uniform(),
    gear.Uniform(replacement=False),
    gear.Uniform(unit="step"),
    gear.Lifo(),
    gear.Prioritized(unit="step"),
    gear.Prioritized(replacement=False),
    gear.TopK(largest=False, unit="step"),
]
SOME = pytest.mark.parametrize("sampler", [gear.Fifo(), gear.Prioritized()], ids=repr)


def probability_of(sampler: gear.samplers.Sampler, table: gear.Table, batch: dict[str, Any]) -> list[float]:
    """With which probability each row of a batch was drawn."""
    steps, count = sampler.unit == "step", len(batch["index"])
    if isinstance(sampler, gear.Uniform):
        return [1 / (table.num_steps if steps else len(table))] * count
    if not isinstance(sampler, gear.Prioritized):
        return [1.0] * count
    indices, lengths = table.indices(), table.lengths()
    each = {
        index: float(table._engine.reader().arrays.priority[index]) ** sampler.alpha
        for index in indices.tolist()
    }
    total = sum(
        weight * (length if steps else 1)
        for weight, length in zip(each.values(), lengths.tolist(), strict=True)
    )
    return [each[index] / total for index in batch["index"].tolist()]


@pytest.mark.parametrize(
    ("sampler", "prefetch"), [(sampler, i % 2 * 2) for i, sampler in enumerate(SAMPLERS)], ids=str
)
def test_sample_info_of_every_sampler(sampler: gear.samplers.Sampler, prefetch: int) -> None:
    floats = dict.fromkeys(("probability", "age_seconds"), torch.float32)
    dtypes = {**dict.fromkeys(("times_sampled", "age"), torch.int64), **floats}
    with table_of(17) as table:
        data = dataset_of(table, sampler=sampler, sample_info=True, prefetch=prefetch, batches_per_epoch=9)
        counts: collections.Counter[int] = collections.Counter()
        for batch in data:
            info = batch["sample_info"]
            assert {key: value.dtype for key, value in info.items()} == dtypes
            assert {len(value) for value in info.values()} == {len(batch["index"])}
            for row, number in enumerate(numbers_in(batch)):
                counts[number] += 1
                assert info["times_sampled"][row] == counts[number]
                assert info["age"][row] == 17 - number
            expected = torch.tensor(probability_of(sampler, table, batch))
            torch.testing.assert_close(info["probability"], expected)
            assert ((info["age_seconds"] > 0) & (info["age_seconds"] < 60)).all()
        assert sum(counts.values()) >= 32


def test_without_sample_info_nothing_is_counted() -> None:
    with table_of(5) as table:
        batch = dataset_of(table).sample()
        assert "sample_info" not in batch
        assert not table._engine.region.array("sampled").any()
        info = dataset_of(table, sample_info=True).sample()["sample_info"]
        assert info["times_sampled"].min() == 1
        assert table.stats().num_sampled == 8


@pytest.mark.parametrize(
    ("sampler", "limit"),
    [(sampler, 1 + i % 2 * 2) for i, sampler in enumerate([gear.Fifo(), *SAMPLERS])],
    ids=str,
)
def test_each_is_drawn_so_often_and_not_once_more(sampler: gear.samplers.Sampler, limit: int) -> None:
    with table_of(16, max_times_sampled=limit, timeout=0.05) as table:
        data = dataset_of(table, sampler=sampler, sample_info=True, batches_per_epoch=1000)
        counts: collections.Counter[int] = collections.Counter()
        with pytest.raises((TableEmptyError, PriorityError)):  # noqa: PT012 - it comes some time
            for batch in data:
                counts.update(numbers_in(batch))
                for row, number in enumerate(numbers_in(batch)):
                    assert batch["sample_info"]["times_sampled"][row] <= limit, number
                assert max(counts.values()) <= limit
                if "priority_weight" in batch:  # of rows that were drawn once more, too
                    priorities = batch["number"][:, 1].double()
                    weights = (priorities.min() / priorities) ** (sampler.alpha * sampler.beta_at(0))  # type: ignore[attr-defined]
                    torch.testing.assert_close(batch["priority_weight"], weights.float())
                table.check_valid()
        # The last batch may have lacked rows; what it had taken by then is gone too.
        assert sum(counts.values()) >= 16 * limit - 3 * 4
        assert len(table) <= 3
        assert table.stats().num_expired == 16 - len(table)
        table.check_valid()


@contextlib.contextmanager
def adding_while_drawn(table: gear.Table, numbers: Iterable[int]) -> Iterator[None]:
    """Another thread adds trajectories of three steps as soon as a draw waits."""
    waits, sleep = threading.Event(), Backoff.sleep

    def told(backoff: Backoff) -> bool:
        waits.set()
        return sleep(backoff)

    def add() -> None:
        assert waits.wait(20)
        for number in numbers:
            table.add(rows(number, 3))

    adding = threading.Thread(target=add)
    adding.start()
    Backoff.sleep = told  # type: ignore[method-assign]
    try:
        yield
    finally:
        Backoff.sleep = sleep  # type: ignore[method-assign]
        waits.set()
        adding.join()


def test_a_batch_that_lacks_rows_waits_for_more() -> None:
    with table_of(6, max_times_sampled=1, timeout=20) as table:
        for sampler in (gear.Fifo(), gear.Uniform(), gear.Prioritized()):
            data = dataset_of(table, sampler=sampler)
            seen = numbers_in(data.sample())
            with adding_while_drawn(table, range(100, 106)):
                seen += numbers_in(data.sample())
            assert len(set(seen)) == 8
            table.remove(table.indices())
            table.extend([rows(50 + i, 3) for i in range(6)])


def test_min_size_is_waited_for() -> None:
    with table_of(rate_limiter=gear.MinSize(5), timeout=20) as table:
        with adding_while_drawn(table, range(5)):
            for data in (dataset_of(table), dataset_of(table, prefetch=2, sampler=gear.Prioritized())):
                batch = next(iter(data))
                assert len(table) >= 5
                assert len(batch["index"]) == 4
        assert table.stats().sample_wait > 0


def test_an_error_at_the_deadline_names_the_limiter_and_its_counts() -> None:
    with table_of(3, rate_limiter=gear.MinSize(5), timeout=0.05) as table:
        for data in (
            dataset_of(table),
            dataset_of(table, prefetch=2),
            dataset_of(table, sampler=gear.TopK()),
        ):
            with pytest.raises(RateLimitError, match=r"Waited 0.05 s.*MinSize\(.*size 3"):
                data.sample()
            with pytest.raises(RateLimitError, match="MinSize"):
                next(iter(data))
        assert table.stats().num_sampled == 0
        assert not table._engine.region.array("readers")[:, 2].any()


def test_who_is_not_limited_does_not_count() -> None:
    with table_of(3, rate_limiter=gear.MinSize(5), timeout=0.05) as table:
        dataset_of(table, rate_limited=False).sample()
        assert table.stats().num_sampled == 0


def test_a_draw_that_fails_does_not_count() -> None:
    limiter = gear.SampleToInsertRatio(4, 1, error_buffer=50)
    with table_of(rate_limiter=limiter) as table:
        for i in range(5):
            table.add(rows(i, 3), priority=0)
        nothing = dataset_of(table, subset=lambda sequences: sequences < 0)
        for data in (dataset_of(table, sampler=gear.Prioritized()), nothing):
            for _ in range(12):
                with pytest.raises((PriorityError, TableEmptyError)):
                    data.sample()
        assert table.stats().num_sampled == 0
        assert not table._engine.region.array("readers")[:, 2].any()


def test_batches_that_can_never_be_drawn_are_refused_at_once() -> None:
    with table_of(rate_limiter=gear.Queue(6)) as table:
        for draw in (
            lambda: dataset_of(table, batch_size=7),
            lambda: dataset_of(table, batch_size=6).sample(7),
        ):
            with pytest.raises(SchemaError, match="Queue"):
                draw()
    with pytest.raises(SchemaError, match=r"MinSize.* waits for more trajectories than the table can hold"):
        table_of(rate_limiter=gear.MinSize(61))


@SOME
def test_an_iterator_is_closed_although_its_thread_waits(sampler: gear.samplers.Sampler) -> None:
    with table_of(8, rate_limiter=gear.SampleToInsertRatio(1.0, 4, error_buffer=9), timeout=300) as table:
        data = dataset_of(table, sampler=sampler, prefetch=2, batches_per_epoch=100)
        iterator = iter(data)
        next(iterator)
        time.sleep(0.05)
        iterator.close()  # type: ignore[attr-defined]
        assert not table._engine.region.array("readers")[:, 2].any()
        table.check_valid()


def test_validation_is_not_limited() -> None:
    with table_of(20, rate_limiter=gear.Queue(30), timeout=1) as table:
        module = gear.ReplayDataModule(table, batch_size=4, windows=WINDOW, val_fraction=0.3, device="cpu")
        module.setup()
        assert module.val_dataset is not None
        for _ in range(3):
            assert sum(len(batch["index"]) for batch in module.val_dataset) > 0
        assert int(table._engine.index.arrays.counters[NUM_SAMPLED]) == 0


def test_updates_decide_who_is_evicted() -> None:
    with table_of(10, max_trajectories=10, on_full="evict_lowest_priority") as table:
        data = dataset_of(table, sampler=gear.Prioritized(), batch_size=10)
        indices = table.indices()
        data.update_priority(indices, np.arange(10, 0, -1))
        for number in range(3):
            table.add(rows(20 + number, 3), priority=50)
        assert set(indices[:7].tolist()) <= set(table.indices().tolist())
        assert not set(indices[7:].tolist()) & set(table.indices()[:7].tolist())
        table.check_valid()


def chunked(table: gear.Table, steps: int) -> list[int]:
    """A stream of `steps` steps in chunks of 12 that have 8 in common: blocks of 4 are shared."""
    writer = table.writer(chunk_steps=12, overlap_steps=8)
    stream = rows(1, steps)
    indices = list(writer.append(stream))
    writer.discard()
    return indices


def test_a_shared_step_outlives_the_trajectory_that_it_belonged_to() -> None:
    with table_of() as table:
        indices = chunked(table, 28)
        data = dataset_of(
            table, sampler=gear.Prioritized(alpha=1.0, unit="step"), batch_size=64, windows=gear.Window(1)
        )
        data.sample()
        # Steps 8 to 11 belong to chunks 0, 1 and 2; this one gets all the weight.
        data.update_priority(np.array([indices[0]]), np.array([1e6]), anchor=np.array([9]))
        assert set(data.sample()["step"].reshape(-1).tolist()) == {9}
        order = [2, 0, 4]
        for place in order:
            table.remove(indices[place])
            batch = data.sample()
            assert (batch["step"] == 9).float().mean() > 0.99, "the priority stays with the step"
            assert set(batch["index"].tolist()) <= {int(i) for i in table.indices()}
        table.remove(indices[1])
        left = set(data.sample()["step"].reshape(-1).tolist())
        assert left <= set(range(12, 24)), "only chunk 3 is left"
        table.remove(indices[3])
        with pytest.raises(TableEmptyError):
            data.sample()
        assert table.stats().blocks_in_use == 0


def test_quantiles_of_priorities() -> None:
    with table_of(9) as table:
        data = dataset_of(table, sampler=gear.Prioritized(alpha=0.5))
        np.testing.assert_allclose(data.priority_quantiles([0, 0.5, 1]), [1, 5, 9], rtol=1e-5)
        with pytest.raises(SchemaError, match=r"shares is \[2\]"):
            data.priority_quantiles([2])
        with pytest.raises(SchemaError, match="does not draw by priority"):
            dataset_of(table).priority_quantiles([0.5])
    with table_of() as empty:
        assert np.isnan(dataset_of(empty, sampler=gear.TopK()).priority_quantiles([0.5])).all()
