"""States with priorities: resuming anywhere gives the batches that would have come, to the bit."""

from __future__ import annotations

import copy
import io
import itertools
import math
import time
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import LENGTHS, episode, make_table, nothing_left, same_batches, snapshot
from options_common import nested

import gear_loader as gear
from gear_loader.collection.collector import Collector
from gear_loader.errors import SchemaError

UNITS = ("trajectory", "step")
EPOCH = 5  # batches
SCHEDULE = gear.LinearSchedule(0.4, 1.0, batches=12)
SAMPLERS: dict[str, gear.Sampler] = {
    "prioritized": gear.Prioritized(0.6, SCHEDULE, eps=1e-3),
    "prioritized steps": gear.Prioritized(0.6, SCHEDULE, eps=1e-3, unit="step"),
    "distinct steps": gear.Prioritized(1, 0.5, eps=1e-3, replacement=False, unit="step"),
    "largest": gear.TopK(),
}


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table
        nothing_left(table)


def dataset(table: Any, sampler: gear.Sampler, **options: Any) -> gear.ReplayDataset:
    settings = {"batch_size": 5, "windows": gear.Window(2, -1), "device": "cpu", "seed": 7, "prefetch": 0}
    return gear.ReplayDataset(
        table, **nested({"sampler": sampler, **settings, "batches_per_epoch": EPOCH, **options})
    )


def learn(data: gear.ReplayDataset, batch: Mapping[str, Any]) -> None:
    """What a learner does with a batch: new priorities, that depend on all of it."""
    now = batch["observation"].sum((1, 2)) * 0.37 + batch["anchor"]
    if "priority_weight" in batch:
        now += batch["priority_weight"]
    anchor = batch["anchor"] if data.sampler.unit == "step" else None
    shard = {"shard": batch["shard"]} if "shard" in batch else {}
    data.update_priority(batch["index"], now % 2.5, generation=batch["generation"], anchor=anchor, **shard)


def train(
    data: gear.ReplayDataset, batches: Iterable[Mapping[str, Any]], count: int | None = None
) -> list[Any]:
    """Learn from the first `count` batches, or all; copies of them."""
    found = []
    for batch in itertools.islice(batches, count):
        found.append(snapshot(batch))
        learn(data, batch)
    return found


def train_by_sampling(data: gear.ReplayDataset, count: int) -> list[Any]:
    return train(data, (data.sample() for _ in range(count)))


