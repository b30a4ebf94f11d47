"""One batch: its rows are drawn, their windows gathered, the rows released."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

from gear_loader.collection.buffers import Buffers
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.selection.base import Selection
from gear_loader.selection.budget_planner import PlannedBatch
from gear_loader.selection.samplers import Draw
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.queued import QueuedBatch, QueuedSeveral
from gear_loader.storage.table import Table


class Filler:
    """Fills buffers with the batches of one dataset.

    Args:
        table: of this process; trajectories that cannot be read from its disk are removed from it.
        selection: returns the selection, which is made anew if the dataset's options have changed.
        prefetcher: holds the collector, and the buffers and read tickets until a GPU has read them.
    """

    def __init__(self, table: Table, selection: Callable[[], Selection], prefetcher: Prefetcher) -> None:
        self._table, self._selection, self._prefetcher = table, selection, prefetcher

    def fill(self, buffers: Buffers, item: tuple[Draw, Any]) -> int:
        """Draw and gather a batch into `buffers`; return its number of rows.

        Args:
            buffers: of the prefetcher.
            item: the draw, and the items to draw from, or None for those present at the draw.
        """
        draw, frozen = item
        if frozen is None and buffers.inline is not None and self._selection().fill(draw, buffers.inline):
            if buffers.inline.values is not None:
                buffers.ragged = buffers.inline.values.take()
            buffers.compute(draw.count)
            return draw.count
        while True:
            try:
                return self._fill_once(buffers, item)
            except LostRowsError as error:  # removed, so the same draw does not meet them again
                self._table._engine.remove_lost(error)

    def queue(self, buffers: Buffers, item: tuple[Draw, Any], batch: QueuedBatch) -> bool:
        """`fill`, on a GPU, by one compiled call; False, having done nothing, if that cannot be.

        Args:
            buffers, item: as for `fill`. batch: of the buffers.
        """
        draw, frozen = item
        if frozen is not None:
            return False
        selection, prefetcher = self._selection(), self._prefetcher
        ticket = selection.new_ticket()
        try:
            if not selection.queue(draw, batch, ticket):
                return False
            prefetcher.release(buffers, ticket)
        except BaseException:
            prefetcher.abandon([buffers], lambda: selection.undo(ticket), ticket)
            raise
        return True

    def standing(self) -> object:
        """See `Selection.standing`."""
        return self._selection().standing

    def queue_several(
        self, members: Sequence[Buffers], items: Sequence[tuple[Draw, Any]], batches: QueuedSeveral
    ) -> bool:
        """`queue` for several batches: all of them, or none."""
        draws = [draw for draw, frozen in items if frozen is None]
        if len(draws) < len(items):
            return False
        selection, prefetcher = self._selection(), self._prefetcher
        ticket = selection.new_ticket()
        try:
            if not selection.queue_several(draws, batches, ticket):
                return False
            prefetcher.release(members[-1], ticket, members[:-1])
        except BaseException:
            prefetcher.abandon(members, lambda: selection.undo(ticket), ticket)
            raise
        return True

    def uncount(self, batches: int, count: int) -> None:
        """See `Selection.uncount`."""
        self._selection().uncount(batches, count)

    def _fill_once(self, buffers: Buffers, item: tuple[Draw, Any]) -> int:
        """`fill`, unless a trajectory cannot be read from disk, which raises LostRowsError."""
        draw, frozen = item
        selection, prefetcher = self._selection(), self._prefetcher
        ticket = selection.new_ticket()
        try:
            rows = selection.draw(draw, ticket, frozen)  # under the read ticket
            prefetcher.collector.gather(buffers, rows)  # their windows
            prefetcher.release(buffers, ticket)  # on a GPU when the gather has finished
            return len(rows)
        except BaseException:
            prefetcher.abandon([buffers], lambda: selection.undo(ticket), ticket)
            raise

    def fill_planned(self, buffers: Buffers, plan: PlannedBatch) -> int:
        """Gather a planned batch into `buffers`; return its number of rows."""
        prefetcher = self._prefetcher
        try:
            while True:
                try:
                    prefetcher.collector.gather(buffers, plan.rows)
                    break
                except LostRowsError as error:
                    self._table._engine.remove_lost(error)
                    plan.leave_out(error)
            while plan.tickets:  # what is taken from here ends when a GPU has read its rows
                prefetcher.release(buffers, plan.tickets[-1])
                plan.tickets.pop()
            return plan.gathered()
        except BaseException:
            while plan.tickets:
                ticket = plan.tickets.pop()
                prefetcher.abandon([buffers], functools.partial(self._selection().undo, ticket), ticket)
            raise
