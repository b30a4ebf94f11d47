"""Checkpoints: what is saved comes back, what has not changed is not written again, and any tool can read it."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import hypothesis
import hypothesis.strategies as st
import numpy as np
import pytest
import torch
from checkpoint_common import contents, draw, files, loaded, loaded_numbers, make, segments
from table_common import COLUMNS, DTYPES, bits, fresh_name, named, number_of, numbers_of, random_values, rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving
from gear_loader.errors import CheckpointError, PrivateTableError, TableClosedError


@pytest.fixture
def small_pieces(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files of many pieces, although they are small."""
    monkeypatch.setattr(files_module, "PIECE_BYTES", 4096)


# Round trips -----------------------------------------------------------------------------------------


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("shape", [(), (1,), (3, 5), (1021,)], ids=str)
def test_every_dtype_and_shape_comes_back_bit_for_bit(tmp_path: Path, shape: tuple[int, ...]) -> None:
    generator = torch.Generator().manual_seed(0)
    schema = {str(dtype): gear.Column(dtype, shape) for dtype in DTYPES}
    with gear.Table.create(schema, max_steps=900, max_trajectories=20, block_steps=7) as table:
        for i, length in enumerate([1, 6, 7, 8, 14, 15, 63, 200, 1]):
            trajectory = {
                name: random_values(c.dtype, (length, *shape), generator) for name, c in schema.items()
            }
            table.add(trajectory, priority=None if i % 3 else float(i))
        table.remove(table.indices()[[2, 5]])
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)


def test_steps_larger_than_a_piece(tmp_path: Path, small_pieces: None) -> None:
    generator = torch.Generator().manual_seed(1)
    column = gear.Column(torch.uint8, (3 * 4096 + 17,))
    with gear.Table.create({"x": column}, max_steps=30, max_trajectories=5, block_steps=2) as table:
        for length in (1, 2, 5, 20):
            table.add({"x": random_values(column.dtype, (length, *column.shape), generator)})
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)


def test_an_empty_table(tmp_path: Path) -> None:
    with make() as table:
        table.save(tmp_path / "new" / "directory")
        assert loaded(tmp_path / "new" / "directory") == contents(table)
        table.remove(table.add(rows(1, 5)))
        table.save(tmp_path / "new" / "directory")
        found = loaded(tmp_path / "new" / "directory")
        assert found == contents(table)
        assert found["next_sequence"] == 1, "a number does not come again"


NAMES = [
    "a/b",
    "../up",
    "..",
    ".",
    "ä α",
    "right\u202eleft",
    "zero\u200dwidth",
    "%2e",
    "a" * 300,
    "a" * 299 + "/",
    "\udc80",
    "A%b",
]


def test_columns_may_be_called_anything(tmp_path: Path) -> None:
    schema = {name: gear.Column(torch.int64) for name in NAMES}
    with gear.Table.create(schema, max_steps=20, max_trajectories=3) as table:
        table.add({name: np.arange(5) + i for i, name in enumerate(NAMES)})
        table.save(tmp_path / "x")
        assert loaded(tmp_path / "x") == contents(table)
    assert [path.name for path in tmp_path.iterdir()] == ["x"], "nothing leaves the directory"
    assert len(list((tmp_path / "x" / "segments" / "000001").iterdir())) == len(NAMES)


