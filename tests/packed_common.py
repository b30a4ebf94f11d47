"""Packed batches of trajectories in scattered blocks, outputs between guard bytes, and a naive account of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import torch
from gather_common import POISON, Guarded, Memory, Store, host_memory

from gear_loader.kernels.packed_plan import PIECE_WIDTH, PackedColumn, PackedPlan, PackedWork
from gear_loader.native.packed import measure
from gear_loader.native.packed_lines import count_lists, list_lines, list_pieces

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
        self.spans = np.zeros((2, count), dtype=np.int64)
        assert measure(slots, steps, extent, *window, False, self.spans) == 0
        self.total = int(self.spans[1].sum())
        starts = np.zeros(count + 1, dtype=np.int32)
        starts[1:] = np.cumsum(self.spans[1])
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
        self.work = self._listed(slots, starts, adjoin, bool(once), device)

    def _output(self, count: int, size: int, content: Any, shift: int, device: str) -> torch.Tensor:
        output = Guarded((count, size), shift=shift, device=device)
        output.expected.reshape(-1)[: len(content)] = content
        self.guarded.append(output)
        return output.out

    def _listed(self, slots: Any, starts: Any, adjoin: bool, once: bool, device: str) -> PackedWork:
        store, kinds = self.store, self.plan.kinds.numpy()
        most = int((self.spans[1] // store.block_steps + 2).sum()) + len(slots)
        pieces = np.zeros((most, PIECE_WIDTH), dtype=np.int32)
        count, bad = list_pieces(
            slots, self.spans, starts, store.extent.numpy(), store.block_ids.numpy(), store.block_steps,
            store.num_blocks, adjoin, once, pieces,
        )  # fmt: skip
        assert bad == 0
        rows = len(slots) * once
        pieces = pieces[: count + rows].copy()
        classes = np.zeros((len(kinds) + 1, 4), dtype=np.int64)
        groups, tiles = (np.zeros(n, dtype=np.int64) for n in count_lists(pieces, count, kinds, classes))
        ends = np.zeros(4, dtype=np.int64)
        list_lines(pieces, count, kinds, classes, groups, tiles, ends)
        parts = (torch.from_numpy(each).to(device) for each in (pieces, groups, tiles))
        return PackedWork(*parts, tuple(ends.tolist()), (count, rows))

    def run(self, function: Callable[..., Any], programs: int | None = None) -> None:
        """Gather by a function, and compare all bytes of the outputs and around them."""
        function(self.plan, self.work, programs=programs)
        for output in self.guarded:
            output.check()
            output.whole.fill_(POISON)
