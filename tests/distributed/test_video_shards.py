"""Columns of video over shards: the frames of one process, bit for bit, also where groups lie on another node."""

from __future__ import annotations

import itertools
import os
from typing import Any

import numpy as np
import pytest
import torch
from distributed_common import on_two_nodes, one_far, run_ranks
from table_common import fresh_name

import gear_loader as gear
from gear_loader.collection.tier_rows import TierRows
from gear_loader.distributed import Shards
from gear_loader.distributed import remote as remote_module

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

H, W, KEY = 16, 32, 6
SCHEMA = {
    "video": gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("video", key_frames=KEY)),
    "number": gear.Column(torch.int64),
}
COUNTS = (5, 3, 6)
WINDOWS: dict[str, dict[str, Any]] = {
    "padded": {
        "number": gear.Window(3, -1),
        "video": gear.Window(3, -1),
        "edge": gear.Window(2, 4, pad="edge", column="video"),
        "head": gear.Window(9, -8, pad="head", column="video"),
        "tail": gear.Window(4, -2, pad="tail", column="video"),
        "now": gear.Window(1, squeeze=True, column="video"),
        "apart": gear.Window(at=[-9, 5, 0], column="video"),
        "times": gear.Window(at=[-4, 0], timestamps="number", tolerance=0, column="video"),
    },
    "packed": {"number": gear.Whole(), "video": gear.Whole(), "again": gear.Whole(column="video")},
}


def clip(length: int, seed: int) -> np.ndarray[Any, Any]:
    """Frames of noise that moves, of which each differs from the one before."""
    noise = np.random.default_rng(seed).integers(0, 256, (H, W + length, 3), dtype=np.uint8)
    return np.stack([noise[:, i : i + W] for i in range(length)])


def make(name: str | None, shard: int) -> gear.Table:
    sizes: dict[str, Any] = {"max_steps": 2000, "max_trajectories": 50, "block_steps": 4, "name": name}
    table = gear.Table.create(SCHEMA, memory=gear.Memory(payload="4MiB"), **sizes)
    for i in range(COUNTS[shard]):
        number = 100 * shard + i
        length = number * 7 % 23 + 1
        table.add({"video": clip(length, number), "number": 1000 * number + np.arange(length)})
    return table


