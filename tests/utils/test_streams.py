"""Current streams, found without torch's own look-up, with a stand-in for CUDA."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from gear_loader.utils import streams

GPU = torch.device("cuda", 1)


class Cuda:
    """Two devices: the current stream of each, by its handle, and how often torch was asked for it."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.device, self.handles, self.asked, self.slow = 1, {0: 70, 1: 71}, 0, 0
        patch.setattr(streams, "_raw_stream", lambda index: self.handles[index])
        patch.setattr(streams, "_streams", {})
        for name in ("current_stream", "set_stream", "current_device", "stream", "device"):
            patch.setattr(torch.cuda, name, getattr(self, f"_{name}"))

    def _current_stream(self, device: torch.device) -> Any:
        self.asked += 1
        return self.handles[device.index]

    def _set_stream(self, stream: int) -> None:
        self.handles[self.device] = stream

    def _current_device(self) -> int:
        return self.device

    @contextlib.contextmanager
    def _device(self, device: torch.device) -> Iterator[None]:
        before, self.device = self.device, device.index
        yield
        self.device = before

    @contextlib.contextmanager
    def _stream(self, stream: int) -> Iterator[None]:
        self.slow += 1
        before = self.handles[self.device]
        self.handles[self.device] = stream
        yield
        self.handles[self.device] = before


def test_a_stream_is_looked_up_once_and_follows_what_is_current(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    for _ in range(3):
        assert streams.current_stream(GPU) == 71
        assert streams.current_stream(torch.device("cuda", 0)) == 70
    assert cuda.asked == 2
    cuda.handles[1] = 99
    assert streams.current_stream(GPU) == 99
    assert streams.current_stream(GPU) == 99
    assert cuda.asked == 3


def test_a_stream_is_current_within_and_the_one_before_after_an_error(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cuda = Cuda(monkeypatch)

    def within() -> None:
        with streams.on_stream(GPU, 5):  # type: ignore[arg-type]
            assert streams.current_stream(GPU) == 5
            with streams.on_stream(GPU, 6):  # type: ignore[arg-type]
                assert streams.current_stream(GPU) == 6
            assert streams.current_stream(GPU) == 5
            raise KeyError

    with pytest.raises(KeyError):
        within()
    assert (cuda.handles, cuda.slow) == ({0: 70, 1: 71}, 0)


def test_another_device_becomes_current_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    cuda = Cuda(monkeypatch)
    cuda.device = 0
    with streams.on_stream(GPU, 5):  # type: ignore[arg-type]
        assert (cuda.device, cuda.handles) == (1, {0: 70, 1: 5})
    assert (cuda.device, cuda.handles, cuda.slow) == (0, {0: 70, 1: 71}, 1)
