"""Memory for a row of n environments that a writer appends, in the place of `GrowingRows`."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.operations.appending import ENDS, UNLESS_RESET
from gear_loader.storage.table import Table
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.utils.arrays import Array


class RowMemory:
    """A row of each environment, and what is known of the last ones that were appended.

    Attributes:
        rows: column -> values [n, *shape]. following: column with final steps -> values after each row.
        kinds: int64 [1, n], see `appending.append_lanes`. left: whether an error has left the row.

    Args:
        table: with final steps. writer: of it, for n environments.
    """

    def __init__(self, table: Table, writer: VectorWriter) -> None:
        self._writer, num_envs = writer, writer.num_envs
        schema = table.schema.steps
        self.rows: dict[str, Array] = {
            name: np.zeros((num_envs, *column.shape), column.numpy_dtype) for name, column in schema.items()
        }
        self.following = {name: np.zeros_like(rows) for name, rows in self.rows.items() if schema[name].final}
        self.kinds = np.full((1, num_envs), UNLESS_RESET)
        self.left = False
        self._before = {name: np.zeros_like(rows) for name, rows in self.following.items()}
        self._over = np.zeros(num_envs, dtype=bool)  # whether the last step of each ended its episode

    @property
    def done(self) -> Array:
        """Environments whose trajectories end with the row, bool [n]."""
        found: Array = (self.kinds[0] & ENDS) != 0
        return found

    def append(self, count: int = 1) -> None:
        """Append the row; raises as `VectorWriter.append`."""
        self.left = True
        self.resume()

    def resume(self) -> None:
        """Append the row that an error has left."""
        self._append(self.kinds[0] & ~ENDS, self.done)
        self.left = False

    def drop(self) -> None:
        """Forget it."""
        self.left = False

    def _append(self, kinds: Array, done: Array) -> None:
        """Append the row; kinds: without ENDS, int64 [n]. done: bool [n]."""
        raise NotImplementedError

    def _resets(self, same: Array) -> Array:
        """Environments that the row only resets, bool [n]; `same`: whether it has what followed before."""
        unless = (self.kinds[0] & ~ENDS) == UNLESS_RESET
        found: Array = unless & same & self._over & (self.rows["reward"] == 0) & ~self.done
        return found

    def _passed(self, acting: Array, resets: Array) -> None:
        """Note the row as the last one of the environments (bool [n]) that acted or were reset; others did nothing."""
        known = acting | resets
        for name, values in self.following.items():
            self._before[name][known] = values[known]
        self._over = np.where(known, self.done & acting, self._over)


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
