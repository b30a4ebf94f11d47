"""Checkpoints: what is saved comes back, what has not changed is not written again, and any tool can read it."""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from cases import examples, mostly_long
from checkpoint_common import CALLS, contents, draw, dying, files, loaded, loaded_numbers, make, segments
from table_common import (
    COLUMNS,
    DTYPES,
    RAGGED,
    Died,
    bits,
    forked,
    forks,
    fresh_name,
    number_of,
    numbers_of,
    random_values,
    rows,
)

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import loading, saving
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.open_files import FileToRead, NewFile
from gear_loader.errors import CheckpointError, PrivateTableError, RegionError, TableClosedError

MonkeyPatch = pytest.MonkeyPatch


@pytest.fixture
def small_pieces(monkeypatch: MonkeyPatch) -> None:
    """Files of many pieces, although they are small."""
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)
    monkeypatch.setattr(FileToRead, "piece_bytes", 4096)


# Round trips -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path) -> None:
    """Also steps that are larger than a piece; bfloat16 is stored as its bits."""
    generator = torch.Generator().manual_seed(0)
    schema = {f"{t} {shape}": gear.Column(t, shape) for t in DTYPES for shape in ((), (1,), (3, 5))}
    schema["x"] = gear.Column(torch.bfloat16, (2,))
    schema |= {"odd": gear.Column(torch.int16, (1021,)), "large": gear.Column(torch.uint8, (3 * 4096 + 17,))}
    ragged = {f"{t} ragged": gear.Column(t, (None, 3)) for t in DTYPES}
    ragged |= {
        "text": gear.Column(str),
        "blob": gear.Column(bytes),
        "wide": gear.Column(torch.uint8, (None, 5000)),
    }
    ragged["image"] = gear.Column(torch.int8, (None, 2), per="trajectory")
    options: dict[str, Any] = {"max_steps": 900, "max_trajectories": 20, "block_steps": 7}
    memory = gear.Memory(payload="8MiB")
    with gear.Table.create({**schema, **ragged}, memory=memory, **options) as table:
        first: Any = None
        for i, length in enumerate([1, 6, 7, 8, 14, 15, 63, 200, 1]):
            each = {name: random_values(c.dtype, (length, *c.shape), generator) for name, c in schema.items()}
            first = first or each
            for name, column in ragged.items():
                shape, numbers = column.ragged.shape, [(i * step) % 5 for step in range(length)]
                each[name] = [random_values(column.ragged.dtype, (n, *shape), generator) for n in numbers]
            each["image"] = random_values(torch.int8, (9000 if i == 3 else i, 2), generator)
            each["text"] = ["ä" * (step % 3) for step in range(length)]
            each["blob"] = [bytes([i]) * (10_000 if step == 63 else step) for step in range(length)]
            table.add(each, priority=None if i % 3 else float(i))
        table.remove(table.indices()[[2, 5]])
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)
    stored = np.load(tmp_path / "segments" / "000001" / "x.npy", allow_pickle=False)
    assert stored.dtype == np.uint16
    assert bits(stored[:1].view(np.int16)) == bits(first["x"])


def test_columns_may_be_called_anything(tmp_path: Path) -> None:
    names = ["a/b", "../up", "..", ".", "ä α", "right\u202eleft", "zero\u200dwidth", "%2e", "\udc80", "A%b"]
    names += ["a" * 300, "a" * 299 + "/"]
    schema = {name: gear.Column(torch.int64) for name in names}
    with gear.Table.create(schema, max_steps=20, max_trajectories=3) as table:
        table.add({name: np.arange(5) + i for i, name in enumerate(names)})
        table.save(tmp_path / "x")
        assert loaded(tmp_path / "x") == contents(table)
    assert [path.name for path in tmp_path.iterdir()] == ["x"], "nothing leaves the directory"
    assert len(list((tmp_path / "x" / "segments" / "000001").glob("*.npy"))) == len(names)


def test_loading_with_other_sizes(tmp_path: Path) -> None:
    with make(on_full="evict_oldest") as table:
        for number, length in enumerate([3, 4, 5, 90]):
            table.add(rows(number, length))
        table.save(tmp_path)
    name = fresh_name()
    options: dict[str, Any] = {"max_steps": 1000, "block_steps": 16, "on_full": "error", "name": name}
    with gear.Table.load(tmp_path, **options) as table:
        layout = table._engine.region.layout
        assert (layout.max_steps, layout.max_trajectories, layout.block_steps) == (1000, 40, 16)
        assert table.on_full == "error"
        with gear.Table.attach(name) as other:
            assert numbers_of(other) == [0, 1, 2, 3]
        table.unlink()
    with gear.Table.load(tmp_path, schema=COLUMNS, max_blocks=1 + 1 + 2 + 23) as table:
        assert numbers_of(table) == [0, 1, 2, 3]
        assert (table.on_full, table._engine.region.layout.num_blocks) == ("evict_oldest", 27)
    for key, value in {"max_steps": 101, "max_trajectories": 3, "max_blocks": 26}.items():
        with pytest.raises(CheckpointError, match=rf"needs {key}=.* {value} was given. Load it with larger"):
            gear.Table.load(tmp_path, name=name, **{key: value})
        with pytest.raises(RegionError):
            gear.Table.attach(name)


