"""Selectors by themselves: what they draw from a snapshot, anchors, options; `test_prioritized` has the rest."""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import pytest
from dataset_common import chi_square, chi_square_limit

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.selection.selectors import Draw, anchors, replacements
from gear_loader.storage.reader import Snapshot

LENGTHS = (1, 9, 4, 2, 7, 3, 1, 5)  # 32 steps


def snapshot_of(lengths: tuple[int, ...] = LENGTHS) -> Snapshot:
    count = len(lengths)
    return Snapshot(
        1,
        np.arange(count) * 3 + 100,
        np.array(lengths, dtype=np.int64),
        np.ones(count, dtype=np.int64),
        np.arange(count),
    )


def draw(count: int, *, seed: int = 0, epoch: int = 0, step: int = 0, first: int = 0) -> Draw:
    return Draw(seed, epoch, step, first, count)


# ---------------------------------------------------------------- with replacement


def test_trajectories_with_replacement_are_equally_likely() -> None:
    snapshot, selector = snapshot_of(), gear.Uniform()
    observed = np.zeros(len(LENGTHS))
    for step in range(100):
        positions, steps = selector.select(snapshot, draw(80, seed=4, step=step))
        assert steps is None
        observed += np.bincount(positions, minlength=len(LENGTHS))
    assert chi_square(observed, np.full(len(LENGTHS), 1000)) < chi_square_limit(len(LENGTHS) - 1)


def test_steps_with_replacement_are_equally_likely() -> None:
    snapshot, selector = snapshot_of(), gear.Uniform(unit="step")
    assert selector.num_items(snapshot) == 32
    observed = np.zeros((len(LENGTHS), max(LENGTHS)))
    for step in range(100):
        positions, steps = selector.select(snapshot, draw(160, seed=4, step=step))
        assert steps is not None
        np.add.at(observed, (positions, steps), 1)
    exists = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    assert (observed[~exists] == 0).all()
    assert chi_square(observed[exists], np.full(32, 500)) < chi_square_limit(31)


def test_successive_rows_and_batches_are_independent() -> None:
    selector = gear.Uniform()
    small = snapshot_of((1, 1, 1, 1))
    rows, batches, columns = np.zeros((4, 4)), np.zeros((4, 4)), np.zeros((4, 4))
    previous = None
    for step in range(8000):
        positions, _ = selector.select(small, draw(2, seed=1, step=step))
        rows[positions[0], positions[1]] += 1
        if previous is not None:
            batches[previous[0], positions[0]] += 1
        previous = positions
        other, _ = selector.select(small, draw(2, seed=2, step=step))
        columns[positions[0], other[0]] += 1
    for observed in (rows, batches, columns):
        assert chi_square(observed, np.full((4, 4), observed.sum() / 16)) < chi_square_limit(15)


def test_items_and_anchors_are_independent() -> None:
    # They are drawn by the same counters from different streams; one stream for both would correlate them fully.
    snapshot, selector = snapshot_of((8,) * 8), gear.Uniform()
    observed = np.zeros((8, 8))
    for step in range(60):
        now = draw(640, seed=6, step=step)
        positions, _ = selector.select(snapshot, now)
        np.add.at(observed, (positions, anchors("uniform", snapshot.lengths[positions], now)), 1)
    assert chi_square(observed, np.full((8, 8), 600)) < chi_square_limit(63)


# ---------------------------------------------------------------- without replacement


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("batch_size", [1, 5, 32, 100])
def test_an_epoch_without_replacement_covers_each_item_once(unit: Any, batch_size: int) -> None:
    snapshot, selector = snapshot_of(), gear.Uniform(replacement=False, unit=unit)
    total = selector.num_items(snapshot)
    seen: list[tuple[int, ...]] = []
    for step, first in enumerate(range(0, total, batch_size)):
        count = min(batch_size, total - first)
        positions, steps = selector.select(snapshot, draw(count, epoch=3, step=step, first=first))
        assert len(positions) == count
        seen += [(p,) for p in positions.tolist()] if steps is None else zip(positions, steps, strict=True)
    if unit == "trajectory":
        expected = [(p,) for p in range(len(LENGTHS))]
    else:
        expected = [(p, s) for p, length in enumerate(LENGTHS) for s in range(length)]
    assert sorted(seen) == expected


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_without_replacement_every_item_is_equally_likely_at_every_position(unit: Any) -> None:
    snapshot, selector = snapshot_of((1, 4, 2)), gear.Uniform(replacement=False, unit=unit)
    total = selector.num_items(snapshot)
    observed = np.zeros((total, total))
    starts = np.array([0, 1, 5])
    for epoch in range(200 * total):
        positions, steps = selector.select(snapshot, draw(total, seed=9, epoch=epoch))
        items = positions if steps is None else starts[positions] + steps
        observed[np.arange(total), items] += 1
    # Margins are fixed: (n - 1)^2 degrees of freedom, and the statistic is scaled by (n - 1) / n.
    statistic = chi_square(observed, np.full((total, total), 200.0)) * (total - 1) / total
    assert statistic < chi_square_limit((total - 1) ** 2)


