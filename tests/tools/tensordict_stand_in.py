"""A stand-in for `tensordict.TensorDict`, by its documented interface: a mapping that iterates over its steps."""

from __future__ import annotations

from collections.abc import ItemsView, Iterator, KeysView, Mapping, MutableMapping, ValuesView
from typing import Any

import torch

__all__ = ["TensorDict"]


class TensorDict(MutableMapping[str, Any]):
    """``TensorDict({"a": tensor [T, ...], "next": {...}}, batch_size=[T])``."""

    def __init__(self, source: Mapping[str, Any], batch_size: Any = ()) -> None:
        self.batch_size = torch.Size(batch_size)
        self._parts = {
            name: TensorDict(value, batch_size) if isinstance(value, dict) else value
            for name, value in source.items()
        }

    def keys(self) -> KeysView[str]:
        return self._parts.keys()

    def values(self) -> ValuesView[Any]:
        return self._parts.values()

    def items(self) -> ItemsView[str, Any]:
        return self._parts.items()

    def __getitem__(self, key: Any) -> Any:
        if isinstance(key, str):
            return self._parts[key]
        return TensorDict({name: value[key] for name, value in self.items()}, self.batch_size[1:])

    def __setitem__(self, key: str, value: Any) -> None:
        self._parts[key] = value

    def __delitem__(self, key: str) -> None:
        del self._parts[key]

    def __contains__(self, key: object) -> bool:
        return key in self._parts

    def __iter__(self) -> Iterator[Any]:
        return (self[step] for step in range(len(self)))

    def __len__(self) -> int:
        return self.batch_size[0] if self.batch_size else 0
