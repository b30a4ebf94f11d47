"""Base of the selections, which draw a batch's rows from one table."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, TypeVar

import numpy as np

from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.native.random import FIRST, LAST, UNIFORM
from gear_loader.selection.complete import CompleteAnchors
from gear_loader.selection.grouping import GroupFormer, Groups
from gear_loader.selection.samplers import (
    Draw,
    Sampler,
)
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.ids import sequences_of
from gear_loader.storage.inline import InlineBatch
from gear_loader.storage.queued import QueuedBatch, QueuedSeveral
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

_T = TypeVar("_T")
Anchor = Literal["uniform", "first", "last"]
ANCHOR_KINDS = {"uniform": UNIFORM, "first": FIRST, "last": LAST}
"""Codes of the anchors in compiled loops."""
REDRAWN = 16  # first random number stream for redrawn rows


@dataclasses.dataclass(frozen=True)
class SelectionContext:
    """The table, sampler and options of a selection.

    Attributes:
        table: the table to draw from.
        sampler: the sampler.
        anchor: anchor step of a row, if the sampler chooses trajectories.
        subset: function of sequence numbers (int64 [n]) that returns a mask (bool [n]) of the trajectories to draw
            from; None for all.
        limited: whether draws wait for the table's rate limiter and count for it.
        informs: whether batches carry ``sample_info``.
        complete: the anchors to draw from, if not all.
        late: bits of the write-once columns that a trajectory must have.
        grouping: options of the groups to draw from; None to draw trajectories, or steps, one by one.
    """

    table: Table
    sampler: Sampler
    anchor: Anchor
    subset: Callable[[Array], Array] | None
    limited: bool = True
    informs: bool = False
    complete: CompleteAnchors | None = None
    late: int = 0
    grouping: Groups | None = None

    @property
    def filters(self) -> bool:
        """Whether some trajectories of the table are not drawn."""
        return self.subset is not None or self.complete is not None or self.late != 0

    @property
    def waits(self) -> bool:
        """Whether a draw waits until there is something to draw: others fill, complete or renew it."""
        return self.late != 0 or self.grouping is not None or self.table.rules.max_lag is not None

    @property
    def first(self) -> int:
        """The first step of a trajectory that can be an anchor."""
        return 0 if self.complete is None else self.complete.first

    @property
    def stride(self) -> int:
        """Steps from one anchor of a trajectory to the next."""
        return 1 if self.complete is None else self.complete.stride

    def anchor_steps(self, numbers: Array) -> Array:
        """The steps of anchors by their numbers in their trajectories, int64 [n]."""
        return numbers if self.complete is None else self.complete.steps(numbers)

    def num_anchors(self, slots: Array) -> Array:
        """Number of steps of trajectories (slots int64 [n]) that can be anchors, int64 [n]."""
        extent = self.table._engine.reader().index_arrays()[0][slots]
        if self.complete is None:
            lengths: Array = extent[:, 0]
            return lengths
        return self.complete.counts(extent[:, 0], extent[:, 2])

    @property
    def counts(self) -> bool:
        """Whether draws of each trajectory are counted."""
        return self.informs or self.table.rules.max_times_sampled is not None

    def samples(self, count: int) -> int:
        """Samples that a draw of `count` rows reports to the rate limiter."""
        return count if self.limited else 0

    def chosen(self, slots: Array) -> Array:
        """Mask of the trajectories in `slots` (int64 [n]) that can be drawn, bool [n]: of the subset, with an anchor,
        and with the write-once columns that are read.

        The subset sees the sequence numbers of the table that stored the trajectories first.

        Raises:
            SchemaError: the user's function returned another shape.
        """
        anchored = np.ones(len(slots), dtype=bool) if self.complete is None else self.num_anchors(slots) > 0
        if self.late:
            anchored &= (filled_bits(self.table._engine.index.arrays, slots) & self.late) == self.late
        if self.subset is None:
            return anchored
        chosen = np.asarray(self.subset(sequences_of(self.table.ids(slots))), dtype=bool)
        if chosen.shape != (len(slots),):
            raise SchemaError(
                f"subset returned shape {list(chosen.shape)} for {len(slots)} sequence numbers; "
                f"expected [{len(slots)}]."
            )
        both: Array = chosen & anchored
        return both

    def empty(self) -> TableEmptyError:
        """The error for a table without a trajectory that can be drawn."""
        count = len(self.table)
        if self.waits:
            return self.starved(f"the table holds {count:,} trajectories")
        explain = getattr(self.subset, "explain_empty", None)  # method of the subsets of `ReplayDataModule`
        if count and explain is not None:
            return TableEmptyError(explain(count))
        if count and self.complete is not None and self.subset is None:
            return TableEmptyError(
                f"None of the table's {count:,} trajectories is long enough for the windows of this dataset, which has "
                "complete=True or a stride. Add longer ones, or use shorter windows."
            )
        if count:
            return TableEmptyError(
                f"None of the table's {count:,} trajectories belongs to this dataset's subset."
            )
        return TableEmptyError("The table is empty: there is nothing to draw from. Add trajectories first.")

    def starved(self, found: str) -> TableEmptyError:
        """The error after a wait for something to draw.

        Args:
            found: what there is, as a clause.
        """
        late = [name for i, name in enumerate(self.table.schema.late) if self.late >> i & 1]
        wanted = [] if not late else [f"with the write-once columns {late} filled"]
        if self.grouping is not None:
            wanted.append(f"in complete groups of {self.grouping.size} by {self.grouping.column!r}")
        if self.table.rules.max_lag is not None:
            wanted.append(f"of a policy at most {self.table.rules.max_lag} versions old")
        return TableEmptyError(
            f"Timed out: {found}; expected some {', '.join(wanted)}. Check that their writers are running."
        )


@dataclasses.dataclass
class ShardShare:
    """What the draws of one shard are corrected by, where each rank draws from its own shard.

    Every rank draws the same number of rows, whatever its shard's mass: an item's probability is its leaf divided by
    its own shard's mass and by the number of shards. Importance weights are relative to the largest weight in this
    rank's batch (``normalize="batch"``), as if the heaviest shard had drawn it, or in all tables.

    Attributes:
        correction: factor of this shard's weights before the exponent beta: its mass divided by the heaviest shard's.
        least: the smallest ratio of a leaf and its shard's mass, over all shards.
    """

    correction: float = math.nan
    least: float = 0.0


class Selection:
    """Base of the selections: draws a batch's rows from one table for `ReplayDataset`.

    Attributes:
        context: as given.
        former: forms the groups that are drawn; None if trajectories, or steps, are drawn one by one.
        share: this shard's part of all shards, where each rank draws from its own; else None.
    """

    def __init__(self, context: SelectionContext) -> None:
        self.context = context
        self.former = None if context.grouping is None else GroupFormer(context.table, context.grouping)
        self.share: ShardShare | None = None
        self._seen: tuple[Snapshot, Snapshot] | None = None
        self._reduced: tuple[Snapshot, Snapshot] | None = None

    def num_rows(self, draw: Draw) -> int:
        """Rows of a draw, whose `count` is that of its items."""
        grouping = self.context.grouping
        return draw.count if grouping is None else draw.count * grouping.size

    def view(self, snapshot: Snapshot | None = None) -> Snapshot:
        """The subset's trajectories in `snapshot`, by default in a new snapshot."""
        snapshot = self.context.table._engine.reader().snapshot() if snapshot is None else snapshot
        if not self.context.filters:
            return snapshot
        if self._seen is None or self._seen[0] is not snapshot:
            self._seen = (snapshot, snapshot.take(self.context.chosen(snapshot.slots)))
        return self._seen[1]

    def anchors_of(self, view: Snapshot) -> Snapshot:
        """`view`, with the number of steps that can be anchors as the lengths of its trajectories."""
        complete = self.context.complete
        if complete is None:
            return view
        if self._reduced is None or self._reduced[0] is not view:
            extent = self.context.table._engine.reader().index_arrays()[0]
            self._reduced = (view, complete.reduce(view, extent))
        return self._reduced[1]

    def drawable(self, snapshot: Snapshot | None = None) -> Any:
        """What can be drawn of a snapshot, by default of a new one: trajectories, or under a read ticket groups."""
        view = self.anchors_of(self.view(snapshot))
        return view if self.former is None else self.former.form(view)

    def look(self) -> Any:
        """The current items for the start of an epoch; has a length and `num_steps`."""
        if self.former is None:
            return self.drawable()
        return self.former.look(lambda snapshot: self.anchors_of(self.view(snapshot)))

    def mass(self) -> tuple[float, float]:
        """What draws from here weigh beside those of other tables: items, or the sum of the leaves; and the smallest
        positive leaf where weights need it, else infinity."""
        return float(self.context.sampler.num_items(self.look())), math.inf

    def after_fork(self) -> None:
        """Drop locks of the parent's threads in a forked child."""

    def last_look(self) -> Any:
        """`look` for sizes only; may be out of date."""
        return self.look()

    def await_items(self) -> Any:
        """`look`, after waiting until something can be drawn if the context waits.

        Raises:
            TableEmptyError: timed out.
        """

        def look() -> Any:
            found = self.look()
            if len(found) == 0 and self.context.waits:
                raise self.context.empty()
            return found

        return self.when_drawable(look)

    def when_drawable(self, attempt: Callable[[], _T], ticket: Any = None) -> _T:
        """Call `attempt`; if the context waits, again until it raises no TableEmptyError, or the deadline.

        Args:
            ticket: of the draw, released during waits, so that no writer waits for it.
        """
        if not self.context.waits:
            return attempt()
        backoff: Backoff | None = None
        while True:
            try:
                return attempt()
            except TableEmptyError:
                if ticket is not None:
                    self.undo(ticket)
                backoff = backoff or self.context.table._engine.reader().backoff()
                if not backoff.sleep():
                    raise

    @property
    def is_quick(self) -> bool:
        """Whether `fill` draws all batches of an unchanged table: no draw waits, and none calls a user's function."""
        return False

    def new_ticket(self) -> Any:
        """A read ticket for one batch; `draw` takes it, so that an interrupted draw can be undone."""
        return Ticket()

    def draw(self, draw: Draw, ticket: Any, frozen: Any = None) -> Any:
        """Draw the rows of a batch.

        Args:
            ticket: read ticket from `new_ticket`. The caller releases it after the gather, or with `undo` if this
                raises.
            frozen: items to draw from, as `look` returned them; None for the current ones.

        Returns:
            Rows for the collector: `SelectedRows`, `CudaRows`, or the rows of a `ShardCollector`.
        """
        raise NotImplementedError

    def fill(self, draw: Draw, batch: InlineBatch) -> bool:
        """Draw the rows of a batch from the current items, and gather it, in one compiled call.

        Args:
            draw: counters of the draw. batch: where the batch goes.

        Returns:
            False, having done nothing, if it needs `draw`.
        """
        return False

    def queue(self, draw: Draw, batch: QueuedBatch, ticket: Any) -> bool:
        """Draw the rows of a batch from the current items, and queue its gather on a GPU, in one compiled call.

        Args:
            draw: counters of the draw. batch: where the rows go. ticket: as for `draw`.

        Returns:
            False, having done nothing, if it needs `draw`.
        """
        return False

    @property
    def standing(self) -> object:
        """What tells whether a draw has the same items as an earlier one: the same object as long as nothing has
        changed that it draws from. None where `queue_several` is of no use."""
        return None

    def queue_several(self, draws: Sequence[Draw], batches: QueuedSeveral, ticket: Any) -> bool:
        """`queue` several batches in one compiled call: what `draws` would get one after another now."""
        return False

    def uncount(self, batches: int, count: int) -> None:
        """Subtract the rows of batches of `count` items, which nobody gets, from the sample count."""
        self.context.table._engine.reader().count_drawn(-batches * self.context.samples(count))

    def queue_update(self, index: Any, priority: Any, generation: Any, anchor: Any) -> bool:
        """Queue an update of priorities like one before on a GPU, by compiled calls; stale rows are ignored. Other
        threads may capture CUDA graphs meanwhile.

        Returns:
            False, having done nothing, if it needs `update_priority`.
        """
        return False

    def forget_before(self, epoch: int, step: int) -> None:
        """Forget the rows of batches before this one, which no state resumes before."""

    def forget_pending(self) -> None:
        """Draw the batches that a loaded state would repeat by new random choices."""

    def undo(self, ticket: Any) -> None:
        """Release the ticket of a failed batch and subtract its rows from the sample count. Idempotent."""
        ticket.end()  # also of a table that is closed
        self.context.table._engine.reader().undo(ticket)

    def count_samples(
        self, slots: Array, generations: Array, redraw: Callable[[Array, int], bool]
    ) -> Array | None:
        """Count the draws of these rows; redraw rows whose trajectories have reached `max_times_sampled`.

        Args:
            slots, generations: int64 [n].
            redraw: called with row numbers (int64 [m]) and the number of redraws so far; replaces these rows, also in
                `slots` and `generations`. Returns False if nothing is left to draw from.

        Returns:
            int64 [n]: draws of each row's trajectory so far; None if they are not counted.

        Raises:
            TableEmptyError: timed out waiting for trajectories.
        """
        if not self.context.counts:
            return None
        table = self.context.table
        times = table._engine.reader().count_samples(slots, generations)
        if table.rules.max_times_sampled is None:
            return times
        backoff, turn = table._engine.reader().backoff(), 0
        while len(refused := np.flatnonzero(times == 0)):
            if redraw(refused, turn):
                times[refused] = table._engine.reader().count_samples(slots[refused], generations[refused])
                turn += 1
            elif not backoff.sleep():
                raise TableEmptyError(
                    f"Timed out after {backoff.timeout:g} s: {len(refused)} of {len(slots)} rows could not be drawn, "
                    f"because every trajectory has been drawn {table.rules.max_times_sampled} times "
                    "(max_times_sampled) and removed. Add trajectories, or draw smaller batches."
                )
        return times

    def rows(
        self,
        slots: Array,
        steps: Array,
        generations: Array,
        times: Array | None,
        probabilities: Array | float,
        weights: Array | None = None,
    ) -> SelectedRows:
        """The drawn rows for the collector, with ``sample_info`` if batches carry it."""
        if not self.context.informs or times is None:
            return SelectedRows(slots, steps, generations, weights)
        ages, nanoseconds = self.context.table._engine.reader().ages(
            slots, self.context.table._engine.reader().slot_states()[2][slots]
        )
        numbers = np.empty((2, len(slots)), dtype=np.float32)
        numbers[0], numbers[1] = probabilities, nanoseconds / 1e9
        return SelectedRows(slots, steps, generations, weights, np.stack((times, ages)), numbers)
