"""Samplers by themselves: options, and the compiled draw; `test_distributions` has what they draw."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.native.random import uniform_rows
from gear_loader.selection.base import ANCHOR_KINDS, SelectionContext
from gear_loader.selection.samplers import Draw, anchors
from gear_loader.selection.snapshot_selection import rows_of
from gear_loader.selection.weights import importance_weights
from gear_loader.storage.snapshot import Snapshot

LENGTHS = (1, 9, 4, 2, 7, 3, 1, 5)  # 32 steps


def snapshot_of(lengths: tuple[int, ...] = LENGTHS) -> Snapshot:
    count = len(lengths)
    return Snapshot(
        1,
        np.arange(count) * 3 + 100,
        np.array(lengths, dtype=np.int64),
        np.arange(count) % 3 + 1,
        np.arange(count),
    )


def draw(count: int, *, seed: int = 0, epoch: int = 0, step: int = 0, first: int = 0) -> Draw:
    return Draw(seed, epoch, step, first, count)


def context_of(sampler: Any, anchor: Any = "uniform") -> SelectionContext:
    table: Any = None  # rows of a snapshot need none
    return SelectionContext(table, sampler, anchor, None)


@pytest.mark.parametrize("anchor", ["uniform", "first", "last"])
@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_the_compiled_draw_is_that_of_the_sampler(unit: Any, anchor: Any) -> None:
    """Also of a snapshot whose running sum began earlier; no digest covers steps with replacement."""
    sampler, whole = gear.Uniform(unit=unit), snapshot_of()
    later = [part[2:] for part in (whole.slots, whole.lengths, whole.generations, whole.sequences)]
    for snapshot in (whole, Snapshot(1, *later, whole.ends[2:])):
        for step, count in enumerate((1, 4, 7, 130)):
            now = draw(count, seed=-5, epoch=2, step=step)
            items = sampler.items(sampler.num_items(snapshot), now)
            slots, steps, lengths, generations = rows_of(context_of(sampler), snapshot, items)
            if steps is None:
                steps = anchors(anchor, lengths, now)
            names = np.empty((3, count), dtype=np.int64)
            uniform_rows(
                *(snapshot.slots, snapshot.lengths, snapshot.generations, snapshot.sums[1]),
                *(unit == "step", ANCHOR_KINDS[anchor], -5, step, 2, names),
            )
            assert names.tolist() == [part.tolist() for part in (slots, steps, generations)]


NAMES = {
    name: getattr(gear, name) for name in ("Uniform", "Fifo", "Lifo", "TopK", "Prioritized", "LinearSchedule")
}


@pytest.mark.parametrize(
    ("name", "replacement", "unit"),
    [("Uniform", True, "trajectory"), ("Fifo", False, "step"), ("Lifo", True, "step")],
)
def test_repr_names_the_options(name: str, replacement: bool, unit: Any) -> None:
    sampler = NAMES[name](replacement=replacement, unit=unit)
    assert repr(sampler) == f"{name}(replacement={replacement}, unit={unit!r})"
    assert repr(eval(repr(sampler), NAMES)) == repr(sampler)
    assert (sampler.replacement, sampler.unit) == (replacement, unit)
    assert sampler.passes == (not replacement)
    assert not sampler.weighs


OTHERS = {
    "TopK(largest=False, unit='step')": gear.TopK(False, unit="step"),
    "Prioritized(alpha=0.6, beta=0.4, eps=0.0, replacement=True, unit='trajectory', normalize='batch')": (
        gear.Prioritized()
    ),
    "Prioritized(alpha=1.0, beta=LinearSchedule(start=0.4, end=1.0, batches=100), eps=1e-06, replacement=False, "
    "unit='step', normalize='table')": gear.Prioritized(
        *(1, gear.LinearSchedule(0.4, 1.0, batches=100)),
        eps=1e-6,
        replacement=False,
        unit="step",
        normalize="table",
    ),
}


def test_repr_names_the_options_of_samplers_by_priority() -> None:
    for text, sampler in OTHERS.items():
        assert repr(sampler) == repr(eval(text, NAMES)) == text
        assert not sampler.passes
        assert sampler.weighs == text.startswith("Prioritized")


def schedule(number: int) -> float:
    return number / 4


def test_repr_of_a_schedule_of_ones_own_is_the_same_in_every_process() -> None:
    # A saved state is checked by it, so it must not tell an address.
    assert repr(gear.Prioritized(beta=schedule)) == (
        "Prioritized(alpha=0.6, beta=schedule, eps=0.0, replacement=True, unit='trajectory', normalize='batch')"
    )


def test_how_many_items_there_are() -> None:
    for sampler in (gear.Uniform, gear.Fifo, gear.Lifo, gear.TopK, gear.Prioritized):
        for lengths in ((), (1,), LENGTHS):
            assert sampler().num_items(snapshot_of(lengths)) == len(lengths)
            assert sampler(unit="step").num_items(snapshot_of(lengths)) == sum(lengths)


# fmt: off
WRONG: list[tuple[Any, dict[str, Any], str]] = [
    *((sampler, options, message) for sampler in (gear.Uniform, gear.Fifo, gear.Prioritized) for options, message in (
        ({"replacement": "no"}, "replacement is 'no'; expected True or False"),
        ({"replacement": 1}, "replacement is 1; expected True or False"),
        ({"unit": "window"}, "unit is 'window'; expected 'trajectory' or 'step'"),
    )),
    (gear.TopK, {"largest": 1}, "largest is 1; expected True or False"),
    (gear.TopK, {"unit": "window"}, "unit is 'window'; expected 'trajectory' or 'step'"),
    *((gear.Prioritized, options, message) for options, message in (
        ({"alpha": -0.1}, r"alpha is -0\.1; expected a finite number of at least 0"),
        ({"alpha": math.nan}, "alpha is nan; expected a finite number"),
        ({"alpha": math.inf}, "alpha is inf; expected a finite number"),
        ({"alpha": "1"}, "alpha is '1'; expected a finite number"),
        ({"alpha": True}, "alpha is True; expected a finite number"),
        ({"alpha": None}, "alpha is None; expected a finite number"),
        ({"eps": -1e-9}, "eps is -1e-09; expected a finite number of at least 0"),
        ({"eps": math.inf}, "eps is inf; expected a finite number"),
        ({"beta": -0.5}, r"beta is -0\.5; expected a number of at least 0, or a function of the number of batches"),
        ({"beta": math.nan}, "beta is nan; expected a number"),
        ({"beta": "linear"}, "beta is 'linear'; expected a number of at least 0, or a function"),
        ({"beta": None}, "beta is None; expected a number"),
        ({"normalize": "max"}, "normalize is 'max'; expected 'batch' or 'table'"),
        ({"normalize": None}, "normalize is None; expected 'batch' or 'table'"),
        # What float32 cannot hold.
        ({"eps": 1e39}, r"eps is 1e\+39 and alpha 0.6; expected an eps of at most 3.4e\+38"),
        ({"eps": 3.4e38, "alpha": 1.1}, r"\(1 \+ eps\) \*\* alpha of at most that"),
        ({"eps": 2.0**64, "alpha": 2}, r"eps is .* and alpha 2; .* Use a smaller eps"),
        ({"alpha": 1e300}, r"alpha is 1e\+300; expected at most 16: .* only priorities close to 1"),
        ({"alpha": 16.5}, r"alpha is 16.5; expected at most 16"),
        ({"alpha": 10**400}, "alpha is 1000.*; expected a finite number of at least 0"),
        ({"beta": 10**400}, "beta is 1000.*; expected a number of at least 0"),
    )),
]
# fmt: on


def test_wrong_options_are_refused() -> None:
    for sampler, options, message in WRONG:
        with pytest.raises(SchemaError, match=message):
            sampler(**options)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_importance_weights(dtype: type) -> None:
    leaves = np.array([0.3, 1.0, 7.5, 1e-6, 2.0], dtype=dtype)
    for beta in (0.0, 0.4, 1.0):
        weights = importance_weights(leaves, leaves.min(), beta)
        assert weights.dtype == np.float32
        expected = (leaves.min().astype(np.float64) / leaves.astype(np.float64)) ** beta
        np.testing.assert_array_equal(weights, expected.astype(np.float32))
    # No weight is above the scale; with beta 0 all are 1.
    weights = importance_weights(leaves, 5.0, 1.0, scale=0.25)
    np.testing.assert_array_equal(weights[leaves <= 5], np.float32(0.25))
    assert weights[2] == np.float32(5.0 / 7.5 * 0.25)
    assert importance_weights(leaves, 0.1, 0.0, scale=0.5).tolist() == [1.0] * len(leaves)


def test_a_linear_schedule_goes_from_start_to_end_and_stays() -> None:
    up, down = gear.LinearSchedule(0.4, 1.0, batches=6), gear.LinearSchedule(1, 0, 2)
    assert [up(number) for number in range(7)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert [up(number) for number in (6, 7, 10**9)] == [1.0] * 3
    assert [down(number) for number in range(4)] == [1, 0.5, 0, 0]
    assert gear.LinearSchedule(0, 1, batches=1)(1) == 1


def test_a_wrong_schedule_is_refused() -> None:
    wrong: list[Any] = [
        (math.nan, 1, 5),
        (0, math.inf, 5),
        (0, 1, 0),
        (0, 1, -3),
        (0, 1, math.inf),
        ("0", 1, 5),
    ]
    for arguments in (*wrong, (0, 1, None)):
        message = r"^LinearSchedule\(.*\) was received; expected a finite start and end, and at least 1 batch"
        with pytest.raises(SchemaError, match=message):
            gear.LinearSchedule(*arguments)


def test_beta_by_number_of_batches() -> None:
    assert gear.Prioritized(beta=0).beta_at(7) == 0
    assert gear.Prioritized(beta=np.float32(0.5)).beta_at(7) == 0.5
    assert gear.Prioritized(beta=gear.LinearSchedule(0, 1, 10)).beta_at(3) == pytest.approx(0.3)
    assert gear.Prioritized(beta=schedule).beta_at(6) == 1.5


def test_a_schedule_that_returns_no_beta() -> None:
    for value in (-0.1, math.nan, math.inf, None, "1", True):
        sampler = gear.Prioritized(beta=lambda number, value=value: value if number == 3 else 1)
        assert sampler.beta_at(2) == 1
        with pytest.raises(
            SchemaError, match=r"The schedule .* gave .* for batch 3; expected a finite number"
        ):
            sampler.beta_at(3)


def test_options_at_their_limits() -> None:
    largest = float(np.finfo(np.float32).max)
    for options in ({"eps": largest}, {"alpha": 16}, {"alpha": 2, "eps": 1.8e19}, {"alpha": 1e-300}):
        gear.Prioritized(**options)  # type: ignore[arg-type]
