"""What the tests of the sum tree share: priorities, trees made from them, comparison to the last bit, extremes."""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import torch

from gear_loader.kernels import priority_reference as reference
from gear_loader.kernels.sum_tree import FANOUT, NOWHERE, SumTree
from gear_loader.native import sum_tree
from gear_loader.selection.tree import PriorityTree

Array = np.ndarray[Any, Any]

LARGEST_UNIFORM = 1 - 2.0**-53
POISON = -7
"""In fresh outputs: neither an item nor a priority."""

# Counter of four words, key of two, and what Philox-4x32-10 makes of them: the known answers that come with
# Random123 (Salmon et al., 2011).
PHILOX = (
    ((0, 0, 0, 0), (0, 0), (0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8)),
    ((0xFFFFFFFF,) * 4, (0xFFFFFFFF,) * 2, (0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD)),
    (
        (0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344),
        (0xA4093822, 0x299F31D0),
        (0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1),
    ),
)


def signed(low: int, high: int) -> int:
    """Two words of 32 bits as an int64."""
    word = high << 32 | low
    return word - (1 << 64) if word >> 63 else word


def two_words(high: int, low: int) -> float:
    """The uniform that two words of 32 bits become."""
    return ((high >> 5) * 2**26 + (low >> 6)) / 2**53


def priorities(count: int, seed: int = 0, *, orders: float = 12, zeros: float = 0.2) -> Array:
    """float32 [count] over so many orders of magnitude; some are 0."""
    random = np.random.default_rng(seed)
    values = 10.0 ** random.uniform(-orders / 2, orders / 2, count)
    return np.where(random.random(count) < zeros, 0, values).astype(np.float32)


def tree_of(leaves: Array) -> SumTree:
    """The twin of a tree with these leaves."""
    tree = SumTree(len(leaves))
    tree.leaves[: len(leaves)] = torch.from_numpy(leaves)
    reference.build(tree)
    return tree


def copy_of(tree: SumTree) -> SumTree:
    other = SumTree(tree.capacity)
    for name in ("leaves", "sums", "mins", "maxs", "maximum", "status"):
        getattr(other, name).copy_(getattr(tree, name))
    return other


def host_of(leaves: Array) -> PriorityTree:
    """A tree on the host with these leaves."""
    tree = PriorityTree(len(leaves))
    tree.leaves[: len(leaves)] = leaves
    tree.build()
    return tree


