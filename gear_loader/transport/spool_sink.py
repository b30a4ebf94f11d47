"""The sink of a remote table: steps are copied into the memory of this process, and a spool sends them."""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.native.lanes import EMPTY_LANE, LANE_COMMON, LANE_LAST, LANE_STEPS
from gear_loader.storage.appender import KNOWN_LATER, Bytes, Given, too_long
from gear_loader.storage.ragged_input import StepValues, with_step_records
from gear_loader.transport.ragged_rows import copied_values, measured
from gear_loader.transport.spool import Account, Buffer, Episode, Piece, Spool
from gear_loader.utils.arrays import Array
from gear_loader.utils.available_memory import available_bytes
from gear_loader.utils.checks import at_least
from gear_loader.utils.waiting import Backoff

if TYPE_CHECKING:
    from gear_loader.storage.step_columns import StepColumn

_FIRST = 32  # steps of the first buffer
_LANE = 512  # bytes of a lane besides its steps
_ONCE = 1 << 62  # behind all steps


class _Steps(NamedTuple):
    """Checked steps.

    Attributes:
        length: number of steps. columns: uint8 [length, step_bytes] each. ragged: the values of those that are ragged.
    """

    length: int
    columns: Bytes
    ragged: StepValues | None = None


class SpoolSink:
    """Gathers the steps of lanes in a buffer, and hands trajectories to a spool; see `Sink`.

    A buffer has room for steps of all lanes. That of a single lane is handed over without a copy; of several, the steps
    of a lane are copied out when they are a piece, or when its trajectory ends.

    Args:
        spool: where trajectories go. owner: kept alive, because the spool ends with it. n: number of lanes.
        wait: whether the end of the only lane's trajectory waits until it is stored. timeout: seconds of that wait.

    Raises:
        SchemaError: more lanes than there is memory for.
    """

    grows = False
    remedy = "connect"

    def __init__(
        self, spool: Spool, owner: object, n: int, *, wait: bool = False, timeout: float = 0.0
    ) -> None:
        spool.check()
        first = min(_FIRST, spool.longest)
        each, memory = _LANE + first * spool.schema.step_bytes, available_bytes()
        if memory is not None and at_least("n", n) > memory // each:
            raise SchemaError(
                f"n is {n:,}; expected at most {memory // each:,}, as {first} steps of an environment take {each:,} "
                f"bytes, and {memory:,} are available to this process."
            )
        count = at_least("n", n)
        self.schema, self.name = spool.schema, spool.name
        self.longest = self.most = spool.longest
        self.chunk, self.overlap = -1, 0
        self.check = spool.check
        self.lanes: Array = np.tile(EMPTY_LANE, (count, 1))
        self._spool = spool
        self._owner = owner
        self._wait, self._timeout = wait, timeout
        self._pid = os.getpid()
        self._steps = spool.schema.steps
        self._step_bytes = spool.schema.step_bytes
        self._ragged = [name for name in self._steps if name in spool.schema.ragged]
        self._ragged_once = [name for name in spool.schema.per_trajectory if name in spool.schema.ragged]
        self._before = np.zeros(count, dtype=np.int64)  # steps of each lane that are in pieces
        self._everyone = np.arange(count)
        self._alone = count == 1
        self._account = Account()  # of the buffer of several lanes, and of what a call commits
        self._held = 0  # bytes of that buffer
        self._room = 0  # steps of each lane that the buffer has room for
        # Columns uint8 [n, room, step_bytes]; of a single lane without the n.
        self._buffer = Buffer(0, {}, [])
        self._following: Episode | None = None  # while a chunk is cut
        self._waited = 0  # steps of the only lane's trajectory for which the spool has had room
        self._episodes = [Episode() for _ in range(count)]

    def check_chunks(self, chunk: int, overlap: int) -> None:
        pass

    # ---------------------------------------------------------------- steps

    def located(self, rows: Any, what: str) -> _Steps:
        ragged = None
        if self._ragged:
            rows, ragged = with_step_records(self._steps, rows, what, by_lane=not self._alone)
            ragged = None if ragged is None else measured(ragged)
        return _Steps(*self._steps.validate(rows, what=what), ragged)

    def plain(self, rows: Bytes) -> _Steps:
        return _Steps(1, rows)

    def show(self, columns: Sequence[StepColumn]) -> tuple[int, int]:
        before = int(self._before[0])
        if self._room:
            buffer = self._buffer
            if not buffer.views:
                parts = [buffer.piece[column.name] for column in columns]
                buffer.views[:] = [column.as_steps(part) for column, part in zip(columns, parts, strict=True)]
            for column, view in zip(columns, buffer.views, strict=True):
                column.view = view
        # The last step of a piece goes through `add`, which sends the piece.
        return before, before + min(self._room, self._spool.piece_steps - 1)

    def add(self, rows: _Steps, first: int, count: int, given: Given) -> int:
        try:
            inside = int(self.lanes[0, LANE_STEPS] - self._before[0])
            first_part = inside + min(count, max(1, self._spool.piece_steps - inside))
            if inside + count > self._room:
                grown, waits = self._grown(first_part), False
                if self._room <= inside <= grown - count and self.chunk < 0 and not self._waited:
                    waits = True  # for one buffer, when it is made
                else:
                    self._wait_for(count, max(inside + count, grown) - self._room)
                if inside >= self._room:
                    self._make_room(first_part, grown, waits=waits)
            count = min(count, self._room - inside)
            if rows.ragged is not None:
                self._keep_values(self._everyone, rows.ragged, slice(first, first + count))
            for name, values in self._buffer.piece.items():
                values[inside : inside + count] = rows.columns[name][first : first + count]
            self.lanes[0, LANE_STEPS] += count
            if inside + count >= self._spool.piece_steps and self.lanes[0, LANE_STEPS] < self.most:
                self._send_piece(0)
        except GearError:
            raise
        except BaseException:
            self.abort(self._everyone)  # how far the call has come is not known
            raise
        return count

    def _keep_values(self, chosen: Array, values: StepValues, steps: slice | None) -> None:
        """Keep copies of the ragged values of the next steps of lanes, `chosen` (int64 [m]).

        Args:
            steps: those of the only lane; None: one of each lane.

        Raises:
            As `Spool.reserve`: nothing was kept.
        """
        sizes, _, addresses = values.parts
        size = int(sizes[:, chosen if steps is None else steps].sum())
        self._spool.reserve(self._account, self._account.size + size)
        self._spool.hold(self._account, self._account.size - size)
        for lane in chosen.tolist():
            episode, begin = self._episodes[lane], int(self.lanes[lane, LANE_STEPS])
            part = slice(lane, lane + 1) if steps is None else steps
            self._take_back(episode, begin)
            kept = {
                name: copied_values(addresses[c, part], sizes[c, part]) for c, name in enumerate(self._ragged)
            }
            episode.values.append((begin + part.stop - part.start, kept))
            self._spool.hold(episode, episode.size + sum(each.nbytes for each in kept.values()))

    def _take_back(self, episode: Episode, steps: int) -> None:
        """Forget the values behind so many steps, which an error has taken back."""
        while episode.values and episode.values[-1][0] > steps:
            _, dropped = episode.values.pop()
            self._spool.hold(episode, episode.size - sum(each.nbytes for each in dropped.values()))

    def _wait_for(self, count: int, room: int) -> None:
        """Before `count` steps are added, wait until the spool has room for so many, and for the chunk after them.

        So a call that appends several steps times out before it has taken the first one.
        """
        steps = int(self.lanes[0, LANE_STEPS]) + count
        if steps <= self._waited:
            return
        cut = steps == self.chunk and self.overlap
        following = self._common_room(self.overlap) if cut else 0
        self._following = episode = Episode()
        try:
            self._spool.reserve(episode, (room + following) * self._step_bytes)
            self._spool.hold(episode, following * self._step_bytes)
        finally:
            if not episode.size:
                self._following = None
        self._waited = steps

    def add_rows(self, rows: _Steps, acting: Array | None, ending: Array | None, given: Given) -> bool:
        chosen = self._everyone if acting is None else np.flatnonzero(acting)
        steps = self.lanes[chosen, LANE_STEPS] + 1
        longest = int(steps.max(initial=0))
        if longest > self.most:
            raise too_long(longest, self.longest)
        at = steps - 1 - self._before[chosen]
        self._make_room(int(at.max(initial=0)) + 1)
        if rows.ragged is not None:
            self._keep_values(chosen, rows.ragged, None)
        together = len(chosen) == len(self.lanes) and (at == at[0]).all()
        for name, values in self._matrix().items():
            if together:
                values[:, at[0]] = rows.columns[name]
            else:
                values[chosen, at] = rows.columns[name][chosen]
        self.lanes[chosen, LANE_STEPS] = steps
        due = steps == self.chunk
        if ending is not None:
            due |= ending[chosen]
        for lane in chosen[~due & (at + 1 >= self._spool.piece_steps)].tolist():
            self._send_piece(lane)
        return bool(due.any())

    def _matrix(self) -> Piece:
        """The buffer, column name -> uint8 [n, room, step_bytes]."""
        if not self._alone:
            return self._buffer.piece
        return {name: values[None] for name, values in self._buffer.piece.items()}

    def _make_room(self, steps: int, grown: int = 0, *, waits: bool = True) -> None:
        """Make the buffer large enough for so many steps of each lane, and wait until the spool has room for it.

        Args:
            grown: the result of `_grown`, if it is known.

        Raises:
            PeerTimeoutError: the spool is full. Any error of `Spool.check`.
        """
        if steps <= self._room:
            return
        room = grown or self._grown(steps)
        taken = self._spool.take_buffer(steps, room) if self._alone else None
        room = room if taken is None else taken.steps
        holder: Account = self._episodes[0] if self._alone else self._account
        size = (room - self._room) * self._step_bytes * len(self.lanes)
        (self._spool.reserve if waits else self._spool.hold)(holder, holder.size + size)
        self._held += 0 if self._alone else size
        buffer = self._new_buffer(room) if taken is None else taken
        for name, values in self._buffer.piece.items() if self._room else ():
            buffer.piece[name][..., : self._room, :] = values
        self._buffer, self._room = buffer, room

    def _new_buffer(self, room: int) -> Buffer:
        lead = (room,) if self._alone else (len(self.lanes), room)
        columns = self._steps.items()
        return Buffer(
            room, {name: np.empty((*lead, each.step_bytes), np.uint8) for name, each in columns}, []
        )

    def _grown(self, steps: int) -> int:
        """Steps of each lane that a buffer for so many is made for."""
        most = max(steps, min(self._spool.piece_steps, self.most))
        return min(max(2 * self._room, steps, _FIRST), most)

    def _end_piece(self, lane: int, count: int) -> None:
        """Move `count` rows in the buffer to the trajectory of a lane."""
        episode = self._episodes[lane]
        if count and self._alone:
            episode.add({name: values[:count] for name, values in self._buffer.piece.items()}, count)
            episode.buffers.append(self._buffer)
            self._room = 0
        elif count:
            matrix = self._buffer.piece
            episode.add({name: values[lane, :count].copy() for name, values in matrix.items()}, count)
            self._spool.hold(episode, episode.size + count * self._step_bytes)
        self._before[lane] += count

    def _send_piece(self, lane: int) -> None:
        """Send the steps of a lane in the buffer ahead of their trajectory."""
        self._end_piece(lane, int(self.lanes[lane, LANE_STEPS] - self._before[lane]))
        if not self._ragged:  # whose values come with the commit
            self._spool.send_ahead(self._episodes[lane])

    # ---------------------------------------------------------------- trajectories

    def end(self, chosen: Array, ending: Array, given: Given) -> None:
        began, overlap, last = Backoff(self._timeout), self.overlap, given.last
        inside = self.lanes[chosen, LANE_STEPS] - self._before[chosen]
        whole = self.lanes[chosen, LANE_STEPS] == self.chunk
        self._make_room(max(int(inside.max()) + (last is not None), 0 if self._alone else overlap + 1))
        if not self._alone:
            size = int((inside + 1).sum()) * self._step_bytes
            # A final step after a chunk that the same call has cut is not waited for: the call could not be repeated.
            waits = (self.lanes[chosen, LANE_STEPS] > self.lanes[chosen, LANE_COMMON]).any()
            (self._spool.reserve if waits else self._spool.hold)(self._account, self._held + size)
        elif overlap and whole[0] and not ending[0] and self._following is None:
            self._following = Episode()
            self._spool.reserve(self._following, self._common_room(overlap) * self._step_bytes)
        for lane, count, cut in zip(chosen.tolist(), inside.tolist(), whole.tolist(), strict=True):
            final = last is not None and not cut
            if last is not None and final:
                for name, values in self._matrix().items():
                    values[lane, count] = _row(last[name], lane)
            self._end_piece(lane, count + final)
            goes_on = cut and not ending[lane]
            common = self._episodes[lane].last(overlap) if goes_on and overlap else {}
            episode = self._episodes[lane]
            once = {name: _row(values, lane)[None] for name, values in given.once.items()}
            self._take_back(episode, int(self.lanes[lane, LANE_STEPS]))
            if given.ragged is not None:
                self._keep_once(episode, given.ragged, lane, once)
            episode.complete(float(given.priorities[lane]), once, final=final)
            given.out[lane] = KNOWN_LATER
            if self._wait and not cut:
                self._spool.store_now(episode)
            else:
                self._spool.commit(episode)
            self._begin(lane, common, overlap if goes_on else 0)
            if goes_on:
                self.lanes[lane, LANE_LAST] = 0
                self._last = episode
            elif self._wait:
                answer = self._answer(episode, began)
                given.out[lane] = KNOWN_LATER if answer < 0 else answer
        if not self._alone:
            self._spool.hold(self._account, self._held)

    def _keep_once(self, episode: Episode, values: StepValues, lane: int, once: dict[str, Array]) -> None:
        """Keep copies of the ragged values of a trajectory, and put their records into `once`."""
        sizes, rows, addresses = (part[:, lane : lane + 1] for part in values.parts)
        kept = {name: copied_values(addresses[c], sizes[c]) for c, name in enumerate(self._ragged_once)}
        for c, name in enumerate(self._ragged_once):
            once[name] = np.array([[0, rows[c, 0]]], dtype=np.int64).view(np.uint8)
        episode.values.append((_ONCE, kept))
        self._spool.hold(episode, episode.size + sum(each.nbytes for each in kept.values()))

    _last: Episode

    def _common_room(self, overlap: int) -> int:
        """Steps of the buffer of a chunk that begins with `overlap` steps."""
        return min(max(2 * overlap, _FIRST), max(self._spool.piece_steps, overlap + 1), self.most)

    def _begin(self, lane: int, common: Piece, count: int) -> None:
        """Begin another trajectory, with the last `count` steps of the one before."""
        self._episodes[lane], self._following = self._following or Episode(), None
        self._before[lane] = self._waited = 0
        self.lanes[lane] = EMPTY_LANE
        if not count:
            return
        if self._alone:
            room = self._common_room(count)
            self._buffer = self._spool.take_buffer(room, room) or self._new_buffer(room)
            self._room = room
        for name, values in self._matrix().items():
            values[lane, :count] = common[name]
        self.lanes[lane, LANE_STEPS] = self.lanes[lane, LANE_COMMON] = count

    def _answer(self, episode: Episode, since: Backoff | None = None) -> int:
        """The index of a trajectory, when it is stored."""
        if not episode.is_stored:
            self._spool.flush(self._timeout, since)
        return episode.index

    def last_indices(self, chosen: Array) -> Array:
        known = self._wait and len(chosen)
        return np.full(len(chosen), self._answer(self._last) if known else -1, dtype=np.int64)

    def abort(self, chosen: Array) -> None:
        for lane in chosen.tolist():
            self._release(lane)
            self._before[lane] = self._waited = 0
            self.lanes[lane] = EMPTY_LANE
            self._episodes[lane], self._following = Episode(), None
        if self._alone or len(chosen) == len(self.lanes):
            self._room = self._held = 0
            self._buffer = Buffer(0, {}, [])
            self._spool.hold(self._account, 0)

    def _release(self, lane: int) -> None:
        """Give back the bytes of what a lane has not committed."""
        for episode in (self._episodes[lane], self._following):
            if episode is not None and not self._spool.is_committed(episode):
                self._spool.hold(episode, 0)

    def __del__(self) -> None:
        if getattr(self, "_episodes", None) is not None and os.getpid() == self._pid:
            self.abort(self._everyone)


def _row(values: Array, lane: int) -> Array:
    """The value of a lane, uint8 [step_bytes], of values that may be the same for all."""
    row: Array = values[lane if len(values) > 1 else 0]
    return row