def test_loading_with_other_sizes(tmp_path: Path) -> None:
    with make(on_full="evict_oldest") as table:
        for number, length in enumerate([3, 4, 5, 90]):
            table.add(rows(number, length))
        table.save(tmp_path)
    name = fresh_name()
    options: dict[str, Any] = {"max_steps": 1000, "block_steps": 16, "on_full": "error", "name": name}
    with gear.Table.load(tmp_path, **options) as table:
        layout = table.region.layout
        assert (layout.max_steps, layout.max_trajectories, layout.block_steps) == (1000, 40, 16)
        assert table.on_full == "error"
        with gear.Table.attach(name) as other:
            assert numbers_of(other) == [0, 1, 2, 3]
        table.unlink()
    with gear.Table.load(tmp_path, schema=COLUMNS, max_blocks=1 + 1 + 2 + 23) as table:
        assert numbers_of(table) == [0, 1, 2, 3]
        assert table.on_full == "evict_oldest"
        assert table.region.layout.num_blocks == 27
    for key, value in {"max_steps": 101, "max_trajectories": 3, "max_blocks": 26}.items():
        with pytest.raises(CheckpointError, match=rf"needs {key}=.* {value} was given. Load it with larger"):
            gear.Table.load(tmp_path, name=name, **{key: value})
        with pytest.raises(gear.errors.RegionError):
            gear.Table.attach(name)


def test_a_loaded_table_goes_on_counting(tmp_path: Path) -> None:
    with make() as table:
        for number in range(4):
            table.add(rows(number, 5))
        table.remove(table.indices()[[0, 3]])
        table.save(tmp_path)
    with gear.Table.load(tmp_path) as table:
        table.add(rows(9, 5))
        assert numbers_of(table) == [1, 2, 9]
        assert contents(table)["sequences"] == [1, 2, 4]


def test_a_closed_table(tmp_path: Path) -> None:
    table = make()
    table.close()
    with pytest.raises(TableClosedError):
        table.save(tmp_path / "x")
    assert not (tmp_path / "x").exists()
    with make() as table, pytest.raises(PrivateTableError):
        table.unlink()


def test_other_tools_can_read_it(tmp_path: Path) -> None:
    with make() as table:
        for number, length in enumerate([5, 17, 1]):
            table.add(rows(number, length))
        table.save(tmp_path)
        table.add(rows(3, 9))
        table.remove(int(table.indices()[0]))
        table.save(tmp_path)

    import safetensors.numpy

    manifest = json.loads((tmp_path / "manifest.json").read_text())
    index = safetensors.numpy.load_file(tmp_path / manifest["index"]["path"])
    stored = {
        segment["number"]: {
            name: np.load(tmp_path / file["path"], mmap_mode="r", allow_pickle=False)
            for name, file in segment["files"].items()
        }
        for segment in manifest["segments"]
    }
    found = []
    for number, first, length in zip(index["segment"], index["first"], index["length"], strict=True):
        trajectory = {name: values[first : first + length] for name, values in stored[int(number)].items()}
        found.append(
            number_of({name: torch.from_numpy(values.copy()) for name, values in trajectory.items()})
        )
    assert found == [1, 2, 3]
    assert [name for name, _, _ in manifest["schema"]] == list(COLUMNS)


def test_checkpoints_are_loaded_on_demand_and_without_pickle() -> None:
    source = "".join(path.read_text() for path in Path(saving.__file__).parent.glob("*.py"))
    assert "pickle" not in source
    program = "import sys, gear_loader\nprint('gear_loader.checkpoint' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, timeout=120)
    assert done.stdout == "False\n", done.stderr


# What is written -------------------------------------------------------------------------------------


def test_a_save_writes_what_is_new(tmp_path: Path) -> None:
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
        assert kept == {f"segments/000001/{name}.npy" for name in COLUMNS}, "not written again"
        new = np.load(tmp_path / "segments" / "000002" / "number.npy")
        assert new.tolist() == [10, 10, 10], "nothing but the new steps"
        assert set(after) - kept == {
            "index.000002.safetensors",
            "manifest.json",
            *(f"segments/000002/{name}.npy" for name in COLUMNS),
        }, "and what the previous save alone needed is gone"
        assert loaded(tmp_path) == contents(table)

        table.save(tmp_path)
        assert segments(tmp_path) == ["000001", "000002"], "nothing new, no segment"
        assert loaded(tmp_path) == contents(table)


