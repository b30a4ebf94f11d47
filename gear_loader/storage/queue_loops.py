"""The compiled loops (numba) that draw batches for a GPU, look them up and queue them, holding the GIL.

Without it, a thread of Python that is busy would get it, and keep it for milliseconds. The calls need a read ticket,
because the GPU reads later; the driver is never called under the table's lock.
"""

from __future__ import annotations

import functools
from typing import Any

import numpy as np
from numba import carray, njit

from gear_loader.kernels import packed_plan, uniform_reference
from gear_loader.native.compile import compiled
from gear_loader.native.driver_calls import call
from gear_loader.native.gathering import resolve
from gear_loader.native.memory import pointer, prefetch
from gear_loader.native.packed_lines import (
    PLANNED_BAD,
    PLANNED_PIECES,
    PLANNED_STEPS,
    PLANNED_WIDTH,
    PLANNED_WORDS,
    plan_rows,
)
from gear_loader.storage.inline import draw_uniform, draw_weighed
from gear_loader.utils.captures import RELAXED

FUNCTIONS = {
    name: place
    for place, name in enumerate(
        (
            "cuEventQuery",
            "cuStreamWaitEvent",
            "cuGraphLaunch",
            "cuEventRecord",
            "cuMemcpyDtoDAsync_v2",
            "cuThreadExchangeStreamCaptureMode",
            "cuStreamIsCapturing",
        )
    )
}
"""Functions of the driver, by their places in the words of a batch and of an update."""
_QUERY, _WAIT, _LAUNCH, _RECORD, _COPY, _EXCHANGE, _CAPTURING = range(7)
SELF, MODE, STREAM, GRAPH, FILLED, RELEASED, CODE, ASKED, READ, EARLIER = range(7, 17)
MOST_ASKED = 2
"""Events of earlier batches that a loop asks for, from EARLIER on."""
NAMES, CAPACITY, COUNT, WEIGHTS, PACKED = range(18, 23)
EXTENT, IDS, WIDTH, FIRST, LAST, ONCE = range(23, 29)  # of padded batches
RANDOM, BETA, MEMORY, BYTES = range(29, 33)  # of batches that the GPU draws
WINDOW, COLUMNS, NUM_COLUMNS, STARTS, PIECES, NUM_PIECES = range(23, 29)  # of packed batches
LISTS, NUM_WORDS, SPANS, PLANNED, HEADER, ADJOIN, MOST_STEPS = range(29, 36)
DRAWN, DRAWS = 36, 37  # of uniform rows: a graph that draws too; whether the GPU has drawn the last batch
OWN, NUMBER = 38, 39  # whether to ask for the batch's own event too; of the launch that drew the last batch
WORDS = 40
LAST_ON, BEHIND, NOTED, LAUNCHES, COMPLETE, STATE = range(3, 9)
"""Places in the `state` of `queue_drawn`, after those of the GPU's status."""
GIVEN, DONE, WAITS, LAUNCHED, UNRECORDED = FILLED, RELEASED, NAMES, CAPACITY, COUNT
"""Of an update: its two events; whether its tensors are copied, and it is not launched yet; number of the launch, and
whether `DONE` is not recorded after it."""

BUSY, REFUSED, IN_STEPS = -1, -2, -3
"""Results of the loops: the GPU still reads the memory that they write, and nothing was done; the driver refuses;
nothing was queued, because the batch is to be made in steps, which also raise what the GPU has reported."""
_NOT_READY = 600
"""CUDA_ERROR_NOT_READY."""

