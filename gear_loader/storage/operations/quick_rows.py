"""Rows of growing trajectories that need no change of the index, written behind the steps that are visible.

The loops use addresses, not arrays: compiled code counts the references of arrays, which takes longer than a row.
"""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba import njit, types
from numba.extending import intrinsic

from gear_loader.native.lanes import LANE_GENERATION, LANE_SLOT, LANE_STEPS, LANE_WIDTH
from gear_loader.native.memory import copy_step, differ_step, prefetch
from gear_loader.storage.operations.view import View

assert (LANE_SLOT, LANE_GENERATION, LANE_STEPS, LANE_WIDTH) == (
    0,
    1,
    2,
    8,
)  # compiled into the cached machine code
assert [View._fields.index(name) for name in ("extent", "generation", "state", "block_ids")] == [2, 3, 11, 13]
assert [View._fields.index(name) for name in ("block_steps", "num_slots", "num_blocks", "half_size")] == [
    22,
    24,
    25,
    26,
]

TOGETHER = 32
"""Lanes that are looked at before the first of them is written: their places in memory are fetched at the same time."""


def _load_of(size: int) -> Any:
    @intrinsic  # type: ignore[untyped-decorator]
    def load(_context: Any, _address: Any) -> Any:
        def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
            kind = ir.IntType(size)
            value = builder.load(builder.inttoptr(args[0], kind.as_pointer()), align=size // 8)
            return value if size == 64 else builder.sext(value, ir.IntType(64))

        return types.int64(types.int64), codegen

    return load


_load, _load_32 = _load_of(64), _load_of(32)


@intrinsic  # type: ignore[untyped-decorator]
def _store(_context: Any, _address: Any, _value: Any) -> Any:
    def codegen(_context: Any, builder: Any, _signature: Any, args: Any) -> Any:
        builder.store(args[1], builder.inttoptr(args[0], ir.IntType(64).as_pointer()), align=8)

    return types.void(types.int64, types.int64), codegen


@njit  # type: ignore[untyped-decorator]
def write_rows(  # type: ignore[no-untyped-def]
    places, lanes, n, width, columns, sources, following, finals, kinds, cut, ends, wanted, scratch
) -> None:
    """Write the row of each lane that goes on with its trajectory in the block of that one's final step, and does not
    end it. Their kinds become 0; all others are left to `append_lanes`.

    Args:
        places: address of the result of `places_of`. lanes, columns, sources, following, finals, kinds: addresses of
            what `append_lanes` gets. n, width: number of lanes, and of columns. cut: steps that none gets.
            ends: kinds with one of these bits are left out. wanted: state of the trajectories. scratch: address of 3 *
            TOGETHER words.
    """
    extent, generation, state, block_ids = (
        _load(places + 16),
        _load(places + 24),
        _load(places + 88),
        _load(places + 104),
    )
    block_steps, slots = _load(places + 176), _load(places + 192)
    blocks, entries = _load(places + 200), 2 * _load(places + 208)
    for first in range(0, n, TOGETHER):
        count = 0
        for i in range(first, min(first + TOGETHER, n)):
            kind, lane = _load(kinds + 8 * i), lanes + 64 * i
            steps, slot = _load(lane + 16), _load(lane)
            if kind == 0 or kind & ends != 0 or steps <= 0 or steps + 1 >= cut or slot < 0 or slot >= slots:
                continue
            if _load_32(state + 4 * slot) != wanted or _load(generation + 8 * slot) != _load(lane + 8):
                continue
            start, final = _load(extent + 24 * slot + 8), _load(extent + 24 * slot + 16)
            place = steps // block_steps
            inside = steps - place * block_steps
            if final == 0 or start < 0 or start + place >= entries or inside + 1 >= block_steps:
                continue
            block = _load_32(block_ids + 4 * (start + place))
            if block < 0 or block >= blocks:
                continue
            here = scratch + 24 * count
            _store(here, i)
            _store(here + 8, block)
            _store(here + 16, inside)
            prefetch(_load(columns) + block * _load(columns + 8) + inside * _load(columns + 24))
            count += 1
        for c in range(width):
            if _load(finals + 8 * c) == 1:
                column, source = columns + 32 * c, sources + 24 * c
                base, stride, size, every = (
                    _load(column),
                    _load(column + 8),
                    _load(column + 16),
                    _load(column + 24),
                )
                rows, apart = _load(source), _load(source + 8)
                same = 0
                for j in range(count):
                    here, there = scratch + 24 * j, scratch + 24 * same
                    i, block, inside = _load(here), _load(here + 8), _load(here + 16)
                    if not differ_step(base + block * stride + inside * every, rows + i * apart, size):
                        _store(there, i)
                        _store(there + 8, block)
                        _store(there + 16, inside)
                        same += 1
                count = same
        for c in range(width):
            column, ahead = columns + 32 * c, _load(finals + 8 * c)
            source = (following if ahead == 1 else sources) + 24 * c
            stride, size, every = _load(column + 8), _load(column + 16), _load(column + 24)
            base = _load(column) + ahead * every
            rows, apart = _load(source), _load(source + 8)
            for j in range(count):
                here = scratch + 24 * j
                copy_step(
                    base + _load(here + 8) * stride + _load(here + 16) * every,
                    rows + _load(here) * apart,
                    size,
                )
        for j in range(count):
            i = _load(scratch + 24 * j)
            _store(lanes + 64 * i + 16, _load(lanes + 64 * i + 16) + 1)
            _store(kinds + 8 * i, 0)