def test_a_closed_table_and_one_that_is_closed_during_a_save(
    tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    table = make()
    table.add(rows(1, 50))
    genuine = Directory.new_file

    def new_file(*args: Any, **options: Any) -> NewFile:
        table.close()
        return genuine(*args, **options)

    monkeypatch.setattr(Directory, "new_file", new_file)
    table.save(tmp_path / "ck")
    assert loaded_numbers(tmp_path / "ck") == [1]
    with pytest.raises(TableClosedError):
        table.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with make() as table, pytest.raises(PrivateTableError):
        table.unlink()


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    with make(ragged=True) as table:
        for number, length in enumerate([5, 17, 1]):
            table.add(rows(number, length, ragged=True))
        table.save(tmp_path)
        table.add(rows(3, 9, ragged=True))
        table.remove(int(table.indices()[0]))
        table.save(tmp_path)
    manifest = json.loads((tmp_path / "manifest.json").read_text())
    index = np.fromfile(
        tmp_path / manifest["index"]["path"], dtype=[tuple(each) for each in manifest["index"]["record"]]
    )
    stored = {
        (number, name): np.load(tmp_path / f"segments/{number:06d}" / file, mmap_mode="r", allow_pickle=False)
        for number in (segment["number"] for segment in manifest["segments"])
        for name, file in manifest["files"].items()
    }
    index, found = index[index["length"] > 0], []
    for number, first, length, place in index[["segment", "first", "length", "place"]].tolist():
        parts = {name: stored[number, name][first : first + length].copy() for name in COLUMNS}
        records = stored[number, "words"][first : first + length]
        words = [stored[number, "words\0values"][at : at + count] for at, count in records]
        at, count = stored[number, "name"][place]
        text = stored[number, "name\0values"][at : at + count].tobytes().decode()
        offsets = torch.from_numpy(np.concatenate(([0], np.cumsum(records[:, 1]))))
        ragged = {"words": gear.Ragged(torch.from_numpy(np.concatenate(words)), offsets), "name": text}
        found.append(number_of({name: torch.from_numpy(part) for name, part in parts.items()} | ragged))
    assert found == [1, 2, 3]
    assert [name for name, *_ in manifest["schema"]] == list(RAGGED)


@pytest.mark.long
def test_checkpoints_are_loaded_on_demand_and_without_pickle() -> None:
    source = "".join(path.read_text() for path in Path(saving.__file__).parent.glob("*.py"))
    assert "pickle" not in source
    program = "import sys, gear_loader\nprint('gear_loader.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


# What is written -------------------------------------------------------------------------------------


def test_a_save_writes_what_is_new(tmp_path: Path) -> None:
    stored = ["checksums.xxh3", *(f"{name}.npy" for name in COLUMNS)]
    with make() as table:
        for number in range(10):
            table.add(rows(number, 10))
        table.save(tmp_path)
        before = files(tmp_path)
        assert segments(tmp_path) == ["000001"]

        table.add(rows(10, 3))
        table.remove(int(table.indices()[0]))
        table.save(tmp_path)
        after = files(tmp_path)
        assert segments(tmp_path) == ["000001", "000002"]
        kept = {name for name in after if name in before and after[name] == before[name]}
        assert kept == {f"segments/000001/{name}" for name in stored}, "not written again"
        new = np.load(tmp_path / "segments" / "000002" / "number.npy")
        assert new.tolist() == [10, 10, 10], "nothing but the new steps"
        written = {f"segments/000002/{name}" for name in stored}
        assert set(after) - kept == {"index.000002.records", "manifest.json", *written}
        assert loaded(tmp_path) == contents(table)

        table.save(tmp_path)
        assert segments(tmp_path) == ["000001", "000002"], "nothing new, no segment"
        assert loaded(tmp_path) == contents(table)


def test_segments_of_which_less_than_half_lives_are_written_again(tmp_path: Path) -> None:
    with make() as table:
        for number in range(10):
            table.add(rows(number, 10))
        table.save(tmp_path)
        for removed, expected in ((5, ["000001"]), (1, ["000002"]), (4, [])):
            table.remove(table.indices()[:removed])
            table.save(tmp_path)
            assert segments(tmp_path) == expected
            if removed == 1:
                assert len(np.load(tmp_path / "segments" / "000002" / "step.npy")) == 40
            assert loaded(tmp_path) == contents(table)


def test_there_are_never_many_segments(tmp_path: Path) -> None:
    written = 0
    with make(max_trajectories=300, max_steps=3000) as table:
        known: set[str] = set()
        for number in range(25):
            table.add(rows(number, 10))
            table.save(tmp_path)
            now = set(segments(tmp_path))
            assert len(now) <= saving.MAX_SEGMENTS
            written += sum(len(np.load(tmp_path / "segments" / name / "step.npy")) for name in now - known)
            known = now
        assert loaded(tmp_path) == contents(table)
    assert written <= 4 * 250


@forks
def test_tables_are_never_mixed(tmp_path: Path) -> None:
    """All have the same sequence numbers for different trajectories, also the copy in a forked process."""
    with make() as table:
        table.add(rows(0, 10))
        table.save(tmp_path)
    with gear.Table.load(tmp_path) as one, gear.Table.load(tmp_path) as two, make() as three:
        for first, table in enumerate((one, two, three), start=1):
            table.add(rows(100 * first, 10))
        one.save(tmp_path)
        for turn in range(1, 4):
            for first, table in enumerate((two, one, three), start=1):
                table.add(rows(1000 * turn + first, 5))
                table.save(tmp_path)
                assert loaded(tmp_path) == contents(table)
        kept = numbers_of(three)

        def work() -> None:
            three.add(rows(1, 10))
            three.save(tmp_path)

        forked(work)
        assert loaded_numbers(tmp_path) == [*kept, 1]
        three.add(rows(2, 10))
        three.save(tmp_path)
        assert loaded_numbers(tmp_path) == [*kept, 2]


def test_progress(tmp_path: Path, monkeypatch: MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """What it shows needs a terminal; here, that it gets along without one, and without rich."""
    with make() as table:
        table.add(rows(0, 100))
        table.save(tmp_path, progress=True)
        assert loaded(tmp_path, progress=True) == contents(table)
        monkeypatch.setenv("FORCE_COLOR", "1")  # rich takes this for a terminal
        table.add(rows(1, 100))
        table.save(tmp_path, progress=True)
        assert "Saving" in capsys.readouterr().err
        loaded(tmp_path, progress=True)
        assert "Loading" in capsys.readouterr().err
        monkeypatch.setitem(sys.modules, "rich.console", None)
        table.save(tmp_path, progress=True)
        assert loaded(tmp_path, progress=True) == contents(table)


@pytest.mark.parametrize("ragged", [False, True])
def test_a_full_table_can_be_written_during_a_long_save(
    tmp_path: Path, monkeypatch: MonkeyPatch, small_pieces: None, ragged: bool
) -> None:
    """Between two pieces, what was evicted is free again: the writer waits for a piece and not for the save."""
    monkeypatch.setattr(saving, "HOLD_BYTES", 3000)
    with make(on_full="evict_oldest", ragged=ragged) as table:
        table._engine.region.lock.timeout = 1.0
        for number in range(40):
            table.add(rows(number, 10, ragged=ragged))
        numbers, turns = itertools.count(40), 0
        genuine = files_module._write_piece

        def write_piece(*args: Any) -> None:
            nonlocal turns
            turns += 1
            if turns < 12:
                # By another thread than the one that copies: it may hold a ticket right now, for a moment.
                table.extend([rows(next(numbers), 10, ragged=ragged) for _ in range(12)])
            genuine(*args)

        monkeypatch.setattr(files_module, "_write_piece", write_piece)
        table.save(tmp_path)
        assert turns > 12
        assert loaded(tmp_path) == contents(table)


def test_loading_during_a_save(tmp_path: Path, monkeypatch: MonkeyPatch) -> None:
    """What the manifest named has been removed when it is its turn: then the new one holds."""
    with make() as table:
        table.add(rows(0, 50))
        table.save(tmp_path)
        genuine = loading.read_records
        saved = False

        def read_records(*args: Any) -> Any:
            nonlocal saved
            records = genuine(*args)
            if not saved:
                saved = True
                table.remove(table.indices())
                table.add(rows(1, 50))
                table.save(tmp_path)
            return records

        monkeypatch.setattr(loading, "read_records", read_records)
        assert loaded_numbers(tmp_path) == [1]


_ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30)),
    st.tuples(st.just("remove"), st.integers(0, 100)),
    st.tuples(st.just("draw"), st.integers(1, 5)),
    st.tuples(st.just("save"), st.integers(0, 1)),
    st.tuples(st.just("load"), st.integers(0, 1)),
)


