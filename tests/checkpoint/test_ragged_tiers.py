"""Ragged values of trajectories that lie on disk: read there, brought back, written anew, lost with damaged files."""

from __future__ import annotations

import contextlib
import threading
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long, points
from checkpoint_common import flip
from table_common import RAGGED, Died, Fragile, bury, mortal, number_of, rows
from tier_common import NEVER, spill, tiered

import gear_loader as gear
from gear_loader.checkpoint import saving, spilling
from gear_loader.distributed import Shards
from gear_loader.errors import CheckpointError, LockTimeoutError, StaleIndexError, TableFullError
from gear_loader.storage.disk_records import MovedRowsError, on_disk, parts_of, rows_of
from gear_loader.storage.index_arrays import IndexArrays

WINDOWS = {"words": gear.Window(3, -1), "number": gear.Window(1, squeeze=True), "name": None}
CODED = {
    **RAGGED,
    "words": gear.Column(torch.int16, (None, 2), codec="zstd"),
    "check": gear.Column(torch.int64, codec="lz4"),
}


def make(path: Path, columns: Any = RAGGED, **options: Any) -> gear.Table:
    given: dict[str, Any] = {"payload": 12_000, "blocks": 60, "on_full": "evict_oldest", **options}
    return tiered(path, columns, **given)


def add(table: gear.Table, number: int) -> int:
    return table.add(rows(number, 1 + number % 13, ragged=True))


def add_after(table: gear.Table, slot: int, number: int, steps: int, generation: int | None = None) -> int:
    """The trajectory `number` again, whose first steps are those of the one in a slot."""
    again = rows(number, 1 + number % 13, ragged=True)
    rest = {name: value if name == "name" else value[steps:] for name, value in again.items()}
    return table.add(rest, prefix=slot, prefix_steps=steps, prefix_generation=generation)


def recovered(path: Path, **options: Any) -> gear.Table:
    return gear.Table.recover(gear.Disk(path, sync_seconds=NEVER, size="1GiB", keep="newest"), **options)


def numbers_of(table: gear.Table) -> list[int]:
    table.check_valid()
    return [number_of(table[int(slot)]) for slot in table.indices()]


def check_batch(batch: gear.Batch) -> None:
    for row, number in enumerate(batch["number"].tolist()):
        known, anchor = rows(number, 1 + number % 13, ragged=True), int(batch["anchor"][row])
        assert batch["name"][row] == known["name"]
        for place in range(3):
            step, found = anchor - 1 + place, batch["words"][row, place].numpy()
            inside = 0 <= step < len(known["words"])
            assert np.array_equal(found, known["words"][step] if inside else np.empty((0, 2)))


def check_packed(batch: gear.Batch) -> None:
    words = batch["words"].tolist()
    for begin, end in zip(batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist(), strict=True):
        known = rows(int(batch["number"][begin]), end - begin, ragged=True)
        assert all(np.array_equal(*pair) for pair in zip(words[begin:end], known["words"], strict=True))


def datasets(table: gear.Table) -> list[tuple[gear.ReplayDataset, Any]]:
    given: dict[str, Any] = {"device": "cpu", "prefetch": 0, "batch_size": 12}
    padded = gear.ReplayDataset(table, windows=WINDOWS, **given)
    packed = gear.ReplayDataset(table, windows=gear.Whole(), layout="packed", **given)
    return [(padded, check_batch), (packed, check_packed)]


