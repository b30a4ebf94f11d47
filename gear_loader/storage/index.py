"""The index of a table: allocates slots and blocks for trajectories, commits them, and retires them.

It consists of its arrays (`IndexArrays`), their recovery after a crash (`Recovery`), the block tables (`BlockTables`),
the read tickets (`Readers`), admission by rate limiter and age (`Admission`), and allocation (`Allocator`). Reading is
in `gear_loader.storage.reader`; the operations themselves, compiled, in `gear_loader.storage.operations`.
"""

from __future__ import annotations

import copy
import struct
import time
from collections.abc import Callable

import numpy as np

from gear_loader.errors import LockTimeoutError, SchemaError, StaleIndexError, TableFullError
from gear_loader.native.lanes import EMPTY_LANE, LANE_GENERATION, LANE_SLOT
from gear_loader.storage.admission import Admission
from gear_loader.storage.allocation import Allocator, Claim
from gear_loader.storage.block_tables import BlockTables
from gear_loader.storage.counters import (
    DISK_FULL,
    FIRST_SEQUENCE,
    NEXT_SEQUENCE,
    NUM_FREE_BLOCKS,
    NUM_LOST,
    NUM_PARKED,
    NUM_READY,
    NUM_RETIRED,
    NUM_SAMPLED,
    NUM_SPILLED,
    NUM_STEPS,
    NUM_WRITING,
    ORIGIN,
    POLICY,
    RUNS,
    WANTED_BLOCKS,
)
from gear_loader.storage.disk_copies import are_current
from gear_loader.storage.edit_log import EditLog
from gear_loader.storage.filled_bits import filled_bits, set_filled
from gear_loader.storage.host_part import HostPart
from gear_loader.storage.ids import (
    CLIENT_ORIGIN,
    check_origin_free,
    check_unused,
    first_free,
    following,
    origin_of,
    slots_of,
)
from gear_loader.storage.index_arrays import IndexArrays, ranges
from gear_loader.storage.operations.extents import SPOT_WIDTH
from gear_loader.storage.operations.view import (
    BUSY,
    DONE,
    FLIP,
    FULL,
    GONE,
    OUTSIDE,
    PID,
    READ,
    REFUSE,
    REQUEST_HEAD,
    REQUEST_NOW,
    SPILL,
    START,
    UNREADY,
)
from gear_loader.storage.prefixes import AwayError, Prefixes, Relative, kept_leaders, set_prefixes
from gear_loader.storage.ragged_input import Payload
from gear_loader.storage.reader import TableReader, stale
from gear_loader.storage.readers import Readers
from gear_loader.storage.recovery import Recovery
from gear_loader.storage.region import Region
from gear_loader.storage.states import READY, WRITING
from gear_loader.storage.tier_counts import WANTED_BYTES
from gear_loader.utils.arrays import Array

_NO_BLOCKS: Array = np.empty(0, dtype=np.int32)
INLINE_BYTES = 512 * 1024
"""Largest data that is copied under the lock, in bytes: a copy of this size is cheaper than locking twice."""


