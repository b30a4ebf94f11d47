"""CUDA graphs that users capture, in any thread, while batches are made."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import torch

from gear_loader.errors import GpuError
from gear_loader.utils import driver
from gear_loader.utils.notices import notice

__all__ = ["RELAXED", "allow_captures", "is_capturing", "permitting_captures", "refuse_capture"]

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: no call of any thread ends a capture."""


def _exchange(mode: int) -> int:
    """Set this thread's capture mode, and return the one before."""
    library, held = driver.library(), ctypes.c_int(mode)
    code = "libcuda.so.1 cannot be used" if library is None else None
    if library is not None:
        code = library.cuThreadExchangeStreamCaptureMode(ctypes.byref(held)) or None
    if code is not None:
        notice(
            "captures",
            f"Calls that prepare batches may disturb the capture of CUDA graphs ({code}): capture them with "
            "torch.cuda.graph(..., capture_error_mode='thread_local').",
        )
    return held.value


def allow_captures() -> None:
    """Allow other threads to capture CUDA graphs during any call of this thread.

    By default a capture fails if another thread waits for an event or allocates meanwhile, and so does that call.
    """
    _exchange(RELAXED)


class permitting_captures(contextlib.ContextDecorator):
    """`allow_captures` for a block or a function, of a thread that is a user's. May be nested."""

    def __enter__(self) -> None:
        self._before = _exchange(RELAXED)

    def __exit__(self, *_: object) -> None:
        _exchange(self._before)

    def _recreate_cm(self) -> Any:
        return type(self)()


def is_capturing(stream: torch.cuda.Stream) -> bool:
    """Whether work queued on a stream goes into a CUDA graph."""
    library, status = driver.library(), ctypes.c_int()
    if library is None:
        return False
    # An error is left to the call that comes next: it says more.
    return not library.cuStreamIsCapturing(stream.cuda_stream, ctypes.byref(status)) and status.value != 0


def refuse_capture(stream: torch.cuda.Stream, what: str) -> None:
    """Raise GpuError if a stream is capturing a CUDA graph, into which `what` cannot be taken."""
    if is_capturing(stream):
        raise GpuError(
            f"The current stream is capturing a CUDA graph, and {what} cannot be part of one. Call it before the "
            "capture begins, and let the graph read tensors that are filled from the batch. Nothing was changed."
        )
