"""Where the features of nodes lie, over ranks and tiers, by how likely each rank reads them."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array, as_array
from gear_loader.utils.checks import at_least

REPLICATED, UNPLACED = -1, -2
"""Owners of a row that every rank has, and of one that none has."""


@dataclasses.dataclass(frozen=True, eq=False)
class FeaturePlacement:
    """The tier of each node's features.

    Attributes:
        owner: int32 [N], rank whose device memory holds the row; `REPLICATED` or `UNPLACED`.
        in_host: bool [N], whether host memory holds the row of an unplaced node; the others are on disk.
        ranks: number of ranks.
    """

    owner: Array
    in_host: Array
    ranks: int

    def rows(self, rank: int) -> Array:
        """Nodes whose rows lie in the rank's device memory, int64 [n], ascending."""
        return np.flatnonzero((self.owner == REPLICATED) | (self.owner == rank))

    def shares(self, probabilities: Any) -> dict[str, float]:
        """Part of all reads that each tier serves: ``local``, ``peer`` (another rank's device), ``host``, ``disk``.

        Args:
            probabilities: float [R, N] or [N]: how likely, or how often, each rank reads each node's row.

        Raises:
            SchemaError: another shape, or no probability above 0.
        """
        reads = checked_probabilities(probabilities, self.ranks, len(self.owner))
        total = reads.sum()
        if total == 0:
            raise SchemaError("No probability is above 0; expected some reads to divide among the tiers.")
        owned = self.owner >= 0
        local = (
            reads[:, self.owner == REPLICATED].sum() + reads[self.owner[owned], np.flatnonzero(owned)].sum()
        )
        placed = reads[:, self.owner != UNPLACED].sum()
        host = reads[:, (self.owner == UNPLACED) & self.in_host].sum()
        parts = {"local": local, "peer": placed - local, "host": host, "disk": total - placed - host}
        return {tier: float(part / total) for tier, part in parts.items()}


def place(
    probabilities: Any,
    *,
    capacity: int,
    ranks: int | None = None,
    replicated: int = 0,
    host_capacity: int | None = None,
) -> FeaturePlacement:
    """Place features over the device memories of ranks, host memory and disk.

    The `replicated` rows that all ranks together read most go to every rank. Of the others, each rank takes those with
    the highest score, R p_r minus the sum of the other ranks' p: what it gains by having the row itself over leaving it
    to the others. Rows are placed from the highest score down, each at the best rank with room. Ties go to the smaller
    node, then the smaller rank. What no device holds goes to host memory, the most read first, and then to disk.

    Args:
        probabilities: float [R, N] or, the same for all ranks, [N]: `access_probability`, or numbers of reads.
        capacity: rows that a rank's device memory holds.
        ranks: R; needed for probabilities [N], 1 by default.
        replicated: rows of `capacity` that are the same on all ranks.
        host_capacity: rows that host memory holds; None for all.

    Raises:
        SchemaError: invalid sizes or probabilities.
    """
    capacity, replicated = at_least("capacity", capacity, 0), at_least("replicated", replicated, 0)
    if replicated > capacity:
        raise SchemaError(f"replicated is {replicated:,}; expected at most capacity, {capacity:,}.")
    values = np.asarray(as_array(probabilities, "probabilities"))
    given = len(values) if values.ndim == 2 else 1
    ranks = at_least("ranks", given if ranks is None else ranks)
    reads = checked_probabilities(values, ranks, values.shape[-1] if values.ndim else 0)
    size = reads.shape[1]
    total = reads.sum(axis=0)
    hottest = np.argsort(-total, kind="stable")
    owner = np.full(size, UNPLACED, dtype=np.int32)
    owner[hottest[:replicated]] = REPLICATED
    rest = np.sort(hottest[replicated:])
    room = np.full(ranks, capacity - min(replicated, size))
    scores = (ranks + 1) * reads[:, rest] - total[rest]
    # From the highest score down: node by node, and a node's ranks from the best on, so each has one place at most.
    order = np.argsort(-scores.T.reshape(-1), kind="stable")
    for start in range(0, len(order), _AT_ONCE):
        if not room.any():
            break
        for entry in order[start : start + _AT_ONCE].tolist():
            node, rank = rest[entry // ranks], entry % ranks
            if owner[node] == UNPLACED and room[rank]:
                owner[node] = rank
                room[rank] -= 1
    in_host = np.zeros(size, dtype=bool)
    left = hottest[owner[hottest] == UNPLACED]
    in_host[left if host_capacity is None else left[: at_least("host_capacity", host_capacity, 0)]] = True
    return FeaturePlacement(owner, in_host, ranks)


_AT_ONCE = 1 << 16


def checked_probabilities(probabilities: Any, ranks: int, size: int) -> Array:
    """Probabilities as float64 [ranks, size]."""
    values = np.asarray(as_array(probabilities, "probabilities"))
    if values.dtype.kind not in "fiu" or values.shape not in ((size,), (ranks, size)):
        raise SchemaError(
            f"probabilities is {values.dtype} {list(values.shape)}; expected floats [{size}] or [{ranks}, {size}]."
        )
    reads = np.broadcast_to(values.astype(np.float64), (ranks, size))
    if not (np.isfinite(reads) & (reads >= 0)).all():
        raise SchemaError("probabilities has values that are negative or not finite; expected others.")
    return reads
