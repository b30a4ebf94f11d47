"""Selection by priority beside a naive twin, while trajectories come and go: every leaf, the total, what is drawn."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import SCHEMA, episode, open_tickets

import gear_loader as gear
from gear_loader.errors import (
    CorruptTableError,
    PriorityError,
    StaleIndexError,
    TableEmptyError,
    TableFullError,
)
from gear_loader.storage.counters import DIRTY

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")


@dataclasses.dataclass
class Trajectory:
    """What the twin knows of one.

    Attributes:
        slot, generation: where it is.
        given: the priority that it was added with.
        priorities: of each item; None until the sampler has seen it.
    """

    number: int
    length: int
    slot: int
    generation: int
    given: float | None
    priorities: list[float] | None = None


class Twin:
    """A table and a dataset on it, and beside them a dict of trajectories in order of addition, by sequence number."""

    def __init__(
        self,
        *,
        unit: Any,
        block_steps: int,
        max_steps: int,
        max_trajectories: int,
        chosen: Callable[[Any], Any] | None = None,
    ) -> None:
        self.table = gear.Table.create(
            SCHEMA,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            on_full="evict_oldest",
        )
        self.unit, self.longest, self.chosen = unit, max_steps, chosen
        self.data = gear.ReplayDataset(
            self.table,
            batch_size=6,
            windows=gear.Window(1),
            device="cpu",
            prefetch=0,
            sampler=gear.Prioritized(1, 0.5, unit=unit, normalize="table"),
            draws=gear.Draws(subset=chosen),
        )
        self.live: dict[int, Trajectory] = {}
        self.numbers = itertools.count()
        self.maximum = 1.0
        self.stale = 0
        self.drawn = 0

    # Changes of the table.

    def added(self, slots: list[int], lengths: list[int], given: list[float | None]) -> None:
        """Trajectories were added: what had to go for them went, the oldest first."""
        generation = self.table._engine.region.array("generation")
        for slot, length, priority in zip(slots, lengths, given, strict=True):
            number = next(self.numbers)
            self.live[number] = Trajectory(number, length, slot, int(generation[slot]), priority)
        there = len(self.table)
        for number in list(self.live)[: len(self.live) - there]:
            del self.live[number]
        assert [t.slot for t in self.live.values()] == self.table.indices().tolist()

    def add(self, lengths: list[int], given: list[float | None]) -> None:
        lengths = [1 + length % self.longest for length in lengths]
        start = next(self.numbers)
        self.numbers = itertools.count(start)
        rows = [episode(start + i, length) for i, length in enumerate(lengths)]
        try:
            if len(rows) == 1:
                slots = [self.table.add(rows[0], priority=given[0])]
            elif None in given:
                given = [None] * len(rows)
                slots = self.table.extend(rows).tolist()
            else:
                slots = self.table.extend(rows, priority=given).tolist()
        except TableFullError:
            return
        self.added(slots, lengths, given)

    def remove(self, numbers: list[int]) -> None:
        self.table.remove([self.live[number].slot for number in numbers])
        for number in numbers:
            del self.live[number]

    # What the sampler must know after a look.

    def members(self) -> list[Trajectory]:
        if self.chosen is None:
            return list(self.live.values())
        return [t for number, t in self.live.items() if self.chosen(np.array([number]))[0]]

    def seen(self) -> None:
        """The sampler has looked at the table."""
        new = [t for t in self.members() if t.priorities is None]
        self.maximum = max([self.maximum, *(t.given for t in new if t.given is not None)])
        for t in new:
            count = t.length if self.unit == "step" else 1
            t.priorities = [self.maximum if t.given is None else t.given] * count

    def look(self) -> None:
        """Let the sampler look, and compare every leaf."""
        state = self.data.state_dict()["priorities"]
        self.seen()
        members = self.members()
        extent, block_ids = self.table._engine.reader().index_arrays()
        size = self.table._engine.region.layout.block_steps
        expected: dict[int, float] = {}
        for t in members:
            assert t.priorities is not None
            for step, priority in enumerate(t.priorities):
                if self.unit == "step":
                    block = int(block_ids[extent[t.slot, 1] + step // size])
                    expected[block * size + step % size] = priority
                else:
                    expected[t.slot] = priority
        tree: Any = self.data._selected().priorities.leaves.tree  # type: ignore[attr-defined]
        leaves = np.asarray(tree.leaves)
        found = {place: float(leaves[place]) for place in np.flatnonzero(leaves).tolist()}
        assert found == {place: priority for place, priority in expected.items() if priority > 0}
        positive = [priority for priority in expected.values() if priority > 0]
        assert tree.total == sum(positive)  # exact: they are small multiples of 1/8
        assert tree.minimum == min(positive, default=np.inf)
        # The state says the same.
        assert state["sequences"].tolist() == [t.number for t in members]
        assert state["lengths"].tolist() == [t.length for t in members]
        assert state["leaves"].tolist() == [p for t in members for p in t.priorities or ()]
        assert state["maximum"] == self.maximum
        assert self.data.num_stale == self.stale
        assert open_tickets(self.table) == 0

    # Changes of priorities, and draws.

    def update(self, rows: list[tuple[int, int, int, float]], *, named: bool, error: bool) -> None:
        """Rows are (index, generation, step, priority)."""
        self.look()
        by_slot = {t.slot: t for t in self.members()}
        valid = [
            index in by_slot
            and (not named or by_slot[index].generation == generation)
            and (self.unit == "trajectory" or 0 <= step < by_slot[index].length)
            for index, generation, step, _ in rows
        ]
        columns = list(zip(*rows, strict=True)) or [(), (), (), ()]
        options: dict[str, Any] = {"generation": columns[1]} if named else {}
        if self.unit == "step":
            options["anchor"] = columns[2]

        def call(stale: Any) -> None:
            self.data.update_priority(columns[0], columns[3], stale=stale, **options)

        if error and not all(valid):
            with pytest.raises(
                StaleIndexError, match=rf"{valid.count(False)} of .* row {valid.index(False)},"
            ):
                call("error")
            self.look()
            return
        call("error" if error else "ignore")
        self.stale += valid.count(False)
        for (index, _, step, priority), is_valid in zip(rows, valid, strict=True):
            if is_valid:
                priorities = by_slot[index].priorities
                assert priorities is not None
                priorities[step if self.unit == "step" else 0] = priority
                self.maximum = max(self.maximum, priority)
        self.look()

    def draw(self, size: int) -> None:
        positive = [p for t in self._after_a_look() for p in t.priorities or () if p > 0]
        if not positive:
            with pytest.raises(PriorityError if self.members() else TableEmptyError):
                self.data.sample(size)
            return
        batch = self.data.sample(size)
        by_slot = {t.slot: t for t in self.members()}
        least = min(positive)
        for b in range(size):
            t = by_slot[int(batch["index"][b])]
            step = int(batch["anchor"][b])
            assert int(batch["generation"][b]) == t.generation
            assert 0 <= step < t.length
            assert batch["observation"][b, 0, :2].tolist() == [t.number, step]
            assert float(batch["reward"][b, 0]) == t.number * 4096 + step
            assert t.priorities is not None
            priority = t.priorities[step if self.unit == "step" else 0]
            assert priority > 0
            assert float(batch["priority_weight"][b]) == pytest.approx((least / priority) ** 0.5, rel=1e-6)
        self.drawn += size

    def _after_a_look(self) -> list[Trajectory]:
        # The batch itself looks at the table, before it is drawn.
        self.seen()
        return self.members()


PRIORITIES = st.integers(0, 40).map(lambda eighths: eighths / 8)


FAR = st.sampled_from([2**62, -(2**40), 2**40])


class TwinMachine(stateful.RuleBasedStateMachine):
    """Additions, evictions, removals, updates, draws and repairs in any order; looks only now and then."""

    @stateful.initialize(
        unit=st.sampled_from(["trajectory", "step"]),
        block_steps=st.sampled_from([1, 2, 3, 7]),
        max_steps=st.integers(1, 50),
        max_trajectories=st.integers(1, 8),
        part=st.booleans(),
    )
    def create(self, unit: str, block_steps: int, max_steps: int, max_trajectories: int, part: bool) -> None:
        self.twin = Twin(
            unit=unit,
            block_steps=block_steps,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            chosen=(lambda sequences: sequences % 3 != 1) if part else None,
        )

    def teardown(self) -> None:
        if hasattr(self, "twin"):
            self.twin.look()
            self.twin.table.check_valid()
            self.twin.table.close()

    @stateful.rule(length=st.integers(0, 20), given=st.none() | PRIORITIES)
    def add(self, length: int, given: float | None) -> None:
        self.twin.add([length], [given])

    @stateful.rule(
        many=st.lists(st.tuples(st.integers(0, 9), st.none() | PRIORITIES), min_size=1, max_size=5)
    )
    def extend(self, many: list[tuple[int, float | None]]) -> None:
        self.twin.add([length for length, _ in many], [given for _, given in many])

    @stateful.rule(length=st.integers(0, 9), count=st.integers(5, 25))
    def add_more_than_the_ring_remembers(self, length: int, count: int) -> None:
        for i in range(count):
            self.twin.add([length + i], [None if i % 3 else i / 8])

    @stateful.precondition(lambda self: self.twin.live)
    @stateful.rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        self.twin.remove(data.draw(st.lists(st.sampled_from(list(self.twin.live)), min_size=1, unique=True)))

    @stateful.rule()
    def find_the_index_half_changed(self) -> None:
        self.twin.table._engine.region.array("counters")[DIRTY] = 1

    @stateful.rule()
    def look(self) -> None:
        self.twin.look()

    @stateful.rule(size=st.integers(1, 12))
    def draw(self, size: int) -> None:
        self.twin.draw(size)

    @stateful.rule(data=st.data(), named=st.booleans(), error=st.booleans())
    def update(self, data: st.DataObject, named: bool, error: bool) -> None:
        generation = self.twin.table._engine.region.array("generation").tolist()
        count = len(generation)

        def row(index: int, late: bool, step: int, priority: float) -> tuple[int, int, int, float]:
            return index, generation[index % count] - late, step, priority

        rare = st.integers(0, 9).map(lambda i: i == 9)
        indices, steps = st.integers(-1, count) | FAR, st.integers(-1, 20) | FAR
        rows = st.builds(row, indices, rare, steps, PRIORITIES)
        live = [(t.slot, t.length) for t in self.twin.members()]
        if live:  # mostly what is there
            known = st.sampled_from(live).flatmap(
                lambda pair: st.builds(row, st.just(pair[0]), rare, st.integers(0, pair[1] - 1), PRIORITIES)
            )
            rows = known | known | known | rows
        self.twin.update(data.draw(st.lists(rows, max_size=12)), named=named, error=error)


TwinMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Hypothesis may take minutes to shrink a failing example
]
TestSelectionBesideItsTwin = TwinMachine.TestCase


@pytest.mark.parametrize("wrong", ["block", "place"])
def test_blocks_that_do_not_exist_are_an_error(wrong: str) -> None:
    schema = {"act": gear.Column(torch.int64)}
    with gear.Table.create(schema, max_steps=64, max_trajectories=8, block_steps=4) as table:
        table.add({"act": np.zeros(20, dtype=np.int64)})
        extent, block_ids = table._engine.reader().index_arrays()
        right = extent[0, 1], block_ids[extent[0, 1]]
        data = gear.ReplayDataset(
            table, batch_size=8, windows=gear.Window(1), sampler=gear.Prioritized(unit="step"), device="cpu"
        )
        if wrong == "block":
            block_ids[extent[0, 1]] = 1 << 30
        else:
            extent[0, 1] = 1 << 40
        with pytest.raises(CorruptTableError, match="blocks that do not exist"):
            data.sample()
        extent[0, 1], block_ids[right[0]] = right
        data.sample()


def test_an_update_while_a_slot_becomes_another_trajectory_s() -> None:
    """Its block table, which is read without the lock, may then lie anywhere: the rows are stale."""
    schema = {"act": gear.Column(torch.int64)}
    with gear.Table.create(schema, max_steps=64, max_trajectories=8, block_steps=4) as table:
        for number in range(3):
            table.add({"act": np.full(20, number)})
        data = gear.ReplayDataset(
            table, batch_size=8, windows=gear.Window(1), sampler=gear.Prioritized(unit="step"), device="cpu"
        )
        data.sample()
        follows = data._selection.priorities.items  # type: ignore[union-attr]
        extent, block_ids = (array.copy() for array in table._engine.reader().index_arrays())
        slots, steps = np.arange(3).repeat(20), np.tile(np.arange(20), 3)
        right = follows.items(slots, steps, extent, block_ids)
        assert (right >= 0).all()
        for start in (len(block_ids) - 2, len(block_ids), -3, 1 << 40):
            extent[1, 1] = start
            found = follows.items(slots, steps, extent, block_ids)
            assert ((found == right) | (found == -1)).all()
            assert (found[20:40] == -1).any()
        block_ids[:] = 1 << 30
        assert (follows.items(slots, steps, extent, block_ids) == -1).all()


def test_a_trajectory_that_grows_into_a_freed_block_has_no_other_steps() -> None:
    """The leaves of the trajectory that had the block before are gone, also if both are seen at once."""
    options: dict[str, Any] = {"max_steps": 16, "max_trajectories": 4, "block_steps": 4}
    with gear.Table.create(SCHEMA, **options) as table, table.writer(commit_every_step=True) as writer:
        first = table.add(episode(0, 4))
        table.add(episode(1, 4))
        writer.append(episode(2, 4))
        by_step = gear.Prioritized(1.0, unit="step")
        data = gear.ReplayDataset(
            table, batch_size=64, windows=gear.Window(1), device="cpu", prefetch=0, sampler=by_step
        )
        data.update_priority([first] * 4, [100.0] * 4, anchor=list(range(4)))
        data.sample()
        table.remove(first)
        writer.append(episode(2, 1))
        lengths = np.zeros(4, dtype=np.int64)
        lengths[table.indices()] = table.lengths()
        batch = data.sample()
        assert (batch["anchor"].numpy() < lengths[batch["index"].numpy()]).all()
