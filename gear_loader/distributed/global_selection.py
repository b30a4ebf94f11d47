"""A selector at work on all shards as if they were one table: every rank computes the same batch and gets its slice."""

from __future__ import annotations

import collections
import dataclasses
import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, cast

import numpy as np

from gear_loader.collection.collector import resolve
from gear_loader.distributed import state
from gear_loader.distributed.batch_exchange import BatchExchange
from gear_loader.distributed.collector import ReadTickets, ShardRows
from gear_loader.distributed.duplicates import brought_ids
from gear_loader.distributed.exchange import SingleProcess
from gear_loader.distributed.id_map import IdMap
from gear_loader.distributed.merging import Merge, PassView, by_mass, merged, merges, nothing, scattered
from gear_loader.distributed.messages import as_bytes
from gear_loader.distributed.rebalance import Rebalance
from gear_loader.distributed.records import NAME, PUBLISHED
from gear_loader.distributed.shard_sampler import PrioritizedShardSampler, SnapshotShardSampler, records_of
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.state import Remembered
from gear_loader.distributed.updates import Updates
from gear_loader.errors import PriorityError, SchemaError, StaleIndexError, TableEmptyError
from gear_loader.selection.base import Selection, SelectionContext
from gear_loader.selection.prioritized import needs_priorities
from gear_loader.selection.selectors import SAMPLE_EPOCH, Draw, Fifo, Prioritized
from gear_loader.storage.index import Snapshot
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["GlobalSelection"]

_logger = logging.getLogger("gear_loader")

_MOST_BROUGHT = 10_000_000  # trajectories that have moved, up to which the first look lists their ids
_MORE = 32  # candidates that a shard brings beyond what is expected of it
_ROUNDS = 8  # in which rows are drawn once more, because their shard was emptied
_EMPTIED = 1 << 5  # turns of `ShardSampler.spare` from here on are for such rows


