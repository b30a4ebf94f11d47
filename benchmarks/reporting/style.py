"""What all pictures have in common: colours of libraries, lines, bars, and how a figure becomes a PNG."""

from __future__ import annotations

import io
import math
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from benchmarks.reporting.rows import OURS, Point, Row, number, per
from benchmarks.showing import size

Draw = Callable[[Any], object]  # into the axes of a panel
Value = tuple[float, float, float, float]  # of a parameter; low, median and high there
Bar = tuple[str, Point, str]  # variant, low, median and high, what is written beside it

_WARM = ("#c1121f", "#f77f00", "#8f2d56", "#e0a100", "#e56b6f", "#7a1f12", "#d98c5f", "#b5179e")
_LIBRARIES = {
    "Reverb, in process": "#7fb069",
    "Reverb, Writer": "#7fb069",
    "Reverb": "#2a9d8f",
    "TorchRL sampler": "#8ecae6",
    "TorchRL, slices": "#8ecae6",
    "TorchRL": "#457b9d",
    "cpprb": "#a98467",
    "Tianshou": "#7b2cbf",
    "DataLoader": "#6d597a",
    "fixed rows": "#adb5bd",
    "cumsum": "#5f6f52",
    "x[idx]": "#48639c",
    **dict.fromkeys(("index_select", "plain torch", "torch", "staged"), "#1d3557"),
}
_LIMIT = "#6c757d"
_MARKERS = "osD^vP*X<>"
_FONTS = {"font.size": 10, "axes.titlesize": 10.5, "axes.titlelocation": "left", "axes.titlepad": 9}
_FONTS |= dict.fromkeys(("axes.spines.top", "axes.spines.right", "legend.frameon"), False)


def picture(
    panels: Sequence[Draw],
    width: float,
    heights: float | Sequence[float],
    *,
    columns: int = 2,
    more: float = 0.0,
    legend: int = 0,
    named: int | None = None,
    **options: Any,
) -> bytes | None:
    """A PNG of panels of so many inches each, or None without any; the same rows give the same bytes.

    heights: of all, or of each of those below each other. columns: panels beside each other. more: inches that a legend
    below needs: of so many columns, for the first panels, or all.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    if not panels:
        return None
    columns = min(columns, len(panels))
    lines = -(-len(panels) // columns)
    if isinstance(heights, Sequence):
        options["gridspec_kw"] = {"height_ratios": heights}
        height = sum(heights) + 0.4 * lines
    else:
        height = heights * lines + more
    with plt.rc_context(_FONTS):
        shape = {"figsize": (width * columns, height), "layout": "constrained", "squeeze": False}
        made, grid = plt.subplots(lines, columns, **shape, **options)
        try:
            for axes in grid.flat[len(panels) :]:
                axes.set_axis_off()
            for axes, draw in zip(grid.flat, panels, strict=False):
                draw(axes)
            if legend:
                _legend_below(made, grid.flat[:named], legend)
            target = io.BytesIO()
            made.savefig(target, format="png", dpi=150, metadata={"Software": None})
            return target.getvalue()
        finally:
            plt.close(made)


def _legend_below(made: Any, panels: Iterable[Any], columns: int) -> None:
    """One legend for all panels, under them."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        place = {"loc": "outside lower center", "ncols": min(columns, len(handles))}
        made.legend(handles.values(), handles.keys(), fontsize=9, **place)


