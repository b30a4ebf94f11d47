"""The compiled loops of a save: what has changed since the last one, and copies of rows out of a table that is in use.

They take raw addresses, which the callers have checked, and release the GIL.
"""

from __future__ import annotations

import numpy as np
from numba import int64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_apart, copy_bytes, fill, order_stores

# States of a trajectory in `copy_out`.
COPIED, LOST, ON_DISK, CORRUPT = range(4)

_READY = 2
_RUNS = 32
"""Position in `counters` of the number of compactions of the block tables."""
_ATTEMPTS = 10_000
_BATCH = 64
"""Blocks whose ids are read at once."""


@compiled
def find_changes(  # type: ignore[no-untyped-def]
    most,
    among,
    state,
    generation,
    sequence,
    extent,
    created,
    ident,
    filled,
    sampled,
    priority,
    known,
    slots,
    records,
):
    """Compare live trajectories with the records of a save.

    Without the table's lock the answers for slots that change meanwhile mean nothing.

    Args:
        most: number of slots to compare. among: int64 [most], which ones; or [0] for the first ones.
        state, generation, sequence, extent, created, ident, filled, sampled: arrays of an index.
        priority: those of an index, viewed as int32.
        known: int64 [slots, words], words of a record for each slot; its first is -1 where there is none.
        slots: int64 [most], output: the slots that differ. records: int64 [most, words], output: their present
            records; the first word is -1 where the trajectory is gone, and what says where its rows are is 0 where
            they are new.

    Returns:
        The number of slots that differ.
    """
    count = 0
    for i in range(most):
        slot = among[i] if len(among) > 0 else i
        if state[slot] != _READY:
            if known[slot, 0] >= 0:
                slots[count] = slot
                records[count, :] = 0
                records[count, 0] = -1
                count += 1
            continue
        bits = int64(0)
        if len(filled) > 0 and filled[slot, 0] == generation[slot]:
            bits = filled[slot, 1]
        draws = (int64(priority[slot]) << 32) | (int64(sampled[slot]) & 0xFFFFFFFF)
        length, final = int64(extent[slot, 0]), int64(extent[slot, 2])
        same = (
            known[slot, 0] == sequence[slot]
            and known[slot, 1] == length
            and known[slot, 4] == bits
            and known[slot, 6] & 0xFFFFFFFF == final
        )
        if (
            same
            and known[slot, 5] == draws
            and known[slot, 2] == created[slot]
            and known[slot, 3] == ident[slot]
        ):
            continue
        slots[count] = slot
        records[count, 0], records[count, 1] = sequence[slot], length
        records[count, 2], records[count, 3] = created[slot], ident[slot]
        records[count, 4], records[count, 5] = bits, draws
        if same:
            for word in range(6, known.shape[1]):
                records[count, word] = known[slot, word]
        else:
            records[count, 6:] = 0
            records[count, 6] = final
        count += 1
    return count


@compiled
def copy_out(  # type: ignore[no-untyped-def]
    address,
    low,
    high,
    first,
    ends,
    before,
    slots,
    sequences,
    held,
    column,
    state,
    sequence,
    extent,
    block_ids,
    counters,
    num_blocks,
    found,
):
    """Copy bytes of a segment's file, which holds trajectories one after another, out of their blocks.

    Nobody waits for it: a trajectory may be evicted meanwhile, and its blocks used again. Each is looked at after it
    was copied; of one that was evicted come zeros.

    Args:
        address: of the buffer for bytes `low` to `high` - 1 of the file's rows.
        first, ends: int64 [n], ascending: first row of each trajectory, and the row after its last. before: int64 [n],
            its steps that the file does not have: those before the first row.
        slots, sequences: int64 [n], the trajectories.
        held: whether a read ticket keeps their blocks, so that also evicted ones are whole.
        column: int64 [5], as for `gear_loader.native.copying.copy_rows`.
        state, sequence, extent, block_ids, counters: arrays of the index. num_blocks: of the table.
        found: uint8 [n], the state of each: LOST stays, and is set; ON_DISK is set where nothing was copied because it
            lies on disk only, CORRUPT where its block table is invalid; else COPIED.
    """
    base, stride, size, every, block_steps = column[0], column[1], column[2], column[3], column[4]
    ids = np.empty(_BATCH, dtype=np.int64)
    i = np.searchsorted(ends, low // size, side="right")
    while i < len(first) and first[i] * size < high:
        begin, end = max(low, first[i] * size), min(high, ends[i] * size)
        slot, zero = slots[i], first[i] - before[i]  # where the row of its first step would be
        status = LOST if found[i] == LOST else COPIED
        start = begin
        while start < end and status == COPIED:
            block = (start // size - zero) // block_steps
            most = min(end, (zero + (block + _BATCH) * block_steps) * size)
            count = ((most - 1) // size - zero) // block_steps + 1 - block
            # The ids of a trajectory's blocks never change, but their place does when block tables are compacted.
            known, turn = False, 0
            while not known and turn < _ATTEMPTS and status == COPIED:
                turn += 1
                place, runs = int64(extent[slot, 1]), counters[_RUNS]
                if not held and (state[slot] != _READY or sequence[slot] != sequences[i]):
                    status = LOST
                elif place < 0:
                    status = ON_DISK
                elif place + block + count <= len(block_ids):
                    known = True
                    for j in range(count):
                        ids[j] = block_ids[place + block + j]
                        known = known and ids[j] >= 0 and ids[j] < num_blocks
                    order_stores()
                    known = known and place == extent[slot, 1] and runs == counters[_RUNS]
            if not known:
                status = CORRUPT if status == COPIED else status
                break
            while start < most:
                step = start // size - zero
                part = start - (zero + step) * size  # bytes of this step that precede `start`
                at = step // block_steps
                limit = min(most, (zero + (at + 1) * block_steps) * size)
                here = base + ids[at - block] * stride + (step - at * block_steps) * every + part
                there = address + start - low
                if every == size:
                    taken = limit - start
                elif part > 0 or limit - start < size:
                    taken = min(size - part, limit - start)
                else:
                    taken = (limit - start) // size * size
                    copy_apart(there, size, here, every, taken // size, size)
                    start += taken
                    continue
                copy_bytes(there, here, taken)
                start += taken
        order_stores()
        if not held and status == COPIED and (state[slot] != _READY or sequence[slot] != sequences[i]):
            status = LOST
        if status in (LOST, CORRUPT):
            fill(address + begin - low, 0, end - begin)
        found[i] = status
        i += 1
