"""`Table.stats()`: every byte is counted, and counted once."""

from __future__ import annotations

import dataclasses
import math
import random
from typing import Any

import numpy as np
import pytest
import torch
from options_common import nested_table
from table_common import COLUMNS, named, rows

import gear_loader as gear
from gear_loader.storage.layout import LINE
from gear_loader.storage.stats import TableStats

STEP = sum(column.step_bytes for column in COLUMNS.values())


def expected_resident(table: gear.Table, slots: int, blocks: int) -> int:
    """Header, counters and readers; for each slot its entries; for each block its data and four entries."""
    layout = table._engine.region.layout
    sizes = [column.step_bytes for column in table.schema.values()]
    sizes = [sum(sizes)] if layout.packed else sizes  # these fill their record
    padded = sum(math.ceil(layout.block_steps * size / LINE) * LINE for size in sizes)
    return layout.arrays["extent"][0] + slots * layout.slot_bytes + blocks * (padded + 16)


def test_every_count() -> None:
    sizes: dict[str, Any] = {
        "max_steps": 50,
        "max_trajectories": 16,
        "block_steps": 4,
        "on_full": "evict_oldest",
    }
    with named(**sizes) as table:
        stats = table.stats()
        assert isinstance(stats, TableStats)
        assert stats.resident_bytes == expected_resident(table, 0, 0)
        assert math.isnan(stats.overhead)
        assert math.isnan(stats.fixed_row_overhead)
        assert "nan" not in str(stats)
        table.extend([rows(0, 1), rows(1, 4), rows(2, 5), rows(3, 40)])
        stats = table.stats()
        assert STEP == 8 + 4 + 4 + 12 + 8
        assert (stats.num_trajectories, stats.num_steps, stats.payload_bytes) == (4, 50, 50 * STEP)
        assert stats.blocks_in_use == 1 + 1 + 2 + 10
        assert stats.num_blocks == table._engine.region.layout.num_blocks == (50 + 16 * 3) // 4
        assert stats.block_steps == 4
        assert (stats.fixed_row_bytes, stats.fixed_row_overhead) == (4 * 40 * STEP, 160 / 50)
        assert stats.reserved_bytes == table._engine.region.layout.region_bytes
        assert stats.resident_bytes == expected_resident(table, 4, 14) <= stats.reserved_bytes
        assert stats.overhead == stats.resident_bytes / stats.payload_bytes
        with gear.Table.attach(str(table.name)) as other:
            assert other.stats() == stats
        with pytest.raises(dataclasses.FrozenInstanceError):
            stats.num_steps = 1  # type: ignore[misc]
        table.remove(2)
        assert table.stats().num_evicted == 0
        table.add(rows(4, 9))
        stats = table.stats()
        assert (stats.num_evicted, stats.num_trajectories, stats.num_steps) == (2, 2, 49)
        table.remove(table.indices())
        stats = table.stats()
        assert (stats.num_evicted, stats.blocks_in_use, stats.fixed_row_bytes) == (2, 0, 0)
        assert stats.resident_bytes == expected_resident(table, 0, 0)
    narrow = {"x": gear.Column(torch.bool)}
    with gear.Table.create(narrow, max_steps=100, max_trajectories=10, block_steps=1) as table:
        table.add({"x": torch.ones(100, dtype=torch.bool)})
        stats = table.stats()
        assert (stats.payload_bytes, stats.resident_bytes) == (100, expected_resident(table, 1, 100))
        assert stats.overhead > LINE


def test_what_is_unfinished_or_still_being_read_is_resident() -> None:
    with gear.Table.create(COLUMNS, max_steps=200, max_trajectories=16, block_steps=4) as table:
        table.extend([rows(0, 8), rows(1, 9)])
        ticket, _ = table._engine.reader().begin_snapshot()
        table.remove(0)
        stats = table.stats()
        assert (stats.num_trajectories, stats.payload_bytes, stats.blocks_in_use) == (1, 9 * STEP, 5)
        assert stats.resident_bytes == expected_resident(table, 2, 5)
        slots, _ = table._engine.index.begin(np.array([1]), evict=False)
        assert table.stats().blocks_in_use == 6
        assert table.stats().resident_bytes == expected_resident(table, 3, 6)
        table._engine.index.abort(slots)
        ticket.end()
        table.remove(1)
        assert table.stats().blocks_in_use == 0


