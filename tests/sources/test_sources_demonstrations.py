"""Demonstrations in arrays: files of robomimic's layout, and zarr groups of episodes one after another."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest
import torch
from cases import amounts
from hypothesis import given, settings
from hypothesis import strategies as st
from sources_common import read_in_parts

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import read_robomimic, read_zarr, replay_zarr

DEMOS = {"demo_0": 4, "demo_10": 3, "demo_2": 6}


def write_robomimic(path: Path, **options: Any) -> dict[str, dict[str, np.ndarray[Any, Any]]]:
    """A file as robomimic's own tools write it; the arrays of each demonstration."""
    source, written = np.random.default_rng(0), dict[str, dict[str, np.ndarray[Any, Any]]]()
    with h5py.File(path, "w") as file:
        for name, steps in DEMOS.items():
            seen = source.normal(size=(steps + 1, 3))
            arrays = {
                "actions": source.normal(size=(steps, 7)),
                "rewards": source.normal(size=steps),
                "dones": np.eye(1, steps, steps - 1, dtype=np.int64)[0],
                "states": source.normal(size=(steps, 2, 2)),
                "obs/pose/eef": seen[:-1],
                "next_obs/pose/eef": seen[1:],
                "obs/image": source.integers(0, 256, (steps, 4, 6, 3), dtype=np.uint8),
            }
            for key, values in arrays.items():
                file.create_dataset(
                    f"data/{name}/{key}", data=values, maxshape=(None, *values.shape[1:]), **options
                )
            file[f"data/{name}"].attrs["num_samples"] = steps
            written[name] = arrays
        file["mask/train"] = np.array([b"demo_10", b"demo_0"])
        file["mask/valid"] = np.array([b"demo_2"])
    return written


def test_robomimic_is_what_h5py_reads(tmp_path: Path) -> None:
    """In the order of the numbers; splits, nested observations, final values."""
    path = tmp_path / "lift.hdf5"
    written = write_robomimic(path, compression="gzip")
    names = {"action": "actions", "reward": "rewards", "done": "dones", "observation.image": "obs/image"}
    names["observation.pose.eef"] = "obs/pose/eef"
    for split, demos in ((None, ["demo_0", "demo_2", "demo_10"]), ("train", ["demo_0", "demo_10"])):
        options = {"split": split, "keep_float64": True, "final": True, "progress": False}
        with gear.load_dataset(f"robomimic:{path}", **options) as table:
            assert set(table.schema) == set(names)
            for number, demo in enumerate(demos):
                for name, key in names.items():
                    np.testing.assert_array_equal(table[number][name].numpy(), written[demo][key])
                last = table.final(number)["observation.pose.eef"].numpy()
                np.testing.assert_array_equal(last, written[demo]["next_obs/pose/eef"][-1])
    read_in_parts(read_robomimic(path))
    reader = read_robomimic(path, split="valid", columns={"s": "states", "pose": "obs/pose/eef"})
    assert reader.demos == ["demo_2"]
    (episode,) = reader
    np.testing.assert_array_equal(episode["s"], written["demo_2"]["states"].astype(np.float32))


def test_what_robomimic_refuses(tmp_path: Path) -> None:
    path = tmp_path / "lift.hdf5"
    write_robomimic(path)
    with pytest.raises(SourceError, match=r"has no mask 'test'; it has 'train', 'valid'"):
        read_robomimic(path, split="test")
    with pytest.raises(SourceError, match="has no column 'force'"):
        read_robomimic(path, columns=["force"])
    changes: list[tuple[Any, str]] = [
        (lambda file: file["data/demo_2/actions"].resize(5, 0), "'demo_2' has columns of .* steps"),
        (
            lambda file: file["data/demo_2"].pop("rewards"),
            r"'demo_2' lacks the columns 'reward', which 'demo_0' has",
        ),
        (
            lambda file: file["mask"].create_dataset("odd", data=[b"demo_7"]),
            "names 'demo_7', which are not there",
        ),
        (
            lambda file: file["data/demo_2/rewards"].__setitem__(1, np.nan),
            r"'demo_2', step 1: .* holds nan",
        ),
        (lambda file: file.pop("data"), "has no group 'data'"),
    ]
    for change, match in changes:
        write_robomimic(path)
        with h5py.File(path, "a") as file:
            change(file)
        with pytest.raises(SourceError, match=match):
            list(read_robomimic(path, split="odd" if "demo_7" in match else None))


