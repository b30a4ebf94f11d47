"""Routes new priorities from the ranks that set them to the sum trees of the shards that own the rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.records import UPDATE, Outbox
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.errors import SchemaError
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.updates import request
from gear_loader.selection.weights import checked_leaves
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.utils.arrays import Array, as_array

_MIGRATIONS = 4  # migrations that the history remembers
_KEY = ("shard", "slot", "generation")


def checked_shards(shard: Any, count: int, num_shards: int) -> Array:
    """The shards of a user's rows, int64 [count]; SchemaError if they do not fit."""
    if shard is None and num_shards == 1:
        return np.zeros(count, dtype=np.int64)
    values = None if shard is None else np.asarray(as_array(shard, "shard"))
    if values is None or values.dtype.kind not in "iu" or values.shape != (count,):
        got = "missing" if values is None else f"{values.dtype} {list(values.shape)}"
        raise SchemaError(
            f"shard is {got}; expected integers [{count}] beside index: give the whole batch, or "
            "shard=batch['shard']. Nothing was changed."
        )
    if count and not (values.min() >= 0 and values.max() < num_shards):
        raise SchemaError(
            f"shard has {values.min()} to {values.max()}; expected 0 to {num_shards - 1}. Nothing was changed."
        )
    return values.astype(np.int64)


class MoveHistory:
    """The last migrations, by which updates of old slots find the new ones."""

    def __init__(self) -> None:
        self._moves: list[dict[tuple[int, int, int], tuple[int, int, int]]] = []

    def record(self, moves: Array) -> None:
        """Remember one migration, `MOVE` [n]."""
        old = zip(*(moves[f"old_{name}"].tolist() for name in _KEY), strict=True)
        new = zip(*(moves[f"new_{name}"].tolist() for name in _KEY), strict=True)
        self._moves = [*self._moves, dict(zip(old, new, strict=True))][-_MIGRATIONS:]

    def redirect(self, updates: Array) -> Array:
        """Write the current shard, slot and generation of each update's trajectory into `updates`; return them."""
        fields = [updates[name].tolist() for name in _KEY] if self._moves else []
        for row, key in enumerate(zip(*fields, strict=True)):
            current = key
            for moves in self._moves:
                current = moves.get(current, current)
            if current != key:
                for name, value in zip(_KEY, current, strict=True):
                    updates[name][row] = value
        return updates


class UpdateRouter:
    """The priority updates of one selection: queued for other ranks, or received for this rank's shards.

    Args:
        samplers: shard -> shard sampler, of this rank's shards.

    Attributes:
        outbox: updates to be sent with the next exchange.
        received: updates for this rank's shards that count after a later draw.
        draws: number of draws so far.
    """

    def __init__(self, shards: ShardTables, samplers: Mapping[int, Any], exchange: SingleProcess) -> None:
        self._shards, self._samplers, self._exchange = shards, samplers, exchange
        self._history = MoveHistory()
        self.reset([])

    def reset(self, received: list[Array]) -> None:
        """Replace all updates by these, which count as received."""
        self.draws = 0
        self.received = received
        self.outbox = Outbox(self._shards.leads, self._exchange.size)

    def validate(
        self, sampler: Sampler, index: Any, priority: Any, *, generation: Any, anchor: Any, shard: Any
    ) -> Array:
        """Validate a user's priority updates; return them as `UPDATE` [n].

        Raises:
            PriorityError, SchemaError: as `ReplayDataset.update_priority`.
        """
        new = request(index, priority, generation=generation, anchor=anchor, unit=sampler.unit)
        checked_leaves(sampler, new.priorities)
        updates: Array = np.zeros(len(new.slots), dtype=UPDATE)
        updates["shard"] = checked_shards(shard, len(new.slots), self._shards.num_shards)
        updates["slot"], updates["step"], updates["priority"] = new.slots, new.steps, new.priorities
        updates["generation"] = -1 if new.generations is None else new.generations
        return updates

    def put(self, updates: Array) -> None:
        """Queue updates for the next exchange."""
        self.outbox.put(self._history.redirect(updates))

    def flush(self) -> None:
        """Send all queued updates to their owners now; the draw from which they count stays the same."""
        queued, counts = self.outbox.take(self.outbox.longest)
        queued["draw"] = self.draws
        self._exchange.barrier()
        owned, _ = self._exchange.send(queued, counts)
        if len(owned):
            self.received.append(owned)

    def redirect(self, moves: Array) -> None:
        """Let the updates of trajectories that migrated, `MOVE` [n], follow them to their new shards."""
        self._history.record(moves)
        self.flush()
        held = np.concatenate([np.empty(0, dtype=UPDATE), *self.received])
        parts = self._exchange.share_array(self._history.redirect(held))
        owned = [part[np.isin(part["shard"], list(self._samplers))] for part in parts]
        self.received = [part for part in owned if len(part)]

    def apply(self, draws: int) -> None:
        """Apply the updates of this rank's shards that were sent before draw number `draws`, in the order of calls."""
        due = [part[part["draw"] < draws] for part in self.received]
        self.received = [part[part["draw"] >= draws] for part in self.received]
        self.received = [part for part in self.received if len(part)]
        if not due:
            return
        updates = np.concatenate(due)  # a message may hold updates of several batches
        updates = updates[np.argsort(updates["order"], kind="stable")]
        for shard, shard_sampler in self._samplers.items():
            own = updates[updates["shard"] == shard]
            changes = np.flatnonzero(np.diff(own["generation"] < 0)) + 1
            for part in np.split(own, changes):
                if len(part):
                    shard_sampler.update(_as_priority_updates(part))


def _as_priority_updates(updates: Array) -> PriorityUpdates:
    slots, steps, generations = (
        np.ascontiguousarray(updates[name]) for name in ("slot", "step", "generation")
    )
    known = None if generations[0] < 0 else generations
    return PriorityUpdates(slots, steps, known, np.ascontiguousarray(updates["priority"]))
