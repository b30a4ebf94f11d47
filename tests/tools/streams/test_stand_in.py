"""The stand-in itself: streams, events and allocators behave as CUDA and PyTorch document them."""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from gear_loader.kernels.launching import launch
from gear_loader.utils import launch_graph

from . import kernels
from .cuda import GLOBAL, RELAXED, THREAD_LOCAL, Cuda
from .memory import POISON, View
from .threads import Deadlock

pytestmark = pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
DEVICE = "cuda:1"
POISONED = int.from_bytes(bytes([POISON]) * 8, "little", signed=True)


@pytest.fixture
def cuda() -> Iterator[Cuda]:
    with Cuda(policy="latest").installed() as made:
        yield made


def numbers(value: int, count: int = 8) -> torch.Tensor:
    return torch.full((count,), value, dtype=torch.int64, device=DEVICE)


def stream() -> torch.cuda.Stream:
    return torch.cuda.Stream(DEVICE)


def test_tensors_say_where_they_are_and_nothing_runs_before_it_is_needed(cuda: Cuda) -> None:
    made = numbers(3)
    assert made.device == torch.device(DEVICE)
    assert made.is_cuda
    assert not made.is_pinned()
    total = (made * 2 + 1)[2:5].sum()
    assert sum(len(each.queue) for each in cuda.machine.streams) > 3
    assert int(total) == 21
    assert made.cpu().tolist() == [3] * 8
    with pytest.raises(TypeError, match="can't convert cuda:1"):
        made.numpy()
    with pytest.raises(RuntimeError, match="same device"):
        made + torch.ones(8)


def test_a_stream_waits_only_for_what_it_was_told_to_wait_for(cuda: Cuda) -> None:
    side = stream()
    with torch.cuda.stream(side):
        made = numbers(5)
        event = torch.cuda.Event()
        event.record()
    made.record_stream(torch.cuda.current_stream(DEVICE))
    torch.cuda.current_stream(DEVICE).wait_event(event)
    kept = made.clone()
    cuda.check()
    with torch.cuda.stream(side):
        made.fill_(6)  # nothing orders it with the clone
    assert len(cuda.machine.failures) == 1
    assert "writes what clone on stream 2 reads, and nothing orders them" in cuda.machine.failures[0]
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        made.fill_(7)
    assert len(cuda.machine.failures) == 1
    assert kept.cpu().unique().numel() == 1
    cuda.machine.failures.clear()


def test_freed_memory_is_overwritten_by_the_stream_that_owns_it(cuda: Cuda) -> None:
    made = numbers(1)
    address = made.data_ptr()
    view = made[2:]
    del made
    again = numbers(2)
    assert again.data_ptr() != address  # a view holds it
    del view
    assert numbers(3).data_ptr() == address
    with torch.cuda.stream(stream()):
        assert numbers(4).data_ptr() != address  # the pool of another stream


def test_record_stream_keeps_memory_until_the_other_stream_is_done(cuda: Cuda) -> None:
    side = stream()
    made = numbers(1)
    address = made.data_ptr()
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        kept = made.clone()
    made.record_stream(side)
    del made
    assert numbers(2).data_ptr() != address
    side.synchronize()
    assert numbers(2).data_ptr() == address
    with torch.cuda.stream(side):
        assert kept.cpu().tolist() == [1] * 8
    cuda.check()


def test_without_record_stream_the_next_user_comes_in_between(cuda: Cuda) -> None:
    side = stream()
    made = numbers(1)
    side.wait_stream(torch.cuda.current_stream(DEVICE))
    with torch.cuda.stream(side):
        kept = made.clone()
    del made
    torch.cuda.current_stream(DEVICE).synchronize()
    with torch.cuda.stream(side):
        assert kept.cpu().tolist() == [POISONED] * 8
    assert "the next user of freed memory" in cuda.machine.failures.pop()


def test_pinned_memory_is_kept_for_copies_and_not_for_kernels(cuda: Cuda) -> None:
    pinned = torch.tensor([1, 2, 3], pin_memory=True)
    assert pinned.is_pinned()
    target = torch.empty(3, dtype=torch.int64, device=DEVICE)
    target.copy_(pinned, non_blocking=True)
    address = pinned.data_ptr()
    del pinned
    assert torch.empty(3, dtype=torch.int64, pin_memory=True).data_ptr() != address
    assert target.tolist() == [1, 2, 3]
    pinned = torch.tensor([4, 5, 6], pin_memory=True)
    address = pinned.data_ptr()
    del pinned
    assert torch.empty(3, dtype=torch.int64, pin_memory=True).tolist() == [POISONED] * 3


