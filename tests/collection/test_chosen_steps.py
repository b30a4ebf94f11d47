"""Windows with `every` and `at`: some steps of a trajectory, against longer windows of which they are taken."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.errors import SchemaError

AT = (-6, 2, -1, 2)


@pytest.fixture(scope="module")
def table() -> Any:
    columns: dict[str, Any] = {
        "obs": gear.Column(torch.float32, (3,), final=True),
        "image": gear.Column(torch.uint8, (5, 7)),
        "reward": gear.Column(torch.float32),
        "task": gear.Column(torch.int64, per="trajectory"),
    }
    with gear.Table.create(columns, max_steps=400, max_trajectories=40, block_steps=4) as made:
        rng = np.random.default_rng(0)
        for task, length in enumerate(rng.integers(1, 20, 20)):
            made.add(
                {
                    "obs": rng.normal(size=(length, 3)).astype(np.float32),
                    "image": rng.integers(0, 256, (length, 5, 7), dtype=np.uint8),
                    "reward": rng.normal(size=length).astype(np.float32),
                    "task": task,
                },
                final={"obs": rng.normal(size=3).astype(np.float32)},
            )
        yield made


def taken(long: torch.Tensor, steps: tuple[int, ...], first: int) -> torch.Tensor:
    """The steps, relative to the anchor, of windows that begin at `first`."""
    return long[:, [step - first for step in steps]]


@pytest.mark.parametrize("pad", ["keep", "edge"])
@pytest.mark.parametrize(
    ("window", "steps"), [({"length": 4, "offset": -6, "every": 3}, (-6, -3, 0, 3)), ({"at": AT}, AT)]
)
def test_steps_are_those_of_the_longer_window(
    table: Any, window: dict[str, Any], steps: tuple[int, ...], pad: Any
) -> None:
    chosen, long = gear.Window(**window, pad=pad), gear.Window(10, -6, pad=pad)
    windows = {
        "obs": chosen,
        "half": gear.Window(**window, pad=pad, column="image", dtype=torch.float16, scale=1 / 255),
        "image": chosen,
        "now": gear.Window(1, column="image", squeeze=True),
        "task": None,
        "target": gear.NStep("reward", n=2, gamma=0.9, done="reward", next="obs"),
    }
    options: dict[str, Any] = {
        "batch_size": 64,
        "seed": 1,
        "sampler": gear.Uniform(unit="step"),
        "device": "cpu",
    }
    batch = gear.ReplayDataset(table, windows=windows, **options).sample()
    longer = {"obs": long, "image": long}
    whole = gear.ReplayDataset(table, windows=longer, **options).sample()
    rows = table.gather(batch["index"], batch["anchor"], windows=windows)
    for name in ("obs", "image"):
        assert batch[name].equal(taken(whole[name], steps, -6))
        assert batch["mask"][name].equal(taken(whole["mask"][name], steps, -6))
        assert rows[name].equal(batch[name])
        assert rows["mask"][name].equal(batch["mask"][name])
    assert batch["half"].equal((batch["image"] * (1 / 255)).to(torch.float16))
    assert batch["now"].equal(whole["image"][:, 6])


def test_one_kind_of_windows_has_one_mask_and_others_a_shared_step(table: Any) -> None:
    rows, anchors = table.indices()[:5], [0] * 5
    alike = table.gather(rows, anchors, windows=gear.Window(at=[-2, 0], column=None))
    assert isinstance(alike["mask"], dict)  # a final step exists for obs alone
    one = table.gather(
        rows, anchors, windows={"image": gear.Window(at=[-2, 0]), "reward": gear.Window(at=[-2, 0])}
    )
    assert one["mask"].tolist() == [[False, True]] * 5
    shared = table.gather(
        rows,
        anchors,
        windows={
            "image": gear.Window(at=[0, -2]),
            "reward": gear.Window(1),
            "a": gear.Window(at=[-2, 5], column="reward"),
        },
    )
    assert shared["mask"]["image"].tolist() == [[True, False]] * 5
    assert shared["mask"]["reward"].all()


def test_seconds_are_steps_of_the_rate() -> None:
    assert gear.Window(at=[-0.2, -0.1, 0, 1 / 3], fps=30).at == (-6, -3, 0, 10)
    assert gear.Window(at=[-0.06666, 0.0], fps=30).at == (-2, 0)
    assert gear.Window(at=[-2, 0], fps=10).at == (-20, 0)


def test_consecutive_steps_are_a_plain_window(table: Any) -> None:
    given: dict[str, Any] = {"index": table.indices()[:3], "anchor": [0, 0, 0]}
    out = {"image": torch.zeros(3, 3, 5, 7, dtype=torch.uint8)}
    found = table.gather(**given, windows={"image": gear.Window(at=[0.0, 0.1, 0.2], fps=10)}, out=out)
    assert found["image"].equal(table.gather(**given, windows={"image": gear.Window(3)})["image"])


@pytest.mark.parametrize(
    ("window", "message"),
    [
        ({}, "length"),
        ({"length": 2, "every": 0}, "every"),
        ({"at": []}, "sequence of steps"),
        ({"at": "ab"}, "sequence of steps"),
        ({"at": [0.5]}, "seconds with fps"),
        ({"at": [0.25], "fps": 10}, "multiples of"),
        ({"at": [float("nan")], "fps": 10}, "multiples of"),
        ({"at": [1e300], "fps": 1e300}, "multiples of"),
        ({"at": [0], "fps": 0}, "above 0"),
        ({"length": 2, "fps": 10}, "sequence of steps"),
        ({"length": 3, "at": [0, 5]}, "without them"),
        ({"at": [0, 5], "pad": "head"}, "'edge'"),
        ({"at": [0, 2**31]}, "below 2"),
        ({"length": 2000, "every": 2}, "1,024"),
    ],
)
def test_wrong_steps_are_refused(window: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.Window(**window)


def test_what_has_no_chosen_steps_says_so(table: Any) -> None:
    rows = table.indices()[:2]
    with pytest.raises(SchemaError, match="every and at"):
        gear.ReplayDataset(
            table, batch_size=2, windows=gear.Window(at=[0, 4]), columns=["image"], layout="packed"
        )
    with pytest.raises(SchemaError, match="one value per trajectory"):
        table.gather(rows, [0, 0], windows={"image": gear.Window(1), "task": gear.Window(at=[0, 4])})
    with pytest.raises(SchemaError, match="lie apart in memory"):
        table.gather(
            rows,
            [0, 0],
            windows={"image": gear.Window(at=[0, 4])},
            out={"image": torch.zeros(2, 2, 5, 7, dtype=torch.uint8)},
        )
    with pytest.raises(SchemaError, match="'image:0'"):
        table.gather(
            rows, [0, 0], windows={"image": gear.Window(at=[0, 4]), "image:0": gear.Window(1, column="image")}
        )


def test_anchors_of_complete_windows_leave_room_for_the_steps(table: Any) -> None:
    windows = {"image": gear.Window(at=[-4, 3])}
    options: dict[str, Any] = {"batch_size": 50, "sampler": gear.Uniform(unit="step"), "device": "cpu"}
    data = gear.ReplayDataset(table, windows=windows, draws=gear.Draws(complete=True), **options)
    assert data.sample()["mask"]["image"].all()
