"""The collector: gathers drawn rows into a batch, of a source of rows, by a mover, in a layout.

::

    source   where rows are: a table of this machine (`TableSource`), or the shards of many
    layout   what a batch is made of: windows of one length with masks, or rows one after another
    mover    how rows get there: the CPU's loop, one upload and one launch on a GPU, or a copy of what the CPU gathers
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from gear_loader.collection.buffers import Buffers, GpuSide, TensorMemory, copy_batch
from gear_loader.collection.movers import CudaMover, HostMover, RowMover
from gear_loader.collection.packed import PackedBuffers, PackedHost, PackedLayout
from gear_loader.collection.packed_cuda import PackedCuda
from gear_loader.collection.padded import PaddedBuffers, PaddedHost, PaddedLayout
from gear_loader.collection.padded_cuda import PaddedCuda
from gear_loader.collection.ragged_cuda import RaggedCuda
from gear_loader.collection.ragged_values import only_records, read_ragged
from gear_loader.collection.timed import TimedSource
from gear_loader.collection.windows import ROW_KEYS, is_late, only_host_gathers, without_late
from gear_loader.kernels.devices import multiprocessors
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.region import Region
from gear_loader.storage.table import Table
from gear_loader.utils.streams import current_stream


class RowSource(Protocol):
    """What holds the rows that a selection draws."""

    @property
    def keys(self) -> tuple[str, ...]:
        """Keys of a batch that identify its rows."""

    @property
    def waits(self) -> bool:
        """Whether `read` may wait for other processes, so that the training thread must not call it."""

    @property
    def computes(self) -> bool:
        """Whether n-step returns of all rows are computed where the rows are."""

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of this machine whose memory it reads; the first has the schema of all."""

    @property
    def only(self) -> Table | None:
        """The table that has all rows, if there is one."""

    def another(self) -> RowSource:
        """A source of the same rows, for other windows."""

    def read(self, mover: RowMover, buffers: Any, rows: Any) -> None:
        """Fill buffers with drawn rows by a mover."""


class TableSource:
    """The rows of one table. The caller of `read` holds their read ticket."""

    keys, waits, computes = ROW_KEYS, False, True

    def __init__(self, table: Table) -> None:
        self.only = table
        self.tables = (table,)

    def another(self) -> TableSource:
        """See `RowSource`."""
        return self

    def read(self, mover: RowMover, buffers: Any, rows: Any) -> None:
        """Fill buffers with `SelectedRows`, or with `CudaRows` if the mover's GPU reads the table.

        Raises:
            LostRowsError: trajectories cannot be read from disk. CorruptTableError: the index is corrupt.
        """
        while True:
            if self.only.schema.mutable:
                reader = self.only._engine.reader()
                reader.read_whole(rows.slots, lambda: mover.fill(buffers, self.only, rows))
            else:
                mover.fill(buffers, self.only, rows)
            if not mover.ragged:
                return
            with contextlib.suppress(MovedRowsError):  # else what was on disk has been written anew meanwhile
                self._read_ragged(mover, buffers, len(rows))
                return

    def _read_ragged(self, mover: RowMover, buffers: Any, count: int) -> None:
        """Read the values whose records have been gathered; those of a group once in a tree."""
        layout = mover.layout
        grouped = (
            {name: each for name, each in mover.ragged.items() if layout.column_of(name).group}
            if layout.packed and layout.tree
            else {}
        )
        others = {name: each for name, each in mover.ragged.items() if name not in grouped}
        records_alone = not grouped and only_records(self.only, others)
        shown = buffers.some(count, others) if records_alone else buffers.rows(count)
        where: dict[str, Any] = {"pinned": mover.pinned, "device": mover.decodes_on}
        buffers.ragged = read_ragged(self.only, others, shown, **where)
        if grouped:
            leaders = torch.from_numpy(buffers.leaders)
            leading = {name: shown[name][leaders] for name in ("index", *grouped)}
            buffers.ragged |= read_ragged(self.only, grouped, leading, **where)


