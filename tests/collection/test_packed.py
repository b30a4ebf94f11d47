"""Packed batches: rows of different lengths one after another, against the trajectories that were stored."""

from __future__ import annotations

import contextlib
import itertools
import sys
import threading
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from dataset_common import nothing_left, same_batches, snapshot
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested, nested_table

import gear_loader as gear
from gear_loader.collection import output as outputs
from gear_loader.collection.batches import Batch
from gear_loader.dataset.table_options import check_final
from gear_loader.errors import CorruptTableError, SchemaError

SCHEMA = {
    "token": gear.Column(torch.int32),
    "hidden": gear.Column(torch.bfloat16, (3,)),
    "wide": gear.Column(torch.float64, (20,)),
    "prompt": gear.Column(torch.int64, (2,), per="trajectory"),
    "flag": gear.Column(torch.bool),
}
LENGTHS = (5, 1, 12, 8, 3, 20, 2, 7, 9, 4, 16, 6)


def episode(number: int, length: int) -> dict[str, torch.Tensor]:
    """Trajectory `number`: its values tell number and step."""
    steps = torch.arange(length)
    return {
        "token": (number * 1000 + steps).int(),
        "hidden": torch.stack([steps % 128, torch.full_like(steps, number % 128), -steps % 64], 1).bfloat16(),
        "wide": (number * 1000.0 + steps).double()[:, None] + torch.arange(20) / 64,
        "prompt": torch.tensor([number, length]),
        "flag": (steps + number) % 3 == 0,
    }


def make_table(lengths: Any = LENGTHS, **options: Any) -> gear.Table:
    """A table in which trajectory number i, of lengths[i] steps, has sequence number i."""
    lengths = list(lengths)
    sizes = {"max_steps": max(sum(lengths), 64), "max_trajectories": max(len(lengths), 8), "block_steps": 4}
    table = gear.Table.create(SCHEMA, **nested_table({**sizes, **options}))
    for number, length in enumerate(lengths):
        table.add(episode(number, length))
    return table


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given = {"batch_size": 4, "windows": gear.Whole(), "layout": "packed", "device": "cpu", "seed": 3}
    return gear.ReplayDataset(table, **nested({**given, **options}))


def check_packed(batch: Mapping[str, Any], offset: int | None = None, length: int = 0) -> list[int]:
    """Every row is a whole trajectory of `episode`, or its window; return the numbers of the trajectories."""
    starts, rows = batch["cu_seqlens"].tolist(), len(batch["index"])
    assert batch["cu_seqlens"].dtype == batch["position"].dtype == torch.int32
    assert len(starts) == rows + 1
    assert starts[0] == 0
    assert batch["max_seqlen"] == max(np.diff(starts))
    numbers = []
    for b in range(rows):
        number, steps = batch["prompt"][b].tolist()
        low, high = 0, steps
        if offset is not None:
            low = max(int(batch["anchor"][b]) + offset, 0)
            high = max(min(int(batch["anchor"][b]) + offset + length, steps), low)
        part, expected = slice(starts[b], starts[b + 1]), episode(number, steps)
        assert starts[b + 1] - starts[b] == high - low
        assert batch["position"][part].tolist() == list(range(low, high))
        for name in ("token", "hidden", "wide", "flag"):
            assert batch[name].dtype == SCHEMA[name].dtype
            assert torch.equal(batch[name][part], expected[name][low:high]), (name, number)
        numbers.append(number)
    for name in ("token", "hidden", "wide", "flag", "position"):
        assert len(batch[name]) == starts[-1]
    return numbers


@given(
    lengths=st.lists(st.integers(1, 40), min_size=1, max_size=12),
    block_steps=st.integers(1, 9),
    packed=st.booleans(),
    anchor=st.sampled_from(["uniform", "first", "last"]),
    window=st.none() | st.tuples(st.integers(1, 50), st.integers(-45, 45)),
    batch_size=st.integers(1, 20),
)
def test_any_lengths_blocks_and_windows(
    lengths: list[int], block_steps: int, packed: bool, anchor: Any, window: Any, batch_size: int
) -> None:
    whole = window is None
    windows = {
        name: (gear.Whole() if whole else gear.Window(*window))
        for name in ("flag", "hidden", "token", "wide")
    }
    with make_table(lengths, block_steps=block_steps, packed=packed) as table:
        data = dataset(
            table,
            windows={"prompt": None, **windows},
            anchor="first" if whole else anchor,
            batch_size=batch_size,
            prefetch=0,
        )
        for batch in itertools.islice(data, 2):
            numbers = check_packed(batch, *(() if whole else (window[1], window[0])))
            assert len(numbers) == min(batch_size, len(batch["index"]))


