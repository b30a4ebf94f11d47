"""The message STORE: trajectories to be added to a table."""

from __future__ import annotations

import dataclasses
import json
import struct

import numpy as np

from gear_loader.storage.schema import Schema
from gear_loader.transport.channel import Bytes
from gear_loader.transport.spec import MAX_SPEC_BYTES, read_schema, round_up
from gear_loader.transport.wire import MAX_TEXT, Fields, Limits, ProtocolError, pack_text
from gear_loader.utils.arrays import Array

__all__ = ["Store"]

_FINALS, _AGAIN = 1, 2  # flags


@dataclasses.dataclass(frozen=True)
class Store:
    """The small part of STORE.

    Attributes:
        table: name of the table. schema: its columns.
        lengths: int64 [n], rows of each trajectory. ids: int64 [n], global ids or -1. priorities: float32 [n].
        finals: int64 [n], 1 if the last row is the final step, else 0.
        again: whether the request may have been executed before; then its ids are those of the first time.
    """

    table: str
    schema: Schema
    lengths: Array
    ids: Array
    priorities: Array
    finals: Array
    again: bool = False

    @property
    def columns(self) -> list[tuple[int, int]]:
        """Offset in the bulk part, and bytes, of each column."""
        places, at, steps = [], 0, int(self.lengths.sum())
        for name in self.schema:
            size = self.schema.column_bytes(name, steps, len(self.lengths))
            places.append((at, size))
            at += round_up(size)
        return places

    @property
    def bulk_bytes(self) -> int:
        """Bytes of the bulk part."""
        at, size = self.columns[-1]
        return at + round_up(size)

    def pack(self) -> bytes:
        """Serialize."""
        return b"".join(
            (
                struct.pack("<II", len(self.lengths), int(self.finals.any()) * _FINALS | self.again * _AGAIN),
                self.lengths.astype("<i8").tobytes(),
                self.ids.astype("<i8").tobytes(),
                self.priorities.astype("<f4").tobytes(),
                self.finals.astype("<i8").tobytes() if self.finals.any() else b"",
                pack_text(self.table),
                json.dumps(self.schema.to_json(), separators=(",", ":")).encode(),
            )
        )

    @classmethod
    def most(cls, limits: Limits) -> int:
        """Largest size of the small part."""
        return 8 + 28 * limits.rows + 2 + MAX_TEXT + MAX_SPEC_BYTES

    @classmethod
    def parse(cls, small: Bytes, bulk: int, limits: Limits) -> Store:
        """Parse and validate the small part of a message from an untrusted source.

        Args:
            bulk: bytes of the bulk part. limits: of the server.

        Raises:
            ProtocolError: invalid field; the message names it.
        """
        fields = Fields(small, "STORE")
        n = fields.number(4, "n")
        if n > limits.rows:
            raise ProtocolError(
                f"n of a message STORE is {n:,}; at most {limits.rows:,} trajectories are taken."
            )
        flags = fields.number(4, "flags")
        if flags > _FINALS | _AGAIN:
            raise ProtocolError(f"flags of a message STORE is {flags}; expected 0 to {_FINALS | _AGAIN}.")
        lengths, ids = fields.array(n, "<i8", "lengths"), fields.array(n, "<i8", "ids")
        priorities = fields.array(n, "<f4", "priorities")
        finals = fields.array(n, "<i8", "finals") if flags & _FINALS else np.zeros(n, dtype=np.int64)
        if n and (lengths.min() < 1 or lengths.max() > bulk):
            raise ProtocolError(
                f"lengths of a message STORE has a number outside of 1 to {bulk:,}, the bytes of the bulk part."
            )
        if n and (finals.min() < 0 or (finals >= np.minimum(lengths, 2)).any()):
            raise ProtocolError(
                "finals of a message STORE has a number other than 0 and 1, or a trajectory has no other row."
            )
        table = fields.text("table", 128)
        try:
            schema = read_schema(json.loads(str(fields.rest(), "utf-8")))
        except (ValueError, RecursionError):
            raise ProtocolError("schema of a message STORE is not JSON.") from None
        store = cls(table, schema, lengths, ids, priorities, finals, bool(flags & _AGAIN))
        needed = float(lengths.sum(dtype=np.float64)) * schema.step_bytes + n * schema.trajectory_bytes
        # Not in int64, which could overflow.
        if needed > bulk or store.bulk_bytes != bulk:
            raise ProtocolError(
                f"The bulk part of a message STORE has {bulk:,} bytes, which is not what {n:,} trajectories of "
                f"{needed:,.0f} bytes take."
            )
        return store
