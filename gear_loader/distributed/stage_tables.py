"""Who holds which columns of which shard, for those who put trajectories there."""

from __future__ import annotations

import concurrent.futures
import contextlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import GearError, StaleIndexError, TransportError
from gear_loader.storage.counters import NEXT_SEQUENCE
from gear_loader.storage.operations import READY, UNSET
from gear_loader.storage.schema import Schema
from gear_loader.storage.table import Table
from gear_loader.transport.capacity import mass_of, read_room, room_of
from gear_loader.utils.arrays import Array

__all__ = ["StageTable", "refused", "take_back"]

_ASK = 1.0  # seconds after which another node is asked anew how much room it has
_PART_BYTES = 1 << 25  # of trajectories that are sent at once
_PART_ROWS = 1 << 12


class StageTable:
    """The table with the columns of one stage of a shard: on this node, or on another one.

    Args:
        shard, stage: which.
        schema: its columns.
        table: where it is on this node.
        peer: what reaches its server where it is not.
        node, name: how it is called there.
        origin: the table's shard number as ids have it; by default that of `table`.
    """

    def __init__(
        self,
        shard: int,
        stage: int,
        schema: Schema,
        *,
        table: Table | None = None,
        peer: Any = None,
        node: str = "",
        name: str = "",
        origin: int | None = None,
    ) -> None:
        self.shard = shard
        self.stage = stage
        self.schema = schema
        self.table = table
        self.node = node
        self.name = name
        found = table.origin if origin is None and table is not None else origin
        self.origin: int = shard if found is None else found
        self._peer = peer
        self._told: tuple[int, float] = (0, 0.0)
        self._when = -_ASK

    def __str__(self) -> str:
        node = f" on node {self.node}" if self.node else ""
        name = repr(self.name) if self.name else "(private)"
        return f"Shard {self.shard}, stage {self.stage} (table {name}{node})"

    def named(self, error: GearError) -> GearError:
        """The same error, with the table in front."""
        made = type(error)(f"{self}: {error}")
        made.__cause__ = error
        return made

    # ---------------------------------------------------------------- what it tells

    def room(self) -> int:
        """Steps for which there is room. What another node tells is asked again after a second, and lessened by what
        is sent meanwhile."""
        return room_of(self.table) if self.table is not None else self._ask()[0]

    def mass(self) -> float:
        """The sum of the priorities that its trajectories were added with; known as `room` is."""
        return mass_of(self.table) if self.table is not None else self._ask()[1]

    def _ask(self) -> tuple[int, float]:
        if time.monotonic() - self._when >= _ASK:
            self._told = read_room(self._peer.metadata("room", self.name).result())
            self._when = time.monotonic()
        return self._told

    @property
    def next_sequence(self) -> int:
        """The number above all that its table has given, or stored with this shard's ids; 0 where it is not here."""
        return 0 if self.table is None else int(self.table._live().counters[NEXT_SEQUENCE])

    # ---------------------------------------------------------------- storing

    def store(self, trajectories: Sequence[Mapping[str, Any]], priorities: Array, ids: Array | None) -> Array:
        """Store trajectories in a table of this node, all or none.

        Args:
            priorities: float32 [n], `UNSET` where there is none.
            ids: int64 [n], or None if the table numbers them itself.

        Returns:
            Their slots, int64 [n].
        """
        table = self.table
        assert table is not None
        return table.store(list(trajectories), priorities, ids)

    def send(
        self, trajectories: Sequence[Mapping[str, Any]], priorities: Array, ids: Array | None
    ) -> list[concurrent.futures.Future[Array]]:
        """As `store`, in a table of another node: futures of the slots, in parts, each of which is stored or not."""
        given = np.full(len(trajectories), -1, dtype=np.int64) if ids is None else ids
        steps = sum(len(next(iter(each.values()))) for each in trajectories)
        known = priorities[priorities != UNSET]
        mass = float(known.sum()) + (len(priorities) - len(known)) * max(1.0, float(known.max(initial=0)))
        self._told = (max(0, self._told[0] - steps), self._told[1] + mass)
        futures, first, size = [], 0, 0
        for end, trajectory in enumerate(trajectories, start=1):
            size += len(next(iter(trajectory.values()))) * self.schema.step_bytes
            if size >= _PART_BYTES or end - first == _PART_ROWS or end == len(trajectories):
                part = [dict(each) for each in trajectories[first:end]]
                futures.append(
                    self._peer.store(
                        self.name, self.schema, part, priorities[first:end].copy(), given[first:end].copy()
                    )
                )
                first, size = end, 0
        return futures


def refused(error: BaseException) -> bool:
    """Whether it is certain that what was to be stored was not: the table, or its server, has said so."""
    if not isinstance(error, TransportError):
        return True
    cause = error.__cause__
    return isinstance(cause, GearError) and not isinstance(cause, TransportError)


def take_back(table: Table, slots: Array, generations: Array) -> None:
    """Remove trajectories, those that are gone already left out."""
    state, generation, _ = table.slot_states()
    for slot, wanted in zip(slots.tolist(), generations.tolist(), strict=True):
        if state[slot] == READY and generation[slot] == wanted:
            with contextlib.suppress(StaleIndexError):  # evicted a moment ago
                table.remove(slot)