def test_a_batch_that_is_kept_stays_as_it_is(table: gear.Table) -> None:
    kept, as_delivered = [], []
    for batch in itertools.islice(dataset(table, batches_per_epoch=20), 12):
        if len(kept) < 3:
            kept.append(batch)
            as_delivered.append(snapshot_of(batch))
    for batch, expected in zip(kept, as_delivered, strict=True):
        assert snapshot_of(batch).keys() == expected.keys()
        same_batches([snapshot_of(batch)], [expected])


def snapshot_of(batch: Mapping[str, Any]) -> dict[str, Any]:
    """A copy of the tensors of a batch."""
    return snapshot({key: value for key, value in batch.items() if key != "max_seqlen"})


@pytest.mark.parametrize("failing", range(6))
def test_memory_that_could_not_grow_is_as_it_was(monkeypatch: pytest.MonkeyPatch, failing: int) -> None:
    allocate, calls = torch.empty, itertools.count()

    def empty(*shape: Any, **options: Any) -> torch.Tensor:
        if next(calls) == failing:
            raise MemoryError
        return allocate(*shape, **options)

    with make_table([3] * 8, max_steps=4000) as table:
        data = dataset(table, sampler=gear.Fifo(), windows=GROWING, prefetch=0, sample_info=True)
        for _ in range(6):
            data.sample()
        fill_again(table, [400] * 8)
        monkeypatch.setattr(torch, "empty", empty)
        with contextlib.suppress(MemoryError):
            data.sample()
        assert next(calls) > failing
        monkeypatch.setattr(torch, "empty", allocate)
        fill_again(table, [3, 1, 2, 3])
        for _ in range(3):
            batch = data.sample()
            check_packed(batch)
            assert torch.equal(batch["half"], batch["wide"].half())
        nothing_left(table)


GROWING: dict[str, Any] = {
    **{name: gear.Window(1) if name == "prompt" else gear.Whole() for name in SCHEMA},
    "half": gear.Whole("wide", torch.float16),
}


def fill_again(table: gear.Table, lengths: list[int]) -> None:
    """Other trajectories in place of those of a table."""
    table.clear()
    for number, length in enumerate(lengths):
        table.add(episode(number, length))


def test_memory_is_reused(table: gear.Table) -> None:
    data = dataset(table, batches_per_epoch=40, prefetch=1)
    places = [batch["token"].data_ptr() for batch in data]
    assert len(set(places[10:])) <= 5


