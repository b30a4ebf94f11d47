"""Ragged columns: values of any length, in memory of their own that lives and dies with their trajectories."""

from __future__ import annotations

import contextlib
import itertools
import multiprocessing
import os
import signal
import tempfile
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from cases import amounts, points
from hypothesis import given, settings
from table_common import Died, Fragile, bury, mortal

import gear_loader as gear
from gear_loader.errors import CorruptTableError, FilledError, LockTimeoutError, SchemaError, TableFullError
from gear_loader.storage.late import fill_columns
from gear_loader.storage.ragged_input import with_records
from gear_loader.storage.schema import Schema

COLUMNS = {
    "tokens": gear.Column(torch.int64, (None,)),
    "image": gear.Column(torch.uint8, (None, 3)),
    "half": gear.Column(torch.bfloat16, (None,)),
    "text": gear.Column(str),
    "blob": gear.Column(bytes),
    "reward": gear.Column(torch.float32),
    "goal": gear.Column(str, per="trajectory"),
    "scores": gear.Column(torch.float64, (None, 2), per="trajectory"),
}
LARGEST = 40  # rows of a value


def table_of(payload: int | str = "256KiB", **options: Any) -> gear.Table:
    sizes = {
        "max_steps": 200,
        "max_trajectories": 24,
        "block_steps": 4,
        "on_full": "evict_oldest",
        "timeout": 0.2,
    }
    return gear.Table.create(COLUMNS, memory=gear.Memory(payload=payload), **{**sizes, **options})


def trajectory(random: np.random.Generator, length: int, largest: int = LARGEST) -> dict[str, Any]:
    """Lists of arrays and tensors, some not contiguous, some empty; a `Ragged`; a nested tensor; text."""
    rows = random.integers(0, largest + 1, (5, length))
    tokens = [random.integers(0, 99, 2 * n)[::2] for n in rows[0]]
    halves = [torch.arange(n, dtype=torch.bfloat16) for n in rows[2]]
    images = torch.from_numpy(random.integers(0, 255, (rows[1].sum(), 3), dtype=np.uint8))
    offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(rows[1]))))
    nested = length > 1 and torch.nested.nested_tensor(
        [torch.tensor(each) for each in tokens], layout=torch.jagged
    )
    return {
        "tokens": tokens if random.random() < 0.8 or not length > 1 else nested,
        "image": gear.Ragged(images, offsets),
        "half": tuple(halves),
        "text": ["ä" * n for n in rows[3]],
        "blob": [bytes(random.integers(0, 255, n * random.choice([1, 60]), dtype=np.uint8)) for n in rows[4]],
        "reward": random.random(length, dtype=np.float32),
        "goal": "z" * int(random.integers(0, largest + 1)),
        "scores": random.random((int(random.integers(0, largest + 1)), 2)),
    }


def listed(value: Any) -> list[Any]:
    if isinstance(value, gear.Ragged):
        return value.tolist()
    return list(value.unbind()) if isinstance(value, torch.Tensor) and value.is_nested else list(value)


def same(one: Any, other: Any) -> bool:
    if isinstance(one, (str, bytes)):
        return bool(one == other)
    one, other = torch.as_tensor(one), torch.as_tensor(other)
    return one.dtype == other.dtype and one.shape == other.shape and bool((one == other).all())


def check_trajectory(found: dict[str, Any], expected: dict[str, Any]) -> None:
    for name in COLUMNS:
        if name in ("goal", "scores"):
            assert same(found[name], expected[name]), name
        else:
            pairs = zip(listed(found[name]), listed(expected[name]), strict=True)
            assert all(same(one, other) for one, other in pairs), name


def check_batch(batch: gear.Batch, known: dict[int, Any], windows: dict[str, gear.Window]) -> None:
    for row, index in enumerate(batch["index"].tolist()):
        expected, anchor = known[index], int(batch["anchor"][row])
        length = len(expected["reward"])
        for name, window in windows.items():
            values = listed(expected[window.column or name])
            for place in range(window.length):
                step = anchor + window.offset + place
                if window.pad == "edge":
                    step = min(max(step, 0), length - 1)
                found = (
                    batch[name][row, place]
                    if isinstance(batch[name], gear.Ragged)
                    else batch[name][row][place]
                )
                if 0 <= step < length:
                    assert same(found, values[step])
                else:
                    assert len(found) == 0
        assert batch["goal"][row] == expected["goal"]
        assert same(batch["scores"][row], expected["scores"])


def test_adding_removing_and_evicting_beside_readers() -> None:
    act(7, "evict_oldest", 12_000, 25)


@pytest.mark.long
@settings(max_examples=12, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["evict_oldest", "evict_lowest_priority"]),
    st.integers(9_000, 60_000),
)
def test_many_histories(seed: int, on_full: Any, payload: int) -> None:
    act(seed, on_full, payload, 60)


STREAM = 4096
"""Step k of stream i is number ``STREAM * i + k``, which tells all its values."""


def numbered(number: int) -> dict[str, Any]:
    """The step of a number."""
    random, stream = np.random.default_rng(number), number // STREAM
    given = trajectory(random, 1, 12)
    new = {name: listed(given[name])[0] for name in COLUMNS if name not in ("goal", "scores")}
    return {**new, "reward": np.float32(number), "goal": "g" * stream, "scores": np.ones((stream, 2))}


def together(numbers: list[int]) -> dict[str, Any]:
    """A trajectory of these steps."""
    steps = [numbered(number) for number in numbers]
    once = {name: steps[0][name] for name in ("goal", "scores")}
    return {name: [step[name] for step in steps] for name in COLUMNS} | {
        "reward": np.array(numbers, np.float32),
        **once,
    }


