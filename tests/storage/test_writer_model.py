"""Writers, chunks and the rules of a table beside a naive twin; and a death at every point of what they do."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from cases import points
from table_common import Died, bury, fresh_name, mortal

import gear_loader as gear
from gear_loader.errors import GearError, LockTimeoutError, TableFullError
from gear_loader.storage import operations
from gear_loader.storage.counters import DIRTY, HALF, HEAD, INSERT_WAIT
from gear_loader.storage.index import Index
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations import FREE, READY, UNSET, WRITING
from gear_loader.storage.readers import Ticket
from gear_loader.storage.snapshot import Log

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")

SCALAR = {"x": gear.Column(torch.int64)}
_ENOUGH = 50


def values_of(table: gear.Table, slot: int) -> list[int]:
    """A trajectory of a table of `SCALAR`."""
    length, start = table.region.array("extent")[slot].tolist()
    return values_at(table, start, length)


def values_at(table: gear.Table, start: int, length: int) -> list[int]:
    """What a reader finds who has seen where a trajectory's block table is."""
    steps = table.region.layout.block_steps
    ids = table.region.array("block_ids").reshape(-1)[start : start - (-length // steps)]
    found: list[int] = table.region.column("x")[ids, : steps * 8].reshape(-1).view(np.int64)[:length].tolist()
    return found


def watch_moves(table: gear.Table) -> None:
    """From now on it fails if the block tables are moved again and again for one operation."""
    index = table.index
    obtain, flip, moves = index.allocator.obtain, index.allocator._flip, [0]

    def counted(*args: Any) -> bool:
        moves[0] += 1
        assert moves[0] < _ENOUGH, "the block tables are moved for ever"
        return flip(*args)

    def fresh(*args: Any, **options: Any) -> None:
        moves[0] = 0
        obtain(*args, **options)

    index.allocator._flip, index.allocator.obtain = counted, fresh  # type: ignore[method-assign]


def same_snapshot(table: gear.Table) -> None:
    """Fails unless the snapshot that is kept up to date is as one made anew."""
    index = table.index
    kept = index.reader.snapshot()
    log, index.reader._log = index.reader._log, Log()
    anew = index.reader.snapshot()
    index.reader._log = log
    for field in ("slots", "lengths", "generations", "sequences", "ends"):
        assert getattr(kept, field).tolist() == getattr(anew, field).tolist(), field
    assert (kept.version, kept.num_steps, len(kept)) == (anew.version, anew.num_steps, len(anew))
    if kept.num_steps:
        steps = np.arange(kept.num_steps)
        for one, other in zip(kept.locate(steps), anew.locate(steps), strict=True):
            assert one.tolist() == other.tolist()


# Beside a twin ---------------------------------------------------------------------------------------


@dataclasses.dataclass
class Entry:
    values: list[int]
    priority: float
    drawn: int = 0


@dataclasses.dataclass
class Stream:
    """A writer, and what its stream must become."""

    writer: gear.Writer
    chunk: int
    overlap: int
    values: list[int] = dataclasses.field(default_factory=list)  # of the trajectory that is being written
    fresh: int = 0
    dead: bool = False

    def append(self, value: int) -> list[int] | None:
        """The chunk that is complete now."""
        self.values.append(value)
        self.fresh += 1
        if not self.chunk or len(self.values) < self.chunk:
            return None
        complete, self.values, self.fresh = self.values, self.values[self.chunk - self.overlap :], 0
        return complete

    def end(self) -> None:
        self.values, self.fresh = [], 0


@dataclasses.dataclass
class Read:
    ticket: Ticket
    seen: list[tuple[int, list[int]]]  # where a block table was, and the values


class WriterMachine(stateful.RuleBasedStateMachine):
    """Writers with and without chunks, removals, evictions, priorities, draws, reads and deaths in any order.

    The twin knows what each trajectory holds. What a policy evicted is looked up, and checked against the policy.
    """

    reading = stateful.Bundle("reading")

    @stateful.initialize(
        block_steps=st.integers(1, 3),
        num_blocks=st.integers(6, 24),
        max_trajectories=st.integers(3, 14),
        max_steps=st.sampled_from([30, 60, 300]),
        on_full=st.sampled_from(["error", "evict_oldest", "evict_lowest_priority", "wait"]),
        limit=st.sampled_from([None, None, 1, 3]),
        streams=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3),
    )
    def create(
        self,
        block_steps: int,
        num_blocks: int,
        max_trajectories: int,
        max_steps: int,
        on_full: Any,
        limit: int | None,
        streams: list[tuple[int, int]],
    ) -> None:
        self.table = gear.Table.create(
            SCALAR,
            max_steps=max_steps,
            max_trajectories=max_trajectories,
            block_steps=block_steps,
            max_blocks=num_blocks,
            on_full=on_full,
            max_times_sampled=limit,
        )
        self.table.index.admission.timeout = self.table.region.lock.timeout = 0
        watch_moves(self.table)
        self.on_full, self.limit = on_full, limit
        self.live: dict[int, Entry] = {}
        self.streams: list[Stream] = []
        self.reads: list[Read] = []
        self.numbers = itertools.count(1)
        for strides, overlap in streams:  # that share blocks
            self.open(strides * block_steps + overlap, overlap)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            for stream in self.streams:
                stream.writer.close()
            for read in self.reads:
                read.ticket.end()
            self.table.remove(self.table.indices())
            bury(self.table)
            self.table.index.recovery.locked(
                lambda: self.table.index.arrays.ops.reclaim(self.table.index.arrays.where)
            )
            self.table.check_valid()
            assert self.table.stats().blocks_in_use == 0
            self.table.close()

    # What the twin knows.

    def now(self) -> list[int]:
        index = self.table.index
        slots = np.flatnonzero(index.arrays.state == READY)
        found: list[int] = slots[np.argsort(index.arrays.sequence[slots])].tolist()
        return found

    def settle(self, added: list[Entry], *, may_evict: bool = True) -> None:
        """Take over what is there: `added` came, and what is gone is what the policy gives up first."""
        table = self.table
        before = list(self.live.items())
        entries = {id(entry): entry for _, entry in before}
        left = []
        found = self.now()
        contents = [values_of(table, slot) for slot in found]
        # A slot may have been evicted and given out again: by contents, which no two have in common.
        by_values = {tuple(entry.values): (slot, entry) for slot, entry in before}
        came = []
        for slot, values in zip(found, contents, strict=True):
            if tuple(values) in by_values and by_values[tuple(values)][0] == slot:
                left.append(by_values[tuple(values)][1])
            else:
                came.append((slot, values))
        kept = {id(entry) for entry in left}
        gone = [entry for key, entry in entries.items() if key not in kept]
        assert [id(entry) for entry in left] == [id(e) for _, e in before if id(e) in kept], (
            "the order changed"
        )
        expected = [entry.values for entry in added]
        # Chunks that came may have gone at once.
        assert [values for _, values in came] == expected[len(expected) - len(came) :]
        if gone or len(came) < len(added):
            assert may_evict
            assert self.on_full.startswith("evict")
        if self.on_full == "evict_oldest":
            assert [id(entry) for entry in gone] == [id(e) for _, e in before[: len(gone)]]
        elif gone and left:
            assert self.rank(gone)[-1] <= self.rank(left)[0]
        self.live = {slot: entry for slot, entry in before if id(entry) in kept}
        new = added[len(added) - len(came) :]
        self.live.update({slot: entry for (slot, _), entry in zip(came, new, strict=True)})

    def rank(self, entries: list[Entry]) -> list[float]:
        return sorted(np.inf if entry.priority == UNSET else entry.priority for entry in entries)

    def stream(self, which: int) -> Stream | None:
        return self.streams[which % len(self.streams)] if self.streams else None

    # Rules.

    @stateful.rule(chunk=st.integers(0, 8), overlap=st.integers(0, 7))
    def open(self, chunk: int, overlap: int) -> None:
        if len(self.streams) >= 4:
            return
        overlap = min(overlap, max(0, chunk - 1))
        try:
            writer = self.table.writer(chunk_steps=chunk or None, overlap_steps=overlap)
        except gear.errors.SchemaError:
            return
        self.streams.append(Stream(writer, chunk, overlap))

    @stateful.rule(
        which=st.integers(0, 3), count=st.integers(1, 12), priority=st.sampled_from([None, 1.0, 2.0, 3.0])
    )
    def append(self, which: int, count: int, priority: float | None) -> None:
        stream = self.stream(which)
        if stream is None:
            return
        stream.writer.priority = priority
        for _ in range(count):
            self._append(stream)

    def _append(self, stream: Stream) -> bool:
        value = next(self.numbers)
        before, fresh = list(stream.values), stream.fresh
        chunk = stream.append(value)
        try:
            indices = stream.writer.append(x=value)
        except (TableFullError, LockTimeoutError, gear.errors.SchemaError) as error:
            stream.values, stream.fresh = before, fresh
            assert stream.writer.num_steps == len(before)
            if isinstance(error, gear.errors.SchemaError):
                assert not stream.chunk
                assert len(before) == self.table.longest
            if isinstance(error, LockTimeoutError):
                assert self.reads or self.on_full.startswith("evict")
            self.settle([])
            return False
        assert len(indices) == (chunk is not None)
        priority = stream.writer.priority
        self.settle([] if chunk is None else [Entry(chunk, UNSET if priority is None else priority)])
        return True

    @stateful.rule(rounds=st.integers(1, 12))
    def append_to_all(self, rounds: int) -> None:
        """In turn, so that none can go on where its block table ends."""
        for _ in range(rounds):
            for stream in self.streams:
                self._append(stream)

    @stateful.rule(which=st.integers(0, 3), count=st.integers(2, 9))
    def append_several(self, which: int, count: int) -> None:
        stream = self.stream(which)
        if stream is None or stream.chunk:  # of chunks some may come, and then an error
            return
        values = [next(self.numbers) for _ in range(count)]
        try:
            stream.writer.append(x=np.array(values))
        except GearError:
            self.settle([])
            return
        stream.values += values
        stream.fresh += count
        self.settle([])

    @stateful.rule(which=st.integers(0, 3), priority=st.sampled_from([None, 0.0, 1.5]))
    def commit(self, which: int, priority: float | None) -> None:
        stream = self.stream(which)
        if stream is None or not stream.fresh:
            return
        stream.writer.commit(priority)
        entry = Entry(stream.values, UNSET if priority is None else priority)
        stream.end()
        self.settle([entry], may_evict=False)

    @stateful.rule(which=st.integers(0, 3), drop=st.booleans())
    def discard(self, which: int, drop: bool) -> None:
        stream = self.stream(which)
        if stream is None:
            return
        if drop:
            self.streams.remove(stream)
            stream.writer._give_up()
            bury(self.table)
        stream.writer.discard()
        stream.end()

    @stateful.rule(length=st.integers(1, 12), priority=st.sampled_from([None, 1.0, 2.0, 2.5]))
    def add(self, length: int, priority: float | None) -> None:
        values = [next(self.numbers) for _ in range(length)]
        try:
            self.table.add({"x": np.array(values)}, priority=priority)
        except GearError:
            self.settle([])
            return
        self.settle([Entry(values, UNSET if priority is None else priority)])

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def remove(self, data: Any) -> None:
        slots = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=3, unique=True))
        self.table.remove(slots)
        for slot in slots:
            del self.live[slot]

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data(), stale=st.booleans())
    def set_priorities(self, data: Any, stale: bool) -> None:
        slots = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=4))
        priorities = data.draw(st.lists(st.integers(0, 9), min_size=len(slots), max_size=len(slots)))
        index = self.table.index
        generations = index.arrays.generation[slots] + (1 if stale else 0)
        index.reader.set_priorities(
            np.array([*slots, -3, 99]),
            np.array([*generations, -1, -1]),
            np.array([*priorities, 1, 1], dtype=np.float32),
        )
        if not stale:
            for slot, priority in zip(slots, priorities, strict=True):
                self.live[slot].priority = float(priority)

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def draw(self, data: Any) -> None:
        slots = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, max_size=5))
        index = self.table.index
        expected = []
        used = set()
        for slot in slots:
            entry = self.live[slot]
            if self.limit is not None and entry.drawn >= self.limit:
                expected.append(0)
                continue
            entry.drawn += 1
            expected.append(entry.drawn)
            used |= {slot} if entry.drawn == self.limit else set()
        generations = index.arrays.generation[slots]
        assert index.reader.count_samples(np.array(slots), generations).tolist() == expected
        for slot in used:
            del self.live[slot]
        assert index.reader.count_samples(np.array(slots), generations + 1).tolist() == [0] * len(slots)

    @stateful.rule(target=reading)
    def begin_read(self) -> Any:
        if len(self.reads) >= 3:
            return stateful.multiple()
        ticket, snapshot = self.table.reader().begin_snapshot()
        assert snapshot.slots.tolist() == list(self.live)
        extent = self.table.region.array("extent")
        read = Read(ticket, [(int(extent[slot, 1]), entry.values) for slot, entry in self.live.items()])
        self.reads.append(read)
        return read

    @stateful.rule(read=stateful.consumes(reading))
    def end_read(self, read: Read) -> None:
        read.ticket.end()
        self.reads.remove(read)

    @stateful.rule()
    def find_the_index_half_changed(self) -> None:
        self.table.region.array("counters")[DIRTY] = 1
        bury(self.table)

    @stateful.rule(times=st.integers(1, 6), blocks=st.integers(1, 3))
    def wear(self, times: int, blocks: int) -> None:
        """Use up room for block tables, so that they have to move."""
        index = self.table.index
        for _ in range(times):
            with contextlib.suppress(GearError):
                slots, _ = index.begin(np.array([blocks * self.table.region.layout.block_steps]))
                index.abort(slots)

    @stateful.rule(
        stores=st.integers(0, 60),
        torn=st.booleans(),
        count=st.integers(1, 14),
        chunk=st.integers(0, 6),
        overlap=st.integers(0, 5),
    )
    def die(self, stores: int, torn: bool, count: int, chunk: int, overlap: int) -> None:
        """Another process dies while it writes. What it has committed is there, whole; nothing else of it is."""
        overlap = min(overlap, max(0, chunk - 1))
        before = list(self.live.items())
        try:
            writer = self.table.writer(chunk_steps=chunk or None, overlap_steps=overlap)
        except gear.errors.SchemaError:
            return
        writer._give_up.detach()
        stream = Stream(writer, chunk, overlap)
        chunks = []
        with mortal(self.table, stores, torn=torn) as index, contextlib.suppress(Died, GearError):
            index.admission.timeout = 0
            writer._index = index
            for _ in range(count):
                value = next(self.numbers)
                complete = stream.append(value)
                if complete is not None:
                    chunks.append(complete)  # it may be there before `append` returns
                writer.append(x=value)
            if stream.fresh:
                chunks.append(stream.values)
                writer.commit()
        bury(self.table)
        found = [values_of(self.table, slot) for slot in self.now()]
        theirs = [chunk for chunk in chunks if chunk in found]
        old = [entry.values for _, entry in before]
        assert [values for values in found if values not in old] == theirs
        if not self.on_full.startswith("evict"):
            assert theirs == chunks[: len(theirs)]
        if theirs:
            # Those of its own that came before may have been evicted for them.
            chunks = chunks[: chunks.index(theirs[-1]) + 1]
            self.settle([Entry(values, UNSET) for values in chunks])
        else:
            self.settle([])

    # What holds all the time.

    @stateful.invariant()
    def valid(self) -> None:
        if not hasattr(self, "table"):
            return
        table, index = self.table, self.table.index
        table.check_valid()
        same_snapshot(table)
        assert self.now() == list(self.live)
        for slot, entry in self.live.items():
            assert values_of(table, slot) == entry.values
            assert index.arrays.priority[slot] == entry.priority
            assert index.arrays.sampled[slot] == entry.drawn
        for read in self.reads:
            for start, values in read.seen:
                assert values_at(table, start, len(values)) == values
        open_ = [stream for stream in self.streams if stream.writer._open]
        assert int((index.arrays.state == WRITING).sum()) == len(open_)
        for stream in open_:
            (slot,) = (int(claim.slots[0]) for claim in stream.writer._open)
            assert stream.writer.num_steps == len(stream.values)
            assert index.arrays.row(slot).tolist() == stream.writer._ids
            assert index.arrays.extent[slot, 0] == stream.writer._held
            assert values_at(table, int(index.arrays.extent[slot, 1]), len(stream.values)) == stream.values


WriterMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Hypothesis may take minutes to shrink a failing example
]
TestWritersBesideTheirTwin = WriterMachine.TestCase


# Block tables that are there more than once -----------------------------------------------------------


@pytest.mark.parametrize("on_full", ["error", "evict_oldest", "wait"])
def test_block_tables_that_are_longer_than_there_are_blocks(on_full: Any) -> None:
    """A stream that has to begin its block table anew has a part of it twice; moving must bring them together.

    Else they outgrow the half that they are moved to, and moving does not help.
    """
    with gear.Table.create(
        SCALAR,
        max_steps=10000,
        max_trajectories=400,
        block_steps=1,
        max_blocks=60,
        on_full=on_full,
        timeout=0.01,
    ) as table:
        watch_moves(table)
        writers = [table.writer(chunk_steps=8, overlap_steps=7) for _ in range(4)]
        index = table.index
        expected: dict[int, list[int]] = {i: [] for i in range(4)}
        moved = 0
        for step in range(400):
            if step % 4 == 0:
                index.arrays.counters[DIRTY] = 1  # the repair takes the room that was kept for growth
            which = step * 7 // 3 % 4
            half = int(index.arrays.counters[HALF])
            try:
                slots = writers[which].append(x=1000 * which + len(expected[which]))
            except TableFullError:
                table.remove(table.indices()[:5])
                continue
            moved += half != index.arrays.counters[HALF]
            expected[which].append(1000 * which + len(expected[which]))
            for slot in slots:
                assert values_of(table, slot) == expected[which][-8:]
            table.check_valid()
            same_snapshot(table)
        for slot in table.indices().tolist():
            values = values_of(table, slot)
            assert values == list(range(values[0], values[0] + 8))
        assert moved >= 2
        for writer in writers:
            writer.close()
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0


