"""Columns whose values are overwritten, in tables that are written to a disk or lie there: every row is whole."""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from concurrency_common import Child, Voice
from lost_writes import PowerCuts
from mutable_common import SCHEMA, steps
from options_common import nested_table
from table_common import fresh_name
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.checkpoint import changes, files, saving
from gear_loader.collection.tier_rows import TierRows
from gear_loader.errors import CheckpointError, StaleIndexError, TableFullError
from gear_loader.storage import edit_log
from gear_loader.storage import reader as reader_module
from gear_loader.storage.disk_copies import are_current
from gear_loader.transport.queries import SpanQuery, WindowQuery
from gear_loader.transport.spec import PackedSpec, WindowSpec
from gear_loader.transport.table_cache import TableCache

LENGTH, COUNT = 11, 8
LATE = {**SCHEMA, "later": gear.Column(torch.float32, late=True, mutable=True)}


def disk_of(path: Path, *, tier: bool, seconds: float = NEVER) -> gear.Disk:
    return gear.Disk(path, sync_seconds=seconds, size="1GiB" if tier else None)


def make(
    path: Path,
    columns: Any = SCHEMA,
    *,
    tier: bool = True,
    blocks: int = 24,
    seconds: float = NEVER,
    **options: Any,
) -> gear.Table:
    sizes: dict[str, Any] = {"max_steps": 1_000, "max_trajectories": 30, "block_steps": 4, "timeout": 30.0}
    sizes |= {"max_blocks": blocks} if tier else {}
    disk = disk_of(path, tier=tier, seconds=seconds)
    return gear.Table.create(columns, **nested_table({**sizes, "disk": disk, **options}))


def overwrite(table: Any, number: int, slots: Any = range(COUNT)) -> None:
    """Overwrite whole trajectories by a number."""
    slots = np.asarray(slots)
    values = {name: np.stack([steps(LENGTH, number)[name]] * len(slots)) for name in ("state", "wide")}
    assert table.set(slots, np.zeros_like(slots), **values) == 0


def uniform(table: gear.Table) -> list[int]:
    """The number of each trajectory; fails if one has two."""
    table.check_valid()
    found = []
    for slot in table.indices().tolist():
        row = table[slot]
        both = torch.cat((row["state"], row["wide"].float()), -1)
        assert (both == both[0, 0]).all(), both[:, [0, 3]]
        assert (row["obs"] == torch.arange(len(both)) + row["obs"][0]).all()
        found.append(int(both[0, 0]))
    return found


def recovered(path: Path, *, tier: bool) -> list[int]:
    with gear.Table.recover(disk_of(path, tier=tier)) as table:
        return uniform(table)


# ---------------------------------------------------------------- against a dict of arrays


