"""Values that trajectories have in common with those that they begin with, stored once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts, mostly_long
from table_common import Died, Fragile, bury, mortal
from tier_common import move, tier_at

import gear_loader as gear
from gear_loader.errors import SchemaError, TableFullError
from gear_loader.storage.incoming import listed
from gear_loader.storage.payload import write_payload
from gear_loader.storage.prefix_input import Beginning

COLUMNS = {
    "token": gear.Column(torch.int64),
    "image": gear.Column(torch.uint8, (None, 7, 3), per="group"),
    "prompt": gear.Column(str, per="group"),
    "answer": gear.Column(str, per="trajectory"),
}
SHARED = ("image", "prompt")


def table_of(payload: int | str = "8KiB", **options: Any) -> gear.Table:
    sizes = {
        "max_steps": 600,
        "max_trajectories": 30,
        "block_steps": 4,
        "on_full": "evict_oldest",
        "timeout": 0.2,
    }
    memory = gear.Memory(payload=payload, prefixes=options.pop("prefixes", True), max_blocks=400)
    return gear.Table.create(COLUMNS, memory=memory, **{**sizes, **options})


def rows(number: int, random: np.random.Generator, *, shared: bool) -> dict[str, Any]:
    made: dict[str, Any] = {
        "token": np.arange(int(random.integers(1, 9))) + 100 * number,
        "answer": "a" * int(random.integers(0, 9)),
    }
    if shared:
        made["image"] = random.integers(0, 255, (int(random.integers(0, 60)), 7, 3), dtype=np.uint8)
        made["prompt"] = f"{number} " * int(random.integers(1, 20))
    return made


def check(found: dict[str, Any], expected: dict[str, Any]) -> None:
    assert found["token"].tolist() == expected["token"].tolist()
    assert np.array_equal(found["image"].numpy(), expected["image"])
    assert (found["prompt"], found["answer"]) == (expected["prompt"], expected["answer"])


@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority"])
def test_beside_a_twin(on_full: Any) -> None:
    act(on_full, 0, 250)


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_long(range(1, 7), sample=3))
def test_beside_a_twin_for_long(seed: int) -> None:
    act("evict_oldest" if seed % 2 else "evict_lowest_priority", seed, 1500)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_beside_a_twin_with_a_disk_tier(seed: int, tmp_path: Path) -> None:
    act("evict_oldest", seed, 60, tmp_path)


def act(on_full: Any, seed: int, turns: int, path: Path | None = None) -> None:
    """Groups come and go in memory that is too small, their first trajectories before others or after them."""
    random = np.random.default_rng(seed)
    tier = {} if path is None else {**tier_at(path), "max_trajectories": 20, "timeout": 20.0}
    with table_of(on_full=on_full, **tier) as table:
        known: dict[int, dict[str, Any]] = {}
        for number in range(turns):
            move(table, random)
            live = table.indices()
            if len(live) and random.random() < 0.15:
                table.remove(random.choice(live, 1))
                continue
            prefix = int(random.choice(live)) if len(live) and random.random() < 0.75 else None
            given = expected = rows(number, random, shared=prefix is None)
            options: dict[str, Any] = {}
            if prefix is not None:
                before = known[prefix]
                steps = int(random.integers(0, len(before["token"]) + 1))
                options = {"prefix": prefix, "prefix_steps": steps}
                expected = {
                    **before,
                    **given,
                    "token": np.concatenate((before["token"][:steps], given["token"])),
                }
            slot = table.add(given, priority=float(random.random()), **options)
            known[slot] = expected
            for index in table.indices().tolist():
                check(table[index], known[index])
            table.check_valid()
        batch = gear.ReplayDataset(
            table, windows=gear.Whole(), batch_size=20, layout="tree", device="cpu"
        ).sample()
        for row, index in enumerate(batch["index"].tolist()):
            group = int(batch["group"][row])
            assert batch["prompt"][group] == known[index]["prompt"]
            assert np.array_equal(batch["image"][group].numpy(), known[index]["image"])
            assert batch["answer"][row] == known[index]["answer"]
        assert len(batch["prompt"]) == len(batch["image"]) == batch["group"].max() + 1
        if path is not None:
            assert table._engine.num_spilled > 0
            expected = [known[index] for index in table.indices().tolist()]
    if path is not None:
        with gear.Table.recover(tier["disk"]) as table:
            for index, values in zip(table.indices().tolist(), expected, strict=True):
                check(table[index], values)
            table.add(rows(0, random, shared=False), prefix=int(table.indices()[0]))
            table.check_valid()


def test_values_are_stored_once_and_freed_with_the_last_of_them() -> None:
    """Images of a prompt and eight answers: nine tenths of the memory have room for them only once."""
    random = np.random.default_rng(0)
    image = random.integers(0, 255, (300, 7, 3), dtype=np.uint8)
    first = {"token": np.arange(5), "image": image, "prompt": "p", "answer": "a"}
    other = {"token": np.arange(3), "answer": "b"}
    with table_of(7200, on_full="error") as table:
        leader = table.add(first)
        slots = table.extend([other] * 8, prefix=leader, prefix_steps=0)
        again = table.add(other, prefix=int(slots[3]))
        table.remove([leader, *slots])
        assert np.array_equal(table[again]["image"].numpy(), image)
        assert table[again]["token"].tolist() == [*range(3), *range(3)]
        with pytest.raises(TableFullError, match="memory of ragged values"):
            table.add(first)
        table.check_valid()
        table.remove(again)
        check(table[table.add(first)], first)
        batch = gear.ReplayDataset(
            table, windows=gear.Whole(), batch_size=2, layout="packed", device="cpu"
        ).sample()
        assert [np.array_equal(each.numpy(), image) for each in batch["image"].tolist()] == [True, True]


def test_what_is_refused() -> None:
    random = np.random.default_rng(0)
    with table_of() as table:
        slot = table.add(rows(1, random, shared=True))
        with pytest.raises(SchemaError, match=r"has the columns \['image', 'prompt'\], which are per group"):
            table.add(rows(2, random, shared=True), prefix=slot)
        with pytest.raises(SchemaError, match=r"missing: \['image', 'prompt'\]"):
            table.extend([rows(2, random, shared=False)] * 2, prefix=[slot, -1])
        stacked = {"token": np.arange(6).reshape(2, 3), "answer": ["a", "b"]}
        with pytest.raises(SchemaError, match=r"has the columns \['prompt'\], which are per group"):
            table.extend({**stacked, "prompt": ["c", "d"]}, lengths=[2, 3], prefix=slot)
        assert len(table) == 1
        slots = table.extend(stacked, lengths=[2, 3], prefix=slot)
        assert [table[int(i)]["prompt"] for i in slots] == [table[slot]["prompt"]] * 2
    with pytest.raises(
        SchemaError, match=r"per='group' and shape \(2, 3\); .* shape \(None, 3\), str or bytes"
    ):
        gear.Column(torch.uint8, (2, 3), per="group")
    assert repr(gear.Column(str, per="group")) == "Column(str, per='group')"
    with table_of(prefixes=False) as table:  # which shares nothing
        check(table[table.add(given := rows(1, random, shared=True))], given)


@pytest.mark.parametrize("every", amounts(7, 2, 1))
def test_a_death_at_every_store(every: int) -> None:
    """One dies while it adds to a group whose first trajectory has left, and values of others."""
    deaths = 0
    for stores in itertools.count(0, every):
        random = np.random.default_rng(1)
        with table_of(5000, max_trajectories=7, on_full="error") as table:
            leader = table.add(first := rows(1, random, shared=True))
            member = table.add(rows(2, random, shared=False), prefix=leader, prefix_steps=1)
            kept = table[member]
            gone = table.add(rows(3, random, shared=True))
            table.remove([leader, gone])
            new = rows(4, random, shared=False), rows(5, random, shared=True)
            with mortal(table, stores) as index:
                try:
                    for given, prefix in zip(new, (member, None), strict=True):
                        begin = None if prefix is None else Beginning(table._engine, prefix, 1, None)
                        steps = listed(table.schema, [given], None if begin is None else begin.records)
                        begins = None if begin is None else begin.located(steps)
                        lengths = steps.lengths + (begins is not None)
                        slots, ids = index.begin(lengths, prefixes=begins)
                        heap = table._engine.region.payload().view(Fragile)
                        generations = index.arrays.generation[slots]
                        offsets = index.place_payload(
                            heap, steps.payload, slots, generations, evict=0, wait=False
                        )
                        assert write_payload(steps.payload, heap.view(np.ndarray), offsets)
                        table._engine._write(np.array(ids), steps if begins is None else begins.rows)
                        index.commit(slots, np.ones(1, dtype=np.float32))
                except Died:
                    deaths += 1
                else:
                    break
            bury(table)
            table.check_valid()
            assert np.array_equal(table[member]["image"].numpy(), first["image"])
            again = table.add(rows(6, random, shared=False), prefix=member, prefix_steps=1)
            assert table[again]["prompt"] == kept["prompt"]
            table.remove(table.indices())
            big = {**rows(7, random, shared=True), "image": np.full((220, 7, 3), 3, dtype=np.uint8)}
            check(table[table.add(big)], big)  # all of the memory is free
            table.check_valid()
    assert deaths > 100 // every
