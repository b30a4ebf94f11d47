"""Pinning a table for a GPU: on which device, and what forked processes have of it, with a stand-in for CUDA."""

from __future__ import annotations

import gc
import multiprocessing
import weakref
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cuda_common import FakeCuda
from forks_common import in_child

import gear_loader as gear
from gear_loader.storage import pinning
from gear_loader.storage import region as regions

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="test_gather_gpu.py pins with CUDA itself"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning"),
]
SCHEMA = {"value": gear.Column(torch.float32, (8,))}


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> FakeCuda:
    monkeypatch.setattr(pinning, "_clear_cuda_error", lambda: None)
    return FakeCuda(monkeypatch)


def made(name: str | None = None) -> gear.Table:
    table = gear.Table.create(SCHEMA, max_steps=1000, max_trajectories=100, name=name)
    for number in range(10):
        table.add(rows(number))
    return table


def rows(number: int) -> dict[str, Any]:
    return {"value": np.full((5, 8), number, np.float32)}


USES: list[Callable[[gear.Table], object]] = [
    *(len, lambda table: table.add(rows(0)), lambda table: table.extend([rows(0)]), lambda table: table[0]),
    *(lambda table: table.writer(), lambda table: table.indices(), lambda table: table.remove(0)),
    *(lambda table: table.stats(), lambda table: table.check_valid()),
    lambda table: gear.ReplayDataset(table, batch_size=2, windows=gear.Window(2), device="cpu").sample(),
]


@pytest.mark.parametrize("advice", [18, 9999], ids=["wiped", "left out"])
def test_a_pinned_private_table_is_not_in_forked_processes(
    cuda: FakeCuda, advice: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its pages are not copied there, and every use is an error; the parent goes on, and stays registered."""
    monkeypatch.setattr(regions, "_WIPE_ON_FORK", advice)  # 9999: as with a kernel that does not know it
    table = made()
    assert table._engine.region.pin()
    before = dict(cuda.registered)
    data = gear.ReplayDataset(table, batch_size=2, windows=gear.Window(2), device="cpu")
    data.sample()
    for use in (*USES, lambda _: data.sample()) if advice == 18 else USES[:1]:
        answer = in_child(lambda use=use: str(use(table)))  # type: ignore[misc]
        assert answer.startswith("PrivateTableError: This process ("), answer
        assert "was forked from one that had pinned this private table for a GPU" in answer
        assert "Table.create(..., name='replay')" in answer
    assert in_child(lambda: repr(table)) == "<Table private, of the parent process>"
    assert in_child(lambda: in_child(lambda: str(len(table)))).startswith("PrivateTableError")
    # Neither closing it there, nor the end of the process, touches what the parent registered.
    calls = len(cuda.calls)
    assert in_child(
        lambda: str((table.close(), table._engine.region.is_pinned, len(cuda.calls) - calls))
    ) == ("(None, False, 0)")
    child = multiprocessing.get_context("fork").Process(target=int)  # ends as Python processes do
    child.start()
    child.join(60)
    assert child.exitcode == 0
    assert cuda.registered == before
    for number in range(10):
        assert (table[number]["value"] == number).all()
    table.add(rows(11))
    table.check_valid()
    table.close()
    assert not cuda.registered
    assert in_child(lambda: str(len(table))).startswith("TableClosedError")


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_memory_of_a_gpu_is_not_freed_in_a_forked_child(device: str) -> None:
    """There torch cannot free memory that another stream has used: it ends the process."""
    with made() as table:
        data = gear.ReplayDataset(table, batch_size=2, windows=gear.Window(2), device="cpu")
        data.sample()
        data.device = torch.device(device)
        buffers, selection = weakref.ref(data._buffers), weakref.ref(data._selection)

        def drop() -> str:
            nonlocal data
            data = None  # type: ignore[assignment]
            gc.collect()
            return str([reference() is not None for reference in (buffers, selection)])

        assert in_child(drop) == str([device == "cuda"] * 2)


def test_without_pinning_a_private_table_is_copied_on_write(cuda: FakeCuda) -> None:
    with made() as table:
        assert in_child(lambda: str((table.add(rows(1)), len(table)))) == "(10, 11)"
        cuda.refuse = True
        assert not table._engine.region.pin()  # as before, when CUDA refuses
        assert in_child(lambda: str((table.add(rows(1)), len(table)))) == "(10, 11)"
        assert len(table) == 10


def test_a_named_table_stays_shared_with_forked_processes(cuda: FakeCuda) -> None:
    with made("pinned-and-shared") as table:
        table._engine.region.pin()
        before = dict(cuda.registered)
        assert in_child(lambda: str((table.add(rows(1)), table._engine.region.is_pinned))) == "(10, False)"
        assert len(table) == 11
        assert cuda.registered == before
        table.unlink()


@pytest.mark.parametrize("given", ["cuda:1", "cuda:0"])
def test_pinning_touches_the_dataset_s_device_alone(cuda: FakeCuda, given: str) -> None:
    device = torch.device(given)
    table = made()
    assert table._engine.region.pin(device)
    assert table._engine.region.pin(device)
    assert cuda.devices_of("cudaHostRegister") == [device.index]
    assert {device for _, device in cuda.calls} == {device.index}
    table.close()
    assert cuda.synchronized == [device.index]
    assert cuda.devices_of("cudaHostUnregister") == [device.index]
    assert not cuda.registered


def test_several_devices(cuda: FakeCuda) -> None:
    """All that read are waited for; a refusal is noted, and not tried again."""
    table = made()
    for device in ("cuda:1", "cuda:0", "cuda:1"):
        assert table._engine.region.pin(torch.device(device))
    assert table._engine.region.pin()  # the current one, 0
    assert cuda.devices_of("cudaHostRegister") == [1]
    table.close()
    assert cuda.synchronized == [0, 1]
    cuda.refuse = True
    with made() as table:
        assert not table._engine.region.pin(torch.device("cuda:1"))
        assert not table._engine.region.pin(torch.device("cuda:0"))
        assert cuda.devices_of("cudaHostRegister") == [1, 1]
    assert cuda.synchronized == [0, 1]
