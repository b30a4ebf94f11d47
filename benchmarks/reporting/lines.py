"""Pictures made of lines: batch-size, collect, select, and how cost grows."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from benchmarks.reporting.findings import Growth, growths
from benchmarks.reporting.rows import Comparison, Row, grouped, speed, three
from benchmarks.reporting.style import Value, curve, goal, lines, picture, plain, rates, size_ticks, styles
from benchmarks.showing import size

_CYCLE = {"batch": 1024, "items": 10**6}


def draw_batch_size(found: Sequence[Comparison]) -> bytes | None:
    """Throughput against the number of rows in a batch, a panel a workload."""
    return _by_batch([c for c in found if c.experiment == "batch-size"], lambda row: True)


def draw_collect(found: Sequence[Comparison]) -> bytes | None:
    """Gathering W1 and W2 against the batch; of ours, with one size of blocks and the default number of programs."""
    chosen = [c for c in found if c.experiment == "collect" and c.workload != "rows"]
    ours = (row["parameters"] for c in chosen for row in c.ours)
    first = next((told["block_steps"] for told in ours if "block_steps" in told), None)

    def wanted(row: Row) -> bool:
        varied = str(row["variant"]).startswith("kernel, ") and row["variant"] != "kernel, default"
        return first is None or (row["parameters"].get("block_steps", first) == first and not varied)

    return _by_batch(chosen, wanted)


def _by_batch(found: Sequence[Comparison], wanted: Callable[[Row], bool]) -> bytes | None:
    def title(comparison: Comparison) -> str:
        steps = comparison.parameters.get("block_steps")
        text = comparison.workload + (f", blocks of {steps} steps" if steps else "")
        part = comparison.parameters.get("part", "batches")
        return text if part in ("batches", text) else f"{text}, {part}"

    chosen = [c for c in found if "batch" in c.parameters and any(map(wanted, c.ours))]
    kinds = grouped(chosen, title)
    names = (n for kind in kinds.values() for c in kind for n, row in c.rows.items() if wanted(row))
    looks = styles(names, {c.limit["variant"] for c in chosen if c.limit is not None})

    def panel(axes: Any, title: str, kind: Sequence[Comparison]) -> None:
        rows = [(c.parameters["batch"], row) for c in kind for row in c.rows.values() if wanted(row)]
        series: dict[str, list[Value]] = {name: [] for name in looks}
        for batch, row in rows:
            series[row["variant"]].append((float(batch), *rates(row)))
        labels = {"title": title, "xlabel": "rows in a batch"}
        counted = "GB/s" if any("bytes" in row for _, row in rows) else "rows/s"
        lines(axes, series, looks, ticks=[float(batch) for batch, _ in rows], ylabel=counted, **labels)

    wide = len(kinds) == 1
    panels = [partial(panel, title=title, kind=kind) for title, kind in kinds.items()]
    return picture(panels, 9.5 if wide else 5.6, 4.1, more=0.9, legend=3 if wide else 4)


def draw_exhaustion(found: Sequence[Comparison]) -> bytes | None:
    """Reading tables larger than their memory against the share in memory, a panel for each way of drawing."""
    chosen = [c for c in found if c.experiment == "exhaustion" and c.workload in ("uniform", "prioritized")]
    kinds = grouped(chosen, lambda c: c.workload)
    looks = styles((name for c in chosen for name in c.rows), ["preadv"])

    def panel(axes: Any, title: str, kind: Sequence[Comparison]) -> None:
        series: dict[str, list[Value]] = {name: [] for name in looks}
        for c in kind:
            for name, row in c.rows.items():
                series[name].append((float(c.parameters["share"]), *rates(row)))
        shares = sorted({float(c.parameters["share"]) for c in kind})
        labels = {"title": title, "xlabel": "share in memory, %", "ylabel": "GB/s"}
        lines(axes, series, looks, ticks=shares, logarithmic="y", **labels)

    panels = [partial(panel, title=title, kind=kind) for title, kind in kinds.items()]
    return picture(panels, 5.6, 4.4, more=0.9, legend=4) if panels else None


def draw_rows(found: Sequence[Comparison]) -> bytes | None:
    """Sweeps of the kernel: share of the copy engine's rate against bytes of a row, and against programs."""
    chosen = [c for c in found if c.experiment == "collect" and c.workload == "rows" and c.limit is not None]
    if not chosen:
        return None
    steps = grouped(chosen, lambda c: c.parameters.get("step_bytes"))
    steps = {step: kind for step, kind in steps.items() if len({c.parameters["row_bytes"] for c in kind}) > 1}

    def last(axes: Any) -> None:
        _programs(axes, chosen)
        every = axes.figure.axes
        every[0].set(ylabel="share of the copy engine's rate", ylim=(0, None))
        for each in every:
            each.axhline(1, color="#6c757d", linestyle="--", linewidth=1)
            each.grid(alpha=0.3)
            each.legend(fontsize=8, ncols=2, loc="lower right")

    panels = [*(partial(_row_sizes, step=step, kind=steps[step]) for step in sorted(steps, key=str)), last]
    return picture(panels, 4.6, 4.4, columns=len(panels), sharey=True)


