"""Plain-torch twins of the kernels with the same signatures and results, to the byte; the oracle of the tests."""

from __future__ import annotations

import torch

from gear_loader.kernels.plan import PAD_EDGE, PAD_HEAD, PAD_KEEP, GatherPlan, PlacePlan

__all__ = ["gather", "place"]


def gather(
    plan: GatherPlan,
    slots: torch.Tensor,
    anchors: torch.Tensor,
    extent: torch.Tensor,
    block_ids: torch.Tensor,
    *,
    rows: torch.Tensor | None = None,
    programs: int | None = None,
) -> None:
    """Fill the plan's outputs and masks; see `gear_loader.kernels.gather.gather`. `programs` is not used."""
    count = plan.check_rows(slots, anchors, rows)
    lengths, row, finals = extent[slots].unbind(1)  # [B] each
    for column in plan.columns:
        steps = lengths + finals if column.final else lengths
        length = column.out.shape[1]
        begin = anchors + column.offset
        low = begin.clamp(min=0).minimum(steps)
        high = (begin + length).minimum(steps).maximum(low)
        valid = high - low
        if column.pad in (PAD_KEEP, PAD_EDGE):
            head = torch.where(valid > 0, low - begin, length)
        elif column.pad == PAD_HEAD:
            head = length - valid
        else:
            head = torch.zeros_like(low)
        position = (
            torch.arange(length, device=slots.device) - head[:, None]
        )  # [B, L] within the steps that exist
        mask = (position >= 0) & (position < valid[:, None])
        shown = mask
        step = torch.where(mask, low[:, None] + position, 0)
        if column.pad == PAD_EDGE:
            step = torch.arange(length, device=slots.device) + begin[:, None]
            step, shown = step.clamp(min=0).minimum(steps[:, None] - 1), torch.ones_like(mask)
        block = block_ids[torch.where(shown, row[:, None] + step // plan.block_steps, 0)].long()
        source = column.source
        steps_of = source.as_strided(
            (source.shape[0], plan.block_steps, column.step_bytes),
            (source.stride(0), column.stride, 1),
            source.storage_offset() + column.inside,
        )
        windows = steps_of[block, step % plan.block_steps].masked_fill_(~shown[:, :, None], 0)
        into: slice | torch.Tensor = slice(count) if rows is None else rows
        column.out[into] = windows
        if column.mask is not None:
            column.mask[into] = mask


def place(plan: PlacePlan, staging: torch.Tensor, rows: torch.Tensor, *, programs: int | None = None) -> None:
    """Copy rows out of staging memory; see `gear_loader.kernels.place.place`. `programs` is not used."""
    count = plan.check_rows(staging, rows)
    for out, offset in zip(plan.outs, plan.offsets(count), strict=True):
        piece = staging[offset : offset + count * out.shape[1]].view(count, out.shape[1])
        out[rows] = piece.to(plan.device)