_AHEAD = 16
"""Trajectories before one is listed when its extent is requested."""
assert uniform_reference.HEADER == 2
assert (uniform_reference.SLOTS, uniform_reference.GENERATIONS, uniform_reference.STEPS) == (0, 1, 2)
assert (uniform_reference.FINALS, uniform_reference.COUNTS, uniform_reference.SUMS) == (3, 4, 5)
assert (uniform_reference.ARRAYS, uniform_reference.RANDOM) == (6, 6)
_TABLE, _PIECE = 6, 5
assert (_TABLE, _PIECE) == (packed_plan.TABLE_WIDTH, packed_plan.PIECE_WIDTH)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _words(address: Any) -> Any:
    """The words of a batch."""
    return carray(pointer(address), (WORDS,), np.int64)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _relax(words: Any) -> Any:
    """Let other threads capture graphs while events are asked for, see `gear_loader.utils.captures`; for `_restore`."""
    words[MODE] = RELAXED  # of which the driver reads, and writes, the lower half
    return call(words[_EXCHANGE], words[SELF] + 8 * MODE, 0, 0, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _restore(words: Any, relaxed: Any) -> None:
    """End what `_relax` has begun."""
    if relaxed == 0:
        call(words[_EXCHANGE], words[SELF] + 8 * MODE, 0, 0, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _query(words: Any, event: Any, asked: Any) -> Any:
    """Ask for an event, and if it has happened for so many of earlier batches, until one has not; what the driver has
    returned last, and how many of them have."""
    code, read = call(words[_QUERY], event, 0, 0, 0), -1
    while code == 0:
        read += 1
        if read == asked:
            break
        code = call(words[_QUERY], words[EARLIER + read], 0, 0, 0)
    return code, read


@njit(inline="always")  # type: ignore[untyped-decorator]
def _look_each(words: Any, others: Any) -> Any:
    """Whether the GPU has read the memory of the batch, and of others: 0, BUSY, or IN_STEPS if it has failed. READ is
    then how many earlier batches it has read.

    Args:
        others: int64 [n], addresses of their words.
    """
    own, asked, code = words[OWN] != 0, words[ASKED], 0
    words[READ] = 0
    if not own and asked == 0:
        return 0
    relaxed = _relax(words)
    if own:
        code, words[READ] = _query(words, words[FILLED], asked)
    else:
        code, read = _query(words, words[EARLIER], 0)
        while read == 0:
            words[READ] += 1
            if words[READ] == asked:
                break
            code, read = _query(words, words[EARLIER + words[READ]], 0)
    for other in others:
        if own and words[READ] >= 0 and (code == 0 or code == _NOT_READY):
            code, read = _query(words, _words(other)[FILLED], 0)
            words[READ] = words[READ] if read == 0 else -1
    _restore(words, relaxed)
    if code != 0 and code != _NOT_READY:
        return IN_STEPS
    return BUSY if words[READ] < 0 else 0


@njit(inline="always")  # type: ignore[untyped-decorator]
def _look(words: Any) -> Any:
    """`_look_each` of one batch."""
    return _look_each(words, words[:0])


@njit(inline="always")  # type: ignore[untyped-decorator]
def _record_ended(words: Any, ended: Any, state: Any) -> Any:
    """Record `ended`, unless it is recorded after all work on the priorities; what the driver returns."""
    if state[BEHIND] == 0:
        return 0
    state[BEHIND] = 0
    return call(words[_RECORD], ended, state[LAST_ON], 0, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _wait_ended(words: Any, stream: Any, ended: Any, state: Any) -> Any:
    """Let a stream wait for earlier work on the priorities if that was on another one; what the driver returns."""
    if state[LAST_ON] == stream:
        return 0
    code = _record_ended(words, ended, state)
    return call(words[_WAIT], stream, ended, 0, 0) if code == 0 else code


@njit(inline="always")  # type: ignore[untyped-decorator]
def _launch(words: Any, graph: Any, ended: Any, state: Any, copy: Any, update: Any, joined: Any) -> Any:
    """Queue a graph after the last user of the batch, and record that it is filled; 0 or REFUSED.

    Args:
        graph: of the batch.
        ended, state, copy, update, joined: see `queue_drawn`; 0: there is none.
    """
    stream, code = words[STREAM], 0
    waits = ended != 0 and update[WAITS] != 0
    if words[RELEASED] != 0:
        code = call(words[_WAIT], stream, words[RELEASED], 0, 0)
    if code == 0 and ended != 0:
        code = _wait_ended(words, stream, ended, state)
    if code == 0 and waits:
        code = call(words[_WAIT], stream, update[GIVEN], 0, 0)
    if waits and joined != 0:
        graph = joined
    elif code == 0 and waits:
        code = call(words[_LAUNCH], update[GRAPH], stream, 0, 0)
    if code == 0:
        code = call(words[_LAUNCH], graph, stream, 0, 0)
    if code == 0 and ended != 0:
        state[LAST_ON], state[BEHIND] = stream, 1
        state[LAUNCHES] += 1
        words[NUMBER] = state[LAUNCHES]
        if waits:
            update[WAITS], update[UNRECORDED], update[LAUNCHED] = 0, 1, state[LAUNCHES]
    if code == 0 and copy != 0:
        code = call(words[_COPY], copy, words[MEMORY], words[BYTES], stream)
    if code == 0:
        code = call(words[_RECORD], words[FILLED], stream, 0, 0)
    words[CODE] = code
    return 0 if code == 0 else REFUSED


@njit(inline="always")  # type: ignore[untyped-decorator]
def _launch_joined(members: Any, graph: Any) -> Any:
    """`_launch` of a graph of several batches, int64 [n], addresses of their words."""
    own, code = _words(members[0]), 0
    for member in members:
        released = _words(member)[RELEASED]
        if code == 0 and released != 0:
            code = call(own[_WAIT], own[STREAM], released, 0, 0)
    if code == 0:
        code = call(own[_LAUNCH], graph, own[STREAM], 0, 0)
    for member in members:
        if code == 0:
            code = call(own[_RECORD], _words(member)[FILLED], own[STREAM], 0, 0)
    own[CODE] = code
    return 0 if code == 0 else REFUSED


@njit(inline="always")  # type: ignore[untyped-decorator]
def _names(words: Any) -> Any:
    """Where the names of a batch go, int64 [3, K]."""
    return carray(pointer(words[NAMES]), (3, words[CAPACITY]), np.int64)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _look_up(index: Any, words: Any, rows: Any, block_steps: Any, num_blocks: Any) -> Any:
    """Write the names of drawn rows, and what the gather needs of them: 0, IN_STEPS, or the number of invalid windows.

    Args:
        rows: int64 [at least 3, B], slots, anchors and generations; may be the names. The others: as for
            `queue_uniform`.
    """
    count, names = words[COUNT], _names(words)
    if rows.ctypes.data != names.ctypes.data:
        for i in range(3):
            for b in range(count):
                names[i, b] = rows[i, b]
    extent = carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64)
    ids = carray(pointer(index[2, 0]), (index[2, 1],), np.int32)
    if words[PACKED] != 0:
        return _plan(words, rows, extent, ids, block_steps, num_blocks)
    return resolve(
        rows[0],
        rows[1],
        extent,
        ids,
        block_steps,
        words[FIRST],
        words[LAST],
        carray(pointer(words[EXTENT]), (count, 3), np.int64),
        carray(pointer(words[IDS]), (count, words[WIDTH]), np.int32),
        num_blocks,
        words[ONCE] != 0,
    )


@njit  # type: ignore[untyped-decorator]
def _plan(words: Any, rows: Any, extent: Any, ids: Any, block_steps: Any, num_blocks: Any) -> Any:
    """`plan_rows` of a packed batch."""
    count = words[COUNT]
    planned = carray(pointer(words[PLANNED]), (PLANNED_WIDTH,), np.int64)
    plan_rows(
        rows[0],
        rows[1],
        False,
        carray(pointer(words[WINDOW]), (3,), np.int64),
        extent,
        ids,
        block_steps,
        num_blocks,
        words[ADJOIN] != 0,
        carray(pointer(words[COLUMNS]), (words[NUM_COLUMNS], _TABLE), np.int64),
        carray(pointer(words[SPANS]), (2, count), np.int64),
        carray(pointer(words[STARTS]), (count + 1,), np.int32),
        carray(pointer(words[PIECES]), (words[NUM_PIECES], _PIECE), np.int32),
        carray(pointer(words[LISTS]), (words[NUM_WORDS],), np.int64),
        words[HEADER],
        planned,
    )
    if planned[PLANNED_BAD] != 0:
        return planned[PLANNED_BAD]
    listed = planned[PLANNED_PIECES] <= words[NUM_PIECES] and planned[PLANNED_WORDS] != 0
    if listed and planned[PLANNED_STEPS] <= words[MOST_STEPS] and planned[PLANNED_WORDS] <= words[NUM_WORDS]:
        return 0
    return IN_STEPS


@functools.partial(compiled, nogil=False)
def queue_uniform(  # type: ignore[no-untyped-def]
    index, members, items, block_steps, num_blocks, steps, anchor, first, stride, seed, numbers, epoch, held
):
    """Draw batches with as many rows each as `uniform_rows` does, look the rows up, and queue their gathers.

    Or tell the GPU what to draw, which then does the same.

    Args:
        index: places of `counters`, `extent`, `block_ids`, `generation` and `sequence`.
        members: int64 [1 + k + g], batches that one launch queues; addresses of the words of a `QueuedBatch` each; the
            graphs of launches that queue several.
        items: places of `slots`, `lengths`, `generations` and `sums`, as for `uniform_rows`.
        block_steps, num_blocks: as for `resolve`.
        steps, anchor, seed, epoch: as for `uniform_rows`. numbers: int64 [k], `step` of each batch.
        first, stride: as for `uniform_batch`.
        held: int64 [3], what the GPU draws from: its address there, its trajectories, its items; see
            `gear_loader.kernels.uniform`. If the address is 0, it does not; else all batches have a graph that draws,
            and those of several draw too.

    Returns:
        0, BUSY, REFUSED, IN_STEPS, or the number of invalid windows. Only if it is 0 or REFUSED anything is queued.
    """
    count = len(numbers)
    looked = _look_each(_words(members[1]), members[2 : 1 + count])
    if looked != 0:
        return looked
    for i in range(count):
        words = _words(members[1 + i])
        words[DRAWS] = held[0] != 0
        if words[DRAWS] != 0:
            random = carray(pointer(words[RANDOM]), (6,), np.int64)
            random[0], random[1], random[2] = seed, numbers[i], epoch
            random[3], random[4], random[5] = held[0], held[1], held[2]
            continue
        rows = (
            _names(words) if words[CAPACITY] == words[COUNT] else np.empty((3, words[COUNT]), dtype=np.int64)
        )
        draw_uniform(items, steps, anchor, first, stride, seed, numbers[i], epoch, rows)
        bad = _look_up(index, words, rows, block_steps, num_blocks)
        if bad != 0:
            return bad
    code, together = 0, members[0]
    for i in range(0, count, together):
        if code == 0 and together > 1:
            end = 1 + min(i + together, count)
            code = _launch_joined(members[1 + i : end], members[1 + count + i // together])
        elif code == 0:
            words = _words(members[1 + i])
            graph = words[GRAPH] if held[0] == 0 else words[DRAWN]
            code = _launch(words, graph, 0, words, 0, words, 0)
    return code


@compiled
def list_drawn(index, items, out) -> None:  # type: ignore[no-untyped-def]
    """List what a GPU draws uniform rows from; see `gear_loader.kernels.uniform_reference`.

    Args:
        index, items: as for `queue_uniform`. out: int64 [HEADER + ARRAYS n], output.
    """
    slots, counts, generations, sums = (
        carray(pointer(items[0, 0]), (items[0, 1],), np.int64),
        carray(pointer(items[1, 0]), (items[1, 1],), np.int64),
        carray(pointer(items[2, 0]), (items[2, 1],), np.int64),
        carray(pointer(items[3, 0]), (items[3, 1],), np.int64),
    )
    extent = carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64)
    size, before = len(slots), sums[0] - counts[0]
    out[0], out[1] = index[1, 0], index[2, 0]
    arrays = out[2:].reshape((6, size))
    for i in range(size):
        if i + _AHEAD < size:
            prefetch(np.uint64(index[1, 0]) + np.uint64(slots[i + _AHEAD]) * np.uint64(24))
        slot = slots[i]
        arrays[0, i], arrays[1, i] = slot, generations[i]
        arrays[2, i], arrays[3, i] = extent[slot, 0], extent[slot, 2]
        arrays[4, i], arrays[5, i] = counts[i], sums[i] - before


@functools.partial(compiled, nogil=False)
def queue_prioritized(  # type: ignore[no-untyped-def]
    index, words, tree, block_steps, num_blocks, wide_depth, item_steps, anchor, key, anchor_key, step, least, beta,
    scale, drawn,
):  # fmt: skip
    """`queue_uniform` of rows that the host draws by priority.

    Args:
        index, words, block_steps, num_blocks: as for `queue_uniform`. The others: as for `prioritized_batch`.

    Returns:
        As `queue_uniform`; also IN_STEPS if every leaf is 0.
    """
    looked = _look(words)
    if looked != 0:
        return looked
    if not draw_weighed(
        index, tree, wide_depth, item_steps, anchor, key, anchor_key, step, least, beta, scale, drawn
    ):
        return IN_STEPS
    if words[WEIGHTS] != 0:
        count = words[COUNT]
        carray(pointer(words[WEIGHTS]), (count,), np.float32)[:] = drawn[4].view(np.float32)[:count]
    bad = _look_up(index, words, drawn, block_steps, num_blocks)
    return bad if bad != 0 else _launch(words, words[GRAPH], 0, words, 0, words, 0)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _reported(words: Any, ended: Any, status: Any, state: Any) -> Any:
    """Whether earlier work has ended and reported an error; see `CudaLeaves.raise_late`. Mostly there is none, and the
    driver is not asked."""
    if np.all(carray(pointer(status), (LAST_ON,), np.int64) == state[:LAST_ON]):
        return False
    if state[NOTED] == 0:  # else the event is on its way, and to record it anew would put it off
        state[NOTED] = 1
        if _record_ended(words, ended, state) != 0:
            return True
    relaxed = _relax(words)
    code = _query(words, ended, 0)[0]
    _restore(words, relaxed)
    return code == 0


@functools.partial(compiled, nogil=False)
def queue_drawn(  # type: ignore[no-untyped-def]
    index, words, ended, status, state, leaf_key, step, anchor_key, beta, copy, update, joined
):
    """Let a GPU draw a batch by priority, and gather it.

    Args:
        index: as for `queue_uniform`. words: of a `QueuedBatch` whose graph draws.
        ended: event that is recorded after all work on the priorities when somebody asks for it. status: address of
            pinned int64, which that work writes. state: int64 [STATE], what they are without an error; then the stream
            of the last work, if a loop has queued it, else 0: later work there need not wait; whether `ended` is not
            recorded after that; whether it has been asked for since an error was seen; number of the last launch;
            number of one that the GPU is through with.
        leaf_key, step, anchor_key, beta: what the draw reads. copy: address on the GPU that gets a copy of the rows; 0:
            none does.
        update: words of a `QueuedUpdate` on the same stream; if it waits, it is launched before the draw.
        joined: a graph of both; 0: there is none.

    Returns:
        0, BUSY, IN_STEPS or REFUSED.
    """
    looked = _look(words)
    if looked != 0:
        return looked
    state[COMPLETE] = max(state[COMPLETE], words[NUMBER])
    if _reported(words, ended, status, state):
        return IN_STEPS
    random = carray(pointer(words[RANDOM]), (3,), np.int64)
    random[0], random[1], random[2] = leaf_key, step, anchor_key
    carray(pointer(words[BETA]), (1,), np.float32)[0] = beta
    return _launch(words, words[GRAPH], ended, state, copy, update, joined)


@functools.partial(compiled, nogil=False)
def copy_update(words, consumer, copies, ended, status, state):  # type: ignore[no-untyped-def]
    """Copy the tensors of an update on the stream that has written them; from here on it waits.

    Args:
        words: of a `QueuedUpdate`. consumer: stream that has written the tensors.
        copies: int64 [n, 3], target, source and bytes. ended, status, state: as for `queue_drawn`.

    Returns:
        0, IN_STEPS or REFUSED. IN_STEPS also if the stream is capturing, which `refuse_capture` says.
    """
    words[MODE] = 0
    call(words[_CAPTURING], consumer, words[SELF] + 8 * MODE, 0, 0)  # an error is left to the next call
    if words[MODE] != 0 or _reported(words, ended, status, state):
        return IN_STEPS
    code = 0
    if words[LAUNCHED] > state[COMPLETE]:  # else the GPU has read the last tensors in the same memory
        if words[UNRECORDED] != 0:
            code = call(words[_RECORD], words[DONE], words[STREAM], 0, 0)
            words[UNRECORDED] = 0
        if code == 0:
            code = call(words[_WAIT], consumer, words[DONE], 0, 0)
    for i in range(len(copies)):
        if code == 0:
            code = call(words[_COPY], copies[i, 0], copies[i, 1], copies[i, 2], consumer)
    if code == 0:
        code = call(words[_RECORD], words[GIVEN], consumer, 0, 0)
    words[CODE], words[WAITS] = code, code == 0
    return 0 if code == 0 else REFUSED


@functools.partial(compiled, nogil=False)
def launch_update(words, ended, state):  # type: ignore[no-untyped-def]
    """Launch an update that waits, on its own stream; 0 or REFUSED.

    Args:
        words: of a `QueuedUpdate`. ended, state: as for `queue_drawn`.
    """
    if words[WAITS] == 0:
        return 0
    stream = words[STREAM]
    code = call(words[_WAIT], stream, words[GIVEN], 0, 0)
    if code == 0:
        code = _wait_ended(words, stream, ended, state)
    if code == 0:
        code = call(words[_LAUNCH], words[GRAPH], stream, 0, 0)
    if code == 0:
        state[LAST_ON], state[BEHIND] = stream, 1
        state[LAUNCHES] += 1
        words[WAITS], words[UNRECORDED], words[LAUNCHED] = 0, 1, state[LAUNCHES]
    words[CODE] = code
    return 0 if code == 0 else REFUSED