def test_the_same_draw_is_the_same_in_any_order() -> None:
    snapshot = snapshot_of()
    for selector in (
        gear.Uniform(),
        gear.Uniform(unit="step"),
        gear.Uniform(False),
        gear.Uniform(False, "step"),
    ):
        points = [(seed, epoch, step) for seed in (0, 1) for epoch in (0, 1) for step in (0, 1)]

        def select(point: tuple[int, int, int], selector: gear.Uniform = selector) -> tuple[Any, ...]:
            seed, epoch, step = point
            first = 4 * step
            positions, steps = selector.select(
                snapshot, draw(4, seed=seed, epoch=epoch, step=step, first=first)
            )
            return (*positions.tolist(), *(() if steps is None else steps.tolist()))

        forward = {point: select(point) for point in points}
        assert {point: select(point) for point in reversed(points)} == forward
        assert len(set(forward.values())) == len(points)


# ---------------------------------------------------------------- by age


def items_of(selector: Any, snapshot: Snapshot, now: Draw) -> list[int]:
    """Numbers of the items that a selector chooses, counted from the oldest."""
    positions, steps = selector.select(snapshot, now)
    assert (steps is None) == (selector.unit == "trajectory")
    if steps is None:
        return positions.tolist()
    assert (steps < snapshot.lengths[positions]).all()
    assert (steps >= 0).all()
    return (snapshot.ends[positions] - snapshot.lengths[positions] + steps).tolist()


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("replacement", [True, False])
def test_the_oldest_and_the_newest_come_first(unit: Any, replacement: bool) -> None:
    snapshot = snapshot_of()
    total = len(LENGTHS) if unit == "trajectory" else sum(LENGTHS)
    for first, count in [(0, 1), (0, 5), (0, total), (3, 4), (total - 1, 1), (0, 2 * total + 3)]:
        now = draw(count, first=first)
        expected = [place % total for place in range(first, first + count)]
        assert items_of(gear.Fifo(replacement, unit), snapshot, now) == expected
        assert items_of(gear.Lifo(replacement, unit), snapshot, now) == [total - 1 - i for i in expected]


def test_order_of_age_does_not_depend_on_the_seed() -> None:
    snapshot = snapshot_of()
    for selector in (gear.Fifo(), gear.Lifo()):
        drawn = {tuple(items_of(selector, snapshot, draw(5, seed=s, epoch=s, step=s))) for s in range(9)}
        assert len(drawn) == 1


# ---------------------------------------------------------------- anchors and replacements


def test_first_and_last_anchors() -> None:
    lengths = np.array(LENGTHS)
    now = draw(len(lengths))
    assert anchors("first", lengths, now).tolist() == [0] * len(lengths)
    assert anchors("last", lengths, now).tolist() == [length - 1 for length in LENGTHS]


