"""Parquet, Arrow's files, data frames and data sets of Hugging Face: what pyarrow reads is what the table holds."""

from __future__ import annotations

import math
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from files_common import damaged, pngs
from hypothesis import given, settings
from hypothesis import strategies as st
from sources_common import read_in_parts

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import arrow_episodes, arrow_rows, load, read_arrow, read_parquet, read_rows

pa = pytest.importorskip("pyarrow")
pq = pytest.importorskip("pyarrow.parquet")

NUMBERS = ["bool", "uint8", "int8", "uint16", "int16", "uint32", "int32", "int64", "float32", "float64"]


def plain(value: Any) -> Any:
    """A value of a table as `to_pylist` gives it."""
    if isinstance(value, gear.Ragged):
        return [each.tolist() for each in value.tolist()]
    return value.tolist() if isinstance(value, torch.Tensor) else value


def same(found: Any, wanted: Any) -> bool:
    """Whether values are equal; a missing float is NaN."""
    if isinstance(wanted, (list, tuple)):
        return len(found) == len(wanted) and all(map(same, found, wanted))
    if isinstance(found, float) and math.isnan(found):
        return wanted is None or (isinstance(wanted, float) and math.isnan(wanted))
    return bool(found == wanted)


def numbers_of(kind: str) -> st.SearchStrategy[Any]:
    if kind == "bool":
        return st.booleans()
    if kind.startswith("float"):
        return st.none() | st.floats(width=int(kind[5:]))
    limits = np.iinfo(kind)
    return st.integers(int(limits.min), int(limits.max))


@st.composite
def fields(draw: st.DrawFn, depth: int = 0) -> tuple[Any, st.SearchStrategy[Any]]:
    """An Arrow type, and its values."""
    choices = ["number", "number", "str", "bytes", "fixed", "ragged", "deep", "objects", "words"]
    kind = draw(st.sampled_from(choices + (["struct"] if depth < 2 else [])))
    if kind == "str":
        return pa.string(), st.text(max_size=5)
    if kind == "bytes":
        return draw(st.sampled_from([pa.binary(), pa.large_binary()])), st.binary(max_size=5)
    if kind == "objects":
        inner = pa.struct([("role", pa.string()), ("n", pa.int32())])
        value = st.fixed_dictionaries({"role": st.none() | st.text(max_size=3), "n": st.integers(0, 9)})
        return pa.list_(inner), st.lists(value, max_size=2)
    if kind == "words":
        return pa.dictionary(pa.int8(), pa.string()), st.sampled_from(["a", "", "ö"])
    if kind == "struct":
        parts = draw(st.lists(fields(depth + 1), min_size=1, max_size=2))
        inner = pa.struct([(f"f{i}", each[0]) for i, each in enumerate(parts)])
        return inner, st.fixed_dictionaries({f"f{i}": each[1] for i, each in enumerate(parts)})
    name = draw(st.sampled_from(NUMBERS))
    item = getattr(pa, {"bool": "bool_"}.get(name, name))()
    if kind == "number":
        return item, numbers_of(name)
    size = draw(st.integers(1, 3))
    if kind == "fixed":
        return pa.list_(item, size), st.lists(numbers_of(name), min_size=size, max_size=size)
    row = st.lists(numbers_of(name), min_size=size, max_size=size)
    if kind == "deep":
        return pa.list_(pa.list_(item)), st.lists(row, max_size=2)
    return pa.large_list(item), st.lists(numbers_of(name), max_size=3)


@st.composite
def tables(draw: st.DrawFn) -> Any:
    """Rows of some episodes, which may lie anywhere."""
    parts = draw(st.lists(fields(), min_size=1, max_size=4))
    rows = draw(st.integers(1, 30))
    episodes = draw(st.lists(st.integers(0, 4), min_size=rows, max_size=rows))
    if draw(st.booleans()):
        episodes.sort()
    columns = {"episode": pa.array(episodes, pa.int16())}
    for i, (kind, values) in enumerate(parts):
        found = draw(st.lists(values, min_size=rows, max_size=rows))
        plain_kind = kind.value_type if pa.types.is_dictionary(kind) else kind
        array = pa.array(found, plain_kind)
        columns[f"c{i}"] = array.dictionary_encode() if plain_kind is not kind else array
    return pa.table(columns)


