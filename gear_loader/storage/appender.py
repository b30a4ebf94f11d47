"""The appender: streams of steps of n environments, cut into trajectories and committed to a sink."""

from __future__ import annotations

import os
from collections.abc import Mapping
from typing import Any, Protocol

import numpy as np

from gear_loader.errors import GearError, SchemaError
from gear_loader.kernels.special_priorities import UNSET
from gear_loader.native.lanes import LANE_COMMON, LANE_STEPS
from gear_loader.storage.ragged_input import StepValues
from gear_loader.storage.schema import Schema
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least

Bytes = Mapping[str, Array]
"""Checked values: column name -> uint8 [n, step_bytes], or [1, step_bytes] where all lanes have the same."""


KNOWN_LATER = -2
"""Index of a trajectory that has been committed, where it is not known yet."""


class _Here:
    """The id of this process, without the system call of `os.getpid`."""

    def __init__(self) -> None:
        self.update()

    def update(self) -> None:
        self.pid = os.getpid()


here = _Here()
os.register_at_fork(after_in_child=here.update)


class Given:
    """What trajectories get beside their steps when they are committed, and where their indices go.

    Attributes:
        priorities: float32 [n], -1 for none. last: the final step of those that end without `Sink.chunk` steps, or
            None. once: values of the columns per trajectory. ragged: those of `once` that have to be placed, or None.
        out: int64 [n], output: index of the trajectory that each lane has committed, or KNOWN_LATER; else unchanged.
    """

    __slots__ = ("last", "once", "out", "priorities", "ragged")

    def __init__(self, n: int) -> None:
        self.priorities: Array = np.full(n, UNSET, dtype=np.float32)
        self.last: Bytes | None = None
        self.once: Bytes = {}
        self.ragged: StepValues | None = None
        self.out: Array = np.full(n, -1, dtype=np.int64)


class Rows(Protocol):
    """Steps that a sink can copy; see `Sink.located`."""

    @property
    def length(self) -> int: ...


class Sink(Protocol):
    """Where an appender writes the steps of its lanes, one for each environment.

    What it does to a lane, `lanes` tells at once: an exception at any bytecode leaves them true.

    Attributes:
        schema: columns that have values when a trajectory is added. lanes: int64 [n, LANE_WIDTH], see
            `gear_loader.native.lanes`. longest: most steps of a trajectory. grows: whether each step is committed as it
            is added, to one trajectory that `commit` ends.
        most, chunk, overlap: set by the appender: most steps of one lane's trajectory, or chunk; steps of a chunk, at
            which it is committed, or -1; common steps of consecutive chunks.
        remedy: what to do instead of using a writer in another process. name: of the table, for texts.
    """

    schema: Schema
    lanes: Array
    longest: int
    most: int
    chunk: int
    overlap: int
    grows: bool
    remedy: str

    @property
    def name(self) -> str: ...

    def check(self) -> None:
        """Raise GearError if nothing can be added."""

    def check_chunks(self, chunk: int, overlap: int) -> None:
        """Raise SchemaError if a chunk and its overlap do not fit in together."""

    def located(self, rows: Any, what: str) -> Rows:
        """Check steps of all columns that have steps, ``[T, *shape]``; raises SchemaError."""

    def plain(self, rows: Bytes) -> Rows:
        """Steps of all columns that have steps, which are checked and stay where they are."""

    def show(self, columns: Any) -> tuple[int, int]:
        """Let the columns of a writer of one lane write where the lane's next steps belong, if there is room.

        Returns:
            The first step that they show, and the end of those that may be written.
        """

    def add(self, rows: Any, first: int, count: int, given: Given) -> int:
        """Add up to `count` steps of `rows`, from `first` on, to the only lane; return how many.

        `given` is for a trajectory that begins, where each step is committed.
        """

    def add_rows(self, rows: Any, acting: Array | None, ending: Array | None, given: Given) -> bool:
        """Add one step of each lane of `acting` (bool [n], None for all), or none; `given` as for `add`.

        Returns:
            Whether a lane has ended (bool [n]) or has `chunk` steps now.
        """

    def end(self, chosen: Array, ending: Array, given: Given) -> None:
        """Commit what lanes (`chosen`, int64 [m]) hold, in order; of an error `given.out` tells what was committed.

        Args:
            ending: bool [n], lanes that end. Those that have `chunk` steps and do not end begin another chunk, with the
                last `overlap` steps.
        """

    def last_indices(self, chosen: Array) -> Array:
        """Index of the last chunk of each lane, int64 [m], which ends without another step; -1 if it is not known."""

    def abort(self, chosen: Array) -> None:
        """Discard the uncommitted steps of lanes."""


def too_long(steps: int, longest: int) -> SchemaError:
    """The error for a trajectory of `steps` steps in a table, or a chunk, of at most `longest`."""
    return SchemaError(
        f"The trajectory would have {steps:,} steps; this table holds at most {longest:,}. Commit "
        "earlier, cut it into chunks with table.writer(chunk_steps=...), or create the table larger."
    )


