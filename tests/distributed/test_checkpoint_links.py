"""Symbolic links in a checkpoint: a save follows none of them, changes nothing where there is one, and says so."""

from __future__ import annotations

import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from checkpoint_common import contents, files, loaded, loaded_numbers, make, segments
from table_common import rows
from test_distributed_checkpoint import by_id, save_all, saved, shards
from test_distributed_checkpoint import loaded as loaded_by

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import saving
from gear_loader.checkpoint.directory import Directory
from gear_loader.distributed.checkpoint_loading import load as load_shards
from gear_loader.errors import CheckpointError, RankError

LOCK = ".gear-loader.lock"


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with make() as table:
        for number in range(6):
            table.add(rows(number, 10 + number))
        yield table


@pytest.fixture
def path(tmp_path: Path, table: gear.Table) -> Path:
    """A checkpoint of `table` in two segments."""
    table.save(tmp_path / "ck")
    table.add(rows(6, 30))
    table.save(tmp_path / "ck")
    return tmp_path / "ck"


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A foreign directory in which everything is called as a checkpoint's files are."""
    folder = tmp_path / "elsewhere"
    for name in ("000001", "000002", "000777", "000778.part"):
        (folder / name).mkdir(parents=True)
        (folder / name / "step.npy").write_text("theirs")
    (folder / "notes.txt").write_text("theirs")
    return folder


def everything(folder: Path) -> dict[str, Any]:
    """Every entry of a directory and what is in it; of a link, where it points to."""
    found: dict[str, Any] = {}
    for entry in sorted(folder.rglob("*")):
        name = str(entry.relative_to(folder))
        if entry.is_symlink():
            found[name] = os.readlink(entry)
        else:
            found[name] = entry.read_bytes() if entry.is_file() else "directory"
    return found


def link(place: Path, target: Path) -> None:
    """Put a link into the place of whatever is there."""
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    place.unlink(missing_ok=True)
    place.symlink_to(target)


def refused(act: Callable[[], object], place: Path, target: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        act()
    assert str(caught.value).startswith(f"{place} is a symbolic link to {target}; ")
    assert "Put what it points to in its place" in str(caught.value)


def test_segments_that_are_a_link(path: Path, table: gear.Table, elsewhere: Path) -> None:
    """Neither a save, nor its cleaning, nor a load goes there."""
    theirs = everything(elsewhere)
    link(path / "segments", elsewhere)
    ours = everything(path)
    table.add(rows(7, 20))
    for _ in range(2):
        refused(lambda: table.save(path), path / "segments", elsewhere)
        refused(lambda: gear.Table.load(path), path / "segments", elsewhere)
    assert everything(path) == ours
    assert everything(elsewhere) == theirs


@pytest.mark.parametrize("name", ["000001", "000777", "000778.part"])
def test_a_segment_that_is_a_link(path: Path, table: gear.Table, elsewhere: Path, name: str) -> None:
    theirs = everything(elsewhere)
    place = path / "segments" / name
    link(place, elsewhere / "000777")
    ours = everything(path)
    table.add(rows(7, 20))
    refused(lambda: table.save(path), place, elsewhere / "000777")
    assert everything(path) == ours
    assert everything(elsewhere) == theirs
    if name == "000001":
        refused(lambda: gear.Table.load(path), place, elsewhere / "000777")
    else:
        assert loaded_numbers(path) == list(range(7)), "what no manifest names is nobody's business"


NAMES = [LOCK, "manifest.json", "manifest.json.part", "index.000002.safetensors", "segments/000001/step.npy"]


@pytest.mark.parametrize("dangling", [False, True])
@pytest.mark.parametrize("name", NAMES)
def test_a_file_that_is_a_link(
    path: Path, table: gear.Table, tmp_path: Path, name: str, dangling: bool
) -> None:
    target, place = tmp_path / "target", path / name
    if not dangling:
        shutil.copy(place, target) if place.exists() else target.write_text("theirs")
    theirs = None if dangling else target.read_bytes()
    link(place, target)
    ours = everything(path)
    table.add(rows(7, 20))
    refused(lambda: table.save(path), place, target)
    assert everything(path) == ours
    assert target.exists() is not dangling, "the target of a lock file is not created"
    assert dangling or target.read_bytes() == theirs


def test_a_first_save_with_a_lock_file_that_is_a_link(tmp_path: Path, table: gear.Table) -> None:
    (tmp_path / "ck").mkdir()
    (tmp_path / "ck" / LOCK).symlink_to(tmp_path / "target")
    refused(lambda: table.save(tmp_path / "ck"), tmp_path / "ck" / LOCK, tmp_path / "target")
    assert everything(tmp_path) == {"ck": "directory", f"ck/{LOCK}": str(tmp_path / "target")}


def test_the_path_itself_may_be_a_link(tmp_path: Path, table: gear.Table) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "ck").symlink_to("disk")
    for number in (6, 7):
        table.save(tmp_path / "ck")
        assert loaded(tmp_path / "ck") == loaded(tmp_path / "disk") == contents(table)
        table.add(rows(number, 20))
    assert (tmp_path / "ck").is_symlink()
    link(tmp_path / "ck", tmp_path / "gone")
    message = f"{tmp_path / 'ck'} is a symbolic link to {tmp_path / 'gone'}, which does not exist"
    with pytest.raises(CheckpointError, match=re.escape(message)):
        table.save(tmp_path / "ck")
    assert not (tmp_path / "gone").exists()


