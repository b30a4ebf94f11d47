"""Episodes of rows of Arrow: rows that are steps, with a column that says of which episode; or rows that are episodes.

Rows of an episode may lie anywhere. An episode is complete with the last of its rows, and episodes come in the order in
which they are complete::

    episode   a a a a b b b | c d c d c d c d        the rows of a are a slice of a batch
    complete        a     b               c d        rows of c and d are kept meanwhile: at most `OPEN_BYTES`,
                                                     else all rows are read several times
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SourceError
from gear_loader.sources._optional import require
from gear_loader.sources.arrow_columns import (
    ArrowField,
    Place,
    features_of,
    leaf_array,
    leaves_of,
    refuse_nulls,
    values_of,
)
from gear_loader.sources.arrow_rows import Rows, readable
from gear_loader.sources.episodes import Columns, Episode, EpisodeReader, listing, requested, select
from gear_loader.storage.schema import Column

OPEN_BYTES = 2**30
"""Bytes of rows that are kept until their episodes are complete, about."""
KEYS = ("episode_index", "episode_id", "episode")
"""Columns that are taken for that of the episode, if none is named."""
_STEP = "\n"  # no name of a column


class StepRows(EpisodeReader):
    """Episodes of rows that are steps.

    Args:
        rows: the rows. episode: the column that says to which episode a row belongs. step: a column by which the rows
            of an episode are sorted; else they keep their order. once: columns with one value in each episode.
        columns, keep_float64, allow_nonfinite: as of `load`.
    """

    def __init__(
        self,
        rows: Rows,
        episode: str | None,
        step: str | None,
        once: Collection[str],
        *,
        columns: Columns,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        self._rows, self._nonfinite, self._once = rows, allow_nonfinite, frozenset(once)
        leaves = leaves_of(rows.schema, features_of(rows.schema))
        key = leaves[_key(rows, leaves, episode)]
        chosen = select(requested(columns, [n for n in leaves if n != key.name]), list(leaves), rows.source)
        self._leaves = {name: leaves[role] for name, role in chosen.items()}
        check_once(self._once, self._leaves, rows.source)
        self._sort = None
        if step is not None:
            self._sort = leaves[next(iter(select({step: step}, list(leaves), rows.source)))]
            if self._sort.kind != "number":
                raise SourceError(f"{rows.source}: step={step!r} is {self._sort.type}; expected numbers.")
        self._key = key
        self._numbers: dict[Any, int] = {}  # of an episode in the column
        self._codes, lengths = self._scan(key)
        schema, payload = planned(rows.source, self._leaves, self._once, keep_float64)
        super().__init__(rows.source, lengths, schema, payload=payload)
        self.starts, self._parts, self._skipped = self._find_starts()

    def _find_starts(self) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """`starts`, and of each the part of the rows where it begins, and the rows before that part."""
        first = np.full(len(self._last), len(self._codes))
        np.minimum.at(first, self._codes, np.arange(len(self._codes)))
        first = np.minimum.accumulate(first[::-1])[::-1]  # of this episode and all that follow
        begins = np.cumsum([0, *self._rows.counts[:-1]])
        numbers = np.searchsorted(first, begins)
        parts = np.flatnonzero((numbers < len(first)) & (np.diff(numbers, append=len(first)) > 0))
        return numbers[parts], parts, begins[parts]

    def _scan(self, key: ArrowField) -> tuple[np.ndarray, np.ndarray]:
        """The episode of each row, numbered as they are complete, and the lengths of episodes."""
        scanned = [leaf for leaf in self._leaves.values() if leaf.scan.needed]
        pieces: list[np.ndarray] = []
        known = self._numbers
        row = 0

        def number(value: Any) -> int:
            if value != value:
                raise SourceError(
                    f"{self._rows.source}: the episode, column {key.name!r}, is NaN; expected a number in each row."
                )
            return known.setdefault(value, len(known))

        for batch in self._rows.batches(top(self._rows, key, *scanned)):
            with readable(self._rows.source):
                refuse_nulls(
                    self._array(batch, key),
                    row_place(self._rows.source, key, np.arange(row, row + len(batch))),
                )
                pieces.append(self._coded(batch, number))
                for leaf in scanned:
                    place = row_place(self._rows.source, leaf, np.arange(row, row + len(batch)))
                    leaf.scan.see(self._array(batch, leaf), place)
            row += len(batch)
        if not row:
            raise SourceError(f"{self._rows.source} has no rows; expected at least one.")
        codes = np.concatenate(pieces)
        last = np.zeros(len(known), dtype=np.int64)
        np.maximum.at(last, codes, np.arange(len(codes)))
        rank = np.empty(len(known), dtype=np.int64)
        rank[np.argsort(last)] = np.arange(len(known))
        codes = rank[codes]
        self._numbers = {value: int(rank[number]) for value, number in known.items()}
        self._last = np.sort(last)
        return codes, np.bincount(codes)

    def _coded(self, batch: Any, number: Callable[[Any], int]) -> np.ndarray:
        """The number of each row's episode."""
        array = self._array(batch, self._key)
        coded = array if hasattr(array, "dictionary") else array.dictionary_encode()
        indices = coded.indices.to_numpy()
        used = np.flatnonzero(
            np.bincount(indices, minlength=len(coded.dictionary))
        )  # a category may have no rows
        numbers = np.full(len(coded.dictionary), -1, dtype=np.int64)
        values = coded.dictionary.take(require("pyarrow", "Reading rows of Arrow").array(used)).to_pylist()
        numbers[used] = [number(value) for value in values]
        found: np.ndarray = numbers[indices]
        return found

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        for begin, end in self._passes():
            if max(begin, first) < min(end, last):
                yield from self._read(max(begin, first), min(end, last))

    def _passes(self) -> list[tuple[int, int]]:
        """The episodes of each pass over the rows: all, if the rows to be kept meanwhile are few enough."""
        fixed = sum(column.step_bytes for column in self.schema.values())
        most = max(1, int(OPEN_BYTES / (fixed + (self.payload or 0) / len(self._codes))))
        ends = np.cumsum(self.lengths)
        kept = self._last + 1 - (ends - self.lengths)  # rows seen of episodes that are not complete yet
        if kept.max() <= max(most, self.lengths.max()):
            return [(0, len(self))]
        passes, first = [], 0
        while first < len(self):
            begin = int(ends[first - 1]) if first else 0
            last = max(first + 1, int(np.searchsorted(ends, begin + most, side="right")))
            passes.append((first, last))
            first = last
        return passes

    def _read(self, first: int, last: int) -> Iterator[Episode]:
        """The episodes `first` to `last` - 1, by one pass over the rows."""
        kept: dict[int, list[dict[str, Any]]] = {}
        left = self.lengths[first:last].copy()
        start = int(np.searchsorted(self.starts, first, side="right")) - 1
        row = int(self._skipped[start])
        sort = [] if self._sort is None else [self._sort]
        columns = top(self._rows, self._key, *self._leaves.values(), *sort)
        for batch in self._rows.batches(columns, int(self._parts[start])):
            with readable(self.source):
                codes = self._coded(batch, lambda value: self._numbers.get(value, -1))
            if not np.array_equal(codes, self._codes[row : row + len(batch)]):
                raise self._changed()
            places = np.flatnonzero((codes >= first) & (codes < last))
            places = places[np.argsort(codes[places], kind="stable")]
            if len(places):
                if len(places) < len(batch) or (np.diff(places) < 0).any():
                    with readable(self.source):
                        batch = batch.take(require("pyarrow", "Reading rows of Arrow").array(places))
                values, owners = self._values(batch, places + row), codes[places]
                bounds = np.flatnonzero(np.diff(owners)) + 1
                fresh = []
                for begin, end in zip([0, *bounds.tolist()], [*bounds.tolist(), len(owners)], strict=True):
                    code = int(owners[begin])
                    kept.setdefault(code, []).append({n: v[begin:end] for n, v in values.items()})
                    left[code - first] -= end - begin
                    if not left[code - first]:
                        yield self._joined(code, kept.pop(code))
                    else:
                        fresh.append(code)
                for code in fresh:  # not the whole batch
                    kept[code][-1] = {name: _owned(value) for name, value in kept[code][-1].items()}
            row += len(codes)
            if last < len(self) and not left.any():
                return
        if kept or left.any():
            raise self._changed()

    def _array(self, batch: Any, leaf: ArrowField) -> Any:
        return leaf_array(batch.column(self._rows.schema.field(leaf.path[0]).name), leaf)

    def _changed(self) -> SourceError:
        return SourceError(f"{self.source} has other rows than before; expected data that stay as they are.")

    def _values(self, batch: Any, rows: np.ndarray) -> dict[str, Any]:
        with readable(self.source):
            values = {
                name: values_of(
                    self._array(batch, leaf),
                    leaf,
                    self.schema[name],
                    row_place(self.source, leaf, rows),
                    allow_nonfinite=self._nonfinite,
                )
                for name, leaf in self._leaves.items()
            }
            if self._sort is not None:
                array = self._array(batch, self._sort)
                refuse_nulls(array, row_place(self.source, self._sort, rows))
                values[_STEP] = array.to_numpy(zero_copy_only=False)
        return values

    def _joined(self, number: int, parts: list[dict[str, Any]]) -> Episode:
        values = (
            parts[0]
            if len(parts) == 1
            else {name: _concatenated([p[name] for p in parts]) for name in parts[0]}
        )
        if self._sort is not None:
            steps = values.pop(_STEP)
            if (steps[1:] < steps[:-1]).any():
                order = np.argsort(steps, kind="stable")
                values = {
                    n: v[order] if isinstance(v, np.ndarray) else [v[i] for i in order.tolist()]
                    for n, v in values.items()
                }
        for name in self._once:
            values[name] = self._single(number, name, values[name])
        return Episode(values)

    def _single(self, number: int, name: str, values: Any) -> Any:
        """The value that all steps of an episode have."""
        for step in range(1, len(values)):
            if not _equal(values[0], values[step]):
                raise SourceError(
                    f"{self.source}, episode {number}, step {step}: column {self._leaves[name].name!r} has another "
                    "value than at step 0; expected one in an episode, as the column is per trajectory."
                )
        return values[0]


