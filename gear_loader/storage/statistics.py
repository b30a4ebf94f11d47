"""Statistics of the values in a table's columns, gathered while episodes are added."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import Array, shown

QUANTILES = (0.01, 0.1, 0.25, 0.5, 0.75, 0.9, 0.99)
_MOST_ELEMENTS = 4096
_SAMPLE = 2**17  # most rows of which quantiles are
_SAMPLE_BYTES = 2**26
_FIELDS = ("mean", "std", "min", "max")


@dataclasses.dataclass(frozen=True)
class ColumnStatistics:
    """Of one column.

    Attributes:
        count: values: steps, or trajectories of a column per trajectory.
        mean, std, min, max: float64 ``[*shape]`` of each element of a value; std is that of the whole (``ddof=0``). Of
            columns with more than 4,096 elements ``[shape[-1]]``: of all values with that last index, such as the
            channel of an image.
        quantiles: level -> float64 of the same shape; of all values up to 131,072, beyond that of so many random ones
            (a rank is then off by 0.003 at most, 19 times in 20); of values with more than 64 elements of fewer.
    """

    count: int
    mean: Array
    std: Array
    min: Array
    max: Array
    quantiles: Mapping[float, Array]


class Statistics(Mapping[str, ColumnStatistics]):
    """Column -> `ColumnStatistics`, of columns of numbers and flags of a fixed shape.

    They are of the episodes that one `gear_loader.load_dataset` has added, saved and loaded with the table, and known
    in the process that has added or loaded them. `gear_loader.transforms.Normalize` takes them.
    """

    def __init__(self, columns: Mapping[str, ColumnStatistics]) -> None:
        self._columns = dict(columns)

    def __getitem__(self, name: str) -> ColumnStatistics:
        return self._columns[name]

    def __iter__(self) -> Iterator[str]:
        return iter(self._columns)

    def __len__(self) -> int:
        return len(self._columns)

    def __repr__(self) -> str:
        return f"<Statistics of {', '.join(f'{name!r} ({each.count:,})' for name, each in self.items())}>"

    def to_json(self) -> dict[str, Any]:
        """The statistics as JSON's objects."""
        return {
            name: {
                "count": each.count,
                **{field: _listed(getattr(each, field)) for field in _FIELDS},
                "quantiles": [[level, _listed(values)] for level, values in each.quantiles.items()],
            }
            for name, each in self.items()
        }

    @classmethod
    def from_json(cls, given: Any) -> Statistics:
        """The inverse of `to_json`. Checks every value, because the source may be untrusted.

        Raises:
            SchemaError: they are not valid.
        """
        try:
            columns = {}
            for name, each in given.items():
                count = each["count"]
                parts = {field: _array(each[field]) for field in _FIELDS}
                quantiles = {float(level): _array(values) for level, values in each["quantiles"]}
                shapes = {array.shape for array in (*parts.values(), *quantiles.values())}
                if type(count) is not int or count < 1 or len(shapes) != 1:
                    raise ValueError("count or shapes")
                columns[str(name)] = ColumnStatistics(count, **parts, quantiles=quantiles)
            return cls(columns)
        except (TypeError, ValueError, LookupError, AttributeError, OverflowError) as error:
            raise SchemaError(f"{shown(given)} are no statistics of columns: {error}.") from error


def _listed(values: Array) -> Any:
    """Numbers as JSON has them, which has neither NaN nor infinity."""
    flat = [value if math.isfinite(value) else repr(value) for value in values.ravel().tolist()]
    return [list(values.shape), flat]


def _array(given: Any) -> Array:
    shape, flat = given
    return np.array([float(value) for value in flat], dtype=np.float64).reshape(shape)


class StatisticsOf:
    """Gathers `Statistics` of episodes, piece by piece.

    Args:
        schema: the columns; those of any length are left out, and complex ones.
    """

    def __init__(self, schema: Mapping[str, Column]) -> None:
        columns = {n: c for n, c in schema.items() if c.ragged is None and not c.late}
        self._columns = {name: _Gathered(column) for name, column in columns.items()}

    def add(self, episodes: Sequence[Mapping[str, Any]]) -> None:
        """Take episodes as `Table.extend` does."""
        for name, gathered in self._columns.items():
            values = [np.asarray(_numbers(episode[name])) for episode in episodes]
            gathered.add(np.stack(values) if gathered.once else np.concatenate(values))

    def result(self) -> Statistics:
        """The statistics of what was added."""
        return Statistics({name: each.result() for name, each in self._columns.items() if each.count})


