"""Tables as data sets of other formats, read back by those who own the format."""

from __future__ import annotations

import io
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader import exports
from gear_loader.errors import CheckpointError, SchemaError, StaleIndexError
from gear_loader.exports import formats, uploads
from gear_loader.storage.engine import Engine

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

LENGTHS = (4, 1, 7)


@pytest.fixture
def plain() -> Any:
    """A table with final steps, of which one trajectory has none."""
    table = gear.Table.create(
        {
            "obs": gear.Column(torch.float32, (2, 3), final=True),
            "half": gear.Column(torch.bfloat16),
            "done": gear.Column(torch.bool),
            "return": gear.Column(torch.float64, per="trajectory"),
        },
        max_steps=40,
        max_trajectories=4,
    )
    for number, length in enumerate(LENGTHS):
        rows = {
            "obs": torch.rand(length, 2, 3),
            "half": torch.rand(length).bfloat16(),
            "done": torch.rand(length) > 0.5,
            "return": 1.5 * number,
        }
        table.add(rows, final=None if number == 1 else {"obs": torch.rand(2, 3)})
    return table


@pytest.fixture
def ragged() -> Any:
    """A table of text, lists, images and bytes."""
    table = gear.Table.create(
        {
            "token": gear.Column(torch.int64, (None,)),
            "point": gear.Column(torch.float32, (None, 2)),
            "text": gear.Column(str),
            "raw": gear.Column(bytes),
            "image": gear.Column(torch.uint8, (4, 6, 3), codec="png"),
            "depth": gear.Column(torch.float32, (3,), codec="zstd"),
            "task": gear.Column(str, per="trajectory"),
            "goal": gear.Column(torch.float32, (None, 2), per="trajectory"),
        },
        max_steps=40,
        max_trajectories=4,
        memory=gear.Memory(payload="1MiB"),
    )
    random = np.random.default_rng(1)
    for number, length in enumerate(LENGTHS):
        table.add(
            {
                "token": [torch.arange(k) for k in range(length)],
                "point": [torch.rand(k, 2) for k in range(length)],
                "text": [f"é{k}" for k in range(length)],
                "raw": [bytes([k, 0]) for k in range(length)],
                "image": random.integers(0, 255, (length, 4, 6, 3), np.uint8),
                "depth": torch.rand(length, 3),
                "task": f"door {number}",
                "goal": torch.rand(number, 2),
            }
        )
    return table


def test_parquet_has_every_step(plain: Any, tmp_path: Path) -> None:
    path = tmp_path / "a.parquet"
    assert plain.export(path) == str(path)
    rows = pq.read_table(path)
    assert rows.column_names == ["episode_index", "frame_index", "obs", "half", "done", "return", "next_obs"]
    assert rows["frame_index"].to_pylist() == [k for length in LENGTHS for k in range(length)]
    found = rows.to_pydict()
    begin = 0
    for number, index in enumerate(plain.indices().tolist()):
        one, end = plain[index], begin + LENGTHS[number]
        assert set(found["episode_index"][begin:end]) == {number}
        np.testing.assert_array_equal(np.array(found["obs"][begin:end], np.float32), one["obs"])
        np.testing.assert_array_equal(np.array(found["half"][begin:end], np.float32), one["half"].float())
        assert found["done"][begin:end] == one["done"].tolist()
        assert found["return"][begin:end] == [float(one["return"])] * LENGTHS[number]
        final = plain.final(index)
        if final is None:
            assert found["next_obs"][begin:end] == [None] * LENGTHS[number]
        else:
            after = torch.cat([one["obs"][1:], final["obs"][None]])
            np.testing.assert_array_equal(np.array(found["next_obs"][begin:end], np.float32), after)
        begin = end


def test_parquet_has_values_of_any_length(ragged: Any, tmp_path: Path) -> None:
    place = tmp_path / "rows"
    ragged.export(
        f"parquet:{place}", columns={"words": "token", **{n: n for n in ragged.schema if n != "token"}}
    )
    (path,) = place.iterdir()
    found = pq.read_table(path).to_pydict()
    from PIL import Image

    begin = 0
    for number, index in enumerate(ragged.indices().tolist()):
        one, end = ragged[index], begin + LENGTHS[number]
        for name, there in (("token", "words"), ("point", "point")):
            expected = [value.tolist() for value in one[name].tolist()]
            assert found[there][begin:end] == expected
        assert found["text"][begin:end] == one["text"]
        assert found["raw"][begin:end] == one["raw"]
        images = [np.asarray(Image.open(io.BytesIO(each))) for each in found["image"][begin:end]]
        np.testing.assert_array_equal(np.stack(images), one["image"])
        np.testing.assert_array_equal(np.array(found["depth"][begin:end], np.float32), one["depth"])
        assert found["task"][begin:end] == [f"door {number}"] * LENGTHS[number]
        np.testing.assert_array_equal(np.array(found["goal"][begin], np.float32).reshape(-1, 2), one["goal"])
        begin = end


