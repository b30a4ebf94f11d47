"""`ReplayDataset` in `DataLoader` workers beside a table that grows, and states, from which it goes on to the bit."""

from __future__ import annotations

import copy
import gc
import itertools
import json
import math
import multiprocessing
import os
import pickle
import re
import threading
import time
import types
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import mostly_long
from dataset_common import (
    SAMPLERS,
    Failing,
    append_all,
    check_batch,
    contents,
    copies,
    drawn,
    episode,
    equal,
    iterating,
    make_table,
    named_table,
    nothing_left,
    open_tickets,
    prefetch_threads,
    same_batches,
    snapshot,
)
from options_common import nested
from torch.utils.data import DataLoader, get_worker_info

import gear_loader as gear
from gear_loader.errors import PrivateTableError, SchemaError, TableEmptyError

pytestmark = [
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # torchdata 0.11 still calls this function, which torch 2.13 has deprecated.
    pytest.mark.filterwarnings("ignore:'set_vital' is deprecated:UserWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]

LENGTHS = (5, 1, 3, 2, 4, 2, 1, 4, 6, 2, 3, 4, 2, 5)
WINDOW = gear.Window(4, -2)
EPOCH = 5  # batches


@pytest.fixture
def table() -> Iterator[gear.Table]:
    options = {"max_steps": 400, "max_trajectories": 100, "on_full": "evict_oldest"}
    with named_table("test-dataset-workers", LENGTHS, **options) as table:
        yield table
        if prefetch_threads() or open_tickets(table):
            gc.collect()
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    sampler = options.get("sampler", gear.Uniform())
    size = 10 if sampler.unit == "step" else 3
    told = {"batch_size": size, "windows": WINDOW, "device": "cpu", "seed": 5, **options}
    if sampler.replacement:
        told.setdefault("batches_per_epoch", EPOCH)
    return gear.ReplayDataset(table, **nested(told))


def epochs_of(count: int, data: gear.ReplayDataset) -> list[list[Any]]:
    """Copies of the batches of so many epochs, made in this process."""
    return [copies(data) for _ in range(count)]


def loader(data: gear.ReplayDataset, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, num_workers=workers, **options)


def through_json(state: Any) -> Any:
    """What comes back from a file."""
    return json.loads(json.dumps(state))


# Order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(SAMPLERS, "trajectories", "steps once"))
def test_the_number_of_workers_does_not_change_the_order(table: gear.Table, name: str) -> None:
    windows = {"reward": gear.Window(3, -1, "head"), "action": gear.Window(1), "observation": WINDOW}
    options = {"sampler": SAMPLERS[name], "windows": windows, "batches_per_epoch": 5}
    epochs = epochs_of(2, dataset(table, **options))
    everything = contents(table)
    for workers in (1, 6):
        data = dataset(table, prefetch=workers, copy=workers == 1, keep=1, **options)
        batches = loader(data, workers)
        assert len(batches) == len(epochs[0])
        for epoch in epochs:
            held = [(batch, snapshot(batch)) for batch in batches]
            found = [batch for batch, _ in held]
            same_batches(epoch, found)
            assert all(equal(batch, before) for batch, before in held)  # nothing is recycled
            for batch in found:
                check_batch(batch, everything, windows)
                assert batch["reward"].is_shared()


@pytest.mark.parametrize("persistent", [False, True])
def test_every_epoch_is_another(table: gear.Table, persistent: bool) -> None:
    epochs = epochs_of(6, dataset(table))
    data = dataset(table)
    batches = loader(data, 2, persistent_workers=persistent)
    same_batches(epochs[0][:2], list(itertools.islice(batches, 2)))  # broken off when both have begun
    for epoch in epochs[1:3]:
        same_batches(epoch, list(batches))
    for epoch in (1, 5):
        data.set_epoch(epoch)
        same_batches(epochs[epoch], list(batches))
    endless = loader(dataset(table, batches_per_epoch=math.inf), 2)
    same_batches(copies(dataset(table, batches_per_epoch=math.inf), 15), list(itertools.islice(endless, 15)))


def sleep_in_worker_1(worker: int) -> None:
    time.sleep(0.3 * worker)


def test_breaking_off_before_all_workers_have_begun(table: gear.Table) -> None:
    epochs = epochs_of(3, dataset(table, sampler=gear.Uniform(False)))
    data = dataset(table, sampler=gear.Uniform(False))
    same_batches(epochs[0][:1], list(itertools.islice(loader(data, 2, worker_init_fn=sleep_in_worker_1), 1)))
    # Worker 1 never drew anything; still both go on with the second epoch.
    same_batches(epochs[1], list(loader(data, 2)))
    same_batches(epochs[2], list(loader(data, 2)))


def test_the_same_seed_in_torch_is_not_the_same_epoch(table: gear.Table) -> None:
    # Workers recognise each other by the loader's random seed, which is the same here each time.
    alone = dataset(table)
    data = dataset(table)
    for _ in range(3):
        torch.manual_seed(0)
        same_batches(copies(alone), list(loader(data, 2)))


@pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda data: pickle.loads(pickle.dumps(data))])
def test_a_copy_of_a_dataset_counts_its_own_epochs(table: gear.Table, duplicate: Any) -> None:
    data = dataset(table)
    epochs = [copies(data) for _ in range(3)]
    data.set_epoch(1)
    batches = loader(duplicate(data), 2)
    same_batches(epochs[1], list(batches))
    same_batches(epochs[2], list(batches))
    same_batches(epochs[1], copies(data))


