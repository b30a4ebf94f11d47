"""`ReplayDataset` in one process: windows, order, buffers, errors, tables that change meanwhile, `sample`."""

from __future__ import annotations

import gc
import itertools
import math
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from dataset_common import (
    LENGTHS,
    SCHEMA,
    append_all,
    check_batch,
    chi_square,
    chi_square_limit,
    contents,
    copies,
    drawn,
    episode,
    equal,
    make_table,
    nothing_left,
    open_tickets,
    prefetch_threads,
    same_batches,
    snapshot,
)
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.errors import SchemaError, TableClosedError, TableEmptyError

WINDOW = gear.Window(length=6, offset=-3)
STEPS = sum(LENGTHS)
SELECTORS = {
    "trajectories": gear.Uniform(),
    "steps": gear.Uniform(unit="step"),
    "trajectories once": gear.Uniform(replacement=False),
    "steps once": gear.Uniform(replacement=False, unit="step"),
}


@pytest.fixture
def table() -> Iterator[gear.Table]:
    with make_table() as table:
        yield table
        nothing_left(table)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        table, **{"batch_size": 4, "windows": WINDOW, "device": "cpu", "seed": 3, **options}
    )


@pytest.fixture(params=["thread", "stream"])
def way(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """How batches are prepared ahead: by a thread, or by the caller as for a GPU (here with nothing asynchronous)."""
    if request.param == "stream":
        monkeypatch.setattr(Prefetcher, "_ahead_in_thread", Prefetcher._ahead_on_stream)
    return request.param


# ---------------------------------------------------------------- windows

WINDOWS = [
    gear.Window(length, offset, pad)
    for length, offset in [
        (1, 0),
        (1, -1),
        (1, 40),
        (3, -1),
        (6, -3),
        (20, -19),
        (20, 0),
        (25, -12),
        (4, 2),
        (3, -40),
    ]
    for pad in ("keep", "head", "tail")
]


@pytest.mark.parametrize("window", WINDOWS, ids=lambda w: f"{w.length}@{w.offset}-{w.pad}")
@pytest.mark.parametrize("anchor", mostly_long(["uniform", "first", "last"], "uniform"))
def test_windows_are_what_the_trajectories_say(table: gear.Table, window: gear.Window, anchor: Any) -> None:
    everything = contents(table)
    data = dataset(table, windows=window, anchor=anchor, batch_size=7)
    for batch in itertools.islice(data, 2):
        check_batch(batch, everything, dict.fromkeys(SCHEMA, window))
        lengths = [len(everything[index]["reward"]) for index in batch["index"].tolist()]
        if anchor == "first":
            assert batch["anchor"].tolist() == [0] * 7
        elif anchor == "last":
            assert batch["anchor"].tolist() == [length - 1 for length in lengths]
        else:
            assert all(0 <= a < n for a, n in zip(batch["anchor"].tolist(), lengths, strict=True))


def test_the_worked_example_of_window() -> None:
    with make_table([3]) as table:
        batch = dataset(table, windows=gear.Window(4, -1), anchor="first", batch_size=1).sample()
        assert batch["reward"].tolist() == [[0, 0, 1, 2]]
        assert batch["mask"].tolist() == [[False, True, True, True]]
        for pad, rewards, mask in [
            ("keep", [0, 0, 1, 2], [0, 1, 1, 1]),
            ("tail", [0, 1, 2, 0], [1, 1, 1, 0]),
        ]:
            window = gear.Window(4, -3, pad)  # type: ignore[arg-type]
            batch = dataset(table, windows=window, anchor="last", batch_size=1).sample()
            assert batch["reward"].tolist() == [rewards]
            assert batch["mask"].tolist() == [[bool(m) for m in mask]]


def test_a_window_for_each_column_with_a_mask_for_each(table: gear.Table) -> None:
    windows = {
        "reward": gear.Window(9, -2, "head"),
        "observation": gear.Window(1, 1),
        "action": gear.Window(5, -4, "tail"),
    }
    data = dataset(table, windows=windows, batch_size=9)
    for batch in itertools.islice(data, 3):
        assert isinstance(batch["mask"], dict)
        assert list(batch["mask"]) == ["observation", "action", "reward"]  # the schema's order
        check_batch(batch, contents(table), windows)


def test_equal_windows_have_one_mask_whichever_way_they_are_given(table: gear.Table) -> None:
    one = dataset(table)
    each = dataset(table, windows=dict.fromkeys(SCHEMA, WINDOW))
    same_batches(copies(one), copies(each))
    assert isinstance(each.sample()["mask"], torch.Tensor)


@pytest.mark.parametrize(
    "options",
    [
        {"columns": ["reward"]},
        {"columns": ["reward", "observation"]},
        {"windows": {"action": WINDOW}},
        {"windows": {"action": WINDOW, "reward": gear.Window(2)}, "columns": ["reward", "action"]},
    ],
)
def test_a_subset_of_columns(table: gear.Table, options: Any) -> None:
    data = dataset(table, **options)
    names = options.get("columns") or options["windows"]
    windows = options.get("windows") or dict.fromkeys(names, WINDOW)
    whole = copies(dataset(table))
    for batch, full in zip(copies(data), whole, strict=True):
        check_batch(batch, contents(table), windows)
        assert all(torch.equal(batch[key], full[key]) for key in ("index", "anchor", "generation"))


def test_every_dtype_comes_out_as_it_went_in() -> None:
    dtypes = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
    dtypes += [torch.float16, torch.bfloat16, torch.float32, torch.float64]
    schema = {str(dtype): gear.Column(dtype, (3,)) for dtype in dtypes}
    random = torch.Generator().manual_seed(0)

    def column(dtype: torch.dtype, length: int) -> torch.Tensor:
        if dtype == torch.bool:
            return torch.randint(2, (length, 3), generator=random) == 1
        # Arbitrary bits: NaNs and infinities too.
        return torch.randint(256, (length, 3 * dtype.itemsize), generator=random, dtype=torch.uint8).view(
            dtype
        )

    with gear.Table.create(schema, max_steps=200, max_trajectories=20, block_steps=8) as table:
        table.extend(
            [{name: column(c.dtype, length) for name, c in schema.items()} for length in (1, 7, 8, 9, 30)]
        )
        for pad in ("keep", "head", "tail"):
            window = gear.Window(11, -6, pad)  # type: ignore[arg-type]
            data = dataset(table, windows=window, batch_size=16)
            check_batch(data.sample(), contents(table), dict.fromkeys(schema, window))


def test_a_table_of_one_step() -> None:
    with make_table([1]) as table:
        for selector in SELECTORS.values():
            batches = copies(dataset(table, selector=selector))
            assert len(batches) == 1
            check_batch(batches[0], contents(table), dict.fromkeys(SCHEMA, WINDOW))


def test_generation_tells_who_has_the_index(table: gear.Table) -> None:
    _, generation, _ = table.reader().slot_states()
    batch = dataset(table, batch_size=50).sample()
    assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
    reused = int(table.indices()[0])
    before = int(generation[reused])
    table.remove(reused)
    assert table.add(episode(77, 4)) == reused
    batch = dataset(table, batch_size=200).sample()
    rows = batch["index"] == reused
    assert rows.any()
    assert (batch["generation"][rows] == before + 1).all()


# ---------------------------------------------------------------- order and coverage


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_prefetch_and_copy_do_not_change_the_order(
    table: gear.Table, selector: gear.Uniform, way: str
) -> None:
    expected: list[dict[str, Any]] | None = None
    for prefetch, copy, keep in itertools.product((0, 1, 2, 3), (False, True), (1, 2, 5)):
        data = dataset(table, selector=selector, prefetch=prefetch, copy=copy, keep=keep)
        found = copies(data) + copies(DataLoader(data, batch_size=None))
        assert len(found) == 2 * len(data)
        if expected is None:
            expected = found
        same_batches(expected, found)


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_seeds_and_epochs_are_different_draws(table: gear.Table, selector: gear.Uniform) -> None:
    runs = {
        (seed, epoch): tuple(drawn(batches))
        for seed in (0, 1, -1, 2**63)
        for data in [dataset(table, selector=selector, seed=seed)]
        for epoch, batches in enumerate([copies(data), copies(data), copies(data)])
    }
    assert len(set(runs.values())) == len(runs)


@pytest.mark.parametrize(
    ("unit", "batch_size", "drop_last"),
    [
        (unit, size, drop_last)
        for unit, items in (("trajectory", len(LENGTHS)), ("step", STEPS))
        for size in (1, 4, 5, 12, 13, 93)
        for drop_last in (False, True)
        if size <= items or not drop_last  # else it is refused; see the errors
    ],
)
def test_an_epoch_without_replacement(table: gear.Table, unit: Any, batch_size: int, drop_last: bool) -> None:
    items = len(LENGTHS) if unit == "trajectory" else STEPS
    data = dataset(
        table,
        selector=gear.Uniform(False, unit),
        batch_size=batch_size,
        drop_last=drop_last,
        anchor="uniform",
    )
    for _ in range(2):
        batches = copies(data)
        sizes = [len(batch["index"]) for batch in batches]
        full, rest = divmod(items, batch_size)
        assert sizes == [batch_size] * full + ([rest] if rest and not drop_last else [])
        assert len(data) == len(sizes)
        seen = Counter(row[0] if unit == "trajectory" else row for row in drawn(batches))
        assert set(seen.values()) == {1}
        assert len(seen) == sum(sizes)
        for batch in batches:
            check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))


