"""What the tests of disk tiers share: a table with a small memory, its twin that fits, and rows with numbers."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import torch
from options_common import nested_table
from table_common import Died, bits, bury, mortal

import gear_loader as gear
from gear_loader.checkpoint import spilling

COLUMNS = {
    "number": gear.Column(torch.int64),
    "value": gear.Column(torch.float32, (3,), final=True),
    "flag": gear.Column(torch.bool),
    "wide": gear.Column(torch.float64, (17,)),
    "task": gear.Column(torch.int16, (2,), per="trajectory"),
}
"""Narrow columns, which lie in records, a wide one, one with final steps and one per trajectory."""
SIZES: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 60, "block_steps": 4}
NEVER = 1e6
"""Seconds between two writes of a table that writes only when it is told to, or when memory is short."""
WINDOWS = {
    "number": gear.Window(1, squeeze=True),
    "value": gear.Window(5, -2),
    "flag": gear.Window(3, 1, pad="head"),
    "wide": gear.Window(4, -1, pad="edge"),
}


def rows(number: int, length: int) -> dict[str, np.ndarray]:
    """The trajectory `number` of `length` steps; every value is another one."""
    step = np.arange(length)
    return {
        "number": np.full(length, number),
        "value": (1000 * number + step[:, None] + np.array([0.0, 0.25, 0.5])).astype(np.float32),
        "flag": (step + number) % 3 == 0,
        "wide": 1e6 * number + step[:, None] * 17.0 + np.arange(17),
        "task": np.array([number, -number], dtype=np.int16),
    }


def final(number: int, length: int) -> dict[str, np.ndarray]:
    """The final step of trajectory `number`."""
    return {"value": rows(number, length + 1)["value"][-1]}


def fitting(columns: Any = COLUMNS, **options: Any) -> gear.Table:
    """A private table that is all in memory."""
    return gear.Table.create(columns, **nested_table({**SIZES, **options}))


def tiered(
    path: Path,
    columns: Any = COLUMNS,
    *,
    blocks: int = 24,
    size: int | str = "1GiB",
    keep: Any = "newest",
    archive: str | None = None,
    sync_seconds: float = NEVER,
    **options: Any,
) -> gear.Table:
    """A private table with a memory of some blocks, beyond which trajectories lie on disk."""
    disk = gear.Disk(path, sync_seconds=sync_seconds, size=size, keep=keep, archive=archive)
    given = {**SIZES, "max_blocks": blocks, "timeout": 30.0, **options, "disk": disk}
    return gear.Table.create(columns, **nested_table(given))


def spill(table: gear.Table, slots: Any) -> int:
    """Move trajectories to disk now, those that are there already; return how many."""
    slots = np.asarray(slots, dtype=np.int64)
    arrays = table._engine.index.arrays
    return table._engine.index.spill(slots, arrays.generation[slots])


def move_out(table: gear.Table, slots: Any) -> int:
    """Move trajectories from the GPU's memory to the host part of a table now; return how many."""
    slots, index = np.unique(np.asarray(slots, dtype=np.int64)), table._engine.index
    arrays, part, memory = index.arrays, index.allocator.host_part, table._engine.region.device_memory
    assert part is not None
    assert memory is not None
    while memory.moves is not None:  # those that are under way
        part._publish(memory, True)
    slots = slots[arrays.levels(arrays.extent[slots, 1]) == 1]
    blocks = arrays.blocks_at(slots)
    into = part._free_in_part()[: int(blocks.sum())]
    assert len(into) == blocks.sum(), "the part is full"
    memory.moves = part._send(memory, slots, arrays.generation[slots], blocks, into)
    part._publish(memory, True)
    assert memory.moves is None
    return len(slots)


def die_while_spilling(table: gear.Table, stores: int, slots: Any) -> None:
    """The owner is killed after some stores of moving trajectories to disk, and another process repairs the index."""
    arrays = table._engine.index.arrays
    with mortal(table, stores) as index, contextlib.suppress(Died):
        index.spill(slots, arrays.generation[slots].copy())
    bury(table)


def promote(table: gear.Table, slot: int) -> None:
    """Bring a trajectory back into memory, if it lies on disk only and there are blocks."""
    spilling.promote(table._engine, np.array([slot]))


def tier_at(path: Path | None) -> dict[str, Any]:
    """An option of `Table.create` for a tier in a directory, or none; the table's memory is that of its options."""
    return {} if path is None else {"disk": gear.Disk(path, sync_seconds=NEVER, size="1GiB")}


def move(table: gear.Table, random: np.random.Generator) -> None:
    """Write a table with a tier, or move some trajectories to disk, or back; nothing of others."""
    tier, slots, what = table._engine.region.layout.tier, table.indices(), random.random()
    if tier is None or not len(slots):
        return
    if what < 0.3:
        table.save(tier.path)
    elif what < 0.6:
        spill(table, random.choice(slots, 4))
    else:
        spilling.promote(table._engine, np.unique(random.choice(slots, 3)))


def everything(table: gear.Table) -> list[Any]:
    """Slot and all bits of each trajectory, oldest first."""
    table.check_valid()
    found: list[Any] = []
    for slot in table.indices().tolist():
        end = table.final(slot)
        found.append(
            (
                slot,
                {name: bits(value) for name, value in table[slot].items()},
                None if end is None else bits(end["value"]),
            )
        )
    return found


def batch_bits(batch: gear.Batch) -> dict[str, Any]:
    """All bits of a batch."""
    return {
        name: batch_bits(value)
        if isinstance(value, dict)
        else value
        if isinstance(value, int)
        else bits(value)
        for name, value in batch.items()
    }
