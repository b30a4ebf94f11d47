"""Stage tables: the table of one stage of a shard, to which trajectories are written on this node or another one."""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import time
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import GearError, StaleIndexError, TransportError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.storage.counters import NEXT_SEQUENCE
from gear_loader.storage.edit_values import Edits
from gear_loader.storage.edits import set_rows
from gear_loader.storage.late_values import checked_fill
from gear_loader.storage.schema import Schema
from gear_loader.storage.states import READY
from gear_loader.storage.table import Table
from gear_loader.transport.capacity import free_steps, parse_capacity_report, priority_sum
from gear_loader.transport.delivery import Delivery, fill_parts, set_parts
from gear_loader.transport.store_message import Rows
from gear_loader.utils.arrays import Array

_REPORT = 1.0  # seconds after which another node is asked for a new capacity report


@dataclasses.dataclass(repr=False, eq=False)
class StageTable:
    """The table with the columns of one stage of a shard: on this node, or on another one.

    Args:
        table: the table, if it is on this node.
        peer: connection to the table's server, if it is on another node.
        origin: shard number in the table's ids; by default that of `table`.
    """

    shard: int
    stage: int
    schema: Schema
    table: Table | None = None
    peer: Any = None
    node: str = ""
    name: str = ""
    origin: Any = None

    def __post_init__(self) -> None:
        if self.origin is None:
            known = None if self.table is None else self.table.origin
            self.origin = self.shard if known is None else known
        self._report: tuple[int, float] = (0, 0.0)  # free steps and mass on the other node
        self._reported = -_REPORT

    def __str__(self) -> str:
        node = f" on node {self.node}" if self.node else ""
        name = repr(self.name) if self.name else "(private)"
        return f"Shard {self.shard}, stage {self.stage} (table {name}{node})"

    def named(self, error: GearError) -> GearError:
        """Return the same error with the table's name before its message."""
        made = type(error)(f"{self}: {error}")
        made.__cause__ = error
        return made

    # ---------------------------------------------------------------- capacity reports

    def free_steps(self) -> int:
        """Return the free steps of the table, roughly.

        The capacity report of another node is renewed after a second, and reduced by the steps sent meanwhile.

        Raises:
            TransportError: the other node did not answer.
        """
        return free_steps(self.table) if self.table is not None else self._capacity()[0]

    def mass(self) -> float:
        """Return the sum of the priorities with which trajectories were added, roughly; see `free_steps`."""
        return priority_sum(self.table) if self.table is not None else self._capacity()[1]

    def _capacity(self) -> tuple[int, float]:
        """Return free steps and mass of a table on another node."""
        if time.monotonic() - self._reported >= _REPORT:
            self._report = parse_capacity_report(self.peer.metadata("capacity", self.name).result())
            self._reported = time.monotonic()
        return self._report

    @property
    def next_sequence(self) -> int:
        """First sequence number above all numbers in the table's ids; 0 for a table on another node."""
        return 0 if self.table is None else int(self.table._engine.index.arrays.counters[NEXT_SEQUENCE])

    # ---------------------------------------------------------------- storing

    def store(self, trajectories: Sequence[Mapping[str, Any]], priorities: Array, ids: Array | None) -> Array:
        """Store trajectories in a table of this node, all or none.

        Args:
            trajectories: columns by name, of each trajectory.
            priorities: float32 [n]; `UNSET` for trajectories without a priority.
            ids: int64 [n]; None if the table numbers the trajectories itself.

        Returns:
            Their slots, int64 [n].
        """
        table = self.table
        assert table is not None
        return table._engine.store(list(trajectories), priorities, ids)

    def send(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        priorities: Array,
        ids: Array | None,
        finals: Array | None = None,
    ) -> list[concurrent.futures.Future[Array]]:
        """Send trajectories to a table of another node, in parts, each of which is stored all or none.

        For the arguments see `store` and `Engine.store`.

        Returns:
            One future of slots a part.
        """
        given = np.full(len(trajectories), -1, dtype=np.int64) if ids is None else ids
        added = self.schema.added
        rows = Rows.listed(added, trajectories)
        steps = np.array([each.length for each in rows], dtype=np.int64)
        known = priorities[priorities != UNSET]
        mass = float(known.sum()) + (len(priorities) - len(known)) * max(1.0, float(known.max(initial=0)))
        self._report = (max(0, self._report[0] - int(steps.sum())), self._report[1] + mass)
        delivery = Delivery(self.peer, self.name, added, self.peer.timeout)
        sizes = steps * added.step_bytes + added.trajectory_bytes
        sizes += np.array([each.value_bytes for each in rows], dtype=np.int64)
        futures, low = [], 0
        while low < len(rows):
            high = low + delivery.counts(sizes[low:])
            ends = None if finals is None else finals[low:high]
            part = rows[low:high], priorities[low:high], given[low:high], ends
            futures.append(self.peer.store(self.name, added, *part))
            low = high
        return futures

    def fill(self, slots: Array, generations: Array, columns: Mapping[str, Any]) -> None:
        """Fill write-once columns of trajectories in the table; leave out trajectories that are gone.

        Args:
            slots, generations: int64 [n]. columns: as for `Table.fill`.

        Raises:
            As `Table.fill`, or `RemoteTable.fill`.
        """
        if self.table is not None:
            self.table.fill(slots, generation=generations, **columns)
            return
        filler = Delivery(self.peer, self.name, self.schema, self.peer.timeout)
        fill_parts(filler, *checked_fill(self.schema, slots, generations, columns), strict=False)

    def set(self, edits: Edits, *, strict: bool) -> int:
        """Overwrite values of rows of the table; return the number of rows of trajectories that are gone.

        Raises:
            As `Table.set`, or `RemoteTable.set`.
        """
        try:
            if self.table is not None:
                return set_rows(self.table._engine, edits, strict=strict)
            return set_parts(
                Delivery(self.peer, self.name, self.schema, self.peer.timeout), edits, strict=strict
            )
        except GearError as error:
            raise self.named(error) from error