@pytest.mark.parametrize(
    ("seed", "columns", "shares"),
    mostly_long(
        [
            *((i, RAGGED, False) for i in range(12)),
            (1, CODED, False),
            *((i, RAGGED, True) for i in range(2)),
        ],
        (0, RAGGED, False),
        sample=4,
    ),
)
def test_any_history_of_moves_between_memory_and_disk(
    tmp_path: Path, seed: int, columns: Any, shares: bool
) -> None:
    random, live, number = np.random.default_rng(seed), dict[int, int](), 0
    keep = ("newest", "oldest", "priority")[seed % 3]
    options = {"prefixes": True} if shares else {}
    with make(tmp_path / "disk", columns, **options, keep=keep, timeout=0.5 if seed % 2 else 20) as table:
        tickets, spilled = list[Any](), 0
        for _ in range(80):
            what, slots = random.random(), table.indices()
            spilled = max(spilled, table._engine.num_spilled)
            if what < 0.4 or not len(slots):
                with (
                    contextlib.suppress(TableFullError, LockTimeoutError)
                    if tickets
                    else contextlib.nullcontext()
                ):
                    slot = (
                        int(random.choice(slots)) if shares and random.random() < 0.7 and len(slots) else -1
                    )
                    if slot >= 0 and live[slot] % 13:
                        steps = int(random.integers(1, 1 + live[slot] % 13))
                        live[add_after(table, slot, live[slot], steps)] = live[slot]
                    else:
                        live[add(table, number)] = number
                number += 1
            elif what < 0.5:
                table.save(tmp_path / "disk")
            elif what < 0.6:
                spill(table, random.choice(slots, 4))
            elif what < 0.75:
                spilling.promote(table._engine, np.unique(random.choice(slots, 4)))
            elif what < 0.8:
                slot = int(random.choice(slots))
                table.remove(slot)
                del live[slot]
            elif what < 0.87 and seed % 2:
                tickets.append(table._engine.reader().begin_read())
            elif tickets:
                tickets.pop().end()
            live = {slot: live[slot] for slot in table.indices().tolist()}
            assert numbers_of(table) == list(live.values())
            if what > 0.7 and live:
                for dataset, check in datasets(table):
                    check(dataset.sample())
                index = random.choice(table.indices(), 6)
                check_batch(table.gather(index, np.zeros_like(index), windows=WINDOWS))
        assert spilled > 0
        for ticket in tickets:
            ticket.end()
        table.save(tmp_path / "copy")
        with gear.Table.load(tmp_path / "copy", payload="1MiB", max_blocks=400) as copy:
            assert numbers_of(copy) == list(live.values())
    with recovered(tmp_path / "disk") as table:
        assert numbers_of(table) == list(live.values())
        assert table._engine.num_spilled < len(table)
        for dataset, check in datasets(table):
            check(dataset.sample())
        for more in range(number, number + 40):
            add(table, more)
        assert numbers_of(table)[-40:] == list(range(number, number + 40))
    with gear.Table.recover(tmp_path / "disk", payload="1MiB", max_blocks=400) as table:
        assert table._engine.num_spilled == 0
        assert numbers_of(table)[-40:] == list(range(number, number + 40))


def test_shards_of_one_node_read_values_on_disk(tmp_path: Path) -> None:
    with make(tmp_path / "one") as one, make(tmp_path / "other") as other, Shards([one, other]) as shards:
        for shard, table in enumerate((one, other)):
            for number in range(40 * shard, 40 * shard + 12):
                add(table, number)
            table.save(tmp_path / ("other" if shard else "one"))
            spill(table, table.indices()[shard::2])
            assert table._engine.num_spilled > 3
        for turn in range(4):
            for dataset, check in datasets(shards):  # type: ignore[arg-type]
                check(dataset.sample())
            for table in (one, other):
                add(table, 100 + turn)


@pytest.mark.parametrize(("reads", "shares"), [(False, False), (True, True)])
@points(11)
def test_a_death_at_every_store_of_a_move(
    tmp_path: Path, reads: bool, shares: bool, every: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path, payload=8000, prefixes=shares) as table:
        slots = np.array([add(table, number) for number in (3, 4, 5, 6)])
        if shares:
            table.remove(slots[:2])
            slots[:2] = [add_after(table, slots[3], 6, steps) for steps in (5, 6)]
        before, region, done = numbers_of(table), table._engine.region, False
        genuine, stores = region.payload, 0
        while not done:
            table.save(tmp_path)
            spilling.promote(table._engine, slots, most_bytes=None)
            for what in ("spill", "promote"):
                ticket = table._engine.reader().begin_read() if reads and what == "spill" else None
                monkeypatch.setattr(region, "payload", lambda: genuine().view(Fragile))
                engine = gear.Table(region)._engine
                with mortal(table, stores) as index, contextlib.suppress(Died):
                    engine._index = index
                    if what == "spill":
                        index.spill(slots, table._engine.index.arrays.generation[slots].copy())
                    else:
                        spilling.promote(engine, slots, most_bytes=None)
                    done = what == "promote"
                monkeypatch.setattr(region, "payload", genuine)
                bury(table)
                assert numbers_of(table) == before
                extra = add(table, 7)  # takes what is free
                assert numbers_of(table) == [*before, 7]
                table.remove(extra)
                if ticket is not None:
                    ticket.end()
                spill(table, slots[2:])
                assert numbers_of(table) == before
            stores += every
    assert stores > 50


def test_damaged_values_lose_their_trajectories(tmp_path: Path) -> None:
    with make(tmp_path) as table:
        slots = [add(table, number) for number in (12, 25)]
        table.save(tmp_path)
        slots.append(add(table, 38))
        table.save(tmp_path)
        spill(table, slots)
        file = tmp_path / "segments" / "000001" / "words%values.npy"
        flip(file, file.stat().st_size - 1)
        with pytest.raises(
            CheckpointError, match=r"Trajectory \d+ cannot be read: .*words%values.npy is damaged"
        ):
            table[slots[1]]
        for dataset, check in datasets(table):
            check(dataset.sample())
        assert numbers_of(table) == [38]
        assert table.stats().num_lost == 2


