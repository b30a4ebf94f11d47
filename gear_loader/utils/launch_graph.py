"""CUDA graphs of the work that fills a batch, which the host queues by one call.

Queueing copies and kernels one by one costs the host tens of microseconds each, more than a GPU needs for a small
batch. Recorded by CUDA's driver rather than by `torch.cuda.graph`, which would change the state of torch's random
numbers, that other threads use.
"""

from __future__ import annotations

import ctypes
import functools
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from gear_loader.utils.captures import RELAXED
from gear_loader.utils.notices import notice

__all__ = ["LaunchGraph", "RepeatedWork", "record"]


@functools.cache
def _library() -> Any:
    """The driver's library; None without one that has graphs."""
    try:
        library = ctypes.CDLL("libcuda.so.1")
        pointer = ctypes.c_void_p
        for name, types in (
            ("cuStreamBeginCapture_v2", [pointer, ctypes.c_int]),
            ("cuStreamEndCapture", [pointer, pointer]),
            ("cuGraphInstantiateWithFlags", [pointer, pointer, ctypes.c_ulonglong]),
            ("cuGraphDestroy", [pointer]),
            ("cuGraphExecDestroy", [pointer]),
            ("cuGraphLaunch", [pointer, pointer]),
        ):
            function = getattr(library, name)
            function.argtypes, function.restype = types, ctypes.c_int
    except (OSError, AttributeError):
        return None
    return library


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


def record(queue: Callable[[], object], stream: torch.cuda.Stream) -> LaunchGraph | None:
    """Record what `queue` queues on `stream`, the current one, which is not run; None if that cannot be recorded.

    Args:
        queue: launches kernels that are loaded, and copies between memory that its caller keeps; allocates nothing.
    """
    library = _library()
    if library is None:
        return None
    graph, handle, failure = ctypes.c_void_p(), ctypes.c_void_p(), None
    code = library.cuStreamBeginCapture_v2(stream.cuda_stream, RELAXED)
    if code == 0:
        try:
            queue()
        except Exception as error:
            failure = error
        code = library.cuStreamEndCapture(stream.cuda_stream, ctypes.byref(graph))
    if code == 0 and failure is None:
        code = library.cuGraphInstantiateWithFlags(ctypes.byref(handle), graph, 0)
    if graph.value:
        library.cuGraphDestroy(graph)
    if code or failure is not None or handle.value is None:
        notice(
            "launch-graph", f"Batches are queued kernel by kernel: no CUDA graph of them ({failure or code})."
        )
        return None
    return LaunchGraph(library, handle.value)


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
        self._refused = False

    def run(
        self, key: Hashable, queue: Callable[[], object], stream: torch.cuda.Stream, keep: object = None
    ) -> None:
        """Queue work on `stream`, the current one. Does not wait for the GPU.

        Args:
            key: tells one piece of work from another: equal keys mean equal launches with equal arguments. None for
                work that is not repeated.
            queue: queues it; see `record`.
            keep: what holds the memory that it uses.
        """
        if key is None or self._refused:
            queue()
            return
        if key != self._key:
            self._key, self._graph, self._kept = key, None, None
            queue()
            return
        if self._graph is None:
            self._graph, self._kept = record(queue, stream), keep
            self._refused = self._graph is None
        if self._graph is None:
            queue()
        else:
            self._graph.launch(stream)