def _is_refusal(error: BaseException) -> bool:
    """Return whether the table or its server has reported the error: then it is certain that nothing was stored."""
    if not isinstance(error, TransportError):
        return True
    cause = error.__cause__
    return isinstance(cause, GearError) and not isinstance(cause, TransportError)


def remove_stored(table: Table, slots: Array, generations: Array) -> None:
    """Remove trajectories from a table; leave out trajectories that are gone."""
    state, generation, _ = table._engine.reader().slot_states()
    for slot, wanted in zip(slots.tolist(), generations.tolist(), strict=True):
        if state[slot] == READY and generation[slot] == wanted:
            with contextlib.suppress(StaleIndexError):  # evicted a moment ago
                table.remove(slot)


@dataclasses.dataclass
class Storing:
    """Stores trajectories stage after stage, in all shards at once; in stage 0 last.

    Args:
        tables: stage tables by shard and stage.
        trajectories: columns by name, of each trajectory.
        priorities: float32 [n]; `UNSET` for trajectories without a priority.
        ids: int64 [n]; None if tables number their trajectories themselves.
        groups: shard -> positions of its trajectories.
    """

    shards: Any
    tables: Sequence[Sequence[StageTable]]
    trajectories: list[dict[str, Any]]
    priorities: Array
    ids: Array | None
    groups: Mapping[int, Array]

    def __post_init__(self) -> None:
        self._stored: list[tuple[StageTable, Array, Array]] = []  # tables of this node, slots and generations
        self._sent = 0  # trajectories that stage 0 has stored on other nodes
        self._slots: Array = np.full(len(self.trajectories), -1, dtype=np.int64)

    def run(self) -> Array:
        """Store the trajectories; return their indices in stage 0, int64 [n].

        Raises:
            GearError: a table did not store them; see `Placement.extend`.
        """
        try:
            for stage in reversed(range(self.shards.num_stages)):
                tables = [self.tables[shard][stage] for shard in self.groups]
                for table in tables:
                    if table.table is not None:
                        self._store(table)
                self._send([table for table in tables if table.table is None])
        except _UncertainError as error:
            if self.ids is None:
                self._undo()
            raise error.__cause__ or error from None
        except BaseException:
            self._undo()
            raise
        return self._slots

    def _undo(self) -> None:
        """Remove the trajectories from the tables of this node."""
        for target, slots, generations in reversed(self._stored):
            assert target.table is not None
            remove_stored(target.table, slots, generations)

    def _part(self, table: StageTable) -> tuple[list[dict[str, Any]], Array, Array | None]:
        """Return the trajectories of a table, their priorities and ids."""
        rows = self.groups[table.shard]
        part = [{name: self.trajectories[row][name] for name in table.schema} for row in rows.tolist()]
        return part, self.priorities[rows], None if self.ids is None else self.ids[rows]

    def _store(self, target: StageTable) -> None:
        """Store the trajectories of a table of this node."""
        try:
            slots = target.store(*self._part(target))
        except GearError as error:
            raise target.named(error) from error
        table = target.table
        assert table is not None
        self._stored.append((target, slots, table._engine.reader().slot_states()[1][slots]))
        if target.stage == 0:
            self._slots[self.groups[target.shard]] = slots

    def _send(self, targets: list[StageTable]) -> None:
        """Send the trajectories of tables of other nodes, to all nodes at once."""
        requests = [(target, target.send(*self._part(target))) for target in targets]
        failure: tuple[StageTable, GearError] | None = None
        for target, futures in requests:
            found = []
            for future in futures:
                try:
                    found.append(future.result())
                except GearError as error:
                    if failure is None or _is_refusal(failure[1]):
                        failure = (target, error)
                    if isinstance(error, TransportError) and not _is_refusal(error):
                        self.shards.mark_lost(target.shard, error)
            if target.stage == 0:
                self._sent += sum(len(part) for part in found)
                if len(found) == len(futures):
                    self._slots[self.groups[target.shard]] = np.concatenate(found)
        if failure is not None:
            self._fail(*failure)

    def _fail(self, target: StageTable, error: GearError) -> None:
        """Raise the error for a table of another node."""
        # The error of the other node explains more than that of the request.
        cause = error.__cause__ if _is_refusal(error) and isinstance(error.__cause__, GearError) else error
        if target.stage == 0 and self._sent:
            count = len(self.trajectories)
            cause = type(cause)(
                f"{self._sent} of {count} trajectories of this call were stored on other nodes. {cause}"
            )
        named = target.named(cause)
        if target.stage == 0 and (self._sent or not _is_refusal(error)):
            raise _UncertainError from named  # stage 0 may have them: the other stages must keep them
        raise named from error


class _UncertainError(Exception):
    """Stage 0 may have stored the trajectories that were sent to it."""
