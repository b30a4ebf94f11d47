"""CUDA graphs that other threads capture."""

from __future__ import annotations

import ctypes

from gear_loader.utils.notices import notice

__all__ = ["RELAXED", "allow_captures"]

RELAXED = 2
"""CU_STREAM_CAPTURE_MODE_RELAXED: no call of any thread ends a capture."""


def allow_captures() -> None:
    """Allow other threads to capture CUDA graphs during any call of this thread.

    By default a capture fails if another thread waits for an event or allocates meanwhile.
    """
    try:
        exchange = ctypes.CDLL("libcuda.so.1").cuThreadExchangeStreamCaptureMode
        code: int | str = exchange(ctypes.byref(ctypes.c_int(RELAXED)))
    except (OSError, AttributeError) as error:
        code = str(error)
    if code != 0:
        notice(
            "captures",
            f"Threads that prepare batches may disturb the capture of CUDA graphs ({code}): capture them with "
            "torch.cuda.graph(..., capture_error_mode='thread_local').",
        )
