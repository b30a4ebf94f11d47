"""n-step returns, computed by the loop that gathers on the CPU, out of the blocks of a table.

Of each return a plan has a column of rewards, one of ends, and those that are delivered at the bootstrap step. `ROLE`
says which they are, and of which return; other fields have other meanings there::

                REWARD                   DONE                          NEXT
    OUT         float32 [B], returns     float32 [B], discounts        as of other columns
    MASK        bool [B], valid          int64 [B], bootstrap steps    0
    LENGTH      n
    PAD         number in `DTYPES`
    OFFSET      bits of gamma, float64   bits of a value that count
"""

from __future__ import annotations

import math

import numpy as np
from numba import carray, int64, njit

from gear_loader.kernels.plan import BLOCKS, FINAL, LENGTH, MASK, OFFSET, OUT, PAD, ROLE, STEP_BYTES
from gear_loader.native.memory import fill, pointer, prefetch
from gear_loader.native.spans import extent_of, source_of

ROLES = 4
REWARD, DONE, NEXT = 1, 2, 3  # of return 0; of the next one `ROLES` more
DTYPES = (
    "float32",
    "float64",
    "bool",
    "uint8",
    "int8",
    "int16",
    "int32",
    "int64",
    "float16",
    "bfloat16",
)
"""Dtypes of rewards."""
_AHEAD = 16
"""Rows before a row is computed when its lines are requested."""
assert (STEP_BYTES, OUT, LENGTH, OFFSET, PAD, MASK, ROLE, BLOCKS, FINAL) == (2, 3, 4, 5, 6, 7, 8, 9, 10)


@njit(inline="always")
def _half(bits, digits):  # type: ignore[no-untyped-def]
    """The value of a number of 16 bits whose fraction has so many digits."""
    top, one = (1 << (15 - digits)) - 1, 1 << digits
    exponent, fraction = (bits >> digits) & top, bits & (one - 1)
    if exponent == top:
        value = math.inf if fraction == 0 else math.nan
    else:
        value = math.ldexp(
            float(fraction + (one if exponent > 0 else 0)), max(exponent, 1) - (top >> 1) - digits
        )
    return -value if bits >> 15 else value


@njit
def _reward(address, dtype):  # type: ignore[no-untyped-def]
    """The reward at an address, as float32."""
    place, value = pointer(address), 0.0
    if dtype == 0:
        value = np.float64(carray(place, (1,), np.float32)[0])
    elif dtype == 1:
        value = carray(place, (1,), np.float64)[0]
    elif dtype in (2, 3):
        value = float(carray(place, (1,), np.uint8)[0])
    elif dtype == 4:
        value = float(carray(place, (1,), np.int8)[0])
    elif dtype == 5:
        value = float(carray(place, (1,), np.int16)[0])
    elif dtype == 6:
        value = float(carray(place, (1,), np.int32)[0])
    elif dtype == 7:
        return np.float32(carray(place, (1,), np.int64)[0])  # rounded once
    else:
        value = _half(int64(carray(place, (1,), np.uint16)[0]), 10 if dtype == 8 else 7)
    return np.float32(value)


@njit
def _bits(address, size):  # type: ignore[no-untyped-def]
    """The bits of a value of 1, 2, 4 or 8 bytes."""
    place = pointer(address)
    if size == 1:
        return int64(carray(place, (1,), np.uint8)[0])
    if size == 2:
        return int64(carray(place, (1,), np.uint16)[0])
    if size == 4:
        return int64(carray(place, (1,), np.uint32)[0])
    return carray(place, (1,), np.int64)[0]


@njit  # type: ignore[untyped-decorator]
def n_step(  # type: ignore[no-untyped-def]
    columns, number, slots, anchors, extent, block_ids, block_steps, first, last, rows, chosen, out
) -> int:
    """Compute a return of each row, see `gear_loader.collection.n_step.NStep`; arguments as of `gathering.gather`.

    Args:
        number: of the return. out: int64 [n], gets the bootstrap steps of entries `first` to `last - 1`.

    Returns:
        Number of rows of which a slot or block is invalid.
    """
    reward = done = bad = 0
    for c in range(len(columns)):
        if columns[c, ROLE] == ROLES * number + REWARD:
            reward = c
        elif columns[c, ROLE] == ROLES * number + DONE:
            done = c
    n, dtype = columns[reward, LENGTH], columns[reward, PAD]
    gamma = columns[reward : reward + 1, OFFSET].copy().view(np.float64)[0]
    size, counting = columns[done, STEP_BYTES], columns[done, OFFSET]
    most = min(columns[reward, BLOCKS], columns[done, BLOCKS])
    for b in range(first - _AHEAD, last):
        ahead = b + _AHEAD
        if ahead < last and 0 <= slots[ahead] < len(extent):
            block = anchors[ahead] // block_steps
            place = extent_of(extent, slots[ahead])[1] + block
            if 0 <= place < len(block_ids) and 0 <= block_ids[place] < most:
                inside = anchors[ahead] - block * block_steps
                prefetch(source_of(columns, reward, int64(block_ids[place]), inside))
                prefetch(source_of(columns, done, int64(block_ids[place]), inside))
        if b < first:
            continue
        steps, row, more = int64(0), int64(0), int64(0)
        if 0 <= slots[b] < len(extent):
            steps, row, more = extent_of(extent, slots[b])
        else:
            bad += 1
        anchor, stop = anchors[b], steps + more * columns[reward, FINAL]
        ends = steps + more * columns[done, FINAL]
        block = anchor // block_steps
        inside, block_id = anchor - block * block_steps, int64(-1)
        count, ended, total, factor, total_before, factor_before = int64(0), False, 0.0, 1.0, 0.0, 1.0
        while count < n and not ended and 0 <= anchor + count < stop:
            if inside == block_steps:
                block, inside, block_id = block + 1, int64(0), int64(-1)
            if block_id < 0:
                place = row + block
                block_id = int64(block_ids[place]) if 0 <= place < len(block_ids) else int64(-1)
                if block_id < 0 or block_id >= most:
                    bad += 1
                    break
            total_before, factor_before = total, factor
            flag = _bits(source_of(columns, done, block_id, inside), size) & counting
            ended = flag != 0 and anchor + count < ends
            total += factor * _reward(source_of(columns, reward, block_id, inside), dtype)
            factor *= gamma
            count += 1
            inside += 1
        if not ended and not 0 <= anchor + count < steps + more:
            count, total, factor = count - 1, total_before, factor_before
        target = rows[b] if chosen else b
        carray(pointer(columns[reward, OUT] + 4 * target), (1,), np.float32)[0] = total
        carray(pointer(columns[done, OUT] + 4 * target), (1,), np.float32)[0] = 0.0 if ended else factor
        carray(pointer(columns[done, MASK] + 8 * target), (1,), np.int64)[0] = anchor + count
        fill(columns[reward, MASK] + target, int64(count > 0), 1)
        out[b] = anchor + count
    return bad
