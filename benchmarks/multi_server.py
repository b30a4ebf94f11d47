"""``python -m benchmarks multi-server``: batches whose rows lie on several nodes, and what it costs to draw them.

A node is a rank with a shard of its own, the server process that it starts, and a process that sends the yardstick's
bytes; on one machine they are told apart by name (``--network processes``), or each gets a network namespace, with a
bridge between them and the bandwidth and latency that one asks for (``--network namespaces``, as root). Ranks do
everything at the same time; rates are those of one rank, times the mean of all.

========== ===========================================================================================================
collect    batches of rows that the benchmark chooses, so many of them of the rank's own node, by `ShardCollector`.
           A selection over all shards gives a rank 1 / nodes of its rows from its own node on average, whatever the
           priorities are; other shares on all ranks at once can only be had past it
batches    the same by `ReplayDataset`: by priority over all shards, masses equal; told to all, fetched, put in place
transport  `fetch` into staging memory alone: one rank asks one other node, 1 or 4 requests under way
select     batches of rows of 4 bytes: what it costs to draw over 1 to 8 shards, and the bytes that ranks exchange
========== ===========================================================================================================

The yardstick of the first three (``bare``) moves the same bytes over the same carrier in as many pieces, and nothing
else: `benchmarks.multi_server_bare`. Rows of the rank's own node are one copy there. That of selection is the
collective alone, with the bytes of the last batch. UCX and NIXL are kept to TCP (``--ucx-tls``): nodes that are
processes of one machine would find shared memory between them, which nodes do not have. A process that NIXL reads from
looks often for a second after a read, ours and the bare one alike, also while the other one is measured. Everything is
checked to the byte before it is timed.
"""

from __future__ import annotations

import contextlib
import importlib.metadata
from collections.abc import Iterable, Sequence
from enum import Enum
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks import multi_server_bare
from benchmarks.harness import Left, Result, Session, grid, quantiles
from benchmarks.multi_server_nodes import NodesFailed, namespaces, processes
from benchmarks.multi_server_parts import SELECTORS, Setting, exchanging, selecting
from benchmarks.options import Minutes, Out, Quick, Repeats, opened, some_of

__all__ = ["command", "run"]

PARTS = ("collect", "batches", "transport", "select")


class Network(str, Enum):
    """How nodes are told apart."""

    processes = "processes"
    namespaces = "namespaces"


