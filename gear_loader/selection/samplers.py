"""Samplers: how the trajectories, or steps of trajectories, of a batch are chosen."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import numpy as np

from gear_loader.errors import PriorityError, SchemaError
from gear_loader.selection.random import integers, permutation
from gear_loader.storage.snapshot import Snapshot
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import finite, flag, one_of

_LARGEST = float(np.finfo(np.float32).max)
_LARGEST_ALPHA = 16.0
_ITEMS, _ANCHORS, REPLACED = range(3)  # streams of random numbers
SAMPLE_EPOCH = 1 << 62
"""First epoch number of `ReplayDataset.sample`, beyond those of iteration."""
Unit = Literal["trajectory", "step"]


@dataclasses.dataclass(slots=True)
class Draw:
    """Identifies a draw. The draw and the items to draw from determine the batch.

    Attributes:
        seed, epoch, step: counters of the random numbers; `step` is the batch's number over all ranks.
        first, count: numbers of the batch's items in a pass: `first` to `first + count - 1`.
        turn: number of the pass within the epoch.
        number: argument of schedules: batches that this rank's dataset has drawn before by iteration (over all epochs),
            or by `sample`.
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


class Sampler:
    """Base of the samplers. The `repr` names all options, because saved states are compared by it.

    Attributes:
        unit: kind of an item: a trajectory, or a step, which is then the anchor of its window.
        replacement: whether an item may be drawn again.
        passes: whether an epoch is a pass over all items present at its start.
        weighs: whether batches carry `priority_weight`.
        by_priority: whether items are drawn by their priorities, from a sum tree; else from a snapshot.
        repeats: whether every batch has the same items, as long as the table does not change.
        merged: whether a batch over shards is merged from the first candidates of each; else each of its rows is
            assigned to a shard.
        exponent: alpha and eps of the leaves ``(priority + eps) ** alpha``, as float32.
        least_of_table: whether weights need the smallest leaf of the table.
        freshness: factor of a leaf for each version that its policy is behind.
        keeps: which trajectories of a table with a disk tier are drawn most; see ``Disk(keep="auto")``.
    """

    unit: Unit
    replacement: bool
    passes: bool
    weighs = False
    by_priority = False
    repeats = False
    merged = False
    exponent: tuple[float, float] = (1.0, 0.0)
    least_of_table = False
    freshness = 1.0
    keeps: Literal["newest", "oldest", "priority"] = "newest"

    def __init__(self, *, replacement: Any, unit: Any, passes: bool) -> None:
        self.replacement = flag("replacement", replacement)
        one_of("unit", unit, ("trajectory", "step"))
        self.unit = unit
        self.passes = passes

    def __repr__(self) -> str:
        return f"{type(self).__name__}(replacement={self.replacement}, unit={self.unit!r})"

    def num_items(self, snapshot: Snapshot) -> int:
        """Number of items in a snapshot: trajectories, or steps of all trajectories."""
        return len(snapshot) if self.unit == "trajectory" else snapshot.num_steps

    def merge_order(self, shards: Array, records: Array) -> Array:
        """Order of the candidates of all shards, int64 [n], if they are merged.

        Args:
            shards: int64 [n], of each candidate. records: their row records [n].
        """
        raise NotImplementedError


class SnapshotSampler(Sampler):
    """Base of the samplers that draw from a snapshot: they choose numbers of items, and know no table.

    Attributes:
        ordered: whether items are drawn in the order of insertion. newest: whether from its end.
    """

    ordered = False
    newest = False

    def __init__(self, replacement: bool = True, unit: Unit = "trajectory") -> None:
        super().__init__(replacement=replacement, unit=unit, passes=replacement is False)

    def items(self, size: int, draw: Draw) -> Array:
        """Numbers of the drawn items, int64 [count], each from 0 to size - 1."""
        raise NotImplementedError


class Uniform(SnapshotSampler):
    """Every item is equally likely.

    Args:
        replacement: draw with replacement. Otherwise an epoch is one pass in random order over the items present at
            its start; random items replace those evicted before their turn.
        unit: ``"trajectory"``: an item is a trajectory, and the dataset's `anchor` chooses its step. ``"step"``: an
            item is a step, the anchor of its window; a long trajectory is then drawn more often.

    Raises:
        SchemaError: invalid option.
    """

    def items(self, size: int, draw: Draw) -> Array:
        if self.replacement:
            return draw.integers(_ITEMS, size)
        places = np.arange(draw.first, draw.first + draw.count)
        return permutation(size, draw.seed, draw.epoch, draw.turn)[places]