def _numbers(values: Any) -> Any:
    return values if isinstance(values, np.ndarray) or np.isscalar(values) else values.float().numpy()


class Moments:
    """Of rows of numbers, element by element, exact but for rounding (Chan et al., 1982).

    Attributes:
        count: rows. mean, squares, min, max: float64 [width]; squares: sums of squared differences from the mean.
    """

    def __init__(self, width: int) -> None:
        self.count = 0
        self.mean = self.squares = self.min = self.max = np.zeros(width)

    def add(self, rows: Array) -> None:
        """Take rows, float64 [n, width], n at least 1."""
        with np.errstate(invalid="ignore", over="ignore"):
            mean = rows.mean(0)
            squares = np.square(rows - mean).sum(0)
            before, count = self.count, len(rows)
            if not before:
                self.mean, self.squares = mean, squares
                self.min, self.max = rows.min(0), rows.max(0)
            else:
                delta = mean - self.mean
                self.mean = self.mean + delta * (count / (before + count))
                self.squares = self.squares + squares + np.square(delta) * (before * count / (before + count))
                self.min, self.max = np.minimum(self.min, rows.min(0)), np.maximum(self.max, rows.max(0))
        self.count = before + count

    @property
    def std(self) -> Array:
        """Standard deviation (``ddof=0``), of one row at least."""
        with np.errstate(invalid="ignore"):
            found: Array = np.sqrt(self.squares / self.count)
        return found


class _Gathered:
    """Of one column: moments, and a random sample of rows for quantiles."""

    def __init__(self, column: Column) -> None:
        elements = math.prod(column.shape)
        self.once = column.trajectory
        self.count = 0
        self._shape = tuple(column.shape) if elements <= _MOST_ELEMENTS else tuple(column.shape[-1:])
        self._width = max(1, math.prod(self._shape))
        self._most = max(64, min(_SAMPLE, _SAMPLE_BYTES // (8 * self._width)))
        self._moments = Moments(self._width)  # of rows: `count`, times the elements that are taken together
        self._keys = np.empty(0, dtype=np.uint64)
        self._rows = np.empty((0, self._width))

    def add(self, values: Array) -> None:
        self.count += len(values)
        step = max(1, (2**24) // (8 * max(1, math.prod(values.shape[1:]))))
        for first in range(0, len(values), step):
            self._add(values[first : first + step].reshape(-1, self._width).astype(np.float64))

    def _add(self, rows: Array) -> None:
        before = self._moments.count
        self._moments.add(rows)
        keys = _hashes(np.arange(before, before + len(rows), dtype=np.uint64))
        if len(self._keys) == self._most:
            kept = keys < self._keys.max()
            keys, rows = keys[kept], rows[kept]
        self._keys, self._rows = np.concatenate((self._keys, keys)), np.concatenate((self._rows, rows))
        if len(self._keys) > self._most:
            order = np.argpartition(self._keys, self._most)[: self._most]
            self._keys, self._rows = self._keys[order], self._rows[order]

    def result(self) -> ColumnStatistics:
        with np.errstate(invalid="ignore"):
            levels = np.quantile(self._rows, QUANTILES, axis=0)
        found = self._moments
        parts = (found.mean, found.std, found.min, found.max)
        mean, std, low, high = (part.reshape(self._shape) for part in parts)
        quantiles = {level: row.reshape(self._shape) for level, row in zip(QUANTILES, levels, strict=True)}
        return ColumnStatistics(self.count, mean, std, low, high, quantiles)


def _hashes(numbers: Array) -> Array:
    """A random-looking key of each number (splitmix64): those with the lowest keys are a random sample."""
    with np.errstate(over="ignore"):
        mixed = (numbers + np.uint64(1)) * np.uint64(0x9E3779B97F4A7C15)
        mixed = (mixed ^ (mixed >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
        mixed = (mixed ^ (mixed >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    found: Array = mixed ^ (mixed >> np.uint64(31))
    return found
