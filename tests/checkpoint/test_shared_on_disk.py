"""What trajectories share is written once, referred to from later segments, and shared again when it is read."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash
from checkpoint_common import contents, flip
from lost_writes import PowerCuts
from test_checkpoint_damage import rewrite
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.checkpoint import rows as rows_module
from gear_loader.checkpoint import saving
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.index import read_records
from gear_loader.checkpoint.manifest import read_manifest
from gear_loader.checkpoint.trajectory_records import SHARING
from gear_loader.errors import CheckpointError
from gear_loader.storage import disk_records
from gear_loader.storage.disk import LostRowsError

COLUMNS = {
    "token": gear.Column(torch.int64),
    "hidden": gear.Column(torch.float32, (3,)),
    "reward": gear.Column(torch.float32, per="trajectory"),
    "images": gear.Column(torch.uint8, (None, 5), per="group"),
    "text": gear.Column(str, per="group"),
}
STEPS = {"token": COLUMNS["token"], "hidden": gear.Column(torch.float32, (3,), final=True)}
RECORDED = Path(__file__).parent.parent / "data" / "prefixes_version_5"
SIZES: dict[str, Any] = {"max_steps": 4000, "max_trajectories": 60, "block_steps": 4}


def add(table: gear.Table, number: int, length: int, *, group: int | None = None, **options: Any) -> int:
    """Add trajectory `number`; with a group its values."""
    steps = np.arange(length) + 1000 * number
    rows: dict[str, Any] = {"token": steps, "hidden": (steps[:, None] + np.arange(3) / 4).astype(np.float32)}
    if group is not None:
        rows |= {"images": np.full((group % 3 + 1, 5), group, np.uint8), "text": f"prompt {group} " * 9}
    if table.schema.finals:
        options["final"] = {"hidden": np.full(3, number, np.float32)}
    given = {
        name: value for name, value in (rows | {"reward": np.float32(number)}).items() if name in table.schema
    }
    return table.add(given, **options)


def make(columns: dict[str, gear.Column] = COLUMNS, **options: Any) -> gear.Table:
    payload = "64KiB" if any(column.ragged for column in columns.values()) else None
    memory = gear.Memory(payload=payload, max_blocks=options.pop("max_blocks", None), prefixes=True)
    return gear.Table.create(columns, memory=memory, **{**SIZES, **options})


def grouped(table: gear.Table, groups: range, size: int = 6, steps: int = 17) -> list[int]:
    """Add groups whose trajectories begin with steps of the first of each."""
    slots = []
    for group in groups:
        slots.append(add(table, 10 * group, 21, group=group))
        for i in range(1, size):
            slots.append(add(table, 10 * group + i, 2 + i, prefix=slots[-i], prefix_steps=steps))
    return slots


def payload(path: Path) -> int:
    """Bytes of all columns' files, without their headers."""
    return sum(file.stat().st_size - 4096 for file in path.glob("segments/*/*.npy"))


def records_at(path: Path) -> Any:
    with Directory.open(str(path)) as directory:
        return read_records(directory, read_manifest(directory))


def used(table: gear.Table) -> tuple[int, int]:
    """Blocks, and bytes of ragged values."""
    return table.stats().blocks_in_use, table.stats().value_resident_bytes


# ---------------------------------------------------------------- bytes

SIDE = 84
SHAPES: dict[str, tuple[dict[str, gear.Column], int, int, int, int]] = {
    "images": (
        {"token": STEPS["token"], "images": gear.Column(torch.uint8, (None, SIDE, SIDE, 3), per="group")},
        *(8, 8, 20, 0),
    ),
    "history": ({"token": STEPS["token"], "logprob": gear.Column(torch.float32)}, 16, 1500, 125, 1500),
}
"""Columns, trajectories of a group, steps of the first one before its new ones, new ones, and those in common: a
sixteenth of 2 images of 1,344 x 1,344 in groups of 8, and of 24,000 steps and 2,000 new ones in groups of 16."""


