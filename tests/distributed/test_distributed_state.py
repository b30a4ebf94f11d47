"""The state of datasets and tables of ranks: resumed bit for bit, on as many ranks and on others."""

from __future__ import annotations

import math
import os
import pickle
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.distributed as dist
from dataset_common import copies, drawn, same_batches
from distributed_common import check_batch, filled, new_priorities, run_ranks, same_rows
from options_common import nested
from test_global_selection import COUNTS, alone, kept, shards_of
from torch.utils.data import DataLoader

import gear_loader as gear
from gear_loader import distributed
from gear_loader.distributed import Shards

ROWS, BEFORE, AFTER, WORLD = 24, 5, 5, 3
WINDOWS = gear.Window(3)
LOCAL = [40, 10, 5]


def dataset(shards: Shards, sampler: gear.samplers.Sampler, **options: Any) -> gear.ReplayDataset:
    options = {"prefetch": 0, "batches_per_epoch": math.inf, **options}
    rows = ROWS // shards.num_slices
    return gear.ReplayDataset(
        shards,
        **nested({"batch_size": rows, "windows": WINDOWS, "sampler": sampler, "copy": True, **options}),
    )


def steps(data: gear.ReplayDataset, first: int, count: int, iterator: Any = None) -> tuple[list[Any], Any]:
    """Batches, with new priorities after each of them."""
    iterator = iter(data) if iterator is None else iterator
    found = []
    for number in range(first, first + count):
        batch = next(iterator)
        found.append(kept(batch))
        if isinstance(data.sampler, (gear.Prioritized, gear.TopK)):
            names = {key: batch.get(key, torch.zeros(1)) for key in ("index", "anchor", "shard")}
            data.update_priority(batch, new_priorities(names, number))
    return found, iterator


def test_damaged_states_are_refused_before_anything_changes() -> None:
    data = dataset(alone([5, 5]), gear.Prioritized())
    next(iter(data))
    state = data.state_dict()
    good = state["priorities"]
    for name, bad in (
        ("ids", good["ids"][:-1]),
        ("leaves", torch.full_like(good["leaves"], math.nan)),
        ("lengths", good["lengths"].float()),
        ("maximum", -1.0),
        ("update_ids", torch.zeros(3)),
        ("recent", [{"epoch": 0}]),
    ):
        before = repr(data.state_dict())
        with pytest.raises(gear.errors.SchemaError, match="priorities are damaged"):
            data.load_state_dict({**state, "priorities": {**good, name: bad}})
        assert repr(data.state_dict()) == before


def saving_rank(rank: int, world: int, folder: str) -> dict[str, Any]:
    with filled(f"gear-plain-{os.getppid()}-{rank}", 0, [9]) as table:
        found: dict[str, Any] = {"plain": plain_batches(table)}
        table.unlink()
    found["local draws"] = local_draws(rank)
    with shards_of(rank, COUNTS) as shards:
        for scope in ("local", "global"):
            for sampler in (gear.Prioritized(unit="step"), gear.Prioritized()):
                data = dataset(shards, sampler, prefetch=1, scope=scope)
                _, iterator = steps(data, 0, BEFORE)
                state, part = data.state_dict(), data.state_dict(full=False)
                expected, iterator = steps(data, BEFORE, AFTER, iterator)
                iterator.close()
                found[f"{scope} {sampler.unit}"] = (state, part, expected)
                parts = everyones(part, world)
                whole = everyones(state, world)[0]
                given = {"saved by rank 0": whole, "its part": part, "as each rank has it": state}
                if scope == "global":
                    given["another rank's"] = parts[(rank + 1) % world]
                    given["two"] = distributed.join_states([parts[rank], parts[(rank + 1) % world]])
                    given["all by one rank"] = whole if rank == 1 else part
                    older = {k: v for k, v in whole["priorities"].items() if k not in ("of", "checksum")}
                    given["an older one"] = {**whole, "priorities": older}
                for name, one in given.items():
                    again = dataset(shards, sampler, prefetch=1, scope=scope)
                    again.load_state_dict(one)
                    saved = again.state_dict()
                    assert rank or unchecked(saved) == unchecked(whole), name
                    mine, iterator = steps(again, BEFORE, AFTER)
                    iterator.close()
                    same_rows([mine], expected, name)
        found["refused"] = refused(shards, parts, state, rank)
        distributed.save(shards, Path(folder, "tables"))
        torch.save(part, Path(folder, f"part-{rank}"))
        shards.table.remove(shards.table.indices()[0])
        distributed.save(shards, Path(folder, "later"))
        found["tables"] = contents(shards.table)
        return found


