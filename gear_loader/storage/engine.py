"""The storage engine of a table: its region, index, readers and disk, under the public `Table`."""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
import functools
import logging
import os
import threading
import weakref
from collections.abc import Collection, Mapping, Sequence
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.errors import LockTimeoutError, SchemaError
from gear_loader.native import copying
from gear_loader.storage.allocation import Claim
from gear_loader.storage.background_loading import Loading
from gear_loader.storage.block_sizes import waste_remedy
from gear_loader.storage.counted_stats import stats_of
from gear_loader.storage.counters import (
    NUM_FREE_BLOCKS,
    NUM_READY,
    NUM_SPILLED,
    NUM_STEPS,
    TOLD,
    WRITING_STEPS,
)
from gear_loader.storage.device_rows import DeviceRows
from gear_loader.storage.disk import DiskWriter, LostRowsError, TierReader, ValueReader
from gear_loader.storage.disk_records import MovedRowsError
from gear_loader.storage.incoming import Steps, listed
from gear_loader.storage.index import INLINE_BYTES, Index
from gear_loader.storage.operations.view import EVICT_LOWEST, EVICT_OLDEST, REFUSE
from gear_loader.storage.payload import PayloadReader, check_payload_fits, write_payload
from gear_loader.storage.prefixes import Prefixes
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.reader import TableReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import Region
from gear_loader.storage.schema import Schema
from gear_loader.storage.statistics import Statistics
from gear_loader.storage.stats import TableStats
from gear_loader.storage.table_rules import OnFull, Rules
from gear_loader.storage.tier_counts import KEEP, KEEPS, pack_priorities
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.formatting import size
from gear_loader.utils.notices import notice, notices
from gear_loader.utils.provided import provided

_logger = logging.getLogger("gear_loader")
_POLICIES: dict[str, tuple[int, bool]] = {  # `evict` and `wait` of `Index.begin`
    "error": (REFUSE, False),
    "evict_oldest": (EVICT_OLDEST, False),
    "evict_lowest_priority": (EVICT_LOWEST, False),
    "wait": (REFUSE, True),
}


class Sampled:
    """The datasets of `Table.sample`: options and dataset of each, one call at a time."""

    def __init__(self) -> None:
        self.mutex = threading.RLock()
        self.datasets: list[tuple[dict[str, Any], Any]] = []


