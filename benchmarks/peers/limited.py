"""Reads of rows with limited memory, in a process of its own: numpy.memmap, swapped memory, TorchRL's memmap storage.

    python -I benchmarks/peers/limited.py KIND

Commands come as JSON lines (see `serve.answer_commands`): `begin`, `open`, then `check` and `measure`.
"""

from __future__ import annotations

import os
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import numpy as np

_PIECE = 8 << 20


class _Mapped:
    """`numpy.memmap` of each column's file, whose pages the kernel keeps as its limit allows."""

    def begin(self, procs: str, **options: Any) -> dict[str, int]:
        """Join the control group of the file `procs`, and load what is needed; bytes of memory that it takes then.

        options: folder with a file of the rows of each column, columns (name -> bytes of a row), trajectories, batch,
        batches (of a measurement), draw ("uniform" or "prioritized"), seed.
        """
        Path(procs).write_text(str(os.getpid()), encoding="ascii")
        self.size, self.batches = options["batch"], options["batches"]
        self.count = options["trajectories"]
        self.files = {
            name: (Path(options["folder"]) / f"{name}.npy", size) for name, size in options["columns"].items()
        }
        generator = np.random.default_rng(options["seed"])
        weights = (
            np.ones(self.count)
            if options["draw"] == "uniform"
            else 1.0 / (1.0 + generator.permutation(self.count))
        )
        self.ends = np.cumsum(weights)
        self.generator = np.random.default_rng(options["seed"] + 1)
        self.out = {name: np.empty((self.size, size), np.uint8) for name, (_, size) in self.files.items()}
        self.load()
        status = Path("/proc/self/status").read_text(encoding="ascii")
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
        return {"resident": int(resident.split()[1]) << 10}

    def load(self) -> None:
        """Import what it needs."""

    def open(self) -> None:
        self.columns = {
            name: np.memmap(path, np.uint8, "r", shape=(self.count, size))
            for name, (path, size) in self.files.items()
        }

    def draw(self) -> np.ndarray:
        drawn = self.generator.random(self.size) * self.ends[-1]
        return np.minimum(np.searchsorted(self.ends, drawn, side="right"), self.count - 1)

    def batch(self) -> np.ndarray:
        """Draw and copy a batch; return what was drawn."""
        index = self.draw()
        for name, column in self.columns.items():
            np.take(column, np.sort(index), axis=0, out=self.out[name], mode="clip")
        return np.sort(index)

    def values(self, name: str) -> np.ndarray:
        """A column of the last batch, uint8 [B, bytes]."""
        return self.out[name]

    def check(self) -> None:
        index = self.batch()
        for name, (path, size) in self.files.items():
            with open(path, "rb") as file:
                for row, number in enumerate(index.tolist()):
                    file.seek(number * size)
                    if file.read(size) != self.values(name)[row].tobytes():
                        raise ValueError("a batch has other values than the files")

    def measure(self) -> dict[str, float]:
        began = time.perf_counter()
        for _ in range(self.batches):
            self.batch()
        return {"seconds": time.perf_counter() - began}


class _Swapped(_Mapped):
    """Plain arrays, of which the kernel swaps out what is beyond the limit."""

    def open(self) -> None:
        self.columns = {}
        for name, (path, size) in self.files.items():
            array = np.empty((self.count, size), np.uint8)
            rows = max(1, _PIECE // size)
            with open(path, "rb", buffering=0) as file:
                for first in range(0, self.count, rows):
                    file.readinto(array[first : first + rows].data)
                    os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
            self.columns[name] = array


class _TorchRL(_Mapped):
    """`LazyMemmapStorage`, in files of its own."""

    def load(self) -> None:
        global torch, tensordict, data
        import tensordict
        import torch
        from torchrl import data

    def open(self) -> None:
        weights = np.diff(self.ends, prepend=0.0)
        options: dict[str, Any] = {}
        if weights.min() != weights.max():
            options["sampler"] = data.PrioritizedSampler(self.count, alpha=1.0, beta=0.4)
        place = tempfile.mkdtemp(prefix="torchrl-", dir=next(iter(self.files.values()))[0].parent)
        storage = data.LazyMemmapStorage(self.count, scratch_dir=place)
        self.buffer = data.TensorDictReplayBuffer(storage=storage, batch_size=self.size, **options)
        rows = 200
        for first in range(0, self.count, rows):
            values = {}
            for name, (path, size) in self.files.items():
                count = min(rows, self.count - first)
                read = np.fromfile(path, np.uint8, count * size, offset=first * size)
                values[name] = torch.from_numpy(read.reshape(count, size))
            index = torch.arange(first, first + len(values[name]))
            self.buffer.extend(tensordict.TensorDict({**values, "number": index}, batch_size=[len(index)]))
        if options:
            self.buffer.update_priority(torch.arange(self.count), torch.from_numpy(weights).float())

    def batch(self) -> np.ndarray:
        self.sampled = self.buffer.sample()
        found: np.ndarray = self.sampled["number"].numpy()
        return found

    def values(self, name: str) -> np.ndarray:
        found: np.ndarray = self.sampled[name].numpy()
        return found


KINDS = {"memmap": _Mapped, "swap": _Swapped, "torchrl": _TorchRL}


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).resolve().parents[2]))
    from benchmarks.peers.serve import answer_commands

    answer_commands(dict, KINDS[sys.argv[1]])
