"""Two parts of `benchmarks.online`: reading while others write, and writers and a reader that wait for each other."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

import gear_loader as gear
from benchmarks.harness import Comparison, Incorrect, Session, Variant
from benchmarks.online_parts import LeftOut, Setting, measured
from benchmarks.online_subjects import Crew, Group, Reader, TableCache, specify
from benchmarks.peers.online_peers import Source
from benchmarks.peers.select_peers import ALPHA, BETA
from gear_loader.storage.limiters import SampleToInsertRatio

__all__ = ["looping", "reading"]

RATIOS = (1, 8, 64)
"""Rows that are drawn for a trajectory, from more than the reader gets to fewer than it could read."""


# ---------------------------------------------------------------- reading while others write


def reading(
    session: Session, left: LeftOut, setting: Setting, crew: Crew, shelf: TableCache
) -> Iterator[str]:
    """`ReplayDataset.sample` while writers add at full speed; yields the selectors that have been measured."""
    with shelf.table(setting.workload, block_steps=setting.block_steps) as table:
        selectors = {
            "uniform": gear.Uniform(),
            "prioritized": gear.Prioritized(alpha=ALPHA, beta=BETA),
        }
        for name, selector in selectors.items():
            label = f"reading while others write, {name}"
            if session.deadline.passed(label):
                continue
            variants = [
                _beside(setting, crew, table, selector, writers) for writers in setting.readers_writers
            ]
            comparison = Comparison(
                experiment="online",
                workload=f"read, {name}",
                label=f"{label}, batch {setting.rows}",
                variants=variants,
                yardstick=variants[0].name,
                parameters={
                    "batch": setting.rows,
                    "item": "batch",
                    "window": setting.window,
                    "trajectories": setting.workload.trajectories,
                    "steps": setting.workload.steps,
                    "block_steps": setting.block_steps,
                },
            )
            measured(session, left, comparison, {variant.name for variant in variants})
            yield name


def _beside(setting: Setting, crew: Crew, table: gear.Table, selector: Any, writers: int) -> Variant:
    spec = setting.spec
    most = max(1, *setting.readers_writers)
    fresh = Group(crew, spec, "whole", most, table=table)  # every process has its mapping paged in
    reader = Reader(table, spec, selector, batch=setting.rows, writers=most)
    beside: list[float] = []
    alone: list[float] = []

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
            alone.append(1 / others.measure(setting.window / 2))
            begin = others.start(setting.window + 0.1) + 0.05  # they are at work before and after
        reader.read()
        time.sleep(max(0.0, begin - time.monotonic()))
        begin = time.monotonic()
        count = reader.until(begin + setting.window)
        seconds = (time.monotonic() - begin) / count
        if others is not None:
            beside.append(others.rate())
        return seconds

    def extras() -> dict[str, float]:
        if not beside:
            return {}
        return {
            "trajectories_per_s": float(np.median(beside)),
            "trajectories_per_s_without_reader": float(np.median(alone)),
        }

    count = setting.rows * setting.workload.steps * setting.step_bytes
    name = f"{writers} {'writer' if writers == 1 else 'writers'}"
    return Variant(name, measure, check, count, 1, {"writers": writers}, extras=extras)


# ---------------------------------------------------------------- all of it


def looping(
    session: Session, left: LeftOut, setting: Setting, crew: Crew, shelf: TableCache
) -> Iterator[str]:
    """Two writers at full speed, and a reader that adds up each batch, with limits on how far one may run ahead."""
    label = f"2 writers and a reader, batch {setting.rows}"
    if session.deadline.passed(label):
        return
    with contextlib.ExitStack() as stack:
        workload = setting.workload.of(max(setting.workload.trajectories // 3, 2 * setting.rows))
        spec = specify(workload, batch=setting.batch, seed=setting.seed)
        variants = []
        least = workload.trajectories // 4
        for ratio in (None, *RATIOS):
            limiter = None
            if ratio is not None:
                limiter = SampleToInsertRatio(ratio, least, 4.0 * max(setting.rows, ratio))
            place = shelf.table(workload, block_steps=setting.block_steps, limiter=limiter)
            table = stack.enter_context(place)
            for trajectory in _first(spec, least):
                table.add(trajectory)
            variants.append(_loop(setting, spec, crew, table, ratio))
        comparison = Comparison(
            experiment="online",
            workload="loop",
            label=label,
            variants=variants,
            yardstick=variants[0].name,
            parameters={
                "batch": setting.rows,
                "writers": 2,
                "item": "batch",
                "window": setting.window,
                "trajectories": workload.trajectories,
                "steps": workload.steps,
                "block_steps": setting.block_steps,
            },
        )
        measured(session, left, comparison, {variant.name for variant in variants})
    yield label


def _first(spec: Mapping[str, Any], count: int) -> list[dict[str, np.ndarray]]:
    """What the first writer adds first, as many trajectories as there must be before anything is drawn."""
    each = Source(spec, 0).each
    return [each[i % len(each)] for i in range(count)]


def _loop(
    setting: Setting, spec: Mapping[str, Any], crew: Crew, table: gear.Table, ratio: int | None
) -> Variant:
    reader = Reader(table, spec, gear.Uniform(), batch=setting.rows, writers=2)
    seen: dict[str, list[float]] = {}

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
        for name, value in (
            ("trajectories_per_s", inserted / seconds),
            ("rows_per_trajectory", sampled / max(inserted, 1)),
            ("writers_waiting", (after.insert_wait - before.insert_wait) / seconds / 2),
            ("reader_waiting", (after.sample_wait - before.sample_wait) / seconds),
        ):
            seen.setdefault(name, []).append(value)
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
    return Variant(
        "no limit" if ratio is None else f"{ratio} {'row' if ratio == 1 else 'rows'} a trajectory",
        measure,
        check,
        count,
        1,
        {"samples_per_insert": ratio},
        extras=lambda: {name: float(np.median(values)) for name, values in seen.items()},
    )