def test_pageable_memory_has_been_read_when_a_copy_returns(cuda: Cuda) -> None:
    source = torch.arange(3)
    target = torch.empty(3, dtype=torch.int64, device=DEVICE)
    target.copy_(source, non_blocking=True)
    source.zero_()
    assert target.tolist() == [0, 1, 2]
    pinned = torch.arange(3).pin_memory()
    target.copy_(pinned, non_blocking=True)
    pinned.fill_(9)  # too early
    assert target.tolist() == [9, 9, 9]


def test_copies_to_pinned_memory_arrive_later(cuda: Cuda) -> None:
    made, target = numbers(3), torch.zeros(8, dtype=torch.int64, pin_memory=True)
    target.copy_(made, non_blocking=True)
    assert target.tolist() == [0] * 8
    torch.cuda.synchronize(DEVICE)
    assert target.tolist() == [3] * 8


def test_an_event_is_the_place_where_it_was_recorded_last(cuda: Cuda) -> None:
    event = torch.cuda.Event()
    assert event.query()
    made = numbers(1)
    event.record(torch.cuda.current_stream(DEVICE))
    made.add_(1)
    assert not event.query()
    event.synchronize()
    assert event.query()
    assert len(torch.cuda.current_stream(DEVICE).queue) == 1  # type: ignore[attr-defined]


def test_a_wait_that_nothing_ends_is_an_error(cuda: Cuda) -> None:
    with pytest.raises(Deadlock, match="main waits"):
        cuda.threads.wait(lambda: False)


@pytest.mark.parametrize("seed", range(5))
def test_a_seed_is_a_schedule(seed: int) -> None:
    def order() -> list[tuple[int, int]]:
        cuda, seen = Cuda(seed), []
        run = cuda.machine._run

        def noting(stream: object) -> None:
            seen.append((stream.cuda_stream, stream.queue[0].number))  # type: ignore[attr-defined]
            run(stream)  # type: ignore[arg-type]

        cuda.machine._run = noting  # type: ignore[assignment, method-assign]
        with cuda.installed():
            streams = [stream() for _ in range(3)]
            for number in range(20):
                with torch.cuda.stream(streams[number % 3]):
                    numbers(number)
        return seen

    assert order() == order()


# ---------------------------------------------------------------- graphs


def recorded(cuda: Cuda, side: Any, queue: Callable[[], object], mode: int = RELAXED) -> Any:
    """The graph of what is queued, and the code with which its capture ended."""
    graph, handle = ctypes.c_void_p(), ctypes.c_void_p()
    assert cuda.cuStreamBeginCapture_v2(side.cuda_stream, mode) == 0
    with torch.cuda.stream(side):
        queue()
    code = cuda.cuStreamEndCapture(side.cuda_stream, ctypes.byref(graph))
    if code == 0:
        assert cuda.cuGraphInstantiateWithFlags(ctypes.byref(handle), graph, 0) == 0
        assert cuda.cuGraphDestroy(graph) == 0
    return handle.value, code


def found(cuda: Cuda) -> str:
    """What went wrong, which is forgotten."""
    failures, cuda.machine.failures[:] = "\n".join(cuda.machine.failures), []
    return failures


def ready(side: Any) -> None:
    side.wait_stream(torch.cuda.current_stream(DEVICE))


def test_a_replay_runs_what_was_recorded_on_the_addresses_it_had(cuda: Cuda) -> None:
    """Whatever becomes of the names: the function is not called again, and no tensor is looked at."""
    side, calls, holder = stream(), [], {"out": numbers(0), "value": 1}
    source = torch.full((8,), 5, dtype=torch.int64, pin_memory=True)
    first, taken = holder["out"], numbers(0)
    ready(side)

    def queue() -> None:
        calls.append(1)
        holder["out"].add_(holder["value"])
        taken.copy_(source, non_blocking=True)

    graph, _ = recorded(cuda, side, queue)
    holder.update(out=numbers(100), value=50)
    ready(side)
    for value in (6, 7):
        source.fill_(value)
        assert cuda.cuGraphLaunch(graph, side.cuda_stream) == 0
        side.synchronize()
        assert taken.cpu().tolist() == [value] * 8
    assert len(calls) == 1
    assert first.cpu().tolist() == [2] * 8
    assert holder["out"].cpu().tolist() == [100] * 8
    cuda.check()