class Index:
    """Writes a region's index. Every public method takes the lock.

    Args:
        region: memory of the table.
        lock_timeout: seconds until a wait for the lock times out; by default the timeout of the region's lock.

    Attributes:
        arrays, edit_log, recovery, block_tables, readers, admission, allocator: the parts, see the module.
        reader: the read interface.
    """

    def __init__(self, region: Region, *, lock_timeout: float | None = None) -> None:
        lock = region.lock
        if lock_timeout is not None:
            lock = copy.copy(lock)  # the same lock with another deadline
            lock.timeout = lock_timeout
        self.arrays = IndexArrays(region)
        self.block_tables = BlockTables(self.arrays)
        self.edit_log = EditLog(self.arrays, region)
        self.recovery = Recovery(self.arrays, lock, self.block_tables, self.edit_log)
        self.readers = Readers(self.arrays)
        self.admission = Admission(self.arrays, self.recovery)
        self.allocator = Allocator(
            self.arrays, self.recovery, self.block_tables, self.readers, self.admission
        )
        if region.layout.host_blocks:
            given = self.arrays, self.recovery, region
            self.allocator.host_part = HostPart(*given, self.move_out, self.evict)
        self.reader = TableReader(self.arrays, self.recovery, self.readers, self.admission)
        # Of `store_one`: the request, a view of it, and the function that packs values into that.
        self._request: tuple[Array, memoryview, Callable[..., None]] | None = None

    # ---------------------------------------------------------------- writing

    def begin(
        self,
        lengths: Array,
        *,
        finals: Array | None = None,
        evict: int = REFUSE,
        wait: bool = False,
        ids: Array | None = None,
        unique: bool = False,
        claim: Claim | None = None,
        prefixes: Prefixes | None = None,
    ) -> tuple[Array, Array]:
        """Allocate slots and blocks for trajectories, which stay invisible until `commit`.

        Args:
            lengths: int64 [n], in steps.
            finals: int64 [n], number of final steps (0 or 1) that follow the steps; None for none.
            evict: eviction policy: REFUSE, EVICT_OLDEST or EVICT_LOWEST.
            wait: whether to wait until other processes or threads free space.
            ids: int64 [n], distinct global ids to add the trajectories with; -1 for a new id.
            unique: whether no trajectory can have one of `ids`, so that the table is not searched for them.
            claim: for n slots: records the allocation even if this call is interrupted, for `abort`.
            prefixes: what the trajectories begin with, which `lengths` count.

        Returns:
            The slots, int64 [n], and their new blocks, one trajectory after another, int32 [blocks].

        Raises:
            StaleIndexError: one of `prefixes` is gone. Nothing was changed. AwayError: one lies on disk only, or did.
            SchemaError: a trajectory in the table has one of `ids`. Nothing was changed.
            TableFullError: no space without `evict` or `wait`, timed out, or larger than the table. Nothing was
                changed.
            LockTimeoutError: readers, or with `evict` unfinished writes, held the space until the deadline.
                Evictions are not undone.
        """
        lengths = np.ascontiguousarray(lengths, dtype=np.int64)
        finals = lengths[:0] if finals is None else np.ascontiguousarray(finals, dtype=np.int64)
        rows = lengths + finals if len(finals) else lengths
        blocks = int(self.arrays.blocks_of(rows).sum())
        if prefixes is not None:
            blocks -= int(np.maximum(prefixes.shared - self.arrays.copied_blocks, 0).sum())
        claim = Claim(len(lengths)) if claim is None else claim
        slots, taken = claim.slots, np.empty(blocks, dtype=np.int32)

        def attempt() -> int:
            if ids is not None and not unique:
                self._check_unused(ids)
            answer: int
            given = int(evict), *self.readers.here(), slots, taken
            if prefixes is None:
                answer = self.arrays.ops.begin(self.arrays.where, lengths, finals, *given)
            else:
                if prefixes.moves not in (-1, int(self.arrays.counters[RUNS])):
                    raise AwayError(prefixes.slots[:0])
                known = *prefixes[:2], prefixes.shared, self.arrays.copied_blocks
                answer = self.arrays.ops.begin_after(self.arrays.where, lengths, finals, *known, *given)
                if answer == OUTSIDE:
                    raise AwayError(np.unique(prefixes.slots[prefixes.slots >= 0]), blocks)
                if answer == GONE:
                    raise StaleIndexError(
                        f"A trajectory of the indices {np.unique(prefixes.slots).tolist()} was removed or evicted "
                        "before what begins with its steps was stored. Nothing was stored."
                    )
                if answer == DONE:
                    set_prefixes(self.arrays, slots, prefixes)
            if ids is not None and answer == DONE:
                above = following(ids, origin_of(self.arrays.view) or 0)
                self.arrays.ops.raise_numbering(self.arrays.where, above)
                self.arrays.ident[slots] = ids
            return answer

        if len(lengths):
            self.allocator.obtain((len(lengths), blocks, int(lengths.sum())), attempt, evict=evict, wait=wait)
        claim.generations = self.arrays.generation[slots]
        return slots, taken

    def _check_unused(self, ids: Array) -> None:
        given = ids[ids >= 0]
        writing = check_unused(self.arrays.view, given)
        if len(writing):
            self.allocator.reclaim_writers(every=0.0)  # their writers may be dead
            writing = check_unused(self.arrays.view, given)
        if len(writing):
            raise SchemaError(
                f"The id {int(self.arrays.ident[writing[0]])} is that of a trajectory that is being stored by process "
                f"{int(self.arrays.owner[writing[0], PID])}; expected one that is not. Store each trajectory once."
            )

    def slots_of(self, ids: Array) -> Array:
        """The slots of the live trajectories with the given ids.

        Args:
            ids: int64 [n], distinct. Reads the whole index, under the lock.

        Returns:
            int64 [n], -1 for an id that no live trajectory has.
        """
        return self.recovery.locked(lambda: slots_of(self.arrays.view, ids))

    def set_origin(self, shard: int) -> None:
        """Set the shard number permanently.

        Raises:
            SchemaError: the table has another shard number, or two trajectories would have the same id. Nothing was
                changed.
        """
        self.recovery.locked(lambda: self._set_origin(shard))

    def _set_origin(self, shard: int) -> None:
        known = origin_of(self.arrays.view)
        if known is not None:
            if known != shard:
                raise SchemaError(
                    f"The table is shard {known} and was to become shard {shard}; its number is set once, "
                    f"because ids hold it. Use {known}, or create another table for shard {shard}."
                )
            return
        check_origin_free(self.arrays.view, shard)
        self.arrays.ops.raise_numbering(self.arrays.where, first_free(self.arrays.view, shard))
        self.arrays.counters[ORIGIN] = 1 + shard

    def store(
        self,
        columns: Array,
        lengths: Array,
        addresses: Array,
        priorities: Array,
        *,
        ids: Array | None = None,
        finals: Array | None = None,
        evict: int,
        wait: bool,
        step_bytes: int,
    ) -> Array | None:
        """`begin`, copy and `commit` under one lock, for small data.

        Args:
            columns, lengths, addresses: as for `gear_loader.native.copying.scatter`. priorities: float32 [n].
            ids: int64 [n], -1 for a new id, made up by clients, so that no trajectory can have one; None for new ones.
            finals: int64 [n], number of final steps (0 or 1) among the steps of `lengths`; None for none.
            evict, wait: as for `begin`.
            step_bytes: bytes of a step over all columns.

        Returns:
            The slots, int64 [n]; None, having done nothing, if the caller must use the separate calls.

        Raises:
            As `begin`.
        """
        if not self.arrays.stores_at_once or (ids is not None and not self.takes_clients_ids):
            return None
        steps, count = int(lengths.sum()), len(lengths)
        if steps * step_bytes > INLINE_BYTES:
            return None
        request = np.empty(REQUEST_HEAD + count * (5 + len(columns)), dtype=np.int64)
        request[:REQUEST_HEAD] = (count, False, 0, evict, *self.readers.here())
        parts = request[REQUEST_HEAD : REQUEST_HEAD + 5 * count].reshape(5, count)
        slots: Array = parts[1]
        parts[0] = lengths if finals is None else lengths - finals
        parts[2].view(np.float64)[:] = priorities
        parts[3] = 0 if finals is None else finals
        parts[4] = -1 if ids is None else ids
        request[REQUEST_HEAD + 5 * count :] = addresses.reshape(-1)

        def attempt() -> int:
            request[REQUEST_NOW] = time.monotonic_ns()
            answer: int = self.arrays.ops.store(self.arrays.where, columns, request)
            return answer

        needed = count, int(self.arrays.blocks_of(lengths).sum()), steps
        self.allocator.obtain(needed, attempt, evict=evict, wait=wait)
        stored: Array = slots.copy()
        return stored

    def place_payload(
        self,
        heap: Array,
        payload: Payload,
        slots: Array,
        generations: Array,
        *,
        evict: int,
        wait: bool,
        spots: Array | None = None,
        ahead: int = 0,
        check: Callable[[], int] | None = None,
        then: Callable[[Array], None] | None = None,
    ) -> Array:
        """Find places for ragged values of trajectories from `begin`, by the same policy.

        Args:
            heap: int64, the table's payload memory. payload: the values. slots, generations: int64 [n], from `begin`.
            evict, wait: as for `begin`.
            spots, ahead: as for `extents.take_payload`; by default nothing is kept for more values.
            check: called under the lock before each attempt; returns how many of the trajectories are being written, or
                -1 if some are gone: then nothing is done.
            then: called under the lock with what is returned.

        Returns:
            Byte of `heap` where each value begins, int64 [V]; int64 [0] if some trajectories are gone.

        Raises:
            As `begin`; evictions are not undone.
        """
        offsets: Array = np.zeros(len(payload.sizes), dtype=np.int64)
        spots = np.zeros((len(slots), SPOT_WIDTH), dtype=np.int64) if spots is None else spots
        # Contiguous: else the loop would be compiled a second time, for sizes that are a part of records.
        given = slots, generations, payload.runs, np.ascontiguousarray(payload.sizes)
        ops, where, counters = self.arrays.ops, self.arrays.where, self.arrays.counters
        needed = min(heap.nbytes, int(payload.sizes.sum()))
        gone = False

        def attempt() -> int:
            nonlocal gone
            while True:
                writing = len(slots) if check is None else check()
                gone = writing < 0
                if gone:
                    return DONE
                ops.reclaim(where)
                kept = kept_leaders(self.arrays)
                answer: int = ops.take_payload(where, heap, *given, kept, offsets, spots, ahead)
                if answer == DONE:
                    if then is not None:
                        then(offsets)
                    return answer
                if counters[NUM_RETIRED]:
                    return READ
                if self.arrays.tier is not None and not (counters[DISK_FULL] and evict != REFUSE):
                    if counters[NUM_READY] == counters[NUM_SPILLED] and not counters[NUM_PARKED]:
                        return FULL if counters[NUM_WRITING] == writing else BUSY
                    tier = self.arrays.tier_counts
                    tier[WANTED_BYTES] = max(int(tier[WANTED_BYTES]), needed)
                    return SPILL
                if evict == REFUSE:
                    return answer
                if not counters[NUM_READY]:
                    return FULL if counters[NUM_WRITING] == writing else BUSY
                ops.evict(where, max(1, int(counters[NUM_STEPS]) // 64), evict)

        chosen = np.unique(payload.runs[:, 0])
        try:
            steps = int(self.arrays.extent[slots[chosen], 0].sum())
            self.allocator.obtain((len(chosen), 0, steps), attempt, evict=evict, wait=wait)
        except TableFullError as error:
            raise TableFullError(
                f"{error} What is full is the memory of ragged values, {heap.nbytes:,} bytes (Memory payload), to "
                f"which {int(payload.sizes.sum()):,} were to be added."
            ) from None
        return offsets[:0] if gone else offsets

    @property
    def takes_clients_ids(self) -> bool:
        """Whether ids that clients make up never count as numbers of the table's own."""
        return origin_of(self.arrays.view) != CLIENT_ORIGIN

    def store_one(
        self,
        columns: Array,
        length: int,
        addresses: list[int],
        priority: float,
        *,
        evict: int,
        final: int = 0,
        identity: int = -1,
    ) -> int | None:
        """`store` of one trajectory, if it needs no wait and no recovery.

        Args:
            columns: int64 [C, 3], as for `store`.
            length: steps, at most `INLINE_BYTES` of data with the final step.
            addresses: address of the steps of each column. priority: representable as float32.
            evict: as for `begin`. final: number of final steps (0 or 1) that follow.
            identity: an id as for `store`, or -1.

        Returns:
            Its slot; None, having done nothing, if the caller must use `store` or the separate calls.
        """
        if not self.arrays.stores_at_once or self.admission.max_age is not None:
            return None
        if identity >= 0 and not self.takes_clients_ids:
            return None
        if self._request is None or len(self._request[0]) < REQUEST_HEAD + 5 + len(addresses):
            memory = np.zeros(REQUEST_HEAD + 5 + len(addresses), dtype=np.int64)
            form = struct.Struct(f"={REQUEST_HEAD + 2}qd{2 + len(addresses)}q")
            self._request = memory, memory.data, form.pack_into
        given = (*self.readers.here(), length, -1, priority, final, identity, *addresses)
        try:
            slot = self.recovery.lock.run(self._store_one, columns, evict, given)
        except IndexError as error:
            raise self.arrays.corrupt(str(error)) from error
        return None if slot < 0 else slot

    def _store_one(self, columns: Array, evict: int, given: tuple[float, ...]) -> int:
        """The slot of a stored trajectory; negative if it was not stored. The caller holds the lock."""
        # The request belongs to this handle; only the lock holder writes to it.
        assert self._request is not None
        request, view, pack = self._request
        pack(view, 0, 1, True, time.monotonic_ns(), evict, *given)
        if self.arrays.operations.store(self.arrays.where, columns, request) != DONE:
            return -1
        slot: int = view[REQUEST_HEAD + 1]
        return slot

    def commit(self, slots: Array, priorities: Array) -> None:
        """Make written slots visible, in the given order, when the rate limiter allows it.

        Args:
            slots: int64 [n] from `begin`.
            priorities: float32 [n].

        Raises:
            RateLimitError: timed out. The slots remain allocated and invisible.
        """
        if len(slots) == 0:
            return
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        priorities = np.ascontiguousarray(priorities, dtype=np.float32)

        def attempt() -> int:
            self.arrays.ops.commit(self.arrays.where, slots, priorities, time.monotonic_ns())
            return DONE

        self.allocator.obtain((0, 0, 0), attempt, evict=REFUSE, wait=False, inserts=len(slots))

    def commit_as(
        self,
        slots: Array,
        priorities: Array,
        sequences: Array,
        *,
        ages: Array,
        times_sampled: Array,
        ids: Array,
        filled: Array,
        origin: int | None,
        next_sequence: int,
        num_inserted: int,
        num_sampled: int,
        policy_version: int,
    ) -> bool:
        """Restore a saved table: make written slots visible in an empty table, with their saved metadata.

        Args:
            slots: int64 [n] from `begin`. priorities: float32 [n].
            sequences: int64 [n], ascending, below `next_sequence`.
            ages: int64 [n], nanoseconds, descending. times_sampled: int64 [n].
            ids: int64 [n], ids that the trajectories were added with, or -1.
            filled: int64 [n], bits of the late columns that are filled.
            origin, next_sequence, num_inserted, num_sampled, policy_version: counters of the saved table.

        Returns:
            False, having done nothing, if the table is not empty.
        """

        def commit() -> bool:
            counters = self.arrays.counters
            if counters[NEXT_SEQUENCE]:
                return False
            # Sequence numbers of removed trajectories are not reused.
            counters[NEXT_SEQUENCE] = next_sequence
            counters[FIRST_SEQUENCE] = next_sequence - num_inserted
            counters[NUM_SAMPLED] = num_sampled
            counters[POLICY] = policy_version
            counters[ORIGIN] = 0 if origin is None else 1 + origin
            if len(slots):
                self.arrays.ident[slots] = ids
                if len(self.arrays.filled):
                    set_filled(self.arrays, slots, filled)
                created = time.monotonic_ns() - ages
                self.arrays.ops.commit_as(
                    self.arrays.where, slots, sequences, priorities, created, times_sampled
                )
            return True

        return self.recovery.locked(commit)

    def abort(self, slots: Array, *, wait: bool = True, generations: Array | None = None) -> None:
        """Free slots from `begin` that will not be committed; committed slots stay.

        Args:
            slots: int64 [n]; -1 for a slot that was not allocated.
            wait: whether to wait for the lock. Otherwise, or if the wait times out, the slots are marked as those of
                a dead writer, and the next allocation reclaims them.
            generations: int64 [n], generations at allocation; None if no slot can have been committed and reused.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64)

        def still() -> Array:
            taken = (slots >= 0) & (self.arrays.state[slots] == WRITING)
            if generations is not None:
                taken &= self.arrays.generation[slots] == generations
            found: Array = slots[taken]
            return found

        if wait:
            try:
                self.recovery.locked(lambda: self.arrays.ops.abort(self.arrays.where, still()))
                return
            except LockTimeoutError:
                pass
        slots = still()
        self.arrays.owner[slots, PID] = 0
        self.arrays.owner[slots, START] = 0

    # ---------------------------------------------------------------- trajectories that are being written

    def change_lanes(
        self,
        lanes: Array,
        chosen: Array,
        change: Callable[[Array, Array], int],
        *,
        needed: Callable[[int], tuple[int, int, int]],
        evict: int = REFUSE,
        wait: bool = False,
        inserts: bool = False,
        waits: bool = True,
    ) -> bool:
        """Perform an operation of `growth` on lanes in order: on all under one lock, or one by one where it must wait.

        Args:
            lanes: int64 [n, LANE_WIDTH]. chosen: int64 [m], which of them.
            change: calls the operation with these and `at`, under the lock; returns its result.
            needed: slots, blocks and steps that a lane needs, for errors. evict, wait: as for `begin`.
            inserts: whether each change commits a trajectory, subject to the rate limiter.
            waits: whether to wait, or to recover the index, where that is needed; else False is returned there.

        Raises:
            As `begin` and `commit`; what was done for lanes before has been done.
        """
        at = np.zeros(1, dtype=np.int64)
        one_by_one = self.admission.max_age is not None
        one_by_one |= inserts and self.arrays.rules.rate_limiter is not None
        while True:
            if not one_by_one:
                self.allocator.look_ahead(evict)
                self.allocator.look_for_dead_writers()
                answer = self.recovery.lock.run(change, chosen, at)
                if answer == DONE:
                    return True
                if answer == UNREADY:
                    self.recovery.locked(int)  # recovers
                    continue
            if not waits:
                return False
            upto, lane = chosen[: int(at[0]) + 1], int(chosen[at[0]])
            self.allocator.obtain(
                needed(lane),
                lambda upto=upto: change(upto, at),  # type: ignore[misc]
                evict=evict,
                wait=wait,
                last=int(lanes[lane, LANE_SLOT]),
                inserts=int(inserts),
            )
            if at[0] == len(chosen):
                return True

    def abort_lanes(self, lanes: Array, chosen: Array) -> None:
        """Free what lanes (`chosen`, int64 [m]) are writing, and forget it.

        If the lock is not available in time, the slots are marked as those of a dead writer, as by `abort`.
        """
        ops, where = self.arrays.ops, self.arrays.where
        try:
            self.recovery.locked(lambda: ops.abort_lanes(where, lanes, chosen))
        except LockTimeoutError:
            left = lanes[chosen]
            lanes[chosen] = EMPTY_LANE
            self.abort(left[:, LANE_SLOT], wait=False, generations=left[:, LANE_GENERATION])

    def remove(self, slots: Array, generations: Array | None = None, *, strict: bool = True) -> int:
        """Retire all the given trajectories, or raise; return how many were not there.

        Args:
            slots: int64 [n], distinct. generations: int64 [n]; a negative one is not compared.
            strict: whether one that is not there is an error.

        Raises:
            StaleIndexError: with `strict`, a slot without a live trajectory; or one that was given twice. Nothing was
                changed.
        """
        slots = np.ascontiguousarray(slots, dtype=np.int64)
        since = np.full_like(slots, -1) if generations is None else generations

        def remove() -> int:
            live = self.arrays.live_rows(slots, since, strict=False, what="")
            if strict and not live.all():
                raise stale(self.arrays, int(slots[~live][0]))
            chosen = slots[live]
            if len(np.unique(chosen)) != len(chosen):
                raise StaleIndexError(
                    f"Indices {slots.tolist()} name a trajectory twice; expected distinct ones."
                )
            self.arrays.ops.remove(self.arrays.where, chosen)
            return len(slots) - len(chosen)

        return self.recovery.locked(remove)

    def clear(self) -> None:
        """Retire all live trajectories."""

        def clear() -> None:
            arrays = self.arrays
            arrays.ops.remove(arrays.where, np.flatnonzero(arrays.state == READY))

        self.recovery.locked(clear)

    # ---------------------------------------------------------------- disk below memory

    def spill(self, slots: Array, generations: Array) -> int:
        """Take the blocks of trajectories whose copies on disk have all that they have; see `tiers.spill`.

        Args:
            slots, generations: int64 [n], the trajectories; a slot may be given twice. The others are skipped.

        Returns:
            Number of trajectories that were spilled; -1, having done nothing, if readers hold blocks of earlier ones.
        """
        arrays = self.arrays
        slots, first = np.unique(slots, return_index=True)
        generations = generations[first]

        def spill() -> int:
            live = (arrays.state[slots] == READY) & (arrays.generation[slots] == generations)
            live &= are_current(
                arrays, slots
            )  # also what was so before the lock: a column may be filled since
            arrays.keep_versions(slots[live])
            return self._spill(slots[live], generations[live], _NO_BLOCKS)

        return self.recovery.locked(spill)

    def _spill(self, slots: Array, generations: Array, ids: Array) -> int:
        """`tiers.spill`, again where something can be done about what is in its way. The caller holds the lock."""
        ops, where = self.arrays.ops, self.arrays.where
        done = int(ops.spill(where, slots, generations, ids))
        if done == -1 and self.readers.drop_dead():
            done = int(ops.spill(where, slots, generations, ids))
        if done == -2 and self.allocator.flip(-1):
            done = int(ops.spill(where, slots, generations, ids))
        return done

    def move_out(self, slots: Array, generations: Array, blocks: Array, ids: Array) -> int:
        """Let trajectories have the blocks of the host part that they were copied to; see `tiers.spill`.

        Args:
            slots, generations: int64 [n], the trajectories, distinct. Those that are gone are skipped.
            blocks: int64 [n], how many each has. ids: int32, the new ones, of one trajectory after another.

        Returns:
            Number of trajectories that were moved; a negative one, having done nothing, if readers are in the way.
        """
        arrays = self.arrays

        def move() -> int:
            live = (arrays.state[slots] == READY) & (arrays.generation[slots] == generations)
            live[live] = arrays.levels(arrays.extent[slots[live], 1]) == 1
            return self._spill(slots[live], generations[live], ids[np.repeat(live, blocks)])

        return self.recovery.locked(move)

    def promote(
        self,
        slot: int,
        generation: int,
        known: tuple[int, int, int],
        write: Callable[[Array], None],
        place: Callable[[], Relative | None] = Relative,
    ) -> bool:
        """Bring a trajectory that lies on disk only back into memory.

        Args:
            slot, generation: the trajectory.
            known: its steps, final steps, and bits of filled columns before its rows were read from disk.
            write: copies its rows into new blocks, int32 [n]; called under the lock.
            place: finds what it shares with trajectories in memory, and room for its ragged values; None if there is
                none. Called under the lock before.

        Returns:
            False, having done nothing, if it is gone, in memory already or was in between, or there is too little room.
        """
        arrays = self.arrays

        def promote() -> bool:
            extent = arrays.extent[slot]
            if (int(extent[0]), int(extent[2]), int(filled_bits(arrays, np.array([slot]))[0])) != known:
                return False
            if extent[1] >= 0 or (found := place()) is None:
                return False
            count, copied = int(arrays.blocks_of(extent[0] + extent[2])), arrays.copied_blocks
            ids = np.empty(count - max(found.shared - copied, 0), dtype=np.int32)
            given = arrays.where, slot, generation, found.slot, found.shared, copied, ids
            answer = arrays.ops.take_back(*given)
            if answer == FLIP and self.allocator.flip(-1):
                answer = arrays.ops.take_back(*given)
            if answer != DONE:
                return False
            arrays.counters[RUNS] += 1  # the block table of one that grows is at another place
            write(ids)
            # It is the room that was asked for: else its owner would take it away again, to make more.
            arrays.counters[WANTED_BLOCKS] = max(0, int(arrays.counters[WANTED_BLOCKS]) - len(ids))
            arrays.ops.give_place(arrays.where, slot, count)
            return True

        return self.recovery.locked(promote)

    def piece(self, slots: Array, most_bytes: int) -> Array:
        """The first of the trajectories (int64 [n], n > 0) that fit into free blocks, and one more. Takes no lock.

        Args:
            most_bytes: of these blocks.
        """
        arrays = self.arrays
        blocks = arrays.blocks_of(arrays.extent[slots, 0] + arrays.extent[slots, 2])
        most = min(int(arrays.counters[NUM_FREE_BLOCKS]), most_bytes // arrays.block_bytes)
        return slots[: 1 + int(np.searchsorted(np.cumsum(blocks), most, side="right"))]

    def _blocks_on_disk(self, slots: Array) -> int:
        """Blocks that those of the trajectories (int64 [n]) that lie on disk only would take in memory."""
        arrays = self.arrays
        live = slots[arrays.state[slots] == READY]
        left = live[arrays.extent[live, 1] < 0]
        return int(arrays.blocks_of(arrays.extent[left, 0] + arrays.extent[left, 2]).sum())

    def has_room_beside(self, slots: Array, blocks: int) -> bool:
        """Whether so many blocks are free beside those that trajectories on disk would take. Takes no lock."""
        return self._blocks_on_disk(slots) + blocks <= int(self.arrays.counters[NUM_FREE_BLOCKS])

    def request_from_disk(self, slots: Array, more: int = 0) -> bool:
        """Whether some of the trajectories (int64 [n]) lie on disk only; asks for room for them in memory.

        Args:
            more: blocks that are needed beside them.
        """
        arrays = self.arrays

        def request() -> bool:
            blocks = self._blocks_on_disk(slots)
            if blocks:
                wanted = min(blocks + more, arrays.num_blocks)
                arrays.counters[WANTED_BLOCKS] = max(int(arrays.counters[WANTED_BLOCKS]), wanted)
            return blocks > 0

        return self.recovery.locked(request)

    def begin_stored(
        self,
        lengths: Array,
        finals: Array,
        inside: Array,
        claim: Claim,
        parents: Array,
        shared: Array,
        note: Callable[[], None],
    ) -> Array:
        """`begin` for trajectories of which some are on disk and get no blocks; for an empty table.

        Args:
            lengths, finals: int64 [n]. inside: int8 [n], 0 of those on disk, 1 of those that get blocks, 2 of those in
                the host part, which get its first blocks. claim: as for `begin`.
            parents, shared: int64 [n]; blocks number `IndexArrays.copied_blocks` to `shared` - 1 are those of one of
                the n before it, which is inside; of none in the host part.
            note: called under the lock when `claim` has the slots.

        Returns:
            Blocks of those not on disk, one trajectory after another, int32 [blocks].

        Raises:
            TableFullError: another process has added trajectories to the table meanwhile.
        """
        arrays = self.arrays
        total, within = arrays.blocks_of(lengths + finals), inside > 0
        new = np.where(within, total - np.maximum(shared - arrays.copied_blocks, 0), 0)
        hosted = np.repeat(inside == 2, new)
        taken = np.where(hosted, np.cumsum(hosted) - 1, 0).astype(np.int32)
        begins = inside, parents, shared, arrays.copied_blocks
        given = (arrays.where, lengths, finals, *begins, *self.readers.here(), claim.slots, taken)

        def begin() -> Array | None:
            if arrays.ops.begin_stored(*given) != DONE:
                return None
            claim.generations = arrays.generation[claim.slots]
            note()
            ids: Array = arrays.block_ids[ranges(arrays.extent[claim.slots[within], 1], total[within])]
            return ids

        ids = self.recovery.locked(begin)
        if ids is None:
            raise TableFullError(
                f"{len(lengths):,} trajectories were to be loaded into an empty table, which holds "
                f"{self.arrays.num_ready():,}. Attach other processes after the load has returned."
            )
        return ids

    def evict(self, steps: int, how: int) -> int:
        """Evict by a policy, EVICT_OLDEST or EVICT_LOWEST, trajectories of `steps` steps or more; return how many."""
        return int(self.recovery.locked(lambda: self.arrays.ops.evict(self.arrays.where, steps, how)))

    def remove_lost(self, slots: Array, generations: Array) -> int:
        """Retire trajectories that cannot be read from disk, and count them; return how many were live.

        Args:
            slots, generations: int64 [n], distinct.
        """
        arrays = self.arrays

        def remove() -> int:
            live = arrays.live_rows(slots, generations, strict=False, what="")
            live = slots[live & (arrays.extent[slots, 1] < 0)]  # not one that is back in memory
            if len(live):
                arrays.ops.remove(arrays.where, live)
                arrays.counters[NUM_LOST] += len(live)
            return len(live)

        return self.recovery.locked(remove)
