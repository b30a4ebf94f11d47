"""Pictures made of bars: the headline, single-server, checkpoint, memory, overlap, train."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.findings import BATCH, headline
from benchmarks.reporting.rows import Comparison, Row, is_ours, speed
from benchmarks.reporting.style import Bar, bars, curve, figure, number, panels, plain, png, rates, styles
from benchmarks.reporting.tables import times


def draw_headline(found: Sequence[Comparison]) -> bytes | None:
    """W1 at batch 256, by priority, through DataLoader: ours against each peer, and the limit."""
    chosen = headline(found)
    if chosen is None:
        return None
    with figure(1, 1, (9.5, 1.5 + 0.42 * len(chosen.rows))) as (made, ((axes,),)):
        _throughput(axes, chosen, compact=True)
        axes.set_title(
            f"Batches of {BATCH} whole trajectories, drawn by priority, through DataLoader", pad=22
        )
        return png(made)


def _throughput(axes: Any, comparison: Comparison, *, compact: bool = False) -> None:
    """Ours at the top, then the others from quick to slow, each with how many times as fast ours is."""
    mine = comparison.ours[0] if comparison.ours else None
    ours = comparison.ours[:1] if compact else comparison.ours
    others = sorted(comparison.others, key=speed, reverse=True)
    shown: list[Bar] = []
    for row in (*ours, *others):
        low, mid, high = rates(row)
        note = number(mid)
        if mine is not None and not is_ours(row):
            ratio = comparison.ratio(mine, row)
            note += "" if math.isnan(ratio) else f"    ours is {times(ratio)} as fast"
        shown.append((row["variant"], low, mid, high, note))
    limit = None
    if comparison.limit is not None:
        limit = (str(comparison.limit["variant"]), rates(comparison.limit)[1])
    unit = "GB/s" if any("bytes" in row for row in comparison.rows.values()) else "rows/s"
    bars(axes, shown, limit, unit)


def _nearest(found: Sequence[Comparison], name: str, wanted: float) -> list[Comparison]:
    """The comparisons whose parameter is the nearest to what is wanted; all if none has it."""
    values = [c.parameters[name] for c in found if isinstance(c.parameters.get(name), int | float)]
    if not values:
        return list(found)
    best = min(values, key=lambda value: abs(value - wanted))
    return [c for c in found if c.parameters.get(name) == best]


def _panels(found: Sequence[Comparison], titles: Sequence[str]) -> bytes:
    """A panel of bars for each comparison, one under the other."""
    heights = [0.9 + 0.36 * len(c.ours + c.others) for c in found]
    total = sum(heights) + 0.4 * len(heights)
    options = {"gridspec_kw": {"height_ratios": heights}}
    with figure(len(found), 1, (9.5, total), **options) as (made, panels):
        for axes, comparison, title in zip(panels[:, 0], found, titles, strict=True):
            _throughput(axes, comparison)
            axes.set_title(title, pad=20)
        return png(made)


def draw_single_server(found: Sequence[Comparison]) -> bytes | None:
    """Inserting, whole trajectories and windows, at the batch of the headline."""
    kinds: dict[tuple[str, str], list[Comparison]] = {}
    for comparison in found:
        if comparison.experiment == "single-server" and comparison.ours and _timed(comparison):
            part = str(comparison.parameters.get("part", "batches"))
            kinds.setdefault((comparison.workload, part), []).append(comparison)
    chosen = [one for kind in kinds.values() for one in _nearest(kind, "batch", BATCH)]
    return _panels(chosen, [comparison.label for comparison in chosen]) if chosen else None


def draw_checkpoint(found: Sequence[Comparison]) -> bytes | None:
    """Saving and loading in each way, with the largest table."""
    kinds: dict[str, Comparison] = {}
    for comparison in found:
        if comparison.experiment == "checkpoint" and comparison.ours and _timed(comparison):
            kept = kinds.setdefault(comparison.workload, comparison)
            if comparison.parameters.get("bytes", 0) > kept.parameters.get("bytes", 0):
                kinds[comparison.workload] = comparison
    return _panels(list(kinds.values()), [one.label for one in kinds.values()]) if kinds else None


def _timed(comparison: Comparison) -> bool:
    return any("seconds" in row for row in comparison.rows.values())


def draw_memory(found: Sequence[Comparison]) -> bytes | None:
    """Bytes resident for each byte of payload: a panel for each distribution of lengths, the plain variants alone."""
    found_rows: dict[str, list[Row]] = {}
    for comparison in found:
        rows = [row for row in comparison.rows.values() if "amount" in row and ", " not in row["variant"]]
        if comparison.experiment == "memory" and rows:
            found_rows[comparison.label] = sorted(rows, key=lambda row: not is_ours(row))
    if not found_rows:
        return None
    height = 1.3 + 0.34 * max(map(len, found_rows.values()))
    with panels(len(found_rows), 5.6, height) as (made, places):
        for axes, (title, rows) in zip(places, found_rows.items(), strict=True):
            goal = next((row["at_most"] for row in rows if "at_most" in row), None)
            values = [(row["variant"], *_quantiles(row["amount"])) for row in rows]
            shown = [(name, low, mid, high, f"{mid:.2f}") for name, low, mid, high in values]
            bars(axes, shown, None if goal is None else ("at most", goal), str(rows[0]["unit"]))
            axes.set_title(title, pad=20)
        return png(made)


def _quantiles(values: Mapping[str, float]) -> tuple[float, float, float]:
    return values["p10"], values["p50"], values["p90"]


def draw_overlap(found: Sequence[Comparison]) -> bytes | None:
    """How many times as long a training step takes with the loader beside it as alone.

    Against the number of programs where that was varied, in one panel; else as bars, a panel a comparison.
    """
    chosen = [c for c in found if c.experiment == "overlap" and c.limit is not None and c.ours]
    swept = [c for c in chosen if len(_programs(c)) > 1]
    others = [c for c in chosen if len(_programs(c)) <= 1]
    if not chosen:
        return None
    heights = [4.4] * bool(swept) + [0.8 + 0.36 * (len(c.rows) - 1) for c in others]
    options = {"gridspec_kw": {"height_ratios": heights}}
    with figure(len(heights), 1, (9.5, sum(heights) + 0.4 * len(heights)), **options) as (made, panels):
        if swept:
            _slowdown_lines(panels[0, 0], swept)
        for axes, comparison in zip(panels[bool(swept) :, 0], others, strict=True):
            shown: list[Bar] = []
            for row in (*comparison.ours, *comparison.others):
                low, mid, high = _slowdown(row)
                shown.append((row["variant"], low, mid, high, f"{mid:.2f}×"))
            bars(axes, shown, ("alone", 1.0), "time of a step ÷ the step alone")
            axes.set_title(comparison.label, pad=20)
        return png(made)


def _slowdown(row: Row) -> tuple[float, float, float]:
    low, mid, high = (1 / row["ratio"][q] for q in ("p90", "p50", "p10"))
    return low, mid, high


def _programs(comparison: Comparison) -> list[tuple[float, float, float, float]]:
    rows = [row for row in comparison.ours if isinstance(row["parameters"].get("programs"), int | float)]
    return [(float(row["parameters"]["programs"]), *_slowdown(row)) for row in rows]


def _slowdown_lines(axes: Any, swept: Sequence[Comparison]) -> None:
    looks = styles(f"kernel, {comparison.label}" for comparison in swept)
    for comparison in swept:
        style = looks[f"kernel, {comparison.label}"]
        curve(axes, _programs(comparison), f"kernel: {comparison.label}", style)
        for row in comparison.others:
            name = f"{row['variant']}: {comparison.label}"
            axes.axhline(_slowdown(row)[1], color=style["color"], linestyle=":", linewidth=1.3, label=name)
    axes.axhline(1, color="#6c757d", linestyle="--", linewidth=1.2, label="alone")
    axes.set(xscale="log", xlabel="programs of the gather kernel", ylabel="time of the work ÷ the work alone")
    plain(axes.xaxis, [value for comparison in swept for value, *_ in _programs(comparison)])
    axes.grid(alpha=0.3)
    axes.legend(fontsize=8.5)


def draw_train(found: Sequence[Comparison]) -> bytes | None:
    """Returns over seconds of training, and samples a second."""
    there = [c for c in found if c.experiment == "train"]
    curves = {name: found for c in there for name, row in c.rows.items() if (found := _curves(row))}
    steps = [c for c in there if _timed(c)]
    parts: list[Callable[[Any], None]] = []
    if curves:
        parts.append(lambda axes: _returns(axes, there, curves))
    if steps:
        parts.append(lambda axes: _samples(axes, steps[-1]))
    if not parts:
        return None
    with figure(len(parts), 1, (9.5, 3.9 * len(parts))) as (made, panels):
        for axes, part in zip(panels[:, 0], parts, strict=True):
            part(axes)
        return png(made)


def _curves(row: Row) -> list[Sequence[Sequence[float]]]:
    """(seconds, return) over the training, once for each repeat that has any."""
    parameters = row["parameters"]
    return [points for points in parameters.get("curves", [parameters.get("curve")]) if points]


def _returns(axes: Any, there: Sequence[Comparison], curves: Mapping[str, Any]) -> None:
    looks = styles(curves)
    for name, repeats in curves.items():
        for i, points in enumerate(repeats):
            x, y = zip(*points, strict=True)
            style = {**looks[name], "markersize": 3, "alpha": 1.0 if i == 0 else 0.5}
            axes.plot(x, y, label=name if i == 0 else None, **style)
    goals = {
        row["parameters"]["return"] for c in there for row in c.rows.values() if "return" in row["parameters"]
    }
    for goal in sorted(goals):
        axes.axhline(goal, color="black", linestyle=":", linewidth=1.2, label=f"return {goal:.3g}")
    axes.set(xlabel="seconds of training", ylabel="return", title="Return over time")
    axes.grid(alpha=0.3)
    axes.legend(fontsize=9, loc="lower right")


def _samples(axes: Any, comparison: Comparison) -> None:
    _throughput(axes, comparison)
    axes.set_xlabel("samples/s" if all("rows" in row for row in comparison.rows.values()) else "GB/s")
    axes.set_title(comparison.label, pad=20)
