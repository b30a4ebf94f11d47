"""Which episodes of a source a table holds, and the priorities that are set for them while they are in it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources.priority_record import PriorityDraws
from gear_loader.storage import counters as at
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.schema import Window
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class FetchedEpisodes:
    """Tells the draws of episodes the priorities that are set in a table, to which one thread adds these episodes.

    Args:
        table: with a column per trajectory of this `name`, which has the episodes' numbers. draws: of the episodes.
    """

    def __init__(self, table: Table, name: str, draws: PriorityDraws) -> None:
        self._table, self._name, self._draws = table, name, draws
        slots = table._engine.region.layout.max_trajectories
        self._numbers: Array = np.full(slots, -1)
        self._generations: Array = np.full(slots, -1)
        self._seen: Array = np.full(slots, np.nan, dtype=np.float32)  # priorities
        self._position = -1
        draws.when_updated = self._set_in_table

    def resume(self, lengths: Array, numbers: Array, source: str) -> None:
        """Take in the episodes that the table holds, and their priorities.

        Args:
            lengths: int64, of the episodes of the source. numbers: those that are fetched, ascending.

        Raises:
            SourceError: it holds others.
        """
        slots = self._table.indices()
        if not len(slots):
            return
        steps = self._table.schema.steps
        cheap = min(steps, key=lambda name: (steps[name].ragged is not None, steps[name].step_bytes))
        batch = self._table.gather(slots, windows={cheap: Window(1), self._name: Window(1)})
        found = batch[self._name].numpy()
        if not np.isin(found, numbers).all() or not np.array_equal(lengths[found], self._table.lengths()):
            raise SourceError(
                f"resume=True was given, and the table holds others than the {len(lengths):,} episodes of {source}, by "
                f"{self._name!r}; expected a table that was loaded from it alone, with the same options."
            )
        self._numbers[slots] = found
        self._generations[slots] = self._table._engine.index.arrays.generation[slots]
        self.follow()

    def added(self, slots: Array, numbers: Array, priorities: Array) -> None:
        """Note episodes that were added with these priorities, float32 [n]."""
        self._numbers[slots], self._seen[slots] = numbers, priorities
        self._generations[slots] = self._table._engine.index.arrays.generation[slots]
        self._draws.fetched(numbers, priorities)

    def follow(self, evict: Callable[[], object] = bool) -> None:
        """Take in the priorities that were set since the last call, and evict, at one moment."""

        def section() -> tuple[Array, Array]:
            found = self._changed()
            evict()
            return found

        self._draws.update(*self._table._engine.reader().under_lock(section))

    def _changed(self) -> tuple[Array, Array]:
        """Episodes with other priorities than before, and these; they are in the table, or left it since."""
        arrays = self._table._engine.index.arrays
        since, self._position = self._position, int(arrays.counters[at.NUM_TOUCHED])
        slots = arrays.touched_since(since)
        slots = np.flatnonzero(self._numbers >= 0) if slots is None else slots
        same = (self._generations[slots] == arrays.generation[slots]) & (self._numbers[slots] >= 0)
        slots = slots[same]
        slots = slots[np.argsort(arrays.sequence[slots])]  # of two copies the newer one counts
        slots = slots[(arrays.priority[slots] >= 0) & (arrays.priority[slots] != self._seen[slots])]
        priorities: Array = arrays.priority[slots]
        self._seen[slots] = priorities
        return self._numbers[slots], priorities

    def _set_in_table(self, numbers: Array) -> None:
        """Set the priorities of episodes, int64 [n], in the table, too: those that are resumed with."""
        slots = np.flatnonzero(np.isin(self._numbers, numbers))
        self._seen[slots] = priorities = self._draws.priority(self._numbers[slots])
        updates = PriorityUpdates(slots, np.zeros_like(slots), self._generations[slots], priorities)
        self._table._engine.revise(updates, strict=False)
        arrays = self._table._engine.index.arrays
        left = (arrays.state[slots] != READY) | (arrays.generation[slots] != self._generations[slots])
        self._numbers[slots[left]] = -1  # the priorities that they left with are those of before
