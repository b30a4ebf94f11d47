"""Creating a table where one of that name may exist, and removing all trajectories."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import fresh_name

import gear_loader as gear
from gear_loader.errors import RegionError, SchemaError

SIZES: dict[str, Any] = {"max_steps": 40, "max_trajectories": 8, "block_steps": 4}
SCHEMA = {"x": gear.Column(torch.int64)}


def steps(first: int, count: int) -> dict[str, Any]:
    return {"x": np.arange(first, first + count)}


def test_a_table_that_exists_is_attached_to() -> None:
    name = fresh_name()
    with gear.Table.create(SCHEMA, **nested_table({"name": name, "if_exists": "attach", **SIZES})) as first:
        try:
            first.add(steps(0, 5))
            with gear.Table.create(
                SCHEMA, **nested_table({"name": name, "if_exists": "attach", "timeout": 3, **SIZES})
            ) as again:
                assert again[0]["x"].tolist() == [0, 1, 2, 3, 4]
                again.add(steps(10, 2))
            assert len(first) == 2
            for other in ({**SIZES, "max_steps": 41}, {**SIZES, "max_times_sampled": 2}):
                with pytest.raises(SchemaError, match="exists with other columns, sizes or rules"):
                    gear.Table.create(SCHEMA, **nested_table({"name": name, "if_exists": "attach", **other}))
            with pytest.raises(SchemaError, match="exists with other"):
                gear.Table.create(
                    {"y": SCHEMA["x"]}, **nested_table({"name": name, "if_exists": "attach", **SIZES})
                )
            with pytest.raises(RegionError, match="already a table"):
                gear.Table.create(SCHEMA, **nested_table({"name": name, **SIZES}))
        finally:
            first.unlink()


def test_a_table_is_replaced() -> None:
    name = fresh_name()
    with gear.Table.create(SCHEMA, **nested_table({"name": name, **SIZES})) as first:
        first.add(steps(0, 5))
        with gear.Table.create(
            {"y": SCHEMA["x"]}, **nested_table({"name": name, "if_exists": "replace", **SIZES})
        ) as second:
            assert len(second) == 0
            assert list(gear.Table.attach(name).schema) == ["y"]
            assert first[0]["x"].tolist() == [0, 1, 2, 3, 4]
            second.unlink()


def test_only_a_named_table_can_exist() -> None:
    with pytest.raises(SchemaError, match="without a name"):
        gear.Table.create(SCHEMA, **nested_table({"if_exists": "attach", **SIZES}))
    with pytest.raises(SchemaError, match="if_exists is True; expected 'error', 'attach' or 'replace'"):
        gear.Table.create(SCHEMA, **nested_table({"name": fresh_name(), "if_exists": True, **SIZES}))  # type: ignore[arg-type]


def test_clear() -> None:
    with gear.Table.create(SCHEMA, **nested_table(SIZES)) as table:
        table.clear()
        first = [table.add(steps(i, 3)) for i in range(4)]
        writer = table.writer()
        writer.append(x=99)
        ids = table.ids(np.array(first))
        ticket = table._engine.reader().begin_read()
        table.clear()
        assert len(table) == 0
        assert table.num_steps == 0
        table.check_valid()
        ticket.end()
        slot = writer.commit()
        assert table.ids(np.array([slot]))[0] > ids.max()
        assert table.indices().tolist() == [slot]
        table.extend([steps(i, 9) for i in range(4)])
        table.check_valid()
