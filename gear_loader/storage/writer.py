"""The writer: adds a trajectory step by step, directly into its blocks."""

from __future__ import annotations

import contextlib
import os
import struct
import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.native import copying
from gear_loader.storage.incoming import checked_final, single_priority
from gear_loader.storage.index import Claim
from gear_loader.storage.operations.view import GENEROUS, ROOM_GENERATION, ROOM_HELD, ROOM_PLACE, ROOM_WIDTH
from gear_loader.storage.step_appender import StepAppender, checked_once, no_final_step, too_long
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.checks import at_least

if TYPE_CHECKING:
    from gear_loader.storage.index import Index
    from gear_loader.storage.region import Region
    from gear_loader.storage.schema import Schema

__all__ = ["Writer", "reserve_together"]

_NO_BLOCKS: Array = np.empty(0, dtype=np.int32)
_pack_room = struct.Struct(f"={ROOM_WIDTH}q").pack_into


class _Here:
    """The id of this process, without the system call of `os.getpid`."""

    def __init__(self) -> None:
        self.update()

    def update(self) -> None:
        self.pid = os.getpid()


here = _Here()
os.register_at_fork(after_in_child=here.update)


class Target(Protocol):
    """The interface of a `gear_loader.Table` that a writer uses."""

    schema: Schema
    longest: int

    @property
    def region(self) -> Region: ...

    @property
    def policy(self) -> tuple[int, bool]: ...

    def step_addresses(self) -> Array: ...

    def free_steps(self) -> int: ...

    def load_from_disk(self, slots: Array) -> int: ...

    @property
    def index(self) -> Index: ...

    def check_open(self) -> None: ...


