"""``python -m benchmarks select-plot``: a picture of what ``select`` has measured, from its JSON lines.

On the left the cycle of a batch of 1024 against the number of items, on the right the cycle at 10^6 items against the
batch size; medians, with p10 to p90 as a band; hollow where draws are not quite in proportion. Of rows that measure the
same, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plotting import Out, Row, Rows, last_of_each, parsed, picture

__all__ = ["command", "cycles", "draw"]

BATCH, ITEMS = 1024, 10**6
_OURS = ("#c1121f", "#f77f00", "#7b2cbf")
_OTHERS = ("#1d3557", "#2a9d8f", "#457b9d", "#6c757d", "#588157", "#a98467", "#8ecae6")
_MARKERS = "osD^vP*X<>"


def command(rows: Rows = None, out: Out = None) -> None:
    """Plot what select has measured."""
    picture("select", rows, out, cycles, draw)


def cycles(lines: Iterable[str]) -> list[Row]:
    """The rows of cycles; of those that measure the same, the last one."""

    def key(row: Row) -> tuple[Any, ...]:
        parameters = row["parameters"]
        return row["device"], row["variant"], parameters["items"], parameters["batch"]

    return last_of_each((row for row in parsed(lines, "select") if row["workload"] == "cycle"), key)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw both panels into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    batches = sorted({row["parameters"]["batch"] for row in rows})
    counts = sorted({row["parameters"]["items"] for row in rows})
    batch = min(batches, key=lambda value: abs(value - BATCH))
    items = min(counts, key=lambda value: abs(value - ITEMS))
    devices = sorted({row["device"] for row in rows})
    names = list(dict.fromkeys(_label(row, devices) for row in rows))
    styles = _styles(names)
    with plt.rc_context({"font.size": 10, "axes.spines.top": False, "axes.spines.right": False}):
        figure, (left, right) = plt.subplots(1, 2, figsize=(12.5, 6.2), sharey=True, layout="constrained")
        panels = ((left, "items", "batch", batch), (right, "batch", "items", items))
        for axes, along, fixed, value in panels:
            for name in names:
                # What is marked by a star in tables: draws that are not quite in proportion.
                inexact = {
                    row["parameters"][along]
                    for row in rows
                    if _label(row, devices) == name and row["parameters"][fixed] == value
                    if "bias" in row["parameters"]
                }
                points = sorted(
                    (row["parameters"][along], *(row["seconds"][q] * 1e6 for q in ("p10", "p50", "p90")))
                    for row in rows
                    if _label(row, devices) == name and row["parameters"][fixed] == value
                )
                if points:
                    x, low, mid, high = zip(*points, strict=True)
                    axes.plot(x, mid, label=name, **styles[name])
                    hollow = [point for point in points if point[0] in inexact]
                    axes.scatter(
                        [point[0] for point in hollow], [point[2] for point in hollow], 18, "white", zorder=4
                    )
                    axes.fill_between(x, low, high, color=styles[name]["color"], alpha=0.1, linewidth=0)
            limits = {row["limit"] for row in rows if "limit" in row and row["parameters"][fixed] == value}
            for limit in limits if along == "items" else ():
                axes.axhline(limit * 1e6, color="black", linestyle=":", linewidth=1)
                axes.annotate(
                    f"target {limit * 1e6:.0f} µs",
                    (0.01, limit * 1e6),
                    xycoords=("axes fraction", "data"),
                    va="bottom",
                )
            axes.set(xscale="log", yscale="log")
            axes.grid(which="major", alpha=0.35)
            axes.grid(which="minor", axis="y", alpha=0.12)
        left.set(
            xlabel="number of items N",
            ylabel="one cycle, µs (median; band: p10 to p90)",
            title=f"Batch {batch}",
        )
        right.set(xlabel="batch size, items", title=f"N = {items:,} items")
        right.set_xticks(batches, [f"{value:,}" for value in batches])
        right.minorticks_off()
        figure.suptitle(
            f"Draw a batch by priority, then update it with new priorities ({', '.join(devices)})"
        )
        handles, labels = left.get_legend_handles_labels()
        figure.legend(handles, labels, loc="outside right center", frameon=False)
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _label(row: Row, devices: Sequence[str]) -> str:
    name = str(row["variant"])
    return name if len(devices) == 1 else f"{name} ({row['device']})"


def _styles(names: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Ours in warm colours and thick, the others thin; each with a marker of its own."""
    ours = [name for name in names if name.startswith("ours")]
    styles: dict[str, dict[str, Any]] = {}
    for i, name in enumerate([*ours, *(name for name in names if name not in ours)]):
        mine = name in ours
        colours, place = (_OURS, i) if mine else (_OTHERS, i - len(ours))
        styles[name] = {
            "color": colours[place % len(colours)],
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 6 if mine else 5,
            "linewidth": 2.4 if mine else 1.3,
            "linestyle": "-" if place < len(colours) else "--",
            "zorder": 3 if mine else 2,
        }
    return styles
