"""The kernels of the sum tree, under Triton's interpreter, and their torch twins: the same to the last bit."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from priority_common import (
    LARGEST_UNIFORM,
    PHILOX,
    POISON,
    check_consistent,
    copy_of,
    counters,
    descend_host,
    descend_twin,
    extreme_uniforms,
    levels_of,
    outputs,
    priorities,
    rounding_traps,
    same_bits,
    same_tree,
    signed,
    tree_of,
    two_words,
    uniforms_to,
)

from gear_loader.kernels import priority_reference as reference
from gear_loader.kernels.sum_tree import (
    BAD_POSITION,
    DISTINCT_MISSING,
    EMPTY_DRAWS,
    FANOUT,
    GONE,
    LOWEST_LEAF,
    NOWHERE,
    UNSET,
    SumTree,
)

triton = pytest.importorskip("triton")
import triton.language as tl  # noqa: E402

from gear_loader.kernels import priority  # noqa: E402

if torch.cuda.is_available():
    pytest.skip("the kernels are compiled here", allow_module_level=True)

BOTH = pytest.mark.parametrize("run", [priority, reference], ids=["kernel", "twin"])
DRAWS = pytest.mark.parametrize("distinct", [False, True], ids=["draw", "distinct"])
LARGEST = torch.finfo(torch.float32).max
# Update options beside the two that follow from the values.
WEIGHTS: dict[str, dict[str, float]] = {
    "plain": {},
    "eps": {"eps": 0.01},
    "alpha": {"alpha": 0.6},
    "both": {"alpha": 0.4, "eps": 1e-6},
    "uniform": {"alpha": 0.0, "eps": 0.5},
    "floor": {"floor": 3e7},
    "all": {"alpha": 1.3, "eps": 0.25, "floor": 3e7},
}


def random_update(
    capacity: int, count: int, seed: int, *, unset: bool = False, outside: float = 0.15
) -> tuple[torch.Tensor, torch.Tensor]:
    """Items, some of them several times and some negative, and their values."""
    random = np.random.default_rng(seed)
    items = random.integers(0, capacity, count)
    items[random.random(count) < outside] = -1 - seed
    values = priorities(count, seed + 1)
    if unset:
        values = np.where(random.random(count) < 0.3, np.float32(UNSET), values)
        values = np.where(random.random(count) < 0.2, np.float32(GONE), values)
    return torch.from_numpy(items), torch.from_numpy(values.astype(np.float32))


def check_update(
    tree: SumTree, items: torch.Tensor, values: torch.Tensor, **options: Any
) -> tuple[SumTree, SumTree]:
    """Run both on copies of the tree; arguments are left as they were. The trees that came out."""
    found, expected = copy_of(tree), copy_of(tree)
    before = items.clone(), values.clone()
    priority.update(found, items, values, **options)
    reference.update(expected, items, values, **options)
    same_bits(items, before[0], "items")
    same_bits(values, before[1], "values")
    same_tree(found, expected)
    return found, expected


@pytest.fixture
def few_programs(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """How many programs each launch of an update had; the interpreter, which runs them in turn, gets at most 3."""
    programs: list[int] = []
    launch = priority._launch_update

    def launch_few(
        tree: SumTree, items: Any, values: Any, first: int, last: int, most: int, **rest: Any
    ) -> None:
        programs.append(min(most, 3))
        launch(tree, items, values, first, last, programs[-1], **rest)

    monkeypatch.setattr(priority, "_launch_update", launch_few)
    return programs


@triton.jit
def uniform_kernel(p_random, p_rows, p_out, level, N: tl.constexpr):
    i_row = tl.load(p_rows + tl.arange(0, N)).to(tl.uint32)
    b_uniform = priority.uniform(tl.load(p_random), tl.load(p_random + 1), i_row, level)
    tl.store(p_out + tl.arange(0, N), b_uniform)


@triton.jit
def choose_kernel(p_children, p_uniforms, p_out, N: tl.constexpr, LEAVES: tl.constexpr):
    i_row = tl.arange(0, N)
    b_children = tl.load(p_children + i_row[:, None] * 32 + tl.arange(0, 32)[None, :])
    i_child = priority._choose(b_children, tl.load(p_uniforms + i_row), LEAVES)
    tl.store(p_out + i_row, i_child.to(tl.int64))


def kernel_uniforms(random: torch.Tensor, rows: torch.Tensor, level: int) -> torch.Tensor:
    out = torch.full((len(rows),), torch.nan, dtype=torch.float64)
    uniform_kernel[(1,)](random, rows, out, level, N=len(rows))
    return out


def descend_kernel(tree: SumTree, us: np.ndarray) -> np.ndarray:
    """Items that the kernel's own way through a node chooses for the uniforms us[level], float64 [depth + 1, n]."""
    count = us.shape[1]
    size = triton.next_power_of_2(count)
    uniforms = torch.zeros(len(us), size, dtype=torch.float64)
    uniforms[:, :count] = torch.from_numpy(us)
    nodes = torch.zeros(size, dtype=torch.int64)
    for level in range(tree.depth, -1, -1):
        values = tree.level(level, tree.sums) if level else tree.leaves.double()
        children, chosen = values.view(-1, FANOUT)[nodes], torch.full((size,), POISON)
        choose_kernel[(1,)](children, uniforms[level], chosen, N=size, LEAVES=level == 0)
        nodes = nodes * FANOUT + chosen
    return nodes[:count].numpy()