def _row_sizes(axes: Any, step: Any, kind: Sequence[Comparison]) -> None:
    batches = grouped((c for c in kind if c.ours), lambda c: c.parameters["batch"])
    looks = styles(f"kernel, batch {batch}" for batch in sorted({c.parameters["batch"] for c in kind}))
    for batch in sorted(batches):
        best = ((c.parameters["row_bytes"], max(c.ours, key=speed)) for c in batches[batch])
        points = [(float(value), *three(row["ratio"])) for value, row in best]
        curve(axes, points, f"batch {batch}", looks[f"kernel, batch {batch}"])
    axes.set(xscale="log", xlabel="bytes of a row", title=f"steps of {step} B, best number of programs")
    size_ticks(axes, sorted({c.parameters["row_bytes"] for c in kind})[::2], fontsize=8, rotation=30)


def _programs(axes: Any, chosen: Sequence[Comparison]) -> None:
    largest = max(c.parameters["batch"] for c in chosen)
    kind = [c for c in chosen if c.parameters["batch"] == largest]
    kind = sorted(kind, key=lambda c: c.parameters["row_bytes"])[:: max(1, len(kind) // 4)]
    values = set()
    for comparison, look in zip(kind, styles(f"kernel, {i}" for i in range(len(kind))).values(), strict=True):
        rows = [row for row in comparison.ours if row["parameters"].get("programs")]
        points = [(float(row["parameters"]["programs"]), *three(row["ratio"])) for row in rows]
        curve(axes, points, f"rows of {size(comparison.parameters['row_bytes'])}", look)
        values |= {point[0] for point in points}
    axes.set(xscale="log", xlabel="programs", title=f"batch {largest}")
    plain(axes.xaxis, values)


def draw_select(found: Sequence[Comparison]) -> bytes | None:
    """The cycle of a batch of 1024 against the number of items; that at 10^6 items against the batch."""
    chosen = [c for c in found if (c.experiment, c.workload) == ("select", "cycle")]
    rows = [row for c in chosen for row in c.rows.values()]
    if not rows:
        return None
    looks = styles(
        sorted(dict.fromkeys(row["variant"] for row in rows), key=lambda n: not n.startswith("ours"))
    )
    values = {name: sorted({row["parameters"][name] for row in rows}) for name in _CYCLE}
    held = {name: min(values[name], key=lambda value: abs(value - _CYCLE[name])) for name in _CYCLE}

    def panel(axes: Any, along: str, fixed: str, **labels: str) -> None:
        there = [row for row in rows if row["parameters"][fixed] == held[fixed]]
        series: dict[str, list[Value]] = {name: [] for name in looks}
        inexact = []
        for row in there:
            low, mid, high = (1e6 * value for value in three(row["seconds"]))
            point = (row["parameters"][along], low, mid, high)
            series[row["variant"]].append(point)
            # What is marked by a star in tables: draws that are not quite in proportion.
            inexact += [point] * ("bias" in row["parameters"])
        axes.scatter([p[0] for p in inexact], [p[2] for p in inexact], 14, "white", zorder=4)
        lines(axes, series, looks, ticks=values[along], **labels)
        for limit in {row["limit"] for row in there if "limit" in row and along == "items"}:
            goal(axes, limit * 1e6, f"target {limit * 1e6:.0f} µs")

    told = {
        "xlabel": "number of items N",
        "ylabel": "one cycle, µs",
        "title": f"Batches of {held['batch']:,}",
    }
    beside = {"xlabel": "items in a batch", "title": f"N = {held['items']:,} items"}
    panels = [
        partial(panel, along="items", fixed="batch", **told),
        partial(panel, along="batch", fixed="items", **beside),
    ]
    return picture(panels, 5.6, 5.9, legend=5, sharey=True)


def draw_growth(found: Sequence[Comparison]) -> bytes | None:
    """A panel for each parameter along which cost was measured: ours, the limit, the quickest of the others."""
    return picture([partial(_growth, growth=growth) for growth in growths(found)], 5.6, 3.9)


def _growth(axes: Any, growth: Growth) -> None:
    values = sorted({point[0] for line in growth.lines.values() for point in line})
    wide = values[-1] > 8 * values[0]
    labels = {
        "xlabel": growth.along,
        "ylabel": growth.unit,
        "title": growth.work[0].upper() + growth.work[1:],
    }
    sizes = wide and values[-1] >= 4096 and "bytes" in growth.along
    looks, logarithmic = styles(growth.lines, growth.limits), "xy" if wide else "y"
    lines(axes, growth.lines, looks, ticks=None if sizes else values, logarithmic=logarithmic, **labels)
    if sizes:
        size_ticks(axes, values[::2])
    axes.legend(fontsize=9)
