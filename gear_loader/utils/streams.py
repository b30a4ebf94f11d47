"""Current streams of a GPU, at a cost that does not count for a small batch; streams that nobody else has.

`torch.cuda.current_stream` and `torch.cuda.stream` cost the host as much as some launches of a kernel.
"""

from __future__ import annotations

import contextlib
import ctypes
import weakref
from collections.abc import Iterator

import torch

from gear_loader.kernels.devices import current_device
from gear_loader.utils import driver

_NON_BLOCKING = 1
"""CU_STREAM_NON_BLOCKING: no implicit order with the legacy default stream."""

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
    if _raw_stream is None or current_device() != device.index:
        with torch.cuda.device(device), torch.cuda.stream(stream):
            yield
        return
    before = current_stream(device)
    torch.cuda.set_stream(stream)
    try:
        yield
    finally:
        torch.cuda.set_stream(before)


_unused: dict[tuple[int, int], list[torch.cuda.Stream]] = {}


def own_stream(device: torch.device, priority: int, owner: object) -> torch.cuda.Stream:
    """A stream of a GPU that is `owner`'s alone, as long as that lives.

    PyTorch's own lie in a pool of 32, which it hands out again: what is recorded there would hold work of others. A
    stream is never destroyed, because the allocator may know it as a user of memory for longer; it is used again.

    Args:
        device: the GPU, of which this process has a context. priority: as of `torch.cuda.Stream`.
    """
    index = torch.cuda.current_device() if device.index is None else device.index
    unused = _unused.setdefault((index, priority), [])
    try:
        stream = unused.pop()
    except IndexError:
        stream = _new_stream(index, priority)
    weakref.finalize(owner, unused.append, stream).atexit = False
    return stream


def _new_stream(index: int, priority: int) -> torch.cuda.Stream:
    library, handle = driver.library(), ctypes.c_void_p()
    with torch.cuda.device(index):
        # A call of the runtime makes its context current, in which the driver works.
        torch.cuda.mem_get_info(index)
        if library is None or library.cuStreamCreateWithPriority(
            ctypes.byref(handle), _NON_BLOCKING, priority
        ):
            return torch.cuda.Stream(index, priority=priority)
        return torch.cuda.ExternalStream(handle.value, device=index)
