"""``python -m benchmarks single-server``: storing on one machine, and drawing batches through `DataLoader`.

The paper's first experiment. Batches of 256 (see `batches`), on the CPU with the same number of threads for all.

W1: whole trajectories (42,000 B each) out of 20,000, drawn by priority (alpha 0.6, beta 0.4, with importance weights).
The yardstick copies as many bytes in one piece. Ours is ``DataLoader(ReplayDataset(...), batch_size=None)`` for a
plain loop: nothing ahead, a batch valid until the next one (``prefetch=0, keep=1, copy=False``); the same with the
defaults, 2 batches ahead, and valid while anything refers to them; `sample` without `DataLoader`. Plain torch is
`torch.multinomial`, and `index_select` into buffers that are kept: no table that could be written meanwhile. A
map-style dataset draws uniformly. Reverb's server has a process of its own (gRPC) or is in the same one; TorchRL and
cpprb hold a trajectory a row.

W2: windows of 20 steps (1,920 B) out of 2 million, uniformly. Ours end at any step, with zeros before the trajectory's
first and a mask; those of ``TorchRL, slices`` (its `SliceSampler` with cached ends) lie within a trajectory, need no
padding, and come flat. Reverb's windows are items, chosen when steps are written, cpprb knows no trajectories: neither
is measured there. Peers' batches are what their users get (numpy arrays, a tensordict), each peer in a process of its
own, in its fastest setting: see `benchmarks.peers.batches`.

Adding, by one process: whole trajectories of W1 one by one and in batches, as `online` does. With ``--device
cuda`` batches are wanted on the GPU: see `benchmarks.batches`.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.adding import Setting, crews_of, inserting
from benchmarks.batches import TARGET_BATCH, measured
from benchmarks.harness import Session
from benchmarks.options import experiment, some_of
from benchmarks.workloads import W1, W2

PARTS = ("W1", "W2", "insert")
INSERT_TRAJECTORIES = 6_000
WINDOWS_ELSEWHERE = {
    "Reverb, W2": "windows are items, chosen when steps are written: 2 million of them",
    "cpprb, W2": "it knows no trajectories: a window could begin in one and end in the next",
}


@experiment("single-server", repeats=(2, 9), pause=0.005)
def command(
    session: Session,
    parts: Annotated[str, typer.Option(help="Which: W1, W2, insert; all by default.")] = ",".join(PARTS),
    batch: Annotated[int, typer.Option(min=1, help="Rows of a batch.")] = TARGET_BATCH,
    trajectories: Annotated[int | None, typer.Option(min=16, help="Of W1 and W2, 20,000 by default.")] = None,
) -> None:
    """Storing trajectories and drawing batches on one machine, beside what others do."""
    chosen = some_of(parts, PARTS, "--parts")
    count = trajectories or (300 if session.quick else W1.trajectories)
    if count < batch:
        raise typer.BadParameter(f"{count} is less than a batch, {batch}.", param_hint="--trajectories")
    session.configure(batch=batch, trajectories=count, parts=chosen)
    if "W2" in chosen and not session.cuda:
        for what, why in WINDOWS_ELSEWHERE.items():
            session.leave(what, why)
    measured(session, [workload.of(count) for workload in (W1, W2) if workload.name in chosen], (batch,))
    if "insert" in chosen and not session.cuda:
        setting = Setting(
            W1.of(300 if session.quick else INSERT_TRAJECTORIES),
            modes=("whole", "batches"),
            writers=(1,),
            window=0.04 if session.quick else 0.4,
        )
        with crews_of(session, ", insert") as (crews, tables):
            inserting(session, setting, crews, tables, "insert")
