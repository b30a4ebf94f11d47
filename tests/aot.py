"""Compile every kernel for GPUs that this machine does not have, and print what came out as JSON.

Run as a program, without TRITON_INTERPRET, because Triton reads that variable when a kernel is defined:

    python tests/aot.py

One line a kernel, variant and architecture:

    registers, spills  registers of a thread; bytes of stack and local memory
    instructions       how often each instruction on global or local memory occurs in the machine code
    side_by_side       bytes that the threads of a warp read side by side in the load of whole lines
    specialised        arguments whose values the launcher would compile anew for
"""

from __future__ import annotations

import collections
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

from gear_loader.kernels import gather

ARCHITECTURES = (80, 90, 100)
TOOL = Path(triton.__file__).parent / "backends" / "nvidia" / "bin" / "cuobjdump"

GATHER = {
    "p_columns": "*i64",
    "p_slots": "*i64",
    "p_anchors": "*i64",
    "p_extent": "*i64",
    "p_block_ids": "*i32",
    "num_columns": "i32",
    "batch": "i32",
    "num_tiles": "i32",
    "block_steps": "i32",
    "WORD": "constexpr",
    "TILE": "constexpr",
    "ENTRIES": "constexpr",
}
VARIANTS = [
    (
        f"gather_{word}",
        gather.gather_kernel,
        GATHER,
        {"WORD": word, "TILE": gather.TILE, "ENTRIES": gather.ENTRIES},
    )
    for word in (16, 4, 1)
]

# Global loads and stores, local ones (spills; without a suffix they move 4 bytes), and generic ones (whose space
# the compiler could not tell).
_MEMORY = re.compile(r"\b(?:LDG|STG|LDL|STL|LD|ST)(?:\.[A-Z0-9_]+)*(?=\s)")


# In Triton's own code: the shape that threads form over a tile, and the load that uses it.
_LAYOUT = re.compile(
    r"^(#\w+) = #ttg\.blocked<\{sizePerThread = \[\d+, (\d+)\], threadsPerWarp = \[\d+, (\d+)\]", re.M
)
_LINES = re.compile(r"= tt\.load .*evict_first : tensor<\d+x32x!tt\.ptr<i32>, (#\w+)>")


def _side_by_side(code: str) -> int:
    layouts = {name: 4 * int(words) * int(threads) for name, words, threads in _LAYOUT.findall(code)}
    return min((layouts[name] for name in _LINES.findall(code)), default=0)


def compile_for(
    kernel: Any, signature: dict[str, str], constants: dict[str, int], arch: int
) -> dict[str, Any]:
    """What the launcher compiles of a kernel, for `arch`: registers, spills and memory instructions."""
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs={})
    binary = triton.compile(
        source, target=GPUTarget("cuda", arch, 32), options=gather.LAUNCH[constants["WORD"]]
    )
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run(
            [TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True
        ).stdout
        code = subprocess.run([TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    found = re.search(r"\bREG:(\d+) STACK:(\d+) .*\bLOCAL:(\d+)", usage)
    assert found is not None, f"cuobjdump printed no resource usage: {usage}"
    registers, stack, local = map(int, found.groups())
    return {
        "registers": registers,
        "spills": stack + local,
        "side_by_side": _side_by_side(binary.asm["ttgir"]),
        "specialised": [p.name for p in kernel.params if not (p.is_constexpr or p.do_not_specialize)],
        "instructions": dict(collections.Counter(_MEMORY.findall(code))),
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set: compilation needs it unset")
    for name, kernel, signature, constants in VARIANTS:
        for arch in ARCHITECTURES:
            print(
                json.dumps({"kernel": name, "arch": arch, **compile_for(kernel, signature, constants, arch)})
            )


if __name__ == "__main__":
    main()
