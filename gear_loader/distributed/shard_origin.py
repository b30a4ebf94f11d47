"""What a dataset over `Shards` draws from."""

from __future__ import annotations

import dataclasses
import logging
import os
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.windows import packed_span, reach_of
from gear_loader.dataset.options import Ranks
from gear_loader.dataset.origin import Origin
from gear_loader.distributed.budget_planner import ShardBudgetPlanner
from gear_loader.distributed.dealing import RowDealer, deal_all
from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.local_selection import begin_epoch, own_state
from gear_loader.distributed.rank_exchange import SingleProcess
from gear_loader.distributed.shard_source import ShardSource
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.state_parts import gather, part_of_rank
from gear_loader.distributed.update_routing import checked_shards
from gear_loader.errors import GearError, RankError, SchemaError, StaleIndexError
from gear_loader.selection.base import Selection, SelectionContext, ShardShare
from gear_loader.selection.budget_planner import BudgetPlanner
from gear_loader.selection.prioritized import PrioritizedSelection
from gear_loader.selection.random import key
from gear_loader.selection.samplers import Sampler
from gear_loader.selection.step_budget import StepBudget, Steps
from gear_loader.storage.edit_values import Edits, checked_edits
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table

_logger = logging.getLogger("gear_loader")

_LOCAL = 0x6C6F6361  # random number stream of the seeds of local draws


