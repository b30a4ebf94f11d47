"""Which blocks of a table lie in a GPU's memory: the likeliest to be read, chosen in a thread."""

from __future__ import annotations

import dataclasses
import queue
from typing import Any, Literal

import numpy as np

from gear_loader.errors import GpuError
from gear_loader.storage.exchange import exchange
from gear_loader.utils.arrays import Array
from gear_loader.utils.background import background_thread
from gear_loader.utils.captures import allow_captures

__all__ = ["CacheOrder", "Choice", "Contents", "Ranker", "choose", "rank"]

CacheOrder = Literal["priority", "newest", "oldest", "any"]
"""What is hottest: what is drawn with the highest probability, the newest trajectories, or the oldest; or nothing is,
and what lies in the cache stays there."""


@dataclasses.dataclass(frozen=True)
class Contents:
    """A table and its cache at one moment; copies, so that a thread may read them.

    Attributes:
        order: what is hottest. block_steps: steps of a block.
        totals: int32 [T], steps of the slot's trajectory with its final step; 0 without one.
        generations, sequences: int64 [T], of the slots.
        extent, block_ids: views of the index, read while it may change: they decide of what is hot alone.
        slots, numbers: int32 [places], the slot of each copied block and the block's number in its trajectory; a slot
            of -1 for a free place.
        anchor: anchors of trajectories; None if items are steps. reach: first and last step read, relative to them.
        likelihoods: of slots or blocks, see `Selection.likelihoods`; None in another order.
        event: recorded after them, or None.
    """

    order: CacheOrder
    block_steps: int
    totals: Array
    generations: Array
    sequences: Array
    extent: Array
    block_ids: Array
    slots: Array
    numbers: Array
    anchor: str | None
    reach: tuple[int, int]
    likelihoods: Array | None = None
    event: Any = None


@dataclasses.dataclass(frozen=True)
class Choice:
    """Blocks to copy, the hottest first, and places that they may take beside free ones, the coldest first.

    Attributes:
        slots, generations, numbers: int64 [n]: trajectory of each block and the block's number in it.
        places, left: int64 [m]: places, and the slots of the blocks that were there. left_numbers: their numbers.
    """

    slots: Array
    generations: Array
    numbers: Array
    places: Array
    left: Array
    left_numbers: Array


def choose(order: Array, inside: Array, capacity: int, most: int, *, swaps: bool) -> tuple[Array, Array]:
    """Which items to bring into the cache, and which may leave it.

    Free places go to the hottest items; only without them do items change places, with the hysteresis of `exchange`.

    Args:
        order: int64 [n], positions, the coldest first. inside: bool [n], which are in the cache.
        capacity: places. most: number of items that come in. swaps: whether items in the cache make room.

    Returns:
        Positions to bring in, the hottest first, and to take out, the coldest first; int64 each.
    """
    hot = order[::-1][:capacity]
    free = capacity - int(inside.sum())
    fresh = hot[~inside[hot]][: min(free, most)]
    if len(fresh) or not swaps:
        return fresh, fresh[:0]
    return exchange(order, inside, np.ones(len(order), dtype=np.int64), capacity, most)


def rank(contents: Contents, most: int) -> Choice:
    """Choose blocks; `most`: number of them that come in."""
    size = contents.block_steps
    slots = np.flatnonzero(contents.totals > 0)
    totals = contents.totals[slots].astype(np.int64)
    blocks = -(-totals // size)
    first = np.cumsum(blocks) - blocks
    numbers = np.arange(int(blocks.sum())) - np.repeat(first, blocks)
    owners = np.repeat(np.arange(len(slots)), blocks)
    at = np.full(len(contents.totals), -1, dtype=np.int64)
    at[slots] = np.arange(len(slots))
    places = np.flatnonzero(contents.slots >= 0)
    row = at[contents.slots[places]]
    places, row = places[row >= 0], row[row >= 0]
    known = contents.numbers[places] < blocks[row]
    places, row = places[known], row[known]
    items = first[row] + contents.numbers[places]
    inside = np.zeros(len(numbers), dtype=bool)
    inside[items] = True
    place_of = np.zeros(len(numbers), dtype=np.int64)
    place_of[items] = places
    ages = contents.sequences[slots][owners]
    order = np.lexsort((numbers, ages, _heat(contents, slots, totals, blocks, owners, numbers)))
    # A block that two trajectories share may have two copies' worth of items, and one place.
    capacity = len(contents.slots)
    come, leave = choose(order, inside, capacity, most, swaps=contents.order != "any")
    return Choice(
        slots[owners[come]],
        contents.generations[slots[owners[come]]],
        numbers[come],
        place_of[leave],
        slots[owners[leave]],
        numbers[leave],
    )


def _heat(
    contents: Contents, slots: Array, totals: Array, blocks: Array, owners: Array, numbers: Array
) -> Array:
    """How likely each block is read, relative to the others, float64 [n]."""
    if contents.order == "oldest":
        ages: Array = -contents.sequences[slots][owners]
        return ages
    if contents.likelihoods is None:
        return np.zeros(len(owners))
    if contents.anchor is None:  # by block
        places = np.clip(contents.extent[slots, 1][owners] + numbers, 0, len(contents.block_ids) - 1)
        ids = np.clip(contents.block_ids[places], 0, len(contents.likelihoods) - 1)
        by_block: Array = contents.likelihoods[ids].astype(np.float64)
        return by_block
    likely = contents.likelihoods[slots].astype(np.float64)
    if contents.anchor == "uniform":
        spread: Array = (likely / blocks)[owners]
        return spread
    anchors = np.zeros_like(totals) if contents.anchor == "first" else totals - 1
    low, high = (
        np.clip(anchors + step, 0, totals - 1)[owners] // contents.block_steps for step in contents.reach
    )
    return np.where((low <= numbers) & (numbers <= high), likely[owners], 0.0)


class Ranker:
    """Chooses blocks in a thread, one request at a time.

    Args:
        most: blocks of a choice.
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._requests: queue.SimpleQueue[Contents | None] = queue.SimpleQueue()
        self._choices: queue.SimpleQueue[Choice | BaseException] = queue.SimpleQueue()
        self.busy = False
        """Whether a choice has been requested that `take` has not returned yet."""
        self._thread = background_thread(self._work, "gear-loader-cache", stop=self.stop)
        self._thread.start()

    def request(self, contents: Contents) -> None:
        """Request a choice; `busy` until `take` has returned it."""
        self.busy = True
        self._requests.put(contents)

    def take(self) -> Choice | None:
        """The choice that was requested, if it is ready.

        Raises:
            GpuError: the thread has failed.
        """
        if not self.busy or self._choices.empty():
            return None
        self.busy = False
        choice = self._choices.get()
        if isinstance(choice, BaseException):
            raise GpuError(f"What to keep in device_cache could not be chosen: {choice}") from choice
        return choice

    def stop(self) -> None:
        """End the thread."""
        self._requests.put(None)

    def _work(self) -> None:
        allow = True
        while (contents := self._requests.get()) is not None:
            try:
                if contents.event is not None:
                    if allow:
                        allow_captures()
                        allow = False
                    contents.event.synchronize()
                self._choices.put(rank(contents, self._most))
            except Exception as error:
                self._choices.put(error)
            del contents
