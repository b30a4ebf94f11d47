"""A death at every single store of every change of the index, and what is found afterwards."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from cases import points
from index_common import SCALAR, Follower, same_snapshot, values_at, values_of, watch_moves
from options_common import nested_table
from table_common import Died, bury, mortal

import gear_loader as gear
from gear_loader.errors import GearError
from gear_loader.storage.counters import HALF, HEAD, NUM_REMOVED
from gear_loader.storage.incoming import listed
from gear_loader.storage.index import Index
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.operations.growth import finish
from gear_loader.storage.operations.room import lowest
from gear_loader.storage.operations.view import DONE
from gear_loader.storage.prefix_input import Beginning
from gear_loader.storage.priority_updates import PriorityUpdates
from gear_loader.storage.states import FREE, READY, WRITING

Act = Callable[[gear.Table, Index], Any]


@dataclasses.dataclass
class Scene:
    """A table with a history, and what a process does that dies meanwhile.

    Attributes:
        act: the operation, on the other process's index.
        prepare: gives the table its history; trajectory i holds i * 100, i * 100 + 1, ...
        new: what it adds, in order: of a later one nothing shows without the earlier ones; `at_once`: all or none.
        stages: lengths of the only trajectory that it adds, which begins at 5000.
        may_lose: the trajectories (by first value) that it may remove, in order of removal where `in_order`.
        reader: whether another process reads meanwhile (and keeps room that the operation might need).
        options: of the table.
        check: what has to hold afterwards besides.
    """

    act: Act
    prepare: Callable[[gear.Table], Any] = lambda table: None
    new: tuple[list[int], ...] = ()
    may_lose: tuple[int, ...] = ()
    at_once: bool = False
    in_order: bool = True
    reader: bool = True
    options: dict[str, Any] = dataclasses.field(default_factory=dict)
    check: Callable[[gear.Table], Any] = lambda table: None
    stages: tuple[int, ...] = ()


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
    """As `full`, when the lowest priority has been looked for."""
    full(table)
    assert lowest(table._engine.index.arrays.view) == 3


def worn(left: int, half: int = 0) -> Callable[[gear.Table], None]:
    """So that `left` places for block tables are left in the half that is in use."""

    def prepare(table: gear.Table) -> None:
        some(table)
        counters, half_size = table._engine.index.arrays.counters, table._engine.region.layout.half
        for used in range(half + 1):
            if used:  # into the other half
                table.remove(table.add(trajectory(9, 4)))
                table.remove(table.add(trajectory(9, 4)))
            for blocks in (2, 1):
                while counters[HEAD + used] + blocks + left <= half_size:
                    table.remove(table.add(trajectory(9, 3 * blocks)))
            assert counters[HALF] == used

    return prepare


def retired(table: gear.Table) -> None:
    """Two that were removed while they were read, and wait to be freed."""
    full(table)
    ticket = table._engine.index.reader.begin_read()
    table.remove([0, 2])
    ticket.end()


def dead_writers(table: gear.Table) -> None:
    some(table)
    with mortal(table, float("inf")) as index:
        index.begin(np.array([4, 4]), evict=False)


def aged(table: gear.Table) -> None:
    full(table)
    table._engine.region.array("created")[:3] -= 10**11  # the first three are old


def dying(table: gear.Table, index: Index, **options: Any) -> gear.Writer:
    """A writer of the process that is going to die."""
    writer = table.writer(**options)
    writer._sink.give_up.detach()  # type: ignore[attr-defined]
    writer._sink.index = index  # type: ignore[attr-defined]
    index.admission.timeout = 0
    return writer


def steps_of(*writers: gear.Writer, first: list[int], count: int) -> None:
    for i in range(count):
        for writer, begin in zip(writers, first, strict=True):
            writer.append(x=begin + i)


def _write(length: int, end: str = "commit", **chunks: int) -> Act:
    def act(table: gear.Table, index: Index) -> None:
        writer = dying(table, index, **chunks)
        steps_of(writer, first=[5000], count=length)
        getattr(writer, end)()

    return act


def _stream(chunk: int, overlap: int, length: int, end: str = "commit") -> Act:
    return _write(length, end, chunk_steps=chunk, overlap_steps=overlap)


def _both(end: str, length: int, **chunks: int) -> Act:
    def act(table: gear.Table, index: Index) -> None:
        writers = [dying(table, index, **chunks) for _ in range(2)]
        steps_of(*writers, first=[5000, 6000], count=length)
        for writer in writers:
            getattr(writer, end)()

    return act


def _adds(*lengths: int, policy: int = 0) -> Act:
    """`Table.extend` of trajectories that begin at 5000, 5100, ..."""

    def act(table: gear.Table, index: Index) -> None:
        slots, ids = index.begin(np.array(lengths), evict=policy)
        steps, place = table._engine.region.layout.block_steps, 0
        for number, length in enumerate(lengths):
            blocks = -(-length // steps)
            values = np.arange(blocks * steps) + 5000 + 100 * number
            data = table._engine.region.column("x")
            data[np.array(ids[place : place + blocks])] = values.view(np.uint8).reshape(-1, steps, 8)
            place += blocks
        index.commit(slots, np.ones(len(lengths), dtype=np.float32))

    return act


def _after(parent: int, steps: int, length: int, policy: int = 0) -> Act:
    """`Table.add` of steps from 5000 on, after the first steps of a trajectory in the table."""

    def act(table: gear.Table, index: Index) -> None:
        values = np.arange(length) + 5000
        given = listed(table.schema, [{"x": values}])
        prefixes = Beginning(table._engine, parent, steps, None).located(given)
        lengths = np.array([steps + length])
        slots, ids = index.begin(lengths, evict=policy, prefixes=prefixes)
        table._engine._write(ids, prefixes.rows)
        index.commit(slots, np.ones(1, dtype=np.float32))

    return act


def _abort(table: gear.Table, index: Index) -> None:
    slots, _ = index.begin(np.array([5, 2]), evict=False)
    index.abort(np.array(slots))


def _count(table: gear.Table, index: Index) -> None:
    slots = np.array([1, 0, 1, 3, 1, 0])
    assert index.reader.count_samples(slots, index.arrays.generation[slots]).tolist() == [1, 1, 2, 1, 0, 2]


def _counted(table: gear.Table) -> None:
    index = table._engine.index
    assert (index.arrays.sampled[index.arrays.state == READY] < 2).all(), (
        "drawn often enough, and still there"
    )


def _expire(table: gear.Table, index: Index) -> None:
    index.admission.max_age = 10**9
    index.reader.snapshot()


def _set_priorities(table: gear.Table, index: Index) -> None:
    priorities = np.array([0.5, 7, 9, 0.25, 1], dtype=np.float32)
    index.reader.set_priorities(np.array([0, 4, 2, 2, 77]), np.array([-1, 1, -1, 1, -1]), priorities)


def _revise(table: gear.Table, index: Index) -> None:
    slots = np.array([0, 4, 2, 2, 77])
    priorities = np.array([0.5, 7, 9, 0.25, 1], dtype=np.float32)
    updates = PriorityUpdates(slots, np.zeros(5, dtype=np.int64), np.array([-1, 1, -1, 1, -1]), priorities)
    assert index.reader.revise(updates, strict=False)[0] == 1


def _priorities(table: gear.Table) -> None:
    allowed = [(4, 0.5), (3,), (2, 9, 0.25), (1,), (5, 7)]
    assert all(table._engine.reader().arrays.priority[slot] in values for slot, values in enumerate(allowed))


def _final(table: gear.Table, index: Index) -> None:
    slots, ids = index.begin(np.array([8]))
    data = table._engine.region.column("x")
    data[np.array(ids)] = (np.arange(9) + 5000).view(np.uint8).reshape(3, 3, 8)
    index.recovery.locked(
        lambda: finish(index.arrays.view, int(slots[0]), 7, 1, 1.0, 1)
    )  # gives the third block back


def _lengthen(policy: int = 0, *, elsewhere: bool = False, moves: bool = False) -> Act:
    """Steps that are added to a trajectory of two steps that begins at 5000, up to `_STAGES`, and a final one.

    moves: there is a final one after each stage, which the next one moves.
    """

    def act(table: gear.Table, index: Index) -> None:
        arrays, ops = index.arrays, index.arrays.ops
        _adds(2, policy=policy)(table, index)
        slot, run = int(table.indices()[-1]), np.zeros(2, dtype=np.int64)
        if elsewhere:
            _abort(table, index)  # takes the next entries of the block tables

        def more(count: int, final: int) -> bool:
            generation = int(arrays.generation[slot])
            answer = ops.lengthen(arrays.where, slot, generation, READY, count, final, policy, run)
            if answer != DONE:
                return False
            length, start, _ = arrays.extent[slot].tolist()
            values = table._engine.region.column("x").view(np.int64)
            for step in range(length, length + count + final):
                values[arrays.block_ids[start + step // 3], step % 3, 0] = 5000 + step
            ops.publish_steps(arrays.where, slot, count, final)
            return True

        for before, after in itertools.pairwise(_STAGES):
            if not index.recovery.locked(lambda count=after - before: more(count, int(moves))):
                index.recovery.locked(lambda: index.block_tables.move(slot))
                assert index.recovery.locked(lambda count=after - before: more(count, int(moves)))
        if not moves:
            index.recovery.locked(lambda: more(0, 1))

    return act


def span(first: int, count: int) -> list[int]:
    return list(range(first, first + count))


_STAGES = (2, 3, 4, 8, 9)
_STREAM = (span(5000, 6), span(5003, 6), span(5006, 5))
_TWO = (span(5000, 7), span(6000, 7))
_STREAMS = (span(5000, 6), span(6000, 6), span(5003, 6), span(6003, 6))
_ALL = (100, 200, 300, 400, 500)
_OLDEST = {"reader": False, "options": {"on_full": "evict_oldest"}}
_LOWEST = {"reader": False, "options": {"on_full": "evict_lowest_priority"}}
_two_streams = _both("discard", 9, chunk_steps=6, overlap_steps=3)
SCENES: dict[str, Scene] = {
    "first of all": Scene(_adds(4), new=(span(5000, 4),)),
    "extend": Scene(_adds(4, 9), some, (span(5000, 4), span(5100, 9)), at_once=True),
    "extend evicts": Scene(
        _adds(8, 9, 1, policy=1), full, (span(5000, 8), span(5100, 9), [5200]), _ALL, True, reader=False
    ),
    "evict the oldest": Scene(_adds(14, policy=1), full, (span(5000, 14),), _ALL[:4], reader=False),
    "evict the lowest": Scene(
        _adds(14, policy=2), full, (span(5000, 14),), (400, 300, 200, 100), reader=False
    ),
    "block tables move": Scene(_adds(7), worn(2), (span(5000, 7),)),
    "block tables move back": Scene(_adds(7), worn(2, 1), (span(5000, 7),)),
    "retired ones are freed": Scene(
        _adds(3, 2), retired, (span(5000, 3), span(5100, 2)), at_once=True, reader=False
    ),
    "dead writers are taken back": Scene(_adds(15), dead_writers, (span(5000, 15),)),
    "begin after another": Scene(
        _after(1, 5, 4), some, ([*span(200, 5), *span(5000, 4)],), options={"prefixes": True}
    ),
    "begin after another, evict the oldest": Scene(
        _after(0, 4, 6, policy=1),
        full,
        ([*span(100, 4), *span(5000, 6)],),
        (200, 300, 400),
        reader=False,
        options={"prefixes": True},
    ),
    "begin after another, evict the lowest": Scene(
        _after(3, 8, 2, policy=2),
        full,
        ([*span(400, 8), *span(5000, 2)],),
        (100, 200, 300),
        reader=False,
        options={"prefixes": True},
    ),
    "begin after another and move": Scene(
        _after(1, 7, 1), worn(2), ([*span(200, 7), 5000],), options={"prefixes": True}
    ),
    "remove one": Scene(lambda table, index: index.remove(np.array([1])), full, may_lose=(200,)),
    "remove three": Scene(
        lambda table, index: index.remove(np.array([4, 0, 2])), full, may_lose=_ALL[::2], in_order=False
    ),
    "abort": Scene(_abort, some),
    "read": Scene(
        lambda table, index: index.reader.begin_read().end(), some, options={"on_full": "evict_oldest"}
    ),
    "grow in place": Scene(_write(10), some, (span(5000, 10),)),
    "finish with more than it needs": Scene(_write(8), new=(span(5000, 8),)),
    "finish and give back blocks": Scene(
        _write(9), new=(span(5000, 9),), options={"max_steps": 300, "max_blocks": 100}
    ),
    "finish with a final step": Scene(_final, some, new=(span(5000, 6),)),
    "lengthen": Scene(_lengthen(), stages=_STAGES),
    "lengthen elsewhere": Scene(_lengthen(elsewhere=True), some, stages=_STAGES),
    "lengthen and move": Scene(_lengthen(), worn(3), stages=_STAGES, reader=False),
    "lengthen and move the final step": Scene(_lengthen(moves=True), stages=_STAGES),
    "lengthen elsewhere and move the final step": Scene(
        _lengthen(elsewhere=True, moves=True), some, stages=_STAGES
    ),
    "lengthen evicts": Scene(_lengthen(1), full, stages=_STAGES, may_lose=_ALL, **_OLDEST),
    "grow, then discard": Scene(_write(10, "discard"), some),
    "grow elsewhere": Scene(_both("commit", 7), some, _TWO),
    "grow and move": Scene(_write(10), worn(2), (span(5000, 10),)),
    "grow elsewhere and move": Scene(_both("commit", 7), worn(5), _TWO, reader=False),
    "grow evicts": Scene(_write(13), full, (span(5000, 13),), _ALL[:4], **_OLDEST),
    "grow evicts the lowest": Scene(_write(13), full, (span(5000, 13),), (400, 300, 200), **_LOWEST),
    "roll": Scene(_stream(6, 3, 11), new=_STREAM),
    "roll beside others": Scene(_stream(6, 3, 9, "discard"), some, _STREAM[:2]),
    "roll and move": Scene(_stream(6, 3, 9, "discard"), worn(3), _STREAM[:2]),
    "roll evicts": Scene(_stream(6, 3, 11), full, _STREAM, _ALL, **_OLDEST),
    "chunks that are copied": Scene(
        _stream(6, 2, 9), new=(span(5000, 6), span(5004, 5)), options={"max_blocks": 13}
    ),
    "two streams": Scene(_two_streams, new=_STREAMS, options={"max_trajectories": 7, "max_steps": 60}),
    "two streams move": Scene(
        _two_streams, worn(7), _STREAMS, reader=False, options={"max_trajectories": 9, "max_steps": 60}
    ),
    "count samples": Scene(
        _count, full, (), (100, 200), in_order=False, options={"max_times_sampled": 2}, check=_counted
    ),
    "expire": Scene(_expire, aged, may_lose=_ALL[:3]),
    "set priorities": Scene(_set_priorities, bounded, check=_priorities),
    "revise priorities": Scene(_revise, bounded, check=_priorities),
}


def everything(table: gear.Table) -> list[list[int]]:
    return [values_of(table, slot) for slot in table.indices().tolist()]


def survive(scene: Scene, stores: int, *, torn: bool, again: int | None = None) -> bool:
    """Let the process die after `stores` stores, and its heir after `again`; False if one of them did not die."""
    sizes: dict[str, Any] = {"max_steps": 30, "max_trajectories": 6, "block_steps": 3, **scene.options}
    with gear.Table.create(SCALAR, **nested_table(sizes)) as table:
        scene.prepare(table)
        index = table._engine.index
        watch_moves(table)
        table._engine.region.lock.timeout = index.admission.timeout = 0
        before = everything(table)
        extent = table._engine.region.array("extent")
        seen = [(int(extent[slot, 1]), values_of(table, slot)) for slot in table.indices().tolist()]
        seen = seen if scene.reader else []
        ticket = index.reader.begin_read() if scene.reader else None
        follower = Follower(table)
        follower.look()
        follower.repaired = True  # what dies on the way is not noted here
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
        follower.look()
        same_snapshot(table)
        scene.check(table)
        after = everything(table)
        new = [values for values in after if values[-1] >= 5000]
        kept = [values for values in after if values[-1] < 5000]
        assert kept == [values for values in before if values in kept], "the order changed"
        assert after[len(kept) :] == new
        if scene.at_once:
            assert new in ([], list(scene.new)), "a part of an addition shows"
        assert new in [[span(5000, length)] for length in scene.stages] + [
            list(scene.new[:i]) for i in range(len(scene.new) + 1)
        ] or (
            scene.may_lose and new in [list(scene.new[i:j]) for i, j in itertools.combinations(range(4), 2)]
        )
        lost = {values[0] for values in before if values not in kept}
        allowed = scene.may_lose[: len(lost)] if scene.in_order else scene.may_lose
        assert lost <= set(allowed), "a trajectory is missing"
        assert (index.arrays.state != WRITING).all()
        if again is None:
            stats = table.stats()
            gone = stats.num_evicted + stats.num_expired + int(index.arrays.counters[NUM_REMOVED])
            assert stats.num_inserted - gone == len(after), "what leaves is counted once"
        with contextlib.suppress(GearError):  # for as long as the reader leaves room
            for number in range(1, 13):
                table.add(trajectory(70 + number, 1 + number * 5 % 11))
        for start, values in seen:
            assert values_at(table, start, len(values)) == values
        if ticket is not None:
            ticket.end()
        # No slot and no block has leaked: all that fits into an empty table does.
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0
        assert (table._engine.region.array("state") == FREE).all()
        for length in (sizes["max_steps"], 7):
            with table.writer() as writer:
                steps_of(writer, first=[7000], count=length)
            assert everything(table) == [span(7000, length)]
            table.remove(table.indices())
        table.check_valid()
        return True


@pytest.fixture(autouse=True)
def _in_python(monkeypatch: pytest.MonkeyPatch) -> None:
    # The tables of these tests are small: machine code saves nothing, and is loaded for each of them.
    operate = IndexArrays.operate
    monkeypatch.setattr(IndexArrays, "operate", lambda index, **_: operate(index, compiled=False))


@pytest.mark.parametrize("torn", [False, True], ids=["between stores", "inside stores"])
@pytest.mark.parametrize("scene", SCENES)
@points(17)
def test_death_at_every_point(scene: str, torn: bool, every: int) -> None:
    for stores in itertools.count(len(scene) % every, every * (2 if torn else 1)):
        if not survive(SCENES[scene], stores, torn=torn):
            break
    assert stores > (0 if scene == "read" else 5), "nothing was interrupted"


@pytest.mark.parametrize(
    "scene", ["two streams move", "grow evicts the lowest", "count samples", "expire", "remove three"]
)
@points(9)
def test_death_of_the_heir(scene: str, every: int) -> None:
    """The process that finds the index half changed may die too while it repairs it."""
    deaths = 0
    for stores in itertools.count(0, 3 * every):
        if not survive(SCENES[scene], stores, torn=False):
            break
        for again in itertools.count(stores % 7, 7 * every):
            if not survive(SCENES[scene], stores, torn=True, again=again):
                break
            deaths += 1
    assert deaths > (20 if every == 1 else 0)
