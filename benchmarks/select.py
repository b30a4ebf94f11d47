"""``python -m benchmarks select``: drawing by priority and setting new priorities, against the number of items.

Three operations: draw a batch with replacement; update a batch of items with new priorities (uniformly random items);
and the cycle, which is what training does: draw a batch, then update what was drawn. On the CPU:

====================== =======================================================================================
ours, tree             the yardstick: `PriorityTree`, sums only, as weights relative to the batch need them
ours, with extremes    `PriorityTree` that also keeps minima and maxima, for weights relative to the table and for TopK
ours, dataset          `ReplayDataset.sample` and `update_priority`, with weights and a batch of one int32 column
torch.multinomial      in float64; refuses more than 2**24 items
cumsum, torch / numpy  running sums over all items at each draw, and a search in them
TorchRL tree           its C++ trees: 32-bit sums and minima        (these four in the interpreters that --peers
TorchRL sampler        its `PrioritizedSampler`, with weights        names, each in a process of its own, which
cpprb                  its buffer of one int32 column, with weights  also times it: benchmarks/peers/make.sh
Tianshou tree          its numba tree, sums only                     makes them)
====================== =======================================================================================

All start with the same priorities, uniform in (0, 1]. Those with weights raise them to alpha = 0.6, the others take
them as they are. Before anything is timed, the draws of each are compared with the priorities by frequency, at the
start and after an update. A variant of others that is off by a little (no bin of items by more than a quarter) is timed
all the same and marked by a star; its rows say by how much, in `parameters`: `bias`. On a GPU: see
`benchmarks.select_gpu`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import enum
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import numpy as np
import torch
import typer
from rich.markup import escape

from benchmarks import machine
from benchmarks.harness import (
    Comparison,
    Incorrect,
    Left,
    Result,
    Session,
    Variant,
    grid,
    quantiles,
)
from benchmarks.options import Device, Minutes, Out, Peers, Quick, Repeats, Threads, numbers, opened
from benchmarks.peers import select_peers
from benchmarks.peers.environments import interpreters, start
from benchmarks.peers.select_peers import ALPHA, BETA, OPERATIONS, PEERS, Subject, measure
from benchmarks.select_subjects import (
    Biased,
    CumsumNumpy,
    CumsumTorch,
    DatasetSubject,
    ExtremesSubject,
    Multinomial,
    Peer,
    PeerFailed,
    TreeSubject,
    Truth,
    check_draws,
    draw_many,
)

__all__ = ["Kind", "Sizes", "command", "run"]

SEED = 3
YARDSTICK = "ours, tree"
MULTINOMIAL_MOST = 1 << 24
TOLERATED = 0.25
"""By how much a variant of others may be off in a bin of items, to be timed."""


class Where(str, enum.Enum):
    """Where selection happens."""

    auto = "auto"
    cpu = "cpu"
    cuda = "cuda"


@dataclasses.dataclass(frozen=True)
class Sizes:
    """What to measure.

    Attributes:
        items, batches: all pairs of these.
        seconds: about how long one measurement should take.
        draws: items drawn to check a variant.
    """

    items: tuple[int, ...]
    batches: tuple[int, ...]
    seconds: float = 0.01
    draws: int = 1 << 16


@dataclasses.dataclass(frozen=True)
class Kind:
    """A variant before it is built for a number of items.

    Attributes:
        name: how rows and tables call it.
        build: make one. Raises `PeerFailed`.
        item_bytes: memory that it needs about, for each item.
        most, why: items that it takes at most, for which reason.
        ours: whether a wrong result ends the run; others are left out.
        parameters: for the rows.
        limit: seconds that a cycle of a batch should take at most, by batch.
    """

    name: str
    build: Callable[[Truth], Subject]
    item_bytes: float
    most: int | None = None
    why: str = ""
    ours: bool = False
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limit: Mapping[int, float] = dataclasses.field(default_factory=dict)


def command(
    device: Annotated[Where, typer.Option(help="Where selection happens; auto: a GPU if there is one.")] = (
        Where.auto
    ),
    quick: Quick = False,
    sizes: Annotated[
        str | None, typer.Option(help="Numbers of items, for example 1e4,1e6. Up to 1e8 by default.")
    ] = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes: 32,256,1024,4096 by default.")] = None,
    peers: Peers = None,
    repeats: Repeats = None,
    out: Out = None,
    threads: Threads = None,
    minutes: Minutes = None,
) -> None:
    """Drawing by priority and updating, against the number of items and the batch size."""
    cuda = device is Where.cuda or (device is Where.auto and torch.cuda.is_available())
    if cuda and peers:
        raise typer.BadParameter("peers are measured on the CPU; use --device cpu.", param_hint="--peers")
    usual = (10**6, 10**7, 10**8) if cuda else (10**4, 10**5, 10**6, 10**7, 10**8)
    chosen = Sizes(
        numbers(sizes, "--sizes", 64, 2**31 - 1) or ((10**4, 10**5) if quick else usual),
        numbers(batches, "--batches", 1, 2**31 - 1) or ((32, 256) if quick else (32, 256, 1024, 4096)),
        seconds=0.002 if quick else 0.01,
        draws=1 << (14 if quick else 16),
    )
    configuration = {
        "items": chosen.items,
        "batches": chosen.batches,
        "seed": SEED,
        "alpha": ALPHA,
        "beta": BETA,
    }
    with (
        opened(
            "select",
            quick=quick,
            repeats=repeats or (3 if quick else 9),
            out=out,
            threads=threads,
            minutes=minutes,
            device=Device.cuda if cuda else Device.cpu,
            configuration=configuration,
        ) as session,
        contextlib.ExitStack() as stack,
    ):
        torch.manual_seed(SEED)
        left = Left(session)
        if cuda:
            from benchmarks import select_gpu

            run(session, left, select_gpu.kinds(), chosen, yardstick=select_gpu.YARDSTICK)
        else:
            pythons = interpreters(peers)
            kinds = [*_cpu_kinds(), *_peer_kinds(stack, left, pythons, torch.get_num_threads())]
            run(session, left, kinds, chosen, yardstick=YARDSTICK)


# ---------------------------------------------------------------- variants


def _cpu_kinds() -> list[Kind]:
    def kind(name: str, made: Any, **options: Any) -> Kind:
        return Kind(name, made, made.item_bytes, **options)

    return [
        kind(YARDSTICK, TreeSubject, ours=True),
        kind("ours, with extremes", ExtremesSubject, ours=True),
        kind(
            "ours, dataset",
            DatasetSubject,
            ours=True,
            most=10**6,
            why="a table of as many trajectories takes minutes to fill",
        ),
        kind("torch.multinomial", Multinomial, most=MULTINOMIAL_MOST, why="it refuses more than 2**24 items"),
        kind("cumsum, torch", CumsumTorch),
        kind("cumsum, numpy", CumsumNumpy),
    ]


def _peer_kinds(
    stack: contextlib.ExitStack, left: Left, pythons: Sequence[Path], threads: int
) -> Iterator[Kind]:
    """The peers that one of the interpreters has; why the others are missing is noted."""
    for name, peer in PEERS.items():
        try:
            process = start(pythons, select_peers.__file__, name, threads, environment=peer.environment)
        except PeerFailed as error:
            left.add(name, str(error))
            continue
        stack.callback(process.close)
        yield Kind(
            name, functools.partial(Peer, process, name), peer.item_bytes, parameters={"peer": process.about}
        )


# ---------------------------------------------------------------- measuring


def run(session: Session, left: Left, kinds: Sequence[Kind], sizes: Sizes, *, yardstick: str) -> None:
    """Build, check and measure all variants, the smallest number of items first, and show the results."""
    with session.progress("select", len(sizes.items) * len(sizes.batches) * len(OPERATIONS)):
        for items in sizes.items:
            if session.deadline.passed(f"{items:,} items"):
                continue
            truth = Truth(items, SEED)
            with contextlib.ExitStack() as stack:
                subjects = _build(stack, left, kinds, truth, sizes)
                if yardstick not in (kind.name for kind, _ in subjects):
                    continue
                del truth
                for batch in sizes.batches:
                    if session.deadline.passed(f"{items:,} items, batch {batch}"):
                        continue
                    results = []
                    for operation in OPERATIONS:
                        results += session.run(
                            _comparison(left, subjects, operation, batch, sizes, yardstick)
                        )
                    _show(session, results)
    _show_summary(session, sizes)
    session.show_targets()
    left.show()
    session.finish()


def _build(
    stack: contextlib.ExitStack, left: Left, kinds: Sequence[Kind], truth: Truth, sizes: Sizes
) -> list[tuple[Kind, Subject]]:
    """Those of the variants that take so many items and are found to be right."""
    room = 0.8 * machine.available_bytes()
    subjects = []
    for kind in kinds:
        what = f"{kind.name}, {truth.items:,} items"
        if kind.most is not None and truth.items > kind.most:
            left.add(what, kind.why)
            continue
        room -= kind.item_bytes * truth.items
        if room < 0:
            room += kind.item_bytes * truth.items
            left.add(what, f"it needs about {kind.item_bytes * truth.items / 1e9:.0f} GB of memory")
            continue
        with _excused(left, kind, what):
            subject = kind.build(truth)
            stack.callback(subject.close)
            try:
                _check(subject, truth, sizes)
            except Biased as error:
                if kind.ours or error.deviation > TOLERATED:
                    raise
                left.add(what, str(error), "inexact (*)")
                kind = dataclasses.replace(kind, parameters={**kind.parameters, "bias": str(error)})
            subjects.append((kind, subject))
    return subjects


@contextlib.contextmanager
def _excused(left: Left, kind: Kind, what: str) -> Iterator[None]:
    """What goes wrong with the variants of others leaves these out; with ours, it ends the run."""
    try:
        yield
    except Exception as error:
        if not kind.ours:
            known = isinstance(error, (Incorrect, PeerFailed))
            left.add(what, str(error) if known else f"{type(error).__name__}: {error}")
        elif isinstance(error, Incorrect):
            raise Incorrect(f"{what}: {error}") from error
        else:
            raise


def _check(subject: Subject, truth: Truth, sizes: Sizes) -> None:
    # Those that go through all items at each draw draw once.
    batches = (sizes.draws,) if isinstance(subject, (Multinomial, CumsumNumpy)) else sizes.batches
    truth.check(
        subject,
        lambda count: draw_many(subject, batches, count),
        lambda items, values: subject.update(subject.chosen(items), subject.values(values)),
        sizes.draws,
    )


def _comparison(
    left: Left,
    subjects: Sequence[tuple[Kind, Subject]],
    operation: str,
    batch: int,
    sizes: Sizes,
    yardstick: str,
) -> Comparison:
    items = subjects[0][1].items
    label = f"{operation}, {items:,} items, batch {batch}"
    variants = []
    for kind, subject in subjects:
        with _excused(left, kind, f"{kind.name}, {label}"):
            variant = _variant(kind, subject, operation, batch, sizes)
            variant.check()  # a wrong one is left out here; `Session.run` would end the run
            variants.append(variant)
    return Comparison(
        experiment="select",
        workload=operation,
        label=label,
        variants=variants,
        yardstick=yardstick,
        parameters={"items": items, "batch": batch, "operation": operation},
        unit="rows",
    )


def _variant(kind: Kind, subject: Subject, operation: str, batch: int, sizes: Sizes) -> Variant:
    timed = _timed(subject)
    once = [timed(operation, batch, 1)]
    while len(once) < 4 and sum(once) < 10 * sizes.seconds:  # a single one may have been disturbed
        once.append(timed(operation, batch, 1))
    batches = max(1, min(512, round(sizes.seconds / max(min(once), 1e-9))))

    def check() -> None:
        found = subject.found(subject.draw(batch))
        check_draws(*found, subject.items)
        if len(found[0]) != batch:
            raise Incorrect(f"{len(found[0])} items were drawn instead of {batch}")

    return Variant(
        kind.name,
        lambda: timed(operation, batch, batches),
        check,
        batch,
        batches,
        kind.parameters,
        limit=kind.limit.get(batch) if operation == "cycle" else None,
    )


def _timed(subject: Subject) -> Callable[[str, int, int], float]:
    own = getattr(subject, "measure", None)
    if own is not None:  # in another process, or on a device's own clock
        return own  # type: ignore[no-any-return]
    random = np.random.default_rng(SEED)
    return lambda operation, batch, batches: measure(subject, operation, batch, batches, random)


# ---------------------------------------------------------------- showing


def _show(session: Session, results: Sequence[Result]) -> None:
    """A table for one number of items and one batch size."""
    comparison = results[0].comparison
    parameters = comparison.parameters
    table = grid(f"{parameters['items']:,} items, batch {parameters['batch']}: µs")
    table.add_column("variant", no_wrap=True)
    for head in (*OPERATIONS, "p10 – p90 of the cycle", f"cycle ÷ {comparison.yardstick}"):
        table.add_column(head, justify="right")
    for name in dict.fromkeys(r.variant.name for r in results if r.comparison.workload == "cycle"):
        mine = {r.comparison.workload: r for r in results if r.variant.name == name}
        low, _, high = (value * 1e6 for value in quantiles(mine["cycle"].seconds).values())
        table.add_row(
            _starred(name, mine["cycle"]),
            *(
                _micro(float(np.median(mine[operation].seconds)) * 1e6) if operation in mine else "–"
                for operation in OPERATIONS
            ),
            f"{_micro(low)} – {_micro(high)}",
            f"{1 / mine['cycle'].ratio(comparison.yardstick):.2f}",
        )
    session.console.print(table)


def _show_summary(session: Session, sizes: Sizes) -> None:
    """The cycle against the number of items, for the batch size that is nearest to 1024."""
    batch = min(sizes.batches, key=lambda count: abs(count - 1024))
    cycles = [
        result
        for result in session.results
        if result.comparison.workload == "cycle" and result.comparison.parameters["batch"] == batch
    ]
    if not cycles:
        return
    counts = sorted({result.comparison.parameters["items"] for result in cycles})
    yardstick = cycles[0].comparison.yardstick
    table = grid(f"Cycle of a batch of {batch}: µs (÷ {yardstick})")
    table.add_column("variant", no_wrap=True)
    for count in counts:
        table.add_column(f"{count:,}", justify="right")
    for name in dict.fromkeys(result.variant.name for result in cycles):
        mine = {r.comparison.parameters["items"]: r for r in cycles if r.variant.name == name}
        cells = [
            f"{_micro(float(np.median(mine[count].seconds)) * 1e6)} ({1 / mine[count].ratio(yardstick):.2f})"
            if count in mine
            else "–"
            for count in counts
        ]
        table.add_row(_starred(name, *mine.values()), *cells)
    session.console.print(table)


def _starred(name: str, *results: Result) -> str:
    return escape(name) + (" *" if any("bias" in result.variant.parameters for result in results) else "")


def _micro(value: float) -> str:
    return f"{value:,.1f}" if value < 100 else f"{value:,.0f}"
