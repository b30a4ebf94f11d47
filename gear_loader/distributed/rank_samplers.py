"""The shard samplers of one selection on one rank, and where its tables have the trajectories of ids."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gear_loader.collection.tier_rows import resolve
from gear_loader.collection.tree_rows import origins_of
from gear_loader.distributed.records import ORIGINS, SUMMARY, max_window_blocks, record_dtype
from gear_loader.distributed.shard_sampler import PrioritizedShardSampler, SnapshotShardSampler
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.errors import PriorityError, TableEmptyError
from gear_loader.selection.base import SelectionContext
from gear_loader.selection.samplers import Draw
from gear_loader.storage.reader import Changes
from gear_loader.storage.readers import Ticket
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class IdMap:
    """Maps the ids of a table's trajectories to their slots; takes in the table's changes at each look-up."""

    def __init__(self, table: Table) -> None:
        self._table = table
        self._position = -1
        self._slots: dict[int, int] = {}
        self._id_of: Array = np.full(table._engine.region.layout.max_trajectories, -1, dtype=np.int64)

    def slots(self, ids: Array) -> Array:
        """Return the slots of trajectories, int64 [n]; -1 for trajectories that are gone."""
        ticket = Ticket()

        def read() -> tuple[Changes, Array]:
            changes = self._table._engine.reader().begin_changes(self._position, ticket=ticket)[1]
            return changes, self._table.ids(changes.slots)

        changes, changed_ids = ticket.during(read)
        for slot, old in zip(changes.slots.tolist(), self._id_of[changes.slots].tolist(), strict=True):
            if old >= 0 and self._slots.get(old) == slot:
                del self._slots[old]
        self._id_of[changes.slots] = np.where(changes.ready, changed_ids, -1)
        ready = changes.ready
        self._slots.update(zip(changed_ids[ready].tolist(), changes.slots[ready].tolist(), strict=True))
        self._position = changes.position  # last: after an interruption the changes are applied again
        return np.array([self._slots.get(each, -1) for each in ids.tolist()], dtype=np.int64)


class Samplers:
    """Makes and holds the shard samplers of this rank, and looks rows up in its tables.

    Args:
        context: sampler and options of the selection.
        reach: of the windows, where rows are read one-sidedly: records
            then carry the blocks of their windows. None elsewhere.
        extents: whether records tell the extents of their trajectories without blocks, too. tree: as of `record_dtype`.

    Attributes:
        own: shard -> shard sampler, of this rank's shards.
        dtype: type of the row records.
        by_priority: whether rows are drawn by priority.
    """

    def __init__(
        self,
        context: SelectionContext,
        shards: ShardTables,
        reach: Reach | None,
        *,
        extents: bool = False,
        tree: bool = False,
    ) -> None:
        self._context = context
        self._shards = shards
        self._reach = reach
        self.by_priority = context.sampler.by_priority
        self.own: dict[int, Any] = {shard: self._new(shard, table) for shard, table in shards.own.items()}
        self._nearby: dict[int, Any] = {}  # samplers of other processes' shards, for spare rows
        self._maps: dict[int, IdMap] = {}
        self._extents = extents or shards.cache is not None
        self.dtype = record_dtype(
            0 if reach is None else max_window_blocks(reach, shards.block_steps.values()),
            extents=self._extents,
            tree=tree,
        )

    def _new(self, shard: int, table: Table) -> Any:
        make: Any = PrioritizedShardSampler if self.by_priority else SnapshotShardSampler
        return make(dataclasses.replace(self._context, table=table, limited=False), shard)

    def summarize(self) -> Array:
        """Return the summaries of this rank's shards, `SUMMARY` [k]."""
        summaries = [shard_sampler.summarize() for shard_sampler in self.own.values()]
        return np.concatenate(summaries) if summaries else np.empty(0, dtype=SUMMARY)

    def slots_of(self, shard: int, ids: Array) -> Array:
        """Return the slots of trajectories by their ids, int64 [n]; -1 for trajectories that are gone.

        Args:
            shard: number of a shard whose table this process holds.
        """
        if shard not in self._maps:
            self._maps[shard] = IdMap(self._shards.own.get(shard, self._shards.table))
        return self._maps[shard].slots(ids)

    def with_blocks(self, table: Table, records: Array) -> Array:
        """Add to records of a table the extents of trajectories and what these share, where they are needed, and the
        blocks of the windows, where they are read one-sidedly."""
        if self.dtype == records.dtype:
            return records
        full: Array = np.zeros(len(records), dtype=self.dtype)
        for name in records.dtype.names or ():
            full[name] = records[name]
        if self._reach is None and self._extents:
            extents = table._engine.reader().index_arrays()[0][full["slot"]]
            full["steps"], full["final"] = extents[:, 0], extents[:, 2]
        if self._reach is None:
            return with_origins(table, full)
        width = full["blocks"].shape[1]
        extent, ids = np.empty((len(full), 3), dtype=np.int64), np.zeros((len(full), width), dtype=np.int32)
        resolve(table, full["slot"].copy(), full["step"].copy(), self._reach, extent, ids)
        full["steps"], full["final"], full["blocks"] = extent[:, 0], extent[:, 2], ids
        full["low"] = np.arange(len(full)) * width - extent[:, 1]
        return with_origins(table, full)

    def spare_rows(self, draw: Draw, count: int, turn: int) -> tuple[Array, int]:
        """Draw spare rows from this process's shards, or if they are empty from another shard of the node.

        Args:
            draw: draw of the batch that lacks rows.
            turn: number of the attempt.

        Returns:
            Their records, and the shard.

        Raises:
            TableEmptyError, PriorityError: all of these shards are empty.
        """
        failure: TableEmptyError | PriorityError | None = None
        for shard in [*self.own, *self._shards.local_shards()]:
            try:
                return self._local(shard).spare(draw, count, turn), shard
            except (TableEmptyError, PriorityError) as error:
                failure = failure or error
        assert failure is not None
        raise failure

    def _local(self, shard: int) -> Any:
        """Return the sampler of a shard whose table is on this node; of another process's shard for spare rows only."""
        if shard in self.own:
            return self.own[shard]
        if shard not in self._nearby:
            table = self._shards.source(shard)
            assert isinstance(table, Table)
            self._nearby[shard] = self._new(shard, table)
        return self._nearby[shard]


def with_origins(table: Table, records: Array) -> Array:
    """Records of a table of this machine, in which `ORIGINS` are written, if they have these fields."""
    if ORIGINS[0] in (records.dtype.names or ()):
        for name, values in zip(ORIGINS, origins_of(table, records["slot"]), strict=True):
            records[name] = values
    return records
