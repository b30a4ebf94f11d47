"""Processes with limited memory, which the disk tier is measured beside."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

from benchmarks.experiments.exhaustion import limited_process
from benchmarks.limits import Unlimited, memory_limited, swap_file
from benchmarks.peers.process import PeerFailed

OPTIONS = {"trajectories": 2000, "batch": 8, "batches": 3, "seed": 1, "columns": {"wide": 9000, "one": 4}}


@pytest.mark.parametrize("draw", ["uniform", "prioritized"])
@pytest.mark.parametrize("kind", ["memmap", "swap"])
def test_batches_are_right_and_memory_is_limited(tmp_path: Path, kind: str, draw: str) -> None:
    for name, size in {"wide": 9000, "one": 4}.items():
        np.random.default_rng(0).integers(0, 256, 2000 * size, dtype=np.uint8).tofile(
            tmp_path / f"{name}.npy"
        )
    try:
        with swap_file(tmp_path / "swap", 64 << 20), memory_limited() as group:
            process = limited_process(
                Path(sys.executable), kind, group, 4 << 20, {**OPTIONS, "folder": str(tmp_path), "draw": draw}
            )
            try:
                process.ask("check")
                assert 0 < process.ask("measure")["seconds"] < 60
                limit = next(
                    group.procs.parent.glob("memory.limit_in_bytes"), group.procs.parent / "memory.max"
                )
                assert int(limit.read_text()) < 100 << 20
            finally:
                process.close()
    except Unlimited as error:
        pytest.skip(str(error))
    assert not (tmp_path / "swap").exists()
    assert not group.procs.parent.exists()


def test_a_process_that_fails_says_why(tmp_path: Path) -> None:
    try:
        with (
            memory_limited() as group,
            pytest.raises(PeerFailed, match=r"No such file or directory: .*wide\.npy"),
        ):
            limited_process(
                Path(sys.executable),
                "memmap",
                group,
                1 << 20,
                {**OPTIONS, "folder": str(tmp_path), "draw": "uniform"},
            )
    except Unlimited as error:
        pytest.skip(str(error))
