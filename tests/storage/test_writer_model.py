"""Writers, chunks and the rules of a table beside a naive twin, compiled and as Python."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import time
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from index_common import SCALAR, Follower, same_snapshot, values_at, values_of, watch_moves
from options_common import nested_table
from table_common import Died, bury, fresh_name, mortal

import gear_loader as gear
from gear_loader.errors import GearError, LockTimeoutError, StaleIndexError, TableFullError
from gear_loader.kernels.sum_tree import UNSET
from gear_loader.native.lanes import LANE_HELD
from gear_loader.storage.counters import DIRTY, HALF, INSERT_WAIT
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY, WRITING

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")


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
        sizes=st.tuples(
            st.integers(1, 3), st.integers(6, 24), st.integers(3, 14), st.sampled_from([30, 60, 300])
        ),
        on_full=st.sampled_from(["error", "evict_oldest", "evict_lowest_priority", "wait"]),
        limit=st.sampled_from([None, None, 1, 3]),
        streams=st.lists(st.tuples(st.integers(1, 3), st.integers(0, 6)), min_size=1, max_size=3),
        prefixes=st.booleans(),
    )
    def create(
        self, sizes: Any, on_full: Any, limit: int | None, streams: list[tuple[int, int]], prefixes: bool
    ) -> None:
        names = ("block_steps", "max_blocks", "max_trajectories", "max_steps")
        options = dict(zip(names, sizes, strict=True))
        block_steps = options["block_steps"]
        self.table = gear.Table.create(
            SCALAR,
            **nested_table({**options, "on_full": on_full, "max_times_sampled": limit, "prefixes": prefixes}),
        )
        self.table._engine.index.admission.timeout = self.table._engine.region.lock.timeout = 0
        watch_moves(self.table)
        self.on_full, self.limit = on_full, limit
        self.live: dict[int, Entry] = {}
        self.streams: list[Stream] = []
        self.reads: list[Read] = []
        self.numbers = itertools.count(1)
        self.generations: dict[int, tuple[int, Entry | None]] = {}
        self.follower = Follower(self.table)
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
            self.table._engine.index.recovery.locked(
                lambda: self.table._engine.index.arrays.ops.reclaim(self.table._engine.index.arrays.where)
            )
            self.table.check_valid()
            assert self.table.stats().blocks_in_use == 0
            self.table.close()

    # What the twin knows.

    def now(self) -> list[int]:
        index = self.table._engine.index
        slots = np.flatnonzero(index.arrays.state == READY)
        found: list[int] = slots[np.argsort(index.arrays.sequence[slots])].tolist()
        return found

    def settle(self, added: list[Entry], *, may_evict: bool = True, spared: int | None = None) -> None:
        """Take over what is there: `added` came, and what is gone is what the policy gives up first, but not the slot
        `spared`."""
        before = list(self.live.items())
        # A slot may have been evicted and given out again: by contents, which no two have in common.
        known = {(slot, *entry.values): entry for slot, entry in before}
        found = [(slot, values_of(self.table, slot)) for slot in self.now()]
        left = [known[(slot, *values)] for slot, values in found if (slot, *values) in known]
        came = [(slot, values) for slot, values in found if (slot, *values) not in known]
        kept = {id(entry) for entry in left}
        gone = [entry for _, entry in before if id(entry) not in kept]
        assert left == [entry for _, entry in before if id(entry) in kept], "the order changed"
        # Chunks that came may have gone at once.
        new = added[len(added) - len(came) :]
        assert [values for _, values in came] == [entry.values for entry in new]
        if gone or len(came) < len(added):
            assert may_evict
            assert self.on_full.startswith("evict")
        if self.on_full == "evict_oldest":
            order = [entry for slot, entry in before if slot != spared]
            assert gone == order[: len(gone)]
        elif spared is not None:
            assert self.live[spared] not in gone
        elif gone and left:
            assert self.rank(gone)[-1] <= self.rank(left)[0]
        self.live = {slot: entry for slot, entry in before if id(entry) in kept}
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
                assert len(before) == self.table._engine.longest
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
            stream.writer._sink.give_up()  # type: ignore[attr-defined]
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

    @stateful.precondition(lambda self: self.live and self.table._engine.region.layout.prefixes)
    @stateful.rule(data=st.data(), lengths=st.lists(st.integers(1, 6), min_size=1, max_size=3))
    def extend_after(self, data: Any, lengths: list[int]) -> None:
        """Trajectories that begin with steps of one that is there."""
        slot, entry = data.draw(st.sampled_from(list(self.live.items())))
        steps = data.draw(st.integers(1, len(entry.values)))
        each = [[next(self.numbers) for _ in range(length)] for length in lengths]
        try:
            self.table.extend([{"x": np.array(values)} for values in each], prefix=slot, prefix_steps=steps)
        except GearError:
            self.settle([], spared=slot)
            return
        self.settle([Entry(entry.values[:steps] + values, UNSET) for values in each], spared=slot)

    @stateful.rule(lengths=st.lists(st.integers(1, 9), max_size=4), stacked=st.booleans())
    def extend(self, lengths: list[int], stacked: bool) -> None:
        """All of them or none."""
        each = [[next(self.numbers) for _ in range(length)] for length in lengths]
        given: Any = [{"x": np.array(values)} for values in each]
        options: dict[str, Any] = {"priority": [float(length) for length in lengths]}
        if stacked and lengths:
            given = {"x": np.stack([np.resize(values, max(lengths)) for values in each])}
            options["lengths"] = lengths
        try:
            slots = self.table.extend(given, **options)
        except GearError:
            self.settle([])
            return
        assert len(set(slots.tolist())) == len(lengths)
        self.settle([Entry(values, float(len(values))) for values in each])

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
        index = self.table._engine.index
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
        index = self.table._engine.index
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
        ticket, snapshot = self.table._engine.reader().begin_snapshot()
        assert snapshot.slots.tolist() == list(self.live)
        extent = self.table._engine.region.array("extent")
        read = Read(ticket, [(int(extent[slot, 1]), entry.values) for slot, entry in self.live.items()])
        self.reads.append(read)
        return read

    @stateful.rule(read=stateful.consumes(reading))
    def end_read(self, read: Read) -> None:
        read.ticket.end()
        self.reads.remove(read)

    @stateful.rule()
    def look_for_changes(self) -> None:
        self.follower.repaired = True  # what was touched how often is not noted here
        self.follower.look()

    @stateful.rule(slot=st.integers(-2, 14))
    def touch_a_stale_index(self, slot: int) -> None:
        if slot not in self.live:
            with pytest.raises(StaleIndexError, match=rf"^Index {slot} is stale: .* "):
                self.table[slot]
            with pytest.raises(StaleIndexError):
                self.table.remove([*self.live, slot])

    @stateful.rule()
    def find_the_index_half_changed(self) -> None:
        self.table._engine.region.array("counters")[DIRTY] = 1
        bury(self.table)

    @stateful.rule(times=st.integers(1, 6), blocks=st.integers(1, 3))
    def wear(self, times: int, blocks: int) -> None:
        """Use up room for block tables, so that they have to move."""
        index = self.table._engine.index
        for _ in range(times):
            with contextlib.suppress(GearError):
                slots, _ = index.begin(np.array([blocks * self.table._engine.region.layout.block_steps]))
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
        writer._sink.give_up.detach()  # type: ignore[attr-defined]
        stream = Stream(writer, chunk, overlap)
        chunks = []
        with mortal(self.table, stores, torn=torn) as index, contextlib.suppress(Died, GearError):
            index.admission.timeout = 0
            writer._sink.index = index  # type: ignore[attr-defined]
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
        table, index = self.table, self.table._engine.index
        table.check_valid()
        same_snapshot(table)
        assert self.now() == list(self.live)
        assert (len(table), table.indices().tolist()) == (len(self.live), list(self.live))
        assert table.lengths().tolist() == [len(entry.values) for entry in self.live.values()]
        assert table.num_steps == sum(len(entry.values) for entry in self.live.values())
        for slot, entry in self.live.items():
            generation, known = self.generations.get(slot, (0, None))
            assert (index.arrays.generation[slot] > generation) == (known is not entry)
            self.generations[slot] = int(index.arrays.generation[slot]), entry
            assert values_of(table, slot) == entry.values
            assert index.arrays.priority[slot] == entry.priority
            assert index.arrays.sampled[slot] == entry.drawn
        for read in self.reads:
            for start, values in read.seen:
                assert values_at(table, start, len(values)) == values
        open_ = [stream for stream in self.streams if stream.writer.open_slots[1]]
        assert int((index.arrays.state == WRITING).sum()) == len(open_)
        for stream in open_:
            (slot,) = stream.writer.open_slots[1]
            sink: Any = stream.writer._sink
            assert stream.writer.num_steps == len(stream.values)
            assert index.arrays.row(slot).tolist() == sink.blocks_of(0).tolist()
            assert index.arrays.extent[slot, 0] == sink.lanes[0, LANE_HELD]
            assert values_at(table, int(index.arrays.extent[slot, 1]), len(stream.values)) == stream.values


WriterMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Hypothesis may take minutes to shrink a failing example
]
TestWritersBesideTheirTwin = WriterMachine.TestCase


@pytest.mark.parametrize("on_full", ["error", "evict_oldest"])
def test_block_tables_that_are_longer_than_there_are_blocks(on_full: Any) -> None:
    """A stream that has to begin its block table again has a part of it twice; moving must bring them together.

    Else they outgrow the half that they are moved to, and moving does not help.
    """
    sizes = {"max_steps": 10000, "max_trajectories": 400, "block_steps": 1, "max_blocks": 60}
    with gear.Table.create(SCALAR, **nested_table({**sizes, "on_full": on_full, "timeout": 0.01})) as table:
        watch_moves(table)
        writers = [table.writer(chunk_steps=8, overlap_steps=7) for _ in range(4)]
        index = table._engine.index
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


def _act(what: str, table: gear.Table, writer: gear.Writer, slots: Any, number: int, ticket: Ticket) -> Any:
    index = table._engine.index
    ready = slots[table._engine.region.array("state")[slots] == READY]
    priorities = slots.astype(np.float32) + number
    calls: dict[str, Callable[[], Any]] = {
        "append": lambda: writer.append(x=np.arange(number)),
        "commit": lambda: writer.commit(float(number)),
        "discard": writer.discard,
        "remove": lambda: table.remove(np.unique(ready)),
        "priorities": lambda: index.reader.set_priorities(slots, np.full(5, -1), priorities),
        "draw": lambda: index.reader.count_samples(slots, index.arrays.generation[slots]).tolist(),
        "read": lambda: index.reader.begin_read(ticket).row,
        "unread": lambda: ticket.end(),
        "add": lambda: table.add({"x": np.arange(number)}, priority=number),
        "repair": lambda: (
            index.arrays.counters.__setitem__(DIRTY, 1) or index.reader.snapshot().slots.tolist()
        ),
    }
    try:
        return calls[what]()
    except GearError as error:
        return str(error)


@pytest.mark.parametrize("turns", [200, pytest.param(600, marks=[pytest.mark.long, pytest.mark.exhaustive])])
@pytest.mark.parametrize("seed", range(3))
def test_compiled_or_not_makes_no_difference(seed: int, turns: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The same operations leave the same bytes in the index and in the columns."""
    clock = [0]
    monkeypatch.setattr(time, "monotonic_ns", lambda: clock[0])
    tables = []
    policy: Any = ["error", "evict_oldest", "evict_lowest_priority"][seed % 3]
    sizes = {"max_steps": 60, "max_trajectories": 9, "block_steps": 3, "max_blocks": 16}
    rules: dict[str, Any] = {"max_times_sampled": 3, "max_age": 3e-5}
    for compiled in (True, False):
        table = gear.Table.create(
            SCALAR, **nested_table({**sizes, **rules, "on_full": policy, "timeout": 1e-6})
        )
        table._engine.index.arrays.operate(compiled=compiled)
        table._engine.index.store = lambda *_args, **_options: None  # type: ignore[method-assign]
        cuts = [(None, 0), (6, 3), (6, 4), (9, 6)]
        writers = [table.writer(chunk_steps=chunk, overlap_steps=overlap) for chunk, overlap in cuts]
        tables.append((table, writers))
    generator = np.random.default_rng(seed)
    open_tickets: list[list[Ticket]] = []  # one of each table
    others = ["commit", "discard", "remove", "priorities", "draw", "read", "unread", "add", "repair"]
    for turn in range(turns):
        clock[0] = 10**9 + 1000 * turn
        what = str(generator.choice(["append"] * 8 + others))
        which, number = int(generator.integers(4)), int(generator.integers(1, 9))
        slots = generator.integers(0, 9, size=5)
        if what == ("read" if len(open_tickets) == 2 else "unread" if not open_tickets else None):
            continue
        tickets = open_tickets.pop(0) if what == "unread" else [Ticket(), Ticket()]
        if what == "read":
            open_tickets.append(tickets)
            for ticket in tickets:
                ticket.number = turn  # those of two tables leave the same bytes
        both = zip(tables, tickets, strict=True)
        one, other = (_act(what, table, writers[which], slots, number, t) for (table, writers), t in both)
        assert one == other, what
        for name in tables[0][0]._engine.region.layout.arrays:
            end = INSERT_WAIT if name == "counters" else None
            one, other = (table._engine.region.array(name)[:end] for table, _ in tables)
            assert one.tobytes() == other.tobytes(), (what, name)
        tables[0][0].check_valid()
    one, other = (table._engine.region.column("x") for table, _ in tables)
    assert one.tobytes() == other.tobytes()
    assert tables[0][0].stats().num_inserted > turns // 12
    for table, _ in tables:
        table.close()


