"""The plain-torch twin of `gather_packed`, with the same signature and results, to the byte."""

from __future__ import annotations

import torch

from gear_loader.kernels.packed_plan import (
    PIECE_BLOCK,
    PIECE_FIRST,
    PIECE_NUMBER,
    PIECE_OUT,
    PIECE_STEPS,
    PackedPlan,
    PackedWork,
)

__all__ = ["gather_packed"]


def gather_packed(plan: PackedPlan, work: PackedWork, *, programs: int | None = None) -> None:
    """Fill the plan's outputs; see `gear_loader.kernels.packed.gather_packed`. `programs` is not used."""
    work.check(plan.device)
    pieces = work.pieces.tolist()
    for column in plan.columns:
        source, size = column.source, column.out.shape[1]
        flat = source.as_strided(((source.shape[0] - 1) * source.stride(0) + source.shape[1],), (1,))
        own = pieces[work.num_pieces[0] :] if column.once else pieces[: work.num_pieces[0]]
        for piece in own:
            first = piece[PIECE_BLOCK] * source.stride(0) + piece[PIECE_FIRST] * size
            steps = flat[first : first + piece[PIECE_STEPS] * size].view(-1, size)
            column.out[piece[PIECE_OUT] : piece[PIECE_OUT] + len(steps)] = steps
    for piece in pieces[: work.num_pieces[0]]:
        begin, count = piece[PIECE_OUT], piece[PIECE_STEPS]
        numbers = torch.arange(
            piece[PIECE_NUMBER], piece[PIECE_NUMBER] + count, dtype=torch.int32, device=plan.device
        )
        plan.position[begin : begin + count] = numbers