class Streams:
    """Writers with all options, alone and of two lanes, and what each has appended.

    Attributes:
        begun: of each lane of each writer, the first number that is not committed, and the next number.
    """

    OPTIONS: tuple[dict[str, Any], ...] = (
        *({}, {"chunk_steps": 3}, {"commit_every_step": True}),
        {"commit_every_step": True, "chunk_steps": 4, "overlap_steps": 2},
    )

    def __init__(self, table: gear.Table) -> None:
        self.table = table
        self.writers: list[Any] = [table.writer(**each) for each in self.OPTIONS]
        self.writers += [table.writers(2, **each) for each in self.OPTIONS]
        lanes = [[number] for number in range(4)] + [[4 + 2 * n, 5 + 2 * n] for n in range(4)]
        self.begun = [[[STREAM * lane, STREAM * lane] for lane in each] for each in lanes]
        for writer, each in zip(self.writers, lanes, strict=True):
            once = {"goal": ["g" * lane for lane in each], "scores": [np.ones((lane, 2)) for lane in each]}
            vector = len(each) > 1
            writer.trajectory = once if vector else {name: value[0] for name, value in once.items()}

    def act(self, random: np.random.Generator) -> None:
        """Append, commit or discard."""
        place = int(random.integers(8))
        writer, begun, vector = self.writers[place], self.begun[place], place >= 4
        grows = self.OPTIONS[place % 4].get("commit_every_step", False)
        chance, visible = random.random(), []
        try:
            if chance < 0.1:
                writer.discard()
                self._skip(begun)
            elif chance < 0.3 and (writer.num_steps > 0 if not vector else (writer.num_steps > 0).any()):
                pending = (
                    np.atleast_1d(writer.num_steps) > 0
                )  # else their last chunk is complete, and may be gone
                writer.commit()
                visible = (
                    []
                    if grows
                    else [last - 1 for (_, last), some in zip(begun, pending, strict=True) if some]
                )
                self._skip(begun)
            elif vector:
                acting = random.random(2) < 0.8
                steps = [numbered(last) for _, last in begun]
                rows = {
                    name: [step[name] for step in steps] for name in COLUMNS if name not in ("goal", "scores")
                }
                found = writer.append({**rows, "reward": np.array(rows["reward"])}, active=acting)
                for lane in np.flatnonzero(acting).tolist():
                    visible += self._append(begun[lane], 1, found[lane] >= 0 or grows)
            else:
                count = 1 if random.random() < 0.7 else int(random.integers(2, 4))
                several = list(range(begun[0][1], begun[0][1] + count))
                step = numbered(several[0]) if count == 1 else together(several)
                given = {name: value for name, value in step.items() if name not in ("goal", "scores")}
                found = writer.append(**given)
                visible = self._append(begun[0], count, grows)
        except (TableFullError, LockTimeoutError):
            writer.discard()  # a part of the rows, or chunks, may be there
            for lane in begun:
                lane[1] += 4
            self._skip(begun)
        contents = [number for slot in self.table.indices().tolist() for number in self.numbers(slot)]
        missing = set(visible) - set(contents)
        assert not missing or (
            grows and vector and len(missing) < len(visible)
        )  # a lane may evict another one's

    def _append(self, lane: list[int], count: int, visible: bool) -> list[int]:
        lane[1] += count
        return [lane[1] - 1] if visible else []

    def _skip(self, begun: list[list[int]]) -> None:
        for lane in begun:
            lane[0] = lane[1]

    def numbers(self, slot: int) -> list[int]:
        found: list[int] = self.table[slot]["reward"].int().tolist()
        return found


def check_numbered(table: gear.Table) -> None:
    """Every trajectory has consecutive steps of a stream, with the values that belong to them."""
    for slot in table.indices().tolist():
        found = table[slot]
        numbers = found["reward"].int().tolist()
        assert numbers == list(range(numbers[0], numbers[0] + len(numbers)))
        check_trajectory(found, together(numbers))


def test_writers_beside_adding_removing_and_evicting() -> None:
    write(11, "evict_oldest", 8_000, 60)


@pytest.mark.long
@settings(max_examples=10, deadline=None)
@given(
    st.integers(0, 2**32),
    st.sampled_from(["evict_oldest", "evict_lowest_priority", "error"]),
    st.integers(6_000, 60_000),
)
def test_many_histories_of_writers(seed: int, on_full: Any, payload: int) -> None:
    write(seed, on_full, payload, 90)


def write(seed: int, on_full: Any, payload: int, count: int) -> None:
    random = np.random.default_rng(seed)
    with table_of(payload, on_full=on_full, timeout=0.01) as table:
        streams, tickets, added = Streams(table), [], 20 * STREAM
        dataset = gear.ReplayDataset(
            table, batch_size=4, device="cpu", windows={"text": gear.Window(2), "reward": gear.Window(2)}
        )
        for _ in range(count):
            what, live = random.random(), table.indices().tolist()
            if what < 0.1 and live:
                table.remove(live[0])
            elif what < 0.15:
                tickets.append(table._engine.reader().begin_read())
            elif what < 0.3 and tickets:
                tickets.pop().end()
            elif what < 0.4:
                with contextlib.suppress(TableFullError, LockTimeoutError):
                    table.add(together(list(range(added, added + 3))))
                    added += 3
            else:
                streams.act(random)
            table.check_valid()
            check_numbered(table)
            if len(table):
                batch = dataset.sample()
                for row, text in zip(batch["reward"], batch["text"], strict=True):
                    assert text[0] == numbered(int(row[0]))["text"]
        for ticket in tickets:
            ticket.end()
        for writer in streams.writers:
            writer.close()
        table.clear()
        table.check_valid()
        heap = table._engine.region.payload()
        assert not len(table)
        table.add({**together([0]), "blob": [bytes(heap.nbytes - 1200)]})  # all is free
        table.check_valid()


