"""`ReplayDataset` with `Prioritized`, `TopK`, `Fifo` and `Lifo`: what is drawn, weights, updates, order, errors."""

from __future__ import annotations

import itertools
import math
import multiprocessing
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from dataset_common import (
    LENGTHS,
    append_all,
    chi_square,
    chi_square_limit,
    copies,
    episode,
    make_table,
    named_table,
    nothing_left,
    same_batches,
)
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.collection.collector import Collector
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.errors import PriorityError, SchemaError, StaleIndexError, TableEmptyError

TINY = float(np.finfo(np.float32).tiny)
UNITS = ("trajectory", "step")
NUMBERS = range(len(LENGTHS))
STEPS = [(number, step) for number, length in enumerate(LENGTHS) for step in range(length)]
Item = tuple[int, int]  # number of the trajectory, and the step; 0 where an item is a trajectory

pytestmark = [
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """Twelve trajectories in as many slots, 93 steps, blocks of four; two slots more."""
    with make_table(max_trajectories=14, max_steps=140) as table:
        yield table
        nothing_left(table)


@pytest.fixture(params=["thread", "stream"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How batches are prepared ahead: by a thread, or by the caller as for a GPU (here with nothing asynchronous)."""
    if request.param == "stream":
        monkeypatch.setattr(Prefetcher, "_ahead_in_thread", Prefetcher._ahead_on_stream)
    return request.param


def dataset(table: gear.Table, selector: gear.Selector, **options: Any) -> gear.ReplayDataset:
    settings = {"batch_size": 8, "windows": gear.Window(1), "device": "cpu", "seed": 3, "prefetch": 0}
    return gear.ReplayDataset(table, selector=selector, **{**settings, **options})


def items_of(batch: Mapping[str, Any], unit: str) -> list[Item]:
    """The items of a batch's rows; fails unless every row is in itself what `episode` made."""
    number, step = batch["observation"][:, 0, 0].long(), batch["anchor"]
    assert torch.equal(batch["observation"][:, 0, 1].long(), step)
    assert torch.equal(batch["observation"][:, 0, 2], (number + step / 4096).float())
    assert torch.equal(batch["reward"][:, 0], number * 4096.0 + step)
    assert batch["mask"].all()
    steps = step.tolist() if unit == "step" else [0] * len(step)
    return list(zip(number.tolist(), steps, strict=True))


def numbers_of(batch: Mapping[str, Any]) -> list[int]:
    return [number for number, _ in items_of(batch, "trajectory")]


def items_in(unit: str, lengths: Sequence[int] = LENGTHS) -> list[Item]:
    """All items of a table of trajectories of these lengths."""
    if unit == "trajectory":
        return [(number, 0) for number in range(len(lengths))]
    return [(number, step) for number, length in enumerate(lengths) for step in range(length)]


def leaves_of(data: gear.ReplayDataset) -> dict[Item, float]:
    """What the items weigh, by (number, step) of trajectories whose number is their sequence number."""
    state = data.state_dict()["priorities"]
    sequences, lengths, leaves = (state[name].tolist() for name in ("sequences", "lengths", "leaves"))
    if data.selector.unit == "trajectory":
        return dict(zip([(sequence, 0) for sequence in sequences], leaves, strict=True))
    steps = [(s, step) for s, length in zip(sequences, lengths, strict=True) for step in range(length)]
    return dict(zip(steps, leaves, strict=True))


def everything(data: gear.ReplayDataset) -> tuple[Any, ...]:
    """All that an update could change."""
    return leaves_of(data), data.state_dict()["priorities"]["maximum"], data.num_stale


def assign(data: gear.ReplayDataset, priorities: Mapping[Item, float], **options: Any) -> None:
    """Set priorities of items of a table whose trajectories lie in the slots of their numbers."""
    data.state_dict()  # a look at the table
    index = [number for number, _ in priorities]
    anchor = np.array([step for _, step in priorities]) if data.selector.unit == "step" else None
    data.update_priority(index, list(priorities.values()), anchor=anchor, **options)


def some_priorities(unit: str, seed: int = 0) -> dict[Item, float]:
    """Priorities from 0.25 to 4, every seventh 0, as float32 holds them."""
    items = items_in(unit)
    values = 4 ** np.random.default_rng(seed).uniform(-1, 1, len(items)).astype(np.float32)
    values[3::7] = 0
    return dict(zip(items, values.tolist(), strict=True))


def weights_of(priorities: Mapping[Item, float], alpha: float, eps: float) -> dict[Item, float]:
    """(priority + eps) ** alpha, 0 for 0."""
    return {item: (p + eps) ** alpha if p + eps > 0 else 0.0 for item, p in priorities.items()}


# ---------------------------------------------------------------- frequencies


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(
    ("alpha", "eps"), [(0, 0), (0, 0.1), (0.6, 0), (1, 0), (0.6, 0.25), (1, 1.0), (2, 0)]
)
def test_items_are_drawn_in_proportion_to_their_weights(
    table: gear.Table, unit: Any, alpha: float, eps: float
) -> None:
    data = dataset(table, gear.Prioritized(alpha, eps=eps, unit=unit), batch_size=1000)
    priorities = some_priorities(unit)
    assign(data, priorities)
    weights = weights_of(priorities, alpha, eps)
    observed = dict.fromkeys(weights, 0)
    for _ in range(40):
        for item in items_of(data.sample(), unit):
            observed[item] += 1
    never = [item for item, weight in weights.items() if weight == 0]
    assert bool(never) == (eps == 0)
    assert [observed[item] for item in never] == [0] * len(never)
    seen = [item for item, weight in weights.items() if weight > 0]
    total = math.fsum(weights.values())
    expected = [40_000 * weights[item] / total for item in seen]
    assert chi_square([observed[item] for item in seen], expected) < chi_square_limit(len(seen) - 1)


@pytest.mark.parametrize("unit", UNITS)
def test_without_replacement_rows_follow_one_another_as_from_an_urn(unit: Any) -> None:
    weights = [1.0, 1.5, 2.0, 2.5, 3.0]
    lengths = [1] * 5 if unit == "trajectory" else [2, 3]
    with make_table(lengths) as table:
        selector = gear.Prioritized(1, replacement=False, unit=unit)
        data = dataset(table, selector, batch_size=3, windows={"observation": gear.Window(1)})
        items = items_in(unit, lengths)
        assign(data, dict(zip(items, weights, strict=True)))
        places = {item: place for place, item in enumerate(items)}
        observed = np.zeros((5, 5, 5))
        for _ in range(6000):
            batch = data.sample()
            steps = batch["anchor"].tolist() if unit == "step" else [0] * 3
            drawn = zip(batch["index"].tolist(), steps, strict=True)
            observed[tuple(places[item] for item in drawn)] += 1
    expected = np.zeros((5, 5, 5))
    for a, b, c in itertools.permutations(range(5), 3):
        first, second, third = weights[a], weights[b], weights[c]
        expected[a, b, c] = 6000 * first / 10 * second / (10 - first) * third / (10 - first - second)
    assert observed[expected == 0].sum() == 0
    assert chi_square(observed[expected > 0], expected[expected > 0]) < chi_square_limit(59)


@pytest.mark.parametrize("unit", UNITS)
def test_without_replacement_a_batch_holds_no_item_twice(table: gear.Table, unit: Any) -> None:
    priorities = some_priorities(unit)
    possible = sorted(item for item, priority in priorities.items() if priority > 0)
    for size in (1, len(possible) // 2, len(possible)):
        data = dataset(table, gear.Prioritized(replacement=False, unit=unit), batch_size=size)
        assign(data, priorities)
        for _ in range(20):
            drawn = items_of(data.sample(), unit)
            assert len(set(drawn)) == size
        if size == len(possible):
            assert sorted(drawn) == possible
    message = (
        rf"{len(possible) + 1} items were to be drawn, but only {len(possible)} have a positive priority\."
    )
    with pytest.raises(PriorityError, match=message):
        data.sample(len(possible) + 1)
    # Drawing took nothing away.
    assert {item: leaf > 0 for item, leaf in leaves_of(data).items()} == {
        item: priority > 0 for item, priority in priorities.items()
    }


def test_successive_rows_and_batches_are_independent() -> None:
    with make_table([1] * 4) as table:
        data = dataset(table, gear.Prioritized(), batch_size=2, windows={"observation": gear.Window(1)})
        rows, batches = np.zeros((4, 4)), np.zeros((4, 4))
        previous = None
        for _ in range(6000):
            first, second = data.sample()["index"].tolist()
            rows[first, second] += 1
            if previous is not None:
                batches[previous, first] += 1
            previous = first
    for observed in (rows, batches):
        assert chi_square(observed, np.full((4, 4), observed.sum() / 16)) < chi_square_limit(15)


@pytest.mark.parametrize("anchor", ["uniform", "first", "last"])
def test_anchors_of_trajectories_that_were_drawn_by_priority(table: gear.Table, anchor: Any) -> None:
    data = dataset(table, gear.Prioritized(), batch_size=500, anchor=anchor)
    observed = np.zeros((len(LENGTHS), max(LENGTHS)))
    for _ in range(20):
        batch = data.sample()
        np.add.at(observed, (np.array(numbers_of(batch)), batch["anchor"].numpy()), 1)
    for row, length in zip(observed, LENGTHS, strict=True):
        there = {"uniform": slice(0, length), "first": slice(0, 1), "last": slice(length - 1, length)}[anchor]
        assert row.sum() == row[there].sum() > 0
        if anchor == "uniform" and length > 1:
            expected = np.full(length, row.sum() / length)
            assert chi_square(row[:length], expected) < chi_square_limit(length - 1)


def test_items_and_anchors_are_independent() -> None:
    with make_table([8] * 8) as table:
        data = dataset(table, gear.Prioritized(), batch_size=640)
        observed = np.zeros((8, 8))
        for _ in range(60):
            batch = data.sample()
            np.add.at(observed, (batch["index"].numpy(), batch["anchor"].numpy()), 1)
    assert chi_square(observed, np.full((8, 8), 600)) < chi_square_limit(63)


@pytest.mark.parametrize("unit", UNITS)
def test_another_seed_or_epoch_draws_other_items(table: gear.Table, unit: Any) -> None:
    found = []
    for options in ({}, {"seed": 4}):
        data = dataset(table, gear.Prioritized(unit=unit), batches_per_epoch=2, **options)
        found += [tuple(items_of(batch, unit)) for _ in range(2) for batch in data]
        found.append(tuple(items_of(data.sample(), unit)))
    assert len(set(found)) == len(found)


def test_ranks_together_draw_what_one_would(table: gear.Table) -> None:
    whole = copies(dataset(table, gear.Prioritized(), batches_per_epoch=6))
    for rank in range(3):
        part = dataset(table, gear.Prioritized(), batches_per_epoch=2, rank=rank, world_size=3)
        same_batches(whole[rank::3], copies(part))


def test_an_epoch_is_one_pass_long(table: gear.Table) -> None:
    assert len(dataset(table, gear.Prioritized())) == 2
    assert len(dataset(table, gear.TopK(unit="step"))) == 12
    assert len(list(dataset(table, gear.Prioritized(unit="step"), drop_last=True))) == 12
    batches = copies(dataset(table, gear.Prioritized(unit="step")))
    assert {len(batch["index"]) for batch in batches} == {8}


# ---------------------------------------------------------------- weights


def check_weights(
    batch: Mapping[str, Any],
    weights: Mapping[Item, float],
    *,
    unit: str,
    beta: float,
    normalize: str,
) -> None:
    """`priority_weight` is (N P)^-beta over the largest, computed from the exact probabilities in float64."""
    found = batch["priority_weight"]
    assert found.dtype == torch.float32
    assert found.shape == batch["index"].shape
    total, count = math.fsum(weights.values()), len(weights)
    drawn = items_of(batch, unit)
    among = drawn if normalize == "batch" else [item for item, weight in weights.items() if weight > 0]
    largest = max((count * weights[item] / total) ** -beta for item in among)
    expected = np.array([(count * weights[item] / total) ** -beta / largest for item in drawn])
    np.testing.assert_allclose(found.numpy(), expected, rtol=1e-6)
    assert found.max() <= 1


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("normalize", ["table", "batch"])
@pytest.mark.parametrize(
    ("alpha", "beta", "eps"), [(0.6, 0.4, 0), (1, 1, 0), (0.6, 1, 0.5), (0, 1, 0), (1, 0, 0), (0.3, 2, 0.01)]
)
def test_weights_are_what_the_probabilities_say(
    table: gear.Table, unit: Any, normalize: Any, alpha: float, beta: float, eps: float
) -> None:
    selector = gear.Prioritized(alpha, beta, eps=eps, unit=unit, normalize=normalize)
    data = dataset(table, selector, batch_size=16)
    priorities = some_priorities(unit)
    assign(data, priorities)
    for number in range(12):
        batch = data.sample()
        weights = weights_of(priorities, alpha, eps)
        check_weights(batch, weights, unit=unit, beta=beta, normalize=normalize)
        changed = dict.fromkeys(items_of(batch, unit)[:3], 0.1 + number)
        assign(data, changed)
        priorities.update({item: float(np.float32(value)) for item, value in changed.items()})


def test_weights_without_replacement_are_as_if_with(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1, 0.5, replacement=False, normalize="table"))
    priorities = some_priorities("trajectory")
    assign(data, priorities)
    for _ in range(10):
        check_weights(
            data.sample(), weights_of(priorities, 1, 0), unit="trajectory", beta=0.5, normalize="table"
        )


def test_only_batches_of_prioritized_carry_weights(table: gear.Table) -> None:
    for selector in (gear.TopK(), gear.Fifo(), gear.Lifo(False), gear.Uniform()):
        assert "priority_weight" not in dataset(table, selector).sample()
    plain = dataset(table, gear.Uniform()).sample()
    weighed = dataset(table, gear.Prioritized()).sample()
    assert [*plain, "priority_weight"] == list(weighed)


def test_weights_follow_a_table_that_loses_its_least_item() -> None:
    with make_table([2, 3, 4]) as table:
        data = dataset(table, gear.Prioritized(1, 1, normalize="table"), batch_size=30)
        assign(data, {(0, 0): 1.0, (1, 0): 2.0, (2, 0): 8.0})
        assert set(data.sample()["priority_weight"].tolist()) == {1.0, 0.5, 0.125}
        table.remove(0)
        assert set(data.sample()["priority_weight"].tolist()) == {1.0, 0.25}
        assign(data, {(2, 0): 0.5})
        assert set(data.sample()["priority_weight"].tolist()) == {0.25, 1.0}


# ---------------------------------------------------------------- schedules


def tenth(number: int) -> float:
    return number / 10


def number_drawn(batch: Mapping[str, Any]) -> float:
    """What `tenth` was called with, from the weight of the items of priority 2 among others of priority 1."""
    (least,) = set(batch["priority_weight"].tolist()) - {1.0} or {1.0}
    return round(-10 * math.log2(least), 4)


def scheduled(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    """Draws every trajectory in each batch; those in even slots have priority 2, the others 1."""
    selector = gear.Prioritized(1, tenth, replacement=False)
    data = dataset(table, selector, batch_size=12, **{"batches_per_epoch": 4, **options})
    assign(data, {(number, 0): 2.0 - number % 2 for number in NUMBERS})
    return data


@pytest.mark.parametrize("prefetch", [0, 3])
def test_a_schedule_goes_by_the_number_of_batches_drawn(table: gear.Table, prefetch: int) -> None:
    data = scheduled(table, prefetch=prefetch)
    numbers = [number_drawn(batch) for _ in range(3) for batch in data]
    assert numbers == list(range(12))
    # An iteration that is broken off counts for what it has delivered.
    assert [number_drawn(batch) for batch in copies(data, 3)] == [12, 13, 14]
    assert [number_drawn(batch) for batch in data] == [15, 16, 17, 18]
    data.set_epoch(0)
    assert [number_drawn(batch) for batch in data] == [19, 20, 21, 22]


@pytest.mark.parametrize("prefetch", [0, 3])
@pytest.mark.parametrize(
    "taken",
    [
        0,
        2,
        4,
    ],
)
def test_a_schedule_goes_on_where_a_state_was_taken(table: gear.Table, prefetch: int, taken: int) -> None:
    data = scheduled(table, prefetch=prefetch)
    for _ in range(2):
        list(data)
    iterator = iter(data)
    for _ in range(taken):
        next(iterator)
    state = data.state_dict()
    del iterator
    resumed = scheduled(table, prefetch=prefetch)
    for _ in range(2):
        resumed.load_state_dict(state)
        numbers = [number_drawn(batch) for _ in range(2) for batch in resumed]
        assert numbers == list(range(8 + taken, 8 + taken + len(numbers)))
        # Four batches were delivered, but the iteration had not been asked for its end.
        assert len(numbers) == 8 - taken


def test_a_schedule_goes_by_the_number_of_samples(table: gear.Table) -> None:
    data = scheduled(table)
    assert [number_drawn(data.sample()) for _ in range(5)] == list(range(5))
    resumed = scheduled(table)
    resumed.load_state_dict(data.state_dict())
    assert [number_drawn(resumed.sample()) for _ in range(3)] == [5, 6, 7]


def test_each_rank_counts_its_own_batches(table: gear.Table) -> None:
    for rank in range(2):
        data = scheduled(table, rank=rank, world_size=2)
        assert [number_drawn(batch) for _ in range(2) for batch in data] == list(range(8))


def test_a_schedule_that_returns_no_beta_ends_the_iteration(table: gear.Table) -> None:
    data = dataset(
        table, gear.Prioritized(beta=lambda n: -1 if n == 2 else 1), prefetch=2, batches_per_epoch=9
    )
    found: list[Any] = []
    with pytest.raises(SchemaError, match=r"gave -1 for batch 2; expected a finite number of at least 0"):
        append_all(data, found)
    assert len(found) == 2


# ---------------------------------------------------------------- what new items begin with


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("selector", [gear.Prioritized, gear.TopK])
def test_new_items_begin_with_the_running_maximum(table: gear.Table, unit: Any, selector: Any) -> None:
    data = dataset(
        table, gear.Prioritized(1, unit=unit) if selector is gear.Prioritized else gear.TopK(unit=unit)
    )

    def added(number: int, priority: float | None = None) -> set[float]:
        slot = table.add(episode(number, 5), priority=priority)
        leaves = {leaf for (n, _), leaf in leaves_of(data).items() if n == number}
        table.remove(slot)
        return leaves

    assert set(leaves_of(data).values()) == {1.0}
    assign(data, {(4, 0): 0.5})
    assert added(12) == {1.0}
    assign(data, {(4, 0): 5.0, (2, 0): 3.0})
    assert added(13) == {5.0}
    assign(data, {(4, 0): 0.25})
    assert added(14) == {5.0}
    assert added(15, priority=0.0) == {0.0}
    assert added(16, priority=0.25) == {0.25}
    assert added(17, priority=9.0) == {9.0}
    assert added(18) == {9.0}
    table.remove(4)
    assert added(19) == {9.0}
    assert data.num_stale == 0


@pytest.mark.parametrize("unit", UNITS)
def test_a_priority_given_to_a_trajectory_is_that_of_each_of_its_steps(unit: Any) -> None:
    with make_table([]) as table:
        table.extend([episode(i, length) for i, length in enumerate((5, 1, 9))], priority=[0.5, 0.0, 4.0])
        data = dataset(table, gear.Prioritized(0.5, eps=0.25, unit=unit))
        expected = {item: (0.5, 0.0, 4.0)[item[0]] for item in items_in(unit, (5, 1, 9))}
        assert leaves_of(data) == pytest.approx(weights_of(expected, 0.5, 0.25))


def test_an_initial_priority_too_large_for_alpha_counts_as_the_largest_possible() -> None:
    with make_table([]) as table:
        table.extend([episode(i, 1) for i in range(3)], priority=1)
        table.add(episode(3, 2), priority=1e30)
        data = dataset(table, gear.Prioritized(2))
        assert set(numbers_of(data.sample())) == {3}
        assert leaves_of(data)[3, 0] == np.finfo(np.float32).max


@pytest.mark.parametrize("alpha", [0.5, 1, 3])
@pytest.mark.parametrize("priority", [1e-40, 1e-46, 1e-300, TINY])
def test_a_positive_priority_stays_positive(alpha: float, priority: float) -> None:
    with make_table([]) as table:
        table.extend([episode(0, 2), episode(1, 2)], priority=[priority, 0.0])
        stored = table.region.array("priority")[:2].tolist()
        assert stored[0] > 0
        assert stored[1] == 0
        if np.float32(priority) == 0 or priority == TINY:
            assert stored[0] == TINY
        data = dataset(table, gear.Prioritized(alpha))
        assert set(numbers_of(data.sample())) == {0}
        assign(data, {(0, 0): 0.0, (1, 0): priority})
        assert set(numbers_of(data.sample())) == {1}
        assert leaves_of(data)[1, 0] >= TINY


def test_trajectories_added_and_removed_between_two_batches_are_never_seen(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(unit="step"), batch_size=64)
    data.sample()
    for number in range(12, 40):
        table.remove(table.add(episode(number, 7), priority=1e6))
        assert max(numbers_of(data.sample())) < 12
    slot = table.add(episode(40, 7), priority=1e6)
    assert numbers_of(data.sample()).count(40) > 32
    table.remove(slot)
    table.add(episode(41, 3), priority=0)
    assert max(numbers_of(data.sample())) < 12


# ---------------------------------------------------------------- updates

KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "float64": lambda values: np.array(values, dtype=np.float64),
    "float16": lambda values: np.array(values, dtype=np.float16),
    "tensor": torch.tensor,
    "bfloat16": lambda values: torch.tensor(values).bfloat16(),
    "half": lambda values: torch.tensor(values).half(),
    "integers": lambda values: torch.tensor(values).long(),
    "with gradient": lambda values: torch.tensor(values, requires_grad=True) * 1,
    "not contiguous": lambda values: torch.tensor([[v, -1.0] for v in values])[:, 0],
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("unit", UNITS)
def test_kinds_of_priorities(table: gear.Table, kind: str, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    batch = data.sample(3)
    before = leaves_of(data)
    anchor = batch["anchor"] if unit == "step" else None
    data.update_priority(
        batch["index"], KINDS[kind]([2.0, 0.0, 7.0]), generation=batch["generation"], anchor=anchor
    )
    changed = dict(zip(items_of(batch, unit), [2.0, 0.0, 7.0], strict=True))
    assert leaves_of(data) == {**before, **changed}
    assert data.num_stale == 0


@pytest.mark.parametrize("kind", [list, np.array, torch.tensor, lambda i: torch.tensor(i).int(), np.uint8])
def test_kinds_of_indices(table: gear.Table, kind: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit="step"))
    data.sample()
    generation = table.region.array("generation")[[5, 2]].tolist()
    data.update_priority(kind([5, 2]), [4, 3], generation=kind(generation), anchor=kind([19, 11]))
    leaves = leaves_of(data)
    assert (leaves.pop((5, 19)), leaves.pop((2, 11))) == (4, 3)
    assert set(leaves.values()) == {1}


@pytest.mark.parametrize("unit", UNITS)
def test_a_whole_batch_names_its_rows(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    batch = data.sample()
    table.remove(int(batch["index"][0]))
    table.add(episode(12, 20))
    data.sample()
    expected = leaves_of(data)
    values = np.arange(1.0, 9.0)
    data.update_priority(batch, values)
    gone = batch["index"] == batch["index"][0]
    for item, value, stale in zip(items_of(batch, unit), values.tolist(), gone.tolist(), strict=True):
        if not stale:
            expected[item] = value
    assert leaves_of(data) == expected
    assert data.num_stale == int(gone.sum())
    before = everything(data)
    for options in ({"generation": batch["generation"]}, {"anchor": batch["anchor"]}):
        with pytest.raises(
            SchemaError, match=r"together with generation or anchor; expected a whole batch alone"
        ):
            data.update_priority(batch, values, **options)
    part = {key: value for key, value in batch.items() if key != "generation"}
    with pytest.raises(SchemaError, match=r"in which \['generation'\] is missing; expected a whole batch"):
        data.update_priority(part, values)
    assert everything(data) == before


def test_one_number_and_none(table: gear.Table) -> None:
    data = dataset(table, gear.TopK())
    data.sample()
    data.update_priority(np.int64(3), 7.5)  # type: ignore[arg-type]
    assert leaves_of(data) == {(number, 0): 7.5 if number == 3 else 1.0 for number in NUMBERS}
    before = everything(data)
    data.update_priority([], [])
    data.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert everything(data) == before


@pytest.mark.parametrize("unit", UNITS)
def test_of_equal_items_the_last_one_counts(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.TopK(unit=unit))
    data.sample()
    rng = np.random.default_rng(1)
    items = items_in(unit)
    expected = leaves_of(data)
    for _ in range(20):
        chosen = [items[i] for i in rng.integers(0, len(items), 300)]
        values = rng.random(300).astype(np.float32)
        anchor = np.array([step for _, step in chosen]) if unit == "step" else None
        data.update_priority([number for number, _ in chosen], values, anchor=anchor)
        expected.update(zip(chosen, values.tolist(), strict=True))
        assert leaves_of(data) == expected


def stale_rows(table: gear.Table, unit: str) -> dict[str, tuple[int, int, int]]:
    """Rows (index, generation, step) that name nothing: number 1 was removed, 2 has a successor in its slot."""
    generation = table.region.array("generation").copy()
    table.remove(2)
    slot = 2
    while True:  # until the slot has been used again
        successor = table.add(episode(12, 12))
        if successor == slot:
            break
        table.remove(successor)
    table.remove(1)
    rows = {
        "removed": (1, int(generation[1]), 0),
        "replaced": (2, int(generation[2]), 0),
        "never used": (13, 1, 0),
        "negative": (-1, int(generation[-1]), 0),
        "beyond": (14, 1, 0),
        "far beyond": (2**62, 1, 0),
        "generation to come": (0, int(generation[0]) + 1, 0),
        "generation 0": (0, 0, 0),
    }
    if unit == "step":
        g = int(generation[3])
        rows |= {
            "step -1": (3, g, -1),
            "step 8 of 8": (3, g, 8),
            "step in the block": (5, int(generation[5]), 20),
            "step far beyond": (3, g, 2**40),
        }
        g = int(generation[0])
        rows["in the last block, beyond the end"] = (0, g, 5)
        rows["step far below"] = (0, g, -(2**40))
    return rows


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_what_is_gone_are_left_out_and_counted(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    data.sample()
    rows = stale_rows(table, unit)
    data.sample()
    before = leaves_of(data)
    assert (12, 0) in before
    for count, (index, generation, step) in enumerate(rows.values(), start=1):
        options = {"anchor": torch.tensor([step])} if unit == "step" else {}
        data.update_priority([index], [50.0], generation=torch.tensor([generation]), **options)
        assert data.num_stale == count
        assert leaves_of(data) == before
    # Among others, which are set.
    columns = torch.tensor([*rows.values(), (6, int(table.region.array("generation")[6]), 1)])
    options = {"anchor": columns[:, 2]} if unit == "step" else {}
    data.update_priority(
        columns[:, 0], torch.full((len(columns),), 50.0), generation=columns[:, 1], **options
    )
    assert data.num_stale == 2 * len(rows)
    assert leaves_of(data) == {**before, (6, 1 if unit == "step" else 0): 50.0}
    # What was left out is no priority that was given.
    assert data.state_dict()["priorities"]["maximum"] == 50.0


@pytest.mark.parametrize("unit", UNITS)
def test_rows_of_what_is_gone_are_refused_on_demand(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    data.sample()
    rows = stale_rows(table, unit)
    data.sample()
    before = everything(data)
    good = (6, int(table.region.array("generation")[6]), 1)
    for index, generation, step in rows.values():
        columns = torch.tensor([good, good, (index, generation, step), good])
        options = {"anchor": columns[:, 2]} if unit == "step" else {}
        message = (
            rf"^1 of 4 priorities are for trajectories that are gone; the first is row 2, index {index}\."
        )
        with pytest.raises(StaleIndexError, match=message):
            data.update_priority(
                columns[:, 0], torch.full((4,), 50.0), generation=columns[:, 1], stale="error", **options
            )
        assert everything(data) == before
    columns = torch.tensor([good])
    options = {"anchor": columns[:, 2]} if unit == "step" else {}
    data.update_priority(columns[:, 0], [50.0], generation=columns[:, 1], stale="error", **options)
    assert leaves_of(data)[6, 1 if unit == "step" else 0] == 50.0


def test_without_generations_a_successor_is_taken_for_what_was_there(table: gear.Table) -> None:
    data = dataset(table, gear.TopK())
    data.sample()
    stale_rows(table, "trajectory")
    data.sample()
    data.update_priority([2], [50.0])
    assert leaves_of(data)[12, 0] == 50.0
    assert data.num_stale == 0


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf, -1.0, -1e-30, 1e39, -1e39])
def test_what_is_no_priority_is_refused(table: gear.Table, unit: Any, bad: float) -> None:
    data = dataset(table, gear.Prioritized(unit=unit))
    batch = data.sample(5)
    before = everything(data)
    anchor = batch["anchor"] if unit == "step" else None
    for kind, place in itertools.product((np.array, torch.tensor, list), range(5)):
        values = [3.0] * 5
        values[place:] = [bad] * (5 - place)
        shown = float(torch.tensor(bad)) if kind is torch.tensor else bad
        with pytest.raises(PriorityError) as caught:
            data.update_priority(batch["index"], kind(values), anchor=anchor)
        assert str(caught.value) == (
            f"priority[{place}] is {shown}; expected a finite number (as float32) that is not negative. "
            "Nothing was changed."
        )
        assert everything(data) == before


def test_a_negative_priority_below_the_range_of_float32_is_refused(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized())
    data.sample()
    with pytest.raises(PriorityError, match=r"priority\[0\] is -1e-300; expected a finite number"):
        data.update_priority([3], [-1e-300])


def test_minus_zero_is_zero(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1))
    data.sample()
    data.update_priority(range(11), [-0.0] * 11)  # type: ignore[arg-type]
    assert set(numbers_of(data.sample())) == {11}


def test_a_priority_that_alpha_raises_beyond_float32_is_refused(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(2))
    data.sample()
    before = everything(data)
    message = (
        r"^priority\[1\] is 1\.99.*e\+19, which Prioritized\(alpha=2\.0, .*\) raises beyond float32's range;"
    )
    with pytest.raises(PriorityError, match=message):
        data.update_priority([0, 1, 2], [1e19, 2e19, 1e30])
    assert everything(data) == before
    data.update_priority([0], [1.8e19])
    assert leaves_of(data)[0, 0] == pytest.approx(3.24e38)
    # A smaller alpha takes all that float32 holds.
    data = dataset(table, gear.Prioritized())
    data.sample()
    data.update_priority([0], [float(np.finfo(np.float32).max)])
    assert set(numbers_of(data.sample())) == {0}


TOO_SMALL: list[tuple[float, float, list[float]]] = [
    (4, 0, [1e-12, 1e-11, 1e-10]),
    (2, 0, [1e-20, 2e-20, 3e-21]),
    (16, 0, [0.004, 0.003, 0.002]),
    (16, 1e-6, [0.004, 0.003, 0.002]),
    (2, 0, [1e-19, 1e-20, 1e-21]),  # the largest fits, but the others are cut to a good part of it
]


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize(("alpha", "eps", "priorities"), TOO_SMALL)
def test_priorities_that_alpha_makes_vanish_are_not_drawn_uniformly(
    alpha: float, eps: float, priorities: list[float], replacement: bool
) -> None:
    with make_table([]) as table:
        table.extend([episode(i, 2) for i in range(3)], priority=priorities)
        selector = gear.Prioritized(alpha, eps=eps, replacement=replacement)
        data = dataset(table, selector, batch_size=2)
        message = (
            r"^Prioritized\(alpha=.* raises the priorities out of float32's range .* Use a smaller alpha"
        )
        for _ in range(2):
            with pytest.raises(PriorityError, match=message):
                data.sample()
        assign(data, {(2, 0): 1.0})
        if replacement:
            assert set(numbers_of(data.sample())) == {2}, (
                "what has vanished beside a priority of 1 is never drawn"
            )


def test_first_priorities_that_alpha_raises_beyond_float32_are_not_drawn_uniformly() -> None:
    with make_table([]) as table:
        table.extend([episode(i, 2) for i in range(3)], priority=[1e30, 1e25, 1.0])
        data = dataset(table, gear.Prioritized(2))
        with pytest.raises(PriorityError, match=r"raises the priorities out of float32's range"):
            data.sample()
        assign(data, {(0, 0): 4.0, (1, 0): 2.0})
        assert data.sample() is not None
        assert leaves_of(data) == {(0, 0): 16.0, (1, 0): 4.0, (2, 0): 1.0}


def test_large_and_small_priorities_that_fit_are_drawn_as_they_are() -> None:
    for priorities in ([1e-30, 3e-30], [1e-37, 3e-37], [1e38, 3e38], [3.4e38, 3.4e38]):
        with make_table([]) as table:
            table.extend([episode(i, 2) for i in range(2)], priority=priorities)
            data = dataset(table, gear.Prioritized(1.0), batch_size=2000)
            share = numbers_of(data.sample()).count(1) / 2000
            assert share == pytest.approx(priorities[1] / sum(priorities), abs=0.06)
    with make_table([]) as table:  # squares, close to both ends
        table.extend([episode(i, 2) for i in range(2)], priority=[1e-17, 2e-17])
        data = dataset(table, gear.Prioritized(2), batch_size=2000)
        assert numbers_of(data.sample()).count(1) / 2000 == pytest.approx(0.8, abs=0.06)
        assign(data, {(0, 0): 9e18, (1, 0): 1.8e19})
        assert numbers_of(data.sample()).count(1) / 2000 == pytest.approx(0.8, abs=0.06)


ODD: dict[str, tuple[dict[str, Any], str]] = {
    "fewer priorities": (
        {"priority": [1.0]},
        r"priority is float64 \[1\]; expected numbers \[2\], as many as index",
    ),
    "more priorities": ({"priority": [1.0] * 3}, r"priority is float64 \[3\]; expected numbers \[2\]"),
    "priorities of two dimensions": (
        {"priority": torch.ones(2, 1)},
        r"priority is float32 \[2, 1\]; expected numb",
    ),
    "no priorities": ({"priority": None}, r"priority is None; expected numbers \[2\]"),
    "words": ({"priority": ["1", "2"]}, r"priority is \['1', '2'\]; expected numbers \[2\]"),
    "complex numbers": ({"priority": [1j, 2]}, r"priority is \[1j, 2\]; expected numbers \[2\]"),
    "a ragged list": ({"priority": [[1.0], [1.0, 2.0]]}, r"priority is .*; expected numbers \[2\]"),
    "floats as indices": ({"index": [0.0, 1.0]}, r"index is \[0\.0, 1\.0\]; expected integers \[n\]\."),
    "indices of two dimensions": ({"index": [[0, 1]]}, r"index is int64 \[1, 2\]; expected integers \[n\]\."),
    "no indices": ({"index": None}, r"index is None; expected integers \[n\]"),
    "fewer generations": ({"generation": [1]}, r"generation is int64 \[1\]; expected integers \[2\]"),
    "floats as generations": (
        {"generation": [1.0, 1.0]},
        r"generation is \[1\.0, 1\.0\]; expected integers \[2\]",
    ),
    "an unknown way": ({"stale": "skip"}, "stale is 'skip'; expected 'ignore' or 'error'"),
}


@pytest.mark.parametrize("kind", ODD)
@pytest.mark.parametrize("unit", UNITS)
def test_odd_shapes_and_dtypes_are_refused(table: gear.Table, kind: str, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(unit=unit))
    data.sample()
    before = everything(data)
    given: dict[str, Any] = {"index": [0, 1], "priority": [2.0, 3.0]}
    if unit == "step":
        given["anchor"] = [0, 0]
    change, message = ODD[kind]
    with pytest.raises(SchemaError, match=message):
        data.update_priority(**{**given, **change})
    assert everything(data) == before


def test_anchors_go_with_steps_only(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(unit="step"))
    batch = data.sample()
    before = everything(data)
    with pytest.raises(SchemaError, match=r"No anchor was received; .* pass anchor=batch\['anchor'\]"):
        data.update_priority(batch["index"], torch.ones(8))
    for anchor in ([0], [0.0] * 8, [[0]] * 8):
        with pytest.raises(SchemaError, match=r"anchor is .*; expected integers \[8\]"):
            data.update_priority(batch["index"], torch.ones(8), anchor=anchor)  # type: ignore[arg-type]
    assert everything(data) == before
    data = dataset(table, gear.TopK())
    batch = data.sample()
    before = everything(data)
    with pytest.raises(SchemaError, match=r"anchor was received; with unit='trajectory' .*: leave it out"):
        data.update_priority(batch["index"], torch.full((8,), 3.0), anchor=batch["anchor"])
    assert everything(data) == before


@pytest.mark.parametrize("selector", [gear.Uniform(), gear.Fifo(False), gear.Lifo(unit="step")])
def test_what_does_not_go_by_priorities_takes_none(table: gear.Table, selector: gear.Selector) -> None:
    data = dataset(table, selector)
    message = (
        r" was called, but (Uniform|Fifo|Lifo)\(.*\) does not go by priorities; use gear_loader\.Prioritized"
    )
    with pytest.raises(SchemaError, match=r"^update_priority" + message):
        data.update_priority([0], [1.0])
    with pytest.raises(SchemaError, match=r"^num_stale" + message):
        _ = data.num_stale
    assert "priorities" not in data.state_dict()


@pytest.mark.parametrize("unit", UNITS)
def test_an_update_before_the_first_batch_and_of_what_was_just_added(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    anchor = np.zeros(11, dtype=np.int64) if unit == "step" else None
    data.update_priority(table.indices()[:11], np.zeros(11), anchor=anchor)
    assert data.num_stale == 0
    assert leaves_of(data)[0, 0] == 0
    index = table.add(episode(12, 3))
    data.update_priority(
        [index], [9.0], anchor=None if unit == "trajectory" else np.array([0]), stale="error"
    )
    assert leaves_of(data)[12, 0] == 9


def test_each_dataset_has_priorities_of_its_own(table: gear.Table) -> None:
    one, other = dataset(table, gear.Prioritized(1)), dataset(table, gear.Prioritized(1))
    for data in (one, other):
        data.sample()
    one.update_priority(table.indices()[:11], np.zeros(11))
    assert set(numbers_of(one.sample())) == {11}
    assert set(leaves_of(other).values()) == {1.0}


# ---------------------------------------------------------------- a part of the table


@pytest.mark.parametrize("unit", UNITS)
def test_items_outside_the_subset_are_never_drawn(unit: Any) -> None:
    with make_table(max_steps=150, max_trajectories=14, on_full="evict_oldest") as table:
        options = {"batch_size": 64, "subset": lambda sequences: sequences % 3 == 0}
        for selector in (gear.Prioritized(eps=0.1, unit=unit), gear.TopK(unit=unit)):
            data = dataset(table, selector, **options)
            first = int(table.region.array("sequence")[table.indices()].max()) + 1
            for number in range(first, first + 30):
                batch = data.sample()
                drawn = batch["index"].numpy()
                assert (table.region.array("sequence")[drawn] % 3 == 0).all()
                anchor = batch["anchor"] if unit == "step" else None
                data.update_priority(
                    drawn, np.full(64, 100.0), generation=batch["generation"], anchor=anchor, stale="error"
                )
                table.add(episode(number, 1 + number % 9), priority=1e6)  # at once the most wanted
            assert {sequence % 3 for sequence, _ in leaves_of(data)} == {0}


@pytest.mark.parametrize("unit", UNITS)
def test_updates_outside_the_subset_are_stale(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit), subset=lambda sequences: sequences >= 6)
    data.sample()
    before = leaves_of(data)
    assert {number for number, _ in before} == set(range(6, 12))
    anchor = torch.tensor([0, 0]) if unit == "step" else None
    with pytest.raises(StaleIndexError, match=r"^1 of 2 .* row 1, index 5"):
        data.update_priority([6, 5], [3.0, 9.0], anchor=anchor, stale="error")
    assert leaves_of(data) == before
    data.update_priority([6, 5], [3.0, 9.0], anchor=anchor)
    assert data.num_stale == 1
    assert leaves_of(data) == {**before, (6, 0): 3.0}


def test_the_running_maximum_is_that_of_the_subset(table: gear.Table) -> None:
    data = dataset(table, gear.TopK(), subset=lambda sequences: sequences % 2 == 0)
    data.sample()
    table.add(episode(12, 2), priority=3.0)
    table.add(episode(13, 2), priority=9.0)
    data.sample()
    table.remove(0)
    table.remove(1)
    table.extend([episode(14, 2), episode(15, 2)])
    assert {item: leaf for item, leaf in leaves_of(data).items() if leaf > 1} == {(12, 0): 3.0, (14, 0): 3.0}


# ---------------------------------------------------------------- nothing to draw from

ALL = {
    "prioritized": gear.Prioritized(),
    "prioritized steps, distinct": gear.Prioritized(eps=0.1, unit="step", replacement=False),
    "largest": gear.TopK(),
    "smallest steps": gear.TopK(False, unit="step"),
    "oldest": gear.Fifo(),
    "oldest steps once": gear.Fifo(False, "step"),
    "newest": gear.Lifo(),
    "newest steps": gear.Lifo(unit="step"),
}


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("selector", ALL.values(), ids=ALL)
def test_an_empty_table_and_an_empty_subset(selector: gear.Selector, prefetch: int) -> None:
    with make_table([]) as table:
        for options in ({"batches_per_epoch": 3}, {}):
            data = dataset(table, selector, prefetch=prefetch, **options)
            with pytest.raises(TableEmptyError, match=r"^The table is empty: there is nothing to draw from"):
                next(iter(data))
            with pytest.raises(TableEmptyError, match=r"^The table is empty"):
                data.sample()
        table.add(episode(0, 3))
        data.set_epoch(0)
        assert set(numbers_of(data.sample(3 if not selector.replacement else 8))) == {0}
        for options in ({"batches_per_epoch": 3}, {}):
            nobody = dataset(
                table, selector, prefetch=prefetch, subset=lambda sequences: sequences > 5, **options
            )
            with pytest.raises(TableEmptyError, match=r"^None of the table's 1 trajectories belongs to this"):
                next(iter(nobody))
            with pytest.raises(TableEmptyError, match=r"^None of the table's 1 trajectories belongs to this"):
                nobody.sample()
        table.remove(0)
        with pytest.raises(TableEmptyError, match=r"^The table is empty"):
            data.sample()
        nothing_left(table)


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("name", ["Prioritized", "distinct", "TopK"])
def test_a_table_of_zeros(table: gear.Table, unit: Any, prefetch: int, name: str) -> None:
    selector = {
        "Prioritized": gear.Prioritized(unit=unit),
        "distinct": gear.Prioritized(unit=unit, replacement=False),
        "TopK": gear.TopK(unit=unit),
    }[name]
    data = dataset(table, selector, prefetch=prefetch, batches_per_epoch=50, batch_size=2)
    assign(data, dict.fromkeys(items_in(unit), 0.0))
    message = "^Every priority is zero: there is nothing to draw. Set some with update_priority, "
    for _ in range(2):
        with pytest.raises(PriorityError, match=message):
            data.sample()
        with pytest.raises(PriorityError, match=message):
            next(iter(data))
    assign(data, {(3, 2 if unit == "step" else 0): 0.5, (4, 0): 0.5})
    assert {number for number, _ in items_of(data.sample(), unit)} <= {3, 4}
    # In the middle of an iteration: what was drawn before comes first.
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    assign(data, {(3, 2 if unit == "step" else 0): 0.0, (4, 0): 0.0})
    found: list[Any] = []
    with pytest.raises(PriorityError, match=message):
        append_all(iterator, found)
    assert len(found) == prefetch


def test_eps_keeps_a_table_of_zeros_alive(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(eps=1e-6), batch_size=600)
    assign(data, dict.fromkeys(items_in("trajectory"), 0.0))
    batch = data.sample()
    observed = np.bincount(numbers_of(batch), minlength=12)
    assert chi_square(observed, np.full(12, 50)) < chi_square_limit(11)
    assert set(batch["priority_weight"].tolist()) == {1.0}


@pytest.mark.slow
def test_workers_cannot_draw_by_priority() -> None:
    with named_table("test-prioritized-workers") as table:
        for selector in (gear.Prioritized(), gear.TopK(unit="step")):
            data = dataset(table, selector, batches_per_epoch=3)
            loader = DataLoader(data, batch_size=None, num_workers=1)
            message = (
                rf"A DataLoader worker cannot draw for {type(selector).__name__}\(.*\): update_priority would not "
                r"reach it\. Use num_workers=0"
            )
            with pytest.raises(SchemaError, match=message):
                next(iter(loader))
        # Those that go by age can.
        for age in (gear.Fifo(), gear.Lifo(False, "step")):
            expected = copies(dataset(table, age, batches_per_epoch=3))
            loader = DataLoader(dataset(table, age, batches_per_epoch=3), batch_size=None, num_workers=2)
            same_batches(expected, copies(loader))


def test_a_dataloader_without_workers(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1), prefetch=2, batches_per_epoch=20)
    expected = copies(dataset(table, gear.Prioritized(1), batches_per_epoch=20))
    same_batches(expected, copies(DataLoader(data, batch_size=None)))
    found: list[set[int]] = []
    for batch in DataLoader(data, batch_size=None):
        found.append(set(numbers_of(batch)))
        data.update_priority([*NUMBERS], [1.0 if number == 5 else 0.0 for number in NUMBERS])
    assert found[4:] == [{5}] * 16


# ---------------------------------------------------------------- the largest and the smallest


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("largest", [True, False])
def test_the_best_come_in_order(table: gear.Table, unit: Any, largest: bool) -> None:
    data = dataset(table, gear.TopK(largest, unit=unit))
    priorities = some_priorities(unit)
    possible = [item for item, priority in priorities.items() if priority > 0]
    assert len(possible) < len(priorities)
    for round_ in range(5):
        assign(data, priorities)
        order = sorted(possible, key=lambda item: -priorities[item] if largest else priorities[item])
        for size in (1, 5, len(possible), len(possible) + 3, 3 * len(possible)):
            found = items_of(data.sample(size), unit)
            assert found == [order[i % len(order)] for i in range(size)]
        values = list(priorities.values())
        priorities = dict(zip(priorities, values[7 * round_ :] + values[: 7 * round_], strict=True))
        possible = [item for item, priority in priorities.items() if priority > 0]


@pytest.mark.parametrize("largest", [True, False])
def test_equal_trajectories_come_in_order_of_their_index(largest: bool) -> None:
    with make_table([1] * 100) as table:
        data = dataset(table, gear.TopK(largest))
        assert data.sample(30)["index"].tolist() == list(range(30))
        values = np.random.default_rng(0).integers(1, 4, 100).astype(np.float32)
        data.update_priority(np.arange(100), values)
        order = sorted(range(100), key=lambda i: (-values[i] if largest else values[i], i))
        for size in (1, 20, 33, 99, 100):
            assert data.sample(size)["index"].tolist() == order[:size]


def test_equal_steps_come_block_by_block_and_always_the_same() -> None:
    with make_table([8] * 4, max_trajectories=4) as table:
        table.remove(0)
        assert table.add(episode(4, 12)) == 0
        orders = []
        for _ in range(2):
            batch = dataset(table, gear.TopK(unit="step")).sample(36)
            rows = list(zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True))
            assert len(set(rows)) == 36
            for one, other in itertools.pairwise(rows):
                assert other[1] % table.region.layout.block_steps == 0 or other == (one[0], one[1] + 1)
            orders.append(rows)
        assert orders[0] == orders[1]


def test_the_best_are_the_same_in_every_batch_until_priorities_change(table: gear.Table) -> None:
    data = dataset(table, gear.TopK(), batch_size=3, batches_per_epoch=5)
    assert [numbers_of(batch) for _ in range(2) for batch in data] == [[0, 1, 2]] * 10
    data.update_priority([7, 9], [3.0, 2.0])
    table.remove(7)
    table.add(episode(12, 1), priority=2.5)
    assert numbers_of(data.sample())[:2] == [12, 9]


# ---------------------------------------------------------------- the oldest and the newest


def by_age(table: gear.Table, unit: str) -> list[Item]:
    """Items (index, step) from the oldest to the newest."""
    lengths = table.lengths().tolist() if unit == "step" else [1] * len(table)
    pairs = zip(table.indices().tolist(), lengths, strict=True)
    return [(index, step) for index, length in pairs for step in range(length)]


def rows_of(batch: Mapping[str, Any], unit: str) -> list[Item]:
    items_of(batch, unit)
    steps = batch["anchor"].tolist() if unit == "step" else [0] * len(batch["anchor"])
    return list(zip(batch["index"].tolist(), steps, strict=True))


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("subset", [None, lambda sequences: sequences % 2 == 1], ids=["all", "odd ones"])
def test_the_oldest_and_the_newest_while_trajectories_come_and_go(unit: Any, subset: Any) -> None:
    with make_table(max_steps=120, max_trajectories=14, on_full="evict_oldest") as table:
        oldest, newest = (
            dataset(table, selector, subset=subset)
            for selector in (gear.Fifo(unit=unit), gear.Lifo(unit=unit))
        )
        for number in range(12, 80):
            order = by_age(table, unit)
            if subset is not None:
                sequence = table.region.array("sequence")
                order = [item for item in order if sequence[item[0]] % 2 == 1]
            for size in (1, 8, len(order), len(order) + 5):
                expected = [order[i % len(order)] for i in range(size)]
                assert rows_of(oldest.sample(size), unit) == expected
                expected = [order[-1 - i % len(order)] for i in range(size)]
                assert rows_of(newest.sample(size), unit) == expected
            if number % 5 == 0:
                table.remove(table.indices()[[2, -1]])
            table.add(episode(number, 1 + number * 7 % 19))
        assert table.stats().num_evicted > 20


@pytest.mark.parametrize("anchor", ["first", "last", "uniform"])
def test_anchors_of_the_newest_trajectories(table: gear.Table, anchor: Any) -> None:
    batches = copies(dataset(table, gear.Lifo(), anchor=anchor, batches_per_epoch=40, batch_size=12))
    steps = np.array([batch["anchor"].tolist() for batch in batches])
    lengths = np.array(LENGTHS[::-1])
    if anchor == "uniform":
        assert (steps.min(0) == 0).all()
        assert (steps < lengths).all()
        assert (steps.max(0) >= lengths // 2).all()
    else:
        assert (steps == (0 if anchor == "first" else lengths - 1)).all()


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_pass_goes_through_all_items_once_in_order(table: gear.Table, unit: Any, prefetch: int) -> None:
    order = by_age(table, unit)
    for selector, expected in ((gear.Fifo(False, unit), order), (gear.Lifo(False, unit), order[::-1])):
        data = dataset(table, selector, prefetch=prefetch)
        for _ in range(2):
            batches = copies(data)
            assert [len(batch["index"]) for batch in batches[:-1]] == [8] * (len(batches) - 1)
            assert list(itertools.chain(*(rows_of(batch, unit) for batch in batches))) == expected
        assert len(data) == len(batches)
        sampled = [row for _ in range(2 * len(batches)) for row in rows_of(data.sample(), unit)]
        assert sampled == expected * 2
        dropping = dataset(table, selector, drop_last=True)
        full = len(order) // 8 * 8
        rows = list(itertools.chain(*(rows_of(batch, unit) for batch in dropping)))
        assert rows == expected[:full]
        # Longer epochs begin again.
        longer = dataset(table, selector, prefetch=prefetch, batches_per_epoch=2 * len(batches) + 1)
        rows = list(itertools.chain(*(rows_of(batch, unit) for batch in longer)))
        assert rows == [*expected, *expected, *expected[:8]]
        # Ranks share it.
        rows = []
        for batch in itertools.chain(
            *itertools.zip_longest(
                *(copies(dataset(table, selector, rank=r, world_size=2)) for r in range(2))
            )
        ):
            rows += rows_of(batch, unit) if batch is not None else []
        assert rows[: len(expected)] == expected


@pytest.mark.parametrize("unit", UNITS)
def test_a_pass_over_a_table_that_changes_meanwhile(unit: Any) -> None:
    with make_table(max_steps=93, max_trajectories=12, on_full="evict_oldest") as table:
        for selector in (gear.Fifo(False, unit), gear.Lifo(False, unit)):
            order = by_age(table, unit)
            order = order if type(selector) is gear.Fifo else order[::-1]
            generation = table.region.array("generation")
            began = generation.copy()
            place = 0
            for number, batch in enumerate(dataset(table, selector, batch_size=4)):
                rows = rows_of(batch, unit)
                assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
                for row, expected in zip(rows, order[place:], strict=False):
                    if generation[expected[0]] == began[expected[0]]:  # it is still there
                        assert row == expected
                place += len(rows)
                table.add(episode(100 + number, 2))
            assert place == len(order)
            assert (generation != began).any()


# ---------------------------------------------------------------- prefetching


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("pause", [0.0, 0.002])
def test_when_an_update_becomes_known(table: gear.Table, way: str, prefetch: int, pause: float) -> None:
    """One that is made before batch r is asked for is known to batch r + prefetch and to no earlier one."""
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=prefetch, batches_per_epoch=11)
    for _ in range(3):
        data.sample()
        data.update_priority([*NUMBERS], [0.5] * 12)
        iterator = iter(data)
        known = []
        for request in range(11):
            # Each update makes another trajectory the first.
            data.update_priority([request], [100.0 + request])
            time.sleep(pause)
            known += numbers_of(next(iterator))
        assert known == [max(request - prefetch, 0) for request in range(11)]
        assert next(iterator, None) is None


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("replacement", [True, False])
def test_two_runs_give_the_same_batches(
    table: gear.Table, way: str, prefetch: int, unit: Any, replacement: bool
) -> None:
    selector = gear.Prioritized(unit=unit, replacement=replacement, eps=1e-3)

    def run(pause: float) -> list[Any]:
        data = dataset(table, selector, prefetch=prefetch, batches_per_epoch=15)
        found: list[Any] = []
        for _ in range(2):
            for batch in data:
                append_all([batch], found)
                if len(found) % 3 == 0:
                    time.sleep(pause)
                errors = (batch["observation"][:, 0].sum(1) * 0.7 + len(found)) % 3
                anchor = batch["anchor"] if unit == "step" else None
                data.update_priority(batch["index"], errors, generation=batch["generation"], anchor=anchor)
        return found

    first = run(0)
    same_batches(first, run(0.003))
    uniform = copies(dataset(table, selector, prefetch=prefetch, batches_per_epoch=15))
    same_batches(uniform[: prefetch + 1], first[: prefetch + 1])
    assert sum(torch.equal(a["index"], b["index"]) for a, b in zip(uniform, first, strict=False)) < 14


def test_updates_while_an_iterator_waits_and_after_it_is_gone(table: gear.Table, way: str) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=2, batches_per_epoch=math.inf)
    iterator = iter(data)
    next(iterator)
    data.update_priority([4], [10.0])
    assert leaves_of(data)[4, 0] == 10.0  # a state knows of it
    del iterator
    nothing_left(table)
    assert leaves_of(data)[4, 0] == 10.0
    data.update_priority([5], [20.0])
    assert numbers_of(next(iter(data))) == [5]


def test_several_threads_update_while_another_iterates(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1, unit="step"), prefetch=2, batches_per_epoch=math.inf)
    data.sample()
    failures: list[BaseException] = []

    def work(member: int) -> None:
        mine = [item for item in STEPS if item[0] % 4 == member]
        index, anchor = np.array(mine).T
        try:
            for turn in range(150):
                data.update_priority(index, np.full(len(mine), 1.0 + turn), anchor=anchor)
                data.update_priority([13, 99], [7.0, 7.0], anchor=np.zeros(2, dtype=np.int64))
            data.update_priority(index, index + anchor / 32 + 1.0, anchor=anchor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(member,)) for member in range(4)]
    iterator = iter(data)
    next(iterator)
    for thread in threads:
        thread.start()
    count, busy = 0, True
    while busy:
        busy = any(thread.is_alive() for thread in threads)
        for batch in itertools.islice(iterator, 5):
            assert set(items_of(batch, "step")) <= set(STEPS)
            count += 1
    for thread in threads:
        thread.join()
    assert failures == []
    assert count > 0
    assert leaves_of(data) == {(number, step): number + step / 32 + 1 for number, step in STEPS}
    assert data.num_stale == 4 * 150 * 2
    del iterator