@pytest.mark.parametrize("kind", ["freed", "handed out again", "pinned", "registered again", "not touched"])
def test_a_replay_over_memory_that_was_given_back_is_an_error_that_names_it(cuda: Cuda, kind: str) -> None:
    side, kept, page = stream(), numbers(0), torch.zeros(8, dtype=torch.int64)
    given = torch.ones(8, dtype=torch.int64, pin_memory=True) if kind == "pinned" else numbers(1)
    if kind == "registered again":
        given = page
        cuda.cudaHostRegister(page.data_ptr(), page.nbytes, 1)
    ready(side)
    address, named, held = given.data_ptr(), [View.of(given)], [given]
    del given

    def queue() -> None:
        if kind == "not touched":  # an argument whose memory the kernel need not read
            cuda.launch(torch.device(DEVICE), "kernel", lambda: None, arguments=named)
        else:
            kept.copy_(held[0], non_blocking=True)

    graph, _ = recorded(cuda, side, queue)
    assert cuda.cuGraphLaunch(graph, side.cuda_stream) == 0
    side.synchronize()
    cuda.check()
    if kind == "registered again":
        cuda.cudaHostUnregister(address)
        cuda.cudaHostRegister(address, page.nbytes, 1)
    held.clear()
    if kind == "handed out again":
        assert numbers(3).data_ptr() == address
        ready(side)
    assert cuda.cuGraphLaunch(graph, side.cuda_stream) == 0
    assert f"uses {address:#x}, which was given back since it was recorded" in found(cuda)
    side.synchronize()
    found(cuda)


@pytest.mark.parametrize("mode", [GLOBAL, THREAD_LOCAL, RELAXED])
def test_what_no_mode_allows_ends_a_capture(cuda: Cuda, mode: int) -> None:
    side, made, page = stream(), numbers(1), torch.zeros(8, dtype=torch.int64)
    ready(side)
    before, inside = torch.cuda.Event(), torch.cuda.Event()
    before.record(torch.cuda.current_stream(DEVICE))
    calls: list[Callable[[], object]] = [
        side.synchronize,
        side.query,
        lambda: torch.cuda.synchronize(DEVICE),
        lambda: side.wait_event(before),
        lambda: (inside.record(side), inside.query()),
        lambda: (inside.record(side), inside.synchronize()),
        lambda: (inside.record(side), torch.cuda.current_stream(DEVICE).wait_event(inside)),
        lambda: made.copy_(page, non_blocking=True),
        lambda: page.copy_(made, non_blocking=True),
    ]
    for call in calls:

        def queue() -> None:
            with pytest.raises(RuntimeError, match="operation not permitted"):
                call()  # noqa: B023
            with pytest.raises(RuntimeError, match="due to a previous error"):
                made.add_(1)

        assert recorded(cuda, side, queue, mode) == (None, 901)
        assert found(cuda)
    with pytest.raises(RuntimeError, match="last recorded in a capture"):
        inside.query()  # after it, too
    inside.record(side)
    inside.synchronize()
    found(cuda)


UNSAFE: dict[str, Callable[[Cuda], object]] = {
    "an event's query": lambda cuda: torch.cuda.Event().query(),
    "an event's wait": lambda cuda: torch.cuda.Event().synchronize(),
    "an allocation": lambda cuda: torch.empty(8, device=DEVICE),
    "a registration": lambda cuda: cuda.cudaHostRegister(1 << 40, 64, 1),
}


@pytest.mark.parametrize("call", UNSAFE)
@pytest.mark.parametrize(
    ("capture", "own", "here", "there"),
    [
        (GLOBAL, GLOBAL, True, True),
        (GLOBAL, THREAD_LOCAL, True, False),
        (THREAD_LOCAL, GLOBAL, True, False),
        (RELAXED, GLOBAL, False, False),
        (GLOBAL, RELAXED, False, False),
    ],
)
def test_unsafe_calls_end_captures_as_the_modes_say(
    cuda: Cuda, call: str, capture: int, own: int, here: bool, there: bool
) -> None:
    """Of the capture and of the calling thread; in the thread that captures, and in another."""

    def refused() -> bool:
        cuda.set_mode(own)
        try:
            UNSAFE[call](cuda)
        except RuntimeError:
            return True
        finally:
            cuda.set_mode(GLOBAL)
        return False

    with cuda.capturing(mode=capture):
        assert refused() == here
    seen: list[bool] = []
    with cuda.capturing(mode=capture):
        thread = cuda.threads.threading.Thread(lambda: seen.append(refused()))
        thread.start()
        thread.join()
    assert seen == [there]
    assert bool(found(cuda)) == (here or there)


