"""Damage of a checkpoint or its place: an error that names the file and the remedy, and no table.

Symbolic links too: a save follows none of them, changes nothing where there is one, and says so.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from cases import mostly_long
from checkpoint_common import (
    contents,
    everything,
    files,
    flip,
    link,
    loaded,
    loaded_numbers,
    make,
    segments,
)
from table_common import COLUMNS, fresh_name, rows

import gear_loader as gear
from gear_loader.checkpoint import json_file, reading, saving
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.open_files import NewFile
from gear_loader.checkpoint.trajectory_records import RECORD
from gear_loader.errors import CheckpointError, RegionError

MonkeyPatch = pytest.MonkeyPatch
REMEDY = "Restore it from a copy, or load another checkpoint."
LOCK = ".gear-loader.lock"
INDEX = "index.000002.records"
STEP = "segments/000001/step.npy"


@pytest.fixture
def ragged() -> bool:
    """Whether the table has ragged columns."""
    return False


@pytest.fixture
def table(ragged: bool) -> Iterator[gear.Table]:
    limiter = gear.SampleToInsertRatio(2.0, min_size=3, error_buffer=1000)
    with make(rate_limiter=limiter, max_times_sampled=5, max_age=1e6, ragged=ragged) as table:
        for number in range(6):
            table.add(rows(number, 10 + number, ragged=ragged), priority=float(number))
        yield table


@pytest.fixture
def path(tmp_path: Path, table: gear.Table, ragged: bool) -> Path:
    """A checkpoint of `table` in two segments."""
    table.save(tmp_path / "ck")
    table.add(rows(6, 30, ragged=ragged))
    table.save(tmp_path / "ck")
    return tmp_path / "ck"


def refused(path: Path, **options: Any) -> str:
    """The error of loading; nothing is left of a table."""
    name = fresh_name()
    with pytest.raises(CheckpointError) as caught:
        gear.Table.load(path, name=name, **options)
    with pytest.raises(RegionError):
        gear.Table.attach(name)
    return str(caught.value)


def not_saved(table: gear.Table, path: Path, message: str) -> None:
    """A save is refused, and changes nothing."""
    before = files(path)
    with pytest.raises(CheckpointError, match=message):
        table.save(path)
    assert files(path) == before


# Damaged files ---------------------------------------------------------------------------------------


def valid_bytes(path: Path, name: str) -> int:
    """Bytes of a file that count; after those of an index others may follow, of a write that did not end."""
    fields = json.loads((path / "manifest.json").read_text())
    return int(fields["index"]["bytes"]) if name == INDEX else (path / name).stat().st_size


@pytest.mark.parametrize("ragged", mostly_long([False, True], True))
def test_flipped_bits_other_sizes_and_other_kinds_of_any_file(path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in files(path):
        file, size = path / name, valid_bytes(path, name)
        data = file.read_bytes()
        places = {0, size - 1, *generator.integers(0, size, 2).tolist()}
        if name == "manifest.json":  # each of its bits counts
            places |= set(range(0, size, 37))
        for place in places:
            flip(file, place, int(generator.integers(8)))
            message = refused(path)
            assert str(file) in message, (name, place)
            assert REMEDY in message or "Use the one that wrote it" in message, (name, place)
            file.write_bytes(data)
        for damaged in (b"", data[: size - 1], data[: size // 2], data + b"\0"):
            if len(damaged) > len(data) and name == INDEX:
                continue
            file.write_bytes(damaged)
            message = refused(path)
            assert str(file) in message, (name, len(damaged))
            assert REMEDY in message
            assert name == "manifest.json" or f"has {len(damaged):,} bytes; expected" in message
        file.unlink()
        message = refused(path)
        assert str(path) in message
        assert "missing" in message or "is no checkpoint: it has no manifest.json" in message
        os.mkfifo(file)  # opening it would block for ever
        assert str(file) in refused(path)
        file.unlink()
        file.write_bytes(data)
    assert loaded_numbers(path) == list(range(7))
    assert "is no checkpoint: it has no manifest.json. Give the directory" in refused(path / "nowhere")
    assert "is no checkpoint" in refused(path / "manifest.json")


def test_a_file_that_shrinks_while_it_is_read(path: Path, monkeypatch: MonkeyPatch) -> None:
    file = path / "segments" / "000002" / "step.npy"
    genuine = os.preadv

    def shrinking(fd: int, *args: Any) -> int:
        if os.readlink(f"/proc/self/fd/{fd}") == str(file):
            os.truncate(file, 4100)
        return genuine(fd, *args)

    monkeypatch.setattr(os, "preadv", shrinking)
    assert f"{file} was cut to 4,100 bytes while it was read. {REMEDY}" in refused(path)


def test_records_that_say_something_else(tmp_path: Path) -> None:
    """With the right checksums."""
    with make(ragged=True) as table:
        table.extend([rows(number, 20, ragged=True) for number in range(3)])
        table.save(tmp_path)
    file = tmp_path / "segments" / "000001" / "words.npy"
    records = np.load(file)
    for place, record in ((3, (0, 1)), (3, (-1, 1)), (59, (0, 2**62)), (0, (0, -1)), (59, (2**62, 1))):
        with pytest.MonkeyPatch.context() as patch:
            changed = records.copy()
            changed[place] = record
            file.write_bytes(file.read_bytes()[:4096] + changed.tobytes())
            patch.setattr(reading.ColumnFile, "compare", lambda *given: None)
            message = refused(tmp_path)
        assert f"{file} is damaged: its records do not name " in message, record


def test_swapped_columns_and_another_header(path: Path) -> None:
    """Sound files in each other's place; and one that is sound by its checksum, but not what the schema says."""
    folder = path / "segments" / "000001"
    for one, other in (("step", "x"), ("length", "step"), ("x", "length")):
        os.rename(folder / f"{one}.npy", folder / f"{other}.npy")
    assert "is damaged: the checksum of the" in refused(path)
    data = (folder / "length.npy").read_bytes().replace(b"<i4", b"<f4")
    (folder / "step.npy").write_bytes(data)
    sums = bytearray((folder / "checksums.xxh3").read_bytes())
    at = 8 * list(COLUMNS).index("step")
    sums[at : at + 8] = xxhash.xxh3_64_digest(data)
    (folder / "checksums.xxh3").write_bytes(sums)
    assert f"{folder / 'checksums.xxh3'} is damaged: its checksum is" in refused(path)
    rewrite(path, put(xxhash.xxh3_128_hexdigest(bytes(sums)), "segments", 0, "xxh128"))
    assert f"{folder / 'step.npy'} has the header" in refused(path)