# Every point of every mutation -----------------------------------------------------------------------


@dataclasses.dataclass
class Scene:
    """A table with a history, and what a process does that dies meanwhile.

    Attributes:
        act: the operation, on the other process's index.
        prepare: gives the table its history; trajectory i holds i * 100, i * 100 + 1, ...
        new: what it adds, in order: of a later one nothing shows without the earlier ones.
        may_lose: the trajectories (by first value) that it may remove, in order of removal where `in_order`.
        options: of the table.
        check: what has to hold afterwards besides.
    """

    act: Callable[[gear.Table, Index], Any]
    prepare: Callable[[gear.Table], Any]
    new: tuple[list[int], ...] = ()
    may_lose: tuple[int, ...] = ()
    in_order: bool = True
    reader: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[gear.Table], Any] = lambda table: None


def trajectory(number: int, length: int) -> dict[str, Any]:
    return {"x": np.arange(length) + 100 * number}


def some(table: gear.Table) -> None:
    table.extend([trajectory(1, 4), trajectory(2, 7)])


def full(table: gear.Table) -> None:
    """Priorities 4, 3, 2, 1, 5."""
    lengths = [4, 7, 1, 9, 9]
    for number, length in enumerate(lengths, start=1):
        table.add(trajectory(number, length), priority=[4, 3, 2, 1, 5][number - 1])


