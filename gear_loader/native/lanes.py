"""The lanes of an appender: what is known of the open trajectory of each environment, an int64 row."""

from __future__ import annotations

import numpy as np

from gear_loader.utils.arrays import Array

# Slot of the open trajectory, -1 for none, and its generation; its steps; the steps that there is room for; how many of
# its steps the chunk before has too; the state of `growth.grow`, two numbers; slot of the stream's last chunk, or -1.
(
    LANE_SLOT,
    LANE_GENERATION,
    LANE_STEPS,
    LANE_HELD,
    LANE_COMMON,
    LANE_RUN,
    _LANE_RUN_1,
    LANE_LAST,
    LANE_WIDTH,
) = range(9)


EMPTY_LANE: Array = np.array([-1, 0, 0, 0, 0, 0, 0, -1])
"""A lane without an open trajectory, int64 [LANE_WIDTH]."""