class History:
    """Random changes of a table and of what it should hold."""

    def __init__(self, table: gear.Table, path: Path, seed: int) -> None:
        self.table, self.path, self.random = table, path, np.random.default_rng(seed)
        self.model: dict[int, dict[str, Any]] = {}
        self.ages: dict[int, int] = {}
        self.sets = self.cold = self.number = 0
        self.late = bool(table.schema.late)  # whose trajectories do not grow
        self.writer = None if self.late else table.writers(1, commit_every_step=True)
        self.grown = -1

    def turn(self) -> None:
        random, table = self.random, self.table
        self.number += 1
        change = random.integers(8)
        if change < 2 and len(self.model) < 20:
            rows = steps(int(random.integers(1, 24)), self.number)
            slot = table.add(rows)
            self.model[slot] = rows
        elif change == 2 and self.writer is not None:
            self._grow(self.writer)
        elif change == 3 and len(self.model) > 4:
            slot = int(random.choice([each for each in self.model if each != self.grown]))
            table.remove(slot)
            del self.model[slot]
        elif change == 4:
            table.save(self.path)
            if table._engine.has_tier:
                spill(table, [slot for slot in self.model if random.random() < 0.6])
        elif change == 5 and self.late:
            late = [slot for slot, rows in self.model.items() if "later" not in rows and slot != self.grown]
            for slot in late[:2]:
                self.model[slot]["later"] = np.full(len(self.model[slot]["obs"]), self.number, np.float32)
                table.fill([slot], later=[self.model[slot]["later"]])
        elif self.model:
            self._set()

    def _grow(self, writer: Any) -> None:
        for _ in range(int(self.random.integers(1, 6))):
            row = steps(1, self.number)
            writer.append(row)
            if writer.num_steps[0] == 1:
                self.grown = int(self.table.indices()[-1])
                self.model[self.grown] = row
            else:
                before = self.model[self.grown]
                self.model[self.grown] = {name: np.concatenate((before[name], row[name])) for name in row}
        if self.random.random() < 0.3:
            self.end(writer)

    def end(self, writer: Any) -> None:
        writer.commit()
        self.grown = -1

    def _set(self) -> None:
        random = self.random
        slots = random.choice(np.array([*self.model]), int(random.integers(1, 6)))
        lengths = np.array([len(self.model[slot]["obs"]) for slot in slots.tolist()])
        anchors, window = random.integers(lengths), int(random.integers(1, 12))
        mask = (anchors[:, None] + np.arange(window) < lengths[:, None]) & (
            random.random((len(slots), window)) < 0.7
        )
        names = ["state", "wide"] if random.random() < 0.7 else ["wide"]
        names += ["later"] if all("later" in self.model[slot] for slot in slots.tolist()) else []
        values = {
            name: random.integers(0, 99, (len(slots), window, *LATE[name].shape)).astype(
                steps(1, 0).get(name, np.zeros(1, np.float32)).dtype
            )
            for name in names
        }
        self.cold += int((self.table._engine.index.arrays.extent[slots, 1] < 0).any())
        self.sets += 1
        assert self.table.set(slots, anchors, mask=mask, **values) == 0
        for row, slot in enumerate(slots.tolist()):
            where = anchors[row] + np.flatnonzero(mask[row])
            for name in names:
                self.model[slot][name][where] = values[name][row, mask[row]]

    def check(self, table: gear.Table, order: list[int] | None = None) -> None:
        """`order`: its trajectories in the order of the model's, where it has other indices."""
        table.check_valid()
        assert len(table) == len(self.model)
        windows: dict[str, Any] = dict.fromkeys(["obs", "image", "state", "wide"], gear.Whole())
        for name, rows in zip(order or [*self.model], self.model.values(), strict=True):
            for batch in (table[name], table.gather([name], windows=windows)):
                for column, values in rows.items():
                    if column in batch:
                        np.testing.assert_array_equal(np.asarray(batch[column]), values, err_msg=column)


