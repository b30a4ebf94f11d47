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

SlotsOf = Callable[[int, Array], Array]
"""Returns the slots of ids in a shard; -1 for trajectories that are gone."""
Run = Callable[[str, Callable[[], dict[str, Array]]], Mapping[str, Array]]


def migrated_ids(table: Table) -> Array:
    """Return the ids, int64 [n], of a table's trajectories that came from other shards."""
    view = table._engine.reader().snapshot()
    ids: Array = table.ids(view.slots)[table._engine.index.arrays.ident[view.slots] >= 0]
    return ids


def remove_ids(table: Table, slots_of: SlotsOf, shard: int, ids: Array) -> int:
    """Remove the trajectories with these ids from a table; return the number removed.

    Args:
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


def remove_duplicates(
    tables: Sequence[tuple[int, int, Table]], slots_of: SlotsOf, grace: float, run: Run
) -> int:
    """Remove all copies but one of trajectories that several shards have; return their number. All ranks call it.

    A copy with more filled columns stays, else the copy in the shard that numbered the trajectory, else that in the
    first shard. Only trajectories that came from another shard can be duplicates; so only their ids are shared.

    Args:
        tables: shard, stage and table, of this rank.
        slots_of: looks ids up in one of these tables.
        grace: seconds after which a trajectory in a later stage is removed if stage 0 does not have it.
        run: runs a named function on all ranks, and returns the arrays of all by name.
    """
    nothing: Array = np.empty(0, dtype=np.int64)
    old: dict[tuple[int, int], Array] = {}  # migrated to a later stage long ago, and the others
    young: dict[tuple[int, int], Array] = {}

    def list_ids() -> dict[str, Array]:
        found = {}
        for shard, stage, table in tables:
            view = table._engine.reader().snapshot()
            ids = table.ids(view.slots)
            moved = ids[table._engine.index.arrays.ident[view.slots] >= 0]
            if stage == 0:
                found[f"{shard}"] = moved
                continue
            _, age = table._engine.reader().ages(view.slots, view.sequences)
            is_old = np.isin(moved, ids[age > grace * 1e9])
            old[shard, stage], young[shard, stage] = moved[is_old], moved[~is_old]
        return found

    migrated = np.unique(np.concatenate([nothing, *run("list its ids", list_ids).values()]))

    def find() -> dict[str, Array]:
        found = {}
        for shard, stage, table in tables:
            if stage == 0:
                slots = slots_of(shard, migrated)
                found[f"{shard}"] = migrated[slots >= 0]
                found[f"{shard}/filled"] = filled_bits(table._engine.index.arrays, slots[slots >= 0])
        return found

    found = run("find ids", find)
    present = {int(shard): ids for shard, ids in found.items() if shard.isdigit()}
    again = _copies(present, [found[f"{shard}/filled"] for shard in present])

    def remove() -> dict[str, Array]:
        counts = {}
        for shard, stage, table in tables:
            removed = [again.get(shard, nothing)]
            if stage:
                elsewhere = np.setdiff1d(migrated, present[shard])
                removed.append(np.setdiff1d(old[shard, stage], present[shard]))
                removed.append(young[shard, stage][np.isin(young[shard, stage], elsewhere)])
            count = remove_ids(table, slots_of, shard, np.unique(np.concatenate(removed)))
            counts[f"{shard}/{stage}"] = np.array([count])
        return counts

    return sum(int(values[0]) for values in run("remove duplicates", remove).values())


def _copies(present: Mapping[int, Array], bits: Sequence[Array]) -> dict[int, Array]:
    """The ids to remove from each shard, all copies but one; `bits`: of filled columns, of each shard."""
    ids = np.concatenate([np.empty(0, dtype=np.int64), *present.values()])
    shards = np.repeat(list(present), [len(part) for part in present.values()]).astype(np.int64)
    filled = np.concatenate([ids[:0], *bits])  # of one that has what another has, not less
    # The copy that stays comes first among those of its id.
    order = np.lexsort((shards, (ids & LARGEST_ORIGIN) != shards, -filled, ids))
    ids, shards = ids[order], shards[order]
    again = np.flatnonzero(ids[1:] == ids[:-1]) + 1
    return {int(shard): ids[again][shards[again] == shard] for shard in np.unique(shards[again])}
