"""A source that is not of the package: trajectories in a Parquet file."""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from source_conformance import SCHEMA, SourceConformance

from gear_loader.storage.schema import Schema

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")


class ParquetSource:
    """A file with one row a trajectory: a column of bytes for each column of the schema. Slots are numbers of rows.

    Args:
        path: of the file. schema: of the trajectories.
    """

    def __init__(self, path: Path, schema: Schema) -> None:
        self.schema, self._file = schema, pq.ParquetFile(path)
        ends = np.cumsum(
            [self._file.metadata.row_group(i).num_rows for i in range(self._file.num_row_groups)]
        )
        self._ends = ends
        self._lengths = self._file.read(["length"])["length"].to_numpy()

    @staticmethod
    def write(path: Path, schema: Schema, trajectories: list[dict[str, Any]]) -> None:
        columns: dict[str, Any] = {name: [each[name].tobytes() for each in trajectories] for name in schema}
        columns["length"] = [len(each["reward"]) for each in trajectories]
        pq.write_table(pa.table(columns), path, row_group_size=2)

    def sizes(self, slots: np.ndarray) -> np.ndarray:
        return np.stack((self._lengths[slots], np.zeros_like(slots)), axis=1)

    def read(
        self,
        slots: np.ndarray,
        generations: np.ndarray,
        first: np.ndarray,
        counts: np.ndarray,
        outs: Mapping[str, tuple[np.ndarray, np.ndarray]],
        *,
        drawn: int = 0,
    ) -> None:
        groups = np.searchsorted(self._ends, slots, side="right")
        for group in np.unique(groups).tolist():
            rows = self._file.read_row_group(group, columns=list(outs))
            begin = self._ends[group - 1] if group else 0
            for i in np.flatnonzero(groups == group).tolist():
                for name, (out, places) in outs.items():
                    column = self.schema[name]
                    low, count = (0, 1) if column.trajectory else (int(first[i]), int(counts[i]))
                    steps = np.frombuffer(rows[name][int(slots[i] - begin)].as_buffer(), dtype=np.uint8)
                    part = steps[low * column.step_bytes : (low + count) * column.step_bytes]
                    out[places[i] : places[i] + len(part)] = part


class TestParquet(SourceConformance):
    def make(self, trajectories: list[dict[str, Any]], stack: contextlib.ExitStack) -> tuple[Any, np.ndarray]:
        schema = Schema(SCHEMA)
        ParquetSource.write(self.path / "trajectories.parquet", schema, trajectories)
        return ParquetSource(self.path / "trajectories.parquet", schema), np.arange(len(trajectories))
