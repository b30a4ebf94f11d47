"""Padded batches on a GPU that reads host memory: one upload, and one gather for each table."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Hashable, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.collection.buffers import (
    GpuSide,
    Part,
    RowValues,
    TensorMemory,
    named_views,
    shown_values,
)
from gear_loader.collection.movers import CudaMover
from gear_loader.collection.padded import PaddedBuffers, PaddedLayout, names_of
from gear_loader.collection.plans import Plans, Records, plans_of
from gear_loader.collection.tier_rows import TierRows
from gear_loader.collection.windows import ROW_KEYS
from gear_loader.kernels.launching import copy
from gear_loader.kernels.plan import MASK, OUT
from gear_loader.kernels.uniform_reference import RANDOM
from gear_loader.storage.queued import QueuedBatch, QueuedDraw, QueuedPadded
from gear_loader.storage.selected_rows import CudaRows, DrawPlaces, UniformPlaces
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.launch_graph import LaunchGraph
from gear_loader.utils.packing import Layout, packed_bytes
from gear_loader.utils.streams import current_stream

_ROWS = "rows"
"""Key of the work that gathers a whole batch of one table, whose rows the host has drawn."""
_HOST_ROWS = "rows of the host part"
"""The same, if all of them are in the host part of a table on a GPU."""


class _Claimed(NamedTuple):
    """Rows of one table whose index entries the host has written.

    Attributes:
        table: the table. part: where the entries are. whole: whether they are those of the batch, row by row.
        host: whether they are of the host part of a table on a GPU.
    """

    table: Table
    part: slice
    whole: bool
    host: bool = False


class PaddedDeviceBuffers(PaddedBuffers):
    """The tensors of a padded batch on a GPU, with the arguments of its kernels, in pinned memory and on the device::

        rows    int64 [6, B]: index, anchor, generation, and int64 [B, 3], the extents of `resolve`
        blocks  int32 [B, K], of `resolve`
        local   int64 [2, B]: step, and row of the batch, of each extent, where they are not those of the batch
        weights, counts, numbers and other keys: what batches carry, see `RowValues`
        places  int64 [2 B]: row of the batch, of rows in staging memory; a row may be there twice

    Attributes:
        host, mirror: views of both. memory: both. random: pinned int64 [6], key, counter and anchor key of a draw by
            priority on the GPU, or the words of a uniform one; beta: pinned float32 [1], the exponent of its weights.
        is_drawn_here: whether the GPU has drawn the rows by priority.
        records: memory of gathered records. claims: what the host has prepared, and not launched. used, placed: entries
            of the extents and of `places` that the running batch has used.
    """

    gpu: GpuSide

    def __init__(
        self, layout: PaddedLayout, memory: TensorMemory, mover: PaddedCuda, blocks: int, *, splits: bool
    ) -> None:
        super().__init__(layout, memory, mover)
        size, pinned = layout.batch_size, memory.device.type == "cuda"
        entries: dict[str, Layout] = {
            "rows": ((6, size), torch.int64),
            "blocks": ((size, blocks), torch.int32),
            **({"local": ((2, size), torch.int64)} if splits else {}),
        }
        more = dict.fromkeys(layout.keys[3:], ((size,), torch.int64))
        uploaded: dict[str, Layout] = {**entries, **layout.row_layouts(), **more}
        parts: dict[str, Layout] = {**uploaded, **({"places": ((2 * size,), torch.int64)} if splits else {})}
        self._ends = packed_bytes(list(entries.values())), packed_bytes(list(uploaded.values()))
        self.memory = memory.mirrored(packed_bytes(list(parts.values())))
        self.memory[1].copy_(self.memory[0])  # which waits
        self.host, self.mirror = (named_views(each, parts) for each in self.memory)
        names, shown = (
            [*side["rows"][:3], *(side[key] for key in more)] for side in (self.host, self.mirror)
        )
        self.values = RowValues.of(names, self.host)
        self.batch.update(shown_values(layout.keys, shown, self.mirror))
        self.random = torch.empty(RANDOM, dtype=torch.int64, device="cpu", pin_memory=pinned)
        self.beta = torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=pinned)
        self.gpu = GpuSide()
        self.records: Records = {}
        self._plans: dict[tuple[int, bool], list[tuple[Plans, torch.Tensor | None]]] = {}
        self.claims: list[_Claimed] = []
        self.used = self.placed = 0
        self.is_drawn_here = False
        self._queued: QueuedPadded | None = None

    def begin(self) -> None:
        """Forget the last batch."""
        self.claims, self.used, self.placed, self.is_drawn_here = [], 0, 0, False

    def names_on_host(self, count: int) -> tuple[Array, ...] | None:
        self.mover.asks_names = True
        queued = self._queued
        drawn = self.is_drawn_here or (queued is not None and queued.was_drawn)
        return None if drawn else super().names_on_host(count)

    def queued(self, stream: torch.cuda.Stream) -> QueuedBatch | None:
        gpu, layout = self.gpu, self.layout
        graph, key = gpu.work.graph, gpu.work.key
        if graph is None or gpu.parts or layout.late or not self.only_launches:
            return None
        if key == _ROWS and (layout.keys != ROW_KEYS or layout.informs):
            return None  # there is more to write than rows and weights
        if self.mover.follows:
            return None  # what is drawn may still be on its way
        queued = self._queued
        if queued is None or queued.graph is not graph:
            self._queued = queued = self._made_queued(graph, key, stream)
        if self.mover.asks_names:
            queued.places = None
        queued.after(gpu.released.cuda_event)
        self.begin()
        self.is_drawn_here = key != _ROWS
        return queued

    def _made_queued(self, graph: LaunchGraph, key: Hashable, stream: torch.cuda.Stream) -> QueuedPadded:
        host, weighs, filled = self.host, self.layout.weighs, self.gpu.filled
        given = host["rows"].numpy(), host["blocks"].numpy(), self.layout.reach
        options: dict[str, Any] = {"key": key, "count": self.layout.batch_size, "wait": filled.synchronize}
        options |= {"graph": graph, "stream": stream.cuda_stream, "filled": filled.cuda_event}
        if key == _ROWS:
            places = None if weighs or self.mover.reads_several else self._uniform_places(stream)
            weights = host["weights"].numpy() if weighs else None
            return QueuedPadded(*given, weights=weights, places=places, **options)
        begin = self.mirror["weights"].data_ptr() - self.memory[1].data_ptr() if weighs else None
        draw = self.random.numpy(), self.beta.numpy()
        return QueuedDraw(*given, weights=None, draw=draw, memory=self.memory[1], begin=begin, **options)

    def _uniform_places(self, stream: torch.cuda.Stream) -> UniformPlaces:
        own = weakref.ref(self)  # no cycle: memory of the GPU ends with its last reference
        reach = self.layout.reach

        def gather() -> None:
            buffers = own()
            assert buffers is not None
            buffers.mover.gather_drawn(buffers)
            buffers.references = None  # the graph refers to the batch's memory

        return UniformPlaces(self.random, self.mirror["rows"], self.mirror["blocks"], reach, stream, gather)

    def plans_of(self, table: Table, *, host: bool = False) -> list[tuple[Plans, torch.Tensor | None]]:
        """The plans that gather the windows of a table, or of its `host` part; packing and blocks of tables may differ.

        Returns:
            That of the windows at anchors, and None; then those at bootstrap steps, and these, int64 [B].
        """
        if (id(table), host) not in self._plans:
            late, named = self.layout.late, dict(zip(self.layout.windows, self.outputs, strict=True))
            early = [output for name, output in named.items() if name not in late]
            first = plans_of(table, early, self.records, host=host)
            plans: list[tuple[Plans, torch.Tensor | None]] = [(first, None)]
            for spec in dict.fromkeys(late.values()):
                outputs = [named[name] for name, which in late.items() if which == spec]
                target: Any = self.batch[spec]
                plans.append((plans_of(table, outputs, self.records, host=host), target["bootstrap"]))
            self._plans[id(table), host] = plans
            self.references = None  # the plan refers to the batch's memory
        return self._plans[id(table), host]

    def upload(self, *, entries: bool = False) -> None:
        """Queue a copy of what the host has written; `entries`: of the index entries alone."""
        first, end = (3 * 8 * self.layout.batch_size, self._ends[0]) if entries else (0, self._ends[1])
        host, mirror = self.memory
        copy(mirror[first:end], host[first:end])


class PaddedCuda(CudaMover):
    """Fills padded batches by a GPU that reads the tables itself.

    Args:
        layout, device, programs, tables: as for `CudaMover`.
        splits: whether rows of a batch may lie in several tables, or elsewhere.
        bus_programs: as `programs`, for the host part of a table on a GPU.
    """

    layout: PaddedLayout

    def __init__(
        self,
        layout: PaddedLayout,
        *,
        tables: Sequence[Table],
        splits: bool,
        bus_programs: int | None = None,
        **options: Any,
    ) -> None:
        super().__init__(layout, tables=tables, **options)
        self._splits, self._bus_programs = splits, bus_programs
        first, last, once = layout.reach
        steps = [table._engine.region.layout.block_steps for table in tables]
        self._blocks = max((last - first) // each + 2 + once for each in steps)
        self._own = tables[0] if len(tables) == 1 else None
        self._tables: dict[int, TierRows] = {}
        self._once_extents: dict[int, torch.Tensor] = {}
        self.asks_names = False  # whether the host wants to know which rows are drawn
        # Copied, which waits: if computed on the device, another stream could read it too early.
        with outside_inference():
            self._numbers = torch.arange(layout.batch_size, device="cpu").to(self._device)

    def buffers(self, *, shared: Any = False) -> PaddedBuffers:
        made = PaddedDeviceBuffers(
            self.layout, TensorMemory(self._device), self, self._blocks, splits=self._splits
        )
        if self._own is not None:  # others are made when they are needed
            made.plans_of(self._own)
        if self._device.type == "cuda":  # they were allocated on another stream than the one that gathers
            self._numbers.record_stream(current_stream(self._device))
        return made

    def fill(self, buffers: PaddedDeviceBuffers, table: Table, rows: Any) -> None:
        if isinstance(rows, CudaRows):
            self.begin(buffers, rows)
            buffers.is_drawn_here = True
            self._draw(buffers, table, rows)
        else:
            super().fill(buffers, table, rows)

    @property
    def reads_several(self) -> bool:
        """Whether it reads several tables."""
        return self._own is None

    def begin(self, buffers: PaddedDeviceBuffers, rows: Any) -> None:
        buffers.begin()
        if buffers._queued is not None:
            buffers._queued.was_drawn = False
        current_stream(self._device).wait_event(buffers.gpu.released)

    def gather_drawn(self, buffers: PaddedDeviceBuffers) -> None:
        """Queue the gather of a whole batch of the only table, whose rows the GPU has drawn and looked up."""
        assert self._own is not None
        count = self.layout.batch_size
        self._launch(buffers, _Claimed(self._own, slice(count), whole=True))
        buffers.compute(count)

    def _draw(self, buffers: PaddedDeviceBuffers, table: Table, rows: CudaRows) -> None:
        """Let the GPU draw the rows, then gather them."""
        count, whole, mirror = len(rows), len(rows) == self.layout.batch_size, buffers.mirror

        def queue() -> None:
            self._launch(buffers, _Claimed(table, slice(count), whole=True))
            if buffers.only_launches:
                buffers.compute(count)

        out = mirror["rows"], mirror["blocks"], *([mirror["weights"]] if self.layout.weighs else [])
        work, reach = buffers.gpu.work, self.layout.reach
        places = DrawPlaces(
            buffers.random[:3], buffers.beta, out, buffers.memory[1], reach, work, whole, queue
        )
        rows.write(places, current_stream(self._device))
        if not buffers.only_launches:
            self._compute(buffers, count, [_Claimed(table, slice(count), whole=True)])

    def _compute(self, buffers: PaddedDeviceBuffers, count: int, claims: Sequence[_Claimed]) -> None:
        """Compute returns, then gather at their bootstrap steps."""
        buffers.compute(count)
        for claim in claims if self.layout.late else ():
            self._launch(buffers, claim, late=True)

    def copy(self, buffers: PaddedDeviceBuffers, table: Table, rows: Any, which: Array | None = None) -> None:
        # Host memory is slow for the kernel, so the index entries of the rows are copied; only the steps are read
        # across the bus. Rows on disk are placed.
        tier, (slots, anchors, generations) = self._tier(table), names_of(rows, which)
        first, count = buffers.used, len(slots)
        extent = buffers.host["rows"][3:].view(-1, 3).numpy()[first : first + count]
        ids = buffers.host["blocks"].numpy()[first : first + count]
        inside, outside = tier.resolve(slots, anchors, extent, ids)
        self.follow()  # trajectories may have come back from the disk since `run`
        if len(outside):
            memory = self.staging.take(buffers.place.size(len(outside)))
            try:
                columns = self._columns_in(buffers, memory, len(outside))
                names = slots[outside], anchors[outside], generations[outside]
                tier.read(columns, self.layout.sources, *names, None)
            except BaseException:
                self.staging.give(memory)
                raise
            self._put(buffers, memory, outside if which is None else which[outside])
        part = slice(first, first + count - len(outside))
        if part.start == part.stop:
            return
        buffers.used = part.stop
        parts, order = [(part, False)], None
        if table._engine.region.layout.host_blocks:
            parts, order = self._by_level(table, extent, ids, part)
            if order is not None:
                inside = order if inside is None else inside[order]
        whole = which is None and inside is None
        if not whole:
            numbers = np.arange(count) if which is None else which
            local = buffers.host["local"].numpy()
            local[0, part], local[1, part] = (
                values if inside is None else values[inside] for values in (anchors, numbers)
            )
        buffers.claims += [_Claimed(table, each, whole, host) for each, host in parts]

    def _by_level(
        self, table: Table, extent: Array, ids: Array, part: slice
    ) -> tuple[list[tuple[slice, bool]], Array | None]:
        """Put index entries of rows in the GPU's memory, which get the numbers of its blocks, before those of rows in
        the host part.

        Args:
            extent, ids: of the rows, and perhaps more, as of `TierRows.resolve`. part: their place among all.

        Returns:
            The parts, and whether each is of the host part; and the order that the rows had, int64 [n], None for this.

        Raises:
            CorruptTableError: blocks of a trajectory lie in both.
        """
        count, width, first = part.stop - part.start, ids.shape[1], table._engine.region.layout.host_blocks
        of_part = ids[:count] < first
        hosted = of_part[:, 0]
        if (of_part != hosted[:, None]).any():
            raise table._engine.index.arrays.corrupt("a trajectory lies on a GPU and in host memory")
        here = count - int(hosted.sum())
        order = None
        if 0 < here < count:
            order = np.argsort(hosted, kind="stable")
            numbers = np.arange(count)
            numbers[here:] -= here  # within its part
            extent[:count], ids[:count] = extent[order], ids[order]
            extent[:count, 1] += (numbers - order) * width
        ids[:here] -= first
        middle = part.start + here
        parts = [(slice(part.start, middle), False), (slice(middle, part.stop), True)]
        return [each for each in parts if each[0].start < each[0].stop], order

    def _tier(self, table: Table) -> TierRows:
        if id(table) not in self._tables:
            self._tables[id(table)] = TierRows(table, self.layout.reach, self.layout.row_bytes)
        return self._tables[id(table)]

    def _columns_in(self, buffers: PaddedDeviceBuffers, memory: torch.Tensor, count: int) -> Array:
        """How the CPU's loop gathers windows of `count` rows into staging memory, int64 [C, WIDTH]."""
        columns, outputs = self.layout.columns(), buffers.outputs
        places = [memory.data_ptr() + offset for offset in buffers.place.offsets(count)]
        columns[:, OUT] = places[: len(outputs)]
        masks = {id(mask): place for mask, place in zip(buffers.masks, places[len(outputs) :], strict=True)}
        columns[:, MASK] = [masks.get(id(output.mask), 0) for output in outputs]
        return columns

    def flush(self, buffers: PaddedDeviceBuffers) -> None:
        claims, buffers.claims = buffers.claims, []
        if claims:
            buffers.upload(entries=True)
        for claim in claims:
            self._launch(buffers, claim)

    def place(self, buffers: PaddedDeviceBuffers, part: Part, numbers: Array) -> None:
        self._put(buffers, part.memory, part.rows)

    def _put(self, buffers: PaddedDeviceBuffers, memory: torch.Tensor, numbers: Array) -> None:
        """Place staging memory into rows of the batch."""
        from gear_loader.kernels import place

        part = slice(buffers.placed, buffers.placed + len(numbers))
        buffers.placed = part.stop
        buffers.gpu.parts.append(memory)
        host, mirror = buffers.host["places"][part], buffers.mirror["places"][part]
        host.numpy()[:] = numbers
        mirror.copy_(host, non_blocking=True)
        place.place(buffers.place, memory, mirror, programs=self._programs)

    def load(self, buffers: PaddedDeviceBuffers, copy: Callable[[Array, Array], None], which: Array) -> None:
        # Through staging memory: what is kept need not be pinned, and may change while the GPU still reads.
        memory = self.staging.take(buffers.place.size(len(which)))
        outs = memory.data_ptr() + np.array(buffers.place.offsets(len(which)), dtype=np.int64)
        copy(outs, np.arange(len(which)))
        self._put(buffers, memory, which)

    def finish(self, buffers: PaddedDeviceBuffers, rows: Any) -> None:
        count, claims = len(rows), buffers.claims
        buffers.values.write(rows)

        def queue() -> None:
            buffers.upload()
            for claim in claims:
                self._launch(buffers, claim)
            if buffers.only_launches:
                buffers.compute(count)

        repeats = count == self.layout.batch_size and [claim.whole for claim in claims] == [True]
        key = None if not repeats else _HOST_ROWS if claims[0].host else _ROWS
        buffers.gpu.work.run(key, queue, current_stream(self._device))
        if not buffers.only_launches:
            self._compute(buffers, count, claims)

    def _launch(self, buffers: PaddedDeviceBuffers, claim: _Claimed, *, late: bool = False) -> None:
        """Gather rows of one table, with the index entries on the device; `late`: at the bootstrap steps."""
        plans = buffers.plans_of(claim.table, host=claim.host)
        for plan, steps in plans[1:] if late else plans[:1]:
            self._gather(buffers, claim, plan, steps)

    def _gather(
        self, buffers: PaddedDeviceBuffers, claim: _Claimed, plans: Plans, steps: torch.Tensor | None
    ) -> None:
        """`_launch` of plans; steps: where they differ from the anchors, of rows of the whole batch."""
        from gear_loader.kernels import gather, split

        mirror, part = buffers.mirror, claim.part
        programs = self._bus_programs if claim.host else self._programs
        count, ids = part.stop - (part.start or 0), mirror["blocks"][part]
        anchors, rows = (mirror["rows"][1], None) if claim.whole else mirror["local"][:, part]
        if steps is not None:
            assert claim.whole
            anchors = steps
        numbers, extent = self._numbers[:count], mirror["rows"][3:].view(-1, 3)[part]
        gather.gather(
            plans.steps, numbers, anchors[:count], extent, ids.view(-1), rows=rows, programs=programs
        )
        if plans.split is not None:
            split.split(plans.split, count, rows=rows, programs=programs)
        if plans.once is not None:
            # Every trajectory has one step here, whose block is the last of its row in `ids`.
            once = self._once_extent(ids.shape[1])
            gather.gather(plans.once, numbers, numbers, once, ids.view(-1), rows=rows, programs=programs)

    def _once_extent(self, width: int) -> torch.Tensor:
        """Extents, int64 [B, 3], of trajectories of one step in the last of `width` blocks a row."""
        if width not in self._once_extents:
            size = self.layout.batch_size
            extent = torch.zeros(size, 3, dtype=torch.int64, device="cpu")
            extent[:, 0] = 1
            extent[:, 1] = torch.arange(size, device="cpu") * width + width - 1
            with outside_inference():
                self._once_extents[width] = extent.to(self._device)  # which waits, see `_numbers`
        return self._once_extents[width]
