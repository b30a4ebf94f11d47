"""The state of a table's disk tier, read from the table's file without attaching to it."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from gear_loader.storage.counters import DISK_FULL, NUM_LOST, NUM_SPILLED, SPILLER
from gear_loader.storage.layout import Layout, read_tier
from gear_loader.storage.tier_counts import SLOW_SHARE, TierCounts


@dataclasses.dataclass(frozen=True)
class TierState(TierCounts):
    """The state of a disk tier.

    Attributes:
        path: of its directory. size: most bytes of its files. spilled: trajectories that lie there only. lost: those
            that were removed because they could not be read.
        owner: process that moves trajectories there; 0 if there is none. full: whether the disk is full.
    """

    path: str = ""
    size: int = 0
    spilled: int = 0
    lost: int = 0
    owner: int = 0
    full: bool = False

    @classmethod
    def read(cls, fd: int, layout: Layout, counters: Sequence[int]) -> TierState | None:
        """The state in a table's open file; None without a disk tier.

        Args:
            layout, counters: of the file, see `read_counters`.

        Raises:
            As `read_counters`.
        """
        if layout.tier is None:
            return None
        return cls(
            **dataclasses.asdict(TierCounts.of(read_tier(fd, layout))),
            path=layout.tier.path,
            size=layout.tier.size,
            spilled=counters[NUM_SPILLED],
            lost=counters[NUM_LOST],
            owner=counters[SPILLER],
            full=bool(counters[DISK_FULL]),
        )

    @property
    def hit_rate(self) -> float | None:
        """Share of the rows of batches that were in memory; None before the first."""
        rows = self.hits + self.misses
        return self.hits / rows if rows else None

    def __str__(self) -> str:
        rate = "" if self.hit_rate is None else f", {self.hit_rate:.0%} of the rows found in memory"
        speed = self.read_bytes / self.read_seconds / 1e9 if self.read_seconds else 0.0
        read = f", {self.read_bytes:,} B read at {speed:.2f} GB/s" if self.read_bytes else ""
        lost = f", {self.lost:,} lost" if self.lost else ""
        state = "" if self.owner else ", nobody moves trajectories there"
        state += ", the disk is full" if self.full else ""
        if self.disk_wait >= SLOW_SHARE:
            state += f"; too slow: batches wait for it {self.disk_wait:.0%} of the time"
        return f"{self.spilled:,} trajectories in {self.path} only{rate}{read}{lost}{state}"
