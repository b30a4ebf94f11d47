"""``python -m benchmarks multi-server``: batches whose rows lie on several nodes, and what it costs to draw them.

A node is a rank with a shard of its own, the server process that it starts, and a process that sends the yardstick's
bytes; on one machine they are told apart by name (``--network processes``), or each gets a network namespace, with a
bridge between them and the bandwidth and latency that one asks for (``--network namespaces``, as root). Ranks do
everything at the same time; rates are those of one rank, times the mean of all.

collect measures batches of rows that the benchmark chooses, so many of them of the rank's own node, by
`ShardCollector` (a selection over all shards gives a rank 1 / nodes of its rows from its own node on average, whatever
the priorities are; other shares on all ranks at once can only be had past it); batches the same by `ReplayDataset`, by
priority over all shards; transport `fetch` into staging memory alone: one rank asks one other node, 1 or 4 requests
under way; select batches of rows of 4 bytes: what it costs to draw over 1 to 8 shards, and the bytes of the exchange.

The yardstick of the first three (``bare``) moves the same bytes over the same carrier in as many pieces, and nothing
else: `multi_server_bare`. Rows of the rank's own node are one copy there. That of selection is the
collective alone, with the bytes of the last batch. UCX and NIXL are kept to TCP (``--ucx-tls``): nodes that are
processes of one machine would find shared memory between them, which nodes do not have. A process that NIXL reads from
looks often for a second after a read, ours and the bare one alike, also while the other one is measured. Everything is
checked to the byte before it is timed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.metadata
from collections.abc import Mapping, Sequence
from enum import Enum
from typing import Annotated, Any, Literal

import typer

from benchmarks.experiments import multi_server_bare
from benchmarks.experiments.multi_server_job import Job, Subject
from benchmarks.experiments.multi_server_nodes import Node, namespaces, processes
from benchmarks.experiments.multi_server_ranks import SELECTORS, TINY, WORKLOADS
from benchmarks.harness import Session
from benchmarks.options import command as as_command
from benchmarks.options import numbers, option, some_of
from benchmarks.showing import size
from gear_loader.storage.schema import Schema
from gear_loader.transport.spec import WindowSpec

PARTS = ("collect", "batches", "transport", "select")
_TARGETS = ((1 << 20, 0.9), (1 << 16, 0.7))
"""Bytes of a request, and the least share of the bare exchange's rate from there on."""
_SHORT = 0.9  # of these bytes: a whole number of rows comes close to a size, and may lie below it
_IN_FLIGHT = (1, 4)