@pytest.mark.parametrize("world", [2, 3, 5])
@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_ranks_interleave_the_batches_of_one(table: gear.Table, unit: Any, world: int) -> None:
    for replacement in (True, False):
        options = {"selector": gear.Uniform(replacement, unit), "batch_size": 5}
        alone = copies(dataset(table, **options))
        ranks = [dataset(table, rank=rank, world_size=world, **options) for rank in range(world)]
        runs = [copies(rank) for rank in ranks]
        length = -(-len(alone) // world)
        assert [len(rank) for rank in ranks] == [len(run) for run in runs] == [length] * world
        dealt = [runs[i % world][i // world] for i in range(length * world)]
        same_batches(alone, dealt[: len(alone)])
        # Padding: full batches of trajectories that exist, so that every rank takes as many steps.
        for batch in dealt[len(alone) :]:
            check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("replacement", [True, False])
def test_batches_hold_every_item_equally_often(table: gear.Table, unit: Any, replacement: bool) -> None:
    data = dataset(table, selector=gear.Uniform(replacement, unit), batch_size=31, columns=["reward"])
    position = {int(index): i for i, index in enumerate(table.indices())}
    exists = np.arange(max(LENGTHS)) < np.array(LENGTHS)[:, None]
    observed = np.zeros(exists.shape)
    count = 0
    while count < 20_000:
        for batch in data:
            np.add.at(observed, ([position[i] for i in batch["index"].tolist()], batch["anchor"].numpy()), 1)
            count += len(batch["index"])
    assert (observed[~exists] == 0).all()
    lengths = np.array(LENGTHS)[:, None]
    expected = (exists / lengths / len(LENGTHS) if unit == "trajectory" else exists / STEPS) * count
    if not replacement:
        # An epoch covers all items: nothing is left to chance but the anchors within trajectories.
        of_items = observed.sum(1) if unit == "trajectory" else observed[exists]
        assert len(set(of_items.tolist())) == 1
    if replacement or unit == "trajectory":
        assert chi_square(observed[exists], expected[exists]) < chi_square_limit(STEPS - 1)


def test_batches_per_epoch_and_endless(table: gear.Table) -> None:
    data = dataset(table, batches_per_epoch=7)
    assert len(data) == 7
    assert len(copies(data)) == len(copies(data)) == 7
    endless = dataset(table, batches_per_epoch=math.inf)
    with pytest.raises(TypeError, match=r"no length: batches_per_epoch is math\.inf"):
        len(endless)
    found = copies(endless, 40)
    same_batches(copies(dataset(table, batches_per_epoch=40)), found)
    assert len(set(map(tuple, (drawn([batch]) for batch in found)))) == 40
    loader = DataLoader(endless, batch_size=None)
    with pytest.raises(TypeError, match="no length"):
        len(loader)
    assert len(copies(loader, 3)) == 3


@pytest.mark.parametrize("unit", ["trajectory", "step"])
@pytest.mark.parametrize("batches", [40, math.inf])
def test_a_longer_epoch_without_replacement_is_several_passes(
    table: gear.Table, unit: Any, batches: float
) -> None:
    data = dataset(table, selector=gear.Uniform(False, unit), batch_size=5, batches_per_epoch=batches)
    items = len(LENGTHS) if unit == "trajectory" else STEPS
    a_pass = -(-items // 5)
    found = copies(data, 2 * a_pass)
    orders = [drawn(found[:a_pass]), drawn(found[a_pass:])]
    for order in orders:
        keys = [row[0] if unit == "trajectory" else row for row in order]
        assert len(keys) == len(set(keys)) == items
    assert orders[0] != orders[1]
    assert [row[0] for row in orders[0]] != [row[0] for row in orders[1]]


def test_an_iterator_that_is_only_made_uses_up_no_epoch(table: gear.Table) -> None:
    data = dataset(table)
    expected = copies(dataset(table))
    iter(data)
    iter(data)
    same_batches(expected, copies(data))


def test_set_epoch(table: gear.Table) -> None:
    data = dataset(table)
    epochs = [copies(data) for _ in range(3)]
    for epoch in (1, 0, 2):
        data.set_epoch(epoch)
        same_batches(epochs[epoch], copies(data))
    data.set_epoch(1)
    copies(data)
    same_batches(epochs[2], copies(data))
    with pytest.raises(SchemaError, match="epoch is -1; expected"):
        data.set_epoch(-1)
    with pytest.raises(SchemaError, match=r"epoch is 1\.5; expected"):
        data.set_epoch(1.5)  # type: ignore[arg-type]


def test_breaking_off_goes_on_with_the_next_epoch(table: gear.Table) -> None:
    data = dataset(table)
    epochs = [copies(dataset_) for dataset_ in [data] * 3]
    data.set_epoch(0)
    same_batches(epochs[0][:1], copies(data, 1))
    same_batches(epochs[1], copies(data))
    same_batches(epochs[2], copies(data))


def test_two_iterators_at_once_are_two_epochs(table: gear.Table) -> None:
    data = dataset(table, keep=1, batches_per_epoch=20)
    epochs = [copies(data), copies(data)]
    data.set_epoch(0)
    found: tuple[list[Any], list[Any]] = ([], [])
    for one, other in zip(data, data, strict=True):
        found[0].append(snapshot(one))
        found[1].append(snapshot(other))
    same_batches(epochs[0], found[0])
    same_batches(epochs[1], found[1])


def test_a_subset_of_trajectories(table: gear.Table) -> None:
    calls = []

    def even(sequences: Any) -> Any:
        assert sequences.dtype == np.int64
        calls.append(len(sequences))
        return sequences % 2 == 0

    members = {int(index) for index in table.indices()[::2]}
    for selector in SELECTORS.values():
        data = dataset(table, subset=even, selector=selector)
        items = selector.num_items(table.reader().snapshot().take(np.arange(len(LENGTHS)) % 2 == 0))
        assert len(data) == -(-items // 4)
        batches = copies(data)
        assert {row[0] for row in drawn(batches)} <= members
        if not selector.replacement:
            assert {row[0] for row in drawn(batches)} == members
        assert {row[0] for row in drawn([data.sample()])} <= members
    assert len(calls) == len(SELECTORS)  # once a version of the table
    table.remove(table.indices()[1])
    table.add(episode(12, 1))
    data = dataset(table, subset=even, batch_size=100)
    assert int(table.indices()[-1]) in data.sample()["index"].tolist()


def test_the_program_of_the_readme() -> None:
    random = np.random.default_rng(0)

    def arrays(length: int) -> tuple[Any, Any, Any]:
        return (
            random.normal(size=(length, 11)).astype(np.float32),
            random.normal(size=(length, 3)).astype(np.float32),
            random.normal(size=length).astype(np.float32),
        )

    obs, act, rew = arrays(100)
    episodes = [dict(zip(("observation", "action", "reward"), arrays(n), strict=True)) for n in range(1, 200)]

    table = gear.Table.create(
        {
            "observation": gear.Column(torch.float32, (11,)),
            "action": gear.Column(torch.float32, (3,)),
            "reward": gear.Column(torch.float32),
        },
        max_steps=200_000,
        max_trajectories=2_000,
        block_steps=64,
    )

    index = table.add({"observation": obs, "action": act, "reward": rew}, priority=1.0)
    indices = table.extend(episodes)
    assert (len(table), table.num_steps) == (200, 100 + sum(range(1, 200)))
    assert torch.equal(table[index]["observation"], torch.from_numpy(obs))
    assert len(indices) == 199
    stacked = {
        "observation": obs[None].repeat(3, 0),
        "action": act[None].repeat(3, 0),
        "reward": rew[None].repeat(3, 0),
    }
    assert len(table.extend(stacked, lengths=[100, 1, 50])) == 3

    dataset = gear.ReplayDataset(
        table,
        batch_size=256,
        windows=gear.Window(length=20, offset=-19),
        anchor="uniform",
        selector=gear.Uniform(),
        seed=0,
        device="auto",
        prefetch=2,
    )
    count = 0
    for batch in DataLoader(dataset, batch_size=None):
        assert batch["observation"].shape == (256, 20, 11)
        assert batch["mask"].shape == (256, 20)
        assert batch["mask"].dtype == torch.bool
        assert batch["index"].shape == (256,)
        assert batch["index"].dtype == torch.int64
        count += 1
    assert count == len(dataset) == 1
    nothing_left(table)
    table.close()


# ---------------------------------------------------------------- buffers


def pointers(batch: Mapping[str, Any]) -> set[int]:
    """Addresses of all tensors of a batch."""
    found: set[int] = set()
    for part in batch.values():
        found |= pointers(part) if isinstance(part, dict) else {part.data_ptr()}
    return found


def settle(data: gear.ReplayDataset) -> None:
    """Give the prefetch thread time to overwrite whatever it may."""
    if data.prefetch:
        time.sleep(0.003)


@pytest.mark.parametrize(
    "windows", [WINDOW, {"reward": WINDOW, "action": gear.Window(2)}], ids=["one", "each"]
)
@pytest.mark.parametrize(
    ("keep", "prefetch"), mostly_long(itertools.product((1, 2, 3), range(4)), (1, 0), (2, 1), (3, 2))
)
def test_a_batch_stays_intact_until_keep_more_are_requested(
    table: gear.Table, prefetch: int, keep: int, windows: Any, way: str
) -> None:
    data = dataset(table, prefetch=prefetch, keep=keep, windows=windows, batches_per_epoch=9)
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen: Counter[int] = Counter()
    for batch in itertools.chain(data, data, itertools.islice(data, 4), data):  # ends, and one is broken off
        held = [*held, (batch, snapshot(batch))][-keep:]
        seen.update({batch["reward"].data_ptr()})
        settle(data)
        assert all(equal(one, copy) for one, copy in held)
        assert len({one["reward"].data_ptr() for one, _ in held}) == len(held)
    # They are recycled: 31 batches came out of a few buffers. An epoch that was broken off may lose some.
    assert len(seen) <= 2 * (prefetch + keep + 1)
    assert max(seen.values()) > 3


@pytest.mark.parametrize("prefetch", [0, 2])
def test_buffers_are_recycled_and_overwritten(table: gear.Table, prefetch: int, way: str) -> None:
    data = dataset(table, prefetch=prefetch, keep=2, batches_per_epoch=30)
    iterator = iter(data)
    first = next(iterator)
    copy, addresses = snapshot(first), pointers(first)
    next(iterator)
    settle(data)
    assert equal(first, copy)
    later = [pointers(next(iterator)) for _ in range(10)]
    assert addresses in later
    assert not equal(first, copy)
    iterator.close()  # type: ignore[attr-defined]


def test_all_epochs_use_the_same_buffers(table: gear.Table, way: str) -> None:
    data = dataset(table, prefetch=2, keep=2, batches_per_epoch=10)
    used: set[int] = set()
    for _ in range(3):
        used |= {batch["reward"].data_ptr() for batch in data}
    assert len(used) <= 2 + 2 + 1


def test_breaking_off_loses_no_buffers(table: gear.Table, way: str) -> None:
    data = dataset(table, prefetch=3, keep=2, batches_per_epoch=20)
    used: set[int] = set()
    for _ in range(30):
        for batch in itertools.islice(data, 2):
            used.add(batch["reward"].data_ptr())
            settle(data)
    assert len(used) <= 3 + 2 + 1


@pytest.mark.parametrize("prefetch", [0, 2])
def test_copies_never_change(table: gear.Table, prefetch: int, way: str) -> None:
    data = dataset(table, prefetch=prefetch, copy=True, batches_per_epoch=12)
    held = [(batch, snapshot(batch)) for _ in range(2) for batch in data]
    held += [(batch, snapshot(batch)) for batch in (data.sample() for _ in range(10))]
    assert all(equal(batch, copy) for batch, copy in held)
    addresses = [pointers(batch) for batch, _ in held]
    assert len(set().union(*addresses)) == sum(map(len, addresses))


def test_sample_sizes_do_not_pile_up(table: gear.Table) -> None:
    data = dataset(table)
    list(data)
    for size in range(1, 50):
        data.sample(size)
    assert sorted(data._buffers.pools) == [(4, False), (49, False)]


@pytest.mark.parametrize("keep", [1, 2, 4])
def test_samples_stay_intact_too(table: gear.Table, keep: int) -> None:
    data = dataset(table, keep=keep)
    held: list[tuple[dict[str, Any], dict[str, Any]]] = []
    seen: Counter[int] = Counter()
    for _ in range(20):
        batch = data.sample()
        held = [*held, (batch, snapshot(batch))][-keep:]
        seen.update({batch["reward"].data_ptr()})
        assert all(equal(one, copy) for one, copy in held)
    assert len(seen) <= keep + 1
    # Another size brings its own buffers and leaves the last batches alone.
    other = data.sample(7)
    assert len(other["index"]) == 7
    assert equal(*held[-1])


def test_sampling_beside_an_iterator_disturbs_neither(table: gear.Table) -> None:
    data = dataset(table, keep=1, prefetch=2, batches_per_epoch=20)
    expected, samples = copies(dataset(table, batches_per_epoch=20)), dataset(table)
    for batch, copy in zip(data, expected, strict=True):
        sampled = data.sample()
        settle(data)
        assert equal(batch, copy)
        assert equal(sampled, samples.sample())


# ---------------------------------------------------------------- breaking off, errors


@pytest.mark.parametrize("prefetch", mostly_long([0, 1, 3], 1))
@pytest.mark.parametrize("how", ["close", "forget", "break", "raise", "loader"])
def test_abandoning_an_iterator_leaves_nothing_behind(
    table: gear.Table, how: str, prefetch: int, way: str
) -> None:
    data = dataset(table, prefetch=prefetch, batches_per_epoch=1000)
    if how == "close":
        generator = iter(data)
        next(generator)
        assert len(prefetch_threads()) == (prefetch > 0 and way == "thread")
        generator.close()  # type: ignore[attr-defined]
    elif how == "forget":
        iterator = iter(data)
        next(iterator)
        del iterator
    elif how == "break":
        for batch in data:
            assert len(batch["index"]) == 4
            break
    elif how == "raise":
        with pytest.raises(ZeroDivisionError):
            [1 / 0 for _ in data]
    else:
        loader = iter(DataLoader(data, batch_size=None))
        next(loader)
        del loader
    gc.collect()
    nothing_left(table)
    before = snapshot(data.sample())
    assert equal(before, dataset(table).sample())


class Failing(gear.Uniform):
    """Raises at one step."""

    def __init__(self, at: int, error: BaseException) -> None:
        super().__init__()
        self.at, self.error = at, error

    def select(self, snapshot: Any, draw: Any) -> Any:
        if draw.step == self.at:
            raise self.error
        return super().select(snapshot, draw)


class OddError(Exception):
    pass


@pytest.mark.parametrize("prefetch", [0, 1, 3])
@pytest.mark.parametrize("error", [OddError("from afar"), StopIteration(), KeyError("x")], ids=repr)
def test_an_error_while_preparing_reaches_the_consumer(
    table: gear.Table, prefetch: int, error: Exception, way: str
) -> None:
    data = dataset(table, prefetch=prefetch, selector=Failing(3, error), batches_per_epoch=10)
    found: list[Any] = []
    with pytest.raises(RuntimeError if isinstance(error, StopIteration) else type(error)) as caught:
        append_all(data, found)
    assert error in (caught.value, caught.value.__cause__)
    same_batches(copies(dataset(table, batches_per_epoch=3)), found)
    nothing_left(table)
    data.selector = gear.Uniform()
    data.set_epoch(0)
    assert len(copies(data)) == 10


@pytest.mark.parametrize("prefetch", [0, 2])
def test_the_table_is_closed_meanwhile(prefetch: int) -> None:
    table = make_table()
    readers = table.region.array("readers")
    data = dataset(table, prefetch=prefetch, batches_per_epoch=1000)
    iterator = iter(data)
    next(iterator)
    table.close()
    with pytest.raises(TableClosedError, match=r"The table \(private\) is closed"):
        append_all(iterator, [], prefetch + 2)
    assert list(iterator) == []
    assert prefetch_threads() == []
    assert (readers[:, 2] == 0).all()
    with pytest.raises(TableClosedError):
        next(iter(data))
    with pytest.raises(TableClosedError):
        data.sample()
    with pytest.raises(TableClosedError):
        len(data)


class Slow(gear.Uniform):
    """Waits within a draw, while the table is being read."""

    def __init__(self) -> None:
        super().__init__()
        self.reading, self.go_on = threading.Event(), threading.Event()

    def select(self, snapshot: Any, draw: Any) -> Any:
        if draw.step == 1:
            self.reading.set()
            assert self.go_on.wait(10)
        return super().select(snapshot, draw)


def test_closing_a_table_while_it_is_read_leaves_no_read_open() -> None:
    # Another process that has the same table would wait for that read until this process ends.
    table = make_table()
    readers = table.region.array("readers")
    selector = Slow()
    data = dataset(table, prefetch=2, selector=selector, batches_per_epoch=1000)
    iterator = iter(data)
    next(iterator)
    assert selector.reading.wait(10)
    table.close()
    selector.go_on.set()
    with pytest.raises(TableClosedError):
        append_all(iterator, [], 5)
    assert (readers[:, 2] == 0).all()


@pytest.mark.parametrize("prefetch", [0, 2])
@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("batches", [None, 3, math.inf])
def test_an_empty_table_and_an_empty_subset(selector: gear.Uniform, prefetch: int, batches: Any) -> None:
    with make_table([]) as table:
        data = dataset(table, selector=selector, prefetch=prefetch, batches_per_epoch=batches)
        if batches is None:
            with pytest.raises(TableEmptyError, match=r"The table is empty: .* Add trajectories first\."):
                len(data)
        for draw in (lambda: next(iter(data)), data.sample):
            with pytest.raises(TableEmptyError, match="The table is empty"):
                draw()
        nothing_left(table)
        table.extend([episode(i, 3) for i in range(5)])
        assert len(data.sample()["index"]) == 4
        assert len(next(iter(data))["index"]) == 4
        nobody = dataset(
            table, selector=selector, prefetch=prefetch, subset=lambda s: s > 99, batches_per_epoch=batches
        )
        for draw in (lambda: next(iter(nobody)), nobody.sample):
            with pytest.raises(
                TableEmptyError, match="None of the table's 5 trajectories belongs to this dataset's"
            ):
                draw()
        nothing_left(table)


@pytest.mark.parametrize("prefetch", [0, 2])
def test_a_table_that_becomes_empty_meanwhile(prefetch: int) -> None:
    for selector in SELECTORS.values():
        with make_table() as table:
            data = dataset(table, selector=selector, prefetch=prefetch, batches_per_epoch=100)
            iterator = iter(data)
            next(iterator)
            table.remove(table.indices())
            with pytest.raises(TableEmptyError, match="The table is empty"):
                append_all(iterator, [], 10)
            nothing_left(table)


# ---------------------------------------------------------------- tables that change meanwhile


def length_of(number: int) -> int:
    return 1 + number * 7 % 13


def check_rows(batch: Mapping[str, Any]) -> np.ndarray:
    """Each row is of one trajectory, whole and unmixed; returns the trajectories' numbers."""
    mask = batch["mask"].numpy()
    observation = batch["observation"].numpy().astype(np.float64)
    numbers = observation[:, :, 0].max(1).astype(np.int64)
    lengths = 1 + numbers * 7 % 13
    steps = batch["anchor"].numpy()[:, None] + WINDOW.offset + np.arange(WINDOW.length)
    exists = (steps >= 0) & (steps < lengths[:, None])
    assert (mask == exists).all()
    rows = np.broadcast_to(numbers[:, None], steps.shape)
    assert (observation[:, :, 0] == rows * exists).all()
    assert (observation[:, :, 1] == steps * exists).all()
    assert (batch["reward"].numpy() == (rows * 4096.0 + steps) * exists).all()
    assert (batch["action"].numpy()[:, :, 0] == rows * exists).all()
    assert (batch["action"].numpy()[:, :, 1] == (-steps - 1) * exists).all()
    return numbers


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_no_row_is_torn_while_another_thread_evicts_at_full_speed(
    prefetch: int, selector: gear.Uniform
) -> None:
    with make_table([], max_steps=200, max_trajectories=24, on_full="evict_oldest") as table:
        written: dict[tuple[int, int], int] = {}
        _, generation, _ = table.reader().slot_states()
        stop = threading.Event()
        failures: list[BaseException] = []

        def write() -> None:
            try:
                for number in itertools.count(1):
                    index = table.add(episode(number, length_of(number)))
                    written[index, int(generation[index])] = number
                    if stop.is_set() or number == 32_000:
                        return
            except BaseException as error:
                failures.append(error)

        for number in range(30_000, 30_024):
            index = table.add(episode(number, length_of(number)))
            written[index, int(generation[index])] = number
        writer = threading.Thread(target=write)
        writer.start()
        found: list[tuple[int, int, int]] = []
        deadline = time.monotonic() + 0.7
        try:
            data = dataset(table, selector=selector, prefetch=prefetch, batch_size=16)
            while time.monotonic() < deadline:
                for batch in data:
                    numbers = check_rows(batch)
                    found += zip(
                        batch["index"].tolist(), batch["generation"].tolist(), numbers.tolist(), strict=True
                    )
        finally:
            stop.set()
            writer.join()
        assert failures == []
        assert len(found) > 500
        assert len({number for _, _, number in found}) > 100  # the table moved on meanwhile
        for index, of, number in found:
            assert written[index, of] == number
        table.check_valid()
        nothing_left(table)


@pytest.mark.parametrize("anchor", ["uniform", "first", "last"])
@pytest.mark.parametrize("prefetch", [0, 2])
def test_evicted_items_of_an_epoch_are_replaced_by_live_ones(prefetch: int, anchor: Any) -> None:
    with make_table([3] * 32, max_steps=96, max_trajectories=32, on_full="evict_oldest") as table:
        data = dataset(table, selector=gear.Uniform(False), anchor=anchor, prefetch=prefetch, copy=True)
        iterator = iter(data)
        next(iterator)
        settle(data)
        table.extend([episode(100 + i, 5) for i in range(12)])  # evicts 20 trajectories of 3 steps
        assert len(table) == 24
        live = contents(table)
        batches = list(iterator)
        assert len(batches) == 7
        _, generation, _ = table.reader().slot_states()
        fresh = []
        for batch in batches[prefetch + 1 :]:
            check_batch(batch, live, dict.fromkeys(SCHEMA, WINDOW))
            assert batch["generation"].tolist() == generation[batch["index"].numpy()].tolist()
            for index, step in drawn([batch]):
                length = len(live[index]["reward"])
                fresh += [step] if length == 5 else []
                assert anchor == "uniform" or step == {"first": 0, "last": length - 1}[anchor]
        assert fresh  # some of the new ones stand in


def test_stand_ins_are_as_likely_as_what_they_replace() -> None:
    # A whole epoch is evicted under the iterator's feet; what comes instead follows the selector and the anchor.
    lengths = (2, 9, 5, 16)
    for unit in ("trajectory", "step"):
        with make_table([1] * 4096, max_trajectories=4096, max_steps=4100) as table:
            data = dataset(
                table,
                selector=gear.Uniform(False, unit),
                prefetch=0,
                batch_size=512,
                columns=["reward"],  # type: ignore[arg-type]
            )
            iterator = iter(data)
            next(iterator)
            table.remove(table.indices())
            table.extend([episode(i, length) for i, length in enumerate(lengths)])
            position = {int(index): i for i, index in enumerate(table.indices())}
            counts = Counter((position[index], step) for index, step in drawn(iterator))
        observed = [counts[i, step] for i, length in enumerate(lengths) for step in range(length)]
        probabilities = [
            1 / 32 if unit == "step" else 1 / 4 / length for length in lengths for _ in range(length)
        ]
        assert sum(observed) == sum(counts.values()) == 7 * 512
        assert chi_square(observed, np.array(probabilities) * 7 * 512) < chi_square_limit(31)


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
@pytest.mark.parametrize("prefetch", [0, 2])
def test_an_endless_epoch_sees_additions(table: gear.Table, prefetch: int, selector: gear.Uniform) -> None:
    table.remove(table.indices()[:4])  # room
    data = dataset(table, selector=selector, prefetch=prefetch, batches_per_epoch=math.inf)
    iterator = iter(data)
    next(iterator)
    index = table.add(episode(99, 9))
    for batch in itertools.islice(iterator, 500):
        if index in batch["index"].tolist():
            check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))
            return
    pytest.fail("500 batches without the new trajectory")


def test_an_epoch_without_replacement_is_of_what_was_there_when_it_began(table: gear.Table) -> None:
    before = set(table.indices().tolist())
    table.remove(table.indices()[:4])
    before = set(table.indices().tolist())
    data = dataset(table, selector=gear.Uniform(False), batch_size=3)
    iterator = iter(data)
    found = [snapshot(next(iterator))]
    new = table.extend([episode(50, 3), episode(51, 3)])
    found += copies(iterator)
    assert sorted(index for index, _ in drawn(found)) == sorted(before)
    assert sorted(index for index, _ in drawn(data)) == sorted(before | set(new.tolist()))


# ---------------------------------------------------------------- sample


@pytest.mark.parametrize("selector", SELECTORS.values(), ids=SELECTORS)
def test_sample_draws_by_its_own_count(table: gear.Table, selector: gear.Uniform) -> None:
    data, other = dataset(table, selector=selector), dataset(table, selector=selector)
    first = [snapshot(data.sample()) for _ in range(3)]
    copies(data)
    data.set_epoch(7)
    first += [snapshot(data.sample()) for _ in range(3)]
    same_batches(first, [snapshot(other.sample()) for _ in range(6)])
    assert len({tuple(drawn([batch])) for batch in first}) == 6
    for batch in first:
        check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))
    # Neither are they the batches of an epoch.
    assert not {tuple(drawn([b])) for b in first} & {tuple(drawn([b])) for b in copies(other)}


def test_sample_of_another_size(table: gear.Table) -> None:
    data = dataset(table)
    for size in (1, 4, 300, 2, None):
        batch = data.sample(size)
        assert len(batch["index"]) == (size or 4)
        check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))
    for size in (0, -1, 2.0, True, "4"):
        with pytest.raises(SchemaError, match=f"batch_size is {size!r}; expected an integer of at least 1"):
            data.sample(size)  # type: ignore[arg-type]


