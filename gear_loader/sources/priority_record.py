"""The priorities of all episodes of a source, in memory or in a file."""

from __future__ import annotations

import contextlib
import fcntl
import os
import threading
from collections import deque
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.selection.samplers import Prioritized
from gear_loader.selection.tree import PriorityTree
from gear_loader.selection.weights import checked_leaves, first_leaves
from gear_loader.utils.arrays import Array
from gear_loader.utils.paths import local_path


class PriorityRecord:
    """The priority of each episode of a source, float32 [count], NaN if it was never fetched.

    Args:
        count: episodes of the source. path: of the file, which one process at a time uses; None: in memory alone.
        resume: whether the file, if there is one, is read; else it must not be there.

    Raises:
        SourceError: the file is there, is another's, or cannot be used.
    """

    def __init__(self, count: int, path: Any = None, *, resume: bool = False) -> None:
        self._file: int | None = None
        if path is None:
            self.priorities: Array = np.full(count, np.nan, dtype=np.float32)
            return
        where = Path(local_path(path, SourceError))
        try:
            if not where.exists():
                self._create(where, count)
            elif not resume:
                raise SourceError(
                    f"record={str(where)!r} is there already; expected a new path, or resume=True, which goes on with "
                    "its priorities."
                )
            self._file = os.open(where, os.O_RDWR | os.O_CLOEXEC)
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # For writing, numpy would fill a file that is cut off with zeros.
            np.lib.format.open_memmap(where, mode="r")
            self.priorities = np.lib.format.open_memmap(where, mode="r+")
        except BlockingIOError as error:
            self.close()
            raise SourceError(
                f"record={str(where)!r} is used by another load; expected a file for each."
            ) from error
        except (OSError, ValueError) as error:
            self.close()
            raise SourceError(f"record={str(where)!r} cannot be used: {error}") from error
        if self.priorities.shape != (count,) or self.priorities.dtype != np.float32:
            found = f"{self.priorities.dtype} {list(self.priorities.shape)}"
            self.close()
            raise SourceError(f"record={str(where)!r} has {found}; expected float32 [{count}].")
        known = self.priorities[~np.isnan(self.priorities)]
        if not (np.isfinite(known) & (known >= 0)).all():
            self.close()
            raise SourceError(
                f"record={str(where)!r} has priorities from {known.min()} to {known.max()}; expected finite ones of at "
                "least 0, or NaN. It is damaged, or another's."
            )

    @staticmethod
    def _create(path: Path, count: int) -> None:
        """Create a file that is complete under its name."""
        new = path.with_name(f".{path.name}.{os.getpid()}-{threading.get_native_id()}")
        try:
            with new.open("wb") as file:
                np.save(file, np.full(count, np.nan, dtype=np.float32))
            os.link(new, path)  # fails if another process was first
        finally:
            new.unlink(missing_ok=True)

    def close(self) -> None:
        """Let others use the file."""
        if self._file is not None:
            with contextlib.suppress(OSError):
                os.close(self._file)
            self._file = None

    __del__ = close


class PriorityDraws:
    """Draws episodes of a part of a source in proportion to the powers of their priorities.

    Args:
        record: of all episodes. numbers: int64 [n], ascending, of the part.
        sampler: alpha, beta and eps. key: of the random numbers.

    Attributes:
        maximum: the largest priority so far, at least 1.
        when_updated: called with the episodes, int64 [n], that `update_later` has set, by the thread that draws.
    """

    when_updated: Callable[[Array], object] = len

    def __init__(self, record: PriorityRecord, numbers: Array, sampler: Prioritized, key: int) -> None:
        self._record, self._numbers, self._sampler = record, numbers, sampler
        self._key = key
        self._tree = PriorityTree(len(numbers), extremes=False)
        self._waiting: deque[tuple[Array, Array]] = deque()
        self._ended = False
        known = record.priorities[numbers]
        self.maximum = float(np.nanmax(known, initial=1.0))
        self._unset: Array = np.isnan(known)
        known = np.where(self._unset, np.float32(self.maximum), known)
        self._tree.leaves[: len(numbers)] = first_leaves(sampler, known)
        self._tree.build()

    def update_later(self, numbers: Array, priorities: Array) -> Array:
        """Set priorities, float32 [n], of episodes, int64 [n], before the next draw; from any thread.

        Returns:
            bool [n], whether an episode is one of these, and draws go on.

        Raises:
            PriorityError: a power exceeds float32's range. Nothing was changed.
        """
        checked_leaves(self._sampler, priorities)
        mine: Array = (self._numbers[self._places(numbers)] == numbers) & (not self._ended)
        if mine.any():
            # The process may be killed before the draw.
            self._record.priorities[numbers[mine]] = priorities[mine]
            self._waiting.append((numbers[mine], priorities[mine]))
        return mine

    def update(self, numbers: Array, priorities: Array) -> None:
        """Set priorities, float32 [n], of episodes, int64 [n]; of equal ones the last counts."""
        if not len(numbers):
            return
        places = self._places(numbers)
        self._record.priorities[numbers] = priorities
        self._unset[places] = False
        self._tree.update(places, first_leaves(self._sampler, priorities))
        if (largest := float(priorities.max())) > self.maximum:
            self.maximum = largest
            unset = np.flatnonzero(self._unset)
            if len(unset):
                self._tree.leaves[unset] = first_leaves(self._sampler, priorities[priorities.argmax()][None])
                self._tree.build()

    def apply(self) -> None:
        """Apply what `update_later` was given; for the thread that draws."""
        while self._waiting:
            numbers, priorities = self._waiting.popleft()
            self.update(numbers, priorities)
            self.when_updated(numbers)

    def end(self) -> None:
        """Apply what there is, and take no more: the record may be another load's from now on."""
        self._ended = True
        self.apply()

    def fetched(self, numbers: Array, priorities: Array) -> None:
        """Note the priorities, float32 [n], with which episodes, int64 [n], were added, unless others are known."""
        new = np.isnan(self._record.priorities[numbers])
        self.update(numbers[new], priorities[new])

    def priority(self, numbers: Array) -> Array:
        """Priorities of episodes that are fetched now, float32 [n]."""
        known = self._record.priorities[numbers]
        return np.where(np.isnan(known), np.float32(self.maximum), known)

    def draw(self, number: int) -> tuple[int, float]:
        """The episode of this number of a fetch, and its importance weight.

        Raises:
            PriorityError: every priority is 0. SchemaError: the schedule of beta returned an invalid value.
        """
        self.apply()
        places, leaves = self._tree.draw(1, key=self._key, step=number)
        mean = self._tree.total / len(self._numbers)
        return int(self._numbers[places[0]]), (mean / float(leaves[0])) ** self._sampler.beta_at(number)

    def _places(self, numbers: Array) -> Array:
        """Places of episodes in the tree, int64 [n]; any for those of other parts."""
        places: Array = np.minimum(np.searchsorted(self._numbers, numbers), len(self._numbers) - 1)
        return places
