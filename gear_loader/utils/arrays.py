"""Tensors and arrays given by users: whether their memory can be read, and conversion of priorities to float32."""

from __future__ import annotations

import contextlib
import ctypes
import functools
import reprlib
from collections.abc import Mapping
from typing import Any

import numpy as np

from gear_loader.errors import SchemaError
from gear_loader.utils.lazy_torch import is_tensor, torch

Array = np.ndarray[Any, Any]
word_at = ctypes.c_size_t.from_address


DATA = object.__basicsize__
"""Bytes from an array's address to the pointer to its elements, the first field of numpy's `PyArrayObject`."""


def data_address(array: Array) -> int:
    """The address of an array's elements, in a fifth of the time that `array.ctypes.data` takes."""
    address: int = word_at(id(array) + DATA).value
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


_PINNED_BYTES = 16 << 20


def on_host(*each: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Mappings whose readable tensors of a GPU are copied to the host; other values are left unchanged.

    Copies of the first 16 MiB are queued on the current streams, and each of these is waited for once; more is copied
    tensor by tensor.
    """
    devices, found, size = set(), [], 0
    for values in each:
        remote = {
            name: value
            for name, value in values.items()
            if is_tensor(value) and value.is_cuda and unreadable(value) is None
        }
        if remote:
            values = dict(values)
            for name, value in remote.items():
                devices.add(value.device)
                plain = value.detach().resolve_conj().resolve_neg()
                # Without a wait the copy goes to pinned memory, which PyTorch keeps.
                size += value.nbytes
                values[name] = plain.to("cpu", non_blocking=size <= _PINNED_BYTES)
        found.append(values)
    for device in devices:
        torch.cuda.current_stream(device).synchronize()
    return found


class _Short(reprlib.Repr):
    """A short text of any value, which never fails."""

    def __init__(self) -> None:
        super().__init__()
        self.maxstring = self.maxother = self.maxlong = _MOST_TEXT
        self.maxlevel = 3

    def repr_instance(self, x: Any, level: int) -> str:
        if is_tensor(x) or isinstance(x, np.ndarray):
            return _first_elements(x)
        return super().repr_instance(x, level)


_MOST_TEXT = 200
"""Most characters of a part of a value in an error message."""
_FIRST = 6
"""Elements of an array in an error message."""


def _first_elements(value: Any) -> str:
    """Dtype, shape and first elements of an array or a tensor."""
    kind = unreadable(value) if is_tensor(value) else None
    if kind is not None:
        return f"a {kind}"
    text = f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    try:
        first = value.detach().reshape(-1)[:_FIRST].cpu() if is_tensor(value) else value.reshape(-1)[:_FIRST]
        elements = ", ".join(reprlib.repr(each) for each in first.tolist())
    except Exception:  # values that cannot be shown, as of objects
        return text
    size = value.numel() if is_tensor(value) else value.size
    return f"{text}: {elements}{', ...' if size > _FIRST else ''}" if size else text


def shown(value: Any) -> str:
    """A value for an error message: short, and whatever it is.

    Of a tensor or an array dtype, shape and first elements, also inside lists and mappings; of others the beginning of
    their `repr`.
    """
    text = _first_elements(value) if isinstance(value, np.ndarray) or is_tensor(value) else _short.repr(value)
    return text if len(text) <= 2 * _MOST_TEXT else f"{text[: 2 * _MOST_TEXT]}..."


_short = _Short()


PLAIN_TYPES: frozenset[type] = frozenset(
    {np.ndarray, bool, int, float, list, tuple, np.bool_, np.int64, np.float32, np.float64}
)
"""Types of most values, which `known` need not look at."""


def known(value: Any, name: str) -> Any:
    """Convert an array of another library, such as jax, to a tensor or an array of the same memory if possible.

    Other values are returned unchanged: tensors, numpy's arrays and numbers, sequences.

    Args:
        value: anything. name: of the value in errors.

    Raises:
        SchemaError: the value's own conversion fails.
    """
    kind = type(value)
    if isinstance(
        value, (np.ndarray, np.generic, bool, int, float, str, list, tuple, type(None))
    ) or is_tensor(value):
        return value
    if not hasattr(kind, "__dlpack__") and not hasattr(kind, "__array__"):
        return value
    with contextlib.suppress(Exception):
        if hasattr(kind, "__dlpack__"):
            return torch.utils.dlpack.from_dlpack(value)
    try:
        return np.asarray(value)
    except Exception as error:
        raise SchemaError(
            f"{name} is {shown(value)}, which cannot be converted to an array: {error}"
        ) from None


def as_array(value: Any, name: str) -> Any:
    """Convert a tensor to an array on the host, floats that numpy lacks to float32; return other values unchanged.

    Arrays of other libraries are converted too; see `known`.

    Args:
        value: a tensor or any other value. name: of the value in errors.

    Raises:
        SchemaError: the elements of the tensor cannot be read, or numpy lacks their dtype.
    """
    value = known(value, name)
    if is_tensor(value):
        kind = unreadable(value)
        if kind is None:
            value = value.detach().resolve_conj().resolve_neg().cpu()
            try:
                return (
                    value.float() if value.is_floating_point() and value.dtype not in _floats() else value
                ).numpy()
            except (TypeError, RuntimeError):  # numpy lacks the dtype
                kind = f"tensor of {value.dtype}"
        raise SchemaError(f"{name} is a {kind}; expected a strided tensor with its data, or an array.")
    return value


@functools.cache
def _floats() -> frozenset[Any]:
    return frozenset((torch.float16, torch.float32, torch.float64))


def numbers(value: Any, name: str, kinds: str, expected: str) -> Array:
    """Check that a value is an array, a tensor or nested sequences of numbers, and return it as an array on the host.

    Args:
        value: anything. name: of the value in errors.
        kinds: kinds of numpy dtypes; an array without elements may have any.
        expected: what the value should be, in errors.

    Raises:
        SchemaError: anything else, also masked arrays, whose masks would be lost.
    """
    given = as_array(value, name)
    try:
        array = np.asarray(given)
        fits = not isinstance(given, np.ma.MaskedArray) and (array.dtype.kind in kinds or not array.size)
    except Exception:  # uneven lengths, or whatever the value's own __array__ raises
        fits = False
    if not fits:
        mask = "a masked array, " if isinstance(given, np.ma.MaskedArray) else ""
        raise SchemaError(f"{name} is {mask}{shown(value)}; expected {expected}.")
    return array


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
