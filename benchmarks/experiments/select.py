"""``python -m benchmarks select``: drawing by priority and setting new priorities, against the number of items.

Three operations: draw a batch with replacement; update a batch of items with new priorities (uniformly random items);
and the cycle, which is what training does: draw a batch, then update what was drawn. The yardstick on the CPU is our
`PriorityTree` with sums only, as weights relative to the batch need them; with extremes it also keeps minima and
maxima, for weights relative to the table and for TopK. Peers run in processes of their own, which also time them.

All start with the same priorities, uniform in (0, 1]. Those with weights raise them to alpha = 0.6, the others take
them as they are. Before anything is timed, the draws of each are compared with the priorities by frequency, at the
start and after an update. A variant of others that is off by a little (no bin of items by more than a quarter) is timed
all the same and marked by a star; its rows say by how much, in `parameters`: `bias`.
With ``--device cuda`` selection is where the training is. The yardstick is `priority.draw` and `priority.update` on a
`SumTree`, captured many times over in one CUDA graph, between CUDA events: what the GPU needs. The eager ones launch
them one after another, so what the host needs is in it: they are timed by the clock between two moments at which the
GPU is idle, over hundreds of operations. The counter of the random numbers lies on the GPU and is counted up by an
addition in place, within the graph too.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Annotated, Any

import numpy as np
import torch

from benchmarks import machine
from benchmarks.engine import CudaEngine, Engine, Launch
from benchmarks.harness import Incorrect, Session, Variant
from benchmarks.options import Device, described, experiment, numbers
from benchmarks.peers.catalog import peers_of, started
from benchmarks.peers.select import ALPHA, BETA, OPERATIONS, Subject, weighed
from benchmarks.selection import (
    Biased,
    CumsumTorch,
    DatasetSubject,
    Multinomial,
    OnDevice,
    Peer,
    TreeSubject,
    Truth,
    check_draws,
    timed_by,
)
from gear_loader.kernels import priority
from gear_loader.kernels.sum_tree import BAD_POSITION, EMPTY_DRAWS, NOWHERE, SumTree

SEED = 3
YARDSTICK, CUDA_YARDSTICK = "ours, tree", "ours, graph"
TOLERATED = 0.25
"""By how much a variant of others may be off in a bin of items, to be timed."""
LIMITS = {1024: 40e-6}
"""Seconds of a cycle on a GPU, by batch."""


@dataclasses.dataclass(frozen=True)
class Kind:
    """A variant before it is built for a number of items: `build` takes their `Truth`.

    item_bytes: memory that it needs about, for each item. most, why: items that it takes at most, for which reason.
    ours: whether a wrong result ends the run; others are left out. limit: batch -> seconds of a cycle, at most.
    """

    name: str
    build: Any
    item_bytes: float
    most: int | None = None
    why: str = ""
    ours: bool = False
    parameters: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    limit: Mapping[int, float] = dataclasses.field(default_factory=dict)


@dataclasses.dataclass(frozen=True)
class Sizes:
    """All pairs of items and batches; about the seconds of a measurement; items drawn to check a variant."""

    items: tuple[int, ...]
    batches: tuple[int, ...]
    seconds: float = 0.01
    draws: int = 1 << 16


@experiment("select", repeats=(3, 9), device=Device.auto)
def command(
    session: Session,
    sizes: Annotated[
        str | None, described("Numbers of items, for example 1e4,1e6. Up to 1e8 by default.")
    ] = None,
    batches: Annotated[str | None, described("Batch sizes: 32,256,1024,4096 by default.")] = None,
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
    with contextlib.ExitStack() as stack:
        kinds = cuda_kinds(CudaEngine()) if cuda else [*cpu_kinds(), *_peer_kinds(session, stack)]
        measured(session, kinds, chosen)


_MULTINOMIAL: dict[str, Any] = {"most": 1 << 24, "why": "it refuses more than 2**24 items"}
_DATASET: dict[str, Any] = {"most": 10**6, "why": "a table of as many trajectories takes minutes to fill"}


def cpu_kinds() -> list[Kind]:
    return [
        Kind(YARDSTICK, TreeSubject, TreeSubject.item_bytes, ours=True),
        Kind(
            "ours, with extremes",
            functools.partial(TreeSubject, extremes=True),
            TreeSubject.item_bytes,
            ours=True,
        ),
        Kind("ours, dataset", DatasetSubject, DatasetSubject.item_bytes, ours=True, **_DATASET),
        Kind("torch.multinomial", Multinomial, Multinomial.item_bytes, **_MULTINOMIAL),
        Kind("cumsum, torch", CumsumTorch, CumsumTorch.item_bytes),
    ]


def _peer_kinds(session: Session, stack: contextlib.ExitStack) -> Iterator[Kind]:
    """The peers that there are; why the others are missing is noted."""
    peers = peers_of("select")
    ways = {
        name: functools.partial(started, session.peers, "select", name, session.threads) for name in peers
    }
    for name, process in stack.enter_context(session.processes(ways)).items():
        build = functools.partial(Peer, process, name)
        yield Kind(name, build, peers[name].item_bytes, parameters={"peer": process.about})


def cuda_kinds(engine: Engine, launches: int = 64) -> list[Kind]:
    """The variants on a GPU; their memory is that of the host, which they are built from."""
    tree, device = functools.partial(DeviceTree, engine=engine), engine.device
    cumsum = functools.partial(CumsumTorch, device=device)
    graph = lambda made: lambda truth: Graph(engine, made(truth), launches)  # noqa: E731
    dataset, multinomial = (functools.partial(kind, device=device) for kind in (DatasetSubject, Multinomial))
    return [
        Kind(CUDA_YARDSTICK, graph(tree), 8, ours=True, limit=LIMITS),
        Kind("ours, eager", tree, 8, ours=True, limit=LIMITS),
        Kind("ours, dataset", dataset, DatasetSubject.item_bytes, ours=True, **_DATASET),
        Kind("torch.multinomial", multinomial, 8, **_MULTINOMIAL),
        Kind("cumsum, graph", graph(cumsum), 8),
        Kind("cumsum, eager", cumsum, 8),
    ]


def measured(session: Session, kinds: Sequence[Kind], sizes: Sizes) -> None:
    """Build, check and measure all variants, the smallest number of items first; the first one is the yardstick."""
    for items in sizes.items:
        if session.late(f"{items:,} items"):
            continue
        with contextlib.ExitStack() as stack:
            subjects = _build(session, stack, kinds, Truth(items, SEED), sizes)
            if kinds[0] not in [kind for kind, _ in subjects]:
                continue
            name = lambda pair: f"{pair[1]}, {items:,} items, batch {pair[0]}"  # noqa: B023, E731
            for batch, operation in session.each(
                "select", [*itertools.product(sizes.batches, OPERATIONS)], name
            ):
                _compare(session, subjects, operation, batch, sizes, name((batch, operation)))


def _build(
    session: Session, stack: contextlib.ExitStack, kinds: Sequence[Kind], truth: Truth, sizes: Sizes
) -> list[tuple[Kind, Subject]]:
    """Those of the variants that take so many items and are found to be right."""

    def build(kind: Kind, what: str) -> tuple[Kind, Subject]:
        subject = kind.build(truth)
        stack.callback(subject.close)
        try:
            check(subject, truth, sizes)
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
            made = functools.partial(build, kind, what)
            subjects.append(session.attempt(what, made, required=kind.ours))
    return [found for found in subjects if found is not None]


def check(subject: Subject, truth: Truth, sizes: Sizes) -> None:
    """Raise `Incorrect` unless it draws what it should; those that go through all items at each draw draw once."""
    truth.check(subject, (sizes.draws,) if isinstance(subject, Multinomial) else sizes.batches, sizes.draws)


def _compare(
    session: Session,
    subjects: Sequence[tuple[Kind, Subject]],
    operation: str,
    batch: int,
    sizes: Sizes,
    label: str,
) -> None:
    variants = []
    for kind, subject in subjects:
        made = functools.partial(_variant, kind, subject, operation, batch, sizes)
        variants.append(session.attempt(f"{kind.name}, {label}", made, required=kind.ours))
    found = [variant for variant in variants if variant is not None]
    parameters = {"items": subjects[0][1].items, "batch": batch, "operation": operation}
    session.compare(operation, label, found, subjects[0][0].name, parameters, unit="rows")


def _variant(kind: Kind, subject: Subject, operation: str, batch: int, sizes: Sizes) -> Variant:
    timed = timed_by(subject, SEED)
    once = [timed(operation, batch, 1)]
    while len(once) < 4 and sum(once) < 10 * sizes.seconds:  # a single one may have been disturbed
        once.append(timed(operation, batch, 1))
    batches = max(1, min(512, round(sizes.seconds / max(min(once), 1e-9))))

    def drawn() -> None:
        found = subject.found(subject.draw(batch))
        check_draws(*found, subject.items)
        if len(found[0]) != batch:
            raise Incorrect(f"{len(found[0])} items were drawn instead of {batch}")

    measure = functools.partial(timed, operation, batch, batches)
    variant = Variant(kind.name, measure, drawn, batch, batches, kind.parameters, required=kind.ours)
    variant.limit = kind.limit.get(batch) if operation == "cycle" else None
    return variant


class DeviceTree(OnDevice):
    """`priority.draw` and `priority.update`, which raises to alpha, on a `SumTree`."""

    power = ALPHA

    def __init__(self, truth: Truth, engine: Engine) -> None:
        super().__init__(truth, engine.device)
        self._tree = SumTree(truth.items, self.device)
        self._tree.leaves[: truth.items] = self.values(truth.priorities).pow(ALPHA)
        priority.build(self._tree)
        self._random = torch.tensor([SEED, 0], device=self.device)
        self._step = self._random[1:]
        self._drawn: dict[int, tuple[torch.Tensor, ...]] = {}

    def draw(self, batch: int) -> Any:
        if batch not in self._drawn:
            made = (torch.empty(batch, dtype=d, device=self.device) for d in (torch.int64, torch.float32))
            self._drawn[batch] = tuple(made)
        self._step.add_(1)
        drawn = self._drawn[batch]
        priority.draw(self._tree, self._random, *drawn)
        return drawn

    def update(self, drawn: Any, values: Any) -> None:
        priority.update(self._tree, drawn[0], values, alpha=ALPHA)

    def leaves(self, items: torch.Tensor) -> torch.Tensor:
        return self._tree.leaves[items]

    def verify(self) -> None:
        """Raise `Incorrect` if something went wrong on the device."""
        status = self._tree.status.tolist()
        if status[BAD_POSITION] != NOWHERE or status[EMPTY_DRAWS]:
            raise Incorrect(f"the tree's status is {status}")


class Graph(Subject):
    """Many operations of a subject as one graph; before each replay all get new priorities, and updates new items.

    Checks by frequency draw eagerly; those of the graph are made when it is captured, for each operation and batch.
    """

    def __init__(self, engine: Engine, subject: Any, launches: int) -> None:
        self._engine, self._subject, self._launches = engine, subject, launches
        self.items, self.power = subject.items, subject.power
        for name in ("draw", "update", "found", "values", "chosen", "finish"):
            setattr(self, name, getattr(subject, name))
        self._random = np.random.default_rng(SEED)
        self._key: tuple[str, int] | None = None  # of the last graph alone: each keeps its memory

    def measure(self, operation: str, batch: int, batches: int) -> float:
        """Seconds for so many operations, from replays of the graph between events."""
        if self._key != (operation, batch):
            self._capture(operation, batch)
            self._verify(operation, batch)
        seconds, replays = 0.0, -(-batches // self._launches)
        for _ in range(replays):
            self._refresh()
            self._engine.synchronize()
            seconds += self._engine.timed(self._replay)
        return seconds / (replays * self._launches) * batches

    def _capture(self, operation: str, batch: int) -> None:
        self._key = self._replay = None
        device, shape = self._engine.device, (self._launches, batch)
        self._values = torch.empty(shape, dtype=torch.float32, device=device)
        self._chosen = torch.empty(shape, dtype=torch.int64, device=device)
        self._refresh()
        self._replay = self._engine.queue([self._launch(operation, batch, i) for i in range(self._launches)])
        self._key = (operation, batch)

    def _launch(self, operation: str, batch: int, i: int) -> Launch:
        values, chosen = self._values[i], self._chosen[i]

        def launch() -> None:
            self._last = (chosen, None) if operation == "update" else self._subject.draw(batch)
            if operation != "draw":
                self._subject.update(self._last, values)

        return launch

    def _refresh(self) -> None:
        self._values.uniform_().neg_().add_(1)  # in (0, 1]
        self._chosen.random_(0, self.items)

    def _verify(self, operation: str, batch: int) -> None:
        """Replay twice and see that the last operation did what it should, differently each time."""
        drawn = []
        for _ in range(2):
            self._refresh()
            self._replay()
            self._engine.synchronize()
            if isinstance(self._subject, DeviceTree):
                self._subject.verify()
            items = self._last[0].cpu().numpy().copy()
            drawn.append(items)
            if ((items < 0) | (items >= self.items)).any():
                raise Incorrect(f"the graph of {operation} drew items that do not exist")
            leaves = self._subject.leaves(self._last[0]).cpu().numpy()
            if operation == "draw":
                if not np.array_equal(leaves, self._last[1].cpu().numpy()):
                    raise Incorrect("the graph drew weights that are not those of its items")
                continue
            values = weighed(self._values[-1].cpu().numpy(), self.power)
            # Where an item comes several times, any of its values may have won (ours promises the last one, which
            # the tests of the kernel look at).
            unique, counts = np.unique(items, return_counts=True)
            once = np.isin(items, unique[counts == 1])
            if not np.allclose(leaves[once], values[once], rtol=1e-5):
                raise Incorrect(f"after the graph of {operation} items do not weigh what they were given")
        if batch >= 8 and self.items > batch and np.array_equal(*drawn):
            raise Incorrect(f"the graph of {operation} draws the same items at each replay")
