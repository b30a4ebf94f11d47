"""The collector on the CPU: what a batch holds, which memory it touches, and how threads share the work."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from dataset_common import check_batch, contents
from gather_common import POISON, Array
from table_common import forked, forks

from gear_loader import Column, Table, Window
from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import Buffers
from gear_loader.collection.collector import Collector, TableSource, collector_for
from gear_loader.native import sharing, threads
from gear_loader.storage.dtypes import torch_dtypes
from gear_loader.storage.selected_rows import SelectedRows

CPU = torch.device("cpu")
SCHEMA = {name: Column(dtype, shape) for (name, dtype), shape in zip(
    torch_dtypes().items(), [(), (5,), (3,), (), (2, 2), (), (3,), (), (11,), (4,)], strict=True)}  # fmt: skip


def tensor(dtype: torch.dtype, shape: tuple[int, ...], random: np.random.Generator) -> torch.Tensor:
    """Random values of any dtype; floats of all bit patterns, NaNs among them."""
    if dtype == torch.bool:
        return torch.from_numpy(random.random(shape) < 0.5)
    flat = random.integers(0, 256, int(np.prod(shape)) * dtype.itemsize, dtype=np.uint8)
    return torch.from_numpy(flat).view(dtype).reshape(shape)


def add(table: Table, length: int, random: np.random.Generator) -> int:
    rows = {
        name: tensor(column.dtype, (length, *column.shape), random) for name, column in table.schema.items()
    }
    return table.add(rows)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    """Trajectories of all dtypes and many lengths, in blocks that earlier trajectories have left out of order."""
    random = np.random.default_rng(1)
    lengths = [1, 6, 7, 8, 70, *random.integers(1, 60, 30).tolist()]
    with Table.create(SCHEMA, max_steps=4000, max_trajectories=80, block_steps=7) as table:
        gone = [add(table, int(length), random) for length in random.integers(1, 40, 40)]
        table.remove(gone[::2])
        for length in lengths:
            add(table, length, random)
        table.remove(gone[1::2])
        yield table


def draw(table: Table, count: int, seed: int = 0) -> tuple[Array, Array, Array]:
    """Random rows of the table: slots, anchors, generations."""
    random = np.random.default_rng(seed)
    chosen = random.integers(0, len(table), count)
    slots, lengths = table.indices()[chosen], table.lengths()[chosen]
    return slots, random.integers(0, lengths), table._engine.reader().slot_states()[1][slots]


def collector(table: Table, windows: dict[str, Window], batch_size: int) -> Collector:
    return collector_for(TableSource(table), windows, batch_size=batch_size, device=CPU)


def tensors(batch: Batch) -> Iterator[torch.Tensor]:
    for value in batch.values():
        if isinstance(value, dict):
            yield from tensors(value)
        else:
            yield value


def as_bytes(value: torch.Tensor) -> torch.Tensor:
    return value.reshape(*value.shape, 1).view(torch.uint8)


def poison(batch: Batch) -> None:
    for value in tensors(batch):
        as_bytes(value).fill_(1 if value.dtype == torch.bool else POISON)


def check(table: Table, windows: dict[str, Window], batch: Batch, rows: tuple[Array, Array, Array]) -> None:
    """Compare a batch with what its definition says, bit for bit."""
    for key, values in zip(("index", "anchor", "generation"), rows, strict=True):
        assert batch[key].dtype == torch.int64
        assert batch[key].tolist() == values.tolist()
    assert isinstance(batch["mask"], dict) == (len(set(windows.values())) > 1)
    check_batch(batch, contents(table), windows)


def collect(gatherer: Collector, rows: tuple[Array, Array, Array], buffers: Buffers | None = None) -> Batch:
    buffers = gatherer.buffers() if buffers is None else buffers
    poison(buffers.batch)
    gatherer.gather(buffers, SelectedRows(*rows))
    return buffers.rows(len(rows[0]))


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Three threads, which also share batches that one would usually gather alone."""
    before = torch.get_num_threads()
    monkeypatch.setattr(threads, "_ALONE_BYTES", 1 << 19)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(before)


@pytest.mark.parametrize(
    "window",
    [
        Window(1),
        Window(20, -10, "head"),
        Window(9, 3, "tail"),
        Window(100, -50),
        Window(5, 500),
        Window(9, -6, "edge"),
    ],
    ids=str,
)
def test_one_window_for_every_dtype(table: Table, window: Window) -> None:
    windows = dict.fromkeys(SCHEMA, window)
    rows = draw(table, 20)
    batch = collect(collector(table, windows, 20), rows)
    assert isinstance(batch["mask"], torch.Tensor)
    check(table, windows, batch, rows)


