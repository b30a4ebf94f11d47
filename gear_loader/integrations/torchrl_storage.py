"""TorchRL's replay buffers with their rows in a `gear_loader.Table`, in shared memory; and a storage for any other.

::

    from gear_loader.integrations.torchrl_storage import TableStorage, TensorDictReplayBuffer
    buffer = TensorDictReplayBuffer(100_000, name="replay", batch_size=256)
    same = torchrl.data.TensorDictReplayBuffer(storage=TableStorage(100_000, name="replay"), batch_size=256)
"""

from __future__ import annotations

from typing import Any

import torch

from gear_loader.errors import SchemaError
from gear_loader.integrations.ring_rows import row_tensors, table_of_rows
from gear_loader.storage.schema import BATCH_KEYS, Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown

try:
    import torchrl.data
    from tensordict import is_tensor_collection
    from torch.utils._pytree import keystr, tree_flatten_with_path, tree_map
    from torchrl.data import LazyTensorStorage
except ImportError as error:
    raise ImportError(
        f"gear_loader.integrations.torchrl_storage needs TorchRL, which cannot be imported ({error}). "
        "Install it: pip install '.[torchrl]' (in a clone of Gear Loader)",
        name="torchrl",
    ) from error

__all__ = [
    "PrioritizedReplayBuffer",
    "ReplayBuffer",
    "TableStorage",
    "TensorDictPrioritizedReplayBuffer",
    "TensorDictReplayBuffer",
]


