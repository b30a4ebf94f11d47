"""Batches for a GPU that are drawn, looked up and queued in one compiled call, which holds the GIL.

Without it, a thread of Python that is busy would get it, and keep it for milliseconds. The call needs a read ticket,
because the GPU reads later; the driver is never called under the table's lock.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Hashable, Mapping
from typing import Any

import numpy as np
import torch
from numba import carray, njit

from gear_loader.native.compile import compiled
from gear_loader.native.driver_calls import call
from gear_loader.native.gathering import resolve
from gear_loader.native.memory import pointer
from gear_loader.native.random import uniform_rows
from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array

__all__ = [
    "BUSY",
    "FUNCTIONS",
    "LATE",
    "REFUSED",
    "QueuedBatch",
    "queue_drawn",
    "queue_uniform",
    "queue_update",
]

FUNCTIONS = {
    name: place
    for place, name in enumerate(
        (
            "cuEventQuery",
            "cuStreamWaitEvent",
            "cuGraphLaunch",
            "cuEventRecord",
            "cuMemcpyDtoDAsync_v2",
        )
    )
}
"""Functions of the driver, by their places in the words of a batch and of an update."""
_QUERY, _WAIT, _LAUNCH, _RECORD, _COPY = range(5)
_STREAM, _GRAPH, _FILLED, _RELEASED, _CODE = range(5, 10)
_NAMES, _EXTENT, _IDS, _COUNT, _WIDTH, _FIRST, _LAST, _ONCE = range(10, 18)
_RANDOM, _BETA, _MEMORY, _BYTES = range(18, 22)
_NUM_WORDS = 22
_GIVEN, _DONE = _FILLED, _RELEASED
"""Of an update, which has these two events only."""

BUSY, REFUSED, LATE = -1, -2, -3
"""Results of the loops: the GPU still reads the memory that they write, and nothing was done; the driver refuses; the
GPU has reported an error of earlier work, and nothing was done."""


class _Queued:
    """A graph that a compiled call launches.

    Args:
        functions: addresses of `FUNCTIONS`. graph: handle of the executable graph. stream: that it is launched on.

    Attributes:
        graph, stream: as given. words: int64, for the loop.
    """

    __slots__ = ("graph", "stream", "words")

    def __init__(self, functions: Mapping[str, int], graph: int, stream: int) -> None:
        self.graph, self.stream = graph, stream
        self.words: Array = np.zeros(_NUM_WORDS, dtype=np.int64)
        self.words[[_STREAM, _GRAPH]] = stream, graph
        for name, place in FUNCTIONS.items():
            self.words[place] = functions[name]

    @property
    def code(self) -> int:
        """What the driver has returned last."""
        return int(self.words[_CODE])


class QueuedBatch(_Queued):
    """Where the rows of a batch go, in pinned memory, and the graph that gathers them.

    Args:
        rows: int64 [6, B], ids: int32 [B, K], as a GPU's buffers have them. reach: of the windows.
        draw: pinned int64 [3] and float32 [1], which a draw on the GPU reads, see `DrawPlaces`.
        memory: uint8 tensor on the GPU, in which that puts the rows. weights: the byte of it where their weights begin,
            or None. drawn: key of the graph, if it begins with a draw.
        functions, graph, stream: as for `_Queued`.
        filled: event that is recorded after it. wait: waits for that, as the GPU last did.

    Attributes:
        count: rows of the batch, B. memory, drawn, weights: as given.
    """

    __slots__ = ("_arrays", "count", "drawn", "memory", "wait", "weights")

    def __init__(
        self,
        rows: Array,
        ids: Array,
        reach: Reach,
        *,
        draw: tuple[Array, Array],
        memory: torch.Tensor,
        drawn: Hashable,
        weights: int | None,
        functions: Mapping[str, int],
        graph: int,
        stream: int,
        filled: int,
        wait: Callable[[], object],
    ) -> None:
        super().__init__(functions, graph, stream)
        self._arrays, self.count, self.wait = (rows, ids, *draw), rows.shape[1], wait
        self.memory, self.drawn, self.weights = memory, drawn, weights
        self.words[_FILLED] = filled
        self.words[[_NAMES, _EXTENT, _IDS]] = rows.ctypes.data, rows[3:].ctypes.data, ids.ctypes.data
        self.words[[_COUNT, _WIDTH]] = self.count, ids.shape[1]
        self.words[[_FIRST, _LAST, _ONCE]] = reach
        self.words[[_RANDOM, _BETA]] = draw[0].ctypes.data, draw[1].ctypes.data
        self.words[[_MEMORY, _BYTES]] = memory.data_ptr(), memory.numel()

    def after(self, released: int) -> None:
        """Let the work come after an event; 0: after none."""
        self.words[_RELEASED] = released


@njit(inline="always")  # type: ignore[untyped-decorator]
def _launch(words: Any, ended: Any, copy: Any) -> Any:
    """Queue the graph after the last user of the batch, and record that it is filled; 0 or REFUSED.

    Args:
        ended, copy: see `queue_drawn`; 0: there is none.
    """
    stream, code = words[_STREAM], 0
    if words[_RELEASED] != 0:
        code = call(words[_WAIT], stream, words[_RELEASED], 0, 0)
    if code == 0 and ended != 0:
        code = call(words[_WAIT], stream, ended, 0, 0)
    if code == 0:
        code = call(words[_LAUNCH], words[_GRAPH], stream, 0, 0)
    if code == 0 and copy != 0:
        code = call(words[_COPY], copy, words[_MEMORY], words[_BYTES], stream)
    if code == 0:
        code = call(words[_RECORD], words[_FILLED], stream, 0, 0)
    if code == 0 and ended != 0:
        code = call(words[_RECORD], ended, stream, 0, 0)
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
    if call(words[_QUERY], words[_FILLED], 0, 0, 0) != 0:
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
    return bad if bad > 0 else _launch(words, 0, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _reported(words: Any, ended: Any, status: Any, clean: Any) -> Any:
    """Whether earlier work has ended and reported an error; see `CudaLeaves.raise_late`."""
    if call(words[_QUERY], ended, 0, 0, 0) != 0:
        return False
    return np.any(carray(pointer(status), (len(clean),), np.int64) != clean)


@functools.partial(compiled, nogil=False)
def queue_drawn(  # type: ignore[no-untyped-def]
    index, words, ended, status, clean, leaf_key, step, anchor_key, beta, copy
):
    """Let a GPU draw a batch by priority, and gather it.

    Args:
        index: as for `queue_uniform`. words: of a `QueuedBatch` whose graph draws.
        ended: event that is recorded after all work on the priorities. status: address of pinned int64, which that
            writes. clean: int64, what they are without an error.
        leaf_key, step, anchor_key, beta: what the draw reads. copy: address on the GPU that gets a copy of the rows; 0:
            none does.

    Returns:
        0, BUSY, LATE or REFUSED.
    """
    if call(words[_QUERY], words[_FILLED], 0, 0, 0) != 0:
        return BUSY
    if _reported(words, ended, status, clean):
        return LATE
    random = carray(pointer(words[_RANDOM]), (3,), np.int64)
    random[0], random[1], random[2] = leaf_key, step, anchor_key
    carray(pointer(words[_BETA]), (1,), np.float32)[0] = beta
    return _launch(words, ended, copy)


class QueuedUpdate(_Queued):
    """An update of priorities that is copied, and whose graph is launched, by one compiled call.

    Args:
        functions, graph, stream: as for `_Queued`.
        given, done: events that are recorded when the tensors are copied, and after the update.
    """

    __slots__ = ()

    def __init__(
        self, functions: Mapping[str, int], *, graph: int, stream: int, given: int, done: int
    ) -> None:
        super().__init__(functions, graph, stream)
        self.words[[_GIVEN, _DONE]] = given, done


@functools.partial(compiled, nogil=False)
def queue_update(words, consumer, copies, ended, status, clean):  # type: ignore[no-untyped-def]
    """Copy the tensors of an update on the stream that has written them, and queue it on its own.

    Args:
        words: of a `QueuedUpdate`. consumer: stream that has written the tensors.
        copies: int64 [n, 3], target, source and bytes. ended, status, clean: as for `queue_drawn`.

    Returns:
        0, LATE or REFUSED.
    """
    if _reported(words, ended, status, clean):
        return LATE
    stream, given, done = words[_STREAM], words[_GIVEN], words[_DONE]
    code = call(words[_WAIT], consumer, done, 0, 0)
    for i in range(len(copies)):
        if code == 0:
            code = call(words[_COPY], copies[i, 0], copies[i, 1], copies[i, 2], consumer)
    if code == 0:
        code = call(words[_RECORD], given, consumer, 0, 0)
    if code == 0:
        code = call(words[_WAIT], stream, given, 0, 0)
    if code == 0:
        code = call(words[_WAIT], stream, ended, 0, 0)
    if code == 0:
        code = call(words[_LAUNCH], words[_GRAPH], stream, 0, 0)
    if code == 0:
        code = call(words[_RECORD], done, stream, 0, 0)
    if code == 0:
        code = call(words[_RECORD], ended, stream, 0, 0)
    words[_CODE] = code
    return 0 if code == 0 else REFUSED
