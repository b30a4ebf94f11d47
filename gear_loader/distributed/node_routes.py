"""An all-to-all between ranks of nodes, by which one rank of a node sends one other node one message.

The ranks of a node give each other the parts for other nodes, then a rank for each pair of nodes exchanges all parts of
theirs, and the ranks of a node give each other what has come. In node `a` the rank with the number ``b % g`` exchanges
with node `b`, where it is the rank with the number ``a % g``: all ranks carry about as many bytes as they send.

With W ranks on N = W / g nodes a rank sends ``3 (g - 1)`` messages within its node and up to ``2 N / g - 1`` to others,
in place of W - 1. About half of the latter are empty: gloo's all-to-all in a group sends a message to each member.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from gear_loader.native.exchange_loops import copy_ranges
from gear_loader.utils.arrays import Array

AllToAll = Callable[[Array, Array, Array], Array]
"""An all-to-all in a group: the parts for its members, uint8, and bytes of the part for, and from, each, int64 [m]."""

_FEWER = 2  # so many times fewer messages of a rank are worth three exchanges more


def starts(sizes: Array) -> Array:
    """Where parts of these sizes begin, int64 of the same shape, if they lie one after another."""
    flat = sizes.reshape(-1)
    begins: Array = (np.cumsum(flat) - flat).reshape(sizes.shape)
    return begins


def cut(data: Array, places: Array, sizes: Array) -> Array:
    """The parts of these sizes at these places of `data`, one after another, uint8."""
    places, sizes = places.reshape(-1), sizes.reshape(-1)
    parts: Array = np.empty(sizes.sum(), dtype=np.uint8)
    copy_ranges(parts, np.cumsum(sizes) - sizes, data, places, sizes)
    return parts


class NodeRoutes:
    """How the bytes of one rank's all-to-all go by way of the ranks of its node.

    Args:
        rank: this rank. nodes: of each rank, by which ranks of the same node are known.

    Attributes:
        near, far: ranks of the two groups in which it exchanges, ascending: those of its node, and those of other nodes
            with which it exchanges for its node, with itself.
    """

    def __init__(self, rank: int, nodes: Sequence[str]) -> None:
        _, first, number = np.unique(np.array(nodes), return_index=True, return_inverse=True)
        number = np.argsort(np.argsort(first))[number]  # in the order in which they appear
        members = np.argsort(number, kind="stable").reshape(len(first), -1)  # [N, g]
        size = members.shape[1]
        self._rank, self._own = rank, (own := int(number[rank]))
        self.near: Array = members[own]
        self._size, me = size, int(np.flatnonzero(self.near == rank)[0])
        there = own % size  # number of the rank of another node that exchanges with this one

        def carried(mate: int) -> Array:
            """Nodes with which a rank of this node exchanges, in the order of the ranks there."""
            each = np.arange(mate, len(first), size)
            each = each[each != own]
            in_order: Array = each[np.argsort(members[each, there])]
            return in_order

        every = np.arange(len(first))
        mine, others = members[every % size == there, me], members[every % size == me, there]
        self.far: Array = np.unique(np.concatenate((mine, others, [rank])))
        nodes_of = [carried(mate) for mate in range(size)]
        self._peers = np.searchsorted(
            self.far, members[nodes_of[me], there]
        )  # of the nodes that this rank carries
        self._inner = members[nodes_of[me]]  # [K, g]
        # Parts in the order in which they go to this node's ranks: that for a rank itself, and those it carries.
        order = [
            np.concatenate(([mate], members[each].reshape(-1)))
            for mate, each in zip(self.near, nodes_of, strict=True)
        ]
        self._order = np.concatenate(order)
        self._begins = starts(np.array([len(each) for each in order]))
        # Parts in the order in which they come from them at the end: those of nodes that a rank carries.
        self._last = np.concatenate([members[each].reshape(-1) for each in nodes_of])
        self._last_of = np.repeat(np.arange(size), [len(each) * size for each in nodes_of])

    @classmethod
    def of(cls, rank: int, nodes: Sequence[str]) -> NodeRoutes | None:
        """The routes of a rank; None if they are not worth it, or nodes have different numbers of ranks."""
        counts = np.unique(np.unique(np.array(nodes), return_counts=True)[1])
        if len(counts) != 1:
            return None
        routes = cls(rank, nodes)
        return routes if _FEWER * routes.most_messages <= len(nodes) - 1 else None

    @property
    def most_messages(self) -> int:
        """Messages of an exchange that a rank sends, at most; the same on all ranks."""
        num_nodes = (len(self._last) + self._size) // self._size
        return 3 * (self._size - 1) + 2 * -(-num_nodes // self._size) - 1

    def exchange(self, data: Array, outs: Array, ins: Array, near: AllToAll, far: AllToAll) -> Array:
        """The all-to-all of all ranks; see `SingleProcess.all_to_all`.

        Args:
            near, far: all-to-all in the groups of these names.
        """
        size, inner = self._size, self._inner
        told = np.concatenate((outs, ins)).view(np.uint8)
        same: Array = np.full(size, len(told), dtype=np.int64)
        sizes = near(np.tile(told, size), same, same).view(np.int64).reshape(size, 2, -1)
        # Each part to the rank of this node that carries it.
        first = outs[self._order]
        came = np.concatenate(
            (sizes[:, 0, [self._rank]], sizes[:, 0, inner.reshape(-1)]), axis=1
        )  # [g, 1 + K g]
        received = near(
            cut(data, starts(outs)[self._order], first),
            np.add.reduceat(first, self._begins),
            came.sum(axis=1),
        )
        places, direct = starts(came), came[:, 0]
        # All parts of this node for another one, by sender and receiver; and back.
        gone = came[:, 1:].reshape(size, -1, size).transpose(1, 0, 2)  # [K, g, g]
        at = places[:, 1:].reshape(size, -1, size).transpose(1, 0, 2)
        coming = sizes[:, 1, inner].transpose(1, 2, 0)  # [K, g, g]
        sends, gets = np.zeros((2, len(self.far)), dtype=np.int64)
        sends[self._peers], gets[self._peers] = gone.sum(axis=(1, 2)), coming.sum(axis=(1, 2))
        other = far(cut(received, at, gone), sends, gets)
        # To the rank of this node whose part it is.
        each = coming.transpose(2, 0, 1)  # [g, K, g]
        last = ins[self._last]
        passed = near(
            cut(other, starts(coming).transpose(2, 0, 1), each),
            each.sum(axis=(1, 2)),
            np.bincount(self._last_of, weights=last, minlength=size).astype(np.int64),
        )
        answer: Array = np.empty(ins.sum(), dtype=np.uint8)
        copy_ranges(
            answer,
            starts(ins)[self.near],
            received,
            np.ascontiguousarray(places[:, 0]),
            np.ascontiguousarray(direct),
        )
        copy_ranges(answer, starts(ins)[self._last], passed, starts(last), last)
        return answer

    def gather(self, data: Array, near: AllToAll, far: AllToAll) -> list[Array]:
        """What each rank has, uint8 [n] in their order; `data`: what this one has."""
        here = _to_some(near, np.arange(self._size), data, self._size)
        node = np.concatenate((np.array([len(each) for each in here]).view(np.uint8), *here))
        there = _to_some(far, self._peers, node, len(self.far))
        carried = np.concatenate([data[:0], *(there[peer] for peer in self._peers.tolist())])
        passed = np.concatenate(_to_some(near, np.arange(self._size), carried, self._size))
        found = dict(zip(self.near.tolist(), here, strict=True))
        for ranks in self._last.reshape(-1, self._size).tolist():  # of a node each
            counts = np.frombuffer(passed[: 8 * self._size].tobytes(), dtype=np.int64)
            *parts, passed = np.split(passed[8 * self._size :], np.cumsum(counts))
            found |= zip(ranks, parts, strict=True)
        return [found[rank].copy() for rank in range(len(found))]


def _to_some(all_to_all: AllToAll, targets: Array, data: Array, size: int) -> list[Array]:
    """Send the same bytes to some members of a group, ascending; return those of each member."""
    outs, eight = np.zeros(size, dtype=np.int64), np.full(size, 8, dtype=np.int64)
    outs[targets] = len(data)
    ins = all_to_all(outs.view(np.uint8), eight, eight).view(np.int64)
    return np.split(all_to_all(np.tile(data, len(targets)), outs, ins), np.cumsum(ins)[:-1])
