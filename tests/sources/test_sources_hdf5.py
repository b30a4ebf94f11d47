"""`gear_loader.sources.read_hdf5`: D4RL-style files, whole and damaged."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sources_common import D4RL_NAMES, LENGTHS, cut, flat_arrays, read_in_parts, same, same_episodes, write

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import hdf5, read_hdf5

LAYOUTS: dict[str, dict[str, Any]] = {
    "contiguous": {},
    "chunked": {"chunks": True},
    "compressed": {"compression": "gzip", "shuffle": True, "fletcher32": True},
}


@pytest.mark.parametrize(
    ("layout", "read_bytes"), [("contiguous", 700), ("chunked", 2**26), ("compressed", 1)]
)
def test_every_step(tmp_path: Path, layout: str, read_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(hdf5, "READ_BYTES", read_bytes)  # one trajectory, a few, all at a time
    arrays = flat_arrays()
    reader = read_hdf5(write(tmp_path / "data.hdf5", arrays, **LAYOUTS[layout]))
    assert len(reader) == len(LENGTHS)
    assert reader.lengths.tolist() == list(LENGTHS)
    assert reader.num_steps == sum(LENGTHS)
    assert reader.schema == {
        "observation": gear.Column(torch.float32, (5,)),
        "action": gear.Column(torch.float32, (2,)),
        "reward": gear.Column(torch.float32),
        "terminated": gear.Column(torch.bool),
        "truncated": gear.Column(torch.bool),
    }
    for _ in range(2):  # again and again
        same_episodes(reader, cut(arrays, LENGTHS))


@given(data=st.data())
def test_splitting_against_a_plain_twin(data: st.DataObject) -> None:
    flags = data.draw(st.lists(st.booleans(), min_size=1, max_size=60))
    longest = data.draw(st.none() | st.integers(1, 9))
    keep = data.draw(st.booleans())
    ends, was_cut = hdf5._split(np.flatnonzero(flags).astype(np.int64), len(flags), longest, keep)

    expected = []
    steps = 0
    for step, flag in enumerate(flags):
        steps += 1
        if flag or steps == longest:
            expected.append((step + 1, not flag))
            steps = 0
    if steps and keep:
        expected.append((len(flags), True))
    assert list(zip(ends.tolist(), was_cut.tolist(), strict=True)) == expected


@pytest.mark.parametrize("rest", [1, 9])
def test_steps_after_the_last_flag(tmp_path: Path, rest: int) -> None:
    arrays = flat_arrays(rest=rest)
    path = write(tmp_path / "data.hdf5", arrays)
    finished = cut(arrays, LENGTHS)
    same_episodes(read_hdf5(path, unfinished="drop"), finished)
    read_in_parts(read_hdf5(path))
    *kept, last = read_hdf5(path)
    same_episodes(kept, finished)
    same(last["observation"], arrays["observations"][-rest:])
    assert last["truncated"].tolist() == [False] * (rest - 1) + [True]
    assert not last["terminated"].any()


def test_a_file_without_timeouts(tmp_path: Path) -> None:
    arrays = flat_arrays([4, 30], rest=25)
    del arrays["timeouts"]
    arrays["terminals"][:] = False
    arrays["terminals"][33] = True  # 34 and 25 steps
    path = write(tmp_path / "data.hdf5", arrays)
    with pytest.raises(
        SourceError, match=r"has no 'timeouts', .* pass timeouts=None if it has none by design"
    ):
        read_hdf5(path)
    whole = read_hdf5(path, timeouts=None)
    assert whole.lengths.tolist() == [34, 25]
    assert [bool(episode["truncated"][-1]) for episode in whole] == [False, True]
    pieces = read_hdf5(path, timeouts=None, max_episode_steps=10)
    assert pieces.lengths.tolist() == [10, 10, 10, 4, 10, 10, 5]
    ends = [(bool(episode["terminated"][-1]), bool(episode["truncated"][-1])) for episode in pieces]
    assert ends == [(False, True)] * 3 + [(True, False)] + [(False, True)] * 3
    same(np.concatenate([episode["reward"] for episode in pieces]), arrays["rewards"])
    dropped = read_hdf5(path, timeouts=None, max_episode_steps=10, unfinished="drop")
    assert dropped.lengths.tolist() == [10, 10, 10, 4, 10, 10]
    assert list(next(iter(read_hdf5(path, timeouts=None, columns=["reward"])))) == ["reward"]


def test_extra_columns_and_names(tmp_path: Path) -> None:
    arrays = flat_arrays()
    steps = len(arrays["rewards"])
    arrays |= {
        "next_observations": arrays["observations"] + 1,
        "infos/qpos": np.arange(steps * 3.0).reshape(steps, 3),
        "infos/goal/xy": np.arange(steps * 2, dtype=np.int16).reshape(steps, 2),
        "skill": np.arange(steps, dtype=np.uint16),
        "metadata/policy/weight": np.zeros((4, 4)),
        "metadata/algorithm": np.bytes_("SAC"),
    }
    path = write(tmp_path / "data.h5", arrays)
    assert list(read_hdf5(path).schema) == list(D4RL_NAMES)
    columns = {
        "q": "infos/qpos",
        "next": "next_observation",
        "info": "info.goal",
        "s": "skill",
        "r": "rewards",
    }
    reader = read_hdf5(path, columns=columns, keep_float64=True)
    assert reader.schema == {
        "q": gear.Column(torch.float64, (3,)),
        "next": gear.Column(torch.float32, (5,)),
        "info.xy": gear.Column(torch.int16, (2,)),
        "s": gear.Column(torch.int32),
        "r": gear.Column(torch.float32),
    }
    together = {name: np.concatenate([episode[name] for episode in reader]) for name in reader.schema}
    same(together["q"], arrays["infos/qpos"])
    same(together["next"], arrays["next_observations"])
    same(together["info.xy"], arrays["infos/goal/xy"])
    same(together["s"], arrays["skill"].astype(np.int32))
    same(together["r"], arrays["rewards"])
    with pytest.raises(SourceError, match=r"no column 'info.qvel'; it has .*Did you mean 'info.qpos'"):
        read_hdf5(path, columns=["info.qvel"])
    with pytest.raises(SourceError, match="'metadata/policy/weight': 4"):
        read_hdf5(path, columns=["metadata.policy.weight"])


def test_observations_in_a_group_and_flags_of_other_names(tmp_path: Path) -> None:
    arrays = flat_arrays()
    arrays["observations/image"], arrays["ends/done"] = arrays.pop("observations"), arrays.pop("terminals")
    arrays["ends/late"] = arrays.pop("timeouts")
    reader = read_hdf5(write(tmp_path / "data.hdf5", arrays), terminals="ends/done", timeouts="ends/late")
    assert list(reader.schema) == ["observation.image", "action", "reward", "terminated", "truncated"]
    assert reader.lengths.tolist() == list(LENGTHS)


def test_arrays_that_happen_to_have_a_standard_name(tmp_path: Path) -> None:
    arrays = flat_arrays()
    noise = np.ones(len(arrays["rewards"]), bool)
    path = write(tmp_path / "data.hdf5", arrays | {"terminated": noise, "truncated": noise, "action": noise})
    same_episodes(read_hdf5(path), cut(arrays, LENGTHS))
    del arrays["timeouts"]
    path = write(tmp_path / "data.hdf5", arrays | {"truncated": noise})
    assert len(read_hdf5(path, timeouts=None)) == int(arrays["terminals"].sum()) + 1  # it splits nothing


def test_scalars_of_shape_n_1_other_dtypes_and_byte_orders(tmp_path: Path) -> None:
    arrays = flat_arrays()
    stored = {
        "observations": arrays["observations"].astype(">f8"),
        "actions": np.arange(len(arrays["rewards"]), dtype=">i4"),
        "rewards": arrays["rewards"].astype(">f4")[:, None],
        "terminals": arrays["terminals"].astype(np.float32)[:, None],
        "timeouts": arrays["timeouts"].astype(np.uint8),
    }
    reader = read_hdf5(write(tmp_path / "data.hdf5", stored))
    expected = cut(arrays | {"actions": np.arange(len(arrays["rewards"]), dtype=np.int32)}, LENGTHS)
    same_episodes(reader, expected)
    assert reader.schema["action"] == gear.Column(torch.int32)


def test_floats_that_float32_cannot_hold(tmp_path: Path) -> None:
    arrays = flat_arrays()
    arrays["observations"] = arrays["observations"].astype(np.float64)
    arrays["observations"][12, 3] = -1e200
    path = write(tmp_path / "data.hdf5", arrays)
    message = (
        r"trajectory 3, step 1 \(step 12 of the file\): column 'observations' holds -1e\+200, which float32"
    )
    with pytest.raises(SourceError, match=message):
        list(read_hdf5(path))
    assert next(itertools.islice(read_hdf5(path, keep_float64=True), 3, None))["observation"][1, 3] == -1e200


def test_rewards_that_are_not_finite(tmp_path: Path) -> None:
    arrays = flat_arrays()
    arrays["rewards"][80] = np.nan
    path = write(tmp_path / "data.hdf5", arrays)
    message = (
        r"trajectory 4, step 5 \(step 80 of the file\): column 'rewards' holds nan, .*allow_nonfinite=True"
    )
    with pytest.raises(SourceError, match=message):
        list(read_hdf5(path))
    same_episodes(read_hdf5(path, allow_nonfinite=True), cut(arrays, LENGTHS))
    list(read_hdf5(path, columns=["observation"]))  # not read, not refused


EMPTY = {name: array[:0] for name, array in flat_arrays().items()}
REWARDS = flat_arrays()["rewards"]
FLAG = flat_arrays()["timeouts"].astype(np.uint8)
FLAG[33] = 7
# fmt: off
BAD: list[tuple[dict[str, Any], dict[str, Any], str]] = [  # changes of the arrays, options, message
    ({"timeouts": FLAG}, {}, "step 33: column 'timeouts' holds 7, which is not a flag"),
    *(({name: None}, {}, rf"has no column '{column}'")
      for name, column in (("observations", "observation"), ("actions", "action"), ("rewards", "reward"))),
    *(({name: None}, {}, rf"has no '{name}'") for name in ("terminals", "timeouts")),
    (EMPTY, {}, "holds zero steps"),
    (dict.fromkeys(EMPTY), {}, "it has nothing"),
    ({"actions": np.zeros(142, np.complex64)}, {}, "column 'actions' has dtype complex64; expected one of bool"),
    ({"actions": np.zeros((142, 0), np.float32)}, {}, r"column 'actions' cannot become a column.*\(0,\)"),
    ({"terminals": np.zeros((142, 2), bool), "rewards": REWARDS[:9]}, {},
     r"'terminals' has shape \[142, 2\]; expected one flag a step"),
    ({}, {"unfinished": "maybe"}, "unfinished='maybe'; expected 'keep' or 'drop'"),
    ({}, {"max_episode_steps": 0}, "max_episode_steps is 0; expected an integer"),
    ({}, {"columns": []}, "columns= is empty"),
    ({}, {"terminals": "dones"}, r"has no 'dones'.*it has 'actions', 'observations'"),
]
# fmt: on


def test_files_and_options_that_are_refused(tmp_path: Path) -> None:
    for number, (changes, options, message) in enumerate(BAD):
        arrays = {name: array for name, array in {**flat_arrays(), **changes}.items() if array is not None}
        with pytest.raises(SourceError, match=message):
            read_hdf5(write(tmp_path / f"{number}.hdf5", arrays), **options)
    with pytest.raises(SourceError, match=r"nowhere.hdf5' does not exist"):
        read_hdf5(tmp_path / "nowhere.hdf5")
    with pytest.raises(SourceError, match=r"does not exist or is not a file"):
        read_hdf5(tmp_path)
    text = tmp_path / "text.hdf5"
    text.write_text("observations,actions\n")
    with pytest.raises(SourceError, match=r"text.hdf5' \(21 bytes\) cannot be opened as HDF5"):
        read_hdf5(text)


@pytest.mark.parametrize("short", ["observations", "timeouts"])
def test_a_column_shorter_than_the_others(tmp_path: Path, short: str) -> None:
    arrays = flat_arrays()
    arrays[short] = arrays[short][:80]
    message = rf"uneven lengths: .*'{short}': 80.*expected|Expected 142"
    with pytest.raises(SourceError, match=message) as caught:
        read_hdf5(write(tmp_path / "data.hdf5", arrays))
    assert f"too short: ['{short}']" in str(caught.value)
    if short != "timeouts":  # with short flags the trajectories are not known
        assert "lacks steps is 4 (steps 75 to 139, missing from its step 5 on)" in str(caught.value)


def test_a_file_without_an_end_of_a_trajectory(tmp_path: Path) -> None:
    endless = flat_arrays([10])
    endless["terminals"][:] = endless["timeouts"][:] = False
    path = write(tmp_path / "endless.hdf5", endless)
    with pytest.raises(SourceError, match=r"no trajectories\. Pass unfinished='keep'"):
        read_hdf5(path, unfinished="drop")
    assert read_hdf5(path).lengths.tolist() == [10]


def test_a_file_that_was_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "data.hdf5"
    whole = Path(write(path, flat_arrays(), **LAYOUTS["compressed"])).read_bytes()
    for size in (0, 1, 7, 96, 512, len(whole) // 2, len(whole) - 1):
        path.write_bytes(whole[:size])
        with pytest.raises(SourceError, match=rf"data.hdf5' \({size} bytes\) cannot be opened as HDF5"):
            list(read_hdf5(path))


def stored_at(path: str, name: str, row: int) -> tuple[int, int]:
    """Offset and size in the file of the chunk that holds a row of an array."""
    with h5py.File(path, "r") as file:
        dataset = file[name]
        chunk = next(
            info
            for info in (dataset.id.get_chunk_info(i) for i in range(dataset.id.get_num_chunks()))
            if info.chunk_offset[0] <= row < info.chunk_offset[0] + dataset.chunks[0]
        )
        return chunk.byte_offset, chunk.size


@pytest.mark.parametrize(("array", "number"), [("observations", 0), ("rewards", 3)])
def test_a_flipped_bit_in_compressed_data_names_the_trajectory(
    tmp_path: Path, array: str, number: int
) -> None:
    path = tmp_path / "data.hdf5"
    chunks = {"observations": (5, 5), "rewards": (5,), "actions": (5, 2), "terminals": (5,), "timeouts": (5,)}
    with h5py.File(path, "w") as file:
        for name, values in flat_arrays().items():
            file.create_dataset(name, data=values, chunks=chunks[name], compression="gzip", fletcher32=True)
    ends = np.cumsum(LENGTHS)
    first_row = int(ends[number] - 1)  # the chunk of its last step; what lies before it stays readable
    offset, size = stored_at(str(path), array, first_row)
    data = bytearray(path.read_bytes())
    data[offset + size // 2] ^= 0x10
    path.write_bytes(data)
    damaged_from = first_row // 5 * 5
    first = int(np.searchsorted(ends, damaged_from, side="right"))
    start, stop = int(ends[first] - LENGTHS[first]), int(ends[first]) - 1
    reader = read_hdf5(path)
    message = rf"trajectory {first}: column '{array}' cannot be read at steps {start} to {stop}: OSError"
    with pytest.raises(SourceError, match=message):
        list(reader)


def test_damaged_flags_are_reported_when_the_file_is_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", flat_arrays(), compression="gzip", fletcher32=True)
    offset, size = stored_at(path, "terminals", 0)
    data = bytearray(Path(path).read_bytes())
    data[offset + size // 2] ^= 1
    Path(path).write_bytes(data)
    with pytest.raises(SourceError, match=r"'terminals' cannot be read at steps 0 to 141, .*OSError"):
        read_hdf5(path)


def test_a_file_that_changed_since_it_was_opened(tmp_path: Path) -> None:
    path = write(tmp_path / "data.hdf5", flat_arrays())
    reader = read_hdf5(path)
    write(path, flat_arrays([50]))
    with pytest.raises(
        SourceError, match=r"trajectory 0: .* it now is float32 \[50, 5\], but was float32 \[142, 5\]"
    ):
        list(reader)
    os.unlink(path)
    with pytest.raises(SourceError, match="does not exist"):
        list(reader)


FUZZ = """
import sys
import numpy as np
from pathlib import Path
from gear_loader.errors import SourceError
from gear_loader.sources import read_hdf5
path = Path(sys.argv[1])
whole = path.read_bytes()
rng = np.random.default_rng(0)
refused = 0
for position in rng.integers(0, len(whole), 150):
    data = bytearray(whole)
    data[position] ^= int(rng.integers(1, 256))
    path.write_bytes(data)
    try:
        for episode in read_hdf5(path, allow_nonfinite=True):
            assert len({len(values) for values in episode.values()}) == 1
    except SourceError:
        refused += 1
