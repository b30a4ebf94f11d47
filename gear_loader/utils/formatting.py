"""Short texts of sizes, for `repr` and the command line. Loads no other package."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def size(count: int) -> str:
    """A number of bytes with its unit, such as ``1.5 MiB``."""
    for power, unit in ((40, "TiB"), (30, "GiB"), (20, "MiB"), (10, "KiB")):
        if count >= 1 << power:
            return f"{count / (1 << power):.1f} {unit}"
    return f"{count} B"


def described(value: Any) -> str:
    """Dtype, shape and device of a tensor or an array, such as ``float32 [256, 20, 11]``, or of a `Ragged`; of a list
    its length, and the type of its first value; else the type's name."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(part)}" for key, part in value.items()) + "}"
    dtype, shape = getattr(value, "dtype", None), getattr(value, "shape", None)
    if isinstance(value, list):
        return f"list of {len(value)}{f' {type(value[0]).__name__}' if value else ''}"
    if shape is not None and hasattr(values := getattr(value, "values", None), "dtype"):
        kind, _, rows = described(values).partition(" ")
        return f"{type(value).__name__} {kind} {list(shape)}, values {rows}"
    if dtype is None or shape is None:
        return type(value).__name__
    device = str(getattr(value, "device", "cpu"))
    return f"{str(dtype).removeprefix('torch.')} {list(shape)}{'' if device == 'cpu' else f' on {device}'}"


def printable(text: str, most: int | None = None) -> str:
    """Text from a file made safe for a terminal: escaped, and cut after `most` characters."""
    if most is not None and len(text) > most:
        text = f"{text[:most]}..."
    return "".join(
        letter if letter.isprintable() else letter.encode("unicode_escape").decode() for letter in text
    )