class _Staged(RowMover):
    """Fills buffers on a GPU with copies of batches that the CPU gathers in pinned memory.

    Args:
        host: gathers them. device: the GPU. values: what lets the GPU read arrays of ragged columns out of the table.
    """

    def __init__(self, host: HostMover, device: torch.device, values: RaggedCuda | None = None) -> None:
        self.layout, self._host, self._device, self._values = host.layout, host, device, values
        self._arrays = {name: each for name, each in self.layout.ragged.items() if name not in host.ragged}
        self.zero_copy = values is not None

    def buffers(self, *, shared: Any = False) -> Buffers:
        made: Buffers
        memory = TensorMemory(self._device)
        gpu = GpuSide(staging=self._host.buffers())
        if isinstance(self.layout, PackedLayout):
            made = PackedBuffers(self.layout, memory, self, gpu=gpu, converts=False)
        else:
            made = PaddedBuffers(self.layout, memory, self, converts=False)
            made.allocate_values(memory)
        made.gpu = gpu
        return made

    def run(self, buffers: Buffers, rows: Any, read: Callable[[Any, Any, Any], None]) -> None:
        """See `CudaMover.run`. Waits for the last copy out of the staging buffers."""
        gpu = buffers.gpu
        assert gpu is not None
        gpu.filled.synchronize()
        while self._values is not None and gpu.parts:
            self._values.staging.give(gpu.parts.pop())
        try:
            read(self._host, gpu.staging, rows)
            buffers.follow(gpu.staging, len(rows))
            current_stream(self._device).wait_event(gpu.released)
            copy_batch(buffers.rows(len(rows)), gpu.staging.rows(len(rows)))
            # The staging buffers keep these until the copies have been made.
            buffers.ragged = _on_device(gpu.staging.ragged, self._device)
            if self._values is not None:
                assert self._host.only is not None
                staged = gpu.staging.rows(len(rows))
                buffers.ragged |= self._values.read(self._host.only, self._arrays, staged, gpu.parts)
        finally:
            gpu.filled.record(current_stream(self._device))


def _on_device(values: Mapping[str, Any], device: torch.device) -> dict[str, Any]:
    """Copies on a device of what is a tensor or `Ragged`. Does not wait for a GPU."""

    def moved(value: Any) -> Any:
        if isinstance(value, dict):
            return _on_device(value, device)
        return value.to(device, non_blocking=True) if isinstance(value, (Ragged, torch.Tensor)) else value

    return {name: moved(value) for name, value in values.items()}


class Collector:
    """Gathers rows of a source into buffers.

    Args:
        source: has the rows.
        host: mover of the CPU.
        device: of the batches.
        cuda: makes the mover of a GPU that reads the tables itself.
        zero_copy: whether the GPU does. pinning: whether it will when the only table of the source is pinned, which is
            under way.
        stream_priority: of the side stream that runs `gather` on a GPU.

    Attributes:
        awaits_pinning: `pinning`, until then; see `look`.
        mover: makes and fills buffers. Those of another one are outdated: they are gathered on the CPU and copied,
            although the device reads the table by now.
    """

    def __init__(
        self,
        source: RowSource,
        host: HostMover,
        *,
        device: torch.device,
        cuda: Callable[[], RowMover],
        zero_copy: bool = False,
        pinning: bool = False,
        stream_priority: int = 0,
    ) -> None:
        self.source, self.device, self.stream_priority = source, device, stream_priority
        self.awaits_pinning, self._cuda = pinning, cuda
        self.mover: RowMover = (
            cuda() if zero_copy else host if device.type == "cpu" else _Staged(host, device)
        )

    @property
    def zero_copy(self) -> bool:
        """Whether the device reads the tables itself."""
        return self.mover.zero_copy

    @property
    def waits(self) -> bool:
        """Whether `gather` waits for other processes, or lets the CPU gather, so that a thread should call it."""
        return self.source.waits or not isinstance(self.mover, CudaMover)

    def is_quick(self, count: int) -> bool:
        """See `RowMover.is_quick`."""
        return not self.source.waits and self.mover.is_quick(count)

    @property
    def region(self) -> Region:
        """The memory of the first table."""
        return self.source.tables[0]._engine.region

    @property
    def regions(self) -> list[Region]:
        """The memory that a GPU may read for a batch."""
        return [table._engine.region for table in self.source.tables]

    def look(self) -> None:
        """Let buffers made from here on be those of a device that reads the table, if it has been pinned meanwhile."""
        if self.awaits_pinning and not (region := self.regions[0]).is_pinning:
            self.awaits_pinning = False
            if region.pin(self.device):
                self.mover = self._cuda()

    def buffers(self, *, shared: Any = False) -> Any:
        """New tensors for one batch.

        Args:
            shared: allocate them in shared memory, so that they can be sent to another process without a copy.
        """
        return self.mover.buffers(shared=shared)

    def gather(self, buffers: Buffers, rows: Any) -> None:
        """Fill buffers of this collector.

        Args:
            rows: of the source's selection. On the CPU they are complete when this returns. On a GPU the work is queued
                on the current stream and `filled` is recorded after it; the host waits for the last batch in the same
                buffers only, unless the memory of packed ones has to grow.

        Raises:
            LostRowsError: trajectories of a table cannot be read from disk. CorruptTableError: the index is corrupt.
            SchemaError: a packed batch would have 2**31 steps or more.
            TransportError, StaleIndexError, TableEmptyError: see `gear_loader.distributed.shard_source`.
        """
        buffers.mover.run(buffers, rows, self.source.read)


