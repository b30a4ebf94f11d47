"""Any history of a table with a disk tier: contents and batches are those of a table that fits, bit for bit.

A new option of tables or datasets is an entry of `CASES`, a new change of a table a function of `CHANGES`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import tier_common
import torch
from cases import mostly_long
from hypothesis import HealthCheck, Phase, example, given, settings
from hypothesis import strategies as st
from options_common import nested
from table_common import bury
from test_tier_steps import EXACT, Twin
from test_tier_steps import SAMPLERS as BY_STEP
from tier_common import WINDOWS, batch_bits, everything, fitting, rows, tiered

import gear_loader as gear
from gear_loader.checkpoint import spilling
from gear_loader.errors import GearError
from gear_loader.storage import late
from gear_loader.storage.counters import DIRTY

GROUP = 3
COLUMNS = {
    **tier_common.COLUMNS,
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "small": gear.Column(torch.int32, per="trajectory"),
    "large": gear.Column(torch.int64, per="trajectory"),
}
REWARD = {"reward": gear.Column(torch.float32, per="trajectory", late=True)}
LATE = {**REWARD, "advantage": gear.Column(torch.float32, (2,), late=True)}
SIZES: dict[str, Any] = {"max_steps": 240, "max_trajectories": 18}
BY_PRIORITY = (gear.Prioritized, gear.TopK)
GROUPS: dict[str, Any] = {
    "windows": {"value": gear.Window(3), "prompt": None},
    "group": "prompt",
    "group_size": GROUP,
}
ONCE = gear.Uniform(replacement=False)
ORDERED: tuple[Any, ...] = (gear.Fifo(), gear.Lifo(), gear.Prioritized(), gear.TopK())
VERSIONED: tuple[Any, ...] = (gear.Uniform(), gear.Prioritized(freshness=0.7), gear.TopK())


@dataclasses.dataclass(frozen=True)
class Case:
    """What tables and datasets a history is played with.

    Attributes:
        samplers: of the datasets, which share the other options.
        late: the late columns of the tables. rules: their other options.
        steps: priorities are those of single steps.
    """

    samplers: tuple[Any, ...]
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    late: dict[str, gear.Column] = dataclasses.field(default_factory=dict)
    rules: dict[str, Any] = dataclasses.field(default_factory=dict)
    steps: bool = False


PACKED = {"windows": {"value": gear.Whole(), "advantage": gear.Whole(), "reward": None}, "layout": "packed"}
CASES = {
    "trajectories": Case(
        (gear.Uniform(), gear.Uniform(unit="step"), ONCE, *ORDERED), rules={"prefixes": True}
    ),
    "steps": Case(tuple(BY_STEP.values()), steps=True),
    "groups": Case((gear.Uniform(), ONCE, *ORDERED), GROUPS),
    "groups that vary": Case((gear.Uniform(), *ORDERED), {**GROUPS, "group_varies": "reward"}, REWARD),
    "small versions": Case(VERSIONED, rules={"version": "small", "max_lag": 3}),
    "large versions": Case(VERSIONED, rules={"version": "large", "max_lag": 3}),
    "late columns": Case((ONCE, gear.Prioritized()), PACKED, LATE),
}


class Pair:
    """A table with a tier and one that fits, with datasets and writers of both."""

    def __init__(self, path: Path, case: Case, policy: str, sampler: Any) -> None:
        sizes = {**SIZES, "on_full": policy, **case.rules}
        columns = {**COLUMNS, **case.late}
        self.case, self.path, self.sampler = case, path / "small", sampler
        self.table = tiered(self.path, columns, blocks=40, **sizes)
        # Leaves of steps lie by the blocks of a table with a tier.
        self.whole = (
            tiered(path / "roomy", columns, blocks=400, **sizes) if case.steps else fitting(columns, **sizes)
        )
        self.tables = (self.table, self.whole)
        self.data = [self.dataset(one) for one in self.tables]
        self.batches: list[gear.Batch] = []
        grows = not case.late and "group" not in case.options
        self.writers = (
            [[one.writer(commit_every_step=True) for _ in "abc"] for one in self.tables] if grows else []
        )
        self.twin = Twin(self.table) if sampler is EXACT else None
        self.number = 0

    def dataset(self, table: gear.Table) -> gear.ReplayDataset:
        size = 2 * GROUP if "group" in self.case.options else 8
        given = {"batch_size": size, "windows": WINDOWS, "device": "cpu", "seed": 5, "prefetch": 0}
        return gear.ReplayDataset(table, **nested({**given, "sampler": self.sampler, **self.case.options}))

    def made(self, length: int, behind: int = 0) -> dict[str, Any]:
        """The next trajectory."""
        self.number += 1
        version = self.table.policy_version - behind if self.case.rules else 0
        once = {
            "prompt": np.int64(self.number // GROUP),
            "small": np.int32(version),
            "large": np.int64(version),
        }
        return {**rows(self.number, length), **once}

    def slot(self, chosen: int) -> int | None:
        slots = self.table.indices()
        return int(slots[chosen % len(slots)]) if len(slots) else None

    def alike(self, act: Callable[[gear.Table], Any]) -> None:
        """Do it with both tables: what it returns or raises is the same."""
        assert attempt(lambda: act(self.table)) == attempt(lambda: act(self.whole))

    def drawn(self, size: int | None = None) -> list[Any]:
        """Batches of both datasets, which are the same, or the errors; nothing where a draw would wait."""
        there = len(self.table)
        if self.case.late:
            there -= len(self.table.unfilled()[0])
        if "group" in self.case.options:
            groups = [len(one._selected().look()) for one in self.data]
            assert groups[0] == groups[1]
            there, size = groups[0], None
        if there == 0:
            return []
        found = [attempt(lambda one=one: one.sample(size)) for one in self.data]
        assert comparable(found[0]) == comparable(found[1])
        return found

    def check(self) -> None:
        assert self.table.indices().tolist() == self.whole.indices().tolist()
        assert self.table.lengths().tolist() == self.whole.lengths().tolist()
        assert self.table.stats().num_outdated == self.whole.stats().num_outdated
        if self.twin is not None:
            for one in self.data:  # both look at their table at the same time
                self.twin.check(one)


def attempt(act: Callable[[], Any]) -> Any:
    try:
        found = act()
    except GearError as error:
        return str(error)
    return found.tolist() if isinstance(found, np.ndarray) else found


def comparable(found: Any) -> Any:
    return found if isinstance(found, str) else batch_bits(found)


def split(values: dict[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """The columns of steps, and those of the trajectory."""
    once = {name: value for name, value in values.items() if COLUMNS[name].trajectory}
    return {name: value for name, value in values.items() if name not in once}, once


# ---------------------------------------------------------------- changes: of a pair, by two numbers below 60


def add(pair: Pair, first: int, second: int) -> None:
    values = pair.made(1 + first % 30, second % 3)
    ends = None if pair.number % 3 else tier_common.final(pair.number, 1 + first % 30)
    pair.alike(lambda table: table.add(values, priority=float(second % 5), final=ends))


def extend(pair: Pair, first: int, second: int) -> None:
    several = [pair.made(1 + first % 12) for _ in range(1 + second % 4)]
    pair.alike(lambda table: table.extend(several))


def begin_as(pair: Pair, first: int, second: int) -> None:
    """Some trajectories begin with steps of another, wherever that lies."""
    if (slot := pair.slot(first)) is not None and "prefixes" in pair.case.rules:
        steps = 1 + second % min(20, int(pair.table.lengths()[first % len(pair.table)]))
        several = [pair.made(1 + second % 5) for _ in range(1 + first % 3)]
        pair.alike(lambda table: table.extend(several, prefix=slot, prefix_steps=steps))


def stream(pair: Pair, first: int, second: int) -> None:
    if "group" in pair.case.options:  # its parts would be too many for a group
        return
    steps, once = split(pair.made(1 + second % 20))

    def write(table: gear.Table) -> None:
        with table.writer(chunk_steps=2 + first % 5, overlap_steps=1 + first % 5 // 2) as writer:
            writer.trajectory = once
            writer.append(steps)
            writer.commit()

    pair.alike(write)


def append(pair: Pair, first: int, second: int) -> None:
    """Steps of a trajectory that grows."""
    which, done = first % 3, set()
    if pair.writers:
        at = pair.writers[0][which].num_steps
        steps, once = split({**pair.made(1), **rows(which, at + 1 + second % 7)})
        for writers in pair.writers:
            if not at:
                writers[which].trajectory = once
            done.add(writers[which].append({name: values[at:] for name, values in steps.items()}))
        assert len(done) == 1


def end(pair: Pair, first: int, second: int) -> None:
    for writers in pair.writers:
        writer = writers[first % 3]
        if writer.num_steps:
            writer.commit(final=tier_common.final(first % 3, writer.num_steps) if second % 2 else None)


def save(pair: Pair, first: int, second: int) -> None:
    pair.table.save(pair.path)


def spill(pair: Pair, first: int, second: int) -> None:
    if second % 2:
        save(pair, first, second)
    tier_common.spill(pair.table, pair.table.indices()[first % 4 :: 1 + second % 3])


def promote(pair: Pair, first: int, second: int) -> None:
    if (slot := pair.slot(first)) is not None:
        tier_common.promote(pair.table, slot)


def die(pair: Pair, first: int, second: int) -> None:
    """The owner dies while it spills."""
    tier_common.die_while_spilling(pair.table, first % 31, pair.table.indices()[:: 1 + second % 3])
    # Both are repaired, so that both hand out free slots in the same order: those that readers kept, too.
    for one in pair.tables:
        arrays = one._engine.index.arrays
        one._engine.index.recovery.locked(lambda arrays=arrays: arrays.ops.reclaim(arrays.where))
        arrays.counters[DIRTY] = 1
        bury(one)


def remove(pair: Pair, first: int, second: int) -> None:
    if (slot := pair.slot(first)) is not None:
        pair.alike(lambda table: table.remove(slot))


def revise(pair: Pair, first: int, second: int) -> None:
    if (slot := pair.slot(first)) is not None and not pair.case.steps:
        pair.alike(lambda table: table.update_priority([slot], [second % 10]))


def advance(pair: Pair, first: int, second: int) -> None:
    if pair.case.rules:
        pair.alike(lambda table: table.advance_version())


def fill(pair: Pair, first: int, second: int) -> None:
    if pair.case.late and (slot := pair.slot(first)) is not None:
        length = int(pair.table.lengths()[first % len(pair.table)])
        values = {
            "reward": np.float32(second % 2),
            "advantage": np.full((length, 2), second, dtype=np.float32),
        }
        names = list(pair.case.late)[second % 2 :][:1] or ["reward"]
        pair.alike(lambda table: table.fill(slot, **{name: values[name] for name in names}))


def draw(pair: Pair, first: int, second: int) -> None:
    found = pair.drawn(1 + second % 9)
    if found and not isinstance(found[0], str):
        pair.batches = found


def update(pair: Pair, first: int, second: int) -> None:
    """Priorities of the rows of the last batch."""
    if not isinstance(pair.sampler, BY_PRIORITY) or not pair.batches:
        return
    priorities = ((np.arange(len(pair.batches[0]["index"])) + second) % 41 / 8).tolist()
    before = pair.data[0].num_stale
    for one, batch in zip(pair.data, pair.batches, strict=True):
        one.update_priority(batch, priorities)
    assert pair.data[0].num_stale == pair.data[1].num_stale
    if pair.twin is not None:
        assert pair.twin.update(pair.batches[0], priorities) == pair.data[0].num_stale - before


def resume(pair: Pair, first: int, second: int) -> None:
    """Datasets that go on with the states of others draw what these do."""
    again = [pair.dataset(one) for one in pair.tables]
    for one, new in zip(pair.data, again, strict=True):
        new.load_state_dict(one.state_dict())
    expected = pair.drawn()
    pair.data = again
    assert [comparable(each) for each in pair.drawn()] == [comparable(each) for each in expected]


CHANGES = (
    *(
        add,
        add,
        extend,
        begin_as,
        begin_as,
        stream,
        append,
        append,
        end,
        save,
        spill,
        spill,
        promote,
        die,
        remove,
    ),
    *(revise, advance, fill, fill, draw, draw, update, update, resume),
)
CHANGE = st.tuples(st.sampled_from(CHANGES), st.integers(0, 59), st.integers(0, 59))
HISTORIES = st.lists(CHANGE, min_size=10, max_size=40)
WITHOUT_SHRINKING = [phase for phase in Phase if phase is not Phase.shrink]  # which takes minutes
POLICIES = st.sampled_from(["evict_oldest", "evict_lowest_priority"])


@pytest.mark.timeout(1800)  # a hundred histories in the long suite
@pytest.mark.parametrize("name", mostly_long(CASES, "steps", "groups that vary", "large versions"))
@settings(suppress_health_check=list(HealthCheck), phases=WITHOUT_SHRINKING)
@example(
    history=[*[(add, 0, 0)] * 3, *[(remove, 0, 0)] * 2, (die, 1, 0), (add, 0, 0)],
    policy="evict_oldest",
    small=late._SMALL,
    which=0,
)
@given(history=HISTORIES, policy=POLICIES, small=st.sampled_from([0, late._SMALL]), which=st.integers(0, 41))
def test_any_history_equals_that_of_a_table_that_fits(
    name: str, tmp_path_factory: pytest.TempPathFactory, history: Any, policy: str, small: int, which: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(late, "_SMALL", small)
        case = CASES[name]
        pair = Pair(tmp_path_factory.mktemp("tier"), case, policy, case.samplers[which % len(case.samplers)])
        with pair.table, pair.whole:
            begin = [(add, 7 * number, number) for number in range(4 * GROUP)]
            for change, first, second in [*begin, *history] if len(history) > 7 else history:
                change(pair, first, second)
                pair.check()
            expected = everything(pair.whole)
            assert everything(pair.table) == expected
            pair.table.save(pair.path)
            tier_common.spill(pair.table, pair.table.indices())
            assert everything(pair.table) == expected
            pair.drawn()
        with gear.Table.recover(gear.Disk(pair.path, sync_seconds=tier_common.NEVER, size="1GiB")) as again:
            assert [each[1:] for each in everything(again)] == [each[1:] for each in expected]
            spilling.promote(again._engine, again.indices())
