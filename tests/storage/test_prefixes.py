"""Trajectories that begin with steps of others, which are stored once."""

from __future__ import annotations

import itertools
import multiprocessing
import os
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from table_common import bury, fresh_name
from tier_common import move, promote, spill, tier_at

import gear_loader as gear
from gear_loader.errors import CheckpointError, SchemaError, StaleIndexError, TableFullError

STEPS = {
    "token": gear.Column(torch.int64),
    "odd": gear.Column(torch.bool),
    "hidden": gear.Column(torch.bfloat16, (70,)),
    "obs": gear.Column(torch.float32, (3,), final=True),
}
ONCE = {"return": gear.Column(torch.float32, per="trajectory")}
BLOCK = 4


def table_of(columns: dict[str, gear.Column] = STEPS, **options: Any) -> gear.Table:
    sizes = {"max_steps": 1000, "max_trajectories": 40, "block_steps": BLOCK, **options}
    memory = gear.Memory(max_blocks=sizes.pop("max_blocks", 60), prefixes=sizes.pop("prefixes", True))
    return gear.Table.create(columns, memory=memory, **sizes)


def rows(columns: dict[str, gear.Column], number: int, length: int) -> dict[str, Any]:
    tokens = torch.arange(length) + 1000 * number
    made = {
        "token": tokens,
        "odd": tokens % 2 == 1,
        "hidden": (tokens[:, None] + torch.arange(70)).bfloat16(),
        "obs": torch.stack((tokens, tokens + 1, -tokens), 1).float(),
        "return": torch.tensor(float(number)),
    }
    return {name: made[name] for name in columns}


def joined(columns: dict[str, gear.Column], first: dict[str, Any], steps: int, then: dict[str, Any]) -> Any:
    return {
        name: then[name] if column.per == "trajectory" else torch.cat((first[name][:steps], then[name]))
        for name, column in columns.items()
    }


def same(found: dict[str, Any], expected: dict[str, Any]) -> bool:
    return all(torch.equal(found[name], expected[name]) for name in expected)


@pytest.mark.parametrize("columns", [STEPS, {**STEPS, **ONCE}], ids=["steps", "once"])
@pytest.mark.parametrize("on_full", ["evict_oldest", "evict_lowest_priority", "error"])
def test_beside_a_twin(columns: dict[str, gear.Column], on_full: Any) -> None:
    beside_a_twin(columns, on_full, 0)


@pytest.mark.long
@pytest.mark.parametrize(("seed", "columns"), [(0, STEPS), (1, {**STEPS, **ONCE}), (2, {**STEPS, **ONCE})])
def test_beside_a_twin_with_a_disk_tier(seed: int, columns: dict[str, gear.Column], tmp_path: Path) -> None:
    beside_a_twin(columns, "evict_oldest", seed, tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_long(range(1, 9), sample=3))
def test_beside_a_twin_for_long(seed: int) -> None:
    beside_a_twin(
        {**STEPS, **(ONCE if seed % 2 else {})}, ("evict_oldest", "evict_lowest_priority")[seed % 3 % 2], seed
    )


def test_steps_that_come_back_from_disk_are_shared_again(tmp_path: Path) -> None:
    columns = {**STEPS, **ONCE}
    with table_of(columns, **tier_at(tmp_path)) as table:
        slots = [table.add(rows(columns, 1, 30))]
        slots += [table.add(rows(columns, 2, 3), prefix=slots[0], prefix_steps=n) for n in (29, 22, 18)]
        slots.append(table.add(rows(columns, 3, 3), prefix=slots[1]))
        expected, used = [table[slot] for slot in slots], table.stats().blocks_in_use
        table.save(tmp_path)
        for order in [*itertools.permutations(range(5))][::7]:
            assert spill(table, slots) == 5
            assert table.stats().blocks_in_use == 0
            for i in order:
                promote(table, slots[i])
                assert same(table[slots[i]], expected[i])
            assert table.stats().blocks_in_use == used
        table.check_valid()