def _equal(one: Any, other: Any) -> bool:
    if isinstance(one, (np.ndarray, np.generic)):
        return bool(np.array_equal(one, other, equal_nan=one.dtype.kind == "f"))
    return bool(one == other)


def _owned(values: Any) -> Any:
    """The same values in memory of their own."""
    if isinstance(values, np.ndarray):
        return values.copy()
    return [value.copy() if isinstance(value, np.ndarray) else value for value in values]


def _concatenated(parts: list[Any]) -> Any:
    if isinstance(parts[0], np.ndarray):
        return np.concatenate(parts)
    return [value for part in parts for value in part]


def row_place(source: str, leaf: ArrowField, rows: np.ndarray) -> Place:
    def place(row: int | None) -> str:
        return f"{source}{'' if row is None else f', row {rows[row]}'}: column {leaf.name!r}"

    return place


def top(rows: Rows, *leaves: ArrowField) -> list[str]:
    """The top-level columns of some fields, in the order of the schema."""
    return [rows.schema.field(i).name for i in sorted({leaf.path[0] for leaf in leaves})]


def planned(
    source: str, leaves: Mapping[str, ArrowField], once: Collection[str], keep_float64: bool
) -> tuple[dict[str, Column], int]:
    """The columns of a table for fields that were scanned, and the bytes of all their values of any length."""
    schema: dict[str, Column] = {}
    payload = 0
    for name, leaf in leaves.items():
        column = leaf.scan.column(f"{source}: column {leaf.name!r}", keep_float64=keep_float64)
        payload += leaf.scan.payload(column)
        schema[name] = per_trajectory(column) if name in once else column
    return schema, payload


