"""References to the memory of a delivered batch: whether anybody still holds it."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from gear_loader.utils.notices import notice

__all__ = ["BatchReferences", "aliased", "can_count"]

_use_count = getattr(torch._C, "_storage_Use_Count", None)


def can_count() -> bool:
    """Whether this PyTorch counts the references to a storage; if not, a notice says once what that costs."""
    if _use_count is None:
        notice(
            "references",
            f"PyTorch {torch.__version__} has no torch._C._storage_Use_Count: each batch gets memory of its own, which "
            "is slower. ReplayDataset(copy=False) recycles memory without counting references.",
        )
    return _use_count is not None


def aliased(value: Any) -> Any:
    """New tensors over the memory of a batch's tensors, which are nobody else's yet.

    So each reference to them, Python's or autograd's, and each view or array made of them holds the storage, and what
    is done to them in place (``requires_grad_()``, ``unsqueeze_()``) does not reach the next batch in the same memory.
    """
    if isinstance(value, dict):
        return {key: aliased(part) for key, part in value.items()}
    return value.data


def _tensors(batch: Mapping[str, Any]) -> Iterator[torch.Tensor]:
    for value in batch.values():
        if isinstance(value, dict):
            yield from _tensors(value)
        else:
            yield value


class BatchReferences:
    """The references to the storages of one batch's buffers.

    Args:
        batch: tensors of the buffers, which no consumer gets; `aliased` makes those that are delivered.
    """

    def __init__(self, batch: Mapping[str, Any]) -> None:
        storages = (tensor.untyped_storage() for tensor in _tensors(batch))
        self._storages = list({storage._cdata: storage for storage in storages}.values())
        self._identities = [storage._cdata for storage in self._storages]
        self._addresses = [storage.data_ptr() for storage in self._storages]
        self._counts: list[int] = []

    def mark(self) -> None:
        """Remember the counts as those of the buffers alone; call it right before each delivery."""
        self._counts = self._count()

    @property
    def held(self) -> bool:
        """Whether there are other references than at `mark`, or memory has been moved (as sending a tensor to another
        process does); then the buffers must not be filled again."""
        return (
            self._count() != self._counts
            or [storage.data_ptr() for storage in self._storages] != self._addresses
        )

    def _count(self) -> list[int]:
        """References to each storage: those of tensors, then those to the storage's only Python object."""
        assert _use_count is not None
        return [*map(_use_count, self._identities), *map(sys.getrefcount, self._storages)]
