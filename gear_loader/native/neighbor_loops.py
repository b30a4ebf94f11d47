"""Neighbour sampling over a graph in compressed rows, and the metrics that predict it, compiled (numba).

The numbers that a node's neighbours are drawn by are Philox-4x32-10 (Salmon et al., 2011) of (key, step, node): neither
the order of the nodes nor the number of threads changes them, and the GPU's kernel draws the same ones.
"""

from __future__ import annotations

import numpy as np
from numba import float64, int64, njit, uint64

from gear_loader.native.compile import compiled

MAX_FANOUT = 1024
"""Largest fan-out other than -1: a node's choices are compared with each other."""

OUTSIDE, REPEATED = -1, -2
"""Results of `enter` for a seed that is no node, and for one that was entered before."""

_LOW = uint64(0xFFFFFFFF)
_HALF = uint64(32)


@njit(inline="always")
def _pair(key, node, call, step):  # type: ignore[no-untyped-def]
    """Two 53-bit uniforms in [0, 1): levels 2 call and 2 call + 1 of `gear_loader.kernels.priority.uniform`."""
    k0, k1 = uint64(key) & _LOW, uint64(key) >> _HALF
    c0, c1 = uint64(node) & _LOW, uint64(call)
    c2, c3 = uint64(step) & _LOW, uint64(step) >> _HALF
    for _ in range(10):
        a, b = uint64(0xD2511F53) * c0, uint64(0xCD9E8D57) * c2
        c0, c1, c2, c3 = (b >> _HALF) ^ c1 ^ k0, b & _LOW, (a >> _HALF) ^ c3 ^ k1, a & _LOW
        k0 = (k0 + uint64(0x9E3779B9)) & _LOW
        k1 = (k1 + uint64(0xBB67AE85)) & _LOW
    first = (float64(c0 >> uint64(5)) * 67108864.0 + float64(c1 >> uint64(6))) * 2.0**-53
    second = (float64(c2 >> uint64(5)) * 67108864.0 + float64(c3 >> uint64(6))) * 2.0**-53
    return first, second


@njit(inline="always")  # type: ignore[untyped-decorator]
def _choose(chosen, i, last, uniform) -> None:  # type: ignore[no-untyped-def]
    """Choice number i of Floyd's algorithm: one of 0 to `last`, or `last` itself if that was chosen before."""
    place = min(int64(uniform * float64(last + 1)), last)
    for k in range(i):
        if chosen[k] == place:
            place = last
            break
    chosen[i] = place


@njit(inline="always")
def _taken(degree, fanout):  # type: ignore[no-untyped-def]
    """Neighbours that a node of `degree` gets; a fan-out of -1 takes all."""
    return degree if fanout < 0 else min(degree, fanout)


@compiled
def starts_of(indptr, nodes, fanout, starts) -> None:  # type: ignore[no-untyped-def]
    """Where the drawn neighbours of each node begin, int64 [n + 1], output; the last is their number.

    Args:
        indptr: int64 [N + 1]. nodes: int64 [n]. fanout: neighbours of a node; -1 for all.
    """
    total = int64(0)
    for i in range(len(nodes)):
        starts[i] = total
        total += _taken(indptr[nodes[i] + 1] - indptr[nodes[i]], fanout)
    starts[len(nodes)] = total


