"""Ragged columns of tables with a disk tier over several nodes: the values of each row, though they move meanwhile."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import mostly_long
from distributed_common import one_far
from learner_common import connected
from table_common import fresh_name
from tier_common import fitting, move, spill, tiered

import gear_loader as gear
from gear_loader.checkpoint import saving
from gear_loader.distributed import Shards
from gear_loader.distributed import remote as remote_module
from gear_loader.storage.payload import PayloadReader

COLUMNS = {
    "step": gear.Column(torch.int64),
    "tokens": gear.Column(torch.int32, (None,)),
    "points": gear.Column(torch.float32, (None, 3)),
    "text": gear.Column(str),
    "packed": gear.Column(torch.int16, (5,), codec="zstd"),
    "prompt": gear.Column(str, per="trajectory"),
    "image": gear.Column(torch.uint8, (None, 2), per="group"),
}
FITS = {"payload": 4_000_000, "prefixes": True}
STEPS = ("tokens", "points", "text", "packed")
EVERY = ("step", *STEPS)
WINDOWS: dict[str, dict[str, Any]] = {
    "padded": {"windows": {**dict.fromkeys(EVERY, gear.Window(4, -2)), "prompt": None, "image": None}},
    "edge": {"windows": {**dict.fromkeys(EVERY, gear.Window(3, 2, pad="edge")), "prompt": None}},
    "head": {"windows": dict.fromkeys(EVERY, gear.Window(5, -1, pad="head")), "sampler": gear.Prioritized()},
    "chosen": {"windows": dict.fromkeys(EVERY, gear.Window(3, -4, every=2))},
    "timed": {"windows": dict.fromkeys(EVERY, gear.Window(at=[-2, 0, 9], timestamps="step", tolerance=0))},
    "packed": {
        "windows": {**dict.fromkeys(EVERY, gear.Whole()), "prompt": None, "image": None},
        "layout": "packed",
    },
    "tree": {
        "windows": {**dict.fromkeys(EVERY, gear.Whole()), "prompt": None, "image": None},
        "layout": "tree",
    },
}


def value(name: str, number: int, step: int = 0) -> Any:
    """The value of a step of trajectory `number`, or of all that has."""
    number = number // 4 if name == "image" else number
    chance = np.random.default_rng([number, step, list(COLUMNS).index(name)])
    rows = int(chance.integers(0, 60)) * int(chance.integers(0, 5) > 0)
    if name == "tokens":
        return chance.integers(0, 1 << 20, rows).astype(np.int32)
    if name == "points":
        return chance.random((rows, 3)).astype(np.float32)
    if name == "packed":
        return chance.integers(0, 99, 5).astype(np.int16)
    if name == "image":
        return chance.integers(0, 255, (rows, 2)).astype(np.uint8)
    return f"{number}/{step} " + "é" * rows


def rows(number: int) -> dict[str, Any]:
    """Trajectory `number`."""
    length = 1 + number * 7 % 13
    steps: dict[str, Any] = {"step": 1000 * number + np.arange(length)}
    for name in STEPS:
        values = [value(name, number, step) for step in range(length)]
        steps[name] = np.stack(values) if name == "packed" else values
    return steps | {name: value(name, number) for name in COLUMNS if name not in EVERY}


def add(table: gear.Table, number: int) -> None:
    """Add a trajectory; three of four have the group's value, and the last one steps too, of the one before."""
    steps, given = rows(number), {}
    if number % 4:
        slot = int(table.indices()[-1])
        common = min(3, len(table[slot]["step"])) if number % 4 == 3 else 0
        given = {"prefix": slot, "prefix_steps": common}
        del steps["image"]
    table.add(steps, **given)


def make(path: Path, **options: Any) -> gear.Table:
    given: dict[str, Any] = {"payload": 30_000, "blocks": 60, "on_full": "evict_oldest", "prefixes": True}
    return tiered(path, COLUMNS, **{**given, **options})


def plain(batch: Any) -> dict[str, Any]:
    """What a batch has, in a form that can be compared."""
    found = {}
    for name, each in batch.items():
        if isinstance(each, gear.Ragged):
            found[name] = tuple(each.shape), each.offsets.tolist(), each.values.numpy().tobytes()
        elif isinstance(each, torch.Tensor):
            found[name] = tuple(each.shape), each.numpy().tobytes()
        else:
            found[name] = plain(each) if isinstance(each, dict) else each
    return found


