"""`ReplayDataset`: batches from a table as a PyTorch `IterableDataset`."""

from __future__ import annotations

import collections
import dataclasses
import inspect
import math
import os
import queue
import weakref
from collections.abc import Callable, Generator, Iterator, Mapping, Sequence
from typing import Any, Literal, NoReturn

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from gear_loader.collection.batches import Batch, loader_error, refuse
from gear_loader.collection.buffer_pools import BufferPools
from gear_loader.collection.collector import Collector, collector_for
from gear_loader.collection.n_step import NStep
from gear_loader.collection.output import as_jagged, as_nested, as_padded, as_tensordict, check_nesting
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.collection.windows import (
    Whole,
    expand,
    has_whole,
    is_late,
    reads,
    single_steps,
    steps_only,
    windows_of,
)
from gear_loader.dataset.batch_filler import Filler
from gear_loader.dataset.epoch_draws import EpochDraws, planned_batches
from gear_loader.dataset.options import Draws, Gpu, Prefetch, Ranks, check_options
from gear_loader.dataset.origin import HasOrigin, Origin, origin_of
from gear_loader.dataset.position import Position
from gear_loader.dataset.prepared import dealer, prepared_error
from gear_loader.dataset.table_options import check_final, check_groups, check_ragged, step_budget_of
from gear_loader.dataset.transforming import Moment, Transforms
from gear_loader.errors import SchemaError
from gear_loader.selection.base import Selection, SelectionContext
from gear_loader.selection.budget_planner import BudgetPlanner, PlannedBatch
from gear_loader.selection.complete import CompleteAnchors
from gear_loader.selection.epochs import notice_short_epoch, notice_uneven_lengths
from gear_loader.selection.grouping import Groups
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.samplers import SAMPLE_EPOCH, Draw, Sampler, Uniform
from gear_loader.selection.step_budget import BudgetProgress, StepBudget, Steps, checked_positions
from gear_loader.storage.priority_updates import is_strict
from gear_loader.storage.schema import Window, as_mapping
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.background import closed_at_end
from gear_loader.utils.captures import beside_captures, refuse_capture
from gear_loader.utils.checks import at_least, one_of
from gear_loader.utils.device_option import device_of
from gear_loader.utils.forks import keep_for_ever

_DRAWS, _RANKS = Draws(), Ranks()
_ALL_DRAWS = 1 << 30  # history of a selection that is told which draws to forget


