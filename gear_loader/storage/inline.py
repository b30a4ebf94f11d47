"""Batches that are drawn and gathered in one compiled call.

A small batch needs no read ticket: the call holds the lock, under which no block is reused. For others the caller
begins a read ticket first. If the index is not as the caller knows it, nothing is done: the caller then draws and
gathers in steps, which also recovers the index.

The loops get arrays as `Places`, their addresses: numba takes 65 ns to unpack one array, and there are up to eighteen.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import numpy as np
from numba import carray, njit

from gear_loader.kernels.plan import WIDTH
from gear_loader.native import threads
from gear_loader.native.compile import compiled
from gear_loader.native.gathering import STREAM_BATCH_BYTES, gather_batch
from gear_loader.native.memory import pointer
from gear_loader.native.packed import gather_packed, measure, place_rows, summed
from gear_loader.native.random import uniform_rows
from gear_loader.native.sum_tree import draw_rows, importance
from gear_loader.storage.counters import (
    DIGEST,
    DIRTY,
    INITIALIZED,
    NUM_SAMPLED,
    NUM_SPILLED,
    NUM_TOUCHED,
    VERSION,
)
from gear_loader.utils.arrays import Array

__all__ = [
    "HELD",
    "INLINE_BATCH_BYTES",
    "UNCHANGED",
    "InlineBatch",
    "PackedInline",
    "Places",
    "draw_uniform",
    "draw_weighed",
    "prioritized_batch",
    "uniform_batch",
    "uniform_packed",
]

assert DIGEST == 0x5FA3A687  # of the positions in `counters`, compiled into the cached machine code
assert WIDTH == 12

INLINE_BATCH_BYTES = 1 << 16
"""Largest batch that is gathered under the lock, in bytes: some 10 us, in which other processes may wait for it."""

UNCHANGED = -1
"""Result of the loops if they have done nothing."""
HELD = -2
"""Version or position for the loops if the caller holds a read ticket that began when nothing had changed."""


class Places:
    """Addresses and sizes of C-contiguous arrays.

    Attributes:
        arrays: the arrays, which are kept alive.
        table: int64 [n, 2], address and last extent of each.
    """

    __slots__ = ("arrays", "table")

    def __init__(self, *arrays: Array) -> None:
        assert all(array.flags.c_contiguous for array in arrays)
        self.arrays = arrays
        self.table: Array = np.array(
            [(array.ctypes.data, array.shape[-1]) for array in arrays], dtype=np.int64
        )


class InlineValues(Protocol):
    """What a batch has in place of records that the compiled call gathers."""

    def read(self, counts: Sequence[int] | None = None) -> None:
        """Read it, and keep it; of so many records of each column, by default of all."""

    def take(self) -> dict[str, Any]:
        """What was read, by the names of windows."""


class InlineBatch:
    """Where a batch goes; see `gear_loader.collection.collector.Buffers`.

    Args:
        columns: int64 [C, WIDTH], a gather plan's table.
        names: int64 [3, B], index, anchor and generation.
        weights: float32 [B], importance weights; [0] for batches without them.
        row_bytes: bytes of a row over all windows.
        spans, returns: as for `gather_batch`.
        values: reads what the batch has records of, under its read ticket.

    Attributes:
        count: rows of the batch, B. row_bytes, spans, returns, values: as given.
        under_lock: whether the batch is small enough to be gathered under the lock.
        places: of names, columns (as [C * WIDTH]) and weights.
    """

    __slots__ = ("_drawn", "count", "places", "returns", "row_bytes", "spans", "under_lock", "values")
    packed = False

    def __init__(
        self,
        columns: Array,
        names: Array,
        weights: Array,
        row_bytes: int,
        spans: bool | None,
        returns: bool | None,
        values: InlineValues | None = None,
    ) -> None:
        self.count, self.row_bytes = names.shape[1], row_bytes
        self.spans, self.returns, self.values = spans, returns, values
        self.under_lock = self.count * row_bytes <= INLINE_BATCH_BYTES and values is None
        self.places = Places(names, columns.reshape(-1), weights)
        self._drawn = Places(names, columns.reshape(-1)[:0], weights)

    def begin(self) -> Places:
        """Where the compiled call puts the batch; without columns, so that it only draws, if threads gather it."""
        if self.under_lock or threads.alone(self.count, self.row_bytes):
            return self.places
        return self._drawn

    def share(self, began: Places, extent: Array, ids: Array, block_steps: int) -> int:
        """Gather what the call has only drawn, by several threads, and return what `threads.gather` does; else 0.

        Args:
            began: of `begin`. extent, ids, block_steps: of the index, under the read ticket of the call.
        """
        if began is self.places:
            return 0
        names, columns, _ = self.places.arrays
        plan = columns.reshape(-1, WIDTH)
        return threads.gather(plan, names[0], names[1], extent, ids, block_steps, self.row_bytes)

    def read_values(self) -> None:
        """Let `values` read what the batch has that was gathered last, under its read ticket."""
        if self.values is not None:
            self.values.read()


class PackedInline(InlineBatch):
    """Where a packed batch goes, which is gathered under a read ticket.

    Args:
        count: rows of the batch, B. starts: int32 [more than B]. position: int32 [steps], as many as there is room for.
        columns, once: as for `gather_packed`. window: offset and length, as for `measure`.
        step_bytes: of a step over all columns. values: as for `InlineBatch`. by_row: whether each of their columns has
            a value for each row, and not for each step.

    Attributes:
        names: int64 [3, B], index, anchor and generation.
        windows, sizes: outputs of `measure`, int64 [2, B], and of `summed`, int64 [2].
    """

    __slots__ = ("_given", "by_row", "names", "sizes", "windows")
    packed = True

    def __init__(
        self,
        count: int,
        starts: Array,
        position: Array,
        columns: Array,
        once: Array,
        window: tuple[int, int],
        step_bytes: int,
        values: InlineValues | None,
        by_row: Sequence[bool] = (),
    ) -> None:
        self.by_row = by_row
        self.count, self.row_bytes, self.values, self.under_lock = count, 0, values, False
        self.spans = self.returns = None
        self.names: Array = np.zeros((3, count), dtype=np.int64)
        self.windows: Array = np.zeros((2, count), dtype=np.int64)
        self.sizes: Array = np.zeros(2, dtype=np.int64)
        self._given: Array = np.array([*window, step_bytes, 0], dtype=np.int64)
        tables = columns.reshape(-1), once.reshape(-1)
        self.places = Places(self.names, *tables, self.windows, starts, position, self.sizes, self._given)

    def begin(self) -> Places:
        self._given[3] = threads.alone_bytes()
        return self.places

    def share(self, began: Places, extent: Array, ids: Array, block_steps: int) -> int:
        size = int(self.sizes[0] * self._given[2])
        if size <= self._given[3]:
            return 0
        _, columns, once, spans, starts, position, _, _ = began.arrays
        return threads.gather_packed(
            columns.reshape(-1, WIDTH),
            once.reshape(-1, WIDTH),
            self.names[0],
            spans,
            starts,
            extent,
            ids,
            block_steps,
            position,
            size >= STREAM_BATCH_BYTES,
            np.arange(self.count),
            size=size,
        )

    def read_values(self) -> None:
        if self.values is not None:
            steps = int(self.sizes[0])
            self.values.read([self.count if each else steps for each in self.by_row])


@njit(inline="always")  # type: ignore[untyped-decorator]
def _int64(table: Any, i: Any) -> Any:
    return carray(pointer(table[i, 0]), (table[i, 1],), np.int64)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _int32(table: Any, i: Any) -> Any:
    return carray(pointer(table[i, 0]), (table[i, 1],), np.int32)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _float64(table: Any, i: Any) -> Any:
    return carray(pointer(table[i, 0]), (table[i, 1],), np.float64)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _float32(table: Any, i: Any) -> Any:
    return carray(pointer(table[i, 0]), (table[i, 1],), np.float32)


@njit(inline="always")  # type: ignore[untyped-decorator]
def _gather(
    index: Any,
    batch: Any,
    slots: Any,
    anchors: Any,
    generations: Any,
    block_steps: Any,
    spans: Any,
    returns: Any,
) -> Any:
    """`gather_batch` of a whole batch, and count its rows as drawn, if no window is invalid."""
    names = carray(pointer(batch[0, 0]), (3, batch[0, 1]), np.int64)
    columns = carray(pointer(batch[1, 0]), (batch[1, 1] // WIDTH, WIDTH), np.int64)
    extent = carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64)
    # The machine code of these loops is linked into the cached code of this file, which depends on their files too.
    ids = _int32(index, 2)
    return gather_batch(columns, slots, anchors, generations, extent, ids, block_steps, names, spans, returns)


@njit(inline="always")  # type: ignore[untyped-decorator]
def draw_uniform(
    items: Any, steps: Any, anchor: Any, first: Any, stride: Any, seed: Any, step: Any, epoch: Any, names: Any
) -> None:
    """Draw rows as `uniform_rows` does into `names`, int64 [3, n]. Arguments as of `uniform_batch`."""
    slots, lengths, generations, sums = (
        _int64(items, 0),
        _int64(items, 1),
        _int64(items, 2),
        _int64(items, 3),
    )
    uniform_rows(slots, lengths, generations, sums, steps, anchor, seed, step, epoch, names)
    if first != 0 or stride != 1:
        for b in range(names.shape[1]):
            names[1, b] = first + stride * names[1, b]


@njit(inline="always")  # type: ignore[untyped-decorator]
def draw_weighed(
    index: Any,
    tree: Any,
    wide_depth: Any,
    item_steps: Any,
    anchor: Any,
    key: Any,
    anchor_key: Any,
    step: Any,
    least: Any,
    beta: Any,
    scale: Any,
    drawn: Any,
) -> Any:
    """Draw rows as `draw_rows` does, and weigh them as `importance` does; False if every leaf is 0.

    Args:
        index: places of `counters`, `extent`, `block_ids`, `generation` and `sequence`. The others: as for
            `prioritized_batch`.
    """
    count = drawn.shape[1]
    last = drawn[4].view(np.float32)
    weighed, values = last[:count], last[count:]
    if not draw_rows(
        _float32(tree, 0),
        _float64(tree, 1),
        _int64(tree, 2),
        wide_depth,
        key,
        step,
        carray(pointer(tree[3, 0]), (wide_depth + 2, tree[3, 1]), np.float64),
        carray(pointer(tree[4, 0]), (4, tree[4, 1]), np.uint64),
        carray(pointer(tree[5, 0]), (tree[5, 1],), np.uint64),
        _float64(tree, 6),
        _float64(tree, 7),
        item_steps,
        _int32(tree, 8),
        _int32(tree, 9),
        carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64),
        _int64(index, 3),
        _int64(index, 4),
        anchor,
        anchor_key,
        drawn[:4],
        values,
    ):
        return False
    importance(values, least, beta, scale, weighed)
    return True


@njit(inline="always")  # type: ignore[untyped-decorator]
def _can_draw(counters: Any, counter: Any, value: Any) -> Any:
    """Whether nothing lies on disk only and, unless `value` is HELD, a counter has it and the index is in order."""
    unchanged = value == HELD or (
        counters[DIRTY] == 0 and counters[INITIALIZED] != 0 and counters[counter] == value
    )
    return unchanged and counters[NUM_SPILLED] == 0


@compiled
def uniform_batch(  # type: ignore[no-untyped-def]
    index,
    batch,
    items,
    spans,
    returns,
    version,
    samples,
    block_steps,
    steps,
    anchor,
    first,
    stride,
    seed,
    step,
    epoch,
):
    """Draw a batch as `uniform_rows` does, and gather it.

    Args:
        index: places of `counters`, `extent`, `block_ids`, `generation` and `sequence`.
        batch: places of an `InlineBatch`.
        items: places of `slots`, `lengths`, `generations` and `sums`, as for `uniform_rows`.
        spans, returns: as for `gather_batch`.
        version: expected value of `VERSION`, or HELD. samples: rows to add to `NUM_SAMPLED`.
        block_steps: steps of a block.
        steps, anchor, seed, step, epoch: as for `uniform_rows`, which draws the numbers of anchors. first: the step of
            the first one of a trajectory. stride: steps from one to the next.

    Returns:
        As `gather_batch`; UNCHANGED if the version is another one, the index needs recovery, or something lies on disk
        only.
    """
    counters = _int64(index, 0)
    if not _can_draw(counters, VERSION, version):
        return UNCHANGED
    names = carray(pointer(batch[0, 0]), (3, batch[0, 1]), np.int64)
    draw_uniform(items, steps, anchor, first, stride, seed, step, epoch, names)
    bad = _gather(index, batch, names[0], names[1], names[2], block_steps, spans, returns)
    if bad == 0:
        counters[NUM_SAMPLED] += samples
    return bad


@compiled
def prioritized_batch(  # type: ignore[no-untyped-def]
    index,
    batch,
    tree,
    spans,
    returns,
    position,
    samples,
    block_steps,
    wide_depth,
    item_steps,
    anchor,
    key,
    anchor_key,
    step,
    least,
    beta,
    scale,
    drawn,
):
    """Draw a batch as `draw_rows` does, weigh it as `importance` does, and gather it.

    Args:
        index, batch: as for `uniform_batch`.
        tree: places of `leaves`, `sums`, `offsets`, `us`, `words`, `nodes`, `rest`, `partial`, `owner` and `number`, as
            for `draw_rows`.
        spans, returns: as for `gather_batch`.
        position: expected value of `NUM_TOUCHED`, or HELD. samples: rows to add to `NUM_SAMPLED`.
        block_steps: steps of a block.
        wide_depth, anchor, key, anchor_key, step: as for `draw_rows`. item_steps: its `block_steps`.
        least, beta, scale: as for `importance`.
        drawn: int64 [5, B], output: slots, anchors, generations, sequence numbers, and the weights as float32 in the
            first half of the last row.

    Returns:
        As `uniform_batch`; also UNCHANGED if every leaf is 0.
    """
    counters = _int64(index, 0)
    if not _can_draw(counters, NUM_TOUCHED, position):
        return UNCHANGED
    if not draw_weighed(
        index, tree, wide_depth, item_steps, anchor, key, anchor_key, step, least, beta, scale, drawn
    ):
        return UNCHANGED
    _float32(batch, 2)[:] = drawn[4].view(np.float32)[: drawn.shape[1]]
    bad = _gather(index, batch, drawn[0], drawn[1], drawn[2], block_steps, spans, returns)
    if bad == 0:
        counters[NUM_SAMPLED] += samples
    return bad


@compiled
def uniform_packed(  # type: ignore[no-untyped-def]
    index,
    batch,
    items,
    spans,
    returns,
    version,
    samples,
    block_steps,
    steps,
    anchor,
    first,
    stride,
    seed,
    step,
    epoch,
):
    """`uniform_batch` of a packed batch; UNCHANGED too if there is no room for its steps.

    Args:
        batch: places of a `PackedInline`. spans, returns: of no meaning. The others: as for `uniform_batch`.
    """
    counters = _int64(index, 0)
    if not _can_draw(counters, VERSION, version):
        return UNCHANGED
    count = batch[0, 1]
    names = carray(pointer(batch[0, 0]), (3, count), np.int64)
    rows = carray(pointer(batch[3, 0]), (2, count), np.int64)
    starts, position, sizes, given = _int32(batch, 4), _int32(batch, 5), _int64(batch, 6), _int64(batch, 7)
    extent = carray(pointer(index[1, 0]), (index[3, 1], 3), np.int64)
    draw_uniform(items, steps, anchor, first, stride, seed, step, epoch, names)
    bad = measure(names[0], names[1], extent, given[0], given[1], False, rows)
    sizes[0], sizes[1] = summed(rows)
    if sizes[0] > len(position):
        return UNCHANGED
    place_rows(rows, starts)
    if sizes[0] * given[2] > given[3]:  # threads share the gather
        if bad == 0:
            counters[NUM_SAMPLED] += samples
        return bad
    bad += gather_packed(
        carray(pointer(batch[1, 0]), (batch[1, 1] // WIDTH, WIDTH), np.int64),
        carray(pointer(batch[2, 0]), (batch[2, 1] // WIDTH, WIDTH), np.int64),
        names[0],
        rows,
        starts,
        extent,
        _int32(index, 2),
        block_steps,
        position,
        sizes[0] * given[2] >= STREAM_BATCH_BYTES,
        np.arange(count),
    )
    if bad == 0:
        counters[NUM_SAMPLED] += samples
    return bad
