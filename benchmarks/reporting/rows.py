"""Rows that were measured: read from files, and put back together as comparisons.

A measurement is known by its place (device and machine), experiment, workload, variant and parameters; of those that
measure the same, the last one counts. Ratios are taken within one run only, because only there variants took turns.
"""

from __future__ import annotations

import dataclasses
import json
import math
from collections.abc import Iterable, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from benchmarks.showing import size

Row = Mapping[str, Any]
Quantiles = tuple[float, float, float]

_APART = (
    "peer",
    "about",
    "curve",
    "curves",
    "setting",
)  # parameters that describe a measurement and do not set it apart
OURS = ("ours", "collector", "dataset", "kernel", "DataLoader, dataset")
_NEEDED = {"experiment": str, "device": str, "machine": dict, "run": str, "date": str}
_MEASURED = {"workload": str, "variant": str, "parameters": dict}


class BadRow(Exception):
    """A line that is no row of a benchmark; the message names file and line."""


@dataclasses.dataclass(frozen=True, order=True)
class Place:
    """What was measured on: figures of two places are never compared in the report.

    device: ``"cpu"`` or the name of a GPU. cpu, cores, gpu: of the machine.
    """

    device: str
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


def read(files: Iterable[Path]) -> list[Row]:
    """The rows of files of JSON lines, the oldest first."""
    found: list[Row] = []
    for file in files:
        for number, line in enumerate(file.read_bytes().splitlines(), 1):
            if not line.strip():
                continue
            try:
                row = json.loads(line)
            except ValueError as error:
                raise BadRow(f"{file}, line {number}: no JSON: {error}") from error
            _check(row, f"{file}, line {number}")
            found.append(row)
    return sorted(found, key=lambda row: str(row["date"]))


def _check(row: Any, where: str) -> None:
    if not isinstance(row, dict):
        raise BadRow(f"{where}: {type(row).__name__} in place of a row of a benchmark")
    needed = _NEEDED | ({} if "left_out" in row else _MEASURED)
    for name, kind in needed.items():
        if not isinstance(row.get(name), kind):
            raise BadRow(f"{where}: expected {name!r} as {kind.__name__}, found {row.get(name)!r}")
    if "left_out" not in row:
        quantiles = row.get("seconds", row.get("amount"))
        if not isinstance(quantiles, dict) or not {"p10", "p50", "p90"} <= set(quantiles):
            raise BadRow(f"{where}: expected 'seconds' or 'amount' with p10, p50 and p90")


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
    return (place(row), *_name(row, row["variant"]), _settings(row["parameters"]))


def _name(row: Row, *more: str) -> tuple[str, ...]:
    return (row["experiment"], row["workload"], *more)


def _settings(parameters: Mapping[str, Any]) -> str:
    return json.dumps({k: v for k, v in parameters.items() if k not in _APART}, sort_keys=True)


def is_ours(row: Row) -> bool:
    """Whether this project did the work; in some experiments all variants are ours."""
    alone = row["experiment"] == "online" and row["workload"].startswith(("read", "loop"))
    return alone or row["variant"].startswith(OURS)


def less_is_better(row: Row) -> bool:
    """Of figures that are no times of batches: whether small ones are good ones."""
    return "at_least" not in row and not str(row.get("unit", "")).endswith("/s")


def speed(row: Row) -> float:
    """What ratios are made of: amount a second, or a figure the right way round; NaN if there is none."""
    if "seconds" in row:
        seconds = row["seconds"]["p50"]
        return float(row.get("bytes", row.get("rows", 1)) / seconds) if seconds else math.nan
    value = _number(row["amount"]["p50"])
    if less_is_better(row):
        return 1 / value if value else math.nan
    return value


def _number(value: Any) -> float:
    return math.nan if value is None else float(value)


def band(row: Row) -> tuple[float, float]:
    """The speeds at the slow and at the fast end of p10 to p90."""
    values = row.get("seconds", row.get("amount"))
    mid = _number(values["p50"])
    ends = [_number(values["p10"]), _number(values["p90"])]
    if "seconds" in row or less_is_better(row):
        factors = [mid / end if end else math.nan for end in ends]
    else:
        factors = [end / mid if mid else math.nan for end in ends]
    slow, fast = sorted(factors)
    return slow * speed(row), fast * speed(row)


