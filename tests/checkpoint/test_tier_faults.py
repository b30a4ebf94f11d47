"""Disk tiers when something dies, breaks or is full."""

from __future__ import annotations

import contextlib
import errno
import logging
import multiprocessing
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from cases import points
from checkpoint_common import flip
from table_common import Died, bits, bury, mortal
from tier_common import NEVER, everything, final, rows, spill, tiered
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.checkpoint import behind, spilling, tier_reader
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.segments import CHECKSUMS_NAME
from gear_loader.errors import CheckpointError, TableFullError
from gear_loader.storage.counters import DISK_FULL
from gear_loader.storage.disk_copies import copies_of

CONTEXT = multiprocessing.get_context("forkserver")
PATIENCE = 60.0  # seconds for what takes milliseconds
STEP_BYTES = 8 + 12 + 1 + 136


def add(table: gear.Table, number: int, length: int = 8) -> int:
    return table.add(rows(number, length), final=final(number, length) if number % 2 else None)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 16, "windows": gear.Window(4), "device": "cpu", "prefetch": 0}
    return gear.ReplayDataset(table, **{**given, **options})


# Deaths ----------------------------------------------------------------------------------------------


def _blocks(table: gear.Table, slots: list[int]) -> tuple[np.ndarray, dict[str, bytes]]:
    """The blocks of trajectories, and what is in them."""
    ids = np.concatenate([table._engine.index.arrays.row(slot) for slot in slots])
    return ids, {name: table._engine.region.column(name)[ids].tobytes() for name in table.schema}


@pytest.mark.parametrize(("what", "reads"), [("spill", True), ("promote", False)])
@points(7)
def test_a_death_at_every_store(tmp_path: Path, what: str, reads: bool, every: int) -> None:
    with tiered(tmp_path) as table:
        slots = [add(table, number) for number in range(4)]
        table.save(tmp_path)
        before = everything(table)
        for stores in range(0, 1000, every):
            if what == "promote":
                spill(table, slots[:3])
            ticket = table._engine.reader().begin_read() if reads else None
            ids, held = _blocks(table, slots[:3]) if what == "spill" else (np.zeros(0, dtype=int), {})
            done = False
            with mortal(table, stores) as index, contextlib.suppress(Died):
                if what == "spill":
                    index.spill(np.array(slots[:3]), table._engine.index.arrays.generation[slots[:3]].copy())
                else:
                    for slot in slots[:3]:
                        index.promote(
                            slot,
                            int(table._engine.index.arrays.generation[slot]),
                            (8, slot % 2, 0),
                            lambda _: None,
                        )
                done = True
            if what == "promote":  # the index alone is looked at: nothing was copied
                bury(table)
                table.check_valid()
                spill(table, slots)
            bury(table)
            assert everything(table) == before
            if ticket is not None:
                extra = add(table, 9, 20)
                for name, data in held.items():
                    assert table._engine.region.column(name)[ids].tobytes() == data, (
                        "a reader's block was reused"
                    )
                table.remove(extra)
                ticket.end()
            table._engine.index.recovery.locked(
                lambda: table._engine.index.arrays.ops.reclaim(table._engine.index.arrays.where)
            )
            assert everything(table) == before
            spilling.promote(table._engine, np.array(slots))
            assert table._engine.num_spilled == 0
            assert everything(table) == before
            if done:
                return
        pytest.fail("it never came to its end")


def _check_whole(table: gear.Table, slot: int) -> None:
    found = table[slot]
    number = int(found["number"][0])
    for name, values in rows(number, len(found["number"])).items():
        assert bits(found[name]) == np.ascontiguousarray(values).tobytes()


# Damage ----------------------------------------------------------------------------------------------


def _full(path: Path) -> gear.Table:
    table = tiered(path)
    for number in range(30):
        add(table, number)
    assert table._engine.num_spilled > 15
    return table


