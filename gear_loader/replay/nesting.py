"""Nested values as columns: ``obs`` of a dict becomes ``obs.camera`` and ``obs.speed``, and comes back as a dict."""

from __future__ import annotations

import collections
import dataclasses
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.utils.arrays import Array, on_host, shown

_ARRAYS = frozenset({np.ndarray, torch.Tensor, bool, int, float, np.float32, np.float64, np.int64, np.bool_})
"""Types of most leaves."""
_SPACES = "Box, Discrete, MultiDiscrete, MultiBinary and Text, and Dict and Tuple of them"


class Nesting:
    """How one value is nested: a leaf, or a container of parts.

    ============== ======================================= =============================================
    kind           value                                   built again as
    ============== ======================================= =============================================
    ``leaf``       an array, or what `as_array` takes      what is given for the column
    ``text``       str of at most `size` bytes, or n of    uint8 ``[..., size]``: UTF-8, zeros after it
                   them
    ``value``      text, bytes or an array ``[n, ...]``    what is given for the column, which is ragged
                   of any length, or one for each
                   environment
    ``none``       None                                    None, without a column
    ``dict``       a mapping                               dict
    ``tuple``      a tuple                                 tuple
    ``namedtuple`` a namedtuple                            one of its class
    ``dataclass``  an instance of a dataclass              one of its class
    ============== ======================================= =============================================

    A list is an array, as numpy takes it. Classes are not saved: after `from_description` values are of new classes of
    the same names and fields, until `leaves` has seen an instance of the class.

    Args:
        name: column of a leaf, and the first part of the names of the columns of others.
        parts: key -> nesting of that part. kind: see above. type: class of a namedtuple or a dataclass.
        size: most bytes of a text.
    """

    def __init__(
        self,
        name: str,
        parts: Mapping[Any, Nesting] | None = None,
        *,
        kind: str = "leaf",
        type: Any = None,
        size: int = 0,
    ) -> None:
        self.name, self.parts, self.kind, self.type, self.size = name, dict(parts or {}), kind, type, size
        self._keys = set(self.parts)

    @classmethod
    def of(cls, name: str, value: Any, ragged: Collection[str] | None = None) -> Nesting:
        """The nesting of a value.

        Args:
            ragged: columns of values of any length, as those of text are then, too; None: there are none.

        Raises:
            SchemaError: no column, a key that is not a text or has a dot, a text, or a dataclass that cannot be made
                from its fields.
        """
        found = cls._of(name, value, ragged)
        if not found.columns():
            raise SchemaError(f"{name!r} is {shown(value)}; expected at least one array in it.")
        return found

    @classmethod
    def _of(cls, name: str, value: Any, ragged: Collection[str] | None) -> Nesting:
        if ragged is not None and (name in ragged or is_text(value)):
            return cls(name, kind="value")
        kind, parts = _taken_apart(value)
        if kind == "text":
            raise SchemaError(
                f"{name!r} is the text {shown(value)}, of which the greatest length is not known; expected a buffer "
                "with payload=, or with observation_space and action_space of gymnasium.spaces.Text(max_length), or "
                "numbers."
            )
        if kind == "dataclass" and not all(field.init for field in dataclasses.fields(value)):
            raise SchemaError(
                f"{name!r} is {shown(value)}, of which some fields have init=False; expected a dataclass that can be "
                "made from its fields."
            )
        _check_keys(name, kind, parts)
        each = {key: cls._of(f"{name}.{key}", part, ragged) for key, part in parts.items()}
        return cls(name, each, kind=kind, type=type(value) if kind in ("namedtuple", "dataclass") else None)

    @classmethod
    def of_space(
        cls, name: str, space: Any, *, ragged: bool = False
    ) -> tuple[Nesting, dict[str, tuple[Any, tuple[Any, ...]]]]:
        """The nesting of the values of a Gymnasium space, or of a mapping of spaces; numpy dtype and shape of each
        column: of those of any length `str`, or None as the first extent.

        Args:
            ragged: whether there are such, of Text and Sequence spaces.

        Raises:
            SchemaError: a space whose values are not arrays of one fixed shape, or keys as in `of`.
        """
        parts = getattr(space, "spaces", space)
        names = [kind.__name__ for kind in type(space).__mro__]
        if isinstance(parts, Mapping) or (isinstance(parts, tuple) and "OneOf" not in names):
            kind = "dict" if isinstance(parts, Mapping) else "tuple"
            parts = dict(parts.items()) if isinstance(parts, Mapping) else dict(enumerate(parts))
            _check_keys(name, kind, parts)
            if not parts:
                raise SchemaError(f"{name!r} has the space {space!r}; expected at least one part.")
            found = {key: cls.of_space(f"{name}.{key}", part, ragged=ragged) for key, part in parts.items()}
            columns = {column: each for _, below in found.values() for column, each in below.items()}
            return cls(name, {key: nesting for key, (nesting, _) in found.items()}, kind=kind), columns
        if ragged and "Text" in names:
            return cls(name, kind="value"), {name: (str, ())}
        if ragged and "Sequence" in names and getattr(space.feature_space, "shape", None) is not None:
            each = space.feature_space
            return cls(name, kind="value"), {name: (np.dtype(each.dtype), (None, *each.shape))}
        if "Text" in names:
            size = space.max_length * max((len(letter.encode()) for letter in space.character_set), default=1)
            return cls(name, kind="text", size=size), {name: (np.dtype(np.uint8), (size,))}
        dtype, shape = getattr(space, "dtype", None), getattr(space, "shape", None)
        if dtype is None or shape is None:
            raise SchemaError(f"{name!r} has the space {space!r}; expected {_SPACES}.")
        return cls(name), {name: (np.dtype(dtype), tuple(shape))}

    @property
    def is_leaf(self) -> bool:
        """Whether it is a column."""
        return self.kind in ("leaf", "text", "value")

    def columns(self) -> list[str]:
        """Names of the columns."""
        if self.is_leaf:
            return [self.name]
        return [name for part in self.parts.values() for name in part.columns()]

    def leaves(self, value: Any) -> Iterable[tuple[str, Any]]:
        """Column and value of each leaf.

        Raises:
            SchemaError: the value has another nesting; when it is iterated over.
        """
        if self.kind == "leaf" and type(value) in _ARRAYS:  # the commonest
            return ((self.name, value),)
        return self._walk(value)

    def _walk(self, value: Any) -> Iterator[tuple[str, Any]]:
        if self.kind == "value":
            yield self.name, value
            return
        kind, parts = _taken_apart(value)
        if self.kind == "text":
            yield self.name, self._encoded(value)
            return
        if kind != self.kind or (parts.keys() != self._keys):
            raise SchemaError(
                f"{self.name!r} is {_named(kind, parts)}; expected {self.expected()}, as before."
            )
        if kind == "leaf":
            yield self.name, value
            return
        if self.type is not None and type(value).__name__ == self.type.__name__:
            self.type = type(value)
        for key, part in self.parts.items():
            yield from part.leaves(parts[key])

    def build(self, leaves: Mapping[str, Any]) -> Any:
        """The nested value of column -> value."""
        if self.is_leaf:
            return leaves[self.name]
        built = {key: part.build(leaves) for key, part in self.parts.items()}
        if self.kind == "none":
            return None
        if self.type is not None:
            return self.type(**built)
        return tuple(built.values()) if self.kind == "tuple" else built

    def described(self) -> Any:
        """For JSON; see `from_description`."""
        if self.kind == "leaf":
            return None
        more = [self.size] if self.kind == "text" else [] if self.type is None else [self.type.__name__]
        return [self.kind, {key: each.described() for key, each in self.parts.items()}, *more]

    @classmethod
    def from_description(cls, name: str, described: Any) -> Nesting:
        """The inverse of `described`."""
        if described is None:
            return cls(name)
        kind, below, *more = described
        parts = {
            int(key) if kind == "tuple" else key: cls.from_description(f"{name}.{key}", part)
            for key, part in below.items()
        }
        if kind in ("text", "value"):
            return cls(name, kind=kind, size=int(more[0]) if more else 0)
        make: Any = dataclasses.make_dataclass if kind == "dataclass" else collections.namedtuple
        return cls(name, parts, kind=kind, type=make(more[0], list(parts)) if more else None)

    def _encoded(self, value: Any) -> Array:
        """A text, or several, as uint8 ``[..., size]``."""
        if not isinstance(value, (str, np.str_)):
            if isinstance(value, np.ndarray) and value.dtype == np.uint8 and value.shape[-1:] == (self.size,):
                return value  # encoded already
            if isinstance(value, np.ndarray) and value.dtype.kind == "U":
                value = value.tolist()
            if isinstance(value, (list, tuple)) and all(isinstance(each, str) for each in value):
                return np.stack([self._encoded(each) for each in value])
            raise SchemaError(f"{self.name!r} is {shown(value)}; expected {self.expected()}.")
        data = str(value).encode()
        if len(data) > self.size or b"\0" in data:
            raise SchemaError(f"{self.name!r} is {shown(value)}; expected {self.expected()}.")
        return np.frombuffer(data.ljust(self.size, b"\0"), dtype=np.uint8)

    def expected(self) -> str:
        """What a value has to be, for errors."""
        if self.kind == "text":
            return (
                f"a text of at most {self.size} bytes in UTF-8 and without zeros, or one for each environment"
            )
        return _named(self.kind, self.parts)


