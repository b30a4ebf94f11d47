"""Features of nodes: rows by id, whatever the table's layout, and as it changes."""

from __future__ import annotations

import threading
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import COLUMNS, fresh_name

import gear_loader as gear
from gear_loader.errors import SchemaError, TableClosedError, UnknownNodeError


def columns(count: int, first: int = 0) -> dict[str, Any]:
    """Rows `first` to `first + count - 1`, each of which tells its number."""
    number = torch.arange(first, first + count)
    return {
        "number": number,
        "step": (number % 1000).int(),
        "length": number.int(),
        "value": torch.stack([number.float(), -number.float(), number.float() / 2], 1),
        "check": number * 7919,
    }


def check(rows: dict[str, torch.Tensor], ids: Any) -> None:
    expected = columns(1 + int(max(ids, default=0)))
    for name, value in rows.items():
        assert value.dtype == COLUMNS[name].dtype
        assert torch.equal(value, expected[name][torch.as_tensor(ids, dtype=torch.int64)]), name


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("lengths", [[300], [1] * 40, [5, 1, 70, 64, 3]])
def test_rows_by_id(packed: bool, lengths: list[int]) -> None:
    total = sum(lengths)
    sizes = {"max_steps": total, "max_trajectories": len(lengths), "block_steps": 16}
    with gear.Table.create(COLUMNS, **nested_table({"packed": packed, **sizes})) as table:
        for first, length in zip(np.cumsum([0, *lengths]), lengths, strict=False):
            table.add(columns(length, int(first)))
        features = gear.Features(table)
        assert len(features) == features.num_nodes == total
        random = np.random.default_rng(0)
        for ids in ([0], [total - 1, 0, total - 1], random.integers(0, total, 500), range(total)):
            check(features[np.array(ids)], list(ids))
            check(features[torch.tensor(ids).int()], list(ids))
        assert features[[]]["value"].shape == (0, 3)
        value = gear.Features(table, "value")[[3, 2]]
        assert torch.equal(value, columns(4)["value"][[3, 2]])
        assert list(gear.Features(table, ["check", "step"])[[1]]) == ["check", "step"]
        assert repr(gear.Features(table, "value")) == f"Features({total} nodes, value [3] torch.float32)"


def test_a_gather_that_threads_share() -> None:
    with gear.Table.create(
        {"x": gear.Column(torch.float32, (256,))}, max_steps=4000, max_trajectories=1
    ) as table:
        x = torch.arange(4000.0)[:, None] + torch.arange(256) / 256
        table.add({"x": x})
        ids = torch.from_numpy(np.random.default_rng(1).integers(0, 4000, 6000))
        assert torch.equal(gear.Features(table, "x")[ids], x[ids])


def test_unknown_nodes() -> None:
    with gear.Table.create(COLUMNS, max_steps=64, max_trajectories=4) as table:
        table.add(columns(10))
        features = gear.Features(table)
        message = (
            r"^ids has nodes -1, 10, 11, which the table does not hold: it has been given 10 nodes, numbered from 0, "
            r"and those of trajectories that were removed are gone\.$"
        )
        with pytest.raises(UnknownNodeError, match=message):
            features[[3, 11, -1, 10, 11]]
        with pytest.raises(UnknownNodeError, match=r"^ids has nodes 10, 11, 12, 13, 14 and 85 more, "):
            features[list(range(10, 100))]
        with pytest.raises(IndexError):
            features[[10]]
        for wrong in ([1.5], [[1]], ["1"], True):
            with pytest.raises(SchemaError, match=r"^ids is .*; expected node ids, integers \[n\]\.$"):
                features[wrong]
    with pytest.raises(TableClosedError):
        features[[0]]