def collector_for(
    source: RowSource,
    windows: Mapping[str, Any],
    *,
    batch_size: int = 1,
    device: torch.device,
    packed: bool = False,
    tree: bool = False,
    weighs: bool = False,
    informs: bool = False,
    programs: int | None = None,
    stream_priority: int = 0,
    zero_copy: bool | None = None,
    decode: bool = False,
) -> Collector:
    """Compose a collector.

    Args:
        source: has the rows. windows: name in the batch -> window or `NStep`; other columns are not read.
        batch_size: most rows of a padded batch.
        device: of the batches. packed: whether rows lie one after another. tree: as of `PackedLayout`.
        weighs, informs: whether batches carry ``priority_weight``, and ``sample_info``.
        programs: size of the kernels' grids, see `gear_loader.kernels.gather`; of a table on a GPU all multiprocessors.
        stream_priority: as for `Collector`.
        zero_copy: whether the device reads the tables; None to pin the only one, unless it lies on a GPU.
        decode: whether a GPU decodes jpegs.
    """
    tables, pinning = source.tables, False
    timed, given_windows = is_late(tables[0].schema, windows), windows
    windows = without_late(tables[0].schema, windows)
    options: dict[str, Any] = {"keys": source.keys, "weighs": weighs, "informs": informs}
    on_gpu = device.type == "cuda"
    here = tables[0]._engine.device

    def layout(returns: Literal["at once", "between", "after"]) -> Any:
        if packed:
            return PackedLayout(tables[0].schema, windows, tree=tree, **options)
        return PaddedLayout(tables[0].schema, windows, batch_size=batch_size, returns=returns, **options)

    def on_host(*, arrays: bool) -> Any:
        return (PackedHost if packed else PaddedHost)(
            layout("at once" if source.computes else "after"),
            pinned=on_gpu,
            only=None if here is not None or timed else source.only,
            arrays=arrays,
            decodes_on=device if on_gpu and decode else None,
        )

    host, staged = on_host(arrays=True), only_host_gathers(tables[0].schema, given_windows)
    text = all(values.kind != "array" for values in host.ragged.values())
    if timed:
        given = {"pinned": on_gpu, "decodes_on": device if on_gpu and decode else None}
        source = TimedSource(source, tables[0].schema, given_windows, batch_size, **given)
    if tree or (staged and (text or timed or tables[0]._engine.has_tier or source.only is None)):
        zero_copy = False
    if zero_copy is None and here is not None:
        zero_copy = device == here and tables[0]._engine.region.device_memory is not None
    if zero_copy is None:
        region = tables[0]._engine.region
        pinning = on_gpu and region.is_pinning
        zero_copy = on_gpu and region.pin(device, wait=not pinning)
        pinning = pinning and not zero_copy
    splits = source.only is None or source.only._engine.moves

    def cuda() -> Any:
        if staged:
            return _Staged(on_host(arrays=False), device, RaggedCuda(device, programs))
        kind: Any = PackedCuda if packed else PaddedCuda
        size = multiprocessors(device) if programs is None and here is not None else programs
        given = {"device": device, "programs": size, "tables": tables, "splits": splits}
        given["bus_programs"] = programs
        return kind(layout("after" if splits else "between"), **given)

    return Collector(
        source,
        host,
        device=device,
        cuda=cuda,
        zero_copy=zero_copy,
        pinning=pinning,
        stream_priority=stream_priority,
    )