def test_foreign_links_beside_a_checkpoint_stay(path: Path, table: gear.Table, elsewhere: Path) -> None:
    theirs = everything(elsewhere)
    for name in ("mine", "segments/mine", "segments/000001/mine"):
        (path / name).symlink_to(elsewhere)
    table.remove(table.indices()[:6])  # so that the first segment goes
    table.save(path)
    assert loaded(path) == contents(table)
    assert everything(elsewhere) == theirs
    assert os.listdir(path / "segments" / "000001") == ["mine"], "nothing of ours is left"


def test_only_what_a_save_has_written_is_removed(path: Path, table: gear.Table) -> None:
    """Foreign files in directories that are called as segments are stay, and their numbers are not used."""
    for name in ("000001", "000003", "000004.part"):
        (path / "segments" / name / "kept").mkdir(parents=True, exist_ok=True)
        (path / "segments" / name / "notes.txt").write_text("mine")
        (path / "segments" / name / "old.npy").write_text("of a save that was killed")
    table.remove(table.indices()[:6])
    table.add(rows(8, 20))
    table.save(path)
    assert segments(path) == ["000001", "000002", "000003", "000004.part", "000005"]
    for name in ("000001", "000003", "000004.part"):
        assert sorted(os.listdir(path / "segments" / name)) == ["kept", "notes.txt"]
    assert loaded(path) == contents(table)
    table.add(rows(9, 20))
    table.save(path)
    assert loaded(path) == contents(table)