@pytest.mark.parametrize("moves", ["spill", "promote"])
def test_records_that_are_looked_up_while_their_trajectory_moves(
    tmp_path: Path, moves: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with make(tmp_path) as table:
        slot, known = add(table, 25), rows(25, 13, ragged=True)["words"]
        table.save(tmp_path)
        if moves == "promote":
            spill(table, [slot])
        payload, ids_at = table._engine.payload, IndexArrays.ids_at
        given = table.schema.ragged["words"], np.full(13, slot), np.arange(13)
        ticket = table._engine.reader().begin_read()

        def moving(arrays: IndexArrays, places: Any) -> Any:
            with monkeypatch.context() as patch:
                patch.setattr(IndexArrays, "ids_at", ids_at)
                spill(table, [slot]) if moves == "spill" else spilling.promote(
                    table._engine, np.array([slot])
                )
                return ids_at(arrays, places)

        with monkeypatch.context() as patch:
            patch.setattr(IndexArrays, "ids_at", moving)
            with pytest.raises(MovedRowsError):
                payload.records(*given)
        records = payload.records(*given)
        assert ((records[:, 0] < 0) == (moves == "spill")).all()
        found = payload.read(given[0], records, (13,), slots=given[1])
        assert all(np.array_equal(*pair) for pair in zip(found.tolist(), known, strict=True))
        assert not payload.records(given[0], given[1][:2], np.array([-1, 13])).any()
        ticket.end()


def test_two_columns_that_were_made_as_one(tmp_path: Path) -> None:
    one = gear.Column(torch.uint8, (None,))
    columns = {"left": one, "right": one, "number": gear.Column(torch.int64)}
    with tiered(tmp_path, columns, payload=4_096) as table:
        values = {
            "left": [np.full(5, 1, np.uint8)],
            "right": [np.full(5, 2, np.uint8)],
            "number": np.zeros(1, np.int64),
        }
        slot = table.add(values)
        table.save(tmp_path)
        assert spill(table, [slot]) == 1
        for _ in range(2):  # on disk, and when it is back in memory
            found = table[slot]
            assert [found[name][0].tolist() for name in ("left", "right")] == [[1] * 5, [2] * 5]
            spilling.promote(table._engine, np.array([slot]))


@pytest.mark.long
def test_batches_beside_writers_while_all_is_moved_and_written_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(saving, "MAX_SEGMENTS_BEHIND", 3)
    stop, errors = threading.Event(), list[BaseException]()
    with make(tmp_path, max_trajectories=80, prefixes=True) as table:
        for number in range(80):
            add(table, number)

        def add_again() -> None:
            slot = int(table.indices()[other.integers(60)])
            generation = int(table._engine.index.arrays.generation[slot])
            with contextlib.suppress(StaleIndexError):
                number = int(table[slot]["number"][0])
                if number % 13 > 1:
                    add_after(table, slot, number, number % 13 // 2, generation)

        def run(act: Any) -> None:
            try:
                while not stop.is_set():
                    act()
            except BaseException as error:
                errors.append(error)

        random, other = np.random.default_rng(0), np.random.default_rng(1)
        acts = [
            lambda: add(table, int(random.integers(1 << 30))),
            add_again,
            lambda: (table.save(tmp_path), spill(table, table.indices()[::2])),
            lambda: (spilling.promote(table._engine, table.indices()), time.sleep(0.01)),
        ]
        threads = [threading.Thread(target=run, args=(act,)) for act in acts]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + 15
            while time.monotonic() < end and not errors:
                for dataset, check in datasets(table):
                    check(dataset.sample())
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not errors, errors[0]
        numbers_of(table)


def test_a_record_of_values_on_disk_keeps_everything() -> None:
    random = np.random.default_rng(0)
    largest = np.array([(1 << 44) - 1, 1 << 40])
    records = np.stack([random.integers(0, largest + 1) for _ in range(100)] + [largest, 0 * largest])
    slots, segments = random.integers(0, 1 << 31, 102), random.integers(1, 10**12, 102)
    coded = on_disk(records, slots, segments)
    assert (coded[:, 0] < 0).all()
    assert (coded[:, 1] >= 0).all()
    found = parts_of(coded)
    for part, expected in zip(found, (slots, segments % 1024, *records.T), strict=True):
        assert (part == expected).all()
    assert (rows_of(coded) == records[:, 1]).all()
