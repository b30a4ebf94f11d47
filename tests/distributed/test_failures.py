"""An error of one rank is an error of all ranks."""

from __future__ import annotations

import re
from collections.abc import Callable
from typing import Any

import pytest

from gear_loader.distributed.failures import attempt, collect, describe, run_on_all
from gear_loader.errors import RankError, SchemaError


def shared_with(*others: dict[str, Any]) -> Callable[[dict[str, Any]], list[dict[str, Any]]]:
    """A collective in which this rank is the first, and the other ranks have these answers."""
    return lambda answer: [answer, *others]


def test_the_answers_of_all_ranks() -> None:
    answers = run_on_all("count", lambda: {"n": 1}, shared_with({"n": 2}), [4, 7])
    assert answers == [{"n": 1}, {"n": 2}]


@pytest.mark.parametrize(
    ("others", "message"),
    [
        ([{"error": "no disk"}, {}], "Rank 7 could not count: no disk"),
        ([{"error": "a"}, {"error": "b"}], "Rank 7 could not count: a Rank 9 could not count: b"),
    ],
)
def test_ranks_that_failed_are_named(others: list[dict[str, Any]], message: str) -> None:
    with pytest.raises(RankError, match=f"^{re.escape(message)}$"):
        run_on_all("count", dict, shared_with(*others), [4, 7, 9])


def test_an_own_error_is_shared_and_raised_as_it_is() -> None:
    shared = []

    def share(answer: dict[str, Any]) -> list[dict[str, Any]]:
        shared.append(answer)
        return [answer, {"error": "also"}]

    def act() -> dict[str, Any]:
        raise ValueError("bad")

    with pytest.raises(ValueError, match=r"^bad$"):
        run_on_all("count", act, share, [0, 1])
    assert shared == [{"error": "ValueError: bad"}]


def test_a_collective_that_fails_does_not_hide_an_own_error() -> None:
    def share(answer: dict[str, Any]) -> list[dict[str, Any]]:
        raise RankError("Rank 1 is gone.")

    with pytest.raises(RankError, match=r"^Rank 1 is gone\.$"):
        collect("count", dict, share, [0, 1])
    with pytest.raises(ZeroDivisionError):
        collect("count", lambda: {"n": 1 // 0}, share, [0, 1])


def test_attempt() -> None:
    assert attempt(lambda: 3, 0) == (3, None)
    value, error = attempt(lambda: 1 // 0, 5)
    assert value == 5
    assert isinstance(error, ZeroDivisionError)


def test_descriptions() -> None:
    assert describe(SchemaError("wrong")) == "wrong"
    assert describe(KeyError("x")) == "KeyError: 'x'"
