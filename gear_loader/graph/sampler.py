"""Neighbour sampling on the CPU: one compiled call for few seeds, several threads for many; both draw the same."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import os
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.graph.csr import Graph, checked_nodes, repeated, unknown
from gear_loader.native import neighbor_loops
from gear_loader.selection.random import key, signed
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least, integer

_STREAM = 0x6E626872
_CHUNK = 256
"""Nodes of a hop that a thread draws for at a time: about 0.1 ms, which a hand-over to a thread is small against."""


@dataclasses.dataclass
class Subgraph:
    """The sampled neighbourhood of seeds, with nodes numbered from 0: what layers of PyTorch Geometric take.

    Attributes:
        n_id: int64 [n], the nodes, seeds first, then in the order in which hops found them.
        edge_index: int64 [2, e], source and target of each drawn edge, by their places in `n_id`, hop by hop.
        batch_size: number of seeds.
        num_sampled_nodes: nodes that are new with each hop; the first number is that of the seeds.
        num_sampled_edges: edges drawn by each hop.
        x: features of the nodes, if a loader has them: [n, ...], or column name -> [n, ...].
    """

    n_id: torch.Tensor
    edge_index: torch.Tensor
    batch_size: int
    num_sampled_nodes: list[int]
    num_sampled_edges: list[int]
    x: Any = None

    def __repr__(self) -> str:
        nodes, edges = len(self.n_id), self.edge_index.shape[1]
        return f"Subgraph({self.batch_size:,} seeds, {nodes:,} nodes, {edges:,} edges)"


class NeighborSampler:
    """Samples the neighbourhood of seeds, hop by hop, uniformly without replacement.

    A node that a hop finds gets as many of its neighbours as the next hop's fan-out, or all if it has no more; each
    subset is equally likely (53-bit uniforms). As in PyTorch Geometric's `NeighborLoader`, each node is sampled once,
    at the hop that finds it. The draws are a function of seed, step and node alone: so with the same fan-out at each
    hop, the layers of a model compute for a seed what they compute without the other seeds.

    Several threads may use a sampler at once; each needs 4 bytes a node of the graph.

    Args:
        graph: the graph.
        fanouts: neighbours that each hop draws for a node, up to 1,024; -1 for all.
        seed: of the random numbers.
        threads: that draw a hop of more than a few hundred nodes; 1 does all hops in one compiled call, which is
            fastest for few seeds; None as many as torch uses, up to 8. The result does not depend on it.

    Raises:
        SchemaError: invalid fan-outs or options.
    """

    def __init__(
        self, graph: Graph, fanouts: Sequence[int], *, seed: int = 0, threads: int | None = 1
    ) -> None:
        self.graph = graph
        self.fanouts = checked_fanouts(fanouts)
        self.seed = integer("seed", seed)
        self.threads = min(torch.get_num_threads(), 8) if threads is None else at_least("threads", threads)
        self._hops = np.array(self.fanouts, dtype=np.int64)
        self._key = key_of(self.seed)
        self._arrays = graph.indptr.numpy(), graph.indices.numpy()
        self._spare: list[Array] = []  # places that no thread uses
        self._pool: concurrent.futures.ThreadPoolExecutor | None = None
        self._pid = os.getpid()

    def __repr__(self) -> str:
        return (
            f"NeighborSampler({self.graph!r}, {list(self.fanouts)}, seed={self.seed}, threads={self.threads})"
        )

    def sample(self, seeds: Any, *, step: int = 0) -> Subgraph:
        """The sampled neighbourhood of distinct seeds.

        Args:
            seeds: node ids, integers [n]; tensor, array or list.
            step: number of the batch: other steps draw other neighbours.

        Raises:
            UnknownNodeError: a seed is not a node of the graph. SchemaError: one is given twice, or is no integer.
        """
        nodes = checked_nodes("seeds", seeds)
        step = signed(integer("step", step))
        try:
            places = self._spare.pop()
        except IndexError:
            places = np.full(self.graph.num_nodes, -1, dtype=np.int32)
        run = self._alone if self.threads == 1 else self._together
        found, edges, counts, edge_counts, size = run(nodes, step, places)
        # After an interruption the places are dropped: they may not be clear.
        self._spare.append(places)
        if size < 0:
            raise self._fault(nodes, size)
        return subgraph_of(found, edges, counts, edge_counts)

    def _fault(self, seeds: Array, fault: int) -> Exception:
        if fault == neighbor_loops.OUTSIDE:
            size = self.graph.num_nodes
            return unknown("seeds", seeds[(seeds < 0) | (seeds >= size)], size)
        return repeated(seeds)

    def _alone(self, seeds: Array, step: int, places: Array) -> Any:
        return neighbor_loops.sample(*self._arrays, seeds, self._hops, self._key, step, places)

    def _together(self, seeds: Array, step: int, places: Array) -> Any:
        """`gear_loader.native.neighbor_loops.sample`, whose draws several threads share."""
        indptr = self._arrays[0]
        nodes = np.empty(len(seeds), dtype=np.int64)
        counts = np.zeros(len(self._hops) + 1, dtype=np.int64)
        edge_counts = np.zeros_like(counts)
        count = neighbor_loops.enter(seeds, places, nodes)
        if count < 0:
            return nodes, nodes, counts, edge_counts, count
        begin, edges, counts[0] = 0, 0, count
        parts: list[tuple[Array, Array]] = []
        for hop, fanout in enumerate(self.fanouts):
            frontier = nodes[begin:count]
            starts = np.empty(len(frontier) + 1, dtype=np.int64)
            neighbor_loops.starts_of(indptr, frontier, fanout, starts)
            more = int(starts[-1])
            drawn = np.empty(more, dtype=np.int64)
            self._draw(frontier, fanout, step, starts, drawn)
            parts.append((drawn, np.repeat(np.arange(begin, count), np.diff(starts))))
            nodes = np.concatenate((nodes[:count], np.empty(min(more, len(places) - count), dtype=np.int64)))
            begin, count = count, neighbor_loops.relabel(drawn, places, nodes, count)
            edges += more
            counts[hop + 1], edge_counts[hop + 1] = count, edges
        neighbor_loops.clear(places, nodes[:count])
        edge_index = np.empty((2, edges), dtype=np.int64)
        for row, drawn_or_target in enumerate(zip(*parts, strict=True)):
            np.concatenate(drawn_or_target, out=edge_index[row])
        return nodes[:count], edge_index, counts, edge_counts, count

    def _draw(self, frontier: Array, fanout: int, step: int, starts: Array, drawn: Array) -> None:
        indptr, indices = self._arrays
        size = len(frontier)
        chunks = min(self.threads, -(-size // _CHUNK))

        def work(chunk: int) -> None:
            first, last = size * chunk // chunks, size * (chunk + 1) // chunks
            neighbor_loops.draw(
                indptr, indices, frontier, first, last, fanout, self._key, step, starts, drawn
            )

        if chunks <= 1:
            if size:
                chunks = 1
                work(0)
            return
        if self._pool is None or self._pid != os.getpid():  # a fork has no threads
            self._pid = os.getpid()
            self._pool = concurrent.futures.ThreadPoolExecutor(self.threads - 1, "gear-loader-neighbors")
        others = [self._pool.submit(work, chunk) for chunk in range(1, chunks)]
        work(0)
        for other in others:
            other.result()


def checked_fanouts(fanouts: Any) -> tuple[int, ...]:
    """Return fan-outs as ints; SchemaError unless there is one at least, each from 1 to 1,024 or -1."""
    most = neighbor_loops.MAX_FANOUT
    try:
        values = tuple(integer("fanouts", fanout) for fanout in fanouts)
    except TypeError:
        values = ()
    if not values or not all(value == -1 or 1 <= value <= most for value in values):
        raise SchemaError(
            f"fanouts is {fanouts!r}; expected one integer for each hop, from 1 to {most:,}, or -1 for all neighbours."
        )
    return values


def key_of(seed: int) -> int:
    """The key of the random numbers, int64."""
    return key(seed, _STREAM, 0)


def subgraph_of(nodes: Array, edges: Array, counts: Array, edge_counts: Array) -> Subgraph:
    """The subgraph of what `gear_loader.native.neighbor_loops.sample` returns."""
    return Subgraph(
        torch.from_numpy(nodes),
        torch.from_numpy(edges),
        int(counts[0]),
        np.diff(counts, prepend=0).tolist(),
        np.diff(edge_counts).tolist(),
    )
