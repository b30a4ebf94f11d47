"""Trajectories with columns whose values are overwritten."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

import gear_loader as gear

SCHEMA = {
    "obs": gear.Column(torch.int64),
    "image": gear.Column(torch.uint8, (150,)),  # outside of the records
    "state": gear.Column(torch.float32, (3,), mutable=True),
    "wide": gear.Column(torch.int16, (80,), mutable=True),
}


def steps(count: int, number: int) -> dict[str, Any]:
    """A trajectory all of whose values tell its number."""
    return {
        "obs": np.arange(count) + 1_000 * number,
        "image": np.full((count, 150), number % 256, np.uint8),
        "state": np.full((count, 3), number, np.float32),
        "wide": np.full((count, 80), number, np.int16),
    }
