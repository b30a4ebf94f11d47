"""Selection: what draws wrongly is found and left out, or ends the run if it is ours."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from benchmarks_common import check_row, rows_of, session

from benchmarks import harness
from benchmarks import selection as subjects
from benchmarks.experiments import select
from benchmarks.peers import select as peers

# What is drawn ---------------------------------------------------------------------------------------


class Right(peers.Subject):  # type: ignore[misc, name-defined]
    """Draws as it should, unless told otherwise."""

    def __init__(self, truth: Any, power: float = 1.0, drawn_power: float = 1.0, fault: str = "") -> None:
        self.items, self.power, self._drawn_power, self._fault = truth.items, power, drawn_power, fault
        self._priorities = truth.priorities.copy()
        self._random = np.random.default_rng(5)
        self.log: list[Any] = []

    def draw(self, batch: int) -> Any:
        self.log.append("draw")
        leaves = self._priorities.astype(np.float64) ** self._drawn_power
        items = self._random.choice(self.items, batch, p=leaves / leaves.sum())
        if self._fault == "outside":
            items[0] = self.items
        elif self._fault == "pairs":
            items &= ~1
        return items, leaves[items % self.items] * (2 if self._fault == "leaves" else 1)

    def update(self, drawn: Any, values: Any) -> None:
        self.log.append("update")
        if self._fault != "updates":
            self._priorities[drawn[0]] = values

    def found(self, drawn: Any) -> Any:
        return drawn

    def chosen(self, items: np.ndarray) -> Any:
        return items, None


def look(subject: Any, truth: Any) -> None:
    sizes = select.Sizes((truth.items,), (32, 1000), draws=1 << 14)
    select.check(subject, truth, sizes)


@pytest.mark.parametrize("power", [1.0, peers.ALPHA])
def test_right_draws_pass_and_priorities_are_put_back(power: float) -> None:
    truth = subjects.Truth(3001, 1)
    values = truth.priorities
    assert values.dtype == np.float32
    assert 0 < values.min() < 0.01 < 0.99 < values.max() <= 1
    assert np.array_equal(values, subjects.Truth(3001, 1).priorities)
    subject = Right(truth, power, power)
    for _ in range(2):
        look(subject, truth)
    assert np.array_equal(subject._priorities, values)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"drawn_power": 0.8}, "weigh what their priorities say"),
        ({"fault": "leaves"}, "weigh what their priorities say"),
        ({"fault": "outside"}, "item 3001 was drawn, of 3001"),
        ({"fault": "pairs"}, "draws are not in proportion to the weights, by up to"),
        ({"fault": "updates"}, "items whose priorities were set: draws are not in proportion"),
    ],
)
def test_wrong_draws_are_found(options: dict[str, Any], message: str) -> None:
    truth = subjects.Truth(3001, 1)
    with pytest.raises(harness.Incorrect, match=message):
        look(Right(truth, **options), truth)
    if "drawn_power" in options:  # without leaves the draws alone show it, and by how much
        for power, least, most in ((0.0, 1.0, 99.0), (0.8, 0.1, 0.9)):
            subject = Right(truth, drawn_power=power)
            subject.found = lambda drawn: (drawn[0], None)
            with pytest.raises(subjects.Biased, match=r"^priorities: draws are not in proportion") as caught:
                look(subject, truth)
            assert least < caught.value.deviation < most


@pytest.mark.parametrize("kind", select.cpu_kinds(), ids=lambda kind: kind.name)
def test_each_variant_on_the_cpu_draws_what_it_should(kind: Any) -> None:
    truth = subjects.Truth(777, 2)
    with contextlib.closing(kind.build(truth)) as subject:
        look(subject, truth)
        for operation in peers.OPERATIONS:
            for batches in (1, 3):
                assert peers.measure(subject, operation, 16, batches, np.random.default_rng(0)) > 0


def test_measuring_does_what_it_says() -> None:
    subject, random = Right(subjects.Truth(100, 2)), np.random.default_rng(0)
    for operation, batches, log in (
        ("draw", 3, ["draw"] * 4),  # one more, that is not timed
        ("update", 3, ["update"] * 4),
        ("cycle", 3, ["draw", "update"] * 4),
        ("draw", 1, ["draw"]),
    ):
        subject.log.clear()
        peers.measure(subject, operation, 8, batches, random)
        assert subject.log == log


def test_variants_that_fail_are_left_out_but_ours_end_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def wrong(truth: Any) -> Any:
        return Right(truth, fault="pairs")

    def inexact(truth: Any) -> Any:
        subject = Right(truth, drawn_power=0.9)
        subject.found = lambda drawn: (drawn[0], None)
        return subject

    def broken(truth: Any) -> Any:
        raise ValueError("no")

    kinds = [
        select.Kind("ours", Right, 1, ours=True, limit={8: 9.0}),
        select.Kind("wrong", wrong, 1),
        select.Kind("broken", broken, 1),
        select.Kind("small", Right, 1, most=100, why="it is small"),
        select.Kind("huge", Right, 1e12),
        select.Kind("inexact", inexact, 1),
    ]
    sizes = select.Sizes((1000,), (8,), seconds=1e-4, draws=1 << 14)
    out = tmp_path / "rows.jsonl"
    made = session(out, 2, "select")
    select.measured(made, kinds, sizes)
    rows = rows_of(out)
    for row in rows:
        check_row(row, "select")
    assert [(row["variant"], row["workload"], row.get("limit")) for row in rows] == [
        (variant, operation, 9.0 if (variant, operation) == ("ours", "cycle") else None)
        for operation in peers.OPERATIONS
        for variant in ("ours", "inexact")
    ]
    assert ["bias" in row["parameters"] for row in rows] == [False, True] * 3
    assert "inexact *" in capsys.readouterr().out
    reasons = "\n".join(made.reasons)
    for reason in (
        "inexact (*): inexact, 1,000 items: ",
        "left out: wrong, 1,000 items: priorities: draws are not in proportion",
        "broken, 1,000 items: ValueError: no",
        "small, 1,000 items: it is small",
        "huge, 1,000 items: it needs about 1000000 GB of memory",
    ):
        assert reason in reasons
    kinds[1] = select.Kind("wrong", wrong, 1, ours=True)
    with pytest.raises(harness.Incorrect, match="wrong, 1,000 items: priorities: draws"):
        select.measured(made, kinds, sizes)
    assert rows_of(out) == rows
