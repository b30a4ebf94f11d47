"""`SequenceBuffer`: transitions in, sequences of them out, for recurrent agents."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.dataset.options import Draws
from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.replay.adding import Adder
from gear_loader.replay.buffer import ReplayBuffer
from gear_loader.replay.value_adding import ValueAdder
from gear_loader.storage.ragged import Ragged
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, finite


class SequenceBuffer(ReplayBuffer):
    """Holds the newest steps of one or n environments, and samples sequences of consecutive steps::

        buffer = gear.SequenceBuffer(100_000, length=80, burn_in=40, mutable=("state",))
        buffer.add(obs, action, reward, next_obs, terminated, truncated, state=state)
        batch = buffer.sample(64)

    `add` and `extend` are those of `ReplayBuffer`. Sequences of an episode begin at its steps 0, ``length - overlap``,
    ``2 * (length - overlap)``, ..., and the last one has the episode's last step. A sequence never has steps of two
    episodes: one that an episode's end cuts short, or of an episode that is still running, is padded with zeros at its
    end, in ``obs`` after the last `next_obs`. The steps of an episode are stored once.

    A batch is a dict, with T = `length`:

    ================ ==============================================================================
    ``obs``          ``[B, T, *shape]``
    ``next_obs``     ``[B, T, *shape]``: of the same memory as ``obs``; after the last step of an episode, also at
                     truncation, its final observation
    ``action``       ``[B, T, *shape]``
    ``reward``       float32 ``[B, T]``
    ``terminated``   bool ``[B, T]``
    ``is_first``     bool ``[B, T]``: the first step of an episode
    ``mask``         bool ``[B, T]``: the step exists
    ``loss_mask``    bool ``[B, T]``: `mask` without the burn-in: the first `burn_in` steps of sequences that do not
                     begin with an episode
    ``state``        ``[B, *shape]``: of the sequence's first step alone
    other columns    ``[B, T, *shape]``, that `add` was given
    ================ ==============================================================================

    and ``index``, ``anchor``, ``generation``, which identify its rows, and ``priority_weight``; see `ReplayDataset`.
    A target is ``reward + gamma * ~terminated * value(next_obs)``. Each step can be drawn when `add` has returned, also
    of running episodes. A full buffer drops its oldest piece: an episode, or about 1,024 steps of a longer one. The
    pieces of an episode have `overlap` steps in common, which are stored twice, so that no sequence is lost between
    them. If all of a running episode has been dropped, a sequence begins at the step that comes next.

    Args:
        capacity, batch_size, num_envs, device, name, if_exists, disk, seed: as for `ReplayBuffer`.
        observation_space, action_space: as there; they go with an `add` without other columns.
        payload, ragged: as there. Values of any length come as `Ragged` of ``[B, T]``, or as lists of lists.
        length: steps of a sequence, its burn-in included.
        burn_in: steps that only warm up the recurrent state (R2D2: Kapturowski et al., 2019).
        overlap: steps that consecutive sequences of an episode have in common; by default `burn_in`, so that every step
            is in the `loss_mask` of one sequence.
        sampler: how sequences are drawn, by default ``Uniform(unit="step")``: for example
            ``Prioritized(alpha=0.9, beta=0.6, unit="step")``. The step that it draws is the first of a sequence.
        mutable: names of arguments of `add` whose values `set` may overwrite, such as ``("state",)``; see `Column`.

    Raises:
        SchemaError: an invalid option.
    """

    _taken = (*ReplayBuffer._taken, "is_first", "loss_mask")

    def __init__(
        self,
        capacity: int,
        *,
        length: int,
        burn_in: int = 0,
        overlap: int | None = None,
        mutable: Sequence[str] = (),
        **options: Any,
    ) -> None:
        self.length, self.burn_in = at_least("length", length), at_least("burn_in", burn_in, least=0)
        self.overlap = self.burn_in if overlap is None else at_least("overlap", overlap, least=0)
        if max(self.burn_in, self.overlap) >= self.length:
            raise SchemaError(
                f"length is {length}, burn_in {burn_in} and overlap {self.overlap}; expected burn_in and overlap "
                "below length."
            )
        if unknown := {"n_step", "gamma", "hindsight", "agents", "stack"} & options.keys():
            raise SchemaError(
                f"{sorted(unknown)} were given; a SequenceBuffer has no n-step returns, hindsight, agents or stacks. "
                "Leave them out."
            )
        if isinstance(mutable, str) or not all(isinstance(name, str) for name in mutable):
            raise SchemaError(f"mutable is {shown(mutable)}; expected names of columns, such as ('state',).")
        self.mutable = tuple(mutable)
        super().__init__(capacity, **options)

    # ---------------------------------------------------------------- the table

    def _columns(self, schema: dict[str, Column]) -> dict[str, Column]:
        if unknown := [name for name in self.mutable if name not in self._nestings or name == "obs"]:
            known = [name for name in self._nestings if name != "obs"]
            raise SchemaError(f"mutable has {unknown}; expected names of {known}.")
        for name in self.mutable:
            for column in self._nestings[name].columns():
                schema[column] = dataclasses.replace(schema[column], mutable=True)
        return {**schema, "is_first": Column(torch.bool)}

    @property
    def _reach(self) -> int:
        return self.length

    @property
    def _unit(self) -> int:
        return self.length - self.overlap

    @property
    def _piece(self) -> int:
        """A whole number of sequences."""
        return self.overlap + max((super()._piece - self.overlap) // self._unit, 1) * self._unit

    def _draws(self) -> Draws:
        return Draws(stride=self._unit)

    def _windows(self, table: Table) -> dict[str, Any]:
        """Those of observations have one step more, that of the last `next_obs`."""
        windows: dict[str, Any] = dict.fromkeys(table.schema, Window(self.length))
        windows |= dict.fromkeys(self._nestings["obs"].columns(), Window(self.length + 1))
        if "state" in self._nestings:
            windows |= dict.fromkeys(self._nestings["state"].columns(), Window(1, squeeze=True))
        return windows

    def _use(self, table: Table) -> None:
        super()._use(table)
        complete = None if self._dataset is None else self._dataset.complete
        if self._dataset is not None and complete is not None and table.schema.ragged:
            # The last row of a trajectory is what followed, see `ValueAdder`, and no step of a sequence.
            self._dataset.complete = dataclasses.replace(complete, ahead=1, ahead_final=1, length=self.length)

    def _new_adder(self, count: int) -> Adder | ValueAdder:
        assert self._table is not None
        self.num_envs = count
        columns = self._nestings, count, self._piece
        if self._table.schema.ragged:
            return ValueAdder(self._table, *columns, first="is_first", overlap=self.overlap)
        return Adder(self._table, *columns, waits=self._waits, first="is_first", overlap=self.overlap)

    # ---------------------------------------------------------------- sampling

    def _finish(self, batch: Batch) -> Batch:
        steps = batch["mask"]
        found: dict[str, Any] = dict(batch)
        leaves = {name: batch[name] for each in self._nestings.values() for name in each.columns()}
        following = {}
        for column in self._nestings["obs"].columns():
            mask, values = steps[column][:, 1:], leaves[column]
            leaves[column], following[column] = _part(values, 0, -1), _part(values, 1, None)
        for name, nesting in self._nestings.items():
            for column in nesting.columns():
                found.pop(column)
            found[name] = nesting.build(leaves)
        found["next_obs"] = self._nestings["obs"].build(following)
        found["mask"] = found["loss_mask"] = mask
        if self.burn_in:
            trained = torch.arange(self.length, device=mask.device) >= self.burn_in
            found["loss_mask"] = mask & (trained | found["is_first"][:, :1])
        return Batch(found)

    def update_priority(self, batch: Batch, priority: Any, *, eta: float = 0.9) -> None:
        """Set the priorities of a batch's sequences; see `ReplayDataset.update_priority`.

        Args:
            batch: as it was sampled.
            priority: float32 [B]; or [B, T], absolute TD errors, of which the priority is ``eta * max + (1 - eta) *
                mean`` over the batch's `loss_mask`, as in R2D2, and 0 where that is empty.
            eta: from 0 to 1.
        """
        if not isinstance(priority, torch.Tensor):
            priority = torch.as_tensor(priority, device="cpu")
        if priority.ndim == 2:
            if not finite(eta) or not 0 <= eta <= 1:
                raise SchemaError(f"eta is {shown(eta)}; expected a number from 0 to 1.")
            if priority.shape != batch["loss_mask"].shape:
                raise SchemaError(
                    f"priority has the shape {list(priority.shape)}; expected [B] or [B, T], "
                    f"{list(batch['loss_mask'].shape)}."
                )
            mask = batch["loss_mask"].to(priority.device)
            priority = priority.detach().float().masked_fill(~mask, 0.0)
            mean = priority.sum(1) / mask.sum(1).clamp(min=1)
            priority = eta * priority.amax(1) + (1 - eta) * mean
        super().update_priority(batch, priority)

    def set(self, batch: Batch, **values: Any) -> int:
        """Overwrite values of a batch's sequences, nested as `add` was given them, as one change a sequence.

        Args:
            batch: as it was sampled.
            values: of columns in `mutable`: ``[B, T, *shape]``, of which those in `mask` are written, or ``[B,
                *shape]`` of the first steps.

        Returns:
            Number of sequences that were dropped meanwhile, and skipped.

        Raises:
            TableEmptyError: nothing was added.
            SchemaError: a column that is not in `mutable`, or values that do not fit. Nothing was changed.
        """
        if self._table is None:
            raise TableEmptyError("The replay buffer is empty; add a transition before the first set.")
        if unknown := [name for name in values if name not in self.mutable]:
            raise SchemaError(f"{unknown} were given; expected columns in mutable, {list(self.mutable)}.")
        leaves: Mapping[str, Any] = {
            column: leaf
            for name, value in values.items()
            for column, leaf in self._nestings[name].leaves(value)
        }
        inner = {name: len(self._table.schema[name].shape) for name in leaves}
        whole = {len(np.shape(leaf)) - inner[name] for name, leaf in leaves.items()}
        mask = batch["mask"].cpu().numpy() if whole == {2} else None
        names = batch["index"], batch["anchor"]
        return self._table.set(*names, generation=batch["generation"], mask=mask, **leaves)

    # ---------------------------------------------------------------- files

    def _options(self) -> dict[str, Any]:
        return {
            "length": self.length,
            "burn_in": self.burn_in,
            "overlap": self.overlap,
            "mutable": list(self.mutable),
        }


def _part(values: Any, first: int, last: int | None) -> Any:
    """Some of the steps of sequences: values [B, T, ...], `Ragged` [B, T], or lists of lists."""
    if isinstance(values, list):
        return [row[first:last] for row in values]
    if not isinstance(values, Ragged):
        return values[:, first:last]
    starts = values.offsets[:-1].view(values.shape)[:, first:last]
    sizes = values.offsets.diff().view(values.shape)[:, first:last].reshape(-1)
    offsets = torch.cat((sizes.new_zeros(1), sizes.cumsum(0)))
    shift = (starts.reshape(-1) - offsets[:-1]).repeat_interleave(sizes)
    rows = values.values[shift + torch.arange(len(shift), device=shift.device)]
    return Ragged._of(rows, offsets, tuple(starts.shape))
