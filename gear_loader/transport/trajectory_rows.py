"""Checked trajectories as bytes, and the bulk part of STORE that is made of them."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from gear_loader.storage.schema import Schema
from gear_loader.transport.channel import Bytes, as_bytes
from gear_loader.transport.message_schema import padding
from gear_loader.transport.store_message import Store
from gear_loader.utils.arrays import Array

__all__ = ["Rows", "Stacked", "bulk_parts", "contiguous"]


class Rows(NamedTuple):
    """A checked trajectory.

    Attributes:
        length: number of rows. pieces: its steps, column name -> uint8 [rows, step_bytes] for consecutive ones.
        once: column per trajectory -> uint8 [1, step_bytes].
    """

    length: int
    pieces: Sequence[Mapping[str, Array]]
    once: Mapping[str, Array]

    @classmethod
    def of(cls, schema: Schema, trajectory: Mapping[str, Any], what: str) -> Rows:
        """A trajectory as bytes, after its checks; `what` names it in errors."""
        length, arrays = schema.validate(trajectory, what=what)
        return cls(length, [arrays], arrays)


class Stacked(NamedTuple):
    """Checked trajectories of stacked arrays; trajectory i is the first ``lengths[i]`` steps of row i.

    Attributes:
        lengths: int64 [n]. columns: column name -> uint8 [n, T, step_bytes], or [n, 1, step_bytes] of columns per
            trajectory; contiguous.
    """

    lengths: Array
    columns: Mapping[str, Array]

    def part(self, low: int, high: int) -> Stacked:
        """Trajectories `low` to `high`."""
        return Stacked(self.lengths[low:high], {name: each[low:high] for name, each in self.columns.items()})

    def steps(self, name: str) -> Array:
        """The steps of a column, one trajectory after another, uint8 [steps, step_bytes]: a view if all are as long."""
        values = self.columns[name]
        if (self.lengths == values.shape[1]).all():
            return values.reshape(-1, values.shape[2])
        return values[np.arange(values.shape[1]) < self.lengths[:, None]]


def bulk_parts(request: Store, rows: Sequence[Rows] | Stacked) -> list[Bytes | bytes]:
    """The bulk part of a STORE in pieces: the memory of the trajectories where possible, and zeros behind the columns.

    Args:
        request: the small part. rows: its trajectories; of one with `Store.parts`, all pieces.
    """
    parts: list[Bytes | bytes] = []
    for (name, column), (_, size) in zip(request.schema.items(), request.columns, strict=True):
        if isinstance(rows, Stacked):
            parts.append(rows.columns[name] if column.trajectory else rows.steps(name))
        elif column.trajectory:
            parts += [each.once[name] for each in rows]
        else:
            parts += [piece[name] for each in rows for piece in each.pieces[request.parts :]]
        if zeros := padding(size):
            parts.append(zeros)
    return parts


def contiguous(parts: Sequence[Bytes | bytes], size: int) -> Array:
    """The bytes of all pieces, one after another in new memory, uint8 [size]."""
    data, at = np.empty(size, dtype=np.uint8), 0
    for part in parts:
        view = as_bytes(part)
        data.data[at : at + len(view)] = view
        at += len(view)
    return data
