"""Shard assignment of a batch's rows, and merging of candidates: computed by every rank from the shard summaries."""

from __future__ import annotations

import dataclasses
from typing import cast

import numpy as np

from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.selection.priorities import draw_key
from gear_loader.selection.selectors import Draw, Selector, SnapshotSelector
from gear_loader.selection.tree import uniforms
from gear_loader.storage.reader import Snapshot
from gear_loader.utils.arrays import Array

__all__ = [
    "Merge",
    "PassView",
    "assign_by_mass",
    "assign_rows",
    "empty_error",
    "merge_candidates",
]

# Streams of random numbers, beside those of `selection.priorities` and of the shard samplers: for the first
# assignment of rows, and for the assignments after shards were emptied.
_SHARDS, _AGAIN = 6, 1000


@dataclasses.dataclass(frozen=True)
class PassView:
    """The trajectories of all shards at one moment, over which a pass goes.

    Attributes:
        version: number of the view.
        trajectories, steps: int64 [S], of each shard.
        own_shards: numbers of this rank's shards.
        own_views: snapshots of this rank's shards.
        order: all trajectories by id, for passes in order of age: a snapshot whose slots are positions in the shards'
            snapshots, and whose generations are the shards.
    """

    version: int
    trajectories: Array
    steps: Array
    own_shards: tuple[int, ...]
    own_views: tuple[Snapshot, ...]
    order: Snapshot | None = None

    def __len__(self) -> int:
        return int(self.trajectories.sum())

    @property
    def num_steps(self) -> int:
        """Number of steps of all shards."""
        return int(self.steps.sum())


def empty_error(selector: Selector, trajectories: int) -> TableEmptyError | PriorityError:
    """Return the error for a draw from shards without items.

    Args:
        selector: selector of the draw.
        trajectories: number of trajectories in all shards.
    """
    if trajectories == 0 or not selector.by_priority:
        return TableEmptyError("All shards are empty: there is nothing to draw from. Add trajectories first.")
    return PriorityError(
        "Every priority in every shard is zero: there is nothing to draw. Set some with update_priority, add "
        "trajectories with a positive priority, or use Prioritized(eps=...)."
    )


# ---------------------------------------------------------------- shard assignment


def assign_rows(
    selector: Selector, draw: Draw, masses: Array, view: PassView | None
) -> tuple[Array, Array | None]:
    """Assign each row of a batch to a shard.

    Args:
        selector: selector of the draw.
        draw: draw of the batch.
        masses: mass of each shard, float64 [S].
        view: view over which an epoch passes; None for draws from the current tables.

    Returns:
        The shard of each row, int64 [n], and its item in that shard, int64 [n]; None if the shard draws the items.
    """
    if selector.by_priority:
        return assign_by_mass(draw, masses, draw.count), None
    selector = cast(SnapshotSelector, selector)
    if view is not None and view.order is not None:
        return _assign_by_age(selector, draw, view, view.order)
    counts = masses.astype(np.int64)
    if view is not None:
        counts = view.trajectories if selector.unit == "trajectory" else view.steps
    ends = np.cumsum(counts)
    items = selector.items(int(ends[-1]), draw)
    shards = np.searchsorted(ends, items, side="right")
    return shards, items - (ends - counts)[shards]


def assign_by_mass(draw: Draw, masses: Array, count: int, *, turn: int = 0) -> Array:
    """Draw shards in proportion to their masses, int64 [count].

    Args:
        draw: draw of the batch.
        masses: mass of each shard, float64 [S].
        count: number of rows.
        turn: number of the assignment within this draw.
    """
    if len(masses) == 1:
        return np.zeros(count, dtype=np.int64)
    ends = np.cumsum(masses)
    stream = _SHARDS if turn == 0 else _AGAIN + turn
    numbers = uniforms(count, key=draw_key(draw, stream), step=draw.step) * ends[-1]
    # Rounding must not lead to a shard without mass at the end.
    last = int(np.flatnonzero(masses > 0)[-1])
    shards: Array = np.minimum(np.searchsorted(ends, numbers, side="right"), last)
    return shards


def _assign_by_age(
    selector: SnapshotSelector, draw: Draw, view: PassView, order: Snapshot
) -> tuple[Array, Array]:
    if selector.unit == "trajectory":
        places = selector.items(len(order), draw)
        return order.generations[places], order.slots[places]
    places, steps = order.locate(selector.items(order.num_steps, draw))
    # The step's number in its own shard: only the shard's owner knows the steps before it, and uses only its own rows.
    shards = order.generations[places]
    items = np.full(len(places), -1, dtype=np.int64)
    for shard, snapshot in zip(view.own_shards, view.own_views, strict=True):
        own = shards == shard
        positions = order.slots[places[own]]
        items[own] = (snapshot.ends - snapshot.lengths)[positions] + steps[own]
    return shards, items


# ---------------------------------------------------------------- candidates


@dataclasses.dataclass
class Merge:
    """The first rows of the shards' candidates, merged.

    Attributes:
        shards, records: shard and record of each row, int64 [n] and [n], in order, as far as they are known.
        more: bool [S]: shards that may have further candidates before the end of the batch.
    """

    shards: Array
    records: Array
    more: Array


def merge_candidates(selector: Selector, count: int, candidates: list[Array], complete: Array) -> Merge:
    """Merge the candidates that shards have shared so far.

    Args:
        selector: selector of the draw; it defines the order.
        count: rows of the batch.
        candidates: records of each shard, in order; empty records with the id -1 mark the shard's end.
        complete: bool [S]: shards from which no further candidates are needed.
    """
    ended = [len(part) > 0 and bool(part["id"][-1] < 0) for part in candidates]
    candidates = [part[part["id"] >= 0] for part in candidates]
    complete = complete | np.array(ended)
    shards = np.repeat(np.arange(len(candidates)), [len(part) for part in candidates])
    records = np.concatenate(candidates)
    order = selector.merge_order(shards, records)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum([len(part) for part in candidates])
    more = np.zeros(len(candidates), dtype=bool)
    for shard, (end, part) in enumerate(zip(ends.tolist(), candidates, strict=True)):
        last = int(places[end - 1]) if len(part) else -1
        more[shard] = not complete[shard] and last < count - 1
    return Merge(shards[order[:count]], records[order[:count]], more)
