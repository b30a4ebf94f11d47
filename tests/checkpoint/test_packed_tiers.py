"""Packed batches of trajectories that lie on disk: they equal those of a table that fits, bit for bit."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from options_common import nested
from table_common import fresh_name
from tier_common import fitting, rows, spill, tiered

import gear_loader as gear
from gear_loader.errors import LockTimeoutError
from gear_loader.storage.disk_copies import copies_of
from gear_loader.transport.queries import SpanQuery
from gear_loader.transport.spec import PackedSpec
from gear_loader.transport.table_cache import TableCache

ONCE = gear.Uniform(replacement=False)
WINDOWS = {
    "number": gear.Whole(),
    "again": gear.Whole(column="number", dtype=torch.float64, scale=0.5),
    "value": gear.Whole(dtype=torch.bfloat16),
    "wide": gear.Whole(),
    "flag": gear.Whole(),
    "task": None,
    "task_again": gear.Window(1, column="task"),
}
FINAL = {
    name: dataclasses.replace(window, final=True) if isinstance(window, gear.Whole) else window
    for name, window in WINDOWS.items()
}


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": WINDOWS, "layout": "packed", "device": "cpu", "seed": 5, "selector": ONCE,
        **({} if "max_steps" in options else {"batch_size": 5}),
    }  # fmt: skip
    return gear.ReplayDataset(table, **nested({**given, **options}))


def test_rows_are_counted_as_those_of_padded_batches_are(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=200) as table:
        for number in range(20):
            table.add(rows(number, 12))
        table.save(tmp_path)
        spill(table, range(8))
        before = table.stats()
        for _ in range(4):
            dataset(table).sample()
        after = table.stats()
        hits, misses = after.num_hits - before.num_hits, after.num_misses - before.num_misses
        assert hits + misses == 4 * 5
        assert misses > 0
        assert after.miss_bytes > before.miss_bytes


def test_damage_leaves_trajectories_out_of_their_batch(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=200) as table:
        for number in range(20):
            table.add(rows(number, 12))
        table.save(tmp_path)
        for number in range(20, 40):
            table.add(rows(number, 12))
        table.save(tmp_path)
        spill(table, range(40))
        segments = copies_of(table._engine.index.arrays, np.arange(40))["segment"]
        segment = int(segments[0])
        hit = np.flatnonzero(segments == segment).tolist()
        assert 0 < len(hit) < 40
        file = tmp_path / "segments" / f"{segment:06d}" / "wide.npy"
        flip(file, os.path.getsize(file) - 1)
        data = dataset(table, max_steps=60)
        numbers = [n for batch in data for n in batch["task"][:, 0].tolist()]
        assert sorted(numbers) == sorted(set(range(40)) - set(hit))
        assert data.stats()["gone"] == len(hit) == table.stats().num_lost


def reply(spec: PackedSpec, tables: TableCache, asked: Any, *, on_disk: bool) -> Any:
    """The bytes with which a server answers a request, int64 [4, n]."""
    opened = SpanQuery(spec, tables)
    size = opened.reply_bytes(asked)
    out = np.full(size + 128, 7, dtype=np.uint8)
    out = out[-out.ctypes.data % 128 :][:size]
    if on_disk:
        with pytest.raises(LockTimeoutError, match="Rows lie on disk only"):
            opened.read(opened.table(), asked, out, at_once=True)
    opened.read(opened.table(), asked, out, at_once=False)
    return out


@pytest.mark.parametrize("packed", [True, False])
def test_a_server_sends_spans_of_it(tmp_path: Path, packed: bool) -> None:
    """Replies equal those of a table that fits, and are not made in the event loop if rows lie on disk."""
    names = [fresh_name(), fresh_name()]
    columns = {"number": "number", "wide": "wide", "again": "number", "task": "task"}
    lengths = 1 + np.arange(30) * 7 % 23
    with (
        tiered(tmp_path, name=names[0], packed=packed) as table,
        fitting(name=names[1], packed=packed) as whole,
        contextlib.closing(TableCache(names, 1.0)) as tables,
    ):
        try:
            for number, length in enumerate(lengths.tolist()):
                assert table.add(rows(number, length)) == whole.add(rows(number, length))
            slots = table.indices()
            assert 0 < table._engine.num_spilled < 30
            firsts, generations = lengths // 3, table._engine.index.arrays.generation[slots].copy()
            counts = lengths - firsts - lengths % 2 * (lengths > 2)
            generations[3] += 1  # gone
            counts[5] += 2  # beyond its end
            asked = np.stack((slots, firsts, generations, counts))

            specs = [PackedSpec(name, table.schema, columns) for name in names]
            found, expected = (reply(spec, tables, asked, on_disk=spec is specs[0]) for spec in specs)
            assert found.tobytes() == expected.tobytes()
            for file in tmp_path.glob("segments/*/wide.npy"):
                os.truncate(file, 100)
            generations[3], counts[5] = generations[3] - 1, counts[5] - 2
            asked = np.stack((slots, firsts, generations, counts))
            with contextlib.closing(TableCache(names, 1.0)) as others:  # which has none of the files open
                out = reply(specs[0], others, asked, on_disk=True)
            lost, total = ~np.isin(slots, table.indices()), int(counts.sum())
            assert 0 < lost.sum() < 30
            begin = specs[0].data_bytes(30, total)
            assert (out[begin : begin + 30] == lost).all(), "those that cannot be read are gone"
            assert not out[: 8 * total].view(np.int64)[np.repeat(lost, counts)].any()
        finally:
            table.unlink()
            whole.unlink()
