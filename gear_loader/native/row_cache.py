"""The compiled loops of the cache for rows of other nodes: a hash index with linear probing, and copies of its rows.

The index is an int32 array of a power of two places, at most half of them used: the number of an entry, or -1. The key
of an entry is int64 [KEY]: shard, slot, step, generation, extent. The first three name a row and are hashed; the other
two tell whether the row is still the same.
"""

from __future__ import annotations

from numba import int64, njit, uint64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_bytes

KEY = 5
"""Numbers of a key."""
NAME = 3
"""Numbers of it that name a row."""
ABSENT = -1
"""Entry of a row that is not in the index."""


@njit(inline="always")
def _home(key, mask):  # type: ignore[no-untyped-def]
    """First place of a key."""
    mixed = uint64(0x9E3779B97F4A7C15)
    for i in range(NAME):
        mixed = (mixed ^ uint64(key[i])) * uint64(0xBF58476D1CE4E5B9)
        mixed ^= mixed >> uint64(29)
    return int64(mixed & uint64(0x7FFFFFFFFFFFFFFF)) & mask


@njit(inline="always")
def _place(index, keys, key):  # type: ignore[no-untyped-def]
    """Place of a name in the index, or the free place where it would be."""
    mask = int64(len(index) - 1)
    at = _home(key, mask)
    while index[at] >= 0:
        entry = index[at]
        same = True
        for i in range(NAME):
            same = same and keys[entry, i] == key[i]
        if same:
            break
        at = (at + 1) & mask
    return at


@compiled
def find(index, keys, wanted, found) -> None:  # type: ignore[no-untyped-def]
    """Find rows whose whole keys are the same.

    Args:
        index: int32 [P]. keys: int64 [C, KEY], of the entries. wanted: int64 [n, KEY].
        found: int64 [n], output: entry of each row, or ABSENT.
    """
    for b in range(len(wanted)):
        entry = int64(index[_place(index, keys, wanted[b])])
        if entry >= 0:
            for i in range(NAME, KEY):
                if keys[entry, i] != wanted[b, i]:
                    entry = int64(ABSENT)
                    break
        found[b] = entry


@njit
def _remove(index, keys, entry):  # type: ignore[no-untyped-def]
    """Remove an entry; those behind it move up, so that every one is found from its first place on."""
    mask = int64(len(index) - 1)
    gap = _place(index, keys, keys[entry])
    at = gap
    while True:
        at = (at + 1) & mask
        other = index[at]
        if other < 0:
            break
        home = _home(keys[other], mask)
        if ((at - home) & mask) >= ((at - gap) & mask):
            index[gap] = other
            gap = at
    index[gap] = ABSENT


@compiled
def put(  # type: ignore[no-untyped-def]
    index, keys, value, state, coldest, threshold, wanted, values, least, now, entries
) -> int:
    """Choose entries for rows that were received, and give them their keys.

    A row takes the entry that has its name; else one that is free; else that of the next of the coldest entries, if
    that one is colder than the row asks for.

    Args:
        index: int32 [P]. keys: int64 [C, KEY]. value: float64 [C]: with `now` added, how cold an entry is.
        state: int64 [3]: entries in use, which come first; entries that may be used; next one of `coldest`.
        coldest: int64 [m], entries that were the coldest when they were listed, the coldest one first.
        threshold: `value` of the last one then: whichever is below it has been used since, and is passed over.
        wanted: int64 [n, KEY]. values: float64 [n], of the rows.
        least: float64 [n], how cold an entry must be to make room for a row.
        now: time of this batch.
        entries: int64 [n], output: of each row, or ABSENT.

    Returns:
        Number of rows that were looked at. The others need another list of the coldest entries.
    """
    for b in range(len(wanted)):
        entries[b] = ABSENT
        at = _place(index, keys, wanted[b])
        entry = int64(index[at])
        if entry < 0:
            if state[0] < state[1]:
                entry = state[0]
                state[0] += 1
            else:
                while state[2] < len(coldest) and value[coldest[state[2]]] < threshold:
                    state[2] += 1
                if state[2] == len(coldest):
                    return b
                victim = coldest[state[2]]
                if value[victim] + now <= least[b]:
                    continue
                state[2] += 1
                _remove(index, keys, victim)
                entry = victim
                at = _place(index, keys, wanted[b])
            index[at] = entry
        for i in range(KEY):
            keys[entry, i] = wanted[b, i]
        value[entry] = values[b]
        entries[b] = entry
    return len(wanted)


@compiled
def load_rows(addresses, pieces, rows) -> None:  # type: ignore[no-untyped-def]
    """Copy entries to rows of a batch.

    Args:
        addresses: int64 [n], of the entries.
        pieces: int64 [P, 3]: bytes before a piece in an entry, address of row 0 of the output, bytes of a row.
        rows: int64 [n], of the output.
    """
    for b in range(len(rows)):
        for p in range(pieces.shape[0]):
            size = pieces[p, 2]
            copy_bytes(pieces[p, 1] + rows[b] * size, addresses[b] + pieces[p, 0], size)


@compiled
def save_rows(addresses, pieces, rows) -> None:  # type: ignore[no-untyped-def]
    """Copy rows into entries; the arguments are those of `load_rows`, with the input in place of the output."""
    for b in range(len(rows)):
        for p in range(pieces.shape[0]):
            size = pieces[p, 2]
            copy_bytes(addresses[b] + pieces[p, 0], pieces[p, 1] + rows[b] * size, size)
