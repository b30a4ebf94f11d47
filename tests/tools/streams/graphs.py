"""Graphs that are built node by node, as the driver takes them: parameters are read as raw bytes."""

from __future__ import annotations

import ctypes
import itertools
import threading
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from gear_loader.kernels import launching
from gear_loader.utils import driver

from .machine import Captured, event_of
from .memory import View

if TYPE_CHECKING:
    from .cuda import Cuda

_KINDS = {
    "i32": ctypes.c_int32,
    "i64": ctypes.c_int64,
    "u64": ctypes.c_uint64,
    "fp32": ctypes.c_float,
}
_HOST, _DEVICE = 1, 2


def building() -> bool:
    """Whether the launches of this call become nodes."""
    return launching._builder.get() is not None


class Kernel(NamedTuple):
    """A kernel that was compiled, with the launch that it was compiled for.

    Attributes:
        values: type and value of each argument that is not compiled in.
    """

    name: str
    grid: tuple[int, ...]
    values: list[tuple[str, Any]]
    num_warps: int


def kind_of(value: Any) -> str:
    """Triton's type of an argument."""
    if isinstance(value, torch.Tensor):
        return f"*{value.dtype}"
    if isinstance(value, float):
        return "fp32"
    return "i32" if -(2**31) <= value < 2**31 else "i64"


_COMPILED: dict[str, Callable[..., int]] = {
    "cuEventQuery": lambda cuda, event, *_: cuda.cuEventQuery(event),
    "cuStreamWaitEvent": lambda cuda, stream, event, flags, _: cuda.cuStreamWaitEvent(stream, event, flags),
    "cuGraphLaunch": lambda cuda, graph, stream, *_: cuda.cuGraphLaunch(graph, stream),
    "cuEventRecord": lambda cuda, event, stream, *_: cuda.cuEventRecord(event, stream),
    "cuMemcpyDtoDAsync_v2": lambda cuda, *given: cuda.cuMemcpyDtoDAsync_v2(*given),
    "cuThreadExchangeStreamCaptureMode": lambda cuda, mode, *_: cuda.cuThreadExchangeStreamCaptureMode(
        ctypes.byref(ctypes.c_int.from_address(mode))
    ),
    "cuStreamIsCapturing": lambda cuda, stream, status, *_: cuda.cuStreamIsCapturing(
        stream, ctypes.byref(ctypes.c_int.from_address(status))
    ),
}
"""How compiled loops call the functions."""


