"""Batches of a `Mixture` on the CPU: each dataset gathers its rows into their places."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import get_worker_info

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffers import TensorMemory
from gear_loader.collection.collector import Collector, TableSource
from gear_loader.collection.padded import PaddedBuffers, PaddedHost, PaddedLayout, PaddedRows
from gear_loader.collection.prefetch import Pool, Prefetcher
from gear_loader.collection.windows import source_of
from gear_loader.utils.arrays import Array

if TYPE_CHECKING:
    from gear_loader.dataset.replay_dataset import ReplayDataset

_MOST_PARTS = 256
"""Parts of a batch that are kept: where the shares vary, a dataset's rows begin and end elsewhere."""


def can_mix(datasets: Sequence[ReplayDataset]) -> bool:
    """Whether the batches of datasets with the same windows can be gathered into one."""
    kinds = {
        tuple(
            (name, dataset.table.schema[column].final)
            for name, window in dataset.windows.items()
            for column in (source_of(name, window), *getattr(window, "delivered", ()))
        )
        for dataset in datasets
    }
    return len(kinds) == 1 and all(
        dataset.device.type == "cpu"
        and dataset.layout == "padded"
        and not dataset.sample_info
        and not dataset._transforms
        for dataset in datasets
    )


class _MixedBuffers(PaddedBuffers):
    """A batch, its rows' sources, and its parts, by the number of the dataset, the first row, and how many."""

    def allocate_values(self, memory: TensorMemory) -> None:
        super().allocate_values(memory)
        self.batch["source"] = memory.empty(self.layout.batch_size, dtype=torch.int64)
        self.sources: Array = self.batch["source"].numpy()
        self.parts: dict[tuple[int, int, int], PaddedRows] = {}
        self.counts: list[int] = []


class _MixedHost(PaddedHost):
    kind = _MixedBuffers


class MixedBatches:
    """Draws batches of several datasets, for which `can_mix` holds, in one process.

    Args:
        size: rows of a batch.
    """

    def __init__(self, datasets: Sequence[ReplayDataset], size: int) -> None:
        self._datasets = list(datasets)
        first, in_worker = self._datasets[0], get_worker_info() is not None
        weighs = any(dataset.sampler.weighs for dataset in datasets)
        layout = PaddedLayout(
            first.table.schema, first.windows, batch_size=size, weighs=weighs, returns="at once"
        )
        self._hosts = [PaddedHost(layout, only=dataset.table) for dataset in datasets]
        options: dict[str, Any] = {"prefetch": 0, "keep": 1, "copy": True if in_worker else None}

        def prefetcher(table: Any, host: PaddedHost, *, shared: bool = False) -> Prefetcher:
            collector = Collector(TableSource(table), host, device=first.device, cuda=lambda: host)
            return Prefetcher(Pool(collector, shared=shared), **options)

        self._prefetcher = prefetcher(first.table, _MixedHost(layout), shared=in_worker)
        self._fills = [
            dataset.filler(prefetcher(dataset.table, host)).fill
            for dataset, host in zip(datasets, self._hosts, strict=True)
        ]

    def batch(self, counts: list[int]) -> Batch:
        """Draw a batch of so many rows of each dataset."""
        return self._prefetcher.one(self._fill, counts)

    def _fill(self, buffers: Any, counts: list[int]) -> int:
        begin = 0
        for number, count in enumerate(counts):
            end = begin + count
            if buffers.counts != counts:
                buffers.sources[begin:end] = number
            while begin < end:  # a pass over all items may end inside
                part = self._part(buffers, number, begin, end - begin)
                begin += self._datasets[number].sample_by(self._fills[number], part, end - begin)
                part.write_names()
        if buffers.computed:
            buffers.compute(begin)
        buffers.counts = counts
        return begin

    def _part(self, buffers: _MixedBuffers, number: int, first: int, count: int) -> PaddedRows:
        part = buffers.parts.get((number, first, count))
        if part is None:
            if len(buffers.parts) >= _MOST_PARTS:
                buffers.parts.clear()
            weighs = self._datasets[number].sampler.weighs
            part = PaddedRows(buffers, self._hosts[number], first, count, weighs=weighs)
            buffers.parts[number, first, count] = part
        return part