class TableStorage(LazyTensorStorage):
    """A TorchRL storage in a table. All of TorchRL's samplers, writers, transforms and buffers work with it.

    Like `LazyTensorStorage` it is allocated when the first data are written: TensorDicts, tensorclasses, tensors or
    pytrees of them. Its rows are the steps of the table's only trajectory, with a column for each tensor (nested:
    ``next.reward``). The entry ``index`` is the column ``index_``, because batches have a key ``index``. TorchRL
    overwrites rows in place: another process that reads the table may see a half-written row.

    Args:
        max_size: number of rows.
        name: name of the table, by which other processes reach it (`gear_loader.Table.attach`; a storage with a name
            is pickled as its name); None for private memory. Remove it with ``storage.table.unlink()``.
        options: ``ndim``, ``compilable`` of `LazyTensorStorage`.

    Attributes:
        table: the table; None before the first data.

    Raises:
        SchemaError: a device other than the CPU, or, with the first data, a dtype that columns do not support.
    """

    max_size: int

    def __init__(self, max_size: int, *, name: str | None = None, **options: Any) -> None:
        device = options.get("device", "cpu")
        refused = {"consolidated", "shared_init"} & {key for key, value in options.items() if value}
        if str(device) != "cpu" or refused:
            raise SchemaError(
                f"TableStorage was given {', '.join(sorted(refused)) or f'device={shown(device)}'}; expected rows in "
                "the host's memory. Move batches instead: append_transform(lambda batch: batch.to(device))."
            )
        self.name = name
        self.table: Table | None = None
        super().__init__(max_size, **options)

    @property
    def _storage(self) -> Any:
        return self._rows

    @_storage.setter
    def _storage(self, value: Any) -> None:  # also when a state is loaded
        self._rows: Any = None
        if value is not None:
            self._rows = self._in_table(value)
            _copy(value, self._rows)

    def _init_standard(self, data: Any) -> None:
        def expanded(leaf: Any) -> Any:
            if self.ndim > 1:
                shape = (-(self.max_size // -leaf.shape[: self.ndim - 1].numel()), *leaf.shape)
                self.max_size = torch.Size(shape[: self.ndim]).numel()
                return leaf.expand(shape)
            return leaf.expand((self.max_size, *leaf.shape))

        self._rows = self._in_table(
            expanded(data) if is_tensor_collection(data) else tree_map(expanded, data)
        )
        self.initialized = True

    def _in_table(self, rows: Any) -> Any:
        """A structure like this one, whose tensors ``[rows, *shape]`` are the columns of a new table."""
        leaves = _leaves(rows)
        (count,) = {len(leaf) for leaf in leaves.values()}
        schema = {name: Column(leaf.dtype, tuple(leaf.shape[1:])) for name, leaf in leaves.items()}
        self.table = table_of_rows(schema, count, self.name)
        return self._columns(rows)

    def _columns(self, like: Any) -> Any:
        """A structure like this one of the columns of the table, which has one block."""
        assert self.table is not None
        columns = row_tensors(self.table)
        if not is_tensor_collection(like):
            names = iter(_leaves(like))
            return tree_map(lambda _: columns[next(names)], like)
        return like.named_apply(lambda name, _: columns[_column_name(name)], nested_keys=True)

    def __getstate__(self) -> dict[str, Any]:
        if self.name is None or self.table is None:
            state: dict[str, Any] = super().__getstate__()
            return {key: value for key, value in state.items() if key != "table"}
        rows, self._rows = self._rows, None
        try:
            state = super().__getstate__()
        finally:
            self._rows = rows
        like = (
            rows[:1].clone() if is_tensor_collection(rows) else tree_map(lambda leaf: leaf[:1].clone(), rows)
        )
        return {**{key: value for key, value in state.items() if key != "table"}, "_like": like}

    def __setstate__(self, state: dict[str, Any]) -> None:
        like, rows = state.pop("_like", None), state.pop("_rows", None)
        super().__setstate__(state)
        self.table = None
        self._rows = None
        if like is not None and self.name is not None:
            self.table = Table.attach(self.name)
            count = self.table.num_steps
            self._rows = self._columns(
                like.expand((count, *like.shape[1:])) if is_tensor_collection(like) else like
            )
        elif rows is not None:
            self._storage = rows


def _column_name(key: Any) -> str:
    """Dotted, and with an underscore where batches of ours have a key of that name."""
    name = key if isinstance(key, str) else ".".join(key)
    return f"{name}_" if name in BATCH_KEYS else name


def _leaves(rows: Any) -> dict[str, torch.Tensor]:
    """Tensors of a structure by the names of their columns."""
    if is_tensor_collection(rows):
        return {_column_name(key): leaf for key, leaf in rows.items(True, True)}
    found, _ = tree_flatten_with_path(rows)
    return {keystr(path) or "value": leaf for path, leaf in found}


def _copy(source: Any, target: Any) -> None:
    for leaf, column in zip(_leaves(source).values(), _leaves(target).values(), strict=True):
        column.copy_(leaf)


class _InTable:
    """Gives a buffer of TorchRL a `TableStorage`; see `ReplayBuffer`."""

    def __init__(
        self, capacity: int | None = None, *, name: str | None = None, storage: Any = None, **options: Any
    ) -> None:
        if storage is not None and (capacity, name) != (None, None):
            raise SchemaError(
                f"{type(self).__name__} was given a storage, capacity={shown(capacity)} and name={shown(name)}; "
                "expected either a storage or the others."
            )
        if storage is None:
            compilable = options.get("compilable", False)
            storage = TableStorage(1_000 if capacity is None else capacity, name=name, compilable=compilable)
        super().__init__(storage=storage, **options)  # type: ignore[call-arg]


class ReplayBuffer(_InTable, torchrl.data.ReplayBuffer):
    """`torchrl.data.ReplayBuffer` with its rows in a table: a `TableStorage`.

    Args:
        capacity: number of rows; as in TorchRL 1,000 if nothing is given.
        name: of the table, see `TableStorage`.
        storage: another storage, in place of `capacity` and `name`.
        options: those of the buffer of the same name in TorchRL, with its samplers, writers and transforms.

    Raises:
        SchemaError: a storage together with a capacity or a name.
    """


class PrioritizedReplayBuffer(_InTable, torchrl.data.PrioritizedReplayBuffer):
    """`torchrl.data.PrioritizedReplayBuffer` with its rows in a table; arguments as for `ReplayBuffer`."""


class TensorDictReplayBuffer(_InTable, torchrl.data.TensorDictReplayBuffer):
    """`torchrl.data.TensorDictReplayBuffer` with its rows in a table; arguments as for `ReplayBuffer`."""


class TensorDictPrioritizedReplayBuffer(_InTable, torchrl.data.TensorDictPrioritizedReplayBuffer):
    """`torchrl.data.TensorDictPrioritizedReplayBuffer` with its rows in a table; arguments as for `ReplayBuffer`."""