class GraphCalls:
    """The driver's functions that build graphs; `Cuda` has them."""

    if TYPE_CHECKING:
        _graphs: dict[int, list[Captured]]
        _handles: Iterator[int]

    def __init__(self) -> None:
        self.compiled: dict[int, Kernel] = {}
        self._functions = itertools.count(0x1000)
        self._nodes: dict[int, list[int]] = {}  # graph -> its nodes
        self._joined: set[int] = set()  # those of several graphs
        self._callbacks: dict[str, Any] = {}
        self._built = threading.local()  # of a thread: the graph, and kernels whose twin is not known yet

    def function_of(self, kernel: Kernel) -> int:
        """The handle of a compiled kernel."""
        handle = next(self._functions)
        self.compiled[handle] = kernel
        return handle

    # ---------------------------------------------------------------- events, as compiled loops ask for them

    def address_of(self, name: str) -> int:
        """The address of a function, which compiled loops call with four numbers; what it raises is a failure."""

        def called(*given: int) -> int:
            self.machine.counts[name] += 1  # type: ignore[attr-defined]
            try:
                return _COMPILED[name](self, *given)
            except BaseException as error:
                self.machine.fail(f"{name} in a compiled loop: {type(error).__name__}: {error}")  # type: ignore[attr-defined]
                return 906

        if name not in self._callbacks:
            self._callbacks[name] = ctypes.CFUNCTYPE(ctypes.c_int, *[ctypes.c_int64] * 4)(called)
        address = ctypes.cast(self._callbacks[name], ctypes.c_void_p).value
        assert address
        return address

    def cuEventQuery(self, event: int) -> int:
        return 0 if event_of(event).query() else 600

    def cuEventRecord(self: Any, event: int, stream: int) -> int:
        event_of(event).record(self._stream(stream))
        return 0

    def cuStreamWaitEvent(self: Any, stream: int, event: int, flags: int) -> int:
        assert flags == 0
        self._stream(stream).wait_event(event_of(event))
        return 0

    def cuMemcpyDtoDAsync_v2(self: Any, target: int, source: int, count: int, stream: int) -> int:
        views = [View.at(address, (count,), torch.uint8) for address in (source, target)]
        assert not any(map(self.memory.is_pinned, views)), "memory of another kind"
        on = self._stream(stream)
        with self.on_stream(on):
            self.launch(
                torch.device("cuda", on.device),
                "copy on the device",
                lambda: views[1].tensor().copy_(views[0].tensor()),
                reads=views[:1],
                writes=views[1:],
            )
        return 0

    # ---------------------------------------------------------------- building

    def cuCtxGetCurrent(self, context: Any) -> int:
        context._obj.value = 77
        return 0

    def cuGraphCreate(self, graph: Any, flags: int) -> int:
        assert flags == 0
        graph._obj.value = handle = next(self._handles)
        self._graphs[handle], self._nodes[handle] = [], []
        self._built.kernels = 0
        return 0

    def _add(self, node: Any, graph: Any, before: Any, count: int) -> None:
        nodes = self._nodes[graph.value]
        assert [before._obj.value][:count] == nodes[-1:], "the nodes are no chain"
        node._obj.value = next(self._handles)
        nodes.append(node._obj.value)
        self._built.graph = graph.value

    def cuGraphAddKernelNode_v2(self, node: Any, graph: Any, before: Any, count: int, parameters: Any) -> int:
        given: driver.KernelNode = parameters._obj
        kernel = self.compiled.pop(given.func)
        grid = given.gridDimX, given.gridDimY, given.gridDimZ
        block = given.blockDimX, given.blockDimY, given.blockDimZ
        assert grid[: len(kernel.grid)] == kernel.grid
        assert grid[len(kernel.grid) :] == (1,) * (3 - len(kernel.grid))
        assert block == (32 * kernel.num_warps, 1, 1)
        assert not given.extra
        assert not given.kern
        for place, (kind, value) in enumerate([*kernel.values, ("*", 0), ("*", 0)]):
            address: Any = given.kernelParams[place]
            if kind.startswith("*"):
                found = ctypes.c_uint64.from_address(address).value
            else:
                found = _KINDS[kind].from_address(address).value
            assert found == value, f"argument {place} of {kernel.name} is {found}; expected {value}"
        self._add(node, graph, before, count)
        self._built.kernels += 1
        return 0

    def cuGraphAddMemcpyNode(
        self: Any, node: Any, graph: Any, before: Any, count: int, parameters: Any, context: Any
    ) -> int:
        given: driver.CopyNode = parameters._obj
        assert context.value == 77
        assert (given.Height, given.Depth) == (1, 1)
        assert not any(
            getattr(given, side + name)
            for side in ("src", "dst")
            for name in ("XInBytes", "Y", "Z", "LOD", "Array")
        )
        views = []
        for side in ("src", "dst"):
            kind = getattr(given, f"{side}MemoryType")
            address = getattr(given, side + {_HOST: "Host", _DEVICE: "Device"}[kind])
            view = View.at(address, (given.WidthInBytes,), torch.uint8)
            assert self.memory.is_pinned(view) == (kind == _HOST), "memory of another kind"
            views.append(view)
        self._add(node, graph, before, count)
        source, target = views
        label = "copy to the host" if given.dstMemoryType == _HOST else "copy to the device"
        self.add_work(label, lambda: target.tensor().copy_(source.tensor()), [source], [target], [])
        return 0

    def cuGraphAddChildGraphNode(
        self: Any, node: Any, graph: Any, before: Any, count: int, child: int
    ) -> int:
        self._add(node, graph, before, count)
        self._graphs[graph.value] += self._graphs[child]
        self._joined.add(graph.value)
        return 0

    def add_work(
        self: Any,
        label: str,
        call: Callable[[], object],
        reads: list[View],
        writes: list[View],
        arguments: list[Any],
    ) -> None:
        """What a node does, or several of one launcher."""
        cuda: Cuda = self

        def run() -> None:
            for view in (*reads, *writes):
                cuda.memory.check_readable(view)
            call()

        spans = [[cuda.memory.span(view) for view in views] for views in (reads, writes)]
        named = [cuda.memory.span(each) for each in arguments if isinstance(each, View)]
        self._graphs[self._built.graph].append(
            Captured(label, run, *spans, named, arguments, threading.get_ident())
        )
        self._built.kernels = 0

    def add_twin(self, kernels: int, *work: Any) -> None:
        """What the last nodes do, of which one launcher has made so many."""
        assert kernels, f"{work[0]} would be queued at once, and not by the graph"
        assert self._built.kernels == kernels, f"{self._built.kernels} nodes of {kernels} launches"
        self.add_work(*work)
