"""States with priorities: resuming anywhere gives the batches that would have come, to the bit."""

from __future__ import annotations

import copy
import gc
import io
import itertools
import logging
import math
import multiprocessing
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

import lightning
import numpy as np
import pytest
import torch
from cases import mostly_long, points
from dataset_common import LENGTHS, episode, make_table, nothing_left, same_batches, snapshot
from lightning.pytorch.callbacks import Callback, ModelCheckpoint

import gear_loader as gear
from gear_loader.collection.collector import Collector
from gear_loader.errors import SchemaError
from gear_loader.lightning.datamodule import ReplayDataModule
from gear_loader.selection.prioritized import PrioritizedSelection

pytestmark = [
    # Lightning imports and calls what torch has deprecated meanwhile.
    pytest.mark.filterwarnings("ignore:.*LeafSpec.*:FutureWarning"),
    pytest.mark.filterwarnings("ignore:.*isinstance\\(treespec, LeafSpec\\).*"),
    # Runs are resumed here without the callback that saved the checkpoint.
    pytest.mark.filterwarnings("ignore:Be aware that when using `ckpt_path`, callbacks used to create"),
    # Advice on machines with a GPU: the tests run on the CPU on purpose.
    pytest.mark.filterwarnings("ignore:GPU available but not used"),
]
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)

UNITS = ("trajectory", "step")
EPOCH = 5  # batches
SCHEDULE = gear.LinearSchedule(0.4, 1.0, batches=12)
SELECTORS: dict[str, gear.Selector] = {
    "prioritized": gear.Prioritized(0.6, SCHEDULE, eps=1e-3),
    "prioritized steps": gear.Prioritized(0.6, SCHEDULE, eps=1e-3, unit="step"),
    "distinct": gear.Prioritized(1, SCHEDULE, eps=1e-3, replacement=False, normalize="batch"),
    "distinct steps": gear.Prioritized(1, 0.5, eps=1e-3, replacement=False, unit="step"),
    "largest": gear.TopK(),
    "smallest steps": gear.TopK(False, unit="step"),
}
EVERY = mostly_long(
    [(name, prefetch) for name in SELECTORS for prefetch in (0, 1, 3)], *((name, 1) for name in SELECTORS)
)


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, selector: gear.Selector, **options: Any) -> gear.ReplayDataset:
    settings = {"batch_size": 5, "windows": gear.Window(2, -1), "device": "cpu", "seed": 7, "prefetch": 0}
    return gear.ReplayDataset(table, selector=selector, **{**settings, "batches_per_epoch": EPOCH, **options})


def learn(data: gear.ReplayDataset, batch: Mapping[str, Any]) -> None:
    """What a learner does with a batch: new priorities, that depend on all of it."""
    now = batch["observation"].sum((1, 2)) * 0.37 + batch["anchor"]
    if "priority_weight" in batch:
        now += batch["priority_weight"]
    anchor = batch["anchor"] if data.selector.unit == "step" else None
    data.update_priority(batch["index"], now % 2.5, generation=batch["generation"], anchor=anchor)


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
    """A state without the rows of batches that nobody will ask for again."""
    priorities = {key: value for key, value in state["priorities"].items() if key != "recent"}
    return {**state, "priorities": priorities}


# ---------------------------------------------------------------- going on


@pytest.mark.parametrize(("name", "prefetch"), EVERY)
def test_resuming_at_every_batch(table: gear.Table, name: str, prefetch: int) -> None:
    selector = SELECTORS[name]
    data = dataset(table, selector, prefetch=prefetch)
    whole, states = [], [through_file(data.state_dict())]
    for _ in range(3):
        for batch in data:
            whole += train(data, [batch])
            states.append(through_file(data.state_dict()))
    assert len(whole) == 3 * EPOCH
    if not isinstance(selector, gear.TopK):
        assert len({tuple(batch["index"].tolist()) for batch in whole}) > EPOCH
    for taken in range(2 * EPOCH + 1):
        if taken in (EPOCH, 2 * EPOCH) and "LinearSchedule" in repr(selector):
            continue  # the schedule does not go on there, see test_prioritized; the end of an epoch is below
        resumed = dataset(table, selector, prefetch=prefetch)
        resumed.load_state_dict(states[taken])
        assert same(standing(resumed.state_dict()), standing(states[taken]))
        found = []
        while len(found) < len(whole) - taken:
            found += train(resumed, resumed)
        same_batches(whole[taken:], found)


