"""The compiled loop that undoes the filters of a png's rows (numba)."""

from __future__ import annotations

import numpy as np
from numba import int32, njit, uint8

from gear_loader.native.compile import compiled

_SUB, _UP, _AVERAGE, _PAETH = 1, 2, 3, 4  # types of filters; 0: none


@njit(inline="always")
def _paeth(left, above, corner):  # type: ignore[no-untyped-def]
    """The neighbour that is nearest to left + above - corner; int32."""
    to_left, to_above = abs(above - corner), abs(left - corner)
    to_corner = abs(left + above - 2 * corner)
    other = above if to_above <= to_corner else corner
    return left if to_left <= min(to_above, to_corner) else other


@compiled
def unfilter(rows, out, channels) -> bool:  # type: ignore[no-untyped-def]
    """Undo the filters of pixels of 8 bits.

    Args:
        rows: uint8 [h * (1 + width)]: of each row the type of its filter, and what was filtered.
        out: uint8 [h, width], output. channels: bytes of a pixel, of which width is a multiple.

    Returns:
        False if there is no filter of such a type.
    """
    height, width = out.shape
    above = np.zeros(width, dtype=np.uint8)
    for y in range(height):
        first = y * (width + 1)
        kind, given, row = rows[first], rows[first + 1 : first + 1 + width], out[y]
        if kind == 0:
            row[:] = given
        elif kind == _UP:
            for i in range(width):
                row[i] = given[i] + above[i]
        elif kind == _SUB:
            row[:channels] = given[:channels]
            for i in range(channels, width):
                row[i] = given[i] + row[i - channels]
        elif kind == _AVERAGE:
            for i in range(width):
                left = int32(row[i - channels]) if i >= channels else int32(0)
                row[i] = given[i] + uint8((left + int32(above[i])) >> 1)
        elif (
            kind == _PAETH and channels == 3
        ):  # three chains of steps at a time, which do not wait for each other
            a0 = a1 = a2 = c0 = c1 = c2 = int32(0)
            for i in range(0, width - 2, 3):
                b0, b1, b2 = int32(above[i]), int32(above[i + 1]), int32(above[i + 2])
                a0 = (int32(given[i]) + _paeth(a0, b0, c0)) & 255
                a1 = (int32(given[i + 1]) + _paeth(a1, b1, c1)) & 255
                a2 = (int32(given[i + 2]) + _paeth(a2, b2, c2)) & 255
                row[i], row[i + 1], row[i + 2] = a0, a1, a2
                c0, c1, c2 = b0, b1, b2
        elif kind == _PAETH:
            for i in range(width):
                left = int32(row[i - channels]) if i >= channels else int32(0)
                corner = int32(above[i - channels]) if i >= channels else int32(0)
                row[i] = (int32(given[i]) + _paeth(left, int32(above[i]), corner)) & 255
        else:
            return False
        above = row
    return True
