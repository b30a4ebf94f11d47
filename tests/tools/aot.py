"""Compile every kernel for GPUs that this machine does not have, and print what came out as JSON.

Run as a program, without TRITON_INTERPRET, because Triton reads that variable when a kernel is defined:

    python tests/tools/aot.py [--arch 90|gfx942] [PREFIX ...]

A prefix leaves out the kernels whose names do not begin with it. One line a kernel, variant and architecture:

    triton             version of Triton that compiled it
    registers, spills  registers of a thread; bytes of stack and local memory
    shared             bytes of shared memory
    ptx                the code itself, only with --ptx
    instructions       how often each instruction on global or local memory occurs in the machine code
    fused              fused multiply-adds of float64, in PTX and in the machine code
    barriers           barriers of the whole program, in PTX
    parameters         types of the arguments, by Triton's names
    side_by_side       bytes that the threads of a warp read side by side in the load of whole lines
    specialised        arguments whose values the launcher would compile anew for
"""

from __future__ import annotations

import argparse
import collections
import dataclasses
import itertools
import json
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from gear_loader.kernels import (
    append,
    cast,
    gather,
    items,
    neighbors,
    packed,
    place,
    priority,
    split,
    store,
    uniform,
)

ARCHITECTURES = ("80", "90", "100")
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

# Type -> arguments. All kernels that have an argument of this name mean the same by it.
_NAMES = {
    "*i64": "columns slots anchors extent pieces items levels status random drawn index anchor generation place "
    "first addresses rows indptr nodes neighbors counts work count",
    "*i32": "block_ids blocks source staging target known steps owner number ids indices parts position where totals "
    "state",
    "*u8": "done ends",
    "*fp64": "sums",
    "*fp32": "values leaves mins maxs maximum drawn_leaves weights beta",
    "i32": "num_columns num_masks lines batch line_tiles num_tiles block_steps shift num_pieces count depth first_row "
    "first_phase last_phase num_slots num_blocks num_ids size width first last offset anchor_first ahead ahead_final "
    "once fanout block_lines per_row last_lines lanes lead stride",
    "i64": "magic",
    "fp32": "floor alpha eps",
}
TYPES = {
    f"p_{name}" if kind.startswith("*") else name: kind
    for kind, names in _NAMES.items()
    for name in names.split()
}


@dataclasses.dataclass(frozen=True)
class Variant:
    """A kernel, some of its constants, and the keywords of its launch: the other constants and the options."""

    name: str
    kernel: Any
    constants: dict[str, Any]
    launch: dict[str, Any]


CASTS = [
    ("uint8", "bfloat16", "float32"),
    ("uint8", "float32", "float32"),
    ("float32", "bfloat16", ""),
    ("float32", "float16", ""),
    ("bfloat16", "float32", "bfloat16"),
    ("float64", "bfloat16", "float64"),
    ("int64", "float32", ""),
    ("float32", "int32", ""),
    ("int32", "bool", ""),
]
"""Dtypes of values, outputs and products: some of all that a `cast` may compile."""

VARIANTS = [
    *(
        Variant(
            f"gather_{word}_{unit}{kind}",
            gather.gather_kernel,
            {"WORD": word, "UNIT": unit, "CHOSEN": kind == "_rows"},
            gather.launch_options(word, unit),
        )
        for (word, unit), kind in itertools.product(gather.PROGRAMS, ("", "_rows"))
    ),
    Variant("place", place.place_kernel, {}, place.LAUNCH),
    Variant("store", store.store_kernel, {}, store.LAUNCH),
    *(
        Variant(f"append{name}", append.append_kernel, {"ROW": row, "FINAL": final}, append.LAUNCH)
        for name, row, final in (("", True, False), ("_final", True, True), ("_end", False, False))
    ),
    *(
        Variant(
            f"split{'_rows' * chosen}{'_counted' * counted}",
            split.split_kernel,
            {"CHOSEN": chosen, "COUNTED": counted},
            split.LAUNCH,
        )
        for chosen, counted in ((False, False), (True, False), (False, True))
    ),
    Variant("packed", packed.packed_kernel, {}, packed.LAUNCH),
    *(
        Variant(
            f"cast_{given}_{target}{'_scaled' * bool(product)}{'_counted' * counted}",
            cast.cast_kernel,
            {"GIVEN": given, "TARGET": target, "PRODUCT": product, "COUNTED": counted},
            cast.LAUNCH,
        )
        for (given, target, product), counted in [*((each, False) for each in CASTS), (CASTS[0], True)]
    ),
    Variant("priority_draw", priority.draw_kernel, {}, priority.DRAW),
    *(
        Variant(
            f"priority_{name}{'_unset' * unset}{'' if alpha_one else '_alpha'}",
            kernel,
            {"UNSET_ALLOWED": unset, "ALPHA_ONE": alpha_one},
            launch,
        )
        for name, kernel, launch in (
            ("update", priority.update_kernel, priority.UPDATE),
            ("alone", priority.update_alone_kernel, priority.UPDATE_ALONE),
        )
        for unset, alpha_one in itertools.product((False, True), repeat=2)
    ),
    Variant("priority_distinct", priority.draw_distinct_kernel, {}, priority.DISTINCT),
    *(
        Variant(
            f"items_locate{'_steps' * steps}{'_generations' * check}",
            items.locate_kernel,
            {"STEPS": steps, "CHECK": check},
            items.LAUNCH,
        )
        for steps, check in itertools.product((False, True), repeat=2)
    ),
    *(
        Variant(
            f"items_resolve_{name}",
            items.resolve_kernel,
            {"ANCHOR": i},
            items.LAUNCH,
        )
        for i, name in enumerate(items.ANCHORS)
    ),
    *(
        Variant(f"uniform_{name}", uniform.uniform_kernel, {"ANCHOR": i}, uniform.LAUNCH)
        for i, name in enumerate(uniform.ANCHORS)
    ),
    Variant("items_weigh_batch", items.weigh_kernel, {"TABLE": False}, items.WEIGH),
    Variant("items_weigh_table", items.weigh_kernel, {"TABLE": True}, items.WEIGH),
    *(
        Variant(
            f"neighbors_{width}", neighbors.neighbors_kernel, {"WIDTH": width}, neighbors.launch_of(width)
        )
        for width in neighbors.WIDTHS
    ),
]

