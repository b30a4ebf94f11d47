"""Anchors whose windows lie wholly inside their trajectories."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.storage.schema import Schema, Window
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array


@dataclasses.dataclass(frozen=True)
class CompleteAnchors:
    """The anchors of a trajectory at which every window is complete: consecutive steps from `first` on.

    Attributes:
        first: the first of them.
        ahead: steps that must follow the anchor, 0 or more.
        ahead_final: the same for columns with final steps, of which one more exists in trajectories that have it.
    """

    first: int
    ahead: int
    ahead_final: int

    @classmethod
    def of(cls, schema: Schema, windows: Mapping[str, Any]) -> CompleteAnchors:
        """Those of windows by name. An `NStep` ends with the trajectory: with `next` one step must follow, or a final
        one, others do not count."""
        first, ahead = 0, [0, 0]
        for name, window in windows.items():
            for column in getattr(window, "delivered", ()):
                ahead[schema[column].final] = max(ahead[schema[column].final], 1)
            if not isinstance(window, Window):
                continue
            column = schema[name if window.column is None else window.column]
            if column.trajectory:
                continue
            final = column.final
            first = max(first, -window.offset)
            ahead[final] = max(ahead[final], window.offset + window.length - 1)
        return cls(first, *ahead)

    def counts(self, lengths: Array, finals: Array) -> Array:
        """Number of these anchors in trajectories.

        Args:
            lengths: int64 [n], in steps. finals: int64 [n], number of final steps (0 or 1).

        Returns:
            int64 [n]; 0 for a trajectory that is too short.
        """
        missing = np.maximum(self.ahead, self.ahead_final - finals)
        counts: Array = np.maximum(lengths - self.first - missing, 0)
        return counts

    def reduce(self, snapshot: Snapshot, extent: Array) -> Snapshot:
        """The trajectories of a snapshot that have such anchors, with the number of these as their lengths.

        Args:
            extent: int64 [slots, 3], of the table's index.
        """
        counts = self.counts(snapshot.lengths, extent[snapshot.slots, 2])
        return dataclasses.replace(snapshot, lengths=counts, running=None).take(counts > 0)
