"""Loaders that `accelerate.Accelerator.prepare` has made of a `DataLoader` over our datasets, on several ranks."""

from __future__ import annotations

import sys
from typing import Literal

import torch

_PREPARED = "accelerate.data_loader"


def dealer() -> Literal["dispatcher", "shard"] | None:
    """What of accelerate calls the dataset's `__iter__`, `__len__` or `set_epoch`, on several ranks.

    Returns:
        ``"dispatcher"``: it iterates on rank 0, and deals joined and cut batches to all ranks. ``"shard"``: it iterates
        on all ranks, and takes every rank's share of the batches. None: neither, or there is one rank.
    """
    module = sys.modules.get(_PREPARED)
    if module is None or not torch.distributed.is_available() or not torch.distributed.is_initialized():
        return None
    if torch.distributed.get_world_size() == 1:
        return None
    frame = sys._getframe(1)
    while frame is not None and frame.f_code.co_filename != module.__file__:
        frame = frame.f_back  # type: ignore[assignment]
    if frame is None:
        return None
    loader = type(frame.f_locals.get("self"))
    if loader is module.DataLoaderDispatcher:
        return "dispatcher"
    return "shard" if loader is module.IterableDatasetShard else None


def prepared_error(
    found: Literal["dispatcher", "shard"] | None, *, world_size: int, joins: bool
) -> str | None:
    """The error of a prepared loader that would deliver other rows than the dataset's batches, or None.

    Args:
        found: by `dealer`. world_size: ranks that the dataset shares its batches with; 1 if it gives all to each.
        joins: whether batches can be joined and cut by rows.
    """
    if found is None or (found == "dispatcher" and world_size == 1 and joins):
        return None
    what = "A loader of batch_size=None was prepared by accelerate on several ranks"
    leave = "leave the loader out of accelerator.prepare(): each rank iterates it as it is, and gets its own batches"
    if not joins:
        return (
            f"{what}, which joins and cuts batches; those over Shards and packed ones cannot be. Do {leave}."
        )
    if found == "shard":
        return (
            f"{what} without dispatching, which it cannot share out. Either {leave}; or pass "
            "ranks=gear_loader.Ranks(rank=0, world_size=1) to "
            "the dataset and dispatch_batches=True to accelerate's DataLoaderConfiguration."
        )
    return (
        f"{what}, which deals the batches of rank 0 to all ranks, but this dataset gives each of {world_size} ranks "
        "batches of its own, so that the rows of the others would be missing. Either pass "
        "ranks=gear_loader.Ranks(rank=0, world_size=1) to "
        f"the dataset; or {leave}."
    )
