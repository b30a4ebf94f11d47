"""Single transitions in tensors, by torch alone: what one writes without any library."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import torch

from benchmarks.peers import transitions
from benchmarks.peers.select import ALPHA, BETA

PACKAGES = MODULES = ("torch", "numpy")


class Transitions(transitions.Subject):
    """A tensor for each column, used as a ring: `index_select` of uniform draws, or of `torch.multinomial`'s.

    What an environment gives is written through numpy's view of the tensors, which is faster than `copy_`.
    """

    def open(self) -> None:
        torch.manual_seed(self.data.seed)
        self.store = {
            name: torch.zeros((self.data.steps, *values.shape[1:]), dtype=torch.from_numpy(values).dtype)
            for name, values in self.data.columns(slice(1)).items()
        }
        self._views = [values.numpy() for values in self.store.values()]
        self._masses = torch.zeros(self.data.steps)
        self._place = self._size = 0

    def fill(self) -> None:
        for view, values in zip(self._views, self.data.columns().values(), strict=True):
            view[...] = values
        self._masses.copy_(torch.from_numpy(self.data.priorities)).pow_(ALPHA)
        self._size = self.data.steps

    def sample(self) -> Any:
        if self.prioritized:
            index = torch.multinomial(self._masses, self.batch, replacement=True)
        else:
            index = torch.randint(self._size, (self.batch,))
        batch = {name: values.index_select(0, index) for name, values in self.store.items()}
        if self.prioritized:
            weight = self._masses[index].pow_(-BETA)
            batch["weight"], batch["index"] = weight / weight.max(), index
        return batch

    def values(self, values: np.ndarray) -> Any:
        return torch.from_numpy(values)

    def update(self, batch: Any, values: Any) -> None:
        self._masses[batch["index"]] = values**ALPHA

    def weights(self, batch: Any) -> np.ndarray:
        return np.asarray(batch["weight"])

    def calls(self, steps: np.ndarray, ends: np.ndarray) -> Iterator[Any]:
        for row in steps if self.envs > 1 else steps[:, 0]:
            yield list(self.data.columns(row).values())

    def append(self, call: Any) -> None:
        place, count = self._place, self.envs
        if count == 1:
            for view, value in zip(self._views, call, strict=True):
                view[place] = value
        else:
            if place + count > self.data.steps:
                place = 0
            for view, value in zip(self._views, call, strict=True):
                view[place : place + count] = value
        self._place = (place + count) % self.data.steps
        self._size = max(self._size, place + count)


KINDS: dict[str, dict[str, Any]] = {"transitions": {"plain torch": Transitions}}