# Global loads (LDGSTS: into shared memory) and stores, local ones (spills; without a suffix they move 4 bytes), and
# generic ones (whose space the compiler could not tell).
_MEMORY = re.compile(r"\b(?:LDGSTS|LDG|STG|LDL|STL|LD|ST)(?:\.[A-Z0-9_]+)*(?=\s)")


# In Triton's own code: the shape that threads form over a tile, and the load that uses it.
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[(?:\d+, )?(\d+)\], threadsPerWarp = \[(?:\d+, )?(\d+)\]",
    re.M,
)
_LINES = re.compile(
    r"= (?:tt\.load|ttg\.async_copy_global_to_local) .*evict_first\b.* : tensor<\d+(?:x32)?x!tt\.ptr<i32>, (#\w+)>"
)


_AMD = re.compile(r"^ *\.(vgpr_count|vgpr_spill_count|sgpr_spill_count): +(\d+)", re.M)


def _side_by_side(code: str) -> int:
    layouts = {name: 4 * int(words) * int(threads) for name, words, threads in _LAYOUT.findall(code)}
    return min((layouts[name] for name in _LINES.findall(code)), default=0)


def compile_for(variant: Variant, arch: str) -> dict[str, Any]:
    """What the launcher compiles of a kernel for `arch`; of one of AMD only registers, spills and shared memory."""
    kernel = variant.kernel
    names = {p.name for p in kernel.params if p.is_constexpr}
    constants = {**variant.constants, **{k: v for k, v in variant.launch.items() if k in names}}
    options = {k: v for k, v in variant.launch.items() if k not in names}
    specialised = [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)]
    # The launcher tells the compiler that a pointer is aligned, where it looks: torch's own allocations always are.
    aligned = {
        (p.num,): [["tt.divisibility", 16]]
        for p in kernel.params
        if p.name in specialised and TYPES[p.name].startswith("*")
    }
    source = ASTSource(
        fn=kernel,
        signature={p.name: "constexpr" if p.is_constexpr else TYPES[p.name] for p in kernel.params},
        constexprs=constants,
        attrs=aligned,
    )
    if arch.startswith("gfx"):
        binary = triton.compile(source, target=GPUTarget("hip", arch, 64), options=options)
        used = {name: int(value) for name, value in _AMD.findall(binary.asm["amdgcn"])}
        spills = used["vgpr_spill_count"] + used["sgpr_spill_count"]
        found = {"registers": used["vgpr_count"], "spills": spills, "shared": binary.metadata.shared}
        return {**found, "ptx": binary.asm["amdgcn"]}
    binary = triton.compile(source, target=GPUTarget("cuda", int(arch), 32), options=options)
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    usages = re.search(r"\bREG:(\d+) STACK:(\d+) .*\bLOCAL:(\d+)", usage)
    assert usages is not None, f"cuobjdump printed no resource usage: {usage}"
    registers, stack, local = map(int, usages.groups())
    return {
        "registers": registers,
        "spills": stack + local,
        "shared": binary.metadata.shared,
        "ptx": binary.asm["ptx"],
        "parameters": [kind for kind in source.signature.values() if kind != "constexpr"],
        "fused": [
            len(re.findall(r"\bfma\.rn\.f64\b", binary.asm["ptx"])),
            len(re.findall(r"\bDFMA\b", code)),
        ],
        "barriers": len(re.findall(r"\bbar\.sync\b", binary.asm["ptx"])),
        "side_by_side": _side_by_side(binary.asm["ttgir"]),
        "specialised": specialised,
        "instructions": dict(collections.Counter(_MEMORY.findall(code))),
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set: compilation needs it unset")
    parser = argparse.ArgumentParser()
    parser.add_argument("prefixes", nargs="*")
    parser.add_argument(
        "--arch",
        action="append",
        help="80 for sm_80, or gfx942; several if repeated; sm_80 to 100 without it",
    )
    parser.add_argument("--ptx", action="store_true", help="print the PTX too, for the emulator")
    arguments = parser.parse_args()
    for variant in VARIANTS:
        if variant.name.startswith(tuple(arguments.prefixes) or ""):
            for arch in arguments.arch or ARCHITECTURES:
                report = {"kernel": variant.name, "arch": arch, "triton": triton.__version__}
                report |= compile_for(variant, arch)
                if not arguments.ptx:
                    del report["ptx"]
                print(json.dumps(report))


if __name__ == "__main__":
    main()
