"""The stand-in for `torch.cuda`: devices, streams, events, copies and launches."""

from __future__ import annotations

import collections
import contextlib
import itertools
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cuda_common import CurrentDevice

from gear_loader.checkpoint import behind
from gear_loader.collection import prefetch, ticket_releaser
from gear_loader.storage import device_server, pinning
from gear_loader.utils import background, driver, launch_graph, streams, waiting

from . import kernels
from .graphs import GraphCalls, building
from .machine import Capture, Captured, Event, Machine, Policy, Stream
from .memory import Memory, View
from .tensors import CudaFunctions, DeviceTensor, allow_cuda_devices, device_empty
from .threads import Threads

_UNSAFE = {
    "event.synchronize",
    "event.query",
    "stream.synchronize",
    "stream.query",
    "synchronize",
    "allocate",
    "cudaHostRegister",
    "cudaHostUnregister",
}
"""Refused in a capture, or beside one, as the modes say; in `Machine.refuse` what no mode allows."""

GLOBAL, THREAD_LOCAL, RELAXED = 0, 1, 2
"""Capture modes of a thread, and of a capture."""
_POOL = 32
"""Streams that PyTorch has for each device and priority."""


def _keeps_memory(memory: Memory, call: Any) -> bool:
    """Whether a function's variables refer to memory of a device, or pinned, rather than name its address."""
    left, seen = [call], set()
    while left:
        each = left.pop()
        if id(each) in seen:
            continue
        seen.add(id(each))
        if isinstance(each, torch.Tensor) and memory.block(each.data_ptr()) is not None:
            return True
        if isinstance(each, types.FunctionType):
            left += [cell.cell_contents for cell in each.__closure__ or ()]
        elif isinstance(each, (tuple, list, set)):
            left += each
        elif isinstance(each, dict):
            left += each.values()
        elif type(each).__module__.startswith("gear_loader") or isinstance(each, types.SimpleNamespace):
            left += getattr(each, "__dict__", {}).values()
    return False


def _compared(operation: Captured) -> tuple[object, ...]:
    ends = [(span.first, span.end) for span in (*operation.reads, *operation.writes)]
    return operation.label, operation.arguments, ends


def _told(operation: Captured | None) -> str:
    return "nothing" if operation is None else f"{operation.label} with {operation.arguments}"