def through_file(state: Any) -> Any:
    """What comes back from a checkpoint, with torch's safe loading."""
    file = io.BytesIO()
    torch.save(state, file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def same(left: Any, right: Any) -> bool:
    """Whether two states are the same, to the bit."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    if isinstance(left, list):
        return len(left) == len(right) and all(same(a, b) for a, b in zip(left, right, strict=True))
    return type(left) is type(right) and left == right


def standing(state: Mapping[str, Any]) -> Any:
    """A state without the rows of batches that are not asked for again."""
    priorities = {key: value for key, value in state["priorities"].items() if key != "recent"}
    return {**state, "priorities": priorities}


@pytest.mark.parametrize("name", ["prioritized steps", "largest"])
def test_resuming_at_the_end_of_an_epoch(table: gear.Table, name: str) -> None:
    data = dataset(table, SAMPLERS[name])
    for _ in range(2):
        train(data, data)
        state = through_file(data.state_dict())
        resumed = dataset(table, SAMPLERS[name])
        resumed.load_state_dict(state)
        assert same(standing(resumed.state_dict()), standing(state))
        data = dataset(table, SAMPLERS[name])
        data.load_state_dict(state)
        same_batches(train(data, data), train(resumed, resumed))
    unbroken = dataset(table, SAMPLERS[name])
    epochs = [train(unbroken, unbroken) for _ in range(5)]
    same_batches(epochs[4], train(data, data))


@pytest.mark.parametrize(("name", "prefetch"), [("prioritized", 3), ("distinct steps", 1)])
def test_resuming_again_and_again(table: gear.Table, name: str, prefetch: int) -> None:
    """Also a state that is taken before a resumed run has come to where the first one had prefetched."""
    options = {"prefetch": prefetch, "batches_per_epoch": math.inf}
    data = dataset(table, SAMPLERS[name], **options)
    whole = train(data, data, 20)
    data = dataset(table, SAMPLERS[name], **options)
    found: list[Any] = []
    for count in (1, 1, 2, 3, 1, 1, 1, 5, 1, 4):
        iterator = iter(data)
        found += train(data, iterator, count)
        state = through_file(data.state_dict())
        del iterator
        data = dataset(table, SAMPLERS[name], **options)
        data.load_state_dict(state)
    same_batches(whole, found)


def test_resuming_where_an_iteration_was_broken_off_while_it_prefetched(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = dataset(table, SAMPLERS["prioritized steps"], prefetch=2)
    expected = train(unbroken, unbroken)
    gather, calls = Collector.gather, itertools.count()

    def slow(*args: Any, **options: Any) -> None:
        if next(calls) == 2:  # batches 0 and 1 are there, 2 is on its way, 3 will have been asked for
            time.sleep(0.3)
        gather(*args, **options)

    monkeypatch.setattr(Collector, "gather", slow)
    data = dataset(table, SAMPLERS["prioritized steps"], prefetch=2)
    iterator = iter(data)
    train(data, iterator, 2)
    del iterator
    resumed = dataset(table, SAMPLERS["prioritized steps"], prefetch=2)
    resumed.load_state_dict(through_file(data.state_dict()))
    same_batches(expected[2:], train(resumed, resumed))


@pytest.mark.parametrize("name", ["prioritized", "distinct steps"])
def test_resuming_samples_also_between_batches(table: gear.Table, name: str) -> None:
    data = dataset(table, SAMPLERS[name], prefetch=3, batches_per_epoch=20)
    iterator = iter(data)
    train(data, iterator, 2)
    train_by_sampling(data, 9)
    state = through_file(data.state_dict())
    rest, more = train(data, iterator), train_by_sampling(data, 3)
    resumed = dataset(table, SAMPLERS[name], prefetch=3, batches_per_epoch=20)
    resumed.load_state_dict(state)
    same_batches(rest, train(resumed, resumed))
    same_batches(more, train_by_sampling(resumed, 3))


def test_a_state_is_of_its_time(table: gear.Table) -> None:
    data = dataset(table, SAMPLERS["prioritized steps"], prefetch=2)
    train(data, data)
    state = data.state_dict()
    kept = copy.deepcopy(state)
    train(data, data)
    assert same(state, kept)
    assert not same(standing(data.state_dict()), standing(kept))
    resumed = dataset(table, SAMPLERS["prioritized steps"], prefetch=2)
    resumed.load_state_dict(state)
    train(resumed, resumed)
    assert same(state, kept)


def test_set_epoch_after_loading_draws_other_batches(table: gear.Table) -> None:
    data = dataset(table, SAMPLERS["prioritized"], prefetch=3)
    iterator = iter(data)
    expected = train(data, iterator, 1)
    state = through_file(data.state_dict())
    del iterator
    resumed, plain = (dataset(table, SAMPLERS["prioritized"], prefetch=3) for _ in range(2))
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    # As if the priorities had been there from the start, and none of the batches drawn.
    state["priorities"]["recent"] = []
    plain.load_state_dict(state)
    plain.set_epoch(0)
    found = train(resumed, resumed)
    same_batches(train(plain, plain), found)
    assert not torch.equal(found[0]["priority_weight"], expected[0]["priority_weight"])


def leaves_of(data: gear.ReplayDataset) -> dict[int, list[float]]:
    """What the items of each trajectory weigh, by sequence number."""
    state = data.state_dict()["priorities"]
    leaves, found = state["leaves"].tolist(), {}
    for sequence, length in zip(state["sequences"].tolist(), state["lengths"].tolist(), strict=True):
        count = length if data.sampler.unit == "step" else 1
        found[sequence], leaves = leaves[:count], leaves[count:]
    assert leaves == []
    return found


def trained(unit: Any, **options: Any) -> tuple[Any, dict[int, list[float]]]:
    """A state in the middle of training on a table of its own, and the priorities then."""
    with make_table() as table:
        data = dataset(table, gear.Prioritized(1, eps=1e-3, unit=unit), **{"prefetch": 2, **options})
        train(data, data)
        iterator = iter(data)
        train(data, iterator, 1)
        state = through_file(data.state_dict())
        leaves = leaves_of(data)
        del iterator
    return state, leaves


@pytest.mark.parametrize("unit", UNITS)
def test_a_table_that_has_lost_and_gained_trajectories_since(unit: Any) -> None:
    state, leaves = trained(unit)
    with make_table(max_trajectories=16, max_steps=140) as table:
        table.remove([0, 4, 5, 11])
        table.add(episode(12, 6), priority=0.5)
        data = dataset(table, gear.Prioritized(1, eps=1e-3, unit=unit), prefetch=2)
        data.load_state_dict(state)
        new = [float(np.float32(0.501))] * (6 if unit == "step" else 1)
        expected = {s: part for s, part in leaves.items() if s not in (0, 4, 5, 11)}
        assert leaves_of(data) == {**expected, 12: new}
        found = train(data, data)
        assert len(found) == EPOCH - 1
        generation, live = table._engine.region.array("generation"), set(table.indices().tolist())
        for batch in found:
            assert set(batch["index"].tolist()) <= live
            assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
        table.remove(table.indices())
        data.load_state_dict(state)
        assert leaves_of(data) == {}


def test_another_trajectory_of_the_same_number_is_not_taken_for_the_same() -> None:
    # Told by its length, as far as that goes.
    state, leaves = trained("step")
    lengths = [*LENGTHS]
    lengths[2], lengths[7] = 11, 8
    with make_table(lengths) as table:
        data = dataset(table, gear.Prioritized(1, eps=1e-3, unit="step"))
        data.load_state_dict(state)
        found = leaves_of(data)
        assert {len(set(found[2])), len(set(found[7]))} == {1}
        assert {s: part for s, part in found.items() if s not in (2, 7)} == {
            s: part for s, part in leaves.items() if s not in (2, 7)
        }


def test_the_running_maximum_is_that_of_the_state_and_of_what_was_gained() -> None:
    with make_table() as table:
        data = dataset(table, gear.Prioritized(1))
        data.sample()
        for priority in (8.0, 0.5):
            data.update_priority([3], [priority])
        state = data.state_dict()
    with make_table(max_trajectories=16, max_steps=140) as table:
        table.add(episode(12, 1))
        data = dataset(table, gear.Prioritized(1))
        data.load_state_dict(state)
        table.add(episode(13, 1))
        assert [leaves_of(data)[number] for number in (3, 12, 13)] == [[0.5], [8.0], [8.0]]
        table.add(episode(14, 1), priority=20.0)
        data = dataset(table, gear.Prioritized(1))
        data.load_state_dict(state)
        table.add(episode(15, 1))
        assert [leaves_of(data)[number] for number in (14, 15)] == [[20.0], [20.0]]


def test_a_state_that_is_taken_while_another_process_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_table(max_trajectories=12, max_steps=93, on_full="evict_oldest") as table:
        data = dataset(table, gear.Prioritized(1, unit="step"))
        data.sample()
        priorities = data._selected().priorities  # type: ignore[attr-defined]
        known = priorities._view

        def meanwhile() -> Any:
            view = known()
            if table._engine.region.array("sequence").max() < 20:
                table._engine.region.lock.timeout = 0.1
                for number in range(12, 30):
                    try:
                        table.add(episode(number, 1 + number % 5))
                    except gear.errors.LockTimeoutError:  # a read ticket is waited for
                        break
            return view

        monkeypatch.setattr(priorities, "_view", meanwhile)
        state = data.state_dict()["priorities"]
        monkeypatch.undo()
        assert len(state["leaves"]) == int(state["lengths"].sum())
        assert set(state["leaves"].tolist()) == {1.0}


def damaged(state: Any, **changes: Any) -> Any:
    return {**state, "priorities": {**state["priorities"], **changes}}


def without(mapping: Mapping[str, Any], key: str) -> dict[str, Any]:
    return {k: v for k, v in mapping.items() if k != key}


def with_recent(state: Any, **changes: Any) -> Any:
    recent = [dict(rows) for rows in state["priorities"]["recent"]]
    recent[-1].update(changes)
    return damaged(state, recent=recent)


NAN, INF = float("nan"), float("inf")
P = "priorities"
# fmt: off
DAMAGE: list[Any] = [
    lambda s: without(s, P),
    lambda s: {**s, P: [1, 2]},
    *(lambda s, key=key: {**s, P: without(s[P], key)} for key in ("leaves", "recent", "maximum")),
    lambda s: damaged(s, leaves=s[P]["leaves"][:-1]),
    lambda s: damaged(s, leaves=torch.cat((s[P]["leaves"], s[P]["leaves"]))),
    lambda s: damaged(s, leaves=s[P]["leaves"].double()),
    lambda s: damaged(s, leaves=s[P]["leaves"][:, None]),
    lambda s: damaged(s, leaves=-s[P]["leaves"]),
    lambda s: damaged(s, leaves=s[P]["leaves"] * NAN),
    lambda s: damaged(s, leaves=s[P]["leaves"] + INF),
    lambda s: damaged(s, leaves=torch.ones(len(s[P]["sequences"]))),  # of another unit
    lambda s: damaged(s, lengths=s[P]["lengths"][:-1]),
    lambda s: damaged(s, lengths=s[P]["lengths"].index_fill(0, torch.tensor([0]), -5)),
    lambda s: damaged(s, sequences=s[P]["sequences"].float()),
    lambda s: damaged(s, sequences=s[P]["sequences"].flip(0)),
    lambda s: damaged(s, sequences=s[P]["sequences"] // 2),
    *(lambda s, maximum=maximum: damaged(s, maximum=maximum) for maximum in ("high", INF, NAN, -3.0, 1e300)),
    lambda s: damaged(s, num_stale=-1),
    lambda s: damaged(s, recent=3),
    lambda s: damaged(s, recent=[3]),
    *(lambda s, key=key: damaged(s, recent=[without(r, key) for r in s[P]["recent"]]) for key in ("sequences", "step")),
    lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"][:-1]),
    lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"].float()),
    lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"] - 100),
    lambda s: with_recent(s, weights=torch.ones(2)),
    lambda s: with_recent(s, weights=None),
]
# fmt: on


def test_a_damaged_state_is_refused(table: gear.Table) -> None:
    state, _ = trained("step")
    data = dataset(table, gear.Prioritized(1, eps=1e-3, unit="step"), prefetch=2)
    train_by_sampling(data, 3)
    before = data.state_dict()
    for number, damage in enumerate(DAMAGE):
        with pytest.raises(SchemaError, match=r"The state('s priorities are invalid| holds no priorities)"):
            data.load_state_dict(damage(state))
        assert same(data.state_dict(), before), f"after damage {number}"
    data.load_state_dict(state)
