"""Which rank gets which trajectory, when a checkpoint is loaded with another number of ranks."""

from __future__ import annotations

import heapq

import numpy as np

from gear_loader.storage.recovery import Array

__all__ = ["deal", "split_counts"]

_PARTS = 8


def deal(lengths: Array, world_size: int) -> Array:
    """Deal trajectories to ranks so that all get about as many steps.

    They are dealt in runs that lie one behind another, so that a rank reads long pieces of files: first long runs, each
    the eighth part of what a rank will get of the rest, in the end single trajectories. Each run goes to the rank
    with the fewest steps so far. The same lengths are always dealt the same way.

    Args:
        lengths: int64 [n], steps, in the order in which they are stored.

    Returns:
        int64 [n], the rank of each. The ranks differ by the longest trajectory's steps at most.
    """
    ranks = np.empty(len(lengths), dtype=np.int64)
    ends = np.cumsum(lengths)
    total = int(ends[-1]) if len(ends) else 0
    steps = [(0, rank) for rank in range(world_size)]
    begin, done = 0, 0
    while begin < len(lengths):
        aim = done + (total - done) // (_PARTS * world_size)
        end = max(begin + 1, int(np.searchsorted(ends, aim, side="right")))
        held, rank = steps[0]
        ranks[begin:end] = rank
        heapq.heapreplace(steps, (held + int(ends[end - 1]) - done, rank))
        begin, done = end, int(ends[end - 1])
    return ranks


def split_counts(total: int, weights: list[int]) -> list[int]:
    """A count as one for each rank, in proportion to the weights (evenly where all are 0); their sum is the count."""
    weights = weights if any(weights) else [1] * len(weights)
    everything, before, parts = sum(weights), 0, []
    for weight in weights:
        parts.append(total * (before + weight) // everything - total * before // everything)
        before += weight
    return parts
