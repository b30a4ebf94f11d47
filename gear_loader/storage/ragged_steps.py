"""Ragged values of steps that writers append, in memory that their trajectories take piece by piece."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import GearError
from gear_loader.native.lanes import EMPTY_LANE, LANE_GENERATION, LANE_SLOT
from gear_loader.native.ragged_copies import append_values
from gear_loader.storage.operations.extents import (
    HEADER,
    SPOT_AT,
    SPOT_END,
    SPOT_EXTENT,
    SPOT_GENERATION,
    SPOT_SLOT,
    SPOT_TAKEN,
    SPOT_WIDTH,
)
from gear_loader.storage.payload import check_payload_fits, write_steps
from gear_loader.storage.ragged_input import Payload, StepValues
from gear_loader.storage.states import READY, WRITING
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine

_AHEAD = 1 << 16
"""Most bytes that a trajectory keeps for its next values; it gives them back when it ends."""


class RaggedSteps:
    """Places the values of steps in the payload memory, for the trajectories of a sink's lanes.

    Args:
        table: the table. sink: a `BlockSink`, which has the lanes, n of them.
    """

    def __init__(self, table: Engine, sink: Any, n: int) -> None:
        self._table, self._sink = table, sink
        self._heap = table.region.payload()
        self._ahead = min(_AHEAD, self._heap.nbytes // (64 * n))
        self._spots: Array = np.zeros((n, SPOT_WIDTH), dtype=np.int64)

    def place(self, chosen: Array, values: StepValues, first: int = 0, count: int = 1) -> None:
        """Store values of trajectories that are being written, and complete their records.

        Args:
            chosen: int64 [m], lanes, which have a slot. values, first, count: their next steps, or what they have once.

        Raises:
            As `Index.begin`: nothing was stored.
        """
        if self._append(chosen, values, first, count):
            return
        steps = slice(first, first + count)
        offsets = self._find(chosen, values, steps, visible=False)
        assert offsets is not None
        self._write(values, chosen, steps, offsets)

    def place_visible(self, chosen: Array, values: StepValues, first: int, count: int) -> Array:
        """As `place`, of trajectories that grow and may be evicted; return the lanes (int64 [m]) that still have one.

        The values are copied under the lock, as the steps are: nobody else gets their memory meanwhile.
        """
        lanes, index = self._sink.lanes, self._sink.index
        steps = slice(first, first + count)

        def append() -> bool:
            states = index.arrays.state[slots := lanes[chosen, LANE_SLOT]]
            live = (states == READY) & (index.arrays.generation[slots] == lanes[chosen, LANE_GENERATION])
            return bool(live.all()) and self._append(chosen, values, first, count)

        if len(chosen) and index.recovery.locked(append):
            return chosen
        while len(chosen) and self._find(chosen, values, steps, visible=True) is None:
            slots = lanes[chosen, LANE_SLOT]
            live = index.arrays.state[slots] == READY
            live &= index.arrays.generation[slots] == lanes[chosen, LANE_GENERATION]
            lanes[chosen[~live]] = EMPTY_LANE
            chosen = chosen[live]
        return chosen

    def _append(self, chosen: Array, values: StepValues, first: int, count: int) -> bool:
        """Store values in what the trajectories of lanes keep for them; False, having done nothing, if it is small."""
        given = self._heap.ctypes.data, self._sink.lanes, chosen, self._spots, first
        return bool(append_values(*given, -1 if values.by_lane else count, values.parts, values.records))

    def _find(self, chosen: Array, values: StepValues, steps: slice, *, visible: bool) -> Array | None:
        """Places of values, int64 [V]; None if some of the trajectories are gone."""
        if not len(chosen):
            return np.empty(0, dtype=np.int64)
        index, lanes = self._sink.index, self._sink.lanes
        arrays, (evict, wait) = index.arrays, self._table.policy
        slots, generations = lanes[:, LANE_SLOT].copy(), lanes[:, LANE_GENERATION].copy()
        runs, sizes = values.runs(chosen, steps)
        payload = Payload(runs, sizes, sizes, sizes, (), values)
        known = (self._spots[chosen, SPOT_SLOT] == slots[chosen]) & (not visible)
        known &= self._spots[chosen, SPOT_GENERATION] == generations[chosen]
        check_payload_fits(payload, self._heap.nbytes, int(self._spots[chosen[known], SPOT_TAKEN].sum()))

        def check() -> int:
            states, same = (
                arrays.state[slots[chosen]],
                arrays.generation[slots[chosen]] == generations[chosen],
            )
            whole = bool((same & (states == (READY if visible else WRITING))).all())
            if not whole and not visible:
                raise GearError("A trajectory that was being written is gone: its writer was taken for dead.")
            return (0 if visible else len(chosen)) if whole else -1

        def then(offsets: Array) -> None:
            self._write(values, chosen, steps, offsets)

        offsets = index.place_payload(
            self._heap,
            payload,
            slots,
            generations,
            spots=self._spots,
            evict=evict,
            wait=wait,
            ahead=self._ahead,
            check=check,
            then=then if visible else None,
        )
        return offsets if len(offsets) == len(sizes) else None

    def _write(self, values: StepValues, chosen: Array, steps: slice, offsets: Array) -> None:
        if len(chosen) and not write_steps(values, chosen, steps, self._heap, offsets):
            raise self._sink.index.arrays.corrupt("a ragged value has a part outside of its memory")

    def take_back(self, chosen: Array, before: Array) -> None:
        """After an error, use the memory of values that were not appended for the next ones.

        Args:
            chosen: int64 [m], lanes. before: `spots` before their values were placed.
        """
        for lane in chosen.tolist():
            spot, same = self._spots[lane], self._spots[lane, SPOT_EXTENT] == before[lane, SPOT_EXTENT]
            if spot[SPOT_EXTENT]:
                spot[SPOT_AT] = before[lane, SPOT_AT] if same else spot[SPOT_EXTENT] + HEADER

    @property
    def spots(self) -> Array:
        """A copy of where the next values of each lane go, int64 [n, SPOT_WIDTH]."""
        return self._spots.copy()

    def settle(self, chosen: Array) -> None:
        """Give back what the trajectories of lanes keep for their next values."""
        spots = self._spots[chosen]
        if (spots[:, SPOT_END] - spots[:, SPOT_AT] < HEADER).all():
            return
        index = self._sink.index
        given = index.arrays.where, self._heap, self._spots, chosen
        index.recovery.locked(lambda: index.arrays.ops.trim_payload(*given))
