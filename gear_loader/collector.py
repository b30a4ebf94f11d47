"""The collector turns chosen slots and anchors into a batch: on the CPU, or on a GPU straight from host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader import native
from gear_loader.crew import crew
from gear_loader.index import Array
from gear_loader.kernels import reference
from gear_loader.kernels.plan import PAD_HEAD, PAD_KEEP, PAD_TAIL, GatherColumn, GatherPlan
from gear_loader.schema import Window
from gear_loader.table import Table

__all__ = ["Batch", "Buffers", "Collector"]

Batch = dict[str, Any]
_PADS = {"keep": PAD_KEEP, "head": PAD_HEAD, "tail": PAD_TAIL}
_ROW_KEYS = ("index", "anchor", "generation")
_SINGLE_THREAD_BYTES = 1 << 18


@dataclasses.dataclass
class Buffers:
    """The tensors of one batch, and how to fill them.

    Attributes:
        batch: column -> ``[B, L, *shape]``, mask, index, anchor, generation, on the target device.
        plan: how the kernel fills columns and masks.
        host: for a GPU, the pinned tensors that the host writes: int64 [5, B] of index, anchor, generation and the
            two extents, and int32 [B, K] of block ids; and their copies on the device.
        staging: for a GPU that cannot read the region: a batch in pinned memory, gathered on the CPU.
        filled, released: for a GPU, events: the batch is complete; its last user has finished.
        consumers: for a GPU, the streams that have used the batch.
    """

    batch: Batch
    plan: GatherPlan
    host: tuple[torch.Tensor, torch.Tensor] | None = None
    mirror: tuple[torch.Tensor, torch.Tensor] | None = None
    staging: Buffers | None = None
    filled: torch.cuda.Event | None = None
    released: torch.cuda.Event | None = None
    consumers: set[int] = dataclasses.field(default_factory=set)

    def rows(self, count: int) -> Batch:
        """The batch's first `count` rows: all of it, or views for a last batch that is smaller."""

        def head(value: Any) -> Any:
            return (
                {key: head(part) for key, part in value.items()} if isinstance(value, dict) else value[:count]
            )

        return dict(self.batch) if count == self.plan.batch_size else head(self.batch)


