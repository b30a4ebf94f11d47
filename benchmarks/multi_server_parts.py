"""What ``multi-server`` measures: comparisons of ours with bare exchanges, one after another."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.harness import Comparison, Result, Session, Variant, size
from benchmarks.multi_server_job import Job, Subject
from benchmarks.multi_server_nodes import Node
from benchmarks.multi_server_ranks import TINY, WORKLOADS
from gear_loader.storage.schema import Schema
from gear_loader.transport.spec import WindowSpec

__all__ = ["SELECTORS", "Setting", "exchanging", "selecting"]

SELECTORS = ("uniform", "prioritized", "prioritized, without replacement", "top")
_TARGETS = ((1 << 20, 0.9), (1 << 16, 0.7))
"""Bytes of a request, and the least share of the bare exchange's rate from there on."""
_SHORT = 0.9  # of these bytes: a whole number of rows comes close to a size, and may lie below it
_IN_FLIGHT = (1, 4)

Left = Callable[[str, str], None]
NodesOf = Callable[[int], contextlib.AbstractContextManager[list[Node]]]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured, and how long.

    Attributes:
        workloads: names. trajectories: of a shard. batches: rows of a batch of one rank. fractions: of them of its own
            node. requests: bytes of requests where the transport is measured alone.
        worlds: ranks where selection is measured. selection_batch: rows of a rank's batch there. exchanged: bytes from
            each rank to each where the collective is measured alone.
        window: seconds of a measurement.
        environment: variables of all processes.
        parameters: what all rows say.
    """

    workloads: Sequence[str]
    trajectories: int
    batches: Sequence[int]
    fractions: Sequence[float]
    requests: Sequence[int]
    worlds: Sequence[int]
    selectors: Sequence[str]
    selection_batch: int
    exchanged: Sequence[int]
    window: float
    environment: Mapping[str, str]
    parameters: Mapping[str, Any]
    seed: int = 17


def _run(
    session: Session, subjects: Sequence[Subject], comparison: Callable[[], Comparison]
) -> list[Result] | None:
    """Measure a comparison of subjects, which are forgotten afterwards; None if it is too late."""
    made = comparison()
    try:
        return None if session.deadline.passed(made.label) else session.run(made)
    finally:
        for subject in subjects:
            subject.close()


# ---------------------------------------------------------------- batches


def exchanging(
    session: Session, setting: Setting, nodes: Sequence[Node], carrier: str | None, parts: Sequence[str]
) -> Iterator[list[Result]]:
    """Ranks on so many nodes: batches of rows that are chosen by the benchmark, or drawn by a dataset; requests."""
    count = len(nodes)
    with Job(nodes, carrier if count > 1 else None, setting.environment) as job:
        for name in setting.workloads:
            job.fill(name, setting.trajectories, setting.seed)
            for batch in setting.batches:
                for fraction in (setting.fractions if count > 1 else (1.0,)) if "collect" in parts else ():
                    options = {"batch": batch, "local": round(fraction * batch)}
                    yield from _batch(session, setting, job, "collect", name, options, options)
                if "batches" in parts:
                    bare = {"batch": batch, "local": round(batch / count)}
                    ours = {"batch": batch, "selector": "prioritized"}
                    yield from _batch(session, setting, job, "batches", name, ours, bare)
            if "transport" in parts:
                yield from _transport(session, setting, job, name)


def _batch(
    session: Session,
    setting: Setting,
    job: Job,
    part: str,
    name: str,
    ours: Mapping[str, Any],
    bare: Mapping[str, Any],
) -> Iterator[list[Result]]:
    count, batch = len(job.nodes), bare["batch"]
    amount = WORKLOADS[name].row_bytes * batch
    carrier = job.carrier or "none"
    subjects = [
        Subject(job, "bare exchange", setting.window, bare),
        Subject(job, part, setting.window, ours),
    ]
    what = f"{bare['local'] / batch:.0%} of own node" if part == "collect" else "drawn by a dataset"
    through = f" over {carrier}" if count > 1 else ""
    results = _run(
        session,
        subjects,
        lambda: Comparison(
            experiment="multi-server",
            workload=name,
            label=f"{name}, batch {batch}, {_nodes(count)}{through}, {what}",
            variants=[
                variant.variant(title, amount)
                for variant, title in zip(subjects, ("bare", "ours"), strict=True)
            ],
            yardstick="bare",
            parameters={
                **setting.parameters,
                "part": part,
                "nodes": count,
                "carrier": carrier,
                "batch": batch,
                "local_fraction": bare["local"] / batch,
                **{key: value for key, value in ours.items() if key == "selector"},
            },
        ),
    )
    if results is not None:
        yield results


def _nodes(count: int) -> str:
    return f"{count} node{'' if count == 1 else 's'}"


# ---------------------------------------------------------------- the transport alone


def _transport(session: Session, setting: Setting, job: Job, name: str) -> Iterator[list[Result]]:
    """Requests of one rank to one other node, into staging memory."""
    workload = WORKLOADS[name]
    spec = WindowSpec("", Schema(workload.schema), dict.fromkeys(workload.schema, workload.window))
    for wanted in setting.requests:
        rows = max(1, round(wanted / spec.row_bytes))
        for in_flight in _IN_FLIGHT:
            yield from _requests(session, setting, job, name, wanted, rows, spec.reply_bytes(rows), in_flight)


def _requests(
    session: Session,
    setting: Setting,
    job: Job,
    name: str,
    wanted: int,
    rows: int,
    one: int,
    in_flight: int,
) -> Iterator[list[Result]]:
    requests = max(in_flight, min(16, (1 << 23) // one))
    options = {"rows": rows, "in_flight": in_flight, "requests": requests}
    subjects = [Subject(job, kind, setting.window, options, first=True) for kind in ("bare fetch", "fetch")]
    # One at a time is a matter of round trips; the targets are of throughput.
    target = next((least for least_bytes, least in _TARGETS if one >= _SHORT * least_bytes), None)
    targets = {"bare": target} if target is not None and in_flight > 1 else {}

    def comparison() -> Comparison:
        variants: list[Variant] = [
            subjects[0].variant("bare", requests * one),
            subjects[1].variant("ours", requests * one, targets=targets),
        ]
        return Comparison(
            experiment="multi-server",
            workload=name,
            label=f"{name}, requests of {size(one)} over {job.carrier}, {in_flight} under way",
            variants=variants,
            yardstick="bare",
            parameters={
                **setting.parameters,
                "part": "transport",
                "nodes": len(job.nodes),
                "carrier": job.carrier,
                "request": wanted,
                "request_bytes": one,
                **options,
            },
        )

    results = _run(session, subjects, comparison)
    if results is not None:
        yield results


# ---------------------------------------------------------------- selection


def selecting(session: Session, setting: Setting, world: int) -> Iterator[list[Result]]:
    """Batches of rows of 4 bytes, over shards of one node: what is left is selection, with its exchange."""
    batch = setting.selection_batch
    parameters = {**setting.parameters, "part": "select", "world": world, "batch": batch, "carrier": "gloo"}
    with Job([Node("node 0", "127.0.0.1", "lo")] * world, None, setting.environment) as job:
        job.fill(TINY.name, TINY.trajectories, setting.seed)
        for selector in setting.selectors:
            ours = Subject(job, "batches", setting.window, {"batch": batch, "selector": selector})
            bare = Subject(job, "all_to_all", setting.window, {"of": ours.name})
            # Ours is checked first: the collective repeats what its last batch sent.
            results = _run(
                session,
                [bare, ours],
                lambda selector=selector, ours=ours, bare=bare: Comparison(  # type: ignore[misc]
                    experiment="multi-server",
                    workload="selection",
                    label=f"selection, {selector}, {world} rank{'' if world == 1 else 's'}",
                    variants=[
                        ours.variant("ours", batch),
                        bare.variant("all_to_all", batch),
                    ],
                    yardstick="all_to_all",
                    parameters={**parameters, "selector": selector},
                    unit="rows",
                ),
            )
            if results is not None:
                yield results
        for count in setting.exchanged if world > 1 else ():
            alone = Subject(job, "all_to_all", setting.window, {"size": count})
            results = _run(
                session,
                [alone],
                lambda count=count, alone=alone: Comparison(  # type: ignore[misc]
                    experiment="multi-server",
                    workload="all_to_all",
                    label=f"all_to_all, {size(count)} from each to each of {world} ranks",
                    variants=[alone.variant("all_to_all", count * (world - 1))],
                    yardstick="all_to_all",
                    parameters={**parameters, "part": "all_to_all", "each_bytes": count},
                ),
            )
            if results is not None:
                yield results
