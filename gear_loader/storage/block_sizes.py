"""Steps of a block: how many waste least, and whether those of a table waste much."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.layout import LARGEST_COUNT, LARGEST_SIZE, LINE, Layout, Record, block_unit, round_up
from gear_loader.storage.schema import Schema
from gear_loader.storage.stats import BLOCK_ENTRY_BYTES, TableStats
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import byte_count

_MOST = 1 << 16  # steps of the largest blocks that are considered
_TOLERANCE = (
    1.01  # blocks this much worse than the best are as good; of those the largest are read in longer pieces
)
_WASTE = 0.25  # share of the resident bytes of which a notice tells
_LEAST_BYTES = 1 << 20  # payload from which on that matters
_GAIN = 0.1  # share of the resident bytes that other blocks must save to be named
_MEASURED, _CANDIDATES = 4096, 200  # lengths that are measured, and sizes of blocks that are tried


def expected_bytes(schema: Schema, block_steps: Array, mean_length: float, *, packed: bool = False) -> Array:
    """Expected resident bytes of one trajectory, for lengths of a geometric distribution.

    A trajectory of L steps takes ceil(L / block_steps) blocks. Each block has its records, and its steps in every other
    column, rounded up to 128 bytes (see `block_unit`), and its entries in the index; and each trajectory has a slot.

    Args:
        schema: the columns.
        block_steps: int64 [n], steps of a block.
        mean_length: mean length of the trajectories in steps, at least 1.
        packed: whether narrow columns share a record.

    Returns:
        float64 [n].
    """
    with np.errstate(divide="ignore"):  # a mean of 1 is one step always
        blocks = -1 / np.expm1(block_steps * np.log1p(-1 / mean_length))
    return _bytes_of(schema, block_steps, blocks, packed=packed)


def measured_bytes(schema: Schema, block_steps: Array, rows: Array, *, packed: bool = False) -> Array:
    """Resident bytes of one trajectory on average, float64 [n], of trajectories that have so many rows (int64 [m]).

    Other arguments as for `expected_bytes`.
    """
    different, counts = np.unique(rows, return_counts=True)
    blocks = -(-different // block_steps[:, None]) @ counts / len(rows)
    return _bytes_of(schema, block_steps, blocks, packed=packed)


def _bytes_of(schema: Schema, block_steps: Array, blocks: Array, *, packed: bool) -> Array:
    """Resident bytes of one trajectory with so many blocks on average, float64 [n]."""
    slot = Layout(schema, max_steps=1, max_trajectories=1, block_steps=1, num_blocks=1).slot_bytes
    record = Record.of(schema) if packed else None
    sizes = [] if record is None else [(record.bytes, record.block_unit)]
    sizes += [
        (column.step_bytes, block_unit(column))
        for name, column in schema.steps.items()
        if record is None or name not in record.offsets
    ]
    strides = sum(-(-block_steps * size // unit) * unit for size, unit in sizes)
    once = sum(round_up(column.step_bytes, block_unit(column)) for column in schema.per_trajectory.values())
    result: Array = blocks * (strides + once + BLOCK_ENTRY_BYTES) + slot
    return result


def best_block_steps(schema: Schema, mean_length: float, largest: int, *, packed: bool = False) -> int:
    """The steps of a block that waste least, see `expected_bytes`; of those within 1% of it, the most.

    Args:
        schema: the columns. mean_length: in steps, at least 1. largest: most steps of a block. packed: as for
            `expected_bytes`.
    """
    candidates = np.arange(1, min(largest, _MOST) + 1)
    expected = expected_bytes(schema, candidates, mean_length, packed=packed)
    return int(candidates[expected <= expected.min() * _TOLERANCE][-1])


def resolved_block_steps(
    schema: Schema,
    block_steps: Any,
    mean_length: Any,
    *,
    max_steps: Any,
    max_trajectories: Any,
    packed: bool = False,
) -> Any:
    """`block_steps` as given to `Table.create`, or what ``"auto"`` stands for.

    Raises:
        SchemaError: another string, or a mean length that is invalid or without ``"auto"``.
    """
    if not isinstance(block_steps, str):
        if mean_length is not None:
            raise SchemaError(
                f"mean_length is {shown(mean_length)} with block_steps={shown(block_steps)}; it goes with "
                "block_steps='auto'."
            )
        return block_steps
    if block_steps != "auto":
        raise SchemaError(f"block_steps is {block_steps!r}; expected a number of steps, or 'auto'.")
    sizes = (max_steps, max_trajectories)
    if any(isinstance(size, bool) or not isinstance(size, (int, np.integer)) or size < 1 for size in sizes):
        return 1  # `Table.create` refuses the sizes
    if mean_length is None:
        mean_length = max(1.0, max_steps / max_trajectories)
    real = isinstance(mean_length, (numbers.Real, np.generic)) and not isinstance(mean_length, bool)
    if not real or not 1 <= mean_length <= LARGEST_SIZE:  # False for NaN
        raise SchemaError(
            f"mean_length is {shown(mean_length)}; expected a mean number of steps, at least 1."
        )
    return best_block_steps(schema, float(mean_length), int(max_steps), packed=packed)


def resolved_packing(schema: Schema, packed: bool | Literal["auto"]) -> bool:
    """`Memory.packed`, or what ``"auto"`` stands for."""
    return Record.of(schema) is not None if packed == "auto" else packed


def blocks_within(memory: int | str, most: int, schema: Schema, **options: Any) -> int:
    """The largest number of blocks, at most `most`, whose region has at most `memory` bytes; on a GPU, blocks alone.

    Args:
        memory: see `byte_count`. options: of `Layout`.

    Raises:
        SchemaError: not even one block fits.
    """
    count = byte_count("memory", memory)

    def needed(blocks: int) -> int:
        layout = Layout(schema, num_blocks=blocks, **options)
        return layout.device_bytes or layout.region_bytes

    if needed(1) > count:
        index = f"the index of {options['max_trajectories']:,} trajectories and "
        raise SchemaError(
            f"memory is {memory!r}, {count:,} bytes; {'' if options.get('device') else index}one block of "
            f"{options['block_steps']} steps take {needed(1):,}. Raise it, or lower max_trajectories."
        )
    fits, above = 1, min(most, LARGEST_COUNT) + 1
    while above - fits > 1:
        middle = (fits + above) // 2
        fits, above = (middle, above) if needed(middle) <= count else (fits, middle)
    return fits


def waste_remedy(layout: Layout, stats: TableStats, rows_of: Callable[[], Array]) -> str | None:
    """What to say of a table of whose resident bytes more than a quarter hold no steps, if other blocks would help.

    Args:
        layout, stats: of the table. rows_of: returns steps and final steps of its trajectories, int64 [n].

    Returns:
        None if nothing is to be said.
    """
    schema, fixed = layout.schema, layout.arrays["extent"][0]
    payload = stats.payload_bytes - stats.value_bytes
    wasted = 1 - payload / (stats.resident_bytes - stats.value_resident_bytes)
    if payload < _LEAST_BYTES or wasted <= _WASTE or not len(rows := rows_of()):
        return None
    if len(rows) > _MEASURED:
        rows = np.sort(rows)[:: -(-len(rows) // _MEASURED)]
    longest, count = int(rows.max()), stats.num_trajectories
    candidates = [*np.geomspace(1, min(longest, _MOST), _CANDIDATES), *(longest / np.arange(1, 33))]
    steps = np.unique(np.ceil(np.clip(candidates, 1, _MOST)).astype(np.int64))
    measured = fixed + count * measured_bytes(
        schema, np.append(steps, stats.block_steps), rows, packed=layout.packed
    )
    totals, before = measured[:-1], measured[-1]
    if 1 - payload / before <= _WASTE:
        return None  # it is what writers and readers hold for now
    best = np.flatnonzero(totals <= totals.min() * _TOLERANCE)[-1]
    if totals[best] >= (1 - _GAIN) * before:
        return None
    share = max(0, math.ceil(100 * (1 - payload / totals[best])))
    return (
        f"{wasted:.0%} of the bytes in use hold no steps: the trajectories have {stats.mean_length:.1f} steps on "
        f"average, the blocks {stats.block_steps}, and blocks are padded to {LINE} bytes. With "
        f"Table.create(block_steps={steps[best]}) these trajectories would waste about {share}%."
    )
