"""How prefetching ends: by garbage collection in the middle of anything, in a forked child, with its dataset."""

from __future__ import annotations

import contextlib
import gc
import math
import os
import subprocess
import sys
import threading
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import make_table, named_table, nothing_left, open_tickets, prefetch_threads
from options_common import nested
from table_common import forked, forks
from waiting_common import wait_until

import gear_loader as gear
from gear_loader.errors import GearError
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import holds_any

PATIENCE = 120.0
SAMPLERS = [gear.Uniform(replacement=False), gear.Prioritized()]


def dataset_of(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    """A dataset that prefetches two batches of four rows, without end."""
    options = {"batches_per_epoch": math.inf, "prefetch": 2, "device": "cpu", **options}
    return gear.ReplayDataset(table, **nested({"batch_size": 4, "windows": gear.Window(2), **options}))


@contextlib.contextmanager
def _dropped(dataset: gear.ReplayDataset, held: contextlib.AbstractContextManager[Any]) -> Iterator[Any]:
    """Let the collector close an iterator of a dataset while this thread holds what its prefetch thread waits for."""
    batches = iter(dataset)
    batch = next(batches)
    (thread,) = prefetch_threads()
    # The thread is done with what it was asked for, so that it asks for the lock when it is asked for more.
    active = dataset._buffers.active
    assert active is not None
    active.settle()
    cycle: list[Any] = [batches]
    cycle.append(cycle)
    with held:
        asker = threading.Thread(target=next, args=(batches,))
        asker.start()
        asker.join()
        wait_until(active._orders.empty)  # it is at work on what it was asked for
        del batches, cycle, asker
        gc.collect()
        assert thread.is_alive(), "closing has waited for a thread that waits for this one"
        assert dataset._buffers.active is active
    yield batch
    wait_until(lambda: not thread.is_alive())
    nothing_left(dataset.table)


@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_an_iterator_that_is_collected_while_the_index_is_locked(sampler: Any) -> None:
    with make_table() as table:
        table._engine.region.lock.timeout = PATIENCE / 4
        dataset = dataset_of(table, sampler=sampler)
        with _dropped(dataset, table._engine.region.lock):
            pass
        table.check_valid()
        # The dataset goes on where such an iterator leaves it.
        batches = iter(dataset)
        assert torch.is_tensor(next(batches)["index"])
        batches.close()  # type: ignore[attr-defined]
        nothing_left(table)


def test_an_iterator_that_is_collected_while_priorities_are_locked() -> None:
    with make_table() as table:
        dataset = dataset_of(table, sampler=gear.Prioritized())
        with _dropped(dataset, dataset._selected().priorities.mutex):  # type: ignore[attr-defined]
            pass
        state = dataset.state_dict()
        assert len(state["priorities"]["leaves"]) == len(table)
        dataset.sample()
        nothing_left(table)


def test_what_was_drawn_ahead_comes_before_what_follows_a_collected_iterator() -> None:
    """An update that comes after the iterator was dropped does not overtake the draws that it had been asked for."""
    with make_table() as table:
        dataset = dataset_of(table, sampler=gear.Prioritized())
        with _dropped(dataset, table._engine.region.lock) as batch:
            dataset.update_priority(batch, torch.full((4,), 9.0))
            dataset.sample()
            assert dataset._buffers.active is None
            leaves = dataset.state_dict()["priorities"]["leaves"]
            assert float(leaves.max()) == pytest.approx(9.0 ** gear.Prioritized().alpha, rel=1e-5)


@contextlib.contextmanager
def _iterated(sampler: Any, **options: Any) -> Iterator[tuple[gear.Table, gear.ReplayDataset, Iterator[Any]]]:
    """A dataset in the middle of an iteration, whose thread has nothing to do."""
    with named_table("forked") as table:
        dataset = dataset_of(table, sampler=sampler, **options)
        batches = iter(dataset)
        for _ in range(3):
            next(batches)
        active = dataset._buffers.active
        assert active is not None
        active.settle()
        yield table, dataset, batches
        batches.close()  # type: ignore[attr-defined]
        nothing_left(table)


@forks
@pytest.mark.parametrize("sampler", SAMPLERS, ids=repr)
def test_a_forked_child_draws_by_itself(sampler: Any) -> None:
    with _iterated(sampler) as (table, dataset, batches):
        parent = os.getpid()

        def work() -> None:
            with pytest.raises(GearError, match=f"An iterator of process {parent} was continued in process"):
                next(batches)
            assert len(dataset.sample()["index"]) == 4
            state = dataset.state_dict()
            dataset.load_state_dict(state)
            if "priorities" in state:
                dataset.update_priority(dataset.sample(), torch.rand(4))
                dataset.state_dict()
            fresh = iter(dataset)
            assert len(next(fresh)["index"]) == 4
            fresh.close()  # type: ignore[attr-defined]
            nothing_left(table)

        forked(work)
        next(batches)


@forks
def test_what_a_forked_child_drops_stays_with_its_parent() -> None:
    with _iterated(gear.Prioritized()) as (table, dataset, batches):
        ticket = table._engine.reader().begin_read()
        held = [dataset, batches]

        def work() -> None:
            nonlocal dataset, batches
            ticket.end()
            batches.close()  # type: ignore[attr-defined]
            held.clear()
            del dataset, batches
            gc.collect()

        forked(work)
        assert open_tickets(table) == 1
        assert len(prefetch_threads()) == 1
        ticket.end()
        next(batches)


@forks
def test_a_fork_in_the_middle_of_a_draw_is_an_error_at_once() -> None:
    with make_table() as table:
        drawing, go_on = threading.Event(), threading.Event()

        def subset(numbers: Array) -> Array:
            if threading.current_thread().name == "gear-loader-prefetch" and holds_any():
                drawing.set()
                assert go_on.wait(PATIENCE)
            return np.ones(len(numbers), dtype=bool)

        dataset = dataset_of(table, sampler=gear.Prioritized(), subset=subset)
        batches = iter(dataset)
        asker = threading.Thread(target=next, args=(batches,))
        asker.start()
        assert drawing.wait(PATIENCE)

        def work() -> None:
            for call in (dataset.sample, dataset.state_dict):
                with pytest.raises(
                    GearError, match="was forked while its parent's prefetch thread was drawing"
                ):
                    call()

        try:
            forked(work)
        finally:
            go_on.set()
        asker.join()
        batches.close()  # type: ignore[attr-defined]


@forks
def test_a_forked_child_does_not_draw_from_shards() -> None:
    with make_table() as table, gear.distributed.Shards(table) as shards:
        dataset = dataset_of(table, prefetch=0)
        sharded = gear.ReplayDataset(shards, batch_size=4, windows=gear.Window(2), device="cpu", prefetch=0)
        sharded.sample()

        def work() -> None:
            dataset.sample()
            with pytest.raises(GearError, match="A dataset over Shards of process"):
                sharded.sample()

        forked(work)
        sharded.sample()


class _Owner:
    """Has a dataset whose subset is a method of its own, and an iterator of it: all reach one another."""

    def __init__(self, table: gear.Table, **options: Any) -> None:
        self.dataset = dataset_of(table, subset=self.keep, **options)
        self.batches = iter(self.dataset)
        next(self.batches)

    def keep(self, numbers: Array) -> Array:
        return numbers >= 0


def test_threads_of_datasets_that_reach_themselves_end() -> None:
    with make_table() as table:
        for sampler in (gear.Uniform(), *SAMPLERS):
            _Owner(table, sampler=sampler)
        assert prefetch_threads()
        gc.collect()
        wait_until(lambda: gc.collect() >= 0 and not prefetch_threads())
        nothing_left(table)


PROGRAM = """
import threading, time, torch
import gear_loader as gear

table = gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=100, max_trajectories=10)
table.extend([{"x": torch.arange(10)} for _ in range(10)])
dataset = gear.ReplayDataset(table, batch_size=4, windows=gear.Window(2), batches_per_epoch=10**9, prefetch=2)

def work():
    for _ in dataset:
        pass
    print("the loop has ended")

threading.Thread(target=work, daemon=True).start()
time.sleep(0.3)
"""


# On a loaded machine Python ends one daemon thread in ten that comes back from torch by unwinding its C++ frames, which
# may not be unwound.
UNWOUND = (-6, "", "terminate called without an active exception\n")


@pytest.mark.long
def test_a_daemon_thread_that_asks_for_batches_at_the_end_of_the_process() -> None:
    for _ in range(4):
        done = subprocess.run([sys.executable, "-c", PROGRAM], capture_output=True, text=True, timeout=60)
        if (found := (done.returncode, done.stdout, done.stderr)) != UNWOUND:
            break
    assert found == (0, "", "")


OPEN = """
import torch
import gear_loader as gear

table = gear.Table.create({"x": gear.Column(torch.int64)}, max_steps=100, max_trajectories=10)
table.extend([{"x": torch.arange(10)} for _ in range(10)])
one, two = (gear.ReplayDataset(table, batch_size=size, windows=gear.Window(2), batches_per_epoch=9, seed=size)
            for size in (4, 8192))
iterators = [iter(one), iter(two), iter(gear.Mixture({"a": (one, 0.5), "b": (two, 0.5)}, batch_size=4))]
for iterator in iterators:
    next(iterator)
"""


def test_iterators_that_are_open_at_the_end_of_the_process_end_without_a_word() -> None:
    done = subprocess.run([sys.executable, "-c", OPEN], capture_output=True, text=True, timeout=60)
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
