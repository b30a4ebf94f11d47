"""Drawing from a table that others write: rate limiters, counted samples, `sample_info`, shared blocks."""

from __future__ import annotations

import collections
import itertools
import threading
import time
from typing import Any

import numpy as np
import pytest
import torch
from table_common import COLUMNS, rows

import gear_loader as gear
from gear_loader.errors import PriorityError, RateLimitError, SchemaError, TableEmptyError
from gear_loader.storage.counters import NUM_SAMPLED

SIZES: dict[str, Any] = {"max_steps": 400, "max_trajectories": 60, "block_steps": 4}
WINDOW = gear.Window(length=3, offset=-1)


def table_of(count: int = 0, **options: Any) -> gear.Table:
    """A table of `count` trajectories of 2 to 6 steps; trajectory i has the number and priority i + 1."""
    table = gear.Table.create(COLUMNS, **{**SIZES, **options})
    for i in range(count):
        table.add(rows(i + 1, 2 + i % 5), priority=i + 1)
    return table


def dataset_of(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table, **{"batch_size": 4, "windows": WINDOW, "device": "cpu", "prefetch": 0, **options}
    )


def numbers_in(batch: dict[str, Any]) -> list[int]:
    """The trajectory numbers of a batch's rows: what stands at their anchors."""
    return batch["number"][:, 1].tolist()


SELECTORS = [
    gear.Uniform(),
    gear.Uniform(replacement=False),
    gear.Uniform(unit="step"),
    gear.Fifo(),
    gear.Lifo(),
    gear.Lifo(unit="step"),
    gear.Prioritized(),
    gear.Prioritized(replacement=False),
    gear.Prioritized(unit="step"),
    gear.TopK(),
    gear.TopK(largest=False, unit="step"),
]

# sample_info -----------------------------------------------------------------------------------------


def probability_of(
    selector: gear.selectors.Selector, table: gear.Table, batch: dict[str, Any]
) -> list[float]:
    """With which probability each row of a batch was drawn."""
    if isinstance(selector, gear.Uniform):
        items = len(table) if selector.unit == "trajectory" else table.num_steps
        return [1 / items] * len(batch["index"])
    if not isinstance(selector, gear.Prioritized):
        return [1.0] * len(batch["index"])
    lengths = dict(zip(table.indices().tolist(), table.lengths().tolist(), strict=True))
    weights = {
        index: float(table.reader().arrays.priority[index]) ** selector.alpha
        * (lengths[index] if selector.unit == "step" else 1)
        for index in lengths
    }
    each = {index: float(table.reader().arrays.priority[index]) ** selector.alpha for index in lengths}
    return [each[index] / sum(weights.values()) for index in batch["index"].tolist()]


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_sample_info_of_every_selector(selector: gear.selectors.Selector, prefetch: int) -> None:
    with table_of(17) as table:
        data = dataset_of(table, selector=selector, sample_info=True, prefetch=prefetch, batches_per_epoch=9)
        counts: collections.Counter[int] = collections.Counter()
        for batch in data:
            info = batch["sample_info"]
            assert {key: (value.dtype, len(value)) for key, value in info.items()} == {
                "times_sampled": (torch.int64, len(batch["index"])),
                "age": (torch.int64, len(batch["index"])),
                "probability": (torch.float32, len(batch["index"])),
                "age_seconds": (torch.float32, len(batch["index"])),
            }
            for row, number in enumerate(numbers_in(batch)):
                counts[number] += 1
                assert info["times_sampled"][row] == counts[number]
                assert info["age"][row] == 17 - number
            expected = torch.tensor(probability_of(selector, table, batch))
            torch.testing.assert_close(info["probability"], expected)
            assert ((info["age_seconds"] > 0) & (info["age_seconds"] < 60)).all()
        assert sum(counts.values()) >= 32


def test_without_sample_info_nothing_is_counted() -> None:
    with table_of(5) as table:
        batch = dataset_of(table).sample()
        assert "sample_info" not in batch
        assert not table.region.array("sampled").any()
        info = dataset_of(table, sample_info=True).sample()["sample_info"]
        assert info["times_sampled"].min() == 1
        assert table.stats().num_sampled == 8


def test_ages_grow_as_others_add() -> None:
    with table_of(1) as table:
        data = dataset_of(table, sample_info=True, selector=gear.Fifo())
        for added in range(5):
            assert data.sample()["sample_info"]["age"].tolist()[0] == added
            table.add(rows(10 + added, 3))


