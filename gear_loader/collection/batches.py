"""`Batch`: the dict of tensors that datasets yield."""

from __future__ import annotations

import collections
import copy
import sys
from collections.abc import Iterable, Iterator
from multiprocessing.reduction import ForkingPickler
from typing import Any, NoReturn

import torch
from torch.utils import _pytree as pytree
from torch.utils.data._utils import fetch
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map

from gear_loader.errors import SchemaError
from gear_loader.utils.formatting import described

__all__ = ["Batch", "is_stacked", "refuse_stacking"]


class Batch(dict[str, Any]):
    """A dict of name -> tensor whose rows belong together; see `ReplayDataset` for the names.

    Its `repr` shows shapes and dtypes. To PyTorch's pytrees, `torch.compile` and Lightning it is like any dict. It is
    pickled as an OrderedDict, so that `torch.load` reads it without Gear Loader and with ``weights_only``.
    """

    def __repr__(self) -> str:
        index = self.get("index")
        rows = (
            f"{len(index):,} rows" if isinstance(index, torch.Tensor) and index.ndim else f"{len(self)} keys"
        )
        width = max((len(str(key)) for key in self), default=0)
        lines = [f"\n  {key!s:<{width}}  {described(value)}" for key, value in self.items()]
        return f"<Batch of {rows}{':' if lines else ''}{''.join(lines)}>"

    def __copy__(self) -> Batch:
        return Batch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return Batch({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, (), None, None, iter(self.items())


def _reduce_for_worker(batch: Batch) -> tuple[Any, ...]:
    """How a `DataLoader` worker sends a batch: as one."""
    return Batch, (dict(batch),)


def is_stacked(dataset: object) -> bool:
    """Whether the caller of a dataset's `__iter__` is a `DataLoader` that would stack its batches.

    A `DataLoader` of another dataset that wraps this one is not seen here; it fails when it stacks `Batch` objects.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name == "__iter__":
        frame = frame.f_back
    if (
        frame.f_code.co_filename != fetch.__file__
    ):  # the locals of other frames would be kept, and batches among them
        return False
    fetcher = frame.f_locals.get("self")
    collates = getattr(fetcher, "auto_collation", False) and getattr(fetcher, "dataset", None) is dataset
    return bool(collates) and getattr(fetcher, "collate_fn", None) is default_collate


def refuse_stacking() -> Iterator[Batch]:
    """An iterator that raises SchemaError at its first request: Lightning hides an error of `__iter__` itself."""
    yield _refuse_collation(())


def _refuse_collation(batches: Any, *, collate_fn_map: Any = None) -> NoReturn:
    """Takes the place of `torch.utils.data.default_collate` for batches."""
    raise SchemaError(
        "A DataLoader was made without batch_size=None, so it would stack whole batches into one. The dataset makes "
        "the batches itself, of its own batch_size; use DataLoader(dataset, batch_size=None)."
    )


def _flatten(batch: Batch) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(key), value) for key, value in batch.items()], list(batch)


def _unflatten(values: Iterable[Any], keys: Any) -> Batch:
    return Batch(zip(keys, values, strict=True))


default_collate_fn_map[Batch] = _refuse_collation
pytree.register_pytree_node(
    Batch,
    _flatten,
    _unflatten,
    serialized_type_name="gear_loader.Batch",
    flatten_with_keys_fn=_flatten_with_keys,
)
ForkingPickler.register(Batch, _reduce_for_worker)
