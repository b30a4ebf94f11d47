"""Whatever is wrong with a checkpoint or its place: an error that names the file and the remedy, and no table."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import os
import re
import shutil
import subprocess
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_common import contents, files, flip, loaded, loaded_numbers, make, segments
from table_common import COLUMNS, fresh_name, rows

import gear_loader as gear
from gear_loader.checkpoint import files as files_module
from gear_loader.checkpoint import json_file, loading, saving
from gear_loader.checkpoint import manifest as manifest_module
from gear_loader.errors import CheckpointError, GearError, RegionError


@pytest.fixture
def table() -> Iterator[gear.Table]:
    limiter = gear.SampleToInsertRatio(2.0, min_size=3, error_buffer=1000)
    with make(rate_limiter=limiter, max_times_sampled=5, max_age=1e6) as table:
        for number in range(6):
            table.add(rows(number, 10 + number), priority=float(number))
        yield table


@pytest.fixture
def path(tmp_path: Path, table: gear.Table) -> Path:
    """A checkpoint of `table` in two segments."""
    table.save(tmp_path / "ck")
    table.add(rows(6, 30))
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


REMEDY = "Restore it from a copy, or load another checkpoint."


# Damaged files ---------------------------------------------------------------------------------------


def test_a_flipped_bit_in_any_file(path: Path) -> None:
    generator = np.random.default_rng(0)
    for name in files(path):
        data = (path / name).read_bytes()
        places = {0, len(data) - 1, *generator.integers(0, len(data), 2).tolist()}
        for place in places:
            flip(path / name, place, int(generator.integers(8)))
            message = refused(path)
            assert str(path / name) in message, (name, place)
            assert REMEDY in message or "Use the one that wrote it" in message, (name, place)
            (path / name).write_bytes(data)
    assert loaded_numbers(path) == list(range(7))


def test_every_bit_of_the_manifest_counts(path: Path) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for place in range(0, len(data), 37):
        flip(manifest, place, place % 8)
        assert str(manifest) in refused(path), place
        manifest.write_bytes(data)


def test_truncated_longer_and_missing_files(path: Path) -> None:
    for name in files(path):
        data = (path / name).read_bytes()
        for damaged in (b"", data[:-1], data[: len(data) // 2], data + b"\0"):
            (path / name).write_bytes(damaged)
            message = refused(path)
            assert str(path / name) in message, (name, len(damaged))
            if name != "manifest.json":
                assert f"has {len(damaged):,} bytes; expected" in message
            assert REMEDY in message
        (path / name).unlink()
        message = refused(path)
        assert str(path) in message
        assert "missing" in message or "is no checkpoint: it has no manifest.json" in message
        (path / name).write_bytes(data)
    assert loaded_numbers(path) == list(range(7))


def test_a_file_that_shrinks_while_it_is_read(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = path / "segments" / "000002" / "step.npy"
    data = file.read_bytes()
    monkeypatch.setattr(files_module, "check_size", lambda *args: None)
    monkeypatch.setattr(loading, "check_size", lambda *args: None)
    file.write_bytes(data[:4100])
    assert f"{file} was cut to 4,100 bytes while it was read. {REMEDY}" in refused(path)


def test_files_of_other_kinds(path: Path) -> None:
    for name in files(path):
        data = (path / name).read_bytes()
        (path / name).unlink()
        os.mkfifo(path / name)  # whoever opened it would wait for ever
        assert str(path / name) in refused(path)
        (path / name).unlink()
        (path / name).write_bytes(data)
    assert "is no checkpoint: it has no manifest.json. Give the directory" in refused(path / "nowhere")
    assert "is no checkpoint" in refused(path / "manifest.json")


def test_files_may_be_links(path: Path, tmp_path: Path) -> None:
    """Data version tools keep files elsewhere and links in their place."""
    for name in files(path):
        target = tmp_path / "store" / name
        target.parent.mkdir(parents=True, exist_ok=True)
        shutil.move(path / name, target)
        (path / name).symlink_to(target)
    assert loaded_numbers(path) == list(range(7))


def test_a_swapped_column(path: Path) -> None:
    """Sound files in each other's place."""
    folder = path / "segments" / "000001"
    os.rename(folder / "step.npy", folder / "x")
    os.rename(folder / "length.npy", folder / "step.npy")
    os.rename(folder / "x", folder / "length.npy")
    assert "is damaged: its checksum is" in refused(path)


