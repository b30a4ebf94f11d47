"""Columns that are filled later, against a dict of what each trajectory has."""

from __future__ import annotations

import itertools
import json
import threading
import types
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested_table
from table_common import Died, bury, mortal

import gear_loader as gear
from gear_loader.checkpoint.trajectory_records import RECORD
from gear_loader.errors import CheckpointError, FilledError, PriorityError, SchemaError, StaleIndexError
from gear_loader.selection.leaves import HostLeaves
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.storage import late
from gear_loader.storage.late import fill_columns

COLUMNS = {
    "token": gear.Column(torch.int32),
    "advantage": gear.Column(torch.float32, (2,), late=True),
    "number": gear.Column(torch.int64, per="trajectory"),
    "reward": gear.Column(torch.bfloat16, per="trajectory", late=True),
    "logprob": gear.Column(torch.float64, late=True, cast=True),
}
LATE = ("advantage", "reward", "logprob")


def make(**options: Any) -> gear.Table:
    sizes = {"max_steps": 200, "max_trajectories": 12, "block_steps": 4}
    return gear.Table.create(COLUMNS, **nested_table({**sizes, **options}))


def add(table: gear.Table, number: int, length: int = 5, **options: Any) -> int:
    token = torch.arange(length, dtype=torch.int32) + 1000 * number
    return table.add({"token": token, "number": torch.tensor(number)}, **options)


def value(name: str, number: int, length: int) -> torch.Tensor:
    """The value of a late column of the trajectory of this number."""
    if name == "reward":
        return torch.tensor(number + 0.5, dtype=torch.bfloat16)
    steps = torch.arange(length, dtype=torch.float64) / 8 + number
    return steps if name == "logprob" else torch.stack((steps, -steps), 1).float()


def values(number: int, length: int, names: Any = LATE) -> dict[str, torch.Tensor]:
    return {name: value(name, number, length) for name in names}


def check(row: dict[str, torch.Tensor], names: Any) -> None:
    """Every late column of a row is there if and only if its name is, with its value."""
    number, length = int(row["number"]), len(row["token"])
    assert row["token"].tolist() == [1000 * number + step for step in range(length)]
    assert set(row) == {"token", "number", *names}
    for name in names:
        assert torch.equal(row[name], value(name, number, length)), name


@pytest.fixture(params=[True, False], ids=["records", "columns"])
def table(request: pytest.FixtureRequest) -> Iterator[gear.Table]:
    with make(packed=request.param) as made:
        yield made
        made.check_valid()


def test_a_column_is_filled_once(table: gear.Table) -> None:
    first, second = add(table, 1), add(table, 2, 9)
    check(table[first], ())
    with pytest.raises(SchemaError, match=r"unknown: \['reward'\]"):
        table.add({"token": torch.zeros(2, dtype=torch.int32), "number": 1, "reward": 1.0})
    assert table.fill(first, **values(1, 5, ["reward", "advantage"])) == 0
    check(table[first], ("reward", "advantage"))
    with pytest.raises(FilledError, match=rf"index {first} has \['reward'\] already"):
        table.fill([second, first], reward=torch.zeros(2, dtype=torch.bfloat16))
    check(table[second], ())
    with pytest.raises(FilledError, match="twice"):
        table.fill([second, second], reward=torch.zeros(2, dtype=torch.bfloat16))
    table.fill(first, logprob=[1, 1.125, 1.25, 1.375, 1.5])  # cast
    check(table[first], LATE)
    assert [part.tolist() for part in table.unfilled()] == [[second], [1]]
    table.fill([second], **{name: [part] for name, part in values(2, 9, ["logprob", "advantage"]).items()},
               reward=value("reward", 2, 9)[None])  # fmt: skip
    check(table[second], LATE)
    assert len(table.unfilled()[0]) == 0


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"token": torch.zeros(5, dtype=torch.int32)}, "one or more of those with Column"),
        ({"other": 1}, "one or more of those with Column"),
        ({}, "one or more of those with Column"),
        ({"reward": torch.zeros(2, dtype=torch.bfloat16)}, "has 2 values for 1 traj|is of shape"),
        ({"advantage": torch.zeros(5, 3)}, r"shape \[5, 3\]"),
        ({"advantage": torch.zeros(5, 2).double()}, "dtype torch.float64"),
        ({"advantage": torch.zeros(4, 2)}, "has 4 steps for row 0; expected 5"),
        ({"advantage": torch.zeros(0, 2)}, "zero steps"),
    ],
)
def test_what_does_not_fit_changes_nothing(table: gear.Table, columns: Any, message: str) -> None:
    index = add(table, 1)
    position = table._engine.reader().position
    with pytest.raises(SchemaError, match=message):
        table.fill(index, **columns)
    check(table[index], ())
    assert table._engine.reader().position == position