@pytest.mark.parametrize("output", ["dict", "tensordict"])
@pytest.mark.parametrize("sizes", [{"batch_size": 5}, {"max_steps": 30, "batch_size": None}])
def test_whole_trajectories_padded_to_the_longest_of_a_batch(
    table: gear.Table, sizes: dict[str, Any], output: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    options = {"sampler": gear.Uniform(replacement=False), "anchor": "first", **sizes}
    if output == "tensordict":
        import tensordict_stand_in

        monkeypatch.setitem(sys.modules, "tensordict", tensordict_stand_in)
    flat = copies_of(dataset(table, **options))
    data = dataset(table, layout="padded", output=output, **options)
    for batch, expected in zip(data, flat, strict=True):
        lengths = expected["cu_seqlens"].diff()
        mask = torch.arange(int(lengths.max())) < lengths[:, None]
        assert torch.equal(batch["mask"], mask)
        for name in ("token", "hidden", "wide", "flag"):
            assert batch[name].shape[:2] == mask.shape
            assert torch.equal(batch[name][mask], expected[name])
            assert not batch[name][~mask].any()
        for name in ("prompt", "index", "anchor", "generation"):
            assert torch.equal(batch[name], expected[name])
        assert not {"cu_seqlens", "max_seqlen", "position"} & set(batch.keys())


def copies_of(data: gear.ReplayDataset) -> list[dict[str, Any]]:
    return [snapshot_of(batch) for batch in data]


def test_a_growing_trajectory_is_read_up_to_one_step(table: gear.Table) -> None:
    schema = {"token": gear.Column(torch.int32)}
    with gear.Table.create(schema, max_steps=4000, max_trajectories=8, block_steps=4) as growing:
        stop = threading.Event()

        def write() -> None:
            with growing.writer(commit_every_step=True) as writer:
                for step in range(3000):
                    if stop.is_set():
                        return
                    writer.append(token=torch.tensor(step, dtype=torch.int32))

        writer = threading.Thread(target=write)
        writer.start()
        try:
            data = dataset(growing, batch_size=3) if wait_for(growing) else None
            assert data is not None
            for batch in itertools.islice(data, 100):
                assert batch["token"].tolist() == batch["position"].tolist()
        finally:
            stop.set()
            writer.join()


def wait_for(table: gear.Table) -> bool:
    for _ in range(10_000):
        if len(table):
            return True
        threading.Event().wait(0.001)
    return False


def test_a_corrupt_block_is_an_error(table: gear.Table) -> None:
    data = dataset(table, prefetch=0)
    table._engine.region.array("block_ids")[:] = 1 << 20
    with pytest.raises(CorruptTableError, match="windows of a batch have slots or blocks that do not exist"):
        next(iter(data))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"layout": "flat"}, "layout is 'flat'; expected 'padded', 'packed', 'jagged' or 'tree'"),
        ({"windows": {"token": gear.Whole(), "wide": gear.Window(3)}}, "of a packed batch differ"),
        ({"windows": {"position": gear.Whole(column="token")}}, "name 'position', which is a key of packed"),
        ({"windows": {"prompt": gear.Whole(), "token": gear.Whole()}}, "has one value per trajectory"),
        ({"anchor": "last"}, "anchor='last' and sampler=None were given with whole trajectories"),
        ({"output": "tensordict"}, "output='tensordict' was given with layout='packed'"),
        ({"batch_size": None}, "batch_size is None; expected an integer"),
        ({"windows": {"end": gear.Whole("token", final=True), "wide": gear.Whole()}}, "differ in final"),
        ({"windows": {"final": gear.Whole("token", final=True)}}, "'final', which is a key"),
    ],
)
def test_options_that_do_not_fit(table: gear.Table, options: dict[str, Any], message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        gear.ReplayDataset(
            table,
            **nested(
                {"batch_size": 4, "windows": gear.Whole(), "layout": "packed", "device": "cpu", **options}
            ),
        )


def test_final_steps_where_they_do_not_fit() -> None:
    with pytest.raises(SchemaError, match="Whole final is 1; expected True or False"):
        gear.Whole(final=1)  # type: ignore[arg-type]
    windows = {"token": gear.Whole(final=True)}
    message = r"^Whole\(final=True\) was given with device='cuda:1'; expected a Table and device='cpu'"
    with pytest.raises(SchemaError, match=message):
        check_final(windows, shards=None, device=torch.device("cuda:1"))


@pytest.mark.parametrize("most", [3, 5, 6, 30])
def test_final_steps_of_trajectories_that_are_cut(most: int) -> None:
    schema = {"x": gear.Column(torch.int64, final=True), "y": gear.Column(torch.float32)}
    with gear.Table.create(schema, max_steps=100, max_trajectories=9) as table:
        for length in (5, 2, 6):
            table.add({"x": torch.arange(length), "y": torch.ones(length)}, final={"x": length})
        windows = dict.fromkeys(schema, gear.Whole(final=True))
        cut = {"batch_size": None, "max_steps": most, "too_long": "truncate", "sampler": gear.Fifo(False)}
        found = []
        for batch in dataset(table, windows=windows, **cut):
            assert len(batch["x"]) <= most
            for begin, end in itertools.pairwise(batch["cu_seqlens"].tolist()):
                assert batch["x"][begin:end].tolist() == list(range(end - begin))
                found.append(end - begin)
            assert batch["final"].tolist() == [bool(most > (5, 2, 6)[i]) for i in batch["index"].tolist()]
            last = batch["cu_seqlens"][1:][batch["final"]].long() - 1
            assert not batch["y"][last].any()  # no final step of this column
        assert sorted(found) == sorted(min(length + 1, most) for length in (5, 2, 6))


def test_padding_by_torch_is_that_of_the_compiled_loop(table: gear.Table) -> None:
    """What pads on a GPU, here on the CPU."""
    names = ["token", "wide"]
    for batch in itertools.islice(dataset(table, batch_size=5), 3):
        expected, shown = outputs.as_padded(batch, names), Batch()
        outputs._place(batch, names, batch["cu_seqlens"].diff(), shown)
        for name in names:
            assert torch.equal(shown[name], expected[name])