@pytest.mark.parametrize("run", [kernel_uniforms, reference.uniforms], ids=["kernel", "twin"])
@pytest.mark.parametrize(("counter", "key", "words"), PHILOX)
def test_random_numbers_are_philox(
    run: Callable[..., torch.Tensor], counter: tuple[int, ...], key: tuple[int, ...], words: tuple[int, ...]
) -> None:
    if run is kernel_uniforms and counter[1] >= 2**30:
        pytest.skip("a level is an int32, of which no tree has so many")
    random, rows = counters(signed(*key), signed(*counter[2:])), torch.tensor([counter[0]])
    for half in range(2):
        uniform = run(random, rows, 2 * counter[1] + half)
        assert uniform.dtype == torch.float64
        assert uniform.tolist() == [two_words(*words[2 * half : 2 * half + 2])]


@pytest.mark.parametrize(
    ("key", "step"), [(0, 2**32), (-1, -1), (-(2**63), 2**63 - 1), (0x0123456789ABCDEF, 1)]
)
def test_random_numbers_of_kernel_and_twin_are_the_same(key: int, step: int) -> None:
    rows = torch.tensor([0, 1, 2, 3, 2**16, 2**31 - 1, 2**31, 2**32 - 1])
    for level in range(7):
        random = counters(key, step)
        same_bits(kernel_uniforms(random, rows, level), reference.uniforms(random, rows, level))


@pytest.mark.parametrize("capacity", [1, 31, 32, 1025, 33000])
def test_build(capacity: int) -> None:
    expected = tree_of(priorities(capacity, seed=capacity))
    found = SumTree(capacity)
    found.leaves.copy_(expected.leaves)
    for nodes in (found.sums, found.mins, found.maxs):
        for level, (_, count) in enumerate(found.shape, start=1):
            found.level(level, nodes)[:count] = POISON
    priority.build(found)
    same_tree(found, expected)


@pytest.mark.parametrize("capacity", [1, 33, 1025])
def test_updates(capacity: int) -> None:
    # Several in a row on one tree: each begins with what the last one left.
    tree = tree_of(priorities(capacity, seed=7))
    for seed, (count, options) in enumerate(
        zip((1, 31, 256, 300, 5, 64, 513), WEIGHTS.values(), strict=True)
    ):
        unset = seed % 2 == 1
        items, values = random_update(capacity, count, seed, unset=unset)
        tree, _ = check_update(tree, items, values, unset=unset, **options)
    check_consistent(tree)


