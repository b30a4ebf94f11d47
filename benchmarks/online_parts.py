"""Two parts of `benchmarks.online`: adding, and setting priorities.

An item of adding is a trajectory or a step; its seconds are the window of a measurement divided by what all writers of
the variant have added in it. So rates are totals over all writers.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

import gear_loader as gear
from benchmarks.harness import Comparison, Incorrect, Session, Variant
from benchmarks.online_subjects import Crew, Group, TableCache, specify
from benchmarks.peers import select_peers
from benchmarks.peers.environments import start
from benchmarks.peers.online_peers import PEERS, item_of
from benchmarks.peers.process import PeerFailed
from benchmarks.peers.select_peers import ALPHA, BETA, Subject
from benchmarks.select_subjects import (
    Biased,
    DatasetSubject,
    Peer,
    TreeSubject,
    Truth,
    draw_many,
)
from benchmarks.workloads import Workload

__all__ = ["GOALS", "SHARE_OF_MEMCPY", "LeftOut", "Setting", "inserting", "measured", "prioritizing"]

GOALS = {"whole": 40_000, "steps": 100_000, "update": 10_000_000}
"""Items a second that one process should reach."""
SHARE_OF_MEMCPY = 0.7
"""Of batches, in one process."""
UPDATE = 1024
LeftOut = Callable[[str, str], None]


@dataclasses.dataclass(frozen=True)
class Setting:
    """What is measured.

    Attributes:
        workload: what is added, and how much a table holds of it.
        block_steps: of tables.
        modes: of `online_peers.MODES`.
        writers: how many at a time when adding. readers_writers: while reading.
        batch: trajectories of a call of `extend`.
        rows: of a batch that is read.
        items: of tables whose priorities are set.
        window: seconds of a measurement.
        seed: of everything.
    """

    workload: Workload
    block_steps: int = 100
    modes: tuple[str, ...] = ("whole", "batches", "steps", "chunks 10", "chunks 50")
    writers: tuple[int, ...] = (1, 2, 4, 8)
    readers_writers: tuple[int, ...] = (0, 1, 2)
    batch: int = 64
    rows: int = 256
    items: tuple[int, ...] = (10**5, 10**6)
    window: float = 0.4
    seed: int = 3

    @property
    def spec(self) -> dict[str, Any]:
        return specify(self.workload, batch=self.batch, seed=self.seed)

    @property
    def step_bytes(self) -> int:
        return sum(column.step_bytes for column in self.workload.schema.values())


def measured(session: Session, left: LeftOut, comparison: Comparison, mine: set[str]) -> None:
    """Check and measure the variants; one of others that fails is left out, and the rest measured again."""
    variants = list(comparison.variants)
    for variant in variants[:]:
        try:
            variant.check()  # a wrong one is left out here; `Session.run` would end the run
        except (Incorrect, PeerFailed) as error:
            if variant.name in mine:
                raise Incorrect(f"{variant.name}, {comparison.label}: {error}") from error
            left(f"{variant.name}, {comparison.label}", str(error))
            variants.remove(variant)
    while True:
        failed: list[Variant] = []
        names = {variant.name for variant in variants}
        tried = [_watched(variant, failed, names) for variant in variants]
        references = [name for name in comparison.references if name in names]
        try:
            session.run(dataclasses.replace(comparison, variants=tried, references=references))
            return
        except PeerFailed as error:
            if not failed or failed[0].name in mine:
                raise
            left(f"{failed[0].name}, {comparison.label}", str(error))
            variants = [variant for variant in variants if variant.name != failed[0].name]


def _watched(variant: Variant, failed: list[Variant], names: set[str]) -> Variant:
    """The same, already checked, that is noted when it fails, with the targets relative to what there is."""

    def measure() -> float:
        try:
            return variant.measure()
        except PeerFailed:
            failed.append(variant)
            raise

    targets = {name: target for name, target in variant.targets.items() if name in names}
    return dataclasses.replace(variant, measure=measure, check=lambda: None, targets=targets)


# ---------------------------------------------------------------- adding


def inserting(
    session: Session,
    left: LeftOut,
    setting: Setting,
    crews: Mapping[str, Crew],
    shelf: TableCache,
    called: Callable[[Comparison], Comparison] = lambda comparison: comparison,
) -> Iterator[tuple[str, int]]:
    """Adding in every mode by so many writers; yields what has been measured.

    Args:
        crews: ours, memcpy, torch and the peers there are.
        called: gives a comparison other names, where it belongs to another experiment.
    """
    with contextlib.ExitStack() as stack:
        table, target = (
            stack.enter_context(shelf.table(setting.workload, block_steps=setting.block_steps))
            for _ in range(2)
        )
        for mode in setting.modes:
            for writers in setting.writers:
                label = f"{_LABELS.get(mode, mode)}, {writers} {'writer' if writers == 1 else 'writers'}"
                if session.deadline.passed(label):
                    continue
                comparison = _adding(left, setting, crews, mode, writers, label, table, target)
                with contextlib.closing(comparison) as prepared:
                    mine = {"memcpy", "torch", "ours"}
                    measured(session, left, called(prepared.comparison), mine)
                yield mode, writers


_LABELS = {
    "whole": "whole trajectories one by one",
    "batches": "whole trajectories in batches",
    "steps": "single steps",
    "chunks 10": "10 steps at a time",
    "chunks 50": "50 steps at a time",
}


@dataclasses.dataclass
class _Prepared:
    comparison: Comparison
    groups: list[Group]

    def close(self) -> None:
        for group in self.groups:
            group.close()


def _adding(
    left: LeftOut,
    setting: Setting,
    crews: Mapping[str, Crew],
    mode: str,
    writers: int,
    label: str,
    table: gear.Table,
    target: gear.Table,
) -> _Prepared:
    spec, item = setting.spec, item_of(mode)
    amount = setting.step_bytes * (1 if item == "step" else setting.workload.steps)
    variants, groups = [], []
    for name, crew in crews.items():
        kind = PEERS.get(name)
        alone = name == "torch" or (kind is not None and not kind.several)
        if (alone and writers > 1) or (kind is not None and mode not in kind.modes):
            continue  # what it has no call for; the module's docstring says so
        places = {"ours": {"table": table}, "memcpy": {"target": target}}.get(name, {})
        try:
            group = Group(crew, spec, mode, writers, **places)
        except PeerFailed as error:
            if kind is None:
                raise Incorrect(f"{name}, {label}: {error}") from error
            left(f"{name}, {label}", str(error))
            continue
        groups.append(group)
        goal = GOALS.get(mode) if name == "ours" and writers == 1 else None
        share = {"memcpy": SHARE_OF_MEMCPY} if name == "ours" and (mode, writers) == ("batches", 1) else {}
        about = crew.about
        variants.append(
            Variant(
                name,
                functools.partial(group.measure, setting.window),
                group.check,
                amount,
                1,
                {"peer": about} if kind is not None else {},
                targets=share,
                limit=None if goal is None else 1 / goal,
            )
        )
    comparison = Comparison(
        experiment="online",
        workload=mode,
        label=label,
        variants=variants,
        yardstick="memcpy",
        parameters={
            "writers": writers,
            "item": item,
            "window": setting.window,
            "trajectories": setting.workload.trajectories,
            "steps": setting.workload.steps,
            "block_steps": setting.block_steps,
            "batch": spec["batch"] if mode == "batches" else None,
        },
    )
    return _Prepared(comparison, groups)


# ---------------------------------------------------------------- priorities


class _Assign(Subject):
    """The yardstick: numpy's `leaves[items] = values`, and nothing else."""

    def __init__(self, truth: Truth) -> None:
        self.items = truth.items
        self._leaves = truth.priorities.copy()

    def update(self, drawn: Any, values: Any) -> None:
        self._leaves[drawn] = values

    def chosen(self, items: np.ndarray) -> Any:
        return items

    def check(self) -> None:
        """Raise `Incorrect` unless it assigns."""
        items = np.arange(0, self.items, 7)
        self.update(self.chosen(items), items.astype(np.float32))
        if not np.array_equal(self._leaves[items], items.astype(np.float32)):
            raise Incorrect("the values are not those that were assigned")


