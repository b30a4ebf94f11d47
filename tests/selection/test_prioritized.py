"""`ReplayDataset` with `Prioritized`, `TopK`, `Fifo` and `Lifo`: what is drawn, weights, updates, order, errors."""

from __future__ import annotations

import itertools
import math
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import (
    LENGTHS,
    append_all,
    copies,
    episode,
    iterating,
    make_table,
    named_table,
    nothing_left,
    same_batches,
)
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.collection.collector import Collector
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.errors import PriorityError, SchemaError

TINY = float(np.finfo(np.float32).tiny)
UNITS = ("trajectory", "step")
NUMBERS = range(len(LENGTHS))
Item = tuple[int, int]  # number of the trajectory, and the step; 0 where an item is a trajectory

pytestmark = [
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]


@pytest.fixture
def table() -> Iterator[gear.Table]:
    """Twelve trajectories in as many slots, 93 steps, blocks of four; two slots more."""
    with make_table(max_trajectories=14, max_steps=140) as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, sampler: gear.Sampler, **options: Any) -> gear.ReplayDataset:
    settings = {"batch_size": 8, "windows": gear.Window(1), "device": "cpu", "seed": 3, "prefetch": 0}
    return gear.ReplayDataset(table, sampler=sampler, **{**settings, **options})


def items_of(batch: Mapping[str, Any], unit: str) -> list[Item]:
    """The items of a batch's rows; fails unless every row is in itself what `episode` made."""
    number, step = batch["observation"][:, 0, 0].long(), batch["anchor"]
    assert torch.equal(batch["observation"][:, 0, 1].long(), step)
    assert torch.equal(batch["observation"][:, 0, 2], (number + step / 4096).float())
    assert torch.equal(batch["reward"][:, 0], number * 4096.0 + step)
    assert batch["mask"].all()
    steps = step.tolist() if unit == "step" else [0] * len(step)
    return list(zip(number.tolist(), steps, strict=True))


def numbers_of(batch: Mapping[str, Any]) -> list[int]:
    return [number for number, _ in items_of(batch, "trajectory")]


def items_in(unit: str, lengths: Sequence[int] = LENGTHS) -> list[Item]:
    """All items of a table of trajectories of these lengths."""
    if unit == "trajectory":
        return [(number, 0) for number in range(len(lengths))]
    return [(number, step) for number, length in enumerate(lengths) for step in range(length)]


def leaves_of(data: gear.ReplayDataset) -> dict[Item, float]:
    """What the items weigh, by (number, step) of trajectories whose number is their sequence number."""
    state = data.state_dict()["priorities"]
    sequences, lengths, leaves = (state[name].tolist() for name in ("sequences", "lengths", "leaves"))
    if data.sampler.unit == "trajectory":
        return dict(zip([(sequence, 0) for sequence in sequences], leaves, strict=True))
    steps = [(s, step) for s, length in zip(sequences, lengths, strict=True) for step in range(length)]
    return dict(zip(steps, leaves, strict=True))


def everything(data: gear.ReplayDataset) -> tuple[Any, ...]:
    """All that an update could change."""
    return leaves_of(data), data.state_dict()["priorities"]["maximum"], data.num_stale


def assign(data: gear.ReplayDataset, priorities: Mapping[Item, float], **options: Any) -> None:
    """Set priorities of items of a table whose trajectories lie in the slots of their numbers."""
    data.state_dict()  # a look at the table
    index = [number for number, _ in priorities]
    anchor = np.array([step for _, step in priorities]) if data.sampler.unit == "step" else None
    data.update_priority(index, list(priorities.values()), anchor=anchor, **options)


def tenth(number: int) -> float:
    return number / 10


def number_drawn(batch: Mapping[str, Any]) -> float:
    """What `tenth` was called with, from the weight of the items of priority 2 among others of priority 1."""
    (least,) = set(batch["priority_weight"].tolist()) - {1.0} or {1.0}
    return round(-10 * math.log2(least), 4)


