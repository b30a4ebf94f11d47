"""What all pictures have in common: colours of libraries, lines, bars, and how a figure becomes a PNG."""

from __future__ import annotations

import contextlib
import io
import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from benchmarks.reporting.rows import OURS, Row

Point = tuple[float, float, float]
Bar = tuple[str, float, float, float, str]  # variant, low, median, high, what is written beside it

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


@contextlib.contextmanager
def figure(rows: int, columns: int, size: tuple[float, float], **options: Any) -> Iterator[tuple[Any, Any]]:
    """A figure with that many panels (always a two-dimensional array), closed at the end."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot as plt

    with plt.rc_context(_FONTS):
        made, panels = plt.subplots(
            rows, columns, figsize=size, layout="constrained", squeeze=False, **options
        )
        try:
            yield made, panels
        finally:
            plt.close(made)


@contextlib.contextmanager
def panels(count: int, width: float, height: float, more: float = 0.0) -> Iterator[tuple[Any, list[Any]]]:
    """A figure with so many panels, two in a row, of so many inches each; `more` is the legend's height."""
    columns = min(2, count)
    lines = -(-count // columns)
    with figure(lines, columns, (width * columns, height * lines + more)) as (made, grid):
        for axes in grid.flat[count:]:
            axes.set_axis_off()
        yield made, list(grid.flat[:count])


_WHITE = {"facecolor": "white", "edgecolor": "none"}


def png(made: Any) -> bytes:
    """The figure as a PNG; the same rows give the same bytes."""
    target = io.BytesIO()
    made.savefig(target, format="png", dpi=150, metadata={"Software": None})
    return target.getvalue()


def styles(names: Iterable[str], limits: Iterable[str] = ()) -> dict[str, dict[str, Any]]:
    """How to draw variants: ours in warm colours and thick, a library always in its own, limits grey and dashed."""
    found: dict[str, dict[str, Any]] = {}
    used: dict[str, int] = {}
    for i, name in enumerate(dict.fromkeys(names)):
        mine = name.startswith(OURS)
        if name in set(limits):
            base = _LIMIT
        elif mine:
            base = _WARM[used.get("ours", 0) % len(_WARM)]
            used["ours"] = used.get("ours", 0) + 1
        else:
            base = next((colour for start, colour in _LIBRARIES.items() if name.startswith(start)), "#868e96")
        again = used.get(base, 0)
        used[base] = again + 1
        found[name] = {
            "color": base,
            "marker": _MARKERS[i % len(_MARKERS)],
            "markersize": 5.5 if mine else 4.5,
            "linewidth": 2.2 if mine else 1.3,
            "linestyle": "--" if name in set(limits) else ("-", ":", "-.")[again % 3],
            "zorder": 3 if mine else 2,
        }
    return found


def rates(row: Row) -> Point:
    """p10, p50 and p90 of GB/s where bytes are counted, else of rows or of batches a second."""
    amount = row["bytes"] / 1e9 if "bytes" in row else row.get("rows", 1)
    return tuple(amount / row["seconds"][q] for q in ("p90", "p50", "p10"))  # type: ignore[return-value]


def curve(
    axes: Any, points: Sequence[tuple[float, float, float, float]], name: str, style: Mapping[str, Any]
) -> None:
    """A line of medians over a parameter, and p10 to p90 as a band: points are (value, low, median, high)."""
    if points:
        x, low, mid, high = zip(*sorted(points), strict=True)
        axes.plot(x, mid, label=name, **style)
        axes.fill_between(x, low, high, color=style["color"], alpha=0.1, linewidth=0)


def bars(axes: Any, shown: Sequence[Bar], limit: tuple[str, float] | None, unit: str) -> None:
    """Horizontal bars from top to bottom, with p10 to p90, and the limit as a line."""
    looks = styles(name for name, *_ in shown)
    highest = max([high for *_, high, _ in shown] + ([limit[1]] if limit else []), default=1.0)
    for place, (name, low, mid, high, note) in enumerate(shown):
        axes.barh(place, mid, 0.66, color=looks[name]["color"])
        axes.errorbar(mid, place, xerr=[[mid - low], [high - mid]], color="black", linewidth=1, capsize=2)
        options = {"textcoords": "offset points", "va": "center", "fontsize": 9, "zorder": 5}
        axes.annotate(
            note,
            (high, place),
            (6, 0),
            **options,
            bbox={"boxstyle": "square,pad=0.12", "alpha": 0.85, **_WHITE},
        )
    if limit is not None:
        axes.axvline(limit[1], color=_LIMIT, linestyle="--", linewidth=1.3, zorder=1)
        where: Any = {"xycoords": ("data", "axes fraction"), "textcoords": "offset points"}
        look = {"ha": "center", "va": "bottom", "color": _LIMIT, "fontsize": 9}
        axes.annotate(f"{limit[0]} {number(limit[1])}", (limit[1], 1), (0, 2), **where, **look)
    axes.set_yticks(range(len(shown)), [name for name, *_ in shown])
    axes.set(
        xlabel=unit, xlim=(0, highest * (1.15 + 0.012 * max((len(note) for *_, note in shown), default=0)))
    )
    axes.invert_yaxis()
    axes.tick_params(axis="y", length=0)
    axes.grid(axis="x", alpha=0.3)
    axes.set_axisbelow(True)


def plain(axis: Any, values: Iterable[float] | None = None) -> None:
    """Numbers as people write them on a logarithmic axis; of `values`, ticks there alone."""
    from matplotlib.ticker import LogLocator, NullLocator

    axis.set_minor_locator(NullLocator())
    if values is not None:
        ticks = sorted(set(values))
        powers = all(value >= 10 and math.log10(value).is_integer() for value in ticks)
        texts = [f"$10^{{{math.log10(value):.0f}}}$" if powers else _number(value) for value in ticks]
        axis.set_ticks(ticks, texts)
        return
    low, high = axis.get_view_interval()
    decades = math.log10(high / low) if low > 0 else 0
    axis.set_major_locator(LogLocator(subs=(1, 2, 5) if decades < 3.5 else (1,)))
    axis.set_major_formatter(lambda value, _: _number(value))


def _number(value: float) -> str:
    for least, factor, letter in ((1e6, 1e6, "M"), (1e4, 1e3, "k")):
        if value >= least:
            return f"{value / factor:g}{letter}"
    return f"{value:,.0f}" if value >= 1000 else f"{value:g}"


def number(value: float) -> str:
    """Three digits, never with an exponent."""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"


def goal(axes: Any, value: float, text: str) -> None:
    """A dotted line with its name at the right."""
    axes.axhline(value, color="black", linestyle=":", linewidth=1)
    where: Any = {"xycoords": ("axes fraction", "data"), "textcoords": "offset points"}
    look = {"ha": "right", "va": "bottom", "fontsize": 8, "zorder": 6}
    white = {"boxstyle": "square,pad=0.1", "alpha": 0.8, **_WHITE}
    axes.annotate(text, (0.99, value), (0, 2), **where, **look, bbox=white)


def legend_below(made: Any, panels: Iterable[Any], columns: int = 4) -> None:
    """One legend for all panels, under them."""
    handles: dict[str, Any] = {}
    for axes in panels:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    if handles:
        place = {"loc": "outside lower center", "ncols": min(columns, len(handles))}
        made.legend(handles.values(), handles.keys(), fontsize=9, **place)
