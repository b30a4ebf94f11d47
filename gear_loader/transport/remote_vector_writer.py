"""The writer of a remote table for the environments of a vector environment."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.storage.appender import too_long
from gear_loader.storage.incoming import checked_priorities
from gear_loader.storage.vector_rows import VectorRows
from gear_loader.transport.remote_writer import check_chunks
from gear_loader.transport.spool import Account, Episode, Piece, Spool
from gear_loader.utils.arrays import Array
from gear_loader.utils.available_memory import available_bytes
from gear_loader.utils.checks import at_least

__all__ = ["RemoteVectorWriter"]

_FIRST = 32  # steps of the first buffer
_ENVIRONMENT = 512  # bytes of an environment besides its steps


class RemoteVectorWriter(VectorRows):
    """Adds the trajectories of n environments to the table of a server, as a `VectorWriter` does.

    Made by `RemoteTable.writers`. One assignment a column writes the rows of all environments; trajectories are sent
    as those of a `RemoteWriter`. It is for one thread. As a context manager it commits all open trajectories at the
    end, or discards them if the block raises.

    Attributes:
        num_envs: number of environments.
        trajectory: values of the columns per trajectory, ``{name: [n, *shape]}``, of the trajectories that are
            committed next; None at first.
    """

    def __init__(
        self,
        spool: Spool,
        owner: object,
        n: int,
        *,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
    ) -> None:
        spool.check()
        self._chunk, self._overlap = check_chunks(spool, chunk_steps, overlap_steps)
        first = min(_FIRST, self._chunk)
        each, memory = _ENVIRONMENT + first * spool.schema.step_bytes, available_bytes()
        if memory is not None and at_least("n", n) > memory // each:
            raise SchemaError(
                f"n is {n:,}; expected at most {memory // each:,}, as {first} steps of an environment take {each:,} "
                f"bytes, and {memory:,} are available to this process."
            )
        super().__init__(spool.schema, n)
        self._spool = spool
        self._owner = owner
        self._cuts = chunk_steps is not None
        self._pid = os.getpid()
        self._step_bytes = spool.schema.step_bytes
        self._steps = spool.schema.steps
        self._episodes = [Episode() for _ in range(self.num_envs)]
        self._before = np.zeros(self.num_envs, dtype=np.int64)  # steps in the pieces of each episode
        self._inside = np.zeros(self.num_envs, dtype=np.int64)  # steps in the buffer
        self._fresh = np.zeros(self.num_envs, dtype=np.int64)  # steps that are in no committed chunk
        self._room = self._held = 0  # steps of the buffer for each environment; bytes of it
        self._account = Account()  # of the buffer, and of what a call commits
        self._buffer: Piece = {}

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> Array:
        """Steps of each environment since its last commit, int64 [n]; with chunks, steps of its current chunk."""
        steps: Array = self._before + self._inside
        return steps

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
            rows, columns, done, active, priority, final: as for `VectorWriter.append`.

        Returns:
            -1 for each environment, int64 [n]: indices in the server's table are not known yet.

        Raises:
            SchemaError: something does not fit, or a trajectory would be longer than the table can hold.
            PeerTimeoutError: the spool is full, and the server took nothing before the deadline.
            GearError: the server refused an earlier trajectory.

        After an error nothing was appended; after a time-out the call can be repeated. After any other exception
        (Ctrl-C) all open trajectories are discarded.
        """
        self._check_usable()
        ending = np.zeros(self.num_envs, dtype=bool) if done is None else self._mask("done", done)
        acting = np.ones(self.num_envs, dtype=bool) if active is None else self._mask("active", active)
        ending = ending & acting
        priorities = checked_priorities(priority, self.num_envs)
        last = None if final is None else self._checked_final(final, ending)
        self._once = self._checked_trajectory()
        given = self._given(rows, columns)
        self._check_option_names(given)
        length, arrays = self._steps.validate(given, what=self._what)
        self._check_count(length)
        steps = self.num_steps
        self._check_lengths(steps + acting, ending, final=last is not None)
        whole = acting & (steps + 1 == self._chunk) if self._cuts else np.zeros(self.num_envs, dtype=bool)
        full = acting & (self._inside + 1 >= self._spool.piece_steps)
        due = np.flatnonzero(ending | whole | full)
        with self._all_or_nothing():
            self._make_room(int(self._inside[acting].max(initial=0)) + 1 + (last is not None))
            size = int((self._inside[due] + 2).sum()) * self._step_bytes
            self._spool.reserve(self._account, self._held + size)
            self._write(arrays, np.flatnonzero(acting))
            for i in due.tolist():
                if whole[i]:
                    self._cut(i, float(priorities[i]))
                elif full[i]:
                    self._end_piece(i)
                    self._spool.send_ahead(self._episodes[i])
                if ending[i]:
                    self._commit(i, float(priorities[i]), last)
            self._spool.hold(self._account, self._held)
        return self._no_index.copy()

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Discard all open trajectories if the block is interrupted, because its progress is unknown."""
        try:
            yield
        except GearError:
            raise
        except BaseException:
            self.close()
            raise

    def _check_lengths(self, steps: Array, ending: Array, *, final: bool) -> None:
        """Check that no trajectory of these lengths is too long, with a final step if it ends."""
        needed = steps + (ending if final else 0)
        if self._cuts:
            if final and not self._overlap and (ending & (steps == self._chunk)).any():
                raise SchemaError(
                    "A chunk is complete with this row, so its stream cannot get a final step; give chunks an "
                    "overlap_steps of at least 1. Nothing was appended."
                )
            return
        if needed.max() > self._chunk:
            raise too_long(int(needed.max()), self._chunk)

    def _make_room(self, steps: int) -> None:
        """Make the buffer large enough for so many steps of each environment."""
        if steps <= self._room:
            return
        room = max(2 * self._room, steps, min(_FIRST, self._chunk))
        size = (room - self._room) * self._step_bytes * self.num_envs
        self._spool.reserve(self._account, self._account.size + size)
        self._held += size
        buffer = {n: np.empty((self.num_envs, room, c.step_bytes), np.uint8) for n, c in self._steps.items()}
        for name, values in self._buffer.items():
            buffer[name][:, : self._room] = values
        self._buffer, self._room = buffer, room

    def _write(self, arrays: Mapping[str, Array], which: Array) -> None:
        """Write the rows of environments, int64 [k]."""
        at = self._inside[which]
        together = len(which) == self.num_envs and (at == at[0]).all()
        for name, values in self._buffer.items():
            if together:
                values[:, at[0]] = arrays[name]
            else:
                values[which, at] = arrays[name][which]
        self._inside[which] += 1
        self._fresh[which] += 1

    def _end_piece(self, i: int) -> None:
        """Move the steps in the buffer to the trajectory of an environment."""
        count, episode = int(self._inside[i]), self._episodes[i]
        if count:
            episode.add({name: values[i, :count].copy() for name, values in self._buffer.items()}, count)
            self._spool.hold(episode, episode.size + count * self._step_bytes)
        self._before[i] += count
        self._inside[i] = 0

    # ---------------------------------------------------------------- committing

    def _finish(self, i: int, priority: float, *, final: bool) -> None:
        episode = self._episodes[i]
        once = {name: rows[i : i + 1] for name, rows in self._once.items()}
        episode.complete(priority, once, final=final)
        self._spool.commit(episode)

    def _begin(self, i: int) -> None:
        self._episodes[i] = Episode()
        self._before[i] = self._inside[i] = self._fresh[i] = 0

    def _cut(self, i: int, priority: float) -> None:
        """Commit a chunk of an environment, and begin the next one with their common steps."""
        self._end_piece(i)
        common = self._episodes[i].last(self._overlap) if self._overlap else {}
        self._finish(i, priority, final=False)
        self._begin(i)
        if self._overlap:
            self._make_room(self._overlap + 1)
            for name, values in common.items():
                self._buffer[name][i, : self._overlap] = values
            self._inside[i] = self._overlap

    def _commit(self, i: int, priority: float, final: Mapping[str, Any] | None) -> None:
        """Commit the trajectory of one environment."""
        if final is not None and (self._fresh[i] or self._overlap):
            row = {name: values[i : i + 1] if len(values) > 1 else values for name, values in final.items()}
            self._make_room(int(self._inside[i]) + 1)
            for name, values in row.items():
                self._buffer[name][i, self._inside[i]] = values[0]
            self._inside[i] += 1
        elif not self._fresh[i]:  # the last chunk is complete
            self._spool.hold(self._episodes[i], 0)
            self._begin(i)
            return
        self._end_piece(i)
        self._finish(i, priority, final=final is not None)
        self._begin(i)

    def commit(
        self, mask: Any = None, *, priority: Any = None, final: Mapping[str, Any] | None = None
    ) -> Array:
        """Commit open trajectories; the next rows of their environments begin others.

        Args:
            mask: bool [n]: of which environments; all by default. Environments without a step are left out.
            priority, final: as for `append`.

        Returns:
            -1 for each environment, int64 [n].

        Raises:
            As `append`; then nothing was committed. After any other exception (Ctrl-C) a trajectory will be stored, or
            is discarded.
        """
        self._check_usable()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        chosen = chosen & (self.num_steps > 0)
        priorities = checked_priorities(priority, self.num_envs)
        last = None if final is None else self._checked_final(final, chosen)
        self._once = self._checked_trajectory()
        self._check_lengths(self.num_steps * chosen, chosen, final=last is not None)
        with self._all_or_nothing():
            self._make_room(int(self._inside[chosen].max(initial=0)) + (last is not None))
            size = int((self._inside[chosen] + 1).sum()) * self._step_bytes
            self._spool.reserve(self._account, self._held + size)
            for i in np.flatnonzero(chosen).tolist():
                self._commit(i, float(priorities[i]), last)
            self._spool.hold(self._account, self._held)
        return self._no_index.copy()

    def discard(self, mask: Any = None) -> None:
        """Discard open trajectories; chunks that are complete stay.

        Args:
            mask: bool [n]: of which environments; all by default.
        """
        self._check_process()
        chosen = np.ones(self.num_envs, dtype=bool) if mask is None else self._mask("mask", mask)
        for i in np.flatnonzero(chosen).tolist():
            if not self._spool.is_committed(self._episodes[i]):
                self._spool.hold(self._episodes[i], 0)
            self._begin(i)

    def close(self) -> None:
        """As `discard`; idempotent."""
        if os.getpid() == self._pid:
            self.discard()
            self._buffer, self._room, self._held = {}, 0, 0
            self._spool.hold(self._account, 0)

    def _check_usable(self) -> None:
        self._check_process()
        self._spool.check()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise GearError(
                f"A vector writer of process {self._pid} was used in process {os.getpid()}; connect in each process."
            )

    def __del__(self) -> None:
        if getattr(self, "_buffer", None) is not None:
            self.close()

    def __repr__(self) -> str:
        return (
            f"<RemoteVectorWriter of {self.num_envs:,} environments: {int(self.num_steps.sum()):,} steps appended "
            f"since their last commits; to {self._spool.name}>"
        )

    def __enter__(self) -> RemoteVectorWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None:
            self.commit()
        self.close()
