"""Moving trajectories out of a GPU's memory into the table's part of pinned host memory.

Only the process that has the blocks on the GPU adds to such a table, so it makes room itself, without a thread: when
few blocks are free, an addition queues copies of the coldest trajectories, and a later one publishes them, when they
have arrived. It waits for them only if no block is left. A trajectory that is gone by then is skipped: what was copied
of it is nobody's. Blocks of the part are handed out here; those that no trajectory has are free.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np

from gear_loader.errors import RegionError
from gear_loader.storage import counters as at
from gear_loader.storage.device_memory import DeviceMemory
from gear_loader.storage.disk import Keep
from gear_loader.storage.index_arrays import IndexArrays, ranges
from gear_loader.storage.operations.view import ALL, EVICT_LOWEST, LIVE, REFUSE
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY
from gear_loader.storage.tier_swaps import coldest_first, coldness, kept_free, missing_blocks
from gear_loader.utils.arrays import Array
from gear_loader.utils.captures import beside_captures
from gear_loader.utils.formatting import size as formatted
from gear_loader.utils.mutex import run_alone


class _Moves(NamedTuple):
    """Trajectories on their way: slots, generations and numbers of blocks, int64 [n]; their new blocks, int32; and an
    event after which the copies are there."""

    slots: Array
    generations: Array
    blocks: Array
    ids: Array
    arrived: Any


def used_in_part(arrays: IndexArrays) -> Array:
    """Trajectories that use each block of the host part, int32 [host blocks, 2]: live ones, all."""
    found: Array = arrays.uses[: arrays.host_blocks]
    return found


class HostPart:
    """Makes room in the GPU's memory. One for each handle of a table; those of a process share `DeviceMemory.moves`.

    Args:
        arrays: index arrays. recovery: runs critical sections under the lock. region: memory of the table.
        move_out, evict: of the `Index`.
    """

    def __init__(
        self,
        arrays: IndexArrays,
        recovery: Recovery,
        region: Region,
        move_out: Callable[[Array, Array, Array, Array], int],
        evict: Callable[[int, int], int],
    ) -> None:
        self._arrays, self._recovery, self._region = arrays, recovery, region
        self._move_out, self._evict = move_out, evict
        self._free = kept_free(region.layout, arrays.writable_blocks)
        self._stuck = -1  # epoch in which the part was full

    def look_ahead(self, evict: int) -> None:
        """Publish what has arrived, and queue copies if few blocks are free. Waits for nothing.

        Args:
            evict: as of `Index.begin`. A full table is evicted from ahead of need, too.
        """
        memory = self._region.device_memory
        if memory is None:
            return
        if memory.moves is None and (self._stuck == self._arrays.counters[at.EPOCH] or not self._missing()):
            return
        with contextlib.suppress(RegionError):  # no memory for copies: there is room still
            self._alone(memory, functools.partial(self._advance, memory, evict, waits=False), 0.0)

    def make_room(self, evict: int, wait: bool) -> str | None:
        """Move trajectories out of the GPU's memory, or evict some from a table that is full. Waits for the GPU.

        Args:
            evict, wait: as of `Index.begin`.

        Returns:
            None if something has changed; else why waiting is useless, "" if it may help.

        Raises:
            RegionError: there is no memory for copies. RuntimeError: of the GPU.
        """
        memory = self._region.device_memory
        if memory is None:
            return ""
        found = self._alone(memory, functools.partial(self._advance, memory, evict, waits=True), -1)
        changed, full = (False, False) if found is None else found
        if changed:
            return None
        if not full or wait or self._arrays.tier is not None:
            return ""
        layout = self._region.layout
        return (
            f"Its memory on {layout.device} is full, and so is the part of host memory below: {layout.host_blocks:,} "
            f"blocks, {formatted(layout.host_blocks * layout.block_bytes)} (host)."
        )

    def _alone(
        self, memory: DeviceMemory, section: Callable[[], tuple[bool, bool]], timeout: float
    ) -> tuple[bool, bool] | None:
        """Call a section that no other thread is in; None if this thread, or with `timeout` 0 another one, is."""
        with beside_captures(memory.device), self._region.using():
            return run_alone(memory.moving, section, timeout)

    def _missing(self) -> int:
        counters = self._arrays.counters
        free = int(counters[at.NUM_FREE_BLOCKS] + counters[at.RETIRED_BLOCKS])
        wanted = int(counters[at.WANTED_BLOCKS])
        return missing_blocks(self._free, self._arrays.writable_blocks, free, wanted)

    def _advance(self, memory: DeviceMemory, evict: int, *, waits: bool) -> tuple[bool, bool]:
        """Publish the moves under way, and begin others; with `waits` publish these too.

        Returns:
            Whether room was made; and whether the host part has none for what was to be moved.
        """
        if self._publish(memory, waits):
            return True, False
        missing = self._missing()
        if not missing:
            return True, False
        if memory.moves is not None:
            return False, False
        moves, evicted, full = self._begin(memory, missing, evict)
        memory.moves = moves
        if full and not evicted:  # until something leaves
            self._stuck = int(self._arrays.counters[at.EPOCH])
        return (self._publish(memory, waits) if waits else False) or evicted, full

    def _publish(self, memory: DeviceMemory, waits: bool) -> bool:
        """Give trajectories that have arrived their new blocks; return whether there were any."""
        moves = memory.moves
        if moves is None or not (waits or moves.arrived.query()):
            return False
        moves.arrived.synchronize()
        done = self._move_out(moves.slots, moves.generations, moves.blocks, moves.ids)
        if done >= 0:  # else readers hold blocks of those before
            memory.moves = None
        if done > 0:  # who needs more asks again
            self._arrays.counters[at.WANTED_BLOCKS] = 0
        return done > 0

    def _begin(self, memory: DeviceMemory, missing: int, evict: int) -> tuple[_Moves | None, bool, bool]:
        """Queue copies of the coldest trajectories to free blocks of the host part.

        Args:
            missing: blocks to take. evict: the policy, for when the part is full.

        Returns:
            What is on its way; whether trajectories were evicted; and whether the part is full.
        """
        arrays = self._arrays
        self._reclaim()
        # Generations before states: a slot that is reused meanwhile is skipped.
        generations, sequences = arrays.generation.copy(), arrays.sequence.copy()
        slots = np.flatnonzero(arrays.state == READY)
        slots = slots[arrays.levels(arrays.extent[slots, 1]) == 1]
        slots = slots[coldest_first(arrays, memory.keep, slots, sequences, generations)]
        blocks = arrays.blocks_at(slots).astype(np.int64)
        ends = np.cumsum(blocks)
        ends = ends[: int(np.searchsorted(ends, missing)) + 1]
        free, evicted = self._free_in_part(), False
        total = int(ends[-1]) if len(ends) else 0
        if total > len(free):
            memory.wanted = total
            if evict != REFUSE and arrays.tier is None:
                evicted = self._evict_for(total - len(free), evict)
                self._reclaim()
                free = self._free_in_part()
        else:
            memory.wanted = 0
        count = int(np.searchsorted(ends, len(free), "right"))
        if not count:
            return None, evicted, bool(total) and not self._is_leaving()
        slots = slots[:count]
        moves = self._send(memory, slots, generations[slots], blocks[:count], free[: int(ends[count - 1])])
        return moves, evicted or moves is None, False  # if some have gone, look again

    def _send(
        self, memory: DeviceMemory, slots: Array, generations: Array, blocks: Array, into: Array
    ) -> _Moves | None:
        """Queue copies of trajectories in the GPU's memory; None, having done nothing, if some are not there.

        Args:
            blocks: int64 [n], how many each has. into: free blocks of the host part, for all of them.
        """
        into = into.astype(np.int32)
        ids = self._recovery.locked(lambda: self._blocks_of(slots, generations, blocks))
        if ids is None:
            return None
        arrived = memory.copy_out(ids, self._region.host_blocks, into)
        return _Moves(slots, generations, blocks, into, arrived)

    def _blocks_of(self, slots: Array, generations: Array, blocks: Array) -> Array | None:
        """Blocks of trajectories in the GPU's memory, int32; None if some are not there. The caller holds the lock."""
        arrays = self._arrays
        live = (arrays.state[slots] == READY) & (arrays.generation[slots] == generations)
        places = arrays.extent[slots, 1]
        if not live.all() or (arrays.levels(places) != 1).any():
            return None
        return arrays.ids_at(ranges(places, blocks))

    def _reclaim(self) -> None:
        ops, where = self._arrays.ops, self._arrays.where
        self._recovery.locked(lambda: ops.reclaim(where))

    def _free_in_part(self) -> Array:
        """Blocks of the host part that nobody uses, int64 [n]."""
        found: Array = np.flatnonzero(used_in_part(self._arrays)[:, ALL] == 0)
        return found

    def _is_leaving(self) -> bool:
        """Whether blocks of the part will be free when readers have ended."""
        uses = used_in_part(self._arrays)
        return bool(((uses[:, LIVE] == 0) & (uses[:, ALL] > 0)).any())

    def _evict_for(self, short: int, evict: int) -> bool:
        """Evict trajectories until so many blocks, on the GPU or in the part, will be free; return whether any were.

        One on the GPU need not move any more, and one of the part has room for what moves.
        """
        arrays = self._arrays
        uses = used_in_part(arrays)
        short -= int(((uses[:, LIVE] == 0) & (uses[:, ALL] > 0)).sum())
        if short <= 0:
            return False
        slots = np.flatnonzero(arrays.state == READY)
        keep: Keep = "priority" if evict == EVICT_LOWEST else "newest"
        slots = slots[coldness(keep, arrays.sequence[slots], arrays.priority[slots])]
        count = int(np.searchsorted(np.cumsum(arrays.blocks_at(slots)), short)) + 1
        steps = int(arrays.extent[slots[:count], 0].sum())
        return bool(steps) and self._evict(steps, evict) > 0
