"""Rows of a batch in the later stages of a pipeline: looked up by id in the tables of each stage."""

from __future__ import annotations

import dataclasses

import numpy as np

from gear_loader.distributed.batch_exchange import BatchExchange
from gear_loader.distributed.failures import attempt
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.rank_samplers import Samplers
from gear_loader.distributed.records import SLOT_KEY, as_bytes
from gear_loader.distributed.row_drawing import Rows
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.errors import StaleIndexError
from gear_loader.utils.arrays import Array


@dataclasses.dataclass
class StageRows:
    """Translates the rows that stage 0 has drawn to the tables of this rank's stage.

    Args:
        samplers: shard samplers of this rank, which look ids up.

    Attributes:
        keys: slots and generations in stage 0 of this rank's rows of the last batch, `SLOT_KEY` [m]; None in stage 0.
    """

    shards: ShardTables
    exchange: SingleProcess
    batches: BatchExchange
    samplers: Samplers
    keys: Array | None = None

    def __post_init__(self) -> None:
        self._dtype = np.dtype([("record", self.batches.dtype), ("key", SLOT_KEY)])

    def translate(self, drawn: Rows) -> Rows:
        """Return the rows of this rank's slice in the tables of its own stage; all ranks call it.

        In a later stage, the rank of each shard looks the trajectories up by their ids, and sends them to the ranks of
        its stage.
        """
        shards, places = self.shards, self.shards.places
        count, me = self.exchange.size, self.exchange.rank

        def rows_between(source: int, target: int) -> Array:
            sender, receiver = places[source], places[target]
            if sender.stage == 0 or sender.stage != receiver.stage:
                return drawn.shards[:0]
            rows = self.batches.slices.of(receiver.data)
            found: Array = rows[drawn.shards[rows] == sender.data]
            return found

        found, failure = attempt(lambda: self._look_up(drawn), np.empty(0, dtype=self._dtype))
        own = np.flatnonzero(drawn.shards == shards.place.data)
        outgoing = [rows_between(me, rank) for rank in range(count)]
        incoming = [rows_between(rank, me) for rank in range(count)]
        outs, ins = (
            np.array([len(rows) for rows in each]) * self._dtype.itemsize for each in (outgoing, incoming)
        )
        sent: Array = np.zeros(outs.sum(), dtype=np.uint8)
        if failure is None and len(sent):
            sent = as_bytes(found[np.searchsorted(own, np.concatenate(outgoing))])
        received = self.exchange.all_to_all(sent, outs, ins, failure).view(self._dtype)
        if shards.place.stage == 0:
            return drawn
        rows = np.concatenate(incoming)
        order = np.argsort(rows, kind="stable")
        known, own_rows = received[order], self.batches.own_rows
        at = np.searchsorted(rows[order], own_rows)
        self.keys = known["key"][at]
        if shards.table.schema.mutable:
            shards.names.remember(drawn.shards[own_rows], self.keys, known["record"][at])
        return Rows(drawn.shards, rows[order], known["record"].copy(), drawn.least)

    def _look_up(self, drawn: Rows) -> Array:
        """Look the rows of this rank's shard up in its own table, which is not the table of stage 0."""
        place, table = self.shards.place, self.shards.table
        if place.stage == 0:
            return np.empty(0, dtype=self._dtype)
        rows = np.flatnonzero(drawn.shards == place.data)
        own: Array = drawn.records[np.searchsorted(drawn.rows, rows)].copy()
        slots = self.samplers.slots_of(place.data, own["id"])
        missing = np.flatnonzero(slots < 0)
        if len(missing):
            raise StaleIndexError(
                f"{len(missing)} of {len(own)} trajectories that stage 0 has drawn are not in the table of stage "
                f"{place.stage}, shard {place.data}; the first has id {own['id'][missing[0]]}. Store trajectories "
                "through Placement, in tables with the same limits, and remove trajectories from all stages alike."
            )
        found: Array = np.empty(len(own), dtype=self._dtype)
        for name in SLOT_KEY.names or ():
            found["key"][name] = own[name]
        own["slot"], own["generation"] = slots, table._engine.reader().slot_states()[1][slots]
        found["record"] = self.samplers.with_blocks(table, own)
        return found
