"""Rows of the tables of all ranks by node id: which table holds a node, and requests to other nodes' servers."""

from __future__ import annotations

import dataclasses
import time
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.buffers import Staging
from gear_loader.distributed.failures import run_on_all
from gear_loader.distributed.records import max_window_blocks, record_dtype
from gear_loader.distributed.remote import RemoteShard, RowRequest
from gear_loader.distributed.shards import Shards
from gear_loader.distributed.shards_state import share_state
from gear_loader.errors import SchemaError
from gear_loader.graph.csr import checked_nodes
from gear_loader.graph.table_rows import TableRows, unknown_nodes
from gear_loader.storage.index_arrays import ranges
from gear_loader.storage.schema import Window
from gear_loader.storage.selected_rows import Reach
from gear_loader.utils.arrays import Array

_LARGEST = 2**31 - 1  # nodes


@dataclasses.dataclass(frozen=True)
class Homes:
    """Where each node's row is: int32 [N] number of the source, -1 for none; int64 [N] number of the row in it."""

    source: Array
    number: Array


@dataclasses.dataclass
class Pending:
    """Requested rows, with positions in the request as their rows, and what an error needs."""

    requests: list[RowRequest]
    nodes: Array
    into: Array


class RemoteRows:
    """Rows of a table on another node, as of the construction of `Features`.

    Args:
        shards: the sharded table. shard: number of the shard. columns: names.
        index: int64 [4, T] of the trajectories: slot, generation, steps, final steps; by their order of addition.
        block_ids: int32 [H], the blocks of their steps, one trajectory after another.
    """

    def __init__(
        self, shards: Shards, shard: int, columns: Sequence[str], index: Array, block_ids: Array
    ) -> None:
        source = shards.source(shard)
        assert isinstance(source, RemoteShard)
        self._shards, self._shard, self._source = shards, shard, source
        self._windows = {name: Window(1) for name in columns}
        self._columns = tuple(columns)
        self._index, self._block_ids = index, block_ids
        self._ends = np.cumsum(index[2])
        self._steps_of_block = shards.block_steps[shard]
        blocks = -(-(index[2] + index[3]) // self._steps_of_block)
        self._first_block = np.cumsum(blocks) - blocks
        self._staging = Staging(pinned=False)

    @property
    def count(self) -> int:
        """Number of rows."""
        return int(self._ends[-1]) if len(self._ends) else 0

    def start(self, numbers: Array, nodes: Array, into: Array) -> Pending:
        """Request rows (int64 [n], below `count`), which `finish` puts into rows `into` of tensors."""
        at = np.searchsorted(self._ends, numbers, side="right")
        slots, generations, steps, finals = self._index[:, at]
        width = max_window_blocks(Reach(0, 0), [self._steps_of_block]) if self._source.one_sided else 0
        records = np.zeros(len(numbers), dtype=record_dtype(width))
        records["slot"], records["generation"] = slots, generations
        records["step"] = numbers - (self._ends[at] - steps)
        if width:
            records["steps"], records["final"] = steps, finals
            records["low"] = records["step"] // self._steps_of_block
            records["blocks"][:, 0] = self._block_ids[self._first_block[at] + records["low"]]
        requests = self._source.start(self._windows, np.arange(len(numbers)), records, self._staging)
        return Pending(requests, nodes, into)

    def finish(self, pending: Pending, outs: Sequence[torch.Tensor]) -> None:
        """Wait for requested rows, and copy them into tensors on the CPU.

        Raises:
            TransportError: the node did not answer. UnknownNodeError: it does not hold the rows any more.
        """
        spec = self._source.spec(self._windows)
        end = time.monotonic() + self._shards.rows_timeout
        by_name = dict(zip(self._columns, outs, strict=True))
        gone: list[Array] = []
        for request in pending.requests:
            part, status = request.wait(end)
            count = len(part.rows)
            for piece in spec.pieces(count):
                if piece.kind == "column":
                    out = by_name[piece.name]
                    values = part.memory[piece.offset : piece.offset + count * piece.row_bytes]
                    rows = torch.from_numpy(np.ascontiguousarray(pending.into[part.rows]))
                    out[rows] = values.view(out.dtype).view(count, *out.shape[1:])
            gone.append(part.rows[np.flatnonzero(status)])
            self._staging.give(part.memory)
        missing = np.concatenate(gone) if gone else np.empty(0, dtype=np.int64)
        if len(missing):
            raise unknown_nodes(pending.nodes[missing], self.count)


def homes_of(numbers_of: Sequence[Array], preferred: Sequence[int]) -> Homes:
    """Where each node's row is.

    Args:
        numbers_of: for each source, int64 [n], the nodes of its rows in their order. preferred: the sources, those
            first that a node which several have is read from.

    Raises:
        SchemaError: a node that one source has twice.
    """
    size = 1 + max((int(nodes.max()) for nodes in numbers_of if len(nodes)), default=-1)
    if size > _LARGEST:
        raise SchemaError(
            f"nodes has {size - 1:,}; expected node ids below {_LARGEST:,}, the most of a graph."
        )
    source, number = np.full(size, -1, dtype=np.int32), np.zeros(size, dtype=np.int64)
    for each in reversed(preferred):
        nodes = numbers_of[each]
        if len(np.unique(nodes)) < len(nodes):
            raise SchemaError(
                "nodes has a node twice; expected distinct node ids, one for each row of a table."
            )
        source[nodes], number[nodes] = each, np.arange(len(nodes))
    return Homes(source, number)


def join(shards: Shards, columns: Sequence[str], nodes: Any) -> tuple[list[TableRows | RemoteRows], Homes]:
    """The sources of all shards' rows, and where each node is. All ranks call it at the same time.

    Args:
        shards: with one pipeline stage. columns: names. nodes: int64 [n], node ids of this rank's rows; None on all
            ranks: rows are numbered shard after shard.

    Raises:
        SchemaError: several stages, or nodes that are not ids of this rank's rows. RankError: another rank has failed.
    """
    own: list[TableRows] = []
    given: Array | None = None
    mine: dict[int, list[torch.Tensor]] = {}

    def introduce() -> dict[str, Any]:
        nonlocal given
        if shards.num_stages > 1:
            raise SchemaError(
                f"Shards have {shards.num_stages} pipeline stages; expected one for gear_loader.Features."
            )
        own.extend(TableRows(table, columns) for table in shards.own.values())
        if nodes is not None:
            if len(own) != 1:
                raise SchemaError(
                    "nodes was given for several tables of one process; expected one table a rank."
                )
            given = checked_nodes("nodes", nodes)
            rows = own[0].look().count
            if len(given) != rows or (len(given) and given.min() < 0):
                raise SchemaError(
                    f"nodes has {len(given):,} ids from {given.min(initial=0)} on; expected one, at least 0, for each "
                    f"of the {rows:,} rows of this rank's table."
                )
        for shard, source in zip(shards.own, own, strict=True):
            mine[shard] = _described(shard, source, given)
        return {"given": given is not None, "shards": list(shards.own)}

    answers = run_on_all("number its nodes", introduce, shards.exchange.share, range(shards.exchange.size))
    if len({answer["given"] for answer in answers}) > 1:
        raise SchemaError("nodes was given on some ranks only; expected it on all of them, or on none.")
    shared: dict[int, list[Array]] = {}
    for each in share_state(shards.exchange, mine):
        shared |= {shard: [part.numpy() for part in parts] for shard, parts in each.items()}
    sources: list[TableRows | RemoteRows] = []
    for shard in range(shards.num_shards):
        table, (index, block_ids, _) = shards.source(shard), shared[shard]
        if isinstance(table, RemoteShard):
            sources.append(RemoteRows(shards, shard, columns, index, block_ids))
        else:
            known = [rows for rows in own if rows.table is table]
            sources.append(known[0] if known else TableRows(table, columns))
    if answers[0]["given"]:
        numbers_of = [shared[shard][2] for shard in range(shards.num_shards)]
    else:
        counts = [int(shared[shard][0][2].sum()) for shard in range(shards.num_shards)]
        numbers_of = [np.arange(count) + sum(counts[:shard]) for shard, count in enumerate(counts)]
    near = [i for i in range(shards.num_shards) if isinstance(sources[i], TableRows)]
    order = [*shards.own, *(i for i in near if i not in shards.own)]
    return sources, homes_of(numbers_of, [*order, *(i for i in range(shards.num_shards) if i not in order)])


def _described(shard: int, rows: TableRows, nodes: Array | None) -> list[torch.Tensor]:
    """Index of a shard's trajectories and their blocks, as `RemoteRows` takes them, and node ids of its rows."""
    found = rows.look()
    live = found.slots >= 0
    if not live.all():
        raise SchemaError(
            f"{int((~live).sum())} trajectories of shard {shard} were removed; expected a table from which none was."
        )
    reader = rows.table._engine.reader()
    extent, block_ids = reader.index_arrays()
    of = extent[found.slots]
    index = np.stack((found.slots, found.generations, of[:, 0], of[:, 2]))
    blocks = -(-(of[:, 0] + of[:, 2]) // rows.table._engine.region.layout.block_steps)
    # Of a table with a disk tier nobody reads blocks by their numbers: trajectories have others when they come back.
    starts = np.zeros_like(blocks) if rows.table._engine.has_tier else of[:, 1]
    ids = np.empty(0, dtype=np.int64) if nodes is None else nodes
    return [torch.from_numpy(part) for part in (index, block_ids[ranges(starts, blocks)], ids)]
