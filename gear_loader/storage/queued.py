"""Batches for a GPU that are drawn, looked up and queued in one compiled call, which holds the GIL.

Without it, a thread of Python that is busy would get it, and keep it for milliseconds. The call needs a read ticket,
because the GPU reads later; the driver is never called under the table's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
from numba import carray, njit

from gear_loader.native.compile import compiled
from gear_loader.native.driver_calls import call
from gear_loader.native.gathering import resolve
from gear_loader.native.memory import pointer
from gear_loader.native.random import uniform_rows
from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array

__all__ = ["BUSY", "FUNCTIONS", "REFUSED", "QueuedBatch", "queue_uniform"]

FUNCTIONS = {
    name: place
    for place, name in enumerate(
        (
            "cuEventQuery",
            "cuStreamWaitEvent",
            "cuGraphLaunch",
            "cuEventRecord",
        )
    )
}
"""Functions of the driver, by their places in the words of a batch."""
_QUERY, _WAIT, _LAUNCH, _RECORD = range(4)
_STREAM, _GRAPH, _FILLED, _RELEASED, _CODE = range(4, 9)
_NAMES, _EXTENT, _IDS, _COUNT, _WIDTH, _FIRST, _LAST, _ONCE = range(9, 17)
_NUM_WORDS = 17

BUSY, REFUSED = -1, -2
"""Results of the loops: the GPU still reads the memory that they write, and nothing was done; the driver refuses."""


class QueuedBatch:
    """Where the rows of a batch go, in pinned memory, and the graph that gathers them.

    Args:
        rows: int64 [6, B], ids: int32 [B, K], as a GPU's buffers have them. reach: of the windows.
        functions: addresses of `FUNCTIONS`. graph: handle of the executable graph. stream: that it is launched on.
        filled: event that is recorded after it. wait: waits for that, as the GPU last did.

    Attributes:
        count: rows of the batch, B. graph: as given. words: int64, for the loops.
    """

    __slots__ = ("_arrays", "count", "graph", "wait", "words")

    def __init__(
        self,
        rows: Array,
        ids: Array,
        reach: Reach,
        *,
        functions: Mapping[str, int],
        graph: int,
        stream: int,
        filled: int,
        wait: Callable[[], object],
    ) -> None:
        self._arrays, self.count, self.graph, self.wait = (rows, ids), rows.shape[1], graph, wait
        self.words: Array = np.zeros(_NUM_WORDS, dtype=np.int64)
        for name, place in FUNCTIONS.items():
            self.words[place] = functions[name]
        self.words[[_STREAM, _GRAPH, _FILLED]] = stream, graph, filled
        self.words[[_NAMES, _EXTENT, _IDS]] = rows.ctypes.data, rows[3:].ctypes.data, ids.ctypes.data
        self.words[[_COUNT, _WIDTH]] = self.count, ids.shape[1]
        self.words[[_FIRST, _LAST, _ONCE]] = reach

    def after(self, released: int) -> None:
        """Let the work come after an event; 0: after none."""
        self.words[_RELEASED] = released

    @property
    def code(self) -> int:
        """What the driver has returned last."""
        return int(self.words[_CODE])


@njit(inline="always")  # type: ignore[untyped-decorator]
def _launch(words: Any) -> Any:
    """Queue the graph after the last user of the batch, and record that it is filled; 0 or REFUSED."""
    code = 0
    if words[_RELEASED] != 0:
        code = call(words[_WAIT], words[_STREAM], words[_RELEASED], 0)
    if code == 0:
        code = call(words[_LAUNCH], words[_GRAPH], words[_STREAM], 0)
    if code == 0:
        code = call(words[_RECORD], words[_FILLED], words[_STREAM], 0)
    words[_CODE] = code
    return 0 if code == 0 else REFUSED


@functools.partial(compiled, nogil=False)
def queue_uniform(  # type: ignore[no-untyped-def]
    index, words, items, block_steps, num_blocks, steps, anchor, first, stride, seed, step, epoch
):
    """Draw a batch as `uniform_rows` does, look its rows up as `resolve` does, and queue its gather. Other threads may
    capture graphs if the caller has said so, see `gear_loader.utils.captures`.

    Args:
        index: places of `counters`, `extent`, `block_ids` and `generation`. words: of a `QueuedBatch`.
        items: places of `slots`, `lengths`, `generations` and `sums`, as for `uniform_rows`.
        block_steps, num_blocks: as for `resolve`.
        steps, anchor, seed, step, epoch: as for `uniform_rows`. first, stride: as for `uniform_batch`.

    Returns:
        0, BUSY, REFUSED, or the number of invalid windows, which are not queued.
    """
    if call(words[_QUERY], words[_FILLED], 0, 0) != 0:
        return BUSY
    count, width = words[_COUNT], words[_WIDTH]
    names = carray(pointer(words[_NAMES]), (3, count), np.int64)
    uniform_rows(
        carray(pointer(items[0, 0]), (items[0, 1],), np.int64),
        carray(pointer(items[1, 0]), (items[1, 1],), np.int64),
        carray(pointer(items[2, 0]), (items[2, 1],), np.int64),
        carray(pointer(items[3, 0]), (items[3, 1],), np.int64),
        steps,
        anchor,
        seed,
        step,
        epoch,
        names,
    )
    if first != 0 or stride != 1:
        for b in range(count):
            names[1, b] = first + stride * names[1, b]
    bad = resolve(
        names[0],
        names[1],
        carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64),
        carray(pointer(index[2, 0]), (index[2, 1],), np.int32),
        block_steps,
        words[_FIRST],
        words[_LAST],
        carray(pointer(words[_EXTENT]), (count, 3), np.int64),
        carray(pointer(words[_IDS]), (count, width), np.int32),
        num_blocks,
        words[_ONCE] != 0,
    )
    return bad if bad > 0 else _launch(words)
