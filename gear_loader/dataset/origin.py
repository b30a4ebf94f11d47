"""What a dataset draws from: one table. Others, such as `Shards`, hand a dataset an `Origin` of their own."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Protocol

import torch

from gear_loader.collection.collector import RowSource, TableSource
from gear_loader.collection.windows import only_host_gathers
from gear_loader.dataset.options import Ranks
from gear_loader.dataset.position import MAX_WORKERS
from gear_loader.errors import PrivateTableError, SchemaError
from gear_loader.selection.base import Selection, SelectionContext
from gear_loader.selection.budget_planner import BudgetPlanner
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.prioritized_cuda import CudaPrioritizedSelection
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.snapshot_selection import SnapshotSelection
from gear_loader.selection.step_budget import StepBudget, Steps
from gear_loader.storage.edits import set_columns
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.notices import notice

_DISTRIBUTED = torch.distributed.is_available()  # whether PyTorch was built with it


class Origin:
    """Hands a dataset its selection and its source of rows: those of one table.

    Args:
        table: of this process. ranks: how ranks share the batches.

    Attributes:
        shards: what is drawn from instead, if it is not the table alone.
        is_global: whether every rank draws each batch, over the tables of all.
        slices: parts into which a batch is cut. number: of this rank's table.
    """

    shards: Any = None
    is_global = False
    slices, number = 1, 0

    def __init__(self, table: Table, ranks: Ranks) -> None:
        self.table, self.ranks = table, ranks

    @property
    def given(self) -> Any:
        """What the dataset was given."""
        return self.table

    @property
    def tables(self) -> Sequence[Table]:
        """The tables of this process that it draws from."""
        return (self.table,)

    # ---------------------------------------------------------------- ranks

    def rank(self) -> tuple[int, int]:
        """This rank, and the number of ranks, if each has batches of its own; else 0 of 1."""
        if self.ranks.rank is not None and self.ranks.world_size is not None:
            return self.ranks.rank, self.ranks.world_size
        if _DISTRIBUTED and torch.distributed.is_initialized():
            return torch.distributed.get_rank(), torch.distributed.get_world_size()
        return 0, 1

    @property
    def is_shared(self) -> bool:
        """Whether other ranks, each with a selection of its own, may draw from the table."""
        if self.table.name is None:
            return False
        ranks = self.ranks.world_size or 1
        if _DISTRIBUTED and torch.distributed.is_initialized():
            ranks = max(ranks, torch.distributed.get_world_size())
        return ranks > 1

    def seed(self, seed: int) -> int:
        """The seed of the draws of this rank."""
        return seed

    # ---------------------------------------------------------------- checks

    def check(
        self, *, sampler: Sampler, packed: bool, layout: str, steps: Steps | None, sample_info: bool
    ) -> None:
        """Raise SchemaError for options of a dataset that do not go with what it draws from."""
        if sampler.freshness < 1 and (self.table.rules.version is None or self.is_global):
            raise SchemaError(
                f"{sampler!r} was given; expected a Table created with version= for a freshness below 1, or Shards of "
                "such with scope='local'."
            )
        ranks = self.ranks
        if (ranks.balance is not None or ranks.micro_batches > 1) and not (packed and self.is_global):
            raise SchemaError(
                f"{ranks!r} was given; expected balance and micro_batches with Shards, scope='global' and "
                "layout='packed' or 'jagged': they deal the rows of a step to ranks."
            )
        if ranks.prefer_local and (not self.is_global or steps is not None or ranks.balance is not None):
            raise SchemaError(
                f"{ranks!r} was given; expected prefer_local with Shards and scope='global', a batch_size in rows, and "
                "no balance: these distribute rows by the ranks' work."
            )
        if ranks.micro_batches > 1 and steps is None:
            raise SchemaError(
                f"{ranks!r} was given with a batch_size in rows; expected batch_size=Steps(...), whose batches are "
                "planned together, or accumulate gradients over batches."
            )

    def check_sharing(self, *, fixed: bool, by_priority: bool) -> None:
        """Raise SchemaError if ranks cannot share the batches of one stream of steps.

        Args:
            fixed: whether the number of batches is given.
        """
        world = self.rank()[1]
        if world > 1 and (not fixed or by_priority):
            raise SchemaError(
                f"batch_size=Steps(...) was given on {world} ranks; expected batches_per_epoch, so that all ranks "
                "have as many batches, and a sampler that does not draw by priority."
            )

    def check_worker(self, number: int, *, sampler: Sampler, device: torch.device) -> None:
        """Raise an error if a `DataLoader` worker of this number cannot iterate."""
        if sampler.by_priority:
            raise SchemaError(
                f"A DataLoader worker cannot draw for {sampler!r}: update_priority would not reach it. Use "
                "num_workers=0 (batches are prefetched in the background anyway)."
            )
        if self.table.name is None:
            raise PrivateTableError(
                "A DataLoader worker cannot read a private table. Create it with a name, "
                "Table.create(..., name='replay'), or use num_workers=0 (prefetch already works in the background)."
            )
        if device.type == "cuda":
            raise SchemaError(
                "A DataLoader worker cannot gather for a GPU. Use num_workers=0 (batches are prefetched on a side "
                "stream), or device='cpu' in the dataset."
            )
        if number >= MAX_WORKERS:
            raise SchemaError(f"There are more than {MAX_WORKERS} DataLoader workers; use fewer.")

    def check_process(self) -> None:
        """Raise GearError if a forked child cannot draw."""

    def after_fork(self) -> None:
        """Called in a forked child."""

    # ---------------------------------------------------------------- rows

    def open(self, dataset: Any, options: Mapping[str, Any]) -> None:
        """Begin to serve a dataset; `options` are those that must be equal on all ranks."""

    def close(self) -> None:
        """End what `open` has begun. Idempotent."""

    def selection(
        self,
        context: SelectionContext,
        *,
        history: int,
        device: torch.device,
        windows: Mapping[str, Window],
        steps: StepBudget | None = None,
        packed: bool = False,
        tree: bool = False,
    ) -> Selection:
        """Make the selection of a dataset.

        Args:
            context: sampler, table, and the options that they go with.
            history: batches whose rows a state keeps, because they may have been drawn ahead of it.
            device: that draws. windows: that are gathered.
            steps: of batches with a number of steps. packed: whether rows lie one after another. tree: and
                shared steps once.
        """
        if not context.sampler.by_priority:
            return SnapshotSelection(context)
        on_gpu = device.type == "cuda" and context.grouping is None and self.shards is None
        on_gpu = on_gpu and not only_host_gathers(context.table.schema, windows)
        if on_gpu and context.table._engine.region.pin(device) and not self._host_draws(context):
            return CudaPrioritizedSelection(context, history=history, device=device)
        return PrioritizedSelection(context, history=history)

    def _host_draws(self, context: SelectionContext) -> bool:
        """Whether the host has to know, batch by batch, what was drawn or updated."""
        needs = context.counts or context.waits or context.sampler.freshness < 1
        needs |= self.is_shared and context.sampler.unit == "trajectory"
        if (
            not needs
            and context.table.rules.on_full != "evict_lowest_priority"
            and not context.table._engine.moves
        ):
            return False
        notice(
            "host-draws",
            f"{context.sampler!r} is drawn on the host, because sample_info, max_times_sampled, late columns, "
            "max_lag, freshness, on_full='evict_lowest_priority', a disk tier, a host part or other ranks of the same "
            "named table need to know what is drawn or updated, or move rows: the GPU only gathers.",
        )
        return True

    def set(self, rows: Mapping[str, Any], mask: Any, columns: Mapping[str, Any], *, strict: bool) -> int:
        """See `ReplayDataset.set`; `rows` is a batch."""
        engine = self.table._engine
        engine.check_open()
        names = rows["index"], rows["anchor"], rows["generation"]
        return set_columns(engine, *names, mask, columns, strict=strict)

    def source(self) -> RowSource:
        """Make the source of the drawn rows."""
        return TableSource(self.table)

    def pin(self, device: torch.device, *, draws: bool) -> bool | None:
        """Whether a GPU reads the tables of the source; None to try. `draws`: whether it may draw by priority."""
        if draws and device.type == "cuda":
            self.table._engine.region.pin(
                device
            )  # draws read it too, so it cannot be pinned during the iteration
        return None

    def planner(self, selection: Selection, budget: StepBudget, **options: Any) -> BudgetPlanner:
        """Make what plans batches with a number of steps; options as of `BudgetPlanner`."""
        return BudgetPlanner(selection, budget, **options)

    # ---------------------------------------------------------------- epochs and states

    def begin_epoch(
        self, selection: Selection, look: Callable[[], tuple[Any, float]], *, fresh: bool
    ) -> tuple[Any, float]:
        """Begin an epoch, or resume one unless `fresh`; return the items to draw from, and the number of batches.

        Args:
            look: returns both for this rank.
        """
        return look()

    def end_epoch(self) -> None:
        """Wait until all ranks have collected their last batch, which may read rows of this rank's table."""

    def save(self, priorities: dict[str, Any], *, full: bool) -> dict[str, Any]:
        """The priorities for a state, from those of this rank; `full`: on rank 0 those of all ranks."""
        return priorities

    def own(self, priorities: Mapping[str, Any]) -> Mapping[str, Any]:
        """Those of this rank out of a state."""
        return priorities

    def config(self, steps: StepBudget | None, *, packed: bool) -> Iterator[tuple[str, Any]]:
        """Options that decide which rank gets which rows, for a state."""
        yield from ()

    def __getstate__(self) -> dict[str, Any]:
        state = dict(self.__dict__)
        if torch.distributed.is_available() and torch.distributed.is_initialized():
            rank, world = self.rank()  # a spawned worker has no process group
            state["ranks"] = dataclasses.replace(self.ranks, rank=rank, world_size=world)
        return state


class HasOrigin(Protocol):
    """What a dataset can draw from beside a table, such as `Shards`."""

    def origin(self, ranks: Ranks) -> Origin:
        """What it hands to the dataset."""


def origin_of(given: Table | HasOrigin, ranks: Ranks) -> Origin:
    """What a dataset draws from: the origin of a table, or what another object hands it.

    Raises:
        SchemaError: neither was given.
    """
    if isinstance(given, Table):
        return Origin(given, ranks)
    make = None if isinstance(given, type) else getattr(given, "origin", None)
    made = make(ranks) if callable(make) else None
    if isinstance(made, Origin):
        return made
    attaches = isinstance(given, (str, os.PathLike))
    remedy = f" Attach to it by its name: gear_loader.Table.attach({shown(given)})." if attaches else ""
    if hasattr(given, "table") and hasattr(given, "sample"):
        remedy = " Of a buffer give buffer.table, or use buffer.dataset."
    raise SchemaError(
        f"table is {shown(given)}; expected a gear_loader.Table or gear_loader.distributed.Shards.{remedy}"
    )
