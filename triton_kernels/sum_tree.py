"""A wide sum tree over priorities: its layout, and the queries that need no kernel.

    leaves            float32 [capacity, padded to 32]        weights of the items in a draw; 0 is never drawn
    level 1           one node for each 32 leaves             sums float64, mins and maxs float32
    level 2           one node for each 32 nodes of level 1
    ...               until at most 32 nodes are left: the roots

All levels of a kind lie in one tensor, each padded to a multiple of 32 with empty nodes (sum 0, minimum infinite,
maximum 0). The minimum is over the leaves that are not 0.

**Order of summation.** It is fixed, so that every implementation on every device gives the same sums, and therefore
the same draws, to the last bit: a node of level 1 adds leaf i to leaf i + 16 of its 32, then i to i + 8 of those sums,
and so on; a node of a higher level adds neighbours, then neighbours of those sums, and so on. A draw descends through
the same partial sums. Nodes are recomputed from their children, never incremented, so errors do not accumulate.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from gear_loader.kernels.special_priorities import GONE, UNSET

__all__ = [
    "BAD_POSITION",
    "DISTINCT_MISSING",
    "EMPTY_DRAWS",
    "FANOUT",
    "GONE",
    "LOWEST_LEAF",
    "NOWHERE",
    "STALE",
    "UNSET",
    "SumTree",
    "best",
    "leaf_sums",
    "node_sums",
    "wide_levels",
]

FANOUT = 32
LOWEST_LEAF = 2.0**-126
"""The smallest normal float32; smaller positive leaves are raised to it, so that they can still be drawn."""

# Positions in `status`, which kernels write asynchronously.
BAD_POSITION = 0  # first invalid position of a refused update; NOWHERE if no update was refused
EMPTY_DRAWS = 1  # draws from a tree without a positive leaf
DISTINCT_MISSING = 2  # rows of draws without replacement that found no item left
STALE = 3  # skipped update rows of removed trajectories
NOWHERE = (1 << 63) - 1


class SumTree:
    """The tensors of a tree of `capacity` items whose leaves are 0.

    Args:
        capacity: number of items, 1 to 2**31 - 1.
        device: device of the tensors.

    Attributes:
        leaves: float32 [capacity rounded up to a multiple of 32].
        sums, mins, maxs: float64, float32, float32: the nodes of all levels.
        levels: int64 [depth, 2] on the device: offset in these tensors and number of nodes of each level.
        shape: `levels` as a list of tuples on the host.
        maximum: float32 [1], running maximum of the priorities, the initial priority of new items.
        status: int64 [4], see the constants.

    Raises:
        ValueError: invalid capacity.
    """

    def __init__(self, capacity: int, device: torch.device | str = "cpu") -> None:
        if not 1 <= capacity < 2**31:
            raise ValueError(f"capacity is {capacity}; expected 1 to {2**31 - 1}.")
        self.capacity = capacity
        self.device = torch.device(device)
        self.shape, offset = wide_levels(capacity)
        padded = self.shape[0][1] * FANOUT
        self.leaves = torch.zeros(padded, dtype=torch.float32, device=self.device)
        self.sums = torch.zeros(offset, dtype=torch.float64, device=self.device)
        self.mins = torch.full((offset,), torch.inf, dtype=torch.float32, device=self.device)
        self.maxs = torch.zeros(offset, dtype=torch.float32, device=self.device)
        self.levels = torch.tensor(self.shape, dtype=torch.int64, device="cpu").to(self.device)
        self.maximum = torch.ones(1, dtype=torch.float32, device=self.device)
        self.status = torch.tensor([NOWHERE, 0, 0, 0], dtype=torch.int64, device="cpu").to(self.device)

    @property
    def depth(self) -> int:
        """Number of levels above the leaves."""
        return len(self.shape)

    @property
    def node_bytes(self) -> int:
        """Bytes of the nodes above the leaves."""
        return sum(part.nbytes for part in (self.sums, self.mins, self.maxs, self.levels))

    def level(self, level: int, nodes: torch.Tensor) -> torch.Tensor:
        """The nodes of a level (1 to `depth`) in `nodes` (sums, mins or maxs), padded to a multiple of 32."""
        offset, count = self.shape[level - 1]
        return nodes[offset : offset + -(-count // FANOUT) * FANOUT]

    def total(self) -> torch.Tensor:
        """Sum of all leaves in the tree's order of summation, float64 [] on the device."""
        return node_sums(self.level(self.depth, self.sums).view(1, FANOUT))[0]

    def minimum(self) -> torch.Tensor:
        """The smallest positive leaf, float32 [] on the device; infinite if all are 0."""
        return self.level(self.depth, self.mins).min()

    def top(self, count: int, *, largest: bool = True) -> tuple[torch.Tensor, torch.Tensor]:
        """The `count` items with the largest (or smallest) positive leaves; ties go to the lower item.

        Searches from the roots down; each level expands only its best `count` nodes, which contain the best items, in
        O(count * 32 * depth). Does not wait for a GPU.

        Args:
            count: 1 to the capacity.
            largest: False for the smallest.

        Returns:
            int64 [count] items and float32 [count] leaves, best first, filled up with -1 and 0.
        """
        extremes = self.maxs if largest else self.mins
        levels = [self.leaves, *(self.level(level + 1, extremes) for level in range(self.depth))]
        return best(levels, count, largest=largest)


