"""`ReplayDataset` in `DataLoader` workers: forked, spawned and persistent, beside a table that grows."""

from __future__ import annotations

import contextlib
import copy
import gc
import itertools
import math
import multiprocessing
import os
import pickle
import threading
import time
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from cases import mostly_long
from dataset_common import (
    SCHEMA,
    append_all,
    check_batch,
    contents,
    copies,
    drawn,
    episode,
    equal,
    make_table,
    named_table,
    nothing_left,
    open_tickets,
    same_batches,
    snapshot,
)
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.errors import PrivateTableError, SchemaError, TableEmptyError

pytestmark = [
    # Python 3.12 and newer warn when a process with threads forks, which is what a DataLoader does by default.
    pytest.mark.filterwarnings("ignore:This process .* is multi-threaded:DeprecationWarning"),
    # Advice that depends on the machine's number of cores.
    pytest.mark.filterwarnings("ignore:This DataLoader will create .* worker processes:UserWarning"),
]

LENGTHS = (5, 1, 3, 2, 4, 2, 1, 4, 6, 2, 3, 4, 2, 5)
WINDOW = gear.Window(4, -2)
SELECTORS = {
    "trajectories": gear.Uniform(),
    "steps": gear.Uniform(unit="step"),
    "trajectories once": gear.Uniform(replacement=False),
    "steps once": gear.Uniform(replacement=False, unit="step"),
}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    options = {"max_steps": 400, "max_trajectories": 100, "on_full": "evict_oldest"}
    with named_table("test-dataset-workers", LENGTHS, **options) as table:
        yield table
        gc.collect()
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table, **{"batch_size": 3, "windows": WINDOW, "device": "cpu", "seed": 5, **options}
    )


def epochs_of(count: int, data: gear.ReplayDataset) -> list[list[Any]]:
    """Copies of the batches of so many epochs, made in this process."""
    return [copies(data) for _ in range(count)]


def loader(data: gear.ReplayDataset, workers: int, **options: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=None, num_workers=workers, **options)


# Order ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", mostly_long(SELECTORS, "trajectories", "steps once"))
def test_the_number_of_workers_does_not_change_the_order(table: gear.Table, name: str) -> None:
    selector = SELECTORS[name]
    epochs = epochs_of(2, dataset(table, selector=selector))
    everything = contents(table)
    for workers in (1, 3):
        data = dataset(table, selector=selector, prefetch=workers, copy=workers == 1)
        batches = loader(data, workers)
        assert len(batches) == len(epochs[0])
        for epoch in epochs:
            found = [snapshot(batch) for batch in batches]
            same_batches(epoch, found)
            for batch in found:
                check_batch(batch, everything, dict.fromkeys(SCHEMA, WINDOW))


def test_more_workers_than_batches(table: gear.Table) -> None:
    expected = copies(dataset(table, batches_per_epoch=2))
    data = dataset(table, batches_per_epoch=2)
    same_batches(expected, list(loader(data, 4)))


def test_windows_for_each_column_cross_processes(table: gear.Table) -> None:
    windows = {"reward": gear.Window(3, -1, "head"), "action": gear.Window(1)}
    found = list(loader(dataset(table, windows=windows), 2))
    same_batches(copies(dataset(table, windows=windows)), found)
    for batch in found:
        check_batch(batch, contents(table), windows)


@pytest.mark.parametrize("persistent", [False, True])
def test_every_epoch_is_another(table: gear.Table, persistent: bool) -> None:
    epochs = epochs_of(6, dataset(table))
    data = dataset(table)
    batches = loader(data, 2, persistent_workers=persistent)
    for epoch in epochs[:3]:
        same_batches(epoch, list(batches))
    data.set_epoch(1)
    for epoch in epochs[1:3]:
        same_batches(epoch, list(batches))
    data.set_epoch(5)
    same_batches(epochs[5], list(batches))


def test_breaking_off_goes_on_with_the_next_epoch(table: gear.Table) -> None:
    epochs = epochs_of(3, dataset(table))
    batches = loader(dataset(table), 2, persistent_workers=True)
    same_batches(epochs[0][:2], list(itertools.islice(batches, 2)))
    # Both workers have begun by then: each delivered one batch.
    same_batches(epochs[1], list(batches))
    same_batches(epochs[2], list(batches))


