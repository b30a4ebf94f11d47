"""The gather kernel compiled ahead of time for GPUs that need not be here: what the machine code must be like."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
import aot_common

# Seconds of compiling, once for all tests; the first run fetches a Triton.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

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


@pytest.fixture(params=aot_common.TARGETS)
def reports(request: pytest.FixtureRequest) -> dict[str, Report]:
    """Variant -> what became of it with one version of Triton on one architecture."""
    return aot_common.reports("gather", request.param)


@pytest.fixture(params=VARIANTS)
def variant(request: pytest.FixtureRequest, reports: dict[str, Report]) -> tuple[int, Report]:
    """Word size, and what became of that variant."""
    return int(request.param.removesuffix("_rows")), reports[request.param]


def instructions(report: Report, *prefixes: str) -> dict[str, int]:
    return {name: count for name, count in report["instructions"].items() if name.startswith(prefixes)}


def test_every_variant_was_compiled(reports: dict[str, Report]) -> None:
    assert sorted(reports) == sorted(VARIANTS)


def test_rows_that_are_not_chosen_cost_nothing(reports: dict[str, Report]) -> None:
    # No look-up of rows: fewer loads of eight bytes than where there is one.
    for word in (16, 4, 1):
        plain, chosen = (reports[name]["instructions"]["LDG.E.64"] for name in (f"{word}", f"{word}_rows"))
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
    run = aot_common.run([], TRITON_INTERPRET="1")
    assert run.returncode == 1
    assert "TRITON_INTERPRET is set" in run.stderr
