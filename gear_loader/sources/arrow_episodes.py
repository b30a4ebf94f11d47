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
    inner_of,
    is_list,
    leaf_array,
    leaves_of,
    refuse_nulls,
    storage,
    stored_array,
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
                    self._array(batch, key), _place(self._rows.source, key, np.arange(row, row + len(batch)))
                )
                pieces.append(self._coded(batch, number))
                for leaf in scanned:
                    place = _place(self._rows.source, leaf, np.arange(row, row + len(batch)))
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
                    _place(self.source, leaf, rows),
                    allow_nonfinite=self._nonfinite,
                )
                for name, leaf in self._leaves.items()
            }
            if self._sort is not None:
                array = self._array(batch, self._sort)
                refuse_nulls(array, _place(self.source, self._sort, rows))
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


def _place(source: str, leaf: ArrowField, rows: np.ndarray) -> Place:
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


class EpisodeRows(EpisodeReader):
    """Episodes of rows that are episodes: lists are columns with a value for each step, others are per trajectory.

    Args:
        rows: the rows. once: lists that are one value of an episode. Others: as of `StepRows`.
    """

    def __init__(
        self,
        rows: Rows,
        once: Collection[str],
        *,
        columns: Columns,
        keep_float64: bool,
        allow_nonfinite: bool,
    ) -> None:
        pa = require("pyarrow", "Reading rows of Arrow")
        self._rows, self._nonfinite = rows, allow_nonfinite
        fields, features = list(rows.schema), features_of(rows.schema)
        wanted = dict(requested(columns, [])) if columns is not None else {}
        apart = {wanted.get(name, name) for name in once}
        listed = [is_list(storage(f.type)) and f.name not in apart for f in fields]
        self._lists = [f.name for f, each in zip(fields, listed, strict=True) if each]
        self._others = [f.name for f, each in zip(fields, listed, strict=True) if not each]
        inner = [
            pa.field(f.name, storage(f.type).value_type)
            for f, each in zip(fields, listed, strict=True)
            if each
        ]
        steps = leaves_of(pa.schema(inner), {name: _inner_feature(features, name) for name in self._lists})
        others = leaves_of(
            pa.schema([f for f, each in zip(fields, listed, strict=True) if not each]), features
        )
        available = {**others, **steps}
        chosen = select(requested(columns, list(available)), list(available), rows.source)
        self._steps = {name: steps[role] for name, role in chosen.items() if role in steps}
        self._once = {name: others[role] for name, role in chosen.items() if role not in steps}
        if not self._steps:
            raise SourceError(
                f"{rows.source}: of the columns {listing(chosen)} none is a list; expected one with a value for each "
                "step. If rows are steps, leave out rows='episodes', and name the column of the episode: episode=...."
            )
        lengths = self._scan()
        schema, payload = planned(rows.source, {**self._steps, **self._once}, set(self._once), keep_float64)
        super().__init__(rows.source, lengths, {name: schema[name] for name in chosen}, payload=payload)
        self._begins = np.cumsum([0, *rows.counts])[:-1]  # of the parts
        self.starts = np.unique(self._begins[self._begins < len(lengths)])

    def _parts(
        self, batch: Any, leaves: Mapping[str, ArrowField], row: int
    ) -> tuple[np.ndarray, dict[str, Any]]:
        """The lengths of a batch's episodes, and the arrays of some columns: of all steps, one after another."""
        lengths: np.ndarray | None = None
        found: dict[str, Any] = {}
        inner: dict[str, Any] = {}
        for name, leaf in leaves.items():
            if name not in self._steps:
                found[name] = leaf_array(batch.column(self._others[leaf.path[0]]), leaf)
                continue
            role = self._lists[leaf.path[0]]
            if role not in inner:
                place = _place(self._rows.source, leaf, np.arange(row, row + len(batch)))
                inner[role], count = inner_of(stored_array(batch.column(role)), place)
                lengths = count if lengths is None else lengths
                uneven = np.flatnonzero((count != lengths) | (count == 0))
                if len(uneven):
                    at = int(uneven[0])
                    raise SourceError(
                        f"{place(at)} has {count[at]} steps, and others {lengths[at]}; expected as many, at least one. "
                        "A list that an episode has once is per trajectory: per_trajectory=."
                    )
            found[name] = leaf_array(inner[role], leaf)
        assert lengths is not None
        return lengths, found

    def _scan(self) -> np.ndarray:
        """The lengths of episodes."""
        first = next(iter(self._steps))
        scanned = {
            n: leaf for n, leaf in {**self._steps, **self._once}.items() if leaf.scan.needed or n == first
        }
        lengths, row = [], 0
        for batch in self._rows.batches(self._top(scanned)):
            with readable(self._rows.source):
                count, arrays = self._parts(batch, scanned, row)
                for name, array in arrays.items():
                    if scanned[name].scan.needed:
                        scanned[name].scan.see(array, self._where(name, scanned[name], row, count))
            lengths.append(count)
            row += len(batch)
        if not row:
            raise SourceError(f"{self._rows.source} has no rows; expected at least one.")
        return np.concatenate(lengths)

    def _top(self, leaves: Mapping[str, ArrowField]) -> list[str]:
        used = {
            (self._lists if n in self._steps else self._others)[leaf.path[0]] for n, leaf in leaves.items()
        }
        return [field.name for field in self._rows.schema if field.name in used]

    def _where(self, name: str, leaf: ArrowField, row: int, lengths: np.ndarray) -> Place:
        ends = np.cumsum(lengths)

        def place(item: int | None) -> str:
            at = ""
            if item is not None and name in self._steps:
                number = int(np.searchsorted(ends, item, side="right"))
                at = f", row {row + number}, step {item - int(ends[number] - lengths[number])}"
            elif item is not None:
                at = f", row {row + item}"
            return f"{self._rows.source}{at}: column {leaf.name!r}"

        return place

    def __iter__(self) -> Iterator[Episode]:
        """Read the episodes in order; see `EpisodeReader`."""
        return self.between(0, len(self))

    def between(self, first: int, last: int) -> Iterator[Episode]:
        """See `EpisodeReader`."""
        leaves = {**self._steps, **self._once}
        part = int(np.searchsorted(self._begins, first, side="right")) - 1
        row = int(self._begins[part])
        for batch in self._rows.batches(self._top(leaves), part):
            if row >= last:
                return
            with readable(self.source):
                lengths, arrays = self._parts(batch, leaves, row)
                if not np.array_equal(lengths, self.lengths[row : row + len(batch)]):
                    raise SourceError(
                        f"{self.source} has other rows than before; expected data that stay as they are."
                    )
                values = {
                    name: values_of(
                        array,
                        leaves[name],
                        self.schema[name],
                        self._where(name, leaves[name], row, lengths),
                        allow_nonfinite=self._nonfinite,
                    )
                    for name, array in arrays.items()
                }
            ends = np.cumsum(lengths).tolist()
            for number, end in enumerate(ends):
                if not first <= row + number < last:
                    continue
                begin = ends[number - 1] if number else 0
                yield Episode(
                    {n: values[n][begin:end] if n in self._steps else values[n][number] for n in self.schema}
                )
            row += len(batch)


def _inner_feature(features: Any, name: str) -> Any:
    """What Hugging Face says of the items of a column of lists."""
    found = features.get(name) if isinstance(features, dict) else None
    if isinstance(found, list) and found:
        return found[0]
    return found.get("feature") if isinstance(found, dict) else None
