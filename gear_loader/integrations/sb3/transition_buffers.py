"""Replay buffers for stable-baselines3 that keep their transitions in a `gear_loader.Table`."""

from __future__ import annotations

import dataclasses
import reprlib
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from gymnasium import spaces
from stable_baselines3.common.buffers import BaseBuffer
from stable_baselines3.common.buffers import DictReplayBuffer as _DictReplayBuffer
from stable_baselines3.common.buffers import ReplayBuffer as _ReplayBuffer
from stable_baselines3.common.preprocessing import get_obs_shape
from stable_baselines3.common.type_aliases import DictReplayBufferSamples, ReplayBufferSamples

from gear_loader.collection.batches import Batch
from gear_loader.collection.buffer_pools import BufferPools
from gear_loader.collection.buffers import Buffers
from gear_loader.collection.chosen import RowGather
from gear_loader.collection.collector import Collector, TableSource, collector_for
from gear_loader.collection.prefetch import Prefetcher
from gear_loader.errors import SchemaError, TableEmptyError
from gear_loader.integrations.sb3.ring import Ring
from gear_loader.storage.dtypes import NUMPY_DTYPES, torch_dtypes
from gear_loader.storage.memory_options import Memory
from gear_loader.storage.readers import Ticket
from gear_loader.storage.schema import Column, Window
from gear_loader.storage.selected_rows import SelectedRows
from gear_loader.storage.table import Table
from gear_loader.utils.arrays import Array, shown
from gear_loader.utils.checks import at_least, check_gamma, flag

_COLUMN_DTYPES = {dtype: torch_dtypes()[name] for name, dtype in NUMPY_DTYPES.items()}
_NOW, _NEXT = "observation", "next_observation"
_BLOCK_STEPS = 16
_LONGEST = 1024  # steps at which an episode goes on in another trajectory, so that the oldest can be removed in pieces
_SPARE = 2  # blocks for short episodes, relative to those of full blocks
_SHORTEST = 8  # mean length of an episode in steps for which there are slots
randint: Any = np.random.randint  # of the global random state, as SB3 draws, so that its seeds hold here
# Attributes that belong to one table.
_PARTS = ("_table", "_ring", "_pools", "_spaces", "_keys", "_reading")