def test_rows_of_removed_trajectories_are_skipped_or_an_error(table: gear.Table) -> None:
    old, kept = add(table, 1), add(table, 2)
    generation = table.unfilled()[1]
    table.remove(old)
    again = add(table, 3)
    assert again == old
    reward = torch.stack([value("reward", number, 5) for number in (1, 2)])
    with pytest.raises(StaleIndexError, match=r"1 of 2 rows .* row 0"):
        table.fill([old, kept], generation=generation, reward=reward, stale="error")
    assert table.fill([old, kept], generation=generation, reward=reward) == 1
    check(table[again], ())
    check(table[kept], ("reward",))
    assert table.fill([99, -1], reward=reward) == 2
    table.remove(kept)
    check(table[add(table, 4)], ())  # the bits of an earlier trajectory do not count


def test_a_packed_batch_is_filled_by_its_rows(table: gear.Table) -> None:
    for number, length in enumerate((5, 1, 8, 4)):
        add(table, number, length)
    data = gear.ReplayDataset(
        table, windows=gear.Whole(), columns=["token", "number"], layout="packed", batch_size=4, device="cpu",
        sampler=gear.Uniform(replacement=False), prefetch=0,
    )  # fmt: skip
    (batch,) = data
    pairs = list(zip(batch["number"].tolist(), batch["cu_seqlens"].diff().tolist(), strict=True))
    advantage = torch.cat([value("advantage", *pair) for pair in pairs])
    reward = torch.stack([value("reward", *pair) for pair in pairs])
    with pytest.raises(SchemaError, match="has 17 steps; expected 18"):
        table.fill(batch, advantage=advantage[1:])
    with pytest.raises(SchemaError, match="expected a list of 4 arrays"):
        table.fill(batch["index"], advantage=advantage)
    table.fill(batch, advantage=advantage, reward=reward)
    for index in table.indices():
        check(table[index], ("advantage", "reward"))


def test_writers_do_not_take_them(table: gear.Table) -> None:
    with table.writer() as writer:
        writer.append(token=7000)
        with pytest.raises(SchemaError, match="unknown"):
            writer.append(token=7001, logprob=1.0)
        writer.append(token=7001)
        index = writer.commit(trajectory={"number": 7})
    table.fill(index, **values(7, 2))
    check(table[index], LATE)
    envs = table.writers(2)
    envs.trajectory = {"number": np.array([8, 9])}
    for step in range(3):
        envs.append(token=np.array([8000, 9000], dtype=np.int32) + step)
    for index in envs.commit():
        number = int(table[index]["number"])
        table.fill(int(index), **values(number, 3))
        check(table[index], LATE)
    for options in ({"commit_every_step": True}, {"chunk_steps": 4, "overlap_steps": 2}):
        with pytest.raises(SchemaError, match="cannot be filled once"):
            table.writer(**options)  # type: ignore[arg-type]


def test_columns_that_cannot_be_late() -> None:
    with pytest.raises(SchemaError, match="final=True"):
        gear.Column(torch.float32, final=True, late=True)
    with pytest.raises(SchemaError, match="how long a trajectory is"):
        gear.Schema({"x": gear.Column(torch.float32, late=True)})
    many = {f"x{i}": gear.Column(torch.float32, late=True) for i in range(63)}
    with pytest.raises(SchemaError, match="at most 62"):
        gear.Schema({"y": gear.Column(torch.float32), **many})
    schema = gear.Schema(COLUMNS)
    assert gear.Schema.from_json(schema.to_json()) == schema
    assert schema.late == LATE
    assert "late=True" in repr(COLUMNS["reward"])


SAMPLERS = [
    gear.Uniform(), gear.Uniform(replacement=False), gear.Fifo(), gear.Prioritized(), gear.TopK(),
    gear.Prioritized(unit="step"), gear.Uniform(unit="step"),
]  # fmt: skip


