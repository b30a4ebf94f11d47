"""On a real GPU: the compiled kernel out of pinned host memory, and datasets against the CPU's, bit for bit."""

from __future__ import annotations

import collections
import gc
import itertools
import os
import threading
import time
import warnings
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from gather_common import (
    PADS,
    STEP_BYTES,
    Array,
    Spec,
    Store,
    check_gather,
    check_two_tables,
    pinned_memory,
)
from options_common import nested
from waiting_common import wait_until

from gear_loader import Column, ReplayDataset, Table, Uniform, Window
from gear_loader.errors import TableClosedError
from gear_loader.kernels.gather import gather
from gear_loader.storage.region import Region

pytestmark = pytest.mark.gpu

DEVICE = "cuda"
READING = 2  # the column of the index's readers that says whether a read is open
SLEEP = 20_000_000  # cycles: some ten milliseconds

Flat = dict[str, torch.Tensor]


def flat(batch: Mapping[str, Any], prefix: str = "") -> Flat:
    """A batch with the masks beside the columns."""
    parts: Flat = {}
    for name, value in batch.items():
        parts.update(flat(value, f"{name}.") if isinstance(value, dict) else {prefix + name: value})
    return parts


def on_cpu(batch: Mapping[str, Any]) -> Flat:
    """A copy on the CPU, made behind the work that the current stream has; waits for it."""
    return {name: value.to("cpu", copy=True) for name, value in flat(batch).items()}


def assert_same(found: Flat, expected: Flat, what: str = "") -> None:
    assert found.keys() == expected.keys()
    for name, values in expected.items():
        assert found[name].dtype == values.dtype
        assert found[name].shape == values.shape
        ours, theirs = (part.cpu().contiguous().view(-1).view(torch.uint8) for part in (found[name], values))
        assert torch.equal(ours, theirs), (
            f"{what} {name}: {(ours != theirs).sum()} of {len(ours)} bytes differ"
        )


def no_reader(table: Table) -> bool:
    return not table._engine.region.array("readers")[:, READING].any()


# Together they meet each block size and each length of window with every size of step: the first group is all
# whole 16-byte words, the second has 4-byte words and single bytes in it.
GROUPS = (tuple(size for size in STEP_BYTES if size % 16 == 0), STEP_BYTES)


