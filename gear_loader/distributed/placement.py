"""`Placement`: which rank's table each new trajectory goes to, and which stage of a pipeline has which column."""

from __future__ import annotations

import dataclasses
import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.distributed.global_selection import GlobalSelection
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.stage_tables import StageTable, refused, take_back
from gear_loader.distributed.stages import all_columns, check_stages
from gear_loader.distributed.topology import agreed
from gear_loader.errors import GearError, SchemaError, TransportError
from gear_loader.selection.prioritized import exponent, needs_priorities
from gear_loader.selection.tree import weigh
from gear_loader.storage.ids import joined
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.operations import UNSET
from gear_loader.storage.schema import Schema, as_mapping, copied, keeps, settled
from gear_loader.utils.arrays import Array

__all__ = ["Placement"]

Policy = Literal["round_robin", "free_space", "priority_mass", "local"]
_LOOK = 1.0  # seconds after which the tables' priorities are summed anew
_POLICIES = ("round_robin", "free_space", "priority_mass", "local")


class Placement:
    """Decides the shard of each new trajectory, and puts it there; of a pipeline, each stage's columns in its table.

    Every rank makes its own, all at the same time; then each adds when it likes. A trajectory is written straight into
    tables of this node, and sent to those of others. In a pipeline it has the same id in all stages, and comes last to
    stage 0, which draws: so nobody draws what another stage does not have yet.

    Args:
        shards: of all ranks.
        policy: ``"round_robin"``: one shard after another, each rank beginning elsewhere; ``"free_space"``: where most
            steps are free; ``"priority_mass"``: where the sum of priorities is smallest; ``"local"``: this rank's own.
        stages: column -> the stage that needs it, or several; -1 is the last. By default a column goes to every stage
            whose table has it.
        dataset: the `ReplayDataset` over `shards` for which priorities are balanced: with it the sums are those by
            which it draws, as of its last batch. Without it they are those that trajectories were added with.

    Raises:
        SchemaError: options that make no sense for these shards, or tables that do not have what `stages` says.
        RankError: another rank has failed, or was waited for too long.
    """

    def __init__(
        self,
        shards: Shards,
        policy: Policy = "round_robin",
        *,
        stages: Mapping[str, int | Sequence[int]] | None = None,
        dataset: Any = None,
    ) -> None:
        if not isinstance(shards, Shards):
            raise SchemaError(
                f"A {type(shards).__name__} was received; expected gear_loader.distributed.Shards."
            )
        if policy not in _POLICIES:
            raise SchemaError(f"policy is {policy!r}; expected one of {', '.join(_POLICIES)}.")
        if dataset is not None and getattr(dataset, "shards", None) is not shards:
            raise SchemaError(
                "dataset draws from something else; expected a ReplayDataset over these shards."
            )
        self.shards = shards
        self.policy: Policy = policy
        self._dataset = dataset
        self._holders = [
            [shards.holder(shard, stage) for stage in range(shards.num_stages)]
            for shard in range(shards.num_shards)
        ]
        schemas = [holder.schema for holder in self._holders[0]]
        self.schema = Schema(all_columns(schemas))
        """All columns that a trajectory must have."""
        if stages is not None:
            check_stages(stages, schemas)
        if shards.num_stages > 1:
            self._agree()
        self._turn = shards.exchange.rank % shards.num_shards
        self._largest = 1.0
        self._placed: Array = np.zeros(shards.num_shards)  # here, since the masses were looked at
        self._seen: Array | None = None
        self._when = -math.inf
        self._base: Array = np.zeros(shards.num_shards)
        self._lock = threading.Lock()

    def _agree(self) -> None:
        """Agree on the number from which ids are counted, above all that any table has given.

        Raises:
            SchemaError: a stage evicts by itself.
        """
        holders = [holder for stages in self._holders for holder in stages]
        told: dict[str, Any] = {"next": max(self.shards.next_number, *(h.next_sequence for h in holders))}
        for holder in holders:
            if holder.table is not None and holder.table.rules.on_full.startswith("evict"):
                told["error"] = (
                    f"{holder} has on_full={holder.table.rules.on_full!r}; stages that evict each for itself would "
                    "come to hold different trajectories. Create the tables of a pipeline with on_full='error' or "
                    "'wait', and remove what is old from stage 0 first."
                )
        answers = self.shards.exchange.share(told)
        if "error" in told:
            raise SchemaError(told["error"])
        agreed(answers, [member.number for member in self.shards.members], "place trajectories")
        self.shards.next_number = max(answer["next"] for answer in answers)

    # ---------------------------------------------------------------- adding

    def add(self, trajectory: Mapping[str, Any], priority: float | None = None) -> tuple[int, int]:
        """Place one trajectory.

        Args:
            trajectory: column name -> array or tensor ``[T, *shape]``, as for `Table.add`, with the columns of all
                stages.
            priority: as for `Table.add`.

        Returns:
            Its shard, and its index there, in stage 0.

        Raises:
            As `extend`.
        """
        shards, indices = self.extend([trajectory], priority)
        return int(shards[0]), int(indices[0])

    def extend(
        self,
        trajectories: Iterable[Mapping[str, Any]],
        priority: float | Sequence[float] | Array | None = None,
    ) -> tuple[Array, Array]:
        """Place many trajectories: each shard gets its own at once.

        Args:
            trajectories: as for `add`. priority: one for all, or [n].

        Returns:
            Their shards and their indices there, in stage 0, int64 [n] each.

        Raises:
            SchemaError: a trajectory or a priority does not fit. Nothing was changed.
            TableFullError, LockTimeoutError: a table had no room; the message names it, its shard and its stage.
            TransportError: another node did not take what it was sent; then it may be there all the same.
            After each of these what had been stored in tables of this node has been removed again. What was stored on
            other nodes stays there: in a stage other than 0, where nobody draws it, `ReplayDataset.rebalance` removes
            it; in stage 0 the message says how much.
        """
        given, lengths = self._checked(trajectories)
        priorities = checked_priorities(priority, len(given))
        if not given:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        with self._lock:
            chosen = self._choose(lengths, priorities)
            groups = {shard: np.flatnonzero(chosen == shard) for shard in np.unique(chosen).tolist()}
            numbers = self._numbers(chosen, groups) if self.shards.num_stages > 1 else None
        return chosen, _Storing(self, given, priorities, numbers, groups).run()

    def _checked(self, trajectories: Iterable[Mapping[str, Any]]) -> tuple[list[dict[str, Any]], Array]:
        if isinstance(trajectories, Mapping):
            raise SchemaError(
                "One mapping was received; expected an iterable of trajectories. For one use add()."
            )
        try:
            each = iter(trajectories)
        except TypeError:
            raise SchemaError(
                f"A {type(trajectories).__name__} was received; expected an iterable of trajectories."
            ) from None
        given, lengths = [], []
        kept = keeps(trajectories)
        for i, trajectory in enumerate(each):
            rows = as_mapping(trajectory)
            rows = settled(rows) if isinstance(rows, Mapping) else rows
            length, _ = self.schema.validate(rows, what=f"trajectory {i}")
            given.append(dict(rows) if kept else {name: copied(value) for name, value in rows.items()})
            lengths.append(length)
        longest = min(
            (
                holder.table.longest
                for stages in self._holders
                for holder in stages
                if holder.table is not None
            ),
            default=math.inf,
        )
        for i, length in enumerate(lengths):
            if length > longest:
                raise SchemaError(
                    f"Trajectory {i} has {length:,} steps; the tables hold at most {longest:,}. Create them with a "
                    "larger max_steps or split the trajectory."
                )
        return given, np.array(lengths, dtype=np.int64)

    def _numbers(self, chosen: Array, groups: Mapping[int, Array]) -> Array:
        """Ids that no other producer gives, nor a table by itself; they ascend with time as far as this node sees."""
        ids = np.empty(len(chosen), dtype=np.int64)
        step, place = self.shards.exchange.size, self.shards.exchange.rank
        for shard, rows in groups.items():
            first = max(self.shards.next_number, *(h.next_sequence for h in self._holders[shard]))
            first += (place - first) % step
            ids[rows] = joined(first + step * np.arange(len(rows)), self._holders[shard][0].origin)
            self.shards.next_number = first + step * len(rows)
        return ids

    # ---------------------------------------------------------------- choosing

    def _choose(self, lengths: Array, priorities: Array) -> Array:
        """The shard of each trajectory, int64 [n]."""
        count = self.shards.num_shards
        if self.policy == "local":
            return np.full(len(lengths), self.shards.place.data, dtype=np.int64)
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        able = [shard for shard in range(count) if shard not in lost] or list(range(count))
        if self.policy == "round_robin" or len(able) == 1:
            at = int(np.searchsorted(able, self._turn % count))
            chosen: Array = np.array(able)[(at + np.arange(len(lengths))) % len(able)]
        elif self.policy == "free_space":
            able, rooms = self._told(able, lambda shard: min(h.room() for h in self._holders[shard]))
            chosen = self._lightest(able, [-room for room in rooms], lengths)
        else:
            able, masses = self._masses(able)
            weights = self._weights(lengths, priorities)
            chosen = self._lightest(able, masses, weights)
            np.add.at(self._placed, chosen, weights)
        self._turn = int(chosen[-1]) + 1
        return chosen

    def _lightest(self, able: list[int], loads: Sequence[float], weights: Array) -> Array:
        """Each into what has the smallest load by then; of equal ones in turn."""
        count = self.shards.num_shards
        heap = [
            ((load, (shard - self._turn) % count), shard) for shard, load in zip(able, loads, strict=True)
        ]
        heapq.heapify(heap)
        chosen = np.empty(len(weights), dtype=np.int64)
        for i, weight in enumerate(weights.tolist()):
            (load, turn), shard = heap[0]
            chosen[i] = shard
            heapq.heapreplace(heap, ((load + weight, turn + count), shard))
        return chosen

    def _told(self, able: list[int], ask: Callable[[int], float]) -> tuple[list[int], list[float]]:
        """What each shard answers. Those that cannot be reached are left out if `on_failure` is "redraw"."""
        found: dict[int, float] = {}
        failure: TransportError | None = None
        for shard in able:
            try:
                found[shard] = ask(shard)
            except TransportError as error:
                self.shards.lose(shard, error)
                failure = error
        if failure is not None and (self.shards.on_failure == "raise" or not found):
            raise failure
        return list(found), list(found.values())

    def _masses(self, able: list[int]) -> tuple[list[int], list[float]]:
        """What each shard has by now, as far as it is known here."""
        selection = self._selection()
        seen = None if selection is None else selection.offers
        now = time.monotonic()
        if seen is not None and seen is not self._seen:
            self._base, self._seen = seen["mass"].astype(np.float64), seen
            self._placed[:] = 0
        elif seen is None and self._seen is None and now - self._when >= _LOOK:
            able, masses = self._told(able, lambda shard: self._holders[shard][0].mass())
            self._base[able] = masses
            self._when = now
            self._placed[:] = 0
        return able, (self._base + self._placed)[able].tolist()

    def _selection(self) -> GlobalSelection | None:
        selection = None if self._dataset is None else self._dataset._selection
        return selection if isinstance(selection, GlobalSelection) else None

    def _weights(self, lengths: Array, priorities: Array) -> Array:
        """What each new trajectory adds to its shard's mass, float64 [n]."""
        given = priorities[priorities != UNSET]
        self._largest = max(self._largest, float(given.max(initial=0)))
        weights: Array = np.where(priorities == UNSET, self._largest, priorities.astype(np.float64))
        if self._seen is None:  # the masses are those of the tables' priorities
            return weights
        selector = self._dataset.selector
        if needs_priorities(selector):
            weights = weigh(weights.astype(np.float32), *exponent(selector))
        else:
            weights = np.ones(len(lengths))
        return weights * lengths if selector.unit == "step" else weights


