"""Sharded tables of many ranks: global and local selection, rows of other nodes, placement, checkpoints."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from gear_loader.distributed.checkpoint import load, save
    from gear_loader.distributed.placement import Placement
    from gear_loader.distributed.shards import Shards

__all__ = ["Placement", "Shards", "load", "save"]

_MODULES = {"Placement": "placement", "Shards": "shards", "load": "checkpoint", "save": "checkpoint"}


def __getattr__(name: str) -> Any:
    if name not in _MODULES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(f"{__name__}.{_MODULES[name]}"), name)
    globals()[name] = value
    return value
