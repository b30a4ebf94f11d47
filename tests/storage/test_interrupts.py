"""An exception at any bytecode leaves nothing behind: no lock, no read ticket, no slot that is being written.

Each test runs `interrupts_loop` in a process of its own, because it traces, and because signals go to the main thread.
After each interruption, whose traceback is kept meanwhile, another thread and another process take the lock, and the
index is checked.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import gear_loader as gear
from gear_loader.errors import LockTimeoutError
from gear_loader.storage.lock import IndexLock
from gear_loader.storage.operations.view import READING
from gear_loader.utils.mutex import holds_any, new_mutex, run_alone

HERE = Path(__file__).parents[1]
CALLS = (
    *("add", "extend", "extend_in_three_steps", "read", "remove", "stats", "write", "write_chunks"),
    *("write_overlapping_chunks", "sample", "sample_once", "sample_fifo", "sample_prioritized", "iterate"),
    *("iterate_ahead", "iterate_prioritized", "break_off", "packed", "budget", "mixture", "fill", "features"),
    *("save", "from_disk", "packed_from_disk", "add_on_disk", "state"),
)


def interrupted(*options: object, timeout: float = 1200) -> list[int]:
    """How often `interrupts_loop` has interrupted calls in each of its parts, with nothing left."""
    paths = [str(HERE), str(HERE.parent), *filter(None, [os.environ.get("PYTHONPATH")])]
    done = subprocess.run(
        [sys.executable, str(HERE / "tools" / "interrupts_loop.py"), *map(str, options)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(paths)},
        capture_output=True,
        text=True,
        timeout=timeout,
    )
    assert done.returncode == 0, done.stderr[-4000:]
    return [int(line) for line in done.stdout.split()]


def test_exceptions_at_some_opcodes_and_signals_leave_nothing() -> None:
    opcodes, signals = interrupted("opcodes", "all", 1, 1, "then", "signals", 20, 3)
    assert opcodes >= len(CALLS)
    assert signals == 20


@pytest.mark.long
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("part", range(3))
def test_exceptions_at_more_opcodes_leave_nothing(part: int) -> None:
    calls = CALLS[part::3]
    found = interrupted("opcodes", ",".join(calls), 30, 5)[0]
    assert 20 * len(calls) < found <= 30 * len(calls)


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(1300)
@pytest.mark.parametrize("call", CALLS)
def test_exceptions_at_many_opcodes_leave_nothing(call: str) -> None:
    """At 250 of the thousand or more opcodes of each call; `interrupts_loop.py opcodes CALL 0 0` takes all of them."""
    assert 100 < interrupted("opcodes", call, 250, 5)[0] <= 250


@pytest.mark.long
@pytest.mark.exhaustive
@pytest.mark.timeout(3700)
def test_many_signals_leave_nothing() -> None:
    assert interrupted("signals", 10_000, 3, timeout=3600) == [10_000]


@pytest.mark.parametrize(
    "count",
    [
        pytest.param(1, marks=pytest.mark.long),
        pytest.param(40, marks=[pytest.mark.long, pytest.mark.exhaustive, pytest.mark.timeout(3700)]),
    ],
)
def test_a_handler_gets_the_state_in_the_middle_of_any_call(count: int) -> None:
    assert interrupted("states", "all", count, 7, timeout=3600)[0] > len(CALLS) * count // 2


def test_a_lock_is_not_taken_twice_by_a_thread() -> None:
    """As a signal handler would, in the middle of a call: an error at once, and the first one goes on."""
    lock = IndexLock("the table")

    def section() -> str:
        assert holds_any()
        with pytest.raises(LockTimeoutError, match="This thread holds the lock of the table already"):
            lock.run(int)
        with pytest.raises(LockTimeoutError, match="This thread holds the lock of the table already"), lock:
            pass
        return "done"

    assert lock.run(section) == "done"
    assert not holds_any()


def test_a_mutex_is_left_alone_by_who_finds_it_taken() -> None:
    mutex = new_mutex()
    assert run_alone(mutex, lambda: 7) == 7
    assert run_alone(mutex, lambda: (run_alone(mutex, lambda: 7),)) == (None,)
    with pytest.raises(KeyError):
        run_alone(mutex, lambda: {}["nothing"])
    assert not holds_any()


def test_a_ticket_is_given_back_once() -> None:
    sizes = {"max_steps": 10, "max_trajectories": 2}
    with gear.Table.create({"x": gear.Column(torch.float32)}, **sizes) as table:
        first = table._engine.reader().begin_read()
        first.end()
        second = table._engine.reader().begin_read()
        assert second.row == first.row
        first.end()  # the row is the second one's
        assert table._engine.region.array("readers")[second.row, READING]
        second.end()
        assert not table._engine.region.array("readers")[:, READING].any()
