"""Range checks of an index: finds values that another process wrote by mistake."""

from __future__ import annotations

import numpy as np

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage import counters as at
from gear_loader.storage.ids import LARGEST_ORIGIN
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.view import ON_DISK
from gear_loader.storage.states import FREE, READY, RETIRED
from gear_loader.utils.arrays import Array

_REASONS = at.NUM_EVICTED, at.NUM_REMOVED, at.NUM_EXPIRED, at.NUM_OUTDATED
"""Counters of trajectories that left."""


def damage(index: IndexArrays) -> str | None:
    """Description of the first out-of-range value in the index, or None."""
    marks = (at.COMMITTING, at.REMOVING, at.DRAWING, at.LEAVING, at.RAISING, at.MOVING)
    logged = int(index.counters[at.LOGGED][0])
    if not index.counters[at.DIRTY] and (logged or any(index.counters[mark] for mark in marks)):
        return "a change is marked as unfinished and as finished"
    return bad_marks(index) or bad_slots(index) or _bad_derived(index)


def bad_marks(index: IndexArrays) -> str | None:
    """Description of the first invalid intent record, or None."""
    counters, slots = index.counters, index.num_slots
    if not 0 <= counters[at.MOVING] <= 2 or not 0 <= counters[at.HALF] <= 1:
        return f"the half in use is {counters[at.HALF]}, being moved to {counters[at.MOVING]}"
    if not (0 <= counters[at.DRAWING] <= slots and 0 <= counters[at.LEAVING] <= slots):
        return f"slots {counters[at.DRAWING]} and {counters[at.LEAVING]} are being counted"
    if counters[at.LEAVING] and counters[at.LEAVING_COUNT] not in _REASONS:
        return f"a slot is being counted at {counters[at.LEAVING_COUNT]}"
    if not 0 <= counters[at.NUM_PARKED] <= len(index.parked):
        return f"{counters[at.NUM_PARKED]} blocks are parked"
    if counters[at.LOGGED] < 0 or (counters[at.LOGGED] and not index.edit_unit):
        return f"{counters[at.LOGGED][0]} bytes of values are to be overwritten"
    return _outside("parked", index.parked, 0, index.num_blocks - 1)


def bad_slots(index: IndexArrays) -> str | None:
    """Description of the first invalid slot, or None."""
    found = _outside("state", index.state, FREE, RETIRED)
    found = found or _outside("block_ids", index.block_ids, 0, index.num_blocks - 1)
    if found is not None:
        return found
    used = index.state != FREE
    lengths, starts = index.extent[:, 0], index.extent[:, 1]
    left = np.where(starts < index.half_size, index.half_size, 2 * index.half_size) - starts
    inside = (lengths >= 1) & (lengths <= index.max_steps)
    inside &= (starts >= 0) & (starts < 2 * index.half_size)
    finals = index.extent[:, 2]
    inside &= lengths + finals <= left * index.block_steps
    if index.tier is not None:
        inside |= (starts == ON_DISK) & (lengths >= 1) & (lengths <= index.max_steps)
    inside &= (finals >= 0) & (finals <= 1)
    bad = np.flatnonzero(used & ~inside)
    if len(bad):
        length, start, final = index.extent[bad[0]].tolist()
        return f"slot {bad[0]} has {length} steps, {final} final ones and its block table at {start}"
    priority = index.priority
    odd = used & ~(np.isfinite(priority) & ((priority >= 0) | (priority == UNSET)))
    odd &= index.state == READY
    if odd.any():
        slot = np.flatnonzero(odd)[0]
        return f"slot {slot} has the priority {priority[slot]}"
    return None


def _bad_derived(index: IndexArrays) -> str | None:
    """Description of the first invalid value in the derived state, or None."""
    slots, blocks = index.num_slots, index.num_blocks
    for counts, most in (
        (
            (
                at.NUM_READY,
                at.NUM_WRITING,
                at.NUM_RETIRED,
                at.NUM_SPILLED,
                at.NUM_FREE_SLOTS,
                at.OLDEST,
                at.NEWEST,
            ),
            slots,
        ),
        ((at.NUM_FREE_BLOCKS, at.RETIRED_BLOCKS, at.WRITABLE_BLOCKS), blocks),
        ((at.HEAD, at.HEAD + 1), index.half_size),
        ((at.NUM_STEPS, at.WRITING_STEPS), index.max_steps),
        ((at.RETIRED_FIRST,), slots - 1),
        ((at.ORIGIN,), LARGEST_ORIGIN + 1),
    ):
        for place in counts:
            if not 0 <= index.counters[place] <= most:
                return f"counter {place} is {index.counters[place]}, expected 0 to {most}"
    for name, least, most in (
        ("links", -1, slots - 1),
        ("free_slots", 0, slots - 1),
        ("retired", 0, slots - 1),
        ("touched", 0, slots - 1),
        ("free_blocks", 0, blocks - 1),
        ("uses", 0, slots),
    ):
        found = _outside(name, getattr(index, name), least, most)
        if found is not None:
            return found
    return "a bound of priorities is NaN" if np.isnan(index.lowest).any() else None


def require_whole(index: IndexArrays, damage: str | None) -> None:
    """Raise CorruptTableError with the description `damage`, unless it is None."""
    if damage is not None:
        raise index.corrupt(damage)


def _outside(name: str, values: Array, least: int, most: int) -> str | None:
    """Description of the range of an array that exceeds `least` to `most`, or None."""
    found = int(values.min()), int(values.max())
    if least <= found[0] and found[1] <= most:
        return None
    return f"{name} holds {found[0]} to {found[1]}, expected {least} to {most}"
