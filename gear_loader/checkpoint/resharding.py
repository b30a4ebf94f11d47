"""Assignment of trajectories to ranks when a checkpoint is loaded with another number of ranks."""

from __future__ import annotations

import heapq

import numpy as np

from gear_loader.utils.arrays import Array

__all__ = ["assign_ranks", "split_counts"]

_PARTS = 8


def assign_ranks(lengths: Array, world_size: int) -> Array:
    """Assign trajectories to ranks with about the same number of steps each; deterministic.

    Consecutive trajectories are assigned in groups, so that a rank reads long pieces of files. A group has one eighth
    of a rank's share of the remaining steps, so groups shrink to single trajectories at the end. Each group goes to the
    rank with the fewest steps so far.

    Args:
        lengths: int64 [n], steps of each trajectory, in storage order.
        world_size: number of ranks.

    Returns:
        int64 [n], rank of each trajectory. The steps of two ranks differ by at most the longest trajectory.
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
    """Split a count over ranks in proportion to their weights (evenly if all are 0); the parts add up to the count."""
    weights = weights if any(weights) else [1] * len(weights)
    everything, before, parts = sum(weights), 0, []
    for weight in weights:
        parts.append(total * (before + weight) // everything - total * before // everything)
        before += weight
    return parts
