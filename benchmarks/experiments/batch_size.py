"""``python -m benchmarks batch-size``: the batches of `single-server` (W1, by priority), of 32 to 1024 rows.

The paper's third experiment: the same ways, ours and others', at each size; see `benchmarks.experiments.single_server`
for what they are.
"""

from __future__ import annotations

from typing import Annotated

import typer

from benchmarks.batches import measured
from benchmarks.harness import Session
from benchmarks.options import experiment, numbers, option
from benchmarks.workloads import W1

BATCHES = (32, 64, 128, 256, 512, 1024)
QUICK_BATCHES = (32, 256)

Batches = option(str, f"Rows of batches: {','.join(map(str, BATCHES))} by default.")


@experiment("batch-size", repeats=(2, 7), pause=0.005)
def command(
    session: Session,
    batches: Batches = None,
    trajectories: Annotated[int | None, typer.Option(min=16, help="Of W1, 20,000 by default.")] = None,
) -> None:
    """Drawing batches of 32 to 1024 trajectories, beside what others do."""
    sizes = numbers(batches, "--batches", 1, 1 << 16) or (QUICK_BATCHES if session.quick else BATCHES)
    workload = W1.of(trajectories or (300 if session.quick else W1.trajectories))
    if workload.trajectories < max(sizes):
        message = f"{workload.trajectories} is less than the largest batch, {max(sizes)}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    session.configure(batches=sizes, trajectories=workload.trajectories)
    measured(session, [workload], sizes)