class _Updates(DatasetSubject):
    """`ReplayDataset.update_priority` as it is used: weights relative to the batch, which is the default."""

    def __init__(self, truth: Truth) -> None:
        super().__init__(truth)
        self._dataset = gear.ReplayDataset(
            self._table,
            batch_size=UPDATE,
            windows=gear.Window(1),
            anchor="first",
            selector=gear.Prioritized(alpha=ALPHA, beta=BETA),
            device="cpu",
            prefetch=0,
        )


_UPDATERS = {"TorchRL": "TorchRL sampler", "cpprb": "cpprb"}
ASSIGN = "numpy assignment"


def prioritizing(session: Session, left: LeftOut, setting: Setting, pythons: Sequence[Path]) -> Iterator[int]:
    """New priorities for 1,024 of N trajectories of a single step; yields every N that has been measured."""
    for items in setting.items:
        label = f"new priorities for {UPDATE:,} of {items:,}"
        if session.deadline.passed(label):
            continue
        truth = Truth(items, setting.seed)
        kinds: dict[str, Callable[[], Subject]] = {
            ASSIGN: functools.partial(_Assign, truth),
            "ours": functools.partial(_Updates, truth),
            "ours, the tree alone": functools.partial(TreeSubject, truth),
        }
        mine = set(kinds)
        with contextlib.ExitStack() as stack:
            for name, variant in _UPDATERS.items():
                environment = select_peers.PEERS[variant].environment
                with contextlib.suppress(PeerFailed):  # that it is missing has been said
                    process = start(pythons, select_peers.__file__, variant, 1, environment=environment)
                    stack.callback(process.close)
                    kinds[name] = functools.partial(Peer, process, variant, truth)
            variants = []
            for name, build in kinds.items():
                try:
                    subject = build()
                    stack.callback(subject.close)
                    variants.append(_updating(left, setting, truth, name, subject, label))
                except (Incorrect, PeerFailed) as error:
                    if name in mine:
                        raise Incorrect(f"{name}, {label}: {error}") from error
                    left(f"{name}, {label}", str(error))
            comparison = Comparison(
                experiment="online",
                workload="update",
                label=label,
                variants=variants,
                yardstick=ASSIGN,
                parameters={"items": items, "batch": UPDATE, "item": "priority"},
                unit="rows",
            )
            measured(session, left, comparison, mine)
        yield items


def _updating(
    left: LeftOut, setting: Setting, truth: Truth, name: str, subject: Subject, label: str
) -> Variant:
    def update(items: np.ndarray, values: np.ndarray) -> None:
        subject.update(subject.chosen(items), subject.values(values))

    if isinstance(subject, _Assign):
        subject.check()
    else:
        try:
            truth.check(subject, lambda count: draw_many(subject, (256,), count), update, 1 << 15)
        except Biased as error:
            if not isinstance(subject, Peer):
                raise
            left(f"{name}, {label}", f"inexact: {error}")
    random = np.random.default_rng(setting.seed)

    def measure(batches: int) -> float:
        own = getattr(subject, "measure", None)
        if own is not None:
            return float(own("update", UPDATE, batches))
        return select_peers.measure(subject, "update", UPDATE, batches, random)

    once = min(measure(4) for _ in range(3)) / 4
    batches = max(4, min(512, round(setting.window / 8 / once)))
    return Variant(
        name,
        functools.partial(measure, batches),
        lambda: None,  # done above, once: it takes long
        UPDATE,
        batches,
        limit=UPDATE / GOALS["update"] if name == "ours" else None,
    )
