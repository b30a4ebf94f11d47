"""`gear_loader.load_dataset`: files, kinds of names, and new kinds."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import h5py
import numpy as np
import pytest

import gear_loader as gear
from gear_loader.errors import SourceError
from gear_loader.sources import named


@pytest.fixture(autouse=True)
def openers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named, "_OPENERS", dict(named._OPENERS))


def test_a_file(tmp_path: Path) -> None:
    path = tmp_path / "odd:name.hdf5"
    with h5py.File(path, "w") as file:
        for name, shape in (("observations", (6, 2)), ("actions", (6, 1)), ("rewards", (6,))):
            file[name] = np.ones(shape, np.float32)
        file["terminals"], file["timeouts"] = np.arange(6) == 3, np.zeros(6, bool)
    for given in (path, str(path)):
        with gear.load_dataset(given, progress=False) as table:
            assert table.lengths().tolist() == [4, 2]
            assert table.sample(5)["observation"].shape == (5, 2)


def test_a_new_kind() -> None:
    asked = []

    def opener(name: str) -> Any:
        asked.append(name)
        return [{"reward": np.ones(3)}, {"reward": np.ones(2)}]

    gear.sources.register("mine", opener)
    with gear.load_dataset("mine:a:b", progress=False, block_steps=2) as table:
        assert table.lengths().tolist() == [3, 2]
    assert asked == ["a:b"]
    with pytest.raises(SourceError, match="'mine' is known already"):
        gear.sources.register("mine", opener)
    for kind, function in (("Mine", opener), ("m", opener), (3, opener), ("other", None)):
        with pytest.raises(SourceError, match="expected a name such as 'mine', and a function"):
            gear.sources.register(kind, function)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("hub:door", r"The prefix of 'hub:door' is not known; expected one of \['minari:'\], or the path"),
        ([{"reward": np.ones(3)}], "expected a name such as"),
        ("nothing.hdf5", "nothing.hdf5' does not exist"),
    ],
)
def test_names_that_are_no_source(source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        gear.load_dataset(source)