def test_damage_loses_the_trajectories_that_it_hits(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    with _full(tmp_path) as table:
        segments = copies_of(table._engine.index.arrays, table.indices())["segment"]
        spilled = table._engine.region.array("extent")[table.indices(), 1] < 0
        number = int(np.bincount(segments[spilled]).argmax())
        hit = spilled & (segments == number)
        file = tmp_path / "segments" / f"{number:06d}" / "wide.npy"
        flip(file, os.path.getsize(file) - 1)
        kept = table.ids(table.indices()[~hit]).tolist()
        lost = table.ids(table.indices()[hit]).tolist()
        with caplog.at_level(logging.ERROR, logger="gear_loader"):
            for batch in dataset(table, batches_per_epoch=40):
                assert len(batch["index"]) == 16
        assert table.ids(table.indices()).tolist() == kept
        assert table.stats().num_lost == len(lost)
        message = caplog.records[0].getMessage()
        assert f"{file} is damaged" in message
        assert any(f"Trajectory {each} cannot be read" in message for each in lost)
        add(table, 50)
        table.check_valid()


@pytest.mark.parametrize("damage", ["unreadable", "missing", "checksums", "no checksums"])
def test_a_disk_that_fails(tmp_path: Path, damage: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with _full(tmp_path) as table:
        if damage == "unreadable":

            def fail(*_: Any) -> int:
                raise OSError(errno.EIO, os.strerror(errno.EIO))

            monkeypatch.setattr(tier_reader.ColumnFile, "read", fail)
            monkeypatch.setattr(tier_reader.file_reads, "read_pieces", lambda reads, done, cached: None)
        for folder in (tmp_path / "segments").iterdir():
            if damage == "missing":
                shutil.rmtree(folder)
            elif damage == "checksums":
                flip(folder / "checksums.xxh3", 3)
            elif damage == "no checksums":
                (folder / "checksums.xxh3").unlink()
        inside = len(table) - table._engine.num_spilled
        for _ in dataset(table, batches_per_epoch=20):
            pass
        assert len(table) == inside
        assert table.stats().num_lost == 30 - inside


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, "wide.npy"])
def test_an_unreadable_file_loses_the_rows_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Directory.open_file

    def unreadable(self: Directory, asked: str) -> Any:
        if asked == name:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return genuine(self, asked)

    with tiered(tmp_path) as table:
        slots = [add(table, number) for number in range(4)]
        table.save(tmp_path)
        spill(table, slots[:3])
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "open_file", unreadable)
            assert set(dataset(table).sample()["index"].tolist()) == {slots[3]}
        assert len(table) == 1
        add(table, 9)
        table.save(tmp_path)
        assert table.stats().disk.error is None  # type: ignore[union-attr]


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, "wide.npy"])
def test_a_damaged_file_loses_the_rows_beside_it(name: str, tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        for number in range(18):
            add(table, number)
            if number in (3, 17):
                table.save(tmp_path)
    flip(tmp_path / "segments" / "000001" / name, -3)
    with gear.Table.recover(gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB", keep="newest")) as table:
        assert len(table) == 18
        for index in table.indices().tolist():
            try:
                _check_whole(table, index)
            except gear.errors.GearError:
                assert index < 4


def test_errors_that_may_pass_lose_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tier_reader, "_LOOK_SECONDS", 0.0)
    with _full(tmp_path) as table:
        before = everything(table)

        def fail(*_: Any) -> int:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE))

        with monkeypatch.context() as patch:
            patch.setattr(tier_reader.ColumnFile, "read", fail)
            patch.setattr(tier_reader.file_reads, "read_pieces", lambda reads, done, cached: None)
            with pytest.raises(CheckpointError, match=r"Too many open files.*stay in it"):
                list(dataset(table, batches_per_epoch=20))
        assert everything(table) == before
        os.rename(tmp_path, tmp_path.with_name("elsewhere"))
        try:
            with pytest.raises(CheckpointError, match="this process must be able to read them"):
                list(dataset(table, batches_per_epoch=20))
        finally:
            os.rename(tmp_path.with_name("elsewhere"), tmp_path)
        assert everything(table) == before


def test_damage_is_met_while_files_are_rewritten(tmp_path: Path) -> None:
    with _full(tmp_path) as table:
        for folder in (tmp_path / "segments").iterdir():
            flip(folder / "wide.npy", os.path.getsize(folder / "wide.npy") - 1)
        inside = table.indices()[table._engine.region.array("extent")[table.indices(), 1] >= 0].tolist()
        for slot in table.indices().tolist():
            if slot not in inside and slot % 4:
                table.remove(slot)
        for _ in range(3):
            add(table, 99, 1)
            table.save(tmp_path)
        table.check_valid()
        assert table.stats().num_lost >= 1
        for slot in inside:
            if table._engine.region.array("extent")[slot, 1] >= 0:
                _check_whole(table, slot)


# Full disks ------------------------------------------------------------------------------------------


def _fill(table: gear.Table, count: int) -> None:
    for number in range(count):
        add(table, number)


def test_a_full_disk_is_an_error_that_names_both_limits(tmp_path: Path) -> None:
    with tiered(tmp_path, size=40_000) as table:
        with pytest.raises(
            TableFullError, match=r"memory is full, and so is the disk: .* at most 40,000 bytes"
        ):
            _fill(table, 60)
        count = len(table)
        assert 40_000 // STEP_BYTES >= table._engine.num_spilled * 8 > 0
        before = everything(table)
        stats = table.stats().disk
        assert stats is not None
        assert "expected at most 40,000 (Disk.size)" in str(stats.error)
        table.remove(table.indices()[:10])
        wait_until(lambda: not table._engine.index.arrays.counters[DISK_FULL])
        _fill(table, 5)
        assert len(table) == count - 5
        assert everything(table)[: count - 10] == before[10:]
        table.remove(table.indices()[:10])  # so that the rest can be written


@pytest.mark.parametrize("policy", ["evict_oldest", "evict_lowest_priority"])
def test_a_full_disk_evicts_by_the_policy_of_the_table(tmp_path: Path, policy: Any) -> None:
    with tiered(tmp_path, size=40_000, on_full=policy) as table:
        for number in range(150):
            table.add(rows(number, 8), priority=float(number * 7 % 150))
        table.save(tmp_path)  # from here on nothing is evicted
        table.check_valid()
        stats = table.stats()
        assert stats.num_evicted > 50
        assert 0 < table._engine.num_spilled < len(table) < 60
        size = sum(file.stat().st_size for file in tmp_path.rglob("*.npy"))
        assert size < 4 * 40_000 + 5 * 4096 * 3 * len(list((tmp_path / "segments").iterdir()))
        numbers = [int(table[slot]["number"][0]) for slot in table.indices().tolist()]
        if policy == "evict_oldest":
            assert numbers == list(range(150 - len(numbers), 150))


@pytest.fixture(autouse=True)
def _no_writer_is_left() -> Iterator[None]:
    yield
    assert not behind._writers
