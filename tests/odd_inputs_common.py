"""Odd inputs: values that a user may pass by mistake, and what an entry point may do with them."""

from __future__ import annotations

import traceback
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

from gear_loader import errors

OURS = (errors.GearError, TypeError, ValueError, KeyError, IndexError)
MOST_TEXT = 1200
"""Most characters of a message: it shows a value's shape, dtype and first elements, never all of it."""


class Broken:
    """Fails in whatever one may ask an object first."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("no array")

    def __repr__(self) -> str:
        raise RuntimeError("no text")


class Like:
    """An object of another library that gives its elements by ``__array__``."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        return np.zeros((4, 2), np.float32)


def odd_inputs() -> dict[str, Any]:
    """Name -> value, new ones each time (a generator can be read once)."""
    a, t = np.zeros((4, 2), np.float32), torch.zeros(4, 2)
    plain: list[Any] = [None, True, 3, -1, 1.5, 10**30, -(10**30), 2**63, 10**400, 1j, "text", b"bytes", ...]
    plain += [
        float("nan"),
        float("inf"),
        [],
        (),
        {},
        {1, 2},
        range(4),
        slice(3),
        bytearray(4),
        memoryview(b"abcd"),
    ]
    plain += [
        [None],
        ["a", "b"],
        [[1], [1, 2]],
        [True, False],
        [0, 1],
        [0.0, 1.0],
        [float("nan"), 1.0],
        [10**30, 1],
    ]
    plain += [
        {1: 2},
        {"a": {"b": a}},
        {}.items,
        dict,
        np,
        object(),
        lambda *_, **__: 1,
        (i for i in range(3)),
    ]
    found = {f"{number} {type(value).__name__}": value for number, value in enumerate(plain)}
    arrays: dict[str, Any] = {
        "0-d": np.array(1.0, np.float32),
        "0-d integer": np.array(1),
        "scalar": np.float64(1),
        "date": np.datetime64("2020-01-01"),
        "dates": np.array(["2020-01-01"] * 4, "datetime64[s]"),
        "durations": np.zeros(4, "timedelta64[s]"),
        "complex": np.zeros(2, np.complex64),
        "objects": np.array([None, {}], object),
        "0-d object": np.array({"x": 1}, object),
        "texts": np.array(["a", "b"]),
        "bytes": np.array([b"a", b"b"]),
        "record": np.zeros(2, [("a", "f4")]),
        "masked": np.ma.masked_array(a, np.ones_like(a)),
        "masked pair": np.ma.masked_array([1.0, 2.0], [1, 0]),
        "masked integers": np.ma.masked_array([0, 1], [1, 0]),
        "masked bools": np.ma.masked_array([True, False], [1, 0]),
        "big-endian": a.astype(">f4"),
        "big-endian integers": np.arange(4).astype(">i8"),
        "read-only": np.broadcast_to(np.float32(1), (4, 2)),
        "negative strides": a[::-1],
        "not contiguous": np.zeros((4, 4), np.float32)[:, ::2],
        "empty": np.zeros(0),
        "uint64": np.array([2**64 - 1], np.uint64),
        "bools": np.array([True, False]),
        "nan": np.array([np.nan, 1.0]),
        "inf": np.array([np.inf, 1.0]),
        "negative": np.array([-1.0, 1.0]),
        "negative integers": np.array([-5, -1]),
        "huge integers": np.array([2**62, 1]),
        "rank 3": np.zeros((2, 2, 2)),
        "large": np.zeros((3, 84, 84)),
        "lists": np.zeros((84, 84)).tolist(),
    }
    tensors: dict[str, Any] = {
        "0-d": torch.tensor(1.0),
        "meta": torch.zeros(2, device="meta"),
        "sparse": t.to_sparse(),
        "csr": torch.eye(2).to_sparse_csr(),
        "nested": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(3)]),
        "quantized": torch.quantize_per_tensor(torch.zeros(2), 0.1, 0, torch.quint8),
        "zeros without memory": torch._efficientzerotensor((2,)),
        "gradient": torch.ones(2, requires_grad=True),
        "complex": torch.zeros(2, dtype=torch.complex64).conj(),
        "fp8": torch.zeros(2).to(torch.float8_e4m3fn),
        "0-d fp8": torch.tensor(1.0).to(torch.float8_e5m2),
        "bf16": torch.ones(2, dtype=torch.bfloat16),
        "uint16": torch.zeros(2, dtype=torch.uint16),
        "column": torch.ones(2, 1),
        "nan": torch.tensor([float("nan"), 1.0]),
        "empty": torch.zeros(0),
        "expanded": t[:1].expand(4, 2),
    }
    found.update({f"array, {name}": value for name, value in arrays.items()})
    found.update({f"tensor, {name}": value for name, value in tensors.items()})
    found["list of meta tensors"] = [torch.zeros(2, device="meta")] * 2
    return {**found, "broken": Broken(), "array-like": Like()}


def complaint(call: Callable[[Any], object], value: Any) -> str | None:
    """What is wrong with the error that a call raises, if it does; None if nothing is."""
    try:
        call(value)
    except OURS as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        text = str(error)
        if not isinstance(error, errors.GearError) and not (
            "/gear_loader/" in frame.filename and (frame.line or "").startswith("raise")
        ):
            return f"{type(error).__name__} of others, {text[:80]!r}, at {frame.filename}:{frame.lineno}"
        if len(text) > MOST_TEXT or not text:
            return f"a message of {len(text):,} characters"
    except Exception as error:
        frame = traceback.extract_tb(error.__traceback__)[-1]
        return f"{type(error).__name__}, {str(error)[:80]!r}, at {frame.filename}:{frame.lineno}"
    return None