@pytest.mark.parametrize("cut", [0.0, 0.3, 0.6, 0.99])
def test_cut_files_of_robomimic(tmp_path: Path, cut: float) -> None:
    path = tmp_path / "lift.hdf5"
    write_robomimic(path)
    data = path.read_bytes()
    path.write_bytes(data[: int(cut * len(data))])
    with gear.Table.create(
        {"action": gear.Column(torch.float32, (7,))}, max_steps=9, max_trajectories=3
    ) as table:
        with pytest.raises(SourceError, match="cannot be opened as HDF5"):
            gear.load_dataset(f"robomimic:{path}", table, progress=False)
        assert len(table) == 0


# ---------------------------------------------------------------- zarr


DTYPES = [
    "uint8",
    "int8",
    "int16",
    "uint16",
    "int32",
    "uint32",
    "int64",
    "float32",
    "float64",
    "float16",
    "bool",
]
DTYPES += [">f4", ">i2"]


@st.composite
def groups(draw: st.DrawFn) -> tuple[int, list[int], dict[str, tuple[Any, int, bool]]]:
    """A format, lengths of episodes, and arrays with rows in a chunk, and whether they are compressed."""
    lengths = draw(st.lists(st.integers(1, 9), min_size=1, max_size=6))
    arrays = {}
    for i in range(draw(st.integers(1, 4))):
        name = draw(st.sampled_from([f"key{i}", f"robot{i}/pose", f"a{i}/b/c", f"key.{i}"]))
        shape = draw(st.lists(st.integers(1, 4), max_size=3))
        dtype = draw(st.sampled_from(DTYPES))
        source = np.random.default_rng(draw(st.integers(0, 2**32)))
        count = (sum(lengths), *shape)
        kind = np.dtype(dtype)
        if kind.kind == "b":
            values = source.random(count) < 0.5
        elif kind.kind == "f":
            values = source.normal(size=count)
        else:
            limits = np.iinfo(kind)
            values = source.integers(limits.min, limits.max, count, endpoint=True)
        arrays[name] = (np.asarray(values).astype(kind), draw(st.integers(1, 12)), draw(st.booleans()))
    return draw(st.sampled_from([2, 3])), lengths, arrays


def write_zarr(path: Path, form: int, lengths: list[int], arrays: Any) -> None:
    zarr = pytest.importorskip("zarr")
    group = zarr.open_group(str(path), mode="w", zarr_format=form)
    for name, (values, rows, packed) in arrays.items():
        chunks = (rows, *values.shape[1:])
        options = {} if packed else {"compressors": None}
        group.create_array(f"data/{name}", data=values, chunks=chunks, **options)
    group.create_array("meta/episode_ends", data=np.cumsum(lengths, dtype=np.int64))


@pytest.mark.parametrize("count", amounts(3, 15, 60))
def test_zarr_is_what_was_written(tmp_path: Path, count: int) -> None:
    pytest.importorskip("zarr")

    @settings(max_examples=count, deadline=None)
    @given(groups(), st.integers(1, 400), st.booleans())
    def check(made: Any, read_bytes: int, zipped: bool) -> None:
        check_zarr(tmp_path, made, read_bytes, zipped=zipped)

    check()


