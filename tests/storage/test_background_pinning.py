"""Pinning in a thread: the table is usable meanwhile, and closing, forks, errors and exits at any moment are safe."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from cuda_common import WAIT, FakeCuda, OnCpu

import gear_loader as gear
from gear_loader.collection.padded_cuda import PaddedCuda
from gear_loader.errors import GpuError
from gear_loader.storage import pinning, shared_memory

pytestmark = [
    pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda"),
    pytest.mark.filterwarnings("ignore:.*use of fork.*may lead to deadlocks:DeprecationWarning"),
]
CHUNK = 1 << 14


class SlowCuda(FakeCuda):
    """Registers one chunk each time that `gate` is released; `asked` is released when a call waits."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        super().__init__(monkeypatch)
        self.gate, self.asked = threading.Semaphore(0), threading.Semaphore(0)
        self.refuse_from = 1 << 30
        monkeypatch.setattr(pinning, "_clear_cuda_error", lambda: None)
        monkeypatch.setattr(pinning, "_CHUNK", CHUNK)

    def cudaHostRegister(self, address: int, count: int, flags: int) -> int:
        self.asked.release()
        assert self.gate.acquire(timeout=WAIT)
        self.refuse = len(self.registered) >= self.refuse_from
        return super().cudaHostRegister(address, count, flags)

    def let_all_pass(self) -> None:
        self.gate.release(1 << 20)


@pytest.fixture
def cuda(monkeypatch: pytest.MonkeyPatch) -> Any:
    made = SlowCuda(monkeypatch)
    yield made
    made.let_all_pass()


def made(name: str | None = None) -> gear.Table:
    table = gear.Table.create(
        {"value": gear.Column(torch.float32, (8,))}, max_steps=2000, max_trajectories=200, name=name
    )
    for number in range(20):
        table.add(rows(number))
    return table


def rows(number: int) -> dict[str, Any]:
    return {"value": np.full((5, 8), number, np.float32)}


def begun(cuda: SlowCuda, table: gear.Table, chunks: int = 2) -> None:
    """Begin to pin, and wait until some chunks are registered and the next call is at work."""
    assert table.pin(wait=False) is False
    for _ in range(chunks):
        cuda.gate.release()
    for _ in range(chunks + 1):
        assert cuda.asked.acquire(timeout=WAIT)
    assert len(cuda.registered) == chunks


def ended(table: gear.Table) -> None:
    running = table._engine.region._mapping.pinning
    if running is not None:
        running.join(WAIT)


def test_the_table_is_written_read_and_attached_meanwhile(cuda: SlowCuda) -> None:
    with made("pinned-meanwhile") as table:
        begun(cuda, table)
        assert table._engine.region.is_pinning
        assert not table._engine.region.is_pinned, "a part of it is no use to a kernel"
        table.add(rows(20))
        with gear.Table.attach("pinned-meanwhile") as other:
            assert len(other) == 21
        assert (table[20]["value"] == 20).all()
        assert table.pin(wait=False) is False
        cuda.let_all_pass()
        assert table.pin()
        size = sum(cuda.registered.values())
        assert size >= table._engine.region.layout.region_bytes
        assert table._engine.region.pinned_bounds == sorted(cuda.registered)[1:]
        assert set(cuda.devices_of("cudaHostRegister")) == {0}
        table.unlink()
    assert not cuda.registered


