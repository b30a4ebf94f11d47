"""The sum tree on the CPU: compiled, with binary levels within the wide levels of the GPU's tree."""

from __future__ import annotations

import numpy as np
import torch

from gear_loader.errors import PriorityError
from gear_loader.kernels.sum_tree import FANOUT, best, wide_levels
from gear_loader.native import sum_tree
from gear_loader.utils.arrays import Array


class PriorityTree:
    """Sum tree that draws items in proportion to their leaves in O(batch x log capacity).

    Draws and sums equal those of `gear_loader.kernels.priority` to the last bit. Not thread-safe.

    Args:
        capacity: number of items, 1 to 2**31 - 1.
        extremes: maintain the nodes of `minimum` and `top`, which makes updates slower.

    Attributes:
        leaves: float32 [at least `capacity`]; call `build` after writing into it.
    """

    def __init__(self, capacity: int, *, extremes: bool = True) -> None:
        self.capacity = capacity
        self.extremes = extremes
        self._scratch: tuple[Array, ...] | None = None
        self._blocks = -(-capacity // FANOUT)
        self.leaves: Array = np.zeros(self._blocks * FANOUT, dtype=np.float32)
        offsets, count, place = [], self._blocks, 0
        while True:
            offsets.append(place)
            place += count + count % 2
            if count == 1:
                break
            count = -(-count // 2)
        self._offsets = np.array(offsets, dtype=np.int64)
        self._sums = np.zeros(place)
        wide, place = wide_levels(capacity)
        self._wide_offsets = np.array([offset for offset, _ in wide], dtype=np.int64)
        self.depth = len(wide)
        """Levels of the wide tree."""
        place = place if extremes else 0
        self._mins = np.full(place, np.inf, dtype=np.float32)
        self._maxs = np.zeros(place, dtype=np.float32)
        self._nodes = (self._sums, self._mins, self._maxs, self._offsets, self._wide_offsets, self._blocks)

    @property
    def total(self) -> float:
        """Sum of all leaves."""
        return float(self._sums[self._offsets[-1]])

    @property
    def minimum(self) -> float:
        """The smallest positive leaf; infinite if all are 0. Needs `extremes`."""
        assert self.extremes
        return float(self._mins[self._wide_offsets[-1] :].min())

    def update(self, items: Array, leaves: Array) -> None:
        """Set leaves; of duplicate items the last one counts.

        Args:
            items: int64 [n], 0 to capacity - 1. leaves: float32 [n], finite, not negative. Both are not checked.
        """
        if len(items):
            sum_tree.update(self.leaves, *self._nodes, items, leaves)

    def fill(self, ranges: Array, inside: Array, width: int, leaves: Array) -> None:
        """Set all leaves of ranges of `width` items; see `gear_loader.native.sum_tree.fill`."""
        if len(ranges):
            sum_tree.fill(self.leaves, *self._nodes, width, ranges, inside, leaves)

    def build(self) -> None:
        """Compute all nodes from the leaves."""
        sum_tree.build(self.leaves, *self._nodes)

    def draw(self, count: int, *, key: int, step: int, distinct: bool = False) -> tuple[Array, Array]:
        """Draw items in proportion to their leaves.

        Args:
            key, step: int64, key and counter of the random numbers.
            distinct: without replacement: one after another, each in proportion to the remaining leaves.

        Returns:
            int64 [count] items, float32 [count] their leaves.

        Raises:
            PriorityError: no leaf is positive, or fewer than `count` with `distinct`.
        """
        items, leaves, found = self._drawn(count, key, step, distinct)
        if found < count:
            raise PriorityError(
                f"{count} items were to be drawn, but only {found} have a positive priority. Draw fewer, draw with "
                "replacement, or set priorities (Prioritized(eps=...) keeps them all positive)."
                if found
                else "Every priority is zero: there is nothing to draw. Set some with update_priority, add "
                "trajectories with a positive priority, or use Prioritized(eps=...), which keeps them all positive."
            )
        return items, leaves

    def draw_rows(
        self, names: Array, leaves: Array, *, key: int, step: int, rows: tuple[object, ...]
    ) -> bool:
        """Draw rows in one compiled call, with replacement; see `gear_loader.native.sum_tree.draw_rows`.

        Args:
            names: int64 [4, n], filled with slots, steps, generations, sequence numbers. leaves: float32 [n], filled.
            rows: arguments of that function from `block_steps` to `anchor_key`.

        Returns:
            Whether any leaf is positive.
        """
        scratch = self._scratch_for(names.shape[1])
        depth = self.depth
        drawn: bool = sum_tree.draw_rows(
            self.leaves, self._sums, self._offsets, depth, key, step, *scratch, *rows, names, leaves
        )
        return drawn

    def arrays_for(self, count: int) -> tuple[Array, ...]:
        """Leaves, sums, their offsets, and work space for compiled draws of `count` items."""
        return self.leaves, self._sums, self._offsets, *self._scratch_for(count)

    def draw_some(self, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        """`draw` with `distinct`, of at most `count` items, in the order of drawing; raises no error if fewer."""
        items, leaves, found = self._drawn(count, key, step, distinct=True)
        return items[:found], leaves[:found]

    def _drawn(self, count: int, key: int, step: int, distinct: bool) -> tuple[Array, Array, int]:
        items, leaves = np.empty(count, dtype=np.int64), np.empty(count, dtype=np.float32)
        rest = (self.depth, key, step, items, leaves, *self._scratch_for(count))
        if distinct:
            found = sum_tree.draw_distinct(self.leaves, *self._nodes, *rest)
        else:
            drawn = sum_tree.draw(self.leaves, self._sums, self._offsets, *rest)
            found = count if drawn else 0
        return items, leaves, int(found)

    def _scratch_for(self, count: int) -> tuple[Array, ...]:
        # Kept, because allocating it costs as much as the draw.
        if self._scratch is None or len(self._scratch[2]) < count:
            self._scratch = (
                np.empty((self.depth + 2, count)),
                np.empty((4, 64), dtype=np.uint64),
                np.empty(count, dtype=np.uint64),
                np.empty(count),
                np.empty(2048),
            )
        return self._scratch

    def top(self, count: int, *, largest: bool = True) -> tuple[Array, Array]:
        """The items with the largest (or smallest positive) leaves, best first. Needs `extremes`.

        See `SumTree.top`.
        """
        assert self.extremes
        extremes = self._maxs if largest else self._mins
        ends = [*self._wide_offsets[1:].tolist(), len(extremes)]
        parts = [extremes[a:b] for a, b in zip(self._wide_offsets.tolist(), ends, strict=True)]
        levels = [torch.from_numpy(part) for part in (self.leaves, *parts)]
        items, leaves = best(levels, count, largest=largest)
        return items.numpy(), leaves.numpy()


def uniforms(count: int, *, key: int, step: int) -> Array:
    """float64 [count] in [0, 1) with 53 random bits, equal to those of the kernels."""
    us: Array = np.empty((2, count))
    sum_tree.uniforms(key, step, us, np.empty((4, 64), dtype=np.uint64))
    drawn: Array = us[0]
    return drawn
