"""The page: everything that was found, put into one HTML file that needs nothing else."""

from __future__ import annotations

import base64
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from benchmarks.experiments import EXPERIMENTS
from benchmarks.reporting import findings, provenance, tables
from benchmarks.reporting.pictures import Picture
from benchmarks.reporting.rows import OURS, Comparison, Place, Row, grouped, speed

_HERE = Path(__file__).parent


def render(
    rows: Sequence[Row], found: Sequence[Comparison], pictures: Sequence[Picture], *, quick: bool
) -> str:
    """The page as text."""
    import jinja2

    options: dict[str, Any] = {"autoescape": True, "undefined": jinja2.StrictUndefined}
    options |= {"trim_blocks": True, "lstrip_blocks": True}
    environment = jinja2.Environment(loader=jinja2.FileSystemLoader(_HERE), **options)
    environment.filters["png"] = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
    environment.filters["times"] = tables.times
    return environment.get_template("page.html.jinja").render(_content(rows, found, pictures, quick))


def _content(
    rows: Sequence[Row], found: Sequence[Comparison], pictures: Sequence[Picture], quick: bool
) -> dict[str, Any]:
    places = sorted({comparison.place for comparison in found})
    losses = findings.losses(found)
    won, pairs = findings.tally(found)
    aims = findings.targets(found)
    dates = sorted(str(row["date"])[:10] for c in found for row in c.rows.values())
    return {
        "quick": quick,
        "places": places,
        "several": len(places) > 1,
        "on_gpu": any(place.is_gpu for place in places),
        "first_date": dates[0],
        "last_date": dates[-1],
        "count": sum(len(comparison.rows) for comparison in found),
        "headlines": [_headline(place, found, pictures) for place in places],
        "first_losses": [loss for loss in losses if loss.first],
        "other_losses": findings.by_way(loss for loss in losses if not loss.first),
        "losses": losses,
        "won": won,
        "pairs": pairs,
        "targets": aims,
        "missed": [aim for aim in aims if aim.verdict != "met"],
        "verdicts": {word: sum(aim.verdict == word for aim in aims) for word in ("met", "missed", "noisy")},
        "experiments": [one for one in (_experiment(e, found, pictures) for e in EXPERIMENTS) if one],
        "growths": [_growth(growth) for growth in findings.growths(found)],
        "growth_pictures": [picture for picture in pictures if picture.section == "growth"],
        "runs": provenance.runs(found),
        "left": provenance.left_out(rows, found),
        "not_measured": provenance.not_measured(found),
    }


def _headline(place: Place, found: Sequence[Comparison], pictures: Sequence[Picture]) -> dict[str, Any]:
    chosen = findings.headline([comparison for comparison in found if comparison.place == place])
    picture = next((p for p in pictures if (p.section, p.place) == ("headline", place)), None)
    return {"place": place, "picture": picture, "text": _sentence(chosen) if chosen is not None else ""}


def _sentence(comparison: Comparison) -> str:
    """The headline's figures, machine and date in words."""
    mine, limit = comparison.ours[0], comparison.limit
    others = sorted(comparison.others, key=speed, reverse=True)
    ratios = [(comparison.ratio(mine, other), other["variant"]) for other in others]
    beside = [f"{tables.times(ratio)} {name}" for ratio, name in ratios if not math.isnan(ratio)]
    text = f"Batches of {findings.BATCH} whole trajectories, drawn by priority, come through DataLoader at "
    text += f"{tables.amount(mine)} (p10 to p90: {tables.scatter(mine)})"
    if beside:
        text += f": {', '.join(beside[:-1]) + ' and ' if beside[1:] else ''}{beside[-1]}"
    if limit is not None:
        share = comparison.ratio(mine, limit)
        text += f". The limit, {limit['variant']} of as many bytes, is {tables.amount(limit)}"
        text += "" if math.isnan(share) else f", of which that is {share:.0%}"
    commit = str(mine.get("commit") or "unknown")[:12]
    dirty = " with uncommitted changes" if mine.get("dirty") else ""
    return f"{text}. Measured on {comparison.place}, {str(mine['date'])[:10]}, commit {commit}{dirty}."


def _experiment(
    experiment: Any, found: Sequence[Comparison], pictures: Sequence[Picture]
) -> dict[str, Any] | None:
    there = [comparison for comparison in found if comparison.experiment == experiment.name]
    parts = [
        {
            "place": place,
            "pictures": [p for p in pictures if (p.section, p.place) == (experiment.name, place)],
            "matrices": tables.matrices(chosen),
            "rows": tables.every_row(chosen),
        }
        for place, chosen in sorted(grouped(there, lambda comparison: comparison.place).items())
    ]
    return {"about": experiment, "parts": parts} if parts else None


def _growth(growth: findings.Growth) -> dict[str, Any]:
    """A growth as lines of a table: from the smallest to the largest value."""
    lines = []
    for variant, points in growth.lines.items():
        (least, _, start, _), (most, _, end, _) = points[0], points[-1]
        line: dict[str, Any] = {"variant": variant, "span": f"{least:,.0f} to {most:,.0f}"}
        line |= {"start": f"{start:,.3g}", "end": f"{end:,.3g}", "ours": variant.startswith(OURS)}
        line["factor"] = f"× {end / start:,.3g}" if most > least else "one value only"
        lines.append(line)
    return {"about": growth, "lines": lines}
