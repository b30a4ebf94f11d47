"""``python -m benchmarks remote-sample``: batches of a learner whose table lies in another process, over loopback.

Whole trajectories (W1: 42,000 bytes each), and single transitions (96 bytes, each a trajectory of one step), drawn by
priority (alpha 0.6, beta 0.4, with importance weights), in batches of 256. Ours is `ReplayDataset` over
`gear_loader.connect`; the server, which draws and gathers, is a process of its own. Reverb is its `TrajectoryDataset`
over gRPC, with a server of its own process, in the fastest of its settings (see `benchmarks.peers.reverb`), which is
how a learner reads it. The yardstick, carrier, is a socket that gets ready batches of as many bytes in one piece.
Each way checks what it gets to the byte before it is measured. Everything is on this machine and shares its cores.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Annotated, Any

import typer

from benchmarks.batches import SEED
from benchmarks.harness import Session, Variant
from benchmarks.options import experiment, some_of
from benchmarks.peers.process import PeerProcess, start
from benchmarks.workloads import STEPS, W1, Workload

_CARRIER, _REVERB = "carrier", "Reverb, gRPC"
_MODULES = {_CARRIER: "gear_served", "ours": "gear_served", _REVERB: "reverb"}
GOALS = {_REVERB: 5.0}
"""Shares that ours should reach."""
WORKLOADS = {"W1": W1.of(4_000), "transitions": dataclasses.replace(STEPS, steps=1, trajectories=20_000)}


@experiment("remote-sample", repeats=(2, 7))
def command(
    session: Session,
    parts: Annotated[str, typer.Option(help=f"Some of {','.join(WORKLOADS)}; all by default.")] = ",".join(
        WORKLOADS
    ),
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = 256,
    trajectories: Annotated[
        int | None, typer.Option(min=16, help="4,000 of W1 and 20,000 transitions by default.")
    ] = None,
) -> None:
    """Batches of a learner from a table of another process, beside Reverb's client and a bare socket."""
    chosen = some_of(parts, tuple(WORKLOADS), "--parts")
    session.configure(batch=batch, parts=chosen, trajectories=trajectories, seed=SEED)
    launches = {
        name: functools.partial(start, session.peers, "batches", module, name, session.threads)
        for name, module in _MODULES.items()
    }
    with session.processes(launches, required=(_CARRIER, "ours")) as processes:
        for part in session.each("remote-sample", chosen, str):
            count = trajectories or (300 if session.quick else WORKLOADS[part].trajectories)
            workload = WORKLOADS[part].of(count)
            found = []
            for name, process in processes.items():
                made = functools.partial(_variant, session, name, process, workload, batch)
                required = name != _REVERB
                found.append(session.attempt(f"{name}, {part}", made, required=required))
            variants = [variant for variant in found if variant is not None]
            others = [variant.name for variant in variants if variant.name == _REVERB]
            parameters = {"batch": batch, "trajectories": count, "row_bytes": workload.row_bytes}
            session.compare(part, part, variants, _CARRIER, parameters, others, unit="rows")


def _variant(session: Session, name: str, process: PeerProcess, workload: Workload, batch: int) -> Variant:
    """One way, filled, and in its fastest setting."""
    spec: dict[str, Any] = {
        "columns": {column: list(shape) for column, shape in workload.columns},
        "steps": workload.steps,
        "trajectories": workload.trajectories,
        "window": workload.steps,
        "seed": SEED,
    }
    process.ask("build", spec=spec)
    setting = process.ask("prepare", batch=batch)["setting"]

    def timed(batches: int) -> float:
        return float(process.ask("measure", batches=batches)["seconds"])

    count, short = 4, 0.02 if session.quick else 0.3
    while (seconds := timed(count)) < short / 4 and count < 1 << 14:
        count *= 2
    count = max(2, round(count * short / seconds))
    return Variant(
        name,
        lambda: timed(count),
        lambda: process.ask("check", times=2) and None,
        batch,
        count,
        {"peer": {**process.about, "setting": setting}} if name == _REVERB else {"setting": setting},
        GOALS if name == "ours" else {},
        required=name != _REVERB,
    )
