"""Micro-batches of a step dealt to ranks, so that all ranks have about as much work."""

from __future__ import annotations

import heapq
from collections.abc import Sequence

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array
from gear_loader.utils.arrays import numbers as numbers_of
from gear_loader.utils.checks import at_least


def balance(costs: Sequence[float] | Array | torch.Tensor, ranks: int) -> Array:
    """Deal micro-batches to ranks: each gets as many, and the sums of their costs are about equal.

    Balanced largest differencing (Michiels et al., 2003), the method of Karmarkar and Karp for parts of equal numbers.
    Then the fullest rank exchanges single micro-batches with others, as long as that helps.
    A function of its arguments alone, so all ranks compute the same. Costs are tokens, or tokens squared where
    attention dominates.

    Args:
        costs: numbers [n], finite and not negative; n is a multiple of `ranks`.
        ranks: number of ranks.

    Returns:
        int64 [ranks, n / ranks]: numbers of each rank's micro-batches, ascending.

    Raises:
        SchemaError: invalid arguments.

    Example:
        >>> balance([5, 1, 4, 2, 3, 3], 2).tolist()  # 5 + 1 + 3 and 4 + 2 + 3
        [[0, 1, 5], [2, 3, 4]]
    """
    ranks = at_least("ranks", ranks)
    values = numbers_of(costs, "costs", "iuf", f"numbers [n], n a positive multiple of ranks={ranks}")
    if values.ndim != 1 or len(values) % ranks or not len(values):
        raise SchemaError(
            f"costs has dtype {values.dtype} and shape {list(values.shape)}; expected numbers [n], n a positive "
            f"multiple of ranks={ranks}."
        )
    values = values.astype(np.float64)
    if not (np.isfinite(values) & (values >= 0)).all():
        raise SchemaError("A cost is negative or not finite; expected finite numbers of at least 0.")
    order = np.argsort(-values, kind="stable").reshape(-1, ranks)
    # Spread, number, sums in ascending order, and the micro-batches of each sum. The two with the largest spreads are
    # joined, the largest sum of one with the smallest of the other, until one is left.
    heap = []
    for number, numbers in enumerate(order[:, ::-1]):
        sums = values[numbers]
        heap.append((float(sums[0] - sums[-1]), number, sums, numbers[:, None]))
    heapq.heapify(heap)
    while len(heap) > 1:
        (_, number, one, left), (_, _, other, right) = heapq.heappop(heap), heapq.heappop(heap)
        sums, joined = one + other[::-1], np.concatenate((left, right[::-1]), 1)
        ascending = np.argsort(sums, kind="stable")
        sums = sums[ascending]
        heapq.heappush(heap, (float(sums[0] - sums[-1]), number, sums, joined[ascending]))
    dealt = heap[0][3]
    _exchange(values, dealt)
    dealt = np.sort(dealt, axis=1)
    result: Array = dealt[np.argsort(dealt[:, 0], kind="stable")].astype(np.int64)
    return result


def _exchange(costs: Array, dealt: Array) -> None:
    """Exchange micro-batches of the rank with the largest sum with others, as long as the larger of both sums falls.

    Args:
        costs: float64 [n]. dealt: int64 [ranks, m], changed.
    """
    ranks, each = dealt.shape
    for _ in range(ranks * each):  # every exchange lowers the sum of squares; seldom are more needed
        parts = costs[dealt]
        sums = parts.sum(1)
        fullest = int(sums.argmax())
        moved = parts[fullest][:, None, None] - parts.T[None]  # [m, m, ranks]: what the fullest rank gives
        larger = np.maximum(sums[fullest] - moved, sums + moved)
        larger[:, :, fullest] = np.inf
        mine, other, rank = np.unravel_index(int(larger.argmin()), larger.shape)
        if larger[mine, other, rank] >= sums[fullest]:
            return
        dealt[fullest, mine], dealt[rank, other] = dealt[rank, other], dealt[fullest, mine]
