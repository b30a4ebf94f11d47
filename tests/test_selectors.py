"""Uniform selection: frequencies, epochs without replacement, anchors."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
from dataset_common import chi_square, chi_square_limit

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.index import Snapshot
from gear_loader.selectors import Draw, anchors, replacements

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


@pytest.mark.parametrize("replacement", [True, False])
@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_repr_names_the_options(replacement: bool, unit: Any) -> None:
    selector = gear.Uniform(replacement=replacement, unit=unit)
    assert repr(selector) == f"Uniform(replacement={replacement}, unit={unit!r})"
    assert repr(eval(repr(selector), {"Uniform": gear.Uniform})) == repr(selector)


def test_items_of_an_empty_snapshot() -> None:
    empty = snapshot_of(())
    assert gear.Uniform().num_items(empty) == 0
    assert gear.Uniform(unit="step").num_items(empty) == 0


def test_wrong_options_are_refused() -> None:
    with pytest.raises(SchemaError, match="replacement is 'no'; expected True or False"):
        gear.Uniform(replacement="no")  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="replacement is 1; expected True or False"):
        gear.Uniform(replacement=1)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="unit is 'window'; expected 'trajectory' or 'step'"):
        gear.Uniform(unit="window")  # type: ignore[arg-type]
