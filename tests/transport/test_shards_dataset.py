"""Several tables drawn from as one: probabilities and weights are those of one table of all rows."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest
import torch
from learner_common import connected
from table_common import fresh_name
from tree_common import check_groups, expanded, grouped

import gear_loader as gear
from gear_loader.errors import CheckpointError, PriorityError, SchemaError, StaleIndexError, TableClosedError
from gear_loader.transport import RemoteShards
from gear_loader.transport.shards_dataset import ShardsDataset

SCHEMA = {"number": gear.Column(torch.int64)}
SIZES = {"max_steps": 1000, "max_trajectories": 100}
COUNTS = (30, 10, 0)
ALL = sum(COUNTS)


def trajectory(number: int) -> dict[str, Any]:
    return {"number": torch.full((5,), number)}


def fill(tables: Any) -> None:
    number = 0
    for count, table in zip(COUNTS, tables, strict=True):
        for _ in range(count):
            table.add(trajectory(number), priority=1.0 + number)
            number += 1


@pytest.fixture(scope="module")
def shards() -> Iterator[RemoteShards]:
    """One table of this machine, and two of a server, of which one is empty."""
    names = [f"test-shards-{number}" for number in range(3)]
    tables = [gear.Table.create(SCHEMA, **SIZES, name=name, if_exists="replace") for name in names]
    fill(tables)
    server = gear.serve(tables[1:], allow="all")
    urls = list(server.urls.values())
    try:
        with RemoteShards(
            [tables[0], *(gear.connect(url, secret=server.secret) for url in urls)], timeout=0.5
        ) as made:
            yield made
    finally:
        server.stop()
        for table in tables:
            table.unlink()


def dataset(table: Any, sampler: Any, **options: Any) -> gear.ReplayDataset:
    given = {"batch_size": 128, "windows": gear.Window(1, squeeze=True), "batches_per_epoch": 30}
    return gear.ReplayDataset(table, sampler=sampler, device="cpu", **{**given, **options})


@pytest.mark.parametrize(
    "sampler",
    [gear.Uniform(), gear.Prioritized(), gear.Prioritized(normalize="table", beta=1.0)],
    ids=["uniform", "priority", "table"],
)
def test_rows_and_weights_are_as_of_one_table(shards: RemoteShards, sampler: Any) -> None:
    one = gear.Table.create(SCHEMA, **SIZES)
    fill([one] * len(COUNTS))
    mine = dataset(shards, sampler)
    numbers = []
    for batch in mine:
        assert batch["shard"].tolist() == (batch["number"] >= COUNTS[0]).long().tolist()
        numbers.append(batch["number"])
    counts = torch.bincount(torch.cat(numbers), minlength=ALL).double()
    expected = torch.ones(ALL, dtype=torch.float64)
    if sampler.by_priority:
        expected = torch.arange(1, ALL + 1, dtype=torch.float64).pow(0.6)
    expected *= counts.sum() / expected.sum()
    # 99.99% of the distribution of chi-squared with 39 degrees of freedom; the seed is fixed.
    assert float(((counts - expected).square() / expected).sum()) < 80.1
    if sampler.weighs:
        batch, theirs = mine.sample(), dataset(one, sampler).sample(1024)
        ours = dict(zip(batch["number"].tolist(), batch["priority_weight"].tolist(), strict=True))
        other = dict(zip(theirs["number"].tolist(), theirs["priority_weight"].tolist(), strict=True))
        ratios = np.array([ours[number] / other[number] for number in ours if number in other])
        assert len(ratios) > 20
        np.testing.assert_allclose(ratios, 1.0 if sampler.normalize == "table" else ratios[0], rtol=1e-5)
        if sampler.normalize == "batch":
            assert batch["priority_weight"].max() == 1
    mine.close()


@pytest.mark.parametrize(
    ("column", "value"),
    [(gear.Column(torch.float32, (None,)), torch.ones(1000)), (gear.Column(str), "." * 4000)],
    ids=["array", "text"],
)
def test_values_of_any_length_count_for_the_bytes_of_prefetched_batches(
    column: gear.Column, value: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    ordered, batch_of = list[int](), ShardsDataset._batch_of

    def counted(self: Any, number: int, *given: Any) -> Any:
        ordered.append(number)
        return batch_of(self, number, *given)

    monkeypatch.setattr(ShardsDataset, "_batch_of", counted)
    columns = {"number": gear.Column(torch.int64), "value": column}
    with (
        gear.Table.create(columns, **SIZES, memory=gear.Memory(payload="1MiB")) as one,
        gear.Table.create(columns, **SIZES, memory=gear.Memory(payload="1MiB")) as other,
    ):
        for table in (one, other):
            table.add({**trajectory(0), "value": [value] * 5})
        with RemoteShards([one, other]) as both:
            ahead = gear.Prefetch(6, max_bytes=150_000)  # two batches
            replay = dataset(both, gear.Uniform(), batch_size=16, prefetch=ahead)
            batches = iter(replay)
            for _ in range(12):
                next(batches)
            replay._ahead.submit(int).result()  # what was ordered before has been drawn
            assert 12 <= len(ordered) <= 15
            batches.close()
            replay.close()


def test_priorities_reach_the_shard_of_each_row(shards: RemoteShards) -> None:
    mine = dataset(shards, gear.Prioritized(alpha=1.0))
    batch = mine.sample(400)
    only = batch["number"] == COUNTS[0] + 3  # of the server's table
    assert only.any()
    mine.update_priority(batch, only.float() * 1e6)
    assert float((mine.sample()["number"] == COUNTS[0] + 3).float().mean()) > 0.9
    with pytest.raises(SchemaError, match="No shard was received"):
        mine.update_priority(batch["index"], only.float(), generation=batch["generation"])
    mine.update_priority(batch, 1.0 + batch["number"].float())
    mine.close()


def test_an_update_is_checked_before_any_shard_gets_it_and_names_those_that_refuse(
    shards: RemoteShards,
) -> None:
    mine = dataset(shards, gear.Prioritized(alpha=1.0))
    batch = mine.sample(400)
    before = mine.mass()
    wrong = torch.ones(400)
    wrong[-1] = float("nan")  # rows lie shard by shard: only that of the last one
    assert int(batch["shard"][-1]) == 1
    with pytest.raises(PriorityError, match=r"priority\[399\]"):
        mine.update_priority(batch, wrong)
    mine.settle()
    assert mine.mass() == before
    batch["generation"][-1] -= 1
    with pytest.raises(StaleIndexError, match=r"Shards \[1\] have removed.*the other shards were updated"):
        mine.update_priority(batch, torch.full((400,), 3.0), stale="error")
    masses = mine._on_each(lambda part: part.mass()[0])
    assert masses[1] == sum(1.0 + number for number in range(COUNTS[0], ALL))
    drawn = set(batch["number"][batch["shard"] == 0].tolist())
    assert masses[0] == sum(3.0 if number in drawn else 1.0 + number for number in range(COUNTS[0]))
    batch["generation"][-1] += 1
    mine.update_priority(batch, 1.0 + batch["number"].float())
    mine.close()


def test_a_state_goes_on_where_it_was_taken(shards: RemoteShards) -> None:
    mine = dataset(shards, gear.Uniform())
    it = iter(mine)
    for _ in range(4):
        next(it)
    state = mine.state_dict()
    rest = [next(it)["number"].clone() for _ in range(4)]
    again = dataset(shards, gear.Uniform())
    again.load_state_dict(state)
    for expected, batch in zip(rest, again, strict=False):
        torch.testing.assert_close(batch["number"], expected, rtol=0, atol=0)
    with pytest.raises(SchemaError, match="other options"):
        dataset(shards, gear.Uniform(), seed=1).load_state_dict(state)
    mine.close()
    again.close()


def test_ranks_draw_each_for_itself(shards: RemoteShards) -> None:
    ranks = [dataset(shards, gear.Uniform(), ranks=gear.Ranks(rank=rank, world_size=2)) for rank in range(2)]
    one, other = (each.sample()["number"].tolist() for each in ranks)
    assert one != other
    for each in ranks:
        each.close()


def test_what_several_shards_refuse(shards: RemoteShards) -> None:
    for options in (
        {"sampler": gear.Uniform(replacement=False)},
        {"sampler": gear.Fifo()},
        {"sampler": gear.Uniform(), "batch_size": gear.Steps(64), "windows": gear.Whole()},
    ):
        with pytest.raises(SchemaError, match="expected Uniform or Prioritized with replacement"):
            dataset(shards, **options)
    mine = dataset(shards, gear.Uniform(), batches_per_epoch=None)
    with pytest.raises(SchemaError, match="batches_per_epoch is None"):
        next(iter(mine))
    assert mine.mass() == (ALL, math.inf)
    empty = RemoteShards([gear.Table.create(SCHEMA, **SIZES)], timeout=0.05)
    with pytest.raises(gear.errors.TableEmptyError, match="None of 1 shards had anything to draw"):
        dataset(empty, gear.Uniform()).sample()
    with pytest.raises(SchemaError, match="expected the same"):
        RemoteShards([shards.tables[0], gear.Table.create({"x": gear.Column(torch.int64)}, **SIZES)])
    with pytest.raises(SchemaError, match="expected one or more"):
        RemoteShards([])


def test_columns_may_have_names_of_parts_of_a_tree() -> None:
    columns = {name: gear.Column(torch.int64) for name in ("parent", "group")}
    with gear.Table.create(columns, **SIZES) as one, gear.Table.create(columns, **SIZES) as other:
        for number, table in enumerate((one, other)):
            table.add({"parent": 100 * number + torch.arange(5), "group": torch.arange(5)})
        with RemoteShards([one, other]) as both:
            options: dict[str, Any] = {"batch_size": 64, "device": "cpu"}
            for packed in (False, True):
                windows = (
                    {"windows": gear.Whole(), "layout": "packed"} if packed else {"windows": gear.Window(1)}
                )
                batch = gear.ReplayDataset(both, **windows, **options).sample()
                steps = batch["position"] if packed else batch["anchor"]
                shard = batch["shard"].repeat_interleave(5) if packed else batch["shard"]
                assert 0 < int(shard.sum()) < len(shard)
                assert torch.equal(batch["parent"].view(-1), 100 * shard + steps)
                assert torch.equal(batch["group"].view(-1), steps.long())


def test_writers_take_tables_of_this_machine(shards: RemoteShards) -> None:
    private = [gear.Table.create(SCHEMA, **SIZES) for _ in range(2)]
    mine = RemoteShards([*private, shards.tables[1]])
    places = {mine.add(trajectory(number))[0] for number in range(4)}
    assert (places, len(mine)) == ({0, 1}, 4 + COUNTS[1])
    with mine.writer() as writer:
        writer.append(number=7)
        writer.commit()
    assert mine.extend([trajectory(1)] * 3)[1].shape == (3,)
    shards_of = mine.sample(64, device="cpu")["shard"]
    assert set(shards_of.tolist()) == {0, 1, 2}


def test_an_error_of_one_table_leaves_none_open(monkeypatch: pytest.MonkeyPatch) -> None:
    tables = [gear.Table.create(SCHEMA, **SIZES) for _ in range(3)]

    def fail() -> None:
        raise CheckpointError("the disk is full")

    with tables[1], monkeypatch.context() as patch:
        patch.setattr(tables[1], "close", fail)
        with pytest.raises(CheckpointError, match="full"):
            RemoteShards(tables).close()
        patch.undo()
    for table in tables:
        with pytest.raises(TableClosedError):
            table.add(trajectory(0))


def test_values_of_any_length_and_trees_are_joined() -> None:
    tables = [grouped(0), grouped(4)]
    mine = RemoteShards(tables)
    windows = {"token": gear.Whole(), "hidden": gear.Whole(), "images": None}
    for layout in ("packed", "tree"):
        batch = dataset(mine, gear.Uniform(), layout=layout, windows=windows, batch_size=40).sample()
        rows = zip(batch["shard"].tolist(), batch["index"].tolist(), strict=True)
        whole = [tables[shard][index] for shard, index in rows]
        for name in ("token", "hidden"):
            found = expanded(batch, name) if layout == "tree" else batch[name]
            assert found.equal(torch.cat([row[name] for row in whole]))
        if layout == "tree":
            check_groups(batch, 40)
            assert len(batch["token"]) < sum(len(row["token"]) for row in whole)
        else:
            images = batch["images"].tolist()
            assert all(image.equal(row["images"]) for image, row in zip(images, whole, strict=True))
    padded = dataset(mine, gear.Uniform(), windows={"token": gear.Window(2), "images": None}).sample(30)
    assert len(padded["images"]) == len(padded["token"]) == 30


@pytest.mark.parametrize("sampler", [gear.Uniform(), gear.Prioritized(normalize="table", beta=1.0)])
def test_groups_are_drawn_whole_each_out_of_one_shard(sampler: Any) -> None:
    """With the probabilities and weights of one table of all groups."""
    names, size = {"prompt": gear.Column(torch.int64, per="trajectory")}, 3
    columns = {**SCHEMA, **names, "image": gear.Column(torch.uint8, (None,), per="group")}
    given: dict[str, Any] = {**SIZES, "memory": gear.Memory(payload="64KiB", prefixes=True)}
    tables = [gear.Table.create(columns, **given, name=fresh_name()) for _ in range(3)]
    with contextlib.ExitStack() as stack:
        for table in tables:
            stack.callback(table.unlink)
        one = stack.enter_context(gear.Table.create(columns, **given))
        for number in range(9):
            for table in (one, tables[0] if number < 6 else tables[1]):
                for _ in range(size if number < 8 else 1):  # the last group is not complete
                    image = {"image": torch.full((number + 1,), number, dtype=torch.uint8)}
                    rows = {**trajectory(number), "prompt": torch.tensor(number), **image}
                    table.add(rows, priority=1.0 + number, prefix="prompt")
        remote = stack.enter_context(connected(tables[1]))
        mine = RemoteShards([tables[0], remote, tables[2]])
        options: dict[str, Any] = {"windows": {"number": gear.Window(1, squeeze=True), "image": None}}
        options |= {"groups": gear.Groups("prompt", size), "batch_size": 32 * size}
        ours, theirs = (dataset(each, sampler, **options) for each in (mine, one))
        drawn = []
        for batch in ours:
            groups = batch["number"].view(-1, size)
            assert (groups == groups[:, :1]).all()
            assert batch["index"].view(-1, size).diff(dim=1).all(), "each member once"
            assert batch["shard"].tolist() == (batch["number"] >= 6).long().tolist()
            assert [image.tolist() for image in batch["image"].tolist()] == [
                [n] * (n + 1) for n in batch["number"].tolist()
            ]
            drawn.append(groups[:, 0])
        counts = torch.bincount(torch.cat(drawn), minlength=8).double()
        expected = torch.ones(8, dtype=torch.float64)
        if sampler.by_priority:
            expected = torch.arange(1, 9, dtype=torch.float64).pow(sampler.alpha)
            weights = dict(zip(batch["number"].tolist(), batch["priority_weight"].tolist(), strict=True))
            other = theirs.sample()
            for number, weight in zip(
                other["number"].tolist(), other["priority_weight"].tolist(), strict=True
            ):
                assert weights.get(number, weight) == pytest.approx(weight, rel=1e-5)
        expected *= counts.sum() / expected.sum()
        # 99.99% of the distribution of chi-squared with 7 degrees of freedom; the seed is fixed.
        assert float(((counts - expected).square() / expected).sum()) < 29.9
        assert len(counts) == 8
        assert len(ours.sample(2 * size)["number"]) == 2 * size
        with pytest.raises(SchemaError, match="expected a multiple of group_size=3"):
            ours.sample(4)
        ours.close()
