"""Global selection: draws batches over all shards; every rank computes the same batch and gets its slice."""

from __future__ import annotations

import itertools
import logging
import math
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.distributed import shards_state
from gear_loader.distributed.batch_exchange import BatchExchange
from gear_loader.distributed.duplicates import migrated_ids
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.rebalance import Rebalance
from gear_loader.distributed.row_drawing import (
    CandidateDrawing,
    PassView,
    RowAssignment,
    RowDrawing,
    Rows,
    empty_error,
)
from gear_loader.distributed.shard_sampler import records_of
from gear_loader.distributed.shard_source import ReadTickets, ShardRows
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.stage_rows import StageRows
from gear_loader.distributed.state_parts import load_parts
from gear_loader.distributed.update_routing import UpdateRouter
from gear_loader.errors import PriorityError, SchemaError, TableEmptyError
from gear_loader.selection.base import Selection, SelectionContext
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw
from gear_loader.selection.state import BatchHistory, BatchRows
from gear_loader.selection.weights import importance_weights
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array

_logger = logging.getLogger("gear_loader")

_MOST_MIGRATED = 10_000_000  # migrated trajectories up to which the first draw looks for duplicates

_PAUSE = 0.05  # seconds between two exchanges while there is nothing to draw

Weigh = Callable[[Array], Array]


