"""Rows that were measured: read from files, and put back together as comparisons.

A measurement is known by its place (device and machine), experiment, workload, variant and parameters; of those that
measure the same, the last one counts. Ratios are taken within one run only, because only there variants took turns.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Callable, Hashable, Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, TypeVar

from gear_loader.kernels.devices import BUS_PROGRAMS

Row = Mapping[str, Any]
Point = tuple[float, float, float]
Kind = TypeVar("Kind", bound=Hashable)
Thing = TypeVar("Thing")

DESCRIBING = ("peer", "about", "curve", "curves")
_APART = (*DESCRIBING, "setting")  # parameters that do not set a measurement apart
OURS = ("ours", "before", "collector", "dataset", "kernel", "DataLoader, dataset")
_NEEDED = {"experiment": str, "device": str, "machine": dict, "run": str, "date": str}
_MEASURED = {"workload": str, "label": str, "variant": str, "parameters": dict}


class BadRow(Exception):
    """A line that is no row of a benchmark; the message names file and line."""


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """What was measured on: figures of two places are never compared in the report."""

    device: str  # "cpu" or the name of a GPU
    cpu: str
    cores: int
    gpu: str

    @property
    def is_gpu(self) -> bool:
        """Whether batches were wanted on a GPU."""
        return self.device != "cpu"

    def __str__(self) -> str:
        beside = f"GPU {self.gpu}" if self.gpu and self.gpu != self.device else ""
        parts = [self.device if self.is_gpu else "", f"{self.cpu}, {self.cores} cores", beside]
        return "; ".join(part for part in parts if part)


def grouped(things: Iterable[Thing], kind: Callable[[Thing], Kind]) -> dict[Kind, list[Thing]]:
    """Things of one kind together, in their order."""
    found: dict[Kind, list[Thing]] = {}
    for thing in things:
        found.setdefault(kind(thing), []).append(thing)
    return found


def three(values: Mapping[str, Any]) -> Point:
    return values["p10"], values["p50"], values["p90"]


def per(amount: float, values: Mapping[str, Any]) -> Point:
    """An amount over times, from slow to fast; NaN where there is none."""
    low, mid, high = (amount / value if value else math.nan for value in reversed(three(values)))
    return low, mid, high


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of files of JSON lines, the oldest first."""
    found: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if line.strip():
                found.append(_row(line, f"{file}, line {number}"))
    return sorted(found, key=lambda row: str(row["date"]))


def _row(line: bytes, where: str) -> Row:
    try:
        row = json.loads(line)
    except ValueError as error:
        raise BadRow(f"{where}: no JSON: {error}") from error
    if not isinstance(row, dict):
        raise BadRow(f"{where}: {type(row).__name__} in place of a row of a benchmark")
    for name, kind in (_NEEDED | ({} if "left_out" in row else _MEASURED)).items():
        if not isinstance(row.get(name), kind):
            raise BadRow(f"{where}: expected {name!r} as {kind.__name__}, found {row.get(name)!r}")
    quantiles = row.get("seconds", row.get("amount"))
    if "left_out" not in row and not (
        isinstance(quantiles, dict) and {"p10", "p50", "p90"} <= set(quantiles)
    ):
        raise BadRow(f"{where}: expected 'seconds' or 'amount' with p10, p50 and p90")
    return row


def measured(rows: Iterable[Row]) -> list[Row]:
    """The last row of each measurement, oldest first."""
    found: dict[Any, Row] = {}
    for row in rows:
        if "left_out" not in row:
            name = key(row)
            found.pop(name, None)
            found[name] = row
    return list(found.values())


def place(row: Row) -> Place:
    """Where a row was measured."""
    machine = row["machine"]
    gpu = (machine.get("gpu") or {}).get("name", "")
    return Place(row["device"], str(machine.get("cpu")), int(machine.get("cores") or 0), str(gpu))


def key(row: Row) -> tuple[Any, ...]:
    """What a row measures, and where."""
    return (place(row), row["experiment"], row["workload"], row["variant"], _settings(row["parameters"]))


def _settings(parameters: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in parameters.items() if k not in _APART}, sort_keys=True)


def is_ours(row: Row) -> bool:
    """Whether this project did the work; in some experiments all variants are ours."""
    alone = row["experiment"] == "online" and row["workload"].startswith(("read", "loop"))
    return alone or row["variant"].startswith(OURS)


def less_is_better(row: Row) -> bool:
    """Of figures that are no times of batches: whether small ones are good ones."""
    return "at_least" not in row and not str(row.get("unit", "")).endswith("/s")


def speeds(row: Row) -> Point:
    """What ratios are made of, from slow to fast: amount a second, or a figure the right way round; else NaN."""
    if "seconds" in row:
        return per(row.get("bytes", row.get("rows", 1)), row["seconds"])
    if less_is_better(row):
        return per(1, row["amount"])
    low, mid, high = (math.nan if value is None else float(value) for value in three(row["amount"]))
    return low, mid, high


def speed(row: Row) -> float:
    return speeds(row)[1]