def bounded(table: gear.Table) -> None:
    """As `full`; somebody has looked for the lowest priority."""
    full(table)
    assert operations.lowest(table.index.arrays.view) == 3


def worn(left: int) -> Callable[[gear.Table], None]:
    """So that `left` places for block tables are left in the half that is in use."""

    def prepare(table: gear.Table) -> None:
        some(table)
        counters, half_size = table.index.arrays.counters, table.region.layout.half
        while counters[HEAD + counters[HALF]] + 2 + left <= half_size:
            table.remove(table.add(trajectory(9, 4)))
        while counters[HEAD + counters[HALF]] + 1 + left <= half_size:
            table.remove(table.add(trajectory(9, 1)))
        assert counters[HALF] == 0

    return prepare


def dying(table: gear.Table, index: Index, **options: Any) -> gear.Writer:
    """A writer of the process that is going to die."""
    writer = table.writer(**options)
    writer._give_up.detach()
    writer._index = index
    index.admission.timeout = 0
    return writer


def steps_of(*writers: gear.Writer, first: list[int], count: int) -> None:
    for i in range(count):
        for writer, begin in zip(writers, first, strict=True):
            writer.append(x=begin + i)


def _alone(length: int, end: str = "commit") -> Callable[[gear.Table, Index], None]:
    def act(table: gear.Table, index: Index) -> None:
        writer = dying(table, index)
        steps_of(writer, first=[5000], count=length)
        getattr(writer, end)()

    return act


