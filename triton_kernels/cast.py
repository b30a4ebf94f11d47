"""Convert and scale gathered columns within the GPU's memory: all columns of the same dtypes in one launch.

Steps cross the bus as they are stored, mostly in fewer bytes than they are used in; a gather cannot round on the way,
because it moves words and not values. The results are those of ``(values * scale).to(dtype)`` in PyTorch to the bit:
16-bit floating-point numbers are computed in float32, products are rounded to their own dtype first, and float64
becomes a 16-bit number by way of float32. A NaN is a NaN of any bits; numbers that an integer cannot hold are
undefined, as there.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels import cast_plan as _plan
from gear_loader.kernels.cast_plan import CastPlan
from gear_loader.kernels.devices import multiprocessors, on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.tensor_checks import check_programs, check_tensor, grid_size

__all__ = ["cast"]

SOURCE = tl.constexpr(_plan.CAST_SOURCE)
OUT = tl.constexpr(_plan.CAST_OUT)
SIZE = tl.constexpr(_plan.CAST_SIZE)
SCALE = tl.constexpr(_plan.CAST_SCALE)
WIDTH = tl.constexpr(_plan.CAST_WIDTH)

LAUNCH: dict[str, Any] = {"TILE": 2048, "num_warps": 8}
"""Values of a tile and launch options."""


@triton.jit
def _bfloat16(x):
    """The bits of float32 numbers rounded to the nearest bfloat16, ties to even: int16."""
    bits = x.to(tl.int32, bitcast=True)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) >> 16
    return tl.where(x == x, rounded, 0x7FC0).to(tl.int16)


@triton.jit
def _widened(bits):
    """The float32 numbers of the bits of bfloat16."""
    return (bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)


@triton.constexpr_function
def _stored(kind):
    """The dtype that values of a dtype are loaded and stored as."""
    return getattr(tl, {"bfloat16": "int16", "bool": "int8"}.get(kind, kind))


@triton.jit
def _read(address, o_value, m_value, KIND: tl.constexpr):
    """Values of a dtype: 16-bit floating-point numbers as float32, integers and bool as int64 [TILE]."""
    p_value = tl.multiple_of(address.to(tl.pointer_type(_stored(KIND))), 16) + o_value
    x = tl.load(p_value, mask=m_value)
    if KIND == "bfloat16":
        return _widened(x)
    elif KIND == "float16":
        return x.to(tl.float32)
    elif KIND == "float32" or KIND == "float64":
        return x
    else:
        return x.to(tl.int64)


@triton.jit
def _write(address, o_value, m_value, x, KIND: tl.constexpr):
    """Store values of a dtype, converted from int64, float32 or float64."""
    if KIND == "bfloat16":
        b_value = _bfloat16(x.to(tl.float32))
    elif KIND == "float16":
        b_value = x.to(tl.float32).to(tl.float16)
    elif KIND == "float32" or KIND == "float64":
        b_value = x.to(_stored(KIND))
    elif KIND == "bool":
        b_value = (x != 0).to(tl.int8)
    else:
        b_value = x.to(tl.int64).to(_stored(KIND))
    p_value = tl.multiple_of(address.to(tl.pointer_type(_stored(KIND))), 16) + o_value
    tl.store(p_value, b_value, mask=m_value)


@triton.jit
def _product(x, scale, KIND: tl.constexpr):
    """Products, rounded to their dtype, as float32 or float64."""
    if KIND == "float64":
        return x.to(tl.float64) * scale
    else:
        y = x.to(tl.float32) * scale.to(tl.float32)
        if KIND == "float16":
            y = y.to(tl.float16).to(tl.float32)
        elif KIND == "bfloat16":
            y = _widened(_bfloat16(y))
        return y


@triton.jit
def _convert(p_column, o_value, m_value, GIVEN: tl.constexpr, TARGET: tl.constexpr, PRODUCT: tl.constexpr):
    """Convert a tile of a column."""
    x = _read(tl.load(p_column + SOURCE), o_value, m_value, GIVEN)
    if PRODUCT != "":
        x = _product(x, tl.load(p_column + SCALE).to(tl.float64, bitcast=True), PRODUCT)
    _write(tl.load(p_column + OUT), o_value, m_value, x, TARGET)


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit(do_not_specialize=["p_columns", "p_count", "num_columns", "count", "num_tiles"])
def cast_kernel(
    p_columns,  # int64 [C, WIDTH]
    p_count,  # int64 [1] if COUNTED: the number of rows
    num_columns,
    count,
    num_tiles,
    GIVEN: tl.constexpr,  # dtypes of the values, of the outputs,
    TARGET: tl.constexpr,
    PRODUCT: tl.constexpr,  # and of the products; "" without a scale
    COUNTED: tl.constexpr,
    TILE: tl.constexpr,
):
    if COUNTED:
        count = tl.load(p_count)
        num_tiles = 0
        for i in range(num_columns):
            num_tiles += ((count * tl.load(p_columns + i * WIDTH + SIZE) + TILE - 1) // TILE).to(tl.int32)
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        # The tile's column, and the column's first tile.
        i_column = 0
        i_first = 0
        o_tile = 0
        for i in range(num_columns):
            m_here = i_tile >= o_tile
            i_column = tl.where(m_here, i, i_column)
            i_first = tl.where(m_here, o_tile, i_first)
            o_tile += ((count * tl.load(p_columns + i * WIDTH + SIZE) + TILE - 1) // TILE).to(tl.int32)
        p_column = p_columns + i_column * WIDTH
        o_first = tl.cast(i_tile - i_first, tl.int64) * TILE
        o_value = o_first + tl.arange(0, TILE)
        values = count * tl.load(p_column + SIZE)
        # A mask whose bound may be any number would make every access a single value.
        if o_first + TILE <= values:
            _convert(p_column, o_value, None, GIVEN, TARGET, PRODUCT)
        else:
            _convert(p_column, o_value, o_value < values, GIVEN, TARGET, PRODUCT)


def cast(plan: CastPlan, count: int | torch.Tensor, *, programs: int | None = None) -> None:
    """Convert the first rows of the plan's columns into their outputs, on the plan's device's current stream.

    Args:
        plan: the columns; sources and outputs begin at multiples of 16 bytes, as tensors that torch allocates do.
        count: number of rows, at most those of the outputs; or int64 [1] on the plan's device, which is not checked.
        programs: programs of the grid; by default four per multiprocessor, which the GPU's own memory needs.

    Does not wait for the GPU. Other rows of the outputs do not change.

    Raises:
        ValueError: too many rows, or memory that is not aligned; nothing was launched.
    """
    counted = isinstance(count, torch.Tensor)
    if isinstance(count, torch.Tensor):
        check_tensor("count", count, torch.int64, "[1]", device=plan.device)
    else:
        plan.check_count(count)
    check_programs(programs)
    for _, table, _ in plan.launches:
        if (table[:, [_plan.CAST_SOURCE, _plan.CAST_OUT]] % 16).any():
            raise ValueError(
                "A source or an output begins at no multiple of 16 bytes; expected what torch allocates."
            )
    most = 4 * multiprocessors(plan.device)
    with on_device(plan.device):
        for (given, target, product), table, device_table in plan.launches:
            limit = len(plan.columns[0].out) if isinstance(count, torch.Tensor) else count
            tiles = plan.tiles(table, limit, LAUNCH["TILE"])
            if tiles:
                launch(
                    cast_kernel,
                    grid_size(programs, most, tiles),
                    device_table,
                    count if counted else device_table,
                    len(table),
                    limit,
                    tiles,
                    GIVEN=given,
                    TARGET=target,
                    PRODUCT=product,
                    COUNTED=counted,
                    **LAUNCH,
                )
