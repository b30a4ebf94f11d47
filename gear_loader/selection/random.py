"""Counter-based random numbers: functions of (seed, stream, epoch, step), so a saved state needs integers only.

Numbers are the raw output of Philox-4x64 (Salmon et al., 2011), which numpy keeps stable across versions.
"""

from __future__ import annotations

import functools

import numpy as np

from gear_loader.native.random import permute, philox
from gear_loader.utils.arrays import Array

_SMALL = 1 << 16


def raw(count: int, *, seed: int, stream: int, epoch: int, step: int) -> Array:
    """uint64 [count], a function of the four integers."""
    # The lowest counter word counts within one draw; the others identify the draw.
    words = np.empty(count, dtype=np.uint64)
    philox(signed(seed), signed(stream), signed(step), signed(epoch), words)
    return words


@functools.lru_cache(maxsize=16)
def key(seed: int, stream: int, epoch: int) -> int:
    """The key of a kernel's random numbers: an int64 that is a function of the three integers."""
    return int(raw(1, seed=seed, stream=stream, epoch=epoch, step=0).astype(np.int64)[0])


def signed(value: int) -> int:
    """An integer modulo 2**64, from -2**63 to 2**63 - 1, as compiled loops need it."""
    return value if -(1 << 63) <= value < 1 << 63 else (value + (1 << 63)) % (1 << 64) - (1 << 63)


def uniforms(count: int, *, seed: int, stream: int, epoch: int, step: int) -> Array:
    """float64 [count] in [0, 1) with 53 random bits."""
    return (raw(count, seed=seed, stream=stream, epoch=epoch, step=step) >> np.uint64(11)) * 2.0**-53


def integers(high: int | Array, count: int, *, seed: int, stream: int, epoch: int, step: int) -> Array:
    """int64 [count], each from 0 to high - 1; `high` is a number or int64 [count].

    The relative error of a value's probability is at most high / 2**53.
    """
    values = uniforms(count, seed=seed, stream=stream, epoch=epoch, step=step)
    return np.minimum((values * high).astype(np.int64), high - 1)


def hashed(values: Array, *, seed: int, stream: int) -> Array:
    """Random hashes of `values` (int64 [n]), uint64 [n]; functions of value, seed and stream."""
    keys = raw(2, seed=seed, stream=stream, epoch=0, step=0)
    return _mix(_mix(values.astype(np.uint64) ^ keys[0]) ^ keys[1])


class Permutation:
    """A random permutation of 0 to size - 1 with random access.

    Up to 65,536 items every order is equally likely (items sorted by random keys). Above that the order is a
    keyed bijection: a Feistel network of eight rounds on the next even number of bits, applied again while the
    result is not below `size`. It takes no memory and O(1) an item.

    Args:
        size: number of items.
        seed, epoch, turn: identify the permutation; `turn` counts the passes over all items within an epoch.
    """

    def __init__(self, size: int, *, seed: int, epoch: int, turn: int = 0) -> None:
        self.size = size
        self._order: Array | None = None
        if size <= _SMALL:
            keys = raw(size, seed=seed, stream=_PERMUTATION, epoch=epoch, step=turn)
            self._order = np.argsort(keys, kind="stable")
        else:
            self._half_bits = -(-(size - 1).bit_length() // 2)
            self._keys = raw(8, seed=seed, stream=_PERMUTATION, epoch=epoch, step=turn)

    def __getitem__(self, positions: Array) -> Array:
        """Items at the given positions, int64 [n] -> int64 [n]."""
        if self._order is not None:
            return self._order[positions]
        items = np.empty(len(positions), dtype=np.int64)
        permute(self._keys, self._half_bits, self.size, positions, items)
        return items


_PERMUTATION = 0x7065726D


def _mix(values: Array) -> Array:
    """The finaliser of SplitMix64 (Steele et al., 2014): every output bit depends on every input bit."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        values = (values ^ (values >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
        values = values ^ (values >> np.uint64(31))
    return values


@functools.lru_cache(maxsize=4)
def permutation(size: int, seed: int, epoch: int, turn: int) -> Permutation:
    """A `Permutation`, cached for the batches of a pass."""
    return Permutation(size, seed=seed, epoch=epoch, turn=turn)