@given(
    acts=st.lists(
        st.tuples(
            st.sampled_from("aaffffrd"), st.integers(0, 11), st.sets(st.sampled_from(LATE), min_size=1)
        ),
        max_size=40,
    ),
    needed=st.sampled_from([("reward",), ("advantage", "logprob"), ()]),
    sampler=st.sampled_from(SAMPLERS),
)
def test_datasets_draw_exactly_what_is_filled(
    acts: list[tuple[str, int, set[str]]], needed: tuple[str, ...], sampler: gear.Uniform
) -> None:
    """Adding, filling, removing and evicting, against a dict; draws after each act that has changed what is drawn."""
    twin: dict[int, tuple[int, int, set[str]]] = {}  # slot -> number, length, filled
    with make(on_full="evict_oldest", max_trajectories=6, timeout=0.01) as table:
        windows = {
            name: None if COLUMNS[name].trajectory else gear.Window(3)
            for name in ("number", "token", *needed)
        }
        data = gear.ReplayDataset(
            table, windows=windows, batch_size=8, device="cpu", prefetch=0, sampler=sampler
        )
        for number, (act, place, names) in enumerate(acts):
            slots = list(twin)
            slot = slots[place % len(slots)] if slots else -1
            if act == "a" or not slots:
                index = add(table, number, 1 + place)
                for other in set(twin) - set(table.indices().tolist()):
                    del twin[other]
                twin[index] = (number, 1 + place, set())
            elif act == "r":
                table.remove(slot)
                del twin[slot]
            elif act == "f":
                known, length, filled = twin[slot]
                if names & filled:
                    with pytest.raises(FilledError):
                        table.fill(slot, **values(known, length, names))
                else:
                    table.fill(slot, **values(known, length, names))
                    filled |= names
            allowed = {known for known, _, filled in twin.values() if filled >= set(needed)}
            if not allowed:
                with pytest.raises(gear.errors.TableEmptyError):
                    data.sample()
                continue
            batch = data.sample()
            assert set(batch["number"].tolist()) <= allowed
            if "reward" in needed:
                assert torch.equal(batch["reward"], (batch["number"] + 0.5).bfloat16())
            if sampler.passes and sampler.unit == "trajectory" and len(allowed) <= 8:
                epoch = [n for part in data for n in part["number"].tolist()]
                assert sorted(epoch) == sorted(allowed)
        for slot, (_, _, filled) in twin.items():
            check(table[slot], filled)
        table.check_valid()


@pytest.mark.parametrize("torn", [False, True])
def test_a_death_at_every_store_leaves_a_column_unfilled_or_filled(torn: bool) -> None:
    for stores in itertools.count():
        with make() as table:
            table._engine.region.lock.timeout = 0
            slots = [add(table, number, 3 + number) for number in range(4)]
            table.remove(slots.pop(0))
            slots.append(add(table, 4, 9))  # in a slot that was used before
            snapshot = table._engine.reader().snapshot()
            given = {
                "advantage": [value("advantage", n, 3 + n) for n in (1, 2, 3)] + [value("advantage", 4, 9)]
            }
            try:
                with mortal(table, stores, torn=torn) as index:
                    other: Any = types.SimpleNamespace(
                        index=index, schema=table.schema, region=table._engine.region
                    )
                    fill_columns(other, slots, None, given, strict=True)
                    break
            except Died:
                pass
            bury(table)
            table.check_valid()
            missing = set(table.unfilled("advantage")[0].tolist())
            for slot in slots:
                check(table[slot], () if slot in missing else ("advantage",))
            assert table._engine.reader().snapshot() is not snapshot or len(missing) == 4
            for place, slot in enumerate(slots):
                if slot in missing:
                    table.fill(slot, advantage=given["advantage"][place])
                check(table[slot], ("advantage",))
    assert stores > 5


def test_what_is_filled_while_a_draw_finds_nothing_is_drawn_next(monkeypatch: pytest.MonkeyPatch) -> None:
    draw_items = HostLeaves.draw

    def late(self: HostLeaves, *given: Any, **options: Any) -> Any:
        try:
            return draw_items(self, *given, **options)
        except PriorityError:
            if len(table.unfilled("reward")[0]):
                table.fill(0, reward=value("reward", 0, 5))
            raise

    monkeypatch.setattr(HostLeaves, "draw", late)
    with make(timeout=30.0) as table:
        add(table, 0)
        data = gear.ReplayDataset(
            table,
            batch_size=2,
            windows={"token": gear.Window(1), "reward": None},
            sampler=gear.Prioritized(),
            device="cpu",
            prefetch=0,
        )
        assert data.sample()["index"].tolist() == [0, 0]