def test_an_index_that_was_used_again_starts_at_zero() -> None:
    with table_of(1) as table:
        data = dataset_of(table, sample_info=True)
        assert data.sample()["sample_info"]["times_sampled"].tolist() == [1, 2, 3, 4]
        table.remove(0)
        assert table.add(rows(2, 3)) == 0
        assert data.sample()["sample_info"]["times_sampled"].tolist() == [1, 2, 3, 4]


# max_times_sampled -----------------------------------------------------------------------------------


@pytest.mark.parametrize("limit", [1, 3])
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_each_is_drawn_so_often_and_not_once_more(selector: gear.selectors.Selector, limit: int) -> None:
    with table_of(16, max_times_sampled=limit, timeout=0.05) as table:
        data = dataset_of(table, selector=selector, sample_info=True, batches_per_epoch=1000)
        counts: collections.Counter[int] = collections.Counter()
        with pytest.raises((TableEmptyError, PriorityError)):  # noqa: PT012 - it comes some time
            for batch in data:
                counts.update(numbers_in(batch))
                for row, number in enumerate(numbers_in(batch)):
                    assert batch["sample_info"]["times_sampled"][row] <= limit, number
                assert max(counts.values()) <= limit
                table.check_valid()
        # The last batch may have lacked rows; what it had taken by then is gone too.
        assert sum(counts.values()) >= 16 * limit - 3 * 4
        assert len(table) <= 3
        assert table.stats().num_expired == 16 - len(table)
        table.check_valid()


def test_a_batch_that_lacks_rows_waits_for_more() -> None:
    with table_of(6, max_times_sampled=1, timeout=20) as table:
        for selector in (gear.Fifo(), gear.Uniform(), gear.Prioritized()):
            data = dataset_of(table, selector=selector)
            seen = numbers_in(data.sample())
            adding = threading.Timer(0.1, lambda: [table.add(rows(100 + i, 3)) for i in range(6)])
            adding.start()
            seen += numbers_in(data.sample())
            adding.join()
            assert len(set(seen)) == 8
            table.remove(table.indices())
            table.extend([rows(50 + i, 3) for i in range(6)])


