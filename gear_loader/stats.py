"""What a table holds and what it costs."""

from __future__ import annotations

import dataclasses
import math

__all__ = ["TableStats"]


@dataclasses.dataclass(frozen=True)
class TableStats:
    """What a table holds and what it costs; `str()` of it is a readable summary.

    Attributes:
        num_trajectories, num_steps: live trajectories and their steps.
        payload_bytes: bytes of the live steps themselves.
        resident_bytes: bytes of all blocks in use (padding, unfinished and not yet reusable ones included) and of
            the index entries that belong to them.
        reserved_bytes: bytes of the whole region.
        fixed_row_bytes: what the same trajectories take where each has a row as long as the longest of them.
        blocks_in_use, num_blocks, block_steps: blocks taken, blocks in all, steps of a block.
        num_evicted: trajectories evicted so far.
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

    @property
    def overhead(self) -> float:
        """resident_bytes / payload_bytes; 1 is no waste, NaN for an empty table."""
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
        return "\n".join(
            (
                f"{'trajectories':<14}{self.num_trajectories:>16,}",
                f"{'steps':<14}{self.num_steps:>16,}",
                f"{'blocks in use':<14}{self.blocks_in_use:>16,} of {self.num_blocks:,}, {self.block_steps} steps each",
                f"{'evicted':<14}{self.num_evicted:>16,}",
                line("payload", self.payload_bytes, math.nan),
                line("resident", self.resident_bytes, self.overhead),
                line("fixed rows", self.fixed_row_bytes, self.fixed_row_overhead),
                line("reserved", self.reserved_bytes, self.reserved_bytes / payload),
            )
        )