def test_sample_is_uniform(table: gear.Table) -> None:
    data = dataset(table, batch_size=100, columns=["reward"])
    position = {int(index): i for i, index in enumerate(table.indices())}
    counts = Counter(position[index] for index, _ in drawn(data.sample() for _ in range(60)))
    observed = [counts[i] for i in range(len(LENGTHS))]
    assert chi_square(observed, np.full(len(LENGTHS), 500)) < chi_square_limit(len(LENGTHS) - 1)


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_sample_without_replacement_passes_over_all_items(table: gear.Table, unit: Any) -> None:
    data = dataset(table, selector=gear.Uniform(False, unit), batch_size=5)
    items = len(LENGTHS) if unit == "trajectory" else STEPS
    orders = []
    for _ in range(3):
        rows: list[tuple[int, int]] = []
        while len(rows) < items:
            rows += drawn([data.sample(4 if len(rows) == 5 else None)])  # sizes may change in between
        keys = [row[0] if unit == "trajectory" else row for row in rows]
        assert len(keys) == len(set(keys)) == items  # a pass ends with a batch that may be smaller
        orders.append(keys)
    assert orders[0] != orders[1] != orders[2]


@pytest.mark.parametrize("unit", ["trajectory", "step"])
def test_sample_while_the_table_shrinks(
    table: gear.Table, unit: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    data = dataset(table, selector=gear.Uniform(False, unit), batch_size=8)
    look = table.reader().snapshot

    def shrinks_afterwards() -> Any:
        before = look()
        table.remove(before.slots[:2])
        return before

    monkeypatch.setattr(table.reader(), "snapshot", shrinks_afterwards)
    for _ in range(4):
        batch = data.sample()
        check_batch(batch, contents(table), dict.fromkeys(SCHEMA, WINDOW))


def test_sample_of_ranks(table: gear.Table) -> None:
    for selector in SELECTORS.values():
        draws = [
            tuple(drawn(copies_of(dataset(table, selector=selector, rank=rank, world_size=3))))
            for rank in range(3)
        ]
        assert len(set(draws)) == 3


def copies_of(data: gear.ReplayDataset) -> list[dict[str, Any]]:
    return [snapshot(data.sample()) for _ in range(4)]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"batch_size": 0}, "batch_size is 0; expected an integer of at least 1"),
        ({"batch_size": 2.5}, "batch_size is 2.5; expected an integer of at least 1"),
        ({"batch_size": True}, "batch_size is True; expected an integer of at least 1"),
        ({"prefetch": -1}, "prefetch is -1; expected an integer of at least 0"),
        ({"prefetch": None}, "prefetch is None; expected an integer of at least 0"),
        ({"keep": 0}, "keep is 0; expected an integer of at least 1"),
        ({"programs": 0}, "programs is 0; expected an integer of at least 1"),
        ({"batches_per_epoch": 0}, r"batches_per_epoch is 0; expected an integer of at least 1 or math\.inf"),
        (
            {"batches_per_epoch": 3.5},
            r"batches_per_epoch is 3\.5; expected an integer of at least 1 or math\.inf",
        ),
        ({"batches_per_epoch": math.nan}, r"batches_per_epoch is nan; expected an integer"),
        ({"seed": 1.5}, r"seed is 1\.5; expected an integer"),
        ({"seed": "0"}, "seed is '0'; expected an integer"),
        ({"seed": None}, "seed is None; expected an integer"),
        ({"anchor": "middle"}, "anchor is 'middle'; expected 'uniform', 'first' or 'last'"),
        (
            {"anchor": "last", "selector": gear.Uniform(unit="step")},
            r"anchor='last' goes with a selector of trajectories; Uniform\(replacement=True, unit='step'\) chooses",
        ),
        ({"device": "mps"}, "device is 'mps'; expected 'auto', 'cpu' or a CUDA device"),
        ({"device": "gpu"}, "device is 'gpu'; expected 'auto', 'cpu' or a CUDA device"),
        ({"device": 1.5}, r"device is 1\.5; expected 'auto', 'cpu' or a CUDA device"),
        ({"rank": 0}, "rank 0 of world_size None; expected both, with 0 <= rank < world_size"),
        ({"world_size": 2}, "rank None of world_size 2; expected both"),
        ({"rank": 2, "world_size": 2}, "rank 2 of world_size 2; expected both, with 0 <= rank < world_size"),
        ({"rank": -1, "world_size": 2}, "rank -1 of world_size 2; expected both"),
        ({"windows": 20}, "windows is 20; expected a Window or a mapping of column names to Windows"),
        ({"windows": {}}, "No columns were asked for; expected at least one in windows or columns"),
        ({"columns": []}, "No columns were asked for; expected at least one in windows or columns"),
        (
            {"columns": ["reward", "speed"]},
            r"Columns \['reward', 'speed'\] were asked .* Unknown: \['speed'\]",
        ),
        (
            {"columns": "reward"},
            r"columns is 'reward'; expected a sequence of column names, for example \['reward'\]",
        ),
        ({"windows": {"speed": WINDOW}}, r"Columns \['speed'\] were asked for; .* Unknown: \['speed'\]"),
        ({"windows": {"reward": 4}}, r"The window of column 'reward' is 4; expected gear_loader\.Window"),
        (
            {"windows": {"reward": WINDOW}, "columns": ["action"]},
            r"columns \['action'\] and the windows' columns \['reward'\] differ; give one",
        ),
        ({"subset": "even"}, "subset is 'even'; expected a function of the sequence numbers"),
        ({"scope": "all"}, "scope is 'all'; expected 'global' or 'local'"),
        (
            {"selector": "prioritized"},
            r"selector is 'prioritized'; expected an object such as .*Prioritized\(\)",
        ),
        (
            {"selector": gear.Prioritized},
            r"selector is <class .*>; expected an object such as .*Prioritized\(\)",
        ),
    ],
)
def test_wrong_options_are_refused(table: gear.Table, options: Any, message: str) -> None:
    with pytest.raises(SchemaError, match=message):
        dataset(table, **options)