@pytest.mark.parametrize("seed", range(2))
def test_the_lowest_priority_goes_first(seed: int) -> None:
    """Of equal ones any of them; those that were given no priority go last, the oldest first."""
    generator = np.random.default_rng(seed)
    slots = int(generator.integers(5, 70))
    sizes = {"max_steps": 10**6, "max_trajectories": slots, "block_steps": 4}
    with gear.Table.create(SCALAR, **nested_table({**sizes, "on_full": "evict_lowest_priority"})) as table:
        index = table._engine.index
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
            if number % 10 == 0:
                table.check_valid()
                extent = table._engine.region.array("extent")
                assert all(extent[s, 0] == 1 + n % 5 for s, (n, _) in twin.items())
        assert sorted(table.indices().tolist()) == sorted(twin)


def test_trajectories_that_are_too_old(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [10**12]
    monkeypatch.setattr(time, "monotonic_ns", lambda: now[0])

    def firsts() -> list[int]:
        return [values_of(table, slot)[0] for slot in table.indices().tolist()]

    with gear.Table.create(
        SCALAR, max_steps=40, max_trajectories=8, block_steps=4, limits=gear.Limits(max_age=2.5)
    ) as table:
        writer = table.writer(chunk_steps=8, overlap_steps=4)
        writer.append(x=np.arange(8))
        for number in (100, 200):
            now[0] += 10**9
            table.add({"x": number + np.arange(3)})
        assert firsts() == [0, 100, 200]
        now[0] += 5 * 10**8
        assert len(table) == 3, "not older than that"
        now[0] += 1
        assert (table.stats().num_trajectories, table.stats().num_expired) == (2, 1)
        assert firsts() == [100, 200]
        table.check_valid()
        same_snapshot(table)
        # What is being written does not age; a chunk does from when it was committed.
        writer.append(x=np.arange(8, 12))
        assert values_of(table, int(table.indices()[-1])) == list(range(4, 12))
        # An addition sees to it too.
        now[0] += 10**9
        ticket = table._engine.index.reader.begin_read()
        table.extend([{"x": np.arange(500, 502)}, {"x": np.arange(600, 602)}])
        assert firsts() == [200, 4, 500, 600][-len(table) :]
        ticket.end()
        now[0] += 10**11
        writer.discard()
        assert firsts() == []
        table.check_valid()
        table.add({"x": np.arange(40)})
        assert table.stats().num_expired == 6
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0


def test_rules_are_stored_with_the_table() -> None:
    limiter = gear.SampleToInsertRatio(4.0, min_size=3, error_buffer=20.0)
    policy: dict[str, Any] = {"on_full": "evict_lowest_priority", "max_times_sampled": 7, "max_age": 12.5}
    options = {"rate_limiter": limiter, **policy}
    with gear.Table.create(
        SCALAR, **nested_table({"max_steps": 40, "max_trajectories": 4, "name": fresh_name(), **options})
    ) as table:
        try:
            with gear.Table.attach(str(table.name)) as other:
                assert other.rules == table.rules
                assert {name: getattr(other.rules, name) for name in options} == options
                assert (other.on_full, other._engine.policy) == (
                    "evict_lowest_priority",
                    table._engine.policy,
                )
            with gear.Table.attach(str(table.name), on_full="wait") as other:
                assert (other.on_full, other.rules.on_full) == ("wait", "evict_lowest_priority")
        finally:
            table.unlink()
    wrong: list[tuple[dict[str, Any], str]] = [
        (
            {"on_full": "evict"},
            "on_full is 'evict'; expected 'error', 'evict_oldest', 'evict_lowest_priority'",
        ),
        ({"max_times_sampled": 0}, "max_times_sampled is 0; expected an integer of at least 1"),
        ({"max_times_sampled": 2.0}, "max_times_sampled is 2.0; expected"),
        ({"max_times_sampled": True}, "max_times_sampled is True; expected"),
        ({"max_age": 0}, "max_age is 0; expected a positive number of seconds"),
        ({"max_age": float("nan")}, "max_age is nan; expected"),
        ({"max_age": "1"}, "max_age is '1'; expected"),
        ({"rate_limiter": 3}, "rate_limiter is 3; expected None or a limiter such as"),
    ]
    for options, message in wrong:
        with pytest.raises(gear.errors.SchemaError) as caught:
            gear.Table.create(SCALAR, **nested_table({"max_steps": 40, "max_trajectories": 4, **options}))
        assert str(caught.value).startswith(message)
