"""`ReplayDataset` in one process: windows, order, buffers, errors, tables that change meanwhile, `sample`."""

from __future__ import annotations

import concurrent.futures
import gc
import itertools
import math
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import (
    LENGTHS,
    SAMPLERS,
    SCHEMA,
    Failing,
    append_all,
    check_batch,
    contents,
    copies,
    drawn,
    episode,
    equal,
    make_table,
    nothing_left,
    prefetch_threads,
    same_batches,
    snapshot,
)
from options_common import nested
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.collection.padded import PaddedHost
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.errors import SchemaError, TableClosedError, TableEmptyError

WINDOW = gear.Window(length=6, offset=-3)
WINDOWS = dict.fromkeys(SCHEMA, WINDOW)
STEPS = sum(LENGTHS)
KINDS = pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    told = {"batch_size": 4, "windows": WINDOW, "device": "cpu", "seed": 3, **options}
    return gear.ReplayDataset(table, **nested(told))


@pytest.fixture(params=["thread", "stream"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How batches are prepared ahead: by a thread, or by the caller, as for a GPU (here with nothing asynchronous)."""
    monkeypatch.setattr(PaddedHost, "is_quick", lambda *_: False)
    if request.param == "stream":
        monkeypatch.setattr(Prefetcher, "_ahead_in_thread", Prefetcher._ahead_on_stream)
    return request.param


def items_of(unit: str) -> int:
    return len(LENGTHS) if unit == "trajectory" else STEPS


def keys_of(rows: Any, unit: str) -> list[Any]:
    """What a pass has once each: trajectories, or steps."""
    return [row[0] if unit == "trajectory" else row for row in rows]


# Order and coverage ----------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["trajectories", "steps once"])
def test_prefetch_and_copy_do_not_change_the_order(table: gear.Table, name: str, way: str) -> None:
    expected = copies(data := dataset(table, sampler=SAMPLERS[name], prefetch=0, keep=1))
    expected += copies(data)
    for prefetch, copy, keep in ((0, True, 2), (1, False, 1), (2, None, 1), (3, True, 5)):
        data = dataset(table, sampler=SAMPLERS[name], prefetch=prefetch, copy=copy, keep=keep)
        same_batches(expected, copies(data) + copies(DataLoader(data, batch_size=None)))


@KINDS
def test_seeds_and_epochs_are_different_draws(table: gear.Table, sampler: gear.Uniform) -> None:
    made = [dataset(table, sampler=sampler, seed=seed) for seed in (0, 1, -1, 2**63)]
    runs = [tuple(drawn(copies(data))) for data in made for _ in range(3)]
    assert len(set(runs)) == len(runs)


@pytest.mark.parametrize(
    ("unit", "size", "drop_last"),
    [("trajectory", 1, False), ("trajectory", 5, True), ("step", 13, False), ("step", 93, True)],
)
def test_an_epoch_without_replacement(table: gear.Table, unit: Any, size: int, drop_last: bool) -> None:
    data = dataset(table, sampler=gear.Uniform(False, unit), batch_size=size, drop_last=drop_last)
    full, rest = divmod(items_of(unit), size)
    for _ in range(2):
        batches = copies(data)
        sizes = [len(batch["index"]) for batch in batches]
        assert sizes == [size] * full + ([rest] if rest and not drop_last else [])
        assert len(data) == len(sizes)
        seen = keys_of(drawn(batches), unit)
        assert len(set(seen)) == len(seen) == sum(sizes)
        for batch in batches:
            check_batch(batch, contents(table), WINDOWS)


@pytest.mark.parametrize(("unit", "world"), [("trajectory", 5), ("step", 2)])
def test_ranks_interleave_the_batches_of_one(table: gear.Table, unit: Any, world: int) -> None:
    for replacement in (True, False):
        options = {"sampler": gear.Uniform(replacement, unit), "batch_size": 5}
        alone = copies(dataset(table, **options))
        ranks = [dataset(table, rank=rank, world_size=world, **options) for rank in range(world)]
        runs = [copies(rank) for rank in ranks]
        length = -(-len(alone) // world)
        assert [len(rank) for rank in ranks] == [len(run) for run in runs] == [length] * world
        dealt = [runs[i % world][i // world] for i in range(length * world)]
        same_batches(alone, dealt[: len(alone)])
        # Padding: full batches of trajectories that exist, so that every rank takes as many steps.
        for batch in dealt[len(alone) :]:
            check_batch(batch, contents(table), WINDOWS)


def test_batches_per_epoch_and_endless(table: gear.Table) -> None:
    data = dataset(table, batches_per_epoch=7)
    assert len(data) == len(copies(data)) == len(copies(data)) == 7
    endless = dataset(table, batches_per_epoch=math.inf)
    loader = DataLoader(endless, batch_size=None)
    for made in (endless, loader):
        with pytest.raises(TypeError, match=r"no length: batches_per_epoch is math\.inf"):
            len(made)  # type: ignore[arg-type]
    found = copies(endless, 40)
    same_batches(copies(dataset(table, batches_per_epoch=40)), found)
    assert len(set(map(tuple, (drawn([batch]) for batch in found)))) == 40
    assert len(copies(loader, 3)) == 3


@pytest.mark.parametrize(("unit", "batches"), [("trajectory", math.inf), ("step", 40)])
def test_a_longer_epoch_without_replacement_is_several_passes(
    table: gear.Table, unit: Any, batches: float
) -> None:
    data = dataset(table, sampler=gear.Uniform(False, unit), batch_size=5, batches_per_epoch=batches)
    a_pass = -(-items_of(unit) // 5)
    found = copies(data, 2 * a_pass)
    first, second = drawn(found[:a_pass]), drawn(found[a_pass:])
    for order in (first, second):
        assert len(order) == len(set(keys_of(order, unit))) == items_of(unit)
    assert [row[0] for row in first] != [row[0] for row in second]


def test_epochs_are_counted_when_an_iterator_is_used(table: gear.Table) -> None:
    data = dataset(table, keep=1, batches_per_epoch=20)
    epochs = [copies(data) for _ in range(3)]
    for epoch in (1, 0, 2):
        data.set_epoch(epoch)
        same_batches(epochs[epoch], copies(data))
    data.set_epoch(0)
    iter(data)  # only made
    same_batches(epochs[0][:1], copies(data, 1))  # broken off
    same_batches(epochs[1], copies(data))
    data.set_epoch(0)  # two iterators at once are two epochs
    found = [(snapshot(one), snapshot(other)) for one, other in zip(data, data, strict=True)]
    same_batches(epochs[0], [one for one, _ in found])
    same_batches(epochs[1], [other for _, other in found])
    for value in (-1, 1.5):
        with pytest.raises(SchemaError, match=f"epoch is {value}; expected"):
            data.set_epoch(value)  # type: ignore[arg-type]


def test_a_subset_of_trajectories(table: gear.Table) -> None:
    calls = []

    def even(sequences: Any) -> Any:
        assert sequences.dtype == np.int64
        calls.append(len(sequences))
        return sequences % 2 == 0

    members = {int(index) for index in table.indices()[::2]}
    for sampler in SAMPLERS.values():
        data = dataset(table, subset=even, sampler=sampler)
        items = sampler.num_items(table._engine.reader().snapshot().take(np.arange(len(LENGTHS)) % 2 == 0))
        assert len(data) == -(-items // 4)
        found = {row[0] for row in drawn(copies(data))}
        assert found <= members if sampler.replacement else found == members
        assert {row[0] for row in drawn([data.sample()])} <= members
    assert len(calls) == len(SAMPLERS)  # once a version of the table
    table.remove(table.indices()[1])
    table.add(episode(12, 1))
    data = dataset(table, subset=even, batch_size=100)
    assert int(table.indices()[-1]) in data.sample()["index"].tolist()


# Buffers ---------------------------------------------------------------------------------------------


def pointers(batch: Mapping[str, Any]) -> set[int]:
    """Addresses of all tensors of a batch."""
    parts = (pointers(part) if isinstance(part, dict) else {part.data_ptr()} for part in batch.values())
    return set().union(*parts)


def settle(data: gear.ReplayDataset) -> None:
    """Give the prefetch thread time to overwrite whatever it may."""
    if data.prefetch:
        time.sleep(0.003)


def watched(batches: Iterable[Any], data: gear.ReplayDataset) -> tuple[Counter[int], Any]:
    """Each batch stays as it was until `keep` more come: how often each buffer was used, and the last batch, twice."""
    held: list[tuple[Any, Any]] = []
    seen: Counter[int] = Counter()
    for batch in batches:
        held = [*held, (batch, snapshot(batch))][-data.keep :]
        seen.update({batch["reward"].data_ptr()})
        settle(data)
        assert all(equal(one, copy) for one, copy in held)
        assert len({one["reward"].data_ptr() for one, _ in held}) == len(held)
    return seen, held[-1]


@pytest.mark.parametrize(("keep", "prefetch"), [(1, 0), (2, 1), (3, 2)])
def test_a_batch_stays_intact_until_keep_more_are_requested(
    table: gear.Table, prefetch: int, keep: int, way: str
) -> None:
    windows = {"reward": WINDOW, "action": gear.Window(2)}
    data = dataset(table, copy=False, prefetch=prefetch, keep=keep, windows=windows, batches_per_epoch=9)
    # Epochs end, and one is broken off.
    seen, _ = watched(itertools.chain(data, data, itertools.islice(data, 4), data), data)
    # They are recycled: 31 batches came out of a few buffers. An epoch that was broken off may lose some.
    assert len(seen) <= 2 * (prefetch + keep + 1)
    assert max(seen.values()) > 3


def test_all_epochs_use_the_same_buffers_broken_off_or_not(table: gear.Table, way: str) -> None:
    data = dataset(table, prefetch=2, keep=2, batches_per_epoch=10)
    used: set[int] = set()
    for _ in range(3):
        used |= {batch["reward"].data_ptr() for batch in data}
    for _ in range(30):
        for batch in itertools.islice(data, 2):
            used.add(batch["reward"].data_ptr())
            settle(data)
    assert len(used) <= 2 + 2 + 1


def test_copies_never_change(table: gear.Table, way: str) -> None:
    data = dataset(table, prefetch=2, copy=True, batches_per_epoch=12)
    held = [(batch, snapshot(batch)) for _ in range(2) for batch in data]
    held += [(batch, snapshot(batch)) for batch in (data.sample() for _ in range(10))]
    assert all(equal(batch, copy) for batch, copy in held)
    addresses = [pointers(batch) for batch, _ in held]
    assert len(set().union(*addresses)) == sum(map(len, addresses))


@pytest.mark.parametrize("keep", [1, 4])
def test_samples_stay_intact_too(table: gear.Table, keep: int) -> None:
    data = dataset(table, copy=False, keep=keep)
    seen, last = watched((data.sample() for _ in range(20)), data)
    assert len(seen) <= keep + 1
    # Another size brings its own buffers and leaves the last batches alone; sizes do not pile up.
    assert len(data.sample(7)["index"]) == 7
    assert equal(*last)
    list(data)
    for size in range(1, 50):
        data.sample(size)
    assert sorted(data._buffers.pools) == [(4, False), (49, False)]


def test_sampling_beside_an_iterator_disturbs_neither(table: gear.Table) -> None:
    data = dataset(table, copy=False, keep=1, prefetch=2, batches_per_epoch=20)
    expected, samples = copies(dataset(table, batches_per_epoch=20)), dataset(table)
    for batch, copy in zip(data, expected, strict=True):
        sampled = data.sample()
        settle(data)
        assert equal(batch, copy)
        assert equal(sampled, samples.sample())


# Breaking off, errors --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("how", "prefetch"), [("close", 1), ("forget", 3), ("break", 0), ("raise", 1), ("loader", 3)]
)
def test_abandoning_an_iterator_leaves_nothing_behind(
    table: gear.Table, how: str, prefetch: int, way: str
) -> None:
    data = dataset(table, prefetch=prefetch, batches_per_epoch=1000)
    if how == "break":
        for batch in data:
            assert len(batch["index"]) == 4
            break
    elif how == "raise":
        with pytest.raises(ZeroDivisionError):
            [1 / 0 for _ in data]
    else:
        iterator: Any = iter(DataLoader(data, batch_size=None) if how == "loader" else data)
        next(iterator)
        if how == "close":
            assert len(prefetch_threads()) == (way == "thread")
            iterator.close()
        del iterator
    gc.collect()
    nothing_left(table)
    assert equal(snapshot(data.sample()), dataset(table).sample())


@pytest.mark.parametrize(
    ("prefetch", "error"), [(0, KeyError("x")), (1, KeyError("x")), (3, StopIteration())]
)
def test_an_error_while_preparing_reaches_the_consumer(
    table: gear.Table, prefetch: int, error: Exception, way: str
) -> None:
    data = dataset(table, prefetch=prefetch, sampler=Failing(3, error), batches_per_epoch=10)
    found: list[Any] = []
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
        append_all(data, found)
    assert error in (caught.value, caught.value.__cause__)
    same_batches(copies(dataset(table, batches_per_epoch=3)), found)
    nothing_left(table)
    data.sampler = gear.Uniform()
    data.set_epoch(0)
    assert len(copies(data)) == 10


@pytest.mark.parametrize("way", ["next", "prefetch", "while it is read"])
def test_the_table_is_closed_meanwhile(way: str) -> None:
    table, sampler = make_table(), Slow() if way == "while it is read" else gear.Uniform()
    readers = table._engine.region.array("readers")
    data = dataset(table, prefetch=0 if way == "next" else 2, sampler=sampler, batches_per_epoch=1000)
    iterator = iter(data)
    next(iterator)
    if isinstance(sampler, Slow):  # another process would wait for that read until this process ends
        assert sampler.reading.wait(60)
        table.close()
        sampler.go_on.set()
    else:
        table.close()
    with pytest.raises(TableClosedError, match=r"The table \(private\) is closed"):
        append_all(iterator, [], 5)
    assert list(iterator) == []
    assert prefetch_threads() == []
    assert (readers[:, 2] == 0).all()
    for use in (lambda: next(iter(data)), data.sample):
        with pytest.raises(TableClosedError):
            use()


class Slow(gear.Uniform):
    """Waits within a draw, while the table is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def items(self, size: int, draw: Any) -> Any:
        if draw.step == 1:
            self.reading.set()
            assert self.go_on.wait(60)
        return super().items(size, draw)


@pytest.mark.parametrize(
    ("name", "prefetch", "batches"),
    [("trajectories", 2, None), ("steps", 0, 3), ("trajectories once", 0, math.inf), ("steps once", 2, None)],
)
def test_a_table_that_is_or_becomes_empty_and_an_empty_subset(name: str, prefetch: int, batches: Any) -> None:
    options = {"sampler": SAMPLERS[name], "prefetch": prefetch, "batches_per_epoch": batches}
    with make_table([]) as table:
        data = dataset(table, **options)
        uses = [lambda: next(iter(data)), data.sample, *([lambda: len(data)] if batches is None else [])]
        for use in uses:
            with pytest.raises(TableEmptyError, match=r"The table is empty: .* Add trajectories first\."):
                use()
        nothing_left(table)
        table.extend([episode(i, 3) for i in range(8)])
        assert len(data.sample()["index"]) == len(next(iter(data))["index"]) == 4
        nothing = dataset(table, subset=lambda s: s > 99, **options)
        for use in (lambda: next(iter(nothing)), nothing.sample):
            with pytest.raises(TableEmptyError, match="None of the table's 8 trajectories belongs to this"):
                use()
        iterator = iter(dataset(table, **{**options, "batches_per_epoch": 100}))
        next(iterator)
        table.remove(table.indices())
        with pytest.raises(TableEmptyError, match="The table is empty"):
            append_all(iterator, [], 10)
        nothing_left(table)


# Tables that change meanwhile ------------------------------------------------------------------------


@pytest.mark.parametrize(("anchor", "prefetch"), [("uniform", 0), ("first", 2), ("last", 0)])
def test_evicted_items_of_an_epoch_are_replaced_by_live_ones(prefetch: int, anchor: Any) -> None:
    with make_table([3] * 32, max_steps=96, max_trajectories=32, on_full="evict_oldest") as table:
        data = dataset(table, sampler=gear.Uniform(False), anchor=anchor, prefetch=prefetch, copy=True)
        iterator = iter(data)
        next(iterator)
        settle(data)
        table.extend([episode(100 + i, 5) for i in range(12)])  # evicts 20 trajectories of 3 steps
        assert len(table) == 24
        live, batches = contents(table), list(iterator)
        assert len(batches) == 7
        _, generation, _ = table._engine.reader().slot_states()
        fresh = []
        for batch in batches[prefetch + 1 :]:
            check_batch(batch, live, WINDOWS)
            assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
            for index, step in drawn([batch]):
                length = len(live[index]["reward"])
                fresh += [step] if length == 5 else []
                assert anchor == "uniform" or step == {"first": 0, "last": length - 1}[anchor]
        assert fresh  # some of the new ones stand in


@pytest.mark.parametrize(("name", "prefetch"), [("trajectories", 2), ("steps once", 0)])
def test_an_endless_epoch_sees_additions(table: gear.Table, prefetch: int, name: str) -> None:
    table.remove(table.indices()[:4])  # room
    data = dataset(table, sampler=SAMPLERS[name], prefetch=prefetch, batches_per_epoch=math.inf)
    iterator = iter(data)
    next(iterator)
    index = table.add(episode(99, 9))
    found = (batch for batch in itertools.islice(iterator, 500) if index in batch["index"].tolist())
    check_batch(next(found), contents(table), WINDOWS)


def test_an_epoch_without_replacement_is_of_what_was_there_when_it_began(table: gear.Table) -> None:
    table.remove(table.indices()[:4])
    before = set(table.indices().tolist())
    data = dataset(table, sampler=gear.Uniform(False), batch_size=3)
    iterator = iter(data)
    found = [snapshot(next(iterator))]
    new = table.extend([episode(50, 3), episode(51, 3)])
    found += copies(iterator)
    assert sorted(index for index, _ in drawn(found)) == sorted(before)
    assert sorted(index for index, _ in drawn(data)) == sorted(before | set(new.tolist()))


# Sample ----------------------------------------------------------------------------------------------


@KINDS
def test_sample_draws_by_its_own_count(table: gear.Table, sampler: gear.Uniform) -> None:
    data, other = dataset(table, sampler=sampler), dataset(table, sampler=sampler)
    first = [snapshot(data.sample()) for _ in range(3)]
    copies(data)
    data.set_epoch(7)
    first += [snapshot(data.sample()) for _ in range(3)]
    same_batches(first, [snapshot(other.sample()) for _ in range(6)])
    seen = {tuple(drawn([batch])) for batch in first}
    assert len(seen) == 6
    for batch in first:
        check_batch(batch, contents(table), WINDOWS)
    # Neither are they the batches of an epoch, nor those of another rank.
    assert not seen & {tuple(drawn([batch])) for batch in copies(other)}
    ranks = [dataset(table, sampler=sampler, rank=rank, world_size=3) for rank in range(3)]
    assert len({tuple(drawn(snapshot(rank.sample()) for _ in range(4))) for rank in ranks}) == 3


def test_sample_of_another_size(table: gear.Table) -> None:
    data = dataset(table)
    for size in (1, 4, 300, 2, None):
        batch = data.sample(size)
        assert len(batch["index"]) == (size or 4)
        check_batch(batch, contents(table), WINDOWS)
    for size in (0, -1, 2.0, True, "4"):
        with pytest.raises(SchemaError, match=f"batch_size is {size!r}; expected an integer of at least 1"):
            data.sample(size)  # type: ignore[arg-type]


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_sample_without_replacement_passes_over_all_items(table: gear.Table, unit: Any) -> None:
    data = dataset(table, sampler=gear.Uniform(False, unit), batch_size=5)
    orders = []
    for _ in range(3):
        rows: list[tuple[int, int]] = []
        while len(rows) < items_of(unit):
            rows += drawn([data.sample(4 if len(rows) == 5 else None)])  # sizes may change in between
        orders.append(keys_of(rows, unit))
        assert len(rows) == len(set(orders[-1])) == items_of(unit)  # a pass may end with a smaller batch
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_sample_while_the_table_shrinks(
    table: gear.Table, unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, sampler=gear.Uniform(False, unit), batch_size=8)
    look = table._engine.reader().snapshot

    def shrinks_afterwards() -> Any:
        before = look()
        table.remove(before.slots[:2])
        return before

    for _ in range(4):
        with monkeypatch.context() as patch:
            patch.setattr(table._engine.reader(), "snapshot", shrinks_afterwards)
            batch = data.sample()
        check_batch(batch, contents(table), WINDOWS)


# Errors ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(
            ({"batch_size": size}, f"batch_size is {size}; expected an integer of at least 1")
            for size in (0, True, 2.5)
        ),
        ({"prefetch": -1}, "prefetch is -1; expected an integer of at least 0"),
        ({"keep": 0}, "keep is 0; expected an integer of at least 1"),
        ({"programs": 0}, "programs is 0; expected an integer of at least 1"),
        ({"stream_priority": 1}, "stream_priority is 1; expected 0, or a negative number to go first"),
        ({"stream_priority": "high"}, "stream_priority is 'high'; expected an integer"),
        ({"batches_per_epoch": 0}, r"batches_per_epoch is 0; expected an integer of at least 1 or math\.inf"),
        ({"batches_per_epoch": 3.5}, r"batches_per_epoch is 3\.5; expected an integer of at least 1"),
        ({"batches_per_epoch": math.nan}, r"batches_per_epoch is nan; expected an integer"),
        ({"seed": 1.5}, r"seed is 1\.5; expected an integer"),
        ({"anchor": "middle"}, "anchor is 'middle'; expected 'uniform', 'first' or 'last'"),
        (
            {"anchor": "last", "sampler": gear.Uniform(unit="step")},
            r"anchor='last' goes with a sampler of trajectories; Uniform\(replacement=True, unit='step'\) chooses",
        ),
        ({"device": "mps"}, "device is 'mps'; expected 'auto', 'cpu' or a CUDA device"),
        ({"device": 1.5}, r"device is 1\.5; expected 'auto', 'cpu' or a CUDA device"),
        ({"rank": 0}, "rank 0 of world_size None; expected both, with 0 <= rank < world_size"),
        ({"world_size": 2}, "rank None of world_size 2; expected both"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2; expected both, with 0 <= rank < world_size"),
        ({"rank": -1, "world_size": 2}, "rank -1 of world_size 2; expected both"),
        ({"windows": 20}, "windows is 20; expected a Window or a mapping of column names to Windows"),
        ({"windows": {}}, "No columns were asked for; expected at least one in windows or columns"),
        ({"columns": []}, "No columns were asked for; expected at least one in windows or columns"),
        ({"windows": {"speed": WINDOW}}, r"Columns \['speed'\] were asked for; .* Unknown: \['speed'\]"),
        ({"columns": ["reward", "speed"]}, r"Columns \['reward', 'speed'\] were .* Unknown: \['speed'\]"),
        ({"columns": "reward"}, r"columns is 'reward'; expected a sequence of .* for example \['reward'\]"),
        ({"windows": {"reward": 4}}, r"The window of column 'reward' is 4; expected gear_loader\.Window"),
        (
            {"windows": {"reward": WINDOW}, "columns": ["action"]},
            r"\['action'\] and .* \['reward'\] differ; give one",
        ),
        ({"subset": "even"}, "subset is 'even'; expected a function of the sequence numbers"),
        ({"scope": "all"}, "scope is 'all'; expected 'global' or 'local'"),
        ({"sampler": "prioritized"}, "sampler is 'prioritized'; expected an object such as"),
        ({"sampler": gear.Prioritized}, r"sampler is <class .*>; expected an object .*Prioritized\(\)"),
        ({"device": "cuda:0"}, r"device is 'cuda:0', but torch sees no CUDA device; use device='cpu' or"),
    ],
)
def test_wrong_options_are_refused(
    table: gear.Table, options: Any, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SchemaError, match=message):
        dataset(table, **options)
    assert dataset(table, device="auto").device == torch.device("cpu")


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Uniform(False), gear.Prioritized(unit="step")])
def test_threads_that_sample_take_turns(table: gear.Table, sampler: gear.samplers.Sampler) -> None:
    """Together they get the batches of one thread, each once."""

    def rows(data: gear.ReplayDataset, count: int) -> list[Any]:
        names = ("index", "anchor", "observation", "reward")
        batches = (data.sample() for _ in range(count))  # whose memory is used again
        return [[batch[name].flatten().tolist() for name in names] for batch in batches]

    expected = rows(dataset(table, sampler=sampler, batch_size=3), 400)
    data = dataset(table, sampler=sampler, batch_size=3)
    interval = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        with concurrent.futures.ThreadPoolExecutor(4) as threads:
            found = list(threads.map(rows, [data] * 4, [100] * 4))
    finally:
        sys.setswitchinterval(interval)
    assert sorted(itertools.chain.from_iterable(found)) == sorted(expected)


@pytest.mark.parametrize("given", ["replay", None, SCHEMA])
def test_what_is_no_table_is_refused(given: Any) -> None:
    remedy = r" Attach to it by its name: gear_loader\.Table\.attach\('replay'\)\.$"
    message = r"table is .*; expected a gear_loader\.Table or gear_loader\.distributed\.Shards\."
    with pytest.raises(SchemaError, match=message + (remedy if given == "replay" else "$")):
        gear.ReplayDataset(given, batch_size=1, windows=WINDOW)


def test_what_only_an_epoch_shows_to_be_wrong(table: gear.Table) -> None:
    data = dataset(table, sampler=gear.Uniform(False), batch_size=13, drop_last=True)
    message = "drop_last leaves no batch: 12 items are fewer than batch_size 13"
    for use in (lambda: len(data), lambda: next(iter(data))):
        with pytest.raises(SchemaError, match=message):
            use()
    data = dataset(table, subset=lambda sequences: np.ones(3, dtype=bool))
    message = r"subset returned shape \[3\] for 12 sequence numbers; expected \[12\]"
    with pytest.raises(SchemaError, match=message):
        next(iter(data))
