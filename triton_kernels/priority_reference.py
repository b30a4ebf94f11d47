"""Plain-torch twins of `gear_loader.kernels.priority` with the same signatures and results, to the last bit.

The oracle of the tests. On a GPU they wait for it.
"""

from __future__ import annotations

import torch

from gear_loader.kernels.sum_tree import (
    BAD_POSITION,
    DISTINCT_MISSING,
    EMPTY_DRAWS,
    FANOUT,
    GONE,
    LOWEST_LEAF,
    NOWHERE,
    UNSET,
    SumTree,
    leaf_sums,
    node_sums,
)

__all__ = ["build", "draw", "draw_distinct", "update", "weigh"]

_MASK = 0xFFFFFFFF


def weigh(values: torch.Tensor, alpha: float, eps: float) -> torch.Tensor:
    """Leaves of priorities (float32 [n]): ``(value + eps) ** alpha``, float64 [n]; 0 only for 0."""
    wide = values.double() + eps
    if alpha != 1.0:
        wide = torch.where(wide > 0, wide**alpha, 0.0)
    return torch.where(wide > 0, wide.clamp(min=LOWEST_LEAF), wide)


def update(
    tree: SumTree,
    items: torch.Tensor,
    values: torch.Tensor,
    *,
    alpha: float = 1.0,
    eps: float = 0.0,
    unset: bool = False,
    floor: float = 0.0,
) -> None:
    """See `gear_loader.kernels.priority.update`."""
    if len(items) == 0:
        return
    # Rounded to float32, as a kernel receives them.
    alpha, eps, floor = torch.tensor([alpha, eps, floor], dtype=torch.float32, device="cpu").tolist()
    maximum = max(float(tree.maximum), floor)
    gone = (values == GONE) & unset
    given = ~gone & ~((values == UNSET) & unset)
    values = torch.where(given, values, torch.where(gone, 0, maximum))
    leaves = weigh(values, alpha, eps).masked_fill(gone, 0)
    inside = items >= 0
    if unset:
        leaves = leaves.clamp(max=torch.finfo(torch.float32).max)
    largest = torch.finfo(torch.float32).max
    bad = inside & (not unset) & ~((values >= 0) & (values <= largest) & (leaves <= largest))
    if bad.any():
        tree.status[BAD_POSITION] = min(int(tree.status[BAD_POSITION]), int(bad.nonzero()[0]))
    if tree.status[BAD_POSITION] != NOWHERE and not unset:
        return
    high = torch.where(inside & given, values, 0).max() if len(values) else 0
    tree.maximum.fill_(max(maximum, float(high)))
    items, leaves = items[inside], leaves[inside].float()
    # The last row of equal items.
    unique, place = items.unique(return_inverse=True)
    last = torch.zeros_like(unique).scatter_reduce_(
        0, place, torch.arange(len(items), device=items.device), "amax"
    )
    tree.leaves[unique] = leaves[last]
    _refresh(tree, unique)