def scheduled(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    """Draws every trajectory in each batch; those in even slots have priority 2, the others 1."""
    sampler = gear.Prioritized(1, tenth, replacement=False)
    data = dataset(table, sampler, batch_size=12, **{"batches_per_epoch": 4, **options})
    assign(data, {(number, 0): 2.0 - number % 2 for number in NUMBERS})
    return data


def test_a_schedule_goes_by_the_number_of_batches_drawn(table: gear.Table) -> None:
    data = scheduled(table, prefetch=3)
    numbers = [number_drawn(batch) for _ in range(3) for batch in data]
    assert numbers == list(range(12))
    assert len(data) == 4
    # An iteration that is broken off counts for what it has delivered.
    assert [number_drawn(batch) for batch in copies(data, 3)] == [12, 13, 14]
    assert [number_drawn(batch) for batch in data] == [15, 16, 17, 18]
    data.set_epoch(0)
    assert [number_drawn(batch) for batch in data] == [19, 20, 21, 22]


@pytest.mark.parametrize(("alpha", "priority"), [(0.5, 1e-40), (1, 1e-46), (3, 1e-300), (3, TINY)])
def test_a_positive_priority_stays_positive(alpha: float, priority: float) -> None:
    with make_table([]) as table:
        table.extend([episode(0, 2), episode(1, 2)], priority=[priority, 0.0])
        stored = table._engine.region.array("priority")[:2].tolist()
        assert stored[0] > 0
        assert stored[0] == TINY or 0 < np.float32(priority) != TINY
        assert stored[1] == 0
        data = dataset(table, gear.Prioritized(alpha))
        assert set(numbers_of(data.sample())) == {0}
        assign(data, {(0, 0): 0.0, (1, 0): priority})
        assert set(numbers_of(data.sample())) == {1}
        assert leaves_of(data)[1, 0] >= TINY


def test_first_priorities_are_weighed_and_cut_to_the_largest() -> None:
    with make_table([]) as table:
        table.extend([episode(i, length) for i, length in enumerate((5, 1, 9))], priority=[0.5, 0.0, 4.0])
        data = dataset(table, gear.Prioritized(0.5, eps=0.25, unit="step"))
        expected = {item: (0.5, 0.0, 4.0)[item[0]] for item in items_in("step", (5, 1, 9))}
        assert leaves_of(data) == pytest.approx({item: (p + 0.25) ** 0.5 for item, p in expected.items()})
        table.add(episode(3, 2), priority=1e30)
        data = dataset(table, gear.Prioritized(2))
        assert set(numbers_of(data.sample())) == {3}
        assert leaves_of(data)[3, 0] == np.finfo(np.float32).max


KINDS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "float64": lambda values: np.array(values, dtype=np.float64),
    "float16": lambda values: np.array(values, dtype=np.float16),
    "tensor": torch.tensor,
    "bfloat16": lambda values: torch.tensor(values).bfloat16(),
    "half": lambda values: torch.tensor(values).half(),
    "integers": lambda values: torch.tensor(values).long(),
    "with gradient": lambda values: torch.tensor(values, requires_grad=True) * 1,
    "column, as td_error": lambda values: torch.tensor(values)[:, None],
    "float8": lambda values: torch.tensor(values).to(torch.float8_e5m2),
    "float32": lambda values: np.array(values, dtype=np.float32),
    "every other": lambda values: torch.tensor([values, values]).T.reshape(-1)[::2],
    "negated view": lambda values: torch._neg_view(torch.tensor(values).neg()),
    "not aligned": lambda values: _shifted(np.array(values, dtype=np.float32)),
    "not contiguous": lambda values: torch.tensor([[v, -1.0] for v in values])[:, 0],
}


def test_kinds_of_priorities_and_indices(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1, unit="step"))
    integers: list[Any] = [
        list,
        np.array,
        torch.tensor,
        lambda i: torch.tensor(i).int(),
        lambda i: np.array(i, "u1"),
        lambda i: torch.tensor([i, i]).T.reshape(-1)[::2],
        lambda i: torch._neg_view(torch.tensor(i).neg()),
        lambda i: _shifted(np.array(i)),
    ]
    pairs = [(kind, torch.tensor) for kind in KINDS.values()] + [(torch.tensor, kind) for kind in integers]
    for kind, as_kind in pairs:
        batch = data.sample(3)
        before = leaves_of(data)
        index, generation, anchor = (
            as_kind(batch[key].tolist()) for key in ("index", "generation", "anchor")
        )
        data.update_priority(index, kind([2.0, -0.0, 7.0]), generation=generation, anchor=anchor)
        assert leaves_of(data) == {
            **before,
            **dict(zip(items_of(batch, "step"), [2.0, 0.0, 7.0], strict=True)),
        }
    assert data.num_stale == 0
    data = dataset(table, gear.TopK())
    data.sample()
    data.update_priority(np.int64(3), 7.5)  # type: ignore[arg-type]
    data.update_priority([], [])
    data.update_priority(torch.empty(0, dtype=torch.int64), torch.empty(0))
    assert leaves_of(data) == {(number, 0): 7.5 if number == 3 else 1.0 for number in NUMBERS}


