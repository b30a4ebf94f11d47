"""Columns of video: frames are decoded from their key frame on, each group once a batch."""

from __future__ import annotations

import dataclasses
import faulthandler
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts
from forks_common import in_child
from tier_common import promote, spill, tiered

import gear_loader as gear
from gear_loader.errors import CodecError, SchemaError
from gear_loader.storage.video import Video

pytest.importorskip("av", reason="needs PyAV: pip install '.[video]'")

H, W, KEY = 32, 48, 8
COLUMNS = {
    "video": gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("video", key_frames=KEY, crf=10)),
    "number": gear.Column(torch.int64),
}


def table_of(**options: Any) -> gear.Table:
    sizes: dict[str, Any] = {"max_steps": 200, "max_trajectories": 10, "block_steps": 4}
    return gear.Table.create(COLUMNS, memory=gear.Memory(payload="1MiB"), **{**sizes, **options})


def clip(length: int, seed: int) -> np.ndarray[Any, Any]:
    """Gray frames whose brightness tells their number, with a pattern that moves."""
    t, y, x = np.ogrid[:length, :H, :W]
    frames = 40 + 4 * t + 15 * np.sin((x + t + seed) / 9) + 15 * np.cos((y - seed) / 7)
    return np.repeat(frames.astype(np.uint8)[..., None], 3, axis=-1)


def close(found: torch.Tensor, expected: Any) -> bool:
    """Frames of other numbers differ by 4 on average."""
    return bool((found.float() - torch.as_tensor(expected).float()).abs().mean() < 1.5)


def filled(table: gear.Table) -> dict[int, np.ndarray[Any, Any]]:
    clips = [clip(length, 5 * length) for length in (1, KEY, KEY + 1, 30)]
    return {table.add({"video": each, "number": np.arange(len(each))}): each for each in clips}


@pytest.mark.parametrize("tier", [False, True])
def test_frames_are_those_that_were_added(tier: bool, tmp_path: Any) -> None:
    with tiered(tmp_path, COLUMNS, payload="1MiB") if tier else table_of() as table:
        known = filled(table)
        table.check_valid()
        table.save(tmp_path)
        if tier:
            spill(table, list(known))
            promote(table, next(iter(known)))
            assert table._engine.num_spilled == 3
        with gear.Table.load(tmp_path) as loaded:
            for each in (table, loaded):
                assert all(close(each[slot]["video"], frames) for slot, frames in known.items())
        windows = {
            "video": gear.Window(3, -1),
            "edge": gear.Window(2, 4, pad="edge", column="video"),
            "tail": gear.Window(4, -2, pad="tail", column="video"),
            "number": gear.Window(1),
        }
        dataset = gear.ReplayDataset(table, batch_size=24, device="cpu", windows=windows)
        for batch in (dataset.sample(), dataset.sample()):
            for row, (slot, anchor) in enumerate(
                zip(batch["index"].tolist(), batch["anchor"].tolist(), strict=True)
            ):
                frames = known[slot]
                for place, step in enumerate(range(anchor - 1, anchor + 2)):
                    found = batch["video"][row, place]
                    assert close(found, frames[step]) if 0 <= step < len(frames) else not found.any()
                for place, step in enumerate(range(anchor + 4, anchor + 6)):
                    assert close(batch["edge"][row, place], frames[min(step, len(frames) - 1)])
                there = range(max(anchor - 2, 0), min(anchor + 2, len(frames)))
                assert close(batch["tail"][row, : len(there)], frames[there.start : there.stop])
        packed = gear.ReplayDataset(
            table, batch_size=8, device="cpu", windows=gear.Whole(), layout="packed"
        ).sample()
        for row, slot in enumerate(packed["index"].tolist()):
            begin, end = packed["cu_seqlens"][row : row + 2].tolist()
            assert close(packed["video"][begin:end], known[slot])


def test_a_group_is_decoded_once_for_all_windows_of_a_batch(monkeypatch: pytest.MonkeyPatch) -> None:
    lengths, decode = list[int](), Video.decode

    def counted(self: Video, blobs: Any, outs: Any) -> None:
        lengths.append(len(blobs))
        decode(self, blobs, outs)

    monkeypatch.setattr(Video, "decode", counted)
    with table_of() as table:
        slot = list(filled(table))[-1]
        windows = {"a": gear.Window(2, column="video"), "b": gear.Window(3, -1, column="video")}
        table.gather([slot] * 3, [1, 2, 17], windows=windows)
    assert sorted(lengths) == [3, 4]  # steps 0 to 3 of the first group, 16 to 18 of the third


