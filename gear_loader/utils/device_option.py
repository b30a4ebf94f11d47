"""Checks of the option `device`."""

from __future__ import annotations

import contextlib

import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import shown


def check_device(device: str | torch.device | int) -> None:
    """Raise SchemaError if this is not a device name. Does not initialize CUDA."""
    _named_device(device)


def _named_device(device: str | torch.device | int) -> torch.device:
    chosen = None
    if isinstance(device, torch.device):
        chosen = device
    elif isinstance(device, str):
        with contextlib.suppress(RuntimeError):
            chosen = torch.device("cpu" if device == "auto" else device)
    elif isinstance(device, int) and not isinstance(device, bool) and 0 <= device < 128:
        chosen = torch.device("cuda", device)
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise SchemaError(f"device is {shown(device)}; expected 'auto', 'cpu' or a CUDA device.")
    return chosen


def device_of(device: str | torch.device) -> torch.device:
    """Resolve ``"auto"``, a name or a torch device to a device; SchemaError if it does not exist."""
    if isinstance(device, str) and device == "auto":
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
