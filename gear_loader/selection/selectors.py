"""Selectors: which trajectories, or steps of trajectories, a batch is made of."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.selection.random import integers, permutation
from gear_loader.storage.reader import Snapshot
from gear_loader.utils.arrays import Array

__all__ = [
    "SAMPLE_EPOCH",
    "Draw",
    "Fifo",
    "Lifo",
    "LinearSchedule",
    "Prioritized",
    "Selector",
    "SnapshotSelector",
    "TopK",
    "Uniform",
    "anchors",
    "replacements",
]

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_ALPHA = 16.0
_ITEMS, _ANCHORS, _REPLACED = range(3)  # streams of random numbers
SAMPLE_EPOCH = 1 << 62
"""`ReplayDataset.sample` draws from this epoch and those that follow, far from those of iteration."""
Unit = Literal["trajectory", "step"]


@dataclasses.dataclass(slots=True)
class Draw:
    """Which draw this is; together with what there is to draw from it decides everything.

    Attributes:
        seed, epoch, step: the counters of the random numbers; `step` is the batch's number over all ranks.
        first, count: in a pass, the batch's items are number `first` to `first + count - 1`.
        turn: which pass over all items within the epoch.
        number: batches that this rank's dataset has drawn before in the same way, by iteration (over all epochs) or by
            `sample`: what schedules go by.
    """

    seed: int
    epoch: int
    step: int
    first: int
    count: int
    turn: int = 0
    number: int = 0

    def integers(self, stream: int, high: int | Array) -> Array:
        """int64 [count], each from 0 to high - 1."""
        return integers(high, self.count, seed=self.seed, stream=stream, epoch=self.epoch, step=self.step)


class Selector:
    """Base of the selectors. The `repr` names all options: a saved state is checked by it.

    Attributes:
        unit: what an item is: a trajectory, or a step of one, which then is the anchor of its window.
        replacement: whether an item may be drawn again.
        passes: whether an epoch is a pass over all items, those that were there when it began.
        weighs: whether batches carry `priority_weight`.
    """

    unit: Unit
    replacement: bool
    passes: bool
    weighs = False

    def __init__(self, *, replacement: Any, unit: Any, passes: bool) -> None:
        if not isinstance(replacement, bool):
            raise SchemaError(f"replacement is {replacement!r}; expected True or False.")
        if unit not in ("trajectory", "step"):
            raise SchemaError(f"unit is {unit!r}; expected 'trajectory' or 'step'.")
        self.replacement = replacement
        self.unit = unit
        self.passes = passes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(replacement={self.replacement}, unit={self.unit!r})"

    def num_items(self, snapshot: Snapshot) -> int:
        """Items that there are: trajectories, or steps of all trajectories."""
        return len(snapshot) if self.unit == "trajectory" else snapshot.num_steps


class SnapshotSelector(Selector):
    """Base of the selectors that need to know nothing but which trajectories there are."""

    def __init__(self, replacement: bool = True, unit: Unit = "trajectory") -> None:
        super().__init__(replacement=replacement, unit=unit, passes=not replacement)

    def select(self, snapshot: Snapshot, draw: Draw) -> tuple[Array, Array | None]:
        """Positions in the snapshot, int64 [count], and the steps chosen within them if the unit is a step."""
        items = self.items(self.num_items(snapshot), draw)
        return (items, None) if self.unit == "trajectory" else snapshot.locate(items)

    def items(self, size: int, draw: Draw) -> Array:
        """The numbers, out of 0 to size - 1, of the items that a draw takes, int64 [count]."""
        raise NotImplementedError


class Uniform(SnapshotSelector):
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

    def items(self, size: int, draw: Draw) -> Array:
        """See `SnapshotSelector.items`."""
        if self.replacement:
            return draw.integers(_ITEMS, size)
        places = np.arange(draw.first, draw.first + draw.count)
        return permutation(size, draw.seed, draw.epoch, draw.turn)[places]


class Fifo(SnapshotSelector):
    """The oldest first, in order of addition.

    Args:
        replacement: every batch holds the oldest items there are (from the start again if they are fewer than the
            batch). Without, an epoch passes over all items once in this order.
        unit: as for `Uniform`.

    Raises:
        SchemaError: another value.
    """

    newest = False

    def items(self, size: int, draw: Draw) -> Array:
        """See `SnapshotSelector.items`."""
        items = np.arange(draw.first, draw.first + draw.count) % size
        return size - 1 - items if self.newest else items


class Lifo(Fifo):
    """The newest first; with ``unit="step"`` also the last step of a trajectory first. Options as for `Fifo`."""

    newest = True


@dataclasses.dataclass(frozen=True)
class LinearSchedule:
    """A number that goes from `start` to `end` in `batches` batches and stays there.

    ``LinearSchedule(0.4, 1.0, batches=100_000)`` as `beta` of `Prioritized` is Schaul et al.'s.

    Raises:
        SchemaError: numbers that are not finite, or `batches` below 1.
    """

    start: float
    end: float
    batches: int

    def __post_init__(self) -> None:
        if not (_finite(self.start) and _finite(self.end) and _finite(self.batches) and self.batches >= 1):
            raise SchemaError(f"{self} is no schedule; expected finite numbers and at least 1 batch.")

    def __call__(self, number: int) -> float:
        """Its value after `number` batches."""
        return self.start + (self.end - self.start) * min(number / self.batches, 1.0)


class Prioritized(Selector):
    """Items in proportion to ``(priority + eps) ** alpha``: prioritized replay (Schaul et al., 2016).

    A batch carries ``priority_weight``, float32 [B]: the importance weights ``(N * P(i)) ** -beta``, where P(i) is the
    exact probability with which the item was drawn, divided by the largest such weight. New priorities come from
    `ReplayDataset.update_priority`.

    Weights are float32: what is raised to `alpha` counts between 2 ** -126 and 2 ** 128. With an `alpha` of at most 1
    that holds every priority. With a larger one it holds those between 2 ** (-126 / alpha) and 2 ** (128 / alpha), and
    smaller ones count as the smallest weight. `update_priority` refuses larger ones. A draw in which weights that do
    not fit would decide raises PriorityError, instead of being uniform.

    Args:
        alpha: how much priorities count: 0 is uniform. At most 16, for which priorities from 1/235 to 256 still have
            different weights.
        beta: how much of the bias the weights take back: 1 is all of it. A number, or a function of the number of
            batches drawn so far (iteration and `sample` count for themselves), for example a `LinearSchedule`.
        eps: added to every priority. With 0 an item of priority zero is never drawn; a small number keeps items whose
            error happens to be zero. At most 3.4e38, as float32 has it, and so small that a priority of 1, with which
            items begin, has a weight: ``(1 + eps) ** alpha`` is at most 3.4e38.
        replacement: whether an item may come twice in a batch. Without, a batch's items are drawn one after another,
            each in proportion to the priorities of those that are left; their weights are as if with replacement.
        unit: as for `Uniform`; with ``"step"`` each step of each trajectory has a priority of its own.
        normalize: what the largest weight is looked for in: the ``"batch"``, as the paper's authors do in their own
            code; or the whole ``"table"``: then an item's weight does not depend on what else is in the batch, but a
            single item of very small priority makes all weights, and so all gradients, small.

    What a new item begins with is the `priority` that it was added with; without one, the running maximum of all
    priorities given so far, at least 1.

    Raises:
        SchemaError: another value.
    """

    weighs = True

    def __init__(
        self,
        alpha: float = 0.6,
        beta: float | Callable[[int], float] = 0.4,
        *,
        eps: float = 0.0,
        replacement: bool = True,
        unit: Unit = "trajectory",
        normalize: Literal["batch", "table"] = "batch",
    ) -> None:
        super().__init__(replacement=replacement, unit=unit, passes=False)
        for name, value in (("alpha", alpha), ("eps", eps)):
            if not _finite(value) or value < 0:
                raise SchemaError(f"{name} is {value!r}; expected a finite number of at least 0.")
        if alpha > _LARGEST_ALPHA:
            raise SchemaError(
                f"alpha is {alpha!r}; expected at most {_LARGEST_ALPHA:g}: with a larger one only priorities close to "
                "1 have weights that float32 holds, and all others would count the same."
            )
        if eps > _LARGEST or float(alpha) * math.log2(1 + float(eps)) >= 128:
            raise SchemaError(
                f"eps is {eps!r} and alpha {alpha!r}; expected an eps of at most {_LARGEST:.2g}, and (1 + eps) ** "
                "alpha of at most that, which is the largest weight that float32 holds. Use a smaller eps."
            )
        if not callable(beta) and (not _finite(beta) or beta < 0):
            raise SchemaError(
                f"beta is {beta!r}; expected a number of at least 0, or a function of the number of batches drawn."
            )
        if normalize not in ("batch", "table"):
            raise SchemaError(f"normalize is {normalize!r}; expected 'batch' or 'table'.")
        self.alpha = float(alpha)
        self.beta = beta
        self.eps = float(eps)
        self.normalize: Literal["batch", "table"] = normalize

    def beta_at(self, number: int) -> float:
        """`beta` after `number` batches.

        Raises:
            SchemaError: the schedule returned no number of at least 0.
        """
        beta = self.beta(number) if callable(self.beta) else self.beta
        if not _finite(beta) or beta < 0:
            raise SchemaError(
                f"The schedule {self.beta!r} gave {beta!r} for batch {number}; expected a finite number of at least 0."
            )
        return float(beta)

    def __repr__(self) -> str:
        beta: Any = self.beta
        if callable(beta) and not isinstance(beta, LinearSchedule):  # nothing that differs between processes
            beta = getattr(beta, "__qualname__", type(beta).__qualname__)
        return (
            f"Prioritized(alpha={self.alpha}, beta={beta}, eps={self.eps}, replacement={self.replacement}, "
            f"unit={self.unit!r}, normalize={self.normalize!r})"
        )


class TopK(Selector):
    """The items with the largest priorities, in every batch those that are largest then.

    Equal priorities come in the order in which they are stored; items of priority zero are left out. If there are
    fewer items than the batch has rows, they come again from the start.

    Args:
        largest: False for the smallest.
        unit: as for `Uniform`.

    Raises:
        SchemaError: another value.
    """

    def __init__(self, largest: bool = True, *, unit: Unit = "trajectory") -> None:
        super().__init__(replacement=True, unit=unit, passes=False)
        if not isinstance(largest, bool):
            raise SchemaError(f"largest is {largest!r}; expected True or False.")
        self.largest = largest

    def __repr__(self) -> str:
        return f"TopK(largest={self.largest}, unit={self.unit!r})"


def _finite(value: Any) -> bool:
    number = isinstance(value, (int, float, np.integer, np.floating)) and not isinstance(value, bool)
    try:
        return number and math.isfinite(value)
    except OverflowError:  # an integer beyond what a float holds
        return False


# ---------------------------------------------------------------- from a snapshot


def anchors(
    kind: Literal["uniform", "first", "last"], lengths: Array, draw: Draw, stream: int | None = None
) -> Array:
    """The anchor step of each chosen trajectory, int64 [n], for lengths int64 [n]; ``"uniform"`` for all of a draw."""
    if kind == "first":
        return np.zeros(len(lengths), dtype=np.int64)
    if kind == "last":
        return lengths - 1
    return draw.integers(_ANCHORS if stream is None else stream, lengths)


def replacements(unit: Unit, snapshot: Snapshot, draw: Draw) -> tuple[Array, Array | None]:
    """Random items, as `select` returns them, for those that are no longer there."""
    if unit == "trajectory":
        return draw.integers(_REPLACED, len(snapshot)), None
    return snapshot.locate(draw.integers(_REPLACED, snapshot.num_steps))
