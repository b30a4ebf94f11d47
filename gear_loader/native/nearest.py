"""The compiled loop of windows of times: the steps whose times are nearest to others."""

from __future__ import annotations

import math

from gear_loader.native.compile import compiled

RESOLVED, EARLIER, LATER, INVALID = 0, 1, 2, 4
"""What is known of a row: all its steps; or what else has to be read, EARLIER + LATER for both; or that its times are
not ascending."""


@compiled
def nearest_steps(times, there, firsts, at, tolerance, edge, steps, fits, states) -> None:  # type: ignore[no-untyped-def]
    """Find the steps nearest to times, of two the earlier one.

    Args:
        times: float64 [n, W], of consecutive steps of each row, relative to that of its anchor.
        there: bool [n, W], which of them exist, without gaps.
        firsts: int64 [n], the number of the first of the W steps, which may be negative. at: float64 [K].
        tolerance: greatest distance that fits. edge: whether steps that do not fit are wanted too.
        steps: int64 [n, K], written: the step, or -1 for none. fits: bool [n, K], written: whether it is near enough.
        states: uint8 [n], written: see `RESOLVED`. Of other rows `steps` and `fits` are not complete.
    """
    width = times.shape[1]
    for row in range(len(firsts)):
        low, high, state = 0, width, RESOLVED
        while low < width and not there[row, low]:
            low += 1
        while high > low and not there[row, high - 1]:
            high -= 1
        more_before, more_after = low == 0 and firsts[row] > 0, high == width
        for j in range(low, high):
            if not math.isfinite(times[row, j]) or (j > low and times[row, j] < times[row, j - 1]):
                state = INVALID
        if state == INVALID or low == high:
            states[row] = INVALID
            continue
        for k in range(len(at)):
            begin, end = low, high  # the first step that is not earlier than the time
            while begin < end:
                middle = (begin + end) // 2
                if times[row, middle] < at[k]:
                    begin = middle + 1
                else:
                    end = middle
            if begin == high and more_after:
                state |= LATER
                continue
            found = begin
            if begin == high or (begin > low and at[k] - times[row, begin - 1] <= times[row, begin] - at[k]):
                found = begin - 1
            while found > low and times[row, found - 1] == times[row, found]:
                found -= 1
            if found == low and more_before:
                state |= EARLIER
                continue
            fits[row, k] = abs(times[row, found] - at[k]) <= tolerance
            steps[row, k] = firsts[row] + found if fits[row, k] or edge else -1
        states[row] = state
