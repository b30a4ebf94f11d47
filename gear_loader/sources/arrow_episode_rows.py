"""Episodes of rows of Arrow that are episodes: lists with a value for each step."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
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
    storage,
    stored_array,
    values_of,
)
from gear_loader.sources.arrow_episodes import planned, row_place
from gear_loader.sources.arrow_rows import Rows, readable
from gear_loader.sources.episodes import Columns, Episode, EpisodeReader, listing, requested, select


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
                place = row_place(self._rows.source, leaf, np.arange(row, row + len(batch)))
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
