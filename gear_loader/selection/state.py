"""What a state holds of priorities and of the last batches, which are repeated after a restart."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw, Sampler
from gear_loader.selection.weights import LARGEST_LEAF
from gear_loader.utils.arrays import Array

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

    def take(self, which: Array) -> BatchRows:
        """Some of the rows, int64 [m]."""
        weights = None if self.weights is None else self.weights[which]
        return BatchRows(self.names[which], self.steps[which], weights)

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
        """Remove and return the rows of a batch that is to be repeated, or None; forget those of batches before it."""
        if not self.pending or draw.epoch >= SAMPLE_EPOCH:
            return None
        batch = draw.epoch, draw.step
        found = self.pending.get(batch)
        self.pending = {each: rows for each, rows in self.pending.items() if each > batch}
        return found

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


@dataclasses.dataclass(frozen=True)
class PriorityState:
    """The priorities of trajectories, in a state.

    Attributes:
        names, lengths: int64 [n], of the trajectories: sequence numbers, ascending; or over shards ids.
        leaves: float32, of all items, concatenated.
        maximum: largest priority so far. num_stale: stale rows that updates have skipped.
        recent: rows of the last batches.
        blocks: int32, numbers of their blocks of leaves, concatenated; None if they are the table's blocks.
        policy: version of the policy that the leaves are as of; None for the current one.
    """

    names: Array
    lengths: Array
    leaves: Array
    maximum: float
    num_stale: int
    recent: dict[BatchKey, BatchRows]
    blocks: Array | None = None
    policy: int | None = None


def parse_common(state: Mapping[str, Any], sampler: Sampler, kind: str) -> PriorityState:
    """Check what states of one table and of shards have in common; `kind`: key of the names.

    Raises:
        KeyError, TypeError, ValueError: it is invalid.
    """
    names, lengths, leaves = (np.asarray(state[name]) for name in (kind, "lengths", "leaves"))
    maximum, num_stale = float(state["maximum"]), int(state["num_stale"])
    fits = names.dtype == lengths.dtype == np.int64 and leaves.dtype == np.float32
    fits = fits and names.shape == lengths.shape and names.ndim == leaves.ndim == 1
    fits = fits and bool((lengths > 0).all()) and len(np.unique(names)) == len(names)
    fits = fits and len(leaves) == (lengths.sum() if sampler.unit == "step" else len(lengths))
    fits = fits and bool(np.isfinite(leaves).all() and (leaves >= 0).all())
    if not fits or not 0 <= maximum <= LARGEST_LEAF or num_stale < 0:
        raise ValueError
    recent = batches_of(state["recent"], kind, weighs=sampler.weighs)
    return PriorityState(names, lengths, leaves, maximum, num_stale, recent)


def parse_state(state: Mapping[str, Any], sampler: Sampler) -> PriorityState:
    """Check the state of a selection by priority from one table.

    Raises:
        SchemaError: it is invalid.
    """
    try:
        parsed = parse_common(state, sampler, "sequences")
        policy = int(state["policy"]) if "policy" in state else None
        fits = bool((np.diff(parsed.names) > 0).all()) and (policy or 0) >= 0
        blocks = np.asarray(state["blocks"]) if "blocks" in state else None
        if blocks is not None:
            taken = blocks[blocks >= 0]
            fits &= blocks.dtype == np.int32 and blocks.ndim == 1
            fits &= bool((blocks >= -1).all()) and len(np.unique(taken)) == len(taken)
    except (KeyError, TypeError, ValueError):
        fits = False
    if not fits:
        raise SchemaError(
            "The state's priorities are invalid; expected a state_dict() of a ReplayDataset with the same sampler. "
            "Nothing was changed."
        )
    return dataclasses.replace(parsed, blocks=blocks, policy=policy)