def sleep_in_worker_1(worker: int) -> None:
    time.sleep(0.3 * worker)


def test_breaking_off_before_all_workers_have_begun(table: gear.Table) -> None:
    epochs = epochs_of(3, dataset(table, selector=gear.Uniform(False)))
    data = dataset(table, selector=gear.Uniform(False))
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
    same_batches(epochs[0], list(loader(data, 2)))
    same_batches(epochs[1], copies(data))
    same_batches(epochs[2], list(loader(data, 1, persistent_workers=True)))
    same_batches(epochs[3], list(loader(data, 0, collate_fn=snapshot)))
    same_batches(epochs[4], list(loader(data, 2)))


def test_ranks_with_workers(table: gear.Table) -> None:
    options = {"selector": gear.Uniform(False, "step"), "batch_size": 5}
    alone = copies(dataset(table, **options))
    runs = [list(loader(dataset(table, rank=rank, world_size=2, **options), 2)) for rank in range(2)]
    assert len(runs[0]) == len(runs[1]) == -(-len(alone) // 2)
    dealt = [batch for pair in zip(*runs, strict=True) for batch in pair]
    same_batches(alone, dealt[: len(alone)])


def test_an_endless_loader(table: gear.Table) -> None:
    expected = copies(dataset(table, batches_per_epoch=math.inf), 30)
    iterator = iter(loader(dataset(table, batches_per_epoch=math.inf), 2))
    same_batches(expected, [next(iterator) for _ in range(30)])


@contextlib.contextmanager
def iterating(batches: DataLoader[Any]) -> Iterator[Iterator[Any]]:
    """An iterator whose workers end with it. After an error torch's own clean-up waits 5 s for each of them."""
    iterator: Any = iter(batches)
    try:
        yield iterator
    finally:
        iterator._shutdown_workers()


def test_batches_from_workers_are_never_recycled(table: gear.Table) -> None:
    held = [(batch, snapshot(batch)) for batch in loader(dataset(table, batches_per_epoch=40, keep=1), 2)]
    assert all(equal(batch, before) for batch, before in held)
    assert all(batch["reward"].is_shared() for batch, _ in held)


@pytest.mark.parametrize("method", mostly_long(["forkserver", "spawn"], "forkserver"))
def test_started_workers(table: gear.Table, method: str) -> None:
    options = {"selector": gear.Uniform(False), "subset": odd}
    epochs, data = epochs_of(2, dataset(table, **options)), dataset(table, **options)
    batches = loader(data, 2, multiprocessing_context=method, persistent_workers=True)
    for epoch in epochs:
        same_batches(epoch, list(batches))
    assert len(epochs[0]) == 3


def odd(sequences: Any) -> Any:
    return sequences % 2 == 1


def test_iterating_here_before_the_workers_do(table: gear.Table) -> None:
    # Forked workers inherit buffers, a sampler and the iterator of an epoch that is under way.
    epochs, data = epochs_of(2, dataset(table)), dataset(table)
    mine = iter(data)
    first = snapshot(next(mine))
    data.sample()
    same_batches(epochs[1], list(loader(data, 2)))
    same_batches(epochs[0], [first, *(snapshot(batch) for batch in mine)])


# A table that changes -------------------------------------------------------------------------------


def test_workers_see_additions_between_epochs(table: gear.Table) -> None:
    batches = loader(dataset(table, selector=gear.Uniform(False)), 2, persistent_workers=True)
    before = set(table.indices().tolist())
    assert Counter(index for index, _ in drawn(batches)) == Counter(before)
    new = {table.add(episode(50 + i, 3)) for i in range(4)}
    assert Counter(index for index, _ in drawn(batches)) == Counter(before | new)
    table.remove(sorted(new))
    assert Counter(index for index, _ in drawn(batches)) == Counter(before)


def test_workers_see_additions_during_an_endless_epoch(table: gear.Table) -> None:
    iterator = iter(
        loader(dataset(table, selector=gear.Uniform(False, "step"), batches_per_epoch=math.inf), 2)
    )
    next(iterator)
    index = table.add(episode(70, 6))
    found = (batch for batch in itertools.islice(iterator, 400) if index in batch["index"].tolist())
    check_batch(next(found), contents(table), dict.fromkeys(SCHEMA, WINDOW))


def test_no_row_is_torn_while_the_main_process_evicts() -> None:
    options = {"max_steps": 60, "max_trajectories": 16, "on_full": "evict_oldest"}
    with named_table("test-dataset-workers-evict", (3,) * 16, **options) as table:
        written = {(int(index), 1): i for i, index in enumerate(table.indices())}
        _, generation, _ = table.reader().slot_states()
        iterator = iter(loader(dataset(table, batches_per_epoch=math.inf, batch_size=8), 2))
        rows = []
        deadline = time.monotonic() + 1.0
        for number in itertools.count(100):
            index = table.add(episode(number % 30_000, 3))
            written[index, int(generation[index])] = number % 30_000
            if number % 20 == 0:
                rows.append(next(iterator))
                if time.monotonic() > deadline:
                    break
        del iterator
        assert len(rows) > 20
        for batch in rows:
            for b in range(8):
                number = written[int(batch["index"][b]), int(batch["generation"][b])]
                mask, reward = batch["mask"][b], batch["reward"][b]
                steps = int(batch["anchor"][b]) + WINDOW.offset + torch.arange(WINDOW.length)
                assert (mask == ((steps >= 0) & (steps < 3))).all()
                assert (reward == (number * 4096 + steps) * mask).all()
                assert (batch["observation"][b, :, 0] == number * mask).all()
        table.check_valid()


def test_forking_while_another_thread_compiles() -> None:
    # The thread that prefetches loads or compiles the gather when it is first used; a worker needs the same lock.
    from numba.core.compiler_lock import global_compiler_lock

    compiling = threading.Event()

    def compile_for_a_while() -> None:
        with global_compiler_lock:
            compiling.set()
            time.sleep(0.2)

    def try_to_compile() -> None:
        os._exit(0 if global_compiler_lock._lock.acquire(timeout=5) else 1)

    thread = threading.Thread(target=compile_for_a_while)
    thread.start()
    compiling.wait()
    child = multiprocessing.get_context("fork").Process(target=try_to_compile)
    child.start()
    thread.join()
    child.join(30)
    assert child.exitcode == 0
    assert global_compiler_lock._lock.acquire(timeout=5)  # and here it is free again
    global_compiler_lock._lock.release()


# Errors ---------------------------------------------------------------------------------------------


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


def test_a_cuda_target(table: gear.Table) -> None:
    data = dataset(table)
    data.device = torch.device("cuda", 0)  # as "auto" chooses it where there is a GPU
    message = (
        "(?s)A DataLoader worker cannot gather for a GPU. Use num_workers=0 .* or device='cpu' in the dataset"
    )
    with iterating(loader(data, 2)) as iterator, pytest.raises(SchemaError, match=message):
        next(iterator)


def test_an_empty_table_in_a_worker() -> None:
    with named_table("test-dataset-workers-empty", ()) as table:
        data = dataset(table, batches_per_epoch=4)
        message = r"(?s)The table is empty: .* Add trajectories first"
        with iterating(loader(data, 2)) as iterator, pytest.raises(TableEmptyError, match=message):
            next(iterator)
        table.add(episode(0, 3))
        assert len(list(loader(data, 2))) == 4
        assert open_tickets(table) == 0


class Failing(gear.Uniform):
    def select(self, snapshot: Any, draw: Any) -> Any:
        if draw.step == 3:
            raise FloatingPointError("from a worker")
        return super().select(snapshot, draw)


def test_an_error_in_a_worker_reaches_the_consumer(table: gear.Table) -> None:
    found: list[Any] = []
    with (
        iterating(loader(dataset(table, selector=Failing()), 2)) as iterator,
        pytest.raises(FloatingPointError, match=r"(?s)from a worker"),
    ):
        append_all(iterator, found)
    same_batches(copies(dataset(table, batches_per_epoch=3)), found)


def test_the_limit_of_workers(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gear_loader.dataset.MAX_WORKERS", 1)
    message = r"(?s)more than 1 DataLoader workers; use fewer"
    with iterating(loader(dataset(table), 2)) as iterator, pytest.raises(SchemaError, match=message):
        list(iterator)