def act(seed: int, on_full: Any, payload: int, count: int) -> None:
    """What is live is as it was added, whatever left meanwhile; batches, packed and padded, are as trajectories are."""
    random, known = np.random.default_rng(seed), dict[int, Any]()
    windows = {"tokens": gear.Window(3, -1), "now": gear.Window(2, 0, pad="edge", column="image")}
    windows |= {"text": gear.Window(2), "half": gear.Window(1)}
    with contextlib.ExitStack() as stack:
        table = stack.enter_context(table_of(payload, on_full=on_full))
        once = {"goal": None, "scores": None}
        dataset = gear.ReplayDataset(table, batch_size=5, device="cpu", windows={**windows, **once})
        packed = gear.ReplayDataset(table, batch_size=3, device="cpu", windows=gear.Whole(), layout="packed")
        tickets, path = [], Path(stack.enter_context(tempfile.TemporaryDirectory()))
        for _ in range(count):
            what = random.random()
            if what < 0.15 and known:
                table.remove(next(iter(known)))
            elif what < 0.25:
                tickets.append(table._engine.reader().begin_read())
            elif what < 0.4 and tickets:
                tickets.pop().end()
            elif what < 0.45:
                table.save(path)
                sizes: dict[str, Any] = {"block_steps": int(random.integers(1, 9))} if what < 0.42 else {}
                with gear.Table.load(path, **sizes) as copy:
                    copy.check_valid()
                    for old, new in zip(table.indices(), copy.indices(), strict=True):
                        check_trajectory(copy[int(new)], known[int(old)])
            else:
                new = [trajectory(random, int(n)) for n in random.integers(1, 9, random.integers(1, 3))]
                try:
                    slots = table.extend(
                        new if random.random() < 0.5 else iter(new), priority=random.random(len(new))
                    )
                except (SchemaError, TableFullError):
                    pass
                except LockTimeoutError:
                    if not tickets:
                        raise
                else:
                    known.update(zip(slots.tolist(), new, strict=True))
            table.check_valid()
            live = set(table.indices().tolist())
            assert live <= set(known)
            known = {slot: known[slot] for slot in known if slot in live}
            for slot in live:
                check_trajectory(table[slot], known[slot])
            if live:
                check_batch(dataset.sample(), known, windows)
                batch = packed.sample()
                for row, index in enumerate(batch["index"].tolist()):
                    begin, end = batch["cu_seqlens"][row : row + 2].tolist()
                    pairs = zip(range(begin, end), listed(known[index]["image"]), strict=True)
                    assert all(same(batch["image"][at], value) for at, value in pairs)
                    assert batch["text"][begin:end] == known[index]["text"]
                index = random.permutation(sorted(live))[:3]
                check_batch(
                    table.gather(index, np.zeros_like(index), windows=dataset.windows), known, windows
                )
        for ticket in tickets:
            ticket.end()
        table.clear()
        assert len(table.extend([trajectory(random, 4, 5) for _ in range(4)])) == 4
        table.check_valid()


@pytest.mark.parametrize(("mean", "most"), [(4096, 1.025), (100_000, 1.002)])
def test_every_byte_of_values_is_counted_and_few_are_wasted(mean: int, most: float) -> None:
    """Of log-normal sizes, while trajectories are evicted and others removed at random."""
    random, columns = (
        np.random.default_rng(0),
        {"blob": gear.Column(bytes), "text": gear.Column(str, per="trajectory")},
    )
    sizes: dict[str, Any] = {"max_steps": 4000, "max_trajectories": 2000, "on_full": "evict_oldest"}
    with gear.Table.create(columns, memory=gear.Memory(payload=200 * mean), **sizes) as table:
        known: dict[int, int] = {}
        for _ in range(600):
            steps = int(random.integers(1, 3))
            counts = random.lognormal(np.log(mean) - 0.5, 1.0, steps).astype(int)
            counts = np.minimum(counts, 20 * mean)
            slot = table.add({"blob": [bytes(int(n)) for n in counts], "text": "x" * int(counts[0] % 9)})
            known[slot] = int(counts.sum()) + int(counts[0] % 9)
            if random.random() < 0.2:
                table.remove(int(random.choice(table.indices())))
        stats, live = table.stats(), table.indices().tolist()
        assert stats.value_bytes == sum(known[slot] for slot in live)
        step_bytes, once = table.schema.step_bytes, table.schema.trajectory_bytes
        assert stats.payload_bytes == stats.value_bytes + stats.num_steps * step_bytes + len(live) * once
        assert stats.value_bytes < stats.value_resident_bytes < stats.value_reserved_bytes
        assert stats.value_reserved_bytes == table._engine.region.layout.payload
        assert stats.value_resident_bytes <= most * stats.value_bytes
        assert stats.value_resident_bytes > 0.85 * stats.value_reserved_bytes
        assert f"{stats.value_bytes:,} B  {stats.value_resident_bytes:,} B of " in str(stats)
        table.clear()
        assert table.stats().value_resident_bytes == table.stats().value_bytes == 0


