"""Rows of n environments that wait in memory until their writer appends them together."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from gear_loader.storage.appender import Appender, Given, RowsAhead
from gear_loader.storage.block_sink import GrowingSink
from gear_loader.storage.operations.appending import UNLESS_RESET
from gear_loader.storage.vector_writer import VectorWriter
from gear_loader.utils.arrays import Array, data_address

_SPREAD_BYTES = 512


class WaitingRows:
    """Rows that are written into this memory, and appended together: `VectorWriter.append` with `next`, for K rows.

    Nothing is checked: the caller has done that.

    Attributes:
        rows: column -> values ``[K, n, *shape]``. following: column with final steps -> values after each row.
        active: uint8 [K, n]: whether an environment takes a step: 0, 1, or UNLESS_RESET, as at first; see
            `appending.append_lanes`. done: bool [K, n]: those whose trajectories end with it.
        count: number of rows that are written and not appended.

    Args:
        length: K. cut: steps of a trajectory after which the next row begins another one, at least 1.
        reward: column of the reward.
    """

    @classmethod
    def of(cls, writer: VectorWriter, length: int, *, cut: int, reward: str) -> WaitingRows:
        """Those of a writer with ``commit_every_step``, which appends nothing else."""
        writer._moves = True
        return cls(writer._sink, writer._appender, length, cut, reward)  # type: ignore[arg-type]

    def __init__(self, sink: GrowingSink, appender: Appender, length: int, cut: int, reward: str) -> None:
        n, schema = len(sink.lanes), sink.schema.steps
        self._sink, self._appender, self._given, self.length = sink, appender, Given(n), length
        self.rows = {
            name: _spread(length, (n, *column.shape), column.numpy_dtype) for name, column in schema.items()
        }
        # The row before the first is what followed the last row that was appended.
        self._after = {
            name: _spread(length + 1, rows.shape[1:], rows.dtype)
            for name, rows in self.rows.items()
            if schema[name].final
        }
        self.following = {name: values[1:] for name, values in self._after.items()}
        active, done = (_spread(length, (n,), np.dtype(np.uint8)) for _ in range(2))
        active[:] = UNLESS_RESET
        # With what lies between two rows they are contiguous, as the loop takes them.
        self._active, self._done = (_whole(each) for each in (active, done))
        self.active, self.done = active, done.view(np.bool_)
        names = list(schema)
        self._ahead = RowsAhead(
            np.array([_place(self.rows[name], n) for name in names]),
            np.array(
                [_place(self.following[name], n) if name in self.following else (0, 0, 0) for name in names]
            ),
            self._active,
            self._done.view(np.bool_),
            np.zeros(n, dtype=bool),
            cut,
            names.index(reward),
            self,
        )
        self._at = np.zeros(2, dtype=np.int64)
        self.count = 0

    def append(self) -> None:
        """Append the rows that wait.

        Raises:
            As `VectorWriter.append`; the rows that are not appended wait on, and none can be written before.
        """
        if not self.count:
            return
        self._appender.check_usable()
        ahead = self._ahead
        if self.count < self.length:
            ahead = ahead._replace(active=ahead.active[: self.count], done=ahead.done[: self.count])
        self._sink.append_rows(ahead, self._at, self._given)
        for values in self._after.values():
            values[0] = values[self.count]
        self.active[: self.count] = UNLESS_RESET
        self._at[:] = 0
        self.count = 0


def _place(values: Array, n: int) -> tuple[int, int, int]:
    """Address of values [K, n, *shape], bytes from one environment's to the next's, and bytes from row to row."""
    return data_address(values), values.strides[1], values.strides[0]


def _spread(length: int, shape: tuple[int, ...], dtype: Any) -> Array:
    """Zeros [length, *shape]. Large rows lie an odd number of cache lines apart: the values of one environment would
    otherwise be in few sets of the caches, and drive out each other."""
    size = math.prod(shape) * dtype.itemsize
    apart = size if size < _SPREAD_BYTES else 64 * (-(-size // 64) | 1)
    memory: Array = np.zeros(length * apart, dtype=np.uint8)
    strides = [apart]
    for k in range(len(shape)):
        strides.append(math.prod(shape[k + 1 :]) * dtype.itemsize)
    values: Array = np.ndarray((length, *shape), dtype, memory, strides=tuple(strides))
    return values


def _whole(values: Array) -> Array:
    """The memory of `_spread`, [length, bytes from row to row]."""
    assert values.base is not None
    memory: Array = values.base.reshape(len(values), -1)
    return memory
