"""Copy images of blocks from a GPU into blocks of a table in pinned host memory, all of a column in one launch.

A writer on the GPU fills images of the blocks that its trajectories get, in the table's own layout. So every block is
written in whole 128-byte lines, which cross the bus without being read first, whatever the size of a step.

    source   uint8 [n, K, block bytes]      blocks   int32 [n, K]      target   uint8 [blocks, block bytes]

The last of a trajectory's K blocks may be filled in part: only its first lines are copied.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels.devices import bus_programs, multiprocessors, on_device
from gear_loader.kernels.launching import launch
from gear_loader.kernels.plan import LINE
from gear_loader.kernels.tensor_checks import check_programs, check_tensor, grid_size

__all__ = ["check_store", "store"]

LAUNCH: dict[str, Any] = {"TILE": 64, "num_warps": 8}
"""Lines of a tile (8 KiB), and launch options."""


# Nothing is specialised on values, see `gather_kernel`.
@triton.jit(
    do_not_specialize=[
        "p_source",
        "p_target",
        "p_blocks",
        "block_lines",
        "per_row",
        "last_lines",
        "num_tiles",
    ]
)
def store_kernel(
    p_source,  # int32 [n, K, lines of a block, 32]
    p_target,  # int32 [blocks, lines of a block, 32] in host memory
    p_blocks,  # int32 [n, K]
    block_lines,
    per_row,  # K
    last_lines,  # lines of the last block of a row
    num_tiles,
    TILE: tl.constexpr,
):
    # Tells the compiler that both addresses are multiples of 128, which `check_store` checks.
    p_source = tl.multiple_of(p_source.to(tl.int64).to(tl.pointer_type(tl.int32)), 128)
    p_target = tl.multiple_of(p_target.to(tl.int64).to(tl.pointer_type(tl.int32)), 128)
    tiles_each = (block_lines + TILE - 1) // TILE
    o_word = tl.arange(0, TILE * 32)
    for i_tile in range(tl.program_id(0), num_tiles, tl.num_programs(0)):
        i_block = i_tile // tiles_each
        i_line = (i_tile - i_block * tiles_each) * TILE
        lines = tl.where(i_block % per_row == per_row - 1, last_lines, block_lines) - i_line
        block = tl.load(p_blocks + i_block).to(tl.int64)
        o_source = (i_block.to(tl.int64) * block_lines + i_line) * 32
        m_word = o_word < lines * 32
        b_words = tl.load(p_source + o_source + o_word, mask=m_word, other=0, eviction_policy="evict_first")
        tl.store(p_target + (block * block_lines + i_line) * 32 + o_word, b_words, mask=m_word)


def check_store(
    source: torch.Tensor, target: torch.Tensor, blocks: torch.Tensor, last_bytes: int
) -> tuple[int, int]:
    """Lines of a block, and of a trajectory's last one.

    Raises:
        TypeError, ValueError: see `store`.
    """
    size = target.shape[1] if target.ndim == 2 else 0
    check_tensor("source", source, torch.uint8, f"[n, K, {size}]")
    check_tensor("target", target, torch.uint8, "[blocks, bytes]")
    check_tensor("blocks", blocks, torch.int32, (source.shape[0], source.shape[1]))
    if size % LINE or source.data_ptr() % LINE or target.data_ptr() % LINE:
        raise ValueError(
            f"Blocks have {size} bytes and lie at {source.data_ptr():#x} and {target.data_ptr():#x}; expected "
            f"multiples of {LINE}."
        )
    if not 0 < last_bytes <= size:
        raise ValueError(f"last_bytes is {last_bytes}; expected 1 to {size}.")
    return size // LINE, -(-last_bytes // LINE)


def store(
    source: torch.Tensor,
    target: torch.Tensor,
    blocks: torch.Tensor,
    last_bytes: int,
    *,
    programs: int | None = None,
) -> None:
    """Copy images of blocks to their places, on the current stream of the source's device.

    Args:
        source: uint8 [n, K, S] on the device: K blocks of S bytes, a multiple of 128, of each of n trajectories.
        target: uint8 [N, S], all blocks, in pinned host memory or on the device. Both begin on a multiple of 128 bytes.
        blocks: int32 [n, K], distinct, in memory that the device can read: image k of trajectory i goes to block
            ``blocks[i, k]``. Values are not checked: an invalid block is written to other memory.
        last_bytes: bytes of each trajectory's last block that are copied, up to the end of their line.
        programs: programs of the grid; by default `BUS_PROGRAMS`, and one per multiprocessor within the device.

    Does not wait for the GPU: `blocks` must not change until the kernel has run, and the bytes are in the host's memory
    when an event after it has happened.

    Raises:
        TypeError, ValueError: arguments of another dtype, shape or alignment; nothing was launched.
    """
    block_lines, last_lines = check_store(source, target, blocks, last_bytes)
    check_programs(programs)
    if source.is_cuda and target.device != source.device and not target.is_pinned():
        raise ValueError(
            "target is in memory that the GPU cannot write to; expected its own, or pinned memory."
        )
    tiles = blocks.numel() * -(-block_lines // LAUNCH["TILE"])
    if tiles == 0:
        return
    with on_device(source.device):
        default = (multiprocessors if target.is_cuda else bus_programs)(source.device)
        launch(
            store_kernel,
            grid_size(programs, default, tiles),
            source.view(torch.int32),
            target.view(torch.int32),
            blocks,
            block_lines,
            blocks.shape[1],
            last_lines,
            tiles,
            **LAUNCH,
        )
