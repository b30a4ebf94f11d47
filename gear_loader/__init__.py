"""Gear Loader: a GPU-centric experience-replay store and data loader for PyTorch."""

from __future__ import annotations

from gear_loader import errors
from gear_loader.schema import Column, Schema, Window
from gear_loader.table import Table, TableStats

__all__ = ["Column", "Schema", "Table", "TableStats", "Window", "errors"]