def _both(table: gear.Table, index: Index) -> None:
    one, other = dying(table, index), dying(table, index)
    steps_of(one, other, first=[5000, 6000], count=7)
    one.commit()
    other.commit()


def _stream(
    chunk: int, overlap: int, length: int, end: str = "commit"
) -> Callable[[gear.Table, Index], None]:
    def act(table: gear.Table, index: Index) -> None:
        writer = dying(table, index, chunk_steps=chunk, overlap_steps=overlap)
        steps_of(writer, first=[5000], count=length)
        getattr(writer, end)()

    return act


def _two_streams(table: gear.Table, index: Index) -> None:
    one = dying(table, index, chunk_steps=6, overlap_steps=3)
    other = dying(table, index, chunk_steps=6, overlap_steps=3)
    steps_of(one, other, first=[5000, 6000], count=9)
    one.discard()
    other.discard()


def _count(table: gear.Table, index: Index) -> None:
    slots = np.array([1, 0, 1, 3, 1, 0])
    times = index.reader.count_samples(slots, index.arrays.generation[slots])
    assert times.tolist() == [1, 1, 2, 1, 0, 2]


def _counted(table: gear.Table) -> None:
    index = table.index
    slots = np.flatnonzero(index.arrays.state == READY)
    assert (index.arrays.sampled[slots] < 2).all(), "drawn often enough, and still there"


def _expire(table: gear.Table, index: Index) -> None:
    index.admission.max_age = 10**9
    index.reader.snapshot()


def _aged(table: gear.Table) -> None:
    full(table)
    created = table.region.array("created")
    created[:3] -= 10**11  # the first three are old


def _set_priorities(table: gear.Table, index: Index) -> None:
    slots = np.array([0, 4, 2, 2, 77])
    index.reader.set_priorities(
        slots, np.array([-1, 1, -1, 1, -1]), np.array([0.5, 7, 9, 0.25, 1], dtype=np.float32)
    )


def _priorities(table: gear.Table) -> None:
    allowed = [(4, 0.5), (3,), (2, 9, 0.25), (1,), (5, 7)]
    for slot, values in enumerate(allowed):
        assert table.reader().arrays.priority[slot] in values


