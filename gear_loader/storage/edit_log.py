"""The log of `gear_loader.storage.edits`: rows are written to it before they are copied into their blocks.

A process may be killed, or interrupted, amid the copy. The log is sealed then (`LOGGED`) and the index dirty, so the
next holder of the lock copies it again (`Recovery`), before anything else: rows of a sealed log are copied whole, those
of another are not. It lies behind the region in its file; that of a private table in memory of this process.

    int64      number of columns
    a column:  int64 [4]     number in `Schema.mutable`, number of runs, bytes of the values, 0
               int64 [3, n]  of each run trajectory, first step and number of steps
               uint8         values of the runs, one after another, padded to a multiple of 8
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from gear_loader.native.editing import write_runs
from gear_loader.storage.counters import LOGGED
from gear_loader.storage.edit_values import Runs
from gear_loader.storage.filled_bits import set_filled
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.view import begin_change, end_change
from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array, data_address

_HEAD = 4


class EditLog:
    """The log of a table. The caller of each method holds the table's lock."""

    def __init__(self, arrays: IndexArrays, region: Region) -> None:
        self._arrays, self._region = arrays, region

    def write(self, columns: Sequence[Runs]) -> None:
        """Overwrite steps of live trajectories in memory: all of them, also if this process is killed meanwhile.

        Raises:
            RegionError: there is no memory for the log. CorruptTableError: blocks that do not exist.
        """
        size = 8 + sum(8 * (_HEAD + each.where.size) + _padded(each.size) for each in columns)
        data = self._region.log(size)
        data[:8].view(np.int64)[0] = len(columns)
        place = 8
        for each in columns:
            end = place + 8 * (_HEAD + each.where.size)
            numbers = data[place:end].view(np.int64)
            numbers[:_HEAD] = each.column, each.where.shape[1], each.size, 0
            numbers[_HEAD:] = each.where.reshape(-1)
            values = data[end : end + each.size].reshape(-1, each.values.shape[-1])
            np.take(each.values, each.chosen, axis=0, out=values, mode="clip")
            place = end + _padded(each.size)
        begin_change(self._arrays.view)
        self._arrays.counters[LOGGED] = size
        bad = self.apply()
        end_change(self._arrays.view)
        self._region.trim_log()
        if bad:
            raise self._arrays.corrupt(
                f"{bad} runs of steps that are overwritten have blocks that do not exist"
            )

    def apply(self) -> int:
        """Copy what is in the sealed log, if one is, and end it; return the number of runs that have no blocks."""
        arrays, size = self._arrays, int(self._arrays.counters[LOGGED][0])
        if not size:
            return 0
        columns = self._read(self._region.log(size)[:size])
        bad = 0
        if columns:
            slots = np.unique(np.concatenate([each.where[0] for each in columns]))
            streams = arrays.stream[slots]
            if (streams != 0).any():  # others may have the same steps, unless they lie on disk only
                inside = np.isin(arrays.stream, streams[streams != 0]) & (arrays.extent[:, 1] >= 0)
                slots = np.union1d(slots, np.flatnonzero(inside))
            set_filled(arrays, slots, arrays.edit_unit)
            for each in columns:
                name = self._region.layout.schema.mutable[each.column]
                counts = each.where[2]
                width = self._region.layout.columns[name].step_bytes
                sources = data_address(each.values) + (np.cumsum(counts) - counts) * width
                where = arrays.extent, arrays.block_ids, arrays.num_blocks, self._region.column_place(name)
                bad += write_runs(sources, *each.where, *where)
            arrays.filled[slots, 1] += arrays.edit_unit
        arrays.counters[LOGGED] = 0
        return bad

    def _read(self, data: Array) -> list[Runs]:
        """What a log holds.

        Raises:
            CorruptTableError: not what `write` has written.
        """
        arrays, layout = self._arrays, self._region.layout
        found: list[Runs] = []
        place, names = 8, layout.schema.mutable
        for _ in range(int(data[:8].view(np.int64)[0])):
            head = data[place : place + 8 * _HEAD].view(np.int64).tolist()
            if len(head) < _HEAD or not 0 <= head[0] < len(names) or not 0 < head[1] <= len(data):
                raise arrays.corrupt("the log of values that are overwritten is damaged")
            begin = place + 8 * _HEAD
            end = begin + 24 * head[1]
            values = data[end : end + head[2]]
            where = data[begin:end].view(np.int64).reshape(3, -1)
            slots, steps, counts = where
            right = (
                slots.min() >= 0 and slots.max() < arrays.num_slots and steps.min() >= 0 and counts.min() > 0
            )
            right = right and bool((steps <= arrays.max_steps - counts).all())
            width = layout.columns[names[head[0]]].step_bytes
            if not right or len(values) != head[2] or head[2] != int(counts.sum()) * width:
                raise arrays.corrupt("the log of values that are overwritten is damaged")
            found.append(Runs(head[0], where, values))
            place = end + _padded(head[2])
        return found


def _padded(size: int) -> int:
    return -(-size // 8) * 8