@pytest.mark.parametrize("sizes", GROUPS, ids=["aligned", "mixed"])
@pytest.mark.parametrize("block_steps", [1, 7, 20, 32, 64, 100])
def test_shapes(block_steps: int, sizes: tuple[int, ...]) -> None:
    lengths = sorted({1, max(block_steps - 1, 1), block_steps, block_steps + 1, 3 * block_steps + 2, 150})
    store = Store(sizes, lengths, block_steps, seed=block_steps, memory=pinned_memory)
    for case, (length, pad) in enumerate(itertools.product((1, 5, 20, 63, 130), PADS)):
        offsets = (-length - 300, 1 - length, -length // 2, 0, 2, 300)
        slots, anchors = store.draw(5, seed=case)
        specs = [
            Spec(size, length, offsets[(i + case) % len(offsets)], pad, mask=(i + case) % 3 > 0)
            for i, size in enumerate(sizes)
        ]
        options: dict[str, Any] = {"mask": bool(case % 2), "programs": (1, 3, 132, None)[case % 4]}
        for compact in (False, True):
            options |= {"batch": 6, "compact": compact, "device": DEVICE}
            check_gather(gather, store, specs, slots, anchors, **options)


def test_a_batch_from_two_tables() -> None:
    check_two_tables(gather, memory=pinned_memory, device=DEVICE)


def test_the_current_stream_is_used() -> None:
    # The kernel comes behind what its stream still has to do: here the poisoning of the outputs by `check_gather`,
    # and a pause.
    store = Store([16, 3], [5, 40], 9, memory=pinned_memory)
    slots, anchors = store.draw(20)

    def late(*arguments: Any, **options: Any) -> None:
        torch.cuda._sleep(SLEEP)
        gather(*arguments, **options)

    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        check_gather(late, store, [Spec(16, 11, -5), Spec(3, 8, -7)], slots, anchors, device=DEVICE)


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_another_gpu_than_the_current_one() -> None:
    store = Store([16, 3], [5, 40], 9, memory=pinned_memory)
    slots, anchors = store.draw(20)
    with torch.cuda.device(0):
        check_gather(
            gather, store, [Spec(16, 11, -5), Spec(3, 8, -7)], slots, anchors, device="cuda:1", compact=True
        )


@pytest.mark.slow
def test_more_than_2_31_words() -> None:
    # A column of 9 GiB whose first 8.5 GiB are one trajectory of zeros: those behind it lie beyond 2**31 words.
    if os.sysconf("SC_AVPHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") < 20 * 2**30:
        pytest.skip("needs 20 GiB of free memory")
    filler, length, count = 17 * 2**19, 500, 40
    schema = {"x": Column(torch.int64, (128,)), "y": Column(torch.uint8, (5,))}
    with Table.create(schema, max_steps=filler + count * length, max_trajectories=count + 1) as table:
        table.add({"x": np.zeros((filler, 128), dtype=np.int64), "y": np.zeros((filler, 5), dtype=np.uint8)})
        random = np.random.default_rng(0)
        for _ in range(count):
            x, y = random.integers(-(2**60), 2**60, (length, 128)), random.integers(0, 256, (length, 5))
            table.add({"x": x, "y": y.astype(np.uint8)})
        assert (
            np.sort(table._engine.reader().index_arrays()[1])[-count:].astype(np.int64) * 64 * 1024 > 2**33
        ).all()
        options: dict[str, Any] = {"batch_size": 64, "windows": Window(70, -69), "batches_per_epoch": 2}
        options |= {"subset": lambda sequences: sequences > 0, "copy": True}
        both = [ReplayDataset(table, **nested({"device": device, **options})) for device in (DEVICE, "cpu")]
        for found, expected in zip(*both, strict=True):
            assert_same(flat(found), flat(expected))


SCHEMA = {
    "observation": Column(torch.float32, (11,)),
    "action": Column(torch.bfloat16, (3,)),
    "reward": Column(torch.float64),
    "done": Column(torch.bool),
    "image": Column(torch.uint8, (4, 12)),
    "token": Column(torch.int16, (8,)),
}


def fill(table: Table, count: int = 200) -> None:
    random = np.random.default_rng(7)
    for length in [1, 15, 16, 17, 90, *random.integers(1, 90, count - 5).tolist()]:
        rows = {}
        for name, column in table.schema.items():
            size = (length, *column.shape[:-1], column.step_bytes // max(1, int(np.prod(column.shape[:-1]))))
            values = torch.from_numpy(random.integers(0, 2 if name == "done" else 256, size, dtype=np.uint8))
            rows[name] = values.view(column.dtype).reshape(length, *column.shape)
        table.add(rows)


@pytest.fixture(scope="module")
def table() -> Iterator[Table]:
    with Table.create(SCHEMA, max_steps=20_000, max_trajectories=300, block_steps=16) as table:
        fill(table)
        yield table


# fmt: off
OPTIONS: dict[str, dict[str, Any]] = {
    "one window": {"windows": Window(20, -19)},
    "whole trajectories": {"windows": Window(90), "anchor": "first"},
    "head": {"windows": Window(30, -29, "head"), "anchor": "last", "batch_size": 1, "batches_per_epoch": 20},
    "some columns": {"windows": Window(7, -3, "tail"), "columns": ["image", "token", "done"]},
    "windows of their own": {"windows": {
        "observation": Window(20, -19), "action": Window(1), "done": Window(5, 2, "tail"), "reward": Window(1)}},
    "without replacement": {"windows": Window(5, -4), "sampler": Uniform(replacement=False)},
    "a pass over all steps": {"windows": Window(4, -3), "sampler": Uniform(replacement=False, unit="step")},
    "part of the table": {"windows": Window(50, -25), "subset": lambda sequences: sequences % 3 == 0, "programs": 3},
    "odd batches": {"windows": Window(9, -4), "batch_size": 37, "rank": 1, "world_size": 2},
}
# fmt: on


def datasets(table: Table, name: str, **more: Any) -> tuple[ReplayDataset, ReplayDataset]:
    """The same dataset on the GPU and on the CPU."""
    options = {"batch_size": 32, "seed": 11, **OPTIONS[name], **more}
    return ReplayDataset(table, **nested({"device": DEVICE, **options})), ReplayDataset(
        table, **nested({"device": "cpu", **options, "prefetch": 0, "copy": True})
    )


STAGED = pytest.mark.parametrize("staged", [False, True], ids=["zero-copy", "staged"], indirect=True)


@pytest.fixture
def staged(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Whether the region counts as one that cannot be pinned, so that batches are gathered on the CPU and copied."""
    if request.param:
        monkeypatch.setattr(Region, "pin", lambda *_, **__: False)
    return bool(request.param)


@pytest.mark.parametrize(
    ("name", "prefetch", "staged"),
    [(name, (i + turn) % 4, turn == i // 4 % 2) for i, name in enumerate(OPTIONS) for turn in range(2)],
    indirect=["staged"],
)
def test_the_gpu_delivers_what_the_cpu_does(table: Table, staged: bool, name: str, prefetch: int) -> None:
    copy, keep = prefetch % 2 == 0, 1 + prefetch % 3
    ours, theirs = datasets(table, name, prefetch=prefetch, copy=copy, keep=keep)
    for _ in range(2):  # epochs
        for i, (found, expected) in enumerate(itertools.zip_longest(ours, theirs)):
            assert found is not None
            assert expected is not None
            assert all(value.device == ours.device for value in flat(found).values())
            assert_same(on_cpu(found), flat(expected), f"batch {i}")
    assert_same(on_cpu(ours.sample()), flat(theirs.sample()))
    assert_same(on_cpu(ours.sample(5)), flat(theirs.sample(5)))
    wait_until(lambda: no_reader(table), "the tickets of all batches")
    assert staged or table._engine.region.is_pinned
    assert staged or torch.from_numpy(table._engine.region.column("image")).is_pinned()


@pytest.mark.parametrize(
    ("prefetch", "keep", "copy", "stream", "staged"),
    [
        *((0, 1, False, "own", False), (1, 1, False, "default", False), (3, 2, False, "own", False)),
        *((0, 1, True, "default", False), (2, 1, True, "own", False)),
        *((1, 1, False, "own", True), (2, 1, True, "default", True)),
    ],
    indirect=["staged"],
)
def test_a_batch_in_use_is_not_overwritten(
    table: Table, staged: bool, prefetch: int, keep: int, copy: bool, stream: str
) -> None:
    # The consumer's stream is always behind: it pauses before it reads each batch. The host asks for the next one
    # at once and lets go of the batch, so its memory may be used again while the consumer has not come to it yet.
    ours, theirs = datasets(
        table, "one window", prefetch=prefetch, keep=keep, copy=copy, batches_per_epoch=12
    )
    expected = [flat(batch) for batch in theirs]
    consumer = torch.cuda.current_stream() if stream == "default" else torch.cuda.Stream()
    seen: list[Flat] = []
    with torch.cuda.stream(consumer):
        for batch in ours:
            torch.cuda._sleep(SLEEP)
            seen.append({name: value.clone() for name, value in flat(batch).items()})
            del batch
        del ours
        gc.collect()
        consumer.synchronize()
    assert len(seen) == len(expected)
    for i, (found, wanted) in enumerate(zip(seen, expected, strict=True)):
        assert_same(found, wanted, f"batch {i}")


@STAGED
def test_memory_that_the_consumer_still_works_on_is_not_taken(table: Table, staged: bool) -> None:
    # Blocks of torch's allocator that were freed with work on them still queued must not become a batch's memory
    # before that work is done.
    for _ in range(3):
        ours, theirs = datasets(table, "one window", batches_per_epoch=4)
        expected = [flat(batch) for batch in theirs]
        sizes = [value.numel() * value.element_size() for value in expected[0].values()]
        blocks = [torch.full((size,), 3, dtype=torch.uint8, device=DEVICE) for size in sizes]
        torch.cuda._sleep(3 * SLEEP)
        sums = [block.sum(dtype=torch.int64) for block in blocks]
        del blocks
        seen = [{name: value.clone() for name, value in flat(batch).items()} for batch in ours]
        assert [int(total) for total in sums] == [3 * size for size in sizes]
        for found, wanted in zip(seen, expected, strict=True):
            assert_same(found, wanted)


@pytest.mark.parametrize(("keep", "staged"), [(1, True), (2, False), (4, False)], indirect=["staged"])
def test_how_long_a_batch_stays_valid(table: Table, staged: bool, keep: int) -> None:
    ours, theirs = datasets(table, "one window", keep=keep, batches_per_epoch=10)
    expected = [flat(batch) for batch in theirs]
    held: list[tuple[int, Any]] = []
    for i, batch in enumerate(ours):
        held = [*held, (i, batch)][-keep:]
        torch.cuda.synchronize()
        for number, earlier in held:
            assert_same(on_cpu(earlier), expected[number], f"batch {number} after batch {i}")
    # Nobody has asked for more: the last ones stay.
    torch.cuda.synchronize()
    for number, earlier in held:
        assert_same(on_cpu(earlier), expected[number], f"batch {number} after the end")


@pytest.mark.parametrize("copy", [False, True])
def test_the_host_does_not_wait(table: Table, copy: bool) -> None:
    ours, _ = datasets(table, "one window", prefetch=2, keep=2, batches_per_epoch=60, copy=copy)
    batches = iter(ours)
    for _ in range(20):
        next(batches)  # buffers are made, the kernel is compiled
    torch.cuda.synchronize()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", UserWarning)  # that this mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        for _ in range(20):
            next(batches)
    finally:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)
            torch.cuda.set_sync_debug_mode("default")
    batches.close()


def numbered(number: int, length: int) -> dict[str, Array]:
    """A trajectory in which every value tells its number and its step."""
    step = np.arange(length, dtype=np.int64)
    return {
        "number": np.full((length, 2), number, dtype=np.int64),
        "step": step.astype(np.int32),
        "check": np.repeat((number * 1_000_003 + step)[:, None], 33, axis=1),
        "byte": ((number + step) % 256).astype(np.uint8),
    }


NUMBERED = {
    "number": Column(torch.int64, (2,)),
    "step": Column(torch.int32),
    "check": Column(torch.int64, (33,)),
    "byte": Column(torch.uint8),
}


def assert_whole(batch: Flat, window: Window) -> None:
    """Every row of a batch is one window of one trajectory, no step of it torn or replaced."""
    mask, number, step = batch["mask"], batch["number"][:, :, 0], batch["step"].long()
    assert mask.any(1).all()
    wanted = batch["anchor"][:, None] + window.offset + torch.arange(window.length)
    first = torch.where(mask, number, 2**62).amin(1, keepdim=True)
    assert (number == torch.where(mask, first, 0)).all()
    assert (batch["number"][:, :, 1] == number).all()
    assert (step == torch.where(mask, wanted, 0)).all()
    check = torch.where(mask, number * 1_000_003 + step, 0)
    assert (batch["check"] == check[:, :, None]).all()
    assert (batch["byte"] == torch.where(mask, (number + step) % 256, 0)).all()


@pytest.mark.parametrize(("replacement", "staged"), [(True, False), (False, True)], indirect=["staged"])
def test_eviction_while_batches_are_in_flight(staged: bool, replacement: bool) -> None:
    window = Window(24, -12)
    with Table.create(
        NUMBERED, max_steps=3000, max_trajectories=60, block_steps=16, on_full="evict_oldest"
    ) as table:
        random = np.random.default_rng(0)
        for number in range(80):
            table.add(numbered(number, int(random.integers(1, 90))))
        options: dict[str, Any] = {"sampler": Uniform(replacement=replacement), "prefetch": 3, "keep": 1}
        options |= {"windows": window, "device": DEVICE, "batches_per_epoch": 1_000_000}
        dataset = ReplayDataset(table, **nested({"batch_size": 64, **options}))
        stop, added, failures = threading.Event(), 80, []

        def write() -> None:
            nonlocal added
            try:
                while not stop.is_set():
                    table.add(numbered(added, 1 + added * 37 % 89))
                    added += 1
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=write)
        thread.start()
        batches, newest = iter(dataset), 0
        try:
            for _ in range(5):
                seen: list[Flat] = []
                target = added + 200
                while (added < target or len(seen) < 50) and not failures:
                    if len(seen) % 10 == 0:
                        torch.cuda._sleep(SLEEP)  # batches prepared meanwhile read old blocks for longer
                    batch = next(batches)
                    if len(seen) < 200:
                        seen.append({name: value.clone() for name, value in flat(batch).items()})
                for copies in seen:
                    assert_whole(on_cpu(copies), window)
                assert int(seen[-1]["number"].max()) > newest
                newest = int(seen[-1]["number"].max())
        finally:
            stop.set()
            thread.join(60)
            batches.close()
        assert not failures
        wait_until(lambda: no_reader(table), "the tickets of all batches")
        table.check_valid()


@STAGED
def test_a_table_that_is_closed_under_way(staged: bool) -> None:
    for _ in range(3):
        table = Table.create(SCHEMA, max_steps=2000, max_trajectories=50, block_steps=16)
        fill(table, 20)
        ours, theirs = datasets(table, "one window", prefetch=2, batches_per_epoch=30)
        expected = next(iter(theirs))
        batches = iter(ours)
        first = next(batches)
        torch.cuda._sleep(SLEEP)
        table.close()
        assert_same(on_cpu(first), flat(expected))
        with pytest.raises(TableClosedError):
            collections.deque(batches, maxlen=0)
        torch.cuda.synchronize()  # nothing has read unmapped memory


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_pinned_private_table_is_not_in_forked_processes() -> None:
    """The child gets an error; what the parent writes from then on is what its GPU reads."""
    with Table.create(NUMBERED, max_steps=500, max_trajectories=9, block_steps=16) as table:
        table.add(numbered(1, 40))
        dataset = ReplayDataset(table, batch_size=8, windows=Window(24, -12), device=DEVICE)
        dataset.sample()
        torch.cuda.synchronize()
        ours, theirs = os.pipe()
        pid = os.fork()
        if pid == 0:
            try:
                answer = str(len(table))
            except BaseException as error:
                answer = type(error).__name__
            os.write(theirs, answer.encode())
            os._exit(0)
        os.close(theirs)
        with open(ours, "rb") as pipe:
            assert pipe.read() == b"PrivateTableError"
        os.waitpid(pid, 0)
        table.remove(table.indices())
        table.add(numbered(2, 40))
        for _ in range(5):
            assert_whole(on_cpu(dataset.sample()), Window(24, -12))
        assert (on_cpu(dataset.sample())["number"] >= 0).all()


def test_graphs_can_be_captured_while_batches_are_prepared(table: Table) -> None:
    """The thread that gives tickets back waits for events, which a capture does not allow other threads by default."""
    ours, _ = datasets(table, "one window", prefetch=3, batches_per_epoch=20)
    batches = iter(ours)
    next(batches)
    (pool,) = ours._buffers.pools.values()
    value, side = torch.zeros(8, device=DEVICE), torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    for _ in range(5):
        for _ in range(3):  # so that the thread begins to wait for one while the graph is captured
            with torch.cuda.stream(pool.stream):
                torch.cuda._sleep(SLEEP)
            next(batches)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(side):
            graph.capture_begin()  # capture_error_mode="global"
            time.sleep(0.1)
            value += 1
            graph.capture_end()
            graph.replay()
    batches.close()
    torch.cuda.synchronize()
    assert value.tolist() == [5.0] * 8
    wait_until(lambda: no_reader(table), "the tickets of all batches")


def test_a_trajectory_added_from_the_gpu() -> None:
    with Table.create(NUMBERED, max_steps=500, max_trajectories=9, block_steps=16) as table:
        rows = {name: torch.from_numpy(values).to(DEVICE) for name, values in numbered(3, 40).items()}
        index = table.add(rows)
        for name, values in numbered(3, 40).items():
            assert table[index][name].tolist() == values.tolist()
        dataset = ReplayDataset(
            table, batch_size=8, windows=Window(24, -12), device=DEVICE, batches_per_epoch=2
        )
        for batch in dataset:
            assert_whole(on_cpu(batch), Window(24, -12))
