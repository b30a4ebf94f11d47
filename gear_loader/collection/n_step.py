"""n-step returns as computed columns of a batch."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np
import torch

from gear_loader.errors import SchemaError
from gear_loader.kernels.plan import (
    BASE,
    BLOCKS,
    FINAL,
    LENGTH,
    MASK,
    OFFSET,
    OUT,
    PAD,
    ROLE,
    STEP_BYTES,
    STEP_STRIDE,
    STRIDE,
    WIDTH,
)
from gear_loader.storage.schema import Schema, Window
from gear_loader.utils.arrays import Array, shown
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
        next: column, or columns, to deliver at the bootstrap step: the observation; or a mapping of names to `Window`
            around that step, such as ``{"obs": Window(4, -3, pad="edge")}`` for a stack of frames, in a dict by these
            names, ``[B, L, *shape]``. Windows, and all if one has values of any length, are gathered when the returns
            have been computed, by the CPU.

    Example: ``windows={"obs": Window(1), "target": NStep("reward", n=3, gamma=0.99, done="terminated", next="obs")}``,
    and the observation to bootstrap from is ``batch["target"]["next"]``.

    Raises:
        SchemaError: an invalid option.
    """

    column: str
    n: int
    gamma: float
    done: str
    next: str | tuple[str, ...] | Mapping[str, Window] | tuple[tuple[str, Window], ...] | None = None

    def __post_init__(self) -> None:
        object.__setattr__(self, "n", at_least("n", self.n))
        check_gamma(self.gamma)
        for name in ("column", "done"):
            if not isinstance(getattr(self, name), str):
                raise SchemaError(f"{name} is {shown(getattr(self, name))}; expected the name of a column.")
        if isinstance(self.next, (list, Mapping)):
            given = self.next.items() if isinstance(self.next, Mapping) else self.next
            object.__setattr__(self, "next", tuple(given))  # pairs of names and windows can be hashed
        if not all(isinstance(name, str) for name in self.delivered):
            raise SchemaError(
                f"next is {shown(self.next)}; expected the name of a column, a tuple of names, or a mapping of names "
                "to gear_loader.Window."
            )
        if timed := [name for name, window in self.following.items() if window.timestamps is not None]:
            raise SchemaError(f"next has windows with timestamps, {timed}; expected windows of steps.")

    @property
    def has_windows(self) -> bool:
        """Whether `next` has windows, not columns alone."""
        return isinstance(self.next, tuple) and any(isinstance(each, tuple) for each in self.next)

    @property
    def following(self) -> dict[str, Window]:
        """What `next` delivers: name -> window around the bootstrap step."""
        if self.has_windows:
            return dict(self.next)  # type: ignore[arg-type]
        return {name: Window(1, squeeze=True) for name in self.delivered}

    @property
    def delivered(self) -> tuple[Any, ...]:
        """The columns of `next`."""
        if self.next is None:
            return ()
        if not isinstance(self.next, tuple):
            return (self.next,)
        return tuple(_column_of(each) for each in self.next)

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
            **{
                f"next.{name}": Window(
                    self.n + 1 + window.reach[1] - window.reach[0], window.reach[0], column=column
                )
                for column, (name, window) in zip(self.delivered, self.following.items(), strict=True)
            },
        }


def _column_of(each: Any) -> Any:
    """The column of a part of `NStep.next`: a name, or a pair of a name and a window; None of anything else."""
    if isinstance(each, str):
        return each
    pair = isinstance(each, tuple) and len(each) == 2 and isinstance(each[1], Window)
    return (each[0] if each[1].column is None else each[1].column) if pair else None


OUTPUTS = {
    "return": torch.float32,
    "discount": torch.float32,
    "bootstrap": torch.int64,
    "mask": torch.bool,
}
"""What `Returns.out` has, [B] each."""


class ReturnWindows(NamedTuple):
    """The windows of one return that are computed where the rows are, instead of being delivered.

    Attributes:
        reward, done: names of the windows of `NStep.windows`. gamma: discount of a step.
        next: names of the windows of ``next``, which have the one step to bootstrap from.
    """

    reward: str
    done: str
    gamma: float
    next: tuple[str, ...]

    @property
    def names(self) -> tuple[str, ...]:
        """Of all windows."""
        return self.reward, self.done, *self.next

    def row_bytes(self) -> dict[str, int]:
        """Bytes of a row that the windows of rewards and ends are replaced by: the return and the discount."""
        return {self.reward: 4, self.done: 4}

    def mask_bytes(self) -> dict[str, int]:
        """Bytes of a row that come in the place of their masks: whether there is a return, and its bootstrap step."""
        return {self.reward: 1, self.done: 8}