@BOTH
def test_an_update_by_hand(run: Any) -> None:
    tree = tree_of(np.array([1, 2, 3, 4], dtype=np.float32))
    items = torch.tensor([2, -1, 0, 2, -(2**63), 3])
    values = torch.tensor([9.0, 50.0, 0.0, 0.5, 70.0, 4.0])
    run.update(tree, items, values, alpha=2.0)
    assert tree.leaves[:5].tolist() == [0, 2, 0.25, 16, 0]
    assert float(tree.total()) == 18.25
    assert float(tree.minimum()) == 0.25
    # Rows that were left out do not raise the maximum; the row that another one overrode does.
    assert float(tree.maximum) == 9
    run.update(tree, torch.tensor([0]), torch.tensor([3.0]), alpha=0.5, eps=1.0)
    assert tree.leaves[:5].tolist() == [2, 2, 0.25, 16, 0]
    assert tree.status.tolist() == [NOWHERE, 0, 0, 0]


@BOTH
def test_first_values_by_hand(run: Any) -> None:
    tree = tree_of(np.full(8, 5, dtype=np.float32))
    run.update(tree, torch.arange(3), torch.tensor([UNSET, GONE, 7.0]), unset=True, eps=1.0)
    assert tree.leaves[:4].tolist() == [2, 0, 8, 5]  # the maximum is 1 before
    assert float(tree.maximum) == 7
    run.update(tree, torch.arange(3), torch.tensor([UNSET, UNSET, GONE]), unset=True, floor=20.0)
    assert tree.leaves[:4].tolist() == [20, 20, 0, 5]
    assert float(tree.maximum) == 20
    run.update(tree, torch.tensor([0]), torch.tensor([1.0]), floor=3.0)
    assert float(tree.maximum) == 20
    # What would be too large is the largest there is.
    run.update(tree, torch.arange(2), torch.tensor([1e38, UNSET]), unset=True, alpha=2.0, floor=1e30)
    assert tree.leaves[:2].tolist() == [LARGEST, LARGEST]
    assert tree.status.tolist() == [NOWHERE, 0, 0, 0]


