"""Tables as LeRobot data sets: read back by `load_dataset`, and by LeRobot itself where it is installed."""

from __future__ import annotations

import itertools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import needs

import gear_loader as gear
from gear_loader.errors import SchemaError
from gear_loader.exports import lerobot_statistics

pq = pytest.importorskip("pyarrow.parquet")
needs("datasets")
av = pytest.importorskip("av")

DATA = Path(__file__).parents[1] / "data" / "robots"
LENGTHS, TASKS = (13, 1, 6), ("push the block", "öffne die Tür", "push the block")
TOP, WRIST, RAW, DEPTH, MADE = (
    f"observation.images.{each}" for each in ("top", "wrist", "raw", "gray", "made")
)


def pictures(length: int, number: int, height: int = 32, width: int = 48) -> Any:
    """Smooth pictures, which a video keeps nearly as they are."""
    y, x = np.mgrid[:height, :width]
    planes = (
        np.stack([y * 3, x * 2, (x + y) * 2], -1)[None]
        + 6 * np.arange(length)[:, None, None, None]
        + 20 * number
    )
    return planes.astype(np.uint8)


@pytest.fixture(scope="module")
def table() -> Iterator[gear.Table]:
    """All that LeRobot has; of video groups of 10 frames, and shorter ones."""
    columns = {
        "observation.state": gear.Column(torch.float32, (3,)),
        "action": gear.Column(torch.float64, (2,), final=False),
        "next.reward": gear.Column(torch.bfloat16),
        "next.done": gear.Column(torch.bool),
        "count": gear.Column(torch.int32, (1,)),
        "grid": gear.Column(torch.int16, (2, 3)),
        "cube": gear.Column(torch.float16, (2, 1, 4)),
        "packed": gear.Column(torch.float32, (4,), codec="zstd"),
        "note": gear.Column(str),
        "goal": gear.Column(torch.float32, (2,), per="trajectory"),
        "task": gear.Column(str, per="trajectory"),
        TOP: gear.Column(torch.uint8, (32, 48, 3), codec="video"),
        WRIST: gear.Column(torch.uint8, (32, 48, 3), codec="jpeg"),
        RAW: gear.Column(torch.uint8, (4, 6, 3)),
        DEPTH: gear.Column(torch.uint8, (4, 6, 1)),
        MADE: gear.Column(torch.uint8, (32, 48, 3), codec="png"),
    }
    random = np.random.default_rng(3)
    memory = gear.Memory(payload="4MiB")
    with gear.Table.create(columns, max_steps=40, max_trajectories=4, memory=memory) as made:
        for number, (length, task) in enumerate(zip(LENGTHS, TASKS, strict=True)):
            frames = pictures(length, number)
            made.add(
                {
                    "observation.state": random.normal(size=(length, 3)).astype(np.float32),
                    "action": random.normal(size=(length, 2)),
                    "next.reward": torch.rand(length).bfloat16(),
                    "next.done": np.arange(length) == length - 1,
                    "count": random.integers(-9, 60_000, (length, 1), np.int32),
                    "grid": random.integers(-9, 9, (length, 2, 3), np.int16),
                    "cube": random.normal(size=(length, 2, 1, 4)).astype(np.float16),
                    "packed": list(random.normal(size=(length, 4)).astype(np.float32)),
                    "note": [f"é{step}" for step in range(length)],
                    "goal": random.normal(size=2).astype(np.float32),
                    "task": task,
                    TOP: frames,
                    WRIST: frames[:, ::-1].copy(),
                    RAW: frames[:, :4, :6].copy(),
                    DEPTH: frames[:, :4, :6, :1].copy(),
                    MADE: frames[:, :, ::-1].copy(),
                }
            )
        yield made


