"""Mixtures of datasets: shares, draws of each dataset, workers, and states."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import chi_square, chi_square_limit, equal
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested
from table_common import fresh_name
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.errors import SchemaError

ONCE = gear.Uniform(replacement=False)


def make(first: int, count: int = 20, **options: Any) -> gear.Table:
    schema = {"x": gear.Column(torch.int32), "number": gear.Column(torch.int64, per="trajectory")}
    table = gear.Table.create(schema, max_steps=400, max_trajectories=60, **options)
    for number in range(first, first + count):
        table.add({"x": torch.arange(1 + number % 7, dtype=torch.int32), "number": number})
    return table


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": gear.Window(2),
        "batch_size": 4,
        "device": "cpu",
        "prefetch": 0,
        **options,
    }
    return gear.ReplayDataset(table, **nested(given))


@pytest.fixture
def tables() -> Iterator[tuple[gear.Table, gear.Table]]:
    with make(0) as one, make(100) as other:
        yield one, other


def mixture(tables: Any, parts: Any = (1, 1), each: Any = ({}, {}), **options: Any) -> gear.Mixture:
    sources = {
        name: (dataset(table, **own), share)
        for name, table, share, own in zip(("a", "b"), tables, parts, each, strict=True)
    }
    return gear.Mixture(sources, **{"batch_size": 10, "batches_per_epoch": 12, **options})


def check(batch: Any) -> list[int]:
    """Rows of each source, whose tables hold numbers below 100, and from there on."""
    assert ((batch["number"] >= 100) == (batch["source"] == 1)).all()
    assert (batch["source"].diff() >= 0).all()
    return torch.bincount(batch["source"], minlength=2).tolist()


@given(
    shares=st.lists(st.floats(0, 10), min_size=2, max_size=2).filter(lambda shares: sum(shares) > 0.01),
    size=st.integers(1, 40),
)
def test_exact_shares_are_off_by_less_than_a_row(shares: list[float], size: int) -> None:
    with make(0, 5) as one, make(100, 5) as other:
        mixed = mixture((one, other), shares, batch_size=size)
        wanted = np.array(shares) / sum(shares) * size
        total = np.zeros(2)
        for number in range(30):
            rows = np.array(list(mixed.counts(number).values()))
            total += rows
            assert rows.sum() == size
            assert (np.abs(total - wanted * (number + 1)) < 1 + 1e-6).all()
            assert (np.abs(rows - wanted) < 2).all()
        assert mixed.counts(3) == mixture((one, other), shares, batch_size=size).counts(3)


def test_whole_shares_are_those_of_every_batch(tables: Any) -> None:
    mixed = mixture(tables, (3, 1), batch_size=8)
    batches = list(mixed)
    assert len(batches) == len(mixed) == 12
    assert [check(batch) for batch in batches] == [[6, 2]] * 12


def test_an_endless_mixture_goes_on_and_resumes(tables: Any) -> None:
    with pytest.raises(TypeError, match="has no length"):
        len(mixture(tables, batches_per_epoch=math.inf))
    whole = list(itertools.islice(mixture(tables, batches_per_epoch=math.inf), 9))
    mixed = mixture(tables, batches_per_epoch=math.inf)
    found = [*itertools.islice(mixed, 3), *itertools.islice(mixed, 2)]
    state = mixed.state_dict()
    again = mixture(tables, batches_per_epoch=math.inf)
    again.load_state_dict(state)
    found += itertools.islice(again, 2)
    found += itertools.islice(again, 2)
    for one, other in zip(whole, found, strict=True):
        assert torch.equal(one["number"], other["number"])


def test_expected_shares_are_frequencies(tables: Any) -> None:
    mixed = mixture(tables, (3, 1), shares="expected", batch_size=400, seed=3)
    rows = np.array([list(mixed.counts(number).values()) for number in range(20)])
    assert chi_square(rows.sum(0), np.array([6000.0, 2000.0])) < chi_square_limit(1)
    assert len({tuple(each) for each in rows.tolist()}) > 10
    assert check(next(iter(mixed))) == rows[0].tolist()


def test_a_schedule_gives_the_shares(tables: Any) -> None:
    later = gear.LinearSchedule(0.0, 1.0, 10)
    mixed = mixture(tables, schedule=lambda number: {"a": 1 - later(number), "b": later(number)})
    assert [check(batch) for batch in mixed] == [[10 - n, n] for n in range(10)] + [[0, 10]] * 2
    for bad in ({"a": 1}, {"a": 0, "b": 0}, {"a": 1, "b": float("nan")}, 3):
        with pytest.raises(SchemaError, match="share"):
            next(iter(mixture(tables, schedule=lambda number, bad=bad: bad)))


def test_every_dataset_draws_as_alone(tables: Any) -> None:
    each = ({"sampler": ONCE, "seed": 3}, {"sampler": gear.Fifo(False), "seed": 4})
    mixed = mixture(tables, each=each, batch_size=7)
    numbers = torch.cat([batch["number"] for batch in mixed]).numpy()
    alone = [dataset(table, **own) for table, own in zip(tables, each, strict=True)]
    for single, found in zip(alone, (numbers[numbers < 100], numbers[numbers >= 100]), strict=True):
        assert len(found) == 42
        assert (
            sorted(found[:20]) == sorted(found[20:40]) == sorted(single.table[i]["number"] for i in range(20))
        )
        expected: list[int] = []
        while len(expected) < 42:  # passes end inside batches
            expected += single.sample(min(20 - len(expected) % 20, 42 - len(expected)))["number"].tolist()
        assert found.tolist() == expected


TARGET = {"x": gear.Window(2), "target": gear.NStep("x", 3, 0.9, "x", next="x")}
KINDS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "uniform": ({}, {}, {}),
    "converted": ({"windows": {"x": gear.Window(2, dtype=torch.float32, scale=0.5), "number": None}},) * 2
    + ({},),
    "n-step returns": ({"windows": TARGET}, {"windows": TARGET}, {"shares": "expected"}),
    "one weighs": ({"sampler": gear.Prioritized()}, {}, {}),
    "passes end inside": ({"sampler": ONCE}, {"sampler": ONCE}, {"batch_size": 30, "parts": (1, 2)}),
    "shares that vary": ({"sampler": gear.Fifo()}, {}, {"parts": (1, math.pi)}),
}


@pytest.mark.parametrize("kind", KINDS)
def test_rows_gathered_into_their_places_are_those_of_joined_batches(
    kind: str, tables: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    *each, options = KINDS[kind]

    def run() -> list[Any]:
        mixed = mixture(tables, each=each, **options)
        assert (mixed._mixed_batches() is None) == joins
        kept = [*itertools.islice(mixed, 5), mixed.sample(), mixed.sample()]
        mixed.update_priority(kept[-1], torch.arange(len(kept[-1]["source"]), dtype=torch.float32))
        return [*kept, *itertools.islice(mixed, 3), mixed.sample()]

    joins = False
    found = run()
    joins = True
    monkeypatch.setattr("gear_loader.dataset.mixture.can_mix", lambda _: False)
    torch.testing.assert_close(found, run(), rtol=0, atol=0)


def test_packed_batches_are_joined(tables: Any) -> None:
    own = {"windows": gear.Whole(), "layout": "packed", "sample_info": True}
    mixed = mixture(tables, each=(own, own))
    for batch in mixed:
        check(batch)
        starts = batch["cu_seqlens"].tolist()
        assert [b - a for a, b in itertools.pairwise(starts)] == (1 + batch["number"] % 7).tolist()
        assert batch["max_seqlen"] == max(b - a for a, b in itertools.pairwise(starts))
        assert torch.equal(batch["x"], batch["position"])
        assert starts[-1] == len(batch["x"])
        assert batch["sample_info"]["age"].shape == (10,)


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_workers_give_the_same_batches(workers: int) -> None:
    names = [fresh_name(), fresh_name()]
    with make(0, name=names[0]) as one, make(100, name=names[1]) as other:
        try:
            own = ({"sampler": ONCE}, {})
            mixed = mixture((one, other), (2, 1), own)
            plain = [batch for _ in range(2) for batch in mixed]
            loader = DataLoader(mixture((one, other), (2, 1), own), batch_size=None, num_workers=workers)
            found = [batch for _ in range(2) for batch in loader]
            assert len(found) == len(plain) == 24
            assert all(equal(a, b) for a, b in zip(found, plain, strict=True))
        finally:
            one.unlink()
            other.unlink()


@pytest.mark.parametrize("stop", [0, 5, 12, 17])
@pytest.mark.parametrize("shares", ["exact", "expected"])
def test_a_mixture_resumes(tables: Any, stop: int, shares: str) -> None:
    own = ({"sampler": ONCE}, {"sampler": gear.Prioritized()})

    def made() -> gear.Mixture:
        return mixture(tables, (2, 1), own, shares=shares)

    def endless(mixed: gear.Mixture) -> Iterator[Any]:
        while True:
            yield from mixed

    def step(mixed: gear.Mixture, batches: Iterator[Any]) -> Any:
        batch = next(batches)
        mixed.update_priority(batch, (batch["number"] % 5 + 1).float())
        return batch

    mixed = made()
    batches = endless(mixed)
    for _ in range(stop):
        step(mixed, batches)
    again = made()
    again.load_state_dict(mixed.state_dict())
    others = endless(again)
    for _ in range(15):
        assert equal(step(mixed, batches), step(again, others))
    with pytest.raises(SchemaError, match="options"):
        mixture(tables, (1, 1), own, shares=shares).load_state_dict(mixed.state_dict())


@pytest.mark.parametrize("shares", ["exact", "expected"])
def test_single_batches_are_a_stream_of_their_own(tables: Any, shares: str) -> None:
    def made() -> gear.Mixture:
        return mixture(tables, (2, 1), ({"sampler": ONCE}, {}), shares=shares)

    plain, mixed, again = list(made()), made(), made()
    batches, singles = iter(mixed), []
    for expected in plain[:9]:  # between the batches of an epoch
        singles.append(mixed.sample())
        assert equal(next(batches), expected)
    assert not any(equal(a, b) for a, b in zip(singles, plain, strict=False))
    rows = [sum(check(batch)[:1]) for batch in singles]
    assert rows == [7, 6, 7] * 3 or shares == "expected"
    offline = [x for batch in singles for x in batch["number"][batch["source"] == 0].tolist()]
    assert len(set(offline[:20])) == 20  # a pass
    for expected in singles[:4]:
        assert equal(again.sample(), expected)
    resumed = made()
    resumed.load_state_dict(again.state_dict())
    assert equal(resumed.sample(), singles[4])


def test_priorities_go_to_the_datasets_that_draw_by_them(tables: Any) -> None:
    own = ({}, {"sampler": gear.Prioritized()})
    mixed = mixture(tables, each=own, batch_size=200)
    batch = next(iter(mixed))
    assert (batch["priority_weight"][batch["source"] == 0] == 1).all()
    mixed.update_priority(batch, (batch["number"] == 105).float())
    numbers = next(iter(mixed))["number"]
    assert set(numbers[numbers >= 100].tolist()) == {105}
    assert len(set(numbers[numbers < 100].tolist())) > 10
    with pytest.raises(SchemaError, match="one number for each row"):
        mixed.update_priority(batch, torch.ones(3))


def test_options_that_do_not_fit(tables: Any) -> None:
    one, other = (dataset(table) for table in tables)
    sizes: dict[str, Any] = {"batch_size": 4, "batches_per_epoch": 2}
    for sources in ({}, {"a": one}, [one], {"a": (one, 1), "b": (one, 1)}, {"a": (one, -1)}, {"a": (one, 0)}):
        with pytest.raises(SchemaError):
            gear.Mixture(sources, **sizes)  # type: ignore[arg-type]
    with pytest.raises(SchemaError, match="windows"):
        gear.Mixture({"a": (one, 1), "b": (dataset(tables[1], windows=gear.Window(3)), 1)}, **sizes)
    named = dataset(tables[1], windows={"x": gear.Window(2), "number": None})
    with pytest.raises(SchemaError, match="a mapping as windows"):
        gear.Mixture({"a": (one, 1), "b": (named, 1)}, **sizes)
    jagged = dataset(tables[1], windows=gear.Whole(), layout="jagged")
    with pytest.raises(SchemaError, match="layout='jagged', groups, or whole"):
        gear.Mixture({"a": (jagged, 1)}, **sizes)
    for option in (
        {"batch_size": 0},
        {"batches_per_epoch": 0},
        {"shares": "some"},
        {"schedule": 3},
        {"seed": 0.5},
    ):
        with pytest.raises(SchemaError):
            gear.Mixture({"a": (one, 1), "b": (other, 1)}, **{**sizes, **option})
    assert "exact shares a: 0.5, b: 0.5" in repr(gear.Mixture({"a": (one, 1), "b": (other, 1)}, **sizes))