def test_segments_of_which_little_lives_are_written_anew(tmp_path: Path) -> None:
    with make() as table:
        for number in range(10):
            table.add(rows(number, 10))
        table.save(tmp_path)
        table.remove(table.indices()[:5])
        table.save(tmp_path)
        assert segments(tmp_path) == ["000001"], "half of it lives"
        table.remove(int(table.indices()[0]))
        table.save(tmp_path)
        assert segments(tmp_path) == ["000002"]
        assert len(np.load(tmp_path / "segments" / "000002" / "step.npy")) == 40
        assert loaded(tmp_path) == contents(table)
        table.remove(table.indices())
        table.save(tmp_path)
        assert segments(tmp_path) == []
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
            for name in now - known:
                written += len(np.load(tmp_path / "segments" / name / "step.npy"))
            known = now
        assert loaded(tmp_path) == contents(table)
    assert written <= 4 * 250


def test_a_table_has_several_checkpoints(tmp_path: Path) -> None:
    with make() as table:
        for number in range(6):
            table.add(rows(number, 10))
            table.save(tmp_path / "ab"[number % 2])
        for name, count in (("a", 5), ("b", 6)):
            assert loaded_numbers(tmp_path / name) == list(range(count))
            assert segments(tmp_path / name) == ["000001", "000002", "000003"]


def test_a_loaded_table_goes_on_with_its_checkpoint(tmp_path: Path) -> None:
    with make() as table:
        for number in range(5):
            table.add(rows(number, 10))
        table.save(tmp_path)
    for turn in range(3):
        with gear.Table.load(tmp_path, block_steps=3 + turn) as table:
            table.add(rows(10 + turn, 4))
            table.save(tmp_path)
            assert loaded_numbers(tmp_path) == [0, 1, 2, 3, 4, *range(10, 11 + turn)]
            assert "000001" in segments(tmp_path)


def test_tables_are_never_mixed(tmp_path: Path) -> None:
    """Both have the same sequence numbers for different trajectories."""
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


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_forked_copy_of_a_private_table_is_another(tmp_path: Path) -> None:
    with make() as table:
        table.add(rows(0, 10))
        table.save(tmp_path)
        pid = os.fork()
        if pid == 0:
            try:
                table.add(rows(1, 10))
                table.save(tmp_path)
            finally:
                os._exit(0)
        os.waitpid(pid, 0)
        assert loaded_numbers(tmp_path) == [0, 1]
        table.add(rows(2, 10))
        table.save(tmp_path)
        assert loaded_numbers(tmp_path) == [0, 2]


def test_handles_of_one_table_share_its_checkpoint(tmp_path: Path) -> None:
    with named() as table, gear.Table.attach(str(table.name)) as other:
        table.add(rows(0, 10))
        table.save(tmp_path)
        other.add(rows(1, 10))
        other.save(tmp_path)
        assert segments(tmp_path) == ["000001", "000002"]
        assert loaded_numbers(tmp_path) == [0, 1]


def test_progress(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
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


# While others write ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "hold", [pytest.param(1 << 30, marks=pytest.mark.long, id="one round"), pytest.param(3000, id="rounds")]
)
def test_a_save_is_a_cut_through_what_others_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None, hold: int
) -> None:
    """One writer adds 0, 1, 2, ..., the table keeps the newest: at any moment they are consecutive."""
    monkeypatch.setattr(saving, "HOLD_BYTES", hold)
    with make(on_full="evict_oldest", max_steps=800, max_trajectories=30) as table:
        stop = threading.Event()
        added = 0
        failures: list[BaseException] = []

        def write() -> None:
            nonlocal added
            try:
                while not stop.is_set():
                    table.add(rows(added, 1 + 37 * added % 40), priority=float(added))
                    added += 1
                    time.sleep(1e-4)  # or there is little left of the interpreter for the save
            except BaseException as error:
                failures.append(error)

        for number in range(40):
            table.add(rows(number, 1 + 37 * number % 40), priority=float(number))
        added = 40
        thread = threading.Thread(target=write)
        thread.start()
        try:
            for _ in range(5):
                before = added
                table.save(tmp_path)
                after = added
                with gear.Table.load(tmp_path) as copy:
                    found = numbers_of(copy)
                    kept = contents(copy)
                assert found == list(range(found[0], found[-1] + 1)), "one moment's"
                assert before - 1 <= found[-1] <= after
                assert kept["sequences"] == found
                assert kept["priorities"] == [float(number) for number in found]
                assert kept["next_sequence"] == found[-1] + 1
        finally:
            stop.set()
            thread.join()
        assert not failures
        table.save(tmp_path)
        assert loaded(tmp_path) == contents(table)


