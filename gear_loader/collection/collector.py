"""The collector gathers the windows of drawn rows into a batch, on the CPU or by a GPU that reads host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.conversions import Casts, Conversion, converted_dtype
from gear_loader.collection.n_step import NStep, Returns
from gear_loader.collection.plans import Output, Plans, Staging, plans_of
from gear_loader.collection.references import Arena, BatchReferences
from gear_loader.collection.tier_rows import TierRows, TierStaging
from gear_loader.collection.windows import Whole, expand, mask_of, reach_of, source_of, steps_only
from gear_loader.errors import CorruptTableError
from gear_loader.kernels.cast_plan import CastColumn
from gear_loader.kernels.plan import WIDTH, GatherPlan
from gear_loader.native import gathering, threads
from gear_loader.storage.inline import INLINE_BATCH_BYTES, InlineBatch
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Window
from gear_loader.storage.selected_rows import CudaRows, DrawPlaces, Reach, SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, outside_inference
from gear_loader.utils.launch_graph import RepeatedWork
from gear_loader.utils.packing import Layout, packed_bytes, packed_views
from gear_loader.utils.streams import current_stream

__all__ = [
    "Buffers",
    "Collector",
    "clone_batch",
    "copy_batch",
    "resolve",
]

ROW_KEYS = ("index", "anchor", "generation")
COUNTS, NUMBERS = ("times_sampled", "age"), ("probability", "age_seconds")  # keys of ``sample_info``


@dataclasses.dataclass
class GpuSide:
    """Auxiliary tensors and events of a batch on a GPU.

    Attributes:
        host: pinned tensors that the host writes: int64 [6, B] of index, anchor, generation and the three numbers of
            the extent; int32 [B, K] of the windows' block ids; float32 [B] of weights if batches carry them;
            int64 [2, B] and float32 [2, B] of ``sample_info`` if they carry it. None if the GPU cannot read the region.
        mirror: copies of `host` on the device.
        random: pinned int64 [3]: key, counter and anchor key of a draw on the GPU; and pinned float32 [1]: the exponent
            of its weights. None if the GPU cannot read the region.
        staging: a batch in pinned memory, gathered on the CPU; None if the GPU can read the region.
        tier: if the GPU can read the region, memory of rows that lie on disk only; None without a disk tier.
        filled: event recorded when the batch is complete.
        released: event recorded when its last user has finished.
        consumers: streams that have used the batch.
        copy: the copy of the batch to deliver instead, if any.
        work: of whole batches, if the GPU can read the region.
    """

    host: tuple[torch.Tensor, ...] | None
    mirror: tuple[torch.Tensor, ...] | None
    random: tuple[torch.Tensor, torch.Tensor] | None
    staging: Buffers | None
    filled: torch.cuda.Event
    released: torch.cuda.Event
    arguments: tuple[torch.Tensor, torch.Tensor] | None = None
    consumers: set[int] = dataclasses.field(default_factory=set)
    copy: Batch | None = None
    tier: TierStaging | None = None
    work: RepeatedWork = dataclasses.field(default_factory=RepeatedWork)


@dataclasses.dataclass
class Buffers:
    """The tensors of one batch, with the plans that fill them.

    Attributes:
        batch: column -> ``[B, L, *shape]``, mask, index, anchor, generation, on the target device.
        plans: of the collector's table.
        outputs: what each window fills.
        staging: on a GPU that reads the region, memory of gathered records; it is freed with the batch.
        gpu: auxiliary tensors on a GPU.
        names: on the CPU, int64 [3, B]: view of index, anchor and generation.
        columns: on the CPU, int64 [C, WIDTH]: view of the plan's table.
        weights: on the CPU, float32 [B]: view of priority_weight if batches carry it.
        computed: n-step returns and converted windows to compute after the gather.
        inline: on the CPU, the same places for a batch that is small enough to be gathered under the lock; else None.
        references: the references to the tensors, since the first `lend`; to be reset to None by whatever makes another
            reference that lasts as long as the buffers.
    """

    batch: Batch
    plans: Plans
    outputs: tuple[Output, ...]
    staging: Staging | None = None
    gpu: GpuSide | None = None
    names: Array = dataclasses.field(default_factory=lambda: np.empty((3, 0), dtype=np.int64))
    columns: Array = dataclasses.field(default_factory=lambda: np.empty((0, WIDTH), dtype=np.int64))
    weights: Array = dataclasses.field(default_factory=lambda: np.empty(0, dtype=np.float32))
    computed: tuple[Returns | Conversion | Casts, ...] = ()
    inline: InlineBatch | None = None
    references: BatchReferences | None = None

    @property
    def only_launches(self) -> bool:
        """Whether `compute` launches kernels, and allocates nothing."""
        return all(isinstance(each, Casts) for each in self.computed)

    def compute(self, count: int) -> None:
        """Compute what the first `count` rows have beside gathered windows; see `Returns.compute`."""
        for each in self.computed:
            each.compute(self.batch["anchor"][:count])

    @property
    def plan(self) -> GatherPlan:
        """Gather plan of the columns and masks."""
        return self.plans.steps

    def lend(self, count: int) -> Batch:
        """`rows` as new tensors, whose references `references` finds."""
        if self.references is None:
            self.references = BatchReferences(self.batch)
        return self.rows(count) if count < self.plan.batch_size else self.references.aliases()

    def rows(self, count: int) -> Batch:
        """The batch's first `count` rows; views if the batch is smaller than the buffers."""

        def head(value: Any) -> Any:
            return (
                {key: head(part) for key, part in value.items()} if isinstance(value, dict) else value[:count]
            )

        whole = count == self.plan.batch_size
        return Batch(self.batch if whole else {key: head(value) for key, value in self.batch.items()})


