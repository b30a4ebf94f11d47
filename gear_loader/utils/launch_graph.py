"""CUDA graphs of the work that fills a batch, which the host queues by one call.

Queueing copies and kernels one by one costs the host tens of microseconds each, more than a GPU needs for a small
batch. A graph is built of what the launches hand over, node by node: no stream captures, so nothing that other threads
or the allocator do meanwhile can become part of it.
"""

from __future__ import annotations

import ctypes
import os
import weakref
from collections.abc import Callable, Hashable
from typing import Any

import torch

from gear_loader.kernels.launching import hand_to
from gear_loader.utils import driver
from gear_loader.utils.notices import notice

_NUMBERS: dict[str, Any] = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
"""Types of a kernel's arguments, by Triton's names; those of pointers begin with ``*``."""
_PLAIN = {
    "num_ctas": 1,
    "launch_cooperative_grid": False,
    "launch_pdl": False,
    "global_scratch_size": 0,
    "profile_scratch_size": 0,
}
"""What is expected of a compiled kernel: its node says nothing else."""
_WARP = 32


class _Refused(Exception):
    """The driver refuses a node, or a kernel needs what a node does not say."""


class LaunchGraph:
    """Work that can be launched, with the tensors that it uses.

    Args:
        library: of the driver. handle, graph: of the executable graph, and of the one that it was made of, which are
            destroyed with this. kept: as long, tensors and other graphs.

    Attributes:
        handle, graph: as given.
    """

    def __init__(self, library: Any, handle: int, graph: int, kept: list[Any]) -> None:
        self._launch, self.handle, self.graph, self._kept = library.cuGraphLaunch, handle, graph, kept
        process = os.getpid()

        def destroy() -> None:
            if os.getpid() == process:  # a forked child has no GPU
                library.cuGraphExecDestroy(handle)
                library.cuGraphDestroy(graph)

        weakref.finalize(self, destroy).atexit = False

    def launch(self, stream: torch.cuda.Stream) -> None:
        """Queue the work on `stream`. Does not wait for the GPU.

        Raises:
            RuntimeError: the driver refuses.
        """
        code = self._launch(self.handle, stream.cuda_stream)
        if code:
            raise RuntimeError(f"CUDA could not queue a batch: cuGraphLaunch returned {code}.")


class _Nodes:
    """The nodes of a graph, one after another; see `gear_loader.kernels.launching.Builder`.

    Attributes:
        graph: the graph; 0 until there is one. kept: what its nodes use.
    """

    def __init__(self, library: Any) -> None:
        self._library = library
        self._last = ctypes.c_void_p()
        self.graph = ctypes.c_void_p()
        self.kept: list[Any] = []

    def begin(self) -> None:
        """Make an empty graph."""
        self._check("cuGraphCreate", ctypes.byref(self.graph), 0)

    def _check(self, name: str, *arguments: Any) -> None:
        code = getattr(self._library, name)(*arguments)
        if code:
            raise _Refused(f"{name} returned {code}")

    def _add(self, name: str, parameters: Any, *more: Any) -> None:
        node, before = ctypes.c_void_p(), self._last
        count = 0 if before.value is None else 1
        given = ctypes.byref(before), count, parameters
        self._check(name, ctypes.byref(node), self.graph, *given, *more)
        self._last = node

    def add_kernel(
        self, kernel: Any, grid: tuple[int, ...], arguments: tuple[Any, ...], constants: dict[str, Any]
    ) -> None:
        # Compiles it, or finds what was compiled for such arguments; then loads it.
        made = kernel.warmup(*arguments, grid=grid, **constants)
        if made is None or made.run is None or made.function is None:  # None: it is interpreted
            raise _Refused(f"{kernel.__name__} was not loaded")
        for name, value in _PLAIN.items():
            if getattr(made.metadata, name, value) != value:
                raise _Refused(f"{made.metadata.name} has {name} {getattr(made.metadata, name)}")
        values = packed_arguments(made.src.signature, kernel.arg_names, arguments)
        places = (ctypes.c_void_p * len(values))(*(ctypes.addressof(value) for value in values))
        shape = (*grid, *(1,) * (3 - len(grid)))
        parameters = driver.KernelNode(
            made.function, *shape, _WARP * made.metadata.num_warps, 1, 1, made.metadata.shared, places
        )
        self._add("cuGraphAddKernelNode_v2", ctypes.byref(parameters))
        self.kept += [each for each in arguments if isinstance(each, torch.Tensor)]

    def add_copy(self, target: torch.Tensor, source: torch.Tensor) -> None:
        assert target.is_contiguous()
        assert source.is_contiguous()
        assert (target.dtype, target.shape) == (source.dtype, source.shape)
        count, context = source.numel() * source.element_size(), ctypes.c_void_p()
        self._check("cuCtxGetCurrent", ctypes.byref(context))
        parameters = driver.copy_node(target, source, count)
        self._add("cuGraphAddMemcpyNode", ctypes.byref(parameters), context)
        self.kept += [target, source]

    def add_graph(self, graph: LaunchGraph) -> None:
        """Add all work of a graph."""
        self._add("cuGraphAddChildGraphNode", graph.graph)
        self.kept.append(graph)