def draw(shards: Shards, rank: int, world: int) -> list[dict[str, torch.Tensor]]:
    remote_module.PART_BYTES = 900  # frames in several requests, and cut
    found = []
    for layout, windows in WINDOWS.items():
        options: dict[str, Any] = {"windows": windows, "layout": layout, "device": "cpu", "seed": 1}
        data = gear.ReplayDataset(shards, batch_size=12 // world, batches_per_epoch=3, **options)
        for batch in data:
            names = [name for name in windows if isinstance(batch[name], torch.Tensor)]
            assert len(names) == len(windows)
            found.append({name: batch[name].clone() for name in names})
    return found


def rank_of(rank: int, world: int, transport: str) -> Any:
    return on_two_nodes(make(f"gear-video-{os.getppid()}-{rank}", rank), rank, world, draw, transport)


def same(one: torch.Tensor, frames: torch.Tensor) -> bool:
    return torch.equal(one, frames)


def test_frames_of_two_shards_are_those_of_their_rows() -> None:
    tables = [make(None, shard) for shard in (0, 1)]
    known = {
        int(table[i]["number"][0]) // 1000: table[i]["video"] for table in tables for i in table.indices()
    }
    with Shards(tables) as shards:
        for number, batch in enumerate(draw(shards, 0, 1)):
            if number < 3:
                for row, steps in enumerate(batch["number"].tolist()):
                    episode, step = divmod(max(steps), 1000)
                    frames, last = known[episode], len(known[episode]) - 1
                    anchor = step if steps[2] == 0 and steps[1] else step - 1 if steps[2] else step
                    assert same(batch["now"][row], frames[anchor])
                    edge = [min(anchor + 4, last), min(anchor + 5, last)]
                    assert same(batch["edge"][row], frames[torch.tensor(edge)])
                    before = frames[anchor - 4] if anchor >= 4 else torch.zeros_like(frames[0])
                    assert same(batch["times"][row, 0], before)
            else:
                steps = batch["number"].tolist()
                assert same(batch["video"], torch.stack([known[s // 1000][s % 1000] for s in steps]))
                assert same(batch["video"], batch["again"])


@pytest.mark.long
@pytest.mark.parametrize("transport", ["socket"])
def test_ranks_get_the_frames_of_one_process(transport: str) -> None:
    ranks = run_ranks(3, rank_of, transport)
    with Shards([make(None, shard) for shard in range(3)]) as shards:
        whole = draw(shards, 0, 1)
    for number, expected in enumerate(whole):
        for name, values in expected.items():
            assert torch.cat([found[number][name] for found in ranks]).equal(values), (number, name)


GROWING = {**SCHEMA, "text": gear.Column(str)}
LATE: dict[str, dict[str, Any]] = {
    **{pad: {"windows": gear.Window(3, 1, pad=pad)} for pad in ("keep", "edge", "head", "tail")},
    "past": {"windows": gear.Window(2, 3, pad="edge")},
    "chosen": {"windows": gear.Window(at=[-1, 2, 4], pad="edge")},
    "timed": {"windows": gear.Window(at=[-1, 0, 3], timestamps="number", tolerance=0)},
    "packed": {"windows": gear.Whole(), "layout": "packed"},
}


@pytest.mark.parametrize(
    ("kind", "cache"), [*((kind, None) for kind in LATE), ("keep", "64KiB"), ("edge", "64KiB")]
)
def test_frames_are_those_of_rows_that_grow_after_the_draw(
    kind: str, cache: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before a server gathers rows, and between its first look at their lengths and the gather."""
    options, turns, gathered = dict(LATE[kind]), itertools.count(), TierRows.gather
    windows = dict.fromkeys(GROWING, options.pop("windows"))
    if kind != "packed":
        options["sampler"], windows["last"] = (
            gear.Uniform(unit="step"),
            gear.Window(1, squeeze=True, column="video"),
        )
    sizes: dict[str, Any] = {"max_steps": 400, "max_trajectories": 8, "block_steps": 2}
    memory = gear.Memory(payload="4MiB")
    with (
        gear.Table.create(GROWING, memory=memory, **sizes) as near,
        gear.Table.create(GROWING, memory=memory, name=fresh_name(), **sizes) as far,
        near.writer(commit_every_step=True) as here,
        far.writer(commit_every_step=True) as there,
    ):
        tables, length = ((near, here), (far, there)), 0

        def grow() -> None:
            nonlocal length
            for shard, (_, writer) in enumerate(tables):
                number = 1000 * shard + length
                frame = clip(1, 7 + number)[0]
                writer.append({"video": frame, "number": number, "text": str(number)})
            length += 1

        def gather(*args: Any) -> int:
            if next(turns) % 2 == 0:
                grow()
            return gathered(*args)

        monkeypatch.setattr(TierRows, "gather", gather)
        grow()
        grow()
        with one_far(far, near, grow, cache) as shards:
            given: dict[str, Any] = {"batch_size": 8, "batches_per_epoch": 4, "device": "cpu", "prefetch": 0}
            data = gear.ReplayDataset(shards, windows=windows, **given, **options)
            for _ in range(4):
                batch, before = data.sample(), length
                assert before > 2
                frames = {
                    int(number): frame
                    for table, _ in tables
                    for step in [table[0]]
                    for number, frame in zip(step["number"], step["video"], strict=True)
                }
                numbers, texts, mask = batch["number"], batch["text"], batch.get("mask")
                mask = mask["video"] if isinstance(mask, dict) else mask
                if kind == "packed":
                    assert texts == [str(number) for number in numbers.tolist()]
                    assert same(batch["video"], torch.stack([frames[number] for number in numbers.tolist()]))
                    continue
                for row, anchor in enumerate((batch["anchor"] + 1000 * batch["shard"]).tolist()):
                    assert same(batch["last"][row], frames[anchor])
                    for i, number in enumerate(numbers[row].tolist()):
                        shown = bool(mask[row, i]) or windows["video"].pad == "edge"
                        expected = frames[number] if shown else torch.zeros_like(frames[0])
                        assert same(batch["video"][row, i], expected), (row, i, number)
                        assert texts[row][i] == (str(number) if shown else "")
