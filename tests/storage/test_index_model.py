"""The index beside a naive twin, and its block tables that move while they are read."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from index_common import Follower
from options_common import nested_table
from table_common import COLUMNS, Died, Reading, bury, mortal, number_of, numbers_of, rows, store, write

import gear_loader as gear
from gear_loader.errors import LockTimeoutError, StaleIndexError, TableFullError
from gear_loader.storage.counters import DIRTY, HALF, NUM_TOUCHED
from gear_loader.storage.readers import Ticket
from gear_loader.storage.states import READY

hypothesis = pytest.importorskip("hypothesis")
st = pytest.importorskip("hypothesis.strategies")
stateful = pytest.importorskip("hypothesis.stateful")


@dataclasses.dataclass
class Entry:
    number: int
    length: int
    priority: float = 1.0
    generation: int | None = None


@dataclasses.dataclass
class Reader:
    ticket: Ticket
    began: int  # when
    readings: list[Reading]
    alive: bool = True


@dataclasses.dataclass
class Pending:
    slots: np.ndarray
    ids: np.ndarray
    entries: list[Entry]
    done: bool = False


@dataclasses.dataclass
class Gone:
    entry: Entry
    when: int


class TableMachine(stateful.RuleBasedStateMachine):
    """Additions, removals, evictions, reads and unfinished writes in any order, and deaths in between.

    The twin is a dict in order of addition, a list of what was retired and lists of open reads and writes. It says
    beforehand how each operation must end.
    """

    pending = stateful.Bundle("pending")
    reading = stateful.Bundle("reading")

    @stateful.initialize(
        sizes=st.tuples(st.integers(1, 40), st.integers(1, 6), st.integers(1, 5)),
        tight=st.booleans(),
        evict=st.booleans(),
        packed=st.booleans(),
    )
    def create(self, sizes: tuple[int, int, int], tight: bool, evict: bool, packed: bool) -> None:
        max_steps, max_trajectories, block_steps = sizes
        options: dict[str, Any] = {"max_blocks": -(-max_steps // block_steps)} if tight else {}
        options |= {"block_steps": block_steps, "on_full": "evict_oldest" if evict else "error"}
        self.table = gear.Table.create(
            COLUMNS,
            **nested_table(
                {"max_steps": max_steps, "max_trajectories": max_trajectories, "packed": packed, **options}
            ),
        )
        self.table._engine.region.lock.timeout = 0
        self.max_steps, self.max_trajectories, self.block_steps = max_steps, max_trajectories, block_steps
        self.num_blocks = self.table._engine.region.layout.num_blocks
        self.evict = evict
        self.live: dict[int, Entry] = {}
        self.gone: list[Gone] = []
        self.writes: list[Pending] = []
        self.readers: list[Reader] = []
        self.numbers = itertools.count(1)
        self.clock = itertools.count()
        self.evicted = 0
        self.generations: dict[int, int] = {}
        self.follower = Follower(self.table)

    def teardown(self) -> None:
        if hasattr(self, "table"):
            self.table.close()

    # What the twin knows.

    def blocks(self, entries: Any) -> int:
        return sum(-(-entry.length // self.block_steps) for entry in entries)

    def written(self) -> list[Entry]:
        return [entry for write in self.writes if not write.done for entry in write.entries]

    def held(self) -> list[Entry]:
        """Retired, and a process that is alive may still read it."""
        began = min((reader.began for reader in self.readers if reader.alive), default=float("inf"))
        return [gone.entry for gone in self.gone if gone.when > began]

    def commit_all(self, slots: list[int], entries: list[Entry]) -> None:
        self.live.update(zip(slots, entries, strict=True))
        self.follower.touched += slots

    def retire(self, slot: int) -> None:
        self.follower.touched.append(slot)
        self.gone.append(Gone(self.live.pop(slot), next(self.clock)))

    def missing(self, lengths: list[int], *, but: Any) -> bool:
        """Whether there is no room for `lengths`, if the entries `but` have to stay."""
        but = list(but)
        return (
            len(but) + len(lengths) > self.max_trajectories
            or sum(entry.length for entry in but) + sum(lengths) > self.max_steps
            or self.blocks(but) + sum(-(-length // self.block_steps) for length in lengths) > self.num_blocks
        )

    def make_room(self, lengths: list[int]) -> type[Exception] | None:
        """What the policy does, and how it ends."""
        if self.missing(lengths, but=[*self.live.values(), *self.written()]):
            if not self.evict or self.missing(lengths, but=[]):
                return TableFullError
            if self.missing(lengths, but=self.written()):
                return LockTimeoutError
            while self.missing(lengths, but=[*self.live.values(), *self.written()]):
                self.retire(next(iter(self.live)))
                self.evicted += 1
        taken = [*self.live.values(), *self.written(), *self.held()]
        blocks = self.blocks(taken) + sum(-(-length // self.block_steps) for length in lengths)
        if len(taken) + len(lengths) > self.max_trajectories or blocks > self.num_blocks:
            return LockTimeoutError
        return None

    def ends(self, call: Callable[[], Any], expected: type[Exception] | None) -> Any:
        """The call's result; None if it failed as the twin said."""
        if expected is not None:
            with pytest.raises(expected):
                call()
            return None
        try:
            return call()
        except LockTimeoutError:
            # The block tables want to move, and a reader uses the half they would move to: the twin knows no halves.
            assert any(reader.alive for reader in self.readers)
            return None

    def entries(self, lengths: list[int]) -> list[Entry]:
        longest = min(self.max_steps, self.num_blocks * self.block_steps)
        return [Entry(next(self.numbers), 1 + length % longest, length / 2) for length in lengths]

    # Rules.

    @stateful.rule(length=st.integers(0, 1000))
    def add(self, length: int) -> None:
        (entry,) = self.entries([length])
        expected = self.make_room([entry.length])
        index = self.ends(
            lambda: self.table.add(rows(entry.number, entry.length), priority=entry.priority), expected
        )
        if index is not None:
            assert index not in self.live
            self.commit_all([index], [entry])

    @stateful.rule(lengths=st.lists(st.integers(0, 12), max_size=4), stacked=st.booleans())
    def extend(self, lengths: list[int], stacked: bool) -> None:
        entries = self.entries(lengths)
        expected = self.make_room([entry.length for entry in entries]) if entries else None
        given: Any = [rows(entry.number, entry.length) for entry in entries]
        options: dict[str, Any] = {"priority": [entry.priority for entry in entries]}
        if stacked and entries:
            options["lengths"] = [entry.length for entry in entries]
            longest = max(options["lengths"])
            given = {
                name: np.stack([np.resize(one[name], (longest, *one[name].shape[1:])) for one in given])
                for name in COLUMNS
            }
        indices = self.ends(lambda: self.table.extend(given, **options), expected)
        if indices is not None:
            assert len({*indices.tolist()} - {*self.live}) == len(entries)
            self.commit_all(indices.tolist(), entries)

    @stateful.rule(target=pending, lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3))
    def begin_write(self, lengths: list[int]) -> Any:
        entries = self.entries(lengths)
        counts = [entry.length for entry in entries]
        expected = self.make_room(counts)
        index = self.table._engine.index
        begun = self.ends(lambda: index.begin(np.array(counts), evict=self.evict), expected)
        if begun is None:
            return stateful.multiple()
        write = Pending(*begun, entries)
        assert not {*write.slots.tolist()} & {*self.live}
        self.writes.append(write)
        return write

    @stateful.rule(write=stateful.consumes(pending))
    def commit(self, write: Pending) -> None:
        if write.done:
            return
        place = 0
        for entry in write.entries:
            count = self.blocks([entry])
            self.write(write.ids[place : place + count], entry)
            place += count
        self.table._engine.index.commit(
            write.slots, np.array([entry.priority for entry in write.entries], dtype=np.float32)
        )
        write.done = True
        self.commit_all(write.slots.tolist(), write.entries)

    def write(self, ids: np.ndarray, entry: Entry) -> None:
        write(self.table, ids, entry.number, entry.length)

    @stateful.rule(write=stateful.consumes(pending), wait=st.booleans())
    def abort(self, write: Pending, wait: bool) -> None:
        if write.done:
            return
        self.table._engine.index.abort(write.slots, wait=wait)
        if not wait:
            bury(self.table)
        write.done = True

    @stateful.rule(target=reading, dead=st.booleans())
    def begin_read(self, dead: bool) -> Any:
        if len(self.readers) > 8:
            return stateful.multiple()
        ticket, snapshot = (self._dead_read if dead else self.table._engine.index.reader.begin_snapshot)()
        assert snapshot.slots.tolist() == list(self.live)
        assert snapshot.lengths.tolist() == [entry.length for entry in self.live.values()]
        if dead:
            return stateful.multiple()
        reader = Reader(ticket, next(self.clock), [Reading.of(self.table, slot) for slot in self.live])
        self.readers.append(reader)
        return reader

    def _dead_read(self) -> Any:
        with mortal(self.table, float("inf")) as index:
            return index.reader.begin_snapshot()

    @stateful.rule(reader=stateful.consumes(reading))
    def end_read(self, reader: Reader) -> None:
        reader.ticket.end()
        reader.alive = False
        self.readers.remove(reader)

    @stateful.precondition(lambda self: self.live)
    @stateful.rule(data=st.data())
    def remove(self, data: st.DataObject) -> None:
        slots = data.draw(st.lists(st.sampled_from(list(self.live)), min_size=1, unique=True))
        self.table.remove(slots if len(slots) > 1 else slots[0])
        for slot in slots:
            self.retire(slot)

    @stateful.rule()
    def look_for_changes(self) -> None:
        self.follower.look()

    @stateful.rule()
    def find_the_index_half_changed(self) -> None:
        self.table._engine.region.array("counters")[DIRTY] = 1
        self.follower.repaired = True

    @stateful.rule(slot=st.integers(-2, 8))
    def touch_a_stale_index(self, slot: int) -> None:
        if slot in self.live:
            return
        with pytest.raises(StaleIndexError, match=rf"^Index {slot} names no live trajectory: .* "):
            self.table[slot]
        with pytest.raises(StaleIndexError):
            self.table.remove([*self.live, slot])

    @stateful.rule(
        stores=st.integers(0, 60),
        torn=st.booleans(),
        lengths=st.lists(st.integers(0, 12), min_size=1, max_size=3),
        removing=st.booleans(),
    )
    def die(self, stores: int, torn: bool, lengths: list[int], removing: bool) -> None:
        """Another process dies while it adds or removes. What is found then becomes the twin's truth, if it can be."""
        entries = self.entries(lengths)
        before = dict(self.live)
        victims = list(self.live)[: len(lengths)] if removing else []
        try:
            with mortal(self.table, stores, torn=torn) as index:
                if removing:
                    index.remove(np.array(victims, dtype=np.int64))
                else:
                    numbers, counts = [entry.number for entry in entries], [entry.length for entry in entries]
                    store(self.table, index, numbers, counts, evict=self.evict)
        except (Died, TableFullError, LockTimeoutError):
            pass
        bury(self.table)
        self.follower.repaired = True
        found = self.table.indices().tolist()
        state, epoch = self.table._engine.region.array("state"), self.table._engine.region.array("epoch")
        lost = [
            slot for slot in before if slot not in found or number_of(self.table[slot]) != before[slot].number
        ]
        assert lost == list(before)[: len(lost)], "only the oldest may have gone"
        assert set(lost) <= set(victims) or self.evict
        for slot in sorted(lost, key=lambda slot: int(epoch[slot])):
            self.retire(slot)
        new = [slot for slot in found if slot not in self.live]
        assert len(new) in (0, len(entries)), "all of them or none"
        self.commit_all(new, entries[: len(new)])
        self.evicted = self.table.stats().num_evicted
        assert (state[found] == READY).all()

    # What holds all the time.

    @stateful.invariant()
    def valid(self) -> None:
        if not hasattr(self, "table"):
            return
        table = self.table
        table.check_valid()
        assert table.indices().tolist() == list(self.live)
        assert table.lengths().tolist() == [entry.length for entry in self.live.values()]
        assert len(table) == len(self.live)
        assert table.num_steps == sum(entry.length for entry in self.live.values())
        assert numbers_of(table) == [entry.number for entry in self.live.values()]
        generation = table._engine.region.array("generation")
        for slot, entry in self.live.items():
            if entry.generation is None:  # new here
                entry.generation = int(generation[slot])
                assert entry.generation > self.generations.get(slot, 0)
                self.generations[slot] = entry.generation
            assert generation[slot] == entry.generation
        priorities = table._engine.region.array("priority")[list(self.live)]
        died = [entry.priority for entry in self.live.values()]
        assert ((priorities == died) | (priorities == 1)).all()  # a process that died gave 1
        for reader in self.readers:
            for reading in reader.readings:
                reading.check(table)
        stats = table.stats()
        assert stats.num_evicted == self.evicted
        least = self.blocks([*self.live.values(), *self.written(), *self.held()])
        assert least <= stats.blocks_in_use <= least + self.blocks(gone.entry for gone in self.gone)