def check_zarr(tmp_path: Path, made: Any, read_bytes: int, *, zipped: bool) -> None:
    """Of random arrays, chunks and formats; read in pieces of any size, from a directory or a zip file."""
    form, lengths, arrays = made
    path = tmp_path / "group.zarr"
    shutil.rmtree(path, ignore_errors=True)
    write_zarr(path, form, lengths, arrays)
    address = f"zarr:{path}"
    if zipped:
        address = f"zarr:{shutil.make_archive(str(path), 'zip', path)}"
    ends = np.cumsum(lengths)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(replay_zarr, "READ_BYTES", read_bytes)
        read_in_parts(read_zarr(address.removeprefix("zarr:")))
        with gear.load_dataset(address, keep_float64=True, progress=False) as table:
            assert sorted(table.schema) == sorted(name.replace("/", ".") for name in arrays)
            for name, (values, _, _) in arrays.items():
                for number, (start, stop) in enumerate(zip([0, *ends[:-1]], ends, strict=True)):
                    found = table[number][name.replace("/", ".")].numpy()
                    np.testing.assert_array_equal(found, values[start:stop])


ACTIONS = {"action": (np.arange(20.0).reshape(10, 2), 3, True)}


def test_what_zarr_refuses(tmp_path: Path) -> None:
    zarr = pytest.importorskip("zarr")
    path = tmp_path / "group.zarr"
    for lengths, match in (
        ([4, 5], r"has the shape \[10, 2\], and the episodes end at step 9"),
        ([4, 0, 6], "'meta/episode_ends' should ascend from 1 on; entry 1 does not"),
        ([4, 7, -1], "entry 2 does not"),
        ([], "it is empty"),
        ([4, 8], "the episodes end at step 12"),
    ):
        write_zarr(path, 3, lengths, ACTIONS)
        with pytest.raises(SourceError, match=match):
            gear.load_dataset(f"zarr:{path}", progress=False)
    write_zarr(path, 3, [4, 6], ACTIONS)
    with pytest.raises(SourceError, match=r"has no column 'actions'.*Did you mean 'action'"):
        gear.load_dataset(f"zarr:{path}", columns=["actions"], progress=False)
    zarr.open_group(str(path), mode="a")["meta"].create_array("episode_ends", data=np.ones(2), overwrite=True)
    with pytest.raises(SourceError, match="has no list of integers 'meta/episode_ends'"):
        gear.load_dataset(f"zarr:{path}", progress=False)
    with pytest.raises(SourceError, match="cannot be opened as a zarr group"):
        gear.load_dataset(f"zarr:{tmp_path / 'nothing'}", progress=False)


@pytest.mark.parametrize("form", [2, pytest.param(3, marks=pytest.mark.long)])
def test_damaged_groups_of_zarr(tmp_path: Path, form: int) -> None:
    """Any file that is cut or changed: a SourceError with the table as before, or values that can be read."""
    pytest.importorskip("zarr")
    source = random.Random(form)
    path, copy = tmp_path / "group.zarr", tmp_path / "copy.zarr"
    write_zarr(path, form, [4, 6], ACTIONS)
    refused = 0
    with gear.Table.create(
        {"action": gear.Column(torch.float32, (2,))}, max_steps=500, max_trajectories=200
    ) as table:
        files = sorted(each for each in path.rglob("*") if each.is_file())
        for file in files:
            for kind in ("cut", "changed", "empty"):
                shutil.rmtree(copy, ignore_errors=True)
                shutil.copytree(path, copy)
                data = bytearray(file.read_bytes())
                if kind == "changed":
                    data[source.randrange(len(data))] ^= 1 << source.randrange(8)
                end = {"cut": source.randrange(1, len(data)), "changed": len(data), "empty": 0}[kind]
                (copy / file.relative_to(path)).write_bytes(data[:end])
                before = len(table)
                try:
                    gear.load_dataset(f"zarr:{copy}", table, progress=False)
                except SourceError:
                    refused += 1
                    assert len(table) == before
    assert refused > 2 * (len(files) - 1)