class Fifo(SnapshotSampler):
    """Oldest first, in order of insertion.

    Args:
        replacement: every batch holds the oldest items, repeated from the start if there are too few. Otherwise an
            epoch is one pass over all items in this order.
        unit: as for `Uniform`.

    Raises:
        SchemaError: invalid option.
    """

    ordered = True
    keeps: Literal["newest", "oldest", "priority"] = "oldest"

    def __init__(self, replacement: bool = True, unit: Unit = "trajectory") -> None:
        super().__init__(replacement, unit)
        self.repeats = self.merged = self.replacement

    def merge_order(self, shards: Array, records: Array) -> Array:
        """See `Sampler.merge_order`: by age."""
        order: Array = np.lexsort((records["step"], records["id"]))
        return order[::-1] if self.newest else order

    def items(self, size: int, draw: Draw) -> Array:
        items = np.arange(draw.first, draw.first + draw.count) % size
        return size - 1 - items if self.newest else items


class Lifo(Fifo):
    """Newest first; with ``unit="step"`` also the last step of a trajectory first. Options as for `Fifo`."""

    newest = True
    keeps = "newest"


@dataclasses.dataclass(frozen=True)
class LinearSchedule:
    """Linear schedule from `start` to `end` over `batches` batches, constant afterwards.

    ``LinearSchedule(0.4, 1.0, batches=100_000)`` as `beta` of `Prioritized` is Schaul et al.'s.

    Raises:
        SchemaError: a number that is not finite, or `batches` below 1.
    """

    start: float
    end: float
    batches: int

    def __post_init__(self) -> None:
        if not (finite(self.start) and finite(self.end) and finite(self.batches) and self.batches >= 1):
            given = ", ".join(shown(value) for value in (self.start, self.end, self.batches))
            raise SchemaError(
                f"LinearSchedule({given}) was received; expected a finite start and end, and at least 1 batch."
            )

    def __call__(self, number: int) -> float:
        """Value after `number` batches."""
        return self.start + (self.end - self.start) * min(number / self.batches, 1.0)


