"""Training on batches of this project's `ReplayDataset`, in a process of its own.

    python -m benchmarks.train_worker LOADER THREADS

Commands and answers, the model and the loop that is timed are those of `benchmarks.peers.train_peers`.
"""

from __future__ import annotations

import math
import sys
from typing import Any

import torch
from torch.utils.data import DataLoader

import gear_loader as gear
from benchmarks.collect import close
from benchmarks.peers.answering import serve
from benchmarks.peers.train_peers import COLUMNS, WINDOW, Batch, Loader, Worker

__all__ = ["OURS", "Ours", "OursPrefetch"]

BLOCK_STEPS = 32


class Ours(Loader):
    """`ReplayDataset` through `DataLoader(batch_size=None)`, windows drawn uniformly over steps, padding last."""

    packages = ("torch", "numpy")
    prefetch = 0

    def open(self) -> None:
        lengths = self.data.lengths
        self._table = gear.Table.create(
            {name: gear.Column(torch.float32, self.data.columns[name].shape[1:]) for name in COLUMNS},
            max_steps=int(lengths.sum()),
            max_trajectories=len(lengths),
            block_steps=BLOCK_STEPS,
            max_blocks=gear.Table.required_blocks(lengths, BLOCK_STEPS),
        )
        ends = (self.data.begins + lengths).tolist()
        for begin, end in zip(self.data.begins.tolist(), ends, strict=True):
            self._table.add({name: values[begin:end] for name, values in self.data.columns.items()})
        dataset = gear.ReplayDataset(
            self._table,
            batch_size=self.batch,
            windows=gear.Window(length=WINDOW, offset=1 - WINDOW, pad="tail"),
            selector=gear.Uniform(unit="step"),
            seed=self.seed,
            device=self.device,
            prefetch=self.prefetch,
            batches_per_epoch=math.inf,
        )
        self._iterator: Any = iter(DataLoader(dataset, batch_size=None))

    def next(self) -> Batch:
        return next(self._iterator)  # type: ignore[no-any-return]

    def close(self) -> None:
        close(self._iterator)
        self._table.close()


class OursPrefetch(Ours):
    """The same with a thread that makes two batches ahead, as is the default."""

    prefetch = ahead = 2


OURS: dict[str, Any] = {"ours": Ours, "ours, prefetch 2": OursPrefetch}


if __name__ == "__main__":
    serve(OURS[sys.argv[1]], int(sys.argv[2]), Worker)
