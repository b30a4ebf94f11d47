"""``python -m benchmarks online``: what a table takes while others read it: adding, new priorities, and both at once.

Adding goes on in a table that is full and evicts the oldest trajectories, in shared memory, by 1, 2, 4 and 8 processes
that attach to it by name; a tenth of its blocks is spare. Whole trajectories (W1: 42,000 bytes each) one by one or in
batches; single steps through a writer, made a trajectory every 100 steps; the same with several steps at a time. Rates
are totals over all writers. The yardstick, memcpy, copies as many bytes in one piece an item, by as many processes,
into shared memory; torch copies into tensors made before, in one process, with no index and no eviction. Reverb,
Writer is its older `Writer`, which knows no columns; it has no call for batches of trajectories, TorchRL and cpprb none
for several processes.

New priorities: 1,024 of N by `ReplayDataset.update_priority`, checked against generations, beside a plain numpy
assignment. Reading: batches of 256 whole trajectories by `ReplayDataset.sample` while writers add at full speed. All of
it: the same with a reader that adds up each batch, and a `SampleToInsertRatio`. Everything is checked before it is
timed: what was added is what is there, every row that is read under way is whole, and the table's counts agree.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import time
from collections.abc import Callable, Mapping
from typing import Annotated, Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.adding import Crew, Group, Setting, TableCache, crews_of, inserting, specify
from benchmarks.harness import Incorrect, Medians, Session, Variant
from benchmarks.options import described, experiment, numbers, some_of
from benchmarks.peers.catalog import started
from benchmarks.peers.online import MODES, trajectories_of
from benchmarks.peers.process import PeerFailed
from benchmarks.peers.select import ALPHA, BETA, Subject
from benchmarks.selection import Biased, DatasetSubject, Peer, TreeSubject, Truth, timed_by
from benchmarks.workloads import W1
from gear_loader.errors import RateLimitError
from gear_loader.storage.limiters import SampleToInsertRatio

PARTS = ("insert", "priorities", "read", "loop")
TRAJECTORIES = 6_000
RATIOS = (1, 8, 64)
"""Rows that are drawn for a trajectory, from more than the reader gets to fewer than it could read."""
UPDATE = 1024
UPDATES = 10_000_000
"""New priorities a second that ours should reach."""


@experiment("online", repeats=(2, 9))
def command(
    session: Session,
    parts: Annotated[str, described(f"Some of {','.join(PARTS)}.")] = ",".join(PARTS),
    writers: Annotated[str | None, described("Numbers of writers: 1,2,4,8 by default.")] = None,
    trajectories: Annotated[
        int | None, described(f"Of W1 in a table: {TRAJECTORIES:,} by default.", min=512)
    ] = None,
    block_steps: Annotated[int, described("Steps of a block.", min=1)] = 100,
    items: Annotated[str | None, described("Items whose priorities are set: 1e5,1e6 by default.")] = None,
    seconds: Annotated[float | None, described("Of a measurement: 0.4 by default.", min=0.01)] = None,
) -> None:
    """Adding, setting priorities, and reading while others write."""
    chosen, quick = some_of(parts, PARTS, "--parts"), session.quick
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
    told = {"writers": setting.writers, "trajectories": setting.workload.trajectories}
    told |= {"block_steps": block_steps, "seconds": setting.window, "seed": setting.seed}
    session.configure(writer_threads=1, **told)
    with crews_of(session, others="insert" in chosen) as (crews, tables):
        if "insert" in chosen:
            inserting(session, setting, crews, tables)
        if "priorities" in chosen:
            prioritizing(session, setting)
        if "read" in chosen:
            reading(session, setting, crews["ours"], tables)
        if "loop" in chosen:
            looping(session, setting, crews["ours"], tables)


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
        self._dataset = self._made(gear.Prioritized(alpha=ALPHA, beta=BETA), UPDATE)


_UPDATERS = {"TorchRL": "TorchRL sampler", "cpprb": "cpprb"}
ASSIGN = "numpy assignment"


def prioritizing(session: Session, setting: Setting) -> None:
    """New priorities for 1,024 of N trajectories of a single step."""
    for items in setting.items:
        label = f"new priorities for {UPDATE:,} of {items:,}"
        if session.late(label):
            continue
        truth, variants = Truth(items, setting.seed), []
        own: dict[str, Any] = {ASSIGN: _Assign, "ours": _Updates, "ours, the tree alone": TreeSubject}
        kinds: dict[str, Callable[[], Subject]] = {n: functools.partial(k, truth) for n, k in own.items()}
        with contextlib.ExitStack() as stack:
            for name, variant in _UPDATERS.items():
                with contextlib.suppress(PeerFailed):  # that it is missing has been said
                    process = started(session.peers, "select", variant)
                    stack.callback(process.close)
                    kinds[name] = functools.partial(Peer, process, variant, truth)
            for name, build in kinds.items():
                made = functools.partial(_updating, session, setting, truth, name, build, label, stack)
                if (found := session.attempt(f"{name}, {label}", made, required=name in own)) is not None:
                    variants.append(dataclasses.replace(found, required=name in own))
            parameters = {"items": items, "batch": UPDATE, "item": "priority"}
            session.compare("update", label, variants, ASSIGN, parameters, unit="rows")


def _updating(
    session: Session,
    setting: Setting,
    truth: Truth,
    name: str,
    build: Callable[[], Subject],
    label: str,
    stack: contextlib.ExitStack,
) -> Variant:
    """Built and checked, which takes long: so only once."""
    subject = build()
    stack.callback(subject.close)
    if isinstance(subject, _Assign):
        subject.check()
    else:
        try:
            truth.check(subject, (256,), 1 << 15)
        except Biased as error:
            if not isinstance(subject, Peer):
                raise
            session.leave(f"{name}, {label}", f"inexact: {error}")
    timed = timed_by(subject, setting.seed)
    measure = functools.partial(timed, "update", UPDATE)
    once = min(measure(4) for _ in range(3)) / 4
    batches = max(4, min(512, round(setting.window / 8 / once)))
    limit = UPDATE / UPDATES if name == "ours" else None
    return Variant(name, functools.partial(measure, batches), lambda: None, UPDATE, batches, limit=limit)


class Reader:
    """`ReplayDataset.sample` of whole trajectories, of what so many writers of `spec` write into a table."""

    def __init__(
        self, table: gear.Table, spec: Mapping[str, Any], selector: Any, *, batch: int, writers: int
    ) -> None:
        self.batch = batch
        self.dataset = gear.ReplayDataset(
            table,
            batch_size=batch,
            windows=gear.Window(length=spec["steps"]),
            draws=gear.Draws(anchor="first"),
            sampler=selector,
            seed=spec["seed"],
            device="cpu",
            prefetch=gear.Prefetch(0, copy=False),
        )
        source, count = trajectories_of(spec), writers * spec["sources"]
        ((_, rows),) = source.stacked(count, 0, count)
        self._mark, self._steps = source.mark, spec["steps"]
        self._expected = {name: torch.from_numpy(values) for name, values in rows.items()}

    def read(self) -> Mapping[str, torch.Tensor]:
        return self.dataset.sample()

    def verify(self, batch: Mapping[str, torch.Tensor]) -> None:
        """Raise `Incorrect` if a row is torn, or none that was written."""
        marks = batch[self._mark][:, 0].long() // self._steps  # each step says which it is
        most = len(self._expected[self._mark])
        if int(marks.min()) < 0 or int(marks.max()) >= most:
            raise Incorrect("a row begins with what marks no trajectory")
        for name, values in self._expected.items():
            if not torch.equal(batch[name], values[marks]):
                wrong = (batch[name] != values[marks]).reshape(self.batch, -1).any(1)
                raise Incorrect(f"{name}: {int(wrong.sum())} of {self.batch} rows are torn or mixed up")

    def until(self, end: float, *, look: bool = False, patient: bool = False) -> int:
        """Read batches, at least try one, until a time of the monotonic clock; returns how many."""
        count = 0
        while True:
            with contextlib.suppress(*([RateLimitError] if patient else [])):
                batch = self.read()
                count += 1
                if look:
                    self.verify(batch)
                if patient:
                    for name in self._expected:
                        batch[name].numpy().sum()  # in one thread: torch's several would wait for their turns
            if time.monotonic() >= end:
                return count


def reading(session: Session, setting: Setting, crew: Crew, tables: TableCache) -> None:
    """`ReplayDataset.sample` while writers add at full speed."""
    selectors = {"uniform": gear.Uniform(), "prioritized": gear.Prioritized(ALPHA, BETA)}
    with tables.table(setting.workload, block_steps=setting.block_steps) as table:
        for name in session.each("reading", list(selectors), "reading while others write, {}".format):
            selector = selectors[name]
            variants = [_beside(setting, crew, table, selector, count) for count in setting.readers_writers]
            parameters = {"batch": setting.rows, "item": "batch", **setting.parameters()}
            title = f"reading while others write, {name}, batch {setting.rows}"
            session.compare(f"read, {name}", title, variants, variants[0].name, parameters)


def _beside(setting: Setting, crew: Crew, table: gear.Table, selector: Any, writers: int) -> Variant:
    spec = setting.spec
    most = max(1, *setting.readers_writers)
    fresh = Group(crew, spec, "whole", most, table=table)  # every process has its mapping paged in
    reader = Reader(table, spec, selector, batch=setting.rows, writers=most)
    seen = Medians()

    def group() -> Group | None:
        return Group(crew, spec, "whole", writers, table=table, fill=False) if writers else None

    def check() -> None:
        fresh.check()
        others = group()
        begin = time.monotonic() if others is None else others.start(0.3)
        reader.until(begin + 0.3, look=True)
        if others is not None:
            others.rate()
        table.check_valid()

    def measure() -> float:
        others = group()
        if others is None:
            begin = time.monotonic()
        else:
            alone = 1 / others.measure(setting.window / 2)
            begin = others.start(setting.window + 0.1) + 0.05  # they are at work before and after
        reader.read()
        time.sleep(max(0.0, begin - time.monotonic()))
        begin = time.monotonic()
        count = reader.until(begin + setting.window)
        seconds = (time.monotonic() - begin) / count
        if others is not None:
            seen.note(trajectories_per_s=others.rate(), trajectories_per_s_without_reader=alone)
        return seconds

    count = setting.rows * setting.workload.steps * setting.step_bytes
    name = f"{writers} {'writer' if writers == 1 else 'writers'}"
    return Variant(name, measure, check, count, 1, {"writers": writers}, extras=seen)


def looping(session: Session, setting: Setting, crew: Crew, tables: TableCache) -> None:
    """Two writers at full speed, and a reader that adds up each batch, with limits on how far one may run ahead."""
    label = f"2 writers and a reader, batch {setting.rows}"
    if session.late(label):
        return
    with contextlib.ExitStack() as stack:
        workload = setting.workload.of(max(setting.workload.trajectories // 3, 2 * setting.rows))
        spec, variants = specify(workload, batch=setting.batch, seed=setting.seed), []
        least, source = workload.trajectories // 4, trajectories_of(spec)
        for ratio in (None, *RATIOS):
            limiter = None
            if ratio is not None:
                limiter = SampleToInsertRatio(ratio, least, 4.0 * max(setting.rows, ratio))
            place = tables.table(workload, block_steps=setting.block_steps, limiter=limiter)
            table = stack.enter_context(place)
            # As many as there must be before anything is drawn, of the first writer's.
            for number in range(least):
                table.add(source.trajectory(number % spec["sources"]))
            variants.append(_loop(setting, spec, crew, table, ratio))
        parameters = {"batch": setting.rows, "writers": 2, "item": "batch", **setting.parameters(workload)}
        session.compare("loop", label, variants, variants[0].name, parameters)


def _loop(
    setting: Setting, spec: Mapping[str, Any], crew: Crew, table: gear.Table, ratio: int | None
) -> Variant:
    reader = Reader(table, spec, gear.Uniform(), batch=setting.rows, writers=2)
    seen = Medians()

    def turn(seconds: float, look: bool = False) -> float | None:
        group = Group(crew, spec, "whole", 2, table=table, fill=False)
        begin = group.start(seconds)
        time.sleep(max(0.0, begin - time.monotonic()))
        before, begin = table.stats(), time.monotonic()
        count = reader.until(begin + seconds, look=look, patient=True)
        after, seconds = table.stats(), time.monotonic() - begin
        group.rate()
        if not count:
            return None
        inserted, sampled = after.num_inserted - before.num_inserted, after.num_sampled - before.num_sampled
        seen.note(
            trajectories_per_s=inserted / seconds,
            rows_per_trajectory=sampled / max(inserted, 1),
            writers_waiting=(after.insert_wait - before.insert_wait) / seconds / 2,
            reader_waiting=(after.sample_wait - before.sample_wait) / seconds,
        )
        return seconds / count

    def measure() -> float:
        for longer in (1, 2, 4, 8):
            found = turn(longer * setting.window)
            if found is not None:
                return found
        raise Incorrect("no batch was read")

    def check() -> None:
        turn(0.5, look=True)
        turn(0.5, look=True)
        table.check_valid()
        stats = table.stats()
        balance = stats.num_inserted * (ratio or 0) - stats.num_sampled
        limiter = table.rules.rate_limiter
        if limiter is not None and not limiter.min_diff <= balance <= limiter.max_diff:
            raise Incorrect(f"{balance} is outside of {limiter.min_diff} to {limiter.max_diff}")
        seen.clear()

    count = setting.rows * setting.workload.steps * setting.step_bytes
    name = "no limit" if ratio is None else f"{ratio} {'row' if ratio == 1 else 'rows'} a trajectory"
    return Variant(name, measure, check, count, 1, {"samples_per_insert": ratio}, extras=seen)