@points(5)
def test_a_death_at_every_store_leaves_extents_that_are_whole(every: int) -> None:
    """Of a process that gives values their places, in gaps of several trajectories that left and around the end."""
    random, deaths = np.random.default_rng(3), 0
    for stores in itertools.count(step=every):
        with table_of(9_000) as table:
            slots = [table.add(trajectory(random, 3, 12)) for _ in range(6)]
            known = {slot: table[slot] for slot in slots}
            for slot in (slots[1], slots[2], slots[4]):
                table.remove(slot)
                del known[slot]
            new, payload = with_records(
                Schema(COLUMNS), [trajectory(random, 4, 20), trajectory(random, 2, 9)]
            )
            died = False
            try:
                with mortal(table, stores) as index:
                    taken, _ = index.begin(np.array([4, 2]), evict=0)
                    heap = table._engine.region.payload().view(Fragile)
                    index.place_payload(
                        heap, payload, taken, index.arrays.generation[taken], evict=0, wait=False
                    )
            except Died:
                died, deaths = True, deaths + 1
            bury(table)
            table.check_valid()
            for slot, expected in known.items():
                check_trajectory(table[slot], expected)
            table.clear()
            new = [trajectory(random, 3, 12) for _ in range(5)]
            for slot, expected in zip(table.extend(new), new, strict=True):
                check_trajectory(table[int(slot)], expected)
            table.check_valid()
        if not died:
            break
    assert deaths > 50 // every


@pytest.mark.long
@pytest.mark.parametrize("options", [{}, {"commit_every_step": True}])
def test_a_death_at_every_store_of_a_writer(options: dict[str, Any]) -> None:
    """Whole trajectories, or all steps up to one, are there; values are split, and memory is kept for the next ones."""
    steps, deaths = [{"blob": bytes([n]) * size} for n, size in enumerate((0, 150, 300, 90, 2600, 40))], 0
    columns: Any = {"blob": gear.Column(bytes)}
    sizes: dict[str, Any] = {"max_steps": 60, "max_trajectories": 12, "block_steps": 4}
    for stores in itertools.count():
        with gear.Table.create(columns, memory=gear.Memory(payload=9_000), **sizes) as table:
            slots = [table.add({"blob": [bytes([n]) * 900]}) for n in range(9)]
            table.remove(slots[2::2])
            writer, died = table.writer(**options), False
            writer._sink.give_up.detach()  # type: ignore[attr-defined]
            try:
                with mortal(table, stores) as index:
                    sink: Any = writer._sink
                    sink.index, sink._payload._heap = index, sink._payload._heap.view(Fragile)
                    for step in steps:
                        writer.append(step)
                    writer.commit()
            except Died:
                died, deaths = True, deaths + 1
            bury(table)
            table.check_valid()
            found = [table[slot]["blob"] for slot in table.indices().tolist()]
            left = [[bytes([n]) * 900] for n in range(9) if n < 2 or n % 2]
            assert found[: len(left)] == left
            for more in found[len(left) :]:
                assert more == [step["blob"] for step in steps][: len(more)]
                assert options or len(more) == len(steps)
            assert len(found) == len(left) + 1 or died
            table.clear()
            table.add({"blob": [bytes(8_800)]})
            table.check_valid()
        if not died:
            break
    assert deaths > 60


LATE = {
    "reward": gear.Column(torch.float32),
    "note": gear.Column(str, late=True),
    "logprob": gear.Column(torch.float32, (None,), late=True),
    "verdict": gear.Column(object, per="trajectory", late=True),
}


def late_table(payload: int, **options: Any) -> gear.Table:
    sizes: dict[str, Any] = {"max_steps": 200, "max_trajectories": 24, "block_steps": 4, "timeout": 0.2}
    return gear.Table.create(LATE, memory=gear.Memory(payload=payload), **{**sizes, **options})


def late_of(number: int, length: int) -> dict[str, Any]:
    return {
        "note": [f"{number}" * (number * step % 50) for step in range(length)],
        "logprob": [np.full(number + step, number, np.float32) for step in range(length)],
        "verdict": {"number": number, "steps": list(range(length))},
    }


def check_late(found: Any, number: int, names: Any) -> None:
    expected = late_of(number, len(found["reward"]))
    assert set(found) == {"reward", *names}
    for name in names:
        pairs = zip(listed(found[name]), listed(expected[name]), strict=True)
        assert found[name] == expected[name] if name != "logprob" else all(same(*pair) for pair in pairs)


def test_values_that_are_not_filled_yet_are_not_counted() -> None:
    with late_table(9_000, max_trajectories=1, on_full="evict_oldest") as table:
        for number in range(2):  # the second has the blocks of the first
            slot = table.add({"reward": np.ones(4, np.float32)})
            assert table.stats().value_bytes == 0
            if number == 0:
                table.fill(slot, note=["abc"] * 4)
                assert table.stats().value_bytes == 12


