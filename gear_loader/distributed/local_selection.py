"""Each rank draws from its own shard; importance weights know what share of all priorities that shard has."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.exchange import SingleProcess
from gear_loader.distributed.state import share_bundle
from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.selectors import Draw, Prioritized
from gear_loader.storage.recovery import Array

__all__ = ["LocalPrioritizedSelection", "gathered", "meet", "own_part"]


class LocalPrioritizedSelection(PrioritizedSelection):
    """`Prioritized` or `TopK` on one shard of many.

    Every rank draws as many rows from its own shard, whatever that weighs: an item's probability is its leaf divided by
    its own shard's sum and by the number of shards. Importance weights follow from that, relative to the largest weight
    that there can be in this rank's batch (``normalize="batch"``) if the heaviest shard had it, or in all tables.

    Attributes:
        correction: what the weights of this shard are multiplied by, before `beta`.
        least: the smallest quotient of a leaf and its shard's sum, over all shards.
    """

    correction = math.nan
    least = 0.0

    def offer(self) -> tuple[float, float]:
        """The sum of the leaves, and the smallest one that is positive, where weights need it."""
        with self._mutex:
            self._keep_up()
            least = self._tree.minimum if self._tree.extremes else math.inf
            return self._tree.total, least

    def state_dict(self) -> dict[str, Any]:
        """See `PrioritizedSelection.state_dict`; with what the ranks have told each other for this epoch."""
        return {**super().state_dict(), "shares": (self.correction, self.least)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PrioritizedSelection.load_state_dict`."""
        super().load_state_dict(state)
        self.correction, self.least = (float(number) for number in state["shares"])

    def _importance(self, draw: Draw, leaves: Array) -> Array:
        selector = self.job.selector
        assert isinstance(selector, Prioritized)
        if selector.normalize == "table" and self.least > 0:
            shares = np.minimum(self.least * self._tree.total / leaves.astype(np.float64), 1.0)
        else:
            shares = np.float64(leaves.min()) / leaves * self.correction
        weights: Array = (shares ** selector.beta_at(draw.number)).astype(np.float32)
        return weights


def meet(exchange: SingleProcess, selection: Selection, batches: float, *, fresh: bool) -> float:
    """Begin an epoch with the other ranks: what they have to know of each other, and how many batches each draws.

    Args:
        batches: how many this rank's shard has. fresh: the epoch begins, and is not resumed in its middle.

    Returns:
        The most batches that any rank has in its shard: so that none waits for others that have ended.
    """
    offer: tuple[float, float] = (0.0, math.inf)
    if isinstance(selection, LocalPrioritizedSelection):
        offer = selection.offer()
    told: dict[str, Any] = {"batches": None if batches == math.inf else batches}
    told["mass"], told["least"] = offer[0], None if offer[1] == math.inf else offer[1]
    answers = exchange.share(told)
    if isinstance(selection, LocalPrioritizedSelection) and (fresh or math.isnan(selection.correction)):
        heaviest = max(answer["mass"] for answer in answers)
        selection.correction = offer[0] / heaviest if heaviest > 0 else 1.0
        shares = [a["least"] / a["mass"] for a in answers if a["least"] is not None and a["mass"] > 0]
        selection.least = min(shares, default=0.0)
    if any(answer["batches"] is None for answer in answers):
        return math.inf
    return max(float(answer["batches"]) for answer in answers)


_PARTS = ("sequences", "lengths", "leaves")


def gathered(exchange: SingleProcess, state: Mapping[str, Any]) -> dict[str, Any]:
    """The states of all ranks' selections, the same on every rank: whichever of them is saved holds all."""
    arrays = {name: np.asarray(state[name]) for name in _PARTS}
    arrays["counters"] = np.array([state["maximum"], state["num_stale"], *state["shares"]], dtype=np.float64)
    for i, part in enumerate(state["recent"]):
        arrays[f"recent_{i}"] = np.array([part["epoch"], part["step"]], dtype=np.int64)
        arrays[f"rows_{i}"] = np.stack((np.asarray(part["sequences"]), np.asarray(part["steps"])))
        if part["weights"] is not None:
            arrays[f"weights_{i}"] = np.asarray(part["weights"])
    return {"ranks": [_state(bundle) for bundle in share_bundle(exchange, arrays)]}


def _state(bundle: Mapping[str, Array]) -> dict[str, Any]:
    state: dict[str, Any] = {name: torch.from_numpy(bundle[name]) for name in _PARTS}
    state["maximum"], state["num_stale"] = float(bundle["counters"][0]), int(bundle["counters"][1])
    state["shares"] = tuple(bundle["counters"][2:].tolist())
    state["recent"] = []
    for name, head in bundle.items():
        if name.startswith("recent_"):
            number = name.removeprefix("recent_")
            rows, weights = bundle[f"rows_{number}"], bundle.get(f"weights_{number}")
            state["recent"].append(
                {
                    "epoch": int(head[0]),
                    "step": int(head[1]),
                    "sequences": torch.from_numpy(rows[0].copy()),
                    "steps": torch.from_numpy(rows[1].copy()),
                    "weights": None if weights is None else torch.from_numpy(weights),
                }
            )
    return state


def own_part(exchange: SingleProcess, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """This rank's part of what `gathered` returned.

    Raises:
        SchemaError: it is of another number of ranks.
    """
    ranks = state.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != exchange.size:
        count = len(ranks) if isinstance(ranks, list) else "no"
        raise SchemaError(
            f"The state holds the priorities of {count} ranks that drew each from its own shard; here are "
            f"{exchange.size}. Resume on as many ranks, or train with scope='global', whose states fit any number."
        )
    part: Mapping[str, Any] = ranks[exchange.rank]
    return part
