"""The slots of a table's index, and everything that follows from them.

The slots are the truth: state, extent (length and place in `block_ids`), generation, sequence, id, epoch, owner,
priority, and when and how often they were added and drawn. Everything else (free lists, links, ring, counts, uses of
blocks) is derived from them. A mutation marks the index dirty while it works; whoever takes the lock and finds it
dirty, because a process was killed in the middle, derives it all anew. That is why a slot's state is always written
last. The mutations are in `gear_loader.storage.operations`; here is what derives.

A value that a process stored by mistake is not recovered from: `damage` finds those that name no existing slot, block
or place when a process attaches, operations find them where they would follow them, and the table is refused.

Block tables grow in one half of `block_ids`; when it is full, the live ones are copied to the other half. The half
that was left stays as it was until the next such move, so a reader that still uses it is not disturbed. A writer
gets its block ids when it gets its slots, and looks at no block table.

The trajectories that a writer cuts from one stream of steps share the blocks of the steps that they have in common:
then their block tables are parts of one, and stay so when they are moved. A stream that had to begin a new block table
in its middle has some entries twice until then.
"""

from __future__ import annotations

import contextlib
import types
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from gear_loader.errors import CorruptTableError
from gear_loader.storage import operations
from gear_loader.storage.counters import (
    COMMITTING,
    DIRTY,
    DRAWING,
    DRAWING_TIMES,
    DRAWING_TOTAL,
    EPOCH,
    FIRST_SEQUENCE,
    FLIP_EPOCH,
    HALF,
    HEAD,
    INITIALIZED,
    LEAVING,
    LEAVING_COUNT,
    LEAVING_TOTAL,
    MOVING,
    NEWEST,
    NEXT_SEQUENCE,
    NUM_EVICTED,
    NUM_EXPIRED,
    NUM_FREE_BLOCKS,
    NUM_FREE_SLOTS,
    NUM_READY,
    NUM_REMOVED,
    NUM_RETIRED,
    NUM_SAMPLED,
    NUM_STEPS,
    NUM_TOUCHED,
    NUM_WRITING,
    OLDEST,
    ORIGIN,
    RAISING,
    RAISING_FIRST,
    REMOVING,
    RETIRED_BLOCKS,
    RETIRED_FIRST,
    RUNS,
    VERSION,
    WRITING_BLOCKS,
    WRITING_STEPS,
)
from gear_loader.storage.ids import LARGEST_ORIGIN, first_free, ids_of, origin_of
from gear_loader.storage.operations import (
    ALL,
    FREE,
    LIVE,
    MARKED,
    PID,
    READING,
    READY,
    RETIRED,
    UNSET,
    WRITING,
    View,
)
from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array

__all__ = ["FREE", "READING", "READY", "RETIRED", "UNSET", "WRITING", "Array", "Slots", "ranges"]


