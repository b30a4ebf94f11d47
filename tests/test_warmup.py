"""Compilation ahead of time, and the notice about compilation on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from cli_common import run

from gear_loader import warmup

PHILOX = """
import numpy as np
from gear_loader.native import compile, random
random.philox(0, 0, 0, 0, np.empty(4, dtype=np.uint64))
print(list(compile.timings))
"""
USED = """
import gear_loader.warmup
from gear_loader.native import compile
stages = []
gear_loader.warmup.warm_up(stages.append)
called = {compile._name(loop) for loop in compile.loops if loop.signatures}
print(len(stages), *sorted({compile._name(loop) for loop in compile.loops} - called - %r))
"""
# For a GPU, for repairs, and parts that the others contain (compiled with them, or called when those are not cached).
INNER = {
    "gathering.resolve",
    "queue_loops.copy_update",
    "queue_loops.launch_update",
    "queue_loops.queue_drawn",
    "queue_loops.queue_prioritized",
    "queue_loops.queue_uniform",
    "ragged_copies.list_values",
    "entry_points.reclaim",
}
INNER |= {"packed_lines.list_pieces", "packed_lines.list_work", "packed_lines.plan_rows"}
INNER |= {"ring_places.first_live", "ring_places.look_up", "ring_places.note"}  # for integrations
INNER |= {"copying.copy_common", "copying.copy_spans"}
INNER |= {f"sum_tree.{name}" for name in ("words", "uniforms", "descend", "refresh", "draw")}


def python(code: str, **environment: str) -> tuple[str, str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        env=os.environ | environment,
        capture_output=True,
        text=True,
        timeout=280,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.strip(), done.stderr


@pytest.mark.long
def test_only_a_process_that_compiles_says_so(tmp_path: Path) -> None:
    out, errors = python(PHILOX, NUMBA_CACHE_DIR=str(tmp_path))
    assert out == "['random.philox']"
    assert errors.count("Compiling loops of the CPU path on first use (random.philox first)") == 1
    out, errors = python(PHILOX, NUMBA_CACHE_DIR=str(tmp_path))
    assert out == "[]"
    assert "Compiling" not in errors


def test_warming_up_uses_every_loop() -> None:
    out, _ = python(USED % INNER)
    assert out == "11"


def test_the_command_says_what_it_has_done(monkeypatch: pytest.MonkeyPatch) -> None:
    for compiled, said in (
        ({}, "All loops were compiled already; tried in "),
        ({"random.philox": 1.5}, "Compiled 1 loops in "),
    ):

        def warm_up(progress: Callable[[str], None], compiled: Any = compiled) -> Any:
            progress("drawing by priority")
            return compiled

        monkeypatch.setattr(warmup, "warm_up", warm_up)
        code, output = run("warmup")
        assert code == 0
        assert "drawing by priority ..." in output
        assert said in output