class Cuda(CurrentDevice, GraphCalls):
    """Devices without hardware; `installed` makes them those of `torch.cuda`."""

    def __init__(self, seed: int = 0, policy: Policy = "random", *, devices: int = 2) -> None:
        CurrentDevice.__init__(self)
        GraphCalls.__init__(self)
        self.machine = Machine(seed, policy)
        self.memory = Memory(self.machine)
        self.threads = Threads(self.machine.random, self.machine.step)
        self.threads.patience = 1.0 if policy == "latest" else 0.7
        self.machine.current_stream = self.current_stream
        self.machine.wait_for = self.threads.wait
        self.machine.maybe_switch = self.threads.maybe_switch
        self.threads.tell = lambda: dict(self.machine.host_clock)
        self.threads.hear = self.machine.learn
        self.machine.host = lambda: self.threads.current
        self.devices = devices
        self.refuse_pinning = False
        self.refuses = 0  # what cudaHostRegister returns instead
        self.pageable: dict[int, set[int]] = {}  # device -> its attributes 88 and 100, see `driver`
        self.may_pin: Callable[[], bool] = lambda: True
        self._defaults = [Stream(self.machine, number) for number in range(devices)]
        self._pool: dict[tuple[int, int], list[Stream]] = collections.defaultdict(list)
        self._next: collections.Counter[tuple[int, int]] = collections.Counter()
        self._captures: list[Capture] = []
        self._graphs: dict[int, list[Captured]] = {}
        self._handles = itertools.count(1)
        self._destroyed: list[int] = []  # handles of executable graphs
        self.machine.check_call = self._check_call

    # ---------------------------------------------------------------- devices and streams

    def device_of(self, device: Any) -> torch.device:
        """A device with its number."""
        device = torch.device("cuda", device) if isinstance(device, int) else torch.device(device)
        return torch.device("cuda", self.index(device)) if device.type == "cuda" else device

    def current_stream(self, device: Any = None) -> Stream:
        index = self.index(device)
        chosen: dict[int, Stream] = getattr(self._thread, "streams", {})
        return chosen.get(index, self._defaults[index])

    @contextlib.contextmanager
    def on_stream(self, stream: Stream | None) -> Iterator[None]:
        if stream is None:
            yield
            return
        before, device = getattr(self._thread, "streams", {}), self.current
        self._thread.streams, self._thread.device = {**before, stream.device: stream}, stream.device
        try:
            yield
        finally:
            self._thread.streams, self._thread.device = before, device

    @contextlib.contextmanager
    def on_device(self, device: Any) -> Iterator[None]:
        before, self._thread.device = self.current, self.index(device)
        try:
            yield
        finally:
            self._thread.device = before

    # ---------------------------------------------------------------- memory and copies

    def pinned(self, shape: Iterable[int], dtype: torch.dtype) -> torch.Tensor:
        shape = tuple(shape)
        count = torch.Size(shape).numel() * dtype.itemsize
        return self.memory.allocate(count, None).view(dtype).view(shape)

    def pinned_copy(self, tensor: torch.Tensor) -> torch.Tensor:
        made = self.pinned(tensor.shape, tensor.dtype)
        made.copy_(tensor)
        return made

    def to_device(
        self, tensor: torch.Tensor, device: torch.device, *, non_blocking: bool = False
    ) -> DeviceTensor:
        tensor = tensor.contiguous()
        self._may_copy(self.memory.is_pinned(View.of(tensor)), self.current_stream(device))
        made = device_empty(self, tensor.shape, tensor.stride(), tensor.dtype, device)
        self.upload(tensor, made, non_blocking=non_blocking)
        return made

    def filled(self, values: torch.Tensor, device: torch.device) -> DeviceTensor:
        """What a kernel without inputs makes, as `torch.zeros` and `torch.arange` do."""
        made = device_empty(self, values.shape, values.stride(), values.dtype, device)
        into = View.of(made)
        self.launch(device, "fill", lambda: into.tensor().copy_(values), writes=[into])
        return made

    def upload(self, source: torch.Tensor, target: DeviceTensor, *, non_blocking: bool) -> None:
        """Copy to a device. Memory that is not pinned has been read when this returns."""
        stream = self.current_stream(target.where)
        into, view = View.of(target), View.of(source)
        pinned = self.memory.is_pinned(view)
        self._may_copy(pinned, stream)
        if pinned:
            self._use(view, stream)

            def run() -> None:
                into.tensor().copy_(view.tensor())

            self.launch(target.where, "copy to the device", run, reads=[view], writes=[into])
        else:
            self.machine.counts["copies of pageable memory"] += 1
            values = source.clone()
            self.launch(
                target.where, "copy to the device", lambda: into.tensor().copy_(values), writes=[into]
            )
        if not non_blocking:
            self.machine.counts["blocking copies"] += 1
            stream.synchronize()

    def download(self, source: DeviceTensor, target: torch.Tensor, *, non_blocking: bool) -> None:
        """Copy to the host; to memory that is not pinned, or if blocking, it has arrived when this returns."""
        stream = self.current_stream(source.where)
        view, into = View.of(source), View.of(target)
        pinned = self.memory.is_pinned(into)
        self._may_copy(pinned, stream)
        if pinned:
            self._use(into, stream)

        def run() -> None:
            into.tensor().copy_(view.tensor())

        self.launch(source.where, "copy to the host", run, reads=[view], writes=[into] if pinned else ())
        if not (pinned and non_blocking):
            self.machine.counts["blocking copies"] += 1
            stream.synchronize()

    def _may_copy(self, pinned: bool, stream: Stream) -> None:
        """PyTorch's check; CUDA would record the address of memory that nobody keeps."""
        if not pinned and stream.capture is not None:
            self.machine.refuse("copy of pageable memory", "only pinned memory may be copied", stream.capture)

    def _use(self, view: View, stream: Stream) -> None:
        block = self.memory.block(view.address)
        if block is not None and block.stream is None:
            block.used.add(stream.cuda_stream)

    def record_stream(self, tensor: DeviceTensor, stream: Stream) -> None:
        block = self.memory.block(tensor.data_ptr())
        if block is not None and block.stream is not stream:
            block.used.add(stream.cuda_stream)

    def launch(
        self,
        device: torch.device,
        label: str,
        call: Callable[[], object],
        *,
        reads: Iterable[View] = (),
        writes: Iterable[View] = (),
        arguments: Iterable[Any] = (),
        kernels: int = 0,
    ) -> None:
        """Queue work on the device's current stream, which reads and writes these tensors.

        Args:
            call: keeps views and values, and nothing that can change until it runs.
            arguments: all of its values and views, also of what it does not touch. kernels: that it stands for.
        """
        self.machine.on_call("launch")
        reads, writes, arguments = list(reads), list(writes), list(arguments)
        if building():
            if _keeps_memory(self.memory, call):
                self.machine.fail(f"the stand-in's {label} keeps memory that CUDA would not")
            self.add_twin(kernels, label, call, reads, writes, arguments)
            return
        stream = self.current_stream(device)
        if stream.capture is not None and stream.capture.broken:
            raise RuntimeError(
                f"CUDA error: operation failed due to a previous error: {stream.capture.broken}"
            )
        if stream.capture is not None and _keeps_memory(self.memory, call):
            self.machine.fail(f"the stand-in's {label} keeps memory that CUDA would not")

        def run() -> None:
            for view in (*reads, *writes):
                self.memory.check_readable(view)
            call()

        self.machine.counts[label] += 1
        self.machine.enqueue(
            stream,
            label,
            run,
            reads=[self.memory.span(view) for view in reads],
            writes=[self.memory.span(view) for view in writes],
            named=[self.memory.span(each) for each in arguments if isinstance(each, View)],
            arguments=arguments,
        )

    # ---------------------------------------------------------------- the runtime's own functions

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        assert flags == 1
        self._check_call("cudaHostRegister")
        self.threads.wait(self.may_pin)
        if self.refuses or self.refuse_pinning:
            return self.refuses or 2
        self.memory.register(address, count)
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self._check_call("cudaHostUnregister")
        return 0 if self.memory.registered.pop(address, None) else 713

    def cuDeviceGet(self, device: Any, index: int) -> int:
        device._obj.value = index
        return 0

    def cuDeviceGetAttribute(self, value: Any, attribute: int, device: int) -> int:
        value._obj.value = int(attribute in self.pageable.get(device, ()))
        self.memory.coherent |= bool(value._obj.value)
        return 0

    # ---------------------------------------------------------------- captures and graphs, as the driver has them

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        before, self._thread.mode = getattr(self._thread, "mode", GLOBAL), mode._obj.value
        mode._obj.value = before
        return 0

    def set_mode(self, mode: int) -> None:
        """The capture mode of the calling thread, as a user's own call sets it."""
        self._thread.mode = mode

    def _check_call(self, name: str) -> None:
        """A call that waits or allocates ends the captures that it may disturb, and is refused."""
        mode, me = getattr(self._thread, "mode", GLOBAL), threading.get_ident()
        if name not in _UNSAFE or mode == RELAXED:
            return
        disturbed = [
            each
            for each in self._captures
            if (each.mode != RELAXED if each.thread == me else each.mode == GLOBAL and mode == GLOBAL)
        ]
        for capture in disturbed:
            capture.broken = (
                f"{name} in thread {threading.current_thread().name} ended the capture of a graph"
            )
        if disturbed:
            self.machine.fail(disturbed[0].broken)
            raise RuntimeError(
                f"CUDA error: operation not permitted when stream is capturing: {disturbed[0].broken}"
            )

    @contextlib.contextmanager
    def capturing(self, stream: Stream | None = None, mode: int = GLOBAL) -> Iterator[None]:
        """This thread captures a graph of work that is the user's own, as `torch.cuda.graph` does."""
        capture = Capture(threading.get_ident(), mode, by_torch=True)
        self._captures.append(capture)
        if stream is not None:
            stream.capture = capture
        try:
            yield
        finally:
            self._captures.remove(capture)
            if stream is not None:
                stream.capture = None

    def recorded_again(self, queue: Callable[[], object], stream: Stream) -> list[Captured]:
        """What a graph of `queue` would hold now. Nobody else gets a turn, and nothing is left of it."""
        capture = Capture(threading.get_ident(), RELAXED)
        self.machine.quiet, stream.capture = True, capture
        counts = self.machine.counts.copy()
        try:
            queue()
        finally:
            self.machine.quiet, stream.capture, self.machine.counts = False, None, counts
        return capture.operations

    def check_equal(self, graph: int, queue: Callable[[], object], stream: Stream) -> None:
        """Fail unless `queue` would launch now what was recorded: with equal grids, addresses and values."""
        recorded, now = self._graphs[graph], self.recorded_again(queue, stream)
        for old, new in itertools.zip_longest(recorded, now):
            if old is None or new is None or _compared(old) != _compared(new):
                self.machine.fail(f"a replay launches {_told(old)}, where the key stands for {_told(new)}")
                return

    def _stream(self, handle: int) -> Stream:
        return next(each for each in self.machine.streams if each.cuda_stream == handle)

    def cuStreamCreateWithPriority(self, handle: Any, flags: int, priority: int) -> int:
        assert flags == 1
        handle._obj.value = Stream(self.machine, self.current, priority).cuda_stream
        return 0

    def cuStreamIsCapturing(self, handle: int, status: Any) -> int:
        status._obj.value = int(self._stream(handle).captured is not None)
        return 0

    def cuStreamBeginCapture_v2(self, handle: int, mode: int) -> int:
        stream = self._stream(handle)
        self.machine.counts["recordings"] += 1
        if stream.capture is not None or stream in self._defaults:
            return 900
        me = threading.get_ident()
        stream.capture = Capture(me, mode, self.memory.allocations_of(me))
        self._captures.append(stream.capture)
        return 0

    def cuStreamEndCapture(self, handle: int, graph: Any) -> int:
        stream = self._stream(handle)
        capture = stream.capture
        if capture is None:
            return 401
        if capture.mode != RELAXED and capture.thread != threading.get_ident():
            return 908
        stream.capture = None
        self._captures.remove(capture)
        if capture.broken:
            return 901
        graph._obj.value = next(self._handles)
        self._graphs[graph._obj.value] = capture.operations
        if self.memory.allocations_of(capture.thread) != capture.allocations:
            self.machine.fail("memory was allocated in a recording")
        for each in capture.operations:
            self.machine.check_held(each, f"{each.label} in a recording that goes on")
        return 0

    def cuGraphInstantiateWithFlags(self, handle: Any, graph: Any, flags: int) -> int:
        self.machine.counts["graphs"] += 1
        # As memory of the driver is used again.
        handle._obj.value = self._destroyed.pop(0) if self._destroyed else next(self._handles)
        self._graphs[handle._obj.value] = self._graphs[graph.value]
        (self._joined.add if graph.value in self._joined else self._joined.discard)(handle._obj.value)
        return 0

    def cuGraphDestroy(self, graph: Any) -> int:
        del self._graphs[getattr(graph, "value", graph)]
        return 0

    def cuGraphExecDestroy(self, handle: int) -> int:
        del self._graphs[handle]
        self._destroyed.append(handle)
        return 0

    def cuGraphLaunch(self, handle: int, stream: int) -> int:
        self.machine.on_call("replays")
        self.machine.counts["joined"] += handle in self._joined
        self.machine.replay(self._stream(stream), self._graphs[handle])
        return 0

    # ---------------------------------------------------------------- in the place of torch.cuda

    def functions(self) -> dict[str, Any]:
        """What replaces the functions of `torch.cuda`."""
        machine, cuda = self.machine, self

        def stream(device: Any = None, priority: int = 0) -> Stream:
            """The next one of the pool, which somebody else may have too."""
            kind = cuda.index(device), priority
            pool, number = self._pool[kind], self._next[kind] % _POOL
            self._next[kind] += 1
            if number == len(pool):
                pool.append(Stream(machine, *kind))
            return pool[number]

        return {
            "is_available": lambda: True,
            "device_count": lambda: self.devices,
            "init": lambda: None,
            "current_device": lambda: self.current,
            "set_device": lambda device: setattr(self._thread, "device", self.index(device)),
            "device": self.on_device,
            "synchronize": lambda device=None: machine.synchronize(self.index(device)),
            "cudart": lambda: self,
            "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
            "Stream": stream,
            "ExternalStream": lambda handle, device=None: self._stream(handle),
            "memory_stats_as_nested_dict": lambda device=None: {
                "allocation": {"all": {"allocated": self.memory.allocations_on(self.index(device))}}
            },
            "Event": lambda blocking=False: Event(machine, blocking=blocking),
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self._defaults[self.index(device)],
            "stream": self.on_stream,
            "get_device_properties": lambda device=None: types.SimpleNamespace(
                multi_processor_count=8,
                shared_memory_per_block=48 << 10,
                shared_memory_per_block_optin=227 << 10,
            ),
        }

    @contextlib.contextmanager
    def installed(self) -> Iterator[Cuda]:
        """Be `torch.cuda`, the kernels, and the threads of prefetching; fail if anything went wrong."""
        allow_cuda_devices()
        patch = pytest.MonkeyPatch()
        for name, value in self.functions().items():
            patch.setattr(torch.cuda, name, value)
        start = self.threads.start

        def start_with_mode(target: Any, args: Any = (), name: str = "") -> Any:
            def run(*args: Any) -> None:
                with CudaFunctions(self):
                    target(*args)

            return start(run, args, name)

        patch.setattr(self.threads, "start", start_with_mode)
        patch.setattr(prefetch, "threading", self.threads.threading)
        patch.setattr(prefetch, "queue", self.threads.queue)
        patch.setattr(ticket_releaser, "queue", self.threads.queue)
        patch.setattr(ticket_releaser, "_PATIENCE", 0.0)
        in_turn = self.threads.threading
        patch.setattr(background, "threading", in_turn)
        patch.setattr(background, "_Thread", type("_Thread", (in_turn.Thread,), {"asks": None}))
        patch.setattr(waiting, "time", self.threads.time)
        patch.setattr(pinning, "threading", self.threads.threading)
        patch.setattr(driver, "library", lambda: self)
        patch.setattr(driver, "address_of", self.address_of)
        patch.setattr(streams, "_raw_stream", None)
        patch.setattr(streams, "_unused", {})
        kernels.install(self, patch)
        self._check_replays(patch)
        try:
            with CudaFunctions(self):
                yield self
        finally:
            try:
                self.threads.finish()
                while self.machine.step():
                    pass
            finally:
                patch.undo()
                self.memory.forget()

    @contextlib.contextmanager
    def disks_in_turn(self) -> Iterator[None]:
        """Let threads that write tables to their disks have turns too; tables are closed before the end."""
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(behind, "threading", self.threads.threading)
            patch.setattr(behind, "Event", self.threads.ticking_event)
            yield

    @contextlib.contextmanager
    def serving_blocks(self) -> Iterator[None]:
        """Let other processes read named tables in the memory of a device, while this thread waits for them."""

        def thread(run: Any, name: str, **_: Any) -> threading.Thread:
            def work() -> None:
                with CudaFunctions(self):
                    run()

            return threading.Thread(target=work, name=name, daemon=True)

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(device_server, "background_thread", thread)
            yield

    def _check_replays(self, patch: pytest.MonkeyPatch) -> None:
        """Compare each replay with what its call would queue: equal keys promise equal launches."""
        run = launch_graph.RepeatedWork.run

        def checked(work: Any, key: Any, queue: Any, stream: Any) -> None:
            graph = work.graph
            run(work, key, queue, stream)
            if graph is not None and work.graph is graph and key is not None and self.machine.checks_order:
                self.check_equal(graph.handle, queue, stream)

        patch.setattr(launch_graph.RepeatedWork, "run", checked)

    def check(self) -> None:
        """Fail if an operation failed, an order is missing, or a thread ended by an exception."""
        found = [*self.machine.failures, *map(repr, self.threads.failures)]
        assert not found, "\n".join(dict.fromkeys(found))
