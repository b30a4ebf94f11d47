"""`repr` of the public objects in every state, and what completion offers."""

from __future__ import annotations

import threading
from typing import Any

import pytest
from dataset_common import episode, make_table, named_table

import gear_loader as gear


@pytest.mark.parametrize(
    "kind", [gear.Table, gear.Writer, gear.VectorWriter, gear.ReplayDataset, gear.ReplayDataModule]
)
def test_an_object_whose_constructor_has_failed_has_a_repr(kind: Any) -> None:
    assert repr(kind.__new__(kind)) == f"<{kind.__name__}, not opened>"


def test_sizes_and_state_of_a_table() -> None:
    with named_table("test-reprs", [], max_steps=5_000) as table:
        assert repr(table).startswith(
            f"<Table {table.name}, empty: 0 of 8 trajectories, 0 of 5,000 steps, 0 B in "
        )
        table.add(episode(0, 64))
        assert f"{table.name}: 1 of 8 trajectories, 64 of 5,000 steps, 1.5 KiB in a region of" in repr(table)
        lock = table._engine.region.lock
        done = threading.Event()
        lock.run(lambda: (threading.Thread(target=lambda: (repr(table), done.set())).start(), done.wait(30)))
        assert done.is_set(), "repr waited for the lock"
        table._engine.region.array("counters")[:] = -1
        assert repr(table).startswith("<Table")
        table._engine.region.array("counters")[:] = 0
    assert repr(table) == f"<Table {table.name}, closed>"


def test_a_writer_tells_what_it_has_written() -> None:
    steps = episode(0, 10)
    with make_table([], max_steps=100) as table:
        whole, chunks = table.writer(), table.writer(chunk_steps=4, overlap_steps=1)
        whole.append(steps)
        chunks.append(steps)
        assert repr(whole).startswith(
            "<Writer: 10 steps appended since the last commit, 0 trajectories committed; "
        )
        assert "1 steps appended" in repr(chunks)
        assert "3 trajectories committed, chunks of 4 steps, 1 overlapping; to <Table private: 3 of" in repr(
            chunks
        )
        whole.commit()
        chunks.discard()
        assert (whole.num_committed, chunks.num_committed) == (1, 3)
        assert "0 steps appended since the last commit, 1 trajectories" in repr(whole)
    assert "to <Table private, closed>" in repr(whole)


def test_writers_of_steps_and_of_environments_tell_what_they_have_written() -> None:
    steps = episode(0, 3)
    with make_table([], max_steps=100) as table:
        growing, many = table.writer(commit_every_step=True), table.writers(3)
        growing.append(steps)
        many.append(steps, active=[True, False, True])
        assert repr(growing).startswith("<Writer: 3 steps appended since the last commit, 1 trajectories")
        assert repr(many).startswith(
            "<VectorWriter of 3 environments: 2 steps appended since their last commits; to <Table private: 1 of"
        )


def test_a_dataset_and_a_data_module_tell_options_and_position() -> None:
    options: dict[str, Any] = {"batch_size": 4, "windows": gear.Window(2), "batches_per_epoch": 6}
    with make_table() as table:
        dataset = gear.ReplayDataset(table, **options, device="cpu")
        iterator = iter(dataset)
        next(iterator)
        text = repr(dataset)
        assert text.startswith(f"<ReplayDataset of {table!r}\n  batches of 4 rows on cpu, drawn by Uniform(")
        assert "observation: Window(length=2, offset=0" in text
        assert text.endswith("epoch 0, 1 of 6 batches delivered>")
        data = gear.ReplayDataModule(table, **options)
        assert "opened in setup()" in repr(data)
        data.setup()
        assert str(data) == repr(data)
        assert "train: epoch 0, 0 batches delivered\n  validation: epoch 0, 0 batches" in repr(data)
        del iterator
    assert "closed" in repr(dataset)
    assert "<ReplayDataModule of 'replay', opened in setup()" in repr(
        gear.ReplayDataModule("replay", **options)
    )


def test_completion_offers_what_is_public() -> None:
    assert [name for name in dir(gear) if not name.startswith("__")] == gear.__all__
    with make_table([3]) as table:
        offered = set(dir(table))
        assert {"add", "writer", "stats", "schema", "name"} <= offered
        assert not {"index", "region", "reader", "store", "columns"} & offered
        assert all(hasattr(table, name) for name in offered)
