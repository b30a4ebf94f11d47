"""`Split`: which trajectories are for training and which for validation."""

from __future__ import annotations

import numpy as np

from gear_loader.selection.random import hashed
from gear_loader.utils.arrays import Array

_SPLIT = 0x73706C69  # random number stream


class Split:
    """Splits trajectories into two parts by sequence number, deterministically over processes and runs.

    One random trajectory of each 1 / fraction consecutive ones belongs to the second part. So every period of data
    collection is represented, and a trajectory never changes parts when the table grows.

    Args:
        fraction: share of the second part, 0 <= fraction < 1.
        seed: seed of the split.
        second: whether calls select the second part or the first.
    """

    def __init__(self, fraction: float, *, seed: int, second: bool) -> None:
        self.fraction = fraction
        self.seed = seed
        self.second = second

    def __call__(self, sequences: Array) -> Array:
        """Whether sequence numbers (int64 [n]) belong to this part, bool [n]."""
        if self.fraction == 0:
            return np.full(len(sequences), not self.second)
        # Stratum j begins at ceil(j / fraction). Number i lies in stratum floor(i * fraction), except for rounding.
        strata = np.floor(sequences * self.fraction).astype(np.int64)
        strata -= self._first(strata) > sequences
        strata += self._first(strata + 1) <= sequences
        low, high = self._first(strata), self._first(strata + 1)
        number = hashed(strata, seed=self.seed, stream=_SPLIT) % (high - low).astype(np.uint64)
        chosen: Array = sequences == low + number.astype(np.int64)
        return chosen if self.second else ~chosen

    def explain_empty(self, count: int) -> str:
        """The error message if no trajectory of a table with `count` trajectories belongs to this part."""
        fraction = f"val_fraction={self.fraction:g}"
        if self.second:
            return (
                f"{fraction} sets none of the table's {count:,} trajectories aside for validation: it takes about one "
                f"in {1 / self.fraction:.3g}. Add trajectories, raise val_fraction, or give val_fraction=0 for no "
                "validation."
            )
        return (
            f"{fraction} leaves none of the table's {count:,} trajectories for training. Add trajectories, or lower "
            "val_fraction."
        )

    def _first(self, strata: Array) -> Array:
        return np.ceil(strata / self.fraction).astype(np.int64)
