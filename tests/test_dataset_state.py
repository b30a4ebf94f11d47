"""`ReplayDataset.state_dict`: resuming anywhere gives the batches that would have come, to the bit."""

from __future__ import annotations

import itertools
import json
import math
import time
import types
from collections.abc import Iterator
from typing import Any

import pytest
from cases import mostly_long
from dataset_common import copies, make_table, named_table, nothing_left, same_batches, snapshot
from torch.utils.data import DataLoader, get_worker_info
from torchdata.stateful_dataloader import StatefulDataLoader

import gear_loader as gear
from gear_loader.errors import SchemaError

pytestmark = [
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 still calls this function, which torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]

SELECTORS = {
    "trajectories": gear.Uniform(),
    "steps": gear.Uniform(unit="step"),
    "trajectories once": gear.Uniform(replacement=False),
    "steps once": gear.Uniform(replacement=False, unit="step"),
}
EPOCH = 5  # batches


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    with named_table("test-dataset-state", [5, 1, 3, 2, 4, 2, 1, 4, 6, 2, 3, 4, 2, 5]) as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    selector = options.get("selector", gear.Uniform())
    size = 10 if selector.unit == "step" else 3
    options = {"batch_size": size, "windows": gear.Window(4, -2), "device": "cpu", "seed": 5, **options}
    if selector.replacement:
        options.setdefault("batches_per_epoch", EPOCH)
    return gear.ReplayDataset(table, **options)


def through_json(state: Any) -> Any:
    """What comes back from a file."""
    return json.loads(json.dumps(state))


# By itself ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", SELECTORS)
def test_resuming_at_every_batch(table: gear.Table, name: str) -> None:
    selector, prefetch = SELECTORS[name], 3 if "once" in name else 0
    whole = dataset(table, selector=selector, prefetch=prefetch)
    epochs = [copies(whole) for _ in range(4)]
    assert [len(epoch) for epoch in epochs] == [EPOCH] * 4
    for epoch, taken in itertools.product(range(2), range(EPOCH + 2)):
        data = dataset(table, selector=selector, prefetch=prefetch)
        for _ in range(epoch):
            copies(data)
        iterator = iter(data)
        for _ in range(min(taken, EPOCH)):
            next(iterator)
        ended = taken > EPOCH
        if ended:
            assert next(iterator, None) is None
        state = through_json(data.state_dict())
        assert (state["epoch"], state["step"]) == ((epoch + 1, 0) if ended else (epoch, taken))
        del iterator

        resumed = dataset(table, selector=selector, prefetch=prefetch)
        resumed.load_state_dict(state)
        assert through_json(resumed.state_dict()) == state
        rest = epochs[epoch + 1] if ended else epochs[epoch][taken:]
        same_batches(rest, copies(resumed))
        for later in epochs[epoch + 1 + ended :]:
            same_batches(later, copies(resumed))


def test_a_state_is_integers_and_options() -> None:
    with make_table() as table:
        state = dataset(table).state_dict()
    counts = ("epoch", "before", "step", "past", "workers", "samples", "sampled_items")
    assert state == {
        **dict.fromkeys(counts, 0),
        "config": {
            "seed": 5,
            "batch_size": 3,
            "selector": "Uniform(replacement=True, unit='trajectory')",
            "anchor": "uniform",
            "drop_last": False,
        },
    }
    assert through_json(state) == state


def test_what_was_prefetched_does_not_count(table: gear.Table) -> None:
    data = dataset(table, prefetch=3)
    iterator = iter(data)
    next(iterator)
    time.sleep(0.02)
    assert data.state_dict()["step"] == 1


def test_loading_into_a_dataset_that_is_being_iterated(table: gear.Table) -> None:
    data = dataset(table)
    expected = copies(data)
    data.set_epoch(0)
    iterator = iter(data)
    next(iterator)
    state = data.state_dict()
    next(iterator)
    next(iterator)
    data.load_state_dict(state)
    same_batches(expected[3:4], [snapshot(next(iterator))])  # the old one goes on as if nothing had happened
    same_batches(expected[1:], copies(data))


