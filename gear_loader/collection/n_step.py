"""n-step returns as computed columns of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Schema, Window
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, finite


@dataclasses.dataclass(frozen=True)
class NStep:
    """n-step returns of a batch's rows, computed while it is gathered; a value of a dataset's `windows`.

    A batch has a dict under the key, with k rewards counted, at most n, none after a step that terminates:

    ============= =======================================================================================
    ``return``    float32 ``[B]``: ``sum of gamma ** i * reward[anchor + i]`` for i from 0 to k - 1
    ``discount``  float32 ``[B]``: ``gamma ** k``, the factor of the value at the bootstrap step; 0 if the trajectory
                  terminates within the k steps
    ``bootstrap`` int64 ``[B]``: the bootstrap step, anchor + k
    ``mask``      bool ``[B]``: False if k is 0, so that the row has no target
    ============= =======================================================================================

    At the end of a trajectory that does not terminate (truncation), the bootstrap step is its final step (see
    `Column.final`), or without one its last step, so that its last reward counts in no return.

    Args:
        column: column of rewards, of shape ``()`` or ``(1,)``.
        n: most steps, at least 1.
        gamma: discount of a step, from 0 to 1.
        done: column of shape ``()`` or ``(1,)`` that is not zero where the trajectory terminates; not where it is
            truncated.

    Example: ``windows={"obs": Window(1), "target": NStep("reward", n=3, gamma=0.99, done="terminated"),
    "next_obs": Window(4, column="obs")}``, and the observation to bootstrap from is
    ``batch["next_obs"][range(B), batch["target"]["bootstrap"] - batch["anchor"]]``.

    Raises:
        SchemaError: an invalid option.
    """

    column: str
    n: int
    gamma: float
    done: str

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", at_least("n", self.n))
        if not finite(self.gamma) or not 0 <= self.gamma <= 1:
            raise SchemaError(f"gamma is {shown(self.gamma)}; expected a number from 0 to 1.")
        for name in ("column", "done"):
            if not isinstance(getattr(self, name), str):
                raise SchemaError(f"{name} is {shown(getattr(self, name))}; expected the name of a column.")

    def windows(self, schema: Schema) -> dict[str, Window]:
        """The windows that it is computed from: ``reward``, ``done``, and ``follows``, of which only the mask is read.

        Raises:
            SchemaError: a column is missing, or not of shape ``()`` or ``(1,)``.
        """
        for name in (self.column, self.done):
            if name not in schema.steps or schema[name].shape not in ((), (1,)):
                found = f"has shape {list(schema[name].shape)}" if name in schema.steps else "does not exist"
                raise SchemaError(f"Column {name!r} of {self!r} {found}; expected one of shape () or (1,).")
        finals = [name for name, column in schema.items() if column.final]
        follows = min(finals, key=lambda name: schema[name].step_bytes, default=self.column)
        return {
            "reward": Window(self.n, column=self.column),
            "done": Window(self.n, column=self.done),
            "follows": Window(self.n + 1, column=follows),
        }


@dataclasses.dataclass(frozen=True)
class Returns:
    """The tensors of one `NStep` in a batch's buffers, all on the same device.

    Attributes:
        rewards, done: ``[B, n]`` or ``[B, n, 1]``. steps: bool ``[B, n]``. follows: bool ``[B, n + 1]``; see `n_step`.
        out: the dict that `NStep` describes.
    """

    spec: NStep
    rewards: torch.Tensor
    done: torch.Tensor
    steps: torch.Tensor
    follows: torch.Tensor
    out: dict[str, torch.Tensor]

    @classmethod
    def of(cls, spec: NStep, parts: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]) -> Returns:
        """Allocate the outputs for windows and masks by the names of `NStep.windows`."""
        device, pinned = parts["reward"].device, parts["reward"].is_pinned()
        dtypes = {
            "return": torch.float32,
            "discount": torch.float32,
            "bootstrap": torch.int64,
            "mask": torch.bool,
        }
        out = {
            name: torch.zeros(len(parts["reward"]), dtype=dtype, device=device, pin_memory=pinned)
            for name, dtype in dtypes.items()
        }
        if parts["reward"].is_shared() and parts["reward"].device.type == "cpu":
            out = {name: tensor.share_memory_() for name, tensor in out.items()}
        return cls(spec, parts["reward"], parts["done"], masks["reward"], masks["follows"], out)

    def compute(self, anchors: torch.Tensor) -> None:
        """Compute the first n rows. Does not wait for a GPU.

        Args:
            anchors: int64 [n], on the device of the tensors.
        """
        from gear_loader.native import returns  # here, because it loads numba

        rows = slice(len(anchors))
        rewards, done = self.rewards[rows].flatten(1).float(), self.done[rows].flatten(1) != 0
        parts = (rewards, done, self.steps[rows], self.follows[rows])
        if anchors.device.type == "cpu":
            out = [tensor[rows].numpy() for tensor in self.out.values()]
            returns.n_step(
                *(part.contiguous().numpy() for part in parts),
                np.ascontiguousarray(anchors.numpy()),
                float(self.spec.gamma),
                *out,
            )
            return
        for tensor, value in zip(self.out.values(), n_step(*parts, anchors, self.spec.gamma), strict=True):
            tensor[rows].copy_(value)


def n_step(
    rewards: torch.Tensor,
    done: torch.Tensor,
    steps: torch.Tensor,
    follows: torch.Tensor,
    anchors: torch.Tensor,
    gamma: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs of `NStep` by tensor operations; for a GPU, where it waits for nothing.

    Args:
        rewards: float32 [B, n], from the anchor on. done: bool [B, n], whether the trajectory terminates at the step.
        steps: bool [B, n], whether the step exists. follows: bool [B, n + 1], whether there is a bootstrap step.
        anchors: int64 [B]. gamma: discount of a step.

    Returns:
        return, discount, bootstrap and mask, each [B].
    """
    before = torch.cumsum(done.to(torch.int32), 1) - done.to(torch.int32)  # terminations before each step
    counted = steps & (before == 0)
    ended = (counted & done).any(1)
    count = counted.sum(1)
    count = count - (~ended & ~follows.gather(1, count[:, None])[:, 0]).long()
    place = torch.arange(rewards.shape[1], device=rewards.device)
    factors = torch.full((), float(gamma), dtype=torch.float64, device=rewards.device) ** place
    factors = torch.where(place[None] < count[:, None], factors[None], 0.0)
    # A reward that does not count may be infinite in memory: it must not become NaN by a factor of 0.
    total = torch.where(factors > 0, rewards.double() * factors, 0.0).sum(1)
    discount = torch.where(
        ended, 0.0, torch.full((), float(gamma), dtype=torch.float64, device=rewards.device) ** count
    )
    return total.float(), discount.float(), anchors + count, count > 0
