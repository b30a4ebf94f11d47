"""``python -m benchmarks single-server``: storing on one machine, and drawing batches through `DataLoader`.

The paper's first experiment. Batches of 256 (`benchmarks.batches`), on the CPU with the same number of threads for all:

================================ ==================================================================================
W1                               whole trajectories (42,000 B each) out of 20,000, drawn by priority (alpha 0.6,
                                 beta 0.4, with importance weights)
memcpy                           the yardstick: as many bytes in one piece
ours                             ``DataLoader(ReplayDataset(...), batch_size=None)`` for a plain loop: nothing ahead,
                                 a batch valid until the next one (``prefetch=0, keep=1``); the same with the
                                 defaults, 2 batches ahead and 2 valid; `sample` without `DataLoader`
plain torch                      `torch.multinomial`, and `index_select` into buffers that are kept: no table that
                                 could be written meanwhile
DataLoader, map-style            a user's own dataset: uniform draws, whole trajectories; also with 2 workers
Reverb, gRPC                     its `TrajectoryDataset`; the server has a process of its own on this machine
Reverb, in process               the same in the server's process, which needs no gRPC
TorchRL, cpprb                   their prioritized buffers, a trajectory a row
================================ ==================================================================================

W2: windows of 20 steps (1,920 B) out of 2 million, uniformly. Ours end at any step, with zeros before the trajectory's
first and a mask; those of ``TorchRL, slices`` (its `SliceSampler` with cached ends) lie within a trajectory, need no
padding, and come flat. Reverb's windows are items, chosen when steps are written, cpprb knows no trajectories: neither
is measured there. Peers' batches are what their users get (numpy arrays, a tensordict), each peer in a process of its
own, in its fastest setting: see `benchmarks.peers.batches_peers`.

Adding, by one process: whole trajectories of W1 one by one and in batches, as `benchmarks.online` does. With ``--device
cuda`` batches are wanted on the GPU: see `benchmarks.batches_gpu`.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import torch
import typer

from benchmarks import online_parts
from benchmarks.batches import TARGET_BATCH, Others, compared
from benchmarks.batches_store import Store
from benchmarks.harness import Comparison, Left, Session
from benchmarks.online import show_rates
from benchmarks.online_parts import Setting
from benchmarks.online_subjects import Crew, TableCache, peer_crews
from benchmarks.options import Device, Minutes, Out, Peers, Quick, Repeats, Threads, opened, some_of
from benchmarks.peers.environments import interpreters
from benchmarks.workloads import W1, W2, Workload

__all__ = ["command", "cpu", "insert"]

NAME = "single-server"
PARTS = ("W1", "W2", "insert")
INSERT_TRAJECTORIES = 6_000
WINDOWS_ELSEWHERE = {
    "Reverb, W2": "windows are items, chosen when steps are written: 2 million of them",
    "cpprb, W2": "it knows no trajectories: a window could begin in one and end in the next",
}


def command(
    device: Annotated[Device, typer.Option(help="Where batches are wanted.")] = Device.cpu,
    quick: Quick = False,
    parts: Annotated[str, typer.Option(help="Which: W1, W2, insert; all by default.")] = ",".join(PARTS),
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = TARGET_BATCH,
    trajectories: Annotated[int | None, typer.Option(min=16, help="Of W1 and W2, 20,000 by default.")] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """Storing trajectories and drawing batches on one machine, beside what others do."""
    chosen = some_of(parts, PARTS, "--parts")
    count = trajectories or (300 if quick else W1.trajectories)
    if count < batch:
        raise typer.BadParameter(f"{count} is less than a batch, {batch}.", param_hint="--trajectories")
    workloads = [workload.of(count) for workload in (W1, W2) if workload.name in chosen]
    with opened(
        NAME,
        quick=quick,
        repeats=repeats or (2 if quick else 9),
        out=out,
        threads=threads,
        minutes=minutes,
        device=device,
        pause=0.005,
        configuration={"batch": batch, "trajectories": count, "parts": chosen},
    ) as session:
        left = Left(session)
        if device is Device.cuda:
            from benchmarks import batches_gpu

            batches_gpu.cuda(session, left, workloads, (batch,), experiment=NAME, quick=quick)
        else:
            pythons = interpreters(peers)
            with Others(left, pythons, torch.get_num_threads()) as others:
                for workload in workloads:
                    cpu(session, left, workload, batch, others, quick=quick)
            if "insert" in chosen:
                insert(session, left, pythons, quick=quick)
        session.show_targets()
        left.show()
        session.finish()


def cpu(session: Session, left: Left, workload: Workload, batch: int, others: Others, *, quick: bool) -> None:
    """Measure batches of a workload."""
    if session.deadline.passed(f"{workload.name}, batch {batch}"):
        return
    with contextlib.ExitStack() as stack, session.progress(workload.name, 1):
        store = stack.enter_context(contextlib.closing(Store(workload)))
        if not store.prioritized:
            for what, why in WINDOWS_ELSEWHERE.items():
                left.add(what, why)
        processes = stack.enter_context(others.filled(store))
        compared(session, left, store, processes, batch, experiment=NAME, quick=quick)


# ---------------------------------------------------------------- adding


def insert(session: Session, left: Left, pythons: Sequence[Path], *, quick: bool) -> None:
    """Measure adding of whole trajectories by one process."""
    setting = Setting(
        W1.of(300 if quick else INSERT_TRAJECTORIES),
        modes=("whole", "batches"),
        writers=(1,),
        window=0.04 if quick else 0.4,
    )
    with contextlib.ExitStack() as stack, session.progress("insert", len(setting.modes)):
        shelf = stack.enter_context(TableCache())
        crews = {name: Crew(name) for name in ("memcpy", "torch", "ours")}
        for name, crew, reason in peer_crews(pythons):
            if crew is None:
                left.add(f"{name}, insert", reason)
            else:
                crews[name] = crew
        for crew in crews.values():
            stack.callback(crew.close)
        before = len(session.results)
        for _ in online_parts.inserting(session, left.add, setting, crews, shelf, _as_insert):
            if len(session.results) > before:
                show_rates(session, session.results[before:])
            before = len(session.results)


def _as_insert(comparison: Comparison) -> Comparison:
    """What `online` measures under the names of this experiment."""
    parameters = {**comparison.parameters, "part": "insert", "mode": comparison.workload}
    return dataclasses.replace(
        comparison,
        experiment=NAME,
        workload="insert",
        label=f"adding, {comparison.label}",
        parameters=parameters,
    )