def test_uniform_anchors_are_uniform_over_the_steps() -> None:
    lengths = np.tile(LENGTHS, 100)
    observed = np.zeros((len(LENGTHS), max(LENGTHS)))
    for step in range(20):
        steps = anchors("uniform", lengths, draw(len(lengths), seed=12, step=step))
        np.add.at(observed, (np.tile(np.arange(len(LENGTHS)), 100), steps), 1)
    for row, length in zip(observed, LENGTHS, strict=True):
        assert row[length:].sum() == 0
        if length > 1:
            assert chi_square(row[:length], np.full(length, 2000 / length)) < chi_square_limit(length - 1)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_replacements_are_uniform_over_what_is_there(unit: Any) -> None:
    snapshot = snapshot_of()
    observed = np.zeros((len(LENGTHS), max(LENGTHS)))
    for step in range(40):
        positions, steps = replacements(unit, snapshot, draw(400, step=step))
        assert (steps is None) == (unit == "trajectory")
        np.add.at(observed, (positions, 0 if steps is None else steps), 1)
    exists = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None] if unit == "step" else observed > 0
    expected = np.full(exists.sum(), 16_000 / exists.sum())
    assert exists.sum() == (32 if unit == "step" else len(LENGTHS))
    assert (observed[~exists] == 0).all()
    assert chi_square(observed[exists], expected) < chi_square_limit(int(exists.sum()) - 1)


# ---------------------------------------------------------------- the selector itself


NAMES = {
    name: getattr(gear, name) for name in ("Uniform", "Fifo", "Lifo", "TopK", "Prioritized", "LinearSchedule")
}


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("name", ["Uniform", "Fifo", "Lifo"])
def test_repr_names_the_options(name: str, replacement: bool, unit: Any) -> None:
    selector = NAMES[name](replacement=replacement, unit=unit)
    assert repr(selector) == f"{name}(replacement={replacement}, unit={unit!r})"
    assert repr(eval(repr(selector), NAMES)) == repr(selector)
    assert (selector.replacement, selector.unit) == (replacement, unit)
    assert selector.passes == (not replacement)
    assert not selector.weighs


OTHERS = {
    "TopK(largest=True, unit='trajectory')": gear.TopK(),
    "TopK(largest=False, unit='step')": gear.TopK(False, unit="step"),
    "Prioritized(alpha=0.6, beta=0.4, eps=0.0, replacement=True, unit='trajectory', normalize='batch')": (
        gear.Prioritized()
    ),
    "Prioritized(alpha=1.0, beta=LinearSchedule(start=0.4, end=1.0, batches=100), eps=1e-06, replacement=False, "
    "unit='step', normalize='table')": gear.Prioritized(
        1,
        gear.LinearSchedule(0.4, 1.0, batches=100),
        eps=1e-6,
        replacement=False,
        unit="step",
        normalize="table",
    ),
}


@pytest.mark.parametrize("text", OTHERS)
def test_repr_names_the_options_of_selectors_by_priority(text: str) -> None:
    assert repr(OTHERS[text]) == text
    assert repr(eval(text, NAMES)) == text
    assert not OTHERS[text].passes
    assert OTHERS[text].weighs == text.startswith("Prioritized")


def schedule(number: int) -> float:
    return number / 4


def test_repr_of_a_schedule_of_ones_own_is_the_same_in_every_process() -> None:
    # A saved state is checked by it, so it must not tell an address.
    assert repr(gear.Prioritized(beta=schedule)) == (
        "Prioritized(alpha=0.6, beta=schedule, eps=0.0, replacement=True, unit='trajectory', normalize='batch')"
    )


@pytest.mark.parametrize("selector", [gear.Uniform, gear.Fifo, gear.Lifo, gear.TopK, gear.Prioritized])
def test_how_many_items_there_are(selector: Any) -> None:
    for lengths in ((), (1,), LENGTHS):
        assert selector().num_items(snapshot_of(lengths)) == len(lengths)
        assert selector(unit="step").num_items(snapshot_of(lengths)) == sum(lengths)


