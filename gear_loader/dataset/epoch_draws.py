"""The draws of an epoch: which batches there are, and which of them are this process's."""

from __future__ import annotations

import collections
import dataclasses
import math
from collections.abc import Callable, Iterator
from typing import Any

from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection
from gear_loader.selection.budget_planner import BudgetPlanner, PlannedBatch
from gear_loader.selection.samplers import Draw, Sampler


@dataclasses.dataclass(frozen=True)
class EpochDraws:
    """Batches with a number of rows. Rank r of w ranks has the batches number r, r + w, r + 2 w, ...

    Attributes:
        selection: returns the selection, which is made anew if the dataset's options have changed.
        sampler: of the dataset.
        seed: of the draws.
        size: items of a batch: rows, or groups; of all its slices, if ranks get slices of it.
        batch_size: rows of a batch on one rank.
        drop_last, batches_per_epoch: as for `ReplayDataset`.
        rank, world: this rank, and their number, if each has batches of its own.
        most: batches of an epoch on each rank, if it would have more.
    """

    selection: Callable[[], Selection]
    sampler: Sampler
    seed: int
    size: int
    batch_size: int
    drop_last: bool
    batches_per_epoch: float | None
    rank: int
    world: int
    most: float = math.inf

    def pass_batches(self, view: Any) -> int:
        """Batches of one pass over all items of `view`, on all ranks together.

        Raises:
            TableEmptyError: there are no items.
            SchemaError: `drop_last` leaves no batch.
        """
        items = self.sampler.num_items(view)
        if items == 0:
            raise self.selection().context.empty()
        if not (self.drop_last and self.sampler.passes):
            return -(-items // self.size)
        if items < self.size:
            ranks = "" if self.size == self.batch_size else f" on {self.size // self.batch_size} ranks"
            raise SchemaError(
                f"drop_last leaves no batch: {items} items are fewer than batch_size {self.batch_size}{ranks}."
            )
        return items // self.size

    def num_batches(self, view: Any) -> float:
        """Batches of an epoch on one rank, for the items of `view`; raises as `pass_batches`."""
        if self.batches_per_epoch is not None:
            return min(self.most, self.batches_per_epoch)
        return min(self.most, -(-self.pass_batches(view) // self.world))

    def draws(
        self, view: Any, *, epoch: int, past: int, number: int, every: int, count: float
    ) -> Iterator[tuple[Draw, Any]]:
        """Yield the draws of this rank's batches `number`, number + every, ... below `count`, with the items to draw
        from, or None for the items present at the draw.

        Args:
            view: items of the first pass.
            past: batches of earlier iterations.
        """
        turn = 0
        while number < count:
            batch = number * self.world + self.rank  # number over all ranks
            if not self.sampler.passes:
                yield Draw(self.seed, epoch, batch, 0, self.size, 0, past + number), None
            else:
                if batch // self.pass_batches(view) != turn:  # a new pass, over the current items
                    view = self.selection().await_items()
                turn, place = divmod(batch, self.pass_batches(view))
                first = place * self.size
                rows = min(self.size, self.sampler.num_items(view) - first)
                yield Draw(self.seed, epoch, batch, first, rows, turn, past + number), view
            number += every


def planned_batches(
    planner: BudgetPlanner,
    planned: collections.deque[PlannedBatch],
    *,
    number: int,
    every: int,
    count: float,
    rank: int,
    world: int,
) -> Iterator[PlannedBatch]:
    """Yield this rank's batches `number`, number + every, ... below `count`, and append them to `planned`.

    Batches of others are planned too, because the rows of each depend on those before it.
    """
    while number < count:
        mine = planner.number == number * world + rank
        plan: PlannedBatch | None = None
        try:
            plan = planner.next()
            if plan is None:
                return
            if mine:
                planned.append(plan)
                yield plan
                number += every
        finally:
            if plan is not None:
                plan.end()
