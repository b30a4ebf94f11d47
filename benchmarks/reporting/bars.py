"""Pictures made of bars: the headline, single-server, overhead, transitions, checkpoint, memory, overlap, learn,
train."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.reporting.findings import BATCH, headline
from benchmarks.reporting.rows import Comparison, grouped, is_ours, number, per, speed, three
from benchmarks.reporting.style import Bar, Draw, bars, curve, picture, plain, rates, styles
from benchmarks.reporting.tables import times


def draw_headline(found: Sequence[Comparison]) -> bytes | None:
    """W1 at batch 256, by priority, through DataLoader: ours against each peer, and the limit."""
    chosen = headline(found)
    if chosen is None:
        return None
    title = f"Batches of {BATCH} whole trajectories, drawn by priority, through DataLoader"
    panel = partial(_throughput, comparison=chosen, title=title, compact=True, pad=22)
    return picture([panel], 9.5, 1.5 + 0.42 * len(chosen.rows))


def _throughput(
    axes: Any, comparison: Comparison, *, title: str = "", compact: bool = False, pad: int = 20
) -> None:
    """Ours at the top, then the others from quick to slow, each with how many times as fast ours is."""
    ours = comparison.ours[:1] if compact else comparison.ours
    shown: list[Bar] = []
    for row in (*ours, *sorted(comparison.others, key=speed, reverse=True)):
        note = number(rates(row)[1])
        if ours and not is_ours(row):
            ratio = comparison.ratio(ours[0], row)
            note += "" if math.isnan(ratio) else f"    ours is {times(ratio)} as fast"
        shown.append((row["variant"], rates(row), note))
    limit = comparison.limit
    unit = "GB/s" if any("bytes" in row for row in comparison.rows.values()) else "rows/s"
    bars(axes, shown, None if limit is None else (str(limit["variant"]), rates(limit)[1]), unit)
    axes.set_title(title or comparison.label, pad=pad)


def draw_panels(experiment: str, found: Sequence[Comparison]) -> bytes | None:
    """A panel of bars for each comparison of an experiment that was timed."""
    return _panels([c for c in found if c.experiment == experiment and c.timed])


def _panels(found: Sequence[Comparison]) -> bytes | None:
    """A panel of bars for each comparison, one under the other."""
    heights = [0.9 + 0.36 * len(c.ours + c.others) for c in found]
    return picture([partial(_throughput, comparison=c) for c in found], 9.5, heights, columns=1)


def draw_single_server(found: Sequence[Comparison]) -> bytes | None:
    """Inserting, whole trajectories and windows, at the batch that is nearest to the headline's."""
    there = [c for c in found if c.experiment == "single-server" and c.ours and c.timed]
    chosen = []
    for kind in grouped(there, lambda c: (c.workload, str(c.parameters.get("part", "batches")))).values():
        batches = [c.parameters["batch"] for c in kind if isinstance(c.parameters.get("batch"), int | float)]
        best = min(batches, key=lambda value: abs(value - BATCH), default=None)
        chosen += [c for c in kind if best is None or c.parameters.get("batch") == best]
    return _panels(chosen)


def draw_checkpoint(found: Sequence[Comparison]) -> bytes | None:
    """Saving and loading in each way, with the largest table."""
    there = [c for c in found if c.experiment == "checkpoint" and c.ours and c.timed]
    kinds = grouped(there, lambda c: c.workload).values()
    return _panels([max(kind, key=lambda c: c.parameters.get("bytes", 0)) for kind in kinds])


def draw_amounts(experiment: str, found: Sequence[Comparison], apart: str = "") -> bytes | None:
    """A panel of bars for each comparison of figures that are no times of batches, of the plain variants alone.

    apart: a workload that has no panel.
    """
    chosen = [c for c in found if c.experiment == experiment and c.workload != apart]
    found_rows = {
        c.label: [row for row in c.rows.values() if "amount" in row and ", " not in row["variant"]]
        for c in chosen
    }

    def panel(axes: Any, title: str) -> None:
        rows = sorted(found_rows[title], key=lambda row: not is_ours(row))
        goal = next((row["at_most"] for row in rows if "at_most" in row), None)
        shown = [(row["variant"], three(row["amount"]), f"{row['amount']['p50']:.2f}") for row in rows]
        bars(axes, shown, None if goal is None else ("at most", goal), str(rows[0]["unit"]))
        axes.set_title(title, pad=20)

    height = 1.3 + 0.34 * max(map(len, found_rows.values()), default=0)
    return picture([partial(panel, title=title) for title, rows in found_rows.items() if rows], 5.6, height)


