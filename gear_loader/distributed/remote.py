"""Rows of a shard on another node: fetched in parts, into reused staging memory."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import threading
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.storage.schema import Schema, Window
from gear_loader.transport.message_schema import ALIGNMENT
from gear_loader.transport.spec import WindowSpec
from gear_loader.utils.arrays import Array

__all__ = ["Part", "RemoteShard", "Staging"]

PART_BYTES = 1 << 20
"""Bytes of a request: while the server sends one part it gathers the next one, and the client places the last."""
_HERE = 1 << 24
"""Most bytes that are asked for at a time and received by the thread that waits for them. It gathers the rows of this
node first; meanwhile the buffers of the sockets fill (by default up to 6 MiB on Linux). More is received by the thread
of the event loop as it arrives."""


class Staging:
    """A pool of staging buffers: uint8 tensors.

    Args:
        pinned: whether the buffers are in pinned memory, which a GPU can read.
    """

    def __init__(self, *, pinned: bool) -> None:
        self._pinned = pinned
        self._free: list[torch.Tensor] = []
        self._lock = threading.Lock()

    def take(self, size: int) -> torch.Tensor:
        """Take a buffer of at least `size` bytes out of the pool."""
        with self._lock:
            for i, tensor in enumerate(self._free):
                if len(tensor) >= size:
                    return self._free.pop(i)
            if self._free:  # the buffers are too small by now
                self._free.pop()
        memory = torch.empty(size + ALIGNMENT, dtype=torch.uint8, device="cpu", pin_memory=self._pinned)
        first = -memory.data_ptr() % ALIGNMENT
        return memory[first : first + size]

    def give(self, tensor: torch.Tensor) -> None:
        """Return a buffer that is no longer read or written to the pool."""
        with self._lock:
            self._free.append(tensor)


@dataclasses.dataclass
class Part:
    """A requested part of a batch.

    Attributes:
        rows: rows of the batch, int64 [n].
        memory: staging memory of the reply.
        future: status of each row, uint8 [n]: 0 where the row was served.
        again: repeats the request, into other memory.
    """

    rows: Array
    memory: torch.Tensor
    future: concurrent.futures.Future[Array]
    again: Callable[[], Part]


class RemoteShard:
    """A shard whose rows come over a transport.

    Args:
        peer: connection to its node.
        name: name of its table there.
        schema: columns of that table.
        one_sided: whether `peer` reads the table's memory itself, by the blocks of the records.
    """

    table = None

    def __init__(self, peer: Any, name: str, schema: Schema, *, one_sided: bool = False) -> None:
        self.peer = peer
        self.name = name
        self.schema = schema
        self.one_sided = one_sided
        self._specs: dict[tuple[Any, ...], WindowSpec] = {}

    def spec(self, windows: Mapping[str, Window]) -> WindowSpec:
        """Return the request's windows, the same object for the same windows."""
        key = tuple(windows.items())
        if key not in self._specs:
            self._specs[key] = WindowSpec(self.name, self.schema, windows)
        return self._specs[key]

    def start(
        self, windows: Mapping[str, Window], rows: Array, records: Array, staging: Staging
    ) -> list[Part]:
        """Request rows; return the parts.

        Args:
            windows: window of each column.
            rows: rows of the batch, int64 [n].
            records: row records of these rows, [n].
            staging: pool of the parts' memory.
        """
        spec = self.spec(windows)
        size = max(1, PART_BYTES // spec.row_bytes)
        ends = range(0, len(rows), size)
        here = self.receives_here(spec.row_bytes * len(rows))
        return [self._ask(spec, rows[i : i + size], records[i : i + size], staging, here) for i in ends]

    def receives_here(self, size: int) -> bool:
        """Whether so many bytes are received by the thread that waits for them; see `Peer.fetch`."""
        return not self.one_sided and size <= _HERE

    def _ask(self, spec: WindowSpec, rows: Array, records: Array, staging: Staging, here: bool) -> Part:
        memory = staging.take(spec.reply_bytes(len(rows)))
        keys = (np.ascontiguousarray(records[field]) for field in ("slot", "step", "generation"))
        options: dict[str, Any] = self._places(records) if self.one_sided else {"here": here}
        future = self.peer.fetch(spec, *keys, memory.numpy(), **options)
        return Part(rows, memory, future, lambda: self._ask(spec, rows, records, staging, here))

    @staticmethod
    def _places(records: Array) -> dict[str, Array]:
        """Return the blocks of the rows' windows, as `gear_loader.native.gathering.resolve` returns them."""
        ids = np.ascontiguousarray(records["blocks"])
        extent: Array = np.empty((len(records), 3), dtype=np.int64)
        extent[:, 0], extent[:, 2] = records["steps"], records["final"]
        extent[:, 1] = np.arange(len(records)) * ids.shape[1] - records["low"]
        return {"extent": extent, "block_ids": ids}
