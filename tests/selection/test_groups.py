"""Groups that are drawn whole, against a plain dict of what is complete."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from options_common import nested

import gear_loader as gear
from gear_loader.errors import SchemaError, TableEmptyError

COLUMNS = {
    "token": gear.Column(torch.int32),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "number": gear.Column(torch.int32, per="trajectory"),
    "reward": gear.Column(torch.float32, per="trajectory", late=True),
}
SIZE = 3
ONCE = gear.Uniform(replacement=False)


def make(**options: Any) -> gear.Table:
    sizes = {"max_steps": 600, "max_trajectories": 60, "block_steps": 4, "timeout": 0.01}
    return gear.Table.create(COLUMNS, **{**sizes, **options})


def add(table: gear.Table, prompt: int, number: int, length: int = 4, **options: Any) -> int:
    steps = {"token": torch.full((length,), number, dtype=torch.int32), "prompt": prompt, "number": number}
    return table.add(steps, **options)


def dataset(table: gear.Table, **options: Any) -> gear.ReplayDataset:
    given: dict[str, Any] = {
        "windows": {"token": gear.Window(2), "prompt": None, "number": None},
        "batch_size": 2 * SIZE,
        "device": "cpu",
        "prefetch": 0,
        "group": "prompt",
        "group_size": SIZE,
        **options,
    }
    return gear.ReplayDataset(table, **nested(given))


def groups_of(batches: Iterable[Any]) -> list[tuple[int, tuple[int, ...]]]:
    """Prompt and numbers of each group, whose rows lie one after another."""
    found = []
    for batch in batches:
        prompts, numbers = batch["prompt"].reshape(-1, SIZE), batch["number"].reshape(-1, SIZE)
        assert (prompts == prompts[:, :1]).all()
        found += list(zip(prompts[:, 0].tolist(), map(tuple, numbers.tolist()), strict=True))
    return found


SAMPLERS = [gear.Uniform(), ONCE, gear.Fifo(), gear.Lifo(), gear.Prioritized(), gear.TopK()]


@given(
    acts=st.lists(st.tuples(st.sampled_from("aaaafr"), st.integers(0, 9)), max_size=60),
    sampler=st.sampled_from(SAMPLERS),
    reads=st.booleans(),
    varies=st.booleans(),
    whole=st.booleans(),
)
def test_only_complete_groups_are_drawn_and_whole(
    acts: list[tuple[str, int]], sampler: Any, reads: bool, varies: bool, whole: bool
) -> None:
    twin: dict[int, tuple[int, int, float | None]] = {}  # slot -> prompt, number, reward
    with make(max_trajectories=20, on_full="evict_oldest") as table:
        options: dict[str, Any] = {"sampler": sampler, "group_varies": "reward" if varies else None}
        if reads:
            options["windows"] = {"token": gear.Window(2), **dict.fromkeys(("prompt", "number", "reward"))}
        if whole:
            options |= {
                "layout": "packed",
                "windows": {**options.get("windows", {"prompt": None, "number": None})},
            }
            options["windows"]["token"] = gear.Whole()
        data = dataset(table, **options)
        for number, (act, place) in enumerate(acts):
            slots = list(twin)
            if act == "a" or not slots:
                if sum(prompt == place for prompt, _, _ in twin.values()) < SIZE:
                    slot = add(table, place, number)
                    twin.pop(slot, None)
                    for other in set(twin) - set(table.indices().tolist()):
                        del twin[other]
                    twin[slot] = place, number, None
                continue
            slot = slots[place % len(slots)]
            if act == "r":
                table.remove(slot)
                del twin[slot]
            elif twin[slot][2] is None:
                reward = float(number % 2)
                table.fill(slot, reward=reward)
                twin[slot] = (*twin[slot][:2], reward)
        members: dict[int, list[tuple[int, float | None]]] = {}
        for prompt, number, reward in twin.values():
            if reward is not None or not (reads or varies):
                members.setdefault(prompt, []).append((number, reward))
        complete = {prompt: sorted(each) for prompt, each in members.items() if len(each) == SIZE}
        constant = [prompt for prompt, each in complete.items() if len({reward for _, reward in each}) == 1]
        expected = {
            (prompt, tuple(number for number, _ in each))
            for prompt, each in complete.items()
            if not varies or prompt not in constant
        }
        if not expected:
            with pytest.raises(TableEmptyError, match="complete groups of 3 by 'prompt'"):
                data.sample()
            return
        for _ in range(3):
            assert set(groups_of([data.sample()])) <= expected
        stats = data.stats()
        assert stats["groups_complete"] == len(expected)
        assert stats["groups_constant"] == (len(constant) if varies else 0)
        assert stats["groups_incomplete"] == sum(len(each) for each in members.values() if len(each) < SIZE)
        if sampler.passes:
            assert sorted(groups_of(data)) == sorted(expected)


def fill_table(table: gear.Table, prompts: int = 12) -> None:
    for number, (member, prompt) in enumerate(itertools.product(range(SIZE), range(prompts))):
        add(table, prompt, number, 1 + (number * 7) % 5, priority=1.0 + prompt + member)


def test_an_incomplete_group_expires_as_a_whole() -> None:
    with make() as table:
        fill_table(table, 2)
        late = [add(table, 7, 70), add(table, 7, 71)]
        new = add(table, 8, 80)
        created = table._engine.region.array("created")
        hour = 3600 * 10**9
        created[:] -= hour
        created[late[1]] += hour  # added now: the group is waited for
        created[new] += hour
        data = dataset(table, group_max_age=1800.0)
        data.sample()
        assert data.stats()["groups_expired"] == 0
        created[late[1]] -= hour
        data._selected().former._looked = -math.inf  # type: ignore[attr-defined]
        data.sample()
        assert data.stats()["groups_expired"] == 2
        assert len(table) == 2 * SIZE + 1
        table.check_valid()


def test_a_draw_waits_for_a_complete_group() -> None:
    with make(timeout=0.3) as table:
        for number in range(SIZE - 1):
            add(table, 0, number)
        began = time.monotonic()
        with pytest.raises(TableEmptyError, match="Timed out: the table holds 2"):
            dataset(table).sample()
        assert time.monotonic() - began >= 0.3


def test_a_value_that_more_trajectories_have_is_an_error() -> None:
    with make() as table:
        for number in range(SIZE + 1):
            add(table, 5, number)
        with pytest.raises(SchemaError, match="4 trajectories have 'prompt' 5; expected at most 3"):
            dataset(table).sample()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"group_size": None}, "size is None; expected an integer"),
        ({"group": "token"}, "expected the name of an integer column"),
        ({"group": "reward"}, "expected the name of an integer column"),
        ({"group_varies": "token"}, "varies is 'token'"),
        ({"group_priority": "sum"}, "priority is 'sum'"),
        ({"group_max_age": 0}, "max_age is 0"),
        ({"batch_size": 7}, "multiple"),
    ],
)
def test_options_that_do_not_fit(options: dict[str, Any], message: str) -> None:
    with make() as table, pytest.raises(SchemaError, match=message):
        dataset(table, **options)
