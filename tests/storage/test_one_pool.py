"""A named table of blobs lies in the memory of a machine once, however many processes read it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

import gear_loader as gear
from gear_loader.storage.shared_memory import region_path

NAME = "one-pool"
MIB = 1 << 20
READERS = 4
READER = """
import sys
import gear_loader as gear
from test_one_pool import NAME, anonymous

table = gear.Table.attach(NAME)
data = gear.ReplayDataset(table, batch_size=8, windows={"blob": gear.Window(4, every=2), "frame": gear.Window(1)},
                          sampler=gear.Uniform(unit="step", replacement=False), device="cpu")
next(iter(data))
before, read = anonymous(), 0
for batch in data:  # each step, once
    read += sum(len(blob) for row in batch["blob"] for blob in row)
print(read, anonymous() - before, flush=True)
sys.stdin.read()  # until all have read
"""


def field(process: str, name: str, mapping: str | None = None) -> int:
    """Bytes in a field of the smaps of a process: of all, or of the mappings of a path."""
    total, inside = 0, mapping is None
    for words in map(str.split, Path(f"/proc/{process}/smaps").read_text().splitlines()):
        if not words[0].endswith(":"):
            inside = mapping is None or words[-1] == mapping
        elif inside and words[0] == f"{name}:":
            total += int(words[1]) * 1024
    return total


def anonymous() -> int:
    """Bytes of this process's own memory."""
    return field("self", "Anonymous")


@pytest.mark.long
@pytest.mark.skipif(not Path("/proc/self/smaps").exists(), reason="needs Linux's smaps")
def test_four_readers_have_one_pool() -> None:
    columns = {"blob": gear.Column(bytes), "frame": gear.Column(torch.uint8, (64, 64), codec="zstd")}
    rng = np.random.default_rng(0)
    pytest.importorskip("zstandard")
    memory = gear.Memory(payload=80 * MIB)
    with gear.Table.create(
        columns, max_steps=1000, max_trajectories=10, memory=memory, name=NAME, if_exists="replace"
    ) as table:
        try:
            for _ in range(10):
                blobs = [rng.bytes(int(rng.integers(1, 120_000))) for _ in range(100)]
                table.add({"blob": blobs, "frame": rng.integers(0, 256, (100, 64, 64), dtype=np.uint8)})
            pool, path = table.stats().resident_bytes, str(region_path(NAME))
            assert pool > 50 * MIB
            readers = [
                subprocess.Popen(
                    [sys.executable, "-c", READER],
                    cwd=Path(__file__).parent,
                    stdin=subprocess.PIPE,
                    stdout=subprocess.PIPE,
                    text=True,
                )
                for _ in range(READERS)
            ]
            try:
                for reader in readers:
                    assert reader.stdout is not None
                    read, own = map(int, reader.stdout.readline().split())
                    assert read > 2 * pool  # windows of four steps
                    assert own < pool / 2  # batches, not the pool
                everyone = ["self", *(str(reader.pid) for reader in readers)]
                assert sum(field(each, "Pss", path) for each in everyone) < 1.1 * pool
                assert sum(field(each, "Rss", path) for each in everyone[1:]) > 3.5 * pool
            finally:
                for reader in readers:
                    reader.communicate("")
                assert not any(reader.returncode for reader in readers)
        finally:
            table.unlink()
