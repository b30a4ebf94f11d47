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
from gear_loader.utils.mutex import Event, Future


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
        setting.join(60)
        assert not setting.is_alive(), f"opcode {number}: {error}"
        assert future.result(0) == number
        if error is None:
            break
    assert number > 20


def test_an_event_wakes_threads_and_is_set_again_after_an_exception_at_any_opcode(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """With `threading.Event` a later `set`, and a thread that waits, would wait for ever."""
    monkeypatch.setattr(interrupts_loop, "FILES", (mutex.__file__,))
    monkeypatch.setattr(mutex, "_LONGEST_WAIT", 0.01)
    for number in itertools.count(1):
        event, began = Event(), threading.Event()

        def wait(event: Event = event, began: threading.Event = began) -> None:
            began.set()
            event.wait(120)

        waiting = threading.Thread(target=wait, daemon=True)
        waiting.start()
        began.wait()
        error = interrupt_at(event.set, number)
        event.set()
        waiting.join(60)
        assert not waiting.is_alive(), f"opcode {number}: {error}"
        assert event.is_set()
        assert event.wait(0)
        if error is None:
            break
    assert number > 10
    assert not Event().wait(0.02)
