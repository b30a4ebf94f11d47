"""A table's map from trajectory ids to slots."""

from __future__ import annotations

import numpy as np

from gear_loader.storage.readers import Ticket
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

__all__ = ["IdMap"]


class IdMap:
    """Maps the ids of a table's trajectories to their slots; takes in the table's changes at each look-up.

    Args:
        table: table of the trajectories.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._position = -1
        self._slots: dict[int, int] = {}
        self._id_of: Array = np.full(table._engine.region.layout.max_trajectories, -1, dtype=np.int64)

    def slots(self, ids: Array) -> Array:
        """Return the slots of trajectories, int64 [n]; -1 for trajectories that are gone.

        Args:
            ids: int64 [n].
        """
        ticket = Ticket()
        try:
            _, changes = self._table._engine.reader().begin_changes(self._position, ticket=ticket)
            changed_ids = self._table.ids(changes.slots)
            ticket.end()
        finally:
            ticket.end()  # again: an exception may arrive anywhere
        for slot, old in zip(changes.slots.tolist(), self._id_of[changes.slots].tolist(), strict=True):
            if old >= 0 and self._slots.get(old) == slot:
                del self._slots[old]
        self._id_of[changes.slots] = np.where(changes.ready, changed_ids, -1)
        ready = changes.ready
        self._slots.update(zip(changed_ids[ready].tolist(), changes.slots[ready].tolist(), strict=True))
        self._position = changes.position  # last: after an interruption the changes are applied again
        return np.array([self._slots.get(each, -1) for each in ids.tolist()], dtype=np.int64)
