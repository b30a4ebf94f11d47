"""``python -m benchmarks multi-server``: batches whose rows lie on several nodes, and what it costs to draw them.

A node is a rank with a shard of its own, the server process that it starts, and a process that sends the yardstick's
bytes; on one machine they are told apart by name (``--network processes``), or each gets a network namespace, with a
bridge between them and the bandwidth and latency that one asks for (``--network namespaces``, as root). Ranks do
everything at the same time; rates are those of one rank, times the mean of all.

collect measures batches of rows that the benchmark chooses, so many of them of the rank's own node, by
`ShardCollector` (a selection over all shards gives a rank 1 / nodes of its rows from its own node on average, whatever
the priorities are; other shares on all ranks at once can only be had past it); batches the same by `ReplayDataset`, by
priority over all shards, without and with a cache for rows of other nodes (its hit rate, and the bytes that it saves
a batch, are figures of the row); transport `fetch` into staging memory alone: one rank asks one other node, 1 or 4
requests under way; select batches of rows of 4 bytes: what it costs to draw over 1 to 8 shards, and the bytes of the
exchange.

The yardstick of the first three (``bare``) moves the same bytes over the same carrier in as many pieces, and nothing
else: `benchmarks.nodes.bare`. Rows of the rank's own node are one copy there. That of selection is the
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
from typing import Annotated, Any

from benchmarks.harness import Session
from benchmarks.nodes import bare
from benchmarks.nodes.job import (
    Bandwidth,
    Job,
    Latency,
    Network,
    Node,
    Placed,
    Subject,
    check_limits,
    namespaces,
    started,
)
from benchmarks.nodes.ranks import SELECTORS, TINY, WORKLOADS
from benchmarks.options import described, experiment, numbers, some_of
from benchmarks.showing import size
from gear_loader.storage.schema import Schema
from gear_loader.transport.spec import WindowSpec

PARTS = ("collect", "batches", "transport", "select")
SEED = 17
_TARGETS = ((1 << 20, 0.9), (1 << 16, 0.7))
"""Bytes of a request, and the least share of the bare exchange's rate from there on."""
_SHORT = 0.9  # of these bytes: a whole number of rows comes close to a size, and may lie below it
_IN_FLIGHT = (1, 4)


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured, and how long.

    trajectories: of a shard. batches: rows of a batch of one rank. fractions: of them of its own node. worlds: ranks
    where selection is measured. caches: bytes of a rank's cache, as shares of the other nodes' rows. window: seconds of
    a measurement. environment: variables of all processes. parameters: what all rows say.
    """

    trajectories: int
    batches: Sequence[int]
    fractions: Sequence[float]
    worlds: Sequence[int]
    caches: Sequence[float]
    window: float
    environment: Mapping[str, str]
    parameters: Mapping[str, Any]


@experiment("multi-server", repeats=(2, 9), threads=1)
def command(
    session: Session,
    parts: Annotated[str, described(f"Some of {','.join(PARTS)}.")] = ",".join(PARTS),
    nodes: Annotated[str | None, described("Numbers of nodes: 1,2,3 by default.")] = None,
    carriers: Annotated[
        str, described("Some of socket,ucx,nixl; all that are installed by default.")
    ] = ",".join(bare.CARRIERS),
    network: Placed = Network.processes,
    bandwidth: Bandwidth = None,
    latency: Latency = None,
    batches: Annotated[str | None, described("Rows of a rank's batch: 32,256 by default.")] = None,
    local: Annotated[str | None, described("Shares of own rows: 1,0.75,0.5,0.25,0 by default.")] = None,
    worlds: Annotated[str | None, described("Ranks that draw: 1,2,4,8 by default.")] = None,
    caches: Annotated[
        str | None, described("Caches, as shares of the other nodes' rows: 0.1,0.5 by default.")
    ] = None,
    trajectories: Annotated[int | None, described("Of a node: 2,000 by default.", min=64)] = None,
    seconds: Annotated[float | None, described("Of a measurement: 0.2 by default.", min=0.01)] = None,
    ucx_tls: Annotated[
        str, described("UCX_TLS of all processes, unless that is set; 'all' leaves it to UCX.")
    ] = "tcp",
) -> None:
    """Rows of other nodes, and drawing from all of them."""
    quick = session.quick
    chosen, wanted = some_of(parts, PARTS, "--parts"), some_of(carriers, bare.CARRIERS, "--carriers")
    check_limits(network, bandwidth, latency)
    counts = numbers(nodes, "--nodes", 1, 16) or ((1, 2) if quick else (1, 2, 3))
    parameters: dict[str, Any] = {"network": network.value, "ucx_tls": ucx_tls}
    parameters |= {"bandwidth_gbit": bandwidth, "latency_us": latency}
    fractions = tuple(reversed(numbers(local, "--local", 0, 1, float)))
    setting = Setting(
        trajectories or (256 if quick else 2_000),
        numbers(batches, "--batches", 1, 4096) or ((32,) if quick else (32, 256)),
        fractions or ((0.5, 0.0) if quick else (1.0, 0.75, 0.5, 0.25, 0.0)),
        numbers(worlds, "--worlds", 1, 64) or ((1, 2) if quick else (1, 2, 4, 8)),
        numbers(caches, "--caches", 0.001, 10, float) or ((0.5,) if quick else (0.1, 0.5)),
        seconds or (0.03 if quick else 0.2),
        {} if ucx_tls == "all" else {"UCX_TLS": ucx_tls},
        parameters,
    )
    told = {"nodes": counts, "trajectories": setting.trajectories, "seconds": setting.window, "seed": SEED}
    session.configure(**told, carriers=_carrier_versions(), **parameters)
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
    why = {carrier: bare.missing(carrier) for carrier in carriers}
    for carrier in filter(why.get, carriers):
        session.leave(carrier, str(why[carrier]))
    usable = [carrier for carrier in carriers if why[carrier] is None]
    most, given = max(max(counts), 2), setting.parameters
    with contextlib.ExitStack() as stack:
        nodes = [Node(f"node {number}") for number in range(most)]
        if given["network"] == Network.namespaces.value and set(parts) != {"select"}:
            limits = {"bandwidth": given["bandwidth_gbit"], "latency": given["latency_us"]}
            nodes = stack.enter_context(namespaces(most, **limits))
        for carrier in usable:
            for count in sorted({*counts, 2}):
                some = [part for part in parts if part in ("collect", "batches") and count in counts]
                some += [part for part in parts if part == "transport" and count == 2]
                if some and (count > 1 or carrier == usable[0]):
                    exchanging(session, setting, nodes[:count], carrier if count > 1 else None, some)
        for world in setting.worlds if "select" in parts else ():
            selecting(session, setting, world)


@dataclasses.dataclass(frozen=True)
class _Rig:
    """A job that is measured."""

    session: Session
    setting: Setting
    job: Job

    def compare(
        self,
        workload: str,
        label: str,
        amount: int,
        parameters: Mapping[str, Any],
        kinds: Mapping[str, tuple[str, Mapping[str, Any]]],
        yardstick: str = "bare",
        targets: Mapping[str, float] | None = None,
    ) -> None:
        """Measure variants, name -> what the ranks do and its options; the ranks forget them afterwards."""
        if self.session.late(label):
            return
        with contextlib.ExitStack() as stack:
            variants, first = [], parameters["part"] == "transport"
            for name, (kind, options) in kinds.items():
                subject = Subject(self.job, kind, self.setting.window, options, first=first)
                stack.callback(subject.close)
                variants.append(subject.variant(name, amount, targets or {} if name == "ours" else {}))
            told, unit = (
                {**self.setting.parameters, **parameters},
                "rows" if workload == "selection" else "bytes",
            )
            self.session.compare(workload, label, variants, yardstick, told, unit=unit)  # type: ignore[arg-type]


def exchanging(
    session: Session, setting: Setting, nodes: Sequence[Node], carrier: str | None, parts: Sequence[str]
) -> None:
    """Ranks on so many nodes: batches of rows that are chosen by the benchmark, or drawn by a dataset; requests."""
    count = len(nodes)
    with started(nodes, carrier, setting.environment) as job:
        rig = _Rig(session, setting, job)
        for name in ("W1",) if session.quick else ("W1", "W2"):
            job.fill(name, setting.trajectories, SEED)
            for batch in setting.batches:
                for fraction in (setting.fractions if count > 1 else (1.0,)) if "collect" in parts else ():
                    options = {"batch": batch, "local": round(fraction * batch)}
                    _batch(rig, "collect", name, options, options)
                if "batches" in parts:
                    ours = {"batch": batch, "selector": "prioritized"}
                    options = {"batch": batch, "local": round(batch / count)}
                    _batch(rig, "batches", name, ours, options)
            if "transport" in parts:
                _transport(rig, name)
            if "batches" in parts and count > 1:
                _cached(rig, name)


def _cached(rig: _Rig, name: str) -> None:
    """Batches of a dataset whose ranks cache some of the other nodes' rows."""
    job, setting = rig.job, rig.setting
    others = (len(job.nodes) - 1) * setting.trajectories * WORKLOADS[name].row_bytes
    for share in setting.caches:
        job.fill(name, setting.trajectories, SEED, round(share * others))
        for batch in setting.batches:
            options = {"batch": batch, "local": round(batch / len(job.nodes))}
            _batch(rig, "batches", name, {"batch": batch, "selector": "prioritized"}, options, share)


