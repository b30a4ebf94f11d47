"""The writer: adds a trajectory step by step."""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.native.lanes import LANE_COMMON, LANE_GENERATION, LANE_HELD, LANE_LAST, LANE_SLOT, LANE_STEPS
from gear_loader.storage.appender import Appender, Bytes, Given, Sink, here, no_final_step, too_long
from gear_loader.storage.incoming import checked_final, single_priority
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import as_mapping, settled
from gear_loader.storage.step_columns import StepColumn, checked_once
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.lazy_torch import is_tensor

_LANE: Array = np.zeros(1, dtype=np.int64)
_ENDS: Array = np.ones(1, dtype=bool)
_GOES_ON: Array = np.zeros(1, dtype=bool)


class Writer:
    """Adds trajectories step by step: `append` steps, then `commit`.

    Created by `Table.writer`, and by `writer` of a remote table. Steps are written directly into the table's blocks and
    are invisible until `commit`. Use a writer in one thread; a table may have any number of writers in any number of
    processes. If the process dies, its uncommitted steps are reclaimed when their space is needed.

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

    **Each step at once.** With ``commit_every_step`` the trajectory in the table grows with every `append`. A learner
    can draw a step as soon as `append` has returned, and windows reach across all steps so far. The trajectory keeps
    its index, and its place in the order of insertion. `commit` ends it; so does the step after a whole chunk, which
    begins the next chunk with copies of their common steps. If the process dies, the appended steps stay. In a table
    with a disk tier, a trajectory that has waited long for its next step may be on disk; the step then brings it back
    first. If the trajectory is evicted or removed while it grows, the next step begins another one.

    **Remote tables.** `append` copies steps into this process's memory, and never waits for the network while there is
    room (see `spool_bytes` of `connect`). A thread sends long trajectories in pieces of 256 KiB, so that `commit` has
    only the rest to send.

    Attributes:
        priority: initial priority of chunks cut by `append`, and of trajectories that grow; None for the sampler's
            running maximum.
        trajectory: values of the columns per trajectory, ``{name: [*shape]}``, for the next commits, chunks too, unless
            `commit` gets them; None at first. With `commit_every_step` set them before a trajectory's first step.
    """

    def __init__(self, sink: Sink, *, chunk_steps: int | None = None, overlap_steps: int = 0) -> None:
        self._sink = sink
        self._appender = Appender(sink, "writer", chunk_steps=chunk_steps, overlap_steps=overlap_steps)
        self._schema = sink.schema.steps
        self._columns = [StepColumn(name, column) for name, column in self._schema.items()]
        self._puts = [(column.name, column.put) for column in self._columns]
        self._lane = sink.lanes.reshape(-1).data
        self._cut_at = -1 if sink.grows else sink.chunk
        self._first = self._end = 0  # steps that the columns' views show: the first one, and the end
        self._single = sink.plain({column.name: column.spare for column in self._columns})
        self._given = Given(1)
        self.priority: float | None = None
        self.trajectory: Mapping[str, Any] | None = None
        self._committed = 0

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> int:
        """Steps appended since the last `commit`; with chunks, steps of the current chunk."""
        return self._lane[LANE_STEPS]

    @property
    def num_committed(self) -> int:
        """Trajectories that this writer has committed; with chunks, the number of chunks."""
        return self._committed

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """Append one step, or several.

        Args:
            steps, columns: a value for every column, as one mapping or as keywords: for one step ``[*shape]``, for k
                steps ``[k, *shape]``; a numpy array or torch tensor of exactly the column's dtype. One step of a column
                of shape ``()`` may be a Python or numpy number. Of a ragged column one value, or a list of k, or a
                `Ragged`. A column with ``cast=True`` takes more, see `Column`. Dicts may be nested, as for `Table.add`.

        Returns:
            Indices of the chunks completed by this call; () without chunks, and in a remote table, where they are not
            known yet. With ``commit_every_step`` the indices of the trajectories that got the steps, in order: one
            without chunks.

        Raises:
            SchemaError: a value does not fit, or the trajectory would be longer than the table can hold.
            TableFullError, RateLimitError, LockTimeoutError: as `Table.add`. If open writers of this thread hold the
                space, TableFullError is raised without a wait, which would deadlock.
            PeerTimeoutError: the spool of a remote table is full, and the server took nothing before the deadline.
            GearError: the server refused an earlier trajectory.

        After an error nothing was appended, except for the steps of completed chunks. After a time-out the call can be
        repeated with the same step. Any other exception (Ctrl-C) may discard the steps appended since the last commit.
        """
        rows: Mapping[str, Any] = columns if steps is None else self._joined(steps, columns)
        if len(rows) != len(self._puts):
            rows = as_mapping(rows, self._schema.objects)
            self._schema.validate_names(rows, what="the step")
        if self._schema.casts:
            rows = self._schema.cast(rows, what="the step")
        self._appender.check_usable()
        if self._schema.ragged:
            return self._append(self._located_ragged(rows))
        lane = self._lane
        step = lane[LANE_STEPS]
        if step < self._end and self._put(step - self._first, rows):
            lane[LANE_STEPS] = step + 1
            return () if step + 1 != self._cut_at else self._cut(1)
        if self._sink.grows and self._put(0, rows):  # into the spares
            return self._append(self._single)
        rows = self._schema.cast(as_mapping(rows), what="the step")
        if self._is_single(rows):
            self._check_step(rows)
            return self._append(self._single)
        return self._append(self._sink.located(rows, "the steps"))

    def _located_ragged(self, rows: Mapping[str, Any]) -> Any:
        """Check one step, or several, of which some columns are ragged."""
        rows, schema = as_mapping(rows, self._schema.objects), self._schema
        schema.validate_names(rows, what="the step")
        fixed = {name: value for name, value in rows.items() if name not in schema.ragged}
        rows = {**rows, **schema.cast(fixed, what="the step")}
        if not self._is_single(rows):
            return self._sink.located(rows, "the steps")
        given = {name: [value] for name, value in rows.items() if name in schema.ragged}
        for column in self._columns:
            if column.name not in given:
                if not column.fits(rows[column.name]):
                    raise column.misfit(rows[column.name])
                given[column.name] = schema[column.name].values_of(column.spare)
        return self._sink.located(given, "the step")

    def _append(self, rows: Any) -> tuple[int, ...]:
        """Append steps that have been checked."""
        sink, lane, length = self._sink, self._lane, rows.length
        if not self._appender.cuts and lane[LANE_STEPS] + length > self._appender.chunk:
            raise too_long(lane[LANE_STEPS] + length, sink.longest)
        if sink.grows:  # also if the trajectory has a step: it may be gone
            self._describe(self.priority, self.trajectory)
            return self._grow(rows)
        self._end = done = 0
        indices: tuple[int, ...] = ()
        while done < length:
            if lane[LANE_STEPS] == self._cut_at:
                indices += self._cut(0)  # left undone by an interrupted call
            count = min(length - done, self._appender.chunk - lane[LANE_STEPS])
            count = sink.add(rows, done, count, self._given)
            done += count
            if lane[LANE_STEPS] == self._cut_at:
                indices += self._cut(count)
        if not self._schema.ragged:
            self._first, self._end = sink.show(self._columns)
        return indices

    def _grow(self, rows: Any) -> tuple[int, ...]:
        """Append steps that are visible at once; return the trajectories that have them."""
        lane, done = self._lane, 0
        known, indices = (lane[LANE_SLOT], lane[LANE_GENERATION]), []
        while done < rows.length:
            done += self._sink.add(rows, done, rows.length - done, self._given)
            indices.append(lane[LANE_SLOT])
            now = lane[LANE_SLOT], lane[LANE_GENERATION]
            self._committed += now != known
            known = now
        return tuple(indices)

    def _cut(self, count: int) -> tuple[int, ...]:
        """Commit a chunk, and begin the next one with their common steps; take back `count` steps if that fails."""
        self._end = 0
        try:
            self._describe(self.priority, self.trajectory)
            self._sink.end(_LANE, _GOES_ON, self._given)
        except GearError:
            self._lane[LANE_STEPS] -= count
            raise
        except BaseException:
            self.discard()  # how far the call has come is not known
            raise
        self._committed += 1
        index = int(self._given.out[0])
        return (index,) if index >= 0 else ()

    def _describe(
        self, priority: float | None, trajectory: Mapping[str, Any] | None, last: Bytes | None = None
    ) -> None:
        """Check what a trajectory gets beside its steps, and have it ready."""
        given = self._given
        given.priorities[0], given.last = single_priority(priority), last
        given.once, given.ragged = checked_once(self._sink.schema, trajectory)

    # ---------------------------------------------------------------- checking steps

    def _put(self, inside: int, rows: Mapping[str, Any]) -> bool:
        """Write one step; return False if a value does not fit, or a column is missing."""
        try:
            for name, put in self._puts:
                if not put(inside, rows[name]):
                    return False
        except KeyError:
            return False
        return True

    def _joined(self, steps: Mapping[str, Any], columns: dict[str, Any]) -> dict[str, Any]:
        steps = as_mapping(steps, self._schema.objects)
        if not isinstance(steps, Mapping):
            raise SchemaError(
                f"The step is a {type(steps).__name__}; expected a mapping of the columns {list(self._schema)}, "
                "or the columns as keywords."
            )
        return {**settled(steps), **columns}

    def _check_step(self, rows: Mapping[str, Any]) -> None:
        """Raise SchemaError for a step that does not fit, before blocks are allocated for it."""
        self._schema.validate_names(rows, what="the step")
        for column in self._columns:
            if not column.fits(rows[column.name]):
                raise column.misfit(rows[column.name])

    def _is_single(self, rows: Mapping[str, Any]) -> bool:
        """Whether the rows are one step; several steps have an additional dimension in every column."""
        for column in self._columns:
            if column.name not in rows:
                self._schema.validate_names(rows, what="the step")
            value, ragged = rows[column.name], self._schema[column.name].ragged
            if ragged is not None:
                if ragged.kind == "object":
                    continue
                several = isinstance(value, (list, tuple, Ragged)) or (is_tensor(value) and value.is_nested)
                return not several and not (
                    ragged.coded is not None and getattr(value, "ndim", 0) == len(ragged.coded.shape) + 1
                )
            if getattr(value, "ndim", 0) != len(column.shape) + 1:
                return True
        return all(column.ragged is not None for column in self._schema.values())

    # ---------------------------------------------------------------- for callers that write into the blocks

    def reserve(self, count: int = 1) -> tuple[Array, int, int]:
        """Make room for the next steps, which the caller writes into their blocks itself and then counts by `written`.

        Returns:
            Blocks of the open trajectory, int32; the next step; end of the steps that may be written before `written`.

        Raises:
            As `append`.
        """
        sink: Any = self._sink
        self._appender.check_usable()
        sink.room(_LANE, count)
        return sink.blocks_of(0), self._lane[LANE_STEPS], min(self._lane[LANE_HELD], self._appender.chunk)

    def written(self, count: int) -> None:
        """Count steps that were written after `reserve`."""
        self._lane[LANE_STEPS] += count

    @property
    def open_slots(self) -> tuple[int, list[int]]:
        """Thread of the writer, and the slots that it is writing (empty in a forked child)."""
        sink: Any = self._sink
        slots: tuple[int, list[int]] = sink.open_slots
        return slots

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
                With ``commit_every_step`` a trajectory has both since its first step: `priority` and `trajectory` must
                be None.

        Returns:
            Index of the trajectory; with chunks, of the last one, which an `append` may have committed. With
            ``commit_every_step`` another trajectory may have it if this one was evicted meanwhile. Of a remote table
            -1, or with ``wait`` the index in the server's table (-1 if it was evicted since).

        Raises:
            SchemaError: no step has been appended, `priority` or `final` does not fit, or the trajectory and its final
                step are longer than the table, or the chunks, allow.
            RateLimitError, LockTimeoutError: timed out. The appended steps are kept: retry or discard.
            PeerTimeoutError: not stored by the server before the deadline; it stays in the spool and will be, so do not
                repeat it.
            GearError: the server refused it, or an earlier trajectory.

        After any other exception (Ctrl-C) it is committed, or is discarded.
        """
        self._appender.check_usable()
        last = None if final is None else checked_final(self._sink.schema, final)
        if not self._sink.grows:
            self._describe(priority, self.trajectory if trajectory is None else trajectory, last)
        else:
            _check_grown(priority, trajectory)
            self._given.last = last
        lane, appender = self._lane, self._appender
        nothing = lane[LANE_STEPS] == lane[LANE_COMMON] and (last is None or not appender.overlap)
        if nothing or not lane[LANE_STEPS]:
            return self._end_stream(last)
        if last is not None and lane[LANE_STEPS] == appender.chunk and not self._sink.grows:
            raise too_long(lane[LANE_STEPS] + 1, self._sink.longest)
        self._end = 0
        try:
            self._sink.end(_LANE, _ENDS, self._given)
        except GearError:
            raise
        except BaseException:
            self.discard()
            raise
        self._committed += not self._sink.grows
        return max(int(self._given.out[0]), -1)

    def _end_stream(self, last: Bytes | None) -> int:
        """Commit without steps after the last chunk."""
        if self._lane[LANE_LAST] < 0:
            raise SchemaError("Nothing has been appended since the last commit; append at least one step.")
        if last is not None:
            raise no_final_step()
        index = int(self._sink.last_indices(_LANE)[0])
        self.discard()
        return index

    def discard(self) -> None:
        """Discard the steps appended since the last commit; completed chunks stay, and so do steps that are visible."""
        self._appender.check_process()
        self._end = 0
        self._sink.abort(_LANE)

    def close(self) -> None:
        """As `discard`; idempotent."""
        if here.pid == self._appender.pid:
            self.discard()

    def __repr__(self) -> str:
        if getattr(self, "_committed", None) is None:
            return f"<{type(self).__name__}, not opened>"
        appender = self._appender
        overlap = f", {appender.overlap:,} overlapping" if appender.cuts else ""
        chunks = f", chunks of {appender.chunk:,} steps{overlap}" if appender.cuts else ""
        return (
            f"<{type(self).__name__}: {self.num_steps:,} steps appended since the last commit, {self._committed:,} "
            f"trajectories committed{chunks}; to {self._sink.name}>"
        )

    def __enter__(self) -> Writer:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and not self._sink.grows and self._lane[LANE_STEPS] > self._lane[LANE_COMMON]:
            self.commit(self.priority)
        else:
            self.close()


def _check_grown(priority: float | None, trajectory: Mapping[str, Any] | None) -> None:
    """Raise SchemaError for values that a trajectory which grows has since its first step."""
    if priority is not None:
        raise SchemaError(
            f"priority is {shown(priority)}, but the trajectory is visible already; set writer.priority before its "
            "first step, or call ReplayDataset.update_priority."
        )
    if trajectory is not None:
        raise SchemaError(
            "trajectory was given to commit, but the trajectory is visible already; set writer.trajectory before "
            "its first step."
        )
