"""What `append` writes: rows of n environments, images of the blocks that they go into, and the blocks themselves."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch

from gear_loader.kernels.plan import LINE
from gear_loader.kernels.tensor_checks import check_like, check_tensor

__all__ = ["AppendColumn", "AppendPlan"]


class AppendColumn(NamedTuple):
    """Columns that lie together in a block.

    Attributes:
        rows: uint8 [n, 2, R], on the device. image: uint8 [n, S], on the device; S is a multiple of 128.
        target: uint8 [N, S], all blocks, in pinned memory or on the device.
        step_bytes: bytes from step to step in a block, at most R.
    """

    rows: torch.Tensor
    image: torch.Tensor
    target: torch.Tensor
    step_bytes: int


class AppendPlan:
    """What `append` does with the tensors of n environments, which must stay alive and where they are.

    Args:
        columns: see `AppendColumn`. block_steps: steps of a block.
        lanes: trajectories of an environment that have blocks.

    Attributes:
        state: int32 [n, 2], on the device: steps of each environment's trajectory, and its lane.
        device_table: int64 [C, 7], on the device; see `append_kernel`.

    Raises:
        TypeError, ValueError: tensors of another dtype, shape, alignment or place.
    """

    def __init__(self, columns: Sequence[AppendColumn], block_steps: int, lanes: int) -> None:
        check_like(columns, [each.rows for each in columns])
        check_like(columns, [each.image for each in columns])
        self.columns, self.block_steps, self.lanes = list(columns), block_steps, lanes
        self.num, self.device = len(columns[0].rows), columns[0].rows.device
        listed = []
        for each in columns:
            size = each.target.shape[1] if each.target.ndim == 2 else 0
            check_tensor("rows", each.rows, torch.uint8, f"[{self.num}, 2, R]")
            check_tensor("image", each.image, torch.uint8, (self.num, size), self.device)
            check_tensor("target", each.target, torch.uint8, "[blocks, bytes]")
            if size % LINE or each.image.data_ptr() % LINE or each.target.data_ptr() % LINE:
                raise ValueError(
                    f"Blocks have {size} bytes and lie at {each.image.data_ptr():#x} and "
                    f"{each.target.data_ptr():#x}; expected multiples of {LINE}."
                )
            if not 0 < each.step_bytes <= min(each.rows.shape[2], size // block_steps):
                raise ValueError(
                    f"step_bytes is {each.step_bytes}; expected 1 to {each.rows.shape[2]}, and that {block_steps} "
                    f"steps fit into a block of {size} bytes."
                )
            reached = each.target.device == each.rows.device or each.target.is_pinned()
            if each.rows.is_cuda and not reached:
                raise ValueError(
                    "target is in memory that the GPU cannot write to; expected its own, or pinned memory."
                )
            places = [part.data_ptr() for part in (each.rows, each.image, each.target)]
            listed.append([*places, each.rows.stride(0), each.rows.stride(1), size, each.step_bytes])
        self.device_table = torch.tensor(listed, dtype=torch.int64, device=self.device)
        self.state = torch.zeros((self.num, 2), dtype=torch.int32, device=self.device)

    def check(self, done: torch.Tensor | None, ends: torch.Tensor, blocks: torch.Tensor) -> None:
        """Raise TypeError or ValueError unless these tensors are what `append` takes."""
        if done is not None:
            check_tensor("done", done, torch.bool, (self.num,), self.device)
        check_tensor("ends", ends, torch.uint8, (self.num,))
        check_tensor("blocks", blocks, torch.int32, f"[{self.num * self.lanes}, W]")
