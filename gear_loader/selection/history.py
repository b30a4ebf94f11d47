"""The last batches of a selection: saved with its state, and repeated after a restart."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.selection.selectors import SAMPLE_EPOCH, Draw
from gear_loader.utils.arrays import Array

__all__ = ["BatchHistory", "BatchRows", "batches_of"]

BatchKey = tuple[int, int]
"""Epoch and step of a batch."""


@dataclasses.dataclass(frozen=True, slots=True)
class BatchRows:
    """The rows of a batch by names that outlive a restart.

    Attributes:
        names: int64 [n], sequence numbers of the trajectories, or over shards their ids.
        steps: int64 [n].
        weights: float32 [n], importance weights; None for batches without them.
    """

    names: Array
    steps: Array
    weights: Array | None

    def to_state(self, batch: BatchKey, kind: str) -> dict[str, Any]:
        """The rows as a part of a state; `kind`: key of the names."""
        return {
            "epoch": batch[0],
            "step": batch[1],
            kind: torch.from_numpy(self.names.copy()),
            "steps": torch.from_numpy(self.steps.copy()),
            "weights": None if self.weights is None else torch.from_numpy(self.weights.copy()),
        }


def batches_of(recent: Iterable[Mapping[str, Any]], kind: str, *, weighs: bool) -> dict[BatchKey, BatchRows]:
    """The batches of a state, as `BatchRows.to_state` made them.

    Raises:
        KeyError, TypeError, ValueError: they are invalid.
    """
    found = {}
    for part in recent:
        names, steps, weights = (
            None if part[k] is None else np.asarray(part[k]) for k in (kind, "steps", "weights")
        )
        if names is None or steps is None or (weights is not None) != weighs:
            raise ValueError
        fits = names.dtype == steps.dtype == np.int64 and names.ndim == 1 and names.shape == steps.shape
        fits &= bool((steps >= 0).all())
        if weights is not None:
            fits &= (
                weights.dtype == np.float32 and weights.shape == steps.shape and bool((weights >= 0).all())
            )
        if not fits:
            raise ValueError
        found[int(part["epoch"]), int(part["step"])] = BatchRows(names, steps, weights)
    return found


class BatchHistory:
    """Remembers the last drawn batches, and those of a loaded state, which are to be repeated.

    Args:
        length: number of drawn batches to remember.
    """

    def __init__(self, length: int) -> None:
        # What a batch is remembered by is turned into rows when they are needed.
        self._drawn: collections.deque[tuple[BatchKey, Any]] = collections.deque(maxlen=length)
        self.pending: dict[BatchKey, BatchRows] = {}

    def remember(self, draw: Draw, rows: Any) -> None:
        """Remember the rows of a batch, unless no state resumes before it."""
        if draw.epoch < SAMPLE_EPOCH:
            self._drawn.append(((draw.epoch, draw.step), rows))

    def replaced(self) -> Any:
        """Forget the rows that the next batch would replace, and return them; None if there is room."""
        return self._drawn.popleft()[1] if self._drawn and len(self._drawn) == self._drawn.maxlen else None

    def forget_before(self, epoch: int, step: int) -> None:
        """Forget the batches before this one."""
        while self._drawn and self._drawn[0][0] < (epoch, step):
            self._drawn.popleft()

    def restore(self, batches: Mapping[BatchKey, BatchRows]) -> None:
        """Forget the drawn batches; repeat these."""
        self._drawn.clear()
        self.pending = dict(batches)

    def take_pending(self, draw: Draw) -> BatchRows | None:
        """Remove and return the rows of a batch that is to be repeated, or None."""
        return self.pending.pop((draw.epoch, draw.step), None) if self.pending else None

    def drawn(self) -> list[tuple[BatchKey, Any]]:
        """The drawn batches, the oldest first."""
        return list(self._drawn)

    def state(self, kind: str, rows_of: Callable[[Any], BatchRows | None]) -> list[dict[str, Any]]:
        """The drawn batches, and those that are still to be repeated.

        Args:
            kind: key of the names. rows_of: rows of what a batch is remembered by; None to leave it out.
        """
        found = {batch: rows_of(rows) for batch, rows in self.drawn()}
        for batch, rows in list(self.pending.items()):
            found.setdefault(batch, rows)
        return [rows.to_state(batch, kind) for batch, rows in found.items() if rows is not None]
