"""Batches on a GPU without the kernel: gathered on the CPU into pinned memory, copied while the next is gathered."""

from __future__ import annotations

import torch

from benchmarks.engine import Engine
from benchmarks.workloads import Data, Plain, PlainTrajectories, PlainWindows, Rows, expect, poison

__all__ = ["Staged"]


class Staged:
    """`index_select` into one of two pinned buffers, then a copy to the GPU that the host does not wait for."""

    def __init__(self, engine: Engine, data: Data, batch: int) -> None:
        def plain() -> Plain:
            if data.workload.anchor == "first":
                return PlainTrajectories(data, batch, engine.pinned)
            return PlainWindows(data, batch, "strided", engine.pinned)

        self._engine, self._data, self._size = engine, data, batch
        self._hosts = [plain() for _ in range(2)]
        self._targets = [
            {name: torch.empty_like(values, device=engine.device) for name, values in host.batch.items()}
            for host in self._hosts
        ]
        self._events = [engine.event() for _ in self._hosts]
        self._turn = 0

    def batch(self, rows: Rows) -> dict[str, torch.Tensor]:
        """The batch of these rows, on the GPU, until two more have been asked for."""
        turn = self._turn = 1 - self._turn
        self._events[turn].synchronize()  # the copies out of these buffers, two batches ago
        self._hosts[turn].gather(rows)
        for name, values in self._hosts[turn].batch.items():
            self._targets[turn][name].copy_(values, non_blocking=True)
        self._events[turn].record()
        return self._targets[turn]

    def check(self) -> None:
        """Compare a batch of each buffer with what it should hold."""
        for _ in self._hosts:
            rows = self._data.draw(self._size)
            poison(self._targets[1 - self._turn])
            found = self.batch(rows)
            self._engine.synchronize()
            expect(found, self._data.expected(rows))
