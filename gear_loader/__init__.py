"""Gear Loader: a GPU-centric experience-replay store and data loader for PyTorch."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from gear_loader import errors
from gear_loader.dataset import ReplayDataset
from gear_loader.schema import Column, Schema, Window
from gear_loader.selectors import Fifo, Lifo, LinearSchedule, Prioritized, TopK, Uniform
from gear_loader.stats import TableStats
from gear_loader.table import Table

if TYPE_CHECKING:
    from gear_loader import sources
    from gear_loader.datamodule import ReplayDataModule

__all__ = [
    "Column",
    "Fifo",
    "Lifo",
    "LinearSchedule",
    "Prioritized",
    "ReplayDataModule",
    "ReplayDataset",
    "Schema",
    "Table",
    "TableStats",
    "TopK",
    "Uniform",
    "Window",
    "errors",
    "sources",
]


def __getattr__(name: str) -> Any:
    # Loaded on first use: they need packages that the core does not.
    if name == "ReplayDataModule":
        return importlib.import_module("gear_loader.datamodule").ReplayDataModule
    if name == "sources":
        return importlib.import_module("gear_loader.sources")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