@dataclasses.dataclass
class Comparison:
    """Variants that were measured in turn, and the parameters that they share.

    rows: variant -> its last row; some may come from an older run than others. runs: run -> variant -> row.
    """

    place: Place
    experiment: str
    workload: str
    label: str
    parameters: Mapping[str, Any]
    rows: dict[str, Row]
    runs: dict[str, dict[str, Row]]

    @cached_property
    def ours(self) -> list[Row]:
        """First the one that others are compared with.

        It is the one called plainly ``ours``, else what all are relative to, else the kernel with the default number of
        programs, else the first measured.
        """
        names = ["ours", *(row.get("yardstick") for row in self.rows.values())]
        names += ["kernel, default", f"kernel, {BUS_PROGRAMS} programs"]
        found = [row for row in self.rows.values() if is_ours(row)]
        return sorted(found, key=lambda row: [*names, row["variant"]].index(row["variant"]))

    @cached_property
    def limit(self) -> Row | None:
        """The yardstick, if it is not ours."""
        found = (self.rows.get(row.get("yardstick", "")) for row in self.rows.values())
        return next((row for row in found if row is not None and not is_ours(row)), None)

    @cached_property
    def others(self) -> list[Row]:
        """Peers and plain variants; further yardsticks are left away."""
        yardstick = None if self.limit is None else self.limit["variant"].split(", ")[0]
        rows = self.rows.values()
        return [row for row in rows if not is_ours(row) and row["variant"].split(", ")[0] != yardstick]

    @property
    def timed(self) -> bool:
        return any("seconds" in row for row in self.rows.values())

    def ratio(self, mine: Row, other: Row) -> float:
        """Speed of `mine` over that of `other` in the run of `other`; NaN if they never took turns."""
        same = self.runs[other["run"]].get(mine["variant"])
        if same is None:
            return math.nan
        paired = _paired(same, other)
        return paired if not math.isnan(paired) else speed(same) / speed(other)

    def beyond_scatter(self, mine: Row, other: Row) -> bool:
        """Whether p10 to p90 of both, measured in the run of `other`, do not overlap."""
        same = self.runs[other["run"]].get(mine["variant"])
        if same is None:
            return False
        (slow, _, fast), (other_slow, _, other_fast) = speeds(same), speeds(other)
        return slow > other_fast or fast < other_slow


def _paired(mine: Row, other: Row) -> float:
    """The median of the ratios of single turns, where rows have it."""
    if other["variant"] == mine.get("yardstick"):
        return float(mine["ratio"]["p50"])
    if other["variant"] in mine.get("ratios", {}):
        return float(mine["ratios"][other["variant"]]["p50"])
    if mine["variant"] == other.get("yardstick"):
        return 1 / other["ratio"]["p50"] if other["ratio"]["p50"] else math.nan
    return math.nan


def comparisons(rows: Sequence[Row]) -> list[Comparison]:
    """Rows put back together: those of one comparison follow one another within a run."""
    groups: list[list[Row]] = []
    last: dict[str, list[Row]] = {}
    for row in rows:
        if "left_out" in row:
            continue
        group = last.get(row["run"])
        if group is None or _other_comparison(group, row):
            group = last[row["run"]] = []
            groups.append(group)
        group.append(row)
    found: dict[Any, Comparison] = {}
    for group in groups:
        first, shared = group[0], _shared(group)
        kind, label = (place(first), first["experiment"], first["workload"]), first["label"]
        # Figures that are no times stand alone in the file, each with parameters of its own.
        name = (*kind, label, _settings(shared) if "seconds" in first else "")
        comparison = found.setdefault(name, Comparison(*kind, label, shared, {}, {}))
        for row in group:
            comparison.rows.pop(row["variant"], None)
            comparison.rows[row["variant"]] = row
            comparison.runs.setdefault(row["run"], {})[row["variant"]] = row
    result = list(found.values())
    _label(result)
    return result


def _other_comparison(group: Sequence[Row], row: Row) -> bool:
    same = ("experiment", "workload", "label", "yardstick", "device")
    return any(group[0].get(name) != row.get(name) for name in same) or any(
        one["variant"] == row["variant"] for one in group
    )


def _shared(group: Sequence[Row]) -> dict[str, Any]:
    """The parameters that all rows of a group have with the same value."""
    first, *others = (row["parameters"] for row in group)
    same = {n: v for n, v in first.items() if all(n in one and one[n] == v for one in others)}
    return {name: value for name, value in same.items() if name not in _APART}


def _label(found: Sequence[Comparison]) -> None:
    """Give comparisons of the same label what sets them apart from each other."""
    kind = lambda one: (one.place, one.experiment, one.workload, one.label)  # noqa: E731
    for twins in grouped(found, kind).values():
        for one in twins if len(twins) > 1 else ():
            told = one.parameters.items()
            apart = [f"{n} {v}" for n, v in told if any(two.parameters.get(n) != v for two in twins)]
            one.label = ", ".join([one.label, *apart])


def number(value: float) -> str:
    """Three digits, never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
