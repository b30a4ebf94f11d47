"""The stand-in for `torch.cuda`: devices, streams, events, copies and launches."""

from __future__ import annotations

import contextlib
import threading
import types
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest
import torch
from cuda_common import CurrentDevice

from gear_loader.collection import cache_policy, prefetch, ticket_releaser
from gear_loader.storage import pinning
from gear_loader.utils import background, captures, launch_graph, streams, waiting

from . import kernels
from .machine import Event, Machine, Policy, Stream
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
}


class Replay:
    """Stands in for a CUDA graph: queues the work of the call that recorded it."""

    def __init__(self, queue: Callable[[], object]) -> None:
        self._queue = queue

    def launch(self, stream: Stream) -> None:
        self._queue()


class Cuda(CurrentDevice):
    """Devices without hardware; `installed` makes them those of `torch.cuda`."""

    def __init__(self, seed: int = 0, policy: Policy = "random", *, devices: int = 2) -> None:
        super().__init__()
        self.machine = Machine(seed, policy)
        self.memory = Memory(self.machine)
        self.threads = Threads(self.machine.random, self.machine.step)
        self.threads.patience = 1.0 if policy == "latest" else 0.7
        self.machine.current_stream = self.current_stream
        self.machine.wait_for = self.threads.wait
        self.machine.maybe_switch = self.threads.maybe_switch
        self.threads.tell = lambda: dict(self.machine.host_clock)
        self.threads.hear = self.machine.learn
        self.devices = devices
        self.refuse_pinning = False
        self.may_pin: Callable[[], bool] = lambda: True
        self._defaults = [Stream(self.machine, number) for number in range(devices)]

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
        self.machine.counts["copies to the device"] += 1
        stream = self.current_stream(target.where)
        into, view = View.of(target), View.of(source)
        if self.memory.is_pinned(view):
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
        self.machine.counts["copies to the host"] += 1
        stream = self.current_stream(source.where)
        view, into = View.of(source), View.of(target)
        pinned = self.memory.is_pinned(into)
        if pinned:
            self._use(into, stream)

        def run() -> None:
            into.tensor().copy_(view.tensor())

        self.launch(source.where, "copy to the host", run, reads=[view], writes=[into] if pinned else ())
        if not (pinned and non_blocking):
            self.machine.counts["blocking copies"] += 1
            stream.synchronize()

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
    ) -> None:
        """Queue work on the device's current stream, which reads and writes these tensors."""
        self.machine.on_call("launch")
        reads, writes = list(reads), list(writes)

        def run() -> None:
            for view in (*reads, *writes):
                self.memory.check_readable(view)
            call()

        self.machine.counts[label] += 1
        self.machine.enqueue(
            self.current_stream(device),
            label,
            run,
            reads=[self.memory.span(view) for view in reads],
            writes=[self.memory.span(view) for view in writes],
        )

    # ---------------------------------------------------------------- the runtime's own functions

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        assert flags == 1
        self.threads.wait(self.may_pin)
        if self.refuse_pinning:
            return 2
        self.memory.registered[address] = count
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        return 0 if self.memory.registered.pop(address, None) else 713

    def cuThreadExchangeStreamCaptureMode(self, mode: Any) -> int:
        assert mode._obj.value == 2  # relaxed
        self._thread.relaxed = True
        return 0

    @contextlib.contextmanager
    def capturing(self) -> Iterator[None]:
        """This thread captures a graph: calls that wait or allocate fail it, in every thread that is not relaxed."""

        def check(name: str) -> None:
            if name in _UNSAFE and not getattr(self._thread, "relaxed", False):
                self.machine.fail(
                    f"{name} in thread {threading.current_thread().name} ended the capture of a graph"
                )

        before, self.machine.check_call = self.machine.check_call, check
        try:
            yield
        finally:
            self.machine.check_call = before

    # ---------------------------------------------------------------- in the place of torch.cuda

    def functions(self) -> dict[str, Any]:
        """What replaces the functions of `torch.cuda`."""
        machine, cuda = self.machine, self

        def stream(device: Any = None, priority: int = 0) -> Stream:
            return Stream(machine, cuda.index(device), priority)

        return {
            "is_available": lambda: True,
            "device_count": lambda: self.devices,
            "init": lambda: None,
            "current_device": lambda: self.current,
            "set_device": lambda device: setattr(self._thread, "device", self.index(device)),
            "device": self.on_device,
            "synchronize": lambda device=None: machine.synchronize(self.index(device)),
            "cudart": lambda: self,
            "Stream": stream,
            "Event": lambda blocking=False: Event(machine, blocking=blocking),
            "current_stream": self.current_stream,
            "default_stream": lambda device=None: self._defaults[self.index(device)],
            "stream": self.on_stream,
            "get_device_properties": lambda device=None: types.SimpleNamespace(multi_processor_count=8),
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
        patch.setattr(background, "threading", self.threads.threading)
        patch.setattr(cache_policy, "queue", self.threads.queue)
        patch.setattr(waiting, "time", self.threads.time)
        patch.setattr(pinning, "threading", self.threads.threading)
        patch.setattr(captures.ctypes, "CDLL", lambda name: self)
        patch.setattr(streams, "_raw_stream", None)
        patch.setattr(launch_graph, "record", lambda queue, stream: Replay(queue))
        kernels.install(self, patch)
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

    def check(self) -> None:
        """Fail if an operation failed, an order is missing, or a thread ended by an exception."""
        found = [*self.machine.failures, *map(repr, self.threads.failures)]
        assert not found, "\n".join(dict.fromkeys(found))