def no_final_step() -> SchemaError:
    """The error for a final step when the last chunk is committed and no step came after it."""
    return SchemaError(
        "The last chunk is complete and committed, so it cannot get a final step; give chunks an overlap_steps of at "
        "least 1, or commit() without final."
    )


class Appender:
    """Cuts the streams of n lanes into trajectories, and commits or discards them. For one thread.

    Args:
        sink: where they go. kind: of writer, in errors. chunk_steps, overlap_steps: as for `Table.writer`.

    Attributes:
        lanes: of the sink. chunk: most steps of a trajectory. cuts: whether a trajectory of so many steps is committed.
        overlap: common steps of consecutive chunks.
    """

    def __init__(
        self, sink: Sink, kind: str, *, chunk_steps: int | None = None, overlap_steps: int = 0
    ) -> None:
        self.sink, self._kind = sink, kind
        self.lanes = sink.lanes
        self.pid = here.pid
        self.overlap = at_least("overlap_steps", overlap_steps, least=0)
        self.chunk = sink.longest if chunk_steps is None else at_least("chunk_steps", chunk_steps)
        if chunk_steps is None and self.overlap:
            raise SchemaError(f"overlap_steps is {overlap_steps} without chunk_steps; give both.")
        if self.chunk > sink.longest or self.overlap >= self.chunk:
            raise SchemaError(
                f"chunk_steps is {self.chunk:,} and overlap_steps {self.overlap:,}; expected "
                f"overlap_steps < chunk_steps <= {sink.longest:,}, the longest trajectory that the table holds."
            )
        if self.overlap:
            sink.check_chunks(self.chunk, self.overlap)
        self.cuts = chunk_steps is not None
        self._nobody = np.zeros(len(sink.lanes), dtype=bool)
        sink.most, sink.overlap = self.chunk, self.overlap
        sink.chunk = self.chunk if self.cuts else -1

    def check_process(self) -> None:
        """Raise GearError in a forked child."""
        if here.pid != self.pid:
            raise GearError(
                f"A {self._kind} of process {self.pid} was used in process {here.pid}; {self.sink.remedy} in each "
                "process."
            )

    def check_usable(self) -> None:
        """Raise GearError in a forked child, or if nothing can be added."""
        if here.pid != self.pid:
            self.check_process()
        self.sink.check()

    def check_lengths(self, steps: Array, ending: Array, *, final: bool) -> None:
        """Raise SchemaError if a trajectory of these steps (int64 [n]) is too long, with a final step if it ends."""
        if self.cuts:
            appends = self.overlap or self.sink.grows
            if final and not appends and (ending & (steps == self.chunk)).any():
                raise SchemaError(f"{no_final_step()} Nothing was appended.")
            return
        longest = int((steps + (ending if final else 0)).max())
        if longest > self.chunk:
            raise too_long(longest, self.chunk)

    def end(self, ending: Array | None, acting: Array | None, given: Given) -> None:
        """Commit the chunks of lanes that are complete, and the trajectories of lanes that end (masks, bool [n]).

        Chunks that grow are not committed here: the next step begins another one. A stream that ends with a complete
        chunk has nothing more to commit, but for a final step.
        """
        ended = self._nobody if ending is None else ending
        ended = ended if acting is None else ended & acting
        chosen = ended
        if self.cuts and not self.sink.grows:
            steps = self.lanes[:, LANE_STEPS]
            whole = steps == self.chunk
            whole = whole if acting is None else whole & acting
            if given.last is None or not self.overlap:
                done = np.flatnonzero(ended & ~whole & (steps == self.lanes[:, LANE_COMMON]))
                given.out[done] = self.sink.last_indices(done)
                self.abort(done)
                ended = ended & (steps > 0)
            elif (both := ended & whole).any():
                self._end_twice(ended, whole, both, given)
                return
            chosen = ended | whole
        self._end(np.flatnonzero(chosen), ended, given)

    def _end(self, chosen: Array, ending: Array, given: Given) -> None:
        if len(chosen):
            self.sink.end(chosen, ending, given)

    def _end_twice(self, ended: Array, whole: Array, both: Array, given: Given) -> None:
        """`end` where the final steps of lanes follow complete chunks: each is cut, then its stream ends, in order."""
        before = 0
        for lane in [*np.flatnonzero(both).tolist(), len(both)]:
            chosen = before + np.flatnonzero((ended | whole)[before : lane + 1])
            self._end(chosen, ended & ~both, given)
            if lane < len(both):
                self._end(np.array([lane]), ended, given)
            before = lane + 1

    def abort(self, chosen: Array) -> None:
        """Discard the uncommitted steps of lanes, int64 [m]."""
        if len(chosen):
            self.sink.abort(chosen)
