"""The kernels compiled ahead of time for GPUs that need not be here: what the machine code must be like."""

from __future__ import annotations

import ctypes
import re
from typing import Any

import pytest
import torch

pytest.importorskip("triton")
import aot_common
from aot_common import Report, Reports

from gear_loader.kernels.gather import PROGRAMS, SHARED, launch_options
from gear_loader.utils.launch_graph import packed_arguments

# Seconds of compiling, once for all tests; the first long run fetches a Triton.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1200)]

NAMES = {
    *(f"gather_{word}_{unit}{kind}" for word, unit in PROGRAMS for kind in ("", "_rows")),
    *(
        "place",
        "split",
        "split_rows",
        "split_counted",
        "store",
        "packed",
        "priority_draw",
        "priority_distinct",
    ),
    *("append", "append_final", "append_end"),
    *(
        "cast_uint8_bfloat16_scaled",
        "cast_uint8_bfloat16_scaled_counted",
        "cast_uint8_float32_scaled",
        "cast_float32_bfloat16",
        "cast_float32_float16",
    ),
    *(
        "cast_bfloat16_float32_scaled",
        "cast_float64_bfloat16_scaled",
        "cast_int64_float32",
        "cast_float32_int32",
    ),
    "cast_int32_bool",
    *(
        f"priority_{name}{unset}{alpha}"
        for name in ("update", "alone")
        for unset in ("", "_unset")
        for alpha in ("", "_alpha")
    ),
    *(f"items_locate{steps}{check}" for steps in ("", "_steps") for check in ("", "_generations")),
    *("items_weigh_batch", "items_weigh_table"),
    *(f"uniform_{anchor}" for anchor in ("uniform", "first", "last", "item")),
    *(f"neighbors_{width}" for width in (8, 32, 128)),
}


@pytest.fixture(params=aot_common.TARGETS)
def reports(request: pytest.FixtureRequest) -> Reports:
    """Kernel -> what became of it with one version of Triton on one architecture."""
    return aot_common.reports(request.param)


def memory(report: Report, *prefixes: str) -> dict[str, int]:
    """How often instructions occur whose names begin so."""
    return {name: count for name, count in report["instructions"].items() if name.startswith(prefixes)}


def test_every_variant_was_compiled(reports: Reports) -> None:
    resolved = {name for name in reports if name.startswith("items_resolve_")}
    some = {name for name in NAMES if name.startswith(aot_common.SAMPLE)}
    assert reports.keys() - resolved == (NAMES if resolved else some)
    assert len(resolved) in (0, 4)


def test_the_arguments_of_a_node_are_those_of_the_machine_code(reports: Reports) -> None:
    """As `packed_arguments` has them: each is as wide, and there are two pointers more, which are Triton's own."""
    for name, report in reports.items():
        kinds = report["parameters"]
        given = packed_arguments(dict(enumerate(kinds)), range(len(kinds)), tuple(map(_argument, kinds)))  # type: ignore[arg-type]
        widths = [
            int(bits) // 8 for bits in re.findall(r"\.param \.[a-z](\d+)[^\n]*_param_\d+", report["ptx"])
        ]
        assert [ctypes.sizeof(value) for value in given] == widths, name


def _argument(kind: str) -> Any:
    return torch.empty(1, device="cpu") if kind.startswith("*") else 1.5 if kind == "fp32" else 1


def test_what_holds_for_every_kernel(reports: Reports) -> None:
    """Nothing is spilled, each access is known to be global, and no number makes the launcher compile once more."""
    for name, report in reports.items():
        assert report["spills"] == 0, name
        unknown = {
            part for part in report["instructions"] if not part.startswith(("LDG.", "LDGSTS.", "STG."))
        }
        assert unknown == set(), name
        # Pointers that are not aligned are compiled for once more at most; of gathers and places, none is.
        numbers = [part for part in report["specialised"] if not part.startswith("p_")]
        copies = name.startswith(("append", "gather", "place", "split", "store", "packed", "cast"))
        assert (report["specialised"] if copies else numbers) == [], name
        if copies:
            threads = int(re.findall(r"\.reqntid (\d+)", report["ptx"])[0])
            # A block leaves a third, but for gathers: a few blocks have a multiprocessor each.
            most = 1 if name.startswith("gather") else 2 / 3
            assert 16 * threads <= report["registers"] * threads <= 65536 * most, name
            assert report["shared"] <= SHARED, name


