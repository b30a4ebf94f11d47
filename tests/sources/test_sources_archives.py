"""Episodes in .npz files, and samples in the tar files of WebDataset."""

from __future__ import annotations

import gzip
import io
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_common import damaged, pngs, tarred
from sources_common import read_in_parts

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import read_npz, read_webdataset, source_files, webdataset
from gear_loader.utils import addresses


def save(folder: Path, lengths: tuple[int, ...] = (3, 5, 2)) -> list[dict[str, Any]]:
    folder.mkdir(exist_ok=True)
    made = []
    for number, count in enumerate(lengths):
        generator = np.random.default_rng(number)
        episode = {
            "obs/state": generator.normal(size=(count, 4)),
            "image": generator.integers(0, 255, (count, 2, 2, 3), np.uint8),
            "reward": np.ones(count, ">f4"),
            "seed": np.int64(number),
            "task": np.array("ö" * number),
            "words": np.array(["a", "bc", ""] * 2)[:count],
            "goal": generator.normal(size=2),
        }
        (np.savez if number % 2 else np.savez_compressed)(folder / f"{number}.npz", **episode)
        made.append(episode)
    return made


def test_a_folder_of_npz(tmp_path: Path) -> None:
    made = save(tmp_path / "data")
    for address in (f"npz:{tmp_path}/data", f"npz:{tmp_path}/data/*.npz"):
        with gear.load_dataset(address, per_trajectory=["goal"], keep_float64=True, progress=False) as table:
            assert table.lengths().tolist() == [3, 5, 2]
            assert table.schema["seed"].per == table.schema["task"].per == "trajectory"
            for number, episode in enumerate(made):
                found = table[number]
                assert (found["task"], found["seed"].item()) == ("ö" * number, number)
                assert found["words"] == episode["words"].tolist()
                for name, role in (("obs.state", "obs/state"), ("image", "image"), ("goal", "goal")):
                    np.testing.assert_array_equal(found[name].numpy(), episode[role])
    read_in_parts(read_npz(tmp_path / "data", per_trajectory=["goal"]))
    with gear.load_dataset(tmp_path / "data/1.npz", columns={"r": "reward"}, progress=False) as table:
        assert table[0]["r"].tolist() == [1.0] * 5


@pytest.mark.parametrize(
    ("change", "options", "message"),
    [
        (
            {"image": np.zeros((3, 2, 3, 3), np.uint8)},
            {},
            r"9.npz': column 'image' has shape \[3, 2, 3, 3\]; expected",
        ),
        ({"reward": np.ones(4, np.float32)}, {}, "has columns of .* steps; expected as many in each"),
        ({"reward": np.array([1.0, np.nan, 1.0])}, {}, "9.npz', step 1: column 'reward' holds nan"),
        ({"seed": np.array(None)}, {}, "cannot be read as .npz: ValueError: Object arrays cannot be loaded"),
        ({}, {"columns": ["sead"]}, "has no column 'sead'; .* Did you mean 'seed'"),
        ({}, {"per_trajectory": ["x"]}, "per_trajectory= names 'x'"),
        ({}, {"columns": ["seed"], "per_trajectory": []}, "none of 'seed' is an array"),
    ],
)
def test_npz_that_does_not_fit(
    tmp_path: Path, change: dict[str, Any], options: dict[str, Any], message: str
) -> None:
    made = save(tmp_path / "data")
    np.savez(tmp_path / "data/9.npz", **(made[0] | change))
    options = {"per_trajectory": ["goal"], **options}
    with pytest.raises(SourceError, match=message):
        gear.load_dataset(f"npz:{tmp_path}/data", progress=False, **options)


def images() -> list[bytes]:
    return pngs(7, 4, 6)


def npy(array: Any) -> bytes:
    memory = io.BytesIO()
    np.save(memory, array)
    return memory.getvalue()


def write(path: Path, members: dict[str, bytes]) -> None:
    data = tarred(members)
    path.write_bytes(gzip.compress(data) if path.suffix == ".gz" else data)


def samples(coded: list[bytes]) -> dict[str, bytes]:
    members = {}
    for number, blob in enumerate(coded):
        key = f"run/{'a' if number < 3 else 'b'}/{number:03}"
        members[f"{key}.png"] = blob
        members[f"{key}.state.npy"] = npy(np.full((2, 2), number, np.float32))
        members[f"{key}.json"] = json.dumps({"reward": number / 2, "at": {"x": [number, 1]}}).encode()
        members[f"{key}.txt"] = f"step {number}".encode()
        members[f"{key}.cls"] = str(number).encode()
        members[f"{key}.raw"] = bytes([number, 0])
    return members


