"""Batches that are drawn and gathered in one call, under the lock or a read ticket: the same as in steps, and safe."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from dataset_common import copies, episode, make_table, named_table, prefetch_threads
from options_common import nested
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import CorruptTableError, GearError
from gear_loader.native import threads
from gear_loader.storage import inline
from gear_loader.storage.counters import NUM_SAMPLED
from gear_loader.storage.operations.view import READING
from gear_loader.storage.reader import TableReader

N_STEP = {
    "reward": gear.Window(2, -1),
    "target": gear.NStep("reward", 3, 0.9, "reward", ("observation", "action")),
}
SAMPLERS: dict[str, dict[str, Any]] = {
    "trajectories": {"sampler": gear.Uniform()},
    "first steps": {"sampler": gear.Uniform(), "anchor": "first"},
    "steps": {"sampler": gear.Uniform(unit="step")},
    "steps of a subset": {"sampler": gear.Uniform(unit="step"), "subset": lambda numbers: numbers % 3 > 0},
    "complete windows": {"sampler": gear.Uniform(), "complete": True},
    "by priority": {"sampler": gear.Prioritized(beta=gear.LinearSchedule(0.2, 1.0, batches=20))},
    "by priority, table": {"sampler": gear.Prioritized(normalize="table"), "anchor": "last"},
    "steps by priority": {"sampler": gear.Prioritized(unit="step", eps=0.1), "complete": True},
    "n-step returns": {"sampler": gear.Uniform(unit="step"), "windows": N_STEP},
    "n-step returns by priority": {"sampler": gear.Prioritized(), "windows": N_STEP},
    "packed": {"sampler": gear.Uniform(), "layout": "packed", "windows": gear.Whole()},
}
RAGGED: dict[str, dict[str, Any]] = {
    "single values": {"sampler": gear.Uniform(unit="step"), "windows": gear.Window(1, squeeze=True)},
    "windows by priority": {"sampler": gear.Prioritized(), "windows": gear.Window(3, -1)},
    "chosen steps": {"sampler": gear.Uniform(), "windows": gear.Window(at=[-2, 0, 1])},
    "packed": {
        "sampler": gear.Uniform(),
        "windows": gear.Whole(),
        "layout": "packed",
        "columns": ["x", "y", "n", "z"],
    },
    "packed windows": {"sampler": gear.Uniform(), "layout": "packed"},
}


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {"batch_size": 5, "windows": gear.Window(3, -1), "device": "cpu", "seed": 7}
    given |= {"prefetch": 0, "batches_per_epoch": math.inf}
    return gear.ReplayDataset(table, **nested({**given, **options}))


def run(table: gear.Table, **options: Any) -> tuple[list[Any], dict[str, Any], int]:
    """Batches, some of them after changes of the table and of priorities; the state afterwards; rows counted."""
    data = dataset(table, **options)
    batches, found = iter(data), []
    for turn in range(12):
        batch = next(batches)
        found += copies([batch, data.sample(), data.sample(3)])
        if turn % 3 == 2 and data.sampler.weighs:
            data.update_priority(batch, torch.arange(5.0))
        if turn % 4 == 3:
            table.add(episode(20 + turn, 6), priority=3.0)
    return found, data.state_dict(), table.stats().num_sampled


@pytest.fixture(params=["lock", "ticket", "ticket, and threads gather"])
def held(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """What the one call holds."""
    before = torch.get_num_threads()
    if request.param != "lock":
        monkeypatch.setattr(inline, "INLINE_BATCH_BYTES", -1)
    if "threads" in request.param:
        monkeypatch.setattr(threads, "_ALONE_BYTES", 0)
        monkeypatch.setattr(threads, "_CHUNK_BYTES", 64)
        torch.set_num_threads(3)
    yield str(request.param)
    torch.set_num_threads(before)


@pytest.mark.parametrize("name", SAMPLERS)
def test_it_is_the_batch_that_is_made_in_steps(name: str, held: str, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[bool] = []
    draw_inline = TableReader.draw_inline

    def counted(self: TableReader, *given: Any) -> bool:
        calls.append(draw_inline(self, *given))
        return calls[-1]

    share, shared = threads._share, list[int]()
    monkeypatch.setattr(TableReader, "draw_inline", counted)
    monkeypatch.setattr(threads, "_share", lambda *given: shared.append(1) or share(*given))
    sizes = {"max_steps": 400, "max_trajectories": 32}
    with make_table(**sizes) as table:
        at_once = run(table, **SAMPLERS[name])
    assert sum(calls) > 12
    assert (len(shared) > 12) == ("threads" in held)
    monkeypatch.setattr(TableReader, "draw_inline", lambda *_: False)
    with make_table(**sizes) as table:
        plain = run(table, **SAMPLERS[name])
    torch.testing.assert_close(at_once[0], plain[0], rtol=0, atol=0, equal_nan=True)
    states = [
        {key: part for key, part in state.items() if key != "config"} for state in (at_once[1], plain[1])
    ]
    torch.testing.assert_close(*states, rtol=0, atol=0)
    assert at_once[2] == plain[2] > 0


@pytest.mark.parametrize("name", RAGGED)
def test_values_of_any_length_come_in_the_same_call(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """But those of windows whose records do not follow one another."""
    calls, draw_inline = list[bool](), TableReader.draw_inline
    columns = {"x": gear.Column(torch.int16, (None,)), "y": gear.Column(torch.float32, (None, 2))}
    columns |= {"n": gear.Column(torch.int64), "z": gear.Column(torch.int8, (None,), per="trajectory")}

    def rows(seed: int) -> dict[str, Any]:
        sizes = torch.randint(0, 9, (2, 6), generator=torch.Generator().manual_seed(seed)).tolist()
        x = [torch.full((size,), seed, dtype=torch.int16) for size in sizes[0]]
        y, z = (
            [torch.full((size, 2), float(seed)) for size in sizes[1]],
            torch.full((seed,), 3, dtype=torch.int8),
        )
        length = 1 + seed % 6
        return {"x": x[:length], "y": y[:length], "n": torch.arange(length), "z": z}

    def counted(self: TableReader, *given: Any) -> bool:
        calls.append(at_once and draw_inline(self, *given))
        return calls[-1]

    monkeypatch.setattr(TableReader, "draw_inline", counted)
    found: list[list[Any]] = []
    for at_once in (True, False):
        with gear.Table.create(
            columns, max_steps=200, max_trajectories=20, memory=gear.Memory(payload="64KiB")
        ) as table:
            table.extend([rows(seed) for seed in range(12)])
            data, made = dataset(table, **RAGGED[name]), list[Any]()
            for turn in range(8):
                batch = data.sample(3) if turn % 2 else data.sample()
                made += [(batch[key].values, batch[key].offsets, batch[key].shape) for key in "xyz"]
                made += [batch[key].clone() for key in batch if isinstance(batch[key], torch.Tensor)]
                if turn == 5:
                    table.add(rows(20))
            found.append(made)
            data.sample()
            if at_once:
                # Not after a change, nor while packed ones grow.
                assert (sum(calls) > 1) == (name != "chosen steps")
                assert not table._engine.region.array("readers")[:, READING].any()
                table._engine.region.column("x").view("int64")[:] = 1 << 40
                with pytest.raises(CorruptTableError, match="corrupt index"):
                    data.sample()
                assert not table._engine.region.array("readers")[:, READING].any()
                assert table._engine.region.array("counters")[NUM_SAMPLED] == 4 * 5 + 4 * 3 + 5
    torch.testing.assert_close(found[0], found[1], rtol=0, atol=0)


@pytest.mark.parametrize(
    ("options", "count"),
    [
        ({}, 0),
        ({"sampler": gear.Prioritized()}, 1),
        ({"subset": lambda numbers: numbers >= 0}, 1),
        ({"batch_size": 4096}, 1),
    ],
)
def test_small_batches_are_not_handed_over_by_a_thread(options: Any, count: int) -> None:
    """Which of them are drawn ahead at a request is the same."""
    others = prefetch_threads()  # of other tests, which end when their iterators are collected
    with make_table() as table:
        data = dataset(table, prefetch=2, **options)
        batches = iter(data)
        for turn in range(3):
            next(batches)
            wait_until(lambda turn=turn: table.stats().num_sampled == (turn + 3) * data.batch_size)
        assert len(set(prefetch_threads()) - set(others)) == count
        batches.close()  # type: ignore[attr-defined]
        assert data.state_dict()["step"] == 3


def test_it_leaves_no_ticket_and_no_lock(held: str) -> None:
    with named_table("test-inline") as table:
        batches = iter(dataset(table))
        for _ in range(3):
            next(batches)
        readers = table._engine.region.array("readers")
        known = readers.copy()
        next(batches)
        assert (readers == known).all() == (held == "lock")
        assert not readers[:, READING].any()
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                with gear.Table.attach(table.name or "", timeout=10.0) as other:
                    other._engine.region.lock.timeout = 10.0
                    status = 0 if other._engine.region.lock.run(int) == 0 else 1
            finally:
                os._exit(status)
        assert os.waitpid(pid, 0)[1] == 0


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Prioritized()])
@pytest.mark.usefixtures("held")
def test_a_corrupt_block_table_is_an_error_and_counts_nothing(sampler: Any) -> None:
    with make_table() as table:
        batches = iter(dataset(table, sampler=sampler))
        next(batches)
        next(batches)
        table._engine.region.array("block_ids")[:] = 1 << 30
        with pytest.raises(
            CorruptTableError, match="5 windows of a batch have slots or blocks that do not exist"
        ):
            next(batches)
        assert table._engine.region.array("counters")[NUM_SAMPLED] == 10


@pytest.mark.usefixtures("held")
def test_a_table_that_is_closed_in_between_is_an_error() -> None:
    table = make_table()
    batches = iter(dataset(table))
    next(batches)
    next(batches)
    table.close()
    with pytest.raises(GearError, match="closed"):
        next(batches)


def test_small_tensors_share_memory_by_dtype_and_can_be_saved(tmp_path: Path) -> None:
    with make_table() as table:
        batch = next(iter(dataset(table, sampler=gear.Prioritized())))
        storages = {
            value.dtype: {v.untyped_storage().data_ptr() for v in batch.values() if v.dtype == value.dtype}
            for value in batch.values()
        }
        assert all(len(addresses) == 1 for addresses in storages.values())
        assert len(set.union(*storages.values())) == len(storages)
        assert max(value.untyped_storage().nbytes() for value in batch.values()) <= 4096
        before = copies([batch])[0]
        torch.save(batch, tmp_path / "batch.pt")
        batch["reward"].fill_(-1)
        assert all(torch.equal(batch[key], before[key]) for key in batch if key != "reward")
        torch.testing.assert_close(dict(torch.load(tmp_path / "batch.pt")), dict(before), rtol=0, atol=0)
        kept = batch["index"]
        assert kept._base is None
