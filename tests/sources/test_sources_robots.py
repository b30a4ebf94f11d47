"""Data sets of robots, written by the libraries of their owners: what these read is what the table holds.

tests/data/robots/make.py wrote the data sets, and next to each what its owner's library read from it.
"""

from __future__ import annotations

import importlib
import json
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cases import amounts
from sources_common import read_in_parts

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import load, read_lerobot, read_rlds

DATA = Path(__file__).parents[1] / "data" / "robots"
LEROBOT = ["lerobot", "lerobot21"]


def known(name: str) -> dict[str, Any]:
    with np.load(DATA / f"{name}.npz") as file:
        return dict(file)


@pytest.fixture
def copy(tmp_path: Path) -> Callable[[str], Path]:
    """Copies a data set, to be damaged."""

    def copied(name: str) -> Path:
        shutil.copytree(DATA / name, tmp_path / name)
        return tmp_path / name

    return copied


def refuses(source: str, match: str, **options: Any) -> None:
    """A data set that is refused leaves the table as it was."""
    columns = {"action": gear.Column(torch.float32, (2,))}
    with gear.Table.create(columns, max_steps=50, max_trajectories=5) as table:
        table.add({"action": torch.ones(2, 2)})
        with pytest.raises(SourceError, match=match):
            gear.load_dataset(source, table, progress=False, **options)
        assert len(table) == 1
        table.check_valid()


# ---------------------------------------------------------------- LeRobot