# Manifests that say something else -------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest, with a checksum that fits."""
    fields = json.loads((path / "manifest.json").read_bytes())
    change(fields)
    if isinstance(fields.get("checksum"), str):
        fields["checksum"] = "0" * 32
    data = json.dumps(fields).encode()
    if isinstance(fields.get("checksum"), str):
        data = data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode(), 1)
    (path / "manifest.json").write_bytes(data)


def put(value: Any, *keys: Any) -> Callable[[Any], None]:
    def change(fields: Any) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        fields[keys[-1]] = value

    return change


def drop(*keys: Any) -> Callable[[Any], None]:
    def change(fields: Any) -> None:
        for key in keys[:-1]:
            fields = fields[key]
        del fields[keys[-1]]

    return change


def test_another_version(path: Path, table: gear.Table) -> None:
    rewrite(path, put(7, "version"))
    expected = (
        f"{path / 'manifest.json'} has checkpoint version 7; this version of Gear Loader reads versions 3 to 6. "
        "Use the one that wrote it, or choose another directory."
    )
    assert refused(path) == expected
    not_saved(table, path, re.escape(expected))


def test_another_schema(path: Path) -> None:
    schema = {**COLUMNS, "value": gear.Column(torch.float32, (4,))}
    message = refused(path, schema=schema)
    assert message.startswith(f"{path / 'manifest.json'} is of a table with the schema Schema({{'number'")
    assert f"expected {gear.Schema(schema)}. Give the schema that was saved (or none)" in message
    assert "is of a table with the schema" in refused(path, schema=dict(reversed(COLUMNS.items())))
    with gear.Table.create(schema, max_steps=10, max_trajectories=1) as other:
        mine, theirs = (re.escape(str(gear.Schema(each))) for each in (schema, COLUMNS))
        for each in (mine, theirs, "Nothing was written. Choose another directory"):
            not_saved(other, path, each)
    assert loaded_numbers(path) == list(range(7))


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside of a parsed JSON."""
    if keys:
        yield keys
    if isinstance(value, (dict, list)):
        for key, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*keys, key))


def test_every_field_of_the_manifest_is_checked(path: Path) -> None:
    """But for the rules, which may be others."""
    data = (path / "manifest.json").read_bytes()
    for keys in places(json.loads(data)):
        other = {"value", "step", "check", "length"} & set(keys)  # columns like the first one
        if keys[0] not in ("rules", "checksum") and keys[:2] != ("segments", 1) and not other:
            for value in (None, -1, 2**70, "1"):
                if (keys, value) != (("origin",), None):
                    rewrite(path, put(value, *keys))
                    with pytest.raises(CheckpointError, match=re.escape(str(path))):
                        gear.Table.load(path, max_blocks=1000).close()
                    (path / "manifest.json").write_bytes(data)


LIMITER, TIMES, AGE = ("rules", "rate_limiter"), ("rules", "max_times_sampled"), ("rules", "max_age")
UP = "segments/000001/../../../x.npy"
MANIFESTS: list[tuple[Callable[[Any], None], str]] = [
    (put("../../etc/passwd", "index", "path"), "it has '../../etc/passwd'; expected 'index.000002.rec"),
    (put(UP, "files", "step"), "manifest.json is damaged at 'files': it has {"),
    (put(2, "segments", 0, "number"), "expected a number that no other segment has"),
    (put(10**6, "segments", 0, "steps"), "number.npy has 4,696 bytes; expected a file of 8,004,096"),
    (put(1, "next_segment"), "expected an integer from 1 to 0"),
    (put("drop", "rules", "on_full"), "'rules.on_full': it has 'drop'; expected a rule of a table (on_fu"),
    (drop(*AGE), "at 'rules.max_age': it has ['max_times_sampled', 'on_full', 'rate_limiter']"),
    (put(1, "rules", "rate"), "'rules': it has ['max_age', 'max_times_sampled', 'on_full', 'rate', 'r"),
    (put(0, *TIMES), "at 'rules.max_times_sampled': it has 0; expected a rule"),
    (put(2**31, *TIMES), "at 'rules.max_times_sampled': it has 2147483648"),
    (put(float("nan"), *AGE), "at 'rules.max_age': it has nan; expected a rule"),
    (put(10**400, *AGE), "at 'rules.max_age': it has 1000"),
    (put(1e10, *AGE), "at 'rules.max_age': it has 10000000000.0; expected a rule of a table"),
    (drop(*LIMITER, "kind"), "at 'rules.rate_limiter': it has {'max_diff'"),
    (put("Magic", *LIMITER, "kind"), "expected a rule of a table (A stored rate limiter is of kind"),
    (put("Queue", *LIMITER, "kind"), "no Queue has these values"),
    (put(41, *LIMITER, "min_size"), "expected a min_size of at most max_trajectories=40"),
    (put(float("nan"), *LIMITER, "max_diff"), "at 'rules.rate_limiter': it has {'kind'"),
    (put(10**400, *LIMITER, "min_diff"), "at 'rules.rate_limiter': it has {'kind'"),
    (put(6, "num_inserted"), "at 'num_inserted': it has 6; expected an integer from 7 to 7"),
    (put(8, "num_inserted"), "at 'num_inserted': it has 8; expected an integer from 7 to 7"),
    (put(-1, "num_sampled"), "at 'num_sampled': it has -1; expected an integer from 0"),
    (drop("num_sampled"), "at 'num_sampled': it has ['block_steps'"),
    (put(6, "next_sequence"), "expected an integer from 7"),
    (put(3, "max_trajectories"), "at 'num_trajectories': it has 7; expected an integer from 0 to 3"),
    (put(6, "num_trajectories"), "there are 7 trajectories, expected 6"),
    (put(100, "num_steps"), "lengths add up to 105, expected 100"),
    (put([["x", "complex64", []]], "schema"), "a schema (Column dtype 'complex64' was received; expected"),
    (put([["x", "int8", [0]]], "schema"), "expected a schema (Column shape [0] was received"),
    (put([["mask", "int8", []]], "schema"), "expected a schema (Column name 'mask' is taken"),
    (put([["x", "int8", []]] * 2, "schema"), "(Column name 'x' was received; expected each name once"),
    (put("tar", "format"), "expected 'gear-loader checkpoint'"),
    (drop("index"), "expected a field 'index'"),
]


def test_manifests_that_say_something_else(path: Path, table: gear.Table) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for change, message in MANIFESTS:
        rewrite(path, change)
        assert message in refused(path)
        manifest.write_bytes(data)
    rewrite(path, put(10**9, "max_steps"))
    with gear.Table.load(path, max_blocks=1000) as copy:
        assert copy._engine.region.layout.max_steps == 10**9
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'):
        manifest.write_bytes(data)
        assert f"{manifest} is damaged" in refused(path)
        not_saved(table, path, "is damaged")


INDICES: list[tuple[str, list[Any], str]] = [
    ("sequence", [0, 1, 2, 3, 4, 5, 5], "there are 6 trajectories, expected 7"),
    ("length", [0, 11, 12, 13, 14, 15, 30], "there are 6 trajectories, expected 7"),
    ("final", [2] + [0] * 6, "a number of final steps is not 0 or 1"),
    ("final", [-1] + [0] * 6, "a number of final steps is not 0 or 1"),
    ("final", [1] + [0] * 6, "two trajectories of segment 1 overlap"),
    ("sequence", [-1, 1, 2, 3, 4, 5, 6], "there are 6 trajectories, expected 7"),
    ("sequence", [-2, 1, 2, 3, 4, 5, 6], "sequence numbers do not ascend"),
    ("sequence", [0, 1, 2, 3, 4, 5, 7], "sequence numbers do not ascend"),
    ("length", [-1, 23, 12, 13, 14, 15, 29], "a length is not between 1 and 400"),
    ("length", [10, 11, 12, 13, 14, 15, 2**62], "a length is not between"),
    ("length", [11, 10, 12, 13, 14, 15, 30], "two trajectories of segment 1 overlap"),
    ("priority", [0, 1, 2, 3, 4, float("nan"), 1], "a priority is neither -1 nor finite"),
    ("priority", [0, 1, 2, 3, 4, -2, 1], "a priority is neither -1 nor finite"),
    ("times_sampled", [0, 0, 0, 0, 0, 0, 5], "was drawn less than 0 or more than 4 times"),
    ("times_sampled", [0, -1, 0, 0, 0, 0, 0], "was drawn less than 0 or more than 4 times"),
    ("created", [6, 5, -(2**63), 3, 2, 1, 0], "an age is not between 0 and"),
    ("ident", [-1, -1, -1, -2, -1, -1, -1], "an id is neither -1 nor between 0 and"),
    ("ident", [-1, 2**62, -1, -1, -1, -1, -1], "an id is neither -1 nor between 0 and"),
    ("ident", [77, -1, 77, -1, -1, -1, -1], "two trajectories have the same id"),
    ("ident", [-1, -1, 1 << 16, -1, -1, -1, -1], "two trajectories have the same id"),
    ("ident", [2**61, -1, -1, -1, -1, -1, -1], "an id of the table's own origin has a number above"),
    ("segment", [1, 1, 1, 1, 1, 1, 3], "segment 3 does not exist"),
    ("segment", [1, 1, 1, 1, 1, 2, 2], "lies outside segment 2, which has 30 steps"),
    ("first", [0, 10, 21, 33, 46, 60, 1], "lies outside segment 2"),
    ("first", [-1, 10, 21, 33, 46, 60, 0], "lies outside segment 1"),
    ("first", [0, 10, 21, 33, 46, 60, 2**63 - 1], "lies outside segment 2"),
    ("first", [0, 0, 21, 33, 46, 60, 0], "overlap"),
]


def put_in_index(path: Path, name: str, value: list[Any]) -> None:
    records = np.fromfile(path / INDEX, dtype=RECORD)
    records[name][: len(value)] = value  # records of no trajectory follow
    records.tofile(path / INDEX)
    sign_index(path)


def sign_index(path: Path) -> None:
    data = (path / INDEX).read_bytes()
    found = {"bytes": len(data), "xxh128": xxhash.xxh3_128_hexdigest(data)}
    rewrite(path, lambda fields: fields["index"].update(found))


def test_an_index_that_says_something_else(path: Path) -> None:
    kept = {name: (path / name).read_bytes() for name in ("manifest.json", INDEX)}

    def restore() -> None:
        for file, data in kept.items():
            (path / file).write_bytes(data)

    for name, value, message in INDICES:
        put_in_index(path, name, value)
        found = refused(path)
        assert message in found
        assert str(path / INDEX) in found
        restore()
    (path / INDEX).write_bytes(b"\xff" * 100)
    sign_index(path)
    assert "has 100 bytes, which are no whole records of 72" in refused(path)
    restore()
    size = 72 * (2 * 7 + 4096) + 1
    os.truncate(path / INDEX, size)
    rewrite(path, lambda fields: fields["index"].update(bytes=size))
    expected = f"{path / INDEX} has {size:,} bytes; expected at most {size - 1:,} for 7 trajectories"
    assert expected in refused(path)
    restore()
    rewrite(path, put(None, *TIMES))  # without a limit, times sampled count in 32 bits
    put_in_index(path, "times_sampled", [2**31 - 1] + [0] * 6)
    assert loaded(path)["times_sampled"][0] == 2**31 - 1


# What refusing costs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_is_parsed() -> Iterator[None]:
    """Reading JSON is an error meanwhile: what is refused by its size costs neither time nor memory."""
    with MonkeyPatch.context() as patch:
        patch.setattr(json, "loads", lambda *args, **options: pytest.fail("it was parsed"))
        yield


def test_a_manifest_that_is_too_large(path: Path, table: gear.Table, monkeypatch: MonkeyPatch) -> None:
    file = path / "manifest.json"
    monkeypatch.setattr(json_file, "LARGEST_BYTES", 1 << 20)
    monkeypatch.setattr(json_file, "LARGEST_VALUES", 300)
    table.save(path)
    assert loaded(path) == contents(table)
    for part, message in ((b"[],", "values"), (b"0,", "values"), (b"[[[[", "values"), (b"x" * 4096, "bytes")):
        file.write_bytes(b'{"schema": [' + part * 300)
        with nothing_is_parsed():
            found = refused(path)
            not_saved(table, path, "is not a manifest: it has")
        assert found.startswith(f"{file} is not a manifest: it has ")
        assert f" {message}; expected at most " in found


def test_an_error_looks_at_no_more_of_a_value_than_it_shows(path: Path) -> None:
    rewrite(path, put({"a": ["x" * 1000] * 3_000, "b": {}}, "rules", "on_full"))
    message = refused(path)
    assert "at 'rules.on_full'" in message
    assert len(message) < 1000


# Saving beside damage and other files ----------------------------------------------------------------


def test_a_save_replaces_what_has_been_lost(path: Path, table: gear.Table) -> None:
    (path / STEP).unlink()
    table.save(path)
    assert segments(path) == ["000002", "000003"]
    assert loaded(path) == contents(table)
    os.truncate(path / "segments" / "000002" / "step.npy", 4096)
    flip(path / "index.000003.records", 50)
    table.save(path)
    assert segments(path) == ["000004"]
    assert loaded(path) == contents(table)


def test_directories_that_are_something_else(tmp_path: Path, table: gear.Table) -> None:
    for name in ("notes.txt", "segments", "index.000001.records"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(CheckpointError) as caught:
            table.save(folder)
        assert str(caught.value) == (
            f"{folder} holds {name!r} and no manifest.json: it is no checkpoint, and nothing was written. "
            "Choose an empty directory or a new one."
        )
        assert [(entry.name, entry.read_text()) for entry in folder.iterdir()] == [(name, "mine")]
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"Choose another path|Make the directory writable"):
            table.save(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_two_saves_at_once(path: Path, table: gear.Table) -> None:
    with open(path / LOCK, "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        not_saved(table, path, r"gear-loader\.lock is locked: another save into this directory")
        assert loaded_numbers(path) == list(range(7)), "loading needs no lock"
    table.save(path)


@pytest.fixture
def elsewhere(tmp_path: Path) -> Path:
    """A foreign directory in which everything is called as a checkpoint's files are."""
    folder = tmp_path / "elsewhere"
    for name in ("000001", "000002", "000777", "000778.part"):
        (folder / name).mkdir(parents=True)
        (folder / name / "step.npy").write_text("theirs")
    (folder / "notes.txt").write_text("theirs")
    return folder


