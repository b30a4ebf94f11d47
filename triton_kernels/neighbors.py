"""Draw neighbours of nodes, uniformly without replacement, from a graph in memory that the GPU can read.

A program draws for `ROWS` nodes at a time by Floyd's algorithm (Bentley and Floyd, 1987): choice i of l out of d is one
of the numbers 0 to d - l + i, or d - l + i itself if that was chosen before. The choices of a node lie side by side in
registers, so a choice is compared with all earlier ones at once. A node's random numbers are functions of key, step and
node, as in the compiled loops of the CPU.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl

from gear_loader.kernels.devices import on_device
from gear_loader.kernels.neighbors_reference import check_draw
from gear_loader.kernels.priority import uniform

__all__ = ["WIDTHS", "draw"]

WIDTHS = (8, 32, 128)
"""Choices of a node that fit a variant of the kernel; the last is the largest fan-out."""

_ENTRIES = 512  # choices of a program


def launch_of(width: int) -> dict[str, Any]:
    """Launch options of a variant."""
    return {"WIDTH": width, "ROWS": _ENTRIES // width, "num_warps": 4, "enable_fp_fusion": False}


@triton.jit(do_not_specialize=["count", "fanout"])
def neighbors_kernel(
    p_indptr,  # int64 [N + 1]
    p_indices,  # int32 [E]
    p_nodes,  # int64 [n]
    p_random,  # int64 [2]
    p_neighbors,  # int64 [n, fanout]
    count,
    fanout,
    WIDTH: tl.constexpr,
    ROWS: tl.constexpr,
):
    i_row = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    m_row = i_row < count
    i_node = tl.load(p_nodes + i_row, mask=m_row, other=0)
    o_first = tl.load(p_indptr + i_node, mask=m_row, other=0)
    degree = tl.load(p_indptr + i_node + 1, mask=m_row, other=0) - o_first
    key, step = tl.load(p_random), tl.load(p_random + 1)
    i_choice = tl.arange(0, WIDTH)[None, :]
    # A node without more than `fanout` neighbours has all of them, in their order.
    b_chosen = tl.zeros([ROWS, WIDTH], dtype=tl.int64) + i_choice  # [ROWS, WIDTH]
    m_draws = (degree > fanout)[:, None]
    for i in range(fanout):
        last = degree - fanout + i
        b_uniform = uniform(key, step, i_node.to(tl.uint32), i)
        place = tl.minimum((b_uniform * (last + 1).to(tl.float64)).to(tl.int64), last)
        m_same = (b_chosen == place[:, None]) & (i_choice < i)
        place = tl.where(tl.max(m_same.to(tl.int32), axis=1) > 0, last, place)
        b_chosen = tl.where((i_choice == i) & m_draws, place[:, None], b_chosen)
    m_taken = m_row[:, None] & (i_choice < tl.minimum(degree, fanout)[:, None])
    b_neighbor = tl.load(p_indices + o_first[:, None] + b_chosen, mask=m_taken, other=-1)
    p_out = p_neighbors + i_row.to(tl.int64)[:, None] * fanout + i_choice
    tl.store(p_out, b_neighbor.to(tl.int64), mask=m_row[:, None] & (i_choice < fanout))


def draw(
    indptr: torch.Tensor,
    indices: torch.Tensor,
    nodes: torch.Tensor,
    random: torch.Tensor,
    neighbors: torch.Tensor,
) -> None:
    """Draw neighbours of nodes; each subset is equally likely.

    Args:
        indptr: int64 [N + 1]. indices: int32 [E]. Both in memory that the device can read: its own, or pinned.
        nodes: int64 [n], from 0 to N - 1, on the device.
        random: int64 [2] in memory that the device can read: key and step of the random numbers.
        neighbors: int64 [n, l], output; l is the fan-out, up to 128. A node with fewer neighbours has all, then -1.

    Does not wait for the GPU.

    Raises:
        TypeError, ValueError: other shapes, dtypes or devices; nothing was launched.
    """
    count, fanout = check_draw(indptr, indices, nodes, random, neighbors)
    if fanout > WIDTHS[-1]:
        raise ValueError(f"neighbors is {list(neighbors.shape)}; expected a fan-out of at most {WIDTHS[-1]}.")
    if count == 0:
        return
    launch = launch_of(next(width for width in WIDTHS if fanout <= width))
    with on_device(nodes.device):
        neighbors_kernel[(triton.cdiv(count, launch["ROWS"]),)](
            indptr, indices, nodes, random, neighbors, count, fanout, **launch
        )
