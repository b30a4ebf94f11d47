"""The last batches of a selection: saved with its state, and repeated after a restart."""

from __future__ import annotations

import collections
from collections.abc import Mapping

from gear_loader.distributed.state import BatchRecord
from gear_loader.selection.selectors import Draw
from gear_loader.utils.arrays import Array

__all__ = ["BatchHistory"]


class BatchHistory:
    """Remembers the last batches that were drawn, and the restored batches that are to be drawn again.

    Args:
        length: number of drawn batches to remember.
    """

    def __init__(self, length: int) -> None:
        self._drawn: collections.deque[tuple[tuple[int, int], BatchRecord]] = collections.deque(maxlen=length)
        self._restored: dict[tuple[int, int], BatchRecord] = {}

    def remember(self, draw: Draw, records: Array, weights: Array | None) -> None:
        """Remember this rank's rows of a batch.

        Args:
            draw: draw of the batch.
            records: row records.
            weights: importance weights, float32; None if batches carry none.
        """
        batch = BatchRecord(draw.count, records[["id", "step"]], weights)
        self._drawn.append(((draw.epoch, draw.step), batch))

    def forget_before(self, epoch: int, step: int) -> None:
        """Forget the batches before this one."""
        while self._drawn and self._drawn[0][0] < (epoch, step):
            self._drawn.popleft()

    def restore(self, batches: Mapping[tuple[int, int], BatchRecord]) -> None:
        """Forget the drawn batches; repeat these, by epoch and step."""
        self._drawn.clear()
        self._restored = dict(batches)

    def forget_restored(self) -> None:
        """Draw the restored batches by new random choices instead of repeating them."""
        self._restored.clear()

    def take_restored(self, draw: Draw) -> BatchRecord | None:
        """Remove and return the restored batch of a draw; None if it is not known with as many rows."""
        batch = self._restored.pop((draw.epoch, draw.step), None)
        if batch is None or batch.count != draw.count or len(batch.rows) != draw.count:
            return None
        return batch

    def drawn(self) -> list[tuple[int, int, BatchRecord]]:
        """Return epoch, step and rows of the drawn batches."""
        return [(*key, batch) for key, batch in self._drawn]

    def restored(self) -> list[tuple[int, int, BatchRecord]]:
        """Return epoch, step and rows of the restored batches."""
        return [(*key, batch) for key, batch in self._restored.items()]