@dataclasses.dataclass(frozen=True)
class Returns:
    """The tensors of one `NStep` in a batch's buffers, all on the same device.

    Attributes:
        out: see `OUTPUTS`. ends: the tensors of ``next``, ``[B, *shape]``.
        windows: windows by the names of `NStep.windows`, those of ``next`` unless they are gathered later; and
            steps, follows: the masks of rewards and of ``follows``. `compute` needs them. None where the CPU's loop
            computes all while it gathers.
    """

    spec: NStep
    out: dict[str, torch.Tensor]
    ends: list[torch.Tensor]
    windows: Mapping[str, torch.Tensor] | None = None
    steps: torch.Tensor | None = None
    follows: torch.Tensor | None = None

    @property
    def shown(self) -> dict[str, Any]:
        """What a batch has under the key."""
        if not self.ends:
            return dict(self.out)
        ends: Any = dict(zip(self.spec.delivered, self.ends, strict=True))
        return {**self.out, "next": ends if isinstance(self.spec.next, tuple) else self.ends[0]}

    @property
    def _takes(self) -> bool:
        """Whether `compute` takes ``next`` out of windows."""
        return self.windows is not None and any(name.startswith("next.") for name in self.windows)

    def compute(self, anchors: torch.Tensor) -> None:
        """Compute the first n rows of windows, for anchors, int64 [n]. Does not wait for a GPU."""
        assert self.windows is not None
        assert self.steps is not None
        assert self.follows is not None
        rows = slice(len(anchors))
        if anchors.device.type == "cpu":
            self._compute_on_cpu(anchors, self.windows, self.steps[rows], self.follows[rows])
            return
        rewards, done = (self.windows[name][rows].flatten(1) for name in ("reward", "done"))
        masks = self.steps[rows], self.follows[rows]
        found = n_step(rewards.float(), done != 0, *masks, anchors, self.spec.gamma)
        for tensor, value in zip(self.out.values(), found, strict=True):
            tensor[rows].copy_(value)
        if self._takes:
            places = torch.arange(len(anchors), device=anchors.device) * self.follows.shape[1]
            places += self.out["bootstrap"][rows] - anchors
            for name, end in zip(self.spec.delivered, self.ends, strict=True):
                torch.index_select(self.windows[f"next.{name}"].flatten(0, 1), 0, places, out=end[rows])

    def _compute_on_cpu(
        self,
        anchors: torch.Tensor,
        windows: Mapping[str, torch.Tensor],
        steps: torch.Tensor,
        follows: torch.Tensor,
    ) -> None:
        """Let the loop that gathers from a table read windows: each row is a trajectory of one block."""
        from gear_loader.native import gathering  # here, because it loads numba

        delivered, ends = (self.spec.delivered, self.ends) if self._takes else ((), [])
        read = [windows[name] for name in ("reward", "done", *(f"next.{each}" for each in delivered))]
        written = [self.out["return"], self.out["discount"], *ends]
        masks = [self.out["mask"].data_ptr(), self.out["bootstrap"].data_ptr(), *[0] * len(ends)]
        columns: Array = np.zeros((len(read), WIDTH), dtype=np.int64)
        for column, source, target, mask in zip(columns, read, written, masks, strict=True):
            column[BASE], column[OUT], column[MASK], column[LENGTH] = (
                source.data_ptr(),
                target.data_ptr(),
                mask,
                1,
            )
            column[STRIDE] = source[0].nbytes
            column[STEP_BYTES] = column[STEP_STRIDE] = source[0, 0].nbytes
            column[BLOCKS], column[FINAL] = len(source), 1
        columns[:2, FINAL] = 0  # `steps` says all
        mark_returns(self.spec.n, self.spec.gamma, 0, columns, [tensor.dtype for tensor in read])
        count, rows = len(anchors), np.arange(len(anchors))
        extent: Array = np.empty((count, 3), dtype=np.int64)
        extent[:, 0], extent[:, 1] = steps.sum(1), rows
        extent[:, 2] = follows.sum(1).numpy() - extent[:, 0]
        ids, size = rows.astype(np.int32), self.spec.n + 1
        gathering.gather(columns, rows, np.zeros_like(rows), extent, ids, size, 0, count, None)
        self.out["bootstrap"][:count] += anchors


def mark_returns(n: int, gamma: float, number: int, columns: Array, dtypes: Sequence[torch.dtype]) -> None:
    """Let the loop compute a return, number `number` of a plan; see `gear_loader.native.returns`.

    Args:
        n, gamma: as of `NStep`.
        columns: rows of the plan, a view, that read rewards, ends, and the columns to deliver. dtypes: of these.
    """
    from gear_loader.native import returns

    reward, done = columns[0], columns[1]
    columns[:, ROLE] = returns.ROLES * number + returns.NEXT
    reward[ROLE], done[ROLE] = returns.ROLES * number + returns.REWARD, returns.ROLES * number + returns.DONE
    reward[LENGTH] = n
    reward[PAD] = returns.DTYPES.index(str(dtypes[0]).removeprefix("torch."))
    reward[OFFSET] = np.float64(gamma).view(np.int64)
    # -0.0 is no end.
    done[OFFSET] = (1 << 8 * dtypes[1].itemsize - 1) - 1 if dtypes[1].is_floating_point else -1


def n_step(
    rewards: torch.Tensor,
    done: torch.Tensor,
    steps: torch.Tensor,
    follows: torch.Tensor,
    anchors: torch.Tensor,
    gamma: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """The outputs of `NStep` by tensor operations, of windows; on a GPU it waits for nothing.

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
