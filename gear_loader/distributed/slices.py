"""The slices of a batch: which rank trains on which rows."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.utils.arrays import Array


@dataclasses.dataclass(frozen=True)
class Slices:
    """Which rows of a batch belong to which slice. Slices differ by one row at most.

    Attributes:
        rows: int64 [m], numbers of rows, those of one slice after another, ascending within each.
        starts, sizes: int64 [W], where the rows of each slice begin in `rows`, and their number.
        number: int64 [m], the slice of each entry of `rows`.
    """

    rows: Array
    starts: Array
    sizes: Array
    number: Array

    def of(self, number: int) -> Array:
        """The rows of one slice, int64 [n], ascending."""
        start = self.starts[number]
        found: Array = self.rows[start : start + self.sizes[number]]
        return found


def _sizes(count: int, slices: int) -> Array:
    sizes = np.full(slices, count // slices, dtype=np.int64)
    sizes[: count % slices] += 1
    return sizes


def contiguous(count: int, slices: int) -> Slices:
    """Slices of rows that follow one another. If there are fewer rows than slices, some rows belong to several."""
    numbers = np.arange(slices)
    if 0 < count < slices:
        return Slices(numbers % count, numbers, np.ones_like(numbers), numbers)
    sizes = _sizes(count, slices)
    return Slices(np.arange(count), np.cumsum(sizes) - sizes, sizes, np.repeat(numbers, sizes))


def whole(count: int, slices: int) -> Slices:
    """Each slice has all rows; `number` has no meaning."""
    sizes = np.full(slices, count, dtype=np.int64)
    return Slices(np.arange(count), np.zeros_like(sizes), sizes, np.zeros(0, dtype=np.int64))


def by_node(nodes: Array, slice_nodes: Array) -> Slices:
    """Slices with as many rows of their own node as their sizes permit; the others get what is left, in order.

    Args:
        nodes: int64 [n], number of the node on which each row lies. slice_nodes: int64 [W], of each slice, from 0.
    """
    count, slices = len(nodes), len(slice_nodes)
    if count < slices:
        return contiguous(count, slices)
    sizes, last = _sizes(count, slices), 1 + int(max(slice_nodes.max(), nodes.max(initial=0)))
    room = np.bincount(slice_nodes, weights=sizes, minlength=last).astype(np.int64)
    there = np.bincount(nodes, minlength=last)
    order = _sorted_by(nodes)
    left = np.arange(count) - (np.cumsum(there) - there)[nodes[order]] >= room[nodes[order]]
    taken: Array = nodes.copy()
    taken[np.sort(order[left])] = np.repeat(np.arange(last), room - np.minimum(room, there))
    numbers = _sorted_by(slice_nodes)  # slices of one node after another
    starts = np.empty_like(sizes)
    starts[numbers] = np.cumsum(sizes[numbers]) - sizes[numbers]
    return Slices(_sorted_by(taken), starts, sizes, np.repeat(numbers, sizes[numbers]))


def _sorted_by(nodes: Array) -> Array:
    """Places in the order of the nodes; numpy sorts integers of 16 bits in linear time."""
    order: Array = np.argsort(nodes.astype(np.uint16) if nodes.max() < 1 << 16 else nodes, kind="stable")
    return order