def test_a_pass_begins_with_what_was_seen_when_it_began(monkeypatch: pytest.MonkeyPatch) -> None:
    """Found by one look and gone at the next: a pass over nothing would wait for its deadline, and fail."""
    with make(timeout=5.0) as table:

        def add_filled(number: int) -> None:
            table.fill(add(table, number), reward=0.5)

        add_filled(0)
        original, later = SnapshotSelection.look, threading.Timer(0.2, add_filled, (1,))

        def look(selection: SnapshotSelection) -> Any:
            found = original(selection)
            if len(found):
                table.remove(0)
                later.start()
            return found

        data = gear.ReplayDataset(
            table, batch_size=1, windows={"number": None, "token": gear.Window(1), "reward": None}, device="cpu",
            prefetch=0, sampler=gear.Uniform(replacement=False),
        )  # fmt: skip
        monkeypatch.setattr(SnapshotSelection, "look", look)
        assert data.sample()["number"].tolist() == [1]
        later.join()


# ---------------------------------------------------------------- checkpoints


def rewards(table: gear.Table) -> list[Any]:
    for index in table.indices():
        row = table[index]
        check(row, [name for name in LATE if name in row])
    return [sorted(set(table[index]) & set(LATE)) for index in table.indices()]


def test_checkpoints_keep_what_is_filled(tmp_path: Path) -> None:
    with make() as table:
        slots = [add(table, number) for number in range(5)]
        table.fill(slots[1], **values(1, 5))
        table.save(tmp_path)
        written = set(tmp_path.rglob("*.npy"))
        with gear.Table.load(tmp_path) as loaded:
            assert rewards(loaded) == [[], sorted(LATE), [], [], []]
            loaded.fill(int(loaded.indices()[2]), reward=value("reward", 2, 5))
            loaded.save(tmp_path)
            assert set(tmp_path.rglob("*.npy")) > written  # the others are not written again
        with gear.Table.load(tmp_path, block_steps=3, packed=False) as again:
            assert rewards(again) == [[], sorted(LATE), ["reward"], [], []]
            with pytest.raises(FilledError):
                again.fill(int(again.indices()[2]), reward=value("reward", 2, 5))


def test_bits_of_columns_that_do_not_exist_are_refused(tmp_path: Path) -> None:
    import xxhash

    with make() as table:
        table.fill(add(table, 1), **values(1, 5))
        table.save(tmp_path)
    (index,) = tmp_path.glob("index.*")
    text = (tmp_path / "manifest.json").read_bytes()
    valid = index.read_bytes()[: json.loads(text)["index"]["bytes"]]
    records = np.frombuffer(valid, dtype=RECORD).copy()
    records["filled"][0] = 8
    data = records.tobytes()
    old = xxhash.xxh3_128_hexdigest(valid).encode()
    checksum = text[text.index(b'checksum": "') + 12 :][:32]
    text = text.replace(old, xxhash.xxh3_128_hexdigest(data).encode()).replace(checksum, b"0" * 32)
    index.write_bytes(data)
    (tmp_path / "manifest.json").write_bytes(
        text.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(text).encode(), 1)
    )
    with pytest.raises(CheckpointError, match="bits of filled columns"):
        gear.Table.load(tmp_path)


@pytest.mark.parametrize("stale", ["ignore", "error"])
def test_large_values_are_copied_without_the_lock(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch, stale: Any
) -> None:
    """Others add while values are copied, and remove trajectories, whose blocks are not reused meanwhile."""
    monkeypatch.setattr(late, "_SMALL", 0)
    slots = [add(table, number) for number in range(3)]
    added, copy = [], late.copy_rows

    def beside(*args: Any) -> None:
        if not added:
            table.remove(slots[1])
            added.extend(add(table, 10 + i, 9) for i in range(8))
        copy(*args)

    monkeypatch.setattr(late, "copy_rows", beside)
    given = {"reward": torch.arange(3).bfloat16(), "logprob": [value("logprob", n, 5) for n in range(3)]}
    if stale == "error":
        with pytest.raises(StaleIndexError, match="Nothing was changed"):
            table.fill(slots, stale=stale, **given)
        assert len(table.unfilled()[0]) == 10
    else:
        assert table.fill(slots, **given) == 1
        for number in (0, 2):
            assert float(table[slots[number]]["reward"]) == number
            assert torch.equal(table[slots[number]]["logprob"], value("logprob", number, 5))
    for i, slot in enumerate(added):
        check(table[slot], ())
        assert int(table[slot]["number"]) == 10 + i
    table.check_valid()