@pytest.mark.parametrize("name", ["segments", "segments/000003.part", "segments/000001"])
def test_a_link_that_is_put_there_while_a_save_goes_on(
    path: Path, table: gear.Table, elsewhere: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """Whatever the save does then: nothing elsewhere changes, and what was saved can be loaded once it is gone."""
    theirs, before = everything(elsewhere), contents(table)
    table.remove(table.indices()[:6])
    table.add(rows(8, 20))
    genuine = files_module._open_new

    def swap(*args: Any) -> int:
        if not (path / "aside").exists():
            os.rename(path / name, path / "aside")
            (path / name).symlink_to(elsewhere)
        return genuine(*args)

    monkeypatch.setattr(files_module, "_open_new", swap)
    try:
        table.save(path)
        after = contents(table)
    except CheckpointError:
        after = before
    assert everything(elsewhere) == theirs
    if (path / name).is_symlink():
        (path / name).unlink()
        os.rename(path / "aside", path / name)
        assert loaded(path) == after


def test_a_link_that_takes_the_place_of_the_lock(
    path: Path, table: gear.Table, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the look at what there is."""
    genuine = saving.locked

    def late(directory: Directory) -> Any:
        link(path / LOCK, tmp_path / "target")
        return genuine(directory)

    monkeypatch.setattr(saving, "locked", late)
    before = files(path)
    refused(lambda: table.save(path), path / LOCK, tmp_path / "target")
    assert files(path) == before
    assert not (tmp_path / "target").exists()


# Several tables --------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "pattern", ["saves", "saves/*", "saves/*/00001", "saves/*/00001/segments", "saves/*/00001/segments/*"]
)
def test_a_directory_of_a_sharded_checkpoint_that_is_a_link(
    tmp_path: Path, elsewhere: Path, pattern: str
) -> None:
    theirs = everything(elsewhere)
    path = tmp_path / "ck"
    with shards(2) as tables:
        saved(tables, path)
        place = next(path.glob(pattern))
        aside = tmp_path / "aside"
        shutil.move(place, aside)
        place.symlink_to(elsewhere)
        ours = everything(path)
        tables[0].add(rows_of(tables[0]))
        errors = save_all(tables, path)
        message = f"{place} is a symbolic link to {elsewhere}; "
        assert sum(isinstance(error, CheckpointError) and message in str(error) for error in errors) == 1
        assert all(isinstance(error, (CheckpointError, RankError)) for error in errors)
        assert everything(elsewhere) == theirs
        assert everything(path) == ours
        with pytest.raises(CheckpointError, match=re.escape(message)):
            load_shards(path, rank=1, world_size=2)
        place.unlink()
        shutil.move(aside, place)
        saved(tables, path)
        with loaded_by(path, 2) as others:
            assert by_id(others) == by_id(tables)


def rows_of(table: gear.Table) -> Any:
    """A trajectory that the table has already."""
    return dict(table[int(table.indices()[0])])


@pytest.mark.parametrize("name", [LOCK, "shards.json", "shards.json.part"])
def test_a_file_of_a_sharded_checkpoint_that_is_a_link(tmp_path: Path, name: str) -> None:
    path, target = tmp_path / "ck", tmp_path / "target"
    with shards(2) as tables:
        saved(tables, path)
        link(path / name, target)
        errors = save_all(tables, path)
        assert f"{path / name} is a symbolic link to {target}; " in str(errors[0])
        assert isinstance(errors[1], RankError)
    assert not target.exists()


def test_foreign_files_in_old_saves_of_a_sharded_checkpoint_stay(tmp_path: Path, elsewhere: Path) -> None:
    theirs = everything(elsewhere)
    with shards(2) as tables:
        saved(tables, tmp_path / "ck")
        first = next((tmp_path / "ck" / "saves").iterdir())
        (first / "00000" / "mine").symlink_to(elsewhere)
        (first / "notes.txt").write_text("mine")
        saved(tables, tmp_path / "ck")
        saved(tables, tmp_path / "ck")
        assert sorted(everything(first)) == ["00000", "00000/mine", "notes.txt"]
        assert everything(elsewhere) == theirs
        with loaded_by(tmp_path / "ck", 2) as others:
            assert by_id(others) == by_id(tables)


def test_a_stage_that_is_a_link(tmp_path: Path, elsewhere: Path) -> None:
    """Where a pipeline has several stages, each has a directory of its own in the checkpoint's."""
    from gear_loader.distributed.checkpoint_saving import save

    theirs = everything(elsewhere)
    options: dict[str, Any] = {"rank": 0, "world_size": 1, "agree": lambda said: [said], "stage": "stage-1"}
    with make() as table:
        table.add(rows(0, 5))
        save(table, tmp_path / "ck", barrier=lambda: None, **options)
        with load_shards(tmp_path / "ck", **options) as copy:
            assert len(copy) == 1
        place = tmp_path / "ck" / "stage-1"
        link(place, elsewhere)
        for act in (
            lambda: save(table, tmp_path / "ck", barrier=lambda: None, **options),
            lambda: load_shards(tmp_path / "ck", **options),
        ):
            refused(act, place, elsewhere)
    assert everything(elsewhere) == theirs