def test_values_that_are_filled_later() -> None:
    random, numbers = np.random.default_rng(8), dict[int, int]()
    with late_table(9_000, on_full="evict_oldest") as table:
        filled: dict[int, set[str]] = {}
        for number in range(60):
            slot = table.add({"reward": np.ones(int(random.integers(1, 7)), np.float32)})
            numbers[slot], filled[slot] = number % 40, set()
            batch = random.permutation(table.indices())[:3]
            batch = batch[[not filled[each] for each in batch.tolist()]]
            names = [name for name in LATE if name != "reward" and random.random() < 0.6]
            each = [late_of(numbers[slot], len(table[slot]["reward"])) for slot in batch.tolist()]
            if names and len(batch):
                single = len(batch) == 1
                values = {name: [late[name] for late in each] for name in names}
                given = {name: value[0] for name, value in values.items()} if single else values
                generation = table._engine.index.arrays.generation[batch]
                index, generation = (part[0] if single else part for part in (batch, generation))
                skipped = table.fill(index, generation=generation, **given)
                live = set(table.indices().tolist())
                assert skipped == len(set(batch.tolist()) - live)
                for slot in batch.tolist():
                    filled[slot] |= set(names)
                if live & set(batch.tolist()):
                    again = sorted(live & set(batch.tolist()))[0]
                    with pytest.raises(FilledError, match=r"has .* already"):
                        table.fill(
                            again,
                            **{names[0]: late_of(numbers[again], len(table[again]["reward"]))[names[0]]},
                        )
            table.check_valid()
            for slot in table.indices().tolist():
                check_late(table[slot], numbers[slot], filled[slot])
        notes = gear.ReplayDataset(table, batch_size=4, device="cpu", windows={"note": gear.Window(1)})
        batch = notes.sample()
        for slot, anchor, note in zip(
            batch["index"].tolist(), batch["anchor"].tolist(), batch["note"], strict=True
        ):
            assert note == [late_of(numbers[slot], 9)["note"][anchor]]
        table.clear()
        for number in range(3):
            table.add({"reward": np.ones(number + 1, np.float32)})
        packed = gear.ReplayDataset(
            table,
            batch_size=3,
            device="cpu",
            windows={"reward": gear.Whole()},
            layout="packed",
            sampler=gear.Uniform(replacement=False),
        ).sample()
        order = packed["index"].tolist()
        lengths = packed["cu_seqlens"].diff().tolist()
        parts = [late_of(slot, length) for slot, length in zip(order, lengths, strict=True)]
        assert (
            table.fill(
                packed,
                note=[note for part in parts for note in part["note"]],
                verdict=[part["verdict"] for part in parts],
            )
            == 0
        )
        for slot, length in zip(order, lengths, strict=True):
            assert len(table[slot]["reward"]) == length
            check_late(table[slot], slot, ("note", "verdict"))
        wrong: list[tuple[dict[str, Any], str]] = [
            ({"logprob": [np.ones(2)]}, r"step 0, is float64 \[2\]; expected"),
            ({"logprob": [np.ones(2, np.float32)] * 9}, "has 9 steps for row 0; expected"),
            ({"verdict": 2}, "already"),
        ]
        for given, message in wrong:
            with pytest.raises((SchemaError, FilledError), match=message):
                table.fill(order[0], **given)


@pytest.mark.parametrize("stride", amounts(7, 2, 1))
def test_a_death_at_every_store_of_a_fill(stride: int) -> None:
    """Filled whole, or not at all, and then once more."""
    for stores in itertools.count(step=stride):
        with late_table(9_000) as table:
            slots = [table.add({"reward": np.ones(3, np.float32)}) for _ in range(5)]
            table.fill(
                slots[:3], **{name: [late_of(n, 3)[name] for n in range(3)] for name in ("note", "logprob")}
            )
            table.remove(slots[1])
            given = {name: [late_of(n, 3)[name] for n in (3, 4)] for name in ("note", "logprob", "verdict")}
            try:
                with mortal(table, stores) as index:
                    engine: Any = SimpleNamespace(
                        index=index, schema=table.schema, policy=(0, False), region=table._engine.region
                    )
                    heap = table._engine.region.payload().view(Fragile)
                    engine.region = SimpleNamespace(
                        payload=lambda: heap,  # noqa: B023
                        column=table._engine.region.column,
                        column_place=table._engine.region.column_place,
                        layout=table._engine.region.layout,
                        fill_lock=table._engine.region.fill_lock,
                    )
                    fill_columns(engine, np.array(slots[3:]), None, given, strict=True)
                    break
            except Died:
                pass
            bury(table)
            table.check_valid()
            missing = set(table.unfilled("note")[0].tolist())
            for number in (3, 4):
                if slots[number] in missing:
                    check_late(table[slots[number]], number, ())
                    table.fill(slots[number], **late_of(number, 3))
                check_late(table[slots[number]], number, late_of(0, 0))
            table.check_valid()
    assert stores > 20


def test_objects() -> None:
    """Nested dicts stay as they are, whatever way they come; what msgpack has not is refused."""
    columns = {
        "reward": gear.Column(torch.float32),
        "call": gear.Column(object),
        "in.side": gear.Column(object),
        "task": gear.Column(object, per="trajectory"),
    }
    calls: list[Any] = [
        {"name": "ls", "in": {"side": [1, 2.5, None]}},
        None,
        {1: b"x", "": {}},
        [[], "ä", -(2**63)],
    ]
    rewards, task = np.arange(4, dtype=np.float32), {"goal": {"deep": [True]}}
    sizes: dict[str, Any] = {"max_steps": 99, "max_trajectories": 9, "block_steps": 4}
    with gear.Table.create(columns, memory=gear.Memory(payload=9_000), **sizes) as table:
        whole = {"reward": rewards, "call": calls, "in": {"side": calls[::-1]}, "task": task}
        table.add(whole)
        table.extend(iter([whole]))
        table.extend(
            {
                **{name: [value] for name, value in whole.items() if name != "in"},
                "in.side": [calls[::-1]],
                "reward": rewards[None],
            },
            lengths=[4],
        )
        writer = table.writer()
        writer.append({"reward": 0.0, "call": calls[0], "in": {"side": calls[3]}})
        writer.append(reward=1.0, call=calls[1], **{"in.side": calls[2]})
        writer.append({"reward": rewards[2:], "call": calls[2:], "in.side": calls[1::-1]})
        writer.commit(trajectory={"task": task})
        vector = table.writers(2)
        vector.trajectory = {"task": [task, task]}
        for step in range(4):
            given = {"call": [calls[step]] * 2, "in": {"side": [calls[3 - step]] * 2}}
            vector.append({"reward": np.full(2, step, np.float32), **given})
        vector.commit()
        assert len(table) == 6
        for index in table.indices().tolist():
            found = table[index]
            assert (found["call"], found["in.side"], found["task"]) == (calls, calls[::-1], task)
            assert (found["reward"].numpy() == rewards).all()
        batch = table.gather([0], [3], windows={"call": gear.Window(2), "task": None})
        assert (batch["call"], batch["task"]) == ([[calls[3], None]], [task])
        for wrong in (object(), (1, 2), {1, 2}, 2**64, np.float32(1), {"a": [{"b": (1,)}]}, "\ud800"):
            with pytest.raises(
                SchemaError, match=r"Column 'call' of trajectory 0, step 2, is .* msgpack does not store"
            ):
                table.add({**whole, "call": [*calls[:2], wrong, None]})
            with pytest.raises(
                SchemaError, match=r"Column 'call' of the step, step 0, is .* msgpack does not store"
            ):
                writer.append({"reward": 0.0, "call": wrong, "in.side": 1})
        assert (len(table), writer.num_steps) == (6, 0)
        record = table._engine.region.column("call").view(np.int64)[table._engine.index.arrays.row(0)[0], 0]
        table._engine.region.payload().view(np.uint8)[record[0]] = 0xC1  # no type of msgpack's
        with pytest.raises(CorruptTableError):
            table[0]