@dataclasses.dataclass
class Comparison:
    """Variants that were measured in turn.

    place, experiment, workload, label: of all of them. parameters: what they share. rows: variant -> its last row; some
    may come from an older run than others. runs: run -> variant -> row.
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
        """Ours, the one that others are compared with first.

        It is the one called plainly ``ours``, else what all are relative to, else the kernel with the default number of
        programs, else the first measured.
        """
        names = ("ours", *(row.get("yardstick") for row in self.rows.values()), "kernel, default")
        found = [row for row in self.rows.values() if is_ours(row)]
        return sorted(
            found, key=lambda row: names.index(row["variant"]) if row["variant"] in names else len(names)
        )

    @cached_property
    def limit(self) -> Row | None:
        """The yardstick, if it is not ours."""
        for row in self.rows.values():
            found = self.rows.get(row.get("yardstick", ""))
            if found is not None and not is_ours(found):
                return found
        return None

    @cached_property
    def others(self) -> list[Row]:
        """Peers and plain variants; further yardsticks are left away."""
        yardstick = self.limit["variant"] if self.limit is not None else None
        return [
            row
            for row in self.rows.values()
            if not is_ours(row)
            and (yardstick is None or row["variant"].split(", ")[0] != yardstick.split(", ")[0])
        ]

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
        (slow, fast), (other_slow, other_fast) = band(same), band(other)
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
        first = group[0]
        shared = _shared(group)
        # Figures that are no times stand alone in the file, each with parameters of its own.
        alone = "seconds" not in first
        settings = "" if alone else _settings(shared)
        name = (place(first), *_name(first, first.get("label", "")), settings)
        if name not in found:
            label = first.get("label") or ""
            found[name] = Comparison(place(first), *_name(first), label, shared, {}, {})
        comparison = found[name]
        for row in group:
            comparison.rows.pop(row["variant"], None)
            comparison.rows[row["variant"]] = row
            comparison.runs.setdefault(row["run"], {})[row["variant"]] = row
    result = list(found.values())
    _label(result)
    return result


def _other_comparison(group: Sequence[Row], row: Row) -> bool:
    first = group[0]
    same = ("experiment", "workload", "label", "yardstick", "device")
    return any(first.get(name) != row.get(name) for name in same) or any(
        one["variant"] == row["variant"] for one in group
    )


def _shared(group: Sequence[Row]) -> dict[str, Any]:
    """The parameters that all rows of a group have with the same value."""
    first, *others = (row["parameters"] for row in group)
    return {
        name: value
        for name, value in first.items()
        if name not in _APART and all(name in p and p[name] == value for p in others)
    }


def _label(found: Sequence[Comparison]) -> None:
    """Give comparisons without a label one of the parameters that set them apart."""
    without = [comparison for comparison in found if not comparison.label]
    for comparison in without:
        kin = [c for c in without if (c.place, *_kind(c)) == (comparison.place, *_kind(comparison))]
        texts = (shown(name, comparison.parameters[name]) for name in _differing(comparison, kin))
        comparison.label = ", ".join([comparison.workload, *(text for text in texts if text)])
    for comparison in found:
        name = (comparison.place, comparison.experiment, comparison.workload, comparison.label)
        twins = [c for c in found if (c.place, c.experiment, c.workload, c.label) == name]
        if len(twins) > 1:
            for twin in twins:
                texts = (
                    shown(parameter, twin.parameters[parameter]) for parameter in _differing(twin, twins)
                )
                twin.label = ", ".join([twin.label, *(text for text in texts if text)])


def _differing(comparison: Comparison, kin: Sequence[Comparison]) -> list[str]:
    """The parameters in which it differs from others of its kind."""
    missing = object()
    follows = ("request_bytes", "rows", "requests") if "request" in comparison.parameters else ()
    return [
        name
        for name, value in comparison.parameters.items()
        if name not in follows and any(c.parameters.get(name, missing) != value for c in kin)
    ]


def _kind(comparison: Comparison) -> tuple[str, ...]:
    part = str(comparison.parameters.get("part"))
    return comparison.experiment, comparison.workload, part


def shown(name: str, value: Any) -> str:
    """A parameter as people read it."""
    words = name.replace("_", " ")
    if value is None or value is False:
        return ""
    if value is True:
        return words
    if isinstance(value, int | float):
        if name.endswith("bytes") or name == "request":
            return f"{words.removesuffix(' bytes')} {size(value)}"
        return f"{words} {value:,}" if isinstance(value, int) else f"{words} {value:g}"
    return str(value) if isinstance(value, str) else f"{words} {json.dumps(value)}"
