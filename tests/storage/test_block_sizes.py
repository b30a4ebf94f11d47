"""``block_steps="auto"``, and the notice about tables that waste much."""

from __future__ import annotations

import itertools
import logging
import re
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from options_common import nested_table

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.storage.block_sizes import best_block_steps, expected_bytes
from gear_loader.storage.schema import Schema
from gear_loader.utils import notices

SCHEMAS = {
    "MuJoCo": {
        "observation": (torch.float32, (17,)),
        "action": (torch.float32, (6,)),
        "reward": (torch.float32, ()),
    },
    "images": {"image": (torch.uint8, (84, 84)), "action": (torch.int64, ()), "done": (torch.bool, ())},
    "one number": {"x": (torch.float32, ())},
    "whole lines": {"x": (torch.float32, (32,)), "y": (torch.uint8, (128,))},
}


def schema_of(name: str) -> Schema:
    return Schema({key: gear.Column(*column) for key, column in SCHEMAS[name].items()})


def filled(schema: Schema, lengths: Any, **options: Any) -> gear.Table:
    """A table of zeros."""
    options = {"max_steps": int(lengths.sum()), "max_trajectories": len(lengths), **options}
    table = gear.Table.create(schema, **nested_table(options))
    longest = {
        name: np.zeros((lengths.max(), column.step_bytes), np.uint8) for name, column in schema.items()
    }
    rows = {
        name: torch.from_numpy(values).view(schema[name].dtype).view(len(values), *schema[name].shape)
        for name, values in longest.items()
    }
    table.extend([{name: values[:length] for name, values in rows.items()} for length in lengths.tolist()])
    return table


CASES = list(itertools.product(SCHEMAS, (1, 7.5, 100)))


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize(("name", "mean"), mostly_long(CASES, *CASES[::4], CASES[10]))
def test_auto_is_what_wastes_least(name: str, mean: float, packed: bool) -> None:
    """Blocks of 1 to 128 steps filled with the same geometric lengths: none is resident in much less memory."""
    schema = schema_of(name)
    best = best_block_steps(schema, mean, 10**6, packed=packed)
    lengths = np.random.default_rng(3).geometric(1 / mean, 400)
    candidates = sorted({1, 2, 4, 8, 16, 32, 64, 128, best})
    resident = {}
    for steps in candidates:
        with filled(schema, lengths, block_steps=steps, packed=packed) as table:
            stats = table.stats()
            resident[steps] = stats.resident_bytes - table._engine.region.layout.arrays["extent"][0]
            expected = len(lengths) * expected_bytes(schema, np.array([steps]), mean, packed=packed)[0]
            assert resident[steps] == pytest.approx(expected, rel=0.2)
            assert stats.mean_length == lengths.mean()
    assert resident[best] <= 1.03 * min(resident.values())
    options = {"max_steps": 10**6, "max_trajectories": 10, "block_steps": "auto", "mean_length": mean}
    options["packed"] = packed
    with gear.Table.create(schema, **nested_table(options)) as table:
        assert table._engine.region.layout.block_steps == best


def test_the_mean_comes_from_the_sizes() -> None:
    schema = schema_of("whole lines")
    options: dict[str, Any] = {"block_steps": "auto"}
    for steps, count in ((4000, 40), (40, 40), (10, 40), (3, 1)):  # columns of whole lines are not packed
        mean = max(1, steps / count)
        with gear.Table.create(
            schema, **nested_table({"max_steps": steps, "max_trajectories": count, **options})
        ) as table:
            assert table._engine.region.layout.block_steps == best_block_steps(schema, mean, steps) <= steps
    # Equal arguments make equal tables.
    options.update(max_steps=400, max_trajectories=40, name="test-block-sizes", if_exists="attach")
    with (
        gear.Table.create(schema, **nested_table(options)) as table,
        gear.Table.create(schema, **nested_table(options)) as other,
    ):
        table.unlink()
        assert other._engine.region.layout.block_steps == table._engine.region.layout.block_steps


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"block_steps": "all"}, "block_steps is 'all'; expected a number of steps, or 'auto'"),
        ({"mean_length": 5.0}, "mean_length is 5.0 with block_steps=64; it goes with block_steps='auto'"),
        *(
            ({"block_steps": "auto", "mean_length": mean}, f"mean_length is {mean!r}; expected a mean number")
            for mean in (0.5, -1, float("nan"), float("inf"), True, "5")
        ),
        ({"block_steps": "auto", "max_trajectories": 0}, "max_trajectories is 0; expected an integer"),
        ({"block_steps": "auto", "max_steps": "many"}, "max_steps is 'many'; expected an integer"),
    ],
)
def test_what_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError) as caught:
        gear.Table.create(
            schema_of("images"), **nested_table({"max_steps": 100, "max_trajectories": 10, **options})
        )
    assert message in str(caught.value)


