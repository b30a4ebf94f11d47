"""Nested values as columns: ``obs`` of a dict becomes ``obs.camera`` and ``obs.speed``, and comes back as a dict."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array, shown


class Nesting:
    """How one value is nested: a leaf, or a dict or tuple of them.

    Args:
        name: column of a leaf, and the first part of the names of the columns of others.
        parts: key -> nesting of that part; None for a leaf.
        is_tuple: whether the parts are those of a tuple.
    """

    def __init__(
        self, name: str, parts: Mapping[Any, Nesting] | None = None, *, is_tuple: bool = False
    ) -> None:
        self.name, self.parts, self.is_tuple = name, parts, is_tuple

    @classmethod
    def of(cls, name: str, value: Any) -> Nesting:
        """The nesting of a value: of dicts, of tuples, and of spaces of Gymnasium that have parts.

        Raises:
            SchemaError: no parts, or a key that is not a text, or has a dot.
        """
        is_tuple = isinstance(value, tuple)
        parts = getattr(value, "spaces", value)  # of `gymnasium.spaces.Dict` and `Tuple`
        if isinstance(parts, Mapping):
            items = list(parts.items())
        elif isinstance(parts, tuple):
            items, is_tuple = list(enumerate(parts)), True
        else:
            return cls(name)
        wrong = [
            key for key, _ in items if not is_tuple and (not isinstance(key, str) or not key or "." in key)
        ]
        if wrong or not items:
            found = f"the keys {wrong}" if wrong else "no parts"
            raise SchemaError(
                f"{name!r} has {found}; expected at least one part, and texts without dots as keys."
            )
        return cls(name, {key: cls.of(f"{name}.{key}", part) for key, part in items}, is_tuple=is_tuple)

    def columns(self) -> list[str]:
        """Names of the columns."""
        if self.parts is None:
            return [self.name]
        return [name for part in self.parts.values() for name in part.columns()]

    def leaves(self, value: Any) -> Iterator[tuple[str, Any]]:
        """Column and value of each leaf.

        Raises:
            SchemaError: the value has another nesting.
        """
        if self.parts is None:
            if isinstance(value, (Mapping, tuple)):
                raise SchemaError(f"{self.name!r} is a {type(value).__name__}; expected an array, as before.")
            yield self.name, value
            return
        kind = tuple if self.is_tuple else Mapping
        found = set(range(len(value)) if self.is_tuple else value) if isinstance(value, kind) else None
        if found != set(self.parts):
            what = shown(value) if found is None else f"a {type(value).__name__} of {sorted(found)}"
            raise SchemaError(
                f"{self.name!r} is {what}; expected a {kind.__name__.lower()} of {sorted(self.parts)}, as before."
            )
        for key, part in self.parts.items():
            yield from part.leaves(value[key])

    def build(self, leaves: Mapping[str, Any]) -> Any:
        """The nested value of column -> value."""
        if self.parts is None:
            return leaves[self.name]
        built = {key: part.build(leaves) for key, part in self.parts.items()}
        return tuple(built.values()) if self.is_tuple else built

    def described(self) -> Any:
        """For JSON; see `from_description`."""
        if self.parts is None:
            return None
        return [
            "tuple" if self.is_tuple else "dict",
            {key: each.described() for key, each in self.parts.items()},
        ]

    @classmethod
    def from_description(cls, name: str, described: Any) -> Nesting:
        """The inverse of `described`."""
        if described is None:
            return cls(name)
        is_tuple = described[0] == "tuple"
        parts = {
            int(key) if is_tuple else key: cls.from_description(f"{name}.{key}", part)
            for key, part in described[1].items()
        }
        return cls(name, parts, is_tuple=is_tuple)


def as_array(value: Any) -> Array:
    """A numpy array of what a leaf may be: an array, a tensor of any device, a number, or a list of numbers; what has
    ``__array__`` or ``__dlpack__``. Waits for a GPU that holds it."""
    if isinstance(value, np.ndarray):
        return value
    if isinstance(value, torch.Tensor):
        tensor = value.detach().cpu()
    elif hasattr(value, "__dlpack__") and not hasattr(value, "__array__"):
        tensor = torch.utils.dlpack.from_dlpack(value).cpu()
    else:
        return np.asarray(value)
    if tensor.dtype == torch.bfloat16:
        tensor = tensor.float()
    array: Array = tensor.numpy()
    return array
