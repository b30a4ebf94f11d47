"""The compiled loops of the sum tree on the CPU (numba).

The results equal those of `gear_loader.kernels.sum_tree` bit for bit, but every binary level above the blocks of 32
leaves is stored instead of every fifth. So all draws of a batch descend level by level, eight per vector instruction.

    level 1   sums float64, one per block of 32 leaves      n nodes
    level 2   one for each two nodes of level 1             ceil(n / 2)
    ...       up to one node, the root

All sums are in one array; level i + 1 begins at `offsets[i]` and is padded to an even number of nodes. Minima and
maxima, if stored, exist at every fifth level only, as in the wide tree. Together the nodes take 0.76 bytes an item, 0.5
without minima and maxima.

The loops change arrays in place; the callers have checked the arguments. Indices are unsigned, because numba handles
negative signed indices, and mixing both types gives floating-point numbers.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from llvmlite import ir
from numba import int64, njit, types, uint64
from numba.extending import intrinsic

from gear_loader.kernels.sum_tree import LOWEST_LEAF
from gear_loader.native.compile import compiled
from gear_loader.native.memory import prefetch

assert LOWEST_LEAF == 2.0**-126  # compiled into the cached machine code
_BLOCK = uint64(32)
_ONE, _TWO = uint64(1), uint64(2)
_MASK = uint64(0xFFFFFFFF)
_ROWS = 64


def _part(builder: Any, vector: Any, begin: int, count: int) -> Any:
    """Elements `begin` to ``begin + count - 1`` of a vector."""
    mask = ir.Constant(ir.VectorType(ir.IntType(32), count), list(range(begin, begin + count)))
    return builder.shuffle_vector(vector, ir.Constant(vector.type, ir.Undefined), mask)


def _leaves(builder: Any, address: Any, half: int) -> Any:
    """16 leaves of a block, the first or the second half."""
    kind = ir.VectorType(ir.FloatType(), 16).as_pointer()
    return builder.load(
        builder.inttoptr(builder.add(address, ir.Constant(address.type, 64 * half)), kind), align=4
    )


@intrinsic  # type: ignore[untyped-decorator]
def _sums(_context: Any, _leaf: Any, _partial: Any) -> Any:
    """The sum of a block's leaves, from the address of the first; all sums below it are stored from element 1 on.

    Element w + j, of w = 16, 8, 4, 2, 1 sums, is that of element 2 w + j and of element 3 w + j; of w = 16, of leaves j
    and j + 16. Written as vectors, because numba makes one addition at a time of the loops: they took three times as
    long.
    """

    def codegen(_context: Any, builder: Any, signature: Any, args: Any) -> Any:
        wide = ir.VectorType(ir.DoubleType(), 16)
        low, high = (builder.fpext(_leaves(builder, args[0], half), wide) for half in range(2))
        total, width = builder.fadd(low, high), 16
        while True:
            if signature.args[1] != types.none:
                place = builder.add(args[1], ir.Constant(args[1].type, 8 * width))
                builder.store(total, builder.inttoptr(place, total.type.as_pointer()), align=8)
            if width == 1:
                return builder.extract_element(total, ir.Constant(ir.IntType(32), 0))
            width //= 2
            total = builder.fadd(_part(builder, total, 0, width), _part(builder, total, width, width))

    return types.float64(types.uint64, _partial), codegen


@intrinsic  # type: ignore[untyped-decorator]
def _lowest_and_highest(context: Any, _lows: Any, _highs: Any) -> Any:
    """The smallest of 32 positive float32 from one address, infinity if there is none; the largest from another."""
    both = types.UniTuple(types.float32, 2)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide = ir.VectorType(ir.FloatType(), 16)
        zeros, most = (ir.Constant(wide, [value] * 16) for value in (0.0, float("inf")))

        def pick(order: str, one: Any, other: Any) -> Any:
            return builder.select(builder.fcmp_ordered(order, one, other), one, other)

        def positive(half: int) -> Any:
            found = _leaves(builder, args[0], half)
            return builder.select(builder.fcmp_ordered(">", found, zeros), found, most)

        low = pick("<", positive(0), positive(1))
        high = pick(">", _leaves(builder, args[1], 0), _leaves(builder, args[1], 1))
        width = 16
        while width > 1:
            width //= 2
            low = pick("<", _part(builder, low, 0, width), _part(builder, low, width, width))
            high = pick(">", _part(builder, high, 0, width), _part(builder, high, width, width))
        first = ir.Constant(ir.IntType(32), 0)
        found = [builder.extract_element(each, first) for each in (low, high)]
        return context.make_tuple(builder, both, found)

    return both(types.uint64, types.uint64), codegen


# ------------------------------------------------------------ random numbers


@compiled
def _words(key, step, call, first, count, words) -> None:  # type: ignore[no-untyped-def]
    """Philox-4x32-10 (Salmon et al., 2011) for `count` rows from `first` on: 32-bit values in uint64 [4, rows]."""
    k0, k1 = uint64(key) & _MASK, uint64(key) >> uint64(32)
    for i in range(count):
        words[0, i] = uint64(first + i) & _MASK
        words[1, i] = uint64(call)
        words[2, i] = uint64(step) & _MASK
        words[3, i] = uint64(step) >> uint64(32)
    for _ in range(10):
        for i in range(count):
            a = uint64(0xD2511F53) * words[0, i]
            b = uint64(0xCD9E8D57) * words[2, i]
            words[0, i] = (b >> uint64(32)) ^ words[1, i] ^ k0
            words[1, i] = b & _MASK
            words[2, i] = (a >> uint64(32)) ^ words[3, i] ^ k1
            words[3, i] = a & _MASK
        k0 = (k0 + uint64(0x9E3779B9)) & _MASK
        k1 = (k1 + uint64(0xBB67AE85)) & _MASK


@compiled
def _uniforms(key, step, calls, first, us, words) -> None:  # type: ignore[no-untyped-def]
    """53-bit uniforms in [0, 1): float64 [2 * calls, n], rows 2 c and 2 c + 1 from call c."""
    count = us.shape[1]
    for call in range(calls):
        for begin in range(0, count, words.shape[1]):
            rows = min(words.shape[1], count - begin)
            _words(key, step, call, first + begin, rows, words)
            for half in range(2):
                for i in range(rows):
                    high, low = words[2 * half, i] >> uint64(5), words[2 * half + 1, i] >> uint64(6)
                    us[2 * call + half, begin + i] = (
                        np.float64(high) * 67108864.0 + np.float64(low)
                    ) * 2.0**-53


@compiled
def uniforms(key, step, us, words) -> None:  # type: ignore[no-untyped-def]
    """Fill us[0] (float64 [2, n]) with the level-0 uniforms of rows 0 to n - 1; `words` as for `draw`."""
    _uniforms(key, step, 1, 0, us, words)


# ------------------------------------------------------------ drawing


@compiled
def _descend(leaves, sums, offsets, us, nodes, rest, partial) -> None:  # type: ignore[no-untyped-def]
    """Write the items for the uniforms us[level], one row per level of the wide tree, to `nodes` (uint64 [n])."""
    count = len(nodes)
    top = len(offsets)
    for i in range(count):
        nodes[i] = 0
    for level in range(top, 1, -1):
        if level == top or level % 5 == 1:  # a level of the wide tree: fresh random bits
            offset = uint64(offsets[level - 1])
            row = (level + 3) // 5
            for i in range(count):
                rest[i] = us[row, i] * sums[offset + nodes[i]]
        offset = uint64(offsets[level - 2])
        for i in range(count):
            left = sums[offset + nodes[i] * _TWO]
            # Rounding may leave a rest as large as the right sum, even if that is 0.
            right = (rest[i] >= left) & (sums[offset + nodes[i] * _TWO + _ONE] > 0)
            rest[i] -= left * np.float64(right)  # a branch would be predicted wrongly every other time
            nodes[i] = nodes[i] * _TWO + uint64(right)
    base = uint64(leaves.ctypes.data)
    for i in range(count):
        prefetch(base + nodes[i] * uint64(128))
        prefetch(base + nodes[i] * uint64(128) + uint64(64))
    for begin in range(0, count, _ROWS):  # the partial sums of this many rows fit into the L1 cache
        rows = min(_ROWS, count - begin)
        for i in range(rows):
            _sums(
                base + nodes[begin + i] * uint64(128), uint64(partial.ctypes.data) + uint64(i) * uint64(256)
            )
            rest[begin + i] = us[0, begin + i] * partial[uint64(i) * _BLOCK + _ONE]
        for i in range(rows):
            nodes[begin + i] = _in_block(
                leaves, nodes[begin + i], rest[begin + i], partial, uint64(i) * _BLOCK
            )


@njit(inline="always")
def _in_block(leaves, block, rest, partial, own):  # type: ignore[no-untyped-def]
    place = uint64(0)
    for bit in range(4):
        width = _ONE << uint64(bit)
        left = partial[own + width * _TWO + place]
        right = (rest >= left) & (partial[own + width * _TWO + place + width] > 0)
        rest -= left * np.float64(right)
        place += width * uint64(right)
    item = block * _BLOCK + place
    right = (rest >= np.float64(leaves[item])) & (leaves[item + uint64(16)] > 0)
    return item + uint64(16) * uint64(right)


@compiled
def draw(  # type: ignore[no-untyped-def]
    leaves, sums, offsets, wide_depth, key, step, items, values, us, words, nodes, rest, partial
) -> bool:
    """Draw items in proportion to their leaves, with replacement.

    Args:
        leaves: float32. sums: float64. offsets: int64 [levels].
        wide_depth: levels of the wide tree, which determine the random numbers per row.
        key, step: key and counter of the random numbers.
        items: int64 [n], values: float32 [n], output: the items and their leaves.
        us, words, nodes, rest, partial: work space of at least float64 [wide_depth + 2, n], uint64 [4, 64],
            uint64 [n], float64 [n], float64 [2048].

    Returns:
        False, having drawn nothing, if all leaves are 0.
    """
    if not sums[offsets[len(offsets) - 1]] > 0:
        return False
    count = len(items)
    _uniforms(key, step, (wide_depth + 2) // 2, 0, us[:, :count], words)
    _descend(leaves, sums, offsets, us, nodes[:count], rest, partial)
    for i in range(count):
        items[i] = nodes[i]
        values[i] = leaves[nodes[i]]
    return True


@compiled
def draw_rows(  # type: ignore[no-untyped-def]
    leaves,
    sums,
    offsets,
    wide_depth,
    key,
    step,
    us,
    words,
    nodes,
    rest,
    partial,
    block_steps,
    owner,
    number,
    extent,
    generation,
    sequence,
    anchor,
    anchor_key,
    names,
    values,
) -> bool:
    """`draw`, and convert the items to rows.

    Args:
        leaves to partial: as for `draw`.
        block_steps: steps of a block if items are steps, 0 if they are trajectories.
        owner, number: int32 [blocks], slot of each block, and its position in the slot's block table; for steps.
        extent, generation, sequence: index arrays.
        anchor, anchor_key: `UNIFORM`, `FIRST` or `LAST` of `native.random`, and key of its random numbers; for
            trajectories.
        names: int64 [4, n], output: slots, anchors, generations and sequence numbers.
        values: float32 [n], output: leaves.

    Returns:
        As `draw`.
    """
    items = names[0]
    if not draw(leaves, sums, offsets, wide_depth, key, step, items, values, us, words, nodes, rest, partial):
        return False
    count = len(items)
    if block_steps == 0 and anchor == 0:
        _uniforms(anchor_key, step, 1, 0, us[:, :count], words)
    # What the rows need is fetched into the cache for all of them before it is read.
    if block_steps > 0:
        for i in range(count):
            names[3, i] = block = items[i] // block_steps
            prefetch(uint64(owner.ctypes.data) + uint64(block) * uint64(4))
            prefetch(uint64(number.ctypes.data) + uint64(block) * uint64(4))
        for i in range(count):
            block = names[3, i]
            names[1, i] = int64(number[block]) * block_steps + (items[i] - block * block_steps)
            names[0, i] = int64(owner[block])
    for i in range(count):
        slot = uint64(names[0, i])
        prefetch(uint64(extent.ctypes.data) + slot * uint64(24))
        prefetch(uint64(generation.ctypes.data) + slot * uint64(8))
        prefetch(uint64(sequence.ctypes.data) + slot * uint64(8))
    for i in range(count):
        slot = names[0, i]
        if block_steps == 0:
            length, at = extent[slot, 0], int64(0)
            if anchor == 0:
                at = min(int64(us[0, i] * np.float64(length)), length - 1)
            elif anchor == 2:
                at = length - 1
            names[1, i] = at
        names[2, i], names[3, i] = generation[slot], sequence[slot]
    return True


# ------------------------------------------------------------ updating


@njit(inline="always")  # type: ignore[untyped-decorator]
def _block(leaves, sums, mins, maxs, block) -> None:  # type: ignore[no-untyped-def]
    place = uint64(leaves.ctypes.data) + block * uint64(128)
    sums[block] = _sums(place, None)
    if len(mins) > 0:
        mins[block], maxs[block] = _lowest_and_highest(place, place)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _extremes(mins, maxs, to, source, node) -> None:  # type: ignore[no-untyped-def]
    first = uint64(4) * (source + node * _BLOCK)
    mins[to + node], maxs[to + node] = _lowest_and_highest(
        uint64(mins.ctypes.data) + first, uint64(maxs.ctypes.data) + first
    )


@compiled
def _refresh(  # type: ignore[no-untyped-def]
    leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, nodes, everything
) -> None:
    """Recompute all nodes above the blocks `nodes` (uint64 [n], overwritten), or all nodes."""
    touched = len(nodes)
    count = num_blocks
    if everything or count <= touched:
        everything = True
        for i in range(num_blocks):
            _block(leaves, sums, mins, maxs, uint64(i))
    else:
        for i in range(touched):
            _block(leaves, sums, mins, maxs, nodes[i])
    for level in range(2, len(offsets) + 1):
        below, here = uint64(offsets[level - 2]), uint64(offsets[level - 1])
        count = (count + 1) // 2
        wide = len(mins) > 0 and level % 5 == 1 and level // 5 < len(wide_offsets)
        if everything or count <= touched:
            everything = True
            for i in range(count):
                k = below + uint64(i) * _TWO
                sums[here + uint64(i)] = sums[k] + sums[k + _ONE]
        else:
            for i in range(touched):
                nodes[i] >>= _ONE
                k = below + nodes[i] * _TWO
                sums[here + nodes[i]] = sums[k] + sums[k + _ONE]
        if wide:
            source, to = uint64(wide_offsets[level // 5 - 1]), uint64(wide_offsets[level // 5])
            for i in range(count if everything else touched):
                _extremes(mins, maxs, to, source, uint64(i) if everything else nodes[i])


@compiled
def update(  # type: ignore[no-untyped-def]
    leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, items, values
) -> None:
    """Set the leaves of `items` (int64 [n]) to `values` (float32 [n], the last of equal items) and update all nodes."""
    count = len(items)
    nodes = np.empty(count, dtype=np.uint64)
    base = uint64(leaves.ctypes.data)
    for i in range(count):
        nodes[i] = uint64(items[i]) >> uint64(5)
        prefetch(base + nodes[i] * uint64(128))
        prefetch(base + nodes[i] * uint64(128) + uint64(64))
    for i in range(count):
        leaves[uint64(items[i])] = values[i]
    _refresh(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, nodes, False)


@compiled
def fill(  # type: ignore[no-untyped-def]
    leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, width, ranges, inside, values
) -> None:
    """Set all leaves of ranges of `width` items to one value each, or 0, and update all nodes.

    Args:
        ranges: int64 [n], distinct; range r begins at item r * width.
        inside: int32 [all ranges, 2]: first item of a range that gets the value, and the item after the last one.
        values: float32 [n].
    """
    span = (width + 30) // 32 + 1  # the most blocks of a range
    everything = len(ranges) * span >= num_blocks
    nodes = np.empty(0 if everything else len(ranges) * span, dtype=np.uint64)
    filled = 0
    for i in range(len(ranges)):
        begin, value = uint64(ranges[i] * width), values[i]
        first, end = inside[ranges[i], 0], inside[ranges[i], 1]
        for j in range(width):
            leaves[begin + uint64(j)] = value if first <= j < end else np.float32(0)
        if not everything:
            for node in range(begin >> uint64(5), ((begin + uint64(width - 1)) >> uint64(5)) + _ONE):
                nodes[filled] = node
                filled += 1
    _refresh(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, nodes[:filled], everything)


@compiled
def build(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks) -> None:  # type: ignore[no-untyped-def]
    """Compute all nodes from the leaves."""
    nodes = np.empty(0, dtype=np.uint64)
    _refresh(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, nodes, True)


# ------------------------------------------------------------ without replacement


@compiled
def draw_distinct(  # type: ignore[no-untyped-def]
    leaves,
    sums,
    mins,
    maxs,
    offsets,
    wide_offsets,
    num_blocks,
    wide_depth,
    key,
    step,
    items,
    values,
    us,
    words,
    nodes,
    rest,
    partial,
) -> int:
    """Draw without replacement, each item in proportion to the remaining leaves.

    See `gear_loader.kernels.priority.draw_distinct` for the algorithm. The leaves are restored.

    Args:
        items: int64 [n], values: float32 [n], output: the items and their leaves.
        us, words, nodes, rest, partial: as for `draw`.

    Returns:
        Number of items drawn: fewer than n if fewer leaves are positive.
    """
    count = len(items)
    filled, turn = 0, 0
    root = offsets[len(offsets) - 1]
    nothing = np.zeros(count, dtype=np.float32)
    while filled < count and sums[root] > 0:
        rows = count - filled
        _uniforms(key, step, (wide_depth + 2) // 2, turn * count, us[:, :rows], words)
        _descend(leaves, sums, offsets, us, nodes[:rows], rest, partial)
        begin = filled
        for i in range(rows):
            if leaves[nodes[i]] > 0:
                items[filled] = nodes[i]
                values[filled] = leaves[nodes[i]]
                leaves[nodes[i]] = 0
                filled += 1
        update(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, items[begin:filled], nothing)
        turn += 1
    update(leaves, sums, mins, maxs, offsets, wide_offsets, num_blocks, items[:filled], values[:filled])
    return filled


# ------------------------------------------------------------ values


@njit(inline="always")
def weighed(value, alpha, eps):  # type: ignore[no-untyped-def]
    """``(value + eps) ** alpha``, computed in float64, 0 only for 0."""
    value = np.float64(value) + eps
    if value > 0:
        return max(value if alpha == 1.0 else value**alpha, LOWEST_LEAF)
    return value


@compiled
def weigh(values, alpha, eps, out) -> None:  # type: ignore[no-untyped-def]
    """Weigh float32 [n] into float64 [n]; see `weighed`."""
    last, leaf = np.float32(0), weighed(np.float32(0), alpha, eps)
    for i in range(len(values)):
        if values[i] != last:  # new items often have one priority
            last, leaf = values[i], weighed(values[i], alpha, eps)
        out[i] = leaf


@compiled
def importance(leaves, least, beta, scale, out) -> None:  # type: ignore[no-untyped-def]
    """``(scale * min(least / leaf, 1)) ** beta`` of float [n] into float32 [n], computed in float64.

    Args:
        least: reference leaf; if negative, the smallest of `leaves`.
    """
    if least < 0:
        least = np.inf
        for i in range(len(leaves)):
            least = min(least, np.float64(leaves[i]))
    for i in range(len(leaves)):
        leaf = np.float64(leaves[i])
        out[i] = (scale if leaf <= least else least / leaf * scale) ** beta
