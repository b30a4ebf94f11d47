"""A picture of what ``online`` has measured.

Adding whole trajectories one by one, in batches and in single steps, against the number of writers; new priorities
against the number of items; reading while others write; writers and a reader with a limiter between them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.reporting.rows import Comparison, Point, Row, grouped, per
from benchmarks.reporting.style import Draw, Value, goal, lines, picture, standing, styles

_PANELS = {  # workload -> title, what is counted, along which parameter
    "whole": ("Adding whole trajectories one by one", "trajectories/s", "writers"),
    "batches": ("Adding whole trajectories in batches", "trajectories/s", "writers"),
    "steps": ("Adding single steps, a trajectory every 100", "steps/s", "writers"),
    "update": ("New priorities, 1,024 at a time", "priorities/s", "items"),
}
_LIMITS = ("memcpy", "numpy assignment")


def draw(found: Sequence[Comparison]) -> bytes | None:
    rows = [row for c in found if c.experiment == "online" for row in c.rows.values()]
    if not rows:
        return None
    kinds = grouped(rows, lambda row: row["workload"])
    names = dict.fromkeys(row["variant"] for row in rows if row["workload"] in _PANELS)
    looks = styles(sorted(names, key=lambda name: not name.startswith("ours")), _LIMITS)
    panels: list[Draw] = [
        partial(_lines, rows=kinds.get(workload, []), told=told, looks=looks)
        for workload, told in _PANELS.items()
    ]
    reads = {name: kinds[f"read, {name}"] for name in ("uniform", "prioritized") if f"read, {name}" in kinds}
    panels += [partial(_reads, groups=reads), partial(_loop, rows=kinds.get("loop", []))]
    return picture(panels, 5.6, 4, more=0.2, legend=5, named=4)


def _rates(row: Row) -> Point:
    """Items a second."""
    return per(row.get("rows", 1), row["seconds"])


def _lines(
    axes: Any, rows: Sequence[Row], told: tuple[str, str, str], looks: Mapping[str, Mapping[str, Any]]
) -> None:
    title, unit, along = told
    labels = {"title": title, "ylabel": unit, "xlabel": "writer processes" if along == "writers" else along}
    if not rows:
        axes.annotate("not measured", (0.5, 0.5), xycoords="axes fraction", ha="center", color="grey")
        axes.set(xticks=[], yticks=[], **labels)
        return
    series: dict[str, list[Value]] = {name: [] for name in looks}
    for row in rows:
        series[row["variant"]].append((row["parameters"][along], *_rates(row)))
    lines(axes, series, looks, ticks={row["parameters"][along] for row in rows}, **labels)
    for aim in {row.get("rows", 1) / row["limit"] for row in rows if "limit" in row}:
        goal(axes, aim, f"target {aim:,.0f}")


def _bars(axes: Any, groups: Mapping[str, Sequence[Row]], labels: Mapping[str, str]) -> None:
    """Batches a second: a group of bars for each of `groups`, with what `labels` says on them."""
    width = 0.8 / max(len(groups), 1)
    names = list(dict.fromkeys(row["variant"] for rows in groups.values() for row in rows))
    for i, (group, rows) in enumerate(groups.items()):
        look: dict[str, Any] = {"color": ("#c1121f", "#f77f00")[i % 2]}
        for row in rows:
            place = names.index(row["variant"]) + (i - (len(groups) - 1) / 2) * width
            label = group if row is rows[0] else None
            standing(axes, place, width * 0.92, _rates(row), label=label, **look)
            lines = (labels[key].format(value) for key, value in row["extras"].items() if key in labels)
            options = {"ha": "center", "va": "bottom", "fontsize": 7.5, "textcoords": "offset points"}
            axes.annotate("\n".join(lines), (place, _rates(row)[2]), (0, 4), **options)
    shown = [name.replace(" a trajectory", " a\ntrajectory") for name in names]
    axes.set_xticks(range(len(names)), shown)
    highest = max((_rates(row)[2] for rows in groups.values() for row in rows), default=1.0)
    axes.set(ylabel="batches/s", ylim=(0, 1.35 * highest))
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _reads(axes: Any, groups: Mapping[str, Sequence[Row]]) -> None:
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
    _bars(axes, {"": rows}, labels)
    bottom, top = axes.get_ylim()
    axes.set(title="Two writers and a reader, with a limiter", ylim=(bottom, 1.1 * top))