@pytest.mark.parametrize("count", [0, 7])
def test_fewer_rows_than_the_batch_has(table: Table, count: int) -> None:
    windows = {"float32": Window(5, -2), "int16": Window(3)}
    gatherer = collector(table, windows, 16)
    buffers = gatherer.buffers()
    rows = draw(table, count)
    check(table, windows, collect(gatherer, rows, buffers), rows)
    for value in tensors(buffers.batch):
        rest = as_bytes(value[count:])
        assert (rest == (1 if value.dtype == torch.bool else POISON)).all()


class Rows:
    """A table whose trajectories are one number throughout, and batches of it in which a missing piece shows."""

    def __init__(self, step_bytes: int, length: int, count: int) -> None:
        self.table = Table.create(
            {"x": Column(torch.uint8, (step_bytes,))}, max_steps=length * count, max_trajectories=count
        )
        for number in range(count):
            self.table.add({"x": np.full((length, step_bytes), number, dtype=np.uint8)})
        self.collector = collector(self.table, {"x": Window(length)}, count)
        self.buffers = self.collector.buffers()
        self.slots, self.zeros = np.arange(count), np.zeros(count, dtype=np.int64)
        self.view = self.buffers.batch["x"].numpy().reshape(count, -1)

    def gather(self, first: int, last: int) -> None:
        rows = (part[first:last] for part in (self.slots, self.zeros, self.zeros))
        self.collector.gather(self.buffers, SelectedRows(*rows))

    def clear(self) -> None:
        self.view[:, [0, -1]] = 255

    def complete(self, first: int, last: int) -> bool:
        """Whether each row has its first and its last byte."""
        return bool((self.view[: last - first, [0, -1]] == self.slots[first:last, None]).all())


@pytest.mark.usefixtures("three_threads")
def test_a_larger_batch_right_after_a_smaller_one() -> None:
    # The threads are still looking for work of the first batch while the second is being prepared. Straight to the
    # threads, and a look at the last byte of each row alone: what came late would have arrived in the meantime.
    rows = Rows(1 << 13, 64, 9)
    columns = rows.buffers.columns_of(rows.table)
    index = (*rows.table._engine.reader().index_arrays(), 64, rows.buffers.layout.row_bytes)
    ends, expected = rows.view[:, -1], np.arange(9, dtype=np.uint8)
    for number in range(200):
        ends[:] = 255
        threads.gather(columns, rows.slots[:2], rows.zeros[:2], *index)
        threads.gather(columns, rows.slots, rows.zeros, *index)
        assert (ends == expected).all(), f"batch {number} was not finished"


@pytest.mark.usefixtures("three_threads")
@pytest.mark.skipif(threads.MAX_THREADS == 1, reason="needs Linux on x86_64 or aarch64")
def test_members_keep_off_the_callers_processor() -> None:
    """Woken there they would wait until the caller has done everything."""
    rows, mine = Rows(1 << 12, 64, 8), os.sched_getaffinity(0)
    members = threads._pool(os.getpid(), 2)
    ids = [int(each) for each in members.mailbox[sharing.MEMBERS : sharing.MEMBERS + 2]]
    try:
        for here in sorted(mine):
            members.mailbox[sharing.KEPT_OFF] = -1
            os.sched_setaffinity(0, {here})
            rows.gather(0, 8)
            assert [os.sched_getaffinity(thread) for thread in ids] == [{here}] * 2, "the only one there is"
        os.sched_setaffinity(0, mine)
        members.mailbox[sharing.KEPT_OFF] = -1
        rows.gather(0, 8)
        expected = mine - {int(members.mailbox[sharing.KEPT_OFF])} or mine
        assert [os.sched_getaffinity(thread) for thread in ids] == [expected] * 2
    finally:
        os.sched_setaffinity(0, mine)
    assert os.sched_getaffinity(0) == mine


@pytest.mark.usefixtures("three_threads")
def test_several_threads_collect_at_once() -> None:
    failures: list[str] = []
    begin = threading.Barrier(3)

    def work(me: int) -> None:
        try:
            rows = Rows(1 << 12, 64, 3 + 3 * me)
            begin.wait(60)
            for turn in range(150):
                rows.clear()
                rows.gather(turn % 3, len(rows.slots))
                assert rows.complete(turn % 3, len(rows.slots)), f"round {turn}: a row was not finished"
        except BaseException as error:
            failures.append(f"thread {me}: {error!r}")
            raise

    started = [threading.Thread(target=work, args=(me,)) for me in range(3)]
    for thread in started:
        thread.start()
    for thread in started:
        thread.join(120)
    assert not failures
    assert not any(thread.is_alive() for thread in started)


@forks
@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_has_a_pool_of_its_own() -> None:
    rows = Rows(1 << 12, 64, 8)

    def work() -> None:
        rows.clear()
        rows.gather(0, 8)
        assert rows.complete(0, 8)

    work()
    forked(work)
    work()
