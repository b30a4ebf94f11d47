"""Compile every kernel for GPUs that this machine does not have, and print what came out as JSON.

Run as a program, without TRITON_INTERPRET, because Triton reads that variable when a kernel is defined:

    python tests/aot.py

One line a kernel, variant and architecture: registers, spills (bytes of local memory), and how often each width of
global load and store occurs in the machine code.
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
    (f"gather_{word}", gather.gather_kernel, GATHER, {"WORD": word, "TILE": gather.TILE, "ENTRIES": gather.ENTRIES})
    for word in (16, 4, 1)
]


def compile_for(kernel, signature, constants, arch):  # type: ignore[no-untyped-def]
    """The compiled kernel's registers, spills and memory instructions on `arch`."""
    # What the launcher's own specialisation finds: torch allocates at multiples of 16 bytes.
    names = list(signature)
    attrs = {(names.index(n),): [["tt.divisibility", 16]] for n, kind in signature.items() if kind.startswith("*")}
    source = ASTSource(fn=kernel, signature=signature, constexprs=constants, attrs=attrs)
    binary = triton.compile(source, target=GPUTarget("cuda", arch, 32), options=gather.LAUNCH[constants["WORD"]])
    with tempfile.NamedTemporaryFile(suffix=".cubin") as file:
        file.write(binary.asm["cubin"])
        file.flush()
        usage = subprocess.run([TOOL, "-res-usage", file.name], capture_output=True, text=True, check=True).stdout
        code = subprocess.run([TOOL, "-sass", file.name], capture_output=True, text=True, check=True).stdout
    widths = collections.Counter(re.findall(r"\b((?:LDG|STG|LDL|STL)\.[A-Z0-9_.]+)", code))
    count = {
        field: int(re.search(rf"\b{field}:(\d+)", usage).group(1))  # type: ignore[union-attr]
        for field in ("REG", "STACK", "LOCAL")
    }
    return {
        "registers": count["REG"],
        "spills": count["STACK"] + count["LOCAL"],
        "loads_128": sum(n for name, n in widths.items() if name.startswith("LDG") and ".128" in name),
        "stores_128": sum(n for name, n in widths.items() if name.startswith("STG") and ".128" in name),
        "local": sum(n for name, n in widths.items() if name.startswith(("LDL", "STL"))),
        "instructions": dict(widths),
    }


def main() -> None:
    if os.environ.get("TRITON_INTERPRET") == "1":
        sys.exit("TRITON_INTERPRET is set: compilation needs it unset")
    for name, kernel, signature, constants in VARIANTS:
        for arch in ARCHITECTURES:
            print(json.dumps({"kernel": name, "arch": arch, **compile_for(kernel, signature, constants, arch)}))


if __name__ == "__main__":
    main()
