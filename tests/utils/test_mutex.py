"""Locks and futures that stay usable after an exception at any bytecode."""

from __future__ import annotations

import concurrent.futures
import contextlib
import itertools
import threading

import interrupts_loop
import pytest
from interrupts_loop import interrupt_at

from gear_loader.utils import mutex
from gear_loader.utils.mutex import Future


def test_a_future_that_was_waited_for_has_its_result_set_after_an_exception_at_any_opcode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With the lock of `threading.Condition` the thread that sets the result would wait for ever."""
    files = (mutex.__file__, concurrent.futures._base.__file__, threading.__file__)
    monkeypatch.setattr(interrupts_loop, "FILES", files)
    for number in itertools.count(1):
        future: Future[int] = Future()

        def wait(future: Future[int] = future) -> None:
            with contextlib.suppress(concurrent.futures.TimeoutError):
                future.result(0)

        error = interrupt_at(wait, number)
        setting = threading.Thread(target=future.set_result, args=(number,), daemon=True)
        setting.start()
        setting.join(10)
        assert not setting.is_alive(), f"opcode {number}: {error}"
        assert future.result(0) == number
        if error is None:
            break
    assert number > 20