@pytest.mark.parametrize("num_slots", [1, 2, 5])
def test_the_ring_tells_what_was_touched_until_it_overflows(num_slots: int) -> None:
    with gear.Table.create(COLUMNS, max_steps=20, max_trajectories=num_slots, block_steps=4) as table:
        follower = Follower(table)
        assert follower.look().everything
        for touches in [*range(2 * num_slots + 4)] * 3:
            for _ in range(touches):
                if len(table):
                    slot = int(table.indices()[0])
                    table.remove(slot)
                else:
                    slot = table.add(rows(touches, 2))
                follower.touched.append(slot)
            assert follower.look().everything == (touches > num_slots)


def test_a_repair_makes_followers_look_at_every_slot() -> None:
    with gear.Table.create(COLUMNS, max_steps=60, max_trajectories=6) as table:
        table.extend([rows(1, 4), rows(2, 7)])
        follower = Follower(table)
        follower.look()
        assert not follower.look().everything
        table._engine.region.array("counters")[DIRTY] = 1
        touched = int(table._engine.region.array("counters")[NUM_TOUCHED])
        follower.repaired = True
        changes = follower.look()
        assert changes.everything
        assert changes.slots.tolist() == list(range(6))
        assert changes.position > touched + 6
        assert not follower.look().everything


