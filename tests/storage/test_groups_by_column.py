"""`prefix="column"`: values per group are stored once for the trajectories with the same value of a column."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tier_common import move, promote, spill, tier_at

import gear_loader as gear
from gear_loader.errors import SchemaError

COLUMNS = {
    "token": gear.Column(torch.int64),
    "prompt": gear.Column(torch.int64, per="trajectory"),
    "images": gear.Column(torch.uint8, (None, 8, 8), per="group"),
    "text": gear.Column(str, per="group"),
}


def table_of(**options: Any) -> gear.Table:
    memory = gear.Memory(payload=options.pop("payload", "1MiB"), prefixes=True, max_blocks=200)
    sizes: dict[str, Any] = {"max_steps": 500, "max_trajectories": 20, "block_steps": 4}
    return gear.Table.create(COLUMNS, memory=memory, **{**sizes, **options})


def answer(prompt: int, length: int = 5) -> dict[str, Any]:
    images = np.full((1 + prompt % 3, 8, 8), prompt, dtype=np.uint8)
    return {
        "token": np.arange(length) + prompt,
        "prompt": prompt,
        "images": images,
        "text": f"question {prompt}",
    }


def check(table: gear.Table, prompts: dict[int, int]) -> None:
    for slot, prompt in prompts.items():
        found, expected = table[slot], answer(prompt, len(table[slot]["token"]))
        assert found["text"] == expected["text"]
        assert np.array_equal(found["images"], expected["images"])
        assert found["token"].tolist() == expected["token"].tolist()
    table.check_valid()


def test_values_are_stored_once_and_freed_with_the_last() -> None:
    with table_of() as table:
        prompts = [7, 8, 7, 7, 8, 9]
        slots = table.extend([answer(prompt) for prompt in prompts], prefix="prompt").tolist()
        once = table.stats().value_resident_bytes
        live = dict(zip(slots, prompts, strict=True))
        check(table, live)
        for prompt in (8, 9, 7):  # given again, or left out
            live[table.add(answer(prompt), prefix="prompt")] = prompt
            few = {name: value for name, value in answer(prompt, 3).items() if name in ("token", "prompt")}
            live[table.add(few, prefix="prompt")] = prompt
        check(table, live)
        assert table.stats().value_resident_bytes == once
        for slot in slots[:2]:  # that the values were stored with
            table.remove(slot)
            del live[slot]
        check(table, live)
        assert table.stats().value_resident_bytes == once
        live[table.add({"token": np.arange(5) + 7, "prompt": 7}, prefix="prompt")] = 7
        check(table, live)
        for slot in [slot for slot, prompt in live.items() if prompt == 8]:
            table.remove(slot)
            del live[slot]
        assert table.stats().value_resident_bytes < once
        with pytest.raises(SchemaError, match="images"):
            table.add({"token": np.arange(5), "prompt": 8}, prefix="prompt")
        live[table.add(answer(8), prefix="prompt")] = 8
        check(table, live)


@pytest.mark.parametrize(
    ("turns", "tier"),
    [(50, False), (20, True), *(pytest.param(200, tier, marks=pytest.mark.long) for tier in (False, True))],
)
def test_groups_while_others_are_evicted(turns: int, tier: bool, tmp_path: Path) -> None:
    rng = np.random.default_rng(0)
    with table_of(on_full="evict_oldest", **tier_at(tmp_path if tier else None)) as table:
        for number in range(turns):
            move(table, rng)
            some = [
                answer(int(each), int(rng.integers(1, 30)))
                for each in rng.integers(number // 8, number // 8 + 3, 3)
            ]
            slots = table.extend(
                iter(some) if number % 2 else some, priority=[1.0, 2.0, 3.0], prefix="prompt"
            )
            check(table, {slot: some[i]["prompt"] for i, slot in enumerate(slots.tolist())})
        check(table, {int(slot): int(table[slot]["prompt"]) for slot in table.indices()})


def test_groups_of_which_all_are_on_disk(tmp_path: Path) -> None:
    """They are found, and brought back with their values, which are there once again."""
    with table_of(**tier_at(tmp_path), timeout=20.0) as table:
        prompts = [7, 7, 8, 8, 8]
        live = dict(
            zip(
                table.extend([answer(prompt) for prompt in prompts], prefix="prompt").tolist(),
                prompts,
                strict=True,
            )
        )
        once = table.stats().value_resident_bytes
        table.save(tmp_path)
        for _ in range(2):
            assert spill(table, list(live)) == 5
            assert table.stats().value_resident_bytes == 0
            promote(table, list(live)[-1])
            assert 0 < table.stats().value_resident_bytes < once
            few = [{"token": np.arange(5) + prompt, "prompt": prompt} for prompt in (8, 7)]
            live |= dict(zip(table.extend(iter(few), prefix="prompt").tolist(), (8, 7), strict=True))
            check(table, live)
            for slot in live:
                promote(table, slot)
            check(table, live)
            assert table.stats().value_resident_bytes == once
            for slot in list(live)[-2:]:
                table.remove(slot)
                del live[slot]


@pytest.mark.parametrize(
    ("prefix", "more", "message"),
    [
        ("token", {}, "per='trajectory'"),
        ("text", {}, "per='trajectory'"),
        ("nothing", {}, "per='trajectory'"),
        ("prompt", {"prefix_steps": 1}, "none of these"),
    ],
)
def test_what_is_refused(prefix: str, more: dict[str, Any], message: str) -> None:
    with table_of() as table:
        with pytest.raises(SchemaError, match=message):
            table.add(answer(1), prefix=prefix, **more)
        with pytest.raises(SchemaError, match="list of trajectories"):
            table.extend({"token": np.zeros((2, 3))}, prefix=prefix if prefix == "prompt" else "prompt")
        assert not len(table)


def test_what_does_not_fit_is_not_stored() -> None:
    with table_of() as table:
        for bad in (
            {"prompt": "x"},
            {"prompt": 2.5},
            {"prompt": [1, 2]},
            {"text": 3},
            {"token": np.zeros(3)},
        ):
            with pytest.raises(SchemaError):
                table.extend([answer(1), {**answer(2), **bad}], prefix="prompt")
            assert not len(table)
    plain = {name: column for name, column in COLUMNS.items() if name != "text"}
    with (
        gear.Table.create(
            plain, max_steps=50, max_trajectories=5, memory=gear.Memory(payload="64KiB")
        ) as table,
        pytest.raises(SchemaError, match="prefixes=True"),
    ):
        table.add({name: value for name, value in answer(1).items() if name != "text"}, prefix="prompt")