def test_gathers_load_lines_in_the_widest_words(reports: Reports) -> None:
    # The lines of the source, and nothing else, are copied into shared memory: 128 bits a thread, 128 bytes side by
    # side. 32 lines over a warp are eight copies, in the loop and for each tile requested before it. All tiles but one
    # are in flight: 128 KiB, which fit beside what rearranges a tile.
    for name in reports.keys() & {name for name in NAMES if name.startswith("gather")}:
        report, word, unit = reports[name], *map(int, name.split("_")[1:3])
        options = launch_options(word, unit)
        assert (options["STAGES"] - 1) * options["TILE"] * unit == 128 << 10 <= report["shared"]
        assert memory(report, "LDGSTS") == {"LDGSTS.E.BYPASS.128": options["STAGES"] * 8 * unit // 128}
        assert report["side_by_side"] == 128
        assert memory(report, "LDG.E.EF") == {}
        narrow = {part for part in memory(report, "LDG") if {"U8", "S8", "U16", "S16"} & set(part.split("."))}
        assert narrow == set()
        # Stores in the words that steps are made of; those of masks are bytes.
        assert memory(report, "STG").keys() == {
            {16: "STG.E.128", 4: "STG.E", 1: "STG.E.U8"}[word],
            "STG.E.U8",
        }
        if not name.endswith("_rows") and f"{name}_rows" in reports:  # no look-up of rows that are not chosen
            loads = (each["instructions"]["LDG.E.64"] for each in (report, reports[f"{name}_rows"]))
            assert next(loads) < next(loads)


def test_a_packed_gather_does_the_same_for_all_words(reports: Reports) -> None:
    # Copies as of `gather`; a tile is stored in the words of its column: 16 bytes, 4, or 1, and numbers of steps.
    report = reports["packed"]
    assert memory(report, "LDGSTS") == {"LDGSTS.E.BYPASS.128": 3 * 8}
    assert report["side_by_side"] == 128
    assert memory(report, "STG").keys() == {"STG.E.128", "STG.E", "STG.E.U8"}
    assert memory(report, "LDG.").keys() == {"LDG.E", "LDG.E.64"}


def test_casts_of_full_tiles_have_no_mask(reports: Reports) -> None:
    # 2,048 values over 256 threads, eight each: stored in words of 16 bytes, and of 8 where those are all.
    stores = {"cast_int32_bool": {"STG.E.64": 1}, "cast_uint8_float32_scaled": {"STG.E.128": 2}}
    stores["cast_float32_bfloat16"] = stores["cast_uint8_bfloat16_scaled"] = {"STG.E.128": 1}
    for name in reports.keys() & stores.keys():
        assert memory(reports[name], "STG.E.128", "STG.E.64") == stores[name], name


def test_a_place_copies_whole_lines(reports: Reports) -> None:
    # A tile of 64 lines over 256 threads: by words of 16 bytes, of 4, and of 4 that are stored by bytes. Beside
    # staging memory, which is read through the evict-first path, there are only the plan and the rows.
    report = reports["place"]
    assert report["side_by_side"] == 128
    instructions = dict(report["instructions"])
    assert instructions.pop("LDG.E.64") > 0
    staging = {"LDG.E.EF.128": 2, "LDG.E.EF": 2 * 8}
    assert instructions == {**staging, "STG.E.128": 2, "STG.E": 8, "STG.E.U8": 4 * 8}


def test_a_split_copies_in_the_widest_words(reports: Reports) -> None:
    # A tile of 1,024 words over 256 threads, of 16, 4 and 1 bytes. Beside them only the plan and the rows are read.
    for name in ("split", "split_rows"):
        instructions = dict(reports[name]["instructions"])
        assert instructions.pop("LDG.E.64") > 0
        stores = {part: count for part, count in instructions.items() if part.startswith("STG")}
        assert stores == {"STG.E.128": 4, "STG.E": 4, "STG.E.U8": 4}
        assert instructions["LDG.E.128"] == 4
    reads = (reports[name]["instructions"]["LDG.E.64"] for name in ("split", "split_rows"))
    assert next(reads) < next(reads)


def test_no_multiplication_is_fused_with_an_addition(reports: Reports) -> None:
    # A fused one rounds once instead of twice: sums and draws would not be those of the other implementations. The
    # power of `alpha` is made of them, in the library that comes with the compiler.
    for name, report in reports.items():
        if name.endswith("alpha"):
            assert min(report["fused"]) > 0, "the count counts nothing"
        elif name.startswith(("priority", "items_resolve", "uniform")):
            assert report["fused"] == [0, 0], name


def test_phases_are_kept_apart_by_barriers(reports: Reports) -> None:
    for name, report in reports.items():
        if name.startswith("priority"):
            least = {"priority_draw": 0, "priority_distinct": 6}.get(name, 3 if "alone" in name else 1)
            assert report["barriers"] >= least, name


def test_a_draw(reports: Reports) -> None:
    report = reports["priority_draw"]
    assert report["barriers"] == 0  # one warp, to which a draw needs nothing from the others
    # Triton 3.6 rearranges one tile within the warp through shared memory, 3.7 by shuffles.
    assert report["shared"] <= (512 if report["triton"].startswith("3.6.") else 0)
    # Sums that the compiler repeats in a second layout take 16 leaves a thread: 160 registers.
    assert report["registers"] <= 128
    assert report["instructions"].get("LDG.E.128", 0) >= 2  # children side by side


@pytest.mark.parametrize(
    "kernels", [("split",), pytest.param((), marks=[pytest.mark.long, pytest.mark.exhaustive])]
)
def test_kernels_compile_for_rocm(kernels: tuple[str, ...]) -> None:
    """Nothing of CUDA's alone is in them, and a block fits into a compute unit of gfx942: 512 registers, 64 KiB."""
    reports = aot_common.reports((aot_common.INSTALLED, "gfx942", kernels))
    assert {name for name in reports if not name.startswith("items_resolve_")} == {
        name for name in NAMES if name.startswith(kernels or "")
    }
    for name, report in reports.items():
        assert 0 < report["registers"] <= 512, name
        assert report["shared"] <= 1 << 16, name