def unchecked(state: dict[str, Any]) -> str:
    """A state without its checksum: which rank saves which rows of the last batches is not told."""
    priorities = {key: value for key, value in state["priorities"].items() if key != "checksum"}
    return repr({**state, "priorities": priorities})


def everyones(value: Any, world: int) -> list[Any]:
    found: list[Any] = [None] * world
    dist.all_gather_object(found, value)
    return found


def refused(shards: Shards, parts: list[Any], state: Any, rank: int) -> list[str]:
    """Errors of states that do not fit; nothing has changed afterwards."""
    data = dataset(shards, gear.Prioritized())
    data.load_state_dict(parts[rank])
    before, found = repr(data.state_dict(full=False)), []
    damaged = {**parts[1], "priorities": {**parts[1]["priorities"], "maximum": -1.0}}
    later = {**parts[rank], "priorities": {**parts[rank]["priorities"], "checksum": 1}}
    if rank == 0:  # the whole state, but later
        later = {**state, "priorities": {**state["priorities"], "checksum": 1}}
    mixed = later if rank != 1 else parts[rank]
    for bad in (parts[0], damaged if rank == 1 else parts[rank], mixed):
        with pytest.raises(gear.errors.GearError) as failed:
            data.load_state_dict(bad)
        found.append(f"{type(failed.value).__name__}: {failed.value}")
    assert repr(data.state_dict(full=False)) == before
    return found


