"""The collector on the CPU: what a batch holds, which memory it touches, and how threads share the work."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
import types
import warnings
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cuda_common import FakeEvent
from gather_common import PADS, POISON, Array, Spec, windows_of

from gear_loader import Column, Table, Window
from gear_loader.collection import collector as collectors
from gear_loader.collection.collector import Batch, Buffers, Collector, GpuSide
from gear_loader.native import copying
from gear_loader.native import threads as crew
from gear_loader.storage.rows import SelectedRows
from gear_loader.storage.schema import DTYPES

CPU = torch.device("cpu")
SCHEMA = {name: Column(dtype, shape) for (name, dtype), shape in zip(
    DTYPES.items(), [(), (5,), (3,), (), (2, 2), (), (3,), (), (11,), (4,)], strict=True)}  # fmt: skip


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
    return slots, random.integers(0, lengths), table.reader().slot_states()[1][slots]


def collector(table: Table, windows: dict[str, Window], batch_size: int) -> Collector:
    return Collector(table, windows, batch_size=batch_size, device=CPU)


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
    slots, anchors, generations = rows
    for key, values in (("index", slots), ("anchor", anchors), ("generation", generations)):
        assert batch[key].dtype == torch.int64
        assert batch[key].tolist() == values.tolist()
    assert batch.keys() == {*windows, "mask", "index", "anchor", "generation"}
    one = len(set(windows.values())) == 1
    if not one:
        assert batch["mask"].keys() == windows.keys()
    for name, window in windows.items():
        column = table.schema[name]
        stored = {
            int(slot): table[int(slot)][name]
            .reshape(-1, 1)
            .view(torch.uint8)
            .view(-1, column.step_bytes)
            .numpy()
            for slot in np.unique(slots)
        }
        spec = Spec(
            column.step_bytes, window.length, window.offset, PADS[("keep", "head", "tail").index(window.pad)]
        )
        steps, exists = windows_of(stored, spec, torch.from_numpy(slots), torch.from_numpy(anchors))
        found = batch[name]
        assert found.dtype == column.dtype
        assert found.shape == (len(slots), window.length, *column.shape)
        assert as_bytes(found).numpy().tobytes() == steps.tobytes(), name
        mask = batch["mask"] if one else batch["mask"][name]
        assert mask.dtype == torch.bool
        assert mask.numpy().tolist() == exists.tolist()


def collect(gatherer: Collector, rows: tuple[Array, Array, Array], buffers: Buffers | None = None) -> Batch:
    buffers = gatherer.buffers() if buffers is None else buffers
    poison(buffers.batch)
    gatherer.gather(buffers, SelectedRows(*rows))
    return buffers.rows(len(rows[0]))


@pytest.fixture
def three_threads() -> Iterator[None]:
    threads = torch.get_num_threads()
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(threads)


# What a batch holds ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "window",
    [
        Window(1),
        Window(20, -19),
        Window(20, -10, "head"),
        Window(9, 3, "tail"),
        Window(100, -50),
        Window(5, -500),
        Window(5, 500),
    ],
    ids=str,
)
def test_one_window_for_every_dtype(table: Table, window: Window) -> None:
    windows = dict.fromkeys(SCHEMA, window)
    rows = draw(table, 40)
    batch = collect(collector(table, windows, 40), rows)
    assert isinstance(batch["mask"], torch.Tensor)
    check(table, windows, batch, rows)


def test_a_window_for_each_column(table: Table) -> None:
    windows = {
        "float32": Window(20, -19),
        "bool": Window(1),
        "bfloat16": Window(8, -3, "head"),
        "int64": Window(8, -3, "tail"),
        "uint8": Window(20, -19),
        "float64": Window(3, 40),
    }
    gatherer = collector(table, windows, 33)
    buffers = gatherer.buffers()
    rows = draw(table, 33)
    batch = collect(gatherer, rows, buffers)
    check(table, windows, batch, rows)
    # Columns with the same window share a mask, which is written once.
    assert batch["mask"]["float32"] is batch["mask"]["uint8"]
    assert batch["mask"]["bfloat16"] is not batch["mask"]["int64"]
    assert sum(column.mask is not None for column in buffers.plan.columns) == 5


def test_one_column(table: Table) -> None:
    rows = draw(table, 12)
    for name in SCHEMA:
        windows = {name: Window(4, -2)}
        check(table, windows, collect(collector(table, windows, 12), rows), rows)


@pytest.mark.parametrize("count", [0, 1, 7, 16])
def test_fewer_rows_than_the_batch_has(table: Table, count: int) -> None:
    windows = {"float32": Window(5, -2), "int16": Window(3)}
    gatherer = collector(table, windows, 16)
    buffers = gatherer.buffers()
    rows = draw(table, count)
    check(table, windows, collect(gatherer, rows, buffers), rows)
    for value in tensors(buffers.batch):
        rest = as_bytes(value[count:])
        assert (rest == (1 if value.dtype == torch.bool else POISON)).all()


def test_buffers_are_used_again(table: Table) -> None:
    windows = dict.fromkeys(SCHEMA, Window(6, -3))
    gatherer = collector(table, windows, 20)
    buffers = gatherer.buffers()
    places = [value.data_ptr() for value in tensors(buffers.batch)]
    for seed in range(5):
        rows = draw(table, 20 - seed, seed)
        gatherer.gather(buffers, SelectedRows(*rows))
        batch = buffers.rows(len(rows[0]))
        check(table, windows, batch, rows)
        assert [value.data_ptr() for value in tensors(batch)] == places


def test_shared_buffers(table: Table) -> None:
    windows = {"float32": Window(6, -3), "bool": Window(4)}
    gatherer = collector(table, windows, 9)
    buffers = gatherer.buffers(shared=True)
    assert all(value.is_shared() for value in tensors(buffers.batch))
    assert not any(value.is_shared() for value in tensors(gatherer.buffers().batch))
    rows = draw(table, 9)
    check(table, windows, collect(gatherer, rows, buffers), rows)


def test_a_table_that_grows_and_shrinks() -> None:
    random = np.random.default_rng(2)
    windows = dict.fromkeys(SCHEMA, Window(12, -6))
    with Table.create(
        SCHEMA, max_steps=300, max_trajectories=9, block_steps=8, on_full="evict_oldest"
    ) as table:
        gatherer = collector(table, windows, 10)
        buffers = gatherer.buffers()
        for seed in range(40):
            add(table, int(random.integers(1, 60)), random)
            rows = draw(table, 10, seed)
            check(table, windows, collect(gatherer, rows, buffers), rows)


READS_ONE_COLUMN = """
import ctypes, mmap, resource
import numpy as np, torch
import gear_loader as gear
from gear_loader.collection.collector import Collector
from gear_loader.storage.rows import SelectedRows

resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
length = 4096
schema = {name: gear.Column(torch.int64, (4,)) for name in ("a", "b", "c")}
table = gear.Table.create(schema, max_steps=8 * length, max_trajectories=8, block_steps=64)
for i in range(8):
    table.add({name: np.full((length, 4), i) for name in schema})
libc = ctypes.CDLL(None, use_errno=True)
libc.mprotect.argtypes = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int
for name in ("a", "c"):
    data = table.region.column(name)
    first = -(-data.ctypes.data // mmap.PAGESIZE) * mmap.PAGESIZE
    last = (data.ctypes.data + data.nbytes) // mmap.PAGESIZE * mmap.PAGESIZE
    assert last - first > data.nbytes * 0.9
    assert libc.mprotect(first, last - first, 0) == 0
collector = Collector(table, {"b": gear.Window(length, 0)}, batch_size=8, device=torch.device("cpu"))
buffers = collector.buffers()
numbers = np.arange(8)
collector.gather(buffers, SelectedRows(numbers, np.zeros(8, dtype=np.int64), np.ones(8, dtype=np.int64)))
assert (buffers.batch["b"] == torch.arange(8)[:, None, None]).all()
print("read one", flush=True)
table[0]["a"]  # and this is what reading another one does
"""


def test_columns_that_are_not_asked_for_are_not_read() -> None:
    run = subprocess.run(
        [sys.executable, "-c", READS_ONE_COLUMN], capture_output=True, text=True, timeout=120, check=False
    )
    assert run.stdout == "read one\n", run.stderr
    assert run.returncode == -signal.SIGSEGV


# Threads ---------------------------------------------------------------------------------------------


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("count", [1, 2, 3, 64, 500])
def test_a_crew_gathers_the_same(table: Table, count: int) -> None:
    # 280 KB a row: in chunks of a row each until there are more rows than chunks.
    windows = dict.fromkeys(SCHEMA, Window(2000, -1000))
    rows = draw(table, count, seed=count)
    gatherer = collector(table, windows, count)
    batch = collect(gatherer, rows)
    part = np.random.default_rng(0).permutation(count)[:3]
    views = Buffers(batch, gatherer.buffers().plan).rows(count)
    picked = {key: pick(value, part) for key, value in views.items()}
    check(table, windows, picked, tuple(values[part] for values in rows))
    # The other rows against one thread.
    torch.set_num_threads(1)
    alone = collect(gatherer, rows)
    for ours, theirs in zip(tensors(batch), tensors(alone), strict=True):
        assert torch.equal(as_bytes(ours), as_bytes(theirs))


def pick(value: Any, rows: Array) -> Any:
    return {key: pick(part, rows) for key, part in value.items()} if isinstance(value, dict) else value[rows]


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


@pytest.mark.parametrize(("threads", "count"), [(2, 9), (3, 9), (2, 20)])
def test_a_larger_batch_right_after_a_smaller_one(threads: int, count: int) -> None:
    # The threads are still looking for work of the first batch while the second is being prepared. Straight to the
    # crew, and a look at the last byte of each row alone: what came late would have arrived in the meantime.
    rows = Rows(1 << 13, 64, count)
    columns = rows.buffers.plan.table.numpy()
    index = (*rows.table.reader().index_arrays(), 64, rows.collector._row_bytes)
    ends, expected = rows.view[:, -1], np.arange(count, dtype=np.uint8)
    before = torch.get_num_threads()
    torch.set_num_threads(threads)
    late = rounds = 0
    deadline = time.monotonic() + 1.5
    while time.monotonic() < deadline:
        ends[:] = 255
        crew.gather(columns, rows.slots[:2], rows.zeros[:2], *index)
        crew.gather(columns, rows.slots, rows.zeros, *index)
        late += not (ends == expected).all()
        rounds += 1
    torch.set_num_threads(before)
    assert rounds > 20
    assert late == 0, f"of {rounds} batches {late} were not finished"


def test_a_job_that_has_not_been_posted_is_not_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    # What a member would do that looks for work just then, between the writing of a job and its posting.
    rows = Rows(1 << 10, 8, 9)
    columns, (extent, ids) = rows.buffers.plan.table.numpy(), rows.table.reader().index_arrays()
    alone = crew._ThreadPool(0)
    post, seen = copying.post, []

    def posted(base: int, members: int, chunks: int) -> int:
        seen.append(copying._work(alone._mailbox, base))
        return int(post(base, members, chunks))

    monkeypatch.setattr(copying, "post", posted)
    for count in (2, 9, 3, 9):
        rows.clear()
        slots, zeros = rows.slots[:count], rows.zeros[:count]
        assert alone.gather(count, columns, slots, zeros, extent, ids, 64) == 0
        assert rows.complete(0, count)
        assert not rows.complete(0, 9) or count == 9
    assert seen == [False] * 4


@pytest.mark.usefixtures("three_threads")
def test_two_threads_collect_at_once() -> None:
    begin = time.monotonic()
    failures: list[str] = []
    rounds = [0, 0, 0]

    def over() -> bool:
        """After two seconds, or later if one has had no turn for long."""
        return time.monotonic() > begin + (2 if min(rounds) > 5 else 60)

    def work(me: int) -> None:
        rows = Rows(1 << 12, 64, 3 + 3 * me)
        random = np.random.default_rng(me)
        try:
            while not over():
                first = int(random.integers(0, 3))
                rows.clear()
                rows.gather(first, len(rows.slots))
                assert rows.complete(first, len(rows.slots)), f"round {rounds[me]}: a row was not finished"
                rounds[me] += 1
        except BaseException as error:
            failures.append(f"thread {me}: {error!r}")
            raise

    threads = [threading.Thread(target=work, args=(me,)) for me in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(120)
    assert not failures
    assert all(count > 5 for count in rounds), rounds


@pytest.mark.usefixtures("three_threads")
def test_an_interrupted_gather_leaves_nobody_at_work(monkeypatch: pytest.MonkeyPatch) -> None:
    # An exception while the crew is woken (Ctrl-C, say) comes out only when every chunk is finished, and the next
    # batch is none the worse for it.
    rows = Rows(1 << 12, 64, 8)
    rows.gather(0, 8)
    members = crew._crew(os.getpid(), 2)
    deadline = time.monotonic() + 60
    while (members._mailbox[copying.STATE : copying.STATE + 2] != copying.ASLEEP).any():
        assert time.monotonic() < deadline
        time.sleep(0.01)

    first, second = members._wake

    class Interrupted:
        acquire = second.acquire  # a member says that it is asleep a moment before it waits here

        def release(self) -> None:
            raise KeyboardInterrupt

    monkeypatch.setattr(members, "_wake", [first, Interrupted()])
    rows.clear()
    with pytest.raises(KeyboardInterrupt):
        rows.gather(0, 8)
    assert rows.complete(0, 8)
    monkeypatch.setattr(members, "_wake", [first, second])
    second.release()  # what the interruption swallowed
    for _ in range(20):
        rows.clear()
        rows.gather(0, 8)
        assert rows.complete(0, 8)


@pytest.mark.usefixtures("three_threads")
def test_a_forked_process_has_a_crew_of_its_own() -> None:
    rows = Rows(1 << 12, 64, 8)
    rows.gather(0, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)  # from Python 3.12 on: fork with threads
        child = os.fork()
    if child == 0:
        try:
            rows.clear()
            rows.gather(0, 8)
            os._exit(0 if rows.complete(0, 8) else 1)
        finally:
            os._exit(2)
    deadline = time.monotonic() + 60
    while (status := os.waitpid(child, os.WNOHANG))[0] == 0:
        if time.monotonic() > deadline:
            os.kill(child, signal.SIGKILL)
            os.waitpid(child, 0)
            pytest.fail("the child hangs")
        time.sleep(0.01)
    assert os.waitstatus_to_exitcode(status[1]) == 0
    rows.clear()
    rows.gather(0, 8)
    assert rows.complete(0, 8)


# The paths of a GPU, on the CPU ----------------------------------------------------------------------


@pytest.fixture
def fake_stream(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """`torch.cuda.current_stream` that notes the events it was told to wait for."""
    waited: list[Any] = []
    monkeypatch.setattr(
        collectors.torch.cuda, "current_stream", lambda: types.SimpleNamespace(wait_event=waited.append)
    )
    return waited


@pytest.mark.skipif(torch.cuda.is_available(), reason="the kernel is compiled here, see test_gather_gpu.py")
@pytest.mark.parametrize("batch_size", [1, 5, 8])
def test_the_zero_copy_path(table: Table, fake_stream: list[Any], batch_size: int) -> None:
    """The index's part for the kernel, the kernel (interpreted), and which events are waited for."""
    windows = {"float32": Window(9, -4), "bool": Window(20, -19, "head"), "float64": Window(3, 2, "tail")}
    gatherer = collector(table, windows, batch_size)
    buffers = gatherer.buffers()
    blocks = (gatherer._last - gatherer._first) // 7 + 2
    host = torch.full((5, batch_size), -1), torch.zeros(batch_size, blocks, dtype=torch.int32)
    mirror = torch.empty_like(host[0]), torch.empty_like(host[1])
    filled, released = FakeEvent(), FakeEvent()
    gpu: Any = GpuSide(host, mirror, None, None, filled, released)
    buffers.gpu = gpu
    for i, key in enumerate(("index", "anchor", "generation")):
        buffers.batch[key] = mirror[0][i]
    for count in {batch_size, max(batch_size - 2, 1)}:
        fake_stream.clear()
        filled.calls.clear()
        rows = draw(table, count, seed=count)
        check(table, windows, collect(gatherer, rows, buffers), rows)
        assert filled.calls == ["synchronize", "record"]
        assert fake_stream == [released]


def test_the_staged_path(table: Table, fake_stream: list[Any]) -> None:
    windows = {"float32": Window(9, -4), "bool": Window(20, -19, "head")}
    gatherer = collector(table, windows, 6)
    buffers, staging = gatherer.buffers(), gatherer.buffers()
    filled, released = FakeEvent(), FakeEvent()
    buffers.gpu = GpuSide(None, None, None, staging, filled, released)
    for count in (6, 2):
        fake_stream.clear()
        filled.calls.clear()
        rows = draw(table, count)
        check(table, windows, collect(gatherer, rows, buffers), rows)
        assert filled.calls == ["synchronize", "record"]
        assert fake_stream == [released]
