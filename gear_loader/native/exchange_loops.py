"""The compiled loops of an exchange between ranks."""

from __future__ import annotations

from numba import int64

from gear_loader.native.compile import compiled
from gear_loader.native.memory import copy_bytes


@compiled
def copy_ranges(out, out_starts, data, data_starts, sizes) -> None:  # type: ignore[no-untyped-def]
    """Copy ranges of bytes: sizes[i] from data[data_starts[i]:] to out[out_starts[i]:].

    Args:
        out, data: uint8, contiguous. out_starts, data_starts, sizes: int64 [n], not checked.
    """
    to, source = int64(out.ctypes.data), int64(data.ctypes.data)
    for i in range(len(sizes)):
        copy_bytes(to + out_starts[i], source + data_starts[i], sizes[i])


@compiled
def find_above(ends, values, last, first, found) -> None:  # type: ignore[no-untyped-def]
    """The first of the ascending `ends` above each value, or `last`: ``np.searchsorted(ends, values, side="right")``.

    Args:
        ends: float64 or int64 [S], not negative. values: of the same dtype [n], from 0 to the last of `ends`.
        last: the largest number to be found. first: int64 [k], work space. found: int64 [n], output.
    """
    scale = len(first) / ends[-1]
    place = 0
    for bucket in range(len(first)):  # the first end that falls into it, or into a later one
        while min(int64(ends[place] * scale), len(first) - 1) < bucket:
            place += 1
        first[bucket] = place
    for i in range(len(values)):
        place = first[min(int64(values[i] * scale), len(first) - 1)]
        while place < last and ends[place] <= values[i]:
            place += 1
        found[i] = place
