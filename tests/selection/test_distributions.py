"""Conformance of distributions and of items: what is drawn how often, whatever it is drawn from.

A distribution chooses numbers of items and knows no table: uniform, in order, or a priority tree (the GPU's
tree has the bits of the host's, which `test_priority_tree` and `tests/kernels` hold). Each is driven
through the same face, `Distribution`, and held against the probabilities that it promises. Items are rows of a table,
or of two shards: trajectories, steps, complete anchors, groups; each is drawn by a selection of every kind and held
against a plain list.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import chi_square, chi_square_limit
from options_common import nested
from priority_common import host_of

import gear_loader as gear
from gear_loader.errors import PriorityError
from gear_loader.selection.samplers import Draw

Array = np.ndarray[Any, Any]
LEAVES = np.array([1.0, 0.0, 2.5, 2.0, 0.0, 4.0, 1.5], dtype=np.float32)
PLACES = np.array([3, 10, 31, 32, 640, 700, 1500])
"""Where the items are in a tree: at the edges of blocks and nodes, far apart."""


def draw_of(count: int, step: int = 0, first: int = 0) -> Draw:
    return Draw(3, 0, step, first, count)


@dataclasses.dataclass(frozen=True)
class Distribution:
    """A distribution over 7 items.

    Attributes:
        draw: numbers of `count` items of draw number `step`, int64 [count].
        weights: relative probabilities of the items; None if the order is fixed.
        order: the fixed order.
        distinct: whether no item comes twice in a draw.
    """

    draw: Callable[[int, int], Array]
    weights: Array | None = None
    order: tuple[int, ...] = ()
    distinct: bool = False


def numbered(sampler: Any) -> Callable[[int, int], Array]:
    return lambda count, step: sampler.items(len(LEAVES), draw_of(count, step))


def from_tree(sampler: Any) -> Callable[[int, int], Array]:
    leaves = np.zeros(1501, dtype=np.float32)
    leaves[PLACES] = LEAVES
    tree = host_of(leaves)

    def draw(count: int, step: int) -> Array:
        items, values = sampler.draw(tree, count, key=77, step=step)
        assert (values == leaves[items]).all()
        assert (values > 0).all()
        return np.searchsorted(PLACES, items)

    return draw


EVEN = np.ones(len(LEAVES))
DISTRIBUTIONS = {
    "uniform": Distribution(numbered(gear.Uniform()), EVEN),
    "fifo": Distribution(numbered(gear.Fifo()), order=(0, 1, 2, 3, 4, 5, 6)),
    "lifo": Distribution(numbered(gear.Lifo()), order=(6, 5, 4, 3, 2, 1, 0)),
    "largest": Distribution(from_tree(gear.TopK()), order=(5, 2, 3, 6, 0)),
    "smallest": Distribution(from_tree(gear.TopK(False)), order=(0, 6, 3, 2, 5)),
    "tree": Distribution(from_tree(gear.Prioritized()), LEAVES),
    "tree, distinct": Distribution(from_tree(gear.Prioritized(replacement=False)), LEAVES, distinct=True),
}


@pytest.fixture(params=DISTRIBUTIONS)
def distribution(request: pytest.FixtureRequest) -> Distribution:
    return DISTRIBUTIONS[request.param]


def test_a_draw_is_a_function_of_its_counters(distribution: Distribution) -> None:
    for count in (1, 3, 5):
        assert distribution.draw(count, 4).tolist() == distribution.draw(count, 4).tolist()
    if distribution.weights is not None:
        draws = {tuple(distribution.draw(5, step).tolist()) for step in range(20)}
        assert len(draws) > 15


def test_items_come_as_often_as_they_should(distribution: Distribution) -> None:
    """By the first item of each draw, and where items may come again by all of them."""
    if distribution.weights is None:
        for count in (1, 3, len(distribution.order), 2 * len(distribution.order) + 1):
            expected = list(itertools.islice(itertools.cycle(distribution.order), count))
            assert distribution.draw(count, 9).tolist() == expected
        return
    rows = 3 if distribution.distinct else 100
    drawn = np.stack(
        [distribution.draw(rows, step) for step in range(4000 if distribution.distinct else 200)]
    )
    counted = drawn[:, :1] if distribution.distinct else drawn
    observed, some = np.bincount(counted.reshape(-1), minlength=len(LEAVES)), distribution.weights > 0
    assert not observed[~some].any()
    expected = counted.size * distribution.weights[some] / distribution.weights.sum()
    assert chi_square(observed[some], expected) < chi_square_limit(int(some.sum()) - 1)
    if distribution.distinct:
        assert (np.diff(np.sort(drawn, axis=1)) > 0).all()


def test_distinct_items_are_drawn_one_after_another(distribution: Distribution) -> None:
    """Each in proportion to what is left."""
    if not distribution.distinct:
        return
    weights, observed = LEAVES.astype(float), np.zeros((len(LEAVES),) * 3)
    for step in range(8000):
        observed[tuple(distribution.draw(3, step))] += 1
    expected = np.zeros_like(observed)
    for a, b, c in itertools.permutations(np.flatnonzero(weights), 3):
        left = weights.sum() - weights[a]
        expected[a, b, c] = (
            8000 * weights[a] / weights.sum() * weights[b] / left * weights[c] / (left - weights[b])
        )
    assert not observed[expected == 0].any()
    assert chi_square(observed[expected > 0], expected[expected > 0]) < chi_square_limit(59)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_a_pass_has_each_item_once(unit: Any) -> None:
    for sampler in (gear.Uniform(False, unit), gear.Fifo(False, unit), gear.Lifo(False, unit)):
        for size in (1, 7, 100):
            parts = [sampler.items(size, draw_of(min(3, size - i), first=i)) for i in range(0, size, 3)]
            assert sorted(np.concatenate(parts).tolist()) == list(range(size))


def test_nothing_with_a_leaf_is_an_error() -> None:
    for sampler in (gear.Prioritized(), gear.Prioritized(replacement=False), gear.TopK(), gear.TopK(False)):
        with pytest.raises(PriorityError, match="Every priority is zero"):
            sampler.draw(host_of(np.zeros(40, dtype=np.float32)), 3, key=1, step=0)


# ---------------------------------------------------------------- items

COLUMNS = {
    "value": gear.Column(torch.float32),
    "group": gear.Column(torch.int64, per="trajectory"),
}
WINDOW = gear.Window(4, offset=-1)  # complete at steps 1 to length - 3
LENGTHS = (5, 4, 8, 3, 1, 9, 6, 7, 4)
SIZE = 3  # members of a group
ITEMS: dict[str, tuple[str, dict[str, Any]]] = {
    "trajectories": ("trajectory", {"anchor": "first"}),
    "steps": ("step", {}),
    "complete steps": ("step", {"draws": gear.Draws(complete=True)}),
    "complete trajectories": ("trajectory", {"draws": gear.Draws(complete=True), "anchor": "last"}),
    "groups": ("trajectory", {"groups": gear.Groups("group", SIZE), "anchor": "last"}),
    "groups by mean": ("trajectory", {"groups": gear.Groups("group", SIZE, "mean"), "anchor": "last"}),
    "complete groups": (
        "trajectory",
        {"groups": gear.Groups("group", SIZE), "draws": gear.Draws(complete=True), "anchor": "first"},
    ),
}
"""Unit of the sampler, and options."""


def rows_of_items(kind: str, lengths: dict[int, int]) -> list[list[tuple[int, int]]]:
    """The rows of each item: number of the trajectory and step; `lengths` by number."""
    complete = "complete" in kind
    steps = {n: list(range(1, length - 2) if complete else range(length)) for n, length in lengths.items()}
    steps = {n: part for n, part in steps.items() if part}
    if "steps" in kind:
        return [[(n, step)] for n, part in steps.items() for step in part]
    first = kind in ("trajectories", "complete groups")
    rows = {n: (n, part[0] if first else part[-1]) for n, part in steps.items()}
    if "groups" not in kind:
        return [[row] for row in rows.values()]
    groups = [[rows[n] for n in range(g * SIZE, (g + 1) * SIZE) if n in rows] for g in range(len(LENGTHS))]
    return [group for group in groups if len(group) == SIZE]


class Store:
    """Trajectories by number, in one table or dealt to two shards.

    Attributes:
        kind: of the items. source: what a dataset draws from.
        lengths: of the trajectories that are there, by number.
    """

    def __init__(self, kind: str, count: int) -> None:
        self.kind = kind
        sizes: dict[str, Any] = {"max_steps": 200, "max_trajectories": 20, "block_steps": 4, "timeout": 0.01}
        self.tables = [gear.Table.create(COLUMNS, **sizes) for _ in range(count)]
        self.source: Any = self.tables[0] if count == 1 else gear.distributed.Shards(self.tables)
        self.lengths: dict[int, int] = {}
        self._slots: dict[int, int] = {}
        for number, length in enumerate(LENGTHS):
            self.add(number, length)

    def add(self, number: int, length: int) -> None:
        steps = {"value": np.full(length, number, np.float32), "group": number // SIZE}
        self._slots[number] = self.tables[number % len(self.tables)].add(steps, priority=1.0)
        self.lengths[number] = length

    def remove(self, number: int) -> None:
        del self.lengths[number]
        self.tables[number % len(self.tables)].remove(self._slots.pop(number))


STORES = [(kind, count) for kind in ITEMS for count in (1, 2) if count == 1 or "groups" not in kind]


@pytest.fixture(params=STORES, ids=str)
def store(request: pytest.FixtureRequest) -> Store:
    return Store(*request.param)


def rows_in(batch: Any) -> list[tuple[int, int]]:
    """Number of the trajectory and anchor of each row."""
    numbers = torch.where(batch["mask"]["value"], batch["value"], -1).amax(1).long()
    assert torch.equal(numbers // SIZE, batch["group"])
    return list(zip(numbers.tolist(), batch["anchor"].tolist(), strict=True))


def counted(data: gear.ReplayDataset, items: list[list[tuple[int, int]]], samples: int = 4) -> Array:
    """How often each item is drawn in some samples, int64 [items]; it is an error to draw another one."""
    counts = {tuple(rows): 0 for rows in items}
    for _ in range(samples):
        rows = rows_in(data.sample())
        for i in range(0, len(rows), len(items[0])):
            counts[tuple(rows[i : i + len(items[0])])] += 1
    return np.array(list(counts.values()))


def check_counts(observed: Array, weights: Array) -> None:
    some = weights > 0
    assert not observed[~some].any()
    if some.sum() > 1:
        expected = observed.sum() * weights[some] / weights.sum()
        assert chi_square(observed[some], expected) < chi_square_limit(int(some.sum()) - 1)


def dataset(source: Any, kind: str, sampler: Any, items: int) -> gear.ReplayDataset:
    size = SIZE if "groups" in kind else 1
    options: dict[str, Any] = {"batch_size": items * size, "device": "cpu", **ITEMS[kind][1]}
    return gear.ReplayDataset(
        source,
        **nested(
            {
                "windows": {"value": WINDOW, "group": None},
                "sampler": sampler,
                "prefetch": gear.Prefetch(0, copy=True),
                **options,
            }
        ),
    )


SAMPLERS: dict[str, Callable[[Any], Any]] = {
    "uniform": lambda unit: gear.Uniform(unit=unit),
    "prioritized": lambda unit: gear.Prioritized(unit=unit),
    "prioritized, table": lambda unit: gear.Prioritized(alpha=2, unit=unit, normalize="table"),
}


@pytest.mark.parametrize("sampler", SAMPLERS)
def test_items_are_drawn_equally_often_while_the_table_changes(sampler: str, store: Store) -> None:
    """Exactly those that there are, each as often as any other, before and after trajectories come and go."""
    kind = store.kind
    data = dataset(store.source, kind, SAMPLERS[sampler](ITEMS[kind][0]), 300)
    for turn in range(3):
        items = rows_of_items(kind, store.lengths)
        if len(store.tables) > 1:
            data.sample()  # over shards a batch is of the trajectories at the one before
        check_counts(counted(data, items), np.ones(len(items)))
        store.remove(list(store.lengths)[2 * turn])
        for number in range(9 + 3 * turn, 12 + 3 * turn):
            store.add(number, 4 + number % 5)


@pytest.mark.parametrize(("normalize", "alpha", "eps"), [("batch", 1, 0.5), ("table", 2, 0.0)])
def test_priorities_of_items_are_found_again(normalize: Any, alpha: int, eps: float, store: Store) -> None:
    """Rows that a batch names get priorities; the next draws are in proportion to them, with weights that say so."""
    kind = store.kind
    sampler = gear.Prioritized(alpha, 0.75, eps=eps, unit=ITEMS[kind][0], normalize=normalize)
    data = dataset(store.source, kind, sampler, 1500)
    batch = data.sample()
    rows = torch.tensor(rows_in(batch))
    data.update_priority(batch, rows[:, 0] % 4 + rows[:, 1] % 3)
    for _ in range(
        2 * (len(store.tables) > 1)
    ):  # they are sent with a batch, and count for the one after the next
        data.sample()
    items = rows_of_items(kind, store.lengths)
    of_group: Any = np.mean if "mean" in kind else np.max
    masses = np.array([of_group([(n % 4 + step % 3 + eps) ** alpha for n, step in rows]) for rows in items])
    check_counts(counted(data, items), masses)
    batch = data.sample()
    mass_of = {row: mass for rows, mass in zip(items, masses, strict=True) for row in rows}
    drawn = np.array([mass_of[row] for row in rows_in(batch)])
    least = drawn.min() if normalize == "batch" else masses[masses > 0].min()
    np.testing.assert_allclose(batch["priority_weight"], (least / drawn) ** 0.75, rtol=1e-5)
    again, state = dataset(store.source, kind, sampler, 1500), data.state_dict()
    again.load_state_dict(state)
    assert torch.equal(again.state_dict()["priorities"]["leaves"], state["priorities"]["leaves"])
