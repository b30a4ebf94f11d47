"""The table: trajectories in paged columns of one region, under an index."""

from __future__ import annotations

import importlib
import os
import weakref
from collections.abc import Iterable, Mapping, Sequence
from types import TracebackType
from typing import Any, ClassVar

import numpy as np
import torch

from gear_loader.errors import (
    CheckpointError,
    LockTimeoutError,
    PrivateTableError,
    SchemaError,
    StaleIndexError,
)
from gear_loader.native import copying
from gear_loader.storage.counters import NUM_FREE_BLOCKS, NUM_STEPS, WRITING_STEPS
from gear_loader.storage.ids import check_ids, check_origin, ids_of, origin_of
from gear_loader.storage.incoming import Steps, checked_priorities, checked_priority, listed, stacked
from gear_loader.storage.index import EVICT_LOWEST, EVICT_OLDEST, INLINE_BYTES, REFUSE, Claim, Index
from gear_loader.storage.layout import Layout
from gear_loader.storage.limiters import RateLimiter
from gear_loader.storage.reader import TableReader
from gear_loader.storage.readers import Ticket
from gear_loader.storage.region import Region
from gear_loader.storage.rules import OnFull, Rules, check_on_full, check_seconds
from gear_loader.storage.schema import Column, Schema
from gear_loader.storage.stats import TableStats, stats_of
from gear_loader.storage.writer import Writer
from gear_loader.utils.arrays import Array

__all__ = ["Table", "Ticket"]

Trajectory = Mapping[str, Any]
_POLICIES: dict[str, tuple[int, bool]] = {  # what `Index.begin` is told
    "error": (REFUSE, False),
    "evict_oldest": (EVICT_OLDEST, False),
    "evict_lowest_priority": (EVICT_LOWEST, False),
    "wait": (REFUSE, True),
}


