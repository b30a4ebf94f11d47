"""Streams of a device cut into chunks of the same length: both images, and what copies and commits them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.kernels import reference
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_STEPS
from gear_loader.storage.appender import Given
from gear_loader.storage.block_sink import BlockSink
from gear_loader.storage.device_images import (
    StepImage,
    StreamOrder,
    copy_step,
    follow_writes,
    homes,
    writable,
)
from gear_loader.utils.arrays import Array
from gear_loader.utils.streams import on_stream, own_stream

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine

Rows = Mapping[str, torch.Tensor]


class _Chunk:
    """One chunk of all environments, from its first step until it is committed.

    Attributes:
        sink: holds the blocks that it gets. images: see `StepImage`. steps: that were appended.
        blocks: int32 [n, K], in memory that the device reads. sent: whether copies into the table are queued.
        arrived: an event after them; None on the CPU. given: what its trajectories get.
    """

    def __init__(self, sink: BlockSink, images: list[StepImage], device: torch.device) -> None:
        self.sink, self.images, self.given = sink, images, Given(len(sink.lanes))
        on_gpu = device.type == "cuda"
        shape = images[0].blocks.shape[:2]
        self.blocks = torch.empty(shape, dtype=torch.int32, device="cpu", pin_memory=on_gpu)
        self.arrived = torch.cuda.Event() if on_gpu else None
        self.steps, self.sent, self.staged = 0, False, False
        self._places: dict[int, list[tuple[str, torch.Tensor]]] = {}
        self._size = sink.table.region.layout.block_steps

    def places(self, step: int) -> list[tuple[str, torch.Tensor]]:
        """Where a step of each column is written, [n, *shape], or [n, W] as words."""
        found = self._places.get(step)
        if found is None:
            block, inside = divmod(step, self._size)
            found = [
                (name, steps[:, block, inside])
                for image in self.images
                for name, steps in image.columns.items()
            ]
            self._places[step] = found
        return found

    def has_arrived(self) -> bool:
        """Whether all copies have been made. Does not wait."""
        return self.arrived is None or bool(self.arrived.query())

    def wait(self) -> None:
        """Wait for the copies that are queued."""
        if self.sent and self.arrived is not None and not self.has_arrived():
            self.arrived.synchronize()


class Chunks:
    """Cuts the streams of n environments into chunks of the same length, two of which are held.

    Attributes:
        chunk_steps: steps of a trajectory. committed: number of trajectories committed so far.
    """

    def __init__(
        self, make_sink: Callable[[int], BlockSink], n: int, chunk_steps: int, device: torch.device
    ) -> None:
        sinks = [make_sink(n), make_sink(n)]
        table, schema = sinks[0].table, sinks[0].schema
        self._num, self.chunk_steps, self._device = n, chunk_steps, device
        held = chunk_steps + any(column.final for column in schema.steps.values())
        check_room(table, n, 2, held, f"chunk_steps={chunk_steps:,}", "take shorter chunks")
        region = table.region
        self._zero_copy = writable(region, device)
        self._chunks = []
        for sink in sinks:
            sink.most = held
            images = [StepImage(region, names, n, held, device) for names in homes(region, schema.steps)]
            self._chunks.append(_Chunk(sink, images, device))
        self._held = held
        self._stream = own_stream(device, 0, self) if device.type == "cuda" else None
        self._order = StreamOrder(device)
        self._everyone = np.arange(n)
        self._ending = np.ones(n, dtype=bool)
        self.committed = 0

    @property
    def num_steps(self) -> int:
        """Steps of the chunk that is being written."""
        return 0 if self._chunks[0].sent else self._chunks[0].steps

    def ends(self, count: int) -> bool:
        """Whether trajectories can end with so many steps more."""
        return self.num_steps + count == self.chunk_steps

    def put(
        self, steps: Sequence[Rows], done: torch.Tensor | None, last: Rows | None, priorities: Array | None
    ) -> None:
        """Copy checked steps behind those of the running chunk, on the current stream; send it if it is complete."""
        chunk = self._chunks[0]
        if chunk.steps == 0:
            self._begin(chunk)
        self._order.follow(image.blocks for each in self._chunks for image in each.images)
        for i, rows in enumerate(steps):
            for name, place in chunk.places(chunk.steps + i):
                copy_step(place, rows[name])
        chunk.steps += len(steps)
        if chunk.steps == self.chunk_steps:
            self._send(last, priorities)

    def _begin(self, chunk: _Chunk) -> None:
        """Take blocks for a chunk, which has been committed."""
        blocks = chunk.sink.take_blocks(self._everyone, self._held)
        first = chunk.sink.table.region.layout.host_blocks  # number of the first block on the device
        chunk.blocks.numpy()[...] = blocks[:, : chunk.blocks.shape[1]] - first

    def _send(self, last: Rows | None, priorities: Array | None) -> None:
        """Queue the copy of the running chunk into the table, and let the other one be the running one."""
        chunk = self._chunks[0]
        given = chunk.given
        given.last = None if last is None else {}
        given.priorities = np.full(self._num, UNSET, dtype=np.float32) if priorities is None else priorities
        if last:
            for name, place in chunk.places(chunk.steps):
                if name in last:
                    copy_step(place, last[name])
        if self._stream is not None:
            assert self._order.last is not None
            self._stream.wait_stream(self._order.last)
            follow_writes(chunk.sink.table.region, self._stream)
            with on_stream(self._device, self._stream):
                self._queue(chunk)
                assert chunk.arrived is not None
                chunk.arrived.record(self._stream)
        chunk.sent = True
        self._chunks.reverse()

    def _queue(self, chunk: _Chunk) -> None:
        """Queue what brings a chunk to the host, on the current stream."""
        for image in chunk.images:
            if self._zero_copy:
                from gear_loader.kernels.store import store

                store(image.blocks, image.target(), chunk.blocks, image.last_bytes(self._held))
            else:
                image.host().copy_(image.blocks, non_blocking=True)

    def take(self) -> None:
        """Commit chunks that have arrived, in order. The first is waited for: its memory is needed."""
        for chunk in self._chunks:
            if chunk.sent and (chunk is self._chunks[0] or chunk.has_arrived()):
                self._commit(chunk)

    def _commit(self, chunk: _Chunk) -> None:
        """Wait for a chunk that was sent, and commit it."""
        chunk.wait()
        lanes = chunk.sink.lanes
        if not chunk.staged:
            if not self._zero_copy:
                for image in chunk.images:
                    blocks = image.blocks if self._stream is None else image.host()
                    reference.store(blocks, image.target(), chunk.blocks, image.last_bytes(self._held))
            lanes[:, LANE_STEPS] = chunk.steps
            chunk.staged = True
        left = np.flatnonzero(lanes[:, LANE_STEPS])
        try:
            chunk.sink.commit_blocks(left, self._ending, chunk.given)
        finally:
            self.committed += len(left) - int(np.count_nonzero(lanes[:, LANE_STEPS]))
        chunk.sent = chunk.staged = False
        chunk.steps = 0

    def finish(self) -> None:
        """Commit all steps. Waits for the GPU."""
        if self.num_steps:
            self._send(None, None)
        for chunk in self._chunks:
            if chunk.sent:
                self._commit(chunk)

    def wait(self) -> None:
        """Wait for the copies that are queued."""
        for chunk in self._chunks:
            chunk.wait()

    def discard(self) -> None:
        """Wait, and give back what is not committed."""
        for chunk in self._chunks:
            chunk.wait()
            chunk.sink.abort(self._everyone)


def check_room(table: Engine, n: int, each: int, held: int, what: str, remedy: str) -> None:
    """Raise SchemaError unless the table has room for n environments with `each` trajectories of so many steps."""
    layout, count = table.region.layout, n * each
    blocks = count * -(-held // layout.block_steps)
    if count > layout.max_trajectories or blocks > layout.writable_blocks or count * held > layout.max_steps:
        raise SchemaError(
            f"{n:,} environments with {what} hold {count:,} trajectories, {count * held:,} steps and {blocks:,} blocks "
            f"at a time, {each} each; the table has {layout.max_trajectories:,}, {layout.max_steps:,} and "
            f"{layout.writable_blocks:,}. Create the table larger, or {remedy}."
        )
