"""``python -m benchmarks checkpoint``: saving and loading a table, against writing and reading as many bytes.

W1: whole trajectories of 42,000 bytes. In turn, each variant goes all the way in a process of its own: a store is
filled and saved; a hundredth is added and it is saved again, into the same folder; it is loaded, with nothing of it in
the page cache, and with all of it there. What was loaded last is compared with what was stored, to the byte, before the
turn counts; a small store goes that way first.

The yardsticks write as many bytes to one file, with `fsync`, and read from it into a buffer that is used again; "read,
kept" into fresh memory for all of it, by as many threads as a load of ours has. Loading is held against the latter: the
kernel has to clear every page of a new table, which takes longer than to read into a buffer that stays in the
processor's cache. Ours checks every byte that it loads. torch.save has a
flat tensor for each column; TorchRL a buffer over `LazyTensorStorage`; Reverb a server that is started on its files.

Saving takes until everything is on the disk. Only ours waits for that by itself (`synced`); what others leave in the
page cache is brought there by the benchmark, and the rows' `extras` say when the call returned, and what memory it
took. Only ours writes no more than what is new when it saves again.
"""

from __future__ import annotations

import contextlib
import functools
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

from benchmarks.harness import Medians, Session, Variant
from benchmarks.options import Folder, described, experiment
from benchmarks.peers.catalog import Contender, contenders, peers_of
from benchmarks.peers.checkpoint import UNIT
from benchmarks.workloads import W1, Workload

SEED = 17
YARDSTICKS = {"save": "write", "save again": "write", "load": "read", "load, cold": "read"}
"""Workload -> what the yardstick is called there."""
KEPT = "read, kept"
TARGET = 0.7
SMALL = 2 * UNIT


@experiment("checkpoint", repeats=(1, 5))
def command(
    session: Session,
    trajectories: Annotated[
        int | None, described(f"Of W1: {W1.trajectories:,} by default (0.84 GB).", min=2 * UNIT)
    ] = None,
    folder: Folder = None,
) -> None:
    """Saving and loading a table, against writing and reading as many bytes."""
    count = (trajectories or (1_000 if session.quick else W1.trajectories)) // UNIT * UNIT
    session.configure(trajectories=count, seed=SEED)
    own = {"yardstick": "plain", KEPT: "plain", "ours": "gear", "torch.save": "plain"}
    if not session.late(f"{count:,} trajectories"):
        needed = ("yardstick", KEPT, "ours")
        kinds = contenders(session.peers, "checkpoint", own, 2, required=needed)
        measured(session, W1.of(count), kinds, folder)


def measured(session: Session, workload: Workload, kinds: Sequence[Contender], folder: Path | None) -> None:
    """Measure all variants in turn, and show what each workload took."""
    more = max(UNIT, workload.trajectories // 100 // UNIT * UNIT)
    spec = {
        "columns": {name: list(shape) for name, shape in workload.columns},
        "steps": workload.steps,
        "trajectories": workload.trajectories,
        "more": more,
        "seed": SEED,
    }
    there = {kind.name: kind for kind in kinds}
    found: dict[str, list[dict[str, Any]]] = {name: [] for name in there}
    for _ in range(session.repeats):
        for name in list(found):
            made = functools.partial(_journey, session, there[name], folder, spec)
            journey = session.attempt(name, made, required=there[name].required)
            if journey is None:
                del found[name]
            else:
                found[name].append(journey)
    if found:
        _report(session, workload, more, found)


def _journey(
    session: Session, kind: Contender, folder: Path | None, spec: Mapping[str, Any]
) -> dict[str, Any]:
    """What a variant took, all the way and checked, after a small store."""
    found: dict[str, Any] = {}
    with (
        tempfile.TemporaryDirectory(
            prefix="gear-loader-bench-", dir=folder, ignore_cleanup_errors=True
        ) as place,
        session.console.status(f"{spec['trajectories']:,} trajectories: {kind.name}"),
        contextlib.closing(kind.launch()) as process,
    ):
        for name, count in (("small", SMALL), ("whole", spec["trajectories"])):
            (Path(place) / name).mkdir()
            told = {**spec, "trajectories": count}
            found = process.ask("journey", spec=told, folder=str(Path(place) / name))
        return {**found, "about": process.about}


def _report(
    session: Session, workload: Workload, more: int, found: Mapping[str, Sequence[dict[str, Any]]]
) -> None:
    saved = {"save": workload.table_bytes}
    everything = workload.of(workload.trajectories + more).table_bytes
    for name, yardstick in YARDSTICKS.items():
        variants = []
        for kind, journeys in found.items():
            if kind == KEPT and yardstick != "read":
                continue
            amount = everything if kind in ("yardstick", KEPT) else saved.get(name, everything)
            variants.append(_variant(kind, name, amount, journeys))
        parameters = {"bytes": saved.get(name, everything), "trajectories": workload.trajectories}
        label, beside = f"{workload.name}, {_TITLES[name]}", [KEPT] if yardstick == "read" else []
        session.compare(name, label, variants, yardstick, parameters, beside)


_TITLES = {
    "save": "save",
    "save again": "save again with 1% more",
    "load": "load, all of it in the page cache",
    "load, cold": "load, nothing of it in the page cache",
}


def _variant(kind: str, workload: str, amount: int, journeys: Sequence[dict[str, Any]]) -> Variant:
    """A variant whose turns have been measured, and checked, already."""
    turns, extras = iter([journey[workload] for journey in journeys]), Medians()
    name = {"yardstick": YARDSTICKS[workload]}.get(kind, kind)
    if kind == "torch.save" and workload.startswith("load"):
        name = "torch.load"
    parameters: dict[str, Any] = {"synced": journeys[0]["synced"]} if workload.startswith("save") else {}
    if kind in peers_of("checkpoint"):
        parameters["peer"] = journeys[0]["about"]
    for journey in journeys:
        extras.note(**journey["extras"].get(workload, {}))
    beside = KEPT if workload.startswith("load") else YARDSTICKS[workload]
    targets = {beside: TARGET} if kind == "ours" and workload != "save again" else {}
    return Variant(name, lambda: next(turns), lambda: None, amount, 1, parameters, targets, extras)
