"""Pictures made of lines: batch-size, collect, and how cost grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from benchmarks.reporting.findings import Growth, growths
from benchmarks.reporting.rows import Comparison, Row, speed
from benchmarks.reporting.style import curve, figure, legend_below, panels, plain, png, rates, styles
from benchmarks.showing import size

Point = tuple[float, float, float, float]


def draw_batch_size(found: Sequence[Comparison]) -> bytes | None:
    """Throughput against the number of rows in a batch, a panel a workload."""
    return _by_batch([c for c in found if c.experiment == "batch-size"], lambda row: True)


def draw_collect(found: Sequence[Comparison]) -> bytes | None:
    """Gathering W1 and W2 against the batch; of ours, with one size of blocks and the default number of programs."""
    chosen = [c for c in found if c.experiment == "collect" and c.workload != "rows"]
    sizes = [
        row["parameters"]["block_steps"]
        for c in chosen
        for row in c.ours
        if "block_steps" in row["parameters"]
    ]

    def wanted(row: Row) -> bool:
        block = row["parameters"].get("block_steps", sizes[0] if sizes else None)
        return block == sizes[0] and (not _kernel(row) or row["variant"] == "kernel, default")

    return _by_batch(chosen, wanted if sizes else lambda row: True)


def _kernel(row: Row) -> bool:
    return str(row["variant"]).startswith("kernel, ")


def _by_batch(chosen: Sequence[Comparison], wanted: Callable[[Row], bool]) -> bytes | None:
    chosen = [c for c in chosen if "batch" in c.parameters]
    chosen = [c for c in chosen if any(wanted(row) for row in c.ours)]
    kinds: dict[str, list[Comparison]] = {}
    for comparison in chosen:
        steps = comparison.parameters.get("block_steps")
        title = comparison.workload + (f", blocks of {steps} steps" if steps else "")
        part = comparison.parameters.get("part", "batches")
        kinds.setdefault(title if part in ("batches", title) else f"{title}, {part}", []).append(comparison)
    if not kinds:
        return None
    rows = {
        title: [row for c in kind for row in c.rows.values() if wanted(row)] for title, kind in kinds.items()
    }
    limits = {c.limit["variant"] for c in chosen if c.limit is not None}
    names = dict.fromkeys(row["variant"] for kind in rows.values() for row in kind)
    looks = styles(names, limits)
    wide = len(kinds) == 1
    with panels(len(kinds), 9.5 if wide else 5.6, 4.1, 0.9) as (made, places):
        for axes, (title, kind) in zip(places, kinds.items(), strict=True):
            for name in names:
                there = [(c, c.rows[name]) for c in kind if name in c.rows and wanted(c.rows[name])]
                points = [(float(c.parameters["batch"]), *rates(row)) for c, row in there]
                curve(axes, points, name, looks[name])
            counted = "GB/s" if any("bytes" in row for row in rows[title]) else "rows/s"
            axes.set(xscale="log", yscale="log", title=title, xlabel="rows in a batch", ylabel=counted)
            plain(axes.xaxis, [float(c.parameters["batch"]) for c in kind])
            plain(axes.yaxis)
            axes.grid(alpha=0.3)
        legend_below(made, places, columns=3 if wide else 4)
        return png(made)


def draw_rows(found: Sequence[Comparison]) -> bytes | None:
    """Sweeps of the kernel: share of the copy engine's rate against bytes of a row, and against programs."""
    chosen = [c for c in found if c.experiment == "collect" and c.workload == "rows" and c.limit is not None]
    if not chosen:
        return None
    steps = sorted({c.parameters.get("step_bytes") for c in chosen}, key=str)
    with figure(1, len(steps) + 1, (4.6 * (len(steps) + 1), 4.4), sharey=True) as (made, (panels,)):
        for axes, step in zip(panels, steps, strict=False):
            kind = [c for c in chosen if c.parameters.get("step_bytes") == step]
            _row_sizes(axes, kind, f"steps of {step} B, best number of programs")
        _programs(panels[-1], chosen)
        panels[0].set(ylabel="share of the copy engine's rate", ylim=(0, None))
        for axes in panels:
            axes.axhline(1, color="#6c757d", linestyle="--", linewidth=1)
            axes.grid(alpha=0.3)
            axes.legend(fontsize=8, ncols=2, loc="lower right")
        return png(made)


def _share(row: Row) -> tuple[float, float, float]:
    low, mid, high = (row["ratio"][q] for q in ("p10", "p50", "p90"))
    return low, mid, high


def _row_sizes(axes: Any, kind: Sequence[Comparison], title: str) -> None:
    batches = sorted({c.parameters["batch"] for c in kind})
    looks = styles(f"kernel, batch {batch}" for batch in batches)
    for batch in batches:
        points = [
            (float(c.parameters["row_bytes"]), *_share(max(c.ours, key=speed)))
            for c in kind
            if c.parameters["batch"] == batch and c.ours
        ]
        curve(axes, points, f"batch {batch}", looks[f"kernel, batch {batch}"])
    axes.set(xscale="log", xlabel="bytes of a row", title=title)
    ticks = sorted({c.parameters["row_bytes"] for c in kind})[::2]
    axes.set_xticks(ticks, [size(value) for value in ticks], fontsize=8, rotation=30)
    axes.minorticks_off()


def _programs(axes: Any, chosen: Sequence[Comparison]) -> None:
    largest = max(c.parameters["batch"] for c in chosen)
    kind = [c for c in chosen if c.parameters["batch"] == largest]
    kind = sorted(kind, key=lambda c: c.parameters["row_bytes"])[:: max(1, len(kind) // 4)]
    looks = styles(f"kernel, {i}" for i in range(len(kind)))
    for i, comparison in enumerate(kind):
        points = [
            (float(row["parameters"]["programs"]), *_share(row))
            for row in comparison.ours
            if row["parameters"].get("programs")
        ]
        curve(axes, points, f"rows of {size(comparison.parameters['row_bytes'])}", looks[f"kernel, {i}"])
    axes.set(xscale="log", xlabel="programs", title=f"batch {largest}")
    values = [row["parameters"].get("programs") for comparison in kind for row in comparison.ours]
    plain(axes.xaxis, [float(value) for value in values if value])


def draw_growth(found: Sequence[Comparison]) -> bytes | None:
    """A panel for each parameter along which cost was measured: ours, the limit, the quickest of the others."""
    there = growths(found)
    if not there:
        return None
    with panels(len(there), 5.6, 3.9) as (made, places):
        for axes, growth in zip(places, there, strict=True):
            _growth(axes, growth)
        return png(made)


def _growth(axes: Any, growth: Growth) -> None:
    values = sorted({point[0] for line in growth.lines.values() for point in line})
    looks = styles(growth.lines, growth.limits)
    for name, line in growth.lines.items():
        curve(axes, line, name, looks[name])
    wide = values[-1] > 8 * values[0]
    axes.set(xscale="log" if wide else "linear", yscale="log")
    axes.set(xlabel=growth.along, ylabel=growth.unit, title=growth.work[0].upper() + growth.work[1:])
    if wide and values[-1] >= 4096 and "bytes" in growth.along:
        axes.set_xticks(values[::2], [size(value) for value in values[::2]])
        axes.minorticks_off()
    else:
        plain(axes.xaxis, values)
    plain(axes.yaxis)
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9)
