"""``python -m benchmarks batch-size``: the batches of `single-server` (W1, by priority), of 32 to 1024 rows.

The paper's third experiment: the same ways, ours and others', at each size; see `benchmarks.single_server` for what
they are. With ``--device cuda`` batches are wanted on the GPU: see `benchmarks.batches_gpu`.
"""

from __future__ import annotations

import contextlib
from typing import Annotated

import torch
import typer
from rich.markup import escape

from benchmarks.batches import Others, compared
from benchmarks.batches_store import Store
from benchmarks.harness import Left, Session, grid
from benchmarks.options import Device, Minutes, Out, Peers, Quick, Repeats, Threads, numbers, opened
from benchmarks.peers.environments import interpreters
from benchmarks.workloads import W1

__all__ = ["command"]

NAME = "batch-size"
BATCHES = (32, 64, 128, 256, 512, 1024)
QUICK_BATCHES = (32, 256)


def command(
    device: Annotated[Device, typer.Option(help="Where batches are wanted.")] = Device.cpu,
    quick: Quick = False,
    batches: Annotated[
        str | None, typer.Option(help=f"Rows of batches: {','.join(map(str, BATCHES))} by default.")
    ] = None,
    trajectories: Annotated[int | None, typer.Option(min=16, help="Of W1, 20,000 by default.")] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """Drawing batches of 32 to 1024 trajectories, beside what others do."""
    sizes = numbers(batches, "--batches", 1, 1 << 16) or (QUICK_BATCHES if quick else BATCHES)
    workload = W1.of(trajectories or (300 if quick else W1.trajectories))
    if workload.trajectories < max(sizes):
        message = f"{workload.trajectories} is less than the largest batch, {max(sizes)}."
        raise typer.BadParameter(message, param_hint="--trajectories")
    with opened(
        NAME,
        quick=quick,
        repeats=repeats or (2 if quick else 7),
        out=out,
        threads=threads,
        minutes=minutes,
        device=device,
        pause=0.005,
        configuration={"batches": sizes, "trajectories": workload.trajectories},
    ) as session:
        left = Left(session)
        if device is Device.cuda:
            from benchmarks import batches_gpu

            batches_gpu.cuda(session, left, [workload], sizes, experiment=NAME, quick=quick)
        else:
            with contextlib.ExitStack() as stack, session.progress(NAME, len(sizes)):
                store = stack.enter_context(contextlib.closing(Store(workload)))
                others = Others(left, interpreters(peers), torch.get_num_threads())
                processes = stack.enter_context(stack.enter_context(others).filled(store))
                draws: int | None = (
                    None  # frequencies do not depend on the size: later, a few batches will do
                )
                for batch in sizes:
                    if session.deadline.passed(f"{workload.name}, batch {batch}"):
                        continue
                    options = {"experiment": NAME, "quick": quick}
                    compared(session, left, store, processes, batch, draws=draws, **options)
                    draws = 0
        _show_summary(session, sizes)
        session.show_targets()
        left.show()
        session.finish()


def _show_summary(session: Session, sizes: tuple[int, ...]) -> None:
    """GB/s by size."""
    if not session.results:
        return
    table = grid("GB/s by rows of a batch")
    table.add_column("variant", no_wrap=True)
    for batch in sizes:
        table.add_column(f"{batch:,}", justify="right")
    for name in dict.fromkeys(result.variant.name for result in session.results):
        mine = {r.comparison.parameters["batch"]: r for r in session.results if r.variant.name == name}
        cells = [f"{mine[batch].gb_per_s:.2f}" if batch in mine else "–" for batch in sizes]
        table.add_row(escape(name), *cells)
    session.console.print(table)