@hypothesis.settings(max_examples=examples(15))
@hypothesis.given(actions=st.lists(_ACTIONS, max_size=30))
def test_any_order_of_changes_saves_and_loads(
    tmp_path_factory: pytest.TempPathFactory, actions: list[tuple[str, int]]
) -> None:
    folders = [tmp_path_factory.mktemp("checkpoint") for _ in range(2)]
    saved: dict[int, tuple[dict[int, int], dict[int, int], int, int]] = {}
    model: dict[int, int] = {}  # number -> length, oldest first
    times: dict[int, int] = {}
    inserted = sampled = 0
    numbers = itertools.count()
    table = make()
    for action, value in actions:
        if action == "add" and len(model) < 40 and sum(model.values()) + value <= 400:
            number = next(numbers)
            table.add(rows(number, value), priority=number)
            model[number], times[number] = value, 0
            inserted += 1
        elif action == "remove" and model:
            place = value % len(model)
            table.remove(int(table.indices()[place]))
            number = list(model)[place]
            del model[number], times[number]
        elif action == "draw" and value <= len(model):
            draw(table, value)
            sampled += value
            for number in list(model)[:value]:
                times[number] += 1
        elif action == "save":
            table.save(folders[value])
            saved[value] = dict(model), dict(times), inserted, sampled
        elif action == "load" and value in saved:
            table.close()
            table = gear.Table.load(folders[value])
            model, times, inserted, sampled = saved[value]
            model, times = dict(model), dict(times)
        assert numbers_of(table) == list(model)
        assert contents(table)["times_sampled"] == list(times.values())
        assert contents(table)["counts"] == (inserted, sampled)
    for value, (expected, *_) in saved.items():
        with gear.Table.load(folders[value]) as copy:
            assert dict(zip(numbers_of(copy), copy.lengths().tolist(), strict=True)) == expected
            priorities = copy._engine.region.array("priority")[copy.indices()]
            assert priorities.tolist() == [float(number) for number in expected]
    table.close()


