"""Memory for rows of n environments that a writer appends one after another, in the place of `WaitingRows`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.operations.appending import UNLESS_RESET
from gear_loader.storage.table import Table
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.utils.arrays import Array


class RowMemory:
    """K rows of each environment, and what is known of the last ones that were appended.

    Attributes:
        rows, following, active, done, count, length: as of `WaitingRows`.

    Args:
        table: with final steps. writer: of it, for n environments. length: K.
    """

    def __init__(self, table: Table, writer: VectorWriter, length: int) -> None:
        self.length, self._writer, num_envs = length, writer, writer.num_envs
        schema = table.schema.steps
        self.rows: dict[str, Array] = {
            name: np.zeros((length, num_envs, *column.shape), column.numpy_dtype)
            for name, column in schema.items()
        }
        self.following = {name: np.zeros_like(rows) for name, rows in self.rows.items() if schema[name].final}
        self.active = np.full((length, num_envs), UNLESS_RESET, dtype=np.uint8)
        self.done = np.zeros((length, num_envs), dtype=bool)
        self.count = 0
        self._before = {name: np.zeros_like(rows[0]) for name, rows in self.following.items()}
        self._over = np.zeros(num_envs, dtype=bool)  # whether the last step of each ended its episode

    def _resets(self, at: int, same: Array) -> Array:
        """Environments whose row `at` only resets them, bool [n]; `same`: whether it has what followed before."""
        unless = self.active[at] == UNLESS_RESET
        found: Array = unless & same & self._over & (self.rows["reward"][at] == 0) & ~self.done[at]
        return found

    def _passed(self, at: int, acting: Array, resets: Array) -> None:
        """Note row `at` as the last one of the environments (bool [n]) that acted or were reset; others did nothing."""
        known = acting | resets
        for name, values in self.following.items():
            self._before[name][known] = values[at][known]
        self._over = np.where(known, self.done[at] & acting, self._over)


def same_rows(rows: Mapping[str, Array], before: Mapping[str, Array]) -> Array:
    """Whether all values of each environment are those of `before` ([n, *shape] a column), NaN too; bool [n]."""
    same = []
    for name, values in before.items():
        row = rows[name].astype(values.dtype, copy=False)  # as they are stored
        equal = row == values
        if not equal.all():
            equal |= (row != row) & (values != values)
        same.append(equal.reshape(len(equal), -1).all(1))
    found: Array = np.logical_and.reduce(same)
    return found
