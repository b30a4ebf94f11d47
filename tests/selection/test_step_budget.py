"""Batches of at most so many steps, against a plain loop over the lengths in the order of the draw."""

from __future__ import annotations

import gc
import itertools
import json
import math
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import examples
from dataset_common import iterating, nothing_left
from hypothesis import given, settings
from hypothesis import strategies as st
from options_common import nested, nested_table
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw

SCHEMA = {"token": gear.Column(torch.int32), "number": gear.Column(torch.int64, per="trajectory")}
ONCE = gear.Uniform(replacement=False)
WEIGHED = gear.Prioritized(alpha=1.0, normalize="table")


def make_table(lengths: Sequence[int], **options: Any) -> gear.Table:
    """Trajectory number i has lengths[i] steps, and priority i + 1."""
    sizes = {"max_steps": max(sum(lengths), 64), "max_trajectories": max(len(lengths), 8), "block_steps": 4}
    table = gear.Table.create(SCHEMA, **nested_table({**sizes, **options}))
    for number, length in enumerate(lengths):
        add(table, number, length)
    return table


def add(table: gear.Table, number: int, length: int) -> int:
    steps = {"token": torch.arange(length, dtype=torch.int32), "number": torch.tensor(number)}
    return table.add(steps, priority=number + 1.0)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given = {
        "windows": gear.Whole(),
        "layout": "packed",
        "device": "cpu",
        "seed": 5,
        "sampler": ONCE,
        **options,
    }
    return gear.ReplayDataset(table, **nested(given))


def numbers(batches: Any, count: int | None = None) -> list[list[int]]:
    """The trajectories of each batch, whose steps are checked."""
    found = []
    for batch in itertools.islice(batches, count):
        starts = batch["cu_seqlens"].tolist()
        assert batch["token"].tolist() == [
            step for a, b in itertools.pairwise(starts) for step in range(b - a)
        ]
        found.append(batch["number"].tolist())
    return found


def grouped(order: Sequence[int], lengths: Sequence[int], max_steps: int, lookahead: int) -> list[list[int]]:
    """The batches of trajectories that are drawn in this order."""
    batches, waiting = [], list(order)
    while waiting:
        batch, passed = [], []
        for place, number in enumerate(waiting):
            steps = sum(lengths[other] for other in batch)
            if max_steps in (steps, len(batch)) or len(passed) > lookahead:
                passed += waiting[place:]
                break
            (batch if steps + lengths[number] <= max_steps else passed).append(number)
        batches.append(batch)
        waiting = passed
    return batches


def drawn(table: gear.Table, sampler: Any, size: int, count: int) -> list[int]:
    """The trajectories that a sampler draws in batches of a size."""
    data = gear.ReplayDataset(
        table, windows=gear.Window(1), batch_size=size, device="cpu", seed=5, sampler=sampler,
        batches_per_epoch=math.inf, prefetch=0,
    )  # fmt: skip
    found: list[int] = []
    for batch in data:
        found += batch["number"].tolist()
        if len(found) >= count:
            return found[:count]
    raise AssertionError


LENGTHS = st.lists(st.integers(1, 30), min_size=1, max_size=200)


@given(
    lengths=LENGTHS,
    more=st.integers(0, 100),
    lookahead=st.integers(0, 12),
    sampler=st.sampled_from([ONCE, gear.Uniform(), gear.Fifo(False), gear.Lifo(False), WEIGHED]),
    prefetch=st.integers(0, 3),
)
def test_batches_are_those_of_the_plain_loop(
    lengths: list[int], more: int, lookahead: int, sampler: Any, prefetch: int
) -> None:
    max_steps = max(lengths) + more
    with make_table(lengths) as table:
        data = dataset(
            table, sampler=sampler, max_steps=max_steps, lookahead=lookahead, prefetch=prefetch, seed=5
        )
        order = drawn(table, sampler, 16 if sampler is WEIGHED else 64, len(lengths))
        expected = grouped(order, lengths, max_steps, lookahead)
        found = numbers(data)
        assert found == expected
        assert sorted(itertools.chain(*found)) == sorted(order)  # every one exactly once
        steps = sum(lengths[number] for number in order)
        assert data.batch_fill == pytest.approx(steps / len(expected) / max_steps)
        stats = data.stats()
        assert (stats["fill"], stats["gone"], stats["skipped"]) == (data.batch_fill, 0, 0)


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("sampler", [ONCE, gear.Uniform()], ids=repr)
def test_workers_deliver_the_same_batches(workers: int, sampler: Any) -> None:
    lengths = np.random.default_rng(2).integers(1, 40, 100).tolist()
    with make_table(lengths, name=f"budget-{workers}") as table:
        try:
            data = dataset(table, sampler=sampler, max_steps=120, lookahead=2)
            expected = numbers(data)
            data.set_epoch(0)
            assert numbers(DataLoader(data, batch_size=None, num_workers=workers)) == expected
        finally:
            table.unlink()


