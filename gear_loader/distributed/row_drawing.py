"""The two ways to draw a global batch: rows assigned to shards by mass, and candidates of all shards merged.

Every rank computes the same from the shard summaries.
"""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from gear_loader.distributed.batch_exchange import BatchExchange
from gear_loader.distributed.failures import attempt
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.records import SUMMARY
from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.native.exchange_loops import find_above
from gear_loader.selection.priorities import draw_key
from gear_loader.selection.samplers import Draw, Sampler, SnapshotSampler
from gear_loader.selection.tree import uniforms
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array

_MORE = 32  # candidates that a shard shares beyond its expected rows
_ROUNDS = 8  # assignments of rows whose shards were emptied
_EMPTIED = 1 << 5  # first turn of `ShardSampler.spare` for such rows


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


def empty_error(sampler: Sampler, trajectories: int) -> TableEmptyError | PriorityError:
    """Return the error for a draw from shards without items.

    Args:
        trajectories: number of trajectories in all shards.
    """
    if trajectories == 0 or not sampler.by_priority:
        return TableEmptyError("All shards are empty: there is nothing to draw from. Add trajectories first.")
    return PriorityError(
        "Every priority in every shard is zero: there is nothing to draw. Set some with update_priority, add "
        "trajectories with a positive priority, or use Prioritized(eps=...)."
    )


# ---------------------------------------------------------------- shard assignment


def assign_rows(
    sampler: Sampler, draw: Draw, masses: Array, view: PassView | None
) -> tuple[Array, Array | None]:
    """Assign each row of a batch to a shard.

    Args:
        masses: mass of each shard, float64 [S].
        view: view over which an epoch passes; None for draws from the current tables.

    Returns:
        The shard of each row, int64 [n], and its item in that shard, int64 [n]; None if the shard draws the items.
    """
    if sampler.by_priority:
        return assign_by_mass(draw, masses, draw.count), None
    sampler = cast(SnapshotSampler, sampler)
    if view is not None and view.order is not None:
        return _assign_by_age(sampler, draw, view, view.order)
    counts = masses.astype(np.int64)
    if view is not None:
        counts = view.trajectories if sampler.unit == "trajectory" else view.steps
    ends = np.cumsum(counts)
    items = sampler.items(int(ends[-1]), draw)
    shards = _first_above(ends, items, len(ends) - 1)
    return shards, items - (ends - counts)[shards]


def assign_by_mass(draw: Draw, masses: Array, count: int, *, turn: int = 0) -> Array:
    """Draw shards in proportion to their masses, int64 [count].

    Args:
        masses: mass of each shard, float64 [S].
        turn: number of the assignment within this draw.
    """
    if len(masses) == 1:
        return np.zeros(count, dtype=np.int64)
    ends = np.cumsum(masses)
    stream = _SHARDS if turn == 0 else _AGAIN + turn
    numbers = uniforms(count, key=draw_key(draw, stream), step=draw.step) * ends[-1]
    # Rounding must not lead to a shard without mass at the end.
    last = int(np.flatnonzero(masses > 0)[-1])
    return _first_above(ends, numbers, last)


def _first_above(ends: Array, values: Array, last: int) -> Array:
    """See `find_above`, int64 [n]; for many values by a table of where to begin."""
    found: Array = np.empty(len(values), dtype=np.int64)
    find_above(ends, values, last, np.empty(4 * len(ends), dtype=np.int64), found)
    return found


def _assign_by_age(
    sampler: SnapshotSampler, draw: Draw, view: PassView, order: Snapshot
) -> tuple[Array, Array]:
    if sampler.unit == "trajectory":
        places = sampler.items(len(order), draw)
        return order.generations[places], order.slots[places]
    places, steps = order.locate(sampler.items(order.num_steps, draw))
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


