"""The plans of a packed table: whole records that are gathered and split are what the CPU gathers column by column."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.collection.plans import Output, Records, locate_columns, plans_of, window_columns
from gear_loader.kernels import reference
from gear_loader.kernels.plan import MASK, OUT
from gear_loader.native import gathering

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")

COLUMNS = {
    "observation": gear.Column(torch.float32, (5,), final=True),
    "action": gear.Column(torch.int64),
    "done": gear.Column(torch.bool),
    "image": gear.Column(torch.uint8, (150,), final=True),
}
BATCH = 30


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    """Trajectories with and without a final step."""
    random = np.random.default_rng(1)
    with gear.Table.create(COLUMNS, max_steps=400, max_trajectories=20, block_steps=6) as table:
        for i in range(12):
            length = 1 + 5 * i % 31
            rows = {
                "observation": random.normal(size=(length, 5)).astype(np.float32),
                "action": random.integers(1, 99, length),
                "done": np.ones(length, dtype=bool),
                "image": random.integers(1, 256, (length, 150), dtype=np.uint8),
            }
            last = {"observation": np.full(5, i, np.float32), "image": np.full(150, i + 1, np.uint8)}
            table.add(rows, final=last if i % 2 else None)
        yield table


def outputs_of(table: gear.Table, windows: list[tuple[str, gear.Window]]) -> list[Output]:
    made = []
    for name, window in windows:
        out = torch.full((BATCH, window.length, table.schema[name].step_bytes), 99, dtype=torch.uint8)
        made.append(Output(name, window, out, torch.zeros(BATCH, window.length, dtype=torch.bool)))
    return made


def gathered(table: gear.Table, windows: list[tuple[str, gear.Window]], seed: int) -> Records:
    """Gather these windows both ways, and compare all bytes; return the memory of the records."""
    random = np.random.default_rng(seed)
    slots = random.choice(table.indices(), BATCH)
    anchors = random.integers(0, table._engine.reader().index_arrays()[0][slots, 0])
    extent, block_ids = table._engine.reader().index_arrays()
    expected, found, staging = outputs_of(table, windows), outputs_of(table, windows), Records()
    sources = [output.column for output in expected]
    columns = window_columns(table.schema, sources, (output.window for output in expected))
    columns[:, OUT] = [output.out.data_ptr() for output in expected]
    columns[:, MASK] = [0 if output.mask is None else output.mask.data_ptr() for output in expected]
    locate_columns(columns, sources, table._engine.region)
    steps = table._engine.region.layout.block_steps
    assert gathering.gather(columns, slots, anchors, extent, block_ids, steps, 0, BATCH, None) == 0
    plans = plans_of(table, found, staging)
    given: Any = [
        torch.from_numpy(np.array(part)) for part in (slots, anchors, extent, block_ids.reshape(-1))
    ]
    reference.gather(plans.steps, *given)
    if plans.split is not None:
        reference.split(plans.split, BATCH)
    for one, other, window in zip(expected, found, windows, strict=True):
        assert torch.equal(one.out, other.out), window
        assert one.mask is not None
        assert other.mask is not None
        assert torch.equal(one.mask, other.mask), window
    return staging


@hypothesis.given(
    windows=st.lists(
        st.tuples(
            st.sampled_from(list(COLUMNS)),
            st.builds(
                gear.Window,
                st.sampled_from([1, 1, 2, 5, 12]),
                st.integers(-6, 6),
                st.sampled_from(["keep", "keep", "head", "tail", "edge"]),
            ),
        ),
        min_size=1,
        max_size=6,
    ),
    seed=st.integers(0, 99),
)
@hypothesis.settings(suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
def test_windows_of_any_kind(table: gear.Table, windows: list[tuple[str, gear.Window]], seed: int) -> None:
    gathered(table, windows, seed)


@pytest.mark.parametrize(
    ("windows", "spans"),
    [
        # Observation and next observation, action and end: one read of two records.
        ([("observation", (1, 0)), ("observation", (1, 1)), ("action", (1, 0)), ("done", (1, 0))], [(2, 0)]),
        ([("observation", (1, 0)), ("action", (5, 0)), ("observation", (1, 5))], [(6, 0)]),
        ([("observation", (4, -3)), ("observation", (4, -2)), ("done", (1, 0))], [(5, -3)]),
        ([("observation", (2, 0)), ("observation", (2, 40))], [(2, 0), (2, 40)]),  # far apart
        (
            [("observation", (4, 0, "head")), ("action", (4, 1, "head")), ("done", (4, 1, "head"))],
            [(4, 0), (4, 1)],
        ),
        ([("image", (3, 0))], []),
    ],
)
def test_neighbouring_windows_share_a_read(table: gear.Table, windows: Any, spans: Any) -> None:
    staging = gathered(table, [(name, gear.Window(*window)) for name, window in windows], 0)
    assert sorted(key[:2] for key in staging) == spans
    assert {memory.shape[2] for memory in staging.values()} <= {32}
