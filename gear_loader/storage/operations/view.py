"""The arrays and sizes of an index, for its operations; constants, and the marks around a change."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import carray, types
from numba.extending import intrinsic, overload

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native.compile import inlined
from gear_loader.native.memory import pointer
from gear_loader.storage.counters import DIGEST, DIRTY
from gear_loader.utils.arrays import Array

assert UNSET == -1  # compiled into the cached machine code
assert DIGEST == 0x5D81FF7B  # of the positions in `counters`, compiled in too

PID, START, READING, TICKET = range(4)  # columns of `readers`
LIVE, ALL = range(2)  # columns of `uses`
MARKED = -1

# Results of `make_room` and `grow`.
DONE, SHORT, FULL, BUSY, READ, FLIP = range(6)
# Eviction policies.
REFUSE, EVICT_OLDEST, EVICT_LOWEST = range(3)
UNREADY, TIGHT = 6, 7
"""Additional results: of `store` with REQUEST_AT_ONCE, that the index needs recovery or has unfinished writes; of
operations with `evict` None, that they need `make_room`."""
GONE = 8
"""Additional result of `lengthen` and `promote`: the trajectory was evicted or removed."""
SPILL = 9
"""Additional result of `make_room`: the memory is full until the table's owner has spilled trajectories."""
ON_DISK = -(1 << 62)
"""Place of the block table of a trajectory that lies on disk only. With any block number added it is negative, so the
loops that gather find it invalid."""
OUTSIDE = 10
"""Additional result of `lengthen`: the trajectory lies on disk only."""
GENEROUS = 8
"""A writer allocates at most one eighth of the free steps in advance."""
ADVANCE_STEPS = 1 << 16
"""Steps that all lanes of a call allocate in advance together, besides the block that each needs. Without a limit 4,096
lanes doubled their blocks in the same call: 150 ms for the first use of so much memory at once."""
# Head of a request to `store`, int64; followed by lengths [n], slots [n] (output), priorities [n] (float64), numbers of
# final steps [n], which lengths do not count, ids [n] (-1 for new ones) and addresses [n, C].
REQUEST_COUNT, REQUEST_AT_ONCE, REQUEST_NOW, REQUEST_EVICT, REQUEST_PID, REQUEST_START, REQUEST_HEAD = range(
    7
)


class View(NamedTuple):
    """Arrays and sizes of an index; see `gear_loader.storage.layout`."""

    counters: Any
    readers: Any
    extent: Any
    generation: Any
    sequence: Any
    epoch: Any
    owner: Any
    stream: Any
    created: Any
    priority: Any
    sampled: Any
    state: Any
    links: Any
    block_ids: Any
    free_slots: Any
    retired: Any
    touched: Any
    free_blocks: Any
    uses: Any
    lowest: Any
    ident: Any
    parked: Any
    block_steps: int
    max_steps: int
    num_slots: int
    num_blocks: int
    half_size: int
    group: int


def fence() -> None:
    """Order stores: earlier stores precede later ones."""


@intrinsic  # type: ignore[untyped-decorator]
def _barrier(_context: Any) -> Any:
    # Only the compiler must not reorder: on every processor a killed process leaves a prefix of its stores.
    def codegen(_context: Any, builder: ir.IRBuilder, _signature: Any, _args: Any) -> Any:
        builder.fence("seq_cst", "singlethread")

    return types.void(), codegen


@overload(fence)  # type: ignore[untyped-decorator]
def _fence() -> Any:
    return lambda: _barrier()


@inlined
def require(holds: Any) -> None:
    """Raise IndexError unless `holds`: an inconsistent value would be used as an address."""
    if not holds:
        raise IndexError("the index contradicts itself")


@inlined
def check_extent(v: Any, start: Any, count: Any) -> None:
    """Raise IndexError unless `start` to `start + count - 1` are valid positions in `block_ids`."""
    require(count == 0 or (start >= 0 and count > 0 and start <= 2 * v.half_size - count))


@inlined
def begin_change(v: Any) -> None:
    """Mark the index dirty: the next lock holder rebuilds the derived state."""
    v.counters[DIRTY] = 1
    fence()


@inlined
def end_change(v: Any) -> None:
    """Mark the index clean."""
    fence()
    v.counters[DIRTY] = 0


@inlined
def blocks_of(v: Any, length: Any) -> Any:
    """Number of blocks of a trajectory with this length."""
    return (length + v.block_steps - 1) // v.block_steps


@inlined
def slot_blocks(v: Any, slot: Any) -> Any:
    """Number of blocks of a slot's steps and final step; 0 if it lies on disk only."""
    if v.extent[slot, 1] < 0:
        return 0
    return blocks_of(v, v.extent[slot, 0] + v.extent[slot, 2])


def places_of(view: View) -> Array:
    """Addresses and sizes of the arrays, int64 [n], for compiled operations. The caller keeps the arrays alive."""
    arrays: tuple[Any, ...] = view[: View._fields.index("block_steps")]
    addresses = [array.ctypes.data for array in arrays]
    lengths = [len(array) for array in (view.readers, view.block_ids, view.lowest, view.parked)]
    sizes = [*view[len(addresses) :], *lengths]
    return np.array(addresses + sizes, dtype=np.int64)


@inlined
def view_at(p: Any) -> Any:
    slots, blocks = p[24], p[25]
    return View(
        carray(pointer(p[0]), (64,), np.int64),
        carray(pointer(p[1]), (p[28], 4), np.int64),
        carray(pointer(p[2]), (slots, 3), np.int64),
        carray(pointer(p[3]), (slots,), np.int64),
        carray(pointer(p[4]), (slots,), np.int64),
        carray(pointer(p[5]), (slots,), np.int64),
        carray(pointer(p[6]), (slots, 2), np.int64),
        carray(pointer(p[7]), (slots,), np.int32),
        carray(pointer(p[8]), (slots,), np.int64),
        carray(pointer(p[9]), (slots,), np.float32),
        carray(pointer(p[10]), (slots,), np.int32),
        carray(pointer(p[11]), (slots,), np.int32),
        carray(pointer(p[12]), (slots, 2), np.int32),
        carray(pointer(p[13]), (p[29],), np.int32),
        carray(pointer(p[14]), (slots,), np.int32),
        carray(pointer(p[15]), (slots,), np.int32),
        carray(pointer(p[16]), (slots,), np.int32),
        carray(pointer(p[17]), (blocks,), np.int32),
        carray(pointer(p[18]), (blocks, 2), np.int32),
        carray(pointer(p[19]), (p[30],), np.float32),
        carray(pointer(p[20]), (slots,), np.int64),
        carray(pointer(p[21]), (p[31],), np.int32),
        p[22],
        p[23],
        slots,
        blocks,
        p[26],
        p[27],
    )
