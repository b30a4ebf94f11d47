"""Priorities of single steps in tables with a disk tier: a tree does not notice what lies on disk only."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from options_common import nested
from tier_common import (
    COLUMNS,
    NEVER,
    WINDOWS,
    batch_bits,
    fitting,
    rows,
    spill,
    tiered,
)
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import spilling
from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.selection import priorities
from gear_loader.selection.leaf_blocks import LeafBlocks
from gear_loader.storage.tier_counts import unpack_priorities

STEPS = [name for name, column in COLUMNS.items() if not column.trajectory]
EXACT = gear.Prioritized(1.0, 0.5, unit="step", normalize="table")
SAMPLERS: dict[str, Any] = {
    "exact": EXACT,
    "batch": gear.Prioritized(0.6, 0.4, eps=1e-3, unit="step"),
    "distinct": gear.Prioritized(1.0, replacement=False, unit="step"),
    "top": gear.TopK(unit="step"),
}
ROOMY = 400
"""Blocks of a memory that holds everything."""


def dataset(table: Any, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 8, "windows": WINDOWS, "device": "cpu", "seed": 5, "prefetch": 0}
    return gear.ReplayDataset(table, **nested({**given, "sampler": EXACT, **options}))


def drawn(data: gear.ReplayDataset, size: int | None = None) -> gear.Batch | str:
    """A batch, or the text of the error."""
    try:
        return data.sample(size)
    except gear.errors.GearError as error:
        return str(error)


def same(one: gear.Batch | str, other: gear.Batch | str) -> bool:
    if isinstance(one, str) or isinstance(other, str):
        return one == other
    return batch_bits(one) == batch_bits(other)


def leaves(data: gear.ReplayDataset) -> dict[int, list[float]]:
    """Sequence number of each trajectory, and the leaves of its steps."""
    state = data.state_dict()["priorities"]
    parts = np.split(state["leaves"].numpy(), np.cumsum(state["lengths"].numpy())[:-1])
    sequences = state["sequences"].tolist()
    return {number: part.tolist() for number, part in zip(sequences, parts, strict=False)}


class Twin:
    """The priorities of all steps of a table, as one dataset must know them, in plain lists."""

    def __init__(self, table: gear.Table) -> None:
        self.table = table
        self.priorities: dict[int, list[float]] = {}
        self.maximum = 1.0

    def look(self) -> None:
        """The dataset has looked at the table."""
        arrays = self.table._engine.index.arrays
        slots = self.table.indices()
        sequences, given = arrays.sequence[slots].tolist(), arrays.priority[slots].tolist()
        grown = [
            self.table.lengths()[i] > len(self.priorities.get(sequence, []))
            for i, sequence in enumerate(sequences)
        ]
        self.maximum = max([self.maximum, *(p for p, new in zip(given, grown, strict=True) if new)])
        self.priorities = {sequence: self.priorities.get(sequence, []) for sequence in sequences}
        for sequence, length, priority in zip(sequences, self.table.lengths().tolist(), given, strict=True):
            known = self.priorities[sequence]
            known += [self.maximum if priority < 0 else priority] * (length - len(known))

    def update(self, batch: gear.Batch, priorities: list[float]) -> int:
        """Priorities of the rows of a batch; returns the number of stale rows."""
        arrays, stale = self.table._engine.index.arrays, 0
        self.look()
        names = zip(
            *(batch[name].tolist() for name in ("index", "generation", "anchor")), priorities, strict=True
        )
        for slot, generation, step, priority in names:
            live = slot in self.table.indices() and arrays.generation[slot] == generation
            if live:
                self.priorities[int(arrays.sequence[slot])][step] = priority
                self.maximum = max(self.maximum, priority)
            stale += not live
        return stale

    def check(self, data: gear.ReplayDataset) -> None:
        self.look()
        assert leaves(data) == self.priorities
        tree: Any = data._selected().priorities.leaves.tree  # type: ignore[attr-defined]
        assert tree.total == sum(map(sum, self.priorities.values()))  # exact: they are small multiples of 1/8


# Blocks of leaves ------------------------------------------------------------------------------------


@settings(deadline=None)
@given(data=st.data(), block_steps=st.integers(1, 5))
def test_blocks_of_leaves_are_the_lowest_free_ones(data: st.DataObject, block_steps: int) -> None:
    num_slots, num_blocks = 8, 40
    made = LeafBlocks(num_slots, num_blocks, block_steps)
    known: dict[int, list[int]] = {}

    def lowest(count: int) -> list[int]:
        taken = set(itertools.chain(*known.values()))
        return list(itertools.islice((b for b in range(num_blocks) if b not in taken), count))

    for _ in range(data.draw(st.integers(1, 60))):
        left = num_blocks - sum(map(len, known.values()))
        absent = [slot for slot in range(num_slots) if slot not in known]
        action = data.draw(st.sampled_from(["take", "lengthen", "lengthen", "free", "restore"]))
        if action == "take":
            slots = data.draw(st.lists(st.sampled_from(absent), unique=True)) if absent else []
            counts = [data.draw(st.integers(1, 6)) for _ in slots]
            while sum(counts) > left:
                slots, counts = slots[:-1], counts[:-1]
            for slot, count in zip(slots, counts, strict=True):
                made.extent[slot, 0] = count * block_steps - data.draw(st.integers(0, block_steps - 1))
            made.take(np.array(slots, dtype=np.int64))
            for slot, count in zip(slots, counts, strict=True):
                known[slot] = lowest(count)
        elif action == "lengthen" and known:
            slot = data.draw(st.sampled_from(sorted(known)))
            more = min(left, data.draw(st.integers(0, 3)))
            made.extent[slot, 0] = (len(known[slot]) + more) * block_steps
            made.lengthen(slot)
            known[slot] += lowest(more)
        elif action == "free":
            slots = data.draw(st.lists(st.integers(0, num_slots - 1), unique=True))
            made.free(np.array(slots, dtype=np.int64))
            known = {slot: blocks for slot, blocks in known.items() if slot not in slots}
        elif action == "restore":
            again = data.draw(st.lists(st.sampled_from(sorted(known)), unique=True)) if known else []
            others = [slot for slot in known if slot not in again]
            blocks = np.array([block for slot in again for block in known[slot]], dtype=np.int32)
            given = (np.array(slots, dtype=np.int64) for slots in (again, others))
            slots = next(given)
            made.restore(slots, blocks, next(given))
            counts = {slot: len(known.pop(slot)) for slot in others}
            for slot in others:
                known[slot] = lowest(counts[slot])
        slots = np.array(sorted(known), dtype=np.int64)
        assert made.slots.tolist() == slots.tolist()
        counts = made.count(slots)
        found = np.split(made.blocks_of(slots, counts), np.cumsum(counts)[:-1])
        assert [part.tolist() for part in found if len(part)] == [known[slot] for slot in slots.tolist()]
        more = made.blocks_of(slots, counts + 1).reshape(-1)[np.cumsum(counts + 1) - 1]
        assert (more == -1).all(), "beyond a trajectory"


# Batches ---------------------------------------------------------------------------------------------


def test_more_changes_than_the_ring_remembers(tmp_path: Path) -> None:
    """All slots are read again: trajectories that are still there keep their places."""
    with (
        tiered(tmp_path / "roomy", blocks=ROOMY, on_full="evict_oldest", max_trajectories=10) as roomy,
        tiered(tmp_path / "small", on_full="evict_oldest", max_trajectories=10) as small,
    ):
        pair = [(dataset(table), Twin(table)) for table in (roomy, small)]
        number = itertools.count()
        for turn in range(12):
            before = next(number)
            for _ in range(3 if turn % 3 else 25):
                before = next(number)
                for table in (roomy, small):
                    table.add(rows(before, 1 + before * 7 % 23), priority=before % 6 / 4)
            batches = [data.sample() for data, _ in pair]
            assert same(*batches)
            for (data, twin), batch in zip(pair, batches, strict=True):
                twin.update(batch, [turn / 8] * 8)
                data.update_priority(batch, [turn / 8] * 8)
                twin.check(data)
        assert small._engine.num_spilled > 0


# Priorities ------------------------------------------------------------------------------------------


def test_priorities_stay_on_the_way_to_disk_and_back(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=100) as table:
        for number in range(12):
            table.add(rows(number, 10), priority=0.0)
        data, twin = dataset(table), Twin(table)
        slots = table.indices()
        generations = table._engine.index.arrays.generation[slots]

        def give(chosen: Any, steps: Any, priorities: Any) -> None:
            names = {"index": torch.as_tensor(slots[chosen]), "anchor": torch.as_tensor(steps)}
            names["generation"] = torch.as_tensor(generations[chosen])
            twin.update(gear.Batch(names), priorities)
            data.update_priority(names["index"], priorities, anchor=steps, generation=names["generation"])
            twin.check(data)

        give(np.array([1, 2, 7]), [9, 4, 0], [0.5, 2.0, 1.5])
        table.save(tmp_path)
        assert spill(table, slots[:6]) == 6
        twin.check(data)
        give(np.array([1, 3, 8]), [9, 5, 2], [0.25, 3.0, 0.125])  # on disk, on disk, in memory
        hot = {(1, 9), (2, 4), (3, 5), (7, 0), (8, 2)}
        for again in (False, True):
            found = set()
            for _ in range(60):
                batch = data.sample()
                found |= set(zip(batch["number"].tolist(), batch["anchor"].tolist(), strict=True))
                expected = 1000.0 * batch["number"] + batch["anchor"]
                assert (batch["value"][:, 2, 0] == expected).all()
            assert found == hot
            if not again:
                assert spilling.promote(table._engine, slots[:4]) == 4
                assert spill(table, slots[6:9]) == 3
                twin.check(data)
        table.remove(slots[[2, 7]])
        late = table.add(rows(50, 6), priority=1.0)
        assert late in slots[[2, 7]].tolist(), "a slot that is used again"
        with pytest.raises(StaleIndexError, match="2 of 3 priorities are for removed trajectories"):
            data.update_priority(
                slots[[2, 3, 7]],
                [9.0] * 3,
                anchor=[4, 5, 0],
                generation=generations[[2, 3, 7]],
                stale="error",
            )
        twin.check(data)
        give(np.array([2, 3, 7]), [4, 5, 0], [8.0, 4.0, 8.0])
        assert data.num_stale == 2
        data.update_priority([late, late], [5.0, 5.0], anchor=[5, 6])  # it has 6 steps
        assert data.num_stale == 3


def test_a_tree_takes_lengths_of_the_moment_of_its_look(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A trajectory that grows after that, in the room of one that was removed after that, gets its leaves later."""
    with tiered(tmp_path, blocks=100, max_steps=40, max_trajectories=4, block_steps=2) as table:
        data = dataset(table)
        old = table.add(rows(0, 30), priority=1.0)
        writer = table.writer(commit_every_step=True)
        values = rows(1, 40)
        writer.trajectory = {"task": values["task"]}
        writer.append({name: values[name][:4] for name in STEPS})
        reader = table._engine.reader()
        original = reader.begin_changes

        def late(*given: Any) -> Any:
            found = original(*given)
            if writer.num_steps == 4:
                table.remove(old)
                writer.append({name: values[name][4:40] for name in STEPS})
            return found

        monkeypatch.setattr(reader, "begin_changes", late)
        data.sample()
        own = data._selected().priorities.items.own  # type: ignore[attr-defined]
        assert own.extent[own.slots, 0].tolist() == [30, 4]
        assert {number: len(part) for number, part in leaves(data).items()} == {1: 40}


