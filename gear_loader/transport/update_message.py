"""The message UPDATE: priorities of trajectories in a table."""

from __future__ import annotations

import dataclasses
import struct

import numpy as np

from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.transport.channel import Bytes
from gear_loader.transport.wire import Fields, Limits, ProtocolError, pack_text

__all__ = ["Update"]

_GENERATIONS, _STRICT = 1, 2  # flags
_MOST_NAME = 128


@dataclasses.dataclass(frozen=True)
class Update:
    """The small part of UPDATE.

    Attributes:
        table: name of the table. updates: its steps are not sent.
        strict: whether a row of a removed trajectory is an error.
    """

    table: str
    updates: PriorityUpdates
    strict: bool

    def pack(self) -> bytes:
        """Serialize."""
        updates = self.updates
        known = updates.generations is not None
        return b"".join(
            (
                struct.pack("<II", len(updates.slots), known * _GENERATIONS | self.strict * _STRICT),
                updates.slots.astype("<i8").tobytes(),
                updates.generations.astype("<i8").tobytes() if updates.generations is not None else b"",
                updates.priorities.astype("<f4").tobytes(),
                pack_text(self.table, _MOST_NAME),
            )
        )

    @classmethod
    def most(cls, limits: Limits) -> int:
        """Largest size of the message."""
        return 8 + 20 * limits.rows + 2 + _MOST_NAME

    @classmethod
    def parse(cls, small: Bytes, limits: Limits) -> Update:
        """Parse and validate a message from an untrusted source.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, "UPDATE")
        n, flags = fields.number(4, "n"), fields.number(4, "flags")
        if n > limits.rows or flags > _GENERATIONS | _STRICT:
            raise ProtocolError(
                f"A message UPDATE has n {n:,} and flags {flags}; expected at most {limits.rows:,} and "
                f"{_GENERATIONS | _STRICT}."
            )
        slots = fields.array(n, "<i8", "slots").astype(np.int64)
        generations = fields.array(n, "<i8", "generations").astype(np.int64) if flags & _GENERATIONS else None
        priorities = fields.array(n, "<f4", "priorities").astype(np.float32)
        table = fields.text("table", _MOST_NAME)
        fields.end()
        updates = PriorityUpdates(slots, np.zeros(n, dtype=np.int64), generations, priorities)
        return cls(table, updates, bool(flags & _STRICT))
