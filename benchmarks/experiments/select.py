"""``python -m benchmarks select``: drawing by priority and setting new priorities, against the number of items.

Three operations: draw a batch with replacement; update a batch of items with new priorities (uniformly random items);
and the cycle, which is what training does: draw a batch, then update what was drawn. The yardstick on the CPU is our
`PriorityTree` with sums only, as weights relative to the batch need them; with extremes it also keeps minima and
maxima, for weights relative to the table and for TopK. Peers run in processes of their own, which also time them.

All start with the same priorities, uniform in (0, 1]. Those with weights raise them to alpha = 0.6, the others take
them as they are. Before anything is timed, the draws of each are compared with the priorities by frequency, at the
start and after an update. A variant of others that is off by a little (no bin of items by more than a quarter) is timed
all the same and marked by a star; its rows say by how much, in `parameters`: `bias`. On a GPU: see `select_cuda`.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Iterator, Sequence
from typing import Annotated, Any

import numpy as np
import torch
import typer

from benchmarks import machine
from benchmarks.experiments import select_cuda
from benchmarks.experiments.select_subjects import (
    DATASET_MOST,
    MULTINOMIAL_MOST,
    Biased,
    CumsumNumpy,
    CumsumTorch,
    DatasetSubject,
    ExtremesSubject,
    Kind,
    Multinomial,
    Peer,
    TreeSubject,
    Truth,
    check_draws,
    draw_many,
)
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.options import Device, numbers, option
from benchmarks.options import command as as_command
from benchmarks.peers.catalog import peers_of, started
from benchmarks.peers.select import ALPHA, BETA, OPERATIONS, Subject, measure

SEED = 3
YARDSTICK = "ours, tree"
TOLERATED = 0.25
"""By how much a variant of others may be off in a bin of items, to be timed."""


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All pairs of items and batches; about the seconds of a measurement; items drawn to check a variant."""

    items: tuple[int, ...]
    batches: tuple[int, ...]
    seconds: float = 0.01
    draws: int = 1 << 16


Items = option(str, "Numbers of items, for example 1e4,1e6. Up to 1e8 by default.")


@as_command("select", repeats=(3, 9), device=Device.auto)
def command(
    session: Session,
    sizes: Items = None,
    batches: Annotated[str | None, typer.Option(help="Batch sizes: 32,256,1024,4096 by default.")] = None,
) -> None:
    """Drawing by priority and updating, against the number of items and the batch size."""
    cuda, quick = session.cuda, session.quick
    usual = (10**6, 10**7, 10**8) if cuda else (10**4, 10**5, 10**6, 10**7, 10**8)
    chosen = Sizes(
        numbers(sizes, "--sizes", 64, 2**31 - 1) or ((10**4, 10**5) if quick else usual),
        numbers(batches, "--batches", 1, 2**31 - 1) or ((32, 256) if quick else (32, 256, 1024, 4096)),
        seconds=0.002 if quick else 0.01,
        draws=1 << (14 if quick else 16),
    )
    session.configure(items=chosen.items, batches=chosen.batches, seed=SEED, alpha=ALPHA, beta=BETA)
    torch.manual_seed(SEED)
    if cuda:
        measured(session, select_cuda.kinds(), chosen, yardstick=select_cuda.YARDSTICK)
        return
    with contextlib.ExitStack() as stack:
        measured(session, [*cpu_kinds(), *_peer_kinds(session, stack)], chosen, yardstick=YARDSTICK)


def cpu_kinds() -> list[Kind]:
    mine: list[tuple[str, Any, dict[str, Any]]] = [
        (YARDSTICK, TreeSubject, {"ours": True}),
        ("ours, with extremes", ExtremesSubject, {"ours": True}),
        ("ours, dataset", DatasetSubject, {"ours": True, **DATASET_MOST}),
        ("torch.multinomial", Multinomial, MULTINOMIAL_MOST),
        ("cumsum, torch", CumsumTorch, {}),
        ("cumsum, numpy", CumsumNumpy, {}),
    ]
    return [Kind(name, made, made.item_bytes, **options) for name, made, options in mine]


def _peer_kinds(session: Session, stack: contextlib.ExitStack) -> Iterator[Kind]:
    """The peers that one of the interpreters has; why the others are missing is noted."""
    for name, peer in peers_of("select").items():
        launch = functools.partial(started, session.pythons, "select", name, session.threads)
        if (process := session.attempt(name, launch)) is not None:
            stack.callback(process.close)
            build = functools.partial(Peer, process, name)
            yield Kind(name, build, peer.item_bytes, parameters={"peer": process.about})


