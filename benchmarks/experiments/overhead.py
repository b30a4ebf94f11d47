"""``python -m benchmarks overhead``: what a call costs beside the copy that it makes, on the CPU.

Batches of one step, of which nearly all is overhead; n-step returns beside plain transitions, and a `Mixture` beside
its two sources; adding whole trajectories of W1 one by one, stacked, and as a list of dicts; and with `disk=`, at a
steady rate. Plain torch or memcpy copies as many bytes in the same turn. With
``--busy N`` beside N processes that never wait. Larger batches: `collect`.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
import math
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Annotated, Any

import numpy as np
import torch
import typer

import gear_loader as gear
from benchmarks.harness import Medians, Session, Variant
from benchmarks.options import experiment
from benchmarks.workloads import W1, Data, expect

QUICK_TRAJECTORIES, EXTENDED = 64, 1000  # of W1; the second: of a call of `extend`
LIMITS = {"uniform": 10e-6, "prioritized": 13e-6}  # seconds that a batch of one should take at most
LIMIT = 15e-6  # and adding a trajectory
PACE = 2000  # trajectories a second that are added while they are written to a disk: 84 MB/s
SYNC_SECONDS = 0.1
WITH_DISK = 0.9  # rate of adding that should be left
SELECTORS = {
    "uniform": gear.Uniform(),
    "uniform, steps": gear.Uniform(unit="step"),
    "prioritized": gear.Prioritized(),
    "prioritized, steps": gear.Prioritized(unit="step"),
}
_SPIN = """
import os, sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), os._exit(0)), daemon=True).start()
while True: pass
"""


@experiment("overhead", repeats=(2, 15), pause=0.005)
def command(
    session: Session,
    busy: Annotated[int, typer.Option(min=0, help="Processes that run beside it and never wait.")] = 0,
) -> None:
    """What a call costs beside its copy: batches of one, adding."""
    count = QUICK_TRAJECTORIES if session.quick else W1.trajectories
    session.configure(busy=busy, trajectories=count)
    told = {"busy": busy, "trajectories": count}
    data = Data(W1.of(count))
    with _busy(busy):
        with data.table(W1.steps) as table:
            _single(session, data, table, told)
        _transitions(session, told)
        _adding(session, data, told)
        _writing_behind(session, data, told)


@contextlib.contextmanager
def _busy(count: int) -> Iterator[None]:
    """So many processes that never wait; they end when their standard input does."""
    with contextlib.ExitStack() as stack:
        for _ in range(count):
            stack.enter_context(subprocess.Popen([sys.executable, "-c", _SPIN], stdin=subprocess.PIPE))
        yield


def _timed(call: Callable[[], object], count: int) -> Callable[[], float]:
    """A function that calls it so many times, and returns the seconds."""

    def measure() -> float:
        started = time.perf_counter()
        for _ in itertools.repeat(None, count):
            call()
        return time.perf_counter() - started

    return measure


def _batches(table: gear.Table, size: int, **options: Any) -> Iterator[Any]:
    ahead = gear.Prefetch(0, copy=options.pop("copy", None))
    given = {"device": "cpu", "prefetch": ahead, "batches_per_epoch": math.inf, **options}
    return iter(gear.ReplayDataset(table, batch_size=size, **given))


def _checked(data: Data, table: gear.Table, batches: Iterator[Any], length: int) -> Callable[[], None]:
    """A function that compares some batches with the windows that their rows name."""
    position_of = torch.from_numpy(np.argsort(table.indices()))  # of slots, which are 0 to n - 1

    def check() -> None:
        for batch in itertools.islice(batches, 20):
            positions, steps = position_of[batch["index"]], batch["anchor"][:, None] + torch.arange(length)
            expect(batch, {name: values[positions[:, None], steps] for name, values in data.stacked.items()})

    return check


def _plain(name: str, rows: Mapping[str, torch.Tensor], size: int, count: int) -> Variant:
    """Random rows, ``[n, ...]`` of each column, by one `index_select` a column; `count` batches a turn."""
    out = {column: torch.empty(size, *values.shape[1:]) for column, values in rows.items()}
    total, amount = len(next(iter(rows.values()))), sum(values.nbytes for values in out.values())

    def select() -> torch.Tensor:
        index = torch.randint(total, (size,))
        for column, values in rows.items():
            torch.index_select(values, 0, index, out=out[column])
        return index

    def check() -> None:
        index = select()
        expect(out, {column: values[index] for column, values in rows.items()})

    return Variant(name, _timed(select, count), check, amount, count)


def _single(session: Session, data: Data, table: gear.Table, told: Mapping[str, Any]) -> None:
    """Batches of one step."""
    count = 50 if session.quick else 2000
    variants = [_plain("plain torch", data.flat, 1, count)]
    for name, copy in itertools.product(SELECTORS, (None, False)):
        batches = _batches(table, 1, windows=gear.Window(1), sampler=SELECTORS[name], copy=copy)
        full = name if copy is None else f"{name}, copy=False"
        checked, limit = _checked(data, table, batches, 1), LIMITS.get(full)
        measure, amount = _timed(batches.__next__, count), variants[0].amount
        variants.append(Variant(full, measure, checked, amount, count, limit=limit))
    if not session.late("a batch of one"):
        session.compare("step", "a batch of one", variants, "plain torch", {**told, "batch": 1})


def _check_following(call: Callable[[], Any]) -> None:
    """Compare the observations that follow, which are the numbers of their steps."""
    found = call()
    for part in found if isinstance(found, list) else [found]:
        ahead, following = 1, part.get("next")
        if following is None:
            ahead, following = part["target"]["bootstrap"] - part["anchor"], part["target"]["next"]
        steps = (part["anchor"] + ahead).view(-1, *[1] * (following.ndim - 1))
        expect({"next": following}, {"next": steps.expand_as(following).to(following.dtype)})


def _transitions(session: Session, told: Mapping[str, Any]) -> None:
    """Batches of 256 transitions: of 3 steps beside those of one, and of a mixture beside both of its sources."""
    count, batch, steps = (20 if session.quick else 500), 256, 200
    one = gear.Window(1, squeeze=True)
    plain = dict.fromkeys(("obs", "action", "reward", "terminated"), one)
    plain["next"] = gear.Window(1, 1, column="obs", squeeze=True)
    windows = {"obs": one, "action": one, "target": gear.NStep("reward", 3, 0.99, "terminated", next="obs")}
    for name, dtype, shape, episodes in (
        ("state", torch.float32, (4,), 100),
        ("image", torch.uint8, (84, 84, 4), 10),
    ):
        schema = {
            "obs": gear.Column(dtype, shape, final=True),
            "action": gear.Column(torch.int64),
            "reward": gear.Column(torch.float32),
            "terminated": gear.Column(torch.bool),
        }
        with gear.Table.create(
            schema, max_steps=2 * episodes * steps, max_trajectories=2 * episodes
        ) as table:
            values = torch.arange(steps + 1).view(-1, *[1] * len(shape)).expand(-1, *shape).to(dtype)
            numbers = torch.arange(steps)
            episode = {
                "obs": values[:-1],
                "action": numbers,
                "reward": torch.ones(steps),
                "terminated": numbers < 0,
            }
            for _ in range(episodes):
                table.add(episode, final={"obs": values[-1]})
            for sampler in ("uniform, steps", "prioritized, steps"):
                label = f"{batch} transitions, {name}, {sampler}"
                made = functools.partial(
                    gear.ReplayDataset, table, sampler=SELECTORS[sampler], device="cpu", prefetch=0
                )
                half = functools.partial(made, batch_size=batch // 2, windows=plain)
                mixed = gear.Mixture({"a": (half(), 0.5), "b": (half(), 0.5)}, batch_size=batch)
                sources = half(), half()
                calls: dict[str, Callable[[], Any]] = {
                    "plain": made(batch_size=batch, windows=plain).sample,
                    "3 steps": made(batch_size=batch, windows=windows).sample,
                    "two sources": lambda sources=sources: [each.sample() for each in sources],
                    "mixture": mixed.sample,
                }
                amount = batch * sum(schema[each].step_bytes for each in (*schema, "obs"))

                targets = {"3 steps": {"plain": 1 / 1.3}, "mixture": {"two sources": 1 / 1.1}}
                variants = [
                    Variant(
                        each,
                        _timed(call, count),
                        functools.partial(_check_following, call),
                        amount,
                        count,
                        targets=targets.get(each, {}),
                    )
                    for each, call in calls.items()
                ]
                if not session.late(label):
                    session.compare(
                        "transitions", label, variants, "plain", {**told, "batch": batch}, ["two sources"]
                    )


def _adding(session: Session, data: Data, told: Mapping[str, Any]) -> None:
    """Adding whole trajectories to a full table, one by one and many at once."""
    every, count = (32, 20) if session.quick else (EXTENDED, 1000)
    chosen = np.arange(every) % data.workload.trajectories
    stacked = {name: values[chosen] for name, values in data.stacked.items()}
    rows = [{name: values[i] for name, values in stacked.items()} for i in range(every)]
    memory = {name: torch.zeros_like(values) for name, values in stacked.items()}
    source, target = np.ones((every, W1.row_bytes), np.uint8), np.zeros((every, W1.row_bytes), np.uint8)
    copied, assigned = itertools.cycle(range(every)), itertools.cycle(range(every))

    def copy() -> None:
        place = next(copied)
        target[place] = source[place]

    def assign() -> None:
        place = next(assigned)
        for name, values in rows[place].items():
            memory[name][place] = values

    def check() -> None:
        for _ in range(every):
            copy()
            assign()
        expect({"bytes": torch.from_numpy(target), **memory}, {"bytes": torch.from_numpy(source), **stacked})

    def variant(name: str, add: Callable[[], Any], times: int, items: int, **more: Any) -> Variant:
        def stored() -> None:
            expect(table[int(np.asarray(add()).reshape(-1)[-1])], rows[-1])

        checked = stored if name.startswith("ours") else check
        return Variant(name, _timed(add, times), checked, items * W1.row_bytes, times, **more)

    sizes = {"max_steps": every * W1.steps, "max_trajectories": every, "block_steps": W1.steps}
    arrays, lengths = {name: value.numpy() for name, value in rows[-1].items()}, [W1.steps] * every
    with gear.Table.create(W1.schema, **sizes, on_full="evict_oldest") as table:
        table.extend(rows)
        single = [
            variant("memcpy", copy, count, 1),
            variant("plain torch", assign, count, 1),
            variant("ours", lambda: table.add(rows[-1]), count, 1, limit=LIMIT),
            variant("ours, arrays", lambda: table.add(arrays), count, 1, limit=LIMIT),
        ]
        aimed: dict[str, Any] = {"targets": {"memcpy": 0.9}}
        many = [
            variant("memcpy", lambda: np.copyto(target, source), 1, every),
            variant("ours, stacked", lambda: table.extend(stacked, lengths=lengths), 1, every, **aimed),
            variant("ours, list", lambda: table.extend(rows), 1, every, **aimed),
        ]
        for label, variants in (("adding a trajectory", single), ("adding many", many)):
            if not session.late(label):
                session.compare("add", label, variants, "memcpy", {**told, "count": every})


def _writing_behind(session: Session, data: Data, told: Mapping[str, Any]) -> None:
    """Adding whole trajectories at a steady rate, with and without a thread that writes them to a disk.

    The seconds are those inside `Table.add` alone.
    """
    count = 40 if session.quick else 1000
    rows = [{name: values[i] for name, values in data.stacked.items()} for i in range(QUICK_TRAJECTORIES)]
    sizes = {"max_steps": 2 * count * W1.steps, "max_trajectories": 2 * count, "block_steps": W1.steps}

    def variant(name: str, table: gear.Table, **more: Any) -> Variant:
        extras = Medians()

        def measure() -> float:
            seconds, due = np.zeros(count), time.perf_counter()
            for i in range(count):
                due += 1 / PACE
                time.sleep(max(0.0, due - time.perf_counter()))
                started = time.perf_counter()
                table.add(rows[i % len(rows)])
                seconds[i] = time.perf_counter() - started
            disk = table.stats().disk
            behind = {} if disk is None else {"unwritten seconds": disk.unwritten_seconds}
            p50, p99 = np.quantile(seconds, (0.5, 0.99))
            extras.note(**{"p50 seconds": float(p50), "p99 seconds": float(p99), **behind})
            if disk is not None:
                table.save(disk.path)  # so that no other turn shares the machine with its thread
            return float(seconds.sum())

        def check() -> None:
            expect(table[table.add(rows[-1])], rows[-1])

        return Variant(name, measure, check, W1.row_bytes, count, extras=extras, **more)

    with (
        tempfile.TemporaryDirectory(prefix="gear-loader-bench-", ignore_cleanup_errors=True) as folder,
        gear.Table.create(W1.schema, **sizes, on_full="evict_oldest") as plain,
        gear.Table.create(
            W1.schema, **sizes, on_full="evict_oldest", disk=gear.Disk(folder, SYNC_SECONDS)
        ) as behind,
    ):
        variants = [
            variant("ours", plain),
            variant("ours, disk", behind, targets={"ours": WITH_DISK}),
        ]
        label = f"adding {PACE:,} trajectories a second, written to disk"
        if not session.late(label):
            session.compare("disk", label, variants, "ours", {**told, "count": count, "sync": SYNC_SECONDS})
