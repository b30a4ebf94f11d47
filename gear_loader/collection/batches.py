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
from torch.utils.data._utils.collate import default_collate, default_collate_fn_map, default_convert

from gear_loader.errors import SchemaError
from gear_loader.storage.ragged import Ragged
from gear_loader.utils.formatting import described

_STACKED = (
    "A DataLoader was made without batch_size=None, so it would stack whole batches into one. The dataset makes "
    "the batches itself, of its own batch_size; use DataLoader(dataset, batch_size=None)."
)
_CONVERTED = (
    "A DataLoader of batches that are TensorDicts was made without collate_fn, and its own cannot handle them; use "
    "DataLoader(dataset, batch_size=None, collate_fn=dataset.collate)."
)
_COLLATED = (
    "A DataLoader of the Trainer of transformers was made without batch_size=None, so it would stack whole batches "
    "into one. The dataset makes the batches itself, of its own batch_size; override the trainer's "
    "get_train_dataloader to return self.accelerator.prepare(DataLoader(dataset, batch_size=None)). On several ranks "
    "pass ranks=gear_loader.Ranks(rank=0, world_size=1) to the dataset too."
)


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

    def __missing__(self, key: Any) -> NoReturn:
        raise KeyError(f"The batch has no {key!r}; its keys are {list(self)}.")

    def __copy__(self) -> Batch:
        return Batch(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Batch:
        return Batch({key: copy.deepcopy(value, memo) for key, value in self.items()})

    def __reduce__(self) -> tuple[Any, ...]:
        return collections.OrderedDict, (), None, None, iter(self.items())


def _reduce_for_worker(batch: Batch) -> tuple[Any, ...]:
    """How a `DataLoader` worker sends a batch: as one."""
    return Batch, (dict(batch),)


def loader_error(dataset: object, *, tensordicts: bool) -> str | None:
    """The error of a `DataLoader` that calls a dataset's `__iter__` and cannot deliver its batches, or None.

    A `DataLoader` of another dataset that wraps this one is not seen here; it fails when it stacks `Batch` objects.

    Args:
        dataset: the dataset. tensordicts: whether its batches are TensorDicts.
    """
    frame = sys._getframe(1)
    while frame.f_back is not None and frame.f_code.co_name == "__iter__":
        frame = frame.f_back
    if (
        frame.f_code.co_filename != fetch.__file__
    ):  # the locals of other frames would be kept, and batches among them
        return None
    fetcher = frame.f_locals.get("self")
    if getattr(fetcher, "dataset", None) is not dataset:
        return None
    collate = getattr(fetcher, "collate_fn", None)
    if getattr(fetcher, "auto_collation", False):
        if getattr(collate, "__module__", "").partition(".")[0] == "transformers":
            return _COLLATED
        return _STACKED if collate is default_collate else None
    return _CONVERTED if tensordicts and collate is default_convert else None


def refuse(error: str) -> Iterator[Batch]:
    """An iterator that raises SchemaError at its first request: Lightning hides an error of `__iter__` itself."""
    raise SchemaError(error)
    yield


def _refuse_collation(batches: Any, *, collate_fn_map: Any = None) -> NoReturn:
    """Takes the place of `torch.utils.data.default_collate` for batches."""
    raise SchemaError(_STACKED)


def _flatten(batch: Batch) -> tuple[list[Any], list[str]]:
    return list(batch.values()), list(batch)


def _flatten_with_keys(batch: Batch) -> tuple[list[tuple[Any, Any]], list[str]]:
    return [(pytree.MappingKey(key), value) for key, value in batch.items()], list(batch)


def _unflatten(values: Iterable[Any], keys: Any) -> Batch:
    return Batch(zip(keys, values, strict=True))


def _ragged(parts: Iterable[Any], shape: Any) -> Ragged:
    values, offsets = parts
    return Ragged._of(values, offsets, shape)


default_collate_fn_map[Batch] = _refuse_collation
pytree.register_pytree_node(
    Batch,
    _flatten,
    _unflatten,
    serialized_type_name="gear_loader.Batch",
    flatten_with_keys_fn=_flatten_with_keys,
)
pytree.register_pytree_node(
    Ragged,
    lambda ragged: ([ragged.values, ragged.offsets], ragged.shape),
    _ragged,
    serialized_type_name="gear_loader.Ragged",
    to_dumpable_context=list,
    from_dumpable_context=tuple,
)
ForkingPickler.register(Batch, _reduce_for_worker)
