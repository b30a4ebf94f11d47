"""Validation of priority updates."""

from __future__ import annotations

from typing import Any, Literal, NamedTuple

import numpy as np

from gear_loader.errors import PriorityError, SchemaError
from gear_loader.utils.arrays import Array, narrowed, numbers
from gear_loader.utils.checks import one_of


class PriorityUpdates(NamedTuple):
    """A validated priority update.

    Attributes:
        slots, steps: int64 [n]. generations: int64 [n] or None. priorities: float32 [n].
    """

    slots: Array
    steps: Array
    generations: Array | None
    priorities: Array

    def part(self, begin: int, end: int) -> PriorityUpdates:
        """Rows `begin` to `end`."""
        generations = None if self.generations is None else self.generations[begin:end]
        return PriorityUpdates(
            self.slots[begin:end], self.steps[begin:end], generations, self.priorities[begin:end]
        )


def request(
    index: Any, priority: Any, *, generation: Any, anchor: Any, unit: Literal["trajectory", "step"]
) -> PriorityUpdates:
    """Validate a user's priority update.

    Args:
        index: integers [n], slots. priority: numbers [n]. All are tensors or arrays.
        generation, anchor: integers [n] or None.
        unit: unit of the sampler.

    Raises:
        PriorityError: a priority that is NaN, infinite (as float32) or negative; the message names the first.
        SchemaError: another shape or dtype, or `anchor` does not fit `unit`.
    """
    slots = _array("index", index, "iu")
    count = len(slots)
    values = _array("priority", priority, "fiub", count)
    if values.dtype != np.float32:
        values = values.astype(np.float64)
    generations = None if generation is None else _int64(_array("generation", generation, "iu", count))
    check_names(anchor, unit)
    steps = np.zeros(count, dtype=np.int64) if anchor is None else _array("anchor", anchor, "iu", count)
    narrow, bad = narrowed(values)
    if bad >= 0:
        raise invalid(bad, values[bad])
    return PriorityUpdates(_int64(slots), _int64(steps), generations, np.array(narrow))


def checked_rows(index: Any, generation: Any) -> tuple[Array, Array]:
    """Slots and generations of rows, int64 [n] each; -1 for every generation if none is given.

    Raises:
        SchemaError: another shape or dtype.
    """
    slots = _array("index", index, "iu")
    if generation is None:
        return _int64(slots), np.full(len(slots), -1)
    return _int64(slots), _int64(_array("generation", generation, "iu", len(slots)))


def invalid(row: int, value: Any) -> PriorityError:
    """The error for the first priority that is invalid."""
    return PriorityError(
        f"priority[{row}] is {value}; expected a finite number (as float32) that is not negative. "
        "Nothing was changed."
    )


def is_strict(stale: Any) -> bool:
    """Whether the option `stale` makes a row of a removed trajectory an error.

    Raises:
        SchemaError: neither "ignore" nor "error".
    """
    if type(stale) is str and stale == "ignore":  # mostly
        return False
    return bool(one_of("stale", stale, ("ignore", "error")) == "error")


def _int64(values: Array) -> Array:
    # Copied, because the update may run after the user has overwritten the array.
    return np.array(values, dtype=np.int64)


def check_names(anchor: Any, unit: Literal["trajectory", "step"]) -> None:
    """Raise SchemaError unless `anchor` is given exactly if the unit is a step."""
    if unit == "step" and anchor is None:
        raise SchemaError(
            "No anchor was received; with unit='step' a step is named by index and anchor: pass the batch in place of "
            "the index, or anchor=batch['anchor']."
        )
    if unit == "trajectory" and anchor is not None:
        raise SchemaError(
            "anchor was received; with unit='trajectory' a priority is that of the whole trajectory: leave it out, or "
            "use a sampler with unit='step'."
        )


def _array(name: str, value: Any, kinds: str, count: int | None = None) -> Array:
    expected = (
        f"{'numbers' if 'f' in kinds else 'integers'} [{'n' if count is None else count}]"
        f"{'' if count is None else ', as many as index has'}"
    )
    array = np.atleast_1d(numbers(value, name, kinds, f"{expected}. Nothing was changed"))
    if array.ndim == 2 and array.shape[1] == 1 and "f" in kinds:  # TD errors [n, 1]
        array = array[:, 0]
    if array.ndim != 1 or (count is not None and len(array) != count):
        raise SchemaError(
            f"{name} is {array.dtype} {list(array.shape)}; expected {expected}. Nothing was changed."
        )
    return array
