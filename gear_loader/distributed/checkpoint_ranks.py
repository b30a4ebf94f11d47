"""The ranks that save or load a checkpoint together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.topology import MeshCoordinates


class CheckpointRanks:
    """Runs the steps of a checkpoint on the ranks of a pipeline stage; an error of one rank is an error of all.

    Args:
        exchange: channel of all ranks; all stages call it at the same time. places: coordinates of all ranks.

    Attributes:
        rank, size: number of this rank in its stage, and of the ranks there.
        folder: directory of the stage in that of the checkpoint; None without stages.
        lost: whether the other ranks are lost: it is not known which answers of this rank they have received.
    """

    def __init__(self, exchange: SingleProcess, places: Sequence[MeshCoordinates]) -> None:
        place = places[exchange.rank]
        members = [rank for rank, other in enumerate(places) if other.stage == place.stage]
        self._exchange = exchange
        self._members = sorted(members, key=lambda rank: places[rank].data)
        self.rank, self.size = place.data, len(members)
        self.folder = f"stage-{place.stage}" if any(other.stage for other in places) else None
        self.barrier = exchange.barrier
        self.lost = False

    def run(self, what: str, act: Callable[[], dict[str, Any]]) -> list[dict[str, Any]]:
        """Run a step on all ranks at the same time.

        Args:
            what: name of the step in errors: "Rank 1 could not <what>: ...".
            act: this rank's part of the step; returns its answer (JSON).

        Returns:
            The answers of the stage's ranks, in their order.

        Raises:
            RankError: another rank has failed, or is lost. An error of `act` is raised as it is.
        """
        self._exchange.doing = f"is to {what}"
        return [dict(answer) for answer in run_on_all(what, act, self._share, range(self.size))]

    def _share(self, answer: dict[str, Any]) -> list[dict[str, Any]]:
        try:
            answers = self._exchange.share(answer)
        except Exception:
            self.lost = "error" not in answer
            raise
        return [answers[rank] for rank in self._members]
