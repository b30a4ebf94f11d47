"""Buffers that an emulated kernel may access, and who accessed which byte when."""

from __future__ import annotations

import ctypes
import dataclasses
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch

Array = np.ndarray[Any, Any]

READ, WRITE, ATOMIC = range(3)
_KINDS = ("read", "written", "changed by an atomic operation")


class InvalidAccessError(Exception):
    """A kernel accessed memory that it was not given, or at an address that is not aligned."""


class RaceError(Exception):
    """Two warps, or two blocks, accessed the same byte with nothing in between that orders them."""


@dataclasses.dataclass
class Buffer:
    """`size` bytes from `start`; `host` if a GPU reads them over the bus."""

    start: int
    stop: int
    name: str
    host: bool
    data: Array


class Memory:
    """Global memory: disjoint buffers, in the order of their addresses."""

    def __init__(self) -> None:
        self.buffers: list[Buffer] = []
        self._starts = np.empty(0, dtype=np.uint64)

    def add(self, address: int, size: int, name: str, *, host: bool = False) -> None:
        """Allow access to `size` bytes; what overlaps becomes one buffer."""
        if size == 0:
            return
        start, stop, apart = address, address + size, []
        for buffer in self.buffers:
            if buffer.stop <= start or stop <= buffer.start:
                apart.append(buffer)
            else:
                start, stop = min(start, buffer.start), max(stop, buffer.stop)
                name, host = buffer.name, host or buffer.host
        data = np.frombuffer((ctypes.c_uint8 * (stop - start)).from_address(start), dtype=np.uint8)
        self.buffers = sorted([*apart, Buffer(start, stop, name, host, data)], key=lambda each: each.start)
        self._starts = np.array([each.start for each in self.buffers], dtype=np.uint64)

    def add_tensor(self, tensor: torch.Tensor, name: str, *, host: bool = False) -> None:
        """Allow access to the bytes from a tensor's first element to its last."""
        if tensor.numel():
            reach = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
            self.add(tensor.data_ptr(), (reach + 1) * tensor.element_size(), name, host=host)

    def _places(self, addresses: Array, width: int, what: str) -> Iterable[tuple[Buffer, Array, Array]]:
        """For each buffer: which addresses are in it, and their positions [n, width]."""
        if (addresses % np.uint64(width)).any():
            bad = int(addresses[addresses % np.uint64(width) != 0][0])
            raise InvalidAccessError(
                f"{what}: {width} bytes at {bad:#x}, which is not a multiple of {width}."
            )
        numbers = np.searchsorted(self._starts, addresses, side="right").astype(np.int64) - 1
        for number in np.unique(numbers).tolist():
            chosen = np.flatnonzero(numbers == number)
            part = addresses[chosen]
            if number < 0:
                raise InvalidAccessError(f"{what}: address {int(part[0]):#x} is in no buffer.")
            buffer = self.buffers[number]
            last = int(part.max()) + width
            if last > buffer.stop:
                raise InvalidAccessError(
                    f"{what}: {width} bytes at {last - width:#x} are in no buffer; the one below is {buffer.name}, "
                    f"[{buffer.start:#x}, {buffer.stop:#x})."
                )
            yield (
                buffer,
                chosen,
                (part - np.uint64(buffer.start)).astype(np.int64)[:, None] + np.arange(width),
            )

    def load(self, addresses: Array, width: int, what: str = "load") -> tuple[Array, Array]:
        """uint8 [n, width] at the addresses, and bool [n]: whether that is host memory."""
        found = np.empty((len(addresses), width), dtype=np.uint8)
        host = np.zeros(len(addresses), dtype=bool)
        for buffer, chosen, places in self._places(addresses, width, what):
            found[chosen], host[chosen] = buffer.data[places], buffer.host
        return found, host

    def store(self, addresses: Array, data: Array, what: str = "store") -> None:
        """Write uint8 [n, width]; of several at one address, the last stays."""
        for buffer, chosen, places in self._places(addresses, data.shape[1], what):
            buffer.data[places] = data[chosen]


class Accesses:
    """Which bytes of one space were read and written, by which warp, since the last barrier."""

    def __init__(self, space: str) -> None:
        self.space = space
        # Bytes, warps, kind, line of the instruction, values.
        self._since: list[tuple[Array, Array, int, int, Array]] = []

    def note(
        self, addresses: Array, width: int, warps: Array, kind: int, line: int, data: Array | None = None
    ) -> None:
        """An access of `width` bytes at each address; `data`, uint8 [n, width], is what was written."""
        places = (addresses.astype(np.uint64)[:, None] + np.arange(width, dtype=np.uint64)).reshape(-1)
        values = np.zeros(len(places), dtype=np.uint8) if data is None else data.reshape(-1).copy()
        self._since.append((places, np.repeat(warps, width), kind, line, values))

    def barrier(self) -> tuple[Array, Array]:
        """Check what was accessed since the last barrier; returns the bytes read and the bytes written.

        Raises:
            RaceError: warps accessed the same byte, one of them to write it, not all by atomic operations, nor all
                to write the same value, as happens where several threads hold one element.
        """
        if not self._since:
            return np.empty(0, dtype=np.uint64), np.empty(0, dtype=np.uint64)
        places = np.concatenate([each[0] for each in self._since])
        warps = np.concatenate([each[1] for each in self._since])
        kinds = np.concatenate([np.full(len(each[0]), each[2]) for each in self._since])
        lines = np.concatenate([np.full(len(each[0]), each[3]) for each in self._since])
        values = np.concatenate([each[4] for each in self._since])
        self._since.clear()
        order = np.lexsort((warps, places))
        places, warps, kinds, lines = places[order], warps[order], kinds[order], lines[order]
        first = np.flatnonzero(np.r_[True, places[1:] != places[:-1]])

        def among(what: Array) -> tuple[Array, Array]:
            return np.minimum.reduceat(what, first), np.maximum.reduceat(what, first)

        (warp, last_warp), (lowest, highest), (value, last_value) = map(among, (warps, kinds, values[order]))
        written = np.bitwise_or.reduceat(kinds == WRITE, first)
        same = (lowest == WRITE) & (highest == WRITE) & (value == last_value)
        bad = (warp != last_warp) & (highest != READ) & (lowest != ATOMIC) & ~same
        if bad.any():
            at = first[np.flatnonzero(bad)[0]]
            who = places == places[at]
            how = sorted(
                {
                    f"{_KINDS[kind]} by warp {warp} (instruction {line})"
                    for warp, kind, line in zip(warps[who], kinds[who], lines[who], strict=True)
                }
            )
            raise RaceError(f"Byte {int(places[at]):#x} of {self.space} memory was {', '.join(how)}.")
        return places[first[highest == READ]], places[first[written]]
