"""Where trajectories are, by their ids."""

from __future__ import annotations

import numpy as np

from gear_loader.storage.table import Table, Ticket
from gear_loader.utils.arrays import Array

__all__ = ["IdMap"]


class IdMap:
    """Slots of a table's trajectories by their ids; follows the table's changes.

    Args:
        table: to follow.
    """

    def __init__(self, table: Table) -> None:
        self._table = table
        self._position = -1
        self._slots: dict[int, int] = {}
        self._id_of: Array = np.full(table.region.layout.max_trajectories, -1, dtype=np.int64)

    def slots(self, ids: Array) -> Array:
        """Slots of trajectories, int64 [n]; -1 for those that are not there."""
        ticket = Ticket()
        try:
            _, changes = self._table.begin_changes(self._position, ticket=ticket)
            fresh = self._table.ids(changes.slots)
            ticket.end()
        finally:
            ticket.end()  # again: an exception may arrive anywhere
        self._position = changes.position
        for slot, before in zip(changes.slots.tolist(), self._id_of[changes.slots].tolist(), strict=True):
            if before >= 0 and self._slots.get(before) == slot:
                del self._slots[before]
        self._id_of[changes.slots] = np.where(changes.ready, fresh, -1)
        ready = changes.ready
        self._slots.update(zip(fresh[ready].tolist(), changes.slots[ready].tolist(), strict=True))
        return np.array([self._slots.get(one, -1) for one in ids.tolist()], dtype=np.int64)
