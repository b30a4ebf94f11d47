"""The blocks of a table in the memory of a GPU, and how values of the host get there and back.

All copies are queued on one stream. Blocks are written through pinned staging memory, as images in their own layout, by
one upload and a launch for each array of blocks; a row is committed when its writes are queued, and what reads it on
another stream follows them (`follow`). Blocks are read for the host by the way back, which waits for the GPU. Those of
trajectories that move to the table's part of host memory are written there by a kernel (`copy_out`).
"""

from __future__ import annotations

import collections
import contextlib
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import RegionError
from gear_loader.native import copying
from gear_loader.storage.disk import Keep
from gear_loader.storage.layout import LINE, Layout
from gear_loader.utils.arrays import Array, data_address, outside_inference
from gear_loader.utils.captures import beside_captures
from gear_loader.utils.formatting import size as formatted
from gear_loader.utils.mutex import new_mutex
from gear_loader.utils.streams import on_stream, own_stream

STAGING_BYTES = 16 << 20
"""Bytes of one piece of staging memory, or one block if that has more. There are two, pinned and on the device, and
more while several threads copy at the same time."""


class _StagedBlocks:
    """Blocks on their way.

    Attributes:
        host, device: uint8, pinned and on the device. ids, device_ids: int32, numbers of the blocks.
        left: an event after the last use of them by the GPU.
    """

    def __init__(self, blocks: int, block_bytes: int, device: torch.device) -> None:
        with outside_inference():
            count = blocks * block_bytes
            self.host = torch.empty(count, dtype=torch.uint8, device="cpu", pin_memory=True)
            self.device = torch.empty(count, dtype=torch.uint8, device=device)
            self.ids = torch.empty(blocks, dtype=torch.int32, device="cpu", pin_memory=True)
            self.device_ids = torch.empty(blocks, dtype=torch.int32, device=device)
        self.left = torch.cuda.Event()


