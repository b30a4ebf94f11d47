"""``python -m benchmarks multi-server-plot``: a picture of what ``multi-server`` has measured, from its JSON lines.

Above, for each carrier: GB/s of one rank against the share of rows of its own node, ours and bare. Below: latency of a
batch drawn by a dataset; the transport alone, relative to bare; the cost of drawing over all shards. Medians, with p10
to p90 as a band or a bar. Of rows that measure the same, the last one counts.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.harness import size
from benchmarks.plotting import Out, Row, Rows, last_of_each, parsed, picture

__all__ = ["command", "draw", "measurements"]


_CARRIERS = {"socket": "#1d3557", "ucx": "#c1121f", "nixl": "#2a9d8f", "none": "#6c757d"}
_NODES = {1: "#6c757d", 2: "#c1121f", 3: "#457b9d"}
_SELECTORS = {
    "uniform": "#6c757d",
    "prioritized": "#c1121f",
    "prioritized, without replacement": "#f77f00",
    "top": "#457b9d",
}
_KEY = (
    "part",
    "network",
    "bandwidth_gbit",
    "latency_us",
    "ucx_tls",
    "nodes",
    "carrier",
    "batch",
    "local_fraction",
    "selector",
    "request",
    "in_flight",
    "world",
    "each_bytes",
)


def command(rows: Rows = None, out: Out = None) -> None:
    """Plot what multi-server has measured."""
    picture("multi-server", rows, out, measurements, draw)


def measurements(lines: Iterable[str]) -> list[Row]:
    """The rows of this experiment; of those that measure the same, the last one."""

    def key(row: Row) -> tuple[Any, ...]:
        return (row["workload"], row["variant"], *(row["parameters"].get(name) for name in _KEY))

    return last_of_each(parsed(lines, "multi-server"), key)


def draw(rows: Sequence[Row], out: Path) -> None:
    """Draw six panels into a PNG file."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context({"font.size": 9, "axes.spines.top": False, "axes.spines.right": False}):
        figure, panels = plt.subplots(2, 3, figsize=(14, 8.2), layout="constrained")
        for axes, carrier in zip(panels[0], ("socket", "ucx", "nixl"), strict=True):
            _fractions(axes, _part(rows, "collect"), carrier)
        latency, transport, selection = panels[1]
        _latency(latency, _part(rows, "batches"))
        _transport(transport, _part(rows, "transport"))
        _selection(selection, _part(rows, "select"), _part(rows, "all_to_all"))
        for axes in panels.flat:
            if axes.get_legend_handles_labels()[0]:
                axes.legend(frameon=False, fontsize=7.5)
        cpus = sorted({row["machine"]["cpu"] for row in rows})
        cores = sorted({row["machine"]["cores"] for row in rows})
        networks = sorted({str(row["parameters"].get("network")) for row in rows})
        figure.suptitle(
            f"Rows of other nodes; all nodes on one machine, as {', '.join(networks)} ({', '.join(cpus)}, "
            f"{cores[0]} cores)"
        )
        out.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(out, dpi=150)
        plt.close(figure)


def _part(rows: Sequence[Row], name: str) -> list[Row]:
    return [row for row in rows if row["parameters"]["part"] == name]


def _band(axes: Any, rows: Sequence[Row], along: str, value: Any, **style: Any) -> None:
    """A line of medians over a parameter, and p10 to p90 around it."""
    points = sorted((row["parameters"][along], *value(row)) for row in rows)
    if not points:
        return
    x, low, mid, high = zip(*points, strict=True)
    axes.plot(x, mid, **style)
    axes.fill_between(x, low, high, color=style["color"], alpha=0.12, linewidth=0)


def _plain(axes: Any) -> None:
    """Numbers as people write them on a logarithmic axis."""
    from matplotlib.ticker import LogLocator

    axes.minorticks_off()
    axes.yaxis.set_major_locator(LogLocator(subs=(1, 2, 5)))
    axes.yaxis.set_major_formatter(lambda value, _: f"{value:g}")


def _rate(row: Row) -> tuple[float, ...]:
    return tuple(row["gb_per_s"][q] for q in ("p10", "p50", "p90"))


def _milliseconds(row: Row) -> tuple[float, ...]:
    return tuple(row["seconds"][q] * 1e3 for q in ("p10", "p50", "p90"))