class ShardOrigin(Origin):
    """Hands a dataset its selection and its source of rows: over all shards, or over this rank's alone."""

    is_shared = False

    def __init__(self, shards: ShardTables, ranks: Ranks) -> None:
        super().__init__(shards.table, ranks)
        self.shards: ShardTables = shards
        self.is_global = ranks.scope == "global"
        self.slices = shards.num_slices if self.is_global else 1
        self.number = shards.place.data
        self._exchange: SingleProcess
        self._forked_from = 0  # in a forked child: id of the process that made the connections

    @property
    def given(self) -> ShardTables:
        return self.shards

    @property
    def tables(self) -> Sequence[Table]:
        return tuple(self.shards.own.values())

    def rank(self) -> tuple[int, int]:
        return 0, 1  # all ranks draw each batch together, or each draws from its own shard

    def seed(self, seed: int) -> int:
        local = self.number and not self.is_global
        return key(seed=seed, stream=_LOCAL, epoch=self.number) if local else seed

    # ---------------------------------------------------------------- checks

    def check(
        self, *, sampler: Sampler, packed: bool, layout: str, steps: Steps | None, sample_info: bool
    ) -> None:
        super().check(sampler=sampler, packed=packed, layout=layout, steps=steps, sample_info=sample_info)
        if packed and self.is_global and self.shards.num_stages > 1:
            raise SchemaError(
                f"layout={layout!r} was given with Shards of {self.shards.num_stages} pipeline stages; expected one "
                "stage, or layout='padded': stages would not know each other's lengths."
            )
        if self.ranks.rank is not None or sample_info:
            raise SchemaError(
                "rank, world_size or sample_info was given with Shards, which know their ranks and do not support "
                "sample_info. Leave them out."
            )

    def check_sharing(self, *, fixed: bool, by_priority: bool) -> None:
        if not self.is_global and not fixed:
            raise SchemaError(
                "batch_size=Steps(...) was given with Shards and scope='local'; expected batches_per_epoch too, so "
                "that all ranks have as many batches."
            )

    def check_worker(self, number: int, *, sampler: Sampler, device: torch.device) -> None:
        raise SchemaError(
            "A DataLoader worker cannot draw from Shards: it is not a rank. Use num_workers=0 (batches are "
            "prefetched in the background anyway)."
        )

    def check_process(self) -> None:
        if self._forked_from:
            raise GearError(
                f"A dataset over Shards of process {self._forked_from} was used in process {os.getpid()}, a forked "
                "child: its connections to other ranks are the parent's. Make Shards and dataset in the child, or "
                "start it with spawn."
            )

    def after_fork(self) -> None:
        self._forked_from = self._forked_from or os.getppid()

    # ---------------------------------------------------------------- rows

    def open(self, dataset: Any, options: Mapping[str, Any]) -> None:
        windows = f"windows of pipeline stage {self.shards.place.stage}"
        exchange = self._exchange = self.shards.new_exchange()
        try:
            exchange.compare(
                "ReplayDatasets",
                {windows if name == "windows" else name: value for name, value in options.items()},
            )
        except BaseException:
            exchange.close()
            raise
        weakref.finalize(dataset, exchange.close).atexit = False
        self.shards.datasets.add(dataset)

    def close(self) -> None:
        self._exchange.close()

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
        if not self.is_global:
            options: dict[str, Any] = {"history": history, "device": device, "windows": windows}
            selection = super().selection(context, **options)
            if isinstance(selection, PrioritizedSelection):
                selection.share = ShardShare()
            return selection
        shards, balance = self.shards, self.ranks.balance
        # Records carry the blocks of windows that are read one-sidedly. Those of packed rows, which may be of any
        # length, are looked up by the reader.
        one_sided = shards.transport == "nixl" and shards.remote and not packed
        deal: Any = None
        if packed and steps is not None:
            deal = deal_all
        elif packed and balance is not None:
            span = packed_span(context.table.schema, windows)
            deal = RowDealer(self.slices, self.number, balance, *span)
        return GlobalSelection(
            context,
            shards,
            self._exchange,
            history=history,
            reach=reach_of(context.table.schema, windows) if one_sided else None,
            packed=packed,
            tree=tree or bool(context.table.schema.ragged),
            deal=deal,
            prefer_local=self.ranks.prefer_local,
        )

    def set(self, rows: Mapping[str, Any], mask: Any, columns: Mapping[str, Any], *, strict: bool) -> int:
        if not self.is_global:
            return super().set(rows, mask, columns, strict=strict)
        edits = checked_edits(
            self.table.schema, rows["index"], rows["anchor"], rows["generation"], mask, columns
        )
        owners = checked_shards(rows.get("shard"), len(edits.slots), self.shards.num_shards)
        parts = {shard: edits.take(np.flatnonzero(owners == shard)) for shard in np.unique(owners).tolist()}
        stage = self.shards.place.stage
        if stage:
            parts = {shard: self._in_stage(shard, part, strict=strict) for shard, part in parts.items()}
        skipped = len(edits.slots) - sum(len(part.slots) for part in parts.values())
        for shard, part in parts.items():
            skipped += self.shards.stage_table(shard, stage).set(part, strict=strict)
        return skipped

    def _in_stage(self, shard: int, edits: Edits, *, strict: bool) -> Edits:
        """Edits of trajectories that stage 0 names, of those that are there, in this rank's stage."""
        slots, generations, gone = self.shards.names.find(shard, edits.slots, edits.generations)
        if strict and gone.any():
            raise StaleIndexError(
                f"{int(gone.sum())} of {len(gone)} rows of shard {shard} are of removed trajectories; the first is "
                f"index {edits.slots[gone][0]}. Nothing was changed; stale='ignore' skips them."
            )
        here = dataclasses.replace(edits, slots=slots, generations=generations)
        return here.take(np.flatnonzero(~gone))

    def source(self) -> Any:
        return ShardSource(self.shards) if self.is_global else super().source()

    def pin(self, device: torch.device, *, draws: bool) -> bool | None:
        if not self.is_global:
            return super().pin(device, draws=draws)
        return device.type == "cuda" and self.shards.pin(device)

    def planner(self, selection: Selection, budget: StepBudget, **options: Any) -> BudgetPlanner:
        if not isinstance(selection, GlobalSelection):
            return super().planner(selection, budget, **options)
        options |= {"micro_batches": self.ranks.micro_batches, "kind": self.ranks.balance or "steps"}
        return ShardBudgetPlanner(selection, budget, **options)

    # ---------------------------------------------------------------- epochs and states

    def begin_epoch(
        self, selection: Selection, look: Callable[[], tuple[Any, float]], *, fresh: bool
    ) -> tuple[Any, float]:
        return look() if self.is_global else begin_epoch(self._exchange, selection, look, fresh=fresh)

    def end_epoch(self) -> None:
        if not self.is_global:
            return
        self._exchange.doing = "ends its epoch"
        try:
            self._exchange.barrier()
        except RankError as error:  # all batches of this rank are complete
            _logger.warning("The epoch has ended here, but not on all ranks: %s", error)

    def save(self, priorities: dict[str, Any], *, full: bool) -> dict[str, Any]:
        self._exchange.doing = "calls state_dict"
        part = part_of_rank(self._exchange, priorities if self.is_global else {"ranks": [priorities]})
        return gather(self._exchange, part) if full or self._exchange.size == 1 else part

    def own(self, priorities: Mapping[str, Any]) -> Mapping[str, Any]:
        return priorities if self.is_global else own_state(self._exchange, priorities)

    def config(self, steps: StepBudget | None, *, packed: bool) -> Iterator[tuple[str, Any]]:
        if packed and self.is_global:
            yield "balance", self.ranks.balance
            yield "micro_batches", self.ranks.micro_batches
            if steps is not None:
                yield "ranks", self.slices
