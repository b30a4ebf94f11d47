"""Options of a dataset, checked in one place."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError

__all__ = ["at_least", "check_device", "device_of", "integer"]


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
