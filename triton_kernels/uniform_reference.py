"""What uniform rows are drawn from on a GPU, and the plain-torch twin of `gear_loader.kernels.uniform`.

::

    int64   EXTENT, BLOCK_IDS   addresses of `extent` (int64 [T, 3]) and `block_ids` (int32 [num_ids]) of the index
            SLOTS, GENERATIONS, STEPS, FINALS, COUNTS, SUMS   [n] each: slot and generation of the trajectories, steps
                                and final steps, number of anchors, running sum of these numbers
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch

__all__ = ["draw", "drawn_from"]

EXTENT, BLOCK_IDS, HEADER = range(3)
SLOTS, GENERATIONS, STEPS, FINALS, COUNTS, SUMS, ARRAYS = range(7)
RANDOM = 6
"""Words of a draw."""
ANCHORS = ("uniform", "first", "last", "item")
"""Choices of a row's anchor: a random one of the trajectory, its first, its last; or the step that was drawn."""


def drawn_from(extent: int, block_ids: int, arrays: tuple[np.ndarray, ...]) -> np.ndarray:
    """What is drawn from, int64 [HEADER + ARRAYS n]; see above.

    Args:
        extent, block_ids: addresses. arrays: those from SLOTS to SUMS, int64 [n] each.
    """
    count = len(arrays[0])
    made = np.empty(HEADER + ARRAYS * count, dtype=np.int64)
    made[EXTENT], made[BLOCK_IDS] = extent, block_ids
    for target, array in zip(made[HEADER:].reshape(ARRAYS, count), arrays, strict=True):
        target[:] = array
    return made


def draw(
    random: torch.Tensor,
    rows: torch.Tensor,
    ids: torch.Tensor,
    *,
    anchor: str,
    block_steps: int,
    first: int,
    last: int,
    once: bool = False,
    lead: int = 0,
    stride: int = 1,
    tensor_at: Callable[[int, tuple[int, ...], torch.dtype], torch.Tensor],
) -> None:
    """See `gear_loader.kernels.uniform.draw`.

    Args:
        tensor_at: the tensor at an address, of a shape and a dtype.
    """
    seed, step, epoch, address, held, items = random.tolist()
    count, width = ids.shape
    memory = tensor_at(address, (HEADER + ARRAYS * held,), torch.int64)
    found = memory[HEADER:].view(ARRAYS, held)

    def below(stream: int, high: torch.Tensor) -> torch.Tensor:
        mask = (1 << 64) - 1
        words = np.random.Philox(
            key=np.array([seed & mask, stream], dtype=np.uint64),
            counter=np.array([0, 0, step & mask, epoch & mask], dtype=np.uint64),
        ).random_raw(count)
        uniform = torch.from_numpy((words >> np.uint64(11)).astype(np.float64) * 2.0**-53)
        return torch.minimum((uniform * high.double()).long(), high - 1)

    places = below(0, torch.tensor(items, device="cpu"))
    if anchor == "item":
        item, places = places, torch.searchsorted(found[SUMS].contiguous(), places, right=True)
    slots, generations, steps, finals, counts, sums = found[:, places]
    if anchor == "item":
        number = item - (sums - counts)
    elif anchor == "uniform":
        number = below(1, counts)
    else:
        number = counts * 0 if anchor == "first" else counts - 1
    extent = tensor_at(int(memory[EXTENT]), (int(slots.max()) + 1, 3), torch.int64)
    anchors, start = lead + stride * number, extent[slots, 1]
    low, high = (
        torch.minimum((anchors + edge).clamp(min=0), end - 1) // block_steps
        for edge, end in ((first, steps), (last, steps + finals))
    )
    last_id = int((start + high).max())
    block_ids = tensor_at(int(memory[BLOCK_IDS]), (last_id + 1,), torch.int32)
    own = torch.arange(count, device="cpu") * width
    rows[:3] = torch.stack((slots, anchors, generations))
    rows[3:] = torch.stack((steps, own - low, finals), dim=1).view(3, count)
    for k in range(width):
        inside = low + k <= high
        ids[:, k] = torch.where(inside, block_ids[torch.where(inside, start + low + k, 0)], 0)
    if once:
        ids[:, width - 1] = block_ids[start]