@pytest.mark.parametrize("name", SHAPES)
def test_shared_bytes_are_on_disk_once(name: str, tmp_path: Path) -> None:
    columns, size, history, new, common = SHAPES[name]
    images = {"images": np.random.default_rng(0).integers(0, 255, (2, SIDE, SIDE, 3), np.uint8)}

    def steps(count: int) -> dict[str, Any]:
        found = {"token": np.arange(count) + 7 * count, "logprob": np.arange(count, dtype=np.float32)}
        return {key: found[key] for key in found if key in columns}

    sizes: dict[str, Any] = {
        "max_steps": 2 * size * (history + new),
        "max_trajectories": 2 * size,
        "block_steps": 64,
    }
    memory = {
        key: gear.Memory(payload="8MiB" if "images" in columns else None, prefixes=key == "shared")
        for key in ("shared", "apart")
    }
    tables = {key: gear.Table.create(columns, memory=memory[key], **sizes) for key in memory}
    with tables["shared"] as shared, tables["apart"] as apart:
        more = images if "images" in columns else {}
        first = shared.add({**steps(history + new), **more})
        shared.extend([steps(new)] * (size - 1), prefix=first, prefix_steps=common)
        for slot in shared.indices().tolist():
            apart.add({**shared[slot]})
        for key, table in tables.items():
            table.save(tmp_path / key)
        assert payload(tmp_path / "apart") >= 7 * payload(tmp_path / "shared")
        with gear.Table.load(tmp_path / "shared") as loaded:
            assert used(loaded) == used(shared)
            assert contents(loaded) == contents(shared)
            windows = {name: None if columns[name].trajectory else gear.Whole() for name in columns}
            options: Any = {"windows": windows, "layout": "packed", "device": "cpu"}
            batches = [
                gear.ReplayDataset(table, batch_size=5, seed=1, **options).sample()
                for table in (loaded, apart)
            ]
        for key in columns:
            one, other = (
                each[key].values if isinstance(each[key], gear.Ragged) else each[key] for each in batches
            )
            assert torch.equal(one, other)


# ---------------------------------------------------------------- references


