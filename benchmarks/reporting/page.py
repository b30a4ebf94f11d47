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
from benchmarks.reporting.rows import Comparison, Place, Row, is_ours, speed

_HERE = Path(__file__).parent


def render(
    rows: Sequence[Row], found: Sequence[Comparison], pictures: Sequence[Picture], *, quick: bool
) -> str:
    """The page as text."""
    import jinja2

    environment = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["png"] = lambda png: "data:image/png;base64," + base64.b64encode(png).decode()
    environment.filters["times"] = tables.times
    template = environment.get_template("page.html.jinja")
    return template.render(_content(rows, found, pictures, quick))


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
    return {"place": place, "picture": picture, "text": sentence(chosen) if chosen is not None else ""}


def sentence(comparison: Comparison) -> str:
    """The headline's figures, machine and date in words."""
    mine = comparison.ours[0]
    ratios = [
        (comparison.ratio(mine, other), other) for other in sorted(comparison.others, key=speed, reverse=True)
    ]
    beside = [f"{tables.times(ratio)} {other['variant']}" for ratio, other in ratios if not math.isnan(ratio)]
    text = f"Batches of {findings.BATCH} whole trajectories, drawn by priority, come through DataLoader at "
    text += f"{tables.amount(mine)} (p10 to p90: {tables.scatter(mine)})"
    if beside:
        text += f": {', '.join(beside[:-1]) + ' and ' if beside[1:] else ''}{beside[-1]}"
    if comparison.limit is not None:
        limit = comparison.limit
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
    if not there:
        return None
    parts = []
    for place in sorted({comparison.place for comparison in there}):
        chosen = [comparison for comparison in there if comparison.place == place]
        drawn = [p for p in pictures if (p.section, p.place) == (experiment.name, place)]
        found_here = {"matrices": tables.matrices(chosen), "rows": tables.every_row(chosen)}
        parts.append({"place": place, "pictures": drawn, **found_here})
    return {"about": experiment, "parts": parts}


def _growth(growth: findings.Growth) -> dict[str, Any]:
    """A growth as lines of a table: from the smallest to the largest value."""
    lines = []
    for variant, points in growth.lines.items():
        (least, *_), (most, *_) = points[0], points[-1]
        start, end = points[0][2], points[-1][2]
        line: dict[str, Any] = {"variant": variant, "span": f"{least:,.0f} to {most:,.0f}"}
        line |= {"start": f"{start:,.3g}", "end": f"{end:,.3g}"}
        line["factor"] = f"× {end / start:,.3g}" if most > least else "one value only"
        lines.append({**line, "ours": is_ours({"experiment": "", "workload": "", "variant": variant})})
    return {"about": growth, "lines": lines}