def wide_levels(capacity: int) -> tuple[list[tuple[int, int]], int]:
    """Offset and number of nodes of each level above the leaves, and the padded length of all levels."""
    shape: list[tuple[int, int]] = []
    count, offset = capacity, 0
    while not shape or count > FANOUT:
        count = -(-count // FANOUT)
        shape.append((offset, count))
        offset += -(-count // FANOUT) * FANOUT
    return shape, offset


def best(levels: Sequence[torch.Tensor], count: int, *, largest: bool) -> tuple[torch.Tensor, torch.Tensor]:
    """`SumTree.top` on a list of the leaves and each level's minima or maxima, the roots last."""
    device = levels[0].device
    children = torch.arange(FANOUT, device=device)
    nodes = children
    for level in range(len(levels) - 1, -1, -1):
        known = levels[level]
        values = known[nodes.clamp(max=len(known) - 1)]
        exists = (nodes < len(known)) & (values > 0) & torch.isfinite(values)
        # Unique keys: the value's bits, which sort like the value, then the lower number first.
        bits = values.view(torch.int32).to(torch.int64)
        rank = torch.where(exists, bits if largest else 0x7FFFFFFF - bits, -1)
        order = torch.topk((rank << 32) - nodes, min(count, len(nodes))).indices
        nodes, values, exists = nodes[order], values[order], exists[order]
        if level:
            nodes = (nodes[:, None] * FANOUT + children).view(-1)
    items = torch.full((count,), -1, dtype=torch.int64, device=device)
    leaves = torch.zeros(count, dtype=torch.float32, device=device)
    items[: len(nodes)] = torch.where(exists, nodes, -1)
    leaves[: len(nodes)] = torch.where(exists, values, 0)
    return items, leaves


def node_sums(children: torch.Tensor) -> torch.Tensor:
    """Sums of nodes above level 1 from their children, float64 [n, 32] -> [n]: neighbours first."""
    while children.shape[1] > 1:
        children = children.view(len(children), children.shape[1] // 2, 2)
        children = children[:, :, 0] + children[:, :, 1]
    return children[:, 0]


def leaf_sums(leaves: torch.Tensor) -> torch.Tensor:
    """Sums of nodes of level 1 from their leaves, float64 [n, 32] -> [n]: i and i + 16 first."""
    while leaves.shape[1] > 1:
        half = leaves.shape[1] // 2
        leaves = leaves[:, :half] + leaves[:, half:]
    return leaves[:, 0]
