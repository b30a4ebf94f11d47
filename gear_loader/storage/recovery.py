"""Recovery of an index after a process was killed in the middle of a change.

The slots are authoritative: state, extent (length and place in `block_ids`), generation, sequence, id, epoch, owner,
priority, time of commit and number of draws. All other state (free lists, links, ring, counts, uses of blocks) is
derived from them. A mutation marks the index dirty while it runs; the next lock holder that finds the mark rebuilds the
derived state. Therefore a slot's state is always written last, and operations on several slots write an intent record,
which recovery replays. The mutations are in `gear_loader.storage.operations`.

Values that another process wrote by mistake are not recovered: `gear_loader.storage.index_checks` finds out-of-range
values when a process attaches, and operations check them before use. The table is then refused.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

import numpy as np

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage import counters as at
from gear_loader.storage.block_tables import BlockTables
from gear_loader.storage.edit_log import EditLog
from gear_loader.storage.ids import first_free, ids_of, origin_of
from gear_loader.storage.index_arrays import IndexArrays, ranges
from gear_loader.storage.index_checks import bad_marks, bad_slots, damage, require_whole
from gear_loader.storage.lock import IndexLock
from gear_loader.storage.operations.view import ALL, LIVE, MARKED, PID, READING
from gear_loader.storage.prefixes import prefixes_of
from gear_loader.storage.states import FREE, READY, RETIRED, WRITING
from gear_loader.utils.arrays import Array

_T = TypeVar("_T")


class Recovery:
    """Runs critical sections under the lock; rebuilds a dirty index first.

    Args:
        arrays: index arrays. lock: lock of the table. block_tables: part of the same index. edit_log: of the table.
    """

    def __init__(
        self, arrays: IndexArrays, lock: IndexLock, block_tables: BlockTables, edit_log: EditLog
    ) -> None:
        self.arrays, self.edit_log = arrays, edit_log
        self.lock = lock
        self._block_tables = block_tables

    def locked(self, section: Callable[[], _T]) -> _T:
        """Call `section` under the lock, after recovery if the index is dirty; see `IndexLock.run`."""

        def recovered() -> _T:
            counters = self.arrays.counters
            if counters[at.DIRTY] or not counters[at.INITIALIZED]:
                self.rebuild()
            return section()

        return self.lock.run(recovered)

    def read(self, section: Callable[[], _T]) -> _T:
        """`locked` for a section that only reads slots, also in a signal handler amid another section: see
        `IndexLock.read`. Slots are whole at every store; what is derived from them may not be."""
        return self.lock.read(section) if self.lock.is_mine else self.locked(section)

    def check_bounds(self) -> None:
        """Check that all values of the index are in range. Takes the lock only if a check without it fails.

        Raises:
            CorruptTableError: a value is out of range.
        """
        if damage(self.arrays) is None:
            return
        # Another process may have been in the middle of a change.
        self.locked(lambda: require_whole(self.arrays, damage(self.arrays)))

    def derive(self) -> dict[str, Any]:
        """Compute the derived state from the slots, for `rebuild` and `check_valid`."""
        index = self.arrays
        lengths, starts = index.extent[:, 0], index.extent[:, 1]
        used = np.flatnonzero(index.state != FREE)
        blocks = index.blocks_at(np.arange(index.num_slots))
        uses = np.zeros((index.num_blocks, 2), dtype=np.int32)
        for column, slots in ((ALL, used), (LIVE, used[index.state[used] != RETIRED])):
            taken = index.block_ids[ranges(starts[slots], blocks[slots])]
            uses[:, column] = np.bincount(taken, minlength=index.num_blocks)
        parked = index.parked[: index.counters[at.NUM_PARKED]]
        parked = parked[uses[parked, ALL] == 0]  # the others are those of trajectories that were not spilled
        uses[parked, ALL] = 1
        ready = np.flatnonzero(index.state == READY)
        ready = ready[np.argsort(index.sequence[ready], kind="stable")]
        retired = np.flatnonzero(index.state == RETIRED)
        retired = retired[np.argsort(index.epoch[retired], kind="stable")]
        writing = np.flatnonzero(index.state == WRITING)
        half = starts[used] // index.half_size
        ends = starts[used] - half * index.half_size + blocks[used]
        free, writable = uses[:, ALL] == 0, np.arange(index.num_blocks) >= index.host_blocks
        retired_blocks = writable & ~free & (uses[:, LIVE] == 0)
        return {
            "uses": uses,
            "ready": ready,
            "retired": retired,
            "parked": parked,
            "free_slots": np.flatnonzero(index.state == FREE),
            "free_blocks": np.flatnonzero(free & writable),
            "ends": [int(ends[half == side].max(initial=0)) for side in (0, 1)],
            "counts": {
                at.NUM_READY: len(ready),
                at.NUM_STEPS: int(lengths[ready].sum()),
                at.NUM_SPILLED: int((starts[ready] < 0).sum()),
                at.NUM_PARKED: len(parked),
                at.NUM_WRITING: len(writing),
                at.WRITING_STEPS: int(lengths[writing].sum()),
                at.WRITING_BLOCKS: int(blocks[writing].sum()),
                at.NUM_RETIRED: len(retired),
                at.RETIRED_BLOCKS: int(retired_blocks.sum()),
                at.NUM_FREE_SLOTS: int((index.state == FREE).sum()),
                at.NUM_FREE_BLOCKS: int((free & writable).sum()),
            },
        }

    def _complete(self) -> None:
        """Replay the intent records: finish or undo operations on several slots."""
        index = self.arrays
        counters = index.counters
        if self.edit_log.apply():
            raise index.corrupt("steps that were being overwritten have blocks that do not exist")
        if counters[at.MOVING]:
            self._block_tables.finish_move()
        writing = np.flatnonzero(index.state == WRITING)
        if counters[at.COMMITTING]:
            done = writing[index.sequence[writing] >= counters[at.COMMITTING] - 1]
            index.state[done] = READY
            counters[at.COMMITTING] = 0
        index.sequence[np.flatnonzero(index.state == WRITING)] = -1
        if counters[at.RAISING]:
            counters[at.FIRST_SEQUENCE] = counters[at.RAISING_FIRST]
            counters[at.NEXT_SEQUENCE] = counters[at.RAISING]
            counters[at.RAISING] = 0
        if counters[at.DRAWING]:
            if index.sampled[counters[at.DRAWING] - 1] == counters[at.DRAWING_TIMES]:
                counters[at.NUM_SAMPLED] = counters[at.DRAWING_TOTAL]
            counters[at.DRAWING] = 0
        if counters[at.LEAVING]:
            if index.state[counters[at.LEAVING] - 1] == RETIRED:
                counters[counters[at.LEAVING_COUNT]] = counters[at.LEAVING_TOTAL]
            counters[at.LEAVING] = 0
        marked = np.flatnonzero(index.owner[:, PID] == MARKED)
        leaving = marked[index.state[marked] == READY] if counters[at.REMOVING] else marked[:0]
        counters[at.NUM_REMOVED] += len(leaving)
        times = index.rules.max_times_sampled
        if times is not None:
            used_up = np.flatnonzero((index.state == READY) & (index.sampled >= times))
            used_up = np.setdiff1d(used_up, leaving)
            counters[at.NUM_EXPIRED] += len(used_up)
            leaving = np.concatenate((leaving, used_up))
        if len(leaving):
            retired = index.epoch[np.flatnonzero(index.state == RETIRED)].max(initial=0)
            counters[at.EPOCH] = max(int(counters[at.EPOCH]), int(retired) + 1)
            index.epoch[leaving] = counters[at.EPOCH] + np.arange(len(leaving))
            index.state[leaving] = RETIRED
        index.owner[marked, PID] = 0
        counters[at.REMOVING] = 0

    def rebuild(self) -> None:
        """Finish or undo interrupted operations, and rebuild all derived state. The caller holds the lock.

        Raises:
            CorruptTableError: a slot holds impossible values.
        """
        index = self.arrays
        counters = index.counters
        counters[at.DIRTY] = 1
        require_whole(index, bad_marks(index))
        self._complete()
        require_whole(index, bad_slots(index))
        derived = self.derive()
        for place, value in derived["counts"].items():
            counters[place] = value
        index.links[:] = -1
        for name in ("free_slots", "free_blocks", "retired", "touched"):
            getattr(index, name)[:] = 0
        # Stacks grow upwards: the lowest slots and blocks are handed out first.
        index.free_slots[: len(derived["free_slots"])] = derived["free_slots"][::-1]
        index.free_blocks[: len(derived["free_blocks"])] = derived["free_blocks"][::-1]
        index.retired[: len(derived["retired"])] = derived["retired"]
        index.parked[: len(derived["parked"])] = derived["parked"]
        counters[at.TIERED] = index.moves
        counters[at.WRITABLE_BLOCKS] = index.writable_blocks
        index.uses[:] = derived["uses"]
        index.lowest[:] = -np.inf  # no bound yet: computed at the next search
        counters[at.RETIRED_FIRST] = 0
        ready = derived["ready"]
        counters[at.OLDEST] = ready[0] + 1 if len(ready) else 0
        counters[at.NEWEST] = ready[-1] + 1 if len(ready) else 0
        if len(ready):
            index.links[ready, 0] = np.append(-1, ready[:-1])
            index.links[ready, 1] = np.append(ready[1:], -1)
            counters[at.NEXT_SEQUENCE] = max(counters[at.NEXT_SEQUENCE], index.sequence[ready[-1]] + 1)
        counters[at.HEAD : at.HEAD + 2] = derived["ends"]
        used = np.flatnonzero(index.state == RETIRED)
        last = int(index.epoch[used].max()) if len(used) else 0
        counters[at.EPOCH] = max(counters[at.EPOCH], last, 0) + 1
        counters[at.VERSION] += 1
        counters[at.RUNS] += 1
        counters[at.NUM_TOUCHED] += index.num_slots + 1  # readers that follow the ring reread every slot
        counters[at.INITIALIZED] = 1
        counters[at.DIRTY] = 0

    def check_valid(self) -> None:
        """Compare the derived state with the slots. Takes the lock.

        Raises:
            AssertionError: the index is inconsistent; the message says where.
        """
        self.locked(self._check)

    def _check(self) -> None:
        index = self.arrays
        counters = index.counters
        used = np.flatnonzero(index.state != FREE)
        lengths, starts = index.extent[used, 0], index.extent[used, 1]
        places = ranges(starts, index.blocks_at(used))
        taken = index.block_ids[places]
        assert ((taken >= 0) & (taken < index.num_blocks)).all(), "a block id is out of range"
        owner = np.repeat(np.arange(len(used)), index.blocks_at(used))
        hosted = np.bincount(owner[taken < index.host_blocks], minlength=len(used))
        whole = (hosted == 0) | (hosted == index.blocks_at(used))
        assert whole.all(), "a trajectory lies on a GPU and in host memory"
        begun = self._check_prefixes(used)
        own = ~np.isin(places, begun)
        self._check_sharing(taken[own], np.repeat(index.stream[used], index.blocks_at(used))[own])
        derived = self.derive()
        for place, value in derived["counts"].items():
            assert counters[place] == value, f"counter {place} is {counters[place]}, expected {value}"
        for name in ("free_slots", "free_blocks"):
            count = len(derived[name])
            found = np.sort(getattr(index, name)[:count])
            assert (found == derived[name]).all(), f"{name} does not hold exactly what is free"
        assert (index.uses == derived["uses"]).all(), "the uses of a block are counted wrong"
        ring = (counters[at.RETIRED_FIRST] + np.arange(counters[at.NUM_RETIRED])) % index.num_slots
        assert (index.retired[ring] == derived["retired"]).all(), "the ring of retired slots is out of order"
        self._check_order(derived["ready"])
        half = int(counters[at.HALF])
        assert derived["ends"][1 - half] == 0, "a block table lies in the half that was left"
        assert derived["ends"][half] <= counters[at.HEAD + half] <= index.half_size, (
            "a block table lies beyond the head"
        )
        assert (lengths >= 1).all(), "a trajectory has no steps"
        assert lengths.max(initial=0) <= index.max_steps, "a trajectory has more than max_steps steps"
        steps = counters[at.NUM_STEPS] + counters[at.WRITING_STEPS]
        assert steps <= index.max_steps, f"{steps} steps are more than max_steps"
        assert not counters[at.COMMITTING], "a commit was left half done"
        assert not counters[at.REMOVING], "a removal was left half done"
        assert not counters[at.DRAWING], "a draw was left half counted"
        assert not counters[at.LEAVING], "a trajectory was left half retired"
        assert not counters[at.RAISING], "the numbering was left half raised"
        assert not counters[at.LOGGED], "values were left half overwritten"
        assert (index.readers[:, READING] <= counters[at.EPOCH]).all(), "a reader has a future epoch"

    def _check_prefixes(self, used: Array) -> Array:
        """Check that blocks of prefixes have the same number in all trajectories that begin with them.

        Args:
            used: int64 [n], slots.

        Returns:
            Places of these blocks in `block_ids`, int64 [m].
        """
        index = self.arrays
        shared = prefixes_of(index, used)[1] // index.block_steps
        shared = np.where(index.extent[used, 1] < 0, 0, np.maximum(shared - index.copied_blocks, 0))
        places = ranges(index.extent[used, 1] + index.copied_blocks, shared)
        numbers = ranges(np.zeros_like(shared), shared)
        pairs = np.unique(np.stack((index.block_ids[places], numbers)), axis=1)
        assert len(np.unique(pairs[0])) == pairs.shape[1], "a block has two places in prefixes"
        return places

    def _check_sharing(self, blocks: Array, streams: Array) -> None:
        """Check that only trajectories of one stream share blocks.

        Args:
            blocks: int [n], block ids. streams: int [n], stream of the trajectory that uses each.
        """
        shared = np.bincount(blocks, minlength=self.arrays.num_blocks)[blocks] > 1
        blocks, streams = blocks[shared], streams[shared]
        least, largest = (
            np.full(self.arrays.num_blocks, 2**63 - 1),
            np.zeros(self.arrays.num_blocks, dtype=np.int64),
        )
        np.minimum.at(least, blocks, streams)
        np.maximum.at(largest, blocks, streams)
        alike = (least[blocks] == largest[blocks]) & (streams > 0)
        assert alike.all(), "a block belongs to two trajectories"

    def _check_order(self, ready: Array) -> None:
        index = self.arrays
        counters = index.counters
        order: list[int] = []
        slot = int(counters[at.OLDEST]) - 1
        while slot >= 0 and len(order) <= index.num_slots:
            order.append(slot)
            slot = int(index.links[slot, 1])
        assert order == ready.tolist(), "the links do not lead through the trajectories in order"
        older = [-1, *order[:-1]]
        assert index.links[order, 0].tolist() == older[: len(order)], "the links back are wrong"
        assert int(counters[at.NEWEST]) - 1 == (order[-1] if order else -1), "the newest trajectory is wrong"
        sequences = index.sequence[ready]
        assert len(np.unique(sequences)) == len(order), "a sequence number is used twice"
        assert counters[at.NEXT_SEQUENCE] > sequences.max(initial=-1), "a sequence number is reused"
        ids = ids_of(index.view, ready)
        assert (index.ident[ready] >= -1).all(), "an id is negative"
        assert len(np.unique(ids)) == len(ids), "an id is used twice"
        assert counters[at.NEXT_SEQUENCE] >= first_free(index.view, origin_of(index.view) or 0), (
            "an id is reused"
        )
        priorities = index.priority[ready]
        given = priorities[priorities != UNSET]
        assert (np.isfinite(given) & (given >= 0)).all(), "a priority is negative or not finite"
        least = np.full(len(index.lowest), np.inf)
        np.minimum.at(least, ready // index.group, np.where(priorities == UNSET, np.inf, priorities))
        assert (index.lowest <= least).all(), "a priority is lower than the bound of its group"
