"""Rows of a shard on another node: fetched in parts, into staging memory that is used again."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.storage.schema import Schema, Window
from gear_loader.transport.spec import ALIGNMENT, WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["Part", "RemoteShard", "Staging"]

PART_BYTES = 1 << 20
"""Bytes that are asked for at once: while one part is sent the next one is gathered, and the one before is placed."""


class Staging:
    """Staging buffers that are used again: uint8 tensors, pinned where a GPU is to read them.

    Args:
        pinned: whether they are.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """A buffer of at least `size` bytes."""
        with self._lock:
            for i, tensor in enumerate(self._free):
                if len(tensor) >= size:
                    return self._free.pop(i)
            if self._free:  # too small for what is asked by now
                self._free.pop()
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        first = -memory.data_ptr() % ALIGNMENT
        return memory[first : first + size]

    def give(self, tensor: torch.Tensor) -> None:
        """Take a buffer back that nothing reads or writes any more."""
        with self._lock:
            self._free.append(tensor)


@dataclasses.dataclass
class Part:
    """A part of a batch on its way.

    Attributes:
        rows: int64 [n]: the rows of the batch.
        memory: where it arrives.
        future: uint8 [n], whether each row was served, once it has arrived.
        again: asks for the same once more, into other memory.
    """

    rows: Array
    memory: torch.Tensor
    future: concurrent.futures.Future[Array]
    again: Callable[[], Part]


class RemoteShard:
    """A shard whose rows come over a transport.

    Args:
        peer: what asks its node.
        name: of its table there.
        schema: of that table.
        one_sided: whether `peer` reads the table's memory itself, and so needs to know where the blocks are.
    """

    table = None

    def __init__(self, peer: Any, name: str, schema: Schema, *, one_sided: bool = False) -> None:
        self.peer = peer
        self.name = name
        self.schema = schema
        self.one_sided = one_sided
        self._specs: dict[tuple[Any, ...], WindowSpec] = {}

    def spec(self, windows: Mapping[str, Window]) -> WindowSpec:
        """What is asked for, the same object for the same windows."""
        key = tuple(windows.items())
        if key not in self._specs:
            self._specs[key] = WindowSpec(self.name, self.schema, windows)
        return self._specs[key]

    def start(
        self, windows: Mapping[str, Window], rows: Array, records: Array, staging: Staging
    ) -> list[Part]:
        """Ask for rows.

        Args:
            rows: int64 [n]: which rows of the batch they are. records: [n], as their owner described them.
        """
        spec = self.spec(windows)
        size = max(1, PART_BYTES // spec.row_bytes)
        ends = range(0, len(rows), size)
        return [self._ask(spec, rows[i : i + size], records[i : i + size], staging) for i in ends]

    def _ask(self, spec: WindowSpec, rows: Array, records: Array, staging: Staging) -> Part:
        memory = staging.take(spec.reply_bytes(len(rows)))
        names = (np.ascontiguousarray(records[field]) for field in ("slot", "step", "generation"))
        options = self._places(records) if self.one_sided else {}
        future = self.peer.fetch(spec, *names, memory.numpy(), **options)
        return Part(rows, memory, future, lambda: self._ask(spec, rows, records, staging))

    @staticmethod
    def _places(records: Array) -> dict[str, Array]:
        """Where the blocks of the rows' windows are, as `gear_loader.native.copying.resolve` writes it."""
        ids = np.ascontiguousarray(records["blocks"])
        extent: Array = np.empty((len(records), 2), dtype=np.int64)
        extent[:, 0] = records["steps"]
        extent[:, 1] = np.arange(len(records)) * ids.shape[1] - records["low"]
        return {"extent": extent, "block_ids": ids}