def test_a_full_table_can_be_written_during_a_long_save(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, small_pieces: None
) -> None:
    """Between two pieces, what was evicted is free again: the writer waits for a piece and not for the save."""
    monkeypatch.setattr(saving, "HOLD_BYTES", 3000)
    with make(on_full="evict_oldest", max_steps=400, max_trajectories=40, block_steps=4) as table:
        table.region.lock.timeout = 1.0
        for number in range(40):
            table.add(rows(number, 10))
        numbers = itertools.count(40)
        genuine = files_module._write_piece
        turns = 0

        def write_piece(*args: Any) -> None:
            nonlocal turns
            turns += 1
            if turns < 12:
                # By another thread than the one that copies: it may hold a ticket right now, for a moment.
                table.extend([rows(next(numbers), 10) for _ in range(12)])
            genuine(*args)

        monkeypatch.setattr(files_module, "_write_piece", write_piece)
        table.save(tmp_path)
        assert turns > 12
        assert loaded(tmp_path) == contents(table)


def test_saving_while_the_table_is_closed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    table = make()
    table.add(rows(1, 50))
    genuine = files_module._open_new

    def open_new(*args: Any) -> int:
        table.close()
        return genuine(*args)

    monkeypatch.setattr(files_module, "_open_new", open_new)
    table.save(tmp_path)
    assert loaded_numbers(tmp_path) == [1]


def test_loading_while_somebody_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What the manifest named has been removed when it is its turn: then the new one holds."""
    from gear_loader.checkpoint import loading

    with make() as table:
        table.add(rows(0, 50))
        table.save(tmp_path)
        genuine = loading.read_entries
        saved = False

        def read_entries(*args: Any) -> Any:
            nonlocal saved
            entries = genuine(*args)
            if not saved:
                saved = True
                table.remove(table.indices())
                table.add(rows(1, 50))
                table.save(tmp_path)
            return entries

        monkeypatch.setattr(loading, "read_entries", read_entries)
        assert loaded_numbers(tmp_path) == [1]


# Against a dictionary --------------------------------------------------------------------------------

_ACTIONS = st.one_of(
    st.tuples(st.just("add"), st.integers(1, 30)),
    st.tuples(st.just("remove"), st.integers(0, 100)),
    st.tuples(st.just("draw"), st.integers(1, 5)),
    st.tuples(st.just("save"), st.integers(0, 1)),
    st.tuples(st.just("load"), st.integers(0, 1)),
)


@hypothesis.settings(max_examples=15)
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
            priorities = copy.region.array("priority")[copy.indices()]
            assert priorities.tolist() == [float(number) for number in expected]
    table.close()


def test_bfloat16_is_stored_as_its_bits(tmp_path: Path) -> None:
    values = random_values(torch.bfloat16, (9, 2), torch.Generator().manual_seed(2))
    with gear.Table.create(
        {"x": gear.Column(torch.bfloat16, (2,))}, max_steps=9, max_trajectories=1
    ) as table:
        table.add({"x": values})
        table.save(tmp_path)
    stored = np.load(tmp_path / "segments" / "000001" / "x.npy", allow_pickle=False)
    assert stored.dtype == np.uint16
    assert bits(stored.view(np.int16)) == bits(values)