def test_nodes_are_added_and_removed() -> None:
    with gear.Table.create(COLUMNS, max_steps=100, max_trajectories=10, block_steps=4) as table:
        features = gear.Features(table)
        assert len(features) == 0
        with pytest.raises(UnknownNodeError):
            features[[0]]
        first = table.add(columns(10))
        check(features[[9, 0]], [9, 0])
        table.extend([columns(5, 10), columns(20, 15)])
        check(features[[34, 9, 12]], [34, 9, 12])
        assert len(features) == 35
        table.remove(first)
        check(features[[34, 10]], [34, 10])
        with pytest.raises(UnknownNodeError, match=r"^ids has nodes 0, 9, which"):
            features[[10, 9, 0]]
        table.add(columns(9, 35))  # into the blocks of the first
        check(features[[43, 10]], [43, 10])
        with pytest.raises(UnknownNodeError):
            features[[0]]
        table.clear()
        with pytest.raises(UnknownNodeError):
            features[[43]]
        table.add(columns(3, 44))
        check(features[[44, 46]], [44, 46])


def test_ids_after_a_removal_are_not_known() -> None:
    with gear.Table.create(COLUMNS, max_steps=100, max_trajectories=10) as table:
        table.remove(table.extend([columns(2), columns(3)])[0])
        with pytest.raises(
            SchemaError, match=r"^The table holds 1 of the trajectories 0 to 1: others have been removed"
        ):
            gear.Features(table)


def test_rules_for_draws_do_not_hold_for_reads() -> None:
    rules: dict[str, Any] = {"rate_limiter": gear.MinSize(3), "max_times_sampled": 1, "timeout": 0.1}
    with gear.Table.create(
        COLUMNS, **nested_table({"max_steps": 100, "max_trajectories": 10, **rules})
    ) as table:
        table.add(columns(10))
        features = gear.Features(table)
        for _ in range(3):
            check(features[[9, 0]], [9, 0])


def test_a_change_that_was_not_seen() -> None:
    with gear.Table.create(COLUMNS, max_steps=100, max_trajectories=10) as table:
        table.add(columns(10))
        features = gear.Features(table)
        table.remove(table.extend([columns(2, 10), columns(3, 12)])[0])
        with pytest.raises(SchemaError, match=r"^The table holds 1 of the trajectories 1 to 2"):
            features[[0]]


def test_a_table_of_another_process_or_handle() -> None:
    name = fresh_name()
    with gear.Table.create(COLUMNS, name=name, max_steps=64, max_trajectories=4) as table:
        try:
            with gear.Table.attach(name) as other:
                features = gear.Features(other)
                table.add(columns(12))
                check(features[[11, 0]], [11, 0])
        finally:
            table.unlink()


def test_reads_beside_additions_and_removals() -> None:
    """Rows of the first trajectory stay right while others come and go in its neighbours' blocks."""
    with gear.Table.create(
        COLUMNS, max_steps=400, max_trajectories=64, block_steps=2, on_full="evict_oldest"
    ) as table:
        table.add(columns(50))
        features = gear.Features(table)
        stop = threading.Event()

        def change() -> None:
            number = 50
            while not stop.is_set():
                index = table.add(columns(20, number))
                number += 20
                features[[0]]
                table.remove(index)

        thread = threading.Thread(target=change)
        thread.start()
        try:
            random = np.random.default_rng(3)
            for _ in range(300):
                ids = random.integers(0, 50, 64)
                check(features[ids], ids)
        finally:
            stop.set()
            thread.join()


@pytest.mark.parametrize("given", ["rewards", ["value", "rewards"], [], "goal"])
def test_columns_that_are_not_of_steps(given: Any) -> None:
    schema = {**COLUMNS, "goal": gear.Column(torch.float32, (2,), per="trajectory")}
    with (
        gear.Table.create(schema, max_steps=64, max_trajectories=4) as table,
        pytest.raises(SchemaError, match=r"^columns is .*; expected some of \['number', 'step', "),
    ):
        gear.Features(table, given)


def test_no_table() -> None:
    with pytest.raises(
        SchemaError, match=r"^table is a dict; expected a gear_loader.Table of this machine, or Shards"
    ):
        gear.Features({})  # type: ignore[arg-type]
