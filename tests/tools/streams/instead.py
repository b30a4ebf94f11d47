"""Runs a program with the stand-in in the place of `torch.cuda`: ``python tests/tools/streams/instead.py -m NAME``.

Also ``-c CODE`` and ``FILE ARGS``, as of Python, so that a script that starts Python can start this. What programs use
beside what the library uses is here: events with times, graphs of PyTorch, what a device is called.
"""

from __future__ import annotations

import contextlib
import runpy
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

ROOT = Path(__file__).parents[3]
if __name__ == "__main__":  # as pytest has it
    sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "tests" / "tools")]


from streams import threads  # noqa: E402
from streams.cuda import Cuda  # noqa: E402
from streams.machine import Captured, Event, Stream  # noqa: E402


class TimedEvent(Event):
    """An event that knows when it happened."""

    def record(self, stream: Stream | None = None) -> None:
        super().record(stream)
        if self.marker is not None:
            self.seconds = time.perf_counter()
            if not self.marker.done:
                self.marker.call = self._happen

    def _happen(self) -> None:
        self.seconds = time.perf_counter()

    def elapsed_time(self, end: TimedEvent) -> float:
        """Milliseconds between two events that have happened."""
        for each in (self, end):
            if each.marker is None or not each.marker.done:
                raise RuntimeError("CUDA error: device not ready")
        return max(1e3 * (end.seconds - self.seconds), 1e-3)


class Graph:
    """In the place of `torch.cuda.CUDAGraph`: captures the current stream, and replays on it."""

    def __init__(self, cuda: Cuda) -> None:
        self._cuda = cuda
        self._operations: list[Captured] = []
        self._kept: Any = None

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        self._stream: Stream = self._cuda.current_stream()
        self._capturing = self._cuda.capturing(self._stream)
        self._capturing.__enter__()

    def capture_end(self) -> None:
        self._operations = list(self._stream.captured or ())
        self._capturing.__exit__(None, None, None)

    def replay(self) -> None:
        self._cuda.machine.replay(self._cuda.current_stream(), self._operations)


@contextlib.contextmanager
def installed(policy: str = "eager") -> Iterator[Cuda]:
    """The stand-in with these things."""
    cuda = Cuda(policy=policy)  # type: ignore[arg-type]
    with cuda.installed(), pytest.MonkeyPatch.context() as patch:
        properties = torch.cuda.get_device_properties
        more = {
            "Event": lambda enable_timing=False, blocking=False: TimedEvent(cuda.machine, blocking=blocking),
            "CUDAGraph": lambda: Graph(cuda),
            "get_device_name": lambda device=None: "stand-in",
            "get_device_capability": lambda device=None: (9, 0),
            "get_device_properties": lambda device=None: _named(properties(device)),
            "_sleep": lambda cycles: cuda.launch(cuda.device_of("cuda"), "sleep", lambda: None),
            "manual_seed_all": lambda seed: None,
        }
        for name, value in more.items():
            patch.setattr(torch.cuda, name, value)
        patch.setattr(threads, "WAIT", 3600.0)  # a program may compute for long between two calls
        yield cuda


def _named(properties: Any) -> Any:
    properties.name = "stand-in"
    properties.major, properties.minor = 9, 0
    properties.total_memory = 1 << 40
    return properties


def main() -> None:
    first, *sys.argv = sys.argv[1:]
    with installed() as cuda:
        if first == "-m":
            runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        elif first == "-c":
            exec(sys.argv[0], {"__name__": "__main__"})
        else:
            sys.argv.insert(0, first)
            runpy.run_path(first, run_name="__main__")
    cuda.check()


if __name__ == "__main__":
    main()
