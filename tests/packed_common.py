"""Packed batches of trajectories in scattered blocks, outputs between guard bytes, and a naive account of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gather_common import POISON, Guarded, Memory, Store, host_memory

from gear_loader.kernels.packed_plan import WORK_WIDTH, PackedColumn, PackedPlan
from gear_loader.native.packed_lines import PLANNED_WIDTH, plan_rows

WHOLE = (0, 2**31 - 1)
"""Offset and length of the window of a whole trajectory."""


class PackedBatch:
    """Rows of a store, as a packed batch is gathered and as it must be.

    Args:
        store: whose columns are those of steps.
        rows: their trajectories. anchors: of the windows.
        once: bytes of the values of columns per trajectory, each in the trajectory's first block.
        window: offset and length. spare: rows and steps that the outputs have room for beyond those of the batch.
        shift: bytes by which outputs are not aligned.
    """

    def __init__(
        self,
        store: Store,
        rows: Sequence[int],
        *,
        anchors: Sequence[int] | None = None,
        once: Sequence[int] = (),
        window: tuple[int, int] = WHOLE,
        spare: int = 3,
        shift: int = 0,
        device: str = "cpu",
        memory: Memory = host_memory,
    ) -> None:
        self.store, count = store, len(rows)
        slots = np.array(rows, dtype=np.int64)
        steps = np.zeros(count, dtype=np.int64) if anchors is None else np.array(anchors, dtype=np.int64)
        extent, ids = store.extent.numpy(), store.block_ids.numpy()
        lengths = extent[slots, 0]
        low = np.clip(steps + window[0], 0, lengths)
        self.spans = np.stack((low, np.maximum(np.minimum(steps + sum(window), lengths), low) - low))
        self.total = int(self.spans[1].sum())
        pairs = list(zip(store.sources, store.rows, strict=True))
        adjoin = all(each.stride(0) == store.block_steps * rows_of[0].shape[1] for each, rows_of in pairs)

        random = np.random.default_rng(count)
        self.guarded: list[Guarded] = []
        columns = []
        for source, values in zip(store.sources, store.rows, strict=True):
            parts = [
                values[slot][low : low + n]
                for slot, (low, n) in zip(rows, self.spans.T.tolist(), strict=True)
            ]
            content = np.concatenate([part.reshape(-1) for part in parts]) if parts else np.empty(0, np.uint8)
            out = self._output(self.total + spare, values[0].shape[1], content, shift, device)
            columns.append(PackedColumn(source, out))
        for size in once:
            stride = -(-size // 128) * 128
            source = memory(store.num_blocks * stride).view(store.num_blocks, stride)
            source.copy_(torch.from_numpy(random.integers(0, 256, source.shape, dtype=np.uint8)))
            content = source.numpy()[[ids[extent[slot, 1]] for slot in rows], :size].reshape(-1)
            columns.append(
                PackedColumn(source, self._output(count + spare, size, content, shift, device), once=True)
            )
        spans = self.spans.T.tolist()
        numbers = np.array([step for low, n in spans for step in range(low, low + n)], dtype=np.int32)
        position = (
            self._output(self.total + spare, 4, numbers.view(np.uint8), 0, device).view(-1).view(torch.int32)
        )
        self.plan = PackedPlan(columns, position)
        self.work = self._planned(slots, steps, window, adjoin).to(device)

    def _output(self, count: int, size: int, content: Any, shift: int, device: str) -> torch.Tensor:
        output = Guarded((count, size), shift=shift, device=device)
        output.expected.reshape(-1)[: len(content)] = content
        self.guarded.append(output)
        return output.out

    def _planned(self, slots: Any, anchors: Any, window: tuple[int, int], adjoin: bool) -> torch.Tensor:
        """The work, after calls with too little room, which say how much is needed."""
        store, planned = self.store, np.zeros(PLANNED_WIDTH, dtype=np.int64)
        starts = np.zeros(len(slots) + 1, dtype=np.int32)
        pieces, memory = np.zeros((1, 5), dtype=np.int32), np.zeros(WORK_WIDTH, dtype=np.int64)
        spans = np.zeros_like(self.spans)
        while True:
            plan_rows(
                slots, anchors, False, np.array([*window, 0]), store.extent.numpy(), store.block_ids.numpy(),
                store.block_steps, store.num_blocks, adjoin, self.plan.table.numpy(), spans, starts, pieces, memory, 0,
                planned,
            )  # fmt: skip
            total, longest, bad, needed, words = planned.tolist()
            assert (total, longest, bad) == (self.total, self.spans[1].max(initial=0), 0)
            if needed > len(pieces):
                pieces = np.zeros((needed, 5), dtype=np.int32)
            elif words > len(memory):
                assert not memory.any()
                memory = np.full(words, -1, dtype=np.int64)
            else:
                break
        np.testing.assert_array_equal(spans, self.spans)
        np.testing.assert_array_equal(starts, np.cumsum([0, *self.spans[1]]))
        return torch.from_numpy(memory)

    def run(self, function: Callable[..., Any], programs: int | None = None) -> None:
        """Gather by a function, and compare all bytes of the outputs and around them."""
        function(self.plan, self.work, programs=programs)
        for output in self.guarded:
            output.check()
            output.whole.fill_(POISON)