@pytest.mark.parametrize(
    "case", mostly_long(["first", "more", "rewritten", "rounds", "another table", "ragged"], "more")
)
def test_dying_at_every_call_of_the_system(tmp_path: Path, case: str, monkeypatch: MonkeyPatch) -> None:
    if case == "rounds":
        monkeypatch.setattr(saving, "HOLD_BYTES", 0)
        monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)
    path, ragged = tmp_path / "ck", case == "ragged"
    with make(ragged=ragged) as table:
        for number in range(6):
            table.add(rows(number, 10 + number, ragged=ragged))
        before: dict[str, Any] | None = None
        if case == "another table":
            with make() as other:
                other.add(rows(77, 20))
                other.save(path)
                before = contents(other)
        elif case != "first":
            table.save(path)
            before = contents(table)
            if case == "rewritten":
                table.remove(table.indices()[:4])
            table.add(rows(6, 30, ragged=ragged))
        after = contents(table)
        assert before != after
        deaths, seen, died = 0, set(), True
        while died and "after" not in seen:  # the rest is tidying up
            died = False
            with dying(deaths, CALLS):
                try:
                    table.save(path)
                except Died:
                    died = True
            assert not table._engine.region.array("readers")[:, 2].any()
            if before is None and not (path / "manifest.json").exists():
                with pytest.raises(CheckpointError, match=r"no manifest\.json"):
                    gear.Table.load(path)
                seen.add("before")
            else:
                found = loaded(path)
                assert found in (before, after)
                seen.add("before" if found == before else "after")
            deaths += died
        assert seen == {"before", "after"}
        assert deaths > 25
        table.save(path)
        assert loaded(path) == after
        named = set(files(path))
        table.save(path)
        assert {name for name in files(path) if "segments" in name} == {n for n in named if "segments" in n}
        assert not [name for name in files(path) if name.endswith(".part")], "nothing half done is left"
        assert loaded(path) == after


@pytest.mark.long
def test_dying_while_tidying_up(tmp_path: Path) -> None:
    """The new checkpoint holds, and the save after the next finds only what is needed."""
    path = tmp_path / "ck"
    with make() as table:
        for number in range(30):
            table.add(rows(number, 10))
            table.remove(table.indices()[:-2])
            with dying(30 + 2 * number, CALLS), contextlib.suppress(Died):
                table.save(path)
            if (path / "manifest.json").exists():
                found = loaded_numbers(path)
                assert found == list(range(found[0], found[-1] + 1))
        table.save(path)
        assert len(files(path)) <= 2 + 2 * 6
        assert loaded(path) == contents(table)