def test_ranks_take_turns() -> None:
    lengths = np.random.default_rng(3).integers(1, 40, 100).tolist()
    with make_table(lengths) as table:
        options = {"max_steps": 120, "sampler": gear.Uniform()}
        together = numbers(dataset(table, **options, batches_per_epoch=9))
        ranks = [
            numbers(dataset(table, **options, batches_per_epoch=3, rank=rank, world_size=3))
            for rank in range(3)
        ]
        assert [ranks[i % 3][i // 3] for i in range(9)] == together
        with pytest.raises(
            SchemaError, match=r"=Steps\(\.\.\.\) was given on 3 ranks; expected batches_per_epoch"
        ):
            next(iter(dataset(table, **options, rank=0, world_size=3)))


def test_a_trajectory_that_is_too_long() -> None:
    lengths = [5, 9, 30, 4, 12]
    with make_table(lengths) as table:
        fifo = {"sampler": gear.Fifo(False), "max_steps": 12}
        data = dataset(table, **fifo)
        with pytest.raises(
            SchemaError, match=r"The trajectory of index 2 has 30 steps, more than max_steps=12\."
        ):
            list(data)
        batches = list(dataset(table, **fifo, too_long="truncate", copy=True))
        assert [batch["number"].tolist() for batch in batches] == [[0], [1], [2], [3], [4]]
        assert batches[2]["token"].tolist() == list(range(12))
        data = dataset(table, **fifo, too_long="skip")
        assert numbers(data) == [[0], [1], [3], [4]]
        assert data.stats()["skipped"] == 1
    with make_table([30, 40]) as table:
        assert numbers(dataset(table, max_steps=12, too_long="skip")) == []
        data = dataset(table, max_steps=12, too_long="skip", sampler=gear.Uniform(), batches_per_epoch=3)
        with pytest.raises(SchemaError, match="too_long='skip' leaves none"):
            next(iter(data))


@given(
    lengths=st.lists(st.integers(1, 20), min_size=5, max_size=60),
    more=st.integers(0, 30),
    lookahead=st.integers(0, 5),
    removals=st.lists(st.lists(st.integers(0, 60), max_size=4), max_size=8),
)
def test_writers_between_batches(
    lengths: list[int], more: int, lookahead: int, removals: list[list[int]]
) -> None:
    """Other trajectories take the slots of some that wait: those are left out, all others are delivered."""
    max_steps = max(lengths) + more
    with make_table(lengths, max_steps=2000, max_trajectories=100) as table:
        waiting, expected, found, place = list(range(len(lengths))), [], [], dict(enumerate(table.indices()))
        data = dataset(table, sampler=gear.Fifo(False), max_steps=max_steps, lookahead=lookahead, prefetch=0)
        number, gone, counted, iterator = len(lengths), 0, 0, iter(data)
        for batch in iterator:
            counted = gone
            expected.append(grouped(waiting, lengths, max_steps, lookahead)[0])
            found += numbers([batch])
            waiting = [other for other in waiting if other not in expected[-1]]
            for chosen in removals.pop() if removals else []:
                if chosen in place:
                    table.remove([int(place.pop(chosen))])
                    add(table, number, 1 + number % 7)
                    number += 1
                    gone += chosen in waiting
                    waiting = [other for other in waiting if other != chosen]
            if not waiting:
                break
        rest = numbers(iterator)
        assert found == expected
        assert rest == []
        assert data.stats()["gone"] == counted


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"max_steps": 0}, "max_steps is 0; expected an integer of at least 1"),
        ({"max_steps": 2**31}, "expected less than 2"),
        (
            {"max_steps": 5, "layout": "padded", "windows": gear.Window(3)},
            "layout='padded'; expected layout='packed'",
        ),
        ({"max_steps": 5, "lookahead": -1}, "lookahead is -1"),
        ({"max_steps": 5, "too_long": "cut"}, "too_long is 'cut'; expected 'error', 'truncate' or 'skip'"),
        ({"max_steps": 5, "drop_last": True}, "drop_last was given with Steps"),
        ({"max_steps": 5, "sampler": gear.Prioritized()}, "expected Prioritized"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with make_table([3, 4]) as table, pytest.raises(SchemaError, match=message):
        dataset(table, **options)


def test_what_a_dataset_of_steps_cannot_do() -> None:
    with make_table([3, 4]) as table:
        data = dataset(table, max_steps=7)
        with pytest.raises(
            SchemaError, match=r"sample\(batch_size=3\) was called on a dataset with batch_size=Steps"
        ):
            data.sample(3)
        with pytest.raises(SchemaError, match="on 2 ranks; expected no batch_size, one rank"):
            dataset(table, max_steps=7, rank=1, world_size=2).sample()
        with pytest.raises(TypeError, match=r"with batch_size=Steps\(\.\.\.\) it depends on what is drawn"):
            len(data)
        assert len(dataset(table, max_steps=7, batches_per_epoch=4)) == 4
        assert "batches of at most 7 steps on cpu" in repr(data)
        state = data.state_dict()
        with pytest.raises(SchemaError, match="The state belongs to a dataset with other options"):
            dataset(table, max_steps=8).load_state_dict(state)
        with pytest.raises(SchemaError, match="The state of max_steps is 'x'"):
            data.load_state_dict({**state, "budget": "x"})


@settings(max_examples=examples(20))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=80),
    lookahead=st.integers(0, 6),
    sampler=st.sampled_from([ONCE, gear.Uniform(), gear.Lifo(False), WEIGHED]),
    seen=st.integers(0, 12),
    iterates=st.booleans(),
)
def test_sampled_batches_continue_one_another(
    lengths: list[int], lookahead: int, sampler: Any, seen: int, iterates: bool
) -> None:
    options: dict[str, Any] = {"sampler": sampler, "max_steps": 35, "lookahead": lookahead}
    with make_table(lengths) as table:
        data, resumed, other = (dataset(table, **options) for _ in range(3))
        expected = numbers(iter(data.sample, None), 30)
        if sampler is ONCE or isinstance(
            sampler, gear.Lifo
        ):  # a pass has each once, and then the next begins
            order = list(itertools.chain(*expected))
            most, counts = len(order) // len(lengths), np.bincount(order, minlength=len(lengths))
            drawn = len(order) + lookahead + 1  # at most so many rows wait: passes overlap
            assert counts.max() <= drawn // len(lengths) + 1
            if lookahead == 0:
                whole = order[: most * len(lengths)]
                for turn in range(most):
                    assert sorted(whole[turn * len(lengths) :][: len(lengths)]) == list(range(len(lengths)))
        for batch in expected:
            assert 0 < sum(lengths[number] for number in batch) <= 35
        assert numbers(iter(other.sample, None), seen) == expected[:seen]
        if iterates:  # has no effect on the stream of `sample`, nor has that on an iteration
            assert numbers(other, 3) == numbers(dataset(table, **options), 3)
        resumed.load_state_dict(json.loads(json.dumps(other.state_dict(), default=torch.Tensor.tolist))
                                if sampler is not WEIGHED else other.state_dict())  # fmt: skip
        assert numbers(iter(resumed.sample, None), 30 - seen) == expected[seen:]
        assert numbers(iter(other.sample, None), 30 - seen) == expected[seen:]


