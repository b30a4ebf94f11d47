"""The transitions of the last calls of `add` of a ring, in growing trajectories of a table."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_loader.native import ring_places
from gear_loader.native.compile import entry_of
from gear_loader.native.row_values import RowReader
from gear_loader.storage.growing_rows import GrowingRows
from gear_loader.storage.operations.appending import ENDS
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, data_address


class Ring:
    """Appends a row of n environments a call, and knows where those of the last `size` calls lie.

    Attributes:
        rows: column -> memory for a row of each environment, [n, *shape]. following: the same of the values after it,
            of columns with final steps.
        ended: bool [n], whether the episodes of the row that is appended next, or was appended last, end with it.
        calls: number of rows that were appended.

    Args:
        table: that evicts its oldest trajectories; nothing else is added to it. size: calls. num_envs: n.
        cut: steps at which a trajectory ends. visible: whether others read the table; else rows may wait in it until
            `publish`.
    """

    def __init__(self, table: Table, size: int, num_envs: int, *, cut: int, visible: bool) -> None:
        self._table, self._size, self._num_envs = table, size, num_envs
        self._writer = table.writers(num_envs, commit_every_step=True)
        self._growing = growing = GrowingRows.of(self._writer, cut=cut)
        growing.at_once = visible
        self._hidden = False  # whether rows wait
        self._amid = False  # whether the last `append` has not returned
        schema = table.schema.steps

        def row(name: str) -> Array:
            return np.zeros((num_envs, *schema[name].shape), dtype=schema[name].numpy_dtype)

        self.rows = {name: row(name) for name in growing.names}
        self.following = {name: row(name) for name in growing.finals}
        for c, name in enumerate(growing.names):
            for sources in (growing.sources, growing.following):
                sources[c, 1:] = schema[name].step_bytes
        self._use_memory()
        self._lanes, self._index = self._writer._sink.lanes, table._engine.index.arrays
        self._kinds = growing.kinds[0]
        self.ended: Array = np.zeros(num_envs, dtype=bool)
        self._nobody: Array = np.zeros(num_envs, dtype=bool)
        self._reader: RowReader | None = None
        self._note: Any = ring_places.note
        self.forget()

    def forget(self) -> None:
        """There are no rows, nor trajectories."""
        self._writer.discard()
        self._table.clear()
        self.calls = self._first = 0
        self._before: Array = np.full((self._num_envs, 2), -1)  # see `ring_places.note`
        # Slot, step and generation (lower half) of the transitions of each call, modulo `size`.
        self._places: Array = np.zeros((self._size, self._num_envs, 3), dtype=np.int32)

    def _use_memory(self) -> None:
        """Append what `rows` and `following` hold."""
        for c, name in enumerate(self._growing.names):
            self._growing.sources[c, 0] = data_address(self.rows[name])
            if name in self.following:
                self._growing.following[c, 0] = data_address(self.following[name])

    # ---------------------------------------------------------------- appending

    def expect(self, columns: Sequence[tuple[str, bool, tuple[int, ...]]]) -> None:
        """What `read` gets: columns, whether those are the values that follow, and their shape with that of a row."""
        memory, found, growing = [], [], self._growing
        for name, follows, shape in columns:
            sources = growing.following if follows else growing.sources
            memory.append((self.following if follows else self.rows)[name].reshape(shape))
            found.append(sources[growing.names.index(name), :1])
        memory += [self.ended, self._nobody]
        self._reader = RowReader(memory, [*found, None, None], self._kinds, single=1, envs=1, ends=ENDS)

    def read(self, values: tuple[Any, ...]) -> bool:
        """Take a row as it lies in memory, and `ended`; return False if it has to be converted.

        Args:
            values: of the columns of `expect`, and `ended`. They must stay until `append` has returned.
        """
        assert self._reader is not None
        if self._reader.read((*values, self._nobody)):
            return True
        self._use_memory()
        return False

    def append(self) -> None:
        """Append the row; its trajectories end where `ended` says; raises as `VectorWriter.append`."""
        growing, index = self._growing, self._index
        if self._amid:
            self._end_interrupted()
        self._amid = True
        growing.append()
        note = self._note
        note(
            self._lanes,
            growing.out,
            self._before,
            index.extent,
            index.generation,
            self._places,
            self.calls % self._size,
        )
        if note is ring_places.note:
            self._note = entry_of(note)
        self.calls += 1
        self._hidden, self._amid = not growing.at_once, False

    def _end_interrupted(self) -> None:
        """Let the trajectories end that may have a row of a call of `append` that did not return."""
        self._hidden = not self._growing.at_once
        self.publish()
        self._writer.commit()
        self._before[:] = -1

    def mark_ends(self) -> None:
        """Let trajectories end where `ended` says, if it was not `read`."""
        self._kinds[:] = 1 + ENDS * self.ended

    def publish(self) -> None:
        """Make all rows visible in the table."""
        if self._hidden:
            self._growing.publish()
            self._hidden = False

    def end(self, member: int, column: str) -> None:
        """Set the bool `column` of the newest transition of an environment, with which its trajectory ends."""
        self.publish()
        slot, step, _ = self._places[(self.calls - 1) % self._size, member].tolist()
        block_steps = self._index.block_steps
        block = self._index.row(slot)[step // block_steps]
        self._table._engine.region.column(column)[block, step % block_steps] = 1
        self._writer.commit(np.arange(self._num_envs) == member)

    # ---------------------------------------------------------------- what is known

    def first(self) -> int:
        """The first call of the last `size` from which on all transitions are in the table."""
        index, oldest = self._index, max(self.calls - self._size, self._first)
        self._first = ring_places.first_live(
            self._places, oldest, self.calls, index.state, READY, index.generation
        )
        return self._first

    def find(self, rows: Array, members: Array) -> SelectedRows:
        """Where transitions of calls `rows` (modulo `size`) of environments `members` lie, int64 [k] each."""
        self.publish()
        slots, steps = np.empty(len(rows), dtype=np.int64), np.empty(len(rows), dtype=np.int64)
        ring_places.look_up(self._places, rows, members, slots, steps)
        return SelectedRows(slots, steps, slots)  # generations are not looked at

    def pieces(self) -> list[tuple[int, int, int, int]]:
        """Trajectories of live transitions, oldest first: the call of their last step, environment, slot and steps."""
        self.publish()
        calls = np.arange(self.first(), self.calls)[::-1]
        pieces = []
        for member in range(self._num_envs):
            places = self._places[calls % self._size, member]
            slots, back = np.unique(places[:, 0], return_index=True)
            found = zip(calls[back].tolist(), slots.tolist(), (places[back, 1] + 1).tolist(), strict=True)
            pieces += [(call, member, slot, steps) for call, slot, steps in found]
        return sorted(pieces)

    def put(self, call: int, member: int, slot: int, steps: int) -> None:
        """Note a trajectory of the table, whose last of `steps` steps an environment took in a call before `calls`."""
        every = np.arange(steps)
        calls = call + 1 - steps + every
        live = calls >= self.calls - self._size
        rows = calls[live] % self._size
        self._places[rows, member, 0], self._places[rows, member, 1] = slot, every[live]
        self._places[rows, member, 2] = self._index.generation[slot : slot + 1].astype(np.int32)