def _write(name: str) -> None:
    random = np.random.default_rng(os.getpid())
    with gear.Table.attach(name) as table:
        writers = table.writer(), table.writer(commit_every_step=True)
        while True:
            table.extend([trajectory(random, int(n)) for n in random.integers(1, 9, 2)])
            for writer in writers:
                new = trajectory(random, 5)
                writer.trajectory = {"goal": new.pop("goal"), "scores": new.pop("scores")}
                writer.append({name: listed(new[name]) if name != "reward" else new[name] for name in new})
                writer.commit()


def test_killed_writers_leave_a_table_that_goes_on() -> None:
    random, context = np.random.default_rng(5), multiprocessing.get_context("fork")
    # Room for some trajectories beside those that are being written, so that the table is never empty.
    with table_of(90_000, name=f"ragged-{os.getpid()}", timeout=20) as table:
        try:
            table.add(trajectory(random, 3))  # compiles what the children take
            windows = {"image": gear.Window(2), "text": gear.Window(1)}
            dataset = gear.ReplayDataset(table, batch_size=8, device="cpu", windows=windows)
            for _ in range(4):
                child = context.Process(target=_write, args=(table.name,), daemon=True)
                child.start()
                end = time.monotonic() + 0.1 + random.random() / 5
                while time.monotonic() < end:
                    batch = dataset.sample()
                    assert {len(set(text[0])) for text in batch["text"]} <= {0, 1}
                assert child.pid is not None
                os.kill(child.pid, signal.SIGKILL)
                child.join()
                new = trajectory(random, 8)
                check_trajectory(table[table.add(new)], new)
                bury(table)
                table.check_valid()
        finally:
            table.unlink()


def test_batches_are_whole_while_others_evict() -> None:
    """Each value is filled with its length."""
    columns = {"x": gear.Column(torch.int32, (None,))}
    options: dict[str, Any] = {
        "max_steps": 400,
        "max_trajectories": 64,
        "block_steps": 4,
        "on_full": "evict_oldest",
    }
    stop = threading.Event()

    def filled(random: np.random.Generator) -> dict[str, Any]:
        return {"x": [np.full(n, n, dtype=np.int32) for n in random.integers(0, 200, random.integers(1, 9))]}

    with gear.Table.create(columns, memory=gear.Memory(payload=40_000), **options) as table:
        table.add(filled(np.random.default_rng(0)))

        def write() -> None:
            random = np.random.default_rng(1)
            while not stop.is_set():
                table.add(filled(random))

        thread = threading.Thread(target=write)
        thread.start()
        try:
            for layout, windows in (("padded", gear.Window(3)), ("packed", gear.Whole())):
                given: dict[str, Any] = {"windows": windows, "layout": layout, "batches_per_epoch": 40}
                dataset = gear.ReplayDataset(table, batch_size=16, device="cpu", **given)
                for batch in dataset:
                    lengths = batch["x"].lengths.flatten()
                    assert (batch["x"].values == lengths.repeat_interleave(lengths)).all()
        finally:
            stop.set()
            thread.join()
        table.check_valid()


def test_a_ragged_value_as_a_batch_has_it() -> None:
    values, offsets = torch.arange(10).view(5, 2), torch.tensor([0, 2, 2, 5, 5])
    ragged = gear.Ragged(values, offsets, (2, 2))
    assert (len(ragged), ragged.lengths.tolist()) == (2, [[2, 0], [3, 0]])
    assert ragged[1, 0].tolist() == ragged[-1, -2].tolist() == values[2:].tolist()
    assert [[each.tolist() for each in row] for row in ragged.tolist()] == [
        [values[:2].tolist(), []],
        [values[2:].tolist(), []],
    ]
    padded = ragged.padded(value=-1)
    assert padded.shape == (2, 2, 3, 2)
    assert padded[0, 0].tolist() == [[0, 1], [2, 3], [-1, -1]]
    assert (ragged.padded(1)[1, 0] == values[2:3]).all()
    assert ragged.nested().offsets().tolist() == offsets.tolist()
    assert ragged.nested().values().data_ptr() == values.data_ptr()
    mapped: Any = torch.utils._pytree.tree_map(lambda part: part + 0, {"x": ragged})
    assert mapped["x"].shape == (2, 2)
    assert mapped["x"].to("cpu", non_blocking=True).values.tolist() == values.tolist()
    with pytest.raises(IndexError, match=r"Value 3 was asked for; expected 2 indices inside \[2, 2\]"):
        ragged[3]
    with pytest.raises(
        SchemaError, match=r"offsets torch.int64 \[2\] and shape \[1\] were received; expected offsets"
    ):
        gear.Ragged(values, torch.tensor([0, 4]))


