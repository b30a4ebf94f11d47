"""What rows say: what is lost to others, which targets are met, how cost grows."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
from rich.text import Text

from benchmarks.reporting.rows import Comparison, Place, Row, speed
from benchmarks.showing import verdict

BATCH = 256


@dataclasses.dataclass(frozen=True)
class Target:
    """One figure that was aimed for.

    place, experiment, label, variant: of what. aim: the target in words. reached: the figure in the target's unit, with
    p10 and p90. share: how much of the target that is; 1 or more is met. verdict: ``"met"``, ``"missed"`` or
    ``"noisy"``.
    """

    place: Place
    experiment: str
    label: str
    variant: str
    aim: str
    reached: str
    share: float
    verdict: str


@dataclasses.dataclass(frozen=True)
class Loss:
    """Another library, or plain torch, is faster than one of our ways.

    place, experiment, workload: where. other, ours: variants. first: whether it is the way that others are compared
    with first. lost, settings: comparisons in which the other is faster, and in which both are. clear: of those lost,
    where p10 to p90 do not overlap. worst: the least ratio of speeds, ours over the other's. where: label of that
    comparison. unit: what a ratio is of. every: label -> ratio, of those lost.
    """

    place: Place
    experiment: str
    workload: str
    other: str
    ours: str
    first: bool
    lost: int
    settings: int
    clear: int
    worst: float
    where: str
    unit: str
    every: tuple[tuple[str, float], ...]


def headline(found: Iterable[Comparison]) -> Comparison | None:
    """W1 through `DataLoader`, drawn by priority, 256 at a time."""
    for comparison in found:
        kind = (comparison.experiment, comparison.workload, comparison.parameters.get("part", "batches"))
        if kind == ("single-server", "W1", "batches") and comparison.parameters.get("batch") == BATCH:
            return comparison if comparison.ours else None
    return None


def losses(found: Iterable[Comparison]) -> list[Loss]:
    """Whatever is faster than ours, the worst first; ways that are not compared first come last."""
    pairs: dict[tuple[Any, ...], list[tuple[Comparison, Row, Row]]] = {}
    for comparison in found:
        for mine in comparison.ours:
            for other in comparison.others:
                where = (comparison.place, comparison.experiment, comparison.workload)
                name = (*where, other["variant"], mine["variant"], mine is comparison.ours[0])
                if not math.isnan(comparison.ratio(mine, other)):
                    pairs.setdefault(name, []).append((comparison, mine, other))
    result = []
    for name, cases in pairs.items():
        lost = [(c.ratio(mine, other), c, mine, other) for c, mine, other in cases]
        lost = sorted((case for case in lost if case[0] < 1), key=lambda case: case[0])
        if lost:
            worst, least, mine, _ = lost[0]
            clear = sum(c.beyond_scatter(mine, other) for _, c, mine, other in lost)
            unit = "speed" if "seconds" in mine else str(mine.get("unit", ""))
            every = tuple((c.label, ratio) for ratio, c, _, _ in lost)
            result.append(Loss(*name, len(lost), len(cases), clear, worst, least.label, unit, every))
    return sorted(result, key=lambda loss: (not loss.first, loss.worst))


def by_way(found: Iterable[Loss]) -> list[tuple[Loss, list[Loss]]]:
    """Losses of one of our ways in one workload together: the worst, and all of them."""
    ways: dict[tuple[Any, ...], list[Loss]] = {}
    for loss in found:
        ways.setdefault((loss.place, loss.experiment, loss.workload, loss.ours), []).append(loss)
    return [(min(way, key=lambda loss: loss.worst), way) for way in ways.values()]


def tally(found: Iterable[Comparison]) -> tuple[int, int]:
    """In how many pairs of our first way and another the other is slower; and how many pairs there are."""
    ratios = [
        comparison.ratio(comparison.ours[0], other)
        for comparison in found
        if comparison.ours
        for other in comparison.others
    ]
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    return sum(ratio >= 1 for ratio in ratios), len(ratios)


def targets(found: Iterable[Comparison]) -> list[Target]:
    """Every target in the rows: missed ones first, the furthest off at the top."""
    result = [
        target
        for comparison in found
        for row in comparison.rows.values()
        for target in _targets(comparison, row)
    ]
    order = {"missed": 0, "noisy": 1, "met": 2}
    return sorted(result, key=lambda target: (order[target.verdict], target.share))


def _targets(comparison: Comparison, row: Row) -> Iterator[Target]:
    def target(aim: str, reached: str, shares: Sequence[float]) -> Target:
        words = _verdict(shares)
        names = (comparison.place, comparison.experiment, comparison.label, row["variant"])
        return Target(*names, aim, reached, shares[1], words)

    for name, aim in row.get("targets", {}).items():
        ratios = row["ratio"] if name == row["yardstick"] else row["ratios"].get(name)
        if ratios is not None:
            low, mid, high = (ratios[q] for q in ("p10", "p50", "p90"))
            reached = f"{mid:.2f} × ({low:.2f} – {high:.2f})"
            yield target(f"at least {aim:g} × {name}", reached, [value / aim for value in (low, mid, high)])
    if "limit" in row:
        low, mid, high = (row["seconds"][q] for q in ("p10", "p50", "p90"))
        reached = f"{duration(mid)} ({duration(low)} – {duration(high)})"
        yield target(
            f"at most {duration(row['limit'])}", reached, [row["limit"] / v for v in (high, mid, low)]
        )
    if "at_most" in row or "at_least" in row:
        values = [row["amount"][q] for q in ("p10", "p50", "p90")]
        if any(value is None or math.isnan(value) or value <= 0 for value in values):
            return
        low, mid, high = values
        reached = f"{mid:.3g} ({low:.3g} – {high:.3g}) {row['unit']}"
        if "at_most" in row:
            yield target(
                f"at most {row['at_most']:g}", reached, [row["at_most"] / v for v in (high, mid, low)]
            )
        if "at_least" in row:
            yield target(f"at least {row['at_least']:g}", reached, [v / row["at_least"] for v in values])


def _verdict(shares: Sequence[float]) -> str:
    """The rule of `benchmarks.showing.verdict`, for values of which only p10, p50 and p90 are known."""
    values = np.repeat(shares, (2, 7, 2))  # eleven values that have just these quantiles
    return Text.from_markup(verdict(values, 1.0)).plain


@dataclasses.dataclass(frozen=True)
class Growth:
    """How the speed of ours, and of the quickest other, changes along one parameter.

    place: where. along: what grows. work: what is measured. unit: of the figures. lines: variant -> [(value, low, mid,
    high)], sorted; ours come first. limits: which of the lines are limits.
    """

    place: Place
    along: str
    work: str
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]]
    limits: Sequence[str]


@dataclasses.dataclass(frozen=True)
class _Along:
    """Where to look for a growth: rows of an experiment, with that parameter, and the others held."""

    along: str
    work: str
    experiment: str
    parameter: str
    wanted: Callable[[Comparison], bool]
    unit: str


def _is(workload: str, **held: Any) -> Callable[[Comparison], bool]:
    def wanted(comparison: Comparison) -> bool:
        return comparison.workload == workload and all(
            comparison.parameters.get(name) == value for name, value in held.items()
        )

    return wanted


_GROWTHS = (
    _Along(
        *("number of items N", "one cycle of 1,024: draw by priority, update"),
        *("select", "items", _is("cycle", batch=1024), "µs"),
    ),
    _Along(
        *("batch, trajectories", "W1 through DataLoader, prioritized"),
        *("batch-size", "batch", _is("W1"), "GB/s"),
    ),
    _Along("batch, trajectories", "W1, gathering", "collect", "batch", _is("W1"), "GB/s"),
    _Along(
        "bytes of a row", "gathering 256 rows, kernel", "collect", "row_bytes", _is("rows", batch=256), "GB/s"
    ),
    _Along(
        *("writer processes", "adding whole trajectories one by one"),
        *("online", "writers", _is("whole"), "1,000/s"),
    ),
    _Along(
        *("nodes", "W1, batches of 256 a rank, drawn over all shards, sockets", "multi-server", "nodes"),
        lambda c: (
            _is("W1", part="batches", batch=256, network="processes")(c)
            and c.parameters.get("carrier") in ("socket", "none")
        ),
        "GB/s",
    ),
)


def growths(found: Sequence[Comparison]) -> list[Growth]:
    """Along each parameter that takes several values; `collect` stands in where `batch-size` has no rows."""
    result: list[Growth] = []
    for there in sorted({comparison.place for comparison in found}):
        for along in _GROWTHS:
            if any(growth.along == along.along and growth.place == there for growth in result):
                continue
            chosen = [
                comparison
                for comparison in found
                if (comparison.place, comparison.experiment) == (there, along.experiment)
                and along.wanted(comparison)
                and along.parameter in comparison.parameters
                and comparison.ours
            ]
            if len({comparison.parameters[along.parameter] for comparison in chosen}) > 1:
                limits = list(dict.fromkeys(c.limit["variant"] for c in chosen if c.limit is not None))[:1]
                lines = _lines(chosen, along, limits)
                result.append(Growth(there, along.along, along.work, along.unit, lines, limits))
    return result


def _lines(
    chosen: Sequence[Comparison], along: _Along, limits: Sequence[str]
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Ours that stands first, the limit, and of the others the one that is the quickest in most settings."""
    first = chosen[0].ours[0]["variant"]
    wins: dict[str, int] = {}
    for comparison in chosen:
        if comparison.others:
            best = max(comparison.others, key=speed)["variant"]
            wins[best] = wins.get(best, 0) + 1
    names = dict.fromkeys([first, *limits, *sorted(wins, key=lambda name: -wins[name])[:1]])
    lines = {}
    for name in names:
        points = [
            (float(c.parameters[along.parameter]), *_figures(c.rows[name], along.unit))
            for c in chosen
            if name in c.rows
        ]
        lines[name] = sorted(points)
    return lines


def _figures(row: Row, unit: str) -> tuple[float, float, float]:
    low, mid, high = (row["seconds"][q] for q in ("p10", "p50", "p90"))
    if unit == "µs":
        return low * 1e6, mid * 1e6, high * 1e6
    amount = row["bytes"] / 1e9 if unit == "GB/s" else row.get("rows", 1) / 1e3
    return amount / high, amount / mid, amount / low


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    for unit, factor in (("s", 1), ("ms", 1e3), ("µs", 1e6)):
        if seconds * factor >= 1 or unit == "µs":
            break
    value = seconds * factor
    return f"{value:,.0f} {unit}" if value >= 100 else f"{value:.3g} {unit}"