@pytest.mark.parametrize("seed", mostly_long(range(12), 1, 2, sample=5))
def test_every_reader_and_recovery_have_the_last_values(
    tmp_path: Path, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path, windows = tmp_path / "disk", dict.fromkeys(["obs", "state", "wide"], gear.Window(5))
    tier = seed % 3 > 0
    with make(path, LATE if seed % 2 else SCHEMA, tier=tier, blocks=60) as table:
        history = History(table, path, seed)
        for turn in range(120):
            history.turn()
            if turn % 10 == 9:
                history.check(table)
                replay = gear.ReplayDataset(table, windows=windows, batch_size=12, device="cpu", prefetch=0)
                batch = replay.sample()
                for row, slot in enumerate(batch["index"].tolist()):
                    at, there = int(batch["anchor"][row]), batch["mask"]["obs"][row]
                    for name in ("obs", "state", "wide"):
                        expected = history.model[slot][name][at : at + 5]
                        np.testing.assert_array_equal(np.asarray(batch[name][row][there]), expected)
        assert history.sets > 10
        assert history.cold > 3 or not tier
        if history.grown >= 0:
            history.end(history.writer)
        table.save(path)
        ids = {slot: int(table.ids([slot])[0]) for slot in history.model}
    with gear.Table.recover(disk_of(path, tier=tier)) as table:
        slots = {
            int(each): slot
            for each, slot in zip(table.ids(table.indices()), table.indices().tolist(), strict=True)
        }
        history.check(table, [slots[ids[slot]] for slot in history.model])


# ---------------------------------------------------------------- while it is written


@pytest.mark.parametrize(
    ("tier", "stage"),
    mostly_long([(tier, size) for tier in (False, True) for size in (64 << 20, 3_000, 1)], (True, 3_000)),
)
def test_values_that_change_amid_a_write(
    tmp_path: Path, tier: bool, stage: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before each column is written all trajectories are overwritten, so no two columns are of one moment.

    The look without the lock finds all of them in the middle of it; on disk none is.
    """
    monkeypatch.setattr(saving, "STAGE_BYTES", stage)
    monkeypatch.setattr(os, "fsync", lambda fd: None)
    path, numbers = tmp_path / "disk", iter(range(1, 10_000))
    real, looked = files.ColumnWriter.write, changes._differing

    def differing(index: Any, on_disk: Any, among: Any) -> Any:
        slots, records = looked(index, on_disk, among)
        if among is None:
            records["filled"][records["sequence"] >= 0] |= index.arrays.edit_unit
        return slots, records

    monkeypatch.setattr(changes, "_differing", differing)

    def write(*given: Any) -> Any:
        overwrite(table, next(numbers))
        return real(*given)

    with make(path, tier=tier, blocks=40) as table:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
        monkeypatch.setattr(files.ColumnWriter, "write", write)
        for _ in range(4):
            before = next(numbers)
            overwrite(table, before)
            table.save(path)
            with gear.Table.load(path) as copy:
                found = uniform(copy)
                assert not (copy._engine.index.arrays.filled[:, 1] & 1).any()
            assert len(found) == COUNT
            assert min(found) >= before
            slots = np.arange(COUNT)
            arrays = table._engine.index.arrays
            assert not tier or not are_current(arrays, slots).any(), "all were overwritten again"
            assert not tier or spill(table, slots) == 0
        monkeypatch.setattr(files.ColumnWriter, "write", real)
        table.save(path)
        last = next(numbers) - 1
        assert recovered_copy(path, tmp_path) == [last] * COUNT
        if tier:
            assert spill(table, range(3)) == 3
            overwrite(table, last + 5, [1, 4])
            assert uniform(table) == [last + 5 if slot in (1, 4) else last for slot in range(COUNT)]


def recovered_copy(path: Path, where: Path) -> list[int]:
    copy = where / "copy"
    shutil.rmtree(copy, ignore_errors=True)
    shutil.copytree(path, copy)
    with gear.Table.load(copy) as table:
        return uniform(table)


@pytest.mark.parametrize("names", mostly_long([False, True], False))
def test_a_power_cut_leaves_whole_rows(tmp_path: Path, names: bool) -> None:
    """After every call of the system each row is of the last write that was told of, or later."""
    path = tmp_path / "disk"
    path.mkdir()
    cuts = PowerCuts(path, names=names)
    with cuts.recording():
        table = make(path, blocks=40)
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
        table.save(path)
        cuts.turn = 0
        for turn in range(1, 5):
            overwrite(table, turn, range(turn % 2, COUNT))
            table.save(path)
            spill(table, range(turn, COUNT))
            cuts.turn = turn
        table.close()
    seen = set()
    for turn, copy in cuts.copies(tmp_path):
        found: list[int] = []
        with contextlib.suppress(CheckpointError):
            found = recovered(copy, tier=True)
        states = [[each - each % 2] + [each] * (COUNT - 1) for each in range(5)]
        place = states.index(found) if found else -1
        assert place in (turn, turn + 1) or turn < 0, (copy.name, turn, found)
        seen.add(place)
    assert seen >= set(range(5))


@contextlib.contextmanager
def shared(path: Path, **options: Any) -> Iterator[gear.Table]:
    table = make(path, name=fresh_name(), **options)
    try:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
        table.save(path)
        yield table
    finally:
        with contextlib.suppress(CheckpointError):
            table.close()
        table.unlink()


def _die_amid(voice: Voice, name: str, whole: int) -> None:
    """Overwrite trajectories, of which some lie on disk, and die amid the copy of the second column."""
    real, calls = edit_log.write_runs, iter(range(9))

    def write_half(sources: Any, slots: Any, *given: Any) -> int:
        half = len(slots) if next(calls) < whole else len(slots) // 2
        bad = int(real(sources[:half], slots[:half], *(each[:half] for each in given[:2]), *given[2:]))
        if half < len(slots):
            os.kill(os.getpid(), signal.SIGKILL)
        return bad

    with gear.Table.attach(name) as table:
        edit_log.write_runs = write_half  # type: ignore[assignment]
        overwrite(table, 9)


@pytest.mark.parametrize(("whole", "spilled"), mostly_long([(0, 0), (0, 5), (1, 0), (1, 5)], (1, 5)))
def test_a_process_that_is_killed_amid_a_row(tmp_path: Path, whole: int, spilled: int) -> None:
    """What the owner writes next is whole; the killed call's first piece was sealed, so it counts."""
    path = tmp_path / "disk"
    with shared(path, blocks=40) as table:
        assert spill(table, range(spilled)) == spilled
        child = Child(_die_amid, table.name, whole)
        assert os.WTERMSIG(child.reap()) == signal.SIGKILL
        table.save(path)
        found = recovered_copy(path, tmp_path)
        assert found == [0] * spilled + [9] * (COUNT - spilled)
        assert uniform(table) == found
        overwrite(table, 11)
        table.save(path)
        assert recovered_copy(path, tmp_path) == [11] * COUNT


def _overwrite(voice: Voice, name: str, first: int) -> None:
    with gear.Table.attach(name, timeout=60.0) as table:
        voice.say()
        for number in itertools.count():
            overwrite(table, first + number % 1000, [number % COUNT, (3 * number + 1) % COUNT])


def _own(voice: Voice, path: str, name: str, spills: bool) -> None:
    """Recover the table, write it all the time, and move trajectories to disk."""
    saving.STAGE_BYTES = 4_000 if spills else 1
    random = np.random.default_rng(0)
    with gear.Table.recover(disk_of(Path(path), tier=True), name=name) as table:
        voice.say()
        while True:
            table.save(path)
            if spills:
                spill(table, random.permutation(COUNT)[:5])


@pytest.mark.long
@pytest.mark.parametrize("spills", [False, True])
def test_owners_and_others_that_are_killed_leave_whole_rows(tmp_path: Path, spills: bool) -> None:
    """They are killed in turns, at any moment; memory and disk are whole each time, and no older values come back."""
    path = tmp_path / "disk"
    with make(path, blocks=60) as table:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
    before = [0] * COUNT
    for turn in range(10):
        name = fresh_name()
        owner = Child(_own, str(path), name, spills)
        owner.hear()
        first = 1000 * (turn + 1)
        setters = [Child(_overwrite, name, first) for _ in range(2)]
        for each in setters:
            each.hear()
        with gear.Table.attach(name, timeout=60.0) as table:
            data = gear.ReplayDataset(
                table,
                windows=gear.Window(LENGTH),
                draws=gear.Draws(complete=True),
                batch_size=6,
                device="cpu",
                prefetch=0,
            )
            end = time.monotonic() + 0.3 + 0.02 * turn
            while time.monotonic() < end:
                batch = data.sample()
                both = torch.cat((batch["state"], batch["wide"].float()), -1)
                assert (both == both[:, :1, :1]).all()
            victims = [setters[0], owner, setters[1]] if turn % 2 else [owner, *setters]
            for each in victims:
                each.kill()
            uniform(table)
            table.unlink()
        found = recovered_copy(path, tmp_path)
        assert all(new == old or new >= first for old, new in zip(before, found, strict=True))
        before = found
    assert max(before) > 5_000


# ---------------------------------------------------------------- readers, room


def test_readers_of_rows_on_disk_that_are_overwritten_all_the_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each attempt without the lock finds a change; then it reads under the lock."""
    path = tmp_path / "disk"
    with make(path, blocks=60) as table:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
        table.save(path)
        spill(table, range(0, COUNT, 2))
        turns = iter(range(1, 100))
        reader = table._engine.reader()
        locked: list[int] = []
        real = reader.under_lock

        def under_lock(section: Callable[[], Any]) -> Any:
            locked.append(1)
            return real(section)

        monkeypatch.setattr(reader, "under_lock", under_lock)
        attempts: list[int] = []

        def read() -> Any:
            if not locked:
                attempts.append(1)
                overwrite(table, next(turns), [1])
            out = [
                table._engine.tier_reader().sizes(np.arange(0, COUNT, 2)),
                table[0] if not locked else None,
            ]
            return out

        reader.read_whole(np.arange(COUNT), read)
        assert len(attempts) == reader_module._DISK_READS
        monkeypatch.undo()
        data = gear.ReplayDataset(table, windows=gear.Window(LENGTH), batch_size=16, device="cpu", prefetch=0)
        monkeypatch.setattr(reader_module, "_DISK_READS", 0)  # batches are read under the lock
        assert table._engine.num_spilled > 0
        for _ in range(3):
            batch = data.sample()
            there = batch["mask"]
            assert set(batch["state"][there].flatten().tolist()) <= {0.0, *map(float, range(1, 9))}
        assert uniform(table)


@pytest.mark.parametrize("kind", ["windows", "spans"])
def test_a_server_of_such_a_table_sends_whole_rows(
    tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row is overwritten after it was gathered, and so it is gathered again."""
    path = tmp_path / "disk"
    with shared(path, blocks=60) as table, contextlib.closing(TableCache([table.name or ""], 5.0)) as tables:
        spill(table, [0, 2])
        slots = np.arange(COUNT)
        generations = table._engine.index.arrays.generation[slots]
        columns = {name: SCHEMA[name] for name in ("state", "wide")}
        if kind == "windows":
            windows = dict.fromkeys(columns, gear.Window(LENGTH))
            query: Any = WindowQuery(WindowSpec(table.name or "", table.schema, windows), tables)
            asked, method = np.stack((slots, 0 * slots, generations)), (TierRows, "gather")
        else:
            query = SpanQuery(
                PackedSpec(table.name or "", table.schema, {name: name for name in columns}), tables
            )
            asked = np.stack((slots, 0 * slots, generations, 0 * slots + LENGTH))
            method = (SpanQuery, "_gather")
        numbers, real = iter((5, 6)), getattr(*method)

        def gather(*given: Any, **options: Any) -> Any:
            found = real(*given, **options)
            if number := next(numbers, 0):
                overwrite(table, number, [1, 3])
            return found

        monkeypatch.setattr(*method, gather if kind == "windows" else staticmethod(gather))
        out = np.full(query.reply_bytes(asked) + 128, 7, dtype=np.uint8)
        out = out[-out.ctypes.data % 128 :][: query.reply_bytes(asked)]
        query.read(query.table(), asked, out, at_once=False)
        size = COUNT * LENGTH * 12
        first = out[:size].view(np.float32).reshape(COUNT, -1)
        second = out[-(-size // 128) * 128 :][: COUNT * LENGTH * 160].view(np.int16).reshape(COUNT, -1)
        for row in (first, second):
            assert (row == np.array([0, 6, 0, 6, 0, 0, 0, 0])[:, None]).all()


def test_trajectories_without_room_are_refused_whole(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with make(path, blocks=24, timeout=0.3) as table:
        slots = [table.add(steps(LENGTH, 0)) for _ in range(COUNT)]
        table.save(path)
        spill(table, slots)
        open_rows = table.writer()
        with contextlib.suppress(TableFullError):
            for number in range(90):
                open_rows.append({name: value[0] for name, value in steps(1, number).items()})
        with pytest.raises(TableFullError, match="rows of a set have"):
            overwrite(table, 5)
        open_rows.discard()
        assert set(uniform(table)) <= {0, 5}
        overwrite(table, 6)
        assert uniform(table) == [6] * COUNT
        table.remove(slots[2])
        with pytest.raises(StaleIndexError):
            table.set([slots[2]], [0], stale="error", state=np.zeros((1, 1, 3), np.float32))


def test_edits_alone_are_written_in_the_background(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    with make(path, tier=False, seconds=0.05) as table:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))
        table.save(path)
        overwrite(table, 3)
        end = time.monotonic() + 60.0
        while recovered_copy_or_none(path, tmp_path) != [3] * COUNT:
            assert time.monotonic() < end
            time.sleep(0.02)
        writes = table.stats().disk.writes  # type: ignore[union-attr]
        time.sleep(0.3)
        assert table.stats().disk.writes == writes, "nothing has changed"  # type: ignore[union-attr]


def recovered_copy_or_none(path: Path, where: Path) -> list[int] | None:
    try:
        return recovered_copy(path, where)
    except (CheckpointError, OSError, shutil.Error):  # it was copied amid a write
        return None


def test_threads_overwrite_and_read_while_all_is_moved(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    stop = threading.Event()
    failures: list[BaseException] = []
    with make(path, blocks=60) as table:
        for _ in range(COUNT):
            table.add(steps(LENGTH, 0))

        def work(call: Callable[[int], None]) -> None:
            try:
                number = 0
                while not stop.is_set():
                    number += 1
                    call(number)
            except BaseException as error:
                failures.append(error)

        def sets(number: int) -> None:
            overwrite(table, number % 30_000, [number % COUNT])

        def moves(number: int) -> None:
            table.save(path)
            spill(table, np.random.default_rng(number).permutation(COUNT)[:5])

        threads = [threading.Thread(target=work, args=(call,)) for call in (sets, moves)]
        for thread in threads:
            thread.start()
        try:
            end = time.monotonic() + 1.0
            while time.monotonic() < end and not failures:
                uniform(table)
        finally:
            stop.set()
            for thread in threads:
                thread.join()
        assert not failures


def test_what_is_overwritten_in_a_slot_that_was_used_before_is_written(tmp_path: Path) -> None:
    """As often as values of the trajectory before were: the counts of a slot are the same again."""
    with make(tmp_path / "t", tier=False, seconds=0.02, max_trajectories=1, on_full="evict_oldest") as table:
        for number in (1, 2):
            slot = table.add(steps(LENGTH, number))
            for value in (number, number + 10):
                if value > 10:
                    overwrite(table, value, [slot])
                end = time.monotonic() + 20
                while True:
                    with contextlib.suppress(CheckpointError), gear.Table.load(tmp_path / "t") as copy:
                        if uniform(copy) == [value]:
                            break
                    assert time.monotonic() < end
                    time.sleep(0.05)
