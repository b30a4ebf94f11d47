"""Devices by name, and addresses of arrays."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import data_address
from gear_loader.utils.devices import device_of


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
