"""Batches of at most so many steps, made of trajectories in the order in which they are drawn."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection
from gear_loader.selection.samplers import Sampler
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least, one_of

TooLong = Literal["error", "truncate", "skip"]
DrawnPart = tuple[int, int, int, int, int]
"""Number, turn, first and count of a draw, and the batches before it, for schedules."""


@dataclasses.dataclass(frozen=True)
class Steps:
    """A number of steps in place of a number of rows: ``batch_size=gear.Steps(16_384)``.

    A batch has the drawn trajectories in order until one does not fit, which begins the next batch. An epoch delivers
    every drawn trajectory exactly once, unless it was removed from the table meanwhile: as many as there are items, or
    with `batches_per_epoch` that number of batches. Order and resuming are as with a number of rows, for any `prefetch`
    and `num_workers`. `ReplayDataset.stats` tells how full batches are. Not for `TopK`, `drop_last` and samplers of
    which every batch has the same trajectories; `sample` draws so on one rank, from a `Table` or with
    ``Ranks("local")``.

    Attributes:
        max_steps: most steps of a batch.
        lookahead: number of drawn trajectories that do not fit which a batch may pass over to find others that do. The
            next batch begins with them, so none waits for more than ``lookahead + 1`` batches.
        too_long: what becomes of a drawn trajectory with more steps. ``"error"`` raises an error that names it,
            ``"truncate"`` delivers its first `max_steps` steps, ``"skip"`` leaves it out and counts it.

    Raises:
        SchemaError: an invalid value.
    """

    max_steps: int
    lookahead: int = 0
    too_long: TooLong = "error"

    def __post_init__(self) -> None:
        if at_least("max_steps", self.max_steps) >= 2**31:
            raise SchemaError(f"max_steps is {self.max_steps:,}; expected less than 2**31.")
        at_least("lookahead", self.lookahead, least=0)
        one_of("too_long", self.too_long, ("error", "truncate", "skip"))
        for name in ("max_steps", "lookahead"):
            object.__setattr__(self, name, int(getattr(self, name)))

    def check_sampler(self, sampler: Sampler | None) -> None:
        """Raise SchemaError for a sampler whose draws do not go on from batch to batch."""
        if sampler is not None and sampler.repeats:
            raise SchemaError(
                f"{self!r} was given with {sampler!r}, of which every batch has the same trajectories; expected "
                "Uniform, Prioritized, or Fifo or Lifo with replacement=False."
            )
        if sampler is not None and sampler.weighs and not (sampler.replacement and sampler.least_of_table):
            raise SchemaError(
                f"{self!r} was given with {sampler!r}; expected Prioritized(replacement=True, normalize='table'): a "
                "batch is made of several draws, so neither distinct rows nor the largest weight are known at one."
            )


@dataclasses.dataclass(frozen=True)
class StepBudget(Steps):
    """`Steps`, and the windows of which steps are counted.

    Attributes:
        offset, length, final: of the windows; see `gear_loader.native.packed.measure`.
    """

    offset: int = 0
    length: int = 0
    final: bool = False


@dataclasses.dataclass(frozen=True)
class BudgetState:
    """Position in the stream of drawn trajectories after a batch.

    Attributes:
        number: batches so far.
        draw, turn, first: number of the next draw; its pass, and its first item there.
        draws: the draws since the oldest of which rows are left.
        waiting: int64 [2, n], number of the draw and row of each drawn trajectory that no batch has had yet, in order.
        rows: int64 [2, n], id and anchor of each of them; None where only the draws tell.
        weights: float32 [n], their importance weights; None without.
    """

    number: int = 0
    draw: int = 0
    turn: int = 0
    first: int = 0
    draws: tuple[DrawnPart, ...] = ()
    waiting: Array = dataclasses.field(default_factory=lambda: np.empty((2, 0), dtype=np.int64))
    rows: Array | None = None
    weights: Array | None = None

    @property
    def oldest(self) -> int:
        """Number of the oldest draw that the next batches need."""
        return self.draws[0][0] if self.draws else self.draw

    def to_json(self) -> dict[str, Any]:
        """The state as integers and lists of them."""
        numbers = {name: getattr(self, name) for name in ("number", "draw", "turn", "first")}
        return {
            **numbers,
            "draws": [list(drawn) for drawn in self.draws],
            "waiting": self.waiting.T.tolist(),
            "rows": None if self.rows is None else self.rows.T.tolist(),
            "weights": None if self.weights is None else self.weights.tolist(),
        }

    @classmethod
    def from_json(cls, state: Any) -> BudgetState:
        """The state that `to_json` returned.

        Raises:
            SchemaError: it is invalid.
        """
        try:
            if set(state) != {field.name for field in dataclasses.fields(cls)}:
                raise ValueError
            numbers = {name: state[name] for name in ("number", "draw", "turn", "first")}
            draws = tuple(tuple(map(int, part)) for part in state["draws"])
            waiting = tuple(tuple(map(int, part)) for part in state["waiting"])
            known = {part[0] for part in draws}
            rows, weights = (None if state[name] is None else state[name] for name in ("rows", "weights"))
            if rows is not None:
                rows = np.array([tuple(map(int, part)) for part in rows], dtype=np.int64).reshape(-1, 2).T
            if weights is not None:
                weights = np.array([float(weight) for weight in weights], dtype=np.float32)
            fits = all(type(value) is int and value >= 0 for value in numbers.values())
            fits &= all(len(part) == 5 and min(part) >= 0 for part in draws)
            fits &= all(len(part) == 2 and part[0] in known and part[1] >= 0 for part in waiting)
            fits &= rows is None or (rows.shape[1] == len(waiting) and bool((rows >= 0).all()))
            fits &= weights is None or (len(weights) == len(waiting) and bool((weights >= 0).all()))
            if not fits:
                raise ValueError
        except (TypeError, ValueError, KeyError, OverflowError):
            raise SchemaError(
                f"The state of max_steps is {state!r}; expected that of a state_dict() of a ReplayDataset."
            ) from None
        places = np.array(waiting, dtype=np.int64).reshape(-1, 2).T
        return cls(**numbers, draws=draws, waiting=places, rows=rows, weights=weights)  # type: ignore[arg-type]


@dataclasses.dataclass
class BudgetCounts:
    """What became of the drawn trajectories; see `ReplayDataset.stats`."""

    batches: int = 0
    steps: int = 0
    skipped: int = 0
    gone: int = 0


class BudgetProgress:
    """The position of a dataset's batches of so many steps, and what became of the trajectories.

    Args:
        keep: batches that a consumer may have fetched ahead of the state that it saves.

    Attributes:
        counts: of the delivered batches.
    """

    def __init__(self, keep: int) -> None:
        self.counts = BudgetCounts()
        # Epoch, and position after each of its last delivered batches: a trainer may go back by some.
        self._recent: collections.deque[tuple[int, BudgetState]] = collections.deque(maxlen=keep + 2)

    def start(self, epoch: int, number: int) -> BudgetState | None:
        """The latest position to plan batch `number` of an epoch from, or None for the epoch's start."""
        known = [state for other, state in self._recent if other == epoch and state.number <= number]
        return max(known, key=lambda state: state.number, default=None)

    def delivered(
        self, epoch: int, state: BudgetState, counts: BudgetCounts, selection: Selection | None
    ) -> None:
        """Record a delivered batch; `selection`, if given, forgets draws that no state goes back to."""
        self._recent.append((epoch, state))
        mine = self.counts
        mine.batches, mine.steps = mine.batches + counts.batches, mine.steps + counts.steps
        mine.skipped, mine.gone = mine.skipped + counts.skipped, mine.gone + counts.gone
        if selection is not None and len(self._recent) == self._recent.maxlen:
            selection.forget_before(self._recent[0][0], self._recent[0][1].oldest)

    def state_dict(self) -> list[dict[str, Any]]:
        """The last positions, JSON-serialisable."""
        return [{"epoch": epoch, "state": state.to_json()} for epoch, state in self._recent]

    def load(self, positions: list[tuple[int, BudgetState]]) -> None:
        """Go on from the positions of `checked_positions`."""
        self._recent.clear()
        self._recent.extend(positions)


def checked_positions(state: Mapping[str, Any]) -> list[tuple[int, BudgetState]]:
    """The positions under the key ``"budget"`` of a dataset's state; none if it has no such key.

    Raises:
        SchemaError: they are invalid.
    """
    found = state.get("budget", [])
    if not isinstance(found, (list, tuple)) or not all(
        isinstance(part, Mapping) and set(part) == {"epoch", "state"} for part in found
    ):
        raise SchemaError(f"The state of max_steps is {found!r}; expected that of a state_dict().")
    return [
        (
            at_least("epoch of the state's budget", part["epoch"], least=0),
            BudgetState.from_json(part["state"]),
        )
        for part in found
    ]