@pytest.mark.parametrize(("name", "prefetch"), EVERY)
def test_resuming_at_the_end_of_an_epoch(table: gear.Table, name: str, prefetch: int) -> None:
    data = dataset(table, SELECTORS[name], prefetch=prefetch)
    for _ in range(2):
        train(data, data)
        state = through_file(data.state_dict())
        resumed = dataset(table, SELECTORS[name], prefetch=prefetch)
        resumed.load_state_dict(state)
        assert same(standing(resumed.state_dict()), standing(state))
        data = dataset(table, SELECTORS[name], prefetch=prefetch)
        data.load_state_dict(state)
        same_batches(train(data, data), train(resumed, resumed))
    unbroken = dataset(table, SELECTORS[name], prefetch=prefetch)
    epochs = [train(unbroken, unbroken) for _ in range(5)]
    same_batches(epochs[4], train(data, data))


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("name", ["prioritized", "distinct steps"])
def test_resuming_again_and_again(table: gear.Table, name: str, prefetch: int) -> None:
    """Also a state that is taken before a resumed run has come to where the first one had prefetched."""
    options = {"prefetch": prefetch, "batches_per_epoch": math.inf}
    data = dataset(table, SELECTORS[name], **options)
    whole = train(data, data, 20)
    data = dataset(table, SELECTORS[name], **options)
    found: list[Any] = []
    for count in (1, 1, 2, 3, 1, 1, 1, 5, 1, 4):
        iterator = iter(data)
        found += train(data, iterator, count)
        state = through_file(data.state_dict())
        del iterator
        data = dataset(table, SELECTORS[name], **options)
        data.load_state_dict(state)
    same_batches(whole, found)


def test_a_state_that_is_loaded_and_saved_again_at_once(table: gear.Table) -> None:
    options = {"prefetch": 2, "batches_per_epoch": 12}
    data = dataset(table, SELECTORS["prioritized steps"], **options)
    iterator = iter(data)
    train(data, iterator, 3)
    state = through_file(data.state_dict())
    rest = train(data, iterator)
    between = dataset(table, SELECTORS["prioritized steps"], **options)
    between.load_state_dict(state)
    resumed = dataset(table, SELECTORS["prioritized steps"], **options)
    resumed.load_state_dict(through_file(between.state_dict()))
    same_batches(rest, train(resumed, resumed))


