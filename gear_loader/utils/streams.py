"""Current streams of a GPU, at a cost that does not count for a small batch.

`torch.cuda.current_stream` and `torch.cuda.stream` cost the host as much as some launches of a kernel.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

__all__ = ["current_stream", "on_stream"]

_raw_stream = getattr(
    torch._C, "_cuda_getCurrentRawStream", None
)  # None without CUDA, and in stand-ins for it
_streams: dict[tuple[int, int], torch.cuda.Stream] = {}


def current_stream(device: torch.device) -> torch.cuda.Stream:
    """See `torch.cuda.current_stream`. Does not wait for the GPU."""
    if _raw_stream is None or device.index is None:
        return torch.cuda.current_stream(device)
    key = device.index, _raw_stream(device.index)
    stream = _streams.get(key)
    if stream is None:
        stream = _streams[key] = torch.cuda.current_stream(device)
    return stream


@contextlib.contextmanager
def on_stream(device: torch.device, stream: torch.cuda.Stream) -> Iterator[None]:
    """Make a device and one of its streams the current ones. Does not wait for the GPU."""
    if _raw_stream is None or torch.cuda.current_device() != device.index:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
        return
    before = current_stream(device)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)
