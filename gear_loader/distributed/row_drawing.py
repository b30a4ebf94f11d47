"""The two ways to draw a global batch: rows assigned to shards, and candidates of all shards merged."""

from __future__ import annotations

import abc
import dataclasses
from collections.abc import Callable
from typing import cast

import numpy as np

from gear_loader.distributed.batch_exchange import BatchExchange
from gear_loader.distributed.failures import attempt
from gear_loader.distributed.merging import Merge, PassView, assign_by_mass, assign_rows, merge_candidates
from gear_loader.distributed.records import SUMMARY
from gear_loader.distributed.samplers import Samplers
from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.selection.selectors import Draw, Selector
from gear_loader.utils.arrays import Array

__all__ = ["CandidateDrawing", "RowAssignment", "RowDrawing", "Rows"]

_MORE = 32  # candidates that a shard shares beyond its expected rows
_ROUNDS = 8  # assignments of rows whose shards were emptied
_EMPTIED = 1 << 5  # first turn of `ShardSampler.spare` for such rows


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


class RowDrawing(abc.ABC):
    """Draws the rows of batches with one exchange; all ranks call it at the same time.

    Args:
        selector: selector of the draws.
        samplers: shard samplers of this rank.
        exchange: the exchange of a batch.
        empty_error: makes the error for shards without items; called by all ranks.
    """

    def __init__(
        self,
        selector: Selector,
        samplers: Samplers,
        exchange: BatchExchange,
        empty_error: Callable[[], TableEmptyError | PriorityError],
    ) -> None:
        self._selector = selector
        self._samplers = samplers
        self._exchange = exchange
        self._empty_error = empty_error

    @abc.abstractmethod
    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        """Draw the rows of a batch.

        Args:
            draw: draw of the batch.
            masses: mass of each shard, float64 [S].
            view: view over which an epoch passes; None for draws from the current tables.

        Raises:
            TableEmptyError, PriorityError: the shards have too few items.
        """


class RowAssignment(RowDrawing):
    """Assigns each row of a batch to a shard, which draws it: `Uniform`, `Prioritized`, and passes."""

    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        """See `RowDrawing.draw`."""
        shards, items = assign_rows(self._selector, draw, masses, view)
        samplers = self._samplers.own
        views = {} if view is None else dict(zip(view.own_shards, view.own_views, strict=True))

        def resolve(shard: int, rows: Array) -> Array:
            chosen = None if items is None else items[rows]
            if view is None:
                return cast(Array, samplers[shard].resolve(draw, rows, chosen))
            return cast(Array, samplers[shard].resolve_in(views[shard], draw, rows, chosen))

        received, least = [self._send(shards, resolve)], np.inf
        for turn in range(_ROUNDS):
            rows, records, least_leaf = received[-1]
            summaries = self._exchange.summaries
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
        return lambda shard, rows: cast(Array, self._samplers.own[shard].spare(draw, len(rows), turn))

    def _assign_again(self, draw: Draw, shards: Array, turn: int, emptied: Array) -> tuple[Array, Array]:
        """Assign the rows of emptied shards to other shards.

        Args:
            draw: draw of the batch.
            shards: int64 [n]: shard of each row.
            turn: number of earlier reassignments.
            emptied: bool [S].

        Returns:
            The new shard of each row, int64 [n]; and the same of the reassigned rows alone, -1 elsewhere.
        """
        which = np.flatnonzero(emptied[shards])
        masses = np.where(emptied, 0.0, self._exchange.masses())
        if not masses.sum() > 0:
            raise self._empty_error()
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
            for shard, sampler in self._samplers.own.items():
                rows = np.flatnonzero(assignment == shard)
                records: Array = np.zeros(len(rows), dtype=self._exchange.dtype)
                empty = False
                try:
                    if len(rows):
                        records = self._samplers.with_blocks(sampler.table, resolve(shard, rows))
                except (TableEmptyError, PriorityError):
                    empty = True
                found[shard] = (rows, records)
                least.append(np.inf if empty else records["leaf"].min(initial=np.inf))
                emptied.append(empty)
            summaries = self._exchange.summarize(self._exchange.updates.draws)
            summaries["batch_least"], summaries["emptied"] = least, emptied
            return found, summaries

        (found, summaries), failure = attempt(resolve_own, ({}, np.empty(0, dtype=SUMMARY)))
        return self._exchange.send_rows(assignment, found, summaries, failure)


class CandidateDrawing(RowDrawing):
    """Merges the first candidates of all shards: `TopK`, `Prioritized` without replacement, `Fifo` and `Lifo`."""

    _last: Array | None = None  # rows of each shard in the last batch, float64 [S]

    def draw(self, draw: Draw, masses: Array, view: PassView | None) -> Rows:
        """See `RowDrawing.draw`."""
        count, num_shards = draw.count, self._exchange.shards.num_shards
        expected = np.full(num_shards, count / num_shards) if self._last is None else self._last
        end = np.minimum(np.ceil(1.5 * expected).astype(np.int64) + _MORE, count)
        end[masses == 0] = 0

        def find() -> tuple[list[Array], Array]:
            # All candidates before the summary: after `summarize` the trees are those of the next draw.
            own = [
                self._samplers.with_blocks(sampler.table, sampler.candidates(draw, count))
                for sampler in self._samplers.own.values()
            ]
            return own, self._exchange.summarize(self._exchange.updates.draws)

        (own, summaries), failure = attempt(find, ([], np.empty(0, dtype=SUMMARY)))
        first = np.zeros_like(end)
        candidates = [self._exchange.no_records()] * num_shards
        while True:
            # Ends: a shard that has more candidates shares at least one more, until it has shared `count` or all.
            shared = self._exchange.share_candidates(count, own, first, end, summaries, failure)
            for shard, part in shared.items():
                candidates[shard] = np.concatenate((candidates[shard], part))
            merge = merge_candidates(self._selector, count, candidates, (end >= count) | (masses == 0))
            if not merge.more.any():
                break
            first, end = end, np.where(merge.more, np.clip(2 * end, 1, count), end)
        self._last = np.bincount(merge.shards, minlength=num_shards).astype(np.float64)
        return self._repeated(draw, merge)

    def _repeated(self, draw: Draw, merge: Merge) -> Rows:
        """Return the merged rows; from the first one again if there are fewer than the batch has rows."""
        found = len(merge.shards)
        if found == 0:
            raise self._empty_error()
        if found < draw.count and self._selector.weighs:
            raise PriorityError(
                f"{draw.count} items were to be drawn, but only {found} in all shards have a positive priority. Draw "
                "fewer, draw with replacement, or set priorities (Prioritized(eps=...) keeps them all positive)."
            )
        rows = np.arange(draw.count)
        records = merge.records[rows % found]
        return Rows(merge.shards[rows % found], rows, records, float(records["leaf"].min()))