def _evicting(policy: int) -> Callable[[gear.Table, Index], None]:
    def act(table: gear.Table, index: Index) -> None:
        slots, ids = index.begin(np.array([14]), evict=policy)
        steps = table.region.layout.block_steps
        values = np.zeros(-(-14 // steps) * steps, dtype=np.int64)
        values[:14] = np.arange(14) + 5000
        table.region.column("x")[np.array(ids), : steps * 8] = values.view(np.uint8).reshape(-1, steps * 8)
        index.commit(slots, np.ones(1, dtype=np.float32))

    return act


def span(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


_STREAM = (span(5000, 6), span(5003, 6), span(5006, 5))
SCENES = {
    "grow in place": Scene(_alone(10), some, (span(5000, 10),)),
    "finish with more than it needs": Scene(_alone(8), lambda table: None, (span(5000, 8),)),
    "finish and give back blocks": Scene(
        _alone(9), lambda table: None, (span(5000, 9),), options={"max_steps": 300, "max_blocks": 100}
    ),
    "grow, then discard": Scene(_alone(10, "discard"), some),
    "grow elsewhere": Scene(_both, some, (span(5000, 7), span(6000, 7))),
    "grow and move": Scene(_alone(10), worn(2), (span(5000, 10),)),
    "grow elsewhere and move": Scene(_both, worn(5), (span(5000, 7), span(6000, 7)), reader=False),
    "grow evicts": Scene(
        _alone(13),
        full,
        (span(5000, 13),),
        (100, 200, 300, 400),
        reader=False,
        options={"on_full": "evict_oldest"},
    ),
    "grow evicts the lowest": Scene(
        _alone(13),
        full,
        (span(5000, 13),),
        (400, 300, 200),
        reader=False,
        options={"on_full": "evict_lowest_priority"},
    ),
    "roll": Scene(_stream(6, 3, 11), lambda table: None, _STREAM),
    "roll beside others": Scene(_stream(6, 3, 9, "discard"), some, _STREAM[:2]),
    "roll and move": Scene(_stream(6, 3, 9, "discard"), worn(3), _STREAM[:2]),
    "roll evicts": Scene(
        _stream(6, 3, 11),
        full,
        _STREAM,
        (100, 200, 300, 400, 500),
        reader=False,
        options={"on_full": "evict_oldest"},
    ),
    "chunks that are copied": Scene(
        _stream(6, 2, 9), lambda table: None, (span(5000, 6), span(5004, 5)), options={"max_blocks": 13}
    ),
    "two streams": Scene(
        _two_streams,
        lambda table: None,
        (span(5000, 6), span(6000, 6), span(5003, 6), span(6003, 6)),
        options={"max_trajectories": 7, "max_steps": 60},
    ),
    "two streams move": Scene(
        _two_streams,
        worn(7),
        (span(5000, 6), span(6000, 6), span(5003, 6), span(6003, 6)),
        options={"max_trajectories": 9, "max_steps": 60},
        reader=False,
    ),
    "count samples": Scene(
        _count, full, may_lose=(100, 200), in_order=False, options={"max_times_sampled": 2}, check=_counted
    ),
    "expire": Scene(_expire, _aged, may_lose=(100, 200, 300)),
    "set priorities": Scene(_set_priorities, bounded, check=_priorities),
    "evict the oldest": Scene(_evicting(1), full, (span(5000, 14),), (100, 200, 300, 400), reader=False),
    "evict the lowest": Scene(_evicting(2), full, (span(5000, 14),), (400, 300, 200, 100), reader=False),
}


def everything(table: gear.Table) -> list[list[int]]:
    return [values_of(table, slot) for slot in table.indices().tolist()]


def survive(scene: Scene, stores: int, *, torn: bool, again: int | None = None) -> bool:
    """Let the process die after `stores` stores, and its heir after `again`; False if one of them did not die."""
    sizes: dict[str, Any] = {"max_steps": 30, "max_trajectories": 6, "block_steps": 3, **scene.options}
    with gear.Table.create(SCALAR, **sizes) as table:
        scene.prepare(table)
        index = table.index
        watch_moves(table)
        table.region.lock.timeout = index.admission.timeout = 0
        before = everything(table)
        extent = table.region.array("extent")
        seen = [(int(extent[slot, 1]), values_of(table, slot)) for slot in table.indices().tolist()]
        seen = seen if scene.reader else []
        ticket = index.reader.begin_read() if scene.reader else None
        for count, act in [(stores, scene.act), (again, lambda _, heir: heir.reader.snapshot())]:
            if count is None:
                continue
            try:
                with mortal(table, count, torn=torn) as other:
                    act(table, other)
            except Died:
                continue
            return False
        bury(table)
        table.check_valid()
        same_snapshot(table)
        scene.check(table)
        after = everything(table)
        new = [values for values in after if values[0] >= 5000]
        kept = [values for values in after if values[0] < 5000]
        assert kept == [values for values in before if values in kept], "the order changed"
        assert after[len(kept) :] == new
        assert new in [list(scene.new[:i]) for i in range(len(scene.new) + 1)] or (
            scene.may_lose and new in [list(scene.new[i:j]) for i, j in itertools.combinations(range(4), 2)]
        )
        lost = {values[0] for values in before if values not in kept}
        allowed = scene.may_lose[: len(lost)] if scene.in_order else scene.may_lose
        assert lost <= set(allowed), "a trajectory is missing"
        assert (index.arrays.state != WRITING).all()
        for start, values in seen:
            assert values_at(table, start, len(values)) == values
        if ticket is not None:
            ticket.end()
        # No slot and no block has leaked: all that fits into an empty table does.
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0
        assert (table.region.array("state") == FREE).all()
        for length in (sizes["max_steps"], 7):
            with table.writer() as writer:
                steps_of(writer, first=[7000], count=length)
            assert everything(table) == [span(7000, length)]
            table.remove(table.indices())
        table.check_valid()
        return True


@pytest.fixture
def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tables of these tests are small: machine code saves nothing, and is loaded anew for each of them.
    operate = IndexArrays.operate
    monkeypatch.setattr(IndexArrays, "operate", lambda index, **_: operate(index, compiled=False))


@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("torn", [False, True], ids=["between stores", "inside stores"])
@pytest.mark.parametrize("scene", SCENES)
@points(11)
def test_death_at_every_point(scene: str, torn: bool, every: int) -> None:
    for stores in itertools.count(len(scene) % every, every * (2 if torn else 1)):
        if not survive(SCENES[scene], stores, torn=torn):
            break
    assert stores > 5, "nothing was interrupted"


@pytest.mark.slow
@pytest.mark.usefixtures("_in_python")
@pytest.mark.parametrize("scene", ["two streams move", "grow evicts the lowest", "count samples", "expire"])
@points(9)
def test_death_of_the_heir(scene: str, every: int) -> None:
    """Whoever finds the index half changed may die too while it repairs it."""
    deaths = 0
    for stores in itertools.count(0, 3 * every):
        if not survive(SCENES[scene], stores, torn=False):
            break
        for again in itertools.count(stores % 7, 7 * every):
            if not survive(SCENES[scene], stores, torn=True, again=again):
                break
            deaths += 1
    assert deaths > (20 if every == 1 else 0)


# Machine code and Python ------------------------------------------------------------------------------


def numbered(number: int) -> Ticket:
    """A ticket of a given number: those of two tables leave the same bytes."""
    ticket = Ticket()
    ticket.number = number
    return ticket


@pytest.mark.parametrize("seed", range(3))
def test_compiled_or_not_makes_no_difference(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations leave the same bytes in the index and in the columns."""
    ticks = itertools.count(10**9, 1000)
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    clock = [0]
    tables = []
    policy = ["error", "evict_oldest", "evict_lowest_priority"][seed % 3]
    for compiled in (True, False):
        table = gear.Table.create(
            SCALAR,
            max_steps=60,
            max_trajectories=9,
            block_steps=3,
            max_blocks=16,
            on_full=policy,  # type: ignore[arg-type]
            max_times_sampled=3,
            max_age=3e-5,
            timeout=1e-6,
        )
        table.index.arrays.operate(compiled=compiled)
        table.index.store = lambda *_args, **_options: None  # type: ignore[method-assign]
        options = [(None, 0), (6, 3), (6, 4), (9, 6)]
        writers = [table.writer(chunk_steps=chunk, overlap_steps=overlap) for chunk, overlap in options]
        tables.append((table, writers))
    generator = np.random.default_rng(seed)
    tickets: list[list[Ticket]] = []  # one of each table
    for turn in range(600):
        clock[0] = next(ticks)
        pair: list[Ticket] = []
        what = generator.choice(
            ["append"] * 8
            + ["commit", "discard", "remove", "priorities", "draw", "read", "unread", "add", "repair"]
        )
        which, number = int(generator.integers(4)), int(generator.integers(1, 9))
        some_slots = generator.integers(0, 9, size=5)
        outcomes = []
        for table, writers in tables:
            index = table.index
            ready = table.region.array("state")[some_slots] == READY
            try:
                outcome: Any = None
                if what == "append":
                    outcome = writers[which].append(x=np.arange(number))
                elif what == "commit":
                    outcome = writers[which].commit(float(number))
                elif what == "discard":
                    outcome = writers[which].discard()
                elif what == "remove":
                    table.remove(np.unique(some_slots[ready]))
                elif what == "priorities":
                    index.reader.set_priorities(
                        some_slots, np.full(5, -1), some_slots.astype(np.float32) + number
                    )
                elif what == "draw":
                    outcome = index.reader.count_samples(
                        some_slots, index.arrays.generation[some_slots]
                    ).tolist()
                elif what == "read":
                    outcome = len(tickets)
                    if outcome < 2:
                        pair.append(index.reader.begin_read(numbered(turn)))
                elif what == "unread" and tickets:
                    tickets[0][len(outcomes)].end()
                elif what == "add":
                    outcome = table.add(trajectory(number, number), priority=number)
                elif what == "repair":
                    index.arrays.counters[DIRTY] = 1
                    outcome = index.reader.snapshot().slots.tolist()
            except GearError as error:
                outcome = str(error)
            outcomes.append(outcome)
        assert outcomes[0] == outcomes[1], what
        if pair:
            tickets.append(pair)
        if what == "unread":
            tickets = tickets[1:]
        for name in tables[0][0].region.layout.arrays:
            if name == "counters":
                one, other = (table.region.array(name)[:INSERT_WAIT] for table, _ in tables)
            else:
                one, other = (table.region.array(name) for table, _ in tables)
            assert one.tobytes() == other.tobytes(), (what, name)
        tables[0][0].check_valid()
    one, other = (table.region.column("x") for table, _ in tables)
    assert one.tobytes() == other.tobytes()
    assert tables[0][0].stats().num_inserted > 50
    for table, _ in tables:
        table.close()


# The lowest priority ----------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(4))
def test_the_lowest_priority_goes_first(seed: int) -> None:
    """Of equal ones any of them; those that were given none go last, the oldest first."""
    generator = np.random.default_rng(seed)
    slots = int(generator.integers(1, 70))
    with gear.Table.create(
        SCALAR, max_steps=10**6, max_trajectories=slots, block_steps=4, on_full="evict_lowest_priority"
    ) as table:
        index = table.index
        twin: dict[int, tuple[int, float | None]] = {}  # slot -> number, priority
        for number in range(400):
            priority = None if generator.random() < 0.3 else float(generator.integers(0, 6))
            was = dict(twin)
            slot = table.add({"x": np.full(1 + number % 5, number)}, priority=priority)
            if len(was) == slots:
                least = min((p for _, p in was.values() if p is not None), default=None)
                gone, given = was[slot]
                assert given == least
                if least is None:
                    assert gone == min(n for n, _ in was.values())
            twin[slot] = number, priority
            if number % 3 == 0:
                chosen = generator.choice(list(twin), size=3)
                priorities = generator.integers(0, 6, size=3).astype(np.float32)
                index.reader.set_priorities(chosen, np.full(3, -1), priorities)
                for one, value in zip(chosen.tolist(), priorities.tolist(), strict=True):
                    twin[one] = twin[one][0], value
            if number % 17 == 0:
                victim = int(generator.choice(list(twin)))
                table.remove(victim)
                del twin[victim]
            if number % 41 == 0:
                index.arrays.counters[DIRTY] = 1
            if number % 10 != 0:
                continue
            table.check_valid()
            assert {s: int(table.region.array("extent")[s, 0]) for s in twin} == {
                s: 1 + n % 5 for s, (n, _) in twin.items()
            }
        assert sorted(table.indices().tolist()) == sorted(twin)


# Age, and the rules of a table ------------------------------------------------------------------------


def test_trajectories_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])
    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=8, block_steps=4, max_age=2.5) as table:
        writer = table.writer(chunk_steps=8, overlap_steps=4)
        steps_of(writer, first=[0], count=8)
        for number in range(2):
            now[0] += 10**9
            table.add(trajectory(number + 1, 3))
        assert [values[0] for values in everything(table)] == [0, 100, 200]
        now[0] += 5 * 10**8
        assert len(table) == 3, "not older than that"
        now[0] += 1
        assert table.stats().num_trajectories == 2
        assert table.stats().num_expired == 1
        assert [values[0] for values in everything(table)] == [100, 200]
        table.check_valid()
        same_snapshot(table)
        # What is being written does not age; a chunk does from when it was committed.
        steps_of(writer, first=[8], count=4)
        assert everything(table)[-1] == span(4, 8)
        # Whoever adds sees to it too.
        now[0] += 10**9
        ticket = table.index.reader.begin_read()
        table.extend([trajectory(5, 2), trajectory(6, 2)])
        assert [values[0] for values in everything(table)] == [200, 4, 500, 600][-len(table) :]
        ticket.end()
        ticket.end()
        now[0] += 10**11
        writer.discard()
        assert everything(table) == []
        table.check_valid()
        table.add(trajectory(7, 40))
        assert table.stats().num_expired == 6
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0


def test_rules_are_stored_with_the_table() -> None:
    limiter = gear.SampleToInsertRatio(4.0, min_size=3, error_buffer=20.0)
    options: dict[str, Any] = {
        "on_full": "evict_lowest_priority",
        "rate_limiter": limiter,
        "max_times_sampled": 7,
        "max_age": 12.5,
    }
    with gear.Table.create(SCALAR, max_steps=40, max_trajectories=4, name=fresh_name(), **options) as table:
        try:
            with gear.Table.attach(str(table.name)) as other:
                assert other.rules == table.rules
                assert dataclasses.asdict(other.rules)["max_times_sampled"] == 7
                for name, value in options.items():
                    assert getattr(other.rules, name) == value
                assert other.on_full == "evict_lowest_priority"
                assert other.policy == table.policy
            with gear.Table.attach(str(table.name), on_full="wait") as other:
                assert (other.on_full, other.rules.on_full) == ("wait", "evict_lowest_priority")
        finally:
            table.unlink()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"on_full": "evict"},
            "on_full is 'evict'; expected 'error', 'evict_oldest', 'evict_lowest_priority' or 'wa",
        ),
        ({"max_times_sampled": 0}, "max_times_sampled is 0; expected None or an integer of at least 1"),
        ({"max_times_sampled": 2.0}, "max_times_sampled is 2.0; expected"),
        ({"max_times_sampled": True}, "max_times_sampled is True; expected"),
        ({"max_age": 0}, "max_age is 0; expected a positive number of seconds"),
        ({"max_age": float("nan")}, "max_age is nan; expected"),
        ({"max_age": "1"}, "max_age is '1'; expected"),
        ({"rate_limiter": 3}, "rate_limiter is 3; expected None or a limiter such as"),
    ],
)
def test_rules_that_make_no_sense(options: Any, message: str) -> None:
    with pytest.raises(gear.errors.SchemaError) as caught:
        gear.Table.create(SCALAR, max_steps=40, max_trajectories=4, **options)
    assert str(caught.value).startswith(message)
