"""A picture of what ``online`` has measured.

Adding whole trajectories one by one, in batches and in single steps, against the number of writers; new priorities
against the number of items; reading while others write; writers and a reader with a limiter between them. Medians, with
p10 to p90 as a band or a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.rows import Row
from benchmarks.reporting.style import curve, figure, goal, legend_below, plain, png, styles

_PANELS = {
    "whole": ("Adding whole trajectories one by one", "trajectories/s"),
    "batches": ("Adding whole trajectories in batches", "trajectories/s"),
    "steps": ("Adding single steps, a trajectory every 100", "steps/s"),
}
_LIMITS = ("memcpy", "numpy assignment")


def draw(rows: Iterable[Row]) -> bytes | None:
    rows = [row for row in rows if row["experiment"] == "online"]
    if not rows:
        return None
    names = dict.fromkeys(row["variant"] for row in rows if row["workload"] in (*_PANELS, "update"))
    looks = styles(sorted(names, key=lambda name: not name.startswith("ours")), _LIMITS)
    with figure(3, 2, (11.2, 12.2)) as (made, panels):
        for axes, (workload, (title, unit)) in zip(panels.flat, _PANELS.items(), strict=False):
            _lines(axes, [row for row in rows if row["workload"] == workload], "writers", looks)
            axes.set(title=title, ylabel=unit, xlabel="writer processes")
        priorities, reads, loop = panels.flat[3:]
        _lines(priorities, [row for row in rows if row["workload"] == "update"], "items", looks)
        priorities.set(title="New priorities, 1,024 at a time", ylabel="priorities/s", xlabel="items")
        _reads(reads, rows)
        _loop(loop, rows)
        legend_below(made, panels.flat[:4], columns=5)
        return png(made)


def _rates(row: Row) -> tuple[float, float, float]:
    """p10, p50 and p90 of items a second."""
    count = row.get("rows", 1)
    return tuple(count / row["seconds"][q] for q in ("p90", "p50", "p10"))  # type: ignore[return-value]


def _lines(axes: Any, rows: Sequence[Row], along: str, looks: Mapping[str, Mapping[str, Any]]) -> None:
    if not rows:
        axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color="grey")
        axes.set(xticks=[], yticks=[])
        return
    axes.set(xscale="log", yscale="log")
    for name, style in looks.items():
        curve(
            axes,
            [(row["parameters"][along], *_rates(row)) for row in rows if row["variant"] == name],
            name,
            style,
        )
    for aim in {row.get("rows", 1) / row["limit"] for row in rows if "limit" in row}:
        goal(axes, aim, f"target {aim:,.0f}")
    plain(axes.xaxis, {row["parameters"][along] for row in rows})
    plain(axes.yaxis)
    axes.grid(alpha=0.3)


def _bars(axes: Any, groups: Mapping[str, Sequence[Row]], labels: Mapping[str, str]) -> None:
    """Batches a second: a group of bars for each of `groups`, with what `labels` says on them."""
    width = 0.8 / max(len(groups), 1)
    names = list(dict.fromkeys(row["variant"] for rows in groups.values() for row in rows))
    for i, (group, rows) in enumerate(groups.items()):
        for row in rows:
            low, mid, high = _rates(row)
            place = names.index(row["variant"]) + (i - (len(groups) - 1) / 2) * width
            label = group if row is rows[0] else None
            axes.bar(place, mid, width * 0.92, color=("#c1121f", "#f77f00")[i % 2], label=label)
            axes.errorbar(place, mid, [[mid - low], [high - mid]], color="black", linewidth=1)
            lines = (labels[key].format(value) for key, value in row["extras"].items() if key in labels)
            options = {"ha": "center", "va": "bottom", "fontsize": 7.5}
            axes.annotate("\n".join(lines), (place, high), (0, 4), textcoords="offset points", **options)
    shown = [name.replace(" a trajectory", " a\ntrajectory") for name in names]
    axes.set_xticks(range(len(names)), shown)
    highest = max((_rates(row)[2] for rows in groups.values() for row in rows), default=1.0)
    axes.set(ylabel="batches/s", ylim=(0, 1.35 * highest))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _reads(axes: Any, rows: Sequence[Row]) -> None:
    groups = {
        name: [row for row in rows if row["workload"] == f"read, {name}"]
        for name in ("uniform", "prioritized")
    }
    groups = {name: there for name, there in groups.items() if there}
    _bars(axes, groups, {"trajectories_per_s": "{:,.0f}/s\nadded"})
    if groups:
        axes.legend(loc="upper right", fontsize=9)
    batch = {row["parameters"]["batch"] for there in groups.values() for row in there}
    axes.set_title(f"Reading batches of {', '.join(map(str, sorted(batch)))} while others add")


def _loop(axes: Any, rows: Sequence[Row]) -> None:
    labels = {
        "trajectories_per_s": "{:,.0f}/s added",
        "writers_waiting": "writers wait {:.0%}",
        "reader_waiting": "reader waits {:.0%}",
    }
    _bars(axes, {"": [row for row in rows if row["workload"] == "loop"]}, labels)
    bottom, top = axes.get_ylim()
    axes.set(title="Two writers and a reader, with a limiter", ylim=(bottom, 1.1 * top))