# Manifests that say something else -------------------------------------------------------------------


def rewrite(path: Path, change: Callable[[Any], None]) -> None:
    """Change the manifest, with a checksum that fits."""
    manifest = path / "manifest.json"
    fields = json.loads(manifest.read_bytes())
    change(fields)
    if isinstance(fields.get("checksum"), str):
        fields["checksum"] = "0" * 32
        data = json.dumps(fields).encode()
        data = data.replace(b"0" * 32, xxhash.xxh3_128_hexdigest(data).encode(), 1)
    else:
        data = json.dumps(fields).encode()
    manifest.write_bytes(data)


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
    rewrite(path, put(4, "version"))
    expected = (
        f"{path / 'manifest.json'} has checkpoint version 4; this version of Gear Loader reads version 3. "
        "Use the one that wrote it, or choose another directory."
    )
    assert refused(path) == expected
    before = files(path)
    with pytest.raises(CheckpointError, match=re.escape(expected)):
        table.save(path)
    assert files(path) == before


def test_another_schema(path: Path) -> None:
    schema = {**COLUMNS, "value": gear.Column(torch.float32, (4,))}
    message = refused(path, schema=schema)
    assert message.startswith(f"{path / 'manifest.json'} is of a table with the schema Schema({{'number'")
    assert f"expected {gear.Schema(schema)}. Give the schema that was saved (or none)" in message
    assert "is of a table with the schema" in refused(path, schema=dict(reversed(COLUMNS.items())))
    before = files(path)
    with (
        gear.Table.create(schema, max_steps=10, max_trajectories=1) as other,
        pytest.raises(CheckpointError) as caught,
    ):
        other.save(path)
    assert str(gear.Schema(schema)) in str(caught.value)
    assert str(gear.Schema(COLUMNS)) in str(caught.value)
    assert "Nothing was written. Choose another directory" in str(caught.value)
    assert files(path) == before
    assert loaded_numbers(path) == list(range(7))


def _outcome(path: Path) -> str | None:
    """The error of loading; None if it loads."""
    try:
        with gear.Table.load(path, max_blocks=1000):
            return None
    except CheckpointError as error:
        return str(error)


WRONG = [None, -1, 2**70, 1.5, True, "1", "", "../up", [], {}, [[]], [{}], {"x": 1}]


OTHER_RULES: dict[tuple[str, ...], list[Any]] = {
    ("rate_limiter",): [None],
    ("rate_limiter", "samples_per_insert"): [1.5],
    ("rate_limiter", "min_diff"): [None, -1, 1.5],
    ("rate_limiter", "max_diff"): [None, -1, 2**70, 1.5],
    ("max_times_sampled",): [None],
    ("max_age",): [None, 1.5],
}
"""Which of `WRONG` are right, and where."""


