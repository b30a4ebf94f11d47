"""`Placement`: decides which shard each new trajectory goes to, and stores it there."""

from __future__ import annotations

import heapq
import math
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.shard_tables import ShardTables
from gear_loader.distributed.stage_tables import Storing
from gear_loader.errors import SchemaError, TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.selection.weights import weigh
from gear_loader.storage.ids import joined
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.ragged_input import copied_ragged, with_records
from gear_loader.storage.schema import Column, Schema, as_mapping, keeps, settled
from gear_loader.utils.arrays import Array

Policy = Literal["round_robin", "free_space", "priority_mass", "local"]
_REPORT = 1.0  # seconds after which the tables' priorities are summed again
_POLICIES = ("round_robin", "free_space", "priority_mass", "local")


class Placement:
    """Chooses a shard for each new trajectory and stores it there; in a pipeline, each stage's columns in its table.

    All ranks must make one at the same time; then each rank adds trajectories at any time. A trajectory is written
    directly into tables of this node, and sent to those of other nodes. In a pipeline it has the same id in all stages.
    Stage 0, which draws, stores it last, so no rank draws a trajectory that another stage does not have.

    Args:
        shards: the sharded table.
        policy: ``"round_robin"``: one shard after another, each rank starting at a different one; ``"free_space"``: the
            shard with most free steps; ``"priority_mass"``: the shard with the smallest sum of priorities; ``"local"``:
            this rank's own shard.
        stages: column -> the stage that needs it, or several; -1 is the last. By default a column goes to every stage
            whose table has it.
        dataset: for ``"priority_mass"``: the `ReplayDataset` over `shards` whose sums of priorities, at its last batch,
            are balanced. Without it, the sums are of the priorities of added trajectories.

    Raises:
        SchemaError: options that do not fit these shards, or tables without the columns that `stages` names.
        RankError: another rank has failed, or did not answer before the deadline.
    """

    def __init__(
        self,
        shards: ShardTables,
        policy: Policy = "round_robin",
        *,
        stages: Mapping[str, int | Sequence[int]] | None = None,
        dataset: Any = None,
    ) -> None:
        if not isinstance(shards, ShardTables):
            raise SchemaError(
                f"A {type(shards).__name__} was received; expected gear_loader.distributed.Shards."
            )
        if policy not in _POLICIES:
            raise SchemaError(f"policy is {policy!r}; expected one of {', '.join(_POLICIES)}.")
        if dataset is not None and getattr(dataset, "shards", None) is not shards:
            raise SchemaError("dataset draws from another table; expected a ReplayDataset over these shards.")
        self.shards = shards
        self.policy: Policy = policy
        self._dataset = dataset
        self._tables = [
            [shards.stage_table(shard, stage) for stage in range(shards.num_stages)]
            for shard in range(shards.num_shards)
        ]
        schemas = [table.schema for table in self._tables[0]]
        self.schema = Schema(all_columns(schemas))
        if self.schema.late:
            raise SchemaError(
                f"The tables have the write-once columns {list(self.schema.late)}; expected none, as their "
                "trajectories are not placed for now. Add them to the rank's own table."
            )
        """Columns of a trajectory, of all stages."""
        if stages is not None:
            check_stages(stages, schemas)
        if shards.num_stages > 1:
            self._agree()
        self._turn = shards.exchange.rank % shards.num_shards
        self._largest = 1.0
        # Mass that this rank has added since the last report.
        self._placed: Array = np.zeros(shards.num_shards)
        self._summaries: Array | None = None
        self._reported = -math.inf
        self._base: Array = np.zeros(shards.num_shards)
        self._lock = threading.Lock()

    def _agree(self) -> None:
        """Agree with all ranks on the next number of ids, above the ids of all tables.

        Raises:
            SchemaError: a table of a pipeline evicts trajectories.
        """
        tables = [table for stages in self._tables for table in stages]

        def report() -> dict[str, Any]:
            for table in tables:
                if table.table is not None and table.table.rules.on_full.startswith("evict"):
                    raise SchemaError(
                        f"{table} has on_full={table.table.rules.on_full!r}; stages that evict independently would "
                        "come to hold different trajectories. Create the tables of a pipeline with on_full='error' or "
                        "'wait', and remove old trajectories from stage 0 first."
                    )
            return {"next": max(self.shards.next_number, *(table.next_sequence for table in tables))}

        numbers = [member.number for member in self.shards.members]
        answers = run_on_all("place trajectories", report, self.shards.exchange.share, numbers)
        self.shards.next_number = max(answer["next"] for answer in answers)

    # ---------------------------------------------------------------- adding

    def add(self, trajectory: Mapping[str, Any], priority: float | None = None) -> tuple[int, int]:
        """Place one trajectory.

        Args:
            trajectory: column name -> array or tensor ``[T, *shape]``, as for `Table.add`, with the columns of all
                stages.
            priority: as for `Table.add`.

        Returns:
            Its shard, and its index there in stage 0.

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
        """Place many trajectories; those of one shard are stored together.

        Args:
            trajectories: as for `add`.
            priority: one for all, or [n].

        Returns:
            Their shards, and their indices there in stage 0, int64 [n] each.

        Raises:
            SchemaError: a trajectory or a priority does not fit. Nothing was changed.
            TableFullError, LockTimeoutError: a table was full; the message names it, its shard and its stage.
            TransportError: another node did not confirm trajectories; it may have stored them all the same.

        After these errors, trajectories that were stored in tables of this node have been removed again. Those stored
        on other nodes stay: in stages other than 0 they are never drawn, and `ReplayDataset.rebalance` removes them;
        for stage 0 the message says how many there are.
        """
        given, lengths = self._checked(trajectories)
        priorities = checked_priorities(priority, len(given))
        if not given:
            return np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
        with self._lock:
            chosen = self._choose(lengths, priorities)
            groups = {shard: np.flatnonzero(chosen == shard) for shard in np.unique(chosen).tolist()}
            numbers = self._numbers(chosen, groups) if self.shards.num_stages > 1 else None
        storing = Storing(self.shards, self._tables, given, priorities, numbers, groups)
        return chosen, storing.run()

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
        given, lengths, schema = [], [], self.schema
        kept = keeps(trajectories)
        for i, trajectory in enumerate(each):
            rows = as_mapping(trajectory, schema.objects)
            rows = settled(rows) if isinstance(rows, Mapping) else rows
            if not schema.ragged or not isinstance(rows, Mapping):
                lengths.append(schema.validate(rows, what=f"trajectory {i}")[0])
            given.append(dict(rows) if kept else {name: copied_ragged(each) for name, each in rows.items()})
        if schema.ragged:
            records, _ = with_records(schema, given)
            lengths = [schema.validate(rows, what=f"trajectory {i}")[0] for i, rows in enumerate(records)]
        longest = min(
            (
                table.table._engine.longest
                for stages in self._tables
                for table in stages
                if table.table is not None
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
        """Return new ids, int64 [n], distinct from those of all other ranks and tables; they ascend on a node."""
        ids = np.empty(len(chosen), dtype=np.int64)
        step, place = self.shards.exchange.size, self.shards.exchange.rank
        for shard, rows in groups.items():
            first = max(self.shards.next_number, *(table.next_sequence for table in self._tables[shard]))
            first += (place - first) % step
            ids[rows] = joined(first + step * np.arange(len(rows)), self._tables[shard][0].origin)
            self.shards.next_number = first + step * len(rows)
        return ids

    # ---------------------------------------------------------------- choosing

    def _choose(self, lengths: Array, priorities: Array) -> Array:
        """Choose the shard of each trajectory, int64 [n]."""
        count = self.shards.num_shards
        if self.policy == "local":
            return np.full(len(lengths), self.shards.place.data, dtype=np.int64)
        lost = self.shards.lost() if self.shards.on_failure == "redraw" else []
        reachable = [shard for shard in range(count) if shard not in lost] or list(range(count))
        if self.policy == "round_robin" or len(reachable) == 1:
            at = int(np.searchsorted(reachable, self._turn % count))
            chosen: Array = np.array(reachable)[(at + np.arange(len(lengths))) % len(reachable)]
        elif self.policy == "free_space":
            reachable, free = self._reports(
                reachable, lambda shard: min(table.free_steps() for table in self._tables[shard])
            )
            chosen = self._lightest(reachable, [-steps for steps in free], lengths)
        else:
            reachable, masses = self._masses(reachable)
            weights = self._weights(lengths, priorities)
            chosen = self._lightest(reachable, masses, weights)
            np.add.at(self._placed, chosen, weights)
        self._turn = int(chosen[-1]) + 1
        return chosen

    def _lightest(self, shards: list[int], loads: Sequence[float], weights: Array) -> Array:
        """Assign each trajectory to the shard with the smallest load at that point, int64 [n]; equal loads in turn.

        Args:
            loads: load of each of these shards.
            weights: load of each trajectory.
        """
        count = self.shards.num_shards
        heap = [
            ((load, (shard - self._turn) % count), shard) for shard, load in zip(shards, loads, strict=True)
        ]
        heapq.heapify(heap)
        chosen = np.empty(len(weights), dtype=np.int64)
        for i, weight in enumerate(weights.tolist()):
            (load, turn), shard = heap[0]
            chosen[i] = shard
            heapq.heapreplace(heap, ((load + weight, turn + count), shard))
        return chosen

    def _reports(self, shards: list[int], report: Callable[[int], float]) -> tuple[list[int], list[float]]:
        """Ask shards for a figure; leave out shards that cannot be reached if `on_failure` is "redraw".

        Args:
            report: returns the figure of a shard.

        Returns:
            Numbers of the shards that answered, and their figures.
        """
        found: dict[int, float] = {}
        failure: TransportError | None = None
        for shard in shards:
            try:
                found[shard] = report(shard)
            except TransportError as error:
                self.shards.mark_lost(shard, error)
                failure = error
        if failure is not None and (self.shards.on_failure == "raise" or not found):
            raise failure
        return list(found), list(found.values())

    def _masses(self, shards: list[int]) -> tuple[list[int], list[float]]:
        """Return the shards that answered and their masses, as far as this rank knows them."""
        summaries = getattr(self._dataset and self._dataset._selection, "summaries", None)
        now = time.monotonic()
        if summaries is not None and summaries is not self._summaries:
            self._base, self._summaries = summaries["mass"].astype(np.float64), summaries
            self._placed[:] = 0
        elif summaries is None and self._summaries is None and now - self._reported >= _REPORT:
            shards, masses = self._reports(shards, lambda shard: self._tables[shard][0].mass())
            self._base[shards] = masses
            self._reported = now
            self._placed[:] = 0
        return shards, (self._base + self._placed)[shards].tolist()

    def _weights(self, lengths: Array, priorities: Array) -> Array:
        """Return the mass that each new trajectory adds to its shard, float64 [n]."""
        given = priorities[priorities != UNSET]
        self._largest = max(self._largest, float(given.max(initial=0)))
        weights: Array = np.where(priorities == UNSET, self._largest, priorities.astype(np.float64))
        if self._summaries is None:  # masses are sums of the tables' priorities
            return weights
        sampler = self._dataset.sampler
        by_priority = sampler.by_priority
        weights = (
            weigh(weights.astype(np.float32), *sampler.exponent) if by_priority else np.ones(len(lengths))
        )
        return weights * lengths if sampler.unit == "step" else weights


def all_columns(schemas: Sequence[Schema]) -> dict[str, Column]:
    """Return the columns of all stages.

    Raises:
        SchemaError: two stages have different columns of one name.
    """
    columns: dict[str, Column] = {}
    for stage, schema in enumerate(schemas):
        for name, column in schema.items():
            if columns.setdefault(name, column) != column:
                raise SchemaError(
                    f"Column {name!r} is {column} in the tables of stage {stage} and {columns[name]} in those of an "
                    "earlier stage; expected the same wherever a column is needed."
                )
    return columns


def check_stages(stages: Any, schemas: Sequence[Schema]) -> None:
    """Check that the tables of each stage have the columns that a mapping assigns to it.

    Args:
        stages: column -> stage, or several stages; -1 is the last.
        schemas: columns of the tables of each stage.

    Raises:
        SchemaError: a table has other columns, or `stages` is another kind of value.
    """
    if not isinstance(stages, Mapping):
        raise SchemaError(f"stages is {stages!r}; expected a mapping of column names to stages.")
    wanted: list[set[str]] = [set() for _ in schemas]
    for name, numbers in stages.items():
        several = [numbers] if isinstance(numbers, (int, np.integer)) else numbers
        if isinstance(several, str) or not isinstance(several, Sequence) or not several:
            raise SchemaError(f"stages[{name!r}] is {numbers!r}; expected a stage or a list of stages.")
        for number in several:
            whole = isinstance(number, (int, np.integer)) and not isinstance(number, bool)
            if not whole or not -len(schemas) <= number < len(schemas):
                raise SchemaError(
                    f"stages[{name!r}] has {number!r}; expected stages from 0 to {len(schemas) - 1}, or -1 for the "
                    "last."
                )
            wanted[number].add(name)
    for stage, (schema, names) in enumerate(zip(schemas, wanted, strict=True)):
        if set(schema) != names:
            raise SchemaError(
                f"The tables of stage {stage} have the columns {sorted(schema)}; stages assigns {sorted(names)} to it. "
                "Create each stage's tables with the columns that it needs."
            )