def _batch(
    rig: _Rig, part: str, name: str, ours: Mapping[str, Any], options: Mapping[str, Any], cache: float = 0.0
) -> None:
    carrier, count, batch = rig.job.carrier, len(rig.job.nodes), options["batch"]
    share = options["local"] / batch
    what = f"{share:.0%} of own node" if part == "collect" else "drawn by a dataset"
    through = f"s over {carrier}" if count > 1 else ""
    if cache:
        what += f", cache of {cache:.0%} of other nodes' rows"
    label = f"{name}, batch {batch}, {count} node{through}, {what}"
    told = {"part": part, "nodes": count, "carrier": carrier or "none", "batch": batch}
    told |= {"part": "cached", "cache_fraction": cache} if cache else {}
    told |= {"local_fraction": share, **{key: ours[key] for key in ours if key == "selector"}}
    kinds = {"bare": ("bare exchange", options), "ours": (part, ours)}
    rig.compare(name, label, WORKLOADS[name].row_bytes * batch, told, kinds)


def _transport(rig: _Rig, name: str) -> None:
    """Requests of one rank to one other node, into staging memory."""
    workload, carrier = WORKLOADS[name], rig.job.carrier
    spec = WindowSpec("", Schema(workload.schema), dict.fromkeys(workload.schema, workload.window))
    for wanted in (1 << 16, 1 << 20) if rig.session.quick else (1 << 16, 1 << 20, 1 << 23):
        rows = max(1, round(wanted / spec.row_bytes))
        one = spec.reply_bytes(rows)
        for in_flight in _IN_FLIGHT:
            requests = max(in_flight, min(16, (1 << 23) // one))
            options = {"rows": rows, "in_flight": in_flight, "requests": requests}
            kinds = {"bare": ("bare fetch", options), "ours": ("fetch", options)}
            # One at a time is a matter of round trips; the targets are of throughput.
            target = next((share for least, share in _TARGETS if one >= _SHORT * least), None)
            targets = {"bare": target} if target is not None and in_flight > 1 else {}
            told = {"part": "transport", "nodes": len(rig.job.nodes), "carrier": carrier}
            told |= {"request": wanted, "request_bytes": one, **options}
            label = f"{name}, requests of {size(one)} over {carrier}, {in_flight} under way"
            rig.compare(name, label, requests * one, told, kinds, targets=targets)


def selecting(session: Session, setting: Setting, world: int) -> None:
    """Batches of rows of 4 bytes, over shards of one node: what is left is selection, with its exchange."""
    batch = 64 if session.quick else 256
    exchanged = (512, 16_384) if session.quick else (512, 4_096, 32_768, 262_144)
    parameters = {"world": world, "batch": batch, "carrier": "gloo"}
    with started([Node("node 0")] * world, None, setting.environment) as job:
        job.fill(TINY.name, TINY.trajectories, SEED)
        rig = _Rig(session, setting, job)
        for selector in SELECTORS:
            # Ours is checked first: the collective repeats what its last batch sent.
            kinds = {"ours": ("batches", {"batch": batch, "selector": selector}), "all_to_all": _COLLECTIVE}
            label = f"selection, {selector}, {world} rank{'' if world == 1 else 's'}"
            told = {**parameters, "part": "select", "selector": selector}
            rig.compare("selection", label, batch, told, kinds, "all_to_all")
        for count in exchanged if world > 1 else ():
            label = f"all_to_all, {size(count)} from each to each of {world} ranks"
            told, amount = {**parameters, "part": "all_to_all", "each_bytes": count}, count * (world - 1)
            kinds = {"all_to_all": ("all_to_all", {"size": count})}
            rig.compare("all_to_all", label, amount, told, kinds, "all_to_all")


_COLLECTIVE: tuple[str, dict[str, Any]] = ("all_to_all", {})