def _refresh(tree: SumTree, items: torch.Tensor) -> None:
    nodes = items
    for level, (offset, _) in enumerate(tree.shape):
        nodes = (nodes // FANOUT).unique()
        if level == 0:
            children = tree.leaves.view(-1, FANOUT)[nodes]
            sums = leaf_sums(children.double())
            lows = torch.where(children > 0, children, torch.inf).amin(1)
            highs = children.amax(1)
        else:
            below = [
                tree.level(level, part).view(-1, FANOUT)[nodes] for part in (tree.sums, tree.mins, tree.maxs)
            ]
            sums, lows, highs = node_sums(below[0]), below[1].amin(1), below[2].amax(1)
        for part, new in ((tree.sums, sums), (tree.mins, lows), (tree.maxs, highs)):
            part[offset + nodes] = new


def build(tree: SumTree) -> None:
    """See `gear_loader.kernels.priority.build`."""
    _refresh(tree, torch.arange(0, tree.capacity, FANOUT, device=tree.device))


def uniforms(random: torch.Tensor, rows: torch.Tensor, level: int) -> torch.Tensor:
    """53-bit uniforms in [0, 1) of rows (int64 [n]) at a level, float64 [n]: Philox-4x32-10."""
    key, step = (int(word) & ((1 << 64) - 1) for word in random.tolist()[:2])
    k0, k1 = key & _MASK, key >> 32
    c0, c1 = rows & _MASK, torch.full_like(rows, level // 2)
    c2, c3 = torch.full_like(rows, step & _MASK), torch.full_like(rows, step >> 32)
    for _ in range(10):
        (high_a, low_a), (high_b, low_b) = _multiply(0xD2511F53, c0), _multiply(0xCD9E8D57, c2)
        c0, c1, c2, c3 = high_b ^ c1 ^ k0, low_b, high_a ^ c3 ^ k1, low_a
        k0, k1 = (k0 + 0x9E3779B9) & _MASK, (k1 + 0xBB67AE85) & _MASK
    high, low = (c0, c1) if level % 2 == 0 else (c2, c3)
    return ((high >> 5).double() * 2.0**26 + (low >> 6).double()) * 2.0**-53


def _multiply(a: int, b: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    # High and low 32 bits of a product that overflows int64.
    low, high = a * (b & 0xFFFF), a * (b >> 16)
    middle = (low >> 16) + high
    return middle >> 16, ((middle & 0xFFFF) << 16) | (low & 0xFFFF)


def draw(tree: SumTree, random: torch.Tensor, items: torch.Tensor, values: torch.Tensor) -> None:
    """See `gear_loader.kernels.priority.draw`."""
    if len(items) == 0:
        return
    if not tree.total() > 0:
        items.fill_(-1)
        values.fill_(0)
        tree.status[EMPTY_DRAWS] += 1
        return
    items.copy_(_draw(tree, random, torch.arange(len(items), device=items.device)))
    values.copy_(tree.leaves[items])


def _draw(tree: SumTree, random: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
    nodes = torch.zeros_like(rows)
    for level in range(tree.depth, 0, -1):
        children = tree.level(level, tree.sums).view(-1, FANOUT)[nodes]
        nodes = nodes * FANOUT + _choose(children, uniforms(random, rows, level), leaves=False)
    children = tree.leaves.view(-1, FANOUT)[nodes].double()
    items: torch.Tensor = nodes * FANOUT + _choose(children, uniforms(random, rows, 0), leaves=True)
    return items


def _choose(children: torch.Tensor, uniform: torch.Tensor, *, leaves: bool) -> torch.Tensor:
    parts = [children]  # [n, 32], [n, 16], ..., [n, 1]
    while parts[-1].shape[1] > 1:
        last, half = parts[-1], parts[-1].shape[1] // 2
        pairs = (last[:, :half], last[:, half:]) if leaves else (last[:, ::2], last[:, 1::2])
        parts.append(pairs[0] + pairs[1])
    rest = uniform * parts.pop()[:, 0]
    place = torch.zeros_like(uniform, dtype=torch.int64)
    while parts:
        part = parts.pop()
        left_place = place if leaves else place * 2
        right_place = left_place + (part.shape[1] // 2 if leaves else 1)
        left = part.gather(1, left_place[:, None])[:, 0]
        # Rounding may leave a remainder equal to the right part, even if that is 0.
        right = (rest >= left) & (part.gather(1, right_place[:, None])[:, 0] > 0)
        rest = torch.where(right, rest - left, rest)
        place = torch.where(right, right_place, left_place)
    return place


def draw_distinct(
    tree: SumTree,
    random: torch.Tensor,
    items: torch.Tensor,
    values: torch.Tensor,
    scratch: tuple[torch.Tensor, torch.Tensor] | None = None,
) -> None:
    """See `gear_loader.kernels.priority.draw_distinct`; without use for scratch."""
    count, filled, turn = len(items), 0, 0
    if count and not tree.total() > 0:
        tree.status[EMPTY_DRAWS] += 1
    while filled < count and tree.total() > 0:
        drawn = _draw(tree, random, turn * count + torch.arange(count - filled, device=tree.device))
        unique, place = drawn.unique(return_inverse=True)
        rows = torch.arange(len(drawn), device=drawn.device)
        first = torch.full_like(unique, len(drawn)).scatter_reduce_(0, place, rows, "amin").sort().values
        end = filled + len(first)
        items[filled:end] = drawn[first]
        values[filled:end] = tree.leaves[drawn[first]]
        tree.leaves[drawn] = 0
        _refresh(tree, drawn)
        filled, turn = end, turn + 1
    items[filled:], values[filled:] = -1, 0
    tree.leaves[items[:filled]] = values[:filled]
    _refresh(tree, items[:filled])
    tree.status[DISTINCT_MISSING] += count - filled
