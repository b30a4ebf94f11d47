"""Options of a dataset that depend on the machine."""

from __future__ import annotations

import pytest
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.checks import device_of


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
