"""A stand-in for `torch.cuda`, where there is no GPU: which call is made on which device, what waits for what."""

from __future__ import annotations

import contextlib
import ctypes
import threading
import weakref
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode

from gear_loader.utils import driver, streams

WAIT = 60.0
"""Seconds after which a wait that should end has failed: the machine may be busy."""


class Stream:
    """Work queued on it is done at once; `waited` are the events that it was told to wait for."""

    _numbers = iter(range(1, 1 << 30))

    def __init__(self, device: Any = None, cuda: FakeCuda | None = None) -> None:
        assert cuda is not None
        self.device = cuda.index(device)
        self.cuda_stream = next(self._numbers)
        self.waited: list[Any] = []

    def wait_event(self, event: Any) -> None:
        self.waited.append(event)

    def wait_stream(self, stream: Any) -> None:
        self.waited.append(stream)

    def synchronize(self) -> None:
        """Nothing is left to wait for."""


class Event:
    """Done as soon as it is recorded, unless the stand-in is told to `hold`. Waiting for it raises `error`, if any, and
    that once only if it is not `lasting`."""

    def __init__(self, *, blocking: bool = False, cuda: FakeCuda | None = None) -> None:
        assert cuda is not None
        self._cuda = cuda
        self.blocking = blocking
        self.records = 0
        self.done = threading.Event()
        self.done.set()
        self.error: Exception | None = None
        self.lasting = True

    def _raise(self) -> None:
        error = self.error
        if not self.lasting:
            self.error = None
        if error is not None:
            raise error

    def record(self, stream: Any = None) -> None:
        self._cuda.note("record")
        self.records += 1
        if self._cuda.held is not None:
            self.done = threading.Event()
            self._cuda.held.append(self)

    def synchronize(self) -> None:
        self._cuda.note("event.synchronize")
        if threading.current_thread() is threading.main_thread() and not self.done.is_set():
            self._cuda.host_waits += 1
            self.done.set()  # what it waits for happens in the meantime
        assert self.done.wait(WAIT)
        self._raise()

    def query(self) -> bool:
        self._cuda.note("event.query")
        self._raise()
        return self.done.is_set()


class CurrentDevice:
    """The current device of each thread, 0 at first."""

    def __init__(self) -> None:
        self._thread = threading.local()

    @property
    def current(self) -> int:
        return int(getattr(self._thread, "device", 0))

    def index(self, device: Any) -> int:
        """The number of a device; of the current one if it has none."""
        if device is None:
            return self.current
        if isinstance(device, int):
            return device
        index = torch.device(device).index
        return self.current if index is None else index


