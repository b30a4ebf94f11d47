"""Parts of trajectories that are committed later: the server's memory of them."""

from __future__ import annotations

import dataclasses
import time

from gear_loader.transport.change_messages import Part
from gear_loader.transport.wire import Limits
from gear_loader.utils.arrays import Array

__all__ = ["MOST_PART", "HeldBytes", "OpenParts"]

MOST_PART = 1 << 22
"""Most bytes of a part."""


@dataclasses.dataclass
class _Open:
    """Parts of one trajectory: rows and data of each, bytes of all, and when the last came."""

    parts: list[tuple[int, Array]]
    size: int = 0
    since: float = 0.0


class HeldBytes:
    """Bytes of the parts of all connections, of at most `most`."""

    def __init__(self, most: int) -> None:
        self.size = 0
        self.most = most


class OpenParts:
    """Parts of a connection's open trajectories.

    A trajectory of which a part does not follow the one before, or that does not fit into the limits, is forgotten:
    its client sends it again as a whole when it is committed.

    Args:
        limits: of the server. held: counts the bytes of all connections.

    Attributes:
        size: bytes of all parts.
    """

    def __init__(self, limits: Limits, held: HeldBytes) -> None:
        self.size = 0
        self._held = held
        self._limits = limits
        self._open: dict[int, _Open] = {}

    def __len__(self) -> int:
        return len(self._open)

    def fits(self, part: Part, bulk: int) -> bool:
        """Whether a part is to be kept; if not, its trajectory is forgotten."""
        entry = self._open.get(part.id)
        fits = part.number == (0 if entry is None else len(entry.parts))
        fits = fits and self.size + bulk <= self._limits.open_bytes
        fits = fits and self._held.size + bulk <= self._held.most
        fits = fits and (entry is not None or len(self._open) < self._limits.open_trajectories)
        if not fits:
            self.take(part.id)
        return fits

    def add(self, part: Part, data: Array) -> None:
        """Keep a part, after `fits`."""
        entry = self._open.setdefault(part.id, _Open([]))
        entry.parts.append((part.rows, data))
        entry.size += len(data)
        entry.since = time.monotonic()
        self.size += len(data)
        self._held.size += len(data)

    def take(self, identity: int) -> list[tuple[int, Array]]:
        """The parts of a trajectory, rows and data of each, which are forgotten; none if there are none."""
        entry = self._open.pop(identity, None)
        if entry is None:
            return []
        self.size -= entry.size
        self._held.size -= entry.size
        return entry.parts

    def clear(self) -> None:
        """Forget all."""
        for identity in list(self._open):
            self.take(identity)

    def expire(self) -> None:
        """Forget trajectories that have got no part for `Limits.open_seconds`."""
        now = time.monotonic()
        for identity in [i for i, each in self._open.items() if now - each.since > self._limits.open_seconds]:
            self.take(identity)
