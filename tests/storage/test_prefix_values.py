"""Ragged values of steps that trajectories share are stored once."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from tier_common import move, tier_at

import gear_loader as gear
from gear_loader.errors import TableFullError

COLUMNS = {
    "token": gear.Column(torch.int64),
    "output": gear.Column(str),
    "image": gear.Column(torch.uint8, (None, 5)),
    "goal": gear.Column(torch.float32, per="trajectory"),
    "prompt": gear.Column(str, per="group"),
}
BLOCK = 4


def table_of(names: Any = COLUMNS, *, prefixes: bool = True, **options: Any) -> gear.Table:
    memory = gear.Memory(payload=options.pop("payload", "24KiB"), prefixes=prefixes, max_blocks=400)
    sizes: dict[str, Any] = {"max_steps": 900, "max_trajectories": 24, "block_steps": BLOCK, "timeout": 0.2}
    return gear.Table.create({name: COLUMNS[name] for name in names}, memory=memory, **{**sizes, **options})


def rows(names: Any, number: int, length: int, random: np.random.Generator) -> dict[str, Any]:
    made = {
        "token": np.arange(length) + 1000 * number,
        "output": [f"{number}.{step} " * int(random.integers(0, 6)) for step in range(length)],
        "image": [
            random.integers(0, 255, (int(random.integers(0, 8)), 5), dtype=np.uint8) for _ in range(length)
        ],
        "goal": float(number),
        "prompt": f"question {number} " * int(random.integers(0, 6)),
    }
    return {name: made[name] for name in names}


def joined(first: dict[str, Any], steps: int, then: dict[str, Any]) -> dict[str, Any]:
    own = {**first, **then}
    for name in set(then) & {"token", "output", "image"}:
        both = [*first[name][:steps], *then[name]]
        own[name] = np.array(both) if name == "token" else both
    return own


def check(found: Any, expected: dict[str, Any]) -> None:
    for name, value in expected.items():
        if name == "image":
            assert all(map(np.array_equal, found[name].tolist(), value))
        elif name in ("token", "goal"):
            assert np.array_equal(np.asarray(found[name]), np.asarray(value))
        else:
            assert found[name] == value


def test_beside_a_twin() -> None:
    beside_a_twin(tuple(COLUMNS), "evict_oldest", 0, 60)


@pytest.mark.long
@pytest.mark.parametrize("seed", mostly_long(range(1, 7), sample=3))
def test_beside_a_twin_for_long(seed: int) -> None:
    names = tuple(COLUMNS) if seed % 2 else ("token", "output", "image")
    beside_a_twin(names, "error" if seed < 3 else "evict_oldest", seed, 400)


@pytest.mark.long
@pytest.mark.parametrize("seed", range(3))
def test_beside_a_twin_with_a_disk_tier(seed: int, tmp_path: Path) -> None:
    names = ("token", "output", "image") if seed % 2 else tuple(COLUMNS)
    beside_a_twin(names, "evict_oldest", seed, 60, tmp_path)


def beside_a_twin(names: Any, on_full: Any, seed: int, turns: int, path: Path | None = None) -> None:
    """Any trajectory begins with any steps of any other, in memory that is too small."""
    random = np.random.default_rng(seed)
    tier = {} if path is None else {**tier_at(path), "timeout": 20.0}
    with table_of(names, on_full=on_full, **tier) as table:
        known: dict[int, dict[str, Any]] = {}
        for number in range(turns):
            move(table, random)
            live = table.indices()
            if len(live) and random.random() < 0.15:
                table.remove(random.choice(live, 1))
                live = table.indices()
            given = expected = rows(names, number, int(random.integers(1, 2 * BLOCK)), random)
            options: dict[str, Any] = {}
            if len(live) and random.random() < 0.8:
                prefix = int(random.choice(live))
                steps = int(random.integers("prompt" not in names, len(known[prefix]["token"]) + 1))
                given = {name: value for name, value in given.items() if name != "prompt"}
                expected, options = (
                    joined(known[prefix], steps, given),
                    {"prefix": prefix, "prefix_steps": steps},
                )
            try:
                slot = table.add(given, **options)
            except TableFullError:
                table.remove(random.choice(table.indices(), len(table) // 2 + 1, replace=False))
                continue
            known[slot] = expected
            live = table.indices()
            for each in live.tolist() if number % 10 == 0 else {slot, *random.choice(live, 2).tolist()}:
                check(table[each], known[each])
            table.check_valid()
        assert path is None or table._engine.num_spilled > 0
        table.remove(table.indices())
        assert table.stats().value_resident_bytes == 0


def test_values_are_stored_once_while_one_of_a_group_is_there() -> None:
    names, random = ("token", "image"), np.random.default_rng(0)
    with table_of(names, payload="1MiB") as table:
        first = rows(names, 1, 40, random)
        slot = table.add(first)
        once = table.stats().value_resident_bytes
        given = {"token": np.arange(2), "image": [np.zeros((0, 5), np.uint8)] * 2}
        others = table.extend([given] * 8, prefix=slot, prefix_steps=38).tolist()
        assert table.stats().value_resident_bytes == once
        table.remove(slot)
        others.append(table.add(given, prefix=others[0], prefix_steps=38))
        assert table.stats().value_resident_bytes == once
        copy = table.add(given, prefix=others[0], prefix_steps=39)  # more than these have in common
        assert table.stats().value_resident_bytes > 1.8 * once
        for each in (*others, copy):
            assert all(map(np.array_equal, table[each]["image"].tolist()[:38], first["image"]))
        table.remove(others)
        table.check_valid()
        assert once / 2 < table.stats().value_resident_bytes < 1.2 * once


@pytest.mark.parametrize("layout", ["padded", "packed", "tree"])
def test_batches_are_those_of_a_table_that_shares_nothing(layout: Any, tmp_path: Any) -> None:
    random, names = np.random.default_rng(1), ("token", "output", "image")
    with table_of(names, payload="1MiB") as shared, table_of(names, payload="1MiB", prefixes=False) as apart:
        first = rows(names, 1, 30, random)
        for table in (shared, apart):
            table.add(first)
        for number in range(2, 9):
            new = rows(names, number, number, random)
            shared.add(new, prefix=0, prefix_steps=21)
            apart.add(joined(first, 21, new))
        shared.save(tmp_path / "saved")
        windows: Any = gear.Window(at=[-6, 0, 2], pad="edge") if layout == "padded" else gear.Whole()
        options: dict[str, Any] = {"windows": windows, "batch_size": 7, "device": "cpu", "seed": 3}
        with gear.Table.load(tmp_path / "saved", payload="1MiB") as loaded:
            plain = "packed" if layout == "tree" else layout
            batches = [
                list(itertools.islice(gear.ReplayDataset(table, layout=kind, **options), 4))
                for table, kind in ((shared, layout), (apart, plain), (loaded, plain))
            ]
        for one, *others in zip(*batches, strict=True):
            for other in others:
                for row in range(7):
                    for name in names:
                        assert values_of(one, name, row) == values_of(other, name, row)


def clip(first: int, count: int) -> Any:
    """Frames of one gray each, 8 apart."""
    return np.repeat(np.arange(first, first + 8 * count, 8, dtype=np.uint8), 3072).reshape(count, 32, 32, 3)


def test_frames_of_shared_videos() -> None:
    pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
    codec = gear.Codec("video", key_frames=5, crf=5)
    columns = {"frame": gear.Column(torch.uint8, (32, 32, 3), codec=codec), "step": gear.Column(torch.int64)}
    memory = gear.Memory(payload="1MiB", prefixes=True)
    with gear.Table.create(
        columns, max_steps=200, max_trajectories=9, block_steps=BLOCK, memory=memory
    ) as table:
        first = table.add({"frame": clip(0, 12), "step": np.arange(12)})
        slots = [
            table.add({"frame": clip(100, 3), "step": np.arange(3)}, prefix=first, prefix_steps=11)
            for _ in "ab"
        ]
        table.remove(first)
        slots.append(
            table.add({"frame": clip(200, 2), "step": np.arange(2)}, prefix=slots[0], prefix_steps=13)
        )
        expected = [*range(0, 88, 8), 100, 108, 116]
        for slot in slots[:2]:
            assert np.allclose(table[slot]["frame"].float().mean((1, 2, 3)), expected, atol=3)
        assert np.allclose(
            table[slots[2]]["frame"].float().mean((1, 2, 3)), [*expected[:13], 200, 208], atol=3
        )
        data = gear.ReplayDataset(table, batch_size=3, windows=gear.Whole(), layout="tree", device="cpu")
        batch = data.sample()
        assert (batch["parent"] >= 0).sum() >= 2
        ends = batch["cu_seqlens"].tolist()
        for row, slot in enumerate(batch["index"].tolist()):
            parts = [row] if batch["parent"][row] < 0 else [batch["parent"][row], row]
            found = torch.cat([batch["frame"][ends[part] : ends[part + 1]] for part in parts])
            assert found.equal(table[slot]["frame"])


def listed(values: Any) -> list[Any]:
    return [each.tolist() if hasattr(each, "tolist") else each for each in values]


def values_of(batch: Any, name: str, row: int) -> list[Any]:
    """The values of a row's steps."""

    found = batch[name] if isinstance(batch[name], list) else batch[name].tolist()

    def part(begin: int, end: int) -> list[Any]:
        return listed(found[begin:end])

    if "cu_seqlens" not in batch:
        return listed(found[row])
    ends = batch["cu_seqlens"].tolist()
    own = part(ends[row], ends[row + 1])
    parent = batch["parent"][row].item() if "parent" in batch else -1
    return own if parent < 0 else part(ends[parent], ends[parent + 1]) + own