def test_epochs_are_counted_here_and_in_workers_together(table: gear.Table) -> None:
    epochs = epochs_of(5, dataset(table))
    data = dataset(table)
    mine = iter(data)
    first = snapshot(next(mine))
    data.sample()
    # Forked workers inherit buffers, a sampler and the iterator of an epoch that is under way.
    same_batches(epochs[1], list(loader(data, 2)))
    same_batches(epochs[0], [first, *(snapshot(batch) for batch in mine)])
    same_batches(epochs[2], list(loader(data, 1, persistent_workers=True)))
    same_batches(epochs[3], list(loader(data, 0, collate_fn=snapshot)))
    same_batches(epochs[4], list(loader(data, 2)))


@pytest.mark.parametrize("method", mostly_long(["forkserver", "spawn"], "forkserver"))
def test_started_workers(table: gear.Table, method: str) -> None:
    options = {"sampler": gear.Uniform(False), "subset": odd}
    epochs, data = epochs_of(2, dataset(table, **options)), dataset(table, **options)
    batches = loader(data, 2, multiprocessing_context=method, persistent_workers=True)
    for epoch in epochs:
        same_batches(epoch, list(batches))
    assert len(epochs[0]) == 3


def odd(sequences: Any) -> Any:
    return sequences % 2 == 1


def test_workers_see_additions_between_epochs(table: gear.Table) -> None:
    batches = loader(dataset(table, sampler=gear.Uniform(False)), 2, persistent_workers=True)
    before = set(table.indices().tolist())
    assert Counter(index for index, _ in drawn(batches)) == Counter(before)
    new = {table.add(episode(50 + i, 3)) for i in range(4)}
    assert Counter(index for index, _ in drawn(batches)) == Counter(before | new)
    table.remove(sorted(new))
    assert Counter(index for index, _ in drawn(batches)) == Counter(before)


def test_forking_while_another_thread_compiles() -> None:
    # The thread that prefetches loads or compiles the gather when it is first used; a worker needs the same lock.
    from numba.core.compiler_lock import global_compiler_lock

    compiling = threading.Event()

    def compile_for_a_while() -> None:
        with global_compiler_lock:
            compiling.set()
            time.sleep(0.2)

    def try_to_compile() -> None:
        os._exit(0 if global_compiler_lock._lock.acquire(timeout=30) else 1)

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    compiling.wait()
    child = multiprocessing.get_context("fork").Process(target=try_to_compile)
    child.start()
    thread.join()
    child.join(60)
    assert child.exitcode == 0
    assert global_compiler_lock._lock.acquire(timeout=30)  # and here it is free again
    global_compiler_lock._lock.release()


def test_a_private_table() -> None:
    with make_table(LENGTHS) as table:
        message = r"private table.*[Cc]reate it with a name, Table\.create\(\.\.\., name='replay'\)"
        with (
            iterating(loader(dataset(table), 1)) as iterator,
            pytest.raises(PrivateTableError, match=r"(?s)worker cannot read a " + message) as caught,
        ):
            next(iterator)
        assert "or use num_workers=0 (prefetch already works in the background)" in str(caught.value)
        with pytest.raises(PrivateTableError, match="(?s)" + message):
            next(iter(loader(dataset(table), 1, multiprocessing_context="spawn")))
        nothing_left(table)
        assert len(list(loader(dataset(table), 0))) == 5


