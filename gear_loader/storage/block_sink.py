"""Sinks in a table: steps go directly into its blocks, invisible until the commit, or visible one by one."""

from __future__ import annotations

import struct
import threading
import time
import weakref
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

from gear_loader.errors import GearError, SchemaError, StaleIndexError, TableFullError
from gear_loader.native import copying
from gear_loader.native.array_headers import ArrayHeaders
from gear_loader.native.copying import (
    ROWS_ACTIVE,
    ROWS_BLOCK_STEPS,
    ROWS_COLUMNS,
    ROWS_COUNT,
    ROWS_HEAD,
)
from gear_loader.native.lanes import (
    EMPTY_LANE,
    LANE_GENERATION,
    LANE_HELD,
    LANE_LAST,
    LANE_SLOT,
    LANE_STEPS,
    LANE_WIDTH,
)
from gear_loader.storage.appender import Bytes, Given, here, too_long
from gear_loader.storage.growing_rows import GrowingRows
from gear_loader.storage.operations.appending import ENDS
from gear_loader.storage.operations.view import DONE, OUTSIDE
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.ragged_input import StepValues, with_step_records
from gear_loader.storage.ragged_steps import RaggedSteps
from gear_loader.storage.schema import Column
from gear_loader.utils.arrays import Array, data_address

if TYPE_CHECKING:
    from gear_loader.storage.engine import Engine
    from gear_loader.storage.index import Index
    from gear_loader.storage.step_columns import StepColumn

_AT_ONCE = 10
"""Attempts to add steps to a trajectory that was brought back into memory before it is waited in between."""
_ONE_LANE: Array = np.zeros(1, dtype=np.int64)
_BYTES = Column(bytes)


class StepSources(NamedTuple):
    """Steps in memory.

    Attributes:
        length: number of steps. sources: address of each column's contiguous steps, and bytes from the row of one lane
        to that of the next, int64 [C, 2]. hold: owner of the memory. ragged: values to be placed, whose records are
        among the steps; or None.
    """

    length: int
    sources: Array
    hold: object
    ragged: StepValues | None = None


def _sources(length: int, addresses: Sequence[int], apart: Sequence[int], hold: object) -> StepSources:
    sources: Array = np.empty((len(addresses), 2), dtype=np.int64)
    sources[:, 0], sources[:, 1] = addresses, apart
    return StepSources(length, sources, hold)


def _located_bytes(rows: Bytes, names: Sequence[str]) -> StepSources:
    found = [rows[name] for name in names]
    apart = [values.shape[1] if len(values) > 1 else 0 for values in found]
    return _sources(1, [data_address(values) for values in found], apart, found)