def merge_candidates(sampler: Sampler, count: int, candidates: list[Array], complete: Array) -> Merge:
    """Merge the candidates that shards have shared so far.

    Args:
        sampler: sampler of the draw; it defines the order.
        candidates: records of each shard, in order; empty records with the id -1 mark the shard's end.
        complete: bool [S]: shards from which no further candidates are needed.
    """
    ended = [len(part) > 0 and bool(part["id"][-1] < 0) for part in candidates]
    candidates = [part[part["id"] >= 0] for part in candidates]
    complete = complete | np.array(ended)
    shards = np.repeat(np.arange(len(candidates)), [len(part) for part in candidates])
    records = np.concatenate(candidates)
    order = sampler.merge_order(shards, records)
    places = np.empty(len(order), dtype=np.int64)
    places[order] = np.arange(len(order))
    ends = np.cumsum([len(part) for part in candidates])
    more = np.zeros(len(candidates), dtype=bool)
    for shard, (end, part) in enumerate(zip(ends.tolist(), candidates, strict=True)):
        last = int(places[end - 1]) if len(part) else -1
        more[shard] = not complete[shard] and last < count - 1
    return Merge(shards[order[:count]], records[order[:count]], more)


# ---------------------------------------------------------------- drawing


@dataclasses.dataclass
class Rows:
    """The rows of a batch, as far as this rank knows them.

    Attributes:
        shards: int64 [n]: shard of each row of the batch.
        rows: int64 [m]: rows whose records this rank has, ascending.
        records: [m].
        least: smallest leaf among all rows of the batch.
    """

    shards: Array
    rows: Array
    records: Array
    least: float


@dataclasses.dataclass
class RowDrawing(abc.ABC):
    """Draws the rows of batches with one exchange; all ranks call it at the same time.

    Args:
        empty_error: makes the error for shards without items; called by all ranks.
    """

    sampler: Sampler
    samplers: Samplers
    exchange: BatchExchange
    empty_error: Callable[[], TableEmptyError | PriorityError]

    @abc.abstractmethod
    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        """Draw the rows of a batch.

        Args:
            masses: mass of each shard, float64 [S].
            view: view over which an epoch passes; None for draws from the current tables.

        Raises:
            TableEmptyError, PriorityError: the shards have too few items.
        """


class RowAssignment(RowDrawing):
    """Assigns each row of a batch to a shard, which draws it: `Uniform`, `Prioritized`, and passes."""

    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        shards, items = assign_rows(self.sampler, draw, masses, view)
        self.exchange.deal(shards)
        samplers = self.samplers.own
        views = {} if view is None else dict(zip(view.own_shards, view.own_views, strict=True))

        def resolve(shard: int, rows: Array) -> Array:
            chosen = None if items is None else items[rows]
            return cast(Array, samplers[shard].resolve(draw, rows, chosen, views.get(shard)))

        received, least = [self._send(shards, resolve)], np.inf
        for turn in range(_ROUNDS):
            rows, records, least_leaf = received[-1]
            summaries = self.exchange.summaries
            assert summaries is not None
            least = min(least, least_leaf)
            emptied = summaries["emptied"] > 0
            if not emptied.any():
                break
            # All ranks know which shards were emptied, and the current masses: they assign the missing rows again.
            kept = ~emptied[shards[rows]]
            received[-1] = (rows[kept], records[kept], least_leaf)
            shards, again = self._assign_again(draw, shards, turn, emptied)
            received.append(self._send(again, self._spare(draw, _EMPTIED + turn)))
        else:
            raise TableEmptyError(
                f"Rows of a batch were drawn {1 + _ROUNDS} times, and each time their shard was emptied before it drew "
                "them. The tables are emptied faster than they are read: remove fewer trajectories, or make the "
                "tables larger."
            )
        rows = np.concatenate([rows for rows, _, _ in received])
        records = np.concatenate([records for _, records, _ in received])
        order = np.argsort(rows, kind="stable")
        return Rows(shards, rows[order], records[order], least)

    def _spare(self, draw: Draw, turn: int) -> Callable[[int, Array], Array]:
        return lambda shard, rows: cast(Array, self.samplers.own[shard].spare(draw, len(rows), turn))

    def _assign_again(self, draw: Draw, shards: Array, turn: int, emptied: Array) -> tuple[Array, Array]:
        """Assign the rows of emptied shards to other shards.

        Args:
            shards: int64 [n]: shard of each row.
            turn: number of earlier reassignments.
            emptied: bool [S].

        Returns:
            The new shard of each row, int64 [n]; and the same of the reassigned rows alone, -1 elsewhere.
        """
        which = np.flatnonzero(emptied[shards])
        masses = np.where(emptied, 0.0, self.exchange.masses())
        if not masses.sum() > 0:
            raise self.empty_error()
        again: Array = np.full(len(shards), -1, dtype=np.int64)
        again[which] = assign_by_mass(draw, masses, len(which), turn=1 + turn)
        return np.where(again >= 0, again, shards), again

    def _send(self, assignment: Array, resolve: Callable[[int, Array], Array]) -> tuple[Array, Array, float]:
        """Resolve the rows of this rank's shards, and send them; see `BatchExchange.send_rows`.

        Args:
            assignment: int64 [n]: shard of each row; -1 for rows that are resolved already.
            resolve: returns the records of a shard's rows, or raises an error if the shard was emptied.
        """

        def resolve_own() -> tuple[dict[int, tuple[Array, Array]], Array]:
            found, least, emptied = {}, [], []
            for shard, shard_sampler in self.samplers.own.items():
                rows = np.flatnonzero(assignment == shard)
                records: Array = np.zeros(len(rows), dtype=self.exchange.dtype)
                empty = False
                try:
                    if len(rows):
                        records = self.samplers.with_blocks(shard_sampler.table, resolve(shard, rows))
                except (TableEmptyError, PriorityError):
                    empty = True
                found[shard] = (rows, records)
                least.append(np.inf if empty else records["leaf"].min(initial=np.inf))
                emptied.append(empty)
            summaries = self.exchange.summarize(self.exchange.updates.draws)
            summaries["batch_least"], summaries["emptied"] = least, emptied
            return found, summaries

        (found, summaries), failure = attempt(resolve_own, ({}, np.empty(0, dtype=SUMMARY)))
        return self.exchange.send_rows(assignment, found, summaries, failure)


