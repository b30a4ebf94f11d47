"""Batches of TorchRL collectors, written into a `gear_loader.Table` as trajectories.

::

    collector = torchrl.collectors.Collector(env, policy, frames_per_batch=1_000, total_frames=100_000)
    for batch in collector:
        if table is None:
            table = gear.Table.create(collector_schema(batch), max_steps=100_000, max_trajectories=5_000)
            writer = CollectorWriter(table)
        writer.add(batch)

Any object with TensorDict's interface is a batch; neither TorchRL nor tensordict is imported.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Column, as_mapping
from gear_loader.storage.table import Table
from gear_loader.storage.writer import Writer
from gear_loader.utils.arrays import Array

__all__ = ["CollectorWriter", "collector_schema"]

_IDS = "collector.traj_ids"
_OWN = "collector."  # entries of the collector itself


def _columns(batch: Any) -> tuple[tuple[int, ...], dict[str, Any]]:
    """Batch size and entries of a collector's batch, by the names of columns."""
    if not hasattr(batch, "batch_size") or not hasattr(batch, "keys"):
        raise SchemaError(
            f"The batch is a {type(batch).__name__}; expected a TensorDict, as collectors yield them."
        )
    size = tuple(batch.batch_size)
    if not size or 0 in size:
        raise SchemaError(
            f"The batch has batch_size {list(size)}; expected [T] or [environments, T], not empty."
        )
    columns = as_mapping(batch)
    if "collector.mask" in columns:
        raise SchemaError(
            "The batch has the entry ('collector', 'mask'), so the collector has split and padded its trajectories. "
            "Make it with split_trajs=False; the writer splits them."
        )
    return size, columns


def collector_schema(batch: Any) -> dict[str, Column]:
    """The columns of a table for such batches, as `gear_loader.Table.create` takes them.

    Args:
        batch: a TensorDict of batch size [T] or [environments, T], as a collector yields it.

    Returns:
        A `Column` for each entry (nested names are joined: ``next.reward``), except those under ``"collector"`` and
        text. Columns that you remove are not written: `CollectorWriter` writes those that the table has.

    Raises:
        SchemaError: not such a TensorDict, or an entry of a dtype that columns do not support.
    """
    size, columns = _columns(batch)
    return {
        name: Column(value.dtype, tuple(value.shape[len(size) :]))
        for name, value in columns.items()
        if isinstance(value, torch.Tensor) and not name.startswith(_OWN)
    }


class CollectorWriter:
    """Writes the batches of a TorchRL collector into a table; a trajectory is committed when it is done.

    Batches have batch size [T] or [environments, T], and trajectories continue in the next batch. If batches have
    ``("collector", "traj_ids")``, as those of collectors do, steps with the same id form a trajectory, wherever they
    are in a batch, also with several collecting processes. Otherwise row e of a batch continues in row e of the next
    one.

    Args:
        table: the table. Its columns are named like the entries, nested ones ``next.reward``. Entries without a column
            are left out.
        done: entry that ends a trajectory, bool ``[..., T]`` or ``[..., T, 1]``.

    As a context manager it commits unfinished trajectories at the end, or discards them if the block raises.
    """

    def __init__(self, table: Table, *, done: str = "next.done") -> None:
        self._table = table
        self._done = done
        self._open: dict[int, Writer] = {}  # by trajectory id, or by row
        self._spare: list[Writer] = []

    def add(self, batch: Any) -> list[int]:
        """Write a batch.

        Args:
            batch: a TensorDict, as a collector yields it, on any device.

        Returns:
            Indices of the trajectories that have become complete.

        Raises:
            SchemaError: an entry is missing or does not fit its column. Nothing was written.
            TableFullError, RateLimitError, LockTimeoutError: as `Table.add`; steps before the error were written.
        """
        size, entries = _columns(batch)
        rows = int(np.prod(size[:-1]))
        columns = self._checked(entries, size, rows)
        done = self._flat(entries[self._done], rows, size)
        ids = self._flat(entries[_IDS], rows, size) if _IDS in entries else None
        indices = []
        for row in range(rows):
            key = np.full(size[-1], row) if ids is None else ids[row]
            for first, end in _segments(done[row].astype(bool), key):
                writer = self._writer(int(key[first]))
                writer.append({name: values[row, first:end] for name, values in columns.items()})
                if done[row, end - 1]:
                    indices.append(self._commit(int(key[first])))
        return indices

    def _checked(
        self, entries: Mapping[str, Any], size: tuple[int, ...], rows: int
    ) -> dict[str, torch.Tensor]:
        """The entries that are columns, ``[rows, T, *shape]`` on the CPU."""
        missing = [name for name in (*self._table.schema.added, self._done) if name not in entries]
        if missing:
            raise SchemaError(
                f"The batch has the entries {list(entries)}; missing: {missing}. Nothing was written."
            )
        columns = {}
        for name, column in self._table.schema.added.items():
            value = entries[name]
            fits = isinstance(value, torch.Tensor) and value.dtype == column.dtype
            if not fits or tuple(value.shape) != (*size, *column.shape):
                given = (
                    f"{value.dtype} {list(value.shape)}" if isinstance(value, torch.Tensor) else type(value)
                )
                raise SchemaError(
                    f"The entry {name!r} of the batch is {given}; expected {column.dtype} "
                    f"{[*size, *column.shape]}. Nothing was written."
                )
            columns[name] = value.detach().cpu().reshape(rows, size[-1], *column.shape)
        return columns

    @staticmethod
    def _flat(value: torch.Tensor, rows: int, size: tuple[int, ...]) -> Array:
        flat: Array = value.detach().cpu().reshape(rows, size[-1]).numpy()
        return flat

    def _writer(self, key: int) -> Writer:
        if key not in self._open:
            self._open[key] = self._spare.pop() if self._spare else self._table.writer()
        return self._open[key]

    def _commit(self, key: int) -> int:
        writer = self._open[key]
        index = writer.commit()
        self._spare.append(self._open.pop(key))
        return index

    @property
    def num_open(self) -> int:
        """Trajectories that are not done yet."""
        return len(self._open)

    def flush(self) -> list[int]:
        """Commit all trajectories that are not done yet, as after the last batch; return their indices."""
        return [self._commit(key) for key in list(self._open)]

    def close(self) -> None:
        """Discard all trajectories that are not done yet; idempotent."""
        for writer in self._open.values():
            writer.close()
        self._spare.extend(self._open.values())
        self._open.clear()

    def __enter__(self) -> CollectorWriter:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is None:
            self.flush()
        self.close()


def _segments(done: Array, keys: Array) -> list[tuple[int, int]]:
    """Runs of steps of one trajectory in a row: first step and end of each."""
    cut = done[:-1] | (keys[1:] != keys[:-1])
    ends = [*(np.flatnonzero(cut) + 1).tolist(), len(done)]
    return list(zip([0, *ends[:-1]], ends, strict=True))
