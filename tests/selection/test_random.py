"""Counter-based random numbers: pinned to the bit, independent of order, uniform."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from dataset_common import chi_square, chi_square_limit

from gear_loader.selection.random import Permutation, hashed, integers, permutation, raw, uniforms

WORD = (1 << 64) - 1
COUNTERS = {"seed": 1, "stream": 2, "epoch": 3, "step": 4}


def philox(counter: list[int], key: list[int]) -> list[int]:
    """Philox-4x64-10 as its paper defines it (Salmon et al., 2011), in plain integers."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        p0, p1 = c0 * 0xD2E7470EE14C6C93, c2 * 0xCA5A826395121157
        c0, c1, c2, c3 = (p1 >> 64) ^ c1 ^ k0, p1 & WORD, (p0 >> 64) ^ c3 ^ k1, p0 & WORD
        k0, k1 = (k0 + 0x9E3779B97F4A7C15) & WORD, (k1 + 0xBB67AE8584CAA73B) & WORD
    return [c0, c1, c2, c3]


def test_reference_values() -> None:
    # Change these only together with every promise that a saved state resumes.
    assert raw(5, **COUNTERS).tolist() == [
        0xA543C2F0AA0DA944,
        0x239809EFCB67CD5D,
        0x744841C6CD956DBC,
        0xEA2FD6F246B19FAC,
        0xE61C11EEF6CCA0DD,
    ]
    assert uniforms(3, **COUNTERS).tolist() == [0.645565208202291, 0.13903867821082294, 0.45422755340185506]
    assert integers(1000, 8, **COUNTERS).tolist() == [645, 139, 454, 914, 898, 864, 703, 409]
    assert Permutation(10, seed=7, epoch=3)[np.arange(10)].tolist() == [6, 2, 3, 0, 5, 4, 9, 1, 7, 8]
    assert Permutation(100_000, seed=7, epoch=3)[np.arange(8)].tolist() == [
        96213,
        50325,
        82591,
        75584,
        22365,
        68,
        85624,
        1211,
    ]


def test_numbers_are_philox_of_the_counters() -> None:
    seeds = (0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63))
    for seed, epoch in zip(seeds, (0, 3, 1 << 62, 0, 3, 1 << 62, 5, 7), strict=True):
        got = raw(8, seed=seed, stream=5, epoch=epoch, step=9).tolist()
        blocks = [philox([block, 0, 9, epoch], [seed & WORD, 5]) for block in (1, 2)]
        assert got == blocks[0] + blocks[1]


def test_uniforms_are_in_the_unit_interval_with_53_bits() -> None:
    values = uniforms(100_000, **COUNTERS)
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert ((values * 2**53) % 1 == 0).all()
    assert ((values * 2**32) % 1 != 0).any()
    observed = np.bincount((values * 100).astype(int), minlength=100)
    assert chi_square(observed, np.full(100, 1000)) < chi_square_limit(99)


@pytest.mark.parametrize("high", [1, 7, 2**40])
def test_integers_are_below_their_bound_and_uniform(high: int) -> None:
    values = integers(high, 20_000, **COUNTERS)
    assert values.dtype == np.int64
    cells = min(high, 64)
    edges = np.array([math.ceil(high * cell / cells) for cell in range(cells + 1)])
    observed, _ = np.histogram(values, edges)
    assert observed.sum() == 20_000  # all are in the range
    expected = 20_000 * np.diff(edges) / high
    assert cells == 1 or chi_square(observed, expected) < chi_square_limit(cells - 1)


def test_hashed_numbers_depend_on_value_seed_and_stream_alone() -> None:
    values = np.arange(64_000)
    numbers = hashed(values, seed=3, stream=1)
    assert numbers.dtype == np.uint64
    assert (hashed(values[::-1], seed=3, stream=1) == numbers[::-1]).all()
    assert numbers[:3].tolist() == hashed(np.array([0, 1, 2]), seed=3, stream=1).tolist()
    assert numbers[:2].tolist() == [0xECAEEC65577B4725, 0x3A263ED08793AAD1]
    for other in (hashed(values, seed=4, stream=1), hashed(values, seed=3, stream=2)):
        assert (other != numbers).all()
    for size in (10, 64):
        pairs = np.zeros((size, size))
        np.add.at(pairs, (numbers[::2] % size, numbers[1::2] % size), 1)
        assert chi_square(pairs, np.full((size, size), 32_000 / size**2)) < chi_square_limit(size**2 - 1)


# The last is the worst case: the Feistel network's domain is almost four times as large.
@pytest.mark.parametrize("size", [1, 2, 5, 65_536, 65_537, 131_071, 262_144, 4**9 + 1])
def test_permutation_is_a_bijection(size: int) -> None:
    items = Permutation(size, seed=11, epoch=2)[np.arange(size)]
    assert items.dtype == np.int64
    assert (np.bincount(items, minlength=size) == 1).all()
    assert size < 5 or items.tolist() != list(range(size))


@pytest.mark.parametrize("size", [1000, 65_537])
def test_any_part_of_a_permutation_can_be_computed(size: int) -> None:
    order = Permutation(size, seed=3, epoch=1)
    whole = order[np.arange(size)]
    some = np.array([size - 1, 0, 17, 17, size // 2])
    assert (order[some] == whole[some]).all()
    assert (order[np.arange(300, 556)] == whole[300:556]).all()
    assert len(order[np.arange(0)]) == 0
    assert (some == [size - 1, 0, 17, 17, size // 2]).all()  # the positions given are not overwritten


@pytest.mark.parametrize("size", [1000, 65_537])
def test_permutations_differ_by_seed_epoch_and_turn_alone(size: int) -> None:
    positions = np.arange(100)
    orders = {
        (seed, epoch, turn): tuple(Permutation(size, seed=seed, epoch=epoch, turn=turn)[positions].tolist())
        for seed in (-1, 0, 1)
        for epoch in (0, 1, 1 << 62)
        for turn in (0, 1, 2)
    }
    assert len(set(orders.values())) == len(orders)
    assert orders[1, 0, 0] == tuple(Permutation(size, seed=1, epoch=0)[positions].tolist())
    assert orders[1, 0, 2] == tuple(permutation(size, 1, 0, 2)[positions].tolist())


def test_all_orders_of_four_items_are_equally_likely() -> None:
    number = {order: i for i, order in enumerate(itertools.permutations(range(4)))}
    draws = 24 * 250
    observed = np.zeros(24)
    for epoch in range(draws):
        observed[number[tuple(Permutation(4, seed=5, epoch=epoch)[np.arange(4)].tolist())]] += 1
    assert chi_square(observed, np.full(24, draws / 24)) < chi_square_limit(23)
