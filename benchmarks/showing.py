"""What benchmarks print with: tables, quantiles, sizes, verdicts."""

from __future__ import annotations

import numpy as np
from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.markup import escape
from rich.table import Table as Grid

__all__ = ["grid", "quantiles", "size", "standard_console", "verdict"]

_QUANTILES = {"p10": 0.1, "p50": 0.5, "p90": 0.9}
_SCATTER = 1.3  # ratios from 0.9 to 1.2 do not tell whether 1.0 is reached


def verdict(ratios: np.ndarray, target: float) -> str:
    """Whether the median of ratios reaches its target, with rich's colours; or that they scatter too much to tell."""
    low, mid, high = quantiles(ratios).values()
    if low < target <= high and high > _SCATTER * low:
        return "[yellow]noisy[/]"
    return "[green]met[/]" if mid >= target else "[red]missed[/]"


def quantiles(values: np.ndarray) -> dict[str, float]:
    """The quantiles that a row stores, by name."""
    return {name: float(np.quantile(values, q)) for name, q in _QUANTILES.items()}


def size(count: float) -> str:
    """A number of bytes as people read it, in powers of 1024."""
    for unit in ("B", "KiB", "MiB", "GiB"):
        if count < 1024 or unit == "GiB":
            break
        count /= 1024
    return f"{count:.4g} {unit}"


def grid(title: str) -> Grid:
    """An empty table in the benchmarks' style."""
    return Grid(
        title=escape(title), title_justify="left", title_style="bold", box=SIMPLE_HEAD, pad_edge=False
    )


def standard_console() -> Console:
    console = Console()
    return console if console.is_terminal else Console(width=120)