@pytest.fixture(scope="module")
def written(table: gear.Table, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Files of several episodes, and several files."""
    place = tmp_path_factory.mktemp("lerobot") / "made"
    options = {"file_bytes": 6000, "video_bytes": 2500}
    assert table.export(f"lerobot:{place}", fps=10, videos=[MADE], robot_type="arm", **options) == str(place)
    return place


def expected(table: gear.Table, episode: int, name: str) -> Any:
    """The values of a column for each step, as LeRobot has them."""
    value = table[episode][name]
    if table.schema[name].trajectory and isinstance(value, torch.Tensor):
        value = value.expand(LENGTHS[episode], *value.shape)
    if name == "count":
        value = value[:, 0]
    return value.float() if isinstance(value, torch.Tensor) and value.dtype == torch.bfloat16 else value


def test_what_is_written_is_loaded(table: gear.Table, written: Path) -> None:
    files = sorted(str(path.relative_to(written)) for path in written.rglob("*") if path.is_file())
    assert len([each for each in files if each.startswith("data/")]) > 1
    assert len([each for each in files if each.startswith(f"videos/{TOP}/")]) > 1
    info = json.loads((written / "meta/info.json").read_text())
    assert (info["fps"], info["robot_type"], info["splits"]) == (10, "arm", {"train": "0:3"})
    assert (info["total_episodes"], info["total_frames"], info["total_tasks"]) == (3, 20, 2)
    with gear.load_dataset(
        f"lerobot:{written}", progress=False, keep_float64=True, per_trajectory=["goal"]
    ) as loaded:
        assert set(loaded.schema) == set(table.schema)
        assert loaded.schema["goal"] == gear.Column(torch.float32, (2,), per="trajectory")
        codecs = {name: column.codec and column.codec.name for name, column in loaded.schema.items()}
        assert [codecs[name] for name in (TOP, WRIST, RAW, DEPTH, MADE)] == [
            "video",
            "jpeg",
            "png",
            "png",
            "video",
        ]
        for episode, name in itertools.product(range(3), table.schema):
            found = loaded[episode][name]
            wanted = table[episode][name] if name == "goal" else expected(table, episode, name)
            if name == MADE:
                assert (found.float() - wanted.float()).abs().mean() < 3
            elif isinstance(wanted, torch.Tensor):
                assert found.dtype == wanted.dtype
                torch.testing.assert_close(found, wanted, rtol=0, atol=0)
            else:
                assert found == wanted


def test_packets_are_written_as_they_are(written: Path, table: gear.Table, tmp_path: Path) -> None:
    """H.264 of this library, H.265, and AV1 that LeRobot wrote, in one column."""
    name = TOP
    packets = [table._engine.rows(i, encoded={name})[name] for i in range(3)]
    reader = gear.sources.read_lerobot(written, columns=[name])
    assert [list(episode[name]) for episode in reader] == packets
    assert reader.reencoded == 0
    sources = [DATA / "lerobot", DATA / "lerobot21"]
    columns = {name: gear.Column(torch.uint8, (64, 64, 3), codec="video")}
    memory = gear.Memory(payload="1MiB")
    with gear.Table.create(columns, max_steps=50, max_trajectories=20, memory=memory) as both:
        kept = []
        for each in (*sources, sources[0]):
            for episode in gear.sources.read_lerobot(each, columns=[name]):
                kept.append(list(episode[name]))
                both.add({name: kept[-1]})
        both.export(f"lerobot:{tmp_path}/both", fps=30)
        again = gear.sources.read_lerobot(tmp_path / "both")
        assert [list(episode[name]) for episode in again] == kept
        assert len(list((tmp_path / "both").rglob("*.mp4"))) == 3


def test_h265_packets(tmp_path: Path) -> None:
    from gear_loader.storage.video import packed

    context = av.CodecContext.create("libx265", "w")
    context.width, context.height, context.pix_fmt, context.framerate = 64, 64, "yuv420p", 10
    context.options = {
        "x265-params": "bframes=0:keyint=4:min-keyint=4:scenecut=0:repeat-headers=1:log-level=none"
    }
    frames = pictures(8, 0, 64, 64)
    packets = [p for f in frames for p in context.encode(av.VideoFrame.from_ndarray(f, format="rgb24"))]
    packets += context.encode(None)
    values = [packed("hevc", step % 4, bytes(packet)) for step, packet in enumerate(packets)]
    columns = {"eye": gear.Column(torch.uint8, (64, 64, 3), codec="video")}
    memory = gear.Memory(payload="1MiB")
    with gear.Table.create(columns, max_steps=50, max_trajectories=20, memory=memory) as table:
        table.add({"eye": values})
        table.export(f"lerobot:{tmp_path}/a", fps=10)
        (again,) = gear.sources.read_lerobot(tmp_path / "a")
        with gear.load_dataset(f"lerobot:{tmp_path}/a", progress=False) as loaded:
            torch.testing.assert_close(loaded[0]["eye"], table[0]["eye"], rtol=0, atol=0)
        assert len(again["eye"]) == 8


def test_statistics(table: gear.Table, written: Path) -> None:
    """Those of all steps, and of each episode, against numpy."""
    stats = gear.sources.read_lerobot(written).stats()
    for name in ("observation.state", "count", "grid", "next.reward", TOP, RAW, DEPTH):
        parts = [np.asarray(expected(table, episode, name), np.float64) for episode in range(3)]
        if name in (TOP, RAW, DEPTH):
            parts = [np.broadcast_to(part / 255, (*part.shape[:-1], 3)) for part in parts]
        rows = [part.reshape(-1, part.shape[-1] if part.ndim > 1 else 1) for part in parts]
        whole, shape = np.concatenate(rows), stats[name]["mean"].shape
        assert shape == ((3, 1, 1) if "images" in name else whole.shape[1:])
        for key, function in (("min", np.min), ("max", np.max), ("mean", np.mean), ("std", np.std)):
            np.testing.assert_allclose(
                stats[name][key].ravel(), function(whole, axis=0), rtol=1e-9, atol=1e-12
            )
        medians = np.stack([np.quantile(each, 0.5, axis=0, method="inverted_cdf") for each in rows])
        weighted = np.average(medians, axis=0, weights=LENGTHS)
        np.testing.assert_allclose(stats[name]["q50"].ravel(), weighted, rtol=1e-9)
        assert stats[name]["count"].tolist() == [20]
    assert not {"note", "task"} & set(stats)
    entries = pq.read_table(written / "meta/episodes/chunk-000/file-000.parquet").to_pylist()
    assert entries[2]["stats/action/max"] == table[2]["action"].numpy().max(0).tolist()
    assert (entries[1]["dataset_from_index"], entries[1]["dataset_to_index"]) == (13, 14)


def test_statistics_of_many_episodes_and_of_a_part_of_large_images() -> None:
    from gear_loader.storage.codecs import Codec, Coded
    from gear_loader.storage.decoding import encoded

    coded = Coded(Codec("png"), "uint8", (300, 20, 3))
    frames = np.random.default_rng(0).integers(0, 256, (200, 300, 20, 3), np.uint8)
    found = lerobot_statistics.of_images(
        coded, encoded(coded, frames, "frames", once=False, whole=True), "frames"
    )
    taken = frames[np.round(np.linspace(0, 199, 100)).astype(int), ::2, ::2] / 255
    assert found["count"].tolist() == [100]
    np.testing.assert_allclose(found["mean"].ravel(), taken.mean((0, 1, 2)))
    np.testing.assert_allclose(found["std"].ravel(), taken.std((0, 1, 2)))
    levels = np.quantile(taken, 0.9, axis=(0, 1, 2), method="inverted_cdf")
    np.testing.assert_allclose(found["q90"].ravel(), levels)


@pytest.mark.long
def test_lerobot_reads_what_is_written(table: gear.Table, written: Path) -> None:
    """Step by step, with ``delta_timestamps``, beside `Window` of the table that was loaded."""
    owner = pytest.importorskip("lerobot.datasets.lerobot_dataset")
    asked = {"action": [-0.2, 0.0, 0.1], TOP: [-0.1, 0.0]}
    data = owner.LeRobotDataset("made/here", root=written, delta_timestamps=asked)
    places = [(episode, step) for episode, length in enumerate(LENGTHS) for step in range(length)]
    assert len(data) == len(places)
    windows = {name: gear.Window(at=at, fps=10, pad="edge") for name, at in asked.items()}
    with gear.load_dataset(f"lerobot:{written}", progress=False, keep_float64=True) as loaded:
        batch = loaded.gather(*zip(*places, strict=True), windows=windows)
    for number, (episode, step) in enumerate(places):
        item = data[number]
        assert item["task"] == TASKS[episode]
        assert (int(item["episode_index"]), int(item["frame_index"])) == (episode, step)
        for name in (
            "observation.state",
            "next.reward",
            "next.done",
            "count",
            "grid",
            "cube",
            "packed",
            "goal",
        ):
            wanted = expected(table, episode, name)[step]
            torch.testing.assert_close(torch.as_tensor(item[name]).double(), wanted.double(), rtol=0, atol=0)
        assert item["note"] == f"é{step}"
        assert item["action"].tolist() == batch["action"][number].float().tolist()
        places_of = torch.tensor([-2, 0, 1]) + step
        assert item["action_is_pad"].tolist() == ((places_of < 0) | (places_of >= LENGTHS[episode])).tolist()
        for name in (WRIST, RAW, DEPTH):
            image = table[episode][name][step].permute(2, 0, 1) / 255
            torch.testing.assert_close(item[name], image, rtol=0, atol=0.02 if name == WRIST else 0)
        frames = batch[TOP][number].permute(0, 3, 1, 2) / 255
        assert (item[TOP] - frames).abs().max() < 0.02  # colours by another library
    compute = pytest.importorskip("lerobot.datasets.compute_stats")
    parts = [
        compute.compute_episode_stats(
            {name: np.asarray(expected(table, e, name)) for name in ("observation.state", "next.reward")},
            {name: {"dtype": "float32"} for name in ("observation.state", "next.reward")},
        )
        for e in range(3)
    ]
    for name, stats in compute.aggregate_stats(parts).items():
        for key, value in stats.items():
            np.testing.assert_allclose(data.meta.stats[name][key], value, rtol=1e-3, atol=2e-3)
            assert data.meta.stats[name][key].shape == value.shape


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({}, {}, "fps= was not given"),
        ({}, {"fps": 0}, "fps"),
        ({}, {"fps": 10, "videos": ["x"]}, "shape=\\(\\).*expected images"),
        ({}, {"fps": 10, "videos": ["y"]}, "expected names of columns"),
        ({}, {"fps": 10, "videos": ["odd"]}, "even h and w"),
        ({}, {"fps": 10, "task": 3}, "task=3"),
        ({"index": "x"}, {"fps": 10}, "'index'.* names that LeRobot"),
        ({"a/b": "x"}, {"fps": 10}, "'a/b'.* names that LeRobot"),
        ({"task": "x"}, {"fps": 10}, "expected text"),
        ({"x": "raw"}, {"fps": 10}, "any length, or bytes"),
        ({"x": "list"}, {"fps": 10}, "any length, or bytes"),
        ({"x": "wide"}, {"fps": 10}, "at most 5 dimensions"),
    ],
)
def test_what_lerobot_does_not_have(
    tmp_path: Path, columns: dict[str, str], options: dict[str, Any], message: str
) -> None:
    schema = {
        "x": gear.Column(torch.float32),
        "odd": gear.Column(torch.uint8, (3, 4, 3)),
        "raw": gear.Column(bytes),
        "list": gear.Column(torch.float32, (None,)),
        "wide": gear.Column(torch.float32, (1, 1, 1, 1, 1, 1)),
    }
    memory = gear.Memory(payload="1MiB")
    with gear.Table.create(schema, max_steps=4, max_trajectories=2, memory=memory) as table:
        options = {"columns": columns or ["x", "odd"], **options}
        with pytest.raises(SchemaError, match=message):
            table.export(f"lerobot:{tmp_path}/a", **options)
        with pytest.raises(SchemaError, match="no trajectories"):
            table.export(f"lerobot:{tmp_path}/a", fps=10, columns=["x"])
        assert not list(tmp_path.iterdir())


def test_a_task_of_each_step_and_of_none(tmp_path: Path) -> None:
    episodes = [{"a": np.arange(3.0), "task": ["x", "y", "x"]}, {"a": np.arange(2.0), "task": ["z", "z"]}]
    with gear.sources.load(episodes, progress=False) as table:
        table.export(f"lerobot:{tmp_path}/a", fps=5)
        table.export(f"lerobot:{tmp_path}/b", fps=5, columns=["a"], task="push")
        with pytest.raises(SchemaError, match="expected one of them"):
            table.export(f"lerobot:{tmp_path}/c", fps=5, task="push")
    with gear.load_dataset(f"lerobot:{tmp_path}/a", progress=False) as loaded:
        assert [loaded[i]["task"] for i in range(2)] == [["x", "y", "x"], ["z", "z"]]
    with gear.load_dataset(f"lerobot:{tmp_path}/b", progress=False) as loaded:
        assert [loaded[i]["task"] for i in range(2)] == ["push", "push"]