class Engine:
    """What a `gear_loader.Table` consists of, for the other parts of the package.

    Args:
        region: memory of the table. on_full: policy of additions through this handle; by default that of the table.
        timeout: seconds until a wait for space or the rate limiter times out.

    Attributes:
        schema, name, rules, on_full: as of the table. policy: `on_full` as the arguments `evict` and `wait` of
        `Index.begin`. longest: steps of the longest trajectory that the table can hold. disk: writes the table into a
        directory in the background, or None. device: the GPU in whose memory the blocks lie, or None. group_columns:
        what finds trajectories by a column, by its name (`group_input`).
    """

    def __init__(
        self, region: Region, *, on_full: OnFull | None = None, timeout: float | None = None
    ) -> None:
        self.region = region
        self.disk: DiskWriter | None = None
        self.statistics: Statistics | None = None
        self.loading: Loading | None = None
        self._index: Index | None = Index(region)
        self.device = None if region.layout.device is None else torch.device(region.layout.device)
        self._tier_reader: TierReader | None = None
        self.sampled = Sampled()
        self._index.admission.timeout = timeout
        layout = region.layout
        self.schema: Schema = layout.schema
        self.name: str | None = region.name
        self.rules: Rules = layout.rules
        self.on_full: OnFull = on_full or layout.rules.on_full
        self.policy = _POLICIES[self.on_full]
        self.columns: Array = np.array([region.column_place(name)[:4] for name in layout.schema])
        """int64 [C, 4]: address of each column's first step, bytes from block to block, of a step, and from step to
        step in a block."""
        once = np.array([column.trajectory for column in layout.schema.values()])
        added = np.array([not column.late for column in layout.schema.values()])
        self.step_columns: Array = np.ascontiguousarray(self.columns[~once & added])
        """As `columns`, of those in ``schema.added.steps``."""
        targets = self.columns.copy()
        targets[once, 1] *= -1
        self.targets: Array = np.ascontiguousarray(targets[added])
        """The columns that are added, for `copying.scatter`."""
        fewest = min(layout.writable_blocks, layout.host_blocks or layout.writable_blocks)
        self.longest: int = min(layout.max_steps, fewest * layout.block_steps)
        most = INLINE_BYTES - layout.schema.trajectory_bytes
        self.longest_inline: int = (
            min(self.longest, most // layout.schema.step_bytes) if self.device is None else -1
        )
        """Rows of the longest trajectory that `Index.store_one` takes."""
        self.group_columns: dict[str, Any] = {}
        _engines.add(self)

    @property
    def index(self) -> Index:
        """The index.

        Raises:
            GearError: the table is closed or lost in a fork.
        """
        if self._index is None:
            raise self.region.absence()
        return self._index

    def check_open(self) -> None:
        """Raise GearError if the table is closed or lost in a fork."""
        if self._index is None:
            raise self.region.absence()

    def reader(self) -> TableReader:
        """The read interface, for reads under a read ticket; raises GearError if the table is closed."""
        index = self._index
        return self.index.reader if index is None else index.reader

    def close(self) -> None:
        """See `Table.close`."""
        if self.loading is not None:
            self.loading.cancel(10.0)
        try:
            if self.disk is not None:
                self.disk.close()
        finally:
            self._index = None
            self.sampled.datasets.clear()
            self.__dict__.pop("payload", None)  # it refers to the memory
            self._tier_reader = None  # closes its files
            self.region.close()

    def __repr__(self) -> str:
        name, index, region = self.name or "private", self._index, self.region
        if index is None:
            return f"<Table {name}, {'of the parent process' if region.is_lost else 'closed'}>"
        layout, counters = region.layout, index.arrays.counters
        count, steps = int(counters[NUM_READY]), int(counters[NUM_STEPS])
        text = (
            f"{count:,} of {layout.max_trajectories:,} trajectories, {steps:,} of {layout.max_steps:,} steps, "
            f"{size(max(steps, 0) * layout.schema.step_bytes)} in a region of {size(layout.region_bytes)}"
        )
        if self.device is not None:
            text += f" and {size(layout.device_bytes)} of {self.device}"
        return f"<Table {name}{'' if count else ', empty'}: {text}>"

    # ---------------------------------------------------------------- adding

    def store(
        self,
        trajectories: Sequence[Mapping[str, Any]],
        priorities: Array,
        ids: Array | None = None,
        finals: Array | None = None,
        *,
        unique: bool = False,
        index: Index | None = None,
    ) -> Array:
        """`extend_as` with validated priorities and ids, for transports.

        Args:
            trajectories: mappings as for `add`.
            priorities: float32 [n], -1 for a trajectory without one.
            ids: int64 [n], -1 for a new id; None for new ids only.
            finals: int64 [n], 1 if the last row of the trajectory is its final step, else 0; None for none.
            unique: whether no trajectory can have one of `ids`, so that the table is not searched for them.
            index: of this table, with other time-outs; by default its own.

        Returns:
            Indices of the trajectories, int64 [n].

        Raises:
            As `extend_as`.
        """
        return self.store_steps(
            listed(self.schema.added, trajectories), priorities, ids, finals, unique=unique, index=index
        )

    def store_steps(
        self,
        steps: Steps,
        priorities: Array,
        ids: Array | None = None,
        finals: Array | None = None,
        *,
        unique: bool = False,
        index: Index | None = None,
        prefixes: Prefixes | None = None,
    ) -> Array:
        """As `store`, for steps that fit the schema, and that come after `prefixes`."""
        index = self.index if index is None else index
        if self.device is not None and self.region.device_memory is None:
            raise SchemaError(
                f"Trajectories were to be added to table {self.name!r}, whose blocks are in the memory of "
                f"{self.device}; only the process that created it adds. Send them there, or create the table in host "
                "memory."
            )
        lengths = steps.lengths if finals is None else steps.lengths - finals
        lengths = lengths if prefixes is None else lengths + prefixes.steps
        self._check_lengths(lengths)
        limiter = self.rules.rate_limiter
        if limiter is not None:
            limiter.check_insert(len(steps.lengths))
        evict, wait = self.policy
        payload = steps.payload if prefixes is None else prefixes.payload
        if payload is not None:
            check_payload_fits(payload, self.region.layout.payload)
        elif prefixes is None and self.device is None and (ids is None or unique):
            stored = index.store(
                self.targets,
                steps.lengths,
                steps.addresses,
                priorities,
                ids=ids,
                finals=finals,
                evict=evict,
                wait=wait,
                step_bytes=self.schema.step_bytes,
            )
            if stored is not None:
                return stored
        claim = Claim(len(steps.lengths))
        try:
            slots, blocks = index.begin(
                lengths,
                finals=finals,
                evict=evict,
                wait=wait,
                ids=ids,
                unique=unique,
                claim=claim,
                prefixes=prefixes,
            )
            if payload is not None:
                assert claim.generations is not None
                heap = self.region.payload()
                offsets = index.place_payload(heap, payload, slots, claim.generations, evict=evict, wait=wait)
                if not write_payload(payload, heap, offsets):
                    raise index.arrays.corrupt("a ragged value has a part outside of its memory")
            for to, place, size in () if prefixes is None else prefixes.records:
                ctypes.memmove(to, place, size)
            self._write(blocks, steps if prefixes is None else prefixes.rows)
            index.commit(slots, priorities)
        except BaseException as error:
            if (claim.slots >= 0).any():
                may_wait = not isinstance(error, LockTimeoutError)
                index.abort(claim.slots, wait=may_wait, generations=claim.generations)
            raise
        return slots

    def store_one(
        self, index: Index, rows: int, addresses: list[int], final: int, priority: float, identity: int
    ) -> int | None:
        """`store` of one small trajectory that fits the schema, without a wait.

        Args:
            index: of this table. rows: its rows, the last `final` (0 or 1) of which are final steps.
            addresses: of each column's rows. priority: valid, or -1. identity: an id that a client has made up.

        Returns:
            Its index; None, having done nothing, if `store` has to be used, or to raise an error.
        """
        if rows > self.longest_inline or rows - final > self.longest:
            return None
        return index.store_one(
            self.targets,
            rows - final,
            addresses,
            priority,
            evict=self.policy[0],
            final=final,
            identity=identity,
        )

    def _check_lengths(self, lengths: Array) -> None:
        if len(lengths) and lengths.max() > self.longest:
            bad, hosted = int(lengths.argmax()), self.region.layout.host_blocks > 0
            needs = "memory and host: it has to fit into either" if hosted else "max_blocks, if given"
            raise SchemaError(
                f"Trajectory {bad} has {lengths[bad]:,} steps; this table holds at most {self.longest:,}. "
                f"Create it with a larger max_steps (and {needs}) or split the trajectory."
            )

    def _write(self, ids: Array, steps: Steps) -> None:
        self.check_open()
        values = ids, steps.addresses, steps.lengths
        if self.device is not None:
            with self.region.using() as memory:
                memory.write(list(self.schema.added), self.targets, *values)
            return
        copying.scatter(self.targets, self.region.layout.block_steps, *values)

    def free_steps(self) -> int:
        """Approximate number of steps that fit without eviction. Takes no lock."""
        counters, layout = self.index.arrays.counters, self.region.layout
        steps = layout.max_steps - int(counters[NUM_STEPS] + counters[WRITING_STEPS])
        if not self.moves:  # which makes room in memory
            steps = min(steps, int(counters[NUM_FREE_BLOCKS]) * layout.block_steps)
        return max(0, steps)

    # ---------------------------------------------------------------- reading

    @functools.cached_property
    def payload(self) -> PayloadReader:
        """What reads ragged values."""
        here = weakref.ref(self)

        def tier() -> ValueReader:
            engine = here()
            assert engine is not None
            reader: Any = engine.tier_reader()  # of files
            found: ValueReader = reader
            return found

        check = self.reader().check_gathered
        return PayloadReader(self.region, self.index.arrays, check, tier if self.has_tier else None)

    def rows(
        self, index: int, *, final: bool = False, encoded: Collection[str] = ()
    ) -> dict[str, Any] | None:
        """A copy of one trajectory's rows: column name -> tensor ``[T, *shape]``, or ``[*shape]`` of columns per
        trajectory, on the CPU; for transports.

        Args:
            index: index of the trajectory.
            final: with the final step as the last row (zeros in columns without one); None if it has none.
            encoded: those of the columns with a codec that are lists of bytes.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            if not (isinstance(index, torch.Tensor) and index.ndim == 0 and not index.is_floating_point()):
                raise TypeError(
                    f"Table index {shown(index)} was received; expected one integer, as add() returns it."
                )
            index = int(index)
        while True:
            with contextlib.suppress(MovedRowsError):  # of ragged values that were read elsewhere meanwhile
                return self._rows(int(index), final=final, encoded=encoded)

    def rows_and_final(
        self, index: int, *, encoded: Collection[str] = ()
    ) -> tuple[dict[str, Any], dict[str, Any]]:
        """The values of a trajectory, as `rows` returns them, and those after its last step, as `Table.final` (none of
        one that was added without them), at one moment.

        Args:
            encoded: as of `rows`.

        Raises:
            StaleIndexError: the index has no live trajectory.
        """
        finals = [name for name, column in self.schema.items() if column.final]
        rows = self.rows(index, final=True, encoded=encoded) if finals else None
        if rows is None:
            rows = self.rows(index, encoded=encoded)
            assert rows is not None
            return rows, {}
        final = {name: rows[name][-1] for name in finals}
        steps = {
            name: each if self.schema[name].trajectory else each[:-1] for name, each in rows.items()
        }  # no column is ragged, of a table with final steps
        return steps, final

    def _rows(self, index: int, *, final: bool, encoded: Collection[str]) -> dict[str, Any] | None:
        """`rows`, of a live trajectory or not."""
        live, ticket = self.index, Ticket()
        try:
            # All of it at one moment: a place in memory that is read later may be one on disk, or lack what is filled.
            extent, bits = live.reader.begin_read_of(int(index), ticket)
            length, place, more = extent
            rows: dict[str, Any] | None = None
            if more or not final:
                count, names = length + more if final else length, self._filled_columns(bits)
                if self.device is not None or (place < 0 and self.has_tier):
                    rows = self._read_elsewhere(int(index), names, count)
                else:
                    ids = live.arrays.row(int(index), extent)
                    slots = np.array([int(index)])
                    rows = live.reader.read_whole(
                        slots, lambda: {name: self._read_column(name, ids, count) for name in names}
                    )
                for name in self.schema.ragged:
                    if rows is not None and name in rows:
                        rows[name] = self._read_ragged(name, int(index), rows[name], name in encoded)
            ticket.end()
            return rows
        finally:
            ticket.end()  # idempotent; an exception may arrive anywhere above

    def _read_elsewhere(self, slot: int, names: Sequence[str], length: int) -> dict[str, torch.Tensor]:
        """Columns of a trajectory that lies on a GPU, or on disk only, or did a moment ago; under a read ticket."""
        slots, zero = np.array([slot]), np.zeros(1, dtype=np.int64)
        columns = {name: self.schema[name] for name in names}
        outs = {
            name: np.empty(column.step_bytes * (1 if column.trajectory else length), dtype=np.uint8)
            for name, column in columns.items()
        }
        self.tier_reader().read(
            slots,
            self.index.arrays.generation[slots],
            zero,
            np.array([length]),
            {name: (out, zero) for name, out in outs.items()},
        )
        return {
            name: torch.from_numpy(outs[name])
            .view(column.dtype)
            .reshape(column.shape if column.trajectory else (length, *column.shape))
            for name, column in columns.items()
        }

    def _filled_columns(self, bits: int) -> list[str]:
        """The columns of a trajectory that have values, by the bits of its late columns."""
        late = self.schema.late
        return [name for name in self.schema if name not in late or bits >> late.index(name) & 1]

    def _read_ragged(self, name: str, slot: int, records: torch.Tensor, encoded: bool) -> Any:
        values, count = self.schema.ragged[name], records.numel() // 2
        given = records.numpy().reshape(-1, 2), (count,)
        found = self.payload.read(values, *given, slots=np.full(count, slot), encoded=encoded)
        return found[0] if self.schema[name].trajectory else found

    def _read_column(self, name: str, ids: Array, length: int) -> torch.Tensor:
        column = self.schema[name]
        data = self.region.column(name)
        if column.trajectory:
            value = data[ids[0], 0]
            return torch.from_numpy(value.copy()).view(column.dtype).reshape(column.shape)
        rows = np.ascontiguousarray(data[ids].reshape(-1, column.step_bytes)[:length])
        return torch.from_numpy(rows.reshape(-1)).view(column.dtype).reshape(length, *column.shape)

    # ---------------------------------------------------------------- disk tier

    @property
    def has_tier(self) -> bool:
        """Whether trajectories may lie on disk only."""
        return self.region.layout.tier is not None

    @property
    def moves(self) -> bool:
        """Whether trajectories move while they are in the table; see `Layout.moves`."""
        return self.region.layout.moves

    @property
    def all_in_memory(self) -> bool:
        """Whether loops of the CPU can read all trajectories where they lie now."""
        return self.device is None and not (self.has_tier and self.num_spilled)

    @property
    def num_spilled(self) -> int:
        """Number of trajectories that lie on disk only."""
        return int(self.index.arrays.counters[NUM_SPILLED])

    def tier_reader(self) -> TierReader:
        """What reads trajectories on a GPU, or on disk only, in this process; opens its files when they are read."""
        if self._tier_reader is None:
            reader: TierReader | None = provided("TierFiles")(self) if self.has_tier else None
            if self.device is not None:
                reader = DeviceRows(self.region, self.index.arrays, reader)
            self._tier_reader = reader
        assert self._tier_reader is not None
        return self._tier_reader

    def prefer_in_memory(self, keep: Literal["newest", "oldest", "priority"]) -> None:
        """Tell the owner of a table of which trajectories move what is drawn most, for ``Disk(keep="auto")``."""
        self.index.arrays.tier_counts[KEEP] = 1 + KEEPS.index(keep)

    def load_from_disk(self, slots: Array) -> int:
        """Bring trajectories that lie on disk only back into memory, as far as blocks are free; return how many.

        Args:
            slots: int64 [n], distinct.
        """
        count: int = provided("promote")(self, slots, most_bytes=None)
        return count

    def remove_lost(self, error: LostRowsError) -> int:
        """Remove trajectories that cannot be read from disk, log the error and count them; return how many.

        Trajectories that are gone by now, or whose removal another process has counted, are left out.
        """
        count = self.index.remove_lost(error.slots, error.generations)
        if count:
            _logger.error(
                # Of the error its text: kept log records would hold what its frames refer to.
                "%s %d trajectories were removed from %s.",
                str(error),
                count,
                self.name or "a private table",
            )
        return count

    # ---------------------------------------------------------------- priorities and statistics

    def revise(self, updates: PriorityUpdates, *, strict: bool) -> int:
        """Set priorities of trajectories; return the number of rows that were skipped. See `Table.update_priority`."""
        skipped, _ = self.reader().revise(updates, strict=strict)
        if self.moves:
            arrays = self.index.arrays
            current = arrays.generation[updates.slots]
            known = (
                np.ones(len(current), dtype=bool)
                if updates.generations is None
                else current == updates.generations
            )
            slots = updates.slots[known]
            arrays.tier_priority[slots] = pack_priorities(current[known], updates.priorities[known])
        return skipped

    def stats(self) -> TableStats:
        """See `Table.stats`."""
        if self._tier_reader is not None:
            self._tier_reader.flush()
        stats = stats_of(self.index, self.region)
        if self.disk is not None:
            stats = dataclasses.replace(stats, disk=self.disk.stats())
        self.notice_waste(stats)
        return stats

    def notice_waste(self, stats: TableStats | None = None) -> None:
        """Log once if more than a quarter of the resident bytes hold no steps; see `stats`.

        Args:
            stats: of the table, if they are known.
        """
        index, layout, told = self.index, self.region.layout, self.index.arrays.counters[TOLD]
        key = f"waste {layout.block_steps} {self.schema.to_json()}"  # the tables of shards, and those made again
        if told[0] or key in notices() or _is_later_rank():
            return

        def rows_of() -> Array:
            extent = index.arrays.extent[index.reader.snapshot().slots]
            rows: Array = extent[:, 0] + extent[:, 2]
            return rows

        remedy = waste_remedy(layout, stats_of(index, self.region) if stats is None else stats, rows_of)
        if remedy is None:
            return

        def claim() -> bool:
            before, told[0] = bool(told[0]), 1
            return not before

        if index.recovery.locked(claim):
            notice(key, f"Of {'a private table' if self.name is None else f'table {self.name!r}'}, {remedy}")


def _is_later_rank() -> bool:
    """Whether another rank of torch.distributed says what all ranks would say of their tables."""
    ranks = torch.distributed
    return ranks.is_available() and ranks.is_initialized() and ranks.get_rank() > 0


_engines: weakref.WeakSet[Engine] = weakref.WeakSet()


def _after_fork() -> None:
    # A forked child does not receive pinned private regions, see `Region.pin`.
    for engine in list(_engines):
        if engine.region.is_lost:
            engine._index = None
        if engine.device is not None:
            engine._tier_reader = None  # reads in another way from now on


os.register_at_fork(after_in_child=_after_fork)
