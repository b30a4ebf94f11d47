"""Trajectories that lie in two shards, or in one stage alone, because somebody was killed while they moved."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["Leftovers", "brought_ids", "remove_ids"]

SlotsOf = Callable[[int, Array], Array]


def brought_ids(table: Table) -> Array:
    """Ids, int64 [n], of the trajectories of a table that it did not number itself: they came from another shard."""
    view = table.snapshot()
    ids: Array = table.ids(view.slots)[table._live().ident[view.slots] >= 0]
    return ids


def remove_ids(table: Table, slots_of: SlotsOf, shard: int, ids: Array) -> int:
    """Remove the trajectories with these ids that are there; how many that were."""
    slots = slots_of(shard, ids)
    ids, slots = ids[slots >= 0], slots[slots >= 0]
    if len(slots) == 0:
        return 0
    with contextlib.suppress(StaleIndexError):
        table.remove(slots)
        return len(slots)
    count = 0
    for one, slot in zip(ids.tolist(), slots.tolist(), strict=True):  # one has been evicted a moment ago
        with contextlib.suppress(StaleIndexError):
            if table.ids(np.array([slot]))[0] == one:
                table.remove(slot)
                count += 1
    return count


class Leftovers:
    """Finds them, and removes all but one copy: of a shard's own trajectory that copy, else the one in the first shard.

    Only ids that a trajectory brought with it can be there twice; so these alone are told.

    Args:
        tables: shard, stage and table, of this rank.
        slots_of: finds ids in one of them.
        patience: seconds for which a trajectory in a later stage may wait until stage 0 has it too.
    """

    def __init__(
        self, tables: Sequence[tuple[int, int, Table]], slots_of: SlotsOf, *, patience: float
    ) -> None:
        self._tables = tables
        self._slots_of = slots_of
        self._patience = patience
        self._old: dict[tuple[int, int], Array] = {}
        self._young: dict[tuple[int, int], Array] = {}
        self._known: Array = np.empty(0, dtype=np.int64)
        self._held: dict[int, Array] = {}

    def brought(self) -> dict[str, Array]:
        """Ids that trajectories in stage 0 brought with them, by shard."""
        told = {}
        for shard, stage, table in self._tables:
            view = table.snapshot()
            ids = table.ids(view.slots)
            brought = ids[table._live().ident[view.slots] >= 0]
            if stage == 0:
                told[f"{shard}"] = brought
            else:
                _, age = table.ages(view.slots, view.sequences)
                old = np.isin(brought, ids[age > self._patience * 1e9])
                self._old[shard, stage], self._young[shard, stage] = brought[old], brought[~old]
        return told

    def learn_brought(self, told: dict[str, Array]) -> None:
        """What `brought` returned on all ranks."""
        self._known = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *told.values()]))

    def held(self) -> dict[str, Array]:
        """Which of all these are in this rank's shards."""
        return {
            f"{shard}": self._known[self._slots_of(shard, self._known) >= 0]
            for shard, stage, _ in self._tables
            if stage == 0
        }

    def learn_held(self, told: dict[str, Array]) -> None:
        """What `held` returned on all ranks."""
        self._held = {int(shard): ids for shard, ids in told.items()}

    def remove(self) -> dict[str, Array]:
        """Remove what this rank has of them; how many those are."""
        drop = self._dropped()
        told = {}
        for shard, stage, table in self._tables:
            gone = drop.get(shard, self._known[:0])
            if stage:
                here = self._held[shard]
                elsewhere = np.setdiff1d(self._known, here)
                young = self._young[shard, stage]
                gone = np.concatenate(
                    [gone, np.setdiff1d(self._old[shard, stage], here), young[np.isin(young, elsewhere)]]
                )
            count = remove_ids(table, self._slots_of, shard, np.unique(gone))
            told[f"{shard}/{stage}"] = np.array([count])
        return told

    def _dropped(self) -> dict[int, Array]:
        """Which ids go from which shards."""
        shards = np.repeat(list(self._held), [len(ids) for ids in self._held.values()]).astype(np.int64)
        ids = np.concatenate([np.empty(0, dtype=np.int64), *self._held.values()])
        # The one that stays comes first of its id.
        order = np.lexsort((shards, (ids & LARGEST_ORIGIN) != shards, ids))
        ids, shards = ids[order], shards[order]
        again = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        return {int(shard): ids[again][shards[again] == shard] for shard in np.unique(shards[again])}