def test_work_of_another_thread_enters_a_capture_and_is_noticed(cuda: Cuda) -> None:
    side, mine, theirs = stream(), numbers(0), numbers(0)
    ready(side)

    def launch() -> None:
        with torch.cuda.stream(side):
            theirs.add_(1)

    def queue() -> None:
        thread = cuda.threads.threading.Thread(launch, name="other")
        mine.add_(1)
        thread.start()
        thread.join()

    graph, code = recorded(cuda, side, queue)
    assert code == 0
    assert "add_ of thread other entered the capture of stream" in found(cuda)
    assert cuda.cuGraphLaunch(graph, side.cuda_stream) == 0
    side.synchronize()
    assert theirs.cpu().tolist() == [1] * 8


def test_memory_given_back_in_a_capture_is_found(cuda: Cuda) -> None:
    side, held, kept = stream(), [numbers(1), numbers(2)], numbers(0)
    held[0].record_stream(side)
    ready(side)
    recorded(cuda, side, lambda: held.pop(0))
    assert "which uses it, captures: the allocator's event enters the graph" in found(cuda)
    address = held[0].data_ptr()
    recorded(cuda, side, lambda: (kept.copy_(held[0]), held.clear()))
    assert f"copy_ in a recording that goes on uses {address:#x}" in found(cuda)
    found(cuda)


def test_the_rules_of_beginning_and_ending_a_capture(cuda: Cuda) -> None:
    side, graph = stream(), ctypes.byref(ctypes.c_void_p())
    default = torch.cuda.default_stream(DEVICE)
    assert cuda.cuStreamBeginCapture_v2(default.cuda_stream, RELAXED) == 900
    assert cuda.cuStreamEndCapture(side.cuda_stream, graph) == 401
    for mode, code in ((GLOBAL, 908), (THREAD_LOCAL, 908), (RELAXED, 0)):
        ended: list[int] = []
        assert cuda.cuStreamBeginCapture_v2(side.cuda_stream, mode) == 0
        assert cuda.cuStreamBeginCapture_v2(side.cuda_stream, mode) == 900
        thread = cuda.threads.threading.Thread(
            lambda: ended.append(cuda.cuStreamEndCapture(side.cuda_stream, graph))  # noqa: B023
        )
        thread.start()
        thread.join()
        assert ended == [code]
        if code:
            assert cuda.cuStreamEndCapture(side.cuda_stream, graph) == 0
    cuda.check()


def test_allocations_are_counted_by_device(cuda: Cuda) -> None:
    def counted(device: int) -> int:
        found: int = torch.cuda.memory_stats_as_nested_dict(device)["allocation"]["all"]["allocated"]
        return found

    before = counted(0), counted(1)
    kept = torch.empty(8, device=DEVICE)
    del kept
    torch.empty(8, device=DEVICE)  # the same memory: counted as well
    torch.empty(8, pin_memory=True)
    assert (counted(0), counted(1)) == (before[0], before[1] + 2)


def test_a_launch_that_keeps_memory_alive_is_a_defect_of_the_stand_in(cuda: Cuda) -> None:
    """A graph keeps nothing: a twin that does would hide that memory was freed."""
    side, made = stream(), numbers(1)
    ready(side)
    held = {"parts": [made]}
    recorded(cuda, side, lambda: cuda.launch(torch.device(DEVICE), "kernel", lambda: held))
    assert "kernel keeps memory that CUDA would not" in found(cuda)


@pytest.mark.parametrize("change", ["value", "address", "grid", "less", "more"])
def test_equal_keys_whose_launches_differ_are_found(cuda: Cuda, change: str) -> None:
    """In the arguments that kernels get, whatever their twins do with them."""
    side, made, work, count = stream(), [numbers(0), numbers(0)], launch_graph.RepeatedWork(), 0
    ready(side)

    def queue() -> None:
        last = count == 3
        for _ in range(2 + (change == "more" and last) - (change == "less" and last)):
            grid = (2 if change == "grid" and last else 1,)
            which = made[change == "address" and last]
            value = 4 + (change == "value" and last)
            launch(kernels.priority.update_kernel, grid, which, value, BLOCK=8)
            kernels._Launch(cuda, torch.device(DEVICE), "kernel").queue(lambda: None)

    with torch.cuda.stream(side):
        for count in range(4):  # noqa: B007
            cuda.check()
            work.run("key", queue, side)
    message = found(cuda)
    assert "a replay launches" in message
    assert "update_kernel" in message
