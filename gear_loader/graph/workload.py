"""What sampling will cost and which features it will read: metrics of a graph, fan-outs and a distribution of seeds."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.graph.csr import Graph
from gear_loader.graph.sampler import checked_fanouts
from gear_loader.native import neighbor_loops
from gear_loader.utils.arrays import Array, as_array


def sampled_size(graph: Graph, fanouts: Sequence[int]) -> Array:
    """Probabilistic sampled graph size (PSGS): expected nodes of a request for each node, float64 [N].

    ``E_k(v) = 1 + min(deg v, l) / deg v * sum of E_{k-1}(u)`` over the neighbours u of v, ``E_0 = 1``, where l is the
    fan-out of the hop. It is exact for the tree of a sampled neighbourhood, in which a node that is found twice counts
    twice; that of a batch is the sum of its seeds'.

    Args:
        graph: the graph. fanouts: as of `NeighborSampler`.

    Raises:
        SchemaError: invalid fan-outs.
    """
    arrays = graph.indptr.numpy(), graph.indices.numpy()
    found = np.ones(graph.num_nodes)
    for fanout in reversed(checked_fanouts(fanouts)):
        below, found = found, np.empty(graph.num_nodes)
        neighbor_loops.sizes(*arrays, below, fanout, found)
    return found


def access_probability(
    graph: Graph, fanouts: Sequence[int], requests: Any = None, *, drawing: Literal["all", "new"] = "all"
) -> Array:
    """Feature access probability (FAP): that a request, or a batch, reads the features of each node, float64 [N].

    ``p_k(v) = 1 - (1 - p_{k-1}(v)) * product of (1 - p_{k-1}(u) * min(1, l_k / deg u))`` over the nodes u that have v
    as a neighbour, as if these were found independently of each other. This is the published formula, for samplers in
    which all nodes that were found so far draw neighbours in each hop; it is too high where fan-outs are not small
    against degrees, because a node then draws the same neighbours again. `NeighborSampler` has only those draw that the
    last hop found: ``drawing="new"`` puts p_{k-1}(u) - p_{k-2}(u) in the product.

    Args:
        graph: the graph. fanouts: as of `NeighborSampler`.
        requests: p_0, float [N], probability that each node is among the seeds; by default one seed, each node equally
            likely.
        drawing: which nodes draw in a hop, see above.

    Raises:
        SchemaError: invalid fan-outs or options, or requests that are not N probabilities.
    """
    arrays = graph.indptr.numpy(), graph.indices.numpy()
    size = graph.num_nodes
    if requests is None:
        found = np.full(size, 1 / max(size, 1))
    else:
        given = np.asarray(as_array(requests, "requests"))
        if given.shape != (size,) or given.dtype.kind != "f":
            raise SchemaError(
                f"requests is {given.dtype} {list(given.shape)}; expected floats [{size}], a probability for each node."
            )
        found = given.astype(np.float64)
        if not ((found >= 0) & (found <= 1)).all():
            node = int(np.flatnonzero(~((found >= 0) & (found <= 1)))[0])
            raise SchemaError(f"requests[{node}] is {found[node]}; expected a probability, from 0 to 1.")
    if drawing not in ("all", "new"):
        raise SchemaError(f"drawing is {drawing!r}; expected 'all' or 'new'.")
    earlier = np.zeros(size)
    for fanout in checked_fanouts(fanouts):
        before, found = found, np.empty(size)
        neighbor_loops.accesses(
            *arrays, before, before if drawing == "all" else before - earlier, fanout, found
        )
        earlier = before
    return found