@pytest.mark.parametrize("alone", [4096, 0], ids=["one-launch", "a-launch-a-phase"])
def test_a_new_item_gets_the_maximum_from_before_its_update(
    alone: int, few_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    # The large value is in the first tile; rows of later ones must not see it yet.
    monkeypatch.setattr(priority, "ALONE", alone)
    values = torch.full((1000,), UNSET)
    values[3] = 100.0
    found, _ = check_update(SumTree(1000), torch.arange(1000), values, unset=True)
    assert found.leaves[:1000].unique().tolist() == [1, 100]
    assert float(found.maximum) == 100


@BOTH
def test_tiny_priorities_stay_drawable_and_zero_stays_zero(run: Any) -> None:
    tree = SumTree(40)
    values = torch.tensor([1e-45, 1e-38, LOWEST_LEAF, 1e-30, 0.0, 1e-20])
    run.update(tree, torch.arange(6), values)
    assert tree.leaves[:6].tolist() == [LOWEST_LEAF, LOWEST_LEAF, LOWEST_LEAF, *values[3:].tolist()]
    run.update(tree, torch.arange(6), values, alpha=4.0)
    assert tree.leaves[:6].tolist() == [LOWEST_LEAF] * 4 + [0.0, LOWEST_LEAF]
    run.update(tree, torch.arange(6), values, alpha=0.0)
    assert tree.leaves[:6].tolist() == [1, 1, 1, 1, 0, 1]


@pytest.mark.parametrize(
    ("capacity", "count", "options"),
    [(33, 65, {}), (1025, 400, {}), (33, 65, {"alpha": 0.6}), (33, 65, {"alpha": 0.6, "unset": True})],
)
def test_many_programs_do_as_one_does(
    capacity: int,
    count: int,
    options: dict[str, Any],
    few_programs: list[int],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    tree = tree_of(priorities(capacity, seed=2))
    items, values = random_update(capacity, count, seed=4, unset="unset" in options)
    options = {"eps": 0.5, **options}
    alone, _ = check_update(tree, items, values, **options)
    assert few_programs == []  # one launch of a kernel of its own
    monkeypatch.setattr(priority, "ALONE", 64)
    few_programs.clear()
    many, _ = check_update(tree, items, values, **options)
    assert few_programs[:3] == [3, 3, 3]
    same_tree(many, alone)
    monkeypatch.setattr(priority, "MOST_CLAIMS", 300)
    few_programs.clear()
    parts, _ = check_update(tree, items, values, **options)
    assert len(few_programs) >= 4 * -(-count // 300)
    same_tree(parts, alone)
    check_consistent(parts)


@BOTH
def test_an_update_of_nothing(run: Any) -> None:
    tree = tree_of(priorities(100))
    before = copy_of(tree)
    run.update(tree, torch.zeros(0, dtype=torch.int64), torch.zeros(0))
    run.update(tree, torch.full((300,), -1), torch.full((300,), 5.0))
    same_tree(tree, before)
    run.update(tree, torch.tensor([-1]), torch.tensor([5.0]), floor=3.0)  # counts without rows that count
    assert float(tree.maximum) == 3


BAD: list[tuple[float, dict[str, float]]] = [
    *((value, {}) for value in (float("nan"), float("inf"), float("-inf"), -1e-30, UNSET, GONE)),
    *((-0.5, {"eps": 1.0}), (1e30, {"alpha": 2.0}), (3.4e38, {"eps": 1e37}), (-3.0, {"alpha": 2.0})),
    *((float("nan"), {"alpha": 0.5}), (float("inf"), {"alpha": 0.0}), (float("nan"), {"alpha": 0.0})),
]


@BOTH
@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, where a GPU makes a NaN
def test_a_bad_value_refuses_the_update(run: Any) -> None:
    items, values = random_update(500, 401, seed=6, outside=0)
    values.clamp_(max=1e3)
    for i, (value, options) in enumerate(BAD):
        tree, bad, position = tree_of(priorities(500, seed=8)), values.clone(), 0 if i == 3 else 299
        before = copy_of(tree)
        bad[position] = value
        bad[position + 1 :: 50] = value  # later ones are not what is noted
        run.update(tree, items, bad, floor=100.0, **options)
        before.status[BAD_POSITION] = position
        same_tree(tree, before)


@pytest.mark.parametrize(("run", "alone"), [(priority, 4096), (priority, 16), (reference, 4096)])
def test_after_a_refusal_all_updates_are_refused(
    run: Any, alone: int, few_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority, "ALONE", alone)
    tree = tree_of(priorities(500, seed=8))
    items, values = random_update(500, 600, seed=6, outside=0)
    values[400] = -1
    run.update(tree, items, values)
    before = copy_of(tree)
    for bad, noted in ((None, 400), (10, 10), (500, 10)):  # the lowest of all
        good = values.abs()
        if bad is not None:
            good[bad] = torch.nan
        run.update(tree, items, good)
        before.status[BAD_POSITION] = noted
        same_tree(tree, before)
    tree.status[BAD_POSITION] = NOWHERE
    run.update(tree, items, values.abs())
    assert tree.status.tolist() == [NOWHERE, 0, 0, 0]
    assert not torch.equal(tree.leaves, before.leaves)
    check_consistent(tree)


@BOTH
def test_a_bad_value_of_a_row_that_is_left_out_is_not_looked_at(run: Any) -> None:
    tree = SumTree(10)
    items, values = torch.tensor([-1, 2, -5]), torch.tensor([float("nan"), 3.0, -8.0])
    run.update(tree, items, values)
    assert tree.leaves[:3].tolist() == [0, 0, 3]
    assert tree.status.tolist() == [NOWHERE, 0, 0, 0]


@BOTH
def test_first_values_are_set_while_a_refusal_is_noted(run: Any) -> None:
    tree = SumTree(10)
    run.update(tree, torch.tensor([1]), torch.tensor([-3.0]))
    run.update(tree, torch.tensor([1, 2]), torch.tensor([UNSET, 4.0]), unset=True)
    assert tree.leaves[:3].tolist() == [0, 1, 4]
    assert tree.status.tolist() == [0, 0, 0, 0]


def ints(*shape: int, dtype: torch.dtype = torch.int64, device: str = "cpu") -> torch.Tensor:
    return torch.zeros(*shape, dtype=dtype, device=device)


I32 = torch.int32
# fmt: off
BAD_ROWS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"items": ints(4, dtype=I32)}, TypeError, "items is torch.int32"),
    ({"values": torch.zeros(4, dtype=torch.float64)}, TypeError, "values is torch.float64"),
    ({"values": torch.zeros(5)}, TypeError, r"values is torch.float32 \[5\]"),
    ({"values": torch.zeros(4, 1)}, TypeError, r"values is torch.float32 \[4, 1\]"),
    ({"items": ints(8)[::2]}, TypeError, "contiguous"),
    ({"values": torch.zeros(8)[::2]}, TypeError, "contiguous"),
    ({"items": ints(4, device="meta")}, ValueError, "items is on meta"),
    ({"values": torch.zeros(4, device="meta")}, ValueError, "values is on meta"),
]
BAD_WEIGHTS: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({name: value}, ValueError, "not negative")
    for name in ("alpha", "eps") for value in (-0.5, float("inf"), float("nan"))
]
BAD_RANDOM: list[tuple[dict[str, Any], type[Exception], str]] = [
    ({"random": ints(2, dtype=I32)}, TypeError, "random is torch.int32"),
    ({"random": ints(1)}, TypeError, "random is"),
]
# fmt: on


