"""``python -m benchmarks online``: what a table takes while others read it: adding, new priorities, and both at once.

Adding goes on in a table that is full and evicts the oldest trajectories, in shared memory, by 1, 2, 4 and 8 processes
that attach to it by name; a tenth of its blocks is spare. Whole trajectories (W1: 42,000 bytes each) one by one or in
batches; single steps through a writer, made a trajectory every 100 steps; the same with several steps at a time. Rates
are totals over all writers.

================ =============================================================================================
memcpy           the yardstick: as many bytes in one piece an item, by as many processes, into shared memory
ours             `Table.add`, `Table.extend`, `Writer.append` and `commit`
torch            `copy_` into tensors made before: no index, no eviction, nobody else can see them; one process
Reverb           `TrajectoryWriter`; whole trajectories as one append, single steps in chunks of a trajectory
Reverb, Writer   its older `Writer`, which knows no columns     (these four in the interpreters that --peers
TorchRL          `TensorDictReplayBuffer`, one process           names, each in processes of its own, which
cpprb            `ReplayBuffer`, one process                     benchmarks/peers/make.sh makes)
================ =============================================================================================

Reverb has no call for batches of trajectories, TorchRL and cpprb none for several processes. New priorities: 1,024 of
N by `ReplayDataset.update_priority`, checked against generations, beside a plain numpy assignment. Reading: batches of
256 whole trajectories by `ReplayDataset.sample` while writers add at full speed. All of it: the same with a reader that
adds up each batch, and a `SampleToInsertRatio`. Everything is checked before it is timed: what was added is what is
there, every row that is read under way is whole, and the table's counts agree.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import typer
from rich.markup import escape

from benchmarks import online_parts, online_reads
from benchmarks.harness import Left, Result, Session, grid, quantiles, verdict
from benchmarks.online_parts import Setting
from benchmarks.online_subjects import Crew, TableCache, peer_crews
from benchmarks.options import Minutes, Out, Peers, Quick, Repeats, Threads, numbers, opened, some_of
from benchmarks.peers.environments import interpreters
from benchmarks.peers.online_peers import MODES
from benchmarks.workloads import W1

__all__ = ["command", "run", "show_rates"]

PARTS = ("insert", "priorities", "read", "loop")
TRAJECTORIES = 6_000


def command(
    quick: Quick = False,
    parts: Annotated[str, typer.Option(help="Which: insert, priorities, read, loop; all by default.")] = (
        ",".join(PARTS)
    ),
    writers: Annotated[str | None, typer.Option(help="Numbers of writers: 1,2,4,8 by default.")] = None,
    trajectories: Annotated[
        int | None, typer.Option(min=512, help=f"Of W1 in a table: {TRAJECTORIES:,} by default.")
    ] = None,
    block_steps: Annotated[int, typer.Option(min=1, help="Steps of a block.")] = 100,
    items: Annotated[
        str | None, typer.Option(help="Items whose priorities are set: 1e5,1e6 by default.")
    ] = None,
    seconds: Annotated[float | None, typer.Option(min=0.01, help="Of a measurement: 0.4 by default.")] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """Adding, setting priorities, and reading while others write."""
    chosen = some_of(parts, PARTS, "--parts")
    setting = Setting(
        W1.of(trajectories or (600 if quick else TRAJECTORIES)),
        block_steps=block_steps,
        modes=("whole", "batches", "steps", "chunks 10") if quick else MODES,
        writers=numbers(writers, "--writers", 1, 64) or ((1, 2) if quick else (1, 2, 4, 8)),
        readers_writers=(0, 2) if quick else (0, 1, 2),
        rows=64 if quick else 256,
        items=numbers(items, "--items", 2048, 10**7) or ((10_000,) if quick else (10**5, 10**6)),
        window=seconds or (0.04 if quick else 0.4),
    )
    configuration = {
        "writer_threads": 1,
        "writers": setting.writers,
        "trajectories": setting.workload.trajectories,
        "block_steps": setting.block_steps,
        "seconds": setting.window,
        "seed": setting.seed,
    }
    with opened(
        "online",
        quick=quick,
        repeats=repeats or (2 if quick else 9),
        out=out,
        threads=threads,
        minutes=minutes,
        configuration=configuration,
    ) as session:
        run(session, Left(session), setting, chosen, interpreters(peers))


def run(
    session: Session, left: Left, setting: Setting, parts: Sequence[str], pythons: Sequence[Path]
) -> None:
    """Measure and show the parts."""
    comparisons = {
        "insert": len(setting.modes) * len(setting.writers),
        "priorities": len(setting.items),
        "read": 2,
        "loop": 1,
    }
    with contextlib.ExitStack() as stack:
        shelf = stack.enter_context(TableCache())
        crews = {name: Crew(name) for name in ("memcpy", "torch", "ours")}
        if "insert" in parts:
            for name, crew, reason in peer_crews(pythons):
                if crew is None:
                    left.add(name, reason)
                else:
                    crews[name] = crew
        for crew in crews.values():
            stack.callback(crew.close)
        with session.progress("online", sum(comparisons[part] for part in parts)):
            shown = 0

            def show() -> None:
                nonlocal shown
                if len(session.results) > shown:
                    show_rates(session, session.results[shown:])
                shown = len(session.results)

            if "insert" in parts:
                for _ in online_parts.inserting(session, left.add, setting, crews, shelf):
                    show()
            if "priorities" in parts:
                for _ in online_parts.prioritizing(session, left.add, setting, pythons):
                    show()
            if "read" in parts:
                for _ in online_reads.reading(session, left.add, setting, crews["ours"], shelf):
                    show()
            if "loop" in parts:
                for _ in online_reads.looping(session, left.add, setting, crews["ours"], shelf):
                    show()
    _show_summary(session)
    _show_targets(session)
    left.show()
    session.finish()


# ---------------------------------------------------------------- showing


def rate(result: Result) -> np.ndarray:
    """Items a second: float64 [repeats]."""
    rows = result.variant.amount if result.comparison.unit == "rows" else 1
    return rows / result.seconds


def show_rates(session: Session, results: Sequence[Result]) -> None:
    """A table for one comparison."""
    comparison = results[0].comparison
    item = comparison.parameters["item"]
    table = grid(comparison.label)
    table.add_column("variant", no_wrap=True)
    shown = {key: head for key, head in _EXTRAS.items() if any(key in result.extras for result in results)}
    speed = ["GB/s"] if comparison.unit == "bytes" else []
    for head in (f"{_plural(item)}/s", "p10 – p90", *speed, f"× {comparison.yardstick}", *shown.values()):
        table.add_column(head, justify="right")
    for result in results:
        low, mid, high = quantiles(rate(result)).values()
        cells = [f"{mid:,.0f}", f"{low:,.0f} – {high:,.0f}"]
        cells += [f"{result.gb_per_s:.2f}"] if comparison.unit == "bytes" else []
        cells.append(f"{result.ratio(comparison.yardstick):.3g}")
        cells += [_extra(key, result.extras) for key in shown]
        table.add_row(escape(result.variant.name), *cells)
    session.console.print(table)


_EXTRAS = {
    "trajectories_per_s": "trajectories/s",
    "trajectories_per_s_without_reader": "… with no reader",
    "rows_per_trajectory": "rows a trajectory",
    "writers_waiting": "writers wait",
    "reader_waiting": "reader waits",
}


def _extra(key: str, extras: dict[str, float]) -> str:
    if key not in extras:
        return "–"
    if key.endswith("waiting"):
        return f"{extras[key]:.0%}"
    return f"{extras[key]:,.1f}" if key == "rows_per_trajectory" else f"{extras[key]:,.0f}"


def _plural(item: str) -> str:
    return {"trajectory": "trajectories", "priority": "priorities", "batch": "batches"}.get(item, f"{item}s")


def _show_summary(session: Session) -> None:
    """Adding: rates against the number of writers."""
    results = [result for result in session.results if result.comparison.workload in MODES]
    counts = sorted({result.comparison.parameters["writers"] for result in results})
    if not results:
        return
    table = grid("Adding: items a second, all writers together (× memcpy)")
    for head in ("mode", "variant"):
        table.add_column(head, no_wrap=True)
    for count in counts:
        table.add_column(f"{count} {'writer' if count == 1 else 'writers'}", justify="right")
    for mode in dict.fromkeys(result.comparison.workload for result in results):
        there = [result for result in results if result.comparison.workload == mode]
        for name in dict.fromkeys(result.variant.name for result in there):
            mine = {r.comparison.parameters["writers"]: r for r in there if r.variant.name == name}
            cells = [
                f"{np.median(rate(mine[count])):,.0f} ({mine[count].ratio('memcpy'):.2g})"
                if count in mine
                else "–"
                for count in counts
            ]
            table.add_row(mode, escape(name), *cells)
    session.console.print(table)


def _show_targets(session: Session) -> None:
    """What has a target, with what others reach."""
    table = grid("Targets")
    table.add_column("comparison", no_wrap=True)
    for head in ("ours", "target", ""):
        table.add_column(head, justify="right", no_wrap=True)
    table.add_column("others")
    for result in session.results:
        label, seconds = result.comparison.label, result.seconds
        if result.variant.limit is not None:
            goal = float(rate(result)[0] * seconds[0] / result.variant.limit)
            cells = (f"{np.median(rate(result)):,.0f}/s", f"{goal:,.0f}/s")
            table.add_row(
                escape(label), *cells, verdict(rate(result) / goal, 1.0), escape(_others(session, result))
            )
        for name, target in result.variant.targets.items():
            cells = (f"{result.ratio(name):.2f} × {name}", f"{target:.2f}")
            table.add_row(
                escape(label),
                *cells,
                verdict(result.ratios[name], target),
                escape(_others(session, result)),
            )
    if table.row_count:
        session.console.print(table)


def _others(session: Session, result: Result) -> str:
    same = [r for r in session.results if r.comparison.label == result.comparison.label]
    others = [r for r in same if not r.variant.name.startswith("ours")]
    parts: list[Any] = [f"{r.variant.name} {np.median(rate(r)):,.0f}" for r in others]
    return ", ".join(parts)