@pytest.mark.parametrize("selector", [gear.Uniform(), gear.Fifo(), gear.Prioritized()], ids=repr)
def test_two_readers_at_once_share_what_there_is(selector: gear.selectors.Selector) -> None:
    with gear.Table.create(
        COLUMNS, max_steps=3000, max_trajectories=800, block_steps=4, max_times_sampled=2, timeout=0.3
    ) as table:
        for i in range(800):
            table.add(rows(i, 3))
        seen: list[list[int]] = [[], []]

        def read(reader: int) -> None:
            data = dataset_of(table, selector=selector, batch_size=16, seed=reader, batches_per_epoch=10_000)
            try:
                for batch in data:
                    seen[reader] += numbers_in(batch)
            except TableEmptyError:
                pass

        threads = [threading.Thread(target=read, args=(reader,)) for reader in (0, 1)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        counts = collections.Counter(itertools.chain(*seen))
        assert set(counts.values()) <= {1, 2}
        assert sum(counts.values()) >= 1600 - 2 * 16
        table.check_valid()


# Rate limiters ---------------------------------------------------------------------------------------


def test_min_size_is_waited_for() -> None:
    with table_of(rate_limiter=gear.MinSize(5), timeout=20) as table:
        adding = threading.Timer(0.1, lambda: [table.add(rows(i, 3)) for i in range(5)])
        for data in (dataset_of(table), dataset_of(table, prefetch=2, selector=gear.Prioritized())):
            if not adding.is_alive() and len(table) == 0:
                adding.start()
            batch = next(iter(data))
            assert len(table) >= 5
            assert len(batch["index"]) == 4
        adding.join()
        assert table.stats().sample_wait > 0.05


def test_an_error_at_the_deadline_names_the_limiter_and_its_counts() -> None:
    with table_of(3, rate_limiter=gear.MinSize(5), timeout=0.05) as table:
        for data in (
            dataset_of(table),
            dataset_of(table, prefetch=2),
            dataset_of(table, selector=gear.TopK()),
        ):
            with pytest.raises(RateLimitError, match=r"Waited 0.05 s in vain\. MinSize\(.*size 3"):
                data.sample()
            with pytest.raises(RateLimitError, match="MinSize"):
                next(iter(data))
        assert table.stats().num_sampled == 0
        assert not table.region.array("readers")[:, 2].any()


def test_who_is_not_limited_does_not_count() -> None:
    with table_of(3, rate_limiter=gear.MinSize(5), timeout=0.05) as table:
        dataset_of(table, rate_limited=False).sample()
        assert table.stats().num_sampled == 0


@pytest.mark.parametrize("selector", [gear.Uniform(), gear.Fifo(), gear.Prioritized()], ids=repr)
def test_samples_and_insertions_keep_their_ratio(selector: gear.selectors.Selector) -> None:
    limiter = gear.SampleToInsertRatio(2.0, 5, error_buffer=12)
    with table_of(rate_limiter=limiter, timeout=0.02, on_full="evict_oldest") as table:
        data = dataset_of(table, selector=selector)
        random = np.random.default_rng(0)
        inserted = sampled = refused = 0
        for i in range(400):
            if random.random() < 0.5:
                allowed = inserted < 5 or (inserted + 1) * 2 - sampled <= 10 + 12
                if allowed:
                    table.add(rows(i, 2))
                    inserted += 1
                elif refused < 12:
                    refused += 1
                    before = table.stats()
                    with pytest.raises(RateLimitError, match="SampleToInsertRatio"):
                        table.add(rows(i, 2))
                    assert table.stats().num_trajectories == before.num_trajectories
                    assert table.stats().blocks_in_use == before.blocks_in_use
            else:
                allowed = inserted >= 5 and inserted * 2 - sampled - 4 >= 10 - 12
                if allowed:
                    data.sample()
                    sampled += 4
                elif refused < 12:
                    refused += 1
                    with pytest.raises(RateLimitError, match="SampleToInsertRatio"):
                        data.sample()
            stats = table.stats()
            assert (stats.num_inserted, stats.num_sampled) == (inserted, sampled)
        assert refused == 12
        assert sampled > 200


def test_a_draw_that_fails_does_not_count() -> None:
    limiter = gear.SampleToInsertRatio(4, 1, error_buffer=50)
    with table_of(rate_limiter=limiter) as table:
        for i in range(5):
            table.add(rows(i, 3), priority=0)
        nothing = dataset_of(table, subset=lambda sequences: sequences < 0)
        for data in (dataset_of(table, selector=gear.Prioritized()), nothing):
            for _ in range(12):
                with pytest.raises((PriorityError, TableEmptyError)):
                    data.sample()
        assert table.stats().num_sampled == 0
        assert not table.region.array("readers")[:, 2].any()


def test_batches_that_can_never_be_drawn_are_refused_at_once() -> None:
    with table_of(rate_limiter=gear.Queue(6)) as table:
        with pytest.raises(SchemaError, match="Queue"):
            dataset_of(table, batch_size=7)
        data = dataset_of(table, batch_size=6)
        with pytest.raises(SchemaError, match="Queue"):
            data.sample(7)
    with pytest.raises(SchemaError, match=r"MinSize.* waits for more trajectories than the table can hold"):
        table_of(rate_limiter=gear.MinSize(61))


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_queue_gives_each_once_and_in_order(prefetch: int) -> None:
    with table_of(rate_limiter=gear.Queue(20), max_times_sampled=1, timeout=30) as table:
        actor = threading.Thread(target=lambda: [table.add(rows(i, 2)) for i in range(120)])
        actor.start()
        data = dataset_of(
            table, selector=gear.Fifo(), anchor="first", prefetch=prefetch, batches_per_epoch=30
        )
        assert [number for batch in data for number in numbers_in(batch)] == list(range(120))
        actor.join()
        assert len(table) == 0
        assert table.stats().num_sampled == table.stats().num_inserted == 120


@pytest.mark.parametrize("selector", [gear.Uniform(), gear.Prioritized()], ids=repr)
def test_an_iterator_is_closed_although_its_thread_waits(selector: gear.selectors.Selector) -> None:
    with table_of(8, rate_limiter=gear.SampleToInsertRatio(1.0, 4, error_buffer=9), timeout=300) as table:
        data = dataset_of(table, selector=selector, prefetch=2, batches_per_epoch=100)
        iterator = iter(data)
        next(iterator)
        time.sleep(0.05)
        before = time.monotonic()
        iterator.close()  # type: ignore[attr-defined]
        assert time.monotonic() - before < 60
        assert not table.region.array("readers")[:, 2].any()
        table.check_valid()


def test_validation_is_not_limited() -> None:
    with table_of(20, rate_limiter=gear.Queue(30), timeout=1) as table:
        module = gear.ReplayDataModule(table, batch_size=4, windows=WINDOW, val_fraction=0.3, device="cpu")
        module.setup()
        assert module.val_dataset is not None
        for _ in range(3):
            assert sum(len(batch["index"]) for batch in module.val_dataset) > 0
        assert int(table.index.arrays.counters[NUM_SAMPLED]) == 0


# Priorities that the table keeps ---------------------------------------------------------------------


def test_updates_decide_who_is_evicted() -> None:
    with table_of(10, max_trajectories=10, on_full="evict_lowest_priority") as table:
        data = dataset_of(table, selector=gear.Prioritized(), batch_size=10)
        indices = table.indices()
        data.update_priority(indices, np.arange(10, 0, -1))
        for number in range(3):
            table.add(rows(20 + number, 3), priority=50)
        assert set(indices[:7].tolist()) <= set(table.indices().tolist())
        assert not set(indices[7:].tolist()) & set(table.indices()[:7].tolist())
        table.check_valid()


def test_an_update_of_what_is_gone_changes_nothing_of_its_successor() -> None:
    with table_of(2, max_trajectories=2, on_full="evict_lowest_priority") as table:
        data = dataset_of(table, selector=gear.Prioritized())
        batch = data.sample()
        gone = int(table.indices()[0])
        generation = batch["generation"].clone().fill_(int(table.reader().slot_states()[1][gone]))
        table.remove(gone)
        assert table.add(rows(9, 3), priority=7) == gone
        data.update_priority(np.full(4, gone), np.full(4, 0.5), generation=generation)
        assert table.reader().arrays.priority[gone] == 7
        assert data.num_stale == 4


# Trajectories that share steps -----------------------------------------------------------------------


def chunked(table: gear.Table, steps: int) -> list[int]:
    """A stream of `steps` steps in chunks of 12 that have 8 in common: blocks of 4 are shared."""
    writer = table.writer(chunk_steps=12, overlap_steps=8)
    stream = rows(1, steps)
    indices = list(writer.append(stream))
    writer.discard()
    return indices


def test_steps_that_two_trajectories_share_are_one_item() -> None:
    with table_of() as table:
        indices = chunked(table, 28)
        assert len(indices) == 5
        assert table.stats().blocks_in_use == 7
        data = dataset_of(
            table, selector=gear.Prioritized(alpha=1.0, unit="step"), batch_size=64, windows=gear.Window(1)
        )
        counts: collections.Counter[int] = collections.Counter()
        for _ in range(60):
            batch = data.sample()
            counts.update(batch["step"][:, 0].tolist())
        assert set(counts) == set(range(28))
        expected = 60 * 64 / 28
        assert all(abs(count - expected) < 6 * expected**0.5 for count in counts.values())


def test_a_shared_step_outlives_the_trajectory_that_it_belonged_to() -> None:
    with table_of() as table:
        indices = chunked(table, 28)
        data = dataset_of(
            table, selector=gear.Prioritized(alpha=1.0, unit="step"), batch_size=64, windows=gear.Window(1)
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


def test_chunks_that_come_and_go_while_steps_are_drawn() -> None:
    random = np.random.default_rng(3)
    with table_of(on_full="evict_oldest", max_steps=200) as table:
        data = dataset_of(
            table, selector=gear.Prioritized(unit="step"), batch_size=32, windows=gear.Window(3, offset=-1)
        )
        writers = [table.writer(chunk_steps=12, overlap_steps=8) for _ in range(3)]
        streams = [rows(number + 1, 4000) for number in range(3)]
        places = [0, 0, 0]
        writers[0].append({name: values[:12] for name, values in streams[0].items()})
        places[0] = 12
        for _ in range(300):
            which = int(random.integers(3))
            count = int(random.integers(1, 9))
            part = {
                name: values[places[which] : places[which] + count] for name, values in streams[which].items()
            }
            writers[which].append(part)
            places[which] += count
            if random.random() < 0.1 and len(table) > 2:
                table.remove(int(random.choice(table.indices())))
            batch = data.sample()
            number, step = batch["number"][:, 1], batch["step"][:, 1]
            first = [int(table[int(i)]["step"][0]) for i in batch["index"]]
            assert (step == torch.tensor(first) + batch["anchor"]).all()
            assert ((number >= 1) & (number <= 3)).all()
            data.update_priority(batch, torch.rand(32))
            table.check_valid()


def test_quantiles_of_priorities() -> None:
    with table_of(9) as table:
        data = dataset_of(table, selector=gear.Prioritized(alpha=0.5))
        np.testing.assert_allclose(data.priority_quantiles([0, 0.5, 1]), [1, 5, 9], rtol=1e-5)
        with pytest.raises(SchemaError, match=r"shares is \[2\]"):
            data.priority_quantiles([2])
        with pytest.raises(SchemaError, match="does not go by priorities"):
            dataset_of(table).priority_quantiles([0.5])
    with table_of() as empty:
        assert np.isnan(dataset_of(empty, selector=gear.TopK()).priority_quantiles([0.5])).all()
