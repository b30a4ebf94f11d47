"""Data sets of many files, of which any byte may be another, or the end be missing: values or a `SourceError`."""

from __future__ import annotations

import random
import shutil
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import gear_loader as gear
from gear_loader.errors import SourceError

pytestmark = pytest.mark.long
ROBOTS = Path(__file__).parents[1] / "data" / "robots"


def write_hf(root: Path) -> str:
    datasets = pytest.importorskip("datasets")
    rows = {
        "episode": [0, 0, 0, 1, 1],
        "obs": np.arange(10.0).reshape(5, 2).tolist(),
        "task": ["push", "push", "push", "öffne", "öffne"],
        "tokens": [[1], [], [2, 3], [4, 5, 6], [7]],
    }
    datasets.DatasetDict({"train": datasets.Dataset.from_dict(rows)}).save_to_disk(root)
    return f"hf:{root}"


def write_robomimic(root: Path) -> str:
    root.mkdir()
    with h5py.File(root / "lift.hdf5", "w") as file:
        for number in range(3):
            for key, shape in (("actions", (7,)), ("obs/eef", (3,)), ("obs/image", (4, 6, 3))):
                values = np.full((4 + number, *shape), number, np.uint8 if "image" in key else np.float64)
                file.create_dataset(f"data/demo_{number}/{key}", data=values, compression="gzip")
        file["mask/train"] = np.array([b"demo_2", b"demo_0"])
    return f"robomimic:{root}/lift.hdf5"


def write_lerobot(root: Path) -> str:
    pytest.importorskip("pyarrow"), pytest.importorskip("av")
    shutil.copytree(ROBOTS / "lerobot", root)
    return f"lerobot:{root}"


def write_lerobot21(root: Path) -> str:
    pytest.importorskip("pyarrow"), pytest.importorskip("av")
    shutil.copytree(ROBOTS / "lerobot21", root)
    return f"lerobot:{root}"


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("write", [write_hf, write_robomimic, write_lerobot, write_lerobot21])
@pytest.mark.parametrize("turns", [40, pytest.param(150, marks=pytest.mark.exhaustive)])
def test_a_file_of_a_data_set_is_damaged(write: Any, tmp_path: Path, turns: int) -> None:
    source = random.Random(7)
    address = write(tmp_path / "data")
    options: dict[str, Any] = {"progress": False, "allow_nonfinite": True}
    if address.startswith("robomimic"):
        options["split"] = "train"
    gear.load_dataset(address, **options).close()
    files = sorted(path for path in (tmp_path / "data").rglob("*") if path.is_file())
    read = refused = 0
    for turn in range(turns):
        path = files[turn % len(files)]
        whole = path.read_bytes()
        damaged = bytearray(whole)
        if turn % 3 == 2:
            del damaged[source.randrange(len(whole)) :]
        for _ in range(source.randrange(1, 4) if damaged else 0):
            damaged[source.randrange(len(damaged))] = source.choice(
                [0, 1, 127, 128, 255, source.randrange(256)]
            )
        path.write_bytes(damaged)
        try:
            with gear.load_dataset(address, **options) as table:
                read += 1
                table.check_valid()
        except SourceError:
            refused += 1
        path.write_bytes(whole)
    assert read > 0
    assert refused > turns // 4