@pytest.mark.parametrize("name", LEROBOT)
def test_lerobot_equals_the_owners_reading(name: str) -> None:
    """Videos (AV1 in one file of all episodes, H.264 in a file of each), images, numbers and tasks; bit for bit."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    pytest.importorskip("PIL")
    expected = known(name)
    read_in_parts(read_lerobot(DATA / name, episodes=[0, 2]))
    with gear.load_dataset(f"lerobot:{DATA / name}", progress=False) as table:
        video = table.schema["observation.images.top"]
        assert video == gear.Column(torch.uint8, (64, 64, 3), codec="video")
        assert (
            table.schema["observation.images.wrist"].ragged
            == gear.Column(torch.uint8, (64, 64, 3), codec="png").ragged
        )
        assert table.schema["task"] == gear.Column(str, per="trajectory")
        assert "frame_index" not in table.schema
        for number in range(3):
            episode = table[number]
            assert set(expected[f"{number}/task"].tolist()) == {episode.pop("task")}
            for key, values in episode.items():
                wanted = expected[f"{number}/{key}"]
                if "images" in key:
                    values = values.permute(0, 3, 1, 2)[:, :, ::4, ::4]
                assert values.numpy().dtype == wanted.dtype
                np.testing.assert_array_equal(values.numpy(), wanted)
        batch = table.gather(
            [1, 2], [1, 0], windows={"observation.images.top": gear.Window(2, -1, pad="edge")}
        )
        frames = [expected[f"{e}/observation.images.top"][[0, at]] for e, at in ((1, 1), (2, 0))]
        found = batch["observation.images.top"].permute(0, 1, 4, 2, 3)[..., ::4, ::4]
        np.testing.assert_array_equal(found.numpy(), np.stack(frames))


@pytest.mark.parametrize("name", LEROBOT)
def test_decoded_images_and_videos_are_those_of_a_batch(name: str, copy: Callable[[str], Path]) -> None:
    for package in ("av", "PIL", "pyarrow"):
        pytest.importorskip(package)
    source = f"lerobot:{DATA / name}"
    kept = gear.load_dataset(source, progress=False)
    table = gear.load_dataset(source, decode=True, wait=False, progress=False)
    table.loading.wait()
    assert [column.codec for column in table.schema.values()] == [None] * len(table.schema)
    for number in range(len(kept)):
        for column, values in kept[number].items():
            found = table[number][column]
            assert found == values if isinstance(values, str) else torch.equal(found, values), column
    root, parquet, pyarrow = (
        copy(name),
        importlib.import_module("pyarrow.parquet"),
        importlib.import_module("pyarrow"),
    )
    file = min(root.glob("data/*/*.parquet"))
    rows = parquet.read_table(file)
    place = rows.column_names.index("observation.images.wrist")
    images = rows.column(place).to_pylist()
    images[1]["bytes"] = images[1]["bytes"][:60]
    damaged = pyarrow.array(images, rows.schema.field(place).type)
    parquet.write_table(rows.set_column(place, rows.schema.field(place), damaged), file)
    with pytest.raises(SourceError, match=r"episode 0: column 'observation.images.wrist', step 1 is damaged"):
        gear.load_dataset(f"lerobot:{root}", decode=True, progress=False)


@pytest.mark.parametrize("name", LEROBOT)
def test_lerobot_statistics_and_choice(name: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("PIL")
    expected, root = known(name), DATA / name
    reader = read_lerobot(root, columns={"state": "observation.state", "i": "index"}, episodes=[2, 0])
    assert reader.fps == 10
    for key, values in reader.stats()["action"].items():
        np.testing.assert_array_equal(values, expected[f"stats/{key}"])
    assert set(reader.stats()) >= {"observation.state", "observation.images.top"}
    assert [episode["i"][0] for episode in reader] == [0, 8]
    assert read_lerobot(root, columns=["action"], split="train").lengths.tolist() == [5, 3, 4]
    with pytest.raises(SourceError, match="no split 'test'; it has \\['train'\\]"):
        read_lerobot(root, split="test")
    with pytest.raises(SourceError, match="expected numbers of episodes"):
        read_lerobot(root, episodes=[3])
    with pytest.raises(SourceError, match=r"has no column 'observation\.force'"):
        read_lerobot(root, columns=["observation.force"])


def test_lerobot_has_a_task_of_each_step_if_an_episode_has_several(copy: Callable[[str], Path]) -> None:
    pa = pytest.importorskip("pyarrow")
    import pyarrow.parquet as parquet

    root = copy("lerobot21")
    path = root / "data/chunk-000/episode_000001.parquet"
    table = parquet.read_table(path)
    place = table.column_names.index("task_index")
    changed = table.set_column(place, table.schema.field(place), [pa.array([1, 0, 1], pa.int64())])
    parquet.write_table(changed, path)
    with pytest.raises(SourceError, match="episode 1, step 1: it has another task"):
        list(read_lerobot(root, columns=["action", "task"]))
    lines = [json.loads(line) for line in (root / "meta/episodes.jsonl").read_text().splitlines()]
    lines[1]["tasks"] = ["push the block", "öffne die Tür"]
    (root / "meta/episodes.jsonl").write_text("\n".join(map(json.dumps, lines)))
    with load(read_lerobot(root, columns=["action", "task"]), progress=False) as loaded:
        assert loaded[1]["task"] == ["öffne die Tür", "push the block", "öffne die Tür"]


def encode(path: Path, frames: Any, **options: str) -> None:
    import av

    with av.open(str(path), "w") as container:
        stream = container.add_stream("libx264", 10, options=options)
        stream.height, stream.width, stream.pix_fmt = frames.shape[1], frames.shape[2], "yuv420p"
        for frame in frames:
            container.mux(stream.encode(av.VideoFrame.from_ndarray(frame, format="rgb24")))
        container.mux(stream.encode(None))


def test_videos_that_cannot_be_cut_are_encoded_anew(copy: Callable[[str], Path], caplog: Any) -> None:
    """Frames that refer to later ones; what was lost is small, and said."""
    av = pytest.importorskip("av")
    pytest.importorskip("pyarrow")
    root = copy("lerobot21")
    path = root / "videos/chunk-000/observation.images.top/episode_000000.mp4"
    y, x = np.mgrid[:64, :64]
    frames = np.stack([np.repeat((40 + 30 * t + y + x // 2)[..., None], 3, -1) for t in range(5)]).astype(
        np.uint8
    )
    encode(path, frames, bf="2", g="20", crf="5", **{"b-adapt": "0"})
    with av.open(str(path)) as container:
        times = [packet.pts for packet in container.demux(video=0) if packet.pts is not None]
    assert times != sorted(times)
    reader = read_lerobot(root, columns=["action", "observation.images.top"])
    with load(reader, progress=False) as table:
        assert reader.reencoded == 1
        assert "decoded and encoded anew" in caplog.text
        assert np.abs(table[0]["observation.images.top"].numpy().astype(int) - frames).mean() < 3
        assert table[1]["observation.images.top"].shape == (3, 64, 64, 3)
    encode(path, frames[:4], bf="0", g="20")
    with pytest.raises(
        SourceError, match=r"episode 0, .* step 4 is at 0.4000 s, and the nearest frame is at 0.3000 s"
    ):
        list(reader)
    encode(path, np.zeros((5, 32, 64, 3), np.uint8))
    with pytest.raises(SourceError, match=r"episode 0, .* frames of 32 x 64; expected \[64, 64, 3\]"):
        list(reader)


@pytest.mark.parametrize("name", LEROBOT)
@pytest.mark.parametrize("cut", [0.5, *(pytest.param(cut, marks=pytest.mark.long) for cut in (0.0, 0.98))])
def test_cut_files_of_lerobot(copy: Callable[[str], Path], name: str, cut: float) -> None:
    """Each file of a data set, cut off, is refused; or read as before, if what it lacks are marks of its end."""
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    root = copy(name)
    whole = list(read_lerobot(root))
    for path in sorted(each for each in root.rglob("*") if each.is_file() and "stats" not in each.name):
        data = path.read_bytes()
        path.write_bytes(data[: int(len(data) * cut)])
        try:
            found = list(read_lerobot(root))
        except SourceError:
            pass
        else:
            assert cut > 0.9
            assert path.suffix == ".mp4"
            for episode, before in zip(found, whole, strict=True):
                assert episode["observation.images.top"] == before["observation.images.top"]
        path.unlink()
        with pytest.raises(SourceError):
            load(read_lerobot(root), progress=False)
        path.write_bytes(data)
    load(read_lerobot(root), progress=False).close()


@pytest.mark.parametrize(
    ("change", "match"),
    [
        ({"codebase_version": "v4.0"}, "codebase_version 'v4.0'; expected v2.0, v2.1 or v3.0"),
        ({"fps": "ten"}, "fps is 'ten'; expected a number"),
        ({"features": []}, "features is .*; expected a mapping"),
        ({"video_path": "../../{video_key}.mp4"}, "lies outside of the data set"),
        ({"video_path": "/etc/{video_key}"}, "lies outside of the data set"),
        ({"video_path": "{video_key.__class__}/{file_index:99999999999d}"}, "cannot be read"),
        ({"video_path": "{nothing}"}, "expected .*'video_key'.* in it"),
    ],
)
def test_hostile_metadata_of_lerobot(copy: Callable[[str], Path], change: Any, match: str) -> None:
    pytest.importorskip("pyarrow")
    pytest.importorskip("av")
    root = copy("lerobot")
    info = json.loads((root / "meta/info.json").read_text())
    (root / "meta/info.json").write_text(json.dumps(info | change))
    with pytest.raises(SourceError, match=match):
        list(read_lerobot(root))
    (root / "meta/info.json").write_text("[" * 100_000)
    with pytest.raises(SourceError, match=r"'meta/info.json' is no JSON"):
        read_lerobot(root)


def test_lerobot_by_name(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """From LeRobot's folder; from the Hub only if asked to."""
    pytest.importorskip("pyarrow")
    monkeypatch.setenv("HF_LEROBOT_HOME", str(tmp_path))
    refuses("lerobot:made/here", "is no LeRobot data set on this machine", download=False)
    shutil.copytree(DATA / "lerobot", tmp_path / "made/here")
    with gear.load_dataset("lerobot:made/here", columns=["action"], progress=False) as table:
        assert table.num_steps == 12


