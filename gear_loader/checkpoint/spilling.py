"""Moving trajectories of a full table to disk: those that are there already give their blocks back.

The owner's thread (`gear_loader.checkpoint.behind`) writes trajectories as it does for every table with a disk, and
notes in the index where each of them lies (`stored`). Spilling takes the blocks of such trajectories, those first that
`Disk.keep` values least, until a part of the blocks is free. So writers seldom wait.

Priorities change, and the oldest trajectories are consumed. So the thread also exchanges trajectories, a limited number
of bytes a second: those that have become hot come back into memory, and cold ones leave it.
"""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Collection

import numpy as np

from gear_loader.checkpoint.changes import OnDisk
from gear_loader.checkpoint.returning_values import ReturningValues
from gear_loader.checkpoint.shared_places import Common
from gear_loader.checkpoint.trajectory_records import rows_of, segments_of
from gear_loader.errors import StaleIndexError
from gear_loader.native.copying import copy_rows
from gear_loader.storage import counters as at
from gear_loader.storage.disk import Keep, LostRowsError
from gear_loader.storage.disk_copies import COPY, are_current, copies_of, note_copies
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.engine import Engine
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.host_part import used_in_part
from gear_loader.storage.index import Index
from gear_loader.storage.layout import Layout
from gear_loader.storage.lock import process_start
from gear_loader.storage.operations.view import LIVE
from gear_loader.storage.payload import used_bytes
from gear_loader.storage.prefixes import Relative, Relatives
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.storage.tier_counts import (
    PROMOTED_BYTES,
    WANTED_BYTES,
)
from gear_loader.storage.tier_swaps import (
    FREE_BYTES,
    coldest_first,
    coldness,
    exchange,
    kept_free,
    kept_now,
    missing_blocks,
)
from gear_loader.utils.arrays import Array, data_address

LARGEST_BYTES = 8 << 20
"""Bytes of the largest trajectory that is brought back: it is copied under the table's lock, in about a millisecond."""
EXCHANGE_BYTES = 64 << 20
"""Bytes that come back into memory in one exchange."""
LOOK_SECONDS = 0.05
"""Seconds between two looks at the memory of ragged values, or 20 times the duration of the last one."""
EXCHANGE_SECONDS = 1.0
"""Seconds between two exchanges, or 20 times the duration of the last look for trajectories to exchange."""


