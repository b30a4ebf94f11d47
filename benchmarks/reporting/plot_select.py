"""A picture of what ``select`` has measured.

On the left the cycle of a batch of 1024 against the number of items, on the right the cycle at 10^6 items against the
batch size; medians, with p10 to p90 as a band; hollow where draws are not quite in proportion.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.rows import Row
from benchmarks.reporting.style import curve, figure, goal, legend_below, plain, png, styles

BATCH, ITEMS = 1024, 10**6


def cycles(rows: Iterable[Row]) -> list[Row]:
    return [row for row in rows if (row["experiment"], row["workload"]) == ("select", "cycle")]


def draw(rows: Iterable[Row]) -> bytes | None:
    rows = cycles(rows)
    if not rows:
        return None
    batches = sorted({row["parameters"]["batch"] for row in rows})
    counts = sorted({row["parameters"]["items"] for row in rows})
    batch = min(batches, key=lambda value: abs(value - BATCH))
    items = min(counts, key=lambda value: abs(value - ITEMS))
    names = sorted({row["variant"]: None for row in rows}, key=lambda name: not name.startswith("ours"))
    looks = styles(names)
    with figure(1, 2, (11.2, 5.9), sharey=True) as (made, ((left, right),)):
        _lines(left, [row for row in rows if row["parameters"]["batch"] == batch], "items", looks)
        _lines(right, [row for row in rows if row["parameters"]["items"] == items], "batch", looks)
        for limit in {row["limit"] for row in rows if "limit" in row and row["parameters"]["batch"] == batch}:
            goal(left, limit * 1e6, f"target {limit * 1e6:.0f} µs")
        left.set(xlabel="number of items N", ylabel="one cycle, µs", title=f"Batches of {batch:,}")
        right.set(xlabel="items in a batch", title=f"N = {items:,} items")
        plain(left.xaxis, counts)
        plain(right.xaxis, batches)
        legend_below(made, (left, right), columns=5)
        return png(made)


def _lines(axes: Any, rows: Sequence[Row], along: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    axes.set(xscale="log", yscale="log")
    for name, style in looks.items():
        mine = sorted(
            (row for row in rows if row["variant"] == name), key=lambda row: float(row["parameters"][along])
        )
        points = [
            (row["parameters"][along], *(row["seconds"][q] * 1e6 for q in ("p10", "p50", "p90")))
            for row in mine
        ]
        curve(axes, points, name, style)
        # What is marked by a star in tables: draws that are not quite in proportion.
        inexact = [point for point, row in zip(points, mine, strict=True) if "bias" in row["parameters"]]
        axes.scatter([point[0] for point in inexact], [point[2] for point in inexact], 14, "white", zorder=4)
    plain(axes.yaxis)
    axes.grid(alpha=0.3)
