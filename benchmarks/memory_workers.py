"""What trajectories of uneven length take in a table and in plain torch, each measured in a process of its own.

    python -m benchmarks.memory_workers VARIANT THREADS

The command and its answer are those of `benchmarks.peers.memory_peers`.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import sys
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.peers.answering import serve
from benchmarks.peers.memory_peers import Subject, Worker
from gear_loader.errors import RegionError
from gear_loader.storage.shared_memory import region_path

__all__ = ["WORKERS", "FixedRows", "Listed", "Ours"]


class Ours(Subject):
    """A table with as many blocks as `Table.required_blocks` says; options: ``block_steps``, and ``named``.

    A named one lies in a memory file, of which all is there from the start and counted, whoever uses it.
    """

    packages = ("torch", "numpy")

    def open(self) -> None:
        lengths, block_steps = np.array(self.source.lengths), self.options["block_steps"]
        named = self.options.get("named", False)
        self._name = f"bench-memory-{os.getpid()}-{secrets.token_hex(4)}" if named else None
        self._table = gear.Table.create(
            {name: gear.Column(torch.float32, shape) for name, shape in self.source.columns.items()},
            max_steps=int(lengths.sum()),
            max_trajectories=len(lengths),
            block_steps=block_steps,
            max_blocks=gear.Table.required_blocks(lengths, block_steps),
            name=self._name,
        )

    def fill(self) -> None:
        try:
            for batch in self.source.batches():
                self._table.extend(batch)
        except BaseException:
            self.close()
            raise

    def read(self, i: int) -> Mapping[str, Any]:
        return self._table[int(self._table.indices()[i])]

    def beside(self) -> int:
        return 0 if self._name is None else os.stat(region_path(self._name)).st_blocks * 512

    def extras(self) -> dict[str, float]:
        """By `Table.stats`, as parts of the payload: all of it; steps that ends of blocks leave empty; padding of
        blocks to 128 bytes; the index."""
        stats, layout = self._table.stats(), self._table.region.layout
        payload, steps = stats.payload_bytes, stats.blocks_in_use * stats.block_steps
        step_bytes = payload // stats.num_steps
        blocks = stats.blocks_in_use * layout.block_bytes
        return {
            "stats": stats.overhead,
            "ends": steps * step_bytes / payload - 1,
            "padding": (blocks - steps * step_bytes) / payload,
            "index": (stats.resident_bytes - blocks) / payload,
            "reserved": stats.reserved_bytes / payload,
        }

    def close(self) -> None:
        if self._name is not None:
            with contextlib.suppress(RegionError):
                self._table.unlink()
        self._table.close()


class FixedRows(Subject):
    """A row as long as the longest trajectory for each of them, as GEAR has it; every page is touched.

    GEAR's rows are pinned, so all of their memory is resident from the start, whether it is written or not.
    """

    packages = ("torch",)

    def open(self) -> None:
        count, longest = len(self.source.lengths), max(self.source.lengths)
        self._rows = {
            name: torch.empty(count, longest, *shape).zero_() for name, shape in self.source.columns.items()
        }
        self._lengths = torch.tensor(self.source.lengths)

    def fill(self) -> None:
        place = 0
        for batch in self.source.batches():
            for one in batch:
                for name, values in one.items():
                    self._rows[name][place, : len(values)] = torch.from_numpy(values)
                place += 1

    def read(self, i: int) -> Mapping[str, Any]:
        return {name: rows[i, : int(self._lengths[i])] for name, rows in self._rows.items()}

    def close(self) -> None:
        self._rows.clear()


class Listed(Subject):
    """A list with a dictionary of tensors for each trajectory: what one writes without any library."""

    packages = ("torch",)

    def open(self) -> None:
        self._episodes: list[dict[str, torch.Tensor]] = []

    def fill(self) -> None:
        for batch in self.source.batches():
            for one in batch:
                self._episodes.append({n: torch.from_numpy(values).clone() for n, values in one.items()})

    def read(self, i: int) -> Mapping[str, Any]:
        return self._episodes[i]

    def close(self) -> None:
        self._episodes.clear()


WORKERS: dict[str, Any] = {"ours": Ours, "fixed rows": FixedRows, "list of tensors": Listed}


if __name__ == "__main__":
    serve(WORKERS[sys.argv[1]], int(sys.argv[2]), Worker)