@pytest.mark.parametrize("unit", UNITS)
def test_a_whole_batch_names_its_rows(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    batch = data.sample()
    table.remove(int(batch["index"][0]))
    table.add(episode(12, 20))
    data.sample()
    expected, values = leaves_of(data), np.arange(1.0, 9.0)
    data.update_priority(batch, values)
    gone = batch["index"] == batch["index"][0]
    rows = zip(items_of(batch, unit), values.tolist(), gone.tolist(), strict=True)
    expected.update({item: value for item, value, stale in rows if not stale})
    assert leaves_of(data) == expected
    assert data.num_stale == int(gone.sum())
    before = everything(data)
    message = r"together with generation or anchor; expected a whole batch alone"
    for options in ({"generation": batch["generation"]}, {"anchor": batch["anchor"]}):
        with pytest.raises(SchemaError, match=message):
            data.update_priority(batch, values, **options)
    part = {key: value for key, value in batch.items() if key != "generation"}
    with pytest.raises(SchemaError, match=r"in which \['generation'\] is missing; expected a whole batch"):
        data.update_priority(part, values)
    assert everything(data) == before


def test_what_is_no_priority_is_refused(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(unit="step"))
    batch = data.sample(5)
    before = everything(data)
    bads = (math.nan, math.inf, -math.inf, -1.0, -1e-30, 1e39, -1e39, -1e-300)
    for bad, place in zip(bads, (0, 1, 2, 3, 4, 0, 4, 2), strict=True):
        for kind in (np.array, torch.tensor, list):
            if kind is torch.tensor and bad == -1e-300:  # is -0 as float32
                continue
            values = [3.0] * 5
            values[place:] = [bad] * (5 - place)
            shown = float(torch.tensor(bad)) if kind is torch.tensor else bad
            with pytest.raises(PriorityError) as caught:
                data.update_priority(batch["index"], kind(values), anchor=batch["anchor"])
            assert str(caught.value) == (
                f"priority[{place}] is {shown}; expected a finite number (as float32) that is not negative. "
                "Nothing was changed."
            )
            assert everything(data) == before


def test_a_priority_that_alpha_raises_beyond_float32_is_refused(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(2))
    data.sample()
    before = everything(data)
    message = (
        r"^priority\[1\] is 1\.99.*e\+19, which Prioritized\(alpha=2\.0, .*\) raises beyond float32's range;"
    )
    with pytest.raises(PriorityError, match=message):
        data.update_priority([0, 1, 2], [1e19, 2e19, 1e30])
    assert everything(data) == before
    data.update_priority([0], [1.8e19])
    assert leaves_of(data)[0, 0] == pytest.approx(3.24e38)
    # A smaller alpha takes all that float32 holds.
    data = dataset(table, gear.Prioritized())
    data.sample()
    data.update_priority([0], [float(np.finfo(np.float32).max)])
    assert set(numbers_of(data.sample())) == {0}


OUT_OF_RANGE: list[tuple[float, float, list[float], bool]] = [
    (4, 0, [1e-12, 1e-11, 1e-10], True),
    (2, 0, [1e-20, 2e-20, 3e-21], False),
    (16, 1e-6, [0.004, 0.003, 0.002], True),
    (2, 0, [1e-19, 1e-20, 1e-21], True),  # the largest fits, but the others are cut to a good part of it
    (2, 0, [1e30, 1e25, 1.0], True),
]


@pytest.mark.parametrize(("alpha", "eps", "priorities", "replacement"), OUT_OF_RANGE)
def test_priorities_that_alpha_raises_out_of_range_are_not_drawn_uniformly(
    alpha: float, eps: float, priorities: list[float], replacement: bool
) -> None:
    with make_table([]) as table:
        table.extend([episode(i, 2) for i in range(3)], priority=priorities)
        sampler = gear.Prioritized(alpha, eps=eps, replacement=replacement)
        data = dataset(table, sampler, batch_size=2)
        message = (
            r"^Prioritized\(alpha=.* raises the priorities out of float32's range .* Use a smaller alpha"
        )
        for _ in range(2):
            with pytest.raises(PriorityError, match=message):
                data.sample()
        if priorities[0] > 1:
            assign(data, {(0, 0): 4.0, (1, 0): 2.0})
            assert leaves_of(data) == {(0, 0): 16.0, (1, 0): 4.0, (2, 0): 1.0}
        else:
            assign(data, {(2, 0): 1.0})
        drawn = set(numbers_of(data.sample()))
        assert priorities[0] > 1 or not replacement or drawn == {2}


# fmt: off
WRONG: list[tuple[dict[str, Any], str]] = [
    ({"priority": [1.0]}, r"priority is float64 \[1\]; expected numbers \[2\], as many as index"),
    ({"priority": [1.0] * 3}, r"priority is float64 \[3\]; expected numbers \[2\]"),
    ({"priority": torch.ones(1, 2)}, r"priority is float32 \[1, 2\]; expected numb"),
    ({"priority": torch.ones(2, 1, 1)}, r"priority is float32 \[2, 1, 1\]; expected numb"),
    ({"priority": np.ma.masked_array([1.0, 2.0], [0, 1])}, r"priority is a masked array, float64 \[2\]: "),
    ({"index": torch.zeros(2, 1, dtype=torch.int64)}, r"index is int64 \[2, 1\]; expected integers \[n\]\."),
    ({"priority": None}, r"priority is None; expected numbers \[2\]"),
    ({"priority": ["1", "2"]}, r"priority is \['1', '2'\]; expected numbers \[2\]"),
    ({"priority": [1j, 2]}, r"priority is \[1j, 2\]; expected numbers \[2\]"),
    ({"priority": [[1.0], [1.0, 2.0]]}, r"priority is .*; expected numbers \[2\]"),
    ({"index": [0.0, 1.0]}, r"index is \[0\.0, 1\.0\]; expected integers \[n\]\."),
    ({"index": [[0, 1]]}, r"index is int64 \[1, 2\]; expected integers \[n\]\."),
    ({"index": None}, r"index is None; expected integers \[n\]"),
    ({"generation": [1]}, r"generation is int64 \[1\]; expected integers \[2\]"),
    ({"generation": [1.0, 1.0]}, r"generation is \[1\.0, 1\.0\]; expected integers \[2\]"),
    ({"stale": "skip"}, "stale is 'skip'; expected 'ignore' or 'error'"),
    ({"anchor": None}, r"No anchor was received; .* pass the batch .* or anchor=batch\['anchor'\]"),
    ({"anchor": [0]}, r"anchor is .*; expected integers \[2\]"),
    ({"anchor": [0.0] * 2}, r"anchor is .*; expected integers \[2\]"),
    ({"anchor": [[0]] * 2}, r"anchor is .*; expected integers \[2\]"),
]
# fmt: on


def test_wrong_shapes_and_dtypes_are_refused(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(unit="step"))
    data.sample()
    before = everything(data)
    given: dict[str, Any] = {"index": [0, 1], "priority": [2.0, 3.0], "anchor": [0, 0]}
    for change, message in WRONG:
        with pytest.raises(SchemaError, match=message):
            data.update_priority(**{**given, **change})
        assert everything(data) == before
    data = dataset(table, gear.TopK())
    batch = data.sample()
    before = everything(data)
    with pytest.raises(SchemaError, match=r"anchor was received; with unit='trajectory' .*: leave it out"):
        data.update_priority(batch["index"], torch.full((8,), 3.0), anchor=batch["anchor"])
    assert everything(data) == before


def test_samplers_without_priorities_refuse_updates(table: gear.Table) -> None:
    data = dataset(table, gear.Fifo(False))
    message = r" was called, but Fifo\(.*\) does not draw by priority; use gear_loader\.Prioritized"
    with pytest.raises(SchemaError, match=r"^update_priority" + message):
        data.update_priority([0], [1.0])
    with pytest.raises(SchemaError, match=r"^num_stale" + message):
        _ = data.num_stale
    assert "priorities" not in data.state_dict()


@pytest.mark.parametrize("unit", UNITS)
def test_an_update_before_the_first_batch_and_of_what_was_just_added(table: gear.Table, unit: Any) -> None:
    data = dataset(table, gear.Prioritized(1, unit=unit))
    anchor = np.zeros(11, dtype=np.int64) if unit == "step" else None
    data.update_priority(table.indices()[:11], np.zeros(11), anchor=anchor)
    assert data.num_stale == 0
    assert leaves_of(data)[0, 0] == 0
    index = table.add(episode(12, 3))
    data.update_priority(
        [index], [9.0], anchor=None if unit == "trajectory" else np.array([0]), stale="error"
    )
    assert leaves_of(data)[12, 0] == 9


@pytest.mark.parametrize(
    ("sampler", "prefetch"),
    [
        (gear.Prioritized(), 0),
        (gear.Prioritized(unit="step", replacement=False), 2),
        (gear.TopK(unit="step"), 2),
    ],
    ids=str,
)
def test_a_table_of_zeros(table: gear.Table, sampler: gear.Sampler, prefetch: int) -> None:
    data = dataset(table, sampler, prefetch=prefetch, batches_per_epoch=50, batch_size=2)
    assign(data, dict.fromkeys(items_in(sampler.unit), 0.0))
    message = "^Every priority is zero: there is nothing to draw. Set some with update_priority, "
    for draw in (data.sample, lambda: next(iter(data))):
        with pytest.raises(PriorityError, match=message):
            draw()
    assign(data, {(3, 0): 0.5, (4, 0): 0.5})
    assert set(numbers_of(data.sample())) <= {3, 4}
    # In the middle of an iteration: what was drawn before comes first.
    iterator = iter(data)
    for _ in range(3):
        next(iterator)
    assign(data, {(3, 0): 0.0, (4, 0): 0.0})
    found: list[Any] = []
    with pytest.raises(PriorityError, match=message):
        append_all(iterator, found)
    assert len(found) == prefetch


def test_real_workers_cannot_draw_by_priority_and_can_by_age() -> None:
    with named_table("test-prioritized-workers") as table:
        loader = DataLoader(dataset(table, gear.Prioritized()), batch_size=None, num_workers=1)
        message = r"A DataLoader worker cannot draw for Prioritized\("
        with iterating(loader) as batches, pytest.raises(SchemaError, match=message):
            next(batches)
        data, twin = (dataset(table, gear.Fifo(), batches_per_epoch=3) for _ in range(2))
        same_batches(copies(twin), copies(DataLoader(data, batch_size=None, num_workers=2)))


def by_age(table: gear.Table, unit: str) -> list[Item]:
    """Items (index, step) from the oldest to the newest."""
    lengths = table.lengths().tolist() if unit == "step" else [1] * len(table)
    pairs = zip(table.indices().tolist(), lengths, strict=True)
    return [(index, step) for index, length in pairs for step in range(length)]


def rows_of(batch: Mapping[str, Any], unit: str) -> list[Item]:
    items_of(batch, unit)
    steps = batch["anchor"].tolist() if unit == "step" else [0] * len(batch["anchor"])
    return list(zip(batch["index"].tolist(), steps, strict=True))


def test_a_pass_over_a_table_that_changes_meanwhile() -> None:
    unit: Any = "step"
    with make_table(max_steps=93, max_trajectories=12, on_full="evict_oldest") as table:
        for sampler in (gear.Fifo(False, unit), gear.Lifo(False, unit)):
            order = by_age(table, unit)
            order = order if type(sampler) is gear.Fifo else order[::-1]
            generation = table._engine.region.array("generation")
            began = generation.copy()
            place = 0
            for number, batch in enumerate(dataset(table, sampler, batch_size=4)):
                rows = rows_of(batch, unit)
                assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
                for row, expected in zip(rows, order[place:], strict=False):
                    if generation[expected[0]] == began[expected[0]]:  # it is still there
                        assert row == expected
                place += len(rows)
                table.add(episode(100 + number, 2))
            assert place == len(order)
            assert (generation != began).any()


WAYS = pytest.mark.parametrize("way", ["thread", "stream"], indirect=True)


@pytest.fixture
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How batches are prepared ahead: by a thread, or by the caller as for a GPU (here with nothing asynchronous)."""
    if request.param == "stream":
        monkeypatch.setattr(Prefetcher, "_ahead_in_thread", Prefetcher._ahead_on_stream)
    return request.param


@pytest.mark.parametrize(
    ("way", "prefetch"), [("thread", 0), ("thread", 1), ("thread", 3), ("stream", 2)], indirect=["way"]
)
def test_when_an_update_becomes_known(table: gear.Table, way: str, prefetch: int) -> None:
    """One that is made before batch r is asked for is known to batch r + prefetch and to no earlier one."""
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=prefetch, batches_per_epoch=11)
    for pause in (0.0, 0.002):
        data.sample()
        data.update_priority([*NUMBERS], [0.5] * 12)
        iterator = iter(data)
        known = []
        for request in range(11):
            # Each update makes another trajectory the first.
            data.update_priority([request], [100.0 + request])
            time.sleep(pause)
            known += numbers_of(next(iterator))
        assert known == [max(request - prefetch, 0) for request in range(11)]
        assert next(iterator, None) is None


@WAYS
def test_updates_while_an_iterator_waits_and_after_it_is_gone(table: gear.Table, way: str) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=2, batches_per_epoch=math.inf)
    iterator = iter(data)
    next(iterator)
    data.update_priority([4], [10.0])
    assert leaves_of(data)[4, 0] == 10.0  # a state knows of it
    del iterator
    nothing_left(table)
    assert leaves_of(data)[4, 0] == 10.0
    data.update_priority([5], [20.0])
    assert numbers_of(next(iter(data))) == [5]


def test_several_threads_update_priorities_while_another_draws(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1, unit="step"), prefetch=2, batches_per_epoch=math.inf)
    data.sample()
    items, turns, failures = items_in("step"), 150, []

    def work(member: int) -> None:
        index, anchor = np.array([item for item in items if item[0] % 4 == member]).T
        try:
            for turn in range(turns):
                data.update_priority(index, np.full(len(index), 1.0 + turn), anchor=anchor)
                data.update_priority([13, 99], [7.0, 7.0], anchor=np.zeros(2, dtype=np.int64))  # not there
            data.update_priority(index, index + anchor / 32 + 1.0, anchor=anchor)
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(member,)) for member in range(4)]
    iterator = iter(data)
    next(iterator)
    for thread in threads:
        thread.start()
    busy = True
    while busy:
        busy = any(thread.is_alive() for thread in threads)
        for batch in itertools.islice(iterator, 5):
            assert set(items_of(batch, "step")) <= set(items)
    for thread in threads:
        thread.join()
    assert failures == []
    assert leaves_of(data) == {(number, step): number + step / 32 + 1 for number, step in items}
    assert data.num_stale == 4 * turns * 2
    del iterator


def held_back(
    monkeypatch: pytest.MonkeyPatch, call: int, patience: float = 0.5
) -> tuple[threading.Event, threading.Event]:
    """Let the prefetch thread stand still in its gather number `call`, for a while at most.

    Returns:
        Events: it stands still; it may go on.
    """
    stands, go = threading.Event(), threading.Event()
    gather, calls = Collector.gather, itertools.count()

    def slow(self: Collector, *args: Any, **options: Any) -> None:
        if threading.current_thread().name == "gear-loader-prefetch" and next(calls) == call:
            stands.set()
            go.wait(patience)
        gather(self, *args, **options)

    monkeypatch.setattr(Collector, "gather", slow)
    return stands, go


def test_a_sample_knows_of_updates_made_while_batches_are_prefetched(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=2, batches_per_epoch=math.inf)
    stands, go = held_back(monkeypatch, 2)
    iterator = iter(data)
    next(iterator)
    assert stands.wait(60)
    data.update_priority([5], [9.0])
    found = numbers_of(data.sample())
    go.set()
    next(iterator)
    del iterator
    assert found == [5]


def test_updates_at_the_end_of_an_epoch_keep_their_order(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, gear.TopK(), batch_size=1, prefetch=1, batches_per_epoch=2)
    stands, go = held_back(monkeypatch, 1)
    iterator = iter(data)
    next(iterator)
    assert stands.wait(60)
    assert data._buffers.active is not None
    entered, leave = threading.Event(), threading.Event()

    def slow() -> None:  # something that takes the thread a while
        entered.set()
        leave.wait(1)

    data._buffers.active.between(slow)
    data.update_priority([5], [9.0])
    go.set()
    assert entered.wait(60)
    data.update_priority([5], [4.0])
    leave.set()
    assert len(list(iterator)) == 1
    assert leaves_of(data)[5, 0] == 4.0


def _shifted(array: np.ndarray) -> np.ndarray:
    memory = np.zeros(array.nbytes + 1, dtype=np.uint8)
    shifted: np.ndarray = memory[1:].view(array.dtype)
    shifted[:] = array
    return shifted