class DeviceMemory:
    """Memory of a table's blocks on a GPU. Several threads may use it at once.

    Args:
        layout: of the table. device: the GPU, with its index.

    Attributes:
        device: as given. num_bytes: of the blocks, as allocated. staging_bytes: of one piece of staging memory.
        keep: which trajectories stay here while others leave, see `Disk.keep`.
        moving: held by who moves trajectories to the table's part of host memory. moves: those on their way, see
            `host_part`, or None. wanted: blocks of that part that they wait for.

    Raises:
        RegionError: the GPU has not enough free memory; also where blocks are written or read, for staging memory.
    """

    def __init__(self, layout: Layout, device: torch.device) -> None:
        self.device, self._layout = device, layout
        self.num_bytes = layout.device_bytes
        self._stream = own_stream(device, 0, self)
        try:
            with self._queueing(), outside_inference():
                memory = torch.zeros(self.num_bytes + LINE, dtype=torch.uint8, device=device)
        except torch.OutOfMemoryError as error:
            raise RegionError(
                f"The blocks of the table take {formatted(self.num_bytes)}, and {device} has "
                f"{formatted(torch.cuda.mem_get_info(device)[0])} free. Lower memory, or max_steps."
            ) from error
        self._memory = memory[-memory.data_ptr() % LINE :][: self.num_bytes]
        self._users: set[int] = set()
        self._written = torch.cuda.Event()
        self._written.record(self._stream)
        self._bases = list(dict.fromkeys(column.base for column in layout.columns.values()))
        """First byte of each array of blocks, as of `ColumnLayout`."""
        self._names: dict[int, list[str]] = {base: [] for base in self._bases}
        for name, column in layout.columns.items():
            self._names[column.base].append(name)
        strides = {column.base: column.block_stride for column in layout.columns.values()}
        self._strides: Array = np.array([strides[base] for base in self._bases], dtype=np.int64)
        self._before: Array = np.cumsum(self._strides) - self._strides
        self._first = layout.host_blocks  # number of the first block here
        self._most = max(1, min(layout.writable_blocks, STAGING_BYTES // layout.block_bytes))
        self.staging_bytes = self._most * layout.block_bytes
        self._spare = collections.deque[_StagedBlocks]()
        self._copied_ids: torch.Tensor | None = None  # which the GPU may be reading, until `_copied`
        self._copied = torch.cuda.Event()
        self.keep: Keep = "auto"
        self.moving = new_mutex()
        self.moves: Any = None
        self.wanted = 0

    def blocks(self, name: str) -> torch.Tensor:
        """The blocks that hold column `name`, uint8 ``[blocks, block_stride]``, on the device."""
        return self._blocks(self._layout.columns[name].base)

    def _blocks(self, base: int) -> torch.Tensor:
        stride, count = int(self._strides[self._bases.index(base)]), self._layout.writable_blocks
        first = count * self._offset(base)
        return self._memory[first : first + count * stride].view(-1, stride)

    def follow(self, stream: torch.cuda.Stream) -> None:
        """Let a stream of the device go on after what was written up to now. Does not wait for the GPU."""
        stream.wait_event(self._written)
        if stream.cuda_stream not in self._users:
            self._memory.record_stream(stream)
            self._users.add(stream.cuda_stream)

    @contextlib.contextmanager
    def _queueing(self) -> Iterator[None]:
        with beside_captures(self.device), on_stream(self.device, self._stream):
            yield

    @contextlib.contextmanager
    def _staged(self) -> Iterator[_StagedBlocks]:
        """Staging memory that nobody uses. Waits for the copies of its last use."""
        try:
            staging = self._spare.popleft()
        except IndexError:
            staging = self._new_staging()
        try:
            staging.left.synchronize()
            yield staging
        finally:
            staging.left.record(self._stream)
            self._spare.append(staging)

    def _new_staging(self) -> _StagedBlocks:
        try:
            return _StagedBlocks(self._most, self._layout.block_bytes, self.device)
        except torch.OutOfMemoryError as error:
            raise RegionError(
                f"Values are copied to and from {self.device} through {formatted(self.staging_bytes)} there, and it "
                f"has {formatted(torch.cuda.mem_get_info(self.device)[0])} free. Lower the table's memory."
            ) from error

    # ---------------------------------------------------------------- to the device

    def write(
        self, names: Sequence[str], columns: Array, ids: Array, addresses: Array, lengths: Array
    ) -> None:
        """Queue copies of trajectories into their blocks; their memory has been read when this returns.

        Waits for the GPU where it is behind by as many copies as there are pieces of staging memory.

        Args:
            names: columns. columns, ids, addresses, lengths: as for `copying.scatter`, but without columns' addresses.
        """
        if len(self._spare) < 2:
            with self._queueing():
                self._spare.append(self._new_staging())
        once = columns[:, 1] < 0
        try:
            for low, high, which, begins, counts in self._pieces(np.zeros_like(lengths), lengths):
                sources = addresses[which] + np.where(once, 0, begins[:, None] * columns[:, 2])
                self._send(names, columns, ids[low:high], sources, counts)
        finally:
            self._written.record(self._stream)

    def _pieces(self, first: Array, counts: Array) -> Iterator[tuple[int, int, slice, Array, Array]]:
        """Cut spans of trajectories where staging memory is full.

        Args:
            first, counts: int64 [n], first step of each, and number of steps, at least 1.

        Yields:
            First and end of the blocks of a piece, among those of all spans, one span after another; the spans with
            steps in it, and first step and number of steps of each.
        """
        size = self._layout.block_steps
        lead, after = first // size, -(-(first + counts) // size)
        ends = np.cumsum(after - lead)
        begins = ends - after  # of block 0 of each
        total = int(ends[-1]) if len(ends) else 0
        for low in range(0, total, self._most):
            high = min(low + self._most, total)
            which = slice(
                int(np.searchsorted(ends, low, "right")), int(np.searchsorted(ends, high, "left")) + 1
            )
            start = np.maximum(first[which], (low - begins[which]) * size)
            end = np.minimum(first[which] + counts[which], (high - begins[which]) * size)
            yield low, high, which, start, end - start

    def _send(self, names: Sequence[str], columns: Array, ids: Array, sources: Array, counts: Array) -> None:
        """Copy spans that begin with a block, and have `ids` together, into an image of their blocks, and queue it."""
        count, layout = len(ids), self._layout
        with self._queueing(), self._staged() as staging:
            targets = columns.copy()
            for row, name in zip(targets, names, strict=True):
                place = layout.columns[name]
                row[0] = staging.host.data_ptr() + count * self._offset(place.base) + place.inside
            numbers = np.arange(count, dtype=np.int32)
            copying.scatter(targets, layout.block_steps, numbers, np.ascontiguousarray(sources), counts)
            self._upload(staging, ids)

    def _upload(self, staging: _StagedBlocks, ids: Array) -> None:
        """Queue a copy of an image in staging memory into blocks, int32 [n]."""
        from gear_loader.kernels.store import store

        count = len(ids)
        staging.ids.numpy()[:count] = ids - self._first
        image = slice(0, count * self._layout.block_bytes)
        staging.device[image].copy_(staging.host[image], non_blocking=True)
        for base in self._bases:
            blocks, begin = self._blocks(base), count * self._offset(base)
            stride = blocks.shape[1]
            part = staging.device[begin : begin + count * stride].view(count, 1, stride)
            store(part, blocks, staging.ids[:count].view(count, 1), stride)

    def place_in(self, image: Array, name: str) -> Array:
        """`Region.column_place` of a column in an image of some blocks on the host, uint8 [n * bytes of a block]."""
        place, count = self._layout.columns[name], len(image) // self._layout.block_bytes
        first = data_address(image) + count * self._offset(place.base) + place.inside
        sizes = place.block_stride, place.step_bytes, place.step_stride, self._layout.block_steps
        return np.array([first, *sizes], dtype=np.int64)

    def write_image(self, ids: Array, image: Array) -> None:
        """Queue a copy of an image on the host, see `place_in`, into blocks, int32 [n]; it has been read when this
        returns. Waits as `write`."""
        count = len(ids)
        try:
            for low in range(0, count, self._most):
                some = ids[low : low + self._most]
                with self._queueing(), self._staged() as staging:
                    host = staging.host.numpy()
                    for before, stride in zip(self._before.tolist(), self._strides.tolist(), strict=True):
                        part = slice(len(some) * before, len(some) * (before + stride))
                        first = count * before + low * stride
                        host[part] = image[first : first + len(some) * stride]
                    self._upload(staging, some)
        finally:
            self._written.record(self._stream)

    def _offset(self, base: int) -> int:
        """Bytes of one block in the arrays before that at `base`."""
        return int(self._before[self._bases.index(base)])

    # ---------------------------------------------------------------- to the host

    def copy_out(self, ids: Array, targets: Callable[[str], torch.Tensor], into: Array) -> torch.cuda.Event:
        """Queue copies of blocks to those of the table's part of host memory, which is pinned.

        Args:
            ids: int32 [n], blocks. targets: `Region.host_blocks`. into: int32 [n], blocks there.

        Returns:
            An event after which they are there.
        """
        from gear_loader.kernels.store import store

        count = len(ids)
        self._copied.synchronize()
        with self._queueing(), self._staged() as staging, outside_inference():
            numbers = torch.empty((2, count), dtype=torch.int32, device="cpu", pin_memory=True)
            numbers.numpy()[:] = ids - self._first, into
            # Kept until the kernels have read it, whatever exception comes.
            self._copied_ids = numbers
            try:
                sources = numbers[0].to(self.device, non_blocking=True)
                for low in range(0, count, self._most):
                    some = slice(low, min(low + self._most, count))
                    for base, names in self._names.items():
                        blocks, size = self._blocks(base), some.stop - low
                        stride = blocks.shape[1]
                        part = staging.device[: size * stride]
                        torch.index_select(blocks, 0, sources[some], out=part.view(size, stride))
                        given = targets(names[0]), numbers[1, some].view(size, 1), stride
                        store(part.view(size, 1, stride), *given)
            finally:
                self._copied.record(self._stream)
        return self._copied

    def _part(self, base: int, names: Collection[str]) -> tuple[torch.Tensor, int]:
        """The bytes of some columns in the array of blocks at `base`, uint8 ``[blocks, steps, bytes]`` on the device,
        and the first of them in a step; of columns per trajectory there is one step."""
        columns = [self._layout.columns[name] for name in names]
        low = min(column.inside for column in columns)
        high = max(column.inside + column.step_bytes for column in columns)
        steps, every = self._layout.block_steps, columns[0].step_stride
        if any(self._layout.schema[name].trajectory for name in names):
            steps = 1
        blocks = self._blocks(base)
        return blocks[:, : steps * every].view(len(blocks), steps, every)[:, :, low:high], low

    def read(self, ids: Array, first: Array, counts: Array, outs: Mapping[int, Mapping[str, Array]]) -> None:
        """Copy spans of trajectories out of their blocks. Waits for the GPU.

        Args:
            ids: int32, blocks of the spans, one span after another.
            first, counts: int64 [n], as of `_pieces`; of columns per trajectory 0 and 1.
            outs: base of an array of blocks -> column in it -> addresses of its spans, int64 [n].
        """
        layout, size = self._layout, self._layout.block_steps
        for low, high, which, begins, steps in self._pieces(first, counts):
            count, end = high - low, 0
            with self._queueing(), self._staged() as staging:
                staging.ids.numpy()[:count] = ids[low:high] - self._first
                staging.device_ids[:count].copy_(staging.ids[:count], non_blocking=True)
                parts = []
                for base, names in outs.items():
                    blocks, low = self._part(base, names)
                    parts.append((names, end, low, blocks.shape[1:]))
                    begin, end = end, end + count * blocks[0].numel()
                    part = staging.device[begin:end].view(count, *blocks.shape[1:])
                    torch.index_select(blocks, 0, staging.device_ids[:count], out=part)
                staging.host[:end].copy_(staging.device[:end], non_blocking=True)
                staging.left.record(self._stream)
                staging.left.synchronize()
                # Each span begins in the block after the last one of the span before.
                here = -(-(begins + steps) // size) - begins // size
                places = (np.cumsum(here) - here) * size + begins % size
                for names, offset, low, (rows, width) in parts:
                    for name, addresses in names.items():
                        place = layout.columns[name]
                        address = staging.host.data_ptr() + offset + place.inside - low
                        column = np.array([address, rows * width, place.step_bytes, width, rows])
                        into = addresses[which] + (begins - first[which]) * place.step_bytes
                        copying.copy_spans(column, places // size * rows + places % size, steps, into)
