"""What a batch must hold, by the definition of a window: the oracle of the tests that look at batches.

A trajectory is a mapping of column names to arrays ``[T, *shape]``, or ``[*shape]`` of columns per trajectory. Its
final step, if it has one, is a mapping of its own: column -> ``[*shape]``.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

import gear_loader as gear

Trajectory = Mapping[str, Any]


@dataclasses.dataclass(frozen=True)
class Row:
    """A row of a batch: a trajectory's number in the list of them, and the step that windows are relative to."""

    trajectory: int
    anchor: int = 0


def batch(
    schema: Mapping[str, gear.Column],
    trajectories: Sequence[Trajectory],
    rows: Sequence[Row],
    windows: Mapping[str, Any],
    *,
    layout: str = "padded",
    finals: Mapping[int, Trajectory] | None = None,
) -> dict[str, Any]:
    """The values and masks of a batch as arrays; in padded layout `masks` maps the name of each window to its mask.

    Args:
        windows: name -> Window or Whole; None for a column per trajectory.
        layout: "padded", or "packed": steps of the rows one after another, `cu_seqlens` and `position`.
        finals: final steps, by the number of their trajectory.
    """
    finals = {} if finals is None else finals
    found: dict[str, Any] = {}
    masks: dict[str, np.ndarray] = {}
    spans: list[np.ndarray] = []
    for name, window in windows.items():
        source = name if window is None or window.column is None else window.column
        column = schema[source]
        if column.per == "trajectory":
            values = [array_of(trajectories[row.trajectory][source], column) for row in rows]
            found[name] = converted(stacked(values, column.shape, column), window)
            continue
        # Packed rows have final steps only where they are asked for, zeros in columns without.
        ends = finals if layout == "padded" or getattr(window, "final", False) else {}
        steps = [
            steps_of(trajectories[row.trajectory], source, column, ends.get(row.trajectory)) for row in rows
        ]
        if layout == "packed":
            steps = [
                np.concatenate((each, steps_like(1, column)))
                if row.trajectory in ends and not column.final
                else each
                for row, each in zip(rows, steps, strict=True)
            ]
        if layout == "packed":
            spans = [existing(window, row.anchor, len(each)) for row, each in zip(rows, steps, strict=True)]
            each = [part[span] for part, span in zip(steps, spans, strict=True)]
            found[name] = converted(np.concatenate(each) if each else steps_like(0, column), window)
            continue
        if window.timestamps is None:
            pairs = [padded(window, row.anchor, each) for row, each in zip(rows, steps, strict=True)]
        else:
            lines = [
                array_of(trajectories[row.trajectory][window.timestamps], schema[window.timestamps])
                for row in rows
            ]
            given = zip(rows, steps, lines, strict=True)
            pairs = [nearest(window, row.anchor, each, line) for row, each, line in given]
        values = [values for values, _ in pairs]
        found[name] = converted(stacked(values, (window.length, *column.shape), column), window)
        masks[name] = np.array([mask for _, mask in pairs], dtype=bool).reshape(len(rows), window.length)
        if window.squeeze:
            found[name], masks[name] = found[name][:, 0], masks[name][:, 0]
    if layout == "packed":
        counts = np.array([len(span) for span in spans], dtype=np.int64)
        found["cu_seqlens"] = np.concatenate(([0], np.cumsum(counts))).astype(np.int32)
        found["position"] = np.concatenate([np.empty(0, dtype=np.int32), *spans]).astype(np.int32)
        found["max_seqlen"] = int(counts.max(initial=0))
    else:
        found["masks"] = masks
    return found


def existing(window: Any, anchor: int, length: int) -> np.ndarray:
    """The steps of a window that exist in a trajectory of `length` steps, ascending."""
    if isinstance(window, gear.Whole):
        return np.arange(length)
    steps = np.arange(anchor + window.offset, anchor + window.offset + window.length)
    return steps[(steps >= 0) & (steps < length)]


def padded(window: gear.Window, anchor: int, steps: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The values of a window, ``[length, *shape]``, and which of them exist, bool ``[length]``."""
    relative = np.arange(window.length) * window.every if window.at is None else np.array(window.at)
    wanted = anchor + window.offset + relative
    mask = (wanted >= 0) & (wanted < len(steps))
    values = np.zeros((window.length, *steps.shape[1:]), dtype=steps.dtype)
    values[mask] = steps[wanted[mask]]
    if window.pad == "edge":
        values = steps[np.clip(wanted, 0, len(steps) - 1)]
    elif window.pad in ("head", "tail"):
        order = np.argsort(mask if window.pad == "head" else ~mask, kind="stable")
        values, mask = values[order], mask[order]
    return values, mask


def nearest(
    window: gear.Window, anchor: int, steps: np.ndarray, times: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """As `padded`, of a window of times; times: of the steps, ``[T]``."""
    assert window.at is not None
    distances = np.abs(
        (times.reshape(-1) - times.reshape(-1)[anchor]).astype(float) - np.array(window.at)[:, None]
    )
    found = distances.argmin(axis=1)
    mask = distances.min(axis=1) <= (window.tolerance or 0.0)
    values = steps[found]
    if window.pad == "keep":
        values = np.where(mask.reshape(-1, *[1] * (values.ndim - 1)), values, np.zeros_like(values))
    return values, mask


def steps_of(
    trajectory: Trajectory, source: str, column: gear.Column, final: Trajectory | None
) -> np.ndarray:
    """The steps of a column that a window may read: with the final step, if the column has final steps."""
    steps = array_of(trajectory[source], column)
    if not column.final or final is None:
        return steps
    return np.concatenate((steps, array_of(final[source], column)[None]))


def array_of(values: Any, column: gear.Column) -> np.ndarray:
    """Values as an array of the bytes that a table stores."""
    return numpy_of(torch.as_tensor(values).to(column.dtype))


def numpy_of(values: torch.Tensor) -> np.ndarray:
    """As an array; bfloat16, which numpy does not have, as int16 of the same bits."""
    return (values.view(torch.int16) if values.dtype == torch.bfloat16 else values).numpy()


def steps_like(count: int, column: gear.Column) -> np.ndarray:
    return numpy_of(torch.zeros(count, *column.shape, dtype=column.dtype))


def stacked(values: Sequence[np.ndarray], shape: Sequence[int], column: gear.Column) -> np.ndarray:
    return np.stack(values) if values else steps_like(0, column).reshape(0, *shape)


def converted(values: np.ndarray, window: Any) -> np.ndarray:
    """Values in the dtype and scale of a window, as PyTorch computes them."""
    if window is None or (window.scale is None and window.dtype is None):
        return values
    tensor = torch.from_numpy(values)
    if window.scale is not None:
        tensor = tensor * window.scale
    return numpy_of(tensor if window.dtype is None else tensor.to(window.dtype))
