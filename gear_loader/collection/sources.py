"""Sources: what holds trajectories that no loop can copy where they lie, such as files.

A source (`gear_loader.storage.source`) reads spans of trajectories into memory. Packed rows are read right into their
places. Windows need padding and masks, so the blocks that they touch are read into staging memory, and gathered from
there by the loop that gathers a table's blocks: they are the same to the byte.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from gear_loader.kernels.plan import BASE, BLOCKS, STEP_STRIDE, STRIDE
from gear_loader.native import threads
from gear_loader.storage.schema import Schema
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.source import Source
from gear_loader.utils.arrays import Array, data_address


class Place(NamedTuple):
    """Where the values of one name go in packed memory.

    Attributes:
        column: of the schema. out: uint8 [bytes], contiguous. offset: of the first value. step_bytes: of a value.
        once: whether there is one value for each row, and not for each step.
    """

    column: str
    out: Array
    offset: int
    step_bytes: int
    once: bool


def read_packed(
    source: Source,
    places: Sequence[Place],
    slots: Array,
    generations: Array,
    spans: Array,
    starts: Array,
    which: Array,
    *,
    drawn: Array | None = None,
) -> None:
    """Read rows right into their places in packed memory.

    Args:
        places: of each name. slots, generations: int64 [m]. spans: int64 [2, m], first step and number of steps.
        starts: int64 [m], step of the memory at which each row begins. which: int64 [m], number of each row in it.
        drawn: as for `Source.read`.

    Raises:
        LostRowsError, StaleIndexError: see `Source.read`.
    """
    left = list(places)
    while left:  # at a time one of the names that show a column
        now = {place.column: place for place in reversed(left)}
        outs = {
            column: (place.out, place.offset + (which if place.once else starts) * place.step_bytes)
            for column, place in now.items()
        }
        source.read(
            slots, generations, spans[0], spans[1], outs, drawn=drawn if len(left) == len(places) else None
        )
        left = [place for place in left if now[place.column] is not place]


class StagedRows:
    """Gathers windows of trajectories of a source, through staging memory.

    Args:
        source: returns the source when it is needed. schema: of the source. reach: of the windows.
        row_bytes: bytes of a row of a batch. block_steps: most steps beside a window that are read with it.
    """

    def __init__(
        self,
        source: Callable[[], Source],
        schema: Schema,
        reach: Reach,
        row_bytes: int,
        block_steps: int = 16,
    ) -> None:
        self._source, self._schema, self._reach = source, schema, reach
        self._row_bytes, self._block_steps = row_bytes, block_steps
        # Memory of gathers that have ended, column -> uint8 [bytes]; several threads may gather at once.
        self._spare: list[dict[str, Array]] = []

    def gather(
        self,
        columns: Array,
        sources: Sequence[str],
        slots: Array,
        anchors: Array,
        generations: Callable[[], Array],
        rows: Array | None,
    ) -> int:
        """`read`, from a source whose sizes do not change; return the number of rows."""
        bad = self.read(columns, sources, slots, anchors, generations(), rows)
        assert bad == 0
        return len(slots)

    def read(
        self,
        columns: Array,
        sources: Sequence[str],
        slots: Array,
        anchors: Array,
        generations: Array,
        rows: Array | None,
    ) -> int:
        """Read trajectories, and gather their windows.

        Args:
            columns: int64 [C, WIDTH], a gather plan. sources: the column that each of its rows reads.
            slots, anchors, generations: int64 [n]. rows: int64 [n], distinct: row of the batch for each; None: row b
                for entry b.

        Returns:
            Number of invalid windows, 0 unless the source says sizes that change.

        Raises:
            LostRowsError, StaleIndexError: see `Source.read`.
        """
        source, schema, size = self._source(), self._schema, self._block_steps
        chosen, some, place = np.unique(slots, return_index=True, return_inverse=True)
        place = np.ascontiguousarray(place.reshape(-1), dtype=np.int64)
        extent = np.zeros((len(chosen), 3), dtype=np.int64)
        extent[:, [0, 2]] = source.sizes(chosen)
        totals = extent[:, 0] + extent[:, 2]
        low, high = totals - 1, np.zeros_like(totals)
        np.minimum.at(low, place, np.clip(anchors + self._reach.first, 0, extent[place, 0] - 1))
        np.maximum.at(high, place, np.clip(anchors + self._reach.last, 0, totals[place] - 1))
        low //= size
        blocks = high // size - low + 1
        begins = np.cumsum(blocks) - blocks
        first = low * size
        counts = np.minimum(totals, (low + blocks) * size) - first
        try:
            memory = self._spare.pop()
        except IndexError:  # none, or another thread took it
            memory = {}
        outs: dict[str, tuple[Array, Array]] = {}
        for name in set(sources):
            step = schema[name].step_bytes
            once = schema[name].trajectory
            needed = (len(chosen) if once else int(blocks.sum()) * size) * step
            if name not in memory or len(memory[name]) < needed:
                memory[name] = np.empty(needed, dtype=np.uint8)
            outs[name] = memory[name], (np.arange(len(chosen)) if once else begins * size) * step
        source.read(chosen, generations[some], first, counts, outs, drawn=np.bincount(place))
        # The blocks of each trajectory from `low` on, one trajectory after another; columns per trajectory have one
        # block of each.
        staged, bad = extent.copy(), 0
        for once in (False, True):
            part = [i for i, name in enumerate(sources) if schema[name].trajectory is once]
            if not part:
                continue
            plan = columns[part]
            for row, i in zip(plan, part, strict=True):
                step = schema[sources[i]].step_bytes
                row[BASE] = data_address(memory[sources[i]])
                row[STRIDE] = step if once else size * step
                row[STEP_STRIDE] = step
                row[BLOCKS] = len(chosen) if once else int(blocks.sum())
            staged[:, 1] = np.arange(len(chosen)) if once else begins - low
            ids = np.arange(len(chosen) if once else int(blocks.sum()), dtype=np.int32)
            bad += threads.gather(plan, place, anchors, staged, ids, size, self._row_bytes, rows=rows)
        self._spare.append(memory)
        return bad
