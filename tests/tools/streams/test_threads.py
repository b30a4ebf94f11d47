"""Threads that take turns: none starves a device, and a lost turn is an error with stacks, not a hang."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable

import pytest

from . import threads as stand_in
from .threads import Deadlock, LostTurn, Threads


def made(work: Callable[[], bool] = lambda: False) -> Threads:
    return Threads(random.Random(0), work)


def look(threads: Threads, found: Callable[[], bool]) -> None:
    while not found():
        threads.time.sleep(0)


def test_a_device_works_although_threads_can_run() -> None:
    left = [3]

    def work() -> bool:
        left[0] -= left[0] > 0
        return left[0] > 0

    threads = made(work)
    threads.patience = 1.0
    for name in ("one", "other"):
        threads.start(look, (threads, lambda: left[0] == 0), name)
    threads.wait(lambda: left[0] == 0)
    threads.finish()


def test_threads_that_run_in_circles_are_an_error_of_all(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "MOST", 500)
    threads = made()
    members = [threads.start(look, (threads, lambda: False), name) for name in ("one", "other")]
    with pytest.raises(
        Deadlock, match=r"(?s)in 500 turns.* last turns: .*main waits:.*one can run:.*in look"
    ):
        threads.wait(lambda: False)
    threads.finish()
    assert all(each.ended for each in members)


def test_a_thread_that_gives_away_the_turn_of_another_is_an_error() -> None:
    threads, errors = made(), []
    threads.start(lambda: None, (), "next")

    def hand() -> None:
        try:
            threads.switch()
        except LostTurn as error:
            errors.append(str(error))

    thread = threading.Thread(target=hand, name="stranger")
    thread.start()
    thread.join()
    assert "stranger gives next the turn of main" in errors[0]
    with pytest.raises(LostTurn, match="stranger"):  # the run has failed
        threads.wait(lambda: False)
    threads.finish()


def test_a_thread_that_waits_elsewhere_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stand_in, "WAIT", 0.1)
    threads, lock = made(), threading.Lock()

    def waiting_elsewhere() -> None:
        with lock:
            pass

    with lock:
        threads.start(waiting_elsewhere, (), "elsewhere")
        with pytest.raises(
            LostTurn, match=r"(?s)main was not given its turn.*elsewhere can run:.*in waiting_elsewhere"
        ):
            threads.switch()
    threads.finish()


def test_a_thread_knows_what_its_starter_knew_and_whoever_joins_it_what_it_knew() -> None:
    threads, known = made(), {"main": {1}}
    threads.tell = lambda: set(known.get(threads.current.name, ()))  # type: ignore[attr-defined]
    threads.hear = lambda told: known.setdefault(threads.current.name, set()).update(told)  # type: ignore[attr-defined]
    thread = threads.threading.Thread(target=lambda: threads.hear({2}), name="new")
    thread.start()
    thread.join()
    assert known == {"main": {1, 2}, "new": {1, 2}}
    threads.finish()