def test_arguments_are_checked() -> None:
    tree = tree_of(priorities(40))
    before, good = copy_of(tree), {"items": ints(4), "values": torch.ones(4)}
    for run, more, cases in (
        (priority.update, {}, BAD_ROWS + BAD_WEIGHTS),
        (priority.draw, {"random": ints(2)}, BAD_ROWS + BAD_RANDOM),
        (priority.draw_distinct, {"random": ints(2)}, BAD_ROWS + BAD_RANDOM),
    ):
        for change, error, message in cases:
            with pytest.raises(error, match=message):
                run(tree, **{**good, **more, **change})
            same_tree(tree, before)


def check_draw(tree: SumTree, count: int, key: int, step: int, *, distinct: bool) -> torch.Tensor:
    """Both draw the same from copies of the tree, which stay as they were but for their status. The items."""
    name = "draw_distinct" if distinct else "draw"
    results = []
    for run in (priority, reference):
        drawn, (items, values), random = copy_of(tree), outputs(count), counters(key, step)
        getattr(run, name)(drawn, random, items, values)
        assert random.tolist() == [key, step]
        results.append((items, values, drawn))
    (found, leaves, after), (items, values, expected) = results
    same_bits(found, items, "items")
    same_bits(leaves, values, "values")
    same_tree(after, expected)
    for part in ("leaves", "sums", "mins", "maxs", "maximum"):
        same_bits(getattr(after, part), getattr(tree, part), part)
    there = found >= 0
    assert torch.equal(leaves[there], tree.leaves[found[there]])
    assert bool((leaves[there] > 0).all())
    assert bool((found < tree.capacity).all())
    assert found[~there].tolist() == [-1] * int((~there).sum())
    assert leaves[~there].tolist() == [0] * int((~there).sum())
    if distinct:
        assert len(found[there].unique()) == int(there.sum())
    return found