@pytest.mark.parametrize("name", ["a.tar", "a.tar.gz"])
def test_samples_that_are_steps(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    coded = images()
    write(tmp_path / name, samples(coded))
    with gear.load_dataset(f"webdataset:{tmp_path}", progress=False) as table:
        assert table.lengths().tolist() == [3, 4]
        found = table[1]
        assert found["png"][:, 0, 0, 0].tolist() == found["cls"].tolist() == [3, 4, 5, 6]
        assert found["state.npy"][:, 1, 1].tolist() == [3.0, 4.0, 5.0, 6.0]
        assert found["json.reward"].tolist() == [1.5, 2.0, 2.5, 3.0]
        assert found["json.at.x"].tolist() == [[n, 1] for n in (3, 4, 5, 6)]
        assert (found["txt"][0], found["raw"][3]) == ("step 3", b"\6\0")
    write(tmp_path / "b.tar", {f"more/{key}": value for key, value in samples(coded).items()})
    reader = read_webdataset(tmp_path)
    assert reader.starts.tolist() == [0, 2]
    read_in_parts(reader)
    (tmp_path / "b.tar").unlink()
    options = {"columns": {"r": "json.reward", "key": "__key__"}, "progress": False}
    with gear.load_dataset(f"webdataset:{tmp_path}", **options) as table:
        assert table[0]["key"] == ["run/a/000", "run/a/001", "run/a/002"]


def test_samples_that_are_episodes(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    members = {}
    for number, count in enumerate((2, 4)):
        members[f"{number}.obs.npy"] = npy(np.full((count, 3), number, np.float32))
        members[f"{number}.task.txt"] = b"x" * number
    write(tmp_path / "a.tar", members)
    with gear.load_dataset(tmp_path / "a.tar", rows="episodes", progress=False) as table:
        assert (table.lengths().tolist(), table[1]["task.txt"]) == ([2, 4], "x")
        assert torch.equal(table[1]["obs.npy"], torch.ones(4, 3))
    members["2.obs.npy"] = npy(np.zeros((2, 4), np.float32))
    members["2.task.txt"] = b""
    write(tmp_path / "a.tar", members)
    with pytest.raises(
        SourceError, match=r"Arrays of the shapes .* expected float of \[3\] for each step, as in"
    ):
        gear.load_dataset(tmp_path / "a.tar", rows="episodes", progress=False)


@pytest.mark.long
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"run/a/001.png": None}, "the sample 'run/a/001' has no 'png'; expected one in each"),
        ({"run/b/004.json": b"{"}, "'run/b/004.json' cannot be read: JSONDecodeError"),
        ({"run/b/004.state.npy": b"\x93NUMPY"}, "'run/b/004.state.npy' cannot be read"),
        ({"run/b/004.state.npy": npy(np.array([None]))}, "Object arrays cannot be loaded"),
        (
            {"run/b/004.state.npy": npy(np.zeros(3, np.float32))},
            "Arrays of the shapes .* as in the first sample",
        ),
        ({"run/b/004.cls": b"x"}, "'run/b/004.cls' cannot be read"),
        ({"run/b/004.PNG": b""}, "the sample 'run/b/004' has two of 'png'"),
    ],
)
def test_samples_that_do_not_fit(tmp_path: Path, change: dict[str, bytes | None], message: str) -> None:
    pytest.importorskip("pyarrow")
    members: dict[str, bytes] = {}
    for name, data in samples(images()).items():
        members[name] = change.get(name, data)  # type: ignore[assignment]
        for other in change:
            if other not in members and other.lower() == name.lower():
                members[other] = b""
    write(tmp_path / "a.tar", {name: data for name, data in members.items() if data is not None})
    with pytest.raises(SourceError, match=message):
        gear.load_dataset(tmp_path / "a.tar", progress=False)


@pytest.mark.long
def test_no_member_is_larger_than_the_limit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow")
    monkeypatch.setattr(webdataset, "MOST_BYTES", 100_000)
    write(tmp_path / "a.tar.gz", {"0.raw": bytes(10_000_000)})
    with pytest.raises(SourceError, match="a part of 10,000,000 bytes; expected at most 100,000"):
        read_webdataset(tmp_path)