def held_back(
    monkeypatch: pytest.MonkeyPatch, call: int, patience: float = 2.0
) -> tuple[threading.Event, threading.Event]:
    """Let the prefetch thread stand still in its gather number `call`, for a while at most.

    Returns:
        Events: it stands still; it may go on.
    """
    stands, go = threading.Event(), threading.Event()
    gather, calls = Collector.gather, itertools.count()

    def slow(self: Collector, *args: Any, **options: Any) -> None:
        if threading.current_thread().name == "gear-loader-prefetch" and next(calls) == call:
            stands.set()
            go.wait(patience)
        gather(self, *args, **options)

    monkeypatch.setattr(Collector, "gather", slow)
    return stands, go


def test_a_sample_knows_of_updates_made_while_batches_are_prefetched(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=2, batches_per_epoch=math.inf)
    stands, go = held_back(monkeypatch, 2)
    iterator = iter(data)
    next(iterator)
    assert stands.wait(10)
    data.update_priority([5], [9.0])
    found = numbers_of(data.sample())
    go.set()
    next(iterator)
    del iterator
    assert found == [5]


def test_updates_at_the_end_of_an_epoch_keep_their_order(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=1, batches_per_epoch=2)
    stands, go = held_back(monkeypatch, 1)
    iterator = iter(data)
    next(iterator)
    assert stands.wait(10)
    assert data._buffers.active is not None
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:  # something that takes the thread a while
        entered.set()
        leave.wait(1)

    data._buffers.active.between(slow)
    data.update_priority([5], [9.0])
    go.set()
    assert entered.wait(10)
    data.update_priority([5], [4.0])
    leave.set()
    assert len(list(iterator)) == 1
    assert leaves_of(data)[5, 0] == 4.0