# ---------------------------------------------------------------- RLDS


def test_rlds_equals_the_owners_reading() -> None:
    """Nested observations, encoded images as their bytes, text, labels, zlib, and lists of any length; both shards."""
    pytest.importorskip("google_crc32c")
    pytest.importorskip("simplejpeg")
    for split, count in (("train", 3), ("val", 2)):
        expected = known("rlds")
        reader = read_rlds(DATA / "rlds", split=split, per_trajectory=["language_instruction"])
        read_in_parts(reader)
        with load(reader, progress=False) as table:
            assert len(table) == count
            assert table.schema["observation.image"] == gear.Column(torch.uint8, (16, 24, 3), codec="jpeg")
            for number, raw in enumerate(reader):
                episode, place = table[number], f"{split}/{number}"
                assert episode.pop("episode_metadata.file_path").encode() == expected[f"{place}/metadata"][0]
                assert (
                    episode.pop("episode_metadata.offset").tolist() == expected[f"{place}/offset"][0].tolist()
                )
                marks = episode.pop("observation.marks")
                np.testing.assert_array_equal(marks.values.numpy(), expected[f"{place}/observation.marks"])
                assert np.diff(marks.offsets).tolist() == expected[f"{place}/observation.marks.rows"].tolist()
                task = episode.pop("language_instruction")
                assert {task.encode()} == set(expected[f"{place}/language_instruction"].tolist())
                for key, values in episode.items():
                    wanted = expected[f"{place}/{key}"]
                    if "image" in key or "wrist" in key:
                        assert raw[key] == wanted.tolist()
                        assert values.shape[1:] == (16, 24, 3)
                    else:
                        np.testing.assert_array_equal(values.numpy(), wanted)