def test_batches_change_to_zero_copy_between_two_requests(
    cuda: SlowCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Buffers that the CPU fills are passed over from then on, in the iteration that is running and in `sample`."""
    table = made()
    begun(cuda, table)
    with OnCpu():
        data = gear.ReplayDataset(
            table, batch_size=4, windows=gear.Window(2), device="cuda:0", prefetch=0, seed=1
        )
        twin = gear.ReplayDataset(
            table, batch_size=4, windows=gear.Window(2), device="cpu", prefetch=0, seed=1
        )
        batches, expected = iter(data), iter(twin)
        for _ in range(2):
            assert torch.equal(next(batches)["value"], next(expected)["value"])
        (collector,) = data._buffers.collectors
        assert collector.awaits_pinning
        assert not collector.zero_copy
        cuda.let_all_pass()
        assert table.pin()
        launched: list[int] = []
        monkeypatch.setattr(
            PaddedCuda, "_launch", lambda self, buffers, claim: launched.append(claim.part.stop)
        )
        next(batches)
        assert launched == [4]
        assert collector.zero_copy
        assert not collector.awaits_pinning
    table.close()


def test_a_refusal_in_the_middle_leaves_nothing_registered(cuda: SlowCuda) -> None:
    with made() as table:
        cuda.refuse_from = 2
        begun(cuda, table)
        cuda.let_all_pass()
        assert table.pin() is False
        assert not cuda.registered
        assert cuda.devices_of("cudaHostUnregister") == [0, 0]
        assert not table._engine.region.is_pinning
        assert table.pin() is False
        assert len(cuda.devices_of("cudaHostRegister")) == 3, "not tried again"
        child = os.fork()
        if child == 0:  # the child has a copy, as the parent reads no pinned memory
            os._exit(0 if len(table) == 20 else 1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0


def test_an_error_in_the_thread_is_raised_by_who_waits(
    cuda: SlowCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    with made() as table:
        begun(cuda, table, 1)
        monkeypatch.setattr(cuda, "cudart", None, raising=False)
        monkeypatch.setattr(torch.cuda, "cudart", lambda: cuda)
        monkeypatch.setattr(cuda, "note", lambda call: 1 / 0 if call == "cudaHostRegister" else None)
        running = table._engine.region._mapping.pinning
        cuda.let_all_pass()
        assert running is not None
        with pytest.raises(ZeroDivisionError):
            running.wait()
        assert not cuda.registered
        monkeypatch.undo()


@pytest.mark.parametrize("name", [None, "closed-while-pinned"])
def test_closing_stops_it_and_unmaps_only_afterwards(cuda: SlowCuda, name: str | None) -> None:
    table = made(name)
    begun(cuda, table)
    mapping = table._engine.region._mapping
    running = mapping.pinning
    if name:
        table.unlink()
    table.close()  # does not wait
    assert mapping.memory is not None, "a call of CUDA is reading its page tables"
    calls = len(cuda.devices_of("cudaHostRegister"))
    cuda.let_all_pass()
    assert running is not None
    running.join(WAIT)
    assert not cuda.registered
    assert len(cuda.devices_of("cudaHostRegister")) <= calls + 1, "it went on after the table was closed"
    assert mapping.memory is None
    assert mapping.key not in shared_memory.descriptors


def test_a_table_attached_again_while_it_stops_is_pinned_afresh(cuda: SlowCuda) -> None:
    table = made("closed-and-attached")
    begun(cuda, table)
    table.close()
    with gear.Table.attach("closed-and-attached") as again:
        cuda.let_all_pass()
        assert again.pin()
        assert sum(cuda.registered.values()) >= again._engine.region.layout.region_bytes
        again.unlink()
    assert not cuda.registered


@pytest.mark.parametrize("name", [None, "forked-while-pinned"])
def test_a_fork_in_the_middle(cuda: SlowCuda, name: str | None) -> None:
    """A child has no thread and no registration; of a private table it has nothing, a named one it can close."""
    table = made(name)
    begun(cuda, table)
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        try:
            found = f"{len(table)} {table._engine.region.is_pinning} {table._engine.region.is_pinned}"
            table.close()
            found += f" {table._engine.region._mapping.memory}"
        except BaseException as error:
            found = type(error).__name__
        os.write(writing, found.encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read().decode()
    os.waitpid(child, 0)
    assert answer == ("20 False False None" if name else "PrivateTableError")
    cuda.let_all_pass()
    assert table.pin()
    assert len(table) == 20
    if name:
        table.unlink()
    table.close()
    assert not cuda.registered


def test_waiting_for_a_call_that_does_not_return_has_a_deadline(
    cuda: SlowCuda, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pinning, "_STALLED", 0.05)
    table = made()
    begun(cuda, table)
    with pytest.raises(GpuError, match=r"no progress for 0.05 s after 32\.0 KiB of"):
        table.pin()
    assert table._engine.region.is_pinning
    cuda.let_all_pass()
    ended(table)
    assert table.pin()
    table.close()


PROGRAM = """
import atexit, threading
# Runs after the function that the library registers when it is imported.
atexit.register(lambda: print("registered:", len(cuda.registered), flush=True))
import pytest
from test_background_pinning import SlowCuda, begun, made
cuda = SlowCuda(pytest.MonkeyPatch())
table = made()
begun(cuda, table)
timer = threading.Timer(0.5, cuda.gate.release)  # the running call returns while the process ends
timer.daemon = True
timer.start()
{end}
"""


@pytest.mark.parametrize(
    ("end", "code"),
    mostly_long(
        [("pass", 0), ("raise KeyboardInterrupt", -signal.SIGINT), ("table.close()", 0)], ("pass", 0)
    ),
)
def test_the_process_ends_while_it_runs(end: str, code: int) -> None:
    """It waits for the running call, and unregisters what was registered."""
    here = Path(__file__).parent
    paths = os.pathsep.join([str(here), str(here.parent), *sys.path])
    program = PROGRAM.format(end=end)
    done = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, "PYTHONPATH": paths},
        capture_output=True,
        text=True,
        timeout=WAIT,
        check=False,
    )
    assert done.stdout == "registered: 0\n", done.stderr
    assert done.returncode == code
    assert "Exception in thread" not in done.stderr
