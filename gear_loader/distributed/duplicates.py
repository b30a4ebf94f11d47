"""Removes duplicates and incomplete copies of trajectories, left by an interrupted migration."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence

import numpy as np

from gear_loader.errors import StaleIndexError
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["DuplicateSearch", "migrated_ids", "remove_ids"]

SlotsOf = Callable[[int, Array], Array]
"""Returns the slots of ids in a shard; -1 for trajectories that are gone."""


def migrated_ids(table: Table) -> Array:
    """Return the ids, int64 [n], of a table's trajectories that came from other shards."""
    view = table._engine.reader().snapshot()
    ids: Array = table.ids(view.slots)[table._engine.index.arrays.ident[view.slots] >= 0]
    return ids


def remove_ids(table: Table, slots_of: SlotsOf, shard: int, ids: Array) -> int:
    """Remove the trajectories with these ids from a table; return the number removed.

    Args:
        table: the table.
        slots_of: looks ids up.
        shard: number of the table's shard.
        ids: int64 [n]; ids that are not in the table are left out.
    """
    slots = slots_of(shard, ids)
    ids, slots = ids[slots >= 0], slots[slots >= 0]
    if len(slots) == 0:
        return 0
    with contextlib.suppress(StaleIndexError):
        table.remove(slots)
        return len(slots)
    count = 0
    for each, slot in zip(ids.tolist(), slots.tolist(), strict=True):  # one of them was evicted a moment ago
        with contextlib.suppress(StaleIndexError):
            if table.ids(np.array([slot]))[0] == each:
                table.remove(slot)
                count += 1
    return count


class DuplicateSearch:
    """Finds duplicates in three collective steps, and removes all copies but one.

    A copy with more filled columns stays, else the copy in the shard that numbered the trajectory, else that in the
    first shard. Only trajectories that
    came from another shard can be duplicates; so only their ids are shared.

    Args:
        tables: shard, stage and table, of this rank.
        slots_of: looks ids up in one of these tables.
        grace: seconds after which a trajectory in a later stage is removed if stage 0 does not have it.
    """

    def __init__(self, tables: Sequence[tuple[int, int, Table]], slots_of: SlotsOf, *, grace: float) -> None:
        self._tables = tables
        self._slots_of = slots_of
        self._grace = grace
        self._old: dict[tuple[int, int], Array] = {}
        self._young: dict[tuple[int, int], Array] = {}
        self._migrated: Array = np.empty(0, dtype=np.int64)
        self._present: dict[int, Array] = {}
        self._filled: dict[int, Array] = {}

    def migrated(self) -> dict[str, Array]:
        """Return the ids of migrated trajectories in this rank's shards of stage 0, by shard."""
        found = {}
        for shard, stage, table in self._tables:
            view = table._engine.reader().snapshot()
            ids = table.ids(view.slots)
            migrated = ids[table._engine.index.arrays.ident[view.slots] >= 0]
            if stage == 0:
                found[f"{shard}"] = migrated
            else:
                _, age = table._engine.reader().ages(view.slots, view.sequences)
                old = np.isin(migrated, ids[age > self._grace * 1e9])
                self._old[shard, stage], self._young[shard, stage] = migrated[old], migrated[~old]
        return found

    def set_migrated(self, found: Mapping[str, Array]) -> None:
        """Take over the results of `migrated` on all ranks."""
        self._migrated = np.unique(np.concatenate([np.empty(0, dtype=np.int64), *found.values()]))

    def present(self) -> dict[str, Array]:
        """Return the migrated ids of all ranks that this rank's shards of stage 0 hold, and bits of filled columns."""
        found = {}
        for shard, stage, table in self._tables:
            if stage == 0:
                slots = self._slots_of(shard, self._migrated)
                found[f"{shard}"] = self._migrated[slots >= 0]
                found[f"{shard}/filled"] = filled_bits(table._engine.index.arrays, slots[slots >= 0])
        return found

    def set_present(self, found: Mapping[str, Array]) -> None:
        """Take over the results of `present` on all ranks."""
        self._present = {int(shard): ids for shard, ids in found.items() if shard.isdigit()}
        self._filled = {shard: found[f"{shard}/filled"] for shard in self._present}

    def remove(self) -> dict[str, Array]:
        """Remove the duplicates from this rank's tables; return the number removed, by shard and stage."""
        duplicates = self._duplicates()
        counts = {}
        for shard, stage, table in self._tables:
            removed = duplicates.get(shard, self._migrated[:0])
            if stage:
                present = self._present[shard]
                elsewhere = np.setdiff1d(self._migrated, present)
                young = self._young[shard, stage]
                removed = np.concatenate(
                    [
                        removed,
                        np.setdiff1d(self._old[shard, stage], present),
                        young[np.isin(young, elsewhere)],
                    ]
                )
            count = remove_ids(table, self._slots_of, shard, np.unique(removed))
            counts[f"{shard}/{stage}"] = np.array([count])
        return counts

    def _duplicates(self) -> dict[int, Array]:
        """Return the ids to remove from each shard."""
        sizes = [len(ids) for ids in self._present.values()]
        shards = np.repeat(list(self._present), sizes).astype(np.int64)
        ids = np.concatenate([np.empty(0, dtype=np.int64), *self._present.values()])
        filled = np.concatenate(
            [ids[:0], *self._filled.values()]
        )  # of one that has what another has, not less
        # The copy that stays comes first among those of its id.
        order = np.lexsort((shards, (ids & LARGEST_ORIGIN) != shards, -filled, ids))
        ids, shards = ids[order], shards[order]
        again = np.flatnonzero(ids[1:] == ids[:-1]) + 1
        return {int(shard): ids[again][shards[again] == shard] for shard in np.unique(shards[again])}
