"""A skewed random graph, and ways to sample it: ours, plain torch, PyTorch Geometric's NeighborLoader."""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from benchmarks.harness import Incorrect

Sampled = tuple[torch.Tensor, torch.Tensor, torch.Tensor]  # nodes, edge_index, features
Way = Callable[[np.ndarray], Sampled]


@dataclasses.dataclass(frozen=True)
class Data:
    """edge_index: int64 [2, E]. x: float32 [N, F]."""

    edge_index: torch.Tensor
    x: torch.Tensor

    @classmethod
    def of(cls, nodes: int, degree: int, features: int, seed: int) -> Data:
        """Targets are uniform, sources in proportion to (rank + 1) ** -0.8: a few hubs are everybody's neighbours."""
        random = np.random.default_rng(seed)
        weights = np.cumsum(np.arange(1, nodes + 1) ** -0.8)
        drawn = np.searchsorted(weights, random.random(nodes * degree) * weights[-1])
        sources = random.permutation(nodes)[np.minimum(drawn, nodes - 1)]
        edges = np.stack([sources, random.integers(0, nodes, nodes * degree)])
        x = random.standard_normal((nodes, features), dtype=np.float32)
        return cls(torch.from_numpy(edges), torch.from_numpy(x))

    @property
    def num_nodes(self) -> int:
        return len(self.x)


def ours(data: Data, table: gear.Table, fanouts: list[int], threads: int) -> Way:
    """`NeighborSampler` and `Features`."""
    graph = gear.graph.Graph.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    return _of(gear.graph.NeighborSampler(graph, fanouts, threads=threads), gear.Features(table, "x"))


def _of(sampler: Any, features: gear.Features) -> Way:
    """What a sampler draws, with features, all on the features' device."""
    steps = iter(range(1 << 62))

    def sample(seeds: np.ndarray) -> Sampled:
        found = sampler.sample(seeds, step=next(steps))
        x = features[found.n_id]
        return found.n_id.to(x.device), found.edge_index.to(x.device), x

    return sample


def on_device(data: Data, table: gear.Table, fanouts: list[int], device: torch.device) -> dict[str, Way]:
    """Samplers of the CPU and of the GPU, with features by zero copy, and what a router makes of both; and plain torch
    on the CPU, copied to the GPU."""
    graph = gear.graph.Graph.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    features = gear.Features(table, "x", device=device)
    by_cpu = _of(gear.graph.NeighborSampler(graph, fanouts), features)
    by_gpu = _of(gear.graph.DeviceSampler(graph, fanouts, device=device), features)
    plain_way = plain(data, fanouts)

    def copied(seeds: np.ndarray) -> Sampled:
        nodes, edges, x = plain_way(seeds)
        return nodes.to(device), edges.to(device), x.to(device)

    def until_done(way: Way) -> Way:
        def sample(seeds: np.ndarray) -> Sampled:
            found = way(seeds)
            if device.type == "cuda":
                torch.cuda.synchronize(device)
            return found

        return sample

    sizes = gear.graph.sampled_size(graph, fanouts)
    router = gear.graph.Router(until_done(by_cpu), until_done(by_gpu), sizes, repeats=3)
    ways = {"plain torch": copied, "ours, sampled by the CPU": by_cpu, "ours, sampled by the GPU": by_gpu}
    return {**{name: until_done(way) for name, way in ways.items()}, "ours, routed": router}


def plain(data: Data, fanouts: list[int]) -> Way:
    """What one writes in torch: all edges of a hop with a random key, sorted by target and key, the first few kept."""
    graph = gear.graph.Graph.from_edge_index(data.edge_index, num_nodes=data.num_nodes)
    indptr, indices = graph.indptr, graph.indices.long()
    places = torch.full((data.num_nodes,), -1)

    def sample(seeds: np.ndarray) -> Sampled:
        nodes, begin = torch.from_numpy(seeds), 0
        places[nodes] = torch.arange(len(nodes))
        sources, targets = [], []
        for fanout in fanouts:
            frontier = nodes[begin:]
            first, degree = indptr[frontier], indptr[frontier + 1] - indptr[frontier]
            row = torch.repeat_interleave(torch.arange(len(frontier)), degree)
            inside = torch.arange(len(row)) - torch.repeat_interleave(degree.cumsum(0) - degree, degree)
            edge = first[row] + inside
            order = (row + torch.rand(len(row), dtype=torch.float64)).argsort()
            kept = inside < fanout  # a row's ranks are as many as its edges, in the same places
            found, row = indices[edge[order[kept]]], row[kept]
            fresh = found[places[found] < 0].unique()
            targets.append(row + begin)
            begin = len(nodes)
            places[fresh] = torch.arange(begin, begin + len(fresh))
            nodes = torch.cat((nodes, fresh))
            sources.append(places[found])
        places[nodes] = -1
        return nodes, torch.stack((torch.cat(sources), torch.cat(targets))), data.x.index_select(0, nodes)

    return sample


def pyg(data: Data, fanouts: list[int]) -> Way:
    """`NeighborLoader` of PyTorch Geometric, called for given seeds; ImportError where it or its sampler is missing."""
    with warnings.catch_warnings():  # an error in the middle of its import would leave half of it behind
        warnings.simplefilter("ignore")
        from torch_geometric.data import Data as PygData
        from torch_geometric.loader import NeighborLoader

    loader: Any = NeighborLoader(PygData(x=data.x, edge_index=data.edge_index), fanouts, batch_size=1)

    def sample(seeds: np.ndarray) -> Sampled:
        found = loader(torch.from_numpy(seeds))
        return found.n_id, found.edge_index, found.x

    sample(np.zeros(1, dtype=np.int64))  # the loader looks for its sampler only now
    return sample


def use_sampler_of_peer(folder: Path | None) -> None:
    """Run the same command by the interpreter of the peer `pyg`, if it is there and this one has no sampler of PyG.

    Does not return then.
    """
    if any(importlib.util.find_spec(name) for name in ("pyg_lib", "torch_sparse")) or folder is None:
        return
    place = folder / "pyg"
    if (place / "ready").exists():
        python = str(place / "bin" / "python")
        print(f"By {python}, which has PyTorch Geometric and a sampler of it.", flush=True)
        os.execv(python, [python, "-m", "benchmarks", *sys.argv[1:]])


def check(data: Data, way: Way, fanouts: list[int], seeds: np.ndarray) -> None:
    """Raise Incorrect unless a result is a sampled neighbourhood of the seeds, with its features."""
    nodes, edges, x = (part.cpu() for part in way(seeds))
    if not np.array_equal(nodes[: len(seeds)].numpy(), seeds) or len(nodes.unique()) < len(nodes):
        raise Incorrect("the nodes are not the seeds and others, each once")
    if not torch.equal(x, data.x[nodes]):
        raise Incorrect("the features are not those of the nodes")
    size = data.num_nodes
    known = np.unique((data.edge_index[0] * size + data.edge_index[1]).numpy())
    drawn = (nodes[edges[0]] * size + nodes[edges[1]]).numpy()
    if not np.isin(drawn, known).all():
        raise Incorrect("an edge is not one of the graph")
    degrees = torch.bincount(data.edge_index[1], minlength=size)[nodes[: len(seeds)]]
    counts = torch.bincount(edges[1], minlength=len(nodes))[: len(seeds)]
    if not torch.equal(counts, degrees.clamp(max=fanouts[0])):
        raise Incorrect("a seed has not as many neighbours as the fan-out asks for")