class GlobalSelection(Selection):
    """Draws over all shards, exactly, with one exchange a batch.

    The exchange of a batch carries its row records to the ranks that train on them, priority updates to the owners of
    the rows, and the shard summaries for the next batch. So a batch is drawn from the trajectories at the exchange
    before it, and priorities that are set before batch n is drawn count from batch n + 2 on.

    All ranks call `look`, `draw`, `state_dict` and `load_state_dict` at the same time.

    Args:
        context: sampler and options; its table is this rank's.
        exchange: collective channel private to this selection.
        history: number of batches whose rows are remembered for `state_dict`.
        reach: of the windows, where rows are read one-sidedly: records
            then carry the blocks of their windows. None elsewhere.
        packed: whether batches are packed: records then tell the lengths of their trajectories. tree: as of
            `record_dtype`.
        deal: function from the records of all rows of a batch to the numbers of this rank's, int64 [m]; every rank then
            gets all records. None: each rank has its slice.
        prefer_local: whether slices have rows of their own node as far as possible.

    Attributes:
        shards, exchange, context: as given.
        samplers: shard samplers of this rank.
    """

    def __init__(
        self,
        context: SelectionContext,
        shards: ShardTables,
        exchange: SingleProcess,
        *,
        history: int,
        reach: Reach | None,
        packed: bool = False,
        tree: bool = False,
        deal: Callable[[Array], Array] | None = None,
        prefer_local: bool = False,
    ) -> None:
        super().__init__(context)
        self.shards = shards
        self.exchange = exchange
        self.samplers = Samplers(
            # The step of a frame, from which those before it are found, depends on the length.
            context,
            shards,
            reach,
            extents=packed or bool(context.table.schema.videos),
            tree=tree,
        )
        self._deal = deal
        self._history = BatchHistory(history)
        self._updates = UpdateRouter(shards, self.samplers.own, exchange)
        self._batches = BatchExchange(
            shards, exchange, self.samplers, self._updates, whole=deal is not None, prefer_local=prefer_local
        )
        kind: type[RowDrawing] = CandidateDrawing if context.sampler.merged else RowAssignment
        self._drawing = kind(context.sampler, self.samplers, self._batches, self._empty_error)
        self._stage_rows = StageRows(shards, exchange, self._batches, self.samplers)
        self._view: PassView | None = None
        self._looks = 0
        self._begun = False

    # ---------------------------------------------------------------- views of all shards

    def look(self) -> PassView:
        """Return a view of the trajectories in all shards now."""
        self.exchange.doing = "begins an epoch, or asks for its length"
        self._begin()
        own = tuple(Selection(shard_sampler.context).look() for shard_sampler in self.samplers.own.values())
        counts = [np.array([len(view), view.num_steps], dtype=np.int64) for view in own]
        sizes = np.stack(self._batches.share_arrays(counts))
        order = None
        if getattr(self.context.sampler, "ordered", False) and self.context.sampler.passes:
            order = self._order(own)
        self._looks += 1
        self._view = PassView(self._looks, sizes[:, 0], sizes[:, 1], tuple(self.samplers.own), own, order)
        return self._view

    def _begin(self) -> None:
        """Before the first draw, remove the duplicates of an interrupted migration. All ranks call it."""
        if self._begun:
            return
        self._begun = True
        counts = [migrated_ids(shard_sampler.table).size for shard_sampler in self.samplers.own.values()]
        total = sum(int(part.sum()) for part in self.exchange.share_array(np.array(counts, dtype=np.int64)))
        if total > _MOST_MIGRATED:
            _logger.warning(
                "%d trajectories have moved between shards: too many to look for duplicates of an interrupted "
                "migration. If a rank was killed in rebalance(), call rebalance(max_bytes=0), which removes them.",
                total,
            )
        elif total:
            removed = Rebalance(self, by="steps", max_bytes=0, tolerance=0.0).remove_duplicates()
            if removed:
                _logger.warning("Removed %d duplicates of an interrupted migration.", removed)

    @property
    def summaries(self) -> Array | None:
        """Last summary of each shard, `SUMMARY` [S], or None; another array after each exchange."""
        return self._batches.summaries

    def known_summaries(self) -> Array:
        """Return the summaries for the next draw, `SUMMARY` [S]; all ranks call it."""
        return self._batches.known_summaries()

    def await_items(self) -> PassView:
        """See `Selection.await_items`; all ranks call it, and wait for the same number of turns."""
        for _ in self._turns():
            found = self.look()
            if len(found) or not self.context.waits:
                return found
        raise self._empty_error()

    def _turns(self) -> Iterator[None]:
        """Wait before each turn but the first, until the deadline of the shards; the same number on all ranks."""
        yield
        for _ in range(math.ceil(self.shards.timeout / _PAUSE)):
            time.sleep(_PAUSE)
            yield

    def last_look(self) -> PassView:
        """Return the view of the last `look`."""
        return self.look() if self._view is None else self._view

    def _order(self, own: Sequence[Snapshot]) -> Snapshot:
        """Return the trajectories of all shards in the order of their ids; see `PassView.order`."""
        pairs = [
            np.concatenate((shard_sampler.table.ids(view.slots), view.lengths))
            for shard_sampler, view in zip(self.samplers.own.values(), own, strict=True)
        ]
        parts = [part.reshape(2, -1) for part in self._batches.share_arrays(pairs)]
        ids, lengths = np.concatenate(parts, axis=1)
        sizes = [part.shape[1] for part in parts]
        shards = np.repeat(np.arange(len(parts)), sizes)
        places = np.concatenate([np.arange(size) for size in sizes])
        order = np.argsort(ids, kind="stable")
        return Snapshot(0, places[order], lengths[order], shards[order], ids[order])

    # ---------------------------------------------------------------- batches

    def new_ticket(self) -> ReadTickets:
        return ReadTickets()

    def undo(self, ticket: ReadTickets) -> None:
        ticket.end()

    def draw(self, draw: Draw, ticket: ReadTickets, frozen: Any = None) -> ShardRows:
        """See `Selection.draw`. What reads the rows takes the read tickets of their shards."""
        self.exchange.doing = "draws a batch"
        self._begin()
        summaries = self._batches.known_summaries()
        drawn, weigh = self._restored(draw) or self._drawn(draw, frozen, summaries)
        for shard, sampler in self.samplers.own.items():
            sampler.table._engine.reader().count_drawn(int((drawn.shards == shard).sum()))
        own = self._batches.own_rows
        shards, records = drawn.shards[own], drawn.records[np.searchsorted(drawn.rows, own)]
        weights = None
        if self.samplers.by_priority and draw.epoch < SAMPLE_EPOCH:
            weights = None if weigh is None else weigh(records["leaf"])
            rows = BatchRows(records["id"], records["step"], weights)
            self._history.remember(draw, (draw.count, own, rows))
        spare = None if self.shards.num_stages > 1 else self._spare(draw)
        rates = self._rates(records, summaries)
        if self._deal is not None:
            mine = self._deal(records)
            if weigh is not None:
                weigh = _taken(weigh(records["leaf"]) if weights is None else weights, mine)
            shards, records = shards[mine], records[mine]
            rates = None if rates is None else rates[mine]
        return ShardRows(shards, records, weigh, spare, self._stage_rows.keys, ticket, rates)

    def _rates(self, records: Array, summaries: Array) -> Array | None:
        """Return how often each row is drawn in a batch of this rank on average, float64 [n]; None if not by priority.

        Args:
            records: rows of the batch. summaries: of the shards from which it was drawn.
        """
        if self.shards.cache is None or not self.context.sampler.weighs:
            return None
        rates: Array = records["leaf"] * (len(records) / max(float(summaries["mass"].sum()), 1e-300))
        return rates

    def _drawn(self, draw: Draw, view: PassView | None, summaries: Array) -> tuple[Rows, Weigh | None]:
        """Draw the rows of a batch; return them, and the function from leaves to importance weights."""
        masses = self._batches.masses()
        # New priorities may be on their way: to their owners, and into the sum trees. If the context waits, others fill
        # columns, or add newer trajectories.
        more = itertools.chain((2, 2), (0 for _ in self._turns()) if self.context.waits else ())
        while not masses.sum() > 0 and (draws := next(more, None)) is not None:
            self._updates.draws += draws
            self._batches.summaries = None
            summaries = self._batches.known_summaries()
            masses = self._batches.masses()
        if not masses.sum() > 0 or (view is not None and len(view) == 0):
            raise self._empty_error()
        drawn = self._drawing.draw(draw, masses, view)
        self._updates.draws += 1
        if self.shards.num_stages > 1:
            drawn = self._stage_rows.translate(drawn)
        sampler: Any = self.context.sampler
        least = drawn.least
        if not sampler.weighs:
            return drawn, None
        if sampler.least_of_table:
            least = float(summaries["least"].min())
        beta = sampler.beta_at(draw.number)
        return drawn, lambda leaves: importance_weights(leaves, least, beta)

    def _empty_error(self) -> TableEmptyError | PriorityError:
        """Return the error for a draw without mass in any shard. All ranks call it."""
        self._batches.summaries = None  # the next draw begins with an exchange of summaries
        count = len(self.look())
        if self.context.waits:
            return self.context.starved("the shards have none")
        return empty_error(self.context.sampler, count)

    def _spare(self, draw: Draw) -> Callable[[int, int], tuple[Array, int]]:
        """Return the function that draws spare rows of a batch; see `ShardRows.spare`."""
        return lambda count, turn: self.samplers.spare_rows(draw, count, turn)

    def _restored(self, draw: Draw) -> tuple[Rows, Weigh | None] | None:
        """Return a batch that was drawn before the state was taken, if all of its trajectories are still present."""
        batch = self._history.take_pending(draw)
        if batch is None or len(batch.names) != draw.count:
            return None
        ids, steps = batch.names, batch.steps
        slots = {shard: self.samplers.slots_of(shard, ids) for shard in self.samplers.own}
        for shard, places in list(slots.items()):
            lengths = self.shards.own[shard]._engine.reader().index_arrays()[0][places, 0]
            slots[shard] = np.where((places >= 0) & (steps < lengths), places, -1)
        shards = self._owners(draw.count, [np.flatnonzero(places >= 0) for places in slots.values()])
        if (shards < 0).any():
            return None
        own = {}
        for shard, shard_sampler in self.samplers.own.items():
            rows = np.flatnonzero(shards == shard)
            records = records_of(shard_sampler.table, slots[shard][rows], steps[rows])
            own[shard] = (rows, self.samplers.with_blocks(shard_sampler.table, records))
        self._batches.deal(shards)
        rows, records, least = self._batches.send_rows(shards, own, self.samplers.summarize(), None)
        restored = Rows(shards, rows, records, least)
        if self.shards.num_stages > 1:
            restored = self._stage_rows.translate(restored)
        if batch.weights is None:
            return restored, None
        weights = batch.weights[self._batches.own_rows]
        return restored, lambda _: weights

    def _owners(self, count: int, own: list[Array]) -> Array:
        """The shard that has each row of a batch, int64 [count]; -1 for none.

        Args:
            own: numbers of the rows that each of this rank's shards has, int64 [m] each.
        """
        owners: Array = np.full(count, -1, dtype=np.int64)
        for shard, rows in reversed(list(enumerate(self._batches.share_arrays(own)))):
            owners[rows] = shard
        return owners

    # ---------------------------------------------------------------- migration

    def rebalance(self, **options: Any) -> dict[str, Any]:
        """Move trajectories between shards, between two draws; all ranks call it. For the options see `Rebalance`."""
        self._begun = True
        self.exchange.doing = "calls rebalance"
        try:
            return Rebalance(self, **options).run()
        finally:
            self._batches.summaries = None  # the next draw begins with an exchange of summaries

    def redirect_updates(self, moves: Array) -> None:
        """Let the updates of trajectories that migrated, `MOVE` [n], follow them to their new shards."""
        self._updates.redirect(moves)

    # ---------------------------------------------------------------- updates

    def update_priority(
        self,
        index: Any,
        priority: Any,
        *,
        generation: Any,
        anchor: Any,
        shard: Any,
        stale: Literal["ignore", "error"],
        between: Callable[[Callable[[], object]], None],
    ) -> None:
        """See `ReplayDataset.update_priority`; `between` calls a function between two batches."""
        if stale == "error":
            raise SchemaError(
                "stale='error' was given; with Shards a row's owner, which alone knows whether it is gone, learns of "
                "its priority later. Use 'ignore', and see num_stale."
            )
        updates = self._updates.validate(
            self.context.sampler, index, priority, generation=generation, anchor=anchor, shard=shard
        )
        between(lambda: self._updates.put(updates))

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Return this rank's part of the state: the priorities of its shards by trajectory id, counters, its rows of
        the last batches, and priority updates on their way."""
        self.exchange.doing = "calls state_dict"
        self._begin()
        self._updates.flush()
        # Where every rank has all rows, the first one saves them.
        saves = self.shards.place.stage == 0 and (self._deal is None or self.exchange.rank == 0)
        recent = self._history.drawn() if saves else []
        for batch, rows in self._history.pending.items():  # all ranks have them: each saves some
            mine = np.arange(self.exchange.rank, len(rows.names), self.exchange.size)
            recent.append((batch, (len(rows.names), mine, rows.take(mine))))
        router = self._updates
        return shards_state.save_samplers(self.samplers.own, router.received, router.draws, recent)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Load a state for the trajectories that are still present, in any shard; see `load_parts`.

        Raises:
            SchemaError: another kind of state; nothing was changed. RankError: another rank cannot load its own.
        """
        self.exchange.doing = "calls load_state_dict"
        self._begin()
        sampler = self.context.sampler
        restored = load_parts(
            self.exchange, sampler, lambda: shards_state.parse_shards_state(saved, sampler), self._own_ids
        )
        received = []
        for shard, shard_sampler in self.samplers.own.items():
            shard_sampler.load(restored.part_of(shard_sampler))
            received.append(restored.updates_for(shard_sampler, shard, self.samplers.slots_of))
        self._updates.reset(received)
        self._history.restore(restored.recent)
        self._batches.summaries = None

    def _own_ids(self) -> Array:
        """Ids of the trajectories of this rank's shards, int64 [n]."""
        none: Array = np.empty(0, dtype=np.int64)
        return np.concatenate(
            [none, *(one.table.ids(one.known().slots) for one in self.samplers.own.values())]
        )

    def forget_before(self, epoch: int, step: int) -> None:
        """Forget the rows of draws before this one, to which no state goes back."""
        self._history.forget_before(epoch, step)

    def forget_pending(self) -> None:
        """Draw the batches of a loaded state by new random choices instead of repeating them."""
        self._history.pending.clear()

    @property
    def num_stale(self) -> int:
        """Number of updates of this rank's shards that were left out because their trajectory was gone."""
        return sum(shard_sampler.priorities.leaves.num_stale for shard_sampler in self.samplers.own.values())

    def quantiles(self, shares: Array) -> Array:
        """Return quantiles of the priorities in this rank's first shard, float64 [n].

        Args:
            shares: from 0 (smallest) to 1 (largest), float64 [n].
        """
        samplers = list(self.samplers.own.values())
        if not samplers:
            return np.full(len(shares), np.nan)
        found: Array = samplers[0].priorities.quantiles(shares)
        return found


def _taken(weights: Array, which: Array) -> Weigh:
    """The function that returns these of the weights that are known already."""
    mine = weights[which]
    return lambda _: mine
