"""A part of a table's blocks in a GPU's memory, in front of those that it reads over the bus.

A place of the cache holds a copy of one block: of its bytes in every column that the dataset reads. `where` says for
each block of the table in which place it is; the host has it, and the device if that draws.

**No copy is ever stale.** All that follows happens under the read ticket of a batch, on the stream that gathers it,
before the gather:

1. Changes of the table since the last batch are followed, by the ring of changes in its index. A retired trajectory's
   copies are forgotten, as are those of blocks of a trajectory that is new, has grown, or got a late column: it may
   share them with others. A block is not used again before the tickets of those that saw its trajectory live have
   ended. So under this ticket no block with a copy changes hands.
   In a table with a disk tier a trajectory may also have left memory, of which the ring does not tell: then its copies
   are found by their blocks, which are not, or no longer, those of the trajectory, and forgotten.
2. Blocks that the policy has chosen (`cache_policy`) are copied over the bus into places whose blocks it has given up.
3. The device's map is brought up to date.

A trajectory may grow after step 1, and with it a block whose copy lacks the new steps. So the copies of a trajectory
are used only by rows that see as many steps of it as they were made of (`totals`). Rows of a trajectory that was added
after step 1 use none.

If anything fails in between, the cache begins anew, empty.
"""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Callable, Collection, Iterator
from typing import Any

import numpy as np
import torch

from gear_loader.collection.cache_policy import CacheOrder, Choice, Contents, Ranker
from gear_loader.errors import SchemaError
from gear_loader.kernels.plan import LINE, GatherColumn, GatherPlan
from gear_loader.storage.counters import EPOCH
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.late import filled_bits
from gear_loader.storage.rows import Reach
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.mutex import new_mutex
from gear_loader.utils.packing import upload
from gear_loader.utils.streams import current_stream

__all__ = ["DeviceCache"]

SHARE = 4
"""Copies take at most 1 / SHARE as many bytes of the bus as the batches' rows have; while places are free, as many."""
MOST_COPIES = 1024
"""Blocks copied for one batch."""
MOST_CHOSEN = 1 << 16
"""Blocks of a choice of the policy."""
PAUSE, REST = 16, 20
"""Batches between two choices at least; or `REST` times as many as passed while the last one was made."""