@pytest.fixture
def messages(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Any:
    """Returns the notices about waste since its last call, of a process that has said nothing yet."""
    monkeypatch.setattr(notices, "_seen", {})
    caplog.set_level(logging.WARNING, "gear_loader")

    def found() -> list[str]:  # not numba's, which says that it compiles
        texts = [record.getMessage() for record in caplog.records if "on average" in record.getMessage()]
        caplog.clear()
        notices._seen.clear()
        return texts

    return found


LENGTHS = {
    "all alike": np.full(60, 10),
    "two kinds": np.repeat([4, 100], [300, 40]),
    "most of one step": np.repeat([1, 5000], [3000, 3]),
    "uneven": np.random.default_rng(4).integers(1, 200, 400),
    "geometric": np.random.default_rng(5).geometric(1 / 30, 600),
    "whole blocks": np.full(40, 64),
}


KEPT = ("MuJoCo", "two kinds"), ("images", "all alike"), ("whole lines", "geometric")


@pytest.mark.parametrize(("name", "lengths"), mostly_long(itertools.product(SCHEMAS, LENGTHS), *KEPT))
def test_the_blocks_that_a_notice_names_waste_as_little_as_it_says(
    messages: Any, name: str, lengths: str
) -> None:
    """By the table's own lengths; where no blocks would save a tenth of the bytes, nothing is said."""
    schema, rows = schema_of(name), LENGTHS[lengths]
    rows = np.repeat(rows, max(1, -(-(1 << 20) // (int(rows.sum()) * schema.step_bytes))))

    def made(steps: int) -> Any:
        with filled(schema, rows, block_steps=steps) as table:
            table._engine.notice_waste()
            return table.stats()

    for steps in (64, 8):
        now, told = made(steps), messages()
        if told:
            (message,) = told
            found = re.search(
                r"Table.create\(block_steps=(\d+)\) these trajectories would waste about (\d+)%", message
            )
            assert found
            then = made(int(found[1]))
            assert then.resident_bytes < 0.92 * now.resident_bytes
            assert 100 * (1 - 1 / then.overhead) == pytest.approx(int(found[2]), abs=2)
            assert messages() == []  # following it is the end
        elif now.overhead > 1 / 0.75:
            others = [made(other).resident_bytes for other in (1, 2, 4, 16, 32, 128, int(rows.max()))]
            assert min(others) > 0.88 * now.resident_bytes
            messages()  # of these


def test_a_notice_about_waste_is_given_once(messages: Any) -> None:
    schema = schema_of("images")
    with filled(schema, np.full(30, 10)) as first, filled(schema, np.full(60, 10)) as second:
        for table in (first, second):
            next(
                iter(
                    gear.ReplayDataset(table, batch_size=2, windows=gear.Window(1), device="cpu", prefetch=0)
                )
            )
            table.stats()
        (message,) = messages()
        assert "the trajectories have 10.0 steps on average, the blocks 64" in message
        first.stats()  # as of another process
        assert messages() == []
    with filled(schema, np.full(1, 10)) as table:  # too little to matter
        table.stats()
    with (
        filled(schema, np.full(4, 256), max_steps=4000, max_trajectories=8) as table,
        table.writer() as writer,
    ):
        for _ in range(500):
            writer.append({name: values[0] for name, values in table[0].items()})
        assert table.stats().overhead > 1 / 0.75  # of a trajectory that is being written
    assert messages() == []


def test_what_is_loaded_has_a_mean_length(tmp_path: Path) -> None:
    episodes = [{"x": np.zeros((10, 4), np.float32)}] * 20
    best = best_block_steps(Schema({"x": gear.Column(torch.float32, (4,))}), 10, 200)
    with gear.sources.load(episodes, block_steps="auto", progress=False) as table:
        assert table.stats().block_steps == best != 64
    sizes = {"max_steps": 200, "max_trajectories": 200}  # which say 1 step each
    with gear.Table.create({"x": gear.Column(torch.float32, (4,))}, **nested_table(sizes)) as table:
        table.extend(episodes)
        table.save(tmp_path)
    with gear.Table.load(tmp_path, block_steps="auto") as loaded:
        assert loaded.stats().block_steps == best
        assert len(loaded) == 20
    with pytest.raises(gear.errors.SchemaError, match="block_steps is 'most'; expected a number"):
        gear.sources.load(episodes, block_steps="most", progress=False)  # type: ignore[arg-type]
