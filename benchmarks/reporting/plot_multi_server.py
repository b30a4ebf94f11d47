"""A picture of what ``multi-server`` has measured on one kind of network.

Above, for each carrier: GB/s of one rank against the share of rows of its own node, ours and bare. Below: latency of a
batch drawn by a dataset; the transport alone, relative to bare; the cost of drawing over all shards. Medians, with p10
to p90 as a band or a bar.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.rows import Row
from benchmarks.reporting.style import panels, plain, png
from benchmarks.showing import size

_CARRIERS = {"socket": "#1d3557", "ucx": "#bc6c25", "nixl": "#0a9396", "none": "#6c757d"}
_NODES = {1: "#6c757d", 2: "#c1121f", 3: "#457b9d"}
_SELECTORS = {
    "uniform": "#6c757d",
    "prioritized": "#c1121f",
    "prioritized, without replacement": "#f77f00",
    "top": "#457b9d",
}


def networks(rows: Iterable[Row]) -> dict[str, list[Row]]:
    """The rows of this experiment by the network that they went over."""
    found: dict[str, list[Row]] = {}
    for row in rows:
        if row["experiment"] == "multi-server":
            found.setdefault(_network(row["parameters"]), []).append(row)
    return found


def _network(parameters: Mapping[str, Any]) -> str:
    text = str(parameters.get("network", "processes"))
    if parameters.get("bandwidth_gbit"):
        text += f" at {parameters['bandwidth_gbit']:g} Gbit/s"
    if parameters.get("latency_us"):
        text += f" with {parameters['latency_us']:g} µs"
    return text + (f", UCX over {parameters['ucx_tls']}" if parameters.get("ucx_tls") else "")


def draw(rows: Sequence[Row]) -> bytes:
    """Draw a panel for each part that has rows."""
    parts = {row["parameters"]["part"] for row in rows}
    carriers = [name for name in _CARRIERS if any(_carries(row, name) for row in _part(rows, "collect"))]
    drawn = [(lambda axes, name=name: _fractions(axes, _part(rows, "collect"), name)) for name in carriers]
    if "batches" in parts:
        drawn.append(lambda axes: _latency(axes, _part(rows, "batches")))
    if "transport" in parts:
        drawn.append(lambda axes: _transport(axes, _part(rows, "transport")))
    if "select" in parts:
        drawn.append(lambda axes: _selection(axes, _part(rows, "select"), _part(rows, "all_to_all")))
    with panels(len(drawn), 5.6, 4.1) as (made, places):
        for axes, one in zip(places, drawn, strict=True):
            one(axes)
            if axes.get_legend_handles_labels()[0]:
                below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
                axes.legend(fontsize=8.5, **below)
        return png(made)


def _carries(row: Row, carrier: str) -> bool:
    return bool(row["parameters"]["carrier"] == carrier != "none")


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


def _rate(row: Row) -> tuple[float, ...]:
    return tuple(row["gb_per_s"][q] for q in ("p10", "p50", "p90"))


def _milliseconds(row: Row) -> tuple[float, ...]:
    return tuple(row["seconds"][q] * 1e3 for q in ("p10", "p50", "p90"))


def _fractions(axes: Any, rows: Sequence[Row], carrier: str) -> None:
    there = [row for row in rows if row["parameters"]["carrier"] == carrier]
    axes.set(xlabel="rows of the own node", ylabel="GB/s of one rank")
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
    plain(axes.yaxis)
    axes.invert_xaxis()
    axes.grid(which="major", alpha=0.3)


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    axes.set(ylabel="ms; whiskers to p95")
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
    axes.grid(axis="y", alpha=0.3)
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
        white = {"boxstyle": "square,pad=0.1", "facecolor": "white", "edgecolor": "none", "alpha": 0.8}
        text = f"target {goal:g}"
        axes.annotate(
            text, (value, goal), (0, 2), textcoords="offset points", ha="center", fontsize=8, bbox=white
        )
    axes.set(xscale="log")
    axes.set_xticks(ticks, [size(value) for value in ticks])
    axes.minorticks_off()
    axes.set_ylim(bottom=0)
    axes.grid(which="major", alpha=0.3)


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
    plain(axes.xaxis, ticks)
    plain(axes.yaxis)
    axes.set_title(f"Drawing over all shards, batch {ours[0]['parameters']['batch']} a rank")
    axes.grid(which="major", alpha=0.3)
