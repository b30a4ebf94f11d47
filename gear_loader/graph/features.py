"""Features of nodes in a table: rows of single steps, gathered by node id."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.plans import Output, plans_of
from gear_loader.errors import SchemaError, UnknownNodeError
from gear_loader.graph.csr import checked_nodes, named
from gear_loader.kernels.plan import OUT
from gear_loader.native import neighbors, threads
from gear_loader.storage.reader import Snapshot, Ticket
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array
from gear_loader.utils.mutex import new_mutex

__all__ = ["Features"]


@dataclasses.dataclass(frozen=True)
class _Rows:
    """Which trajectories hold which nodes, at one version of the table.

    Attributes:
        version: of the index. sequences: int64 [T], of the trajectories, ascending.
        ends: int64 [T], running sum of their lengths. slots: int64 [T], -1 for one that has been removed.
    """

    version: int
    sequences: Array
    ends: Array
    slots: Array


class Features:
    """Features of nodes, which are the steps of a table: ``features[ids]`` gathers rows by node id.

    Node v is the step number v of all steps that were added, trajectory after trajectory: one trajectory can hold the
    features of all nodes, and every further `Table.add` adds nodes. A trajectory counts with the steps that it has when
    it is first seen. Nodes whose trajectory has been removed are unknown from then on, and the others keep their ids.

    Rows are read by the CPU's compiled gather under a read ticket, without a selector: no row is torn or of another
    trajectory. Several threads may read at once, and other processes may add meanwhile.

    Args:
        table: the table, of which each step is a node. `connect` and shards are not supported.
        columns: name of the column, whose rows ``features[ids]`` returns as a tensor; or several names, or None for
            all, which makes it a dict.

    Raises:
        SchemaError: not a table, a column that it does not have or that has one value per trajectory, or trajectories
            that were removed before, so that the ids of the others are not known.
    """

    def __init__(self, table: Table, columns: str | Sequence[str] | None = None) -> None:
        if not isinstance(table, Table):
            raise SchemaError(
                f"table is a {type(table).__name__}; expected a gear_loader.Table of this machine: features are read "
                "in place."
            )
        steps = table.schema.steps
        names = [columns] if isinstance(columns, str) else list(steps if columns is None else columns)
        if not names or not set(names) <= set(steps):
            raise SchemaError(
                f"columns is {columns!r}; expected some of {list(steps)}, the columns of the table's steps."
            )
        self.table = table
        self.columns = tuple(names)
        self._single = isinstance(columns, str)
        self._specs = [table.schema[name] for name in names]
        window = Window(1)
        outputs = [
            Output(name, window, torch.empty(1, 1, spec.step_bytes, dtype=torch.uint8, device="cpu"), None)
            for name, spec in zip(names, self._specs, strict=True)
        ]
        self._plan = plans_of(table, outputs).steps.table.numpy()
        self._row_bytes = sum(spec.step_bytes for spec in self._specs)
        self._block_steps = table.region.layout.block_steps
        self._mutex = new_mutex()
        self._rows = _Rows(-1, *(np.empty(0, dtype=np.int64) for _ in range(3)))
        ticket = Ticket()
        try:
            self._locate(ticket)
        finally:
            ticket.end()

    @property
    def num_nodes(self) -> int:
        """Number of nodes as of the last look at the table, of which some may have been removed."""
        ends = self._rows.ends
        return int(ends[-1]) if len(ends) else 0

    def __len__(self) -> int:
        return self.num_nodes

    def __repr__(self) -> str:
        shapes = ", ".join(
            f"{name} {list(spec.shape)} {spec.dtype}"
            for name, spec in zip(self.columns, self._specs, strict=True)
        )
        return f"Features({self.num_nodes:,} nodes, {shapes})"

    def __getitem__(self, ids: Any) -> Any:
        """Features of nodes.

        Args:
            ids: integers [n], tensor, array or list; repetitions are allowed.

        Returns:
            Tensor ``[n, *shape]`` on the CPU, in new memory, in the order of `ids`; or column name -> such a tensor.

        Raises:
            UnknownNodeError: the table has no such node; the message names them. SchemaError: no integers [n].
            GearError: the table is closed.
        """
        self.table.check_open()
        nodes = checked_nodes("ids", ids)
        count = len(nodes)
        outs = [torch.empty(count, *spec.shape, dtype=spec.dtype, device="cpu") for spec in self._specs]
        if count:
            places = np.empty((2, count), dtype=np.int64)
            plan = self._plan.copy()
            plan[:, OUT] = [out.data_ptr() for out in outs]
            ticket = Ticket()
            try:
                rows = self._locate(ticket)
                if neighbors.locate_rows(nodes, rows.ends, rows.slots, *places):
                    raise self._unknown(nodes[places[0] < 0])
                reader = self.table.reader()
                extent, block_ids = reader.index_arrays()
                bad = threads.gather(
                    plan, places[0], places[1], extent, block_ids, self._block_steps, self._row_bytes
                )
                reader.check_gathered(bad)
            finally:
                ticket.end()
        return outs[0] if self._single else dict(zip(self.columns, outs, strict=True))

    def _unknown(self, nodes: Array) -> UnknownNodeError:
        return UnknownNodeError(
            f"ids has {named(nodes)}, which the table does not hold: it has been given {self.num_nodes:,} nodes, "
            "numbered from 0, and those of trajectories that were removed are gone."
        )

    def _locate(self, ticket: Ticket) -> _Rows:
        """Begin a read; the trajectories as of now."""
        _, snapshot = self.table.reader().begin_snapshot(ticket=ticket)
        if snapshot.version > self._rows.version:
            with self._mutex:
                if snapshot.version > self._rows.version:
                    self._rows = _followed(self._rows, snapshot)
        # Perhaps newer than the ticket, which keeps what was live at any time since it began.
        return self._rows


def _followed(rows: _Rows, snapshot: Snapshot) -> _Rows:
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
    ends = rows.ends[-1:].sum() + np.cumsum(snapshot.lengths[new:])
    return _Rows(
        snapshot.version, np.concatenate((rows.sequences, added)), np.concatenate((rows.ends, ends)), slots
    )