def datasets(source: Any, seed: int) -> dict[str, gear.ReplayDataset]:
    given: dict[str, Any] = {"batch_size": 12, "device": "cpu", "prefetch": 0, "seed": seed}
    return {name: gear.ReplayDataset(source, **given, **options) for name, options in WINDOWS.items()}


@pytest.mark.parametrize(
    ("seed", "count"), mostly_long([(0, 16), *((seed, 56) for seed in range(1, 9))], (0, 16), sample=4)
)
def test_batches_are_those_of_one_process_while_values_move(
    tmp_path: Path, seed: int, count: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(remote_module, "PART_BYTES", 3000)  # values in several requests, and cut
    monkeypatch.setattr(saving, "MAX_SEGMENTS_BEHIND", 3)  # so that what is on disk is written anew
    random, looked_up = np.random.default_rng(seed), PayloadReader.records
    keep = ("newest", "oldest", "priority")[seed % 3]
    given = {"keep": keep, "timeout": 20}

    def records(reader: PayloadReader, *args: Any) -> Any:
        found = looked_up(reader, *args)
        moved.append(far._engine.index.arrays.extent[args[1], 1])
        move(far, random)
        return found

    moved: list[Any] = []
    monkeypatch.setattr(PayloadReader, "records", records)
    with (
        make(tmp_path / "near", **given) as near,
        make(tmp_path / "far", name=fresh_name(), **given) as far,
        fitting(COLUMNS, **FITS) as one,
        fitting(COLUMNS, **FITS) as other,
        one_far(far, near, lambda: move(far, random), "16KiB" if seed % 2 else None) as shards,
        Shards([one, other]) as whole,
    ):
        pairs = datasets(shards, seed), datasets(whole, seed)
        for number in range(4, 4 + count):
            for twins in ((near, one), (far, other)):
                for table in twins:
                    add(table, number + 400 * (twins[1] is other))
            move(near, random)
            for name in random.permutation(list(WINDOWS))[: 2 if number % 4 == 3 else 0]:
                assert plain(pairs[0][name].sample()) == plain(pairs[1][name].sample()), name
        assert far._engine.num_spilled
        assert near._engine.num_spilled
        assert any((places < 0).any() and (places >= 0).any() for places in moved)
        for table in (near, far):
            table.check_valid()


def test_frames_of_videos_that_move(tmp_path: Path) -> None:
    """Those of other nodes, and the frames before them, which are asked for when the first have come."""
    pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")
    random = np.random.default_rng(0)
    codec = gear.Codec("video", key_frames=5)
    columns = {
        "video": gear.Column(torch.uint8, (16, 32, 3), codec=codec),
        "number": gear.Column(torch.int64),
    }
    windows = {
        "video": gear.Window(2, -1),
        "apart": gear.Window(at=[-3, 4], column="video"),
        "number": gear.Window(1),
    }
    given: dict[str, Any] = {"payload": 200_000, "blocks": 40}
    with (
        tiered(tmp_path / "near", columns, **given) as near,
        tiered(tmp_path / "far", columns, name=fresh_name(), **given) as far,
        fitting(columns, payload=4_000_000) as one,
        fitting(columns, payload=4_000_000) as other,
        one_far(far, near, lambda: move(far, random)) as shards,
        Shards([one, other]) as whole,
    ):
        for number in range(16):
            frames = random.integers(0, 256, (1 + number * 5 % 13, 16, 32, 3), dtype=np.uint8)
            for table in (near, one) if number < 8 else (far, other):
                table.add({"video": frames, "number": np.full(len(frames), number)})
        far.save(tmp_path / "far")
        spill(far, far.indices()[::2])
        for options in ({"windows": windows}, {"windows": gear.Whole(), "layout": "packed"}):
            given = {"batch_size": 8, "device": "cpu", "prefetch": 0, **options}
            data = [gear.ReplayDataset(each, **given) for each in (shards, whole)]
            for _ in range(6):
                assert plain(data[0].sample()) == plain(data[1].sample())


def test_a_server_draws_for_learners_while_values_move(tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    with (
        make(tmp_path, name=fresh_name()) as table,
        fitting(COLUMNS, **FITS) as whole,
        contextlib.ExitStack() as stack,
    ):
        stack.callback(table.unlink)
        for number in range(4, 28):
            add(table, number)
            add(whole, number)
        remote = stack.enter_context(connected(table))
        pairs = datasets(remote, 5), datasets(whole, 5)
        for _ in range(3):
            for name, mine in pairs[0].items():
                move(table, random)
                assert plain(mine.sample()) == plain(pairs[1][name].sample()), name
        assert table._engine.num_spilled