@pytest.mark.long
@pytest.mark.parametrize("name", ["a.npz", "a.tar", "a.tar.gz"])
def test_damaged_archives_are_errors(tmp_path: Path, name: str) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / name
    if name == "a.npz":
        np.savez_compressed(path, x=np.arange(100.0), y=np.zeros((100, 3), np.float32))
        schema = {"x": gear.Column(torch.float32), "y": gear.Column(torch.float32, (3,))}
        payload = None
    else:
        write(path, samples(images()))
        schema, payload = {"txt": gear.Column(str), "raw": gear.Column(bytes)}, gear.Memory(payload=9999)
    refused = 0
    with gear.Table.create(schema, max_steps=999, max_trajectories=99, memory=payload) as table:
        for data in damaged(path.read_bytes(), 300):
            path.write_bytes(data)
            read = read_npz if name == "a.npz" else read_webdataset
            try:
                gear.sources.load(read(path, columns=list(schema)), table, progress=False)
            except SourceError:
                refused += 1
                assert len(table) == 0
            else:
                table.clear()
    assert refused > 50


@pytest.mark.long
def test_addresses() -> None:
    fsspec = pytest.importorskip("fsspec")
    pq, pa = pytest.importorskip("pyarrow.parquet"), pytest.importorskip("pyarrow")
    system = fsspec.filesystem("memory")
    try:
        for part in range(2):
            rows = pa.table({"episode": [part] * 3, "x": [float(part)] * 3, "task": [f"t{part}"] * 3})
            with system.open(f"/bucket/a/{part}.parquet", "wb") as file:
                pq.write_table(rows, file)
            with (
                system.open(f"/bucket/a/{part}.arrow", "wb") as file,
                pa.ipc.new_file(file, rows.schema) as writer,
            ):
                writer.write_table(rows)
            memory = io.BytesIO()
            np.savez(memory, x=np.full(3, part, np.float32))
            system.pipe(f"/bucket/a/{part}.npz", memory.getvalue())
            members = {f"{part}/{step}.x.cls": b"%d" % part for step in range(3)}
            system.pipe(f"/bucket/a/{part}.tar", tarred(members))
        for kind, pattern, name in (
            ("parquet", "bucket/a", "x"),
            ("parquet", "bucket/a/*.parquet", "x"),
            ("arrow", "bucket/a/?.arrow", "x"),
            ("npz", "bucket", "x"),
            ("webdataset", "bucket/a", "x.cls"),
        ):
            with gear.load_dataset(f"{kind}:memory://{pattern}", columns=[name], progress=False) as table:
                assert [table[i][name].tolist() for i in range(2)] == [[0.0] * 3, [1.0] * 3], kind
        with gear.load_dataset("memory://bucket/a/1.parquet", progress=False) as table:
            assert table[0]["task"] == ["t1"] * 3
        with pytest.raises(SourceError, match="'memory://bucket/b' names no file"):
            gear.load_dataset("parquet:memory://bucket/b")
        system.pipe("/bucket/a/1.parquet", b"PAR1")
        with pytest.raises(SourceError, match=r"memory:///?bucket/a/1.parquet' cannot be read"):
            gear.load_dataset("parquet:memory://bucket/a")
        with pytest.raises(SourceError, match="does not exist or is not a file"):
            gear.load_dataset("hdf5:memory://bucket/a.hdf5")
    finally:
        system.rm("/bucket", recursive=True)


