"""Batches of a private and of a named table in a process of its own, which may have another commit's `gear_loader`."""

from __future__ import annotations

import inspect
import math
import os
import secrets
from typing import Any

import torch
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks.loading import check_dataset, iterated
from benchmarks.peers.source import undisturbed
from benchmarks.workloads import NAMED, Data

PACKAGES = MODULES = ("torch", "numpy")
KINDS: dict[str, dict[str, Any]] = {"gear_collect": {}}
BLOCK_STEPS = 64


def _anchored(anchor: str) -> dict[str, Any]:
    """The option for anchors, also of the `gear_loader` of a commit before."""
    if "anchor" in inspect.signature(gear.ReplayDataset).parameters:
        return {"anchor": anchor}
    return {"draws": gear.Draws(anchor=anchor)}


class Worker:
    """Builds the tables of a workload, and measures batches of them."""

    def __init__(self, _kinds: Any, _variant: str) -> None:
        self._tables: dict[bool, gear.Table] = {}
        self._datasets: dict[tuple[bool, int], gear.ReplayDataset] = {}

    def build(self, workload: str, trajectories: int, sizes: list[int]) -> None:
        """Store the trajectories of `Data`, and compare some batches of each size with them, to the byte."""
        self.close()
        data = Data(NAMED[workload].of(trajectories))
        name = f"bench-collect-{os.getpid()}-{secrets.token_hex(4)}"
        for named in (False, True):
            table = self._tables[named] = data.table(BLOCK_STEPS, name=name if named else None)
            for batch in sizes:
                found = gear.ReplayDataset(
                    table,
                    batch_size=batch,
                    windows=data.workload.window,
                    **_anchored(data.workload.anchor),
                    device="cpu",
                    prefetch=gear.Prefetch(0, keep=1, copy=False),
                    batches_per_epoch=math.inf,
                )
                self._datasets[named, batch] = found
                for source in (iter(found.sample, None), DataLoader(found, batch_size=None)):
                    check_dataset(data, found, source)

    def measure(self, batch: int, named: bool, loader: bool, threads: int, batches: int) -> dict[str, float]:
        """Seconds of so many batches, through `DataLoader` or by `sample`."""
        found = self._datasets[named, batch]
        torch.set_num_threads(threads)

        def start() -> Any:
            return iter(DataLoader(found, batch_size=None)) if loader else iter(found.sample, None)

        with undisturbed():
            return {"seconds": iterated(start, batches)()}

    def close(self) -> None:
        """Remove the tables."""
        self._datasets.clear()
        for named, table in self._tables.items():
            if named:
                table.unlink()
            table.close()
        self._tables.clear()