def test_rlds_options(copy: Callable[[str], Path]) -> None:
    pytest.importorskip("google_crc32c")
    refuses(f"rlds:{DATA / 'rlds'}", "has the splits 'train', 'val', and split=None was given")
    refuses(f"rlds:{DATA / 'rlds'}", "has no column 'force'", split="val", columns={"action": "force"})
    refuses(f"rlds:{DATA}", "is no RLDS data set")
    with pytest.raises(SourceError, match=r"episode 0, column 'action' .* values differ"):
        list(read_rlds(DATA / "rlds", split="val", per_trajectory=["action"]))
    root = copy("rlds")
    shard = next(root.rglob("*train*-00001-of-00002"))
    shard.unlink()
    refuses(f"rlds:{root}", "has 1 of 2 files of the split 'train'", split="train")


def test_damaged_records_of_rlds(copy: Callable[[str], Path]) -> None:
    """Any byte that is changed, and any end that is lost, is told by a CRC or a count."""
    pytest.importorskip("google_crc32c")
    root, source = copy("rlds"), random.Random(0)
    shard = next(root.rglob("*val*-00000-of-00002"))
    data = shard.read_bytes()
    for _ in range(15):
        damaged = bytearray(data)
        damaged[source.randrange(len(data))] ^= 1 << source.randrange(8)
        shard.write_bytes(damaged)
        with pytest.raises(SourceError):
            list(read_rlds(root, split="val", columns=["action", "reward"]))
        shard.write_bytes(data[: source.randrange(len(data))])
        with pytest.raises(SourceError):
            list(read_rlds(root, split="val", columns=["action", "reward"]))


@pytest.mark.parametrize("count", amounts(20, 100, 800))
def test_hostile_records_of_rlds(copy: Callable[[str], Path], count: int) -> None:
    """Records whose CRCs are right, with bytes changed: values or a SourceError, and no other error."""
    crc = pytest.importorskip("google_crc32c")

    def masked(part: bytes) -> bytes:
        value = crc.value(part)
        return (((value >> 15 | value << 17) + 0xA282EAD8) & 0xFFFFFFFF).to_bytes(4, "little")

    root, source = copy("rlds"), random.Random(1)
    shard = next(root.rglob("*val*-00001-of-00002"))
    data = shard.read_bytes()
    record = data[12 : 12 + int.from_bytes(data[:8], "little")]
    read = 0
    for _ in range(count):
        damaged = bytearray(record)
        for _ in range(source.randrange(1, 4)):
            damaged[source.randrange(len(record))] = source.choice(
                [0, 1, 127, 128, 255, source.randrange(256)]
            )
        size = len(damaged).to_bytes(8, "little")
        shard.write_bytes(size + masked(size) + damaged + masked(bytes(damaged)))
        try:
            read += len(list(read_rlds(root, split="val")))
        except SourceError:
            continue
    assert read > 0


def test_varints_of_any_size() -> None:
    from gear_loader.sources.tfrecord import Feature

    numbers = [0, 1, 127, 128, 300, 2**35, 2**63 - 1, -1, -(2**63), 5]
    encoded = bytearray()
    for number in numbers:
        left = number & (2**64 - 1)
        while left >= 128:
            encoded.append(left & 127 | 128)
            left >>= 7
        encoded.append(left)
    packed = bytes([10, len(encoded)]) + bytes(encoded)
    feature = Feature("int64", memoryview(packed))
    assert feature.numbers().tolist() == numbers
    assert feature.length() == len(numbers)