class Collector:
    """Gathers windows of a table's columns into buffers.

    Args:
        table: where from.
        windows: column -> window; the other columns are not read.
        batch_size: rows of a batch.
        device: where batches are wanted.
        programs: size of the kernel's grid, see `gear_loader.kernels.gather.gather`.
    """

    def __init__(
        self,
        table: Table,
        windows: Mapping[str, Window],
        *,
        batch_size: int,
        device: torch.device,
        programs: int | None = None,
    ) -> None:
        self.table = table
        self.windows = dict(windows)
        self.batch_size = batch_size
        self.device = device
        self.programs = programs
        self.zero_copy = device.type == "cuda" and table.region.pin()
        index = table.index_arrays()
        self._extent, self._block_ids = index
        self._block_steps = table.region.layout.block_steps
        self._first = min(window.offset for window in windows.values())
        self._last = max(window.offset + window.length - 1 for window in windows.values())

    # ---------------------------------------------------------------- buffers

    def buffers(self, *, shared: bool = False) -> Buffers:
        """Fresh tensors for one batch.

        Args:
            shared: in shared memory, so that they can be sent to another process without a copy.
        """
        if self.device.type != "cuda":
            return self._buffers(torch.device("cpu"), shared=shared)
        buffers = self._buffers(self.device)
        if self.zero_copy:
            blocks = (self._last - self._first) // self._block_steps + 2
            host = (
                torch.empty(5, self.batch_size, dtype=torch.int64, pin_memory=True),
                torch.zeros(self.batch_size, blocks, dtype=torch.int32, pin_memory=True),
            )
            mirror = tuple(torch.empty_like(part, device=self.device, pin_memory=False) for part in host)
            buffers.host, buffers.mirror = host, (mirror[0], mirror[1])
            for i, key in enumerate(_ROW_KEYS):
                buffers.batch[key] = mirror[0][i]
        else:
            buffers.staging = self._buffers(torch.device("cpu"), pinned=torch.cuda.is_available())
        # Blocking: whoever waits for it sleeps instead of spinning.
        buffers.filled = torch.cuda.Event(blocking=True)
        buffers.released = torch.cuda.Event()
        return buffers

    def _buffers(self, device: torch.device, *, shared: bool = False, pinned: bool = False) -> Buffers:
        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            tensor = torch.empty(*shape, dtype=dtype, device=device, pin_memory=pinned)
            return tensor.share_memory_() if shared else tensor

        size, schema, region = self.batch_size, self.table.schema, self.table.region
        # One mask a window; its column in the plan is the one with the smallest steps.
        masks: dict[Window, torch.Tensor] = {}
        owners: dict[Window, str] = {}
        for name, window in self.windows.items():
            masks.setdefault(window, empty(size, window.length, dtype=torch.bool))
            if window not in owners or schema[name].step_bytes < schema[owners[window]].step_bytes:
                owners[window] = name
        batch: Batch = {}
        columns = []
        for name, window in self.windows.items():
            column = schema[name]
            out = empty(size, window.length, *column.shape, dtype=column.dtype)
            batch[name] = out
            columns.append(
                GatherColumn(
                    source=torch.from_numpy(region.column(name)),
                    out=out.view(size, window.length, -1).view(torch.uint8),
                    offset=window.offset,
                    pad=_PADS[window.pad],
                    mask=masks[window] if owners[window] == name else None,
                )
            )
        if len(masks) == 1:
            batch["mask"] = next(iter(masks.values()))
        else:
            batch["mask"] = {name: masks[window] for name, window in self.windows.items()}
        for key in _ROW_KEYS:
            batch[key] = empty(size, dtype=torch.int64)
        return Buffers(batch, GatherPlan(columns, self._block_steps))

    # ---------------------------------------------------------------- collecting

    def collect(self, buffers: Buffers, slots: Array, anchors: Array, generations: Array) -> None:
        """Fill the first rows of `buffers`; the caller holds a ticket of the table.

        Args:
            slots, anchors, generations: int64 [n], n <= batch size.

        On the CPU the rows are complete when this returns. On a GPU the work is queued on the current stream and
        `buffers.filled` is recorded after it; the host does not wait, but where the GPU cannot read the region it
        gathers the batch on the CPU first, having waited for the last copy out of the same staging buffers.
        """
        if self.device.type != "cuda":
            self._collect_cpu(buffers, slots, anchors, generations)
        elif self.zero_copy:
            self._collect_zero_copy(buffers, slots, anchors, generations)
        else:
            self._collect_staged(buffers, slots, anchors, generations)

    def _collect_cpu(self, buffers: Buffers, slots: Array, anchors: Array, generations: Array) -> None:
        count = len(slots)
        for key, values in zip(_ROW_KEYS, (slots, anchors, generations), strict=True):
            buffers.batch[key].numpy()[:count] = values
        if not native.require():
            extent, block_ids = torch.from_numpy(self._extent), torch.from_numpy(self._block_ids)
            reference.gather(
                buffers.plan, torch.from_numpy(slots), torch.from_numpy(anchors), extent, block_ids
            )
            return
        columns = buffers.plan.table.numpy()

        def gather(first: int, last: int) -> None:
            native.gather(
                columns, slots, anchors, self._extent, self._block_ids, self._block_steps, first, last
            )

        threads = crew()
        if (
            threads.size == 1
            or count * self._row_bytes(buffers) < _SINGLE_THREAD_BYTES
            or count < threads.size
        ):
            gather(0, count)
        else:
            size = threads.size
            threads.run(lambda i: gather(count * i // size, count * (i + 1) // size))

    @staticmethod
    def _row_bytes(buffers: Buffers) -> int:
        return sum(column.out.shape[1] * column.step_bytes for column in buffers.plan.columns)

    def _collect_zero_copy(self, buffers: Buffers, slots: Array, anchors: Array, generations: Array) -> None:
        from gear_loader.kernels import gather

        assert buffers.host is not None and buffers.mirror is not None and buffers.filled is not None
        assert buffers.released is not None
        count = len(slots)
        # The copy out of these pinned tensors for the previous batch in these buffers has long finished: that batch
        # was delivered. Waiting for its event returns at once.
        buffers.filled.synchronize()
        rows, ids = buffers.host[0].numpy(), buffers.host[1].numpy()
        for i, values in enumerate((slots, anchors, generations)):
            rows[i, :count] = values
        extent = rows[3:].reshape(-1, 2)[:count]
        self._resolve(slots, anchors, extent, ids)
        torch.cuda.current_stream().wait_event(buffers.released)
        for host, mirror in zip(buffers.host, buffers.mirror, strict=True):
            mirror.copy_(host, non_blocking=True)
        device_rows, device_ids = buffers.mirror
        gather.gather(
            buffers.plan,
            self._numbers(count),
            device_rows[1, :count],
            device_rows[3:].view(-1, 2),
            device_ids.view(-1),
            programs=self.programs,
        )
        buffers.filled.record()

    def _resolve(self, slots: Array, anchors: Array, extent: Array, ids: Array) -> None:
        if native.require():
            native.resolve(
                slots,
                anchors,
                self._extent,
                self._block_ids,
                self._block_steps,
                self._first,
                self._last,
                extent,
                ids,
            )
            return
        steps, row = self._extent[slots, 0], self._extent[slots, 1]
        low = np.clip(anchors + self._first, 0, steps - 1) // self._block_steps
        high = np.clip(anchors + self._last, 0, steps - 1) // self._block_steps
        width = ids.shape[1]
        extent[:, 0] = steps
        extent[:, 1] = np.arange(len(slots)) * width - low
        ids[: len(slots)] = self._block_ids[
            row[:, None] + np.minimum(low[:, None] + np.arange(width), high[:, None])
        ]

    def _numbers(self, count: int) -> torch.Tensor:
        numbers = getattr(self, "_arange", None)
        if numbers is None:
            numbers = self._arange = torch.arange(self.batch_size, device=self.device)
        return numbers[:count]

    def _collect_staged(self, buffers: Buffers, slots: Array, anchors: Array, generations: Array) -> None:
        assert buffers.staging is not None and buffers.filled is not None and buffers.released is not None
        buffers.filled.synchronize()
        self._collect_cpu(buffers.staging, slots, anchors, generations)
        torch.cuda.current_stream().wait_event(buffers.released)
        count = len(slots)
        _copy_batch(buffers.rows(count), buffers.staging.rows(count))
        buffers.filled.record()


def _copy_batch(target: Batch, source: Batch) -> None:
    for key, value in source.items():
        if isinstance(value, dict):
            _copy_batch(target[key], value)
        else:
            target[key].copy_(value, non_blocking=True)