class PrioritySampler(Sampler):
    """Base of the samplers that draw from a priority tree, which they are given: they know no table."""

    keeps = "priority"
    by_priority = True
    keeps_extremes = True
    """Whether the nodes of the tree hold the smallest and largest leaves below."""

    def draw(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        """Draw `count` items from a priority tree: items, int64 [count], and their leaves, float32 [count].

        Raises:
            PriorityError: there are too few with a positive leaf.
        """
        raise NotImplementedError

    def candidates(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        """The first items that `draw` would draw, without repetition: at most `count`; see `Sampler.merged`."""
        raise NotImplementedError


class Prioritized(PrioritySampler):
    """Prioritized replay (Schaul et al., 2016): draws items in proportion to ``(priority + eps) ** alpha``.

    A batch carries ``priority_weight``, float32 [B]: the importance weights ``(N * P(i)) ** -beta``, divided by the
    largest one, where P(i) is the exact probability of drawing item i. `ReplayDataset.update_priority` sets priorities.
    A new item has the `priority` that it was added with, or else the running maximum of all priorities, at least 1.

    Powers are stored as float32, between 2 ** -126 and 2 ** 128. With an `alpha` of at most 1 every priority fits. With
    a larger one priorities between 2 ** (-126 / alpha) and 2 ** (128 / alpha) fit; smaller ones are clipped to 2 **
    -126, and `update_priority` refuses larger ones. A draw raises PriorityError if clipped powers have too much of the
    probability.

    Args:
        alpha: exponent of the priorities, 0 (uniform) to 16. With 16 priorities from 1/235 to 256 fit.
        beta: exponent of the weights; 1 corrects the whole bias. A number, or a function of the number of batches drawn
            so far, for example a `LinearSchedule`; iteration and `sample` count separately.
        eps: added to every priority. With 0 an item of priority 0 is never drawn. At most 3.4e38 (float32), and
            ``(1 + eps) ** alpha`` too, so that the initial priority 1 fits.
        replacement: whether an item may occur twice in a batch. Otherwise items are drawn one after another, each in
            proportion to the remaining powers; weights are computed as if with replacement.
        unit: as for `Uniform`; with ``"step"`` each step has its own priority.
        normalize: where the largest weight is taken from: the ``"batch"``, as in the paper authors' code, or the
            ``"table"``. With ``"table"`` a weight does not depend on the rest of the batch, but a single item of very
            small priority makes all weights, and so all gradients, small.
        freshness: factor of a trajectory's power for each version that its policy is behind `Table.policy_version`,
            above 0 and at most 1, of a table with `version`. Needs ``unit="trajectory"``; the host draws.

    Raises:
        SchemaError: invalid option.
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
        freshness: float = 1.0,
    ) -> None:
        super().__init__(replacement=replacement, unit=unit, passes=False)
        if not finite(freshness) or not 0 < freshness <= 1 or (freshness < 1 and unit == "step"):
            raise SchemaError(
                f"freshness is {shown(freshness)} and unit {unit!r}; expected a number above 0, and at most 1, and "
                "with one "
                "below 1 unit='trajectory'."
            )
        for name, value in (("alpha", alpha), ("eps", eps)):
            if not finite(value) or value < 0:
                raise SchemaError(f"{name} is {shown(value)}; expected a finite number of at least 0.")
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
        if not callable(beta) and (not finite(beta) or beta < 0):
            raise SchemaError(
                f"beta is {shown(beta)}; expected a number of at least 0, or a function of the number of batches drawn."
            )
        one_of("normalize", normalize, ("batch", "table"))
        self.alpha = float(alpha)
        self.freshness = float(freshness)
        self.beta = beta
        self.eps = float(eps)
        self.normalize: Literal["batch", "table"] = normalize
        self.merged = not self.replacement
        self.least_of_table = self.keeps_extremes = normalize == "table"
        self.exponent = float(np.float32(alpha)), float(np.float32(eps))

    def draw(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        drawn: tuple[Array, Array] = tree.draw(count, key=key, step=step, distinct=not self.replacement)
        return drawn

    def candidates(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        drawn: tuple[Array, Array] = tree.draw_some(count, key=key, step=step)
        return drawn

    def merge_order(self, shards: Array, records: Array) -> Array:
        """See `Sampler.merge_order`: by simulated time of the draw."""
        order: Array = np.lexsort((shards, records["time"]))
        return order

    def beta_at(self, number: int) -> float:
        """`beta` after `number` batches.

        Raises:
            SchemaError: the schedule returned an invalid value.
        """
        beta = self.beta
        if type(beta) is float and 0.0 <= beta < math.inf:
            return beta
        beta = beta(number) if callable(beta) else beta
        if not finite(beta) or beta < 0:
            raise SchemaError(
                f"The schedule {self.beta!r} gave {shown(beta)} for batch {number}; expected a finite number of at "
                "least 0."
            )
        return float(beta)

    def __repr__(self) -> str:
        beta: Any = self.beta
        if callable(beta) and not isinstance(beta, LinearSchedule):  # without its address
            beta = getattr(beta, "__qualname__", type(beta).__qualname__)
        fresh = "" if self.freshness == 1 else f", freshness={self.freshness}"
        return (
            f"Prioritized(alpha={self.alpha}, beta={beta}, eps={self.eps}, replacement={self.replacement}, "
            f"unit={self.unit!r}, normalize={self.normalize!r}{fresh})"
        )


class TopK(PrioritySampler):
    """Draws the items with the currently largest priorities.

    Ties are broken by storage order; items of priority 0 are skipped. If there are fewer items than the batch has
    rows, they repeat from the start.

    Args:
        largest: False for the smallest priorities.
        unit: as for `Uniform`.

    Raises:
        SchemaError: invalid option.
    """

    repeats = True
    merged = True

    def __init__(self, largest: bool = True, *, unit: Unit = "trajectory") -> None:
        super().__init__(replacement=True, unit=unit, passes=False)
        self.largest = flag("largest", largest)

    def draw(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        items, leaves = self.candidates(tree, count, key=key, step=step)
        if len(items) == 0:
            raise PriorityError(
                "Every priority is zero: there is nothing to draw. Set some with update_priority, or add trajectories "
                "with a positive priority."
            )
        again = np.arange(count) % len(items)
        return items[again], leaves[again]

    def candidates(self, tree: Any, count: int, *, key: int, step: int) -> tuple[Array, Array]:
        items, leaves = tree.top(min(count, tree.capacity), largest=self.largest)
        return items[items >= 0], leaves[items >= 0]

    def merge_order(self, shards: Array, records: Array) -> Array:
        """See `Sampler.merge_order`: by priority."""
        leaves = records["leaf"]
        order: Array = np.lexsort((shards, -leaves if self.largest else leaves))
        return order

    def __repr__(self) -> str:
        return f"TopK(largest={self.largest}, unit={self.unit!r})"


# ---------------------------------------------------------------- from a snapshot


def anchors(
    kind: Literal["uniform", "first", "last"], lengths: Array, draw: Draw, stream: int = _ANCHORS
) -> Array:
    """Anchor steps, int64 [n], of trajectories of these lengths, int64 [n]; for ``"uniform"`` n is `draw.count`."""
    if kind == "first":
        return np.zeros(len(lengths), dtype=np.int64)
    if kind == "last":
        return lengths - 1
    return draw.integers(stream, lengths)
