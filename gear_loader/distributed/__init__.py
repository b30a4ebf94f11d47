"""Sharded tables of many ranks: global and local selection, remote rows, placement, checkpoints."""

from __future__ import annotations

from typing import TYPE_CHECKING

from gear_loader.utils.lazy import loader

if TYPE_CHECKING:
    from gear_loader.distributed.checkpoint import load, save
    from gear_loader.distributed.placement import Placement
    from gear_loader.distributed.row_cache import CacheStats
    from gear_loader.distributed.shards import Shards
    from gear_loader.distributed.state_parts import join_states

__all__ = ["CacheStats", "Placement", "Shards", "join_states", "load", "save"]

_MODULES = {
    "CacheStats": "row_cache",
    "Placement": "placement",
    "Shards": "shards",
    "join_states": "state_parts",
    "load": "checkpoint",
    "save": "checkpoint",
}

__getattr__ = loader(__name__, _MODULES)