def packed_arguments(
    signature: dict[str, str], names: list[str], arguments: tuple[Any, ...]
) -> list[ctypes._SimpleCData[Any]]:
    """The arguments of a launch as the compiled kernel takes them, in their order.

    Args:
        signature: name -> Triton's type, ``"constexpr"`` of what is compiled in. names: of all parameters.
        arguments: the first of them; the rest is compiled in.

    Raises:
        _Refused: one has a type that is not known here.
    """
    values: list[Any] = []
    for name, given in zip(names, arguments, strict=False):
        kind = signature[name]
        if kind == "constexpr":
            continue
        if isinstance(given, torch.Tensor):
            values.append(ctypes.c_void_p(given.data_ptr()))
        elif kind in _NUMBERS:
            values.append(_NUMBERS[kind](given))
        else:
            raise _Refused(f"the argument {name} is of type {kind}")
    # Triton's own, of kernels that need memory beside their arguments: none here.
    return [*values, ctypes.c_void_p(), ctypes.c_void_p()]


def build(queue: Callable[[], object]) -> LaunchGraph | None:
    """Build a graph of what `queue` launches and copies, which is not run; None if that cannot be done.

    Args:
        queue: launches kernels, and copies, by `gear_loader.kernels.launching`; does nothing else on the GPU.
    """
    try:
        return _built(lambda nodes: hand_to(nodes, queue))
    except _Refused as error:
        notice("launch-graph", f"Batches are queued kernel by kernel: no CUDA graph of them ({error}).")
        return None


def join(*graphs: LaunchGraph) -> LaunchGraph | None:
    """Build a graph of the work of several, one after another; None if that cannot be done."""

    def add(nodes: _Nodes) -> None:
        for graph in graphs:
            nodes.add_graph(graph)

    try:
        return _built(add)
    except _Refused:
        return None


def _built(add: Callable[[_Nodes], object]) -> LaunchGraph | None:
    """A graph of the nodes that `add` adds; None without a driver."""
    library = driver.library()
    if library is None:
        return None
    nodes, handle, made = _Nodes(library), ctypes.c_void_p(), None
    try:
        nodes.begin()
        add(nodes)
        nodes._check("cuGraphInstantiateWithFlags", ctypes.byref(handle), nodes.graph, 0)
        assert handle.value is not None
        assert nodes.graph.value is not None
        made = LaunchGraph(library, handle.value, nodes.graph.value, nodes.kept)
        return made
    finally:
        if made is None and nodes.graph.value:
            library.cuGraphDestroy(nodes.graph)


class RepeatedWork:
    """The work that fills one set of buffers: queued call by call the first time, which compiles its kernels; then a
    graph of it is built, and launched.

    Attributes:
        scratch: tensors that the work uses, by name; kept with the buffers.
        graph: of the work with the last key, or None.
    """

    def __init__(self) -> None:
        self.scratch: dict[Hashable, Any] = {}
        self.graph: LaunchGraph | None = None
        self.key: Hashable = None
        self._refused = False

    def run(self, key: Hashable, queue: Callable[[], object], stream: torch.cuda.Stream) -> None:
        """Queue work on `stream`, the current one. Does not wait for the GPU.

        Args:
            key: tells one piece of work from another: equal keys mean equal launches with equal arguments. Numbers that
                change lie in memory that the launches read. None for work that is not repeated.
            queue: queues it; see `build`.
        """
        if key is None or self._refused:
            queue()
            return
        if key != self.key:
            # In this order: an exception may arrive in between, and no graph must be found under another key.
            self.graph = self.key = None
            queue()
            self.key = key
            return
        if self.graph is None:
            self.graph = build(queue)
            self._refused = self.graph is None
        if self.graph is None:
            queue()
        else:
            self.graph.launch(stream)
