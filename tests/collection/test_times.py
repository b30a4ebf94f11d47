"""Windows of times (`Window.timestamps`): the steps that are nearest to them, against the oracle."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import oracle
import pytest
import torch
from cases import examples
from hypothesis import given, settings
from hypothesis import strategies as st
from table_common import fresh_name
from transport_common import SECRET, serving

import gear_loader as gear
from gear_loader.collection import timed
from gear_loader.errors import SchemaError
from gear_loader.native.nearest import EARLIER, INVALID, LATER, RESOLVED, nearest_steps

SCHEMA = {
    "time": gear.Column(torch.float64),
    "tick": gear.Column(torch.int64, (1,)),
    "step": gear.Column(torch.int64),
    "image": gear.Column(torch.uint8, (3, 2)),
    "tokens": gear.Column(torch.int32, (None,)),
    "text": gear.Column(str),
    "packed": gear.Column(torch.int16, (4,), codec="zstd"),
}
FIRST_TICK = 1_700_000_000_000_000_000  # nanoseconds, of which float64 has no single ones


def trajectory(number: int) -> dict[str, Any]:
    """Times at random distances, some equal, some far apart."""
    rng = np.random.default_rng(number)
    length = int(rng.integers(1, 150))
    gaps = rng.choice([0.0, 0.01, 0.1, 0.105, 3.0], length, p=[0.1, 0.4, 0.3, 0.15, 0.05])
    return {
        "time": number + np.cumsum(gaps),
        "tick": (FIRST_TICK + np.cumsum((gaps * 1000).astype(np.int64)))[:, None],
        "step": 1000 * number + np.arange(length),
        "image": (number + np.arange(6 * length)).reshape(length, 3, 2).astype(np.uint8),
        "tokens": [np.arange(i % 4, dtype=np.int32) + i for i in range(length)],
        "text": [f"{number}/{i}" for i in range(length)],
        "packed": np.arange(4 * length).reshape(length, 4).astype(np.int16),
    }


TRAJECTORIES = [trajectory(number) for number in range(12)]
PLAIN = ("time", "tick", "step", "image", "packed")


@pytest.fixture(scope="module")
def table() -> Any:
    sizes: dict[str, Any] = {"max_steps": 9000, "max_trajectories": 40, "block_steps": 8}
    with gear.Table.create(SCHEMA, memory=gear.Memory(payload="1MiB"), **sizes) as made:
        made.extend(TRAJECTORIES)
        yield made


def check(batch: dict[str, Any], windows: dict[str, gear.Window]) -> None:
    """A batch against the oracle; of text and tokens, that each is of the step that another window shows."""
    rows = [
        oracle.Row(int(index), int(anchor))
        for index, anchor in zip(batch["index"], batch["anchor"], strict=True)
    ]
    schema = {**SCHEMA, "packed": gear.Column(torch.int16, (4,))}
    plain = {name: window for name, window in windows.items() if (window.column or name) in PLAIN}
    expected = oracle.batch(schema, TRAJECTORIES, rows, plain)
    for name in plain:
        np.testing.assert_array_equal(batch[name], expected[name], err_msg=name)
        np.testing.assert_array_equal(batch["mask"][name], expected["masks"][name], err_msg=name)
    values = batch["tokens"].tolist()
    for row, numbers in enumerate(expected["step"]):
        for place, number in enumerate(numbers.tolist()):
            there = expected["masks"]["step"][row, place] or windows["step"].pad == "edge"
            trajectory, step = divmod(number, 1000)
            assert batch["text"][row][place] == (f"{trajectory}/{step}" if there else "")
            tokens = values[row][place].tolist()
            assert tokens == (TRAJECTORIES[trajectory]["tokens"][step].tolist() if there else [])


def windows_at(
    pad: Any, at: Any = (-4.0, -0.1, 0.0, 0.105), tolerance: float = 0.004
) -> dict[str, gear.Window]:
    timed = gear.Window(at=at, timestamps="time", tolerance=tolerance, pad=pad)
    ticks = gear.Window(at=[-100, 3100], timestamps="tick", tolerance=5, pad=pad, column="image")
    return {
        **dict.fromkeys(("step", "image", "tokens", "text", "packed"), timed),
        "half": gear.Window(
            at=[0.1], timestamps="time", tolerance=0.01, column="image", dtype=torch.float32, scale=0.5
        ),
        "ticks": ticks,
        "now": gear.Window(at=[0.0], timestamps="time", column="time", squeeze=True),
        "next": gear.Window(2, column="time"),
    }


def test_steps_far_from_the_anchors_take_no_more_memory_than_near_ones(
    table: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(timed, "_MOST_TIMES", 1000)
    reads, line = list[int](), timed.TimedSource._line

    def counted(*given: Any) -> Any:
        found = line(*given)
        reads.append(found[0].size)
        return found

    monkeypatch.setattr(timed.TimedSource, "_line", counted)
    windows = windows_at("edge", at=(-1e9, 0.0, 1e9))
    data = gear.ReplayDataset(
        table, batch_size=100, windows=windows, sampler=gear.Uniform(unit="step"), device="cpu"
    )
    for _ in range(2):
        check(data.sample(), windows)
    assert len(reads) > 20
    assert max(reads) <= 1000


@pytest.mark.parametrize("pad", ["keep", "edge"])
def test_batches_have_the_nearest_steps(table: Any, pad: Any) -> None:
    windows = windows_at(pad)
    options: dict[str, Any] = {
        "sampler": gear.Uniform(replacement=False, unit="step"),
        "device": "cpu",
        "seed": 1,
    }
    data = gear.ReplayDataset(table, batch_size=500, windows=windows, **options)
    kept = list(data)  # the last one has fewer rows
    assert len(kept) > 1
    for batch in kept:
        check(batch, windows)
    check(table.gather(kept[0]["index"][:40], kept[0]["anchor"][:40], windows=windows), windows)
    single = gear.Window(at=[-0.1, 0.0], timestamps="time")
    alone = gear.ReplayDataset(
        table, batch_size=8, windows=single, columns=["image", "step"], **options
    ).sample()
    assert alone["mask"].shape == (8, 2)
    assert alone["image"].shape == (8, 2, 3, 2)


def test_a_server_draws_the_same(table: Any) -> None:
    sizes: dict[str, Any] = {"max_steps": 9000, "max_trajectories": 40, "block_steps": 8}
    windows = windows_at("keep")
    options: dict[str, Any] = {"batch_size": 16, "windows": windows, "device": "cpu", "seed": 2}
    name = fresh_name()
    with gear.Table.create(SCHEMA, memory=gear.Memory(payload="1MiB"), name=name, **sizes) as served:
        served.extend(TRAJECTORIES)
        try:
            with (
                serving(name) as server,
                gear.connect(f"{server.address.replace('socket', 'gear')}/{name}", secret=SECRET) as remote,
            ):
                batch = gear.ReplayDataset(remote, **options).sample()
        finally:
            served.unlink()
    check(batch, windows)
    assert batch["step"].equal(gear.ReplayDataset(table, **options).sample()["step"])


@settings(max_examples=examples(150), deadline=None)
@given(
    gaps=st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.5]), min_size=1, max_size=12),
    anchor=st.integers(0, 11),
    at=st.lists(st.sampled_from([-6.0, -1.0, -0.75, 0.0, 0.25, 0.5, 2.0]), min_size=1, max_size=4),
    tolerance=st.sampled_from([0.0, 0.25, 1.0]),
    reach=st.integers(0, 12),
    edge=st.booleans(),
)
def test_what_is_read_of_a_trajectory_suffices_or_more_is_asked_for(
    gaps: list[float], anchor: int, at: list[float], tolerance: float, reach: int, edge: bool
) -> None:
    times, anchor = np.cumsum(gaps), anchor % len(gaps)
    distances = np.abs(times - times[anchor] - np.array(at)[:, None])
    expected, fit = distances.argmin(axis=1), distances.min(axis=1) <= tolerance
    steps = anchor - reach + np.arange(2 * reach + 1)
    there = (steps >= 0) & (steps < len(times))
    line = np.where(there, times[np.clip(steps, 0, len(times) - 1)] - times[anchor], np.nan)
    found, fits = np.full((1, len(at)), -7), np.zeros((1, len(at)), bool)
    states = np.zeros(1, np.uint8)
    nearest_steps(
        line[None],
        there[None],
        np.array([anchor - reach]),
        np.array(at),
        tolerance,
        edge,
        found,
        fits,
        states,
    )
    if states[0] == RESOLVED:
        assert found[0].tolist() == np.where(fit | edge, expected, -1).tolist()
        assert fits[0].tolist() == fit.tolist()
    else:
        assert not states[0] & INVALID
        assert steps[0] > 0 or not states[0] & EARLIER
        assert steps[-1] < len(times) - 1 or there[-1] or not states[0] & LATER


# ---------------------------------------------------------------- what is refused

ERRORS: list[tuple[dict[str, Any], str]] = [
    ({"at": None}, "Window at is None, with timestamps='time'; expected a sequence of times"),
    ({"at": []}, "expected a sequence of times from that of the anchor"),
    ({"at": [0.0, float("nan")]}, "Window at has nan; expected finite numbers"),
    ({"timestamps": 3}, "Window timestamps is 3"),
    ({"timestamps": None, "tolerance": 1.0}, "Window timestamps is None and tolerance 1.0"),
    ({"tolerance": -1.0}, "tolerance -1.0; expected the name of a column, and a number of at least 0"),
    ({"fps": 10}, "with fps=10, .*expected `at` without them"),
    ({"offset": 1}, "offset=1 .*expected `at` without them"),
    ({"every": 2}, "every=2, .*expected `at` without them"),
    ({"pad": "head"}, "and pad 'keep' or 'edge'"),
]


@pytest.mark.parametrize(("options", "words"), ERRORS)
def test_invalid_windows_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(SchemaError, match=words):
        gear.Window(**{"at": [0.0], "timestamps": "time", **options})


def test_what_does_not_go_with_times_is_refused(table: Any) -> None:
    def dataset(windows: Any, **options: Any) -> Any:
        return gear.ReplayDataset(table, batch_size=4, windows=windows, device="cpu", **options)

    timed = gear.Window(at=[0.0], timestamps="time")
    for other in ("nothing", "text", "image"):
        with pytest.raises(
            SchemaError, match=f"'step' has timestamps='{other}', which is .*a column of numbers"
        ):
            dataset({"step": gear.Window(at=[0.0], timestamps=other)})
    with pytest.raises(SchemaError, match="expected windows of steps: those of times are known when"):
        dataset({"step": timed}, draws=gear.Draws(complete=True))
    with pytest.raises(SchemaError, match="rows that are packed have no padding"):
        dataset({"step": timed}, layout="packed")
    with pytest.raises(
        SchemaError, match=r"of ragged columns, with timestamps, or .*; expected none in a Mixture"
    ):
        gear.Mixture({"one": (dataset({"step": timed}), 1.0)}, batch_size=4)
    with pytest.raises(SchemaError, match=r"reads a ragged column.* with dtype or scale"):
        dataset({"tokens": gear.Window(at=[0.0], timestamps="time", dtype=torch.float32)})
    with pytest.raises(SchemaError, match=r"the windows \['step'\] have every or at, whose steps lie apart"):
        table.gather([0], [0], windows={"step": timed}, out={"step": torch.empty(1, 1, dtype=torch.int64)})


@pytest.mark.parametrize("wrong", [-1.0, float("nan"), float("inf")])
def test_times_that_do_not_ascend_are_an_error_that_names_them(wrong: float, tmp_path: Path) -> None:
    with gear.Table.create({"time": gear.Column(torch.float32)}, max_steps=99, max_trajectories=3) as table:
        table.add({"time": np.arange(9, dtype=np.float32)})
        times = np.arange(9, dtype=np.float32)
        times[5] = wrong
        table.add({"time": times})
        windows = {"time": gear.Window(at=[1.0], timestamps="time")}
        assert table.gather([0], [8], windows=windows)["mask"].tolist() == [[False]]
        with pytest.raises(
            SchemaError, match=r"Column 'time' of trajectory 1 falls after step [45], or is no finite"
        ):
            table.gather([0, 1], [0, 4], windows=windows)
