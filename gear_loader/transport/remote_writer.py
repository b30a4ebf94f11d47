"""The writer of a remote table."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Mapping
from types import TracebackType
from typing import Any

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.storage.appender import no_final_step, too_long
from gear_loader.storage.incoming import checked_final, single_priority
from gear_loader.storage.step_appender import StepAppender, checked_once
from gear_loader.transport.spool import Buffer, Episode, Piece, Spool
from gear_loader.utils.checks import at_least
from gear_loader.utils.waiting import Backoff

__all__ = ["RemoteWriter", "check_chunks"]

_FIRST = 32  # steps of the first buffer of a piece


def check_chunks(spool: Spool, chunk_steps: int | None, overlap_steps: int) -> tuple[int, int]:
    """Check the options of a writer; returns steps of a chunk, or of the longest trajectory, and the overlap.

    Raises:
        SchemaError: as `Table.writer`.
    """
    overlap = at_least("overlap_steps", overlap_steps, least=0)
    if chunk_steps is None and overlap:
        raise SchemaError(f"overlap_steps is {overlap_steps} without chunk_steps; give both.")
    chunk = spool.longest if chunk_steps is None else at_least("chunk_steps", chunk_steps)
    if chunk > spool.longest or overlap >= chunk:
        raise SchemaError(
            f"chunk_steps is {chunk:,} and overlap_steps {overlap:,}; expected overlap_steps < chunk_steps <= "
            f"{spool.longest:,}, the longest trajectory that the table holds."
        )
    return chunk, overlap


class RemoteWriter(StepAppender):
    """Adds trajectories to the table of a server step by step, as a `Writer` does; made by `RemoteTable.writer`.

    `append` copies steps into this process's memory, and never waits for the network while there is room (see
    `spool_bytes` of `connect`). A thread sends them: of long trajectories a piece of 256 KiB whenever there is one, so
    that `commit` has only the rest to send.

    It is for one thread. As a context manager it commits the steps appended since the last `commit`, or discards them
    if the block raises.

    Attributes:
        priority: initial priority of chunks cut by `append`; None for the selector's running maximum.
        trajectory: values of the columns per trajectory, ``{name: [*shape]}``, of what is committed next, chunks too,
            unless `commit` gets them; None at first.
    """

    def __init__(
        self,
        spool: Spool,
        owner: object,
        *,
        wait: bool,
        timeout: float,
        chunk_steps: int | None = None,
        overlap_steps: int = 0,
    ) -> None:
        spool.check()
        self._spool = spool
        self._owner = owner  # kept alive, because the spool ends with it
        self._wait = wait
        self._timeout = timeout
        self._chunk, self._overlap = check_chunks(spool, chunk_steps, overlap_steps)
        self._cuts = chunk_steps is not None
        self.priority: float | None = None
        self.trajectory: Mapping[str, Any] | None = None
        nothing = {name: np.empty((0, c.step_bytes), np.uint8) for name, c in spool.schema.steps.items()}
        super().__init__(spool.schema.steps)
        self._pid = os.getpid()
        self._episode = Episode()
        self._buffer = Buffer(0, nothing, ())
        self._room = self._inside = 0  # steps of the buffer: those that may be written, and those that are
        self._fresh = 0  # steps that are in no committed chunk
        self._following: Episode | None = None  # while a chunk is cut
        self._cut_last = False  # whether the last call has ended with a complete chunk
        self._committed = 0

    # ---------------------------------------------------------------- appending

    @property
    def num_steps(self) -> int:
        """Steps appended since the last `commit`; with chunks, steps of the current chunk."""
        return self._episode.rows + self._inside

    @property
    def num_committed(self) -> int:
        """Trajectories that this writer has committed; with chunks, the number of chunks."""
        return self._committed

    def append(self, steps: Mapping[str, Any] | None = None, /, **columns: Any) -> tuple[int, ...]:
        """Append one step, or several. Arguments as for `Writer.append`.

        Returns:
            ().

        Raises:
            SchemaError: a value does not fit, or the trajectory would be longer than the table can hold.
            PeerTimeoutError: the spool is full, and the server took nothing before the deadline.
            GearError: the server refused an earlier trajectory.

        After an error nothing was appended, except for the steps of completed chunks. After a time-out the call can be
        repeated with the same step. Any other exception (Ctrl-C) may discard the steps appended since the last commit.
        """
        rows = self._given(steps, columns)
        self._spool.check()
        if self._inside >= self._room:
            rows = self._known(rows)
            if not self._is_single(rows):
                return self._append_many(rows)
            self._check_step(rows)
            self._make_room(1)
        if not self._put(self._inside, rows):
            rows = self._known(rows)
            if not self._is_single(rows):
                return self._append_many(rows)
            self._check_step(rows)
            self._put(self._inside, rows)
        self._appended(1)
        return ()

    def _append_many(self, rows: Mapping[str, Any]) -> tuple[int, ...]:
        length, arrays = self._plain_length(rows), None
        if not length:
            length, arrays = self._schema.validate(dict(rows), what="the steps")
        if not self._cuts and self.num_steps + length > self._chunk:
            raise too_long(self.num_steps + length, self._chunk)
        done = 0
        with self._all_or_nothing():
            while done < length:
                if self._inside >= self._room:
                    self._make_room(min(length - done, self._chunk - self.num_steps))
                count = min(length - done, self._room - self._inside)
                if arrays is None:
                    self._put_steps(self._inside, rows, done, count)
                else:
                    for name, values in self._buffer.piece.items():
                        values[self._inside : self._inside + count] = arrays[name][done : done + count]
                self._appended(count)
                done += count
        return ()

    def _make_room(self, count: int) -> None:
        """Make room for `count` more steps, at most those of a piece and of a chunk: at least for one."""
        if self.num_steps + 1 > self._chunk:
            raise too_long(self.num_steps + 1, self._chunk)
        most = min(self._spool.piece_steps, self._chunk - self._episode.rows)
        room = min(max(2 * self._room, self._inside + count, _FIRST), most)
        buffer = self._new_buffer(self._inside + count, room)
        size = (buffer.steps - self._room) * self._schema.step_bytes
        self._spool.reserve(self._episode, self._episode.size + size)
        if self._inside:
            for name, values in buffer.piece.items():
                values[: self._inside] = self._buffer.piece[name][: self._inside]
        self._write_into(buffer)

    def _new_buffer(self, least: int, most: int) -> Buffer:
        """A buffer of `least` to `most` steps, whose memory may be that of steps that are stored."""
        buffer = self._spool.take_buffer(least, most)
        if buffer is None:
            piece = {name: np.empty((most, c.step_bytes), np.uint8) for name, c in self._schema.items()}
            buffer = Buffer(most, piece, self._views(list(piece.values())))
        return buffer

    def _write_into(self, buffer: Buffer) -> None:
        """Make a buffer the current one."""
        self._room = 0  # until all columns show it
        self._show(buffer.views)
        self._buffer, self._room = buffer, buffer.steps

    def _appended(self, count: int) -> None:
        """Count written steps; hand over a piece that is full, and cut a chunk that is complete."""
        self._inside += count
        self._fresh += count
        if self._cuts and self.num_steps == self._chunk:
            try:
                with self._all_or_nothing():
                    self._cut()
            except GearError:
                self._inside -= count
                self._fresh -= count
                raise
        elif self._inside >= self._spool.piece_steps:
            with self._all_or_nothing():
                self._end_piece()
                self._spool.send_ahead(self._episode)

    @contextlib.contextmanager
    def _all_or_nothing(self) -> Iterator[None]:
        """Discard the open trajectory, unless it was committed, if the block is interrupted."""
        try:
            yield
        except BaseException as error:
            self._give_up(error)
            raise

    def _give_up(self, error: BaseException) -> None:
        if not isinstance(error, GearError) or self._spool.is_committed(self._episode):
            self.discard()

    def _end_piece(self) -> None:
        """Add what is written of the current buffer to the trajectory."""
        if self._inside:
            inside, buffer = self._inside, self._buffer
            whole = inside == buffer.steps
            piece = buffer.piece if whole else {name: each[:inside] for name, each in buffer.piece.items()}
            self._episode.add(piece, inside)
            self._episode.buffers.append(buffer)
        self._inside = self._room = 0

    # ---------------------------------------------------------------- committing

    def commit(
        self,
        priority: float | None = None,
        *,
        final: Mapping[str, Any] | None = None,
        trajectory: Mapping[str, Any] | None = None,
    ) -> int:
        """Commit the appended steps as a trajectory; the next step begins another one.

        Arguments as for `Writer.commit`.

        Returns:
            With ``wait``: the index in the server's table, with chunks of the last one; -1 if it was evicted since.
            Otherwise -1.

        Raises:
            SchemaError: as `Writer.commit`; the appended steps are kept.
            PeerTimeoutError: not stored before the deadline; it stays in the spool and will be, so do not repeat it.
            GearError: the server refused it, or an earlier trajectory.

        After any other exception (Ctrl-C) it will be stored, or is discarded.
        """
        self._spool.check()
        checked = single_priority(priority)
        last = None if final is None else checked_final(self._spool.schema, final)
        once = checked_once(self._spool.schema, self.trajectory if trajectory is None else trajectory)
        if not self._fresh and (last is None or not self._overlap):
            return self._end_stream(with_final=last is not None)
        began = Backoff(self._timeout)
        try:
            if last is not None:
                if self._inside >= self._room:
                    self._make_room(1)
                for name, row in last.items():
                    self._buffer.piece[name][self._inside] = row[0]
                self._inside += 1
            episode = self._finish(checked, once, final=last is not None, wait=self._wait)
            self._begin()
        except BaseException as error:  # as `_all_or_nothing`, which takes longer
            self._give_up(error)
            raise
        return self._answer(episode, began)

    def _end_stream(self, *, with_final: bool) -> int:
        """Commit without steps after the last chunk."""
        if not self._cut_last:
            raise SchemaError("Nothing has been appended since the last commit; append at least one step.")
        if with_final:
            raise no_final_step()
        last = self._last
        self.discard()
        return self._answer(last)

    def _answer(self, episode: Episode, since: Backoff | None = None) -> int:
        if not self._wait:
            return -1
        if not episode.is_stored:
            self._spool.flush(self._timeout, since)
        return episode.index

    def _finish(self, priority: float, once: Piece, *, final: bool, wait: bool = False) -> Episode:
        """Hand the trajectory over; with `wait`, store it at once if possible."""
        self._end_piece()
        episode = self._last = self._episode
        episode.complete(priority, once, final=final)
        if wait:
            self._spool.store_now(episode)
        else:
            self._spool.commit(episode)
        self._committed += 1
        return episode

    def _cut(self) -> None:
        """Commit a chunk, and begin the next one with their common steps."""
        priority = single_priority(self.priority)
        once = checked_once(self._spool.schema, self.trajectory)
        room = min(
            max(2 * self._overlap, _FIRST), max(self._spool.piece_steps, self._overlap + 1), self._chunk
        )
        size = room * self._schema.step_bytes if self._overlap else 0
        self._following = following = Episode()
        self._spool.reserve(following, size)
        self._end_piece()
        common = self._episode.last(self._overlap) if self._overlap else {}
        self._finish(priority, once, final=False)
        self._begin(following)
        self._cut_last = True
        if self._overlap:
            buffer = self._new_buffer(room, room)
            for name, values in buffer.piece.items():
                values[: self._overlap] = common[name]
            self._write_into(buffer)
            self._inside = self._overlap

    _last: Episode

    def _begin(self, episode: Episode | None = None) -> None:
        """Begin another trajectory."""
        self._episode, self._following = Episode() if episode is None else episode, None
        self._inside = self._room = self._fresh = 0
        self._cut_last = False

    def discard(self) -> None:
        """Discard the steps appended since the last commit; completed chunks stay."""
        self._check_process()
        self._release()
        self._begin()

    def _release(self) -> None:
        """Give back the bytes of what is not committed."""
        for episode in (self._episode, self._following):
            if episode is not None and not self._spool.is_committed(episode):
                self._spool.hold(episode, 0)

    def close(self) -> None:
        """As `discard`; idempotent."""
        if os.getpid() == self._pid:
            self.discard()

    def _check_process(self) -> None:
        if os.getpid() != self._pid:
            raise GearError(
                f"A writer of process {self._pid} was used in process {os.getpid()}; connect in each process."
            )

    def __del__(self) -> None:
        if getattr(self, "_episode", None) is not None and os.getpid() == self._pid:
            self._release()

    def __repr__(self) -> str:
        chunks = f", chunks of {self._chunk:,} steps, {self._overlap:,} overlapping" if self._cuts else ""
        return (
            f"<RemoteWriter: {self.num_steps:,} steps appended since the last commit, {self._committed:,} "
            f"trajectories committed{chunks}; to {self._spool.name}>"
        )

    def __enter__(self) -> RemoteWriter:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        if kind is None and self._fresh:
            self.commit(self.priority)
        else:
            self.close()
