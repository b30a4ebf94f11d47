"""Moving trajectories between shards until these are about equal, while training goes on."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any, Literal

import numpy as np

from gear_loader.distributed.duplicates import Leftovers, remove_ids
from gear_loader.distributed.migration import Chosen, Mover, choose
from gear_loader.distributed.records import MOVE
from gear_loader.distributed.state import share_bundle
from gear_loader.distributed.topology import described
from gear_loader.errors import RankError
from gear_loader.transport.capacity import free_steps
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.distributed.global_selection import GlobalSelection

__all__ = ["Flow", "Rebalance", "plan"]

By = Literal["steps", "mass"]
Bundle = dict[str, Array]
_logger = logging.getLogger("gear_loader")


@dataclasses.dataclass(frozen=True)
class Flow:
    """What is to go from one shard to another: steps, or mass."""

    source: int
    target: int
    amount: float


def plan(loads: Array, tolerance: float) -> list[Flow]:
    """What has to move so that no shard's load is further from the mean than a fraction of it.

    From the heaviest to the lightest, as much as makes one of them equal to the mean; and so on.

    Args:
        loads: float64 [S].
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


class _ToldError(Exception):
    """A rank has told that it failed; its error is the cause."""


class Rebalance:
    """One rebalancing, of which every rank does its part at the same time.

    A trajectory is copied to its new shard, with its id, and only removed from the old one when its new owner has said
    that it is there: in all stages, in stage 0 last. A rank that is killed in between leaves both; the next
    rebalancing, or the next selection before it draws, removes one of them.

    Args:
        selection: between two draws.
        by: what is to be about equal: the steps of each shard, or its mass.
        max_bytes: most bytes that are moved, over all shards and stages. 0 only removes what others left.
        tolerance: the fraction of the mean by which shards may differ.
    """

    def __init__(self, selection: GlobalSelection, *, by: By, max_bytes: int, tolerance: float) -> None:
        self._selection = selection
        self._shards = shards = selection.shards
        self._by = by
        self._max_bytes = max_bytes
        self._tolerance = tolerance
        self._stages = shards.num_stages
        self._tables = (
            [(shard, 0, table) for shard, table in shards.own.items()]
            if shards.place.stage == 0
            else [(shards.place.data, shards.place.stage, shards.table)]
        )
        self._flows: list[Flow] = []
        self._chosen: list[Chosen] = []

    def run(self) -> dict[str, Any]:
        """Do it.

        Returns:
            "moved": trajectories; "steps" and "bytes" of them; "before" and "after": float64 [S], the shards' loads;
            "leftovers": removed copies that an interrupted rebalancing had left. The same on every
            rank.

        Raises:
            RankError: another rank has failed; nothing was lost.
        """
        leftovers = self.remove_leftovers()
        before = self._loads()
        self._flows = plan(before, self._tolerance) if self._max_bytes else []
        moved = [np.empty(0, dtype=MOVE)]
        if self._flows:
            try:
                self._choose(before)
                moved = self._copy()
            except _ToldError as error:
                self._drop_copies([np.empty(0, dtype=np.int64)] * len(self._chosen))
                raise error.__cause__ or error from None
            self._hand_over(moved)
        moves: Array = np.concatenate(moved)
        self._selection.forward(moves)
        lengths = int(moves["length"].sum())
        return {
            "moved": len(moves),
            "steps": lengths,
            "bytes": lengths * self._step_bytes,
            "before": before,
            "after": self._loads() if len(moves) else before,
            "leftovers": leftovers,
        }

    # ---------------------------------------------------------------- together

    def _together(self, what: str, act: Callable[[], Bundle]) -> Bundle:
        """Do something at the same time as the others; what all have told, by names that no two ranks use.

        Raises:
            _ToldError: one of them could not; all know it.
        """
        failure: Exception | None = None
        try:
            told = act()
        except Exception as error:  # the others must hear of it first
            failure = error
            told = {"error": np.frombuffer(described(error).encode(), dtype=np.uint8)}
        answers = share_bundle(self._selection.exchange, told)
        if failure is not None:
            raise _ToldError from failure
        for rank, answer in enumerate(answers):
            if "error" in answer:
                name = self._shards.members[rank].number
                raise _ToldError from RankError(
                    f"Rank {name} could not {what}: {answer['error'].tobytes().decode()}"
                )
        return {name: values for answer in answers for name, values in answer.items()}

    def _all(self, what: str, act: Callable[[], Bundle]) -> Bundle:
        """As `_together`, where nothing has to be undone."""
        try:
            return self._together(what, act)
        except _ToldError as error:
            raise error.__cause__ or error from None

    # ---------------------------------------------------------------- what there is

    def remove_leftovers(self) -> int:
        """Remove copies that an interrupted migration has left; how many, in all shards. All ranks call it."""
        leftovers = Leftovers(self._tables, self._selection.slots_of, patience=self._shards.timeout)
        leftovers.learn_brought(self._all("list its ids", leftovers.brought))
        leftovers.learn_held(self._all("find ids", leftovers.held))
        removed = self._all("remove what was left", leftovers.remove)
        return sum(int(values[0]) for values in removed.values())

    def _loads(self) -> Array:
        def look() -> Bundle:
            told = {}
            for shard, engine in self._selection.engines.items():
                steps = engine.job.table.num_steps
                mass = float(engine.publish()["mass"][0]) if self._by == "mass" else 0.0
                told[f"{shard}"] = np.array([mass if self._by == "mass" else steps], dtype=np.float64)
            return told

        told = self._all("say what it has", look)
        return np.array([told[f"{shard}"][0] for shard in range(self._shards.num_shards)])

    @property
    def _step_bytes(self) -> int:
        return sum(self._shards.holder(0, stage).schema.step_bytes for stage in range(self._stages))

    # ---------------------------------------------------------------- what goes

    def _choose(self, loads: Array) -> None:
        """Which trajectories move: the owners of the shards that they leave decide, and tell all."""

        def look() -> Bundle:
            return {
                f"{shard}/{stage}": np.array(
                    [
                        free_steps(table),
                        table.region.layout.max_trajectories - len(table),
                        table.region.layout.block_steps,
                    ]
                )
                for shard, stage, table in self._tables
            }

        rooms = self._together("say how much room it has", look)
        total = sum(flow.amount for flow in self._flows)
        into = {
            flow.target: sum(f.amount for f in self._flows if f.target == flow.target) for flow in self._flows
        }

        def pick() -> Bundle:
            told: Bundle = {}
            taken: dict[int, Array] = {}
            for number, flow in enumerate(self._flows):
                engine = self._selection.engines.get(flow.source)
                if engine is None:
                    continue
                told_rooms = np.stack([rooms[f"{flow.target}/{stage}"] for stage in range(self._stages)])
                share = flow.amount / into[flow.target]
                chosen = choose(
                    engine,
                    by_mass=self._by == "mass",
                    amount=flow.amount,
                    steps=int(share * told_rooms[:, 0].min()),
                    count=int(share * told_rooms[:, 1].min()),
                    block_steps=int(told_rooms[:, 2].max()),
                    most_steps=int(self._max_bytes * flow.amount / total) // self._step_bytes,
                    without=taken.get(flow.source),
                )
                taken[flow.source] = np.concatenate(
                    [taken.get(flow.source, np.empty(0, dtype=np.int64)), chosen.ids]
                )
                told.update({f"{number}/{name}": values for name, values in chosen.to_arrays().items()})
            return told

        found = self._together("choose what moves", pick)
        self._chosen = [
            Chosen.from_arrays({name: found[f"{number}/{name}"] for name in Chosen.names()})
            for number in range(len(self._flows))
        ]

    # ---------------------------------------------------------------- copying

    def _copy(self) -> list[Array]:
        """Copy to the new shards; what has arrived in all stages: `MOVE` of each flow."""
        mover = Mover(self._shards, self._selection.slots_of)
        present = [chosen.ids for chosen in self._chosen]
        found: Bundle = {}
        for stages in ([s for s in reversed(range(self._stages)) if s], [0]):
            if not stages:
                continue

            # Into a table from one shard after another, so that everything gets the same place in every run.
            for turn in range(1 + max(self._turns())):
                self._together("copy trajectories", self._copying(mover, stages, present, turn))
            found = self._together("find what was copied", lambda stages=stages: self._arrived(stages))  # type: ignore[misc]
            for number in range(len(self._flows)):
                for stage in stages:
                    here = found[f"{number}/{stage}/ids"]
                    present[number] = present[number][np.isin(present[number], here)]
        self._drop_copies(present)
        return [self._moves(number, found, present[number]) for number in range(len(self._flows))]

    def _turns(self) -> list[int]:
        """How many flows into the same shard come before each."""
        targets = [flow.target for flow in self._flows]
        return [targets[:number].count(target) for number, target in enumerate(targets)]

    def _copying(
        self, mover: Mover, stages: list[int], wanted: list[Array], turn: int
    ) -> Callable[[], Bundle]:
        def copy() -> Bundle:
            for shard, stage, table in self._tables:
                for flow, ids, its_turn in zip(self._flows, wanted, self._turns(), strict=True):
                    if stage in stages and flow.source == shard and its_turn == turn:
                        mover.copy(table, ids, shard, self._shards.holder(flow.target, stage))
            return {}

        return copy

    def _arrived(self, stages: list[int]) -> Bundle:
        """Which of the trajectories that were to come to this rank's tables are there."""
        told: Bundle = {}
        for shard, stage, table in self._tables:
            for number, (flow, chosen) in enumerate(zip(self._flows, self._chosen, strict=True)):
                if stage in stages and flow.target == shard:
                    slots = self._selection.slots_of(shard, chosen.ids)
                    here = slots >= 0
                    told[f"{number}/{stage}/ids"] = chosen.ids[here]
                    told[f"{number}/{stage}/slots"] = slots[here]
                    told[f"{number}/{stage}/generations"] = table.slot_states()[1][slots[here]]
        return told

    def _drop_copies(self, keep: list[Array]) -> None:
        """Remove copies that did not come to all stages from this rank's tables."""
        for shard, _, table in self._tables:
            for flow, chosen, kept in zip(self._flows, self._chosen, keep, strict=False):
                if flow.target == shard:
                    remove_ids(table, self._selection.slots_of, shard, np.setdiff1d(chosen.ids, kept))

    def _moves(self, number: int, found: Bundle, ids: Array) -> Array:
        flow, chosen = self._flows[number], self._chosen[number]
        there = found[f"{number}/0/ids"]
        at = np.flatnonzero(np.isin(there, ids))
        by_id = np.argsort(chosen.ids)
        was = by_id[np.searchsorted(chosen.ids, there[at], sorter=by_id)]
        moves: Array = np.zeros(len(at), dtype=MOVE)
        moves["id"], moves["length"] = there[at], chosen.lengths[was]
        moves["old_shard"], moves["new_shard"] = flow.source, flow.target
        moves["old_slot"], moves["old_generation"] = chosen.slots[was], chosen.generations[was]
        moves["new_slot"] = found[f"{number}/0/slots"][at]
        moves["new_generation"] = found[f"{number}/0/generations"][at]
        return moves

    # ---------------------------------------------------------------- the end

    def _hand_over(self, moved: list[Array]) -> None:
        """The new owners take over what was learnt, the old ones remove what has moved."""
        for number, (flow, moves) in enumerate(zip(self._flows, moved, strict=True)):
            engine = self._selection.engines.get(flow.target)
            if engine is not None and self._selection.by_priority:
                chosen = self._chosen[number]
                by_id = np.argsort(chosen.ids)
                was = by_id[np.searchsorted(chosen.ids, moves["id"], sorter=by_id)]
                engine.take_leaves(
                    moves["new_slot"], moves["new_generation"], chosen.leaves_of(was), chosen.counts[was]
                )

        def remove() -> Bundle:
            for shard, _, table in self._tables:
                for flow, moves in zip(self._flows, moved, strict=True):
                    if flow.source == shard:
                        remove_ids(table, self._selection.slots_of, shard, moves["id"])
            return {}

        self._all("remove what has moved", remove)
        count = sum(len(moves) for moves in moved)
        _logger.info("Moved %d trajectories between shards.", count)
