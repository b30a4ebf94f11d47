"""A graph in compressed rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch

from gear_loader.errors import RegionError, SchemaError, UnknownNodeError
from gear_loader.native import neighbor_loops
from gear_loader.utils.arrays import Array, as_array
from gear_loader.utils.available_memory import available_bytes
from gear_loader.utils.checks import at_least

_LARGEST = 2**31 - 1  # nodes: their ids are int32


class Graph:
    """A directed graph: for each node the nodes that its messages come from, its neighbours.

    Args:
        indptr: int64 [N + 1], ascending from 0 to E: where each node's neighbours begin in `indices`.
        indices: int32 [E], neighbours. Both contiguous CPU tensors, which are not copied and must not change.

    Attributes:
        indptr, indices: as given.

    Raises:
        SchemaError: another dtype, shape or device, or values that are not those of a graph.
    """

    def __init__(self, indptr: torch.Tensor, indices: torch.Tensor) -> None:
        for name, tensor, dtype in (("indptr", indptr, torch.int64), ("indices", indices, torch.int32)):
            if not isinstance(tensor, torch.Tensor):
                raise SchemaError(f"{name} is a {type(tensor).__name__}; expected a {dtype} tensor.")
            if tensor.dtype != dtype or tensor.ndim != 1 or not tensor.is_cpu or not tensor.is_contiguous():
                raise SchemaError(
                    f"{name} is {tensor.dtype} {list(tensor.shape)} on {tensor.device}; expected contiguous {dtype} "
                    "with one dimension on the CPU. Graph.from_edge_index makes both from edges."
                )
        starts = indptr.numpy()
        if len(starts) < 1 or starts[0] != 0 or starts[-1] != len(indices) or (np.diff(starts) < 0).any():
            raise SchemaError(
                f"indptr [{len(starts)}] does not ascend from 0 to {len(indices)}, the length of indices."
            )
        ends = indices.numpy()
        if len(ends) and not 0 <= int(ends.min()) <= int(ends.max()) < len(starts) - 1:
            raise SchemaError(
                f"indices has nodes from {ends.min()} to {ends.max()}; expected 0 to {len(starts) - 2}, by the length "
                "of indptr."
            )
        self.indptr, self.indices = indptr, indices

    @classmethod
    def from_edge_index(cls, edge_index: Any, *, num_nodes: int | None = None) -> Graph:
        """Make a graph of edges as PyTorch Geometric has them.

        Args:
            edge_index: integers [2, E], tensor or array: source and target of each edge; messages flow from source to
                target. Parallel edges stay apart, and each can be drawn.
            num_nodes: N; by default the largest node id plus one.

        Raises:
            SchemaError: not of this form, or an edge with an end that is not from 0 to N - 1. The message names it.
            RegionError: the graph does not fit into the memory that is available; nothing was allocated.
        """
        edges = np.asarray(as_array(edge_index, "edge_index"))
        if edges.ndim != 2 or edges.shape[0] != 2 or edges.dtype.kind not in "iu":
            raise SchemaError(f"edge_index is {edges.dtype} {list(edges.shape)}; expected integers [2, E].")
        if num_nodes is None:
            num_nodes = int(edges.max(initial=-1)) + 1
        num_nodes = at_least("num_nodes", num_nodes, 0)
        if num_nodes > _LARGEST:
            raise SchemaError(f"num_nodes is {num_nodes:,}; expected at most {_LARGEST:,}.")
        size = edges.shape[1]
        copies = sum(edges.dtype != np.int64 or not part.flags.c_contiguous for part in edges)
        _check_room(8 * (2 * num_nodes + 1) + 4 * size + 8 * size * copies, num_nodes, size)
        sources, targets = (np.ascontiguousarray(part, dtype=np.int64) for part in edges)
        indptr, indices = np.empty(num_nodes + 1, dtype=np.int64), np.empty(len(sources), dtype=np.int32)
        wrong = neighbor_loops.compress(sources, targets, indptr, indices)
        if wrong >= 0:
            raise SchemaError(
                f"Edge {wrong} is from {sources[wrong]} to {targets[wrong]}; expected nodes from 0 to {num_nodes - 1}."
            )
        return cls(torch.from_numpy(indptr), torch.from_numpy(indices))

    @property
    def num_nodes(self) -> int:
        """Number of nodes."""
        return len(self.indptr) - 1

    @property
    def num_edges(self) -> int:
        """Number of edges."""
        return len(self.indices)

    def degrees(self) -> Array:
        """Number of neighbours of each node, int64 [N]."""
        return np.diff(self.indptr.numpy())

    def out_degrees(self) -> Array:
        """Number of nodes that have each node as a neighbour, int64 [N]."""
        return np.bincount(self.indices.numpy(), minlength=self.num_nodes)

    def pin_memory(self) -> Graph:
        """A copy in pinned memory, which a GPU can read.

        Raises:
            SchemaError: torch sees no CUDA device.
        """
        if not torch.cuda.is_available():
            raise SchemaError(
                "Pinned memory was asked for, but torch sees no CUDA device; leave pin_memory away."
            )
        return Graph(self.indptr.pin_memory(), self.indices.pin_memory())

    def share_memory_(self) -> Graph:
        """Move the graph to shared memory: processes that it is sent to by `torch.multiprocessing` do not copy it.

        Returns:
            The graph itself.
        """
        self.indptr.share_memory_()
        self.indices.share_memory_()
        return self

    def __repr__(self) -> str:
        return f"Graph({self.num_nodes:,} nodes, {self.num_edges:,} edges)"


def _check_room(count: int, num_nodes: int, num_edges: int) -> None:
    """Raise RegionError if so many bytes, for a graph of this size, are more than is available to this process."""
    available = available_bytes()
    if available is not None and count > available:
        raise RegionError(
            f"A graph of {num_nodes:,} nodes and {num_edges:,} edges takes {count / 2**30:,.1f} GiB to make, and "
            f"{available / 2**30:,.1f} GiB of memory are available. Give edge_index as contiguous int64, which is not "
            "copied, leave nodes or edges out, or use a machine with more memory."
        )


def checked_nodes(name: str, nodes: Any, num_nodes: int | None = None) -> Array:
    """Return node ids as contiguous int64 [n].

    Args:
        name: of the argument, for errors. nodes: integers [n], tensor, array or list.
        num_nodes: of the graph; None leaves the range to the caller.

    Raises:
        SchemaError: not integers of one dimension. UnknownNodeError: an id outside 0 to num_nodes - 1.
    """
    values = np.asarray(as_array(nodes, name))
    if values.ndim != 1 or (values.dtype.kind not in "iu" and len(values)):
        raise SchemaError(f"{name} is {values.dtype} {list(values.shape)}; expected node ids, integers [n].")
    values = np.ascontiguousarray(values, dtype=np.int64)
    if num_nodes is not None and len(values):
        outside = values[(values < 0) | (values >= num_nodes)]
        if len(outside):
            raise unknown(name, outside, num_nodes)
    return values


def unknown(name: str, outside: Array, num_nodes: int) -> UnknownNodeError:
    """The error for ids (int64 [n]) that are no nodes of a graph."""
    return UnknownNodeError(
        f"{name} has {named(outside)}, which the graph does not have; expected 0 to {num_nodes - 1}."
    )


def check_distinct(seeds: Array) -> None:
    """Raise SchemaError for seeds (int64 [n]) of which some are equal."""
    if len(np.unique(seeds)) < len(seeds):
        raise repeated(seeds)


def repeated(seeds: Array) -> SchemaError:
    """The error for seeds (int64 [n]) of which some are equal."""
    distinct, counts = np.unique(seeds, return_counts=True)
    return SchemaError(
        f"seeds has {named(distinct[counts > 1])} more than once; expected distinct nodes. numpy.unique with "
        "return_inverse=True gives these, and where each result belongs."
    )


def named(nodes: Array, most: int = 5) -> str:
    """Node ids for a message: the first ones by number."""
    distinct = np.unique(nodes)
    shown = ", ".join(map(str, distinct[:most].tolist()))
    more = f" and {len(distinct) - most:,} more" if len(distinct) > most else ""
    return f"{'node' if len(distinct) == 1 else 'nodes'} {shown}{more}"