class ReplayBuffer(_ReplayBuffer):
    """Drop-in for `stable_baselines3.common.buffers.ReplayBuffer`, as `replay_buffer_class` of DQN, SAC, TD3 and DDPG.

    From the same seed it samples the same batches as SB3's buffer. Each environment's episodes are trajectories of
    `table` (episodes above 1,023 steps several), with the columns ``observation``, ``next_observation``, ``action``,
    ``reward``, ``terminated`` and ``truncated``. `sample`, and other readers of the table, see a transition as soon as
    `add` has returned. Only this buffer may add to the table or remove from it.

    With `optimize_memory_usage` each observation is stored once: there is no column ``next_observation``, and the last
    next observation is the final step of ``observation``. Unlike in SB3's buffer this works together with
    `handle_timeout_termination`, and the next observation is right at the end of every episode.

    The buffer holds `buffer_size` transitions where episodes have at least 16 steps on average. If shorter ones fill
    the table, the oldest are removed early; `size` tells how many remain.

    Args:
        buffer_size: transitions of all environments together.
        observation_space: a space that is not a Dict. action_space: any that SB3 supports.
        device: device of the batches. A GPU reads them from the table directly.
        n_envs: number of environments.
        optimize_memory_usage: see above.
        handle_timeout_termination: an episode that ended by ``TimeLimit.truncated`` in its info does not count as done
            in batches.
        copy: whether a batch keeps its values while anything refers to it, as in SB3; if False, until two more are
            sampled.
        name: name of the table, by which other processes attach to read it; None for private memory.
        n_steps: steps of the returns in batches, as SB3's NStepReplayBuffer computes them; 1 for single rewards.
        gamma: discount of a step, for `n_steps` above 1. SB3 gives both to a buffer of its own only, so pass them:
            ``replay_buffer_kwargs={"n_steps": 3, "gamma": 0.99}``.

    Attributes:
        table: the table.
        pos: ring position that the next `add` fills. full: whether `buffer_size` calls of `add` have been made.

    Raises:
        SchemaError: a Dict space, or a dtype that columns do not support.
    """

    pos: int
    full: bool
    n_steps: int = 1
    gamma: float = 0.99
    _of_dicts = False

    def __init__(
        self,
        buffer_size: int,
        observation_space: spaces.Space[Any],
        action_space: spaces.Space[Any],
        device: torch.device | str = "auto",
        n_envs: int = 1,
        optimize_memory_usage: bool = False,
        handle_timeout_termination: bool = True,
        *,
        copy: bool = True,
        name: str | None = None,
        n_steps: int = 1,
        gamma: float = 0.99,
    ) -> None:
        self.n_steps = at_least("n_steps", n_steps)
        buffer_size, n_envs = at_least("buffer_size", buffer_size), at_least("n_envs", n_envs)
        self.optimize_memory_usage = flag("optimize_memory_usage", optimize_memory_usage)
        self.handle_timeout_termination = flag("handle_timeout_termination", handle_timeout_termination)
        self.copy = flag("copy", copy)
        check_gamma(gamma)
        self.gamma = gamma
        if isinstance(observation_space, spaces.Dict) != self._of_dicts:
            expected = (
                "a Dict; use ReplayBuffer"
                if self._of_dicts
                else "one that is not a Dict; use DictReplayBuffer"
            )
            raise SchemaError(
                f"The observation space {observation_space} was received; {type(self).__name__} expected {expected}."
            )
        # Not SB3's own constructor, which allocates its arrays.
        try:
            BaseBuffer.__init__(self, buffer_size, observation_space, action_space, device, n_envs=n_envs)
        except Exception as error:
            raise SchemaError(
                f"The spaces {shown(observation_space)} and {shown(action_space)} on device {shown(device)} were "
                f"refused by stable-baselines3: {reprlib.repr(str(error))}. Expected spaces and a device that it takes."
            ) from error
        self.buffer_size = max(buffer_size // n_envs, 1)
        self._make_table(name)

    # ---------------------------------------------------------------- the table

    @property
    def table(self) -> Table:
        """The table, with all that was added."""
        self._ring.publish()
        return self._table

    @property
    def _added(self) -> int:
        """Calls of `add`."""
        return self._ring.calls

    def _make_table(self, name: str | None) -> None:
        """Create the table, and everything that refers to it."""
        action_dtype = np.dtype(self._maybe_cast_dtype(self.action_space.dtype))
        # Parts of an observation by the names of their columns; of a plain one the only part.
        self._spaces = (
            {f"{_NOW}.{key}": space for key, space in self.observation_space.spaces.items()}
            if isinstance(self.observation_space, spaces.Dict)
            else {_NOW: self.observation_space}
        )
        schema = {key: _column(key, space.dtype, get_obs_shape(space)) for key, space in self._spaces.items()}
        following = {f"next_{key}": column for key, column in schema.items()}
        if self.optimize_memory_usage:
            schema = {key: dataclasses.replace(column, final=True) for key, column in schema.items()}
        schema |= {"action": _column("action", action_dtype, (self.action_dim,))}
        schema |= {"reward": Column(torch.float32), "terminated": Column(torch.bool)}
        schema["truncated"] = Column(torch.bool)
        if not self.optimize_memory_usage:
            schema |= following
        piece = min(_LONGEST, self.buffer_size // 8 // _BLOCK_STEPS * _BLOCK_STEPS)
        longest = max(piece, _BLOCK_STEPS) - 1  # of a trajectory that fills its blocks, with a final step
        steps = self.n_envs * (self.buffer_size + 2 * longest + 1)
        trajectories = steps // _SHORTEST + 2 * self.n_envs
        blocks = int(_SPARE * steps / _BLOCK_STEPS) + self.n_envs * (longest // _BLOCK_STEPS + 2)
        self._table = Table.create(
            schema,
            max_steps=steps,
            max_trajectories=trajectories,
            on_full="evict_oldest",
            memory=Memory(max_blocks=blocks),
            block_steps=_BLOCK_STEPS,
            name=name,
        )
        self._pools = BufferPools()
        self._reading: RowGather | None = None
        self._ring = ring = Ring(
            self._table, self.buffer_size, self.n_envs, cut=longest, visible=name is not None
        )
        self._any_ended = False
        self._keys = [key[len(_NOW) + 1 :] for key in self._spaces]
        n = self.n_envs
        now = [
            (key, False, (n,) if isinstance(space, spaces.Discrete) else (n, *schema[key].shape))
            for key, space in self._spaces.items()
        ]
        after = [
            (key, True, shape) if self.optimize_memory_usage else (f"next_{key}", False, shape)
            for key, _, shape in now
        ]
        action = (n,) if isinstance(self.action_space, spaces.Discrete) else (n, self.action_dim)
        ring.expect([*now, *after, ("action", False, action), ("reward", False, (n,))])

    # ---------------------------------------------------------------- adding

    @property
    def _reads_infos(self) -> bool:
        """Whether `add` needs infos of each environment."""
        return bool(self.handle_timeout_termination)

    def add(
        self,
        obs: Any,
        next_obs: Any,
        action: Array,
        reward: Array,
        done: Array,
        infos: list[dict[str, Any]] | dict[str, Any],
    ) -> None:
        """Add one transition of each environment, as SB3's buffer does; `sample` may draw it from now on.

        Args:
            infos: read with `handle_timeout_termination` only, a list of a dict for each environment; without it also
                what Gymnasium's vector environments return.

        Raises:
            SchemaError: a value does not fit, or `infos` is one mapping where it is read. Nothing was added.
        """
        if isinstance(infos, dict) and self._reads_infos:
            raise SchemaError(
                f"infos is a dict with the keys {list(infos)}; expected a list with one dict for each environment, as "
                "SB3's VecEnv returns it. Of a Gymnasium vector environment: "
                "[{'TimeLimit.truncated': bool(t)} for t in truncations], or make the buffer with "
                "handle_timeout_termination=False, which reads no infos, and give terminations as done."
            )
        ring = self._ring
        try:
            both = (obs, next_obs)
            parts = [each[key] for each in both for key in self._keys] if self._of_dicts else both
            converts = not ring.read((*parts, action, reward, done))
            if converts:
                self._convert(parts, action, reward, done)
            if self._any_ended or self.n_steps > 1 or 1 in ring.ended.tobytes():
                self._note_ends(infos)
                converts |= self.n_steps > 1
            if converts:
                ring.mark_ends()
        except Exception as error:
            values = {"obs": obs, "next_obs": next_obs, "action": action, "reward": reward, "done": done}
            found = ", ".join(f"{name} {_kind_of(value)}" for name, value in values.items())
            raise SchemaError(
                f"The transition does not fit: {found}, infos {type(infos).__name__}; expected arrays "
                f"[{self.n_envs}, ...] of numbers and a list of {self.n_envs} dicts. Nothing was added: "
                f"{reprlib.repr(str(error))}"
            ) from error
        ring.append()
        self.pos += 1
        if self.pos == self.buffer_size:
            self.full = True
            self.pos = 0

    def _convert(self, parts: Sequence[Any], action: Array, reward: Array, done: Array) -> None:
        """Convert a row: the parts of an observation, of the next one, and the others."""
        rows = self._ring.rows
        after = self._ring.following if self.optimize_memory_usage else rows
        names = list(self._spaces) if self.optimize_memory_usage else [f"next_{key}" for key in self._spaces]
        into = [*(rows[key] for key in self._spaces), *(after[key] for key in names)]
        for memory, part, space in zip(into, parts, 2 * list(self._spaces.values()), strict=True):
            # Of a Discrete space [n_envs] -> [n_envs, 1].
            memory[...] = part.reshape(memory.shape) if isinstance(space, spaces.Discrete) else part
        rows["action"][...] = action.reshape(rows["action"].shape)
        rows["reward"][...] = reward
        self._ring.ended[...] = done

    def _note_ends(self, infos: Any) -> None:
        """Set the columns ``terminated`` and ``truncated``, which are zeros while no episode ends."""
        rows, ended = self._ring.rows, self._ring.ended
        truncated = rows["truncated"]
        self._any_ended = True  # also after an error, which leaves them set in part
        truncated.fill(False)
        if self.handle_timeout_termination and self.n_steps > 1:
            # A return ends here, as in SB3's buffer, though the environment goes on.
            truncated[...] = np.array([info.get("TimeLimit.truncated", False) for info in infos])
            ended |= truncated
        elif self.handle_timeout_termination:
            for member in ended.nonzero()[0].tolist():
                truncated[member] = infos[member].get("TimeLimit.truncated", False)
        np.greater(ended, truncated, out=rows["terminated"])
        self._any_ended = 1 in ended.tobytes()

    # ---------------------------------------------------------------- contents

    def reset(self) -> None:
        """Remove all transitions."""
        super().reset()
        self._ring.forget()

    def size(self) -> int:
        """Transitions of each environment that `sample` can draw."""
        return self._added - self._ring.first()

    def __getstate__(self) -> dict[str, Any]:
        """Everything, with the transitions as arrays. A copy's table has no name."""
        pieces = self._ring.pieces()
        rows = [self._rows(slot, steps) for _, _, slot, steps in pieces]
        state = {key: value for key, value in self.__dict__.items() if key not in _PARTS}
        state["_added"] = self._added
        state["lasts"], state["members"] = [piece[0] for piece in pieces], [piece[1] for piece in pieces]
        state["lengths"] = [len(piece["reward"]) for piece in rows]
        state["columns"] = {
            name: np.concatenate([piece[name] for piece in rows]) for name in self._table.schema if rows
        }
        return state

    def __setstate__(self, state: dict[str, Any]) -> None:
        saved = ("lasts", "members", "lengths", "columns", "_added", "_first")
        lasts, members, lengths, columns, added = (state[key] for key in saved[:-1])
        self.__dict__.update({key: value for key, value in state.items() if key not in saved})
        self._make_table(None)
        self._ring.calls = added
        following, ends = self._ring.following, np.cumsum(lengths)
        for last, member, end, length in zip(lasts, members, ends, lengths, strict=True):
            steps = length - self.optimize_memory_usage
            rows = {name: each[end - length : end - length + steps] for name, each in columns.items()}
            final = {name: columns[name][end - 1] for name in following} or None
            self._ring.put(last, member, self._table.add(rows, final=final), steps)

    def _rows(self, slot: int, steps: int) -> dict[str, Array]:
        """The first steps of a trajectory and, with `optimize_memory_usage`, one of the values that follow."""
        rows = {name: each.numpy() for name, each in self._table[slot].items()}
        if self.optimize_memory_usage:
            final = {name: each.numpy() for name, each in (self._table.final(slot) or {}).items()}
            for name, each in rows.items():
                last = final.get(name, np.zeros_like(each[0]))
                rows[name] = np.concatenate((each, last[None]))
            steps += 1
        return {name: each[:steps] for name, each in rows.items()}

    @property
    def observations(self) -> Any:
        """A copy of all observations, as SB3's buffer holds them: ``[buffer_size, n_envs, *shape]``, else zeros."""
        return self._observed({name: self._all(name) for name in self._spaces})

    @property
    def next_observations(self) -> Any:
        """A copy, as `observations`."""
        return self._observed({name: self._all(f"next_{name}") for name in self._spaces})

    @property
    def actions(self) -> Array:
        """A copy, as `observations`: ``[buffer_size, n_envs, action_dim]``."""
        return self._all("action")

    @property
    def rewards(self) -> Array:
        """A copy, as `observations`: float32 ``[buffer_size, n_envs]``."""
        return self._all("reward")

    @property
    def dones(self) -> Array:
        """A copy, as `observations`: float32 ``[buffer_size, n_envs]``, 1 where an episode ended in any way."""
        return np.maximum(self._all("terminated"), self._all("truncated")).astype(np.float32)

    @property
    def timeouts(self) -> Array:
        """A copy, as `observations`: float32 ``[buffer_size, n_envs]``, 1 where an episode ended by its time limit."""
        return self._all("truncated").astype(np.float32)

    def _all(self, name: str) -> Array:
        size = self.size()
        window = self._windows().get(name, Window(1, squeeze=True))
        column = self._table.schema[window.column or name]
        out = np.zeros((self.buffer_size, self.n_envs, *column.shape), dtype=column.numpy_dtype)
        rows = np.repeat(np.arange(self._added - size, self._added) % self.buffer_size, self.n_envs)
        members = np.tile(np.arange(self.n_envs), size)
        if size:
            out[rows, members] = self._host_rows({name: window}, rows, members)[0]
        return out

    def _host_rows(self, windows: dict[str, Window], rows: Array, members: Array) -> list[Array]:
        """Values of transitions, also of those in open trajectories, which no one else reads: ``[n, *shape]`` each."""
        if self._reading is None or self._reading.windows != windows:
            self._reading = RowGather(self._table, windows)
        drawn = self._ring.find(rows, members)
        columns = [self._table.schema[source] for source in self._reading.sources]
        outs = [torch.empty(len(rows), *column.shape, dtype=column.dtype, device="cpu") for column in columns]
        self._reading.gather(drawn.slots, drawn.anchors, lambda: drawn.generations, outs)
        return [out.numpy() for out in outs]

    # ---------------------------------------------------------------- sampling

    def sample(self, batch_size: int, env: Any = None) -> Any:
        """Draw transitions uniformly with replacement, by numpy's global random state, as SB3's buffer does.

        Args:
            batch_size: number of transitions B.
            env: a `VecNormalize`, which then normalises observations and rewards; or None.

        Returns:
            observations and next_observations ``[B, *shape]``, actions ``[B, action_dim]``, dones and rewards
            float32 ``[B, 1]``, on the buffer's device. With `n_steps` above 1 rewards are n-step returns, dones and
            next_observations are of their last steps, and there are discounts ``[B, 1]``.

        Raises:
            TableEmptyError: nothing has been added.
        """
        batch_size = at_least("batch_size", batch_size)
        if env is not None and not hasattr(env, "normalize_obs"):
            raise SchemaError(f"env is {shown(env)}; expected a VecNormalize, or None.")
        size = self.size()
        if size == 0:
            raise TableEmptyError("The replay buffer is empty; add a transition before the first sample.")
        if size < self.buffer_size:
            rows = randint(self._added - size, self._added, size=batch_size) % self.buffer_size
        else:
            rows = randint(0, size, size=batch_size)
        return self._get_samples(rows, env)

    def _get_samples(self, batch_inds: Array, env: Any = None) -> Any:
        count = len(batch_inds)
        # With one environment SB3's draw takes nothing from the random state.
        members = randint(0, self.n_envs, size=count) if self.n_envs > 1 else np.zeros(count, np.int64)
        if self.n_steps > 1:
            return self._n_step_samples(batch_inds, members, env)
        batch = self._gather(batch_inds, members)
        reward = batch["reward"].reshape(-1, 1)
        if env is not None:
            reward = self.to_torch(self._normalize_reward(reward.cpu().numpy(), env))
        every = slice(None)
        return self._as_samples(batch, every, every, reward, env)

    def _as_samples(
        self, batch: Batch, firsts: slice, lasts: slice, reward: torch.Tensor, env: Any, **more: Any
    ) -> Any:
        """SB3's named tuple: what begins a transition from some rows of a batch, and what ends it from others."""
        now = self._observed({name: batch[name][firsts] for name in self._spaces})
        following = self._observed({name: batch[f"next_{name}"][lasts] for name in self._spaces})
        if env is not None:
            now, following = self._normalized(now, env), self._normalized(following, env)
        dones = batch["terminated"][lasts].to(torch.float32).reshape(-1, 1)
        kind = DictReplayBufferSamples if self._of_dicts else ReplayBufferSamples
        return kind(now, batch["action"][firsts], following, dones, reward, **more)

    def _observed(self, parts: dict[str, Any]) -> Any:
        """An observation as SB3 has it: a dict by the keys of its space, or the only part."""
        return (
            {name[len(_NOW) + 1 :]: part for name, part in parts.items()} if self._of_dicts else parts[_NOW]
        )

    def _n_step_samples(self, rows: Array, members: Array, env: Any) -> Any:
        """As SB3's NStepReplayBuffer: returns up to the end of an episode, or to the newest transition."""
        count, steps = len(rows), np.arange(self.n_steps)
        newest = (self.pos - 1 - rows) % self.buffer_size  # calls of `add` after each row
        places = (rows[:, None] + np.minimum(steps, newest[:, None])) % self.buffer_size
        outcome = self._outcome(places.reshape(-1), np.repeat(members, self.n_steps))
        reward, terminated, truncated = (part.reshape(count, -1) for part in outcome)
        ended = terminated | truncated | (steps >= newest[:, None])
        last = np.where(ended.any(1), ended.argmax(1), self.n_steps - 1)
        counted = steps <= last[:, None]
        discounts = self.gamma ** steps.astype(np.float32)
        returns = (self._normalize_reward(reward, env) * discounts * counted).sum(1, keepdims=True)
        ends = (rows + last) % self.buffer_size
        batch = self._gather(np.concatenate((rows, ends)), np.concatenate((members, members)))
        return self._as_samples(
            batch,
            slice(count),
            slice(count, None),
            self.to_torch(returns.astype(np.float32)),
            env,
            discounts=self.to_torch(self.gamma ** (last[:, None] + 1).astype(np.float32)),
        )

    def _outcome(self, rows: Array, members: Array) -> tuple[Array, Array, Array]:
        """reward, terminated and truncated of transitions, [n] each, on the host."""
        windows = {key: Window(1, squeeze=True) for key in ("reward", "terminated", "truncated")}
        reward, terminated, truncated = self._host_rows(windows, rows, members)
        return reward, terminated, truncated

    def _normalized(self, observation: Any, env: Any) -> Any:
        if self._of_dicts:
            host = {key: part.cpu().numpy() for key, part in observation.items()}
            return {key: self.to_torch(part) for key, part in self._normalize_obs(host, env).items()}
        return self.to_torch(self._normalize_obs(observation.cpu().numpy(), env))

    def _windows(self) -> dict[str, Window]:
        windows = {key: Window(1, squeeze=True) for key in self._table.schema if key != "truncated"}
        if self.optimize_memory_usage:
            for name in self._spaces:
                windows[f"next_{name}"] = Window(1, 1, column=name, squeeze=True)
        return windows

    def _gather(self, rows: Array, members: Array) -> Batch:
        """The transitions of calls `rows` of `add` (modulo the buffer's size) and environments `members`."""
        count = len(rows)
        options = {"keep": 2, "copy": None if self.copy else False}
        prefetcher = self._pools.single(count, count, self._collector, **options)
        if prefetcher.collector.device != self.device:
            self._pools = BufferPools()
            prefetcher = self._pools.single(count, count, self._collector, **options)
        drawn = self._ring.find(rows, members)
        return prefetcher.one(lambda buffers, item: self._fill(prefetcher, buffers, item), drawn)

    def _collector(self, size: int) -> Collector:
        device = torch.device(self.device)
        return collector_for(TableSource(self._table), self._windows(), batch_size=size, device=device)

    @staticmethod
    def _fill(prefetcher: Prefetcher, buffers: Buffers, rows: SelectedRows) -> int:
        ticket = Ticket()
        collector = prefetcher.collector
        try:
            if collector.zero_copy:  # the GPU reads the table after this returns
                collector.source.tables[0]._engine.reader().begin_read(ticket)
            collector.gather(buffers, rows)
            prefetcher.release(buffers, ticket)
        except BaseException:
            prefetcher.abandon([buffers], ticket.end, ticket)
            raise
        return len(rows)


class DictReplayBuffer(ReplayBuffer, _DictReplayBuffer):
    """Drop-in for `stable_baselines3.common.buffers.DictReplayBuffer`, of environments with Dict observations.

    As `ReplayBuffer`, with a column ``observation.<key>`` for each key of the observation space, and
    ``next_observation.<key>``. Batches hold observations as dicts by key. Unlike SB3's buffer it takes
    `optimize_memory_usage`, and `n_steps` above 1.

    Raises:
        SchemaError: a space that is not a Dict, or a dtype that columns do not support.
    """

    _of_dicts = True


class NStepReplayBuffer(ReplayBuffer):
    """Drop-in for `stable_baselines3.common.buffers.NStepReplayBuffer`: a `ReplayBuffer` with `n_steps` of 3.

    An info with ``TimeLimit.truncated`` ends returns also where ``done`` is False, as in SB3's buffer. Unlike SB3's it
    takes `optimize_memory_usage`.
    """

    def __init__(self, *args: Any, n_steps: int = 3, gamma: float = 0.99, **kwargs: Any) -> None:
        super().__init__(*args, n_steps=n_steps, gamma=gamma, **kwargs)


def _kind_of(value: Any) -> str:
    """Type of a value, and shape of an array, for error messages."""
    shape = f" {list(value.shape)}" if isinstance(value, np.ndarray) else ""
    return type(value).__name__ + shape


def _column(what: str, dtype: Any, shape: tuple[int, ...]) -> Column:
    known = _COLUMN_DTYPES.get(np.dtype(dtype))
    if known is None:
        raise SchemaError(
            f"The {what} space has dtype {dtype}; expected one of {', '.join(map(str, _COLUMN_DTYPES))}."
        )
    return Column(known, tuple(shape))
