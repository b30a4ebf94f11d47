"""What benchmarks print with: tables, quantiles, sizes."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}


def quantiles(values: np.ndarray) -> dict[str, float]:
    """The quantiles that a row stores, by name."""
    return {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}


def number(value: float) -> str:
    """Three or four digits, never with an exponent where it is large."""
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def spread(values: np.ndarray, form: str = "") -> tuple[str, str]:
    """Median, and p10 to p90, as texts."""
    texts = (format(value, form) if form else number(value) for value in quantiles(values).values())
    low, mid, high = texts
    return mid, f"{low} – {high}"


def size(count: float) -> str:
    """A number of bytes as people read it, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def grid(title: str, heads: Sequence[str], lines: Iterable[Sequence[str]], texts: int = 1) -> Grid:
    """A table in the benchmarks' style."""
    table = Grid(
        title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )
    for number, head in enumerate(heads):
        table.add_column(head, justify="left" if number < texts else "right", no_wrap=number == 0)
    for line in lines:
        table.add_row(*map(escape, line[:-1]), line[-1])
    return table


def standard_console() -> Console:
    """The terminal, or 120 columns of plain text."""
    console = Console()
    return console if console.is_terminal else Console(width=120)
