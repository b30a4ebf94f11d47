"""The stand-in itself: streams, events and allocators behave as CUDA and PyTorch document them."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from .cuda import Cuda
from .memory import POISON
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