def test_a_tar_file_that_was_cut_is_refused_wherever_it_ends(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    path = tmp_path / "a.tar"
    write(path, {f"a/{number}.x.npy": npy(np.float32(number)) for number in range(4)})
    whole = path.read_bytes()
    for end in (1024, 1280, 3072, 4096):  # between members, and in headers
        path.write_bytes(whole[:end])
        with pytest.raises(SourceError, match="no header and no end of the archive"):
            read_webdataset(path)
    path.write_bytes(whole[:2068] + b"?" + whole[2069:])
    with pytest.raises(SourceError, match="no end of the archive at byte 2,048: bad checksum"):
        read_webdataset(path)


def test_a_column_that_the_first_sample_lacks_is_not_left_out(tmp_path: Path) -> None:
    pytest.importorskip("pyarrow")
    write(tmp_path / "a.tar", {"a/0.x.cls": b"0", "a/1.x.cls": b"1", "a/1.y.cls": b"1"})
    with pytest.raises(SourceError, match=r"'a/0' has no 'y\.cls'"):
        gear.load_dataset(tmp_path / "a.tar", progress=False)
    with gear.load_dataset(tmp_path / "a.tar", columns=["x.cls"], progress=False) as table:
        assert table[0]["x.cls"].tolist() == [0, 1]


def test_files_at_addresses_are_fetched_together_and_again_when_cut_off(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    fsspec = pytest.importorskip("fsspec")
    system = fsspec.filesystem("memory")
    sizes = [30, 30, 30, 200, 30, 30, 0]  # the fourth one is too large, the last one empty
    contents = [bytes([number]) * size for number, size in enumerate(sizes)]
    for name, value in {"WHOLE_BYTES": 100, "_GROUP_BYTES": 70, "_KEPT_BYTES": 100}.items():
        monkeypatch.setattr(source_files, name, value)
    asked: list[int] = []
    kind, cut = type(system), list[int]()

    def ranges(self: Any, paths: list[str], starts: Any, ends: Any, **options: Any) -> list[bytes]:
        asked.append(len(paths))
        found = [
            system.cat_file(path)[begin:end] for path, begin, end in zip(paths, starts, ends, strict=True)
        ]
        return [each[: len(each) // 2] for each in found] if cut and cut.pop() else found

    monkeypatch.setattr(kind, "cat_ranges", ranges)
    try:
        for number, content in enumerate(contents):
            system.pipe(f"/files/{number}.bin", content)
        files = source_files.files_of("memory://files", (".bin",))
        for order in (range(7), range(7), (5, 0, 3, 4)):
            for number in order:
                with files.open(files[number]) as file:
                    assert file.read() == contents[number]
            assert sum(map(len, files._kept.values())) <= 100
        assert asked[:4] == [2, 1, 1, 2]  # files 0 and 1, 2, 3 by range, 4 and 5
        with files.open(files[0], whole=False) as file:
            assert file.read(2) == contents[0][:2]
        asked.clear()
        cut += [1]
        with source_files.files_of("memory://files", (".bin",)).open("memory:///files/0.bin") as file:
            assert file.read() == contents[0]
        assert asked == [2, 2]
        monkeypatch.setattr(addresses, "DEADLINE_SECONDS", 0.2)
        cut += [1] * 100
        with pytest.raises(SourceError, match=r"files/0.bin cannot be read: .*15 bytes arrived; expected 30"):
            source_files.files_of("memory://files", (".bin",)).open("memory:///files/0.bin")
    finally:
        system.rm("/files", recursive=True)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")  # files that it leaves open
def test_what_webdataset_writes_and_reads(tmp_path: Path) -> None:
    """Two shards of its own writer, step by step, beside its own decoders."""
    owner = pytest.importorskip("webdataset")
    pytest.importorskip("pyarrow")
    random = np.random.default_rng(0)
    with owner.ShardWriter(f"{tmp_path}/%02d.tar", maxcount=4, verbose=0) as sink:
        for number in range(7):
            sink.write(
                {
                    "__key__": f"run/{number // 4}/{number:03}",
                    "state.npy": random.normal(size=(2, 3)).astype(np.float32),
                    "png": random.integers(0, 256, (4, 6, 3), np.uint8),
                    "cls": number - 3,
                    "txt": f"Tür {number}",
                    "json": {"reward": number / 4, "done": number % 4 == 3},
                    "bin": bytes([number, 0]),
                }
            )
    shards = sorted(str(path) for path in tmp_path.iterdir())
    samples = list(owner.WebDataset(shards, shardshuffle=False, empty_check=False).decode("rgb8"))
    assert len(samples) == 7
    with gear.load_dataset(f"webdataset:{tmp_path}", progress=False) as table:
        assert table.lengths().tolist() == [4, 3]
        for number, sample in enumerate(samples):
            episode, step = table[number // 4], number % 4
            np.testing.assert_array_equal(episode["state.npy"][step], sample["state.npy"])
            np.testing.assert_array_equal(episode["png"][step], sample["png"])
            assert episode["cls"][step] == sample["cls"]
            assert episode["txt"][step] == sample["txt"]
            assert episode["json.reward"][step] == sample["json"]["reward"]
            assert bool(episode["json.done"][step]) == sample["json"]["done"]
            assert episode["bin"][step] == sample["bin"]