def beside_a_twin(columns: dict[str, gear.Column], on_full: Any, seed: int, path: Path | None = None) -> None:
    """What is read is as if nothing were shared; blocks are those that differ, and all are free in the end."""
    random = np.random.default_rng(seed)
    copied = 1 if len(columns) > len(STEPS) else 0
    sizes: dict[str, Any] = {"max_steps": 700, "max_trajectories": 24, **tier_at(path)}
    with table_of(columns, on_full=on_full, **sizes) as table:
        known: dict[int, tuple[Any, list[object]]] = {}  # rows, and a name of each block
        forgotten: list[tuple[int, int]] = []
        for number in range(100):
            move(table, random)
            live = table.indices()
            length, prefix, steps = int(random.integers(1, 3 * BLOCK)), None, 0
            given = expected = rows(columns, number, length)
            blocks: list[object] = []
            if len(live) and random.random() < 0.8:
                prefix = int(random.choice(live))
                before, names = known[prefix]
                steps = int(random.integers(1, len(before["token"]) + 1))
                expected = joined(columns, before, steps, given)
                blocks = names[copied : steps // BLOCK]
                blocks = [object()] * bool(copied and blocks) + blocks if steps // BLOCK > copied else []
            blocks += [object() for _ in range(-(-(steps + length) // BLOCK) - len(blocks))]
            if len(blocks) and copied:
                blocks[0] = object()
            try:
                options = {} if prefix is None else {"prefix": prefix, "prefix_steps": steps}
                slot = table.add(given, priority=float(random.random()), **options)
            except TableFullError:
                gone = random.choice(live, len(live) // 2, replace=False)
                generations = table._engine.index.arrays.generation
                forgotten += [(int(index), int(generations[index])) for index in gone]
                table.remove(gone)
                continue
            known[slot] = expected, blocks
            live = table.indices()
            assert slot in live
            assert prefix is None or prefix in live, "evicted for what begins with it"
            seen = live if number % 20 == 0 else {slot, *random.choice(live, 2).tolist()}
            assert all(same(table[int(index)], known[int(index)][0]) for index in seen)
            found = used = -1
            while found < 0 or table.stats().blocks_in_use != found:  # a disk tier makes room meanwhile
                found = table.stats().blocks_in_use
                inside = live[table._engine.index.arrays.extent[live, 1] >= 0]
                used = len({id(b) for i in inside for b in known[int(i)][1]})
            # With a tier those of trajectories that have in common what others began with, which have left, are apart.
            assert found == used or (path is not None and found > used)
            table.check_valid()
            for index, generation in forgotten[-3:]:
                with pytest.raises(StaleIndexError):
                    table.add(given, prefix=index, prefix_generation=generation)
        if path is not None:
            assert table._engine.num_spilled > 0
            table.save(path)
            with gear.Table.load(path, max_blocks=400) as loaded:
                assert loaded.stats().blocks_in_use <= len(
                    np.concatenate([known[int(i)][1] for i in table.indices()])
                )
                loaded.check_valid()
                for index, slot in zip(loaded.indices(), table.indices(), strict=True):
                    assert same(loaded[int(index)], known[int(slot)][0])
        table.remove(table.indices())
        assert table.stats().blocks_in_use == 0
        table.check_valid()


def test_final_steps_priorities_and_several_at_once() -> None:
    with table_of() as table:
        first, second = rows(STEPS, 1, 11), rows(STEPS, 2, 3)
        prompt = table.add(first, final={"obs": torch.full((3,), 9.0)})
        assert table.final(prompt) is not None
        slot = table.add(second, prefix=prompt, final={"obs": torch.full((3,), 7.0)})
        assert same(table[slot], joined(STEPS, first, 11, second))
        assert table.final(slot)["obs"].tolist() == [7.0] * 3  # type: ignore[index]
        stacked = {name: torch.stack([second[name]] * 3) for name in STEPS}
        generation = int(table._engine.index.arrays.generation[prompt])
        slots = table.extend(
            stacked,
            lengths=[3, 1, 2],
            prefix=np.array([prompt, -1, slot]),
            prefix_steps=torch.tensor([8, 0, 14]),
            prefix_generation=[generation, -1, generation],
            priority=[3, 2, 1],
        )
        before, cut = {prompt: first, slot: table[slot]}, [3, 1, 2]
        for each, parent, steps, length in zip(slots, [prompt, None, slot], [8, 0, 14], cut, strict=True):
            new = {name: values[:length] for name, values in second.items()}
            expected = new if parent is None else joined(STEPS, before[parent], steps, new)
            assert same(table[int(each)], expected)
        assert table.final(int(slots[0])) is None
        table.check_valid()


def test_what_is_refused_changes_nothing() -> None:
    plain = rows(STEPS, 1, 5)
    with table_of(prefixes=False) as table:
        slot = table.add(plain)
        with pytest.raises(
            SchemaError, match=r"shares no blocks; .* memory=gear_loader.Memory\(prefixes=True\)"
        ):
            table.add(plain, prefix=slot)
    with table_of(on_full="error", max_blocks=4, timeout=0.1) as table:
        slot = table.add(plain)
        for options, message in (
            ({"prefix": slot, "prefix_steps": 6}, "prefix_steps of trajectory 0 is 6; expected 1 to 5"),
            ({"prefix": slot, "prefix_steps": 0}, "prefix_steps of trajectory 0 is 0; expected 1 to 5"),
            ({"prefix": [slot, slot]}, r"prefix is \[0, 0\]; expected an integer, or \[1\]"),
            ({"prefix": "x"}, "prefix is 'x'; expected the index of a trajectory, or the name of a column"),
            ({"prefix_steps": 3}, "prefix_steps is 3 and prefix_generation None without prefix"),
        ):
            with pytest.raises(SchemaError, match=message):
                table.add(plain, **options)  # type: ignore[arg-type]
        for options in ({"prefix": 17}, {"prefix": 77}, {"prefix": slot, "prefix_generation": 5}):
            with pytest.raises(StaleIndexError):
                table.add(plain, **options)
        with pytest.raises(TableFullError, match="The table is full: 1 trajectory of 16 steps"):
            table.add(rows(STEPS, 2, 11), prefix=slot)
        assert table.indices().tolist() == [slot]
        assert table.stats().blocks_in_use == 2
        table.check_valid()
    late = {**STEPS, "advantage": gear.Column(torch.float32, late=True)}
    mutable = {**STEPS, "state": gear.Column(torch.float32, mutable=True)}
    for columns, kind in ((late, "late"), (mutable, "mutable")):
        memory = gear.Memory(prefixes=True)
        with pytest.raises(SchemaError, match=rf"prefixes is True, and the columns \['\w+'\] are {kind}"):
            gear.Table.create(columns, max_steps=9, max_trajectories=3, memory=memory)
    with pytest.raises(SchemaError, match="Memory prefixes is 1; expected True or False"):
        gear.Memory(prefixes=1)  # type: ignore[arg-type]


def test_values_of_any_length_that_a_trajectory_has_once() -> None:
    columns = {**STEPS, "answer": gear.Column(str, per="trajectory")}
    memory = gear.Memory(payload="4KiB", prefixes=True)
    del columns["obs"]
    with gear.Table.create(columns, max_steps=200, max_trajectories=9, block_steps=4, memory=memory) as table:
        first = {**rows(STEPS, 1, 10), "answer": "a"}
        del first["obs"]
        slot = table.add(first)
        others = table.extend([{**first, "answer": "b" * n} for n in range(3)], prefix=slot, prefix_steps=9)
        table.remove(slot)
        assert [table[int(other)]["answer"] for other in others] == ["", "b", "bb"]
        assert table[int(others[1])]["token"].tolist() == [*range(1000, 1009), *range(1000, 1010)]
        table.check_valid()


def test_a_loaded_table_shares_values_of_steps_and_groups(tmp_path: Path) -> None:
    columns = {
        "token": STEPS["token"],
        "image": gear.Column(torch.uint8, (None,)),
        "text": gear.Column(bytes, per="group"),
    }
    memory = gear.Memory(payload="4KiB", prefixes=True)
    with gear.Table.create(columns, max_steps=200, max_trajectories=9, memory=memory) as table:
        image = np.arange(200, dtype=np.uint8).repeat(10)
        first = table.add({"token": torch.arange(2), "image": [image, image[:3]], "text": b"x" * 500})
        others = {"token": torch.arange(2), "image": [image[:0], image[:9]]}
        table.extend([others] * 3, prefix=first, prefix_steps=1)
        used = table.stats().value_resident_bytes
        for removed in (False, True):
            table.save(tmp_path)
            with gear.Table.load(tmp_path) as loaded:
                assert loaded.stats().value_resident_bytes <= used
                loaded.check_valid()
                for slot, other in zip(loaded.indices().tolist(), table.indices().tolist(), strict=True):
                    assert loaded[slot]["image"].tolist()[0].tolist() == image.tolist()
                    assert loaded[slot]["image"].values.equal(table[other]["image"].values)
                    assert loaded[slot]["text"] == b"x" * 500
                again = loaded.add(others, prefix=int(loaded.indices()[-1]), prefix_steps=1)
                assert len(loaded[again]["image"]) == 3
                loaded.check_valid()
            if not removed:
                table.remove(first)
        with pytest.raises(CheckpointError, match=r"needs payload=2,\d+; the table has 2,048. Load it with"):
            gear.Table.load(tmp_path, payload=2_000)


@pytest.mark.parametrize("layout", ["padded", "packed"])
def test_batches_are_those_of_a_table_that_shares_nothing(layout: Any, tmp_path: Path) -> None:
    columns = {**STEPS, **ONCE}
    with table_of(columns) as shared, table_of(columns, prefixes=False, max_blocks=400) as apart:
        first = rows(columns, 1, 30)
        expected = [first]
        shared.add(first)
        for number in range(2, 10):
            new = rows(columns, number, number)
            shared.add(new, prefix=number % 3 * (number > 4), prefix_steps=21)
            expected.append(joined(columns, first, 21, new))
        for trajectory in expected:
            apart.add(trajectory)
        shared.save(tmp_path / "saved")
        windows: Any = gear.Whole() if layout == "packed" else gear.Window(6, -3, pad="edge")
        with gear.Table.load(tmp_path / "saved") as loaded:
            assert loaded.stats().blocks_in_use == shared.stats().blocks_in_use < apart.stats().blocks_in_use
            batches = [
                list(
                    itertools.islice(
                        gear.ReplayDataset(
                            table, windows=windows, batch_size=7, layout=layout, device="cpu", seed=3
                        ),
                        4,
                    )
                )
                for table in (shared, apart, loaded)
            ]
        for one, *others in zip(*batches, strict=True):
            for other in others:
                assert all(torch.equal(one[name], other[name]) for name in (*columns, "index", "anchor"))


def test_steps_of_several_trajectories_are_not_drawn_by_priority() -> None:
    with table_of() as table:
        table.add(rows(STEPS, 1, 5))
        with pytest.raises(
            SchemaError, match=r"draws steps by priority, and the table has Memory\(prefixes=True\)"
        ):
            next(
                iter(
                    gear.ReplayDataset(
                        table,
                        sampler=gear.Prioritized(unit="step"),
                        windows=gear.Window(1),
                        batch_size=2,
                        device="cpu",
                    )
                )
            )


def _adds_until_killed(name: str, begun: Any) -> None:
    with gear.Table.attach(name) as table:
        for number in itertools.count(2):
            slot = table.add(rows(STEPS, number, 5), prefix=0, prefix_steps=18)
            table.extend([rows(STEPS, number, 2)] * 2, prefix=[0, slot])  # which keeps both
            begun.set()


@pytest.mark.long
def test_processes_that_are_killed_leave_no_block() -> None:
    context = multiprocessing.get_context("forkserver")
    with table_of(name=fresh_name(), on_full="evict_oldest", max_blocks=40) as table:
        try:
            first = rows(STEPS, 1, 20)
            table.add(first)
            for _ in range(3):
                begun = context.Event()
                process = context.Process(target=_adds_until_killed, args=(table.name, begun))
                process.start()
                assert begun.wait(60)
                os.kill(process.pid, signal.SIGKILL)  # type: ignore[arg-type]
                process.join()
                bury(table)
                table.check_valid()
                for index in table.indices().tolist():
                    assert torch.equal(table[index]["token"][:18], first["token"][:18])
                assert 0 in table.indices(), "it is begun with all the time"
            for number in range(20):  # what a killed reader kept is free when its room is needed
                table.add(rows(STEPS, number, 20))
            table.remove(table.indices())
            assert table.stats().blocks_in_use == 0
        finally:
            table.unlink()
