"""Releases the read tickets of batches that a GPU gathers."""

from __future__ import annotations

import collections
import queue
import time
from collections.abc import Callable, Sequence
from typing import Any

import torch

from gear_loader.collection.buffers import Buffers
from gear_loader.collection.collector import Collector
from gear_loader.errors import GpuError
from gear_loader.utils.background import background_thread
from gear_loader.utils.captures import allow_captures
from gear_loader.utils.notices import notice

_PATIENCE = 0.001
"""Seconds after which a thread releases the read ticket of a batch that was queued on a GPU."""
_unfinished: list[tuple[Sequence[Buffers], Any]] = []


def keep_reserved(buffers: Sequence[Buffers], ticket: Any) -> None:
    """Keep buffers and a read ticket, which a failed GPU may still use, until the process ends."""
    _unfinished.append((buffers, ticket))


def failure_of(wait: Callable[[], object]) -> RuntimeError | None:
    """Wait for a GPU, and return its error, or None.

    An error of CUDA that meets one call alone is none of the GPU: after a failure every later call raises it again.
    """
    failure: RuntimeError | None = None
    for _ in range(2):
        try:
            wait()
        except RuntimeError as error:
            failure = error
        else:
            return None
    return failure


class Reading:
    """A read ticket and the buffers whose queued work reads under it, since a time of `time.monotonic`.

    Args:
        kept: other buffers, whose work is queued before that of `buffers`.
    """

    __slots__ = ("buffers", "kept", "since", "ticket")

    def __init__(self, buffers: Buffers, ticket: Any, kept: Sequence[Buffers] = ()) -> None:
        self.buffers, self.ticket, self.kept, self.since = buffers, ticket, kept, time.monotonic()

    @property
    def event(self) -> int:
        """Handle of the event that is recorded after the work."""
        assert self.buffers.gpu is not None
        return int(self.buffers.gpu.filled.cuda_event)


class TicketReleaser:
    """Releases read tickets when the GPU has finished reading.

    The next batches release the tickets of those before them. What no batch has released for `_PATIENCE` seconds, a
    thread does: one that worked at each batch would take the time of the thread that asks for batches.

    Until then it keeps the buffers, because kernels read their pinned memory. A failed GPU may read on, so its tickets
    and buffers are kept until the process ends, and the next batch raises an error.
    """

    def __init__(self, collector: Collector) -> None:
        index = collector.device.index
        self._device = torch.cuda.current_device() if index is None else index
        self._failure: BaseException | None = None
        # Oldest first. An entry is removed after its ticket has ended; to end one twice, here and in the thread, is
        # harmless.
        self._entries: collections.deque[Reading] = collections.deque()
        self._awake = False  # whether the thread looks at the entries without a signal; it alone sets this
        self._signals: queue.SimpleQueue[bool | None] = queue.SimpleQueue()
        self._thread = background_thread(self._work, "gear-loader-release", stop=self.stop)
        self._thread.start()

    def put(self, buffers: Buffers, ticket: Any, kept: Sequence[Buffers] = ()) -> None:
        """Release `ticket` after the work queued for `buffers`; until then `kept` are kept too, see `Reading`."""
        self._entries.append(Reading(buffers, ticket, kept))
        if not self._awake and self._signals.empty():
            self._signals.put(True)

    def stop(self) -> None:
        """End the thread after it has released all tickets."""
        self._signals.put(None)

    def check(self) -> None:
        """Release the tickets of what the GPU has read. Does not wait for it."""
        while self._failure is None and (entry := self._oldest()) is not None:
            if not self._release(entry, wait=False):
                break

    def readings(self, *buffers: Buffers) -> tuple[list[Reading], list[Reading], bool]:
        """What the GPU may still read under `buffers`, and under others, oldest first; and whether any of `buffers` is
        among it.

        The first are for `end` after these buffers have been filled again: filling waits for the GPU, and from then on
        their event tells nothing of it.

        Raises:
            GpuError: the GPU failed while reading.
        """
        if self._failure is not None:
            raise GpuError(
                f"cuda:{self._device} failed while it gathered an earlier batch: {self._failure} Its read tickets and "
                "buffers stay reserved until this process ends. Start the process again."
            ) from self._failure
        own, others, kept = list[Reading](), list[Reading](), False
        for entry in tuple(self._entries):
            if entry.buffers in buffers:
                own.append(entry)
            else:
                others.append(entry)
                if entry.kept and not kept:
                    kept = any(each in buffers for each in entry.kept)
        return own, others, kept or bool(own)

    def end(self, entries: list[Reading]) -> None:
        """Release the tickets of what the GPU has read meanwhile."""
        for entry in entries:
            entry.ticket.end()
            self._remove(entry)

    def _remove(self, entry: Reading) -> None:
        try:
            self._entries.remove(entry)
        except ValueError:
            return  # another thread has released it meanwhile

    def _work(self) -> None:
        torch.cuda.set_device(self._device)  # for this thread; else waiting would make a context on GPU 0
        allow_captures()
        while self._signals.get() is not None:
            while self._oldest() is not None:
                self._awake = True
                self._release_old()
                self._awake = False  # and looks again: an entry put before this came without a signal
        self._release_old()

    def _release_old(self) -> None:
        """Release all entries, each when it is old enough."""
        while (entry := self._oldest()) is not None:
            age = time.monotonic() - entry.since
            if age < _PATIENCE:
                del entry  # with its memory
                time.sleep(_PATIENCE - age)
                continue
            self._release(entry, wait=True)

    def _oldest(self) -> Reading | None:
        try:
            return self._entries[0]
        except IndexError:
            return None

    def _release(self, entry: Reading, *, wait: bool) -> bool:
        """Release an entry's ticket, unless the GPU has not finished and this shall not wait; return whether."""
        gpu = entry.buffers.gpu
        assert gpu is not None
        done = True

        def look() -> None:
            nonlocal done
            if wait:
                gpu.filled.synchronize()
            else:
                done = gpu.filled.query()

        error = failure_of(look)
        if error is not None:
            keep_reserved((entry.buffers, *entry.kept), entry.ticket)
            if self._failure is None:
                self._failure = error
                notice("gpu-failed", f"cuda:{self._device} failed while it gathered a batch: {error}")
        elif not done:
            return False
        else:
            entry.ticket.end()
        self._remove(entry)
        return True
