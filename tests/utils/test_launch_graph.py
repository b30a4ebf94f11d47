"""Recording the work that fills a batch, with a stand-in for CUDA's driver; on a GPU, the batches of it."""

from __future__ import annotations

import ctypes
import gc
import types
from typing import Any

import pytest
from forks_common import in_child

from gear_loader.utils import driver as drivers
from gear_loader.utils import launch_graph
from gear_loader.utils.launch_graph import RepeatedWork, record

STREAM: Any = types.SimpleNamespace(cuda_stream=77, device=None)


class Library:
    """The driver: what it is called with; `codes` are what calls return, 0 if they are not named."""

    def __init__(self, **codes: int) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.allocations = 0
        self._codes = codes

    def _called(self, name: str, *arguments: Any) -> int:
        self.calls.append((name, *arguments))
        return self._codes.get(name, 0)

    def cuStreamBeginCapture_v2(self, stream: int, mode: int) -> int:
        return self._called("begin", stream, mode)

    def cuStreamEndCapture(self, stream: int, graph: Any) -> int:
        graph._obj.value = 5
        return self._called("end", stream)

    def cuGraphInstantiateWithFlags(self, handle: Any, graph: ctypes.c_void_p, flags: int) -> int:
        handle._obj.value = 6
        return self._called("instantiate", graph.value, flags)

    def cuGraphDestroy(self, graph: ctypes.c_void_p) -> int:
        return self._called("destroy", graph.value)

    def cuGraphExecDestroy(self, handle: int) -> int:
        return self._called("free", handle)

    def cuGraphLaunch(self, handle: int, stream: int) -> int:
        return self._called("launch", handle, stream)


def driver(monkeypatch: pytest.MonkeyPatch, **codes: int) -> Library:
    library = Library(**codes)
    monkeypatch.setattr(drivers, "library", lambda: library)
    monkeypatch.setattr(launch_graph, "_allocations", lambda stream: library.allocations)
    return library


RECORDED = [("begin", 77, 2), "queued", ("end", 77), ("instantiate", 5, 0), ("destroy", 5)]


def test_equal_work_is_recorded_the_second_time_and_replayed_from_then_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    library, work = driver(monkeypatch), RepeatedWork()

    def queue() -> None:
        library.calls.append("queued")  # type: ignore[arg-type]

    work.run("rows", queue, STREAM)
    assert library.calls == ["queued"]
    work.run("rows", queue, STREAM)
    work.run("rows", queue, STREAM)
    assert library.calls[1:] == [*RECORDED, ("launch", 6, 77), ("launch", 6, 77)]
    library.calls.clear()
    work.run(None, queue, STREAM)  # a part of a batch
    work.run("rows", queue, STREAM)
    assert library.calls == ["queued", ("launch", 6, 77)]
    # Other work is queued, and forgets what was recorded.
    library.calls.clear()
    work.run("draw", queue, STREAM)
    assert library.calls == [("free", 6), "queued"]
    work.run("rows", queue, STREAM)
    assert library.calls[2:] == ["queued"]


def test_what_recorded_work_uses_is_kept_as_long(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch)
    work, kept = RepeatedWork(), [types.SimpleNamespace(used=True) for _ in range(2)]
    for _ in range(3):
        work.run("draw", lambda: None, STREAM, kept[0])
    assert work._kept is kept[0]
    work.run("other", lambda: None, STREAM, kept[1])
    assert work._kept is None


@pytest.mark.parametrize("failing", ["begin", "end", "instantiate", "queue"])
def test_work_that_cannot_be_recorded_is_queued_each_time(
    failing: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    library, work, queued = driver(monkeypatch, **{failing: 900}), RepeatedWork(), 0

    def queue() -> None:
        nonlocal queued
        queued += 1
        if failing == "queue" and library.calls and library.calls[-1][0] == "begin":
            raise RuntimeError("operation not permitted when stream is capturing")

    for _ in range(4):
        work.run("rows", queue, STREAM)
    tried = failing != "begin"
    assert queued == 4 + tried
    assert [call[0] for call in library.calls].count("begin") == 1
    assert [call[0] for call in library.calls].count("end") == tried  # never left recording
    assert ("launch", 6, 77) not in library.calls


@pytest.mark.parametrize("where", ["begin", "queue", "end"])
def test_an_interrupt_ends_the_recording(where: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ctrl-C at any point of it: what is queued next is queued, and not recorded."""
    library, work, queued = driver(monkeypatch), RepeatedWork(), 0
    work.run("rows", lambda: None, STREAM)

    def queue() -> None:
        nonlocal queued
        queued += 1
        if where == "queue" and queued == 1:
            raise KeyboardInterrupt

    for name in {"begin": ["cuStreamBeginCapture_v2"], "end": ["cuStreamEndCapture"]}.get(where, []):
        call = getattr(library, name)

        def interrupted(*arguments: Any, call: Any = call, name: str = name) -> int:
            monkeypatch.setattr(library, name, call)
            if where == "begin":
                call(*arguments)
            raise KeyboardInterrupt

        monkeypatch.setattr(library, name, interrupted)
    with pytest.raises(KeyboardInterrupt):
        work.run("rows", queue, STREAM)
    assert [call[0] for call in library.calls if call[0] in ("begin", "end")] == ["begin", "end"]
    library.calls.clear()
    work.run("rows", queue, STREAM)
    assert [call[0] for call in library.calls] == ["begin", "end", "instantiate", "destroy", "launch"]


def test_a_recording_in_which_something_is_allocated_is_thrown_away(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its replays would write memory that is somebody else's by then. Another thread's is no reason to give up."""
    library, work = driver(monkeypatch), RepeatedWork()

    def queue() -> None:
        library.allocations += 1

    for number in range(6):
        work.run("rows", queue, STREAM)
        names = [call[0] for call in library.calls]
        assert names.count("begin") == names.count("end") == names.count("destroy") == min(number, 3)
        assert "launch" not in names
    other = RepeatedWork()
    for allocate in (0, 1, 0):
        other.run("rows", lambda: setattr(library, "allocations", library.allocations + allocate), STREAM)  # noqa: B023
    assert library.calls[-1][0] == "launch"


def test_without_a_driver_nothing_is_recorded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drivers, "library", lambda: None)
    assert record(lambda: pytest.fail("queued"), STREAM) is None

    def no_library(name: str) -> Any:
        raise OSError(f"{name}: cannot open shared object file")

    monkeypatch.undo()
    monkeypatch.setattr(drivers.ctypes, "CDLL", no_library)
    assert drivers.library.__wrapped__() is None


def test_a_launch_that_fails_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    driver(monkeypatch, launch=700)
    graph = record(lambda: None, STREAM)
    assert graph is not None
    with pytest.raises(RuntimeError, match="cuGraphLaunch returned 700"):
        graph.launch(STREAM)


@pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning")
def test_a_graph_is_freed_in_the_process_that_recorded_it(monkeypatch: pytest.MonkeyPatch) -> None:
    library = driver(monkeypatch)
    graphs = [record(lambda: None, STREAM)]

    def freed() -> str:
        graphs.clear()
        gc.collect()
        return str([call for call in library.calls if call[0] == "free"])

    assert in_child(freed) == "[]"
    assert freed() == "[('free', 6)]"
