"""Rows of environments whose trajectories can be drawn when they have ended, and not before."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.operations.appending import UNLESS_RESET
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class EndedRows:
    """In the place of `WaitingRows`: one row of each environment waits, and a trajectory is committed at its end.

    Attributes:
        rows, following, active, done, count, length: as of `WaitingRows`, with K = 1.

    Args:
        table: with final steps. num_envs: n. cut: most steps of a trajectory.
    """

    length = 1

    def __init__(self, table: Table, num_envs: int, cut: int) -> None:
        self._writer, self._cut = table.writers(num_envs), cut
        self.rows: dict[str, Array] = {
            name: np.zeros((1, num_envs, *column.shape), column.numpy_dtype)
            for name, column in table.schema.steps.items()
        }
        self.following = {
            name: np.zeros_like(rows) for name, rows in self.rows.items() if table.schema[name].final
        }
        self.active = np.full((1, num_envs), UNLESS_RESET, dtype=np.uint8)
        self.done = np.zeros((1, num_envs), dtype=bool)
        self.count = 0
        self._before: dict[str, Array] = {}  # what followed the last row
        self._over = np.zeros(num_envs, dtype=bool)  # whether that ended an episode

    def append(self) -> None:
        """Append the row; raises as `VectorWriter.append`."""
        writer, ended = self._writer, self.done[0]
        rows = {name: values[0] for name, values in self.rows.items()}
        following = {name: values[0] for name, values in self.following.items()}
        acting = self.active[0] != 0
        if self._before:
            same = _same(rows, self._before)
            acting &= ~((self.active[0] == UNLESS_RESET) & same & self._over & (rows["reward"] == 0) & ~ended)
            broken = ~same & (writer.num_steps > 0) & acting
            if broken.any():
                writer.commit(broken, final=self._before)
        done = ended | (writer.num_steps >= self._cut - 1)
        writer.append(rows, done=done, active=acting, final=following if done.any() else None)
        self._over = ended & acting
        self._before = {name: values.copy() for name, values in following.items()}
        self.active[:] = UNLESS_RESET
        self.count = 0


def _same(rows: Mapping[str, Array], before: Mapping[str, Array]) -> Array:
    """Whether each environment's observation is the one that followed before, bool [n]."""
    same: Array | None = None
    for name, values in before.items():
        equal = rows[name] == values
        if not equal.all():
            equal |= (rows[name] != rows[name]) & (values != values)  # NaN is NaN
        every = equal.reshape(len(equal), -1).all(1)
        same = every if same is None else same & every
    assert same is not None
    return same
