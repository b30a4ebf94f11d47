"""What rows say: what is lost to others, which targets are met, how cost grows."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

from benchmarks.reporting.rows import Comparison, Place, Point, Row, grouped, number, per, speed, three

BATCH = 256
_SCATTER = 1.3  # shares from 0.9 to 1.2 do not tell whether 1 is reached


class Target(NamedTuple):
    """One figure that was aimed for."""

    place: Place
    experiment: str
    label: str
    variant: str
    aim: str  # in words
    reached: str  # in the target's unit, with p10 and p90
    share: float  # how much of the target that is; 1 or more is met
    verdict: str  # "met", "missed" or "noisy"


class Loss(NamedTuple):
    """Another library, or plain torch, is faster than one of our ways."""

    place: Place
    experiment: str
    workload: str
    other: str
    ours: str
    first: bool  # whether it is the way that others are compared with first
    lost: int  # comparisons in which the other is faster
    settings: int  # and those in which both are
    clear: int  # of those lost, where p10 to p90 do not overlap
    worst: float  # the least ratio, ours over the other's
    where: str  # label of that comparison
    unit: str  # what a ratio is of
    every: tuple[tuple[str, float], ...]  # (label, ratio) of those lost


def headline(found: Iterable[Comparison]) -> Comparison | None:
    """W1 through `DataLoader`, drawn by priority, 256 at a time."""
    for comparison in found:
        told = comparison.parameters
        part = (comparison.experiment, comparison.workload, told.get("part", "batches"), told.get("batch"))
        if part == ("single-server", "W1", "batches", BATCH):
            return comparison if comparison.ours else None
    return None


def losses(found: Iterable[Comparison]) -> list[Loss]:
    """Whatever is faster than ours, the worst first; ways that are not compared first come last."""
    pairs: dict[tuple[Any, ...], list[tuple[float, Comparison, Row, Row]]] = {}
    for comparison in found:
        kind = (comparison.place, comparison.experiment, comparison.workload)
        for mine in comparison.ours:
            for other in comparison.others:
                name = (*kind, other["variant"], mine["variant"], mine is comparison.ours[0])
                ratio = comparison.ratio(mine, other)
                if not math.isnan(ratio):
                    pairs.setdefault(name, []).append((ratio, comparison, mine, other))
    result = []
    for name, cases in pairs.items():
        lost = sorted((case for case in cases if case[0] < 1), key=lambda case: case[0])
        if lost:
            worst, least, mine, _ = lost[0]
            clear = sum(c.beyond_scatter(mine, other) for _, c, mine, other in lost)
            unit = "speed" if "seconds" in mine else str(mine.get("unit", ""))
            every = tuple((c.label, ratio) for ratio, c, _, _ in lost)
            result.append(Loss(*name, len(lost), len(cases), clear, worst, least.label, unit, every))
    return sorted(result, key=lambda loss: (not loss.first, loss.worst))


def by_way(found: Iterable[Loss]) -> list[tuple[Loss, list[Loss]]]:
    """Losses of one of our ways in one workload together: the worst, and all of them."""
    ways = grouped(found, lambda loss: (loss.place, loss.experiment, loss.workload, loss.ours)).values()
    return [(min(way, key=lambda loss: loss.worst), way) for way in ways]


def tally(found: Iterable[Comparison]) -> tuple[int, int]:
    """In how many pairs of our first way and another the other is slower; and how many pairs there are."""
    ratios = [c.ratio(c.ours[0], other) for c in found if c.ours for other in c.others]
    ratios = [ratio for ratio in ratios if not math.isnan(ratio)]
    return sum(ratio >= 1 for ratio in ratios), len(ratios)


def targets(found: Iterable[Comparison]) -> list[Target]:
    """Every target in the rows: missed ones first, the furthest off at the top."""
    result = [target for c in found for row in c.rows.values() for target in _targets(c, row)]
    order = {"missed": 0, "noisy": 1, "met": 2}
    return sorted(result, key=lambda target: (order[target.verdict], target.share))


def _targets(comparison: Comparison, row: Row) -> Iterator[Target]:
    def target(aim: str, reached: str, shares: Sequence[float]) -> Target:
        names = (comparison.place, comparison.experiment, comparison.label, row["variant"])
        return Target(*names, aim, reached, shares[1], verdict(shares))

    for name, aim in row.get("targets", {}).items():
        ratios = row["ratio"] if name == row["yardstick"] else row["ratios"].get(name)
        if ratios is not None:
            low, mid, high = three(ratios)
            reached = f"{mid:.2f} × ({low:.2f} – {high:.2f})"
            yield target(f"at least {aim:g} × {name}", reached, [value / aim for value in (low, mid, high)])
    if "limit" in row:
        short, mid, long = map(duration, three(row["seconds"]))
        shares = per(row["limit"], row["seconds"])
        yield target(f"at most {duration(row['limit'])}", f"{mid} ({short} – {long})", shares)
    if "at_most" in row or "at_least" in row:
        values = three(row["amount"])
        if any(value is None or math.isnan(value) or value <= 0 for value in values):
            return
        low, mid, high = values
        reached = f"{mid:.3g} ({low:.3g} – {high:.3g}) {row['unit']}"
        if "at_most" in row:
            yield target(f"at most {row['at_most']:g}", reached, per(row["at_most"], row["amount"]))
        if "at_least" in row:
            yield target(f"at least {row['at_least']:g}", reached, [v / row["at_least"] for v in values])


def verdict(shares: Sequence[float]) -> str:
    """Whether the median share of a target reaches 1; or that p10, p50 and p90 scatter too much to tell."""
    low, mid, high = shares
    if low < 1 <= high and high > _SCATTER * low:
        return "noisy"
    return "met" if mid >= 1 else "missed"


class Growth(NamedTuple):
    """How the speed of ours, and of the quickest other, changes along one parameter."""

    place: Place
    along: str  # what grows
    work: str  # what is measured
    unit: str
    lines: Mapping[str, Sequence[tuple[float, float, float, float]]]  # sorted; ours comes first
    limits: Sequence[str]  # which of the lines are limits


_GROWTHS: dict[tuple[str, str, str], tuple[str, str, str, Mapping[str, Any]]] = {
    # experiment, workload, parameter: what grows, work, unit, other parameters that are held
    ("select", "cycle", "items"): (
        *("number of items N", "one cycle of 1,024: draw by priority, update", "µs"),
        {"batch": 1024},
    ),
    ("batch-size", "W1", "batch"): ("batch, trajectories", "W1 through DataLoader, prioritized", "GB/s", {}),
    ("collect", "W1", "batch"): ("batch, trajectories", "W1, gathering", "GB/s", {}),
    ("collect", "rows", "row_bytes"): (
        "bytes of a row",
        "gathering 256 rows, kernel",
        "GB/s",
        {"batch": 256, "step_bytes": 128},
    ),
    ("online", "whole", "writers"): (
        *("writer processes", "adding whole trajectories one by one", "1,000/s"),
        {},
    ),
    ("multi-server", "W1", "nodes"): (
        *("nodes", "W1, batches of 256 a rank, drawn over all shards, sockets", "GB/s"),
        {"part": "batches", "batch": 256, "network": "processes", "carrier": ("socket", "none")},
    ),
}


def growths(found: Sequence[Comparison]) -> list[Growth]:
    """Along each parameter that takes several values; `collect` stands in where `batch-size` has no rows."""
    result: dict[tuple[Place, str], Growth] = {}
    for place, there in sorted(grouped(found, lambda comparison: comparison.place).items()):
        for (experiment, workload, parameter), (along, work, unit, held) in _GROWTHS.items():
            wanted = {name: value if isinstance(value, tuple) else (value,) for name, value in held.items()}
            chosen = [
                c
                for c in there
                if (c.experiment, c.workload) == (experiment, workload)
                and parameter in c.parameters
                and c.ours
                if all(c.parameters.get(name) in values for name, values in wanted.items())
            ]
            if len({c.parameters[parameter] for c in chosen}) > 1 and (place, along) not in result:
                limits = list(dict.fromkeys(c.limit["variant"] for c in chosen if c.limit is not None))[:1]
                lines = _lines(chosen, parameter, unit, limits)
                result[place, along] = Growth(place, along, work, unit, lines, limits)
    return list(result.values())


def _lines(
    chosen: Sequence[Comparison], parameter: str, unit: str, limits: Sequence[str]
) -> dict[str, list[tuple[float, float, float, float]]]:
    """Ours that stands first, the limit, and of the others the one that is the quickest in most settings."""
    wins = Counter(max(c.others, key=speed)["variant"] for c in chosen if c.others)
    names = dict.fromkeys([chosen[0].ours[0]["variant"], *limits, *(name for name, _ in wins.most_common(1))])
    return {
        name: sorted(
            (float(c.parameters[parameter]), *_figures(c.rows[name], unit)) for c in chosen if name in c.rows
        )
        for name in names
    }


def _figures(row: Row, unit: str) -> Point:
    if unit == "µs":
        low, mid, high = (value * 1e6 for value in three(row["seconds"]))
        return low, mid, high
    return per(row["bytes"] / 1e9 if unit == "GB/s" else row.get("rows", 1) / 1e3, row["seconds"])


def duration(seconds: float) -> str:
    """Seconds as people read them."""
    if seconds is None or not math.isfinite(seconds):
        return "–"
    unit, factor = "µs", 1e6
    if seconds * 1e3 >= 1:
        unit, factor = ("s", 1) if seconds >= 1 else ("ms", 1e3)
    return f"{number(seconds * factor)} {unit}"
