"""``python -m benchmarks online-plot``: a picture of what ``online`` has measured, from its JSON lines.

Above: adding whole trajectories one by one, in batches and in single steps, against the number of writers. Below: new
priorities against the number of items; reading while others write; writers and a reader with a limiter between them.
Medians, with p10 to p90 as a band or a bar. Of rows that measure the same, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from benchmarks.plotting import Out, Row, Rows, last_of_each, parsed, picture

__all__ = ["command", "draw", "measurements"]

_COLOURS = {
    "ours": "#c1121f",
    "ours, the tree alone": "#f77f00",
    "memcpy": "#6c757d",
    "numpy assignment": "#6c757d",
    "torch": "#1d3557",
    "Reverb": "#2a9d8f",
    "Reverb, Writer": "#588157",
    "TorchRL": "#457b9d",
    "cpprb": "#a98467",
}
_MARKERS = "osD^vP*X<>"
_PANELS = {
    "whole": ("Whole trajectories one by one", "trajectories/s"),
    "batches": ("Whole trajectories in batches", "trajectories/s"),
    "steps": ("Single steps, a trajectory every 100", "steps/s"),
}


def command(rows: Rows = None, out: Out = None) -> None:
    """Plot what online has measured."""
    picture("online", rows, out, measurements, draw)


def measurements(lines: Iterable[str]) -> list[Row]:
    """The rows of this experiment; of those that measure the same, the last one."""

    def key(row: Row) -> tuple[Any, ...]:
        parameters = row["parameters"]
        return row["workload"], row["variant"], parameters.get("writers"), parameters.get("items")

    return last_of_each(parsed(lines, "online"), key)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw six panels into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(2, 3, figsize=(14, 8.2), layout="constrained")
        for axes, (workload, (title, unit)) in zip(panels[0], _PANELS.items(), strict=True):
            there = [row for row in rows if row["workload"] == workload]
            _lines(axes, there, "writers")
            axes.set(title=title, ylabel=unit, xlabel="writer processes")
        priorities, reads, loop = panels[1]
        _lines(priorities, [row for row in rows if row["workload"] == "update"], "items")
        priorities.set(title="New priorities, 1,024 at a time", ylabel="priorities/s", xlabel="items")
        _reads(reads, rows)
        _loop(loop, rows)
        handles: dict[str, Any] = {}
        for axes in (*panels[0], priorities):
            for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
                handles.setdefault(label, handle)
        if handles:
            figure.legend(
                handles.values(),
                handles.keys(),
                loc="outside lower center",
                ncols=len(handles),
                frameon=False,
            )
        cpus = sorted({row["machine"]["cpu"] for row in rows})
        cores = sorted({row["machine"]["cores"] for row in rows})
        figure.suptitle(f"Adding and reading at the same time ({', '.join(cpus)}, {cores[0]} cores)")
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _rates(row: Row) -> tuple[float, float, float]:
    """p10, p50 and p90 of items a second."""
    count = row.get("rows", 1)
    return tuple(count / row["seconds"][q] for q in ("p90", "p50", "p10"))  # type: ignore[return-value]


def _lines(axes: Any, rows: Sequence[Row], along: str) -> None:
    from matplotlib.ticker import LogLocator

    ticks = sorted({row["parameters"][along] for row in rows})
    for name in dict.fromkeys(row["variant"] for row in rows):
        points = sorted((row["parameters"][along], *_rates(row)) for row in rows if row["variant"] == name)
        x, low, mid, high = zip(*points, strict=True)
        mine = name.startswith("ours")
        colour = _COLOURS.get(name, "black")
        marker = _MARKERS[list(_COLOURS).index(name) % len(_MARKERS)] if name in _COLOURS else "o"
        axes.plot(
            x,
            mid,
            label=name,
            color=colour,
            marker=marker,
            linewidth=2.4 if mine else 1.3,
            linestyle="--" if name in ("memcpy", "numpy assignment") else "-",
            zorder=3 if mine else 2,
        )
        axes.fill_between(x, low, high, color=colour, alpha=0.12, linewidth=0)
        goals = {
            row["rows"] / row["limit"] if "rows" in row else 1 / row["limit"]
            for row in rows
            if "limit" in row
        }
    for goal in goals if rows else ():
        axes.axhline(goal, color="black", linestyle=":", linewidth=1)
        axes.annotate(f"target {goal:,.0f}", (0.01, goal), xycoords=("axes fraction", "data"), va="bottom")
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [f"{value:,}" for value in ticks])
    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:,.0f}")
    axes.grid(which="major", alpha=0.35)


def _bars(axes: Any, groups: Mapping[str, Sequence[Row]], labels: Mapping[str, str]) -> None:
    """Batches a second: a group of bars for each of `groups`, with what `labels` says on them."""
    width = 0.8 / max(len(groups), 1)
    names = list(dict.fromkeys(row["variant"] for rows in groups.values() for row in rows))
    for i, (group, rows) in enumerate(groups.items()):
        for row in rows:
            low, mid, high = _rates(row)
            place = names.index(row["variant"]) + (i - (len(groups) - 1) / 2) * width
            colour = ("#c1121f", "#457b9d")[i % 2]
            first = row is rows[0]
            axes.bar(place, mid, width * 0.92, color=colour, label=group if first else None)
            axes.errorbar(place, mid, [[mid - low], [high - mid]], color="black", linewidth=1)
            text = "\n".join(
                labels[key].format(value) for key, value in row["extras"].items() if key in labels
            )
            axes.annotate(
                text,
                (place, high),
                (0, 4),
                textcoords="offset points",
                ha="center",
                va="bottom",
                color=colour,
                fontsize=7.5,
            )
    axes.set_xticks(range(len(names)), names)
    highest = max((_rates(row)[2] for rows in groups.values() for row in rows), default=1.0)
    axes.set(ylabel="batches/s", ylim=(0, 1.3 * highest))
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(True)


def _reads(axes: Any, rows: Sequence[Row]) -> None:
    groups = {
        name: [row for row in rows if row["workload"] == f"read, {name}"]
        for name in ("uniform", "prioritized")
    }
    groups = {name: there for name, there in groups.items() if there}
    _bars(axes, groups, {"trajectories_per_s": "{:,.0f}/s\nadded"})
    if groups:
        axes.legend(frameon=False, loc="upper right")
    batch = {row["parameters"]["batch"] for there in groups.values() for row in there}
    axes.set_title(f"Reading batches of {', '.join(map(str, sorted(batch)))} while others add")


def _loop(axes: Any, rows: Sequence[Row]) -> None:
    labels = {
        "trajectories_per_s": "{:,.0f}/s added",
        "writers_waiting": "writers wait {:.0%}",
        "reader_waiting": "reader waits {:.0%}",
    }
    _bars(axes, {"": [row for row in rows if row["workload"] == "loop"]}, labels)
    axes.set_title("2 writers and a reader, limited")
    names = [text.get_text().replace(" a trajectory", " a\ntrajectory") for text in axes.get_xticklabels()]
    axes.set_xticks(axes.get_xticks(), names)