class DeviceCache:
    """Copies of a table's blocks in the memory of a GPU.

    Args:
        table: whose region the device can read.
        columns: names of the columns that are read.
        budget: most bytes of copies.
        device: the GPU.
        order: which blocks are kept. anchor: anchors of trajectories; None if items are steps.
        reach: what batches read, relative to the anchor.
        likelihoods: of a selection by priority, see `Selection.likelihoods`.

    Attributes:
        num_places: blocks that the cache can hold.
        block_bytes: bytes of one, in all columns.

    Raises:
        SchemaError: the budget is smaller than a block.
    """

    def __init__(
        self,
        table: Table,
        columns: Collection[str],
        budget: int,
        device: torch.device,
        *,
        order: CacheOrder = "any",
        anchor: str | None = "uniform",
        reach: tuple[int, int] = (0, 0),
        likelihoods: Callable[[], tuple[Array, Any] | None] = lambda: None,
    ) -> None:
        self.block_bytes = self.check(table, columns, budget)
        layout = table.region.layout
        self._table, self._device, self._cuda = table, device, device.type == "cuda"
        self._arrays = table.reader().arrays
        self._block_steps = layout.block_steps
        # All columns of a record are one array of blocks.
        names = sorted(columns)
        self._source = {name: "" if layout.columns[name].is_packed else name for name in names}
        self._strides = {self._source[name]: layout.columns[name].block_stride for name in names}
        self._examples = {self._source[name]: name for name in names}
        self.num_places = min(budget // self.block_bytes, layout.num_blocks)
        self._order: CacheOrder = order
        self._anchor, self._reach, self._likelihoods = anchor, reach, likelihoods
        self._mutex = new_mutex()
        self._memory: dict[str, torch.Tensor] = {}  # uint8 [places, stride] of each source
        self._map: Any = None  # `CacheMap`, if the device draws
        self._streams: set[int] = set()
        self._last: Any = torch.cuda.Event() if self._cuda else None  # recorded after all queued work
        self._late = bool(len(self._arrays.filled))
        self._tier = table.has_tier
        self._hits = self._misses = 0
        self._credit = 0.0  # bytes that may be copied
        self._batches = 0
        self._requested = 0  # batch of the last request
        self._asked_at = (-1, 0)  # what `_present` was then
        self._ranker: Ranker | None = None
        self._forget()

    @staticmethod
    def check(table: Table, columns: Collection[str], budget: int) -> int:
        """Bytes of a block in these columns. Raises SchemaError if the budget is smaller."""
        layout = table.region.layout
        places = [layout.columns[name] for name in columns]
        packed = {place.block_stride for place in places if place.is_packed}
        size = sum(packed) + sum(place.block_stride for place in places if not place.is_packed)
        if budget < size:
            raise SchemaError(
                f"device_cache is {budget:,} bytes; expected at least {size:,}, those of one block of "
                f"{layout.block_steps} steps in the columns that are read: {sorted(columns)}."
            )
        return size

    def _forget(self) -> None:
        """Begin anew, empty."""
        slots, blocks = self._arrays.num_slots, self._arrays.num_blocks
        self._position = -1  # in the ring of changes
        self._epoch = -1  # of the table, when it was last looked what has left its memory
        self._where: Array = np.arange(blocks, dtype=np.int32)
        self._totals: Array = np.zeros(slots, dtype=np.int32)
        self._generations: Array = np.zeros(slots, dtype=np.int64)
        self._bits: Array = np.zeros(slots, dtype=np.int64)
        # Of each place: the block, its trajectory's slot, its number in the trajectory; -1 if it is free.
        self._blocks, self._slots, self._numbers = np.full((3, self.num_places), -1, dtype=np.int32)
        self._used: dict[int, set[int]] = {}  # slot -> places
        self._free = list(range(self.num_places - 1, -1, -1))
        self._choice: Choice | None = None
        self._next_choice = 0  # batch of the next request
        self._come = self._leave = 0  # how much of it has been used
        self._changed: list[tuple[Array, Array]] = []  # blocks and slots that the device's map has to follow
        self._is_whole = False  # whether the device's map has followed everything before them
        self._synced = True

    # ---------------------------------------------------------------- memory

    def memory(self, column: str) -> torch.Tensor:
        """The copies of a column, or of the record that it lies in, uint8 [places, bytes of a block]."""
        with self._mutex, outside_inference():
            if not self._memory:
                self._allocate()
            return self._memory[self._source[column]]

    def _allocate(self) -> None:
        device, count = self._device, self.num_places
        memory = {}
        for source, stride in self._strides.items():
            bytes_ = torch.empty(count * stride + LINE, dtype=torch.uint8, device=device)
            first = -bytes_.data_ptr() % LINE  # 0 on a GPU
            memory[source] = bytes_[first : first + count * stride].view(count, stride)
        columns = [
            GatherColumn(
                torch.from_numpy(self._table.region.blocks(self._examples[source])),
                part.view(count, 1, -1),
                0,
            )
            for source, part in memory.items()
        ]
        # A block is copied as if it were a step of a trajectory of its own.
        self._copy = GatherPlan(columns, 1)
        most = min(MOST_COPIES, count)
        extent = torch.zeros(most, 3, dtype=torch.int64, device="cpu")
        extent[:, 0] = 1
        extent[:, 1] = torch.arange(most, device="cpu")
        # Copied, which waits: if computed on the device, another stream could read it too early.
        self._own_extent = extent.to(device)
        self._own_slots = torch.arange(most, device="cpu").to(device)
        self._own_anchors = torch.zeros(most, dtype=torch.int64, device="cpu").to(device)
        self._streams.clear()
        self._ranker = Ranker(MOST_CHOSEN)
        weakref.finalize(self, self._ranker.stop)
        self._memory = memory  # last: it tells that everything is there

    # ---------------------------------------------------------------- order of work

    @contextlib.contextmanager
    def using(self, row_bytes: int) -> Iterator[None]:
        """Bring the cache up to date and let a batch be gathered from it, on the current stream.

        Args:
            row_bytes: bytes of the batch's rows. The caller holds their read ticket.
        """
        with self._mutex:
            stream: Any = None
            if self._cuda:
                stream = current_stream(self._device)
                self._enter(stream)
            try:
                if not self._synced:
                    self._forget()
                self._synced = False
                self._follow()
                if self._tier:
                    self._follow_moves()
                self._copy_blocks(row_bytes)
                self._synced = True
                yield
                self._ask()
            finally:
                if self._cuda:
                    self._last.record(stream)

    def _enter(self, stream: Any) -> None:
        """Order work queued on a stream after all earlier work of other streams."""
        stream.wait_event(self._last)
        if stream.cuda_stream not in self._streams:
            # The allocator must not reuse this memory before the stream's work has finished.
            self._streams.add(stream.cuda_stream)
            parts = [self._own_extent, self._own_slots, self._own_anchors, *self._memory.values()]
            parts += [] if self._map is None else vars(self._map).values()
            parts += [table for _, _, table in self._copy.launches]
            for part in parts:
                part.record_stream(stream)

    # ---------------------------------------------------------------- following the table

    def _follow(self) -> None:
        """Forget copies that changes of the table have made invalid."""
        reader = self._table.reader()
        if reader.position == self._position:
            return
        self._position, (gone, changed, blocks) = reader.follow(self._position, self._read)
        if self._used:
            places = [place for slot in gone.tolist() for place in self._used.get(slot, ())]
            there = self._where[blocks]
            self._drop(np.unique(np.concatenate([~there[there < 0], np.array(places, dtype=np.int32)])))
        self._changed.append((np.empty(0, dtype=np.int64), changed))

    def _follow_moves(self) -> None:
        """Forget copies of trajectories that have left memory, whose blocks may be those of others by now."""
        epoch = int(self._arrays.counters[EPOCH])  # another one after each time that blocks were given up
        if epoch == self._epoch:
            return
        self._epoch = epoch
        held = np.flatnonzero(self._blocks >= 0)
        starts = self._arrays.extent[self._slots[held], 1]
        there = np.flatnonzero(starts >= 0)
        same: Array = np.zeros(len(held), dtype=bool)
        # Without the lock: another trajectory may have taken the slot since, with a shorter block table.
        places = np.minimum(starts[there] + self._numbers[held[there]], len(self._arrays.block_ids) - 1)
        same[there] = self._arrays.block_ids[places] == self._blocks[held[there]]
        self._drop(held[~same])

    def _read(self, slots: Array | None) -> tuple[Array, Array, Array]:
        """Note the trajectories in slots, int64 [n] or all, under the table's lock.

        Returns:
            Slots whose trajectory is gone, and those with any change; blocks whose content may have changed.
        """
        arrays = self._arrays
        slots = np.arange(arrays.num_slots) if slots is None else slots
        ready = arrays.state[slots] == READY
        extent, generations = arrays.extent[slots], arrays.generation[slots]
        totals = np.where(ready, extent[:, 0] + extent[:, 2], 0)
        bits = filled_bits(arrays, slots) if self._late else np.zeros(len(slots), dtype=np.int64)
        before, same = self._totals[slots].astype(np.int64), generations == self._generations[slots]
        other = np.flatnonzero((totals != before) | ~same | (bits != self._bits[slots]))
        gone = slots[other[~(ready & same)[other]]]
        alive = other[ready[other] & (extent[other, 1] >= 0)]  # the others lie on disk only
        blocks: Array = np.empty(0, dtype=np.int32)
        if self._used and len(alive):
            grown = same & (bits == self._bits[slots]) & (totals > before)
            first = np.where(grown, before // self._block_steps, 0)[alive]
            counts = -(-totals[alive] // self._block_steps) - first
            blocks = arrays.ids_at(ranges(extent[alive, 1] + first, counts))
        changed = slots[other]
        self._totals[changed] = totals[other]
        self._generations[changed] = generations[other]
        self._bits[changed] = bits[other]
        return gone, changed, blocks

    def _drop(self, places: Array) -> None:
        """Forget the copies in some places, int [n], distinct."""
        if not len(places):
            return
        blocks = self._blocks[places].astype(np.int64)
        self._where[blocks] = blocks
        for slot, place in zip(self._slots[places].tolist(), places.tolist(), strict=True):
            held = self._used[slot]
            held.remove(place)
            if not held:
                del self._used[slot]
        self._blocks[places] = self._slots[places] = self._numbers[places] = -1
        self._free.extend(places.tolist())
        self._changed.append((blocks, np.empty(0, dtype=np.int64)))

    # ---------------------------------------------------------------- copying

    def _copy_blocks(self, row_bytes: int) -> None:
        """Queue copies of chosen blocks, and what the device's map has to follow."""
        self._batches += 1
        blocks, places = self._next_copies(row_bytes)
        changed, self._changed = self._changed, []
        parts: list[Array] = [blocks, places]
        if self._map is not None:
            parts += self._map_changes(changed)
        if any(len(part) for part in parts):
            ids, rows, *new = upload(self._device, *parts)
            if len(blocks):
                self._launch(ids, rows)
            if new:
                self._map.where[new[0]], self._map.totals[new[2]] = new[1], new[3]

    def _launch(self, ids: torch.Tensor, rows: torch.Tensor) -> None:
        from gear_loader.kernels import gather

        count = len(ids)
        own = self._own_slots[:count], self._own_anchors[:count], self._own_extent
        gather.gather(self._copy, *own, ids, rows=rows)

    def _map_changes(self, changed: list[tuple[Array, Array]]) -> list[Array]:
        """Blocks and slots that have changed, int64, each with what the map says of them, int32."""
        none: Array = np.empty(0, dtype=np.int64)
        if self._is_whole:
            blocks, slots = (
                np.unique(np.concatenate([none, *(pair[i] for pair in changed)])) for i in (0, 1)
            )
        else:
            blocks, slots = np.arange(len(self._where)), np.arange(len(self._totals))
            self._is_whole = True
        return [blocks, self._where[blocks], slots, self._totals[slots]]

    def _next_copies(self, row_bytes: int) -> tuple[Array, Array]:
        """Blocks to copy now, int32 [n], and the places that take them, int64 [n]; the host's map follows."""
        assert self._ranker is not None
        most = min(MOST_COPIES, self.num_places) * self.block_bytes
        self._credit = min(self._credit + row_bytes / (1 if self._free else SHARE), most)
        choice = self._ranker.take()
        if choice is not None:
            self._choice, self._come, self._leave = choice, 0, 0
            self._next_choice = self._batches + max(PAUSE, REST * (self._batches - self._requested))
        choice, count = self._choice, int(self._credit // self.block_bytes)
        ids: Array = np.empty(0, dtype=np.int32)
        if choice is None or not count:
            return ids, np.empty(0, dtype=np.int64)
        part = slice(self._come, self._come + count)
        self._come += count
        slots, numbers = choice.slots[part], choice.numbers[part]
        totals, steps = self._totals[slots], self._block_steps
        valid = (choice.generations[part] == self._generations[slots]) & (numbers * steps < totals)
        starts = self._arrays.extent[slots, 1]
        valid &= starts >= 0  # else it lies on disk
        slots, numbers = slots[valid], numbers[valid]
        ids = self._arrays.ids_at(starts[valid] + numbers)
        ids, first = np.unique(ids, return_index=True)
        first = first[self._where[ids] >= 0]
        slots, numbers = slots[first], numbers[first]
        ids = ids[self._where[ids] >= 0]
        places = self._take_places(choice, len(ids))
        ids, slots, numbers = ids[: len(places)], slots[: len(places)], numbers[: len(places)]
        self._credit -= len(places) * self.block_bytes
        self._where[ids] = ~places
        self._blocks[places], self._slots[places], self._numbers[places] = ids, slots, numbers
        for slot, place in zip(slots.tolist(), places.tolist(), strict=True):
            self._used.setdefault(slot, set()).add(place)
        self._changed.append((ids.astype(np.int64), np.empty(0, dtype=np.int64)))
        return ids, places

    def _take_places(self, choice: Choice, count: int) -> Array:
        """Free places, and those of blocks that the policy gives up, int64 [at most count]."""
        while len(self._free) < count and self._leave < len(choice.places):
            part = slice(self._leave, self._leave + count - len(self._free))
            self._leave = part.stop
            places = choice.places[part]
            same = (self._slots[places] == choice.left[part]) & (
                self._numbers[places] == choice.left_numbers[part]
            )
            self._drop(places[same])
        count = min(count, len(self._free))
        return np.array([self._free.pop() for _ in range(count)], dtype=np.int64)

    def _ask(self) -> None:
        """Request another choice of the policy, if it is time."""
        assert self._ranker is not None
        if self._ranker.busy or self._batches < self._next_choice:
            return
        choice = self._choice
        if choice is not None and not self._free and self._order == "any":
            return
        if choice is not None and not len(choice.slots) and self._free and self._asked_at == self._present():
            return  # all is there
        totals = self._totals.copy()
        if self._tier:
            totals[self._arrays.extent[:, 1] < 0] = 0  # on disk only
        likelihoods = self._likelihoods() if self._order == "priority" else None
        values, event = (None, None) if likelihoods is None else likelihoods
        self._requested, self._asked_at = self._batches, self._present()
        self._ranker.request(
            Contents(
                self._order,
                self._block_steps,
                totals,
                self._generations.copy(),
                self._arrays.sequence.copy(),
                self._arrays.extent,
                self._arrays.block_ids,
                self._slots.copy(),
                self._numbers.copy(),
                self._anchor,
                self._reach,
                values,
                event,
            )
        )

    def _present(self) -> tuple[int, int]:
        """Changes with what is in memory: the position in the ring of changes, and how many trajectories are not."""
        return self._position, self._table.num_spilled

    # ---------------------------------------------------------------- looking up

    def look_up(self, slots: Array, anchors: Array, extent: Array, ids: Array, reach: Reach) -> None:
        """Replace ids of blocks that lie in the cache by those of their copies.

        Args:
            slots, anchors: int64 [n], rows drawn by the host.
            extent: int64 [n, 3], ids: int32 [n, K], as `resolve` has filled them.
            reach: of the windows.
        """
        totals = extent[:, 0] + extent[:, 2]
        same = totals == self._totals[slots]
        low, high = (
            np.clip(anchors + step, 0, totals - 1) // self._block_steps for step in (reach.first, reach.last)
        )
        columns = np.arange(ids.shape[1])
        inside = columns <= (high - low)[:, None]
        if reach.once:
            inside[:, -1] = False
        looked = (inside | (reach.once & (columns == ids.shape[1] - 1))) & same[:, None]
        ids[looked] = self._where[ids[looked]]
        read = int(inside.sum())
        found = int(np.count_nonzero(inside & same[:, None] & (ids < 0)))
        self._hits += found
        self._misses += read - found

    def map(self) -> Any:
        """The `CacheMap` for rows that the device draws, on the current stream; inside `using`."""
        from gear_loader.kernels.items import CacheMap

        if self._map is None:
            self._map = CacheMap(
                *upload(self._device, self._where.copy(), self._totals.copy(), np.zeros(2, dtype=np.int64))
            )
            self._is_whole = True
            self._streams.clear()
        return self._map

    # ---------------------------------------------------------------- numbers

    def counts(self) -> dict[str, int]:
        """Numbers of the cache. Waits for the GPU, if that draws.

        Returns:
            "hits" and "misses": blocks of drawn rows' windows that were read from it, and over the bus; "bytes": of the
            blocks that it holds; "budget": of all its places.
        """
        with self._mutex:
            hits, misses = self._hits, self._misses
            if self._map is not None:
                if self._cuda:
                    self._last.synchronize()
                drawn = self._map.counts.cpu().tolist()
                hits, misses = hits + drawn[0], misses + drawn[1]
            held = self.num_places - len(self._free)
        return {
            "hits": hits,
            "misses": misses,
            "bytes": held * self.block_bytes,
            "budget": self.num_places * self.block_bytes,
        }

    def check_valid(self) -> None:
        """Raise AssertionError unless the maps agree with each other."""
        held = np.flatnonzero(self._blocks >= 0)
        assert sorted([*self._free, *held.tolist()]) == list(range(self.num_places)), "places are lost"
        assert (self._where[self._blocks[held]] == ~held).all(), "a block does not know its place"
        assert np.count_nonzero(self._where < 0) == len(held), "a place does not know its block"
        used = {place: slot for slot, places in self._used.items() for place in places}
        assert used == dict(zip(held.tolist(), self._slots[held].tolist(), strict=True)), "owners differ"
        others = self._where[self._where >= 0]
        assert (others == np.flatnonzero(self._where >= 0)).all(), "a block without a copy is another one"
