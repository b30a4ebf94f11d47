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

FEW, MANY = 4, 8
"""Batches that one call queues: the first two calls since a change, and those after them. A change makes at most
`FEW` - 1 or `MANY` - 1 gathers useless, of eight requests and more."""
STANDING = 8
"""Requests for which nothing must have changed before."""
MOST_BYTES = 1 << 24
"""Largest batch: `FEW` - 1 more of them lie in the GPU's memory."""
MANY_BYTES = 1 << 22
"""Largest batch of which `MANY` are queued; also the most bytes of a launch of several, which is over, for all of its
batches, when the last one is there."""
_END = object()
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


def _rest(items: Iterator[Any], seen: collections.deque[Any]) -> Iterator[Any]:
    """Those that were looked at, then the others."""
    while True:
        while seen:
            yield seen.popleft()
        item = next(items, _END)
        if item is _END:
            return
        yield item


def _bytes_of(buffers: Buffers) -> int:
    return sum(each.numel() * each.element_size() for each in tensors_of(buffers.batch))


class BatchesAhead:
    """The batches ahead of one iteration.

    Args:
        fills: draws and gathers them. items: of the iteration. free: unused buffers, of which these are taken.
        make: makes buffers. queue: calls ``fills.queue_several`` as the GPU needs it.
        stream: that fills them.

    Attributes:
        items: an iterator of the same items.
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
        self._items, self._seen = items, collections.deque[Any]()
        self.items = _rest(items, self._seen)
        self._fills, self._free, self._make, self._queue, self._stream = fills, free, make, queue, stream
        self._ready: collections.deque[tuple[Buffers, int]] = collections.deque()
        self._kept: dict[tuple[int, ...], QueuedSeveral] = {}
        self._known: object = None
        self._unchanged = 0
        self._calls = 0  # that have queued some, since a change
        self._made = 0  # more buffers
        self._size = 0  # bytes of a batch; 0 until it is known

    def next(self, item: Any) -> tuple[Buffers, int] | None:
        """Buffers and number of rows of the batch of an item, which `items` gave last; None if it is to be filled.

        Queues it, and those after it, if it is time to.
        """
        known = self._fills.standing()
        if known is None or known is not self._known:
            self.discard()
            self._known, self._unchanged, self._calls = known, 0, 0
            return None
        if not self._ready:
            self._unchanged += 1
            if self._unchanged <= STANDING or not self._queue_some(item):
                return None
        return self._ready.popleft()

    def _first(self, count: int) -> list[Any]:
        """The next items of `items`, at most `count`, which stay there."""
        self._seen.extend(itertools.islice(self._items, max(count - len(self._seen), 0)))
        return list(itertools.islice(self._seen, count))

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
        together = self._number()
        if len(free) < together or not together:
            if self._made < together - 1:
                self._made += 1
                free.append(self._make())  # is filled next
            return False
        items = [item, *self._first(together - 1)]
        members = free[:together]  # those used longest ago, so that the same ones meet again
        several = self._several(members) if len(items) == together else None
        if several is None:
            return False
        del free[:together]
        try:
            queued = self._queue(self._fills, members, items, several)
        except BaseException:
            free.extend(members)
            raise
        if not queued:
            free.extend(members)
            self._unchanged = 0
            return False
        self._calls += 1
        self._ready.extend((each, several.count) for each in members)
        return True

    def _number(self) -> int:
        """How many batches one call queues; 0 if none does, or their size is not known yet."""
        if not self._size and self._free:
            self._size = _bytes_of(self._free[0])
        if self._size > MOST_BYTES:
            self._unchanged = -sys.maxsize  # it does not become smaller
        if not 0 < self._size <= MOST_BYTES:
            return 0
        return MANY if self._calls >= 2 and self._size <= MANY_BYTES else FEW

    def _several(self, members: list[Buffers]) -> QueuedSeveral | None:
        """What one call queues in these buffers, the first unused ones; None if it cannot, or not yet."""
        batches = []
        for place, each in enumerate(members):
            batch = each.queued(self._stream)
            if not isinstance(batch, QueuedPadded) or isinstance(batch, QueuedDraw):
                self._free.append(self._free.pop(place))  # is filled next, after which it may be
                return None
            batches.append(batch)
        key = tuple(map(id, batches))
        found = self._kept.get(key)
        if found is None:
            if len(self._kept) == _MOST_KEPT:
                self._kept.clear()
            together = max(1, min(len(batches), MANY_BYTES // self._size))
            found = self._kept[key] = QueuedSeveral(batches, together=together)
        return found