REFUSED: list[tuple[str, Any, str]] = [
    (
        "tokens",
        torch.arange(3),
        r"Column 'tokens' of trajectory 0 is .*; expected a list of arrays \[n\], one for",
    ),
    (
        "tokens",
        [np.arange(3.0)] * 2,
        r"trajectory 0, step 0, is float64 \[3\]; expected .* torch.int64 and shape \[n\]",
    ),
    (
        "image",
        [np.zeros((3, 3), np.uint8), np.zeros((3, 2), np.uint8)],
        r"step 1, is uint8 \[3, 2\]; expected",
    ),
    ("half", [np.zeros(2, np.float32)] * 2, r"step 0, is float32 \[2\]; expected .* torch.bfloat16"),
    ("text", ["a", b"b"], "Column 'text' of trajectory 0 is b'b'; expected a list of str, one for each step"),
    ("blob", "ab", "Column 'blob' of trajectory 0 is 'ab'; expected a list of bytes, one for each step"),
    ("goal", ["a"], r"Column 'goal' of trajectory 0 is \['a'\]; expected a str"),
    ("text", ["a"], "columns of uneven lengths: .*'text': 1"),
    ("text", ["a", "\ud800"], "Column 'text' of trajectory 0 has .*; expected text that UTF-8 can encode"),
]


@pytest.mark.parametrize(("name", "value", "message"), REFUSED)
def test_values_that_are_refused(name: str, value: Any, message: str) -> None:
    with table_of() as table:
        with pytest.raises(SchemaError, match=message):
            table.add({**trajectory(np.random.default_rng(0), 2), name: value})
        assert len(table) == 0
        table.check_valid()


def test_what_does_not_go_with_them(tmp_path: Any) -> None:
    ragged, fixed = gear.Column(torch.int64, (None,)), gear.Column(torch.float32)
    for wrong in ({"mutable": True}, {"cast": True}, {"final": True}):
        with pytest.raises(
            SchemaError, match=f"{next(iter(wrong))}=True; expected none of final, cast and mut"
        ):
            gear.Column(str, **wrong)
    sizes: dict[str, Any] = {"max_steps": 9, "max_trajectories": 9}
    with pytest.raises(
        SchemaError, match=r"The columns \['x'\] are ragged, and Memory payload is None; expected"
    ):
        gear.Table.create({"x": ragged}, **sizes)
    with pytest.raises(SchemaError, match="Memory payload is 100, and no column is ragged; leave it out"):
        gear.Table.create({"x": fixed}, memory=gear.Memory(payload=100), **sizes)
    with pytest.raises(
        SchemaError, match=r"are ragged, and \['y'\] have final=True; expected a table with one of"
    ):
        gear.Schema({"x": ragged, "y": gear.Column(torch.float32, final=True)})
    with table_of() as table:
        calls: list[Any] = [
            lambda: table.writers(2, chunk_steps=4, overlap_steps=2),
        ]
        for call in calls:
            with pytest.raises(SchemaError, match=r"are ragged; .* columns of a fixed shape only"):
                call()
        table.add(trajectory(np.random.default_rng(0), 3))
        for options in (
            {"windows": gear.Whole()},
            {"windows": gear.Whole(), "layout": "jagged"},
            {"windows": gear.Window(2), "output": "tensordict"},
        ):
            with pytest.raises(
                SchemaError, match=r"read ragged columns, with layout=.* expected layout='packed'"
            ):
                gear.ReplayDataset(table, batch_size=1, device="cpu", **options)
        with pytest.raises(SchemaError, match="reads a ragged column with dtype or scale"):
            table.gather([0], windows={"tokens": gear.Window(1, dtype=torch.float32)})
        with pytest.raises(
            SchemaError, match=r"out was given, and the windows \['tokens'\] read ragged columns"
        ):
            table.gather([0], windows={"tokens": gear.Window(1)}, out={"tokens": torch.zeros(1)})


def test_what_is_too_large_changes_nothing() -> None:
    with table_of(4096, on_full="error") as table:
        small, large = (
            {**trajectory(np.random.default_rng(1), 1, 1), "blob": [bytes(n)]} for n in (1500, 4096)
        )
        with pytest.raises(
            SchemaError, match=r"The ragged values of 1 trajectories take 4,\d+ bytes; this table has 4,096"
        ):
            table.add(large)
        slot = table.add(small)
        table.add(small)
        with pytest.raises(TableFullError, match=r"What is full is the memory of ragged values, 4,096 bytes"):
            table.add(small)
        assert len(table) == 2
        table.check_valid()
        table.remove(slot)
        check_trajectory(table[table.add(small)], small)


@pytest.mark.parametrize("options", [{}, {"commit_every_step": True}])
def test_what_writers_cannot_store_evicts_nothing(options: dict[str, Any]) -> None:
    columns = {
        "token": gear.Column(torch.int64),
        "text": gear.Column(str),
        "late": gear.Column(str, per="trajectory", late=True),
    }
    sizes = {"max_steps": 200, "max_trajectories": 20, "block_steps": 4, "on_full": "evict_oldest"}
    with gear.Table.create(columns, memory=gear.Memory(payload=4096), **sizes) as table:
        other = table.add({"token": np.array([1]), "text": ["a" * 600]})
        writer = table.writer(**options)
        writer.append(token=1, text="b" * 600)
        for size in (4096,) if options else (4096, 3400):  # one that grows is evicted too, and begins anew
            with pytest.raises(SchemaError, match=r"ragged values of 1 .* bytes; this table has 4,096"):
                writer.append(token=2, text="c" * size)
        with pytest.raises(SchemaError, match=r"ragged values of 1 .* bytes; this table has 4,096"):
            table.fill(other, late="d" * 4096)
        writer.append(token=3, text="e" * 600)
        slot = writer.commit()
        assert table[other]["text"] == ["a" * 600]
        assert table[slot]["text"] == ["b" * 600, "e" * 600]
        table.check_valid()


