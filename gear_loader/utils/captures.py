"""CUDA graphs that users capture, in any thread, while batches are made."""

from __future__ import annotations

import contextlib
import ctypes
from types import TracebackType

import torch

from gear_loader.errors import GpuError
from gear_loader.utils import driver
from gear_loader.utils.notices import notice
from gear_loader.utils.streams import current_stream

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: no call of any thread ends a capture."""


def _exchange(mode: int) -> int:
    """Set this thread's capture mode, and return the one before."""
    library, held = driver.library(), ctypes.c_int(mode)
    code = None if library is None else library.cuThreadExchangeStreamCaptureMode(ctypes.byref(held))
    if code != 0:
        notice(
            "captures",
            f"Calls that prepare batches may disturb the capture of CUDA graphs ({code or 'no libcuda.so.1'}): capture "
            "them with torch.cuda.graph(..., capture_error_mode='thread_local').",
        )
    return held.value


def allow_captures() -> None:
    """Allow other threads to capture CUDA graphs during any call of this thread.

    By default a capture fails if another thread waits for an event or allocates meanwhile, and so does that call.
    """
    _exchange(RELAXED)


class RelaxedMode:
    """`allow_captures` for a block. A class, because a generator costs more than the driver's calls."""

    __slots__ = ("_before",)

    def __enter__(self) -> None:
        self._before = _exchange(RELAXED)

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        _exchange(self._before)


_NOTHING = contextlib.nullcontext()


def beside_captures(device: torch.device) -> contextlib.AbstractContextManager[None]:
    """`allow_captures` for a block of a user's thread, if the device is a GPU. May be nested."""
    return RelaxedMode() if device.type == "cuda" else _NOTHING


def refuse_capture(device: torch.device, what: str) -> None:
    """Raise GpuError if the current stream is capturing a CUDA graph, into which `what` cannot be taken."""
    if device.type == "cuda":
        consumer_of(device, what)


def consumer_of(device: torch.device, what: str) -> torch.cuda.Stream:
    """The current stream of a GPU, which gets `what`; raises as `refuse_capture`."""
    library, stream, status = driver.library(), current_stream(device), ctypes.c_int()
    if library is not None:
        # An error is left to the call that comes next: it says more.
        library.cuStreamIsCapturing(stream.cuda_stream, ctypes.byref(status))
    if status.value:
        raise GpuError(
            f"The current stream of {device} is capturing a CUDA graph, and {what} cannot be part of one. Call it "
            "before the capture begins, and let the graph read tensors of yours that the batch is copied into. Nothing "
            "was changed."
        )
    return stream