def _taken_apart(value: Any) -> tuple[str, Mapping[Any, Any]]:
    """Kind of a value, and its parts by their keys."""
    if type(value) in _ARRAYS:
        return "leaf", _NOTHING
    if isinstance(value, Mapping):
        return "dict", value if type(value) is dict else dict(value.items())
    if isinstance(value, tuple):
        fields = getattr(value, "_fields", None)
        return (
            ("tuple", dict(enumerate(value)))
            if fields is None
            else ("namedtuple", dict(zip(fields, value, strict=True)))
        )
    if value is None:
        return "none", _NOTHING
    if isinstance(value, str):
        return "text", _NOTHING
    is_array = hasattr(value, "__array__") or hasattr(value, "__dlpack__")
    if dataclasses.is_dataclass(value) and not is_array:
        return "dataclass", {field.name: getattr(value, field.name) for field in dataclasses.fields(value)}
    return "leaf", _NOTHING


_NOTHING: Mapping[Any, Any] = {}


def _check_keys(name: str, kind: str, parts: Mapping[Any, Any]) -> None:
    wrong = [key for key in parts if kind != "tuple" and (not isinstance(key, str) or not key or "." in key)]
    if wrong:
        raise SchemaError(f"{name!r} has the keys {wrong}; expected texts without dots.")


