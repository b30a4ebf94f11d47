"""`Table.sample`: the batches of a `ReplayDataset` by a single call."""

from __future__ import annotations

import concurrent.futures
import gc
import weakref

import pytest
import torch
from dataset_common import chi_square, chi_square_limit, equal, make_table

import gear_loader as gear
from gear_loader.errors import SchemaError, TableClosedError, TableEmptyError


def test_steps_are_equally_likely() -> None:
    with make_table((200, 10, 30)) as table:
        counts = torch.zeros(3, 200)
        for _ in range(30):
            batch = table.sample(800)
            assert batch["mask"].all()
            counts.index_put_((batch["index"], batch["anchor"]), torch.ones(800), accumulate=True)
        found = counts[counts > 0]
        assert len(found) == 240
        assert chi_square(found.numpy(), 100.0) < chi_square_limit(239)


def test_it_is_the_dataset_with_the_same_options() -> None:
    with make_table() as table:
        for windows in (gear.Whole(), gear.Window(3), {"observation": gear.Window(2, -1)}):
            dataset = gear.ReplayDataset(table, batch_size=4, windows=windows, seed=5, device="cpu")
            for _ in range(3):
                assert equal(table.sample(4, windows=windows, seed=5, device="cpu"), dataset.sample())


def test_draws_go_on_from_call_to_call_whatever_is_asked_for_between() -> None:
    with make_table() as table:
        first = table.sample(64, device="cpu")["anchor"]
        table.sample(4, windows=gear.Whole(), device="cpu")
        assert not torch.equal(first, table.sample(64, device="cpu")["anchor"])
        assert len(table.sample(3, device="cpu")["anchor"]) == 3


def test_several_threads_draw_different_batches() -> None:
    with make_table() as table, concurrent.futures.ThreadPoolExecutor(4) as pool:
        found = list(pool.map(lambda _: table.sample(64, device="cpu")["anchor"].tolist(), range(40)))
    assert len({tuple(each) for each in found}) == 40


def test_a_table_that_was_drawn_from_is_freed() -> None:
    table = make_table()
    table.sample(2)
    gone = weakref.ref(table)
    table.close()
    with pytest.raises(TableClosedError):
        table.sample(2)
    del table
    gc.collect()
    assert gone() is None


def test_wrong_calls() -> None:
    with make_table(()) as table:
        with pytest.raises(TableEmptyError):
            table.sample(2)
        with pytest.raises(SchemaError, match="batch_size"):
            table.sample(0)
        with pytest.raises(SchemaError, match="windows"):
            table.sample(2, windows=3)