def test_the_summary_is_readable() -> None:
    stats = TableStats(
        num_trajectories=1234, num_steps=567_890, payload_bytes=1_000_000, resident_bytes=1_050_000,
        reserved_bytes=4_000_000, fixed_row_bytes=2_345_678, blocks_in_use=9000, num_blocks=20_000,
        block_steps=64, num_evicted=7, num_expired=3, num_inserted=2000, num_sampled=70_000, num_writing=2,
        insert_wait=1.25, sample_wait=0.5,
    )  # fmt: skip
    lines = str(stats).splitlines()
    assert [" ".join(line.split()) for line in lines] == [
        "trajectories 1,234",
        "steps 567,890, 460.2 a trajectory",
        "blocks in use 9,000 of 20,000, 64 steps each",
        "added 2,000, 1.2 s waited",
        "drawn 70,000, 0.5 s waited",
        "evicted 7, expired 3",
        "payload 1,000,000 B",
        "resident 1,050,000 B 1.050 x payload",
        "if padded 2,345,678 B 2.346 x payload",
        "reserved 4,000,000 B 4.000 x payload",
    ]
    figures = {0: "1,234", 1: "567,890", 2: "9,000", 7: "1,050,000", 8: "2,345,678"}
    ends = {lines[i].index(figure) + len(figure) for i, figure in figures.items()}
    assert len(ends) == 1, "the figures are aligned"


def test_uneven_lengths_cost_about_a_twentieth() -> None:
    """Of trajectories of some hundred steps with the columns of a MuJoCo environment; fixed rows cost the double."""
    generator = random.Random(0)
    shapes: dict[str, tuple[int, ...]] = {"observation": (11,), "action": (3,), "reward": ()}
    schema = {name: gear.Column(torch.float32, shape) for name, shape in shapes.items()}
    lengths = [min(1000, 20 + int(generator.expovariate(1 / 500))) for _ in range(400)]
    blocks = gear.Table.required_blocks(lengths, 32)
    sizes = {"max_steps": sum(lengths), "max_trajectories": 400, "block_steps": 32, "max_blocks": blocks}
    with gear.Table.create(schema, **nested_table(sizes)) as table:
        table.extend({name: torch.zeros(n, *shape) for name, shape in shapes.items()} for n in lengths)
        stats = table.stats()
        assert stats.blocks_in_use == stats.num_blocks == blocks
        assert stats.overhead < 1.051
        assert stats.fixed_row_overhead > 2
        assert stats.reserved_bytes < stats.resident_bytes * 1.01 + 2 * 4096


@pytest.mark.parametrize("once", [False, True])
def test_ragged_values_of_4_kib_cost_less_than_a_twentieth(once: bool) -> None:
    """One a trajectory: what the index has of it, 16 bytes of its record, and the header and padding of the value."""
    random, count = np.random.default_rng(0), 400
    sizes = random.lognormal(0, 1.0, count)
    sizes = np.maximum(1, sizes * 4096 / sizes.mean()).astype(np.int64)
    columns = {"value": gear.Column(torch.uint8, (None,), **({"per": "trajectory"} if once else {}))}
    columns |= {"line": gear.Column(torch.uint8, (LINE,))} if once else {}
    values = [torch.zeros(size, dtype=torch.uint8) for size in sizes.tolist()]
    rows = [{"value": value if once else [value]} for value in values]
    rows = [{**row, "line": torch.zeros(1, LINE, dtype=torch.uint8)} if once else row for row in rows]
    given: dict[str, Any] = {"max_steps": count, "max_trajectories": count, "block_steps": "auto"}
    memory = gear.Memory(payload=int(sizes.sum() * 1.02) + 64)
    with gear.Table.create(columns, **given, memory=memory) as table:
        table.extend(rows)
        stats = table.stats()
        assert stats.block_steps == 1
        taken = stats.resident_bytes - table._engine.region.layout.arrays["extent"][0]
        assert taken - stats.value_resident_bytes == count * (160 + LINE * once)
        assert taken < 1.05 * stats.payload_bytes
