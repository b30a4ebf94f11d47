"""Compiled random numbers and uniform draws of rows from a list of trajectories (numba).

Philox-4x64-10 (Salmon et al., 2011) with numpy's order of counters: `philox` equals
``np.random.Philox(key=[seed, stream], counter=[0, 0, step, epoch]).random_raw(n)``.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import float64, int64, njit, types, uint64
from numba.extending import intrinsic

from gear_loader.native.compile import compiled
from gear_loader.native.memory import prefetch

UNIFORM, FIRST, LAST = range(3)
"""Anchor of a window: a uniformly drawn step, or the first or last step of the trajectory."""
_NEAR = 4096
"""Trajectories whose numbers the caches hold, so that they are not requested ahead."""


@intrinsic  # type: ignore[untyped-decorator]
def _product(context: Any, _a: Any, _b: Any) -> Any:
    """The upper and the lower 64 bits of the product of two uint64, by one instruction."""
    both = types.UniTuple(types.uint64, 2)

    def codegen(context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        wide, word = ir.IntType(128), ir.IntType(64)
        product = builder.mul(*(builder.zext(part, wide) for part in args))
        high = builder.trunc(builder.lshr(product, ir.Constant(wide, 64)), word)
        return context.make_tuple(builder, both, [high, builder.trunc(product, word)])

    return both(types.uint64, types.uint64), codegen


@njit(inline="always")
def _block(seed, stream, step, epoch, number):  # type: ignore[no-untyped-def]
    """Four uint64: block `number` of a stream, counted from 0."""
    a, b, c, d = uint64(number + 1), uint64(0), uint64(step), uint64(epoch)
    k0, k1 = uint64(seed), uint64(stream)
    for _ in range(10):
        high0, low0 = _product(uint64(0xD2E7470EE14C6C93), a)
        high1, low1 = _product(uint64(0xCA5A826395121157), c)
        a, b, c, d = high1 ^ b ^ k0, low1, high0 ^ d ^ k1, low0
        k0 += uint64(0x9E3779B97F4A7C15)
        k1 += uint64(0xBB67AE8584CAA73B)
    return a, b, c, d


@compiled
def philox(seed, stream, step, epoch, out) -> None:  # type: ignore[no-untyped-def]
    """Fill `out`, uint64 [n]; the other arguments are int64, modulo 2**64."""
    for i in range(0, len(out), 4):
        words = _block(seed, stream, step, epoch, i // 4)
        out[i] = words[0]
        if i + 1 < len(out):
            out[i + 1] = words[1]
        if i + 2 < len(out):
            out[i + 2] = words[2]
        if i + 3 < len(out):
            out[i + 3] = words[3]


@njit(inline="always")
def _below(word, high):  # type: ignore[no-untyped-def]
    """Map a random uint64 to an integer from 0 to high - 1."""
    return min(int64(float64(word >> uint64(11)) * 2.0**-53 * float64(high)), high - 1)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _search(sums: Any, items: Any, places: Any) -> None:
    """Find the first of the ascending `sums` (int64 [n]) above each item (int64 [m]); the last one is above all.

    All items take each step of the search together and without a branch, which would be predicted wrongly every other
    time: 256 items among 9,000 sums take a quarter of the time on an EPYC of the third generation.
    """
    places[:] = 0
    left = uint64(len(sums))
    while left > uint64(1):
        half = left >> uint64(1)
        for i in range(len(items)):
            place = uint64(places[i])
            places[i] = int64(place + half * uint64(sums[place + half - uint64(1)] <= items[i]))
        left -= half


@compiled
def uniform_rows(  # type: ignore[no-untyped-def]
    slots, lengths, generations, sums, steps, anchor, seed, step, epoch, names
) -> None:
    """Draw rows uniformly, with replacement.

    Args:
        slots, lengths, generations: int64 [T], of the trajectories. sums: int64 [T], running sum of the lengths plus a
            constant.
        steps: whether to draw a step of the table, which becomes the anchor, instead of a trajectory.
        anchor: `UNIFORM`, `FIRST` or `LAST`, for drawn trajectories.
        seed, step, epoch: int64, key and counter of the random numbers: stream 0 for items, 1 for anchors.
        names: int64 [3, n], output: slots, anchors and generations.
    """
    count = names.shape[1]
    size = int64(len(slots))
    before = sums[0] - lengths[0]
    drawn, anchored = size, not steps and anchor == UNIFORM
    if steps:
        drawn = sums[size - 1] - before
    for i in range(0, count, 4):
        words = _block(seed, 0, step, epoch, i // 4)
        others = _block(seed, 1, step, epoch, i // 4) if anchored else words
        for j in range(min(4, count - i)):
            word, other = words[0], others[0]
            if j == 1:
                word, other = words[1], others[1]
            elif j == 2:
                word, other = words[2], others[2]
            elif j == 3:
                word, other = words[3], others[3]
            place = _below(word, drawn)
            names[0, i + j] = place
            # The item, whose trajectory is found below; or the random number of the anchor.
            names[1, i + j] = place + before if steps else int64(other)
    # Loops of one kind each, of which the compiler makes loads of several rows at a time.
    if steps:
        _search(sums, names[1], names[0])
        for i in range(count):
            place = names[0, i]
            names[1, i] -= sums[place] - lengths[place]
    elif size > _NEAR:
        for i in range(count):
            for array in (slots, lengths, generations):
                prefetch(uint64(array.ctypes.data) + uint64(names[0, i]) * uint64(8))
    if anchored:
        for i in range(count):
            names[1, i] = _below(uint64(names[1, i]), lengths[names[0, i]])
    elif not steps:
        for i in range(count):
            names[1, i] = lengths[names[0, i]] - 1 if anchor == LAST else 0
    for i in range(count):
        place = names[0, i]
        names[0, i] = slots[place]
        names[2, i] = generations[place]


@njit(inline="always")
def _mix(value):  # type: ignore[no-untyped-def]
    """The finaliser of SplitMix64 (Steele et al., 2014)."""
    value = (value ^ (value >> uint64(30))) * uint64(0xBF58476D1CE4E5B9)
    value = (value ^ (value >> uint64(27))) * uint64(0x94D049BB133111EB)
    return value ^ (value >> uint64(31))


@compiled
def permute(keys, half_bits, size, positions, items) -> None:  # type: ignore[no-untyped-def]
    """Apply a keyed bijection of 0 to size - 1 (a Feistel network) to positions.

    Args:
        keys: uint64 [rounds]. half_bits: bits of half a number; the network is repeated until the result is below
            `size`.
        positions: int64 [n]. items: int64 [n], output.
    """
    bits = uint64(half_bits)
    mask = (uint64(1) << bits) - uint64(1)
    for i in range(len(positions)):
        value = uint64(positions[i])
        while True:
            left, right = value >> bits, value & mask
            for j in range(len(keys)):
                left, right = right, left ^ (_mix(right ^ keys[j]) & mask)
            value = (left << bits) | right
            if value < uint64(size):
                break
        items[i] = int64(value)