def places(value: Any, keys: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The way to every value inside of a parsed JSON."""
    if keys:
        yield keys
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from places(inner, (*keys, key))
    elif isinstance(value, list):
        for i, inner in enumerate(value):
            yield from places(inner, (*keys, i))


@pytest.mark.long
def test_every_field_of_the_manifest_is_checked(path: Path) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    accepted = []
    for keys in places(json.loads(data)):
        changes = [put(value, *keys) for value in WRONG]
        if isinstance(keys[-1], str):
            changes.append(drop(*keys))
        for number, change in enumerate(changes):
            rewrite(path, change)
            message = _outcome(path)
            if message is None:
                accepted.append((keys, WRONG[number] if number < len(WRONG) else "missing"))
            else:
                assert str(path) in message
                assert REMEDY in message or "Use the one that" in message
            manifest.write_bytes(data)
    # Scalar columns have the shape [] anyway, whatever text the checksum was, `rewrite` has put the right one, a table
    # may have other rules, and this one is no shard.
    right = [(("schema", i, 2), []) for i, column in enumerate(COLUMNS.values()) if column.shape == ()]
    right += [(("rules", *keys), value) for keys, values in OTHER_RULES.items() for value in values]
    right.append((("origin",), None))
    found = [(keys, value) for keys, value in accepted if keys != ("checksum",)]
    assert sorted(map(repr, found)) == sorted(map(repr, right))
    assert len(accepted) > len(found)


MANIFESTS: list[tuple[Callable[[Any], None], str]] = [
    (put("../../etc/passwd", "index", "path"), "it has '../../etc/passwd'; expected 'index.000002.saf"),
    (
        put("segments/000001/../../../x.npy", "segments", 0, "files", "step", "path"),
        "at 'segments[0].files.step.path': it has 'segments/000001/../../../x.npy'; expected 'segments/000001/step",
    ),
    (put(2, "segments", 0, "number"), "expected 'segments/000002/number.npy'"),
    (put(10**6, "segments", 0, "steps"), "expected 8004096 bytes for 1,000,000 steps"),
    (put(1, "next_segment"), "expected an integer from 1 to 0"),
    (
        put("drop_everything", "rules", "on_full"),
        "at 'rules.on_full': it has 'drop_everything'; expected a rule of a table (on_full is 'drop_everything'; "
        "expected 'error', 'evict_oldest', 'evict_lowest_priority' or 'wait'.)",
    ),
    (
        drop("rules", "max_age"),
        "at 'rules.max_age': it has ['max_times_sampled', 'on_full', 'rate_limiter']",
    ),
    (
        put(1, "rules", "rate"),
        "at 'rules': it has ['max_age', 'max_times_sampled', 'on_full', 'rate', 'rate_lim",
    ),
    (put(0, "rules", "max_times_sampled"), "at 'rules.max_times_sampled': it has 0; expected a rule"),
    (put(2**31, "rules", "max_times_sampled"), "at 'rules.max_times_sampled': it has 2147483648"),
    (put(float("nan"), "rules", "max_age"), "at 'rules.max_age': it has nan; expected a rule"),
    (put(10**400, "rules", "max_age"), "at 'rules.max_age': it has 1000"),
    (
        put(1e10, "rules", "max_age"),
        "at 'rules.max_age': it has 10000000000.0; expected a rule of a table",
    ),
    (
        drop("rules", "rate_limiter", "kind"),
        "at 'rules.rate_limiter': it has {'samples_per_insert': 2.0, 'min_s",
    ),
    (
        put("Magic", "rules", "rate_limiter", "kind"),
        "expected a rule of a table (A stored rate limiter is of kind",
    ),
    (put("Queue", "rules", "rate_limiter", "kind"), "no Queue has these values"),
    (put(41, "rules", "rate_limiter", "min_size"), "expected a min_size of at most max_trajectories=40"),
    (put(float("nan"), "rules", "rate_limiter", "max_diff"), "at 'rules.rate_limiter': it has {'kind'"),
    (put(10**400, "rules", "rate_limiter", "min_diff"), "at 'rules.rate_limiter': it has {'kind'"),
    (put(6, "num_inserted"), "at 'num_inserted': it has 6; expected an integer from 7 to 7"),
    (put(8, "num_inserted"), "at 'num_inserted': it has 8; expected an integer from 7 to 7"),
    (put(-1, "num_sampled"), "at 'num_sampled': it has -1; expected an integer from 0"),
    (drop("num_sampled"), "at 'num_sampled': it has ['block_steps'"),
    (put(10**9, "max_steps"), ""),
    (put(6, "next_sequence"), "expected an integer from 7"),
    (put(3, "max_trajectories"), "at 'num_trajectories': it has 7; expected an integer from 0 to 3"),
    (put(6, "num_trajectories"), "'sequence' is int64 [7]; expected int64 [6]"),
    (put(100, "num_steps"), "lengths add up to 105, expected 100"),
    (
        put([["x", "complex64", []]], "schema"),
        "expected a schema (Column dtype 'complex64' was received; expected one of bool",
    ),
    (put([["x", "int8", [0]]], "schema"), "expected a schema (Column shape [0] was received"),
    (put([["mask", "int8", []]], "schema"), "expected a schema (Column name 'mask' is taken"),
    (
        put([["x", "int8", []], ["x", "int8", []]], "schema"),
        "expected a schema (Column name 'x' was received; expected each name once",
    ),
    (put("tar", "format"), "expected 'gear-loader checkpoint'"),
    (drop("index"), "expected a field 'index'"),
]


def test_manifests_that_say_something_else(path: Path) -> None:
    manifest = path / "manifest.json"
    data = manifest.read_bytes()
    for change, message in MANIFESTS:
        rewrite(path, change)
        if message:
            assert message in refused(path)
        else:
            with gear.Table.load(path, max_blocks=1000) as table:
                assert table.region.layout.max_steps == 10**9
        manifest.write_bytes(data)


def test_manifests_that_are_none(path: Path, table: gear.Table) -> None:
    for data in (b"", b"{", b"[]", b"null", b"\xff\xfe", b"[" * 100_000, b'{"format": 1}'):
        (path / "manifest.json").write_bytes(data)
        assert f"{path / 'manifest.json'} is damaged" in refused(path)
        before = files(path)
        with pytest.raises(CheckpointError, match="is damaged"):
            table.save(path)
        assert files(path) == before


INDICES: list[tuple[str, list[Any], str]] = [
    ("sequence", [0, 1, 2, 3, 4, 5, 5], "sequence numbers do not ascend"),
    ("sequence", [-1, 1, 2, 3, 4, 5, 6], "sequence numbers do not ascend"),
    ("sequence", [0, 1, 2, 3, 4, 5, 7], "sequence numbers do not ascend"),
    ("length", [0, 22, 12, 13, 14, 15, 29], "a length is not between 1 and 400"),
    ("length", [10, 11, 12, 13, 14, 15, 2**62], "a length is not between"),
    ("length", [11, 10, 12, 13, 14, 15, 30], "two trajectories of segment 1 overlap"),
    ("priority", [0, 1, 2, 3, 4, float("nan"), 1], "a priority is neither -1 nor finite"),
    ("priority", [0, 1, 2, 3, 4, -2, 1], "a priority is neither -1 nor finite"),
    ("times_sampled", [0, 0, 0, 0, 0, 0, 5], "was drawn less than 0 or more than 4 times"),
    ("times_sampled", [0, -1, 0, 0, 0, 0, 0], "was drawn less than 0 or more than 4 times"),
    ("times_sampled", [0.0] * 7, "'times_sampled' is float64 [7]; expected int64 [7]"),
    ("age", [6, 5, 4, 3, 2, 1, -1], "an age is not between 0 and"),
    ("age", [6, 5, -(2**63), 3, 2, 1, 0], "an age is not between 0 and"),
    ("age", [2**63 - 1, 5, 4, 3, 2, 1, 0], "an age is not between 0 and"),
    ("ident", [-1, -1, -1, -2, -1, -1, -1], "an id is neither -1 nor between 0 and"),
    ("ident", [-1, 2**62, -1, -1, -1, -1, -1], "an id is neither -1 nor between 0 and"),
    ("ident", [77, -1, 77, -1, -1, -1, -1], "two trajectories have the same id"),
    ("ident", [-1, -1, 1 << 16, -1, -1, -1, -1], "two trajectories have the same id"),
    ("ident", [2**61, -1, -1, -1, -1, -1, -1], "an id of the table's own origin has a number above"),
    ("ident", [0.0] * 7, "'ident' is float64 [7]; expected int64 [7]"),
    ("age", [6, 5], "'age' is int64 [2]; expected int64 [7]"),
    ("segment", [1, 1, 1, 1, 1, 1, 3], "segment 3 does not exist"),
    ("segment", [1, 1, 1, 1, 1, 2, 2], "lies outside segment 2, which has 30 steps"),
    ("first", [0, 10, 21, 33, 46, 60, 1], "lies outside segment 2"),
    ("first", [-1, 10, 21, 33, 46, 60, 0], "lies outside segment 1"),
    ("first", [0, 10, 21, 33, 46, 60, 2**63 - 1], "lies outside segment 2"),
    ("first", [0, 0, 21, 33, 46, 60, 0], "overlap"),
    ("first", [0.0, 10, 21, 33, 46, 60, 0], "'first' is float64 [7]; expected int64 [7]"),
    ("extra", [0], "has the tensors"),
]


def test_an_index_that_says_something_else(path: Path) -> None:
    kept = {name: (path / name).read_bytes() for name in ("manifest.json", "index.000002.safetensors")}
    for name, value, message in INDICES:
        _put_in_index(path, name, value)
        found = refused(path)
        assert message in found
        assert str(path / "index.000002.safetensors") in found
        for file, data in kept.items():
            (path / file).write_bytes(data)


def _put_in_index(path: Path, name: str, value: list[Any]) -> None:
    import safetensors.numpy

    file = path / "index.000002.safetensors"
    arrays = safetensors.numpy.load_file(file)
    arrays[name] = np.array(value, dtype=np.float32 if name == "priority" else None)
    safetensors.numpy.save_file(arrays, file)
    _sign_index(path)


def _sign_index(path: Path) -> None:
    data = (path / "index.000002.safetensors").read_bytes()

    def change(fields: Any) -> None:
        fields["index"].update(bytes=len(data), xxh128=xxhash.xxh3_128_hexdigest(data))

    rewrite(path, change)


def test_a_table_without_a_limit_of_draws(path: Path) -> None:
    """Times sampled count in 32 bits."""
    rewrite(path, put(None, "rules", "max_times_sampled"))
    file = path / "index.000002.safetensors"
    for times, fits in ((2**31 - 1, True), (2**31, False)):
        _put_in_index(path, "times_sampled", [times] + [0] * 6)
        if fits:
            assert loaded(path)["times_sampled"][0] == times
        else:
            assert f"{file} contradicts manifest.json: a trajectory was drawn" in refused(path)


def test_an_index_that_is_none(path: Path) -> None:
    (path / "index.000002.safetensors").write_bytes(b"\xff" * 100)
    _sign_index(path)
    assert "is not a safetensors file" in refused(path)


def test_another_header(path: Path) -> None:
    """Sound by its checksum, but not what the schema says."""
    file = path / "segments" / "000001" / "step.npy"
    data = file.read_bytes().replace(b"<i4", b"<f4")
    file.write_bytes(data)
    rewrite(path, put(xxhash.xxh3_128_hexdigest(data), "segments", 0, "files", "step", "xxh128"))
    message = refused(path)
    assert f"{file} has the header" in message
    assert "expected" in message


# What refusing costs ---------------------------------------------------------------------------------


@contextlib.contextmanager
def nothing_is_parsed() -> Iterator[None]:
    """Reading JSON is an error meanwhile: what is refused by its size costs neither time nor memory."""
    with pytest.MonkeyPatch.context() as patch:

        def parse(*_args: Any, **_options: Any) -> Any:
            raise AssertionError("it was parsed")

        patch.setattr(json, "loads", parse)
        yield


def test_a_manifest_that_is_larger_than_its_files_can_make_it(path: Path, table: gear.Table) -> None:
    def grow(fields: Any) -> None:
        segment = fields["segments"][0]
        fields["next_segment"] = 130_000
        fields["segments"] = [{**segment, "number": number} for number in range(1, 46_000)]

    rewrite(path, grow)
    size = (path / "manifest.json").stat().st_size
    assert size > 33 << 20
    expected = f"{path / 'manifest.json'} is not a manifest: it has {size:,} bytes; expected at most 4,"
    before = files(path)
    tracemalloc.start()
    try:
        with nothing_is_parsed():
            assert expected in refused(path)
            with pytest.raises(CheckpointError, match="is not a manifest: it has"):
                table.save(path)
        assert tracemalloc.get_traced_memory()[1] < 4 << 20
    finally:
        tracemalloc.stop()
    assert files(path) == before


def test_a_manifest_of_more_values_than_its_files_can_make_it_have(path: Path) -> None:
    for part in (b"[],", b"0,", b"[[[["):
        data = b'{"schema": [' + part * ((4 << 20) // len(part) - 10)
        (path / "manifest.json").write_bytes(data)
        with nothing_is_parsed():
            message = refused(path)
        assert f"{path / 'manifest.json'} is not a manifest: it has about" in message
        assert (
            f"expected at most {300_000 + 16 * 10:,}, as many as the 10 files beside it can need" in message
        )


def test_a_manifest_that_is_large_because_its_files_are(
    path: Path, table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a save writes is never refused for its size: limits grow with the files there are."""
    monkeypatch.setattr(json_file, "_BASE_BYTES", 100)
    monkeypatch.setattr(json_file, "_BASE_VALUES", 10)
    monkeypatch.setattr(manifest_module, "CHUNK_BYTES", 4096)
    table.add(rows(7, 200))
    table.save(path)
    assert loaded(path) == contents(table)
    monkeypatch.setattr(json_file, "_FILE_VALUES", 1)
    before = files(path)
    table.add(rows(8, 10))
    with pytest.raises(CheckpointError, match="is not a manifest: it has about"):
        table.save(path)
    assert files(path) == before


def test_an_index_that_is_larger_than_its_trajectories_make_it(path: Path) -> None:
    file = path / "index.000002.safetensors"
    size = 60 * 7 + (1 << 16) + 1
    with open(file, "ab") as stream:
        stream.truncate(size)
    rewrite(path, lambda fields: fields["index"].update(bytes=size))
    assert f"{file} has {size:,} bytes; expected at most {size - 1:,} for 7 trajectories" in refused(path)


def test_an_error_looks_at_no_more_of_a_value_than_it_shows(path: Path) -> None:
    rewrite(path, put({"a": ["x" * 1000] * 3_000, "b": {}}, "rules", "on_full"))
    message = refused(path)
    assert "at 'rules.on_full'" in message
    assert len(message) < 1000


# Saving beside damage --------------------------------------------------------------------------------


def test_a_save_replaces_what_has_been_lost(path: Path, table: gear.Table) -> None:
    (path / "segments" / "000001" / "step.npy").unlink()
    table.save(path)
    assert segments(path) == ["000002", "000003"]
    assert loaded(path) == contents(table)
    os.truncate(path / "segments" / "000002" / "step.npy", 4096)
    flip(path / "index.000003.safetensors", 50)
    table.save(path)
    assert segments(path) == ["000004"]
    assert loaded(path) == contents(table)


def test_directories_that_are_something_else(tmp_path: Path, table: gear.Table) -> None:
    for name in ("notes.txt", "segments", "index.000001.safetensors"):
        folder = tmp_path / f"with {name}"
        folder.mkdir()
        (folder / name).write_text("mine")
        with pytest.raises(CheckpointError) as caught:
            table.save(folder)
        assert str(caught.value) == (
            f"{folder} holds {name!r} and no manifest.json: it is no checkpoint, and nothing was written. "
            "Choose an empty directory or a new one."
        )
        assert [entry.name for entry in folder.iterdir()] == [name]
        assert (folder / name).read_text() == "mine"
    (tmp_path / "file").write_text("mine")
    for place in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(CheckpointError, match=r"Choose another path|Make the directory writable"):
            table.save(place)
    assert (tmp_path / "file").read_text() == "mine"


def test_foreign_files_beside_a_checkpoint_stay(path: Path, table: gear.Table) -> None:
    (path / "notes.txt").write_text("mine")
    (path / "segments" / "mine").mkdir()
    table.add(rows(7, 3))
    table.save(path)
    assert (path / "notes.txt").read_text() == "mine"
    assert (path / "segments" / "mine").is_dir()
    assert loaded(path) == contents(table)


def test_two_saves_at_once(path: Path, table: gear.Table) -> None:
    with open(path / ".gear-loader.lock", "rb+") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        before = files(path)
        with pytest.raises(
            CheckpointError, match=r"gear-loader\.lock is locked: another save into this directory"
        ):
            table.save(path)
        assert files(path) == before
        assert loaded_numbers(path) == list(range(7)), "loading needs no lock"
    table.save(path)


# A full disk -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("call", "number"),
    [
        ("write", errno.ENOSPC),
        ("fsync", errno.EIO),
        *(
            pytest.param(call, number, marks=pytest.mark.long)
            for call, number in [("write", errno.EDQUOT), ("write", errno.EROFS), ("fsync", errno.ENOSPC)]
        ),
    ],
)
def test_a_disk_that_is_full_or_fails(
    path: Path, table: gear.Table, monkeypatch: pytest.MonkeyPatch, number: int, call: str
) -> None:
    table.add(rows(7, 20))
    before = files(path)
    genuine = getattr(os, call)
    after = 0
    while True:
        left = after

        def fail(fd: int, *args: Any) -> Any:
            nonlocal left
            if os.readlink(f"/proc/self/fd/{fd}").startswith(str(path)):
                left -= 1
                if left < 0:
                    raise OSError(number, os.strerror(number))
            return genuine(fd, *args)

        monkeypatch.setattr(os, call, fail)
        message = None
        try:
            table.save(path)
        except CheckpointError as error:
            message = str(error)
        monkeypatch.setattr(os, call, genuine)
        if message is None:
            break
        remedy = (
            "Free some space" if number in (errno.ENOSPC, errno.EDQUOT) else "Make the directory writable"
        )
        assert re.search(
            rf"^{re.escape(str(path))}.* cannot be written: {os.strerror(number)}\. .*{remedy}", message
        )
        expected = [list(range(7)), list(range(8))]
        assert loaded_numbers(path) in expected
        if loaded_numbers(path) == list(range(7)) and not (path / "manifest.json.part").exists():
            assert files(path) == before, "and nothing of it is left"
        after += 1
    assert after >= (7 if call == "write" else 9)
    assert loaded(path) == contents(table)


