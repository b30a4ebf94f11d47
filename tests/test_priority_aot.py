"""The kernels of the sum tree compiled ahead of time for GPUs that need not be here."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # half a minute of compiling, once for all tests

ARCHITECTURES = (80, 90, 100)
UPDATES = ("update", "update_alpha", "update_unset", "update_unset_alpha")
KERNELS = ("draw", "distinct", *UPDATES)

Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Report]:
    """Kernel and architecture -> what tests/aot.py printed for it."""
    lines = compiled("priority", tmp_path_factory.mktemp("triton"))
    return {(line["kernel"].removeprefix("priority_"), line["arch"]): line for line in lines}


def compiled(kernels: str, cache: Path) -> list[Report]:
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(cache)
    program = Path(__file__).with_name("aot.py")
    run = subprocess.run(
        [sys.executable, str(program), kernels],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    shutil.rmtree(cache)
    return [json.loads(line) for line in run.stdout.splitlines()]


@pytest.fixture(
    params=[(kernel, arch) for kernel in KERNELS for arch in ARCHITECTURES],
    ids=lambda p: f"{p[0]}-sm_{p[1]}",
)
def variant(request: pytest.FixtureRequest, reports: dict[tuple[str, int], Report]) -> tuple[str, Report]:
    """A kernel's name, and what became of it on one architecture."""
    return request.param[0], reports[request.param]


def test_every_variant_was_compiled(reports: dict[tuple[str, int], Report]) -> None:
    assert sorted(reports) == sorted((kernel, arch) for kernel in KERNELS for arch in ARCHITECTURES)


def test_no_spills(variant: tuple[str, Report]) -> None:
    _, report = variant
    assert report["spills"] == 0
    assert [name for name in report["instructions"] if name.startswith(("LDL", "STL"))] == []


def test_no_multiplication_is_fused_with_an_addition(variant: tuple[str, Report]) -> None:
    # A fused one rounds once instead of twice: sums and draws would not be those of the other implementations. The
    # power of `alpha` is made of them, in the library that comes with the compiler.
    name, report = variant
    if name.endswith("alpha"):
        assert min(report["fused"]) > 0, "the count counts nothing"
    else:
        assert report["fused"] == [0, 0]


def test_phases_are_kept_apart_by_barriers(variant: tuple[str, Report]) -> None:
    name, report = variant
    assert report["barriers"] >= {"draw": 0, "distinct": 6}.get(name, 1)
    if name == "draw":  # one warp, to which a draw needs nothing from the others
        assert report["barriers"] == 0
        assert report["shared"] == 0


def test_no_value_makes_the_launcher_compile_anew(variant: tuple[str, Report]) -> None:
    # Pointers are compiled for once more at most, if they are not aligned; numbers change from call to call.
    _, report = variant
    assert [name for name in report["specialised"] if not name.startswith("p_")] == []


def test_every_access_is_known_to_be_global(variant: tuple[str, Report]) -> None:
    _, report = variant
    # Spills, LDL and STL, are another test's.
    names = {name for name in report["instructions"] if not name.startswith(("LDL", "STL"))}
    assert all(name.startswith(("LDG.", "STG.")) for name in names), names


def test_a_draw_loads_children_side_by_side(reports: dict[tuple[str, int], Report]) -> None:
    for arch in ARCHITECTURES:
        assert reports["draw", arch]["instructions"].get("LDG.E.128", 0) >= 2


def test_the_kernels_between_items_and_rows(tmp_path: Path) -> None:
    lines = compiled("items", tmp_path)
    assert len(lines) == 8 * len(ARCHITECTURES)
    for line in lines:
        assert line["spills"] == 0, line
        assert [name for name in line["specialised"] if not name.startswith("p_")] == []
        if "resolve" in line["kernel"]:
            assert line["fused"] == [0, 0]