def bits(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.view(torch.int32 if tensor.element_size() == 4 else torch.int64)


def same_bits(found: torch.Tensor, expected: torch.Tensor, what: str = "tensor") -> None:
    assert found.dtype == expected.dtype, what
    assert found.shape == expected.shape, what
    differ = (bits(found) != bits(expected)).nonzero()[:, 0]
    assert not len(differ), (
        f"{what}: {len(differ)} differ, the first at {differ[0]}: {found[differ[0]]} for {expected[differ[0]]}"
    )


def same_tree(found: SumTree, expected: SumTree) -> None:
    """Leaves, nodes, padding, running maximum and status are the same, to the bit."""
    assert found.shape == expected.shape
    for name in ("leaves", "sums", "mins", "maxs", "maximum", "status"):
        same_bits(getattr(found, name), getattr(expected, name), name)


def check_consistent(tree: SumTree) -> None:
    """The nodes are those that follow from the leaves, and nothing was refused or counted as missing."""
    built = tree_of(tree.leaves.numpy()[: tree.capacity].copy())
    for name in ("leaves", "sums", "mins", "maxs"):
        same_bits(getattr(tree, name), getattr(built, name), name)
    assert tree.status.tolist() == [NOWHERE, 0, 0, 0]


def outputs(count: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Items and values to be drawn into: what is not written is seen."""
    return torch.full((count,), POISON), torch.full((count,), float(POISON))


def counters(key: int, step: int) -> torch.Tensor:
    return torch.tensor([key, step], dtype=torch.int64)


def descend(tree: PriorityTree, us: Array) -> Array:
    """Items that the compiled loop chooses for the uniforms us[level], float64 [depth + 1, n]."""
    count = us.shape[1]
    nodes = np.full(count, 1 << 40, dtype=np.uint64)
    sum_tree._descend(
        tree.leaves, tree._sums, tree._offsets, us, nodes, np.empty(count), np.full(2048, np.nan)
    )
    return nodes.astype(np.int64)


def descend_host(tree: SumTree, us: Array) -> Array:
    """The same of a host's tree of the same leaves."""
    return descend(host_of(tree.leaves.numpy()[: tree.capacity].copy()), us)


def descend_twin(tree: SumTree, us: Array) -> Array:
    """The same of the twin."""
    uniforms = torch.from_numpy(us)
    nodes = torch.zeros(us.shape[1], dtype=torch.int64)
    for level in range(tree.depth, -1, -1):
        values = tree.level(level, tree.sums) if level else tree.leaves.double()
        children = values.view(-1, FANOUT)[nodes]
        nodes = nodes * FANOUT + reference._choose(children, uniforms[level], leaves=level == 0)
    return nodes.numpy()


def shares(children: Array, *, leaves: bool) -> Array:
    """The middle of the part of [0, 1) that leads to each child, a multiple of 2**-53: float64 [n, 32] -> [n, 32]."""
    parts = [children]
    while parts[-1].shape[1] > 1:
        last, half = parts[-1], parts[-1].shape[1] // 2
        parts.append(last[:, :half] + last[:, half:] if leaves else last[:, ::2] + last[:, 1::2])
    # What lies before a child: the left sums that a draw passes on its way.
    total, before = parts.pop(), np.zeros((len(children), 1))
    while parts:
        part = parts.pop()
        if leaves:
            left = part[:, : part.shape[1] // 2]
            before = np.concatenate([before, before + left], 1)
        else:
            left = part[:, ::2]
            before = np.stack([before, before + left], 2).reshape(len(children), -1)
    with np.errstate(invalid="ignore"):
        middle = (before + children / 2) / total
    return np.floor(middle * 2.0**53) * 2.0**-53


def levels_of(leaves: Array) -> list[Array]:
    """Leaves and the sums of each level of the wide tree, float64, each padded to a multiple of 32."""
    tree = tree_of(leaves)
    return [tree.leaves.double().numpy(), *(tree.level(i + 1, tree.sums).numpy() for i in range(tree.depth))]


def uniforms_to(levels: list[Array], items: Array) -> Array:
    """Uniforms that draw each of the items: float64 [depth + 1, n]."""
    us = np.empty((len(levels), len(items)))
    for level, values in enumerate(levels):
        ways = shares(values.reshape(-1, FANOUT), leaves=level == 0).reshape(-1)
        us[level] = ways[items >> (5 * level)]
    return us


def extreme_uniforms(levels: int) -> Array:
    """All combinations of 0, the largest uniform and the middle, one a level: float64 [levels, n]."""
    return np.array(list(itertools.product((0.0, LARGEST_UNIFORM, 0.5), repeat=levels))).T.copy()


def rounding_traps() -> dict[str, Array]:
    """Leaves whose sums round so that the largest uniforms run into zeros beside them, unless that is prevented."""
    # 1.5 + 1.5 ulp is rounded up to 1.5 + 2 ulp; a rest of 1.5 + 1 ulp less the 1.5 ulp is rounded up to 1.5,
    # all of the right part, whose own right part holds nothing.
    tiny = 1.5 * 2.0**-52
    across_leaves = np.zeros(32, dtype=np.float32)
    across_leaves[0], across_leaves[1] = tiny, 1.5
    across_nodes = np.zeros(32 * 32, dtype=np.float32)
    across_nodes[0], across_nodes[2 * 32] = tiny, 1.5
    across_roots = np.zeros(32 * 32 * 3, dtype=np.float32)  # beside the third root there is not even a node
    across_roots[0], across_roots[2 * 32 * 32] = tiny, 1.5
    return {"leaves": across_leaves, "nodes": across_nodes, "roots": across_roots}