def styles(names: Iterable[str], limits: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """How to draw variants: ours in warm colours and thick, a library always in its own, limits grey and dashed."""
    found: dict[str, dict[str, Any]] = {}
    used: Counter[str] = Counter()
    for i, name in enumerate(dict.fromkeys(names)):
        mine, limit = name.startswith(OURS), name in set(limits)
        base = next((colour for start, colour in _LIBRARIES.items() if name.startswith(start)), "#868e96")
        if limit:
            base = _LIMIT
        elif mine:
            base = _WARM[used["ours"] % len(_WARM)]
            used["ours"] += 1
        found[name] = {
            "color": base,
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 5.5 if mine else 4.5,
            "linewidth": 2.2 if mine else 1.3,
            "linestyle": "--" if limit else ("-", ":", "-.")[used[base] % 3],
            "zorder": 3 if mine else 2,
        }
        used[base] += 1
    return found


def rates(row: Row) -> Point:
    """GB/s where bytes are counted, else rows or batches a second, from slow to fast."""
    return per(row["bytes"] / 1e9 if "bytes" in row else row.get("rows", 1), row["seconds"])


def curve(
    axes: Any,
    points: Iterable[Value],
    name: str,
    style: Mapping[str, Any],
    alpha: float = 0.1,
) -> None:
    """A line of medians over a parameter, and p10 to p90 as a band: points are (value, low, median, high)."""
    if points := sorted(points):
        x, low, mid, high = zip(*points, strict=True)
        axes.plot(x, mid, label=name, **style)
        axes.fill_between(x, low, high, color=style["color"], alpha=alpha, linewidth=0)


def note(axes: Any, text: str, place: tuple[float, float], offset: tuple[float, float], **look: Any) -> None:
    """A text on white, so many points from a place."""
    box = {"boxstyle": "square,pad=0.1", "alpha": 0.8, "facecolor": "white", "edgecolor": "none"}
    box |= look.pop("bbox", {})
    axes.annotate(text, place, offset, textcoords="offset points", bbox=box, **look)


def bars(axes: Any, shown: Sequence[Bar], limit: tuple[str, float] | None, unit: str) -> None:
    """Horizontal bars from top to bottom, with p10 to p90, and the limit as a line."""
    looks = styles(name for name, *_ in shown)
    highest = max([high for _, (*_, high), _ in shown] + ([limit[1]] if limit else []), default=1.0)
    dense = {"boxstyle": "square,pad=0.12", "alpha": 0.85}
    for place, (name, (low, mid, high), text) in enumerate(shown):
        axes.barh(place, mid, 0.66, color=looks[name]["color"])
        axes.errorbar(mid, place, xerr=[[mid - low], [high - mid]], color="black", linewidth=1, capsize=2)
        note(axes, text, (high, place), (6, 0), va="center", fontsize=9, zorder=5, bbox=dense)
    if limit is not None:
        axes.axvline(limit[1], color=_LIMIT, linestyle="--", linewidth=1.3, zorder=1)
        where: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        look = {"ha": "center", "va": "bottom", "color": _LIMIT, "fontsize": 9}
        axes.annotate(f"{limit[0]} {number(limit[1])}", (limit[1], 1), (0, 2), **where, **look)
    axes.set_yticks(range(len(shown)), [name for name, *_ in shown])
    longest = max((len(text) for *_, text in shown), default=0)
    axes.set(xlabel=unit, xlim=(0, highest * (1.15 + 0.012 * longest)))
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def standing(axes: Any, place: float, width: float, values: Point, **look: Any) -> None:
    """A standing bar with its whisker."""
    low, mid, high = values
    axes.bar(place, mid, width, **look)
    axes.errorbar(place, mid, [[mid - low], [high - mid]], color="black", linewidth=1)


def lines(
    axes: Any,
    series: Mapping[str, Iterable[Value]],
    looks: Mapping[str, Mapping[str, Any]],
    *,
    ticks: Iterable[float] | None = None,
    logarithmic: str = "xy",
    **labels: Any,
) -> None:
    """A panel of curves, name -> points, with ticks at these values."""
    for name, points in series.items():
        curve(axes, points, name, looks[name])
    axes.set(**labels, **{f"{axis}scale": "log" for axis in logarithmic})
    if ticks is not None:
        plain(axes.xaxis, ticks)
    if "y" in logarithmic:
        plain(axes.yaxis)
    axes.grid(alpha=0.3)


def size_ticks(axes: Any, values: Iterable[float], **look: Any) -> None:
    """Ticks at these numbers of bytes."""
    ticks = list(values)
    axes.set_xticks(ticks, [size(value) for value in ticks], **look)
    axes.minorticks_off()


def plain(axis: Any, values: Iterable[float] | None = None) -> None:
    """Numbers as people write them on a logarithmic axis; of `values`, ticks there alone."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_minor_locator(NullLocator())
    if values is not None:
        ticks = sorted(set(values))
        powers = all(value >= 10 and math.log10(value).is_integer() for value in ticks)
        texts = [f"$10^{{{math.log10(value):.0f}}}$" if powers else _short(value) for value in ticks]
        axis.set_ticks(ticks, texts)
        return
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 else 0
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3.5 else (1,)))
    axis.set_major_formatter(lambda value, _: _short(value))


def _short(value: float) -> str:
    for least, factor, letter in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / factor:g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def goal(axes: Any, value: float, text: str) -> None:
    """A dotted line with its name at the right."""
    axes.axhline(value, color="black", linestyle=":", linewidth=1)
    look = {"ha": "right", "va": "bottom", "fontsize": 8, "zorder": 6}
    note(axes, text, (0.99, value), (0, 2), xycoords=("axes fraction", "data"), **look)