def flat(row: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    found: dict[str, Any] = {}
    for name, value in row.items():
        found |= flat(value, f"{prefix}{name}.") if isinstance(value, dict) else {prefix + name: value}
    return found


def naive(rows: Any) -> list[list[dict[str, Any]]]:
    """The rows of each episode, in the order in which episodes are complete."""
    found: dict[Any, list[dict[str, Any]]] = {}
    last: dict[Any, int] = {}
    for number, row in enumerate(rows.to_pylist()):
        key = row.pop("episode")
        found.setdefault(key, []).append(flat(row))
        last[key] = number
    return [found[key] for key in sorted(found, key=last.__getitem__)]


def check(table: gear.Table, rows: Any) -> None:
    episodes = naive(rows)
    assert len(table) == len(episodes)
    for number, steps in enumerate(episodes):
        got = table[number]
        assert set(got) == set(steps[0])
        for name in got:
            values = plain(got[name])
            assert same(values, [step[name] for step in steps]), name


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(rows=tables(), data=st.data())
def test_what_pyarrow_reads_is_what_the_table_holds(
    tmp_path_factory: pytest.TempPathFactory, rows: Any, data: st.DataObject
) -> None:
    pytest.importorskip("msgpack")
    folder = tmp_path_factory.mktemp("rows")
    kind = data.draw(st.sampled_from(["parquet", "arrow", "stream", "table"]))
    size = data.draw(st.integers(1, 12))
    options = {"keep_float64": True, "allow_nonfinite": True}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arrow_rows, "READ_BYTES", data.draw(st.sampled_from([1, 200, 2**20])))
        patch.setattr(arrow_episodes, "OPEN_BYTES", data.draw(st.sampled_from([1, 2**20])))
        if kind == "parquet":
            for name, part in (("a", rows.slice(0, 7)), ("b", rows.slice(7))):
                pq.write_table(part, folder / f"{name}.parquet", row_group_size=size)
            reader = read_parquet(folder / "*.parquet", **options)
        elif kind == "table":
            reader = read_rows(rows, **options)
        else:
            make = pa.ipc.new_file if kind == "arrow" else pa.ipc.new_stream
            with make(str(folder / "a.arrow"), rows.schema) as writer:
                writer.write_table(rows, max_chunksize=size)
            reader = read_arrow(folder, **options)
        with load(reader, progress=False, keep_float64=True) as table:
            check(table, rows)
        read_in_parts(reader)


def sample() -> Any:
    count = 60
    generator = np.random.default_rng(0)
    return pa.table(
        {
            "episode_index": np.repeat(np.arange(6), 10),
            "frame": np.tile(np.arange(10), 6),
            "obs": list(generator.normal(size=(count, 3)).astype(np.float32)),
            "task": [f"task {i // 10}" for i in range(count)],
            "reward": np.ones(count, np.float32),
            "words": [b"x" * (i % 5) for i in range(count)],
        }
    )


def test_rows_are_sorted_by_a_column_and_what_is_constant_is_stored_once() -> None:
    rows, mixed = sample(), np.random.default_rng(1).permutation(60)
    with load(read_rows(rows, per_trajectory=["task"]), progress=False) as table:
        reader = read_rows(rows.take(mixed), step="frame", per_trajectory=["task"])
        with load(reader, progress=False) as other:
            assert table.schema["task"].per == "trajectory"
            found = {other[i]["task"]: other[i] for i in range(6)}
            for i in range(6):
                for name in ("frame", "obs", "reward", "words"):
                    assert same(plain(found[table[i]["task"]][name]), plain(table[i][name]))
    with pytest.raises(
        SourceError, match="episode 0, step 1: column 'frame' has another value than at step 0"
    ):
        load(read_rows(rows, per_trajectory=["frame"]), progress=False)