def endless(table: gear.Table, sampler: Any) -> Iterator[int]:
    """The trajectories that calls of `sample` draw, pass after pass."""
    if sampler is WEIGHED:
        data = gear.ReplayDataset(
            table, windows=gear.Window(1), batch_size=16, device="cpu", seed=5, sampler=sampler
        )
        while True:
            yield from data.sample()["number"].tolist()
    view = table._engine.reader().snapshot()
    turn = first = 0
    for number in itertools.count():
        count = min(64, len(view.slots) - first) if sampler.passes else 64
        draw = Draw(5, SAMPLE_EPOCH, number, first, count, turn, 0)
        yield from sampler.items(len(view.slots), draw).tolist()  # the oldest trajectory is number 0
        first += count
        if first >= len(view.slots):
            turn, first = turn + 1, 0


@settings(max_examples=examples(30))
@given(
    lengths=st.lists(st.integers(1, 30), min_size=1, max_size=150),
    more=st.integers(0, 40),
    lookahead=st.integers(0, 6),
    sampler=st.sampled_from([ONCE, gear.Uniform(), gear.Fifo(False), gear.Lifo(False), WEIGHED]),
)
def test_sampled_batches_are_those_of_the_plain_loop(
    lengths: list[int], more: int, lookahead: int, sampler: Any
) -> None:
    max_steps, count = max(lengths) + more, 12
    with make_table(lengths) as table:
        most = count * (max_steps + 1) + lookahead  # more than so many batches can take or pass over
        order = list(itertools.islice(endless(table, sampler), most))
        expected = grouped(order, lengths, max_steps, lookahead)[:count]
        data = dataset(table, sampler=sampler, max_steps=max_steps, lookahead=lookahead)
        assert numbers(iter(data.sample, None), count) == expected


