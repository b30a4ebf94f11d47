"""One call of `Placement.extend`: stores the trajectories in the tables of all stages."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.stage_tables import StageTable, is_refusal, remove_stored
from gear_loader.errors import GearError, TransportError
from gear_loader.utils.arrays import Array

__all__ = ["Storing"]


@dataclasses.dataclass
class _Inserted:
    """Trajectories that a call has stored in one table of this node.

    Attributes:
        table: the stage table.
        slots, generations: int64 [n].
    """

    table: StageTable
    slots: Array
    generations: Array


class Storing:
    """Stores trajectories stage after stage, in all shards at once; in stage 0 last.

    Args:
        shards: the sharded table.
        tables: stage tables by shard and stage.
        trajectories: columns by name, of each trajectory.
        priorities: float32 [n]; `UNSET` for trajectories without a priority.
        ids: int64 [n]; None if tables number their trajectories themselves.
        groups: shard -> positions of its trajectories.
    """

    def __init__(
        self,
        shards: ShardTables,
        tables: Sequence[Sequence[StageTable]],
        trajectories: list[dict[str, Any]],
        priorities: Array,
        ids: Array | None,
        groups: Mapping[int, Array],
    ) -> None:
        self._shards = shards
        self._tables = tables
        self._trajectories = trajectories
        self._priorities = priorities
        self._ids = ids
        self._groups = groups
        self._stored: list[_Inserted] = []
        self._sent = 0  # trajectories that stage 0 has stored on other nodes
        self._slots: Array = np.full(len(trajectories), -1, dtype=np.int64)

    def run(self) -> Array:
        """Store the trajectories; return their indices in stage 0, int64 [n].

        Raises:
            GearError: a table did not store them; see `Placement.extend`.
        """
        try:
            for stage in reversed(range(self._shards.num_stages)):
                tables = [self._tables[shard][stage] for shard in self._groups]
                for table in tables:
                    if table.table is not None:
                        self._store(table)
                self._send([table for table in tables if table.table is None])
        except _UncertainError as error:
            if self._ids is None:
                self._undo()
            raise error.__cause__ or error from None
        except BaseException:
            self._undo()
            raise
        return self._slots

    def _undo(self) -> None:
        """Remove the trajectories from the tables of this node."""
        for part in reversed(self._stored):
            assert part.table.table is not None
            remove_stored(part.table.table, part.slots, part.generations)

    def _part(self, table: StageTable) -> tuple[list[dict[str, Any]], Array, Array | None]:
        """Return the trajectories of a table, their priorities and ids."""
        rows = self._groups[table.shard]
        part = [{name: self._trajectories[row][name] for name in table.schema} for row in rows.tolist()]
        return part, self._priorities[rows], None if self._ids is None else self._ids[rows]

    def _store(self, target: StageTable) -> None:
        """Store the trajectories of a table of this node."""
        try:
            slots = target.store(*self._part(target))
        except GearError as error:
            raise target.named(error) from error
        table = target.table
        assert table is not None
        self._stored.append(_Inserted(target, slots, table._engine.reader().slot_states()[1][slots]))
        if target.stage == 0:
            self._slots[self._groups[target.shard]] = slots

    def _send(self, targets: list[StageTable]) -> None:
        """Send the trajectories of tables of other nodes, to all nodes at once."""
        requests = [(target, target.send(*self._part(target))) for target in targets]
        failure: tuple[StageTable, GearError] | None = None
        for target, futures in requests:
            found = []
            for future in futures:
                try:
                    found.append(future.result())
                except GearError as error:
                    if failure is None or is_refusal(failure[1]):
                        failure = (target, error)
                    if isinstance(error, TransportError) and not is_refusal(error):
                        self._shards.mark_lost(target.shard, error)
            if target.stage == 0:
                self._sent += sum(len(part) for part in found)
                if len(found) == len(futures):
                    self._slots[self._groups[target.shard]] = np.concatenate(found)
        if failure is not None:
            self._fail(*failure)

    def _fail(self, target: StageTable, error: GearError) -> None:
        """Raise the error for a table of another node."""
        # The error of the other node explains more than that of the request.
        cause = error.__cause__ if is_refusal(error) and isinstance(error.__cause__, GearError) else error
        if target.stage == 0 and self._sent:
            count = len(self._trajectories)
            cause = type(cause)(
                f"{self._sent} of {count} trajectories of this call were stored on other nodes. {cause}"
            )
        named = target.named(cause)
        if target.stage == 0 and (self._sent or not is_refusal(error)):
            raise _UncertainError from named  # stage 0 may have them: the other stages must keep them
        raise named from error


class _UncertainError(Exception):
    """Stage 0 may have stored the trajectories that were sent to it."""
