"""Collects batches on a GPU from several shards: the GPU reads this node's regions, and staged rows of others."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from gear_loader.collection.collector import Buffers, GpuSide, resolve
from gear_loader.collection.tier_rows import TierStaging
from gear_loader.distributed.collector import ROW_KEYS, ShardBuffers, ShardCollector, ShardRows, table_here
from gear_loader.distributed.records import max_window_blocks
from gear_loader.utils.arrays import Array
from gear_loader.utils.packing import Layout, packed_bytes, packed_views
from gear_loader.utils.streams import current_stream

__all__ = ["CudaShardCollector", "DeviceRows"]


@dataclasses.dataclass
class DeviceRows:
    """Arguments of the kernels for a batch's rows, written by the host and copied to the device.

    Rows of this node are written one shard after another; spare rows follow them.

    Attributes:
        keys: int64 [4, B]: index, anchor, generation and shard, in the order of the batch.
        anchors, rows: of rows of this node: step and row of the batch, int64 [B].
        extent: int64 [B, 3], from `gear_loader.collection.collector.resolve`.
        block_ids: int32 [B, K], from the same function.
        places: of rows of other nodes, and of those that lie on disk only: row of the batch, int64 [2 B]. Rows of other
            nodes that were gone may be replaced by rows on disk.
        weights: importance weights, float32 [B].
        memory: the memory of all, uint8. ends: ends of keys and weights, and of the arguments of this node's rows.
    """

    keys: torch.Tensor
    weights: torch.Tensor
    anchors: torch.Tensor
    rows: torch.Tensor
    extent: torch.Tensor
    block_ids: torch.Tensor
    places: torch.Tensor
    memory: torch.Tensor
    ends: tuple[int, int]

    @classmethod
    def make(
        cls, batch_size: int, blocks: int, *, device: torch.device, pin_memory: bool = False
    ) -> DeviceRows:
        """Make zeroed tensors for batches of `batch_size` rows, with `blocks` blocks a window."""
        one: Layout = ((batch_size,), torch.int64)
        keys: list[Layout] = [((4, batch_size), torch.int64), ((batch_size,), torch.float32)]
        local: list[Layout] = [one, one, ((batch_size, 3), torch.int64), ((batch_size, blocks), torch.int32)]
        parts = [*keys, *local, ((2 * batch_size,), torch.int64)]
        memory = torch.zeros(packed_bytes(parts), dtype=torch.uint8, device=device, pin_memory=pin_memory)
        ends = packed_bytes(keys), packed_bytes([*keys, *local])
        names, weights, anchors, rows, extent, block_ids, places = packed_views(memory, parts)
        return cls(names, weights, anchors, rows, extent, block_ids, places, memory, ends)

    def copy_keys(self, host: DeviceRows) -> None:
        """Queue a copy of keys and weights."""
        end = self.ends[0]
        self.memory[:end].copy_(host.memory[:end], non_blocking=True)

    def copy_local(self, host: DeviceRows) -> None:
        """Queue a copy of the arguments of rows of this node."""
        begin, end = self.ends
        self.memory[begin:end].copy_(host.memory[begin:end], non_blocking=True)


@dataclasses.dataclass
class DeviceBuffers(ShardBuffers):
    """Buffers on a GPU.

    Attributes:
        host: arguments of the kernels in pinned memory.
        mirror: their copy on the device.
        used: number of rows of `anchors` and of `places` that the running batch has used.
        parts: staging memory of rows of other nodes that the GPU may still read.
        tier: places rows that lie on disk only, made on first use. staged: their memory, which the GPU may still read.
    """

    host: DeviceRows | None = None
    mirror: DeviceRows | None = None
    used: list[int] = dataclasses.field(default_factory=lambda: [0, 0])
    parts: list[torch.Tensor] = dataclasses.field(default_factory=list)
    tier: TierStaging | None = None
    staged: list[torch.Tensor] = dataclasses.field(default_factory=list)


class CudaShardCollector(ShardCollector):
    """A `ShardCollector` whose GPU reads the regions of this node itself."""

    def __init__(self, *args: Any, **options: Any) -> None:
        super().__init__(*args, **options)
        self.zero_copy = True

    def buffers(self, *, shared: bool = False) -> DeviceBuffers:
        """See `Collector.buffers`."""
        made = self._buffers(self.device)
        blocks = max_window_blocks(self.reach, self.shards.block_steps.values())
        host = DeviceRows.make(self.batch_size, blocks, device=torch.device("cpu"), pin_memory=True)
        mirror = DeviceRows.make(self.batch_size, blocks, device=self.device)
        filled, released = torch.cuda.Event(blocking=True), torch.cuda.Event()
        return self.with_rows(made, host, mirror, GpuSide(None, None, None, None, filled, released))

    def with_rows(self, made: Buffers, host: DeviceRows, mirror: DeviceRows, gpu: GpuSide) -> DeviceBuffers:
        """Make buffers whose keys and weights are those of `mirror`."""
        for i, key in enumerate(ROW_KEYS):
            made.batch[key] = mirror.keys[i]
        if self.weighs:
            made.batch["priority_weight"] = mirror.weights
        return DeviceBuffers(
            made.batch,
            made.plans,
            made.outputs,
            made.staging,
            gpu,
            computed=made.computed,
            host=host,
            mirror=mirror,
        )

    @contextlib.contextmanager
    def _filling(self, buffers: ShardBuffers) -> Iterator[None]:
        assert isinstance(buffers, DeviceBuffers)
        gpu = buffers.gpu
        assert gpu is not None
        # The host memory of the last batch in these buffers is about to be written again.
        gpu.filled.synchronize()
        while buffers.parts:
            self._staging.give(buffers.parts.pop())
        while buffers.staged:
            self._staging.give(buffers.staged.pop())
        buffers.used = [0, 0]
        current_stream(self.device).wait_event(gpu.released)
        try:
            yield
        finally:
            gpu.filled.record()  # also after a failed batch: the GPU reads it from the same memory

    def _gather_local(self, buffers: ShardBuffers, rows: ShardRows, which: Array) -> Array:
        from gear_loader.kernels import gather, split

        assert isinstance(buffers, DeviceBuffers)
        host, mirror = _sides(buffers)
        claims: list[tuple[int, slice]] = []
        lost: list[Array] = []
        for shard, shard_rows in self._by_shard(rows, which):
            if table_here(self.shards, shard)._engine.has_tier:
                lost.append(self._gather_tiers_of(shard, buffers, rows, shard_rows, claims))
                continue
            records = rows.records[shard_rows]
            part = self._claim(buffers, 0, len(shard_rows))
            claims.append((shard, part))
            slots, anchors = (np.ascontiguousarray(records[name]) for name in ("slot", "step"))
            host.anchors[part].numpy()[:] = anchors
            host.rows[part].numpy()[:] = shard_rows
            resolve(
                table_here(self.shards, shard),
                slots,
                anchors,
                self.reach,
                host.extent[part].numpy(),
                host.block_ids[part].numpy(),
            )
        if claims:
            mirror.copy_local(host)
        for shard, part in claims:
            count, plans = part.stop - part.start, self._plans(buffers, shard)
            gather.gather(
                plans.steps,
                self._numbers[:count],
                mirror.anchors[part],
                mirror.extent[part],
                mirror.block_ids[part].view(-1),
                rows=mirror.rows[part],
                programs=self.programs,
            )
            if plans.split is not None:
                split.split(plans.split, count, rows=mirror.rows[part], programs=self.programs)
            if plans.once is not None:
                self._gather_once(plans.once, mirror.block_ids[part], count, mirror.rows[part])
        found: Array = np.concatenate([which[:0], *lost])
        return found

    def _gather_tiers_of(
        self,
        shard: int,
        buffers: DeviceBuffers,
        rows: ShardRows,
        which: Array,
        claims: list[tuple[int, slice]],
    ) -> Array:
        """Write the arguments of rows in memory, add their claim, and place those on disk; return lost rows."""
        from gear_loader.kernels import place

        host, mirror = _sides(buffers)
        tier = self._tier_of(shard)
        if buffers.tier is None:
            buffers.tier = TierStaging(self.table.schema, buffers.outputs)
            buffers.references = None  # the plan refers to the batch's memory
        staging = buffers.tier
        extent = np.empty((len(which), 3), dtype=np.int64)
        ids = np.zeros((len(which), host.block_ids.shape[1]), dtype=np.int32)
        found: list[Any] = []

        def read(slots: Array, anchors: Array, generations: Array, part: Array) -> None:
            inside, outside = tier.resolve(slots, anchors, extent, ids)
            memory = None
            if len(outside):
                memory = self._staging.take(staging.place.size(len(outside)))
                try:
                    staging.read(tier, slots[outside], anchors[outside], generations[outside], memory)
                except BaseException:
                    self._staging.give(memory)
                    raise
            found[:] = anchors[inside], part[inside], part[outside], memory

        _, lost = self._unless_lost(shard, rows, which, read)
        if not found:
            return lost
        anchors, inside, outside, memory = found
        if len(inside):
            claimed = self._claim(buffers, 0, len(inside))
            claims.append((shard, claimed))
            host.anchors[claimed].numpy()[:] = anchors
            host.rows[claimed].numpy()[:] = inside
            host.extent[claimed].numpy()[:] = extent[: len(inside)]
            host.block_ids[claimed].numpy()[:] = ids[: len(inside)]
        if memory is not None:
            claimed = self._claim(buffers, 1, len(outside))
            host.places[claimed].numpy()[:] = outside
            mirror.places[claimed].copy_(host.places[claimed], non_blocking=True)
            place.place(staging.place, memory, mirror.places[claimed], programs=self.programs)
            buffers.staged.append(memory)  # given back when the kernel has run
        return lost

    def _place_part(self, buffers: ShardBuffers, memory: torch.Tensor, rows: Array) -> None:
        from gear_loader.kernels import place

        assert isinstance(buffers, DeviceBuffers)
        host, mirror = _sides(buffers)
        claimed = self._claim(buffers, 1, len(rows))
        host.places[claimed].numpy()[:] = rows
        mirror.places[claimed].copy_(host.places[claimed], non_blocking=True)
        place.place(self._place_plan(buffers), memory, mirror.places[claimed], programs=self.programs)
        buffers.parts.append(memory)  # it is given back when the kernel has run

    def _place_cached(self, buffers: ShardBuffers, which: Array, entries: Array) -> None:
        # Through staging memory: the cache need not be pinned, and may change while the GPU still reads.
        assert self._cache is not None
        plan = self._place_plan(buffers)
        memory = self._staging.take(plan.size(len(which)))
        outs = memory.data_ptr() + np.array(plan.offsets(len(which)), dtype=np.int64)
        self._cache.load(entries, outs, np.arange(len(which)))
        self._place_part(buffers, memory, which)

    @staticmethod
    def _claim(buffers: ShardBuffers, kind: int, count: int) -> slice:
        assert isinstance(buffers, DeviceBuffers)
        first = buffers.used[kind]
        buffers.used[kind] = first + count
        return slice(first, first + count)

    def _write_keys(self, buffers: ShardBuffers, rows: ShardRows) -> None:
        host, mirror = _sides(buffers)
        self._fill_keys(dict(zip(ROW_KEYS, host.keys, strict=True)), host.weights, rows)
        mirror.copy_keys(host)


def _sides(buffers: ShardBuffers) -> tuple[DeviceRows, DeviceRows]:
    assert isinstance(buffers, DeviceBuffers)
    assert buffers.host is not None
    assert buffers.mirror is not None
    return buffers.host, buffers.mirror
