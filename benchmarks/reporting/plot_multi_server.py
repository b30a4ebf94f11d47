"""A picture of what ``multi-server`` has measured on one kind of network.

Above, for each carrier: GB/s of one rank against the share of rows of its own node, ours and bare. Below: latency of a
batch drawn by a dataset; the transport alone, relative to bare; the cost of drawing over all shards.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from benchmarks.reporting.rows import Comparison, Row, grouped, three
from benchmarks.reporting.style import Draw, Value, lines, note, picture, size_ticks, standing
from benchmarks.showing import size

_CARRIERS = {"socket": "#1d3557", "ucx": "#bc6c25", "nixl": "#0a9396", "none": "#6c757d"}
_NODES = {1: "#6c757d", 2: "#c1121f", 3: "#457b9d"}
_DOT = {"marker": "o"}
_SELECTORS = {
    "uniform": "#6c757d",
    "prioritized": "#c1121f",
    "prioritized, without replacement": "#f77f00",
    "top": "#457b9d",
}


def networks(found: Iterable[Comparison]) -> dict[str, list[Row]]:
    """The rows of this experiment by the network that they went over."""
    rows = (row for c in found if c.experiment == "multi-server" for row in c.rows.values())
    return grouped(rows, lambda row: _network(row["parameters"]))


def _network(parameters: Mapping[str, Any]) -> str:
    text = str(parameters.get("network", "processes"))
    if parameters.get("bandwidth_gbit"):
        text += f" at {parameters['bandwidth_gbit']:g} Gbit/s"
    if parameters.get("latency_us"):
        text += f" with {parameters['latency_us']:g} µs"
    return text + (f", UCX over {parameters['ucx_tls']}" if parameters.get("ucx_tls") else "")


def draw(rows: Sequence[Row]) -> bytes | None:
    """A panel for each part that has rows."""
    parts = grouped(rows, lambda row: row["parameters"]["part"])
    carriers = grouped(parts.get("collect", []), lambda row: row["parameters"]["carrier"])
    draws: list[Draw] = [
        partial(_fractions, rows=carriers[name], carrier=name)
        for name in _CARRIERS
        if name in carriers and name != "none"
    ]
    selection = partial(_selection, bare=parts.get("all_to_all", []))
    kinds = {"batches": _latency, "transport": _transport, "select": selection}
    draws += [partial(kind, rows=parts[part]) for part, kind in kinds.items() if part in parts]

    def panel(axes: Any, draw: Draw) -> None:
        draw(axes)
        if axes.get_legend_handles_labels()[0]:
            below = {"loc": "upper center", "bbox_to_anchor": (0.5, -0.16), "ncols": 3}
            axes.legend(fontsize=8.5, **below)

    return picture([partial(panel, draw=draw) for draw in draws], 5.6, 4.1)


def _points(rows: Iterable[Row], along: str, what: str, factor: float = 1) -> list[Value]:
    """What rows say over a parameter."""
    found = []
    for row in rows:
        low, mid, high = (value * factor for value in three(row[what]))
        found.append((row["parameters"][along], low, mid, high))
    return found


def _of(rows: Iterable[Row], variant: str, **parameters: Any) -> list[Row]:
    wanted = parameters.items()
    there = (row for row in rows if row["variant"] == variant)
    return [row for row in there if all(row["parameters"][name] == value for name, value in wanted)]


def _fractions(axes: Any, rows: Sequence[Row], carrier: str) -> None:
    batch, workload = max(row["parameters"]["batch"] for row in rows), min(row["workload"] for row in rows)
    there = [row for row in rows if row["workload"] == workload]
    series, looks = {}, {}
    for nodes in sorted({row["parameters"]["nodes"] for row in rows}):
        for variant, line, width in (("ours", "-", 2.4), ("bare", "--", 1.3)):
            label = f"{variant}, {nodes} node{'' if nodes == 1 else 's'}"
            series[label] = _points(
                _of(there, variant, nodes=nodes, batch=batch), "local_fraction", "gb_per_s"
            )
            looks[label] = {
                "color": _NODES.get(nodes, "black"),
                "linestyle": line,
                "linewidth": width,
                **_DOT,
            }
    labels = {"xlabel": "rows of the own node", "ylabel": "GB/s of one rank"}
    title = f"{carrier}: {workload}, batch {batch} a rank"
    lines(axes, series, looks, logarithmic="y", title=title, **labels)
    axes.xaxis.set_major_formatter(lambda value, _: f"{value:.0%}")
    axes.invert_xaxis()


def _latency(axes: Any, rows: Sequence[Row]) -> None:
    batch, workload = min(row["parameters"]["batch"] for row in rows), min(row["workload"] for row in rows)
    rows = [row for row in rows if (row["workload"], row["parameters"]["batch"]) == (workload, batch)]
    groups = list(dict.fromkeys((row["parameters"]["nodes"], row["parameters"]["carrier"]) for row in rows))
    for variant, side, colour in (("ours", -0.2, "#c1121f"), ("bare", 0.2, "#6c757d")):
        for place, (nodes, carrier) in enumerate(groups):
            for row in _of(rows, variant, nodes=nodes, carrier=carrier):
                mid, high = (row["extras"][f"latency_{q}"] * 1e3 for q in ("p50", "p95"))
                label = variant if place == 0 else None
                standing(axes, place + side, 0.37, (mid, mid, high), color=colour, label=label)
    names = ["1 node" if nodes == 1 else f"{nodes} nodes\n{carrier}" for nodes, carrier in groups]
    axes.set_xticks(range(len(groups)), names, fontsize=7.5)
    title = f"Latency of one batch of {batch} drawn over all shards, {workload}"
    axes.set(title=title, ylabel="ms; whiskers to p95")
    axes.grid(axis="y", alpha=0.3)
    axes.set_axisbelow(True)


def _transport(axes: Any, rows: Sequence[Row]) -> None:
    rows = [row for row in rows if row["variant"] == "ours" and row["parameters"]["in_flight"] > 1]
    series, looks = {}, {}
    for carrier in dict.fromkeys(row["parameters"]["carrier"] for row in rows):
        for workload, line in (("W1", "-"), ("W2", ":")):
            chosen = [row for row in _of(rows, "ours", carrier=carrier) if row["workload"] == workload]
            series[f"{carrier}, {workload}"] = _points(chosen, "request_bytes", "ratio")
            looks[f"{carrier}, {workload}"] = {"color": _CARRIERS[carrier], "linestyle": line, **_DOT}
    goals = sorted((row["parameters"]["request"], *row["targets"].values()) for row in rows if row["targets"])
    for value, goal in dict.fromkeys(goals):
        axes.plot([value / 1.4, value * 1.4], [goal, goal], color="black", linewidth=1, zorder=1)
        note(axes, f"target {goal:g}", (value, goal), (0, 2), ha="center", fontsize=8)
    labels = {"title": "The transport alone, 4 requests under way", "xlabel": "bytes of a request"}
    lines(axes, series, looks, logarithmic="x" if rows else "", ylabel="× bare", **labels)
    size_ticks(axes, sorted({row["parameters"]["request"] for row in rows}))
    axes.set_ylim(bottom=0)


def _selection(axes: Any, rows: Sequence[Row], bare: Sequence[Row]) -> None:
    least = min((row["parameters"]["each_bytes"] for row in bare), default=0)
    alone = f"all_to_all of {size(least)} alone"
    series = {name: _points(_of(rows, "ours", selector=name), "world", "seconds", 1e3) for name in _SELECTORS}
    series[alone] = _points(_of(bare, "all_to_all", each_bytes=least), "world", "seconds", 1e3)
    looks: dict[str, Any] = {name: {"color": colour, **_DOT} for name, colour in _SELECTORS.items()}
    looks[alone] = {"color": "black", "linestyle": "--", **_DOT}
    title = f"Drawing over all shards, batch {rows[0]['parameters']['batch']} a rank"
    labels = {"title": title, "ylabel": "ms a batch", "xlabel": "ranks, all on these cores"}
    lines(axes, series, looks, ticks=[row["parameters"]["world"] for row in rows], **labels)
