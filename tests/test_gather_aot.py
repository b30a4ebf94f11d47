"""The gather kernel compiled ahead of time for GPUs that need not be here: what the machine code must be like."""

from __future__ import annotations

import itertools
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("triton")
pytestmark = pytest.mark.slow  # seconds of compiling, once for all tests

ARCHITECTURES = (80, 90, 100)
VARIANTS = (
    "16",
    "4",
    "1",
    "16_rows",
    "4_rows",
    "1_rows",
)  # word size; with rows of the batch that are chosen
# Tiles of 32 lines of 32 words, over the threads of 4 warps or of 8.
LINE_LOADS = {16: "LDG.E.EF.128", 4: "LDG.E.EF", 1: "LDG.E.EF"}
LINE_LOADS_A_THREAD = {16: 32 * 32 // 4 // 128, 4: 32 * 32 // 256, 1: 32 * 32 // 256}

Report = dict[str, Any]


@pytest.fixture(scope="module")
def reports(tmp_path_factory: pytest.TempPathFactory) -> dict[tuple[str, int], Report]:
    """Variant and architecture -> what tests/aot.py printed for it."""
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    environment["TRITON_CACHE_DIR"] = str(tmp_path_factory.mktemp("triton"))
    program = Path(__file__).with_name("aot.py")
    run = subprocess.run(
        [sys.executable, str(program), "gather"],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 0, run.stderr
    lines = [json.loads(line) for line in run.stdout.splitlines()]
    shutil.rmtree(environment["TRITON_CACHE_DIR"])
    return {(line["kernel"].removeprefix("gather_"), line["arch"]): line for line in lines}


@pytest.fixture(
    params=[(name, arch) for name in VARIANTS for arch in ARCHITECTURES], ids=lambda p: f"{p[0]}-sm_{p[1]}"
)
def variant(request: pytest.FixtureRequest, reports: dict[tuple[str, int], Report]) -> tuple[int, Report]:
    """Word size, and what became of that variant on one architecture."""
    return int(request.param[0].removesuffix("_rows")), reports[request.param]


def instructions(report: Report, *prefixes: str) -> dict[str, int]:
    return {name: count for name, count in report["instructions"].items() if name.startswith(prefixes)}


def test_every_variant_was_compiled(reports: dict[tuple[str, int], Report]) -> None:
    assert sorted(reports) == sorted((name, arch) for name in VARIANTS for arch in ARCHITECTURES)


def test_rows_that_are_not_chosen_cost_nothing(reports: dict[tuple[str, int], Report]) -> None:
    # No look-up of rows: fewer loads of eight bytes than where there is one.
    for word, arch in itertools.product((16, 4, 1), ARCHITECTURES):
        plain, chosen = (
            reports[name, arch]["instructions"]["LDG.E.64"] for name in (f"{word}", f"{word}_rows")
        )
        assert plain < chosen


def test_no_spills(variant: tuple[int, Report]) -> None:
    _, report = variant
    assert report["spills"] == 0
    assert instructions(report, "LDL", "STL") == {}


def test_registers(variant: tuple[int, Report]) -> None:
    _, report = variant
    assert 16 <= report["registers"] <= 128


def test_every_access_is_known_to_be_global(variant: tuple[int, Report]) -> None:
    _, report = variant
    names = set(report["instructions"])
    assert all(name.startswith(("LDG.", "STG.")) for name in names), names


def test_the_lines_are_loaded_in_the_widest_words(variant: tuple[int, Report]) -> None:
    # The lines of the source, and nothing else, go through the evict-first path: 128 bits at a time where steps
    # are whole 16-byte words, 32 bits elsewhere, and then each load of a warp is a whole line.
    word, report = variant
    assert instructions(report, "LDG.E.EF") == {LINE_LOADS[word]: LINE_LOADS_A_THREAD[word]}
    assert report["side_by_side"] == 128


def test_nothing_is_loaded_by_bytes(variant: tuple[int, Report]) -> None:
    _, report = variant
    narrow = {
        name for name in instructions(report, "LDG") if {"U8", "S8", "U16", "S16"} & set(name.split("."))
    }
    assert narrow == set()


def test_stores(variant: tuple[int, Report]) -> None:
    # Of the words that were loaded: once for steps and once for padding. Masks are bytes.
    word, report = variant
    stores = instructions(report, "STG")
    masks = stores.pop("STG.E.U8")
    if word == 16:
        assert stores == {"STG.E.128": 2 * LINE_LOADS_A_THREAD[16]}
    elif word == 4:
        assert stores == {"STG.E": 2 * LINE_LOADS_A_THREAD[4]}
    else:
        assert stores == {}
        masks -= 2 * 4 * LINE_LOADS_A_THREAD[1]
    assert 1 <= masks <= 4


def test_a_smaller_batch_needs_no_other_code(variant: tuple[int, Report]) -> None:
    _, report = variant
    assert report["specialised"] == []


def test_the_program_says_what_it_needs() -> None:
    environment = {**os.environ, "TRITON_INTERPRET": "1"}
    program = Path(__file__).with_name("aot.py")
    run = subprocess.run(
        [sys.executable, str(program)],
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert run.returncode == 1
    assert "TRITON_INTERPRET is set" in run.stderr
