"""Rows of one table of this machine by their number: located, and gathered on the CPU or by a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.chosen import RowGather
from gear_loader.collection.plans import Output, Plans, plans_of
from gear_loader.collection.tier_rows import resolve
from gear_loader.errors import SchemaError, UnknownNodeError
from gear_loader.graph.csr import named
from gear_loader.native import neighbor_loops
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Window
from gear_loader.storage.selected_rows import Reach
from gear_loader.storage.snapshot import Snapshot
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import new_mutex

_WINDOW = Window(1)
_REACH = Reach(0, 0)
_SCRATCH_BYTES = 64 << 20
"""Most bytes that one launch gathers on a GPU; more rows take several launches."""


@dataclasses.dataclass(frozen=True)
class RowIndex:
    """Which trajectories hold which rows, at one version of the table.

    Attributes:
        version: of the index. sequences, generations: int64 [T], of the trajectories, ascending by sequence.
        ends: int64 [T], running sum of their lengths. slots: int64 [T], -1 for one that has been removed.
    """

    version: int
    sequences: Array
    generations: Array
    ends: Array
    slots: Array

    @property
    def count(self) -> int:
        """Number of rows so far, with those of trajectories that have been removed."""
        return int(self.ends[-1]) if len(self.ends) else 0

    def locate(self, numbers: Array) -> tuple[Array, Array, int]:
        """Slots and steps of rows, int64 [n] each, slot -1 for one that is unknown; and how many are unknown."""
        places = np.empty((2, len(numbers)), dtype=np.int64)
        missing = neighbor_loops.locate_rows(numbers, self.ends, self.slots, *places)
        return places[0], places[1], int(missing)


class TableRows:
    """Gathers rows of some columns of a table; several threads may do so at once.

    Args:
        table: of this machine. columns: names of columns of its steps.

    Attributes:
        row_bytes: bytes of a row over all columns.

    Raises:
        SchemaError: trajectories were removed before, so that the numbers of the others are not known; or the table
            lies on a GPU.
    """

    def __init__(self, table: Table, columns: Sequence[str]) -> None:
        if table._engine.device is not None:
            raise SchemaError(
                f"{table!r} was given; expected a table in host memory, which a GPU reads too: create it without "
                "device=."
            )
        self.table, self.columns = table, tuple(columns)
        self._gather = RowGather(table, dict.fromkeys(columns, _WINDOW))
        self.row_bytes = self._gather.row_bytes
        self._mutex = new_mutex()
        self._rows = RowIndex(-1, *(np.empty(0, dtype=np.int64) for _ in range(4)))
        self.look()

    def look(self) -> RowIndex:
        """The rows that the table holds now."""
        known = self.table._engine.reader().known()
        if known is None or known.version != self._rows.version:
            ticket = Ticket()
            ticket.during(lambda: self.begin(ticket))
        return self._rows

    def begin(self, ticket: Ticket) -> RowIndex:
        """Begin a read; the rows as of now. The caller ends the ticket."""
        _, snapshot = self.table._engine.reader().begin_snapshot(ticket=ticket)
        if snapshot.version > self._rows.version:
            with self._mutex:
                if snapshot.version > self._rows.version:
                    self._rows = _followed(self._rows, snapshot)
        # Perhaps newer than the ticket, which keeps what was live at any time since it began.
        return self._rows

    def gather(
        self, numbers: Array, nodes: Array, outs: Sequence[torch.Tensor], into: Array | None = None
    ) -> int:
        """Fill rows of tensors on the CPU.

        Args:
            numbers: int64 [n], of the rows in the table. nodes: int64 [n], their node ids, for errors.
            outs: contiguous ``[m, *shape]`` for each column.
            into: int64 [n], distinct, row of `outs` for each; None: row i for number i.

        Returns:
            How many of the rows were read from disk.

        Raises:
            UnknownNodeError: the table does not hold such a row. CheckpointError: it cannot be read from disk.
        """
        if not len(numbers):
            return 0
        ticket = Ticket()
        return ticket.during(lambda: self._gather_rows(ticket, numbers, nodes, outs, into))

    def _gather_rows(
        self, ticket: Ticket, numbers: Array, nodes: Array, outs: Sequence[torch.Tensor], into: Array | None
    ) -> int:
        """`gather` under a ticket, which it begins."""
        rows = self.begin(ticket)
        slots, steps, missing = rows.locate(numbers)
        if missing:
            raise unknown_nodes(nodes[slots < 0], rows.count)

        def generations() -> Array:
            found = np.zeros(int(rows.slots.max()) + 1, dtype=np.int64)
            live = rows.slots >= 0
            found[rows.slots[live]] = rows.generations[live]
            of_rows: Array = found[slots]
            return of_rows

        return self._gather.gather(slots, steps, generations, outs, into=into)

    def on_disk(self, numbers: Array) -> Array:
        """Which rows lie on disk only now, bool [n]; those that are unknown do not."""
        slots, _, _ = self.look().locate(numbers)
        if self._gather.tier is None:
            return np.zeros(len(numbers), dtype=bool)
        found: Array = self._gather.tier.outside(np.maximum(slots, 0)) & (slots >= 0)
        return found


def _followed(rows: RowIndex, snapshot: Snapshot) -> RowIndex:
    """`rows` after changes of the table.

    Raises:
        SchemaError: trajectories that were not seen have been removed.
    """
    known = len(rows.sequences)
    new = int(np.searchsorted(snapshot.sequences, rows.sequences[-1], side="right")) if known else 0
    following = int(rows.sequences[-1]) + 1 if known else 0
    added = snapshot.sequences[new:]
    if len(added) and int(added[-1]) - following + 1 != len(added):
        raise SchemaError(
            f"The table holds {len(added)} of the trajectories {following} to {added[-1]}: others have been removed "
            "before gear_loader.Features saw them, so the ids of nodes are not known. Make it before trajectories are "
            "removed, or add the features to a new table."
        )
    slots = np.full(known + len(added), -1, dtype=np.int64)
    slots[np.searchsorted(rows.sequences, snapshot.sequences[:new])] = snapshot.slots[:new]
    slots[known:] = snapshot.slots[new:]
    return RowIndex(
        snapshot.version,
        np.concatenate((rows.sequences, added)),
        np.concatenate((rows.generations, snapshot.generations[new:])),
        np.concatenate((rows.ends, rows.ends[-1:].sum() + np.cumsum(snapshot.lengths[new:]))),
        slots,
    )


def unknown_nodes(nodes: Array, count: int) -> UnknownNodeError:
    """The error for node ids (int64 [n]) that no table holds; `count` rows were added so far."""
    return UnknownNodeError(
        f"ids has {named(nodes)}, which the table does not hold: it has been given {count:,} nodes, "
        "numbered from 0, and those of trajectories that were removed are gone."
    )


class DeviceGather:
    """Gathers rows of a table by the zero-copy kernels, on a device that reads host memory.

    Rows go through scratch memory of at most 64 MiB, one for each stream. The caller holds a read ticket until the
    device is through.

    Args:
        rows: of the table, whose region is pinned if the device is a GPU. device: the device.
        gather, split: the kernels; by default those of `gear_loader.kernels` on a GPU, and their twins on the CPU.
    """

    def __init__(
        self,
        rows: TableRows,
        device: torch.device,
        *,
        gather: Callable[..., None] | None = None,
        split: Callable[..., None] | None = None,
    ) -> None:
        from gear_loader.kernels import gather as kernel
        from gear_loader.kernels import reference
        from gear_loader.kernels import split as splitting

        cuda = device.type == "cuda"
        self.rows, self.device = rows, device
        self._gather: Callable[..., None] = gather or (kernel.gather if cuda else reference.gather)
        self._split: Callable[..., None] = split or (splitting.split if cuda else reference.split)
        self._most = max(1, _SCRATCH_BYTES // rows.row_bytes)
        self._mutex = new_mutex()
        self._scratch: dict[tuple[int, int], tuple[list[torch.Tensor], Plans, torch.Tensor]] = {}

    def gather(
        self, slots: Array, steps: Array, outs: Sequence[torch.Tensor], into: Array | None = None
    ) -> None:
        """Queue the gather of rows on the current stream; see `TableRows.gather`.

        Args:
            slots, steps: int64 [n], from `RowIndex.locate`. outs: on the device.
        """
        into = np.arange(len(slots)) if into is None else into
        for first in range(0, len(slots), self._most):
            part = slice(first, first + self._most)
            self._gather_part(slots[part], steps[part], outs, into[part])

    def _gather_part(self, slots: Array, steps: Array, outs: Sequence[torch.Tensor], into: Array) -> None:
        count, cuda = len(slots), self.device.type == "cuda"
        host: list[Any] = [
            torch.empty(count, 3, dtype=torch.int64, device="cpu", pin_memory=cuda),
            torch.empty(count, 1, dtype=torch.int32, device="cpu", pin_memory=cuda),
            torch.empty(2, count, dtype=torch.int64, device="cpu", pin_memory=cuda),
        ]
        resolve(self.rows.table, slots, steps, _REACH, host[0].numpy(), host[1].numpy())
        host[2].numpy()[:] = steps, into
        extent, ids, (anchors, targets) = (part.to(self.device, non_blocking=True) for part in host)
        stream = torch.cuda.current_stream(self.device).cuda_stream if cuda else 0
        with self._mutex:  # scratch memory is used by one launch after another of a stream
            memory, plans, numbers = self._memory(stream, count)
            self._gather(plans.steps, numbers[:count], anchors, extent, ids.view(-1))
            if plans.split is not None:
                self._split(plans.split, count)
            for out, part in zip(outs, memory, strict=True):
                out.index_copy_(0, targets, part[:count, 0])

    def _memory(self, stream: int, count: int) -> tuple[list[torch.Tensor], Plans, torch.Tensor]:
        """Scratch tensors ``[capacity, 1, *shape]`` of a stream, the plans that fill them, and 0 to capacity - 1."""
        capacity = min(self._most, max(256, 1 << (count - 1).bit_length()))
        if (stream, capacity) not in self._scratch:
            schema = self.rows.table.schema
            memory = [
                torch.empty(capacity, 1, *schema[name].shape, dtype=schema[name].dtype, device=self.device)
                for name in self.rows.columns
            ]
            outputs = [
                Output(name, _WINDOW, part.view(capacity, 1, -1).view(torch.uint8), None)
                for name, part in zip(self.rows.columns, memory, strict=True)
            ]
            plans = plans_of(self.rows.table, outputs, {})
            numbers = torch.arange(capacity, device="cpu").to(self.device)
            # One size at a time: a larger one takes the place of smaller ones.
            for key in [key for key in self._scratch if key[0] == stream and key[1] < capacity]:
                del self._scratch[key]
            self._scratch[stream, capacity] = memory, plans, numbers
        return self._scratch[stream, capacity]