def link_refused(act: Callable[[], object], place: Path, target: Path) -> None:
    with pytest.raises(CheckpointError) as caught:
        act()
    assert str(caught.value).startswith(f"{place} is a symbolic link to {target}; ")
    assert "Put its target in its place" in str(caught.value)


@pytest.mark.parametrize("name", ["", "000001", "000777", "000778.part"])
def test_segments_or_one_of_them_that_are_a_link(
    path: Path, table: gear.Table, elsewhere: Path, name: str
) -> None:
    """Neither a save, nor its cleaning, nor a load goes there; what no manifest names is not looked at."""
    theirs = everything(elsewhere)
    place, target = path / "segments" / name, elsewhere / "000777" if name else elsewhere
    link(place, target)
    ours = everything(path)
    table.add(rows(7, 20))
    for _ in range(2):
        link_refused(lambda: table.save(path), place, target)
        if name in ("", "000001"):
            link_refused(lambda: gear.Table.load(path), place, target)
        else:
            assert loaded_numbers(path) == list(range(7))
    assert everything(path) == ours
    assert everything(elsewhere) == theirs


LINKS = [LOCK, "manifest.json.part", INDEX, LOCK, "manifest.json", STEP]


@pytest.mark.parametrize(("name", "dangling"), [(name, i < 3) for i, name in enumerate(LINKS)])
def test_a_file_that_is_a_link(
    path: Path, table: gear.Table, tmp_path: Path, name: str, dangling: bool
) -> None:
    """A save is refused; a load follows it, because data version tools put links in the place of files."""
    target, place = tmp_path / "target", path / name
    if not dangling:
        shutil.copy(place, target) if place.exists() else target.write_text("theirs")
    theirs = None if dangling else target.read_bytes()
    link(place, target)
    ours = everything(path)
    table.add(rows(7, 20))
    link_refused(lambda: table.save(path), place, target)
    assert everything(path) == ours
    assert target.exists() is not dangling, "the target of a lock file is not created"
    if not dangling:
        assert target.read_bytes() == theirs
        assert loaded_numbers(path) == list(range(7))


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


