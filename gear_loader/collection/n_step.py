"""n-step returns as computed columns of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from typing import Any

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.storage.schema import Schema, Window
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, check_gamma


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
    ``next``      with `next`, ``[B, *shape]``: the value of that column at the bootstrap step, zeros where the
                  trajectory has no such step; of several columns, a dict of them
    ============= =======================================================================================

    At the end of a trajectory that does not terminate (truncation), the bootstrap step is its final step (see
    `Column.final`), or without one its last step, so that its last reward counts in no return.

    Args:
        column: column of rewards, of shape ``()`` or ``(1,)``.
        n: most steps, at least 1.
        gamma: discount of a step, from 0 to 1.
        done: column of shape ``()`` or ``(1,)`` that is not zero where the trajectory terminates; not where it is
            truncated.
        next: column, or columns, to deliver at the bootstrap step: the observation.

    Example: ``windows={"obs": Window(1), "target": NStep("reward", n=3, gamma=0.99, done="terminated", next="obs")}``,
    and the observation to bootstrap from is ``batch["target"]["next"]``.

    Raises:
        SchemaError: an invalid option.
    """

    column: str
    n: int
    gamma: float
    done: str
    next: str | tuple[str, ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", at_least("n", self.n))
        check_gamma(self.gamma)
        for name in ("column", "done"):
            if not isinstance(getattr(self, name), str):
                raise SchemaError(f"{name} is {shown(getattr(self, name))}; expected the name of a column.")
        if isinstance(self.next, list):
            object.__setattr__(self, "next", tuple(self.next))
        if not all(isinstance(name, str) for name in self.delivered):
            raise SchemaError(
                f"next is {shown(self.next)}; expected the name of a column, or a tuple of names."
            )

    @property
    def delivered(self) -> tuple[Any, ...]:
        """The columns of `next`."""
        if self.next is None:
            return ()
        return self.next if isinstance(self.next, tuple) else (self.next,)

    def windows(self, schema: Schema) -> dict[str, Window]:
        """The windows that it is computed from: ``reward``, ``done``; ``follows``, of which only the mask is read; and
        ``next.NAME`` of each column of `next`.

        Raises:
            SchemaError: a column is missing, or that of the rewards or ends is not of shape ``()`` or ``(1,)``.
        """
        for name in (self.column, self.done):
            if name not in schema.steps or schema[name].shape not in ((), (1,)):
                found = f"has shape {list(schema[name].shape)}" if name in schema.steps else "does not exist"
                raise SchemaError(f"Column {name!r} of {self!r} {found}; expected one of shape () or (1,).")
        unknown = [name for name in self.delivered if name not in schema.steps]
        if unknown:
            raise SchemaError(
                f"{self!r} delivers {unknown}; expected columns with a value for each step: {list(schema.steps)}."
            )
        finals = [name for name, column in schema.items() if column.final]
        follows = min(finals, key=lambda name: schema[name].step_bytes, default=self.column)
        return {
            "reward": Window(self.n, column=self.column),
            "done": Window(self.n, column=self.done),
            "follows": Window(self.n + 1, column=follows),
            **{f"next.{name}": Window(self.n + 1, column=name) for name in self.delivered},
        }


@dataclasses.dataclass(frozen=True)
class Returns:
    """The tensors of one `NStep` in a batch's buffers, all on the same device.

    Attributes:
        rewards, done: ``[B, n]`` or ``[B, n, 1]``. steps: bool ``[B, n]``. follows: bool ``[B, n + 1]``; see `n_step`.
            Where it was not gathered, `compute` gets limits.
        nexts: windows of the columns of `next`, ``[B, n + 1, *shape]``; or ``[B, 1, *shape]``, gathered at the
            bootstrap step when it is known.
        out: the dict that `NStep` describes, without ``next``. ends: the tensors of ``next``, as `nexts`.
    """

    spec: NStep
    rewards: torch.Tensor
    done: torch.Tensor
    steps: torch.Tensor
    follows: torch.Tensor
    nexts: list[torch.Tensor]
    out: dict[str, torch.Tensor]
    ends: list[torch.Tensor]
    _made: list[Any] = dataclasses.field(default_factory=list, repr=False, compare=False)

    @classmethod
    def of(cls, spec: NStep, parts: Mapping[str, torch.Tensor], masks: Mapping[str, torch.Tensor]) -> Returns:
        """Allocate the outputs for windows and masks by the names of `NStep.windows`."""
        rewards = parts["reward"]
        device, pinned, count = rewards.device, rewards.is_pinned(), len(rewards)
        shared = rewards.is_shared() and device.type == "cpu"

        def new(dtype: torch.dtype, *shape: int) -> torch.Tensor:
            tensor = torch.zeros(count, *shape, dtype=dtype, device=device, pin_memory=pinned)
            return tensor.share_memory_() if shared else tensor

        dtypes = {
            "return": torch.float32,
            "discount": torch.float32,
            "bootstrap": torch.int64,
            "mask": torch.bool,
        }
        out = {name: new(dtype) for name, dtype in dtypes.items()}
        nexts = [parts[f"next.{name}"] for name in spec.delivered]
        ends = [each[:, 0] if each.shape[1] == 1 else new(each.dtype, *each.shape[2:]) for each in nexts]
        follows = masks.get("follows")
        if follows is None:
            follows = torch.zeros((count, spec.n + 1), dtype=torch.bool, device=device)
        return cls(spec, rewards, parts["done"], masks["reward"], follows, nexts, out, ends)

    @property
    def shown(self) -> dict[str, Any]:
        """What a batch has under the key."""
        if not self.ends:
            return dict(self.out)
        ends: Any = dict(zip(self.spec.delivered, self.ends, strict=True))
        return {**self.out, "next": ends if isinstance(self.spec.next, tuple) else self.ends[0]}

    def _loop(self) -> Any:
        """What computes the first n rows on the CPU, of n and the anchors."""
        if self._made:
            return self._made[0]
        from gear_loader.native import returns  # here, because it loads numba

        rewards, done, gamma = self.rewards.flatten(1), self.done.flatten(1), float(self.spec.gamma)
        # Flags and rewards of these dtypes are read where they are; others are converted for each batch.
        plain = rewards.dtype == torch.float32 and done.dtype == torch.bool
        shared = [rewards.numpy(), done.numpy()] if plain else []
        masks, out = [self.steps.numpy(), self.follows.numpy()], [each.numpy() for each in self.out.values()]

        steps, follows = np.arange(self.spec.n + 1), masks[1]

        def loop(count: int, anchors: np.ndarray, limits: np.ndarray | None) -> None:
            if limits is not None:
                np.less(steps, (limits - anchors)[:, None], out=follows[:count])
            read = shared or [rewards[:count].float().numpy(), (done[:count] != 0).numpy()]
            returns.n_step(*read, *masks, np.ascontiguousarray(anchors), gamma, *out)

        self._made.append(loop)
        return loop

    def compute(self, anchors: torch.Tensor, limits: np.ndarray | None = None) -> None:
        """Compute the first n rows. Does not wait for a GPU.

        Args:
            anchors: int64 [n], on the device of the tensors.
            limits: of rows gathered by the CPU at anchors and bootstrap steps, int64 [n]: steps and final steps of
                their trajectories.
        """
        rows = slice(len(anchors))
        if anchors.device.type == "cpu":
            self._loop()(len(anchors), anchors.numpy(), limits)
        else:
            rewards, done = self.rewards[rows].flatten(1).float(), self.done[rows].flatten(1) != 0
            parts = (rewards, done, self.steps[rows], self.follows[rows])
            for tensor, value in zip(
                self.out.values(), n_step(*parts, anchors, self.spec.gamma), strict=True
            ):
                tensor[rows].copy_(value)
        if self.ends and self.nexts[0].shape[1] > 1:
            width = self.follows.shape[1]
            places = torch.arange(len(anchors), device=anchors.device) * width
            places += self.out["bootstrap"][rows] - anchors
            for window, end in zip(self.nexts, self.ends, strict=True):
                torch.index_select(window.flatten(0, 1), 0, places, out=end[rows])


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