def draw_overlap(found: Sequence[Comparison]) -> bytes | None:
    """How many times as long a training step takes with the loader beside it as alone.

    Against the number of programs where that was varied, in one panel; else as bars, a panel a comparison.
    """
    chosen = [c for c in found if c.experiment == "overlap" and c.limit is not None and c.ours]
    swept = [c for c in chosen if len(_programs(c)) > 1]
    others = [c for c in chosen if c not in swept]

    def panel(axes: Any, comparison: Comparison) -> None:
        rows = (*comparison.ours, *comparison.others)
        shown = [(row["variant"], per(1, row["ratio"]), f"{1 / row['ratio']['p50']:.2f}×") for row in rows]
        bars(axes, shown, ("alone", 1.0), "time of a step ÷ the step alone")
        axes.set_title(comparison.label, pad=20)

    heights = [4.4] * bool(swept) + [0.8 + 0.36 * (len(c.rows) - 1) for c in others]
    lines: list[Draw] = [partial(_slowdown_lines, swept=swept)] * bool(swept)
    return picture([*lines, *(partial(panel, comparison=c) for c in others)], 9.5, heights, columns=1)


def _programs(comparison: Comparison) -> list[tuple[float, float, float, float]]:
    """Programs, and how many times as long a step takes: on streams of the training's priority."""
    rows = [
        row
        for row in comparison.ours
        if isinstance(row["parameters"].get("programs"), int | float)
        and not (row["parameters"].get("high priority") or row["parameters"].get("shared"))
    ]
    return [(float(row["parameters"]["programs"]), *per(1, row["ratio"])) for row in rows]


def _slowdown_lines(axes: Any, swept: Sequence[Comparison]) -> None:
    looks = styles(f"kernel, {comparison.label}" for comparison in swept)
    for comparison in swept:
        style = looks[f"kernel, {comparison.label}"]
        curve(axes, _programs(comparison), f"kernel: {comparison.label}", style)
        for row in comparison.others:
            look = {"color": style["color"], "linestyle": ":", "linewidth": 1.3}
            axes.axhline(1 / row["ratio"]["p50"], label=f"{row['variant']}: {comparison.label}", **look)
    axes.axhline(1, color="#6c757d", linestyle="--", linewidth=1.2, label="alone")
    axes.set(xscale="log", xlabel="programs of the gather kernel", ylabel="time of the work ÷ the work alone")
    plain(axes.xaxis, [value for comparison in swept for value, *_ in _programs(comparison)])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)


def draw_train(found: Sequence[Comparison]) -> bytes | None:
    """Returns over seconds of training, and samples a second."""
    there = [c for c in found if c.experiment == "train"]
    parameters = [(name, row["parameters"]) for c in there for name, row in c.rows.items()]
    # (seconds, return) over the training, once for each repeat that has any
    each = ((name, list(filter(None, told.get("curves", [told.get("curve")])))) for name, told in parameters)
    curves = {name: repeats for name, repeats in each if repeats}
    goals = sorted({told["return"] for _, told in parameters if "return" in told})
    steps = [c for c in there if c.timed]
    panels: list[Draw] = [partial(_returns, curves=curves, goals=goals)] if curves else []
    panels += [partial(_samples, comparison=comparison) for comparison in steps[-1:]]
    return picture(panels, 9.5, 3.9, columns=1)


def _returns(axes: Any, curves: Mapping[str, Any], goals: Sequence[float]) -> None:
    looks = styles(curves)
    for name, repeats in curves.items():
        for i, points in enumerate(repeats):
            style = {**looks[name], "markersize": 3, "alpha": 1.0 if i == 0 else 0.5}
            axes.plot(*zip(*points, strict=True), label=name if i == 0 else None, **style)
    for goal in goals:
        axes.axhline(goal, color="black", linestyle=":", linewidth=1.2, label=f"return {goal:.3g}")
    axes.set(xlabel="seconds of training", ylabel="return", title="Return over time")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="lower right")


def _samples(axes: Any, comparison: Comparison) -> None:
    _throughput(axes, comparison)
    axes.set_xlabel("samples/s" if all("rows" in row for row in comparison.rows.values()) else "GB/s")