class FakeCuda(CurrentDevice):
    """Takes the place of `torch.cuda` for one test.

    Attributes:
        calls: what was called, and the device that was the current one of the calling thread.
        synchronized: devices that were waited for.
        registered: addresses registered by now. `refuse` makes further registrations fail.
        host_waits: how often the main thread waited for an event that was not done.
        recorded: the tensors that a stream was said to use: their addresses.
        held: None, or the events that were recorded since `hold`.
    """

    def __init__(self, monkeypatch: pytest.MonkeyPatch, *, devices: int = 2) -> None:
        super().__init__()
        self.calls: list[tuple[str, int]] = []
        self.synchronized: list[int] = []
        self.registered: dict[int, int] = {}
        self.refuse = False
        self.host_waits = 0
        self.recorded: list[int] = []
        self.held: list[Event] | None = None
        self._defaults = [Stream(number, cuda=self) for number in range(devices)]
        cuda = self

        class Device:
            def __init__(self, device: Any) -> None:
                self._index = cuda.index(device)

            def __enter__(self) -> None:
                self._before, cuda._thread.device = cuda.current, self._index

            def __exit__(self, *_: object) -> None:
                cuda._thread.device = self._before

        replaced: dict[str, Any] = {
            "is_available": lambda: True,
            "device_count": lambda: devices,
            "init": lambda: cuda.note("init"),
            "current_device": lambda: cuda.current,
            "set_device": lambda device: setattr(cuda._thread, "device", cuda.index(device)),
            "device": Device,
            "synchronize": cuda._synchronize,
            "cudart": lambda: cuda,
            "mem_get_info": lambda device=None: (1 << 40, 1 << 40),
            "Stream": lambda device=None, priority=0: Stream(device, cuda=cuda),
            "Event": lambda blocking=False: Event(blocking=blocking, cuda=cuda),
            "current_stream": cuda._current_stream,
            "stream": cuda._on,
        }
        for name, value in replaced.items():
            monkeypatch.setattr(torch.cuda, name, value)
        monkeypatch.setattr(driver, "library", lambda: None)
        monkeypatch.setattr(streams, "_unused", {})
        monkeypatch.setattr(
            torch.Tensor, "record_stream", lambda tensor, stream: cuda.recorded.append(tensor.data_ptr())
        )

    def note(self, call: str) -> None:
        self.calls.append((call, self.current))

    def devices_of(self, call: str) -> list[int]:
        """The devices that were current at these calls."""
        return [device for name, device in self.calls if name == call]

    def _synchronize(self, device: Any = None) -> None:
        self.note("synchronize")
        self.synchronized.append(self.index(device))

    def _current_stream(self, device: Any = None) -> Stream:
        index = self.index(device)
        found = getattr(self._thread, "stream", None)
        return found if found is not None and found.device == index else self._defaults[index]

    @contextlib.contextmanager
    def _on(self, stream: Stream) -> Iterator[None]:
        before = getattr(self._thread, "stream", None), self.current
        self._thread.stream, self._thread.device = stream, stream.device
        try:
            yield
        finally:
            self._thread.stream, self._thread.device = before

    def hold(self) -> None:
        """Events that are recorded from here on are done when `finish` is called."""
        self.held = []

    def finish(self) -> None:
        events, self.held = self.held or [], None
        for event in events:
            event.done.set()

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        self.note("cudaHostRegister")
        assert flags == 1
        if self.refuse:
            return 2
        ctypes.string_at(address, 1)  # mapped
        self.registered[address] = count
        return 0

    def cudaHostUnregister(self, address: int) -> int:
        self.note("cudaHostUnregister")
        return 0 if self.registered.pop(address, None) else 713


class OnCpu(TorchFunctionMode):
    """Tensors of CUDA devices, and pinned ones, lie in plain memory; of the calling thread alone.

    Attributes:
        blocking: copies to a GPU that made the host wait.
        pinned: tensors that were made in pinned memory, as long as they live.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocking = 0
        self.pinned: weakref.WeakSet[torch.Tensor] = weakref.WeakSet()

    def __torch_function__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        options = dict(kwargs or {})
        name = getattr(function, "__name__", "")
        if name == "to" and len(args) > 1 and _is_cuda(args[1]):
            self.blocking += not options.get("non_blocking", False)
            return args[0].clone()
        if _is_cuda(options.get("device")):
            options["device"] = "cpu"
        if options.pop("pin_memory", False):
            made = function(*args, **options)
            self.pinned.add(made)
            return made
        return function(*args, **options)


def played_on_cpu(monkeypatch: pytest.MonkeyPatch) -> Iterator[OnCpu]:
    """A fixture: `FakeCuda`, and `OnCpu` in the thread of the test."""
    FakeCuda(monkeypatch)
    monkeypatch.setattr(streams, "_raw_stream", None)
    with OnCpu() as mode:
        yield mode


def _is_cuda(device: Any) -> bool:
    return isinstance(device, (str, torch.device)) and torch.device(device).type == "cuda"


class FakeEvent:
    """Counts what happens to it."""

    def __init__(self) -> None:
        self.calls: list[str] = []

    def synchronize(self) -> None:
        self.calls.append("synchronize")

    def record(self, stream: Any = None) -> None:
        self.calls.append("record")
