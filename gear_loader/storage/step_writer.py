"""The step writer: adds a trajectory whose steps are visible as soon as they are appended."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError, TableFullError
from gear_loader.storage.incoming import checked_final
from gear_loader.storage.operations.view import GROWN_RUN, GROWN_SLOT, GROWN_STEPS, GROWN_WIDTH
from gear_loader.storage.writer import Target, Writer
from gear_loader.utils.arrays import Array, data_address, shown

__all__ = ["StepWriter"]

_AT_ONCE = 10
"""Attempts to add steps to a trajectory that was brought back into memory before it is waited in between."""


class StepWriter(Writer):
    """A `Writer` that commits each step at once: the trajectory in the table grows with every `append`.

    Created by ``Table.writer(commit_every_step=True)``. A learner can draw a step as soon as `append` has returned, and
    windows reach across all steps so far. The trajectory keeps its index, and its place in the order of insertion;
    `commit` ends it. If the process dies, what was appended stays.

    In a table with a disk tier a trajectory that waited long for its next step may have been moved to disk; that step
    brings it back into memory first.

    If the trajectory is evicted or removed while it grows, the next step begins another one.

    Attributes:
        grown: int64 [GROWN_WIDTH], the trajectory that grows; see `gear_loader.storage.operations`.
        priority: initial priority of the next trajectory and its steps; None for the selector's running maximum.
        trajectory: values of the columns per trajectory, ``{name: [*shape]}``, of the next trajectory; set them before
            its first step.
    """

    def __init__(self, table: Target) -> None:
        super().__init__(table)
        self.grown: Array = np.zeros(GROWN_WIDTH, dtype=np.int64)
        # Where the columns put a step, as no block is shown; see `append`.
        self._spares = np.array([column.spare_address for column in self._columns], dtype=np.int64)

    @property
    def num_steps(self) -> int:
        """Steps of the trajectory that grows."""
        return int(self.grown[GROWN_STEPS])

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """Append one step, or several, and make them visible.

        Args:
            steps, columns: as for `Writer.append`.

        Returns:
            Index of the trajectory, as a tuple of one.

        Raises:
            As `Writer.append` and `Writer.commit`. After an error nothing was appended.
        """
        rows: Mapping[str, Any] = columns if steps is None else self._joined(steps, columns)
        if self._schema.casts:
            rows = self._schema.cast(rows, what="the step")
        self._check_usable()
        if len(rows) == len(self._puts) and self._put(0, rows):
            return (self.append_at(self._spares, 1),)
        rows = self._known(rows)
        if self._is_single(rows):
            self._check_step(rows)
            return (self.append_at(self._spares, 1),)
        count, addresses, hold = self._schema.locate(dict(rows), what="the steps")
        index = self.append_at(addresses, count)
        del hold
        return (index,)

    def append_at(self, addresses: Sequence[int] | Array, count: int) -> int:
        """`append` of steps that have been checked.

        Args:
            addresses: address of the contiguous steps of each column. count: number of steps, at least 1.

        Returns:
            Index of the trajectory.

        Raises:
            As `append`.
        """
        length = self.num_steps
        if length + count > self._table.longest:
            raise self._too_long(length + count)
        if length and self._add(addresses, count, final=False):
            self.grown[GROWN_STEPS] += count
            return int(self.grown[GROWN_SLOT])
        return self._begin_trajectory(addresses, count)

    def _begin_trajectory(self, addresses: Sequence[int] | Array, count: int) -> int:
        self.grown[GROWN_STEPS] = 0
        self._checked_once(None)
        try:
            self._make_room(count)
            self._copy_in(addresses, self._ids, 0, count)
            self._appended(count)
            generations = self._open[-1].generations
            assert generations is not None
            generation = int(generations[0])
            slot = super().commit(self.priority)
        except BaseException:
            super().discard()
            raise
        self.grown[:] = slot, generation, count, 0, 0
        return slot

    def _add(self, addresses: Sequence[int] | Array, count: int, *, final: bool) -> bool:
        """Add steps to the trajectory; return False if it is gone."""
        slot, generation, *_ = self.grown.tolist()
        evict, wait = self._table.policy
        backoff, attempt = None, 0
        while True:
            added = self._index.add_steps(
                slot,
                generation,
                self._table.step_addresses(),
                np.asarray(addresses, dtype=np.int64),
                count,
                self.grown[GROWN_RUN:],
                final=final,
                evict=evict,
                wait=wait,
            )
            if added is not None:
                return added
            slots = np.array([slot])
            backoff, attempt = backoff or self._index.admission.backoff(), attempt + 1
            self._table.load_from_disk(slots)
            # It may also be moved to disk again and again.
            if (self._index.request_from_disk(slots) or attempt >= _AT_ONCE) and not backoff.sleep():
                raise TableFullError(
                    f"Timed out after {backoff.timeout:g} s: the growing trajectory, of {self.num_steps:,} steps, lies "
                    "on disk only, and there is no room to bring it into memory. Nothing was appended. Make the memory "
                    "of the table larger, or commit shorter trajectories."
                )

    def commit(
        self,
        priority: float | None = None,
        *,
        final: Mapping[str, Any] | None = None,
        trajectory: Mapping[str, Any] | None = None,
    ) -> int:
        """End the trajectory; the next step begins another one.

        Args:
            trajectory: must be None: the trajectory has these values since its first step, see the attribute.
            priority: must be None: the trajectory has one since its first step, see `priority` of the writer.
            final: as for `Table.add`.

        Returns:
            Index of the trajectory. If it was evicted meanwhile, another one may have it.

        Raises:
            SchemaError: no step has been appended, `priority` or `trajectory` was given, or `final` does not fit.
            TableFullError, LockTimeoutError: as `Table.add`, with `final`.
        """
        self._check_usable()
        if priority is not None:
            raise SchemaError(
                f"priority is {shown(priority)}, but the trajectory is visible already; set writer.priority before its "
                "first step, or call ReplayDataset.update_priority."
            )
        if trajectory is not None:
            raise SchemaError(
                "trajectory was given to commit, but the trajectory is visible already; set writer.trajectory before "
                "its first step."
            )
        if not self.num_steps:
            raise SchemaError("Nothing has been appended since the last commit; append at least one step.")
        if final is not None:
            last = checked_final(self._added, final)
            self._add([data_address(row) for row in last.values()], 1, final=True)
        self.grown[GROWN_STEPS] = 0
        return int(self.grown[GROWN_SLOT])

    def discard(self) -> None:
        """End the trajectory as it is: its steps are visible already, and stay."""
        self._check_process()
        self.grown[GROWN_STEPS] = 0

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
