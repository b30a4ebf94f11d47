"""Values that are overwritten: `Table.set`.

A trajectory has a count of its edits, above the bits of its late columns (`gear_loader.storage.filled_bits`): odd while
one is copied, which happens under the table's lock. Who reads without the lock compares the counts before and after,
and reads once more under the lock if one has changed: `TableReader.read_whole`. Checkpoints compare the same counts.
What a killed process has begun to copy the next one copies: `gear_loader.storage.edit_log`.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

import numpy as np

from gear_loader.errors import FilledError, SchemaError, TableFullError
from gear_loader.storage.edit_values import Edits, EditValues, checked_edits
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.recalling import Recall
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine

_AT_ONCE = 1 << 19
"""Bytes of rows that are copied under the lock at once, unless one row has more."""


def set_columns(
    engine: Engine,
    index: Any,
    anchor: Any,
    generation: Any,
    mask: Any,
    columns: Mapping[str, Any],
    *,
    strict: bool,
) -> int:
    """See `Table.set`."""
    return set_rows(
        engine, checked_edits(engine.schema, index, anchor, generation, mask, columns), strict=strict
    )


def set_rows(engine: Engine, edits: Edits, *, strict: bool) -> int:
    """`set_columns` of arguments that were checked."""
    if not len(edits.slots):
        return 0
    call = _SetCall(engine, edits.slots, edits.generations, edits.values, strict)
    return engine.region.fill_lock.run(call.run)


@dataclasses.dataclass
class _SetCall:
    """One call of `set_columns`, which holds the lock of those who write into trajectories of the table.

    Trajectories that lie on disk only are brought back into memory.
    """

    engine: Engine
    slots: Array
    generations: Array
    values: list[EditValues]
    strict: bool
    done: int = 0  # rows that were written

    def run(self) -> int:
        """Write the rows; return the number of stale ones."""
        locked = self.engine.index.recovery.locked
        locked(self._check)
        sizes = np.sum([each.data[0].size for each in self.values])
        rows = max(1, _AT_ONCE // max(1, int(sizes)))
        for begin in range(0, len(self.slots), rows):
            left, recall = np.arange(begin, min(begin + rows, len(self.slots))), Recall(self.engine)
            while len(left := locked(functools.partial(self._write, before := left))):
                if len(left) < len(before):
                    recall.progressed()
                if not recall.bring(np.unique(self.slots[left])):
                    raise TableFullError(
                        f"Timed out after {recall.timeout:g} s: {len(left)} of {len(self.slots)} rows of a set have "
                        "trajectories that lie on disk only, and there is no room to bring one into memory; "
                        f"{self.done} rows were written. Set the others again, or make the memory of the table larger "
                        "(memory)."
                    )
        return len(self.slots) - self.done

    def _check(self) -> None:
        """Raise unless all live rows can be written; the caller holds the lock."""
        arrays, schema = self.engine.index.arrays, self.engine.schema
        live = arrays.live_rows(self.slots, self.generations, strict=self.strict, what="values are of")
        rows = np.flatnonzero(live)
        slots = self.slots[rows]
        lengths = arrays.extent[slots, 0]
        for each in self.values:
            steps = each.steps[rows]
            outside = each.given[rows] & ((steps < 0) | (steps >= lengths[:, None]))
            if outside.any():
                row, step = (int(part[0]) for part in np.nonzero(outside))
                raise SchemaError(
                    f"Column {each.name!r} has a value for step {steps[row, step]} of row {rows[row]}, whose "
                    f"trajectory has {lengths[row]} steps; expected values of its steps, or a mask that leaves out the "
                    "others. Nothing was changed."
                )
        bits = schema.late_bits([each.name for each in self.values])
        missing = np.flatnonzero((filled_bits(arrays, slots) & bits) != bits) if bits else rows[:0]
        if len(missing):
            raise FilledError(
                f"The trajectory of index {slots[missing[0]]} has no values yet in some of the columns "
                f"{[each.name for each in self.values]}; Table.fill gives it the first ones. Nothing was changed."
            )

    def _write(self, rows: Array) -> Array:
        """Write those of the rows (int64 [m]) that are live and in memory; the caller holds the lock.

        Returns:
            Live rows whose trajectories lie on disk only, int64 [k].
        """
        index = self.engine.index
        live = index.arrays.live_rows(self.slots[rows], self.generations[rows], strict=False, what="")
        rows = rows[live]
        inside = index.arrays.extent[self.slots[rows], 1] >= 0
        outside: Array = rows[~inside]
        rows = rows[inside]
        slots = self.slots[rows]
        columns = [each.runs(self.engine.schema, rows, slots) for each in self.values]
        if len(rows):
            index.edit_log.write([each for each in columns if each.where.size])
        self.done += len(rows)
        return outside