def _named(kind: str, parts: Mapping[Any, Any]) -> str:
    """A kind with its keys, in errors."""
    plain = {"leaf": "an array", "none": "None", "text": "a text"}
    return plain[kind] if kind in plain else f"a {kind} of {list(parts)}"


def on_cpu(values: Mapping[str, Any]) -> dict[str, Any]:
    """Values, in some of which, nested or not, tensors of a GPU are copied to the host; all are waited for at once."""
    nestings = {name: Nesting.of(name, value) for name, value in values.items() if on_gpu(value)}
    leaves = {leaf: each for name, nesting in nestings.items() for leaf, each in nesting.leaves(values[name])}
    (found,) = on_host(leaves) if leaves else (leaves,)
    return {**values, **{name: nesting.build(found) for name, nesting in nestings.items()}}


def on_gpu(value: Any) -> bool:
    """Whether a value is, or a dict or tuple has, a tensor of a GPU."""
    if isinstance(value, torch.Tensor):
        return value.is_cuda
    parts = value.values() if isinstance(value, Mapping) else value if isinstance(value, tuple) else ()
    return any(map(on_gpu, parts))


def is_text(value: Any) -> bool:
    """Whether a value is text or bytes, or a list, a tuple or an array of them."""
    if isinstance(value, np.ndarray):
        return value.dtype.kind in "US"
    if isinstance(value, (list, tuple)):
        return len(value) > 0 and all(isinstance(each, (str, bytes)) for each in value)
    return isinstance(value, (str, bytes))


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
