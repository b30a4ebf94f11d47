"""Which rows of a global batch fall to which shard: computed by every rank from what all shards have published."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.selection.prioritized import draw_key
from gear_loader.selection.selectors import Draw, Fifo, Lifo, Prioritized, Selector, SnapshotSelector, TopK
from gear_loader.selection.tree import uniforms
from gear_loader.storage.index import Snapshot
from gear_loader.utils.arrays import Array

__all__ = ["Merge", "PassView", "by_mass", "merged", "merges", "nothing", "scattered"]

# Streams of random numbers, beside those of `selection.prioritized` and of the shard samplers: for rows
# that are drawn for the first time, and once more.
_SHARDS, _AGAIN = 6, 1000


@dataclasses.dataclass(frozen=True)
class PassView:
    """What there was in all shards at one moment.

    Attributes:
        version: which look it was.
        trajectories, steps: int64 [S], of each shard.
        numbers, own: this rank's shards: their numbers, and as they were.
        order: where a pass goes by age: all trajectories by their ids, as a snapshot whose slots are positions in their
            shards and whose generations are the shards.
    """

    version: int
    trajectories: Array
    steps: Array
    numbers: tuple[int, ...]
    own: tuple[Snapshot, ...]
    order: Snapshot | None = None

    def __len__(self) -> int:
        return int(self.trajectories.sum())

    @property
    def num_steps(self) -> int:
        """Steps of all shards together."""
        return int(self.steps.sum())


def nothing(selector: Selector, trajectories: int) -> TableEmptyError | PriorityError:
    """The error for shards in which there is nothing to draw."""
    if trajectories == 0 or isinstance(selector, SnapshotSelector):
        return TableEmptyError("All shards are empty: there is nothing to draw from. Add trajectories first.")
    return PriorityError(
        "Every priority in every shard is zero: there is nothing to draw. Set some with update_priority, add "
        "trajectories with a positive priority, or use Prioritized(eps=...)."
    )


def merges(selector: Selector) -> bool:
    """Whether every shard brings candidates, of which the first ones are taken."""
    if isinstance(selector, Prioritized):
        return not selector.replacement
    return isinstance(selector, TopK) or (isinstance(selector, Fifo) and not selector.passes)


# ---------------------------------------------------------------- rows that fall to shards


def scattered(
    selector: Selector, draw: Draw, masses: Array, view: PassView | None
) -> tuple[Array, Array | None]:
    """Which shard each row of the batch falls to, int64 [n]; and which item there, where that is decided here.

    Args:
        masses: float64 [S], what each shard has published.
        view: what an epoch passes over.
    """
    if isinstance(selector, Prioritized):
        return by_mass(draw, masses, draw.count), None
    assert isinstance(selector, SnapshotSelector)
    if view is not None and view.order is not None:
        return _by_order(selector, draw, view, view.order)
    counts = masses.astype(np.int64)
    if view is not None:
        counts = view.trajectories if selector.unit == "trajectory" else view.steps
    ends = np.cumsum(counts)
    items = selector.items(int(ends[-1]), draw)
    shards = np.searchsorted(ends, items, side="right")
    return shards, items - (ends - counts)[shards]


def by_mass(draw: Draw, masses: Array, count: int, *, turn: int = 0) -> Array:
    """Shards in proportion to their masses, int64 [count]; `turn` counts how often rows of this draw are drawn."""
    if len(masses) == 1:
        return np.zeros(count, dtype=np.int64)
    ends = np.cumsum(masses)
    stream = _SHARDS if turn == 0 else _AGAIN + turn
    numbers = uniforms(count, key=draw_key(draw, stream), step=draw.step) * ends[-1]
    # Rounding must not lead to a shard, at the end, in which there is nothing.
    last = int(np.flatnonzero(masses > 0)[-1])
    shards: Array = np.minimum(np.searchsorted(ends, numbers, side="right"), last)
    return shards


def _by_order(selector: SnapshotSelector, draw: Draw, view: PassView, order: Snapshot) -> tuple[Array, Array]:
    if selector.unit == "trajectory":
        places = selector.items(len(order), draw)
        return order.generations[places], order.slots[places]
    places, steps = order.locate(selector.items(order.num_steps, draw))
    # The step's number in its own shard: only the shard's owner knows what comes before, and looks at its own rows.
    shards = order.generations[places]
    items = np.full(len(places), -1, dtype=np.int64)
    for number, snapshot in _owned(view).items():
        mine = shards == number
        positions = order.slots[places[mine]]
        items[mine] = (snapshot.ends - snapshot.lengths)[positions] + steps[mine]
    return shards, items


def _owned(view: PassView) -> dict[int, Snapshot]:
    return dict(zip(view.numbers, view.own, strict=True))


# ---------------------------------------------------------------- candidates


@dataclasses.dataclass
class Merge:
    """The first rows of what shards bring in turns.

    Attributes:
        shards, records: int64 [n] and [n], in order, as far as they are known.
        more: bool [S]: shards that may have rows that belong before the end.
    """

    shards: Array
    records: Array
    more: Array


def merged(selector: Selector, count: int, brought: list[Array], complete: Array) -> Merge:
    """Merge what shards have brought so far.

    Args:
        brought: records of each shard, in order; where it has no more, empty ones with the id -1 follow.
        complete: bool [S]: whether no more is to be asked of it.
    """
    ended = [len(part) > 0 and bool(part["id"][-1] < 0) for part in brought]
    brought = [part[part["id"] >= 0] for part in brought]
    complete = complete | np.array(ended)
    shards = np.repeat(np.arange(len(brought)), [len(part) for part in brought])
    records = np.concatenate(brought)
    order = _order(selector, shards, records)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum([len(part) for part in brought])
    more = np.zeros(len(brought), dtype=bool)
    for shard, (end, part) in enumerate(zip(ends.tolist(), brought, strict=True)):
        last = int(places[end - 1]) if len(part) else -1
        more[shard] = not complete[shard] and last < count - 1
    return Merge(shards[order[:count]], records[order[:count]], more)


def _order(selector: Selector, shards: Array, records: Array) -> Array:
    if isinstance(selector, Fifo):
        order: Array = np.lexsort((records["step"], records["id"]))
        if isinstance(selector, Lifo):
            order = order[::-1]
        return order
    if isinstance(selector, TopK):
        return np.lexsort((shards, -records["leaf"] if selector.largest else records["leaf"]))
    return np.lexsort((shards, records["time"]))
