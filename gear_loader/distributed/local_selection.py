"""Local selection: each rank draws from its own shard, and importance weights correct for the shard's mass."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, cast

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection
from gear_loader.selection.prioritized import PrioritizedSelection


def begin_epoch(
    exchange: SingleProcess, selection: Selection, look: Callable[[], tuple[Any, float]], *, fresh: bool
) -> tuple[Any, float]:
    """Begin an epoch on all ranks: share the shards' masses and numbers of batches.

    Args:
        selection: this rank's selection, of which `Selection.share` is set, if it has one.
        look: returns a view of this rank's shard, and its number of batches, which may be infinite.
        fresh: whether the epoch begins; False if it is resumed.

    Returns:
        The view, and the most batches that any rank's shard has: all ranks draw as many, so that no rank waits for one
        that ended.

    Raises:
        RankError: another rank cannot begin, for example because its shard is empty. An error of `look` is raised as it
            is, and told to the others.
    """
    view, mass, least, share = None, 0.0, math.inf, selection.share

    def describe() -> dict[str, Any]:
        nonlocal view, mass, least
        view, batches = look()
        if share is not None:
            priorities = cast(PrioritizedSelection, selection).priorities
            with priorities.mutex:
                mass, least = priorities.summary()
        return {
            "batches": None if batches == math.inf else batches,
            "mass": mass,
            "least": None if least == math.inf else least,
        }

    exchange.doing = "begins an epoch"
    answers = run_on_all("begin its epoch", describe, exchange.share, exchange.ranks)
    if share is not None and (fresh or math.isnan(share.correction)):
        heaviest = max(answer["mass"] for answer in answers)
        share.correction = mass / heaviest if heaviest > 0 else 1.0
        shares = [a["least"] / a["mass"] for a in answers if a["least"] is not None and a["mass"] > 0]
        share.least = min(shares, default=0.0)
    if any(answer["batches"] is None for answer in answers):
        return view, math.inf
    return view, max(float(answer["batches"]) for answer in answers)


def own_state(exchange: SingleProcess, state: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return this rank's state out of the whole one, or out of some ranks' parts of it.

    Raises:
        SchemaError: the state was saved by another number of ranks, or has no part of this one.
    """
    ranks = state.get("ranks")
    count = len(ranks) if isinstance(ranks, list) else 0
    numbers = state.get("parts", list(range(count)))
    if not isinstance(ranks, list) or state.get("of", count) != exchange.size or exchange.rank not in numbers:
        found = f"of ranks {numbers} of {state['of']}" if "parts" in state else f"of {count or 'no'} ranks"
        raise SchemaError(
            f"The state holds the priorities {found} that drew each from its own shard; expected those of rank "
            f"{exchange.rank} of {exchange.size}. Resume on as many ranks, or train with scope='global', whose states "
            "fit any number."
        )
    part: Mapping[str, Any] = ranks[numbers.index(exchange.rank)]
    return part
