"""A node that is not there: what a server would send, out of a table of this process."""

from __future__ import annotations

import concurrent.futures
import dataclasses
from typing import Any

import numpy as np
import torch

import gear_loader as gear
from gear_loader.collection.collector import collector_for
from gear_loader.distributed.shard_sampler import records_of
from gear_loader.distributed.shard_source import ShardRows, ShardSource
from gear_loader.distributed.shards import Shards
from gear_loader.errors import TransportError
from gear_loader.storage.states import READY
from gear_loader.transport.spec import PackedSpec


class PlayedPeer:
    """Answers as a server does, out of a table of this process; or not at all."""

    def __init__(self, table: gear.Table, gone: set[int], error: TransportError | None = None) -> None:
        self.table, self.gone, self.error = table, gone, error
        self.asked = 0

    def fetch(self, spec: Any, *given: Any, out: Any, here: bool = False) -> Any:
        return (self._spans if isinstance(spec, PackedSpec) else self._windows)(spec, *given, out)

    def _windows(self, spec: Any, slots: Any, anchors: Any, generations: Any, out: Any) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.asked += len(slots)
        if self.error is not None:
            future.set_exception(self.error)
            return future
        state, generation, _ = self.table._engine.reader().slot_states()
        gone = np.isin(slots, list(self.gone)) | (state[slots] != READY) | (generation[slots] != generations)
        slots, anchors = np.where(gone, np.flatnonzero(state == READY)[0], slots), np.where(gone, 0, anchors)
        cpu = torch.device("cpu")
        returned = {name: each for each in spec.returns for name in each.names}
        stored: dict[str, Any] = {
            name: dataclasses.replace(each, dtype=None, scale=None)
            for name, each in spec.windows.items()
            if name not in returned
        }
        for each in spec.returns:
            columns = [spec.sources[name] for name in each.names]
            n, following = spec.windows[each.reward].length, tuple(columns[2:])
            stored[each.reward] = gear.NStep(columns[0], n, each.gamma, columns[1], following)
        data = collector_for(ShardSource(Shards(self.table)), stored, batch_size=len(slots), device=cpu)
        buffers = data.buffers()
        records = records_of(self.table, slots, anchors)
        rows = ShardRows(np.zeros(len(slots), dtype=np.int64), records, None, None)
        data.gather(buffers, rows)
        for ticket in rows.tickets.values():  # else the table has no room at some time
            ticket.end()
        out[:] = 255
        for piece in spec.pieces(len(slots)):
            mask: Any = buffers.batch["mask"]
            masks = mask.get(piece.name) if isinstance(mask, dict) else mask
            if found := returned.get(piece.name):
                values, place = buffers.batch[found.reward], found.names.index(piece.name)
                names = ("mask", "bootstrap") if piece.kind == "mask" else ("return", "discount")
                tensor = values[names[place]] if place < 2 else values["next"][spec.sources[piece.name]]
            else:
                tensor = masks if piece.kind == "mask" else buffers.batch[piece.name]
            values = tensor.contiguous().reshape(len(slots), -1).view(torch.uint8).numpy()
            out[piece.offset : piece.offset + values.size] = values.reshape(-1)
        first = spec.data_bytes(len(slots))
        out[first : first + len(slots)] = gone
        future.set_result(out[first : first + len(slots)])
        return future

    def _spans(
        self, spec: PackedSpec, slots: Any, firsts: Any, generations: Any, counts: Any, out: Any
    ) -> Any:
        future: concurrent.futures.Future[Any] = concurrent.futures.Future()
        self.asked += len(slots)
        if self.error is not None:
            future.set_exception(self.error)
            return future
        state, generation, _ = self.table._engine.reader().slot_states()
        gone = np.isin(slots, list(self.gone)) | (state[slots] != READY) | (generation[slots] != generations)
        count, total = len(slots), int(counts.sum())
        out[:] = 255
        status = out[spec.data_bytes(count, total) :][:count]
        status[:] = gone
        begins = np.cumsum(counts) - counts
        for i in np.flatnonzero(~gone).tolist():
            rows = self.table[int(slots[i])]
            for span in spec.spans(count, total):
                values = rows[spec.columns[span.name]]
                low, begin = (0, i) if span.once else (int(firsts[i]), int(begins[i]))
                steps = values[None] if span.once else values[low : low + int(counts[i])]
                bytes_ = steps.contiguous().reshape(-1).view(torch.uint8).numpy()
                first = span.offset + begin * span.step_bytes
                out[first : first + len(bytes_)] = bytes_
        future.set_result(status)
        return future
