"""Rebalances shards: moves trajectories from the fullest shards to the emptiest, while training goes on."""

from __future__ import annotations

import dataclasses
import functools
import logging
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.distributed.duplicates import remove_duplicates, remove_ids
from gear_loader.distributed.failures import collect
from gear_loader.distributed.migration import Budget, MigrationSet, Mover, choose_migration
from gear_loader.distributed.records import MOVE
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.shards_state import share_state
from gear_loader.storage.filled_bits import filled_bits
from gear_loader.storage.ragged import check_fixed
from gear_loader.storage.table import Table
from gear_loader.transport.capacity import free_steps
from gear_loader.utils.arrays import Array

By = Literal["steps", "mass"]
Bundle = dict[str, Array]
_logger = logging.getLogger("gear_loader")


@dataclasses.dataclass(frozen=True)
class Flow:
    """Load that is to move from one shard to another.

    Attributes:
        source, target: numbers of the shards.
        amount: steps, or mass.
    """

    source: int
    target: int
    amount: float


def plan(loads: Array, tolerance: float) -> list[Flow]:
    """Plan the flows after which every shard's load is within a tolerance of the mean.

    Each flow goes from the heaviest shard to the lightest one, and makes one of them equal to the mean.

    Args:
        loads: load of each shard, float64 [S].
        tolerance: fraction of the mean by which loads may differ from it.
    """
    loads = loads.astype(np.float64).copy()
    mean = loads.mean()
    flows: list[Flow] = []
    while mean > 0 and np.abs(loads - mean).max() > tolerance * mean and len(flows) < len(loads):
        heavy, light = int(loads.argmax()), int(loads.argmin())
        amount = float(min(loads[heavy] - mean, mean - loads[light]))
        if not amount > 0:
            break
        flows.append(Flow(heavy, light, amount))
        loads[heavy] -= amount
        loads[light] += amount
    return flows


class _AbortedError(Exception):
    """A collective step has failed, and all ranks know; the cause is the error to raise."""


