"""Rows of ``layout="tree"``: steps that several rows begin with are a segment of their own, once in a batch."""

from __future__ import annotations

import dataclasses
from typing import NamedTuple

import numpy as np

from gear_loader.storage.prefixes import leaders_of, prefixes_of
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

TREE_KEYS = ("parent", "prefix_steps", "group")
"""Keys of such batches by row."""


@dataclasses.dataclass(slots=True)
class TreeRows(SelectedRows):
    """The n rows of a batch without the steps that they share, then the shared segments, as rows.

    Attributes:
        parents, prefix_steps, groups: int64 [n and segments], what `TREE_KEYS` are.
        leaders: int64 [G], a row of each group, which has its values.
    """

    parents: Array | None = None
    prefix_steps: Array | None = None
    groups: Array | None = None
    leaders: Array | None = None

    @property
    def names(self) -> tuple[Array, ...]:  # type: ignore[override]
        """What identifies the rows, and what they begin with."""
        assert self.parents is not None
        assert self.prefix_steps is not None
        assert self.groups is not None
        return self.slots, self.anchors, self.generations, self.parents, self.prefix_steps, self.groups


class Origins(NamedTuple):
    """What trajectories have in common with others, int64 [n] each.

    Attributes:
        own: their sequence numbers. roots, steps: those of the trajectories that they begin as, -1 for none, and how
            many steps. slots, generations: of the trajectories that their values per group were stored with.
    """

    own: Array
    roots: Array
    steps: Array
    slots: Array
    generations: Array


def origins_of(table: Table, slots: Array) -> Origins:
    """Those of trajectories of a table, under a read ticket."""
    arrays = table._engine.index.arrays
    leaders = leaders_of(arrays, slots) if len(arrays.prefix) else (slots, arrays.generation[slots])
    return Origins(arrays.sequence[slots], *prefixes_of(arrays, slots), *leaders)


class Tree(NamedTuple):
    """The segments of a batch: its rows without the steps that they share, then these.

    Attributes:
        which: int64 [m], the row that each is a part of, of a shared one a row that has it.
        spans: int64 [2, m], first step and number of steps. parents, prefix_steps, groups: what `TREE_KEYS` are.
        leaders: int64 [G], a row of each group, which has its values.
    """

    which: Array
    spans: Array
    parents: Array
    prefix_steps: Array
    groups: Array
    leaders: Array


def tree_rows(table: Table, rows: SelectedRows) -> TreeRows:
    """Split rows, which are measured, under their read ticket."""
    assert rows.spans is not None
    tree = tree_of(rows.spans, origins_of(table, rows.slots))

    def taken(part: Array | None) -> Array | None:
        return None if part is None else part.take(tree.which, -1)

    names = rows.slots[tree.which], rows.anchors[tree.which], rows.generations[tree.which]
    return TreeRows(*names, taken(rows.weights), taken(rows.counts), taken(rows.numbers), *tree[1:])


def tree_of(spans: Array, origins: Origins) -> Tree:
    """Split rows.

    Args:
        spans: int64 [2, n], first step and number of steps of each row. origins: of their trajectories.
    """
    (first, count), (own, roots, steps, *leading) = spans, origins
    # A trajectory that others begin with has their first steps: as many as the one with the most.
    known, place = np.unique(roots, return_inverse=True)
    longest = np.zeros(len(known), dtype=np.int64)
    np.maximum.at(longest, place, steps)
    at = np.minimum(np.searchsorted(known, own), len(known) - 1)
    is_root = (roots < 0) & (known[at] == own)
    roots, steps = np.where(is_root, own, roots), np.where(is_root, longest[at], steps)
    cut = np.clip(np.minimum(steps, first + count) - first, 0, count)
    keys = np.stack((roots, steps, first, cut))
    _, begins, place, times = np.unique(
        keys, axis=1, return_index=True, return_inverse=True, return_counts=True
    )
    place = place.reshape(-1)
    shared = (times > 1) & (cut[begins] > 0)
    number = np.where(shared, len(own) + np.cumsum(shared) - 1, -1)
    parents, begins = number[place], begins[shared]
    lengths = np.where(parents >= 0, cut, 0)
    which = np.concatenate((np.arange(len(own)), begins))
    ends: Array = spans[:, which]
    ends[0, : len(own)] += lengths
    ends[1, : len(own)] -= lengths
    ends[1, len(own) :] = lengths[begins]
    groups, leaders = _groups(np.stack(leading))
    return Tree(which, ends, parents[which], lengths[which], groups[which], leaders)


def _groups(leading: Array) -> tuple[Array, Array]:
    """Numbers of the groups that have values per group in common, in the order of their first rows, and these rows.

    Args:
        leading: int64 [2, n], slots and generations of the trajectories that these were stored with.
    """
    _, firsts, place = np.unique(leading, axis=1, return_index=True, return_inverse=True)
    order = np.argsort(firsts)
    number = np.empty_like(order)
    number[order] = np.arange(len(order))
    return number[place.reshape(-1)], firsts[order]
