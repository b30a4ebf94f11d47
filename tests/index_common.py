"""A look at the index of a table: its trajectories, its snapshot, and what has changed since the last look."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gear_loader as gear
from gear_loader.storage.reader import Changes
from gear_loader.storage.snapshot import Log
from gear_loader.storage.states import READY

SCALAR = {"x": gear.Column(torch.int64)}
_ENOUGH = 50


def values_of(table: gear.Table, slot: int) -> list[int]:
    """A trajectory of a table of `SCALAR`."""
    length, start, _ = table._engine.region.array("extent")[slot].tolist()
    return values_at(table, start, length)


def values_at(table: gear.Table, start: int, length: int) -> list[int]:
    """What a reader finds who has seen where a trajectory's block table is."""
    steps = table._engine.region.layout.block_steps
    ids = table._engine.region.array("block_ids").reshape(-1)[start : start - (-length // steps)]
    found: list[int] = table._engine.region.column("x")[ids].reshape(-1).view(np.int64)[:length].tolist()
    return found


def watch_moves(table: gear.Table) -> None:
    """From now on it fails if the block tables are moved again and again for one operation."""
    index = table._engine.index
    obtain, flip, moves = index.allocator.obtain, index.allocator.flip, [0]

    def counted(*args: Any) -> bool:
        moves[0] += 1
        assert moves[0] < _ENOUGH, "the block tables are moved for ever"
        return flip(*args)

    def fresh(*args: Any, **options: Any) -> None:
        moves[0] = 0
        obtain(*args, **options)

    index.allocator.flip, index.allocator.obtain = counted, fresh  # type: ignore[method-assign]


def same_snapshot(table: gear.Table) -> None:
    """Fails unless the snapshot that is kept up to date is as one that is made now."""
    index = table._engine.index
    kept = index.reader.snapshot()
    log, index.reader._log = index.reader._log, Log()
    again = index.reader.snapshot()
    index.reader._log = log
    for field in ("slots", "lengths", "generations", "sequences", "ends"):
        assert getattr(kept, field).tolist() == getattr(again, field).tolist(), field
    assert (kept.version, kept.num_steps, len(kept)) == (again.version, again.num_steps, len(again))
    if kept.num_steps:
        steps = np.arange(kept.num_steps)
        for one, other in zip(kept.locate(steps), again.locate(steps), strict=True):
            assert one.tolist() == other.tolist()


class Follower:
    """Looks at a table now and then, and is told by the ring of touched slots what has changed since.

    Attributes:
        touched: by the twin: slots in which a trajectory was committed or retired since the last look.
        repaired: whether the index has been repaired since, or may have been.
    """

    def __init__(self, table: gear.Table) -> None:
        self.table = table
        self.position = -1
        self.seen: dict[int, int] = {}
        self.touched: list[int] = []
        self.repaired = True

    def look(self) -> Changes:
        """Fails unless every slot that changed is told, and where the twin knows it, no other."""
        index = self.table._engine.index
        ticket, changes = index.reader.begin_changes(self.position)
        ticket.end()
        slots, state = changes.slots, self.table._engine.region.array("state")
        now = {slot: int(index.arrays.sequence[slot]) for slot in np.flatnonzero(state == READY).tolist()}
        assert len(np.unique(slots)) == len(slots)
        assert changes.ready.tolist() == [slot in now for slot in slots.tolist()]
        told = {
            slot: int(s)
            for slot, s, ready in zip(slots.tolist(), changes.sequences, changes.ready, strict=True)
            if ready
        }
        assert told == {slot: now[slot] for slot in told}
        ready = slots[changes.ready]
        assert changes.priorities[changes.ready].tolist() == index.arrays.priority[ready].tolist()
        assert changes.num_ready == len(now)
        assert changes.next_sequence > max(now.values(), default=-1)
        # What was seen then and what has been told now make what there is.
        kept = {slot: sequence for slot, sequence in self.seen.items() if slot not in slots.tolist()}
        assert {**kept, **told} == now
        if changes.everything:
            assert slots.tolist() == list(range(index.arrays.num_slots))
        if not self.repaired:
            assert changes.everything == (len(self.touched) > index.arrays.num_slots)
            assert changes.everything or set(slots.tolist()) == set(self.touched)
            assert changes.position == self.position + len(self.touched)
        assert changes.position >= self.position
        self.position, self.seen = changes.position, now
        self.touched, self.repaired = [], False
        return changes