def test_frames_between_chosen_steps_are_not_delivered(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor decoded, unless one that follows refers to them; text and other columns of the same steps, too."""
    asked, decode = list[list[int]](), Video.decode

    def counted(self: Video, blobs: Any, outs: Any) -> None:
        asked.append([len(blobs), *(i for i, out in enumerate(outs) if out is not None)])
        decode(self, blobs, outs)

    monkeypatch.setattr(Video, "decode", counted)
    columns = {**COLUMNS, "text": gear.Column(str)}
    at = gear.Window(at=[-0.9, -0.6, -0.1, 0.2], fps=10)
    with gear.Table.create(
        columns, max_steps=80, max_trajectories=2, memory=gear.Memory(payload="1MiB")
    ) as table:
        frames = clip(30, 150)
        slot = table.add({"video": frames, "number": np.arange(30), "text": [f"step {i}" for i in range(30)]})
        for pad, first in (("keep", torch.zeros(H, W, 3)), ("edge", frames[0])):
            windows = {name: dataclasses.replace(at, pad=pad) for name in columns}  # type: ignore[type-var]
            found = table.gather([slot, slot], [8, 28], windows=windows)
            assert found["mask"].tolist() == [[False, True, True, True], [True] * 3 + [False]]
            steps = [[0, 2, 7, 10], [19, 22, 27, 29]]
            assert close(found["video"][0, 0], first)
            assert all(
                close(found["video"][i, j], frames[steps[i][j]]) for i in (0, 1) for j in range(i == 0, 4 - i)
            )
            assert found["text"][0][1:] == ["step 2", "step 7", "step 10"]
        assert sorted(asked[:4]) == [[3, 2], [4, 3], [7, 3, 6], [8, 2, 7]]  # of groups of 8 frames


def test_frames_are_kept_within_a_budget(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that were used last, also when another trajectory has taken the slot."""
    decoded, decode = list[int](), Video.decode

    def counted(self: Video, blobs: Any, outs: Any) -> None:
        decoded.append(sum(out is not None for out in outs))
        decode(self, blobs, outs)

    monkeypatch.setattr(Video, "decode", counted)
    size = H * W * 3
    columns = {
        **COLUMNS,
        "video": gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("video", cache=5 * size)),
    }
    sizes: dict[str, Any] = {
        "max_steps": 40,
        "max_trajectories": 1,
        "block_steps": 4,
        "on_full": "evict_oldest",
    }
    with gear.Table.create(columns, memory=gear.Memory(payload="1MiB"), **sizes) as table:
        for seed in (1, 2):
            frames = clip(30, seed * 40)
            slot = table.add({"video": frames, "number": np.arange(30)})
            for anchor, expected in ((0, [3]), (1, [1]), (0, []), (20, [3]), (1, [1]), (2, [1]), (2, [])):
                decoded.clear()
                found = table.gather([slot], [anchor], windows={"video": gear.Window(3)})["video"][0]
                assert close(found, frames[anchor : anchor + 3])
                assert decoded == expected, (seed, anchor)


def test_two_columns_that_were_made_as_one_keep_their_own_frames() -> None:
    one = gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("video", cache="1MiB"))
    columns = {"left": one, "right": one}
    memory = gear.Memory(payload="1MiB")
    with gear.Table.create(columns, max_steps=40, max_trajectories=4, memory=memory) as table:
        clips = {"left": clip(9, 1), "right": clip(9, 1)[::-1].copy()}
        slot = table.add(clips)
        for _ in range(2):
            found = table[slot]
            assert all(close(found[name], frames) for name, frames in clips.items())


def test_a_fork_does_not_wait_for_its_parents_frames() -> None:
    column = gear.Column(torch.uint8, (H, W, 3), codec=gear.Codec("video", cache="1MiB"))
    memory = gear.Memory(payload="1MiB")
    with gear.Table.create({"video": column}, max_steps=40, max_trajectories=4, memory=memory) as table:
        frames = clip(9, 1)
        slot = table.add({"video": frames})

        def look() -> str:
            faulthandler.dump_traceback_later(20, exit=True)
            found = table[slot]["video"].numpy().astype(int)  # torch's own threads do not survive a fork
            return str(bool(abs(found - frames).mean() < 1.5))

        assert look() == "True"
        faulthandler.cancel_dump_traceback_later()
        (cache,) = table._engine.payload._coded._caches.values()
        with cache._lock:
            assert in_child(look) == "True"


def test_what_is_refused() -> None:
    for shape in ((H, W + 1, 3), (H, W, 1), (None, W, 3)):
        with pytest.raises(SchemaError, match=r"expected uint8 of shape \(h, w, 3\), with even h and w"):
            gear.Column(torch.uint8, shape, codec="video")
    with pytest.raises(SchemaError, match="codec='video' and per='trajectory'; expected frames of steps"):
        gear.Column(torch.uint8, (H, W, 3), codec="video", per="trajectory")
    with pytest.raises(SchemaError, match="Codec key_frames is 0; expected 1 to 65535 for 'video'"):
        gear.Codec("video", key_frames=0)
    with table_of() as table:
        for wrong, message in (
            ([b"GV"], "is bytes that are no packets .*; expected arrays or tensors of torch.uint8 and shape"),
            (
                np.zeros((1, H, W + 2, 3), np.uint8),
                r"an array of shape \[32, 50, 3\]; expected \[32, 48, 3\]",
            ),
        ):
            with pytest.raises(SchemaError, match=message):
                table.add({"video": wrong, "number": [0]})
        assert len(table) == 0


@pytest.mark.parametrize("count", amounts(100, 1_000, 100_000, timeout=3600))
def test_mutated_packets_never_end_the_process(count: int) -> None:
    """Those of a group are damaged in the table's memory: the frames come, or the error names one of them."""
    random, seen = np.random.default_rng(count), {"read": 0, "damaged": 0}
    with table_of() as table:
        slot = list(filled(table))[-1]
        memory = table._engine.region.payload().view(np.uint8)
        blocks = table._engine.index.arrays.row(slot)
        records = table._engine.region.column("video")[blocks].reshape(-1, 16).copy().view(np.int64)
        whole = memory.copy()
        for _ in range(count):
            for step in random.integers(0, KEY, random.integers(1, 4)).tolist():
                place, size = records[step].tolist()
                at = place + int(random.integers(min(size, 60) if random.random() < 0.5 else size))
                memory[at] = random.choice([0, 255, 128, random.integers(256)])
            try:
                found = table.gather([slot], windows={"video": gear.Window(KEY)})["video"]
            except CodecError as error:
                named = f"Column 'video' of trajectory {slot}, step " in str(error)
                seen["damaged" if named else "named wrongly"] += 1
            else:
                seen["read"] += len(found)
            memory[:] = whole
        assert close(table[slot]["video"], clip(30, 150))
        table.check_valid()
    assert min(seen.values()) > count / 50, seen
