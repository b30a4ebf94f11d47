"""How windows are gathered from one table: the columns of the CPU's loop, and the plans of a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    LENGTH,
    OFFSET,
    PAD,
    PAD_EDGE,
    PAD_HEAD,
    PAD_KEEP,
    PAD_TAIL,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
    WIDTH,
    GatherColumn,
    GatherMask,
    GatherPlan,
)
from gear_loader.kernels.split_plan import SplitColumn, SplitPlan
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Schema, Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

PADS = {"keep": PAD_KEEP, "head": PAD_HEAD, "tail": PAD_TAIL, "edge": PAD_EDGE}

Records = dict[tuple[int, int, str, bool, int], torch.Tensor]
"""Length, offset, padding, final step and bytes of gathered records -> their memory, uint8 [B, length, bytes]. It
belongs to a set of buffers: the plans of all tables use the same."""


@dataclasses.dataclass(frozen=True, eq=False)
class Output:
    """What one window fills.

    Attributes:
        column: the column that it reads. window: the window.
        out: uint8 [B, L, step_bytes]; None of a GPU's window of which only the mask is wanted.
        mask: bool [B, L] if this window fills it, or None.
    """

    column: str
    window: Window
    out: Any
    mask: torch.Tensor | None


@dataclasses.dataclass(frozen=True)
class Plans:
    """The plans by which the windows of one table are gathered.

    Attributes:
        steps: of the windows of steps, where the columns of a record are gathered as one column.
        once: of the columns per trajectory. split: of the columns in gathered records.
    """

    steps: GatherPlan
    once: GatherPlan | None = None
    split: SplitPlan | None = None


def window_columns(schema: Schema, sources: Sequence[str], windows: Iterable[Window]) -> Array:
    """Rows of a gather plan for the CPU's loop, without addresses, int64 [C, WIDTH].

    Args:
        sources: the column that each window reads.
    """
    columns: Array = np.zeros((len(sources), WIDTH), dtype=np.int64)
    for row, source, window in zip(columns, sources, windows, strict=True):
        row[LENGTH], row[OFFSET], row[PAD] = window.length, window.offset, PADS[window.pad]
        row[STEP_BYTES], row[FINAL] = schema[source].step_bytes, schema[source].final
    return columns


def locate_columns(columns: Array, sources: Sequence[str], region: Region) -> Array:
    """Write where the columns of a table lie into rows of a gather plan, int64 [C, WIDTH]; return them."""
    for row, source in zip(columns, sources, strict=True):
        place = region.layout.columns[source]
        row[BASE] = region.column_place(source)[0]
        row[STRIDE], row[BLOCKS] = place.block_stride, region.layout.host_blocks or region.layout.num_blocks
        row[STEP_BYTES], row[STEP_STRIDE] = place.step_bytes, place.step_stride
    return columns


def plans_of(table: Table, outputs: Sequence[Output], records: Records, *, host: bool = False) -> Plans:
    """The plans by which a GPU fills `outputs` from a table.

    Args:
        table: whose region the device that gathers can read.
        outputs: of the windows, at least one with steps.
        records: memory of gathered records; what is missing is allocated on the current stream.
        host: whether from the host part of a table on a GPU.
    """
    region, schema = table._engine.region, table.schema
    layout, blocks_of = region.layout, region.host_blocks if host else region.blocks

    def column_of(output: Output) -> GatherColumn:
        place, column = layout.columns[output.column], schema[output.column]
        return GatherColumn(
            source=blocks_of(output.column),
            out=output.out,
            offset=output.window.offset,
            pad=PADS[output.window.pad],
            mask=output.mask,
            final=column.final,
            once=column.trajectory,
            inside=place.inside,
            step_stride=place.step_stride,
        )

    masks = [
        GatherMask(output.mask, output.window.offset, PADS[output.window.pad], schema[output.column].final)
        for output in outputs
        if output.out is None and output.mask is not None
    ]
    outputs = [output for output in outputs if output.out is not None]
    # A batch brings the blocks of its windows, and the first one of its trajectory in a place apart.
    once = [column_of(output) for output in outputs if schema[output.column].trajectory]
    packed = [output for output in outputs if layout.columns[output.column].is_packed]
    columns = [
        column_of(output)
        for output in outputs
        if not schema[output.column].trajectory and not layout.columns[output.column].is_packed
    ]
    split: list[SplitColumn] = []
    for span, group in _record_spans(packed, lambda output: schema[output.column].final):
        assert layout.record is not None
        length, offset, pad, final = span
        out = group[0].out
        key = (*span, layout.record.bytes)
        if key not in records:
            records[key] = out.new_empty(len(out), length, layout.record.bytes)
        source = blocks_of(group[0].column)
        columns.append(GatherColumn(source, records[key], offset, PADS[pad], final=final))
        for output in group:
            inside, first = layout.columns[output.column].inside, output.window.offset - offset
            split.append(SplitColumn(records[key], output.out, first, inside))
            if output.mask is not None:
                own = output.window.offset, PADS[output.window.pad], schema[output.column].final
                masks.append(GatherMask(output.mask, *own))
    return Plans(
        GatherPlan(columns, layout.block_steps, masks),
        GatherPlan(once, 1) if once else None,
        SplitPlan(split) if split else None,
    )


def _record_spans(
    outputs: Sequence[Output], is_final: Callable[[Output], bool]
) -> list[tuple[tuple[int, int, str, bool], list[Output]]]:
    """The windows of records that are gathered, and the outputs whose windows lie in each.

    Where padding stays in its place, a window is a part of any longer one around it, so neighbours share one unless it
    were longer than theirs together. A final step is zeros in columns without one, which is their padding there.

    Returns:
        Length, offset, padding and whether the final step is read, with the outputs.
    """
    kinds: dict[tuple[object, ...], list[Output]] = {}
    for output in outputs:
        window, final = output.window, is_final(output)
        key: tuple[object, ...] = (window.pad, final) if window.pad == "edge" else (window.pad,)
        kinds.setdefault(key if window.pad in ("keep", "edge") else (*window.span, final), []).append(output)
    spans: list[tuple[tuple[int, int, str, bool], list[Output]]] = []
    for group in kinds.values():
        ordered = sorted(group, key=lambda output: output.window.offset)
        while ordered:
            begin, end = ordered[0].window.offset, ordered[0].window.offset + ordered[0].window.length
            count = 1
            for output in ordered[1:]:
                low, high = output.window.offset, output.window.offset + output.window.length
                if max(end, high) - begin > end - begin + high - low:
                    break
                end, count = max(end, high), count + 1
            part, ordered = ordered[:count], ordered[count:]
            final = any(is_final(output) for output in part)
            spans.append(((end - begin, begin, part[0].window.pad, final), part))
    return spans
