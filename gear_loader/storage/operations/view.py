"""The arrays and sizes of an index, for its operations; constants, and the marks around a change."""

from __future__ import annotations

from typing import Any, NamedTuple

import numpy as np
from llvmlite import ir
from numba import types
from numba.core.typing.templates import AttributeTemplate
from numba.extending import (
    infer_getattr,
    intrinsic,
    lower_getattr_generic,
    models,
    overload,
    register_model,
)
from numba.np.arrayobj import populate_array

from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native.compile import inlined
from gear_loader.storage.counters import DIGEST, DIRTY
from gear_loader.utils.arrays import Array

assert UNSET == -1  # compiled into the cached machine code
assert DIGEST == 0x5FA3A687  # of the positions in `counters`, compiled in too

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
"""Additional result of `make_room`: the memory is full until the table's owner has moved trajectories out of it."""
ON_DISK = -(1 << 62)
"""Place of the block table of a trajectory that lies on disk only. With any block number added it is negative, so the
loops that gather find it invalid."""
OUTSIDE = 10
"""Additional result of `lengthen` and `begin_after`: the trajectory, or one of these, lies on disk only."""
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


class _Compiled(types.Type):  # type: ignore[misc]
    """A `View` in compiled code: the address of the result of `places_of`, whose arrays are made where they are used.

    As a tuple of 22 arrays it would be unpacked and counted at every call, which took half of the time of compiling.
    """

    def __init__(self) -> None:
        super().__init__(name="gear_loader.View")


_COMPILED = _Compiled()
_PLACES = {name: place for place, name in enumerate(View._fields)}
_SLOTS, _BLOCKS = _PLACES["num_slots"], _PLACES["num_blocks"]
_LENGTHS = dict(zip(("readers", "block_ids", "lowest", "parked"), range(len(_PLACES), 99), strict=False))
_LENGTHS |= {"free_blocks": _BLOCKS, "uses": _BLOCKS}
"""Place of an array's length in `places_of`; of the others, `counters` aside, it is the number of slots."""
_MATRICES = {"readers": 4, "extent": 3, "owner": 2, "links": 2, "uses": 2}
_INT32 = {"stream", "sampled", "state", "links", "block_ids", "free_slots", "retired", "touched"}
_INT32 |= {"free_blocks", "uses", "parked"}
_FLOAT32 = {"priority", "lowest"}


def _type_of(name: str) -> Any:
    if _PLACES[name] >= _PLACES["block_steps"]:
        return types.int64
    kind = types.int32 if name in _INT32 else types.float32 if name in _FLOAT32 else types.int64
    return types.Array(kind, 2 if name in _MATRICES else 1, "C")


@register_model(_Compiled)
class _Model(models.PrimitiveModel):  # type: ignore[misc]
    def __init__(self, manager: Any, kind: Any) -> None:
        super().__init__(manager, kind, ir.IntType(64).as_pointer())


@infer_getattr
class _Fields(AttributeTemplate):  # type: ignore[misc]
    key = _Compiled

    def generic_resolve(self, _view: Any, name: str) -> Any:
        return _type_of(name) if name in _PLACES else None


@lower_getattr_generic(_Compiled)  # type: ignore[untyped-decorator]
def _field(context: Any, builder: ir.IRBuilder, _kind: Any, places: Any, name: str) -> Any:
    def load(place: int) -> Any:
        # The places of a table never change.
        value = builder.load(builder.gep(places, [ir.Constant(ir.IntType(32), place)]))
        value.set_metadata("invariant.load", builder.module.add_metadata([]))
        return value

    kind = _type_of(name)
    if kind is types.int64:
        return load(_PLACES[name])
    array = context.make_array(kind)(context, builder)
    number = ir.IntType(64)
    size = kind.dtype.bitwidth // 8
    shape = [number(64) if name == "counters" else load(_LENGTHS.get(name, _SLOTS))]
    strides = [number(size)]
    if name in _MATRICES:
        shape, strides = [*shape, number(_MATRICES[name])], [number(size * _MATRICES[name]), *strides]
    data = builder.inttoptr(load(_PLACES[name]), context.get_data_type(kind.dtype).as_pointer())
    populate_array(array, data, shape, strides, number(size), None)
    return array._getvalue()


@intrinsic  # type: ignore[untyped-decorator]
def view_at(_context: Any, _places: Any) -> Any:
    """The view of a table, for compiled operations; the argument is the result of `places_of`."""

    def codegen(context: Any, builder: ir.IRBuilder, signature: Any, args: Any) -> Any:
        return context.make_array(signature.args[0])(context, builder, args[0]).data

    return _COMPILED(types.Array(types.int64, 1, "C")), codegen
