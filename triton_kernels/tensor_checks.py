"""Checks of tensors and of launches that the kernels share."""

from __future__ import annotations

from collections.abc import Sequence

import torch

__all__ = ["check_like", "check_programs", "check_tensor", "grid_size", "word_of"]


def check_tensor(
    name: str,
    tensor: torch.Tensor,
    dtype: torch.dtype,
    shape: str | tuple[int, ...],
    device: torch.device | None = None,
) -> None:
    """Raise TypeError or ValueError unless a tensor is contiguous and of this dtype, shape and device.

    Args:
        name: of the tensor in errors.
        shape: the sizes, or a text such as ``"[B, 3]"``, whose numbers are compared.
        device: where it has to be; None: anywhere.
    """
    sizes = shape.strip("[]").split(", ") if isinstance(shape, str) else [str(size) for size in shape]
    fits = tensor.ndim == len(sizes) and all(
        not size.isdigit() or int(size) == given for size, given in zip(sizes, tensor.shape, strict=True)
    )
    if tensor.dtype != dtype or not fits or not tensor.is_contiguous():
        expected = f"[{', '.join(sizes)}]"
        raise TypeError(
            f"{name} is {tensor.dtype} {list(tensor.shape)}; expected contiguous {dtype} {expected}."
        )
    if device is not None and tensor.device != device:
        raise ValueError(f"{name} is on {tensor.device}; expected {device}, as the others.")


def check_like(columns: Sequence[object], tensors: Sequence[torch.Tensor], what: str = "columns") -> None:
    """Raise ValueError unless there are columns, whose tensors have as many rows and one device."""
    if not columns:
        raise ValueError(f"No {what} were given; expected at least one.")
    first = tensors[0]
    if any(len(each) != len(first) or each.device != first.device for each in tensors):
        raise ValueError(f"The {what} differ in batch size or device; expected the same for all.")


def grid_size(programs: int | None, default: int, tiles: int) -> tuple[int]:
    """The grid of a launch over tiles: `programs` or the default, at most one a tile."""
    return (min(default if programs is None else programs, tiles),)


def check_programs(programs: int | None) -> None:
    """Raise ValueError unless it is None or at least 1."""
    if programs is not None and programs < 1:
        raise ValueError(f"programs is {programs}; expected at least 1.")


def word_of(*numbers: int) -> int:
    """Bytes of the widest word, of 16, 4 and 1, that divides all of these sizes and addresses."""
    return next(word for word in (16, 4, 1) if not any(number % word for number in numbers))