@compiled
def draw(  # type: ignore[no-untyped-def]
    indptr, indices, nodes, first, last, fanout, key, step, starts, out
) -> None:
    """Draw neighbours of nodes `first` to `last - 1`: each subset of `fanout` of them is equally likely (Floyd, 1987).

    Args:
        indptr: int64 [N + 1]. indices: int32 [E]. nodes: int64 [n].
        fanout, starts: as for `starts_of`.
        key, step: int64, key and counter of the random numbers.
        out: int64 [starts[n]], output: the neighbours. A node without more than `fanout` has all, in their order.
    """
    chosen = np.empty(max(fanout, 1), dtype=np.int64)
    for i in range(first, last):
        node = nodes[i]
        begin, at = indptr[node], starts[i]
        degree = indptr[node + 1] - begin
        if fanout < 0 or degree <= fanout:
            for k in range(degree):
                out[at + k] = indices[begin + k]
            continue
        rest = degree - fanout
        for k in range(0, fanout, 2):
            one, other = _pair(key, node, k // 2, step)
            _choose(chosen, k, rest + k, one)
            if k + 1 < fanout:
                _choose(chosen, k + 1, rest + k + 1, other)
        for k in range(fanout):
            out[at + k] = indices[begin + chosen[k]]


@compiled
def enter(seeds, places, nodes):  # type: ignore[no-untyped-def]
    """Make the seeds the first nodes of a subgraph.

    Args:
        seeds: int64 [n]. places: int32 [N], number of each node in the subgraph, -1 for all.
        nodes: int64 [at least n], output.

    Returns:
        Number of seeds; or, having changed no place, `OUTSIDE` or `REPEATED`.
    """
    for i in range(len(seeds)):
        seed, fault = seeds[i], 0
        if seed < 0 or seed >= len(places):
            fault = OUTSIDE
        elif places[seed] >= 0:
            fault = REPEATED
        if fault < 0:
            for k in range(i):
                places[seeds[k]] = -1
            return fault
        places[seed] = i
        nodes[i] = seed
    return len(seeds)


@compiled
def relabel(drawn, places, nodes, count):  # type: ignore[no-untyped-def]
    """Replace drawn nodes (int64 [n]) by their numbers in the subgraph; new ones are appended in their order.

    Args:
        places: as for `enter`. nodes: int64 [at least count + n], whose first `count` are the subgraph's so far.

    Returns:
        Number of nodes of the subgraph.
    """
    for i in range(len(drawn)):
        node = drawn[i]
        if places[node] < 0:
            places[node] = count
            nodes[count] = node
            count += 1
        drawn[i] = places[node]
    return count


@compiled
def clear(places, nodes) -> None:  # type: ignore[no-untyped-def]
    """Set the places of the subgraph's nodes back to -1."""
    for i in range(len(nodes)):
        places[nodes[i]] = -1


@compiled
def sample(indptr, indices, seeds, fanouts, key, step, places):  # type: ignore[no-untyped-def]
    """Sample the neighbourhood of seeds, all hops in one call.

    Args:
        indptr: int64 [N + 1]. indices: int32 [E]. seeds: int64 [n]. fanouts: int64 [K], of each hop.
        key, step: as for `draw`. places: int32 [N], all -1; so again afterwards.

    Returns:
        Nodes, int64 [m], the seeds first; edges, int64 [2, e], numbers of source and target; number of nodes after each
        hop, int64 [K + 1]; number of edges after each hop, int64 [K + 1]; number of nodes, or the negative result of
        `enter` if a seed is wrong.
    """
    hops = len(fanouts)
    nodes = np.empty(len(seeds), dtype=np.int64)
    counts, edge_counts = np.zeros(hops + 1, dtype=np.int64), np.zeros(hops + 1, dtype=np.int64)
    sources, targets = np.empty(0, dtype=np.int64), np.empty(0, dtype=np.int64)
    count = enter(seeds, places, nodes)
    if count < 0:
        return nodes, np.empty((2, 0), dtype=np.int64), counts, edge_counts, count
    begin, edges, counts[0] = int64(0), int64(0), count
    for hop in range(hops):
        frontier = nodes[begin:count]
        starts = np.empty(len(frontier) + 1, dtype=np.int64)
        starts_of(indptr, frontier, fanouts[hop], starts)
        more = starts[len(frontier)]
        grown = np.empty(edges + more, dtype=np.int64), np.empty(edges + more, dtype=np.int64)
        grown[0][:edges], grown[1][:edges] = sources, targets
        sources, targets = grown
        drawn = sources[edges:]
        draw(indptr, indices, frontier, 0, len(frontier), fanouts[hop], key, step, starts, drawn)
        for i in range(len(frontier)):
            targets[edges + starts[i] : edges + starts[i + 1]] = begin + i
        longer = np.empty(count + min(more, len(places) - count), dtype=np.int64)
        longer[:count] = nodes[:count]
        nodes, begin = longer, count
        count = relabel(drawn, places, nodes, count)
        edges += more
        counts[hop + 1], edge_counts[hop + 1] = count, edges
    clear(places, nodes[:count])
    edge_index = np.empty((2, edges), dtype=np.int64)
    edge_index[0], edge_index[1] = sources, targets
    return nodes[:count], edge_index, counts, edge_counts, count


@compiled
def compress(sources, targets, indptr, indices):  # type: ignore[no-untyped-def]
    """Sort edges by their target, in the order in which they are given.

    Args:
        sources, targets: int64 [E]. indptr: int64 [N + 1], output. indices: int32 [E], output.

    Returns:
        Position of the first edge with an end outside 0 to N - 1, or -1.
    """
    size = len(indptr) - 1
    indptr[:] = 0
    for e in range(len(targets)):
        if sources[e] < 0 or sources[e] >= size or targets[e] < 0 or targets[e] >= size:
            return e
        indptr[targets[e] + 1] += 1
    for i in range(size):
        indptr[i + 1] += indptr[i]
    following = indptr[:size].copy()
    for e in range(len(targets)):
        indices[following[targets[e]]] = sources[e]
        following[targets[e]] += 1
    return -1


@compiled
def sizes(indptr, indices, below, fanout, out) -> None:  # type: ignore[no-untyped-def]
    """One hop of the sampled size: ``out[v] = 1 + min(deg, l) / deg * sum of below[u] over the neighbours u of v``.

    Args:
        indptr: int64 [N + 1]. indices: int32 [E]. below: float64 [N], sizes with one hop less. fanout: l; -1 for all.
        out: float64 [N], output.
    """
    for v in range(len(out)):
        begin, end = indptr[v], indptr[v + 1]
        total = 0.0
        for e in range(begin, end):
            total += below[indices[e]]
        share = float64(_taken(end - begin, fanout)) / float64(max(end - begin, 1))
        out[v] = 1.0 + share * total


@compiled
def accesses(indptr, indices, before, draws, fanout, after) -> None:  # type: ignore[no-untyped-def]
    """One hop of the access probability: ``after[v] = 1 - (1 - before[v]) * prod (1 - draws[u] * min(1, l / deg u))``.

    The product is over the nodes u that have v as a neighbour.

    Args:
        indptr: int64 [N + 1]. indices: int32 [E]. before: float64 [N].
        draws: float64 [N], probability that the node draws neighbours in this hop. fanout: l; -1 for all.
        after: float64 [N], output.
    """
    for v in range(len(after)):
        after[v] = 1.0 - before[v]
    for u in range(len(draws)):
        begin, end = indptr[u], indptr[u + 1]
        if draws[u] == 0.0 or begin == end:
            continue
        missed = 1.0 - draws[u] * (float64(_taken(end - begin, fanout)) / float64(end - begin))
        for e in range(begin, end):
            after[indices[e]] *= missed
    for v in range(len(after)):
        after[v] = 1.0 - after[v]


@compiled
def locate_rows(nodes, ends, slots, out_slots, out_steps):  # type: ignore[no-untyped-def]
    """Find the trajectories that hold rows, which are numbered from the first trajectory's first step on.

    Args:
        nodes: int64 [n]. ends: int64 [T], running sum of the lengths. slots: int64 [T], -1 if it has been removed.
        out_slots, out_steps: int64 [n], outputs; slot -1 for a node that is unknown.

    Returns:
        Number of unknown nodes.
    """
    unknown, last = 0, 0
    for i in range(len(nodes)):
        node = nodes[i]
        if len(ends) == 0 or node < 0 or node >= ends[len(ends) - 1]:
            out_slots[i] = out_steps[i] = -1
            unknown += 1
            continue
        if node >= ends[last] or (last > 0 and node < ends[last - 1]):
            last = np.searchsorted(ends, node, side="right")
        out_slots[i] = slots[last]
        out_steps[i] = node - (ends[last - 1] if last > 0 else 0)
        unknown += slots[last] < 0
    return unknown


@compiled
def cached_rows(nodes, places, found, where, missed):  # type: ignore[no-untyped-def]
    """Divide nodes into those that a cache has and the others.

    Args:
        nodes: int64 [n]. places: int32 [N], row of each node in the cache, -1 for none; nodes beyond it have none.
        found, where: int64 [n], outputs: positions in `nodes` of those that it has, and their rows in the cache.
        missed: int64 [n], output: positions of the others.

    Returns:
        How many the cache has.
    """
    hits, others = 0, 0
    for i in range(len(nodes)):
        node = nodes[i]
        if node >= 0 and node < len(places) and places[node] >= 0:
            found[hits] = i
            where[hits] = places[node]
            hits += 1
        else:
            missed[others] = i
            others += 1
    return hits
