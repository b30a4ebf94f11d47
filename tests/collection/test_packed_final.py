"""Final steps in batches of whole trajectories, against the trajectories that were stored."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.dataset.table_options import check_final
from gear_loader.distributed import Shards
from gear_loader.errors import SchemaError

SCHEMA = {
    "seen": gear.Column(torch.float32, (2,), final=True),
    "action": gear.Column(torch.int64),
    "wide": gear.Column(torch.float64, (20,)),
    "number": gear.Column(torch.int64, per="trajectory"),
}
WINDOWS = {**dict.fromkeys(("seen", "action", "wide"), gear.Whole(final=True)), "number": None}
EPISODES = st.lists(st.tuples(st.integers(1, 9), st.booleans()), min_size=1, max_size=12)


def episode(number: int, length: int) -> dict[str, torch.Tensor]:
    """Trajectory `number` as it is given to a table, and its final step if it has one; no value is 0."""
    steps = torch.arange(1, length + 1)
    return {
        "seen": torch.stack([steps, steps * 0 + number + 1], 1).float(),
        "action": steps + 100 * (number + 1),
        "wide": (steps + 1000.0 * (number + 1)).double()[:, None].repeat(1, 20),
    }


def make(episodes: Sequence[tuple[int, bool]], **options: Any) -> gear.Table:
    sizes = {"max_steps": 400, "max_trajectories": 16, "block_steps": 3}
    table = gear.Table.create(SCHEMA, **nested_table({**sizes, **options}))
    for _ in range(2):  # the second time into memory that was used before
        table.clear()
        for number, (length, final) in enumerate(episodes):
            last = {"final": {"seen": torch.tensor([-1.0, number + 1])}} if final else {}
            table.add({**episode(number, length), "number": torch.tensor(number)}, **last)
    return table


def dataset(table: Any, **options: Any) -> gear.ReplayDataset:
    given = {"batch_size": 4, "windows": WINDOWS, "layout": "packed", "device": "cpu", "seed": 3}
    return gear.ReplayDataset(
        table, **nested({**given, "selector": gear.Uniform(replacement=False), **options})
    )


def check(batch: Mapping[str, Any], episodes: Sequence[tuple[int, bool]], most: int = 1000) -> list[int]:
    """Compare the rows of a packed batch with their episodes, cut to `most` steps; return the episodes' numbers."""
    numbers: list[int] = batch["number"].tolist()
    starts, ends = batch["cu_seqlens"][:-1].tolist(), batch["cu_seqlens"][1:].tolist()
    assert batch["final"].dtype == torch.bool
    for row, (number, start, end) in enumerate(zip(numbers, starts, ends, strict=True)):
        length, final = episodes[number]
        stored = episode(number, length)
        if final:
            zeros = {name: torch.cat([part, torch.zeros_like(part[:1])]) for name, part in stored.items()}
            zeros["seen"][-1] = torch.tensor([-1.0, number + 1])
            stored = zeros
        assert end - start == min(length + final, most)
        assert batch["final"][row] == (final and length < most)
        assert batch["position"][start:end].tolist() == list(range(end - start))
        for name, part in stored.items():
            assert torch.equal(batch[name][start:end], part[:most]), name
    return numbers


@given(episodes=EPISODES, packed=st.booleans(), most=st.integers(3, 30))
def test_final_steps_follow_the_last_ones(episodes: list[tuple[int, bool]], packed: bool, most: int) -> None:
    with make(episodes, packed=packed) as table:
        numbers = [check(batch, episodes) for batch in dataset(table)]
        assert sorted(itertools.chain(*numbers)) == list(range(len(episodes)))
        numbers = []
        for batch in dataset(table, batch_size=None, max_steps=most, too_long="truncate", lookahead=2):
            assert len(batch["position"]) <= most
            numbers.append(check(batch, episodes, most))
        assert sorted(itertools.chain(*numbers)) == list(range(len(episodes)))


def test_padded_and_converted() -> None:
    episodes = [(4, True), (2, False), (6, True)]
    with make(episodes) as table:
        whole = gear.Whole(final=True)
        windows = {"seen": whole, "half": gear.Whole("action", torch.bfloat16, final=True), "number": None}
        (batch,) = dataset(table, layout="padded", windows=windows, batch_size=3)
        for row, number in enumerate(batch["number"].tolist()):
            length, final = episodes[number]
            assert batch["mask"]["seen"][row].sum() == length + final
            assert (batch["seen"][row, length, 0] == -1.0) == final
            stored = episode(number, length)["action"].bfloat16()
            assert torch.equal(batch["half"][row, :length], stored)
            assert not batch["half"][row, length:].any()


@pytest.mark.parametrize(
    ("windows", "message"),
    [
        ({"seen": gear.Whole(final=True), "action": gear.Whole()}, "differ in final"),
        ({"action": gear.Whole(final=True)}, r"read no column with final steps \(\['seen'\]\)"),
        ({"final": gear.Whole("seen", final=True)}, "'final', which is a key"),
    ],
)
def test_windows_that_do_not_fit(windows: dict[str, Any], message: str) -> None:
    with make([(3, True)]) as table, pytest.raises(SchemaError, match=message):
        dataset(table, windows=windows)


def test_sources_that_do_not_fit() -> None:
    expected = r"^Whole\(final=True\) was given with {}; expected a Table and device='cpu'"
    with make([(3, True)]) as table:
        with Shards([table]) as shards, pytest.raises(SchemaError, match=expected.format("Shards")):
            dataset(shards)
        with pytest.raises(SchemaError, match=expected.format("device='cuda:1'")):
            check_final(WINDOWS, shards=None, device=torch.device("cuda:1"))


def test_an_invalid_final() -> None:
    with pytest.raises(SchemaError, match="Whole final is 1; expected True or False"):
        gear.Whole(final=1)  # type: ignore[arg-type]
