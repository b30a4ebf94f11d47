"""What the host reads of a table whose blocks lie in the memory of a GPU, and perhaps in host memory."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import numpy as np

from gear_loader.native import copying
from gear_loader.storage.counters import NUM_SPILLED
from gear_loader.storage.disk import TierReader
from gear_loader.storage.index_arrays import IndexArrays
from gear_loader.storage.region import Region
from gear_loader.utils.arrays import Array, data_address

_Outs = Mapping[int, Mapping[str, Array]]


class DeviceRows:
    """Reads trajectories of a table on a GPU for the host, as `Source` and `TierReader` say. The caller holds a ticket.

    Args:
        region: of the table. arrays: of its index.
        files: reads trajectories that lie on disk only; None without a disk tier.
    """

    def __init__(self, region: Region, arrays: IndexArrays, files: TierReader | None) -> None:
        self._memory = region.device_memory or region.block_client()
        self._region, self._layout, self._arrays = region, region.layout, arrays
        self._files = files

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
        drawn: Array | None = None,
    ) -> None:
        """Read spans of trajectories. Waits for the GPU."""
        places, files = self._arrays.extent[slots, 1], self._files
        levels = self._arrays.levels(places)
        away = np.flatnonzero(levels == 0)
        if files is not None and drawn is not None and self._arrays.counters[NUM_SPILLED]:
            files.count_hits(int(drawn[levels > 0].sum()))
        for level, copy in ((1, self._memory.read), (2, self._copy)):
            here = np.flatnonzero(levels == level)
            if len(here):
                self._read(copy, places[here], first[here], counts[here], _some(outs, here))
        if len(away):
            assert files is not None
            names, given = (slots[away], generations[away]), None if drawn is None else drawn[away]
            files.read(*names, first[away], counts[away], _some(outs, away), drawn=given)

    def _read(
        self,
        copy: Callable[[Array, Array, Array, _Outs], None],
        places: Array,
        first: Array,
        counts: Array,
        outs: Mapping[str, tuple[Array, Array]],
    ) -> None:
        """`read` of trajectories in memory, by their places in the block tables, int64 [n].

        Args:
            copy: `DeviceMemory.read`, or what does the same elsewhere.
        """
        arrays, layout, size, some = self._arrays, self._layout, self._layout.block_steps, counts > 0
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
            copy(ids, first, counts, steps)
        if once:
            one = np.ones_like(places)
            copy(arrays.ids_at(places), 0 * one, one, once)

    def _copy(self, ids: Array, first: Array, counts: Array, outs: _Outs) -> None:
        """`DeviceMemory.read` of blocks of the host part, which waits for nothing."""
        size = self._layout.block_steps
        if len(ids) and ids.max() >= self._layout.host_blocks:
            raise self._arrays.corrupt("a trajectory lies on a GPU and in host memory")
        blocks = -(-(first + counts) // size) - first // size
        span = np.repeat(np.arange(len(first)), blocks)
        begins = (
            np.arange(len(ids)) - np.repeat(np.cumsum(blocks) - blocks, blocks) + first[span] // size
        ) * size
        low = np.maximum(begins, first[span])
        steps = np.minimum(begins + size, (first + counts)[span]) - low
        for names in outs.values():
            for name, addresses in names.items():
                into = addresses[span] + (low - first[span]) * self._layout.columns[name].step_bytes
                copying.copy_spans(
                    self._region.column_place(name), ids * np.int64(size) + low - begins, steps, into
                )

    def count_hits(self, rows: int) -> None:
        """See `gear_loader.storage.disk.TierReader.count_hits`."""
        if self._files is not None:
            self._files.count_hits(rows)

    def flush(self) -> None:
        """See `gear_loader.storage.disk.TierReader.flush`."""
        if self._files is not None:
            self._files.flush()


def _some(outs: Mapping[str, tuple[Array, Array]], which: Array) -> dict[str, tuple[Array, Array]]:
    return {name: (out, offsets[which]) for name, (out, offsets) in outs.items()}