class Slots:
    """The index's arrays as views, and what can be derived from them.

    Whoever calls a method holds the lock.
    """

    def __init__(self, region: Region) -> None:
        layout = region.layout
        self.name = region.name
        self.rules = layout.rules
        self.block_steps = layout.block_steps
        self.max_steps = layout.max_steps
        self.num_slots = layout.max_trajectories
        self.num_blocks = layout.num_blocks
        self.half_size = layout.half
        self.counters: Array = region.array("counters")
        self.readers: Array = region.array("readers")
        self.extent: Array = region.array("extent")
        self.generation: Array = region.array("generation")
        self.sequence: Array = region.array("sequence")
        self.ident: Array = region.array("ident")
        self.epoch: Array = region.array("epoch")
        self.owner: Array = region.array("owner")
        self.stream: Array = region.array("stream")
        self.created: Array = region.array("created")
        self.moved: Array = region.array("moved")
        self.priority: Array = region.array("priority")
        self.sampled: Array = region.array("sampled")
        self.state: Array = region.array("state")
        self.links: Array = region.array("links")
        self.block_ids: Array = region.array("block_ids").reshape(-1)
        self.free_slots: Array = region.array("free_slots")
        self.retired: Array = region.array("retired")
        self.touched: Array = region.array("touched")
        self.free_blocks: Array = region.array("free_blocks")
        self.uses: Array = region.array("uses")
        self.lowest: Array = region.array("lowest")
        self.group = layout.group
        self.operate(compiled=operations.COMPILED is not None)

    def operate(self, *, compiled: bool) -> None:
        """Use the compiled operations, or those in Python (on the arrays that are attributes now)."""
        self._view = View(*(getattr(self, name) for name in View._fields))
        self.operations: Any = operations.COMPILED if compiled else operations.PLAIN
        self._ops = types.SimpleNamespace(
            **{name: _checked(operation, self.name) for name, operation in vars(self.operations).items()}
        )
        self.stores_at_once = compiled and self.rules.rate_limiter is None
        self._where: Any = operations.places_of(self._view) if compiled else self._view

    @contextlib.contextmanager
    def _mutation(self) -> Iterator[None]:
        # Left set when the body fails or the process dies: then the next holder of the lock rebuilds.
        self.counters[DIRTY] = 1
        yield
        self.counters[DIRTY] = 0

    def blocks_of(self, lengths: Any) -> Any:
        """Blocks that trajectories of these lengths take."""
        return -(-lengths // self.block_steps)

    def num_ready(self) -> int:
        """Live trajectories, as the index counts them. Takes no lock."""
        count = int(self.counters[NUM_READY])
        if not 0 <= count <= self.num_slots:
            raise self.corrupt(f"it counts {count} trajectories, expected 0 to {self.num_slots}")
        return count

    def row(self, slot: int) -> Array:
        """The block ids of a slot, int32 [blocks] (a copy). The caller holds the lock, or a ticket for the slot."""
        length, start = self.extent[slot].tolist()
        blocks = self.blocks_of(length)
        if not (0 < length <= self.max_steps and 0 <= start <= len(self.block_ids) - blocks):
            raise self.corrupt(f"slot {slot} has {length} steps and its block table at {start}")
        return self.ids_at(np.arange(start, start + blocks))

    def ids_at(self, places: Array) -> Array:
        """The entries of the block tables at these places, int64 [n]: block ids, int32 [n]. As for `row`."""
        if len(places) and not 0 <= places.min() <= places.max() < len(self.block_ids):
            raise self.corrupt(f"block tables have the places {places.min()} to {places.max()}")
        ids: Array = self.block_ids[places]
        if len(ids) and not 0 <= ids.min() <= ids.max() < self.num_blocks:
            raise self.corrupt(f"block tables hold the blocks {ids.min()} to {ids.max()}")
        return ids

    # ---------------------------------------------------------------- values that cannot be

    def corrupt(self, what: str) -> CorruptTableError:
        """The error for an index with an impossible value; `what` describes it."""
        return _corrupt(self.name, what)

    def damage(self) -> str | None:
        """The first value in the index that names no existing slot, block or place; None if there is no such value."""
        marks = (COMMITTING, REMOVING, DRAWING, LEAVING, RAISING, MOVING)
        if not self.counters[DIRTY] and any(self.counters[mark] for mark in marks):
            return "a change is marked as unfinished and as finished"
        return self._bad_marks() or self._bad_slots() or self._bad_derived()

    def _bad_marks(self) -> str | None:
        """What is wrong with the marks of unfinished changes."""
        counters, slots = self.counters, self.num_slots
        if not 0 <= counters[MOVING] <= 2 or not 0 <= counters[HALF] <= 1:
            return f"the half in use is {counters[HALF]}, being moved to {counters[MOVING]}"
        if not (0 <= counters[DRAWING] <= slots and 0 <= counters[LEAVING] <= slots):
            return f"slots {counters[DRAWING]} and {counters[LEAVING]} are being counted"
        if counters[LEAVING] and counters[LEAVING_COUNT] not in (NUM_EVICTED, NUM_REMOVED, NUM_EXPIRED):
            return f"a slot is being counted at {counters[LEAVING_COUNT]}"
        return None

    def _bad_slots(self) -> str | None:
        """What is wrong with the slots in use, from which everything else is derived."""
        found = _outside("state", self.state, FREE, RETIRED)
        found = found or _outside("block_ids", self.block_ids, 0, self.num_blocks - 1)
        if found is not None:
            return found
        used = self.state != FREE
        lengths, starts = self.extent[:, 0], self.extent[:, 1]
        left = np.where(starts < self.half_size, self.half_size, 2 * self.half_size) - starts
        inside = (lengths >= 1) & (lengths <= self.max_steps)
        inside &= (starts >= 0) & (starts < 2 * self.half_size)
        inside &= lengths <= left * self.block_steps
        bad = np.flatnonzero(used & ~inside)
        if len(bad):
            length, start = self.extent[bad[0]].tolist()
            return f"slot {bad[0]} has {length} steps and its block table at {start}"
        priority = self.priority
        odd = used & ~(np.isfinite(priority) & ((priority >= 0) | (priority == UNSET)))
        odd &= self.state == READY
        if odd.any():
            slot = np.flatnonzero(odd)[0]
            return f"slot {slot} has the priority {priority[slot]}"
        return None

    def _bad_derived(self) -> str | None:
        """What is wrong with what is derived from the slots."""
        slots, blocks = self.num_slots, self.num_blocks
        for counts, most in (
            ((NUM_READY, NUM_WRITING, NUM_RETIRED, NUM_FREE_SLOTS, OLDEST, NEWEST), slots),
            ((NUM_FREE_BLOCKS, RETIRED_BLOCKS), blocks),
            ((HEAD, HEAD + 1), self.half_size),
            ((NUM_STEPS, WRITING_STEPS), self.max_steps),
            ((RETIRED_FIRST,), slots - 1),
            ((ORIGIN,), LARGEST_ORIGIN + 1),
        ):
            for place in counts:
                if not 0 <= self.counters[place] <= most:
                    return f"counter {place} is {self.counters[place]}, expected 0 to {most}"
        for name, least, most in (
            ("links", -1, slots - 1),
            ("free_slots", 0, slots - 1),
            ("retired", 0, slots - 1),
            ("touched", 0, slots - 1),
            ("free_blocks", 0, blocks - 1),
            ("uses", 0, slots),
        ):
            found = _outside(name, getattr(self, name), least, most)
            if found is not None:
                return found
        return "a bound of priorities is NaN" if np.isnan(self.lowest).any() else None

    # ---------------------------------------------------------------- moving the block tables

    def _pieces(self, last: int) -> tuple[Array, Array, Array, Array, int]:
        """What the block tables of the slots in use consist of, when those that overlap are taken together.

        Args:
            last: the slot whose piece comes last; -1 for any.

        Returns:
            The slots in use; where their block tables begin when the pieces are packed one after another; where the
            pieces begin and how long they are; and the length of it all.
        """
        slots = np.flatnonzero(self.state != FREE)
        slots = slots[np.argsort(self.extent[slots, 1], kind="stable")]
        starts = self.extent[slots, 1]
        ends = np.maximum.accumulate(starts + self.blocks_of(self.extent[slots, 0]))
        new = np.ones(len(slots), dtype=bool)
        new[1:] = starts[1:] >= ends[:-1]
        piece = np.cumsum(new) - 1
        firsts = np.flatnonzero(new)
        begins = starts[firsts]
        lengths = ends[np.append(firsts[1:], len(slots)) - 1] - begins if len(slots) else begins
        chain, skipped, order = self._chains(slots[firsts], begins, lengths)
        more = lengths - skipped[:, 1]
        if last >= 0:
            order = order[np.argsort(chain[order] == chain[piece[slots == last][0]], kind="stable")]
        offsets = np.empty(len(firsts), dtype=np.int64)
        offsets[order] = np.cumsum(more[order]) - more[order]
        # Where a piece begins: where its chain does, and so far into it.
        heads = offsets[chain]
        places = (heads + skipped[:, 0] - begins)[piece] + starts if len(slots) else starts
        return slots, places, (begins + skipped[:, 1])[order], more[order], int(more.sum())

    def _chains(self, slots: Array, begins: Array, lengths: Array) -> tuple[Array, Array, Array]:
        """Which pieces are parts of one sequence of blocks: a stream that had to begin a new block table in its middle.

        Args:
            slots: the first slot of each piece.

        Returns:
            For each piece the first piece of its sequence; int64 [n, 2]: how many of the sequence's blocks come before
            the piece, and how many of the piece's own come in pieces before; and an order in which the pieces of a
            sequence are neighbours.
        """
        count = len(begins)
        chain, skipped = np.arange(count), np.zeros((count, 2), dtype=np.int64)
        if not self.stream[slots].any():
            return chain, skipped, np.arange(count)
        blocks = self.block_ids[ranges(begins, lengths)]
        if np.bincount(blocks).max() == 1:
            return chain, skipped, np.arange(count)
        # In the order of the steps: by sequence number, and what is being written comes last.
        sequence = np.where(self.state[slots] == WRITING, np.int64(2**63 - 1), self.sequence[slots])
        order = np.lexsort((sequence, self.stream[slots]))
        places: dict[int, tuple[int, int]] = {}
        sizes: dict[int, int] = {}
        for i in order[self.stream[slots[order]] > 0].tolist():
            row = self.block_ids[begins[i] : begins[i] + lengths[i]].tolist()
            head, place = places.get(row[0], (i, 0))
            before = sizes.get(head, 0)
            chain[i], skipped[i] = head, (place, max(0, before - place))
            if before - place > lengths[i]:
                raise self.corrupt(
                    f"the block tables of stream {self.stream[slots[i]]} do not follow each other"
                )
            for j in range(before - place, len(row)):
                places[row[j]] = head, place + j
            sizes[head] = place + len(row)
        return chain, skipped, order

    def _move(self, last: int) -> None:
        """Move the block tables in use to the other half; the block table of `last` will end where there is room."""
        half = 1 - int(self.counters[HALF])
        self._require_whole(self._bad_marks() or self._bad_slots())
        with self._mutation():
            slots, places, begins, lengths, total = self._pieces(last)
            target = half * self.half_size
            self.block_ids[target : target + total] = self.block_ids[ranges(begins, lengths)]
            self.moved[slots] = places
            # Readers see the new places one by one. If this process dies between, both halves are in use; so from
            # here on whoever takes the lock next finishes the move.
            self.counters[MOVING] = 1 + half
            self._finish_move()

    def _finish_move(self) -> None:
        counters = self.counters
        half = int(counters[MOVING]) - 1
        slots = np.flatnonzero(self.state != FREE)
        if (self.moved[slots] + self.blocks_of(self.extent[slots, 0]) > self.half_size).any():
            raise self.corrupt("a block table is being moved out of its half")
        self.extent[slots, 1] = half * self.half_size + self.moved[slots].astype(np.int64)
        ends = self.extent[slots, 1] + self.blocks_of(self.extent[slots, 0])
        counters[HEAD + half] = int(ends.max(initial=half * self.half_size)) - half * self.half_size
        counters[HEAD + 1 - half] = 0
        counters[FLIP_EPOCH] = counters[EPOCH]
        counters[EPOCH] += 1
        counters[RUNS] += 1
        counters[HALF] = half
        counters[MOVING] = 0

    # ---------------------------------------------------------------- derived from the slots

    def _derive(self) -> dict[str, Any]:
        """Everything that follows from the slots, as `_rebuild` writes it and `_check` expects it."""
        lengths, starts = self.extent[:, 0], self.extent[:, 1]
        used = np.flatnonzero(self.state != FREE)
        blocks = self.blocks_of(lengths)
        uses = np.zeros((self.num_blocks, 2), dtype=np.int32)
        for column, slots in ((ALL, used), (LIVE, used[self.state[used] != RETIRED])):
            taken = self.block_ids[ranges(starts[slots], blocks[slots])]
            uses[:, column] = np.bincount(taken, minlength=self.num_blocks)
        ready = np.flatnonzero(self.state == READY)
        ready = ready[np.argsort(self.sequence[ready], kind="stable")]
        retired = np.flatnonzero(self.state == RETIRED)
        retired = retired[np.argsort(self.epoch[retired], kind="stable")]
        writing = np.flatnonzero(self.state == WRITING)
        half = starts[used] // self.half_size
        ends = starts[used] - half * self.half_size + blocks[used]
        free = uses[:, ALL] == 0
        return {
            "uses": uses,
            "ready": ready,
            "retired": retired,
            "free_slots": np.flatnonzero(self.state == FREE),
            "free_blocks": np.flatnonzero(free),
            "ends": [int(ends[half == side].max(initial=0)) for side in (0, 1)],
            "counts": {
                NUM_READY: len(ready),
                NUM_STEPS: int(lengths[ready].sum()),
                NUM_WRITING: len(writing),
                WRITING_STEPS: int(lengths[writing].sum()),
                WRITING_BLOCKS: int(blocks[writing].sum()),
                NUM_RETIRED: len(retired),
                RETIRED_BLOCKS: int((~free & (uses[:, LIVE] == 0)).sum()),
                NUM_FREE_SLOTS: int((self.state == FREE).sum()),
                NUM_FREE_BLOCKS: int(free.sum()),
            },
        }

    def _complete(self) -> None:
        """Finish, or undo, what was to happen to several slots at once."""
        counters = self.counters
        if counters[MOVING]:
            self._finish_move()
        writing = np.flatnonzero(self.state == WRITING)
        if counters[COMMITTING]:
            done = writing[self.sequence[writing] >= counters[COMMITTING] - 1]
            self.state[done] = READY
            counters[COMMITTING] = 0
        self.sequence[np.flatnonzero(self.state == WRITING)] = -1
        if counters[RAISING]:
            counters[FIRST_SEQUENCE] = counters[RAISING_FIRST]
            counters[NEXT_SEQUENCE] = counters[RAISING]
            counters[RAISING] = 0
        if counters[DRAWING]:
            if self.sampled[counters[DRAWING] - 1] == counters[DRAWING_TIMES]:
                counters[NUM_SAMPLED] = counters[DRAWING_TOTAL]
            counters[DRAWING] = 0
        if counters[LEAVING]:
            if self.state[counters[LEAVING] - 1] == RETIRED:
                counters[counters[LEAVING_COUNT]] = counters[LEAVING_TOTAL]
            counters[LEAVING] = 0
        marked = np.flatnonzero(self.owner[:, PID] == MARKED)
        leaving = marked[self.state[marked] == READY] if counters[REMOVING] else marked[:0]
        counters[NUM_REMOVED] += len(leaving)
        times = self.rules.max_times_sampled
        if times is not None:
            used_up = np.flatnonzero((self.state == READY) & (self.sampled >= times))
            used_up = np.setdiff1d(used_up, leaving)
            counters[NUM_EXPIRED] += len(used_up)
            leaving = np.concatenate((leaving, used_up))
        if len(leaving):
            retired = self.epoch[np.flatnonzero(self.state == RETIRED)].max(initial=0)
            counters[EPOCH] = max(int(counters[EPOCH]), int(retired) + 1)
            self.epoch[leaving] = counters[EPOCH] + np.arange(len(leaving))
            self.state[leaving] = RETIRED
        self.owner[marked, PID] = 0
        counters[REMOVING] = 0

    def _require_whole(self, damage: str | None) -> None:
        if damage is not None:
            raise self.corrupt(damage)

    def _rebuild(self) -> None:
        counters = self.counters
        counters[DIRTY] = 1
        self._require_whole(self._bad_marks())
        self._complete()
        self._require_whole(self._bad_slots())
        derived = self._derive()
        for place, value in derived["counts"].items():
            counters[place] = value
        self.links[:] = -1
        for name in ("free_slots", "free_blocks", "retired", "touched"):
            getattr(self, name)[:] = 0
        # Stacks grow upwards: the lowest slots and blocks are handed out first.
        self.free_slots[: len(derived["free_slots"])] = derived["free_slots"][::-1]
        self.free_blocks[: len(derived["free_blocks"])] = derived["free_blocks"][::-1]
        self.retired[: len(derived["retired"])] = derived["retired"]
        self.uses[:] = derived["uses"]
        self.lowest[:] = -np.inf  # no bound: looked up when it is needed
        counters[RETIRED_FIRST] = 0
        ready = derived["ready"]
        counters[OLDEST] = ready[0] + 1 if len(ready) else 0
        counters[NEWEST] = ready[-1] + 1 if len(ready) else 0
        if len(ready):
            self.links[ready, 0] = np.append(-1, ready[:-1])
            self.links[ready, 1] = np.append(ready[1:], -1)
            counters[NEXT_SEQUENCE] = max(counters[NEXT_SEQUENCE], self.sequence[ready[-1]] + 1)
        counters[HEAD : HEAD + 2] = derived["ends"]
        used = np.flatnonzero(self.state == RETIRED)
        last = int(self.epoch[used].max()) if len(used) else 0
        counters[EPOCH] = max(counters[EPOCH], last, 0) + 1
        counters[VERSION] += 1
        counters[RUNS] += 1
        counters[NUM_TOUCHED] += self.num_slots + 1  # whoever follows the ring has to look at every slot
        counters[INITIALIZED] = 1
        counters[DIRTY] = 0

    def _check(self) -> None:
        """Raise AssertionError unless everything derived agrees with the slots."""
        counters = self.counters
        used = np.flatnonzero(self.state != FREE)
        lengths, starts = self.extent[used, 0], self.extent[used, 1]
        taken = self.block_ids[ranges(starts, self.blocks_of(lengths))]
        assert ((taken >= 0) & (taken < self.num_blocks)).all(), "a block id is out of range"
        self._check_sharing(taken, np.repeat(self.stream[used], self.blocks_of(lengths)))
        derived = self._derive()
        for place, value in derived["counts"].items():
            assert counters[place] == value, f"counter {place} is {counters[place]}, expected {value}"
        for name in ("free_slots", "free_blocks"):
            count = len(derived[name])
            found = np.sort(getattr(self, name)[:count])
            assert (found == derived[name]).all(), f"{name} does not hold exactly what is free"
        assert (self.uses == derived["uses"]).all(), "the uses of a block are counted wrong"
        ring = (counters[RETIRED_FIRST] + np.arange(counters[NUM_RETIRED])) % self.num_slots
        assert (self.retired[ring] == derived["retired"]).all(), "the ring of retired slots is out of order"
        self._check_order(derived["ready"])
        half = int(counters[HALF])
        assert derived["ends"][1 - half] == 0, "a block table lies in the half that was left"
        assert derived["ends"][half] <= counters[HEAD + half] <= self.half_size, (
            "a block table lies beyond the head"
        )
        assert (lengths >= 1).all(), "a trajectory has no steps"
        assert lengths.max(initial=0) <= self.max_steps, "a trajectory has more than max_steps steps"
        steps = counters[NUM_STEPS] + counters[WRITING_STEPS]
        assert steps <= self.max_steps, f"{steps} steps are more than max_steps"
        assert not counters[COMMITTING], "a commit was left half done"
        assert not counters[REMOVING], "a removal was left half done"
        assert not counters[DRAWING], "a draw was left half counted"
        assert not counters[LEAVING], "a trajectory was left half retired"
        assert not counters[RAISING], "the numbering was left half raised"
        assert (self.readers[:, READING] <= counters[EPOCH]).all(), "a reader announced an epoch to come"

    def _check_sharing(self, blocks: Array, streams: Array) -> None:
        """Only trajectories that are cut from one stream share blocks (int [n], of trajectories of these streams)."""
        shared = np.bincount(blocks, minlength=self.num_blocks)[blocks] > 1
        blocks, streams = blocks[shared], streams[shared]
        least, largest = np.full(self.num_blocks, 2**63 - 1), np.zeros(self.num_blocks, dtype=np.int64)
        np.minimum.at(least, blocks, streams)
        np.maximum.at(largest, blocks, streams)
        alike = (least[blocks] == largest[blocks]) & (streams > 0)
        assert alike.all(), "a block belongs to two trajectories"

    def _check_order(self, ready: Array) -> None:
        counters = self.counters
        order: list[int] = []
        slot = int(counters[OLDEST]) - 1
        while slot >= 0 and len(order) <= self.num_slots:
            order.append(slot)
            slot = int(self.links[slot, 1])
        assert order == ready.tolist(), "the links do not lead through the trajectories in order"
        older = [-1, *order[:-1]]
        assert self.links[order, 0].tolist() == older[: len(order)], "the links back are wrong"
        assert int(counters[NEWEST]) - 1 == (order[-1] if order else -1), "the newest trajectory is wrong"
        sequences = self.sequence[ready]
        assert len(np.unique(sequences)) == len(order), "a sequence number is used twice"
        assert counters[NEXT_SEQUENCE] > sequences.max(initial=-1), "a sequence number comes again"
        ids = ids_of(self._view, ready)
        assert (self.ident[ready] >= -1).all(), "an id is negative"
        assert len(np.unique(ids)) == len(ids), "an id is used twice"
        assert counters[NEXT_SEQUENCE] >= first_free(self._view, origin_of(self._view) or 0), (
            "an id comes again"
        )
        priorities = self.priority[ready]
        given = priorities[priorities != UNSET]
        assert (np.isfinite(given) & (given >= 0)).all(), "a priority is negative or not finite"
        least = np.full(len(self.lowest), np.inf)
        np.minimum.at(least, ready // self.group, np.where(priorities == UNSET, np.inf, priorities))
        assert (self.lowest <= least).all(), "a priority is lower than the bound of its group"


def _corrupt(name: str | None, what: str) -> CorruptTableError:
    known = "The private table" if name is None else f"Table {name!r}"
    remedy = "Create it again" if name is None else f"Remove it (`gear-loader rm {name}`)"
    return CorruptTableError(
        f"{known} has a corrupt index: {what}. Another process may have written into its memory. {remedy}; "
        "Table.load restores the last checkpoint."
    )


def _checked(operation: Callable[..., Any], name: str | None) -> Callable[..., Any]:
    """The operation, raising CorruptTableError where it raises IndexError."""

    def call(*given: Any) -> Any:
        try:
            return operation(*given)
        except IndexError as error:
            raise _corrupt(name, str(error)) from error

    return call


def _outside(name: str, values: Array, least: int, most: int) -> str | None:
    """What of an array is not from `least` to `most`."""
    found = int(values.min()), int(values.max())
    if least <= found[0] and found[1] <= most:
        return None
    return f"{name} holds {found[0]} to {found[1]}, expected {least} to {most}"


def ranges(starts: Array, counts: Array) -> Array:
    """starts[0], starts[0] + 1, ... (counts[0] of them), starts[1], ...; all int64 [n]."""
    before = np.cumsum(counts) - counts
    places: Array = np.repeat(starts - before, counts) + np.arange(counts.sum())
    return places
