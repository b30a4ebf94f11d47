"""``python -m benchmarks train``: training a small decision transformer end to end, fed by different loaders.

A robot that hops (Hopper-v5) is recorded with behaviours from good to bad; a transformer learns from windows of 20
steps to do what leads to a given return. Model, optimizer, data and first weights are the same for all, and so are the
loop and the threads; each loader trains in a process of its own, in turn with the others. See
`benchmarks.peers.train_peers` and `benchmarks.train_worker` for the loaders:

================================ =====================================================================================
batch ready                      the yardstick: the same training step, with one batch that is there already
ours                             `ReplayDataset` through `DataLoader(batch_size=None)`, without prefetch and with it
plain torch                      indexing of whole tensors
DataLoader, map-style            a window at a time, without workers and with two
TorchRL                          `SliceSampler` with cached boundaries; its environment has a torch of its own, with
                                 which the yardstick is measured too
Reverb, gRPC                     `TrajectoryDataset`, overlapping windows as items, a server on the same machine
================================ =====================================================================================

Measured are training steps: how long one takes, and how much of that is waiting for its batch. Batches that were made
while others were measured do not count: they are thrown away first. Then each loader's training starts anew and goes on
until the policy, evaluated every so many steps in the environment, reaches a share of the best behaviour's return: the
seconds of training until then. Evaluating is not counted.

Every batch that is checked holds real windows, to the byte. Two draw alike but not the same: ours, plain torch and
`DataLoader` take a window that ends at any step, with padding at the begin of an episode; Reverb takes any window
without padding, TorchRL first a trajectory, then a window in it.
"""

from __future__ import annotations

import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.markup import escape

from benchmarks.harness import Amount, Left, Result, Session, grid, quantiles
from benchmarks.options import Device, Minutes, Out, Peers, Quick, Repeats, Threads, numbers, opened
from benchmarks.peers.environments import interpreters
from benchmarks.train_parts import RACERS, Setting, prepare, race, started, steps

__all__ = ["command", "run"]

_QUICK: Mapping[str, Any] = {
    "loaders": ("ours", "batch ready", "DataLoader, map-style", "TorchRL", "Reverb, gRPC"),
    "batches": (16,),
    "episodes": 24,
    "horizon": 60,
    "steps": 4,
    "chunk": 10,
    "limit": 20,
    "evaluations": 2,
    "goal": 0.2,
    "seeds": (0,),
}


def command(
    device: Annotated[Device, typer.Option(help="Where training happens.")] = Device.cpu,
    quick: Quick = False,
    batches: Annotated[str | None, typer.Option(help="Batch sizes: 64,256 by default.")] = None,
    episodes: Annotated[int | None, typer.Option(min=12, help="Episodes to collect.")] = None,
    goal: Annotated[
        float | None, typer.Option(min=0.0, help="Return to reach, as a share of the best behaviour's.")
    ] = None,
    seeds: Annotated[
        int | None, typer.Option(min=1, help="Times that each trains to it: 3 by default.")
    ] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """A small transformer end to end: steps and samples a second, seconds of training until it reaches a return."""
    given: dict[str, Any] = {
        "batches": numbers(batches, "--batches", 1, 2**16) or None,
        "episodes": episodes,
        "goal": goal,
        "seeds": range(seeds) if seeds else None,
    }
    chosen = {
        **(_QUICK if quick else {}),
        **{name: value for name, value in given.items() if value is not None},
    }
    with tempfile.TemporaryDirectory(prefix="train-") as folder:
        setting = Setting(folder=Path(folder), device=device.value, **chosen)
        names = ("batches", "episodes", "horizon", "chunk", "limit", "evaluations", "goal", "seeds")
        with opened(
            "train",
            quick=quick,
            repeats=repeats or (2 if quick else 15),
            out=out,
            threads=threads,
            minutes=minutes,
            device=device,
            configuration={name: _plain(getattr(setting, name)) for name in names},
        ) as session:
            run(session, Left(session), setting, interpreters(peers))


def _plain(value: Any) -> Any:
    return list(value) if isinstance(value, (range, tuple)) else value


def run(session: Session, left: Left, setting: Setting, pythons: Sequence[Path]) -> None:
    """Measure and show both parts."""
    setting = prepare(setting)
    amounts: list[Amount] = []
    with started(left, setting, pythons) as trainees, session.progress("train", len(setting.batches)):
        for batch in sorted(setting.batches, reverse=True):  # the last one is that of training to a return
            if not session.deadline.passed(f"batch {batch}"):
                trainees = steps(session, left, setting, trainees, batch)
        if not session.deadline.passed("training to a return"):
            racers = [trainee for trainee in trainees if trainee.name in RACERS]
            amounts = race(session, left, setting, racers)
    for batch in sorted(setting.batches):
        found = [r for r in session.results if r.comparison.parameters["batch"] == batch]
        if found:
            _show(session, found, amounts if batch == min(setting.batches) else [])
    left.show()
    session.finish()


def _show(session: Session, results: Sequence[Result], amounts: Sequence[Amount]) -> None:
    """A table for one batch size."""
    comparison = results[0].comparison
    goal = f"; return of {amounts[0].parameters['return']:.0f}" if amounts else ""
    table = grid(comparison.label + goal)
    table.add_column("loader", no_wrap=True)
    heads = ["step, ms", "p10 – p90", "waiting", "samples/s", f"× {comparison.yardstick}"]
    heads += ["s to the return", "steps"] if amounts else []
    for head in heads:
        table.add_column(head, justify="right", no_wrap=head == "p10 – p90")
    reached = {amount.variant: amount for amount in amounts}
    for result in results:
        low, mid, high = (value * 1e3 for value in quantiles(result.seconds).values())
        cells = [f"{mid:.2f}", f"{low:.1f} – {high:.1f}", f"{result.extras['waiting']:.1%}"]
        cells += [f"{result.extras['samples_per_s']:,.0f}", f"{result.ratio(comparison.yardstick):.2f}"]
        amount = reached.get(result.variant.name)
        if amount is not None:
            every = ", ".join(f"{seconds:.1f}" for seconds in sorted(amount.values))  # from each seed
            cells += [every, f"{amount.extras['steps']:.0f}"]
        table.add_row(escape(result.variant.name), *cells, *("–",) * (len(heads) - len(cells)))
    session.console.print(table)