class GlobalSelection(Selection):
    """Draws over all shards, exactly, with one exchange a batch.

    A batch's exchange carries the rows of the batch to the ranks that get them, new priorities to the owners of their
    rows, and what each shard has to offer for the next batch. So a batch is drawn from what there was at the exchange
    before, and new priorities that are given before batch n is drawn are known from batch n + 2 on.

    All ranks call `look`, `draw`, `state_dict` and `load_state_dict` alike.

    Args:
        job: of the selector; its table is this rank's.
        shards: all of them.
        exchange: of this selection alone.
        history: batches whose rows are remembered for `state_dict`.
        reach: first and last step, relative to the anchor, that any window covers, where rows are read one-sidedly:
            then their blocks travel with them. None elsewhere.
    """

    def __init__(
        self,
        job: SelectionContext,
        shards: Shards,
        exchange: SingleProcess,
        *,
        history: int,
        reach: tuple[int, int] | None,
    ) -> None:
        super().__init__(job)
        self.shards = shards
        self.exchange = exchange
        self.by_priority = needs_priorities(job.selector)
        self._history: collections.deque[tuple[tuple[int, int], Remembered]] = collections.deque(
            maxlen=history
        )
        self._pending: dict[tuple[int, int], Remembered] = {}
        self.engines: dict[int, Any] = {
            shard: self._new_engine(shard, table) for shard, table in shards.own.items()
        }
        self._others: dict[
            int, Any
        ] = {}  # engines of other processes' shards: for spare rows, as they come up
        self._reach = reach
        blocks = 0
        if reach is not None:
            blocks = max((reach[1] - reach[0]) // steps + 2 for steps in shards.block_steps.values())
        self._updates = Updates(shards, self.engines, exchange)
        self._courier = BatchExchange(shards, exchange, self._updates, blocks)
        self._maps: dict[int, IdMap] = {}
        self._names: Array | None = None  # of a later stage's rows: slots and generations in stage 0
        self._brought: Array | None = None  # rows that shards had in the last batch that was merged
        self._view: PassView | None = None
        self._looks = 0
        self._begun = False

    def _new_engine(self, shard: int, table: Table) -> Any:
        make: Any = PrioritizedShardSampler if self.by_priority else SnapshotShardSampler
        return make(dataclasses.replace(self.job, table=table, limited=False), shard)

    # ---------------------------------------------------------------- what there is

    def look(self) -> PassView:
        """What there is now in all shards."""
        self._begin()
        own = tuple(Selection(engine.job).view() for engine in self.engines.values())
        counts = [np.array([len(view), view.num_steps], dtype=np.int64) for view in own]
        everyone = np.stack(self._courier.of_all(counts))
        order = None
        if isinstance(self.job.selector, Fifo) and self.job.selector.passes:
            order = self._order(own)
        self._looks += 1
        self._view = PassView(self._looks, everyone[:, 0], everyone[:, 1], tuple(self.engines), own, order)
        return self._view

    def _begin(self) -> None:
        """The first time, remove what an interrupted migration has left twice. All ranks call it alike."""
        if self._begun:
            return
        self._begun = True
        counts = [brought_ids(engine.job.table).size for engine in self.engines.values()]
        total = sum(int(part.sum()) for part in self.exchange.share_array(np.array(counts, dtype=np.int64)))
        if total > _MOST_BROUGHT:
            _logger.warning(
                "%d trajectories have moved between shards: too many to look for copies that an interrupted migration "
                "has left. If a rank was killed in rebalance(), call rebalance(max_bytes=0), which removes them.",
                total,
            )
        elif total:
            removed = Rebalance(self, by="steps", max_bytes=0, tolerance=0.0).remove_leftovers()
            if removed:
                _logger.warning(
                    "Removed %d copies of trajectories, left by an interrupted migration.", removed
                )

    @property
    def offers(self) -> Array | None:
        """What each shard has offered last, `PUBLISHED` [S]; another array with each exchange."""
        return self._courier.published

    def last_look(self) -> PassView:
        """What there was at the last `look`."""
        return self.look() if self._view is None else self._view

    def _order(self, own: Sequence[Snapshot]) -> Snapshot:
        """All trajectories by their ids."""
        pairs = [
            np.concatenate((engine.job.table.ids(view.slots), view.lengths))
            for engine, view in zip(self.engines.values(), own, strict=True)
        ]
        parts = [part.reshape(2, -1) for part in self._courier.of_all(pairs)]
        ids, lengths = np.concatenate(parts, axis=1)
        sizes = [part.shape[1] for part in parts]
        shards = np.repeat(np.arange(len(parts)), sizes)
        places = np.concatenate([np.arange(size) for size in sizes])
        order = np.argsort(ids, kind="stable")
        return Snapshot(0, places[order], lengths[order], shards[order], ids[order])

    # ---------------------------------------------------------------- one batch

    def new_ticket(self) -> ReadTickets:
        """See `Selection.new_ticket`."""
        return ReadTickets()

    def undo(self, ticket: ReadTickets) -> None:
        """See `Selection.undo`."""
        ticket.end()

    def draw(self, draw: Draw, ticket: ReadTickets, frozen: Any = None) -> ShardRows:
        """See `Selection.draw`. The collector takes the tickets of the shards that it reads."""
        shards, records, weigh = self._drawn(draw, frozen)
        names = self._names
        if self.by_priority and draw.epoch < SAMPLE_EPOCH:
            weights = None if weigh is None else weigh(records["leaf"])
            self._history.append(
                ((draw.epoch, draw.step), Remembered(draw.count, records[["id", "step"]], weights))
            )
        return ShardRows(shards, records, weigh, self._spare(draw), names, ticket)

    def _drawn(
        self, draw: Draw, view: PassView | None
    ) -> tuple[Array, Array, Callable[[Array], Array] | None]:
        """Shards and records of this rank's rows; and what makes weights of leaves."""
        self._begin()
        published = self._known_offers()
        restored = self._restored(draw)
        if restored is not None:
            return restored
        masses = self._masses(published)
        for _ in range(2):  # new priorities may be on their way: to their owners, and into the trees
            if masses.sum() > 0:
                break
            self._updates.clock += 2
            self._courier.published = None
            published = self._known_offers()
            masses = self._masses(published)
        if not masses.sum() > 0 or (view is not None and len(view) == 0):
            raise self._nothing()
        draw_rows = self._merge if merges(self.job.selector) else self._scatter
        fallen, rows, records, least = draw_rows(draw, masses, view)
        self._updates.clock += 1
        if self.shards.num_stages > 1:
            rows, records = self._of_stage(fallen, rows, records)
        mine = self._courier.slice_of(len(fallen))
        selector = self.job.selector
        if isinstance(selector, Prioritized) and selector.normalize == "table":
            least = float(published["least"].min())
        return fallen[mine], records[np.searchsorted(rows, mine)], self._weigher(draw, least)

    def _masses(self, published: Array) -> Array:
        """The mass of each shard in a draw, float64 [S]: 0 for shards that some rank cannot reach.

        If that leaves no mass, the draw is made from all shards: each rank then reads what it can reach, and draws the
        other rows from its own shard.
        """
        reached = np.where(self._courier.lost, 0.0, published["mass"])
        return reached if reached.sum() > 0 else published["mass"].copy()

    def _nothing(self) -> TableEmptyError | PriorityError:
        """The error for a draw that finds no mass in any shard. All ranks call it alike."""
        self._courier.published = None  # looked at again the next time
        return nothing(self.job.selector, len(self.look()))

    # ---------------------------------------------------------------- the exchange

    def _known_offers(self) -> Array:
        """What all shards have offered for this draw."""
        if self._courier.published is None:
            offers, failure = self._try(lambda: self._offers(self._updates.clock - 1))
            self._courier.swap(0, lambda *_: 0, lambda _: self._courier.none, offers, failure)
        assert self._courier.published is not None
        return self._courier.published

    @staticmethod
    def _try(call: Callable[[], Any]) -> tuple[Any, Exception | None]:
        """What a call returns, or its error, which the other ranks have to be told first."""
        try:
            return call(), None
        except Exception as error:
            return np.empty(0, dtype=PUBLISHED), error

    def _offers(self, clock: int) -> Array:
        """Make the updates that were sent before draw number `clock`, and see what there is now."""
        self._updates.apply(clock)
        offers = [engine.publish() for engine in self.engines.values()]
        return np.concatenate(offers) if offers else np.empty(0, dtype=PUBLISHED)

    # ---------------------------------------------------------------- rows that fall to shards

    def _scatter(self, draw: Draw, masses: Array, view: PassView | None) -> tuple[Array, Array, Array, float]:
        """Shards of all rows of the batch; which rows this rank was told of, and their records; the least leaf."""
        fallen, items = scattered(self.job.selector, draw, masses, view)
        numbers = {shard: number for number, shard in enumerate(self.engines)}

        def resolve(shard: int, rows: Array) -> Array:
            some = None if items is None else items[rows]
            if view is None:
                return cast(Array, self.engines[shard].resolve(draw, rows, some))
            return cast(Array, self.engines[shard].resolve_in(view.own[numbers[shard]], draw, rows, some))

        told, least = [self._dealt(fallen, fallen, resolve)], np.inf
        for turn in range(_ROUNDS):
            rows, records, lightest = told[-1]
            published = self._courier.published
            assert published is not None
            least = min(least, lightest)
            emptied = published["emptied"] > 0
            if not emptied.any():
                break
            # All ranks know whose rows are missing, and what the shards have by now: they fall to others.
            kept = ~emptied[fallen[rows]]
            told[-1] = (rows[kept], records[kept], lightest)
            fallen, again = self._fallen_again(draw, fallen, turn, emptied, published)
            told.append(
                self._dealt(
                    fallen,
                    again,
                    lambda shard, rows, turn=turn: self.engines[shard].spare(  # type: ignore[misc]
                        draw, len(rows), _EMPTIED + turn
                    ),
                )
            )
        else:
            raise TableEmptyError(
                f"Rows of a batch were drawn {1 + _ROUNDS} times, and each time their shard was emptied meanwhile. "
                "The tables are emptied faster than they are read: remove less, or make them larger."
            )
        rows = np.concatenate([rows for rows, _, _ in told])
        records = np.concatenate([records for _, records, _ in told])
        order = np.argsort(rows, kind="stable")
        return fallen, rows[order], records[order], least

    def _fallen_again(
        self, draw: Draw, fallen: Array, turn: int, emptied: Array, published: Array
    ) -> tuple[Array, Array]:
        """Rows of emptied shards fall to others: the shards of all rows; and of those rows alone, -1 elsewhere."""
        which = np.flatnonzero(emptied[fallen])
        masses = np.where(emptied, 0.0, self._masses(published))
        if not masses.sum() > 0:
            raise self._nothing()
        again: Array = np.full(len(fallen), -1, dtype=np.int64)
        again[which] = by_mass(draw, masses, len(which), turn=1 + turn)
        return np.where(again >= 0, again, fallen), again

    def _dealt(
        self, fallen: Array, wanted: Array, resolve: Callable[[int, Array], Array]
    ) -> tuple[Array, Array, float]:
        """Resolve rows in the shards of this process, and tell the ranks that get them; see `BatchExchange.deal`.

        Args:
            fallen: int64 [n]: the shard of each row. wanted: as `fallen`, -1 for rows that are resolved already.
            resolve: records of some rows of a shard; it may find that the shard was emptied.
        """

        def of_all() -> tuple[dict[int, tuple[Array, Array]], Array]:
            found, least, emptied = {}, [], []
            for shard, engine in self.engines.items():
                rows = np.flatnonzero(wanted == shard)
                records: Array = np.zeros(len(rows), dtype=self._courier.dtype)
                gone = False
                try:
                    if len(rows):
                        records = self._with_blocks(engine.job.table, resolve(shard, rows))
                except (TableEmptyError, PriorityError):
                    gone = True
                found[shard] = (rows, records)
                least.append(np.inf if gone else records["leaf"].min(initial=np.inf))
                emptied.append(gone)
            offers = self._offers(self._updates.clock)
            offers["batch_least"], offers["emptied"] = least, emptied
            return found, offers

        answer, failure = self._try(of_all)
        found, offers = answer if failure is None else ({}, answer)
        return self._courier.deal(wanted, found, offers, failure)

    # ---------------------------------------------------------------- candidates

    def _merge(self, draw: Draw, masses: Array, view: PassView | None) -> tuple[Array, Array, Array, float]:
        """As `_scatter`, of selectors that take the first ones of what all shards bring."""

        selector, count, num_shards = self.job.selector, draw.count, self.shards.num_shards
        likely = np.full(num_shards, count / num_shards) if self._brought is None else self._brought
        asked = np.minimum(np.ceil(1.5 * likely).astype(np.int64) + _MORE, count)
        asked[masses == 0] = 0

        def candidates() -> tuple[list[Array], Array]:
            # All at once: after `_offers` the trees are those of the next draw.
            own = [
                self._with_blocks(engine.job.table, engine.candidates(draw, count))
                for engine in self.engines.values()
            ]
            return own, self._offers(self._updates.clock)

        answer, failure = self._try(candidates)
        own, offers = answer if failure is None else ([], answer)
        sent = np.zeros_like(asked)
        brought = [self._courier.none] * num_shards
        while True:
            # Ends: a shard that is asked for more brings at least one more, until it has brought `count` or ended.
            for shard, part in self._courier.bring(count, own, sent, asked, offers, failure).items():
                brought[shard] = np.concatenate((brought[shard], part))
            merge = merged(selector, count, brought, (asked >= count) | (masses == 0))
            if not merge.more.any():
                break
            sent, asked = asked, np.where(merge.more, np.clip(2 * asked, 1, count), asked)
        self._brought = np.bincount(merge.shards, minlength=num_shards).astype(np.float64)
        return self._in_turn(draw, merge)

    def _in_turn(self, draw: Draw, merge: Merge) -> tuple[Array, Array, Array, float]:
        found = len(merge.shards)
        if found == 0:
            raise nothing(self.job.selector, len(self.look()))
        if found < draw.count and isinstance(self.job.selector, Prioritized):
            raise PriorityError(
                f"{draw.count} items were to be drawn, but only {found} in all shards have a positive priority. Draw "
                "fewer, draw with replacement, or set priorities (Prioritized(eps=...) keeps them all positive)."
            )
        rows = np.arange(draw.count)
        records = merge.records[rows % found]
        return merge.shards[rows % found], rows, records, float(records["leaf"].min())

    # ---------------------------------------------------------------- stages

    def _of_stage(self, fallen: Array, rows: Array, records: Array) -> tuple[Array, Array]:
        """Rows and records of this rank's slice, as they are in the tables of its own stage.

        Stage 0 has drawn them; in the other stages the rank of each shard looks the trajectories up by their ids.
        """
        shards, me = self.shards, self.exchange.rank
        dtype = np.dtype([("record", self._courier.dtype), ("name", NAME)])

        def wanted(source: int, target: int) -> Array:
            one, other = shards.places[source], shards.places[target]
            if one.stage == 0 or one.stage != other.stage:
                return fallen[:0]
            mine = self._courier.slice_of(len(fallen), other.data)
            told: Array = mine[fallen[mine] == one.data]
            return told

        found, failure = self._try(lambda: self._looked_up(fallen, rows, records))
        parts = []
        for rank in range(self.exchange.size):
            which = wanted(me, rank)
            if failure is None and len(which):
                own = np.flatnonzero(fallen == shards.place.data)
                parts.append(as_bytes(found[np.searchsorted(own, which)]))
            else:
                parts.append(np.zeros(len(which) * dtype.itemsize, dtype=np.uint8))
        told = [wanted(rank, me) for rank in range(self.exchange.size)]
        answers = self.exchange.swap(parts, [len(which) * dtype.itemsize for which in told], failure)
        if shards.place.stage == 0:
            return rows, records
        rows = np.concatenate(told)
        order = np.argsort(rows, kind="stable")
        known = np.concatenate([part.view(dtype) for part in answers])[order]
        places = np.searchsorted(rows[order], self._courier.slice_of(len(fallen)))
        self._names = known["name"][places]
        return rows[order], known["record"].copy()

    def _looked_up(self, fallen: Array, rows: Array, records: Array) -> Array:
        """The rows of this rank's shard as they are in its own table, which is not that of stage 0."""
        place, table = self.shards.place, self.shards.table
        dtype = np.dtype([("record", self._courier.dtype), ("name", NAME)])
        if place.stage == 0:
            return np.empty(0, dtype=dtype)
        own: Array = records[np.searchsorted(rows, np.flatnonzero(fallen == place.data))].copy()
        slots = self.slots_of(place.data, own["id"])
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            raise StaleIndexError(
                f"{len(missing)} of {len(own)} trajectories that stage 0 has drawn are not in the table of stage "
                f"{place.stage}, shard {place.data}; the first has id {own['id'][missing[0]]}. Store trajectories "
                "through Placement, in tables with the same limits, and remove nothing from one alone."
            )
        found: Array = np.empty(len(own), dtype=dtype)
        for name in NAME.names or ():
            found["name"][name] = own[name]
        own["slot"], own["generation"] = slots, table.slot_states()[1][slots]
        found["record"] = self._with_blocks(table, own)
        return found

    def slots_of(self, shard: int, ids: Array) -> Array:
        """Slots of trajectories of a shard whose table is in this process, int64 [n]; -1 for those that are gone."""
        if shard not in self._maps:
            self._maps[shard] = IdMap(self.shards.own.get(shard, self.shards.table))
        return self._maps[shard].slots(ids)

    # ---------------------------------------------------------------- moves between shards

    def rebalance(self, **options: Any) -> dict[str, Any]:
        """See `Rebalance`: between two draws, on all ranks at the same time."""
        self._begun = True
        try:
            return Rebalance(self, **options).run()
        finally:
            self._courier.published = None  # looked at anew the next time

    def forward(self, moves: Array) -> None:
        """Some trajectories have moved, `MOVE` [n]: their updates follow them."""
        self._updates.forward(moves)

    # ---------------------------------------------------------------- parts of a batch

    def _with_blocks(self, table: Table, records: Array) -> Array:
        """Records, with the blocks of their windows where those are read one-sidedly."""
        if self._reach is None:
            return records
        full: Array = np.zeros(len(records), dtype=self._courier.dtype)
        for name in records.dtype.names or ():
            full[name] = records[name]
        width = full["blocks"].shape[1]
        extent, ids = np.empty((len(full), 2), dtype=np.int64), np.zeros((len(full), width), dtype=np.int32)
        resolve(table, full["slot"].copy(), full["step"].copy(), self._reach, extent, ids)
        full["steps"], full["blocks"] = extent[:, 0], ids
        full["low"] = np.arange(len(full)) * width - extent[:, 1]
        return full

    def _weigher(self, draw: Draw, least: float) -> Callable[[Array], Array] | None:
        selector = self.job.selector
        if not isinstance(selector, Prioritized):
            return None
        beta = selector.beta_at(draw.number)

        def weigh(leaves: Array) -> Array:
            weights: Array = (np.minimum(least / leaves, 1.0) ** beta).astype(np.float32)
            return weights

        return weigh

    def _spare(self, draw: Draw) -> Callable[[int, int], tuple[Array, int]] | None:
        if self.shards.num_stages > 1:
            return None
        return lambda count, turn: self._spare_rows(draw, count, turn)

    def _spare_rows(self, draw: Draw, count: int, turn: int) -> tuple[Array, int]:
        """Records of rows from this process's shards, or if they are empty from another one of this node; and which."""
        failure: TableEmptyError | PriorityError | None = None
        for shard in [*self.engines, *self.shards.near()]:
            try:
                return self._engine_near(shard).spare(draw, count, turn), shard
            except (TableEmptyError, PriorityError) as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _engine_near(self, shard: int) -> Any:
        """The engine of a shard whose table is on this node: for spare rows alone, if it is not this process's."""
        if shard in self.engines:
            return self.engines[shard]
        if shard not in self._others:
            table = self.shards.source(shard).table
            assert table is not None
            self._others[shard] = self._new_engine(shard, table)
        return self._others[shard]

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
        updates = self._updates.checked(
            self.job.selector, index, priority, generation=generation, anchor=anchor, shard=shard
        )
        between(lambda: self._updates.give(updates))

    # ---------------------------------------------------------------- state

    def state_dict(self) -> dict[str, Any]:
        """Priorities in all shards by the trajectories' ids, counters, the rows of the last batches, and new priorities
        that are on their way. Every rank gets the same."""
        self._begin()
        self._updates.send_all()
        kept = state.of_engines(self.engines, self._updates.received, self._updates.clock)
        mine = [(*key, some) for key, some in self._history] if self.shards.place.stage == 0 else []
        mine += [(*key, some) for key, some in self._pending.items()] if self.exchange.rank == 0 else []
        return state.joined(self.exchange, kept, mine)

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take over what `state_dict` returned, for the trajectories that are still there, in whichever shard.

        Raises:
            SchemaError: it is no such state; nothing was changed.
        """
        checked = state.checked(saved, self.job.selector)
        received = []
        for shard, engine in self.engines.items():
            engine.load_state_dict(checked.part_of(engine))
            received.append(checked.updates_for(engine, shard, self.slots_of))
        self._updates.start_anew(received)
        self._history.clear()
        self._pending = dict(checked.recent)
        self._courier.published = None

    def forget_pending(self) -> None:
        """Draw anew what a loaded state would have repeated."""
        self._pending.clear()

    def _restored(self, draw: Draw) -> tuple[Array, Array, Callable[[Array], Array] | None] | None:
        """A batch that had been drawn before the state was taken, if all of its trajectories are still there."""
        some = self._pending.pop((draw.epoch, draw.step), None)
        if some is None or some.count != draw.count or len(some.rows) != draw.count:
            return None
        ids, steps = some.rows["id"], some.rows["step"]
        slots = {shard: self.slots_of(shard, ids) for shard in self.engines}
        for shard, places in list(slots.items()):
            lengths = self.shards.own[shard].index_arrays()[0][places, 0]
            slots[shard] = np.where((places >= 0) & (steps < lengths), places, -1)
        everyone = np.stack(self._courier.of_all(list(slots.values())))
        if not (everyone >= 0).any(axis=0).all():
            return None
        fallen = (everyone >= 0).argmax(axis=0)
        found = {}
        for shard, engine in self.engines.items():
            rows = np.flatnonzero(fallen == shard)
            table = engine.job.table
            made = records_of(table, slots[shard][rows], steps[rows])
            found[shard] = (rows, self._with_blocks(table, made))
        offers = [engine.publish() for engine in self.engines.values()]
        offer = np.concatenate(offers) if offers else np.empty(0, dtype=PUBLISHED)
        rows, records, _ = self._courier.deal(fallen, found, offer, None)
        if self.shards.num_stages > 1:
            rows, records = self._of_stage(fallen, rows, records)
        mine = self._courier.slice_of(draw.count)
        weights = None if some.weights is None else some.weights[mine]
        weigh = None if weights is None else lambda _: weights
        return fallen[mine], records[np.searchsorted(rows, mine)], weigh

    @property
    def num_stale(self) -> int:
        """Rows of updates for this rank's shards that were left out because their trajectory was gone."""
        return sum(engine.num_stale for engine in self.engines.values())

    def quantiles(self, shares: Array) -> Array:
        """Quantiles of the priorities in this rank's first shard."""
        engines = list(self.engines.values())
        if not engines:
            return np.full(len(shares), np.nan)
        found: Array = engines[0].quantiles(shares)
        return found