class BlockSink:
    """Writes steps into blocks of a table; see `gear_loader.storage.appender.Sink`. If the process dies, the next
    allocation that needs space reclaims what is not committed.

    Args:
        table: the table. n: number of lanes.
    """

    grows = False

    def __init__(self, table: Engine, n: int) -> None:
        layout, self.schema = table.region.layout, table.schema.added
        self.table, self.index = table, table.index
        self.longest = self.most = table.longest
        self.chunk, self.overlap = -1, 0
        self.check = table.check_open
        self.remedy = f"make one with table.{'writer' if n == 1 else 'writers'}()"
        self._steps = self.schema.steps
        self._payload = RaggedSteps(table, self, n) if self.schema.ragged else None
        self._block_steps = layout.block_steps
        self._columns = table.step_columns
        self._data = [] if table.device else [table.region.column(name) for name in self._steps]
        once = list(self.schema.per_trajectory)
        named = dict(zip(table.schema, table.columns, strict=True))
        self._once_columns = np.array([named[name] for name in once], dtype=np.int64).reshape(-1, 4)
        self._once_columns[:, 3] = self._once_columns[:, 2]
        self._step_bytes = self._columns[:, 2].tolist()
        self._make_request(n)
        # Arrays with a row for each lane are found without a further look; their addresses are part of the request.
        columns = self._steps.values()
        dtypes, shapes = (
            [column.numpy_dtype for column in columns],
            [(n, *column.shape) for column in columns],
        )
        self._headers = ArrayHeaders(list(self._steps), dtypes, shapes, self._sources)
        self._thread = 0  # the thread that has allocated last
        self._pid = here.pid
        self.index.allocator.writers.add(self)
        self.give_up = weakref.finalize(self, _give_up, self.index, self.lanes, self._pid)
        self.give_up.atexit = False

    def _make_request(self, n: int) -> None:
        """Make the request of `copying.append_rows`, which holds the lanes."""
        width = len(self._columns)
        rows = ROWS_HEAD + 4 * width
        self._request: Array = np.zeros(rows + 2 * width + n * LANE_WIDTH, dtype=np.int64)
        self._request[[ROWS_COUNT, ROWS_COLUMNS, ROWS_BLOCK_STEPS]] = n, width, self._block_steps
        self._request[ROWS_HEAD:rows] = self._columns.reshape(-1)
        self._sources = self._request[rows : rows + 2 * width].reshape(width, 2)
        self._sources[:, 1] = self._step_bytes
        self.lanes: Array = self._request[rows + 2 * width :].reshape(n, LANE_WIDTH)
        self.lanes[:] = EMPTY_LANE
        self._blocks: Array = np.zeros((n, 0), dtype=np.int32)
        self._pack_masks = struct.Struct("=5q").pack_into  # from ROWS_ACTIVE to ROWS_WIDTH

    @property
    def name(self) -> str:
        return repr(self.table)

    @property
    def open_slots(self) -> tuple[int, list[int]]:
        """Thread of the writer, and the slots that it is writing (empty in a forked child)."""
        slots = self.lanes[:, LANE_SLOT]
        return self._thread, slots[slots >= 0].tolist() if here.pid == self._pid else []

    def check_chunks(self, chunk: int, overlap: int) -> None:
        layout, size = self.table.region.layout, self._block_steps
        shares = (chunk - overlap) % size == 0 and not self.grows
        blocks = -(-chunk // size) + (0 if shares else -(-overlap // size))
        if layout.max_trajectories < 2 or chunk + overlap > layout.max_steps or blocks > layout.num_blocks:
            raise SchemaError(
                f"chunk_steps is {chunk:,} and overlap_steps {overlap:,}; expected that a chunk and the overlap fit "
                f"into the table together, which holds at most {layout.max_trajectories:,} trajectories, "
                f"{layout.max_steps:,} steps and {layout.num_blocks:,} blocks of {size}."
            )

    # ---------------------------------------------------------------- steps

    def located(self, rows: Any, what: str) -> StepSources:
        values = None
        if self._payload is not None:
            by_lane = len(self.lanes) > 1
            rows, values = with_step_records(self._steps, rows, what, by_lane=by_lane)
        elif self._headers.read(rows):
            return StepSources(len(self.lanes), self._sources, rows)
        length, addresses, hold = self._steps.locate(rows, what=what)
        return _sources(length, addresses, self._step_bytes, hold)._replace(ragged=values)

    def plain(self, rows: Bytes) -> StepSources:
        return _located_bytes(rows, list(self._steps))

    def show(self, columns: Sequence[StepColumn]) -> tuple[int, int]:
        step, held = int(self.lanes[0, LANE_STEPS]), int(self.lanes[0, LANE_HELD])
        place = step // self._block_steps
        first = place * self._block_steps
        if step < held:
            for column, data in zip(columns, self._data, strict=True):
                column.view = column.as_steps(data[self._blocks[0, place]])
        return first, min(first + self._block_steps, held)

    def blocks_of(self, lane: int) -> Array:
        """Blocks of the open trajectory of a lane, int32."""
        return self._blocks[lane, : -(-int(self.lanes[lane, LANE_HELD]) // self._block_steps)]

    def room(self, chosen: Array, count: int, *, waits: bool = True) -> bool:
        """Make room for `count` more steps in each of the lanes, int64 [m].

        Args:
            waits: whether to wait for what is not there at once; else False is returned.

        Raises:
            As `Index.begin`; SchemaError: a trajectory would be too long.
        """
        lanes, index, size = self.lanes, self.index, self._block_steps
        now = lanes[chosen]
        needed, held = now[:, LANE_STEPS] + count, now[:, LANE_HELD]
        if (needed <= held).all():
            return True
        longest = int(needed.max())
        if longest > self.most:
            raise too_long(longest, self.longest)
        self._widen(min(max(longest, 2 * int(held.max()), size), max(self.most, size)))
        blocks, ops, where = self._blocks, index.arrays.ops, index.arrays.where
        evict, wait = self.table.policy
        self._thread = threading.get_ident()

        def reserve(chosen: Array, at: Array) -> int:
            answer: int = ops.reserve_lanes(
                where, lanes, chosen, at, blocks, count, self.most, int(evict), *index.readers.here()
            )
            return answer

        def missing(lane: int) -> tuple[int, int, int]:
            steps, held = int(lanes[lane, LANE_STEPS]) + count, int(lanes[lane, LANE_HELD])
            return int(lanes[lane, LANE_SLOT] < 0), -(-steps // size) - -(-held // size), steps - held

        return index.change_lanes(lanes, chosen, reserve, needed=missing, evict=evict, wait=wait, waits=waits)

    def _widen(self, steps: int) -> None:
        """Have room for the blocks of so many steps of each lane."""
        width = -(-steps // self._block_steps) + 1
        if width > self._blocks.shape[1]:
            blocks = np.zeros((len(self.lanes), max(width, 2 * self._blocks.shape[1])), dtype=np.int32)
            blocks[:, : self._blocks.shape[1]] = self._blocks
            self._blocks = blocks

    def _put(self, chosen: Array, rows: StepSources, first: int, count: int, *, once: bool = False) -> None:
        """Copy steps of `rows` behind those of lanes; `once`: values of columns per trajectory into the first block."""
        columns = self._once_columns if once else self._columns
        given = (self._block_steps, self.lanes, self._blocks, chosen, rows.sources, first, count)
        copying.put_rows(columns, *given, 0 if once else -1)

    def _put_once(self, chosen: Array, given: Given) -> None:
        """Write what trajectories have once into their first blocks, where no other trajectory has any."""
        if not given.once:
            return
        if given.ragged is not None and self._payload is not None:
            self._payload.place(chosen, given.ragged)
        self._put(chosen, _located_bytes(given.once, list(self.schema.per_trajectory)), 0, 1, once=True)

    def add(self, rows: StepSources, first: int, count: int, given: Given) -> int:
        self.room(_ONE_LANE, count)
        if rows.ragged is not None and self._payload is not None:
            self._payload.place(_ONE_LANE, rows.ragged, first, count)
        self._put(_ONE_LANE, rows, first, count)
        self.lanes[0, LANE_STEPS] += count
        return count

    def add_rows(self, rows: StepSources, acting: Array | None, ending: Array | None, given: Given) -> bool:
        request = self._request
        active = 0 if acting is None else data_address(acting)
        done = 0 if ending is None else data_address(ending)
        if rows.sources is not self._sources:
            self._sources[:] = rows.sources
        if rows.ragged is not None and self._payload is not None:
            chosen = np.arange(len(self.lanes)) if acting is None else np.flatnonzero(acting)
            self.room(chosen, 1)
            self._payload.place(chosen, rows.ragged)
        while True:
            blocks = self._blocks
            masks = (active, done, self.chunk, data_address(blocks), blocks.shape[1])
            self._pack_masks(request.data, 8 * ROWS_ACTIVE, *masks)
            due: int = copying.append_rows(request)
            if due >= 0:
                return due > 0
            short = self.lanes[:, LANE_STEPS] >= self.lanes[:, LANE_HELD]
            self.room(np.flatnonzero(short if acting is None else short & acting), 1)

    # ---------------------------------------------------------------- trajectories

    def end(self, chosen: Array, ending: Array, given: Given) -> None:
        steps, last = self.lanes[:, LANE_STEPS], given.last
        together = last is None or len(chosen) == 1
        together = together or self.room(chosen[steps[chosen] != self.chunk], 1, waits=False)
        for group in [chosen] if together else chosen[:, None]:
            if last is not None:
                longer = group[steps[group] != self.chunk]
                self.room(longer, 1)
                self._put(longer, self.plain(last), 0, 1)
            self._put_once(group, given)
            if self._payload is not None:
                self._payload.settle(group)
            self._finish(group, ending, given)

    def _finish(self, chosen: Array, ending: Array, given: Given) -> None:
        """Commit trajectories, whose steps are written."""
        lanes, index, blocks, size = self.lanes, self.index, self._blocks, self._block_steps
        ops, where, chunk, overlap = index.arrays.ops, index.arrays.where, self.chunk, self.overlap
        evict, wait = self.table.policy
        chunk = -1 if self.grows else chunk  # a trajectory that grows is not cut when it begins
        told = (blocks, self._columns, chunk, overlap, ending, int(given.last is not None), given.priorities)

        def finish(chosen: Array, at: Array) -> int:
            now, here = time.monotonic_ns(), index.readers.here()
            answer: int = ops.end_lanes(
                where, lanes, chosen, at, *told, now, self.grows, int(evict), *here, given.out
            )
            return answer

        def missing(lane: int) -> tuple[int, int, int]:
            if lanes[lane, LANE_STEPS] != chunk or not overlap:
                return 1, 0, 0
            return 1, 0 if (chunk - overlap) % size == 0 else -(-overlap // size), overlap

        index.change_lanes(lanes, chosen, finish, needed=missing, evict=evict, wait=wait, inserts=True)

    @property
    def blocks(self) -> Array:
        """The blocks of all lanes, in order, int32 [n, at least those that a lane has]."""
        return self._blocks

    def take_blocks(self, chosen: Array, steps: int) -> Array:
        """Make room for `steps` more steps of each of the lanes, int64 [m], in blocks that the caller writes itself;
        return `blocks`.

        Raises:
            As `room`: lanes before the one without room have theirs.
        """
        self.room(chosen, steps)
        return self._blocks

    def commit_blocks(self, chosen: Array, ending: Array, given: Given) -> None:
        """Commit lanes, int64 [m], the steps of which are in blocks of `take_blocks`; a final step too, if there is
        `given.last`."""
        if len(chosen):
            self._finish(chosen, ending, given)

    def last_indices(self, chosen: Array) -> Array:
        last: Array = self.lanes[chosen, LANE_LAST]
        return last

    def abort(self, chosen: Array) -> None:
        self.index.abort_lanes(self.lanes, chosen)


class GrowingSink(BlockSink):
    """Commits each step at once: the trajectory in the table grows with it, and keeps its index until it is ended.

    If it is evicted or removed meanwhile, the next step begins another one. If it lies on disk only, the next step
    brings it back into memory first. The step after a complete chunk begins the next one, with copies of their common
    steps.
    """

    grows = True

    def __init__(self, table: Engine, n: int) -> None:
        super().__init__(table, n)
        self._ahead: GrowingRows | None = None

    def show(self, columns: Sequence[StepColumn]) -> tuple[int, int]:
        return 0, 0

    def add(self, rows: StepSources, first: int, count: int, given: Given) -> int:
        if self.chunk > 0:
            steps = int(self.lanes[0, LANE_STEPS])
            count = min(count, self.chunk - (steps if steps < self.chunk else self.overlap))
        if rows.ragged is not None or not self._add_at_once(rows, first, count):
            self._add(_ONE_LANE, rows, first, count, given)
        return count

    def _add_at_once(self, rows: StepSources, first: int, count: int) -> bool:
        """Add steps to the trajectory of the only lane, if it has one and no wait is needed; return whether it did."""
        lanes, index, steps = self.lanes, self.index, int(self.lanes[0, LANE_STEPS])
        if not steps or steps + count > self.most or index.admission.max_age is not None:
            return False
        ops, where, at = index.arrays.ops, index.arrays.where, np.zeros(1, dtype=np.int64)
        given = (self._columns, rows.sources, first, count, 0, int(self.table.policy[0]))
        answer = index.recovery.lock.run(ops.grow_lanes, where, lanes, _ONE_LANE, at, *given)
        return answer == DONE and bool(lanes[0, LANE_STEPS])

    def add_rows(self, rows: StepSources, acting: Array | None, ending: Array | None, given: Given) -> bool:
        chosen = np.arange(len(self.lanes)) if acting is None else np.flatnonzero(acting)
        self._add(chosen, rows, 0, 1, given)
        whole = chosen[self.lanes[chosen, LANE_STEPS] == self.chunk]
        given.out[whole] = self.lanes[whole, LANE_SLOT]
        return ending is not None and bool((ending if acting is None else ending & acting).any())

    def ahead(
        self, rows: StepSources, following: Bytes, acting: Array | None, ending: Array | None, given: Given
    ) -> GrowingRows:
        """A row of each lane and the values after it, to be appended; see `appending.append_lanes`.

        Args:
            acting, ending: bool [n], lanes whose row counts, and whose trajectory ends; None for all, and for none.
        """
        ahead = self._ahead = self._ahead or GrowingRows(self, cut=self.chunk)
        after = self.plain(following)
        ahead.sources[:, :2], ahead.following[:, :2] = rows.sources, after.sources
        ahead.kinds[0] = 1 if acting is None else acting
        if ending is not None:
            ahead.kinds[0] += ENDS * ending
        ahead.priorities[:], ahead.out[:] = given.priorities, -1
        if given.once:
            ahead.once_sources[:] = _located_bytes(given.once, list(self.schema.per_trajectory)).sources
        return ahead

    def _add(self, chosen: Array, rows: StepSources, first: int, count: int, given: Given) -> None:
        """Add steps to the trajectories of lanes, and then to new ones of lanes that have none, or a whole chunk."""
        lanes = self.lanes
        self._drop_half_begun(chosen)
        whole = chosen[lanes[chosen, LANE_STEPS] == self.chunk]
        common = {lane: self._common_steps(lane) for lane in whole.tolist()} if self.overlap else {}
        if self._payload is not None:
            self._payload.settle(whole)
        before = lanes[whole].copy()
        lanes[whole] = EMPTY_LANE
        try:
            longest = int(lanes[chosen, LANE_STEPS].max(initial=0)) + count
            if longest > self.most:
                raise too_long(longest, self.longest)
            self._grow(chosen, rows, first, count, final=False)
            chosen = chosen[lanes[chosen, LANE_STEPS] == 0]
            others = [lane for lane, steps in common.items() if steps is not None]
            alone = chosen[~np.isin(chosen, others)] if others else chosen
            self._begin(alone, rows, first, count, given, None)
            for lane in others:
                self._begin(np.array([lane]), rows, first, count, given, common[lane])
        except BaseException:
            self._drop_half_begun(chosen)
            left = lanes[whole, LANE_STEPS] == 0
            lanes[whole[left]] = before[left]
            raise

    def _begin(
        self,
        chosen: Array,
        rows: StepSources,
        first: int,
        count: int,
        given: Given,
        common: StepSources | None,
    ) -> None:
        """Begin the trajectories of lanes that have none, with the steps `common` before the others."""
        if not len(chosen):
            return
        lanes = self.lanes
        self.room(chosen, count + (0 if common is None else common.length))
        parts = (
            [(rows, first, count)] if common is None else [(common, 0, common.length), (rows, first, count)]
        )
        for steps, begin, length in parts:
            if steps.ragged is not None and self._payload is not None:
                self._payload.place(chosen, steps.ragged, begin, length)
            self._put(chosen, steps, begin, length)
            lanes[chosen, LANE_STEPS] += length
        self._put_once(chosen, given)
        begun = Given(len(lanes))
        begun.priorities = given.priorities
        self._finish(chosen, np.zeros(len(lanes), dtype=bool), begun)

    def _common_steps(self, lane: int) -> StepSources | None:
        """The last `overlap` steps of a lane's chunk, which may lie on disk; None if it is gone."""
        slot, generation = self.lanes[lane, [LANE_SLOT, LANE_GENERATION]].tolist()
        try:
            steps = self.table.rows(slot, encoded=self._steps)  # those of a lossy codec are not encoded again
        except StaleIndexError:
            return None
        if steps is None or self.index.arrays.generation[slot] != generation:
            return None
        last = slice(self.chunk - self.overlap, self.chunk)
        rows = {
            name: (steps[name].tolist() if isinstance(steps[name], Ragged) else steps[name])[last]
            for name in self._steps
        }
        columns = {name: column if column.codec is None else _BYTES for name, column in self._steps.items()}
        rows, values = with_step_records(columns, rows, "the chunk", by_lane=False)
        length, addresses, hold = self._steps.locate(rows, what="the chunk")
        return _sources(length, addresses, [0] * len(addresses), (rows, hold))._replace(ragged=values)

    def _drop_half_begun(self, chosen: Array) -> None:
        """Free what lanes have begun and not committed."""
        chosen = chosen[self.lanes[chosen, LANE_HELD] > 0]
        if len(chosen):
            super().abort(chosen)

    def _grow(self, chosen: Array, rows: StepSources, first: int, count: int, *, final: bool) -> None:
        """Add steps, or the final step, to the trajectories of lanes that have one; the others are left out."""
        lanes = self.lanes
        chosen = chosen[lanes[chosen, LANE_STEPS] > 0]
        if rows.ragged is not None and self._payload is not None:
            spots, before = self._payload.spots, lanes[:, LANE_STEPS].copy()
            try:
                chosen = self._payload.place_visible(chosen, rows.ragged, first, count)
                self._grow_placed(chosen, rows, first, count, final=final)
            except GearError:
                self._payload.take_back(np.flatnonzero(lanes[:, LANE_STEPS] == before), spots)
                raise
            return
        self._grow_placed(chosen, rows, first, count, final=final)

    def _grow_placed(self, chosen: Array, rows: StepSources, first: int, count: int, *, final: bool) -> None:
        """`_grow` with steps that are complete."""
        lanes, index = self.lanes, self.index
        ops, where, sources = index.arrays.ops, index.arrays.where, rows.sources
        evict, wait = self.table.policy
        backoff, attempt = None, 0
        outside: list[int] = []  # lanes whose trajectories lie on disk only

        def grow(chosen: Array, at: Array) -> int:
            given = (self._columns, sources, first, count, int(final), int(evict))
            answer: int = ops.grow_lanes(where, lanes, chosen, at, *given)
            while answer == OUTSIDE:
                outside.append(int(chosen[at[0]]))
                at[0] += 1
                answer = ops.grow_lanes(where, lanes, chosen, at, *given)
            return answer

        def missing(lane: int) -> tuple[int, int, int]:
            steps = int(lanes[lane, LANE_STEPS])
            size = self._block_steps
            return 0, -(-(steps + count) // size) - -(-steps // size), 0 if final else count

        while len(chosen):
            outside.clear()
            index.change_lanes(lanes, chosen, grow, needed=missing, evict=evict, wait=wait)
            chosen = np.array(outside, dtype=np.int64)
            if not outside:
                return
            slots = lanes[chosen[:1], LANE_SLOT]
            backoff, attempt = backoff or index.admission.backoff(), attempt + 1
            self.table.load_from_disk(slots)
            # It may also be moved to disk again and again.
            if (index.request_from_disk(slots) or attempt >= _AT_ONCE) and not backoff.sleep():
                raise TableFullError(
                    f"Timed out after {backoff.timeout:g} s: the growing trajectory, of "
                    f"{int(lanes[chosen[0], LANE_STEPS]):,} steps, lies on disk only, and there is no room to bring it "
                    "into memory. Nothing was appended. Make the memory of the table larger, or commit shorter "
                    "trajectories."
                )

    def end(self, chosen: Array, ending: Array, given: Given) -> None:
        slots = self.lanes[:, LANE_SLOT].copy()
        if self._payload is not None:
            self._payload.settle(chosen)
        for group in [chosen] if given.last is None else chosen[:, None]:
            if given.last is not None:
                self._grow(group, self.plain(given.last), 0, 1, final=True)
            self.lanes[group] = EMPTY_LANE
            given.out[group] = slots[group]

    @property
    def open_slots(self) -> tuple[int, list[int]]:
        begun = self.lanes[:, LANE_HELD] > 0
        return self._thread, self.lanes[begun, LANE_SLOT].tolist() if here.pid == self._pid else []

    def abort(self, chosen: Array) -> None:
        """End the trajectories of lanes as they are: their steps are visible already, and stay."""
        if self._payload is not None:
            self._payload.settle(chosen)
        self._drop_half_begun(chosen)
        self.lanes[chosen] = EMPTY_LANE


def _give_up(index: Index, lanes: Array, pid: int) -> None:
    # The writer was garbage-collected; the next allocation that needs space reclaims its slots.
    if here.pid == pid:
        index.abort(lanes[:, LANE_SLOT], wait=False, generations=lanes[:, LANE_GENERATION])
