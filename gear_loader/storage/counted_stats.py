"""The statistics of a table, counted in its index and its memory."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from gear_loader.storage import counters as at
from gear_loader.storage.host_part import used_in_part
from gear_loader.storage.operations.view import ALL
from gear_loader.storage.payload import used_bytes, value_bytes
from gear_loader.storage.states import READY
from gear_loader.storage.stats import BLOCK_ENTRY_BYTES, TableStats
from gear_loader.storage.tier_counts import TierCounts

if TYPE_CHECKING:
    from gear_loader.storage.index import Index
    from gear_loader.storage.layout import Layout
    from gear_loader.storage.region import Region


def stats_of(index: Index, region: Region) -> TableStats:
    """The statistics of a table."""
    layout, snapshot = region.layout, index.reader.snapshot()
    counters = index.arrays.counters
    slots_in_use = layout.max_trajectories - int(counters[at.NUM_FREE_SLOTS])
    hosted = int((used_in_part(index.arrays)[:, ALL] > 0).sum())
    own = layout.writable_blocks - int(counters[at.NUM_FREE_BLOCKS])
    blocks = own + hosted
    longest = int(snapshot.lengths.max()) if len(snapshot) else 0
    per_block = layout.block_bytes + BLOCK_ENTRY_BYTES
    first = layout.arrays["extent"][0]
    step_bytes, once = layout.schema.step_bytes, layout.schema.trajectory_bytes
    values, taken = value_bytes(region, index.arrays, snapshot.slots), int(used_bytes(region, index).sum())
    return TableStats(
        num_trajectories=len(snapshot),
        num_steps=snapshot.num_steps,
        payload_bytes=snapshot.num_steps * step_bytes + len(snapshot) * once + values,
        resident_bytes=first + slots_in_use * layout.slot_bytes + blocks * per_block + taken,
        reserved_bytes=layout.region_bytes + layout.device_bytes,
        fixed_row_bytes=len(snapshot) * (longest * step_bytes + once) + values,
        blocks_in_use=blocks,
        num_blocks=layout.num_blocks,
        block_steps=layout.block_steps,
        num_evicted=int(counters[at.NUM_EVICTED]),
        num_expired=int(counters[at.NUM_EXPIRED]),
        num_inserted=int(counters[at.NEXT_SEQUENCE]) - int(counters[at.FIRST_SEQUENCE]),
        num_sampled=int(counters[at.NUM_SAMPLED]),
        num_writing=int(counters[at.NUM_WRITING]),
        insert_wait=int(counters[at.INSERT_WAIT]) / 1e9,
        sample_wait=int(counters[at.SAMPLE_WAIT]) / 1e9,
        num_spilled=int(counters[at.NUM_SPILLED]),
        num_lost=int(counters[at.NUM_LOST]),
        num_outdated=int(counters[at.NUM_OUTDATED]),
        device_bytes=own * layout.block_bytes if layout.device else 0,
        host_part_bytes=hosted * layout.block_bytes,
        value_bytes=values,
        value_resident_bytes=taken,
        value_reserved_bytes=layout.payload,
        **({} if layout.tier is None else _tier(index, layout)),
    )


def _tier(index: Index, layout: Layout) -> dict[str, Any]:
    """The statistics of a disk tier."""
    arrays = index.arrays
    spilled = (arrays.state == READY) & (arrays.extent[:, 1] < 0)
    counts = TierCounts.of(arrays.tier_counts)
    step_bytes, once = layout.schema.step_bytes, layout.schema.trajectory_bytes
    return {
        "spilled_bytes": int(arrays.extent[spilled, 0].sum()) * step_bytes + int(spilled.sum()) * once,
        "num_hits": counts.hits,
        "num_misses": counts.misses,
        "miss_bytes": counts.read_bytes,
        "miss_seconds": counts.read_seconds,
        "promoted_bytes": counts.promoted_bytes,
        "disk_wait": counts.disk_wait,
    }
