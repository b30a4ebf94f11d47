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


# ---------------------------------------------------------------- numbers


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


@pytest.mark.parametrize("seed", [0, 1, 2**31, 2**63 - 1, 2**63, 2**64 - 1, -1, -(2**63)])
@pytest.mark.parametrize("epoch", [0, 3, 1 << 62])
def test_numbers_are_philox_of_the_counters(seed: int, epoch: int) -> None:
    got = raw(8, seed=seed, stream=5, epoch=epoch, step=9).tolist()
    blocks = [philox([block, 0, 9, epoch], [seed & WORD, 5]) for block in (1, 2)]
    assert got == blocks[0] + blocks[1]


def test_large_and_negative_seeds_are_different_seeds() -> None:
    seeds = [0, -1, -2, 2**63, 2**63 + 1, 2**64 - 3, 2**64 - 4]
    draws = {seed: tuple(raw(2, **{**COUNTERS, "seed": seed}).tolist()) for seed in seeds}
    assert len(set(draws.values())) == len(seeds)


def test_a_draw_depends_on_its_counters_alone() -> None:
    points = list(itertools.product((0, 1), repeat=4))
    names = ("seed", "stream", "epoch", "step")
    forward = {p: raw(16, **dict(zip(names, p, strict=True))).tolist() for p in points}
    backward = {p: raw(16, **dict(zip(names, p, strict=True))).tolist() for p in reversed(points)}
    assert forward == backward
    assert len({tuple(numbers) for numbers in forward.values()}) == len(points)
    assert raw(5, **COUNTERS).tolist() == raw(50, **COUNTERS).tolist()[:5]
    assert len(raw(0, **COUNTERS)) == 0


def test_uniforms_are_in_the_unit_interval_with_53_bits() -> None:
    values = uniforms(100_000, **COUNTERS)
    assert values.dtype == np.float64
    assert values.min() >= 0
    assert values.max() < 1
    assert ((values * 2**53) % 1 == 0).all()
    assert ((values * 2**32) % 1 != 0).any()
    observed = np.bincount((values * 100).astype(int), minlength=100)
    assert chi_square(observed, np.full(100, 1000)) < chi_square_limit(99)


@pytest.mark.parametrize("high", [1, 2, 7, 1000, 2**40])
def test_integers_are_below_their_bound_and_uniform(high: int) -> None:
    values = integers(high, 20_000, **COUNTERS)
    assert values.dtype == np.int64
    assert values.min() >= 0
    assert values.max() < high
    cells = min(high, 64)
    edges = np.array([math.ceil(high * cell / cells) for cell in range(cells + 1)])
    observed, _ = np.histogram(values, edges)
    expected = 20_000 * np.diff(edges) / high
    assert cells == 1 or chi_square(observed, expected) < chi_square_limit(cells - 1)


def test_integers_with_a_bound_each() -> None:
    high = np.array([1, 2, 3, 10**9] * 5000)
    values = integers(high, len(high), **COUNTERS)
    assert (values >= 0).all()
    assert (values < high).all()
    assert (values[::4] == 0).all()
    observed = np.bincount(values[2::4], minlength=3)
    assert chi_square(observed, np.full(3, 5000 / 3)) < chi_square_limit(2)


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


# ---------------------------------------------------------------- permutations

SIZES = (1, 2, 3, 5, 255, 65_535, 65_536, 65_537, 65_538, 65_539, 100_003, 131_071, 262_143, 262_144, 262_145)


@pytest.mark.parametrize("size", SIZES)
def test_permutation_is_a_bijection(size: int) -> None:
    items = Permutation(size, seed=11, epoch=2)[np.arange(size)]
    assert items.dtype == np.int64
    assert (np.bincount(items, minlength=size) == 1).all()
    assert size < 5 or items.tolist() != list(range(size))


def test_permutation_just_above_a_power_of_four_is_a_bijection() -> None:
    # The worst case: the Feistel network's domain is almost four times as large as the size.
    size = 4**10 + 1
    items = Permutation(size, seed=11, epoch=2)[np.arange(size)]
    assert (np.bincount(items, minlength=size) == 1).all()


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


def test_a_large_permutation_spreads_positions_over_items() -> None:
    # Cells of position x item; both margins are fixed, so (16 - 1)^2 degrees of freedom an epoch.
    size, cells, epochs = 70_001, 16, 8
    statistic = 0.0
    positions = np.arange(size)
    of_position = positions * cells // size
    sizes = np.bincount(of_position)
    for epoch in range(epochs):
        items = Permutation(size, seed=21, epoch=epoch)[positions]
        observed = np.zeros((cells, cells))
        np.add.at(observed, (of_position, items * cells // size), 1)
        statistic += chi_square(observed, np.outer(sizes, sizes) / size)
    degrees = epochs * (cells - 1) ** 2
    assert statistic < chi_square_limit(degrees)
    # Too even would be as wrong: the lower limit of the same significance.
    assert statistic > degrees * (1 - 2 / (9 * degrees) - 3.719 * math.sqrt(2 / (9 * degrees))) ** 3


def test_neighbours_in_a_large_permutation_are_independent() -> None:
    size, epochs, cells = 80_000, 1000, 4
    first = np.zeros((4, cells))
    pairs = np.zeros((cells, cells))
    corners = np.array([0, 1, size // 2, size - 1])
    for epoch in range(epochs):
        items = Permutation(size, seed=8, epoch=epoch)[corners] * cells // size
        first[np.arange(4), items] += 1
        pairs[items[0], items[1]] += 1
    for observed in first:
        assert chi_square(observed, np.full(cells, epochs / cells)) < chi_square_limit(cells - 1)
    assert chi_square(pairs, np.full((cells, cells), epochs / cells**2)) < chi_square_limit(cells**2 - 1)
