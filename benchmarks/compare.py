"""``python -m benchmarks compare A B``: the same measurements twice, side by side.

A and B are each a file of JSON lines, a run or a commit whose rows are in benchmarks/results, or ``FILE@RUN`` (run or
commit). Rows are matched by device, experiment, workload, variant and parameters. Speeds are compared as they are, and
relative to the yardstick of their own run, which takes out how fast the machine was that day, if that is not ours.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from benchmarks.harness import RESULTS
from benchmarks.reporting.rows import (
    BadRow,
    Row,
    comparisons,
    grouped,
    is_ours,
    key,
    measured,
    place,
    read,
    speed,
    speeds,
)
from benchmarks.reporting.tables import amount
from benchmarks.showing import grid, standard_console

_SHORTEST = 4  # letters of a run or a commit


@dataclasses.dataclass(frozen=True)
class Pair:
    """One measurement in A and in B. yardstick: whether both are relative to the same one, which is not ours."""

    label: str
    before: Row
    after: Row
    yardstick: bool

    @property
    def ratio(self) -> float:
        return speed(self.after) / speed(self.before)

    @property
    def relative(self) -> float:
        """The same relative to the yardstick of its own run; NaN without one."""
        if not self.yardstick:
            return math.nan
        return float(self.after["ratio"]["p50"] / self.before["ratio"]["p50"])

    @property
    def judged(self) -> float:
        """The ratio that counts: relative to the yardstick where there is one."""
        return self.relative if self.yardstick else self.ratio

    @property
    def scatters(self) -> bool:
        """Whether p10 to p90 of both overlap."""
        rows = (self.before, self.after)
        both = [(r["ratio"]["p10"], r["ratio"]["p90"]) if self.yardstick else speeds(r)[::2] for r in rows]
        return bool(max(low for low, _ in both) <= min(high for _, high in both))

    @property
    def verdict(self) -> str:
        """``"faster"``, ``"slower"`` or ``"same within scatter"``."""
        if math.isnan(self.judged):
            return "no figure"
        if self.scatters:
            return "same within scatter"
        return "faster" if self.judged > 1 else "slower"


def command(
    a: Annotated[
        str, typer.Argument(metavar="A", help="A file, a run, a commit, or FILE@RUN: what was before.")
    ],
    b: Annotated[str, typer.Argument(metavar="B", help="The same: what is now.")],
    fail_above: Annotated[
        float | None,
        typer.Option(
            min=1.0,
            help="End with status 1 if a row of ours takes more than so many times as long, relative to its "
            "yardstick and beyond scatter.",
        ),
    ] = None,
) -> None:
    """Compare two runs, row by row."""
    console = standard_console()
    say = functools.partial(console.print, highlight=False, markup=False)
    before, after = _rows(a, "A"), _rows(b, "B")
    found = pairs(before, after)
    if not found:
        raise typer.BadParameter(
            f"none of the {len(measured(before))} rows of {a} measures what one of the {len(measured(after))} rows of "
            f"{b} does, on the same device."
        )
    for one, other in dict.fromkeys((str(place(pair.before)), str(place(pair.after))) for pair in found):
        if one != other:
            text = f"The machines differ: A on {one}; B on {other}. Trust what is relative to the yardstick."
            say(text, style="yellow")
    if any(
        (row.get("configuration") or {}).get("quick") for pair in found for row in (pair.before, pair.after)
    ):
        say("Rows of --quick are no figures.", style="yellow")
    for experiment, some in grouped(found, lambda pair: str(pair.after["experiment"])).items():
        console.print(_table(experiment, some))
    for name, rows in ((a, before), (b, after)):
        if alone := len(_last(rows)) - len(found):
            say(f"{alone} rows of {name} have no counterpart", style="dim")
    slower = [pair for pair in found if is_ours(pair.after) and pair.verdict == "slower"]
    worse = [pair for pair in slower if fail_above is not None and 1 / pair.judged > fail_above]
    if worse:
        names = "; ".join(f"{pair.label}: {pair.after['variant']} ({1 / pair.judged:.2f})" for pair in worse)
        say(f"more than {fail_above:g} times as slow as before: {names}", style="bold red")
        raise typer.Exit(1)


def pairs(before: Sequence[Row], after: Sequence[Row]) -> list[Pair]:
    """What both have measured on the same device, in the order of `after`."""
    old, new = _last(before), _last(after)
    labels, limits = _labels(after), _labels(before)
    found = []
    for name, row in new.items():
        if name in old:
            label, limit = labels.get(id(row), (row["workload"], ""))
            _, limit_before = limits.get(id(old[name]), ("", ""))
            common = limit == limit_before != "" and limit != row["variant"]
            found.append(Pair(label, old[name], row, common))
    return found


def _last(rows: Sequence[Row]) -> dict[Any, Row]:
    """The last row of each measurement by what it measures and on which device; machines may differ."""
    return {(row["device"], *key(row)[1:]): row for row in measured(rows)}


def _labels(rows: Sequence[Row]) -> Mapping[int, tuple[str, str]]:
    """Row -> label of its comparison, and the yardstick there if it is not ours."""
    found: dict[int, tuple[str, str]] = {}
    for comparison in comparisons(rows):
        limit = comparison.limit["variant"] if comparison.limit is not None else ""
        for run in comparison.runs.values():
            for row in run.values():
                found[id(row)] = (comparison.label, limit if row.get("yardstick") == limit else "")
    return found


def _rows(name: str, which: str) -> list[Row]:
    file, at, run = name.rpartition("@")
    if Path(name).is_file():
        files, run = [Path(name)], ""
    elif len(run) < _SHORTEST:
        text = f"{run!r} is no file, and too short for a run or a commit: {_SHORTEST} letters at least."
        raise typer.BadParameter(text, param_hint=which)
    elif at and not Path(file).is_file():
        raise typer.BadParameter(f"{file} is not there.", param_hint=which)
    else:
        files = [Path(file)] if at else sorted(RESULTS.glob("*.jsonl"))
    try:
        rows = read(files)
    except BadRow as error:
        raise typer.BadParameter(str(error), param_hint=which) from error
    chosen = [row for row in rows if any(str(row.get(k) or "").startswith(run) for k in ("run", "commit"))]
    if not measured(chosen):
        what = f" by a run or commit {run!r}" if run else ""
        where = ", ".join(map(str, files))
        raise typer.BadParameter(f"nothing measured{what} is in {where}.", param_hint=which)
    return chosen


def _table(experiment: str, found: Sequence[Pair]) -> Any:
    colours = {"faster": "green", "slower": "red"}
    lines = []
    for pair in found:
        ratios = [f"{pair.ratio:.2f}", f"{pair.relative:.2f}" if pair.yardstick else ""]
        verdict = f"[{colours.get(pair.verdict, 'dim')}]{pair.verdict}[/]"
        figures = [_figure(pair.before), _figure(pair.after), *ratios]
        lines.append([pair.label, pair.after["variant"], *figures, verdict])
    heads = ("comparison", "variant", "A", "B", "B ÷ A", "÷ yardstick", "")
    return grid(f"{experiment}: speeds of B over A, above 1 is faster", heads, lines, texts=2)


def _figure(row: Row) -> str:
    """Without the long units that figures have which are no times."""
    return amount({**row, "unit": ""} if "amount" in row else row)
