"""Statistics of a table: contents, memory, and waits."""

from __future__ import annotations

import dataclasses
import math

from gear_loader.storage.disk import DiskStats
from gear_loader.storage.tier_counts import SLOW_SHARE

BLOCK_ENTRY_BYTES = 4 * 4
"""Bytes of the index for one block: entries in a block table and in the free stack, and use counts."""


@dataclasses.dataclass(frozen=True)
class TableStats:
    """Statistics of a table; `str()` formats a summary. Counters cover all processes.

    Attributes:
        num_trajectories, num_steps: live trajectories and their steps.
        payload_bytes: bytes of the live steps, and of their ragged values.
        resident_bytes: bytes of all blocks in use (including padding, unfinished and retired trajectories) and of
            their index entries, and those of ragged values in use.
        reserved_bytes: bytes of the region.
        fixed_row_bytes: bytes of the same trajectories in rows as long as the longest of them.
        blocks_in_use, num_blocks, block_steps: allocated blocks, total blocks, steps of a block.
        num_evicted: trajectories evicted from a full table.
        num_expired: trajectories removed by `max_age` or `max_times_sampled`.
        num_outdated: trajectories removed by `max_lag`.
        num_inserted, num_sampled: trajectories added and rows drawn.
        num_writing: trajectories being written.
        insert_wait, sample_wait: seconds that additions waited for space or the rate limiter, and draws for the rate
            limiter.
        disk: state of the copy on disk, of the table that this process created with `disk`; else None.
        num_spilled: live trajectories that are on disk only; see `Disk.size`.
        num_lost: trajectories removed because they could not be read from disk.
        spilled_bytes: bytes of the steps of the trajectories on disk only, without ragged values.
        num_hits, num_misses: rows of batches that were found in memory, and that were read from disk; both are counted
            only while some trajectories are on disk only.
        miss_bytes, miss_seconds: bytes read for them, and the seconds it took.
        promoted_bytes: bytes of trajectories that were brought back into memory.
        disk_wait: share of the time that batches were read from disk, over ten seconds, in the process that waited most
            in the last minute. From 0.7 on the disk is too slow for the loop, and ``str()`` says so.
        device_bytes, host_part_bytes: bytes of the blocks in use in a GPU's memory, and in the part of host memory
            below (``Table.create(device=, host=)``), of `resident_bytes`; 0 of other tables. `spilled_bytes` lie below.
        value_bytes: bytes of the ragged values of live trajectories in memory, part of `payload_bytes`.
        value_resident_bytes: bytes of the memory of ragged values in use, with headers, padding, unfinished and retired
            trajectories, part of `resident_bytes`. value_reserved_bytes: all of it, `Memory.payload`.
    """

    num_trajectories: int
    num_steps: int
    payload_bytes: int
    resident_bytes: int
    reserved_bytes: int
    fixed_row_bytes: int
    blocks_in_use: int
    num_blocks: int
    block_steps: int
    num_evicted: int
    num_expired: int
    num_inserted: int
    num_sampled: int
    num_writing: int
    insert_wait: float
    sample_wait: float
    num_outdated: int = 0
    disk: DiskStats | None = None
    num_spilled: int = 0
    num_lost: int = 0
    spilled_bytes: int = 0
    num_hits: int = 0
    num_misses: int = 0
    miss_bytes: int = 0
    miss_seconds: float = 0.0
    promoted_bytes: int = 0
    disk_wait: float = 0.0
    device_bytes: int = 0
    host_part_bytes: int = 0
    value_bytes: int = 0
    value_resident_bytes: int = 0
    value_reserved_bytes: int = 0

    @property
    def mean_length(self) -> float:
        """Steps of a live trajectory on average; NaN for an empty table."""
        return self.num_steps / self.num_trajectories if self.num_trajectories else math.nan

    @property
    def hit_rate(self) -> float:
        """``num_hits / (num_hits + num_misses)``; NaN before the first row."""
        rows = self.num_hits + self.num_misses
        return self.num_hits / rows if rows else math.nan

    @property
    def overhead(self) -> float:
        """resident_bytes / payload_bytes; 1 without overhead, NaN for an empty table."""
        return self.resident_bytes / self.payload_bytes if self.payload_bytes else math.nan

    @property
    def fixed_row_overhead(self) -> float:
        """fixed_row_bytes / payload_bytes, for comparison."""
        return self.fixed_row_bytes / self.payload_bytes if self.payload_bytes else math.nan

    def __str__(self) -> str:
        def line(name: str, count: int, ratio: float) -> str:
            times = "" if math.isnan(ratio) else f"  {ratio:6.3f} x payload"
            return f"{name:<14}{count:>16,} B{times}"

        payload = self.payload_bytes or math.nan
        outdated = f", outdated {self.num_outdated:,}" if self.num_outdated else ""
        mean = f", {self.mean_length:,.1f} a trajectory" if self.num_trajectories else ""
        return "\n".join(
            (
                f"{'trajectories':<14}{self.num_trajectories:>16,}",
                f"{'steps':<14}{self.num_steps:>16,}{mean}",
                f"{'blocks in use':<14}{self.blocks_in_use:>16,} of {self.num_blocks:,}, {self.block_steps} steps each",
                f"{'added':<14}{self.num_inserted:>16,}, {self.insert_wait:,.1f} s waited",
                f"{'drawn':<14}{self.num_sampled:>16,}, {self.sample_wait:,.1f} s waited",
                f"{'evicted':<14}{self.num_evicted:>16,}, expired {self.num_expired:,}{outdated}",
                line("payload", self.payload_bytes, math.nan),
                line("resident", self.resident_bytes, self.overhead),
                line("if padded", self.fixed_row_bytes, self.fixed_row_overhead),
                line("reserved", self.reserved_bytes, self.reserved_bytes / payload),
                *self._level_lines(),
                *self._value_lines(),
                *self._disk_lines(),
            )
        )

    def _level_lines(self) -> list[str]:
        if not self.device_bytes and not self.host_part_bytes:
            return []
        return [
            f"{'on the GPU':<14}{self.device_bytes:>16,} B, in host memory below {self.host_part_bytes:,} B"
        ]

    def _value_lines(self) -> list[str]:
        if not self.value_reserved_bytes:
            return []
        share = f"{self.value_resident_bytes:,} B of {self.value_reserved_bytes:,} in use"
        return [f"{'ragged values':<14}{self.value_bytes:>16,} B  {share}"]

    def _disk_lines(self) -> list[str]:
        lines = [] if self.disk is None else [f"{'disk':<14}{self.disk}"]
        if self.num_spilled or self.num_lost:
            lines.append(
                f"{'on disk only':<14}{self.num_spilled:>16,} trajectories, {self.spilled_bytes:,} B, "
                f"lost {self.num_lost:,}"
            )
        if self.num_hits or self.num_misses:
            rate = self.miss_bytes / self.miss_seconds / 1e9 if self.miss_seconds else 0.0
            lines.append(
                f"{'read from disk':<14}{self.num_misses:>16,} rows of {self.num_hits + self.num_misses:,} "
                f"({self.hit_rate:.1%} in memory), {self.miss_bytes:,} B at {rate:.2f} GB/s"
            )
        if self.disk_wait >= SLOW_SHARE:
            lines.append(
                f"{'slow disk':<14}{f'{self.disk_wait:.0%}':>16} of the time batches wait for it: give the table more "
                "memory, draw by priority, or use a faster disk"
            )
        return lines