print(refused)
"""


@pytest.mark.long
@pytest.mark.parametrize("layout", LAYOUTS)
def test_a_byte_that_is_changed_anywhere_gives_a_source_error_or_none(tmp_path: Path, layout: str) -> None:
    """In a process of its own, so that a crash of the HDF5 library is seen as one."""
    path = write(tmp_path / "data.hdf5", flat_arrays(), **LAYOUTS[layout])
    result = subprocess.run([sys.executable, "-c", FUZZ, path], capture_output=True, text=True, timeout=240)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 0


@pytest.mark.long
@settings(max_examples=20, deadline=None)
@given(data=st.data())
def test_what_h5py_reads_is_what_the_table_holds(
    tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    path = tmp_path_factory.mktemp("any") / "data.hdf5"
    rows = data.draw(st.integers(1, 40))
    flags = np.array(data.draw(st.lists(st.booleans(), min_size=rows, max_size=rows)))
    kinds = st.sampled_from(
        ["bool", "u1", "i1", "<i2", ">i4", "i8", "<u2", ">u4", "f2", ">f4", "f8", "str", "bytes", "vlen"]
    )
    layouts = st.sampled_from([{}, {"chunks": True}, {"compression": "gzip"}])
    made = np.random.default_rng(data.draw(st.integers(0, 99)))
    with h5py.File(path, "w") as file:
        file["terminals"], file["timeouts"] = flags, np.zeros(rows, bool)
        for number in range(data.draw(st.integers(1, 4))):
            name = data.draw(st.sampled_from(["c", "infos/c", "deep/er/c"])) + str(number)
            kind, layout = data.draw(kinds), data.draw(layouts)
            if kind == "vlen":
                item = np.dtype(data.draw(st.sampled_from(["u1", "i8", ">f4", "f8"])))
                column = file.create_dataset(name, (rows,), h5py.vlen_dtype(item), **layout)
                for row in range(rows):
                    column[row] = made.integers(0, 99, made.integers(0, 4)).astype(item)
            elif kind in ("str", "bytes"):
                words = [b"", b"a", b"bc" * 9, "ö".encode()] if kind == "str" else [b"", b"a", b"x y"]
                dtype = h5py.string_dtype("utf-8" if kind == "str" else "ascii", made.choice([None, 20]))
                file.create_dataset(
                    name, data=[words[i] for i in made.integers(0, len(words), rows)], dtype=dtype, **layout
                )
            else:
                shape = (rows, *data.draw(st.lists(st.integers(1, 3), max_size=2)))
                values = made.integers(0, 2 if kind == "bool" else 100, shape).astype(kind)
                file.create_dataset(name, data=values, **layout)
    with h5py.File(path) as file:
        names: list[str] = []
        file.visititems(lambda name, item: names.append(name) if isinstance(item, h5py.Dataset) else None)
        wanted = {name: file[name][()] for name in names if name not in ("terminals", "timeouts")}
        texts = {name: h5py.check_string_dtype(file[name].dtype) for name in wanted}
    ends = [*np.flatnonzero(flags) + 1]
    ends += [rows] if not ends or ends[-1] != rows else []
    columns = {name.replace("/", "."): name for name in wanted}
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(hdf5, "READ_BYTES", data.draw(st.sampled_from([1, 100, 2**20])))
        table = gear.load_dataset(path, columns=columns, keep_float64=True, progress=False)
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False)):
        for column, name in columns.items():
            found, expected = table[number][column], wanted[name][start:end]
            if texts[name] is not None:
                whole = expected.tolist()
                assert found == (
                    [each.decode() for each in whole] if texts[name].encoding == "utf-8" else whole
                )
            elif isinstance(found, gear.Ragged):
                assert [each.tolist() for each in found.tolist()] == [each.tolist() for each in expected]
            else:
                assert found.tolist() == expected.tolist()
