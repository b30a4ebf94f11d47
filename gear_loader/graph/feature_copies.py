"""Copies of the rows of some nodes: in a device's memory, or in a private table in host memory."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Literal

import numpy as np
import torch

from gear_loader.graph.table_rows import TableRows
from gear_loader.native import neighbor_loops
from gear_loader.storage.schema import Column
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array


@dataclasses.dataclass(frozen=True, eq=False)
class FeatureCopies:
    """Rows of some nodes, which do not change.

    Attributes:
        tier: "device" or "replica". nodes: int64 [C]. places: int32 [N], row of each node, -1 for none.
        columns: of a device, ``[C, *shape]`` each. table: of host memory.
    """

    tier: Literal["device", "replica"]
    nodes: Array
    places: Array
    columns: tuple[torch.Tensor, ...] = ()
    table: TableRows | None = None

    @classmethod
    def on_device(cls, nodes: Array, columns: Sequence[torch.Tensor]) -> FeatureCopies | None:
        """A cache of rows on their device; None without nodes."""
        return cls("device", nodes, _places(nodes), tuple(columns)) if len(nodes) else None

    @classmethod
    def in_table(cls, nodes: Array, columns: Mapping[str, torch.Tensor]) -> FeatureCopies | None:
        """A cache of rows in a private table, into which they are copied; None without nodes."""
        if not len(nodes):
            return None
        schema = {name: Column(rows.dtype, tuple(rows.shape[1:])) for name, rows in columns.items()}
        table = Table.create(schema, max_steps=len(nodes), max_trajectories=1)
        table.add(dict(columns))
        return cls("replica", nodes, _places(nodes), table=TableRows(table, list(columns)))

    def divide(self, nodes: Array) -> tuple[Array, Array, Array]:
        """Positions in `nodes` (int64 [n]) of those that are here, their rows, and positions of the others."""
        found, where, missed = np.empty((3, len(nodes)), dtype=np.int64)
        hits = neighbor_loops.cached_rows(nodes, self.places, found, where, missed)
        return found[:hits], where[:hits], missed[: len(nodes) - hits]

    def copy(self, rows: Array, outs: Sequence[torch.Tensor], into: Array) -> None:
        """Copy rows (int64 [n]) of the cache into rows `into` of tensors. Does not wait for a GPU, but for its own."""
        if self.table is None:
            device = self.columns[0].device
            chosen, target = (torch.from_numpy(each).to(device) for each in (rows, into))
            for out, column in zip(outs, self.columns, strict=True):
                out.index_copy_(0, target, column.index_select(0, chosen))
        elif outs[0].device.type == "cpu":
            self.table.gather(rows, rows, outs, into)
        else:
            device = outs[0].device
            parts = [
                torch.empty(len(rows), *out.shape[1:], dtype=out.dtype, device="cpu", pin_memory=True)
                for out in outs
            ]
            self.table.gather(rows, rows, parts)
            target = torch.from_numpy(into).to(device)
            for out, part in zip(outs, parts, strict=True):
                out.index_copy_(0, target, part.to(device, non_blocking=True))

    def without(self, gone: Array) -> FeatureCopies:
        """The cache without the nodes where `gone`, bool [C], is True."""
        if not gone.any():
            return self
        places = self.places.copy()
        places[self.nodes[gone]] = -1
        return dataclasses.replace(self, places=places)


def _places(nodes: Array) -> Array:
    places = np.full(int(nodes.max()) + 1, -1, dtype=np.int32)
    places[nodes] = np.arange(len(nodes), dtype=np.int32)
    return places
