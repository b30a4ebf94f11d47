"""`ReplayBuffer`: transitions in, batches out, in the manner of single-line buffers; a table and a dataset below."""

from __future__ import annotations

import contextlib
import copy
import functools
import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Literal, NoReturn

import numpy as np
import torch

from gear_loader.collection.batches import Batch
from gear_loader.collection.n_step import NStep
from gear_loader.dataset.options import Draws, Gpu
from gear_loader.dataset.replay_dataset import ReplayDataset
from gear_loader.dataset.transforming import transforms_of
from gear_loader.errors import CheckpointError, SchemaError, TableClosedError, TableEmptyError
from gear_loader.replay.adding import Adder, count_of, flags_of
from gear_loader.replay.agents import AgentAdder, Agents
from gear_loader.replay.hindsight import Hindsight, Relabel
from gear_loader.replay.nesting import Nesting, as_array, is_text, on_cpu
from gear_loader.replay.value_adding import ValueAdder, example_of, is_ragged, names_of, transitions_of
from gear_loader.selection.samplers import Sampler, Uniform
from gear_loader.storage.disk import Disk
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.shared_memory import region_path
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import shown
from gear_loader.utils.checks import at_least, check_gamma, finite, one_of
from gear_loader.utils.device_option import check_device
from gear_loader.utils.notices import notice

_DTYPES = {dtype: torch_dtypes()[name] for name, dtype in NUMPY_DTYPES.items()}
_WIDER = {
    np.dtype(np.float64): torch.float32,
    np.dtype(np.uint16): torch.int32,
    np.dtype(np.uint32): torch.int64,
}
_FIELDS = ("obs", "action")
_NUMBERS = ("reward", "terminated", "discount")
_OWN = ("obs", "action", "reward", "next_obs", "terminated", "truncated", "discount", "target", "active")
_LONGEST = 1024
"""Steps after which an episode goes on in another trajectory, so that the oldest can be dropped in pieces."""
_SHORTEST, _MORE = 8, 32  # mean length of an episode for which there is room, and episodes beyond
_SMALL = 64
"""Bytes of a step up to which blocks are of 32 steps, not 16: of each column a block has a multiple of 128 bytes."""
_LEAST_LOOKED_AT, _LEAST_MEAN = 64, 1.5
"""Trajectories from which on `_look` judges them, and the mean length below which it complains."""
_DESCRIPTION = "buffer.json"


