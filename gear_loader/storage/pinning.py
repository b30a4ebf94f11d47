"""Pinning: registers a region's memory with CUDA in a thread, so that the table is usable meanwhile."""

from __future__ import annotations

import contextlib
import logging
import threading
import time
import warnings
from collections.abc import Callable

import torch

from gear_loader.errors import GpuError
from gear_loader.storage.pages import populate
from gear_loader.utils import driver
from gear_loader.utils.background import background_thread, is_ending
from gear_loader.utils.captures import allow_captures
from gear_loader.utils.formatting import size
from gear_loader.utils.notices import notice
from gear_loader.utils.progress import progress_bar

_logger = logging.getLogger("gear_loader")
_CHUNK = 1 << 30
"""Bytes of one cudaHostRegister call, after which progress is shown and `stop` is obeyed. One of 512 GiB fails."""
_SHOWN = 1 << 30  # bytes from which on a waiting thread shows a progress bar
_LONG = 1 << 33  # bytes from which on a notice says what it waits for
_LOOK = 0.1  # seconds between looks at the progress
_STALLED = 120.0  # seconds without progress after which waiting is an error


class Pinning:
    """One registration in progress.

    Args:
        base, total: first address and number of bytes, multiples of the page size.
        device: CUDA device in whose context the memory is registered.
        ended: called in the thread with True when all memory is registered, or the device needs no registration; False
            if CUDA refuses, None if it was stopped or failed otherwise; in the last two cases no memory is registered.

    Attributes:
        registered: first addresses of the chunks registered so far.
        done: bytes registered so far.
    """

    def __init__(self, base: int, total: int, device: int, ended: Callable[[bool | None], None]) -> None:
        self._base, self._total, self._device = base, total, device
        self._call_ended = ended
        self.registered: list[int] = []
        self.done = 0
        self._stopped = False
        self._failure: BaseException | None = None
        self._ended = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self) -> None:
        """Start the thread.

        Raises:
            GpuError: the process is ending.
        """
        if is_ending():
            raise GpuError("This process is ending; memory cannot be pinned any more.")
        self._thread = background_thread(self._run, "gear-loader-pin", stop=self.stop)
        self._thread.start()

    def stop(self) -> None:
        """Let the thread unregister everything and end, after the running call. Does not wait."""
        self._stopped = True

    def join(self, timeout: float) -> None:
        """Wait for the end of the thread."""
        if self._thread is not None:
            self._thread.join(timeout)

    def wait(self) -> None:
        """Wait until the thread has ended, with a progress bar where there is a terminal.

        Raises:
            GpuError: no progress for two minutes. Otherwise what the thread raised.
        """
        if self._total >= _LONG:
            notice(
                "pinning",
                f"Pinning {size(self._total)} of host memory for the GPU, about 0.1 s a GB, and waiting for it. "
                "Table.pin(wait=False), before the table is filled, does it in the background.",
            )
        shown, began = 0, time.monotonic()
        with progress_bar("Pinning", self._total, enabled=self._total >= _SHOWN) as (advance, _):
            while not self._ended.wait(_LOOK):
                if self.done > shown:
                    advance(self.done - shown)
                    shown, began = self.done, time.monotonic()
                elif time.monotonic() - began > _STALLED:
                    raise GpuError(
                        f"Pinning has made no progress for {_STALLED:g} s after {size(shown)} of {size(self._total)}: "
                        "cudaHostRegister, or the allocation of the memory before it, has not returned. Look for "
                        "exhausted memory and for driver errors (dmesg), and start the process again."
                    )
        if self._failure is not None:
            raise self._failure

    # ---------------------------------------------------------------- in the thread

    def _run(self) -> None:
        pinned: bool | None = None
        try:
            allow_captures()
            with torch.cuda.device(self._device):
                try:
                    pinned = self._register()
                finally:
                    if not pinned:
                        unregister(self.registered)
        except BaseException as error:
            self._failure, pinned = error, None
        try:
            self._call_ended(pinned)
        finally:
            self._ended.set()

    def _register(self) -> bool | None:
        began, end = time.perf_counter(), self._base + self._total
        if driver.reads_pageable_memory(self._device):
            _logger.info("cuda:%d reads host memory as it is: nothing was pinned.", self._device)
            return True
        for start in range(self._base, end, _CHUNK):
            count = min(_CHUNK, end - start)
            if not self._stopped:
                populate(start, count)  # in several threads; the call below allocates pages in one
            if self._stopped:
                return None
            code = int(torch.cuda.cudart().cudaHostRegister(start, count, 1))
            if code != 0:
                _clear_cuda_error()
                if not self.registered and driver.reads_pageable_memory(self._device, code):
                    return True
                notice(
                    "pin",
                    f"CUDA refused to pin {size(count)} of host memory, after {size(self.done)} of "
                    f"{size(self._total)} (cudaHostRegister returned {code}): batches are gathered on the CPU and "
                    "copied. Raise the locked-memory limit (ulimit -l) or the container's memory.",
                )
                return False
            self.registered.append(start)
            self.done += count
        seconds = time.perf_counter() - began
        _logger.info(
            "Pinned %s of host memory in %.2f s (%.1f GB/s).",
            size(self._total),
            seconds,
            self._total / 1e9 / max(seconds, 1e-9),
        )
        return True


def unregister(addresses: list[int]) -> None:
    """Unregister chunks by their first addresses, and remove them from the list; a refusal is a warning."""
    while addresses:
        code = int(torch.cuda.cudart().cudaHostUnregister(addresses.pop()))
        if code != 0:
            _clear_cuda_error()
            warnings.warn(f"cudaHostUnregister returned {code}.", RuntimeWarning, stacklevel=3)


def _clear_cuda_error() -> None:
    # A failed runtime call leaves an error code for the next launch check of this thread; a tiny launch consumes it.
    with contextlib.suppress(RuntimeError):
        torch.zeros(1, device=torch.device("cuda", torch.cuda.current_device())).add_(1)
