"""Graph serving: features in a table, neighbour sampling, and workload metrics that decide where both happen.

::

    graph = gear.graph.Graph.from_edge_index(edge_index, num_nodes=len(x))
    loader = gear.graph.NeighborLoader(graph, [10, 5], batch_size=256, features=gear.Features(table, "x"))
    for batch in loader:
        out = model(batch.x, batch.edge_index)[: batch.batch_size]

See docs/graph-serving.md. Needs neither a GPU nor PyTorch Geometric.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from gear_loader.utils.lazy import loader

if TYPE_CHECKING:
    from gear_loader.graph.csr import Graph
    from gear_loader.graph.device_sampler import DeviceSampler
    from gear_loader.graph.feature_placement import FeaturePlacement, place
    from gear_loader.graph.features import FeatureReads, FeatureTiers
    from gear_loader.graph.loader import NeighborLoader
    from gear_loader.graph.requests import RequestBatcher
    from gear_loader.graph.router import Router
    from gear_loader.graph.sampler import NeighborSampler, Subgraph
    from gear_loader.graph.workload import access_probability, sampled_size

__all__ = [
    "DeviceSampler",
    "FeaturePlacement",
    "FeatureReads",
    "FeatureTiers",
    "Graph",
    "NeighborLoader",
    "NeighborSampler",
    "RequestBatcher",
    "Router",
    "Subgraph",
    "access_probability",
    "place",
    "sampled_size",
]

_MODULES = {
    "DeviceSampler": "device_sampler",
    "FeatureReads": "features",
    "FeatureTiers": "features",
    "Graph": "csr",
    "NeighborLoader": "loader",
    "NeighborSampler": "sampler",
    "FeaturePlacement": "feature_placement",
    "RequestBatcher": "requests",
    "Router": "router",
    "Subgraph": "sampler",
    "access_probability": "workload",
    "place": "feature_placement",
    "sampled_size": "workload",
}

__getattr__ = loader(__name__, _MODULES)
