"""Transitions of environments whose observations are numbers that never come back, and what batches of them must be."""

from __future__ import annotations

import random
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch

import gear_loader as gear

GAMMA = 0.9


class Moment(NamedTuple):
    """One transition; `obs` and `next_obs` are numbers of observations, which never come back."""

    obs: int
    action: int
    reward: float
    next_obs: int
    terminated: bool
    truncated: bool


class World:
    """Environments whose observations are numbers that never come back.

    Attributes:
        added: the transitions of each environment, in order.
    """

    def __init__(self, seed: int, n: int, *, next_step: bool = False) -> None:
        self.choose, self.n, self.next_step = random.Random(seed), n, next_step
        self.added: list[list[Moment]] = [[] for _ in range(n)]
        self._number = 0
        self.obs = [self._new() for _ in range(n)]
        self._ended = [False] * n

    def _new(self) -> int:
        self._number += 1
        return self._number

    def step(self) -> list[Moment]:
        """One step of each environment, as it is added; with `next_step` some rows only reset."""
        rows = []
        for env in range(self.n):
            if self.next_step and self._ended[env]:
                row = Moment(self.obs[env], 0, 0.0, self._new(), terminated=False, truncated=False)
                self._ended[env], self.obs[env] = False, row.next_obs
            else:
                ends, cut = self.choose.random() < 0.15, self.choose.random() < 0.1
                row = Moment(
                    self.obs[env],
                    self.choose.randrange(5),
                    self.choose.choice([0.0, 1.0, -2.5]),
                    self._new(),
                    ends,
                    cut,
                )
                self.added[env].append(row)
                self._ended[env] = ends or cut
                resets = not self.next_step if self._ended[env] else self.choose.random() < 0.05
                self.obs[env] = self._new() if resets else row.next_obs
            rows.append(row)
        return rows

    def expected(self, obs: int, n_step: int, last: int) -> tuple[int, float, int, float]:
        """Action, return, observation to bootstrap from and discount of the transition at `obs`; `last` is the one that
        was delivered: pieces of an episode may end anywhere."""
        found = [(part, i) for part in self.added for i, row in enumerate(part) if row.obs == obs]
        ((part, at),) = found
        total, factor = 0.0, 1.0
        for step, row in enumerate(part[at : at + n_step]):
            assert step == 0 or row.obs == part[at + step - 1].next_obs
            total += factor * row.reward
            factor *= GAMMA
            if row.terminated:
                return part[at].action, total, row.next_obs, 0.0
            if row.truncated or row.next_obs == last:
                return part[at].action, total, row.next_obs, factor
        return part[at].action, total, part[at + n_step - 1].next_obs, factor


def shaped(number: Any, kind: str) -> Any:
    """Observations of these numbers, nested as `kind` says."""
    values = np.asarray(number)
    if kind == "array":
        return np.stack((values, -values), -1).astype(np.float64)
    if kind == "tensor":
        return torch.as_tensor(values)
    image = np.broadcast_to(values[..., None, None] % 251, (*values.shape, 3, 2)).astype(np.uint8)
    return {"number": values, "eyes": (image, {"left": values.astype(np.float32) / 2})}


def numbers_of(batch: Any, kind: str) -> torch.Tensor:
    """The inverse of `shaped`; checks that all parts agree."""
    if kind == "array":
        assert (batch[:, 0] == -batch[:, 1]).all()
        assert batch.dtype == torch.float32
        return batch[:, 0].long()
    if kind == "tensor":
        return batch
    image, more = batch["eyes"]
    assert (image == (batch["number"] % 251)[:, None, None]).all()
    assert (more["left"] * 2 == batch["number"]).all()
    return batch["number"]


def add_all(buffer: gear.ReplayBuffer, world: World, kind: str) -> None:
    rows = world.step()
    many = [np.array(part) for part in zip(*rows, strict=True)]
    obs, action, reward, following, terminated, truncated = (
        many if world.n > 1 else [each[0] for each in many]
    )
    buffer.add(
        shaped(obs, kind), action, reward, shaped(following, kind), terminated, truncated, age=reward * 2
    )


def check(buffer: gear.ReplayBuffer, world: World, kind: str, batch: Any) -> None:
    assert not {"mask", "terminated", "target"} & set(batch)
    obs, following = numbers_of(batch["obs"], kind).tolist(), numbers_of(batch["next_obs"], kind).tolist()
    for row, number in enumerate(obs):
        action, total, last, discount = world.expected(number, buffer.n_step, following[row])
        assert following[row] == last
        assert batch["action"][row] == action
        assert batch["reward"][row] == pytest.approx(total)
        assert batch["discount"][row] == pytest.approx(discount)