class Network(str, Enum):
    """How nodes are told apart."""

    processes = "processes"
    namespaces = "namespaces"


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured, and how long.

    trajectories: of a shard. batches: rows of a batch of one rank. fractions: of them of its own node. requests: bytes
    of requests where the transport is measured alone. worlds, selection_batch: ranks where selection is measured, and
    rows of a rank's batch there. exchanged: bytes from each rank to each where the collective is measured alone.
    window: seconds of a measurement. environment: variables of all processes. parameters: what all rows say.
    """

    workloads: Sequence[str]
    trajectories: int
    batches: Sequence[int]
    fractions: Sequence[float]
    requests: Sequence[int]
    worlds: Sequence[int]
    selection_batch: int
    exchanged: Sequence[int]
    window: float
    environment: Mapping[str, str]
    parameters: Mapping[str, Any]
    seed: int = 17


Bandwidth = option(float, "Of namespaces: Gbit/s that each node sends at most.", min=0.001)
Latency = option(float, "Of namespaces: microseconds that each node's packets are late.", min=0.1)
Local = option(str, "Shares of own rows: 1,0.75,0.5,0.25,0 by default.")


@as_command("multi-server", repeats=(2, 9), threads=1)
def command(
    session: Session,
    parts: Annotated[
        str, typer.Option(help="Which: collect, batches, transport, select; all by default.")
    ] = (",".join(PARTS)),
    nodes: Annotated[str | None, typer.Option(help="Numbers of nodes: 1,2,3 by default.")] = None,
    carriers: Annotated[
        str, typer.Option(help="Which: socket, ucx, nixl; all that are installed by default.")
    ] = ",".join(multi_server_bare.CARRIERS),
    network: Annotated[Network, typer.Option(help="processes; or namespaces, as root.")] = Network.processes,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    batches: Annotated[str | None, typer.Option(help="Rows of a rank's batch: 32,256 by default.")] = None,
    local: Local = None,
    worlds: Annotated[str | None, typer.Option(help="Ranks that draw: 1,2,4,8 by default.")] = None,
    trajectories: Annotated[int | None, typer.Option(min=64, help="Of a node: 2,000 by default.")] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Of a measurement: 0.2 by default.")] = None,
    ucx_tls: Annotated[
        str, typer.Option(help="UCX_TLS of all processes, unless that is set; 'all' leaves it to UCX.")
    ] = "tcp",
) -> None:
    """Rows of other nodes, and drawing from all of them."""
    quick = session.quick
    chosen = some_of(parts, PARTS, "--parts")
    wanted = some_of(carriers, multi_server_bare.CARRIERS, "--carriers")
    if network is Network.processes and (bandwidth is not None or latency is not None):
        raise typer.BadParameter(
            "processes share one loopback; use --network namespaces.", param_hint="--network"
        )
    counts = numbers(nodes, "--nodes", 1, 16) or ((1, 2) if quick else (1, 2, 3))
    parameters: dict[str, Any] = {"network": network.value, "ucx_tls": ucx_tls}
    parameters |= {"bandwidth_gbit": bandwidth, "latency_us": latency}
    setting = Setting(
        workloads=("W1",) if quick else ("W1", "W2"),
        trajectories=trajectories or (256 if quick else 2_000),
        batches=numbers(batches, "--batches", 1, 4096) or ((32,) if quick else (32, 256)),
        fractions=tuple(reversed(numbers(local, "--local", 0, 1, float)))
        or ((0.5, 0.0) if quick else (1.0, 0.75, 0.5, 0.25, 0.0)),
        requests=(1 << 16, 1 << 20) if quick else (1 << 16, 1 << 20, 1 << 23),
        worlds=numbers(worlds, "--worlds", 1, 64) or ((1, 2) if quick else (1, 2, 4, 8)),
        selection_batch=64 if quick else 256,
        exchanged=(512, 16_384) if quick else (512, 4_096, 32_768, 262_144),
        window=seconds or (0.03 if quick else 0.2),
        environment={} if ucx_tls == "all" else {"UCX_TLS": ucx_tls},
        parameters=parameters,
    )
    session.configure(
        nodes=counts,
        trajectories=setting.trajectories,
        seconds=setting.window,
        seed=setting.seed,
        carriers=_carrier_versions(),
        **parameters,
    )
    measured(session, setting, chosen, counts, wanted)


def _carrier_versions() -> dict[str, str]:
    found = {}
    for name in ("ucxx-cu12", "ucxx-cu13", "libucx-cu12", "libucx-cu13", "nixl-cu12", "nixl-cu13"):
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def measured(
    session: Session, setting: Setting, parts: Sequence[str], counts: Sequence[int], carriers: Sequence[str]
) -> None:
    """Measure and show the parts."""
    why = {carrier: multi_server_bare.missing(carrier) for carrier in carriers}
    for carrier in filter(why.get, carriers):
        session.leave(carrier, str(why[carrier]))
    usable = [carrier for carrier in carriers if why[carrier] is None]
    most = max(max(counts), 2)
    with contextlib.ExitStack() as stack:
        nodes = processes(most)
        if setting.parameters["network"] == Network.namespaces.value and set(parts) != {"select"}:
            given = setting.parameters
            nodes = namespaces(most, bandwidth=given["bandwidth_gbit"], latency=given["latency_us"])
        places = stack.enter_context(nodes)
        for carrier in usable:
            for count, chosen in _jobs(counts, parts, alone=carrier == usable[0]):
                exchanging(session, setting, places[:count], carrier, chosen)
        for world in setting.worlds if "select" in parts else ():
            selecting(session, setting, world)
    session.show_summary("local_fraction", ("batch", "nodes", "carrier"), part="collect")
    session.show_summary("world", ("selector",), part="select")


def _jobs(counts: Sequence[int], parts: Sequence[str], *, alone: bool) -> list[tuple[int, list[str]]]:
    """Numbers of nodes, and the parts that are measured on so many."""
    batches = [part for part in parts if part in ("collect", "batches")]
    chosen = {count: list(batches) for count in counts if batches and (count > 1 or alone)}
    if "transport" in parts:
        chosen.setdefault(2, []).append("transport")
    return sorted(chosen.items())


def _compare(
    session: Session,
    subjects: Mapping[str, Subject],
    workload: str,
    label: str,
    amount: int,
    parameters: Mapping[str, Any],
    *,
    yardstick: str = "bare",
    unit: Literal["bytes", "rows"] = "bytes",
    targets: Mapping[str, float] | None = None,
) -> None:
    """Measure a comparison of subjects, which are forgotten afterwards, unless it is too late."""
    try:
        if not session.late(label):
            goals = {"ours": targets or {}}
            variants = [s.variant(name, amount, targets=goals.get(name, {})) for name, s in subjects.items()]
            session.compare(workload, label, variants, yardstick, parameters, unit=unit)
    finally:
        for subject in subjects.values():
            subject.close()


def exchanging(
    session: Session, setting: Setting, nodes: Sequence[Node], carrier: str | None, parts: Sequence[str]
) -> None:
    """Ranks on so many nodes: batches of rows that are chosen by the benchmark, or drawn by a dataset; requests."""
    count = len(nodes)
    with Job(nodes, carrier if count > 1 else None, setting.environment) as job:
        for name in setting.workloads:
            job.fill(name, setting.trajectories, setting.seed)
            for batch in setting.batches:
                for fraction in (setting.fractions if count > 1 else (1.0,)) if "collect" in parts else ():
                    options = {"batch": batch, "local": round(fraction * batch)}
                    _batch(session, setting, job, "collect", name, options, options)
                if "batches" in parts:
                    bare = {"batch": batch, "local": round(batch / count)}
                    ours = {"batch": batch, "selector": "prioritized"}
                    _batch(session, setting, job, "batches", name, ours, bare)
            if "transport" in parts:
                _transport(session, setting, job, name)


def _batch(
    session: Session,
    setting: Setting,
    job: Job,
    part: str,
    name: str,
    ours: Mapping[str, Any],
    bare: Mapping[str, Any],
) -> None:
    count, batch, carrier = len(job.nodes), bare["batch"], job.carrier or "none"
    amount = WORKLOADS[name].row_bytes * batch
    subjects = {
        "bare": Subject(job, "bare exchange", setting.window, bare),
        "ours": Subject(job, part, setting.window, ours),
    }
    what = f"{bare['local'] / batch:.0%} of own node" if part == "collect" else "drawn by a dataset"
    through = f" over {carrier}" if count > 1 else ""
    label = f"{name}, batch {batch}, {count} node{'' if count == 1 else 's'}{through}, {what}"
    told = {"part": part, "nodes": count, "carrier": carrier, "batch": batch}
    told |= {"local_fraction": bare["local"] / batch}
    told |= {key: value for key, value in ours.items() if key == "selector"}
    _compare(session, subjects, name, label, amount, {**setting.parameters, **told})


def _transport(session: Session, setting: Setting, job: Job, name: str) -> None:
    """Requests of one rank to one other node, into staging memory."""
    workload = WORKLOADS[name]
    spec = WindowSpec("", Schema(workload.schema), dict.fromkeys(workload.schema, workload.window))
    for wanted in setting.requests:
        rows = max(1, round(wanted / spec.row_bytes))
        one = spec.reply_bytes(rows)
        for in_flight in _IN_FLIGHT:
            requests = max(in_flight, min(16, (1 << 23) // one))
            options = {"rows": rows, "in_flight": in_flight, "requests": requests}
            subjects = {
                kind: Subject(job, f"{prefix}fetch", setting.window, options, first=True)
                for kind, prefix in (("bare", "bare "), ("ours", ""))
            }
            # One at a time is a matter of round trips; the targets are of throughput.
            target = next((least for least_bytes, least in _TARGETS if one >= _SHORT * least_bytes), None)
            targets = {"bare": target} if target is not None and in_flight > 1 else {}
            told = {"part": "transport", "nodes": len(job.nodes), "carrier": job.carrier}
            parameters = {**setting.parameters, **told, "request": wanted, "request_bytes": one, **options}
            label = f"{name}, requests of {size(one)} over {job.carrier}, {in_flight} under way"
            _compare(session, subjects, name, label, requests * one, parameters, targets=targets)


def selecting(session: Session, setting: Setting, world: int) -> None:
    """Batches of rows of 4 bytes, over shards of one node: what is left is selection, with its exchange."""
    batch = setting.selection_batch
    parameters = {**setting.parameters, "part": "select", "world": world, "batch": batch, "carrier": "gloo"}
    with Job([Node("node 0", "127.0.0.1", "lo")] * world, None, setting.environment) as job:
        job.fill(TINY.name, TINY.trajectories, setting.seed)
        for selector in SELECTORS:
            ours = Subject(job, "batches", setting.window, {"batch": batch, "selector": selector})
            bare = Subject(job, "all_to_all", setting.window, {"of": ours.name})
            # Ours is checked first: the collective repeats what its last batch sent.
            subjects = {"ours": ours, "all_to_all": bare}
            label = f"selection, {selector}, {world} rank{'' if world == 1 else 's'}"
            told = {**parameters, "selector": selector}
            _compare(session, subjects, "selection", label, batch, told, yardstick="all_to_all", unit="rows")
        for count in setting.exchanged if world > 1 else ():
            subjects = {"all_to_all": Subject(job, "all_to_all", setting.window, {"size": count})}
            label = f"all_to_all, {size(count)} from each to each of {world} ranks"
            told, amount = {**parameters, "part": "all_to_all", "each_bytes": count}, count * (world - 1)
            _compare(session, subjects, "all_to_all", label, amount, told, yardstick="all_to_all")