class Table:
    """Trajectories of uneven length, stored column by column in blocks of one memory region.

    Make one with `Table.create` or `Table.attach`. A table can be written and read by several threads and, if it
    has a name, by several processes of one user on one machine (which must see each other's process ids). It is a
    context manager: leaving it closes it. A named table pickles as a handle: whoever unpickles it attaches by name.

    A forked process shares a named table, and has a copy of a private one, as it was at the fork; of a private table
    that was pinned for a GPU by then it has nothing: every use of it there raises PrivateTableError.

    Nothing here waits for a GPU, but for `add` and `extend` of CUDA tensors, which copies them to the host.
    """

    def __init__(
        self, region: Region, *, on_full: OnFull | None = None, timeout: float | None = None
    ) -> None:
        self._region = region
        self._index: Index | None = Index(region)
        self._index.admission.timeout = timeout
        layout = region.layout
        start = self._index.arrays.counters.ctypes.data - layout.arrays["counters"][0]
        self._columns: Array = np.array(
            [(start + c.offset, c.block_stride, c.step_bytes) for c in layout.columns.values()],
            dtype=np.int64,
        )
        self._step_bytes = layout.schema.step_bytes
        self.longest: int = min(layout.max_steps, layout.num_blocks * layout.block_steps)
        """Steps of the longest trajectory that the table can hold."""
        _tables.add(self)
        self.schema: Schema = region.layout.schema
        """The columns, a mapping of name to `Column`."""
        self.name: str | None = region.name
        """The name that other processes attach by, or None."""
        self.rules: Rules = region.layout.rules
        """What was given to `create`: the policy, the rate limiter, and what is removed by itself."""
        self.on_full: OnFull = on_full or self.rules.on_full
        """What those who add through this handle do when there is no room."""

    # ---------------------------------------------------------------- create, attach, close

    @classmethod
    def create(
        cls,
        schema: Mapping[str, Column],
        *,
        max_steps: int,
        max_trajectories: int,
        block_steps: int = 64,
        max_blocks: int | None = None,
        name: str | None = None,
        on_full: OnFull = "error",
        rate_limiter: RateLimiter | None = None,
        max_times_sampled: int | None = None,
        max_age: float | None = None,
        timeout: float | None = None,
    ) -> Table:
        """Create an empty table.

        Args:
            schema: column name -> `Column`.
            max_steps: most steps that it holds at a time, and so the longest possible trajectory.
            max_trajectories: most trajectories that it holds at a time.
            block_steps: steps of a block, the unit of allocation. A trajectory takes ceil(length / block_steps)
                blocks: small blocks waste less at its end, large ones are read in longer pieces. Blocks of a column
                are padded to 128 bytes: 32 steps are the least that pads no column of 4 bytes a step.
            max_blocks: most blocks. By default as many as `max_steps` steps in `max_trajectories` trajectories can
                need, whatever their lengths. Where the lengths are known, `required_blocks` gives the exact number
                and less memory is reserved.
            name: under which other processes attach. The table then outlives this process, until `unlink`. It lies
                in `/dev/shm`, or in the directory that the environment variable ``GEAR_LOADER_DIR`` named when
                `gear_loader` was imported: an absolute path on a tmpfs, the same in all processes. Without a name it
                is private memory, of which the system gives pages only as they are written.
            on_full: what those who add do when there is no room, unless they say otherwise: ``"error"`` raises
                `TableFullError`; ``"evict_oldest"`` drops the oldest trajectories; ``"evict_lowest_priority"`` those
                with the lowest priority (as given last, to `add` or to `ReplayDataset.update_priority`; of equal ones
                any, and those that have none yet go last); ``"wait"`` waits for others to make room.
            rate_limiter: how fast it may be written and sampled in relation to each other: `MinSize`,
                `SampleToInsertRatio` or `Queue`. By default as fast as anybody likes.
            max_times_sampled: a trajectory is removed when it has been drawn so often. By default never.
            max_age: seconds after which a trajectory is removed. By default never.
            timeout: seconds that calls through this handle wait, for room and for the rate limiter, until they raise
                an error; 60 by default.

        Raises:
            SchemaError: sizes or columns that make no sense.
            RegionError: the name is taken or cannot be one, there is not enough memory, or ``GEAR_LOADER_DIR`` is no
                directory in which only this user and root can replace tables.
        """
        schema = Schema(schema)
        sizes = {"max_steps": max_steps, "max_trajectories": max_trajectories, "block_steps": block_steps}
        if max_blocks is not None:
            sizes["max_blocks"] = max_blocks
        for key, value in sizes.items():
            if isinstance(value, bool) or not isinstance(value, (int, np.integer)) or not 1 <= value < 2**37:
                raise SchemaError(f"{key} is {value!r}; expected an integer from 1 to {2**37 - 1:,}.")
        rules = Rules(on_full, rate_limiter, max_times_sampled, max_age)
        if rate_limiter is not None and rate_limiter.min_size > max_trajectories:
            raise SchemaError(
                f"{rate_limiter!r} waits for more trajectories than the table can hold, max_trajectories="
                f"{max_trajectories:,}. Make one of them smaller or the other larger."
            )
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        max_steps, max_trajectories, block_steps = int(max_steps), int(max_trajectories), int(block_steps)
        if max_blocks is None:
            most = min(max_steps, max_trajectories)
            max_blocks = (max_steps + most * (block_steps - 1)) // block_steps
        if max(max_blocks, max_trajectories) >= 2**31:
            raise SchemaError(
                f"{max_blocks:,} blocks and {max_trajectories:,} trajectories were asked for; expected less than "
                "2**31 of each. Raise block_steps or split the table."
            )
        layout = Layout(
            schema,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            num_blocks=int(max_blocks),
            rules=rules,
        )
        return cls(Region.create(layout, name), timeout=timeout)

    @classmethod
    def attach(cls, name: str, *, on_full: OnFull | None = None, timeout: float | None = None) -> Table:
        """Attach to the table called `name` on this machine.

        Args:
            name: as given to `create`.
            on_full: what those who add through this handle do when there is no room; by default what was given to
                `create`.
            timeout: as for `create`.

        Raises:
            RegionError: there is none, or the file is no table, one of another format version or of another user, or
                other users may write to it.
            CorruptTableError: its index names slots, blocks or places that are not there.
        """
        if on_full is not None:
            check_on_full(on_full)
        timeout = None if timeout is None else check_seconds("timeout", timeout)
        table = cls(Region.attach(name), on_full=on_full, timeout=timeout)
        try:
            table.index.recovery.check_bounds()
        except BaseException:
            table.close()
            raise
        return table

    @staticmethod
    def required_blocks(lengths: Iterable[int] | Array, block_steps: int) -> int:
        """Blocks that trajectories of these lengths take: what to give as `max_blocks`.

        Raises:
            SchemaError: a length or `block_steps` that is no positive integer.
        """
        values = np.asarray(lengths if isinstance(lengths, np.ndarray) else list(lengths))
        if len(values) and (values.ndim != 1 or values.dtype.kind not in "iu" or values.min() < 1):
            raise SchemaError(f"lengths is {lengths!r}; expected integers of at least 1.")
        if isinstance(block_steps, bool) or not isinstance(block_steps, (int, np.integer)) or block_steps < 1:
            raise SchemaError(f"block_steps is {block_steps!r}; expected a positive integer.")
        return int((-(-values.astype(np.int64) // block_steps)).sum())

    # ---------------------------------------------------------------- checkpoints

    def save(self, path: str | os.PathLike[str], *, progress: bool = False) -> None:
        """Save all trajectories into a directory that any tool can read; others may go on writing and sampling.

        What is saved is what the table held at one moment during the call: the trajectories with their ids and
        priorities, how often each has been drawn and how old it is, the rules that were given to `create`, and the
        counts by which a rate limiter goes. What a writer has not committed is not in it. The directory holds one
        checkpoint: saving again writes the trajectories that are new (and those of old files of which less than half
        is in use), and replaces the index. Trajectories that share blocks are written whole, each for itself. The
        previous checkpoint counts until the new one is complete and on the disk, whatever happens in between. A
        checkpoint of the same schema but of another table is replaced as a whole; a table that was loaded from the
        directory goes on with it.

        Writers of a full table wait for the last part of the save, 128 MiB or less unless they are as fast as the
        disk.

        The columns are ``.npy`` files of whole trajectories one after another, the index is a safetensors file with
        the sequence numbers, lengths, priorities, times sampled, ages, ids and places, and ``manifest.json`` has the
        rules and counts, and names every file with its size and checksum (XXH128). `gear_loader.checkpoint` describes
        them.

        Args:
            path: a directory with a checkpoint, an empty one, or one that is made here. It may be a symbolic link; in
                the checkpoint no link is followed, and nothing but the files of earlier saves is removed.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.

        Raises:
            CheckpointError: the disk is full or fails, the directory holds something else or a checkpoint of another
                schema or version, one of its own directories or files is a symbolic link, or another save into it is
                going on. The previous checkpoint is as it was.
        """
        importlib.import_module("gear_loader.checkpoint").save(self, _checked_path(path), progress=progress)

    @classmethod
    def load(
        cls,
        path: str | os.PathLike[str],
        *,
        schema: Mapping[str, Column] | None = None,
        name: str | None = None,
        max_steps: int | None = None,
        max_trajectories: int | None = None,
        block_steps: int | None = None,
        max_blocks: int | None = None,
        on_full: OnFull | None = None,
        progress: bool = False,
    ) -> Table:
        """Create a table that goes on where the one that was saved stood.

        It has the trajectories in their order, with ids, sequence numbers, priorities, times sampled and ages; the
        shard number; the rules; and the counts of the rate limiter, which lets as many rows be sampled and as many
        trajectories be added as it did then. Time between the save and the end of this call makes nothing older.
        Indices and generations may differ, and trajectories share no blocks until writers cut new ones. Every byte
        that is used is checked while it is read.

        Args:
            path: the directory that `save` wrote.
            schema: if given, the columns that the checkpoint must have.
            name: the name of the table, as for `create`; None makes a private one.
            max_steps, max_trajectories, block_steps, max_blocks: as for `create`; by default those of the table that
                was saved, and as many blocks more as it takes where trajectories shared some. If one of the first
                three is given, `max_blocks` is computed as in `create`.
            on_full: as for `create`; by default that of the table that was saved. The rate limiter, `max_times_sampled`
                and `max_age` are those of the table that was saved.
            progress: show a progress bar if standard error is a terminal and `rich` is installed.

        Raises:
            CheckpointError: there is no checkpoint; it is damaged, of another version or schema; or it does not fit
                into the given sizes. The message names the file. No table is left.
            SchemaError, RegionError: as `create`.
        """
        table: Table = importlib.import_module("gear_loader.checkpoint").load(
            cls,
            _checked_path(path),
            schema=schema,
            name=name,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            max_blocks=max_blocks,
            on_full=on_full,
            progress=progress,
        )
        return table

    # ---------------------------------------------------------------- closing

    def close(self) -> None:
        """Detach; idempotent. A private table's memory is freed, a named table stays until `unlink`."""
        self._index = None
        self._region.close()

    def unlink(self) -> None:
        """Remove the table's name: nobody can attach any more; who is attached may go on.

        Raises:
            PrivateTableError: it has none.
            RegionError: somebody has removed it already (and perhaps made another of that name, which stays).
        """
        if self.name is None:
            raise PrivateTableError("A private table has no name to remove; close() frees its memory.")
        self._region.unlink()

    def check_open(self) -> None:
        """Raise GearError if the table is closed, or belongs to the parent process."""
        if self._index is None:
            raise self._region.absence()

    def __enter__(self) -> Table:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __reduce__(self) -> tuple[Any, ...]:
        if self.name is None:
            raise PrivateTableError(
                "A private table cannot be sent to another process. Create it with a name, "
                "Table.create(..., name='replay'), and it travels as a handle."
            )
        return _attach, (self.name, self.on_full, self.index.admission.timeout)

    def __repr__(self) -> str:
        if self._index is None:
            state = "of the parent process" if self._region.is_lost else "closed"
            return f"<Table {self.name or 'private'}, {state}>"
        return f"<Table {self.name or 'private'}: {len(self):,} trajectories, {self.num_steps:,} steps>"

    # ---------------------------------------------------------------- adding

    def add(self, trajectory: Trajectory, *, priority: float | None = None) -> int:
        """Store one trajectory.

        Args:
            trajectory: column name -> numpy array or torch tensor ``[T, *shape]`` of exactly the column's dtype,
                the same T >= 1 in all of them. A TensorDict is one, too; one inside another has the columns
                ``outer.inner``.
            priority: what a selector of priorities begins with: finite and not negative. By default the largest
                priority that it has seen by then (1 if none), so that everything new is drawn soon.

        Returns:
            Its index: valid until it is removed or evicted, then given to another trajectory.

        Raises:
            SchemaError: the trajectory or the priority does not fit.
            TableFullError: there is no room and `on_full` is ``"error"``, or it was waited for too long.
            RateLimitError: the rate limiter was waited for too long.
            LockTimeoutError: the lock, or room in use by readers or unfinished writes, was waited for too long.

        After an error nothing was changed, except for what was evicted before the wait for room timed out.
        """
        index = self.index
        length, addresses, hold = self.schema.locate(trajectory)
        first = checked_priority(priority)
        if length * self._step_bytes <= INLINE_BYTES and length <= self.longest:
            slot = index.store_one(self._columns, length, addresses, first, evict=self.policy[0])
            if slot is not None:
                return slot
        steps = Steps(np.array([addresses], dtype=np.int64), np.array([length], dtype=np.int64), hold)
        return int(self._store(index, steps, np.array([first], dtype=np.float32))[0])

    def writer(self, *, chunk_steps: int | None = None, overlap_steps: int = 0) -> Writer:
        """A writer that adds a trajectory step by step; see `Writer`.

        Args:
            chunk_steps: cut what is written into trajectories of so many steps.
            overlap_steps: steps that such a trajectory has in common with the one before.

        Raises:
            SchemaError: sizes that make no sense.
        """
        return Writer(self, chunk_steps=chunk_steps, overlap_steps=overlap_steps)

    def extend(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        *,
        lengths: Sequence[int] | Array | torch.Tensor | None = None,
        priority: float | Sequence[float] | Array | torch.Tensor | None = None,
    ) -> Array:
        """Store many trajectories, all or none, taking the lock once to begin and once to commit.

        Args:
            trajectories: an iterable of mappings as for `add`; or, with `lengths`, one mapping of stacked arrays
                ``[n, T, *shape]`` of which trajectory i has the first ``lengths[i]`` steps. A list or a tuple is read
                where it is. Any other iterable (a generator, say) may refill the same arrays for each trajectory:
                what it yields is copied before the next one is asked for.
            lengths: int [n], with stacked arrays.
            priority: as for `add`: one for all, or [n].

        Returns:
            Their indices, int64 [n].

        Raises:
            As `add`; the message names the first trajectory that does not fit. Nothing was changed.
        """
        index = self.index
        steps = self._checked(trajectories, lengths)
        priorities = checked_priorities(priority, len(steps.lengths))
        return self._store(index, steps, priorities) if len(steps.lengths) else np.empty(0, dtype=np.int64)

    def extend_as(
        self,
        trajectories: Iterable[Trajectory] | Trajectory,
        *,
        ids: Sequence[int] | Array | torch.Tensor,
        priority: float | Sequence[float] | Array | torch.Tensor | None = None,
        lengths: Sequence[int] | Array | torch.Tensor | None = None,
    ) -> Array:
        """As `extend`, of trajectories that bring global ids with them: moved from another table, or copies.

        The table's own numbering goes on above the ids of its own origin.

        Args:
            trajectories, priority, lengths: as for `extend`.
            ids: int64 [n], from 0 to 2**62 - 1, or -1 where the table gives an id.

        Returns:
            Their indices, int64 [n].

        Raises:
            SchemaError: an id is invalid, is given twice, or belongs to a trajectory of the table already.

        Raises the other errors of `extend` too. After an error nothing was changed.
        """
        index = self.index
        steps = self._checked(trajectories, lengths)
        priorities = checked_priorities(priority, len(steps.lengths))
        given = check_ids(ids, len(steps.lengths))
        if not len(given):
            return np.empty(0, dtype=np.int64)
        return self._store(index, steps, priorities, given if (given >= 0).any() else None)

    def store(self, trajectories: Sequence[Trajectory], priorities: Array, ids: Array | None = None) -> Array:
        """`extend_as` with priorities and ids that have been checked: for transports.

        Args:
            trajectories: mappings as for `add`.
            priorities: float32 [n], -1 for a trajectory without one.
            ids: int64 [n], -1 where the table gives an id; None if it gives them all.

        Returns:
            Their indices, int64 [n].

        Raises:
            As `extend_as`.
        """
        return self._store(self.index, listed(self.schema, trajectories), priorities, ids)

    def _checked(self, trajectories: Any, lengths: Any) -> Steps:
        return (
            listed(self.schema, trajectories)
            if lengths is None
            else stacked(self.schema, trajectories, lengths)
        )

    def _store(self, index: Index, steps: Steps, priorities: Array, given: Array | None = None) -> Array:
        self._check_lengths(steps.lengths)
        limiter = self.rules.rate_limiter
        if limiter is not None:
            limiter.check_insert(len(steps.lengths))
        evict, wait = self.policy
        if given is None:
            stored = index.store(
                self.column_addresses(),
                steps.lengths,
                steps.addresses,
                priorities,
                evict=evict,
                wait=wait,
                step_bytes=self._step_bytes,
            )
            if stored is not None:
                return stored
        claim = Claim(len(steps.lengths))
        try:
            slots, ids = index.begin(steps.lengths, evict=evict, wait=wait, ids=given, claim=claim)
            self._write(ids, steps)
            index.commit(slots, priorities)
        except BaseException as error:
            if (claim.slots >= 0).any():
                patient = not isinstance(error, LockTimeoutError)
                index.abort(claim.slots, wait=patient, generations=claim.generations)
            raise
        return slots

    @property
    def policy(self) -> tuple[int, bool]:
        """`on_full`, as `Index.begin` is told."""
        return _POLICIES[self.on_full]

    def _check_lengths(self, lengths: Array) -> None:
        if len(lengths) and lengths.max() > self.longest:
            bad = int(lengths.argmax())
            raise SchemaError(
                f"Trajectory {bad} has {lengths[bad]:,} steps; this table holds at most {self.longest:,}. "
                "Create it with a larger max_steps (and max_blocks, if given) or split the trajectory."
            )

    @property
    def seconds_waited(self) -> float:
        """Seconds that additions through this handle have waited so far, for room or for the rate limiter: the
        backpressure that its writers feel. `stats()` tells it of all processes together."""
        return self.index.admission.waited / 1e9

    def free_steps(self) -> int:
        """Steps for which there is room without evicting anything, roughly. Takes no lock."""
        counters, layout = self.index.arrays.counters, self._region.layout
        steps = layout.max_steps - int(counters[NUM_STEPS] + counters[WRITING_STEPS])
        return max(0, min(steps, int(counters[NUM_FREE_BLOCKS]) * layout.block_steps))

    def column_addresses(self) -> Array:
        """int64 [C, 3]: address of the column, bytes from block to block, bytes of a step."""
        return self._columns

    def _write(self, ids: Array, steps: Steps) -> None:
        self.check_open()
        layout = self._region.layout
        copying.scatter(self.column_addresses(), layout.block_steps, ids, steps.addresses, steps.lengths)

    # ---------------------------------------------------------------- reading and removing

    # Without it Python would count indices upwards until the first that was removed, and stop there.
    __iter__: ClassVar[None] = None

    def __len__(self) -> int:
        return self.index.arrays.num_ready()

    @property
    def num_steps(self) -> int:
        """Steps of all live trajectories."""
        return int(self.index.arrays.counters[NUM_STEPS])

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        """A copy of one trajectory: column name -> tensor ``[T, *shape]`` on the CPU.

        Raises:
            StaleIndexError: there is no trajectory at this index.
        """
        live = self.index
        if isinstance(index, bool) or not isinstance(index, (int, np.integer)):
            if not (isinstance(index, torch.Tensor) and index.ndim == 0 and not index.is_floating_point()):
                raise TypeError(
                    f"Table index {index!r} was received; expected one integer, as add() returns it."
                )
            index = int(index)
        ticket = Ticket()
        try:
            live.reader.begin_read_of(int(index), ticket)
            length = int(live.arrays.extent[index, 0])
            ids = live.arrays.row(int(index))
            steps = {name: self._read_column(name, ids, length) for name in self.schema}
            ticket.end()
            return steps
        finally:
            ticket.end()  # again: an exception may arrive anywhere

    def _read_column(self, name: str, ids: Array, length: int) -> torch.Tensor:
        column = self.schema[name]
        block_bytes = self._region.layout.block_steps * column.step_bytes
        data = self._region.column(name)[ids, :block_bytes].reshape(-1)[: length * column.step_bytes]
        return torch.from_numpy(data.copy()).view(column.dtype).reshape(length, *column.shape)

    def indices(self) -> Array:
        """The indices of all live trajectories, oldest first, int64 [n]."""
        return self.reader().snapshot().slots.copy()

    def lengths(self) -> Array:
        """Their lengths in steps, in the same order, int64 [n]."""
        return self.reader().snapshot().lengths.copy()

    @property
    def origin(self) -> int | None:
        """The table's shard number, the lower 16 bits of the ids that it gives; None (as 0) where none was set."""
        return origin_of(self.index.arrays.view)

    def set_origin(self, shard: int) -> None:
        """Make this table shard `shard` of several, once and for all processes, before others know its ids.

        Args:
            shard: 0 to 65,535; no other table has the same. Again with the same number it does nothing.

        Raises:
            SchemaError: it is no such number, the table has another one, or an id would be that of two trajectories.
                Nothing was changed.
        """
        self.index.set_origin(check_origin(shard))

    def ids(self, slots: Array) -> Array:
        """The global ids of trajectories, ``sequence << 16 | origin`` unless they were stored with one. Takes no lock.

        Args:
            slots: int64 [n], indices of live trajectories (of others the answer means nothing).

        Returns:
            int64 [n].
        """
        return ids_of(self.index.arrays.view, slots)

    def remove(self, index: int | Sequence[int] | Array) -> None:
        """Remove one trajectory or several, all or none.

        Raises:
            StaleIndexError: an index without a live trajectory, or one given twice.
        """
        slots = np.asarray(index, dtype=None).reshape(-1)
        if len(slots) and slots.dtype.kind not in "iu":
            raise StaleIndexError(f"Indices of dtype {slots.dtype} were received; expected integers.")
        self.index.remove(slots.astype(np.int64))

    def stats(self) -> TableStats:
        """Counts, bytes and rates; see `TableStats`."""
        return stats_of(self.index, self._region.layout)

    def check_valid(self) -> None:
        """Check that the index does not contradict itself; for tests and after a crash.

        Raises:
            AssertionError: it does; the message says where.
        """
        self.index.recovery.check_valid()

    # ---------------------------------------------------------------- for selections, collectors and transports

    def reader(self) -> TableReader:
        """The calls that read the table under a read ticket; raises as every call of a closed table."""
        return self.index.reader

    @property
    def region(self) -> Region:
        """The memory, for collectors and transports."""
        return self._region

    @property
    def index(self) -> Index:
        """The index, for writers, checkpoints and tests.

        Raises:
            GearError: the table is closed, or belongs to the parent process.
        """
        if self._index is None:
            raise self._region.absence()
        return self._index


_tables: weakref.WeakSet[Table] = weakref.WeakSet()


def _after_fork() -> None:
    # In a forked child: what the parent pinned is not here, see `Region.pin`.
    for table in list(_tables):
        if table._region.is_lost:
            table._index = None


os.register_at_fork(after_in_child=_after_fork)


def _attach(name: str, on_full: OnFull, timeout: float | None) -> Table:
    return Table.attach(name, on_full=on_full, timeout=timeout)


def _checked_path(path: str | os.PathLike[str]) -> str:
    """A checkpoint's path as a string that the system can take."""
    try:
        text = os.fspath(path)
        if isinstance(text, str) and b"\0" not in os.fsencode(text):
            return text
    except (TypeError, UnicodeEncodeError):
        pass
    raise CheckpointError(
        f"The path {path!r} was received; expected the path of a directory, a string without NUL that the file "
        "system can encode."
    )