def test_an_error_in_a_worker_reaches_the_consumer(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(data: gear.ReplayDataset, error: type[Exception], message: str) -> list[Any]:
        found: list[Any] = []
        with iterating(loader(data, 2)) as iterator, pytest.raises(error, match="(?s)" + message):
            append_all(iterator, found)
        return found

    found = fails(
        dataset(table, sampler=Failing(3, FloatingPointError("from a worker"))),
        FloatingPointError,
        "from a worker",
    )
    same_batches(copies(dataset(table, batches_per_epoch=3)), found)
    data = dataset(table)
    data.device = torch.device("cuda", 0)  # as "auto" chooses it where there is a GPU
    message = (
        "A DataLoader worker cannot gather for a GPU. Use num_workers=0 .* or device='cpu' in the dataset"
    )
    fails(data, SchemaError, message)
    with named_table("test-dataset-workers-empty", ()) as empty:
        data = dataset(empty, batches_per_epoch=4)
        fails(data, TableEmptyError, r"The table is empty: .* Add trajectories first")
        empty.add(episode(0, 3))
        assert len(list(loader(data, 2))) == 4
        assert open_tickets(empty) == 0
    monkeypatch.setattr("gear_loader.dataset.origin.MAX_WORKERS", 1)
    fails(dataset(table), SchemaError, "more than 1 DataLoader workers; use fewer")


# States -------------------------------------------------------------------------------------------


def test_loading_twice_while_iterating_and_set_epoch_after_loading(table: gear.Table) -> None:
    data = dataset(table, prefetch=3)
    epochs = [copies(data) for _ in range(4)]
    data.set_epoch(1)
    iterator = iter(data)
    next(iterator)
    time.sleep(0.02)
    state = data.state_dict()
    assert (state["epoch"], state["step"]) == (1, 1)  # what was prefetched does not count
    next(iterator)
    for _ in range(2):
        data.load_state_dict(state)
        same_batches(epochs[1][1:], copies(data))
        same_batches(epochs[2], copies(data))
    same_batches(epochs[1][2:3], [snapshot(next(iterator))])  # the old one goes on as if nothing had happened
    data.load_state_dict(state)
    data.set_epoch(3)
    same_batches(epochs[3], copies(data))


def test_resuming_an_endless_epoch_and_a_rank(table: gear.Table) -> None:
    for sampler in SAMPLERS.values():
        for more in ({"batches_per_epoch": math.inf}, {"rank": 2, "world_size": 3, "batches_per_epoch": 40}):
            options = {"sampler": sampler, **more}
            expected = copies(dataset(table, **options), 13)
            data = dataset(table, **options)
            copies(data, 7)
            resumed = dataset(table, **options)
            resumed.load_state_dict(through_json(data.state_dict()))
            same_batches(expected[7:], copies(resumed, 6))


@pytest.mark.parametrize("sampler", SAMPLERS.values(), ids=SAMPLERS)
def test_resuming_sample(table: gear.Table, sampler: gear.Uniform) -> None:
    whole, data, resumed = (dataset(table, sampler=sampler) for _ in range(3))
    expected = [snapshot(whole.sample(size)) for size in (None, 2, None, None, 4, None, None, None, None)]
    for size in (None, 2, None):
        data.sample(size)
    copies(data, 2)
    resumed.load_state_dict(through_json(data.state_dict()))
    same_batches(expected[3:], [snapshot(resumed.sample(size)) for size in (None, 4, None, None, None, None)])


# States of loaders --------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("workers", "taken"), mostly_long(itertools.product((0, 1, 3), (0, 2, 3)), (0, 2), (3, 3), sample=3)
)
def test_a_state_without_workers_goes_on_with_any_number_of_them(
    table: gear.Table, workers: int, taken: int
) -> None:
    for sampler in (gear.Uniform(), gear.Uniform(False, "step")):
        whole = dataset(table, sampler=sampler)
        epochs = [copies(whole) for _ in range(3)]
        data = dataset(table, sampler=sampler)
        copies(data)
        copies(data, taken)
        resumed = dataset(table, sampler=sampler)
        resumed.load_state_dict(data.state_dict())
        loader = DataLoader(resumed, batch_size=None, num_workers=workers)
        same_batches(epochs[1][taken:], copies(loader))
        same_batches(epochs[2], copies(loader))