@pytest.mark.parametrize("given", ["replay", None, 3, SCHEMA])
def test_a_table_that_is_none(given: Any) -> None:
    remedy = r" Attach to it by its name: gear_loader\.Table\.attach\('replay'\)\.$"
    message = r"table is .*; expected a gear_loader\.Table or gear_loader\.distributed\.Shards\."
    with pytest.raises(SchemaError, match=message + (remedy if given == "replay" else "$")):
        gear.ReplayDataset(given, batch_size=1, windows=WINDOW)


def test_a_gpu_where_there_is_none(table: gear.Table, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(
        SchemaError, match=r"device is 'cuda:0', but torch sees no CUDA device; use device='cpu' or"
    ):
        dataset(table, device="cuda:0")
    assert dataset(table, device="auto").device == torch.device("cpu")


def test_drop_last_that_leaves_nothing(table: gear.Table) -> None:
    data = dataset(table, selector=gear.Uniform(False), batch_size=13, drop_last=True)
    message = "drop_last leaves no batch: 12 items are fewer than batch_size 13"
    with pytest.raises(SchemaError, match=message):
        len(data)
    with pytest.raises(SchemaError, match=message):
        next(iter(data))


def test_a_subset_of_the_wrong_shape(table: gear.Table) -> None:
    data = dataset(table, subset=lambda sequences: np.ones(3, dtype=bool))
    with pytest.raises(
        SchemaError, match=r"subset returned shape \[3\] for 12 sequence numbers; expected \[12\]"
    ):
        next(iter(data))
    assert open_tickets(table) == 0
