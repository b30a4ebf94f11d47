"""The vector writer: adds the trajectories of n environments at once, one row of each per call."""

from __future__ import annotations

import struct
from collections.abc import Callable, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native import copying
from gear_loader.native.copying import (
    VECTOR_ACTIVE,
    VECTOR_BLOCK_STEPS,
    VECTOR_COLUMNS,
    VECTOR_COUNT,
    VECTOR_COUNTED,
    VECTOR_END,
    VECTOR_HEAD,
    VECTOR_LOOKS,
    VECTOR_NEXT,
    VECTOR_WIDTH,
)
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.operations.view import FINISH_PRIORITY, FINISH_SLOT, FINISH_WIDTH, GROWN_WIDTH
from gear_loader.storage.step_writer import StepWriter
from gear_loader.storage.vector_rows import VectorRows
from gear_loader.storage.writer import Target, Writer, here, reserve_together
from gear_loader.utils.arrays import Array, data_address
from gear_loader.utils.checks import at_least

__all__ = ["VectorWriter"]


class VectorWriter(VectorRows):
    """Adds the trajectories of n environments, which take their steps at the same time.

    Created by `Table.writers`. It behaves as n writers (`Writer`), but one call of compiled code writes the rows of all
    environments into their blocks. It is for one thread. As a context manager it commits all open trajectories at the
    end, or discards them if the block raises::

        with table.writers(envs.num_envs) as writer:
            observation, _ = envs.reset(seed=0)
            reset = np.zeros(envs.num_envs, dtype=bool)  # rows of autoreset mode NEXT_STEP that are no step
            for _ in range(1000):
                action = policy(observation)
                following, reward, terminated, truncated, _ = envs.step(action)
                done = terminated | truncated
                writer.append(
                    observation=observation, action=action, reward=reward.astype(np.float32), done=done, active=~reset
                )
                observation, reset = following, done

    With ``commit_every_step`` each row is visible when `append` returns (see `StepWriter`), one writer after another.
    With ``chunk_steps`` the stream of each environment is cut into chunks, as `Writer` does; `done` ends its stream.

    Attributes:
        num_envs: number of environments.
        trajectory: values of the columns per trajectory, ``{name: [n, *shape]}``, of the trajectories that are
            committed next (with ``commit_every_step``, that begin next); None at first. Their arrays may be changed in
            place.
        appended: bool [n], after an error of `append` (but SchemaError): the environments whose row was appended
            nevertheless.
    """

    def __init__(self, table: Target, n: int, make_writer: Callable[[], Writer]) -> None:
        count, layout = at_least("n", n), table.region.layout
        most = min(layout.max_trajectories, layout.num_blocks, layout.max_steps)
        if count > most:
            raise SchemaError(
                f"n is {count:,}; expected at most {most:,}, as each environment writes into a slot and a block of "
                f"its own and the table holds {layout.max_trajectories:,} trajectories, {layout.num_blocks:,} blocks "
                f"and {layout.max_steps:,} steps. Create the table larger."
            )
        super().__init__(table.schema.added, count)
        self._table = table
        self._pid = here.pid
        self._writers = [make_writer() for _ in range(count)]
        columns = table.step_addresses()
        width = len(columns)
        rows = VECTOR_HEAD + 4 * width
        self._request = np.zeros(rows + width + count * VECTOR_WIDTH, dtype=np.int64)
        self._request[[VECTOR_COUNT, VECTOR_COLUMNS, VECTOR_BLOCK_STEPS]] = count, width, layout.block_steps
        self._request[VECTOR_HEAD:rows] = columns.reshape(-1)
        self._places = self._request[rows + width :].reshape(count, VECTOR_WIDTH)
        self._blocks: list[Array] = [self._request] * count  # hold the memory that the places name
        self._together = self._writers[0].commits_together
        self._request[VECTOR_LOOKS] = not self._together
        self._bytes = self._request.data
        self._pack_masks = struct.Struct("=2q").pack_into
        self._pack_rows = struct.Struct(f"={width}q").pack_into
        self._pack_place = struct.Struct(f"={VECTOR_WIDTH}q").pack_into
        self._rows_at = 8 * rows
        self._places_at = 8 * (rows + width)
        # Name, dtype and shape of rows that need no further look.
        self._plain = [
            (name, column.numpy_dtype, (count, *column.shape))
            for name, column in table.schema.added.steps.items()
        ]
        self._step_bytes = np.ascontiguousarray(columns[:, 2])
        self._everyone = np.arange(count)
        self._grown = np.zeros(
            (count, GROWN_WIDTH), dtype=np.int64
        )  # trajectories of writers that commit every step
        for writer, row in zip(self._writers, self._grown, strict=True):
            if isinstance(writer, StepWriter):
                writer.grown = row
        self._nobody = np.zeros(count, dtype=bool)
        self._nobody.flags.writeable = False
        self.appended: Array = self._nobody

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> Array:
        """Steps of each environment since its last commit, int64 [n]; with chunks, steps of its current chunk."""
        counted = np.array([writer.num_steps for writer in self._writers], dtype=np.int64)
        return counted + (self._places[:, VECTOR_NEXT] - self._places[:, VECTOR_COUNTED])

    def append(
        self,
        rows: Mapping[str, Any] | None = None,
        /,
        *,
        done: Any = None,
        active: Any = None,
        priority: Any = None,
        final: Mapping[str, Any] | None = None,
        **columns: Any,
    ) -> Array:
        """Append one step of each environment, and commit the trajectories that end with it.

        Args:
            rows, columns: ``[n, *shape]`` for every column, as one mapping or as keywords: numpy arrays or torch
                tensors of exactly the column's dtype. Columns called as one of the options below are given in `rows`.
            done: bool [n], array, tensor or list: environments whose trajectory ends with this row; it is committed. By
                default none.
            active: bool [n]: environments that took a step; rows of the others, and their `done`, are ignored. By
                default all. Gymnasium's autoreset mode NEXT_STEP needs it: the row after `done` is a reset.
            priority: initial priority of what this call commits, as for `Table.add`: one number, or [n].
            final: values after the last step, as for `Writer.commit`: ``[n, *shape]`` for each column with
                ``Column(final=True)``, of which the rows of the environments that are done are read. Objects are taken
                too, one for each environment, None where nothing ended: ``{"obs": info.get("final_obs")}`` in
                Gymnasium's autoreset mode SAME_STEP; of a Dict space ``info.get("final_obs")`` itself.

        Returns:
            Index of the trajectory (or chunk) that this call has committed for each environment, -1 without one,
            int64 [n].

        Raises:
            SchemaError: something does not fit, or a trajectory would be longer than the table can hold.
            TableFullError, RateLimitError, LockTimeoutError: as `Writer.append` and `Writer.commit`.

        After an error nothing was appended, except for environments whose trajectory or chunk this call had committed
        before: `appended`. To try again, repeat the call with ``active=active & ~writer.appended``. After any other
        exception (Ctrl-C) all open trajectories are discarded.
        """
        self._check_usable()
        ending = None if done is None else self._mask("done", done)
        acting = None if active is None else self._mask("active", active)
        priorities = None if priority is None else checked_priorities(priority, self.num_envs)
        last = None
        if final is not None:
            ends = self._nobody if ending is None else ending
            last = self._checked_final(final, ends if acting is None else ends & acting)
        self._check_trajectory()
        addresses, hold = self._located(rows, columns)
        self.appended = self._nobody
        if isinstance(self._writers[0], StepWriter):
            return self._append_each(addresses, ending, acting, priorities, last)
        self._pack_masks(
            self._bytes,
            8 * VECTOR_ACTIVE,
            0 if acting is None else data_address(acting),
            0 if ending is None else data_address(ending),
        )
        self._pack_rows(self._bytes, self._rows_at, *addresses)
        try:
            due = copying.append_rows(self._request)
            if due < 0:
                self._make_room(acting)
                due = copying.append_rows(self._request)
            del hold
            return self._ended(ending, acting, priorities, last) if due else self._no_index.copy()
        except GearError:
            raise
        except BaseException:
            self.close()  # how far the call has come is not known
            raise

    def _append_each(
        self,
        addresses: list[int],
        ending: Array | None,
        acting: Array | None,
        priorities: Array | None,
        final: Mapping[str, Any] | None,
    ) -> Array:
        """Append with writers that commit every step: one call under the lock up to each environment that is done."""
        indices = self._no_index.copy()
        self.appended = appended = self._nobody.copy()
        chosen = self._everyone if acting is None else np.flatnonzero(acting)
        if not len(chosen):
            return indices
        ends = [] if ending is None else (np.flatnonzero(ending[chosen]) + 1).tolist()
        places = np.array(addresses, dtype=np.int64)
        if priorities is not None:
            for i in chosen.tolist():
                self._writers[i].priority = float(priorities[i]) if priorities[i] >= 0 else None
        at = 0
        for end in dict.fromkeys([*ends, len(chosen)]):
            while at < end:
                added = self._add_rows(places, chosen[at:end])
                appended[chosen[at : at + added]] = True
                at += added
                if at < end:  # its trajectory begins, is gone, or does not fit at once
                    i = int(chosen[at])
                    writer = self._hand_out(i)
                    assert isinstance(writer, StepWriter)
                    writer.append_at(places + i * self._step_bytes, 1)
                    appended[i] = True
                    at += 1
            i = int(chosen[end - 1])
            if ending is not None and ending[i]:
                last = None if final is None else {name: values[i] for name, values in final.items()}
                indices[i] = self._writers[i].commit(final=last)
        self.appended = self._nobody
        return indices

    def _add_rows(self, places: Array, chosen: Array) -> int:
        """Add rows to trajectories that grow; return how many, of the environments `chosen`, came first."""
        evict, _ = self._table.policy
        columns, longest = self._table.step_addresses(), self._table.longest
        return self._table.index.add_rows(columns, places, self._grown, chosen, longest=longest, evict=evict)

    def _located(self, rows: Any, columns: dict[str, Any]) -> tuple[list[int], object]:
        """Check the rows; return the address of each column, and what holds their memory."""
        rows = self._given(rows, columns)
        if type(rows) is dict and len(rows) == len(self._plain):
            found = []
            for name, dtype, shape in self._plain:
                value = rows.get(name)
                if type(value) is not np.ndarray or value.dtype != dtype or value.shape != shape:
                    break
                if dtype is None or not value.flags.c_contiguous:
                    break
                found.append(data_address(value))
            else:
                return found, rows
        self._check_option_names(rows)
        length, addresses, hold = self._table.schema.added.steps.locate(rows, what=self._what)
        self._check_count(length)
        return addresses, hold

    def _hand_out(self, i: int) -> Writer:
        """The writer of an environment, which knows what its trajectory has once."""
        writer = self._writers[i]
        if self._once is not None:
            writer.trajectory = {name: values[i] for name, values in self._once.items()}
        return writer

    def _make_room(self, acting: Array | None) -> None:
        """Allocate blocks for each active environment that has reached the end of its blocks."""
        places = self._places
        without = places[:, VECTOR_NEXT] >= places[:, VECTOR_END]
        which = (without if acting is None else without & acting).nonzero()[0].tolist()
        if self._together:  # else `_ended` has done so
            for i in which:
                self._count(i)
        reserve_together([self._writers[i] for i in which], 1)
        for i in which:
            self._blocks[i], step, end = self._writers[i].reserve()
            address = data_address(self._blocks[i])
            self._pack_place(self._bytes, self._places_at + 8 * VECTOR_WIDTH * i, address, step, end, step)

    def _count(self, i: int) -> tuple[int, ...]:
        """Tell an environment's writer of the steps written since the last time; return chunks that it has cut."""
        place = self._places[i]
        chunks = self._writers[i].written(int(place[VECTOR_NEXT] - place[VECTOR_COUNTED]))
        place[VECTOR_COUNTED] = place[VECTOR_NEXT]
        if chunks:
            place[:] = 0
        return chunks

    # ---------------------------------------------------------------- committing

    def _ended(
        self,
        ending: Array | None,
        acting: Array | None,
        priorities: Array | None,
        final: Mapping[str, Any] | None,
    ) -> Array:
        """Commit chunks and trajectories that have ended; unless that is done together, look at ends of blocks too."""
        places = self._places
        due = self._nobody.copy() if self._together else places[:, VECTOR_NEXT] == places[:, VECTOR_END]
        if ending is not None:
            due |= ending
        if acting is not None:
            due &= acting
        indices = self._no_index.copy()
        try:
            if self._together:
                which = due.nonzero()[0].tolist()
                for i in which:
                    self._count(i)
                self._commit_together(which, priorities, final, indices)
            else:
                for i in due.nonzero()[0].tolist():
                    for index in self._count_with(i, priorities):
                        indices[i] = index
                    if ending is not None and ending[i]:
                        indices[i] = self._commit(i, priorities, final)
        except GearError:
            self.appended = indices >= 0
            self._take_back(~self.appended if acting is None else acting & ~self.appended)
            raise
        return indices

    def _commit_together(
        self, which: list[int], priorities: Array | None, final: Mapping[str, Any] | None, indices: Array
    ) -> None:
        """Commit the trajectories of environments, all of whose steps are counted, under one lock.

        Args:
            indices: int64 [n], output, of those that are committed, also if another one fails.
        """
        rows = np.zeros((len(which), FINISH_WIDTH), dtype=np.int64)
        rows[:, FINISH_PRIORITY].view(np.float64)[:] = UNSET if priorities is None else priorities[which]
        if final is not None and which:
            reserve_together([self._writers[i] for i in which], 1)
        ready, failure = 0, None
        for i in which:
            last = None if final is None else {name: values[i] for name, values in final.items()}
            try:
                rows[ready, :FINISH_PRIORITY] = self._hand_out(i).complete(last)
            except GearError as error:  # the ones before it are committed first
                failure = error
                break
            ready += 1
        together = ready > 0 and self._table.index.finish_rows(rows[:ready])
        for i, row in zip(which[:ready], rows, strict=False):
            if together:
                self._writers[i].count_commit()
                self._places[i] = 0
                indices[i] = row[FINISH_SLOT]
            else:
                indices[i] = self._commit(i, priorities, final)
        if failure is not None:
            raise failure

    def _count_with(self, i: int, priorities: Array | None) -> tuple[int, ...]:
        """`_count`, with a priority for the chunks."""
        writer = self._hand_out(i)
        writer.priority = None if priorities is None else float(priorities[i])
        return self._count(i)

    def _commit(self, i: int, priorities: Array | None, final: Mapping[str, Any] | None) -> int:
        """Commit the trajectory of one environment, all of whose steps are counted."""
        options = {} if final is None else {"final": {name: values[i] for name, values in final.items()}}
        given = priorities is not None and not isinstance(self._writers[i], StepWriter)
        index = self._hand_out(i).commit(float(priorities[i]) if given else None, **options)  # type: ignore[index]
        self._places[i] = 0
        return index

    def _take_back(self, which: Array) -> None:
        """Take back the last row of environments."""
        for i in np.flatnonzero(which).tolist():
            place = self._places[i]
            if place[VECTOR_COUNTED] == place[VECTOR_NEXT]:
                self._writers[i].written(-1)
                place[VECTOR_COUNTED] -= 1
            place[VECTOR_NEXT] -= 1

    def commit(
        self, mask: Any = None, *, priority: Any = None, final: Mapping[str, Any] | None = None
    ) -> Array:
        """Commit open trajectories; the next rows of their environments begin others.

        Args:
            mask: bool [n]: of which environments; all by default. Environments without a step are left out.
            priority, final: as for `append`.

        Returns:
            Index of each environment's trajectory, -1 without one, int64 [n].

        Raises:
            SchemaError, RateLimitError, LockTimeoutError: as `Writer.commit`. The steps that are not committed are
                kept: the call can be repeated.
        """
        self._check_usable()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        priorities = None if priority is None else checked_priorities(priority, self.num_envs)
        chosen = chosen & (self.num_steps > 0)
        last = None if final is None else self._checked_final(final, chosen)
        self._check_trajectory()
        indices = self._no_index.copy()
        try:
            for i in np.flatnonzero(chosen).tolist():
                if not isinstance(self._writers[i], StepWriter):
                    self._count(i)
                indices[i] = self._commit(i, priorities, last)
        except GearError:
            raise
        except BaseException:
            self.close()
            raise
        return indices

    def discard(self, mask: Any = None) -> None:
        """Discard open trajectories; chunks that are complete stay.

        Args:
            mask: bool [n]: of which environments; all by default.
        """
        self._check_process()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        for i in np.flatnonzero(chosen).tolist():
            self._writers[i].discard()
            self._places[i] = 0

    def close(self) -> None:
        """As `discard`; idempotent."""
        for writer in self._writers:
            writer.close()
        self._places[:] = 0

    def _check_usable(self) -> None:
        self._check_process()
        self._table.check_open()

    def _check_process(self) -> None:
        if here.pid != self._pid:
            raise GearError(
                f"A vector writer of process {self._pid} was used in process {here.pid}; make one with "
                "table.writers() in each process."
            )

    def __repr__(self) -> str:
        if getattr(self, "appended", None) is None:
            return "<VectorWriter, not opened>"
        steps = int(self.num_steps.sum())
        return (
            f"<VectorWriter of {self.num_envs:,} environments: {steps:,} steps appended since their last commits; to "
            f"{self._table!r}>"
        )

    def __enter__(self) -> VectorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()
