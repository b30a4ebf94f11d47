"""The sum tree on the CPU: against the kernels' twin to the last bit, beside a naive twin, and what it draws."""

from __future__ import annotations

import math

import numpy as np
import pytest
import torch
from priority_common import (
    Array,
    counters,
    host_of,
    outputs,
    priorities,
    same_bits,
    tree_of,
)

from gear_loader.errors import PriorityError
from gear_loader.kernels import priority_reference as reference
from gear_loader.kernels.sum_tree import FANOUT, SumTree
from gear_loader.selection.tree import PriorityTree

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")


def same_as_built(tree: PriorityTree) -> None:
    """Every node has the very bits that a tree built from the leaves has: nothing drifts."""
    built = host_of(tree.leaves[: tree.capacity].copy())
    assert not tree.leaves[tree.capacity :].any()
    for name in ("_sums", "_mins", "_maxs"):
        assert getattr(tree, name).tobytes() == getattr(built, name).tobytes()


def same_nodes(tree: PriorityTree, twin: SumTree) -> None:
    """Every node that both have is the same in both, to the bit."""
    assert tree.leaves.tobytes() == twin.leaves.numpy()[: len(tree.leaves)].tobytes()
    assert not twin.leaves[len(tree.leaves) :].any()
    for level, (_, count) in enumerate(twin.shape, start=1):
        offset = tree._offsets[5 * (level - 1)]
        sums = tree._sums[offset : offset + count]
        assert sums.tobytes() == twin.level(level, twin.sums).numpy()[:count].tobytes()
    assert tree._mins.tobytes() == twin.mins.numpy().tobytes()
    assert tree._maxs.tobytes() == twin.maxs.numpy().tobytes()
    assert tree.total == float(twin.total())
    assert tree.minimum == float(twin.minimum())


