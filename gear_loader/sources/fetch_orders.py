"""Which episodes of a source are fetched, one after another, for a table that cannot hold all at once."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator

import numpy as np

from gear_loader.selection.random import key
from gear_loader.selection.samplers import Prioritized
from gear_loader.sources.priority_record import PriorityDraws, PriorityRecord
from gear_loader.sources.refresh_options import Refresh


@dataclasses.dataclass(frozen=True)
class EpisodeRange:
    """Episodes that are read one after another.

    Attributes:
        first, last: the first one, and the last one + 1. weight: importance weight of each.
    """

    first: int
    last: int
    weight: float = 1.0


@dataclasses.dataclass(frozen=True)
class Passes:
    """The order of the episodes of a source in each epoch, of all of them or of a shard's.

    Attributes:
        starts: as of `EpisodeReader`. count: episodes of the source. seed: of the orders.
        shard, num_shards: which part of each order.
    """

    starts: np.ndarray
    count: int
    seed: int
    shard: int = 0
    num_shards: int = 1

    def _bounds(self) -> tuple[int, int]:
        return part_of(self.count, self.shard, self.num_shards)

    def __len__(self) -> int:
        """Episodes of an epoch."""
        first, last = self._bounds()
        return last - first

    def pieces(self, epoch: int, skip: int = 0) -> Iterator[EpisodeRange]:
        """What is read in an epoch, without its first episodes."""
        starts = self.starts[self.starts < self.count]
        begins = np.random.default_rng([self.seed, epoch]).permutation(len(starts))
        ends = np.append(starts[1:], self.count)[begins]
        begins = starts[begins]
        first, last = self._bounds()
        first += skip
        place = 0
        for begin, end in zip(begins.tolist(), ends.tolist(), strict=True):
            low, high = max(first - place, 0), min(last - place, end - begin)
            if low < high:
                yield EpisodeRange(begin + low, begin + high)
            place += end - begin

    def numbers(self, positions: np.ndarray) -> np.ndarray:
        """The episodes fetched at these positions, counted from the beginning of the first epoch on, int64 [n]."""
        found = np.empty(len(positions), dtype=np.int64)
        for epoch in np.unique(positions // len(self)).tolist():
            order = np.concatenate([np.arange(piece.first, piece.last) for piece in self.pieces(epoch)])
            here = positions // len(self) == epoch
            found[here] = order[positions[here] % len(self)]
        return found


class PriorityOrder:
    """Episodes drawn by priority, of all of a source or of a shard's: a part of it, drawn once for all epochs.

    An epoch is as many draws as there are episodes. A draw is that of its number, from the first one on, and of the
    priorities known when it is made: before the episode is read, which is some episodes before it is added.

    Args:
        record: of all episodes. count: episodes of the source. refresh: its sampler and seed.
        shard, num_shards: which part.

    Attributes:
        numbers: of the part, int64 [n], ascending. draws: makes the draws.
    """

    def __init__(
        self, record: PriorityRecord, count: int, refresh: Refresh, shard: int = 0, num_shards: int = 1
    ) -> None:
        assert isinstance(refresh.sampler, Prioritized)
        first, last = part_of(count, shard, num_shards)
        order = (
            np.arange(count) if num_shards == 1 else np.random.default_rng(refresh.seed).permutation(count)
        )
        self.numbers = np.sort(order[first:last])
        self.draws = PriorityDraws(record, self.numbers, refresh.sampler, key(refresh.seed, 0, shard))

    def __len__(self) -> int:
        return len(self.numbers)

    def pieces(self, epoch: int, skip: int = 0) -> Iterator[EpisodeRange]:
        """What is read in an epoch, without its first draws."""
        for place in range(skip, len(self)):
            number, weight = self.draws.draw(epoch * len(self) + place)
            yield EpisodeRange(number, number + 1, weight)


def part_of(count: int, shard: int, num_shards: int) -> tuple[int, int]:
    """First and last + 1 of the items that a shard takes."""
    return shard * count // num_shards, (shard + 1) * count // num_shards
