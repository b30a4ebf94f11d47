"""Checks of options."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError

__all__ = ["at_least", "check_device", "device_of", "integer"]


def integer(name: str, value: Any) -> int:
    """Return `value` as an int; SchemaError if it is not an integer."""
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        raise SchemaError(f"{name} is {value!r}; expected an integer.")
    return int(value)


def at_least(name: str, value: Any, least: int = 1, otherwise: str = "") -> int:
    """Return `value` as an int; SchemaError if it is not an integer of at least `least`.

    Args:
        otherwise: other accepted values, for the error.
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or value < least:
        raise SchemaError(f"{name} is {value!r}; expected an integer of at least {least}{otherwise}.")
    return int(value)


def check_device(device: str | torch.device) -> None:
    """Raise SchemaError if this is not a device name. Does not initialize CUDA."""
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
    """Resolve ``"auto"``, a name or a torch device to a device; SchemaError if it does not exist."""
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
