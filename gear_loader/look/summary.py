"""What is in a table, at a glance: lengths, columns with their ranges, and a few episodes, for `gear-loader look`."""

from __future__ import annotations

import contextlib
import dataclasses
import math
import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError, StaleIndexError
from gear_loader.sources.named import load_dataset
from gear_loader.storage import shared_memory
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import Column
from gear_loader.storage.statistics import Moments
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.formatting import size

_BARS = "▁▂▃▄▅▆▇█"
_READ_BYTES = 256 << 20  # of the episodes whose values are looked at
_MOST_TEXT = 200


@dataclasses.dataclass
class ColumnSummary:
    """A column, and what its values of the episodes looked at are like.

    Attributes:
        kind: dtype and shape of a value. per: "step", "trajectory" or "group". count: values.
        measured: "values" or "lengths". nonfinite: elements that are NaN or infinite, which are left out.
        example: the first text or object.
    """

    name: str
    kind: str
    per: str
    count: int = 0
    nonfinite: int = 0
    measured: str = "values"
    example: str = ""

    def take(self, numbers: Array) -> None:
        """Add elements of numbers, or lengths of ragged values and text."""
        finite = numbers[np.isfinite(numbers)] if numbers.dtype.kind == "f" else numbers
        self.nonfinite += numbers.size - finite.size
        if not finite.size:
            return
        self._moments.add(finite.astype(np.float64).reshape(-1, 1))

    @property
    def ranges(self) -> tuple[float | None, float | None, float | None, float | None]:
        """Minimum, mean, maximum and standard deviation of what was taken; None without any."""
        found = self._moments
        if not found.count:
            return None, None, None, None
        return float(found.min[0]), float(found.mean[0]), float(found.max[0]), float(found.std[0])

    def __post_init__(self) -> None:
        self._moments = Moments(1)


@dataclasses.dataclass
class Summary:
    """A table: its name, lengths of all episodes (oldest first), columns, and how many episodes were looked at."""

    name: str
    lengths: Array
    columns: list[ColumnSummary]
    read: int
    bytes: int

    @property
    def steps(self) -> int:
        """Steps of all episodes."""
        return int(self.lengths.sum())


@contextlib.contextmanager
def opened(source: str, most: int | None) -> Iterator[Table]:
    """The table of this name on this machine, of a checkpoint's directory, or of a data set.

    Args:
        most: episodes of a data set that are loaded; None for all.

    Raises:
        GearError: there is no such table, checkpoint or data set, or it cannot be read.
    """
    if source in shared_memory.region_names():
        table = Table.attach(source)
    elif os.path.isfile(os.path.join(source, "manifest.json")):
        table = Table.load(source)
    else:
        table = load_dataset(source, max_trajectories=most, progress=False)
    try:
        yield table
    finally:
        table.close()


def summarise(table: Table, name: str) -> Summary:
    """Look at the columns of all episodes, or of as many, evenly spaced, as make 256 MiB."""
    indices, lengths = table.indices(), table.lengths()
    stats = table.stats()
    step = stats.payload_bytes / max(int(lengths.sum()), 1)
    most = max(1, int(_READ_BYTES / max(step * float(lengths.mean() if len(lengths) else 1), 1)))
    chosen = spread(len(indices), most)
    columns = {each: _described(each, column) for each, column in table.schema.items()}
    read = 0
    for place in chosen:
        with contextlib.suppress(StaleIndexError):
            for each, value in table[int(indices[place])].items():
                _look(columns[each], value, once=table.schema[each].trajectory)
            read += 1
    return Summary(name, lengths, list(columns.values()), read, stats.payload_bytes)


def spread(count: int, most: int) -> list[int]:
    """At most `most` of the places 0 to `count` - 1, evenly spaced, with the first and the last."""
    if count <= most:
        return list(range(count))
    return sorted({round(each) for each in np.linspace(0, count - 1, most).tolist()})


