"""How batches for a GPU are ordered, kept and copied, with a stand-in for CUDA and the gather kernel interpreted."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from cuda_common import FakeCuda, OnCpu
from options_common import nested
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.collection import ticket_releaser
from gear_loader.errors import GpuError
from gear_loader.storage.operations.view import READING
from gear_loader.utils import driver as drivers
from gear_loader.utils import notices
from gear_loader.utils.captures import RELAXED, allow_captures

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="test_gather_gpu.py uses CUDA itself")
DEVICE = torch.device("cuda", 1)
BATCH = 6


class Driver:
    """Stands for libcuda: which threads have said that others may capture graphs."""

    def __init__(self) -> None:
        self.modes: dict[str, int] = {}

    def cuDeviceGet(self, device: Any, index: int) -> int:
        return 1  # of which nothing is known

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        name = threading.current_thread().name
        before, self.modes[name] = self.modes.get(name, 0), mode._obj.value
        mode._obj.value = before
        return 0

    def cuStreamIsCapturing(self, stream: int, status: Any) -> int:
        return 0

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:
        return 1  # so that PyTorch's are used

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        return 1  # none is built


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    return FakeCuda(monkeypatch)


@pytest.fixture
def driver(monkeypatch: pytest.MonkeyPatch) -> Driver:
    made = Driver()
    monkeypatch.setattr(drivers, "library", lambda: made)
    return made


@pytest.fixture
def on_cpu() -> Iterator[OnCpu]:
    with OnCpu() as mode:
        yield mode


@pytest.fixture
def table() -> Iterator[gear.Table]:
    schema = {"value": gear.Column(torch.float32, (4,)), "number": gear.Column(torch.int64)}
    schema["task"] = gear.Column(torch.int64, (2,), per="trajectory")
    with gear.Table.create(schema, max_steps=500, max_trajectories=50, block_steps=4) as table:
        for number in range(30):
            length = 3 + number % 5
            table.add(
                {
                    "value": np.full((length, 4), number, np.float32),
                    "number": 100 * number + np.arange(length),
                    "task": np.array([number, -number]),
                }
            )
        yield table


def dataset(table: gear.Table, device: Any = DEVICE, **options: Any) -> gear.ReplayDataset:
    windows = {"value": gear.Window(3, -2), "number": gear.Window(2), "task": None}
    return gear.ReplayDataset(
        table,
        **nested(
            {"batch_size": BATCH, "windows": windows, "device": device, "batches_per_epoch": 8, **options}
        ),
    )


def readers(table: gear.Table) -> int:
    return int((table._engine.region.array("readers")[:, READING] > 0).sum())


def same(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        if isinstance(value, dict):
            same(found[key], value)
        else:
            assert torch.equal(found[key], value), key


@pytest.mark.parametrize("returns", [False, True])
def test_windows_of_later_known_steps_are_copies_of_what_the_cpu_gathers(
    cuda: FakeCuda, driver: Driver, on_cpu: OnCpu, table: gear.Table, returns: bool
) -> None:
    """Those of times, and those around the steps that returns bootstrap from."""
    windows: dict[str, Any] = {"number": gear.Window(2), "task": None}
    if returns:
        following = {"value": gear.Window(3, -2, pad="edge")}
        windows |= {"value": gear.Window(3, -2, pad="edge")}
        windows |= {"target": gear.NStep("number", 2, 0.9, done="number", next=following)}
    else:
        windows["value"] = gear.Window(at=[-1, 0, 2], timestamps="number", tolerance=0)
    samplers = gear.Uniform(), gear.Prioritized(unit="step")
    for sampler in samplers:  # of which the GPU draws the second one, if it gathers
        expected = list(dataset(table, "cpu", copy=True, windows=windows, sampler=sampler))
        found = list(dataset(table, copy=True, windows=windows, sampler=sampler, prefetch=0))
        assert len(found) == len(expected) == 8
        for one, other in zip(found, expected, strict=True):
            same(one, other)
            assert one["mask"]["value"].shape == (BATCH, 3)
            assert not returns or one["target"]["next"]["value"].shape == (BATCH, 3, 4)


@pytest.mark.parametrize("prefetch", mostly_long([0, 2], 2))
def test_copies_are_made_on_the_gpu_without_waiting(
    cuda: FakeCuda, driver: Driver, on_cpu: OnCpu, table: gear.Table, prefetch: int
) -> None:
    expected = list(dataset(table, "cpu", copy=True))
    data = dataset(table, copy=True, prefetch=prefetch)
    found, waits = [], []
    for batch in data:
        found.append(batch)
        waits.append(on_cpu.blocking)
        assert batch["value"].data_ptr() in cuda.recorded  # the consumer's stream is known to the allocator
    for one, other in zip(found, expected, strict=True):
        same(one, other)
    places = [batch["value"].data_ptr() for batch in found]
    assert len(set(places)) == len(found)  # memory of their own
    assert found[0]["mask"]["value"].data_ptr() != found[1]["mask"]["value"].data_ptr()
    ring = prefetch + data.keep  # sets of buffers; making them may wait
    assert waits[ring:] == [waits[ring]] * len(waits[ring:])
    assert cuda.host_waits == 0
    # The stream that fills waits for nothing that the consumer does.
    (pool,) = data._buffers.pools.values()
    stream: Any = pool.stream
    assert len(pool.free) + len(pool.delivered) <= ring
    assert {event.records for event in stream.waited} == {0}


def test_a_smaller_last_batch_is_copied_alone(
    cuda: FakeCuda, driver: Driver, on_cpu: OnCpu, table: gear.Table
) -> None:
    options: dict[str, Any] = {
        "sampler": gear.Uniform(replacement=False), "batch_size": 8, "batches_per_epoch": None, "copy": True
    }  # fmt: skip
    found, expected = (list(dataset(table, device, **options)) for device in (DEVICE, "cpu"))
    assert [len(batch["index"]) for batch in found] == [8, 8, 8, 6]
    windows = dict.fromkeys(("value", "number"), gear.Window(3))
    mask: Any = dataset(table, windows=windows, copy=True).sample()["mask"]
    assert mask["value"] is mask["number"]  # a mask, and its copy, are shared
    for one, other in zip(found, expected, strict=True):
        same(one, other)


@pytest.mark.parametrize(("staged", "copy"), [(False, None), (False, False), (True, None)])
def test_without_copies_buffers_are_used_again_behind_the_consumer(
    cuda: FakeCuda,
    driver: Driver,
    on_cpu: OnCpu,
    table: gear.Table,
    monkeypatch: pytest.MonkeyPatch,
    staged: bool,
    copy: bool | None,
) -> None:
    if staged:
        monkeypatch.setattr(type(table._engine.region), "pin", lambda *_, **__: False)
    data = dataset(table, prefetch=2, copy=copy)
    expected = list(dataset(table, "cpu", copy=True))
    places = []
    for one, other in zip(data, expected, strict=True):
        same(one, other)
        places.append(one["value"].data_ptr())
    assert len(set(places)) == 2 + data.keep
    (pool,) = data._buffers.pools.values()
    stream: Any = pool.stream
    waited = [event for event in stream.waited if event.records]
    assert len(set(waited)) == len(set(places))  # each set's `released`
    (buffers, *_) = [*pool.delivered, *pool.free]
    assert (buffers.gpu.staging is not None) == staged  # type: ignore[union-attr]
    assert buffers.gpu.filled.records > 1  # type: ignore[union-attr]


def test_the_thread_is_on_the_dataset_s_device(
    cuda: FakeCuda, driver: Driver, on_cpu: OnCpu, table: gear.Table
) -> None:
    data = dataset(table)
    for _ in data:
        pass
    wait_until(lambda: readers(table) == 0, "the tickets")
    assert set(cuda.devices_of("event.synchronize")) == {1}
    assert set(cuda.devices_of("record")) <= {0, 1}  # `released`, on the consumer's thread
    main = threading.current_thread().name  # in the default mode again
    assert driver.modes == {"gear-loader-pin": RELAXED, "gear-loader-release": RELAXED, main: 0}
    assert cuda.devices_of("cudaHostRegister") == [1]
    table.close()
    assert cuda.synchronized == [1]
    assert cuda.devices_of("cudaHostUnregister") == [1]


def test_without_the_driver_s_call_a_notice_says_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notices, "_seen", {})
    monkeypatch.setattr(drivers, "library", lambda: None)
    allow_captures()
    assert "(no libcuda.so.1): capture them with torch" in notices.notices()["captures"]
    assert "capture_error_mode='thread_local'" in notices.notices()["captures"]


def test_an_error_of_one_call_is_no_failure_of_the_gpu(
    cuda: FakeCuda, driver: Driver, on_cpu: OnCpu, table: gear.Table
) -> None:
    """As when somebody captures a CUDA graph: the call that met it asks again, and the ticket is given back."""
    data = dataset(table, prefetch=0)
    cuda.hold()
    data.sample()
    event = (cuda.held or [])[0]
    event.error, event.lasting = (
        RuntimeError("CUDA error: operation not permitted when stream is capturing"),
        False,
    )
    cuda.finish()
    wait_until(lambda: readers(table) == 0, "the ticket")
    assert event.error is None
    data.sample()


def test_a_gpu_that_fails_gives_nothing_back(
    cuda: FakeCuda,
    driver: Driver,
    on_cpu: OnCpu,
    table: gear.Table,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Its read tickets and buffers stay reserved, and the next batch is an error that says what to do."""
    monkeypatch.setattr(notices, "_seen", {})
    unfinished: list[Any] = []
    monkeypatch.setattr(ticket_releaser, "_unfinished", unfinished)
    data = dataset(table, prefetch=0)
    cuda.hold()
    data.sample()
    data.sample()
    (pool,) = data._buffers.pools.values()
    pending = cuda.held or []
    for event in pending:
        event.error = RuntimeError("CUDA error: an illegal memory access was encountered")
    cuda.finish()
    wait_until(lambda: len(unfinished) == 2, "the failure")
    assert readers(table) == 2
    for _ in range(2):
        with pytest.raises(
            GpuError, match=r"cuda:1 failed while .* an illegal memory access .* Start the process"
        ):
            data.sample()
    assert [record.message.count("cuda:1 failed") for record in caplog.records] == [1]
    del data, pool
    gc.collect()
    assert len(unfinished) == 2
    assert readers(table) == 2
    for _, ticket in unfinished:
        ticket.end()
