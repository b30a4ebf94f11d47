"""Bringing trajectories that lie on disk only back into memory, to write values of theirs."""

from __future__ import annotations

from gear_loader.storage.engine import Engine
from gear_loader.utils.arrays import Array
from gear_loader.utils.waiting import Backoff

_AT_ONCE = 10
"""Attempts before it is waited in between."""
_PIECE_BYTES = 64 << 20
"""Most bytes of trajectories that are brought back into memory at once, unless one has more."""


class Recall:
    """Brings trajectories back, as many at a time as there is room for.

    They are written to at once, in pieces: the table's owner may write them and move them to disk again meanwhile.

    Attributes:
        timeout: seconds that it waits for room.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self._backoff: Backoff | None = None
        self._attempt = 0

    @property
    def timeout(self) -> float:
        """Seconds that it waits for room."""
        return 0.0 if self._backoff is None else self._backoff.timeout

    def progressed(self) -> None:
        """Begin to count attempts and time anew."""
        self._backoff, self._attempt = None, 0

    def bring(self, slots: Array, more: int = 0) -> bool:
        """Bring some of the trajectories (int64 [n], distinct) back; return False if there was no room in time.

        The caller does not hold the table's lock. They are to be looked for again.

        Args:
            more: blocks that are needed beside them: else the trajectories might be moved to disk again for these.
        """
        engine = self._engine
        piece = engine.index.piece(slots, _PIECE_BYTES)
        if not more or engine.index.has_room_beside(piece, more):
            engine.load_from_disk(piece)
        self._backoff, self._attempt = self._backoff or engine.reader().backoff(), self._attempt + 1
        # They may also be moved to disk again and again.
        waits = engine.index.request_from_disk(piece, more) or self._attempt >= _AT_ONCE
        return not waits or self._backoff.sleep()
