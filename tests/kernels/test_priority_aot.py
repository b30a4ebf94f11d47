"""The kernels of the sum tree compiled ahead of time for GPUs that need not be here."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")
import aot_common

# Half a minute of compiling, once for all tests; the first run fetches a Triton.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

UPDATES = ("update", "update_alpha", "update_unset", "update_unset_alpha")
KERNELS = ("draw", "distinct", *UPDATES)

Report = dict[str, Any]


@pytest.fixture(params=aot_common.TARGETS)
def target(request: pytest.FixtureRequest) -> aot_common.Target:
    """Triton's version and an architecture."""
    found: aot_common.Target = request.param
    return found


@pytest.fixture
def reports(target: aot_common.Target) -> dict[str, Report]:
    """Kernel -> what became of it with one version of Triton on one architecture."""
    return aot_common.reports("priority", target)


@pytest.fixture(params=KERNELS)
def variant(request: pytest.FixtureRequest, reports: dict[str, Report]) -> tuple[str, Report]:
    """A kernel's name, and what became of it."""
    return request.param, reports[request.param]


def test_every_variant_was_compiled(reports: dict[str, Report]) -> None:
    assert sorted(reports) == sorted(KERNELS)


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
        # Triton 3.6 rearranges one tile within the warp through shared memory, 3.7 by shuffles.
        assert report["shared"] <= (512 if report["triton"].startswith("3.6.") else 0)


def test_a_draw_sums_its_children_once(reports: dict[str, Report]) -> None:
    # Sums that the compiler repeats in a second layout take 16 leaves a thread: 160 registers.
    assert reports["draw"]["registers"] <= 128


def test_no_value_makes_the_launcher_compile_anew(variant: tuple[str, Report]) -> None:
    # Pointers are compiled for once more at most, if they are not aligned; numbers change from call to call.
    _, report = variant
    assert [name for name in report["specialised"] if not name.startswith("p_")] == []


def test_every_access_is_known_to_be_global(variant: tuple[str, Report]) -> None:
    _, report = variant
    # Spills, LDL and STL, are another test's.
    names = {name for name in report["instructions"] if not name.startswith(("LDL", "STL"))}
    assert all(name.startswith(("LDG.", "STG.")) for name in names), names


def test_a_draw_loads_children_side_by_side(reports: dict[str, Report]) -> None:
    assert reports["draw"]["instructions"].get("LDG.E.128", 0) >= 2


def test_the_kernels_between_items_and_rows(target: aot_common.Target) -> None:
    reports = aot_common.reports("items", target)
    assert len(reports) == 8
    for kernel, report in reports.items():
        assert report["spills"] == 0, report
        assert [name for name in report["specialised"] if not name.startswith("p_")] == []
        if "resolve" in kernel:
            assert report["fused"] == [0, 0]
