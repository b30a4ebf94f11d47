"""``python -m benchmarks remote-write``: adding to a table of another process over loopback, by 1, 4 and 16 writers.

Whole trajectories (W1: 42,000 bytes each) one by one or in batches, and single steps that are made a trajectory every
100 steps; writers do not wait for the server until the end of a measurement, within the limits of each library. Then
trajectories whose commit is waited for, one by one; `commit_p50` and `commit_p99` are the seconds of one, medians over
writers. The yardstick, carrier, is a socket that takes as many bytes in one piece a trajectory, or a batch, whose
receiver does nothing with them. Reverb is its `TrajectoryWriter` over gRPC; it has no call for batches. The table, and
Reverb's, are full and evict the oldest trajectory. What was added is what is there: this is checked before and after.
"""

from __future__ import annotations

import contextlib
import functools
import itertools
from typing import Annotated, Any

from benchmarks.adding import PEERS, Crew, Group, Setting, TableCache, item_of
from benchmarks.harness import Medians, Session, Variant
from benchmarks.options import command as as_command
from benchmarks.options import described, numbers
from benchmarks.workloads import W1

TRAJECTORIES = 2_000
MODES = {
    "whole": "whole trajectories one by one",
    "batches": "whole trajectories in batches",
    "steps": "single steps",
    "commits": "trajectories whose commit is waited for",
}
GOALS = {"carrier": 0.5, "Reverb": 2.0}
"""Shares that ours should reach, of the carrier for whole trajectories only."""
_CARRIER, _OTHERS = "carrier", ("Reverb",)


@as_command("remote-write", repeats=(2, 7))
def command(
    session: Session,
    writers: Annotated[str | None, described("Numbers of writers: 1,4,16 by default.")] = None,
    trajectories: Annotated[
        int | None, described(f"Of W1 in the table: {TRAJECTORIES:,} by default.", min=512)
    ] = None,
    seconds: Annotated[float | None, described("Of a measurement: 0.4 by default.", min=0.01)] = None,
) -> None:
    """Adding to a table of another process over loopback, beside Reverb's client and a bare socket."""
    quick = session.quick
    setting = Setting(
        W1.of(trajectories or (600 if quick else TRAJECTORIES)),
        modes=tuple(MODES),
        writers=numbers(writers, "--writers", 1, 64) or ((1, 2) if quick else (1, 4, 16)),
        window=seconds or (0.04 if quick else 0.4),
    )
    told = {"writers": setting.writers, "trajectories": setting.workload.trajectories}
    session.configure(writer_threads=1, **told, seconds=setting.window, seed=setting.seed)
    with contextlib.ExitStack() as stack:
        crews = {name: Crew(name, library="gear_remote") for name in (_CARRIER, "ours")}
        for name in _OTHERS:
            crew = Crew(name, session.peers)
            if session.attempt(name, crew.start) is not None:
                crews[name] = crew
        for crew in crews.values():
            stack.callback(crew.close)
        tables = stack.enter_context(TableCache())
        table = stack.enter_context(tables.table(setting.workload, block_steps=setting.block_steps))
        server = stack.enter_context(table.serve())
        ours = {"table": table, "address": [server.url, server.secret.decode()]}
        pairs = list(itertools.product(setting.modes, setting.writers))
        for mode, count in session.each("adding", pairs, _label):
            label = _label((mode, count))
            with contextlib.ExitStack() as groups:
                made = functools.partial(_variant, session, setting, mode, count, label, groups)
                found = [made(name, crew, ours if name == "ours" else {}) for name, crew in crews.items()]
                variants = [variant for variant in found if variant is not None]
                parameters = {"writers": count, "item": item_of(mode), **setting.parameters()}
                others = [variant.name for variant in variants if variant.name in _OTHERS]
                session.compare(mode, label, variants, _CARRIER, parameters, references=others)


def _label(pair: tuple[str, int]) -> str:
    mode, writers = pair
    return f"{MODES[mode]}, {writers} {'writer' if writers == 1 else 'writers'}"


def _variant(
    session: Session,
    setting: Setting,
    mode: str,
    writers: int,
    label: str,
    groups: contextlib.ExitStack,
    name: str,
    crew: Crew,
    place: dict[str, Any],
) -> Variant | None:
    """Writers of one kind; None if they do not work, or have no call for that."""
    kind = PEERS.get(name)
    if kind is not None and mode not in (*kind.modes, *(["commits"] if kind.waits else [])):
        return None
    made = functools.partial(Group, crew, setting.spec, mode, writers, **place)
    group = session.attempt(f"{name}, {label}", made, required=kind is None)
    if group is None:
        return None
    groups.callback(group.close)
    medians = Medians()

    def measure() -> float:
        seconds: float = group.measure(setting.window)
        for figure in ("commit_p50", "commit_p99"):
            values = [answer[figure] for answer in group.answers if figure in answer]
            if values:
                medians.note(**{figure: sorted(values)[len(values) // 2]})
        return seconds

    amount = setting.step_bytes * (1 if item_of(mode) == "step" else setting.workload.steps)
    about = {} if kind is None else {"peer": crew.start()[0].about}
    targets = {goal: GOALS[goal] for goal in GOALS if goal != _CARRIER or mode in ("whole", "batches")}
    variant = Variant(name, measure, group.check, amount, 1, about, required=kind is None, extras=medians)
    variant.targets = targets if name == "ours" else {}
    return variant
