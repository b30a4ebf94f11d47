"""Subgraphs of batches of seeds, for training and for passes over all nodes."""

from __future__ import annotations

import collections
import concurrent.futures
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.graph.csr import Graph, check_distinct, checked_nodes
from gear_loader.graph.features import Features
from gear_loader.graph.sampler import NeighborSampler, Subgraph
from gear_loader.selection.random import permutation
from gear_loader.utils.arrays import Array
from gear_loader.utils.checks import at_least


class NeighborLoader:
    """Iterates over the sampled neighbourhoods of batches of seeds, with features.

    Each ``for`` loop is an epoch, in which every seed occurs once. Batches are a function of seed, epoch and number of
    the batch. `prefetch` batches are prepared ahead by a thread.

    Args:
        graph: the graph. fanouts, seed, threads: as of `NeighborSampler`.
        batch_size: seeds of a batch.
        seeds: distinct node ids, integers [n]; all nodes by default.
        features: features of the nodes, which become the batches' `x`; the batches are on their device.
        shuffle: draw a new order of the seeds each epoch; else they come in theirs.
        drop_last: leave away a last batch of fewer seeds.
        prefetch: batches prepared ahead; 0 for none.

    Raises:
        SchemaError: invalid options, or a seed that is given twice. UnknownNodeError: one is not a node of the graph.
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int],
        *,
        batch_size: int,
        seeds: Any = None,
        features: Features | None = None,
        shuffle: bool = False,
        drop_last: bool = False,
        seed: int = 0,
        threads: int | None = 1,
        prefetch: int = 1,
    ) -> None:
        self.sampler = NeighborSampler(graph, fanouts, seed=seed, threads=threads)
        self.batch_size = at_least("batch_size", batch_size)
        self.prefetch = at_least("prefetch", prefetch, 0)
        self.shuffle, self.drop_last = bool(shuffle), bool(drop_last)
        if features is not None and not isinstance(features, Features):
            raise SchemaError(
                f"features is a {type(features).__name__}; expected a gear_loader.Features of a table."
            )
        self.features = features
        nodes = (
            np.arange(graph.num_nodes) if seeds is None else checked_nodes("seeds", seeds, graph.num_nodes)
        )
        check_distinct(nodes)
        self.seeds: Array = nodes
        self.epoch = 0
        """Number of the next epoch."""

    def __len__(self) -> int:
        """Batches of an epoch."""
        size = len(self.seeds)
        return size // self.batch_size if self.drop_last else -(-size // self.batch_size)

    def __repr__(self) -> str:
        return (
            f"NeighborLoader({self.sampler.graph!r}, {list(self.sampler.fanouts)}, {len(self.seeds):,} seeds in "
            f"{len(self):,} batches of {self.batch_size:,}, epoch={self.epoch})"
        )

    def batch(self, epoch: int, number: int) -> Subgraph:
        """Batch `number` of an epoch."""
        begin, end = number * self.batch_size, min((number + 1) * self.batch_size, len(self.seeds))
        places = np.arange(begin, end)
        if self.shuffle:
            places = permutation(len(self.seeds), self.sampler.seed, epoch, 0)[places]
        # Other steps draw other neighbours; those of an epoch are a range of 2**32.
        found = self.sampler.sample(self.seeds[places], step=(epoch << 32) + number)
        if self.features is not None:
            found.x = self.features[found.n_id]
            if self.features.device.type == "cuda":
                found.n_id = found.n_id.to(self.features.device)
                found.edge_index = found.edge_index.to(self.features.device)
        return found

    def __iter__(self) -> Iterator[Subgraph]:
        epoch = self.epoch
        self.epoch += 1
        numbers = range(len(self))
        if not self.prefetch:
            for number in numbers:
                yield self.batch(epoch, number)
            return
        with concurrent.futures.ThreadPoolExecutor(1, "gear-loader-graph") as pool:
            ahead: collections.deque[concurrent.futures.Future[Subgraph]] = collections.deque()
            try:
                for number in numbers:
                    ahead.append(pool.submit(self.batch, epoch, number))
                    if len(ahead) > self.prefetch:
                        yield ahead.popleft().result()
                while ahead:
                    yield ahead.popleft().result()
            finally:
                for future in ahead:
                    future.cancel()
