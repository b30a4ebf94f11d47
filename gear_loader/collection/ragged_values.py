"""Ragged values of a batch, which follow the records that were gathered."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.storage.payload import ArrayRead
from gear_loader.storage.ragged import Values
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


def read_ragged(
    table: Table,
    columns: Mapping[str, Values],
    batch: Mapping[str, torch.Tensor],
    *,
    pinned: bool = False,
    device: torch.device | None = None,
) -> dict[str, Any]:
    """Copy the values of a batch on the CPU, under the read ticket of its rows.

    Args:
        columns: windows that read ragged columns, and what the values are.
        batch: has their records, int64 ``[..., 2]``, and more unless `only_records`. pinned: copy into pinned memory.
        device: as for `PayloadReader.read`.

    Returns:
        Name -> `Ragged` of the records' shape without the last dimension, or lists of text.

    Raises:
        CorruptTableError: a record is invalid.
    """
    reader, found, together = table._engine.payload, dict[str, Any](), dict[int, list[str]]()
    if reader.in_memory:
        arrays = [name for name, values in columns.items() if values.kind == "array"]
        given = [(columns[name], batch[name].contiguous()) for name in arrays]
        if arrays:
            found.update(zip(arrays, reader.read_arrays(given, pinned=pinned), strict=True))
    for name, values in columns.items():
        if name in found:
            continue
        apart = values.coded is None or not values.coded.fixed
        together.setdefault(len(together) if apart else -id(values), []).append(name)
    for names in together.values():
        numbers = [batch[name].reshape(-1, 2).numpy() for name in names]
        shapes = [tuple(batch[name].shape[:-1]) for name in names]
        slots = batch["index"].numpy()[np.concatenate([rows_of(batch, shape) for shape in shapes])]
        records, shape = np.concatenate(numbers), shapes[0] if len(names) == 1 else (len(slots),)
        read = reader.read(columns[names[0]], records, shape, slots=slots, pinned=pinned, device=device)
        if len(names) == 1:
            found[names[0]] = read
            continue
        parts = read.split(
            [len(part) for part in numbers]
        )  # windows of one column: no value is decoded twice
        for name, part, shape in zip(names, parts, shapes, strict=True):
            found[name] = part.view(*shape, *part.shape[1:])
    return found


def rows_of(batch: Mapping[str, torch.Tensor], shape: tuple[int, ...]) -> Array:
    """The row of each value of a window, int64 [n]; of a segment that rows of a tree have in common, one of these."""
    rows: Array = np.arange(len(batch["index"]))
    if len(shape) == 1 and "cu_seqlens" in batch and shape[0] != len(rows):
        lengths, count = batch["cu_seqlens"].diff().numpy(), len(rows)
        if len(lengths) > count:
            rows, parents = (
                np.concatenate((rows, np.zeros(len(lengths) - count, np.int64))),
                batch["parent"].numpy(),
            )
            rows[parents[parents >= 0]] = np.flatnonzero(parents >= 0)
        return np.repeat(rows, lengths)
    return np.repeat(rows, math.prod(shape[1:]))


def only_records(table: Table, columns: Mapping[str, Values]) -> bool:
    """Whether `read_ragged` needs nothing of a batch but the records."""
    return table._engine.payload.in_memory and all(values.kind == "array" for values in columns.values())


class RaggedBatch:
    """Reads arrays of ragged columns by the records in one batch's memory, each time these have been gathered.

    Args:
        read: of the columns. names: of the windows that read them.

    Attributes:
        found: name -> values of the batch that was read last.
    """

    def __init__(self, read: ArrayRead, names: Sequence[str]) -> None:
        self._read, self._names = read, tuple(names)
        self.found: dict[str, Any] = {}

    @classmethod
    def of(
        cls, table: Table, columns: Mapping[str, Values], batch: Mapping[str, torch.Tensor]
    ) -> RaggedBatch | None:
        """Of whole batches in the memory of `batch`, to which the caller refers; None if records do not follow one
        another. Other arguments as for `read_ragged`, arrays alone."""
        given = [(values, batch[name]) for name, values in columns.items()]
        if not all(records.is_contiguous() for _, records in given):
            return None
        return cls(ArrayRead(table._engine.payload, given), list(columns))

    def read(self, counts: Sequence[int] | None = None) -> None:
        """Read the values, under the read ticket of the batch; errors as of `read_ragged`.

        Args:
            counts: records of each column; by default all.
        """
        self.found = dict(zip(self._names, self._read.read(counts), strict=True))

    def take(self) -> dict[str, Any]:
        """What was read, to which nothing here refers any longer."""
        found, self.found = self.found, {}
        return found
