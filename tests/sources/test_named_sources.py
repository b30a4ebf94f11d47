"""`gear_loader.load_dataset`: files, kinds of names, and new kinds."""

from __future__ import annotations

import sys
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
    monkeypatch.setattr(named.registry, "known", dict(named.registry.known))


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
    asked.clear()
    with pytest.raises(
        SourceError, match=r"'mine:' does not know the option 'splitt'; it has 'allow_nonfinite', "
    ):
        gear.load_dataset("mine:x", splitt="train")
    assert not asked
    for kind, function in (("Mine", opener), ("m", opener), (3, opener), ("other", None)):
        with pytest.raises(SourceError, match="expected a name such as 'mine', and a function"):
            gear.sources.register(kind, function)  # type: ignore[arg-type]


def test_options_of_an_opener() -> None:
    asked: list[Any] = []

    def opener(name: str, *, split: str = "train", columns: Any = None, keep_float64: bool = False) -> Any:
        asked.append((name, split, columns, keep_float64))
        return ({"r": np.ones(n)} for n in (3, 2))

    gear.sources.register("mine", opener)
    with gear.load_dataset("mine:x", columns={"r": "reward"}, split="test", progress=False) as table:
        table.clear()
        load = {"split": "test", "keep_float64": True, "progress": False}
        gear.load_dataset("mine:y", table, **load)
        assert table.lengths().tolist() == [3, 2]
    assert asked == [("x", "test", {"r": "reward"}, False), ("y", "test", ["r"], True)]
    gear.sources.register("any", lambda name, **options: [{"r": np.full(2, options["value"])}])
    with gear.load_dataset("any:x", value=7.0, progress=False) as table:
        assert table[0]["r"].tolist() == [7.0, 7.0]


def test_kinds_of_installed_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "gear_odd").mkdir()
    (tmp_path / "gear_odd/__init__.py").write_text(
        "import numpy\nanswer = 42\ndef read(name, *, steps=1):\n"
        "    return [{'reward': numpy.full(steps, len(name), 'f4')}]\n"
    )
    (tmp_path / "gear_odd-1.0.dist-info").mkdir()
    (tmp_path / "gear_odd-1.0.dist-info/METADATA").write_text(
        "Metadata-Version: 2.1\nName: gear-odd\nVersion: 1.0\n"
    )
    (tmp_path / "gear_odd-1.0.dist-info/entry_points.txt").write_text(
        "[gear_loader.sources]\nodd = gear_odd:read\nwrong = gear_odd:answer\nminari = gear_odd:answer\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    assert "gear_odd" not in sys.modules
    with gear.load_dataset("odd:name", steps=3, progress=False) as table:
        assert table[0]["reward"].tolist() == [4.0] * 3
    with pytest.raises(
        SourceError, match="The entry point 'gear_odd:answer' of the kind 'wrong' is 42; expected a f"
    ):
        gear.load_dataset("wrong:x")
    with pytest.raises(SourceError, match=r"'odd:', .*'wrong:'"):
        gear.load_dataset("other:x")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        (
            "hub:door",
            r"The prefix of 'hub:door' is not known; expected one of \['arrow:', .*'minari:'.*\], or the path",
        ),
        ([{"reward": np.ones(3)}], "expected a name such as"),
        ("nothing.hdf5", "nothing.hdf5' does not exist"),
    ],
)
def test_names_that_are_no_source(source: Any, message: str) -> None:
    with pytest.raises(SourceError, match=message):
        gear.load_dataset(source)
