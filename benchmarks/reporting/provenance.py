"""How rows were measured, run by run; and what was not measured."""

from __future__ import annotations

import inspect
import json
import shlex
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.experiments import EXPERIMENTS
from benchmarks.reporting.rows import Comparison, Place, Row, grouped, place
from benchmarks.showing import size


class Left(NamedTuple):
    """Something that was to be measured, and was not."""

    experiment: str
    place: Place
    what: str
    why: str
    verdict: str
    date: str


def runs(found: Sequence[Comparison]) -> list[dict[str, Any]]:
    """The runs that rows in the report come from, as texts, the newest first."""
    rows = (row for comparison in found for row in comparison.rows.values())
    kinds = grouped(rows, lambda row: (row["run"], row["experiment"]))
    return sorted(
        (_run(*name, of_run) for name, of_run in kinds.items()), key=lambda run: run["last"], reverse=True
    )


def _run(name: str, experiment: str, rows: Sequence[Row]) -> dict[str, Any]:
    row, dates = rows[0], [str(one["date"]) for one in rows]
    dirty = {True: ", with uncommitted changes", False: ""}.get(row.get("dirty"), ", as the environment says")
    repeats = sorted({one["repeats"] for one in rows if "repeats" in one})
    configuration = row.get("configuration") or {}
    return {
        "name": name,
        "experiment": experiment,
        "place": place(row),
        "machine": _machine(row["machine"]),
        "versions": _listed(row.get("versions") or {}),
        "peers": _peers(rows),
        "commit": f"{str(row['commit'])[:12]}{dirty}" if row.get("commit") else "unknown",
        "source": str(row.get("source", "unknown")),
        "configuration": ", ".join(f"{key}: {json.dumps(value)}" for key, value in configuration.items()),
        "command": _command(experiment, configuration, repeats, rows),
        "first": min(dates),
        "last": max(dates),
        "repeats": " or ".join(map(str, repeats)),
        "rows": len(rows),
    }


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
    peers = ((row["variant"], row["parameters"].get("peer")) for row in rows)
    told = ((name, peer.get("versions")) for name, peer in peers if isinstance(peer, dict))
    return "; ".join(dict.fromkeys(f"{name}: {_listed(v)}" for name, v in told if isinstance(v, dict)))


def _command(
    experiment: str, configuration: Mapping[str, Any], repeats: Sequence[int], rows: Sequence[Row]
) -> str:
    """The command with the options that rows know; others had their defaults or are in the configuration."""
    known = {one.name: one for one in EXPERIMENTS}.get(experiment)
    words = ["python", "-m", "benchmarks", experiment]
    options = inspect.signature(known.command).parameters if known is not None else {}
    given = {**configuration, **({"repeats": repeats[-1]} if repeats else {})}
    if place(rows[0]).is_gpu:
        given["device"] = "cuda"
    if any("peer" in row["parameters"] for row in rows):
        given["peers"] = ".peers"
    for name, value in given.items():
        if name in options and value is not None and value is not False and not isinstance(value, dict):
            words.append(f"--{name.replace('_', '-')}")
            if value is not True:
                words.append(",".join(map(str, value)) if isinstance(value, list) else str(value))
    return shlex.join(words)


def left_out(rows: Sequence[Row], found: Sequence[Comparison]) -> list[Left]:
    """What rows say was left out, once each, unless it was measured afterwards."""
    latest: dict[tuple[Any, ...], str] = {}
    for comparison in found:
        for variant, row in comparison.rows.items():
            name = (comparison.place, comparison.experiment, variant)
            latest[name] = max(latest.get(name, ""), str(row["date"]))
    kept: dict[tuple[Any, ...], Left] = {}
    for row in rows:
        if "left_out" in row:
            where, what, why = (row["experiment"], place(row)), str(row["left_out"]), str(row.get("why", ""))
            kept.pop((*where, what), None)
            left = Left(*where, what, why, str(row.get("verdict", "left out")), str(row["date"]))
            kept[(*where, what)] = left
    return [
        left
        for left in kept.values()
        if latest.get((left.place, left.experiment, left.what), "") <= left.date
    ]


def not_measured(found: Sequence[Comparison]) -> list[str]:
    """Experiments that have no rows, or none on a device that they can be measured on."""
    texts = []
    for experiment in EXPERIMENTS:
        there = {"cuda" if c.place.is_gpu else "cpu" for c in found if c.experiment == experiment.name}
        if not there:
            texts.append(f"{experiment.name}: no rows at all")
            continue
        for device, name in (("cpu", "the CPU"), ("cuda", "a GPU")):
            if device in experiment.devices and device not in there:
                texts.append(f"{experiment.name}: not on {name}")
    return texts