def kept_bytes(payload: int) -> int:
    """Bytes of the memory of ragged values that are free after spilling, which begins when half of them are."""
    return min(max(FREE_BYTES, payload // 16), payload // 4)


def levels_of(
    layout: Layout, records: Array, keep: Keep, common: Common, values: tuple[Array, Array] | None = None
) -> Array:
    """Where trajectories of a recovered table are read to, int8 [n], see `IndexArrays.levels`: the hottest into memory.

    With a disk tier a part of the memory stays free.

    Args:
        common: what they have in common.
        values: int64 [n], bytes of the memory of ragged values that they take, and of those, that the others with the
            same leader have too, if they are known.
    """
    order = coldness(keep, records["sequence"], records["priority"])[::-1]
    blocks = -(-rows_of(records) // layout.block_steps)
    blocks -= common.least_shared(order, layout.block_steps, int(bool(layout.schema.per_trajectory)))
    blocks = blocks[order]
    levels, left = np.zeros(len(order), dtype=np.int8), np.ones(len(order), dtype=bool)
    for level, most in ((1, layout.writable_blocks), (2, layout.host_blocks)):
        most -= kept_free(layout, most) if layout.tier is not None else 0
        inside = left & (np.cumsum(np.where(left, blocks, 0)) <= most)
        levels[order[inside]] = level
        left &= ~inside
    if values is not None:
        held, shared = (each[order] for each in values)
        _, first = np.unique(common.leaders[order], return_index=True)
        taken = held.copy()
        taken[first] += shared[first]
        levels[order] *= np.cumsum(taken) <= layout.payload - kept_bytes(layout.payload)
    return levels


def note_places(index: Index, slots: Array, records: Array) -> None:
    """Note where trajectories, which are not committed yet, are on disk."""
    index.recovery.locked(lambda: note_copies(index.arrays, slots, records))


class Spiller:
    """Keeps blocks of one table free.

    Args:
        index: of the table. region: its memory. keep: which trajectories stay in memory.
        late: bits of its late columns.
    """

    def __init__(self, index: Index, region: Region, keep: Keep, late: int = 0) -> None:
        self._index, self._given, self._region = index, keep, region
        self._hosted, layout = region.layout.host_blocks > 0, region.layout
        self._blocks = layout.host_blocks or layout.num_blocks
        self._free = kept_free(layout, self._blocks)
        self._next_count = 0.0
        self._next_look = 0.0
        self._arrays = index.arrays
        self._late = late
        self._next = 0.0  # time of the next exchange
        self.archived: Array = np.empty(0, dtype=np.int64)
        """Numbers of segments in an archive, from where nothing comes back: no write waits for a store."""

    @property
    def _keep(self) -> Keep:
        """Which trajectories stay in memory now."""
        return kept_now(self._arrays, self._given)

    def _coldness(self, slots: Array, sequences: Array, generations: Array) -> Array:
        return coldest_first(self._arrays, self._given, slots, sequences, generations)

    def coldest(self, on_disk: OnDisk) -> list[int]:
        """Numbers of segments that have live trajectories, the coldest first, by the mean of their rows."""
        sequences, generations = self._arrays.sequence.copy(), self._arrays.generation.copy()
        slots = np.flatnonzero(on_disk.records["sequence"] >= 0)
        slots = slots[self._coldness(slots, sequences, generations)]
        records = on_disk.records[slots]
        numbers, inverse = np.unique(records["segment"], return_inverse=True)
        rows = rows_of(records)
        ranks = np.bincount(inverse, rows * np.arange(len(slots)), len(numbers))
        order = np.argsort(ranks / np.maximum(1, np.bincount(inverse, rows, len(numbers))), kind="stable")
        return list(numbers[order].tolist())

    def announce(self, present: bool) -> None:
        """Tell writers of all processes whether this process spills."""
        pid = os.getpid() if present else 0

        def write() -> None:
            self._arrays.counters[at.SPILLER] = pid
            self._arrays.counters[at.SPILLER_START] = process_start(pid) if present else 0
            self._arrays.counters[at.DISK_FULL] = 0

        self._index.recovery.locked(write)

    def set_full(self, full: bool) -> None:
        """Tell writers whether the disk is full."""
        self._arrays.counters[at.DISK_FULL] = int(full)

    def missing(self) -> int:
        """Number of blocks to take from trajectories; 0 while enough are free. Takes no lock."""
        counters, blocks = self._arrays.counters, self._blocks
        memory = self._region.device_memory
        if self._hosted:
            now, wanted = time.monotonic(), 0 if memory is None else memory.wanted
            if not wanted and now < self._next_count:
                return 0
            free = int((used_in_part(self._arrays)[:, LIVE] == 0).sum())
            self._next_count = now + max(LOOK_SECONDS, 20 * (time.monotonic() - now))
            if memory is not None and free >= wanted:
                memory.wanted = 0
            return missing_blocks(self._free, blocks, free, wanted)
        free = int(counters[at.NUM_FREE_BLOCKS] + counters[at.RETIRED_BLOCKS])
        wanted = int(counters[at.WANTED_BLOCKS])
        return missing_blocks(self._free, blocks, free, wanted)

    def _missing_bytes(self) -> int:
        """Bytes of the memory of ragged values to take from trajectories; looked for now and then."""
        total, now = self._region.layout.payload, time.monotonic()
        wanted = int(self._arrays.tier_counts[WANTED_BYTES])
        if not total or (not wanted and now < self._next_look):
            return 0
        free = total - int(used_bytes(self._region, self._index).sum())
        self._next_look = now + max(LOOK_SECONDS, 20 * (time.monotonic() - now))
        kept = kept_bytes(total)
        if wanted:  # what is free does not suffice: it lies in small gaps
            return min(total, wanted + max(0, kept - free))
        return kept - free if free < kept // 2 else 0

    def note(self, slots: Array, records: Array) -> None:
        """Note where trajectories are on disk, after a write.

        Args:
            slots: int64 [n]. records: [n], of their trajectories; those without a number are skipped.
        """
        arrays, known = self._arrays, copies_of(self._arrays, slots)
        differs = records["sequence"] >= 0
        names = [name for name in COPY.names or () if name in records.dtype.fields]
        differs &= np.logical_or.reduce([records[name] != known[name] for name in names])
        slots, records = slots[differs], records[differs]

        def write() -> None:
            live = (arrays.state[slots] == READY) & (arrays.sequence[slots] == records["sequence"])
            note_copies(arrays, slots[live], records[live])

        self._index.recovery.locked(write)

    def lost(self, segments: Collection[int]) -> tuple[Array, Array]:
        """Slots and generations, int64 [n] each, of trajectories whose only segment a write has dropped.

        It could not read them, to write them again.

        Args:
            segments: numbers of those that the manifest names.
        """
        arrays = self._arrays
        generations = arrays.generation.copy()
        slots = np.flatnonzero((arrays.state == READY) & (arrays.extent[:, 1] < 0))
        slots = slots[~np.isin(segments_of(copies_of(arrays, slots)), list(segments)).all(axis=1)]
        return slots, generations[slots]

    def is_due(self) -> bool:
        """Whether `move` may have something to do. Takes no lock."""
        short = self._region.layout.payload > 0 and time.monotonic() >= self._next_look
        wanted = self._arrays.tier_counts[WANTED_BYTES] > 0
        return self.missing() > 0 or short or wanted or self._exchange_is_due()

    def _exchange_is_due(self) -> bool:
        # The newest stay the newest: what is added makes the others colder. Below a GPU nothing moves back.
        if self._hosted:
            return False
        spilled = self._arrays.counters[at.NUM_SPILLED] > 0
        return self._keep in ("oldest", "priority") and bool(spilled) and time.monotonic() >= self._next

    def move(self, table: Table) -> int:
        """`spill`, or exchange trajectories if no blocks are missing and it is time to.

        Args:
            table: the table, to read from.

        Returns:
            As `spill`.
        """
        missing = self.spill()
        if not missing and self._exchange_is_due():
            self._exchange(table)
        return missing

    def _exchange(self, table: Table) -> int:
        """Bring the hottest trajectories on disk back into memory, if it keeps colder ones; return how many."""
        arrays, now = self._arrays, time.monotonic()
        generations, sequences = arrays.generation.copy(), arrays.sequence.copy()
        slots = np.flatnonzero(arrays.state == READY)
        slots = slots[are_current(arrays, slots)]
        far = np.isin(segments_of(copies_of(arrays, slots)), self.archived).any(axis=1)
        far &= arrays.extent[slots, 1] < 0
        slots = slots[~far]
        order = self._coldness(slots, sequences, generations)
        extent = arrays.extent[slots]
        blocks = arrays.blocks_of(extent[:, 0] + extent[:, 2])
        block_bytes = table._engine.region.layout.block_bytes
        total, inside = self._blocks - self._free, extent[:, 1] >= 0
        used = self._blocks - int(arrays.counters[at.NUM_FREE_BLOCKS] + arrays.counters[at.RETIRED_BLOCKS])
        if (
            0 < used < (whole := int(blocks[inside].sum()))
        ):  # trajectories share some: each counts with its part
            blocks = np.maximum(1, blocks * used // whole)
        budget = max(1, EXCHANGE_BYTES // block_bytes)
        if payload := self._region.layout.payload:
            # In bytes of ragged values, those on disk by the mean of a step; blocks by the share of theirs.
            held, room = used_bytes(self._region, self._index)[slots], payload - kept_bytes(payload)
            mean = int(held[inside].sum()) / max(1, int(extent[inside, 0].sum()))
            held = np.where(inside, held, mean * extent[:, 0])
            blocks = np.maximum(held, blocks / total * room).astype(np.int64) + 1
            total, budget = room, EXCHANGE_BYTES
        come, leave = exchange(order, inside, blocks, total, budget)
        self._next = time.monotonic() + max(EXCHANGE_SECONDS, 20 * (time.monotonic() - now))
        if len(leave) and self._index.spill(slots[leave], generations[slots[leave]]) < 0:
            return 0
        return promote(table._engine, slots[come])

    def spill(self) -> int:
        """Take the blocks of the coldest trajectories that are on disk, as many as are missing.

        Returns:
            Number of blocks that are missing still, or 1 if memory of ragged values is; -1 if readers hold those that
            were taken before.
        """
        missing, missing_bytes = self.missing(), self._missing_bytes()
        if not missing:
            self._forget_wanted()
        if not missing and not missing_bytes:
            return 0
        arrays = self._arrays
        generations = (
            arrays.generation.copy()
        )  # before the states: a slot that is reused meanwhile is skipped
        sequences = arrays.sequence.copy()
        slots = np.flatnonzero((arrays.state == READY) & (arrays.extent[:, 1] >= 0))
        if self._hosted:  # what is on the GPU leaves by way of host memory
            slots = slots[arrays.levels(arrays.extent[slots, 1]) == 2]
        slots = slots[are_current(arrays, slots)]
        slots = slots[self._coldness(slots, sequences, generations)]
        if self._late:  # those of which a column is filled later last: it is filled in memory
            waiting = (filled_bits(arrays, slots) & self._late) != self._late
            slots = slots[np.argsort(waiting, kind="stable")]
        count = int(np.searchsorted(np.cumsum(arrays.blocks_at(slots)), missing)) + 1 if missing else 0
        freed = 0
        if missing_bytes:
            held = np.cumsum(used_bytes(self._region, self._index)[slots])
            count = max(count, int(np.searchsorted(held, missing_bytes)) + 1)
            freed = int(held[:count][-1]) if len(held) else 0
        slots = slots[:count]
        if not len(slots):
            return missing or 1
        if self._index.spill(slots, generations[slots]) < 0:
            return -1
        if missing_bytes:
            arrays.tier_counts[WANTED_BYTES] = 0
        self._next_count = 0.0
        missing = self.missing()
        if not missing:
            self._forget_wanted()
        return missing or int(freed < missing_bytes)

    def _forget_wanted(self) -> None:
        if not self._hosted:  # else they are wanted of the GPU's memory
            self._arrays.counters[at.WANTED_BLOCKS] = 0


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
    outs: dict[str, tuple[Array, Array]] = {}
    for name, column in schema.items():
        begins = np.arange(len(slots)) if column.trajectory else ends - rows
        count = len(slots) if column.trajectory else int(ends[-1])
        outs[name] = np.empty(count * column.step_bytes, dtype=np.uint8), begins * column.step_bytes
    try:
        engine.tier_reader().read(slots, generations, np.zeros_like(rows), rows, outs)
        values = (
            ReturningValues(engine, slots, generations, rows, outs, most_bytes) if schema.ragged else None
        )
    except LostRowsError as error:
        engine.remove_lost(error)
        return 0
    except (StaleIndexError, MovedRowsError):
        return 0
    places = {name: engine.region.column_place(name) for name in schema}
    addresses = np.stack([data_address(out) + offsets for out, offsets in outs.values()], axis=1)
    relatives, found = Relatives(arrays, slots, ragged_steps=bool(schema.steps.ragged)), Relative()

    def place(i: int) -> Relative | None:
        nonlocal found
        found = relatives.of(i)
        return found if values is None or values.place(i, found) else None

    def write(i: int, ids: Array) -> None:
        if memory is not None:
            memory.write([*schema], engine.targets, ids, addresses[i : i + 1], rows[i : i + 1])
            return
        if values is not None:
            values.write()
        zero, size = np.zeros(1, dtype=np.int64), arrays.block_steps
        # The first block is its own although others follow that are shared, if columns are per trajectory.
        own = arrays.copied_blocks if found.shared else 0
        for name, (out, offsets) in outs.items():
            address, step, total = data_address(out) + int(offsets[i]), schema[name].step_bytes, int(rows[i])
            parts = [(0, own * size, ids[:own]), (found.shared * size, total, ids[own:])]
            if schema[name].trajectory:
                parts = [(0, 1, ids)]
            for first, end, blocks in parts:
                if end > first:
                    given = address + first * step, 0, (end - first) * step, zero, np.array([end - first])
                    copy_rows(*given, zero[:0], zero, np.ascontiguousarray(blocks), places[name], True)

    with engine.region.using() as memory:  # that of a GPU, or None
        if engine.device is not None and memory is None:
            return 0  # another process has it
        done = [
            engine.index.promote(
                slot,
                generation,
                tuple(known[i]),
                functools.partial(write, i),
                functools.partial(place, i),
            )
            for i, (slot, generation) in enumerate(zip(slots.tolist(), generations.tolist(), strict=True))
        ]
    arrays.tier_counts[PROMOTED_BYTES] += int(rows[done].sum()) * schema.step_bytes  # of the owner alone
    return sum(done)
