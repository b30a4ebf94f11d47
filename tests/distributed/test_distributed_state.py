"""The state of datasets over shards: resumed bit for bit, on as many ranks and on others."""

from __future__ import annotations

import math
import os
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import filled, run_ranks
from test_global_selection import COUNTS, alone, kept, new_priorities, shards_of

import gear_loader as gear
from gear_loader.distributed import Shards

ROWS, BEFORE, AFTER = 24, 5, 5


def dataset(
    shards: Shards, selector: gear.selectors.Selector, prefetch: int, **options: Any
) -> gear.ReplayDataset:
    return gear.ReplayDataset(
        shards,
        batch_size=ROWS // shards.num_slices,
        windows=gear.Window(3),
        selector=selector,
        prefetch=prefetch,
        batches_per_epoch=math.inf,
        copy=True,
        **options,
    )


def steps(data: gear.ReplayDataset, first: int, count: int, iterator: Any = None) -> tuple[list[Any], Any]:
    """Batches, with new priorities after each of them."""
    iterator = iter(data) if iterator is None else iterator
    found = []
    for number in range(first, first + count):
        batch = next(iterator)
        found.append(kept(batch))
        if isinstance(data.selector, (gear.Prioritized, gear.TopK)):
            names = {key: batch.get(key, torch.zeros(1)) for key in ("index", "anchor", "shard")}
            data.update_priority(batch, new_priorities(names, number))
    return found, iterator


def same(some: list[Any], others: list[Any]) -> None:
    for number, (one, other) in enumerate(zip(some, others, strict=True)):
        for key in one:
            np.testing.assert_array_equal(one[key], other[key], err_msg=f"batch {number}, {key}")


SELECTORS = [
    gear.Prioritized(),
    gear.Prioritized(unit="step", normalize="table"),
    gear.Prioritized(replacement=False),
    gear.TopK(),
    gear.Uniform(replacement=False),
]


@pytest.mark.parametrize("prefetch", mostly_long([0, 2], 2))
@pytest.mark.parametrize("selector", SELECTORS, ids=repr)
def test_one_process_resumes_bit_for_bit(selector: gear.selectors.Selector, prefetch: int) -> None:
    data = dataset(alone(COUNTS), selector, prefetch)
    _, iterator = steps(data, 0, BEFORE)
    state = data.state_dict()
    expected, _ = steps(data, BEFORE, AFTER, iterator)
    again = dataset(alone(COUNTS), selector, prefetch)
    again.load_state_dict(state)
    found, _ = steps(again, BEFORE, AFTER)
    same(found, expected)
    steps(again, BEFORE, 2)  # a state that was loaded can be loaded twice
    third = dataset(alone(COUNTS), selector, prefetch)
    third.load_state_dict(state)
    same(steps(third, BEFORE, AFTER)[0], expected)


def resuming_rank(rank: int, world: int, scope: str, prefetch: int) -> Any:
    found = []
    with shards_of(rank, COUNTS) as shards:
        for selector in (gear.Prioritized(), gear.Prioritized(unit="step")):
            data = dataset(shards, selector, prefetch, scope=scope)
            _, iterator = steps(data, 0, BEFORE)
            state = data.state_dict()
            expected, iterator = steps(data, BEFORE, AFTER, iterator)
            iterator.close()
            again = dataset(shards, selector, prefetch, scope=scope)
            again.load_state_dict(state)
            mine, iterator = steps(again, BEFORE, AFTER)
            iterator.close()
            same(mine, expected)
            found.append((state, expected))
    return found


@pytest.mark.parametrize("scope", ["global", "local"])
def test_ranks_resume_bit_for_bit_and_every_rank_has_the_whole_state(scope: str) -> None:
    ranks = run_ranks(3, resuming_rank, scope, 1)
    for number in range(2):
        states = [rank[number][0]["priorities"] for rank in ranks]
        for other in states[1:]:
            assert repr(other) == repr(states[0])
        if scope == "global":  # the same batches in one process, from a state that three have saved
            one = dataset(alone(COUNTS[:3]), [gear.Prioritized(), gear.Prioritized(unit="step")][number], 1)
            one.load_state_dict(ranks[0][number][0])
            found, _ = steps(one, BEFORE, AFTER)
            for i, batch in enumerate(found):
                for key, values in batch.items():
                    together = np.concatenate([rank[number][1][i][key] for rank in ranks])
                    np.testing.assert_array_equal(values, together, err_msg=f"batch {i}, {key}")


def test_damaged_states_are_refused_before_anything_changes() -> None:
    data = dataset(alone([5, 5]), gear.Prioritized(), 0)
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


def local_rank(rank: int, world: int, counts: list[int]) -> Any:
    table = filled(f"gear-local-{os.getppid()}-{rank}", rank, counts)
    shards = Shards(table, timeout=30)
    table.unlink()
    found: dict[str, Any] = {}
    for normalize in ("batch", "table"):
        selector = gear.Prioritized(alpha=1.0, beta=1.0, normalize=normalize)
        data = gear.ReplayDataset(
            shards, batch_size=64, windows=gear.Window(1), selector=selector, scope="local", copy=True
        )
        batches = list(data)
        found[normalize] = (
            len(batches),
            kept(batches[0]),
            table.reader().arrays.priority[batches[0]["index"]].copy(),
        )
    plain = gear.ReplayDataset(
        shards, batch_size=8, windows=gear.Window(1), selector=gear.Uniform(replacement=False), scope="local"
    )
    found["passes"] = len(list(plain))
    mass = float(table.reader().arrays.priority[: counts[rank]].sum())
    shards.close()
    return found, mass


def test_local_draws_come_from_the_own_shard_and_weights_know_its_share() -> None:
    counts = [40, 10]
    ranks = run_ranks(2, local_rank, counts)
    masses = np.array([mass for _, mass in ranks])
    least = min(priority.min() / mass for (_, mass) in ranks for priority in [np.array([0.5])])
    for rank, (found, mass) in enumerate(ranks):
        for normalize in ("batch", "table"):
            length, batch, priorities = found[normalize]
            assert length == 1
            assert (batch["act"] // 1000 // 100 == rank).all()
            assert "shard" not in batch
            if normalize == "batch":
                expected = priorities.min() / priorities * mass / masses.max()
            else:
                expected = least / (priorities / mass)
            np.testing.assert_allclose(batch["priority_weight"], expected, rtol=1e-5)
        assert (
            found["passes"] == 5
        )  # as many as the rank with the most: none waits for others that have ended