class Uneven(gear.Uniform):
    """Worker 0 takes its time, so that others have long ended when it delivers its last batches."""

    def items(self, size: int, draw: Any) -> Any:
        info = get_worker_info()
        if info is not None and info.id == 0:
            time.sleep(0.03)
        return super().items(size, draw)


def stateful(
    table: gear.Table,
    workers: int,
    state: Any = None,
    *,
    sampler: gear.Uniform | None = None,
    **options: Any,
) -> Any:
    data = dataset(table, sampler=sampler or gear.Uniform(False))
    from torchdata.stateful_dataloader import StatefulDataLoader

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


@pytest.fixture
def epochs(table: gear.Table) -> list[list[Any]]:
    data = dataset(table, sampler=gear.Uniform(False))
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
    resumes_at(table, epochs, 0, 4, 2, sampler=Uneven(False))
    resumes_at(table, epochs, 0, 4, 2, snapshot_every_n_steps=3)


def test_a_worker_refuses_the_state_of_one_among_others(
    table: gear.Table, monkeypatch: pytest.MonkeyPatch
) -> None:
    state = {**dataset(table).state_dict(), "workers": 2}
    monkeypatch.setattr(
        "gear_loader.dataset.position.get_worker_info", lambda: types.SimpleNamespace(id=1, num_workers=3)
    )
    with pytest.raises(
        SchemaError, match=r"one of 2 DataLoader workers .* here are 3\. Make .* num_workers=2"
    ):
        dataset(table).load_state_dict(state)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"anchor": "last"}, r"other options \(saved, here\): {'anchor': \('uniform', 'last'\)}"),
        ({"drop_last": True}, r"{'drop_last': \(False, True\)}"),
        (
            {"sampler": gear.Uniform(False)},
            r"""{'sampler': \("Uniform\(replacement=True, .*", "Uniform\(rep.*=F""",
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


KEYS = ["config", "epoch", "past", "sampled_items", "samples", "workers"]


def test_a_state_that_calls_the_sampler_selector_loads(table: gear.Table) -> None:
    data, other = dataset(table), dataset(table)
    data.sample()
    state = data.state_dict()
    config = {"selector" if name == "sampler" else name: value for name, value in state["config"].items()}
    other.load_state_dict({**state, "config": config})
    assert other.state_dict() == state
    assert torch.equal(other.sample()["index"], data.sample()["index"])


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"epoch": None}, "'epoch' of the state is None; expected an integer of at least 0"),
        ({"samples": "3"}, "'samples' of the state is '3'; expected an integer of at least 0"),
        ({"step": -1}, "'step' of the state is -1; expected an integer of at least 0"),
        (
            {"workers": 2},
            r"belongs to one of 2 DataLoader workers \(0: main process\); here are 0\. Make the loader",
        ),
        ({"config": 3}, r"The state is {.*'config': 3, .*}; expected a state_dict\(\) of a ReplayDataset"),
        (["step", "before"], rf"keys {re.escape(str(KEYS))}; missing: \['before', 'step'\]"),
        *(
            (other, r"The state is .*; expected a state_dict\(\) of a ReplayDataset")
            for other in (None, 1, {})
        ),
    ],
)
def test_a_damaged_state_is_refused(table: gear.Table, change: Any, message: str) -> None:
    data = dataset(table)
    before = data.state_dict()
    counts = ("epoch", "before", "step", "past", "workers", "samples", "sampled_items")
    config = {"seed": 5, "batch_size": 3, "sampler": "Uniform(replacement=True, unit='trajectory')"}
    config |= {"anchor": "uniform", "drop_last": False}
    assert before == {**dict.fromkeys(counts, 0), "config": config}
    damaged = {**before, **change} if isinstance(change, dict) and change else change
    if isinstance(change, list):
        damaged = {key: value for key, value in before.items() if key not in change}
    with pytest.raises(SchemaError, match=message):
        data.load_state_dict(damaged)
    assert data.state_dict() == before