def test_loading_twice_and_set_epoch_after_loading(table: gear.Table) -> None:
    data = dataset(table)
    epochs = [copies(data) for _ in range(4)]
    state = {**dataset(table).state_dict(), "epoch": 1, "step": 2}
    for _ in range(2):
        data.load_state_dict(state)
        same_batches(epochs[1][2:], copies(data))
        same_batches(epochs[2], copies(data))
    data.load_state_dict(state)
    data.set_epoch(3)
    same_batches(epochs[3], copies(data))


def test_resuming_an_endless_epoch(table: gear.Table) -> None:
    for selector in SELECTORS.values():
        options = {"selector": selector, "batches_per_epoch": math.inf}
        expected = copies(dataset(table, **options), 23)
        data = dataset(table, **options)
        copies(data, 13)
        resumed = dataset(table, **options)
        resumed.load_state_dict(through_json(data.state_dict()))
        same_batches(expected[13:], copies(resumed, 10))


def test_resuming_a_rank(table: gear.Table) -> None:
    options = {"selector": gear.Uniform(False), "rank": 2, "world_size": 3}
    whole = dataset(table, **options)
    epochs = [copies(whole), copies(whole)]
    data = dataset(table, **options)
    copies(data, 1)
    resumed = dataset(table, **options)
    resumed.load_state_dict(data.state_dict())
    same_batches(epochs[0][1:], copies(resumed))
    same_batches(epochs[1], copies(resumed))


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_resuming_sample(table: gear.Table, selector: gear.Uniform) -> None:
    whole = dataset(table, selector=selector)
    expected = [snapshot(whole.sample(size)) for size in (None, 2, None, None, 4, None, None, None, None)]
    data = dataset(table, selector=selector)
    for size in (None, 2, None):
        data.sample(size)
    copies(data, 2)
    resumed = dataset(table, selector=selector)
    resumed.load_state_dict(through_json(data.state_dict()))
    same_batches(expected[3:], [snapshot(resumed.sample(size)) for size in (None, 4, None, None, None, None)])


# DataLoader -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "taken"), mostly_long(itertools.product((0, 1, 3), (0, 2, 3)), (0, 2), (3, 3))
)
def test_a_state_without_workers_goes_on_with_any_number_of_them(
    table: gear.Table, workers: int, taken: int
) -> None:
    for selector in (gear.Uniform(), gear.Uniform(False, "step")):
        whole = dataset(table, selector=selector)
        epochs = [copies(whole) for _ in range(3)]
        data = dataset(table, selector=selector)
        copies(data)
        copies(data, taken)
        resumed = dataset(table, selector=selector)
        resumed.load_state_dict(data.state_dict())
        loader = DataLoader(resumed, batch_size=None, num_workers=workers)
        same_batches(epochs[1][taken:], copies(loader))
        same_batches(epochs[2], copies(loader))


class Uneven(gear.Uniform):
    """Worker 0 takes its time, so that others have long ended when it delivers its last batches."""

    def select(self, snapshot: Any, draw: Any) -> Any:
        info = get_worker_info()
        if info is not None and info.id == 0:
            time.sleep(0.03)
        return super().select(snapshot, draw)


def stateful(
    table: gear.Table,
    workers: int,
    state: Any = None,
    *,
    selector: gear.Uniform | None = None,
    **options: Any,
) -> Any:
    data = dataset(table, selector=selector or gear.Uniform(False))
    loader = StatefulDataLoader(data, batch_size=None, num_workers=workers, **options)
    if state is not None:
        loader.load_state_dict(state)
    return loader


def resumes_at(
    table: gear.Table, epochs: list[list[Any]], epoch: int, taken: int, workers: int, **options: Any
) -> None:
    loader = stateful(table, workers, **options)
    for _ in range(epoch):
        list(loader)
    iterator = iter(loader)
    for _ in range(min(taken, EPOCH)):
        next(iterator)
    ended = taken > EPOCH
    if ended:
        assert next(iterator, None) is None
    state = loader.state_dict()
    del iterator, loader

    resumed = stateful(table, workers, state, **options)
    # The loader itself goes on with the next epoch if the state is of an end.
    rest = epochs[epoch + 1] if ended else epochs[epoch][taken:]
    same_batches(rest, copies(resumed))
    same_batches(epochs[epoch + 1 + ended], copies(resumed))


