"""CUDA graphs of the work that fills a batch, which the host queues by one call.

Queueing copies and kernels one by one costs the host tens of microseconds each, more than a GPU needs for a small
batch. Recorded by CUDA's driver rather than by `torch.cuda.graph`, which would change the state of torch's random
numbers, that other threads use.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from gear_loader.utils import driver
from gear_loader.utils.captures import RELAXED
from gear_loader.utils.notices import notice

_MOST_FAILURES = 3
"""Recordings in which something was allocated, perhaps by another thread, after which no more are tried."""


class LaunchGraph:
    """Recorded work. Its owner keeps all memory that it uses.

    Args:
        library: of the driver. handle: of the executable graph, which is destroyed with this.
    """

    def __init__(self, library: Any, handle: int) -> None:
        self._launch, self._handle = library.cuGraphLaunch, handle
        process = os.getpid()

        def destroy() -> None:
            if os.getpid() == process:  # a forked child has no GPU
                library.cuGraphExecDestroy(handle)

        weakref.finalize(self, destroy).atexit = False

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the work on `stream`. Does not wait for the GPU.

        Raises:
            RuntimeError: the driver refuses.
        """
        code = self._launch(self._handle, stream.cuda_stream)
        if code:
            raise RuntimeError(f"CUDA could not queue a batch: cuGraphLaunch returned {code}.")


class _Allocated(Exception):
    """Memory of the GPU was allocated during a recording: a replay could write where it has become somebody else's."""


class _Recording:
    """The capture of a stream, which ends with the block, whatever is raised in it.

    Attributes:
        graph: what was captured; 0 if it could not be. code: 0, or what the driver returned.
    """

    def __init__(self, library: Any, stream: torch.cuda.Stream) -> None:
        self._library, self._handle = library, stream.cuda_stream
        self._open = False
        self.graph, self.code = ctypes.c_void_p(), 0

    def run(self, queue: Callable[[], object]) -> None:
        """Capture what `queue` queues."""
        try:
            try:
                self._open = True  # before it is: an exception may arrive in between
                self.code = self._library.cuStreamBeginCapture_v2(self._handle, RELAXED)
                if self.code:
                    self._open = False
                else:
                    queue()
            finally:
                self._end()
        finally:
            self._end()  # again: the one above may have been interrupted

    def _end(self) -> None:
        if not self._open:
            return
        code = self._library.cuStreamEndCapture(self._handle, ctypes.byref(self.graph))
        self._open = False
        self.code = self.code or code


def _allocations(stream: torch.cuda.Stream) -> Any:
    """A number that changes when memory of the stream's GPU is allocated; None if PyTorch does not count."""
    try:
        return torch.cuda.memory_stats_as_nested_dict(stream.device)["allocation"]["all"]["allocated"]
    except (KeyError, RuntimeError):  # another allocator
        return None


def record(queue: Callable[[], object], stream: torch.cuda.Stream) -> LaunchGraph | None:
    """Record what `queue` queues on `stream`, the current one, which is not run; None if that cannot be recorded.

    Args:
        queue: launches kernels that are loaded, and copies between memory that its caller keeps; allocates nothing.

    Raises:
        _Allocated: memory of the GPU was allocated meanwhile, by `queue` or another thread.
    """
    library = driver.library()
    if library is None:
        return None
    recording, handle, failure = _Recording(library, stream), ctypes.c_void_p(), None
    before = _allocations(stream)
    try:
        recording.run(queue)
        if recording.code == 0 and _allocations(stream) != before:
            raise _Allocated
        if recording.code == 0:
            recording.code = library.cuGraphInstantiateWithFlags(ctypes.byref(handle), recording.graph, 0)
    except _Allocated:
        raise
    except Exception as error:
        failure = error
    finally:
        if recording.graph.value:
            library.cuGraphDestroy(recording.graph)
    if recording.code or failure is not None or handle.value is None:
        _refuse(failure or recording.code)
        return None
    return LaunchGraph(library, handle.value)


def _refuse(reason: object) -> None:
    notice("launch-graph", f"Batches are queued kernel by kernel: no CUDA graph of them ({reason}).")


class RepeatedWork:
    """The work that fills one set of buffers: queued call by call the first time, recorded the second, then replayed.

    Attributes:
        scratch: tensors that the work uses, by name; kept with the buffers.
    """

    def __init__(self) -> None:
        self.scratch: dict[Hashable, Any] = {}
        self._key: Hashable = None
        self._graph: LaunchGraph | None = None
        self._kept: object = None
        self._failures = 0

    def run(
        self, key: Hashable, queue: Callable[[], object], stream: torch.cuda.Stream, keep: object = None
    ) -> None:
        """Queue work on `stream`, the current one. Does not wait for the GPU.

        Args:
            key: tells one piece of work from another: equal keys mean equal launches with equal arguments. Numbers that
                change lie in memory that the launches read. None for work that is not repeated.
            queue: queues it; see `record`.
            keep: what holds the memory that it uses.
        """
        if key is None or self._failures >= _MOST_FAILURES:
            queue()
            return
        if key != self._key:
            # In this order: an exception may arrive in between, and no graph must be found under another key.
            self._graph = self._key = self._kept = None
            queue()
            self._key = key
            return
        if self._graph is None:
            self._kept = keep
            self._graph = self._record(queue, stream)
        if self._graph is None:
            queue()
        else:
            self._graph.launch(stream)

    def _record(self, queue: Callable[[], object], stream: torch.cuda.Stream) -> LaunchGraph | None:
        try:
            graph = record(queue, stream)
        except _Allocated:
            self._failures += 1
            if self._failures == _MOST_FAILURES:
                _refuse(
                    "memory was allocated during each of 3 recordings, by other threads or a defect of ours"
                )
            return None
        if graph is None:
            self._failures = _MOST_FAILURES
        return graph