@DRAWS
@pytest.mark.parametrize("capacity", mostly_long([1, 33, 1025], 1, 33))
def test_draws(capacity: int, distinct: bool) -> None:
    leaves = priorities(capacity, seed=capacity, orders=60 if capacity == 1025 else 12)
    leaves[capacity // 2] = 1  # a tree of one item is not empty
    tree = tree_of(leaves)
    positive = int((leaves > 0).sum())
    for step, count in enumerate((1, 9, 33)):
        items = check_draw(tree, count, capacity, step, distinct=distinct)
        assert int((items >= 0).sum()) == (min(count, positive) if distinct else count)


@DRAWS
def test_an_empty_tree_draws_nothing_and_counts_it(distinct: bool) -> None:
    tree = SumTree(33)
    for run, times in itertools.product((priority, reference), (1, 2)):
        drawn, name = copy_of(tree), "draw_distinct" if distinct else "draw"
        for _ in range(times):
            items, values = outputs(20)
            getattr(run, name)(drawn, counters(0, 0), items, values)
            assert items.tolist() == [-1] * 20
            assert values.tolist() == [0] * 20
        assert int(drawn.status[EMPTY_DRAWS]) == times
        assert int(drawn.status[DISTINCT_MISSING]) == (20 * times if distinct else 0)
        assert int(drawn.status[BAD_POSITION]) == NOWHERE
        assert float(drawn.total()) == 0


@DRAWS
@BOTH
def test_a_draw_of_no_rows_does_nothing(run: Any, distinct: bool) -> None:
    for tree in (tree_of(priorities(100)), SumTree(100)):
        before = copy_of(tree)
        items, values = outputs(0)
        (run.draw_distinct if distinct else run.draw)(tree, counters(0, 0), items, values)
        same_tree(tree, before)


def test_too_few_items_for_a_distinct_draw() -> None:
    count = 6
    leaves = np.zeros(1000, dtype=np.float32)
    positive = [0, 31, 32, 700, 999]
    leaves[positive] = [1e-6, 1, 1e6, 3, 1e-3]
    tree = tree_of(leaves)
    items = check_draw(tree, count, 2, 9, distinct=True)
    assert sorted(items[:5].tolist()) == positive
    assert items[5:].tolist() == [-1] * (count - 5)
    items, values = outputs(count)
    priority.draw_distinct(tree, counters(2, 9), items, values)
    assert tree.status.tolist() == [NOWHERE, 0, count - 5, 0]


def test_a_distinct_draw_of_everything_draws_everything() -> None:
    # Many turns: at the end little is left beside much that was drawn.
    tree = tree_of(priorities(31, seed=31, zeros=0))
    assert sorted(check_draw(tree, 31, 1, 1, distinct=True).tolist()) == list(range(31))


WALKS = pytest.mark.parametrize(
    "walk", [descend_kernel, descend_twin, descend_host], ids=["kernel", "twin", "host"]
)


@WALKS
def test_every_positive_item_can_be_drawn(walk: Callable[..., Any]) -> None:
    leaves = priorities(1025, seed=1025)
    items = np.flatnonzero(leaves)
    us = uniforms_to(levels_of(leaves), items)
    assert float(us.min()) >= 0
    assert float(us.max()) <= LARGEST_UNIFORM
    assert walk(tree_of(leaves), us).tolist() == items.tolist()


@WALKS
def test_extreme_uniforms_never_draw_zero(walk: Callable[..., Any]) -> None:
    for capacity, place in ((1, 0), (32, 15), (32, 31), (33, 32), (1025, 16), (1025, 512), (1025, 1024)):
        leaves = np.zeros(capacity, dtype=np.float32)
        leaves[place] = 1e-6 * (place + 1)
        tree = tree_of(leaves)
        assert set(walk(tree, extreme_uniforms(tree.depth + 1)).tolist()) == {place}
    for leaves in rounding_traps().values():
        tree = tree_of(leaves)
        items = walk(tree, extreme_uniforms(tree.depth + 1))
        assert set(items.tolist()) <= set(np.flatnonzero(leaves).tolist())


def test_a_bad_position_is_that_in_the_whole_update(
    few_programs: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(priority, "ALONE", 0)
    monkeypatch.setattr(priority, "MOST_CLAIMS", 16)
    tree = SumTree(100)
    values = torch.ones(60)
    values[[41, 57]] = torch.nan
    priority.update(tree, torch.arange(60), values)
    assert tree.status[BAD_POSITION] == 41
    assert not tree.leaves.any()