@dataclasses.dataclass
class _Stored:
    """What one table of this node has stored of a call."""

    holder: StageTable
    slots: Array
    generations: Array


class _Storing:
    """One call of `Placement.extend`: stage after stage, of all shards at once; stage 0 last."""

    def __init__(
        self,
        placement: Placement,
        given: list[dict[str, Any]],
        priorities: Array,
        ids: Array | None,
        groups: dict[int, Array],
    ) -> None:
        self._shards = placement.shards
        self._holders = placement._holders
        self._given = given
        self._priorities = priorities
        self._ids = ids
        self._groups = groups
        self._stored: list[_Stored] = []
        self._sent = 0  # trajectories that stage 0 has stored on other nodes
        self._slots: Array = np.full(len(given), -1, dtype=np.int64)

    def run(self) -> Array:
        """Indices in stage 0, int64 [n]."""
        try:
            for stage in reversed(range(self._shards.num_stages)):
                holders = [self._holders[shard][stage] for shard in self._groups]
                for holder in holders:
                    if holder.table is not None:
                        self._store(holder)
                self._send([holder for holder in holders if holder.table is None])
        except _UncertainError as error:
            if self._ids is None:
                self._take_back()
            raise error.__cause__ or error from None
        except BaseException:
            self._take_back()
            raise
        return self._slots

    def _take_back(self) -> None:
        for part in reversed(self._stored):
            assert part.holder.table is not None
            take_back(part.holder.table, part.slots, part.generations)

    def _part(self, holder: StageTable) -> tuple[list[dict[str, Any]], Array, Array | None]:
        """A table's trajectories, their priorities and ids."""
        rows = self._groups[holder.shard]
        some = [{name: self._given[row][name] for name in holder.schema} for row in rows.tolist()]
        return some, self._priorities[rows], None if self._ids is None else self._ids[rows]

    def _store(self, holder: StageTable) -> None:
        try:
            slots = holder.store(*self._part(holder))
        except GearError as error:
            raise holder.named(error) from error
        table = holder.table
        assert table is not None
        self._stored.append(_Stored(holder, slots, table.slot_states()[1][slots]))
        if holder.stage == 0:
            self._slots[self._groups[holder.shard]] = slots

    def _send(self, holders: list[StageTable]) -> None:
        """To other nodes, to all at once."""
        under_way = [(holder, holder.send(*self._part(holder))) for holder in holders]
        failure: tuple[StageTable, GearError] | None = None
        for holder, futures in under_way:
            found = []
            for future in futures:
                try:
                    found.append(future.result())
                except GearError as error:
                    if failure is None or refused(failure[1]):
                        failure = (holder, error)
                    if isinstance(error, TransportError) and not refused(error):
                        self._shards.lose(holder.shard, error)
            if holder.stage == 0:
                self._sent += sum(len(part) for part in found)
                if len(found) == len(futures):
                    self._slots[self._groups[holder.shard]] = np.concatenate(found)
        if failure is not None:
            self._fail(*failure)

    def _fail(self, holder: StageTable, error: GearError) -> None:
        # What the other node itself has said is of more use than that it was asked.
        said = error.__cause__ if refused(error) and isinstance(error.__cause__, GearError) else error
        if holder.stage == 0 and self._sent:
            more = f"{self._sent} of {len(self._given)} trajectories of this call were stored on other nodes. {said}"
            said = type(said)(more)
        named = holder.named(said)
        if holder.stage == 0 and (self._sent or not refused(error)):
            raise _UncertainError from named  # perhaps it is there: the other stages must have it then
        raise named from error


class _UncertainError(Exception):
    """Stage 0 may have what was sent to it."""