def test_a_write_that_is_cut_short(path: Path, table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    """A system may write less than it was asked to; that is no error."""
    genuine = os.write
    monkeypatch.setattr(os, "write", lambda fd, view: genuine(fd, bytes(view[: 1 + len(view) // 2])))
    table.add(rows(7, 200))
    table.save(path)
    monkeypatch.undo()
    assert loaded(path) == contents(table)


def test_file_systems_without_direct_access(
    path: Path, table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine, genuine_write = os.open, os.write

    def open_file(name: Any, flags: int, *args: Any, **options: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, "no direct access")
        return genuine(name, flags, *args, **options)

    monkeypatch.setattr(os, "open", open_file)
    table.add(rows(7, 200))
    table.save(path)
    assert loaded(path) == contents(table)
    monkeypatch.undo()

    def write(fd: int, data: Any) -> int:
        if fcntl.fcntl(fd, fcntl.F_GETFL) & os.O_DIRECT:
            raise OSError(errno.EINVAL, "larger sectors")
        return genuine_write(fd, data)

    monkeypatch.setattr(os, "write", write)
    table.add(rows(8, 10))
    table.save(path)
    monkeypatch.undo()
    assert loaded(path) == contents(table)


@pytest.fixture
def tiny_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    done = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "none", str(folder)], capture_output=True
    )
    if done.returncode:
        pytest.skip(f"cannot mount a small file system here: {done.stderr.decode().strip()}")
    yield folder
    subprocess.run(["umount", str(folder)], check=True)


def test_a_disk_that_is_really_full(tiny_disk: Path) -> None:
    with make(max_steps=100_000) as table:
        for number in range(5):
            table.add(rows(number, 50))
        table.save(tiny_disk / "ck")
        table.add(rows(5, 20_000))
        for _ in range(2):
            with pytest.raises(CheckpointError, match="No space left on device"):
                table.save(tiny_disk / "ck")
            assert loaded_numbers(tiny_disk / "ck") == list(range(5))
            assert segments(tiny_disk / "ck") == ["000001"], "nothing of it takes room"
        table.remove(int(table.indices()[-1]))
        table.add(rows(6, 50))
        table.save(tiny_disk / "ck")
        assert loaded_numbers(tiny_disk / "ck") == [0, 1, 2, 3, 4, 6]


def test_readers_go_on_after_a_failed_save(
    path: Path, table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No ticket is left: else nothing that is evicted could ever be used again."""
    for hold in (0, 1 << 30):
        monkeypatch.setattr(saving, "HOLD_BYTES", hold)
        monkeypatch.setattr(files_module, "_write_piece", _fail)
        table.add(rows(7, 20))
        with pytest.raises(CheckpointError):
            table.save(path)
        assert not table.region.array("readers")[:, 2].any()
    table.remove(table.indices())
    table.add(rows(8, 400))


def _fail(*args: Any) -> None:
    raise OSError(errno.EIO, "Input/output error")


def test_the_error_is_what_callers_expect() -> None:
    assert issubclass(CheckpointError, GearError)
    assert issubclass(CheckpointError, OSError)