class Rebalance:
    """One rebalancing; every rank does its part at the same time.

    A trajectory is copied to its new shard under the same id, in all stages, in stage 0 last. It is removed from the
    old shard only after the new owner has reported it. A rank that is killed in between leaves both copies; the next
    rebalancing, or the next selection before it draws, removes one of them.

    Args:
        selection: the `GlobalSelection`, between two draws.
        by: load to balance: the steps of each shard, or its mass.
        max_bytes: most bytes that are moved, over all shards and stages. 0 only removes duplicates.
        tolerance: fraction of the mean by which loads may differ from it.
    """

    def __init__(self, selection: Any, *, by: By, max_bytes: int, tolerance: float) -> None:
        self._selection = selection
        self._samplers = selection.samplers.own
        self._slots_of = selection.samplers.slots_of
        shards: ShardTables = selection.shards
        self._shards = shards
        self._by = by
        self._max_bytes = max_bytes
        self._tolerance = tolerance
        self._stages = shards.num_stages
        if max_bytes:
            check_fixed(shards.table.schema, "rebalance takes")
        self._tables = (
            [(shard, 0, table) for shard, table in shards.own.items()]
            if shards.place.stage == 0
            else [(shards.place.data, shards.place.stage, shards.table)]
        )
        self._flows: list[Flow] = []
        self._sets: list[MigrationSet] = []
        self._most_steps: list[int] = []  # of each flow, that are copied at once
        # Of tables with late columns, which have one stage: of each flow, ids and bits of the columns that were copied.
        self._has_late = bool(shards.stage_table(0, 0).schema.late)
        self._filled: list[tuple[Array, Array]] = []

    def run(self) -> dict[str, Any]:
        """Rebalance the shards.

        Returns:
            "moved": number of trajectories; "steps" and "bytes" of these; "before" and "after": float64 [S], the
            shards' loads; "leftovers": number of duplicates removed. The same on every rank.

        Raises:
            RankError: another rank has failed; no trajectory was lost.
        """
        duplicates = self.remove_duplicates()
        before = self._loads()
        self._flows = plan(before, self._tolerance) if self._max_bytes else []
        moved = [np.empty(0, dtype=MOVE)]
        if self._flows:
            try:
                self._choose()
                moved = self._copy()
            except _AbortedError as error:
                self._drop_copies([np.empty(0, dtype=np.int64)] * len(self._sets))
                raise error.__cause__ or error from None
            moved = self._hand_over(moved)
        moves: Array = np.concatenate(moved)
        self._selection.redirect_updates(moves)
        steps = int(moves["length"].sum())
        return {
            "moved": len(moves),
            "steps": steps,
            "bytes": steps * self._step_bytes,
            "before": before,
            "after": self._loads() if len(moves) else before,
            "leftovers": duplicates,
        }

    # ---------------------------------------------------------------- collective steps

    def _collect(self, what: str, act: Callable[[], Bundle]) -> Bundle:
        """Run a function on all ranks at the same time; return the arrays of all ranks by their names.

        Args:
            what: name of the step in errors.
            act: this rank's part; the names of its arrays differ from those of all other ranks.

        Raises:
            _AbortedError: a rank has failed, and all ranks know.
        """
        numbers = [member.number for member in self._shards.members] or [0]
        answers, failure = collect(what, act, self._share, numbers)
        if failure is not None:
            raise _AbortedError from failure
        return {name: values for answer in answers for name, values in answer.items()}

    def _share(self, answer: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Share this rank's arrays, or the text of its error."""
        mine = {k: v if k == "error" else torch.from_numpy(np.array(v)) for k, v in answer.items()}
        answers = share_state(self._selection.exchange, mine)
        return [{k: v if k == "error" else v.numpy() for k, v in each.items()} for each in answers]

    def _run(self, what: str, act: Callable[[], Bundle]) -> Bundle:
        """As `_collect`, where no step has to be undone: raises the error itself."""
        try:
            return self._collect(what, act)
        except _AbortedError as error:
            raise error.__cause__ or error from None

    # ---------------------------------------------------------------- duplicates and loads

    def remove_duplicates(self) -> int:
        """Remove the duplicates of an interrupted migration from all shards; return their number. All ranks call it."""
        return remove_duplicates(self._tables, self._slots_of, self._shards.timeout, self._run)

    def _loads(self) -> Array:
        """Return the load of each shard, float64 [S]."""

        def measure() -> Bundle:
            loads = {}
            for shard, sampler in self._samplers.items():
                load = float(sampler.table.num_steps)
                if self._by == "mass":
                    load = float(sampler.summarize()["mass"][0])
                loads[f"{shard}"] = np.array([load], dtype=np.float64)
            return loads

        loads = self._run("measure its load", measure)
        return np.array([loads[f"{shard}"][0] for shard in range(self._shards.num_shards)])

    @property
    def _step_bytes(self) -> int:
        return sum(self._shards.stage_table(0, stage).schema.step_bytes for stage in range(self._stages))

    # ---------------------------------------------------------------- choice

    def _choose(self) -> None:
        """Choose the trajectories that move: the owner of the source decides, and shares the choice."""

        def report() -> Bundle:
            return {
                f"{shard}/{stage}": np.array(
                    [
                        free_steps(table),
                        table._engine.region.layout.max_trajectories - len(table),
                        table._engine.region.layout.block_steps,
                        table._engine.longest,
                    ]
                )
                for shard, stage, table in self._tables
            }

        capacities = self._collect("report its capacity", report)
        longest = [
            min(int(capacities[f"{flow.target}/{stage}"][3]) for stage in range(self._stages))
            for flow in self._flows
        ]
        self._most_steps = [max(1, steps // 4) for steps in longest]  # a disk tier makes room in between

        def choose() -> Bundle:
            found: Bundle = {}
            taken: dict[int, Array] = {}
            for number, flow in enumerate(self._flows):
                sampler = self._samplers.get(flow.source)
                if sampler is None:
                    continue
                excluded = taken.get(flow.source, np.empty(0, dtype=np.int64))
                chosen = choose_migration(
                    sampler,
                    self._budget(flow, capacities),
                    by_mass=self._by == "mass",
                    excluded=excluded,
                )
                taken[flow.source] = np.concatenate([excluded, chosen.ids])
                found.update({f"{number}/{name}": values for name, values in vars(chosen).items()})
            return found

        found = self._collect("choose what moves", choose)
        self._sets = [
            MigrationSet(*(found[f"{number}/{field.name}"] for field in dataclasses.fields(MigrationSet)))
            for number in range(len(self._flows))
        ]

    def _budget(self, flow: Flow, capacities: Bundle) -> Budget:
        """Return the limits of a flow: its share of the target's free space, and of `max_bytes`."""
        total = sum(each.amount for each in self._flows)
        share = flow.amount / sum(each.amount for each in self._flows if each.target == flow.target)
        stages = np.stack([capacities[f"{flow.target}/{stage}"] for stage in range(self._stages)])
        return Budget(
            load=flow.amount,
            free_steps=int(share * stages[:, 0].min()),
            free_slots=int(share * stages[:, 1].min()),
            block_steps=int(stages[:, 2].max()),
            max_steps=int(self._max_bytes * flow.amount / total) // self._step_bytes,
        )

    # ---------------------------------------------------------------- copying

    def _copy(self) -> list[Array]:
        """Copy to the new shards; return the moves of each flow, `MOVE`, of trajectories that all stages have."""
        mover = Mover(self._slots_of)
        present = [chosen.ids for chosen in self._sets]
        found: Bundle = {}
        for stages in ([s for s in reversed(range(self._stages)) if s], [0]):
            if not stages:
                continue

            # Flows into the same table run one after another, so that slots are the same in every run.
            for turn in range(1 + max(self._turns())):
                self._collect("copy trajectories", self._copying(mover, stages, present, turn))
            found = self._collect(
                "find what was copied",
                lambda stages=stages: self._arrived(stages),  # type: ignore[misc]
            )
            for number in range(len(self._flows)):
                for stage in stages:
                    arrived = found[f"{number}/{stage}/ids"]
                    present[number] = present[number][np.isin(present[number], arrived)]
        if self._has_late:
            copied = self._collect("copy columns that were filled later", lambda: self._fill(mover, found))
            for number in range(len(self._flows)):
                arrived, bits = found[f"{number}/0/ids"], copied[f"{number}"]
                self._filled.append((arrived, bits))
                present[number] = present[number][np.isin(present[number], arrived[bits >= 0])]
        self._drop_copies(present)
        return [self._moves(number, found, present[number]) for number in range(len(self._flows))]

    def _fill(self, mover: Mover, found: Bundle) -> Bundle:
        """Copy late columns from this rank's tables to what has arrived; return bits by flow, see `Mover.fill`."""
        filled: Bundle = {}
        for shard, _, table in self._tables:
            for number, flow in enumerate(self._flows):
                if flow.source == shard:
                    ids, slots, generations = (
                        found[f"{number}/0/{name}"] for name in ("ids", "slots", "generations")
                    )
                    target = self._shards.stage_table(flow.target, 0)
                    filled[f"{number}"] = mover.fill(table, ids, shard, target, slots, generations)
        return filled

    def _turns(self) -> list[int]:
        """Return the number of earlier flows into the same shard, for each flow."""
        targets = [flow.target for flow in self._flows]
        return [targets[:number].count(target) for number, target in enumerate(targets)]

    def _copying(self, mover: Mover, stages: list[int], ids: list[Array], turn: int) -> Callable[[], Bundle]:
        """Return a function that copies the flows of one turn from this rank's tables."""

        def copy() -> Bundle:
            for shard, stage, table in self._tables:
                for number, (flow, flow_turn) in enumerate(zip(self._flows, self._turns(), strict=True)):
                    if stage in stages and flow.source == shard and flow_turn == turn:
                        target = self._shards.stage_table(flow.target, stage)
                        mover.copy(table, ids[number], shard, target, self._most_steps[number])
            return {}

        return copy

    def _arrived(self, stages: list[int]) -> Bundle:
        """Return ids, slots and generations of the trajectories that have arrived in this rank's tables."""
        found: Bundle = {}
        for shard, stage, table in self._tables:
            for number, (flow, chosen) in enumerate(zip(self._flows, self._sets, strict=True)):
                if stage in stages and flow.target == shard:
                    slots = self._slots_of(shard, chosen.ids)
                    arrived = slots >= 0
                    found[f"{number}/{stage}/ids"] = chosen.ids[arrived]
                    found[f"{number}/{stage}/slots"] = slots[arrived]
                    found[f"{number}/{stage}/generations"] = table._engine.reader().slot_states()[1][
                        slots[arrived]
                    ]
        return found

    def _drop_copies(self, keep: list[Array]) -> None:
        """Remove copies from this rank's tables, except the ids to keep of each flow."""
        for shard, _, table in self._tables:
            for flow, chosen, kept in zip(self._flows, self._sets, keep, strict=False):
                if flow.target == shard:
                    remove_ids(table, self._slots_of, shard, np.setdiff1d(chosen.ids, kept))

    def _moves(self, number: int, found: Bundle, ids: Array) -> Array:
        """Return the moves of a flow, `MOVE` [n]: of the ids that all stages have."""
        flow, chosen = self._flows[number], self._sets[number]
        arrived = found[f"{number}/0/ids"]
        at = np.flatnonzero(np.isin(arrived, ids))
        source = _positions(chosen.ids, arrived[at])
        moves: Array = np.zeros(len(at), dtype=MOVE)
        moves["id"], moves["length"] = arrived[at], chosen.lengths[source]
        moves["old_shard"], moves["new_shard"] = flow.source, flow.target
        moves["old_slot"], moves["old_generation"] = chosen.slots[source], chosen.generations[source]
        moves["new_slot"] = found[f"{number}/0/slots"][at]
        moves["new_generation"] = found[f"{number}/0/generations"][at]
        return moves

    # ---------------------------------------------------------------- hand-over

    def _hand_over(self, moved: list[Array]) -> list[Array]:
        """Copy the leaves to the new owners, and remove the trajectories from their old shards.

        Returns:
            The moves without those of trajectories that stay, because columns were filled meanwhile.
        """
        for number, (flow, moves) in enumerate(zip(self._flows, moved, strict=True)):
            sampler = self._samplers.get(flow.target)
            if sampler is not None and self._selection.samplers.by_priority:
                chosen = self._sets[number]
                source = _positions(chosen.ids, moves["id"])
                sampler.take_leaves(
                    moves["new_slot"],
                    moves["new_generation"],
                    chosen.leaves_of(source),
                    chosen.counts[source],
                )

        def remove() -> Bundle:
            stay: Bundle = {}
            for shard, _, table in self._tables:
                for number, (flow, moves) in enumerate(zip(self._flows, moved, strict=True)):
                    if flow.source == shard and not self._has_late:
                        remove_ids(table, self._slots_of, shard, moves["id"])
                    elif flow.source == shard:
                        act = functools.partial(self._remove_unchanged, table, shard, number, moves["id"])
                        stay[f"{number}"] = table._engine.region.fill_lock.run(act)
            return stay

        stay = self._run("remove what has moved", remove)
        if any(map(len, stay.values())):
            moved = [moves[~np.isin(moves["id"], stay[f"{number}"])] for number, moves in enumerate(moved)]
            self._drop_copies([moves["id"] for moves in moved])
        count = sum(len(moves) for moves in moved)
        _logger.info("Moved %d trajectories between shards.", count)
        return moved

    def _remove_unchanged(self, table: Table, shard: int, number: int, ids: Array) -> Array:
        """Remove trajectories of which no column was filled since it was copied; return the ids of the others."""
        arrived, bits = self._filled[number]
        copied, slots = bits[_positions(arrived, ids)], self._slots_of(shard, ids)
        changed = (slots >= 0) & (filled_bits(table._engine.index.arrays, slots) != copied)
        remove_ids(table, self._slots_of, shard, ids[~changed])
        left: Array = ids[changed]
        return left


def _positions(ids: Array, wanted: Array) -> Array:
    """Return the positions of ids in an array of distinct ids, int64 [n]."""
    order = np.argsort(ids)
    positions: Array = order[np.searchsorted(ids, wanted, sorter=order)]
    return positions
