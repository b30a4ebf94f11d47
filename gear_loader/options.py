"""Options of a dataset, checked in one place."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.schema import Schema, Window

__all__ = ["at_least", "check_device", "check_windows", "device_of", "integer", "windows_of"]


def integer(name: str, value: Any) -> int:
    """`value` as an int; SchemaError if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SchemaError(f"{name} is {value!r}; expected an integer.")
    return int(value)


def at_least(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """`value` as an int of at least `least`; SchemaError if it is none."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise SchemaError(f"{name} is {value!r}; expected an integer of at least {least}{otherwise}.")
    return int(value)


def check_device(device: str | torch.device) -> None:
    """SchemaError if it is no name of a device; asks nothing of CUDA."""
    _named_device(device)


def _named_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device("cpu" if device == "auto" else device)
    except (RuntimeError, TypeError):
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise SchemaError(f"device is {device!r}; expected 'auto', 'cpu' or a CUDA device.")
    return chosen


def device_of(device: str | torch.device) -> torch.device:
    """The device that ``"auto"``, a name or a torch device stands for; SchemaError if it is not there."""
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    chosen = _named_device(device)
    if chosen.type == "cuda":
        if not torch.cuda.is_available():
            raise SchemaError(
                f"device is {device!r}, but torch sees no CUDA device; use device='cpu' or 'auto'."
            )
        if chosen.index is None:
            chosen = torch.device("cuda", torch.cuda.current_device())
    return chosen


def check_windows(windows: Any, columns: Sequence[str] | None) -> None:
    """SchemaError if these are no windows, whatever the schema."""
    if isinstance(columns, str):
        raise SchemaError(
            f"columns is {columns!r}; expected a sequence of column names, for example [{columns!r}]."
        )
    if windows == {} or (columns is not None and not len(columns)):
        raise SchemaError("No columns were asked for; expected at least one in windows or columns.")
    if isinstance(windows, Window):
        return
    if not isinstance(windows, Mapping):
        raise SchemaError(
            f"windows is {windows!r}; expected a Window or a mapping of column names to Windows."
        )
    if columns is not None and set(columns) != set(windows):
        raise SchemaError(
            f"columns {list(columns)} and the windows' columns {list(windows)} differ; give one."
        )
    for name, window in windows.items():
        if not isinstance(window, Window):
            raise SchemaError(f"The window of column {name!r} is {window!r}; expected gear_loader.Window.")


def windows_of(schema: Schema, windows: Any, columns: Sequence[str] | None) -> dict[str, Window]:
    """Column -> window, in the order of the schema; SchemaError if they do not fit it."""
    check_windows(windows, columns)
    if isinstance(windows, Window):
        chosen = dict.fromkeys(list(schema) if columns is None else list(columns), windows)
    else:
        chosen = dict(windows)
    unknown = [name for name in chosen if name not in schema]
    if unknown:
        raise SchemaError(
            f"Columns {list(chosen)} were asked for; the table has {list(schema)}. Unknown: {unknown}."
        )
    return {name: chosen[name] for name in schema if name in chosen}