def test_gaps_are_joined_across_the_place_where_a_search_begins() -> None:
    def blob(count: int) -> dict[str, Any]:
        return {**trajectory(np.random.default_rng(1), 1, 0), "blob": [bytes(count)]}

    with table_of(4096, on_full="error") as table:
        _, second, third = (table.add(blob(1000)) for _ in range(3))
        table.remove([second, third])  # the search goes on behind the third
        with pytest.raises(TableFullError):
            table.add(blob(3200))
        table.check_valid()
        table.add(blob(2800))
        table.check_valid()


def test_values_are_split_over_gaps() -> None:
    def blobs(*counts: int) -> dict[str, Any]:
        random = np.random.default_rng(1)
        return {**trajectory(random, len(counts), 0), "blob": [random.bytes(n) for n in counts]}

    with table_of(12_000, on_full="error") as table:
        slots = [table.add(blobs(1000)) for _ in range(11)]
        table.remove(slots[1::2])
        with pytest.raises(TableFullError):
            table.add(blobs(5600))
        table.check_valid()
        new = blobs(300, 3000, 0, 600)
        index = table.add(new)
        table.check_valid()
        check_trajectory(table[index], new)
        batch = table.gather([index, slots[0]], [1, 0], windows={"blob": gear.Window(3)})
        assert batch["blob"] == [[*new["blob"][1:]], [blobs(1000)["blob"][0], b"", b""]]
        heap, at = table._engine.region.payload(), 8
        while at < len(heap):
            if heap[at + 1] == index:
                heap[at + 3] = 1 << 40  # the next part of a value
            at += int(heap[at]) // 8
        with pytest.raises(CorruptTableError, match="corrupt index"):
            table[index]


def test_values_find_room_whatever_lies_there() -> None:
    """What fits into an empty table fits into a full one too, beside gaps between the extents of others."""
    columns = {"blob": gear.Column(bytes)}
    sizes: dict[str, Any] = {"max_steps": 500, "max_trajectories": 200, "block_steps": 1, "timeout": 0.2}
    with gear.Table.create(
        columns, memory=gear.Memory(payload=65_536), on_full="evict_oldest", **sizes
    ) as table:
        for number in range(100):
            table.add({"blob": [bytes([number]) * 900]})
        index = table.add({"blob": [bytes([number]) * 1000 for number in range(63)]})
        assert [value[0] for value in table[index]["blob"]] == list(range(63))
        table.check_valid()


def test_a_wait_for_room_holds_none() -> None:
    columns = {"blob": gear.Column(bytes)}
    sizes: dict[str, Any] = {"max_steps": 500, "max_trajectories": 200, "block_steps": 1, "timeout": 0.1}

    def place(index: Any, pieces: int) -> np.ndarray[Any, Any]:
        _, payload = with_records(Schema(columns), [{"blob": [bytes(1000)] * pieces}])
        slots, _ = index.begin(np.array([pieces]), evict=1)
        heap, generations = table._engine.region.payload(), index.arrays.generation[slots]
        index.place_payload(heap, payload, slots, generations, evict=1, wait=False)
        return slots

    with gear.Table.create(
        columns, memory=gear.Memory(payload=65_536), on_full="evict_oldest", **sizes
    ) as table:
        index = table._engine.index
        first = place(index, 40)
        with pytest.raises(LockTimeoutError):
            place(index, 40)
        index.commit(first, np.ones(1, np.float32))
        place(index, 55)
        table.check_valid()


def test_room_that_a_reader_holds_is_waited_for() -> None:
    with table_of(4096, on_full="error", timeout=20) as table:
        new = {**trajectory(np.random.default_rng(1), 1, 0), "blob": [bytes(3000)]}
        index = table.add(new)
        ticket = table._engine.reader().begin_read()
        table.remove(index)
        timer = threading.Timer(0.5, ticket.end)
        timer.start()
        check_trajectory(table[table.add(new)], new)
        timer.join()


@pytest.mark.parametrize("record", [(96, -(2**63)), (96, -3), (2**62, 3), (-5, 3), (4096, -1), (97, -1)])
def test_records_that_name_no_values(record: tuple[int, int]) -> None:
    with gear.Table.create(
        {"text": gear.Column(str)}, max_steps=9, max_trajectories=9, memory=gear.Memory(payload=4096)
    ) as table:
        index = table.add({"text": ["ä"]})
        table._engine.region.payload()[12] = -1  # no text, and no extent
        table._engine.region.column("text").view(np.int64)[table._engine.index.arrays.row(index)[0], 0] = (
            record
        )
        for read in (lambda: table[index], lambda: table.gather([index], windows={"text": gear.Window(1)})):
            with pytest.raises(CorruptTableError, match="corrupt index"):
                read()
        with pytest.raises(AssertionError):
            table.check_valid()


def test_a_schema_keeps_them() -> None:
    schema = gear.Schema(COLUMNS)
    assert gear.Schema.from_json(schema.to_json()) == schema
    assert repr(schema["image"]) == "Column(dtype=torch.uint8, shape=(None, 3))"
    assert repr(schema["goal"]) == "Column(str, per='trajectory')"
    for wrong in ([["x", "int8", [None], "str"]], [["x", "uint8", [3, None]]]):
        with pytest.raises(SchemaError, match="was received; expected"):
            gear.Schema.from_json(wrong)
    with table_of(name=f"ragged-kept-{os.getpid()}") as table, gear.Table.attach(str(table.name)) as other:
        assert other.schema == schema
        table.unlink()
