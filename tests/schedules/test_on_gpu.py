"""What a GPU must get right, in calls of a user alone: on a real one, where there is one, else on the stand-in.

`benchmarks/gpu_check.sh` runs these first, and those with "replays" in their name under compute-sanitizer.
"""

from __future__ import annotations

import contextlib
import gc
import itertools
import os
import random
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
from streams import instead
from table_common import fresh_name

import gear_loader as gear
from gear_loader.errors import GpuError

REAL = torch.cuda.is_available()
DEVICE = "cuda"
SECONDS = 5.0 if REAL else 0.0
"""Of the soak; on the stand-in it has 30 batches."""
KINDS: dict[str, dict[str, Any]] = {
    "uniform": {"sampler": gear.Uniform()},
    "steps": {"sampler": gear.Uniform(unit="step"), "windows": gear.Window(1)},
    "a pass": {"sampler": gear.Uniform(replacement=False)},
    "annealed": {"sampler": gear.Prioritized(0.6, gear.LinearSchedule(0.4, 1.0, batches=9))},
    "steps by priority": {"sampler": gear.Prioritized(1.0, unit="step", normalize="table")},
    "distinct": {"sampler": gear.Prioritized(0.6, replacement=False)},
    "packed": {"sampler": gear.Uniform(), "windows": gear.Whole(), "layout": "packed"},
    "packed by priority": {"sampler": gear.Prioritized(0.6), "windows": gear.Whole(), "layout": "packed"},
}


class Place:
    """A GPU, or the stand-in with its threads.

    Attributes:
        disks, serving: contexts in which tables with disks, and with names, are made and closed.
    """

    def __init__(
        self,
        threads: Any = threading,
        give_way: Callable[[], object] = lambda: time.sleep(0),
        disks: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
        serving: Callable[[], contextlib.AbstractContextManager[None]] = contextlib.nullcontext,
    ) -> None:
        self._threads, self.give_way, self.disks, self.serving = threads, give_way, disks, serving

    def start(self, target: Callable[[], None]) -> Callable[[], None]:
        """Start a thread; gives what waits for it, and raises its error."""
        errors: list[BaseException] = []

        def run() -> None:
            try:
                target()
            except BaseException as error:
                errors.append(error)

        thread = self._threads.Thread(target=run)
        thread.start()

        def join() -> None:
            thread.join()
            if errors:
                raise errors[0]

        return join