@pytest.mark.parametrize("selector", [gear.Uniform, gear.Fifo, gear.Lifo, gear.Prioritized])
def test_wrong_options_are_refused(selector: Any) -> None:
    with pytest.raises(SchemaError, match="replacement is 'no'; expected True or False"):
        selector(replacement="no")
    with pytest.raises(SchemaError, match="replacement is 1; expected True or False"):
        selector(replacement=1)
    with pytest.raises(SchemaError, match="unit is 'window'; expected 'trajectory' or 'step'"):
        selector(unit="window")


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"alpha": -0.1}, r"alpha is -0\.1; expected a finite number of at least 0"),
        ({"alpha": math.nan}, "alpha is nan; expected a finite number"),
        ({"alpha": math.inf}, "alpha is inf; expected a finite number"),
        ({"alpha": "1"}, "alpha is '1'; expected a finite number"),
        ({"alpha": True}, "alpha is True; expected a finite number"),
        ({"alpha": None}, "alpha is None; expected a finite number"),
        ({"eps": -1e-9}, "eps is -1e-09; expected a finite number of at least 0"),
        ({"eps": math.inf}, "eps is inf; expected a finite number"),
        (
            {"beta": -0.5},
            r"beta is -0\.5; expected a number of at least 0, or a function of the number of batches",
        ),
        ({"beta": math.nan}, "beta is nan; expected a number"),
        ({"beta": "linear"}, "beta is 'linear'; expected a number of at least 0, or a function"),
        ({"beta": None}, "beta is None; expected a number"),
        ({"normalize": "max"}, "normalize is 'max'; expected 'batch' or 'table'"),
        ({"normalize": None}, "normalize is None; expected 'batch' or 'table'"),
    ],
)
def test_wrong_options_of_prioritized_are_refused(options: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Prioritized(**options)


def test_wrong_options_of_topk_are_refused() -> None:
    with pytest.raises(SchemaError, match="largest is 1; expected True or False"):
        gear.TopK(1)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="unit is 'window'; expected 'trajectory' or 'step'"):
        gear.TopK(unit="window")  # type: ignore[arg-type]


# ---------------------------------------------------------------- schedules


def test_a_linear_schedule_goes_from_start_to_end_and_stays() -> None:
    up, down = gear.LinearSchedule(0.4, 1.0, batches=6), gear.LinearSchedule(1, 0, 2)
    assert [up(number) for number in range(7)] == pytest.approx([0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 1.0])
    assert [up(number) for number in (6, 7, 10**9)] == [1.0] * 3
    assert [down(number) for number in range(4)] == [1, 0.5, 0, 0]


@pytest.mark.parametrize(
    ("start", "end", "batches"),
    [(math.nan, 1, 5), (0, math.inf, 5), (0, 1, 0), (0, 1, -3), (0, 1, math.inf), ("0", 1, 5), (0, 1, None)],
)
def test_a_wrong_schedule_is_refused(start: Any, end: Any, batches: Any) -> None:
    message = r"^LinearSchedule\(start=.*\) is no schedule; expected finite numbers and at least 1 batch"
    with pytest.raises(SchemaError, match=message):
        gear.LinearSchedule(start, end, batches)


def test_beta_by_number_of_batches() -> None:
    assert gear.Prioritized(beta=0).beta_at(7) == 0
    assert gear.Prioritized(beta=np.float32(0.5)).beta_at(7) == 0.5
    assert gear.Prioritized(beta=gear.LinearSchedule(0, 1, 10)).beta_at(3) == pytest.approx(0.3)
    assert gear.Prioritized(beta=schedule).beta_at(6) == 1.5


@pytest.mark.parametrize("value", [-0.1, math.nan, math.inf, None, "1", True])
def test_a_schedule_that_returns_no_beta(value: Any) -> None:
    selector = gear.Prioritized(beta=lambda number: value if number == 3 else 1)
    assert selector.beta_at(2) == 1
    with pytest.raises(
        SchemaError, match=r"The schedule .* gave .* for batch 3; expected a finite number of at"
    ):
        selector.beta_at(3)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"eps": 1e39}, r"eps is 1e\+39 and alpha 0.6; expected an eps of at most 3.4e\+38"),
        ({"eps": 3.4e38, "alpha": 1.1}, r"\(1 \+ eps\) \*\* alpha of at most that"),
        ({"eps": 2.0**64, "alpha": 2}, r"eps is .* and alpha 2; .* Use a smaller eps"),
        ({"alpha": 1e300}, r"alpha is 1e\+300; expected at most 16: .* only priorities close to 1"),
        ({"alpha": 16.5}, r"alpha is 16.5; expected at most 16"),
        ({"alpha": 10**400}, "alpha is 1000.*; expected a finite number of at least 0"),
        ({"beta": 10**400}, "beta is 1000.*; expected a number of at least 0"),
    ],
)
def test_options_that_float32_cannot_hold(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Prioritized(**options)


def test_options_at_their_limits() -> None:
    largest = float(np.finfo(np.float32).max)
    for options in ({"eps": largest}, {"alpha": 16}, {"alpha": 2, "eps": 1.8e19}, {"alpha": 1e-300}):
        gear.Prioritized(**options)  # type: ignore[arg-type]