def test_foreign_files_and_links_beside_a_checkpoint_stay(
    path: Path, table: gear.Table, elsewhere: Path
) -> None:
    """Only what a save has written is removed; numbers of directories that are called as segments are not used."""
    theirs = everything(elsewhere)
    for name in ("mine", "segments/mine", "segments/000001/mine"):
        (path / name).symlink_to(elsewhere)
    (path / "notes.txt").write_text("mine")
    for name in ("000001", "000003", "000004.part"):
        (path / "segments" / name / "kept").mkdir(parents=True, exist_ok=True)
        (path / "segments" / name / "notes.txt").write_text("mine")
        (path / "segments" / name / "old.npy").write_text("of a save that was killed")
    table.remove(table.indices()[:6])  # so that the first segment goes
    table.add(rows(8, 20))
    table.save(path)
    assert segments(path) == ["000001", "000002", "000003", "000004.part", "000005", "mine"]
    for name in ("000001", "000003", "000004.part"):
        mine = ["kept", "mine", "notes.txt"] if name == "000001" else ["kept", "notes.txt"]
        assert sorted(os.listdir(path / "segments" / name)) == mine
    assert (path / "notes.txt").read_text() == "mine"
    assert loaded(path) == contents(table)
    table.add(rows(9, 20))
    table.save(path)
    assert loaded(path) == contents(table)
    assert everything(elsewhere) == theirs


