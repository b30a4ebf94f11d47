"""A damaged or unreadable file of checksums costs a disk tier the rows beside it, and nothing else."""

from __future__ import annotations

import errno
from pathlib import Path
from typing import Any

import pytest
from tier_common import NEVER, rows, spill, tiered

import gear_loader as gear
from gear_loader.checkpoint.directory import Directory
from gear_loader.checkpoint.segments import CHECKSUMS_NAME


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, "wide.npy"])
def test_a_damaged_file_loses_the_rows_beside_it(name: str, tmp_path: Path) -> None:
    with tiered(tmp_path) as table:
        for number in range(18):
            table.add(rows(number, 8))
            if number in (3, 17):
                table.save(tmp_path)
    file = tmp_path / "segments" / "000001" / name
    data = bytearray(file.read_bytes())
    data[-3] ^= 1
    file.write_bytes(data)
    with gear.Table.recover(gear.Disk(tmp_path, sync_seconds=NEVER, size="1GiB", keep="newest")) as table:
        assert len(table) == 18
        for index in table.indices():
            try:
                assert len(table[int(index)]["number"]) == 8
            except gear.errors.GearError:
                assert int(index) < 4


@pytest.mark.parametrize("name", [CHECKSUMS_NAME, "wide.npy"])
def test_an_unreadable_file_loses_the_rows_beside_it(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    genuine = Directory.open_file

    def unreadable(self: Directory, asked: str) -> Any:
        if asked == name:
            raise OSError(errno.EIO, "Input/output error")
        return genuine(self, asked)

    with tiered(tmp_path) as table:
        slots = [table.add(rows(number, 8)) for number in range(4)]
        table.save(tmp_path)
        spill(table, slots[:3])
        with monkeypatch.context() as patch:
            patch.setattr(Directory, "open_file", unreadable)
            data = gear.ReplayDataset(table, batch_size=16, windows=gear.Window(4), device="cpu", prefetch=0)
            assert set(data.sample()["index"].tolist()) == {slots[3]}
        assert len(table) == 1
        table.add(rows(9, 8))
        table.save(tmp_path)
        assert table.stats().disk.error is None
