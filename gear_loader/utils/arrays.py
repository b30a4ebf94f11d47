"""Tensors and arrays given by users: whether their memory can be read, and conversion of priorities to float32."""

from __future__ import annotations

import contextlib
import ctypes
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.utils.lazy_torch import is_tensor, torch

__all__ = [
    "Array",
    "address_of",
    "as_array",
    "data_address",
    "narrowed",
    "outside_inference",
    "shown",
    "unreadable",
]

Array = np.ndarray[Any, Any]
_word_at = ctypes.c_size_t.from_address


_DATA = object.__basicsize__
"""Bytes from an array's address to the pointer to its elements, the first field of numpy's `PyArrayObject`."""


def data_address(array: Array) -> int:
    """The address of an array's elements, in a fifth of the time that `array.ctypes.data` takes."""
    address: int = _word_at(id(array) + _DATA).value
    return address


def address_of(tensor: torch.Tensor) -> int:
    """Address of a contiguous tensor's elements; 0 if it has no elements, or its storage does not hold all of them."""
    try:
        offset = tensor.storage_offset()
        end = tensor.nbytes + offset * tensor.itemsize if offset else tensor.nbytes
        return tensor.data_ptr() if end <= tensor.untyped_storage().nbytes() else 0
    except RuntimeError:  # it has no storage
        return 0


def unreadable(tensor: torch.Tensor) -> str | None:
    """Why a tensor's elements cannot be read from strided memory, as a noun phrase for errors; None if they can."""
    if tensor.is_nested or tensor.layout != torch.strided:
        return "nested tensor" if tensor.is_nested else f"tensor of layout {tensor.layout}"
    if tensor.is_meta:
        return "meta tensor"
    try:
        storage = tensor.untyped_storage()
        address, held = storage.data_ptr(), storage.nbytes()
    except RuntimeError:
        return "tensor without storage (as torch.func and torch._efficientzerotensor make them)"
    if not tensor.numel():
        return None
    last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
    needed = (tensor.storage_offset() + last + 1) * tensor.itemsize
    if address == 0 or held < needed:
        held = held if address else 0
        return f"tensor whose storage holds {held:,} bytes, while its shape needs {needed:,}"
    return None


def shown(value: Any) -> str:
    """A value for an error message. (torch cannot print tensors whose elements cannot be read.)"""
    if isinstance(value, (list, tuple)):
        for item in value:
            kind = unreadable(item) if is_tensor(item) else None
            if kind is not None:
                return f"a {type(value).__name__} that holds a {kind}"
    return repr(value)


def as_array(value: Any, name: str) -> Any:
    """Convert a tensor to an array on the host, bfloat16 to float32; other values are returned unchanged.

    Args:
        value: a tensor or any other value. name: of the value in errors.

    Raises:
        SchemaError: the elements of the tensor cannot be read.
    """
    if is_tensor(value):
        kind = unreadable(value)
        if kind is not None:
            raise SchemaError(f"{name} is a {kind}; expected a strided tensor with its data, or an array.")
        value = value.detach().resolve_conj().resolve_neg().cpu()
        return (value.float() if value.dtype == torch.bfloat16 else value).numpy()
    return value


def narrowed(values: Array) -> tuple[Array, int]:
    """Convert priorities to float32 and find the first invalid one (NaN, infinite or negative).

    Positive values below the range of float32 become its smallest normal number, so they can still be drawn.

    Args:
        values: float32 or float64 [n].

    Returns:
        float32 [n], and the index of the first invalid priority, or -1.
    """
    if values.dtype == np.float32 and len(values) and values.min() >= 0 and values.max() < np.inf:
        return values, -1
    with np.errstate(over="ignore"):
        narrow = values.astype(np.float32)
    bad = np.flatnonzero(~(np.isfinite(narrow) & (values >= 0)))
    tiny = np.finfo(np.float32).tiny
    return np.where((narrow == 0) & (values > 0), tiny, narrow), int(bad[0]) if len(bad) else -1


def outside_inference() -> contextlib.AbstractContextManager[object]:
    """Leave `torch.inference_mode` for a block that creates tensors which training uses later."""
    return torch.inference_mode(False) if torch.is_inference_mode_enabled() else contextlib.nullcontext()
