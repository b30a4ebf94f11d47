"""Batches of a table, of one with a disk below it, and of several shards, by each mover and in each layout."""

from __future__ import annotations

import contextlib
from typing import Any

import numpy as np
import pytest
from batch_conformance import BatchConformance, Made, mover_fixture
from options_common import nested_table
from played_peer import PlayedPeer
from source_conformance import SCHEMA, TRAJECTORIES
from tier_common import NEVER, spill

import gear_loader as gear
from gear_loader.collection.collector import TableSource
from gear_loader.distributed import remote
from gear_loader.distributed.remote import RemoteShard
from gear_loader.distributed.shard_sampler import records_of
from gear_loader.distributed.shard_source import ShardRows, ShardSource
from gear_loader.distributed.shards import Shards
from gear_loader.storage.selected_rows import SelectedRows

SIZES: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 20, "block_steps": 16}


def of_table(table: gear.Table, stack: contextlib.ExitStack) -> Made:
    slots = np.array([table.add(each) for each in TRAJECTORIES])

    def rows(chosen: Any, weights: Any) -> SelectedRows:
        places = slots[[row.trajectory for row in chosen]]
        anchors = np.array([row.anchor for row in chosen], dtype=np.int64)
        return SelectedRows(places, anchors, table._engine.reader().slot_states()[1][places], weights)

    return Made(TableSource(table), rows)


class TestTable(BatchConformance):
    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        table = gear.Table.create(SCHEMA, **nested_table({**SIZES, "packed": packed}))
        return of_table(stack.enter_context(table), stack)


class TestDisk(BatchConformance):
    """Half of the trajectories lie on disk only."""

    mover = mover_fixture("gpu")

    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        disk = gear.Disk(self.path / "table", sync_seconds=NEVER, size="1GiB", keep="newest")
        options = {**SIZES, "packed": packed, "max_blocks": 200, "disk": disk}
        table = stack.enter_context(gear.Table.create(SCHEMA, **nested_table(options)))
        made = of_table(table, stack)
        table.save(self.path / "table")
        assert spill(table, [0, 2, 4, 6]) == 4
        return made


class TestShards(BatchConformance):
    """Three tables of this process."""

    mover = mover_fixture("gpu")

    remote: tuple[int, ...] = ()
    cache: int | None = None

    def make(self, stack: contextlib.ExitStack, *, packed: bool) -> Made:
        tables = [
            stack.enter_context(gear.Table.create(SCHEMA, **nested_table({**SIZES, "packed": each})))
            for each in (packed, not packed, packed)
        ]
        where = [(number % 3, tables[number % 3].add(each)) for number, each in enumerate(TRAJECTORIES)]
        patch = stack.enter_context(pytest.MonkeyPatch.context())
        patch.setattr(remote, "PART_BYTES", 700)  # rows in several parts, and cut
        shards = Shards(tables, cache=self.cache)
        shards.remote = bool(self.remote)
        for shard in self.remote:
            shards._sources[shard] = RemoteShard(PlayedPeer(tables[shard], set()), "played", tables[0].schema)

        def rows(chosen: Any, weights: Any) -> ShardRows:
            places = [where[row.trajectory] for row in chosen]
            parts = [
                records_of(tables[shard], np.array([slot]), np.array([row.anchor]))
                for (shard, slot), row in zip(places, chosen, strict=True)
            ]
            plain = np.concatenate(parts)
            kind = np.dtype([*plain.dtype.descr, ("steps", "<i8"), ("final", "<i8")])
            records = np.zeros(len(plain), dtype=kind)
            for name in plain.dtype.names:
                records[name] = plain[name]
            records["steps"] = [len(TRAJECTORIES[row.trajectory]["obs"]) for row in chosen]
            return ShardRows(np.array([shard for shard, _ in places]), records, None, None, known=weights)

        return Made(ShardSource(shards), rows, [shard for shard, _ in where])


class TestOtherNodes(TestShards):
    """Two of them are of other nodes."""

    remote = (1, 2)
    mover = mover_fixture("gpu")


class TestCache(TestShards):
    """What has been received is kept."""

    remote, cache = (0, 1, 2), 1 << 20
    mover = mover_fixture("gpu")