@pytest.fixture(params=[pytest.param("GPU", marks=pytest.mark.gpu), "stand-in"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    if request.param == "GPU":
        yield Place()
        torch.cuda.synchronize()
        return
    if REAL:
        pytest.skip("there is a real torch.cuda")
    with instead.installed("random") as cuda:
        yield Place(cuda.threads.threading, cuda.threads.switch, cuda.disks_in_turn, cuda.serving_blocks)
        gc.collect()
    cuda.check()


def rows_of(number: int) -> dict[str, Any]:
    """A trajectory whose steps tell its number and their own."""
    steps = np.arange(6 + number % 5)
    return {
        "number": 1000 * number + steps,
        "wide": np.full((len(steps), 33), number, np.float32),
        "task": np.array(number),
    }


@contextlib.contextmanager
def made_table(count: int = 40, **options: Any) -> Iterator[gear.Table]:
    schema = {
        "number": gear.Column(torch.int64),
        "wide": gear.Column(torch.float32, (33,)),
        "task": gear.Column(torch.int64, per="trajectory"),
    }
    told = {"max_steps": 600, "max_trajectories": 60, "block_steps": 4, "on_full": "evict_oldest"}
    with gear.Table.create(schema, **{**told, **options}) as table:
        for number in range(count):
            table.add(rows_of(number), priority=1.0 + number % 3)
        yield table


def dataset(table: gear.Table, kind: str, device: str = DEVICE, **options: Any) -> gear.ReplayDataset:
    told = {"batch_size": 8, "windows": gear.Window(4, -1), "seed": 3, "device": device, **KINDS[kind]}
    if kind != "a pass":
        told["batches_per_epoch"] = 12
    return gear.ReplayDataset(table, **{**told, **options})


def on_host(batch: Any) -> Any:
    if isinstance(batch, dict):
        return {name: on_host(value) for name, value in batch.items()}
    return batch.cpu().clone() if isinstance(batch, torch.Tensor) else batch


def check(batch: Any) -> None:
    """Each row is of one trajectory, at the steps that it says."""
    found = on_host(dict(batch))
    number, task = found["number"], found["task"].view(-1, 1)
    if "cu_seqlens" in found:
        row = torch.repeat_interleave(torch.arange(len(task)), found["cu_seqlens"].diff())
        assert torch.equal(number, 1000 * task[row, 0] + found["position"])
        assert torch.equal(found["wide"], task[row].float().expand(-1, 33))
        return
    if number.dim() == 1:
        number, found["wide"] = number[:, None], found["wide"][:, None]
    offset = -1 if number.shape[1] > 1 else 0
    steps = found["anchor"][:, None] + torch.arange(number.shape[1]) + offset
    mask = found["mask"].view(number.shape) if "mask" in found else torch.ones_like(number, dtype=torch.bool)
    assert torch.equal(number, torch.where(mask, 1000 * task + steps, 0))
    assert torch.equal(found["wide"], (mask * task).float()[:, :, None].expand(-1, -1, 33))
    if "priority_weight" in found:
        assert ((found["priority_weight"] > 0) & (found["priority_weight"] <= 1)).all()


def equal(found: Any, expected: Any) -> None:
    for name, value in expected.items():
        if isinstance(value, dict):
            equal(found[name], value)
        elif name == "priority_weight":
            torch.testing.assert_close(found[name].cpu(), value, rtol=1e-5, atol=0)
        elif isinstance(value, torch.Tensor):
            assert torch.equal(found[name].cpu(), value), name


@pytest.mark.parametrize("kind", mostly_long(KINDS, "uniform", "annealed", "steps by priority", "packed"))
def test_batches_and_their_replays_are_those_of_the_cpu(place: Place, kind: str) -> None:
    """Two epochs, with new priorities; the first batches of a set of buffers are recorded, the others replayed."""
    with made_table() as table:
        found, expected = dataset(table, kind), dataset(table, kind, "cpu")
        for _ in range(2):
            for batch, other in zip(found, expected, strict=True):
                check(batch)
                equal(batch, other)
                if "priority_weight" in other:
                    new = 1.0 + torch.arange(8) % 5
                    found.update_priority(batch, new.to(DEVICE))
                    expected.update_priority(other, new)
        for _ in range(6):
            equal(found.sample(), expected.sample())
        del batch, found


@pytest.mark.parametrize("kind", ["uniform", "steps"])
def test_rows_that_the_gpu_draws_are_those_of_the_cpu(place: Place, kind: str) -> None:
    """Of batches that are large enough, while the table stands still; one change of it in between."""
    with made_table() as table:
        options: dict[str, Any] = {"batch_size": 128, "batches_per_epoch": 60}
        found = dataset(table, kind, **options)
        expected = dataset(table, kind, "cpu", **options)
        for number, (batch, other) in enumerate(zip(found, expected, strict=True)):
            check(batch)
            equal(batch, other)
            if number == 35:
                table.add(rows_of(100))
        selection: Any = found._selected()
        assert selection._on_gpu._held.all()
        del batch, found


@pytest.mark.parametrize(
    ("size", "host"), [("1GiB", None), (None, "1MiB"), ("1GiB", 25_000)], ids=["disk", "host", "both"]
)
@pytest.mark.parametrize("kind", mostly_long(["uniform", "annealed", "packed"], "annealed", "packed"))
def test_a_table_in_the_memory_of_the_gpu_with_others_below(
    place: Place, kind: str, size: Any, host: Any, tmp_path: Path
) -> None:
    """It has memory for half of its trajectories."""
    disk, memory = gear.Disk(tmp_path, sync_seconds=0.05, size=size), gear.Memory(max_blocks=50)
    with place.disks(), made_table() as whole:
        with made_table(device=DEVICE, disk=disk, memory=memory, host=host) as table:
            found, expected = dataset(table, kind), dataset(whole, kind, "cpu")
            for batch, other in zip(found, expected, strict=True):
                check(batch)
                equal(batch, other)
            stats = table.stats()
            assert (0 < stats.num_spilled < len(table)) == (size is not None)
            assert (stats.host_part_bytes > 0) == (host is not None)
            del batch, found
        with gear.Table.recover(disk, device=DEVICE, host=host, max_blocks=50 if host else None) as table:
            check(dataset(table, kind).sample())
            for one, other in zip(table.indices().tolist(), whole.indices().tolist(), strict=True):
                equal(table[one], whole[other])


@pytest.mark.parametrize("host", [None, "1MiB"])
def test_a_forked_child_reads_a_table_in_the_memory_of_the_gpu(place: Place, host: Any) -> None:
    options = {"device": DEVICE, "name": fresh_name(), "memory": gear.Memory(max_blocks=50 if host else 150)}
    with place.serving(), made_table() as whole, made_table(**options, host=host) as table:
        try:
            if (child := os.fork()) == 0:
                status = 1
                signal.alarm(100)
                try:
                    torch.set_num_threads(1)  # those of the parent are not here
                    for kind in ("uniform", "packed"):
                        found, expected = (dataset(each, kind, "cpu", prefetch=0) for each in (table, whole))
                        for batch, other in zip(found, expected, strict=True):
                            check(batch)
                            equal(batch, other)
                    status = 0
                finally:
                    os._exit(status)
            assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
            for index in table.indices().tolist():
                equal(table[index], whole[index])
        finally:
            table.unlink()


@pytest.mark.parametrize("kind", mostly_long(["uniform", "annealed", "packed"], "annealed", "packed"))
def test_batches_that_are_held_long_stay_as_they_are(place: Place, kind: str) -> None:
    """While twice as many trajectories are added as the table holds."""
    with made_table() as table:
        held = []
        for number, batch in enumerate(dataset(table, kind, batches_per_epoch=30, prefetch=3)):
            check(batch)
            held.append((batch, on_host(dict(batch))))
            for added in range(4):
                table.add(rows_of(100 + 4 * number + added))
        for batch, expected in held:
            equal(batch, expected)


def captured(stream: Any, value: torch.Tensor) -> Any:
    """A user's graph that adds 1 to a tensor twice."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.stream(stream):
        graph.capture_begin(capture_error_mode="global")
        value.add_(1)
        value.add_(1)
        graph.capture_end()
    return graph


@pytest.mark.parametrize(
    ("kind", "where"),
    mostly_long(
        itertools.product(["uniform", "annealed", "packed"], ["this thread", "another thread"]),
        ("annealed", "another thread"),
        ("packed", "this thread"),
    ),
)
def test_captures_of_the_user_and_batches_do_not_disturb_each_other(
    place: Place, kind: str, where: str
) -> None:
    with made_table() as table:
        data, stream, value = (
            dataset(table, kind, batches_per_epoch=30),
            torch.cuda.Stream(),
            torch.zeros(4, device=DEVICE),
        )
        torch.cuda.synchronize()
        ended, counts = [False], [0]

        def capture() -> None:
            graph = captured(stream, value)
            with torch.cuda.stream(stream):
                graph.replay()
            counts[0] += 1

        def all_captures() -> None:
            while not ended[0] and counts[0] < 200:
                capture()
                time.sleep(0)

        # Beside a capture in another thread only our calls are allowed: the batches are looked at afterwards.
        join = place.start(all_captures) if where == "another thread" else None
        held = []
        try:
            for batch in data:
                held.append(batch)
                if join is None:
                    capture()
        finally:
            ended[0] = True
            if join is not None:
                join()
        torch.cuda.synchronize()
        for batch in held:
            check(batch)
        assert counts[0] > 0
        assert value.tolist() == [2.0 * counts[0]] * 4
        del batch, held, data


@pytest.mark.parametrize("kind", ["uniform", "annealed"])
def test_a_call_from_a_stream_that_captures_is_refused(place: Place, kind: str) -> None:
    with made_table() as table:
        data, stream = dataset(table, kind), torch.cuda.Stream()
        check(data.sample())
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="global")
            try:
                with pytest.raises(GpuError, match="is capturing a CUDA graph"):
                    data.sample()
            finally:
                graph.capture_end()
        for _ in range(4):
            check(data.sample())


@pytest.mark.parametrize(
    "kind", mostly_long(["uniform", "annealed", "distinct", "packed"], "distinct", "packed")
)
@pytest.mark.parametrize("home", ["host", pytest.param("GPU and host", marks=pytest.mark.long)])
def test_a_writer_that_evicts_beside_batches(place: Place, kind: str, home: str) -> None:
    """For seconds: no row is torn, or of a trajectory that came later."""
    options: dict[str, Any] = {}
    if home == "GPU and host":  # trajectories move to the latter, and are evicted there
        options = {"device": DEVICE, "memory": gear.Memory(max_blocks=50), "host": 50_000}
    with made_table(**options) as table:
        data, ended, begin = dataset(table, kind, batches_per_epoch=float("inf")), [False], time.monotonic()

        def write() -> None:
            number = 100
            while not ended[0] and (REAL or number < 160):
                table.add(rows_of(number), priority=1.0 + number % 3)
                number += 1
                place.give_way()

        join = place.start(write)
        for count, batch in enumerate(data):
            check(batch)
            if "priority_weight" in batch and count % 2:
                data.update_priority(batch, torch.rand(8, device=DEVICE) + 0.5)
            if count >= 30 and time.monotonic() - begin >= SECONDS:
                break
        ended[0] = True
        join()
        del batch, data


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["uniform", "annealed", "packed"])
def test_interrupts_while_work_is_recorded(kind: str) -> None:
    """Ctrl-C at any moment of the first batches of a dataset: the next ones are right."""
    choose = random.Random(kind)

    def interrupt(*_: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        with made_table() as table:
            for _ in range(100):
                data = dataset(table, kind, prefetch=0)
                with contextlib.suppress(KeyboardInterrupt):
                    try:
                        signal.setitimer(signal.ITIMER_REAL, choose.uniform(1e-5, 3e-3))
                        for _ in range(6):
                            data.sample()
                    finally:
                        signal.setitimer(signal.ITIMER_REAL, 0)
                for _ in range(4):
                    check(data.sample())
    finally:
        signal.signal(signal.SIGALRM, before)