@pytest.fixture(scope="module")
def epochs(table: gear.Table) -> list[list[Any]]:
    data = dataset(table, selector=gear.Uniform(False))
    return [copies(data) for _ in range(4)]


def test_stateful_dataloader(table: gear.Table, epochs: Any) -> None:
    for epoch, taken in itertools.product((0, 1), range(EPOCH + 2)):
        resumes_at(table, epochs, epoch, taken, 0)


@pytest.mark.parametrize(
    ("epoch", "taken", "persistent"),
    mostly_long(
        [(0, 0, True), (0, 1, False), (0, 4, False), (0, 5, True), (0, 6, False), (1, 3, True), (1, 6, True)],
        (0, 4, False),
        (1, 3, True),
    ),
)
def test_stateful_dataloader_with_workers(
    table: gear.Table, epochs: Any, epoch: int, taken: int, persistent: bool
) -> None:
    resumes_at(table, epochs, epoch, taken, 2, persistent_workers=persistent)


def test_stateful_dataloader_with_snapshots_now_and_then_and_uneven_workers(
    table: gear.Table, epochs: Any
) -> None:
    resumes_at(table, epochs, 0, 4, 2, selector=Uneven(False))
    resumes_at(table, epochs, 0, 4, 2, snapshot_every_n_steps=3)


def test_a_worker_refuses_the_state_of_one_among_others(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {**dataset(table).state_dict(), "workers": 2}
    monkeypatch.setattr(
        "gear_loader.iteration.get_worker_info", lambda: types.SimpleNamespace(id=1, num_workers=3)
    )
    with pytest.raises(
        SchemaError, match=r"one of 2 DataLoader workers .* here are 3\. Make .* num_workers=2"
    ):
        dataset(table).load_state_dict(state)


# Errors ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"seed": 6}, r"other options \(saved, here\): {'seed': \(5, 6\)}"),
        ({"batch_size": 4}, r"{'batch_size': \(3, 4\)}"),
        ({"anchor": "last"}, r"{'anchor': \('uniform', 'last'\)}"),
        ({"drop_last": True}, r"{'drop_last': \(False, True\)}"),
        (
            {"selector": gear.Uniform(False)},
            r"""{'selector': \("Uniform\(replacement=True, .*", "Uniform\(replacement=F""",
        ),
        (
            {"seed": 6, "batch_size": 4},
            r"{'seed': \(5, 6\), 'batch_size': \(3, 4\)}\. Batches would not continue; make the dataset with the saved",
        ),
    ],
)
def test_a_state_of_other_options_is_refused(table: gear.Table, options: Any, message: str) -> None:
    data = dataset(table)
    copies(data, 2)
    other = dataset(table, **options)
    before = other.state_dict()
    with pytest.raises(SchemaError, match=message):
        other.load_state_dict(data.state_dict())
    assert other.state_dict() == before


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": None}, "'epoch' of the state is None; expected an integer of at least 0"),
        ({"samples": "3"}, "'samples' of the state is '3'; expected an integer of at least 0"),
        ({"step": -1}, "'step' of the state is -1; expected an integer of at least 0"),
        (
            {"workers": 2},
            r"The state belongs to one of 2 DataLoader workers \(0: main process\); here are 0\. Make the loader",
        ),
        (
            {"config": 3},
            r"The state is {.*'config': 3}; expected a state_dict\(\) of a ReplayDataset",
        ),
    ],
)
def test_a_damaged_state_is_refused(table: gear.Table, change: Any, message: str) -> None:
    data = dataset(table)
    before = data.state_dict()
    with pytest.raises(SchemaError, match=message):
        data.load_state_dict({**before, **change})
    assert data.state_dict() == before


def test_what_is_no_state_is_refused(table: gear.Table) -> None:
    data = dataset(table)
    for other in (None, [1], {}, {"epoch": 3}):
        with pytest.raises(
            SchemaError, match=r"The state is .*; expected a state_dict\(\) of a ReplayDataset"
        ):
            data.load_state_dict(other)  # type: ignore[arg-type]
    state = data.state_dict()
    del state["step"], state["before"]
    keys = r"\['config', 'epoch', 'past', 'sampled_items', 'samples', 'workers'\]"
    message = rf"keys {keys}; missing: \['before', 'step'\]"
    with pytest.raises(SchemaError, match=message):
        data.load_state_dict(state)