@pytest.mark.parametrize("capacity", [1, 33, 1024, 1025, 70_001])
def test_the_compiled_tree_is_the_twin_to_the_last_bit(capacity: int) -> None:
    random = np.random.default_rng(capacity)
    leaves = priorities(capacity, seed=capacity)
    leaves[capacity // 2] = 1
    tree, twin = host_of(leaves), tree_of(leaves)
    same_nodes(tree, twin)
    ends = (0, -1, 2**63 - 1, -(2**63))
    keys, steps = (*ends, 77, -5), (-1, *ends[2:], 0, -5, 3)
    for count, key, step in zip((1, 5, 63, 64, 65, 1000), keys, steps, strict=True):
        items = random.integers(0, capacity, count)
        values = priorities(count, seed=count)
        tree.update(items, values)
        reference.update(twin, torch.from_numpy(items), torch.from_numpy(values))
        tree.update(np.array([capacity // 3]), np.ones(1, dtype=np.float32))
        reference.update(twin, torch.tensor([capacity // 3]), torch.ones(1))
        same_nodes(tree, twin)
        for distinct in (False, True):
            rows = min(count, int((tree.leaves > 0).sum())) if distinct else count
            found = tree.draw(rows, key=key, step=step, distinct=distinct)
            expected = outputs(rows)
            draw = reference.draw_distinct if distinct else reference.draw
            draw(twin, counters(key, step), *expected)
            for one, other in zip(found, expected, strict=True):
                same_bits(torch.from_numpy(one), other)
            same_nodes(tree, twin)
    for largest in (False, True):
        best = (each.top(min(capacity, 50), largest=largest) for each in (tree, twin))
        for one, other in zip(*best, strict=True):
            same_bits(torch.from_numpy(one), other)


class TreeMachine(stateful.RuleBasedStateMachine):
    """A tree and a plain array, through any sequence of changes and questions."""

    @stateful.initialize(
        capacity=st.sampled_from([1, 2, 31, 32, 33, 64, 97, 1000, 1024, 1025, 2500]),
        seed=st.integers(0, 2**32 - 1),
    )
    def begin(self, capacity: int, seed: int) -> None:
        self.tree = PriorityTree(capacity)
        self.random = np.random.default_rng(seed)
        self.leaves = np.zeros(capacity, dtype=np.float32)
        self.step = 0

    def some(self, count: int, zeros: float) -> Array:
        return priorities(count, int(self.random.integers(2**32)), zeros=zeros)

    @stateful.rule(count=st.integers(0, 200), zeros=st.sampled_from([0.0, 0.3, 1.0]), narrow=st.booleans())
    def update(self, count: int, zeros: float, narrow: bool) -> None:
        high = min(len(self.leaves), 5) if narrow else len(self.leaves)
        items, values = self.random.integers(0, high, count), self.some(count, zeros)
        given = items.copy(), values.copy()
        self.tree.update(items, values)
        assert np.array_equal(items, given[0])
        assert np.array_equal(values, given[1])
        for item, value in zip(items.tolist(), values, strict=True):
            self.leaves[item] = value

    @stateful.rule(begin=st.floats(0, 1), end=st.floats(0, 1), zeros=st.sampled_from([0.0, 0.5, 1.0]))
    def write_leaves(self, begin: float, end: float, zeros: float) -> None:
        part = slice(*(int(place * len(self.leaves)) for place in sorted((begin, end))))
        values = self.some(len(self.leaves[part]), zeros)
        self.leaves[part] = values
        self.tree.leaves[: len(self.leaves)][part] = values
        self.tree.build()

    @stateful.rule(count=st.integers(1, 300))
    def draw(self, count: int) -> None:
        self.step += 1
        if not self.leaves.any():
            with pytest.raises(PriorityError, match="Every priority is zero"):
                self.tree.draw(count, key=1, step=self.step)
            return
        items, values = self.tree.draw(count, key=1, step=self.step)
        assert len(items) == len(values) == count
        assert items.min() >= 0
        assert items.max() < len(self.leaves)
        assert (values > 0).all()
        assert np.array_equal(values, self.leaves[items])
        assert np.array_equal(items, self.tree.draw(count, key=1, step=self.step)[0])

    @stateful.rule(part=st.floats(0, 1.2), most=st.integers(1, 300))
    def draw_distinct(self, part: float, most: int) -> None:
        self.step += 1
        positive = int((self.leaves > 0).sum())
        count = max(1, min(most, int(part * positive)))
        if count > positive:
            with pytest.raises(PriorityError):
                self.tree.draw(count, key=2, step=self.step, distinct=True)
            return
        items, values = self.tree.draw(count, key=2, step=self.step, distinct=True)
        assert len(set(items.tolist())) == len(items) == count
        assert (values > 0).all()
        assert np.array_equal(values, self.leaves[items])

    @stateful.rule(part=st.floats(0, 1), largest=st.booleans())
    def top(self, part: float, largest: bool) -> None:
        count = max(1, int(part * len(self.leaves)))
        positive = np.flatnonzero(self.leaves)
        order = np.argsort(-self.leaves[positive] if largest else self.leaves[positive], kind="stable")
        expected = positive[order][:count].tolist()
        items, values = self.tree.top(count, largest=largest)
        assert items.tolist() == expected + [-1] * (count - len(expected))
        assert values.tolist() == self.leaves[expected].tolist() + [0] * (count - len(expected))

    @stateful.invariant()
    def leaves_are_what_was_set(self) -> None:
        if hasattr(self, "tree"):
            assert np.array_equal(self.tree.leaves[: len(self.leaves)], self.leaves)

    @stateful.invariant()
    def sums_and_extremes_are_exact(self) -> None:
        if hasattr(self, "tree"):
            exact = math.fsum(self.leaves.tolist())
            # A tree of sums is at most its depth in binary levels roundings away from the exact sum.
            assert abs(self.tree.total - exact) <= 13 * 2.0**-53 * exact
            positive = self.leaves[self.leaves > 0]
            assert self.tree.minimum == (positive.min() if len(positive) else math.inf)

    @stateful.invariant()
    def nothing_drifts(self) -> None:
        if hasattr(self, "tree"):
            same_as_built(self.tree)


def test_the_compiled_tree_beside_a_naive_one() -> None:
    stateful.run_state_machine_as_test(TreeMachine)


def test_tops_of_equal_leaves_come_in_order() -> None:
    leaves = np.zeros(3000, dtype=np.float32)
    leaves[::7] = 2
    leaves[1000:1100] = 5
    leaves[2500] = 5
    tree = host_of(leaves)
    assert tree.top(103)[0].tolist() == [*range(1000, 1100), 2500, 0, 7]
    twos = [i for i in range(0, 3000, 7) if leaves[i] == 2]
    assert tree.top(60, largest=False)[0].tolist() == twos[:60]
    items, values = tree.top(3000)
    assert len(items) == len(values) == 3000
    assert (items[int((leaves > 0).sum()) :] == -1).all()


@pytest.mark.parametrize("capacity", [1, 1024, 1025, 32**5, 32**5 + 1, 2**31 - 1])
def test_the_geometry_of_trees_of_all_sizes(capacity: int) -> None:
    tree = SumTree(capacity, device="meta")  # no memory behind it
    below, end = capacity, 0
    for offset, count in tree.shape:
        assert offset == end
        assert (count - 1) * FANOUT < below <= count * FANOUT
        below, end = count, offset + -(-count // FANOUT) * FANOUT
    assert below <= FANOUT
    assert len(tree.shape) == 1 or tree.shape[-2][1] > FANOUT
    assert tree.sums.shape == tree.mins.shape == tree.maxs.shape == (end,)
    assert len(tree.leaves) == FANOUT * tree.shape[0][1]
    assert tree.levels.shape == (tree.depth, 2)
    if capacity >= 10_000:
        assert tree.node_bytes < 0.6 * capacity


def test_other_capacities_are_no_trees() -> None:
    for capacity in (0, -1, 2**31):
        with pytest.raises(ValueError, match=f"capacity is {capacity}; expected 1 to 2147483647"):
            SumTree(capacity, device="meta")
