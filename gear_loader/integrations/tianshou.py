"""Tianshou's replay buffers with their transitions in a `gear_loader.Table`, in shared memory.

::

    from gear_loader.integrations.tianshou import VectorReplayBuffer
    buffer = VectorReplayBuffer(100_000, buffer_num=8, name="replay")
    collector = tianshou.data.Collector(algorithm, environments, buffer)

They draw the same batches from the same seed as Tianshou's own, and work with all its algorithms and collectors.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from gear_loader.integrations.ring_rows import row_tensors, table_of_rows
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.schema import BATCH_KEYS, Column
from gear_loader.storage.table import Table

try:
    from tianshou import data
    from tianshou.data import ReplayBuffer as _ReplayBuffer
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.tianshou needs Tianshou, which cannot be imported ({error}). "
        "Install it: pip install '.[tianshou]' (in a clone of Gear Loader)",
        name="tianshou",
    ) from error

__all__ = [
    "CachedReplayBuffer",
    "HERReplayBuffer",
    "HERVectorReplayBuffer",
    "PrioritizedReplayBuffer",
    "PrioritizedVectorReplayBuffer",
    "ReplayBuffer",
    "VectorReplayBuffer",
]

_DTYPES = {dtype: torch_dtypes()[name] for name, dtype in NUMPY_DTYPES.items()}


class RowsInTable:
    """What the buffers here have in common: the rows of a Tianshou buffer are the steps of a table's only trajectory.

    There is a column for each array, nested ones as ``obs.camera`` or ``info.x``, and ``index_`` for a key ``index``,
    which batches of ours have as well. Keys that appear later, and objects (text, infos of varying shape), stay in
    the buffer's own memory. Tianshou overwrites rows in place: another process that reads the table may see a row that
    is half written. A pickled buffer, and one from `load_hdf5`, has its rows in private memory.

    Attributes:
        table: the table; None before the first transition.
    """

    # Not in its dict, which Tianshou writes into files.
    __slots__ = ("_name", "table")
    table: Table | None

    def __init__(self, *args: Any, name: str | None = None, **options: Any) -> None:
        """Arguments as Tianshou's buffer takes them.

        Args:
            name: name of the table, by which other processes reach it (`gear_loader.Table.attach`); None for private
                memory. Remove it with ``buffer.table.unlink()``.
        """
        self.table, self._name = None, name
        super().__init__(*args, **options)

    @property
    def _meta(self) -> Any:
        return self.__dict__["_meta"]

    @_meta.setter
    def _meta(self, rows: Any) -> None:
        """Rows that Tianshou has made; their arrays become columns."""
        self.__dict__["_meta"] = rows
        arrays = dict(_arrays(rows, ""))
        if not arrays:
            return
        schema = {name: Column(_DTYPES[given.dtype], given.shape[1:]) for name, (given, *_) in arrays.items()}
        (count,) = {len(given) for given, *_ in arrays.values()}
        if self.table is None or (dict(self.table.schema), self.table.num_steps) != (schema, count):
            if self.table is not None and self._name is not None:
                self.table.unlink()
            self.table = table_of_rows(schema, count, self._name)
        columns = row_tensors(self.table)
        for name, (given, owner, key) in arrays.items():
            owner.__dict__[key] = columns[name].numpy()
            owner.__dict__[key][...] = given

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.table = self._name = None
        super().__setstate__(state)  # type: ignore[misc]
        self._meta = self.__dict__["_meta"]
        if isinstance(self, data.ReplayBufferManager) and self.table is not None:
            self._set_batch_for_children()


def _arrays(rows: Any, prefix: str) -> Any:
    """Names of columns, and array, owner and key of each array of a nested Batch that a column can hold."""
    for key, value in rows.items():
        name = f"{prefix}{key}"
        if isinstance(value, data.Batch):
            yield from _arrays(value, f"{name}.")
        elif isinstance(value, np.ndarray) and value.dtype in _DTYPES:
            yield (f"{name}_" if name in BATCH_KEYS else name), (value, rows, key)


class ReplayBuffer(RowsInTable, _ReplayBuffer):
    """`tianshou.data.ReplayBuffer` in a table."""


class CachedReplayBuffer(RowsInTable, data.CachedReplayBuffer):
    """`tianshou.data.CachedReplayBuffer` in a table."""

    def __init__(self, main_buffer: Any, *args: Any, name: str | None = None, **options: Any) -> None:
        if isinstance(main_buffer, RowsInTable):  # the rows of all its parts lie in one table
            plain = _ReplayBuffer.__new__(_ReplayBuffer)
            plain.__dict__.update(main_buffer.__dict__)
            main_buffer = plain
        super().__init__(main_buffer, *args, name=name, **options)


class PrioritizedReplayBuffer(RowsInTable, data.PrioritizedReplayBuffer):
    """`tianshou.data.PrioritizedReplayBuffer` in a table."""


class HERReplayBuffer(RowsInTable, data.HERReplayBuffer):
    """`tianshou.data.HERReplayBuffer` in a table."""


class VectorReplayBuffer(RowsInTable, data.VectorReplayBuffer):
    """`tianshou.data.VectorReplayBuffer` in a table."""


class PrioritizedVectorReplayBuffer(RowsInTable, data.PrioritizedVectorReplayBuffer):
    """`tianshou.data.PrioritizedVectorReplayBuffer` in a table."""


class HERVectorReplayBuffer(RowsInTable, data.HERVectorReplayBuffer):
    """`tianshou.data.HERVectorReplayBuffer` in a table."""
