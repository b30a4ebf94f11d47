"""References to the memory of a delivered batch: whether anybody still holds it."""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gear_loader.collection.batches import Batch
from gear_loader.utils.notices import notice

_use_count: Any = getattr(torch._C, "_storage_Use_Count", None)
_data = operator.attrgetter("data")
_address = torch.UntypedStorage.data_ptr


def can_count() -> bool:
    """Whether this PyTorch counts the references to a storage; if not, a notice says once what that costs."""
    if _use_count is None:
        notice(
            "references",
            f"PyTorch {torch.__version__} has no torch._C._storage_Use_Count: each batch gets memory of its own, which "
            "is slower. Prefetch(copy=False) recycles memory without counting references.",
        )
    return _use_count is not None


_ARENA_BYTES = 4096
_LINE = 64


class Arena:
    """One allocation for each dtype of a batch's small tensors, so that references to few storages are counted.

    A tensor that is kept keeps those of its dtype, so an allocation is no larger than a page. One for all dtypes could
    not be saved: `torch.save` refuses tensors of different dtypes in one storage.
    """

    def __init__(self) -> None:
        self._memory: dict[torch.dtype, torch.Tensor] = {}
        self._used: dict[torch.dtype, int] = {}

    def empty(self, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor | None:
        """An uninitialised tensor, aligned to a cache line; None if it is too large."""
        count, first = math.prod(shape), self._used.get(dtype, 0)
        if (first + count) * dtype.itemsize > _ARENA_BYTES:
            return None
        if not first:
            self._memory[dtype] = torch.empty(_ARENA_BYTES // dtype.itemsize, dtype=dtype, device="cpu")
        lines = -(-count * dtype.itemsize // _LINE)
        self._used[dtype] = first + lines * _LINE // dtype.itemsize
        return self._memory[dtype][first : first + count].view(shape).data


def aliased(batch: Mapping[str, Any]) -> dict[str, Any]:
    """New tensors over the memory of a batch's tensors, which are nobody else's yet.

    So each reference to them, Python's or autograd's, and each view or array made of them holds the storage, and what
    is done to them in place (``requires_grad_()``, ``unsqueeze_()``) does not reach the next batch in the same memory.
    """
    return {key: aliased(value) if isinstance(value, dict) else value.data for key, value in batch.items()}


def tensors_of(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    """The tensors of a batch, in their order."""
    for value in batch.values():
        if isinstance(value, dict):
            yield from tensors_of(value)
        else:
            yield value


class BatchReferences:
    """The references to the storages of one batch's buffers.

    Those present now count as the buffers' own, as long as they are there; all others are a consumer's.

    Args:
        batch: tensors of the buffers, which no consumer gets; `aliases` makes those that are delivered.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        storages = (tensor.untyped_storage() for tensor in tensors_of(batch))
        self._storages = list({storage._cdata: storage for storage in storages}.values())
        self._identities = [storage._cdata for storage in self._storages]
        flat = not any(isinstance(value, dict) for value in batch.values())
        self._flat = (tuple(batch), tuple(batch.values())) if flat else None
        self._batch = batch
        self._own = self._look()

    def aliases(self) -> Batch:
        """The tensors to deliver; see `aliased`."""
        if self._flat is None:
            return Batch(aliased(self._batch))
        keys, tensors = self._flat
        return Batch(zip(keys, map(_data, tensors), strict=True))

    @property
    def held(self) -> bool:
        """Whether there are references of a consumer, or memory has been moved (as sending a tensor to another
        process does); then the buffers must not be filled again."""
        storages, own = self._storages, self._own
        now = [*map(_use_count, self._identities), *map(sys.getrefcount, storages), *map(_address, storages)]
        if now == own:
            return False
        counts = 2 * len(self._storages)
        held = now[counts:] != own[counts:] or any(map(operator.gt, now[:counts], own[:counts]))
        self._own = [
            *map(min, now[:counts], own[:counts]),
            *own[counts:],
        ]  # what is gone was not the buffers' own
        return held

    def _look(self) -> list[int]:
        """For each storage the references of tensors, then those to its only Python object, then the addresses."""
        storages = self._storages
        return [*map(_use_count, self._identities), *map(sys.getrefcount, storages), *map(_address, storages)]
