"""Ragged values of a batch on a GPU that reads a table's memory: the host lists their pieces, one launch gathers all.

A value is a row of a packed batch (`gear_loader.kernels.packed`), whose steps are the largest units of 1 to 16 bytes of
which all places and sizes of its column in the batch are multiples. One piece of pinned memory crosses the bus::

    offsets   int64 [n + 1] of each column
    work      see `gear_loader.kernels.packed_plan`, from a multiple of 128 bytes on
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.buffers import Staging, grown
from gear_loader.kernels.launching import copy
from gear_loader.kernels.packed_plan import (
    PACKED_BASE,
    PACKED_OUT,
    PACKED_STRIDE,
    PIECE_WIDTH,
    WORK_WIDTH,
    PackedColumn,
    PackedPlan,
)
from gear_loader.native import ragged_copies
from gear_loader.native.packed_lines import SOURCE_WIDTH, list_work
from gear_loader.native.ragged_copies import BLOCK_SHIFT, PART_SHIFT
from gear_loader.storage.layout import round_up
from gear_loader.storage.ragged import Ragged, Values
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array

assert PIECE_WIDTH == ragged_copies.PIECE_WIDTH
_LARGEST_UNIT = 16  # bytes, of the words that the kernel writes


@dataclasses.dataclass(frozen=True)
class _Listed:
    """Values of one column of a batch.

    Attributes:
        unit: bytes. pieces: int32 [P, PIECE_WIDTH]. ends: int64 [parts], the pieces' ends in each 1 GiB of the output.
        out: ``[rows, *shape]`` on the device. first: word of the offsets in the memory of the batch.
    """

    unit: int
    pieces: Array
    ends: Array
    out: torch.Tensor
    first: int


class RaggedCuda:
    """Gathers arrays of ragged columns by a GPU that reads host memory.

    Args:
        device: the GPU. programs: size of the kernel's grid, see `gear_loader.kernels.packed`.

    Attributes:
        staging: pinned memory of batches.
    """

    def __init__(self, device: torch.device, programs: int | None) -> None:
        self._device, self._programs = device, programs
        self.staging = Staging(pinned=device.type == "cuda")

    def read(
        self,
        table: Table,
        columns: Mapping[str, Values],
        batch: Mapping[str, torch.Tensor],
        parts: list[torch.Tensor],
    ) -> dict[str, Ragged]:
        """Queue a gather of the values of a batch on the current stream; does not wait for the GPU.

        The table's memory is read until then, so the read ticket of the rows has to last as long.

        Args:
            table: pinned. columns: as for `read_ragged`, arrays alone. batch: has their records, in host memory.
            parts: gets the memory of `staging` that the GPU reads.

        Raises:
            CorruptTableError: a record is invalid; nothing was queued.
        """
        records = {name: np.ascontiguousarray(batch[name].reshape(-1, 2).numpy()) for name in columns}
        words = round_up(sum(len(each) + 1 for each in records.values()), WORK_WIDTH)
        memory = self.staging.take(8 * grown(4 * words))
        try:
            host, first, listed = memory.view(torch.int64), 0, {}
            for name, values in columns.items():
                places = host[first : first + len(records[name]) + 1].numpy()
                listed[name] = self._list(table, values, records[name], places, first)
                first += len(places)
            plan, work = self._planned(table, list(listed.values()))
            end = words if plan is None else list_work(*work, host.numpy(), words, words + WORK_WIDTH)
            if end > len(host):
                larger = self.staging.take(8 * grown(end))
                larger[: 8 * first].copy_(memory[: 8 * first])
                # In this order: an interruption must not give memory back twice.
                memory, host, smaller = larger, larger.view(torch.int64), memory
                self.staging.give(smaller)
                end = list_work(*work, host.numpy(), words, words + WORK_WIDTH)
        except BaseException:
            self.staging.give(memory)
            raise
        parts.append(memory)
        mirror = torch.empty(end, dtype=torch.int64, device=self._device)
        copy(mirror, host[:end])
        if plan is not None:
            from gear_loader.kernels import packed

            packed.gather_packed(plan, mirror[words:], programs=self._programs)
        found = {}
        for name, each in listed.items():
            offsets = mirror[each.first : each.first + len(records[name]) + 1]
            found[name] = Ragged._of(each.out, offsets, tuple(batch[name].shape[:-1]))
        return found

    def _list(self, table: Table, values: Values, records: Array, offsets: Array, first: int) -> _Listed:
        reader, row_bytes = table._engine.payload, values.row_bytes
        rows = reader.measure(records, row_bytes, offsets)
        out = torch.empty((rows, *values.shape), dtype=values.dtype, device=self._device)
        some = records[records[:, 1] != 0]
        bits = int(np.bitwise_or.reduce(some[:, 0] | some[:, 1] * row_bytes, initial=_LARGEST_UNIT))
        unit = bits & -bits
        pieces, ends = reader.list(records, row_bytes, unit, PART_SHIFT, rows * row_bytes)
        return _Listed(unit, pieces, ends, out, first)

    def _planned(self, table: Table, listed: Sequence[_Listed]) -> tuple[PackedPlan | None, tuple[Any, ...]]:
        """The plan of a launch, None if there is nothing to gather, and the first arguments of `list_work`."""
        some = [each for each in listed if len(each.pieces)]
        if not some:
            return None, ()
        outs = [each.out.view(-1).view(torch.uint8).view(-1, each.unit) for each in some]
        position = torch.empty(0, dtype=torch.int32, device=self._device)
        plan = PackedPlan([PackedColumn(None, out, once=True) for out in outs], position)
        counts = [len(each.ends) for each in some]
        columns = np.repeat(plan.table.numpy(), counts, axis=0)
        columns[:, PACKED_BASE], columns[:, PACKED_STRIDE] = table._engine.payload.address, 1 << BLOCK_SHIFT
        columns[:, PACKED_OUT] += np.concatenate([np.arange(count) << PART_SHIFT for count in counts])
        before = np.cumsum([0, *(len(each.pieces) for each in some)])
        ends = np.concatenate([at + each.ends for at, each in zip(before, some, strict=False)])
        sources = np.zeros((len(ends), SOURCE_WIDTH), dtype=np.int64)
        sources[:, :3] = np.concatenate(([0], ends[:-1]))[
            :, None
        ]  # no pieces of steps, so no numbers of steps
        sources[:, 3], sources[:, 4] = ends, np.arange(len(ends))
        sources[:, 5] = sources[:, 4] + 1
        pieces = np.concatenate([np.empty((0, PIECE_WIDTH), dtype=np.int32), *(each.pieces for each in some)])
        return plan, (pieces, sources, columns, 0, 0)
