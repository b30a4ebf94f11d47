"""Which steps of trajectories are anchors, where not all are: of complete windows, and of sequences."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Schema, Window
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array


@dataclasses.dataclass(frozen=True)
class CompleteAnchors:
    """The anchors of a trajectory: of the steps from `first` on that have enough steps behind them, each `stride`-th.

    Attributes:
        first: the first of them.
        ahead: steps that must follow the anchor, 0 or more.
        ahead_final: the same for columns with final steps, of which one more exists in trajectories that have it.
        stride: steps from one anchor to the next.
        length: of the steps with enough behind them, those from an anchor on that a sequence has; the first anchor
            whose sequence has the last of them is the last anchor.
    """

    first: int
    ahead: int
    ahead_final: int
    stride: int = 1
    length: int = 1

    @classmethod
    def of(
        cls, schema: Schema, windows: Mapping[str, Any], *, complete: bool | str = True, stride: int = 1
    ) -> CompleteAnchors:
        """Those of windows by name. An `NStep` ends with the trajectory: with `next` one step must follow, or a final
        one, others do not count.

        Args:
            complete: whether windows must lie wholly inside; with ``"end"`` they may begin before. Else those of
                sequences: a step counts if columns with final steps have as many after it as their windows reach
                further than those of other columns.
            stride: see `CompleteAnchors`.
        """
        first, ahead, finals = 0, [0, 0], set()
        for name, window in windows.items():
            for column in getattr(window, "delivered", ()):
                ahead[schema[column].final] = max(ahead[schema[column].final], 1)
            if not isinstance(window, Window):
                continue
            column = schema[name if window.column is None else window.column]
            if column.trajectory:
                continue
            if window.timestamps is not None:
                if complete:
                    raise SchemaError(
                        f"complete=True was given with the window {name!r}, {window!r}; expected windows of steps: "
                        "those of times are known when the times have been read. Look at its mask."
                    )
                continue
            final = column.final
            finals.add(final)
            low, high = window.reach
            low = 0 if complete == "end" else low
            first, ahead[final] = max(first, -low), max(ahead[final], high)
        if complete:
            return cls(first, ahead[False], ahead[True], stride, stride)
        reach = ahead[False not in finals]
        return cls(0, 0, max(ahead[True] - reach, 0), stride, max(reach + 1, stride))

    def counts(self, lengths: Array, finals: Array) -> Array:
        """Number of these anchors in trajectories.

        Args:
            lengths: int64 [n], in steps. finals: int64 [n], number of final steps (0 or 1).

        Returns:
            int64 [n]; 0 for a trajectory that is too short.
        """
        missing = np.maximum(self.ahead, self.ahead_final - finals)
        counts: Array = np.maximum(lengths - self.first - missing, 0)
        if self.stride > 1 or self.length > 1:
            counts = np.where(counts > 0, 1 - np.minimum(self.length - counts, 0) // self.stride, 0)
        return counts

    def steps(self, numbers: Array) -> Array:
        """The steps of anchors by their numbers in their trajectories, int64 [n]."""
        return self.first + self.stride * numbers

    def reduce(self, snapshot: Snapshot, extent: Array) -> Snapshot:
        """The trajectories of a snapshot that have such anchors, with the number of these as their lengths.

        Args:
            extent: int64 [slots, 3], of the table's index.
        """
        counts = self.counts(snapshot.lengths, extent[snapshot.slots, 2])
        return dataclasses.replace(snapshot, lengths=counts, running=None).take(counts > 0)
