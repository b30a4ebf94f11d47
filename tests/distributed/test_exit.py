"""A rank that ends without closing anything ends as it should: with its own exit status."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

PROGRAM = """
import sys, time
import torch, torch.distributed as dist
import gear_loader as gear
from gear_loader.distributed import Shards, liveness

store, rank = dist.FileStore(sys.argv[1], 2), int(sys.argv[2])
liveness.BEAT = 0.0  # so that the heartbeat is always in the store's code
dist.init_process_group("gloo", store=store, rank=rank, world_size=2)
table = gear.Table.create({"x": gear.Column(torch.int64)}, name=f"{sys.argv[3]}-{rank}", max_steps=400,
                          max_trajectories=100)
table.extend([{"x": torch.arange(4)} for _ in range(100)])
dataset = gear.ReplayDataset(Shards(table, timeout=30), sampler=gear.Uniform(), windows=gear.Window(1), batch_size=16,
                             prefetch=5, batches_per_epoch=10**6)
batches = iter(dataset)
busy = float(sys.argv[4])
for _ in range(20 if not busy else 1 if rank else 4):
    next(batches)
if rank:
    time.sleep(busy)
table.unlink()
print("done")
"""


def end_without_closing(tmp_path: Path, busy: float) -> None:
    """Let two ranks end without closing anything; the second one later than the first by so many seconds."""
    env = os.environ | {"GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    store, name = str(tmp_path / "store"), f"test-exit-{os.getpid()}"
    ranks = [
        subprocess.Popen(
            [sys.executable, "-c", PROGRAM, store, str(rank), name, str(busy)],
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(2)
    ]
    outputs = [rank.communicate(timeout=120) for rank in ranks]
    assert [rank.returncode for rank in ranks] == [0, 0], outputs
    assert [out for out, _ in outputs] == ["done\n"] * 2


@pytest.mark.long
def test_ranks_that_end_while_batches_are_prefetched(tmp_path: Path) -> None:
    end_without_closing(tmp_path, busy=0)


@pytest.mark.long
def test_a_rank_that_ends_while_its_prefetching_waits_for_a_busy_one(tmp_path: Path) -> None:
    end_without_closing(tmp_path, busy=8)
