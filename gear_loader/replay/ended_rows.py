"""Rows of environments whose trajectories can be drawn when they have ended, and not before."""

from __future__ import annotations

from gear_loader.replay.row_memory import RowMemory, same_rows
from gear_loader.storage.operations.appending import UNLESS_RESET
from gear_loader.storage.table import Table


class EndedRows(RowMemory):
    """One row of each environment waits, and a trajectory is committed at its end.

    Args:
        table: with final steps. num_envs: n. cut: most steps of a trajectory.
    """

    def __init__(self, table: Table, num_envs: int, cut: int) -> None:
        super().__init__(table, table.writers(num_envs), length=1)
        self._cut = cut

    def append(self) -> None:
        """Append the row; raises as `VectorWriter.append`."""
        writer, ended = self._writer, self.done[0]
        rows = {name: values[0] for name, values in self.rows.items()}
        following = {name: values[0] for name, values in self.following.items()}
        same = same_rows(rows, self._before)
        resets = self._resets(0, same)
        acting = (self.active[0] != 0) & ~resets
        broken = ~same & (writer.num_steps > 0) & acting
        if broken.any():
            writer.commit(broken, final=self._before)
        done = ended | (writer.num_steps >= self._cut - 1)
        writer.append(rows, done=done, active=acting, final=following if done.any() else None)
        self._passed(0, acting, resets)
        self.active[:] = UNLESS_RESET
        self.count = 0