class ReplayDataset(IterableDataset[Batch]):
    """Draws batches of windows from a table, also while it is written; a PyTorch `IterableDataset`.

    Iterate it directly or through ``DataLoader(dataset, batch_size=None)``; or call `sample`. A batch is a dict:

    ============== ==================================================================================
    column         ``[B, L, *shape]`` in the column's dtype; steps that do not exist are zeros
    ``mask``       bool ``[B, L]``, True where the step exists; if `windows` is a mapping, a dict of them by its names;
                   with one window for columns with and without final steps, by column
    ``index``      int64 ``[B]``: the trajectory's index, as `Table.add` returned it
    ``anchor``     int64 ``[B]``: the step that the windows are relative to
    ``generation`` int64 ``[B]``: generation of the index, which changes when another trajectory reuses it
    ============== ==================================================================================

    Drawn over `Shards`, also ``shard``, int64 ``[B]``: the shard of the index. With a sampler that weighs, also
    ``priority_weight``, float32 ``[B]``; with `Draws.sample_info`, a dict ``sample_info`` of

    ================= ===============================================================================
    ``times_sampled`` int64 ``[B]``: draws of the trajectory so far, including this one
    ``age``           int64 ``[B]``: number of trajectories added after it
    ``age_seconds``   float32 ``[B]``: seconds since it was added
    ``probability``   float32 ``[B]``: probability with which the item was drawn
    ================= ===============================================================================

    **Validity of a batch:** a batch does not change as long as anything refers to it: its tensors, slices of them,
    numpy arrays over them, autograd. After that its memory is reused, when `Prefetch.keep` more batches have been
    requested from the same iterator or the next one (2 by default: the batch in use and one that a trainer fetched
    ahead). (On the CPU, tensors of up to 4 KiB and one dtype share an allocation of 4 KiB, which is kept as long as one
    of them.) A bare address (``data_ptr()``) is no reference. On a GPU a reference must also outlast the launch of the
    last kernel that reads the batch, as everywhere in PyTorch. ``Prefetch(copy=False)`` saves some microseconds a
    batch, because references are not counted: a batch is then valid until `keep` more have been requested, whatever
    refers to it, and must not be sent to another process. ``copy=True`` delivers each batch in new memory: on a GPU a
    copy that the GPU makes without the host waiting. `DataLoader` workers always do.

    **Order:** batch number and seed determine every draw, so `prefetch` and `num_workers` do not change the order.
    Rank r of w ranks gets the batches number r, r + w, r + 2 w, ...

    Over `Shards` every rank gets rows of each batch. If the last batch of a pass has fewer rows than there are ranks,
    some of its rows repeat on several ranks (`Draws.drop_last` skips that batch). An epoch ends when all ranks have
    collected their last batch. All ranks pass the same options.

    Workers and ranks take a snapshot of the table independently when they start an epoch. If the table is written at
    that moment, the snapshots may differ: then an epoch without replacement is not exact, and its length may differ
    between ranks. `batches_per_epoch` makes the length equal.

    Args:
        table: a `Table`, or `Shards`, the tables of all ranks as one. `DataLoader` workers attach to a table by name,
            so it needs one for them.
        batch_size: rows of a batch on each rank; or `Steps`, a limit on the steps of a batch (a token budget).
        windows: one `Window` for all columns, or a mapping of column name to window; columns without a window are not
            read. Use `Whole` in place of `Window` for whole trajectories.
        columns: with one window: the columns to read (all by default).
        sampler: by default `Uniform()`; if every window has one step and neither an anchor nor `groups` are given,
            ``Uniform(unit="step")``. With the default, the logger `gear_loader` says once if the shorter half of the
            trajectories, which gets half of the rows, has less than a quarter of the steps.
        groups: `Groups` of trajectories that are drawn together.
        draws: `Draws`: what is drawn and how it is counted.
        seed: seed of all draws.
        device: ``"auto"`` (the current GPU if there is one, else the CPU), a torch device, or a `Gpu` with the share of
            it that gathering takes.
        prefetch: batches prepared ahead: by a thread on the CPU, on a side stream on a GPU; 0 disables prefetching.
            Batches of at most 64 KiB that `Uniform` draws are prepared by the thread that asks. Or
            a `Prefetch`, which also says when memory is reused.
        batches_per_epoch: length of an epoch on each rank; by default that of one pass, ceil(items / batch_size) over
            all ranks: items are trajectories, or steps if the sampler has ``unit="step"``. The logger `gear_loader`
            says once if such an epoch reads a small part of the table. ``math.inf`` never ends.
        ranks: `Ranks`: how ranks share the batches.
        output: ``"dict"``; ``"nested"``, in which a dot in a name is a level of nesting, ``batch["obs"]["image"]`` of
            the column ``obs.image``; or ``"tensordict"`` for a ``tensordict.TensorDict`` of batch size [B], nested too,
            for which `DataLoader` needs ``collate_fn=dataset.collate``.
        layout: ``"padded"``: columns of steps are ``[B, L, *shape]``; with `Whole` L is that of the longest row of the
            batch, which is then copied from a packed one. ``"packed"``: rows one after another without padding, see
            below. ``"tree"``: the same, but steps that several rows of a batch begin with (`prefix` of `Table.add`) are
            in it once. ``"jagged"``: a packed batch as `torch.nested` tensors of layout `torch.jagged`, without a copy.
        transform: a function that takes a batch and returns it, or a sequence of them; `gear_loader.transforms` has
            some. See below.

    **Write-once columns** (`Column.late`): a dataset draws a trajectory only when the write-once columns that it reads
    are filled. If nothing can be drawn (nothing is filled, no group is complete, or everything is older than
    `max_lag`), a draw waits for the timeout of the table or of the Shards, then raises TableEmptyError. Over Shards
    each rank fills columns of its own table (`Table.fill`), and advances its version.

    **Packed batches** have no ``mask``, and

    ============== ==================================================================================
    column         ``[total, *shape]`` in the column's dtype: the steps of row 0, then those of row 1, ...
    ``cu_seqlens`` int32 ``[B + 1]``: first step of each row, and their total at the end
    ``max_seqlen`` int: steps of the longest row
    ``position``   int32 ``[total]``: number of the step in its trajectory
    ============== ==================================================================================

    and columns per trajectory, ``index``, ``anchor``, ``generation`` and the others by row. A row has the steps of
    its window that exist, with ``Whole(final=True)`` a final step (`Column.final`) too; the windows of all columns are
    the same. On a GPU the host draws them, also by priority, because it lists their pieces; it does not wait for the
    GPU, except that memory grows to the longest batch so far.

    With ``layout="tree"`` the segments of ``cu_seqlens``, int32 ``[B + S + 1]``, are the rows, without the steps that
    others of the batch begin with too, then these S shared pieces; a row may have no step left. ``parent``, int64
    ``[B]``, is the number of the segment that a row begins with, or -1, and ``prefix_steps`` the steps of it. Columns
    per group have one value for each group of the batch, and ``group``, int64 ``[B]``, is its number. A GPU gets copies
    of what the CPU gathers.

    **Transforms** are called with each batch when it is delivered, by the thread that asks for it, on the batch's
    device and, on a GPU, on the current stream; in a `DataLoader` worker by the worker. They get a `Batch` as described
    here, before `output` and ``"jagged"`` change its form, and may change its tensors in place. A transform that takes
    its random numbers from an argument `generator` gives the same results after resuming, on any device.

    **Forked children:** an iterator belongs to the process that made it and raises `GearError` in a forked child.
    `sample` and new iterators work there. Two cases raise `GearError`: `Shards`, and priorities that the parent was
    changing during the fork. Spawned processes get their own dataset.

    On a GPU the host does not wait from the draw to the batch; the consumer's stream waits for the side stream by an
    event. If the GPU fails during a gather, the next batch raises GpuError, and its read tickets and buffers stay
    reserved until the process ends. Other threads and streams may capture CUDA graphs at any time; a batch or an update
    asked for while the current stream captures is a GpuError, and nothing is changed.

    **Other loaders:** torchdata's `StatefulDataLoader` and Lightning's Fabric work as `DataLoader` does. On several
    ranks `accelerate.Accelerator.prepare` deals the batches of rank 0 to all: give the dataset
    ``ranks=gear.Ranks(rank=0, world_size=1)``; otherwise, for Shards and for packed batches, the loader stays out of
    `prepare`. A use
    that would deliver other rows raises SchemaError.

    Raises:
        SchemaError: options that are invalid for this table.
    """

    _memory: Any = (
        False  # what allocates batches in memory that another process maps; see `TensorMemory.shared`
    )

    def __init__(
        self,
        table: Table | HasOrigin,
        *,
        batch_size: int | Steps,
        windows: Window | Whole | Mapping[str, Any],
        columns: Sequence[str] | None = None,
        sampler: Sampler | None = None,
        groups: Groups | None = None,
        draws: Draws = _DRAWS,
        seed: int = 0,
        device: str | torch.device | Gpu = "auto",
        prefetch: int | Prefetch = 2,
        batches_per_epoch: float | None = None,
        ranks: Ranks = _RANKS,
        output: Literal["dict", "nested", "tensordict"] = "dict",
        layout: Literal["padded", "packed", "jagged", "tree"] = "padded",
        transform: Any = None,
    ) -> None:
        if (kind := getattr(table, "dataset_class", None)) is not None and type(self) is ReplayDataset:
            self.__class__ = kind()  # of tables of servers: batches come from there
        self._given: dict[str, Any] = {
            "batch_size": batch_size,
            "windows": windows,
            "columns": columns,
            "sampler": sampler,
            "groups": groups,
            "draws": draws,
            "seed": seed,
            "device": device,
            "prefetch": prefetch,
            "batches_per_epoch": batches_per_epoch,
            "ranks": ranks,
            "output": output,
            "layout": layout,
            "transform": transform,
        }
        self.check_options(**self._given)
        self._origin: Origin = origin_of(table, ranks)
        self.table: Table = self._origin.table
        table = self.table
        budget = batch_size if isinstance(batch_size, Steps) else None
        self.batch_size = 0 if isinstance(batch_size, Steps) else int(batch_size)
        self.windows = windows_of(table.schema, windows, columns)
        self.mask_names: tuple[str, ...] | None = None
        if isinstance(windows, Mapping):
            steps = steps_only(table.schema, self.windows).items()
            self.mask_names = tuple(name for name, window in steps if not isinstance(window, NStep))
        self.output: Literal["dict", "nested", "tensordict"] = output
        if output != "dict":
            check_nesting(self.windows, output)
        # Whether nothing tells if trajectories or steps are to be equally likely.
        self._by_default = sampler is None and draws.anchor == "uniform" and groups is None
        self._by_default &= not has_whole(self.windows)
        by_step = self._by_default and single_steps(table.schema, self.windows)
        if sampler is None:
            sampler = Uniform(unit="step" if by_step or draws.stride is not None else "trajectory")
        self.sampler: Sampler = sampler
        self.complete: CompleteAnchors | None = None
        if draws.complete or draws.stride is not None:
            self.complete = CompleteAnchors.of(
                table.schema, self.windows, complete=draws.complete, stride=draws.stride or 1
            )
        self._drawn: dict[str, Any] = {"complete": draws.complete} if draws.complete else {}
        self._drawn |= {} if draws.stride is None else {"stride": int(draws.stride)}
        whole = has_whole(self.windows)
        self.anchor: Literal["uniform", "first", "last"] = "first" if whole else draws.anchor
        self.seed = int(seed)
        gpu = device if isinstance(device, Gpu) else Gpu(device)
        self.device = device_of(gpu.device)
        self.programs = None if gpu.programs is None else int(gpu.programs)
        self.stream_priority, self.decode = int(gpu.stream_priority), bool(gpu.decode)
        ahead = prefetch if isinstance(prefetch, Prefetch) else Prefetch(prefetch)
        self.prefetch, self.keep, self.copy = int(ahead.batches), int(ahead.keep), ahead.copy
        self._max_ahead = int(ahead.max_bytes)
        self.layout: Literal["padded", "packed", "jagged", "tree"] = layout
        check_ragged(table, self)
        self._packs = whole or layout != "padded"  # rows are gathered one after another
        self._late = table.schema.late_bits(self._sources())
        self._origin.check(
            sampler=self.sampler,
            packed=self._packs,
            layout=layout,
            steps=budget,
            sample_info=draws.sample_info,
        )
        check_groups(groups, table, is_global=self._is_global, batch_size=self.batch_size)
        self.groups = groups
        if groups is not None and groups.varies is not None:
            self._late |= table.schema.late_bits([groups.varies])
        self._budget: StepBudget | None = None
        if self._packs:
            check_final(self.windows, shards=self.shards, device=self.device)
            self._budget = step_budget_of(table, self.windows, budget, draws.drop_last)
        self._progress, self._sample_progress = BudgetProgress(self.keep), BudgetProgress(0)
        self._sample_progress.counts = self._progress.counts
        self._planner: BudgetPlanner | None = None  # of `sample` with `Steps`
        endless = batches_per_epoch is None or batches_per_epoch == math.inf
        self.batches_per_epoch = batches_per_epoch if endless else int(batches_per_epoch or 0)
        self.drop_last, self.subset = draws.drop_last, draws.subset
        self.sample_info, self.rate_limited = draws.sample_info, draws.rate_limited
        self._transforms = Transforms(transform, self.windows, history=self.keep + 2)
        self._check_rate(self._num_drawn)
        self._origin.open(self, self._options())
        self._position = Position()
        self._buffers = BufferPools()
        self._sample_epoch = SAMPLE_EPOCH  # number of the epoch of `sample`
        self._noticed_epoch = False
        self._dispatched = False  # whether accelerate deals this rank's batches to all ranks
        self._selection: Selection | None = None
        self._selected_for: tuple[Any, ...] = ()  # options of `_selection`
        _datasets.add(self)

    @classmethod
    def check_options(cls, **options: Any) -> None:
        """Validate the constructor's options without a table. Does not use CUDA.

        Args:
            options: options of the constructor except `table`; omitted ones have their defaults.

        Raises:
            TypeError: an unknown option, or `windows` is missing.
            SchemaError: a value that is invalid with any table.
        """
        try:
            given = inspect.signature(cls).bind(None, **options)
        except TypeError as error:
            raise TypeError(f"Options of {cls.__name__}: {error}.") from None
        given.apply_defaults()
        check_options(**given.arguments)

    def _sources(self) -> set[str]:
        """Columns that are read."""
        return {source for source, _ in reads(self.table.schema, self.windows)}

    def _items_of(self, rows: int) -> int:
        """Items of so many rows: groups, or rows."""
        return rows if self.groups is None else rows // self.groups.size

    @property
    def _num_drawn(self) -> int:
        """Rows of a draw."""
        if self._budget is None:
            return self.batch_size
        size = 1 if self.groups is None else self.groups.size
        return size * BudgetPlanner.draw_size(self.sampler, self.groups)

    @property
    def shards(self) -> Any:
        """The `Shards` that it draws from; None for a table."""
        return self._origin.shards

    def _options(self) -> dict[str, Any]:
        """Options that must be equal on all ranks; windows within a pipeline stage."""
        subset = self.subset
        return {
            **self._config(),
            "batch_size": self.batch_size,
            "batches_per_epoch": self.batches_per_epoch,
            "prefetch": self.prefetch,
            "keep": self.keep,
            "scope": self._origin.ranks.scope,
            "prefer_local": self._origin.ranks.prefer_local,
            "subset": None if subset is None else getattr(subset, "__qualname__", type(subset).__qualname__),
            "windows": {name: repr(window) for name, window in self.windows.items()},
            "layout": self.layout,
        }

    def __repr__(self) -> str:
        if not hasattr(self, "_buffers"):
            return "<ReplayDataset, not opened>"
        epoch, before, step = self._position.current
        length = "" if self.batches_per_epoch is None else f" of {self.batches_per_epoch:,}"
        windows = ", ".join(f"{name}: {window!r}" for name, window in self.windows.items())
        size = f"{self.batch_size:,} rows"
        if self._budget is not None:
            size = f"at most {self._budget.max_steps:,} steps"
        return (
            f"<{type(self).__name__} of {self._origin.given!r}\n"
            f"  batches of {size} on {self.device}, drawn by {self.sampler!r}, seed {self.seed}\n"
            f"  windows {windows}\n"
            f"  epoch {epoch}, {before + step:,}{length} batches delivered>"
        )

    @property
    def _is_global(self) -> bool:
        """Whether batches are drawn over all shards."""
        return self._origin.is_global

    def _global_size(self, size: int) -> int:
        """Rows of all slices of a batch with `size` rows on this rank."""
        return size * self._origin.slices

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        """Batches of an epoch on this rank, for the trajectories that are in the table now.

        Without `batches_per_epoch` it waits, as the first batch does, until the table holds its rate limiter's
        `min_size` trajectories; and over all `Shards` every rank calls it at the same time.

        Raises:
            TypeError: the dataset is endless, or has `Steps` without batches_per_epoch: the number then depends on
                the draws.
            TableEmptyError: there is nothing to draw from.
            RateLimitError: timed out waiting for the rate limiter.
            SchemaError: `accelerate` would deal other rows than the dataset's batches.
        """
        if error := self.prepared_error():
            raise SchemaError(error)
        if self.batches_per_epoch is None:
            if self._budget is not None:
                raise TypeError(
                    "This ReplayDataset has no length: with batch_size=Steps(...) it depends on what is drawn. Give "
                    "batches_per_epoch."
                )
            self._await_first()
        draws = self._epoch_draws()
        fixed = self.batches_per_epoch is not None
        count = draws.num_batches(None if fixed else self._selected().last_look())
        if count == math.inf:
            raise TypeError("This ReplayDataset has no length: batches_per_epoch is math.inf.")
        return int(count)

    def __getitem__(self, index: Any) -> NoReturn:
        """Batches have no numbers to be asked by, so `random_split` and `Subset` of PyTorch do not go with a dataset.

        Raises:
            SchemaError: always; the message says how to split.
        """
        raise SchemaError(
            f"Item {shown(index)} of a {type(self).__name__} was asked for, as by torch.utils.data.random_split or "
            "Subset; expected iteration or sample(): it draws whole batches. To split the data, make two datasets with "
            "subset=, a function of the trajectories' sequence numbers, such as lambda n: n % 10 > 0 and "
            "lambda n: n % 10 == 0; or use ReplayDataModule(val_fraction=...)."
        )

    def _await_first(self) -> None:
        """Wait until the rate limiter permits the first batch; later calls return at once."""
        limiter = self.table.rules.rate_limiter
        if self.rate_limited and limiter is not None and len(self.table) < limiter.min_size:
            self.table._engine.reader().await_samplable(self._num_drawn)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self.check_worker(number, info is not None)
        error = self.prepared_error() or loader_error(self, tensordicts=self.output == "tensordict")
        if error is not None:
            return refuse(error)
        self._position.current = self._position.next()
        return closed_at_end(self._iterate(number, workers, in_worker=info is not None))

    def _iterate(self, number: int, workers: int, *, in_worker: bool) -> Generator[Batch]:
        # A generator: an iterator dropped before its first request does not use up an epoch.
        refuse_capture(self.device, "a batch")
        position = self._position
        epoch, before, step = position.begin(self.table._engine.region.lock.run)
        prefetch = 0 if in_worker else self.prefetch

        def consumer() -> None:
            """Lives as long as this generator, however that ends."""

        prefetcher = self._buffers.open(
            self.batch_size,
            self._collector,
            prefetch=prefetch,
            consumer=consumer,
            **self._buffering(in_worker),
        )
        first = before + number + workers * step
        planned: collections.deque[PlannedBatch] = collections.deque()  # not yet delivered
        filler = self.filler(prefetcher)
        at = first  # number of the batch on this rank
        if self._budget is None:
            alone = prefetcher.collector.is_quick(self.batch_size) and self._selected().is_quick
            draws = self._draws(epoch, first, workers)
            batches = prefetcher.batches(filler.fill, draws, filler.queue, alone=alone, several=filler)
        else:
            plans = self._plans(self._budget, epoch, first, workers, planned)
            batches = prefetcher.batches(filler.fill_planned, plans)
        try:
            try:
                for batch in batches:
                    done = planned.popleft() if planned else None
                    if done is not None and not done.counts.batches:
                        continue  # its trajectories were lost, and the stream has ended
                    step += 1
                    if done is not None:  # first: it keeps the states before too, for the position
                        self._progress.delivered(epoch, done.state, done.counts, self._selected())
                    position.delivered(epoch, before, step)
                    yield self._shown(batch, epoch, at, prefetcher)
                    at += workers
                if not in_worker:
                    # A worker keeps its end position, so that it ends again if resumed while others have batches left.
                    position.end(epoch)
            finally:
                self._buffers.close(prefetcher)
        finally:
            if not prefetcher.closed:  # an exception arrived before the call above
                self._buffers.close(prefetcher)

    def _draws(self, epoch: int, number: int, every: int) -> Iterator[tuple[Draw, Any]]:
        """Yield the draws of this rank's batches `number`, number + every, ... of an epoch, with the items to draw
        from, or None for the items present at the draw."""
        if self.rate_limited and self.table.rules.rate_limiter is not None:
            self.table._engine.reader().await_samplable(self._num_drawn)  # the table may be empty until then
        draws = self._epoch_draws()

        def look() -> tuple[Any, float]:
            view = self._selected().await_items()
            return view, draws.num_batches(view)

        view, count = self._origin.begin_epoch(self._selected(), look, fresh=number == 0)
        if draws.rank == number == 0 and (epoch == 0 or get_worker_info() is None):
            self.table._engine.notice_waste()
            self._noticed_epoch = self._noticed_epoch or self._notice_epoch(view)
            self._notice_uneven(view)
        yield from draws.draws(
            view, epoch=epoch, past=self._position.past, number=number, every=every, count=count
        )
        self._origin.end_epoch()

    def _plans(
        self,
        budget: StepBudget,
        epoch: int,
        number: int,
        every: int,
        planned: collections.deque[PlannedBatch],
    ) -> Iterator[PlannedBatch]:
        """Yield this rank's batches `number`, number + every, ... of an epoch, planned by their steps.

        Batches of others are planned too, because the rows of each depend on those before it.
        """
        rank, world = self._rank()
        self._check_sharing(every)
        if self.rate_limited and self.table.rules.rate_limiter is not None:
            self.table._engine.reader().await_samplable(self._num_drawn)
        selection = self._selected()
        most = math.inf if self.batches_per_epoch is None else self.batches_per_epoch
        view, most = self._origin.begin_epoch(
            selection, lambda: (selection.await_items(), most), fresh=number == 0
        )
        planner = self._origin.planner(
            selection,
            budget,
            seed=self._draw_seed(),
            epoch=epoch,
            past=self._position.past,
            endless=self.batches_per_epoch is not None,
            view=view,
            state=self._progress.start(epoch, number * world + rank),
        )
        yield from planned_batches(
            planner, planned, number=number, every=every, count=most, rank=rank, world=world
        )
        self._origin.end_epoch()

    def _epoch_draws(self) -> EpochDraws:
        rank, world = self._rank()
        return EpochDraws(
            self._selected,
            self.sampler,
            seed=self._draw_seed(),
            size=self._items_of(self._global_size(self.batch_size)),
            batch_size=self.batch_size,
            drop_last=self.drop_last,
            batches_per_epoch=self.batches_per_epoch,
            rank=rank,
            world=world,
        )

    def filler(self, prefetcher: Prefetcher) -> Filler:
        """What draws and gathers batches into buffers of a prefetcher's collector."""
        return Filler(self.table, self._selected, prefetcher)

    def _check_sharing(self, workers: int) -> None:
        """Raise SchemaError if workers or ranks cannot share the batches of one stream of draws."""
        if workers > 1 and self.rate_limited and self.table.rules.rate_limiter is not None:
            raise SchemaError(
                f"batch_size=Steps(...) was given with {workers} DataLoader workers and a table with a rate limiter, "
                "for which the draws of all workers would count. Use num_workers=0, or Draws(rate_limited=False)."
            )
        self._origin.check_sharing(
            fixed=self.batches_per_epoch is not None, by_priority=self.sampler.by_priority
        )

    def _draw_seed(self) -> int:
        """The seed of the draws; differs between shards with local scope."""
        return self._origin.seed(self.seed)

    def sample(self, batch_size: int | None = None) -> Batch:
        """Draw one batch, without prefetching. Does not wait for the GPU. Calls of several threads take turns.

        Without replacement, calls follow a permutation of the items, one pass after another; the last batch of a pass
        may be smaller. A pass is exact while the table does not change. With max_steps, calls are one endless stream of
        batches, apart from the iteration's: each begins with the drawn trajectories that the ones before had no room
        for. A pass is then over the items at its start.

        Args:
            batch_size: rows; by default the dataset's. Changing it allocates new buffers. Not with `Steps`.

        Returns:
            A batch that does not change while anything refers to it; with ``copy=False``, until `sample` has been
            called `keep` more times.

        Raises:
            TableEmptyError: there is nothing to draw from.
            SchemaError: batch_size was given to a dataset with `Steps`, or such a dataset draws over all Shards or
                has several ranks.
        """
        with self._buffers.turn:
            if self._budget is not None:
                return self._sample_steps(self._budget, batch_size)
            size = self._size_of_sample(batch_size)
            self._check_rate(size)
            prefetcher, item = self._single(size), self._sample_draw(size)
            filler = Filler(self.table, self._selected, prefetcher)
            batch = prefetcher.one(filler.fill, item, filler.queue)
            draw = item[0]
            self._position.sampled(draw.count)
            shown: Batch = self._shown(batch, draw.epoch, self._position.samples - 1, prefetcher)
            return shown

    def _size_of_sample(self, batch_size: int | None) -> int:
        """Rows of a batch of `sample`. Raises SchemaError for a number that there cannot be."""
        size = self.batch_size if batch_size is None else at_least("batch_size", batch_size)
        if self.groups is not None and size % self.groups.size:
            raise SchemaError(f"batch_size is {size}; expected a multiple of group_size={self.groups.size}.")
        return size

    def _sample_draw(self, size: int) -> tuple[Draw, Any]:
        """The next draw of `sample`, and the items to draw from, or None for those present at the draw."""
        origin, samples = self._origin, self._position.samples
        rank, world = origin.rank()
        epoch, turn, first, count, view = self._sample_epoch, 0, 0, size * origin.slices, None
        if self.groups is not None:
            count = self._items_of(count)
        if self.sampler.passes:
            view = self._selected().await_items()
            items = self.sampler.num_items(view)
            turn, first = divmod(self._position.sampled_items, max(items, 1))
            epoch, count = epoch + 1 + rank, min(count, items - first)
        if self._by_default and samples & (samples - 1) == 0:  # the table may grow
            self._notice_uneven()
        return Draw(origin.seed(self.seed), epoch, samples * world + rank, first, count, turn, samples), view

    def sample_by(self, fill: Callable[[Any, tuple[Draw, Any]], int], buffers: Any, size: int) -> int:
        """`sample` of a `Mixture`, by `fill` of a `filler`; return the number of rows."""
        self._check_rate(size)
        if self.sampler.by_priority:
            self._buffers.settle()
        item = self._sample_draw(size)
        count = fill(buffers, item)
        self._position.sampled(item[0].count)
        return count

    def _single(self, size: int) -> Prefetcher:
        """The prefetcher of single batches of `size` rows, after the updates of priorities that precede the next."""
        buffers = self._buffers
        sampler = buffers.sampler  # once: a signal handler may change it
        if buffers.active is None and sampler is not None and sampler[0] == size:
            return sampler[1]  # which refuses captures itself
        refuse_capture(self.device, "a batch")
        prefetcher = buffers.single(size, self.batch_size, self._collector, **self._buffering(False))
        if self._is_global and self._buffers.active is not None:
            raise SchemaError(
                "sample() was called during an iteration; over Shards all ranks must draw in the same order, so end "
                "the iteration first, or make a second ReplayDataset."
            )
        if self.sampler.by_priority:
            self._buffers.settle()  # they may be queued behind prefetched batches
        return prefetcher

    def _sample_steps(self, budget: StepBudget, batch_size: int | None) -> Batch:
        """`sample` with `Steps`."""
        world = self._rank()[1]
        if batch_size is not None or self._is_global or world > 1:
            raise SchemaError(
                f"sample(batch_size={batch_size}) was called on a dataset with batch_size=Steps(...), on {world} ranks"
                f"{', over all Shards' if self._is_global else ''}; expected no batch_size, one rank, and a Table or "
                "Shards with scope='local'. Iterate over the dataset otherwise."
            )
        self._check_rate(self._num_drawn)
        refuse_capture(self.device, "a batch")
        prefetcher = self._single(self.batch_size)
        selection = self._selected()
        planner = self._planner
        if planner is None or not planner.plans_for(selection):
            view = selection.await_items()
            state = self._sample_progress.start(SAMPLE_EPOCH, self._position.samples)
            planner = BudgetPlanner(
                selection,
                budget,
                seed=self._draw_seed(),
                epoch=SAMPLE_EPOCH,
                past=0,
                endless=True,
                view=view,
                state=state,
            )
        self._planner = None  # after an error the next call goes on from the last delivered batch
        plan: PlannedBatch | None = None
        try:
            plan = planner.next()
            assert plan is not None, "an endless stream has ended"
            batch = prefetcher.one(self.filler(prefetcher).fill_planned, plan)
        finally:
            if plan is not None:
                plan.end()
        self._planner = planner
        self._sample_progress.delivered(SAMPLE_EPOCH, plan.state, plan.counts, None)
        self._position.sampled(0)
        shown: Batch = self._shown(batch, SAMPLE_EPOCH, self._position.samples - 1, prefetcher)
        return shown

    def seek_sample(self, number: int, items: int, *, stream: int = 0) -> None:
        """Make the next call of `sample` number `number`, after `items` drawn items of passes.

        Args:
            stream: of random numbers, for this call and those after it.
        """
        self._position.samples, self._position.sampled_items = number, items
        self._sample_epoch = SAMPLE_EPOCH + (stream << 32)

    @property
    def draws_by_priority(self) -> bool:
        """Whether the sampler draws by priority, so that `update_priority` can be called."""
        return self.sampler.by_priority

    @staticmethod
    def collate(batch: Any) -> Any:
        """Return a batch as it is: the `collate_fn` of a `DataLoader`, whose own cannot handle TensorDicts."""
        return batch

    def prepared_error(self) -> str | None:
        """The error of a loader of accelerate that calls this and would deal other rows than the batches, or None."""
        joins = self.shards is None and self.layout == "padded"
        return prepared_error(dealer(), world_size=self._rank()[1], joins=joins)

    def _check_rate(self, size: int) -> None:
        limiter = self.table.rules.rate_limiter
        if limiter is not None and self.rate_limited:
            limiter.check_batch(size)

    def _shown(self, batch: Batch, epoch: int, number: int, prefetcher: Prefetcher) -> Any:
        """The batch that a prefetcher has just delivered, transformed, in the form of `output` and `layout`.

        Args:
            number: of the batch, on this rank.
        """
        if self._packs and self.layout == "padded":
            batch = as_padded(batch, list(steps_only(self.table.schema, self.windows)))
        if self.mask_names is not None:
            batch = self.named(batch)
        if self._transforms.calls:
            rank, world = self._rank()
            batch = self._transforms(
                batch,
                seed=self._draw_seed(),
                slice_number=self._origin.number,
                epoch=epoch,
                number=number * world + rank,
                names=prefetcher.names,
            )
            self._transforms.record(lambda: self._moment)
        if self.layout == "jagged":
            batch = as_jagged(batch, steps_only(self.table.schema, self.windows))
        if self.output == "nested":
            return as_nested(batch)
        if self.layout == "jagged":
            return batch
        return batch if self.output == "dict" else as_tensordict(batch)

    def named(self, batch: Batch) -> Batch:
        """A batch, whose mask is a dict by the names of windows where they were given as a mapping."""
        if self.mask_names is not None and isinstance(mask := batch.get("mask"), torch.Tensor):
            batch["mask"] = dict.fromkeys(self.mask_names, mask)
        return batch

    @property
    def _moment(self) -> Moment:
        epoch, before, step = self._position.current
        return Moment(epoch, before + step, self._position.samples)

    # ---------------------------------------------------------------- selection

    def _selected(self) -> Selection:
        """The selection of this process; made if the options have changed.

        Raises:
            GearError: the dataset draws over shards, and the process was forked.
        """
        self._origin.check_process()
        options = (
            self.table,
            self.sampler,
            self.anchor,
            self.subset,
            self.rate_limited,
            self.sample_info,
            self.complete,
            self._late,
            self.groups,
        )
        if self._selection is None or options != self._selected_for:
            self._selected_for = options
            for table in self._origin.tables:
                if table._engine.moves:
                    table._engine.prefer_in_memory(self.sampler.keeps)
            self._selection = self._origin.selection(
                SelectionContext(*options),
                # A state may precede the prefetched batches and one that a trainer fetched ahead.
                history=_ALL_DRAWS if self._budget is not None else self.prefetch + self.keep + 2,
                # The host draws packed batches, whose blocks it lists, and rows of which it looks for steps.
                device=torch.device("cpu")
                if self._packs or is_late(self.table.schema, self.windows)
                else self.device,
                windows=expand(self.table.schema, self.windows)[0],
                steps=self._budget,
                packed=self._packs,
                tree=self.layout == "tree",
            )
        return self._selection

    # ---------------------------------------------------------------- priorities

    def update_priority(
        self,
        index: Batch | torch.Tensor | Array | Sequence[int],
        priority: torch.Tensor | Array | Sequence[float],
        *,
        generation: torch.Tensor | Array | None = None,
        anchor: torch.Tensor | Array | None = None,
        shard: torch.Tensor | Array | None = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> None:
        """Set the priorities of trajectories, or of steps with ``unit="step"``, for example to their TD errors.

        ``dataset.update_priority(batch, td_error.abs())``, or with its parts
        ``dataset.update_priority(batch["index"], td_error.abs(), generation=batch["generation"])``.

        Args:
            index: int [n], indices of trajectories; or a whole batch, which also supplies generations, and with
                ``unit="step"`` anchors. Of duplicate items the last one counts.
            priority: numbers [n], finite as float32 and not negative; `Prioritized` raises them to its alpha.
            generation: int [n], ``batch["generation"]``; detects stale rows, whose index was reused.
            anchor: int [n], ``batch["anchor"]``, steps; with ``unit="step"`` only.
            shard: int [n], ``batch["shard"]``, shards of the rows, if batches are drawn over all `Shards`. Owners
                receive them with the next batch and use them from the second batch after that on.
            stale: how to treat rows of removed trajectories: ``"ignore"`` skips and counts them (`num_stale`),
                ``"error"`` changes nothing and raises.

        Priorities belong to the dataset; over `Shards`, to the datasets of all ranks. If items are trajectories, a
        table with ``on_full="evict_lowest_priority"`` uses them too. If several ranks draw from one named table, all
        its datasets in any process use them from their next draw on, as after `Table.update_priority`; batches then
        depend on when ranks call this (over `Shards` they do not), and the host draws.

        The update affects batches that are drawn later, not those already prefetched. If the GPU draws, CUDA tensors
        stay there and nothing waits; the GPU then detects an invalid value, ignores the update, and a later call raises
        the error. Otherwise tensors are copied to the host.

        Raises:
            PriorityError: a priority is NaN, infinite or negative; the message names the first. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory was removed. Nothing was changed.
            SchemaError: other shapes or dtypes, a sampler that does not draw by priority, or one of steps where
                several ranks draw from one named table, because the others would not learn of it: `Shards` do that.
                Nothing was changed.
        """
        selection = self._by_priority("update_priority")
        strict, is_global = is_strict(stale), self._is_global
        if self._origin.is_shared and isinstance(selection, PrioritizedSelection):
            self._share(selection)
        index = as_mapping(index)
        if isinstance(index, (dict, Mapping)):
            index, generation, anchor, shard = self._names(index, generation, anchor, shard)
        if shard is not None and not is_global:
            raise SchemaError(
                "shard was received, but this dataset draws from one table; leave it out. Nothing was changed."
            )
        if not strict and not is_global and selection.queue_update(index, priority, generation, anchor):
            return
        refuse_capture(self.device, "an update")
        names = {"generation": generation, "anchor": anchor} | ({"shard": shard} if is_global else {})
        with beside_captures(self.device):  # tensors may be copied to the host
            selection.update_priority(index, priority, **names, stale=stale, between=self._buffers.between)

    def set(
        self,
        batch: Batch,
        /,
        *,
        mask: Any = None,
        stale: Literal["ignore", "error"] = "ignore",
        **columns: Any,
    ) -> int:
        """Overwrite values of mutable columns, from the anchor of each row of a batch on; see `Table.set`.

        ``dataset.set(batch, mask=batch["mask"], state=states)``. Over `Shards` the rows are written to the tables of
        their owners before the call returns: directly on this machine, else by a request that is executed once. Other
        ranks need not call it. In a pipeline each rank writes columns of its own stage, of rows that it has drawn.

        Args:
            batch: of this dataset. mask: bool ``[n, L]``, steps to write; those outside of a trajectory must be left
                out. stale: as for `Table.set`.
            columns: ``[n, L, *shape]``, of the steps ``anchor`` to ``anchor + L - 1``; or ``[n, *shape]``.

        Returns:
            Number of rows that were skipped, because their trajectories were removed.

        Raises:
            As `Table.set`. Over `Shards`, of an error of one shard rows of others may have been written; and
            PeerTimeoutError, TransportError: another node did not answer.
        """
        strict = is_strict(stale)
        rows = as_mapping(batch)
        wanted = ["index", "anchor", "generation"] + (["shard"] if self._is_global else [])
        missing = [name for name in wanted if not isinstance(rows, Mapping) or name not in rows]
        if missing:
            raise SchemaError(
                f"{shown(batch)} was received, without {missing}; expected a batch of this dataset."
            )
        refuse_capture(self.device, "a change of values")
        with beside_captures(self.device):  # tensors may be copied to the host
            return self._origin.set(rows, mask, columns, strict=strict)

    def _share(self, selection: PrioritizedSelection) -> None:
        """Let the other ranks of the table learn of updates, or raise SchemaError if they cannot."""
        dispatched, ranks = self._dispatched, self._rank()[1]
        if self.sampler.unit == "step" and (ranks > 1 or dispatched):
            raise SchemaError(
                f"update_priority was called for single steps of table {self.table.name!r}, from which several ranks "
                "draw: priorities of steps are each rank's own, so the others would not learn of them. Give each "
                "rank a table of its own and draw from gear_loader.distributed.Shards; or draw trajectories "
                "(unit='trajectory'), whose priorities all ranks share. If this table is this rank's alone, pass "
                "rank=0, world_size=1. Nothing was changed."
            )
        if self.sampler.unit == "trajectory" and not selection.can_share:
            raise SchemaError(
                "update_priority was called on several ranks, but the dataset has drawn on its GPU before "
                "torch.distributed was initialised, and other ranks would not learn of it. Make it afterwards. "
                "Nothing was changed."
            )
        selection.priorities.shares = True

    def _names(self, batch: Batch, generation: Any, anchor: Any, shard: Any) -> tuple[Any, Any, Any, Any]:
        """index, generation, anchor and shard of a batch's rows."""
        steps, is_global = self.sampler.unit == "step", self._is_global
        if generation is anchor is shard is None:
            try:
                shard = batch["shard"] if is_global else None
                return batch["index"], batch["generation"], batch["anchor"] if steps else None, shard
            except KeyError:
                pass  # said below
        wanted = "index", "generation", *(("anchor",) if steps else ()), *(("shard",) if is_global else ())
        missing = [name for name in wanted if name not in batch]
        raise SchemaError(
            f"A mapping with the keys {list(batch)} was received as index"
            f"{f', in which {missing} is missing' if missing else ', together with generation or anchor'}; "
            "expected a whole batch alone, or batch['index'] with generation and anchor. Nothing was changed."
        )

    def rebalance(
        self,
        *,
        by: Literal["steps", "mass"] = "steps",
        max_bytes: int = 64 << 20,
        tolerance: float = 0.05,
    ) -> dict[str, Any]:
        """Migrate trajectories between the `Shards` until they are about equal. All ranks call it at the same point.

        The newest trajectories of the fullest shards are copied to the emptiest with free space, in all stages of a
        pipeline, and then removed from their source. They keep their ids, write-once columns and updated priorities;
        priority updates for earlier batches follow them. Trajectories that share steps with others are not migrated,
        nor is one of which a column is filled meanwhile. If a rank is killed meanwhile, a trajectory may be left in two
        shards; the next call, or the next dataset over these tables, removes the duplicate before it draws (the logger
        `gear_loader` reports the number). Eviction and other policies of a table treat migrated trajectories as new. A
        running pass without replacement replaces migrated items by others.

        Args:
            by: quantity to equalise: ``"steps"``, or ``"mass"``, the sum of priorities (the number of items if the
                sampler does not draw by priority).
            max_bytes: most bytes that this call migrates, over all shards; call it again for more. 0 only removes
                duplicates.
            tolerance: nothing moves if every shard is within this fraction of the mean.

        Returns:
            "moved": number of trajectories; "steps", "bytes": their steps and bytes; "before", "after": float64 [S],
            the shards' steps or masses; "leftovers": removed duplicates of an interrupted call. The same on every rank.

        Raises:
            SchemaError: invalid options, a dataset that does not draw over all Shards, one with a `subset`, which
                depends on each table's order of insertion.
            RankError: another rank has failed; nothing was lost.
        """
        one_of("by", by, ("steps", "mass"))
        max_bytes = at_least("max_bytes", max_bytes, least=0)
        if isinstance(tolerance, bool) or not isinstance(tolerance, (int, float)) or not 0 <= tolerance < 1:
            raise SchemaError(f"tolerance is {shown(tolerance)}; expected a number from 0 to below 1.")
        if not self._is_global or self.subset is not None:
            raise SchemaError(
                "rebalance was called, but this dataset has a subset, or does not draw over all Shards; make one with "
                "Shards, scope='global' and without a subset."
            )
        if self.shards is not None and (changing := self.shards.mutable):
            raise SchemaError(
                f"rebalance was called, and the tables have the columns {changing} with "
                "mutable=True; expected none: values that are overwritten meanwhile would be lost."
            )
        selection: Any = self._selected()
        answers: queue.SimpleQueue[dict[str, Any] | BaseException] = queue.SimpleQueue()

        def call() -> None:
            try:
                answers.put(selection.rebalance(by=by, max_bytes=max_bytes, tolerance=float(tolerance)))
            except BaseException as error:
                answers.put(error)

        self._buffers.between(call)
        answer = answers.get()  # all its waits have deadlines
        if isinstance(answer, BaseException):
            raise answer
        return answer

    def priority_quantiles(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the positive priorities, estimated from a sample if they are many. Waits for the GPU, if used.

        Args:
            shares: numbers [n] from 0 (the smallest) to 1 (the largest).

        Returns:
            n quantiles, NaN if no priority is positive.

        Raises:
            SchemaError: the sampler does not draw by priority, or a share is invalid.
        """
        selection = self._by_priority("priority_quantiles")
        values = np.asarray(shares, dtype=np.float64)
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise SchemaError(f"shares is {shown(shares)}; expected numbers from 0 to 1.")
        found: list[float] = selection.quantiles(values).tolist()
        return found

    @property
    def num_stale(self) -> int:
        """Number of stale rows that `update_priority` has skipped so far. Waits for the GPU, if used."""
        return int(self._by_priority("num_stale").num_stale)

    @property
    def num_lost(self) -> int:
        """Rows of `Shards` redrawn so far because their node did not answer (``on_failure="redraw"``)."""
        return sum(getattr(each.source, "num_lost", 0) for each in self._buffers.collectors)

    @property
    def num_gone(self) -> int:
        """Rows of `Shards` redrawn so far because they were evicted between draw and read."""
        return sum(getattr(each.source, "num_gone", 0) for each in self._buffers.collectors)

    def _by_priority(self, method: str) -> Any:
        selection = self._selected()
        if not self.sampler.by_priority:
            raise SchemaError(
                f"{method} was called, but {self.sampler!r} does not draw by priority; use gear_loader.Prioritized "
                "or gear_loader.TopK."
            )
        return selection

    # ---------------------------------------------------------------- sizes

    @property
    def batch_fill(self) -> float | None:
        """With max_steps: steps of the batches delivered by this process as a share of max_steps, from 0 to 1.

        None without max_steps, and before the first batch.
        """
        done = self._progress.counts
        return (
            None
            if self._budget is None or not done.batches
            else done.steps / done.batches / self._budget.max_steps
        )

    def stats(self) -> dict[str, float]:
        """Numbers of what can be drawn now from the tables of this process that the dataset draws from.

        Returns:
            ``"trajectories"`` that can be drawn; ``"too_short"``: those of the subset that never are, because they have
            no anchor with complete windows; ``"anchors"``: steps that can be drawn as anchors.
            With max_steps also, of the batches delivered by this process: ``"fill"``: `batch_fill`,
            or 0; ``"skipped"``: drawn trajectories left out by ``too_long="skip"``; ``"gone"``: those
            removed from the table between their draw and their batch.
            With write-once columns also ``"unfilled"``: trajectories of the subset that wait for one that is read. With
            groups also ``"groups_complete"``: groups that can be drawn; ``"groups_constant"``: those left out because
            of `group_varies`; ``"groups_incomplete"``: trajectories in no complete group; ``"groups_expired"``:
            trajectories that this process has removed by `group_max_age`.
        """
        context = self._selected().context
        counts = []
        unfilled = 0
        for table in (self._origin.tables if self._is_global else ()) or (self.table,):
            each = dataclasses.replace(context, table=table)
            slots = table._engine.reader().snapshot().slots
            if each.subset is not None:
                slots = slots[dataclasses.replace(each, complete=None, late=0).chosen(slots)]
            if each.late:
                filled = dataclasses.replace(each, complete=None, subset=None).chosen(slots)
                unfilled += int((~filled).sum())
                slots = slots[filled]
            counts.append(each.num_anchors(slots))
        anchors = np.concatenate(counts)
        found: dict[str, float] = {
            "trajectories": int((anchors > 0).sum()),
            "too_short": int((anchors <= 0).sum()),
            "anchors": int(anchors.sum()),
        }
        if self._budget is not None:
            done = self._progress.counts
            found["fill"] = self.batch_fill or 0.0
            found["skipped"], found["gone"] = done.skipped, done.gone
        if self._late:
            found["unfilled"] = unfilled
        selection = self._selected()
        if selection.former is not None:
            selection.look()
            found.update({f"groups_{name}": n for name, n in selection.former.counts.to_dict().items()})
        return found

    def _notice_epoch(self, view: Any) -> bool:
        """Log a notice if an epoch by default length reads a small part of the table; return whether it did."""
        if self.batches_per_epoch is not None or self._origin.number:
            return False
        return notice_short_epoch(
            self.sampler,
            batches=self._epoch_draws().pass_batches(view),
            batch_size=self._global_size(self.batch_size),
            trajectories=len(view),
            steps=view.num_steps,
            widest=max(each.length for each in expand(self.table.schema, self.windows)[0].values()),
        )

    def _notice_uneven(self, view: Any = None) -> None:
        """Log a notice, once, if trajectories of very uneven lengths are drawn by default, whatever their length."""
        if self._by_default and self.sampler.unit == "trajectory" and self.shards is None:
            view = self._selected().look() if view is None else view
            self._by_default = not notice_uneven_lengths(self.sampler, view.lengths)

    def _rank(self) -> tuple[int, int]:
        return self._origin.rank()

    # ---------------------------------------------------------------- workers

    def _buffering(self, in_worker: bool) -> dict[str, Any]:
        """Options of `Prefetcher`, from those of the dataset."""
        complete = self.sampler.by_priority or self._is_global
        shared = in_worker or self._memory
        return {"keep": self.keep, "copy": in_worker or self.copy, "complete": complete, "shared": shared}

    def _collector(self, size: int) -> Collector:
        with beside_captures(self.device):
            return collector_for(
                self._origin.source(),
                self.windows,
                batch_size=size,
                device=self.device,
                packed=self._packs,
                tree=self.layout == "tree",
                weighs=self.sampler.weighs,
                informs=self.sample_info,
                programs=self.programs,
                stream_priority=self.stream_priority,
                decode=self.decode,
                zero_copy=self._origin.pin(self.device, draws=self.sampler.by_priority and not self._packs),
            )

    def check_worker(self, number: int, in_worker: bool) -> None:
        """Raise an error if a `DataLoader` worker of this number cannot iterate."""
        if in_worker:
            self._transforms.check_worker()
            self._origin.check_worker(number, sampler=self.sampler, device=self.device)

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_buffers=BufferPools(), _selection=None, _planner=None)
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        _datasets.add(self)

    def _after_fork(self) -> None:
        """Replace the parent's buffers and locks in a forked child, which cannot continue its iterators."""
        self._origin.after_fork()
        if self._selection is not None:
            self._selection.after_fork()
        if self.device.type == "cuda":
            keep_for_ever(self._buffers, self._planner, self._selection)
        self._buffers = BufferPools()
        self._planner = None

    @property
    def position(self) -> tuple[int, int, int]:
        """Epoch, its batches delivered before `DataLoader` workers started, and its batches delivered here since."""
        return self._position.current

    def close(self) -> None:
        """End the running iteration, and over `Shards` this dataset's connections to the other ranks. Idempotent.

        The connections also end with the last reference to the dataset, and with `Shards.close`. All ranks end their
        iterations at the same batch. A dataset over `Shards` cannot be used any more; another can be made.
        """
        active = self._buffers.active
        if active is not None:
            self._buffers.close(active)
        self._origin.close()

    def mass(self) -> tuple[float, float]:
        """What draws of this dataset weigh beside those from other tables; waits for no trajectories.

        Returns:
            The number of items that can be drawn now, or the sum of their powers of priorities; and the smallest of
            these powers where weights need it (``normalize="table"``), else infinity.
        """
        self.settle()
        return self._selected().mass()

    def settle(self) -> None:
        """Wait until the running iteration has finished all requests, such as prefetches and priority updates."""
        self._buffers.settle()

    def repeat_epoch(self) -> None:
        """Make the next iteration epoch 0, unless it resumes in the middle of one. For loaders that overfit."""
        if self._position.next()[2] == 0:
            self.set_epoch(0)

    def start_workers(self) -> None:
        """Announce that a loader's workers are about to iterate.

        For a loader that counts batches itself: `state_dict` in this process then holds the workers' start position.
        """
        self._position.start_workers()

    # ---------------------------------------------------------------- state

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, from its start. Otherwise epochs count up."""
        if error := self.prepared_error():
            raise SchemaError(error)
        self._dispatched = dealer() == "dispatcher"
        self._position.set_epoch(at_least("epoch", epoch, least=0))
        if self._selection is not None:
            self._selection.forget_pending()

    def state_dict(self, *, full: bool = True) -> dict[str, Any]:
        """The position of iteration: integers and the options they belong to, JSON-serialisable.

        With a sampler that draws by priority, also ``"priorities"``: CPU tensors of all priorities, their running
        maximum, and the rows of the last batches, because prefetched batches were drawn by older priorities.
        With transforms that have states also ``"transforms"``: these, after each of the last batches.
        With max_steps also ``"budget"``: which drawn trajectories no batch has had yet, after each of the last batches.

        Prefetched but undelivered batches do not count. In a `DataLoader` worker, as used by torchdata's
        `StatefulDataLoader`, it is the worker's own state. The main process does not know which batches the workers of
        a plain `DataLoader` have delivered.

        Over `Shards` all ranks call it at the same time; a rank's state has the priorities of its own shard. Each rank
        loads its own again; on another number of ranks see `gear_loader.distributed.join_states`.

        Args:
            full: over `Shards`, whether the state of rank 0 has the priorities of all ranks instead, so that it is
                enough to save that one, and to load it on all ranks. False: every rank saves its own.
        """
        state: dict[str, Any] = {**self._position.state_dict(), "config": self._config()}
        state |= self._selection_state(full=full)
        if transforms := self._transforms.state_dict():
            state["transforms"] = transforms
        return state

    def _selection_state(self, *, full: bool = True) -> dict[str, Any]:
        """What a state has beside the position: of batches of so many steps, and of priorities."""
        state: dict[str, Any] = {}
        if self._budget is not None:
            state["budget"] = self._progress.state_dict() + self._sample_progress.state_dict()
        if get_worker_info() is None and self.sampler.by_priority:
            self._buffers.settle()
            state["priorities"] = self._origin.save(self._by_priority("state_dict").state_dict(), full=full)
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Resume from `state`: the next iteration yields the batch after the last one delivered before it was taken.

        The batches are equal bit for bit if the table holds the same trajectories in the same order, on as many ranks.
        Draws by priority also depend on the trajectories' places in the table: their slots, or of steps their blocks.
        A loaded table has new places, if trajectories had been dropped or written side by side: then other rows are
        drawn, with the same probabilities.
        Over all `Shards`, where all ranks call it at the same time, a state goes on with other numbers of ranks, too;
        with `Steps` one that was taken after a
        whole number of training steps, also with other `micro_batches`.
        `DataLoader` workers made afterwards resume there too, whatever their number.

        Raises:
            SchemaError: an invalid state, or one of a dataset with another seed, batch size, sampler, anchor or
                drop_last, or of a worker with another number of workers.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("config"), Mapping):
            raise SchemaError(f"The state is {shown(state)}; expected a state_dict() of a ReplayDataset.")
        values, budget = Position.check_state(state), checked_positions(state)
        saved, mine = dict(state["config"]), self._config()
        if "selector" in saved:  # as states of before called it
            saved["sampler"] = saved.pop("selector")
        different = {
            key: (saved.get(key), mine.get(key))
            for key in {**saved, **mine}
            if saved.get(key) != mine.get(key)
        }
        steps = {key: different.pop(key) for key in self._STEP_OPTIONS if key in different}
        done = values["before"] + values["step"]
        if steps and done and (values["epoch"], done) not in [(epoch, at.number) for epoch, at in budget]:
            raise SchemaError(
                f"The state was saved in the middle of a training step, after {done} batches of each rank, with other "
                f"options (saved, here): {steps}. A step is planned for all ranks together: resume with the saved "
                "options, or from a state after a whole number of steps (micro_batches batches of each rank)."
            )
        if different:
            raise SchemaError(
                f"The state belongs to a dataset with other options (saved, here): {different}. "
                "Batches would not continue; make the dataset with the saved options."
            )
        moment = Moment(values["epoch"], done, values["samples"])
        self._transforms.load_state_dict(state.get("transforms", ()), moment)
        self._load_selection(state)
        self._position.load_state_dict(values)

    def _load_selection(self, state: Mapping[str, Any]) -> None:
        """Restore what `_selection_state` has returned."""
        budget = checked_positions(state)
        if self.sampler.by_priority:
            if not isinstance(state.get("priorities"), Mapping):
                raise SchemaError(
                    "The state holds no priorities; expected the state_dict() of the main process."
                )
            self._by_priority("load_state_dict").load_state_dict(self._origin.own(state["priorities"]))
        self._progress.load([part for part in budget if part[0] != SAMPLE_EPOCH])
        self._sample_progress.load([part for part in budget if part[0] == SAMPLE_EPOCH])
        self._planner = None

    def _config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self._global_size(self.batch_size),
            "sampler": repr(self.sampler),
            "anchor": self.anchor,
            "drop_last": self.drop_last,
            **self._drawn,
            **({} if self.groups is None else {"group": dataclasses.asdict(self.groups)}),
            **({} if self._budget is None else dataclasses.asdict(self._budget)),
            **dict(self._origin.config(self._budget, packed=self._packs)),
        }

    _STEP_OPTIONS = ("ranks", "micro_batches")  # a state between two steps goes on with others


_datasets: weakref.WeakSet[ReplayDataset] = weakref.WeakSet()


def _after_fork() -> None:
    for dataset in list(_datasets):
        dataset._after_fork()


os.register_at_fork(after_in_child=_after_fork)
