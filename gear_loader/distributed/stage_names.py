"""Where the trajectories of batches lie in the tables of a later stage of a pipeline: their values are overwritten."""

from __future__ import annotations

import threading

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array


class StageNames:
    """Where trajectories that stage 0 names lie in the tables of a later stage, as far as rows of them were drawn.

    Takes 24 bytes a trajectory of the tables of stage 0. Thread-safe.
    """

    def __init__(self) -> None:
        self._known: dict[
            int, Array
        ] = {}  # of a shard: generation in stage 0, slot and generation here; [slots, 3]
        self._guard = threading.Lock()

    def remember(self, shards: Array, keys: Array, records: Array) -> None:
        """Note rows: their shards, int64 [n], names in stage 0, `SLOT_KEY` [n], and records in this stage, [n]."""
        with self._guard:
            for shard in np.unique(shards).tolist():
                which = np.flatnonzero(shards == shard)
                slots, known = keys["slot"][which], self._known.get(shard, np.empty((0, 3), dtype=np.int64))
                if (more := int(slots.max()) + 1) > len(known):
                    grown = np.full((max(more, 2 * len(known)), 3), -1, dtype=np.int64)
                    grown[: len(known)] = known
                    known = self._known[shard] = grown
                newest = keys["generation"][which] >= known[slots, 0]  # another dataset may be ahead
                slots, which = slots[newest], which[newest]
                names = keys["generation"], records["slot"], records["generation"]
                known[slots] = np.stack([part[which] for part in names], axis=1)

    def find(self, shard: int, slots: Array, generations: Array) -> tuple[Array, Array, Array]:
        """Slots and generations in this stage of trajectories, and whether stage 0 has had another since; [n] each.

        Args:
            slots, generations: int64 [n], in stage 0.

        Raises:
            SchemaError: some have not been drawn by this rank.
        """
        with self._guard:
            known = self._known.get(shard, np.empty((0, 3), dtype=np.int64))
            inside = (slots >= 0) & (slots < len(known))
            found = np.where(inside[:, None], known[np.where(inside, slots, 0)] if len(known) else -1, -1)
        missing = np.flatnonzero(found[:, 0] < generations)
        if len(missing):
            raise SchemaError(
                f"Row {missing[0]} of shard {shard}, index {slots[missing[0]]}, was not drawn by this rank, which has "
                "to know where a later stage of the pipeline has it. Give a batch of this dataset. Nothing was changed."
            )
        return found[:, 1], found[:, 2], found[:, 0] > generations
