"""Neighbour sampling on a GPU that reads the graph in pinned host memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch

from gear_loader.errors import RegionError, SchemaError
from gear_loader.graph.csr import Graph, check_distinct, checked_nodes
from gear_loader.graph.sampler import Subgraph, checked_fanouts, key_of
from gear_loader.selection.random import signed
from gear_loader.utils.checks import integer
from gear_loader.utils.device_option import device_of

Draw = Callable[[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor], None]


class DeviceSampler:
    """Samples as `NeighborSampler` does, on a device: the same nodes and edges in the same order, to the bit.

    On a GPU a kernel draws a hop's neighbours from the graph in pinned host memory, and torch numbers them. On the CPU
    plain torch does both, which is slow, and for tests. One thread at a time uses a sampler; it needs 8 bytes a node of
    the graph on the device.

    Args:
        graph: the graph; for a GPU it is copied to pinned memory unless it is there.
        fanouts: as of `NeighborSampler`, from 1 to 128.
        seed: as of `NeighborSampler`.
        device: "auto", "cpu" or a CUDA device.
        draw: draws a hop, see `gear_loader.kernels.neighbors.draw`; by default that kernel, or its twin on the CPU.

    Raises:
        SchemaError: invalid options, or a device that does not exist. RegionError: too little memory on the device.
    """

    def __init__(
        self,
        graph: Graph,
        fanouts: Sequence[int],
        *,
        seed: int = 0,
        device: str | torch.device = "auto",
        draw: Draw | None = None,
    ) -> None:
        self.fanouts = checked_fanouts(fanouts)
        if not all(1 <= fanout <= 128 for fanout in self.fanouts):
            raise SchemaError(
                f"fanouts is {list(self.fanouts)}; expected 1 to 128 for each hop on a device. NeighborSampler takes "
                "larger ones, and -1."
            )
        self.device = device_of(device)
        self.seed = integer("seed", seed)
        if self.device.type == "cuda":
            free, needed = torch.cuda.mem_get_info(self.device)[0], 8 * graph.num_nodes
            if needed > free:
                raise RegionError(
                    f"Sampling of {graph.num_nodes:,} nodes takes {needed:,} bytes on {self.device}, which has "
                    f"{free:,} free; use NeighborSampler, or another device."
                )
        pinned = self.device.type != "cuda" or graph.indptr.is_pinned()
        self.graph = graph if pinned else graph.pin_memory()
        if draw is None and self.device.type == "cuda":
            from gear_loader.kernels.neighbors import draw as kernel

            draw = kernel
        elif draw is None:
            from gear_loader.kernels.neighbors_reference import draw as twin

            draw = twin
        self._draw = draw
        self._places: torch.Tensor | None = self._no_places()  # None while a sample is made

    def _no_places(self) -> torch.Tensor:
        """Number in the subgraph of each node, int64 [N]: -1, none."""
        return torch.full((self.graph.num_nodes,), -1, dtype=torch.int64, device=self.device)

    def sample(self, seeds: Any, *, step: int = 0) -> Subgraph:
        """The sampled neighbourhood of distinct seeds, on the device. Waits for the GPU once for each hop and more.

        Args:
            seeds: node ids, integers [n]; tensor, array or list. step: as of `NeighborSampler.sample`.

        Raises:
            UnknownNodeError: a seed is not a node of the graph. SchemaError: one is given twice, or is no integer.
        """
        values = checked_nodes("seeds", seeds, self.graph.num_nodes)
        check_distinct(values)
        words = [key_of(self.seed), signed(integer("step", step))]
        random = torch.tensor(words, dtype=torch.int64, device=self.device)
        nodes = torch.from_numpy(values).to(self.device)
        places, self._places = (
            self._places,
            None,
        )  # after an interruption they are dropped: they may not be clear
        places = self._no_places() if places is None else places
        places[nodes] = torch.arange(len(nodes), device=self.device)
        begin, counts = 0, [len(nodes)]
        parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        for fanout in self.fanouts:
            frontier = nodes[begin:]
            drawn = torch.empty(len(frontier), fanout, dtype=torch.int64, device=self.device)
            self._draw(self.graph.indptr, self.graph.indices, frontier, random, drawn)
            exists = drawn >= 0
            targets = exists.nonzero()[:, 0] + begin
            found = drawn[exists]
            new = _first_occurrences(found[places[found] < 0])
            begin = len(nodes)
            places[new] = torch.arange(begin, begin + len(new), device=self.device)
            nodes = torch.cat((nodes, new))
            parts.append((places[found], targets))
            counts.append(len(new))
        places[nodes] = -1
        self._places = places
        edges = torch.stack([torch.cat(row) for row in zip(*parts, strict=True)])
        return Subgraph(nodes, edges, counts[0], counts, [len(targets) for _, targets in parts])


def _first_occurrences(values: torch.Tensor) -> torch.Tensor:
    """Distinct values (int64 [n]) in the order in which they occur first."""
    distinct, inverse = torch.unique(values, return_inverse=True)
    first = torch.full_like(distinct, len(values))
    first.scatter_reduce_(0, inverse, torch.arange(len(values), device=values.device), "amin")
    ordered: torch.Tensor = distinct[first.argsort()]
    return ordered
