"""Rows of a table with a disk tier as servers send them, and packed batches of damaged files."""

from __future__ import annotations

import contextlib
import gc
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from checkpoint_common import flip
from options_common import nested
from streams.cuda import Cuda
from table_common import fresh_name
from tier_common import WINDOWS, fitting, rows, spill, tiered

import gear_loader as gear
from gear_loader.collection.n_step import ReturnWindows
from gear_loader.collection.windows import _ONCE, expand, windows_of
from gear_loader.errors import LockTimeoutError
from gear_loader.storage.disk_copies import copies_of
from gear_loader.transport.queries import SpanQuery, WindowQuery
from gear_loader.transport.spec import PackedSpec, WindowSpec
from gear_loader.transport.table_cache import TableCache

COUNT = 30
LENGTHS = 1 + np.arange(COUNT) * 7 % 23


@contextlib.contextmanager
def on_stand_in() -> Iterator[None]:
    cuda = Cuda(0, "random")
    with cuda.installed(), cuda.disks_in_turn(), cuda.serving_blocks():
        yield
        gc.collect()  # what is dropped waits for the device
    cuda.check()


def reply(query: Any, asked: Any, *, on_disk: bool) -> Any:
    """The bytes with which a server answers a request, int64 [3 or 4, n]."""
    size = query.reply_bytes(asked)
    out = np.full(size + 128, 7, dtype=np.uint8)
    out = out[-out.ctypes.data % 128 :][:size]
    if on_disk:
        # ... or the thread that moves trajectories to disk has the lock.
        with pytest.raises(LockTimeoutError, match=r"Rows lie on disk only|has held the lock"):
            query.read(query.table(), asked, out, at_once=True)
    query.read(query.table(), asked, out, at_once=False)
    return out


@pytest.mark.parametrize("packed", [True, False])
@pytest.mark.parametrize("kind", ["windows", "spans", "returns"])
@pytest.mark.parametrize("device", [None, torch.device("cuda", 1)])
def test_a_server_sends_rows_of_it(tmp_path: Path, kind: str, packed: bool, device: Any) -> None:
    """Replies equal those of a table that fits, and are not made in the event loop if rows lie on disk, or on a GPU."""
    if device is not None and torch.cuda.is_available():
        pytest.skip("there is a real torch.cuda")
    names = [fresh_name(), fresh_name()]
    with (
        on_stand_in() if device else contextlib.nullcontext(),
        tiered(tmp_path, name=names[0], packed=packed, device=device) as table,
        fitting(name=names[1], packed=packed) as whole,
        contextlib.closing(TableCache(names, 1.0)) as tables,
    ):
        try:
            for number, length in enumerate(LENGTHS.tolist()):
                assert table.add(rows(number, length)) == whole.add(rows(number, length))
            slots = table.indices()
            assert 0 < table._engine.num_spilled < COUNT
            generations = table._engine.index.arrays.generation[slots].copy()
            generations[3] += 1  # gone
            columns = {"wide": "wide", "number": "number", "again": "number", "task": "task"}
            if kind == "windows":
                names_of = windows_of(table.schema, {**WINDOWS, "task": None}, None)
                windows: Any = {**WINDOWS, "task": expand(table.schema, names_of)[0]["task"]}
                specs: list[Any] = [WindowSpec(name, table.schema, windows) for name in names]
                asked = np.stack((slots, np.arange(COUNT) % 3, generations))
                query, data_bytes = WindowQuery, specs[0].data_bytes(COUNT)
                first = COUNT * specs[0].pieces(COUNT)[0].row_bytes
            elif kind == "returns":
                again = {"next": gear.Window(1, column="wide"), "value": gear.Window(1)}
                windows = {"number": gear.Window(3), "flag": gear.Window(3), **again, "task": _ONCE}
                returns = [ReturnWindows("number", "flag", 0.5, ("next", "value"))]
                specs = [WindowSpec(name, table.schema, windows, returns) for name in names]
                asked = np.stack((slots, np.arange(COUNT) % 3, generations))
                query, data_bytes = WindowQuery, specs[0].data_bytes(COUNT)
                first = COUNT * specs[0].pieces(COUNT)[0].row_bytes
            else:
                specs = [PackedSpec(name, table.schema, columns) for name in names]
                counts = LENGTHS - LENGTHS // 3 - LENGTHS % 2 * (LENGTHS > 2)
                asked = np.stack((slots, LENGTHS // 3, generations, counts))
                query, data_bytes = SpanQuery, specs[0].data_bytes(COUNT, int(counts.sum()))
                first = 17 * 8 * int(counts.sum())
                asked[3, 5] += 2  # beyond its end
            found, expected = (reply(query(spec, tables), asked, on_disk=spec is specs[0]) for spec in specs)
            assert found.tobytes() == expected.tobytes()
            for file in tmp_path.glob("segments/*/wide.npy"):
                os.truncate(file, 100)
            asked[2, 3] -= 1
            if kind == "spans":
                asked[3, 5] -= 2
            with contextlib.closing(TableCache(names, 1.0)) as others:  # which has none of the files open
                out = reply(query(specs[0], others), asked, on_disk=True)
            lost = ~np.isin(slots, table.indices())
            assert 0 < lost.sum() < COUNT
            assert (out[data_bytes : data_bytes + COUNT] == lost).all(), "those that cannot be read are gone"
            each = np.repeat(lost, first // COUNT) if kind != "spans" else np.repeat(lost, 17 * 8 * counts)
            assert not out[:first][each].any(), "old contents of the buffer"
        finally:
            table.unlink()
            whole.unlink()


def test_damage_leaves_trajectories_out_of_their_batch(tmp_path: Path) -> None:
    with tiered(tmp_path, blocks=200) as table:
        for number in range(40):
            table.add(rows(number, 12))
            if number % 20 == 19:
                table.save(tmp_path)
        spill(table, range(40))
        segments = copies_of(table._engine.index.arrays, np.arange(40))["segment"]
        hit = np.flatnonzero(segments == segments[0]).tolist()
        assert 0 < len(hit) < 40
        file = tmp_path / "segments" / f"{int(segments[0]):06d}" / "wide.npy"
        flip(file, os.path.getsize(file) - 1)
        options = {"windows": gear.Whole(), "layout": "packed", "device": "cpu", "max_steps": 60}
        data = gear.ReplayDataset(table, **nested({**options, "sampler": gear.Uniform(replacement=False)}))
        numbers = [n for batch in data for n in batch["task"][:, 0].tolist()]
        assert sorted(numbers) == sorted(set(range(40)) - set(hit))
        assert data.stats()["gone"] == len(hit) == table.stats().num_lost