def _fractions(axes: Any, rows: Sequence[Row], carrier: str) -> None:
    there = [row for row in rows if row["parameters"]["carrier"] == carrier]
    axes.set(title=f"{carrier}: not measured", xlabel="rows of the own node", ylabel="GB/s of one rank")
    if not there:
        return
    batch = max(row["parameters"]["batch"] for row in there)
    workload = sorted({row["workload"] for row in there})[0]
    for nodes in sorted({row["parameters"]["nodes"] for row in there}):
        for variant, line in (("ours", "-"), ("bare", "--")):
            chosen = [
                row
                for row in there
                if row["variant"] == variant
                and row["workload"] == workload
                and (row["parameters"]["nodes"], row["parameters"]["batch"]) == (nodes, batch)
            ]
            label = f"{variant}, {nodes} node{'' if nodes == 1 else 's'}"
            colour = _NODES.get(nodes, "black")
            style = {"color": colour, "linestyle": line, "marker": "o", "label": label}
            _band(axes, chosen, "local_fraction", _rate, linewidth=2.4 if variant == "ours" else 1.3, **style)
    axes.set(title=f"{carrier}: {workload}, batch {batch} a rank", yscale="log")
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    _plain(axes)
    axes.invert_xaxis()
    axes.grid(which="major", alpha=0.35)


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="Latency of one batch, drawn over all shards", ylabel="ms; whiskers to p95")
    if not rows:
        return
    batch = min(row["parameters"]["batch"] for row in rows)
    workload = sorted({row["workload"] for row in rows})[0]
    rows = [row for row in rows if (row["workload"], row["parameters"]["batch"]) == (workload, batch)]
    groups = list(dict.fromkeys((row["parameters"]["nodes"], row["parameters"]["carrier"]) for row in rows))
    for i, variant in enumerate(("ours", "bare")):
        for place, group in enumerate(groups):
            for row in rows:
                if (
                    row["variant"] == variant
                    and (row["parameters"]["nodes"], row["parameters"]["carrier"]) == group
                ):
                    mid, high = (row["extras"][f"latency_{q}"] * 1e3 for q in ("p50", "p95"))
                    at, colour = place + (i - 0.5) * 0.4, ("#c1121f", "#6c757d")[i]
                    axes.bar(at, mid, 0.37, color=colour, label=variant if place == 0 else None)
                    axes.errorbar(at, mid, [[0], [high - mid]], color="black", linewidth=1)
    names = ["1 node" if nodes == 1 else f"{nodes} nodes\n{carrier}" for nodes, carrier in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7.5)
    axes.set_title(f"Latency of one batch of {batch} drawn over all shards, {workload}")
    axes.grid(axis="y", alpha=0.35)
    axes.set_axisbelow(True)


def _transport(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(title="The transport alone, 4 requests under way", ylabel="× bare", xlabel="bytes of a request")
    rows = [row for row in rows if row["variant"] == "ours" and row["parameters"]["in_flight"] > 1]
    if not rows:
        return
    for carrier in dict.fromkeys(row["parameters"]["carrier"] for row in rows):
        for workload, line in (("W1", "-"), ("W2", ":")):
            chosen = [
                row for row in rows if (row["parameters"]["carrier"], row["workload"]) == (carrier, workload)
            ]
            style = {"color": _CARRIERS[carrier], "linestyle": line, "marker": "o"}
            _band(
                axes,
                chosen,
                "request_bytes",
                lambda row: tuple(row["ratio"][q] for q in ("p10", "p50", "p90")),
                label=f"{carrier}, {workload}",
                **style,
            )
    ticks = sorted({row["parameters"]["request"] for row in rows})
    goals = sorted((row["parameters"]["request"], *row["targets"].values()) for row in rows if row["targets"])
    for value, goal in dict.fromkeys(goals):
        axes.plot([value / 1.4, value * 1.4], [goal, goal], color="black", linewidth=1, zorder=1)
        axes.annotate(f"target {goal:g}", (value, goal), ha="center", va="bottom", fontsize=7.5)
    axes.set(xscale="log")
    axes.set_xticks(ticks, [size(value) for value in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(which="major", alpha=0.35)


def _selection(axes: Any, rows: Sequence[Row], bare: Sequence[Row]) -> None:
    axes.set(title="Drawing over all shards", ylabel="ms a batch", xlabel="ranks, all on these cores")
    ours = [row for row in rows if row["variant"] == "ours"]
    for selector, colour in _SELECTORS.items():
        chosen = [row for row in ours if row["parameters"]["selector"] == selector]
        _band(axes, chosen, "world", _milliseconds, color=colour, marker="o", label=selector)
    least = min((row["parameters"]["each_bytes"] for row in bare), default=0)
    chosen = [row for row in bare if row["parameters"]["each_bytes"] == least]
    label = f"all_to_all of {size(least)} alone"
    _band(axes, chosen, "world", _milliseconds, color="black", linestyle="--", marker="o", label=label)
    ticks = sorted({row["parameters"]["world"] for row in rows})
    if not ticks:
        return
    axes.set(xscale="log", yscale="log")
    axes.set_xticks(ticks, [str(value) for value in ticks])
    _plain(axes)
    axes.set_title(f"Drawing over all shards, batch {ours[0]['parameters']['batch']} a rank")
    axes.grid(which="major", alpha=0.35)
