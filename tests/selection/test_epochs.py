"""The default sampler, and notices about an epoch that reads little of the table, and about uneven lengths."""

from __future__ import annotations

from typing import Any

import pytest
from dataset_common import make_table
from torch.utils.data import DataLoader

import gear_loader as gear

LENGTHS = [100] * 6


def told(caplog: pytest.LogCaptureFixture, **options: Any) -> list[str]:
    """What two epochs of a dataset of 6 trajectories of 100 steps say about their length."""
    caplog.clear()
    settings: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(2), "device": "cpu", **options}
    with make_table(LENGTHS) as table:
        dataset = gear.ReplayDataset(table, **settings)
        for _ in range(2):
            for _ in zip(range(2), DataLoader(dataset, batch_size=None), strict=False):
                pass
        dataset.set_epoch(0)
    return [message for message in caplog.messages if message.startswith("An epoch has")]


def test_a_short_epoch_is_told_once_for_each_dataset(caplog: pytest.LogCaptureFixture) -> None:
    for sampler in (gear.Uniform(), gear.Uniform(replacement=False), gear.Prioritized()):
        (message,) = told(caplog, sampler=sampler)
        assert message.startswith("An epoch has 2 batches of 4: ")
        assert "(6), whatever their length (600 steps, or 150 batches of single steps)" in message
        assert "batches_per_epoch=" in message
        assert 'unit="step"' in message


@pytest.mark.parametrize(
    "options",
    [
        {"sampler": gear.Uniform(unit="step")},
        {"batches_per_epoch": 2},
        {"windows": gear.Window(60)},  # an epoch can show most of the table
        {"batch_size": 64},  # more than a tenth of the batches that the steps would make
    ],
)
def test_nothing_is_told_otherwise(caplog: pytest.LogCaptureFixture, options: dict[str, Any]) -> None:
    assert told(caplog, **options) == []


@pytest.mark.parametrize("how", ["sample", "epoch"])
def test_all_steps_are_equally_likely_by_default_or_a_notice_says_how_not(how: str, caplog: Any) -> None:
    def told_of(windows: Any, **options: Any) -> tuple[float, int]:
        """The share of rows of short trajectories, and the number of notices."""
        caplog.clear()
        settings: dict[str, Any] = {"batch_size": 500, "device": "cpu", "batches_per_epoch": 4, **options}
        dataset = gear.ReplayDataset(table, windows=windows, **settings)
        batches = [dataset.sample() for _ in range(4)] if how == "sample" else list(dataset)
        short = sum((batch["index"] % 2).sum().item() for batch in batches) / 2000
        return short, sum("4.8% of the steps" in message for message in caplog.messages)

    with make_table([200, 10] * 25) as table:
        for windows in (gear.Window(1), gear.Window(1, offset=-1, squeeze=True)):
            share, notices = told_of(windows)
            assert share < 0.08
            assert notices == 0
        for windows, options, expected in (
            (gear.Window(2), {}, 1),
            (gear.Window(2), {"sampler": gear.Uniform()}, 0),
            (gear.Window(1), {"draws": gear.Draws(anchor="last")}, 0),
            (gear.Window(1), {"sampler": gear.Uniform()}, 0),
        ):
            share, notices = told_of(windows, **options)
            assert share > 0.4
            assert notices == expected
