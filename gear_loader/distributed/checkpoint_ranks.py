"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from gear_loader.distributed.failures import run_on_all
from gear_loader.errors import RankError, SchemaError
from gear_loader.storage.ids import LARGEST_ORIGIN

__all__ = ["Agree", "CheckpointRanks"]

Agree = Callable[[dict[str, Any]], list[dict[str, Any]]]
"""All-gather of JSON: takes this rank's answer, returns the answers of all ranks in their order; raises an error when a
rank is lost."""


class CheckpointRanks:
    """Runs the steps of a checkpoint on all ranks; an error of one rank is an error of all.

    Args:
        agree: all-gather of JSON; None if this rank runs the steps alone.

    Attributes:
        lost: whether the other ranks are lost: it is not known which answers of this rank they have received.

    Raises:
        SchemaError: `rank` or `world_size` is invalid.
    """

    def __init__(self, rank: Any, world_size: Any, agree: Agree | None) -> None:
        for name, value in (("rank", rank), ("world_size", world_size)):
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
                raise SchemaError(f"{name} is {value!r}; expected an integer.")
        if not 1 <= world_size <= LARGEST_ORIGIN + 1 or not 0 <= rank < world_size:
            raise SchemaError(
                f"rank is {rank} and world_size is {world_size}; expected a world_size from 1 to "
                f"{LARGEST_ORIGIN + 1:,}, and a rank from 0 to world_size - 1."
            )
        self.rank, self.size, self._agree = int(rank), int(world_size), agree
        self.lost = False

    def run(self, what: str, act: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run a step on all ranks at the same time.

        Args:
            what: name of the step in errors: "Rank 1 could not <what>: ...".
            act: this rank's part of the step; returns its answer (JSON).

        Returns:
            The answers of all ranks, in their order; this rank's alone without `agree`.

        Raises:
            RankError: another rank has failed, or is lost. An error of `act` is raised as it is.
        """
        if self._agree is None:
            return [act()]
        ranks = range(self.size)
        answers = run_on_all(what, act, lambda answer: self._share(what, answer), ranks)
        return [dict(answer["said"]) for answer in answers]

    def _share(self, what: str, answer: dict[str, Any]) -> list[dict[str, Any]]:
        """Share this rank's answer, or the text of its error under "error"."""
        assert self._agree is not None
        error = answer.get("error")
        said = answer if error is None else {}
        try:
            answers = self._agree({"rank": self.rank, "what": what, "error": error, "said": said})
        except Exception as lost:
            if error is None:
                self.lost = True
            if isinstance(lost, RankError):
                raise
            raise RankError(
                f"Rank {self.rank} lost the other ranks in the step {what!r}: {lost}. Look for the rank that failed "
                "first."
            ) from lost
        found = [(each["rank"], each["what"]) for each in answers]
        if error is None and found != [(rank, what) for rank in range(self.size)]:
            raise RankError(
                f"Rank {self.rank} expected answers of ranks 0 to {self.size - 1} to the step {what!r}; received "
                f"{found}. Call it on all ranks at the same time, each with its own rank and the same world_size."
            )
        return answers