class Collector:
    """Gathers windows of a table's columns into buffers.

    Args:
        table: table to read.
        windows: name in the batch -> window or `NStep`; columns that no window reads are not read.
        batch_size: rows of a batch.
        device: device of the batches.
        programs: size of the kernel's grid, see `gear_loader.kernels.gather.gather`.
        weighs: whether batches carry ``priority_weight``.
        informs: whether batches carry ``sample_info``.

    Attributes:
        zero_copy: whether the device reads the region itself.
        awaits_pinning: whether it will as soon as the region is pinned; see `look`.
    """

    _gathers_inline = True  # whether rows are of one table alone

    def __init__(
        self,
        table: Table,
        windows: Mapping[str, Window | NStep | Whole],
        *,
        batch_size: int,
        device: torch.device,
        programs: int | None = None,
        weighs: bool = False,
        informs: bool = False,
    ) -> None:
        self.table = table
        self.weighs = weighs
        self.informs = informs
        self.windows, self._hidden = expand(table.schema, windows)
        self._computed = {name: window for name, window in windows.items() if isinstance(window, NStep)}
        self.batch_size = batch_size
        self.device = device
        self.programs = programs
        pinning = device.type == "cuda" and table._engine.region.is_pinning
        self.zero_copy = device.type == "cuda" and table._engine.region.pin(device, wait=not pinning)
        self.awaits_pinning = pinning and not self.zero_copy
        index = table._engine.reader().index_arrays()
        self._extent, self._block_ids = index
        self._block_steps = table._engine.region.layout.block_steps
        # Copied, which waits: if computed on the device, another stream could read it too early.
        with outside_inference():
            self._numbers = torch.arange(batch_size, device="cpu").to(device)
        self._row_bytes = sum(
            table.schema[source_of(name, window)].step_bytes * window.length
            for name, window in self.windows.items()
        )
        self.reach: Reach = reach_of(table.schema, self.windows)
        """What the windows read of a trajectory."""
        self._tier = TierRows(table, self.reach, self._row_bytes) if table._engine.has_tier else None
        self._once_extents: dict[int, torch.Tensor] = {}
        self.stream_priority = 0
        """Of the side stream that runs `gather` on a GPU."""
        self.waits = False
        """Whether `gather` may wait for other processes, so that the training thread must not call it."""

    @property
    def regions(self) -> list[Region]:
        """The memory that a GPU may read for a batch."""
        return [self.table._engine.region]

    # ---------------------------------------------------------------- buffers

    def look(self) -> None:
        """Let buffers made from here on be those of a device that reads the region, if it has been pinned meanwhile."""
        if self.awaits_pinning and not self.table._engine.region.is_pinning:
            self.awaits_pinning = False
            self.zero_copy = self.table._engine.region.pin(self.device)

    def is_outdated(self, buffers: Buffers) -> bool:
        """Whether buffers are gathered on the CPU and copied although the device reads the region by now."""
        return self.zero_copy and buffers.gpu is not None and buffers.gpu.staging is not None

    def buffers(self, *, shared: bool = False) -> Buffers:
        """New tensors for one batch.

        Args:
            shared: allocate them in shared memory, so that they can be sent to another process without a copy.
        """
        if self.device.type != "cuda":
            made = self._buffers(torch.device("cpu"), shared=shared)
            if self._gathers_inline and self.batch_size * self._row_bytes <= INLINE_BATCH_BYTES:
                made.inline = InlineBatch(made.columns, made.names, made.weights)
            return made
        buffers = self._buffers(self.device)
        host: tuple[torch.Tensor, ...] | None = None
        mirror: tuple[torch.Tensor, ...] | None = None
        staging = random = arguments = None

        if self.zero_copy:
            random = (
                torch.empty(3, dtype=torch.int64, device="cpu", pin_memory=True),
                torch.empty(1, dtype=torch.float32, device="cpu", pin_memory=True),
            )
            parts = self._parts()
            size = packed_bytes(parts)
            memory = torch.zeros(size, dtype=torch.uint8, device="cpu", pin_memory=True)
            arguments = memory, memory.to(self.device)
            host, mirror = (packed_views(part, parts) for part in arguments)
            if self.informs:
                buffers.batch["sample_info"] = _named(*self._info(mirror))
            for i, key in enumerate(ROW_KEYS):
                buffers.batch[key] = mirror[0][i]
            if self.weighs:
                buffers.batch["priority_weight"] = mirror[2]
        else:
            staging = self._buffers(torch.device("cpu"), pinned=True)
        # The first is blocking: a waiting thread sleeps instead of spinning.
        filled, released = torch.cuda.Event(blocking=True), torch.cuda.Event()
        tier = (
            TierStaging(self.table.schema, buffers.outputs)
            if self._tier is not None and staging is None
            else None
        )
        buffers.gpu = GpuSide(host, mirror, random, staging, filled, released, arguments, tier=tier)
        return buffers

    def _parts(self) -> list[Layout]:
        """Shapes and dtypes of `GpuSide.host`."""
        blocks = (self.reach.last - self.reach.first) // self._block_steps + 2 + self.reach.once
        parts: list[Layout] = [((6, self.batch_size), torch.int64), ((self.batch_size, blocks), torch.int32)]
        if self.weighs:
            parts.append(((self.batch_size,), torch.float32))
        if self.informs:
            parts += [((2, self.batch_size), dtype) for dtype in (torch.int64, torch.float32)]
        if self._tier is not None:
            # Anchors and rows of trajectories in memory, and rows of those on disk; after all others.
            parts.append(((3, self.batch_size), torch.int64))
        return parts

    def _info(self, parts: tuple[torch.Tensor, ...]) -> tuple[torch.Tensor, ...]:
        """The parts of ``sample_info``."""
        last = len(parts) - (self._tier is not None)
        return parts[last - 2 : last]

    def _buffers(self, device: torch.device, *, shared: bool = False, pinned: bool = False) -> Buffers:
        arena = Arena() if device.type == "cpu" and not shared and not pinned else None

        def empty(*shape: int, dtype: torch.dtype) -> torch.Tensor:
            if arena is not None and (small := arena.empty(shape, dtype)) is not None:
                return small
            tensor = torch.empty(*shape, dtype=dtype, device=device, pin_memory=pinned)
            return tensor.share_memory_() if shared else tensor

        size, schema = self.batch_size, self.table.schema
        # One mask for each key; in the plan it belongs to the column with the smallest steps.
        sources = {name: source_of(name, window) for name, window in self.windows.items()}
        keys = {name: mask_of(schema, name, window) for name, window in self.windows.items()}
        masks: dict[tuple[int, int, str, bool], torch.Tensor] = {}
        owners: dict[tuple[int, int, str, bool], str] = {}
        for name, window in steps_only(schema, self.windows).items():
            masks.setdefault(keys[name], empty(size, window.length, dtype=torch.bool))
            owner = owners.setdefault(keys[name], name)
            if schema[sources[name]].step_bytes < schema[sources[owner]].step_bytes:
                owners[keys[name]] = name
        batch = Batch()
        outputs = []
        conversions: list[Conversion] = []
        for name, window in self.windows.items():
            column = schema[sources[name]]
            out = empty(size, window.length, *column.shape, dtype=column.dtype)
            values, dtype = out, converted_dtype(name, window, column)
            if dtype is not None:
                values = empty(size, window.length, *column.shape, dtype=dtype)
                conversions.append(Conversion(out, values, window.scale))
            batch[name] = values[:, 0] if window.squeeze else values
            mask = masks[keys[name]] if owners.get(keys[name]) == name else None
            flat = out.view(size, window.length, -1).view(torch.uint8)
            outputs.append(Output(sources[name], window, flat, mask))
        shown = {
            name: masks[keys[name]][:, 0] if window.squeeze else masks[keys[name]]
            for name, window in steps_only(schema, self.windows).items()
        }
        returns = tuple(
            Returns.of(
                self._computed[name],
                {part: batch.pop(hidden) for part, hidden in parts.items()},
                {part: shown.pop(hidden) for part, hidden in parts.items()},
            )
            for name, parts in self._hidden.items()
        )
        batch.update((name, each.out) for name, each in zip(self._hidden, returns, strict=True))
        alike = len({(keys[name], self.windows[name].squeeze) for name in shown}) == 1
        batch["mask"] = next(iter(shown.values())) if alike else shown
        names = empty(3, size, dtype=torch.int64)
        batch.update(zip(ROW_KEYS, names, strict=True))
        if self.weighs:
            batch["priority_weight"] = empty(size, dtype=torch.float32)
        if self.informs:
            counts = empty(2, size, dtype=torch.int64)
            batch["sample_info"] = _named(counts, empty(2, size, dtype=torch.float32))
        staging: Staging | None = {} if self.zero_copy else None
        plans = plans_of(self.table, outputs, staging)
        computed: tuple[Returns | Conversion | Casts, ...] = (*returns, *conversions)
        if device.type == "cuda" and conversions:
            casts = [CastColumn(each.source, each.out, each.scale) for each in conversions]
            computed = (*returns, Casts(casts)) if self.zero_copy else returns
        made = Buffers(batch, plans, tuple(outputs), staging, computed=computed)
        if device.type == "cpu":
            made.names, made.columns = names.numpy(), made.plan.table.numpy()
            if "priority_weight" in batch:
                made.weights = batch["priority_weight"].numpy()
        return made

    # ---------------------------------------------------------------- collecting

    def gather(self, buffers: Buffers, rows: Any) -> None:
        """Fill the first rows of `buffers`.

        Args:
            buffers: buffers of this collector.
            rows: `SelectedRows`, or `CudaRows` if the GPU can read the region; at most the batch size. The caller
                holds their read ticket.

        On the CPU the rows are complete when this returns. On a GPU the work is queued on the current stream and
        `filled` is recorded after it. If the GPU can read the region, the host does not wait for it; otherwise it waits
        for the last copy out of the staging buffers and gathers the batch on the CPU.
        """
        gpu = buffers.gpu
        if gpu is None:
            self._gather_cpu(buffers, rows)
            return
        # The host memory of the previous batch in these buffers is about to be overwritten. That batch was delivered,
        # so this waits only if the host is ahead of the GPU by as many batches as there are buffers.
        gpu.filled.synchronize()
        try:
            self._gather_gpu(buffers, gpu, rows)
        finally:
            # Also after a failed batch, whose queued part reads the same memory.
            gpu.filled.record(current_stream(self.device))

    def _gather_gpu(self, buffers: Buffers, gpu: GpuSide, rows: Any) -> None:
        if isinstance(rows, CudaRows):
            self._gather_drawn(buffers, gpu, rows)
        elif gpu.host is not None and gpu.mirror is not None:
            self._gather_zero_copy(buffers, gpu, gpu.host, gpu.mirror, rows)
        elif gpu.staging is not None:
            self._gather_cpu(gpu.staging, rows)
            current_stream(self.device).wait_event(gpu.released)
            copy_batch(buffers.rows(len(rows)), gpu.staging.rows(len(rows)))

    def _gather_drawn(self, buffers: Buffers, gpu: GpuSide, rows: CudaRows) -> None:
        assert gpu.random is not None
        assert gpu.mirror is not None
        assert gpu.arguments is not None
        count, stream = len(rows), current_stream(self.device)
        stream.wait_event(gpu.released)
        places = DrawPlaces(
            random=gpu.random[0],
            beta=gpu.random[1],
            out=gpu.mirror,
            memory=gpu.arguments[1],
            reach=self.reach,
            work=gpu.work,
            whole=count == self.batch_size,
            gather=lambda: self._queue(buffers, gpu, count),
        )
        rows.write(places, stream)
        if not buffers.only_launches:
            buffers.compute(count)

    def _queue(self, buffers: Buffers, gpu: GpuSide, count: int) -> None:
        """Queue the gather of `count` rows, and of what is computed of them by kernels."""
        assert gpu.mirror is not None
        self._launch(buffers, gpu.mirror, count)
        if buffers.only_launches:
            buffers.compute(count)

    def _upload(self, gpu: GpuSide) -> None:
        assert gpu.arguments is not None
        source, target = gpu.arguments
        target.copy_(source, non_blocking=True)

    def use_on(self, stream: torch.cuda.Stream) -> None:
        """Register a stream for gathers, so that the allocator keeps their inputs until they have run."""
        self._numbers.record_stream(stream)
        for extent in self._once_extents.values():
            extent.record_stream(stream)

    def _gather_cpu(self, buffers: Buffers, rows: SelectedRows) -> None:
        count, slots, anchors = len(rows), rows.slots, rows.anchors
        if rows.weights is not None:
            buffers.weights[:count] = rows.weights
        if rows.counts is not None and rows.numbers is not None:
            info = buffers.batch["sample_info"]
            for key, values in zip(COUNTS + NUMBERS, (*rows.counts, *rows.numbers), strict=True):
                info[key].numpy()[:count] = values
        if self._tier is not None and self.table._engine.num_spilled:
            self._gather_tiers(self._tier, buffers, rows)
            return
        if threads.alone(count, self._row_bytes):
            bad = gathering.gather_batch(
                buffers.columns,
                slots,
                anchors,
                rows.generations,
                self._extent,
                self._block_ids,
                self._block_steps,
                buffers.names,
            )
            if bad:
                self._gather_again(buffers, rows, bad)
                return
            if buffers.computed:
                buffers.compute(count)
            return
        for place, values in zip(buffers.names, (slots, anchors, rows.generations), strict=True):
            place[:count] = values
        bad = threads.gather(
            buffers.columns,
            slots,
            anchors,
            self._extent,
            self._block_ids,
            self._block_steps,
            self._row_bytes,
        )
        if bad:
            self._gather_again(buffers, rows, bad)
            return
        buffers.compute(count)

    def _gather_again(self, buffers: Buffers, rows: SelectedRows, bad: int) -> None:
        """Gather rows once more if invalid windows may be those of trajectories that were on disk meanwhile."""
        if self._tier is None:
            self.table._engine.reader().check_gathered(bad)
        assert self._tier is not None
        self._gather_tiers(self._tier, buffers, rows)

    def _gather_tiers(self, tier: TierRows, buffers: Buffers, rows: SelectedRows) -> None:
        """Gather rows of which some lie on disk only."""
        count = len(rows)
        for place, values in zip(buffers.names, (rows.slots, rows.anchors, rows.generations), strict=True):
            place[:count] = values
        sources = [output.column for output in buffers.outputs]
        tier.gather(buffers.columns, sources, rows.slots, rows.anchors, rows.generations)
        buffers.compute(count)

    def _gather_zero_copy(
        self,
        buffers: Buffers,
        gpu: GpuSide,
        host: tuple[torch.Tensor, ...],
        mirror: tuple[torch.Tensor, ...],
        drawn: SelectedRows,
    ) -> None:
        # Host memory is slow for the kernel, so the index entries of the rows are copied; only the steps are read
        # across the bus.
        count = len(drawn)
        rows, ids = host[0].numpy(), host[1].numpy()
        for i, values in enumerate((drawn.slots, drawn.anchors, drawn.generations)):
            rows[i, :count] = values
        extent, disk = rows[3:].reshape(-1, 3), np.empty(0, dtype=np.int64)
        if self._tier is not None and self.table._engine.num_spilled:
            disk = self._resolve_tiers(self._tier, gpu, host, drawn)
        else:
            try:
                resolve(self.table, drawn.slots, drawn.anchors, self.reach, extent[:count], ids)
            except CorruptTableError:  # or a trajectory was on disk meanwhile
                if self._tier is None:
                    raise
                disk = self._resolve_tiers(self._tier, gpu, host, drawn)
        if drawn.weights is not None:
            host[2].numpy()[:count] = drawn.weights
        if drawn.counts is not None and drawn.numbers is not None:
            for part, values in zip(self._info(host), (drawn.counts, drawn.numbers), strict=True):
                part.numpy()[:, :count] = values
        stream = current_stream(self.device)
        stream.wait_event(gpu.released)

        def queue() -> None:
            self._upload(gpu)
            self._queue(buffers, gpu, count)

        if len(disk):
            self._upload(gpu)
            self._launch_tiers(buffers, gpu, mirror, count, len(disk))
            buffers.compute(count)
            return
        gpu.work.run("rows" if count == self.batch_size else None, queue, stream)
        if not buffers.only_launches:
            buffers.compute(count)

    def _resolve_tiers(
        self, tier: TierRows, gpu: GpuSide, host: tuple[torch.Tensor, ...], drawn: SelectedRows
    ) -> Array:
        """Write the index entries of rows in memory, and read the others; return these, int64 [n].

        Raises:
            LostRowsError: trajectories cannot be read.
        """
        extent, ids = host[0].numpy()[3:].reshape(-1, 3), host[1].numpy()
        inside, outside = tier.resolve(drawn.slots, drawn.anchors, extent, ids)
        anchors, rows, places = host[-1].numpy()
        anchors[: len(inside)], rows[: len(inside)] = drawn.anchors[inside], inside
        places[: len(outside)] = outside
        if len(outside):
            assert gpu.tier is not None
            slots, steps, generations = (
                drawn.slots[outside],
                drawn.anchors[outside],
                drawn.generations[outside],
            )
            gpu.tier.read(tier, slots, steps, generations, gpu.tier.room(len(outside)))
        return outside

    def _launch_tiers(
        self, buffers: Buffers, gpu: GpuSide, mirror: tuple[torch.Tensor, ...], count: int, outside: int
    ) -> None:
        """Gather the rows in memory, and place the `outside` others out of pinned memory."""
        from gear_loader.kernels import place

        assert gpu.tier is not None
        anchors, rows, places = mirror[-1]
        inside = count - outside
        if inside:
            self._launch(buffers, mirror, inside, anchors[:inside], rows[:inside])
        place.place(gpu.tier.place, gpu.tier.memory, places[:outside], programs=self.programs)

    def _launch(
        self,
        buffers: Buffers,
        mirror: tuple[torch.Tensor, ...],
        count: int,
        anchors: torch.Tensor | None = None,
        rows: torch.Tensor | None = None,
    ) -> None:
        """Gather `count` rows with the extents and block ids in `mirror`.

        Args:
            anchors: int64 [count] on the device; by default those of the batch.
            rows: int64 [count] on the device, rows of the batch; by default the first ones.
        """
        from gear_loader.kernels import gather, split

        gather.gather(
            buffers.plan,
            self._numbers[:count],
            mirror[0][1, :count] if anchors is None else anchors,
            mirror[0][3:].view(-1, 3),
            mirror[1].view(-1),
            rows=rows,
            programs=self.programs,
        )
        if buffers.plans.split is not None:
            split.split(buffers.plans.split, count, rows=rows, programs=self.programs)
        if buffers.plans.once is not None:
            self._gather_once(buffers.plans.once, mirror[1], count, rows)

    def _gather_once(
        self, plan: GatherPlan, block_ids: torch.Tensor, count: int, rows: torch.Tensor | None = None
    ) -> None:
        """Gather the columns per trajectory of `count` rows, whose first blocks are the last column of `block_ids`.

        Args:
            plan: of these columns. block_ids: int32 [n, K] on the device. rows: as for `gather`.
        """
        from gear_loader.kernels import gather

        # Every trajectory has one step here, whose block is the last of its row in `block_ids`.
        gather.gather(
            plan,
            self._numbers[:count],
            self._numbers[:count],
            self._once_extent(block_ids.shape[1]),
            block_ids.view(-1),
            rows=rows,
            programs=self.programs,
        )

    def _once_extent(self, width: int) -> torch.Tensor:
        """Extents, int64 [B, 3], of trajectories of one step in the last of `width` blocks a row."""
        if width not in self._once_extents:
            extent = torch.zeros(self.batch_size, 3, dtype=torch.int64, device="cpu")
            extent[:, 0] = 1
            extent[:, 1] = torch.arange(self.batch_size, device="cpu") * width + width - 1
            with outside_inference():
                self._once_extents[width] = extent.to(self.device)  # which waits, see `_numbers`
        return self._once_extents[width]