@pytest.mark.parametrize("name", ["segments", "segments/000003.part", "segments/000001"])
def test_a_link_that_is_put_there_during_a_save(
    path: Path, table: gear.Table, elsewhere: Path, monkeypatch: MonkeyPatch, name: str
) -> None:
    """Whatever the save does then: nothing elsewhere changes, and what was saved can be loaded once it is gone."""
    theirs, after = everything(elsewhere), contents(table)
    table.remove(table.indices()[:6])
    table.add(rows(8, 20))
    genuine = Directory.new_file

    def swap(*args: Any, **options: Any) -> NewFile:
        if not (path / "aside").exists():
            os.rename(path / name, path / "aside")
            (path / name).symlink_to(elsewhere)
        return genuine(*args, **options)

    monkeypatch.setattr(Directory, "new_file", swap)
    with contextlib.suppress(CheckpointError):
        table.save(path)
        after = contents(table)
    assert everything(elsewhere) == theirs
    if (path / name).is_symlink():
        (path / name).unlink()
        os.rename(path / "aside", path / name)
        assert loaded(path) == after


def test_a_link_that_takes_the_place_of_the_lock(
    path: Path, table: gear.Table, tmp_path: Path, monkeypatch: MonkeyPatch
) -> None:
    """After the look at what there is."""
    genuine = saving.under_lock

    def late(directory: Directory, section: Any) -> None:
        link(path / LOCK, tmp_path / "target")
        genuine(directory, section)

    monkeypatch.setattr(saving, "under_lock", late)
    before = files(path)
    link_refused(lambda: table.save(path), path / LOCK, tmp_path / "target")
    assert files(path) == before
    assert not (tmp_path / "target").exists()


