"""What holds trajectories that are read in spans."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from gear_loader.utils.arrays import Array


class Source(Protocol):
    """Trajectories that are read in spans; the disk below a table is one (`TierReader`)."""

    def sizes(self, slots: Array) -> Array:
        """Steps and final steps (0 or 1) of trajectories, int64 [n, 2].

        Args:
            slots: int64 [n].
        """

    def read(
        self,
        slots: Array,
        generations: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
        *,
        drawn: Array | None = None,
    ) -> None:
        """Read spans of trajectories; a final step is the row after the last step.

        Args:
            slots, generations: int64 [n]; the same trajectory may be there twice.
            first, counts: int64 [n], first row of each, and number of rows.
            outs: column -> contiguous uint8 [bytes], and int64 [n]: where each trajectory's rows go in it. Of a column
                per trajectory its one value.
            drawn: int64 [n], rows of a batch that each trajectory is for, for counts; None: of no batch.

        Raises:
            LostRowsError: trajectories cannot be read. StaleIndexError: one is not there any more.
        """