def measured(session: Session, kinds: Sequence[Kind], sizes: Sizes, *, yardstick: str) -> None:
    """Build, check and measure all variants, the smallest number of items first, and show the results."""
    with session.progress("select", len(sizes.items) * len(sizes.batches) * len(OPERATIONS)):
        for items in sizes.items:
            if session.late(f"{items:,} items"):
                continue
            truth = Truth(items, SEED)
            with contextlib.ExitStack() as stack:
                subjects = _build(session, stack, kinds, truth, sizes)
                if yardstick not in (kind.name for kind, _ in subjects):
                    continue
                del truth
                for batch in sizes.batches:
                    if session.late(f"{items:,} items, batch {batch}"):
                        continue
                    for operation in OPERATIONS:
                        _measured(session, subjects, operation, batch, sizes, yardstick)
    batch = min(sizes.batches, key=lambda count: abs(count - 1024))
    session.show_summary("items", batch=batch, operation="cycle")


def _build(
    session: Session, stack: contextlib.ExitStack, kinds: Sequence[Kind], truth: Truth, sizes: Sizes
) -> list[tuple[Kind, Subject]]:
    """Those of the variants that take so many items and are found to be right."""

    def build(kind: Kind, what: str) -> tuple[Kind, Subject]:
        subject = kind.build(truth)
        stack.callback(subject.close)
        try:
            _check(subject, truth, sizes)
        except Biased as error:
            if kind.ours or error.deviation > TOLERATED:
                raise
            session.leave(what, str(error), "inexact (*)")
            kind = dataclasses.replace(kind, parameters={**kind.parameters, "bias": str(error)})
        return kind, subject

    room = 0.8 * machine.available_bytes()
    subjects = []
    for kind in kinds:
        what, needed = f"{kind.name}, {truth.items:,} items", kind.item_bytes * truth.items
        if kind.most is not None and truth.items > kind.most:
            session.leave(what, kind.why)
        elif needed > room:
            session.leave(what, f"it needs about {needed / 1e9:.0f} GB of memory")
        else:
            room -= needed
            subjects.append(session.attempt(what, lambda k=kind, w=what: build(k, w), required=kind.ours))
    return [found for found in subjects if found is not None]


def _check(subject: Subject, truth: Truth, sizes: Sizes) -> None:
    # Those that go through all items at each draw draw once.
    batches = (sizes.draws,) if isinstance(subject, (Multinomial, CumsumNumpy)) else sizes.batches
    truth.check(
        subject,
        lambda count: draw_many(subject, batches, count),
        lambda items, values: subject.update(subject.chosen(items), subject.values(values)),
        sizes.draws,
    )


def _measured(
    session: Session,
    subjects: Sequence[tuple[Kind, Subject]],
    operation: str,
    batch: int,
    sizes: Sizes,
    yardstick: str,
) -> None:
    items = subjects[0][1].items
    label = f"{operation}, {items:,} items, batch {batch}"
    variants = []
    for kind, subject in subjects:
        made = functools.partial(_variant, kind, subject, operation, batch, sizes)
        variants.append(session.attempt(f"{kind.name}, {label}", made, required=kind.ours))
    variants = [variant for variant in variants if variant is not None]
    parameters = {"items": items, "batch": batch, "operation": operation}
    session.compare(operation, label, variants, yardstick, parameters, unit="rows")


def _variant(kind: Kind, subject: Subject, operation: str, batch: int, sizes: Sizes) -> Variant:
    random = np.random.default_rng(SEED)
    # Some are timed in another process, or on a device's own clock.
    timed = getattr(subject, "measure", lambda *told: measure(subject, *told, random))
    once = [timed(operation, batch, 1)]
    while len(once) < 4 and sum(once) < 10 * sizes.seconds:  # a single one may have been disturbed
        once.append(timed(operation, batch, 1))
    batches = max(1, min(512, round(sizes.seconds / max(min(once), 1e-9))))

    def check() -> None:
        found = subject.found(subject.draw(batch))
        check_draws(*found, subject.items)
        if len(found[0]) != batch:
            raise Incorrect(f"{len(found[0])} items were drawn instead of {batch}")

    limit = kind.limit.get(batch) if operation == "cycle" else None
    more: dict[str, Any] = {"limit": limit, "required": kind.ours}
    return Variant(
        kind.name, lambda: timed(operation, batch, batches), check, batch, batches, kind.parameters, **more
    )
