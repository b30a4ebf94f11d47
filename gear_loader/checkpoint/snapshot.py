"""The trajectories of a table at one moment."""

from __future__ import annotations

import dataclasses
import time

import numpy as np

from gear_loader.storage.counters import FIRST_SEQUENCE, NEXT_SEQUENCE, NUM_SAMPLED, POLICY
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.ids import origin_of
from gear_loader.storage.index import Index
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY
from gear_loader.utils.arrays import Array

__all__ = ["Snapshot", "take_snapshot"]


@dataclasses.dataclass(frozen=True)
class Snapshot:
    """Live trajectories of a table at one moment, oldest first (arrays [n]), and the table's counters."""

    slots: Array
    sequences: Array
    lengths: Array
    priorities: Array
    times_sampled: Array
    ages: Array
    idents: Array
    finals: Array
    filled: Array
    origin: int | None
    next_sequence: int
    num_inserted: int
    num_sampled: int
    policy_version: int

    @property
    def rows(self) -> Array:
        """Steps and final steps of each trajectory, int64 [n]."""
        rows: Array = self.lengths + self.finals
        return rows

    def take(self, chosen: Array) -> Snapshot:
        """Trajectories selected by a boolean mask or by integer positions."""
        arrays = {
            field.name: getattr(self, field.name)[chosen]
            for field in dataclasses.fields(self)
            if isinstance(getattr(self, field.name), np.ndarray)
        }
        return dataclasses.replace(self, **arrays)

    def live(self, index: Index) -> Array:
        """Whether each trajectory is still in the table, bool [n]. Takes no lock."""
        live: Array = index.arrays.state[self.slots] == READY
        live &= index.arrays.sequence[self.slots] == self.sequences
        return live


def take_snapshot(index: Index, ticket: Ticket | None = None) -> Snapshot:
    """Take a snapshot; begin `ticket`, if given, at the same moment."""
    arrays = index.arrays

    def take() -> Snapshot:
        now = time.monotonic_ns()  # before expiry, so that no remaining trajectory exceeds the maximum age
        if not amid:
            index.admission.expire()
        slots = np.flatnonzero(arrays.state == READY)
        next_sequence = int(arrays.counters[NEXT_SEQUENCE])
        snapshot = Snapshot(
            slots=slots,
            sequences=arrays.sequence[slots],
            lengths=arrays.extent[slots, 0],
            priorities=arrays.priority[slots],
            times_sampled=arrays.sampled[slots].astype(np.int64),
            ages=np.maximum(now - arrays.created[slots], 0),
            idents=arrays.ident[slots],
            finals=arrays.extent[slots, 2],
            filled=filled_bits(arrays, slots),
            origin=origin_of(arrays.view),
            next_sequence=next_sequence,
            num_inserted=next_sequence - int(arrays.counters[FIRST_SEQUENCE]),
            num_sampled=int(arrays.counters[NUM_SAMPLED]),
            policy_version=int(arrays.counters[POLICY]),
        )
        if ticket is not None:
            ticket.begin(index.readers)
        return snapshot

    amid = index.recovery.lock.is_mine  # in a signal handler
    snapshot = index.recovery.read(take)
    return snapshot.take(np.argsort(snapshot.sequences, kind="stable"))
