"""Hindsight experience replay: goals that were achieved take the place of those that were desired, in drawn batches."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Literal

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.chosen import RowGather
from gear_loader.errors import SchemaError
from gear_loader.replay.nesting import Nesting
from gear_loader.storage.disk import LostRowsError
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Window
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, flag, one_of
from gear_loader.utils.packing import upload

ACHIEVED, DESIRED = "obs.achieved_goal", "obs.desired_goal"


@dataclasses.dataclass(frozen=True)
class Hindsight:
    """Hindsight experience replay (Andrychowicz et al., 2017), of a `ReplayBuffer`::

        gear.ReplayBuffer(1_000_000, hindsight=gear.Hindsight(env.unwrapped.compute_reward))

    The buffer's observations are dicts with ``achieved_goal`` and ``desired_goal`` of one shape, as those of
    gymnasium-robotics. Nothing else is stored: when a batch is delivered, `n_sampled_goal` of `n_sampled_goal` + 1 of
    its rows, chosen at random, get as ``desired_goal``, in `obs` and `next_obs`, the goal that a step of the same
    episode achieved (the ``achieved_goal`` of its next observation), and the rewards that `compute_reward` returns for
    it. Everything else, ``discount`` too, is as it was, as in Stable-Baselines3. If the ratio is no whole number of
    rows, a random number decides about the last one. The batch's ``relabelled``, bool ``[B]``, tells which rows.

    Goals come from the row's whole episode, which the buffer keeps and drops as one. (An episode of more than
    ``capacity // (2 * num_envs)`` steps is kept in pieces of so many, and has goals of the row's piece.) They are a
    function of the seed, the number of the batch and the episode's length. Rows whose episode was dropped after it had
    been drawn, of batches prepared ahead, keep their goals; others take their place.

    On a GPU the host gathers the goals, and copies them to the batch on the consumer's stream. It does not wait for the
    GPU, unless that draws the rows (`Prioritized`): then until the batch has been gathered, not for what the consumer
    has queued. Rewards are computed on the host, or with `tensors` on the GPU.

    Attributes:
        compute_reward: function of (achieved_goal ``[N, *shape]``, desired_goal ``[N, *shape]``, info) that returns the
            rewards, ``[N]``. info is a dict: the other columns that `add` was given, ``[N, ...]``. N is B or less, and
            with `n_step` at most B * n_step.
        n_sampled_goal: goals for each one that stays; at least 1.
        strategy: ``"future"``: a step of the episode from the row's own on, each equally likely; ``"final"``: its last
            step; ``"episode"``: any of its steps.
        running: whether steps of an episode that has not ended are drawn, with goals among those so far. By default
            they are not, goals or no goals; then an episode can be drawn when it has ended.
        tensors: whether `compute_reward` gets tensors, on the device of the batch; by default numpy arrays. On a GPU it
            should not wait either: it returns a tensor there.

    Raises:
        SchemaError: an invalid value; at the first batch: rewards of another shape.
    """

    compute_reward: Callable[[Any, Any, dict[str, Any]], Any]
    n_sampled_goal: int = 4
    strategy: Literal["future", "final", "episode"] = "future"
    running: bool = False
    tensors: bool = False

    def __post_init__(self) -> None:
        if not callable(self.compute_reward):
            raise SchemaError(
                f"compute_reward is {shown(self.compute_reward)}; expected a function of (achieved_goal, desired_goal, "
                "info), such as env.unwrapped.compute_reward."
            )
        at_least("n_sampled_goal", self.n_sampled_goal)
        one_of("strategy", self.strategy, ("future", "final", "episode"))
        flag("running", self.running)
        flag("tensors", self.tensors)

    def check(self, schema: Mapping[str, Any]) -> None:
        """Raise SchemaError unless the columns of a buffer have goals, and what `compute_reward` gets is no text."""
        ragged = [name for name, column in schema.items() if column.ragged is not None]
        apart = [name for name in ragged if name.partition(".")[0] not in ("obs", "action")]
        if wrong := [name for name in ragged if name in (ACHIEVED, DESIRED, *apart)]:
            raise SchemaError(
                f"Hindsight was given, and {wrong} have values of any length; expected fixed sizes of goals, and of "
                "all columns but observations and actions: compute_reward gets one array of each."
            )
        shapes = {name: schema[name].shape for name in (ACHIEVED, DESIRED) if name in schema}
        if len(shapes) < 2 or len(set(shapes.values())) != 1:
            found = {name: list(shape) for name, shape in shapes.items()} or list(schema)
            raise SchemaError(
                f"Hindsight was given, and the buffer has {found}; expected observations that are dicts with "
                "'achieved_goal' and 'desired_goal' of one shape."
            )


class Relabel:
    """The transform of a buffer's batches that `Hindsight` describes.

    Args:
        options: checked. table, n_step, gamma: of the buffer. more: name -> nesting, of what `add` was given beside
            observations, actions and rewards.
    """

    takes_names = True
    """See `Transforms`."""

    def __init__(
        self, options: Hindsight, table: Table, *, n_step: int, gamma: float, more: Mapping[str, Nesting]
    ) -> None:
        options.check(table.schema)
        self._options, self._table, self._n_step, self._gamma = options, table, n_step, gamma
        self._more = dict(more)
        self._gatherers: tuple[
            _Gatherer, ...
        ] = ()  # of this process: of goals, and of the steps of n-step returns

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_gatherers": ()}

    def __call__(self, batch: Batch, generator: torch.Generator, names: tuple[Array, ...]) -> Batch:
        """names: slots, anchors and generations of the rows, int64 [B]."""
        count, goals = len(names[0]), self._options.n_sampled_goal
        number, rest = divmod(count * goals, goals + 1)
        order = torch.randperm(count, generator=generator, device="cpu").numpy()
        places = torch.rand(count + 1, dtype=torch.float64, generator=generator, device="cpu").numpy()
        number += bool(places[count] * (goals + 1) < rest)
        device = batch["reward"].device
        # What `compute_reward` gets is in the batch already, unless it is of several steps or must be on the host.
        inside = self._n_step == 1 and (device.type == "cpu" or self._options.tensors)
        chosen, read = self._read(names, order, number, places, steps=not inside)
        relabelled = torch.zeros(count, dtype=torch.bool, device="cpu")
        relabelled[chosen] = True
        goal = read["goal"].flatten(0, 1)
        where, goals_there, relabelled = self._moved(device, torch.from_numpy(chosen), goal, relabelled)
        if inside:
            leaves = [leaf for name, each in self._more.items() for leaf in each.leaves(batch[name])]
            info = {column: values[where] for column, values in leaves}
            reward = self._rewards(batch["next_obs"]["achieved_goal"][where], goals_there, info)
        else:
            reward = self._returns(read, goal, device)
        for part in ("obs", "next_obs"):
            batch[part]["desired_goal"][where] = goals_there
        batch["reward"][where] = reward
        batch["relabelled"] = relabelled
        return batch

    @staticmethod
    def _moved(device: torch.device, *values: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Tensors of the host on a device. Does not wait for a GPU."""
        return values if device.type == "cpu" else upload(device, *(each.numpy() for each in values))

    # ---------------------------------------------------------------- reading

    def _read(
        self, names: tuple[Array, ...], order: Array, number: int, places: Array, *, steps: bool
    ) -> tuple[Array, dict[str, torch.Tensor]]:
        """Choose rows and their goals.

        Args:
            names: of all rows. steps: whether to read what `_returns` needs.
            order: rows in random order, int64 [B]. number: rows to choose. places: float64 [B or more] from 0 to 1,
                of the goals.

        Returns:
            The rows, int64 [n]; ``goal``, ``[n, 1, *shape]``; and with `steps` ``achieved``, ``terminated``, the
            columns of info, ``[n, n_step, ...]``, and ``mask``, whether the transition exists, bool ``[n, n_step]``.
        """
        slots, anchors, generations = names
        if not self._gatherers:
            windows = {"achieved": Window(self._n_step, 1, column=ACHIEVED)}
            windows |= {name: Window(self._n_step) for name in ("terminated", *self._info_columns)}
            every: list[dict[str, Window]] = [{"goal": Window(1, 1, column=ACHIEVED)}]
            self._gatherers = tuple(_Gatherer(self._table, each) for each in every + [windows] * steps)
        gatherers = self._gatherers

        def read() -> tuple[Array, dict[str, torch.Tensor]]:
            live, extent = self._table._engine.reader().begin_read_live(slots, generations, ticket)
            chosen = np.sort(order[live[order]][:number])
            rows = [part[chosen] for part in (slots, anchors, generations)]
            # Transitions so far: those of a running episode end before its last step.
            transitions = extent[chosen, 0] - (extent[chosen, 2] == 0)
            found = gatherers[0].gather(
                rows[0], self._goal_steps(rows[1], transitions, places[chosen]), rows[2]
            )
            for each in gatherers[1:]:
                found |= each.gather(*rows)
            return chosen, found

        while True:
            ticket = Ticket()
            try:
                return ticket.during(read)
            except LostRowsError as error:  # removed, so they are not live any more
                self._table._engine.remove_lost(error)

    def _goal_steps(self, anchors: Array, transitions: Array, places: Array) -> Array:
        """The step whose next observation has the goal, of each row; arguments [n]."""
        if self._options.strategy == "final":
            return transitions - 1
        first = anchors if self._options.strategy == "future" else np.zeros_like(anchors)
        steps: Array = np.minimum(first + (places * (transitions - first)).astype(np.int64), transitions - 1)
        return steps

    # ---------------------------------------------------------------- rewards

    def _returns(
        self, read: Mapping[str, torch.Tensor], goal: torch.Tensor, device: torch.device
    ) -> torch.Tensor:
        """n-step returns ``[n]`` with other goals, on `device`. The arguments are on the host."""
        ends = read["terminated"]
        counted = read["mask"] & (ends.cumsum(1) - ends.long() == 0)  # [n, n_step]
        goals = goal[:, None].expand(-1, self._n_step, *goal.shape[1:])
        given = [
            read["achieved"][counted],
            goals[counted],
            *(read[name][counted] for name in self._info_columns),
        ]
        place = counted.flatten().nonzero().flatten()
        if self._options.tensors:
            place, *given = self._moved(device, place, *given)
        found = self._rewards(given[0], given[1], dict(zip(self._info_columns, given[2:], strict=True)))
        rewards = torch.zeros(counted.numel(), dtype=torch.float64, device=found.device)
        rewards[place] = found.double()
        factors = torch.full((), self._gamma, dtype=torch.float64, device=found.device) ** torch.arange(
            self._n_step, device=found.device
        )
        total = (rewards.view(counted.shape) * factors).sum(1).float()
        return total if self._options.tensors else self._moved(device, total)[0]

    @property
    def _info_columns(self) -> list[str]:
        return [column for each in self._more.values() for column in each.columns()]

    def _rewards(self, achieved: torch.Tensor, goal: torch.Tensor, info: Mapping[str, Any]) -> torch.Tensor:
        """float32 [N], by the user's function. info: column -> values."""
        given: Any = (achieved, goal, info)
        if not self._options.tensors:  # they are on the host
            given = achieved.numpy(), goal.numpy(), {name: values.numpy() for name, values in info.items()}
        nested = {name: each.build(given[2]) for name, each in self._more.items()}
        found = self._options.compute_reward(given[0], given[1], nested)
        rewards = (found if isinstance(found, torch.Tensor) else torch.as_tensor(found, device="cpu")).to(
            goal.device
        )
        if rewards.shape not in ((len(goal),), (len(goal), 1)):
            raise SchemaError(
                f"compute_reward returned the shape {list(rewards.shape)} for {len(goal)} goals; expected one reward "
                f"for each, [{len(goal)}]. It is called with all of them at once."
            )
        return rewards.flatten().float()


class _Gatherer:
    """Gathers windows of rows into new memory of the host; of the first one also its mask.

    Args:
        table: of this process. windows: name -> window, of steps.
    """

    def __init__(self, table: Table, windows: Mapping[str, Window]) -> None:
        self._rows = RowGather(table, windows)
        columns = (table.schema[source] for source in self._rows.sources)
        self._shapes = {
            name: ((window.length, *column.shape), column.dtype)
            for (name, window), column in zip(windows.items(), columns, strict=True)
        }

    def gather(self, slots: Array, anchors: Array, generations: Array) -> dict[str, torch.Tensor]:
        """Name -> ``[n, length, *shape]``, and ``mask``; arguments int64 [n]. The caller holds a read ticket."""
        found = {
            name: torch.empty((len(slots), *shape), dtype=dtype, device="cpu")
            for name, (shape, dtype) in self._shapes.items()
        }
        outs = list(found.values())
        found["mask"] = torch.empty(outs[0].shape[:2], dtype=torch.bool, device="cpu")
        self._rows.gather(slots, anchors, lambda: generations, outs, {0: found["mask"]})
        return found
