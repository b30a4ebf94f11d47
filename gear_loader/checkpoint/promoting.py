"""Bringing trajectories that lie on disk only back into memory."""

from __future__ import annotations

import functools

import numpy as np

from gear_loader.checkpoint.places import column_places
from gear_loader.errors import StaleIndexError
from gear_loader.native.copying import copy_rows
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.engine import Engine
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.tier_counts import PROMOTED_BYTES
from gear_loader.utils.arrays import Array, data_address

__all__ = ["LARGEST_BYTES", "promote"]

LARGEST_BYTES = 8 << 20
"""Bytes of the largest trajectory that is brought back: it is copied under the table's lock, in about a millisecond."""


def promote(engine: Engine, slots: Array, *, most_bytes: int | None = LARGEST_BYTES) -> int:
    """Bring trajectories back into memory as far as blocks are free; return how many. They stay on disk too.

    Args:
        engine: of a table with a disk tier.
        slots: int64 [n], distinct. Those that are gone, in memory, or larger than `most_bytes` are skipped.
        most_bytes: of a trajectory; None for any.
    """
    arrays, schema = engine.index.arrays, engine.schema
    # Before it is read on disk, and the bits before the extent: what is filled is there if it lies there only.
    generations, filled, extent = arrays.generation[slots], filled_bits(arrays, slots), arrays.extent[slots]
    rows = extent[:, 0] + extent[:, 2]
    chosen = extent[:, 1] < 0
    if most_bytes is not None:
        chosen &= rows * schema.step_bytes + schema.trajectory_bytes <= most_bytes
    slots, generations, rows = slots[chosen], generations[chosen], rows[chosen]
    known = np.column_stack((extent[:, [0, 2]], filled))[chosen].tolist()
    if not len(slots):
        return 0
    ends = np.cumsum(rows)
    outs = {}
    for name, column in schema.items():
        begins = np.arange(len(slots)) if column.trajectory else ends - rows
        count = len(slots) if column.trajectory else int(ends[-1])
        outs[name] = np.empty(count * column.step_bytes, dtype=np.uint8), begins * column.step_bytes
    try:
        engine.tier_reader().read(slots, generations, np.zeros_like(rows), rows, outs)
    except LostRowsError as error:
        engine.remove_lost(error)
        return 0
    except StaleIndexError:
        return 0
    places = {name: column_places(engine.region, name) for name in schema}

    def write(i: int, ids: Array) -> None:
        zero = np.zeros(1, dtype=np.int64)
        for name, (out, offsets) in outs.items():
            count = 1 if schema[name].trajectory else int(rows[i])
            size = count * schema[name].step_bytes
            address = data_address(out) + int(offsets[i])
            copy_rows(address, 0, size, zero, np.array([count]), zero, ids, places[name], True)

    done = [
        engine.index.promote(slot, generation, tuple(known[i]), functools.partial(write, i))
        for i, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True))
    ]
    arrays.tier_counts[PROMOTED_BYTES] += int(rows[done].sum()) * schema.step_bytes  # of the owner alone
    return sum(done)