def per_trajectory(column: Column) -> Column:
    """The same column with a value for each trajectory."""
    values = column.ragged
    if values is None:
        return Column(column.dtype, column.shape, per="trajectory")
    if values.coded is not None:
        return Column(values.coded.dtype, values.coded.shape, per="trajectory", codec=values.coded.codec)
    if values.kind == "array":
        return Column(values.dtype, (None, *values.shape), per="trajectory")
    return Column({"str": str, "bytes": bytes, "object": object}[values.kind], per="trajectory")


def check_once(once: Collection[str], leaves: Mapping[str, ArrowField], source: str) -> None:
    """Raise SourceError unless columns per trajectory are some of those taken, and not all."""
    unknown = [name for name in once if name not in leaves]
    if unknown or (leaves and all(name in once for name in leaves)):
        raise SourceError(
            f"{source}: per_trajectory={sorted(once)!r} was given, and the columns {listing(leaves)} are taken; "
            "expected some of them, and not all."
        )


def _key(rows: Rows, leaves: Mapping[str, ArrowField], episode: str | None) -> str:
    """The column of the episode."""
    if episode is None:
        episode = next((name for name in KEYS if name in leaves), None)
        if episode is None:
            raise SourceError(
                f"{rows.source} has no column {' or '.join(map(repr, KEYS))}, which says to which episode a row "
                f"belongs; it has {listing(leaves)}. Name it: episode=...; or rows='episodes', if each row is a "
                "whole episode."
            )
    if episode not in leaves:
        select({episode: episode}, list(leaves), rows.source)
    found = leaves.get(episode)
    if found is None or found.kind not in ("number", "str", "bytes"):
        kind = "a struct" if found is None else str(found.type)
        raise SourceError(f"{rows.source}: episode={episode!r} is {kind}; expected numbers or text.")
    return episode
