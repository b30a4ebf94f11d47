"""Rows of n environments that are written into memory of their writer, from which it appends them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

from gear_loader.storage.appender import Appender, Given
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.storage.block_sink import GrowingSink


class StagedRows:
    """Appends as `VectorWriter.append` with `next` does, without checking anything: the caller has.

    Attributes:
        rows: column -> values ``[n, *shape]`` of the next row. following: column with final steps -> values after it.
        row_sources, following_sources: column -> int64 [2], address of the values, and bytes from one environment's to
            the next's. A caller may set an address, of memory that holds such values during `append`.
        active, done: bool [n]: the environments that take a step, and those whose trajectories end with it.
    """

    def __init__(self, sink: GrowingSink, appender: Appender, cut: int) -> None:
        n, schema = len(sink.lanes), sink.schema.steps
        self._sink, self._appender, self._given = sink, appender, Given(n)
        self.rows = {
            name: np.zeros((n, *column.shape), column.numpy_dtype) for name, column in schema.items()
        }
        self.following = {
            name: np.zeros_like(rows) for name, rows in self.rows.items() if schema[name].final
        }
        following = {name: _bytes(rows) for name, rows in self.following.items()}
        rows = sink.plain({name: _bytes(values) for name, values in self.rows.items()})
        sink.describe(rows, {**sink.schema.zero_step, **following}, None, None, cut)
        self.row_sources = dict(zip(schema, sink.row_sources, strict=True))
        self.following_sources = dict(zip(schema, sink.following_sources, strict=True))
        self.active, self.done = sink.active, sink.done

    def append(self) -> int:
        """Append the row of each active environment; return how many of them are done.

        Raises:
            As `VectorWriter.append`, but nothing for values.
        """
        self._appender.check_usable()
        return self._sink.append_request(self._given)


def _bytes(values: Array) -> Array:
    """Values [n, *shape] as uint8 [n, step_bytes]."""
    return values.reshape(len(values), -1).view(np.uint8).reshape(len(values), -1)
