"""Compilation ahead of time, and the notice about compilation on first use."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
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
ON_GPU = """
import gc, sys, tempfile
sys.path[:0] = %r
import torch
from streams.cuda import Cuda
from scenarios import made_table
import gear_loader as gear

def kinds():
    return {(compile._name(loop), kinds) for loop in compile.loops for kinds in loop.signatures}

before, cuda = kinds(), Cuda(0, "eager")
plain = {"windows": gear.Window(3), "columns": ["value", "number"]}
packed = {**plain, "layout": "packed"}
with cuda.installed(), tempfile.TemporaryDirectory() as folder:
    cuda.threads.frequency = 0.0
    for tier in (None, folder):
        with made_table(tier=tier) as table:
            for sampler in (gear.Uniform(), gear.Prioritized()):
                for options in (plain, packed):
                    options = {"sampler": sampler, "batch_size": 4, "device": "cuda:1", **options}
                    data = gear.ReplayDataset(table, prefetch=0, batches_per_epoch=12, **options)
                    for batch in data:
                        if sampler.by_priority:
                            data.update_priority(batch, torch.ones(4, device="cuda:1"))
            del data, batch
            gc.collect()
assert cuda.machine.counts["replays"] > 20
print(*sorted({name for name, _ in kinds() - before}))
"""
# For repairs, and parts that the others contain (compiled with them, or called when those are not cached).
INNER = {"entry_points.reclaim"}
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
    assert out == "12"


@pytest.mark.long
@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a real torch.cuda")
def test_after_warming_up_batches_on_a_gpu_compile_no_loop() -> None:
    """On the stand-in for CUDA."""
    here = Path(__file__).parent
    folders = [str(each) for each in (here, here / "tools", here / "schedules")]
    out, _ = python(USED % INNER + ON_GPU % folders)
    assert out == "12"


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
