"""GPUs that do not read registered host memory over PCIe: those of coherent machines, and of AMD."""

from __future__ import annotations

import ctypes
import gc
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cuda_common import OnCpu, played_on_cpu
from dataset_common import on_host
from streams.cuda import Cuda

import gear_loader as gear
from gear_loader.storage import numa
from gear_loader.utils import driver, notices

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
PAGEABLE, HOST_PAGE_TABLES = 88, 100
LAYOUTS: dict[str, dict[str, Any]] = {
    "padded": {"windows": gear.Window(3)},
    "packed": {"windows": gear.Whole(), "layout": "packed"},
}


def made_table() -> gear.Table:
    schema = {"value": gear.Column(torch.float32, (5,)), "task": gear.Column(torch.int64, per="trajectory")}
    table = gear.Table.create(schema, max_steps=80, max_trajectories=12, block_steps=4)
    for number in range(9):
        table.add({"value": torch.full((2 + number % 6, 5), float(number)), "task": number})
    return table


@pytest.fixture
def rocm(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    """PyTorch for ROCm on the stand-in; loading CUDA's driver is an error."""
    library, load = driver.library.__wrapped__, ctypes.CDLL

    def refusing(name: Any, *args: Any, **options: Any) -> Any:
        assert "libcuda" not in str(name), "libcuda was loaded"
        return load(name, *args, **options)

    for mode in played_on_cpu(monkeypatch):
        monkeypatch.setattr(driver, "library", library)
        monkeypatch.setattr(torch.version, "hip", "6.4.1")
        monkeypatch.setattr(ctypes, "CDLL", refusing)
        monkeypatch.setattr(notices, "_seen", {})  # other tests have said why they do not pin
        yield mode


def batches(table: gear.Table, device: str, **options: Any) -> list[dict[str, Any]]:
    data = gear.ReplayDataset(
        table, batch_size=4, device=device, seed=3, batches_per_epoch=6, prefetch=0, **options
    )
    found = []
    for batch in data:
        found.append(
            {name: on_host(value) for name, value in batch.items() if isinstance(value, torch.Tensor)}
        )
        found[-1] = {name: value.clone() for name, value in found[-1].items()}
    assert {each.zero_copy for each in data._buffers.collectors} == {ZERO_COPY[device]}
    del data, batch
    gc.collect()
    return found


ZERO_COPY = {"cpu": False, "cuda:0": False, "cuda:1": True}


def same(found: list[dict[str, Any]], expected: list[dict[str, Any]]) -> None:
    for one, other in zip(found, expected, strict=True):
        assert one.keys() == other.keys()
        assert all(torch.equal(one[name], other[name]) for name in other)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_rocm_gets_batches_that_the_cpu_gathers(rocm: OnCpu, layout: str) -> None:
    options = LAYOUTS[layout]
    with made_table() as table:
        same(batches(table, "cuda:0", **options), batches(table, "cpu", **options))
        options = {**options, "sampler": gear.Prioritized()}
        same(batches(table, "cuda:0", **options), batches(table, "cpu", **options))
        assert not table.pin()
    assert "PyTorch for ROCm (6.4.1): batches are gathered on the CPU" in notices.notices()["pin"]
    assert numa.node_of_gpu(0) is None
    assert not driver.reads_pageable_memory(0)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("attributes", [{PAGEABLE}, {PAGEABLE, HOST_PAGE_TABLES}], ids=["refused", "asked"])
def test_a_coherent_gpu_reads_memory_that_is_not_registered(layout: str, attributes: set[int]) -> None:
    """Registration is refused there. Another GPU of the machine, on PCIe, gets copies."""
    options, cuda = LAYOUTS[layout], Cuda(0, "eager")
    with made_table() as table:
        expected = batches(table, "cpu", **options)
    cuda.pageable, cuda.refuses = {1: attributes}, 801
    with cuda.installed(), made_table() as table:
        same(batches(table, "cuda:1", **options), expected)
        assert not cuda.memory.registered
        if HOST_PAGE_TABLES in attributes:
            same(batches(table, "cuda:0", **options), expected)
    cuda.check()


def test_pages_are_not_read_by_software_that_moves_them() -> None:
    """A GPU on PCIe may read host memory so (HMM). Its memory is registered; a limit of locked memory means copies."""
    cuda = Cuda(0, "eager")
    cuda.pageable = {1: {PAGEABLE}}
    with cuda.installed(), made_table() as table:
        assert not driver.reads_pageable_memory(1)
        assert not driver.reads_pageable_memory(1, 2)
        assert table.pin("cuda:1")
        assert cuda.memory.registered
