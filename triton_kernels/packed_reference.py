"""The plain-torch twin of `gather_packed`, with the same signature and results, to the byte."""

from __future__ import annotations

import ctypes
from collections.abc import Callable

import torch

from gear_loader.kernels import packed_plan as _plan
from gear_loader.kernels.packed_plan import PackedPlan
from gear_loader.kernels.plan import LINE

__all__ = ["gather_packed"]


def gather_packed(plan: PackedPlan, work: torch.Tensor, *, programs: int | None = None) -> None:
    """Fill the plan's outputs; see `gear_loader.kernels.packed.gather_packed`. `programs` is not used. On the CPU."""
    plan.check_work(work)
    run(work, plan.position, _bytes)


def run(work: torch.Tensor, position: torch.Tensor, bytes_at: Callable[[int, int], torch.Tensor]) -> None:
    """Do the work; `bytes_at` returns the memory at an address, uint8 of as many bytes as it is told."""
    header = work[: _plan.WORK_WIDTH].tolist()
    line_tiles, num_tiles = header[_plan.WORK_LINE_TILES], header[_plan.WORK_NUM_TILES]
    columns, tiles, groups = (
        header[name] for name in (_plan.WORK_COLUMNS, _plan.WORK_TILES, _plan.WORK_GROUPS)
    )
    pieces = work[header[_plan.WORK_PIECES] :].view(torch.int32)
    for i, tile in enumerate(work[tiles : tiles + num_tiles].tolist()):
        first, number = groups + (tile >> 32), columns + (tile & 0xFFFFFF) * _plan.PACKED_WIDTH
        lines = 1 << (tile >> 24 & 0xFF)
        for group in work[first : first + _plan.TILE_LINES // lines].tolist():
            line, at = group >> 32, (group & 0xFFFFFFFF) * _plan.PIECE_WIDTH
            block, begin, steps, out, step = pieces[at : at + _plan.PIECE_WIDTH].tolist()
            if i >= line_tiles:
                low, high = line * 32, min((line + lines) * 32, steps)
                if low < high:
                    numbers = torch.arange(step + low, step + high, dtype=torch.int32, device="cpu")
                    position[out + low : out + high] = numbers
                continue
            base, stride, size, target = work[number : number + _plan.PACKED_WIDTH].tolist()
            # From the piece's first byte, which lies inside its first line.
            inside = begin * size % LINE
            low, high = max(line * LINE - inside, 0), min((line + lines) * LINE - inside, steps * size)
            if low < high:
                source = bytes_at(base + block * stride + begin * size + low, high - low)
                bytes_at(target + out * size + low, high - low).copy_(source)


def _bytes(address: int, count: int) -> torch.Tensor:
    """The bytes at an address, uint8 [count]."""
    return torch.frombuffer((ctypes.c_uint8 * count).from_address(address), dtype=torch.uint8)