@pytest.mark.parametrize(
    ("worn", "retiring"), [(0, False), (5, True), (11, False), (12, True), (17, False), (21, True)]
)
def test_block_tables_move_twice_only_when_no_reader_is_left_behind(worn: int, retiring: bool) -> None:
    """A reader that began before a move may still use the half that was left; so the next move waits for it."""
    with gear.Table.create(
        COLUMNS, max_steps=40, max_trajectories=8, block_steps=4, memory=gear.Memory(max_blocks=12)
    ) as table:
        table._engine.region.lock.timeout = 0
        index = table._engine.index
        table.extend([rows(1, 9), rows(2, 13), rows(3, 1)])

        def wear() -> None:
            slots, _ = index.begin(np.array([1]), evict=False)
            index.abort(slots)

        def wear_until_it_waits() -> None:
            for _ in range(200):
                wear()
                table.check_valid()
                halves.append(int(index.arrays.counters[HALF]))
                for reading in readings:
                    reading.check(table)

        for _ in range(worn):
            wear()
        ticket = index.reader.begin_read()
        readings = [Reading.of(table, slot) for slot in table.indices().tolist()]
        if retiring:
            table.remove(1)
        halves = [int(index.arrays.counters[HALF])]
        with pytest.raises(LockTimeoutError, match=r"is still being read by the processes \[\d+\] or writ"):
            wear_until_it_waits()
        assert len(list(itertools.groupby(halves))) == 2, "moved once, and not back"
        for reading in readings:
            reading.check(table)
        assert numbers_of(table) == ([1, 3] if retiring else [1, 2, 3])
        ticket.end()
        for _ in range(60):
            wear()
        assert numbers_of(table) == ([1, 3] if retiring else [1, 2, 3])
        table.check_valid()


TableMachine.TestCase.pytestmark = [  # type: ignore[attr-defined]
    pytest.mark.slow,
    pytest.mark.timeout(900),  # Hypothesis may take minutes to shrink a failing example
]
TestTheTableBesideItsTwin = TableMachine.TestCase