# States ----------------------------------------------------------------------------------------------


def emptied(table: gear.Table, number: int = 30) -> None:
    """Some history after which trajectories do not lie in order."""
    for i in range(number):
        table.add(rows(i, 1 + i * 7 % 23), priority=float(1 + i % 5))
        if i % 4 == 3:
            table.remove(int(table.indices()[i // 3]))


def test_a_recovered_table_goes_on_bit_for_bit(tmp_path: Path) -> None:
    def contents(data: gear.ReplayDataset) -> list[Any]:
        found = []
        for _ in range(5):
            batch = data.sample()
            found.append({k: v for k, v in batch_bits(batch).items() if k not in ("index", "generation")})
            data.update_priority(batch, batch["anchor"] % 3 + 0.25)
        return found

    with tiered(tmp_path) as table:
        data = dataset(table)
        for i in range(30):
            table.add(rows(i, 1 + i * 7 % 23), priority=float(1 + i % 5))
            if i % 4 == 3:
                table.remove(int(table.indices()[i // 3]))
            batch = data.sample()
            data.update_priority(batch, batch["anchor"] % 7 + 0.5)
        state, before = data.state_dict(), leaves(data)
        table.save(tmp_path)
        expected = contents(data)
    disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB", keep="newest")
    with gear.Table.recover(disk, max_blocks=24) as table:
        assert table._engine.num_spilled > 0
        again = dataset(table)
        again.load_state_dict(state)
        assert leaves(again) == before
        assert contents(again) == expected


def test_states_of_other_tables(tmp_path: Path) -> None:
    with (
        tiered(tmp_path / "one") as table,
        tiered(tmp_path / "two", block_steps=8) as other,
        fitting() as plain,
    ):
        for one in (table, other, plain):
            emptied(one)
        states = [dataset(one).state_dict() for one in (table, other, plain)]
        assert "blocks" not in states[2]["priorities"]
        for one in (table, other, plain):
            for state in states:
                data = dataset(one)
                data.load_state_dict(state)
                assert leaves(data) == leaves(dataset(table))
        good = states[0]["priorities"]
        blocks = good["blocks"]
        for bad in (blocks.long(), blocks[None], blocks.flip(0) * 0, blocks - 5):
            data = dataset(table)
            before = repr(data.state_dict())
            with pytest.raises(SchemaError, match="The state's priorities are invalid"):
                data.load_state_dict({**states[0], "priorities": {**good, "blocks": bad}})
            assert repr(data.state_dict()) == before


def test_trajectories_added_after_a_state(tmp_path: Path) -> None:
    """They get the places that those of the state leave free; their priority is the one that they were added with."""
    with tiered(tmp_path) as table:
        data = dataset(table)
        emptied(table, 20)
        state = data.state_dict()
        table.remove(table.indices()[[2, 5]])
        for number in range(40, 44):
            table.add(rows(number, 9), priority=0.75)
        again = dataset(table)
        again.load_state_dict(state)
        assert leaves(again) == leaves(data)
        assert same(again.sample(), data.sample())


# What stays in memory --------------------------------------------------------------------------------


def test_memory_keeps_the_steps_that_are_drawn_most(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """By the mean priority of a trajectory's steps: a long one takes more room for its sum."""
    monkeypatch.setattr(spilling, "EXCHANGE_SECONDS", 0.01)
    monkeypatch.setattr(priorities, "_MEANS_SECONDS", 0.01)
    with tiered(tmp_path, keep="auto", blocks=48) as table:
        for number in range(40):
            table.add(rows(number, 24 if number % 2 else 4), priority=1.0)
        table.save(tmp_path)
        data = dataset(table, sampler=gear.Prioritized(0.5, unit="step"))
        slots, lengths = table.indices(), table.lengths()
        for hot in (slots[lengths == 4][::2], slots[lengths == 4][1::2]):
            for slot, length in zip(slots.tolist(), lengths.tolist(), strict=True):
                priority = 3.0 if slot in hot else 1.0  # 24 steps of 1 are more than 4 of 3
                data.update_priority([slot] * length, [priority] * length, anchor=list(range(length)))

            def inside(hot: Any = hot) -> bool:
                data.update_priority(hot[:1], [3.0], anchor=[0])
                return bool((table._engine.region.array("extent")[hot, 1] >= 0).all())

            wait_until(inside)
            assert table._engine.num_spilled > 5


@pytest.mark.parametrize("alpha", [0.0, 0.001, 1.0, 4.0])
def test_means_of_any_priorities_are_numbers(tmp_path: Path, alpha: float) -> None:
    with tiered(tmp_path, keep="priority") as table:
        for number in range(3):
            table.add(rows(number, 6), priority=1.0)
        data = dataset(table, sampler=gear.Prioritized(alpha, eps=1e-3, unit="step"))
        largest = 3e38 if alpha <= 1 else 4e9
        given = [0.0] * 6 + [largest] * 6 + [1e-38, 0.5, 1.5, 0.5, 1.5, 2.0]
        data.update_priority(table.indices().repeat(6), given, anchor=np.tile(np.arange(6), 3))
        arrays = table._engine.index.arrays
        slots = table.indices()
        found = unpack_priorities(
            arrays.tier_priority[slots], arrays.generation[slots], np.full(3, -1.0, dtype=np.float32)
        )
        if alpha == 0:
            assert (found == -1).all(), "none is drawn more often"
        else:
            assert np.isfinite(found).all()
            assert (np.diff(found[[0, 2, 1]]) > 0).all()
        if alpha == 1:
            np.testing.assert_allclose(found[[0, 2]], [0, 1.0], atol=1e-6)


# Refused ---------------------------------------------------------------------------------------------


def test_a_table_of_too_many_steps_is_refused(tmp_path: Path) -> None:
    with (
        tiered(tmp_path, max_steps=2**33) as table,
        pytest.raises(
            SchemaError, match=r"would need 8,589,9.* priorities.* or a table with a smaller max_steps"
        ),
    ):
        dataset(table).sample()