def _described(name: str, column: Column) -> ColumnSummary:
    ragged = column.ragged
    if ragged is None:
        return ColumnSummary(name, f"{column.dtype_name} {list(column.shape) or ''}".strip(), column.per)
    if ragged.coded is not None:
        shape, codec = list(ragged.coded.shape), ragged.coded.codec.name
        return ColumnSummary(name, f"{ragged.coded.dtype_name} {shape} ({codec})", column.per)
    if ragged.kind == "array":
        kind = f"{ragged.dtype_name} {[None, *ragged.shape]}"
        return ColumnSummary(name, kind, column.per, measured="lengths")
    return ColumnSummary(name, ragged.kind, column.per, measured="lengths")


def _look(found: ColumnSummary, value: Any, *, once: bool) -> None:
    """Take the values of an episode into a column's summary."""
    if found.measured == "lengths":
        values = [value] if once else value.tolist() if isinstance(value, Ragged) else value
        found.count += len(values)
        found.example = found.example or next((_text(each) for each in values), "")
        lengths = [len(each) for each in values if isinstance(each, (str, bytes, torch.Tensor))]
        found.take(np.array(lengths, dtype=np.int64))
        return
    for each in value if isinstance(value, list) else [value]:  # images of several sizes are a list
        tensor = each.float() if each.dtype == torch.bfloat16 else each
        found.take(tensor.numpy().reshape(-1))
    found.count += 1 if once else len(value)


def _text(value: Any) -> str:
    if isinstance(value, torch.Tensor):
        return ""
    text = value if isinstance(value, str) else repr(value)
    return text if len(text) <= _MOST_TEXT else f"{text[:_MOST_TEXT]} ..."


def bars(lengths: Array, count: int = 40) -> str:
    """A histogram of lengths in one line."""
    if not len(lengths):
        return ""
    found = np.histogram(lengths, bins=min(count, max(int(lengths.max() - lengths.min()) + 1, 1)))[0]
    return "".join(_BARS[math.ceil(each / found.max() * 7)] for each in found.tolist())


def print_summary(found: Summary) -> None:
    """Print a summary to the terminal."""
    from rich.console import Console
    from rich.table import Table as Grid
    from rich.text import Text

    from gear_loader.utils.formatting import printable

    console = Console()
    if not console.is_terminal:
        console = Console(width=10_000)
    lengths = found.lengths
    console.print(
        Text(f"{found.name}: {len(lengths):,} episodes, {found.steps:,} steps, {size(found.bytes)}"),
        style="bold",
    )
    if not len(lengths):
        return
    console.print(
        Text(
            f"Lengths: {lengths.min():,} to {lengths.max():,}, median {np.median(lengths):,.0f}  {bars(lengths)}"
        )
    )
    if found.read < len(lengths):
        console.print(Text(f"Ranges are of {found.read:,} episodes, evenly spaced."))
    grid = Grid(box=None, pad_edge=False, header_style="bold")
    for title in ("COLUMN", "KIND", "PER", "MIN", "MEAN", "MAX", "DEVIATION", "NOTE"):
        right = title in ("MIN", "MEAN", "MAX", "DEVIATION")
        grid.add_column(title, justify="right" if right else "left", overflow="fold")
    for each in found.columns:
        cells = (each.name, each.kind, each.per, *map(number, each.ranges), note(each))
        grid.add_row(*(Text(printable(cell, _MOST_TEXT)) for cell in cells))
    console.print(grid)


def number(value: float | None) -> str:
    """A number in at most about eight characters."""
    return "–" if value is None else f"{value:.4g}"


def note(column: ColumnSummary) -> str:
    """What else is to be said about a column."""
    parts = []
    if not column.count:
        parts.append("no values")
    if column.measured == "lengths":
        parts.append("lengths")
    if column.nonfinite:
        parts.append(f"{column.nonfinite:,} NaN or infinite")
    if column.example:
        parts.append(column.example)
    return ", ".join(parts)


def episode_numbers(count: int, wanted: Sequence[int], most: int) -> list[int]:
    """The episodes to be shown: those wanted, else `most`, evenly spaced.

    Raises:
        SchemaError: there is no such episode.
    """
    if wrong := [each for each in wanted if not 0 <= each < count]:
        raise SchemaError(f"Episode {wrong[0]} was asked for; expected a number from 0 to {count - 1}.")
    return list(wanted) or spread(count, most)