# ---------------------------------------------------------------- another process writes


def write_for_a_while(name: str, pipe: Any) -> None:
    table = gear.Table.attach(name, on_full="evict_oldest")
    number = 100
    pipe.send(None)
    while not pipe.poll():
        table.add(episode(number, 1 + number % 11), priority=None if number % 3 else 0.5)
        if number % 10 == 0:
            table.remove(table.indices()[-1])
        number += 1
        time.sleep(0.0002)
    table.close()
    pipe.send(number)


@pytest.mark.parametrize("unit", mostly_long(UNITS, "step"))
def test_a_table_that_another_process_writes(unit: Any) -> None:
    context = multiprocessing.get_context("forkserver")
    options = {"max_steps": 150, "max_trajectories": 24, "on_full": "evict_oldest"}
    with named_table("test-prioritized-writer", **options) as table:
        pipe, theirs = context.Pipe()
        process = context.Process(target=write_for_a_while, args=(table.name, theirs), daemon=True)
        process.start()
        assert pipe.poll(60)
        pipe.recv()
        # Between the draw of a batch and its use there is no room for more than `keep` batches to be evicted.
        data = dataset(table, gear.Prioritized(unit=unit, eps=1e-3), prefetch=2, batches_per_epoch=math.inf)
        written: dict[tuple[int, int, int], int] = {}
        highest = 0
        for count, batch in enumerate(data):
            items_of(batch, unit)
            numbers = batch["observation"][:, 0, 0].long()
            highest = max(highest, int(numbers.max()))
            keys = zip(batch["index"].tolist(), batch["generation"].tolist(), strict=True)
            for key, number in zip(keys, numbers.tolist(), strict=True):
                assert written.setdefault((*key, 0), number) == number
            anchor = batch["anchor"] if unit == "step" else None
            data.update_priority(
                batch["index"],
                torch.rand(8, generator=torch.Generator().manual_seed(count)),
                generation=batch["generation"],
                anchor=anchor,
            )
            assert process.is_alive()
            if count >= 100 and highest > 100:
                break
        pipe.send(None)
        assert pipe.poll(60)
        last = pipe.recv()
        process.join(60)
        assert process.exitcode == 0
        assert last > highest >= 100
        # Now that nothing changes: what is known is what is there.
        leaves = data.state_dict()["priorities"]
        data.state_dict()
        assert leaves["sequences"].tolist() == table.region.array("sequence")[table.indices()].tolist()
        expected = table.num_steps if unit == "step" else len(table)
        assert len(leaves["leaves"]) == expected
        assert (leaves["leaves"] > 0).all()
        assert data.num_stale > 0
