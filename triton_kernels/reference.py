"""Plain-torch twins of the kernels with the same signatures and results, to the byte; the oracle of the tests."""

from __future__ import annotations

import itertools

import torch

from gear_loader.kernels.append_plan import AppendPlan
from gear_loader.kernels.plan import (
    LINE,
    PAD_EDGE,
    PAD_HEAD,
    PAD_KEEP,
    GatherColumn,
    GatherMask,
    GatherPlan,
    PlacePlan,
)
from gear_loader.kernels.split_plan import SplitPlan

__all__ = ["append", "gather", "place", "split", "store"]


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
    into: slice | torch.Tensor = slice(count) if rows is None else rows
    parts: list[GatherColumn | GatherMask] = [*plan.columns, *plan.masks]
    for each in parts:
        out = each.out
        length = out.shape[1]
        steps = lengths + finals if each.final else lengths
        begin = anchors + each.offset
        low = begin.clamp(min=0).minimum(steps)
        high = (begin + length).minimum(steps).maximum(low)
        valid = high - low
        if each.pad in (PAD_KEEP, PAD_EDGE):
            head = torch.where(valid > 0, low - begin, length)
        elif each.pad == PAD_HEAD:
            head = length - valid
        else:
            head = torch.zeros_like(low)
        # [B, L] within the steps that exist
        position = torch.arange(length, device=slots.device) - head[:, None]
        mask = (position >= 0) & (position < valid[:, None])
        if isinstance(each, GatherMask):
            out[into] = mask
            continue
        shown = mask
        step = torch.where(mask, low[:, None] + position, 0)
        if each.pad == PAD_EDGE:
            step = torch.arange(length, device=slots.device) + begin[:, None]
            step, shown = step.clamp(min=0).minimum(steps[:, None] - 1), torch.ones_like(mask)
        block = block_ids[torch.where(shown, row[:, None] + step // plan.block_steps, 0)].long()
        inside = step % plan.block_steps
        found = _steps(each.source, each, plan.block_steps)[block, inside]
        out[into] = found.masked_fill_(~shown[:, :, None], 0)
        if each.mask is not None:
            each.mask[into] = mask


def _steps(blocks: torch.Tensor, column: GatherColumn, block_steps: int) -> torch.Tensor:
    """The steps of blocks, uint8 [blocks, steps, step_bytes]."""
    shape = blocks.shape[0], block_steps, column.step_bytes
    strides = blocks.stride(0), column.stride, 1
    return blocks.as_strided(shape, strides, blocks.storage_offset() + column.inside)


def place(plan: PlacePlan, staging: torch.Tensor, rows: torch.Tensor, *, programs: int | None = None) -> None:
    """Copy rows out of staging memory; see `gear_loader.kernels.place.place`. `programs` is not used."""
    count = plan.check_rows(staging, rows)
    for out, offset in zip(plan.outs, plan.offsets(count), strict=True):
        piece = staging[offset : offset + count * out.shape[1]].view(count, out.shape[1])
        out[rows] = piece.to(plan.device)


def split(
    plan: SplitPlan, count: int, *, rows: torch.Tensor | None = None, programs: int | None = None
) -> None:
    """Copy columns out of records; see `gear_loader.kernels.split.split`. `programs` is not used."""
    plan.check_rows(count, rows)
    these: slice | torch.Tensor = slice(count) if rows is None else rows
    for column in plan.columns:
        length, size = column.out.shape[1:]
        first, inside = column.first, column.inside
        column.out[these] = column.records[these, first : first + length, inside : inside + size]


def store(
    source: torch.Tensor,
    target: torch.Tensor,
    blocks: torch.Tensor,
    last_bytes: int,
    *,
    programs: int | None = None,
) -> None:
    """Copy images of blocks to their places; see `gear_loader.kernels.store.store`. `programs` is not used."""
    last = -(-last_bytes // LINE) * LINE
    at = blocks.long()
    target[at[:, :-1]] = source[:, :-1]
    target[at[:, -1], :last] = source[:, -1, :last]


def append(
    plan: AppendPlan,
    done: torch.Tensor | None,
    ends: torch.Tensor,
    blocks: torch.Tensor,
    *,
    final: bool = False,
    programs: int | None = None,
) -> None:
    """Append a row of each environment; see `gear_loader.kernels.append.append`. `programs` is not used."""
    for env, (steps, lane) in enumerate(plan.state.tolist()):
        over = steps > 0 if done is None else bool(done[env])
        rows = [(0, steps)] if done is not None else [(-1, steps - 1)] * over
        rows += [(1, steps + 1)] * (final and over and done is not None)
        for column, (row, step) in itertools.product(plan.columns, rows):
            size, (number, inside) = column.step_bytes, divmod(step, plan.block_steps)
            if row >= 0:
                column.image[env, inside * size : (inside + 1) * size] = column.rows[env, row, :size]
            whole = inside == plan.block_steps - 1 or (over and row == rows[-1][0])
            end = (inside + 1) * size + whole * (LINE - 1)
            lines = slice(inside * size // LINE * LINE, end // LINE * LINE)
            column.target[int(blocks[env * plan.lanes + lane, number]), lines] = column.image[env, lines]
        ends[env] = over
        steps, lane = (0, (lane + 1) % plan.lanes) if over else (steps + (done is not None), lane)
        plan.state[env] = torch.tensor([steps, lane], dtype=torch.int32, device=plan.state.device)
