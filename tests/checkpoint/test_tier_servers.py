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
from tier_common import WINDOWS, fitting, promote, rows, spill, tiered

import gear_loader as gear
from gear_loader.checkpoint import saving
from gear_loader.collection.n_step import ReturnWindows
from gear_loader.collection.windows import _ONCE, expand, windows_of
from gear_loader.errors import LockTimeoutError, TransportError
from gear_loader.storage.disk_copies import copies_of
from gear_loader.storage.payload import PayloadReader
from gear_loader.transport.queries import SpanQuery, ValueQuery, WindowQuery
from gear_loader.transport.spec import PackedSpec, ValueSpec, WindowSpec
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
    with on_stand_in() if device else contextlib.nullcontext():
        check_replies(tmp_path, kind, packed, device)


def check_replies(tmp_path: Path, kind: str, packed: bool, device: Any) -> None:
    """A call of its own, which drops its tables while there is a stand-in."""
    names = [fresh_name(), fresh_name()]
    with (
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


def test_a_server_sends_values_by_their_steps(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever they lie by then; those of a damaged file are gone, and a step that has no such value is an error."""
    monkeypatch.setattr(saving, "MAX_SEGMENTS_BEHIND", 1)
    columns = {"number": gear.Column(torch.int64), "words": gear.Column(torch.int16, (None,))}
    known = {number: [np.arange(number + step, dtype=np.int16) for step in range(5)] for number in range(8)}
    looked_up, name = PayloadReader.records, fresh_name()
    with (
        tiered(tmp_path, columns, name=name, payload=30_000) as table,
        contextlib.ExitStack() as stack,
        contextlib.closing(TableCache([name], 1.0)) as tables,
    ):
        stack.callback(table.unlink)
        for number, words in known.items():
            table.add({"number": np.full(5, number), "words": words})
        table.save(tmp_path)
        slots, arrays = table.indices(), table._engine.index.arrays
        generations = arrays.generation[slots].copy()
        query = WindowQuery(WindowSpec(name, table.schema, {"words": gear.Window(2, -1)}), tables)
        anchors = np.arange(8) % 3
        sent = []
        for moves in (
            lambda: spill(table, slots[::2]),
            lambda: spill(table, slots),
            lambda: promote(table, 0),
        ):
            moves()
            found = reply(query, np.stack((slots, anchors, generations)), on_disk=True)
            sent.append(found[: 8 * 2 * 16].view(np.int64).reshape(8, 2, 2))
        assert all(np.array_equal(each, sent[0]) for each in sent), "records do not tell where values lie"
        assert not sent[0][anchors == 0, 0].any(), "padding"
        records = sent[0][:, 1]
        assert records.tolist() == [
            [step - (1 << 62) if number + step else 0, number + step]
            for number, step in enumerate(anchors.tolist())
        ]

        def asked(records: Any, gone: int = 0) -> Any:
            names = np.zeros((6, len(records)), dtype=np.int64)
            names[[0, 2, 3, 5]] = (
                slots[: len(records)],
                generations[: len(records)],
                records[:, 1],
                records[:, 1],
            )
            names[4] = records[:, 0]
            names[2, :gone] += 1
            return names

        spec = ValueSpec(name, table.schema, {"words": None})
        expected = np.concatenate([known[number][step] for number, step in enumerate(anchors.tolist())])
        size = spec.data_bytes(8, len(expected))

        def check(out: Any, served: Any) -> None:
            rows = np.repeat(served, records[:, 1])
            assert np.array_equal(out[: 2 * len(rows)].view(np.int16), np.where(rows, expected, 0))
            assert not out[2 * len(rows) : size].any()
            assert out[size : size + 8].tolist() == np.logical_not(served).tolist()

        values = ValueQuery(spec, tables)
        check(reply(values, asked(records, 3), on_disk=True), np.arange(8) >= 3)
        segments, turns = copies_of(arrays, slots)["segment"].copy(), []

        def records_of(reader: PayloadReader, *given: Any) -> Any:
            """The records, and then the values are written anew."""
            found = looked_up(reader, *given)
            turns.append(len(found))
            while len(turns) == 1 and (copies_of(arrays, slots)["segment"] == segments).any():
                table.add({"number": np.zeros(1, np.int64), "words": [np.zeros(1, np.int16)]})
                table.save(tmp_path)
            return found

        monkeypatch.setattr(PayloadReader, "records", records_of)
        check(reply(values, asked(records), on_disk=False), np.ones(8, dtype=bool))
        assert turns == [8, 8]
        for wrong in ((5 - (1 << 62), 3), (-1 - (1 << 62), 3), (5, 3), (2 - (1 << 62), 99), (-(1 << 63), 1)):
            with pytest.raises(TransportError, match="names a step that has none of so many rows"):
                reply(values, asked(np.array([wrong])), on_disk=False)
        for file in tmp_path.glob("segments/*/words%values.npy"):
            os.truncate(file, 100)
        spill(table, slots)
        with contextlib.closing(TableCache([name], 1.0)) as others:  # which has none of the files open
            out = reply(ValueQuery(spec, others), asked(records), on_disk=True)
        lost = ~np.isin(slots, table.indices())
        assert lost.any()
        check(out, ~lost)