@pytest.mark.parametrize("columns", [COLUMNS, STEPS], ids=["groups", "steps"])
@pytest.mark.parametrize("tier", [False, True])
def test_later_segments_refer_to_earlier_ones(
    columns: dict[str, gear.Column], tier: bool, tmp_path: Path
) -> None:
    """Also when the first of a group has left, and when segments are rewritten."""
    disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB") if tier else None
    with make(columns, disk=disk, max_blocks=400) as table:
        slots = grouped(table, range(4))
        table.save(tmp_path)
        before = payload(tmp_path)
        for i in range(3):
            slots.append(add(table, 90 + i, 2, prefix=slots[1], prefix_steps=17))
            table.save(tmp_path)
        records = records_at(tmp_path)
        assert records.dtype == SHARING
        assert (records["begin_segment"][-3:] < records["segment"][-3:]).all()
        assert payload(tmp_path) - before < 3 * 17 * 8
        for gone in (slots[:4], slots[6:20], slots[20:24]):
            table.remove(gone)
            table.save(tmp_path)  # rewrites what is mostly dead
            expected = contents(table)
            with gear.Table.load(tmp_path) as loaded:
                assert contents(loaded)["contents"] == expected["contents"]
                assert tier or used(loaded)[0] <= used(table)[0]
            if tier:
                spill(table, table.indices())
                assert contents(table) == expected
        records = records_at(tmp_path)
        assert len(records) == 5
        assert len(np.unique(records["begin_first"][records["begin_rows"] > 0])) == 1
        if tier:
            table.close()
            with gear.Table.recover(gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB")) as again:
                assert contents(again)["contents"] == expected["contents"]
                add(again, 99, 2, prefix=int(again.indices()[0]), prefix_steps=17)
                again.check_valid()


def test_what_follows_a_growing_prefix(tmp_path: Path) -> None:
    """Turns of a conversation: each begins with all of the one before, and takes it from the first."""
    with make(STEPS) as table:
        slot, expected = add(table, 0, 40), list[int]()
        for turn in range(1, 5):
            slot = add(table, turn, 5, prefix=slot)
            expected.append(len(table[slot]["token"]))
        table.save(tmp_path)
        assert payload(tmp_path) < 2 * (60 + 4) * 20
        with gear.Table.load(tmp_path) as loaded:
            assert contents(loaded) == contents(table)
            assert loaded.lengths().tolist()[1:] == expected


def test_a_trajectory_that_leaves_before_it_is_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Those that were to have its steps and values are written once more, without it."""
    monkeypatch.setattr(saving, "HOLD_BYTES", 0)
    with make() as table:
        slots = grouped(table, range(3))
        genuine: Callable[..., Any] = rows_module.copy_out

        def leaving(*given: Any) -> None:
            if slots[0] in table.indices():
                table.remove([slots[0], slots[6]])
            genuine(*given)

        monkeypatch.setattr(rows_module, "copy_out", leaving)
        table.save(tmp_path)
        assert len(table) == 16
        with gear.Table.load(tmp_path) as loaded:
            assert contents(loaded)["contents"] == contents(table)["contents"]
            assert used(loaded) == used(table)


@pytest.mark.parametrize("names", [False, pytest.param(True, marks=pytest.mark.long)])
def test_a_power_cut_loses_what_was_not_synced(tmp_path: Path, names: bool) -> None:
    """After every call of the system, with members of groups in several segments, of which some are rewritten."""
    path = tmp_path / "disk"
    path.mkdir()
    cuts, states = PowerCuts(path, names=names), []
    with cuts.recording():
        table = make(disk=gear.Disk(path, sync_seconds=NEVER))
        states.append(contents(table))
        cuts.turn = 0
        for turn in range(1, 4):
            slots = grouped(table, range(turn, turn + 1), size=3)
            if turn > 1:
                add(table, 90 + turn, 2, prefix=int(table.indices()[-4]), prefix_steps=17)
                table.remove(table.indices()[:2])
            states.append(contents(table))
            table.save(path)
            cuts.turn = turn
        assert slots
        table.close()
    seen = set()
    for turn, copy in cuts.copies(tmp_path):
        try:
            with gear.Table.recover(gear.Disk(copy, sync_seconds=NEVER)) as found:
                place = states.index(contents(found))
        except CheckpointError:
            assert turn < 0, copy.name
            continue
        assert place in (turn, turn + 1), (copy.name, turn, place)
        seen.add(place)
    assert seen == set(range(4))


# ---------------------------------------------------------------- damage, and other versions


def test_damage_of_shared_values_loses_those_that_have_them(tmp_path: Path) -> None:
    disk = gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB")
    with make(disk=disk, max_blocks=400) as table:
        slots = grouped(table, range(3))
        table.save(tmp_path)
        late = add(table, 99, 3, prefix=slots[0], prefix_steps=17)
        table.save(tmp_path)
        spill(table, table.indices())
        flip(tmp_path / "segments/000001/images%values.npy", 4096)
        shutil.copytree(tmp_path, tmp_path / "copy")
        for slot in (slots[0], late):
            with pytest.raises(LostRowsError, match=r"images%values\.npy is damaged"):
                _ = table[slot]["images"]
    with pytest.raises(CheckpointError, match=r"images%values\.npy is damaged"):
        gear.Table.load(tmp_path / "copy")


@pytest.mark.parametrize(
    ("field", "value", "message"),
    [
        ("begin_rows", 23, "a number of shared steps is below 0, or as large as a trajectory"),
        ("begin_rows", -1, "a number of shared steps is below 0"),
        ("begin_first", 2**62, "what trajectories share lies outside of its segment"),
        ("begin_first", -1, "what trajectories share lies outside of its segment"),
        ("begin_segment", 9, "segment 9 does not exist"),
        ("group_place", 6, "what trajectories share lies outside of its segment"),
        ("group_segment", 9, "segment 9 does not exist"),
    ],
)
def test_records_that_refer_to_nothing(field: str, value: int, message: str, tmp_path: Path) -> None:
    with make() as table:
        grouped(table, range(1))
        table.save(tmp_path)
    (index,) = tmp_path.glob("index.*")
    records = np.fromfile(index, dtype=SHARING)
    records[field][1] = value
    records.tofile(index)
    found = {"bytes": index.stat().st_size, "xxh128": xxhash.xxh3_128_hexdigest(index.read_bytes())}
    rewrite(tmp_path, lambda fields: fields["index"].update(found))
    with pytest.raises(CheckpointError, match=message):
        gear.Table.load(tmp_path)


@pytest.mark.parametrize("size", [None, "1GiB"])
def test_a_table_that_version_5_wrote(size: str | None, tmp_path: Path) -> None:
    """There each trajectory has everything for itself; what is added later is shared on disk."""
    path = Path(shutil.copytree(RECORDED, tmp_path / "disk"))
    with gear.Table.recover(gear.Disk(path, sync_seconds=NEVER, size=size)) as table:
        for at, slot in enumerate(table.indices().tolist()):
            group, i = divmod(at, 4)
            tokens = 100 * group + np.arange(20)
            if i:
                tokens = np.concatenate((tokens[:17], np.arange(3) + 100 * group + 1000 * i))
            found = table[slot]
            assert found["token"].tolist() == tokens.tolist()
            assert (found["text"], float(found["reward"])) == (f"prompt {group} " * 20, 10 * group + i)
        new = {"token": np.arange(2), "reward": np.float32(0)}
        table.extend([new] * 2, prefix=int(table.indices()[0]), prefix_steps=9)
        table.save(path)
        expected = contents(table)["contents"]
    assert records_at(path)["begin_rows"].tolist() == [0] * 8 + [9] * 2
    with gear.Table.load(path) as loaded:
        assert contents(loaded)["contents"] == expected


def test_segments_that_the_records_of_values_cannot_tell_apart(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Records of values on disk have a few bits of a segment's number: what a trajectory has is not in two such."""
    monkeypatch.setattr(disk_records, "_SEGMENT_BITS", 1)
    columns = {"token": COLUMNS["token"], "words": gear.Column(torch.int16, (None,))}
    with make(columns, disk=gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB"), max_blocks=400) as table:
        words = [np.arange(5 * i, 9 * i, dtype=np.int16) for i in range(12)]
        slots = [table.add({"token": np.arange(12), "words": words})]
        for i in range(6):
            given = {"token": np.arange(2), "words": words[i : i + 2]}
            slots.append(table.add(given, prefix=slots[0], prefix_steps=9))
            table.save(tmp_path)
        expected = contents(table)
        records = records_at(tmp_path)
        shared = records["begin_rows"] > 0
        apart = (records["segment"] != records["begin_segment"])[shared]
        assert apart.sum() >= 4
        assert ((records["segment"] - records["begin_segment"])[shared][apart] % 2 == 1).all()
        assert spill(table, table.indices()) == 7
        assert contents(table) == expected
        table.remove(slots[0])
        table.save(tmp_path)
        assert contents(table)["contents"] == expected["contents"][1:]
    with gear.Table.load(tmp_path) as loaded:
        assert contents(loaded)["contents"] == expected["contents"][1:]
        assert loaded.stats().value_resident_bytes < 3 * sum(each.nbytes for each in words)


@pytest.mark.parametrize("columns", [COLUMNS, STEPS], ids=["groups", "steps"])
def test_the_size_of_a_disk_counts_what_is_shared_once(
    columns: dict[str, gear.Column], tmp_path: Path
) -> None:
    """A tier that would have room for half of the trajectories, if each had everything for itself."""
    size = 18_000 if columns is COLUMNS else 14_000
    disk = gear.Disk(tmp_path, sync_seconds=NEVER, size=size)
    with make(columns, disk=disk, max_blocks=400, on_full="evict_oldest") as table:
        grouped(table, range(6), size=9, steps=20)
        table.save(tmp_path)
        assert len(table) == 54
        assert payload(tmp_path) <= size < payload(tmp_path) + 20 * 20 * 48 // 2
        expected = contents(table)
        assert spill(table, table.indices()) == 54
        assert contents(table) == expected
