"""Columns whose values are overwritten, against a dict of arrays; and read while another process writes."""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from concurrency_common import Child, Nursery, Voice
from hypothesis import given
from hypothesis import strategies as st
from mutable_common import SCHEMA, steps
from table_common import fresh_name, unchanged

import gear_loader as gear
from gear_loader.errors import FilledError, SchemaError, StaleIndexError
from gear_loader.storage import edit_log, shared_memory


def same(found: Any, expected: Any) -> None:
    for name in SCHEMA:
        np.testing.assert_array_equal(np.asarray(found[name]), expected[name])


@given(data=st.data())
def test_every_reader_sees_the_last_values(data: Any) -> None:
    """Of trajectories that were added whole, that grow, that are removed, and whose index is used again."""
    random = np.random.default_rng(data.draw(st.integers(0, 1_000), "seed"))
    packed = data.draw(st.booleans(), "packed")
    with gear.Table.create(
        SCHEMA,
        max_steps=150,
        max_trajectories=8,
        block_steps=data.draw(st.integers(1, 9), "block_steps"),
        on_full="evict_oldest",
        memory=gear.Memory(packed=packed),
    ) as table:
        writer = table.writers(1, commit_every_step=True)
        model: dict[tuple[int, int], dict[str, Any]] = {}
        grown = (-1, -1)

        def identity(slot: int) -> tuple[int, int]:
            return slot, int(table.gather([slot])["generation"][0])

        for number in range(1, data.draw(st.integers(3, 12), "rounds")):
            if data.draw(st.booleans(), "whole"):
                rows = steps(data.draw(st.integers(1, 20), "length"), number)
                model[identity(table.add(rows))] = rows
            for _ in range(data.draw(st.integers(0, 5), "grown")):
                row = steps(1, number)
                writer.append(row)
                grown = identity(int(table.indices()[-1])) if writer.num_steps[0] == 1 else grown
                before = model.get(grown, {name: value[:0] for name, value in row.items()})
                model[grown] = {name: np.concatenate((before[name], row[name])) for name in row}
            if data.draw(st.booleans(), "removed") and len(table):
                table.remove(int(table.indices()[0]))
            live = {identity(slot) for slot in table.indices().tolist()}
            count = data.draw(st.integers(0, 5), "rows") if model else 0
            chosen = [data.draw(st.sampled_from([*model])) for _ in range(count)]
            if chosen:
                length = data.draw(st.integers(1, 30), "window")
                anchors = np.array([data.draw(st.integers(0, len(model[key]["obs"]) - 1)) for key in chosen])
                values = {
                    "state": random.random((len(chosen), length, 3)).astype(np.float32),
                    "wide": random.integers(0, 99, (len(chosen), length, 80)).astype(np.int16),
                }
                inside = anchors[:, None] + np.arange(length) < [[len(model[key]["obs"])] for key in chosen]
                mask = inside & (random.random(inside.shape) < 0.7)
                slots, generations = (np.array(part) for part in zip(*chosen, strict=True))
                skipped = table.set(slots, anchors, generation=generations, mask=mask, **values)
                assert skipped == sum(key not in live for key in chosen)
                for row, key in enumerate(chosen):
                    where = anchors[row] + np.flatnonzero(mask[row])
                    for name in values:
                        model[key][name][where] = values[name][row, mask[row]]
            for key in live:
                same(table[key[0]], model[key])
            if live:
                order = sorted(live)
                whole = table.gather([slot for slot, _ in order])
                same(whole, {name: np.concatenate([model[key][name] for key in order]) for name in SCHEMA})
                replay = gear.ReplayDataset(
                    table, windows=gear.Window(6), batch_size=9, device="cpu", prefetch=0
                )
                batch = replay.sample()
                for row in range(9):
                    key, at = (
                        (int(batch["index"][row]), int(batch["generation"][row])),
                        int(batch["anchor"][row]),
                    )
                    there = batch["mask"][row]
                    same(
                        {name: batch[name][row][there] for name in SCHEMA},
                        {name: model[key][name][at : at + 6] for name in SCHEMA},
                    )
        table.check_valid()


def test_overlapping_trajectories() -> None:
    """Steps of blocks that they share are there once, the others are copies."""
    for overlap, shared in ((4, True), (3, False)):
        with gear.Table.create(SCHEMA, max_steps=100, max_trajectories=8, block_steps=4) as table:
            with table.writer(chunk_steps=8, overlap_steps=overlap) as writer:
                for step in range(13):
                    writer.append({name: value[0] for name, value in steps(1, step).items()})
            first, second = table.indices()[:2].tolist()
            table.set(first, 0, state=np.full((8, 3), 50, np.float32), wide=np.full((8, 80), 50, np.int16))
            assert (table[first]["state"] == 50).all()
            assert (table[second]["state"][:overlap] == 50).all() == shared


