"""Rows of environments whose trajectories can be drawn when they have ended, and not before."""

from __future__ import annotations

from gear_loader.replay.row_memory import RowMemory, same_rows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


class EndedRows(RowMemory):
    """A row of each environment; a trajectory is committed at its end.

    Args:
        table: with final steps. num_envs: n. cut: most steps of a trajectory.
    """

    def __init__(self, table: Table, num_envs: int, cut: int) -> None:
        super().__init__(table, table.writers(num_envs))
        self._cut = cut

    def _append(self, kinds: Array, done: Array) -> None:
        writer, rows = self._writer, self.rows
        same = same_rows(rows, self._before)
        resets = self._resets(same)
        acting = (kinds != 0) & ~resets
        broken = ~same & (writer.num_steps > 0) & acting
        if broken.any():
            writer.commit(broken, final=self._before)
        done = done | (writer.num_steps >= self._cut - 1)
        writer.append(rows, done=done, active=acting, final=self.following if done.any() else None)
        self._passed(acting, resets)