def test_resuming_where_an_iteration_was_broken_off_while_it_prefetched(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    unbroken = dataset(table, SELECTORS["prioritized steps"], prefetch=2)
    expected = train(unbroken, unbroken)
    gather, calls = Collector.gather, itertools.count()

    def slow(*args: Any, **options: Any) -> None:
        if next(calls) == 2:  # batches 0 and 1 are there, 2 is on its way, 3 will have been asked for
            time.sleep(0.3)
        gather(*args, **options)

    monkeypatch.setattr(Collector, "gather", slow)
    data = dataset(table, SELECTORS["prioritized steps"], prefetch=2)
    iterator = iter(data)
    train(data, iterator, 2)
    del iterator
    resumed = dataset(table, SELECTORS["prioritized steps"], prefetch=2)
    resumed.load_state_dict(through_file(data.state_dict()))
    same_batches(expected[2:], train(resumed, resumed))


@pytest.mark.parametrize(("name", "prefetch"), EVERY)
def test_resuming_where_an_iteration_was_broken_off(table: gear.Table, name: str, prefetch: int) -> None:
    unbroken = dataset(table, SELECTORS[name], prefetch=prefetch)
    expected = train(unbroken, unbroken)
    data = dataset(table, SELECTORS[name], prefetch=prefetch)
    iterator = iter(data)
    train(data, iterator, 2)
    data.state_dict()  # waits until all that was asked for has been drawn
    del iterator
    state = through_file(data.state_dict())
    resumed = dataset(table, SELECTORS[name], prefetch=prefetch)
    resumed.load_state_dict(state)
    same_batches(expected[2:], train(resumed, resumed))
    # In the same dataset, which has drawn other batches in the meantime.
    train(data, data, 3)
    data.load_state_dict(state)
    same_batches(expected[2:], train(data, data))


@pytest.mark.parametrize("name", SELECTORS)
def test_resuming_sample(table: gear.Table, name: str) -> None:
    data = dataset(table, SELECTORS[name])
    whole = train_by_sampling(data, 12)
    for taken in (0, 1, 7):
        data = dataset(table, SELECTORS[name])
        train_by_sampling(data, taken)
        resumed = dataset(table, SELECTORS[name])
        resumed.load_state_dict(through_file(data.state_dict()))
        same_batches(whole[taken:], train_by_sampling(resumed, 12 - taken))


@pytest.mark.parametrize(
    "samples",
    [
        0,
        1,
        9,
    ],
)
def test_resuming_where_samples_were_drawn_between_batches(table: gear.Table, samples: int) -> None:
    data = dataset(table, SELECTORS["prioritized steps"], prefetch=3, batches_per_epoch=20)
    iterator = iter(data)
    train(data, iterator, 2)
    train_by_sampling(data, samples)
    state = through_file(data.state_dict())
    rest = train(data, iterator)
    resumed = dataset(table, SELECTORS["prioritized steps"], prefetch=3, batches_per_epoch=20)
    resumed.load_state_dict(state)
    same_batches(rest, train(resumed, resumed))


def test_a_state_is_of_its_time(table: gear.Table) -> None:
    data = dataset(table, SELECTORS["prioritized steps"], prefetch=2)
    train(data, data)
    state = data.state_dict()
    kept = copy.deepcopy(state)
    train(data, data)
    assert same(state, kept)
    assert not same(standing(data.state_dict()), standing(kept))
    resumed = dataset(table, SELECTORS["prioritized steps"], prefetch=2)
    resumed.load_state_dict(state)
    train(resumed, resumed)
    assert same(state, kept)


def test_what_a_state_holds(table: gear.Table) -> None:
    data = dataset(table, gear.Prioritized(1))
    data.sample()
    data.update_priority([3, 5, 3], [9.0, 0.0, 4.0])
    data.update_priority([13], [100.0])
    state = data.state_dict()["priorities"]
    assert set(state) == {"sequences", "lengths", "leaves", "maximum", "num_stale", "recent"}
    assert state["sequences"].tolist() == list(range(12))
    assert state["lengths"].tolist() == list(LENGTHS)
    assert state["leaves"].tolist() == [4.0 if i == 3 else 0.0 if i == 5 else 1.0 for i in range(12)]
    assert (state["maximum"], state["num_stale"]) == (9.0, 1)


def test_set_epoch_after_loading_draws_anew(table: gear.Table) -> None:
    data = dataset(table, SELECTORS["prioritized"], prefetch=3)
    iterator = iter(data)
    expected = train(data, iterator, 1)
    state = through_file(data.state_dict())
    del iterator
    resumed, plain = (dataset(table, SELECTORS["prioritized"], prefetch=3) for _ in range(2))
    resumed.load_state_dict(state)
    resumed.set_epoch(0)
    # As if the priorities had been there from the start, and none of the batches drawn.
    state["priorities"]["recent"] = []
    plain.load_state_dict(state)
    plain.set_epoch(0)
    found = train(resumed, resumed)
    same_batches(train(plain, plain), found)
    assert not torch.equal(found[0]["priority_weight"], expected[0]["priority_weight"])


def go_on(lengths: list[int], file: bytes, pipe: Any) -> None:
    with make_table(lengths) as table:
        found = []
        for name, state in torch.load(io.BytesIO(file), weights_only=True).items():
            data = dataset(table, SELECTORS[name], prefetch=2)
            data.load_state_dict(state)
            found.append([[batch[key].tolist() for key in sorted(batch)] for batch in train(data, data)])
        pipe.send(found)


@pytest.mark.slow
def test_resuming_in_another_process_with_a_table_of_its_own(table: gear.Table) -> None:
    states, expected = {}, []
    for name, selector in SELECTORS.items():
        data = dataset(table, selector, prefetch=2)
        train(data, data)
        iterator = iter(data)
        train(data, iterator, 2)
        states[name] = data.state_dict()
        expected.append([[batch[key].tolist() for key in sorted(batch)] for batch in train(data, iterator)])
    file = io.BytesIO()
    torch.save(states, file)
    context = multiprocessing.get_context("forkserver")
    pipe, theirs = context.Pipe()
    process = context.Process(target=go_on, args=(list(LENGTHS), file.getvalue(), theirs), daemon=True)
    process.start()
    theirs.close()
    assert pipe.poll(120)
    assert pipe.recv() == expected
    process.join(60)
    assert process.exitcode == 0


# ---------------------------------------------------------------- another table


def leaves_of(data: gear.ReplayDataset) -> dict[int, list[float]]:
    """What the items of each trajectory weigh, by sequence number."""
    state = data.state_dict()["priorities"]
    leaves, found = state["leaves"].tolist(), {}
    for sequence, length in zip(state["sequences"].tolist(), state["lengths"].tolist(), strict=True):
        count = length if data.selector.unit == "step" else 1
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
def test_a_table_that_has_lost_trajectories_since(unit: Any) -> None:
    state, leaves = trained(unit)
    with make_table() as table:
        table.remove([0, 4, 5, 11])
        data = dataset(table, gear.Prioritized(1, eps=1e-3, unit=unit), prefetch=2)
        data.load_state_dict(state)
        assert leaves_of(data) == {s: part for s, part in leaves.items() if s not in (0, 4, 5, 11)}
        found = train(data, data)
        assert len(found) == EPOCH - 1
        generation = table.region.array("generation")
        for batch in found:
            assert set(batch["index"].tolist()) <= {1, 2, 3, 6, 7, 8, 9, 10}
            assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
        table.remove(table.indices())
        data.load_state_dict(state)
        assert leaves_of(data) == {}


@pytest.mark.parametrize("unit", UNITS)
def test_a_table_that_has_gained_trajectories_since(unit: Any) -> None:
    state, leaves = trained(unit)
    with make_table(max_trajectories=16, max_steps=140) as table:
        table.add(episode(12, 6), priority=0.5)
        data = dataset(table, gear.Prioritized(1, eps=1e-3, unit=unit), prefetch=2)
        data.load_state_dict(state)
        new = [float(np.float32(0.501))] * (6 if unit == "step" else 1)
        assert leaves_of(data) == {**leaves, 12: new}
        assert len(train(data, data)) == EPOCH - 1


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


def highest(maximum: float) -> Any:
    """A state whose running maximum is this."""
    with make_table() as table:
        data = dataset(table, gear.Prioritized(1))
        data.sample()
        data.update_priority([3], [maximum])
        data.update_priority([3], [0.5])
        return data.state_dict()


def test_what_comes_after_a_state_begins_with_its_running_maximum() -> None:
    with make_table(max_trajectories=16, max_steps=140) as table:
        data = dataset(table, gear.Prioritized(1))
        data.load_state_dict(highest(8.0))
        table.add(episode(12, 1))
        assert leaves_of(data)[12] == [8.0]


def test_what_the_table_has_gained_begins_with_the_running_maximum_of_the_state() -> None:
    with make_table(max_trajectories=16, max_steps=140) as table:
        table.add(episode(12, 1))
        data = dataset(table, gear.Prioritized(1))
        data.load_state_dict(highest(8.0))
        assert leaves_of(data)[12] == [8.0]


def test_a_priority_that_the_table_has_gained_counts_for_the_running_maximum() -> None:
    with make_table(max_trajectories=16, max_steps=140) as table:
        table.add(episode(12, 1), priority=20.0)
        data = dataset(table, gear.Prioritized(1))
        data.load_state_dict(highest(8.0))
        assert leaves_of(data)[12] == [20.0]
        table.add(episode(13, 1))
        assert leaves_of(data)[13] == [20.0]


def test_a_state_that_is_taken_while_another_process_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    with make_table(max_trajectories=12, max_steps=93, on_full="evict_oldest") as table:
        data = dataset(table, gear.Prioritized(1, unit="step"))
        data.sample()
        known = PrioritizedSelection._known

        def meanwhile(self: PrioritizedSelection) -> Any:
            view = known(self)
            if table.region.array("sequence").max() < 20:
                table.region.lock.timeout = 0.1
                for number in range(12, 30):
                    try:
                        table.add(episode(number, 1 + number % 5))
                    except gear.errors.LockTimeoutError:  # whoever holds a ticket is waited for
                        break
            return view

        monkeypatch.setattr(PrioritizedSelection, "_known", meanwhile)
        state = data.state_dict()["priorities"]
        monkeypatch.undo()
        assert len(state["leaves"]) == int(state["lengths"].sum())
        assert set(state["leaves"].tolist()) == {1.0}


# ---------------------------------------------------------------- damage


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
DAMAGE: dict[str, Any] = {
    "no priorities": lambda s: without(s, P),
    "priorities of another kind": lambda s: {**s, P: [1, 2]},
    "no leaves": lambda s: {**s, P: without(s[P], "leaves")},
    "no recent batches": lambda s: {**s, P: without(s[P], "recent")},
    "no maximum": lambda s: {**s, P: without(s[P], "maximum")},
    "too few leaves": lambda s: damaged(s, leaves=s[P]["leaves"][:-1]),
    "too many leaves": lambda s: damaged(s, leaves=torch.cat((s[P]["leaves"], s[P]["leaves"]))),
    "leaves of another dtype": lambda s: damaged(s, leaves=s[P]["leaves"].double()),
    "leaves in two dimensions": lambda s: damaged(s, leaves=s[P]["leaves"][:, None]),
    "a negative leaf": lambda s: damaged(s, leaves=-s[P]["leaves"]),
    "a leaf that is not a number": lambda s: damaged(s, leaves=s[P]["leaves"] * NAN),
    "an infinite leaf": lambda s: damaged(s, leaves=s[P]["leaves"] + INF),
    "too few lengths": lambda s: damaged(s, lengths=s[P]["lengths"][:-1]),
    "floats as sequences": lambda s: damaged(s, sequences=s[P]["sequences"].float()),
    "sequences out of order": lambda s: damaged(s, sequences=s[P]["sequences"].flip(0)),
    "a sequence twice": lambda s: damaged(s, sequences=s[P]["sequences"] // 2),
    "no number as maximum": lambda s: damaged(s, maximum="high"),
    "an infinite maximum": lambda s: damaged(s, maximum=INF),
    "a maximum that is not a number": lambda s: damaged(s, maximum=NAN),
    "a count below zero": lambda s: damaged(s, num_stale=-1),
    "recent batches of another kind": lambda s: damaged(s, recent=3),
    "a recent batch of another kind": lambda s: damaged(s, recent=[3]),
    "a recent batch without rows": lambda s: damaged(
        s, recent=[without(r, "sequences") for r in s[P]["recent"]]
    ),
    "another unit's leaves": lambda s: damaged(s, leaves=torch.ones(len(s[P]["sequences"]))),
    "lengths below zero": lambda s: damaged(s, lengths=s[P]["lengths"].index_fill(0, torch.tensor([0]), -5)),
    "a negative maximum": lambda s: damaged(s, maximum=-3.0),
    "a maximum beyond float32": lambda s: damaged(s, maximum=1e300),
    "a recent batch without its number": lambda s: damaged(
        s, recent=[without(r, "step") for r in s[P]["recent"]]
    ),
    "a recent batch of too few steps": lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"][:-1]),
    "a recent batch of too few weights": lambda s: with_recent(s, weights=torch.ones(2)),
    "a recent batch of float steps": lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"].float()),
    "a recent batch of negative steps": lambda s: with_recent(s, steps=s[P]["recent"][-1]["steps"] - 100),
    "a recent batch without weights": lambda s: with_recent(s, weights=None),
}


@pytest.mark.parametrize(
    "kind",
    DAMAGE,
)
def test_a_damaged_state_is_refused(table: gear.Table, kind: str) -> None:
    state, _ = trained("step")
    data = dataset(table, gear.Prioritized(1, eps=1e-3, unit="step"), prefetch=2)
    train_by_sampling(data, 3)
    before = data.state_dict()
    with pytest.raises(SchemaError, match=r"The state('s priorities are damaged| holds no priorities)"):
        data.load_state_dict(DAMAGE[kind](state))
    assert same(data.state_dict(), before)
    data.load_state_dict(state)


def test_a_state_of_another_selector_is_refused(table: gear.Table) -> None:
    state, _ = trained("step")
    for selector in (
        gear.TopK(unit="step"),
        gear.Uniform(unit="step"),
        gear.Prioritized(1, eps=1e-3),
        gear.Fifo(),
    ):
        data = dataset(table, selector, prefetch=2)
        before = data.state_dict()
        with pytest.raises(SchemaError, match=r"other options \(saved, here\): {'selector': "):
            data.load_state_dict(state)
        assert same(data.state_dict(), before)


# ---------------------------------------------------------------- Lightning


class Model(lightning.LightningModule):
    """Learns, and gives the dataset new priorities; notes the rows that it is shown."""

    def __init__(self, unit: str) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.layer = torch.nn.Linear(3, 1)
        self.unit = unit
        self.seen: list[Any] = []

    def training_step(self, batch: Any, _: int) -> torch.Tensor:
        self.seen.append([batch[key].tolist() for key in ("index", "anchor", "priority_weight")])
        error = (self.layer(batch["observation"] / 64)[:, 0, 0] - batch["reward"][:, 0].float() / 4e4).abs()
        self.trainer.datamodule.train_dataset.update_priority(  # type: ignore[attr-defined]
            batch["index"],
            error,
            generation=batch["generation"],
            anchor=batch["anchor"] if self.unit == "step" else None,
        )
        return (error.square() * batch["priority_weight"]).mean()

    def validation_step(self, batch: Any, _: int) -> None:
        assert "priority_weight" not in batch

    def configure_optimizers(self) -> Any:
        return torch.optim.Adam(self.parameters(), 0.05)


def weights_of(model: Model) -> list[list[float]]:
    return [part.detach().reshape(-1).tolist() for part in model.parameters()]


def data_module(table: gear.Table, unit: Any, **options: Any) -> ReplayDataModule:
    selector = gear.Prioritized(0.7, gear.LinearSchedule(0.4, 1, batches=10), eps=1e-4, unit=unit)
    settings = {"batch_size": 6, "windows": gear.Window(1), "val_fraction": 0.2, "batches_per_epoch": 5}
    return ReplayDataModule(table, selector=selector, **{**settings, **options})


def trainer(folder: Path | None = None, **options: Any) -> lightning.Trainer:
    """A quiet trainer; with a folder, it keeps a checkpoint of every training step, ``step=7.ckpt``."""
    callbacks: list[Callback] = []
    if folder is not None:
        callbacks = [ModelCheckpoint(folder, filename="{step}", every_n_train_steps=1, save_top_k=-1)]
    return lightning.Trainer(
        accelerator="cpu",
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
        enable_checkpointing=folder is not None,
        callbacks=callbacks,
        **{"max_epochs": 3, "num_sanity_val_steps": 0, **options},
    )


CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "trajectories": ("trajectory", {}, {}),
    "steps": ("step", {}, {}),
    "steps, no prefetch": ("step", {"prefetch": 0}, {}),
    "no validation, much prefetch": ("trajectory", {"val_fraction": 0, "prefetch": 4}, {}),
    "a pass's length": ("step", {"batches_per_epoch": None, "batch_size": 20}, {}),
    "endless": ("step", {"batches_per_epoch": math.inf}, {"max_steps": 12, "max_epochs": -1}),
}


@pytest.mark.parametrize("case", CASES)
@points(5)
def test_a_trainer_resumed_from_the_checkpoint_of_every_step(
    table: gear.Table, tmp_path: Path, case: str, every: int
) -> None:
    unit, options, settings = CASES[case]
    whole = Model(unit)
    full = trainer(tmp_path, **settings)
    full.fit(whole, data_module(table, unit, **options))
    assert len(whole.seen) == full.global_step >= 12
    for step in range(1, full.global_step, every):
        resumed = Model(unit)
        trainer(**settings).fit(
            resumed, data_module(table, unit, **options), ckpt_path=tmp_path / f"step={step}.ckpt"
        )
        assert resumed.seen == whole.seen[step:], f"from step {step}"
        assert weights_of(resumed) == weights_of(whole)
    gc.collect()
    nothing_left(table)


@pytest.mark.parametrize("stop", mostly_long([3, 5, 7], 5))
def test_a_trainer_that_was_stopped(table: gear.Table, tmp_path: Path, stop: int) -> None:
    whole = Model("step")
    trainer().fit(whole, data_module(table, "step"))
    first = Model("step")
    stopped = trainer(tmp_path, max_epochs=-1, max_steps=stop)
    stopped.fit(first, data_module(table, "step"))
    assert first.seen == whole.seen[:stop]
    second = Model("step")
    trainer().fit(second, data_module(table, "step"), ckpt_path=tmp_path / f"step={stop}.ckpt")
    assert second.seen == whole.seen[stop:]
    assert weights_of(second) == weights_of(whole)
    # torch's safe loading takes the whole checkpoint.
    checkpoint = torch.load(tmp_path / f"step={stop}.ckpt", weights_only=True)
    (state,) = [part for part in checkpoint.values() if isinstance(part, dict) and "train" in part]
    assert state["train"]["priorities"]["leaves"].dtype == torch.float32
    gc.collect()
    nothing_left(table)
