"""The recorded disk table of `tests/data/disk`: its columns, and all that it holds."""

from __future__ import annotations

from typing import Any

import torch
from table_common import bits

import gear_loader as gear
from gear_loader.storage.counters import NEXT_SEQUENCE
from gear_loader.storage.late import filled_bits

SCHEMA = {
    "x": gear.Column(torch.int64, (2,)),
    "obs": gear.Column(torch.float32, (3,), final=True),
    "goal": gear.Column(torch.bfloat16, (2,), per="trajectory"),
    "adv": gear.Column(torch.float32, late=True),
    "policy": gear.Column(torch.int64, per="trajectory"),
}


def contents_of(table: gear.Table) -> dict[str, Any]:
    """Everything that a checkpoint keeps, but for the ages, as JSON."""
    table.check_valid()
    slots, stats = table.indices(), table.stats()
    arrays, layout = table._engine.index.arrays, table._engine.region.layout
    return {
        "rules": table.rules.to_json(),
        "sizes": [layout.max_steps, layout.max_trajectories, layout.block_steps],
        "counts": [stats.num_inserted, stats.num_sampled, int(arrays.counters[NEXT_SEQUENCE])],
        "origin": table.origin,
        "ids": table.ids(slots).tolist(),
        "sequences": arrays.sequence[slots].tolist(),
        "lengths": arrays.extent[slots, 0].tolist(),
        "finals": arrays.extent[slots, 2].tolist(),
        "filled": filled_bits(arrays, slots).tolist(),
        "priorities": arrays.priority[slots].tolist(),
        "times sampled": arrays.sampled[slots].tolist(),
        "values": [{name: bits(value).hex() for name, value in table[int(slot)].items()} for slot in slots],
    }
