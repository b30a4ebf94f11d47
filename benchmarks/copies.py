"""Gathering without a kernel: a batch's rows as copies of the driver, in one call.

`cuMemcpyBatchAsync` (CUDA 12.8 and later) takes all rows of a batch, of all columns; the sources may be read at any
time, which leaves the driver the most freedom. It needs rows that lie in one piece, and has their addresses computed
beforehand. The driver refuses batches of copies on the default stream, so they go to one of their own, and copies that
span two registrations of host memory, so a row that does is two copies.
"""

from __future__ import annotations

import ctypes
import time
from collections.abc import Sequence
from typing import Any

import numpy as np

from benchmarks.engine import Engine
from benchmarks.gather_rows import QueueRows
from benchmarks.harness import Incorrect, Medians, Variant
from benchmarks.workloads import poison

BATCHED = "cuMemcpyBatchAsync"
MOST_COPIES = 4096
"""Copies that a measurement makes at most, unless one batch has more."""

ORDER_ANY = 3
"""`CU_MEMCPY_SRC_ACCESS_ORDER_ANY`: sources may be read out of the stream's order."""

Array = np.ndarray[Any, np.dtype[np.uint64]]
Copy = tuple[Array, Array, Array]


class Unavailable(Exception):
    """The driver has no such call."""


class Location(ctypes.Structure):
    """`CUmemLocation`; all zero for no hint."""

    _fields_ = (("type", ctypes.c_int), ("id", ctypes.c_int))


class Attributes(ctypes.Structure):
    """`CUmemcpyAttributes`, of 24 bytes in CUDA 12.8 to 13.0; hints matter to managed memory alone."""

    _fields_ = (
        ("srcAccessOrder", ctypes.c_int),
        ("srcLocHint", Location),
        ("dstLocHint", Location),
        ("flags", ctypes.c_uint),
    )


class Driver:
    """The driver's copies from host to device. library: ``libcuda.so.1`` by default."""

    def __init__(self, library: Any = None) -> None:
        try:
            self._library = ctypes.CDLL("libcuda.so.1") if library is None else library
            # CUDA 13 has a second one, without the number of the copy that failed, and keeps this one.
            self._call = self._library.cuMemcpyBatchAsync
        except (OSError, AttributeError) as error:
            raise Unavailable(f"no cuMemcpyBatchAsync (CUDA 12.8 and later): {error}") from error
        pointer, size = ctypes.c_void_p, ctypes.c_size_t
        self._call.argtypes = (*(pointer,) * 3, size, pointer, pointer, size, pointer, pointer)
        self._call.restype = ctypes.c_int
        self._attributes = Attributes(srcAccessOrder=ORDER_ANY)
        self._first, self._failed = ctypes.c_size_t(0), ctypes.c_size_t(0)

    def copy(self, copies: Copy, stream: int) -> None:
        """Queue all copies: addresses of targets and sources, and bytes."""
        arrays = (part.ctypes.data for part in copies)
        kinds = (ctypes.addressof(self._attributes), ctypes.addressof(self._first), 1)
        code = self._call(*arrays, len(copies[0]), *kinds, ctypes.addressof(self._failed), stream)
        if code != 0:
            raise Incorrect(f"cuMemcpyBatchAsync returned {code} at copy {self._failed.value}")


def row_copies(rows: QueueRows, i: int) -> Copy:
    """Batch `i` of a queue as copies: addresses of targets and sources, and bytes; uint64 [columns * batch] each.

    All columns but the masks. More where rows span two registrations of the table's memory.
    """
    assert rows.whole
    slots, anchors = rows.slots[i].cpu().numpy(), rows.anchors[i].cpu().numpy()
    extent, block_ids = rows.table._engine.reader().index_arrays()
    blocks, steps = block_ids.reshape(-1), rows.table._engine.region.layout.block_steps
    parts: list[list[Array]] = [[], [], []]
    for name, window in rows.windows.items():
        column, out = rows.table._engine.region.blocks(name).numpy(), rows.buffers[i % 2].batch[name]
        assert not rows.table._engine.region.layout.columns[name].is_packed
        step_bytes = rows.table.schema[name].step_bytes
        first = anchors + window.offset
        block = blocks[extent[slots, 1] + first // steps].astype(np.int64)
        inside = first % steps * step_bytes
        count = window.length * step_bytes
        parts[0].append(out.data_ptr() + np.arange(len(slots)) * count)
        parts[1].append(column.ctypes.data + block * column.shape[1] + inside)
        parts[2].append(np.full(len(slots), count))
    targets, sources, sizes = (np.concatenate(part).astype(np.uint64) for part in parts)
    return split((targets, sources, sizes), rows.table._engine.region.pinned_bounds)


def split(copies: Copy, bounds: Sequence[int]) -> Copy:
    """Copies none of which reads across one of these addresses: those that do are cut there."""
    targets, sources, sizes = copies
    for bound in bounds:
        at = np.uint64(bound)
        cut = np.flatnonzero((sources < at) & (sources + sizes > at))
        if len(cut):
            first = at - sources[cut]
            rest = targets[cut] + first, np.full(len(cut), at), sizes[cut] - first
            sizes = sizes.copy()
            sizes[cut] = first
            targets, sources, sizes = (
                np.concatenate(parts) for parts in zip((targets, sources, sizes), rest, strict=True)
            )
    return targets, sources, sizes


def copies_of(engine: Engine, driver: Driver, rows: QueueRows) -> Variant:
    """Batches of a queue, each as one call."""
    launches, batch = rows.slots.shape
    batches = max(1, min(launches, MOST_COPIES // (batch * len(rows.windows))))
    host = Medians()

    def run(numbers: Sequence[int]) -> float:
        """Seconds on the device for these batches of the queue; the host's are noted."""
        works = [row_copies(rows, i) for i in numbers]

        def queue() -> None:
            begin = time.perf_counter()
            for work in works:
                driver.copy(work, stream)
            host.note(launch_seconds=(time.perf_counter() - begin) / len(works))

        engine.synchronize()
        with engine.aside() as stream:
            return engine.timed(queue)

    def check() -> None:
        rows.refresh()
        engine.synchronize()
        for i in sorted({0, batches - 1}):
            target = rows.buffers[i % 2].batch
            poison(target)
            target["mask"].fill_(True)  # not copied: all steps exist
            run([i])
            engine.synchronize()
            rows.check(i)
        host.clear()

    def measure() -> float:
        rows.refresh()
        engine.synchronize()
        return run(range(batches))

    told = {"copies": batch * len(rows.windows)}
    return Variant(BATCHED, measure, check, rows.bytes, batches, told, extras=host, required=False)
