"""The bytes of one exchange of a selection: what goes into them, and what comes out."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np

from gear_loader.distributed.records import PUBLISHED, UPDATE
from gear_loader.storage.recovery import Array

__all__ = ["Forwarding", "Message", "Outbox", "as_bytes"]

_ROOM = 32
_MOVES = 4
_PLACE = ("shard", "slot", "generation")


def as_bytes(values: Array) -> Array:
    """An array's bytes, uint8 [n]."""
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8)


class Outbox:
    """Updates that wait to be sent to the ranks that own their shards.

    Args:
        leads: rank that answers for each shard.
        size: ranks.
    """

    def __init__(self, leads: Sequence[int], size: int) -> None:
        self._leads: Array = np.array(leads, dtype=np.int64)
        self._owners = len(set(leads))
        self._waiting: list[list[Array]] = [[] for _ in range(size)]
        self._turn = 1

    def put(self, updates: Array) -> None:
        """Let some more wait."""
        updates["turn"] = self._turn
        self._turn += 1
        owners = self._leads[updates["shard"]]
        for rank in np.unique(owners).tolist():
            self._waiting[rank].append(updates[owners == rank])

    def put_back(self, taken: Sequence[Array]) -> None:
        """What `take` returned was not sent."""
        for rank, updates in enumerate(taken):
            self._waiting[rank].insert(0, updates)

    @property
    def waiting(self) -> int:
        """Most that wait for one rank."""
        return max(sum(len(part) for part in parts) for parts in self._waiting)

    def room(self, batch_size: int) -> int:
        """Updates for which every message has room; all ranks come to the same number. What is more comes behind."""
        return _ROOM + 2 * -(-batch_size // self._owners)

    def take(self, room: int) -> list[Array]:
        """Up to `room` updates for each rank, the ones that have waited longest."""
        taken = []
        for rank, parts in enumerate(self._waiting):
            everything = np.concatenate(parts) if parts else np.empty(0, dtype=UPDATE)
            taken.append(everything[:room])
            self._waiting[rank] = [everything[room:]] if len(everything) > room else []
        return taken


class Forwarding:
    """Where trajectories have gone that moved to another shard lately: for updates that know their old places."""

    def __init__(self) -> None:
        self._moves: list[dict[tuple[int, int, int], tuple[int, int, int]]] = []

    def learn(self, moves: Array) -> None:
        """Some have moved, `MOVE` [n]. The moves of the last few times are known."""
        old = zip(*(moves[f"old_{name}"].tolist() for name in _PLACE), strict=True)
        new = zip(*(moves[f"new_{name}"].tolist() for name in _PLACE), strict=True)
        self._moves = [*self._moves, dict(zip(old, new, strict=True))][-_MOVES:]

    def readdress(self, updates: Array) -> Array:
        """Updates, with the places by which their trajectories are known now."""
        fields = [updates[name].tolist() for name in _PLACE] if self._moves else []
        for row, place in enumerate(zip(*fields, strict=True)):
            found = place
            for moves in self._moves:
                found = moves.get(found, found)
            if found != place:
                for name, value in zip(_PLACE, found, strict=True):
                    updates[name][row] = value
        return updates


@dataclasses.dataclass
class Message:
    """What one rank sends another in an exchange.

    Attributes:
        waiting: updates left over, the most for one rank.
        lost: bool [S]: shards that it cannot reach.
        published: `PUBLISHED` [k], of its shards.
        records: of rows of its shards.
        updates: `UPDATE` [n], n at most the room agreed on.
    """

    waiting: int
    lost: Array
    published: Array
    records: Array
    updates: Array

    def pack(self, room: int) -> Array:
        """As bytes, of the size that `size_of` gives."""
        numbers: Array = np.array([self.waiting, len(self.updates)], dtype=np.int64)
        padding = np.zeros((room - len(self.updates)) * UPDATE.itemsize, dtype=np.uint8)
        pieces = (numbers, np.packbits(self.lost), self.published, self.records, self.updates)
        return np.concatenate([*(as_bytes(piece) for piece in pieces), padding])

    @staticmethod
    def size_of(shards: int, own: int, rows: int, record: Any, room: int) -> int:
        """Bytes of a letter of a rank with `own` shards and `rows` records."""
        each = (own * PUBLISHED.itemsize, rows * int(record.itemsize), room * UPDATE.itemsize)
        return 16 + -(-shards // 8) + sum(each)

    @classmethod
    def unpack(cls, data: Array, shards: int, own: int, rows: int, record: Any) -> Message:
        """The inverse of `pack`."""
        waiting, count = data[:16].view(np.int64).tolist()
        at = 16 + -(-shards // 8)
        lost = np.unpackbits(data[16:at])[:shards].astype(bool)
        sizes = [own * PUBLISHED.itemsize, rows * record.itemsize, count * UPDATE.itemsize]
        parts = []
        for size, dtype in zip(sizes, (PUBLISHED, record, UPDATE), strict=True):
            parts.append(data[at : at + size].copy().view(dtype))
            at += size
        return cls(waiting, lost, *parts)
