"""Dealing the rows, or the micro-batches, of a step to ranks, so that all have about as much work."""

from __future__ import annotations

import dataclasses
from typing import Literal

import numpy as np

from gear_loader.distributed.shard_source import spans_of
from gear_loader.distributed.slices import contiguous
from gear_loader.selection.balance import balance
from gear_loader.utils.arrays import Array

Balance = Literal["steps", "squares"]


def costs_of(steps: Array, kind: Balance) -> Array:
    """The work for rows of so many steps, float64 [n]: the steps, or their squares where attention dominates."""
    costs = steps.astype(np.float64)
    return costs if kind == "steps" else costs * costs


def deal_all(records: Array) -> Array:
    """All rows of a batch, for planners that deal micro-batches."""
    return np.arange(len(records))


@dataclasses.dataclass(frozen=True)
class RowDealer:
    """Deals the rows of a batch: each rank gets as many, of about as much work together.

    Attributes:
        ranks: number of ranks. rank: number of this one.
        kind: of the work. offset, length: of the windows.
    """

    ranks: int
    rank: int
    kind: Balance
    offset: int
    length: int

    def __call__(self, records: Array) -> Array:
        """Numbers of this rank's rows, int64 [m]; slices of the batch where it has not as many rows for each rank.

        Args:
            records: row records of the whole batch, with the lengths of their trajectories.
        """
        count = len(records)
        if count % self.ranks or not count:
            return contiguous(count, self.ranks).of(self.rank)
        costs = costs_of(spans_of(records, self.offset, self.length)[1], self.kind)
        mine: Array = balance(costs, self.ranks)[self.rank]
        return mine
