"""The tables of the page: ours beside the limit and every other variant, and all rows."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from benchmarks.reporting.findings import duration
from benchmarks.reporting.rows import DESCRIBING, Comparison, Row, grouped

_COUNTED = ("online", "train")  # where rows a second say more than the time of a batch


class Cell(NamedTuple):
    """A figure with its unit, and how many times as fast the table's first column is; empty if there is none."""

    figure: str = ""
    ratio: str = ""
    lost: bool = False  # whether the other is faster


class Matrix(NamedTuple):
    """Comparisons of one kind, one a line."""

    title: str
    first: str  # our variant that the others are compared with
    limit: str  # the yardstick's name, or empty
    others: Sequence[str]
    ways: Sequence[str]  # columns of ours
    lines: Sequence[
        tuple[str, str, str, Sequence[Cell]]
    ]  # label, first's figure, its p10 to p90, the others'


def amount(row: Row, quantile: str = "p50") -> str:
    """A figure with its unit: GB/s of bytes, else a rate or a time, else what the row says."""
    if "amount" in row:
        value = row["amount"][quantile]
        missing = value is None or not math.isfinite(value)
        return "–" if missing else f"{value:,.3g} {row.get('unit', '')}".strip()
    seconds = row["seconds"][quantile]
    if not seconds:
        return "–"
    if "bytes" in row:
        return f"{row['bytes'] / seconds / 1e9:.3g} GB/s"
    if row["experiment"] in _COUNTED:
        return f"{row.get('rows', 1) / seconds:,.0f}/s"
    return duration(seconds)


def scatter(row: Row) -> str:
    """p10 to p90 of that figure, in one unit."""
    ends = ("p90", "p10") if amount(row).endswith("/s") and "seconds" in row else ("p10", "p90")
    low, high = (amount(row, quantile) for quantile in ends)
    number, _, unit = low.partition(" ")
    return f"{number} – {high}" if high.endswith(unit) else f"{low} – {high}"


def matrices(found: Sequence[Comparison]) -> list[Matrix]:
    """A table for each workload whose comparisons have the same first variant and the same limit."""

    def kind(comparison: Comparison) -> tuple[str, ...]:
        limit = comparison.limit["variant"] if comparison.limit is not None else ""
        part = comparison.parameters.get("part", "")
        return comparison.workload, part, comparison.ours[0]["variant"], limit

    kinds = grouped((comparison for comparison in found if comparison.ours), kind)
    return [_matrix(*name, comparisons) for name, comparisons in kinds.items()]


def _matrix(workload: str, part: str, first: str, limit: str, found: Sequence[Comparison]) -> Matrix:
    others = list(dict.fromkeys(row["variant"] for c in found for row in c.others))
    ways = list(dict.fromkeys(row["variant"] for c in found for row in c.ours[1:]))
    names = [*([limit] if limit else []), *others, *ways]
    lines = [
        (c.label, amount(c.ours[0]), scatter(c.ours[0]), [_cell(c, name) for name in names]) for c in found
    ]
    title = f"{workload}: {part}" if part and part != workload else workload
    return Matrix(title, first, limit, others, ways, lines)


def _cell(comparison: Comparison, name: str) -> Cell:
    row = comparison.rows.get(name)
    if row is None:
        return Cell()
    ratio = comparison.ratio(comparison.ours[0], row)
    if math.isnan(ratio):
        return Cell(amount(row))
    return Cell(amount(row), times(ratio), lost=ratio < 1 and row in comparison.others)


def times(ratio: float) -> str:
    """A ratio as people read it."""
    if ratio >= 9.95:
        return f"{ratio:,.0f}×"
    if ratio >= 1.95:
        return f"{ratio:.1f}×"
    return f"{ratio:.2f}×" if ratio >= 0.1 else f"{ratio:.2g}×"


def every_row(found: Iterable[Comparison]) -> list[dict[str, str]]:
    """All rows of some comparisons, as texts."""

    def line(comparison: Comparison, row: Row) -> dict[str, str]:
        hidden = {*DESCRIBING, *comparison.parameters}
        own = {name: value for name, value in row["parameters"].items() if name not in hidden}
        mid = row.get("ratio", {}).get("p50")
        return {
            "label": comparison.label,
            "workload": comparison.workload,
            "variant": row["variant"],
            "own": json.dumps(own)[1:-1].replace('"', ""),
            "figure": amount(row),
            "scatter": scatter(row),
            "run": row["run"],
            "ratio": "" if mid is None else f"{mid:.2f}× {row['yardstick']}",
            "repeats": str(row.get("repeats", "")),
        }

    return [line(comparison, row) for comparison in found for row in comparison.rows.values()]
