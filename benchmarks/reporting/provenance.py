"""How rows were measured, run by run; and what was not measured."""

from __future__ import annotations

import dataclasses
import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any

from benchmarks.experiments import EXPERIMENTS
from benchmarks.reporting.rows import Comparison, Place, Row, place
from benchmarks.showing import size


@dataclasses.dataclass(frozen=True)
class Run:
    """One run of a command, as texts.

    name: its id. experiment, place, machine, versions, peers, commit, source, configuration, command: of the run.
    first, last: dates of its rows. repeats, rows: numbers of them.
    """

    name: str
    experiment: str
    place: Place
    machine: str
    versions: str
    peers: str
    commit: str
    source: str
    configuration: str
    command: str
    first: str
    last: str
    repeats: str
    rows: int


@dataclasses.dataclass(frozen=True)
class Left:
    """Something that was to be measured, and was not."""

    experiment: str
    place: Place
    what: str
    why: str
    verdict: str
    date: str


def runs(found: Sequence[Comparison]) -> list[Run]:
    """The runs that rows in the report come from, the newest first."""
    rows: dict[tuple[str, str], list[Row]] = {}
    for comparison in found:
        for row in comparison.rows.values():
            rows.setdefault((row["run"], row["experiment"]), []).append(row)
    made = [_run(name, experiment, of_run) for (name, experiment), of_run in rows.items()]
    return sorted(made, key=lambda run: run.last, reverse=True)


def _run(name: str, experiment: str, rows: Sequence[Row]) -> Run:
    row = rows[0]
    dates = sorted(str(one["date"]) for one in rows)
    dirty = {True: ", with uncommitted changes", False: ""}.get(row.get("dirty"), ", as the environment says")
    commit = row.get("commit")
    repeats = sorted({one["repeats"] for one in rows if "repeats" in one})
    configuration = row.get("configuration") or {}
    return Run(
        *(
            name,
            experiment,
            place(row),
            _machine(row["machine"]),
            _listed(row.get("versions") or {}),
            _peers(rows),
        ),
        commit=f"{str(commit)[:12]}{dirty}" if commit else "unknown",
        source=str(row.get("source", "unknown")),
        configuration=", ".join(f"{key}: {json.dumps(value)}" for key, value in configuration.items()),
        command=_command(experiment, place(row), configuration, repeats, rows),
        first=dates[0],
        last=dates[-1],
        repeats=" or ".join(map(str, repeats)),
        rows=len(rows),
    )


def _machine(machine: Mapping[str, Any]) -> str:
    parts = [f"{machine.get('cpu')}, {machine.get('cores')} cores"]
    if machine.get("memory_bytes"):
        parts.append(f"{size(machine['memory_bytes'])} memory")
    if machine.get("last_level_cache_bytes"):
        parts.append(f"largest cache {size(machine['last_level_cache_bytes'])}")
    parts.append(f"huge pages {machine.get('huge_pages')}")
    parts.append(f"load {machine.get('load')} at the start")
    if machine.get("gpu"):
        parts.append(_listed(machine["gpu"]))
    return "; ".join(parts)


def _listed(values: Mapping[str, Any]) -> str:
    return ", ".join(f"{key} {value}" for key, value in values.items() if value is not None)


def _peers(rows: Sequence[Row]) -> str:
    """Versions of other libraries, as they said themselves."""
    found: dict[str, None] = {}
    for row in rows:
        peer = row["parameters"].get("peer")
        versions = peer.get("versions") if isinstance(peer, dict) else None
        if isinstance(versions, dict):
            found[f"{row['variant']}: {_listed(versions)}"] = None
    return "; ".join(found)


def _command(
    experiment: str,
    there: Place,
    configuration: Mapping[str, Any],
    repeats: Sequence[int],
    rows: Sequence[Row],
) -> str:
    """The command with the options that rows know; others had their defaults or are in the configuration."""
    known = {one.name: one for one in EXPERIMENTS}.get(experiment)
    words = ["python", "-m", "benchmarks", experiment]
    options = inspect.signature(known.command).parameters if known is not None else {}
    given = {**configuration, **({"repeats": repeats[-1]} if repeats else {})}
    if there.is_gpu:
        given["device"] = "cuda"
    if any("peer" in row["parameters"] for row in rows):
        given["peers"] = ".peers"
    for name, value in given.items():
        if name not in options or value is None or value is False or isinstance(value, dict):
            continue
        words.append(f"--{name.replace('_', '-')}")
        if value is not True:
            words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def left_out(rows: Sequence[Row], found: Sequence[Comparison]) -> list[Left]:
    """What rows say was left out, once each, unless it was measured afterwards."""
    latest: dict[tuple[Place, str, str], str] = {}
    for comparison in found:
        for variant, row in comparison.rows.items():
            name = (comparison.place, comparison.experiment, variant)
            latest[name] = max(latest.get(name, ""), str(row["date"]))
    kept: dict[tuple[Place, str, str], Left] = {}
    for row in rows:
        if "left_out" in row:
            name = (place(row), row["experiment"], str(row["left_out"]))
            kept.pop(name, None)
            kept[name] = Left(
                row["experiment"],
                place(row),
                str(row["left_out"]),
                str(row.get("why", "")),
                str(row.get("verdict", "left out")),
                str(row["date"]),
            )
    return [left for name, left in kept.items() if latest.get(name, "") <= left.date]


def not_measured(found: Sequence[Comparison]) -> list[str]:
    """Experiments that have no rows, or none on a device that they can be measured on."""
    texts = []
    for experiment in EXPERIMENTS:
        there = [comparison for comparison in found if comparison.experiment == experiment.name]
        if not there:
            texts.append(f"{experiment.name}: no rows at all")
            continue
        for device, measured in (
            ("the CPU", any(not comparison.place.is_gpu for comparison in there)),
            ("a GPU", any(comparison.place.is_gpu for comparison in there)),
        ):
            possible = "cuda" in experiment.devices if device == "a GPU" else "cpu" in experiment.devices
            if possible and not measured:
                texts.append(f"{experiment.name}: not on {device}")
    return texts
