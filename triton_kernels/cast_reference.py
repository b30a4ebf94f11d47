"""The plain-torch twin of `cast`, with the same signature."""

from __future__ import annotations

from gear_loader.kernels.cast_plan import CastPlan

__all__ = ["cast"]


def cast(plan: CastPlan, count: int, *, programs: int | None = None) -> None:
    """Convert the first rows of the plan's columns; see `gear_loader.kernels.cast.cast`. `programs` is not used."""
    plan.check_count(count)
    for column in plan.columns:
        source = column.source[:count]
        column.out[:count] = source if column.scale is None else source * column.scale