class ReplayBuffer:
    """Holds the newest transitions of one or n environments, and samples batches of them::

        buffer = gear.ReplayBuffer(100_000, n_step=3)
        buffer.add(obs, action, reward, next_obs, terminated, truncated)
        batch = buffer.sample(256)

    Observations, actions and other columns are arrays, or dicts, tuples, namedtuples and dataclasses of them; batches
    have the same nesting. In the table nested names are joined by dots: ``obs.camera``. The columns are inferred from
    the first `add`, or from the spaces: Box, Discrete, MultiDiscrete, MultiBinary and Text, and Dict and Tuple of them.
    A text is uint8 ``[max_length]`` in a batch: UTF-8, padded with zeros. Each observation is stored once: `next_obs`
    is read from the following step, and at the end of an episode from its final step.

    A batch is a dict:

    ================ ==============================================================================
    ``obs``          ``[B, *shape]``
    ``action``       ``[B, *shape]``
    ``reward``       float32 ``[B]``: the sum of at most `n_step` discounted rewards
    ``next_obs``     ``[B, *shape]``: the observation to bootstrap from, after these rewards
    ``discount``     float32 ``[B]``: ``gamma ** k`` for k rewards; 0 where the episode terminates within them. A target
                     is ``reward + discount * value(next_obs)``, also at truncation.
    other columns    that `add` was given
    ``relabelled``   with `hindsight`, bool ``[B]``: whether the goal was achieved later; see `Hindsight`
    ================ ==============================================================================

    and ``index``, ``anchor``, ``generation``, which identify its rows, and ``priority_weight``; see `ReplayDataset`.

    With `agents` a row has all agents of a time step, as in PettingZoo's parallel environments. `add` takes dicts by
    agent, without the agents that do not act. In a batch ``obs``, ``action``, ``reward``, ``next_obs`` and ``discount``
    are dicts of all agents, with zeros for those that did not act, and ``active`` is a dict of bool ``[B]``, False for
    these. If one agent is truncated while others go on, the returns of all end there.

    With `payload` values may have any length: texts, bytes, and arrays ``[n, ...]`` of columns in `ragged`, or of
    Sequence spaces. A batch has lists of text, and a `Ragged` of arrays. What follows the last step of an episode is
    then a step of its own, in the place of a transition; and a transition can be drawn when the next one of its
    environment was added, or the episode has ended.

    Each transition can be drawn as soon as `add` has returned. A full buffer drops its oldest trajectory: an episode,
    or a piece of at most 1,024 steps of a longer one; so it holds nearly `capacity` transitions, if episodes have 8
    steps or more on average (else give `mean_length`). With `hindsight` episodes of up to
    ``capacity // (2 * num_envs)`` steps are kept and dropped whole. The logger `gear_loader` says if episodes are
    shorter, as they are if `obs` is not the `next_obs` of the `add` before.

    Args:
        capacity: largest number of transitions, of all environments together.
        n_step: largest number of rewards in a return. gamma: discount of a step.
        sampler: how rows are drawn, by default ``Uniform(unit="step")``: for example
            ``Prioritized(alpha=0.6, beta=0.4, unit="step")``.
        batch_size: rows of a batch in iteration, and by default in `sample`.
        num_envs: number of environments n; by default taken from the first `add`, whose rewards are a number or
            ``[n]``.
        observation_space, action_space: spaces of one environment (Gymnasium). With these and `num_envs`, `table` and
            `dataset` exist at once, else from the first `add` on.
        agents: names of all agents, such as ``env.possible_agents``; the spaces are then dicts by agent too.
        device: device of the batches: ``"auto"`` (a GPU if there is one), or a torch device.
        name: name of the table, by which other processes attach to it; None for private memory. A named table outlives
            its process, even if that is killed, until ``buffer.table.unlink()``.
        if_exists: what to do if a table of this name exists: ``"error"`` raises; ``"attach"`` continues with it, if its
            columns and sizes are the same; ``"replace"`` removes it first.
        disk: a `Disk`, or a directory: the table is written there in the background; see `Table.create`. If a buffer
            was written there by a process that has ended or crashed, this one continues with its data: `Table.recover`.
        seed: seed of all draws.
        hindsight: `Hindsight`: replaces desired goals by achieved ones.
        transform: function that is called with each batch; see `ReplayDataset` and `gear_loader.transforms`.
        payload: bytes of the values of any length, an int or a text such as ``"1GiB"``; see `Memory`. With `hindsight`
            observations and actions may have some, goals and other columns not. Not with `agents`.
        ragged: names of columns of arrays whose first extent varies, such as ``("obs.tokens",)``.
        stack: number of observations that a row shows, such as the last 4 frames: ``obs`` and ``next_obs`` are then
            ``[B, stack, *shape]``, the newest last. `add` takes one observation, which is stored once. At the beginning
            of an episode, and of a piece of a long one, the first observation is repeated. Not with `agents`,
            `hindsight` and `payload`.
        mean_length: steps of an episode on average; by default there is room for as many as have 8. 1 is for
            transitions that do not follow each other (bandits). If episodes are long, a larger number reserves
            less memory (of /dev/shm, too): by default about 3 times the bytes of all steps, with 100 1.2 times.

    **If the process is killed**, another one can continue by ``if_exists="attach"``, with every transition whose `add`
    has returned (with `hindsight`, without `running`: every episode that has ended). With `disk` alone, the transitions
    of the last `Disk.sync_seconds` are lost. Each transition is kept whole or not at all. Episodes that were running
    count as truncated: their last observation is there to bootstrap from; with `payload` their last transition is lost.

    Attributes:
        table: the `Table`. dataset: the `ReplayDataset` that draws the batches, for example for a `DataLoader`. Both
            are None before the columns are known. Until either is first read, added rows may wait in the buffer's own
            memory until they are sampled, which makes `add` faster.

    Raises:
        SchemaError: an invalid option. CheckpointError: the directory of `disk` cannot be used.
    """

    _taken: tuple[str, ...] = _OWN
    """Names that columns cannot have."""
    overlap = 0
    """Steps that the pieces of an episode have in common."""

    def __init__(
        self,
        capacity: int,
        *,
        n_step: int = 1,
        gamma: float = 0.99,
        sampler: Sampler | None = None,
        batch_size: int = 256,
        num_envs: int | None = None,
        observation_space: Any = None,
        action_space: Any = None,
        agents: Iterable[str] | None = None,
        device: str | torch.device = "auto",
        name: str | None = None,
        if_exists: Literal["error", "attach", "replace"] = "error",
        disk: Disk | str | os.PathLike[str] | None = None,
        seed: int = 0,
        hindsight: Hindsight | None = None,
        transform: Any = None,
        payload: int | str | None = None,
        ragged: Iterable[str] = (),
        mean_length: float | None = None,
        stack: int = 1,
    ) -> None:
        self.capacity, self.n_step = at_least("capacity", capacity), at_least("n_step", n_step)
        check_gamma(gamma)
        if sampler is not None and (not isinstance(sampler, Sampler) or sampler.unit != "step"):
            raise SchemaError(
                f"sampler is {shown(sampler)}; expected one of steps, such as gear_loader.Uniform(unit='step') or "
                "gear_loader.Prioritized(unit='step')."
            )
        if (observation_space is None) != (action_space is None):
            raise SchemaError("One of observation_space and action_space was given; expected both, or none.")
        if hindsight is not None and not isinstance(hindsight, Hindsight):
            raise SchemaError(
                f"hindsight is {shown(hindsight)}; expected gear_loader.Hindsight(compute_reward)."
            )
        self.gamma = float(gamma)
        if mean_length is not None and (not finite(mean_length) or mean_length < 1):
            raise SchemaError(f"mean_length is {shown(mean_length)}; expected a number of at least 1.")
        self._mean_length, self.stack = mean_length, at_least("stack", stack)
        if stack > 1 and not (agents is None and hindsight is None and payload is None):
            raise SchemaError(
                f"stack is {stack} with agents, hindsight or payload; expected one of them. Stack in a Window instead."
            )
        if hindsight is not None and agents is not None:
            raise SchemaError("agents and hindsight were given; expected one of them.")
        self._hindsight, self._transforms = hindsight, transforms_of(transform)
        self._memory = Memory() if payload is None else Memory(payload=payload)
        self._ragged = names_of(ragged)
        if payload is None and self._ragged:
            raise SchemaError(
                f"ragged is {self._ragged} without payload; expected the bytes of their values, too."
            )
        if payload is not None and agents is not None:
            raise SchemaError(
                "payload was given with agents, of which each acts when it has an action; expected one of them."
            )
        self._sampler = Uniform(unit="step") if sampler is None else sampler
        self._batch_size = at_least("batch_size", batch_size)
        self._device, self._name, self._seed = device, name, seed
        check_device(device.device if isinstance(device, Gpu) else device)
        self._if_exists = one_of("if_exists", if_exists, ("error", "attach", "replace"))
        if if_exists != "error" and name is None:
            raise SchemaError(f"if_exists is {if_exists!r} without a name; expected both, or none.")
        self._disk = disk if disk is None or isinstance(disk, Disk) else Disk(disk)
        self.num_envs = None if num_envs is None else at_least("num_envs", num_envs)
        self._agents = None if agents is None else Agents(agents)
        # What each agent has one number of; a leaf, if there are no agents.
        self._numbers = {name: Nesting(name) for name in _NUMBERS}
        if self._agents is not None:
            self._numbers = {name: self._agents.nesting(name) for name in (*_NUMBERS, "active")}
        self._nestings: dict[str, Nesting] = {}
        self._waiting: dict[str, Any] | None = None  # a state to load when the columns are known
        self._table: Table | None = None
        self._dataset: ReplayDataset | None = None
        self._adder: Adder | AgentAdder | ValueAdder | None = None
        self._waits = (
            name is None and disk is None
        )  # whether added rows may wait: nobody else reads the table
        self._spaces: dict[str, tuple[Any, tuple[Any, ...]]] | None = None  # columns, told by spaces
        self._asked = 0  # how often batches were asked for, see `_look`
        self._resumes = self._disk is not None and self._disk.exists()
        # What is in memory is newer; and a process may have been killed before it wrote anything but the table.
        self._resumes = self._resumes and not self._is_named() and not self._is_blank()
        if observation_space is not None:
            spaces = {"obs": observation_space, "action": action_space}
            columns: dict[str, tuple[Any, tuple[Any, ...]]] = {}
            for name, space in spaces.items():
                self._nestings[name], found = Nesting.of_space(name, space, ragged=payload is not None)
                columns |= {column: _column(column, *each) for column, each in found.items()}
            if self._agents is not None:
                self._agents.check_first(self._nestings)
            self._spaces = columns
            if self.num_envs is not None and not self._resumes:
                self._make(columns)
        if self._resumes and self._disk is not None:
            self._recover(self._disk)

    # ---------------------------------------------------------------- the table

    @property
    def table(self) -> Table | None:
        """The table, with all that was added; None before its columns are known."""
        self._flush(waits=False)
        return self._table

    @property
    def dataset(self) -> ReplayDataset | None:
        """The dataset that draws from it; None before."""
        self._flush(waits=False)
        return self._dataset

    def _flush(self, *, waits: bool = True) -> None:
        """Store what `add` has left waiting; `waits`: whether later rows may."""
        self._waits &= waits
        if self._adder is not None:
            self._adder.flush()
            self._adder.waits &= waits

    def _make(self, columns: Mapping[str, tuple[Any, tuple[Any, ...]]]) -> None:
        """Create the table of columns without those that every buffer has."""
        finals = set(self._nestings["obs"].columns())
        values = {name for name, each in columns.items() if is_ragged(each)}
        if self._memory.payload is not None and not values:
            raise SchemaError(
                f"payload is {shown(self._memory.payload)}, and no column of {list(columns)} has values of any length; "
                "name it in ragged, or leave payload out."
            )
        finals = set() if values else finals
        schema = {
            name: Column(dtype, shape)
            if name in values
            else Column(dtype, shape, final=name in finals, cast=True)
            for name, (dtype, shape) in columns.items()
        }
        own = {"reward": torch.float32, "terminated": torch.bool, "active": torch.bool}
        for name, nesting in self._numbers.items():
            if name in own:
                schema |= {column: Column(own[name], cast=True) for column in nesting.columns()}
        schema = self._columns(schema)
        if self._hindsight is not None:
            self._hindsight.check(schema)
        envs = self.num_envs or 1
        stored = self.capacity * self._piece // (self._piece - self.overlap)
        mean = self._mean_length or self._piece
        stored += int(stored // min(mean, self._piece)) if values else 0  # each trajectory has one more
        steps = max(stored, 2 * envs * (self._piece + 1 + bool(values)))
        trajectories = int(steps // min(self._mean_length or _SHORTEST, self._piece)) + 2 * envs + _MORE
        table = self._create(
            schema,
            max_steps=steps,
            max_trajectories=trajectories,
            memory=self._memory if values else Memory(),
            block_steps=min(
                16 if sum(each.step_bytes for each in schema.values()) > _SMALL else 32,
                self._unit,
                int(mean) + 1,
            ),
        )
        if self._disk is not None:
            self._describe(self._disk.path)
        self._use(table)

    def _create(self, schema: Mapping[str, Column], **sizes: Any) -> Table:
        given = {"name": self._name, "if_exists": self._if_exists, "disk": self._disk}
        if self._disk is not None and not self._is_named() and self._is_blank():
            with Table.recover(self._disk) as blank:  # see `_is_blank`
                if dict(blank.schema) != dict(schema):
                    raise SchemaError(
                        f"The columns are {list(schema)}; expected {list(blank.schema)}, as of the table in "
                        f"{self._disk.path}, which is empty. Remove the directory, or choose another."
                    )
            return Table.recover(self._disk, name=self._name)
        return Table.create(schema, on_full="evict_oldest", **sizes, **given)

    def _is_named(self) -> bool:
        """Whether the table of this name is there, to be attached to."""
        return self._if_exists == "attach" and os.path.lexists(region_path(str(self._name)))

    def _is_blank(self) -> bool:
        """Whether the directory has an empty table alone, of a process that was killed when it had created it."""
        if self._disk is None or not self._disk.exists() or (Path(self._disk.path) / _DESCRIPTION).exists():
            return False
        with Table.recover(self._disk) as table:
            return table.num_steps == 0

    def _following(self) -> dict[str, list[str]]:
        """End of the names of an agent's columns -> the columns of its observation."""
        obs = self._nestings["obs"]
        if self._agents is None:
            return {"": obs.columns()}
        return {f".{name}": obs.parts[name].columns() for name in self._agents.names}

    def _columns(self, schema: dict[str, Column]) -> dict[str, Column]:
        """All columns of the table, of those of transitions."""
        return schema

    @property
    def _reach(self) -> int:
        """Steps that a row reaches over."""
        return self.n_step

    @property
    def _unit(self) -> int:
        """Steps that are drawn together, of which a block has no more."""
        return self._piece

    @property
    def _piece(self) -> int:
        """Most steps of a trajectory; with goals, which come from the same one, an episode that fits is one."""
        share = self.capacity // (self.num_envs or 1)
        if self._hindsight is not None:
            return max(share // 2, 1)
        return max(min(self.capacity // 8, share // 4, _LONGEST), 1)

    def _use(self, table: Table) -> None:
        """Draw from this table, and write into it."""
        self._dataset = ReplayDataset(
            table,
            batch_size=self._batch_size,
            windows=self._windows(table),
            sampler=self._sampler,
            draws=self._draws(),
            seed=self._seed,
            device=self._device,
            batches_per_epoch=math.inf,
            transform=self._delivery(table),
        )
        self._table = table
        if self._waiting is not None:
            waiting, self._waiting = self._waiting, None
            self._dataset.load_state_dict(waiting)

    def _draws(self) -> Draws:
        return Draws(complete=True if self.stack == 1 else "end")

    def _windows(self, table: Table) -> dict[str, Any]:
        """They are complete where the step that follows the anchor is there: `next_obs`."""
        single = Window(1, squeeze=True)
        returns = [name for kind in ("reward", "terminated") for name in self._numbers[kind].columns()]
        windows: dict[str, Any] = {name: single for name in table.schema if name not in returns}
        for end, columns in self._following().items():
            stacks = {column: self._shown(column, 0) for column in columns if self.stack > 1}
            windows |= stacks
            if self.n_step == 1:
                windows |= {f"next_{column}": self._shown(column, 1) for column in columns}
                windows |= {f"reward{end}": single, f"terminated{end}": single}
            else:
                done, following = f"terminated{end}", stacks or tuple(columns)
                windows[f"target{end}"] = NStep(f"reward{end}", self.n_step, self.gamma, done, following)
        return windows

    def _shown(self, column: str, step: int) -> Window:
        """The window of an observation, or of as many as are stacked, `step` steps after the anchor."""
        if self.stack == 1:
            return Window(1, step, column=column, squeeze=True)
        return Window(self.stack, step + 1 - self.stack, pad="edge", column=column)

    def _delivery(self, table: Table) -> list[Any]:
        """What makes the batches of a user from those that are gathered."""
        # It has no table yet: no circle of references, and small for `DataLoader` workers.
        bare = copy.copy(self)
        bare._waiting = None
        steps: list[Any] = [bare._finish]
        if self._hindsight is not None:
            more = {name: each for name, each in self._nestings.items() if name not in _FIELDS}
            steps.append(Relabel(self._hindsight, table, n_step=self.n_step, gamma=self.gamma, more=more))
        return [*steps, *self._transforms]

    def __len__(self) -> int:
        """Number of transitions that have been stored; with `Hindsight`, of episodes that have ended."""
        self._flush()
        if self._table is None:
            return 0
        # Of values of any length, the last step of each trajectory is what followed.
        return self._table.num_steps - (len(self._table) if self._table.schema.ragged else 0)

    def __repr__(self) -> str:
        with contextlib.suppress(TableClosedError):
            return f"<{type(self).__name__}: {len(self):,} of {self.capacity:,} transitions>"
        return f"<{type(self).__name__}, closed>"

    def __getitem__(self, number: Any) -> NoReturn:
        """A `DataLoader` asks for rows by their numbers: say what it takes.

        Raises:
            TypeError: always.
        """
        raise TypeError(
            f"Row {shown(number)} of a {type(self).__name__} was asked for, which draws its rows itself: sample(n). A "
            "DataLoader takes DataLoader(buffer.dataset, batch_size=None), and buffer.table has the episodes."
        )

    # ---------------------------------------------------------------- adding

    def add(
        self,
        obs: Any,
        action: Any,
        reward: Any,
        next_obs: Any,
        terminated: Any,
        truncated: Any,
        *,
        active: Any = None,
        **more: Any,
    ) -> None:
        """Add one transition of the environment, or of each of n environments.

        Values are numpy arrays, torch tensors on any device, numbers, or objects with ``__array__`` or ``__dlpack__``;
        with n environments the first dimension is n. Float64 is stored as float32. If an environment's `obs` is not its
        last `next_obs`, the episode before counts as truncated there. Waits for a GPU that holds a value.

        Args:
            obs, action, next_obs: the observation, the action, and the observation that followed: at the end of an
                episode its last one, not the first of the next episode.
            reward: number, or [n]. terminated, truncated: bool, or bool [n].
            active: bool [n]: environments that took a step; the rows of others are ignored. By default all but those
                that Gymnasium's vector environments only reset (autoreset mode NEXT_STEP): after an end, `obs` is the
                last `next_obs`, the reward 0, and nothing ends.
            more: other columns, from the first call on.

        With `agents` all arguments are dicts by agent; other columns need not be. An agent acts if it has an action, or
        as `active` says. It needs all arguments, except `next_obs` where it terminates.

        Raises:
            SchemaError: a value does not fit the columns. Nothing was added.
        """
        adder = self._adder
        quick = adder is not None and adder.plain and active is None and not more
        if quick and adder.quick((obs, action, reward, next_obs, terminated, truncated)):  # type: ignore[union-attr]
            return
        values = {"obs": obs, "action": action, **more}
        number = reward if self._agents is None else self._agents.first("reward", reward)
        count, single = count_of(number, self.num_envs)
        if adder is None:
            if self._table is None:
                self._begin(values, count, single, next_obs, (terminated, truncated, active), reward)
            adder = self._adder = self._new_adder(count)
        adder.add(values, reward, next_obs, terminated, truncated, active, single=single)

    def _new_adder(self, count: int) -> Adder | AgentAdder | ValueAdder:
        """What adds to the table, of which `num_envs` is known then."""
        assert self._table is not None
        adder: Adder | AgentAdder | ValueAdder
        if self._table.schema.ragged:
            growing = self._hindsight is None or self._hindsight.running
            adder = ValueAdder(self._table, self._nestings, count, self._piece, growing=growing)
        elif self._agents is not None:
            columns = self._table, self._nestings, count, self._piece
            adder = AgentAdder(self._agents, *columns, waits=self._waits)
        else:
            growing = self._hindsight is None or self._hindsight.running
            adder = Adder(self._table, self._nestings, count, self._piece, waits=self._waits, growing=growing)
        self.num_envs = count
        return adder

    def _begin(
        self,
        values: Mapping[str, Any],
        count: int,
        single: bool,
        next_obs: Any,
        flags: tuple[Any, ...],
        reward: Any = None,
    ) -> None:
        """Create the table of the first row, all of which fits."""
        nestings, columns = self._nestings, self._spaces or {}
        if "priority" in values:
            raise SchemaError(
                "priority was given to add, which has no priorities: new rows get the largest one so far, and "
                "update_priority(batch, priority) sets those of a batch. Give a column of this name another one."
            )
        if not nestings:
            if taken := [n for n in values if (n in self._taken and n not in _FIELDS) or "." in n]:
                raise SchemaError(
                    f"The columns {taken} were given; expected other names, without dots, than {self._taken}."
                )
            ragged = None if self._memory.payload is None else self._ragged
            nestings = {name: Nesting.of(name, value, ragged) for name, value in values.items()}
            if self._agents is not None:
                self._agents.check_first(nestings)
            columns = {}
            for name, value in values.items():
                for column, leaf in nestings[name].leaves(value):
                    if ragged is not None and (column in ragged or is_text(leaf)):
                        text, array = example_of(column, leaf, count, single)
                        columns[column] = text, ()
                        if array is not None:
                            dtype, shape = _column(column, array.dtype, array.shape[1:])
                            columns[column] = dtype, (None, *shape)
                        continue
                    array = as_array(leaf)
                    if not single and array.shape[:1] != (count,):
                        raise SchemaError(
                            f"{column!r} has the shape {list(array.shape)}; expected [{count}, ...], one for each "
                            "environment."
                        )
                    columns[column] = _column(column, array.dtype, array.shape if single else array.shape[1:])
        if self._agents is not None:
            schema = {name: Column(*each) for name, each in columns.items()}
            self._agents.rows(nestings, schema, None, count, single, values, reward, next_obs, *flags)
        else:
            _check_first(nestings["obs"], columns, count, single, next_obs, flags)
        known = self.num_envs
        self._nestings, self.num_envs = nestings, count
        try:
            self._make(columns)
        except BaseException:
            self.num_envs = known
            if self._spaces is None:
                self._nestings = {}
            raise

    def extend(self, transitions: Mapping[str, Any]) -> None:
        """Add several transitions in order; for a buffer with one environment.

        Args:
            transitions: the arguments of `add`, each ``[T, *shape]``; values of any length as a `Ragged`, or a list.

        Raises:
            SchemaError: as `add`. Nothing was added; with values of any length, what comes before stays.
        """
        missing = [
            name
            for name in ("obs", "action", "reward", "next_obs", "terminated", "truncated")
            if name not in transitions
        ]
        if missing:
            raise SchemaError(
                f"The transitions have no {missing}; expected the arguments of add, each [T, *shape]."
            )
        if self._memory.payload is not None or (self._table is not None and self._table.schema.ragged):
            for transition in transitions_of(transitions):
                self.add(**transition)
            return
        given = on_cpu(transitions)
        parts = {
            name: [as_array(leaf) for _, leaf in Nesting.of(name, each).leaves(each)]
            for name, each in given.items()
        }
        lengths = {
            name: {len(array) if array.ndim else -1 for array in arrays} for name, arrays in parts.items()
        }
        if len(found := set().union(*lengths.values())) != 1 or -1 in found:
            shown_lengths = {name: sorted(each) for name, each in lengths.items()}
            raise SchemaError(
                f"The transitions have the lengths {shown_lengths}; expected the same length T of all."
            )
        if self._agents is not None:
            nestings = {name: Nesting.of(name, each) for name, each in given.items()}
            for step in range(found.pop()):
                each = {name: _step(nestings[name], values, step) for name, values in given.items()}
                self.add(**each)
            return
        if (self.num_envs or 1) != 1:
            raise SchemaError(
                f"extend got the transitions of one environment; the buffer has {self.num_envs}. Use add."
            )
        flags = {name: given.pop(name) for name in ("terminated", "truncated")}
        active = given.pop("active", None)
        reward, next_obs = given.pop("reward"), given.pop("next_obs")
        if found == {0}:
            return
        if self._adder is None:
            if self._table is None:
                first = {name: _first(name, each) for name, each in given.items()}
                self._begin(first, 1, True, _first("obs", next_obs), (None, None, None))
            self._adder = self._new_adder(1)
        assert isinstance(self._adder, Adder)
        self._adder.extend(given, reward, next_obs, flags["terminated"], flags["truncated"], active)

    # ---------------------------------------------------------------- sampling

    def sample(self, n: int | None = None) -> Batch:
        """Draw `n` transitions, by default `batch_size`; see `ReplayBuffer`. Does not wait for the GPU.

        Calls of several threads take turns. Do not call `add` at the same time.

        Raises:
            TableEmptyError: there is no transition that can be drawn.
        """
        dataset = self._dataset
        if dataset is None:
            return self._drawn_from().sample(n)
        with dataset._buffers.turn:
            return self._drawn_from().sample(n)

    def __iter__(self) -> Iterator[Batch]:
        """Batches without end, prepared ahead."""
        for batch in self._drawn_from():
            yield batch
            self._flush()

    def _drawn_from(self) -> ReplayDataset:
        self._flush()
        if self._dataset is None or self._table is None or not self._table.num_steps:
            whole = self._hindsight is not None and not self._hindsight.running
            what = "an episode that ends (or give Hindsight running=True)" if whole else "a transition"
            raise TableEmptyError(f"The replay buffer is empty; add {what} before the first sample.")
        self._asked += 1
        if not self._asked & (self._asked - 1):  # 1, 2, 4, 8, ...: it takes longer than a draw
            self._look(self._table)
        return self._dataset

    def _look(self, table: Table) -> None:
        """Log once what makes a buffer hold, or its rows show, less than they could: short episodes."""
        if len(table) < _LEAST_LOOKED_AT:
            return
        stats = table.stats()
        what = f"{type(self).__name__} of {self.capacity:,} steps"
        ends = (
            "An episode also ends where obs is not the next_obs of the add before: give both the same values "
            "(normalize batches, not what is stored; NaN equals nothing)."
        )
        if stats.num_evicted and stats.num_steps < self.capacity / 2:
            notice(
                "short-episodes",
                f"A {what} is full with {stats.num_steps:,}: there is room for {len(table):,} trajectories, which have "
                f"{stats.mean_length:.1f} steps on average. {ends} If they are meant to be so short, give "
                f"mean_length={max(stats.mean_length, 1):.0f}.",
            )
        elif self._reach > 1 and stats.mean_length < _LEAST_MEAN:
            notice(
                "broken-episodes",
                f"The {len(table):,} trajectories of a {what} have {stats.mean_length:.1f} steps on average, where "
                f"rows are to reach over {self._reach}. {ends}",
            )

    def _finish(self, batch: Batch) -> Batch:
        """The batch of a user from that of the dataset."""
        del batch["mask"]
        following: dict[str, Any] = {}
        for end, columns in self._following().items():
            if self.n_step == 1:
                following |= {name: batch.pop(f"next_{name}") for name in columns}
                batch[f"discount{end}"] = torch.where(batch.pop(f"terminated{end}"), *_discounts(self.gamma))
            else:
                target = batch.pop(f"target{end}")
                batch[f"reward{end}"], batch[f"discount{end}"] = target["return"], target["discount"]
                following |= target["next"]
            if self._agents is not None:
                for name in (f"reward{end}", f"discount{end}"):
                    batch[name] = torch.where(batch[f"active{end}"], batch[name], 0.0)
        leaves, nestings = dict(batch), self._nestings
        if self._agents is not None:
            nestings = nestings | {name: self._numbers[name] for name in ("reward", "discount", "active")}
        for name, nesting in nestings.items():
            if not nesting.is_leaf:
                for column in nesting.columns():
                    del batch[column]
                batch[name] = nesting.build(leaves)
        batch["next_obs"] = self._nestings["obs"].build(following)
        return batch

    def update_priority(self, batch: Batch, priority: Any) -> None:
        """Set the priorities of a batch's rows; see `ReplayDataset.update_priority`.

        Args:
            batch: as it was sampled. priority: float32 [B], at least 0.
        """
        self._drawn_from().update_priority(batch, priority)

    # ---------------------------------------------------------------- states and files

    def state_dict(self) -> dict[str, Any]:
        """The state of the draws. (`save` stores the transitions.)"""
        self._flush()
        if self._dataset is None:
            return {} if self._waiting is None else self._waiting
        return self._dataset.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue the draws of a state; in an empty buffer, from the first added transition on."""
        if self._dataset is None:
            self._waiting = dict(state) or None
        elif state:
            self._dataset.load_state_dict(dict(state))

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write all transitions into the directory or to the address `path`; see `Table.save`.

        Raises:
            TableEmptyError: nothing was added. CheckpointError: the directory cannot be written.
        """
        self._flush()
        if self._table is None:
            raise TableEmptyError("The replay buffer is empty; add a transition before the first save.")
        self._table.save(path)
        self._describe(path)

    def _describe(self, path: str | os.PathLike[str]) -> None:
        """Write what the files of the table do not tell into its directory."""
        described = {
            "kind": type(self).__name__,
            "options": self._options(),
            "capacity": self.capacity,
            "num_envs": self.num_envs,
            "agents": None if self._agents is None else self._agents.names,
            "nestings": {name: nesting.described() for name, nesting in self._nestings.items()},
        }
        from gear_loader.checkpoint.opening import replace_file

        replace_file(path, _DESCRIPTION, json.dumps(described).encode())

    def _options(self) -> dict[str, Any]:
        """Options that `save` keeps, for JSON."""
        return {"n_step": self.n_step, "gamma": self.gamma, "stack": self.stack}

    def _recover(self, disk: Disk) -> None:
        """Go on with what a buffer has written into the directory."""
        capacity, envs, agents, nestings, _ = _description(disk.path, type(self).__name__)
        mine = None if self._agents is None else self._agents.names
        if agents != mine:
            raise SchemaError(f"agents is {mine}; expected {agents}, as of the buffer in {disk.path}.")
        if (capacity, envs) != (self.capacity, self.num_envs or envs):
            raise SchemaError(
                f"capacity is {self.capacity} and num_envs {self.num_envs}; expected {capacity} and {envs}, as of the "
                f"buffer in {disk.path}. Give these, or another directory."
            )
        self._nestings, self.num_envs = nestings, envs
        if self._if_exists == "replace" and os.path.lexists(region_path(str(self._name))):
            with Table.attach(str(self._name)) as old:
                old.unlink()
        self._use(Table.recover(disk, name=self._name))

    @classmethod
    def load(cls, path: str | os.PathLike[str], **options: Any) -> ReplayBuffer:
        """A buffer with the transitions that `save` has written.

        Args:
            path: the directory or address.
            options: as for `ReplayBuffer`, without `capacity`, the spaces and `disk`; `n_step` and `gamma` are by
                default those that were saved. Give `sampler` and `batch_size` again.

        Raises:
            CheckpointError: the directory does not hold a buffer.
        """
        capacity, envs, agents, nestings, saved = _description(path, cls.__name__)
        told = {"num_envs": envs, **saved, **options}
        if agents is not None:
            told = {"agents": agents, **told}
        buffer = cls(capacity, **told)
        buffer._nestings = nestings
        buffer._use(Table.load(path, name=options.get("name")))
        return buffer


def _description(
    path: str | os.PathLike[str], wanted: str
) -> tuple[int, int, list[str] | None, dict[str, Nesting], dict[str, Any]]:
    """Capacity, environments, agents, nestings and other options of the buffer in a directory.

    Args:
        wanted: name of its class.

    Raises:
        CheckpointError: it does not hold such a buffer.
    """
    from gear_loader.checkpoint.opening import read_file

    where = f"{os.fspath(path)}/{_DESCRIPTION}"
    try:
        described = json.loads(read_file(path, _DESCRIPTION))
        nestings = {
            name: Nesting.from_description(name, each) for name, each in described["nestings"].items()
        }
        kind, saved = described.get("kind", "ReplayBuffer"), dict(described.get("options", {}))
        capacity, envs, agents = (
            int(described["capacity"]),
            int(described["num_envs"]),
            described.get("agents"),
        )
    except (OSError, ValueError, LookupError, TypeError, AttributeError) as error:
        raise CheckpointError(
            f"{where} cannot be read ({error}); expected what a {wanted} has written."
        ) from error
    if kind != wanted:
        raise CheckpointError(f"{where} is of a {kind}; expected one of a {wanted}. Use {kind}.")
    return capacity, envs, agents, nestings, saved


@functools.cache
def _discounts(gamma: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Of a step that ends an episode, and of another; as tensors, `torch.where` takes half of the time."""
    return torch.tensor(0.0, dtype=torch.float32, device="cpu"), torch.tensor(
        gamma, dtype=torch.float32, device="cpu"
    )


def _first(name: str, values: Any) -> Any:
    """The first of values ``[T, *shape]``, which may be nested."""
    return _step(Nesting.of(name, values), values, 0)


def _step(nesting: Nesting, values: Any, step: int) -> Any:
    """One of values ``[T, *shape]``."""
    return nesting.build({column: as_array(leaf)[step] for column, leaf in nesting.leaves(values)})


def _check_first(
    obs: Nesting,
    columns: Mapping[str, tuple[Any, tuple[Any, ...]]],
    count: int,
    single: bool,
    next_obs: Any,
    flags: tuple[Any, ...],
) -> None:
    """Raise SchemaError unless `next_obs` and the flags of the first row fit."""
    for column, leaf in obs.leaves(next_obs):
        if is_ragged(columns[column]):
            continue
        found, wanted = list(as_array(leaf).shape), columns[column][1]
        wanted = wanted if single else (count, *wanted)
        if found != list(wanted):
            raise SchemaError(f"{'next_' + column!r} has the shape {found}; expected {list(wanted)}.")
    for name, each in zip(("terminated", "truncated", "active"), flags, strict=True):
        if each is not None:
            flags_of(name, each, count)


def _column(name: str, dtype: Any, shape: Any) -> tuple[Any, tuple[Any, ...]]:
    """dtype and shape of a column, for values of a numpy dtype."""
    if dtype is str:
        return dtype, shape
    found = None if dtype is None else np.dtype(dtype)
    known = _WIDER.get(found, _DTYPES.get(found))  # type: ignore[arg-type]
    if known is None or shape is None:
        raise SchemaError(
            f"{name!r} has dtype {dtype} and shape {shape}; expected arrays of {', '.join(map(str, _DTYPES))}."
        )
    return known, tuple(shape)