def test_checkpoints_have_the_last_values(tmp_path: Path) -> None:
    with gear.Table.create(SCHEMA, max_steps=200, max_trajectories=8, block_steps=4) as table:
        for number in range(4):
            table.add(steps(20, number))
        table.save(tmp_path)
        table.set([1, 3], [5, 19], state=np.ones((2, 3), np.float32) * 77)
        table.save(tmp_path)
        for _ in range(2):
            with gear.Table.load(tmp_path) as loaded:
                for slot in range(4):
                    same(loaded[slot], {name: np.asarray(value) for name, value in table[slot].items()})
                loaded.set(2, 0, wide=np.full((20, 80), 9, np.int16))
                loaded.save(tmp_path)
            table.set(2, 0, wide=np.full((20, 80), 9, np.int16))


def test_errors() -> None:
    with gear.Table.create(
        {**SCHEMA, "later": gear.Column(torch.float32, late=True, mutable=True)},
        max_steps=100,
        max_trajectories=8,
    ) as table:
        slot = table.add(steps(10, 1))
        state = np.zeros((1, 3), np.float32)
        for index, anchor, columns, message in (
            ([slot], [0], {"obs": [1]}, "expected one or more of those with Column"),
            ([slot], [0], {}, "expected one or more of those with Column"),
            ([slot], [10], {"state": state}, "step 10 of row 0, whose trajectory has 10 steps"),
            ([slot], [-1], {"state": state}, "step -1 of row 0"),
            ([slot], [0, 1], {"state": state}, "anchor has the shape"),
            ([slot], [0], {"state": state[:, :2]}, r"has the shape \[1, 2\]"),
            ([slot], [0], {"state": state.astype(np.float64)}, "has dtype float64"),
            ([slot], [0], {"state": state, "mask": np.ones((1, 2), bool)}, "mask has the shape"),
        ):
            with unchanged(table), pytest.raises(SchemaError, match=message):
                table.set(index, anchor, **columns)
        with unchanged(table), pytest.raises(FilledError, match="no values yet"):
            table.set(slot, 0, later=np.zeros(10, np.float32))
        table.fill(slot, later=np.zeros(10, np.float32))
        assert table.set(slot, 2, later=np.ones(3, np.float32)) == 0
        assert table[slot]["later"].tolist() == [0, 0, 1, 1, 1, 0, 0, 0, 0, 0]
        with unchanged(table), pytest.raises(StaleIndexError):
            table.set([slot, 5], [0, 0], stale="error", state=np.ones((2, 3), np.float32))
        assert table.set([slot, 5], [0, 0], state=np.ones((2, 3), np.float32)) == 1
        assert table.set([], [], state=np.ones((0, 3), np.float32)) == 0
    for options in ({"final": True}, {"per": "trajectory"}, {"mutable": 1}):
        with pytest.raises(SchemaError, match="mutable"):
            gear.Column(torch.float32, **{"mutable": True, **options})


# ---------------------------------------------------------------- while another process writes

LENGTH, COUNT = 64, 24


def _overwrite(voice: Voice, name: str) -> int:
    """Give whole trajectories one number after another, until called."""
    number = 0
    with gear.Table.attach(name) as table:
        while not voice.is_called:
            for slot in table.indices().tolist():
                number += 1
                wide = np.full((LENGTH, 80), number % 30_000, np.int16)
                table.set(slot, 0, state=np.full((LENGTH, 3), number % 30_000, np.float32), wide=wide)
                if number == 1:
                    voice.say()
    return number


def uniform(batch: Any, mask: Any = None) -> set[int]:
    """The number of each row; fails if one has two numbers."""
    state, wide = (batch[key].reshape(*batch[key].shape[:2], -1).float() for key in ("state", "wide"))
    both = torch.cat((state, wide), -1)
    there = torch.ones(both.shape[:2], dtype=torch.bool) if mask is None else mask
    least = both.masked_fill(~there[..., None], torch.inf).amin((1, 2))
    assert torch.equal(least, both.masked_fill(~there[..., None], -torch.inf).amax((1, 2)))
    return set(least.tolist())


@contextlib.contextmanager
def named(count: int) -> Iterator[gear.Table]:
    """A table that other processes attach to."""
    sizes = {"max_steps": 4_000, "max_trajectories": count, "block_steps": 16}
    with gear.Table.create(SCHEMA, **sizes, name=fresh_name()) as table:
        try:
            for _ in range(count):
                table.add(steps(LENGTH, 0))
            yield table
        finally:
            table.unlink()
            Nursery.shared().clear()


