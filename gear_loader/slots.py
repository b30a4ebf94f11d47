"""The slots of a table's index, and everything that follows from them.

The slots are the truth: state, extent (length and place in `block_ids`), generation, sequence, epoch, owner,
priority. Everything else (free lists, links, ring, counts) is derived from them. A mutation marks the index dirty
while it works; whoever takes the lock and finds it dirty, because a process was killed in the middle, derives it
all anew. That is why a slot's state is always written last.

Block tables grow in one half of `block_ids`; when it is full, the live ones are copied to the other half. The half
that was left stays as it was until the next such move, so a reader that still uses it is not disturbed. A writer
gets its block ids when it gets its slots, and looks at no block table.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from typing import Any

import numpy as np

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.region import Region

__all__ = ["FREE", "IDENTITY", "READING", "READY", "RETIRED", "UNSET", "WRITING", "Array", "Slots"]

FREE, WRITING, READY, RETIRED = range(4)
Array = np.ndarray[Any, Any]

# Places in `counters`. OLDEST and NEWEST hold slot + 1, 0 for none, so that zeros describe an empty table.
(
    EPOCH,
    VERSION,
    NUM_READY,
    NUM_STEPS,
    READY_BLOCKS,
    NUM_WRITING,
    WRITING_STEPS,
    NUM_FREE_SLOTS,
    NUM_FREE_BLOCKS,
    NEXT_SEQUENCE,
    HALF,
    HEAD,  # two entries, one a half
    _HEAD_1,
    FLIP_EPOCH,
    OLDEST,
    NEWEST,
    RETIRED_FIRST,
    NUM_RETIRED,
    RETIRED_BLOCKS,
    DIRTY,
    INITIALIZED,
    NUM_EVICTED,
    NUM_REMOVED,
    MOVING,  # 1 + the half to which the block tables are being moved, 0 for none
    NUM_TOUCHED,  # entries ever written to the ring `touched`
) = range(25)
IDENTITY = slice(60, 64)
"""Places in `counters` that belong to checkpoints: a random name for the table; the save that it was loaded from, or 0;
and for a private table the process that got the name, since a forked child has a table of its own from then on."""
PID, START, READING = range(3)  # columns of `readers`


class Slots:
    """The index's arrays as views, and the changes that the operations of `Index` are made of.

    Whoever calls a method holds the lock.
    """

    def __init__(self, region: Region) -> None:
        layout = region.layout
        self.block_steps = layout.block_steps
        self.max_steps = layout.max_steps
        self.num_slots = layout.max_trajectories
        self.num_blocks = layout.num_blocks
        self.counters: Array = region.array("counters")
        self.readers: Array = region.array("readers")
        self.extent: Array = region.array("extent")
        self.generation: Array = region.array("generation")
        self.sequence: Array = region.array("sequence")
        self.epoch: Array = region.array("epoch")
        self.owner: Array = region.array("owner")
        self.priority: Array = region.array("priority")
        self.state: Array = region.array("state")
        self.links: Array = region.array("links")
        self.block_ids: Array = region.array("block_ids").reshape(-1)
        self.half_size = layout.half
        self.free_slots: Array = region.array("free_slots")
        self.retired: Array = region.array("retired")
        self.touched: Array = region.array("touched")
        self.free_blocks: Array = region.array("free_blocks")

    @contextlib.contextmanager
    def _mutation(self) -> Iterator[None]:
        # Left set when the body fails or the process dies: then the next holder of the lock rebuilds.
        self.counters[DIRTY] = 1
        yield
        self.counters[DIRTY] = 0

    def blocks_of(self, lengths: Any) -> Any:
        """Blocks that trajectories of these lengths take."""
        return -(-lengths // self.block_steps)

    def row(self, slot: int) -> Array:
        """The block ids of a slot, int32 [blocks] (a copy). The caller holds the lock, or a ticket for the slot."""
        length, start = self.extent[slot].tolist()
        return self.block_ids[start : start + self.blocks_of(length)].copy()

    # ---------------------------------------------------------------- changes

    def _append(self, slots: Array) -> None:
        counters = self.counters
        newest = int(counters[NEWEST]) - 1
        self.links[slots, 0] = np.concatenate(([newest], slots[:-1]))
        self.links[slots, 1] = np.concatenate((slots[1:], [-1]))
        if newest >= 0:
            self.links[newest, 1] = slots[0]
        else:
            counters[OLDEST] = slots[0] + 1
        counters[NEWEST] = slots[-1] + 1

    def _touch(self, slots: Array) -> None:
        counters, count = self.counters, len(slots)
        self.touched[(counters[NUM_TOUCHED] + np.arange(count)) % self.num_slots] = slots
        counters[NUM_TOUCHED] += count

    def _retire(self, slot: int) -> None:
        counters = self.counters
        older, newer = self.links[slot].tolist()
        if older >= 0:
            self.links[older, 1] = newer
        else:
            counters[OLDEST] = newer + 1
        if newer >= 0:
            self.links[newer, 0] = older
        else:
            counters[NEWEST] = older + 1
        length = int(self.extent[slot, 0])
        blocks = self.blocks_of(length)
        self.epoch[slot] = counters[EPOCH]
        self.state[slot] = RETIRED
        self.retired[(counters[RETIRED_FIRST] + counters[NUM_RETIRED]) % self.num_slots] = slot
        self.touched[counters[NUM_TOUCHED] % self.num_slots] = slot
        counters[NUM_TOUCHED] += 1
        counters[EPOCH] += 1
        counters[VERSION] += 1
        counters[NUM_RETIRED] += 1
        counters[RETIRED_BLOCKS] += blocks
        counters[READY_BLOCKS] -= blocks
        counters[NUM_READY] -= 1
        counters[NUM_STEPS] -= length

    def _free(self, slot: int) -> int:
        counters = self.counters
        ids = self.row(slot)
        self.state[slot] = FREE
        top = int(counters[NUM_FREE_BLOCKS])
        self.free_blocks[top : top + len(ids)] = ids[::-1]
        counters[NUM_FREE_BLOCKS] = top + len(ids)
        self.free_slots[counters[NUM_FREE_SLOTS]] = slot
        counters[NUM_FREE_SLOTS] += 1
        return len(ids)

    def _abort(self, slots: Array) -> None:
        for slot in slots.tolist():
            self.counters[WRITING_STEPS] -= self.extent[slot, 0]
            self.counters[NUM_WRITING] -= 1
            self._free(slot)

    def _packed(self) -> tuple[Array, Array, int]:
        """Slots in use, where their block tables begin when packed one after another, and the length of it all."""
        slots = np.flatnonzero(self.state != FREE)
        ends = np.cumsum(self.blocks_of(self.extent[slots, 0]))
        return slots, ends - self.blocks_of(self.extent[slots, 0]), int(ends[-1]) if len(slots) else 0

    def _finish_flip(self) -> None:
        counters = self.counters
        half = int(counters[MOVING]) - 1
        slots, offsets, total = self._packed()
        self.extent[slots, 1] = half * self.half_size + offsets
        counters[HEAD + half] = total
        counters[HEAD + 1 - half] = 0
        counters[FLIP_EPOCH] = counters[EPOCH]
        counters[EPOCH] += 1
        counters[HALF] = half
        counters[MOVING] = 0

    # ---------------------------------------------------------------- derived from the slots

    def _derive(self) -> dict[str, Any]:
        """Everything that follows from the slots, as `_rebuild` writes it and `_check` expects it."""
        lengths, starts = self.extent[:, 0], self.extent[:, 1]
        used = np.flatnonzero(self.state != FREE)
        blocks = self.blocks_of(lengths)
        rows = [self.block_ids[starts[s] : starts[s] + blocks[s]] for s in used.tolist()]
        taken = np.concatenate(rows) if rows else np.empty(0, dtype=np.int32)
        ready = np.flatnonzero(self.state == READY)
        ready = ready[np.argsort(self.sequence[ready], kind="stable")]
        retired = np.flatnonzero(self.state == RETIRED)
        retired = retired[np.argsort(self.epoch[retired], kind="stable")]
        writing = np.flatnonzero(self.state == WRITING)
        ends = [0, 0]
        for slot in used.tolist():
            half, place = divmod(int(starts[slot]), self.half_size)
            ends[half] = max(ends[half], place + int(blocks[slot]))
        free = np.ones(self.num_blocks, dtype=bool)
        free[taken] = False
        return {
            "taken": taken,
            "ready": ready,
            "retired": retired,
            "free_slots": np.flatnonzero(self.state == FREE),
            "free_blocks": np.flatnonzero(free),
            "ends": ends,
            "counts": {
                NUM_READY: len(ready),
                NUM_STEPS: int(lengths[ready].sum()),
                READY_BLOCKS: int(blocks[ready].sum()),
                NUM_WRITING: len(writing),
                WRITING_STEPS: int(lengths[writing].sum()),
                NUM_RETIRED: len(retired),
                RETIRED_BLOCKS: int(blocks[retired].sum()),
                NUM_FREE_SLOTS: int((self.state == FREE).sum()),
                NUM_FREE_BLOCKS: int(free.sum()),
            },
        }

    def _rebuild(self) -> None:
        counters = self.counters
        counters[DIRTY] = 1
        if counters[MOVING]:
            self._finish_flip()
        derived = self._derive()
        for place, value in derived["counts"].items():
            counters[place] = value
        # Stacks grow upwards: the lowest slots and blocks are handed out first.
        self.free_slots[: len(derived["free_slots"])] = derived["free_slots"][::-1]
        self.free_blocks[: len(derived["free_blocks"])] = derived["free_blocks"][::-1]
        self.retired[: len(derived["retired"])] = derived["retired"]
        counters[RETIRED_FIRST] = 0
        counters[OLDEST] = counters[NEWEST] = 0
        if len(derived["ready"]):
            self._append(derived["ready"])
            counters[NEXT_SEQUENCE] = max(counters[NEXT_SEQUENCE], self.sequence[derived["ready"][-1]] + 1)
        counters[HEAD : HEAD + 2] = derived["ends"]
        used = np.flatnonzero(self.state == RETIRED)
        last = int(self.epoch[used].max()) if len(used) else 0
        counters[EPOCH] = max(counters[EPOCH], last, 0) + 1
        counters[VERSION] += 1
        counters[NUM_TOUCHED] += self.num_slots + 1  # whoever follows the ring has to look at every slot
        counters[INITIALIZED] = 1
        counters[DIRTY] = 0

    def _check(self) -> None:
        """Raise AssertionError unless everything derived agrees with the slots."""
        derived, counters = self._derive(), self.counters
        taken = derived["taken"]
        assert len(np.unique(taken)) == len(taken), "a block belongs to two trajectories"
        assert ((taken >= 0) & (taken < self.num_blocks)).all(), "a block id is out of range"
        for place, value in derived["counts"].items():
            assert counters[place] == value, f"counter {place} is {counters[place]}, expected {value}"
        for name in ("free_slots", "free_blocks"):
            count = len(derived[name])
            found = np.sort(getattr(self, name)[:count])
            assert (found == derived[name]).all(), f"{name} does not hold exactly what is free"
        ring = (counters[RETIRED_FIRST] + np.arange(counters[NUM_RETIRED])) % self.num_slots
        assert (self.retired[ring] == derived["retired"]).all(), "the ring of retired slots is out of order"
        order: list[int] = []
        slot = int(counters[OLDEST]) - 1
        while slot >= 0 and len(order) <= self.num_slots:
            order.append(slot)
            slot = int(self.links[slot, 1])
        assert order == derived["ready"].tolist(), "the links do not lead through the trajectories in order"
        older = [-1, *order[:-1]]
        assert self.links[order, 0].tolist() == older[: len(order)], "the links back are wrong"
        assert int(counters[NEWEST]) - 1 == (order[-1] if order else -1), "the newest trajectory is wrong"
        half = int(counters[HALF])
        assert derived["ends"][1 - half] == 0, "a block table lies in the half that was left"
        assert derived["ends"][half] <= counters[HEAD + half] <= self.half_size, (
            "a block table lies beyond the head"
        )
        lengths = self.extent[np.flatnonzero(self.state != FREE), 0]
        assert (lengths >= 1).all(), "a trajectory has no steps"
        assert lengths.max(initial=0) <= self.max_steps, "a trajectory has more than max_steps steps"
        steps = counters[NUM_STEPS] + counters[WRITING_STEPS]
        assert steps <= self.max_steps, f"{steps} steps are more than max_steps"
        sequences = self.sequence[derived["ready"]]
        assert len(np.unique(sequences)) == len(order), "a sequence number is used twice"
        assert counters[NEXT_SEQUENCE] > sequences.max(initial=-1), "a sequence number comes again"
        priorities = self.priority[derived["ready"]]
        given = priorities[priorities != UNSET]
        assert (np.isfinite(given) & (given >= 0)).all(), "a priority is negative or not finite"
        assert (self.readers[:, READING] <= counters[EPOCH]).all(), "a reader announced an epoch to come"
