"""`ReplayDataset`: batches from a table as a PyTorch `IterableDataset`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch
from torch.utils.data import IterableDataset, get_worker_info

from gear_loader.collector import Batch, Buffers, Collector
from gear_loader.device_priorities import DevicePrioritySelection
from gear_loader.errors import PrivateTableError, SchemaError
from gear_loader.index import Snapshot
from gear_loader.notice import notice
from gear_loader.options import at_least, device_of, integer, windows_of
from gear_loader.prefetch import Pool, Prefetcher
from gear_loader.priorities import PrioritySelection, needs_priorities
from gear_loader.schema import Window
from gear_loader.selection import Job, Selection, SnapshotSelection
from gear_loader.selectors import SAMPLE_EPOCH, Draw, Selector, Uniform
from gear_loader.slots import Array
from gear_loader.table import Table

__all__ = ["ReplayDataset"]

_MAX_WORKERS = 1024
_EPOCH, _BEFORE, _ROUND, _KEY, _ROUND_EPOCH, _ROUND_BEFORE, _JOINED = range(7)  # places in `_shared`
_ANY = -1
_STATE = ("epoch", "before", "step", "past", "workers", "samples", "sampled_items")


class ReplayDataset(IterableDataset[Batch]):
    """Endless or epoch-wise batches of windows, drawn from a table that may be written meanwhile.

    Iterate it directly or through ``DataLoader(dataset, batch_size=None)``; or call `sample`. A batch is a dict:

    ============== ==================================================================================
    column         ``[B, L, *shape]`` in the column's dtype; steps that do not exist are zeros
    ``mask``       bool ``[B, L]``, True where the step exists; with differing windows a dict of them by column
    ``index``      int64 ``[B]``: which trajectory (as `Table.add` returned it)
    ``anchor``     int64 ``[B]``: the step that the windows are relative to
    ``generation`` int64 ``[B]``: tells whether the index has been given to another trajectory since
    ============== ==================================================================================

    With a selector that weighs, also ``priority_weight``; with `sample_info`, a dict ``sample_info`` of

    ================= ===============================================================================
    ``times_sampled`` int64 ``[B]``: how often the trajectory has been drawn, this time included
    ``age``           int64 ``[B]``: how many trajectories were added after it
    ``age_seconds``   float32 ``[B]``: how long it has been there
    ``probability``   float32 ``[B]``: with which the item was drawn
    ================= ===============================================================================

    **How long a batch stays valid:** batches lie in a ring of recycled buffers. A batch is valid until `keep`
    more batches have been requested, from the same iterator or from the one after it (2 by default: the batch in
    use and one that a trainer fetched ahead). ``copy=True`` gives each batch memory of its own. In `DataLoader`
    workers it always has.

    **Order:** batch number and seed decide every draw, so `prefetch` and `num_workers` do not change the order.
    Rank r of w ranks gets the batches number r, r + w, r + 2 w, ...

    Workers and ranks look at the table each for itself when they start an epoch. If it is written at that moment, they
    may find different trajectories: then an epoch without replacement is not exact, and its length may differ between
    ranks. `batches_per_epoch` makes it the same.

    Args:
        table: where from. `DataLoader` workers attach to it by name, so it needs one for them.
        batch_size: rows of a batch.
        windows: one `Window` for all columns, or a mapping of column name to window; columns that the mapping does
            not name are not read.
        columns: with one window: the columns to read (all by default).
        anchor: ``"uniform"`` over the trajectory's steps, ``"first"`` or ``"last"``. A selector with
            ``unit="step"`` brings its own anchors.
        selector: `Uniform()` by default.
        seed: decides all draws.
        device: ``"auto"`` (the current GPU if there is one, else the CPU) or a torch device.
        prefetch: batches that are prepared ahead: by a thread on the CPU, on a side stream on a GPU. 0 for none.
        copy: give each batch memory of its own.
        keep: see above; at least 1.
        batches_per_epoch: length of an epoch on each rank; by default one pass's worth, ceil(items / batch_size)
            over all ranks. ``math.inf`` never ends.
        drop_last: without replacement: leave out a last batch that is not full.
        subset: a function of the sequence numbers (int64 [n], the order of addition) to a boolean array: which
            trajectories belong to this dataset. `ReplayDataModule` splits train and validation so.
        sample_info: let batches carry ``sample_info``. Times are counted by datasets that do, and by all if the table
            has `max_times_sampled`; then, on a GPU, the host draws by priority.
        rate_limited: wait for the table's rate limiter, and count for it. False for validation.
        programs: programs of the gather kernel's grid on a GPU; by default one a multiprocessor.
        rank, world_size: by default those of `torch.distributed` where it is initialised, else 0 of 1.

    On a GPU nothing waits for the host from the draw to the batch; the consumer's stream waits for the side stream
    by an event. Works with torchdata's `StatefulDataLoader`.

    Raises:
        SchemaError: options that make no sense for this table.
    """

    def __init__(
        self,
        table: Table,
        *,
        batch_size: int,
        windows: Window | Mapping[str, Window],
        columns: Sequence[str] | None = None,
        anchor: Literal["uniform", "first", "last"] = "uniform",
        selector: Selector | None = None,
        seed: int = 0,
        device: str | torch.device = "auto",
        prefetch: int = 2,
        copy: bool = False,
        keep: int = 2,
        batches_per_epoch: float | None = None,
        drop_last: bool = False,
        subset: Callable[[Array], Array] | None = None,
        sample_info: bool = False,
        rate_limited: bool = True,
        programs: int | None = None,
        rank: int | None = None,
        world_size: int | None = None,
    ) -> None:
        self.table = table
        self.batch_size = at_least("batch_size", batch_size)
        self.windows = windows_of(table.schema, windows, columns)
        self.selector: Selector = Uniform() if selector is None else selector
        if anchor not in ("uniform", "first", "last"):
            raise SchemaError(f"anchor is {anchor!r}; expected 'uniform', 'first' or 'last'.")
        if self.selector.unit == "step" and anchor != "uniform":
            raise SchemaError(
                f"anchor={anchor!r} goes with a selector of trajectories; {self.selector!r} chooses the steps itself."
            )
        self.anchor: Literal["uniform", "first", "last"] = anchor
        self.seed = integer("seed", seed)
        self.device = device_of(device)
        self.prefetch = at_least("prefetch", prefetch, least=0)
        self.keep = at_least("keep", keep)
        self.copy = copy
        if batches_per_epoch is not None and batches_per_epoch != math.inf:
            batches_per_epoch = at_least("batches_per_epoch", batches_per_epoch, otherwise=" or math.inf")
        self.batches_per_epoch = batches_per_epoch
        self.drop_last = drop_last
        if subset is not None and not callable(subset):
            raise SchemaError(
                f"subset is {subset!r}; expected a function of the sequence numbers (int64 [n])."
            )
        self.subset = subset
        self.sample_info = sample_info
        self.rate_limited = rate_limited
        self._check_rate(self.batch_size)
        self.programs = None if programs is None else at_least("programs", programs)
        if (rank is None) != (world_size is None) or (rank is not None and not 0 <= rank < (world_size or 0)):
            raise SchemaError(
                f"rank {rank} of world_size {world_size}; expected both, with 0 <= rank < world_size."
            )
        self._shard = None if rank is None or world_size is None else (rank, world_size)
        # Where iteration stands here: the epoch, the batches of it that had been delivered before DataLoader workers
        # shared out the rest (0 in the main process), and the batches that this process has delivered since.
        self._position = (0, 0, 0)
        # What the next iteration starts with: shared, because workers may be new processes every epoch.
        self._shared = torch.zeros(_JOINED + _MAX_WORKERS, dtype=torch.int64).share_memory_()
        self._restart: tuple[int, int, int] | None = None  # goes first: where a worker resumes
        self._samples, self._sampled_items = 0, 0
        self._sampler: tuple[int, Prefetcher] | None = None
        self._pools: dict[tuple[int, bool], Pool] = {}
        self._selection: Selection | None = None
        self._active: Prefetcher | None = None  # that of the running iteration
        self._past, self._open = 0, 0  # batches of the iterations before this one, and of this one

    # ---------------------------------------------------------------- iteration

    def __len__(self) -> int:
        """Batches of an epoch on this rank, for the trajectories that are in the table now.

        Raises:
            TypeError: the dataset is endless.
        """
        count = self._epoch_batches(self._selected().view(), self._rank()[1])
        if count == math.inf:
            raise TypeError("This ReplayDataset has no length: batches_per_epoch is math.inf.")
        return int(count)

    def __iter__(self) -> Iterator[Batch]:
        info = get_worker_info()
        number, workers = (info.id, info.num_workers) if info is not None else (0, 1)
        self._check_worker(number, info is not None)
        self._position = self._next()
        return self._iterate(number, workers, in_worker=info is not None)

    def _iterate(self, number: int, workers: int, *, in_worker: bool) -> Iterator[Batch]:
        # Runs from the first request on: an iterator that is made and dropped does not use up an epoch.
        epoch, before, step = self._position = self._begin()
        self._past, self._open = self._past + self._open, before + step
        prefetch = 0 if in_worker else self.prefetch
        prefetcher = self._active = self._prefetcher(self.batch_size, prefetch=prefetch, shared=in_worker)
        draws = self._draws(epoch, before + number + workers * step, workers)
        try:
            for batch in prefetcher.batches(
                lambda buffers, item: self._fill(prefetcher, buffers, *item), draws
            ):
                step += 1
                self._position, self._open = (epoch, before, step), before + step
                yield batch
            if not in_worker:
                # A worker stays at its end, so that it ends again if it is resumed while others have batches left.
                self._position = (epoch + 1, 0, 0)
                self._past, self._open = self._past + self._open, 0
        finally:
            if self._active is prefetcher:
                self._active = None
            prefetcher.close()

    def _draws(self, epoch: int, number: int, every: int) -> Iterator[tuple[Draw, Snapshot | None]]:
        """The draws of this rank's batches `number`, number + every, ... of an epoch, and what they draw from if
        that is not what is there at the time."""
        rank, world = self._rank()
        if self.rate_limited and self.table.rules.rate_limiter is not None:
            self.table.await_samplable(self.batch_size)  # before that there may be nothing
        view = self._selected().view()
        count = self._epoch_batches(view, world)
        turn, past = 0, self._past
        while number < count:
            batch = number * world + rank  # its number over all ranks
            if not self.selector.passes:
                yield Draw(self.seed, epoch, batch, 0, self.batch_size, number=past + number), None
            else:
                if batch // self._pass_batches(view) != turn:  # one more pass, over what is there by now
                    view = self._selected().view()
                turn, place = divmod(batch, self._pass_batches(view))
                first = place * self.batch_size
                rows = min(self.batch_size, self.selector.num_items(view) - first)
                yield Draw(self.seed, epoch, batch, first, rows, turn, past + number), view
            number += every

    def sample(self, batch_size: int | None = None) -> Batch:
        """One batch, for loops of one's own. Prepared when asked for; on a GPU without waiting for it.

        Without replacement, calls go through the items in order of a permutation, one pass after another; the last
        batch of a pass may be smaller. A pass is exact while the table does not change.

        Args:
            batch_size: rows, if not the dataset's. Changing it makes new buffers.

        Returns:
            A batch that stays valid until `sample` has been called `keep` more times (or for good with `copy`).

        Raises:
            TableEmptyError: there is nothing to draw from.
        """
        size = self.batch_size if batch_size is None else at_least("batch_size", batch_size)
        self._check_rate(size)
        if self._sampler is None or self._sampler[0] != size:
            if self._sampler is not None:
                self._sampler[1].close()
                if self._sampler[0] != self.batch_size:
                    del self._pools[self._sampler[0], False]
            self._sampler = (size, self._prefetcher(size, prefetch=0, shared=False))
        prefetcher = self._sampler[1]
        if needs_priorities(self.selector):
            self._settle()  # updates that wait for a batch being prefetched come before this one
        rank, world = self._rank()
        number = self._samples * world + rank
        epoch, turn, first, count, view = SAMPLE_EPOCH, 0, 0, size, None
        if self.selector.passes:
            view = self._selected().view()
            items = self.selector.num_items(view)
            turn, first = divmod(self._sampled_items, max(items, 1))
            epoch, count = SAMPLE_EPOCH + 1 + rank, min(size, items - first)
        draw = Draw(self.seed, epoch, number, first, count, turn, self._samples)
        batch = prefetcher.one(lambda buffers, item: self._fill(prefetcher, buffers, item, view), draw)
        self._samples += 1
        self._sampled_items += count
        return batch

    def _check_rate(self, size: int) -> None:
        limiter = self.table.rules.rate_limiter
        if limiter is not None and self.rate_limited:
            limiter.check_batch(size)

    # ---------------------------------------------------------------- one batch

    def _fill(self, prefetcher: Prefetcher, buffers: Buffers, draw: Draw, frozen: Snapshot | None) -> int:
        """Draw a batch and gather it into `buffers`; `frozen` are the items of an epoch that is a pass over them."""
        ticket, count = self._selected().fill(prefetcher.collector, buffers, draw, frozen)
        prefetcher.release(buffers, ticket)
        return count

    def _selected(self) -> Selection:
        """The selector at work, in this process."""
        job = Job(
            self.table,
            self.selector,
            self.anchor,
            self.subset,
            limited=self.rate_limited,
            informs=self.sample_info,
        )
        if self._selection is None or self._selection.job != job:
            # A state may be taken before batches that were prefetched, and one that a trainer fetched ahead.
            history = self.prefetch + self.keep + 2
            if not needs_priorities(self.selector):
                self._selection = SnapshotSelection(job)
            elif self.device.type == "cuda" and self.table.region.pin() and not self._host_draws(job):
                self._selection = DevicePrioritySelection(job, history=history, device=self.device)
            else:
                self._selection = PrioritySelection(job, history=history)
        return self._selection

    def _host_draws(self, job: Job) -> bool:
        """Whether the host has to know, batch by batch, what was drawn or updated."""
        if not job.counts and self.table.rules.on_full != "evict_lowest_priority":
            return False
        notice(
            "host-draws",
            f"{self.selector!r} is drawn on the host, because sample_info, max_times_sampled or "
            "on_full='evict_lowest_priority' need to know what is drawn or updated: the GPU only gathers.",
        )
        return True

    # ---------------------------------------------------------------- priorities

    def update_priority(
        self,
        index: Batch | torch.Tensor | Array | Sequence[int],
        priority: torch.Tensor | Array | Sequence[float],
        *,
        generation: torch.Tensor | Array | None = None,
        anchor: torch.Tensor | Array | None = None,
        stale: Literal["ignore", "error"] = "ignore",
    ) -> None:
        """Give trajectories, or with ``unit="step"`` steps, new priorities, as their errors after training suggest.

        ``dataset.update_priority(batch, td_error.abs())``, or with its parts
        ``dataset.update_priority(batch["index"], td_error.abs(), generation=batch["generation"])``.

        Args:
            index: a batch: then its generations, and with ``unit="step"`` its anchors, are taken from it too; or
                int [n], which trajectories. Of equal items the last one counts.
            priority: [n] numbers, finite as float32 and not negative; `Prioritized` raises them to its alpha.
            generation: int [n], ``batch["generation"]``: then a row whose trajectory is gone is not taken for its
                successor in the same place.
            anchor: int [n], ``batch["anchor"]``: which steps; with ``unit="step"`` only.
            stale: what to do if a trajectory is gone: ``"ignore"`` leaves the row out and counts it (`num_stale`),
                ``"error"`` changes nothing and raises.

        A table that was created with ``on_full="evict_lowest_priority"`` gets them too, if items are trajectories.

        Batches that have been drawn ahead (`prefetch`) do not know of it; every batch that is asked for later does.
        Where the GPU draws, CUDA tensors stay there and nothing waits; then a bad value in them is found by the GPU,
        which changes nothing, and raised by one of the calls that follow. Elsewhere they are copied to the host.

        Raises:
            PriorityError: a priority is NaN, infinite or negative; the message names the first. Nothing was changed.
            StaleIndexError: with ``stale="error"``: a trajectory is gone. Nothing was changed.
            SchemaError: other shapes or dtypes, or a selector that does not go by priorities. Nothing was changed.
        """
        selection = self._by_priority("update_priority")
        if stale not in ("ignore", "error"):
            raise SchemaError(f"stale is {stale!r}; expected 'ignore' or 'error'.")
        if isinstance(index, Mapping):
            index, generation, anchor = self._names(index, generation, anchor)
        selection.update_priority(
            index, priority, generation=generation, anchor=anchor, stale=stale, between=self._between
        )

    def _names(self, batch: Batch, generation: Any, anchor: Any) -> tuple[Any, Any, Any]:
        """index, generation and anchor of a batch's rows."""
        wanted = ("index", "generation") + (("anchor",) if self.selector.unit == "step" else ())
        missing = [name for name in wanted if name not in batch]
        if missing or generation is not None or anchor is not None:
            raise SchemaError(
                f"A mapping with the keys {list(batch)} was received as index"
                f"{f', in which {missing} is missing' if missing else ', together with generation or anchor'}; "
                "expected a whole batch alone, or batch['index'] with generation and anchor. Nothing was changed."
            )
        return batch["index"], batch["generation"], batch.get("anchor") if "anchor" in wanted else None

    def _between(self, call: Callable[[], object]) -> None:
        active = self._active
        if active is None:
            call()
        else:
            active.between(call)

    def _settle(self) -> None:
        active = self._active
        if active is not None:
            active.settle()

    def priority_quantiles(self, shares: Sequence[float]) -> list[float]:
        """Quantiles of the positive priorities that are drawn by now, estimated from a part of them if they are many.

        Args:
            shares: from 0 (the smallest) to 1 (the largest).

        Returns:
            One number each, NaN if no priority is positive. On a GPU this waits for it.

        Raises:
            SchemaError: the selector does not go by priorities, or a share is none.
        """
        selection = self._by_priority("priority_quantiles")
        values = np.asarray(shares, dtype=np.float64)
        if values.ndim != 1 or not ((values >= 0) & (values <= 1)).all():
            raise SchemaError(f"shares is {shares!r}; expected numbers from 0 to 1.")
        found: list[float] = selection.quantiles(values).tolist()
        return found

    @property
    def num_stale(self) -> int:
        """Rows that `update_priority` has left out so far, because their trajectory was gone."""
        return self._by_priority("num_stale").num_stale

    def _by_priority(self, what: str) -> PrioritySelection:
        selection = self._selected()
        if not isinstance(selection, PrioritySelection):
            raise SchemaError(
                f"{what} was called, but {self.selector!r} does not go by priorities; use gear_loader.Prioritized "
                "or gear_loader.TopK."
            )
        return selection

    # ---------------------------------------------------------------- sizes

    def _pass_batches(self, view: Snapshot) -> int:
        """Batches of one pass over all items, on all ranks together."""
        items = self.selector.num_items(view)
        if items == 0:
            raise self._selected().job.empty()
        if self.drop_last and self.selector.passes:
            if items < self.batch_size:
                raise SchemaError(
                    f"drop_last leaves no batch: {items} items are fewer than batch_size {self.batch_size}."
                )
            return items // self.batch_size
        return -(-items // self.batch_size)

    def _epoch_batches(self, view: Snapshot, world: int) -> float:
        if self.batches_per_epoch is not None:
            return self.batches_per_epoch
        return -(-self._pass_batches(view) // world)

    def _rank(self) -> tuple[int, int]:
        if self._shard is not None:
            return self._shard
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    # ---------------------------------------------------------------- workers

    def _prefetcher(self, size: int, *, prefetch: int, shared: bool) -> Prefetcher:
        pool = self._pools.get((size, shared))
        if pool is None:
            collector = Collector(
                self.table,
                self.windows,
                batch_size=size,
                device=self.device,
                programs=self.programs,
                weighs=self.selector.weighs,
                informs=self.sample_info,
            )
            pool = self._pools[size, shared] = Pool(collector, shared=shared)
        return Prefetcher(
            pool,
            prefetch=prefetch,
            keep=self.keep,
            fresh=self.copy or shared,
            complete=needs_priorities(self.selector),
        )

    def _check_worker(self, number: int, in_worker: bool) -> None:
        if not in_worker:
            return
        if needs_priorities(self.selector):
            raise SchemaError(
                f"A DataLoader worker cannot draw for {self.selector!r}: update_priority would not reach it. Use "
                "num_workers=0 (batches are prefetched in the background anyway)."
            )
        if self.table.name is None:
            raise PrivateTableError(
                "A DataLoader worker cannot read a private table. Create it with a name, "
                "Table.create(..., name='replay'), or use num_workers=0 (prefetch already works in the background)."
            )
        if self.device.type == "cuda":
            raise SchemaError(
                "A DataLoader worker cannot gather for a GPU. Use num_workers=0 (batches are prefetched on a side "
                "stream), or device='cpu' in the dataset."
            )
        if number >= _MAX_WORKERS:
            raise SchemaError(f"There are more than {_MAX_WORKERS} DataLoader workers; use fewer.")

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        state.update(_sampler=None, _pools={}, _selection=None, _active=None)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            state["_shard"] = self._rank()  # a spawned worker is in no process group
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._shared.share_memory_()  # a pickle or a copy brings plain memory

    # Which epoch comes next is one number for this process and all workers. The workers of one loader's iteration
    # must start the same epoch, though any of them may come first, or not at all when the iteration is broken off:
    # the first one opens a round under the seed that they have in common, the others join it.

    def _next(self) -> tuple[int, int, int]:
        """What `_begin` would return now."""
        info = get_worker_info()
        epoch, before, _, _, round_epoch, round_before = self._shared[:_JOINED].tolist()
        if info is None:
            return epoch, 0, before
        if self._restart is not None:
            return self._restart
        return (round_epoch, round_before, 0) if self._can_join(info.id, info.seed) else (epoch, before, 0)

    def _can_join(self, worker: int, seed: int) -> bool:
        key, opened, joined = self._shared[[_KEY, _ROUND, _JOINED + worker]].tolist()
        return key in (_ANY, seed - worker) and joined != opened

    def _begin(self) -> tuple[int, int, int]:
        """Start an iteration: its epoch, and the batches delivered before, as in `_position`."""
        info = get_worker_info()
        if info is None:
            start = self._next()
            self._shared[_EPOCH], self._shared[_BEFORE] = start[0] + 1, 0
            return start
        with self.table.region.lock:
            start = self._next()
            if self._restart is None and not self._can_join(info.id, info.seed):
                self._open_round(info.seed - info.id)
            self._shared[_JOINED + info.id] = self._shared[_ROUND]
            self._restart = None
            return start

    def _open_round(self, key: int) -> None:
        epoch, before, opened = self._shared[: _ROUND + 1].tolist()
        self._shared[:_JOINED] = torch.tensor([epoch + 1, 0, opened + 1, key, epoch, before])

    def start_workers(self) -> None:
        """Say that a loader's workers start to iterate, before they do.

        For a loader that counts batches itself: `state_dict` in this process then tells where the workers began.
        """
        self._position = self._next()
        self._open_round(_ANY)

    # ---------------------------------------------------------------- state

    def set_epoch(self, epoch: int) -> None:
        """Make the next iteration epoch number `epoch`, from its start. Without it epochs count up."""
        epoch = at_least("epoch", epoch, least=0)
        self._shared[_EPOCH], self._shared[_BEFORE] = epoch, 0
        self._position, self._restart = (epoch, 0, 0), None
        if isinstance(self._selection, PrioritySelection):
            self._selection.forget_pending()

    def state_dict(self) -> dict[str, Any]:
        """Where iteration stands: integers and the options that they hold for, ready for JSON.

        With a selector that goes by priorities, also ``"priorities"``: CPU tensors of all priorities, their running
        maximum, and the rows of the last batches, because those that were drawn ahead knew older priorities.

        Batches that were prefetched but not delivered do not count. In a `DataLoader` worker, where torchdata's
        `StatefulDataLoader` asks for it, it is the worker's own state. In the main process nothing is known of what
        the workers of a plain `DataLoader` have delivered.
        """
        info = get_worker_info()
        epoch, before, step = self._position
        state = {
            "epoch": epoch,
            "before": before,
            "step": step,
            "past": self._past,
            "workers": 0 if info is None else info.num_workers,
            "samples": self._samples,
            "sampled_items": self._sampled_items,
            "config": self._config(),
        }
        if info is None and needs_priorities(self.selector):
            self._settle()
            state["priorities"] = self._by_priority("state_dict").state_dict()
        return state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Go on where `state` was taken: the next iteration yields the batch after the last one delivered then.

        The batches are the same bit for bit if the table holds the same trajectories in the same order, on as many
        ranks. `DataLoader` workers made afterwards go on there too, however many.

        Raises:
            SchemaError: it is no such state, or of a dataset with another seed, batch size, selector, anchor or
                drop_last, or of a worker of another number of workers.
        """
        if not isinstance(state, Mapping) or not isinstance(state.get("config"), Mapping):
            raise SchemaError(
                f"The state is {state!r}; expected what state_dict() of a ReplayDataset returned."
            )
        missing = [key for key in _STATE if key not in state]
        if missing:
            raise SchemaError(
                f"The state has the keys {sorted(state)}; missing: {missing}. Give what state_dict() returned."
            )
        values = {key: at_least(f"{key!r} of the state", state[key], least=0) for key in _STATE}
        mine = self._config()
        different = {
            key: (value, mine[key]) for key, value in state["config"].items() if mine.get(key) != value
        }
        if different:
            raise SchemaError(
                f"The state belongs to a dataset with other options (saved, here): {different}. "
                "Batches would not continue; make the dataset with the saved options."
            )
        info = get_worker_info()
        workers = 0 if info is None else info.num_workers
        if values["workers"] != workers:
            raise SchemaError(
                f"The state belongs to one of {values['workers']} DataLoader workers (0: none); here are {workers}. "
                f"Make the loader with num_workers={values['workers']}."
            )
        if needs_priorities(self.selector):
            if not isinstance(state.get("priorities"), Mapping):
                raise SchemaError(
                    "The state holds no priorities; give what state_dict() of the main process returned."
                )
            self._by_priority("load_state_dict").load_state_dict(state["priorities"])
        epoch, before, step = values["epoch"], values["before"], values["step"]
        self._past, self._open = values["past"], 0
        if info is None:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch, before + step
            self._position, self._restart = (epoch, 0, before + step), None
        else:
            self._shared[_EPOCH], self._shared[_BEFORE] = epoch + 1, 0
            self._position = self._restart = (epoch, before, step)
        self._samples, self._sampled_items = values["samples"], values["sampled_items"]

    def _config(self) -> dict[str, Any]:
        return {
            "seed": self.seed,
            "batch_size": self.batch_size,
            "selector": repr(self.selector),
            "anchor": self.anchor,
            "drop_last": self.drop_last,
        }