def plain(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    """A dataset of a single table, of which each rank of a process group gets its batches unasked."""
    options = {"sampler": gear.Uniform(replacement=False, unit="step"), **options}
    return gear.ReplayDataset(
        table, **nested({"batch_size": 4, "windows": gear.Window(4, -2), "seed": 9, **options})
    )


def plain_batches(table: gear.Table) -> dict[str, Any]:
    warnings.simplefilter("error")
    # Python 3.12 and newer warn when a process with threads forks, as a DataLoader does.
    warnings.filterwarnings("ignore", "This process .* is multi-threaded", DeprecationWarning)
    data, resumed = plain(table), plain(table)
    found: dict[str, Any] = {"epochs": [copies(data), copies(data)], "length": len(data)}
    found["sample"] = copies([data.sample()])
    # A spawned worker gets the dataset as a pickle and has no process group of its own.
    found["pickled"] = pickle.loads(pickle.dumps(data))._origin.rank()
    resumed.load_state_dict({**data.state_dict(), "epoch": 0, "step": 1})
    found["resumed"] = copies(resumed)
    found["worker"] = copies(DataLoader(plain(table), batch_size=None, num_workers=1))
    found["given"] = copies(plain(table, rank=0, world_size=1))
    found["with replacement"] = copies(plain(table, sampler=gear.Uniform()))
    return found


def local_draws(rank: int) -> Any:
    table = filled(f"gear-local-{os.getppid()}-{rank}", rank, LOCAL)
    shards = Shards(table, timeout=30)
    table.unlink()
    found: dict[str, Any] = {}
    options: dict[str, Any] = {"windows": gear.Window(1), "scope": "local"}
    for normalize in ("batch", "table"):
        sampler = gear.Prioritized(alpha=1.0, beta=1.0, normalize=normalize)
        batches = list(
            gear.ReplayDataset(
                shards, **nested({"batch_size": 64, "sampler": sampler, "copy": True, **options})
            )
        )
        found[normalize] = (
            len(batches),
            kept(batches[0]),
            table._engine.reader().arrays.priority[batches[0]["index"]].copy(),
        )
    once = gear.Uniform(replacement=False)
    found["passes"] = len(
        list(gear.ReplayDataset(shards, **nested({"batch_size": 8, "sampler": once, **options})))
    )
    mass = float(table._engine.reader().arrays.priority[: LOCAL[rank]].sum())
    shards.close()
    return found, mass


def contents(table: gear.Table) -> dict[int, tuple[Any, ...]]:
    slots = table.indices()
    return {
        int(name): (table[slot]["act"].numpy().tobytes(), float(table._engine.reader().arrays.priority[slot]))
        for name, slot in zip(table.ids(slots), slots, strict=True)
    }


def loading_rank(rank: int, world: int, folder: str) -> Any:
    table = distributed.load(Path(folder, "tables"), name=f"gear-elastic-{os.getppid()}-{rank}")
    with Shards(table, timeout=30) as shards:
        table.unlink()
        found = contents(table)
        data = dataset(shards, gear.Prioritized(), batches_per_epoch=None)
        files = sorted(Path(folder).glob("part-*"))
        mine = [torch.load(file) for file in files[rank::world] or files[:1]]
        data.load_state_dict(distributed.join_states(mine))
        restored = data.state_dict()["priorities"]
        for batch in data:
            check_batch(batch, WINDOWS)
        new = table.ids(np.array([table.add({k: v.numpy() for k, v in table[table.indices()[0]].items()})]))
        return found, [restored[name] for name in ("ids", "leaves")], int(new[0])


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def ranks(folder: Path) -> list[dict[str, Any]]:
    return run_ranks(WORLD, saving_rank, str(folder))


def test_ranks_resume_bit_for_bit_each_from_its_part_or_all_from_that_of_rank_0(
    ranks: list[dict[str, Any]],
) -> None:
    for unit in ("trajectory", "step"):
        for scope in ("local", "global"):
            states, parts, _ = zip(*(rank[f"{scope} {unit}"] for rank in ranks), strict=True)
            assert repr(states[1:]) == repr(parts[1:])  # only rank 0 holds the state of others
            whole = distributed.join_states(reversed(parts))
            assert repr(whole) == repr(states[0])
            assert "parts" not in whole["priorities"]
        assert [len(part["priorities"]["ids"]) for part in parts] == COUNTS[:WORLD]
        # The same batches in one process, from a state that three have saved.
        one = dataset(alone(COUNTS[:WORLD]), gear.Prioritized(unit=unit), prefetch=1)
        one.load_state_dict(whole)
        same_rows([rank[f"global {unit}"][2] for rank in ranks], steps(one, BEFORE, AFTER)[0], unit)


def test_parts_that_do_not_make_a_state_are_refused_on_all_ranks(ranks: list[dict[str, Any]]) -> None:
    for rank, (lost, damaged, mixed) in enumerate(each["refused"] for each in ranks):
        assert lost.startswith(
            "SchemaError: The state was saved by 3 ranks, and no rank was given the parts of [1, 2]."
        )
        assert "priorities are damaged" in damaged
        assert damaged.startswith(
            "SchemaError" if rank == 1 else "RankError: Rank 1 could not load its state: "
        )
        assert mixed.startswith("SchemaError: The ranks [0, 1, 2] load parts of different states; expected")
    first, second, third = (rank["global trajectory"][1] for rank in ranks)
    one = dataset(alone(COUNTS[:WORLD]), gear.Prioritized(), prefetch=1)
    with pytest.raises(gear.errors.SchemaError, match=r"was given the parts of \[1\]"):
        one.load_state_dict(distributed.join_states([first, third]))
    for states, text in (
        ([], r"\[\] was given; expected a state_dict\(\) of each"),
        ([first, {**second, "step": 0}], "are of different moments"),
        (
            [first, {**second, "priorities": {**second["priorities"], "checksum": 0}}],
            "are of different states",
        ),
        ([first, {**second, "priorities": {"parts": [1]}}], "is damaged: KeyError"),
        ([first, {key: second[key] for key in second if key != "priorities"}], "holds no priorities"),
        (
            [distributed.join_states([first, second]), distributed.join_states([second, third])],
            "parts overlap",
        ),
    ):
        with pytest.raises(gear.errors.SchemaError, match=text):
            distributed.join_states(states)


def test_local_draws_come_from_the_own_shard_and_weights_know_its_share(ranks: list[dict[str, Any]]) -> None:
    masses = np.array([rank["local draws"][1] for rank in ranks])
    for rank, (found, mass) in enumerate(each["local draws"] for each in ranks):
        for normalize in ("batch", "table"):
            length, batch, priorities = found[normalize]
            assert length == 1
            assert (batch["act"] // 1000 // 100 == rank).all()
            assert "shard" not in batch
            expected = priorities.min() / priorities * mass / masses.max()
            if normalize == "table":
                expected = 0.5 / masses.max() / (priorities / mass)
            np.testing.assert_allclose(batch["priority_weight"], expected, rtol=1e-5)
        # As many as the rank with the most: it does not wait for others that have ended.
        assert found["passes"] == 5


@pytest.mark.parametrize("world", [2, pytest.param(4, marks=pytest.mark.long)])
def test_tables_and_priorities_go_on_with_other_numbers_of_ranks(
    ranks: list[dict[str, Any]], folder: Path, world: int
) -> None:
    state = ranks[0]["global trajectory"][0]["priorities"]
    order = state["ids"].argsort()
    together: dict[int, Any] = {}
    fresh, held = [], []
    for found, (ids, leaves), new in run_ranks(world, loading_rank, str(folder)):
        assert not set(found) & set(together)
        together |= found
        fresh.append(new)
        held.append(len(ids))
        at = ids.argsort()
        if len(held) == 1:
            assert torch.equal(ids[at], state["ids"][order])
            assert torch.equal(leaves[at], state["leaves"][order])
        else:
            assert set(ids.tolist()) == set(found)
    assert len(set(fresh)) == world
    assert not set(fresh) & set(together)
    for rank in ranks:  # taken after one of each was removed
        assert all(together[name] == value for name, value in rank["tables"].items())
    assert len(together) == sum(COUNTS[:WORLD])


def test_ranks_deal_the_batches_of_a_single_table(ranks: list[dict[str, Any]]) -> None:
    with filled(None, 0, [9]) as table:
        alone, steps = plain(table), table.num_steps
        parts = [rank["plain"] for rank in ranks]
        for epoch in range(2):
            expected = copies(alone)
            assert len(expected) == -(-steps // 4)
            runs = [part["epochs"][epoch] for part in parts]
            assert (
                {len(run) for run in runs}
                == {part["length"] for part in parts}
                == {-(-len(expected) // WORLD)}
            )
            dealt = [batch for batches in zip(*runs, strict=True) for batch in batches][: len(expected)]
            same_batches(expected, dealt)
            keys = drawn(dealt)  # together each step once, and the padding
            assert len(keys) == len(set(keys)) == steps
        for rank, part in enumerate(parts):
            same_batches(part["epochs"][0][1:], part["resumed"])
            same_batches(part["epochs"][0], part["worker"])
            same_batches(copies(plain(table)), part["given"])
            assert part["pickled"] == (rank, WORLD)
        assert drawn(parts[0]["sample"]) != drawn(parts[1]["sample"])
        # Trajectories, with replacement.
        expected = copies(plain(table, sampler=gear.Uniform()))
        runs = [part["with replacement"] for part in parts]
        assert {len(run) for run in runs} == {-(-len(expected) // WORLD)}
        dealt = [batch for batches in zip(*runs, strict=True) for batch in batches]
        same_batches(expected, dealt[: len(expected)])