class CandidateDrawing(RowDrawing):
    """Merges the first candidates of all shards: `TopK`, `Prioritized` without replacement, `Fifo` and `Lifo`."""

    _last: Array | None = None  # rows of each shard in the last batch, float64 [S]

    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        count, num_shards = draw.count, self.exchange.shards.num_shards
        expected = np.full(num_shards, count / num_shards) if self._last is None else self._last
        end = np.minimum(np.ceil(1.5 * expected).astype(np.int64) + _MORE, count)
        end[masses == 0] = 0

        def find() -> tuple[list[Array], Array]:
            # All candidates before the summary: after `summarize` the trees are those of the next draw.
            own = [
                self.samplers.with_blocks(shard_sampler.table, shard_sampler.candidates(draw, count))
                for shard_sampler in self.samplers.own.values()
            ]
            return own, self.exchange.summarize(self.exchange.updates.draws)

        (own, summaries), failure = attempt(find, ([], np.empty(0, dtype=SUMMARY)))
        first = np.zeros_like(end)
        candidates = [self.exchange.no_records()] * num_shards
        while True:
            # Ends: a shard that has more candidates shares at least one more, until it has shared `count` or all.
            shared = self.exchange.share_candidates(count, own, first, end, summaries, failure)
            for shard, part in shared.items():
                candidates[shard] = np.concatenate((candidates[shard], part))
            merge = merge_candidates(self.sampler, count, candidates, (end >= count) | (masses == 0))
            if not merge.more.any():
                break
            first, end = end, np.where(merge.more, np.clip(2 * end, 1, count), end)
        self._last = np.bincount(merge.shards, minlength=num_shards).astype(np.float64)
        return self._repeated(draw, merge)

    def _repeated(self, draw: Draw, merge: Merge) -> Rows:
        """Return the merged rows; from the first one again if there are fewer than the batch has rows."""
        found = len(merge.shards)
        if found == 0:
            raise self.empty_error()
        if found < draw.count and self.sampler.weighs:
            raise PriorityError(
                f"{draw.count} items were to be drawn, but only {found} in all shards have a positive priority. Draw "
                "fewer, draw with replacement, or set priorities (Prioritized(eps=...) keeps them all positive)."
            )
        rows = np.arange(draw.count)
        records, shards = merge.records[rows % found], merge.shards[rows % found]
        self.exchange.deal(shards)
        return Rows(shards, rows, records, float(records["leaf"].min()))
