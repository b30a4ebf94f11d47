"""Selectors choose trajectories (or steps of trajectories) for a batch."""

from __future__ import annotations

import dataclasses
from typing import Literal, Protocol

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.index import Snapshot
from gear_loader.random import integers, permutation
from gear_loader.slots import Array

__all__ = ["Draw", "Selector", "Uniform"]

_ITEMS, _ANCHORS, _REPLACED = range(3)  # streams of random numbers


@dataclasses.dataclass(frozen=True)
class Draw:
    """Which draw this is; together with the snapshot it decides everything.

    Attributes:
        seed, epoch, step: the counters of the random numbers; `step` is the batch's number over all ranks.
        first, count: without replacement, the batch's items are number `first` to `first + count - 1` of the pass.
        turn: without replacement, which pass over all items within the epoch.
    """

    seed: int
    epoch: int
    step: int
    first: int
    count: int
    turn: int = 0

    def integers(self, stream: int, high: int | Array) -> Array:
        """int64 [count], each from 0 to high - 1."""
        return integers(high, self.count, seed=self.seed, stream=stream, epoch=self.epoch, step=self.step)


class Selector(Protocol):
    """What `ReplayDataset` asks of a selector. Its `repr` names its options: a saved state is checked by it."""

    replacement: bool
    unit: Literal["trajectory", "step"]

    def num_items(self, snapshot: Snapshot) -> int:
        """Items to choose from."""

    def select(self, snapshot: Snapshot, draw: Draw) -> tuple[Array, Array | None]:
        """Positions in the snapshot, int64 [count], and the steps chosen within them if the unit is a step."""


class Uniform:
    """Every item is equally likely.

    Args:
        replacement: draw with replacement. Without, an epoch passes over all items once in random order, those that
            were there when it began; items that are evicted before their turn are replaced by random ones.
        unit: ``"trajectory"``: an item is a trajectory, and the dataset's `anchor` says which of its steps;
            ``"step"``: an item is a step of a trajectory (a long trajectory comes up more often), which is the
            anchor of its window.

    Raises:
        SchemaError: another value.
    """

    def __init__(self, replacement: bool = True, unit: Literal["trajectory", "step"] = "trajectory") -> None:
        if not isinstance(replacement, bool):
            raise SchemaError(f"replacement is {replacement!r}; expected True or False.")
        if unit not in ("trajectory", "step"):
            raise SchemaError(f"unit is {unit!r}; expected 'trajectory' or 'step'.")
        self.replacement = replacement
        self.unit: Literal["trajectory", "step"] = unit

    def __repr__(self) -> str:
        return f"Uniform(replacement={self.replacement}, unit={self.unit!r})"

    def num_items(self, snapshot: Snapshot) -> int:
        """Trajectories, or steps of all trajectories."""
        return len(snapshot) if self.unit == "trajectory" else snapshot.num_steps

    def select(self, snapshot: Snapshot, draw: Draw) -> tuple[Array, Array | None]:
        """See `Selector`."""
        size = self.num_items(snapshot)
        if self.replacement:
            items = draw.integers(_ITEMS, size)
        else:
            order = permutation(size, draw.seed, draw.epoch, draw.turn)
            items = order[np.arange(draw.first, draw.first + draw.count)]
        return (items, None) if self.unit == "trajectory" else _steps(snapshot, items)


def _steps(snapshot: Snapshot, items: Array) -> tuple[Array, Array]:
    # Step number i of the whole snapshot -> position of its trajectory, step within it.
    positions = np.searchsorted(snapshot.ends, items, side="right")
    return positions, items - (snapshot.ends[positions] - snapshot.lengths[positions])


def anchors(kind: Literal["uniform", "first", "last"], lengths: Array, draw: Draw) -> Array:
    """The anchor step of each chosen trajectory, int64 [count], for lengths int64 [count]."""
    if kind == "first":
        return np.zeros(draw.count, dtype=np.int64)
    if kind == "last":
        return lengths - 1
    return draw.integers(_ANCHORS, lengths)


def replacements(
    unit: Literal["trajectory", "step"], snapshot: Snapshot, draw: Draw
) -> tuple[Array, Array | None]:
    """Random items, as `Selector.select` returns them, for those that are no longer there."""
    if unit == "trajectory":
        return draw.integers(_REPLACED, len(snapshot)), None
    return _steps(snapshot, draw.integers(_REPLACED, snapshot.num_steps))