# A full disk -----------------------------------------------------------------------------------------


FAILURES = [("write", errno.ENOSPC), ("fsync", errno.EIO)]
MORE_FAILURES = [("write", errno.EDQUOT), ("write", errno.EROFS), ("fsync", errno.ENOSPC)]


@pytest.mark.parametrize(
    ("call", "number"), [*FAILURES, *(pytest.param(*each, marks=pytest.mark.long) for each in MORE_FAILURES)]
)
def test_a_disk_that_is_full_or_fails(
    path: Path, table: gear.Table, monkeypatch: MonkeyPatch, number: int, call: str
) -> None:
    table.add(rows(7, 20))
    before = files(path)
    genuine = getattr(os, call)
    remedy = "Free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "Make the directory writable"
    said = rf"^{re.escape(str(path))}.* cannot be written: {os.strerror(number)}\. .*{remedy}"
    after, message = 0, ""
    while message is not None:
        left, message = after, None

        def fail(fd: int, *args: Any) -> Any:
            nonlocal left
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)):
                left -= 1
                if left < 0:
                    raise OSError(number, os.strerror(number))
            return genuine(fd, *args)

        with monkeypatch.context() as patch:
            patch.setattr(os, call, fail)
            try:
                table.save(path)
            except CheckpointError as error:
                message = str(error)
        if message is not None:
            assert re.search(said, message)
            numbers = loaded_numbers(path)
            assert numbers in [list(range(7)), list(range(8))]
            if len(numbers) == 7 and not (path / "manifest.json.part").exists():
                assert files(path) == before, "and nothing of it is left"
            after += 1
    assert after >= (7 if call == "write" else 9)
    assert loaded(path) == contents(table)


def test_short_writes_and_file_systems_without_direct_access(
    path: Path, table: gear.Table, monkeypatch: MonkeyPatch
) -> None:
    genuine, genuine_write = os.open, os.write

    def open_file(name: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return genuine(name, flags, *args, **options)

    def write(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "larger sectors")
        return genuine_write(fd, data)

    def write_less(fd: int, view: Any) -> int:  # a system may write less than it was asked to
        return genuine_write(fd, bytes(view[: 1 + len(view) // 2]))

    for number, (name, other) in enumerate((("open", open_file), ("write", write), ("write", write_less))):
        with monkeypatch.context() as patch:
            patch.setattr(os, name, other)
            table.add(rows(7 + number, 80))
            table.save(path)
        assert loaded(path) == contents(table)