def test_a_folder_has_files_of_about_a_size(plain: Any, tmp_path: Path) -> None:
    plain.export(f"parquet:{tmp_path / 'rows'}", file_bytes=1)
    names = sorted(path.name for path in (tmp_path / "rows").iterdir())
    assert names[:3] == ["part-00000.parquet", "part-00001.parquet", "part-00002.parquet"]
    whole = pa.concat_tables([pq.read_table(tmp_path / "rows" / name) for name in names])
    assert whole["episode_index"].to_pylist() == [
        k for k, length in enumerate(LENGTHS) for _ in range(length)
    ]


def test_hugging_face_reads_images(ragged: Any, tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    place = tmp_path / "hub"
    ragged.export(f"hf:{place}")
    found = datasets.load_dataset(str(place), split="train", cache_dir=str(tmp_path / "cache"))
    assert isinstance(found.features["image"], datasets.Image)
    first = ragged[int(ragged.indices()[0])]
    np.testing.assert_array_equal(np.asarray(found[2]["image"]), first["image"][2])
    assert found[2]["text"] == "é2"


def test_npz_has_a_file_for_each_trajectory(plain: Any, tmp_path: Path) -> None:
    plain.export(f"npz:{tmp_path / 'out'}", compressed=True)
    assert [path.name for path in sorted((tmp_path / "out").iterdir())] == [f"{k:08d}.npz" for k in range(3)]
    with np.load(tmp_path / "out" / "00000002.npz", allow_pickle=False) as found:
        index = int(plain.indices()[2])
        np.testing.assert_array_equal(found["obs"], plain[index]["obs"])
        np.testing.assert_array_equal(found["next_obs"][-1], plain.final(index)["obs"])
        np.testing.assert_array_equal(found["next_obs"][:-1], plain[index]["obs"][1:])
        assert found["return"] == 3.0


def test_what_is_evicted_meanwhile_is_left_out(
    plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    rows, gone = Engine.rows, int(plain.indices()[0])

    def read(self: Engine, index: int, **options: Any) -> Any:
        if index == gone:
            raise StaleIndexError("gone")
        return rows(self, index, **options)

    monkeypatch.setattr(Engine, "rows", read)
    plain.export(tmp_path / "a.parquet")
    assert pq.read_table(tmp_path / "a.parquet")["frame_index"].to_pylist() == [0, *range(7)]


def test_a_trajectory_that_grows_meanwhile_is_read_at_one_moment(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = gear.Table.create(
        {"image": gear.Column(torch.uint8, (4, 6, 3), codec="png"), "step": gear.Column(torch.int64)},
        max_steps=40,
        max_trajectories=4,
        memory=gear.Memory(payload="1MiB"),
    )
    writer, rows = table.writers(1, commit_every_step=True), Engine.rows

    def step(number: int) -> None:
        writer.append({"image": np.full((1, 4, 6, 3), number, np.uint8), "step": np.array([number])})

    def read(self: Engine, index: int, **options: Any) -> Any:
        found = rows(self, index, **options)
        step(table.num_steps)
        return found

    step(0)
    monkeypatch.setattr(Engine, "rows", read)
    table.export(tmp_path / "a.parquet")
    found = pq.read_table(tmp_path / "a.parquet").to_pydict()
    assert found["step"] == [0]
    assert len(found["image"]) == 1


DTYPES = [torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64]
DTYPES += [torch.float16, torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=["parquet", pytest.param("hf", marks=pytest.mark.long), "npz"])
def kind(request: Any) -> str:
    """A format whose folders `load_dataset` reads by the same address."""
    if request.param == "hf":
        pytest.importorskip("datasets")
    return str(request.param)


def same(found: Any, given: Any) -> None:
    """What was loaded is what was there, bfloat16 as float32."""
    if isinstance(given, torch.Tensor):
        given = given.float() if given.dtype == torch.bfloat16 else given
        torch.testing.assert_close(found, given, rtol=0, atol=0, check_stride=False)
    elif hasattr(given, "offsets"):
        same(found.values, given.values)
        assert torch.equal(found.offsets, given.offsets)
    else:
        assert found == given


def test_numbers_and_final_values_are_loaded_as_they_were(kind: str, tmp_path: Path) -> None:
    columns = {}
    for dtype in DTYPES:
        name = f"nested.{str(dtype)[6:]}"
        columns[f"{name}.s"] = gear.Column(dtype, final=True)
        columns[f"{name}.m"] = gear.Column(dtype, (2, 3), final=True)
        columns[f"{name}.once"] = gear.Column(dtype, (2,), per="trajectory")
    columns["one"] = gear.Column(torch.float32, (1,))
    with gear.Table.create(columns, max_steps=40, max_trajectories=4) as table:
        for length in LENGTHS:
            whole = {
                name: (torch.randn(length + 1, *column.shape) * 50).abs().to(column.dtype)
                for name, column in columns.items()
            }
            rows = {name: each[-1] if columns[name].trajectory else each[:-1] for name, each in whole.items()}
            table.add(rows, final={name: whole[name][-1] for name in columns if columns[name].final})
        table.export(f"{kind}:{tmp_path}/a")
        options = {"keep_float64": True, "progress": False}
        options["per_trajectory"] = [name for name in columns if columns[name].trajectory]
        with gear.load_dataset(f"{kind}:{tmp_path}/a", final=True, **options) as loaded:
            assert set(loaded.schema) - {"frame_index"} == set(columns)
            for index in range(3):
                final, there = table.final(index), loaded.final(index)
                assert final is not None
                assert there is not None
                assert set(there) == set(final)
                for name, value in table[index].items():
                    same(loaded[index][name], value)
                for name, value in final.items():
                    same(there[name], value)
        with gear.load_dataset(f"{kind}:{tmp_path}/a", **options) as loaded:
            assert loaded.final(0) is None
            same(loaded[2]["next_nested.int8.m"][-1], table.final(2)["nested.int8.m"])  # type: ignore[index]


def test_values_of_any_length_are_loaded_as_they_were(kind: str, ragged: Any, tmp_path: Path) -> None:
    """Images stay encoded by Hugging Face's features; as Parquet has them they are bytes."""
    names = ["task"] if kind == "npz" else list(ragged.schema)
    with gear.Table.create(
        dict(ragged.schema)
        | {"number": gear.Column(torch.int64)}
        | {
            f"image.{codec}{channels}": gear.Column(torch.uint8, (4, 6, channels), codec=codec)
            for codec, channels in (
                ("jpeg", 3),
                ("jpeg", 1),
                ("webp", 3),
                ("webp", 4),
                ("png", 1),
                ("png", 4),
            )
        },
        max_steps=40,
        max_trajectories=4,
        memory=gear.Memory(payload="1MiB"),
    ) as table:
        random = np.random.default_rng(2)
        for index in ragged.indices().tolist():
            rows = ragged[index]
            length = len(rows["text"])
            rows["number"] = torch.arange(length)
            for name, column in table.schema.items():
                if name.startswith("image."):
                    rows[name] = random.integers(0, 255, (length, *column.ragged.coded.shape), np.uint8)
            table.add(rows)
        names = [*names, "number"] + (
            [] if kind == "npz" else [n for n in table.schema if n.startswith("image.")]
        )
        table.export(f"{kind}:{tmp_path}/a", columns=names)
        once = [name for name in names if table.schema[name].trajectory]
        with gear.load_dataset(f"{kind}:{tmp_path}/a", per_trajectory=once, progress=False) as loaded:
            for name in names:
                images = table.schema[name].codec is not None and table.schema[name].codec.name != "zstd"
                if kind == "parquet" and images:
                    assert loaded.schema[name] == gear.Column(bytes)
                    continue
                if images:
                    assert loaded.schema[name] == table.schema[name]
                for index in range(3):
                    same(loaded[index][name], table[index][name])


@pytest.mark.parametrize(
    ("address", "options", "message"),
    [
        ("nothing:x", {}, "expected one of"),
        ("parquet:", {}, "expected one of"),
        (3, {}, "expected one of"),
        ("sftp://host/a.parquet", {}, "has the scheme 'sftp'; expected one of abfs"),
        ("parquet:{}", {"speed": 1}, "does not know the option 'speed'"),
        ("parquet:{}", {"columns": ["speed"]}, "speed"),
        ("parquet:{}", {"columns": {"frame_index": "obs"}}, "frame_index"),
        ("parquet:{}", {"file_bytes": 0}, "file_bytes"),
        ("hf:{}", {"split": "a/b"}, "split='a/b'"),
    ],
)
def test_what_cannot_be_written_is_an_error(
    plain: Any, tmp_path: Path, address: Any, options: dict[str, Any], message: str
) -> None:
    if isinstance(address, str):
        address = address.format(tmp_path / "out")
    with pytest.raises(SchemaError, match=message):
        plain.export(address, **options)
    assert not list(tmp_path.iterdir())


def test_nothing_is_left_after_an_error(plain: Any, ragged: Any, tmp_path: Path) -> None:
    taken = tmp_path / "taken.parquet"
    taken.write_text("mine")
    with pytest.raises(SchemaError, match="is there already"):
        plain.export(taken)
    assert taken.read_text() == "mine"
    late = gear.Table.create(
        {"obs": gear.Column(torch.float32), "score": gear.Column(torch.float32, late=True)},
        max_steps=10,
        max_trajectories=2,
    )
    late.add({"obs": torch.rand(2)})
    with pytest.raises(SchemaError, match="write-once"):
        late.export(f"npz:{tmp_path / 'late'}")
    with pytest.raises(SchemaError, match="any length"):
        ragged.export(f"npz:{tmp_path / 'late'}")
    assert list(tmp_path.iterdir()) == [taken]


@pytest.fixture
def store() -> Iterator[Any]:
    system = pytest.importorskip("fsspec").filesystem("memory")
    system.store.clear()
    yield system
    system.store.clear()


@pytest.mark.parametrize(
    "address", ["parquet:{}/a.parquet", "npz:{}", pytest.param("hf:{}", marks=pytest.mark.long)]
)
def test_what_is_exported_to_an_address_is_what_is_written_here(
    plain: Any, tmp_path: Path, store: Any, address: str
) -> None:
    (tmp_path / "out").mkdir()
    here, there = address.format(tmp_path / "out" / "x"), address.format("memory://out/x")
    plain.export(here)
    assert plain.export(there) == there.partition(":")[2]
    files = {
        f"/{each.relative_to(tmp_path)}": each for each in (tmp_path / "out").rglob("*") if each.is_file()
    }
    assert {key: file.getvalue() for key, file in store.store.items()} == {
        key: path.read_bytes() for key, path in files.items()
    }
    options: dict[str, Any] = {"columns": list(plain.schema), "per_trajectory": ["return"], "progress": False}
    with gear.load_dataset(here, **options) as one, gear.load_dataset(there, **options) as other:
        assert one.schema == other.schema
        for name, value in one[2].items():
            same(value, other[2][name])
    with pytest.raises(SchemaError, match=r"out/x.* is there already"):
        plain.export(there)
    assert len(store.store) == len(files)


def test_an_upload_that_is_refused_leaves_nothing(
    plain: Any, store: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    kind, calls = type(store), list[str]()
    real = kind.put_file

    def put_file(self: Any, local: str, target: str, **options: Any) -> None:
        calls.append(target)
        if len(calls) == 1:
            raise TimeoutError("slow")  # is repeated
        if len(calls) == 3:
            raise PermissionError(13, "Forbidden")
        real(self, local, target, **options)

    monkeypatch.setattr(kind, "put_file", put_file)
    monkeypatch.setattr(uploads, "_THREADS", 1)
    with pytest.raises(CheckpointError, match=r"memory://out/0000000\d.npz cannot be written: .*Forbidden"):
        plain.export("npz:memory://out")
    assert not store.store
    plain.export("npz:memory://out")
    assert len(store.store) == 3


def test_formats_of_ones_own(plain: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(formats.registry, "known", dict(formats.registry.known))

    def lengths(table: gear.Table, place: str, *, columns: Any = None, indent: int = 0) -> int:
        return Path(place).write_text(json.dumps(table.lengths().tolist(), indent=indent))

    exports.register("lengths", lengths)
    plain.export(f"lengths:{tmp_path / 'a.json'}", indent=2)
    assert json.loads((tmp_path / "a.json").read_text()) == list(LENGTHS)
    with pytest.raises(SchemaError, match="known already"):
        exports.register("parquet", lengths)
    with pytest.raises(SchemaError, match="such as 'mine'"):
        exports.register("Mine", lengths)


def test_npz_has_names_of_numpys_parameters_and_refuses_what_it_would_cut(tmp_path: Path) -> None:
    episode = {"file": np.arange(3), "allow_pickle": np.arange(3), "key": b"ab\0"}
    with gear.sources.load([episode], per_trajectory=["key"], progress=False) as table:
        table.export(f"npz:{tmp_path}/a", columns=["file", "allow_pickle"])
        with np.load(tmp_path / "a/00000000.npz") as found:
            assert found["file"].tolist() == found["allow_pickle"].tolist() == [0, 1, 2]
        with pytest.raises(SchemaError, match="'key' has a value that ends in NUL"):
            table.export(f"npz:{tmp_path}/b")
    assert [path.name for path in tmp_path.iterdir()] == ["a"]
