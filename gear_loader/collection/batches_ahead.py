"""Batches that one compiled call queues on a GPU before they are asked for, while the table stands still.

A call of the driver costs the host as much as all else of a small batch, so several batches share them. Each is
delivered only if nothing has changed when its own turn comes; otherwise it is drawn again, so batches are those that
would be drawn one by one.
"""

from __future__ import annotations

import collections
import contextlib
import itertools
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Any, Protocol

import torch

from gear_loader.collection.buffers import Buffers
from gear_loader.collection.references import tensors_of
from gear_loader.errors import GearError
from gear_loader.storage.queued import QueuedDraw, QueuedPadded, QueuedSeveral
from gear_loader.utils.mutex import holds_any

TOGETHER = 4
"""Batches that one call queues."""
STANDING = 8
"""Requests for which nothing must have changed before. A change makes at most `TOGETHER` - 1 gathers useless."""
MOST_BYTES = 1 << 24
"""Largest batch: `TOGETHER` - 1 more of them lie in the GPU's memory."""
JOINED_BYTES = 1 << 20
"""Largest batch of those that are one launch, which is over, for all of them, when the last one is there."""
_MOST_KEPT = 16
"""Graphs of several batches that are kept."""


class Fills(Protocol):
    """What draws and gathers batches; see `Filler`."""

    def standing(self) -> object:
        """What a batch would be drawn from now: the same object as long as nothing has changed; None if unknown."""

    def queue_several(self, members: Sequence[Buffers], items: Sequence[Any], batches: QueuedSeveral) -> bool:
        """Draw a batch for each item, and queue them; False, having done nothing, if that cannot be."""
        raise NotImplementedError

    def uncount(self, batches: int, count: int) -> None:
        """Subtract batches of `count` rows, which nobody gets, from the table's sample count."""


class Items(Iterator[Any]):
    """An iterator whose next items can be looked at."""

    def __init__(self, items: Iterator[Any]) -> None:
        self._items, self._seen = items, collections.deque[Any]()

    def __next__(self) -> Any:
        return self._seen.popleft() if self._seen else next(self._items)

    def first(self, count: int) -> list[Any]:
        """The next items, at most `count`."""
        self._seen.extend(itertools.islice(self._items, max(count - len(self._seen), 0)))
        return list(itertools.islice(self._seen, count))


class BatchesAhead:
    """The batches ahead of one iteration.

    Args:
        fills: draws and gathers them. items: of the iteration. free: unused buffers, of which these are taken.
        make: makes buffers. queue: calls ``fills.queue_several`` as the GPU needs it.
        stream: that fills them.

    Attributes:
        items: gives the same items.
    """

    def __init__(
        self,
        fills: Fills,
        items: Iterator[Any],
        *,
        free: list[Buffers],
        make: Callable[[], Buffers],
        queue: Callable[[Fills, Sequence[Buffers], Sequence[Any], QueuedSeveral], bool],
        stream: torch.cuda.Stream,
    ) -> None:
        self.items = Items(items)
        self._fills, self._free, self._make, self._queue, self._stream = fills, free, make, queue, stream
        self._ready: collections.deque[tuple[Buffers, int]] = collections.deque()
        self._kept: dict[tuple[int, ...], QueuedSeveral] = {}
        self._known: object = None
        self._unchanged = 0
        self._spare = TOGETHER - 1  # buffers that may still be made

    def next(self, item: Any) -> tuple[Buffers, int] | None:
        """Buffers and number of rows of the batch of an item, which `items` gave last; None if it is to be filled.

        Queues it, and those after it, if it is time to.
        """
        known = self._fills.standing()
        if known is None or known is not self._known:
            self.discard()
            self._known, self._unchanged = known, 0
            return None
        if not self._ready:
            self._unchanged += 1
            if self._unchanged <= STANDING or not self._queue_some(item):
                return None
        return self._ready.popleft()

    def discard(self) -> None:
        """Give back the batches that nobody gets."""
        if self._ready:
            count, self._unchanged = self._ready[0][1], 0
            batches = 0
            while self._ready:
                self._free.append(self._ready.popleft()[0])
                batches += 1
            self._fills.uncount(batches, count)

    def close(self) -> None:
        """`discard` at the end, at any point, also in the garbage collector: then without the lock, if any is held."""
        if holds_any() or sys.is_finalizing():
            self._free.extend(each for each, _ in self._ready)
            self._ready.clear()
            return
        with contextlib.suppress(GearError):  # the table may be closed
            self.discard()

    def _queue_some(self, item: Any) -> bool:
        """Queue the batch of an item and those after it; False if that cannot be."""
        free = self._free
        if len(free) < TOGETHER:
            if self._spare:
                self._spare -= 1
                free.append(self._make())  # is filled next
            return False
        items = [item, *self.items.first(TOGETHER - 1)]
        members = free[:TOGETHER]  # those used longest ago, so that the same ones meet again
        several = self._several(members) if len(items) == TOGETHER else None
        if several is None:
            return False
        del free[:TOGETHER]
        try:
            queued = self._queue(self._fills, members, items, several)
        except BaseException:
            free.extend(members)
            raise
        if not queued:
            free.extend(members)
            self._unchanged = 0
            return False
        self._ready.extend((each, several.count) for each in members)
        return True

    def _several(self, members: list[Buffers]) -> QueuedSeveral | None:
        """What one call queues in these buffers, the first unused ones; None if it cannot, or not yet."""
        batches = []
        for place, each in enumerate(members):
            batch = each.queued(self._stream)
            if not isinstance(batch, QueuedPadded) or isinstance(batch, QueuedDraw):
                self._free.append(self._free.pop(place))  # is filled next, after which it may be
                return None
            batches.append(batch)
        size = sum(each.numel() * each.element_size() for each in tensors_of(members[0].batch))
        if size > MOST_BYTES:
            self._unchanged = -sys.maxsize  # it does not become smaller
            return None
        key = tuple(map(id, batches))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            found = self._kept[key] = QueuedSeveral(batches, joins=size <= JOINED_BYTES)
        return found
