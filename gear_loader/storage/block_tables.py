"""Compaction of the block tables.

Block tables grow in one half of `block_ids`. When it is full, the live ones are copied to the other half. The old half
is not changed until the next compaction, so readers may still use it. A writer receives its block ids with its slots
and reads no block table.

Trajectories cut from one stream share the blocks of their common steps. Their block tables overlap, and compaction
preserves the overlap. A stream whose block table was restarted in its middle has duplicate entries until then.
"""

from __future__ import annotations

import numpy as np

from gear_loader.storage.counters import DIRTY, EPOCH, FLIP_EPOCH, HALF, HEAD, MOVING, RUNS
from gear_loader.storage.index_arrays import IndexArrays, ranges
from gear_loader.storage.index_checks import bad_marks, bad_slots, require_whole
from gear_loader.storage.states import FREE, WRITING
from gear_loader.utils.arrays import Array


class BlockTables:
    """The block tables of an index. The caller holds the lock.

    Args:
        arrays: index arrays.
    """

    def __init__(self, arrays: IndexArrays) -> None:
        self.arrays = arrays

    def _slots(self) -> Array:
        """The slots that have a block table, int64 [n]."""
        return np.flatnonzero((self.arrays.state != FREE) & (self.arrays.extent[:, 1] >= 0))

    def _pieces(self, last: int) -> tuple[Array, Array, Array, Array, Array]:
        """Plan the compaction: merge overlapping block tables into pieces and pack the pieces.

        Args:
            last: slot whose piece is placed last; -1 for any.

        Returns:
            Slots in use, int64 [n]; their blocks, int64 [n]; packed start of their block tables, int64 [n]; start and
            length of each piece, int64 [pieces].
        """
        index = self.arrays
        slots = self._slots()
        if not index.stream[slots].any():  # none overlap: each is a piece
            if (slots == last).any():
                slots = np.append(slots[slots != last], last)
            blocks = index.blocks_at(slots)
            ends = np.cumsum(blocks)
            if len(ends) == 0 or ends[-1] <= index.half_size:  # else the index is corrupt
                return slots, blocks, ends - blocks, index.extent[slots, 1], blocks
        slots = slots[np.argsort(index.extent[slots, 1], kind="stable")]
        starts, blocks = index.extent[slots, 1], index.blocks_at(slots)
        ends = np.maximum.accumulate(starts + blocks)
        new = np.ones(len(slots), dtype=bool)
        new[1:] = starts[1:] >= ends[:-1]
        piece = np.cumsum(new) - 1
        firsts = np.flatnonzero(new)
        begins = starts[firsts]
        lengths = ends[np.append(firsts[1:], len(slots)) - 1] - begins if len(slots) else begins
        chain, skipped, order = self._chains(slots[firsts], begins, lengths)
        more = lengths - skipped[:, 1]
        if (slots == last).any():  # not of one that lies on disk only
            order = order[np.argsort(chain[order] == chain[piece[slots == last][0]], kind="stable")]
        offsets = np.empty(len(firsts), dtype=np.int64)
        offsets[order] = np.cumsum(more[order]) - more[order]
        # A piece starts at its offset within its chain.
        heads = offsets[chain]
        places = (heads + skipped[:, 0] - begins)[piece] + starts if len(slots) else starts
        return slots, blocks, places, (begins + skipped[:, 1])[order], more[order]

    def _chains(self, slots: Array, begins: Array, lengths: Array) -> tuple[Array, Array, Array]:
        """Group the pieces of each stream whose block table was restarted into a chain.

        Args:
            slots: int64 [n], first slot of each piece.
            begins, lengths: int64 [n], start and length of each piece.

        Returns:
            int64 [n]: first piece of each piece's chain. int64 [n, 2]: blocks of the chain before the piece, and
            leading blocks that the piece shares with earlier pieces. int64 [n]: order with chains contiguous.
        """
        index = self.arrays
        count = len(begins)
        chain, skipped = np.arange(count), np.zeros((count, 2), dtype=np.int64)
        if not index.stream[slots].any():
            return chain, skipped, np.arange(count)
        blocks = index.block_ids[ranges(begins, lengths)]
        if np.bincount(blocks).max() == 1:
            return chain, skipped, np.arange(count)
        # In step order: by sequence number, the slot being written last.
        sequence = np.where(index.state[slots] == WRITING, np.int64(2**63 - 1), index.sequence[slots])
        order = np.lexsort((sequence, index.stream[slots]))
        places: dict[int, tuple[int, int]] = {}
        sizes: dict[int, int] = {}
        for i in order[index.stream[slots[order]] > 0].tolist():
            row = index.block_ids[begins[i] : begins[i] + lengths[i]].tolist()
            head, place = places.get(row[0], (i, 0))
            before = sizes.get(head, 0)
            chain[i], skipped[i] = head, (place, max(0, before - place))
            if before - place > lengths[i]:
                raise index.corrupt(
                    f"the block tables of stream {index.stream[slots[i]]} do not follow each other"
                )
            for j in range(before - place, len(row)):
                places[row[j]] = head, place + j
            sizes[head] = place + len(row)
        return chain, skipped, order

    def move(self, last: int) -> None:
        """Compact the block tables into the other half, that of slot `last` at the end, so that it can grow."""
        index = self.arrays
        half = 1 - int(index.counters[HALF])
        require_whole(index, bad_marks(index) or bad_slots(index))
        counters = index.counters
        counters[DIRTY] = 1  # stays set if this fails or the process dies: the next lock holder then recovers
        slots, blocks, places, begins, lengths = self._pieces(last)
        moved = index.block_ids[ranges(begins, lengths)]
        target = half * index.half_size
        index.block_ids[target : target + len(moved)] = moved
        index.moved[slots] = places
        # Readers see the new places one by one. If this process dies in between, both halves are in use; recovery
        # finishes the move from this intent record.
        counters[MOVING] = 1 + half
        self._finish(slots, blocks)
        counters[DIRTY] = 0

    def finish_move(self) -> None:
        """Apply the intent record `MOVING`; idempotent."""
        slots = self._slots()
        self._finish(slots, self.arrays.blocks_at(slots))

    def _finish(self, slots: Array, blocks: Array) -> None:
        index = self.arrays
        counters = index.counters
        half = int(counters[MOVING]) - 1
        moved = index.moved[slots].astype(np.int64)
        ends = moved + blocks
        if (ends > index.half_size).any():
            raise index.corrupt("a block table is being moved out of its half")
        index.extent[slots, 1] = half * index.half_size + moved
        counters[HEAD + half] = int(ends.max(initial=0))
        counters[HEAD + 1 - half] = 0
        counters[FLIP_EPOCH] = counters[EPOCH]
        counters[EPOCH] += 1
        counters[RUNS] += 1
        counters[HALF] = half
        counters[MOVING] = 0
