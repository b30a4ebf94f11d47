"""Errors of one rank become errors of all ranks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

from gear_loader.errors import GearError, RankError

Share = Callable[[dict[str, Any]], Sequence[Mapping[str, Any]]]
"""A collective: takes this rank's answer, returns the answers of all ranks in the order of ranks."""


def attempt(act: Callable[[], Any], default: Any) -> tuple[Any, Exception | None]:
    """Call a function before a collective, in which the other ranks learn of its error.

    Args:
        default: result to use if `act` raises.

    Returns:
        The result of `act` and None, or `default` and the error.
    """
    try:
        return act(), None
    except Exception as error:
        return default, error


def describe(error: BaseException) -> str:
    """Format an error on one line; the type is left out of the library's own errors."""
    name = "" if isinstance(error, GearError) else f"{type(error).__name__}: "
    return f"{name}{error}"


def collect(
    what: str, act: Callable[[], dict[str, Any]], share: Share, ranks: Sequence[int]
) -> tuple[list[Mapping[str, Any]], Exception | None]:
    """Run a function on all ranks at the same time, and share its answers and errors.

    Args:
        what: name of the action in errors: "Rank 1 could not <what>: ...".
        act: this rank's part of the action; returns an answer without the key "error".
        share: collective that shares the answers, and carries a text under the key "error".
        ranks: numbers of the ranks in the default process group, in the order of `share`.

    Returns:
        The answers of all ranks, and the failure that all ranks know of: this rank's own error, or a `RankError`
        that names the ranks that failed. None if no rank failed.
    """
    answer, failure = attempt(act, {})
    try:
        answers = list(share(answer if failure is None else {"error": describe(failure)}))
    except Exception as lost:
        if failure is not None:
            raise failure from lost
        raise
    if failure is None:
        errors = [
            f"Rank {rank} could not {what}: {each['error']}"
            for rank, each in zip(ranks, answers, strict=True)
            if each.get("error")
        ]
        failure = RankError(" ".join(errors)) if errors else None
    return answers, failure


def run_on_all(
    what: str, act: Callable[[], dict[str, Any]], share: Share, ranks: Sequence[int]
) -> list[Mapping[str, Any]]:
    """Run a function on all ranks at the same time; see `collect`.

    Returns:
        The answers of all ranks.

    Raises:
        RankError: another rank has failed; the message names it. An error of `act` is raised as it is.
    """
    answers, failure = collect(what, act, share, ranks)
    if failure is not None:
        raise failure
    return answers