@pytest.mark.parametrize("way", ["dataset", "packed", "prefetched", "chosen", "item", "saved"])
def test_nothing_is_seen_in_part(way: str, tmp_path: Path) -> None:
    with named(COUNT) as table:
        child = Child(_overwrite, table.name)
        child.hear()
        options: dict[str, Any] = {"batch_size": 48, "device": "cpu", "batches_per_epoch": 10}
        if way == "packed":
            options |= {"windows": gear.Whole(), "layout": "packed"}
        else:
            options |= {"windows": gear.Window(40, -20), "prefetch": 2 if way == "prefetched" else 0}
        replay = gear.ReplayDataset(table, **options)
        numbers: set[int] = set()
        begun = time.monotonic()
        while (passed := time.monotonic() - begun) < 0.7 or (len(numbers) < 8 and passed < 60):
            if way == "packed":
                for batch in replay:
                    numbers |= uniform(
                        {key: batch[key].unflatten(0, (-1, LENGTH)) for key in ("state", "wide")}
                    )
            elif way in ("dataset", "prefetched"):
                for batch in replay:
                    numbers |= uniform(batch, batch["mask"])
            elif way == "chosen":
                numbers |= uniform(table.gather(np.arange(COUNT), windows=gear.Window(LENGTH)))
            elif way == "item":
                numbers |= uniform({key: value[None] for key, value in table[3].items()})
            else:
                table.save(tmp_path)
                with gear.Table.load(tmp_path) as loaded:
                    rows = [loaded[slot] for slot in range(COUNT)]
                    numbers |= uniform(
                        {key: torch.stack([row[key] for row in rows]) for key in ("state", "wide")}
                    )
        child.say()
        assert child.result() > 20
        assert len(numbers) >= 8
        table.check_valid()


# ---------------------------------------------------------------- by a process that is killed


def _die_amid(voice: Voice, name: str, moment: int) -> None:
    """Overwrite three trajectories by one call, and die at a moment of it."""
    real, calls = edit_log.write_runs, iter(range(9))

    def write_half(sources: Any, slots: Any, steps: Any, counts: Any, *where: Any) -> int:
        half = len(slots) // 2 if next(calls) == moment else len(slots)
        bad = real(sources[:half], slots[:half], steps[:half], counts[:half], *where)
        if half < len(slots):
            os.kill(os.getpid(), signal.SIGKILL)
        return int(bad)

    with gear.Table.attach(name) as table:
        edit_log.write_runs = write_half  # type: ignore[assignment]
        if moment < 0:  # before the log is sealed

            def begin(view: Any) -> None:
                os.kill(os.getpid(), signal.SIGKILL)

            edit_log.begin_change = begin
        mask = np.ones((3, LENGTH), bool)
        mask[:, 5] = False
        rows = np.full((3, LENGTH, 3), 9, np.float32), np.full((3, LENGTH, 80), 9, np.int16)
        table.set([0, 1, 2], [0, 0, 0], mask=mask, state=rows[0], wide=rows[1])


@pytest.mark.parametrize("moment", [-1, 0, 1])
@pytest.mark.parametrize("next_one", ["attach", "gather", "dataset", "set"])
def test_a_row_of_a_killed_process_is_whole(moment: int, next_one: str) -> None:
    with named(COUNT) as table:
        replay = gear.ReplayDataset(
            table, windows=gear.Window(40, -20), batch_size=48, device="cpu", prefetch=0
        )
        replay.sample()
        child = Child(_die_amid, table.name, moment)
        assert os.WTERMSIG(child.reap()) == signal.SIGKILL
        if next_one == "dataset":
            batch = replay.sample()
            hidden = batch["mask"] & (batch["anchor"][:, None] - 20 + torch.arange(40) != 5)
            uniform(batch, hidden)
        elif next_one == "set":
            table.set([7], [0], state=np.ones((1, LENGTH, 3), np.float32))
        elif next_one == "attach":
            with gear.Table.attach(table.name) as other:
                other.check_valid()
        state = table.gather(np.arange(3), windows=gear.Window(LENGTH))
        for column in ("state", "wide"):
            values = state[column].clone()
            assert (values[:, 5] == 0).all()
            values[:, 5] = values[:, 4]
            assert (values == (0 if moment < 0 else 9)).all()
        table.check_valid()
        assert table.set([0], [0], state=np.full((1, LENGTH, 3), 4, np.float32)) == 0
        assert (table[0]["state"] == 4).all()


@pytest.mark.long
def test_processes_that_are_killed_leave_no_row_in_part() -> None:
    with named(COUNT) as table:
        numbers: set[int] = set()
        for turn in range(12):
            child = Child(_overwrite, table.name)
            child.hear()
            time.sleep(0.002 * turn)
            child.kill()
            numbers |= uniform(table.gather(np.arange(COUNT), windows=gear.Window(LENGTH)))
            table.check_valid()
        assert len(numbers) > 3


def test_the_memory_of_a_large_row_is_freed() -> None:
    schema = {"x": gear.Column(torch.float32, (1000,), mutable=True)}
    with gear.Table.create(schema, max_steps=2_000, max_trajectories=2, name=fresh_name()) as table:
        try:
            slot = table.add({"x": np.zeros((2_000, 1000), np.float32)})
            size = table.stats().reserved_bytes
            table.set(slot, 3, x=np.ones((1_500, 1000), np.float32))
            path = shared_memory.region_path(table.name)
            assert os.stat(path).st_size == size
            table.set(slot, 3, x=np.full((10, 1000), 2, np.float32))
            assert size < os.stat(path).st_size < size + (1 << 21)
            assert table[slot]["x"].sum() == 1_000 * (1_500 + 10)
        finally:
            table.unlink()