def test_a_sampled_pass_has_the_items_at_its_start_and_goes_on_after_an_error() -> None:
    with make_table([5] * 12, max_steps=200, max_trajectories=20) as table:
        data = dataset(table, max_steps=10)
        first = numbers(iter(data.sample, None), 2)
        for number in range(12, 18):
            add(table, number, 5)
        add(table, 18, 11)  # longer than a batch
        first += numbers(iter(data.sample, None), 4)
        assert sorted(itertools.chain(*first)) == list(range(12))
        for _ in range(2):
            with pytest.raises(SchemaError, match="has 11 steps, more than max_steps=10"):
                numbers(iter(data.sample, None), 20)
        table.remove([18])
        later = numbers(iter(data.sample, None), 40)
        assert set(itertools.chain(*later)) == set(range(18))
        nothing_left(table)


def test_a_batch_of_many_draws_takes_one_read_ticket() -> None:
    """20,000 rows of one step are more draws than there are tickets."""
    with make_table([1] * 50) as table:
        data = dataset(table, max_steps=20_000, sampler=gear.Uniform(), batches_per_epoch=2, prefetch=0)
        for batch in data:
            assert len(batch["index"]) == 20_000


def test_tables_that_do_not_fit() -> None:
    message = r"Steps\(max_steps=.*\) was given with a table that has max_times_sampled"
    with make_table([3], max_times_sampled=2) as table, pytest.raises(SchemaError, match=message):
        dataset(table, max_steps=7)
    for sampler in (ONCE, gear.Uniform(), WEIGHED):
        for batches in (None, 3):
            with gear.Table.create(SCHEMA, max_steps=64, max_trajectories=4) as table:
                data = dataset(table, max_steps=7, sampler=sampler, batches_per_epoch=batches, prefetch=0)
                with pytest.raises(TableEmptyError, match="The table is empty"):
                    next(iter(data))


def test_workers_and_a_rate_limiter() -> None:
    limiter = gear.MinSize(2)
    with make_table([3, 4, 5], name="budget-limited", rate_limiter=limiter) as table:
        try:
            data = dataset(table, max_steps=7, sampler=gear.Fifo(False))
            assert numbers(data) == [[0, 1], [2]]
            message = "2 DataLoader workers and a table with a rate limiter"
            loader: Any = DataLoader(data, batch_size=None, num_workers=2)
            with iterating(loader) as batches, pytest.raises(SchemaError, match=message):
                list(batches)
        finally:
            table.unlink()


@pytest.mark.parametrize("prefetch", [0, 3])
def test_an_iteration_that_is_broken_off_leaves_nothing(prefetch: int) -> None:
    lengths = np.random.default_rng(6).integers(1, 40, 300).tolist()
    with make_table(lengths) as table:
        data = dataset(table, max_steps=60, lookahead=2, prefetch=prefetch)
        for stop in (1, 2, 7):
            iterator = iter(data)
            numbers(iterator, stop)
            del iterator
            data.settle()
            gc.collect()
            nothing_left(table)
        data = dataset(table, max_steps=20, prefetch=prefetch)
        with pytest.raises(SchemaError, match="more than max_steps=20"):
            numbers(data)
        nothing_left(table)
