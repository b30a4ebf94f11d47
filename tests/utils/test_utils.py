"""Devices by name, addresses of arrays, and memory that is available."""

from __future__ import annotations

import shutil
import weakref
from pathlib import Path

import numpy as np
import pytest
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import data_address
from gear_loader.utils.available_memory import available_bytes
from gear_loader.utils.device_option import device_of
from gear_loader.utils.forks import keep_for_ever


def test_the_current_gpu_is_named_where_there_is_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    for name in ("auto", "cuda", torch.device("cuda")):
        assert device_of(name) == torch.device("cuda", 3)
    assert device_of("cuda:1") == torch.device("cuda", 1)
    assert device_of("cpu") == torch.device("cpu")


def test_without_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert device_of("auto") == torch.device("cpu")
    with pytest.raises(SchemaError, match="device is 'cuda:0', but torch sees no CUDA device"):
        device_of("cuda:0")
    for wrong in ("gpu", "meta", None):
        with pytest.raises(SchemaError, match="expected 'auto', 'cpu' or a CUDA device"):
            device_of(wrong)  # type: ignore[arg-type]


@pytest.mark.parametrize("dtype", ["bool", "uint8", "float16", "float32", "int64"])
def test_the_address_of_an_array_is_that_of_its_first_element(dtype: str) -> None:
    array = np.zeros((7, 5), dtype=dtype)
    for view in (array, array[3:], array[:, 2], array[::-1], array[2:2], array.reshape(-1)[11:]):
        assert data_address(view) == view.ctypes.data == view.__array_interface__["data"][0]


def test_available_memory_of_control_groups(tmp_path: Path) -> None:
    proc, groups = tmp_path / "proc", tmp_path / "groups"
    assert available_bytes(proc, groups) is None
    (proc / "self").mkdir(parents=True)
    (proc / "meminfo").write_text("MemTotal: 9000 kB\nMemFree: 1 kB\nMemAvailable:    8000 kB\n")
    assert available_bytes(proc, groups) == 8_192_000
    for version, lines, stat in (
        ("limit_in_bytes usage_in_bytes", "5:cpu:/a\n4:memory:/a/b\n", "total_inactive_file"),
        ("max current", "0::/a/b\n", "inactive_file"),
    ):
        (proc / "self/cgroup").write_text(lines)
        assert available_bytes(proc, groups) == 8_192_000  # a group whose files are not shown
        top = groups / "memory" if "limit" in version else groups
        limit, used = (f"memory.{name}" for name in version.split())
        (top / "a/b").mkdir(parents=True)
        (top / "a" / limit).write_text("5000000\n")
        (top / "a" / used).write_text("2000000\n")
        (top / "a/b" / limit).write_text("max\n")
        (top / "a/b" / used).write_text("2000000\n")
        assert available_bytes(proc, groups) == 3_000_000  # the parent's limit
        (top / "a" / "memory.stat").write_text(f"anon 5\n{stat} 500000\n")
        assert available_bytes(proc, groups) == 3_500_000
        (top / "a/b" / limit).write_text("100000")
        assert available_bytes(proc, groups) == 0
        shutil.rmtree(groups)


def test_what_is_kept_for_ever_is_not_destroyed() -> None:
    class Thing:
        pass

    kept, dropped = Thing(), Thing()
    references = [weakref.ref(kept), weakref.ref(dropped)]
    keep_for_ever(kept, None)
    del kept, dropped
    assert [reference() is not None for reference in references] == [True, False]
