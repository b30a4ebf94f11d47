"""What the host reads of a table whose blocks lie in the memory of a GPU."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array, data_address


class DeviceRows:
    """Reads trajectories of a table on a GPU for the host, as `Source` and `TierReader` say. The caller holds a ticket.

    Args:
        region: of the table. arrays: of its index.
    """

    def __init__(self, region: Region, arrays: IndexArrays) -> None:
        assert region.device_memory is not None
        self._memory, self._layout, self._arrays = region.device_memory, region.layout, arrays

    def sizes(self, slots: Array) -> Array:
        found: Array = self._arrays.extent[slots][:, [0, 2]]
        return found

    def read(
        self,
        slots: Array,
        generations: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
        *,
        drawn: int = 0,
    ) -> None:
        """Read spans of trajectories. Waits for the GPU."""
        arrays, layout = self._arrays, self._layout
        places, size, some = arrays.extent[slots, 1], layout.block_steps, counts > 0
        steps, once = dict[int, dict[str, Array]](), dict[int, dict[str, Array]]()
        for name, (out, offsets) in outs.items():
            is_once = layout.schema[name].trajectory
            addresses = data_address(out) + (offsets if is_once else offsets[some])
            (once if is_once else steps).setdefault(layout.columns[name].base, {})[name] = addresses
        if steps:
            first, counts, begins = first[some], counts[some], places[some]
            low = first // size
            blocks = -(-(first + counts) // size) - low
            inside = np.arange(int(blocks.sum())) - np.repeat(np.cumsum(blocks) - blocks, blocks)
            ids = arrays.ids_at(np.repeat(begins + low, blocks) + inside)
            self._memory.read(ids, first, counts, steps)
        if once:
            one = np.ones_like(places)
            self._memory.read(arrays.ids_at(places), 0 * one, one, once)

    def count_hits(self, rows: int) -> None:
        """Nothing: no table on a GPU has a disk tier."""

    def flush(self) -> None:
        """Nothing, as `count_hits`."""