def command(
    quick: Quick = False,
    parts: Annotated[
        str, typer.Option(help="Which: collect, batches, transport, select; all by default.")
    ] = (",".join(PARTS)),
    nodes: Annotated[str | None, typer.Option(help="Numbers of nodes: 1,2,3 by default.")] = None,
    carriers: Annotated[
        str, typer.Option(help="Which: socket, ucx, nixl; all that are installed by default.")
    ] = ",".join(multi_server_bare.CARRIERS),
    network: Annotated[Network, typer.Option(help="processes; or namespaces, as root.")] = Network.processes,
    bandwidth: Annotated[
        float | None, typer.Option(min=0.001, help="Of namespaces: Gbit/s that each node sends at most.")
    ] = None,
    latency: Annotated[
        float | None,
        typer.Option(min=0.1, help="Of namespaces: microseconds that each node's packets are late."),
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Rows of a rank's batch: 32,256 by default.")] = None,
    local: Annotated[
        str | None, typer.Option(help="Shares of own rows: 1,0.75,0.5,0.25,0 by default.")
    ] = None,
    worlds: Annotated[str | None, typer.Option(help="Ranks that draw: 1,2,4,8 by default.")] = None,
    trajectories: Annotated[int | None, typer.Option(min=64, help="Of a node: 2,000 by default.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Of a measurement: 0.2 by default.")] = None,
    ucx_tls: Annotated[
        str, typer.Option(help="UCX_TLS of all processes, unless that is set; 'all' leaves it to UCX.")
    ] = "tcp",
    repeats: Repeats = None,
    out: Out = None,
    minutes: Minutes = None,
) -> None:
    """Rows of other nodes, and drawing from all of them."""
    chosen = some_of(parts, PARTS, "--parts")
    wanted = some_of(carriers, multi_server_bare.CARRIERS, "--carriers")
    if network is Network.processes and (bandwidth is not None or latency is not None):
        raise typer.BadParameter(
            "processes share one loopback; use --network namespaces.", param_hint="--network"
        )
    counts = _numbers(nodes, "--nodes", 1, 16) or ((1, 2) if quick else (1, 2, 3))
    parameters: dict[str, Any] = {"network": network.value, "ucx_tls": ucx_tls}
    parameters |= {"bandwidth_gbit": bandwidth, "latency_us": latency}
    setting = Setting(
        workloads=("W1",) if quick else ("W1", "W2"),
        trajectories=trajectories or (256 if quick else 2_000),
        batches=_numbers(batches, "--batches", 1, 4096) or ((32,) if quick else (32, 256)),
        fractions=_shares(local) or ((0.5, 0.0) if quick else (1.0, 0.75, 0.5, 0.25, 0.0)),
        requests=(1 << 16, 1 << 20) if quick else (1 << 16, 1 << 20, 1 << 23),
        worlds=_numbers(worlds, "--worlds", 1, 64) or ((1, 2) if quick else (1, 2, 4, 8)),
        selectors=SELECTORS,
        selection_batch=64 if quick else 256,
        exchanged=(512, 16_384) if quick else (512, 4_096, 32_768, 262_144),
        window=seconds or (0.03 if quick else 0.2),
        environment={} if ucx_tls == "all" else {"UCX_TLS": ucx_tls},
        parameters=parameters,
    )
    configuration = {
        "nodes": counts,
        "trajectories": setting.trajectories,
        "seconds": setting.window,
        "seed": setting.seed,
        "carriers": _carrier_versions(),
        **parameters,
    }
    with opened(
        "multi-server",
        quick=quick,
        repeats=repeats or (2 if quick else 9),
        out=out,
        threads=1,
        minutes=minutes,
        configuration=configuration,
    ) as session:
        try:
            run(session, Left(session), setting, chosen, counts, wanted)
        except NodesFailed as error:
            session.console.print(f"failed: {error}", style="bold red", highlight=False, markup=False)
            raise typer.Exit(1) from error


def _numbers(text: str | None, option: str, least: int, most: int) -> tuple[int, ...]:
    return tuple(int(number) for number in _floats(text, option, least, most))


def _shares(text: str | None) -> tuple[float, ...]:
    return tuple(sorted(_floats(text, "--local", 0, 1), reverse=True))


def _floats(text: str | None, option: str, least: int, most: int) -> tuple[float, ...]:
    if text is None:
        return ()
    try:
        numbers = [float(part) for part in text.split(",")]
    except ValueError:
        numbers = [float("nan")]
    if not all(least <= number <= most for number in numbers):
        raise typer.BadParameter(f"{text!r}; expected numbers from {least:,} to {most:,}.", param_hint=option)
    return tuple(sorted(set(numbers)))


def _carrier_versions() -> dict[str, str]:
    found = {}
    for name in ("ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def run(
    session: Session,
    left: Left,
    setting: Setting,
    parts: Sequence[str],
    counts: Sequence[int],
    carriers: Sequence[str],
) -> None:
    """Measure and show the parts."""
    usable = []
    for carrier in carriers:
        why = multi_server_bare.missing(carrier)
        if why is None:
            usable.append(carrier)
        else:
            left.add(carrier, why)
    kind = setting.parameters["network"]
    most = max(max(counts), 2)
    with contextlib.ExitStack() as stack:
        nodes = processes(most)
        if kind == Network.namespaces.value and set(parts) != {"select"}:
            shape = {key: setting.parameters[name] for key, name in _SHAPE.items()}
            nodes = namespaces(most, **shape)
        places = stack.enter_context(nodes)
        stack.enter_context(session.progress("multi-server", _comparisons(setting, parts, counts, usable)))
        for carrier in usable:
            for count, chosen in _jobs(counts, parts, alone=carrier == usable[0]):
                _show_all(session, exchanging(session, setting, places[:count], carrier, chosen))
        for world in setting.worlds if "select" in parts else ():
            _show_all(session, selecting(session, setting, world))
    _show_summary(session)
    session.show_targets()
    left.show()
    session.finish()


_SHAPE = {"bandwidth": "bandwidth_gbit", "latency": "latency_us"}


def _jobs(counts: Sequence[int], parts: Sequence[str], *, alone: bool) -> list[tuple[int, list[str]]]:
    """Numbers of nodes, and the parts that are measured on so many.

    Args:
        alone: whether one node is one of them: nothing goes over a carrier there.
    """
    batches = [part for part in parts if part in ("collect", "batches")]
    chosen = {count: list(batches) for count in counts if batches and (count > 1 or alone)}
    if "transport" in parts:
        chosen.setdefault(2, []).append("transport")
    return sorted(chosen.items())


def _comparisons(
    setting: Setting, parts: Sequence[str], counts: Sequence[int], carriers: Sequence[str]
) -> int:
    """How many there will be."""
    total, each = 0, len(setting.workloads) * len(setting.batches)
    for carrier in carriers:
        for count, chosen in _jobs(counts, parts, alone=carrier == carriers[0]):
            total += each * (len(setting.fractions) if count > 1 else 1) * ("collect" in chosen)
            total += each * ("batches" in chosen)
            total += 2 * len(setting.workloads) * len(setting.requests) * ("transport" in chosen)
    for world in setting.worlds if "select" in parts else ():
        total += len(setting.selectors) + len(setting.exchanged) * (world > 1)
    return total


# ---------------------------------------------------------------- showing


def _show_all(session: Session, found: Iterable[list[Result]]) -> None:
    for results in found:
        _show(session, results)


def _show(session: Session, results: Sequence[Result]) -> None:
    """A table for one comparison."""
    comparison = results[0].comparison
    table = grid(comparison.label)
    table.add_column("variant", no_wrap=True)
    speed = ["GB/s a rank"] if comparison.unit == "bytes" else []
    told = ["sent, B", "received, B", "exchanges"] if comparison.workload == "selection" else []
    heads = ("batch, ms", "p10 – p90", "one batch p50", "p95", *speed, f"× {comparison.yardstick}", *told)
    for head in heads:
        table.add_column(head, justify="right")
    for result in results:
        low, mid, high = (value * 1e3 for value in quantiles(result.seconds).values())
        each = (result.extras[f"latency_{q}"] * 1e3 for q in ("p50", "p95"))
        cells = [f"{mid:,.3g}", f"{low:,.3g} – {high:,.3g}", *(f"{value:,.3g}" for value in each)]
        cells += [f"{result.gb_per_s:.2f}"] if speed else []
        cells.append(f"{result.ratio(comparison.yardstick):.2f}")
        keys = ("sent_bytes", "received_bytes", "exchanges")
        cells += (
            [f"{result.extras[key]:,.4g}" if key in result.extras else "–" for key in keys] if told else []
        )
        table.add_row(escape(result.variant.name), *cells)
    session.console.print(table)


def _show_summary(session: Session) -> None:
    """Batches of each carrier against the share of the rank's own node: GB/s a rank, and × bare."""
    results = [
        result
        for result in session.results
        if result.comparison.parameters.get("part") in ("collect", "batches")
        and result.variant.name == "ours"
    ]
    if not results:
        return
    shares = sorted(
        {r.comparison.parameters["local_fraction"] for r in _of(results, "collect")}, reverse=True
    )
    table = grid("Batches: GB/s a rank (× bare) by the share of rows of the own node")
    for head in ("workload", "batch", "nodes", "carrier"):
        table.add_column(head, no_wrap=True)
    for head in (*(f"{share:.0%}" for share in shares), "dataset"):
        table.add_column(head, justify="right", no_wrap=True)
    keys = ("batch", "nodes", "carrier")
    rows: dict[tuple[Any, ...], dict[Any, Result]] = {}
    for result in results:
        parameters = result.comparison.parameters
        key = (result.comparison.workload, *(parameters[name] for name in keys))
        place = parameters["local_fraction"] if parameters["part"] == "collect" else "dataset"
        rows.setdefault(key, {})[place] = result
    for key, found in rows.items():
        cells = [
            f"{found[place].gb_per_s:.2f} ({found[place].ratio('bare'):.2f})" if place in found else "–"
            for place in (*shares, "dataset")
        ]
        table.add_row(*map(str, key), *cells)
    session.console.print(table)


def _of(results: Sequence[Result], part: str) -> list[Result]:
    return [result for result in results if result.comparison.parameters["part"] == part]
