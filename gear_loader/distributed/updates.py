"""New priorities on their way from the ranks that give them to the trees of the shards that they are for."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.distributed.exchange import SingleProcess
from gear_loader.distributed.messages import Forwarding, Outbox
from gear_loader.distributed.records import UPDATE
from gear_loader.distributed.shards import Shards
from gear_loader.errors import SchemaError
from gear_loader.selection.prioritized import checked_weights
from gear_loader.selection.selectors import Selector
from gear_loader.selection.updates import PriorityUpdates, request
from gear_loader.utils.arrays import Array, as_array

__all__ = ["Updates"]


class Updates:
    """The updates of one selection.

    Args:
        shards: all of them. engines: shard -> engine, of this rank's. exchange: of the selection.

    Attributes:
        outbox: those that wait to be sent.
        received: those for this rank's shards that count after a later draw.
        clock: draws so far.
    """

    def __init__(self, shards: Shards, engines: Mapping[int, Any], exchange: SingleProcess) -> None:
        self._shards = shards
        self._engines = engines
        self._exchange = exchange
        self._forwarding = Forwarding()
        self.clock = 0
        self.received: list[Array] = []
        self.outbox = Outbox(shards.leads, exchange.size)

    def start_anew(self, received: list[Array]) -> None:
        """Forget all but these, which have been received."""
        self.clock = 0
        self.received = received
        self.outbox = Outbox(self._shards.leads, self._exchange.size)

    def checked(
        self, selector: Selector, index: Any, priority: Any, *, generation: Any, anchor: Any, shard: Any
    ) -> Array:
        """What a user gave, `UPDATE` [n].

        Raises:
            As `ReplayDataset.update_priority`.
        """
        new = request(index, priority, generation=generation, anchor=anchor, unit=selector.unit)
        checked_weights(selector, new.priorities)
        updates: Array = np.zeros(len(new.slots), dtype=UPDATE)
        updates["shard"] = self._checked_shards(shard, len(new.slots))
        updates["slot"], updates["step"], updates["priority"] = new.slots, new.steps, new.priorities
        updates["generation"] = -1 if new.generations is None else new.generations
        return updates

    def give(self, updates: Array) -> None:
        """Let them be sent with the next exchange."""
        self.outbox.put(self._forwarding.readdress(updates))

    def _checked_shards(self, shard: Any, count: int) -> Array:
        if shard is None and self._shards.num_shards == 1:
            return np.zeros(count, dtype=np.int64)
        values = None if shard is None else np.asarray(as_array(shard, "shard"))
        if values is None or values.dtype.kind not in "iu" or values.shape != (count,):
            got = "none" if values is None else f"{values.dtype} {list(values.shape)}"
            raise SchemaError(
                f"shard is {got}; expected integers [{count}] beside index: give the whole batch, or "
                "shard=batch['shard']. Nothing was changed."
            )
        if count and not (values.min() >= 0 and values.max() < self._shards.num_shards):
            raise SchemaError(
                f"shard has {values.min()} to {values.max()}; expected 0 to {self._shards.num_shards - 1}. Nothing was "
                "changed."
            )
        return values.astype(np.int64)

    def send_all(self) -> None:
        """Bring all updates that wait to their owners; they count when they would have counted."""
        waiting = np.concatenate(self.outbox.take(self.outbox.waiting))
        waiting["when"] = self.clock
        for part in self._exchange.share_array(waiting):
            owned = part[np.isin(part["shard"], list(self._engines))]
            if len(owned):
                self.received.append(owned)

    def forward(self, moves: Array) -> None:
        """Some trajectories have moved, `MOVE` [n]: their updates follow them."""
        self._forwarding.learn(moves)
        self.send_all()
        held = np.concatenate([np.empty(0, dtype=UPDATE), *self.received])
        told = self._exchange.share_array(self._forwarding.readdress(held))
        owned = [part[np.isin(part["shard"], list(self._engines))] for part in told]
        self.received = [part for part in owned if len(part)]

    def apply(self, clock: int) -> None:
        """Make the updates of this rank's shards that were sent before draw number `clock`, in the order of giving."""
        due = [part[part["when"] < clock] for part in self.received]
        self.received = [part[part["when"] >= clock] for part in self.received]
        self.received = [part for part in self.received if len(part)]
        if not due:
            return
        updates = np.concatenate(due)  # a message may hold those of several batches
        updates = updates[np.argsort(updates["turn"], kind="stable")]
        for shard, engine in self._engines.items():
            mine = updates[updates["shard"] == shard]
            changes = np.flatnonzero(np.diff(mine["generation"] < 0)) + 1
            for part in np.split(mine, changes):
                if len(part):
                    engine.update(_as_request(part))


def _as_request(updates: Array) -> PriorityUpdates:
    slots, steps, generations = (
        np.ascontiguousarray(updates[name]) for name in ("slot", "step", "generation")
    )
    some = None if generations[0] < 0 else generations
    return PriorityUpdates(slots, steps, some, np.ascontiguousarray(updates["priority"]))
