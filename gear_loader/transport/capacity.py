"""What a table's owner tells those who choose where trajectories go."""

from __future__ import annotations

import json

import numpy as np

from gear_loader.errors import TransportError
from gear_loader.storage.operations import READY, UNSET
from gear_loader.storage.table import Table

__all__ = ["mass_of", "read_room", "room_of", "told_room"]


def room_of(table: Table) -> int:
    """Steps for which there is room without evicting anything, roughly. Takes no lock."""
    return table.free_steps() if len(table) < table.region.layout.max_trajectories else 0


def mass_of(table: Table) -> float:
    """The sum of the priorities that trajectories were added with, roughly; those without one have the largest, and
    at least 1. Takes no lock, and looks at every slot."""
    given = table.priorities()[table.slot_states()[0] == READY].astype(np.float64)
    unset = given == UNSET
    largest = max(1.0, float(given[~unset].max(initial=0)))
    return float(given[~unset].sum() + largest * unset.sum())


def told_room(table: Table) -> bytes:
    """Both, as `read_room` reads it."""
    return json.dumps({"free_steps": room_of(table), "mass": mass_of(table)}).encode()


def read_room(data: bytes) -> tuple[int, float]:
    """`room_of` and `mass_of` a table elsewhere.

    Raises:
        TransportError: these are other bytes.
    """
    try:
        told = json.loads(data)
        free, mass = int(told["free_steps"]), float(told["mass"])
    except (KeyError, OverflowError, TypeError, ValueError):
        raise TransportError(
            f"A server told of a table's room {data[:100]!r}; expected free_steps and mass. Run the same version of "
            "Gear Loader on all nodes."
        ) from None
    if free < 0 or not 0 <= mass < float("inf"):
        raise TransportError(f"A server told of a table with {free} free steps and a mass of {mass}.")
    return free, mass
