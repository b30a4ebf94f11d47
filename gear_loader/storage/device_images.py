"""Steps of environments on a device, as a table's blocks hold them, and in which order streams touch them."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch

from gear_loader.storage.layout import LINE, round_up
from gear_loader.storage.region import Region
from gear_loader.utils.streams import current_stream

_WORDS = {8: torch.int64, 4: torch.int32, 2: torch.int16, 1: torch.uint8}


class StepImage:
    """Steps of n environments on the device, as blocks of a table hold those of a column, or of several in records.

    Args:
        region: of the table. names: the columns. n: environments. steps: of each environment.
        apart: whether each step is a row by itself, from one multiple of 16 bytes on, and not part of a block.

    Attributes:
        names: the columns. blocks: uint8 [n, K, bytes of a block], or [n, steps, bytes of a row].
    """

    def __init__(
        self,
        region: Region,
        names: list[str],
        n: int,
        steps: int,
        device: torch.device,
        *,
        apart: bool = False,
    ) -> None:
        layout = region.layout
        size = 1 if apart else layout.block_steps
        self.names, self._region, self._steps = names, region, size
        first = layout.columns[names[0]]
        stride = round_up(first.step_stride, 16) if apart else first.block_stride
        self.blocks = torch.zeros((n, -(-steps // size), stride), dtype=torch.uint8, device=device)
        self._host: torch.Tensor | None = None
        self.columns: dict[str, torch.Tensor] = {}
        """Column -> its steps, [n, K, S, *shape], S in a block; or as words of another dtype, [n, K, S, W]: wide
        ones, and where a step does not begin on a multiple of its dtype's bytes."""
        for name in names:
            place, column = layout.columns[name], layout.schema[name]
            natural = column.dtype.itemsize
            word = math.gcd(8, place.step_bytes, place.step_stride, place.inside)
            whole = word % natural == 0 and place.step_bytes < LINE
            words = self.blocks.view(column.dtype if whole else _WORDS[word])
            word = natural if whole else word
            words = words[:, :, : size * place.step_stride // word]
            steps_of = words.unflatten(2, (size, place.step_stride // word))
            begin = place.inside // word
            found = steps_of[..., begin : begin + place.step_bytes // word]
            self.columns[name] = found.unflatten(3, column.shape or (1,)) if whole else found

    def last_bytes(self, steps: int) -> int:
        """Bytes of the last block that are used with so many steps."""
        place = self._region.layout.columns[self.names[0]]
        return int((steps - (self.blocks.shape[1] - 1) * self._steps) * place.step_stride)

    def target(self) -> torch.Tensor:
        """All blocks of the table, uint8 [N, bytes of a block]."""
        return self._region.blocks(self.names[0])

    def host(self) -> torch.Tensor:
        """Pinned memory for a copy of `blocks`."""
        if self._host is None:
            self._host = torch.empty(self.blocks.shape, dtype=torch.uint8, device="cpu", pin_memory=True)
        return self._host


class StreamOrder:
    """Keeps work on the same memory in order, where calls come with different current streams.

    Attributes:
        device: where the memory is. last: the stream of the last call; None on the CPU.
    """

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.last = current_stream(device) if device.type == "cuda" else None  # where the memory becomes zero

    def follow(self, memory: Iterable[torch.Tensor]) -> None:
        """Let the current stream go on with the work of the calls before, on `memory`."""
        if self.last is None:
            return
        stream = current_stream(self.device)
        if stream.cuda_stream != self.last.cuda_stream:
            stream.wait_stream(self.last)
            for each in memory:
                each.record_stream(stream)  # it may be dropped before the work is done
        self.last = stream


def writable(region: Region, device: torch.device) -> bool:
    """Whether kernels of the device write to a table's blocks: they lie there; or it is a GPU, and they are registered
    with CUDA. Those of a GPU that reads host memory as it is are not; the copy engine brings steps to the host there.
    """
    if region.device_memory is not None:
        return region.device_memory.device == device
    return device.type == "cuda" and region.pin(device) and region.is_pinned


def follow_writes(region: Region, stream: torch.cuda.Stream) -> None:
    """Let a stream go on after copies of the host into blocks on a GPU, which may be given back by now."""
    if region.device_memory is not None:
        region.device_memory.follow(stream)


def homes(region: Region, names: Iterable[str]) -> list[list[str]]:
    """The columns by where they lie in blocks: those of the record together, others alone."""
    found: dict[int, list[str]] = {}
    for name in names:
        found.setdefault(region.layout.columns[name].base, []).append(name)
    return list(found.values())


def copy_step(place: torch.Tensor, values: torch.Tensor) -> None:
    """Copy one step of a column, [n, *shape], to its place, on the current stream."""
    if place.dtype != values.dtype or place.shape != (values.shape or (1,)):
        values = values.reshape(len(values), -1)
        # A view as wider words begins on one of them, and has them side by side: one value of a slice has any stride.
        odd = values.storage_offset() * values.element_size() % place.dtype.itemsize
        if odd or not values.is_contiguous() or values.stride(1) != 1:
            values = values.clone(memory_format=torch.contiguous_format)
        values = values.view(place.dtype).view(place.shape)
    place.copy_(values)