class Writer(StepAppender):
    """Adds trajectories to a table step by step: `append` steps, then `commit`.

    Created by `Table.writer`. Steps are written directly into the table's blocks and are invisible until `commit`.
    A writer is for one thread; a table may have any number of writers in any number of processes. If the process dies,
    the next allocation that needs space reclaims its uncommitted steps.

    As a context manager it commits the steps appended since the last `commit`, or discards them if the block raises::

        with table.writer() as writer:
            while not done:
                ...
                writer.append(observation=observation, action=action, reward=reward)
            writer.commit(priority=1.0)

    **Chunks.** With `chunk_steps`, the appended steps form a stream that is cut into trajectories of `chunk_steps`
    steps. Each begins `overlap_steps` before the end of the previous one, as R2D2 stores its sequences with their
    burn-in (Kapturowski et al., 2019). `commit` ends the stream: the remaining steps become a shorter chunk with the
    same overlap. If ``chunk_steps - overlap_steps`` is a multiple of the table's `block_steps`, the common steps of two
    chunks are stored once; otherwise they are copied.

    Attributes:
        priority: initial priority of chunks cut by `append`; None for the selector's running maximum.
        trajectory: values of the columns per trajectory, ``{name: [*shape]}``, of what is committed next, chunks too,
            unless `commit` gets them; None at first.
    """

    def __init__(self, table: Target, *, chunk_steps: int | None = None, overlap_steps: int = 0) -> None:
        self._table = table
        self._index = table.index
        self._block_steps = table.region.layout.block_steps
        self._chunk = table.longest if chunk_steps is None else at_least("chunk_steps", chunk_steps)
        self._overlap = at_least("overlap_steps", overlap_steps, least=0)
        if chunk_steps is None and self._overlap:
            raise SchemaError(f"overlap_steps is {overlap_steps} without chunk_steps; give both.")
        if self._chunk > table.longest or self._overlap >= self._chunk:
            raise SchemaError(
                f"chunk_steps is {self._chunk:,} and overlap_steps {self._overlap:,}; expected "
                f"overlap_steps < chunk_steps <= {table.longest:,}, the longest trajectory that the table holds."
            )
        self._cuts = chunk_steps is not None
        self._shares = self._overlap > 0 and (self._chunk - self._overlap) % self._block_steps == 0
        if self._overlap:
            self._check_two_chunks()
        self.priority: float | None = None
        self.trajectory: Mapping[str, Any] | None = None
        self._added = table.schema.added
        super().__init__(self._added.steps, [table.region.column(name) for name in self._added.steps])
        self._pid = here.pid
        # The slot being written comes last; while a chunk is cut, the next slot's claim is added before its allocation.
        self._open: list[Claim] = []
        self._thread = 0  # the thread that began the trajectory
        self._index.allocator.writers.add(self)
        self._give_up = weakref.finalize(self, _give_up, self._index, self._open, self._pid)
        self._give_up.atexit = False
        self._ids = _NO_BLOCKS  # int32, blocks of the open slot
        self._run = np.zeros(2, dtype=np.int64)
        self._held = 0  # its capacity in steps; 0 with an open slot: unknown after an interrupted call
        self._steps = 0
        self._fresh = 0  # steps that are in no committed chunk
        self._here = -1  # position of the block that the columns' views show
        self._committed = 0

    def _check_two_chunks(self) -> None:
        """Check that a chunk and its overlap fit into the table: both count when the chunk is committed."""
        layout = self._table.region.layout
        chunk, overlap = self._chunk, self._overlap
        blocks = -(-chunk // self._block_steps) + (0 if self._shares else -(-overlap // self._block_steps))
        if layout.max_trajectories < 2 or chunk + overlap > layout.max_steps or blocks > layout.num_blocks:
            raise SchemaError(
                f"chunk_steps is {chunk:,} and overlap_steps {overlap:,}; expected that a chunk and the overlap fit "
                f"into the table together, which holds at most {layout.max_trajectories:,} trajectories, "
                f"{layout.max_steps:,} steps and {layout.num_blocks:,} blocks of {self._block_steps}."
            )

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> int:
        """Steps appended since the last `commit`; with chunks, steps of the current chunk."""
        return self._steps

    @property
    def num_committed(self) -> int:
        """Trajectories that this writer has committed; with chunks, the number of chunks."""
        return self._committed

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """Append one step, or several.

        Args:
            steps, columns: a value for every column, as one mapping or as keywords: for one step ``[*shape]``, for k
                steps ``[k, *shape]``; a numpy array or torch tensor of exactly the column's dtype. One step of a column
                of shape ``()`` may be a Python or numpy number. A column with ``cast=True`` takes more, see `Column`.

        Returns:
            Indices of the chunks completed by this call; () without chunks.

        Raises:
            SchemaError: a value does not fit, or the trajectory would be longer than the table can hold.
            TableFullError, RateLimitError, LockTimeoutError: as `Table.add`. If open writers of this thread hold the
                space, TableFullError is raised without a wait, which would deadlock.

        After an error nothing was appended, except for the steps of completed chunks. After a time-out the call can be
        repeated with the same step.
        """
        # As `_given`, without its call: this runs for every step.
        rows: Mapping[str, Any] = columns if steps is None else self._joined(steps, columns)
        if self._schema.casts:
            rows = self._schema.cast(rows, what="the step")
        if len(rows) != len(self._puts):
            self._schema.validate_names(rows, what="the step")
        if here.pid != self._pid:
            self._check_process()
        self._table.check_open()
        place = self._steps
        if place >= self._held or place // self._block_steps != self._here:
            rows = self._known(rows)
            if self._is_single(rows):
                self._check_step(rows)
                self._make_room(1)
                self._show_block(self._steps // self._block_steps)
            else:
                return self._append_many(rows)
        inside = self._steps - self._here * self._block_steps
        if not self._put(inside, rows):
            given, rows = rows, self._known(rows)
            if rows is not given and self._put(inside, rows):
                return self._appended(1)
            if not self._is_single(rows):
                return self._append_many(rows)
            self._check_step(rows)
        if self._cuts:
            return self._appended(1)
        self._steps += 1
        self._fresh += 1
        return ()

    def _appended(self, count: int) -> tuple[int, ...]:
        """Count written steps, and cut a chunk if they complete one; return its index."""
        self._steps += count
        self._fresh += count
        if self._steps < self._chunk or not self._cuts:
            return ()
        try:
            return self._cut()
        except GearError:
            self._steps -= count
            self._fresh -= count
            raise

    def _append_many(self, rows: Mapping[str, Any]) -> tuple[int, ...]:
        length, addresses, hold = self._schema.locate(dict(rows), what="the steps")
        if not self._cuts and self._steps + length > self._chunk:
            raise self._too_long(self._steps + length)
        indices: tuple[int, ...] = ()
        done = 0
        step_bytes = [column.step_bytes for column in self._columns]
        while done < length:
            count = min(length - done, self._chunk - self._steps)
            self._make_room(count)
            places = [address + done * size for address, size in zip(addresses, step_bytes, strict=True)]
            self._copy_in(places, self._ids, self._steps, count)
            indices += self._appended(count)
            done += count
        del hold
        return indices

    def _copy_in(self, addresses: Sequence[int] | Array, blocks: Array, first: int, count: int) -> None:
        """Copy `count` steps into the blocks of one trajectory, from step `first` on.

        Args:
            addresses: address of the contiguous steps of each column. blocks: int32, block ids of the trajectory.
        """
        copying.append(
            self._table.step_addresses(),
            self._block_steps,
            blocks,
            first,
            np.array(addresses, dtype=np.int64),
            count,
        )

    # ---------------------------------------------------------------- allocation

    @property
    def open_slots(self) -> tuple[int, list[int]]:
        """Thread of the writer, and the slots that it is writing (empty in a forked child)."""
        claims = list(self._open) if here.pid == self._pid else []
        return self._thread, [int(claim.slots[0]) for claim in claims if claim.slots[0] >= 0]

    def _make_room(self, count: int) -> None:
        """Allocate blocks for `count` more steps."""
        if self._cuts and self._steps == self._chunk:
            self._cut()  # left undone by an interrupted call
        needed = self._steps + count
        if needed > self._chunk:
            raise self._too_long(needed)
        if not self._held and self._open:
            self._look_up()
        if needed <= self._held or reserve_together([self], count):
            return
        if not self._held and self._open:
            self._look_up()
        evict, wait = self._table.policy
        if not self._open:
            self._ids, self._held = self._begin(needed)
            return
        free = self._table.free_steps() // GENEROUS
        before = self._held
        most = min(max(2 * before, needed), before + free, self._chunk)
        self._held = 0  # unknown if the call below is interrupted
        try:
            held, more = self._index.grow(
                self._slot, needed, self._run, most=max(most, needed), evict=evict, wait=wait
            )
        except GearError:
            self._held = before
            raise
        self._ids = np.concatenate((self._ids, more))
        self._held = held

    @property
    def _slot(self) -> int:
        """The slot being written."""
        return int(self._open[-1].slots[0])

    def _look_up(self) -> None:
        """Read the open slot's blocks and capacity from the index, after an interrupted call."""
        if self._slot < 0:
            self._open.clear()
            return
        held = int(self._index.arrays.extent[self._slot, 0])
        self._ids = self._index.arrays.row(self._slot)
        self._here, self._held = -1, held

    def _abort(self) -> None:
        """Free the open slots; committed slots stay."""
        for claim in self._open:
            if claim.slots[0] >= 0:
                self._index.abort(claim.slots, generations=claim.generations)

    def _begin(self, needed: int) -> tuple[Array, int]:
        """Allocate a slot for `needed` steps, or a full block if that needs no eviction; return blocks and steps."""
        evict, wait = self._table.policy
        first = min(max(needed, self._block_steps), self._chunk)
        if first > self._table.free_steps():
            first = needed
        claim = Claim(1)
        self._thread = threading.get_ident()
        self._open.append(claim)  # before the allocation, so that an interrupted call can be undone
        try:
            _, ids = self._index.begin(np.array([first]), evict=evict, wait=wait, claim=claim)
        except GearError:
            self._open.remove(claim)
            raise
        return ids, first

    def has_room(self, count: int) -> bool:
        """Whether `count` more steps fit into the blocks that the writer holds."""
        return self._steps + count <= self._held

    def ask_for_room(self, count: int, row: Array, place: int) -> int:
        """Ask for room for `count` more steps in a row of ``growth.reserve_rows``.

        Until `take_room`, what the writer holds is unknown, and `reserve` reads it from the index.

        Args:
            row: int64 [ROOM_WIDTH], output. place: of its blocks in `ids`.

        Returns:
            Most new blocks; -1 if it has to call `reserve` instead.
        """
        needed, size = self._steps + count, self._block_steps
        if needed > self._chunk or bool(self._open) != bool(self._held):
            return -1
        if not self._open:
            _pack_room(row.data, 0, -1, 0, needed, self._chunk, 0, place, 0, 0)
            claim = Claim(1)
            claim.slots = row[:1]  # a view: the operation writes into it
            self._thread = threading.get_ident()
            self._open.append(claim)
            return -(-max(needed, size) // size)
        run = data_address(self._run)
        _pack_room(row.data, 0, self._slot, self._held, needed, self._chunk, run, place, 0, 0)
        most = max(needed, min(2 * self._held, self._chunk))
        self._held = 0
        return -(-most // size) - len(self._ids)

    def take_room(self, row: Array, ids: Array) -> None:
        """Take the room that ``growth.reserve_rows`` has given."""
        claim, place, held = self._open[-1], int(row[ROOM_PLACE]), int(row[ROOM_HELD])
        if claim.generations is None:
            claim.generations = row[ROOM_GENERATION : ROOM_GENERATION + 1]
        more = -(-held // self._block_steps) - len(self._ids)
        self._ids = np.concatenate((self._ids, ids[place : place + more]))
        self._held = held

    def _show_block(self, block: int) -> None:
        for column in self._columns:
            column.show_block(int(self._ids[block]))
        self._here = block

    def _too_long(self, steps: int) -> SchemaError:
        return too_long(steps, self._table.longest)

    # ---------------------------------------------------------------- for callers that write into the blocks

    def reserve(self, count: int = 1) -> tuple[Array, int, int]:
        """Make room for the next steps, which the caller writes into their blocks itself and then counts by `written`.

        Returns:
            Blocks of the open trajectory, int32; the next step; end of the steps that may be written before `written`.

        Raises:
            As `append`.
        """
        self._check_usable()
        self._make_room(count)
        return self._ids, self._steps, min(self._held, self._chunk)

    def written(self, count: int) -> tuple[int, ...]:
        """Count steps that were written after `reserve`, or, if negative, take back such steps of the open chunk.

        Returns:
            As `append`.

        Raises:
            As `append`; no step was counted.
        """
        return self._appended(count)

    # ---------------------------------------------------------------- committing

    def commit(
        self,
        priority: float | None = None,
        *,
        final: Mapping[str, Any] | None = None,
        trajectory: Mapping[str, Any] | None = None,
    ) -> int:
        """Commit the appended steps as a trajectory; the next step begins another one.

        Args:
            priority, final: as for `Table.add`.
            trajectory: values of the columns per trajectory, ``{name: [*shape]}``; by default those of the attribute.

        Returns:
            Index of the trajectory; with chunks, of the last one, which an `append` may have committed.

        Raises:
            SchemaError: no step has been appended, `priority` or `final` does not fit, or the trajectory and its final
                step are longer than the table, or the chunks, allow.
            RateLimitError, LockTimeoutError: timed out. The appended steps are kept: retry or discard.
        """
        self._check_usable()
        checked = single_priority(priority)
        last = None if final is None else checked_final(self._added, final)
        once = self._checked_once(trajectory)
        if not self._fresh and (last is None or not self._overlap):
            if self._last_chunk is not None:
                if last is not None:
                    raise no_final_step()
                index = self._last_chunk
                self.discard()
                return index
            raise SchemaError("Nothing has been appended since the last commit; append at least one step.")
        slot, length, _ = self._completed(last, once)
        with self._all_or_nothing():
            self._index.finish(slot, length, checked, final=last is not None)
            self.count_commit()
        return slot

    def _completed(self, last: Mapping[str, Array] | None, once: dict[str, Array]) -> tuple[int, int, bool]:
        """Write the final step and what the trajectory has once.

        Returns:
            The slot, its steps with the final one, and whether there is one.
        """
        if last is not None:
            self._make_room(1)
            self._copy_in([data_address(row) for row in last.values()], self._ids, self._steps, 1)
        self._write_once(once)
        return self._slot, self._steps + (last is not None), last is not None

    @property
    def commits_together(self) -> bool:
        """Whether a caller may commit the open slot itself, with those of other writers; see `complete`."""
        return type(self) is Writer and not self._cuts and self._index.changes_rows

    def complete(self, final: Mapping[str, Any] | None) -> tuple[int, int, bool]:
        """Write what `commit` writes, for a caller that commits the open slot itself and then calls `count_commit`.

        Returns:
            The slot, its steps with the final one, and whether there is one.

        Raises:
            As `commit`.
        """
        last = None if final is None else checked_final(self._added, final)
        return self._completed(last, self._checked_once(None))

    def count_commit(self) -> None:
        """Count a commit of the open slot, and forget it."""
        self._forget()
        self._committed += 1

    def _cut(self) -> tuple[int, ...]:
        """Commit a chunk, and begin the next one with their common steps."""
        slot, evict, wait = self._slot, *self._table.policy
        priority = single_priority(self.priority)
        self._write_once(self._checked_once(None))
        stride = self._chunk - self._overlap
        with self._all_or_nothing():
            if self._shares:
                shared = stride // self._block_steps
                claim = Claim(1)
                self._open.append(claim)
                try:
                    self._index.roll(slot, self._steps, shared, priority, evict=evict, wait=wait, claim=claim)
                except GearError:
                    self._open.remove(claim)
                    raise
                del self._open[0]
                self._run[0] = max(0, self._run[0] - shared)
                self._ids = self._ids[shared:]
                self._held -= stride
            elif self._overlap:
                rows = self._copy_out(stride, self._overlap)
                ids, held = self._begin(self._overlap)
                self._copy_in([array.ctypes.data for array in rows], ids, 0, self._overlap)
                try:
                    self._index.finish(slot, self._steps, priority)
                except GearError:
                    self._index.abort(self._open[-1].slots)
                    del self._open[-1]
                    raise
                del self._open[0]
                self._ids, self._held = ids, held
                self._run[:] = 0
            else:
                self._index.finish(slot, self._steps, priority)
                self._forget()
            self._steps, self._fresh, self._here = self._overlap, 0, -1
            self._last_chunk = slot
            self._committed += 1
        return (slot,)

    def _checked_once(self, given: Mapping[str, Any] | None) -> dict[str, Array]:
        """The values of the columns per trajectory for a commit, uint8 [1, step_bytes] each."""
        return checked_once(self._added, self.trajectory if given is None else given)

    def _write_once(self, values: dict[str, Array]) -> None:
        """Write these values into the first block of the open trajectory, where no other trajectory has any."""
        for name, value in values.items():
            self._table.region.column(name)[self._ids[0], 0] = value[0]

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Discard uncommitted steps if the block is interrupted, because its progress is then unknown."""
        try:
            yield
        except GearError:
            raise
        except BaseException:
            self._abort()
            self._forget()
            raise

    _last_chunk: int | None = None

    def _copy_out(self, first: int, count: int) -> list[Array]:
        """Copy steps of the open trajectory: one array uint8 [count, step_bytes] per column."""
        blocks = np.arange(first, first + count) // self._block_steps
        inside = np.arange(first, first + count) % self._block_steps
        ids = self._ids[blocks]
        return [np.ascontiguousarray(column.data[ids, inside]) for column in self._columns]

    def discard(self) -> None:
        """Discard the steps appended since the last commit; completed chunks stay."""
        self._check_process()
        self._abort()
        self._forget()

    def close(self) -> None:
        """As `discard`; idempotent."""
        if here.pid == self._pid:
            self.discard()

    def _forget(self) -> None:
        self._open.clear()
        self._ids, self._held, self._steps, self._fresh, self._here = _NO_BLOCKS, 0, 0, 0, -1
        self._run[:] = 0
        self._last_chunk = None

    def _check_usable(self) -> None:
        if here.pid != self._pid:
            self._check_process()
        self._table.check_open()

    def _check_process(self) -> None:
        if here.pid != self._pid:
            raise GearError(
                f"A writer of process {self._pid} was used in process {here.pid}; make one with table.writer() "
                "in each process."
            )

    def __repr__(self) -> str:
        if getattr(self, "_committed", None) is None:
            return f"<{type(self).__name__}, not opened>"
        chunks = f", chunks of {self._chunk:,} steps, {self._overlap:,} overlapping" if self._cuts else ""
        return (
            f"<{type(self).__name__}: {self.num_steps:,} steps appended since the last commit, {self._committed:,} "
            f"trajectories committed{chunks}; to {self._table!r}>"
        )

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._fresh:
            self.commit(self.priority)
        else:
            self.close()


def reserve_together(writers: Sequence[Writer], count: int) -> bool:
    """Make room for `count` more steps of each of several writers of a table, under one lock, if none has to wait.

    Returns:
        Whether all have got it; the others have to call `reserve`.
    """
    writers = [writer for writer in writers if not writer.has_room(count)]
    if not writers or not writers[0]._index.changes_rows:
        return not writers
    table, index = writers[0]._table, writers[0]._index
    rows = np.empty((len(writers), ROOM_WIDTH), dtype=np.int64)
    asked = place = 0
    for writer in writers:
        blocks = writer.ask_for_room(count, rows[asked], place)
        if blocks < 0:
            break
        asked, place = asked + 1, place + blocks
    if not asked:
        return False
    ids = np.empty(place, dtype=np.int32)
    done = index.reserve_rows(rows[:asked], ids, evict=table.policy[0])
    for writer, row in zip(writers[:done], rows, strict=False):
        writer.take_room(row, ids)
    return done == len(writers)


def _give_up(index: Index, claims: list[Claim], pid: int) -> None:
    # The writer was garbage-collected; the next allocation that needs space reclaims its slots.
    if here.pid == pid:
        for claim in claims:
            index.abort(claim.slots, wait=False, generations=claim.generations)