@pytest.mark.parametrize("mixed", [False, True])
def test_files_are_read_from_a_row_group_on(
    tmp_path: Path, mixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the last row group that holds all of an episode and of those that follow; of mixed rows from the first."""
    rows = sample()
    if mixed:
        rows = rows.take(pa.array(np.random.default_rng(0).permutation(len(rows))))
    pq.write_table(rows.slice(0, 25), tmp_path / "a.parquet", row_group_size=4)
    pq.write_table(rows.slice(25), tmp_path / "b.parquet", row_group_size=35)
    reader = read_parquet(tmp_path, step="frame", per_trajectory=["task"])
    assert mixed or reader.starts.tolist() == [0, 1, 2, 3]
    read_in_parts(reader)
    monkeypatch.setattr(arrow_rows, "_PART_ROWS", 7)
    datasets = pytest.importorskip("datasets")
    reader = read_rows(datasets.Dataset(rows))
    assert mixed or reader.starts.tolist() == [0, 1, 2, 3, 4, 5]
    read_in_parts(reader)


def test_rows_that_are_episodes(tmp_path: Path) -> None:
    step = pa.struct([("x", pa.float32()), ("image", pa.binary())])
    rows = pa.table(
        {
            "goal": [[1.0, 2.0], [3.0, 4.0]],
            "task": ["left", "right"],
            "obs": [[[1.0] * 3] * 2, [[2.0] * 3] * 4],
            "steps": pa.array([[{"x": i, "image": b"i"} for i in range(n)] for n in (2, 4)], pa.list_(step)),
        }
    )
    pq.write_table(rows, tmp_path / "a.parquet", row_group_size=2)
    reader = read_parquet(tmp_path, rows="episodes", per_trajectory=["goal"])
    assert reader.starts.tolist() == list(range(0, len(rows), 2))
    read_in_parts(reader)
    with load(reader, progress=False) as table:
        assert table.lengths().tolist() == [2, 4]
        found = {name: plain(value) for name, value in table[1].items()}
        assert (found["goal"], found["task"]) == ([3.0, 4.0], "right")
        assert (found["steps.x"], found["steps.image"]) == ([0.0, 1.0, 2.0, 3.0], [b"i"] * 4)
        assert table[0]["obs"].shape == (2, 3)
    for change, message in (
        (
            {"steps": rows["steps"].take(pa.array([1, 0]))},
            "row 0: column 'steps.image' has 4 steps, and others 2; expected as many",
        ),
        ({"obs": pa.array([None, [[1.0] * 3] * 4])}, "row 0: column 'obs' is null; expected a list"),
        ({"obs": pa.array([[], [[1.0] * 3] * 4])}, "has 0 steps"),
    ):
        wrong = pa.table({**{name: rows[name] for name in rows.column_names}, **change})
        with pytest.raises(SourceError, match=message):
            load(read_rows(wrong, rows="episodes", per_trajectory=["goal"]), progress=False)


def test_one_line_loads_files(tmp_path: Path) -> None:
    rows = sample()
    pq.write_table(rows, tmp_path / "a.parquet")
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    columns = {"observation": "obs", "text": "task"}
    for address in (
        f"parquet:{tmp_path}/*.parquet",
        f"{tmp_path}/a.parquet",
        f"arrow:{tmp_path}",
        tmp_path / "a.arrow",
    ):
        with gear.load_dataset(
            address,
            columns=columns,
            per_trajectory=["text"],
            filter=lambda e: e["text"] != "task 1",
            progress=False,
        ) as table:
            assert [table[i]["text"] for i in range(5)] == [f"task {i}" for i in (0, 2, 3, 4, 5)]
            assert same(plain(table[1]["observation"]), rows["obs"].to_pylist()[20:30])
    schema = {"obs": gear.Column(torch.float16, (3,)), "task": gear.Column(str, per="trajectory")}
    with gear.Table.create(
        schema, max_steps=99, max_trajectories=9, memory=gear.Memory(payload=9999)
    ) as table:
        gear.load_dataset(f"parquet:{tmp_path}", table, progress=False)
        assert (table[5]["task"], table[5]["obs"].dtype) == ("task 5", torch.float16)


def rows_of(**columns: Any) -> Any:
    return pa.table({"episode": [0, 0, 1], **columns})


@pytest.mark.parametrize(
    ("rows", "options", "message"),
    [
        (rows_of(x=[1, None, 2]), {}, "row 1: column 'x' is null, which no column of int64 holds"),
        (rows_of(x=["a", None, "b"]), {}, "row 1: column 'x' is null"),
        (rows_of(x=[{"a": 1}, None, {"a": 2}]), {}, "row 1: column 'x.a' is null"),
        (
            rows_of(reward=[1.0, 2.0, float("nan")]),
            {},
            "row 2: column 'reward' holds nan, which is not a finite",
        ),
        (rows_of(x=pa.array([1, 2, 3], pa.uint64())), {}, "column 'x' has dtype uint64"),
        (rows_of(x=pa.array([1, 2, 3], pa.decimal128(5))), {}, "row 0: column 'x' is of the type decimal128"),
        (rows_of(x=[1, 2, 3]), {"episode": "ep"}, "has no column 'ep'; it has 'episode', 'x'"),
        (
            pa.table({"x": [1, 2]}),
            {},
            "no column 'episode_index' or 'episode_id' or 'episode', .*; it has 'x'. Name it",
        ),
        (rows_of(x=[1, 2, 3]), {"episode": "x", "rows": "episodes"}, "expected one of them"),
        (rows_of(x=[1, 2, 3]), {"rows": "all"}, "rows is 'all'; expected 'steps' or 'episodes'"),
        (
            rows_of(x=[1, 2, 3]),
            {"rows": "episodes"},
            "none is a list; expected one with a value for each step",
        ),
        (rows_of(x=[1, 2, 3]), {"per_trajectory": ["x"]}, "expected some of them, and not all"),
        (rows_of(x=[1, 2, 3]), {"step": "y"}, "has no column 'y'"),
        (rows_of(x=[1, 2, 3]).slice(0, 0), {}, "has no rows"),
        ([1, 2], {}, "an object of type list was received; expected an Arrow table, a data frame"),
    ],
)
def test_rows_that_do_not_fit(rows: Any, options: dict[str, Any], message: str) -> None:
    pytest.importorskip("msgpack")
    with pytest.raises(SourceError, match=message):
        load(read_rows(rows, **options), progress=False)


@pytest.mark.long
@pytest.mark.parametrize("suffix", ["parquet", "arrow", "stream"])
def test_damaged_files_are_errors(tmp_path: Path, suffix: str) -> None:
    rows, path = sample(), tmp_path / f"a.{'parquet' if suffix == 'parquet' else 'arrow'}"
    if suffix == "parquet":
        pq.write_table(rows, path, row_group_size=25)
    else:
        with (pa.ipc.new_file if suffix == "arrow" else pa.ipc.new_stream)(str(path), rows.schema) as writer:
            writer.write_table(rows, max_chunksize=25)
    schema = {
        "obs": gear.Column(torch.float32, (3,)),
        "task": gear.Column(str),
        "words": gear.Column(bytes),
    }
    loaded = 0
    with gear.Table.create(
        schema, max_steps=99, max_trajectories=9, memory=gear.Memory(payload=9999)
    ) as table:
        for data in damaged(path.read_bytes(), 120):
            path.write_bytes(data)
            try:
                gear.load_dataset(str(path), table, progress=False)
            except SourceError:
                assert len(table) == 0
            else:  # a byte of a value
                loaded += 1
                table.clear()
    assert loaded < 80


def test_files_that_do_not_fit_together(tmp_path: Path) -> None:
    pq.write_table(sample(), tmp_path / "a.parquet")
    pq.write_table(sample().drop_columns(["task"]), tmp_path / "b.parquet")
    with pytest.raises(SourceError, match=r"b.parquet' has other columns than .*a.parquet'; .*'?task"):
        read_parquet(tmp_path)
    with pytest.raises(SourceError, match="names no file; expected a file, a pattern such as"):
        read_parquet(tmp_path / "*.pq")
    with pytest.raises(SourceError, match=r"'parquet:' does not know the option 'spilt'; it has .*'episode'"):
        gear.load_dataset(f"parquet:{tmp_path}", spilt="train")


@pytest.mark.long
def test_images_are_kept_as_the_data_set_has_them(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    coded = pngs(6, 4, 6)
    features = datasets.Features({"episode": datasets.Value("int64"), "frame": datasets.Image()})
    made = {"episode": [0, 0, 0, 1, 1, 1], "frame": [{"bytes": each, "path": None} for each in coded]}
    dataset = datasets.Dataset.from_dict(made, features=features)
    dataset.save_to_disk(tmp_path / "saved")
    dataset.to_parquet(tmp_path / "a.parquet")
    for address in (f"hf:{tmp_path}/saved", f"parquet:{tmp_path}/a.parquet"):
        with gear.load_dataset(address, progress=False) as table:
            values = table.schema["frame"].ragged
            assert values is not None
            assert values.coded is not None
            assert (values.coded.codec.name, values.coded.shape) == ("png", (4, 6, 3))
            assert table[1]["frame"][:, 0, 0, 0].tolist() == [3, 4, 5]
    columns = {"frame": gear.Column(bytes)}
    with gear.Table.create(
        columns, max_steps=9, max_trajectories=9, memory=gear.Memory(payload=9999)
    ) as table:
        load(read_rows(dataset.select([5, 3, 4])), table, progress=False)
        assert table[0]["frame"] == [coded[5], coded[3], coded[4]]
    (tmp_path / "files").mkdir()
    for number, each in enumerate(coded):
        (tmp_path / f"files/{number}.png").write_bytes(each)
    paths = [str(tmp_path / f"files/{i}.png") for i in range(6)]
    dataset = datasets.Dataset.from_dict({"episode": made["episode"], "frame": paths}, features=features)
    with load(read_rows(dataset), progress=False) as table:
        assert table[1]["frame"][:, 0, 0, 0].tolist() == [3, 4, 5]
    rows = dataset.with_format("arrow")[:]
    with pytest.raises(
        SourceError, match=r"row 0: column 'frame' has no bytes, but the path '.*0.png'; expected"
    ):
        load(read_rows(rows), progress=False)


@pytest.mark.long
def test_splits_of_a_data_set(tmp_path: Path) -> None:
    datasets = pytest.importorskip("datasets")
    parts = {
        name: datasets.Dataset.from_dict({"episode": [n], "x": [n]})
        for n, name in enumerate(("train", "test"))
    }
    datasets.DatasetDict(parts).save_to_disk(tmp_path / "both")
    with gear.load_dataset(f"hf:{tmp_path}/both", split="test", progress=False) as table:
        assert table[0]["x"].tolist() == [1]
    with pytest.raises(
        SourceError, match="has the splits 'train', 'test', and split=None was given; expected one"
    ):
        gear.load_dataset(f"hf:{tmp_path}/both", progress=False)
    with pytest.raises(SourceError, match="cannot be opened"):
        gear.load_dataset(f"hf:{tmp_path}/none", progress=False)


def test_data_frames() -> None:
    pandas = pytest.importorskip("pandas")
    frame = pandas.DataFrame({"episode": ["a", "a", "b"], "x": [1.0, 2.0, 3.0], "text": ["i", "j", "k"]})
    with load(read_rows(frame), progress=False) as table:
        assert table.lengths().tolist() == [2, 1]
        assert (table[1]["x"].tolist(), table[0]["text"]) == ([3.0], ["i", "j"])


def test_tensors_of_one_shape() -> None:
    values = np.arange(24.0).reshape(4, 2, 3)
    tensors = pa.FixedShapeTensorArray.from_numpy_ndarray(values)
    rows = pa.table({"episode": [0, 0, 1, 1], "x": tensors})
    for each in (rows, pa.concat_tables([rows.slice(2), rows.slice(0, 2)])):
        with load(read_rows(each), keep_float64=True, progress=False) as table:
            found = np.concatenate([table[i]["x"].numpy() for i in range(2)])
            np.testing.assert_array_equal(np.sort(found, axis=None), values.ravel())
            assert table.schema["x"].shape == (2, 3)


def test_rows_that_change_are_noticed() -> None:
    rows = sample()

    class Changing(arrow_rows.Rows):
        def read(self, columns: Any, first: int) -> Any:
            nonlocal rows
            yield from ((0, batch) for batch in rows.select(list(columns)).to_batches())
            rows = rows.take(pa.array([*range(10, 20), *range(10), *range(20, 60)]))

    with pytest.raises(SourceError, match="has other rows than before; expected data that stay as they are"):
        load(read_rows(Changing("Mine", rows.schema)), progress=False)


@pytest.mark.long
@pytest.mark.filterwarnings("ignore")  # Ray's own
def test_a_data_set_of_ray() -> None:
    ray = pytest.importorskip("ray")
    ray.init(num_cpus=1, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    try:
        dataset = ray.data.from_numpy(np.arange(24, dtype=np.float32).reshape(8, 3))
        dataset = dataset.map_batches(lambda batch: {**batch, "episode": batch["data"][:, 0] // 12})
        with load(read_rows(dataset), progress=False) as table:
            assert table.schema["data"].shape == (3,)
            found = [table[i]["data"].numpy() for i in range(2)]
            assert sorted(np.concatenate(found).ravel().tolist()) == list(range(24))
            assert [len(each) for each in found] == [4, 4]
    finally:
        ray.shutdown()


# In a process of its own, whose peak is that of the loading.
LARGE_ENTRY = """
import sys
import pyarrow as pa
import gear_loader as gear

memory = gear.Memory(payload=2**20)
table = gear.Table.create({"x": gear.Column(str)}, max_steps=20_000, max_trajectories=1, memory=memory)
try:
    gear.load_dataset(sys.argv[1], table, progress=False)
except gear.errors.SourceError as error:
    print(error)
print(pa.default_memory_pool().max_memory())
"""


@pytest.mark.long
def test_a_large_entry_of_a_dictionary_stays_one(tmp_path: Path) -> None:
    entry = pa.DictionaryArray.from_arrays(pa.array(np.zeros(20_000, np.int32)), pa.array(["a" * 2**22]))
    rows = pa.table({"episode": np.zeros(20_000, np.int32), "x": entry})
    pq.write_table(rows, tmp_path / "a.parquet", dictionary_pagesize_limit=2**24)
    with pa.ipc.new_file(str(tmp_path / "a.arrow"), rows.schema) as writer:
        writer.write_table(rows)
    for path in (tmp_path / "a.parquet", tmp_path / "a.arrow"):
        command = [sys.executable, "-c", LARGE_ENTRY, str(path)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
        *message, peak = done.stdout.splitlines()
        assert "an episode has 83,886,080,000 bytes of values of any length; the" in " ".join(message), done
        assert int(peak) < 2**30


@pytest.mark.parametrize("categories", [["gone", "b", "a"], ["b", "gone", "a"], ["b", "a", "gone"]])
def test_categories_without_rows_are_no_episodes(categories: list[str]) -> None:
    places = [categories.index(name) for name in ("a", "a", "b")]
    key = pa.DictionaryArray.from_arrays(pa.array(places, pa.int32()), pa.array(categories))
    with load(read_rows(pa.table({"episode": key, "x": [1.0, 2.0, 3.0]})), progress=False) as table:
        assert [table[i]["x"].tolist() for i in table.indices().tolist()] == [[1.0, 2.0], [3.0]]


def test_nan_is_no_episode() -> None:
    with pytest.raises(SourceError, match="column 'episode', is NaN"):
        read_rows(pa.table({"episode": [0.0, float("nan")], "x": [1.0, 2.0]}))


def test_the_first_episodes_have_room_for_more_text_than_the_others(tmp_path: Path) -> None:
    pq.write_table(pa.table({"episode": [0, 1, 2], "s": ["y" * 99_999, "", ""]}), tmp_path / "a.parquet")
    with gear.load_dataset(tmp_path / "a.parquet", max_trajectories=1, progress=False) as table:
        assert len(table[0]["s"][0]) == 99_999