def resolve(
    table: Table, slots: Array, anchors: Array, reach: Reach | tuple[int, int], extent: Array, ids: Array
) -> None:
    """Copy the index entries of a batch's windows.

    Args:
        table: table of the rows.
        slots, anchors: int64 [B].
        reach: `Reach` of the windows.
        extent: int64 [B, 3], filled with lengths in steps, the positions in `ids` where the trajectories' block tables
            would start (may be negative, because `ids` holds the blocks of the windows only), and final steps (0 or 1).
        ids: int32 [B, K], filled with the windows' blocks; with ``reach.once`` the last of K is the trajectory's first.
    """
    lengths, block_ids = table._engine.reader().index_arrays()
    block_steps = table._engine.region.layout.block_steps
    num_blocks = table._engine.region.layout.num_blocks
    first, last, once = Reach(*reach)
    bad = gathering.resolve(
        slots, anchors, lengths, block_ids, block_steps, first, last, extent, ids, num_blocks, once
    )
    table._engine.reader().check_gathered(bad)


def _named(counts: torch.Tensor, numbers: torch.Tensor) -> dict[str, torch.Tensor]:
    """``sample_info`` of counts, int64 [2, B], and numbers, float32 [2, B]."""
    return {**dict(zip(COUNTS, counts, strict=True)), **dict(zip(NUMBERS, numbers, strict=True))}


def clone_batch(batch: Batch) -> Batch:
    """A copy of a batch in new memory; aliased tensors stay aliased. Does not wait for a GPU."""
    clones: dict[int, torch.Tensor] = {}

    def clone(value: Any) -> Any:
        if isinstance(value, dict):
            return {key: clone(part) for key, part in value.items()}
        if not isinstance(value, torch.Tensor):  # `max_seqlen`
            return value
        if id(value) not in clones:
            clones[id(value)] = value.clone()
        return clones[id(value)]

    return Batch({key: clone(value) for key, value in batch.items()})


def copy_batch(target: dict[str, Any], source: dict[str, Any]) -> None:
    """Copy all tensors of a batch. Does not wait for a GPU."""
    for key, value in source.items():
        if isinstance(value, dict):
            copy_batch(target[key], value)
        else:
            target[key].copy_(value, non_blocking=True)
