"""Local selection: each rank draws from its own shard, and importance weights correct for the shard's mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.state import share_bundle
from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection
from gear_loader.selection.group_selection import PrioritizedGroupSelection
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.selectors import Draw, Prioritized
from gear_loader.utils.arrays import Array

__all__ = [
    "LocalPrioritizedGroupSelection",
    "LocalPrioritizedSelection",
    "begin_epoch",
    "gather_states",
    "own_state",
]


class LocalPrioritizedSelection(PrioritizedSelection):
    """`Prioritized` or `TopK` on one shard of many.

    Every rank draws the same number of rows from its own shard, whatever the shard's mass: an item's probability is its
    leaf divided by its own shard's mass and by the number of shards. Importance weights are relative to the largest
    weight in this rank's batch (``normalize="batch"``), as if the heaviest shard had drawn it, or in all tables.

    Attributes:
        correction: factor of this shard's weights before the exponent beta: its mass divided by the heaviest shard's.
        least: the smallest ratio of a leaf and its shard's mass, over all shards.
    """

    correction = math.nan
    least = 0.0

    def summarize(self) -> tuple[float, float]:
        """Return the mass of the shard, and its smallest positive leaf where weights need it, else infinity."""
        with self._mutex:
            self._keep_up()
            return self._mass_and_least()

    def _mass_and_least(self) -> tuple[float, float]:
        return self._tree.total, self._tree.minimum if self._tree.extremes else math.inf

    def state_dict(self) -> dict[str, Any]:
        """See `PrioritizedSelection.state_dict`; with `correction` and `least` of this epoch under "shares"."""
        return {**super().state_dict(), "shares": (self.correction, self.least)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """See `PrioritizedSelection.load_state_dict`."""
        super().load_state_dict(state)
        self.correction, self.least = (float(number) for number in state["shares"])

    def _weighing(self, draw: Draw) -> tuple[float, float, float]:
        selector = self.context.selector
        assert isinstance(selector, Prioritized)
        beta = selector.beta_at(draw.number)
        if selector.normalize == "table" and self.least > 0:
            return self.least * self._tree.total, beta, 1.0
        return -1.0, beta, self.correction


class LocalPrioritizedGroupSelection(LocalPrioritizedSelection, PrioritizedGroupSelection):
    """The same for whole groups: their leaves are the shard's mass."""

    def _mass_and_least(self) -> tuple[float, float]:
        self._form()
        return super()._mass_and_least()


def begin_epoch(
    exchange: SingleProcess, selection: Selection, look: Callable[[], tuple[Any, float]], *, fresh: bool
) -> tuple[Any, float]:
    """Begin an epoch on all ranks: share the shards' masses and numbers of batches.

    Args:
        exchange: collective channel of the dataset.
        selection: this rank's selection; a `LocalPrioritizedSelection` gets its correction.
        look: returns a view of this rank's shard, and its number of batches, which may be infinite.
        fresh: whether the epoch begins; False if it is resumed.

    Returns:
        The view, and the most batches that any rank's shard has: all ranks draw as many, so that no rank waits for one
        that ended.

    Raises:
        RankError: another rank cannot begin, for example because its shard is empty. An error of `look` is raised as it
            is, and told to the others.
    """
    view, mass, least = None, 0.0, math.inf

    def describe() -> dict[str, Any]:
        nonlocal view, mass, least
        view, batches = look()
        if isinstance(selection, LocalPrioritizedSelection):
            mass, least = selection.summarize()
        return {
            "batches": None if batches == math.inf else batches,
            "mass": mass,
            "least": None if least == math.inf else least,
        }

    exchange.doing = "begins an epoch"
    answers = run_on_all("begin its epoch", describe, exchange.share, exchange.ranks)
    if isinstance(selection, LocalPrioritizedSelection) and (fresh or math.isnan(selection.correction)):
        heaviest = max(answer["mass"] for answer in answers)
        selection.correction = mass / heaviest if heaviest > 0 else 1.0
        shares = [a["least"] / a["mass"] for a in answers if a["least"] is not None and a["mass"] > 0]
        selection.least = min(shares, default=0.0)
    if any(answer["batches"] is None for answer in answers):
        return view, math.inf
    return view, max(float(answer["batches"]) for answer in answers)


_PARTS = ("sequences", "lengths", "leaves", "blocks")


def gather_states(exchange: SingleProcess, state: Mapping[str, Any]) -> dict[str, Any]:
    """Return the states of all ranks' selections, the same on every rank.

    Args:
        exchange: collective channel of the dataset.
        state: state of this rank's `LocalPrioritizedSelection`.
    """
    exchange.doing = "calls state_dict"
    arrays = {name: np.asarray(state[name]) for name in _PARTS if name in state}
    counters = [state["maximum"], state["num_stale"], *state["shares"]]
    arrays["counters"] = np.array(counters, dtype=np.float64)
    if "policy" in state:
        arrays["policy"] = np.array([state["policy"]], dtype=np.int64)
    for i, part in enumerate(state["recent"]):
        arrays[f"recent_{i}"] = np.array([part["epoch"], part["step"]], dtype=np.int64)
        arrays[f"rows_{i}"] = np.stack((np.asarray(part["sequences"]), np.asarray(part["steps"])))
        if part["weights"] is not None:
            arrays[f"weights_{i}"] = np.asarray(part["weights"])
    return {"ranks": [_state(bundle) for bundle in share_bundle(exchange, arrays)]}


def _state(bundle: Mapping[str, Array]) -> dict[str, Any]:
    """Return the state of one rank from its arrays."""
    state: dict[str, Any] = {name: torch.from_numpy(bundle[name]) for name in _PARTS if name in bundle}
    state["maximum"], state["num_stale"] = float(bundle["counters"][0]), int(bundle["counters"][1])
    state["shares"] = tuple(bundle["counters"][2:].tolist())
    if "policy" in bundle:
        state["policy"] = int(bundle["policy"][0])
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


def own_state(exchange: SingleProcess, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's state out of the result of `gather_states`.

    Raises:
        SchemaError: the state was saved by another number of ranks.
    """
    ranks = state.get("ranks")
    if not isinstance(ranks, list) or len(ranks) != exchange.size:
        count = len(ranks) if isinstance(ranks, list) else "no"
        raise SchemaError(
            f"The state holds the priorities of {count} ranks that drew each from its own shard; expected "
            f"{exchange.size}. Resume on as many ranks, or train with scope='global', whose states fit any number."
        )
    part: Mapping[str, Any] = ranks[exchange.rank]
    return part
